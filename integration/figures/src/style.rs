//! Colours and text of pictures. A picture has two colour schemes. It needs no other font than that of the viewer.

use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, IntoFont, RGBColor, TextStyle};

pub(super) const GROUND: RGBColor = RGBColor(0xFF, 0xFF, 0xFF);
pub(super) const INK: RGBColor = RGBColor(0x24, 0x29, 0x2F);
pub(super) const MUTED: RGBColor = RGBColor(0x57, 0x60, 0x6A);
pub(super) const GRID: RGBColor = RGBColor(0xD0, 0xD7, 0xDE);

/// Colours of the light scheme, each with the colour that replaces it in the dark scheme.
const DARK: [(RGBColor, RGBColor); 4] = [
    (GROUND, RGBColor(0x0D, 0x11, 0x17)),
    (INK, RGBColor(0xE6, 0xED, 0xF3)),
    (MUTED, RGBColor(0x9D, 0xA7, 0xB1)),
    (GRID, RGBColor(0x30, 0x36, 0x3D)),
];

/// Colours of series. They are visible in both schemes, and most people who confuse red and green can distinguish them.
const SERIES: [RGBColor; 6] = [
    RGBColor(0x3B, 0x82, 0xC4),
    RGBColor(0xDB, 0x7B, 0x14),
    RGBColor(0x2E, 0x9E, 0x76),
    RGBColor(0xB0, 0x6B, 0xB8),
    RGBColor(0xA8, 0x8B, 0x2C),
    RGBColor(0x80, 0x8A, 0x94),
];

/// Height of small text, in pixels.
pub(super) const SMALL: i32 = 12;
/// Height of a heading.
pub(super) const LARGE: i32 = 17;

/// Returns the colour of the series with this number.
pub(super) fn series_colour(number: usize) -> RGBColor {
    SERIES[number % SERIES.len()]
}

/// Returns the style of text of this height and colour. `anchor` is the horizontal position of the anchor; vertically, it
/// is in the middle.
pub(super) fn text(height: i32, colour: RGBColor, anchor: HPos) -> TextStyle<'static> {
    // The SVG library divides sizes by this number.
    let size = f64::from(height) * 1.24;
    let font = ("sans-serif", size).into_font();
    TextStyle {
        color: colour.to_backend_color(),
        pos: Pos::new(anchor, VPos::Center),
        ..TextStyle::from(font)
    }
}

/// Returns an estimate of the width of a text, since fonts are not measured.
pub(super) fn width(text: &str, height: i32) -> i32 {
    let characters = i32::try_from(text.chars().count()).unwrap_or(i32::MAX);
    characters.saturating_mul(height).saturating_mul(14) / 25
}

/// Returns the CSS of the dark scheme.
pub(super) fn dark_scheme_css() -> String {
    let colour = |colour: RGBColor| format!("#{:02X}{:02X}{:02X}", colour.0, colour.1, colour.2);
    let mut sheet = "@media (prefers-color-scheme: dark) {\n".to_owned();
    for (light, dark) in DARK {
        let (light, dark) = (colour(light), colour(dark));
        for property in ["fill", "stroke"] {
            sheet += &format!("[{property}=\"{light}\"] {{ {property}: {dark} }}\n");
        }
    }
    sheet + "}\n"
}

/// Formats a number with at most four significant digits, and with a letter for thousands, millions and so on.
pub(super) fn number(value: f64) -> String {
    let (scaled, letter) = match value.abs() {
        large if large >= 1e9 => (value / 1e9, " G"),
        large if large >= 1e6 => (value / 1e6, " M"),
        large if large >= 1e4 => (value / 1e3, " k"),
        _ => (value, ""),
    };
    if scaled == 0.0 {
        return "0".to_owned();
    }
    let digits_before = scaled.abs().log10().floor() as i32 + 1;
    let decimals = usize::try_from(4 - digits_before).unwrap_or(0);
    let text = format!("{scaled:.decimals$}");
    let text = match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.'),
        false => &text,
    };
    format!("{text}{letter}")
}

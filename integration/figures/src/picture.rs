//! Layout of a figure: a heading, the panels one below the other, and the origin of the figure.

use figure_data::{FigureData, FigurePanel, FigurePoint, PlotKind};
use plotters::backend::SVGBackend;
use plotters::coord::Shift;
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::element::{Circle, PathElement, Rectangle, Text};
use plotters::style::text_anchor::HPos;
use plotters::style::{Color, RGBColor};
use thiserror::Error;

use crate::scale::ValueScale;
use crate::style::{self, GRID, GROUND, INK, LARGE, MUTED, SMALL};

const WIDTH: i32 = 860;
const MARGIN: i32 = 16;
/// Height of a line of text, in pixels.
const LINE: i32 = 20;
/// Height of a bar, and of the space around the bars of one label.
const BAR: i32 = 14;
const BETWEEN_GROUPS: i32 = 10;
/// Width of the space for values, beside the longest bar.
const VALUES: i32 = 110;
/// Width of the space for marks, beside a plot of lines.
const MARKS: i32 = 70;
/// Height of a plot of lines.
const LINES: i32 = 240;

/// Error of drawing a picture.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct DrawError(String);

/// Area of a picture, in pixels.
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), DrawError>;

/// Returns the picture of a figure as SVG, with colours for light and for dark schemes.
///
/// # Errors
/// A value does not fit.
pub fn svg(figure: &FigureData) -> Result<String, DrawError> {
    let panels: Vec<PanelLayout<'_>> = figure
        .panels
        .iter()
        .filter(|panel| panel.plot != PlotKind::None)
        .map(PanelLayout::new)
        .collect();
    let height: i32 = panels.iter().map(PanelLayout::height).sum();
    let commit: String = figure.commit.chars().take(12).collect();
    let provenance = format!("{}; {}; commit {commit}", figure.machine, figure.date);
    let mut provenance = wrap(&provenance);
    provenance.extend(wrap(&figure.command));
    let height = 2 * MARGIN + LINE + height + i32::try_from(provenance.len()).unwrap_or(0) * LINE;
    let mut text = String::new();
    {
        let size = (WIDTH.unsigned_abs(), height.unsigned_abs());
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        area.fill(&GROUND).map_err(failed)?;
        let mut y = MARGIN + LINE / 2;
        write(&area, &figure.title, (MARGIN, y), LARGE, INK, HPos::Left)?;
        y += LINE / 2;
        for panel in &panels {
            panel.draw(&area, y)?;
            y += panel.height();
        }
        for line in &provenance {
            y += LINE;
            write(
                &area,
                line,
                (MARGIN, y - LINE / 2),
                SMALL,
                MUTED,
                HPos::Left,
            )?;
        }
        area.present().map_err(failed)?;
    }
    // The style is inserted behind the opening tag, which the library writes first.
    let at = text.find('>').map_or(0, |at| at + 1);
    text.insert_str(
        at,
        &format!("\n<style>\n{}</style>", style::dark_scheme_css()),
    );
    Ok(text)
}

/// A panel, and properties of it that are computed before it is drawn.
struct PanelLayout<'a> {
    data: &'a FigurePanel,
    scale: ValueScale,
    /// Labels of all points, in the order of their first appearance.
    labels: Vec<&'a str>,
    /// Legend: rows of names, each with the number of its series.
    legend: Vec<Vec<(&'a str, usize)>>,
}

impl<'a> PanelLayout<'a> {
    fn new(data: &'a FigurePanel) -> Self {
        let mut labels: Vec<&str> = Vec::new();
        for point in data.series.iter().flat_map(|series| &series.points) {
            if !labels.contains(&point.label.as_str()) {
                labels.push(&point.label);
            }
        }
        Self {
            data,
            scale: ValueScale::for_panel(data),
            labels,
            legend: legend(data),
        }
    }

    fn height(&self) -> i32 {
        let plot = match self.data.plot {
            PlotKind::Bars => (0..self.labels.len())
                .map(|group| self.group_height(group))
                .sum(),
            PlotKind::Lines => LINES,
            PlotKind::None => 0,
        };
        // Sum of the heights of the quantity, the legend, the plot, its marks, and some space.
        LINE + self.legend_height() + plot + 2 * LINE
    }

    fn legend_height(&self) -> i32 {
        i32::try_from(self.legend.len()).unwrap_or(0) * LINE
    }

    /// Returns the points with the label number `group`, each with the number of its series.
    fn group(&self, group: usize) -> impl Iterator<Item = (usize, &FigurePoint)> {
        let label = self.labels[group];
        let series = self.data.series.iter().enumerate();
        series.filter_map(move |(number, series)| {
            let point = series.points.iter().find(|point| point.label == label);
            point.map(|point| (number, point))
        })
    }

    fn group_height(&self, group: usize) -> i32 {
        let bars = i32::try_from(self.group(group).count()).unwrap_or(0);
        bars * BAR + BETWEEN_GROUPS
    }

    fn draw(&self, area: &Area<'_>, top: i32) -> Drawn {
        let mut y = top + LINE / 2;
        let FigurePanel { measured, unit, .. } = self.data;
        let log = if self.data.log { ", logarithmic" } else { "" };
        let quantity = format!("{measured} ({unit}{log})");
        write(area, &quantity, (MARGIN, y), SMALL, MUTED, HPos::Left)?;
        for row in &self.legend {
            y += LINE;
            let mut x = MARGIN;
            for (name, number) in row {
                let swatch = [(x, y - 5), (x + 10, y + 5)];
                let style = style::series_colour(*number).filled();
                area.draw(&Rectangle::new(swatch, style)).map_err(failed)?;
                write(area, name, (x + 16, y), SMALL, INK, HPos::Left)?;
                x += legend_width(name);
            }
        }
        let top = top + LINE + self.legend_height();
        match self.data.plot {
            PlotKind::Bars => self.draw_bars(area, top),
            PlotKind::Lines => self.draw_lines(area, top),
            PlotKind::None => Ok(()),
        }
    }

    fn draw_bars(&self, area: &Area<'_>, top: i32) -> Drawn {
        let widest = self.labels.iter().map(|label| style::width(label, SMALL));
        let left = MARGIN + widest.max().unwrap_or(0).min(WIDTH / 2) + 8;
        let pixels = (left, WIDTH - MARGIN - VALUES);
        let bottom = top
            + (0..self.labels.len())
                .map(|group| self.group_height(group))
                .sum::<i32>();
        for mark in self.scale.marks() {
            let x = self.scale.map(mark, pixels);
            line(area, &[(x, top), (x, bottom)], GRID, 1)?;
            let label = style::number(mark);
            write(
                area,
                &label,
                (x, bottom + LINE / 2),
                SMALL,
                MUTED,
                HPos::Center,
            )?;
        }
        let base = self.scale.map(self.scale.base(), pixels);
        let mut y = top;
        for group in 0..self.labels.len() {
            let middle = y + self.group_height(group) / 2;
            write(
                area,
                self.labels[group],
                (left - 8, middle),
                SMALL,
                INK,
                HPos::Right,
            )?;
            y += BETWEEN_GROUPS / 2;
            for (number, point) in self.group(group) {
                let (least, most) = range(point)?;
                let [least, most] = [least, most].map(|value| self.scale.map(value, pixels));
                let (from, to) = match point.value {
                    Some(value) => (base, self.scale.map(value, pixels)),
                    None => (least, most),
                };
                // A bar has at least one pixel, so that the smallest one is visible.
                let corners = [
                    (from.min(to), y + 1),
                    (from.max(to).max(from.min(to) + 1), y + BAR - 1),
                ];
                let style = style::series_colour(number).filled();
                area.draw(&Rectangle::new(corners, style)).map_err(failed)?;
                let (middle, mut end) = (y + BAR / 2, to);
                if point.value.is_some() && least < most {
                    line(area, &[(least, middle), (most, middle)], INK, 1)?;
                    for x in [least, most] {
                        line(area, &[(x, middle - 3), (x, middle + 3)], INK, 1)?;
                    }
                    end = end.max(most);
                }
                write(
                    area,
                    &value(point),
                    (end + 6, middle),
                    SMALL,
                    INK,
                    HPos::Left,
                )?;
                y += BAR;
            }
            y += BETWEEN_GROUPS - BETWEEN_GROUPS / 2;
        }
        line(area, &[(base, top), (base, bottom)], MUTED, 1)
    }

    fn draw_lines(&self, area: &Area<'_>, top: i32) -> Drawn {
        let (left, right) = (MARGIN + MARKS, WIDTH - MARGIN);
        let (top, bottom) = (top + 6, top + LINES);
        let pixels = (bottom, top);
        for mark in self.scale.marks() {
            let y = self.scale.map(mark, pixels);
            line(area, &[(left, y), (right, y)], GRID, 1)?;
            let label = style::number(mark);
            write(area, &label, (left - 8, y), SMALL, MUTED, HPos::Right)?;
        }
        let columns = i32::try_from(self.labels.len().max(1))
            .map_err(|error| DrawError(error.to_string()))?;
        let column = |label: &str| {
            let at = self.labels.iter().position(|other| *other == label);
            let at = at.and_then(|at| i32::try_from(at).ok()).unwrap_or(0);
            left + (right - left) * (2 * at + 1) / (2 * columns)
        };
        for label in &self.labels {
            let below = (column(label), bottom + LINE / 2);
            write(area, label, below, SMALL, INK, HPos::Center)?;
        }
        for (number, series) in self.data.series.iter().enumerate() {
            let colour = style::series_colour(number);
            let mut points = Vec::new();
            for point in &series.points {
                let x = column(&point.label);
                let (least, most) = range(point)?;
                let [low, high] = [least, most].map(|value| self.scale.map(value, pixels));
                if low != high {
                    line(area, &[(x, low), (x, high)], colour, 1)?;
                }
                if let Some(value) = point.value {
                    points.push((x, self.scale.map(value, pixels)));
                }
            }
            line(area, &points, colour, 2)?;
            for point in points {
                area.draw(&Circle::new(point, 3, colour.filled()))
                    .map_err(failed)?;
            }
        }
        line(area, &[(left, bottom), (right, bottom)], MUTED, 1)
    }
}

/// Returns the legend: the names of the series, in rows that fit. Series without a name are left out.
fn legend(panel: &FigurePanel) -> Vec<Vec<(&str, usize)>> {
    let mut rows: Vec<Vec<(&str, usize)>> = Vec::new();
    let mut used = WIDTH;
    for (number, series) in panel.series.iter().enumerate() {
        let name = series.label.as_str();
        if name.is_empty() {
            continue;
        }
        let width = legend_width(name);
        if used + width > WIDTH - 2 * MARGIN {
            rows.push(Vec::new());
            used = 0;
        }
        used += width;
        if let Some(row) = rows.last_mut() {
            row.push((name, number));
        }
    }
    rows
}

fn legend_width(name: &str) -> i32 {
    16 + style::width(name, SMALL) + 16
}

/// Breaks text into lines that fit into the picture.
fn wrap(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        let longer = lines.last().map(|line| format!("{line} {word}"));
        match (longer, lines.last_mut()) {
            (Some(longer), Some(line)) if style::width(&longer, SMALL) <= WIDTH - 2 * MARGIN => {
                *line = longer;
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Returns the text that stands beside a bar.
fn value(point: &FigurePoint) -> String {
    match (point.value, point.min, point.max) {
        (Some(value), ..) => style::number(value),
        (None, Some(min), Some(max)) => format!("{} to {}", style::number(min), style::number(max)),
        _ => String::new(),
    }
}

fn range(point: &FigurePoint) -> Result<(f64, f64), DrawError> {
    let missing = || DrawError(format!("'{}' has no value", point.label));
    point.range().ok_or_else(missing)
}

fn write(
    area: &Area<'_>,
    text: &str,
    at: (i32, i32),
    height: i32,
    colour: RGBColor,
    anchor: HPos,
) -> Drawn {
    let style = style::text(height, colour, anchor);
    area.draw(&Text::new(text, at, style)).map_err(failed)
}

fn line(area: &Area<'_>, points: &[(i32, i32)], colour: RGBColor, width: u32) -> Drawn {
    let style = colour.stroke_width(width);
    area.draw(&PathElement::new(points.to_vec(), style))
        .map_err(failed)
}

fn failed<E: std::error::Error + Send + Sync>(
    error: plotters::drawing::DrawingAreaErrorKind<E>,
) -> DrawError {
    DrawError(error.to_string())
}

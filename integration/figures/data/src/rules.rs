//! Rules for the values of a figure, in addition to the types of its fields.

use std::collections::BTreeSet;

use jiff::civil::Date;

use super::{BEFORE_VERSIONS, FigureData, FigurePanel, FigurePoint, FigureSeries};

/// A field, and the reason why its value is not allowed.
pub(super) type Violation = (String, &'static str);

/// Minimum and maximum number of digits of a commit id.
const COMMIT_DIGITS: std::ops::RangeInclusive<usize> = 7..=64;

pub(super) fn check(figure: &FigureData) -> Result<(), Violation> {
    for (field, text) in [
        ("title", &figure.title),
        ("machine", &figure.machine),
        ("command", &figure.command),
    ] {
        ensure(!text.trim().is_empty(), field, "must not be empty")?;
    }
    ensure(
        is_date(&figure.date),
        "date",
        "must be a day such as 2026-11-27, or 'before 0.1.0'",
    )?;
    ensure(
        is_commit(&figure.commit),
        "commit",
        "must be a commit id of 7 digits or more, 'unknown' or 'before 0.1.0'",
    )?;
    ensure(!figure.panels.is_empty(), "panels", "must not be empty")?;
    for (number, panel) in figure.panels.iter().enumerate() {
        check_panel(panel, &format!("panels[{number}]"))?;
    }
    Ok(())
}

fn check_panel(panel: &FigurePanel, at: &str) -> Result<(), Violation> {
    for (field, text) in [("measured", &panel.measured), ("unit", &panel.unit)] {
        let field = format!("{at}.{field}");
        ensure(!text.trim().is_empty(), &field, "must not be empty")?;
    }
    let list = format!("{at}.series");
    ensure(!panel.series.is_empty(), &list, "must not be empty")?;
    let mut labels = BTreeSet::new();
    for (number, series) in panel.series.iter().enumerate() {
        let at = format!("{list}[{number}]");
        let label = format!("{at}.label");
        let needs_label = panel.series.len() > 1;
        ensure(
            !needs_label || !series.label.trim().is_empty(),
            &label,
            "must not be empty beside other series",
        )?;
        ensure(labels.insert(&series.label), &label, "is there twice")?;
        check_series(series, panel.log, &at)?;
    }
    Ok(())
}

fn check_series(series: &FigureSeries, is_log: bool, at: &str) -> Result<(), Violation> {
    let list = format!("{at}.points");
    ensure(!series.points.is_empty(), &list, "must not be empty")?;
    let mut labels = BTreeSet::new();
    for (number, point) in series.points.iter().enumerate() {
        let at = format!("{list}[{number}]");
        let label = format!("{at}.label");
        ensure(!point.label.trim().is_empty(), &label, "must not be empty")?;
        ensure(labels.insert(&point.label), &label, "is there twice")?;
        check_point(point, is_log, &at)?;
    }
    Ok(())
}

fn check_point(point: &FigurePoint, is_log: bool, at: &str) -> Result<(), Violation> {
    for (name, value) in [
        ("value", point.value),
        ("min", point.min),
        ("max", point.max),
    ] {
        let field = format!("{at}.{name}");
        let is_finite = value.is_none_or(f64::is_finite);
        ensure(is_finite, &field, "must be a number")?;
        let is_drawable = !is_log || value.is_none_or(|value| value > 0.0);
        ensure(
            is_drawable,
            &field,
            "must be positive on a logarithmic axis",
        )?;
    }
    let field = |name: &str| format!("{at}.{name}");
    match (point.value, point.min, point.max) {
        (_, Some(_), None) => return violation(&field("max"), "is missing beside `min`"),
        (_, None, Some(_)) => return violation(&field("min"), "is missing beside `max`"),
        (None, None, None) => {
            return violation(&field("value"), "is missing without `min` and `max`");
        }
        (value, Some(min), Some(max)) => {
            ensure(min <= max, &field("min"), "must not be above `max`")?;
            let is_between = value.is_none_or(|value| (min..=max).contains(&value));
            ensure(is_between, &field("value"), "must lie from `min` to `max`")?;
        }
        (Some(_), None, None) => {}
    }
    ensure(point.n != Some(0), &field("n"), "must not be 0")
}

fn is_date(text: &str) -> bool {
    let is_day = || {
        text.parse::<Date>()
            .is_ok_and(|date| date.to_string() == text)
    };
    text == BEFORE_VERSIONS || is_day()
}

fn is_commit(text: &str) -> bool {
    let id = text.strip_suffix("-dirty").unwrap_or(text);
    let is_hexadecimal = id
        .bytes()
        .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    [BEFORE_VERSIONS, super::origin::UNKNOWN].contains(&text)
        || COMMIT_DIGITS.contains(&id.len()) && is_hexadecimal
}

fn ensure(is_so: bool, field: &str, problem: &'static str) -> Result<(), Violation> {
    if is_so {
        Ok(())
    } else {
        violation(field, problem)
    }
}

fn violation(field: &str, problem: &'static str) -> Result<(), Violation> {
    Err((field.to_owned(), problem))
}

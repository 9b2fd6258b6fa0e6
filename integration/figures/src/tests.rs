use std::fs;
use std::path::Path;

use figure_data::{FigureData, FigurePanel, FigurePoint, FigureSeries, PlotKind};

use crate::figure_directory::{self, FigureDirError, OutdatedPicture};
use crate::{style, svg};

fn figure(plot: PlotKind, log: bool) -> FigureData {
    let series = |label: &str, scale: f64| FigureSeries {
        label: label.to_owned(),
        points: vec![
            FigurePoint::new("depth 1 & <one>", scale),
            FigurePoint::from_rounds("depth 32", &[8.0 * scale, 9.0 * scale, 12.0 * scale])
                .unwrap(),
            FigurePoint {
                label: "depth 128".to_owned(),
                min: Some(27.0 * scale),
                max: Some(72.0 * scale),
                ..FigurePoint::default()
            },
        ],
    };
    FigureData {
        title: "Reads".to_owned(),
        date: "2026-11-27".to_owned(),
        machine: "A".to_owned(),
        commit: "601349c9".to_owned(),
        command: "cargo bench".to_owned(),
        panels: vec![FigurePanel {
            measured: "4 KiB reads".to_owned(),
            unit: "I/Os per second".to_owned(),
            plot,
            log,
            series: vec![series("adaptive", 1e6), series("busy", 2e6)],
        }],
    }
}

/// Returns the values of an attribute of all elements of one kind.
fn attributes(svg: &str, element: &str, attribute: &str) -> Vec<i32> {
    let elements = svg
        .lines()
        .filter(|line| line.starts_with(&format!("<{element} ")));
    let values = elements.filter_map(|line| line.split(&format!(" {attribute}=\"")).nth(1));
    values
        .filter_map(|rest| rest.split('"').next()?.parse().ok())
        .collect()
}

#[test]
fn a_picture_has_all_labels_values_and_its_origin() {
    let svg = svg(&figure(PlotKind::Bars, false)).unwrap();
    for text in [
        "Reads",
        "4 KiB reads (I/Os per second)",
        "adaptive",
        "busy",
        "depth 1 &amp; &lt;one&gt;",
        "depth 32",
        "9 M",
        "27 M to 72 M",
        "A; 2026-11-27; commit 601349c9",
        "cargo bench",
    ] {
        assert!(svg.lines().any(|line| line == text), "{text}: {svg}");
    }
}

#[test]
fn bars_are_as_long_as_their_values() {
    let mut figure = figure(PlotKind::Bars, false);
    figure.panels[0].series.truncate(1);
    figure.panels[0].series[0].points =
        vec![FigurePoint::new("one", 1.0), FigurePoint::new("four", 4.0)];
    let svg = svg(&figure).unwrap();
    // The rectangles are the background, the legend and two bars.
    let [_, _, one, four] = attributes(&svg, "rect", "width")[..] else {
        panic!("{svg}");
    };
    assert!((four - 4 * one).abs() <= 4, "{one} {four}");
}

#[test]
fn a_logarithmic_axis_has_as_much_room_for_each_factor() {
    let mut figure = figure(PlotKind::Lines, true);
    figure.panels[0].series.truncate(1);
    let points = [1.0, 10.0, 100.0].map(|value| FigurePoint::new(&value.to_string(), value));
    figure.panels[0].series[0].points = points.to_vec();
    let svg = svg(&figure).unwrap();
    let [one, ten, hundred] = attributes(&svg, "circle", "cy")[..] else {
        panic!("{svg}");
    };
    assert!(
        one > ten && (one - ten - (ten - hundred)).abs() <= 1,
        "{one} {ten} {hundred}"
    );
}

#[test]
fn a_picture_has_colours_for_dark_schemes_and_refers_to_nothing_else() {
    for plot in [PlotKind::Bars, PlotKind::Lines] {
        let svg = svg(&figure(plot, true)).unwrap();
        assert!(svg.starts_with("<svg "));
        assert!(svg.contains("prefers-color-scheme: dark"));
        // The name space contains "://", but refers to nothing.
        assert_eq!(svg.matches("://").count(), 1);
        assert!(!svg.contains("url(") && !svg.contains("href") && !svg.contains("@import"));
    }
}

#[test]
fn nothing_is_drawn_outside_of_the_picture() {
    for plot in [PlotKind::Bars, PlotKind::Lines] {
        let svg = svg(&figure(plot, true)).unwrap();
        for attribute in ["x", "x1", "x2", "cx"] {
            for element in ["rect", "text", "line", "circle"] {
                let all = attributes(&svg, element, attribute);
                assert!(
                    all.iter().all(|x| (0..=860).contains(x)),
                    "{element} {attribute}: {all:?}"
                );
            }
        }
    }
}

#[test]
fn a_long_command_has_more_than_one_line() {
    let mut figure = figure(PlotKind::Bars, false);
    figure.command = "nvme-load ".repeat(30).trim_end().to_owned();
    let svg = svg(&figure).unwrap();
    let lines: Vec<&str> = svg
        .lines()
        .filter(|line| line.starts_with("nvme-load"))
        .collect();
    assert!(
        lines.len() > 1 && lines.iter().all(|line| line.len() < 140),
        "{lines:?}"
    );
    assert_eq!(lines.join(" "), figure.command);
}

#[test]
fn numbers_have_four_digits_at_most() {
    for (value, expected) in [
        (0.0, "0"),
        (0.0036, "0.0036"),
        (1.25, "1.25"),
        (227.0, "227"),
        (1000.0, "1000"),
        (7188.5, "7188"),
        (199_990.0, "200 k"),
        (26_200_000.0, "26.2 M"),
        (-3.5, "-3.5"),
    ] {
        assert_eq!(style::number(value), expected);
    }
}

/// Returns a directory with one figure.
fn figure_dir(plot: PlotKind) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    figure(plot, false)
        .write(&dir.path().join("reads.json"))
        .unwrap();
    dir
}

fn outdated(dir: &Path) -> Vec<OutdatedPicture> {
    figure_directory::check(dir, &[]).unwrap()
}

#[test]
fn a_picture_that_differs_from_its_data_is_found() {
    let dir = figure_dir(PlotKind::Bars);
    let path = dir.path();
    let name = || "reads".to_owned();
    assert_eq!(outdated(path), [OutdatedPicture::Missing(name())]);
    assert_eq!(figure_directory::draw(path, &[]).unwrap(), [name()]);
    assert_eq!(outdated(path), []);

    let mut other = figure(PlotKind::Bars, false);
    other.panels[0].series[0].points[0].value = Some(1.5e6);
    other.write(&path.join("reads.json")).unwrap();
    assert_eq!(outdated(path), [OutdatedPicture::Different(name())]);
}

#[test]
fn a_picture_without_data_is_found() {
    let dir = figure_dir(PlotKind::None);
    let path = dir.path();
    assert_eq!(outdated(path), []);
    fs::write(path.join("reads.svg"), "").unwrap();
    assert_eq!(
        outdated(path),
        [OutdatedPicture::WithoutData("reads".to_owned())]
    );
    assert!(
        figure_directory::check(path, &["reads".to_owned()])
            .unwrap()
            .is_empty()
    );
}

#[test]
fn a_directory_without_the_figure_is_refused() {
    let empty = tempfile::tempdir().unwrap();
    for only in [vec![], vec!["reads".to_owned()]] {
        let error = figure_directory::check(empty.path(), &only).unwrap_err();
        assert!(matches!(error, FigureDirError::NoFigure { .. }), "{error}");
    }
    let error = figure_directory::draw(figure_dir(PlotKind::Bars).path(), &["writes".to_owned()])
        .unwrap_err();
    assert!(error.to_string().ends_with("has no writes.json"), "{error}");
}

use std::path::Path;

use serde_json::{Value, json};

use super::*;

fn figure() -> Value {
    json!({
        "title": "Reads",
        "date": "2026-11-27",
        "machine": "A",
        "commit": "601349c9",
        "command": "cargo bench",
        "panels": [{
            "measured": "4 KiB reads",
            "unit": "I/Os per second",
            "plot": "bars",
            "log": true,
            "series": [
                {"label": "adaptive", "points": [{"label": "depth 1", "value": 2.0, "min": 1.0, "max": 3.0, "n": 5}]},
                {"label": "busy", "points": [{"label": "depth 1", "min": 1.0, "max": 3.0}]}
            ]
        }]
    })
}

fn parse(json: &Value) -> Result<FigureData, String> {
    let figure = FigureData::parse(&json.to_string(), Path::new("x.json"));
    figure.map_err(|error| error.to_string())
}

#[test]
fn a_figure_is_read_as_it_was_written() {
    let figure = parse(&figure()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.json");
    figure.write(&path).unwrap();
    assert_eq!(FigureData::read(&path).unwrap(), figure);
    assert!(std::fs::read_to_string(&path).unwrap().ends_with("}\n"));
}

#[test]
fn errors_name_the_file_and_the_field() {
    let point = "/panels/0/series/0/points/0";
    let cases = [
        ("/title", json!(" "), "title: must not be empty"),
        ("/date", json!("2026-13-01"), "date: must be a day"),
        ("/date", json!("2026-11-27T10"), "date: must be a day"),
        ("/commit", json!("main"), "commit: must be a commit id"),
        ("/panels", json!([]), "panels: must not be empty"),
        (
            "/panels/0/unit",
            json!(""),
            "panels[0].unit: must not be empty",
        ),
        (
            "/panels/0/plot",
            json!("pie"),
            "panels[0].plot: unknown variant `pie`",
        ),
        (
            "/panels/0/series/1/label",
            json!(""),
            "panels[0].series[1].label: must not be empty beside",
        ),
        (
            "/panels/0/series/1/label",
            json!("adaptive"),
            "panels[0].series[1].label: is there twice",
        ),
        (
            "/panels/0/series/1/points",
            json!([]),
            "panels[0].series[1].points: must not be empty",
        ),
        (
            point,
            json!({"label": "x", "value": "2"}),
            "panels[0].series[0].points[0].value: invalid type",
        ),
        (
            point,
            json!({"label": "x", "values": 2}),
            "panels[0].series[0].points[0].values: unknown field",
        ),
        (
            point,
            json!({"label": "x"}),
            "panels[0].series[0].points[0].value: is missing",
        ),
        (
            point,
            json!({"label": "x", "min": 1}),
            "panels[0].series[0].points[0].max: is missing",
        ),
        (
            point,
            json!({"label": "x", "max": 1}),
            "panels[0].series[0].points[0].min: is missing",
        ),
        (
            point,
            json!({"label": "x", "value": 0}),
            "panels[0].series[0].points[0].value: must be positive",
        ),
        (
            point,
            json!({"label": "x", "value": 4, "min": 1, "max": 3}),
            "points[0].value: must lie from",
        ),
        (
            point,
            json!({"label": "x", "min": 3, "max": 1}),
            "points[0].min: must not be above",
        ),
        (
            point,
            json!({"label": "x", "value": 1, "n": 0}),
            "points[0].n: must not be 0",
        ),
    ];
    for (at, value, expected) in cases {
        let mut json = figure();
        *json.pointer_mut(at).unwrap() = value.clone();
        let error = parse(&json).unwrap_err();
        assert!(error.starts_with("x.json: "), "{error}");
        assert!(error.contains(expected), "{at} {value}: {error}");
    }
    let error = FigureData::parse(&format!("{} x", figure()), Path::new("x.json"));
    let error = error.unwrap_err().to_string();
    assert!(error.starts_with("x.json: end: must not"), "{error}");
}

#[test]
fn two_points_of_a_series_have_different_labels() {
    let mut json = figure();
    let points = json.pointer_mut("/panels/0/series/0/points").unwrap();
    let first = points[0].clone();
    points.as_array_mut().unwrap().push(first);
    let error = parse(&json).unwrap_err();
    assert!(
        error.ends_with("points[1].label: is there twice"),
        "{error}"
    );
}

#[test]
fn a_figure_of_this_machine_names_its_origin() {
    let mut figure = FigureData::on_this_machine("title", "command");
    figure.panels = parse(&super::tests::figure()).unwrap().panels;
    let dir = tempfile::tempdir().unwrap();
    figure.write(&dir.path().join("x.json")).unwrap();
}

#[test]
fn the_machine_is_described_by_its_processors() {
    let x86 = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n\n\
               processor\t: 1\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n";
    let arm = "processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n";
    for (cpuinfo, expected) in [
        (
            x86,
            "AuthenticAMD family 26 model 2 (AMD EPYC), 2 processors",
        ),
        (arm, "implementer 0x41 part 0xd0c, 1 processors"),
        ("", "unknown"),
    ] {
        assert_eq!(origin::describe(cpuinfo), expected);
    }
}

#[test]
fn rounds_become_their_median_and_spread() {
    assert_eq!(FigurePoint::from_rounds("x", &[]), None);
    let point = FigurePoint::from_rounds("x", &[3.0, 1.0, 2.0, 9.0]).unwrap();
    assert_eq!(point.value, Some(2.5));
    assert_eq!(point.range(), Some((1.0, 9.0)));
    assert_eq!(point.n, Some(4));
}

#[test]
fn the_file_is_the_word_behind_the_argument() {
    let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(
        json_argument(&words("--smoke --json a b")),
        Some("a".into())
    );
    assert_eq!(json_argument(&words("--smoke --json")), None);
    assert_eq!(json_argument(&words("null-4k")), None);
}

//! Chart of the variation of a read's latency between runs.

use std::error::Error;
use std::path::Path;

use nvme_models::DriveProfile;
use plotters::prelude::*;

use super::{Configured, Rig, cases, fill};

const RUNS: usize = 10;
/// Large enough that ten commands are slower than the last percentile.
const COMMANDS: usize = 100_000;
const STATISTICS: [(&str, f64); 5] = [
    ("p50", 0.5),
    ("p90", 0.9),
    ("p99", 0.99),
    ("p99.9", 0.999),
    ("p99.99", 0.9999),
];
const SIZE: (u32, u32) = (860, 480);
const PROFILES: [(&str, RGBColor); 2] = [
    ("nvm", RGBColor(31, 119, 180)),
    ("ssd", RGBColor(214, 39, 40)),
];

/// Latencies of a run in microseconds.
type Run = [f64; STATISTICS.len()];

/// Runs of a profile's reads.
struct Runs {
    profile: &'static str,
    colour: RGBColor,
    /// Configured time of a read on an idle drive, in microseconds.
    configured: f64,
    runs: Vec<Run>,
}

/// Measures reads of 4 KiB with one in flight, on drives of both kinds. Prints a summary, and draws the results into a file.
pub(super) fn draw_to(path: &Path) -> Result<(), Box<dyn Error>> {
    println!("profile  figure     configured    least     most   of {RUNS} runs, in us");
    let mut all = Vec::new();
    for (profile, colour) in PROFILES {
        let runs = measure(profile, colour)?;
        for (index, (figure, _)) in STATISTICS.iter().enumerate() {
            let of_runs = || runs.runs.iter().map(|run| run[index]);
            let (least, most) = (
                of_runs().fold(f64::MAX, f64::min),
                of_runs().fold(0.0, f64::max),
            );
            let configured = runs.configured;
            println!("{profile:<8} {figure:<8} {configured:>12.2} {least:>8.2} {most:>8.2}");
        }
        all.push(runs);
    }
    draw(path, &all)
}

fn measure(name: &'static str, colour: RGBColor) -> Result<Runs, Box<dyn Error>> {
    let profile = DriveProfile::find_built_in(name)?;
    let cases = cases(&profile);
    let case = cases.first().ok_or("A profile without a case")?;
    let Configured::Latency(configured) = case.configured else {
        return Err("The first case of a profile is its latency".into());
    };
    let mut rig = Rig::new(Some(profile.clone()));
    if matches!(profile, DriveProfile::Ssd(_)) {
        fill(&mut rig);
    }
    let runs = (0..RUNS).map(|_| {
        let (mut latencies, _) = rig.run(case, COMMANDS);
        latencies.sort_unstable();
        STATISTICS.map(|(_, share)| latencies[(COMMANDS as f64 * share) as usize] as f64 / 1e3)
    });
    let runs = runs.collect();
    rig.finish();
    Ok(Runs {
        profile: name,
        colour,
        configured: configured / 1e3,
        runs,
    })
}

fn draw(path: &Path, all: &[Runs]) -> Result<(), Box<dyn Error>> {
    let last = (STATISTICS.len() - 1) as f64;
    let slowest = all.iter().flat_map(|runs| runs.runs.iter().flatten());
    let slowest = slowest.copied().fold(0.0, f64::max);
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let title = format!("Reads of 4 KiB, one in flight: {RUNS} runs each");
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        // Space for half of the last label.
        .margin_right(32)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..last, (5.0..slowest * 1.5).log_scale())?;
    chart
        .configure_mesh()
        .x_labels(STATISTICS.len())
        .x_label_formatter(&|x| {
            STATISTICS[x.round() as usize % STATISTICS.len()]
                .0
                .to_owned()
        })
        .y_desc("microseconds; grey: configured")
        .draw()?;
    for runs in all {
        let configured = [(0.0, runs.configured), (last, runs.configured)];
        chart.draw_series(LineSeries::new(configured, BLACK.mix(0.35).stroke_width(4)))?;
        let style = runs.colour.mix(0.7).stroke_width(1);
        for run in &runs.runs {
            let points = run.iter().enumerate().map(|(x, y)| (x as f64, *y));
            chart.draw_series(LineSeries::new(points, style))?;
        }
        // A single legend entry for all runs.
        chart
            .draw_series(LineSeries::new(None::<(f64, f64)>, style))?
            .label(format!("profile {}", runs.profile))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    root.present()?;
    Ok(())
}

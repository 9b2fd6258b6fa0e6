//! Charts of the behaviour of modelled flash drives, for `resources/drives/plots/`.
//!
//! ```text
//! cargo run --release -p nvme-mpt-tests --example plots                # all of them, where they are kept
//! cargo run --release -p nvme-mpt-tests --example plots -- FOLDER      # elsewhere
//! ```
//!
//! The simulation uses a virtual clock, so the charts are the same on every machine.

use std::error::Error;
use std::path::{Path, PathBuf};

use nvme_models::simulation::{
    LoadDirection, LoadOrder, ModelSimulation, SimulatedLoad, SimulatedLoadResult,
};
use nvme_models::{DriveProfile, ProfileSize, SsdProfile};
use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::prelude::*;

const SIZE: (u32, u32) = (860, 480);
const MIB: u64 = 1 << 20;
const KIB: u64 = 1 << 10;
const COLOURS: [RGBColor; 3] = [
    RGBColor(31, 119, 180),
    RGBColor(214, 39, 40),
    RGBColor(44, 160, 44),
];

type Result<T> = std::result::Result<T, Box<dyn Error>>;
type Points = Vec<(f64, f64)>;

fn main() -> Result<()> {
    let default_dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../resources/drives/plots");
    let dir = std::env::args_os()
        .nth(1)
        .map_or_else(|| default_dir.into(), PathBuf::from);
    std::fs::create_dir_all(&dir)?;
    payload_sizes(&dir.join("payload-size.svg"))?;
    threads(&dir.join("threads.svg"))?;
    aging(&dir.join("aging.svg"), &dir.join("latency.svg"))?;
    println!("Drawn in {}", dir.display());
    Ok(())
}

fn flash() -> Result<SsdProfile> {
    match DriveProfile::find_built_in("ssd")? {
        DriveProfile::Ssd(profile) => Ok(profile),
        _ => Err("The profile ssd is of another model".into()),
    }
}

fn reads(bytes: u64, depth: usize, commands: usize) -> SimulatedLoad {
    SimulatedLoad {
        direction: LoadDirection::Read,
        order: LoadOrder::Random,
        bytes,
        depth,
        commands,
    }
}

/// Creates a drive on which every block was written once, in order.
fn fill_drive(profile: &SsdProfile, bytes: u64) -> Result<(ModelSimulation, SimulatedLoadResult)> {
    let profile = DriveProfile::Ssd(profile.clone());
    let mut drive = ModelSimulation::new(&profile, bytes).ok_or("It tells of no time")?;
    let outcome = drive.run(&SimulatedLoad {
        direction: LoadDirection::Write,
        order: LoadOrder::Sequential,
        bytes: MIB,
        depth: 8,
        commands: (bytes / MIB) as usize,
    });
    Ok((drive, outcome))
}

/// Draws bandwidth by read size. With fewer channels, the same dies contend for them. Without a channel limit, dies and link
/// are the limit.
fn payload_sizes(path: &Path) -> Result<()> {
    let profile = flash()?;
    let with = |channels: u16, bandwidth: u64| SsdProfile {
        channels,
        dies_per_channel: profile.channels * profile.dies_per_channel / channels,
        channel_bandwidth: ProfileSize(bandwidth),
        ..profile.clone()
    };
    let mut lines = Vec::new();
    for (name, profile) in [
        ("8 channels of 800 MiB/s", with(8, 800 * MIB)),
        ("2 channels of 800 MiB/s", with(2, 800 * MIB)),
        ("channels without a limit", with(8, 1 << 40)),
    ] {
        let (mut drive, _) = fill_drive(&profile, 512 * MIB)?;
        let points = (12..=20).map(|shift| {
            let bytes = 1 << shift;
            let outcome = drive.run(&reads(bytes, 16, 4096));
            ((bytes / KIB) as f64, outcome.bandwidth(bytes) / MIB as f64)
        });
        lines.push((name, points.collect()));
    }
    let what = Labels {
        title: "Random reads, 16 in flight, 16 dies",
        x: "KiB of a read",
        y: "MiB/s",
    };
    let sizes = (4.0..1024.0).log_scale().base(2.0);
    draw(path, &what, sizes, 0.0..max_value(&lines), &lines)
}

/// Draws bandwidth of 16 KiB reads by the number of threads, each with one read in flight.
fn threads(path: &Path) -> Result<()> {
    let profile = flash()?;
    let (mut drive, _) = fill_drive(&profile, 512 * MIB)?;
    let points = (0..=7).map(|shift| {
        let depth = 1 << shift;
        let outcome = drive.run(&reads(16 * KIB, depth, 8192));
        (depth as f64, outcome.bandwidth(16 * KIB) / MIB as f64)
    });
    let lines = vec![("profile ssd", points.collect())];
    let what = Labels {
        title: "Random reads of 16 KiB",
        x: "threads",
        y: "MiB/s",
    };
    draw(
        path,
        &what,
        (1.0..128.0).log_scale().base(2.0),
        0.0..max_value(&lines),
        &lines,
    )
}

/// Draws throughput over time, and latency: a drive is filled in order and then written at random, until garbage collection
/// starts and beyond.
fn aging(over_time: &Path, latency: &Path) -> Result<()> {
    const DRIVE: u64 = 4 << 30;
    let profile = SsdProfile {
        over_provisioning: 25,
        ..flash()?
    };
    let (mut drive, fill) = fill_drive(&profile, DRIVE)?;
    let random = SimulatedLoad {
        direction: LoadDirection::Write,
        order: LoadOrder::Random,
        bytes: 16 * KIB,
        depth: 16,
        commands: 32_768,
    };
    let mut second = (fill.ended_at - fill.started_at) as f64 / 1e9;
    let mut lines = vec![("filled in order", rate(&fill, MIB, 0.0))];
    let (mut written, mut outcomes, mut copied) = (Points::new(), Vec::new(), Vec::new());
    for _ in 0..8 {
        let before = drive.wear().unwrap_or_default().copied_pages;
        let outcome = drive.run(&random);
        written.extend(rate(&outcome, random.bytes, second));
        second += (outcome.ended_at - outcome.started_at) as f64 / 1e9;
        copied.push(drive.wear().unwrap_or_default().copied_pages - before);
        outcomes.push(outcome);
    }
    // The text of the second chart relies on this.
    if copied.first() != Some(&0) || copied.last() == Some(&0) {
        return Err(format!("Garbage collection has moved {copied:?} pages").into());
    }
    lines.push(("16 KiB at random", written));
    let what = Labels {
        title: "Writes to a drive of 4 GiB, as new, with 25 % over-provisioning",
        x: "seconds",
        y: "MiB/s",
    };
    let rates = (10.0..max_value(&lines)).log_scale();
    draw(over_time, &what, 0.0..second, rates, &lines)?;

    let distribution = |outcome: &SimulatedLoadResult| -> Points {
        let percents = (1..200).map(|half| f64::from(half) / 2.0);
        let point = |percent| (outcome.quantile(percent * 10.0) as f64 / 1e3, percent);
        percents.chain([99.9, 99.99]).map(point).collect()
    };
    let (first, last) = (outcomes.first(), outcomes.last());
    let lines: Vec<_> = [
        ("before garbage collection", first),
        ("with garbage collection", last),
    ]
    .into_iter()
    .filter_map(|(name, outcome)| Some((name, distribution(outcome?))))
    .collect();
    let slowest = lines.iter().flat_map(|(_, points)| points);
    let slowest = slowest.map(|(x, _)| *x).fold(1.0, f64::max) * 1.5;
    let what = Labels {
        title: "Latency of these random writes, 16 in flight",
        x: "microseconds",
        y: "percent of the commands",
    };
    let latencies = (5.0..slowest).log_scale();
    draw(latency, &what, latencies, 0.0..100.0, &lines)
}

/// Returns throughput in steps of 50 ms, starting at second `from`.
fn rate(outcome: &SimulatedLoadResult, bytes: u64, from: f64) -> Points {
    const STEP: u64 = 50_000_000;
    let steps = (outcome.ended_at - outcome.started_at) / STEP;
    let mut counts = vec![0_u64; steps as usize];
    for done in &outcome.completion_times {
        if let Some(count) = counts.get_mut(((done - outcome.started_at) / STEP) as usize) {
            *count += 1;
        }
    }
    let seconds = STEP as f64 / 1e9;
    // A step without completions has no point on a logarithmic scale.
    let point = |(step, count): (usize, &u64)| {
        let at = from + (step as f64 + 0.5) * seconds;
        (*count > 0).then_some((at, (count * bytes) as f64 / MIB as f64 / seconds))
    };
    counts.iter().enumerate().filter_map(point).collect()
}

fn max_value(lines: &[(&str, Points)]) -> f64 {
    let all = lines.iter().flat_map(|(_, points)| points);
    all.map(|(_, y)| *y).fold(0.0, f64::max) * 1.1
}

struct Labels {
    title: &'static str,
    x: &'static str,
    y: &'static str,
}

fn draw<X, Y>(path: &Path, what: &Labels, x: X, y: Y, lines: &[(&str, Points)]) -> Result<()>
where
    X: AsRangedCoord<Value = f64>,
    X::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y: AsRangedCoord<Value = f64>,
    Y::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(what.title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(x, y)?;
    let mesh = chart.configure_mesh().x_desc(what.x).y_desc(what.y).draw();
    mesh?;
    for ((name, points), colour) in lines.iter().zip(COLOURS) {
        chart
            .draw_series(LineSeries::new(
                points.iter().copied(),
                colour.stroke_width(2),
            ))?
            .label(*name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    root.present()?;
    Ok(())
}

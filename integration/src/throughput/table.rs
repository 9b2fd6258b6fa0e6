//! Results of the throughput measurement: medians and ratios.

use std::fmt;

use figure_data::{FigureData, FigurePanel, FigurePoint, FigureSeries, PlotKind};
use serde::{Deserialize, Serialize};

use crate::guest::fio::FioJobDirection;

/// Names of the columns whose ratios are printed. Of the columns of nvme-mpt, the better one is used.
const HOST: &str = "host driver";
const PASS_THROUGH: &str = "pass-through";
const VIRTIO: &str = "virtio-blk";
const OUR_COLUMNS: [&str; 2] = ["nvme-mpt busy", "nvme-mpt adaptive"];
const FILE_VIRTIO: &str = "file, virtio-blk";
const OURS_ON_FILE: [&str; 2] = ["file, busy", "file, adaptive"];
const RATIOS: [([&str; 2], &str); 3] = [
    (OUR_COLUMNS, PASS_THROUGH),
    (OUR_COLUMNS, VIRTIO),
    (OURS_ON_FILE, FILE_VIRTIO),
];

/// I/Os per second of each job with each way.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct ThroughputTable {
    ways: Vec<String>,
    rows: Vec<ThroughputRow>,
    /// Number of device accesses that the IOMMU refused during the measurement.
    pub(super) iommu_faults: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct ThroughputRow {
    job: String,
    /// Results of the rounds, by way.
    iops: Vec<Vec<f64>>,
    mib_s: Vec<Vec<f64>>,
    p50_us: Vec<Vec<f64>>,
}

impl ThroughputTable {
    pub(super) fn new<'a>(
        ways: impl IntoIterator<Item = &'a str>,
        jobs: impl IntoIterator<Item = &'a str>,
    ) -> Self {
        let ways: Vec<String> = ways.into_iter().map(str::to_owned).collect();
        let none = vec![Vec::new(); ways.len()];
        let row = |job: &str| ThroughputRow {
            job: job.to_owned(),
            iops: none.clone(),
            mib_s: none.clone(),
            p50_us: none.clone(),
        };
        Self {
            rows: jobs.into_iter().map(row).collect(),
            ways,
            iommu_faults: 0,
        }
    }

    pub(super) fn add(&mut self, row: usize, way: usize, side: &FioJobDirection) {
        if let Some(row) = self.rows.get_mut(row) {
            row.iops[way].push(side.iops);
            row.mib_s[way].push(side.mib_s);
            row.p50_us[way].push(side.p50_us);
        }
    }

    pub(super) fn from_json(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }

    pub(super) fn json(&self) -> String {
        // Numbers, strings and lists can always be serialized.
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    /// Returns the medians of the rounds with their spread, by job and way.
    pub(super) fn figure(&self, command: &str) -> FigureData {
        let panel =
            |measured: &str, unit: &str, plot, values: fn(&ThroughputRow) -> &Vec<Vec<f64>>| {
                let series = self.ways.iter().enumerate().map(|(at, way)| {
                    let point =
                        |row: &ThroughputRow| FigurePoint::from_rounds(&row.job, &values(row)[at]);
                    FigureSeries {
                        label: way.clone(),
                        points: self.rows.iter().filter_map(point).collect(),
                    }
                });
                FigurePanel {
                    measured: measured.to_owned(),
                    unit: unit.to_owned(),
                    plot,
                    log: false,
                    series: series.collect(),
                }
            };
        let mut figure = FigureData::on_this_machine("Ways into a guest, in the lab", command);
        figure.panels = vec![
            panel(
                "rate, by job of fio",
                "I/Os per second",
                PlotKind::Bars,
                |row| &row.iops,
            ),
            panel("bandwidth, by job of fio", "MiB/s", PlotKind::None, |row| {
                &row.mib_s
            }),
            panel(
                "median latency, by job of fio",
                "us",
                PlotKind::None,
                |row| &row.p50_us,
            ),
        ];
        figure
    }

    fn column(&self, way: &str) -> Option<usize> {
        self.ways.iter().position(|name| name == way)
    }

    /// Returns those ratios for which both columns exist.
    fn ratios(&self) -> impl Iterator<Item = &([&str; 2], &str)> {
        let is_there = |way: &&str| self.column(way).is_some();
        RATIOS
            .iter()
            .filter(move |(ours, way)| ours.iter().any(&is_there) && is_there(way))
    }

    /// Returns the best median of the columns `ours`, divided by the median of the column `way`.
    fn ratio(&self, row: &ThroughputRow, ours: &[&str], way: &str) -> f64 {
        let median = |way: &str| {
            self.column(way)
                .map_or(f64::NAN, |at| median(&row.iops[at]))
        };
        let ours = ours.iter().map(|way| median(way));
        ours.fold(f64::NAN, f64::max) / median(way)
    }
}

impl fmt::Display for ThroughputTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "\nI/Os per second, and their ratio to the host's driver if that was measured\n{:<18}",
            ""
        )?;
        for way in &self.ways {
            write!(f, " {way:>19}")?;
        }
        for _ in self.ratios() {
            write!(f, " {:>17}", "ours by")?;
        }
        write!(f, "\n{:<18}{:width$}", "", "", width = 20 * self.ways.len())?;
        for (_, way) in self.ratios() {
            write!(f, " {way:>17}")?;
        }
        writeln!(f)?;
        for row in &self.rows {
            write!(f, "{:<18}", row.job)?;
            let host = self.column(HOST).map(|at| median(&row.iops[at]));
            for rounds in &row.iops {
                let iops = median(rounds);
                match host {
                    Some(host) => write!(f, " {iops:>13.0} {:>5.2}", iops / host)?,
                    None => write!(f, " {iops:>13.0}      ")?,
                }
            }
            for (ours, way) in self.ratios() {
                write!(f, " {:>17.2}", self.ratio(row, ours, way))?;
            }
            writeln!(f)?;
        }
        write!(f, "The IOMMU refused {} accesses", self.iommu_faults)
    }
}

/// Returns the median.
fn median(rounds: &[f64]) -> f64 {
    let mut sorted = rounds.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        odd if odd % 2 == 1 => sorted[odd / 2],
        even => f64::midpoint(sorted[even / 2 - 1], sorted[even / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(iops: f64) -> FioJobDirection {
        FioJobDirection {
            ios: 1,
            iops,
            mib_s: iops / 256.0,
            p50_us: 1.0,
            p99_us: 1.0,
            max_us: 1.0,
        }
    }

    #[test]
    fn medians_of_all_rounds_are_compared() {
        let mut table = ThroughputTable::new(
            [
                HOST,
                PASS_THROUGH,
                OUR_COLUMNS[0],
                OUR_COLUMNS[1],
                VIRTIO,
                OURS_ON_FILE[0],
                OURS_ON_FILE[1],
                FILE_VIRTIO,
            ],
            ["job"],
        );
        for (way, rounds) in [
            [1000.0, 5000.0, 900.0],
            [500.0; 3],
            [400.0; 3],
            [450.0; 3],
            [150.0; 3],
            [300.0; 3],
            [250.0; 3],
            [200.0; 3],
        ]
        .iter()
        .enumerate()
        {
            for iops in rounds {
                table.add(0, way, &side(*iops));
            }
        }
        let again = ThroughputTable::from_json(&table.json()).expect("json");
        let text = again.to_string();
        let line = text
            .lines()
            .find(|line| line.starts_with("job"))
            .expect("row");
        let words: Vec<&str> = line.split_whitespace().collect();
        let expected = [
            "job", "1000", "1.00", "500", "0.50", "400", "0.40", "450", "0.45", "150", "0.15",
            "300", "0.30", "250", "0.25", "200", "0.20", "0.90", "3.00", "1.50",
        ];
        assert_eq!(words, expected);
    }

    #[test]
    fn a_ratio_needs_both_of_its_sides() {
        for ways in [[HOST, PASS_THROUGH], [OUR_COLUMNS[0], FILE_VIRTIO]] {
            let mut table = ThroughputTable::new(ways, ["job"]);
            table.add(0, 0, &side(2.0));
            table.add(0, 1, &side(1.0));
            let text = table.to_string();
            assert!(!text.contains("ours by") && !text.contains("NaN"), "{text}");
        }
    }

    #[test]
    fn a_figure_has_the_rounds_of_each_way_by_job() {
        let mut table = ThroughputTable::new([HOST, PASS_THROUGH], ["job", "other"]);
        for row in 0..2 {
            for iops in [1000.0, 5000.0, 900.0] {
                table.add(row, 0, &side(iops));
                table.add(row, 1, &side(iops / 2.0));
            }
        }
        let figure = table.figure("cargo throughput");
        let dir = tempfile::tempdir().expect("folder");
        figure.write(&dir.path().join("x.json")).expect("valid");
        let [host, through] = &figure.panels[0].series[..] else {
            panic!("{figure:?}");
        };
        assert_eq!((&*host.label, &*through.label), (HOST, PASS_THROUGH));
        let point = &through.points[1];
        assert_eq!(point.label, "other");
        assert_eq!((point.value, point.n), (Some(500.0), Some(3)));
        assert_eq!(point.range(), Some((450.0, 2500.0)));
    }

    #[test]
    fn the_median_of_no_values_is_nan() {
        assert!(median(&[]).is_nan());
        assert!((median(&[1.0, 2.0]) - 1.5).abs() < 1e-12);
    }
}

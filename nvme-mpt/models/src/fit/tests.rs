//! Tests that fit profiles to fio reports, and compare the values with those of the measured drive.

use std::error::Error;
use std::path::Path;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::{FioMeasurement, FioReport, FitError, fit_profile, fit_text};
use crate::{DriveProfile, NvmProfile, NvmRates, ProfileSize, TimeSpan};

const PATH: &str = "report.json";

/// Returns a job in fio's format. `direction` is "read" or "write".
fn job(name: &str, direction: &str, options: Value, iops: f64, median: f64) -> Value {
    let idle = json!({"total_ios": 0, "iops": 0.0, "clat_ns": {"mean": 0.0}});
    let mut job = json!({
        "jobname": name, "error": 0, "job options": options, "read": idle, "write": idle,
    });
    job[direction] = json!({
        "total_ios": 1000, "iops": iops,
        "clat_ns": {"mean": 2.0 * median, "percentile": {"50.000000": median, "99.000000": 9.0 * median}},
    });
    job
}

/// Returns fio's measurements of a modelled drive, calculated by the rules of the model.
fn measured(profile: &NvmProfile) -> String {
    let mut jobs = Vec::new();
    for (direction, rates) in [("read", &profile.read), ("write", &profile.write)] {
        let latency = rates.latency.0 as f64;
        let bandwidth = rates.bandwidth.0 as f64;
        for (bs, depth, iops) in [
            // If a stripe takes longer than the latency, it delays the command.
            (
                "4k",
                "1",
                (1e9 / latency).min(bandwidth / profile.stripe.0 as f64),
            ),
            ("4k", "256", bandwidth / profile.stripe.0 as f64),
            ("1m", "32", bandwidth / f64::from(1 << 20)),
        ] {
            let options = json!({"bs": bs, "iodepth": depth});
            jobs.push(job(
                &format!("{direction}-{bs}-{depth}"),
                direction,
                options,
                iops,
                latency,
            ));
        }
    }
    json!({"fio version": "fio-3.33", "jobs": jobs}).to_string()
}

fn parsed_profile(text: &str) -> NvmProfile {
    let profile = fit_text(Path::new(PATH), text).expect("a profile");
    match DriveProfile::parse(PATH, &profile).expect("one that can be used") {
        DriveProfile::Nvm(profile) => profile,
        other => panic!("{other:?}"),
    }
}

/// Returns the error and its cause.
fn complaint(text: &str) -> String {
    let error = fit_text(Path::new(PATH), text).expect_err("nothing to go by");
    let cause = error.source().map(ToString::to_string);
    format!("{error}: {}", cause.unwrap_or_default())
}

proptest! {
    #[test]
    fn a_fitted_profile_matches_the_measured_model(
        stripe in 12_u32..=20,
        units in 1_u64..=64,
        read in (2_000_u64..500_000, 100_u64..20_000),
        write in (2_000_u64..500_000, 100_u64..20_000),
    ) {
        let rates = |(latency, mib): (u64, u64)| NvmRates {
            latency: TimeSpan(latency),
            bandwidth: ProfileSize(mib << 20),
        };
        let given = NvmProfile {
            units: units as u16,
            stripe: ProfileSize(1 << stripe),
            read: rates(read),
            write: rates(write),
        };
        let found = parsed_profile(&measured(&given));
        prop_assert_eq!(found.stripe, given.stripe);
        for (found, given) in [(&found.read, &given.read), (&found.write, &given.write)] {
            prop_assert_eq!(found.latency, given.latency);
            let ratio = found.bandwidth.0 as f64 / given.bandwidth.0 as f64;
            prop_assert!((0.999..=1.001).contains(&ratio), "{} for {}", found.bandwidth.0, given.bandwidth.0);
        }
        // A stripe keeps its unit busy for at most the latency. The exception is a drive on which even a single unit is too
        // slow.
        for rates in [&found.read, &found.write] {
            let stripe = found.stripe.0 as f64 * f64::from(found.units) / rates.bandwidth.0 as f64 * 1e9;
            prop_assert!(found.units == 1 || stripe <= 1.001 * rates.latency.0 as f64);
        }
    }
}

#[test]
fn a_fitted_profile_names_the_job_of_each_value() {
    let report = json!({
        "global options": {"bs": "4k", "rw": "randread"},
        "jobs": [
            job("one", "read", json!({"iodepth": "1"}), 50e3, 19e3),
            job("one\nw", "write", json!({"blocksize": "4096"}), 60e3, 15e3),
            job("deep", "read", json!({"numjobs": "4", "iodepth": "64"}), 500e3, 500e3),
            job("big", "read", json!({"bs": "128KiB,4k", "iodepth": "8"}), 25e3, 300e3),
            job("split", "write", json!({"bs": "4k,128k", "iodepth": "8"}), 10e3, 700e3),
        ],
    });
    let text = format!("fio: a word before\n{report}\n");
    let profile = fit_text(Path::new(PATH), &text).expect("a profile");
    // 25,000 commands of 128 KiB and 500,000 small commands a second give 6.4 KiB for each command, which is nearer to 8 than
    // to 4.
    let expected = "# Made from report.json. resources/drives/nvm.toml explains the fields.\n\
        model = \"nvm\"\nunits = 2\n# From: deep.\nstripe = \"8K\"\n\n\
        [read]\n# From: one.\nlatency = \"19000ns\"\n# From: big.\nbandwidth = \"3125M\"\n\n\
        [write]\n# From: one w.\nlatency = \"15000ns\"\n# From: split.\nbandwidth = \"1250M\"\n";
    assert_eq!(profile, expected);
}

/// Report of fio 3.39 in a guest, of `resources/drives/measure.fio` with each job run for a second. The drive has 4 units and a
/// stripe of 32 KiB. Reads have 5 ms and 32 MiB/s, writes 8 ms and 24 MiB/s.
const MEASURED: &str = include_str!("reports/measure.json");

/// Report from the same guest and drive: jobs from fio's command line. One job has two processes without group reporting, and
/// one has blocks of 64 to 128 KiB.
const PROCESSES: &str = include_str!("reports/processes.json");

#[test]
fn a_guests_measurements_yield_the_profile_of_its_drive() {
    let found = parsed_profile(MEASURED);
    assert_eq!(found.stripe, ProfileSize(32 << 10));
    assert_eq!(
        (found.read.latency, found.write.latency),
        (TimeSpan(5_734_400), TimeSpan(8_716_288))
    );
    assert_eq!(
        (found.read.bandwidth, found.write.bandwidth),
        (ProfileSize(31_808 << 10), ProfileSize(23_865 << 10))
    );
    assert_eq!(found.units, 5);
}

#[test]
fn processes_of_a_job_count_together() {
    let report = FioReport::parse(Path::new(PATH), PROCESSES).expect("a report");
    let jobs = |side: &[FioMeasurement]| -> Vec<_> {
        let job = |m: &FioMeasurement| (m.job.clone(), m.block, m.in_flight, m.iops.round() as u64);
        side.iter().map(job).collect()
    };
    let named = |name: &str, block, in_flight, iops| (name.to_owned(), block, in_flight, iops);
    assert_eq!(
        jobs(&report.reads),
        [
            named("reads", 4096, 1, 112),
            named("many", 4096, 32, 721),
            named("range", 96_149, 8, 273),
        ]
    );
    assert_eq!(jobs(&report.writes), [named("writes", 4096, 1, 83)]);
}

#[test]
fn the_last_of_several_fio_reports_counts() {
    let text = format!("fio: a word before\n{PROCESSES}{MEASURED}\nDisk stats (read/write):\n");
    assert_eq!(parsed_profile(&text), parsed_profile(MEASURED));
}

#[test]
fn total_latency_percentiles_replace_completion_percentiles() {
    let mut reads = job("r", "read", json!({}), 50e3, 20e3);
    reads["read"]["lat_ns"] = reads["read"]["clat_ns"].take();
    reads["read"]["clat_ns"] = json!({"mean": 21e3});
    let writes = job("w", "write", json!({}), 50e3, 20e3);
    let profile = parsed_profile(&json!({"jobs": [reads, writes]}).to_string());
    assert_eq!(profile.read.latency, TimeSpan(20_000));
}

#[test]
fn without_percentiles_the_mean_counts() {
    let mut reads = job("r", "read", json!({}), 50e3, 20e3);
    reads["read"]["clat_ns"] = json!({"mean": 21e3});
    let writes = job("w", "write", json!({}), 50e3, 20e3);
    let profile = parsed_profile(&json!({"jobs": [reads, writes]}).to_string());
    assert_eq!(profile.read.latency, TimeSpan(21_000));
    assert_eq!(
        profile.stripe,
        ProfileSize(4096),
        "when nothing is known of it"
    );
}

#[test]
fn errors_of_fio_reports_name_the_problem() {
    let reads = job("r", "read", json!({}), 50e3, 20e3);
    let deep = job("w", "write", json!({"iodepth": "32"}), 50e3, 20e3);
    let mut mixed = job("m", "write", json!({}), 50e3, 20e3);
    mixed["read"] = reads["read"].clone();
    let mut failed = job("w", "write", json!({}), 50e3, 20e3);
    failed["error"] = json!(5);
    let with = |write: &Value| json!({"jobs": [reads, write]}).to_string();
    let mut odd = job("w", "write", json!({"bs": "4kk"}), 50e3, 20e3);
    for (text, said) in [
        (
            with(&deep),
            "no job that only writes with one command in flight",
        ),
        (
            with(&mixed),
            "no job that only writes with one command in flight",
        ),
        (with(&failed), "Job w of report.json failed with error 5"),
        (with(&odd), "has bs=4kk, which is not a size such as 4k"),
        (String::new(), "is not a report of fio"),
        ("{}".to_owned(), "missing field `jobs`"),
        ("fio: no such file\n".to_owned(), "is not a report of fio"),
    ] {
        assert!(
            complaint(&text).contains(said),
            "{said}: {}",
            complaint(&text)
        );
    }
    odd["job options"] = json!({"numjobs": "0"});
    assert!(complaint(&with(&odd)).contains("has numjobs=0, which is not a number"));
    // A rate of 1 KiB/s, which no drive has.
    let slow = job("w", "write", json!({}), 0.25, 20e3);
    assert!(complaint(&with(&slow)).contains("write.bandwidth cannot be 1K"));
    assert!(matches!(
        fit_profile(Path::new("/nowhere")),
        Err(FitError::Read { .. })
    ));
}

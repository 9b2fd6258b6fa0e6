//! Several guests on one drive.

use std::fs;

use clap::Parser;
use integration::demo;
use integration::guest::{BOOT_TIMEOUT, Guest, GuestConfig, GuestDrive};
use integration::server::FunctionArgument;

use crate::Group;
use crate::fixture::{
    CheckEnvironment, Failure, expect, expect_no_complaints, verified_load, with_path,
};

pub(crate) const GROUP: Group = Group::Alone {
    name: "sharing",
    checks: &[
        ("two_kernels_at_once", two_kernels_at_once),
        ("demo_on_a_file", |bench| demo(bench, &[])),
        ("demo_in_memory_with_mapped_doorbells", |bench| {
            demo(
                bench,
                &[
                    "--drive",
                    "memory:200M",
                    "--doorbells",
                    "mapped",
                    "--kernel",
                    "6.1",
                ],
            )
        }),
    ],
};

fn two_kernels_at_once(bench: &CheckEnvironment) -> Result<(), Failure> {
    let drive = bench.drive("shared.img", 256)?.display().to_string();
    let mut server = bench.serve(&[
        FunctionArgument::new("old", drive.clone(), "0+128M"),
        FunctionArgument::new("new", drive, "128M+128M"),
    ])?;
    let boot = |name: &str, assets| {
        let config = GuestConfig::new(name)
            .vcpus(2)
            .drive(GuestDrive::vfio_user(server.socket(name)));
        Guest::start_booting(assets, &config, bench.dir())
    };
    let guests = [boot("old", &bench.v6_1()?)?, boot("new", bench.v6_12())?];
    let load = verified_load("verify", 2);
    let mut jobs = Vec::new();
    for guest in &guests {
        guest.await_ready(BOOT_TIMEOUT)?;
    }
    for guest in &guests {
        jobs.push(guest.start(&load.script())?);
    }
    for (guest, job) in guests.iter().zip(jobs) {
        let output = guest.finish(job, load.timeout())?;
        load.report(&output.text)?;
        expect_no_complaints(guest)?;
    }
    server.expect_alive()?;
    Ok(())
}

fn demo(bench: &CheckEnvironment, more: &[&str]) -> Result<(), Failure> {
    let json = bench.dir().join("demo.json");
    let path = json.display().to_string();
    let mut arguments = vec!["demo", "--runtime", "1", "--json", &path];
    arguments.extend(more);
    let options = demo::DemoOptions::try_parse_from(arguments)?;
    expect(demo::run(&options)?, || {
        "The demonstration failed".to_owned()
    })?;
    let text = fs::read_to_string(&json).map_err(with_path(json))?;
    let report: serde_json::Value = serde_json::from_str(&text)?;
    let guests = report["guests"].as_array().map_or(0, Vec::len);
    expect(report["isolation_ok"] == true && guests == 2, || text)
}

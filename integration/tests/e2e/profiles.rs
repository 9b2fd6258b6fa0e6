//! A profile that is fitted to fio's measurements in a guest, on a drive with a known profile.

use std::fs;
use std::path::Path;
use std::process::Command;

use integration::guest::fio::GuestFioJob;
use integration::guest::{Guest, GuestConfig, GuestDrive, HOTPLUG_BUS};
use integration::process;
use integration::server::{FunctionArgument, Server};
use nvme_models::DriveProfile;

use crate::Group;
use crate::fixture::{CheckEnvironment, FUNCTION, Failure, TIMEOUT, await_path, expect, with_path};

pub(crate) const GROUP: Group = Group::Alone {
    name: "profiles",
    checks: &[("fitted_to_what_a_guest_measures", check_fitted_profile)],
};

/// A slow profile, so that the guest's own time matters little, and few commands reach the limits.
const GIVEN_PROFILE: &str = "model = \"nvm\"\nunits = 4\nstripe = \"32K\"\n\
    read = { latency = \"5ms\", bandwidth = \"32M\" }\nwrite = { latency = \"8ms\", bandwidth = \"24M\" }\n";

fn check_fitted_profile(bench: &CheckEnvironment) -> Result<(), Failure> {
    write(&bench.dir().join("given.toml"), GIVEN_PROFILE)?;
    let mut server = bench.serve(&[function("given.toml", bench.dir())])?;
    let config = GuestConfig::new("guest")
        .vcpus(2)
        .hotplug()
        .drive(GuestDrive::vfio_user(server.socket(FUNCTION)));
    let mut guest = bench.boot(&config)?;
    let report = bench.dir().join("drive.json");
    write(&report, &measure_drive(&guest)?)?;

    let text = process::run(
        Command::new(bench.program())
            .args(["profile", "fit"])
            .arg(&report),
    )?;
    let dir = bench.dir().join("fitted");
    fs::create_dir_all(&dir).map_err(with_path(&dir))?;
    let fitted = dir.join("fitted.toml");
    write(&fitted, &text)?;
    // The values depend on the speed of this guest. Tests of `fit` compare values.
    let parsed = DriveProfile::parse(&fitted.display().to_string(), &text);
    expect(matches!(parsed, Ok(DriveProfile::Nvm(_))), || {
        format!("No profile of a drive: {parsed:?}:\n{text}")
    })?;

    let mut second = Server::start(bench.program(), &[function("fitted.toml", &dir)], &dir)?;
    guest.plug(
        &GuestDrive::vfio_user(second.socket(FUNCTION))
            .id("fitted")
            .bus(HOTPLUG_BUS),
    )?;
    await_path(&guest, "/dev/nvme1n1", true)?;
    let reads = GuestFioJob::new("reads", "randread", "4k", 1)
        .option("filename", "/dev/nvme1n1")
        .option("number_ios", "100")
        .run(&guest)?
        .read;
    expect(reads.ios > 0, || format!("{reads:?}"))?;
    second.expect_alive()?;
    server.expect_alive()?;
    Ok(())
}

fn function(profile: &str, dir: &Path) -> FunctionArgument {
    let profile = dir.join(profile);
    FunctionArgument::new(FUNCTION, "memory:64M", "0+64M")
        .option(format!("profile={}", profile.display()))
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    fs::write(path, text).map_err(with_path(path))
}

/// Returns fio's report of `resources/drives/measure.fio`, with short jobs.
fn measure_drive(guest: &Guest) -> Result<String, Failure> {
    let path = integration::workspace_dir().join("resources/drives/measure.fio");
    let jobs = fs::read_to_string(&path).map_err(with_path(path))?;
    let (mut short, mut shortened) = (String::new(), 0);
    for line in jobs.lines() {
        let line = match line.split_once('=') {
            Some(("runtime", _)) => "runtime=3",
            Some(("ramp_time", _)) => "ramp_time=0",
            _ => line,
        };
        shortened += usize::from(line == "runtime=3" || line == "ramp_time=0");
        short.push_str(line);
        short.push('\n');
    }
    expect(shortened == 2, || format!("{short} runs for too long"))?;
    let script = format!(
        "cat >/tmp/measure.fio <<'END'\n{short}END\n\
         fio --filename=/dev/nvme0n1 --output-format=json --output=/tmp/drive.json /tmp/measure.fio && \
         cat /tmp/drive.json"
    );
    Ok(guest.check(&script, 2 * TIMEOUT)?)
}

//! Checks of the systemd unit, the udev rule and the example configuration file of the service.

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;

use nvme_mpt_tests::not_checked::not_checked;

use crate::changes::{list, serve_file};
use crate::support::{Bench, Server, TIMEOUT};

/// Keys of the unit that systemd knows since version 254. Older versions ignore these keys with a warning.
const NEWER: [&str; 2] = ["'RestartSteps'", "'RestartMaxDelaySec'"];

fn resource(name: &str) -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.join("../../resources").join(name)
}

fn read(name: &str) -> String {
    fs::read_to_string(resource(name)).unwrap()
}

/// Runs systemd-analyze, if it is installed. Returns its whole output.
fn systemd_analyze(arguments: &[&str]) -> Option<String> {
    match Command::new("systemd-analyze").args(arguments).output() {
        Ok(output) => {
            let text = [output.stdout, output.stderr].concat();
            Some(String::from_utf8(text).unwrap())
        }
        Err(error) => {
            not_checked(&format!(
                "systemd-analyze cannot be run ({error}): install systemd"
            ));
            None
        }
    }
}

fn version() -> Option<u32> {
    let text = systemd_analyze(&["--version"])?;
    let number = text.split_whitespace().nth(1)?;
    number.parse().ok()
}

#[test]
fn systemd_rates_the_unit_as_confined() {
    let Some(version) = version() else { return };
    let unit = resource("nvme-mpt.service");
    let arguments = ["security", "--offline=true", "--no-pager"];
    let report = systemd_analyze(&[&arguments[..], &[unit.to_str().unwrap()]].concat()).unwrap();
    let (_, exposure) = report
        .split_once("Overall exposure level for nvme-mpt.service: ")
        .expect(&report);
    let mut words = exposure.split_whitespace();
    let (figure, rating) = (words.next().unwrap(), words.next().unwrap());
    assert!(["OK", "SAFE", "PERFECT"].contains(&rating), "{report}");
    if version == 252 {
        let document = fs::read_to_string(resource("../docs/security.md")).unwrap();
        let claim = format!("exposure of {figure} ({rating})");
        assert!(document.contains(&claim), "docs/security.md lacks: {claim}");
    }
}

#[test]
fn systemd_takes_the_whole_unit() {
    let Some(version) = version() else { return };
    let bench = Bench::new();
    let unit = bench.path("nvme-mpt.service");
    let program = env!("CARGO_BIN_EXE_nvme-mpt");
    let text = read("nvme-mpt.service");
    fs::write(&unit, text.replace("/usr/bin/nvme-mpt", program)).unwrap();
    let report = systemd_analyze(&["verify", "--man=no", unit.to_str().unwrap()]).unwrap();
    let is_newer = |line: &&str| version < 254 && NEWER.iter().any(|key| line.contains(key));
    // systemd-analyze reports on other units of the machine as well, so those reports are removed.
    let complaints: Vec<_> = report
        .lines()
        .filter(|line| line.contains("nvme-mpt") && !is_newer(line))
        .collect();
    assert!(complaints.is_empty(), "{complaints:#?}");
}

#[test]
fn a_service_manager_without_a_store_gets_ready_and_stopping() {
    let bench = Bench::new();
    let manager = UnixDatagram::bind(bench.path("notify")).unwrap();
    manager.set_read_timeout(Some(TIMEOUT)).unwrap();
    let next = || {
        let mut message = [0; 64];
        let length = manager.recv(&mut message).unwrap();
        String::from_utf8(message[..length].to_vec()).unwrap()
    };
    let mut serve = bench.serve_command("one", &[]);
    serve.env("NOTIFY_SOCKET", bench.path("notify"));
    let server = Server::start(serve).unwrap();
    assert_eq!(next(), "READY=1");
    server.stop();
    assert_eq!(next(), "STOPPING=1");
}

#[test]
fn the_example_of_the_service_serves_nothing_until_it_is_changed() {
    let bench = Bench::new();
    let example = read("package/nvme-mpt.toml");
    let server = serve_file(&bench, &example).unwrap();
    assert!(list(&bench).is_empty());
    server.stop();
}

#[test]
fn the_example_of_the_service_is_right_with_drives_of_the_machine() {
    let bench = Bench::new();
    let image = fs::File::create(bench.path("vm-2.img")).unwrap();
    image.set_len(1 << 20).unwrap();
    let lines = read("package/nvme-mpt.toml");
    let lines = lines.lines().map(|line| {
        let bare = line.strip_prefix("# ").unwrap_or(line);
        match bare.starts_with("[[") || bare.contains(" = ") {
            true => bare,
            false => "",
        }
    });
    let example = lines.collect::<Vec<_>>().join("\n");
    let work_dir = bench.path("");
    let work_dir = work_dir.to_str().unwrap().trim_end_matches('/');
    let group = nix::unistd::getgid();
    let example = example
        .replace("0000:01:00.0", "memory:128G")
        .replace("/var/lib/nvme-mpt", work_dir)
        .replace("/run/nvme-mpt", work_dir)
        .replace(":kvm", &format!(":{group}"));
    let server = serve_file(&bench, &example).unwrap();
    assert_eq!(list(&bench).len(), 2);
    server.stop();
}

#[test]
fn the_service_group_gets_only_iommu_groups_of_nvme_drives() {
    let rules = read("package/70-nvme-mpt.rules");
    let programs: Vec<_> = rules.split("PROGRAM=\"/bin/sh -c '").skip(1).collect();
    assert_eq!(
        programs.len(),
        2,
        "for groups, and for functions' own nodes"
    );
    for program in programs {
        let (program, _) = program.split_once("'\"").unwrap();
        let of_node = "/sys/class/vfio-dev/%k/device/iommu_group/devices";
        let program = program.replace(of_node, "/sys/kernel/iommu_groups/%k/devices");
        for (classes, is_given) in [
            (&["0x010802"][..], true),
            (&["0x010802", "0x010802"], true),
            (&["0x060400", "0x010802"], true),
            (&["0x010802", "0x020000"], false),
            (&["0x030000"], false),
            (&["0x060400"], false),
            (&[], false),
        ] {
            let bench = Bench::new();
            let devices = bench.path("7/devices");
            fs::create_dir_all(&devices).unwrap();
            for (place, class) in classes.iter().enumerate() {
                let device = devices.join(format!("0000:01:00.{place}"));
                fs::create_dir(&device).unwrap();
                fs::write(device.join("class"), format!("{class}\n")).unwrap();
            }
            let groups = bench.path("");
            let groups = groups.to_str().unwrap().trim_end_matches('/');
            let script = program
                .replace("/sys/kernel/iommu_groups", groups)
                .replace("%k", "7");
            let output = Command::new("sh").args(["-c", &script]).output().unwrap();
            assert_eq!(output.status.success(), is_given, "{classes:?}: {output:?}");
        }
    }
}

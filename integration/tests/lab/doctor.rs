//! `nvme-mpt doctor` on the lab host and a lab drive.

use std::process::{Command, Stdio};

use integration::lab::inside;
use integration::progress::print_line;
use serde_json::Value;

use crate::fixture::{CheckEnvironment, Failure, expect, sh, with_path};

/// Checks whose results do not depend on the driver that is used to query the drive.
const ABILITY_CHECKS: &[&str] = &[
    "drive.model",
    "drive.queue_pairs",
    "drive.transfer",
    "drive.namespace.1",
    "drive.wiping",
    "drive.deallocate",
    "drive.copy",
    "drive.commands",
    "drive.sgl",
    "drive.doorbell_buffer",
    "drive.write_cache",
    "drive.controller_memory",
];

/// Checks of a namespace that do not depend on timing.
const NAMESPACE_CHECKS: &[&str] = &[
    "scratch.sharing",
    "scratch.isolation",
    "scratch.reset",
    "scratch.upgrade",
    "scratch.latency",
    "scratch.iops_32",
    "scratch.iops_128",
    "scratch.neighbour",
    "scratch.host_driver",
    "scratch.given_back",
];

/// A report, and whether the command succeeded.
struct Report {
    succeeded: bool,
    json: Value,
}

impl Report {
    fn run(arguments: &str) -> Result<Self, Failure> {
        let program = inside::copied_path("nvme-mpt");
        let output = Command::new(&program)
            .args(["doctor", "--json", "--state-dir", "/tmp/doctor"])
            .args(arguments.split_whitespace())
            .stdin(Stdio::null())
            .output()
            .map_err(with_path(&program))?;
        let json = serde_json::from_slice(&output.stdout)
            .map_err(|error| Failure::from(format!("doctor {arguments}: {error}: {output:?}")))?;
        Ok(Self {
            succeeded: output.status.success(),
            json,
        })
    }

    /// Returns outcome and finding of a check.
    fn check(&self, name: &str) -> Result<(&str, &str), Failure> {
        let sections = self.json["sections"].as_array().into_iter().flatten();
        let mut checks =
            sections.flat_map(|section| section["checks"].as_array().into_iter().flatten());
        let found = checks.find(|check| check["name"] == name);
        let found =
            found.and_then(|check| Some((check["outcome"].as_str()?, check["finding"].as_str()?)));
        found.ok_or_else(|| format!("There is no {name} in {}", self.json).into())
    }

    fn expect(&self, name: &str, wanted: &str) -> Result<(), Failure> {
        let (outcome, finding) = self.check(name)?;
        expect(outcome == wanted, || {
            format!("{name} is {outcome} instead of {wanted}: {finding}")
        })
    }
}

/// Examines a drive through either driver, and tries out a namespace.
pub(crate) fn examined(_: &CheckEnvironment) -> Result<(), Failure> {
    let address = inside::address("a")?;
    inside::bind("a", "nvme")?;
    inside::block_device("a", 1)?;
    let by_host = Report::run(&address)?;
    expect(by_host.succeeded, || by_host.json.to_string())?;
    for name in [
        "host.iommu",
        "host.vfio_pci",
        "host.vfio_iommu_type1",
        "drive.iommu_group",
        "drive.users",
        "drive.health",
    ] {
        by_host.expect(name, "ok")?;
    }
    by_host.expect("drive.driver", "warning")?;

    inside::bind("a", "vfio-pci")?;
    let by_vfio = Report::run(&address)?;
    expect(by_vfio.succeeded, || by_vfio.json.to_string())?;
    by_vfio.expect("drive.driver", "ok")?;
    for name in ABILITY_CHECKS {
        by_host.expect(name, "ok")?;
        let (one, other) = (by_host.check(name)?, by_vfio.check(name)?);
        expect(one == other, || format!("{name}: {one:?} and {other:?}"))?;
    }

    inside::bind("a", "nvme")?;
    let device = inside::block_device("a", 1)?.display().to_string();
    let write = |text: &str| {
        sh(&format!(
            "printf '{text}' | dd of={device} bs=512 seek=1 count=1 conv=sync oflag=direct"
        ))
    };
    write("EFI PART")?;
    let scratch = format!("{address} --scratch 1 --yes --seconds 1");
    let refused = Report::run(&scratch)?;
    expect(!refused.succeeded, || refused.json.to_string())?;
    refused.expect("scratch.setup", "not checked")?;
    write("\\0")?;
    let tried = Report::run(&scratch)?;
    for name in NAMESPACE_CHECKS {
        tried.expect(name, "ok")?;
        print_line(&format!("        {name}: {}", tried.check(name)?.1));
    }
    // A slow lab may not reach the limit, but must not exceed it.
    let (outcome, finding) = tried.check("scratch.limits")?;
    expect(outcome != "problem", || finding.to_owned())?;
    print_line(&format!("        scratch.limits: {finding}"));
    expect(tried.succeeded, || tried.json.to_string())?;
    // The host's driver has the drive again.
    inside::block_device("a", 1)?;
    Ok(())
}

//! Guests with a virtual IOMMU, whose driver maps pages for each command: boot, verified I/O, a file system, and resets under
//! load.

use std::time::{Duration, Instant};

use integration::guest::fio::GuestFioJob;
use integration::guest::{GuestConfig, GuestDrive};
use integration::progress::print_line;
use integration::provision::GuestAssets;

use crate::Group;
use crate::fixture::{
    CheckEnvironment, FUNCTION, Failure, TIMEOUT, expect, expect_no_complaints, function,
    verified_load,
};

pub(crate) const GROUP: Group = Group::Alone {
    name: "viommu",
    checks: &[
        ("v6_1", |bench| from_boot_to_resets(bench, &bench.v6_1()?)),
        ("v6_12", |bench| from_boot_to_resets(bench, bench.v6_12())),
    ],
};

/// In strict mode, unmaps wait for the device, as in a host that protects itself from its devices.
const ARGUMENTS: &str = "intel_iommu=on iommu.passthrough=0 iommu.strict=1";

const FILE_SYSTEM: &str = "mkfs.ext4 -q -F /dev/nvme0n1 && mount -t ext4 /dev/nvme0n1 /mnt && \
     for i in $(seq 8); do head -c 1300000 /dev/urandom > /mnt/$i || exit 1; done && \
     cd /mnt && md5sum ? > /tmp/sums && sync && cd / && umount /mnt && \
     mount -t ext4 /dev/nvme0n1 /mnt && cd /mnt && md5sum -c /tmp/sums && cd / && umount /mnt && \
     e2fsck -f -n /dev/nvme0n1";

fn from_boot_to_resets(bench: &CheckEnvironment, assets: &GuestAssets) -> Result<(), Failure> {
    let mut server = bench.serve(&[function(bench)?])?;
    let config = GuestConfig::new("guest")
        .vcpus(2)
        .virtual_iommu()
        .kernel_arguments(ARGUMENTS)
        .drive(GuestDrive::vfio_user(server.socket(FUNCTION)));
    let guest = bench.boot_with(assets, &config)?;
    let domain = guest.check("cat /sys/class/nvme/nvme0/device/iommu_group/type", TIMEOUT)?;
    expect(domain.trim() == "DMA", || {
        format!("The drive's IOMMU domain is '{domain}', not DMA")
    })?;

    let counts = || Ok::<_, Failure>(server.function_stats(FUNCTION)?.memory);
    let (before, began) = (counts()?, Instant::now());
    verified_load("verify", 2).run(&guest)?;
    let (after, seconds) = (counts()?, began.elapsed().as_secs_f64());
    let per_second = |count: u64| count as f64 / seconds;
    let (maps, unmaps) = (after.maps - before.maps, after.unmaps - before.unmaps);
    print_line(&format!(
        "        fio had {maps} regions mapped and {unmaps} unmapped: {:.0} and {:.0} a second",
        per_second(maps),
        per_second(unmaps)
    ));
    expect(maps > 0 && unmaps > 0, || {
        "The guest mapped no memory for its I/O".to_owned()
    })?;
    // Large commands with PRP lists, from memory that begins in the middle of a page.
    GuestFioJob::new("large", "randwrite", "512k", 4)
        .option("size", "64m")
        .option("iomem_align", "512")
        .with_verification()
        .run(&guest)?;
    guest.check(FILE_SYSTEM, TIMEOUT)?;
    expect_no_complaints(&guest)?;

    let load = verified_load("load", 1).runtime(Duration::from_secs(8));
    let job = guest.start(&load.script())?;
    guest.check(
        "for i in 1 2 3 4; do sleep 1; nvme reset /dev/nvme0 || exit 1; done",
        TIMEOUT,
    )?;
    let output = guest.finish(job, load.timeout())?;
    load.report(&output.text)?;
    verified_load("afterwards", 2).run(&guest)?;
    server.expect_alive()?;
    Ok(())
}

//! A guest that exports its function to another guest by Linux's NVMe/TCP target, while the function's server is killed and
//! replaced.

use integration::guest::{BOOT_TIMEOUT, Guest, GuestConfig, GuestDrive};
use integration::provision::GuestAssets;
use integration::server::ServerReplacement;

use crate::Group;
use crate::fixture::{
    CheckEnvironment, ENDLESS, FUNCTION, Failure, TIMEOUT, await_load, await_path, await_that,
    end_load, expect, expect_no_complaints, function, verified_load,
};

pub(crate) const GROUP: Group = Group::Alone {
    name: "fabrics",
    checks: &[("a_function_is_exported", a_function_is_exported)],
};

/// Fewest commands that each server completes.
const COMMANDS: u64 = 500;

const EXPORT: &str = "\
    set -e
    ip link set eth0 up
    ip address add 10.0.0.1/24 dev eth0
    mount -t configfs none /sys/kernel/config
    cd /sys/kernel/config/nvmet
    mkdir subsystems/nqn.2026-11.example:function
    cd subsystems/nqn.2026-11.example:function
    echo 1 > attr_allow_any_host
    mkdir namespaces/1
    echo -n /dev/nvme0n1 > namespaces/1/device_path
    echo 1 > namespaces/1/enable
    mkdir /sys/kernel/config/nvmet/ports/1
    cd /sys/kernel/config/nvmet/ports/1
    echo tcp > addr_trtype
    echo ipv4 > addr_adrfam
    echo 10.0.0.1 > addr_traddr
    echo 4420 > addr_trsvcid
    ln -s /sys/kernel/config/nvmet/subsystems/nqn.2026-11.example:function subsystems/";

/// Connects with a long keep-alive timeout, because an emulated guest is slow to answer.
const CONNECT: &str = "\
    ip link set eth0 up && ip address add 10.0.0.2/24 dev eth0 && \
    nvme connect -t tcp -a 10.0.0.1 -s 4420 -n nqn.2026-11.example:function -i 2 -k 300 \
      --hostid=5e1f0f86-9fc4-4d3c-a0a8-1a4be2cd1a9b \
      --hostnqn=nqn.2014-08.org.nvmexpress:uuid:5e1f0f86-9fc4-4d3c-a0a8-1a4be2cd1a9b";

const WRITE: &str = "head -c 2097152 /dev/urandom > /tmp/bytes && \
                     dd if=/tmp/bytes of=/dev/nvme0n1 bs=256k seek=400 oflag=direct conv=fsync 2>&1 && \
                     md5sum < /tmp/bytes";
const READ: &str = "dd if=/dev/nvme0n1 bs=256k skip=400 count=8 iflag=direct 2>/dev/null | md5sum";

fn a_function_is_exported(bench: &CheckEnvironment) -> Result<(), Failure> {
    let assets = GuestAssets::provide_with_modules(&["virtio_net", "nvmet_tcp", "nvme_tcp"])?;
    let mut server = bench.serve_supervised(&[function(bench)?])?;
    let wire = bench.dir().join("wire");
    let boot = |config: GuestConfig, listens: &str, mac: &str| -> Result<Guest, Failure> {
        let wire = wire.display();
        let end = format!("stream,id=wire,server={listens},addr.type=unix,addr.path={wire}");
        // Without the boot ROM, which this emulator installation does not include.
        let card = format!("virtio-net-pci,netdev=wire,romfile=,mac={mac}");
        let config = config
            .vcpus(2)
            .qemu_arguments(["-netdev", &*end, "-device", &*card]);
        Ok(Guest::start_booting(&assets, &config, bench.dir())?)
    };
    let exporter =
        GuestConfig::new("exporter").drive(GuestDrive::vfio_user(server.socket(FUNCTION)));
    let exporter = boot(exporter, "on", "52:54:00:00:00:01")?;
    // The exporter listens on the stream socket when the importer connects.
    let importer = boot(GuestConfig::new("importer"), "off", "52:54:00:00:00:02")?;
    for guest in [&exporter, &importer] {
        guest.await_ready(BOOT_TIMEOUT)?;
        guest.load_modules()?;
    }
    exporter.check(EXPORT, TIMEOUT)?;
    importer.check(CONNECT, TIMEOUT)?;
    await_path(&importer, "/dev/nvme0n1", true)?;

    let load = verified_load("load", 1)
        .option("verify_backlog", "1024")
        .runtime(ENDLESS);
    let job = importer.start(&load.script())?;
    await_load(&importer)?;
    for how in [
        ServerReplacement::Upgrade,
        ServerReplacement::Kill,
        ServerReplacement::Upgrade,
    ] {
        await_that("commands of the importer", || {
            Ok(server.queue_totals(FUNCTION)?.commands > COMMANDS)
        })?;
        server.replace(how)?;
    }
    await_that("commands of the importer", || {
        Ok(server.queue_totals(FUNCTION)?.commands > COMMANDS)
    })?;
    end_load(&importer)?;
    let output = importer.finish(job, load.timeout())?;
    let report = load.report(&output.text)?;
    expect(report.read.ios > 0 && report.write.ios > 0, || {
        format!("The importer has not verified anything: {report:?}")
    })?;

    // Both guests must read the same bytes.
    let written = importer.check(WRITE, TIMEOUT)?;
    let written = written.lines().last().unwrap_or_default().to_owned();
    let read = exporter.check(READ, TIMEOUT)?;
    expect(read.trim() == written.trim(), || {
        format!("The importer wrote {written}, and the exporter reads {read}")
    })?;
    importer.check("nvme disconnect-all", TIMEOUT)?;
    for guest in [&exporter, &importer] {
        expect_no_complaints(guest)?;
    }
    server.expect_alive()?;
    drop((exporter, importer));
    server.stop()?;
    Ok(())
}

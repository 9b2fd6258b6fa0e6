//! An unmodified Linux on a function of a physical drive: abilities, health, queue pairs shared with another guest, and
//! removal.

use std::time::Duration;

use integration::guest::fio::GuestFioJob;
use integration::guest::{Guest, GuestConfig, GuestDrive};
use integration::lab::{LabDrive, inside};
use integration::server::{FunctionArgument, Server};
use nvme_guest::stats::HostQueueUse;
use nvme_mpt_server::stats::QueuePairStats;

use crate::client::{Client, ClientWork};
use crate::fixture::{CheckEnvironment, Failure, TIMEOUT, await_that, expect};
use crate::{ExpectedRefusals, Group};

pub(crate) const GROUP: Group = Group::Inside {
    name: "linux",
    drives: || {
        let mut few = LabDrive::new("a", 256 << 20);
        (few.max_ioqpairs, few.lba_size) = (1, 4096);
        vec![few]
    },
    refused: ExpectedRefusals::None,
    checks: &[("guests_share_a_drive_until_it_is_gone", from_start_to_end)],
};

/// Two functions of a drive, with Linux on one and a native client on the other. A second machine is avoided, because KVM in
/// the lab often loses one of two concurrent machines.
struct Scene {
    server: Server,
    guest: Guest,
    neighbour: Client,
    address: String,
}

fn scene(bench: &CheckEnvironment) -> Result<Scene, Failure> {
    inside::bind("a", "vfio-pci")?;
    let address = inside::address("a")?;
    let server = bench.serve(&[
        FunctionArgument::new("one", &address, "0+64M"),
        FunctionArgument::new("two", &address, "64M+64M"),
    ])?;
    let drive = GuestDrive::vfio_user(server.socket("one"));
    Ok(Scene {
        guest: bench.boot(&GuestConfig::new("one").drive(drive))?,
        neighbour: Client::start("two", &server.socket("two"), ClientWork::new(2))?,
        server,
        address,
    })
}

/// Returns a number that `nvme` prints after a name and a colon.
fn field(guest: &Guest, command: &str, name: &str) -> Result<u64, Failure> {
    let text = guest.check(command, TIMEOUT)?;
    let value = text.lines().find_map(|line| {
        let (found, value) = line.split_once(':')?;
        let value = value.trim();
        (found.trim() == name).then(|| match value.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16).ok(),
            None => value.parse().ok(),
        })?
    });
    value.ok_or_else(|| Failure::from(format!("`{command}` shows no number {name}:\n{text}")))
}

fn critical_warning(guest: &Guest) -> Result<u64, Failure> {
    field(guest, "nvme smart-log /dev/nvme0", "critical_warning")
}

fn load(name: &str) -> GuestFioJob {
    GuestFioJob::new(name, "randrw", "4k", 8)
        .option("size", "16m")
        .option("verify", "crc32c")
        .option("verify_backlog", "64")
}

/// Runs all steps in one scene, because each boot may lose the machine.
fn from_start_to_end(bench: &CheckEnvironment) -> Result<(), Failure> {
    let mut scene = scene(bench)?;
    shares_queue_pairs(&scene)?;
    knows_its_health(&scene)?;
    loses_its_disk_and_does_not_hang(&mut scene)?;
    scene.guest.power_off(TIMEOUT)?;
    let counts = scene.neighbour.finish()?.counts;
    expect(counts.lost_commands() + counts.doubled == 0, || {
        format!("Of the neighbour's commands: {counts:?}")
    })?;
    scene.server.stop()?;
    Ok(())
}

fn shares_queue_pairs(scene: &Scene) -> Result<(), Failure> {
    let Scene {
        server,
        guest,
        neighbour,
        address,
    } = scene;
    // QEMU's drive supports neither Write Uncorrectable nor SGLs that a function could offer. A lease reports events for its
    // namespace.
    let id = "nvme id-ctrl /dev/nvme0";
    for (name, expected) in [("oncs", 0x5d), ("sgls", 0), ("oaes", 0x100)] {
        let found = field(guest, id, name)?;
        expect(found == expected, || {
            format!("{name} is {found:#x}, not {expected:#x}")
        })?;
    }
    let block = guest.check("cat /sys/block/nvme0n1/queue/logical_block_size", TIMEOUT)?;
    expect(block.trim() == "4096", || {
        format!("Logical blocks of {block} bytes")
    })?;

    // Both guests' queues share a queue pair of the drive.
    let shared = load("shared");
    let job = guest.start(&shared.script())?;
    let is_shared = || {
        // A server that is held up does not answer in time.
        let Ok(stats) = server.stats() else {
            return Ok(false);
        };
        let of_drive = stats.drives.iter().find(|drive| drive.path == *address);
        let pairs = of_drive.and_then(|drive| drive.queue_pairs);
        let queues = stats.functions.iter().flat_map(|function| &function.queues);
        let shared = queues.filter(|queue| queue.host_queue == Some(HostQueueUse::Shared));
        let all_shared = QueuePairStats {
            total: 1,
            shared: 1,
            ..QueuePairStats::default()
        };
        Ok(pairs == Some(all_shared) && shared.count() == 2)
    };
    await_that("two queues that share a queue pair", is_shared)?;
    shared.report(&guest.finish(job, shared.timeout())?.text)?;
    neighbour.advance()
}

fn knows_its_health(scene: &Scene) -> Result<(), Failure> {
    let Scene {
        server,
        guest,
        address,
        ..
    } = scene;
    inside::control("warn a 4")?;
    await_that("the drive's warning", || Ok(critical_warning(guest)? == 4))?;
    // The server queries the warning once a minute. A server that is held up does not answer in time.
    await_that("the warning in the server's figures", || {
        let drive = server.drive_stats(address);
        Ok(drive.is_ok_and(|drive| drive.critical_warning == Some(4)))
    })?;
    inside::control("warn a 0")?;
    await_that("the end of the drive's warning", || {
        Ok(critical_warning(guest)? == 0)
    })
}

fn loses_its_disk_and_does_not_hang(scene: &mut Scene) -> Result<(), Failure> {
    let Scene {
        server,
        guest,
        neighbour,
        address,
    } = scene;
    let endless = load("endless").runtime(Duration::from_secs(600)).script();
    let commands = || Ok::<_, Failure>(server.queue_totals("one")?.commands);
    let before = commands()?;
    let job = guest.start(&endless)?;
    // If the disk disappears before fio opens it, fio creates a file.
    await_that("load", || Ok(commands()? > before + 2000))?;
    neighbour.advance()?;
    inside::control("remove a")?;
    let output = guest.finish(job, TIMEOUT)?;
    expect(output.status != 0, || {
        "fio did not notice that the drive is gone".to_owned()
    })?;
    neighbour.wait_for("to have errors", || neighbour.errors() > 20)?;
    let stats = server.drive_stats(address)?;
    expect(stats.gone, || format!("The drive is not gone: {stats:?}"))?;
    await_that("the disk to go", || {
        Ok(guest.run("[ ! -e /dev/nvme0n1 ]", TIMEOUT)?.status == 0)
    })?;
    let warning = critical_warning(guest)?;
    expect(warning == 4, || {
        format!("The Critical Warning is {warning:#x}")
    })?;
    // The disk does not come back, but commands do not hang.
    guest.check("nvme reset /dev/nvme0", TIMEOUT)?;
    let state = guest.check("cat /sys/class/nvme/nvme0/state", TIMEOUT)?;
    expect(state.trim() == "live", || {
        format!("The controller is {state}")
    })?;
    // The guest's driver must not have hit its own timeout.
    let waited = guest.run(
        "dmesg | grep -v 'ommand line' | grep -iE 'nvme.*time ?out|blocked for more'",
        TIMEOUT,
    )?;
    expect(waited.status != 0, || {
        format!("The guest waited: {}", waited.text)
    })?;
    server.expect_alive()?;
    Ok(())
}

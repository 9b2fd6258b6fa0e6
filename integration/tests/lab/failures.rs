//! Failures of a drive, of its guests and of its server while three guests work: two on the affected drive, and one on another
//! drive. Each command must end once, all data must be in its place, and the guest of the other drive must notice nothing. A
//! table at the end has all counts.
//!
//! QEMU's drives execute an Abort only once the data has arrived: they honour an Abort late, or ignore it while the drive is
//! frozen.

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use integration::lab::{LabDrive, inside};
use integration::process::SupervisedChild;
use integration::progress::print_line;
use integration::server::{FunctionArgument, Server, ServerReplacement};
use nvme_mpt_server::stats::DriveStats;

use crate::client::{Client, ClientWork, Contents, Counts, Outcome};
use crate::fixture::{CheckEnvironment, Failure, await_that, expect, iommu_faults, sh, with_path};
use crate::{ExpectedRefusals, Group, killed_servers, native};

pub(crate) const GROUP: Group = Group::Inside {
    name: "failures",
    drives: || vec![LabDrive::new("a", 64 << 20), LabDrive::new("b", 64 << 20)],
    refused: ExpectedRefusals::None,
    checks: &[
        ("overdue_and_abort_is_honoured", honoured),
        ("overdue_and_abort_is_ignored", ignored),
        ("controller_reset_behind_our_back", controller_reset),
        ("controller_fatal_status", fatal_status),
        ("media_error", media_error),
        ("guest_resets_its_controller", guest_reset),
        (
            "guest_takes_its_memory_while_the_drive_is_frozen",
            guest_detach,
        ),
        ("guest_dies_while_the_drive_is_frozen", guest_death),
        ("guest_process_is_killed", guest_killed),
        ("drive_is_removed", removal),
        ("server_is_stopped", server_stopped),
        ("server_is_killed", server_killed),
        ("every_command_is_accounted_for", table),
        ("a_hundred_servers_are_killed_under_a_function", |bench| {
            native::check_restored(bench, 100)
        }),
        (
            "a_hundred_kept_servers_are_killed_under_a_client",
            |bench| native::check_replacements(bench, ServerReplacement::Kill, 100),
        ),
        ("a_hundred_servers_are_killed_beside_much_memory", |bench| {
            killed_servers::beside_large_memory(bench, 100)
        }),
        ("a_hundred_upgrades_reset_no_drive", |bench| {
            native::check_replacements(bench, ServerReplacement::Upgrade, 100)
        }),
    ],
};

/// Start of the ranges of drive a's two guests in bytes, and length of each range.
const RANGES: [u64; 2] = [0, 32 << 20];
const RANGE: u64 = 16 << 20;
/// The shortest command timeout, for checks in which a command must miss its deadline.
const SHORT: &str = "timeout=1";

/// Effects of a failure on the guests.
struct Row {
    failure: String,
    /// Both guests of the failed drive.
    same_drive: Counts,
    /// Guest of the other drive.
    other_drive: Counts,
    iommu_faults: u64,
}

/// File with the rows of all failures so far.
const TABLE: &str = "/tmp/failures";

/// Two drives of a server, with three guests at work.
struct Scene {
    failure: String,
    server: Server,
    a: [Client; 2],
    b: Client,
    drive: String,
    iommu_faults: u64,
}

impl Scene {
    fn start(bench: &CheckEnvironment, failure: &str, options: &[&str]) -> Result<Self, Failure> {
        let iommu_faults = iommu_faults()?;
        inside::bind("a", "vfio-pci")?;
        inside::bind("b", "vfio-pci")?;
        let (a, b) = (inside::address("a")?, inside::address("b")?);
        let function = |id: &str, path: &str, start: u64| {
            FunctionArgument::new(id, path, format!("{start}+{RANGE}"))
        };
        let mut functions = vec![function("a1", &a, RANGES[0]), function("a2", &a, RANGES[1])];
        for option in options {
            functions = functions.into_iter().map(|f| f.option(*option)).collect();
        }
        functions.push(function("b1", &b, 0));
        let server = bench.serve(&functions)?;
        let guest = |name, seed| Client::start(name, &server.socket(name), ClientWork::new(seed));
        let scene = Self {
            failure: failure.to_owned(),
            a: [guest("a1", 1)?, guest("a2", 2)?],
            b: guest("b1", 3)?,
            drive: a,
            server,
            iommu_faults,
        };
        scene.advance()?;
        Ok(scene)
    }

    /// Waits until all three guests make progress.
    fn advance(&self) -> Result<(), Failure> {
        // The first commands write the range, so progress is awaited after them.
        for client in [&self.a[0], &self.a[1], &self.b] {
            let places = ClientWork::new(0).places as u64;
            client.wait_for("to write its range", || client.completed() > places)?;
            client.advance()?;
        }
        Ok(())
    }

    fn drive_stats(&self) -> Result<DriveStats, Failure> {
        Ok(self.server.drive_stats(&self.drive)?)
    }

    /// Waits until the drive's statistics satisfy `condition`.
    fn await_drive(
        &self,
        what: &str,
        condition: impl Fn(&DriveStats) -> bool,
    ) -> Result<(), Failure> {
        await_that(what, || Ok(condition(&self.drive_stats()?)))
    }

    /// Ends all guests in order, after a failure that must cause no error.
    fn finish_without_errors(self) -> Result<(), Failure> {
        self.advance()?;
        let Self {
            failure,
            mut server,
            a: [first, second],
            b,
            iommu_faults,
            ..
        } = self;
        let same_drive = [first.finish()?, second.finish()?];
        let other_drive = b.finish()?;
        server.stop()?;
        let errors = same_drive[0].counts.errors + same_drive[1].counts.errors;
        record_row(&failure, &same_drive, &other_drive, iommu_faults)?;
        expect(errors == 0, || {
            format!(
                "{errors} commands failed: {:?}",
                same_drive.map(|o| o.counts.statuses)
            )
        })
    }
}

/// Records a row, and fails if the row has a forbidden count.
fn record_row(
    failure: &str,
    same_drive: &[Outcome; 2],
    other_drive: &Outcome,
    faults_before: u64,
) -> Result<(), Failure> {
    let row = Row {
        failure: failure.to_owned(),
        same_drive: same_drive[0].counts.sum_with(&same_drive[1].counts),
        other_drive: other_drive.counts.clone(),
        iommu_faults: iommu_faults()? - faults_before,
    };
    let wrong = row.fault();
    let text = row.to_string();
    File::options()
        .create(true)
        .append(true)
        .open(TABLE)
        .and_then(|mut table| writeln!(table, "{text}"))
        .map_err(with_path(TABLE))?;
    expect(wrong.is_none(), || {
        format!("{}:\n{HEADER}\n{text}", wrong.unwrap_or_default())
    })
}

impl Row {
    fn fault(&self) -> Option<&'static str> {
        let all = self.same_drive.sum_with(&self.other_drive);
        if all.lost_commands() > 0 {
            return Some("Commands were lost");
        }
        if all.doubled > 0 {
            return Some("Commands completed twice");
        }
        if self.other_drive.errors + self.other_drive.retried > 0 {
            return Some("Another drive's guest noticed it");
        }
        (self.iommu_faults > 0).then_some("The IOMMU had to refuse something")
    }
}

const HEADER: &str = "  failure                                      submitted  completed  retried  errors  \
                      withdrawn  lost  doubled  longest  other drive:  errors  longest  IOMMU\n\
                      \x20                                                              once                   \
                                        pause     completed              pause  faults";

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (same_drive, other_drive) = (&self.same_drive, &self.other_drive);
        let seconds = |longest_pause: Duration| format!("{:.2} s", longest_pause.as_secs_f64());
        write!(
            f,
            "  {:<43} {:>10} {:>10} {:>8} {:>7} {:>10} {:>5} {:>8} {:>8} {:>13} {:>7} {:>8} {:>6}",
            self.failure,
            same_drive.submitted,
            same_drive.completed,
            same_drive.retried,
            same_drive.errors,
            same_drive.withdrawn,
            same_drive.lost_commands() + other_drive.lost_commands(),
            same_drive.doubled + other_drive.doubled,
            seconds(same_drive.longest_pause),
            other_drive.completed,
            other_drive.errors,
            seconds(other_drive.longest_pause),
            self.iommu_faults,
        )
    }
}

/// Prints the table of all failures. A row with a forbidden count has already failed its own check.
fn table(_: &CheckEnvironment) -> Result<(), Failure> {
    let rows = fs::read_to_string(TABLE).map_err(with_path(TABLE))?;
    print_line(HEADER);
    print_line(rows.trim_end());
    Ok(())
}

/// The drive misses the deadline, and honours the Abort before a reset is due.
fn honoured(bench: &CheckEnvironment) -> Result<(), Failure> {
    let scene = Scene::start(bench, "overdue: Abort is honoured", &[SHORT])?;
    inside::control("freeze a")?;
    scene.await_drive("an Abort", |drive| drive.aborts > 0)?;
    inside::control("thaw a")?;
    scene.advance()?;
    let resets = scene.drive_stats()?.resets;
    expect(resets == 0, || {
        format!("{resets} resets, though an Abort is enough")
    })?;
    scene.finish_without_errors()
}

/// The drive completes nothing, and ignores the Abort.
fn ignored(bench: &CheckEnvironment) -> Result<(), Failure> {
    let scene = Scene::start(bench, "overdue: Abort is ignored, reset", &[SHORT])?;
    inside::control("freeze a")?;
    scene.await_drive("a reset", |drive| drive.resets > 0)?;
    let DriveStats {
        timeouts, aborts, ..
    } = scene.drive_stats()?;
    inside::control("thaw a")?;
    expect(aborts > 0 && timeouts >= aborts, || {
        format!("{aborts} Aborts for {timeouts} overdue commands")
    })?;
    scene.finish_without_errors()
}

/// A reset from outside makes the drive forget its queues, including the admin queue. A command becomes overdue, and its Abort
/// is lost.
fn controller_reset(bench: &CheckEnvironment) -> Result<(), Failure> {
    let scene = Scene::start(bench, "the controller forgets its queues", &[])?;
    sh(&format!(
        "echo 1 >/sys/bus/pci/devices/{}/reset",
        scene.drive
    ))?;
    scene.await_drive("a reset", |drive| drive.resets > 0)?;
    scene.finish_without_errors()
}

/// The drive loses access to its queues, and reports that by CSTS.CFS.
fn fatal_status(bench: &CheckEnvironment) -> Result<(), Failure> {
    let scene = Scene::start(bench, "controller fatal status", &[])?;
    // Memory Space Enable without Bus Master Enable in the Command register (PCI Local Bus 3.0, 6.2.2).
    let config = format!("/sys/bus/pci/devices/{}/config", scene.drive);
    sh(&format!(
        "printf '\\002\\000' | dd of={config} bs=2 seek=2 conv=notrunc"
    ))?;
    scene.await_drive("a reset", |drive| drive.resets > 0)?;
    scene.finish_without_errors()
}

/// A block is unreadable. Only its reader gets an error, and the block is readable after the repair.
fn media_error(bench: &CheckEnvironment) -> Result<(), Failure> {
    let scene = Scene::start(bench, "media error", &[])?;
    inside::control("fail a read 9")?;
    let a1 = &scene.a[0];
    a1.wait_for("to meet the block that can't be read", || a1.errors() > 0)?;
    inside::control("heal a")?;
    scene.advance()?;
    let Scene {
        failure,
        mut server,
        a: [first, second],
        b,
        iommu_faults,
        ..
    } = scene;
    let same_drive = [first.finish()?, second.finish()?];
    let other_drive = b.finish()?;
    server.stop()?;
    record_row(&failure, &same_drive, &other_drive, iommu_faults)?;
    let statuses = &same_drive[0].counts.statuses;
    expect(
        statuses.len() == 1 && statuses[0].starts_with("Unrecovered Read Error"),
        || format!("The errors were {statuses:?}"),
    )?;
    let others = same_drive[1].counts.errors;
    expect(others == 0, || format!("{others} errors in another range"))
}

fn guest_reset(bench: &CheckEnvironment) -> Result<(), Failure> {
    let scene = Scene::start(bench, "guest resets its controller, 5 times", &[])?;
    for _ in 0..5 {
        scene.a[0].reset()?;
        scene.a[0].advance()?;
    }
    scene.finish_without_errors()
}

/// The memory is returned only after the drive has stopped using it, even if that takes a reset.
fn guest_detach(bench: &CheckEnvironment) -> Result<(), Failure> {
    let scene = Scene::start(bench, "guest takes its memory, drive frozen", &[SHORT])?;
    inside::control("freeze a")?;
    let [first, second] = scene.a;
    let first = first.unmap_and_end()?;
    inside::control("thaw a")?;
    second.advance()?;
    end_remaining_guests(
        &scene.failure,
        scene.server,
        first,
        second,
        scene.b,
        scene.iommu_faults,
    )
}

/// The memory of a disconnected guest is no longer written once the server accepts the next guest.
fn guest_death(bench: &CheckEnvironment) -> Result<(), Failure> {
    let scene = Scene::start(bench, "guest dies, drive frozen", &[SHORT])?;
    inside::control("freeze a")?;
    let [first, second] = scene.a;
    first.vanish()?;
    let socket = scene.server.socket("a1");
    // The server accepts the next guest after the old guest's commands have ended, which may take a reset of the drive.
    let next =
        std::thread::spawn(move || Client::start("a1, the next", &socket, ClientWork::new(4)));
    let resets = || Ok(scene.server.drive_stats(&scene.drive)?.resets > 0);
    await_that("a reset", resets)?;
    inside::control("thaw a")?;
    let next = match next.join() {
        Ok(next) => next?,
        Err(panic) => std::panic::resume_unwind(panic),
    };
    let first = first.check_memory_after_vanish()?;
    next.advance()?;
    second.advance()?;
    let next = next.finish()?;
    let first = Outcome {
        counts: first.counts.sum_with(&next.counts),
        contents: next.contents,
    };
    let errors = first.counts.errors;
    expect(errors == 0, || {
        format!("{errors} errors: {:?}", first.counts.statuses)
    })?;
    end_remaining_guests(
        &scene.failure,
        scene.server,
        first,
        second,
        scene.b,
        scene.iommu_faults,
    )
}

/// A VMM process is killed repeatedly with many commands in flight. Its function must be free each time.
fn guest_killed(bench: &CheckEnvironment) -> Result<(), Failure> {
    let scene = Scene::start(bench, "guest's process is killed, 5 times", &[])?;
    let [first, second] = scene.a;
    let first = first.finish()?;
    for round in 0..5 {
        let mut command = Command::new(inside::copied_path("nvme-load"));
        command
            .arg(scene.server.socket("a1"))
            .args(["--qd", "64", "--size", "64K", "--mix", "50"])
            .args(["--seconds", "600"]);
        let log = bench.dir().join(format!("load-{round}.log"));
        let commands = || -> Result<u64, Failure> { Ok(scene.server.queue_totals("a1")?.commands) };
        let before = commands()?;
        let mut load = SupervisedChild::spawn("nvme-load", &command, &log)?;
        await_that("the load", || Ok(commands()? > before + 50))?;
        load.kill();
    }
    // The contents of the killed guest's range are unknown, so the client writes its range again.
    let again = Client::start("a1, again", &scene.server.socket("a1"), ClientWork::new(5))?;
    let places = ClientWork::new(0).places as u64;
    again.wait_for("to write its range", || again.completed() > places)?;
    let again = again.finish()?;
    let first = Outcome {
        counts: first.counts.sum_with(&again.counts),
        contents: again.contents,
    };
    second.advance()?;
    end_remaining_guests(
        &scene.failure,
        scene.server,
        first,
        second,
        scene.b,
        scene.iommu_faults,
    )
}

/// Ends the remaining guests after one guest of drive a has ended.
fn end_remaining_guests(
    failure: &str,
    mut server: Server,
    first: Outcome,
    second: Client,
    b: Client,
    iommu_faults: u64,
) -> Result<(), Failure> {
    b.advance()?;
    let same_drive = [first, second.finish()?];
    let other_drive = b.finish()?;
    server.stop()?;
    record_row(failure, &same_drive, &other_drive, iommu_faults)?;
    let errors = same_drive[1].counts.errors;
    expect(errors == 0, || {
        format!(
            "{errors} commands of the other guest failed: {:?}",
            same_drive[1].counts.statuses
        )
    })?;
    // The host's driver must find each guest's data in its place.
    inside::bind("a", "nvme")?;
    let device = inside::block_device("a", 1)?;
    for (outcome, start) in same_drive.iter().zip(RANGES) {
        outcome.contents.check_device(&device, start)?;
    }
    Ok(())
}

/// The drive is removed: its guests get errors, and no other guest notices.
fn removal(bench: &CheckEnvironment) -> Result<(), Failure> {
    let mut scene = Scene::start(bench, "drive is removed", &[])?;
    inside::control("remove a")?;
    scene.await_drive("the drive to be gone", |drive| drive.gone)?;
    for guest in &scene.a {
        let before = guest.errors();
        guest.wait_for("to have errors", || guest.errors() > before + 20)?;
    }
    scene.b.advance()?;
    scene.server.expect_alive()?;
    let Scene {
        failure,
        mut server,
        a: [first, second],
        b,
        iommu_faults,
        ..
    } = scene;
    let same_drive = [first.finish()?, second.finish()?];
    let other_drive = b.finish()?;
    server.stop()?;
    record_row(&failure, &same_drive, &other_drive, iommu_faults)?;
    inside::control("plug a")?;
    let device = reappeared_device()?;
    for (outcome, start) in same_drive.iter().zip(RANGES) {
        outcome.contents.check_device(&device, start)?;
    }
    Ok(())
}

/// Returns drive a's block device, once the drive has been plugged in again.
pub(crate) fn reappeared_device() -> Result<PathBuf, Failure> {
    let address = inside::address("a")?;
    let exists = format!("test -d /sys/bus/pci/devices/{address}");
    await_that("the drive is back", || Ok(sh(&exists).is_ok()))?;
    inside::bind("a", "nvme")?;
    Ok(inside::block_device("a", 1)?)
}

/// A server that is stopped under load releases its drives in order.
fn server_stopped(bench: &CheckEnvironment) -> Result<(), Failure> {
    check_server_end(bench, "server is stopped (SIGTERM)", |server| {
        Ok(server.stop()?)
    })
}

/// A server that is killed under load leaves working drives.
fn server_killed(bench: &CheckEnvironment) -> Result<(), Failure> {
    check_server_end(bench, "server is killed (SIGKILL)", |server| {
        server.kill();
        Ok(())
    })
}

fn check_server_end(
    bench: &CheckEnvironment,
    failure: &str,
    end: fn(&mut Server) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut scene = Scene::start(bench, failure, &[])?;
    end(&mut scene.server)?;
    inside::bind("a", "nvme")?;
    inside::bind("b", "nvme")?;
    let [first, second] = scene.a;
    let same_drive = [first.join()?, second.join()?];
    let other_drive = scene.b.join()?;
    record_row(failure, &same_drive, &other_drive, scene.iommu_faults)?;
    let check = |contents: &Contents, drive, start| {
        contents.check_device(&inside::block_device(drive, 1)?, start)
    };
    check(&same_drive[0].contents, "a", RANGES[0])?;
    check(&same_drive[1].contents, "a", RANGES[1])?;
    check(&other_drive.contents, "b", 0)
}

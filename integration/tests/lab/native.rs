//! A physical drive from bind to release, with native clients instead of guests. `cargo verify` runs these checks every time.

use std::env;
use std::sync::Arc;
use std::time::{Duration, Instant};

use integration::checks::FULL;
use integration::lab::{LabDrive, inside};
use integration::progress::print_line;
use integration::server::{FunctionArgument, Server, ServerReplacement};
use nvme_mpt_tests::bar::Bar;
use nvme_mpt_tests::controller::{Config, Controller};
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::rng::Rng;
use nvme_mpt_tests::vfio_user::VfioUserBar;

use crate::client::{Client, ClientWork, Outcome};
use crate::failures::reappeared_device;
use crate::fixture::{CheckEnvironment, Failure, await_that, expect, iommu_faults};
use crate::remote_functions::{
    CHECK, Process, RANGE, RemoteFunction, TRESPASS, WRITE, check_device, expect_refused,
};
use crate::{ExpectedRefusals, Group, doctor, drive_release};

pub(crate) const GROUP: Group = Group::Inside {
    name: "native",
    drives: || vec![LabDrive::new("a", 64 << 20), LabDrive::new("b", 64 << 20)],
    refused: ExpectedRefusals::None,
    checks: &[
        ("served_verified_given_back", drive_release::stopped),
        ("leased_to_functions_elsewhere", check_leases),
        ("taken_up_by_the_next_servers", |bench| {
            check_restored(bench, 3)
        }),
        ("reset_while_there_is_no_server", reset_in_outages),
        ("outlives_kept_servers", |bench| {
            check_replacements(bench, ServerReplacement::Kill, 10)
        }),
        ("outlives_upgrades_without_a_reset", |bench| {
            check_replacements(bench, ServerReplacement::Upgrade, 10)
        }),
        ("examined_by_doctor", doctor::examined),
        ("pulled_and_plugged", pulled),
    ],
};

/// Number of servers that are killed with reads in flight, in each situation.
const OUTAGES: u32 = 3;
/// Number of killed servers with `--full`.
const OUTAGES_OF_FULL: u32 = 50;

/// Upper bound of a client's commands between the ends of two servers.
const COMMANDS: u64 = 100;

/// Memory of the idle client whose drive is removed.
const MEMORY: (u64, u64) = (1 << 33, 1 << 20);

/// Shares a physical drive among functions in two processes and a vfio-user client. The server refuses ranges that others have
/// leased.
fn check_leases(bench: &CheckEnvironment) -> Result<(), Failure> {
    inside::bind("a", "vfio-pci")?;
    let a = inside::address("a")?;
    let function = |id, start| FunctionArgument::new(id, &a, format!("{start}+{RANGE}"));
    let mut server = bench.serve(&[function("f", 0)])?;
    let over_vfio_user = start_client("f", &server, 3)?;
    let mut one = Process::start(&server, &function("one", RANGE), 1)?;
    let mut two = Process::start(&server, &function("two", 2 * RANGE), 2)?;
    for (order, meanwhile) in [(WRITE, WRITE), (TRESPASS, WRITE), (CHECK, TRESPASS)] {
        one.begin(order)?;
        two.begin(meanwhile)?;
        one.finish()?;
        two.finish()?;
    }
    for (taken, holder) in [
        (function("four", RANGE / 2), "f"),
        (function("four", RANGE + RANGE / 2), "one"),
        (function("one", 3 * RANGE), "one"),
    ] {
        expect_refused(&server, &taken, holder)?;
    }
    let listed = server.list()?;
    expect(listed == ["f", "one", "two"], || format!("{listed:?}"))?;
    // The first process ends and starts again while the others work.
    two.begin(CHECK)?;
    one.end()?;
    let mut one = Process::start(&server, &function("one", RANGE), 1)?;
    two.finish()?;
    one.order(CHECK)?;
    // The first process is killed during its writes.
    two.begin(WRITE)?;
    one.begin(WRITE)?;
    one.kill()?;
    two.finish()?;
    await_that(
        "the end of its lease",
        || Ok(server.list()? == ["f", "two"]),
    )?;
    two.order(CHECK)?;
    two.end()?;
    over_vfio_user.advance()?;
    let outcome = over_vfio_user.finish()?;
    server.expect_alive()?;
    server.stop()?;

    inside::bind("a", "nvme")?;
    let device = inside::block_device("a", 1)?;
    outcome.contents.check_device(&device, 0)?;
    for guest in [1, 2] {
        check_device(&device, u64::from(guest) * RANGE, guest)?;
    }
    Ok(())
}

/// Kills servers of a physical drive, each with writes of a function in another process in flight. The next server executes the
/// writes, and the guest notices only a delay.
pub(crate) fn check_restored(bench: &CheckEnvironment, servers: u32) -> Result<(), Failure> {
    inside::bind("a", "vfio-pci")?;
    let a = inside::address("a")?;
    let mut server = bench.hold(&[format!("path={a}")])?;
    let function = FunctionArgument::new("one", &a, format!("0+{RANGE}"));
    let mut one = RemoteFunction::attach(&server, &function, 1)?;
    one.write()?;
    let faults = iommu_faults()?;
    let mut still = Vec::new();
    for _ in 0..servers {
        one.byte = one.byte.wrapping_add(1);
        let commands = one.leave_in_flight()?;
        let killed = Instant::now();
        server.kill();
        server.restart()?;
        one.await_all(&commands)?;
        still.push(killed.elapsed());
        // Detects a late write of the killed server.
        one.write()?;
        one.check()?;
    }
    let refused = iommu_faults()? - faults;
    expect(refused == 0, || {
        format!("The IOMMU has refused {refused} accesses")
    })?;
    still.sort_unstable();
    if let [.., last] = still[..] {
        let middle = still[still.len() / 2];
        print_line(&format!(
            "        I/O stood still for {middle:.1?} (median), {last:.1?} at most"
        ));
    }
    drop(one);
    server.stop()?;
    Ok(())
}

/// Kills servers of a slow physical drive, each with reads of a function in another process in flight, whose guest resets its
/// controller. The kernel frees a server's memory and sockets before it closes the drive.
pub(crate) fn reset_in_outages(bench: &CheckEnvironment) -> Result<(), Failure> {
    /// Memory that the kernel frees before it closes the drive's descriptors.
    const LARGE: &str = "600M";
    /// Functions whose sockets are closed before the drive's descriptors.
    const EXTRA_FUNCTIONS: u64 = 60;
    let servers = match env::var_os(FULL) {
        Some(_) => OUTAGES_OF_FULL,
        None => OUTAGES,
    };
    let large = FunctionArgument::new("large", format!("memory:{LARGE}"), format!("0+{LARGE}"));
    let crowd = (0..EXTRA_FUNCTIONS).map(|nth| {
        let range = format!("{nth}M+1M");
        FunctionArgument::new(&format!("c{nth}"), "memory:64M", range)
    });
    let situations = [
        ("alone", Vec::new()),
        ("beside large memory", vec![large.option("populate=on")]),
        ("beside 60 functions", crowd.collect()),
    ];
    inside::bind("a", "vfio-pci")?;
    let a = inside::address("a")?;
    for (situation, others) in situations {
        let mut functions = vec![FunctionArgument::new("f", &a, format!("{RANGE}+{RANGE}"))];
        functions.extend(others);
        let mut server = bench.serve(&functions)?;
        let function = FunctionArgument::new("one", &a, format!("0+{RANGE}"));
        let mut longest = Duration::ZERO;
        for _ in 0..servers {
            let mut one = RemoteFunction::attach(&server, &function, 1)?;
            one.write()?;
            inside::control("slow a 300")?;
            let took = one.reset_in_outage(&server);
            inside::control("thaw a")?;
            longest = longest.max(took?);
            drop(one);
            server.kill();
            server.restart()?;
        }
        print_line(&format!(
            "        {servers} resets without a server, {situation}, took {longest:.1?} at most"
        ));
        server.stop()?;
    }
    Ok(())
}

/// Replaces servers of a physical drive under a supervisor, each with commands of a vfio-user client in flight. The client
/// verifies its reads, and notices only a delay. No upgrade resets the drive.
pub(crate) fn check_replacements(
    bench: &CheckEnvironment,
    how: ServerReplacement,
    servers: u32,
) -> Result<(), Failure> {
    inside::bind("a", "vfio-pci")?;
    let a = inside::address("a")?;
    let function = FunctionArgument::new("f", &a, format!("0+{RANGE}"));
    let mut server = bench.serve_supervised(&[function])?;
    let faults = iommu_faults()?;
    let client = start_client("f", &server, 7)?;
    let enables = enable_count()?;
    let mut rng = Rng::new(3);
    for _ in 0..servers {
        let enough = client.completed() + 1 + rng.below(COMMANDS);
        client.wait_for("to complete commands", || client.completed() >= enough)?;
        server.replace(how)?;
    }
    let resets = self::enable_count()? - enables;
    let expected = match how {
        ServerReplacement::Kill => u64::from(servers),
        ServerReplacement::Upgrade => 0,
    };
    expect(resets == expected, || {
        format!("The drive was enabled {resets} times, not {expected}")
    })?;
    client.advance()?;
    let Outcome { counts, contents } = client.finish()?;
    server.expect_alive()?;
    server.stop()?;
    let refused = iommu_faults()? - faults;
    expect(refused == 0, || {
        format!("The IOMMU has refused {refused} accesses")
    })?;
    let anomalies = counts.anomalies();
    expect(anomalies == 0, || format!("The client noticed: {counts:?}"))?;
    print_line(&format!(
        "        {how:?}: {servers} servers replaced, {} commands, I/O stood still for {:.1?} at most",
        counts.completed, counts.longest_pause
    ));
    inside::bind("a", "nvme")?;
    contents.check_device(&inside::block_device("a", 1)?, 0)
}

/// Returns how often the controller was enabled so far, as counted outside of the lab.
fn enable_count() -> Result<u64, Failure> {
    let output = inside::control("enables a")?;
    output
        .parse()
        .map_err(|error| Failure::from(format!("{output}: {error}")))
}

/// Returns a client that has written its range.
fn start_client(id: &'static str, server: &Server, seed: u64) -> Result<Client, Failure> {
    let client = Client::start(id, &server.socket(id), ClientWork::new(seed))?;
    let places = ClientWork::new(0).places as u64;
    client.wait_for("to write its range", || client.completed() > places)?;
    Ok(client)
}

/// Removes a drive whose client is idle, while a client of another drive works. Removing a QEMU drive with commands in flight
/// may corrupt QEMU's memory, so only `failures` does that.
fn pulled(bench: &CheckEnvironment) -> Result<(), Failure> {
    inside::bind("a", "vfio-pci")?;
    inside::bind("b", "vfio-pci")?;
    let (a, b) = (inside::address("a")?, inside::address("b")?);
    let function = |id, path: &str| FunctionArgument::new(id, path, format!("0+{RANGE}"));
    let mut server = bench.serve(&[function("a", &a), function("b", &b)])?;
    let other_client = start_client("b", &server, 2)?;
    let outcome = start_client("a", &server, 1)?.finish()?;
    server.await_no_client("a")?;

    let memory = GuestMemory::new(&[MEMORY])?;
    let bar: Arc<dyn Bar> = Arc::new(VfioUserBar::attach(&server.socket("a"), &memory)?);
    let mut controller = Controller::attach(bar, memory, Config::default(), 1)?;
    let mut disk = Disk::open(&mut controller, 1)?;
    disk.read(0, 8)?;
    inside::control("remove a")?;
    await_that("the drive to be gone", || {
        Ok(server.drive_stats(&a).is_ok_and(|drive| drive.gone))
    })?;
    expect(disk.read(0, 8).is_err(), || {
        "A drive that is gone was read".to_owned()
    })?;
    other_client.advance()?;
    server.expect_alive()?;
    drop((disk, controller));
    other_client.finish()?;
    server.stop()?;

    inside::control("plug a")?;
    outcome.contents.check_device(&reappeared_device()?, 0)
}

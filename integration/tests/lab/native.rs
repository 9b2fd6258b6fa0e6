//! A physical drive from bind to give-back, with clients that need no guest: what `cargo verify` runs every time.

use std::sync::Arc;

use integration::lab::{LabDrive, inside};
use integration::server::{FunctionOptions, Server};
use nvme_mpt_tests::bar::Bar;
use nvme_mpt_tests::controller::{Config, Controller};
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::vfio_user::VfioUserBar;

use crate::client::{Client, Work};
use crate::failures::reappeared;
use crate::fixture::{Bench, Failure, await_that, expect};
use crate::{Group, Refused, giveback};

pub(crate) const GROUP: Group = Group::Inside {
    name: "native",
    drives: || vec![LabDrive::new("a", 64 << 20), LabDrive::new("b", 64 << 20)],
    refused: Refused::Nothing,
    checks: &[
        ("served_verified_given_back", giveback::stopped),
        ("pulled_and_plugged", pulled),
    ],
};

/// Bytes of each lease.
const RANGE: u64 = 16 << 20;
/// Memory of the client that waits while its drive is pulled.
const MEMORY: (u64, u64) = (1 << 33, 1 << 20);

/// A client that has written its range.
fn working(id: &'static str, server: &Server, seed: u64) -> Result<Client, Failure> {
    let client = Client::start(id, &server.socket(id), Work::new(seed))?;
    let places = Work::new(0).places as u64;
    client.wait_for("to write its range", || client.completed() > places)?;
    Ok(client)
}

/// Pulls a drive while its client has no command outstanding and another drive's client works. QEMU's drive with
/// commands in flight may corrupt QEMU's own memory when it is pulled, so `failures` does that.
fn pulled(bench: &Bench) -> Result<(), Failure> {
    inside::bind("a", "vfio-pci")?;
    inside::bind("b", "vfio-pci")?;
    let (a, b) = (inside::address("a")?, inside::address("b")?);
    let function = |id, path: &str| FunctionOptions::new(id, path, format!("0+{RANGE}"));
    let mut server = bench.serve(&[function("a", &a), function("b", &b)])?;
    let elsewhere = working("b", &server, 2)?;
    let outcome = working("a", &server, 1)?.finish()?;
    server.await_no_client("a")?;

    let memory = GuestMemory::new(&[MEMORY])?;
    let bar: Arc<dyn Bar> = Arc::new(VfioUserBar::attach(&server.socket("a"), &memory)?);
    let mut controller = Controller::attach(bar, memory, Config::default(), 1)?;
    let mut disk = Disk::open(&mut controller, 1)?;
    disk.read(0, 8)?;
    inside::control("remove a")?;
    await_that("the drive to be gone", || Ok(server.drive_stats(&a)?.gone))?;
    expect(disk.read(0, 8).is_err(), || {
        "A drive that is gone was read".to_owned()
    })?;
    elsewhere.advance()?;
    server.expect_alive()?;
    drop((disk, controller));
    elsewhere.finish()?;
    server.stop()?;

    inside::control("plug a")?;
    outcome.contents.check_device(&reappeared()?, 0)
}

//! A physical drive from bind to give-back, with clients that need no guest: what `cargo verify` runs every time.

use std::sync::Arc;
use std::time::Instant;

use integration::lab::{LabDrive, inside};
use integration::progress::say;
use integration::server::{FunctionOptions, Server};
use nvme_mpt::Pollers;
use nvme_mpt_tests::bar::Bar;
use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::controller::{Config, Controller, QueueOptions};
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::function::{InProcess, map};
use nvme_mpt_tests::memory::{DmaBuffer, GuestMemory};
use nvme_mpt_tests::prp::{self, Prepared};
use nvme_mpt_tests::queue::QueuePair;
use nvme_mpt_tests::vfio_user::VfioUserBar;
use nvme_mpt_vmm::open::{self, Ledgers};
use nvme_mpt_vmm::options::AskedFunction;
use vmm_device::{MsixMasking, NvmeFunction};

use crate::client::{Client, Work};
use crate::failures::reappeared;
use crate::fixture::{Bench, Failure, PATIENCE, await_that, expect, iommu_faults};
use crate::{Group, Refused, giveback};

pub(crate) const GROUP: Group = Group::Inside {
    name: "native",
    drives: || vec![LabDrive::new("a", 64 << 20), LabDrive::new("b", 64 << 20)],
    refused: Refused::Nothing,
    checks: &[
        ("served_verified_given_back", giveback::stopped),
        ("leased_to_functions_elsewhere", leased),
        ("taken_up_by_the_next_servers", |bench| taken_up(bench, 3)),
        ("pulled_and_plugged", pulled),
    ],
};

/// Bytes of a command of a function elsewhere.
const PIECE: usize = 64 << 10;
/// Commands that a function leaves in flight.
const IN_FLIGHT: u64 = 32;
/// Bytes of each lease.
const RANGE: u64 = 16 << 20;
/// Memory of the client that waits while its drive is pulled.
const MEMORY: (u64, u64) = (1 << 33, 1 << 20);

/// A function in this process, whose drive the server has, and its guest's driver.
struct Elsewhere {
    function: Arc<InProcess>,
    disk: Disk,
    /// For commands that are left in flight.
    queue: QueuePair,
    buffer: DmaBuffer,
    _controller: Controller,
    byte: u8,
}

/// Commands in flight, of one buffer.
struct InFlight {
    cids: Vec<u16>,
    /// The list of the buffer's pages.
    _list: Prepared,
}

impl Elsewhere {
    fn attach(server: &Server, options: &FunctionOptions, byte: u8) -> Result<Self, Failure> {
        let ledgers = Ledgers::open(&server.state_dir());
        let asked: AskedFunction = options.in_process().parse()?;
        let (_, host) = open::host_side(&asked, &ledgers, &Pollers::new())?;
        let memory = GuestMemory::new(&[MEMORY])?;
        let function = NvmeFunction::new(host, MsixMasking::Function);
        for region in memory.regions() {
            map(&function, &memory, &region);
        }
        let function = Arc::new(InProcess::new(function));
        let bar: Arc<dyn Bar> = function.clone();
        let buffer = memory.alloc(PIECE)?;
        let mut controller = Controller::attach(bar, memory, Config::default(), 2)?;
        let disk = Disk::open(&mut controller, 1)?;
        let queue = controller.create_queue_pair(2, &QueueOptions::polled(64))?;
        Ok(Self {
            function,
            disk,
            queue,
            buffer,
            _controller: controller,
            byte,
        })
    }

    /// Writes the whole range.
    fn write(&mut self) -> Result<(), Failure> {
        let piece = vec![self.byte; PIECE];
        for slba in (0..RANGE / 512).step_by(PIECE / 512) {
            self.disk.write(slba, &piece)?;
        }
        Ok(())
    }

    /// Gives commands that write a part of the range, and does not wait for them.
    fn leave_in_flight(&mut self) -> Result<InFlight, Failure> {
        self.buffer.write(0, &[self.byte; PIECE]);
        let prepared = prp::buffer(&self.buffer, 0, PIECE)?;
        let mut cids = Vec::new();
        for slot in 0..IN_FLIGHT {
            let blocks = (PIECE / 512) as u32;
            let write = Sqe::write(1, slot * u64::from(blocks), blocks);
            cids.push(self.queue.submit(write.with_data(prepared.pointer))?);
        }
        self.queue.ring();
        Ok(InFlight {
            cids,
            _list: prepared,
        })
    }

    /// Waits for commands, each of which completes once and without an error.
    fn await_all(&mut self, commands: &InFlight) -> Result<(), Failure> {
        let completions = self.queue.drain(&commands.cids, PATIENCE)?;
        for completion in completions {
            expect(completion.status().is_success(), || {
                format!("{completion:?}")
            })?;
        }
        match self.queue.poll() {
            None => Ok(()),
            Some(twice) => Err(format!("Completed twice: {twice:?}").into()),
        }
    }

    /// Reads the whole range, in which there must be nothing but what it wrote.
    fn check(&mut self) -> Result<(), Failure> {
        for slba in (0..RANGE / 512).step_by(PIECE / 512) {
            let read = self.disk.read(slba, (PIECE / 512) as u32)?;
            expect(read.iter().all(|byte| *byte == self.byte), || {
                format!(
                    "Other data at block {slba} of the function that writes {}",
                    self.byte
                )
            })?;
        }
        Ok(())
    }
}

/// Has functions of two processes and of a vfio-user client share a physical drive, of which another process
/// has been refused.
fn leased(bench: &Bench) -> Result<(), Failure> {
    inside::bind("a", "vfio-pci")?;
    let a = inside::address("a")?;
    let function = |id, start| FunctionOptions::new(id, &a, format!("{start}+{RANGE}"));
    let mut server = bench.serve(&[function("f", 0)])?;
    let over_vfio_user = working("f", &server, 3)?;
    let mut one = Elsewhere::attach(&server, &function("one", RANGE), 0x11)?;
    let mut two = Elsewhere::attach(&server, &function("two", 2 * RANGE), 0x22)?;
    one.write()?;
    two.write()?;
    one.check()?;
    two.check()?;
    for (taken, reason) in [
        (function("four", 0), "f"),
        (function("one", 3 * RANGE), "one"),
    ] {
        match Elsewhere::attach(&server, &taken, 0) {
            Ok(_) => return Err(format!("{taken:?} was given").into()),
            Err(error) => expect(error.to_string().contains(reason), || error.to_string())?,
        }
    }
    let listed = server.list()?;
    expect(listed == ["f", "one", "two"], || format!("{listed:?}"))?;
    // One goes, and comes again, while the others work.
    one.function
        .function()
        .end()
        .map_err(|error| error.to_string())?;
    drop(one);
    let mut one = Elsewhere::attach(&server, &function("one", RANGE), 0x11)?;
    one.check()?;
    two.check()?;
    over_vfio_user.advance()?;
    drop((one, two));
    over_vfio_user.finish()?;
    server.expect_alive()?;
    server.stop()?;
    Ok(())
}

/// Kills servers of a physical drive, each while a function elsewhere has writes in flight. The next one carries them
/// out. The function's guest notices nothing but the time.
pub(crate) fn taken_up(bench: &Bench, servers: u32) -> Result<(), Failure> {
    inside::bind("a", "vfio-pci")?;
    let a = inside::address("a")?;
    let mut server = bench.hold(&[format!("path={a}")])?;
    let function = FunctionOptions::new("one", &a, format!("0+{RANGE}"));
    let mut one = Elsewhere::attach(&server, &function, 1)?;
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
        // A write of the killed server that the drive carried out now would be found.
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
        say(&format!(
            "        I/O stood still for {middle:.1?} (median), {last:.1?} at most"
        ));
    }
    drop(one);
    server.stop()?;
    Ok(())
}

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
    await_that("the drive to be gone", || {
        Ok(server.drive_stats(&a).is_ok_and(|drive| drive.gone))
    })?;
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

//! A hostile guest reaches only its own range and memory, neither a neighbour's range nor unleased parts of the drive. The
//! host's driver verifies that afterwards.
//!
//! QEMU's drives all support SGLs. A test with a model of a drive checks that only PRPs are used for drives without SGLs
//! (`tests/tests/physical`).

use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use integration::lab::{LabDrive, inside};
use integration::progress::print_line;
use integration::server::FunctionArgument;
use nvme_mpt_tests::bar::Bar;
use nvme_mpt_tests::command::{DataPointer, Sqe};
use nvme_mpt_tests::controller::{Config, Controller, QueueOptions};
use nvme_mpt_tests::huge_pages::{HUGE_PAGE, HugePages};
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::registers::CSTS_FATAL;
use nvme_mpt_tests::rng;
use nvme_mpt_tests::vfio_user::VfioUserBar;

use crate::client::{Client, ClientWork};
use crate::fixture::{CheckEnvironment, Failure, TIMEOUT, await_that, expect, sh, with_path};
use crate::hostile::HostileGuest;
use crate::{ExpectedRefusals, Group};

pub(crate) const GROUP: Group = Group::Inside {
    name: "isolation",
    drives: || {
        vec![
            // Transfers as large as a guest's limit, so SGLs are offered.
            LabDrive::new("a", DRIVE).mdts(8),
            // Two pages per command, so all but the smallest commands are split.
            LabDrive::new("b", DRIVE)
                .lba_size(4096)
                .namespaces(2)
                .mdts(1),
            LabDrive::new("c", DRIVE).dbcs(false),
        ]
    },
    refused: ExpectedRefusals::None,
    checks: &[
        ("hostile_guest_on_512_bytes_blocks", on_small_blocks),
        (
            "hostile_guest_on_4096_bytes_blocks_and_small_mdts",
            on_large_blocks,
        ),
        (
            "large_commands_on_all_drives_and_namespaces",
            large_commands,
        ),
        (
            "memory_that_the_hardware_loses",
            memory_that_the_hardware_loses,
        ),
    ],
};

const DRIVE: u64 = 32 << 20;
/// Starts of an unused leased range, of the hostile guest's range, and of a working guest's range.
const VICTIM: u64 = 4 << 20;
const HOSTILE: u64 = 12 << 20;
const BYSTANDER: u64 = 20 << 20;
const RANGE: u64 = 8 << 20;
const MIB: usize = 1 << 20;

/// Pattern that the host writes to the whole drive, and pattern of the hostile guest's range.
const SECRET: u64 = 0x5ec2e7;
const OWN: u64 = 0x0135;

fn on_small_blocks(bench: &CheckEnvironment) -> Result<(), Failure> {
    attack(bench, "a", 512)
}

fn on_large_blocks(bench: &CheckEnvironment) -> Result<(), Failure> {
    attack(bench, "b", 4096)
}

fn attack(bench: &CheckEnvironment, id: &str, block_size: usize) -> Result<(), Failure> {
    inside::bind(id, "nvme")?;
    let secrets = fill_drive(&inside::block_device(id, 1)?, block_size)?;
    inside::bind(id, "vfio-pci")?;
    let path = inside::address(id)?;
    let function = |name: &str, start: u64| {
        FunctionArgument::new(name, path.as_str(), format!("{start}+{RANGE}")).option("namespace=1")
    };
    let mut server = bench.serve(&[
        function("victim", VICTIM),
        function("hostile", HOSTILE),
        function("bystander", BYSTANDER),
    ])?;
    let bystander = Client::start("bystander", &server.socket("bystander"), ClientWork::new(6))?;
    let mut hostile = HostileGuest::attach(&server.socket("hostile"), RANGE)?;
    let tried = hostile.try_everything()?;
    hostile.expect_no_secrets(&secrets)?;
    hostile.end()?;
    bystander.advance()?;
    let bystander = bystander.finish()?;
    server.stop()?;
    print_line(&format!(
        "  hostile guest, blocks of {block_size}: {} commands, {} of them refused, {} executed within its range",
        tried.commands,
        tried.refused,
        tried.commands - tried.refused,
    ));
    let counts = &bystander.counts;
    expect(
        counts.errors + counts.retried + counts.lost_commands() + counts.doubled == 0,
        || format!("The guest beside it noticed: {counts:?}"),
    )?;

    inside::bind(id, "nvme")?;
    let device = inside::block_device(id, 1)?;
    bystander.contents.check_device(&device, BYSTANDER)?;
    expect_unchanged(&device, block_size)
}

/// Returns true if a byte of the drive is in a range that may have been written.
fn may_have_changed(offset: u64) -> bool {
    (HOSTILE..HOSTILE + RANGE).contains(&offset) || (BYSTANDER..BYSTANDER + RANGE).contains(&offset)
}

/// Fills the drive. Returns the first bytes of each block that the hostile guest must not read.
fn fill_drive(device: &Path, block_size: usize) -> Result<HashSet<[u8; 16]>, Failure> {
    let mut secrets = HashSet::new();
    let file = open(device)?;
    let mut bytes = vec![0; MIB];
    for offset in (0..DRIVE).step_by(MIB) {
        let own = (HOSTILE..HOSTILE + RANGE).contains(&offset);
        let tag = if own { OWN } else { SECRET };
        rng::fill_blocks(&mut bytes, tag, offset / block_size as u64, block_size);
        if !own {
            let beginnings = bytes
                .chunks(block_size)
                .filter_map(|block| block.first_chunk());
            secrets.extend(beginnings.copied());
        }
        let written = file.write_all_at(&bytes, offset);
        written.map_err(with_path(device))?;
    }
    file.sync_all().map_err(with_path(device))?;
    Ok(secrets)
}

/// Checks that the drive holds the host's data outside of the two ranges in use, including the victim's range.
fn expect_unchanged(device: &Path, block_size: usize) -> Result<(), Failure> {
    let file = open(device)?;
    let (mut bytes, mut wanted) = (vec![0; MIB], vec![0; MIB]);
    for offset in (0..DRIVE)
        .step_by(MIB)
        .filter(|offset| !may_have_changed(*offset))
    {
        let read = file.read_exact_at(&mut bytes, offset);
        read.map_err(with_path(device))?;
        rng::fill_blocks(&mut wanted, SECRET, offset / block_size as u64, block_size);
        expect(bytes == wanted, || {
            format!("The drive has changed in the MiB from byte {offset:#x} on")
        })?;
    }
    Ok(())
}

fn open(device: &Path) -> Result<File, Failure> {
    let file = File::options().read(true).write(true).open(device);
    file.map_err(with_path(device))
}

/// Runs commands of 1 MiB on three drives with four namespaces of one server. Drives with lower limits get split commands.
/// Clients use SGLs where they are offered.
fn large_commands(bench: &CheckEnvironment) -> Result<(), Failure> {
    let drives = [
        ("a", 1, true),
        ("b", 1, false),
        ("b", 2, false),
        ("c", 1, false),
    ];
    for id in ["a", "b", "c"] {
        inside::bind(id, "vfio-pci")?;
    }
    let mut functions = Vec::new();
    for (id, nsid, _) in drives {
        let range = format!("0+{DRIVE}");
        let function = FunctionArgument::new(&format!("{id}{nsid}"), inside::address(id)?, range);
        functions.push(function.option(format!("namespace={nsid}")));
    }
    let mut server = bench.serve(&functions)?;
    let mut guests = Vec::new();
    for (index, (id, nsid, sgl)) in drives.into_iter().enumerate() {
        let work = ClientWork {
            depth: 4,
            bytes: MIB,
            places: 16,
            sgl,
            ..ClientWork::new(20 + index as u64)
        };
        let socket = server.socket(&format!("{id}{nsid}"));
        guests.push(Client::start("of large commands", &socket, work)?);
    }
    let mut outcomes = Vec::new();
    for guest in guests {
        guest.wait_for("to complete commands", || guest.completed() >= 32)?;
        outcomes.push(guest.finish()?);
    }
    server.stop()?;
    for id in ["a", "b", "c"] {
        inside::bind(id, "nvme")?;
    }
    for ((id, nsid, _), outcome) in drives.into_iter().zip(&outcomes) {
        let counts = &outcome.counts;
        print_line(&format!(
            "  drive {id}, namespace {nsid}: {} commands of 1 MiB, all data verified",
            counts.completed
        ));
        let all_well =
            counts.errors + counts.retried + counts.lost_commands() + counts.doubled == 0;
        expect(all_well, || {
            format!("Drive {id}, namespace {nsid}: {counts:?}")
        })?;
        outcome
            .contents
            .check_device(&inside::block_device(id, nsid)?, 0)?;
    }
    sh("sync")?;
    Ok(())
}

/// The hardware loses a huge page of a guest's memory: only that guest ends.
fn memory_that_the_hardware_loses(bench: &CheckEnvironment) -> Result<(), Failure> {
    /// Makes the kernel treat the page at a physical address as lost (Linux, `admin-guide/mm/memory-hotplug`).
    const LOSE: &str = "/sys/devices/system/memory/hard_offline_page";
    const BASE: u64 = 1 << 32;
    const MEMORY: u64 = 4 * HUGE_PAGE;
    let function = |name: &str, start: u64| {
        FunctionArgument::new(name, "memory:32M", format!("{start}+{RANGE}"))
    };
    let mut server = bench.serve(&[function("victim", 0), function("bystander", RANGE)])?;
    let bystander = Client::start("bystander", &server.socket("bystander"), ClientWork::new(7))?;
    let pages = HugePages::reserve(MEMORY / HUGE_PAGE).ok_or("The lab has no huge pages")?;
    let memory = GuestMemory::in_huge_pages(&pages, &[(BASE, MEMORY)])?;
    let bar: Arc<dyn Bar> = Arc::new(VfioUserBar::attach(&server.socket("victim"), &memory)?);
    let mut controller = Controller::attach(bar, memory.clone(), Config::default(), 1)?;
    let mut queue = controller.create_queue_pair(1, &QueueOptions::polled(64))?;
    let data = memory.alloc_aligned(HUGE_PAGE as usize, HUGE_PAGE as usize)?;
    let read = Sqe::read(1, 0, 8).with_data(DataPointer::prp(data.gpa(), 0));
    let status = queue.submit_and_wait(read, TIMEOUT)?.status();
    expect(status.is_success(), || {
        format!("Before the error: {status}")
    })?;

    let address = data.host_address()?;
    std::fs::write(LOSE, format!("{address:#x}")).map_err(with_path(Path::new(LOSE)))?;
    queue.submit(read)?;
    queue.ring();
    await_that("CSTS.CFS of the guest whose memory is gone", || {
        Ok(controller.status()? & CSTS_FATAL != 0)
    })?;
    bystander.advance()?;
    drop((queue, controller));
    let work = ClientWork {
        places: 16,
        ..ClientWork::new(8)
    };
    let again = Client::start("with other memory", &server.socket("victim"), work)?;
    again.wait_for("to complete commands", || again.completed() >= 64)?;
    for client in [again, bystander] {
        let counts = client.finish()?.counts;
        expect(
            counts.errors + counts.retried + counts.lost_commands() + counts.doubled == 0,
            || format!("A guest with sound memory noticed: {counts:?}"),
        )?;
    }
    server.stop()?;
    Ok(())
}

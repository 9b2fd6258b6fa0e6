//! Fault injection on commands, with a manual clock.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::rc::Rc;

use proptest::prelude::*;
use zerocopy::IntoBytes;

use super::*;
use nvme_guest::dma::RegionTable;
use nvme_guest::iova::IovaSpace;
use nvme_mpt::host::ListMemory;
use nvme_mpt::host::{HostBatch, HostCompletion, HostQueue};
use nvme_mpt::shadow::HostQueuePair;
use nvme_mpt_memory::clock::TickClock;
use nvme_software::{NullCommandExecutor, SoftwareQueue};
use nvme_spec::ids::{CommandId, Lba, Nsid};
use nvme_spec::nvm::{CopyCommand, CopyRange0, DsmRange, ReadWrite};

const SLOTS: u16 = 1024;
const NAMESPACE: HostNamespace = HostNamespace {
    nsid: Nsid(1),
    blocks: 1 << 20,
    lba_shift: 9,
};

#[derive(Clone, Debug, Default)]
struct VirtualClock(Rc<Cell<u64>>);

impl TickClock for VirtualClock {
    fn now(&self) -> u64 {
        self.0.get()
    }
}

struct Drive {
    clock: VirtualClock,
    table: RegionTable,
    lists: ListMemory,
    faults: Arc<FaultInjector>,
    queue: FaultQueue<VirtualClock>,
}

impl Drive {
    fn new(plan: &str) -> Self {
        Self::with_unit(plan, 1)
    }

    fn with_unit(plan: &str, unit: u64) -> Self {
        let plan = FaultPlan::parse("test", plan).expect("sound");
        let faults = FaultInjector::with_timebase(&plan, NAMESPACE, unit, TickUnit::Nanoseconds);
        Self::with_faults(faults.expect("fits"))
    }

    fn with_faults(faults: FaultInjector) -> Self {
        let faults = Arc::new(faults);
        let clock = VirtualClock::default();
        let store = HostQueuePair::new(SoftwareQueue::new(NullCommandExecutor, SLOTS));
        let space = Arc::new(IovaSpace::software());
        Self {
            queue: FaultQueue::with_clock(store, faults.clone(), SLOTS, clock.clone(), 1),
            table: RegionTable::default(),
            lists: ListMemory::new(&space, SLOTS.into()).expect("memory"),
            clock,
            faults,
        }
    }

    fn run(&mut self, commands: &[Sqe]) -> Vec<HostCompletion> {
        let numbered: Vec<_> = commands
            .iter()
            .zip(0..)
            .map(|(sqe, slot)| {
                let mut sqe = *sqe;
                sqe.set_cid(CommandId(slot));
                sqe
            })
            .collect();
        self.submit(&numbered);
        self.reap()
    }

    /// Submits commands and rings the doorbell.
    fn submit(&mut self, commands: &[Sqe]) {
        let memory = HostMemory {
            table: &self.table,
            lists: &self.lists,
        };
        let mut batch = self.queue.batch();
        for sqe in commands {
            batch.submit(sqe);
        }
        batch.ring(memory);
    }

    fn reap(&mut self) -> Vec<HostCompletion> {
        let memory = HostMemory {
            table: &self.table,
            lists: &self.lists,
        };
        let mut done = Vec::new();
        self.queue
            .reap(memory, |completion: HostCompletion| done.push(completion));
        done.sort_by_key(|completion| completion.slot);
        done
    }

    /// Submits commands that complete without a delay. Returns their statuses.
    fn statuses(&mut self, commands: &[Sqe]) -> Vec<Status> {
        let done = self.run(commands);
        assert_eq!(done.len(), commands.len());
        done.iter().map(|completion| completion.status).collect()
    }

    fn status(&mut self, command: Sqe) -> Status {
        self.statuses(&[command])[0]
    }

    /// Returns a command whose ranges are in the list of slot 0.
    fn with_ranges<T: IntoBytes + zerocopy::Immutable>(
        &mut self,
        mut sqe: Sqe,
        ranges: &[T],
    ) -> Sqe {
        let (list, iova) = self.lists.slot_list(0);
        let bytes = ranges.as_bytes();
        list.as_mut_bytes()[..bytes.len()].copy_from_slice(bytes);
        sqe.dptr[0] = iova.bits();
        sqe
    }
}

fn command(opcode: NvmOpcode, slba: u64, blocks: u16) -> Sqe {
    let mut sqe = Sqe::new(opcode.0);
    ReadWrite {
        slba: Lba(slba),
        nlb_z: blocks - 1,
        ..ReadWrite::default()
    }
    .write_to(&mut sqe);
    sqe
}

fn read(slba: u64) -> Sqe {
    command(NvmOpcode::READ, slba, 8)
}

fn dsm(drive: &mut Drive, ranges: &[(u64, u32)]) -> Sqe {
    let ranges: Vec<DsmRange> = ranges
        .iter()
        .map(|&(slba, nlb)| DsmRange {
            nlb,
            slba: Lba(slba),
            ..DsmRange::default()
        })
        .collect();
    let mut sqe = Sqe::new(NvmOpcode::DATASET_MANAGEMENT.0);
    sqe.cdw10 = ranges.len() as u32 - 1;
    drive.with_ranges(sqe, &ranges)
}

fn copy(drive: &mut Drive, to: u64, ranges: &[(u64, u16)]) -> Sqe {
    let mut sqe = Sqe::new(NvmOpcode::COPY.0);
    CopyCommand {
        sdlba: Lba(to),
        nr_z: ranges.len() as u8 - 1,
        ..CopyCommand::default()
    }
    .write_to(&mut sqe);
    let ranges: Vec<CopyRange0> = ranges
        .iter()
        .map(|&(slba, blocks)| CopyRange0 {
            slba: Lba(slba),
            nlb_z: blocks - 1,
            ..CopyRange0::default()
        })
        .collect();
    drive.with_ranges(sqe, &ranges)
}

const READ_ERROR: Status = Status::UNRECOVERED_READ_ERROR;
const WRITE_FAULT: Status = Status::WRITE_FAULT;
const GOOD: Status = Status::SUCCESS;

#[test]
fn media_errors_depend_on_blocks_and_direction() {
    // The range covers blocks 2048 to 2175.
    let mut drive = Drive::new("[[fault]]\nkind = \"media-error\"\nrange = \"1M+64K\"\n");
    for (opcode, bad) in [
        (NvmOpcode::READ, READ_ERROR),
        (NvmOpcode::COMPARE, READ_ERROR),
        (NvmOpcode::VERIFY, READ_ERROR),
        (NvmOpcode::WRITE, WRITE_FAULT),
        (NvmOpcode::WRITE_ZEROES, WRITE_FAULT),
        (NvmOpcode::WRITE_UNCORRECTABLE, WRITE_FAULT),
        (NvmOpcode::FLUSH, GOOD),
    ] {
        for (slba, touches) in [(2040, false), (2041, true), (2175, true), (2176, false)] {
            let expected = if touches { bad } else { GOOD };
            let status = drive.status(command(opcode, slba, 8));
            assert_eq!(status, expected, "{opcode} of {slba}");
        }
    }
    for (to, from, expected) in [
        (0, [(8, 8), (2175, 1)], READ_ERROR),
        (2040, [(8, 8), (16, 1)], WRITE_FAULT),
        (2039, [(8, 8), (16, 1)], GOOD),
    ] {
        let copy = copy(&mut drive, to, &from);
        assert_eq!(drive.status(copy), expected, "{to}");
    }
    let trim = dsm(&mut drive, &[(2048, 8)]);
    assert_eq!(drive.status(trim), GOOD, "it is not about those");
}

#[test]
fn a_fault_skips_and_then_counts_commands() {
    let plan = "[[fault]]\nkind = \"media-error\"\noperations = [\"read\"]\nafter = 3\ncount = 2\n";
    let mut drive = Drive::new(plan);
    let commands = [
        read(0),
        command(NvmOpcode::WRITE, 0, 8),
        read(8),
        read(16),
        read(24),
        read(32),
        read(40),
    ];
    let bad = READ_ERROR;
    assert_eq!(
        drive.statuses(&commands),
        [GOOD, GOOD, GOOD, GOOD, bad, bad, GOOD]
    );
    assert_eq!(
        drive.faults.stats(),
        [FaultStats {
            kind: FaultKind::MediaError,
            range: None,
            seen: 5,
            struck: 2,
            count: Some(2),
        }]
    );
}

#[test]
fn the_same_commands_have_the_same_faults_whatever_others_do() {
    let plan = |seed| {
        format!(
            "seed = {seed}\n[[fault]]\nkind = \"media-error\"\nrange = \"0+1M\"\nprobability = 0.1\n"
        )
    };
    let run = |seed: u64, others: usize| -> Vec<bool> {
        let mut drive = Drive::new(&plan(seed));
        (0..2000)
            .map(|i| {
                for _ in 0..others {
                    assert_eq!(drive.status(read(4096)), GOOD);
                }
                drive.status(read(i % 2000)) == READ_ERROR
            })
            .collect()
    };
    let first = run(1, 0);
    assert_eq!(first, run(1, 0));
    assert_eq!(first, run(1, 3));
    assert_ne!(first, run(2, 0));
    let hits = first.iter().filter(|is_hit| **is_hit).count();
    // The number of hits has to be within four standard deviations of 200.
    assert!((146..=254).contains(&hits), "{hits}");
}

#[test]
fn faults_continue_in_the_next_process() {
    const PLAN: &str = r#"
        seed = 7
        [[fault]]
        kind = "media-error"
        probability = 0.5
        after = 5
        count = 20
        [[fault]]
        kind = "resize"
        size = "256M"
        after = 30
    "#;
    const INJECTED: &str = r#"
        [[fault]]
        kind = "removal"
        range = "0+4K"
        after = 20
    "#;
    let parse = |plan: &str| FaultPlan::parse("test", plan).expect("sound");
    // First, each command runs in a new process, whose plan is ignored. Then one process runs all commands.
    let file = nvme_mpt_memory::memfd(c"test", 0).expect("memory");
    let next = |plan: &str| {
        Drive::with_faults(
            FaultInjector::with_record(&parse(plan), NAMESPACE, 1, &file).expect("kept"),
        )
    };
    let mut one = Drive::new(PLAN);
    let mut ends = BTreeSet::new();
    for number in 0..100 {
        let mut drive = next(if number == 0 { PLAN } else { "" });
        if number == 10 {
            for drive in [&drive, &one] {
                drive.faults.inject(&parse(INJECTED)).expect("fits");
            }
        }
        let slba = if number % 3 == 0 { 0 } else { 1 << 19 };
        let status = drive.status(read(slba));
        assert_eq!(status, one.status(read(slba)), "command {number}");
        assert_eq!(drive.faults.stats(), one.faults.stats());
        ends.insert(status.0);
    }
    assert_eq!(
        ends.len(),
        4,
        "success, and the statuses of three faults: {ends:?}"
    );
    assert!(next("").faults.is_gone());
    assert_eq!(next("").faults.blocks(), 1 << 19);
    next("").faults.clear();
    assert_eq!(next(PLAN).faults.stats(), []);
    let wrong = nvme_mpt_memory::memfd(c"test", 7).expect("memory");
    let refused = FaultInjector::with_record(&parse(PLAN), NAMESPACE, 1, &wrong);
    assert!(matches!(refused, Err(FaultError::Record(_))), "{refused:?}");
}

#[test]
fn latencies_add_up_and_commands_complete_when_they_are_over() {
    let plan = "[[fault]]\nkind = \"latency\"\nadd = \"5us\"\noperations = [\"read\"]\n\
                [[fault]]\nkind = \"latency\"\nadd = \"1ms\"\nrange = \"0+4K\"\ncount = 1\n";
    let mut drive = Drive::new(plan);
    let commands = [read(0), read(8), command(NvmOpcode::WRITE, 0, 8)];
    let now = drive.run(&commands);
    assert_eq!((now.len(), now[0].slot), (1, 2), "the write is not delayed");
    for (until, slot) in [(5_000, 1), (1_005_000, 0)] {
        let next = drive.queue.next_due().expect("something waits");
        assert!((1..=until).contains(&next.0), "{next:?}");
        drive.clock.0.set(until - 1);
        assert!(drive.reap().is_empty());
        drive.clock.0.set(until);
        let done = drive.reap();
        assert_eq!((done.len(), done[0].slot, done[0].status), (1, slot, GOOD));
    }
    assert_eq!(drive.queue.next_due(), None);
}

#[test]
fn a_lost_command_completes_when_its_queue_goes() {
    let mut drive = Drive::new("[[fault]]\nkind = \"lost\"\n");
    let done = drive.run(&[read(0), read(8)]);
    assert_eq!((done.len(), done[0].slot), (1, 1));
    drive.clock.0.set(u64::MAX / 2);
    assert!(drive.reap().is_empty());
    assert!(!drive.queue.has_failed());
    drive.queue.set_hurried(true);
    let done = drive.reap();
    assert_eq!(
        (done[0].slot, done[0].status),
        (0, Status::ABORTED_SQ_DELETION)
    );
    assert!(drive.reap().is_empty(), "once");
}

#[test]
fn a_broken_queue_reports_failure() {
    let mut drive = Drive::new("[[fault]]\nkind = \"fatal\"\noperations = [\"write\"]\n");
    drive.status(read(0));
    assert!(!drive.queue.has_failed());
    assert!(drive.run(&[command(NvmOpcode::WRITE, 0, 1)]).is_empty());
    assert!(drive.queue.has_failed());
}

#[test]
fn a_broken_queue_behind_it_is_reported() {
    let plan = FaultPlan::parse("test", "[[fault]]\nkind = \"fatal\"\n").expect("sound");
    let breaks = FaultInjector::with_timebase(&plan, NAMESPACE, 1, TickUnit::Nanoseconds);
    let store = HostQueuePair::new(SoftwareQueue::new(NullCommandExecutor, SLOTS));
    let behind = FaultQueue::new(store, Arc::new(breaks.expect("fits")), SLOTS);
    let mut drive = Drive::new("");
    drive.queue.drive = HostQueuePair::new(behind);
    assert!(!drive.queue.has_failed());
    assert!(drive.run(&[read(0)]).is_empty());
    assert!(drive.queue.has_failed());
}

#[test]
fn commands_in_flight_and_later_ones_fail_on_a_removed_drive() {
    let plan = "[[fault]]\nkind = \"lost\"\n[[fault]]\nkind = \"latency\"\nadd = \"1s\"\ncount = 1\n\
                [[fault]]\nkind = \"removal\"\noperations = [\"flush\"]\n";
    let mut drive = Drive::new(plan);
    let events = Arc::new(EventQueue::new().expect("eventfd"));
    drive.faults.subscribe(&events);
    assert!(drive.run(&[read(0), read(8)]).is_empty());
    let mut flush = Sqe::new(NvmOpcode::FLUSH.0);
    flush.set_cid(CommandId(2));
    drive.submit(&[flush]);
    let done = drive.reap();
    let reported: Vec<_> = done.iter().map(|c| (c.slot, c.status)).collect();
    assert_eq!(reported, [(0, REMOVED), (1, REMOVED), (2, REMOVED)]);
    assert_eq!(drive.status(read(0)), REMOVED);
    assert_eq!(events.take(), [IoQueueEvent::Drive(DriveEvent::Gone)]);
    let late = Arc::new(EventQueue::new().expect("eventfd"));
    drive.faults.subscribe(&late);
    assert_eq!(late.take(), [IoQueueEvent::Drive(DriveEvent::Gone)]);
    drive.faults.clear();
    assert_eq!(drive.status(read(0)), REMOVED, "that is for good");
}

#[test]
fn a_shrunk_drive_refuses_the_lost_blocks_until_it_grows() {
    let plan = "[[fault]]\nkind = \"resize\"\nsize = \"1M\"\noperations = [\"flush\"]\n\
                [[fault]]\nkind = \"resize\"\nsize = \"512M\"\noperations = [\"flush\"]\nafter = 1\n";
    let mut drive = Drive::new(plan);
    let events = Arc::new(EventQueue::new().expect("eventfd"));
    drive.faults.subscribe(&events);
    let flush = Sqe::new(NvmOpcode::FLUSH.0);
    let beyond = Status::LBA_OUT_OF_RANGE.with_dnr(true);
    for (cut, expected) in [(false, GOOD), (true, beyond), (false, GOOD)] {
        assert_eq!(drive.faults.blocks(), if cut { 2048 } else { 1 << 20 });
        assert_eq!(drive.status(read(2040)), GOOD);
        assert_eq!(drive.status(read(2041)), expected);
        let trim = dsm(&mut drive, &[(0, 8), (2048, 1)]);
        assert_eq!(drive.status(trim), expected);
        let target = copy(&mut drive, 2041, &[(0, 8)]);
        assert_eq!(drive.status(target), expected);
        let from = copy(&mut drive, 0, &[(8, 8), (4096, 8)]);
        assert_eq!(drive.status(from), expected);
        assert_eq!(drive.status(flush), GOOD);
    }
    let changed = IoQueueEvent::Drive(DriveEvent::NamespaceChanged(Nsid(1)));
    // Events that wait are reported as one.
    assert_eq!(events.take(), [changed]);
}

#[test]
fn a_drive_with_zones_ends_where_a_zone_does() {
    let plan = "[[fault]]\nkind = \"resize\"\nsize = \"3584K\"\noperations = [\"flush\"]\n";
    let mut drive = Drive::with_unit(plan, 2048);
    assert_eq!(drive.status(Sqe::new(NvmOpcode::FLUSH.0)), GOOD);
    assert_eq!(drive.faults.blocks(), 3 * 2048);
    assert_eq!(drive.status(read(3 * 2048 - 8)), GOOD);
    let beyond = Status::LBA_OUT_OF_RANGE.with_dnr(true);
    assert_eq!(drive.status(read(3 * 2048 - 7)), beyond);
    let none = FaultPlan::parse("test", &plan.replace("3584K", "512K")).expect("sound");
    let error = drive.faults.inject(&none).expect_err("not one zone");
    let expected = "Fault 1 cannot resize the drive to 512K: its zones are of 1M each";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn faults_that_do_not_fit_the_drive_are_refused_and_none_is_added() {
    let drive = Drive::new("");
    for (plan, expected) in [
        (
            "kind = \"lost\"\nrange = \"512M+4K\"",
            "Fault 2 does not fit the drive",
        ),
        (
            "kind = \"lost\"\nrange = \"0+100\"",
            "Fault 2 does not fit the drive",
        ),
        (
            "kind = \"resize\"\nsize = \"513M\"",
            "Fault 2 cannot resize the drive to 513M: it has 512M",
        ),
        (
            "kind = \"resize\"\nsize = \"0\"",
            "Fault 2 does not fit the drive",
        ),
        (
            "kind = \"resize\"\nsize = \"1000\"",
            "Fault 2 does not fit the drive",
        ),
    ] {
        let plan = format!("[[fault]]\nkind = \"lost\"\n[[fault]]\n{plan}\n");
        let plan = FaultPlan::parse("test", &plan).expect("sound");
        let error = drive.faults.inject(&plan).expect_err(expected).to_string();
        assert!(error.contains(expected), "{expected}: {error}");
        assert!(drive.faults.stats().is_empty());
    }
    let many = "[[fault]]\nkind = \"lost\"\n".repeat(40);
    let many = FaultPlan::parse("test", &many).expect("sound");
    drive.faults.inject(&many).expect("there is room");
    let error = drive.faults.inject(&many).expect_err("too many");
    assert!(error.to_string().contains("would be 80"), "{error}");
    drive.faults.clear();
    drive.faults.inject(&many).expect("there is room again");
}

proptest! {
    /// With any faults and any order of commands, each command completes once, and at the latest when its queue is deleted.
    #[test]
    fn every_command_completes_once(
        kinds in prop::collection::vec((0..5usize, 1..20u64, 1..10u32), 0..8),
        batches in prop::collection::vec((1..20u16, 0..4000u64), 1..20),
    ) {
        let mut plan = String::new();
        for (kind, count, tenths) in kinds {
            let kind = [
                "kind = \"media-error\"",
                "kind = \"latency\"\nadd = \"2us\"",
                "kind = \"lost\"",
                "kind = \"resize\"\nsize = \"2M\"",
                "kind = \"removal\"\nafter = 30",
            ][kind];
            let probability = f64::from(tenths) / 10.0;
            plan += &format!("[[fault]]\n{kind}\ncount = {count}\nprobability = {probability}\n");
        }
        let mut drive = Drive::new(&plan);
        let mut submitted = 0_u16;
        let mut done = Vec::new();
        for (count, time) in batches {
            let numbered = |slot: u16| {
                let opcode = [NvmOpcode::READ, NvmOpcode::WRITE, NvmOpcode::FLUSH][usize::from(slot % 3)];
                let mut sqe = command(opcode, u64::from(slot) * 64, 8);
                sqe.set_cid(CommandId(slot));
                sqe
            };
            let commands: Vec<_> = (submitted..submitted + count).map(numbered).collect();
            submitted += count;
            drive.submit(&commands);
            done.extend(drive.reap());
            drive.clock.0.set(drive.clock.0.get() + time);
        }
        drive.queue.set_hurried(true);
        done.extend(drive.reap());
        let mut slots: Vec<u16> = done.iter().map(|completion| completion.slot).collect();
        slots.sort_unstable();
        prop_assert_eq!(slots, (0..submitted).collect::<Vec<_>>());
    }
}

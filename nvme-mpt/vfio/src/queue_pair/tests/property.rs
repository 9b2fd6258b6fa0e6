//! Random submissions by queues, and random behaviour of the drive: every command must complete once, and the drive must get
//! exactly the submitted commands. Queues migrate between two pairs of the drive.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;

use super::super::{DriveGovernor, LateCommand, VfioQueue, VfioQueuePair};
use super::drive::FakeDrive;
use super::{HostMemoryFixture, command, submit_at};
use nvme_guest::adaptive::PolicyChoice;
use nvme_mpt::host::HostCompletion;
use nvme_mpt_memory::clock::{TickRate, Ticks};
use nvme_spec::nvm::ReadWrite;
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

const PAGE: u64 = 4096;
const SLOTS: u16 = 6;

/// Alignment of the commands' first blocks, so that the block address identifies a command.
const BLOCKS_APART: u64 = 4096;

/// Virtual ticks per millisecond.
const MILLISECOND: u64 = 1_000_000;

#[derive(Clone, Debug)]
enum Op {
    /// A queue submits several commands: queue, count, pages and offset of the first one, and kind.
    Submit(usize, u16, u64, u64, u8),
    Reap(usize),
    Fetch,
    /// The drive completes a command.
    Complete(prop::sample::Index, bool),
    /// The drive aborts a command, because an Abort was sent.
    Abort(prop::sample::Index),
    Stop,
    /// The drive is reset.
    Reset,
    Pause,
    Kill,
    /// A queue migrates to the other pair.
    Move,
    /// A queue borrows the other pair, until one of that pair's own queues submits a batch.
    Lend,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0..3_usize, 1..4_u16, 1..256_u64, 0..4096_u64, 0..4_u8)
            .prop_map(|(user, count, pages, offset, kind)| {
                Op::Submit(user, count, pages, offset & !3, kind)
            }),
        4 => (0..3_usize).prop_map(Op::Reap),
        4 => Just(Op::Fetch),
        8 => (any::<prop::sample::Index>(), prop::bool::weighted(0.2))
            .prop_map(|(index, fails)| Op::Complete(index, fails)),
        1 => any::<prop::sample::Index>().prop_map(Op::Abort),
        1 => Just(Op::Stop),
        1 => Just(Op::Reset),
        1 => Just(Op::Pause),
        2 => Just(Op::Move),
        2 => Just(Op::Lend),
        1 => prop::bool::weighted(0.05).prop_map(|kill| if kill { Op::Kill } else { Op::Fetch }),
    ]
}

/// A submitted command.
#[derive(Debug)]
struct Submitted {
    user: usize,
    slot: u16,
    opcode: u8,
    /// Contiguous parts of the data, each as address and length.
    data: Vec<(u64, u64)>,
    len: u64,
    /// Completed parts of the command: offset, length and status of each.
    parts: Vec<(u64, u64, Status)>,
    /// True if the drive was reset during the command.
    was_reset: bool,
}

struct Member {
    queue: VfioQueue,
    lender: HostMemoryFixture,
    free: Vec<u16>,
}

struct World {
    /// Drives as seen from the two pairs.
    drives: [FakeDrive; 2],
    pairs: [VfioQueuePair; 2],
    /// Index of the pair that the current operation affects.
    side: usize,
    users: Vec<Member>,
    commands: BTreeMap<u64, Submitted>,
    max_transfer: u64,
    lba_shift: u8,
    next: u64,
    now: u64,
    killed: bool,
    /// Commands that were reported as overdue.
    late: Vec<(usize, LateCommand)>,
    /// Overdue commands whose Abort has not completed.
    aborts: Vec<(usize, LateCommand)>,
}

impl World {
    fn new(entries: u32, max_transfer: u64, users: usize, lba_shift: u8, buffer: bool) -> Self {
        let governor = Arc::new(DriveGovernor::new(
            PolicyChoice::Adaptive,
            TickRate::NANOSECOND,
        ));
        let sides =
            [(); 2].map(|()| FakeDrive::governed(entries, max_transfer, buffer, governor.clone()));
        let [(one, first), (two, second)] = sides;
        let users = (0..users)
            .map(|_| Member {
                queue: first.join(SLOTS, lba_shift, Box::new(())),
                lender: HostMemoryFixture::new(SLOTS.into()),
                free: (0..SLOTS).collect(),
            })
            .collect();
        Self {
            drives: [one, two],
            pairs: [first, second],
            side: 0,
            users,
            commands: BTreeMap::new(),
            max_transfer,
            lba_shift,
            next: 0,
            now: 1,
            killed: false,
            late: Vec::new(),
            aborts: Vec::new(),
        }
    }

    fn drive(&mut self) -> &mut FakeDrive {
        &mut self.drives[self.side]
    }

    fn pair(&self) -> &VfioQueuePair {
        &self.pairs[self.side]
    }

    /// Returns a command for a queue; `None` if the queue has no free slot.
    fn prepare(&mut self, user: usize, pages: u64, offset: u64, kind: u8) -> Option<Sqe> {
        let opcode = match kind {
            0 => NvmOpcode::WRITE,
            1 => NvmOpcode::COMPARE,
            2 => NvmOpcode::FLUSH,
            _ => NvmOpcode::READ,
        };
        let Member { lender, free, .. } = &mut self.users[user];
        let slot = free.pop()?;
        let slba = self.next;
        self.next += BLOCKS_APART;
        let len = pages * PAGE;
        let mut sqe = command(opcode, slot, slba, (len >> self.lba_shift) as u32);
        let mut data = Vec::new();
        if opcode != NvmOpcode::FLUSH {
            // No two pages of the data are contiguous.
            let page = |index: u64| (slba * 512 + 2 * index) * PAGE;
            let mut rest = len;
            for index in 0.. {
                let start = if index == 0 { offset } else { 0 };
                let part = rest.min(PAGE - start);
                data.push((page(index) + start, part));
                rest -= part;
                if rest == 0 {
                    break;
                }
            }
            let (list, iova) = lender.lists.slot_list(slot);
            for (entry, (address, _)) in list.iter_mut().zip(&data[1..]) {
                *entry = *address;
            }
            sqe.dptr = [
                data[0].0,
                match data.len() {
                    1 => 0,
                    2 => data[1].0,
                    _ => iova.bits(),
                },
            ];
        }
        let submitted = Submitted {
            user,
            slot,
            opcode: opcode.0,
            data,
            len: if opcode == NvmOpcode::FLUSH { 0 } else { len },
            parts: Vec::new(),
            was_reset: false,
        };
        self.commands.insert(slba, submitted);
        Some(sqe)
    }

    fn submit(&mut self, user: usize, commands: &[Sqe]) {
        let Member { queue, lender, .. } = &mut self.users[user];
        submit_at(queue, lender, commands, Ticks(self.now));
    }

    fn reap(&mut self, user: usize) {
        let (now, mut done) = (Ticks(self.now), Vec::new());
        let Member { queue, free, .. } = &mut self.users[user];
        queue.reap_with_clock(|| now, |completion: HostCompletion| done.push(completion));
        for completion in done {
            let of = |command: &Submitted| command.user == user && command.slot == completion.slot;
            let slba = self.commands.iter().find(|(_, command)| of(command));
            let slba = *slba
                .expect("a completion of a command that is outstanding")
                .0;
            let command = self.commands.remove(&slba).expect("just found");
            check_end(&command, completion.status, self.killed);
            free.push(completion.slot);
        }
    }

    /// Checks and records a command that the drive has received, and that ends with `status`.
    fn drive_has(&mut self, sqe: &Sqe, status: Status) {
        let slba = sqe.cdw10_11();
        let (first, command) = self
            .commands
            .range_mut(..=slba)
            .next_back()
            .expect("some command");
        assert_eq!(sqe.opcode(), command.opcode);
        let offset = (slba - first) << self.lba_shift;
        if command.len == 0 {
            assert_eq!(offset, 0);
            command.parts.push((0, 0, status));
            return;
        }
        let len = (u64::from(ReadWrite::from(sqe).nlb_z) + 1) << self.lba_shift;
        assert!(len <= self.max_transfer, "{len:#x} bytes are too many");
        assert!(offset + len <= command.len, "beyond its blocks");
        let lender = &self.users[command.user].lender;
        let found = data_of(sqe, len, lender);
        let expected = part_of(&command.data, offset, len);
        assert_eq!(found, expected, "other memory than was named");
        command.parts.push((offset, len, status));
    }

    fn complete(&mut self, index: usize, status: Status) {
        let sqe = self.drive().commands[index];
        self.drive_has(&sqe, status);
        self.drive().complete(index, status);
    }

    fn reset(&mut self) {
        self.pair().stop();
        self.pair().fail_in_flight(Status::COMMAND_INTERRUPTED);
        for command in self.commands.values_mut() {
            command.was_reset = true;
        }
        let doorbells = self.drive().restart();
        self.pair().restart(doorbells);
    }

    fn apply(&mut self, side: usize, op: &Op) {
        self.side = side;
        self.now += MILLISECOND / 10;
        match op {
            Op::Submit(user, count, pages, offset, kind) => {
                let user = user % self.users.len();
                let commands: Vec<_> = (0..*count)
                    // The sizes decrease, so that some commands are split and others are not.
                    .map_while(|n| self.prepare(user, (pages >> (3 * n)).max(1), *offset, *kind))
                    .collect();
                self.submit(user, &commands);
            }
            Op::Reap(user) => self.reap(user % self.users.len()),
            Op::Fetch => {
                self.drive().fetch();
            }
            Op::Complete(index, fails) if !self.drives[side].commands.is_empty() => {
                let status = if *fails {
                    // The status identifies the failed part.
                    Status::new(nvme_spec::status::StatusCodeType::VENDOR_SPECIFIC, {
                        (self.now / (MILLISECOND / 10)) as u8
                    })
                } else {
                    Status::SUCCESS
                };
                let index = index.index(self.drive().commands.len());
                self.complete(index, status);
            }
            Op::Abort(index) if !self.drives[side].commands.is_empty() => {
                let index = index.index(self.drive().commands.len());
                let sqe = self.drive().commands[index];
                let overdue = self.pair().overdue(Ticks(u64::MAX), 0);
                self.late
                    .extend(overdue.into_iter().map(|late| (side, late)));
                let is_it = |(of, late): &&(usize, LateCommand)| {
                    *of == side && late.cid() == sqe.cid() && self.pairs[side].has_command(late)
                };
                let (_, late) = *self.late.iter().find(is_it).expect("the drive has it");
                assert!(self.pair().begin_abort(&late));
                self.drive_has(&sqe, Status::COMMAND_INTERRUPTED);
                self.drive().complete(index, Status::ABORT_REQUESTED);
                // The Abort may be answered before or after the command's completion.
                self.aborts.push((side, late));
                if self.aborts.len() > 2 {
                    let (side, answered) = self.aborts.remove(0);
                    self.pairs[side].end_abort(&answered);
                }
            }
            Op::Stop => self.pair().stop(),
            Op::Reset => self.reset(),
            Op::Pause => self.now += 2000 * MILLISECOND,
            Op::Kill => {
                for (pair, drive) in self.pairs.iter().zip(&mut self.drives) {
                    pair.kill(Status::NAMESPACE_NOT_READY);
                    // The drive was removed.
                    let _ = drive.restart();
                }
                self.killed = true;
            }
            Op::Move => {
                self.pairs[side].migrate_one(&self.pairs[1 - side], |_| true);
            }
            Op::Lend => {
                let side = usize::from(self.pairs[0].user_count() < self.pairs[1].user_count());
                let (crowded, idle) = (&self.pairs[side], &self.pairs[1 - side]);
                idle.lend_to(crowded, Ticks(self.now), MILLISECOND);
            }
            Op::Complete(..) | Op::Abort(_) => {}
        }
    }

    /// Completes all outstanding commands.
    fn drain(&mut self) {
        for side in 0..2 {
            self.side = side;
            if !self.killed {
                self.reset();
            }
        }
        for _ in 0..10_000 {
            if self.commands.is_empty() {
                break;
            }
            self.now += MILLISECOND;
            for side in 0..2 {
                self.side = side;
                self.drive().fetch();
                while !self.drive().commands.is_empty() {
                    self.complete(0, Status::SUCCESS);
                }
            }
            for user in 0..self.users.len() {
                self.reap(user);
            }
        }
        assert!(self.commands.is_empty(), "{:?} never ended", self.commands);
        for pair in &self.pairs {
            assert_eq!(pair.in_flight(), 0);
            assert_eq!(pair.stats().late_completions, 0);
        }
        self.users.clear();
        assert_eq!([0, 1].map(|side| self.pairs[side].user_count()), [0, 0]);
    }
}

impl Drop for World {
    /// After a failed test, the drive never completes commands, so the queues must not wait for them.
    fn drop(&mut self) {
        for pair in &self.pairs {
            pair.kill(Status::INTERNAL_ERROR);
        }
    }
}

/// Resolves a command's data pointer as the drive does (Base 2.0, section 4.1.1).
fn data_of(sqe: &Sqe, len: u64, lender: &HostMemoryFixture) -> Vec<(u64, u64)> {
    let [prp1, prp2] = sqe.dptr;
    let first = len.min(PAGE - prp1 % PAGE);
    let mut data = vec![(prp1, first)];
    let mut rest = len - first;
    if rest > PAGE {
        let entries = rest.div_ceil(PAGE) as usize;
        assert!(
            prp2 % PAGE + 8 * entries as u64 <= PAGE,
            "no list ends here"
        );
        let list = lender.lists.resolve(prp2, 8 * entries).expect("a list");
        let words = list.words().expect("aligned");
        for index in 0..entries {
            data.push((words.read(index), rest.min(PAGE)));
            rest = rest.saturating_sub(PAGE);
        }
    } else if rest > 0 {
        data.push((prp2, rest));
    } else {
        assert_eq!(prp2, 0);
    }
    data
}

/// Returns the parts of the data that hold `len` bytes at an offset.
fn part_of(data: &[(u64, u64)], offset: u64, len: u64) -> Vec<(u64, u64)> {
    let (mut skip, mut rest) = (offset, len);
    let mut part = Vec::new();
    for (address, size) in data {
        let skipped = skip.min(*size);
        skip -= skipped;
        let size = (size - skipped).min(rest);
        if size > 0 {
            part.push((address + skipped, size));
            rest -= size;
        }
    }
    part
}

/// Checks that a command's status matches the statuses of its parts.
fn check_end(command: &Submitted, status: Status, killed: bool) {
    let mut parts = command.parts.clone();
    parts.sort_unstable_by_key(|(offset, ..)| *offset);
    if status.is_success() {
        let mut end = 0;
        for (offset, len, status) in &parts {
            assert!(status.is_success());
            assert_eq!(*offset, end, "each block once");
            end += len;
        }
        assert_eq!(end, command.len);
        assert!(!parts.is_empty());
        return;
    }
    if killed || command.was_reset {
        return;
    }
    let first = parts.iter().find(|(.., status)| !status.is_success());
    assert_eq!(Some(status), first.map(|(.., status)| *status));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn every_command_completes_once_and_is_what_was_submitted(
        entries in 2..24_u32,
        mdts in 1..10_u32,
        users in 1..4_usize,
        large_blocks: bool,
        buffer: bool,
        ops in prop::collection::vec((0..2_usize, op()), 1..120),
    ) {
        let max_transfer = if mdts == 9 { u64::MAX } else { PAGE << mdts };
        let lba_shift = if large_blocks { 12 } else { 9 };
        let mut world = World::new(entries, max_transfer, users, lba_shift, buffer);
        for (side, op) in &ops {
            world.apply(*side, op);
        }
        world.drain();
    }
}

#[test]
fn an_sgl_is_not_split() {
    let mut world = World::new(8, 4 * PAGE, 1, 9, false);
    let Member { queue, lender, .. } = &mut world.users[0];
    let mut sqe = command(NvmOpcode::READ, 2, 0, 64);
    sqe.cdw0 = sqe.cdw0.with_psdt(nvme_spec::sqe::Psdt::SGL_MPTR_BUFFER);
    super::submit(queue, lender, &[sqe]);
    assert_eq!(world.drives[0].fetch(), 0);
    let done = super::reap(queue);
    assert_eq!(done.len(), 1);
    assert_eq!((done[0].slot, done[0].status), (2, Status::INTERNAL_ERROR));
}

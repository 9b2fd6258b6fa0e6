//! Deallocate and Write Zeroes: refusals, slices and memory.

use std::sync::mpsc;

use super::super::extent_survey::SurveyRequest;
use super::*;
use nvme_layers::LayeredController;
use nvme_layers::faults::FaultPlan;
use nvme_lease::range::BlockRange;
use nvme_mpt::drive::{HostController, HostLeaseRequest};

use crate::SoftwareController;

#[test]
fn deallocation_that_the_file_system_refuses_is_no_error() {
    for errno in [libc::EOPNOTSUPP, libc::EINVAL, libc::ENOSPC] {
        let (mut drive, ring, _) = Drive::fake();
        if drive.lacks_holes() {
            return;
        }
        let command = drive.deallocate(0, 8, 64);
        drive.ring(&[command]);
        let given = ring.end(Err(errno));
        assert_eq!(
            (given.what, given.offset, given.len),
            (KernelRequestKind::Punch, 4096, 32_768)
        );
        assert_eq!(drive.reap(), [(0, Status::SUCCESS)], "{errno}");
        assert_eq!(
            drive.store.shared.can_punch_holes(),
            errno != libc::EOPNOTSUPP
        );
    }
    let (mut drive, ring, _) = Drive::fake();
    let command = drive.deallocate(0, 8, 64);
    drive.ring(&[command]);
    ring.end(Err(libc::EIO));
    assert_eq!(drive.reap(), [(0, Status::WRITE_FAULT)]);
}

#[test]
fn a_long_range_is_deallocated_in_turn_with_others() {
    let (mut drive, ring, clock) = Drive::fake();
    if drive.lacks_holes() {
        return;
    }
    clock.0.set(1 << 40);
    let shared = drive.store.shared.clone();
    let command = drive.deallocate(0, 0, 1 << 20);
    drive.ring(&[command]);
    let (mut slices, mut at) = (0, 0);
    while let [given] = ring.pending_requests()[..] {
        assert_eq!((given.what, given.offset), (KernelRequestKind::Punch, at));
        at += given.len;
        slices += 1;
        assert!(shared.slice_scheduler.is_taken());
        clock
            .0
            .set(clock.now() + ticks_in(Duration::from_millis(1)) * given.len / (1 << 18));
        ring.succeed();
        if !drive.reap().is_empty() {
            break;
        }
        // Transfers of other queues come before the next slice.
        assert!(ring.pending_requests().is_empty());
        assert!(!shared.slice_scheduler.is_taken());
        while ring.pending_requests().is_empty() {
            let due = drive.queue.next_due().expect("it goes on");
            assert!(due.0 <= clock.now() + ticks_in(Duration::from_millis(1)));
            clock.0.set(clock.now().max(due.0));
            drive.reap();
        }
    }
    assert_eq!(at, 512 << 20);
    // At 256 KiB per millisecond, a slice has 76 KiB, except for the first slices.
    assert!((6_500..7_500).contains(&slices), "{slices}");
}

/// A stopped clock that counts how often it is read.
#[derive(Clone, Debug, Default)]
struct CountingClock(Rc<Cell<u32>>);

impl TickClock for CountingClock {
    fn now(&self) -> u64 {
        self.0.set(self.0.get() + 1);
        1 << 40
    }
}

#[test]
fn one_waiting_command_polls_for_the_turn() {
    let clock = CountingClock::default();
    let mut drive = Drive::new(FakeRing::default(), clock.clone());
    if drive.lacks_holes() {
        return;
    }
    let shared = drive.store.shared.clone();
    let taken = shared.slice_scheduler.take_turn(Ticks(1 << 40), OTHER);
    taken.expect("nobody has it");
    let commands: Vec<Sqe> = (0..SLOTS)
        .map(|slot| drive.deallocate(slot, u64::from(slot) * 64, 64))
        .collect();
    drive.ring(&commands);
    assert_eq!(drive.queue.blocked.len(), usize::from(SLOTS));
    clock.0.set(0);
    assert!(drive.reap().is_empty());
    assert_eq!(drive.queue.blocked.len(), usize::from(SLOTS));
    // The clock is read for the pass, for the request, and for the refusal.
    assert_eq!(clock.0.get(), 3);
}

#[test]
fn write_zeroes_by_hand_takes_no_memory() {
    let (mut drive, ring, _) = Drive::fake();
    let zeroes = |slot| drive.transfer(NvmOpcode::WRITE_ZEROES, slot, u64::from(slot) * 64, 64, 0);
    let commands: Vec<Sqe> = (0..SLOTS).map(zeroes).collect();
    drive.ring(&commands);
    let fresh = QueueBounceBuffers::new().bytes();
    for slot in 0..SLOTS {
        let mut done = Vec::new();
        while done.is_empty() {
            for given in ring.pending_requests() {
                let result = match given.what {
                    KernelRequestKind::Zero => Err(libc::EOPNOTSUPP),
                    _ => Ok(given.len as usize),
                };
                ring.0.borrow_mut().end(given, result);
            }
            done = drive.reap();
            assert_eq!(drive.queue.bounces.bytes(), fresh, "{slot}");
        }
        if done.len() == usize::from(SLOTS) {
            return;
        }
    }
}

#[test]
fn a_deallocate_that_leaves_data_leaves_its_marks() {
    let unreadable = |refusal: Option<i32>, late: bool| {
        let (mut drive, ring, clock) = Drive::fake();
        if drive.lacks_holes() {
            return late || refusal.is_some();
        }
        clock.0.set(1 << 40);
        let _room = drive
            .store
            .shared
            .uncorrectable
            .register_lease(&[BlockRange {
                start: Lba(0),
                blocks: 1 << 20,
            }]);
        assert!(drive.store.shared.uncorrectable.mark(8, 8).is_some());
        let turn = late.then(|| {
            drive
                .store
                .shared
                .slice_scheduler
                .take_turn(Ticks(clock.now()), OTHER)
        });
        let command = drive.deallocate(0, 8, 8);
        drive.ring(&[command]);
        assert!(
            drive.store.shared.uncorrectable.intersects(8, 8),
            "too early"
        );
        if turn.is_some() {
            clock.0.set(clock.now() + ticks_in(Duration::from_secs(11)));
        } else {
            ring.end(refusal.map_or(Ok(0), Err));
        }
        if !late && refusal.is_none() {
            assert_eq!(drive.reap(), [], "the range is not durable yet");
            ring.end(Ok(0));
        }
        assert_eq!(drive.reap(), [(0, Status::SUCCESS)]);
        drive.store.shared.uncorrectable.intersects(8, 8)
    };
    assert!(!unreadable(None, false));
    assert!(unreadable(Some(libc::EINVAL), false));
    assert!(unreadable(None, true));
}

/// Completes the kernel's request after `time`.
fn end_after(ring: &FakeRing, clock: &TestClock, time: Duration) -> KernelRequest {
    clock.0.set(clock.now() + ticks_in(time));
    ring.succeed()
}

#[test]
fn a_deallocate_ends_in_time_however_slow_the_file_system_is() {
    let (mut drive, ring, clock) = Drive::fake();
    if drive.lacks_holes() {
        return;
    }
    clock.0.set(1 << 40);
    let commands = [0, 1, 2].map(|slot| drive.deallocate(slot, 0, 1 << 20));
    let began = clock.now();
    drive.ring(&commands);
    let (mut done, mut slices) = (Vec::new(), 0);
    while done.len() < 3 {
        if ring.pending_requests().is_empty() {
            let due = drive.queue.next_due().expect("it goes on");
            clock.0.set(clock.now().max(due.0));
        } else {
            end_after(&ring, &clock, Duration::from_secs(1));
            slices += 1;
        }
        done.extend(drive.reap());
    }
    assert!(done.iter().all(|(_, status)| *status == Status::SUCCESS));
    assert!(slices >= 5, "{slices}");
    let took = clock.now() - began;
    assert!(took < ticks_in(Duration::from_secs(15)), "{took} ticks");
    assert_eq!(ring.pending_requests(), []);
}

#[test]
fn zeroes_that_wait_too_long_for_a_turn_are_written() {
    let (mut drive, ring, clock) = Drive::fake();
    clock.0.set(1 << 40);
    let turn = drive
        .store
        .shared
        .slice_scheduler
        .take_turn(Ticks(clock.now()), OTHER);
    assert!(turn.is_some());
    drive.ring(&[drive.transfer(NvmOpcode::WRITE_ZEROES, 0, 0, 64, 0)]);
    assert_eq!(ring.pending_requests(), []);
    clock.0.set(clock.now() + ticks_in(Duration::from_secs(11)));
    assert!(drive.reap().is_empty());
    let given = ring.succeed();
    assert_eq!((given.what, given.len), (KernelRequestKind::Write, 32_768));
    assert_eq!(drive.reap(), [(0, Status::SUCCESS)]);
}

#[test]
fn a_deallocate_waits_for_no_memory() {
    let (mut drive, ring, _) = Drive::fake();
    if drive.lacks_holes() {
        return;
    }
    let mut taken = Vec::new();
    while let Ok(Some(bounce)) = drive.queue.bounces.take(BounceBufferSize::Small) {
        taken.push(bounce);
    }
    // The partial blocks at both ends keep their data.
    let command = drive.deallocate(0, 1, 30);
    drive.ring(&[command]);
    let given = ring.succeed();
    assert_eq!(
        (given.what, given.offset, given.len),
        (KernelRequestKind::Punch, 4096, 8192)
    );
    assert_eq!(drive.reap(), [(0, Status::SUCCESS)]);
}

#[test]
fn the_holes_of_a_file_are_zeroes_unless_faults_follow_each_command() {
    let file = tempfile::Builder::new().tempfile_in("/dev/shm");
    let file = file.expect("a file");
    file.as_file().set_len(BYTES).expect("room");
    let part = BlockRange {
        start: Lba(0),
        blocks: BYTES >> 9,
    };
    let parts = [part];
    let open = || SoftwareController::open_file(file.path(), 9).expect("a drive");
    let zeroes = |drive: Arc<dyn HostController>| {
        let namespace = drive.namespaces()[0];
        let request = HostLeaseRequest {
            name: "test",
            namespace,
            parts: &parts,
            reservation: None,
        };
        let lease = drive.open_lease(&request).expect("a lease");
        lease.leading_zeroes(part)
    };
    assert_eq!(zeroes(Arc::new(open())), part.blocks);
    let faulty = LayeredController::new(open())
        .with_faults(&FaultPlan::default())
        .expect("no faults");
    assert_eq!(zeroes(Arc::new(faulty)), 0);
}

/// Enables surveys of the drive's file. The test receives the requests, and answers them.
fn enable_surveys(drive: &mut Drive<FakeRing, TestClock>) -> mpsc::Receiver<SurveyRequest> {
    let (sender, questions) = mpsc::sync_channel(4);
    // The drive's queue and lease share the open file.
    assert!(drive.store.shared.surveyor.set_sender(sender), "once");
    questions
}

/// Deallocates a range, and answers each survey with `extents`. Returns the slices.
fn deallocated_slices(
    drive: &mut Drive<FakeRing, TestClock>,
    ring: &FakeRing,
    clock: &TestClock,
    questions: &mpsc::Receiver<SurveyRequest>,
    extents: &[(u64, u64)],
) -> Vec<(u64, u64)> {
    let mut slices = Vec::new();
    loop {
        if let Ok(question) = questions.try_recv() {
            let (start, end) = (question.start, question.end);
            let inside = extents
                .iter()
                .map(|&(from, to)| (from.max(start), to.min(end)));
            question.answer(inside.filter(|(from, to)| from < to).collect(), 1);
        }
        if let [_] = ring.pending_requests()[..] {
            let given = ring.succeed();
            assert_eq!(given.what, KernelRequestKind::Punch);
            slices.push((given.offset, given.len));
        }
        clock
            .0
            .set(clock.now() + ticks_in(Duration::from_micros(20)));
        if let [done] = drive.reap()[..] {
            assert_eq!(done, (0, Status::SUCCESS));
            return slices;
        }
    }
}

#[test]
fn deallocating_a_hole_is_immediate_and_does_not_adapt_slices() {
    const MIB: u64 = 1 << 20;
    let (mut drive, ring, clock) = Drive::fake();
    if drive.lacks_holes() {
        return;
    }
    clock.0.set(1 << 40);
    let questions = enable_surveys(&mut drive);
    for _ in 0..20 {
        let command = drive.deallocate(0, 0, 1 << 20);
        drive.ring(&[command]);
        assert_eq!(ring.pending_requests(), [], "it is not known yet");
        let slices = deallocated_slices(&mut drive, &ring, &clock, &questions, &[]);
        assert_eq!(slices, [(0, 512 * MIB)]);
    }
    // After a hole, the first slice with data has the initial length again.
    let command = drive.deallocate(0, 0, 1 << 20);
    drive.ring(&[command]);
    let data = (256 * MIB, 257 * MIB);
    let slices = deallocated_slices(&mut drive, &ring, &clock, &questions, &[data]);
    assert_eq!(slices[0], (0, 256 * MIB + (256 << 10)));
    assert_eq!(slices.iter().map(|(_, len)| len).sum::<u64>(), 512 * MIB);
}

#[test]
fn a_survey_that_does_not_come_is_not_waited_for() {
    let (mut drive, ring, clock) = Drive::fake();
    if drive.lacks_holes() {
        return;
    }
    clock.0.set(1 << 40);
    let questions = enable_surveys(&mut drive);
    let command = drive.deallocate(0, 0, 1 << 20);
    drive.ring(&[command]);
    clock
        .0
        .set(clock.now() + ticks_in(Duration::from_millis(1)));
    assert!(drive.reap().is_empty());
    assert_eq!(ring.pending_requests(), []);
    clock
        .0
        .set(clock.now() + ticks_in(Duration::from_millis(2)));
    assert!(drive.reap().is_empty());
    assert_eq!(ring.succeed().len, 256 << 10);
    // An answer that arrives after the time-out has no effect.
    questions
        .try_recv()
        .expect("a question")
        .answer(Vec::new(), 1);
    assert!(drive.reap().is_empty());
    assert!(questions.try_recv().is_err(), "it asks no more");
}

#[test]
fn neighbouring_ranges_are_deallocated_as_one() {
    let (mut drive, ring, _) = Drive::fake();
    if drive.lacks_holes() {
        return;
    }
    let ranges = [(0, 8), (8, 8), (0, 0), (16, 16), (64, 8)];
    let mut command = drive.deallocate(0, 0, 8);
    command.cdw10 = ranges.len() as u32 - 1;
    let (list, _) = drive.lists.slot_list(0);
    for (at, (slba, nlb)) in ranges.into_iter().enumerate() {
        let range = DsmRange {
            slba: Lba(slba),
            nlb,
            ..DsmRange::default()
        };
        list.as_mut_bytes()[16 * at..16 * (at + 1)].copy_from_slice(range.as_bytes());
    }
    drive.ring(&[command]);
    let given = ring.succeed();
    assert_eq!((given.offset, given.len), (0, 32 * 512));
    while ring.pending_requests().is_empty() {
        assert!(drive.reap().is_empty());
    }
    let given = ring.succeed();
    assert_eq!((given.offset, given.len), (64 * 512, 8 * 512));
    assert_eq!(drive.reap(), [(0, Status::SUCCESS)]);
}

#[test]
fn a_file_system_names_its_extents() {
    let file = NamedTempFile::new().expect("a file");
    file.as_file().set_len(64 << 20).expect("room");
    let page = [7; 4096];
    for at in [1_u64 << 20, 5 << 20] {
        file.as_file().write_all_at(&page, at).expect("written");
    }
    file.as_file().sync_all().expect("synced");
    let Ok(extents) = super::super::kernel::extents(file.as_file(), 0, 64 << 20, 64) else {
        println!("NOT CHECKED: the file system of temporary files names no extents");
        return;
    };
    let has = |at| extents.iter().any(|&(from, to)| (from..to).contains(&at));
    assert!(has(1 << 20) && has(5 << 20), "{extents:?}");
    assert!(!has(0) && !has(3 << 20) && !has(32 << 20), "{extents:?}");
}

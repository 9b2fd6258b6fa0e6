//! Requests that the kernel does not complete or does not accept, and queues that end with such requests.

use super::*;
use crate::backing_store::BackingStore as _;

#[test]
fn a_request_that_the_kernel_keeps_is_cancelled_and_repeated() {
    let (mut drive, ring, clock) = Drive::fake();
    drive.ring(&[drive.transfer(NvmOpcode::WRITE, 3, 8, 8, 0)]);
    let [first] = ring.pending_requests()[..] else {
        panic!("one request");
    };
    assert_eq!(
        (first.what, first.mode),
        (KernelRequestKind::Write, RequestIssueMode::Inline)
    );
    assert!(drive.advance_checks(&clock, OVERDUE_CHECKS).is_empty());
    assert_eq!(ring.pending_requests(), [first], "it is not overdue");
    assert!(drive.advance_checks(&clock, 2).is_empty());
    let [pending, cancellation] = ring.pending_requests()[..] else {
        panic!("a cancellation beside it");
    };
    assert_eq!(
        (pending, cancellation.what),
        (first, KernelRequestKind::Cancel(first.tag))
    );
    ring.0.borrow_mut().end(cancellation, Ok(0));
    ring.0.borrow_mut().end(first, Err(libc::ECANCELED));
    assert!(drive.reap().is_empty());
    let repeated = ring.pending_requests();
    let by_thread = KernelRequest {
        mode: RequestIssueMode::Worker,
        ..first
    };
    assert_eq!(repeated, [by_thread]);
    ring.succeed();
    assert_eq!(drive.reap(), [(3, Status::SUCCESS)]);
    assert!(!drive.queue.has_failed());
}

/// Checks the log message about the kernel's only request, which is in slot 0.
fn assert_report(drive: &Drive<FakeRing, TestClock>, ring: &FakeRing, what: &str) {
    let has = ring.pending_requests();
    let [
        KernelRequest {
            fd, offset, len, ..
        },
    ] = has[..]
    else {
        panic!("the kernel has {has:?}");
    };
    assert_eq!(
        drive.queue.describe_request(0),
        format!(
            "The kernel has not completed a {what} on {} (descriptor {fd}, offset {offset}, length {len}) for over \
             0ns",
            drive.file.path().display()
        )
    );
}

#[test]
fn a_request_that_the_kernel_keeps_is_reported_with_its_place() {
    let (ring, clock) = (FakeRing::default(), TestClock::default());
    let file = NamedTempFile::new().expect("a file");
    let store = store(file.as_file(), file.path());
    store.set_companion_file(Arc::new(tempfile::tempfile().expect("a file")));
    let mut drive = Drive::with_store(file, store, ring.clone(), clock);
    drive.ring(&[drive.transfer(NvmOpcode::WRITE, 0, 8, 16, 0)]);
    assert_report(&drive, &ring, "write");
    ring.succeed();
    drive.reap();
    // A partial block is read as a whole block, into a bounce buffer.
    drive.ring(&[drive.transfer(NvmOpcode::READ, 0, 9, 2, 0)]);
    assert_report(&drive, &ring, "read");
    ring.succeed();
    drive.reap();
    drive.ring(&[drive.transfer(NvmOpcode::FLUSH, 0, 0, 1, 0)]);
    assert_report(&drive, &ring, "sync");
    let first = ring.succeed();
    assert_eq!(drive.reap(), []);
    assert_report(&drive, &ring, "sync of the companion file");
    assert_ne!(ring.succeed().fd, first.fd);
    assert_eq!(drive.reap(), [(0, Status::SUCCESS)]);
    if drive.lacks_holes() {
        return;
    }
    let command = drive.deallocate(0, 8, 16);
    drive.ring(&[command]);
    assert_report(&drive, &ring, "deallocation");
}

/// Timeout of a drive.
const TIMEOUT: Duration = Duration::from_secs(30);

impl Drive<FakeRing, TestClock> {
    /// Creates a drive with a timeout.
    fn with_timeout() -> (Self, FakeRing, TestClock) {
        let (mut drive, ring, clock) = Self::fake();
        drive.queue.timeout_checks = Some(checks_in(TIMEOUT));
        (drive, ring, clock)
    }
}

#[test]
fn a_request_that_is_repeated_is_waited_for() {
    let (mut drive, ring, clock) = Drive::fake();
    drive.ring(&[drive.transfer(NvmOpcode::READ, 0, 0, 8, 0)]);
    drive.advance_checks(&clock, OVERDUE_CHECKS + 2);
    let [pending, cancellation] = ring.pending_requests()[..] else {
        panic!("a cancellation beside it");
    };
    ring.0.borrow_mut().end(cancellation, Ok(0));
    ring.0.borrow_mut().end(pending, Err(libc::ECANCELED));
    drive.reap();
    assert!(
        drive
            .advance_checks(&clock, 1000 * OVERDUE_CHECKS)
            .is_empty()
    );
    assert_eq!(
        ring.pending_requests().len(),
        1,
        "it is not cancelled again"
    );
    assert!(!drive.queue.has_failed());
    ring.succeed();
    assert_eq!(drive.reap(), [(0, Status::SUCCESS)]);
}

#[test]
fn a_request_that_cannot_be_cancelled_is_waited_for() {
    let (mut drive, ring, clock) = Drive::fake();
    drive.ring(&[drive.transfer(NvmOpcode::FLUSH, 0, 0, 1, 0)]);
    drive.advance_checks(&clock, OVERDUE_CHECKS + 2);
    let [pending, cancellation] = ring.pending_requests()[..] else {
        panic!("a cancellation beside it");
    };
    ring.0.borrow_mut().end(cancellation, Err(libc::EALREADY));
    assert!(
        drive
            .advance_checks(&clock, 1000 * OVERDUE_CHECKS)
            .is_empty()
    );
    assert_eq!(ring.pending_requests(), [pending]);
    assert!(!drive.queue.has_failed());
    ring.0.borrow_mut().end(pending, Ok(0));
    assert_eq!(drive.reap(), [(0, Status::SUCCESS)]);
}

#[test]
fn a_request_that_takes_longer_than_the_timeout_fails_its_queue() {
    let (mut drive, ring, clock) = Drive::with_timeout();
    drive.ring(&[drive.transfer(NvmOpcode::FLUSH, 0, 0, 1, 0)]);
    drive.advance_checks(&clock, checks_in(TIMEOUT));
    assert!(!drive.queue.has_failed());
    drive.advance_checks(&clock, 1);
    assert!(drive.queue.has_failed());
    // The queue needs no more polls, but its reset is complete only when the pending request has ended.
    assert_eq!(drive.queue.next_due(), None);
    let first = ring.pending_requests()[0];
    ring.0.borrow_mut().end(first, Ok(0));
    assert_eq!(drive.reap().len(), 1);
}

#[test]
fn requests_refused_by_the_kernel_are_resubmitted() {
    let (mut drive, ring, clock) = Drive::fake();
    clock.0.set(1 << 40);
    ring.0.borrow_mut().refuses = 2;
    drive.ring(&[drive.transfer(NvmOpcode::READ, 0, 0, 8, 0)]);
    assert!(ring.pending_requests().is_empty());
    let soon = |drive: &Drive<FakeRing, TestClock>| {
        let due = drive.queue.next_due().expect("to be looked after");
        assert!(due.0 <= clock.now() + ticks_in(Duration::from_millis(1)));
        due
    };
    soon(&drive);
    drive.reap();
    assert!(ring.pending_requests().is_empty());
    let due = soon(&drive);
    clock.0.set(due.0);
    drive.reap();
    ring.succeed();
    assert_eq!(drive.reap(), [(0, Status::SUCCESS)]);
    assert_eq!(drive.queue.next_due(), None);
}

#[test]
fn an_interrupted_queue_starts_no_further_slice_or_request() {
    let (mut drive, ring, _) = Drive::fake();
    if drive.lacks_holes() {
        return;
    }
    let commands = [0, 1].map(|slot| drive.deallocate(slot, 0, 2 << 20));
    drive.ring(&commands);
    let part = drive.transfer(NvmOpcode::WRITE, 2, 2, 2, 0);
    let whole = drive.transfer(NvmOpcode::WRITE, 3, 8, 8, 0);
    let read = drive.transfer(NvmOpcode::READ, 4, 8, 8, 4);
    let rest = drive.transfer(NvmOpcode::READ, 5, 8, 8, 0);
    drive.ring(&[whole, part, read, rest]);
    drive.queue.cut_short();
    // One command waits for its turn, and one command waits for the block.
    let aborted = Status::ABORTED_SQ_DELETION;
    assert_eq!(drive.reap(), [(2, aborted), (1, aborted)]);
    for given in ring.pending_requests() {
        let done = if given.tag == 5 { 512 } else { given.len };
        ring.0.borrow_mut().end(given, Ok(done as usize));
    }
    let done = drive.reap();
    let ok = Status::SUCCESS;
    assert_eq!(done, [(0, aborted), (3, ok), (4, ok), (5, aborted)]);
    assert_eq!(ring.pending_requests(), []);
    assert_eq!(drive.queue.next_due(), None);
    assert!(
        drive
            .store
            .shared
            .slice_scheduler
            .take_turn(Ticks(u64::MAX), OTHER)
            .is_some()
    );
}

/// When a queue fails, its turn passes to another queue. When the failed queue's slice ends late, the other queue keeps the
/// turn.
#[test]
fn a_late_slice_of_a_failed_queue_returns_no_turn() {
    let (mut drive, ring, clock) = Drive::with_timeout();
    if drive.lacks_holes() {
        return;
    }
    let command = drive.deallocate(0, 0, 8);
    drive.ring(&[command]);
    let [slice] = ring.pending_requests()[..] else {
        panic!("one request");
    };
    drive.advance_checks(&clock, checks_in(TIMEOUT) + 1);
    assert!(drive.queue.has_failed());
    assert!(
        drive
            .store
            .shared
            .slice_scheduler
            .take_turn(Ticks(u64::MAX), OTHER)
            .is_some(),
        "it is free"
    );
    ring.0.borrow_mut().end(slice, Ok(0));
    drive.reap();
    assert!(
        drive
            .store
            .shared
            .slice_scheduler
            .take_turn(Ticks(u64::MAX), OTHER)
            .is_none(),
        "another command has it"
    );
}

/// A command behind the failed one has the turn. The failed queue is no longer polled, so it must take no further turn.
#[test]
fn a_failed_queue_releases_the_turns_of_all_its_commands() {
    let (mut drive, ring, clock) = Drive::with_timeout();
    if drive.lacks_holes() {
        return;
    }
    drive.ring(&[drive.transfer(NvmOpcode::READ, 0, 0, 8, 0)]);
    drive.advance_checks(&clock, OVERDUE_CHECKS / 2);
    let command = drive.deallocate(1, 0, 2 << 20);
    drive.ring(&[command]);
    let slice = ring.pending_requests()[1];
    drive.advance_checks(&clock, checks_in(TIMEOUT) + 1 - OVERDUE_CHECKS / 2);
    assert!(drive.queue.has_failed());
    let take = |drive: &Drive<FakeRing, TestClock>| {
        drive
            .store
            .shared
            .slice_scheduler
            .take_turn(Ticks(u64::MAX), OTHER)
    };
    assert!(take(&drive).is_some(), "it is free");
    drive.store.shared.slice_scheduler.cancel_turn();
    ring.0.borrow_mut().end(slice, Ok(0));
    assert_eq!(drive.reap(), [(1, Status::ABORTED_SQ_DELETION)]);
    assert!(take(&drive).is_some(), "it is free");
}

#[test]
fn a_request_that_is_interrupted_for_ever_is_an_error() {
    for errno in [libc::EAGAIN, libc::EINTR] {
        for opcode in [
            NvmOpcode::READ,
            NvmOpcode::WRITE,
            NvmOpcode::FLUSH,
            NvmOpcode::WRITE_ZEROES,
        ] {
            let (mut drive, ring, clock) = Drive::fake();
            clock.0.set(1 << 40);
            let began = clock.now();
            drive.ring(&[drive.transfer(opcode, 0, 0, 8, 0)]);
            let mut done = Vec::new();
            while done.is_empty() {
                for given in ring.pending_requests() {
                    ring.0.borrow_mut().end(given, Err(errno));
                }
                clock
                    .0
                    .set(clock.now() + ticks_in(Duration::from_millis(100)));
                let took = clock.now() - began;
                assert!(took < ticks_in(Duration::from_secs(25)), "{opcode:?}");
                // The queue reads the clock in only one of many passes.
                for _ in 0..64 {
                    done.extend(drive.reap());
                }
            }
            assert_eq!(done, [(0, Status::INTERNAL_ERROR)], "{opcode:?} {errno}");
            assert!(!drive.queue.has_failed(), "{opcode:?}");
            assert_eq!(ring.pending_requests(), []);
        }
    }
}

#[test]
fn settle_reports_requests_that_never_complete() {
    for keeps_request in [false, true] {
        let (mut drive, ring, _) = Drive::fake();
        drive.ring(&[drive.transfer(NvmOpcode::READ, 0, 0, 8, 0)]);
        ring.0.borrow_mut().keeps_requests = keeps_request;
        assert_eq!(drive.queue.drain(), !keeps_request);
        // The queue waits only once. A second call, as when the queue is dropped, returns the result of the first call.
        ring.0.borrow_mut().keeps_requests = false;
        assert_eq!(drive.queue.drain(), !keeps_request);
    }
}

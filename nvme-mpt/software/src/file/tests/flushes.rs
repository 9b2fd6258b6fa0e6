//! Flushes that share one sync.

use super::*;

impl Drive<FakeRing, TestClock> {
    fn flush(&mut self, slots: &[u16]) {
        for slot in slots {
            self.ring(&[self.transfer(NvmOpcode::FLUSH, *slot, 0, 1, 0)]);
        }
    }
}

#[test]
fn any_number_of_flushes_is_one_request_at_a_time() {
    let (mut drive, ring, _) = Drive::fake();
    drive.flush(&[0, 1, 2, 3]);
    for flushes in [&[0][..], &[1, 2, 3]] {
        assert_eq!(drive.reap(), []);
        let request = ring.succeed();
        assert_eq!(request.what, KernelRequestKind::Sync);
        let done: Vec<_> = flushes
            .iter()
            .map(|slot| (*slot, Status::SUCCESS))
            .collect();
        assert_eq!(drive.reap(), done);
    }
    assert_eq!(ring.pending_requests(), []);
    assert_eq!(drive.queue.next_due(), None);
    drive.flush(&[0]);
    ring.succeed();
    assert_eq!(drive.reap(), [(0, Status::SUCCESS)]);
}

#[test]
fn flushes_that_waited_for_a_sync_that_failed_fail_too() {
    let (mut drive, ring, _) = Drive::fake();
    drive.flush(&[0, 1, 2]);
    ring.end(Err(libc::EIO));
    let mut done = drive.reap();
    // Another sync would succeed, but the data stays lost.
    assert_eq!(ring.pending_requests(), []);
    let lost = Status::WRITE_FAULT.with_dnr(true);
    done.sort_by_key(|(slot, _)| *slot);
    assert_eq!(done, [(0, lost), (1, lost), (2, lost)]);
}

#[test]
fn flushes_that_wait_end_with_their_queue() {
    let (mut drive, ring, _) = Drive::fake();
    drive.flush(&[0, 1, 2]);
    drive.queue.cut_short();
    let mut aborted = drive.reap();
    aborted.sort_by_key(|(slot, _)| *slot);
    let of = |slot| (slot, Status::ABORTED_SQ_DELETION);
    assert_eq!(aborted, [of(1), of(2)]);
    ring.succeed();
    // If the queue did not end, a sync of the companion file would follow.
    assert_eq!(drive.reap(), [of(0)]);
}

//! I/O queues that a guest creates and deletes.

use nvme_spec::{sqe::Sqe, status::Status};

use super::{PAGE, assert_fails, assert_ok, guest, set_features};
use crate::fixtures::{DATA, MEMORY, QUEUE_PAIRS, UNMAPPED};

fn create_cq(qid: u32, size_z: u32, cdw11: u32, base: u64) -> Sqe {
    Sqe {
        dptr: [base, 0],
        cdw10: size_z << 16 | qid,
        cdw11,
        ..Sqe::new(0x05)
    }
}

fn create_sq(qid: u32, size_z: u32, cdw11: u32, base: u64) -> Sqe {
    Sqe {
        dptr: [base, 0],
        cdw10: size_z << 16 | qid,
        cdw11,
        ..Sqe::new(0x01)
    }
}

fn delete_cq(qid: u32) -> Sqe {
    Sqe {
        cdw10: qid,
        ..Sqe::new(0x04)
    }
}

fn delete_sq(qid: u32) -> Sqe {
    Sqe {
        cdw10: qid,
        ..Sqe::new(0x00)
    }
}

/// Returns the address of a queue. Queues are 64 KiB apart, behind the data.
fn queue_address(number: u64) -> u64 {
    DATA + 0x10_0000 + number * 0x1_0000
}

#[test]
fn io_queues_are_created_and_deleted() {
    let mut guest = guest();
    assert_ok(guest.admin(create_cq(1, 63, 0x0001_0003, queue_address(0))));
    assert_ok(guest.admin(create_sq(1, 63, 0x0001_0001, queue_address(1))));
    assert_ok(guest.admin(create_sq(2, 1, 0x0001_0001, queue_address(2))));
    assert_fails(guest.admin(delete_cq(1)), Status::INVALID_QUEUE_DELETION);
    assert_ok(guest.admin(delete_sq(2)));
    assert_fails(guest.admin(delete_sq(2)), Status::INVALID_QUEUE_ID);
    assert_ok(guest.admin(delete_sq(1)));
    assert_ok(guest.admin(delete_cq(1)));
    assert_fails(guest.admin(delete_cq(1)), Status::INVALID_QUEUE_ID);
}

#[test]
fn invalid_completion_queues_are_refused() {
    let mut guest = guest();
    assert_ok(guest.admin(create_cq(2, 63, 0x0002_0003, queue_address(0))));
    let pairs = u32::from(QUEUE_PAIRS);
    for (sqe, status) in [
        (
            create_cq(0, 63, 3, queue_address(1)),
            Status::INVALID_QUEUE_ID,
        ),
        (
            create_cq(2, 63, 3, queue_address(1)),
            Status::INVALID_QUEUE_ID,
        ),
        (
            create_cq(pairs + 1, 63, 3, queue_address(1)),
            Status::INVALID_QUEUE_ID,
        ),
        (
            create_cq(0xFFFF, 63, 3, queue_address(1)),
            Status::INVALID_QUEUE_ID,
        ),
        (
            create_cq(1, 0, 3, queue_address(1)),
            Status::INVALID_QUEUE_SIZE,
        ),
        (create_cq(1, 63, 2, queue_address(1)), Status::INVALID_FIELD),
        (
            create_cq(1, 63, (pairs + 1) << 16 | 3, queue_address(1)),
            Status::INVALID_INTERRUPT_VECTOR,
        ),
        (
            create_cq(1, 63, 3, queue_address(1) + 0x10),
            Status::PRP_OFFSET_INVALID,
        ),
        (create_cq(1, 63, 3, UNMAPPED), Status::INVALID_FIELD),
        (
            create_cq(1, 1023, 3, MEMORY.end - PAGE),
            Status::INVALID_FIELD,
        ),
        (create_cq(1, 63, 3, !0xFFF), Status::INVALID_FIELD),
    ] {
        assert_fails(guest.admin(sqe), status);
    }
    let vector_that_is_not_used = create_cq(1, 63, 0xFFFF_0001, queue_address(1));
    assert_ok(guest.admin(vector_that_is_not_used));
}

#[test]
fn invalid_submission_queues_are_refused() {
    let mut guest = guest();
    assert_ok(guest.admin(create_cq(1, 63, 0x0001_0003, queue_address(0))));
    assert_ok(guest.admin(create_sq(1, 63, 0x0001_0001, queue_address(1))));
    let pairs = u32::from(QUEUE_PAIRS);
    for (sqe, status) in [
        (
            create_sq(0, 63, 0x0001_0001, queue_address(2)),
            Status::INVALID_QUEUE_ID,
        ),
        (
            create_sq(1, 63, 0x0001_0001, queue_address(2)),
            Status::INVALID_QUEUE_ID,
        ),
        (
            create_sq(pairs + 1, 63, 0x0001_0001, queue_address(2)),
            Status::INVALID_QUEUE_ID,
        ),
        (
            create_sq(2, 63, 0x0000_0001, queue_address(2)),
            Status::INVALID_QUEUE_ID,
        ),
        (
            create_sq(2, 63, (pairs + 1) << 16 | 1, queue_address(2)),
            Status::INVALID_QUEUE_ID,
        ),
        (
            create_sq(2, 63, 0x0002_0001, queue_address(2)),
            Status::COMPLETION_QUEUE_INVALID,
        ),
        (
            create_sq(2, 63, 0x0001_0000, queue_address(2)),
            Status::INVALID_FIELD,
        ),
        (
            create_sq(2, 0, 0x0001_0001, queue_address(2)),
            Status::INVALID_QUEUE_SIZE,
        ),
        (
            create_sq(2, 63, 0x0001_0001, queue_address(2) + 4),
            Status::PRP_OFFSET_INVALID,
        ),
        (
            create_sq(2, 63, 0x0001_0001, UNMAPPED),
            Status::INVALID_FIELD,
        ),
    ] {
        assert_fails(guest.admin(sqe), status);
    }
}

#[test]
fn queues_have_at_most_mqes_entries() {
    let mut guest = guest();
    let mqes = guest.read_register(0) & 0xFFFF;
    assert!(mqes >= 1023, "a depth of 1,024");
    assert_ok(guest.admin(create_cq(1, mqes, 3, queue_address(0))));
    if mqes < 0xFFFF {
        let sqe = create_cq(2, mqes + 1, 3, queue_address(0));
        assert_fails(guest.admin(sqe), Status::INVALID_QUEUE_SIZE);
    }
}

#[test]
fn entry_sizes_have_to_be_set_before_queues_are_created() {
    let mut guest = guest();
    guest.write_register(0x14, 0x0000_0001);
    assert_fails(
        guest.admin(create_cq(1, 63, 3, queue_address(0))),
        Status::INVALID_QUEUE_SIZE,
    );
    guest.write_register(0x14, 0x0040_0001);
    assert_ok(guest.admin(create_cq(1, 63, 3, queue_address(0))));
    let sqe = create_sq(1, 63, 0x0001_0001, queue_address(1));
    assert_fails(guest.admin(sqe), Status::INVALID_QUEUE_SIZE);
    guest.write_register(0x14, 0x0046_0001);
    assert_ok(guest.admin(sqe));
}

#[test]
fn queues_are_numbered_up_to_what_was_allocated() {
    let mut guest = guest();
    assert_eq!(
        guest.admin(set_features(0x07, 0x0001_0000)).dw0(),
        0x0001_0000
    );
    assert_ok(guest.admin(create_cq(2, 63, 3, queue_address(0))));
    assert_fails(
        guest.admin(create_cq(3, 63, 3, queue_address(1))),
        Status::INVALID_QUEUE_ID,
    );
    let sqe = create_sq(2, 63, 0x0002_0001, queue_address(1));
    assert_fails(guest.admin(sqe), Status::INVALID_QUEUE_ID);
    assert_fails(
        guest.admin(set_features(0x07, 0x0003_0003)),
        Status::COMMAND_SEQUENCE_ERROR,
    );
    assert_ok(guest.admin(delete_cq(2)));
    assert_eq!(
        guest.admin(set_features(0x07, 0x0003_0003)).dw0(),
        0x0003_0003
    );
}

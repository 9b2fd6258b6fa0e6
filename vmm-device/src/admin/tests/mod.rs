//! Admin commands of a guest, through the doorbells and rings of a function on a memory drive. The tests in each command's
//! module check the command's results in detail.

mod io_queues;

use nvme_guest::DoorbellMode;
use nvme_spec::{
    cqe::Cqe,
    ids::{CommandId, Nsid, QueueId},
    registers::Doorbell,
    sqe::{Cdw0, Sqe},
    status::Status,
};

use crate::fixtures::{ADMIN_CQ, ADMIN_ENTRIES, DATA, MEMORY, QUEUE_PAIRS, TestGuest, UNMAPPED};

const SQ_TAIL: Doorbell = Doorbell::SqTail(QueueId::ADMIN);
const CQ_HEAD: Doorbell = Doorbell::CqHead(QueueId::ADMIN);
const PAGE: u64 = 4096;

fn guest() -> TestGuest {
    TestGuest::with_enabled_controller(DoorbellMode::Shadow)
}

/// Returns an Identify Controller command with the given PRP entries.
fn identify(prp1: u64, prp2: u64) -> Sqe {
    Sqe {
        dptr: [prp1, prp2],
        cdw10: 0x01,
        ..Sqe::new(0x06)
    }
}

fn get_log_page(lid: u32, dwords: u32, prp1: u64, prp2: u64) -> Sqe {
    Sqe {
        dptr: [prp1, prp2],
        cdw10: (dwords - 1) << 16 | lid,
        ..Sqe::new(0x02)
    }
}

fn get_features(fid: u32, dword11: u32) -> Sqe {
    Sqe {
        dptr: [DATA, 0],
        cdw10: fid,
        cdw11: dword11,
        ..Sqe::new(0x0A)
    }
}

fn set_features(fid: u32, dword11: u32) -> Sqe {
    Sqe {
        dptr: [DATA, 0],
        cdw10: fid,
        cdw11: dword11,
        ..Sqe::new(0x09)
    }
}

fn async_event_request() -> Sqe {
    Sqe::new(0x0C)
}

#[track_caller]
fn assert_ok(cqe: Cqe) {
    assert_eq!(cqe.status(), Status::SUCCESS);
}

/// Asserts a failed command with Do Not Retry.
#[track_caller]
fn assert_fails(cqe: Cqe, status: Status) {
    assert_eq!(cqe.status(), status.with_dnr(true));
}

#[test]
fn a_command_completes_in_its_place() {
    let mut guest = guest();
    let cid = guest.submit(identify(DATA, 0));
    let cqe = guest.completion();
    assert_eq!(
        (cqe.cid(), cqe.sqid(), cqe.sqhd()),
        (cid, QueueId::ADMIN, 1)
    );
    assert_eq!((cqe.dw0(), cqe.dw1(), cqe.phase()), (0, 0, true));
    assert_ok(cqe);
    assert_eq!(guest.interrupt.read().expect("an interrupt"), 1);
    assert_eq!(guest.read_memory(DATA, 4), [0x50, 0x4D, 0x50, 0x4D]);
    assert_eq!(guest.function.admin_stats().commands, 1);
}

#[test]
fn a_batch_is_one_interrupt() {
    let mut guest = guest();
    for _ in 0..3 {
        guest.enqueue(get_features(0x07, 0));
    }
    guest.ring();
    assert_eq!(guest.interrupt.read().expect("an interrupt"), 1);
    for _ in 0..3 {
        assert_ok(guest.completion());
    }
    guest.function.process_events();
    assert!(
        guest.interrupt.read().is_err(),
        "no interrupt without a completion"
    );
}

#[test]
fn rings_wrap_and_phases_turn() {
    let mut guest = guest();
    for round in 0..5 * ADMIN_ENTRIES {
        let cqe = guest.admin(get_features(0x07, 0));
        assert_eq!(
            cqe.phase(),
            (round / ADMIN_ENTRIES).is_multiple_of(2),
            "round {round}"
        );
        assert_eq!(u32::from(cqe.sqhd()), (round + 1) % ADMIN_ENTRIES);
    }
}

#[test]
fn a_full_completion_queue_is_not_overwritten() {
    let mut guest = guest();
    for _ in 0..3 {
        guest.submit(get_features(0x07, 0));
    }
    let full = guest.read_memory(ADMIN_CQ, 64);
    // The completion queue is full, so the controller does not even fetch these commands.
    let waiting = [
        guest.enqueue(identify(DATA, 0)),
        guest.enqueue(get_features(0x07, 0)),
    ];
    guest.ring();
    assert_eq!(guest.read_memory(ADMIN_CQ, 64), full);
    assert_eq!(guest.read_memory(DATA, 4), [0; 4]);
    for _ in 0..3 {
        guest.peek().expect("a completion");
    }
    guest.consume();
    for cid in waiting {
        assert_eq!(guest.completion().cid(), cid);
    }
}

#[test]
fn unknown_opcodes_are_invalid_and_logged() {
    let mut guest = guest();
    for opcode in [
        0x03, 0x0D, 0x10, 0x11, 0x14, 0x18, 0x80, 0x81, 0x84, 0xC0, 0xFF,
    ] {
        assert_fails(guest.admin(Sqe::new(opcode)), Status::INVALID_OPCODE);
    }
    assert_ok(guest.admin(get_log_page(1, 1024, DATA, 0)));
    let entry = guest.read_memory(DATA, 16);
    assert_eq!(entry[..12], [11, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x0A, 0x01]);
    assert_eq!(
        entry[12..16],
        [0x02, 0x80, 0xFF, 0xFF],
        "Invalid Opcode, do not retry"
    );
}

#[test]
fn data_lies_where_the_prp_entries_say() {
    let mut guest = guest();
    // The data begins in the middle of a page, and continues in a page at a lower address.
    guest.write_memory(DATA, &[0xEE; 3 * PAGE as usize]);
    assert_ok(guest.admin(identify(DATA + PAGE + 0x800, DATA)));
    let first = guest.read_memory(DATA + PAGE + 0x800, 0x800);
    let second = guest.read_memory(DATA, 0x800);
    let whole = [first, second].concat();
    assert_eq!(whole[..4], [0x50, 0x4D, 0x50, 0x4D]);
    assert_eq!(whole[2048..], vec![0; 2048], "power states");
    assert_eq!(
        guest.read_memory(DATA + 0x800, 0x1000),
        vec![0xEE; 0x1000],
        "and nowhere else"
    );
    assert_eq!(
        guest.read_memory(DATA + 2 * PAGE, 0x1000),
        vec![0xEE; 0x1000]
    );
}

#[test]
fn a_prp_list_is_followed_as_far_as_the_data_goes() {
    let mut guest = guest();
    // Reads 16 KiB of a log page of 4 KiB into the middle of a page. PRP2 is a list, whose first entry is needed and whose
    // other entries are invalid.
    let list = DATA + 0x8000;
    for (index, entry) in [DATA + 2 * PAGE, UNMAPPED, UNMAPPED, UNMAPPED]
        .into_iter()
        .enumerate()
    {
        guest.write_memory(list + 8 * index as u64, &entry.to_le_bytes());
    }
    assert_ok(guest.admin(get_log_page(5, 4096, DATA + 0x400, list)));
    assert_eq!(
        guest.read_memory(DATA + 0x400, 4),
        [1, 0, 0, 0],
        "Delete I/O SQ is supported"
    );
    assert_eq!(
        guest.read_memory(DATA + 0x800, 4),
        [1, 0, 0, 0],
        "Flush is supported"
    );
    // The list begins with the last entry of a page, which points to the next page of the list.
    let end_of_page = DATA + 0x9FF8;
    guest.write_memory(end_of_page, &(DATA + 0xA000).to_le_bytes());
    guest.write_memory(DATA + 0xA000, &(DATA + 3 * PAGE).to_le_bytes());
    assert_ok(guest.admin(get_log_page(5, 4096, DATA + 0xF00, end_of_page)));
    assert_eq!(
        guest.read_memory(DATA + 3 * PAGE + 0x300, 4),
        [1, 0, 0, 0],
        "Flush again"
    );
}

#[test]
fn hostile_prp_entries_fail_the_command_only() {
    let mut guest = guest();
    let list = DATA + 0x8000;
    let chain = DATA + 0x9FF8;
    guest.write_memory(list, &(DATA + 1).to_le_bytes());
    guest.write_memory(chain, &chain.to_le_bytes());
    let (offset, transfer) = (Status::PRP_OFFSET_INVALID, Status::DATA_TRANSFER_ERROR);
    for (sqe, status) in [
        (identify(DATA + 2, 0), offset),
        (identify(DATA + 0x800, DATA + 0x10), offset),
        (identify(UNMAPPED, 0), transfer),
        (identify(DATA + 0x800, UNMAPPED), transfer),
        (identify(MEMORY.end - 0x800, MEMORY.end), transfer),
        (identify(u64::MAX - 3, 0), transfer),
        (identify(!0xFFF, 0), transfer),
        (get_log_page(5, 4096, DATA + 0x800, UNMAPPED), transfer),
        (get_log_page(5, 4096, DATA + 0x800, list + 4), offset),
        (get_log_page(5, 4096, DATA + 0x800, list), offset),
        // The list's last entry points to the list itself.
        (get_log_page(5, 4096, DATA + 0x800, chain), offset),
        (
            Sqe {
                dptr: [UNMAPPED, 0],
                ..set_features(0x0E, 0)
            },
            transfer,
        ),
    ] {
        assert_fails(guest.admin(sqe), status);
    }
    assert_eq!(guest.csts(), 1);
    assert_ok(guest.admin(identify(DATA, 0)));
}

#[test]
fn an_invalid_doorbell_value_is_reported_once() {
    let mut guest = guest();
    guest.submit(async_event_request());
    for _ in 0..3 {
        guest.doorbell(SQ_TAIL, ADMIN_ENTRIES);
        guest.function.process_events();
    }
    let cqe = guest.completion();
    assert_eq!((cqe.cid(), cqe.dw0()), (CommandId(0x100), 0x0001_0100));
    // A further event of this type waits until the guest reads the log page.
    guest.submit(async_event_request());
    guest.doorbell(SQ_TAIL, u32::MAX);
    guest.function.process_events();
    assert!(guest.peek().is_none());
    let cqe = guest.admin(get_log_page(1, 1024, DATA, 0));
    assert_ok(cqe);
    assert_eq!(
        guest.completion().dw0(),
        0x0001_0100,
        "the event that waited"
    );
}

#[test]
fn a_cq_head_beyond_posted_entries_frees_no_slots() {
    let mut guest = guest();
    guest.submit(async_event_request());
    guest.doorbell(CQ_HEAD, 1);
    guest.function.process_events();
    assert_eq!(guest.completion().dw0(), 0x0001_0100);
    assert_ok(guest.admin(identify(DATA, 0)));
}

#[test]
fn a_doorbell_without_a_queue_is_reported() {
    let mut guest = guest();
    for doorbell in [
        Doorbell::SqTail(QueueId(1)),
        Doorbell::CqHead(QueueId(QUEUE_PAIRS)),
        Doorbell::SqTail(QueueId(QUEUE_PAIRS + 1)),
        Doorbell::CqHead(QueueId(60)),
    ] {
        guest.submit(async_event_request());
        guest.doorbell(doorbell, 1);
        guest.function.process_events();
        assert_eq!(guest.completion().dw0(), 0x0001_0000, "{doorbell:?}");
        assert_ok(guest.admin(get_log_page(1, 1024, DATA, 0)));
    }
    // The offset is not one at which a doorbell begins.
    guest.submit(async_event_request());
    guest.write_register(0x1002, 1);
    guest.function.process_events();
    assert_eq!(guest.completion().dw0(), 0x0001_0000);
}

#[test]
fn reading_a_log_page_with_rae_keeps_its_events_masked() {
    let mut guest = guest();
    guest.submit(async_event_request());
    guest.doorbell(Doorbell::SqTail(QueueId(1)), 1);
    guest.function.process_events();
    assert_eq!(guest.completion().dw0(), 0x0001_0000);
    guest.submit(async_event_request());
    guest.doorbell(Doorbell::SqTail(QueueId(1)), 1);
    let mut retain = get_log_page(1, 1024, DATA, 0);
    retain.cdw10 |= 1 << 15;
    assert_ok(guest.admin(retain));
    assert!(guest.peek().is_none());
    assert_ok(guest.admin(get_log_page(1, 1024, DATA, 0)));
    assert_eq!(guest.completion().dw0(), 0x0001_0000);
}

#[test]
fn event_requests_beyond_aerl_are_refused_and_one_can_be_aborted() {
    let mut guest = guest();
    let cids = [0; 4].map(|_| guest.submit(async_event_request()));
    assert!(guest.peek().is_none());
    assert_fails(
        guest.admin(async_event_request()),
        Status::ASYNC_EVENT_LIMIT_EXCEEDED,
    );

    let abort = Sqe {
        cdw10: u32::from(cids[2].0) << 16,
        ..Sqe::new(0x08)
    };
    let aborting = guest.submit(abort);
    let aborted = guest.completion();
    assert_eq!(
        (aborted.cid(), aborted.status()),
        (cids[2], Status::ABORT_REQUESTED)
    );
    let done = guest.completion();
    assert_eq!(
        (done.cid(), done.status(), done.dw0()),
        (aborting, Status::SUCCESS, 0)
    );
    assert_eq!(
        guest.admin(abort).dw0(),
        1,
        "there is nothing to abort any more"
    );
    assert_eq!(guest.function.admin_stats().aborts, 2);
    let of_io_queue = Sqe {
        cdw10: 0x0001_0001,
        ..Sqe::new(0x08)
    };
    assert_eq!(guest.admin(of_io_queue).dw0(), 1);
}

#[test]
fn an_abort_with_room_for_one_completion_waits_for_the_other() {
    let mut guest = guest();
    let cid = guest.submit(async_event_request());
    for _ in 0..2 {
        guest.submit(get_features(0x07, 0));
    }
    guest.submit(Sqe {
        cdw10: u32::from(cid.0) << 16,
        ..Sqe::new(0x08)
    });
    for _ in 0..2 {
        assert_ok(guest.peek().expect("a completion"));
    }
    assert_eq!(guest.peek().map(|cqe| cqe.cid()), Some(cid));
    assert!(guest.peek().is_none(), "the queue is full");
    guest.consume();
    assert_eq!(guest.completion().dw0(), 0);
}

#[test]
fn features_transfer_their_data() {
    let mut guest = guest();
    guest.write_memory(DATA, &[1, 0, 0, 0, 0, 1, 0, 0]);
    assert_ok(guest.admin(set_features(0x0E, 0)));
    guest.write_memory(DATA, &[0; 8]);
    assert_ok(guest.admin(get_features(0x0E, 0)));
    let timestamp = guest.read_memory(DATA, 8);
    assert_eq!(timestamp[4..8], [0, 1, 0b10, 0]);
    assert_ok(guest.admin(Sqe {
        nsid: Nsid(1),
        ..get_features(0x03, 0)
    }));
    assert_eq!(
        guest.read_memory(DATA + 24, 8),
        0x1_FFFF_u64.to_le_bytes(),
        "64 MiB, zero-based"
    );
    let save = Sqe {
        cdw10: 0x8000_0001,
        ..set_features(0x01, 0)
    };
    assert_fails(guest.admin(save), Status::FEATURE_NOT_SAVEABLE);
}

#[test]
fn a_command_without_data_has_no_data_pointer() {
    let mut guest = guest();
    let sqe = Sqe {
        dptr: [u64::MAX, u64::MAX],
        ..get_features(0x07, 0)
    };
    assert_ok(guest.admin(sqe));
    let sqe = Sqe {
        dptr: [UNMAPPED + 1, 0],
        ..set_features(0x01, 0)
    };
    assert_ok(guest.admin(sqe));
}

#[test]
fn a_temperature_threshold_that_is_crossed_is_an_event() {
    let mut guest = guest();
    guest.submit(async_event_request());
    assert_ok(guest.admin(set_features(0x04, 300)));
    assert!(guest.peek().is_none(), "nobody wants to know");
    // The event reports a condition that existed before the guest enabled the event.
    assert_ok(guest.admin(set_features(0x0B, 0x02)));
    assert_eq!(guest.completion().dw0(), 0x0002_0101);
    assert_ok(guest.admin(get_log_page(2, 128, DATA, 0)));
    assert_eq!(guest.read_memory(DATA, 1), [0x02], "Critical Warning");
}

#[test]
fn a_doorbell_buffer_is_two_pages_of_memory() {
    let mut guest = guest();
    let config = |prp1, prp2| Sqe {
        dptr: [prp1, prp2],
        ..Sqe::new(0x7C)
    };
    for (prp1, prp2) in [
        (DATA + 4, DATA + PAGE),
        (DATA, DATA + PAGE + 0x800),
        (UNMAPPED, DATA),
        (DATA, UNMAPPED),
        (0, 0),
    ] {
        assert_fails(guest.admin(config(prp1, prp2)), Status::INVALID_FIELD);
    }
    assert_ok(guest.admin(config(DATA, DATA + PAGE)));
    // The admin queue still uses its registers, and the Doorbell Buffer is initialised from them.
    let tail = guest.read_memory(DATA, 4);
    assert_ok(guest.admin(identify(DATA + 2 * PAGE, 0)));
    assert_eq!(guest.read_memory(DATA, 4), tail);
    assert_eq!(guest.read_memory(DATA + 4, 4), [0; 4]);
}

#[test]
fn a_doorbell_buffer_is_for_some_modes() {
    for mode in [DoorbellMode::Trap, DoorbellMode::Mapped] {
        let mut guest = TestGuest::with_enabled_controller(mode);
        let config = Sqe {
            dptr: [DATA, DATA + PAGE],
            ..Sqe::new(0x7C)
        };
        assert_fails(guest.admin(config), Status::INVALID_OPCODE);
        assert_ok(guest.admin(identify(DATA, 0)));
        assert_eq!(guest.read_memory(DATA + 256, 2), [0, 0], "OACS");
    }
    for mode in [DoorbellMode::Auto, DoorbellMode::Shadow] {
        let mut guest = TestGuest::with_enabled_controller(mode);
        assert_ok(guest.admin(identify(DATA, 0)));
        assert_eq!(guest.read_memory(DATA + 256, 2), [0, 1], "OACS");
    }
}

#[test]
fn a_command_with_an_sgl_is_refused() {
    let mut guest = guest();
    let mut sqe = identify(DATA, 0);
    sqe.cdw0 = Cdw0(sqe.cdw0.0 | 1 << 14);
    assert_fails(guest.admin(sqe), Status::INVALID_FIELD);
}

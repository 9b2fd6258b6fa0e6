//! Reads and writes: alignment, partial blocks, the end of the file.

use super::*;

#[test]
fn memory_at_any_alignment_goes_the_same_way() {
    let (mut drive, ring, _) = Drive::fake();
    let fd = drive.lease.data_fd();
    for at in [0, 512, 4, 1023] {
        for opcode in [NvmOpcode::WRITE, NvmOpcode::READ] {
            drive.ring(&[drive.transfer(opcode, 1, 16, 8, at)]);
            let given = ring.succeed();
            assert_eq!(
                (given.fd, given.offset, given.len),
                (fd, 8192, 4096),
                "{at}"
            );
            assert_eq!(drive.reap(), [(1, Status::SUCCESS)]);
        }
    }
    // A write of a partial block first reads whole blocks, and then writes them.
    drive.ring(&[drive.transfer(NvmOpcode::WRITE, 1, 6, 4, 0)]);
    let given = ring.succeed();
    assert_eq!(
        (given.what, given.offset, given.len),
        (KernelRequestKind::Read, 0, 8192)
    );
    assert!(drive.reap().is_empty());
    let given = ring.succeed();
    assert_eq!(
        (given.what, given.fd, given.offset, given.len),
        (KernelRequestKind::Write, fd, 0, 8192)
    );
    assert_eq!(drive.reap(), [(1, Status::SUCCESS)]);
}

#[test]
fn a_device_begins_with_the_first_commands_of_a_batch() {
    let (mut drive, ring, _) = Drive::fake();
    // Seven of the commands are short. The long command among the first four does not count.
    let mut reads: Vec<Sqe> = (1..SLOTS)
        .map(|slot| drive.transfer(NvmOpcode::READ, slot, u64::from(slot) * 8, 8, 0))
        .collect();
    let mut long = drive.transfer(NvmOpcode::READ, 0, 128, 40, 0);
    let (list, iova) = drive.lists.slot_list(0);
    let page = iova.bits();
    list.as_mut_bytes()[..32].copy_from_slice([page; 4].as_bytes());
    long.dptr = [page, page];
    reads.insert(2, long);
    drive.ring(&reads);
    assert_eq!(ring.0.borrow().calls, [5, 3]);
}

#[test]
fn partial_and_whole_block_writes_wait_for_each_other() {
    let (mut drive, ring, clock) = Drive::fake();
    let block = drive.transfer(NvmOpcode::WRITE, 0, 0, 8, 0);
    let part = drive.transfer(NvmOpcode::WRITE, 1, 2, 2, 0);
    let again = drive.transfer(NvmOpcode::WRITE, 2, 0, 8, 0);
    drive.ring(&[block, part, again]);
    let given = ring.succeed();
    assert_eq!((given.tag, given.what), (0, KernelRequestKind::Write));
    // A sleeping poller wakes up in time to retry waiting commands.
    let due = drive.queue.next_due().expect("two wait");
    assert!(due.0 <= clock.now() + ticks_in(Duration::from_millis(1)));
    assert_eq!(drive.reap(), [(0, Status::SUCCESS)]);
    let given = ring.succeed();
    assert_eq!(
        (given.tag, given.what, given.len),
        (1, KernelRequestKind::Read, UNIT)
    );
    assert!(drive.reap().is_empty());
    let given = ring.succeed();
    assert_eq!(
        (given.tag, given.what, given.len),
        (1, KernelRequestKind::Write, UNIT)
    );
    assert_eq!(drive.reap(), [(1, Status::SUCCESS)]);
    drive.reap();
    let given = ring.succeed();
    assert_eq!((given.tag, given.what), (2, KernelRequestKind::Write));
    assert_eq!(drive.reap(), [(2, Status::SUCCESS)]);
    assert_eq!(drive.queue.next_due(), None);
}

#[test]
fn the_kernel_is_asked_for_nothing_behind_the_end_of_a_file_that_was_cut_short() {
    let (mut drive, ring, _) = Drive::fake();
    drive.file.as_file().set_len(8192).expect("shorter");
    let part = drive.transfer(NvmOpcode::WRITE, 1, 14, 4, 0);
    let refused = [
        drive.transfer(NvmOpcode::WRITE, 0, 8, 16, 0),
        part,
        drive.transfer(NvmOpcode::WRITE_ZEROES, 2, 8, 16, 0),
    ];
    drive.ring(&refused);
    let fault = Status::WRITE_FAULT;
    assert_eq!(drive.reap(), [(0, fault), (1, fault), (2, fault)]);
    assert_eq!(ring.pending_requests(), []);
    // Deallocation is advice, so it succeeds although the ranges have no whole block to deallocate.
    for (slba, blocks) in [(8, 16), (18, 16), (20, 2)] {
        let command = drive.deallocate(3, slba, blocks);
        drive.ring(&[command]);
        assert_eq!(drive.reap(), [(3, Status::SUCCESS)]);
        assert_eq!(ring.pending_requests(), []);
    }
    assert!(!drive.store.shared.slice_scheduler.is_taken());
    drive.ring(&[drive.transfer(NvmOpcode::READ, 0, 8, 16, 0)]);
    assert_eq!(drive.reap(), [(0, Status::UNRECOVERED_READ_ERROR)]);
    drive.ring(&[drive.transfer(NvmOpcode::WRITE, 0, 8, 8, 0)]);
    assert_eq!(ring.succeed().offset, 4096);
    assert_eq!(drive.reap(), [(0, Status::SUCCESS)]);
}

/// Regression test for a guest that hung. It wrote pieces of 1 KiB to a sparse file, followed by a write of 8 KiB (14 KiB in
/// the guest) in two parts, which starts in the block of the last piece. Further writes of this kind are in flight, and the
/// thread sleeps between its passes.
#[test]
fn parts_of_blocks_in_a_sparse_file_all_complete() {
    let ring = Uring::new(SLOTS.into()).expect("io_uring");
    let mut drive = Drive::new(ring, TestClock::default());
    for round in 0..200_u64 {
        let base = round % 60 * 32;
        let mut commands = Vec::new();
        for (slot, (block, blocks)) in [(0, 2), (2, 2), (4, 2), (6, 16), (22, 2), (24, 8), (30, 2)]
            .into_iter()
            .enumerate()
        {
            let slot = slot as u16;
            let (list, _) = drive.lists.slot_list(slot);
            list.fill(round << 8 | u64::from(slot));
            // The slot's list starts within a block, so the data has two parts.
            let at = if blocks == 16 { 0 } else { 512 };
            commands.push(drive.transfer(NvmOpcode::WRITE, slot, base + block, blocks, at));
        }
        drive.ring(&commands);
        let mut done = Vec::new();
        while done.len() < commands.len() {
            wait(drive.queue.ring.fd());
            done.extend(drive.reap());
        }
        assert!(
            done.iter().all(|(_, status)| status.is_success()),
            "{done:?}"
        );
        let mut found = vec![0; 32 * 512];
        drive
            .file
            .as_file()
            .read_exact_at(&mut found, base * 512)
            .expect("read");
        for (slot, blocks) in [(0, 0..2), (1, 2..4), (2, 4..6), (3, 6..22), (4, 22..24)] {
            let word = (round << 8 | slot).to_le_bytes();
            let bytes = &found[blocks.start * 512..blocks.end * 512];
            assert!(
                bytes.chunks(8).all(|chunk| chunk == word),
                "round {round}, slot {slot}"
            );
        }
    }
}

/// Sleeps until a descriptor is readable, or for a few milliseconds, since commands may wait for their turn without a request.
fn wait(fd: RawFd) {
    use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
    let epoll = Epoll::new().expect("epoll");
    let event = EpollEvent::new(EventSet::IN, 0);
    epoll
        .ctl(ControlOperation::Add, fd, event)
        .expect("watched");
    let _ = epoll.wait(2, &mut [EpollEvent::default()]);
}

/// Four Copies have all large buffers, and wait for a block. A fifth Copy waits for a buffer.
#[test]
fn a_command_gets_the_memory_of_one_that_failed_without_a_request() {
    let (mut drive, ring, _) = Drive::fake();
    let shared = drive.store.shared.clone();
    let lease = drive.lease.clone();
    let claims = &lease.claims;
    let lane = claims.open_lane();
    let partial = BlockChange {
        start: 1 << 20,
        end: (1 << 20) + UNIT,
        is_partial: true,
    };
    let (claim, begins) = claims.enter(&lane, partial);
    assert!(begins);
    let copies: Vec<Sqe> = (0..5).map(|slot| drive.copy(slot, 0, 8, 2048)).collect();
    drive.ring(&copies);
    for given in ring.pending_requests() {
        ring.0.borrow_mut().end(given, Ok(given.len as usize));
    }
    assert!(drive.reap().is_empty());
    assert_eq!(
        ring.pending_requests(),
        [],
        "four wait for the block, one for memory"
    );
    drive.file.as_file().set_len(1 << 20).expect("shorter");
    shared.check_size();
    claims.leave(&lane, claim);
    let fault = Status::WRITE_FAULT;
    let failed: Vec<_> = (0..4).map(|slot| (slot, fault)).collect();
    assert_eq!(drive.reap(), failed);
    assert_eq!(
        ring.succeed().what,
        KernelRequestKind::Read,
        "the fifth has begun"
    );
    drive.reap();
}

/// While a partial block is changed, all changes of the lease are listed.
#[test]
fn a_write_waits_for_a_place_in_the_list_of_changes() {
    let (mut drive, ring, _) = Drive::fake();
    let (lease, lane) = (drive.lease.clone(), drive.queue.lane.clone());
    let enter = |partial| {
        let change = BlockChange {
            start: 1 << 20,
            end: (1 << 20) + UNIT,
            is_partial: partial,
        };
        lease.claims.enter(&lane, change).0
    };
    let part = enter(true);
    let others: Vec<BlockChangeClaim> = (1..LISTED_MAX).map(|_| enter(false)).collect();
    let write = drive.transfer(NvmOpcode::WRITE, 0, 0, 8, 0);
    let read = drive.transfer(NvmOpcode::READ, 1, 0, 8, 0);
    drive.ring(&[write, read]);
    assert_eq!(
        ring.succeed().what,
        KernelRequestKind::Read,
        "a read needs no place"
    );
    lease.claims.leave(&lane, part);
    assert_eq!(drive.reap(), [(1, Status::SUCCESS)]);
    assert_eq!(ring.succeed().what, KernelRequestKind::Write);
    assert_eq!(drive.reap(), [(0, Status::SUCCESS)]);
    for claim in others {
        lease.claims.leave(&lane, claim);
    }
}

#[test]
fn one_waiting_command_polls_for_memory() {
    let (mut drive, ring, _) = Drive::fake();
    let verify = |slot| drive.transfer(NvmOpcode::VERIFY, slot, u64::from(slot) * 8, 8, 0);
    let commands: Vec<Sqe> = (0..SLOTS).map(verify).collect();
    drive.ring(&commands);
    let begun = ring.pending_requests().len();
    assert!((1..usize::from(SLOTS) - 1).contains(&begun), "{begun}");
    let end_first = |ring: &FakeRing| {
        let given = ring.pending_requests()[0];
        ring.0.borrow_mut().end(given, Ok(given.len as usize));
    };
    end_first(&ring);
    STARTS.set(0);
    assert_eq!(drive.reap(), [(0, Status::SUCCESS)]);
    assert_eq!(STARTS.get(), 2, "one starts, and one is refused");
    assert_eq!(ring.pending_requests().len(), begun);
    for slot in 1..SLOTS {
        end_first(&ring);
        assert_eq!(drive.reap(), [(slot, Status::SUCCESS)], "in their order");
    }
    assert!(ring.pending_requests().is_empty());
}

#[test]
fn partial_blocks_of_different_leases_are_independent() {
    let (drive, _, _) = Drive::fake();
    let other = drive
        .store
        .open_for_lease("other", BYTES, None)
        .expect("opened");
    let [lane, others] = [&drive.lease, &other].map(|lease| lease.claims.open_lane());
    let change = |partial| BlockChange {
        start: 0,
        end: UNIT,
        is_partial: partial,
    };
    let (part, begins) = drive.lease.claims.enter(&lane, change(true));
    assert!(begins);
    let (whole, begins) = other.claims.enter(&others, change(false));
    assert!(begins && whole == BlockChangeClaim::FastLane);
    other.claims.leave(&others, whole);
    drive.lease.claims.leave(&lane, part);
}

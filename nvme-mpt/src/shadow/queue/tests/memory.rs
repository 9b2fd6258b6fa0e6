//! Memory that is mapped and unmapped while commands are in flight.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nvme_guest::backend::InFlightCommandState;
use nvme_guest::backend::state::sqe_words;
use nvme_guest::dma::{DmaDirection, RegionHint};
use nvme_guest::iova::Iommu;
use nvme_mpt_memory::clock::ticks_in;
use nvme_mpt_memory::{Mapping, MappingAccess};

use super::super::memory::is_suspension_over;
use super::*;

/// Address of the page that the tests map and unmap.
const DATA: Gpa = Gpa(0x10_0000);

#[test]
fn memory_that_was_mapped_before_the_doorbell_was_written_is_there() {
    let mut guest = Guest::new(Arc::new(IovaSpace::software()));
    guest.push(NvmOpcode::READ, 8, [DATA.0, 0]);
    let mut host = Host::default();
    let (window, context, tail) = (guest.window.clone(), guest.context.clone(), guest.tail);
    host.at_batch = Some(Box::new(move || {
        window.map(region(DATA, PAGE)).expect("free");
        context.doorbells.store(Doorbell::SqTail(QUEUE), tail);
    }));
    guest.poll(&mut host);
    // A second poll, since the first one may leave the command to its next pass.
    guest.poll(&mut host);
    assert_eq!(guest.completion(0), None, "it did not fail");
    assert_eq!(host.commands.len(), 1, "the host has it");
    host.complete(0);
    guest.poll(&mut host);
    assert_eq!(guest.completion(0), Some(Status::SUCCESS));
}

#[test]
fn an_unmap_waits_for_commands_that_use_the_region_and_for_no_others() {
    const OTHER: Gpa = Gpa(0x20_0000);
    let mut guest = Guest::new(Arc::new(IovaSpace::software()));
    for gpa in [DATA, OTHER] {
        guest.window.map(region(gpa, 2 * PAGE)).expect("free");
    }
    let mut host = Host::default();
    // Commands with one page, two pages, a PRP list, and a command that uses both regions.
    let list = CQ.0 + PAGE - 8 * 3;
    let entries = [DATA.0 + PAGE, OTHER.0, OTHER.0 + PAGE];
    guest
        .window
        .write(Gpa(list), entries.as_bytes())
        .expect("mapped");
    guest.submit_read([OTHER.0, 0]);
    guest.submit_read([OTHER.0, OTHER.0 + PAGE]);
    guest.push(NvmOpcode::COMPARE, 16, [OTHER.0, DATA.0]);
    guest.push(NvmOpcode::WRITE, 32, [OTHER.0, list]);
    guest.ring();
    guest.poll(&mut host);
    assert_eq!(host.commands.len(), 4);
    let window = guest.window.clone();
    let generation = window.table().generation();
    // A plain thread: a scoped one would be waited for after a failed assertion.
    let unmap = std::thread::spawn(move || window.unmap(DATA, 2 * PAGE));
    let tables = guest.context.tables.clone();
    // The poller adopts the new table while it has commands that use the region.
    while tables.current().generation() == generation && !unmap.is_finished() {
        std::thread::sleep(Duration::from_micros(20));
    }
    guest.poll(&mut host);
    host.complete(3);
    guest.poll(&mut host);
    assert!(!unmap.is_finished(), "a Compare uses the region still");
    assert!(!tables.is_unmap_released(generation + 1), "it is told so");
    host.complete(2);
    guest.poll(&mut host);
    // The other two commands remain in flight.
    assert!(
        tables.is_unmap_released(generation + 1),
        "it waits for commands that use other memory"
    );
    let unmapped = unmap.join().expect("no panic").expect("in time");
    assert_eq!(unmapped, 2 * PAGE);
    assert_eq!(host.commands.len(), 2);
    for _ in 0..2 {
        host.complete(0);
        guest.poll(&mut host);
    }
}

#[test]
fn data_pointers_follow_the_current_memory_map() {
    const OTHER: Gpa = Gpa(0x20_0000);
    let mut guest = Guest::new(Arc::new(IovaSpace::software()));
    let mut host = Host::default();
    let tables = guest.context.tables.clone();
    let replace = |guest: &mut Guest, host: &mut Host, gone: Gpa, come: Gpa| {
        let window = guest.window.clone();
        let generation = window.table().generation();
        std::thread::scope(|scope| {
            let unmap = scope.spawn(|| window.unmap(gone, PAGE));
            while !tables.is_unmap_released(generation + 1) && !unmap.is_finished() {
                guest.poll(host);
            }
            unmap.join().expect("no panic").expect("idle");
        });
        guest.window.map(region(come, PAGE)).expect("free");
    };
    guest.window.map(region(DATA, PAGE)).expect("free");
    for (gpa, completion) in [(DATA, 0), (OTHER, 2), (DATA, 4)] {
        guest.submit_read([gpa.0, 0]);
        guest.poll(&mut host);
        let iova = host.commands[0].dptr[0];
        let table = guest.window.table();
        let translated =
            table.translate(gpa, PAGE, DmaDirection::ToGuest, &mut RegionHint::default());
        assert_eq!(Some(iova), translated.map(|iova| iova.bits()));
        host.complete(0);
        guest.poll(&mut host);
        assert_eq!(guest.completion(completion), Some(Status::SUCCESS));
        let next = if gpa == DATA { OTHER } else { DATA };
        replace(&mut guest, &mut host, gpa, next);
        guest.submit_read([gpa.0, 0]);
        guest.poll(&mut host);
        let status = guest.completion(completion + 1).map(|status| status.code());
        assert_eq!(status, Some(Status::DATA_TRANSFER_ERROR.code()));
    }
}

/// An IOMMU whose map operations block until the test releases them.
#[derive(Debug, Default)]
struct SlowIommu {
    holds: AtomicBool,
    has_map: AtomicBool,
}

impl Iommu for SlowIommu {
    fn map(&self, _: u64, _: &Mapping, _: Range<usize>, _: MappingAccess) -> std::io::Result<()> {
        self.has_map.store(true, Ordering::Release);
        while self.holds.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_micros(20));
        }
        self.has_map.store(false, Ordering::Release);
        Ok(())
    }

    fn unmap(&self, _: u64, _: u64) -> std::io::Result<()> {
        Ok(())
    }

    fn allocate_pages(&self, _: &Mapping, _: Range<usize>) -> std::io::Result<()> {
        Ok(())
    }

    fn mappings_max(&self) -> Option<u64> {
        None
    }
}

#[test]
fn a_ring_that_is_being_mapped_again_is_waited_for() {
    let iommu = Arc::new(SlowIommu::default());
    let usable = [0..=(1 << 39) - 1];
    let space = Arc::new(IovaSpace::with_iommu(iommu.clone(), &usable));
    let mut guest = Guest::new(space);
    let mut host = Host::default();
    let window = guest.window.clone();
    let tables = guest.context.tables.clone();
    let generation = window.table().generation();
    std::thread::scope(|scope| {
        let unmap = scope.spawn(|| window.unmap(SQ, PAGE));
        while !tables.is_unmap_released(generation + 1) && !unmap.is_finished() {
            guest.poll(&mut host);
        }
        unmap.join().expect("no panic").expect("idle");
        iommu.holds.store(true, Ordering::Release);
        let map = scope.spawn(|| window.map(region(SQ, PAGE)));
        while !iommu.has_map.load(Ordering::Acquire) && !map.is_finished() {
            std::thread::sleep(Duration::from_micros(20));
        }
        // The ring has been unmapped for 10 s, which is longer than allowed after the last change of the memory map.
        let since = Ticks(Ticks::now().0 - ticks_in(Duration::from_secs(10)));
        let suspended = ShadowQueueCondition::Suspended { missing: SQ, since };
        guest.queue.core.condition = suspended;
        guest.poll(&mut host);
        let meanwhile = guest.queue.core.condition;
        iommu.holds.store(false, Ordering::Release);
        map.join().expect("no panic").expect("free");
        assert_eq!(meanwhile, suspended, "the map is under way");
    });
    guest.poll(&mut host);
    assert_eq!(
        guest.queue.core.condition,
        ShadowQueueCondition::Operational
    );
}

#[test]
fn a_ring_is_waited_for_while_memory_changes_and_a_second_longer() {
    let start = 1 << 60;
    let at = |milliseconds| Ticks(start + ticks_in(Duration::from_millis(milliseconds)));
    let never = Ticks(0);
    assert!(!is_suspension_over(at(990), at(0), never));
    assert!(is_suspension_over(at(1010), at(0), never));
    // A change of the memory map that is in progress, and a completed one.
    assert!(!is_suspension_over(at(20_000), at(0), at(20_000)));
    assert!(!is_suspension_over(at(20_000), at(0), at(19_010)));
    assert!(is_suspension_over(at(20_000), at(0), at(18_990)));
    assert!(
        is_suspension_over(at(31_000), at(0), at(31_000)),
        "it is not waited for ever"
    );
}

#[test]
fn a_ring_that_may_be_back_is_looked_for_before_its_queue_fails() {
    let mut guest = Guest::new(Arc::new(IovaSpace::software()));
    // The ring has been unmapped for 40 s, which is longer than allowed in total. The poller was preempted after it had checked
    // for a newer table.
    let since = Ticks(Ticks::now().0 - ticks_in(Duration::from_secs(40)));
    let suspended = ShadowQueueCondition::Suspended { missing: SQ, since };
    guest.queue.core.condition = suspended;
    guest.window.map(region(DATA, PAGE)).expect("free");
    guest.queue.core.check_suspension();
    assert_eq!(guest.queue.core.condition, suspended);
    guest.poll(&mut Host::default());
    assert_eq!(
        guest.queue.core.condition,
        ShadowQueueCondition::Operational
    );
}

#[test]
fn commands_that_wait_to_be_carried_out_again_stay_recorded_when_their_ring_is_back() {
    const SLOT: u16 = 3;
    let inflight = Arc::new(InflightFile::new(1).expect("memory"));
    let space = Arc::new(IovaSpace::software());
    let mut guest = Guest::with_inflight(space, Some(inflight.clone()));
    let mut flush = Sqe::new(NvmOpcode::FLUSH.0);
    flush.nsid = Nsid(1);
    // The predecessor ended with the command in flight.
    let mut state = guest.queue.save(&[]);
    state.in_flight.push(InFlightCommandState {
        slot: SLOT,
        sqid: QUEUE.0,
        command: sqe_words(&flush),
    });
    guest.queue.restore(&state);
    let marked = || {
        let queue = inflight.queue(QUEUE).expect("a queue");
        let slots = queue.inflight_slots().into_iter().map(|marked| marked.slot);
        slots.collect::<Vec<_>>()
    };
    assert_eq!(marked(), [SLOT]);
    // The ring is unmapped, and mapped again before the command is submitted to the host.
    let since = Ticks::now();
    guest.queue.core.condition = ShadowQueueCondition::Suspended { missing: SQ, since };
    guest.queue.core.rebind();
    assert_eq!(
        guest.queue.core.condition,
        ShadowQueueCondition::Operational
    );
    assert_eq!(marked(), [SLOT], "the next process finds it");
    let mut host = Host::default();
    guest.poll(&mut host);
    assert_eq!(host.commands.len(), 1, "it is carried out again");
    host.complete(0);
    guest.poll(&mut host);
    assert_eq!(guest.completion(0), Some(Status::SUCCESS));
    assert!(marked().is_empty(), "it is done");
}

//! Memory that comes and goes while commands are in flight.

use super::*;

/// A page that the tests map and unmap.
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
    // Once more, for a poller that leaves the command to its next pass.
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
    // A page; two pages; a list; and one that uses both regions.
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
    std::thread::scope(|scope| {
        let unmap = scope.spawn(|| window.unmap(DATA, 2 * PAGE));
        // The user takes the table up, and has commands that use the region.
        while window.table().generation() == generation && !unmap.is_finished() {
            std::thread::yield_now();
        }
        guest.poll(&mut host);
        host.complete(3);
        guest.poll(&mut host);
        assert!(!unmap.is_finished(), "a Compare uses the region still");
        host.complete(2);
        guest.poll(&mut host);
        // Two others are in flight, and stay there.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while !unmap.is_finished() && std::time::Instant::now() < deadline {
            std::thread::yield_now();
        }
        let waits = !unmap.is_finished();
        for _ in 0..2 {
            host.complete(0);
            guest.poll(&mut host);
        }
        let unmapped = unmap.join().expect("no panic").expect("in time");
        assert_eq!(unmapped, 2 * PAGE);
        assert!(!waits, "it waited for commands that use other memory");
    });
}

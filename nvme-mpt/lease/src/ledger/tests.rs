//! Overlapping, stale and released leases, in two ledgers of one directory, and in memory.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process;

use super::super::lease_entry::LeaseHolderState;
use super::*;

const DRIVE: &str = "file:/drive";

fn request<'a>(id: &'a str, range: &str) -> LeaseRequest<'a> {
    LeaseRequest {
        id,
        drive: DRIVE.into(),
        nsid: Nsid(1),
        wanted: RequestedBytes::Range(range.parse().unwrap()),
        lba_shift: 9,
        blocks: 1 << 30,
        previous_data: PreviousDataPolicy::Kept,
    }
}

fn both() -> (tempfile::TempDir, [Ledger; 2]) {
    let dir = tempfile::tempdir().unwrap();
    let ledgers = [
        Ledger::open(&dir.path().join("state")),
        Ledger::in_process(),
    ];
    (dir, ledgers)
}

fn die(lease: Lease) {
    lease.die();
}

#[test]
fn ranges_that_overlap_are_refused() {
    let (_dir, ledgers) = both();
    for ledger in ledgers {
        let a = ledger.acquire(&request("a", "1G+1G")).unwrap();
        assert_eq!(
            (a.blocks()[0].start.0, a.blocks()[0].blocks),
            (1 << 21, 1 << 21)
        );
        for range in ["1G+1G", "0+1025M", "2047M+1M", "1500M+1M", "0+8G"] {
            let error = ledger.acquire(&request("b", range)).unwrap_err();
            assert!(matches!(error, LeaseError::Overlap { .. }), "{error}");
        }
        let before = ledger.acquire(&request("b", "0+1G")).unwrap();
        let behind = ledger.acquire(&request("c", "2G+1G")).unwrap();
        let ids: Vec<_> = ledger.list().unwrap().into_iter().map(|e| e.id).collect();
        assert_eq!(ids, ["a", "b", "c"]);
        drop((before, behind));

        // Ranges on other namespaces or other drives do not overlap this range.
        let mut other = request("d", "1G+1G");
        other.nsid = Nsid(2);
        let other_namespace = ledger.acquire(&other).unwrap();
        let mut other = request("e", "1G+1G");
        other.drive = "file:/other".into();
        let other_drive = ledger.acquire(&other).unwrap();
        drop((other_namespace, other_drive));

        drop(a);
        assert_eq!(ledger.list().unwrap(), []);
        ledger
            .acquire(&request("b", "1G+1G"))
            .unwrap()
            .release()
            .unwrap();
    }
}

#[test]
fn paths_to_the_same_bytes_overlap() {
    let (_dir, ledgers) = both();
    for ledger in ledgers {
        let partition = |id, range| LeaseRequest {
            drive: "1073741824+4294967296 of file:/drive".into(),
            ..request(id, range)
        };
        let disk = ledger.acquire(&request("a", "1G+1G")).unwrap();
        let error = ledger.acquire(&partition("b", "512M+1G")).unwrap_err();
        assert!(matches!(error, LeaseError::Overlap { .. }), "{error}");
        let neighbour = ledger.acquire(&partition("b", "1G+1G")).unwrap();
        ledger.acquire(&request("c", "2G+1G")).unwrap_err();
        drop((disk, neighbour));
    }
}

#[test]
fn a_drive_behind_a_pci_address_overlaps_its_block_devices() {
    let (_dir, ledgers) = both();
    for ledger in ledgers {
        let drive = |id, nsid, drive: &'static str| LeaseRequest {
            drive: drive.into(),
            nsid: Nsid(nsid),
            ..request(id, "0+1G")
        };
        let physical = |id, nsid| drive(id, nsid, "nvme:nqn.a:s");
        let first = ledger.acquire(&physical("a", 1)).unwrap();
        let second = ledger.acquire(&physical("b", 2)).unwrap();
        for taken in [
            "nvme:nqn.a:s",
            "0+4294967296 of nvme:nqn.a:s",
            "nvme:nqn.a:s/2",
            "4096+4294967296 of nvme:nqn.a:s/2",
        ] {
            let error = ledger.acquire(&drive("c", 1, taken)).unwrap_err();
            assert!(matches!(error, LeaseError::Overlap { .. }), "{error}");
        }
        let third = ledger.acquire(&drive("c", 1, "nvme:nqn.a:s/3")).unwrap();
        ledger.acquire(&physical("d", 3)).unwrap_err();
        drop((first, second, third));
    }
}

#[test]
fn a_lease_is_taken_over_by_any_path_to_its_bytes() {
    let (_dir, [dir, _]) = both();
    let partition = |range| LeaseRequest {
        drive: "1073741824+4294967296 of file:/drive".into(),
        ..request("a", range)
    };
    die(dir.acquire(&request("a", "1G+1G")).unwrap());
    let error = dir.acquire(&partition("0+2G")).unwrap_err();
    assert!(matches!(error, LeaseError::Overlap { .. }), "{error}");
    let lease = dir.acquire(&partition("0+1G")).unwrap();
    assert_eq!(dir.list().unwrap().len(), 1);
    drop(lease);
}

#[test]
fn block_sizes_do_not_hide_an_overlap() {
    let (_dir, ledgers) = both();
    for ledger in ledgers {
        let _small = ledger.acquire(&request("a", "8K+8K")).unwrap();
        let mut large = request("b", "12K+8K");
        large.lba_shift = 12;
        ledger.acquire(&large).unwrap_err();
        large.wanted = RequestedBytes::Range("16K+8K".parse().unwrap());
        ledger.acquire(&large).unwrap();
    }
}

#[test]
fn the_refusal_names_the_other_lease_and_what_to_do() {
    let (dir, [ledger, _]) = both();
    let state = dir.path().join("state");
    let a = ledger.acquire(&request("a", "0+1G")).unwrap();
    assert_eq!(
        ledger
            .acquire(&request("b", "512M+1G"))
            .unwrap_err()
            .to_string(),
        "Range 512M+1G of file:/drive overlaps lease \"a\" (range 0+1G of file:/drive, held by this process); \
         choose ranges that do not overlap"
    );
    assert_eq!(
        ledger
            .acquire(&request("a", "4G+1G"))
            .unwrap_err()
            .to_string(),
        "The id \"a\" is taken by lease \"a\" (range 0+1G of file:/drive, held by this process); choose another id"
    );
    die(a);
    assert_eq!(
        ledger
            .acquire(&request("b", "512M+1G"))
            .unwrap_err()
            .to_string(),
        format!(
            "Range 512M+1G of file:/drive overlaps lease \"a\" (range 0+1G of file:/drive, stale: process {} ended \
             without releasing it); choose a range that does not overlap, or start its holder with the same options, \
             which takes it over; if its data is no longer needed, `nvme-mpt leases release a --state-dir {}` gives \
             it up",
            process::id(),
            state.display()
        )
    );
}

#[test]
fn an_ending_lease_is_refused_and_seen_as_ending_until_it_is_dropped() {
    let (dir, ledgers) = both();
    let state = dir.path().join("state");
    for (ledger, where_to_look) in ledgers.into_iter().zip([
        format!(
            ": `nvme-mpt leases --state-dir {}` shows it until then",
            state.display()
        ),
        String::new(),
    ]) {
        let a = ledger.acquire(&request("a", "0+1G")).unwrap();
        a.mark_ending().unwrap();
        let entry = &ledger.list().unwrap()[0];
        assert_eq!(entry.state, LeaseHolderState::Ending);
        assert_eq!(serde_json::to_value(entry).unwrap()["state"], "ending");
        let ending = format!(
            "lease \"a\" (range 0+1G of file:/drive, ending: commands of process {} are still in flight)",
            process::id()
        );
        for id in ["a", "b"] {
            assert_eq!(
                ledger
                    .acquire(&request(id, "0+1G"))
                    .unwrap_err()
                    .to_string(),
                format!(
                    "Range 0+1G of file:/drive overlaps {ending}; try again once the last of them has \
                     ended{where_to_look}"
                )
            );
        }
        assert_eq!(
            ledger
                .acquire(&request("a", "4G+1G"))
                .unwrap_err()
                .to_string(),
            format!(
                "The id \"a\" is taken by {ending}; choose another id, or try again once the last of them \
                 has ended{where_to_look}"
            )
        );
        ledger.release("a", false).unwrap_err();
        drop(a);
        ledger.acquire(&request("b", "0+1G")).unwrap();
    }
}

#[test]
fn the_reserved_pairs_of_a_lease_are_seen_while_its_holder_lives() {
    let (_dir, ledgers) = both();
    let reserved = |ledger: &Ledger| ledger.list().unwrap()[0].reserved_pairs;
    for ledger in ledgers {
        let lease = ledger.acquire(&request("a", "0+1G")).unwrap();
        assert_eq!(reserved(&ledger), 0);
        lease.note_reserved(3).unwrap();
        assert_eq!(reserved(&ledger), 3);
        lease.mark_ending().unwrap();
        assert_eq!(reserved(&ledger), 3);
    }
    let (_dir, [ledger, _]) = both();
    let lease = ledger.acquire(&request("a", "0+1G")).unwrap();
    lease.note_reserved(3).unwrap();
    die(lease);
    assert_eq!(reserved(&ledger), 0);
}

#[test]
fn reserved_pairs_that_the_ledger_has_already_do_not_open_it() {
    let (dir, [ledger, _]) = both();
    let lease = ledger.acquire(&request("a", "0+1G")).unwrap();
    lease.note_reserved(3).unwrap();
    die(lease);
    let lease = ledger.acquire(&request("a", "0+1G")).unwrap();
    let text = std::fs::read(ledger_file(&dir)).unwrap();
    std::fs::write(ledger_file(&dir), "damaged").unwrap();
    lease.note_reserved(3).unwrap();
    lease.note_reserved(4).unwrap_err();
    std::fs::write(ledger_file(&dir), text).unwrap();
    lease.note_reserved(4).unwrap();
    assert_eq!(ledger.list().unwrap()[0].reserved_pairs, 4);
}

#[test]
fn a_lease_whose_holder_died_while_it_ended_is_stale() {
    let (_dir, [ledger, _]) = both();
    let lease = ledger.acquire(&request("a", "0+1G")).unwrap();
    lease.mark_ending().unwrap();
    die(lease);
    assert_eq!(ledger.list().unwrap()[0].state, LeaseHolderState::Stale);
}

#[test]
fn a_stale_lease_is_taken_over_by_its_own_id_and_range_alone() {
    let (_dir, [ledger, _]) = both();
    die(ledger.acquire(&request("a", "0+1G")).unwrap());
    let [stale] = &ledger.list().unwrap()[..] else {
        panic!("one lease");
    };
    assert_eq!(stale.state, LeaseHolderState::Stale);

    for (id, range) in [
        ("b", "0+1G"),
        ("a", "0+2G"),
        ("a", "4G+1G"),
        ("b", "512M+4K"),
    ] {
        ledger.acquire(&request(id, range)).unwrap_err();
    }
    let mut other_drive = request("a", "0+1G");
    other_drive.drive = "file:/other".into();
    ledger.acquire(&other_drive).unwrap_err();

    let again = ledger.acquire(&request("a", "0+1G")).unwrap();
    let [held] = &ledger.list().unwrap()[..] else {
        panic!("one lease");
    };
    assert_eq!(held.state, LeaseHolderState::Held);
    // A lease whose holder lives cannot be taken over.
    ledger.acquire(&request("a", "0+1G")).unwrap_err();
    drop(again);
    assert_eq!(ledger.list().unwrap(), []);
}

/// Returns the inode number of the ledger's file. Each write replaces the file.
fn file_of(dir: &tempfile::TempDir) -> u64 {
    let file = std::fs::File::open(ledger_file(dir)).unwrap();
    // The old file stays open, so its inode number is not reused.
    let number = file.metadata().unwrap().ino();
    std::mem::forget(file);
    number
}

fn ledger_file(dir: &tempfile::TempDir) -> PathBuf {
    dir.path().join("state/leases.json")
}

/// Changes the ledger's file: replaces this process's id in all leases by `pid`.
fn name_process(dir: &tempfile::TempDir, pid: u32) {
    let text = std::fs::read_to_string(ledger_file(dir)).unwrap();
    let own = format!("\"pid\": {}", process::id());
    assert!(text.contains(&own), "{text}");
    let text = text.replace(&own, &format!("\"pid\": {pid}"));
    std::fs::write(ledger_file(dir), text).unwrap();
}

#[test]
fn an_unchanged_takeover_writes_nothing() {
    let (dir, [ledger, _]) = both();
    let sized = |id| LeaseRequest {
        wanted: RequestedBytes::Size {
            bytes: 3 << 20,
            unit: 1 << 20,
            whole: false,
        },
        ..request(id, "0+1G")
    };
    let requests = [
        request("a", "1G+1G"),
        sized("b"),
        request("c", "4G+1G"),
        sized("d"),
    ];
    let leases = requests.map(|request| ledger.acquire(&request).unwrap());
    leases[2].note_reserved(3).unwrap();
    let extents = leases.each_ref().map(Lease::extents);
    leases.into_iter().for_each(die);
    name_process(&dir, 7);
    let before = file_of(&dir);

    // The next process opens the ledger's files again, and requests the leases in another order.
    let next = Ledger::open(&dir.path().join("state"));
    let again: Vec<_> = requests
        .iter()
        .rev()
        .map(|request| next.acquire(request).unwrap())
        .collect();
    let taken_over: Vec<_> = again.iter().rev().map(Lease::extents).collect();
    assert_eq!(taken_over, extents);
    again[1].note_reserved(3).unwrap();
    assert_eq!(file_of(&dir), before);
    for entry in ledger.list().unwrap() {
        assert_eq!((entry.state, entry.pid), (LeaseHolderState::Held, 7));
    }
    // A lease whose holder lives cannot be taken over.
    for request in &requests {
        ledger.acquire(request).unwrap_err();
    }

    // A single write records the process as the holder of all leases.
    next.record_holder().unwrap();
    let named = file_of(&dir);
    assert_ne!(named, before);
    for entry in ledger.list().unwrap() {
        assert_eq!(
            (entry.state, entry.pid),
            (LeaseHolderState::Held, process::id())
        );
    }
    next.record_holder().unwrap();
    assert_eq!(file_of(&dir), named);

    // The slot of a lease that was taken over is not given to another lease.
    let neighbour = next.acquire(&request("e", "8G+1G")).unwrap();
    drop(again);
    let ids: Vec<_> = ledger.list().unwrap().into_iter().map(|e| e.id).collect();
    assert_eq!(ids, ["e"]);
    drop(neighbour);
}

#[test]
fn a_lease_that_is_taken_over_with_a_change_is_written_at_once() {
    let (dir, [ledger, _]) = both();
    let partition = LeaseRequest {
        drive: "1073741824+4294967296 of file:/drive".into(),
        ..request("a", "0+1G")
    };
    let lease = ledger.acquire(&request("a", "1G+1G")).unwrap();
    // The lease was marked as ending.
    lease.mark_ending().unwrap();
    die(lease);
    let mut before = file_of(&dir);
    die(ledger.acquire(&request("a", "1G+1G")).unwrap());
    assert_ne!(std::mem::replace(&mut before, file_of(&dir)), file_of(&dir));
    assert_eq!(ledger.list().unwrap()[0].state, LeaseHolderState::Stale);
    // The request names the drive by another of its names.
    die(ledger.acquire(&partition).unwrap());
    assert_ne!(std::mem::replace(&mut before, file_of(&dir)), file_of(&dir));
    // The request changes the owner.
    die(ledger
        .acquire_with_claim(LeaseClaim::ForUser(1), &partition)
        .unwrap());
    assert_ne!(std::mem::replace(&mut before, file_of(&dir)), file_of(&dir));
    die(ledger
        .acquire_with_claim(LeaseClaim::ForUser(1), &partition)
        .unwrap());
    assert_eq!(file_of(&dir), before);
    // The lease has fewer reserved queue pairs.
    let lease = ledger.acquire(&partition).unwrap();
    lease.note_reserved(3).unwrap();
    die(lease);
    let lease = ledger.acquire(&partition).unwrap();
    lease.note_reserved(0).unwrap();
    assert_eq!(ledger.list().unwrap()[0].reserved_pairs, 0);
    drop(lease);
}

#[test]
fn a_released_takeover_is_not_recorded_again() {
    let (dir, [ledger, _]) = both();
    die(ledger.acquire(&request("a", "0+1G")).unwrap());
    let again = ledger.acquire(&request("a", "0+1G")).unwrap();
    drop(again);
    let before = file_of(&dir);
    ledger.record_holder().unwrap();
    assert_eq!(file_of(&dir), before);
    assert_eq!(ledger.list().unwrap(), []);
}

#[test]
fn a_handed_over_lease_belongs_to_the_successor() {
    let (dir, [ledger, _]) = both();
    die(ledger.acquire(&request("a", "1G+1G")).unwrap());
    // The lease is taken over, and the ledger still names the predecessor.
    let before = ledger.acquire(&request("a", "1G+1G")).unwrap();
    let next = Ledger::open(&dir.path().join("state"));
    next.acquire(&request("a", "1G+1G")).unwrap_err();
    before.hand_over();
    assert_eq!(next.list().unwrap()[0].state, LeaseHolderState::Stale);
    next.acquire(&request("b", "1G+1G")).unwrap_err();
    let lease = next.acquire(&request("a", "1G+1G")).unwrap();
    // The process that took over the lease neither records itself nor returns the lease.
    let file = file_of(&dir);
    ledger.record_holder().unwrap();
    drop(before);
    assert_eq!(file_of(&dir), file);
    assert_eq!(next.list().unwrap()[0].state, LeaseHolderState::Held);
    lease.release().unwrap();
    assert_eq!(next.list().unwrap(), []);
}

#[test]
fn a_late_holder_record_does_not_overwrite_the_successor() {
    let (dir, [ledger, _]) = both();
    die(ledger.acquire(&request("a", "1G+1G")).unwrap());
    let before = ledger.acquire(&request("a", "1G+1G")).unwrap();
    let LedgerStorage::Directory {
        unrecorded: unnamed,
        ..
    } = &*ledger.0
    else {
        panic!("a ledger in a folder");
    };
    // The thread that records the process as holder has read the set of slots, and waits for the ledger.
    let slots = lock(unnamed).clone();
    assert_eq!(slots.len(), 1);
    before.hand_over();
    let file = file_of(&dir);
    ledger.record_holder_in(&slots, unnamed).unwrap();
    assert_eq!(file_of(&dir), file, "nothing is written");
}

#[test]
fn release_takes_stale_leases_and_refuses_held_ones() {
    let (_dir, [ledger, private]) = both();
    for ledger in [&ledger, &private] {
        let error = ledger.release("a", false).unwrap_err();
        assert!(matches!(error, LeaseError::NoSuchLease { .. }), "{error}");

        let held = ledger.acquire(&request("a", "0+1G")).unwrap();
        let error = ledger.release("a", false).unwrap_err();
        assert!(matches!(error, LeaseError::Held { .. }), "{error}");
        assert!(error.to_string().starts_with(
            "Cannot release lease \"a\" (range 0+1G of file:/drive, held by this process), which is in use: stop"
        ));
        ledger.release("a", true).unwrap();
        assert_eq!(ledger.list().unwrap(), []);

        // The range belongs to another id now, and the old holder's end does not affect it.
        let next = ledger.acquire(&request("a", "0+1G")).unwrap();
        held.release().unwrap();
        assert_eq!(ledger.list().unwrap().len(), 1);
        drop(next);
    }

    die(ledger.acquire(&request("a", "0+1G")).unwrap());
    assert_eq!(
        ledger.release("a", false).unwrap().state,
        LeaseHolderState::Stale
    );
    assert_eq!(ledger.list().unwrap(), []);
}

#[test]
fn listing_creates_no_directory() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let ledger = Ledger::open(&state);
    assert_eq!(ledger.list().unwrap(), []);
    ledger.release("a", false).unwrap_err();
    assert!(!state.exists());
}

#[test]
fn ids_are_short_and_plain() {
    let (_dir, ledgers) = both();
    let longest = "x".repeat(64);
    let too_long = "x".repeat(65);
    for ledger in ledgers {
        for id in ["a", "vm-1.disk_0", &longest] {
            ledger.acquire(&request(id, "0+1G")).unwrap();
        }
        for id in [
            "", " ", "a b", "a,b", "a\"", "a\n", "ä", "a/b", "a:b", "1a", "-a", &too_long,
        ] {
            let error = ledger.acquire(&request(id, "0+1G")).unwrap_err();
            assert!(matches!(error, LeaseError::Id(_)), "{error}");
        }
    }
}

#[test]
fn a_range_beyond_the_drive_is_refused() {
    let (_dir, ledgers) = both();
    for ledger in ledgers {
        for range in ["0+513", "511G+2G"] {
            let error = ledger.acquire(&request("a", range)).unwrap_err();
            assert!(matches!(error, LeaseError::Range(_)), "{error}");
        }
        assert_eq!(ledger.list().unwrap(), []);
    }
}

#[test]
fn names_last_as_long_as_the_drive_does() {
    let dir = tempfile::tempdir().unwrap();
    let names = |ledger: Ledger| ledger.acquire(&request("a", "0+1G")).unwrap().identity();
    assert_eq!(
        names(Ledger::open(dir.path())),
        names(Ledger::open(dir.path()))
    );

    let private = Ledger::in_process();
    assert_eq!(names(private.clone()), names(private.clone()));
    assert_ne!(names(private), names(Ledger::in_process()));
}

/// Requests a range with a policy for data of other ids.
fn with(id: &'static str, range: &str, former_data: PreviousDataPolicy) -> LeaseRequest<'static> {
    LeaseRequest {
        previous_data: former_data,
        ..request(id, range)
    }
}

/// Requests a range without a policy for data of other ids, so that such data refuses the request.
fn strict(id: &'static str, range: &str) -> LeaseRequest<'static> {
    with(id, range, PreviousDataPolicy::Refused)
}

#[test]
fn another_ids_data_blocks_a_range_until_the_operator_decides() {
    let (_dir, ledgers) = both();
    for ledger in ledgers {
        let names = |lease: &Lease| {
            let LeaseIdentity {
                serial,
                nguid,
                eui64,
                uuid,
            } = lease.identity();
            (serial, nguid, eui64, uuid)
        };
        let first = ledger.acquire(&strict("a", "1G+1G")).unwrap();
        let of_first = names(&first);
        drop(first);
        let again = ledger.acquire(&strict("a", "1G+1G")).unwrap();
        assert_eq!(names(&again), of_first);
        drop(again);

        for range in ["1G+1G", "0+1025M", "2047M+1G"] {
            let error = ledger.acquire(&strict("b", range)).unwrap_err();
            let message = error.to_string();
            assert!(matches!(error, LeaseError::OthersData { .. }), "{message}");
            for expected in ["data of lease \"a\" in 1G+1G", "data=keep", "data=wipe"] {
                assert!(message.contains(expected), "{message}");
            }
            // A VMM has no command line of the server.
            assert!(!message.contains("--"), "{message}");
        }
        ledger.acquire(&strict("b", "2G+1G")).unwrap();

        let stored = ledger
            .acquire(&with("b", "1G+1G", PreviousDataPolicy::Kept))
            .unwrap();
        assert!(stored.unwiped().is_empty());
        let of_second = names(&stored);
        assert_ne!(of_second.0, of_first.0);
        assert_ne!(of_second.1, of_first.1);
        assert_ne!(of_second.2, of_first.2);
        assert_ne!(of_second.3, of_first.3);
        drop(stored);
        ledger.acquire(&strict("b", "1G+1G")).unwrap();
        // The data now belongs to `b`, so the first id is refused like any other id.
        ledger.acquire(&strict("a", "1G+1G")).unwrap_err();
    }
}

#[test]
fn data_that_is_given_up_goes_to_the_next_id() {
    let (_dir, ledgers) = both();
    for ledger in ledgers {
        let lease = ledger.acquire(&strict("a", "1G+1G")).unwrap();
        let error = ledger
            .decide_data("b", PreviousDataPolicy::Kept)
            .unwrap_err();
        assert!(matches!(error, LeaseError::NoData { .. }), "{error}");
        let ranges = ledger.decide_data("a", PreviousDataPolicy::Kept).unwrap();
        assert_eq!(ranges, ["1G+1G".parse().unwrap()]);
        // The request is refused until the lease of `a` ends.
        ledger.acquire(&strict("b", "1G+1G")).unwrap_err();
        drop(lease);
        let lease = ledger.acquire(&strict("b", "1G+1G")).unwrap();
        assert!(lease.unwiped().is_empty());
        drop(lease);
        // The decision applied to one lease only.
        ledger.acquire(&strict("a", "1G+1G")).unwrap_err();
        // When the id leases the range again, its data is private again.
        ledger.decide_data("b", PreviousDataPolicy::Kept).unwrap();
        drop(ledger.acquire(&strict("b", "1G+1G")).unwrap());
        ledger.acquire(&strict("a", "1G+1G")).unwrap_err();
    }
}

#[test]
fn a_range_that_is_released_is_wiped_for_the_next_id() {
    let (_dir, ledgers) = both();
    for ledger in ledgers {
        let range = |text: &str| text.parse::<ByteRange>().unwrap();
        drop(ledger.acquire(&strict("a", "1G+1G")).unwrap());
        let ranges = ledger.decide_data("a", PreviousDataPolicy::Wiped).unwrap();
        assert_eq!(ranges, [range("1G+1G")]);
        // When the id leases the range again, it gets its data, which is private again.
        let lease = ledger.acquire(&strict("a", "1G+1G")).unwrap();
        assert!(lease.unwiped().is_empty());
        drop(lease);
        ledger.acquire(&strict("b", "1G+1G")).unwrap_err();

        ledger.decide_data("a", PreviousDataPolicy::Wiped).unwrap();
        let lease = ledger.acquire(&strict("b", "1536M+1G")).unwrap();
        assert_eq!(lease.unwiped(), [range("1536M+512M")]);
        drop(lease);
        // The wipe is incomplete. So each next holder must complete it, even the id that wrote the data.
        for id in ["c", "a", "b"] {
            let lease = ledger.acquire(&strict(id, "1536M+512M")).unwrap();
            assert_eq!(lease.unwiped(), [range("1536M+512M")], "{id}");
        }
        let lease = ledger.acquire(&strict("b", "1536M+512M")).unwrap();
        lease.mark_wiped().unwrap();
        drop(lease);
        let lease = ledger.acquire(&strict("b", "1536M+512M")).unwrap();
        assert!(lease.unwiped().is_empty());
        drop(lease);
        ledger.acquire(&strict("c", "1536M+512M")).unwrap_err();
        // The part that was not leased is still released, and the operator can hand it over without a wipe.
        ledger.decide_data("a", PreviousDataPolicy::Kept).unwrap();
        let lease = ledger.acquire(&strict("c", "1G+512M")).unwrap();
        assert!(lease.unwiped().is_empty());
    }
}

#[test]
fn a_wipe_that_does_not_end_leaves_its_range_marked() {
    let (_dir, ledgers) = both();
    for ledger in ledgers {
        ledger.acquire(&strict("a", "1G+1G")).unwrap();
        ledger.acquire(&strict("b", "3G+1G")).unwrap();
        // Exactly the parts with data of other ids are unwiped.
        let range = |text: &str| text.parse::<ByteRange>().unwrap();
        let parts = [range("1536M+512M"), range("3G+512M")];
        let wide = "1536M+2G";
        let lease = ledger
            .acquire(&with("c", wide, PreviousDataPolicy::Wiped))
            .unwrap();
        assert_eq!(lease.unwiped(), parts);
        // A crash before the wipe has the same effect.
        drop(lease);
        for id in ["a", "b", "c"] {
            let error = ledger.acquire(&strict(id, wide)).unwrap_err();
            assert!(
                error.to_string().contains("not wiped to the end"),
                "{error}"
            );
        }
        let lease = ledger
            .acquire(&with("c", wide, PreviousDataPolicy::Wiped))
            .unwrap();
        assert_eq!(lease.unwiped(), parts);
        lease.mark_wiped().unwrap();
        assert_eq!(lease.unwiped(), parts[1..]);
        drop(lease);
        let lease = ledger
            .acquire(&with("c", wide, PreviousDataPolicy::Wiped))
            .unwrap();
        assert_eq!(lease.unwiped(), parts[1..]);
        lease.mark_wiped().unwrap();
        drop(lease);
        ledger.acquire(&strict("c", wide)).unwrap();
        // Data outside of the lease still belongs to its previous owner.
        ledger.acquire(&strict("a", "1G+512M")).unwrap();
        ledger.acquire(&strict("a", "1G+1G")).unwrap_err();
    }
}

#[test]
fn a_memory_file_passes_names_and_data_owners_to_the_next_process() {
    let file = tempfile::tempfile().unwrap();
    let reopen = || Ledger::from_memory_file(file.try_clone().unwrap()).unwrap();
    let ledger = reopen();
    let sized = LeaseRequest {
        wanted: RequestedBytes::Size {
            bytes: 2 << 30,
            unit: 1 << 30,
            whole: false,
        },
        ..request("sized", "0+1G")
    };
    let a = ledger.acquire(&request("a", "0+1G")).unwrap();
    let b = ledger.acquire(&sized).unwrap();
    let (names, extents) = (a.identity(), b.extents());
    // The process of the holder is killed.
    die(a);
    die(b);

    let next = reopen();
    assert_eq!(next.list().unwrap(), []);
    // The leases are requested in another order.
    let b = next.acquire(&sized).unwrap();
    let a = next.acquire(&request("a", "0+1G")).unwrap();
    assert_eq!((a.identity(), b.extents()), (names, extents));
    assert_eq!(b.unwiped(), []);
    drop(b);
    let other = next
        .acquire(&LeaseRequest {
            previous_data: PreviousDataPolicy::Wiped,
            ..request("other", "2G+1G")
        })
        .unwrap();
    assert_eq!(other.unwiped(), ["2G+1G".parse().unwrap()]);
}

#[test]
fn a_handed_over_ledger_is_not_written() {
    let file = tempfile::tempfile().unwrap();
    let reopen = || Ledger::from_memory_file(file.try_clone().unwrap()).unwrap();
    let before = reopen();
    let removed = before.acquire(&request("removed", "0+1G")).unwrap();
    before.hand_over();
    let next = reopen();
    let lease = next.acquire(&request("a", "1G+1G")).unwrap();
    // The last command of a removed function has ended.
    drop(removed);
    die(lease);
    let error = reopen().acquire(&strict("b", "1G+1G")).unwrap_err();
    assert!(matches!(error, LeaseError::OthersData { .. }), "{error}");
}

#[test]
fn leaving_a_memory_file_reports_leases_still_held() {
    let ledger = Ledger::from_memory_file(tempfile::tempfile().unwrap()).unwrap();
    let handed_over = ledger.acquire(&request("a", "0+1G")).unwrap();
    let in_vmm = ledger.acquire(&request("b", "1G+1G")).unwrap();
    handed_over.hand_over();
    assert!(!ledger.hand_over());
    drop(in_vmm);
    assert!(ledger.hand_over());
}

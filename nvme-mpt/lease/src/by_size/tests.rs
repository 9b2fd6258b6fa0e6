//! Leases by size: allocation, growth, truncation, and refusals.

use nvme_spec::ids::Nsid;

use super::super::{Lease, LeaseRequest, Ledger, RequestedBytes};
use super::*;

const M: u64 = 1 << 20;

/// Number of blocks of the drive: it has 40 whole units, and half a unit at the end.
const BLOCKS: u64 = (40 * M + M / 2) >> 9;

fn request(id: &str, wanted: RequestedBytes) -> LeaseRequest<'_> {
    LeaseRequest {
        id,
        drive: "disk:d".into(),
        nsid: Nsid(1),
        wanted,
        lba_shift: 9,
        blocks: BLOCKS,
        previous_data: PreviousDataPolicy::Refused,
    }
}

/// Requests a lease by size of `units` MiB in units of 1 MiB.
fn size(id: &str, units: u64) -> LeaseRequest<'_> {
    let wanted = RequestedBytes::Size {
        bytes: units * M,
        unit: M,
        whole: false,
    };
    request(id, wanted)
}

/// Requests a lease by size of `units` MiB in a single extent.
fn whole(id: &str, units: u64) -> LeaseRequest<'_> {
    let wanted = RequestedBytes::Size {
        bytes: units * M,
        unit: M,
        whole: true,
    };
    request(id, wanted)
}

/// Requests a lease by size in units of 2 MiB.
fn double(id: &str, units: u64) -> LeaseRequest<'_> {
    let wanted = RequestedBytes::Size {
        bytes: units * 2 * M,
        unit: 2 * M,
        whole: false,
    };
    request(id, wanted)
}

fn at<'a>(id: &'a str, range: &str) -> LeaseRequest<'a> {
    request(id, RequestedBytes::Range(range.parse().unwrap()))
}

/// Requests a range. The lease gets data of other ids as it is.
fn keep<'a>(id: &'a str, range: &str) -> LeaseRequest<'a> {
    LeaseRequest {
        previous_data: PreviousDataPolicy::Kept,
        ..at(id, range)
    }
}

fn ranges(texts: &[&str]) -> Vec<ByteRange> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn temp_ledger() -> (tempfile::TempDir, Ledger) {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(&dir.path().join("state"));
    (dir, ledger)
}

fn both() -> (tempfile::TempDir, [Ledger; 2]) {
    let (dir, ledger) = temp_ledger();
    (dir, [ledger, Ledger::in_process()])
}

fn take(ledger: &Ledger, request: &LeaseRequest<'_>) -> Lease {
    ledger.acquire(request).unwrap()
}

fn refusal(ledger: &Ledger, request: &LeaseRequest<'_>) -> String {
    ledger.acquire(request).unwrap_err().to_string()
}

fn parts(lease: &Lease) -> Vec<ByteRange> {
    lease.extents().parts().to_vec()
}

fn wipe(lease: &Lease) {
    while !lease.unwiped().is_empty() {
        lease.mark_wiped().unwrap();
    }
}

#[test]
fn a_lease_by_size_is_one_extent_if_possible() {
    let (_dir, ledgers) = both();
    for ledger in ledgers {
        let a = take(&ledger, &size("a", 4));
        assert_eq!(parts(&a), ranges(&["0+4M"]));
        assert_eq!((a.unit(), a.unwiped()), (Some(M), Vec::new()));
        assert_eq!(
            a.blocks(),
            [ranges(&["0+4M"])[0].to_blocks(9, BLOCKS).unwrap()]
        );
        let named = take(&ledger, &at("named", "6M+34M"));
        assert_eq!((named.unit(), parts(&named)), (None, ranges(&["6M+34M"])));
        let b = take(&ledger, &size("b", 1));
        assert_eq!(parts(&b), ranges(&["4M+1M"]));
        let entries = ledger.list().unwrap();
        let json = serde_json::to_value(&entries[0]).unwrap();
        assert_eq!(json["range"], json["extents"][0]);
        assert_eq!(json["range"]["length"], 4 * M);
        assert_eq!(entries[0].extents, a.extents());
    }
}

#[test]
fn a_lease_is_made_of_the_largest_free_extents() {
    let (_dir, ledger) = temp_ledger();
    let others = [
        take(&ledger, &at("x", "3M+1M")),
        take(&ledger, &at("y", "9M+1M")),
        take(&ledger, &at("z", "12M+28M")),
    ];
    let a = take(&ledger, &size("a", 7));
    assert_eq!(parts(&a), ranges(&["4M+5M", "10M+2M"]));
    assert_eq!(a.extents().to_string(), "4M+5M and 10M+2M");
    let json = serde_json::to_value(&ledger.list().unwrap()[3]).unwrap();
    assert!(json["range"].is_null());
    assert_eq!(
        refusal(&ledger, &at("b", "10M+1M")),
        "Range 10M+1M of disk:d overlaps lease \"a\" (ranges 4M+5M and 10M+2M of disk:d, held by this process); \
         choose ranges that do not overlap"
    );
    drop(others);
}

#[test]
fn an_id_that_comes_back_has_its_extents_in_their_order() {
    let (_dir, ledgers) = both();
    for ledger in ledgers {
        let a = take(&ledger, &size("a", 2));
        let b = take(&ledger, &size("b", 2));
        assert_eq!(a.grow(5 * M).unwrap(), ranges(&["4M+3M"]));
        assert_eq!(b.grow(4 * M).unwrap(), ranges(&["7M+2M"]));
        assert_eq!(a.grow(7 * M).unwrap(), ranges(&["9M+2M"]));
        assert_eq!(a.grow(7 * M).unwrap(), []);
        let extents = ranges(&["0+2M", "4M+3M", "9M+2M"]);
        assert_eq!(parts(&a), extents);
        assert_eq!(ledger.list().unwrap()[0].extents, a.extents());
        let names = a.identity();
        drop((a, b));
        let again = take(&ledger, &size("a", 7));
        assert_eq!(
            (parts(&again), again.unwiped()),
            (extents.clone(), Vec::new())
        );
        assert_eq!(again.identity(), names);
        drop(again);
        // The lease grows at its end.
        let again = take(&ledger, &size("a", 9));
        assert_eq!(parts(&again), ranges(&["0+2M", "4M+3M", "9M+4M"]));
        assert_eq!(again.identity(), names);
        drop(again);
        // A lease never shrinks without an explicit request.
        let again = take(&ledger, &size("a", 1));
        assert_eq!(parts(&again), ranges(&["0+2M", "4M+3M", "9M+4M"]));
        drop(again);
    }
}

#[test]
fn the_lease_of_a_dead_holder_is_taken_over() {
    let (_dir, ledger) = temp_ledger();
    let a = take(&ledger, &size("a", 2));
    let error = ledger.acquire(&size("a", 2)).unwrap_err();
    assert!(matches!(error, LeaseError::IdTaken { .. }), "{error}");
    a.die();
    let b = take(&ledger, &size("b", 1));
    assert_eq!(parts(&b), ranges(&["2M+1M"]));
    let other_drive_request = LeaseRequest {
        drive: "disk:other".into(),
        ..size("a", 2)
    };
    let error = ledger.acquire(&other_drive_request).unwrap_err();
    assert!(matches!(error, LeaseError::IdTaken { .. }), "{error}");
    let a = take(&ledger, &size("a", 3));
    assert_eq!(parts(&a), ranges(&["0+2M", "3M+1M"]));
    assert_eq!(ledger.list().unwrap().len(), 2);
}

#[test]
fn a_partition_has_the_leases_by_size_of_its_disk() {
    let (_dir, ledger) = temp_ledger();
    let disk = take(&ledger, &size("a", 2));
    let b = take(&ledger, &size("b", 1));
    disk.grow(4 * M).unwrap();
    assert_eq!(parts(&disk), ranges(&["0+2M", "3M+2M"]));
    drop(disk);
    // A drive whose first half is the second half of a disk, and the reverse.
    let turned = |request: LeaseRequest<'static>| LeaseRequest {
        drive: "20971520+20971520 of disk:d and 0+20971520 of disk:d".into(),
        blocks: (40 * M) >> 9,
        ..request
    };
    let a = take(&ledger, &turned(size("a", 5)));
    assert_eq!(parts(&a), ranges(&["20M+2M", "23M+3M"]));
    assert!(a.unwiped().is_empty());
    // The id's data lies before this partition of the drive.
    drop(a);
    let behind = LeaseRequest {
        drive: "1048576+10485760 of disk:d".into(),
        blocks: (10 * M) >> 9,
        ..size("a", 5)
    };
    let message = refusal(&ledger, &behind);
    assert!(message.contains("not all of a lease"), "{message}");
    // In this partition, space that another id leases is not free either.
    let other = LeaseRequest { id: "c", ..behind };
    let c = take(&ledger, &other);
    assert_eq!(parts(&c), ranges(&["5M+5M"]));
    drop(b);
}

#[test]
fn a_range_becomes_a_lease_by_size_and_back() {
    let (_dir, ledgers) = both();
    for ledger in ledgers {
        drop(take(&ledger, &at("a", "5M+2M")));
        let a = take(&ledger, &size("a", 3));
        assert_eq!((parts(&a), a.unwiped()), (ranges(&["5M+3M"]), Vec::new()));
        drop(a);
        let a = take(&ledger, &at("a", "5M+3M"));
        assert!(a.unwiped().is_empty());
        drop(a);
        // The range contains the lease and extends it at its end.
        drop(take(&ledger, &size("a", 3)));
        drop(take(&ledger, &at("a", "5M+4M")));
        assert_eq!(parts(&take(&ledger, &size("a", 4))), ranges(&["5M+4M"]));
    }
}

#[test]
fn a_range_tears_no_lease_by_size_of_its_id() {
    let (_dir, ledgers) = both();
    for ledger in ledgers {
        let a = take(&ledger, &size("a", 1));
        let v = take(&ledger, &size("v", 1));
        a.grow(2 * M).unwrap();
        drop((a, v));
        let remaining = ["0+1M", "2M+1M", "0+512K", "0+40M", "2560K+4M"];
        for range in remaining {
            for policy in [
                PreviousDataPolicy::Refused,
                PreviousDataPolicy::Kept,
                PreviousDataPolicy::Wiped,
            ] {
                let wanted = LeaseRequest {
                    previous_data: policy,
                    ..at("a", range)
                };
                let message = match ledger.acquire(&wanted) {
                    Err(LeaseError::Split { .. }) => refusal(&ledger, &wanted),
                    other => panic!("{range}, {policy:?}: {other:?}"),
                };
                assert!(message.contains("0+1M and 2M+1M on disk:d"), "{message}");
                assert!(message.contains("say size=2M,unit=1M"), "{message}");
            }
        }
        // The id can lease other ranges that do not overlap its lease by size.
        drop(take(&ledger, &at("a", "9M+1M")));
        assert_eq!(
            parts(&take(&ledger, &size("a", 2))),
            ranges(&["0+1M", "2M+1M"])
        );
        // Data that the operator has given up does not make a lease by size of its id.
        ledger.decide_data("a", PreviousDataPolicy::Kept).unwrap();
        drop(take(&ledger, &at("a", "0+1M")));
    }
}

#[test]
fn ranges_of_a_torn_lease_can_be_leased() {
    let (_dir, ledger) = temp_ledger();
    drop(take(&ledger, &size("a", 4)));
    drop(take(&ledger, &keep("b", "1M+1M")));
    let message = refusal(&ledger, &size("a", 4));
    assert!(message.contains("lease each part with range="), "{message}");
    for part in ["0+1M", "2M+2M"] {
        assert!(take(&ledger, &at("a", part)).unwiped().is_empty());
    }
}

#[test]
fn ranges_that_are_no_lease_by_size_are_refused_until_they_are_released() {
    let (_dir, ledger) = temp_ledger();
    let cases: [(&str, &[&str], LeaseRequest<'_>, &str); 4] = [
        (
            "a",
            &["0+1M", "2M+1M"],
            size("a", 2),
            "0+1M and 2M+1M, which lies apart",
        ),
        (
            "b",
            &["5M+1536K"],
            size("b", 2),
            "5M+1536K, which does not begin and end at multiples of the unit 1M; lease it with range=; if",
        ),
        (
            "c",
            &["9M+2M"],
            double("c", 2),
            "9M+2M, which does not begin and end at multiples of the unit 2M; say unit=1M, or lease it with range=; if",
        ),
        (
            "d",
            &["39M+1536K"],
            size("d", 1),
            "39M+1536K, which does not begin",
        ),
    ];
    for (id, leased, wanted, expected) in cases {
        for range in leased {
            drop(take(&ledger, &at(id, range)));
        }
        let message = refusal(&ledger, &wanted);
        assert!(message.contains(expected), "{message}");
        ledger.decide_data(id, PreviousDataPolicy::Wiped).unwrap();
        let lease = take(&ledger, &wanted);
        assert!(lease.unwiped().is_empty(), "{id}: there is clean space");
    }
}

#[test]
fn released_extents_that_do_not_fit_are_replaced() {
    let (_dir, ledger) = temp_ledger();
    let a = take(&ledger, &size("a", 1));
    let b = take(&ledger, &size("b", 1));
    a.grow(2 * M).unwrap();
    drop((a, b));
    let message = refusal(&ledger, &whole("a", 2));
    assert!(
        message.contains("which is more than one extent"),
        "{message}"
    );
    let message = refusal(&ledger, &double("a", 1));
    assert!(message.contains("say unit=1M"), "{message}");
    ledger.decide_data("a", PreviousDataPolicy::Wiped).unwrap();
    // A matching request still returns the id's own extents.
    let a = take(&ledger, &size("a", 2));
    assert_eq!(
        (parts(&a), a.unwiped()),
        (ranges(&["0+1M", "2M+1M"]), Vec::new())
    );
    drop(a);
    ledger.decide_data("a", PreviousDataPolicy::Wiped).unwrap();
    let a = take(&ledger, &whole("a", 2));
    assert_eq!(parts(&a), ranges(&["3M+2M"]));
    drop(a);
    let a = take(&ledger, &size("a", 37));
    assert_eq!(a.extents().length(), 37 * M);
    drop(a);
    let a = take(&ledger, &size("a", 39));
    assert_eq!(a.unwiped(), ranges(&["0+1M", "2M+1M"]));
}

#[test]
fn data_of_others_is_never_taken_before_it_is_released_and_wiped() {
    let (_dir, ledgers) = both();
    for ledger in ledgers {
        drop(take(&ledger, &size("a", 30)));
        drop(take(&ledger, &at("named", "30M+1M")));
        for former_data in [
            PreviousDataPolicy::Refused,
            PreviousDataPolicy::Kept,
            PreviousDataPolicy::Wiped,
        ] {
            let wanted = LeaseRequest {
                previous_data: former_data,
                ..size("b", 10)
            };
            let error = ledger.acquire(&wanted).unwrap_err();
            assert!(matches!(error, LeaseError::NoCapacity { .. }), "{error}");
        }
        ledger
            .decide_data("named", PreviousDataPolicy::Kept)
            .unwrap();
        let b = take(&ledger, &keep_size("b", 10));
        assert_eq!(parts(&b), ranges(&["30M+10M"]));
        assert_eq!(b.unwiped(), ranges(&["30M+1M"]));
        // If the wipe is incomplete, the range stays marked for the id's next lease.
        drop(b);
        let b = take(&ledger, &size("b", 10));
        assert_eq!(b.unwiped(), ranges(&["30M+1M"]));
        wipe(&b);
        drop(b);
        let b = take(&ledger, &size("b", 10));
        assert_eq!(b.unwiped(), []);
        drop(b);

        ledger.decide_data("a", PreviousDataPolicy::Wiped).unwrap();
        let c = take(&ledger, &size("c", 1));
        assert_eq!(
            (parts(&c), c.unwiped()),
            (ranges(&["0+1M"]), ranges(&["0+1M"]))
        );
        // Another id got a part of the id's data, so the id gets a new lease.
        let a = take(&ledger, &size("a", 2));
        assert_eq!(
            (parts(&a), a.unwiped()),
            (ranges(&["1M+2M"]), ranges(&["1M+2M"]))
        );
    }
}

fn keep_size(id: &str, units: u64) -> LeaseRequest<'_> {
    LeaseRequest {
        previous_data: PreviousDataPolicy::Kept,
        ..size(id, units)
    }
}

#[test]
fn a_released_id_that_lost_its_end_gets_new_extents() {
    let (_dir, ledger) = temp_ledger();
    for (id, leased) in [("a", size("a", 4)), ("b", at("b", "20M+4M"))] {
        let end = parts(&take(&ledger, &leased))[0].end();
        ledger.decide_data(id, PreviousDataPolicy::Wiped).unwrap();
        let last = format!("{}+1M", ByteSize(end - M));
        let other = take(&ledger, &at("other", &last));
        assert_eq!(other.unwiped(), ranges(&[&last]));
        // Data that is partly wiped must not be handed over as complete.
        ledger.decide_data(id, PreviousDataPolicy::Kept).unwrap();
        let again = take(&ledger, &size(id, 5));
        let left = ByteRange::new(end - 4 * M, 3 * M).unwrap();
        let is_left = |part: &ByteRange| part.overlaps(&left);
        assert!(!parts(&again).iter().any(is_left), "room that nobody had");
    }
}

#[test]
fn a_release_does_not_cover_truncated_extents() {
    let (_dir, ledger) = temp_ledger();
    drop(take(&ledger, &at("named", "4M+36M")));
    let a = take(&ledger, &size("a", 4));
    a.truncate(2 * M).unwrap();
    drop(a);
    ledger.decide_data("a", PreviousDataPolicy::Wiped).unwrap();
    let b = take(&ledger, &at("b", "2M+1M"));
    assert_eq!(b.unwiped(), ranges(&["2M+1M"]));
    let a = take(&ledger, &size("a", 2));
    assert_eq!((parts(&a), a.unwiped()), (ranges(&["0+2M"]), Vec::new()));
}

#[test]
fn a_lease_that_loses_a_part_by_name_is_refused() {
    let (_dir, ledger) = temp_ledger();
    drop(take(&ledger, &size("a", 4)));
    drop(take(&ledger, &keep("b", "1M+1M")));
    assert_eq!(
        refusal(&ledger, &size("a", 4))
            .split("; lease")
            .next()
            .unwrap(),
        "Lease \"a\" left data on disk:d: 0+1M and 2M+2M, which is not all of a lease: another lease had the other \
         parts since"
    );
    ledger.decide_data("a", PreviousDataPolicy::Wiped).unwrap();
    let a = take(&ledger, &size("a", 4));
    assert_eq!((parts(&a), a.unwiped()), (ranges(&["4M+4M"]), Vec::new()));
    drop(a);
    assert_eq!(parts(&take(&ledger, &size("a", 4))), ranges(&["4M+4M"]));
    // The other id gets the range again without a wipe.
    assert!(take(&ledger, &at("b", "1M+1M")).unwiped().is_empty());
}

#[test]
fn a_wipe_by_name_that_was_cut_short_leaves_free_space() {
    let (_dir, ledger) = temp_ledger();
    drop(take(&ledger, &at("a", "0+40M")));
    let erasing = LeaseRequest {
        previous_data: PreviousDataPolicy::Wiped,
        ..at("b", "1M+2M")
    };
    drop(take(&ledger, &erasing));
    let c = take(&ledger, &size("c", 1));
    assert_eq!(
        (parts(&c), c.unwiped()),
        (ranges(&["1M+1M"]), ranges(&["1M+1M"]))
    );
    drop(c);
    // Ranges of a lease by size that are not wiped yet belong to that lease.
    drop(take(&ledger, &size("d", 1)));
    let error = ledger.acquire(&size("e", 1)).unwrap_err();
    assert!(matches!(error, LeaseError::NoCapacity { .. }), "{error}");
}

#[test]
fn a_lease_that_grows_marks_what_it_has_to_wipe() {
    let (_dir, ledgers) = both();
    for ledger in ledgers {
        drop(take(&ledger, &at("b", "3M+37M")));
        let a = take(&ledger, &size("a", 2));
        ledger.decide_data("b", PreviousDataPolicy::Wiped).unwrap();
        assert_eq!(a.grow(5 * M).unwrap(), ranges(&["2M+3M"]));
        assert_eq!(
            (parts(&a), a.unwiped()),
            (ranges(&["0+5M"]), ranges(&["3M+2M"]))
        );
        assert_eq!(a.grow(6 * M).unwrap(), ranges(&["5M+1M"]));
        assert_eq!(a.unwiped(), ranges(&["3M+2M", "5M+1M"]));
        a.mark_wiped().unwrap();
        assert_eq!(a.unwiped(), ranges(&["5M+1M"]));
        drop(a);
        let a = take(&ledger, &size("a", 6));
        assert_eq!(a.unwiped(), ranges(&["5M+1M"]));
    }
}

#[test]
fn truncated_extents_are_wiped_before_reuse() {
    let (_dir, ledgers) = both();
    for ledger in ledgers {
        drop(take(&ledger, &at("named", "8M+32M")));
        let a = take(&ledger, &size("a", 3));
        let b = take(&ledger, &size("b", 2));
        a.grow(6 * M).unwrap();
        assert_eq!(parts(&a), ranges(&["0+3M", "5M+3M"]));
        assert_eq!(a.truncate(6 * M).unwrap(), []);
        assert_eq!(a.truncate(2 * M).unwrap(), ranges(&["2M+1M", "5M+3M"]));
        assert_eq!(parts(&a), ranges(&["0+2M"]));
        assert_eq!(ledger.list().unwrap()[0].extents, a.extents());
        assert_eq!(a.grow(3 * M).unwrap(), ranges(&["2M+1M"]));
        assert_eq!(a.unwiped(), ranges(&["2M+1M"]));
        // Truncation keeps the marks of unwiped ranges.
        assert_eq!(a.grow(5 * M).unwrap(), ranges(&["5M+2M"]));
        assert_eq!(a.truncate(4 * M).unwrap(), ranges(&["6M+1M"]));
        assert_eq!(a.unwiped(), ranges(&["2M+1M", "5M+1M"]));
        wipe(&a);
        assert_eq!(b.grow(4 * M).unwrap(), ranges(&["6M+2M"]));
        assert_eq!(b.unwiped(), ranges(&["6M+2M"]));
        drop((a, b));
        let a = take(&ledger, &size("a", 4));
        assert_eq!(
            (parts(&a), a.unwiped()),
            (ranges(&["0+3M", "5M+1M"]), Vec::new())
        );
    }
}

#[test]
fn an_impossible_resize_is_refused_without_effect() {
    let (_dir, ledgers) = both();
    for ledger in ledgers {
        let a = take(&ledger, &size("a", 4));
        let named = take(&ledger, &at("named", "10M+1M"));
        let before = ledger.list().unwrap();
        let fixed =
            "Lease \"named\" has the fixed range 10M+1M; only leases by size (size=) change theirs";
        assert_eq!(named.grow(2 * M).unwrap_err().to_string(), fixed);
        assert_eq!(named.truncate(M).unwrap_err().to_string(), fixed);
        assert_eq!(
            a.grow(3 * M).unwrap_err().to_string(),
            "Lease \"a\" has 4M of disk:d, more than 3M: say 4M to keep all of it; `nvme-mpt resize a 3M --truncate` gives the rest up \
             (data at the end is lost)"
        );
        assert_eq!(
            a.truncate(5 * M).unwrap_err().to_string(),
            "Lease \"a\" has 4M of disk:d, less than 5M: use `nvme-mpt resize a 5M` without --truncate to let it grow"
        );
        for change in [Lease::grow, Lease::truncate] {
            assert_eq!(
                change(&a, M + 512).unwrap_err().to_string(),
                "The size 1049088 of a lease by size is not a multiple of its unit 1M: 1M and 2M are"
            );
            assert_eq!(
                change(&a, 0).unwrap_err().to_string(),
                "The size 0 of a lease by size is less than a unit: use size=1M"
            );
        }
        let error = a.grow(40 * M).unwrap_err();
        assert!(
            error.to_string().starts_with(
                "There is no capacity for 36M more on disk:d: it has 35M free in whole units of 1M, the largest \
                 extent 29M; ask for less, or release leases that are no longer needed, which `nvme-mpt leases"
            ),
            "{error}"
        );
        assert_eq!(ledger.list().unwrap(), before);
        assert_eq!(parts(&a), ranges(&["0+4M"]));

        ledger.release("a", true).unwrap();
        for change in [a.grow(5 * M), a.truncate(M)] {
            let error = change.unwrap_err();
            assert!(matches!(error, LeaseError::Gone { .. }), "{error}");
        }
    }
}

#[test]
fn a_contiguous_lease_grows_only_at_its_end() {
    let (_dir, ledger) = temp_ledger();
    let x = take(&ledger, &at("x", "2M+1M"));
    let y = take(&ledger, &at("y", "33M+1M"));
    let a = take(&ledger, &whole("a", 3));
    assert_eq!(parts(&a), ranges(&["34M+3M"]));
    assert_eq!(a.grow(6 * M).unwrap(), ranges(&["37M+3M"]));
    let message = a.grow(7 * M).unwrap_err().to_string();
    assert!(
        message.starts_with("There is no capacity for 1M more on disk:d: it has 32M free")
            && message.contains("which can only grow at its end: ask for less"),
        "{message}"
    );
    let message = refusal(&ledger, &whole("b", 31));
    assert!(
        message.starts_with("There is no capacity for 31M on disk:d: it has 32M free")
            && message.contains("the largest extent 30M; this drive's leases have one extent: ask"),
        "{message}"
    );
    let b = take(&ledger, &size("b", 31));
    assert_eq!(parts(&b), ranges(&["3M+30M", "0+1M"]));
    drop((x, y));
}

#[test]
fn unsuitable_sizes_are_refused() {
    let (_dir, ledgers) = both();
    let wanted = |bytes, unit| RequestedBytes::Size {
        bytes,
        unit,
        whole: false,
    };
    for ledger in ledgers {
        for (bytes, unit, message) in [
            (
                3 * M,
                3 * M,
                "The unit 3M of a lease by size is not a power of two: 2M and 4M are",
            ),
            (
                M,
                0,
                "The unit 0 of a lease by size is not a power of two: 1M is",
            ),
            (
                M,
                M - 1,
                "The unit 1048575 of a lease by size is not a power of two: 1M is",
            ),
            (
                M,
                u64::MAX,
                "The unit 18446744073709551615 of a lease by size is not a power of two: 4194304T and 8388608T are",
            ),
            (
                M,
                M / 2,
                "The unit 512K of a lease by size is too small: the smallest is 1M",
            ),
            (
                64 * M,
                64 * M,
                "The unit 64M of a lease by size is larger than the drive, which has 41472K: choose a smaller \
                 unit",
            ),
            (
                0,
                M,
                "The size 0 of a lease by size is less than a unit: use size=1M",
            ),
            (
                3 * M / 2,
                M,
                "The size 1536K of a lease by size is not a multiple of its unit 1M: 1M and 2M are",
            ),
            (
                2 << 40,
                M,
                "The size 2T of a lease by size is more than 1048576 units of 1M: ask for at most 1T, or choose a \
                 larger unit",
            ),
        ] {
            assert_eq!(
                refusal(&ledger, &request("a", wanted(bytes, unit))),
                message
            );
        }
        let small = LeaseRequest {
            blocks: 100,
            ..size("a", 1)
        };
        assert_eq!(
            refusal(&ledger, &small),
            "The unit 1M of a lease by size is larger than the drive, which has 50K: lease it with range="
        );
        let large_blocks = LeaseRequest {
            lba_shift: 21,
            blocks: 20,
            ..size("a", 1)
        };
        assert_eq!(
            refusal(&ledger, &large_blocks),
            "The unit 1M of a lease by size is not a multiple of the drive's logical block: use unit=2M"
        );
        assert_eq!(ledger.list().unwrap(), []);
    }
}

#[test]
fn a_refusal_suggests_a_fitting_smaller_unit() {
    let (_dir, ledger) = temp_ledger();
    let x = take(&ledger, &at("x", "1M+1M"));
    let y = take(&ledger, &at("y", "4M+36M"));
    let facts = "it has 2M free in whole units of 2M, the largest extent 2M";
    let message = refusal(&ledger, &double("a", 2));
    assert!(message.contains(facts), "{message}");
    assert!(!message.contains("smaller"), "3M are free: {message}");
    drop(y);
    let y = take(&ledger, &at("y", "4M+1M"));
    let z = take(&ledger, &keep("z", "6M+34M"));
    ledger.decide_data("y", PreviousDataPolicy::Wiped).unwrap();
    let message = refusal(&ledger, &double("a", 2));
    assert!(message.contains(facts), "{message}");
    assert!(
        message.contains("ask for less, choose a smaller unit=, or release"),
        "{message}"
    );
    drop((x, y, z));
}

#[test]
fn an_unsynced_ledger_is_used_as_it_is_on_disk() {
    let (_dir, ledger) = temp_ledger();
    let a = take(&ledger, &size("a", 2));
    // A change has replaced the ledger's file and then failed, so the file has a newer state than the lease.
    let ahead = a.ahead();
    ahead.grow(4 * M).unwrap();
    assert_eq!(parts(&a), ranges(&["0+2M"]));
    assert_eq!(a.grow(3 * M).unwrap(), ranges(&["2M+1M"]));
    assert_eq!(ledger.list().unwrap()[0].extents, a.extents());
    ahead.die();
}

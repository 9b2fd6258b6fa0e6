//! The complete model, with a clock in nanoseconds.

use super::*;
use crate::profile::{DriveProfile, SsdProfile};

const LBA_SHIFT: u8 = 9;
/// Number of logical blocks in a page.
const PAGE_BLOCKS: u64 = 8;
const MIB: u64 = 1 << 20;

fn profile() -> SsdProfile {
    match DriveProfile::find_built_in("ssd").expect("comes along") {
        DriveProfile::Ssd(profile) => profile,
        other => panic!("{other:?}"),
    }
}

fn drive(profile: &SsdProfile, bytes: u64) -> SsdModel {
    SsdModel::new(
        profile,
        bytes >> LBA_SHIFT,
        LBA_SHIFT,
        TickUnit::Nanoseconds,
    )
}

fn work(access: MediaAccess, offset: u64, bytes: u64) -> MediaWork {
    MediaWork {
        access,
        slba: offset >> LBA_SHIFT,
        blocks: bytes >> LBA_SHIFT,
    }
}

struct Rng(u64);

impl Rng {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) % limit
    }
}

/// Keeps `depth` commands in flight until `count` commands have completed. Returns the time of the last completion, and the
/// latencies of all commands.
fn run(
    model: &mut SsdModel,
    begin: u64,
    depth: usize,
    count: usize,
    mut next: impl FnMut() -> MediaWork,
) -> (u64, Vec<u64>) {
    let mut flying = std::collections::BinaryHeap::new();
    let (mut now, mut latencies) = (begin, Vec::with_capacity(count));
    for _ in 0..count {
        if flying.len() == depth {
            let std::cmp::Reverse(done) = flying.pop().expect("in flight");
            now = now.max(done);
        }
        model.begin_batch(now);
        let due = model.due_time(&next(), now);
        assert!(due >= now);
        latencies.push(due - now);
        flying.push(std::cmp::Reverse(due));
    }
    let end = flying.into_iter().map(|std::cmp::Reverse(due)| due).max();
    (end.unwrap_or(now), latencies)
}

/// Writes the whole drive sequentially. Returns the time when all data is programmed.
fn fill(model: &mut SsdModel, begin: u64, bytes: u64) -> u64 {
    let mut offset = 0;
    let (end, _) = run(model, begin, 8, (bytes / MIB) as usize, || {
        offset += MIB;
        work(MediaAccess::Write, offset - MIB, MIB)
    });
    model.begin_batch(end);
    model.due_time(&work(MediaAccess::Flush, 0, 0), end)
}

fn mib_per_second(bytes: u64, nanoseconds: u64) -> f64 {
    bytes as f64 / MIB as f64 / nanoseconds as f64 * 1e9
}

#[test]
fn a_read_takes_what_its_parts_take() {
    let profile = profile();
    let mut model = drive(&profile, 64 * MIB);
    let link = TickUnit::Nanoseconds.transfer_ticks(PAGE, profile.link_bandwidth.0);
    // The blocks were never written, so the read accesses no flash.
    let unwritten = model.due_time(&work(MediaAccess::Read, 0, PAGE), 1000) - 1000;
    assert!(
        unwritten.abs_diff(profile.read_overhead.0 + link) <= 1,
        "{unwritten}"
    );
    let now = fill(&mut model, 1_000_000, 64 * MIB);
    model.begin_batch(now);
    let channel = TickUnit::Nanoseconds.transfer_ticks(PAGE, profile.channel_bandwidth.0);
    let expected = profile.read_overhead.0 + profile.read.0 + channel + link;
    let taken = model.due_time(&work(MediaAccess::Read, 8 * MIB, PAGE), now) - now;
    assert!(taken.abs_diff(expected) <= 2, "{taken}, not {expected}");
    // A transfer of less than a page takes less time on the channel.
    let later = now + 1_000_000;
    model.begin_batch(later);
    let taken_for_less = model.due_time(&work(MediaAccess::Read, 8 * MIB, 512), later) - later;
    assert!(taken_for_less < taken && taken_for_less > profile.read.0);
}

#[test]
fn a_write_is_done_when_it_is_buffered_and_a_flush_when_it_is_programmed() {
    let profile = profile();
    let mut model = drive(&profile, 64 * MIB);
    let link = TickUnit::Nanoseconds.transfer_ticks(PAGE, profile.link_bandwidth.0);
    let written = model.due_time(&work(MediaAccess::Write, 0, PAGE), 0);
    assert!(
        written.abs_diff(profile.write_overhead.0 + link) <= 1,
        "{written}"
    );
    let flushed = model.due_time(&work(MediaAccess::Flush, 0, 0), written);
    assert!(flushed >= written + profile.program.0);
    assert_eq!(model.wear().padded_pages, 15);
    // All data is programmed already.
    assert_eq!(
        model.due_time(&work(MediaAccess::Flush, 0, 0), flushed + 1),
        flushed + 1
    );
}

#[test]
fn part_of_a_page_is_written_after_the_rest_is_read() {
    let profile = profile();
    let mut model = drive(&profile, 64 * MIB);
    let now = fill(&mut model, 0, 64 * MIB);
    model.begin_batch(now);
    let whole = model.due_time(&work(MediaAccess::Write, MIB, PAGE), now) - now;
    let later = now + 10_000_000;
    model.begin_batch(later);
    let part = model.due_time(&work(MediaAccess::Write, 2 * MIB + 512, 512), later) - later;
    assert!(
        part >= profile.read.0 && whole < profile.read.0,
        "{part} {whole}"
    );
}

#[test]
fn large_reads_have_the_bandwidth_of_the_link() {
    let profile = profile();
    let mut model = drive(&profile, 256 * MIB);
    let begin = fill(&mut model, 0, 256 * MIB);
    let mut offset = 0;
    let (end, _) = run(&mut model, begin, 32, 4096, || {
        offset = (offset + MIB / 8) % (256 * MIB);
        work(MediaAccess::Read, offset, MIB / 8)
    });
    let achieved = mib_per_second(4096 * MIB / 8, end - begin);
    assert!((3290.0..=3361.0).contains(&achieved), "{achieved}");
}

#[test]
fn a_slow_channel_limits_what_a_fast_link_could() {
    let mut profile = profile();
    profile.channel_bandwidth.0 = 100 * MIB;
    let mut model = drive(&profile, 256 * MIB);
    let begin = fill(&mut model, 0, 256 * MIB);
    let mut offset = 0;
    let (end, _) = run(&mut model, begin, 64, 2048, || {
        offset = (offset + MIB / 8) % (256 * MIB);
        work(MediaAccess::Read, offset, MIB / 8)
    });
    let achieved = mib_per_second(2048 * MIB / 8, end - begin);
    assert!((700.0..=801.0).contains(&achieved), "{achieved}");
}

#[test]
fn more_threads_read_faster_until_the_dies_are_busy() {
    let profile = profile();
    let mut achieved = Vec::new();
    for depth in [1, 4, 16, 64] {
        let mut model = drive(&profile, 256 * MIB);
        let begin = fill(&mut model, 0, 256 * MIB);
        let mut rng = Rng(1);
        let (end, _) = run(&mut model, begin, depth, 4000, || {
            work(MediaAccess::Read, rng.below(16384) << 14, 16 << 10)
        });
        achieved.push(mib_per_second(4000 * 16 / 1024, end - begin));
    }
    assert!(achieved.is_sorted(), "{achieved:?}");
    assert!(
        achieved[1] > 2.0 * achieved[0] && achieved[3] < 4.0 * achieved[2],
        "{achieved:?}"
    );
}

#[test]
fn garbage_collection_makes_writes_slow_and_reads_late() {
    let profile = profile();
    let bytes = 512 * MIB;
    let mut model = drive(&profile, bytes);
    let mut now = fill(&mut model, 0, bytes);
    let pages = bytes / PAGE;
    let mut rng = Rng(7);
    let mut throughput = Vec::new();
    for _ in 0..10 {
        let (end, _) = run(&mut model, now, 32, pages as usize / 4, || {
            work(MediaAccess::Write, rng.below(pages) * PAGE, PAGE)
        });
        throughput.push(mib_per_second(bytes / 4, end - now));
        now = end;
    }
    let wear = model.wear();
    assert!(wear.copied_pages > wear.host_pages / 4, "{wear:?}");
    let (fresh, steady) = (throughput[0], throughput[9]);
    assert!(steady < fresh * 0.7, "{throughput:?}");
    // Reads wait for dies on which garbage collection copies and erases.
    let mut turn = 0;
    let mut reads = Vec::new();
    let (_, latencies) = run(&mut model, now, 8, 20_000, || {
        turn += 1;
        let access = if turn % 4 == 0 {
            MediaAccess::Write
        } else {
            MediaAccess::Read
        };
        reads.push(access == MediaAccess::Read);
        work(access, rng.below(pages) * PAGE, PAGE)
    });
    let mut latencies: Vec<u64> = latencies
        .into_iter()
        .zip(reads)
        .filter_map(|(latency, read)| read.then_some(latency))
        .collect();
    latencies.sort_unstable();
    let (median, tail) = (
        latencies[latencies.len() / 2],
        latencies[latencies.len() * 999 / 1000],
    );
    assert!(tail > 10 * median, "{median} {tail}");
}

#[test]
fn deallocated_pages_feed_garbage_collection() {
    let profile = profile();
    let bytes = 256 * MIB;
    let copied = |deallocate: bool| {
        let mut model = drive(&profile, bytes);
        let mut now = fill(&mut model, 0, bytes);
        if deallocate {
            now = model.due_time(&work(MediaAccess::Deallocate, 0, bytes / 2), now);
        }
        let mut rng = Rng(3);
        let pages = bytes / 2 / PAGE;
        run(&mut model, now, 32, 2 * pages as usize, || {
            work(
                MediaAccess::Write,
                bytes / 2 + rng.below(pages) * PAGE,
                PAGE,
            )
        });
        model.wear().copied_pages
    };
    let (without, with) = (copied(false), copied(true));
    assert!(with * 4 < without, "{with} of {without}");
}

#[test]
fn a_simulated_hour_takes_seconds() {
    // Few and slow dies keep the number of commands in an hour small.
    let mut profile = profile();
    (
        profile.channels,
        profile.dies_per_channel,
        profile.instances,
    ) = (1, 2, 1);
    (profile.program.0, profile.read.0) = (50_000_000, 5_000_000);
    let bytes = 128 * MIB;
    let mut model = drive(&profile, bytes);
    let begin = fill(&mut model, 0, bytes);
    let mut rng = Rng(11);
    let (mut now, mut commands) = (begin, 0);
    while now < begin + 3_600_000_000_000 {
        let (end, _) = run(&mut model, now, 16, 10_000, || {
            let access =
                [MediaAccess::Read, MediaAccess::Write, MediaAccess::Write][rng.below(3) as usize];
            work(access, rng.below(bytes / PAGE) * PAGE, PAGE)
        });
        (now, commands) = (end, commands + 10_000);
    }
    let wear = model.wear();
    assert!(wear.host_pages > bytes / PAGE && wear.copied_pages > 0);
    assert!(commands > 100_000, "{commands}");
    // All pages that were written, copied or padded went to erased blocks, and each block was erased.
    let written = wear.host_pages + wear.copied_pages + wear.padded_pages;
    let block_pages = profile.block.0 / PAGE;
    let geometry = model.instances[0].ftl.geometry();
    assert!(written >= wear.erased_blocks * block_pages);
    assert!(written <= wear.erased_blocks * block_pages + geometry.pages() as u64);
}

#[test]
fn the_same_commands_take_the_same_time() {
    let profile = profile();
    let once = || {
        let mut model = drive(&profile, 64 * MIB);
        let begin = fill(&mut model, 0, 64 * MIB);
        let mut rng = Rng(5);
        run(&mut model, begin, 16, 20_000, || {
            let access = [MediaAccess::Read, MediaAccess::Write][rng.below(2) as usize];
            let blocks = 1 + rng.below(3 * PAGE_BLOCKS);
            MediaWork {
                access,
                slba: rng.below(((64 * MIB) >> LBA_SHIFT) - blocks),
                blocks,
            }
        })
    };
    assert_eq!(once(), once());
}

#[test]
fn the_state_is_kept_beside_the_file() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = persistence::state_path(&dir.path().join("drive.img"));
    let profile = profile();
    let mut model = drive(&profile, 64 * MIB);
    assert!(!model.restore(&path).expect("nothing is there"));
    fill(&mut model, 0, 64 * MIB);
    model.save(&path).expect("saved");
    let mut next = drive(&profile, 64 * MIB);
    assert!(next.restore(&path).expect("sound"));
    assert_eq!(next.wear(), model.wear());
    // After the restart, the written data is in flash, so a read takes the time of a flash read.
    let taken = next.due_time(&work(MediaAccess::Read, 0, PAGE), 0);
    assert!(taken > profile.read_overhead.0 + profile.read.0);
    // A drive with other flash does not use the state.
    let mut other = drive(&profile, 128 * MIB);
    other.restore(&path).expect_err("of another size");
    assert_eq!(other.wear(), FlashWear::default());
    std::fs::write(&path, b"something else").expect("written");
    next.restore(&path).expect_err("no state");
    assert_eq!(std::fs::read_dir(dir.path()).expect("a folder").count(), 1);
}

//! A guest that verifies its data while servers end, and the times without a completion that it saw.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use nvme_mpt_tests::bar::Bar;
use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::controller::{Config, Controller, QueueOptions};
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::doorbell::DoorbellMode;
use nvme_mpt_tests::memory::{DmaBuffer, GuestMemory};
use nvme_mpt_tests::prp;
use nvme_mpt_tests::queue::QueuePair;
use nvme_mpt_tests::rng::{Rng, fill_blocks};
use nvme_mpt_tests::vfio_user::VfioUserBar;

use crate::support::TIMEOUT;

/// Size in bytes of a read or write command.
pub(crate) const PIECE: usize = 4096;
pub(crate) const BLOCKS: u32 = (PIECE / 512) as u32;
/// Number of places on the drive that commands use. It is small, so that each place is written often.
pub(crate) const PLACES: u64 = 64;
/// Number of commands that a guest keeps in flight.
pub(crate) const DEPTH: usize = 16;
/// Completed commands between two admin commands.
const PER_ADMIN: u64 = 200;
/// Gaps between completions below this duration are not recorded.
pub(crate) const BRIEF: Duration = Duration::from_micros(100);
/// Time without a completion after which the guest sleeps between polls. A running server completes a command faster.
const LIVELY: Duration = Duration::from_millis(1);

/// A command in flight.
struct GuestInFlightCommand {
    slot: usize,
    place: u64,
    generation: u64,
    reads: bool,
}

/// A guest's driver on one function. The guest verifies its data.
pub(crate) struct Guest {
    pub(crate) controller: Controller,
    pub(crate) queue: QueuePair,
    pub(crate) buffers: Vec<DmaBuffer>,
    in_flight: BTreeMap<u16, GuestInFlightCommand>,
    /// Last written generation of each block. A block has at most one command in flight.
    generations: Vec<u64>,
    /// False for a drive that does not store data.
    stores_data: bool,
    /// True if the guest creates and deletes a queue pair now and then.
    changes_queues: bool,
    rng: Rng,
    done: u64,
    last: Instant,
    longest: LongestTimes,
}

/// Longest durations that a guest saw, one for each server that ended.
#[derive(Debug, Default)]
pub(crate) struct LongestTimes {
    /// Time without a completion, outside of admin commands.
    pub(crate) without: Vec<Duration>,
    /// Duration of [`Guest::administer`].
    pub(crate) administered: Vec<Duration>,
    /// All times without a completion that are longer than [`BRIEF`], outside of admin commands.
    pub(crate) pauses: Vec<Pause>,
}

/// Time span without a completion, or without a server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pause {
    pub(crate) from: Timestamp,
    pub(crate) until: Timestamp,
}

impl Pause {
    /// Returns the pause of this length that ends now.
    pub(crate) fn ending(length: Duration) -> Self {
        let until = Timestamp::now();
        let from = until - SignedDuration::try_from(length).unwrap();
        Self { from, until }
    }

    pub(crate) fn length(self) -> Duration {
        self.until.duration_since(self.from).unsigned_abs()
    }

    pub(crate) fn overlaps(self, other: Self) -> bool {
        self.from < other.until && other.from < self.until
    }
}

/// Records a duration for the server that ended last, if it is the longest.
fn note(longest: &mut Vec<Duration>, course: &TestProgress, time: Duration) {
    let ended = course.ended.load(Ordering::Relaxed);
    if longest.len() <= ended {
        longest.resize(ended + 1, Duration::ZERO);
    }
    longest[ended] = longest[ended].max(time);
}

/// Progress of a test, shared with its guests.
#[derive(Debug, Default)]
pub(crate) struct TestProgress {
    /// Number of servers that have ended or are about to end.
    pub(crate) ended: AtomicUsize,
    pub(crate) is_over: AtomicBool,
}

impl Guest {
    pub(crate) fn connect(socket: &Path, doorbells: DoorbellMode, stays_connected: bool) -> Self {
        let memory = GuestMemory::new(&[(1 << 20, 16 << 20)]).unwrap();
        let bar: Arc<dyn Bar> = Arc::new(VfioUserBar::attach(socket, &memory).unwrap());
        let config = Config {
            doorbells,
            ..Config::default()
        };
        let mut controller = Controller::attach(bar, memory.clone(), config, 16).unwrap();
        let options = QueueOptions::polled(64);
        let queue = controller.create_queue_pair(1, &options).unwrap();
        Self {
            buffers: (0..DEPTH).map(|_| memory.alloc(PIECE).unwrap()).collect(),
            controller,
            queue,
            in_flight: BTreeMap::new(),
            generations: vec![0; PLACES as usize],
            stores_data: stays_connected,
            changes_queues: true,
            rng: Rng::new(11),
            done: 0,
            last: Instant::now(),
            longest: LongestTimes::default(),
        }
    }

    /// Makes the guest keep its queue pairs: a server that is short of files refuses new ones.
    pub(crate) fn with_fixed_queues(mut self) -> Self {
        self.changes_queues = false;
        self
    }

    fn content(place: u64, generation: u64) -> Vec<u8> {
        let mut bytes = vec![0; PIECE];
        if generation > 0 {
            fill_blocks(&mut bytes, generation, place * u64::from(BLOCKS), 512);
        }
        bytes
    }

    /// Fills the queue with reads and writes.
    fn submit(&mut self) {
        let busy = |slot: &usize| {
            self.in_flight
                .values()
                .any(|in_flight| in_flight.slot == *slot)
        };
        let free: Vec<usize> = (0..DEPTH).filter(|slot| !busy(slot)).collect();
        for slot in free {
            let place = self.rng.below(PLACES);
            if self
                .in_flight
                .values()
                .any(|in_flight| in_flight.place == place)
            {
                continue;
            }
            let reads = self.rng.below(2) == 0;
            let buffer = &self.buffers[slot];
            let mut generation = self.generations[place as usize];
            let slba = place * u64::from(BLOCKS);
            let sqe = if reads {
                buffer.fill(0xEE);
                Sqe::read(1, slba, BLOCKS)
            } else {
                generation += 1;
                buffer.write(0, &Self::content(place, generation));
                Sqe::write(1, slba, BLOCKS)
            };
            let data = prp::buffer(buffer, 0, PIECE).unwrap();
            let cid = self.queue.submit(sqe.with_data(data.pointer)).unwrap();
            let in_flight = GuestInFlightCommand {
                slot,
                place,
                generation,
                reads,
            };
            assert!(self.in_flight.insert(cid, in_flight).is_none());
        }
        self.queue.ring();
    }

    /// Consumes completions, and checks that each belongs to a command in flight.
    fn take(&mut self, course: &TestProgress) {
        while let Some(cqe) = self.queue.poll() {
            let in_flight = self.in_flight.remove(&cqe.cid());
            let in_flight = in_flight.unwrap_or_else(|| panic!("completed twice: {cqe:?}"));
            assert!(cqe.status().is_success(), "{cqe:?}");
            let GuestInFlightCommand {
                slot,
                place,
                generation,
                reads,
            } = in_flight;
            if !reads {
                self.generations[place as usize] = generation;
            } else if self.stores_data {
                let read = self.buffers[slot].to_vec(0, PIECE);
                assert_eq!(read, Self::content(place, generation), "place {place}");
            }
            self.done += 1;
            let now = Instant::now();
            let paused = now - self.last;
            note(&mut self.longest.without, course, paused);
            if paused > BRIEF {
                self.longest.pauses.push(Pause::ending(paused));
            }
            self.last = now;
        }
        self.queue.ring();
    }

    /// Creates a queue pair, uses it, and deletes it.
    pub(crate) fn administer(&mut self) {
        let queue = self
            .controller
            .create_queue_pair(2, &QueueOptions::polled(8))
            .unwrap();
        let mut disk = Disk::new(&mut self.controller, queue, 1).unwrap();
        disk.flush().unwrap();
        self.controller.delete_queue_pair(disk.queue).unwrap();
    }

    /// Runs until the test is over, and waits for all commands. Returns the number of completed commands, and the longest
    /// durations.
    pub(crate) fn run(mut self, course: &TestProgress) -> (u64, LongestTimes) {
        let mut administered = 0;
        self.last = Instant::now();
        // A guest that the host has held up continues beyond the end of the test, until it has completed a command for each
        // ended server.
        let is_over = |done: u64| {
            let ended = course.ended.load(Ordering::Relaxed) as u64;
            course.is_over.load(Ordering::Relaxed) && done > ended + 1
        };
        while !is_over(self.done) || !self.in_flight.is_empty() {
            if !is_over(self.done) {
                self.submit();
            }
            self.take(course);
            if self.changes_queues && self.done / PER_ADMIN > administered {
                administered = self.done / PER_ADMIN;
                let began = Instant::now();
                self.administer();
                let now = Instant::now();
                note(&mut self.longest.administered, course, now - began);
                // The guest did not poll during admin commands, so this time does not count.
                self.last = now;
            }
            let (lost, waited) = (self.in_flight.len(), self.last.elapsed());
            assert!(waited < TIMEOUT, "lost: {lost} commands");
            // The thread sleeps, because the starting server may have no other processor.
            if waited > LIVELY {
                thread::sleep(Duration::from_micros(100));
            }
        }
        (self.done, self.longest)
    }
}

/// Measurements of guests whose servers have ended.
pub(crate) struct GuestMeasurements {
    /// Number of completed commands of each guest, and its longest durations.
    pub(crate) guests: Vec<(u64, LongestTimes)>,
    /// Time from each server's end until the next server was ready.
    pub(crate) starts: Vec<Duration>,
}

/// Runs guests while `times` servers end at random moments.
pub(crate) fn run_beside(
    guests: Vec<Guest>,
    times: usize,
    mut end: impl FnMut(),
) -> GuestMeasurements {
    let course = Arc::new(TestProgress::default());
    let guests: Vec<_> = guests
        .into_iter()
        .map(|guest| {
            let course = course.clone();
            thread::spawn(move || guest.run(&course))
        })
        .collect();
    let mut rng = Rng::new(5);
    let mut starts = Vec::new();
    for _ in 0..times {
        thread::sleep(Duration::from_micros(rng.below(20_000)));
        course.ended.fetch_add(1, Ordering::Relaxed);
        let began = Instant::now();
        end();
        starts.push(began.elapsed());
        let failed = guests.iter().any(|guest| guest.is_finished());
        assert!(!failed, "a guest failed");
    }
    course.is_over.store(true, Ordering::Relaxed);
    let guests = guests.into_iter();
    GuestMeasurements {
        guests: guests.map(|guest| guest.join().unwrap()).collect(),
        starts,
    }
}

//! Leases with different weights on one queue pair, measured by the commands that reach the drive.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use nvme_guest::rate_limit::{LeaseWeight, RateLimits};
use nvme_mpt::LocalBackend;
use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::controller::Controller;
use nvme_mpt_tests::drive::{HandQueue, NamespaceOptions, Options};
use nvme_mpt_tests::memory::DmaBuffer;
use nvme_mpt_tests::prp;
use nvme_mpt_tests::queue::QueuePair;

use crate::common::{Host, LEASE, Machine, Setup, queue_pair, remote, wait_for, wait_for_pollers};

/// Entries of the drive's queue pair.
const ENTRIES: u32 = 16;

/// Slots for busy queues: one entry stays empty, and one entry is for quiet queues.
const BUSY_SLOTS: usize = 14;

/// Commands of a loud guest, which are submitted all at once.
const COMMANDS: usize = 480;

/// Size of a lease in blocks.
const BLOCKS: u64 = LEASE / 512;

/// Longer than the test.
const DEADLINE_NEVER: Duration = Duration::from_secs(3600);

fn host() -> Host {
    let options = Options {
        queue_pairs: 1,
        entries_max: ENTRIES,
        namespaces: vec![NamespaceOptions::new(1, 4 * LEASE, 512)],
        // Without a volatile cache, no Flush is sent at the end.
        volatile_cache: false,
        is_manual: true,
        ..Options::default()
    };
    Host::with(options, DEADLINE_NEVER)
}

pub(crate) fn rates(weight: u16) -> RateLimits {
    RateLimits {
        weight: Some(LeaseWeight::try_from(weight).unwrap()),
        ..RateLimits::default()
    }
}

/// A guest with one queue.
pub(crate) struct Guest {
    pub(crate) local_backend: Arc<LocalBackend>,
    pub(crate) queue: QueuePair,
    data: DmaBuffer,
    _controller: Controller,
    _machine: Machine,
}

impl Guest {
    /// Creates a guest with the `nth` lease.
    pub(crate) fn new(host: &Host, nth: u64, weight: u16) -> Self {
        let machine = host.machine(&Setup {
            rates: rates(weight),
            ..Setup::nth(nth)
        });
        let local_backend = host.latest_backend.lock().unwrap().upgrade().unwrap();
        let mut controller = machine.attach();
        Self {
            local_backend,
            queue: queue_pair(&mut controller, 1, 512),
            data: machine.memory.alloc(4096).unwrap(),
            _controller: controller,
            _machine: machine,
        }
    }

    /// Submits reads.
    pub(crate) fn read(&mut self, commands: usize) {
        let data = prp::buffer(&self.data, 0, 4096).unwrap();
        let read = Sqe::read(1, 0, 8).with_data(data.pointer);
        for _ in 0..commands {
            self.queue.submit(read).unwrap();
        }
        self.queue.ring();
    }
}

/// A drive that the test plays. It executes one command at a time.
struct Drive {
    hand_queue: HandQueue,
    taken: VecDeque<Sqe>,
}

/// Returns the lease of a command, by its block address.
fn lease_of(sqe: &Sqe) -> usize {
    (u64::from(sqe.cdw(10)) / BLOCKS) as usize
}

impl Drive {
    /// Waits for the host's next command. Returns its lease.
    #[track_caller]
    fn take(&mut self) -> usize {
        let mut taken = None;
        wait_for("a command", || {
            taken = self.hand_queue.take();
            taken.is_some()
        });
        let taken = taken.unwrap();
        self.taken.push_back(taken);
        lease_of(&taken)
    }

    /// Completes the oldest command. Returns its lease.
    fn complete(&mut self) -> usize {
        let sqe = self.taken.pop_front().expect("a command");
        self.hand_queue.post([0, u64::from(sqe.cid()) << 32]);
        lease_of(&sqe)
    }

    /// Completes commands one by one, each time after a new command replaced the last one. Returns the number of new commands
    /// of each lease.
    #[track_caller]
    fn run(&mut self, commands: usize) -> [usize; 3] {
        let mut counts = [0; 3];
        for _ in 0..commands {
            self.complete();
            counts[self.take()] += 1;
        }
        counts
    }

    /// Completes the remaining `left` commands.
    fn finish(mut self, mut left: usize) {
        while left > 0 {
            if self.taken.is_empty() {
                self.take();
            }
            self.complete();
            left -= 1;
        }
    }
}

/// Creates two loud guests with these weights, and the drive. All commands are submitted.
fn two_loud_guests(host: &Host, weights: [u16; 2]) -> ([Guest; 2], Drive) {
    let mut nth = 0..;
    let mut guests = weights.map(|weight| Guest::new(host, nth.next().unwrap(), weight));
    let mut drive = Drive {
        hand_queue: host.model.hand_queue(1).expect("the only pair"),
        taken: VecDeque::new(),
    };
    for guest in &mut guests {
        guest.read(COMMANDS);
    }
    while drive.taken.len() < BUSY_SLOTS {
        drive.take();
    }
    // A poller does not sleep while it can take commands.
    wait_for_pollers(host);
    (guests, drive)
}

#[track_caller]
fn check(counts: [usize; 3], expected: [usize; 3]) {
    for (count, expected) in counts.iter().zip(expected) {
        assert!(count.abs_diff(expected) <= 2, "{counts:?}");
    }
}

#[test]
fn two_loud_guests_get_commands_by_weights_that_change_under_them() {
    if remote::is_enabled() {
        // A server flushes the drive when a VMM disconnects, and the test would have to complete this Flush.
        return;
    }
    let host = host();
    let (guests, mut drive) = two_loud_guests(&host, [100, 300]);
    let first = drive.run(200);
    guests[0].local_backend.set_rates(rates(900));
    let second = drive.run(200);
    // The default weight is 100.
    guests[0].local_backend.set_rates(RateLimits::default());
    let third = drive.run(200);
    // The host waits for all commands when it is dropped.
    drive.finish(2 * COMMANDS - 600);
    drop(guests);
    host.finish();
    check(first, [50, 150, 0]);
    check(second, [150, 50, 0]);
    check(third, [50, 150, 0]);
}

#[test]
fn a_quiet_guest_waits_only_for_commands_in_the_drive() {
    if remote::is_enabled() {
        // A server flushes the drive when a VMM disconnects, and the test would have to complete this Flush.
        return;
    }
    let host = host();
    let (guests, mut drive) = two_loud_guests(&host, [1000, 1000]);
    let mut quiet = Guest::new(&host, 2, 1);
    let mut waits = Vec::new();
    for _ in 0..20 {
        quiet.read(1);
        // The quiet guest's command arrives without the completion of a loud command.
        while drive.take() != 2 {}
        let mut waited = 0;
        while drive.complete() != 2 {
            waited += 1;
        }
        waits.push(waited);
        wait_for("the completion", || quiet.queue.poll().is_some());
    }
    drive.finish(2 * COMMANDS - waits.iter().sum::<usize>());
    drop((quiet, guests));
    host.finish();
    assert!(
        waits.iter().all(|waited| *waited <= BUSY_SLOTS),
        "{waits:?}"
    );
}

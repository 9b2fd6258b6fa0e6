//! What members see of each other, on simulated drives and a virtual clock.

use std::collections::VecDeque;
use std::sync::Arc;

use super::super::VfioQueue;
use super::super::governor::Governor;
use super::drive::FakeDrive;
use super::{Lender, command};
use crate::clock::Ticks;
use crate::host::HostQueue;
use crate::spec::ids::CommandId;
use crate::spec::nvm::ReadWrite;
use crate::spec::opcode::NvmOpcode;
use crate::spec::status::Status;

/// Ticks are nanoseconds here.
const MICROSECOND: u64 = 1_000;
const MILLISECOND: u64 = 1_000 * MICROSECOND;
const SECOND: u64 = 1_000 * MILLISECOND;

/// How often members poll at least.
const POLL: u64 = 25 * MICROSECOND;

/// How fast a drive is.
#[derive(Clone, Copy)]
struct Speed {
    /// Commands that it works on at a time.
    channels: usize,
    /// Time per command, and per 4 KiB of it.
    command: u64,
    page: u64,
    /// How much the time varies, in percent up.
    jitter: u64,
}

/// One that does one command after the other, as an emulated one does.
const SERIAL: Speed = Speed {
    channels: 1,
    command: 100 * MICROSECOND,
    page: 2 * MICROSECOND,
    jitter: 0,
};

/// As many SSDs are: the more it has to do, the more it does.
const PARALLEL: Speed = Speed {
    channels: 32,
    command: 70 * MICROSECOND,
    page: 10 * MICROSECOND,
    jitter: 30,
};

/// A drive with several queue pairs, which takes commands in the order of their arrival.
struct Drive {
    speed: Speed,
    pairs: Vec<FakeDrive>,
    waiting: VecDeque<(usize, CommandId, u64)>,
    /// End, queue pair and identifier of what each channel works on.
    working: Vec<Option<(u64, usize, CommandId)>>,
    random: u64,
}

impl Drive {
    fn fetch(&mut self, now: u64) {
        for (index, pair) in self.pairs.iter_mut().enumerate() {
            let known = pair.commands.len();
            pair.fetch();
            for sqe in &pair.commands[known..] {
                let pages = (u64::from(ReadWrite::from(sqe).nlb_z) + 1) / 8;
                self.waiting.push_back((index, sqe.cid(), pages));
            }
        }
        for channel in self.working.iter_mut().filter(|channel| channel.is_none()) {
            let Some((pair, cid, pages)) = self.waiting.pop_front() else {
                return;
            };
            // A linear congruential generator: the upper bits are random enough.
            self.random = self
                .random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let percent = 100 + (self.random >> 33) % (self.speed.jitter + 1);
            let time = (self.speed.command + pages * self.speed.page) * percent / 100;
            *channel = Some((now + time, pair, cid));
        }
    }

    fn next_end(&self) -> Option<u64> {
        self.working.iter().flatten().map(|(end, ..)| *end).min()
    }

    fn complete(&mut self, now: u64) {
        for channel in &mut self.working {
            if let Some((end, pair, cid)) = *channel
                && end <= now
            {
                *channel = None;
                let commands = &mut self.pairs[pair].commands;
                let index = commands.iter().position(|sqe| sqe.cid() == cid);
                self.pairs[pair].complete(index.expect("in flight"), Status::SUCCESS);
            }
        }
    }
}

/// What a guest does: so many reads of so many bytes at a time, each followed by a pause.
#[derive(Clone, Copy)]
struct Load {
    pair: usize,
    depth: u16,
    bytes: u64,
    pause: u64,
    /// When it begins.
    from: u64,
}

const QUIET: Load = Load {
    pair: 0,
    depth: 1,
    bytes: 4096,
    pause: 0,
    from: 0,
};

const LOUD: Load = Load {
    pair: 0,
    depth: 64,
    bytes: 4096,
    pause: 0,
    from: 0,
};

struct Guest {
    load: Load,
    queue: VfioQueue,
    /// When each slot was submitted.
    submitted: Vec<u64>,
    /// Slots that are free, and from when on they are used again.
    free: VecDeque<(u64, u16)>,
    latencies: Vec<u64>,
}

/// What a guest saw.
#[derive(Debug)]
struct Seen {
    commands: usize,
    p99: u64,
}

/// Runs guests on a drive for some time.
fn simulate(speed: Speed, pairs: usize, loads: &[Load], time: u64) -> Vec<Seen> {
    let governor = Arc::new(Governor::with_millisecond(MILLISECOND));
    let (fakes, handles): (Vec<_>, Vec<_>) = (0..pairs)
        .map(|_| FakeDrive::governed(512, u64::MAX, false, governor.clone()))
        .unzip();
    let mut drive = Drive {
        speed,
        pairs: fakes,
        waiting: VecDeque::new(),
        working: vec![None; speed.channels],
        random: 1,
    };
    let lender = Lender::new(1);
    // A neighbour that does nothing makes each pair a shared one.
    let _idle: Vec<_> = handles
        .iter()
        .map(|pair| pair.join(1, 9, Box::new(())))
        .collect();
    let mut guests: Vec<_> = loads
        .iter()
        .map(|load| Guest {
            load: *load,
            queue: handles[load.pair].join(load.depth, 9, Box::new(())),
            submitted: vec![0; load.depth.into()],
            free: (0..load.depth).map(|slot| (load.from, slot)).collect(),
            latencies: Vec::new(),
        })
        .collect();
    let mut now = MILLISECOND;
    while now < time {
        drive.complete(now);
        for guest in &mut guests {
            guest.poll(now, &lender);
        }
        drive.fetch(now);
        let end = drive.next_end().unwrap_or(u64::MAX);
        now = end.min(now + POLL);
    }
    let seen = guests.iter_mut().map(Guest::seen).collect();
    for pair in &handles {
        pair.kill(Status::COMMAND_INTERRUPTED);
    }
    seen
}

impl Guest {
    fn poll(&mut self, now: u64, lender: &Lender) {
        let Self {
            load,
            queue,
            submitted,
            free,
            latencies,
        } = self;
        queue.reap_by(
            || Ticks(now),
            |completion| {
                assert!(completion.status.is_success());
                latencies.push(now - submitted[usize::from(completion.slot)]);
                free.push_back((now + load.pause, completion.slot));
            },
        );
        let blocks = (load.bytes / 512) as u32;
        let mut is_new = false;
        while let Some((from, slot)) = free.front().copied()
            && from <= now
        {
            free.pop_front();
            submitted[usize::from(slot)] = now;
            queue.submit(&command(NvmOpcode::READ, slot, 0, blocks));
            is_new = true;
        }
        if is_new {
            queue.ring_at(lender.memory(), Ticks(now));
        }
    }

    fn seen(&mut self) -> Seen {
        self.latencies.sort_unstable();
        let commands = self.latencies.len();
        Seen {
            commands,
            p99: self
                .latencies
                .get(commands * 99 / 100)
                .copied()
                .unwrap_or(0),
        }
    }
}

/// The quiet guest's p99 beside others in per cent of what it is alone; and the first loud guest's
/// commands in per cent of what they are alone.
fn ratios(speed: Speed, pairs: usize, quiet: Load, loud: &[Load]) -> (u64, u64) {
    let time = SECOND;
    let alone = simulate(speed, pairs, &[quiet], time);
    let loud_alone = simulate(speed, pairs, loud, time);
    let mut all = vec![quiet];
    all.extend_from_slice(loud);
    let together = simulate(speed, pairs, &all, time);
    let ratios = (
        together[0].p99 * 100 / alone[0].p99,
        (together[1].commands * 100 / loud_alone[0].commands) as u64,
    );
    println!(
        "quiet's p99: {} %, loud's commands: {} %",
        ratios.0, ratios.1
    );
    ratios
}

#[test]
fn a_quiet_guest_on_a_serial_drive() {
    let (p99, _) = ratios(SERIAL, 1, QUIET, &[LOUD]);
    assert!(p99 <= 300, "{p99} %");
    let large = Load {
        bytes: 128 << 10,
        depth: 32,
        ..LOUD
    };
    let (p99, _) = ratios(SERIAL, 1, QUIET, &[large]);
    assert!(p99 <= 300, "{p99} %");
    let thinking = Load {
        pause: 300 * MICROSECOND,
        ..QUIET
    };
    let (p99, loud) = ratios(SERIAL, 1, thinking, &[LOUD]);
    assert!(p99 <= 300, "{p99} %");
    assert!(loud >= 60, "{loud} %");
}

#[test]
fn a_quiet_guest_on_a_parallel_drive() {
    let deep = Load { depth: 256, ..LOUD };
    let (p99, loud) = ratios(PARALLEL, 1, QUIET, &[deep]);
    assert!(p99 <= 300, "{p99} %");
    assert!(loud >= 85, "{loud} %");
    let large = Load {
        bytes: 128 << 10,
        ..deep
    };
    let (p99, loud) = ratios(PARALLEL, 1, QUIET, &[large]);
    assert!(p99 <= 300, "{p99} %");
    assert!(loud >= 60, "{loud} %");
}

#[test]
fn a_quiet_guest_with_some_commands_in_flight() {
    let quiet = Load { depth: 4, ..QUIET };
    for speed in [SERIAL, PARALLEL] {
        let (p99, _) = ratios(speed, 1, quiet, &[LOUD]);
        assert!(p99 <= 300, "{p99} %");
    }
}

#[test]
fn a_loud_guest_on_every_queue_pair() {
    let other = Load { pair: 1, ..LOUD };
    for speed in [SERIAL, PARALLEL] {
        let (p99, _) = ratios(speed, 2, QUIET, &[LOUD, other]);
        assert!(p99 <= 300, "{p99} %");
    }
}

#[test]
fn a_quiet_guest_that_comes_late() {
    let late = Load {
        from: SECOND / 2,
        ..QUIET
    };
    let (p99, _) = ratios(SERIAL, 1, late, &[LOUD]);
    assert!(p99 <= 300, "{p99} %");
}

#[test]
fn loud_guests_get_the_same_bytes() {
    for speed in [SERIAL, PARALLEL] {
        let large = Load {
            bytes: 128 << 10,
            depth: 128,
            ..LOUD
        };
        let medium = Load {
            bytes: 64 << 10,
            depth: 128,
            ..LOUD
        };
        let seen = simulate(speed, 1, &[large, medium, large], SECOND);
        let bytes = |index: usize, size: u64| seen[index].commands as u64 * size;
        let [a, b, c] = [bytes(0, 128), bytes(1, 64), bytes(2, 128)];
        println!("{a} {b} {c}");
        let (least, most) = (a.min(b).min(c), a.max(b).max(c));
        assert!(most - least <= most / 10, "{a} {b} {c}");
    }
}

#[test]
fn nobody_waits_beside_a_neighbour_that_is_idle() {
    let speed = PARALLEL;
    let seen = simulate(speed, 1, &[LOUD], SECOND);
    let per_command = (speed.command + speed.page) * (200 + speed.jitter) / 200;
    let possible = (SECOND - MILLISECOND) / per_command * speed.channels as u64;
    let share = seen[0].commands as u64 * 100 / possible;
    assert!(share >= 90, "{share} % of what the drive can do");
}

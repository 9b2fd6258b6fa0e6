//! Effect of interrupt coalescing on many kinds of guests, in simulated time: 1 tick = 1 ns.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;

use nvme_mpt_memory::clock::{TickRate, Ticks};

use super::{CoalescingFeature, InterruptCoalescer, InterruptVector, OutstandingCommands};
use crate::adaptive::PolicyChoice;

/// Number of commands in a run of a guest with a constant load.
const COMMANDS: u32 = 8_000;

/// A guest with one processor. Times are in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct CoalescingTestGuest {
    /// Time of the guest for an interrupt, without the completions that it reports.
    interrupt: u64,
    /// Time of the guest for a completion and for submitting the next command.
    command: u64,
}

/// Drive that takes `latency` nanoseconds per command, and processes up to `parallel` commands at a time.
#[derive(Clone, Copy, Debug)]
struct CoalescingTestDrive {
    latency: u64,
    parallel: usize,
}

/// Number of commands that a guest keeps outstanding, and number of completions after which the phase ends.
type CoalescingTestLoad = (u32, u32);

/// Results of one phase of a simulated load.
#[derive(Clone, Copy, Debug)]
struct CoalescingTestResult {
    ticks: u64,
    interrupts: u64,
    /// Maximum time for which a completion waited to be consumed.
    longest: u64,
}

/// The guest's processor, which does one thing at a time: an interrupt waits for the end of the present step, and the
/// next submission for the end of the interrupt handler.
#[derive(Debug, Default)]
struct CoalescingTestProcessor {
    free_at: u64,
    handles: bool,
    interrupts: u64,
}

/// Runs a guest through phases.
fn run<const N: usize>(
    guest: CoalescingTestGuest,
    drive: CoalescingTestDrive,
    choice: PolicyChoice,
    phases: [CoalescingTestLoad; N],
) -> [CoalescingTestResult; N] {
    // Time of a pass of the poller: a guest and its host have about the same speed.
    let pass = guest.command / 20;
    let vector = InterruptVector::new();
    let coalescing = Arc::<CoalescingFeature>::default();
    let raised = Some(vector.clone());
    let mut coalescer = InterruptCoalescer::new(raised, coalescing, choice, TickRate::NANOSECOND);
    let mut servers = vec![0_u64; drive.parallel];
    let mut flying = BinaryHeap::new();
    // Times at which completions were posted that are not consumed yet.
    let mut posted = VecDeque::new();
    let mut processor = CoalescingTestProcessor::default();
    let (mut now, mut outstanding) = (0_u64, 0_u32);
    phases.map(|(depth, commands)| {
        let (began, before) = (now, vector.signal_count());
        let (mut consumed, mut longest) = (0, 0);
        while consumed < commands {
            now += pass;
            let mut submitted = 0;
            while processor.free_at <= now {
                let free_at = processor.free_at.max(now - pass);
                processor.free_at = if processor.handles {
                    match posted.pop_front() {
                        Some(at) => {
                            longest = longest.max(free_at.saturating_sub(at));
                            consumed += 1;
                            outstanding -= 1;
                            free_at + guest.command / 2
                        }
                        None => {
                            processor.handles = false;
                            free_at
                        }
                    }
                } else if vector.signal_count() > processor.interrupts {
                    processor.interrupts = vector.signal_count();
                    processor.handles = true;
                    free_at + guest.interrupt
                } else if outstanding < depth {
                    outstanding += 1;
                    submitted += 1;
                    free_at + guest.command / 2
                } else {
                    now + pass
                };
            }
            if submitted > 0 {
                coalescer.on_taken(Ticks(now));
            }
            for _ in 0..submitted {
                let server = servers.iter_mut().min().expect("one at least");
                *server = now.max(*server) + drive.latency;
                flying.push(Reverse(*server));
            }
            let mut done = 0;
            while flying.peek().is_some_and(|Reverse(at)| *at <= now) {
                flying.pop();
                posted.push_back(now);
                done += 1;
            }
            if done > 0 {
                coalescer.on_posted(done, Ticks(now));
            }
            let outstanding_commands = OutstandingCommands {
                unconsumed: posted.len() as u32,
                in_flight: flying.len() as u32,
            };
            coalescer.signal_if_due(outstanding_commands, Ticks(now));
        }
        CoalescingTestResult {
            ticks: now - began,
            interrupts: vector.signal_count() - before,
            longest,
        }
    })
}

/// Flash drives, one with little parallelism, a fast drive, and drives that process one command at a time.
const DRIVES: [CoalescingTestDrive; 5] = [
    CoalescingTestDrive {
        latency: 80_000,
        parallel: 64,
    },
    CoalescingTestDrive {
        latency: 80_000,
        parallel: 4,
    },
    CoalescingTestDrive {
        latency: 10_000,
        parallel: 16,
    },
    CoalescingTestDrive {
        latency: 1000,
        parallel: 1,
    },
    CoalescingTestDrive {
        latency: 20_000,
        parallel: 1,
    },
];

/// Guests in KVM and in an emulator, and guests with very low and very high interrupt costs.
const GUESTS: [CoalescingTestGuest; 4] = [
    CoalescingTestGuest {
        interrupt: 3000,
        command: 2000,
    },
    CoalescingTestGuest {
        interrupt: 100_000,
        command: 50_000,
    },
    CoalescingTestGuest {
        interrupt: 200,
        command: 2000,
    },
    CoalescingTestGuest {
        interrupt: 10_000,
        command: 3000,
    },
];

/// Choices to compare: without coalescing, and with it.
const CHOICES: [PolicyChoice; 2] = [PolicyChoice::Fixed, PolicyChoice::Adaptive];

/// Runs each guest on each drive with each of `depths` commands outstanding. `check` gets the results without coalescing and
/// with it.
fn each(depths: &[u32], mut check: impl FnMut(String, CoalescingTestResult, CoalescingTestResult)) {
    for guest in GUESTS {
        for drive in DRIVES {
            for depth in depths {
                let [[without], [with]] =
                    CHOICES.map(|choice| run(guest, drive, choice, [(*depth, COMMANDS)]));
                let what =
                    format!("{guest:?}, {drive:?}, {depth} outstanding: {without:?}, {with:?}");
                check(what, without, with);
            }
        }
    }
}

#[test]
fn nobody_loses_by_it() {
    let mut shares = Vec::new();
    let mut quicker = 0;
    each(&[1, 2, 4, 8, 32, 128], |what, without, with| {
        shares.push(with.ticks as f64 / without.ticks as f64);
        assert!(with.ticks * 100 <= without.ticks * 102, "{what}");
        assert!(with.interrupts * 100 <= without.interrupts * 102, "{what}");
        quicker += usize::from(with.ticks * 100 < without.ticks * 95);
    });
    shares.sort_by(f64::total_cmp);
    let (least, most) = (shares[0], shares[shares.len() - 1]);
    println!(
        "time with adaptive coalescing, relative to that without: {least:.2} to {most:.2}, {quicker} of {} below 0.95",
        shares.len()
    );
    assert!(quicker >= 40, "{quicker} gain by it");
}

#[test]
fn a_guest_with_one_command_outstanding_has_its_interrupts_at_once() {
    each(&[1], |what, without, with| {
        assert_eq!(with.interrupts, without.interrupts, "{what}");
        assert!(with.ticks * 100 <= without.ticks * 101, "{what}");
    });
}

#[test]
fn guests_that_interrupts_keep_from_their_work_get_more_done() {
    // Each completion arrives right after its command was submitted, while the guest submits the next command.
    let drive = CoalescingTestDrive {
        latency: 1000,
        parallel: 1,
    };
    let emulated = CoalescingTestGuest {
        interrupt: 100_000,
        command: 50_000,
    };
    let [[without], [with]] = CHOICES.map(|choice| run(emulated, drive, choice, [(32, COMMANDS)]));
    assert!(without.interrupts == u64::from(COMMANDS), "{without:?}");
    assert!(with.interrupts * 8 < u64::from(COMMANDS), "{with:?}");
    assert!(with.ticks * 2 < without.ticks, "{without:?} {with:?}");
    // No completion waits for as long as the guest needs for 32 completions with an interrupt each.
    assert!(with.longest < 32 * (100_000 + 50_000), "{with:?}");
}

#[test]
fn coalescing_adapted_to_high_depth_costs_little_at_low_depth() {
    for guest in GUESTS {
        for drive in DRIVES {
            for few in [1, 2, 4] {
                let phases = [(128, COMMANDS), (few, 2000)];
                let [[_, without], [_, with]] =
                    CHOICES.map(|choice| run(guest, drive, choice, phases));
                let what = format!("{guest:?}, {drive:?}, {few}: {without:?} {with:?}");
                assert!(with.ticks * 100 <= without.ticks * 105, "{what}");
            }
        }
    }
}

//! A guest with many commands in flight: each command must complete exactly once, whatever happens to the drive, and each block
//! must have the data that was written last.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use nvme_mpt_tests::command::{DataPointer, Sqe};
use nvme_mpt_tests::completion::Cqe;
use nvme_mpt_tests::memory::DmaBuffer;
use nvme_mpt_tests::prp::{self, PreparedPointer};
use nvme_mpt_tests::queue::QueuePair;
use nvme_mpt_tests::rng::{self, Rng};
use nvme_mpt_tests::status::{COMMAND_INTERRUPTED, NAMESPACE_NOT_READY, StatusCode};

use crate::function::{HANG, Host, Machine, Setup, queue_pair, wait_for};

/// Bytes that one command works on, more than small drives transfer at once.
const PIECE: usize = 128 << 10;

/// Entries of a queue.
const ENTRIES: u32 = 64;

/// Command counts of a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) submitted: u64,
    pub(crate) completed: u64,
    pub(crate) succeeded: u64,
    /// Commands that failed with a status that permits a retry, and were repeated.
    pub(crate) interrupted: u64,
    /// Status codes of commands that failed with Do Not Retry.
    pub(crate) failed: Vec<StatusCode>,
}

/// Purpose of a command in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Task {
    Write,
    Read,
}

/// A range of blocks with one command at a time.
struct Slot {
    slba: u64,
    blocks: u32,
    buffer: DmaBuffer,
    prepared: PreparedPointer,
    /// Tag of the last write.
    tag: u64,
    task: Task,
    in_flight: bool,
}

/// State shared with the guest's thread.
#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    succeeded: AtomicU64,
    failed: AtomicU64,
}

/// A guest under load.
pub(crate) struct Load {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<(Machine, Tally)>>,
}

impl Load {
    /// Starts a guest with `depth` commands in flight in each of `queues` queues.
    pub(crate) fn start(host: &Host, setup: &Setup, queues: u16, depth: usize) -> Self {
        assert!(depth < ENTRIES as usize - 1);
        let machine = host.machine(setup);
        let shared = Arc::<Shared>::default();
        let thread = {
            let shared = shared.clone();
            std::thread::spawn(move || {
                let tally = run(&machine, queues, depth, &shared);
                (machine, tally)
            })
        };
        let load = Self {
            shared,
            thread: Some(thread),
        };
        load.wait_for_progress();
        load
    }

    #[track_caller]
    fn wait(&self, what: &str, counter: &AtomicU64, until: u64) {
        wait_for(what, || {
            let ended = self.thread.as_ref().is_none_or(JoinHandle::is_finished);
            let reached = counter.load(Ordering::Relaxed) >= until;
            assert!(reached || !ended, "the guest has ended");
            reached
        });
    }

    /// Waits for more successful commands.
    #[track_caller]
    pub(crate) fn wait_for_progress(&self) {
        let until = self.shared.succeeded.load(Ordering::Relaxed) + 100;
        self.wait("more commands that succeed", &self.shared.succeeded, until);
    }

    /// Waits for a command that fails with Do Not Retry.
    #[track_caller]
    pub(crate) fn wait_for_failure(&self) {
        self.wait("a failure", &self.shared.failed, 1);
    }

    /// Waits for all commands, reads back all written data, and returns the guest and its counts.
    #[track_caller]
    pub(crate) fn finish(mut self) -> (Machine, Tally) {
        self.shared.stop.store(true, Ordering::Relaxed);
        match self.thread.take().expect("a thread").join() {
            Ok((machine, tally)) => {
                let ended = tally.succeeded + tally.interrupted + tally.failed.len() as u64;
                assert_eq!(tally.submitted, tally.completed, "{tally:?}");
                assert_eq!(tally.completed, ended, "{tally:?}");
                (machine, tally)
            }
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// Ends as [`Self::finish`] does, and checks that the guest has noticed no failure.
    #[track_caller]
    pub(crate) fn finish_undisturbed(self) -> Tally {
        let (_, tally) = self.finish();
        assert_eq!((tally.interrupted, tally.failed.len()), (0, 0), "{tally:?}");
        tally
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // If the test has failed, the guest stops.
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

/// A queue of the guest.
struct Lane {
    queue: QueuePair,
    slots: Vec<Slot>,
}

fn run(machine: &Machine, queues: u16, depth: usize, shared: &Shared) -> Tally {
    let mut controller = machine.attach();
    let block_size = controller.identify_namespace(1).unwrap().block_size as usize;
    let blocks = (PIECE / block_size) as u64;
    let mut tally = Tally::default();
    let mut rng = Rng::new(u64::from(queues) << 32 | depth as u64);
    let mut lanes: Vec<Lane> = (0..queues)
        .map(|lane| Lane {
            queue: queue_pair(&mut controller, lane + 1, ENTRIES),
            slots: (0..depth)
                .map(|index| {
                    let buffer = machine.memory.alloc(PIECE + 4096).unwrap();
                    let prepared = prp::buffer(&buffer, 0, PIECE).unwrap();
                    Slot {
                        slba: (usize::from(lane) * depth + index) as u64 * blocks,
                        blocks: blocks as u32,
                        buffer,
                        prepared,
                        tag: 0,
                        task: Task::Read,
                        in_flight: false,
                    }
                })
                .collect(),
        })
        .collect();
    let mut progress = Instant::now();
    loop {
        let ending = shared.stop.load(Ordering::Relaxed) || !tally.failed.is_empty();
        let mut busy = false;
        for lane in &mut lanes {
            let before = tally.completed;
            while let Some(cqe) = lane.queue.poll() {
                lane.complete(&cqe, block_size, &mut tally, shared);
            }
            if !ending {
                lane.submit(block_size, &mut rng, &mut tally);
            }
            lane.queue.ring();
            busy |= before != tally.completed;
        }
        let in_flight = lanes.iter().flat_map(|lane| &lane.slots);
        if ending && in_flight.clone().all(|slot| !slot.in_flight) {
            break;
        }
        if busy {
            progress = Instant::now();
        } else {
            let waiting = in_flight.filter(|slot| slot.in_flight).count();
            let csts = controller.status().unwrap();
            assert!(
                progress.elapsed() < HANG,
                "{waiting} commands hang, CSTS {csts:#x}: {tally:?}"
            );
            std::thread::sleep(std::time::Duration::from_micros(20));
        }
    }
    // No completion follows the last one, and the written data is present.
    for lane in &mut lanes {
        assert!(lane.queue.poll().is_none(), "a completion of nothing");
        if tally.failed.is_empty() {
            lane.verify(block_size);
        }
    }
    tally
}

impl Lane {
    fn submit(&mut self, block_size: usize, rng: &mut Rng, tally: &mut Tally) {
        for index in 0..self.slots.len() {
            let slot = &mut self.slots[index];
            if slot.in_flight {
                continue;
            }
            // Commands write and read back in turn, each time at another place of the range.
            slot.task = match slot.task {
                Task::Read => Task::Write,
                Task::Write => Task::Read,
            };
            if slot.task == Task::Write {
                slot.tag = rng.next_u64();
                let most = PIECE / block_size;
                slot.blocks = match rng.below(4) {
                    0 => most as u32,
                    _ => 1 + rng.below(most as u64 / 8) as u32,
                };
                // Data need not start at a page.
                let offset = 4 * rng.below(1024) as usize;
                let len = slot.blocks as usize * block_size;
                slot.prepared = prp::buffer(&slot.buffer, offset, len).unwrap();
                let mut bytes = vec![0; len];
                rng::fill_blocks(&mut bytes, slot.tag, slot.slba, block_size);
                slot.buffer.write(offset, &bytes);
            } else {
                // Overwrite the buffer, so that old contents do not pass for read data.
                slot.buffer.fill(0xEE);
            }
            self.push(index, tally);
        }
    }

    fn push(&mut self, index: usize, tally: &mut Tally) {
        let slot = &mut self.slots[index];
        let sqe = match slot.task {
            Task::Write => Sqe::write(1, slot.slba, slot.blocks),
            Task::Read => Sqe::read(1, slot.slba, slot.blocks),
        };
        let sqe = sqe.with_data(slot.prepared.pointer);
        // The push succeeds: there are fewer slots than entries.
        assert!(self.queue.push(&sqe.with_cid(index as u16)), "a full queue");
        slot.in_flight = true;
        tally.submitted += 1;
    }

    fn complete(&mut self, cqe: &Cqe, block_size: usize, tally: &mut Tally, shared: &Shared) {
        let index = usize::from(cqe.cid());
        let slot = self.slots.get_mut(index).expect("a command of the guest's");
        assert!(slot.in_flight, "completed twice: {cqe:?}, {tally:?}");
        slot.in_flight = false;
        tally.completed += 1;
        let status = cqe.status();
        if status.is_success() {
            if slot.task == Task::Read {
                slot.check(block_size);
            }
            tally.succeeded += 1;
            shared.succeeded.fetch_add(1, Ordering::Relaxed);
        } else if !status.do_not_retry() {
            let known = [COMMAND_INTERRUPTED, NAMESPACE_NOT_READY];
            assert!(known.contains(&status.code()), "{cqe:?}");
            tally.interrupted += 1;
            self.push(index, tally);
        } else {
            tally.failed.push(status.code());
            shared.failed.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Reads the data that was last written to each range.
    fn verify(&mut self, block_size: usize) {
        for index in 0..self.slots.len() {
            let slot = &self.slots[index];
            if slot.tag == 0 {
                continue;
            }
            slot.buffer.fill(0xEE);
            let sqe = Sqe::read(1, slot.slba, slot.blocks).with_data(slot.prepared.pointer);
            // A failing drive may still interrupt the read.
            let status = loop {
                let status = self.queue.submit_and_wait(sqe, HANG).unwrap().status();
                if status.is_success() || status.do_not_retry() {
                    break status;
                }
            };
            assert!(status.is_success(), "{status}");
            self.slots[index].check(block_size);
        }
    }
}

impl Slot {
    fn check(&self, block_size: usize) {
        let offset = (first_prp(&self.prepared.pointer) - self.buffer.gpa()) as usize;
        let len = self.blocks as usize * block_size;
        let mut want = vec![0; len];
        rng::fill_blocks(&mut want, self.tag, self.slba, block_size);
        let got = self.buffer.to_vec(offset, len);
        if let Some(at) = (0..len).find(|&at| got[at] != want[at]) {
            panic!(
                "block {} of {}+{} is not what was written: byte {at} of the command",
                self.slba + (at / block_size) as u64,
                self.slba,
                self.blocks
            );
        }
    }
}

/// Returns PRP1 of a data pointer.
fn first_prp(pointer: &DataPointer) -> u64 {
    Sqe::new(0, 0).with_data(*pointer).0[3]
}

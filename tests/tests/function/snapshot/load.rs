//! A guest that writes and reads back with many commands in flight. It continues when its function moves.

use std::time::Instant;

use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::completion::Cqe;
use nvme_mpt_tests::controller::{Controller, QueueOptions};
use nvme_mpt_tests::memory::DmaBuffer;
use nvme_mpt_tests::prp::{self, PreparedPointer};
use nvme_mpt_tests::queue::QueuePair;
use nvme_mpt_tests::rng::{Rng, fill_blocks};

use crate::common::{HANG, Machine};

/// Size of a command in bytes.
const PIECE: usize = 16 << 10;

/// A range of blocks that is used by one command at a time.
struct CommandRange {
    slba: u64,
    data: DmaBuffer,
    /// Buffer with its data pointer.
    prepared: PreparedPointer,
    /// Tag of the last write, if there was any.
    tag: Option<u64>,
    in_flight: Option<Command>,
}

#[derive(Clone, Copy)]
enum Command {
    Write(u64),
    Read,
}

/// A queue pair, and the ranges of its commands, by command identifier.
struct Lane {
    queue: QueuePair,
    places: Vec<CommandRange>,
}

/// A guest under load.
pub(super) struct Load {
    pub(super) controller: Controller,
    lanes: Vec<Lane>,
    block_size: usize,
    rng: Rng,
    tags: u64,
    completed: u64,
}

impl Load {
    /// Creates a guest with interrupt-driven queue pairs of this size.
    pub(super) fn new(machine: &Machine, queues: u16, entries: u32, seed: u64) -> Self {
        let mut controller = machine.attach();
        let block_size = controller.identify_namespace(1).unwrap().block_size as usize;
        let blocks = (PIECE / block_size) as u64;
        let mut next = 0;
        let mut lane = |id: u16| {
            let interrupt = machine.interrupts[usize::from(id)].clone();
            let options = QueueOptions::interrupting(entries, id, interrupt);
            let queue = controller.create_queue_pair(id, &options).unwrap();
            let places = (1..entries).map(|_| {
                next += 1;
                let data = machine.memory.alloc(PIECE).unwrap();
                CommandRange {
                    slba: (next - 1) * blocks,
                    prepared: prp::buffer(&data, 0, PIECE).unwrap(),
                    data,
                    tag: None,
                    in_flight: None,
                }
            });
            let places = places.collect();
            Lane { queue, places }
        };
        let lanes = (1..=queues).map(&mut lane).collect();
        Self {
            controller,
            lanes,
            block_size,
            rng: Rng::new(seed),
            tags: 0,
            completed: 0,
        }
    }

    /// Submits commands: with `full`, until every queue is full, otherwise some.
    pub(super) fn submit(&mut self, full: bool) {
        let (rng, block_size) = (&mut self.rng, self.block_size);
        let blocks = (PIECE / block_size) as u32;
        for lane in &mut self.lanes {
            for (cid, place) in (0..).zip(&mut lane.places) {
                if place.in_flight.is_some() || !full && rng.below(2) == 0 {
                    continue;
                }
                let command = match place.tag {
                    Some(_) if rng.below(2) == 0 => Command::Read,
                    _ => {
                        self.tags += 1;
                        Command::Write(self.tags)
                    }
                };
                let sqe = match command {
                    Command::Write(tag) => {
                        place.data.write(0, &content(tag, place.slba, block_size));
                        Sqe::write(1, place.slba, blocks)
                    }
                    Command::Read => {
                        place.data.fill(0xEE);
                        Sqe::read(1, place.slba, blocks)
                    }
                };
                let sqe = sqe.with_data(place.prepared.pointer).with_cid(cid);
                assert!(lane.queue.push(&sqe), "a command per entry");
                place.in_flight = Some(command);
            }
            lane.queue.ring();
        }
    }

    /// Takes and checks completions. Without `ring`, the head doorbells stay unwritten, so that queues stay full.
    pub(super) fn reap(&mut self, ring: bool) {
        let block_size = self.block_size;
        for lane in &mut self.lanes {
            while let Some(cqe) = lane.queue.poll() {
                lane.completed(cqe, block_size);
                self.completed += 1;
            }
            if ring {
                lane.queue.ring();
            }
        }
    }

    /// Waits until no command is in flight.
    #[track_caller]
    pub(super) fn drain(&mut self) {
        let deadline = Instant::now() + HANG;
        while self.in_flight() > 0 {
            assert!(
                Instant::now() < deadline,
                "{} commands never completed",
                self.in_flight()
            );
            self.reap(true);
            std::thread::sleep(std::time::Duration::from_micros(20));
        }
    }

    /// Waits for interrupts as a sleeping driver does. A lost interrupt causes a hang.
    #[track_caller]
    pub(super) fn drain_by_interrupts(&mut self) {
        for lane in &mut self.lanes {
            let interrupt = lane.queue.cq.interrupt().unwrap().clone();
            loop {
                while let Some(cqe) = lane.queue.poll() {
                    lane.completed(cqe, self.block_size);
                    self.completed += 1;
                }
                lane.queue.ring();
                if lane.places.iter().all(|place| place.in_flight.is_none()) {
                    break;
                }
                assert_ne!(interrupt.wait(HANG).unwrap(), 0, "an interrupt was lost");
            }
        }
    }

    /// Reads back and checks all written data.
    #[track_caller]
    pub(super) fn verify(&mut self) {
        self.drain();
        let blocks = (PIECE / self.block_size) as u32;
        for lane in &mut self.lanes {
            for place in &mut lane.places {
                let Some(tag) = place.tag else { continue };
                place.data.fill(0xEE);
                let sqe = Sqe::read(1, place.slba, blocks).with_data(place.prepared.pointer);
                lane.queue.execute(sqe, HANG).unwrap();
                place.check(tag, self.block_size);
            }
        }
    }

    /// Returns the number of commands in flight.
    pub(super) fn in_flight(&self) -> usize {
        let places = self.lanes.iter().flat_map(|lane| &lane.places);
        places.filter(|place| place.in_flight.is_some()).count()
    }

    /// Returns the number of completions so far.
    pub(super) fn completed(&self) -> u64 {
        self.completed
    }

    /// Moves the guest's driver to another machine.
    pub(super) fn move_to(&mut self, machine: &Machine) {
        self.controller.move_to(machine.bar()).unwrap();
        for lane in &mut self.lanes {
            lane.queue.move_to(&machine.bar()).unwrap();
        }
    }
}

impl Lane {
    #[track_caller]
    fn completed(&mut self, cqe: Cqe, block_size: usize) {
        assert!(cqe.status().is_success(), "{cqe:?}");
        let place = &mut self.places[usize::from(cqe.cid())];
        match place.in_flight.take().expect("a command completes once") {
            Command::Write(tag) => place.tag = Some(tag),
            Command::Read => place.check(place.tag.unwrap(), block_size),
        }
    }
}

impl CommandRange {
    #[track_caller]
    fn check(&self, tag: u64, block_size: usize) {
        let found = self.data.to_vec(0, PIECE);
        assert!(
            found == content(tag, self.slba, block_size),
            "LBA {:#x} has something else than was written last",
            self.slba
        );
    }
}

fn content(tag: u64, slba: u64, block_size: usize) -> Vec<u8> {
    let mut bytes = vec![0; PIECE];
    fill_blocks(&mut bytes, tag, slba, block_size);
    bytes
}

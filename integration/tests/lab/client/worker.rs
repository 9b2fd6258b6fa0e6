//! A client's thread: a controller, its queues, and a slot for each outstanding command.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::time::{Duration, Instant};

use nvme_mpt_tests::Error;
use nvme_mpt_tests::bar::Bar;
use nvme_mpt_tests::command::{DataPointer, Sqe};
use nvme_mpt_tests::completion::Cqe;
use nvme_mpt_tests::controller::{Config, Controller, QueueOptions};
use nvme_mpt_tests::doorbell::DoorbellMode;
use nvme_mpt_tests::memory::{DmaBuffer, GuestMemory};
use nvme_mpt_tests::prp;
use nvme_mpt_tests::queue::QueuePair;
use nvme_mpt_tests::rng::Rng;
use nvme_mpt_tests::sgl;
use nvme_mpt_tests::vfio_user::VfioUserBar;

use super::{ClientWork, Contents, Counts, Order, Outcome, Progress};
use crate::fixture::{Failure, expect};

/// Start of guest memory, above 4 GiB as most memory of large guests.
const MEMORY_BASE: u64 = 1 << 32;
const MEMORY: u64 = 32 << 20;
/// Namespace identifier of a function.
const NSID: u32 = 1;
/// Maximum number of retries of a command (Linux: `nvme_core.max_retries`).
const RETRIES: u32 = 5;
/// Timeout without a completion, equal to Linux's I/O timeout before a controller reset.
const HANG: Duration = Duration::from_secs(30);
/// Time without a completion after which the client checks whether the device still exists.
const DEVICE_CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Time for which memory is watched for writes by the device.
const MEMORY_WATCH_TIME: Duration = Duration::from_millis(300);
/// Byte that fills watched memory.
const SENTINEL: u8 = 0xA5;
/// Number of low bits of a command identifier that hold the slot. The other bits count the slot's commands, so a duplicate
/// completion is not taken for the next command's.
const SLOT_BITS: u32 = 8;

/// A command of the guest.
#[derive(Clone, Copy, Debug)]
struct Command {
    place: usize,
    /// Generation that the command writes, or `None` for a read.
    write: Option<u64>,
    attempts: u32,
    cid: u16,
}

/// Resources of one outstanding command.
struct Slot {
    queue: usize,
    buffer: DmaBuffer,
    pointer: DataPointer,
    /// PRP or SGL lists that the pointer refers to.
    _lists: Vec<DmaBuffer>,
    sequence: u16,
    command: Option<Command>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Fill,
    Mix,
    /// Submits no new commands.
    Drain,
    Check,
}

pub(super) struct Worker {
    work: ClientWork,
    progress: Arc<Progress>,
    memory: GuestMemory,
    device: Option<Device>,
    slots: Vec<Slot>,
    contents: Contents,
    counts: Counts,
    rng: Rng,
    phase: Phase,
    /// Next place of a sequential phase.
    next: usize,
    /// For each place, true if a command is outstanding. A place has at most one.
    busy: Vec<bool>,
}

/// Resources of a connection.
struct Device {
    bar: Arc<VfioUserBar>,
    controller: Controller,
    queues: Vec<QueuePair>,
}

impl Device {
    fn start(&mut self, work: &ClientWork) -> Result<(), Failure> {
        self.controller.enable()?;
        let granted = self.controller.set_number_of_queues(work.queues)?;
        expect(granted >= work.queues, || {
            format!("{granted} queue pairs are granted")
        })?;
        self.controller.configure_doorbell_buffer(&mut [])?;
        for id in 1..=work.queues {
            let options = QueueOptions::polled(64);
            self.queues
                .push(self.controller.create_queue_pair(id, &options)?);
        }
        Ok(())
    }
}

impl Worker {
    pub(super) fn attach(
        socket: &Path,
        work: ClientWork,
        progress: Arc<Progress>,
    ) -> Result<Self, Failure> {
        let memory = GuestMemory::new(&[(MEMORY_BASE, MEMORY)])?;
        let bar = Arc::new(VfioUserBar::attach(socket, &memory)?);
        let config = Config {
            doorbells: DoorbellMode::Shadow,
            ..Config::default()
        };
        let registers: Arc<dyn Bar> = bar.clone();
        let mut controller = Controller::new(registers, memory.clone(), config);
        controller.disable()?;
        let mut device = Device {
            bar,
            controller,
            queues: Vec::new(),
        };
        device.start(&work)?;
        let namespace = device.controller.identify_namespace(NSID)?;
        let contents = Contents::new(&work, namespace.block_size as usize);
        let block_slots = namespace.nsze / u64::from(contents.blocks());
        expect(block_slots >= work.places as u64, || {
            format!(
                "A range with room for {block_slots} commands, not {}",
                work.places
            )
        })?;
        let mut slots = Vec::new();
        for queue in 0..usize::from(work.queues) {
            for _ in 0..work.depth {
                slots.push(Slot::new(&memory, queue, &work)?);
            }
        }
        Ok(Self {
            progress,
            memory,
            device: Some(device),
            slots,
            contents,
            counts: Counts::default(),
            rng: Rng::new(work.seed),
            phase: Phase::Fill,
            next: 0,
            busy: vec![false; work.places],
            work,
        })
    }

    pub(super) fn run(
        mut self,
        orders: &Receiver<(Order, Sender<()>)>,
    ) -> Result<Outcome, Failure> {
        let mut last = Instant::now();
        loop {
            match orders.try_recv() {
                Ok((order, done)) => {
                    let ended = self.execute(order)?;
                    last = Instant::now();
                    // The receiver may have stopped waiting.
                    let _ = done.send(());
                    if ended {
                        return Ok(self.outcome());
                    }
                }
                // The check has ended.
                Err(TryRecvError::Disconnected) => return Ok(self.outcome()),
                Err(TryRecvError::Empty) => {}
            }
            if self.device.is_none() {
                std::thread::sleep(DEVICE_CHECK_INTERVAL);
                continue;
            }
            self.submit_all()?;
            let outstanding = self.outstanding();
            if self.take_completions()? > 0 {
                self.counts.longest_pause = self.counts.longest_pause.max(last.elapsed());
                last = Instant::now();
            } else if outstanding == 0 {
                last = Instant::now();
                match self.phase {
                    Phase::Fill => self.phase = Phase::Mix,
                    Phase::Drain => (self.phase, self.next) = (Phase::Check, 0),
                    Phase::Check => {
                        self.disable()?;
                        return Ok(self.outcome());
                    }
                    Phase::Mix => {}
                }
            } else {
                if last.elapsed() > DEVICE_CHECK_INTERVAL && self.is_gone()? {
                    self.counts.longest_pause = self.counts.longest_pause.max(last.elapsed());
                    self.withdraw();
                    return Ok(self.outcome());
                }
                // After the timeout, the thread ends, and the caller sees the lost commands.
                if last.elapsed() > HANG {
                    self.counts.longest_pause = last.elapsed();
                    return Ok(self.outcome());
                }
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }

    fn outcome(self) -> Outcome {
        Outcome {
            counts: self.counts,
            contents: self.contents,
        }
    }

    fn outstanding(&self) -> usize {
        let taken = self.slots.iter().filter(|slot| slot.command.is_some());
        taken.count()
    }

    fn device(&mut self) -> Result<&mut Device, Failure> {
        self.device.as_mut().ok_or_else(|| Error::Gone.into())
    }

    fn is_gone(&mut self) -> Result<bool, Failure> {
        match self.device()?.controller.status() {
            Ok(_) => Ok(false),
            Err(Error::Gone) => Ok(true),
            Err(error) => Err(error.into()),
        }
    }

    fn disable(&mut self) -> Result<(), Failure> {
        Ok(self.device()?.controller.disable()?)
    }

    /// Returns place and kind of the next command, if the phase has one.
    fn choose(&mut self) -> Option<(usize, bool)> {
        match self.phase {
            Phase::Fill | Phase::Check => {
                let place = self.next;
                self.next += 1;
                (place < self.contents.places()).then_some((place, self.phase == Phase::Fill))
            }
            Phase::Mix => {
                let random = self.rng.next_u64();
                let places = self.contents.places();
                let start = (random >> 1) as usize % places;
                let place = (start..places)
                    .chain(0..start)
                    .find(|place| !self.busy[*place])?;
                Some((place, random & 1 == 0))
            }
            Phase::Drain => None,
        }
    }

    fn submit_all(&mut self) -> Result<(), Failure> {
        for index in 0..self.slots.len() {
            if self.slots[index].command.is_some() {
                continue;
            }
            let Some((place, writes)) = self.choose() else {
                break;
            };
            self.busy[place] = true;
            self.counts.submitted += 1;
            let write = writes.then(|| self.contents.start_write(place));
            self.send(index, place, write, 0)?;
        }
        for queue in &mut self.device()?.queues {
            queue.ring();
        }
        Ok(())
    }

    fn send(
        &mut self,
        index: usize,
        place: usize,
        write: Option<u64>,
        attempts: u32,
    ) -> Result<(), Failure> {
        let (slba, blocks) = (self.contents.slba(place), self.contents.blocks());
        let slot = &mut self.slots[index];
        let sqe = match write {
            Some(generation) => {
                slot.buffer.write(0, &self.contents.data(place, generation));
                Sqe::write(NSID, slba, blocks)
            }
            None => {
                slot.buffer.fill(SENTINEL);
                Sqe::read(NSID, slba, blocks)
            }
        };
        slot.sequence = slot.sequence.wrapping_add(1) & 0x7f;
        let cid = slot.sequence << SLOT_BITS | index as u16;
        slot.command = Some(Command {
            place,
            write,
            attempts,
            cid,
        });
        let sqe = sqe.with_data(slot.pointer).with_cid(cid);
        let queue = slot.queue;
        let queue = &mut self.device()?.queues[queue];
        expect(queue.push(&sqe), || format!("Queue {} is full", queue.id()))
    }

    /// Takes completions, and returns their number.
    fn take_completions(&mut self) -> Result<usize, Failure> {
        let mut taken = 0;
        for queue in 0..usize::from(self.work.queues) {
            while let Some(cqe) = self.device()?.queues[queue].poll() {
                taken += 1;
                self.complete(queue, cqe)?;
            }
        }
        for queue in &mut self.device()?.queues {
            queue.ring();
        }
        Ok(taken)
    }

    fn complete(&mut self, queue: usize, cqe: Cqe) -> Result<(), Failure> {
        let index = usize::from(cqe.cid() & ((1 << SLOT_BITS) - 1));
        let slot = self.slots.get_mut(index).filter(|slot| {
            slot.queue == queue && slot.command.is_some_and(|command| command.cid == cqe.cid())
        });
        let Some((slot, command)) = slot.and_then(|slot| {
            let command = slot.command.take()?;
            Some((slot, command))
        }) else {
            self.counts.doubled += 1;
            return Ok(());
        };
        let Command { place, write, .. } = command;
        let status = cqe.status();
        if !status.is_success() && !status.do_not_retry() && command.attempts < RETRIES {
            self.counts.retried += 1;
            return self.send(index, place, write, command.attempts + 1);
        }
        self.busy[place] = false;
        if !status.is_success() {
            self.counts.errors += 1;
            self.progress.errors.fetch_add(1, Ordering::Relaxed);
            let status = status.to_string();
            if !self.counts.statuses.contains(&status) {
                self.counts.statuses.push(status);
            }
            if let Some(generation) = write {
                self.contents.record_uncertain_write(place, generation);
            }
            return Ok(());
        }
        match write {
            Some(generation) => self.contents.record_write(place, generation),
            None => {
                let read = slot.buffer.to_vec(0, self.work.bytes);
                self.contents.check(place, &read)?;
            }
        }
        self.counts.completed += 1;
        self.progress.completed.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Withdraws outstanding commands, which will not complete.
    fn withdraw(&mut self) {
        for slot in &mut self.slots {
            if let Some(command) = slot.command.take() {
                self.counts.withdrawn += 1;
                self.busy[command.place] = false;
                if let Some(generation) = command.write {
                    self.contents
                        .record_uncertain_write(command.place, generation);
                }
            }
        }
    }

    /// Executes an order. Returns whether the client has ended.
    fn execute(&mut self, order: Order) -> Result<bool, Failure> {
        match order {
            Order::Finish => {
                if self.phase == Phase::Fill {
                    return Err(Failure::from("It has not written its range yet"));
                }
                self.phase = Phase::Drain;
                Ok(false)
            }
            Order::Reset => self.reset().map(|()| false),
            Order::TakeMemory => {
                self.await_outstanding()?;
                for region in self.memory.regions() {
                    self.device()?.bar.dma_unmap(&region)?;
                }
                self.watch_memory("its memory was unmapped")?;
                self.withdraw();
                self.device = None;
                Ok(true)
            }
            Order::Vanish => {
                self.await_outstanding()?;
                self.device = None;
                Ok(false)
            }
            Order::LookAtMemory => {
                self.watch_memory("the server had noticed that it was gone")?;
                self.withdraw();
                Ok(true)
            }
        }
    }

    /// Ensures that commands are in flight before the client interrupts them.
    fn await_outstanding(&mut self) -> Result<(), Failure> {
        self.submit_all()?;
        expect(self.outstanding() > 0, || "Nothing is in flight".to_owned())
    }

    fn reset(&mut self) -> Result<(), Failure> {
        self.await_outstanding()?;
        self.disable()?;
        // Commands that were in flight must have no further effect.
        self.watch_memory("its controller was disabled")?;
        let work = self.work;
        let device = self.device()?;
        device.queues.clear();
        device.start(&work)?;
        for index in 0..self.slots.len() {
            if let Some(Command { place, write, .. }) = self.slots[index].command {
                self.counts.retried += 1;
                self.send(index, place, write, 0)?;
            }
        }
        for queue in &mut self.device()?.queues {
            queue.ring();
        }
        Ok(())
    }

    /// Checks that data buffers and queues are no longer written.
    fn watch_memory(&self, since: &str) -> Result<(), Failure> {
        let queues = self.device.iter().flat_map(|device| &device.queues);
        let rings = queues.map(|queue| queue.cq.memory());
        let buffers: Vec<&DmaBuffer> = rings.chain(self.slots.iter().map(|s| &s.buffer)).collect();
        for buffer in &buffers {
            buffer.fill(SENTINEL);
        }
        std::thread::sleep(MEMORY_WATCH_TIME);
        let written = buffers.iter().find(|buffer| {
            let bytes = buffer.to_vec(0, buffer.len());
            bytes.iter().any(|byte| *byte != SENTINEL)
        });
        expect(written.is_none(), || {
            format!("Memory was written after {since}")
        })
    }
}

impl Slot {
    fn new(memory: &GuestMemory, queue: usize, work: &ClientWork) -> Result<Self, Failure> {
        let buffer = memory.alloc(work.bytes)?;
        let prepared = if work.sgl {
            // The second part does not begin at a page boundary, which PRPs would require.
            let first = work.bytes / 2 + 512;
            let second = buffer.gpa() + first as u64;
            let list = [
                sgl::data_block(buffer.gpa(), first as u32),
                sgl::data_block(second, (work.bytes - first) as u32),
            ];
            sgl::build(memory, &list, list.len())?
        } else {
            prp::buffer(&buffer, 0, work.bytes)?
        };
        Ok(Self {
            queue,
            buffer,
            pointer: prepared.pointer,
            _lists: prepared.pages,
            sequence: 0,
            command: None,
        })
    }
}

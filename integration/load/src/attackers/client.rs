//! A guest driver for one function.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::controller::{Config, Controller, QueueOptions};
use nvme_mpt_tests::doorbell::DoorbellMode;
use nvme_mpt_tests::interrupt::Interrupt;
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::queue::QueuePair;
use nvme_mpt_tests::vfio_user::VfioUserBar;

use super::error::AttackError;

/// Namespace of each function.
pub(super) const NSID: u32 = 1;
/// Interrupt vector of I/O queues.
const VECTOR: u16 = 1;
/// Number of entries of an I/O queue.
const ENTRIES: u32 = 64;
/// Guest physical address of the guest's memory.
const MEMORY_BASE: u64 = 1 << 32;
/// Sleep of an attacker without work.
const PAUSE: Duration = Duration::from_micros(50);
/// Timeout of in-flight commands at the end of an attack.
const END_TIMEOUT: Duration = Duration::from_secs(60);

/// A connected guest with an enabled controller.
pub(super) struct GuestClient {
    pub(super) name: String,
    pub(super) controller: Controller,
    pub(super) memory: GuestMemory,
    pub(super) block_size: u64,
    pub(super) blocks: u64,
    /// Interrupt vectors: of the admin queue, and of the I/O queues.
    pub(super) vectors: [Arc<Interrupt>; 2],
}

impl GuestClient {
    /// Connects a guest with `memory` bytes of memory and up to `queues` I/O queues. `interrupt` is the vector of the I/O
    /// queues.
    pub(super) fn connect(
        socket: &Path,
        memory: u64,
        queues: u16,
        interrupt: Interrupt,
    ) -> Result<Self, AttackError> {
        let who = socket.file_stem().unwrap_or_default();
        let who = who.to_string_lossy().into_owned();
        let failed = AttackError::driver_error(&who);
        let memory = GuestMemory::new(&[(MEMORY_BASE, memory)])?;
        let bar = VfioUserBar::attach(socket, &memory).map_err(&failed)?;
        let admin = Interrupt::new().map_err(AttackError::system_error("Making an eventfd"))?;
        let vectors = [admin, interrupt].map(Arc::new);
        bar.enable_msix(vectors.iter().map(Arc::as_ref))
            .map_err(&failed)?;
        let config = Config {
            doorbells: DoorbellMode::Shadow,
            ..Config::default()
        };
        let mut controller =
            Controller::attach(Arc::new(bar), memory.clone(), config, queues).map_err(&failed)?;
        let namespace = controller.identify_namespace(NSID).map_err(&failed)?;
        Ok(Self {
            name: who,
            controller,
            memory,
            block_size: u64::from(namespace.block_size),
            blocks: namespace.nsze,
            vectors,
        })
    }

    /// Creates an I/O queue pair. With `interrupts`, each completion signals the vector.
    pub(super) fn queue(&mut self, id: u16, interrupts: bool) -> Result<QueuePair, AttackError> {
        let options = match interrupts {
            true => QueueOptions::interrupting(ENTRIES, VECTOR, Arc::clone(&self.vectors[1])),
            false => QueueOptions::polled(ENTRIES),
        };
        let queue = self.controller.create_queue_pair(id, &options);
        queue.map_err(AttackError::driver_error(&self.name))
    }

    /// Returns the read with this number, without a data pointer. Each read has `bytes` bytes. Consecutive numbers read
    /// consecutive blocks, and continue at the start after the end of the namespace.
    pub(super) fn read(&self, number: u64, bytes: u64) -> Sqe {
        let blocks = bytes / self.block_size;
        let places = (self.blocks / blocks).max(1);
        Sqe::read(NSID, number % places * blocks, blocks as u32)
    }
}

/// Keeps `depth` commands in flight in each queue until `stop` is set. Ignores the status of completions. Returns their
/// number.
pub(super) fn keep_busy(
    queues: &mut [QueuePair],
    depth: usize,
    mut command: impl FnMut(u64) -> Sqe,
    stop: &AtomicBool,
) -> u64 {
    let (mut submitted, mut completed) = (0, 0);
    let mut in_flight = vec![0_usize; queues.len()];
    let mut end = None;
    // Waits for the in-flight commands, so that the quiet half of the next round is quiet.
    loop {
        let mut has_moved = false;
        if end.is_none() && stop.load(Ordering::Relaxed) {
            end = Some(Instant::now() + END_TIMEOUT);
        }
        let is_idle = in_flight.iter().all(|&count| count == 0);
        if end.is_some_and(|end| is_idle || Instant::now() > end) {
            return completed;
        }
        for (queue, in_flight) in queues.iter_mut().zip(&mut in_flight) {
            while queue.poll().is_some() {
                *in_flight = in_flight.saturating_sub(1);
                completed += 1;
                has_moved = true;
            }
            while end.is_none() && *in_flight < depth && queue.submit(command(submitted)).is_ok() {
                *in_flight += 1;
                submitted += 1;
                has_moved = true;
            }
            queue.ring();
        }
        if !has_moved {
            std::thread::sleep(PAUSE);
        }
    }
}

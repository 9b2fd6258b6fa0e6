//! A guest without a machine: a vfio-user client that drives its function like an operating system. It tracks the outcome of
//! each command, and the expected contents of each block of its range.
//!
//! - [`Client`] is the handle: it starts the client, sends orders, and collects counts;
//! - `worker`: the client's thread; `contents`: expected contents of the blocks.
//!
//! A command that fails without Do Not Retry is sent again up to five times, as in Linux.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::fixture::{Failure, TIMEOUT, expect};

mod contents;
mod worker;

pub(crate) use contents::Contents;
use worker::Worker;

/// Completed commands after which a client counts as running.
const RUNNING_AFTER: u64 = 40;

/// Work of a client: half reads and half writes, at random places of its range.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClientWork {
    /// Number of I/O queue pairs.
    pub(crate) queues: u16,
    /// Outstanding commands of each queue pair.
    pub(crate) depth: usize,
    /// Bytes of a command.
    pub(crate) bytes: usize,
    /// Number of places for commands, contiguous from the start of the range.
    pub(crate) places: usize,
    /// Seed of addresses and data.
    pub(crate) seed: u64,
    /// True if SGLs with two blocks per command describe the data instead of PRPs.
    pub(crate) sgl: bool,
}

impl ClientWork {
    /// Returns work that completes a few hundred commands a second in the lab.
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            queues: 1,
            depth: 8,
            bytes: 8 << 10,
            places: 128,
            seed,
            sgl: false,
        }
    }
}

/// Outcomes of a client's commands. Retries count as the same command.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counts {
    /// Commands that were submitted.
    pub(crate) submitted: u64,
    /// Commands that succeeded.
    pub(crate) completed: u64,
    /// Number of retries.
    pub(crate) retried: u64,
    /// Commands that ended in an error.
    pub(crate) errors: u64,
    /// Commands that the guest abandoned when it or its server ended.
    pub(crate) withdrawn: u64,
    /// Completions of commands that were not outstanding, such as duplicates.
    pub(crate) doubled: u64,
    /// Longest time without a completion while commands were outstanding.
    pub(crate) longest_pause: Duration,
    /// Statuses of the errors.
    pub(crate) statuses: Vec<String>,
}

impl Counts {
    /// Returns the number of commands without any outcome.
    pub(crate) fn lost_commands(&self) -> u64 {
        let ended = self.completed + self.errors + self.withdrawn;
        self.submitted.saturating_sub(ended)
    }

    /// Returns the number of commands with another outcome than one success: errors, retries, withdrawals, duplicates and
    /// losses.
    pub(crate) fn anomalies(&self) -> u64 {
        self.errors + self.retried + self.withdrawn + self.doubled + self.lost_commands()
    }

    /// Returns the sum of two clients' counts.
    pub(crate) fn sum_with(&self, other: &Self) -> Self {
        Self {
            submitted: self.submitted + other.submitted,
            completed: self.completed + other.completed,
            retried: self.retried + other.retried,
            errors: self.errors + other.errors,
            withdrawn: self.withdrawn + other.withdrawn,
            doubled: self.doubled + other.doubled,
            longest_pause: self.longest_pause.max(other.longest_pause),
            statuses: self
                .statuses
                .iter()
                .chain(&other.statuses)
                .cloned()
                .collect(),
        }
    }
}

/// Result of a client.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) counts: Counts,
    /// Expected contents of its range.
    pub(crate) contents: Contents,
}

/// Order to a running client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// Resets the controller with commands in flight, checks that the device no longer writes to memory, and continues.
    Reset,
    /// Unmaps the memory with commands in flight, checks that the device no longer writes to it, and disconnects.
    TakeMemory,
    /// Closes the connection with commands in flight, and waits.
    Vanish,
    /// Checks that memory was not written since [`Order::Vanish`], and ends.
    LookAtMemory,
    /// Stops submitting, waits for outstanding commands, verifies the range, and ends.
    Finish,
}

/// Progress that the client's thread publishes.
#[derive(Debug, Default)]
struct Progress {
    completed: AtomicU64,
    errors: AtomicU64,
}

/// A client that runs on its own thread.
#[derive(Debug)]
pub(crate) struct Client {
    name: &'static str,
    progress: Arc<Progress>,
    orders: Sender<(Order, Sender<()>)>,
    thread: JoinHandle<Result<Outcome, Failure>>,
}

impl Client {
    /// Connects to a function, writes every place of the range, and works until the next order.
    pub(crate) fn start(
        name: &'static str,
        socket: &Path,
        work: ClientWork,
    ) -> Result<Self, Failure> {
        let progress = Arc::new(Progress::default());
        let (orders, receiver) = mpsc::channel();
        let worker = Worker::attach(socket, work, Arc::clone(&progress))?;
        let thread = std::thread::spawn(move || worker.run(&receiver));
        Ok(Self {
            name,
            progress,
            orders,
            thread,
        })
    }

    /// Returns the number of completed commands so far.
    pub(crate) fn completed(&self) -> u64 {
        self.progress.completed.load(Ordering::Relaxed)
    }

    /// Returns the number of commands that ended in an error so far.
    pub(crate) fn errors(&self) -> u64 {
        self.progress.errors.load(Ordering::Relaxed)
    }

    /// Waits until the client has completed `RUNNING_AFTER` more commands.
    pub(crate) fn advance(&self) -> Result<(), Failure> {
        let enough = self.completed() + RUNNING_AFTER;
        self.wait_for("to complete commands", || self.completed() >= enough)
    }

    /// Waits until `condition` returns true, or the client has ended.
    pub(crate) fn wait_for(&self, what: &str, condition: impl Fn() -> bool) -> Result<(), Failure> {
        let deadline = Instant::now() + TIMEOUT;
        while !condition() {
            let running = !self.thread.is_finished() && Instant::now() < deadline;
            // `finish` returns the cause.
            expect(running || self.thread.is_finished(), || {
                format!("Guest {} was waited for in vain {what}", self.name)
            })?;
            if !running {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    fn order(&self, order: Order) -> Result<(), Failure> {
        let (done, wait): (Sender<()>, Receiver<()>) = mpsc::channel();
        // The result of a thread that has ended is returned by `join`.
        let _ = self.orders.send((order, done));
        // Returns when the order was executed or the thread has ended.
        let _ = wait.recv_timeout(TIMEOUT);
        Ok(())
    }

    /// Resets the controller with commands in flight.
    pub(crate) fn reset(&self) -> Result<(), Failure> {
        self.order(Order::Reset)
    }

    /// Closes the connection with commands in flight, as when a VMM is killed.
    pub(crate) fn vanish(&self) -> Result<(), Failure> {
        self.order(Order::Vanish)
    }

    /// Checks that memory was not written since [`Client::vanish`]. Call this after the server has noticed the disconnection.
    pub(crate) fn check_memory_after_vanish(self) -> Result<Outcome, Failure> {
        self.order(Order::LookAtMemory)?;
        self.join()
    }

    /// Unmaps the memory with commands in flight, and ends.
    pub(crate) fn unmap_and_end(self) -> Result<Outcome, Failure> {
        self.order(Order::TakeMemory)?;
        self.join()
    }

    /// Ends the client in order: every command completes, and every place is verified.
    pub(crate) fn finish(self) -> Result<Outcome, Failure> {
        self.order(Order::Finish)?;
        self.join()
    }

    /// Waits for a client that ends for another reason.
    pub(crate) fn join(self) -> Result<Outcome, Failure> {
        match self.thread.join() {
            Ok(result) => result.map_err(|failure| {
                let cause = integration::error_chain(&*failure);
                Failure::from(format!("Guest {}: {cause}", self.name))
            }),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

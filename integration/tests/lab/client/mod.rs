//! A guest without a machine around it: a vfio-user client that drives its function as an operating system
//! does. It counts what becomes of each of its commands, and knows what each block of its range must hold.
//!
//! - [`Client`] is the handle: it starts one, gives it orders, and collects its counts;
//! - `worker`: its thread; `contents`: what the blocks must hold.
//!
//! A command that ends in an error without Do Not Retry is sent again, up to five times, as Linux does.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::fixture::{Failure, PATIENCE, expect};

mod contents;
mod worker;

pub(crate) use contents::Contents;
use worker::Worker;

/// Commands that complete before a client counts as under way.
const UNDER_WAY: u64 = 40;

/// Work of a client: reads and writes, half of each, at random places of its range.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    /// I/O queue pairs.
    pub(crate) queues: u16,
    /// Commands outstanding in each.
    pub(crate) depth: usize,
    /// Bytes of a command.
    pub(crate) bytes: usize,
    /// Places for commands, side by side from the start of the range.
    pub(crate) places: usize,
    /// Seed of addresses and data.
    pub(crate) seed: u64,
    /// True if data is described by SGLs, of two blocks for a command, instead of PRPs.
    pub(crate) sgl: bool,
}

impl Work {
    /// Enough for a few hundred commands a second in the lab.
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

/// Fates of a client's commands. One that was sent again is still one command.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counts {
    /// Commands that were started.
    pub(crate) submitted: u64,
    /// Commands that ended well, once.
    pub(crate) completed: u64,
    /// Number of commands that were sent again.
    pub(crate) retried: u64,
    /// Commands that ended in an error.
    pub(crate) errors: u64,
    /// Commands that the guest gave up by going away, or whose server went away.
    pub(crate) withdrawn: u64,
    /// Completions of commands that were not outstanding, such as second ones.
    pub(crate) doubled: u64,
    /// The longest time with commands outstanding in which none completed.
    pub(crate) stall: Duration,
    /// The statuses of the errors.
    pub(crate) statuses: Vec<String>,
}

impl Counts {
    /// Commands of which nothing was heard.
    pub(crate) fn lost(&self) -> u64 {
        let ended = self.completed + self.errors + self.withdrawn;
        self.submitted.saturating_sub(ended)
    }

    /// The counts of two clients together.
    pub(crate) fn and(&self, other: &Self) -> Self {
        Self {
            submitted: self.submitted + other.submitted,
            completed: self.completed + other.completed,
            retried: self.retried + other.retried,
            errors: self.errors + other.errors,
            withdrawn: self.withdrawn + other.withdrawn,
            doubled: self.doubled + other.doubled,
            stall: self.stall.max(other.stall),
            statuses: self
                .statuses
                .iter()
                .chain(&other.statuses)
                .cloned()
                .collect(),
        }
    }
}

/// End of a client.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) counts: Counts,
    /// Content of its range.
    pub(crate) contents: Contents,
}

/// Order to a client while it works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// Resets its controller with commands in flight, sees that the device leaves its memory alone from
    /// then on, and goes on.
    Reset,
    /// Takes its memory from the device with commands in flight, sees that the device leaves it alone from
    /// then on, and goes away.
    TakeMemory,
    /// Closes its connection with commands in flight, and waits.
    Vanish,
    /// Checks that nothing has been written since it vanished, and ends.
    LookAtMemory,
    /// Submits nothing more, waits for what is outstanding, reads all of its range, and ends.
    Finish,
}

/// State that the client's thread shows while it runs.
#[derive(Debug, Default)]
struct Progress {
    completed: AtomicU64,
    errors: AtomicU64,
}

/// A client at work in a thread of its own.
#[derive(Debug)]
pub(crate) struct Client {
    name: &'static str,
    progress: Arc<Progress>,
    orders: Sender<(Order, Sender<()>)>,
    thread: JoinHandle<Result<Outcome, Failure>>,
}

impl Client {
    /// Connects to a function, writes every place of the range, and works on until the next order.
    pub(crate) fn start(name: &'static str, socket: &Path, work: Work) -> Result<Self, Failure> {
        let progress = Arc::new(Progress::default());
        let (orders, inbox) = mpsc::channel();
        let worker = Worker::attach(socket, work, Arc::clone(&progress))?;
        let thread = std::thread::spawn(move || worker.run(&inbox));
        Ok(Self {
            name,
            progress,
            orders,
            thread,
        })
    }

    /// Commands completed so far.
    pub(crate) fn completed(&self) -> u64 {
        self.progress.completed.load(Ordering::Relaxed)
    }

    /// Commands that ended in an error so far.
    pub(crate) fn errors(&self) -> u64 {
        self.progress.errors.load(Ordering::Relaxed)
    }

    /// Waits until it has completed a number of commands from now on.
    pub(crate) fn advance(&self) -> Result<(), Failure> {
        let enough = self.completed() + UNDER_WAY;
        self.wait_for("to complete commands", || self.completed() >= enough)
    }

    /// Waits until it has something to show.
    pub(crate) fn wait_for(&self, what: &str, there: impl Fn() -> bool) -> Result<(), Failure> {
        let deadline = Instant::now() + PATIENCE;
        while !there() {
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
        // A thread that has ended returns its result when it is joined.
        let _ = self.orders.send((order, done));
        // Ends when the order was carried out, and when the thread did.
        let _ = wait.recv_timeout(PATIENCE);
        Ok(())
    }

    /// Resets its controller with commands in flight.
    pub(crate) fn reset(&self) -> Result<(), Failure> {
        self.order(Order::Reset)
    }

    /// Closes its connection with commands in flight, as the death of its VMM does.
    pub(crate) fn vanish(&self) -> Result<(), Failure> {
        self.order(Order::Vanish)
    }

    /// After [`Client::vanish`], when the server has noticed: nothing may have been written since.
    pub(crate) fn look_at_memory(self) -> Result<Outcome, Failure> {
        self.order(Order::LookAtMemory)?;
        self.join()
    }

    /// Takes its memory from the device with commands in flight, and ends.
    pub(crate) fn take_memory(self) -> Result<Outcome, Failure> {
        self.order(Order::TakeMemory)?;
        self.join()
    }

    /// Ends it in order: every command completes, and every place holds what it must.
    pub(crate) fn finish(self) -> Result<Outcome, Failure> {
        self.order(Order::Finish)?;
        self.join()
    }

    /// Waits for its end, where something else is to end it.
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

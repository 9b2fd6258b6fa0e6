//! Load on a function of `nvme-mpt serve`, at native speed: the guest driver of `nvme-mpt-tests` over
//! vfio-user, without a guest around it.
//!
//! - [`options`]: what to run; [`report`]: what came out;
//! - `lane`: one queue pair with its slots, submitting and completing in batches;
//! - `plan`: which command comes next, for plain load and for verified load;
//! - `worker`: threads and their lanes; `pass`: one pass over them; `paced`: single I/Os with pauses between them;
//! - `clock`: latencies, in time stamp counter ticks;
//! - [`attackers`]: what guests notice of a neighbour that attacks.
//!
//! The cost of a command on this side limits the measurements. So entries are prepared once, and a command changes two
//! of their words. Once per batch, the clock is read and the doorbells are rung.

pub mod attackers;
mod clock;
mod lane;
pub mod options;
mod paced;
mod pass;
mod plan;
pub mod report;
mod setup;
mod target;
#[cfg(test)]
mod tests;
mod verified;
mod worker;

use std::sync::Arc;
use std::time::Duration;

use nvme_mpt_tests::bar::Bar;
use nvme_mpt_tests::memory::{GuestMemory, MemoryError};
use nvme_mpt_tests::status::StatusCode;
use nvme_mpt_tests::vfio_user::VfioUserBar;

use options::Options;
use report::Report;
use setup::Vectors;

/// A load that could not be run, or found the device wrong.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The options do not fit the namespace or each other.
    #[error("{0}")]
    Options(String),
    /// The driver failed.
    #[error("The driver failed")]
    Driver(#[from] nvme_mpt_tests::Error),
    /// Memory for the guest could not be had.
    #[error("Memory for the load failed")]
    Memory(#[from] MemoryError),
    /// An operating system call failed.
    #[error("{what} failed")]
    System {
        /// Action that failed.
        what: &'static str,
        /// Its error.
        source: std::io::Error,
    },
    /// A command failed.
    #[error("Opcode {opcode:#04x} at block {slba} on queue {queue} completed with {status}")]
    Command {
        /// Submission queue identifier.
        queue: u16,
        /// Opcode of the command.
        opcode: u8,
        /// Its first block.
        slba: u64,
        /// The status.
        status: StatusCode,
    },
    /// A completion of no command that is outstanding.
    #[error("Queue {queue} completed command {cid}, which is not outstanding")]
    Unexpected {
        /// Submission queue identifier.
        queue: u16,
        /// Command identifier of the completion.
        cid: u16,
    },
    /// Nothing completed for too long.
    #[error(
        "Queue {queue} completed nothing for {after:?}, with {outstanding} commands outstanding"
    )]
    Stalled {
        /// Submission queue identifier.
        queue: u16,
        /// Commands without completion.
        outstanding: usize,
        /// Time after which it happened.
        after: Duration,
    },
    /// A read did not give what was written.
    #[error("Block {lba} does not hold generation {generation} of what was written")]
    Corrupt {
        /// The first wrong block.
        lba: u64,
        /// The expected generation of its content.
        generation: u32,
    },
}

/// Connects to a function's socket and runs the load.
///
/// # Errors
/// Error of a load that cannot be run, or that the device fails.
pub fn run(options: &Options) -> Result<Report, LoadError> {
    let memory = setup::memory(options)?;
    let bar = VfioUserBar::attach(&options.socket, &memory)?;
    let vectors = setup::vectors(options)?;
    if let Some(vectors) = &vectors {
        bar.enable_msix(vectors.iter().map(Arc::as_ref))?;
    }
    run_on(Arc::new(bar), memory, vectors, options)
}

/// Runs the load on a controller that is reached already.
fn run_on(
    bar: Arc<dyn Bar>,
    memory: GuestMemory,
    vectors: Option<Vectors>,
    options: &Options,
) -> Result<Report, LoadError> {
    let (mut controller, mut target) = setup::bring_up(bar, memory, options)?;
    let lanes = setup::lanes(&mut controller, &target, vectors.as_deref(), options)?;
    let calibration = clock::Calibration::start();
    let tallies = worker::run(lanes, &target, options)?;
    target.ticks_per_second = calibration.ticks_per_second();
    controller.disable()?;
    Ok(Report::new(&target, &tallies, options))
}

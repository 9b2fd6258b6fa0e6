//! Load generator for functions of `nvme-mpt serve`. It uses the guest driver of `nvme-mpt-tests` over vfio-user, so it
//! runs at native speed, without a virtual machine.
//!
//! - [`options`]: parameters; [`report`]: results;
//! - `lane`: a queue pair with its slots, with batched submission and completion;
//! - `plan`: choice of the next command, for plain and for verified load;
//! - `worker`: threads and their lanes (queue pairs); `pass`: one pass over lanes; `paced`: single I/Os with pauses;
//! - `clock`: time stamp counter ticks for latencies;
//! - [`attackers`]: effect of attacking guests on their neighbours.
//!
//! The generator's cost per command limits the rate that can be measured. Therefore, entries are prepared once, and a
//! command changes only two words of its entry. A batch of commands reads the clock once, and rings the doorbells once.

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

use options::LoadOptions;
use report::LoadReport;
use setup::Vectors;

/// Errors of a load.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The options contradict the namespace or each other.
    #[error("{0}")]
    Options(String),
    /// The driver failed.
    #[error("The driver failed")]
    Driver(#[from] nvme_mpt_tests::Error),
    /// Guest memory cannot be allocated.
    #[error("Memory for the load failed")]
    Memory(#[from] MemoryError),
    /// An operating system call failed.
    #[error("{what} failed")]
    System {
        /// Action that failed.
        what: &'static str,
        /// Error of the call.
        source: std::io::Error,
    },
    /// A command failed.
    #[error("Opcode {opcode:#04x} at block {slba} on queue {queue} completed with {status}")]
    Command {
        /// Submission queue identifier.
        queue: u16,
        /// Opcode of the command.
        opcode: u8,
        /// First block.
        slba: u64,
        /// Completion status.
        status: StatusCode,
    },
    /// A completion matches no in-flight command.
    #[error("Queue {queue} completed command {cid}, which is not outstanding")]
    Unexpected {
        /// Submission queue identifier.
        queue: u16,
        /// Command identifier of the completion.
        cid: u16,
    },
    /// No command completed in time.
    #[error(
        "Queue {queue} completed nothing for {after:?}, with {outstanding} commands outstanding"
    )]
    Stalled {
        /// Submission queue identifier.
        queue: u16,
        /// Number of in-flight commands.
        outstanding: usize,
        /// Timeout.
        after: Duration,
    },
    /// A read returned wrong data.
    #[error("Block {lba} does not hold generation {generation} of what was written")]
    Corrupt {
        /// First wrong block.
        lba: u64,
        /// Expected generation of the block's content.
        generation: u32,
    },
}

/// Connects to a function's socket and runs the load.
///
/// # Errors
/// The load cannot be run, or the device fails.
pub fn run(options: &LoadOptions) -> Result<LoadReport, LoadError> {
    let memory = setup::memory(options)?;
    let bar = VfioUserBar::attach(&options.socket, &memory)?;
    let vectors = setup::vectors(options)?;
    if let Some(vectors) = &vectors {
        bar.enable_msix(vectors.iter().map(Arc::as_ref))?;
    }
    run_on(Arc::new(bar), memory, vectors, options)
}

/// Runs the load on an accessible controller.
fn run_on(
    bar: Arc<dyn Bar>,
    memory: GuestMemory,
    vectors: Option<Vectors>,
    options: &LoadOptions,
) -> Result<LoadReport, LoadError> {
    let (mut controller, mut target) = setup::bring_up(bar, memory, options)?;
    let lanes = setup::lanes(&mut controller, &target, vectors.as_deref(), options)?;
    let calibration = clock::Calibration::start();
    let tallies = worker::run(lanes, &target, options)?;
    target.ticks_per_second = calibration.ticks_per_second();
    controller.disable()?;
    Ok(LoadReport::new(&target, &tallies, options))
}

//! Errors of the driver.

use nvme_spec::opcode::AdminOpcode;
use nvme_spec::registers::Csts;
use nvme_spec::status::Status;

/// Error of a step of the driver.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DriverError {
    /// The controller was removed or released, or has lost power.
    #[error("The controller is gone: its registers read as all ones")]
    Gone,
    /// The host asks for the controller's function, because the function is being removed or unbound.
    #[error("The host asks for the controller back")]
    RemovalRequested,
    /// The driver is closing, and no longer waits for the controller to become ready.
    #[error("The controller was not ready when its driver closed")]
    Closing,
    /// The controller has lost its commands: its link is down, or another party has reset it.
    #[error(
        "The controller has lost its commands: its registers read as all ones, or it was reset"
    )]
    Lost,
    /// The controller does not support the NVM Command Set.
    #[error("The controller does not support the NVM Command Set (CAP.CSS)")]
    NoNvmCommandSet,
    /// The controller's minimum page size is larger than 4096 bytes.
    #[error(
        "The controller needs memory pages of {min} bytes (CAP.MPSMIN); only 4096 are supported"
    )]
    MemoryPageSize {
        /// Minimum page size of the controller in bytes.
        min: u64,
    },
    /// The controller did not reach a state within the time that the specification allows.
    #[error("The controller did not {state} within {seconds} s; its status is {csts:?}")]
    StateTimeout {
        /// Expected change of state, as a verb: `become ready`.
        state: &'static str,
        /// Timeout in seconds.
        seconds: u64,
        /// Last value of Controller Status (CSTS).
        csts: Csts,
    },
    /// The controller reports a fatal status (CSTS.CFS).
    #[error("The controller reports a fatal error (CSTS.CFS)")]
    Fatal,
    /// An admin command timed out.
    #[error("The controller did not complete the admin command {opcode} within {seconds} s")]
    AdminTimeout {
        /// Opcode of the command.
        opcode: AdminOpcode,
        /// Timeout in seconds.
        seconds: u64,
    },
    /// An admin command failed.
    #[error("The controller refuses the admin command {opcode}: {status}")]
    Admin {
        /// Opcode of the command.
        opcode: AdminOpcode,
        /// Status of the command's completion.
        status: Status,
    },
    /// The queues are not aligned, or do not lie in their memory.
    #[error("The queues are not aligned, or do not lie in their memory")]
    QueueOutsideMemory,
    /// A position is not inside its queue.
    #[error("A position is not inside its queue")]
    InvalidPosition,
}

//! Errors of the driver.

use nvme_spec::registers::Csts;

/// Error of a controller that is driven.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DriverError {
    /// The controller was removed, or has lost power.
    #[error("The controller is gone: its registers read as all ones")]
    Gone,
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
        /// State that was expected.
        state: &'static str,
        /// Timeout in seconds.
        seconds: u64,
        /// Last value of Controller Status (CSTS).
        csts: Csts,
    },
    /// The controller reports a fatal status (CSTS.CFS).
    #[error("The controller reports a fatal error (CSTS.CFS)")]
    Fatal,
}

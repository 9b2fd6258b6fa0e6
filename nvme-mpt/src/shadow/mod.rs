//! Shadow queues: guest queue pairs bound to host queue pairs.
//!
//! [`translate`](self::translate) decides what of a guest's command reaches the host controller,
//! [`queue`](self::queue) moves commands and completions.

mod lists;
mod prp;
mod queue;
mod sgl;
mod slot;
mod translate;

pub(crate) use lists::ListMemory;
pub use queue::ShadowQueue;
pub(crate) use queue::{CompletionQueue, QueueContext, SubmissionQueue};
pub use sgl::MAX_DESCRIPTORS as MAX_SGL_DESCRIPTORS;
pub use translate::LeasedBlocks;

use crate::spec::status::Status;

/// Why a command does not reach the host controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// What the guest is told.
    pub(crate) status: Status,
    /// Byte of the command that is to blame, for the error log.
    pub(crate) location: u16,
}

impl Failure {
    /// The same command would fail again, so the guest is told not to retry.
    pub(crate) const fn at(status: Status, location: u16) -> Self {
        Self {
            status: status.with_dnr(true),
            location,
        }
    }
}

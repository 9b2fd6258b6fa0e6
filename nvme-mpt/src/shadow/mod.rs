//! Shadow queues: guest queue pairs bound to host queue pairs.
//!
//! `translate` decides which part of a guest's command reaches the host controller. `queue` moves commands and completions.
//! `leased_blocks` maps the lease's blocks to the drive's. `multi_part` splits commands whose blocks lie in several extents.

mod command_set;
pub mod field_offsets;
mod leased_blocks;
mod multi_part;
mod nvm;
mod prp;
mod queue;
mod sgl;
mod slot;
mod translate;

pub(crate) use command_set::TranslatedQueue;
pub use command_set::{CommandSet, CommandTraffic, CompletedCommand};
pub use leased_blocks::{LeasedBlocks, NamespaceIds};
pub(crate) use multi_part::PART_LISTS;
pub use nvm::{NvmCommands, NvmFacts};
pub(crate) use queue::{
    CompletionQueue, HostQueueParts, QueueContext, SubmissionQueue, UnmappedRing,
};
pub use queue::{HostQueuePair, ShadowQueue};
pub use sgl::MAX_DESCRIPTORS as MAX_SGL_DESCRIPTORS;
pub use translate::CommandTranslator;

use nvme_spec::status::Status;

/// Reason why a command does not reach the host controller: the status for the guest, and the location of the wrong
/// byte in the command for the error log.
///
/// Both are packed into one word, so that translation returns them in a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommandFailure(u32);

impl CommandFailure {
    /// Creates a failure with Do Not Retry, because the command would fail again.
    #[must_use]
    pub const fn permanent(status: Status, location: u16) -> Self {
        Self((location as u32) << 16 | status.with_dnr(true).0 as u32)
    }

    /// Creates a failure that the guest may retry, without the location of a wrong byte.
    pub(crate) const fn retryable(status: Status) -> Self {
        Self(0xFFFF << 16 | status.0 as u32)
    }

    /// Returns the status for the guest.
    pub(crate) const fn status(self) -> Status {
        Status(self.0 as u16)
    }

    /// Returns the location of the wrong byte in the command.
    pub(crate) const fn location(self) -> u16 {
        (self.0 >> 16) as u16
    }
}

/// Reason why a guest's command does not become a single command for the host controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UntranslatedCommand {
    /// No part of the command reaches the host controller.
    Failed(CommandFailure),
    /// The command is executed in parts: its blocks lie in several extents of the host's namespace, or exceed the host
    /// controller's limit for one command.
    InParts,
}

impl From<CommandFailure> for UntranslatedCommand {
    #[inline(always)]
    fn from(failure: CommandFailure) -> Self {
        Self::Failed(failure)
    }
}

//! Shadow queues: guest queue pairs bound to host queue pairs.
//!
//! `translate` decides what of a guest's command reaches the host controller,
//! `queue` moves commands and completions. `leased_blocks` knows the places of the lease's blocks; `parts` cuts
//! commands whose blocks lie in several places.

mod command_set;
mod leased_blocks;
pub mod location;
mod nvm;
mod parts;
mod prp;
mod queue;
mod sgl;
mod slot;
mod translate;

pub(crate) use command_set::TranslatedQueue;
pub use command_set::{CommandSet, CompletedCommand, Traffic};
pub use leased_blocks::{LeasedBlocks, Nsids};
pub use nvm::{NvmCommands, NvmFacts};
pub(crate) use parts::PART_LISTS;
pub(crate) use queue::{CompletionQueue, HostEnd, QueueContext, SubmissionQueue, UnmappedRing};
pub use queue::{HostQueuePair, ShadowQueue};
pub use sgl::MAX_DESCRIPTORS as MAX_SGL_DESCRIPTORS;
pub use translate::Translator;

use crate::spec::status::Status;

/// Why a command does not reach the host controller: what the guest is told, and the byte of the
/// command that is to blame, for the error log.
///
/// Both in one word, so that it comes back from translation in a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure(u32);

impl Failure {
    /// The same command would fail again, so the guest is told not to retry.
    #[must_use]
    pub const fn at(status: Status, location: u16) -> Self {
        Self((location as u32) << 16 | status.with_dnr(true).0 as u32)
    }

    /// The same command may succeed if it is given once more. None of its bytes is to blame.
    pub(crate) const fn for_now(status: Status) -> Self {
        Self(0xFFFF << 16 | status.0 as u32)
    }

    /// Returns the status for the guest.
    pub(crate) const fn status(self) -> Status {
        Status(self.0 as u16)
    }

    /// Byte of the command that is to blame.
    pub(crate) const fn location(self) -> u16 {
        (self.0 >> 16) as u16
    }
}

/// Why a guest's command does not become one command for the host controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Untranslated {
    /// It reaches the host controller in no form.
    Failed(Failure),
    /// Its blocks lie in several places of the host's namespace, or are more than the host controller takes in one
    /// command. So it is carried out in parts.
    InParts,
}

impl From<Failure> for Untranslated {
    #[inline(always)]
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

//! Facts of a lease that its function is told.

use serde::{Deserialize, Serialize};

use crate::doorbell::DoorbellMode;
use crate::host::{CommandSets, Limits, TemperatureThresholds};
use crate::learn::Learning;
use crate::spec::ids::Nsid;

/// The namespace that every guest sees its lease as.
pub const GUEST_NSID: Nsid = Nsid(1);

/// A lease as its guest sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeasedNamespace {
    /// Its identifier, always 1.
    pub nsid: Nsid,
    /// Logical block size as a power of two, in bytes.
    pub lba_shift: u8,
    /// Its size in logical blocks.
    pub blocks: u64,
    /// Serial Number of the controller, up to 20 characters.
    pub serial: String,
    /// Model Number of the controller, up to 40 characters.
    pub model: String,
    /// Namespace Globally Unique Identifier.
    pub nguid: [u8; 16],
    /// IEEE Extended Unique Identifier.
    pub eui64: [u8; 8],
    /// Namespace UUID.
    pub uuid: [u8; 16],
    /// Its command sets, as the guest reads of them.
    pub command_sets: CommandSets,
}

/// Facts of a lease that stay the same as long as a function holds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseFacts {
    /// The lease as the guest sees it, with the blocks that it has at first.
    pub namespace: LeasedNamespace,
    /// Promises that may be made to the guest.
    pub limits: Limits,
    /// I/O queue pairs that can exist, identifiers 1 to this number.
    pub queue_pairs: u16,
    /// Path of doorbell writes to the pollers.
    pub doorbells: DoorbellMode,
    /// True if the pollers ever sleep, so that a doorbell has to wake them.
    pub parks: bool,
    /// Temperatures at which the drive warns; `None` if it measures none.
    pub thresholds: Option<TemperatureThresholds>,
    /// True if [`HostSide::damage`](crate::seam::HostSide::damage) can change, so that it has to be looked for now and then.
    pub can_be_damaged: bool,
    /// True if the drive exists in the host side's process only, so that no other can take its lease over.
    pub is_private: bool,
    /// Blocks of a unit of a lease by size, which may grow; `None` of a lease of a range. A command that crosses from
    /// one unit to the next may be carried out in parts.
    pub unit_blocks: Option<u64>,
    /// Choices for all that learns.
    pub learning: Learning,
}

impl LeaseFacts {
    /// Returns whether a host side with these facts keeps what a guest was promised by `promised`.
    ///
    /// A later release may do more, and a lease by size may have grown. The guest is told nothing of `parks`,
    /// `can_be_damaged` and `learning`. It goes on with the model and the NVM Command Set that it was told.
    #[must_use]
    pub fn keep(&self, promised: &Self) -> bool {
        let told = &promised.namespace;
        let blocks = match self.unit_blocks {
            Some(_) => self.namespace.blocks.max(told.blocks),
            None => told.blocks,
        };
        let least = Self {
            namespace: LeasedNamespace {
                blocks,
                model: self.namespace.model.clone(),
                command_sets: CommandSets {
                    nvm: self.namespace.command_sets.nvm.clone(),
                    other: told.command_sets.other.clone(),
                },
                ..told.clone()
            },
            limits: self.limits,
            parks: self.parks,
            can_be_damaged: self.can_be_damaged,
            learning: self.learning,
            ..promised.clone()
        };
        least == *self && self.limits.keep(&promised.limits)
    }
}

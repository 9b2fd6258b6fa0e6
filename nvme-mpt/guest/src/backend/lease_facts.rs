//! Facts of a lease, reported to its function.

use nvme_spec::ids::Nsid;
use serde::{Deserialize, Serialize};

use crate::adaptive::AdaptivePolicies;
use crate::doorbell::DoorbellMode;
use crate::host::{CommandSets, ControllerLimits, TemperatureThresholds};

/// Namespace identifier under which every guest sees its lease.
pub const GUEST_NSID: Nsid = Nsid(1);

/// A lease as its guest sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeasedNamespace {
    /// Namespace identifier, always 1.
    pub nsid: Nsid,
    /// Logical block size in bytes, as a power of two.
    pub lba_shift: u8,
    /// Size in logical blocks.
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
    /// Command sets reported to the guest.
    pub command_sets: CommandSets,
}

/// Facts of a lease that are fixed while a function holds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseFacts {
    /// The lease as the guest sees it, with its initial number of blocks.
    pub namespace: LeasedNamespace,
    /// Limits that the guest controller may report to its guest.
    pub limits: ControllerLimits,
    /// Maximum number of I/O queue pairs. Their identifiers start at 1.
    pub queue_pairs: u16,
    /// Way in which doorbell writes reach the pollers.
    pub doorbells: DoorbellMode,
    /// True if the pollers may sleep, so that a doorbell must wake them.
    pub parks: bool,
    /// Temperatures at which the drive warns; `None` if it has no temperature sensor.
    pub thresholds: Option<TemperatureThresholds>,
    /// True if the result of [`ControllerBackend::check_damage`](crate::backend::ControllerBackend::check_damage) can
    /// change, so that it has to be checked periodically.
    pub can_be_damaged: bool,
    /// True if the drive exists only in the back end's process, so that no other process can take over its lease.
    pub is_private: bool,
    /// Number of blocks of an allocation unit, for a lease by size; `None` for a lease of a range. A lease by size may grow. A
    /// command that crosses the boundary of a unit may be executed in parts.
    pub unit_blocks: Option<u64>,
    /// Settings of the adaptive policies.
    pub learning: AdaptivePolicies,
}

impl LeaseFacts {
    /// Returns whether a back end with these facts can do everything that `promised` reported to the guest.
    ///
    /// These facts may exceed `promised`, because a later release supports more or a lease by size has grown. `parks`,
    /// `can_be_damaged` and `learning` are not compared, because the guest does not see them. The model and the NVM Command
    /// Set are not compared either: the guest continues to see those of `promised`.
    #[must_use]
    pub fn satisfies(&self, promised: &Self) -> bool {
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
        least == *self && self.limits.satisfies(&promised.limits)
    }
}

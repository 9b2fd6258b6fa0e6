//! Facts of a lease, reported to its function.

use std::fmt::{Debug, Display};

use nvme_spec::identify::Csi;
use nvme_spec::ids::Nsid;
use serde::{Deserialize, Serialize};

use super::state::BackendStateError;
use crate::adaptive::AdaptivePolicies;
use crate::doorbell::DoorbellMode;
use crate::host::{
    CommandSetDescription, CommandSets, ControllerLimits, GuestPromise, TemperatureThresholds,
};

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

/// Facts of a lease that do not change while a function holds it, except that a lease by size grows. A function keeps those
/// that its guest was told, also in its saved state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseFacts {
    /// The lease as the guest sees it. The number of blocks is the one at the start, or the one that the guest was last told.
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
    /// True if [`LeaseBackend::check_damage`](super::LeaseBackend::check_damage) can change, so that it has to be
    /// checked periodically.
    pub can_be_damaged: bool,
    /// True if the drive exists only in the back end's process, so that no other process can take over its lease.
    pub is_private: bool,
    /// Number of blocks of an allocation unit, for a lease by size; `None` for a lease of a range. A lease by size may grow. A
    /// command that crosses the boundary of a unit may be executed in parts.
    pub unit_blocks: Option<u64>,
    /// Settings of the adaptive policies.
    pub policies: AdaptivePolicies,
}

impl LeaseFacts {
    /// Checks that a back end with these facts can do everything that `promised` reported to the guest.
    ///
    /// These facts may exceed `promised`, because another program or drive supports more, or a lease by size has grown.
    /// `parks`, `can_be_damaged` and `policies` are not compared, because the guest does not see them. Model, temperature
    /// thresholds and NVM Command Set are not compared either, because the guest keeps the reported ones.
    ///
    /// # Errors
    /// [`BackendStateError::Mismatch`] for the first broken promise. The most telling promises are checked first.
    pub fn check_promises(&self, promised: &Self) -> Result<(), BackendStateError> {
        let Self {
            namespace,
            limits,
            queue_pairs,
            doorbells,
            parks: _,
            thresholds: _,
            can_be_damaged: _,
            is_private: _,
            unit_blocks,
            policies: _,
        } = promised;
        let LeasedNamespace {
            nsid,
            lba_shift,
            blocks,
            serial,
            model: _,
            nguid,
            eui64,
            uuid,
            command_sets: CommandSets { nvm: _, other },
        } = namespace;
        let here = &self.namespace;
        check_equal("I/O queue pairs", queue_pairs, self.queue_pairs)?;
        check_equal(
            "Doorbell Buffer Config",
            doorbells.offers_buffer(),
            self.doorbells.offers_buffer(),
        )?;
        check_equal("namespace", nsid, here.nsid)?;
        let block_bytes = |shift: u8| 1_u64.checked_shl(shift.into()).unwrap_or(0);
        check_equal(
            "LBA size",
            block_bytes(*lba_shift),
            block_bytes(here.lba_shift),
        )?;
        match self.unit_blocks {
            Some(_) => check_at_least("blocks", *blocks, here.blocks)?,
            None => check_equal("blocks", blocks, here.blocks)?,
        }
        // A different drive is recognized by its names.
        check_equal("serial number", serial, &here.serial)?;
        check_equal("NGUID", to_hex(nguid), to_hex(&here.nguid))?;
        check_equal("EUI-64", to_hex(eui64), to_hex(&here.eui64))?;
        check_equal("namespace UUID", to_hex(uuid), to_hex(&here.uuid))?;
        self.limits.check_promises(limits)?;
        check_command_set(other.as_ref(), here.command_sets.other.as_ref())?;
        check_debug("blocks of a unit", unit_blocks, &self.unit_blocks)
    }

    /// Checks that a back end with these facts can continue the queues of a back end with `former`. A paused function starts
    /// its queues anew, so it does not need this.
    ///
    /// # Errors
    /// [`BackendStateError::Mismatch`].
    pub fn check_continuation(&self, former: &Self) -> Result<(), BackendStateError> {
        check_equal("doorbell mode", former.doorbells, self.doorbells)?;
        check_debug(
            "temperature thresholds",
            &former.thresholds,
            &self.thresholds,
        )?;
        check_equal("private drive", former.is_private, self.is_private)
    }
}

impl ControllerLimits {
    /// Checks that a host controller with these limits can do everything that `promised` reported to the guest.
    fn check_promises(&self, promised: &Self) -> Result<(), BackendStateError> {
        let Self {
            mdts,
            entries_max,
            commands,
            awun_z,
            awupf_z,
            volatile_write_cache: cache,
            deallocated_reads_zeroes: zeroes,
            sgl_descriptors_max,
            // Commands beyond these are executed in parts.
            no_data_bytes_max: _,
            dsm_range_bytes_max: _,
            dsm_ranges_max: _,
            copy_bytes_max,
            copy_ranges_max,
            own_bytes_max,
        } = *promised;
        check_at_least("MDTS", mdts, self.mdts)?;
        check_at_least(
            "queue entries (CAP.MQES + 1)",
            entries_max,
            self.entries_max,
        )?;
        check_promise(
            "optional commands (ONCS)",
            commands.0,
            self.commands.0,
            self.commands.0 & commands.0 == commands.0,
        )?;
        check_at_least("AWUN", awun_z, self.awun_z)?;
        check_at_least("AWUPF", awupf_z, self.awupf_z)?;
        // A driver that was told that there is no cache never flushes.
        let has_cache = self.volatile_write_cache;
        check_promise(
            "volatile write cache",
            cache,
            has_cache,
            cache || !has_cache,
        )?;
        check_at_least(
            "deallocated blocks read as zeroes",
            zeroes,
            self.deallocated_reads_zeroes,
        )?;
        check_at_least(
            "SGL descriptors",
            sgl_descriptors_max,
            self.sgl_descriptors_max,
        )?;
        check_at_least(
            "bytes of a Copy command",
            copy_bytes_max,
            self.copy_bytes_max,
        )?;
        check_at_least("Copy ranges", copy_ranges_max, self.copy_ranges_max)?;
        check_at_least(
            "bytes of the command set's own commands",
            own_bytes_max,
            self.own_bytes_max,
        )
    }
}

/// Checks the command set of a namespace that has another one than the NVM Command Set.
fn check_command_set(
    promised: Option<&CommandSetDescription>,
    here: Option<&CommandSetDescription>,
) -> Result<(), BackendStateError> {
    for GuestPromise { name, value } in promised.map_or(&[][..], |set| &set.promises) {
        let mut promises = here.iter().flat_map(|set| &set.promises);
        let now = promises.find(|promise| promise.name == *name);
        let now = now.map_or_else(|| "not there".to_owned(), |now| now.value.to_string());
        check_equal(name, value, now)?;
    }
    let csi = |set: Option<&CommandSetDescription>| set.map_or(Csi::NVM, |set| set.csi).0;
    check_promise(
        "I/O command set",
        csi(promised),
        csi(here),
        promised == here,
    )
}

fn check_promise(
    name: &str,
    saved: impl Display,
    here: impl Display,
    is_kept: bool,
) -> Result<(), BackendStateError> {
    if is_kept {
        return Ok(());
    }
    Err(BackendStateError::Mismatch {
        promise: name.to_owned(),
        saved: saved.to_string(),
        here: here.to_string(),
    })
}

fn check_equal(
    name: &str,
    saved: impl Display,
    here: impl Display,
) -> Result<(), BackendStateError> {
    let (saved, here) = (saved.to_string(), here.to_string());
    check_promise(name, &saved, &here, saved == here)
}

fn check_at_least<T: Display + PartialOrd>(
    name: &str,
    saved: T,
    here: T,
) -> Result<(), BackendStateError> {
    let is_kept = here >= saved;
    check_promise(name, saved, here, is_kept)
}

fn check_debug(name: &str, saved: &impl Debug, here: &impl Debug) -> Result<(), BackendStateError> {
    check_equal(name, format_args!("{saved:?}"), format_args!("{here:?}"))
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

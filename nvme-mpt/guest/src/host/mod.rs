//! Description of a drive and its namespaces: everything that a function reports of them.

mod description;
mod lease_change_log;
mod mdts;

use nvme_spec::identify::Oncs;
use nvme_spec::opcode::NvmOpcode;
use serde::{Deserialize, Serialize};

pub use description::{
    ChangeListDescription, CommandSetDescription, CommandSets, GuestPromise, IdentifyNamespaceData,
    IoCommand, NamespaceContents, NamespaceFact, NamespaceFactOffset, SparseStructure,
};
pub use lease_change_log::{LeaseChangeLog, UnreportedChanges};
pub use mdts::Mdts;

/// Abilities of a host controller. They limit the abilities that the guest controller reports to its guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ControllerLimits {
    /// Maximum Data Transfer Size, as a power of two of 4 KiB pages.
    pub mdts: u8,
    /// Maximum number of entries of a queue (CAP.MQES + 1).
    pub entries_max: u32,
    /// Optional NVM commands that the controller executes; see [`Self::supports`]. Other bits are ignored.
    pub commands: Oncs,
    /// Atomic Write Unit Normal, in logical blocks, zero-based (Base 2.0, Figure 275, `AWUN`).
    pub awun_z: u16,
    /// Atomic Write Unit Power Fail, in logical blocks, zero-based.
    pub awupf_z: u16,
    /// True if a power failure may lose writes that are not flushed.
    pub volatile_write_cache: bool,
    /// True if deallocated blocks read as zeroes (DLFEAT 001b); otherwise their content is undefined.
    pub deallocated_reads_zeroes: bool,
    /// Maximum number of SGL descriptors of a command.
    pub sgl_descriptors_max: u32,
    /// Maximum bytes of a Write Zeroes, Write Uncorrectable or Verify command, a power of two. Larger commands are executed in
    /// parts.
    pub no_data_bytes_max: u64,
    /// Maximum bytes of all ranges of a deallocating Dataset Management command. Larger commands are executed in parts.
    pub dsm_range_bytes_max: u64,
    /// Maximum number of ranges of a Dataset Management command. Commands with more ranges are executed in parts.
    pub dsm_ranges_max: u32,
    /// Maximum bytes of a Copy command, and of each of its source ranges.
    pub copy_bytes_max: u64,
    /// Maximum number of source ranges of a Copy command.
    pub copy_ranges_max: u32,
    /// Maximum data bytes of commands for which the namespace's own command set has a separate limit; 0 if there are none.
    pub own_bytes_max: u64,
}

impl ControllerLimits {
    /// Returns the maximum data bytes of a command.
    #[must_use]
    pub fn max_transfer_bytes(&self) -> u64 {
        crate::address::PAGE_SIZE << self.mdts
    }

    /// Returns these abilities for a guest controller that reports `mdts` as its Maximum Data Transfer Size.
    ///
    /// A command slot's list has room for the SGL descriptors of a command of the host controller's size. So if `mdts` is
    /// larger, SGLs are not offered and the guest must use PRPs.
    #[must_use]
    pub fn with_mdts(self, mdts: Mdts) -> Self {
        let sgls = match mdts.log2_pages() > self.mdts {
            true => 0,
            false => self.sgl_descriptors_max,
        };
        Self {
            mdts: mdts.log2_pages(),
            sgl_descriptors_max: sgls,
            ..self
        }
    }

    /// Returns whether an I/O command on logical blocks is executed. Read, Write and Flush always are; optional commands are if
    /// [`Self::commands`] has them (Base 2.0, Figure 275, `ONCS`).
    #[must_use]
    pub const fn supports(&self, opcode: NvmOpcode) -> bool {
        match opcode {
            NvmOpcode::FLUSH | NvmOpcode::READ | NvmOpcode::WRITE => true,
            NvmOpcode::COMPARE => self.commands.compare(),
            NvmOpcode::WRITE_UNCORRECTABLE => self.commands.write_uncorrectable(),
            NvmOpcode::DATASET_MANAGEMENT => self.commands.dsm(),
            NvmOpcode::WRITE_ZEROES => self.commands.write_zeroes(),
            NvmOpcode::VERIFY => self.commands.verify(),
            NvmOpcode::COPY => self.commands.copy(),
            _ => false,
        }
    }
}

/// Composite Temperatures at which a drive warns, in kelvins (Base 2.0, Figure 275).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemperatureThresholds {
    /// `WCTEMP`: above it, operation continues with care; 0 if not reported.
    pub warning: u16,
    /// `CCTEMP`: above it, operation may end; 0 if not reported.
    pub critical: u16,
}

/// Damage of a lease's data: differences from the data that its guest wrote.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseDamage {
    /// Completed writes or their metadata were lost before they were durable. The lease is then read-only until its VMM
    /// connects again. If the drive's leases share the lost data, they are read-only until the drive is reopened.
    pub lost_writes: bool,
    /// The drive's file was truncated, and blocks of the lease are gone. They are neither read nor written.
    pub cut_short: bool,
    /// The path of the drive's file leads to another file or to none.
    pub replaced: bool,
}

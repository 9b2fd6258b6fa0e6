//! Identify Namespace data structures: that of the NVM Command Set, and those that do not depend on a command set.

use core::mem::{offset_of, size_of};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, little_endian::U128};

use super::IDENTIFY_SIZE;

/// Maximum number of LBA formats of a namespace.
pub const MAX_LBA_FORMATS: usize = 64;

/// Identify Namespace (CNS 00h; NVM 1.0, section 4.1.5.1, Figure 97).
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct IdentifyNamespace {
    /// Namespace Size, in logical blocks.
    pub nsze: u64,
    /// Namespace Capacity, in logical blocks.
    pub ncap: u64,
    /// Namespace Utilization, in logical blocks.
    pub nuse: u64,
    /// Namespace Features.
    pub nsfeat: Nsfeat,
    /// Number of LBA Formats.
    pub nlbaf_z: u8,
    /// Formatted LBA Size.
    pub flbas: Flbas,
    /// Metadata Capabilities.
    pub mc: u8,
    /// End-to-end Data Protection Capabilities.
    pub dpc: u8,
    /// End-to-end Data Protection Type Settings.
    pub dps: u8,
    /// Namespace Multi-path I/O and Namespace Sharing Capabilities; bit 0: shared.
    pub nmic: u8,
    /// Reservation Capabilities.
    pub rescap: u8,
    /// Format Progress Indicator.
    pub fpi: u8,
    /// Deallocate Logical Block Features.
    pub dlfeat: Dlfeat,
    /// Namespace Atomic Write Unit Normal, in logical blocks.
    pub nawun_z: u16,
    /// Namespace Atomic Write Unit Power Fail, in logical blocks.
    pub nawupf_z: u16,
    /// Namespace Atomic Compare & Write Unit, in logical blocks.
    pub nacwu_z: u16,
    /// Namespace Atomic Boundary Size Normal, in logical blocks.
    pub nabsn_z: u16,
    /// Namespace Atomic Boundary Offset, in logical blocks.
    pub nabo: u16,
    /// Namespace Atomic Boundary Size Power Fail, in logical blocks.
    pub nabspf_z: u16,
    /// Namespace Optimal I/O Boundary, in logical blocks; 0: not reported.
    pub noiob: u16,
    /// NVM Capacity, in bytes.
    pub nvmcap: U128,
    /// Namespace Preferred Write Granularity, in logical blocks.
    pub npwg_z: u16,
    /// Namespace Preferred Write Alignment, in logical blocks.
    pub npwa_z: u16,
    /// Namespace Preferred Deallocate Granularity, in logical blocks.
    pub npdg_z: u16,
    /// Namespace Preferred Deallocate Alignment, in logical blocks.
    pub npda_z: u16,
    /// Namespace Optimal Write Size, in logical blocks.
    pub nows_z: u16,
    /// Maximum Single Source Range Length of Copy, in logical blocks.
    pub mssrl: u16,
    /// Maximum Copy Length, in logical blocks.
    pub mcl: u32,
    /// Maximum Source Range Count of Copy.
    pub msrc_z: u8,
    /// Reserved.
    pub rsvd81: [u8; 11],
    /// ANA Group Identifier.
    pub anagrpid: u32,
    /// Reserved.
    pub rsvd96: [u8; 3],
    /// Namespace Attributes; bit 0: write protected.
    pub nsattr: u8,
    /// NVM Set Identifier.
    pub nvmsetid: u16,
    /// Endurance Group Identifier.
    pub endgid: u16,
    /// Namespace Globally Unique Identifier, most significant byte first.
    pub nguid: [u8; 16],
    /// IEEE Extended Unique Identifier, most significant byte first.
    pub eui64: [u8; 8],
    /// LBA Formats.
    pub lbaf: [LbaFormat; MAX_LBA_FORMATS],
    /// Vendor Specific.
    pub vs: [u8; 3712],
}

const _: () = assert!(size_of::<IdentifyNamespace>() == IDENTIFY_SIZE);
const _: () = assert!(offset_of!(IdentifyNamespace, nsfeat) == 24);
const _: () = assert!(offset_of!(IdentifyNamespace, dlfeat) == 33);
const _: () = assert!(offset_of!(IdentifyNamespace, noiob) == 46);
const _: () = assert!(offset_of!(IdentifyNamespace, nvmcap) == 48);
const _: () = assert!(offset_of!(IdentifyNamespace, mssrl) == 74);
const _: () = assert!(offset_of!(IdentifyNamespace, msrc_z) == 80);
const _: () = assert!(offset_of!(IdentifyNamespace, anagrpid) == 92);
const _: () = assert!(offset_of!(IdentifyNamespace, nguid) == 104);
const _: () = assert!(offset_of!(IdentifyNamespace, eui64) == 120);
const _: () = assert!(offset_of!(IdentifyNamespace, lbaf) == 128);

impl IdentifyNamespace {
    /// Returns the current format; `None` if the index in `FLBAS` is invalid.
    #[must_use]
    pub fn current_lba_format(&self) -> Option<LbaFormat> {
        let index = self.flbas.index();
        (index <= self.nlbaf_z).then(|| self.lbaf.get(usize::from(index)).copied())?
    }
}

bit_field! {
    /// Namespace Features (NVM 1.0, Figure 97, `NSFEAT`).
    pub struct Nsfeat(u8) {
        /// Thin provisioning: `NCAP` may be less than `NSZE`, and `NUSE` is maintained.
        thin / with_thin: bool [0];
        /// `NAWUN`, `NAWUPF` and `NACWU` are defined for this namespace.
        nsabp / with_nsabp: bool [1];
        /// Deallocated or Unwritten Logical Block error supported.
        dae / with_dae: bool [2];
        /// Non-zero NGUID and EUI64 values are never reused.
        uidreuse / with_uidreuse: bool [3];
        /// `NPWG`, `NPWA`, `NPDG`, `NPDA` and `NOWS` are defined.
        optperf / with_optperf: bool [4];
    }
}

bit_field! {
    /// Formatted LBA Size (NVM 1.0, Figure 97, `FLBAS`).
    pub struct Flbas(u8) {
        /// Bits 3:0 of the index of the LBA format.
        index_low / with_index_low: u8 [3:0];
        /// Metadata at the end of the data, as an extended logical block.
        extended / with_extended: bool [4];
        /// Bits 5:4 of the index of the LBA format.
        index_high / with_index_high: u8 [6:5];
    }
}

impl Flbas {
    /// Returns the index of the LBA format.
    #[must_use]
    pub const fn index(self) -> u8 {
        self.index_low() | self.index_high() << 4
    }

    /// Returns the value with another [index](Self::index).
    #[must_use]
    pub const fn with_index(self, index: u8) -> Self {
        self.with_index_low(index).with_index_high(index >> 4)
    }
}

bit_field! {
    /// Deallocate Logical Block Features (NVM 1.0, Figure 97, `DLFEAT`).
    pub struct Dlfeat(u8) {
        /// Value of a deallocated logical block.
        read / with_read: DeallocatedRead(u8) [2:0];
        /// Write Zeroes supports its Deallocate bit.
        write_zeroes_deac / with_write_zeroes_deac: bool [3];
        /// The Guard field of a deallocated block matches the data that a read of the block returns.
        guard / with_guard: bool [4];
    }
}

open_enum! {
    /// Value of a deallocated logical block (NVM 1.0, Figure 97, `DLFEAT`).
    pub struct DeallocatedRead(u8) {
        NOT_REPORTED = 0b000, "Not reported";
        ZEROES = 0b001, "All bytes 00h";
        ONES = 0b010, "All bytes FFh";
    }
}

bit_field! {
    /// LBA Format (NVM 1.0, Figure 98).
    pub struct LbaFormat(u32) {
        /// Metadata Size, in bytes.
        ms / with_ms: u16 [15:0];
        /// LBA Data Size, a power of two in bytes; 0: the format is not available.
        lbads / with_lbads: u8 [23:16];
        /// Relative Performance; 0 is best.
        rp / with_rp: u8 [25:24];
    }
}

/// NVM Command Set specific Identify Namespace (CNS 05h, CSI 00h; NVM 1.0, section 4.1.5.3).
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct IdentifyNamespaceNvm {
    /// Logical Block Storage Tag Mask.
    pub lbstm: u64,
    /// Protection Information Capabilities.
    pub pic: u8,
    /// Reserved.
    pub rsvd9: [u8; 3],
    /// Extended LBA Formats.
    pub elbaf: [ExtendedLbaFormat; MAX_LBA_FORMATS],
    /// Reserved.
    pub rsvd268: [u8; 3828],
}

const _: () = assert!(size_of::<IdentifyNamespaceNvm>() == IDENTIFY_SIZE);
const _: () = assert!(offset_of!(IdentifyNamespaceNvm, elbaf) == 12);

bit_field! {
    /// Extended LBA Format (NVM 1.0, section 4.1.5.3).
    pub struct ExtendedLbaFormat(u32) {
        /// Storage Tag Size, in bits.
        sts / with_sts: u8 [6:0];
        /// Protection Information Format.
        pif / with_pif: u8 [8:7];
    }
}

/// I/O Command Set Independent Identify Namespace (CNS 08h; Base 2.0, section 5.17.2.8).
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct IdentifyNamespaceIndependent {
    /// Common Namespace Features.
    pub nsfeat: IndependentNsfeat,
    /// Namespace Multi-path I/O and Namespace Sharing Capabilities; bit 0: shared.
    pub nmic: u8,
    /// Reservation Capabilities.
    pub rescap: u8,
    /// Format Progress Indicator.
    pub fpi: u8,
    /// ANA Group Identifier.
    pub anagrpid: u32,
    /// Namespace Attributes; bit 0: write protected.
    pub nsattr: u8,
    /// Reserved.
    pub rsvd9: u8,
    /// NVM Set Identifier.
    pub nvmsetid: u16,
    /// Endurance Group Identifier.
    pub endgid: u16,
    /// Namespace Status.
    pub nstat: Nstat,
    /// Reserved.
    pub rsvd15: [u8; 4081],
}

const _: () = assert!(size_of::<IdentifyNamespaceIndependent>() == IDENTIFY_SIZE);
const _: () = assert!(offset_of!(IdentifyNamespaceIndependent, nstat) == 14);

bit_field! {
    /// Common Namespace Features (Base 2.0, section 5.17.2.8, `NSFEAT`).
    pub struct IndependentNsfeat(u8) {
        /// Non-zero NGUID and EUI64 values are never reused.
        uidreuse / with_uidreuse: bool [3];
        /// The namespace is on rotational media.
        rmedia / with_rmedia: bool [4];
    }
}

bit_field! {
    /// Namespace Status (Base 2.0, section 5.17.2.8, `NSTAT`).
    pub struct Nstat(u8) {
        /// Namespace Ready.
        nrdy / with_nrdy: bool [0];
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;

    #[test]
    fn identify_namespace_is_laid_out_as_specified() {
        let mut id = IdentifyNamespace::new_zeroed();
        id.nsze = 0x1000;
        id.nsfeat = Nsfeat::default().with_thin(true).with_optperf(true);
        id.nlbaf_z = 1;
        id.flbas = Flbas::default().with_index(1);
        id.dlfeat = Dlfeat::default()
            .with_read(DeallocatedRead::ZEROES)
            .with_write_zeroes_deac(true);
        id.mcl = 0x1_0000;
        id.lbaf = [LbaFormat::default().with_lbads(9); MAX_LBA_FORMATS];
        id.lbaf[1] = LbaFormat::default().with_lbads(12).with_ms(8).with_rp(1);
        let bytes = id.as_bytes();
        assert_eq!(bytes[..8], [0x00, 0x10, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[24..27], [0x11, 1, 1]);
        assert_eq!(bytes[33], 0b1001);
        assert_eq!(bytes[76..80], [0, 0, 1, 0]);
        assert_eq!(bytes[128..136], [0, 0, 9, 0, 8, 0, 12, 1]);
        assert_eq!(id.current_lba_format(), Some(id.lbaf[1]));
    }

    #[test]
    fn a_format_that_is_not_there_is_not_current() {
        let mut id = IdentifyNamespace::new_zeroed();
        id.flbas = Flbas::default().with_index(1);
        assert_eq!(id.current_lba_format(), None);
        id.nlbaf_z = u8::MAX;
        id.flbas = Flbas(0xFF);
        assert_eq!(id.current_lba_format(), Some(LbaFormat(0)));
    }

    #[test]
    fn the_index_of_a_format_is_split() {
        let flbas = Flbas::default().with_index(0x2B).with_extended(true);
        assert_eq!(flbas.0, 0b0101_1011);
        assert_eq!(flbas.index(), 0x2B);
    }

    #[test]
    fn other_namespace_structures() {
        let mut nvm = IdentifyNamespaceNvm::new_zeroed();
        nvm.elbaf[0] = ExtendedLbaFormat::default().with_sts(16).with_pif(1);
        assert_eq!(nvm.as_bytes()[12..16], [0x90, 0, 0, 0]);
        let mut independent = IdentifyNamespaceIndependent::new_zeroed();
        independent.nstat = Nstat::default().with_nrdy(true);
        assert_eq!(independent.as_bytes()[14], 1);
    }
}

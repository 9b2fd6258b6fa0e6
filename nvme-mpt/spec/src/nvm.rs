//! Fields of the NVM Command Set's I/O commands, and their data (NVM 1.0, section 3.2).

use core::mem::{offset_of, size_of};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::ids::Lba;

command! {
    /// Read and Write (NVM 1.0, sections 3.2.4 and 3.2.6).
    pub struct ReadWrite {
        /// Starting LBA.
        slba: Lba(u64) = cdw10.cdw11;
        /// Number of Logical Blocks.
        nlb_z: u16 = cdw12[15:0];
        /// Directive Type; Write only.
        dtype: u8 = cdw12[23:20];
        /// Storage Tag Check.
        stc: bool = cdw12[24];
        /// Protection Information.
        prinfo: PrInfo(u8) = cdw12[29:26];
        /// Force Unit Access.
        fua: bool = cdw12[30];
        /// Limited Retry.
        lr: bool = cdw12[31];
        /// Dataset Management: hints about how the data will be used.
        dsm: DsmHint(u8) = cdw13[7:0];
        /// Directive Specific; Write only.
        dspec: u16 = cdw13[31:16];
        /// Low part of the initial logical block storage and reference tags.
        ilbrt: u32 = cdw14[31:0];
        /// Logical Block Application Tag.
        lbat: u16 = cdw15[15:0];
        /// Logical Block Application Tag Mask.
        lbatm: u16 = cdw15[31:16];
    }
}

command! {
    /// Compare and Verify (NVM 1.0, sections 3.2.1 and 3.2.5).
    pub struct CompareVerify {
        /// Starting LBA.
        slba: Lba(u64) = cdw10.cdw11;
        /// Number of Logical Blocks.
        nlb_z: u16 = cdw12[15:0];
        /// Storage Tag Check.
        stc: bool = cdw12[24];
        /// Protection Information.
        prinfo: PrInfo(u8) = cdw12[29:26];
        /// Force Unit Access.
        fua: bool = cdw12[30];
        /// Limited Retry.
        lr: bool = cdw12[31];
        /// Low part of the expected initial logical block storage and reference tags.
        eilbrt: u32 = cdw14[31:0];
        /// Expected Logical Block Application Tag.
        elbat: u16 = cdw15[15:0];
        /// Expected Logical Block Application Tag Mask.
        elbatm: u16 = cdw15[31:16];
    }
}

command! {
    /// Write Zeroes (NVM 1.0, section 3.2.8).
    pub struct WriteZeroes {
        /// Starting LBA.
        slba: Lba(u64) = cdw10.cdw11;
        /// Number of Logical Blocks.
        nlb_z: u16 = cdw12[15:0];
        /// Storage Tag Check.
        stc: bool = cdw12[24];
        /// Deallocate: the controller should deallocate the blocks, if deallocated blocks read as zeroes.
        deac: bool = cdw12[25];
        /// Protection Information.
        prinfo: PrInfo(u8) = cdw12[29:26];
        /// Force Unit Access.
        fua: bool = cdw12[30];
        /// Limited Retry.
        lr: bool = cdw12[31];
        /// Low part of the initial logical block storage and reference tags.
        ilbrt: u32 = cdw14[31:0];
        /// Logical Block Application Tag.
        lbat: u16 = cdw15[15:0];
        /// Logical Block Application Tag Mask.
        lbatm: u16 = cdw15[31:16];
    }
}

command! {
    /// Write Uncorrectable (NVM 1.0, section 3.2.7).
    pub struct WriteUncorrectable {
        /// Starting LBA.
        slba: Lba(u64) = cdw10.cdw11;
        /// Number of Logical Blocks.
        nlb_z: u16 = cdw12[15:0];
    }
}

bit_field! {
    /// Protection Information Field, `PRINFO` (NVM 1.0, section 3.1.1).
    pub struct PrInfo(u8) {
        /// Check the Logical Block Reference Tag.
        check_reference_tag / with_check_reference_tag: bool [0];
        /// Check the Logical Block Application Tag.
        check_application_tag / with_check_application_tag: bool [1];
        /// Check the Guard.
        check_guard / with_check_guard: bool [2];
        /// Protection Information Action: strip on read, insert on write.
        pract / with_pract: bool [3];
    }
}

bit_field! {
    /// Hints about how the data of a Read or a Write will be used (NVM 1.0, sections 3.2.4 and 3.2.6, `DSM`).
    pub struct DsmHint(u8) {
        /// Access Frequency.
        access_frequency / with_access_frequency: u8 [3:0];
        /// Access Latency.
        access_latency / with_access_latency: u8 [5:4];
        /// Sequential Request.
        sequential / with_sequential: bool [6];
        /// Incompressible.
        incompressible / with_incompressible: bool [7];
    }
}

command! {
    /// Dataset Management (NVM 1.0, section 3.2.3); the data are [`DsmRange`]s.
    pub struct DatasetManagement {
        /// Number of Ranges.
        nr_z: u8 = cdw10[7:0];
        /// Integral Dataset for Read.
        idr: bool = cdw11[0];
        /// Integral Dataset for Write.
        idw: bool = cdw11[1];
        /// Deallocate.
        ad: bool = cdw11[2];
    }
}

impl DatasetManagement {
    /// Maximum number of ranges in a command.
    pub const MAX_RANGES: usize = 256;
}

/// Range of Dataset Management (NVM 1.0, section 3.2.3).
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct DsmRange {
    /// Context Attributes.
    pub cattr: u32,
    /// Length in logical blocks; not zero-based.
    pub nlb: u32,
    /// Starting LBA.
    pub slba: Lba,
}

const _: () = assert!(size_of::<DsmRange>() == 16);

command! {
    /// Copy (NVM 1.0, section 3.2.2); the data are source range entries.
    pub struct CopyCommand {
        /// Starting Destination LBA.
        sdlba: Lba(u64) = cdw10.cdw11;
        /// Number of Ranges.
        nr_z: u8 = cdw12[7:0];
        /// Descriptor Format.
        desfmt: CopyFormat(u8) = cdw12[11:8];
        /// Protection Information for the reads.
        prinfor: PrInfo(u8) = cdw12[15:12];
        /// Directive Type.
        dtype: u8 = cdw12[23:20];
        /// Protection Information for the writes.
        prinfow: PrInfo(u8) = cdw12[29:26];
        /// Force Unit Access, of the writes.
        fua: bool = cdw12[30];
        /// Limited Retry.
        lr: bool = cdw12[31];
        /// Directive Specific.
        dspec: u16 = cdw13[31:16];
        /// Low part of the initial logical block storage and reference tags of the writes.
        ilbrt: u32 = cdw14[31:0];
        /// Logical Block Application Tag of the writes.
        lbat: u16 = cdw15[15:0];
        /// Logical Block Application Tag Mask of the writes.
        lbatm: u16 = cdw15[31:16];
    }
}

impl CopyCommand {
    /// Maximum number of source ranges in a command.
    pub const MAX_RANGES: usize = 256;
}

open_enum! {
    /// Copy Descriptor Format (NVM 1.0, section 3.2.2).
    pub struct CopyFormat(u8) {
        FORMAT_0 = 0x0, "Copy Descriptor Format 0h";
        FORMAT_1 = 0x1, "Copy Descriptor Format 1h";
    }
}

impl CopyFormat {
    /// Returns the size of a source range entry in bytes; `None` for unknown formats.
    #[must_use]
    pub const fn entry_size(self) -> Option<usize> {
        match self {
            Self::FORMAT_0 => Some(size_of::<CopyRange0>()),
            Self::FORMAT_1 => Some(size_of::<CopyRange1>()),
            _ => None,
        }
    }
}

/// Source range entry of Copy Descriptor Format 0h, with 32-bit tags (NVM 1.0, section 3.2.2).
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct CopyRange0 {
    /// Reserved.
    pub rsvd0: [u8; 8],
    /// Starting LBA.
    pub slba: Lba,
    /// Number of Logical Blocks.
    pub nlb_z: u16,
    /// Reserved.
    pub rsvd18: [u8; 6],
    /// Expected initial logical block storage and reference tags.
    pub eilbrt: u32,
    /// Expected Logical Block Application Tag.
    pub elbat: u16,
    /// Expected Logical Block Application Tag Mask.
    pub elbatm: u16,
}

const _: () = assert!(size_of::<CopyRange0>() == 32);
const _: () = assert!(offset_of!(CopyRange0, eilbrt) == 24);

/// Source range entry of Copy Descriptor Format 1h, with 80-bit tags (NVM 1.0, section 3.2.2).
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct CopyRange1 {
    /// Reserved.
    pub rsvd0: [u8; 8],
    /// Starting LBA.
    pub slba: Lba,
    /// Number of Logical Blocks.
    pub nlb_z: u16,
    /// Reserved.
    pub rsvd18: [u8; 8],
    /// Expected initial logical block storage and reference tags.
    pub elbt: [u8; 10],
    /// Expected Logical Block Application Tag.
    pub elbat: u16,
    /// Expected Logical Block Application Tag Mask.
    pub elbatm: u16,
}

const _: () = assert!(size_of::<CopyRange1>() == 40);
const _: () = assert!(offset_of!(CopyRange1, elbt) == 26);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sqe::Sqe;

    #[test]
    fn a_write_has_its_fields_where_specified() {
        let sqe = Sqe {
            cdw10: 0xFFFF_FFF0,
            cdw11: 0x0000_0001,
            cdw12: 0xE410_0007,
            cdw13: 0x00AB_00C5,
            cdw14: 0x1122_3344,
            cdw15: 0xFF00_00FF,
            ..Sqe::default()
        };
        let write = ReadWrite::from(&sqe);
        assert_eq!(write.slba, Lba(0x1_FFFF_FFF0));
        assert_eq!((write.nlb_z, write.dtype, write.dspec), (7, 1, 0xAB));
        assert!(write.fua && write.lr && !write.stc);
        assert!(write.prinfo.pract() && write.prinfo.check_reference_tag());
        assert!(write.dsm.sequential() && write.dsm.incompressible());
        assert_eq!(
            (write.dsm.access_frequency(), write.dsm.access_latency()),
            (5, 0)
        );
        assert_eq!(
            (write.ilbrt, write.lbat, write.lbatm),
            (0x1122_3344, 0xFF, 0xFF00)
        );

        let mut built = Sqe::default();
        write.write_to(&mut built);
        assert_eq!(built, sqe);
        let verify = CompareVerify::from(&sqe);
        assert_eq!(
            (verify.slba, verify.nlb_z, verify.elbatm),
            (write.slba, 7, 0xFF00)
        );
        assert_eq!(WriteUncorrectable::from(&sqe).nlb_z, 7);
    }

    #[test]
    fn write_zeroes_may_deallocate() {
        let mut sqe = Sqe::default();
        let zeroes = WriteZeroes {
            slba: Lba(8),
            nlb_z: 0xFFFF,
            deac: true,
            ..Default::default()
        };
        zeroes.write_to(&mut sqe);
        assert_eq!((sqe.cdw10, sqe.cdw11, sqe.cdw12), (8, 0, 0x0200_FFFF));
        assert_eq!(WriteZeroes::from(&sqe), zeroes);
    }

    #[test]
    fn dataset_management_deallocates_ranges() {
        let sqe = Sqe {
            cdw10: 1,
            cdw11: 0b100,
            ..Sqe::default()
        };
        let dsm = DatasetManagement::from(&sqe);
        assert_eq!(
            dsm,
            DatasetManagement {
                nr_z: 1,
                idr: false,
                idw: false,
                ad: true
            }
        );
        assert_eq!(usize::from(u8::MAX) + 1, DatasetManagement::MAX_RANGES);
        let range = DsmRange {
            cattr: 0,
            nlb: 16,
            slba: Lba(0x100),
        };
        assert_eq!(
            range.as_bytes(),
            [0, 0, 0, 0, 16, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
        );
    }

    #[test]
    fn copy_names_its_format() {
        let sqe = Sqe {
            cdw10: 0x40,
            cdw12: 0x4000_0102,
            ..Sqe::default()
        };
        let copy = CopyCommand::from(&sqe);
        assert_eq!((copy.sdlba, copy.nr_z, copy.fua), (Lba(0x40), 2, true));
        assert_eq!(copy.desfmt, CopyFormat::FORMAT_1);
        assert_eq!(copy.desfmt.entry_size(), Some(40));
        assert_eq!(CopyFormat::FORMAT_0.entry_size(), Some(32));
        assert_eq!(CopyFormat(2).entry_size(), None);
        let range = CopyRange0 {
            slba: Lba(5),
            nlb_z: 9,
            ..CopyRange0::default()
        };
        assert_eq!(range.as_bytes()[8..18], [5, 0, 0, 0, 0, 0, 0, 0, 9, 0]);
        let range = CopyRange1 {
            slba: Lba(5),
            elbatm: 0x0102,
            ..CopyRange1::default()
        };
        assert_eq!(
            (range.as_bytes()[8], &range.as_bytes()[38..]),
            (5, &[2, 1][..])
        );
    }
}

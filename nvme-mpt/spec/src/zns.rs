//! Zoned Namespace Command Set, as additions to the NVM Command Set: commands, their data, and Identify data
//! structures, after the *NVM Express Zoned Namespace Command Set Specification 1.1* ("ZNS 1.1").

use core::mem::{offset_of, size_of};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{identify::IDENTIFY_SIZE, ids::Lba, nvm::PrInfo};

command! {
    /// Zone Append (ZNS 1.1, section 3.4.1). Dwords 0 and 1 of the completion are the LBA of the first written block.
    pub struct ZoneAppend {
        /// Zone Start LBA.
        zslba: Lba(u64) = cdw10.cdw11;
        /// Number of Logical Blocks.
        nlb_z: u16 = cdw12[15:0];
        /// Directive Type.
        dtype: u8 = cdw12[23:20];
        /// Protection Information Remap.
        piremap: bool = cdw12[25];
        /// Protection Information.
        prinfo: PrInfo(u8) = cdw12[29:26];
        /// Force Unit Access.
        fua: bool = cdw12[30];
        /// Limited Retry.
        lr: bool = cdw12[31];
    }
}

command! {
    /// Zone Management Receive (ZNS 1.1, section 3.4.2).
    pub struct ZoneManagementReceive {
        /// Starting LBA of the first zone to report.
        slba: Lba(u64) = cdw10.cdw11;
        /// Number of Dwords.
        ndw_z: u32 = cdw12[31:0];
        /// Zone Receive Action.
        zra: ZoneReceiveAction(u8) = cdw13[7:0];
        /// Zone Receive Action Specific Field: filter of the reported zones.
        zrasf: ReportingOptions(u8) = cdw13[15:8];
        /// Partial Report: the Number of Zones counts only the transferred descriptors.
        partial: bool = cdw13[16];
    }
}

impl ZoneManagementReceive {
    /// Returns the length of the transfer in bytes.
    #[inline]
    #[must_use]
    pub const fn length(&self) -> u64 {
        (self.ndw_z as u64 + 1) * 4
    }
}

command! {
    /// Zone Management Send (ZNS 1.1, section 3.4.3).
    pub struct ZoneManagementSend {
        /// Starting LBA of the zone.
        slba: Lba(u64) = cdw10.cdw11;
        /// Zone Send Action.
        zsa: ZoneSendAction(u8) = cdw13[7:0];
        /// Select All: apply the action to all zones in a suitable state.
        select_all: bool = cdw13[8];
        /// Zone Send Action Specific Option.
        zsaso: bool = cdw13[9];
    }
}

open_enum! {
    /// Zone Receive Action, `ZRA` (ZNS 1.1, section 3.4.2).
    pub struct ZoneReceiveAction(u8) {
        REPORT_ZONES = 0x00, "Report Zones";
        EXTENDED_REPORT_ZONES = 0x01, "Extended Report Zones";
    }
}

open_enum! {
    /// Zone Receive Action Specific Field of a report: filter of the reported zones (ZNS 1.1, section 3.4.2).
    pub struct ReportingOptions(u8) {
        ALL = 0x0, "List all zones";
        EMPTY = 0x1, "List the zones in the ZSE:Empty state";
        IMPLICITLY_OPENED = 0x2, "List the zones in the ZSIO:Implicitly Opened state";
        EXPLICITLY_OPENED = 0x3, "List the zones in the ZSEO:Explicitly Opened state";
        CLOSED = 0x4, "List the zones in the ZSC:Closed state";
        FULL = 0x5, "List the zones in the ZSF:Full state";
        READ_ONLY = 0x6, "List the zones in the ZSRO:Read Only state";
        OFFLINE = 0x7, "List the zones in the ZSO:Offline state";
    }
}

open_enum! {
    /// Zone Send Action, `ZSA` (ZNS 1.1, section 3.4.3).
    pub struct ZoneSendAction(u8) {
        CLOSE = 0x01, "Close Zone";
        FINISH = 0x02, "Finish Zone";
        OPEN = 0x03, "Open Zone";
        RESET = 0x04, "Reset Zone";
        OFFLINE = 0x05, "Offline Zone";
        SET_ZONE_DESCRIPTOR_EXTENSION = 0x10, "Set Zone Descriptor Extension";
        FLUSH_ZRWA = 0x11, "Zone Random Write Area Flush";
    }
}

open_enum! {
    /// Zone Type, `ZT` (ZNS 1.1, section 3.4.2).
    pub struct ZoneType(u8) {
        SEQUENTIAL_WRITE_REQUIRED = 0x2, "Sequential Write Required";
    }
}

open_enum! {
    /// Zone State, `ZS` (ZNS 1.1, section 2.1.1).
    pub struct ZoneState(u8) {
        EMPTY = 0x1, "ZSE:Empty";
        IMPLICITLY_OPENED = 0x2, "ZSIO:Implicitly Opened";
        EXPLICITLY_OPENED = 0x3, "ZSEO:Explicitly Opened";
        CLOSED = 0x4, "ZSC:Closed";
        READ_ONLY = 0xD, "ZSRO:Read Only";
        FULL = 0xE, "ZSF:Full";
        OFFLINE = 0xF, "ZSO:Offline";
    }
}

/// Header of a report, before the zone descriptors (ZNS 1.1, section 3.4.2).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ReportZonesHeader {
    /// Number of Zones.
    pub nz: u64,
    /// Reserved.
    pub rsvd8: [u8; 56],
}

const _: () = assert!(size_of::<ReportZonesHeader>() == 64);

bit_field! {
    /// Byte 0 of a zone descriptor.
    pub struct ZoneTypeByte(u8) {
        /// Zone Type.
        zt / with_zt: ZoneType(u8) [3:0];
    }
}

bit_field! {
    /// Byte 1 of a zone descriptor.
    pub struct ZoneStateByte(u8) {
        /// Zone State.
        zs / with_zs: ZoneState(u8) [7:4];
    }
}

/// Zone descriptor (ZNS 1.1, section 3.4.2).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ZoneDescriptor {
    /// Zone Type.
    pub zt: ZoneTypeByte,
    /// Zone State.
    pub zs: ZoneStateByte,
    /// Zone Attributes.
    pub za: u8,
    /// Zone Attributes Information.
    pub zai: u8,
    /// Reserved.
    pub rsvd4: [u8; 4],
    /// Zone Capacity, in logical blocks.
    pub zcap: u64,
    /// Zone Start Logical Block Address.
    pub zslba: Lba,
    /// Write Pointer.
    pub wp: Lba,
    /// Reserved.
    pub rsvd32: [u8; 32],
}

const _: () = assert!(size_of::<ZoneDescriptor>() == 64);
const _: () = assert!(offset_of!(ZoneDescriptor, zcap) == 8);
const _: () = assert!(offset_of!(ZoneDescriptor, wp) == 24);

/// Maximum number of LBA Format Extensions of a namespace.
pub const MAX_LBA_FORMAT_EXTENSIONS: usize = 64;

/// Zoned Namespace Command Set specific Identify Namespace (CNS 05h, CSI 02h; ZNS 1.1, section
/// 4.1.5.1).
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct IdentifyNamespaceZns {
    /// Zone Operation Characteristics; bit 0: zone capacities vary, bit 1: active excursions.
    pub zoc: u16,
    /// Optional Zoned Command Support.
    pub ozcs: Ozcs,
    /// Maximum Active Resources, zero-based; FFFFFFFFh: no limit.
    pub mar_z: u32,
    /// Maximum Open Resources, zero-based; FFFFFFFFh: no limit.
    pub mor_z: u32,
    /// Reset Recommended Limit, in seconds; 0: not reported.
    pub rrl: u32,
    /// Finish Recommended Limit, in seconds; 0: not reported.
    pub frl: u32,
    /// Reserved bytes, and fields that this crate does not name.
    pub rsvd20: [u8; 2796],
    /// LBA Format Extensions, by LBA format.
    pub lbafe: [LbaFormatExtension; MAX_LBA_FORMAT_EXTENSIONS],
    /// Vendor specific.
    pub vs: [u8; 256],
}

const _: () = assert!(size_of::<IdentifyNamespaceZns>() == IDENTIFY_SIZE);
const _: () = assert!(offset_of!(IdentifyNamespaceZns, lbafe) == 2816);

bit_field! {
    /// Optional Zoned Command Support (ZNS 1.1, section 4.1.5.1, `OZCS`).
    pub struct Ozcs(u16) {
        /// Read Across Zone Boundaries.
        razb / with_razb: bool [0];
        /// Zone Random Write Area.
        zrwa / with_zrwa: bool [1];
    }
}

/// LBA Format Extension (ZNS 1.1, section 4.1.5.1).
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct LbaFormatExtension {
    /// Zone Size, in logical blocks.
    pub zsze: u64,
    /// Zone Descriptor Extension Size, in units of 64 bytes.
    pub zdes: u8,
    /// Reserved.
    pub rsvd9: [u8; 7],
}

const _: () = assert!(size_of::<LbaFormatExtension>() == 16);

/// Zoned Namespace Command Set specific Identify Controller (CNS 06h, CSI 02h; ZNS 1.1, section
/// 4.1.5.2).
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct IdentifyControllerZns {
    /// Zone Append Size Limit, a power of two of `CAP.MPSMIN` pages; 0: MDTS applies.
    pub zasl: u8,
    /// Reserved.
    pub rsvd1: [u8; 4095],
}

const _: () = assert!(size_of::<IdentifyControllerZns>() == IDENTIFY_SIZE);

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;
    use crate::sqe::Sqe;

    #[test]
    fn commands_have_their_fields_where_specified() {
        // As Linux builds them: a report of all zones, partial; a reset of all zones.
        let sqe = Sqe {
            cdw10: 0x8000,
            cdw11: 1,
            cdw12: 1023,
            cdw13: 0x0001_0000,
            ..Sqe::default()
        };
        let receive = ZoneManagementReceive::from(&sqe);
        assert_eq!((receive.slba, receive.length()), (Lba(0x1_0000_8000), 4096));
        assert_eq!(receive.zra, ZoneReceiveAction::REPORT_ZONES);
        assert_eq!(receive.zrasf, ReportingOptions::ALL);
        assert!(receive.partial);
        let sqe = Sqe {
            cdw13: 0x0104,
            ..Sqe::default()
        };
        let send = ZoneManagementSend::from(&sqe);
        assert_eq!(
            (send.zsa, send.select_all, send.zsaso),
            (ZoneSendAction::RESET, true, false)
        );
        let sqe = Sqe {
            cdw10: 0x8000,
            cdw12: 0x4200_0007,
            ..Sqe::default()
        };
        let append = ZoneAppend::from(&sqe);
        assert_eq!((append.zslba, append.nlb_z), (Lba(0x8000), 7));
        assert!(append.fua && append.piremap && !append.lr);
    }

    #[test]
    fn structures_are_laid_out_as_specified() {
        let descriptor = ZoneDescriptor {
            zt: ZoneTypeByte::default().with_zt(ZoneType::SEQUENTIAL_WRITE_REQUIRED),
            zs: ZoneStateByte::default().with_zs(ZoneState::FULL),
            zcap: 0x7000,
            zslba: Lba(0x8000),
            wp: Lba(0x8123),
            ..ZoneDescriptor::new_zeroed()
        };
        let bytes = descriptor.as_bytes();
        assert_eq!(bytes[..4], [0x02, 0xE0, 0, 0]);
        assert_eq!(bytes[8..18], [0x00, 0x70, 0, 0, 0, 0, 0, 0, 0x00, 0x80]);
        assert_eq!(bytes[24..26], [0x23, 0x81]);

        let mut id = IdentifyNamespaceZns::new_zeroed();
        id.ozcs = Ozcs::default().with_razb(true);
        id.mar_z = 13;
        id.mor_z = 7;
        id.lbafe[0].zsze = 0x8000;
        let bytes = id.as_bytes();
        assert_eq!(bytes[..12], [0, 0, 1, 0, 13, 0, 0, 0, 7, 0, 0, 0]);
        assert_eq!(bytes[2816..2820], [0x00, 0x80, 0, 0]);
    }
}

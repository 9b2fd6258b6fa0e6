//! Identify Controller data structures of the Base specification and the NVM Command Set.

use core::mem::{offset_of, size_of};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, little_endian::U128};

use super::{IDENTIFY_SIZE, PowerStateDescriptor};
use crate::{cqe::IOCQES, registers::NvmeVersion, sqe::IOSQES};

/// Identify Controller (CNS 01h; Base 2.0, section 5.17.2.1, Figure 275).
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct IdentifyController {
    /// PCI Vendor ID.
    pub vid: u16,
    /// PCI Subsystem Vendor ID.
    pub ssvid: u16,
    /// Serial Number: ASCII, padded with spaces.
    pub sn: [u8; 20],
    /// Model Number: ASCII, padded with spaces.
    pub mn: [u8; 40],
    /// Firmware Revision: ASCII, padded with spaces.
    pub fr: [u8; 8],
    /// Recommended Arbitration Burst, a power of two.
    pub rab: u8,
    /// IEEE OUI Identifier, least significant byte first.
    pub ieee: [u8; 3],
    /// Controller Multi-Path I/O and Namespace Sharing Capabilities.
    pub cmic: u8,
    /// Maximum Data Transfer Size, a power of two in units of `CAP.MPSMIN` pages; 0: no limit.
    pub mdts: u8,
    /// Controller ID.
    pub cntlid: u16,
    /// Version, as in `VS`.
    pub ver: NvmeVersion,
    /// RTD3 Resume Latency, in microseconds.
    pub rtd3r: u32,
    /// RTD3 Entry Latency, in microseconds.
    pub rtd3e: u32,
    /// Optional Asynchronous Events Supported.
    pub oaes: Oaes,
    /// Controller Attributes.
    pub ctratt: Ctratt,
    /// Read Recovery Levels Supported.
    pub rrls: u16,
    /// Reserved.
    pub rsvd102: [u8; 9],
    /// Controller Type.
    pub cntrltype: ControllerType,
    /// FRU Globally Unique Identifier.
    pub fguid: [u8; 16],
    /// Command Retry Delay Times 1 to 3, in units of 100 ms.
    pub crdt: [u16; 3],
    /// Reserved.
    pub rsvd134: [u8; 119],
    /// NVM Subsystem Report.
    pub nvmsr: u8,
    /// VPD Write Cycle Information.
    pub vwci: u8,
    /// Management Endpoint Capabilities.
    pub mec: u8,
    /// Optional Admin Command Support.
    pub oacs: Oacs,
    /// Abort Command Limit.
    pub acl_z: u8,
    /// Asynchronous Event Request Limit.
    pub aerl_z: u8,
    /// Firmware Updates.
    pub frmw: Frmw,
    /// Log Page Attributes.
    pub lpa: Lpa,
    /// Error Log Page Entries.
    pub elpe_z: u8,
    /// Number of Power States Support.
    pub npss_z: u8,
    /// Admin Vendor Specific Command Configuration.
    pub avscc: u8,
    /// Autonomous Power State Transition Attributes.
    pub apsta: u8,
    /// Warning Composite Temperature Threshold, in kelvins.
    pub wctemp: u16,
    /// Critical Composite Temperature Threshold, in kelvins.
    pub cctemp: u16,
    /// Maximum Time for Firmware Activation, in units of 100 ms.
    pub mtfa: u16,
    /// Host Memory Buffer Preferred Size, in units of 4 KiB.
    pub hmpre: u32,
    /// Host Memory Buffer Minimum Size, in units of 4 KiB.
    pub hmmin: u32,
    /// Total NVM Capacity, in bytes.
    pub tnvmcap: U128,
    /// Unallocated NVM Capacity, in bytes.
    pub unvmcap: U128,
    /// Replay Protected Memory Block Support.
    pub rpmbs: u32,
    /// Extended Device Self-test Time, in minutes.
    pub edstt: u16,
    /// Device Self-test Options.
    pub dsto: u8,
    /// Firmware Update Granularity, in units of 4 KiB.
    pub fwug: u8,
    /// Keep Alive Support: granularity of the timer in units of 100 ms; 0: not supported.
    pub kas: u16,
    /// Host Controlled Thermal Management Attributes.
    pub hctma: u16,
    /// Minimum Thermal Management Temperature, in kelvins.
    pub mntmt: u16,
    /// Maximum Thermal Management Temperature, in kelvins.
    pub mxtmt: u16,
    /// Sanitize Capabilities.
    pub sanicap: u32,
    /// Host Memory Buffer Minimum Descriptor Entry Size, in units of 4 KiB.
    pub hmminds: u32,
    /// Host Memory Maximum Descriptors Entries.
    pub hmmaxd: u16,
    /// NVM Set Identifier Maximum.
    pub nsetidmax: u16,
    /// Endurance Group Identifier Maximum.
    pub endgidmax: u16,
    /// ANA Transition Time, in seconds.
    pub anatt: u8,
    /// Asymmetric Namespace Access Capabilities.
    pub anacap: u8,
    /// ANA Group Identifier Maximum.
    pub anagrpmax: u32,
    /// Number of ANA Group Identifiers.
    pub nanagrpid: u32,
    /// Persistent Event Log Size, in units of 64 KiB.
    pub pels: u32,
    /// Domain Identifier.
    pub domain_id: u16,
    /// Reserved.
    pub rsvd358: [u8; 10],
    /// Max Endurance Group Capacity, in bytes.
    pub megcap: U128,
    /// Reserved.
    pub rsvd384: [u8; 128],
    /// Submission Queue Entry Size.
    pub sqes: QueueEntrySizes,
    /// Completion Queue Entry Size.
    pub cqes: QueueEntrySizes,
    /// Maximum Outstanding Commands; 0: not reported.
    pub maxcmd: u16,
    /// Number of Namespaces: the highest valid NSID.
    pub nn: u32,
    /// Optional NVM Command Support.
    pub oncs: Oncs,
    /// Fused Operation Support; bit 0: Compare and Write.
    pub fuses: u16,
    /// Format NVM Attributes.
    pub fna: u8,
    /// Volatile Write Cache.
    pub vwc: Vwc,
    /// Atomic Write Unit Normal, in logical blocks.
    pub awun_z: u16,
    /// Atomic Write Unit Power Fail, in logical blocks.
    pub awupf_z: u16,
    /// I/O Command Set Vendor Specific Command Configuration.
    pub icsvscc: u8,
    /// Namespace Write Protection Capabilities.
    pub nwpc: u8,
    /// Atomic Compare & Write Unit, in logical blocks.
    pub acwu_z: u16,
    /// Copy Descriptor Formats Supported: bit `n` for format `n`.
    pub cdfs: u16,
    /// SGL Support.
    pub sgls: Sgls,
    /// Maximum Number of Allowed Namespaces; 0: as many as `NN`.
    pub mnan: u32,
    /// Maximum Domain Namespace Attachments.
    pub maxdna: U128,
    /// Maximum I/O Controller Namespace Attachments.
    pub maxcna: u32,
    /// Reserved.
    pub rsvd564: [u8; 204],
    /// NVM Subsystem NVMe Qualified Name: UTF-8, terminated by a zero byte.
    pub subnqn: [u8; 256],
    /// Reserved.
    pub rsvd1024: [u8; 768],
    /// Fabrics specific.
    pub fabrics: [u8; 256],
    /// Power State Descriptors 0 to 31.
    pub psd: [PowerStateDescriptor; 32],
    /// Vendor Specific.
    pub vs: [u8; 1024],
}

const _: () = assert!(size_of::<IdentifyController>() == IDENTIFY_SIZE);
const _: () = assert!(offset_of!(IdentifyController, ver) == 80);
const _: () = assert!(offset_of!(IdentifyController, cntrltype) == 111);
const _: () = assert!(offset_of!(IdentifyController, crdt) == 128);
const _: () = assert!(offset_of!(IdentifyController, oacs) == 256);
const _: () = assert!(offset_of!(IdentifyController, tnvmcap) == 280);
const _: () = assert!(offset_of!(IdentifyController, kas) == 320);
const _: () = assert!(offset_of!(IdentifyController, megcap) == 368);
const _: () = assert!(offset_of!(IdentifyController, sqes) == 512);
const _: () = assert!(offset_of!(IdentifyController, vwc) == 525);
const _: () = assert!(offset_of!(IdentifyController, sgls) == 536);
const _: () = assert!(offset_of!(IdentifyController, subnqn) == 768);
const _: () = assert!(offset_of!(IdentifyController, fabrics) == 1792);
const _: () = assert!(offset_of!(IdentifyController, psd) == 2048);

open_enum! {
    /// Controller Type (Base 2.0, Figure 275, `CNTRLTYPE`).
    pub struct ControllerType(u8) {
        NOT_REPORTED = 0x0, "Controller type not reported";
        IO = 0x1, "I/O controller";
        DISCOVERY = 0x2, "Discovery controller";
        ADMINISTRATIVE = 0x3, "Administrative controller";
    }
}

bit_field! {
    /// Optional Asynchronous Events Supported (Base 2.0, Figure 275, `OAES`).
    pub struct Oaes(u32) {
        /// Namespace Attribute Notices.
        namespace_attribute / with_namespace_attribute: bool [8];
        /// Firmware Activation Notices.
        firmware_activation / with_firmware_activation: bool [9];
        /// Asymmetric Namespace Access Change Notices.
        ana_change / with_ana_change: bool [11];
        /// Predictable Latency Event Aggregate Log Change Notices.
        predictable_latency / with_predictable_latency: bool [12];
        /// LBA Status Information Alert Notices.
        lba_status / with_lba_status: bool [13];
        /// Endurance Group Event Aggregate Log Change Notices.
        endurance_group / with_endurance_group: bool [14];
        /// Normal NVM Subsystem Shutdown.
        normal_shutdown / with_normal_shutdown: bool [15];
        /// Zone Descriptor Changed Notices.
        zone_descriptor / with_zone_descriptor: bool [27];
        /// Discovery Log Page Change Notification.
        discovery_log / with_discovery_log: bool [31];
    }
}

bit_field! {
    /// Controller Attributes (Base 2.0, Figure 275, `CTRATT`).
    pub struct Ctratt(u32) {
        /// 128-bit Host Identifier.
        host_id_128 / with_host_id_128: bool [0];
        /// Non-Operational Power State Permissive Mode.
        nopspm / with_nopspm: bool [1];
        /// NVM Sets.
        nvm_sets / with_nvm_sets: bool [2];
        /// Read Recovery Levels.
        read_recovery_levels / with_read_recovery_levels: bool [3];
        /// Endurance Groups.
        endurance_groups / with_endurance_groups: bool [4];
        /// Predictable Latency Mode.
        predictable_latency / with_predictable_latency: bool [5];
        /// Traffic Based Keep Alive Support.
        tbkas / with_tbkas: bool [6];
        /// Namespace Granularity.
        namespace_granularity / with_namespace_granularity: bool [7];
        /// SQ Associations.
        sq_associations / with_sq_associations: bool [8];
        /// UUID List.
        uuid_list / with_uuid_list: bool [9];
        /// Multi-Domain Subsystem.
        mds / with_mds: bool [10];
        /// Fixed Capacity Management.
        fixed_capacity / with_fixed_capacity: bool [11];
        /// Variable Capacity Management.
        variable_capacity / with_variable_capacity: bool [12];
        /// Delete Endurance Group.
        delete_endurance_group / with_delete_endurance_group: bool [13];
        /// Delete NVM Set.
        delete_nvm_set / with_delete_nvm_set: bool [14];
        /// Extended LBA Formats Supported.
        elbas / with_elbas: bool [15];
    }
}

bit_field! {
    /// Optional Admin Command Support (Base 2.0, Figure 275, `OACS`).
    pub struct Oacs(u16) {
        /// Security Send and Security Receive.
        security / with_security: bool [0];
        /// Format NVM.
        format / with_format: bool [1];
        /// Firmware Commit and Firmware Image Download.
        firmware / with_firmware: bool [2];
        /// Namespace Management and Namespace Attachment.
        namespace_management / with_namespace_management: bool [3];
        /// Device Self-test.
        self_test / with_self_test: bool [4];
        /// Directives.
        directives / with_directives: bool [5];
        /// NVMe-MI Send and NVMe-MI Receive.
        nvme_mi / with_nvme_mi: bool [6];
        /// Virtualization Management.
        virtualization / with_virtualization: bool [7];
        /// Doorbell Buffer Config.
        doorbell_buffer_config / with_doorbell_buffer_config: bool [8];
        /// Get LBA Status.
        get_lba_status / with_get_lba_status: bool [9];
        /// Command and Feature Lockdown.
        lockdown / with_lockdown: bool [10];
    }
}

bit_field! {
    /// Firmware Updates (Base 2.0, Figure 275, `FRMW`).
    pub struct Frmw(u8) {
        /// The first firmware slot is read only.
        first_slot_read_only / with_first_slot_read_only: bool [0];
        /// Number of firmware slots.
        slots / with_slots: u8 [3:1];
        /// Firmware activation without a reset.
        activation_without_reset / with_activation_without_reset: bool [4];
        /// Support Multiple Update Detection.
        smud / with_smud: bool [5];
    }
}

bit_field! {
    /// Log Page Attributes (Base 2.0, Figure 275, `LPA`).
    pub struct Lpa(u8) {
        /// SMART / Health Information per namespace.
        smart_per_namespace / with_smart_per_namespace: bool [0];
        /// Commands Supported and Effects log page.
        commands_effects / with_commands_effects: bool [1];
        /// Extended data for Get Log Page: 32-bit `NUMD` and the log page offset.
        extended_data / with_extended_data: bool [2];
        /// Telemetry log pages and notices.
        telemetry / with_telemetry: bool [3];
        /// Persistent Event log page.
        persistent_event / with_persistent_event: bool [4];
        /// Log pages 00h, 12h and 13h, which list what is supported, and scopes of commands in log page 05h.
        supported_log_pages / with_supported_log_pages: bool [5];
        /// Telemetry Data Area 4.
        telemetry_area_4 / with_telemetry_area_4: bool [6];
    }
}

bit_field! {
    /// Sizes of queue entries (Base 2.0, Figure 275, `SQES` and `CQES`), each a power of two.
    pub struct QueueEntrySizes(u8) {
        /// Required: the smallest size, which the NVM Command Set uses.
        required / with_required: u8 [3:0];
        /// Maximum.
        maximum / with_maximum: u8 [7:4];
    }
}

impl QueueEntrySizes {
    /// Size of submission queue entries if only 64 bytes are supported.
    pub const SQ: Self = Self(IOSQES << 4 | IOSQES);
    /// Size of completion queue entries if only 16 bytes are supported.
    pub const CQ: Self = Self(IOCQES << 4 | IOCQES);
}

bit_field! {
    /// Optional NVM Command Support (Base 2.0, Figure 275, `ONCS`).
    pub struct Oncs(u16) {
        /// Compare.
        compare / with_compare: bool [0];
        /// Write Uncorrectable.
        write_uncorrectable / with_write_uncorrectable: bool [1];
        /// Dataset Management.
        dsm / with_dsm: bool [2];
        /// Write Zeroes.
        write_zeroes / with_write_zeroes: bool [3];
        /// The Save field of Set Features and the Select field of Get Features.
        save_select / with_save_select: bool [4];
        /// Reservations.
        reservations / with_reservations: bool [5];
        /// The Timestamp feature.
        timestamp / with_timestamp: bool [6];
        /// Verify.
        verify / with_verify: bool [7];
        /// Copy.
        copy / with_copy: bool [8];
    }
}

bit_field! {
    /// Volatile Write Cache (Base 2.0, Figure 275, `VWC`).
    pub struct Vwc(u8) {
        /// A volatile write cache is present.
        present / with_present: bool [0];
        /// Flush with the broadcast NSID.
        flush_broadcast / with_flush_broadcast: FlushBroadcast(u8) [2:1];
    }
}

open_enum! {
    /// Effect of Flush with NSID FFFFFFFFh (Base 2.0, Figure 275, `VWC`).
    pub struct FlushBroadcast(u8) {
        NOT_INDICATED = 0b00, "Support not indicated";
        NOT_SUPPORTED = 0b10, "Flush with the broadcast NSID is not supported";
        SUPPORTED = 0b11, "Flush with the broadcast NSID is supported";
    }
}

bit_field! {
    /// SGL Support (Base 2.0, Figure 275, `SGLS`).
    pub struct Sgls(u32) {
        /// SGLs in I/O commands: 0 not supported, 1 with byte alignment, 2 with dword alignment.
        support / with_support: u8 [1:0];
        /// Keyed SGL Data Block descriptor.
        keyed / with_keyed: bool [2];
        /// SGL Descriptor Threshold: recommended maximum of descriptors in a command.
        sdt / with_sdt: u8 [15:8];
        /// SGL Bit Bucket descriptor.
        bit_bucket / with_bit_bucket: bool [16];
        /// `MPTR` as the address of a byte-aligned contiguous metadata buffer.
        mptr_buffer / with_mptr_buffer: bool [17];
        /// SGLs longer than the data.
        larger_than_data / with_larger_than_data: bool [18];
        /// `MPTR` as the address of an SGL descriptor.
        mptr_sgl / with_mptr_sgl: bool [19];
        /// Address field as an offset.
        offset / with_offset: bool [20];
        /// Transport SGL Data Block descriptor.
        transport / with_transport: bool [21];
    }
}

/// NVM Command Set specific Identify Controller (CNS 06h, CSI 00h; NVM 1.0, section 4.1.5.4).
///
/// Limits that are powers of two are in units of `CAP.MPSMIN` pages. A value of 0 means that the limit is not reported.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct IdentifyControllerNvm {
    /// Verify Size Limit, a power of two.
    pub vsl: u8,
    /// Write Zeroes Size Limit, a power of two.
    pub wzsl: u8,
    /// Write Uncorrectable Size Limit, a power of two.
    pub wusl: u8,
    /// Dataset Management Ranges Limit: ranges of a command.
    pub dmrl: u8,
    /// Dataset Management Range Size Limit: logical blocks of a range.
    pub dmrsl: u32,
    /// Dataset Management Size Limit: logical blocks of a command.
    pub dmsl: u64,
    /// Reserved.
    pub rsvd16: [u8; 4080],
}

const _: () = assert!(size_of::<IdentifyControllerNvm>() == IDENTIFY_SIZE);
const _: () = assert!(offset_of!(IdentifyControllerNvm, dmsl) == 8);

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;

    #[test]
    fn identify_controller_is_laid_out_as_specified() {
        let mut id = IdentifyController::new_zeroed();
        id.vid = 0x1D1D;
        id.mdts = 8;
        id.ver = NvmeVersion::V2_0;
        id.oacs = Oacs::default().with_doorbell_buffer_config(true);
        id.tnvmcap = U128::new(1 << 40);
        id.sqes = QueueEntrySizes::SQ;
        id.cqes = QueueEntrySizes::CQ;
        id.nn = 1;
        id.oncs = Oncs::default().with_compare(true).with_copy(true);
        id.vwc = Vwc::default()
            .with_present(true)
            .with_flush_broadcast(FlushBroadcast::SUPPORTED);
        id.sgls = Sgls::default().with_support(1).with_bit_bucket(true);
        id.psd[0].mp = 2500;
        let bytes = id.as_bytes();
        assert_eq!(bytes[0..2], [0x1D, 0x1D]);
        assert_eq!(bytes[77], 8);
        assert_eq!(bytes[80..84], [0, 0, 2, 0]);
        assert_eq!(bytes[256..258], [0x00, 0x01]);
        assert_eq!(bytes[280..296], (1u128 << 40).to_le_bytes());
        assert_eq!(bytes[512..514], [0x66, 0x44]);
        assert_eq!(bytes[516..520], [1, 0, 0, 0]);
        assert_eq!(bytes[520..522], [0x01, 0x01]);
        assert_eq!(bytes[525], 0b111);
        assert_eq!(bytes[536..540], [0x01, 0x00, 0x01, 0x00]);
        assert_eq!(bytes[2048..2050], [0xC4, 0x09]);
    }

    #[test]
    fn attributes_have_their_bits() {
        assert_eq!(Oaes::default().with_namespace_attribute(true).0, 0x100);
        assert_eq!(
            Ctratt::default().with_tbkas(true).with_elbas(true).0,
            0x8040
        );
        assert_eq!(
            Frmw::default()
                .with_first_slot_read_only(true)
                .with_slots(1)
                .0,
            0b11
        );
        assert_eq!(
            Lpa::default()
                .with_commands_effects(true)
                .with_extended_data(true)
                .0,
            0b110
        );
    }

    #[test]
    fn nvm_limits_are_laid_out_as_specified() {
        let mut id = IdentifyControllerNvm::new_zeroed();
        (id.vsl, id.wzsl, id.wusl, id.dmrl) = (1, 2, 3, 4);
        (id.dmrsl, id.dmsl) = (5, 6);
        assert_eq!(
            id.as_bytes()[..16],
            [1, 2, 3, 4, 5, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0]
        );
    }
}

//! Log pages, and the command that reads them (Base 2.0, section 5.16).

use core::mem::{offset_of, size_of};

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout,
    little_endian::{U16, U128},
};

use super::{
    identify::Csi,
    ids::{CommandId, Lba, Nsid, QueueId},
    status::Status,
};

command! {
    /// Get Log Page (Base 2.0, section 5.16).
    pub struct LogPageRequest {
        /// Log Page Identifier.
        lid: LogPageId(u8) = cdw10[7:0];
        /// Log Specific Parameter.
        lsp: u8 = cdw10[14:8];
        /// Retain Asynchronous Event: reading the page does not clear the event.
        rae: bool = cdw10[15];
        /// Low part of the Number of Dwords.
        numdl: u16 = cdw10[31:16];
        /// High part of the Number of Dwords.
        numdu: u16 = cdw11[15:0];
        /// Log Specific Identifier.
        lsi: u16 = cdw11[31:16];
        /// Log Page Offset, in bytes, or in entries if [`Self::ot`] is set.
        lpo: u64 = cdw12.cdw13;
        /// UUID Index.
        uuid_index: u8 = cdw14[6:0];
        /// Offset Type: the offset is an entry index rather than a byte offset.
        ot: bool = cdw14[23];
        /// Command Set Identifier.
        csi: Csi(u8) = cdw14[31:24];
    }
}

impl LogPageRequest {
    /// Returns the Number of Dwords.
    #[inline]
    #[must_use]
    pub const fn numd_z(&self) -> u32 {
        self.numdl as u32 | (self.numdu as u32) << 16
    }

    /// Returns the number of bytes to return.
    #[inline]
    #[must_use]
    pub const fn length(&self) -> u64 {
        (self.numd_z() as u64 + 1) * 4
    }
}

open_enum! {
    /// Log Page Identifier (Base 2.0, section 5.16.1).
    pub struct LogPageId(u8) {
        SUPPORTED_LOG_PAGES = 0x00, "Supported Log Pages";
        ERROR_INFORMATION = 0x01, "Error Information";
        SMART_HEALTH = 0x02, "SMART / Health Information";
        FIRMWARE_SLOT = 0x03, "Firmware Slot Information";
        CHANGED_NAMESPACE_LIST = 0x04, "Changed Namespace List";
        COMMANDS_SUPPORTED_AND_EFFECTS = 0x05, "Commands Supported and Effects";
        DEVICE_SELF_TEST = 0x06, "Device Self-test";
        TELEMETRY_HOST = 0x07, "Telemetry Host-Initiated";
        TELEMETRY_CONTROLLER = 0x08, "Telemetry Controller-Initiated";
        ENDURANCE_GROUP = 0x09, "Endurance Group Information";
        PREDICTABLE_LATENCY_PER_NVM_SET = 0x0A, "Predictable Latency Per NVM Set";
        PREDICTABLE_LATENCY_AGGREGATE = 0x0B, "Predictable Latency Event Aggregate";
        ANA = 0x0C, "Asymmetric Namespace Access";
        PERSISTENT_EVENT = 0x0D, "Persistent Event Log";
        LBA_STATUS = 0x0E, "LBA Status Information";
        ENDURANCE_GROUP_AGGREGATE = 0x0F, "Endurance Group Event Aggregate";
        MEDIA_UNIT_STATUS = 0x10, "Media Unit Status";
        SUPPORTED_CAPACITY_CONFIGURATIONS = 0x11, "Supported Capacity Configuration List";
        FEATURES_SUPPORTED_AND_EFFECTS = 0x12, "Feature Identifiers Supported and Effects";
        NVME_MI_COMMANDS_SUPPORTED_AND_EFFECTS = 0x13, "NVMe-MI Commands Supported and Effects";
        LOCKDOWN = 0x14, "Command and Feature Lockdown";
        BOOT_PARTITION = 0x15, "Boot Partition";
        ROTATIONAL_MEDIA = 0x16, "Rotational Media Information";
        DISCOVERY = 0x70, "Discovery";
        RESERVATION_NOTIFICATION = 0x80, "Reservation Notification";
        SANITIZE_STATUS = 0x81, "Sanitize Status";
        CHANGED_ZONE_LIST = 0xBF, "Changed Zone List";
    }
}

/// Supported Log Pages (LID 00h; Base 2.0, section 5.16.1.1), by Log Page Identifier.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SupportedLogPages(pub [LogPageSupport; 256]);

const _: () = assert!(size_of::<SupportedLogPages>() == 1024);

bit_field! {
    /// Support of a log page (Base 2.0, section 5.16.1.1).
    pub struct LogPageSupport(u32) {
        /// LID Supported.
        lsupp / with_lsupp: bool [0];
        /// Index Offset Supported: [`LogPageRequest::ot`] may be set.
        ios / with_ios: bool [1];
        /// LID Specific Parameter.
        specific / with_specific: u16 [31:16];
    }
}

/// Entry of the Error Information log page, which lists the newest entry first (LID 01h; Base 2.0, section 5.16.1.2).
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct ErrorInformation {
    /// Error Count, unique and increasing; 0: the entry is invalid.
    pub error_count: u64,
    /// Submission Queue ID; FFFFh: not specific to a command.
    pub sqid: QueueId,
    /// Command ID; FFFFh: not specific to a command.
    pub cid: CommandId,
    /// Status Field.
    pub status: ErrorStatus,
    /// Parameter Error Location; FFFFh: not specific to a command.
    pub parameter_error_location: ParameterErrorLocation,
    /// First LBA with the error, if any.
    pub lba: Lba,
    /// Namespace with the error, if any.
    pub nsid: Nsid,
    /// Vendor Specific Information Available: a log page identifier, or 0.
    pub vendor_log: LogPageId,
    /// Transport Type.
    pub trtype: u8,
    /// Reserved.
    pub rsvd30: [u8; 2],
    /// Command Specific Information.
    pub command_specific: u64,
    /// Transport Type Specific Information.
    pub transport_specific: u16,
    /// Reserved.
    pub rsvd42: [u8; 22],
}

const _: () = assert!(size_of::<ErrorInformation>() == 64);
const _: () = assert!(offset_of!(ErrorInformation, lba) == 16);
const _: () = assert!(offset_of!(ErrorInformation, command_specific) == 32);

bit_field! {
    /// Status Field of an [`ErrorInformation`], with the Phase Tag of the completion.
    pub struct ErrorStatus(u16) {
        /// Phase Tag.
        phase / with_phase: bool [0];
        /// Status Field.
        status / with_status: Status(u16) [15:1];
    }
}

bit_field! {
    /// Position of an invalid parameter in a command: its first byte and bit (Base 2.0, section 5.16.1.2).
    pub struct ParameterErrorLocation(u16) {
        /// Byte of the Submission Queue entry in which the invalid parameter begins.
        byte / with_byte: u8 [7:0];
        /// Bit of that byte in which the invalid parameter begins.
        bit / with_bit: u8 [10:8];
    }
}

impl ParameterErrorLocation {
    /// The error is not specific to a command.
    pub const NONE: Self = Self(0xFFFF);
}

/// SMART / Health Information (LID 02h; Base 2.0, section 5.16.1.3).
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SmartHealth {
    /// Critical Warning.
    pub critical_warning: CriticalWarning,
    /// Composite Temperature, in kelvins.
    pub composite_temperature: U16,
    /// Available Spare, in percent.
    pub available_spare: u8,
    /// Available Spare Threshold, in percent.
    pub available_spare_threshold: u8,
    /// Percentage Used of the estimated life; may exceed 100.
    pub percentage_used: u8,
    /// Endurance Group Critical Warning Summary.
    pub endurance_group_warning: u8,
    /// Reserved.
    pub rsvd7: [u8; 25],
    /// Data Units Read, in thousands of 512 bytes, rounded up.
    pub data_units_read: U128,
    /// Data Units Written, in thousands of 512 bytes, rounded up.
    pub data_units_written: U128,
    /// Host Read Commands.
    pub host_read_commands: U128,
    /// Host Write Commands.
    pub host_write_commands: U128,
    /// Controller Busy Time, in minutes.
    pub controller_busy_time: U128,
    /// Power Cycles.
    pub power_cycles: U128,
    /// Power On Hours.
    pub power_on_hours: U128,
    /// Unsafe Shutdowns.
    pub unsafe_shutdowns: U128,
    /// Media and Data Integrity Errors.
    pub media_errors: U128,
    /// Number of Error Information Log Entries over the life of the controller.
    pub error_log_entries: U128,
    /// Warning Composite Temperature Time, in minutes.
    pub warning_temperature_time: u32,
    /// Critical Composite Temperature Time, in minutes.
    pub critical_temperature_time: u32,
    /// Temperature Sensors 1 to 8, in kelvins; 0: no such sensor.
    pub temperature_sensors: [u16; 8],
    /// Thermal Management Temperature 1 and 2 Transition Counts.
    pub thermal_transitions: [u32; 2],
    /// Total Time For Thermal Management Temperature 1 and 2, in seconds.
    pub thermal_time: [u32; 2],
    /// Reserved.
    pub rsvd232: [u8; 280],
}

const _: () = assert!(size_of::<SmartHealth>() == 512);
const _: () = assert!(offset_of!(SmartHealth, data_units_read) == 32);
const _: () = assert!(offset_of!(SmartHealth, warning_temperature_time) == 192);
const _: () = assert!(offset_of!(SmartHealth, thermal_transitions) == 216);

bit_field! {
    /// Critical Warning (Base 2.0, section 5.16.1.3). Asynchronous Event Configuration has these bits, too.
    pub struct CriticalWarning(u8) {
        /// Available spare has fallen below the threshold.
        spare / with_spare: bool [0];
        /// A temperature is beyond a threshold.
        temperature / with_temperature: bool [1];
        /// The NVM subsystem's reliability has been degraded.
        reliability / with_reliability: bool [2];
        /// All media are read only.
        read_only / with_read_only: bool [3];
        /// The backup of volatile memory has failed.
        volatile_backup / with_volatile_backup: bool [4];
        /// The Persistent Memory Region is read only or unreliable.
        pmr / with_pmr: bool [5];
    }
}

/// Firmware Slot Information (LID 03h; Base 2.0, section 5.16.1.4).
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct FirmwareSlots {
    /// Active Firmware Info.
    pub afi: ActiveFirmware,
    /// Reserved.
    pub rsvd1: [u8; 7],
    /// Firmware Revisions of slots 1 to 7: ASCII; zeroes: the slot is empty.
    pub frs: [[u8; 8]; 7],
    /// Reserved.
    pub rsvd64: [u8; 448],
}

const _: () = assert!(size_of::<FirmwareSlots>() == 512);
const _: () = assert!(offset_of!(FirmwareSlots, frs) == 8);

bit_field! {
    /// Active Firmware Info (Base 2.0, section 5.16.1.4).
    pub struct ActiveFirmware(u8) {
        /// Slot that the running firmware was loaded from.
        active / with_active: u8 [2:0];
        /// Slot that the next reset activates; 0: not indicated.
        next / with_next: u8 [6:4];
    }
}

/// Changed Namespace List (LID 04h; Base 2.0, section 5.16.1.5): identifiers in ascending order, terminated by zeroes.
/// If there are too many changes, the first entry is [`Nsid::BROADCAST`] and the others are zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ChangedNamespaceList(pub [Nsid; 1024]);

const _: () = assert!(size_of::<ChangedNamespaceList>() == 4096);

/// List of changes in a namespace, in the form of the Changed Zone List (LID BFh; ZNS 1.1, section 4.1.4.1).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ChangeList {
    /// Number of identifiers; FFFFh if they are too many for the list, which is then empty.
    pub count: u16,
    /// Reserved.
    pub rsvd2: [u8; 6],
    /// Identifiers: the first LBA of each changed unit.
    pub ids: [u64; Self::CAPACITY],
}

impl ChangeList {
    /// Maximum number of identifiers in the list.
    pub const CAPACITY: usize = 511;
    /// Value of `count` if there are too many changes.
    pub const OVERFLOW: u16 = 0xFFFF;
}

const _: () = assert!(size_of::<ChangeList>() == 4096);

/// Commands Supported and Effects (LID 05h; Base 2.0, section 5.16.1.6).
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct CommandsSupportedAndEffects {
    /// Admin commands, by opcode.
    pub acs: [CommandEffects; 256],
    /// I/O commands of the requested command set, by opcode.
    pub iocs: [CommandEffects; 256],
    /// Reserved.
    pub rsvd2048: [u8; 2048],
}

const _: () = assert!(size_of::<CommandsSupportedAndEffects>() == 4096);

bit_field! {
    /// Support and effects of one command (Base 2.0, section 5.16.1.6).
    pub struct CommandEffects(u32) {
        /// Command Supported.
        csupp / with_csupp: bool [0];
        /// Logical Block Content Change.
        lbcc / with_lbcc: bool [1];
        /// Namespace Capability Change.
        ncc / with_ncc: bool [2];
        /// Namespace Inventory Change.
        nic / with_nic: bool [3];
        /// Controller Capability Change.
        ccc / with_ccc: bool [4];
        /// Command Submission and Execution.
        cse / with_cse: CommandSubmissionExecution(u8) [18:16];
        /// UUID Selection Supported.
        uss / with_uss: bool [19];
        /// Command Scope: a bit for namespace, controller, NVM set, endurance group, domain and
        /// NVM subsystem, in this order from bit 0; 0: not reported.
        csp / with_csp: u16 [31:20];
    }
}

/// Feature Identifiers Supported and Effects (LID 12h; Base 2.0, section 5.16.1.18), with an entry for each Feature
/// Identifier.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct FeaturesSupportedAndEffects(pub [FeatureEffects; 256]);

const _: () = assert!(size_of::<FeaturesSupportedAndEffects>() == 1024);

bit_field! {
    /// Support and effects of one feature (Base 2.0, section 5.16.1.18).
    pub struct FeatureEffects(u32) {
        /// Feature Supported.
        fsupp / with_fsupp: bool [0];
        /// User Data Content Change.
        udcc / with_udcc: bool [1];
        /// Namespace Capability Change.
        ncc / with_ncc: bool [2];
        /// Namespace Inventory Change.
        nic / with_nic: bool [3];
        /// Controller Capability Change.
        ccc / with_ccc: bool [4];
        /// UUID Selection Supported.
        uss / with_uss: bool [19];
        /// Feature Scope: a bit for namespace, controller, NVM set, endurance group, domain and NVM
        /// subsystem, in this order from bit 0.
        fsp / with_fsp: u16 [31:20];
    }
}

impl FeatureEffects {
    /// Namespace scope.
    pub const NAMESPACE: u16 = 1 << 0;
    /// Controller scope.
    pub const CONTROLLER: u16 = 1 << 1;
}

open_enum! {
    /// Command Submission and Execution (Base 2.0, section 5.16.1.6).
    pub struct CommandSubmissionExecution(u8) {
        UNRESTRICTED = 0b000, "No command submission or execution restriction";
        ONE_PER_NAMESPACE = 0b001, "No other command for the same namespace";
        ONE = 0b010, "No other command for any namespace";
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;
    use crate::sqe::Sqe;

    #[test]
    fn a_request_joins_its_halves() {
        let sqe = Sqe {
            cdw10: 0x007F_8502,
            cdw11: 0x0009_0001,
            cdw12: 0x200,
            cdw13: 1,
            cdw14: 0x0280_0000,
            ..Sqe::default()
        };
        let request = LogPageRequest::from(&sqe);
        assert_eq!(
            (request.lid, request.lsp, request.lsi),
            (LogPageId::SMART_HEALTH, 5, 9)
        );
        assert!(request.rae && request.ot);
        assert_eq!((request.numd_z(), request.length()), (0x1_007F, 0x4_0200));
        assert_eq!(
            (request.lpo, request.csi),
            (0x1_0000_0200, Csi::ZONED_NAMESPACE)
        );

        let most = Sqe {
            cdw10: !0,
            cdw11: !0,
            ..Sqe::default()
        };
        assert_eq!(LogPageRequest::from(&most).length(), 1 << 34);
    }

    #[test]
    fn an_error_entry_is_laid_out_as_specified() {
        let entry = ErrorInformation {
            error_count: 3,
            sqid: QueueId(1),
            cid: CommandId(0x1234),
            status: ErrorStatus::default().with_status(Status::LBA_OUT_OF_RANGE),
            parameter_error_location: ParameterErrorLocation::default().with_byte(40).with_bit(7),
            lba: Lba(0x55),
            nsid: Nsid(1),
            ..ErrorInformation::default()
        };
        assert_eq!(
            entry.as_bytes()[..32],
            [
                3, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0x34, 0x12, 0x00, 0x01, 40,
                7, // up to Parameter Error Location
                0x55, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0,
            ]
        );
    }

    #[test]
    fn smart_counters_are_128_bits_wide() {
        let mut smart = SmartHealth::new_zeroed();
        smart.critical_warning = CriticalWarning::default().with_read_only(true);
        smart.composite_temperature = U16::new(0x0139);
        smart.available_spare = 100;
        smart.data_units_written = U128::new(1 << 64);
        smart.temperature_sensors[0] = 0x0139;
        let bytes = smart.as_bytes();
        assert_eq!(bytes[..4], [0b1000, 0x39, 0x01, 100]);
        assert_eq!(bytes[48..64], (1u128 << 64).to_le_bytes());
        assert_eq!(bytes[200..202], [0x39, 0x01]);
    }

    #[test]
    fn firmware_lives_in_slots_from_1_to_7() {
        let mut slots = FirmwareSlots::new_zeroed();
        slots.afi = ActiveFirmware::default().with_active(1).with_next(2);
        slots.frs[0] = *b"1.0     ";
        assert_eq!(slots.as_bytes()[0], 0x21);
        assert_eq!(&slots.as_bytes()[8..16], b"1.0     ");
    }

    #[test]
    fn effects_are_indexed_by_opcode() {
        let mut log = CommandsSupportedAndEffects::new_zeroed();
        log.acs[0x06] = CommandEffects::default().with_csupp(true);
        log.iocs[0x01] = CommandEffects::default()
            .with_csupp(true)
            .with_lbcc(true)
            .with_cse(CommandSubmissionExecution::ONE_PER_NAMESPACE)
            .with_csp(1);
        assert_eq!(log.as_bytes()[0x18..0x1C], [1, 0, 0, 0]);
        assert_eq!(log.as_bytes()[1028..1032], [0x03, 0x00, 0x11, 0x00]);
        assert_eq!(
            LogPageSupport::default().with_lsupp(true).with_ios(true).0,
            3
        );
    }
}

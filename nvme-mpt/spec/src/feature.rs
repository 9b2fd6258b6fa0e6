//! Features: identifiers and values (Base 2.0, section 5.27.1; NVM 1.0, section 4.1.3).

use core::mem::{offset_of, size_of};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{ids::Lba, log::CriticalWarning};

open_enum! {
    /// Feature Identifier (Base 2.0, section 5.27.1; NVM 1.0, section 4.1.3).
    pub struct FeatureId(u8) {
        ARBITRATION = 0x01, "Arbitration";
        POWER_MANAGEMENT = 0x02, "Power Management";
        LBA_RANGE_TYPE = 0x03, "LBA Range Type";
        TEMPERATURE_THRESHOLD = 0x04, "Temperature Threshold";
        ERROR_RECOVERY = 0x05, "Error Recovery";
        VOLATILE_WRITE_CACHE = 0x06, "Volatile Write Cache";
        NUMBER_OF_QUEUES = 0x07, "Number of Queues";
        INTERRUPT_COALESCING = 0x08, "Interrupt Coalescing";
        INTERRUPT_VECTOR_CONFIGURATION = 0x09, "Interrupt Vector Configuration";
        WRITE_ATOMICITY_NORMAL = 0x0A, "Write Atomicity Normal";
        ASYNC_EVENT_CONFIGURATION = 0x0B, "Asynchronous Event Configuration";
        AUTONOMOUS_POWER_STATE_TRANSITION = 0x0C, "Autonomous Power State Transition";
        HOST_MEMORY_BUFFER = 0x0D, "Host Memory Buffer";
        TIMESTAMP = 0x0E, "Timestamp";
        KEEP_ALIVE_TIMER = 0x0F, "Keep Alive Timer";
        HOST_CONTROLLED_THERMAL_MANAGEMENT = 0x10, "Host Controlled Thermal Management";
        NON_OPERATIONAL_POWER_STATE = 0x11, "Non-Operational Power State Config";
        READ_RECOVERY_LEVEL = 0x12, "Read Recovery Level Config";
        PREDICTABLE_LATENCY_CONFIG = 0x13, "Predictable Latency Mode Config";
        PREDICTABLE_LATENCY_WINDOW = 0x14, "Predictable Latency Mode Window";
        LBA_STATUS_REPORT_INTERVAL = 0x15, "LBA Status Information Report Interval";
        HOST_BEHAVIOR_SUPPORT = 0x16, "Host Behavior Support";
        SANITIZE_CONFIG = 0x17, "Sanitize Config";
        ENDURANCE_GROUP_EVENT = 0x18, "Endurance Group Event Configuration";
        IO_COMMAND_SET_PROFILE = 0x19, "I/O Command Set Profile";
        SPINUP_CONTROL = 0x1A, "Spinup Control";
        ENHANCED_CONTROLLER_METADATA = 0x7D, "Enhanced Controller Metadata";
        CONTROLLER_METADATA = 0x7E, "Controller Metadata";
        NAMESPACE_METADATA = 0x7F, "Namespace Metadata";
        SOFTWARE_PROGRESS_MARKER = 0x80, "Software Progress Marker";
        HOST_IDENTIFIER = 0x81, "Host Identifier";
        RESERVATION_NOTIFICATION_MASK = 0x82, "Reservation Notification Mask";
        RESERVATION_PERSISTENCE = 0x83, "Reservation Persistence";
        NAMESPACE_WRITE_PROTECTION = 0x84, "Namespace Write Protection Config";
    }
}

open_enum! {
    /// Select, of Get Features (Base 2.0, section 5.15).
    pub struct FeatureSelect(u8) {
        CURRENT = 0b000, "Current";
        DEFAULT = 0b001, "Default";
        SAVED = 0b010, "Saved";
        SUPPORTED_CAPABILITIES = 0b011, "Supported Capabilities";
    }
}

bit_field! {
    /// Completion dword 0 of Get Features with [`FeatureSelect::SUPPORTED_CAPABILITIES`]
    /// (Base 2.0, section 5.15).
    pub struct FeatureCapabilities(u32) {
        /// Saveable.
        saveable / with_saveable: bool [0];
        /// Namespace specific.
        namespace_specific / with_namespace_specific: bool [1];
        /// Changeable.
        changeable / with_changeable: bool [2];
    }
}

bit_field! {
    /// Arbitration, FID 01h (Base 2.0, section 5.27.1.1).
    pub struct Arbitration(u32) {
        /// Arbitration Burst as a power of two; [`Self::NO_LIMIT`] is no power of two.
        ab / with_ab: u8 [2:0];
        /// Low Priority Weight.
        lpw_z / with_lpw_z: u8 [15:8];
        /// Medium Priority Weight.
        mpw_z / with_mpw_z: u8 [23:16];
        /// High Priority Weight.
        hpw_z / with_hpw_z: u8 [31:24];
    }
}

impl Arbitration {
    /// Arbitration Burst without a limit.
    pub const NO_LIMIT: u8 = 0b111;
}

bit_field! {
    /// Power Management, FID 02h (Base 2.0, section 5.27.1.2).
    pub struct PowerManagement(u32) {
        /// Power State.
        ps / with_ps: u8 [4:0];
        /// Workload Hint.
        wh / with_wh: u8 [7:5];
    }
}

bit_field! {
    /// LBA Range Type, FID 03h (NVM 1.0, section 4.1.3.1); the data are [`LbaRangeTypeEntry`]s.
    pub struct LbaRangeType(u32) {
        /// Number of LBA Ranges.
        num_z / with_num_z: u8 [5:0];
    }
}

/// Entry of LBA Range Type (NVM 1.0, section 4.1.3.1).
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct LbaRangeTypeEntry {
    /// Type.
    pub range_type: LbaRangeKind,
    /// Attributes.
    pub attributes: LbaRangeAttributes,
    /// Reserved.
    pub rsvd2: [u8; 14],
    /// Starting LBA.
    pub slba: Lba,
    /// Number of Logical Blocks.
    pub nlb_z: u64,
    /// Unique Identifier of the type of the range.
    pub guid: [u8; 16],
    /// Reserved.
    pub rsvd48: [u8; 16],
}

const _: () = assert!(size_of::<LbaRangeTypeEntry>() == 64);
const _: () = assert!(offset_of!(LbaRangeTypeEntry, guid) == 32);

impl LbaRangeTypeEntry {
    /// Number of entries that the feature's data have, used or not.
    pub const ENTRIES: usize = 64;
}

open_enum! {
    /// Type of an [`LbaRangeTypeEntry`] (NVM 1.0, section 4.1.3.1).
    pub struct LbaRangeKind(u8) {
        GENERAL_PURPOSE = 0x00, "General Purpose";
        FILESYSTEM = 0x01, "Filesystem";
        RAID = 0x02, "RAID";
        CACHE = 0x03, "Cache";
        SWAP = 0x04, "Page / swap file";
    }
}

bit_field! {
    /// Attributes of an [`LbaRangeTypeEntry`] (NVM 1.0, section 4.1.3.1).
    pub struct LbaRangeAttributes(u8) {
        /// The range may be overwritten.
        overwritable / with_overwritable: bool [0];
        /// The range should be hidden from the operating system, EFI and BIOS.
        hidden / with_hidden: bool [1];
    }
}

bit_field! {
    /// Temperature Threshold, FID 04h (Base 2.0, section 5.27.1.3).
    pub struct TemperatureThreshold(u32) {
        /// Temperature Threshold, in kelvins.
        tmpth / with_tmpth: u16 [15:0];
        /// Threshold Temperature Select: 0 for the composite temperature, 1 to 8 for a sensor.
        tmpsel / with_tmpsel: u8 [19:16];
        /// Threshold Type Select.
        thsel / with_thsel: ThresholdType(u8) [21:20];
    }
}

impl TemperatureThreshold {
    /// Selects the Composite Temperature.
    pub const COMPOSITE: u8 = 0x0;
    /// Selects all sensors; Set Features only.
    pub const ALL: u8 = 0xF;
}

open_enum! {
    /// Threshold Type Select (Base 2.0, section 5.27.1.3).
    pub struct ThresholdType(u8) {
        OVER = 0b00, "Over Temperature Threshold";
        UNDER = 0b01, "Under Temperature Threshold";
    }
}

bit_field! {
    /// Error Recovery, FID 05h (NVM 1.0, section 4.1.3.2).
    pub struct ErrorRecovery(u32) {
        /// Time Limited Error Recovery, in units of 100 ms; 0: no limit.
        tler / with_tler: u16 [15:0];
        /// Deallocated or Unwritten Logical Block Error Enable.
        dulbe / with_dulbe: bool [16];
    }
}

bit_field! {
    /// Volatile Write Cache, FID 06h (Base 2.0, section 5.27.1.4).
    pub struct VolatileWriteCache(u32) {
        /// Volatile Write Cache Enable.
        wce / with_wce: bool [0];
    }
}

bit_field! {
    /// Number of Queues, FID 07h (Base 2.0, section 5.27.1.5): requested in dword 11, allocated in completion dword 0.
    /// Does not count the admin queues.
    pub struct NumberOfQueues(u32) {
        /// I/O Submission Queues.
        nsq_z / with_nsq_z: u16 [15:0];
        /// I/O Completion Queues.
        ncq_z / with_ncq_z: u16 [31:16];
    }
}

impl NumberOfQueues {
    /// Value that is invalid in both fields of a request.
    pub const INVALID: u16 = 0xFFFF;
}

bit_field! {
    /// Interrupt Coalescing, FID 08h (PCIe 1.0; Base 2.0, section 5.27.1).
    pub struct InterruptCoalescing(u32) {
        /// Aggregation Threshold, in completion queue entries.
        thr_z / with_thr_z: u8 [7:0];
        /// Aggregation Time, in units of 100 us; 0: no delay.
        time / with_time: u8 [15:8];
    }
}

bit_field! {
    /// Interrupt Vector Configuration, FID 09h (PCIe 1.0; Base 2.0, section 5.27.1).
    pub struct InterruptVectorConfiguration(u32) {
        /// Interrupt Vector.
        iv / with_iv: u16 [15:0];
        /// Coalescing Disable.
        cd / with_cd: bool [16];
    }
}

bit_field! {
    /// Write Atomicity Normal, FID 0Ah (NVM 1.0, section 4.1.3.3).
    pub struct WriteAtomicity(u32) {
        /// Disable Normal: the controller need not honour `AWUN` and `NAWUN`.
        dn / with_dn: bool [0];
    }
}

bit_field! {
    /// Asynchronous Event Configuration, FID 0Bh (Base 2.0, section 5.27.1, "Asynchronous Event
    /// Configuration").
    pub struct AsyncEventConfiguration(u32) {
        /// SMART / Health Critical Warnings.
        critical_warnings / with_critical_warnings: CriticalWarning(u8) [7:0];
        /// Namespace Attribute Notices.
        namespace_attribute / with_namespace_attribute: bool [8];
        /// Firmware Activation Notices.
        firmware_activation / with_firmware_activation: bool [9];
        /// Telemetry Log Notices.
        telemetry / with_telemetry: bool [10];
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

/// Data of Timestamp, FID 0Eh (Base 2.0, section 5.27.1, "Timestamp").
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct Timestamp {
    /// Milliseconds since 1970-01-01 00:00:00 UTC, or since the last controller level reset.
    pub milliseconds: [u8; 6],
    /// Source of the timestamp; Get Features only.
    pub attributes: TimestampAttributes,
    /// Reserved.
    pub rsvd7: u8,
}

const _: () = assert!(size_of::<Timestamp>() == 8);

impl Timestamp {
    /// Creates a timestamp. The upper 16 bits of `milliseconds` are discarded.
    #[must_use]
    pub const fn new(milliseconds: u64, attributes: TimestampAttributes) -> Self {
        let [b0, b1, b2, b3, b4, b5, _, _] = milliseconds.to_le_bytes();
        Self {
            milliseconds: [b0, b1, b2, b3, b4, b5],
            attributes,
            rsvd7: 0,
        }
    }

    /// Returns the milliseconds as a number.
    #[must_use]
    pub const fn milliseconds(&self) -> u64 {
        let [b0, b1, b2, b3, b4, b5] = self.milliseconds;
        u64::from_le_bytes([b0, b1, b2, b3, b4, b5, 0, 0])
    }
}

bit_field! {
    /// Attributes of a [`Timestamp`] (Base 2.0, section 5.27.1, "Timestamp").
    pub struct TimestampAttributes(u8) {
        /// Synch: the clock may have stopped temporarily.
        synch / with_synch: bool [0];
        /// Timestamp Origin.
        origin / with_origin: TimestampOrigin(u8) [3:1];
    }
}

open_enum! {
    /// Timestamp Origin (Base 2.0, section 5.27.1, "Timestamp").
    pub struct TimestampOrigin(u8) {
        CLEARED = 0b000, "Cleared by a Controller Level Reset";
        SET_FEATURES = 0b001, "Set with Set Features";
    }
}

bit_field! {
    /// Keep Alive Timer, FID 0Fh (Base 2.0, section 5.27.1, "Keep Alive Timer").
    pub struct KeepAliveTimer(u32) {
        /// Keep Alive Timeout, in milliseconds; 0: the timer is off.
        kato / with_kato: u32 [31:0];
    }
}

/// Data of Host Behavior Support, FID 16h (Base 2.0, section 5.27.1, "Host Behavior Support").
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct HostBehaviorSupport {
    /// Advanced Command Retry Enable: 1 if the host honours `CRD`.
    pub acre: u8,
    /// Extended Telemetry Data Area 4 Supported, by the host.
    pub etdas: u8,
    /// LBA Format Extension Enable.
    pub lbafee: u8,
    /// Reserved.
    pub rsvd3: [u8; 509],
}

const _: () = assert!(size_of::<HostBehaviorSupport>() == 512);

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;

    #[test]
    fn values_are_laid_out_as_specified() {
        let arbitration = Arbitration(0x0403_02FF);
        assert_eq!(
            (arbitration.ab(), arbitration.lpw_z()),
            (Arbitration::NO_LIMIT, 2)
        );
        assert_eq!((arbitration.mpw_z(), arbitration.hpw_z()), (3, 4));
        assert_eq!(PowerManagement::default().with_ps(4).with_wh(1).0, 0x24);
        assert_eq!(
            ErrorRecovery::default().with_tler(5).with_dulbe(true).0,
            0x1_0005
        );
        assert_eq!(
            InterruptCoalescing::default().with_thr_z(9).with_time(2).0,
            0x0209
        );
        assert_eq!(InterruptVectorConfiguration(0x1_0003).iv(), 3);
        assert!(InterruptVectorConfiguration(0x1_0003).cd());
        assert_eq!(
            FeatureCapabilities::default().with_changeable(true).0,
            0b100
        );
    }

    #[test]
    fn linux_asks_for_queues_with_both_counts() {
        let request = NumberOfQueues(0x0003_0003);
        assert_eq!((request.nsq_z(), request.ncq_z()), (3, 3));
        assert_eq!(
            NumberOfQueues::default().with_nsq_z(63).with_ncq_z(31).0,
            0x001F_003F
        );
    }

    #[test]
    fn a_temperature_threshold_names_sensor_and_side() {
        let threshold = TemperatureThreshold(0x0011_0157);
        assert_eq!((threshold.tmpth(), threshold.tmpsel()), (343, 1));
        assert_eq!(threshold.thsel(), ThresholdType::UNDER);
    }

    #[test]
    fn event_configuration_begins_with_the_critical_warnings() {
        let config = AsyncEventConfiguration(0x0000_0302);
        assert!(config.critical_warnings().temperature());
        assert!(config.namespace_attribute() && config.firmware_activation());
        assert!(!config.telemetry());
    }

    #[test]
    fn a_timestamp_has_48_bits() {
        let attributes = TimestampAttributes::default().with_origin(TimestampOrigin::SET_FEATURES);
        let timestamp = Timestamp::new(0xFFFF_0102_0304_0506, attributes);
        assert_eq!(timestamp.as_bytes(), [6, 5, 4, 3, 2, 1, 0b10, 0]);
        assert_eq!(timestamp.milliseconds(), 0x0102_0304_0506);
    }

    #[test]
    fn data_structures_are_laid_out_as_specified() {
        let range = LbaRangeTypeEntry {
            range_type: LbaRangeKind::RAID,
            attributes: LbaRangeAttributes::default().with_hidden(true),
            slba: Lba(1),
            nlb_z: 2,
            ..LbaRangeTypeEntry::default()
        };
        assert_eq!(range.as_bytes()[..2], [2, 2]);
        assert_eq!((range.as_bytes()[16], range.as_bytes()[24]), (1, 2));
        assert_eq!(
            LbaRangeTypeEntry::ENTRIES,
            usize::from(LbaRangeType(u32::MAX).num_z()) + 1
        );
        let mut behavior = HostBehaviorSupport::new_zeroed();
        behavior.lbafee = 1;
        assert_eq!(behavior.as_bytes()[..4], [0, 0, 1, 0]);
    }
}

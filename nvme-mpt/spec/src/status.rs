//! Status of a completed command (Base 2.0, section 3.3.3.2.1; NVM 1.0, section 3.1.2).

use core::fmt;

bit_field! {
    /// Status Field of a completion, 15 bits without the phase tag.
    pub struct Status(u16) {
        /// Status Code.
        sc / with_sc: u8 [7:0];
        /// Status Code Type.
        sct / with_sct: StatusCodeType(u8) [10:8];
        /// Command Retry Delay: selects `CRDT1`, `CRDT2` or `CRDT3` as the delay before a retry; 0: no delay.
        crd / with_crd: u8 [12:11];
        /// More: the Error Information log page has more information about this command.
        more / with_more: bool [13];
        /// Do Not Retry: the command would fail again.
        dnr / with_dnr: bool [14];
    }
}

open_enum! {
    /// Status Code Type (Base 2.0, section 3.3.3.2.1.1).
    pub struct StatusCodeType(u8) {
        GENERIC = 0x0, "Generic Command Status";
        COMMAND_SPECIFIC = 0x1, "Command Specific Status";
        MEDIA = 0x2, "Media and Data Integrity Errors";
        PATH = 0x3, "Path Related Status";
        VENDOR_SPECIFIC = 0x7, "Vendor Specific";
    }
}

impl Status {
    /// Bits of Status Code and Status Code Type, without the hints on retries.
    const CODE_MASK: u16 = 0x07FF;

    /// Creates a status without hints on retries.
    #[inline]
    #[must_use]
    pub const fn new(sct: StatusCodeType, sc: u8) -> Self {
        Self(sc as u16).with_sct(sct)
    }

    /// Returns the status with Status Code Type and Status Code only, for comparison with the constants of this type.
    #[inline]
    #[must_use]
    pub const fn code(self) -> Self {
        Self(self.0 & Self::CODE_MASK)
    }

    /// Returns whether the command completed without an error.
    #[inline]
    #[must_use]
    pub const fn is_success(self) -> bool {
        self.0 & Self::CODE_MASK == 0
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name)?,
            None => write!(f, "{}, status code {:#04x}", self.sct(), self.sc())?,
        }
        f.write_str(if self.dnr() { " (do not retry)" } else { "" })
    }
}

/// Declares the status codes, by type.
macro_rules! status_codes {
    ($( $(#[$type_meta:meta])* $sct:ident { $( $name:ident = $sc:literal, $text:literal; )* } )*) => {
        $(
            $(#[$type_meta])*
            impl Status {
                $(
                    #[doc = concat!($text, ".")]
                    pub const $name: Self = Self::new(StatusCodeType::$sct, $sc);
                )*
            }
        )*

        impl Status {
            /// Returns the specification's name of this status code; `None` if it has none.
            #[must_use]
            pub const fn name(self) -> Option<&'static str> {
                match self.code() {
                    $( $( code if code.0 == Self::$name.0 => Some($text), )* )*
                    _ => None,
                }
            }
        }
    };
}

status_codes! {
    /// Generic Command Status (Base 2.0, section 3.3.3.2.1.2). Codes from 80h on are specific to I/O command sets.
    GENERIC {
        SUCCESS = 0x00, "Successful Completion";
        INVALID_OPCODE = 0x01, "Invalid Command Opcode";
        INVALID_FIELD = 0x02, "Invalid Field in Command";
        COMMAND_ID_CONFLICT = 0x03, "Command ID Conflict";
        DATA_TRANSFER_ERROR = 0x04, "Data Transfer Error";
        ABORTED_POWER_LOSS = 0x05, "Commands Aborted due to Power Loss Notification";
        INTERNAL_ERROR = 0x06, "Internal Error";
        ABORT_REQUESTED = 0x07, "Command Abort Requested";
        ABORTED_SQ_DELETION = 0x08, "Command Aborted due to SQ Deletion";
        ABORTED_FAILED_FUSED = 0x09, "Command Aborted due to Failed Fused Command";
        ABORTED_MISSING_FUSED = 0x0A, "Command Aborted due to Missing Fused Command";
        INVALID_NAMESPACE_OR_FORMAT = 0x0B, "Invalid Namespace or Format";
        COMMAND_SEQUENCE_ERROR = 0x0C, "Command Sequence Error";
        INVALID_SGL_SEGMENT_DESCRIPTOR = 0x0D, "Invalid SGL Segment Descriptor";
        INVALID_NUMBER_OF_SGL_DESCRIPTORS = 0x0E, "Invalid Number of SGL Descriptors";
        DATA_SGL_LENGTH_INVALID = 0x0F, "Data SGL Length Invalid";
        METADATA_SGL_LENGTH_INVALID = 0x10, "Metadata SGL Length Invalid";
        SGL_DESCRIPTOR_TYPE_INVALID = 0x11, "SGL Descriptor Type Invalid";
        INVALID_USE_OF_CMB = 0x12, "Invalid Use of Controller Memory Buffer";
        PRP_OFFSET_INVALID = 0x13, "PRP Offset Invalid";
        ATOMIC_WRITE_UNIT_EXCEEDED = 0x14, "Atomic Write Unit Exceeded";
        OPERATION_DENIED = 0x15, "Operation Denied";
        SGL_OFFSET_INVALID = 0x16, "SGL Offset Invalid";
        HOST_ID_INCONSISTENT_FORMAT = 0x18, "Host Identifier Inconsistent Format";
        KEEP_ALIVE_TIMER_EXPIRED = 0x19, "Keep Alive Timer Expired";
        KEEP_ALIVE_TIMEOUT_INVALID = 0x1A, "Keep Alive Timeout Invalid";
        ABORTED_PREEMPT = 0x1B, "Command Aborted due to Preempt and Abort";
        SANITIZE_FAILED = 0x1C, "Sanitize Failed";
        SANITIZE_IN_PROGRESS = 0x1D, "Sanitize In Progress";
        SGL_GRANULARITY_INVALID = 0x1E, "SGL Data Block Granularity Invalid";
        NOT_SUPPORTED_FOR_QUEUE_IN_CMB = 0x1F, "Command Not Supported for Queue in CMB";
        NAMESPACE_WRITE_PROTECTED = 0x20, "Namespace is Write Protected";
        COMMAND_INTERRUPTED = 0x21, "Command Interrupted";
        TRANSIENT_TRANSPORT_ERROR = 0x22, "Transient Transport Error";
        PROHIBITED_BY_LOCKDOWN = 0x23, "Command Prohibited by Command and Feature Lockdown";
        MEDIA_NOT_READY = 0x24, "Admin Command Media Not Ready";

        LBA_OUT_OF_RANGE = 0x80, "LBA Out of Range";
        CAPACITY_EXCEEDED = 0x81, "Capacity Exceeded";
        NAMESPACE_NOT_READY = 0x82, "Namespace Not Ready";
        RESERVATION_CONFLICT = 0x83, "Reservation Conflict";
        FORMAT_IN_PROGRESS = 0x84, "Format In Progress";
        INVALID_VALUE_SIZE = 0x85, "Invalid Value Size";
        INVALID_KEY_SIZE = 0x86, "Invalid Key Size";
        KV_KEY_DOES_NOT_EXIST = 0x87, "KV Key Does Not Exist";
        UNRECOVERED_ERROR = 0x88, "Unrecovered Error";
        KEY_EXISTS = 0x89, "Key Exists";
    }

    /// Command Specific Status (Base 2.0, section 3.3.3.2.1.3). Codes from 80h on are specific to I/O command sets.
    COMMAND_SPECIFIC {
        COMPLETION_QUEUE_INVALID = 0x00, "Completion Queue Invalid";
        INVALID_QUEUE_ID = 0x01, "Invalid Queue Identifier";
        INVALID_QUEUE_SIZE = 0x02, "Invalid Queue Size";
        ABORT_LIMIT_EXCEEDED = 0x03, "Abort Command Limit Exceeded";
        ASYNC_EVENT_LIMIT_EXCEEDED = 0x05, "Asynchronous Event Request Limit Exceeded";
        INVALID_FIRMWARE_SLOT = 0x06, "Invalid Firmware Slot";
        INVALID_FIRMWARE_IMAGE = 0x07, "Invalid Firmware Image";
        INVALID_INTERRUPT_VECTOR = 0x08, "Invalid Interrupt Vector";
        INVALID_LOG_PAGE = 0x09, "Invalid Log Page";
        INVALID_FORMAT = 0x0A, "Invalid Format";
        FIRMWARE_NEEDS_CONVENTIONAL_RESET = 0x0B,
            "Firmware Activation Requires Conventional Reset";
        INVALID_QUEUE_DELETION = 0x0C, "Invalid Queue Deletion";
        FEATURE_NOT_SAVEABLE = 0x0D, "Feature Identifier Not Saveable";
        FEATURE_NOT_CHANGEABLE = 0x0E, "Feature Not Changeable";
        FEATURE_NOT_NAMESPACE_SPECIFIC = 0x0F, "Feature Not Namespace Specific";
        FIRMWARE_NEEDS_SUBSYSTEM_RESET = 0x10,
            "Firmware Activation Requires NVM Subsystem Reset";
        FIRMWARE_NEEDS_CONTROLLER_RESET = 0x11,
            "Firmware Activation Requires Controller Level Reset";
        FIRMWARE_NEEDS_MAX_TIME_VIOLATION = 0x12,
            "Firmware Activation Requires Maximum Time Violation";
        FIRMWARE_ACTIVATION_PROHIBITED = 0x13, "Firmware Activation Prohibited";
        OVERLAPPING_RANGE = 0x14, "Overlapping Range";
        NAMESPACE_INSUFFICIENT_CAPACITY = 0x15, "Namespace Insufficient Capacity";
        NAMESPACE_ID_UNAVAILABLE = 0x16, "Namespace Identifier Unavailable";
        NAMESPACE_ALREADY_ATTACHED = 0x18, "Namespace Already Attached";
        NAMESPACE_IS_PRIVATE = 0x19, "Namespace Is Private";
        NAMESPACE_NOT_ATTACHED = 0x1A, "Namespace Not Attached";
        THIN_PROVISIONING_NOT_SUPPORTED = 0x1B, "Thin Provisioning Not Supported";
        CONTROLLER_LIST_INVALID = 0x1C, "Controller List Invalid";
        SELF_TEST_IN_PROGRESS = 0x1D, "Device Self-test In Progress";
        BOOT_PARTITION_WRITE_PROHIBITED = 0x1E, "Boot Partition Write Prohibited";
        INVALID_CONTROLLER_ID = 0x1F, "Invalid Controller Identifier";
        INVALID_SECONDARY_CONTROLLER_STATE = 0x20, "Invalid Secondary Controller State";
        INVALID_NUMBER_OF_CONTROLLER_RESOURCES = 0x21,
            "Invalid Number of Controller Resources";
        INVALID_RESOURCE_ID = 0x22, "Invalid Resource Identifier";
        SANITIZE_PROHIBITED_BY_PMR = 0x23,
            "Sanitize Prohibited While Persistent Memory Region is Enabled";
        ANA_GROUP_ID_INVALID = 0x24, "ANA Group Identifier Invalid";
        ANA_ATTACH_FAILED = 0x25, "ANA Attach Failed";
        INSUFFICIENT_CAPACITY = 0x26, "Insufficient Capacity";
        NAMESPACE_ATTACHMENT_LIMIT_EXCEEDED = 0x27, "Namespace Attachment Limit Exceeded";
        LOCKDOWN_NOT_SUPPORTED = 0x28, "Prohibition of Command Execution Not Supported";
        IO_COMMAND_SET_NOT_SUPPORTED = 0x29, "I/O Command Set Not Supported";
        IO_COMMAND_SET_NOT_ENABLED = 0x2A, "I/O Command Set Not Enabled";
        IO_COMMAND_SET_COMBINATION_REJECTED = 0x2B, "I/O Command Set Combination Rejected";
        INVALID_IO_COMMAND_SET = 0x2C, "Invalid I/O Command Set";
        IDENTIFIER_UNAVAILABLE = 0x2D, "Identifier Unavailable";

        CONFLICTING_ATTRIBUTES = 0x80, "Conflicting Attributes";
        INVALID_PROTECTION_INFORMATION = 0x81, "Invalid Protection Information";
        WRITE_TO_READ_ONLY_RANGE = 0x82, "Attempted Write to Read Only Range";
        COMMAND_SIZE_LIMIT_EXCEEDED = 0x83, "Command Size Limit Exceeded";
        ZONED_BOUNDARY_ERROR = 0xB8, "Zoned Boundary Error";
        ZONE_IS_FULL = 0xB9, "Zone Is Full";
        ZONE_IS_READ_ONLY = 0xBA, "Zone Is Read Only";
        ZONE_IS_OFFLINE = 0xBB, "Zone Is Offline";
        ZONE_INVALID_WRITE = 0xBC, "Zone Invalid Write";
        TOO_MANY_ACTIVE_ZONES = 0xBD, "Too Many Active Zones";
        TOO_MANY_OPEN_ZONES = 0xBE, "Too Many Open Zones";
        INVALID_ZONE_STATE_TRANSITION = 0xBF, "Invalid Zone State Transition";
    }

    /// Media and Data Integrity Errors (Base 2.0, section 3.3.3.2.1.4).
    MEDIA {
        WRITE_FAULT = 0x80, "Write Fault";
        UNRECOVERED_READ_ERROR = 0x81, "Unrecovered Read Error";
        GUARD_CHECK_ERROR = 0x82, "End-to-end Guard Check Error";
        APPLICATION_TAG_CHECK_ERROR = 0x83, "End-to-end Application Tag Check Error";
        REFERENCE_TAG_CHECK_ERROR = 0x84, "End-to-end Reference Tag Check Error";
        COMPARE_FAILURE = 0x85, "Compare Failure";
        ACCESS_DENIED = 0x86, "Access Denied";
        DEALLOCATED_OR_UNWRITTEN_BLOCK = 0x87, "Deallocated or Unwritten Logical Block";
        STORAGE_TAG_CHECK_ERROR = 0x88, "End-to-End Storage Tag Check Error";
    }

    /// Path Related Status (Base 2.0, section 3.3.3.2.1.5).
    PATH {
        INTERNAL_PATH_ERROR = 0x00, "Internal Path Error";
        ASYMMETRIC_ACCESS_PERSISTENT_LOSS = 0x01, "Asymmetric Access Persistent Loss";
        ASYMMETRIC_ACCESS_INACCESSIBLE = 0x02, "Asymmetric Access Inaccessible";
        ASYMMETRIC_ACCESS_TRANSITION = 0x03, "Asymmetric Access Transition";
        CONTROLLER_PATHING_ERROR = 0x60, "Controller Pathing Error";
        HOST_PATHING_ERROR = 0x70, "Host Pathing Error";
        ABORTED_BY_HOST = 0x71, "Command Aborted By Host";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_their_type_in_them() {
        assert_eq!(Status::INVALID_FIELD.0, 0x002);
        assert_eq!(Status::LBA_OUT_OF_RANGE.0, 0x080);
        assert_eq!(Status::INVALID_QUEUE_ID.0, 0x101);
        assert_eq!(Status::COMPARE_FAILURE.0, 0x285);
        assert_eq!(Status::ABORTED_BY_HOST.0, 0x371);
        // Linux prints this status as "sct 0x1 / sc 0x83".
        let status = Status::COMMAND_SIZE_LIMIT_EXCEEDED;
        assert_eq!((status.sct().0, status.sc()), (1, 0x83));
    }

    #[test]
    fn advice_on_retrying_is_no_part_of_the_code() {
        let status = Status::NAMESPACE_NOT_READY
            .with_dnr(true)
            .with_more(true)
            .with_crd(2);
        assert_eq!(status.0, 0x7082);
        assert_eq!(status.code(), Status::NAMESPACE_NOT_READY);
        assert!(status.dnr() && !status.is_success());
        assert!(Status::SUCCESS.with_more(true).is_success());
    }

    #[test]
    fn a_status_prints_its_name() {
        assert_eq!(Status::INVALID_OPCODE.to_string(), "Invalid Command Opcode");
        assert_eq!(
            Status::INVALID_LOG_PAGE.with_dnr(true).to_string(),
            "Invalid Log Page (do not retry)"
        );
        assert_eq!(
            Status(0x7C5).to_string(),
            "Vendor Specific, status code 0xc5"
        );
        assert_eq!(
            Status(0x4C5).to_string(),
            "StatusCodeType 0x4, status code 0xc5"
        );
    }
}

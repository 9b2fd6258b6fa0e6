//! Status Field of a completion (NVMe Base 2.0, section 3.3.3.2.1), with names.

use std::fmt;

/// Status Code Type and Status Code, which tests compare.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StatusCode {
    /// Status Code Type.
    pub sct: u8,
    /// Status Code.
    pub sc: u8,
}

macro_rules! codes {
    ($($sct:literal $sc:literal $name:ident $text:literal,)*) => {
        $(
            #[doc = $text]
            pub const $name: StatusCode = StatusCode { sct: $sct, sc: $sc };
        )*

        impl StatusCode {
            /// Returns the name in the specification.
            pub fn name(self) -> &'static str {
                match (self.sct, self.sc) {
                    $(($sct, $sc) => $text,)*
                    (7, _) => "Vendor Specific",
                    _ => "unknown",
                }
            }
        }
    };
}

codes! {
    // Generic Command Status (figure 95), including that of the NVM Command Set.
    0 0x00 SUCCESS "Successful Completion",
    0 0x01 INVALID_OPCODE "Invalid Command Opcode",
    0 0x02 INVALID_FIELD "Invalid Field in Command",
    0 0x03 COMMAND_ID_CONFLICT "Command ID Conflict",
    0 0x04 DATA_TRANSFER_ERROR "Data Transfer Error",
    0 0x05 ABORTED_POWER_LOSS "Commands Aborted due to Power Loss Notification",
    0 0x06 INTERNAL_ERROR "Internal Error",
    0 0x07 ABORT_REQUESTED "Command Abort Requested",
    0 0x08 ABORTED_SQ_DELETION "Command Aborted due to SQ Deletion",
    0 0x09 ABORTED_FAILED_FUSED "Command Aborted due to Failed Fused Command",
    0 0x0a ABORTED_MISSING_FUSED "Command Aborted due to Missing Fused Command",
    0 0x0b INVALID_NAMESPACE "Invalid Namespace or Format",
    0 0x0c COMMAND_SEQUENCE_ERROR "Command Sequence Error",
    0 0x0d INVALID_SGL_SEGMENT "Invalid SGL Segment Descriptor",
    0 0x0e INVALID_SGL_COUNT "Invalid Number of SGL Descriptors",
    0 0x0f SGL_LENGTH_INVALID "Data SGL Length Invalid",
    0 0x10 METADATA_SGL_LENGTH_INVALID "Metadata SGL Length Invalid",
    0 0x11 SGL_TYPE_INVALID "SGL Descriptor Type Invalid",
    0 0x12 INVALID_CMB_USE "Invalid Use of Controller Memory Buffer",
    0 0x13 PRP_OFFSET_INVALID "PRP Offset Invalid",
    0 0x14 ATOMIC_WRITE_UNIT_EXCEEDED "Atomic Write Unit Exceeded",
    0 0x15 OPERATION_DENIED "Operation Denied",
    0 0x16 SGL_OFFSET_INVALID "SGL Offset Invalid",
    0 0x18 HOST_ID_INCONSISTENT "Host Identifier Inconsistent Format",
    0 0x19 KEEP_ALIVE_EXPIRED "Keep Alive Timer Expired",
    0 0x1a KEEP_ALIVE_INVALID "Keep Alive Timeout Invalid",
    0 0x1b ABORTED_PREEMPT "Command Aborted due to Preempt and Abort",
    0 0x1c SANITIZE_FAILED "Sanitize Failed",
    0 0x1d SANITIZE_IN_PROGRESS "Sanitize In Progress",
    0 0x1e SGL_GRANULARITY_INVALID "SGL Data Block Granularity Invalid",
    0 0x1f NOT_SUPPORTED_IN_CMB "Command Not Supported for Queue in CMB",
    0 0x20 WRITE_PROTECTED "Namespace is Write Protected",
    0 0x21 COMMAND_INTERRUPTED "Command Interrupted",
    0 0x22 TRANSIENT_TRANSPORT_ERROR "Transient Transport Error",
    0 0x23 COMMAND_PROHIBITED "Command Prohibited by Command and Feature Lockdown",
    0 0x24 MEDIA_NOT_READY "Admin Command Media Not Ready",
    0 0x80 LBA_OUT_OF_RANGE "LBA Out of Range",
    0 0x81 CAPACITY_EXCEEDED "Capacity Exceeded",
    0 0x82 NAMESPACE_NOT_READY "Namespace Not Ready",
    0 0x83 RESERVATION_CONFLICT "Reservation Conflict",
    0 0x84 FORMAT_IN_PROGRESS "Format In Progress",
    // Key Value Command Set (1.0, section 3.1.2).
    0 0x85 INVALID_VALUE_SIZE "Invalid Value Size",
    0 0x86 INVALID_KEY_SIZE "Invalid Key Size",
    0 0x87 KEY_DOES_NOT_EXIST "KV Key Does Not Exist",
    0 0x88 UNRECOVERED_ERROR "Unrecovered Error",
    0 0x89 KEY_EXISTS "Key Exists",
    // Command Specific Status (figure 96).
    1 0x00 CQ_INVALID "Completion Queue Invalid",
    1 0x01 INVALID_QUEUE_ID "Invalid Queue Identifier",
    1 0x02 INVALID_QUEUE_SIZE "Invalid Queue Size",
    1 0x03 ABORT_LIMIT_EXCEEDED "Abort Command Limit Exceeded",
    1 0x05 AER_LIMIT_EXCEEDED "Asynchronous Event Request Limit Exceeded",
    1 0x06 INVALID_FIRMWARE_SLOT "Invalid Firmware Slot",
    1 0x07 INVALID_FIRMWARE_IMAGE "Invalid Firmware Image",
    1 0x08 INVALID_INTERRUPT_VECTOR "Invalid Interrupt Vector",
    1 0x09 INVALID_LOG_PAGE "Invalid Log Page",
    1 0x0a INVALID_FORMAT "Invalid Format",
    1 0x0b FIRMWARE_NEEDS_RESET "Firmware Activation Requires Conventional Reset",
    1 0x0c INVALID_QUEUE_DELETION "Invalid Queue Deletion",
    1 0x0d FEATURE_NOT_SAVEABLE "Feature Identifier Not Saveable",
    1 0x0e FEATURE_NOT_CHANGEABLE "Feature Not Changeable",
    1 0x0f FEATURE_NOT_NAMESPACE_SPECIFIC "Feature Not Namespace Specific",
    1 0x14 OVERLAPPING_RANGE "Overlapping Range",
    1 0x15 INSUFFICIENT_CAPACITY "Namespace Insufficient Capacity",
    1 0x16 NSID_UNAVAILABLE "Namespace Identifier Unavailable",
    1 0x18 NAMESPACE_ATTACHED "Namespace Already Attached",
    1 0x19 NAMESPACE_PRIVATE "Namespace Is Private",
    1 0x1a NAMESPACE_NOT_ATTACHED "Namespace Not Attached",
    1 0x1d SELF_TEST_IN_PROGRESS "Device Self-test In Progress",
    1 0x1f INVALID_CONTROLLER_ID "Invalid Controller Identifier",
    1 0x29 COMMAND_SET_NOT_SUPPORTED "I/O Command Set Not Supported",
    1 0x2b COMMAND_SET_REJECTED "I/O Command Set Combination Rejected",
    1 0x2c INVALID_COMMAND_SET "Invalid I/O Command Set",
    1 0x80 CONFLICTING_ATTRIBUTES "Conflicting Attributes",
    1 0x81 INVALID_PROTECTION "Invalid Protection Information",
    1 0x82 READ_ONLY_RANGE "Attempted Write to Read Only Range",
    1 0x83 SIZE_LIMIT_EXCEEDED "Command Size Limit Exceeded",
    // Zoned Namespace Command Set (1.1, section 3.1.2).
    1 0xb8 ZONE_BOUNDARY_ERROR "Zone Boundary Error",
    1 0xb9 ZONE_IS_FULL "Zone Is Full",
    1 0xba ZONE_IS_READ_ONLY "Zone Is Read Only",
    1 0xbb ZONE_IS_OFFLINE "Zone Is Offline",
    1 0xbc ZONE_INVALID_WRITE "Zone Invalid Write",
    1 0xbd TOO_MANY_ACTIVE_ZONES "Too Many Active Zones",
    1 0xbe TOO_MANY_OPEN_ZONES "Too Many Open Zones",
    1 0xbf INVALID_ZONE_TRANSITION "Invalid Zone State Transition",
    // Media and Data Integrity Errors (figure 99).
    2 0x80 WRITE_FAULT "Write Fault",
    2 0x81 UNRECOVERED_READ_ERROR "Unrecovered Read Error",
    2 0x82 GUARD_CHECK_ERROR "End-to-end Guard Check Error",
    2 0x83 APP_TAG_CHECK_ERROR "End-to-end Application Tag Check Error",
    2 0x84 REF_TAG_CHECK_ERROR "End-to-end Reference Tag Check Error",
    2 0x85 COMPARE_FAILURE "Compare Failure",
    2 0x86 ACCESS_DENIED "Access Denied",
    2 0x87 DEALLOCATED_BLOCK "Deallocated or Unwritten Logical Block",
    // Path Related Status (figure 100).
    3 0x00 INTERNAL_PATH_ERROR "Internal Path Error",
    3 0x01 PERSISTENT_LOSS "Asymmetric Access Persistent Loss",
    3 0x02 INACCESSIBLE "Asymmetric Access Inaccessible",
    3 0x03 TRANSITION "Asymmetric Access Transition",
    3 0x60 CONTROLLER_PATHING_ERROR "Controller Pathing Error",
    3 0x70 HOST_PATHING_ERROR "Host Pathing Error",
    3 0x71 ABORTED_BY_HOST "Command Aborted By Host",
}

impl fmt::Debug for StatusCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}/{:02x}h)", self.name(), self.sct, self.sc)
    }
}

impl fmt::Display for StatusCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Complete Status Field: the 15 bits above the phase tag.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(pub u16);

impl Status {
    /// Returns Status Code Type and Status Code.
    pub fn code(self) -> StatusCode {
        StatusCode {
            sct: (self.0 >> 8 & 0b111) as u8,
            sc: self.0 as u8,
        }
    }

    /// Returns whether the status is Successful Completion.
    #[inline]
    pub fn is_success(self) -> bool {
        self.0 & 0x7ff == 0
    }

    /// Returns the Command Retry Delay: an index of the delays that the controller reports.
    pub fn retry_delay(self) -> u8 {
        (self.0 >> 11 & 0b11) as u8
    }

    /// Returns More: true if the Error Information log page has an entry for this error.
    pub fn more(self) -> bool {
        self.0 & 1 << 13 != 0
    }

    /// Returns Do Not Retry.
    pub fn do_not_retry(self) -> bool {
        self.0 & 1 << 14 != 0
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.code())?;
        if self.retry_delay() != 0 {
            write!(f, " CRD={}", self.retry_delay())?;
        }
        if self.more() {
            f.write_str(" M")?;
        }
        if self.do_not_retry() {
            f.write_str(" DNR")?;
        }
        Ok(())
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_taken_apart() {
        let status = Status(0x81 | 2 << 8 | 1 << 11 | 1 << 13 | 1 << 14);
        assert_eq!(status.code(), UNRECOVERED_READ_ERROR);
        assert!(status.do_not_retry() && status.more() && !status.is_success());
        assert_eq!(
            status.to_string(),
            "Unrecovered Read Error (2/81h) CRD=1 M DNR"
        );
        assert!(Status(1 << 14).is_success());
    }
}

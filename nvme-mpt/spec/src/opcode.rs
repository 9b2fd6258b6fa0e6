//! Command opcodes.

open_enum! {
    /// Opcode of an admin command (Base 2.0, section 5, Figure 138).
    pub struct AdminOpcode(u8) {
        DELETE_IO_SQ = 0x00, "Delete I/O Submission Queue";
        CREATE_IO_SQ = 0x01, "Create I/O Submission Queue";
        GET_LOG_PAGE = 0x02, "Get Log Page";
        DELETE_IO_CQ = 0x04, "Delete I/O Completion Queue";
        CREATE_IO_CQ = 0x05, "Create I/O Completion Queue";
        IDENTIFY = 0x06, "Identify";
        ABORT = 0x08, "Abort";
        SET_FEATURES = 0x09, "Set Features";
        GET_FEATURES = 0x0A, "Get Features";
        ASYNC_EVENT_REQUEST = 0x0C, "Asynchronous Event Request";
        NAMESPACE_MANAGEMENT = 0x0D, "Namespace Management";
        FIRMWARE_COMMIT = 0x10, "Firmware Commit";
        FIRMWARE_IMAGE_DOWNLOAD = 0x11, "Firmware Image Download";
        DEVICE_SELF_TEST = 0x14, "Device Self-test";
        NAMESPACE_ATTACHMENT = 0x15, "Namespace Attachment";
        KEEP_ALIVE = 0x18, "Keep Alive";
        DIRECTIVE_SEND = 0x19, "Directive Send";
        DIRECTIVE_RECEIVE = 0x1A, "Directive Receive";
        VIRTUALIZATION_MANAGEMENT = 0x1C, "Virtualization Management";
        NVME_MI_SEND = 0x1D, "NVMe-MI Send";
        NVME_MI_RECEIVE = 0x1E, "NVMe-MI Receive";
        CAPACITY_MANAGEMENT = 0x20, "Capacity Management";
        LOCKDOWN = 0x24, "Lockdown";
        DOORBELL_BUFFER_CONFIG = 0x7C, "Doorbell Buffer Config";
        FABRICS = 0x7F, "Fabrics Commands";
        FORMAT_NVM = 0x80, "Format NVM";
        SECURITY_SEND = 0x81, "Security Send";
        SECURITY_RECEIVE = 0x82, "Security Receive";
        SANITIZE = 0x84, "Sanitize";
        GET_LBA_STATUS = 0x86, "Get LBA Status";
    }
}

open_enum! {
    /// Opcode of an I/O command of the NVM Command Set (NVM 1.0, section 3.2; Base 2.0, section 7), or of the Zoned
    /// Namespace Command Set, which has the opcodes of the NVM Command Set as well (ZNS 1.1, section 3.2).
    pub struct NvmOpcode(u8) {
        FLUSH = 0x00, "Flush";
        WRITE = 0x01, "Write";
        READ = 0x02, "Read";
        WRITE_UNCORRECTABLE = 0x04, "Write Uncorrectable";
        COMPARE = 0x05, "Compare";
        WRITE_ZEROES = 0x08, "Write Zeroes";
        DATASET_MANAGEMENT = 0x09, "Dataset Management";
        VERIFY = 0x0C, "Verify";
        RESERVATION_REGISTER = 0x0D, "Reservation Register";
        RESERVATION_REPORT = 0x0E, "Reservation Report";
        RESERVATION_ACQUIRE = 0x11, "Reservation Acquire";
        RESERVATION_RELEASE = 0x15, "Reservation Release";
        COPY = 0x19, "Copy";
        ZONE_MANAGEMENT_SEND = 0x79, "Zone Management Send";
        ZONE_MANAGEMENT_RECEIVE = 0x7A, "Zone Management Receive";
        ZONE_APPEND = 0x7D, "Zone Append";
    }
}

open_enum! {
    /// Opcode of an I/O command of the Key Value Command Set (KV 1.0, section 3.2; Base 2.0, section 7).
    pub struct KvOpcode(u8) {
        FLUSH = 0x00, "Flush";
        STORE = 0x01, "Store";
        RETRIEVE = 0x02, "Retrieve";
        LIST = 0x06, "List";
        DELETE = 0x10, "Delete";
        EXIST = 0x14, "Exist";
        /// Vendor specific: executes several operations ([`KvBatchCommand`](crate::key_value::KvBatchCommand)).
        BATCH = 0x85, "Batch";
    }
}

/// Direction of an opcode's data transfer, encoded in the two low bits of all opcodes, standard or vendor specific
/// (Base 2.0, section 3.3.3.1, "Data Transfer").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DataTransfer {
    /// No data.
    None,
    /// Host to controller.
    HostToController,
    /// Controller to host.
    ControllerToHost,
    /// Both directions.
    Bidirectional,
}

impl DataTransfer {
    /// Returns the direction encoded in the opcode's two low bits.
    #[must_use]
    pub const fn from_opcode(opcode: u8) -> Self {
        match opcode & 0b11 {
            0b00 => Self::None,
            0b01 => Self::HostToController,
            0b10 => Self::ControllerToHost,
            _ => Self::Bidirectional,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_low_bits_of_an_opcode_tell_the_direction() {
        let of = DataTransfer::from_opcode;
        assert_eq!(of(NvmOpcode::WRITE.0), DataTransfer::HostToController);
        assert_eq!(of(NvmOpcode::READ.0), DataTransfer::ControllerToHost);
        assert_eq!(of(NvmOpcode::FLUSH.0), DataTransfer::None);
        assert_eq!(of(NvmOpcode::COPY.0), DataTransfer::HostToController);
        assert_eq!(of(NvmOpcode::WRITE_ZEROES.0), DataTransfer::None);
        assert_eq!(of(KvOpcode::STORE.0), DataTransfer::HostToController);
        assert_eq!(of(KvOpcode::LIST.0), DataTransfer::ControllerToHost);
        assert_eq!(of(KvOpcode::EXIST.0), DataTransfer::None);
        assert_eq!(of(KvOpcode::BATCH.0), DataTransfer::HostToController);
        assert_eq!(of(AdminOpcode::IDENTIFY.0), DataTransfer::ControllerToHost);
        assert_eq!(
            of(AdminOpcode::DOORBELL_BUFFER_CONFIG.0),
            DataTransfer::None
        );
        assert_eq!(of(AdminOpcode::FABRICS.0), DataTransfer::Bidirectional);
    }

    #[test]
    fn an_unknown_opcode_has_no_name() {
        assert_eq!(NvmOpcode(0xC1).to_string(), "NvmOpcode 0xc1");
        assert_eq!(AdminOpcode::FORMAT_NVM.to_string(), "Format NVM");
    }
}

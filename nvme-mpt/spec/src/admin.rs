//! Fields of admin commands' dwords (Base 2.0, section 5).
//!
//! Get Log Page is in [`super::log`]. Asynchronous Event Request and Keep Alive have no fields. Doorbell Buffer Config
//! has two page addresses: [`Sqe::prp1`](super::sqe::Sqe::prp1) of the shadow doorbells and
//! [`Sqe::prp2`](super::sqe::Sqe::prp2) of the EventIdx buffer.

use super::{
    feature::{FeatureId, FeatureSelect},
    identify::{Cns, Csi},
    ids::{CommandId, QueueId},
};

command! {
    /// Create I/O Completion Queue (Base 2.0, section 5.4). `PRP1` is the address of the queue, or of a list of its pages.
    pub struct CreateIoCq {
        /// Queue Identifier.
        qid: QueueId(u16) = cdw10[15:0];
        /// Queue Size, in entries.
        qsize_z: u16 = cdw10[31:16];
        /// Physically Contiguous.
        pc: bool = cdw11[0];
        /// Interrupts Enabled.
        ien: bool = cdw11[1];
        /// Interrupt Vector.
        iv: u16 = cdw11[31:16];
    }
}

command! {
    /// Create I/O Submission Queue (Base 2.0, section 5.5). `PRP1` is the address of the queue, or of a list of its pages.
    pub struct CreateIoSq {
        /// Queue Identifier.
        qid: QueueId(u16) = cdw10[15:0];
        /// Queue Size, in entries.
        qsize_z: u16 = cdw10[31:16];
        /// Physically Contiguous.
        pc: bool = cdw11[0];
        /// Queue Priority.
        qprio: QueuePriority(u8) = cdw11[2:1];
        /// Completion Queue Identifier.
        cqid: QueueId(u16) = cdw11[31:16];
        /// NVM Set Identifier.
        nvmsetid: u16 = cdw12[15:0];
    }
}

open_enum! {
    /// Queue Priority, for weighted round robin arbitration (Base 2.0, section 5.5).
    pub struct QueuePriority(u8) {
        URGENT = 0b00, "Urgent";
        HIGH = 0b01, "High";
        MEDIUM = 0b10, "Medium";
        LOW = 0b11, "Low";
    }
}

command! {
    /// Delete I/O Completion Queue and Delete I/O Submission Queue (Base 2.0, sections 5.6 and
    /// 5.7).
    pub struct DeleteQueue {
        /// Queue Identifier.
        qid: QueueId(u16) = cdw10[15:0];
    }
}

command! {
    /// Abort (Base 2.0, section 5.1). Bit 0 of completion dword 0 is clear if the command was
    /// aborted.
    pub struct AbortCommand {
        /// Submission Queue Identifier of the command to abort.
        sqid: QueueId(u16) = cdw10[15:0];
        /// Command Identifier of the command to abort.
        cid: CommandId(u16) = cdw10[31:16];
    }
}

command! {
    /// Identify (Base 2.0, section 5.17).
    pub struct IdentifyCommand {
        /// Controller or Namespace Structure.
        cns: Cns(u8) = cdw10[7:0];
        /// Controller Identifier.
        cntid: u16 = cdw10[31:16];
        /// CNS Specific Identifier.
        cnssi: u16 = cdw11[15:0];
        /// Command Set Identifier.
        csi: Csi(u8) = cdw11[31:24];
        /// UUID Index.
        uuid_index: u8 = cdw14[6:0];
    }
}

command! {
    /// Get Features (Base 2.0, section 5.15).
    pub struct GetFeatures {
        /// Feature Identifier.
        fid: FeatureId(u8) = cdw10[7:0];
        /// Select: which value to return (current, default or saved), or the feature's capabilities.
        sel: FeatureSelect(u8) = cdw10[10:8];
        /// Selection within the feature; the meaning depends on the feature.
        dword11: u32 = cdw11[31:0];
        /// UUID Index.
        uuid_index: u8 = cdw14[6:0];
    }
}

command! {
    /// Set Features (Base 2.0, section 5.27).
    pub struct SetFeatures {
        /// Feature Identifier.
        fid: FeatureId(u8) = cdw10[7:0];
        /// Save: the value persists across resets and power cycles.
        sv: bool = cdw10[31];
        /// The value or its first part; the meaning depends on the feature.
        dword11: u32 = cdw11[31:0];
        /// Second part of the value; the meaning depends on the feature.
        dword12: u32 = cdw12[31:0];
        /// Third part of the value; the meaning depends on the feature.
        dword13: u32 = cdw13[31:0];
        /// UUID Index.
        uuid_index: u8 = cdw14[6:0];
        /// Last part of the value; the meaning depends on the feature.
        dword15: u32 = cdw15[31:0];
    }
}

command! {
    /// Format NVM (Base 2.0, section 5.14).
    pub struct FormatNvm {
        /// Bits 3:0 of the index of the LBA format.
        lbafl: u8 = cdw10[3:0];
        /// Metadata Settings: metadata at the end of the data.
        mset: bool = cdw10[4];
        /// Protection Information type; 0: disabled.
        pi: u8 = cdw10[7:5];
        /// Protection Information Location: true for the first bytes of the metadata, false for the last.
        pil: bool = cdw10[8];
        /// Secure Erase Settings.
        ses: SecureErase(u8) = cdw10[11:9];
        /// Bits 5:4 of the index of the LBA format.
        lbafu: u8 = cdw10[13:12];
    }
}

open_enum! {
    /// Secure Erase Settings (Base 2.0, section 5.14).
    pub struct SecureErase(u8) {
        NONE = 0b000, "No secure erase operation requested";
        USER_DATA = 0b001, "User Data Erase";
        CRYPTOGRAPHIC = 0b010, "Cryptographic Erase";
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{opcode::AdminOpcode, sqe::Sqe};

    #[test]
    fn linux_creates_its_first_queues() {
        // QSIZE 1024, contiguous, interrupts on vector 1. The submission queue below uses this completion queue.
        let cq = Sqe {
            cdw10: 0x03FF_0001,
            cdw11: 0x0001_0003,
            ..Sqe::default()
        };
        let parsed = CreateIoCq::from(&cq);
        assert_eq!(
            parsed,
            CreateIoCq {
                qid: QueueId(1),
                qsize_z: 1023,
                pc: true,
                ien: true,
                iv: 1
            }
        );
        let sq = Sqe {
            cdw10: 0x03FF_0001,
            cdw11: 0x0001_0005,
            ..Sqe::default()
        };
        let parsed = CreateIoSq::from(&sq);
        assert_eq!(
            (parsed.qid, parsed.qsize_z, parsed.pc),
            (QueueId(1), 1023, true)
        );
        assert_eq!(
            (parsed.cqid, parsed.qprio),
            (QueueId(1), QueuePriority::MEDIUM)
        );
        let mut built = Sqe::default();
        parsed.write_to(&mut built);
        assert_eq!(built, sq);
        assert_eq!(DeleteQueue::from(&sq).qid, QueueId(1));
    }

    #[test]
    fn identify_and_abort() {
        let mut sqe = Sqe::new(AdminOpcode::IDENTIFY.0);
        let identify = IdentifyCommand {
            cns: Cns::IOCS_NAMESPACE,
            csi: Csi(2),
            ..IdentifyCommand::default()
        };
        identify.write_to(&mut sqe);
        assert_eq!((sqe.cdw10, sqe.cdw11), (0x05, 0x0200_0000));
        assert_eq!(IdentifyCommand::from(&sqe), identify);

        let sqe = Sqe {
            cdw10: 0xBEEF_0003,
            ..Sqe::default()
        };
        assert_eq!(
            AbortCommand::from(&sqe),
            AbortCommand {
                sqid: QueueId(3),
                cid: CommandId(0xBEEF)
            }
        );
    }

    #[test]
    fn features_select_and_save() {
        let sqe = Sqe {
            cdw10: 0x0000_0307,
            ..Sqe::default()
        };
        let get = GetFeatures::from(&sqe);
        assert_eq!(get.fid, FeatureId::NUMBER_OF_QUEUES);
        assert_eq!(get.sel, FeatureSelect::SUPPORTED_CAPABILITIES);
        let sqe = Sqe {
            cdw10: 0x8000_0006,
            cdw11: 1,
            ..Sqe::default()
        };
        let set = SetFeatures::from(&sqe);
        assert_eq!(set.fid, FeatureId::VOLATILE_WRITE_CACHE);
        assert!(set.sv && set.dword11 == 1);
    }

    #[test]
    fn format_nvm() {
        let sqe = Sqe {
            cdw10: 0x0000_1201,
            ..Sqe::default()
        };
        let format = FormatNvm::from(&sqe);
        assert_eq!((format.lbafl, format.lbafu), (1, 1));
        assert_eq!(format.ses, SecureErase::USER_DATA);
        assert!(!format.mset && !format.pil && format.pi == 0);
    }
}

//! Parsing of submission queue entries into admin commands.

use nvme_spec::{
    admin::{
        AbortCommand, CreateIoCq, CreateIoSq, DeleteQueue, GetFeatures, IdentifyCommand,
        SetFeatures,
    },
    log::LogPageRequest,
    opcode::AdminOpcode,
    sqe::{FusedOperation, Psdt, Sqe},
    status::Status,
};

/// An admin command that the controller supports, with its parsed parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AdminCommand {
    DeleteIoSq(DeleteQueue),
    CreateIoSq(CreateIoSq),
    GetLogPage(LogPageRequest),
    DeleteIoCq(DeleteQueue),
    CreateIoCq(CreateIoCq),
    Identify(IdentifyCommand),
    Abort(AbortCommand),
    SetFeatures(SetFeatures),
    GetFeatures(GetFeatures),
    AsyncEventRequest,
    DoorbellBufferConfig,
}

impl AdminCommand {
    /// Parses a Submission Queue entry into a command. Fails for commands that are not supported, and for reserved forms.
    pub(super) fn parse(sqe: &Sqe) -> Result<Self, Status> {
        let command = match AdminOpcode(sqe.opcode()) {
            AdminOpcode::DELETE_IO_SQ => Self::DeleteIoSq(sqe.into()),
            AdminOpcode::CREATE_IO_SQ => Self::CreateIoSq(sqe.into()),
            AdminOpcode::GET_LOG_PAGE => Self::GetLogPage(sqe.into()),
            AdminOpcode::DELETE_IO_CQ => Self::DeleteIoCq(sqe.into()),
            AdminOpcode::CREATE_IO_CQ => Self::CreateIoCq(sqe.into()),
            AdminOpcode::IDENTIFY => Self::Identify(sqe.into()),
            AdminOpcode::ABORT => Self::Abort(sqe.into()),
            AdminOpcode::SET_FEATURES => Self::SetFeatures(sqe.into()),
            AdminOpcode::GET_FEATURES => Self::GetFeatures(sqe.into()),
            AdminOpcode::ASYNC_EVENT_REQUEST => Self::AsyncEventRequest,
            AdminOpcode::DOORBELL_BUFFER_CONFIG => Self::DoorbellBufferConfig,
            // Keep Alive is invalid, too: KAS is 0, as PCIe does not need Keep Alive (Base 2.0, section 3.9).
            _ => return Err(Status::INVALID_OPCODE),
        };
        // Admin commands are never fused, and use no SGLs on PCIe.
        if sqe.cdw0.fuse() != FusedOperation::NORMAL || sqe.cdw0.psdt() != Psdt::PRP {
            return Err(Status::INVALID_FIELD);
        }
        Ok(command)
    }

    /// Returns the opcodes of all commands that the controller supports. Doorbell Buffer Config is supported if
    /// `has_doorbell_buffer`.
    pub(super) fn supported_opcodes(
        has_doorbell_buffer: bool,
    ) -> impl Iterator<Item = AdminOpcode> {
        let is_supported = move |opcode: &u8| match Self::parse(&Sqe::new(*opcode)) {
            Ok(Self::DoorbellBufferConfig) => has_doorbell_buffer,
            parsed => parsed.is_ok(),
        };
        (0..=u8::MAX).filter(is_supported).map(AdminOpcode)
    }
}

#[cfg(test)]
mod tests {
    use nvme_spec::{identify::Cns, sqe::Cdw0};

    use super::*;

    #[test]
    fn unimplemented_commands_are_invalid_opcodes() {
        for opcode in 0..=u8::MAX {
            let known = matches!(opcode, 0x00..=0x02 | 0x04..=0x06 | 0x08..=0x0A | 0x0C | 0x7C);
            let parsed = AdminCommand::parse(&Sqe::new(opcode));
            assert_eq!(parsed.is_ok(), known, "{opcode:#x}");
            if !known {
                assert_eq!(parsed, Err(Status::INVALID_OPCODE));
            }
        }
    }

    #[test]
    fn sgls_and_fused_operations_are_invalid() {
        for cdw0 in [
            0x0000_4006,
            0x0000_8006,
            0x0000_0106,
            0x0000_0206,
            0x0000_C306,
        ] {
            let sqe = Sqe {
                cdw0: Cdw0(cdw0),
                cdw10: 1,
                ..Sqe::default()
            };
            assert_eq!(
                AdminCommand::parse(&sqe),
                Err(Status::INVALID_FIELD),
                "{cdw0:#x}"
            );
        }
    }

    #[test]
    fn a_command_has_its_fields() {
        let sqe = Sqe {
            cdw10: 0x0003_0002,
            ..Sqe::new(0x06)
        };
        let Ok(AdminCommand::Identify(identify)) = AdminCommand::parse(&sqe) else {
            panic!("Identify")
        };
        assert_eq!((identify.cns, identify.cntid), (Cns::ACTIVE_NSID_LIST, 3));
    }
}

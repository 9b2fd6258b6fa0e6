//! Translation of the commands that the Zoned Namespace Command Set adds (ZNS 1.1, section 3).

use nvme_guest::dma::DmaDirection;
use nvme_guest::host::{CommandSetDescription, IoCommand};
use nvme_mpt::shadow::{
    CommandFailure, CommandSet, CommandTraffic, CommandTranslator, CompletedCommand, NvmCommands,
    UntranslatedCommand, field_offsets,
};
use nvme_spec::ids::Lba;
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use nvme_spec::zns::{ZoneAppend, ZoneManagementReceive, ZoneManagementSend, ZoneSendAction};

use super::format::{self, ZonedNamespaceFormat};

/// The Zoned Namespace Command Set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZonedCommands;

impl CommandSet for ZonedCommands {
    type Facts = ZonedNamespaceFormat;

    const COMMANDS: &'static [IoCommand] = &format::COMMANDS;

    fn describe(zones: &ZonedNamespaceFormat) -> CommandSetDescription {
        zones.describe()
    }

    #[inline(always)]
    fn translate(
        translator: &mut CommandTranslator,
        guest: &Sqe,
        slot: u16,
        host: &mut Sqe,
    ) -> Result<u32, UntranslatedCommand> {
        let translate = match NvmOpcode(guest.opcode()) {
            NvmOpcode::ZONE_APPEND => zone_append,
            NvmOpcode::ZONE_MANAGEMENT_RECEIVE => zone_management_receive,
            NvmOpcode::ZONE_MANAGEMENT_SEND => zone_management_send,
            _ => return translator.translate(guest, slot, host),
        };
        translator.check_common(guest)?;
        translate(translator, guest, slot, host)
    }

    /// Returns whether a command has an equal result if it is executed twice. A Zone Append does not, because it would append
    /// twice. A write does, although its first execution may have moved the write pointer: the repetition is announced to the
    /// queue ([`resubmit`](nvme_mpt::host::HostBatch::resubmit)).
    fn is_repeatable(guest: &Sqe) -> bool {
        NvmOpcode(guest.opcode()) != NvmOpcode::ZONE_APPEND && NvmCommands::is_repeatable(guest)
    }

    /// Returns the LBA that a successful Zone Append wrote (ZNS 1.1, section 3.4.1, `ALBA`).
    #[inline]
    fn completion_dwords(
        translator: &CommandTranslator,
        completed: &CompletedCommand,
    ) -> (u32, u32) {
        if completed.opcode != NvmOpcode::ZONE_APPEND || !completed.status.is_success() {
            return (completed.dw0, 0);
        }
        let Lba(alba) = appended_at(translator, Lba(completed.slba), completed.dw0);
        (alba as u32, (alba >> 32) as u32)
    }

    #[inline]
    fn traffic(completed: &CompletedCommand) -> CommandTraffic {
        match completed.opcode {
            NvmOpcode::ZONE_APPEND => CommandTraffic::Written(completed.bytes),
            _ => NvmCommands::traffic(completed),
        }
    }
}

/// Returns the guest's LBA that a Zone Append wrote. Dword 0 of the host's completion has the low half of the host's LBA, which
/// suffices, because a zone has less than 2^32 blocks.
fn appended_at(translator: &CommandTranslator, zslba: Lba, dw0: u32) -> Lba {
    let host_zslba = translator.blocks().first_lba().0.wrapping_add(zslba.0);
    let offset = dw0.wrapping_sub(host_zslba as u32);
    Lba(zslba.0.wrapping_add(offset.into()))
}

fn zone_append(
    translator: &mut CommandTranslator,
    guest: &Sqe,
    slot: u16,
    host: &mut Sqe,
) -> Result<u32, UntranslatedCommand> {
    let ZoneAppend {
        zslba,
        nlb_z,
        fua,
        lr,
        piremap,
        prinfo,
        ..
    } = ZoneAppend::from(guest);
    let invalid = CommandFailure::permanent(Status::INVALID_FIELD, field_offsets::CDW12);
    let len = (u64::from(nlb_z) + 1) << translator.blocks().lba_shift();
    // ZASL limits the length. The drive offers no protection information that could be remapped.
    if len > translator.limits().own_bytes_max || piremap || prinfo.pract() {
        return Err(invalid.into());
    }
    // Only the first block must be translated, because a lease consists of whole zones.
    let zslba = translator.blocks().translate(zslba, 1)?;
    translator.init_command(host, NvmOpcode::ZONE_APPEND.0, slot);
    ZoneAppend {
        zslba,
        nlb_z,
        fua,
        lr,
        ..ZoneAppend::default()
    }
    .write_to(host);
    translator.translate_data(guest, len, DmaDirection::FromGuest, slot, host)?;
    Ok(len as u32)
}

fn zone_management_receive(
    translator: &mut CommandTranslator,
    guest: &Sqe,
    slot: u16,
    host: &mut Sqe,
) -> Result<u32, UntranslatedCommand> {
    let command = ZoneManagementReceive::from(guest);
    let len = command.length();
    if len > translator.limits().max_transfer_bytes() {
        return Err(CommandFailure::permanent(Status::INVALID_FIELD, field_offsets::CDW12).into());
    }
    let slba = translator.blocks().translate(command.slba, 1)?;
    translator.init_command(host, NvmOpcode::ZONE_MANAGEMENT_RECEIVE.0, slot);
    ZoneManagementReceive { slba, ..command }.write_to(host);
    translator.translate_data(guest, len, DmaDirection::ToGuest, slot, host)?;
    Ok(len as u32)
}

fn zone_management_send(
    translator: &mut CommandTranslator,
    guest: &Sqe,
    slot: u16,
    host: &mut Sqe,
) -> Result<u32, UntranslatedCommand> {
    let command = ZoneManagementSend::from(guest);
    // Set Zone Descriptor Extension is the only action with data, and the drive has no such extensions. So the data pointer is
    // not translated.
    if command.zsa == ZoneSendAction::SET_ZONE_DESCRIPTOR_EXTENSION {
        return Err(CommandFailure::permanent(Status::INVALID_FIELD, field_offsets::CDW13).into());
    }
    // If Select All is set, the action applies to all zones of the lease, and the command's SLBA is ignored.
    let slba = match command.select_all {
        true => translator.blocks().first_lba(),
        false => translator.blocks().translate(command.slba, 1)?,
    };
    translator.init_command(host, NvmOpcode::ZONE_MANAGEMENT_SEND.0, slot);
    ZoneManagementSend { slba, ..command }.write_to(host);
    Ok(0)
}

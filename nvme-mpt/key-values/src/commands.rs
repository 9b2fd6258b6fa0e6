//! Translation of Key Value commands. Each guest has a key space of its own, so keys need no translation. Only the data
//! pointers of values are translated.

use nvme_guest::dma::DmaDirection;
use nvme_guest::host::{CommandSetDescription, IoCommand};
use nvme_mpt::shadow::{
    CommandFailure, CommandSet, CommandTraffic, CommandTranslator, CompletedCommand, NvmCommands,
    UntranslatedCommand, field_offsets,
};
use nvme_spec::ids::Nsid;
use nvme_spec::key_value::{
    KvBatchCommand, KvBatchOperation, KvKey, KvKeyList, KvListCommand, KvRetrieveCommand,
    KvStoreCommand,
};
use nvme_spec::opcode::KvOpcode;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

use super::format::{self, KvNamespaceFormat};

/// The Key Value Command Set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyValueCommands;

impl CommandSet for KeyValueCommands {
    type Facts = KvNamespaceFormat;

    const COMMANDS: &'static [IoCommand] = &format::COMMANDS;

    fn describe(keys: &KvNamespaceFormat) -> CommandSetDescription {
        keys.describe()
    }

    /// Returns the number of bytes that a Store transfers, or the maximum number of bytes that a Retrieve or List can transfer.
    fn translate(
        translator: &mut CommandTranslator,
        guest: &Sqe,
        slot: u16,
        host: &mut Sqe,
    ) -> Result<u32, UntranslatedCommand> {
        Ok(translate_command(translator, guest, slot, host)?)
    }

    /// Returns 0, because the command set has no LBAs.
    fn error_log_lba(_: &Sqe) -> u64 {
        0
    }

    /// Returns whether a command has an equal result if it is executed twice. This does not hold for a Delete, a Batch and a
    /// conditional Store, whose second execution would find the effect of the first one.
    fn is_repeatable(guest: &Sqe) -> bool {
        match KvOpcode(guest.opcode()) {
            KvOpcode::STORE => !KvStoreCommand::from(guest).must_not_exist,
            KvOpcode::DELETE | KvOpcode::BATCH => false,
            _ => true,
        }
    }

    /// Counts a Store as a write and a Retrieve as a read, since their opcodes are those of Write and Read. Counts the bytes of
    /// the retrieved value, which may be smaller than the host's buffer.
    fn traffic(completed: &CompletedCommand) -> CommandTraffic {
        if completed.opcode.0 == KvOpcode::BATCH.0 {
            return CommandTraffic::Written(completed.bytes);
        }
        match NvmCommands::traffic(completed) {
            CommandTraffic::Read(bytes) => CommandTraffic::Read(bytes.min(completed.dw0)),
            other => other,
        }
    }
}

fn translate_command(
    translator: &mut CommandTranslator,
    guest: &Sqe,
    slot: u16,
    host: &mut Sqe,
) -> Result<u32, CommandFailure> {
    let opcode = KvOpcode(guest.opcode());
    match opcode {
        KvOpcode::FLUSH if guest.nsid == Nsid::BROADCAST => {
            translator.check_common(&Sqe {
                nsid: translator.blocks().guest_nsid(),
                ..*guest
            })?;
            translator.init_command(host, opcode.0, slot);
            Ok(0)
        }
        KvOpcode::FLUSH
        | KvOpcode::STORE
        | KvOpcode::RETRIEVE
        | KvOpcode::LIST
        | KvOpcode::DELETE
        | KvOpcode::EXIST
        | KvOpcode::BATCH => {
            translator.check_common(guest)?;
            translator.init_command(host, opcode.0, slot);
            match opcode {
                KvOpcode::STORE => translate_store(translator, guest, slot, host),
                KvOpcode::RETRIEVE => translate_retrieve(translator, guest, slot, host),
                KvOpcode::LIST => translate_list(translator, guest, slot, host),
                KvOpcode::BATCH => translate_batch(translator, guest, slot, host),
                KvOpcode::DELETE | KvOpcode::EXIST => {
                    required_key(guest)?.write_to(host);
                    Ok(0)
                }
                _ => Ok(0),
            }
        }
        _ => Err(CommandFailure::permanent(
            Status::INVALID_OPCODE,
            field_offsets::OPCODE,
        )),
    }
}

fn translate_store(
    translator: &mut CommandTranslator,
    guest: &Sqe,
    slot: u16,
    host: &mut Sqe,
) -> Result<u32, CommandFailure> {
    let command = KvStoreCommand::from(guest);
    let key = required_key(guest)?;
    // The conditions contradict each other, so the command could never succeed.
    if command.must_exist && command.must_not_exist {
        return Err(CommandFailure::permanent(
            Status::INVALID_FIELD,
            field_offsets::CDW11,
        ));
    }
    if u64::from(command.vs) > translator.limits().own_bytes_max {
        return Err(CommandFailure::permanent(
            Status::INVALID_VALUE_SIZE,
            field_offsets::CDW10,
        ));
    }
    command.write_to(host);
    key.write_to(host);
    translate_value(
        translator,
        guest,
        command.vs,
        DmaDirection::FromGuest,
        slot,
        host,
    )
}

fn translate_retrieve(
    translator: &mut CommandTranslator,
    guest: &Sqe,
    slot: u16,
    host: &mut Sqe,
) -> Result<u32, CommandFailure> {
    let command = KvRetrieveCommand::from(guest);
    let key = required_key(guest)?;
    command.write_to(host);
    key.write_to(host);
    translate_value(
        translator,
        guest,
        command.hbs,
        DmaDirection::ToGuest,
        slot,
        host,
    )
}

fn translate_list(
    translator: &mut CommandTranslator,
    guest: &Sqe,
    slot: u16,
    host: &mut Sqe,
) -> Result<u32, CommandFailure> {
    let command = KvListCommand::from(guest);
    let from = KvKey::from_sqe(guest).ok_or(INVALID_KEY_SIZE)?;
    if (command.hbs as usize) < KvKeyList::HEADER_BYTES {
        return Err(CommandFailure::permanent(
            Status::INVALID_FIELD,
            field_offsets::CDW10,
        ));
    }
    command.write_to(host);
    from.write_to(host);
    translate_value(
        translator,
        guest,
        command.hbs,
        DmaDirection::ToGuest,
        slot,
        host,
    )
}

/// Translates a Batch. The guest could change the operations after a check, so they are copied from guest memory before they
/// are checked.
fn translate_batch(
    translator: &mut CommandTranslator,
    guest: &Sqe,
    slot: u16,
    host: &mut Sqe,
) -> Result<u32, CommandFailure> {
    let command = KvBatchCommand::from(guest);
    if !(1..=KvBatchCommand::OPERATIONS_MAX).contains(&command.count) {
        return Err(CommandFailure::permanent(
            Status::INVALID_FIELD,
            field_offsets::CDW11,
        ));
    }
    let least = usize::from(command.count) * size_of::<KvBatchOperation>();
    if (command.length as usize) < least {
        return Err(CommandFailure::permanent(
            Status::INVALID_FIELD,
            field_offsets::CDW10,
        ));
    }
    command.write_to(host);
    translate_value(
        translator,
        guest,
        command.length,
        DmaDirection::FromGuest,
        slot,
        host,
    )
}

/// Translates the data pointer of a command, if the command has data.
fn translate_value(
    translator: &mut CommandTranslator,
    guest: &Sqe,
    len: u32,
    direction: DmaDirection,
    slot: u16,
    host: &mut Sqe,
) -> Result<u32, CommandFailure> {
    if u64::from(len) > translator.limits().max_transfer_bytes() {
        return Err(CommandFailure::permanent(
            Status::INVALID_FIELD,
            field_offsets::CDW10,
        ));
    }
    if len > 0 {
        translator.translate_data(guest, len.into(), direction, slot, host)?;
    }
    Ok(len)
}

const INVALID_KEY_SIZE: CommandFailure =
    CommandFailure::permanent(Status::INVALID_KEY_SIZE, field_offsets::CDW11);

/// Returns the key of a command that must have one.
fn required_key(guest: &Sqe) -> Result<KvKey, CommandFailure> {
    KvKey::from_sqe(guest)
        .filter(|key| !key.is_empty())
        .ok_or(INVALID_KEY_SIZE)
}

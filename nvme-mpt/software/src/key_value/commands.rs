//! Translation of commands of the Key Value Command Set. A guest's keys are in a space of their own, so that a
//! key needs no translation; its values' data does.

use nvme_mpt::dma::Direction;
use nvme_mpt::host::{CommandSetDescription, IoCommand};
use nvme_mpt::shadow::{
    CommandSet, CompletedCommand, Failure, NvmCommands, Traffic, Translator, Untranslated, location,
};
use nvme_mpt::spec::ids::Nsid;
use nvme_mpt::spec::key_value::{Batch, BatchOperation, Key, KeyList, List, Retrieve, Store};
use nvme_mpt::spec::opcode::KvOpcode;
use nvme_mpt::spec::sqe::Sqe;
use nvme_mpt::spec::status::Status;

use super::format::{self, NamespaceKeys};

/// The Key Value Command Set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyValueCommands;

impl CommandSet for KeyValueCommands {
    type Facts = NamespaceKeys;

    const COMMANDS: &'static [IoCommand] = &format::COMMANDS;

    fn describe(keys: &NamespaceKeys) -> CommandSetDescription {
        keys.describe()
    }

    /// Returns the bytes that a Store transfers, and most that a Retrieve or List can.
    fn translate(
        translator: &mut Translator,
        guest: &Sqe,
        slot: u16,
        host: &mut Sqe,
    ) -> Result<u32, Untranslated> {
        Ok(translate_command(translator, guest, slot, host)?)
    }

    /// There are no LBAs.
    fn named_lba(_: &Sqe) -> u64 {
        0
    }

    /// All but those that succeed or fail by what they have changed themselves.
    fn is_repeatable(guest: &Sqe) -> bool {
        match KvOpcode(guest.opcode()) {
            KvOpcode::STORE => !Store::from(guest).must_not_exist,
            KvOpcode::DELETE | KvOpcode::BATCH => false,
            _ => true,
        }
    }

    /// Store and Retrieve have the opcodes of Write and Read. A value may be smaller than the host's buffer.
    fn traffic(completed: &CompletedCommand) -> Traffic {
        if completed.opcode.0 == KvOpcode::BATCH.0 {
            return Traffic::Written(completed.bytes);
        }
        match NvmCommands::traffic(completed) {
            Traffic::Read(bytes) => Traffic::Read(bytes.min(completed.dw0)),
            other => other,
        }
    }
}

fn translate_command(
    translator: &mut Translator,
    guest: &Sqe,
    slot: u16,
    host: &mut Sqe,
) -> Result<u32, Failure> {
    let opcode = KvOpcode(guest.opcode());
    match opcode {
        KvOpcode::FLUSH if guest.nsid == Nsid::BROADCAST => {
            translator.check_common(&Sqe {
                nsid: translator.blocks().guest_nsid(),
                ..*guest
            })?;
            translator.begin(host, opcode.0, slot);
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
            translator.begin(host, opcode.0, slot);
            match opcode {
                KvOpcode::STORE => store(translator, guest, slot, host),
                KvOpcode::RETRIEVE => retrieve(translator, guest, slot, host),
                KvOpcode::LIST => list(translator, guest, slot, host),
                KvOpcode::BATCH => batch(translator, guest, slot, host),
                KvOpcode::DELETE | KvOpcode::EXIST => {
                    key(guest)?.write_to(host);
                    Ok(0)
                }
                _ => Ok(0),
            }
        }
        _ => Err(Failure::at(Status::INVALID_OPCODE, location::OPCODE)),
    }
}

fn store(
    translator: &mut Translator,
    guest: &Sqe,
    slot: u16,
    host: &mut Sqe,
) -> Result<u32, Failure> {
    let command = Store::from(guest);
    let key = key(guest)?;
    // Nothing could ever be stored.
    if command.must_exist && command.must_not_exist {
        return Err(Failure::at(Status::INVALID_FIELD, location::CDW11));
    }
    if u64::from(command.vs) > translator.limits().own_bytes_max {
        return Err(Failure::at(Status::INVALID_VALUE_SIZE, location::CDW10));
    }
    command.write_to(host);
    key.write_to(host);
    value(
        translator,
        guest,
        command.vs,
        Direction::FromGuest,
        slot,
        host,
    )
}

fn retrieve(
    translator: &mut Translator,
    guest: &Sqe,
    slot: u16,
    host: &mut Sqe,
) -> Result<u32, Failure> {
    let command = Retrieve::from(guest);
    let key = key(guest)?;
    command.write_to(host);
    key.write_to(host);
    value(
        translator,
        guest,
        command.hbs,
        Direction::ToGuest,
        slot,
        host,
    )
}

fn list(
    translator: &mut Translator,
    guest: &Sqe,
    slot: u16,
    host: &mut Sqe,
) -> Result<u32, Failure> {
    let command = List::from(guest);
    let from = Key::of(guest).ok_or(KEY_SIZE)?;
    if (command.hbs as usize) < KeyList::HEADER {
        return Err(Failure::at(Status::INVALID_FIELD, location::CDW10));
    }
    command.write_to(host);
    from.write_to(host);
    value(
        translator,
        guest,
        command.hbs,
        Direction::ToGuest,
        slot,
        host,
    )
}

/// The operations are in the guest's memory, and are looked at once they are copied.
fn batch(
    translator: &mut Translator,
    guest: &Sqe,
    slot: u16,
    host: &mut Sqe,
) -> Result<u32, Failure> {
    let command = Batch::from(guest);
    if !(1..=Batch::OPERATIONS_MAX).contains(&command.count) {
        return Err(Failure::at(Status::INVALID_FIELD, location::CDW11));
    }
    let least = usize::from(command.count) * size_of::<BatchOperation>();
    if (command.length as usize) < least {
        return Err(Failure::at(Status::INVALID_FIELD, location::CDW10));
    }
    command.write_to(host);
    value(
        translator,
        guest,
        command.length,
        Direction::FromGuest,
        slot,
        host,
    )
}

/// Translates where a command's data lies, if it has any.
fn value(
    translator: &mut Translator,
    guest: &Sqe,
    len: u32,
    direction: Direction,
    slot: u16,
    host: &mut Sqe,
) -> Result<u32, Failure> {
    if u64::from(len) > translator.limits().max_transfer() {
        return Err(Failure::at(Status::INVALID_FIELD, location::CDW10));
    }
    if len > 0 {
        translator.data(guest, len.into(), direction, slot, host)?;
    }
    Ok(len)
}

const KEY_SIZE: Failure = Failure::at(Status::INVALID_KEY_SIZE, location::CDW11);

/// The key of a command that needs one.
fn key(guest: &Sqe) -> Result<Key, Failure> {
    Key::of(guest).filter(|key| !key.is_empty()).ok_or(KEY_SIZE)
}

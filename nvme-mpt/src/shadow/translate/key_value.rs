//! Commands of the Key Value Command Set. A guest's keys are in a space of their own, so that a key needs
//! no translation; its values' data does.

use super::{Translator, location};
use crate::dma::Direction;
use crate::shadow::Failure;
use crate::spec::ids::Nsid;
use crate::spec::key_value::{Key, KeyList, List, Retrieve, Store};
use crate::spec::opcode::KvOpcode;
use crate::spec::sqe::Sqe;
use crate::spec::status::Status;

impl Translator {
    /// As [`Self::translate`], for a drive of keys and values. Returns the bytes that a Store transfers,
    /// and most that a Retrieve or List can.
    pub(in crate::shadow) fn translate_key_value(
        &mut self,
        guest: &Sqe,
        slot: u16,
        host: &mut Sqe,
    ) -> Result<u32, Failure> {
        let opcode = KvOpcode(guest.opcode());
        match opcode {
            KvOpcode::FLUSH if guest.nsid == Nsid::BROADCAST => {
                self.check_common(&Sqe {
                    nsid: self.blocks.guest_nsid,
                    ..*guest
                })?;
                self.begin(host, opcode.0, slot);
                Ok(0)
            }
            KvOpcode::FLUSH
            | KvOpcode::STORE
            | KvOpcode::RETRIEVE
            | KvOpcode::LIST
            | KvOpcode::DELETE
            | KvOpcode::EXIST => {
                self.check_common(guest)?;
                self.begin(host, opcode.0, slot);
                match opcode {
                    KvOpcode::STORE => self.store(guest, slot, host),
                    KvOpcode::RETRIEVE => self.retrieve(guest, slot, host),
                    KvOpcode::LIST => self.list(guest, slot, host),
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

    fn store(&mut self, guest: &Sqe, slot: u16, host: &mut Sqe) -> Result<u32, Failure> {
        let command = Store::from(guest);
        let key = key(guest)?;
        // Nothing could ever be stored.
        if command.must_exist && command.must_not_exist {
            return Err(Failure::at(Status::INVALID_FIELD, location::CDW11));
        }
        if command.vs > self.limits.value_bytes_max {
            return Err(Failure::at(Status::INVALID_VALUE_SIZE, location::CDW10));
        }
        command.write_to(host);
        key.write_to(host);
        self.value(guest, command.vs, Direction::FromGuest, slot, host)
    }

    fn retrieve(&mut self, guest: &Sqe, slot: u16, host: &mut Sqe) -> Result<u32, Failure> {
        let command = Retrieve::from(guest);
        let key = key(guest)?;
        command.write_to(host);
        key.write_to(host);
        self.value(guest, command.hbs, Direction::ToGuest, slot, host)
    }

    fn list(&mut self, guest: &Sqe, slot: u16, host: &mut Sqe) -> Result<u32, Failure> {
        let command = List::from(guest);
        let from = Key::of(guest).ok_or(KEY_SIZE)?;
        if (command.hbs as usize) < KeyList::HEADER {
            return Err(Failure::at(Status::INVALID_FIELD, location::CDW10));
        }
        command.write_to(host);
        from.write_to(host);
        self.value(guest, command.hbs, Direction::ToGuest, slot, host)
    }

    /// Translates where a command's data lies, if it has any.
    fn value(
        &mut self,
        guest: &Sqe,
        len: u32,
        direction: Direction,
        slot: u16,
        host: &mut Sqe,
    ) -> Result<u32, Failure> {
        if u64::from(len) > self.max_transfer {
            return Err(Failure::at(Status::INVALID_FIELD, location::CDW10));
        }
        if len > 0 {
            self.data(guest, len.into(), direction, slot, host)?;
        }
        Ok(len)
    }
}

const KEY_SIZE: Failure = Failure::at(Status::INVALID_KEY_SIZE, location::CDW11);

/// The key of a command that needs one.
fn key(guest: &Sqe) -> Result<Key, Failure> {
    Key::of(guest).filter(|key| !key.is_empty()).ok_or(KEY_SIZE)
}

//! Key-value namespaces: commands and answers of the Key Value Command Set 1.0.

use std::time::Duration;

use crate::COMMAND_TIMEOUT;
use crate::command::{Sqe, kv};
use crate::completion::Cqe;
use crate::controller::{Controller, QueueOptions};
use crate::disk::Transfer;
use crate::error::{Error, Result};
use crate::identify::{cns, field};
use crate::memory::GuestMemory;
use crate::queue::QueuePair;
use crate::status::KEY_DOES_NOT_EXIST;

/// Command set identifier.
pub const CSI: u8 = 1;

/// Store options (section 3.2.5), in dword 11.
pub mod option {
    #![expect(missing_docs, reason = "the names say what the specification does")]
    pub const MUST_EXIST: u32 = 1 << 8;
    pub const MUST_NOT_EXIST: u32 = 1 << 9;
    pub const NO_COMPRESSION: u32 = 1 << 10;
}

/// An operation of a Batch, a vendor specific command (`docs/software-drives.md`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation {
    /// Opcode of the single command that performs this operation.
    pub opcode: u8,
    /// Key of at most 16 bytes.
    pub key: Vec<u8>,
    /// Store options, as in dword 11 of a Store.
    pub options: u32,
    /// Value for a Store.
    pub value: Vec<u8>,
}

/// Status codes of an operation in a Batch.
pub mod step {
    #![expect(missing_docs, reason = "the names say what the documentation does")]
    pub const DONE: u8 = 0;
    pub const KEY_DOES_NOT_EXIST: u8 = 1;
    pub const KEY_EXISTS: u8 = 2;
    pub const CAPACITY_EXCEEDED: u8 = 3;
    pub const INVALID_KEY_SIZE: u8 = 4;
    pub const INVALID_VALUE_SIZE: u8 = 5;
    pub const INVALID: u8 = 6;
}

/// Encodes the data of a Batch: first an entry of 32 bytes for each operation, then the values.
///
/// # Panics
/// A key is too long.
pub fn batch_data(operations: &[Operation]) -> Vec<u8> {
    let mut entries = Vec::new();
    let mut values: Vec<u8> = Vec::new();
    for operation in operations {
        let offset = 32 * operations.len() + values.len();
        let mut entry = [0; 32];
        entry[0] = operation.opcode;
        entry[1] = operation.key.len() as u8;
        entry[2] = (operation.options >> 8) as u8;
        entry[4..8].copy_from_slice(&(operation.value.len() as u32).to_le_bytes());
        entry[8..8 + operation.key.len()].copy_from_slice(&operation.key);
        entry[24..28].copy_from_slice(&(offset as u32).to_le_bytes());
        entries.extend(entry);
        values.extend(&operation.value);
    }
    entries.extend(values);
    entries
}

/// Command set specific Identify Namespace data (section 4.1.5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Namespace Size, in bytes.
    pub size: u64,
    /// Namespace Utilization, in bytes.
    pub used: u64,
    /// KV Key Max Length, in bytes.
    pub key_max: u16,
    /// KV Value Max Length, in bytes.
    pub value_max: u32,
    /// Max Num Keys.
    pub keys_max: u32,
}

impl Namespace {
    /// Parses the data structure, of which only the first key-value format is used.
    ///
    /// # Panics
    /// The data is too short.
    pub fn parse(bytes: &[u8]) -> Self {
        Self {
            size: field::u64(bytes, 0),
            used: field::u64(bytes, 16),
            key_max: field::u16(bytes, 72),
            value_max: field::u32(bytes, 76),
            keys_max: field::u32(bytes, 80),
        }
    }
}

/// Parses the keys of a List: a count, then each key with its length, padded to dwords (section 3.2.3).
///
/// # Panics
/// The data ends before the keys.
pub fn parse_list(bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut at = 4;
    (0..field::u32(bytes, 0))
        .map(|_| {
            let length = usize::from(field::u16(bytes, at));
            let key = bytes[at + 2..][..length].to_vec();
            at += (2 + length).next_multiple_of(4);
            key
        })
        .collect()
}

/// A key-value namespace with the queue pair for its I/O.
#[derive(Debug)]
pub struct KeyValues {
    /// Queue pair, which tests use directly for commands that `KeyValues` has no function for.
    pub queue: QueuePair,
    /// Kind of data pointer.
    pub transfer: Transfer,
    /// Timeout of a command.
    pub timeout: Duration,
    nsid: u32,
    memory: GuestMemory,
}

impl KeyValues {
    /// Uses an existing queue pair for a namespace.
    ///
    /// # Errors
    /// Identify fails or the namespace is no key-value namespace.
    pub fn new(controller: &mut Controller, queue: QueuePair, nsid: u32) -> Result<Self> {
        Self::namespace(controller, nsid)?;
        Ok(Self {
            queue,
            transfer: Transfer::Prp { offset: 0 },
            timeout: COMMAND_TIMEOUT,
            nsid,
            memory: controller.memory().clone(),
        })
    }

    /// Creates a polled queue pair of 64 entries for namespace 1. `queue` is the identifier of both queues.
    ///
    /// # Errors
    /// As [`KeyValues::new`]; also, the queues cannot be created.
    pub fn open(controller: &mut Controller, queue: u16) -> Result<Self> {
        let queue = controller.create_queue_pair(queue, &QueueOptions::polled(64))?;
        Self::new(controller, queue, 1)
    }

    /// Returns the current key-value Identify data of a namespace.
    ///
    /// # Errors
    /// The namespace is no key-value namespace.
    pub fn namespace(controller: &mut Controller, nsid: u32) -> Result<Namespace> {
        let id = controller.identify(cns::CSI_NAMESPACE, nsid, CSI)?;
        let namespace = Namespace::parse(&id);
        if namespace.size == 0 {
            return Err(Error::Unsupported("that namespace: it is not active"));
        }
        Ok(namespace)
    }

    /// Returns the namespace identifier.
    pub fn nsid(&self) -> u32 {
        self.nsid
    }

    /// Executes a command without data.
    ///
    /// # Errors
    /// The command does not complete with success in time.
    pub fn command(&mut self, sqe: Sqe) -> Result<Cqe> {
        self.queue.execute(sqe, self.timeout)
    }

    /// Executes a command that returns at most `len` bytes. Bytes that the command does not write have the value `fill`.
    ///
    /// # Errors
    /// As [`KeyValues::command`].
    pub fn command_in(&mut self, sqe: Sqe, len: usize, fill: u8) -> Result<(Cqe, Vec<u8>)> {
        if len == 0 {
            return Ok((self.command(sqe)?, Vec::new()));
        }
        let (data, offset, prepared) = self.transfer.prepare(&self.memory, len)?;
        data.write(offset, &vec![fill; len]);
        let cqe = self.command(sqe.with_data(prepared.pointer))?;
        Ok((cqe, data.to_vec(offset, len)))
    }

    /// Stores a value, with Store options.
    ///
    /// # Errors
    /// As [`KeyValues::command`].
    ///
    /// # Panics
    /// The key is too long for a command.
    pub fn store_with(&mut self, key: &[u8], value: &[u8], options: u32) -> Result<()> {
        let sqe = Sqe::key_value(kv::STORE, self.nsid, key, value.len() as u32);
        let sqe = sqe.with_cdw(11, sqe.cdw(11) | options);
        if value.is_empty() {
            return self.command(sqe).map(drop);
        }
        let (data, offset, prepared) = self.transfer.prepare(&self.memory, value.len())?;
        data.write(offset, value);
        self.command(sqe.with_data(prepared.pointer)).map(drop)
    }

    /// Stores a value.
    ///
    /// # Errors
    /// As [`KeyValues::command`].
    ///
    /// # Panics
    /// The key is too long for a command.
    pub fn store(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        self.store_with(key, value, 0)
    }

    /// Returns up to `buffer_bytes` bytes from the start of a value, and the value's full length.
    ///
    /// # Errors
    /// As [`KeyValues::command`].
    ///
    /// # Panics
    /// The key is too long for a command.
    pub fn retrieve(&mut self, key: &[u8], buffer_bytes: usize) -> Result<(Vec<u8>, u32)> {
        let sqe = Sqe::key_value(kv::RETRIEVE, self.nsid, key, buffer_bytes as u32);
        let (cqe, mut value) = self.command_in(sqe, buffer_bytes, 0)?;
        value.truncate(cqe.dw0() as usize);
        Ok((value, cqe.dw0()))
    }

    /// Returns whether a key exists.
    ///
    /// # Errors
    /// As [`KeyValues::command`], except for a missing key.
    ///
    /// # Panics
    /// The key is too long for a command.
    pub fn exists(&mut self, key: &[u8]) -> Result<bool> {
        match self.command(Sqe::key_value(kv::EXIST, self.nsid, key, 0)) {
            Ok(_) => Ok(true),
            Err(Error::Status { cqe, .. }) if cqe.status().code() == KEY_DOES_NOT_EXIST => {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Deletes a key.
    ///
    /// # Errors
    /// As [`KeyValues::command`].
    ///
    /// # Panics
    /// The key is too long for a command.
    pub fn delete(&mut self, key: &[u8]) -> Result<()> {
        let sqe = Sqe::key_value(kv::DELETE, self.nsid, key, 0);
        self.command(sqe).map(drop)
    }

    /// Executes a Batch of at most 8 operations. Returns the status of each.
    ///
    /// # Errors
    /// As [`KeyValues::command`].
    ///
    /// # Panics
    /// A key is too long for an operation.
    pub fn batch(&mut self, operations: &[Operation]) -> Result<Vec<u8>> {
        let bytes = batch_data(operations);
        let (data, offset, prepared) = self.transfer.prepare(&self.memory, bytes.len())?;
        data.write(offset, &bytes);
        let sqe = Sqe::batch(self.nsid, operations.len() as u8, bytes.len() as u32);
        let cqe = self.command(sqe.with_data(prepared.pointer))?;
        let status = |index| (cqe.dw0() >> (4 * index)) as u8 & 0xF;
        Ok((0..operations.len()).map(status).collect())
    }

    /// Lists keys, starting at the key `from`; if `from` is empty, at the first key. Returns as many keys as a list of
    /// `buffer_bytes` bytes holds.
    ///
    /// # Errors
    /// As [`KeyValues::command`].
    ///
    /// # Panics
    /// The key is too long for a command, or the returned list is invalid.
    pub fn list(&mut self, from: &[u8], buffer_bytes: usize) -> Result<Vec<Vec<u8>>> {
        let sqe = Sqe::key_value(kv::LIST, self.nsid, from, buffer_bytes as u32);
        let (_, list) = self.command_in(sqe, buffer_bytes, 0xEE)?;
        Ok(parse_list(&list))
    }

    /// Executes Flush.
    ///
    /// # Errors
    /// As [`KeyValues::command`].
    pub fn flush(&mut self) -> Result<()> {
        self.command(Sqe::flush(self.nsid)).map(drop)
    }
}

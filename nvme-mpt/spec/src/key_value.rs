//! Key Value Command Set: commands, their data, and the Identify data structure, after the *NVM Express Key Value
//! Command Set Specification 1.0* ("KV 1.0").

use core::cmp::Ordering;
use core::fmt;
use core::mem::{offset_of, size_of};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, transmute};

use super::{identify::IDENTIFY_SIZE, sqe::Sqe};

command! {
    /// Store (KV 1.0, section 3.2.5). The command also has a [`KvKey`], which all commands have in the same dwords.
    pub struct KvStoreCommand {
        /// Value Size, in bytes.
        vs: u32 = cdw10[31:0];
        /// Key Length, in bytes.
        kl: u8 = cdw11[7:0];
        /// Store Option: fail if the key does not exist.
        must_exist: bool = cdw11[8];
        /// Store Option: fail if the key exists.
        must_not_exist: bool = cdw11[9];
        /// Store Option: do not compress the value.
        no_compression: bool = cdw11[10];
    }
}

command! {
    /// Retrieve (KV 1.0, section 3.2.4). Dword 0 of the completion is the full size of the value, even if the buffer is
    /// smaller.
    pub struct KvRetrieveCommand {
        /// Host Buffer Size, in bytes.
        hbs: u32 = cdw10[31:0];
        /// Key Length, in bytes.
        kl: u8 = cdw11[7:0];
        /// Retrieve Option: return the value as stored, without decompression.
        raw: bool = cdw11[8];
    }
}

command! {
    /// List (KV 1.0, section 3.2.3).
    pub struct KvListCommand {
        /// Host Buffer Size, in bytes.
        hbs: u32 = cdw10[31:0];
        /// Key Length, in bytes; 0 lists from the first key on.
        kl: u8 = cdw11[7:0];
    }
}

command! {
    /// Batch, a vendor specific command: Stores, Deletes and Exists that are executed together. The data begin with a
    /// [`KvBatchOperation`] for each operation, and contain the values. Dword 0 of the completion has a
    /// [`KvBatchStepStatus`] for each operation.
    pub struct KvBatchCommand {
        /// Size of the data in bytes.
        length: u32 = cdw10[31:0];
        /// Number of operations.
        count: u8 = cdw11[7:0];
    }
}

impl KvBatchCommand {
    /// Maximum number of operations, whose statuses fill dword 0 of the completion.
    pub const OPERATIONS_MAX: u8 = 8;

    /// Number of bits of an operation's status in dword 0 of the completion. The first operation has the lowest bits.
    pub const STATUS_BITS: u32 = 4;
}

bit_field! {
    /// Options of a Store in a [`KvBatchCommand`], with the bit order of [`KvStoreCommand`].
    pub struct KvStoreOptions(u8) {
        /// Fail if the key does not exist.
        must_exist / with_must_exist: bool [0];
        /// Fail if the key exists.
        must_not_exist / with_must_not_exist: bool [1];
        /// Do not compress the value.
        no_compression / with_no_compression: bool [2];
    }
}

/// Operation of a [`KvBatchCommand`].
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct KvBatchOperation {
    /// Opcode of the corresponding command: Store, Delete or Exist.
    pub opcode: u8,
    /// Key Length, in bytes.
    pub key_length: u8,
    /// Options, for a Store.
    pub options: KvStoreOptions,
    /// Reserved.
    pub rsvd3: u8,
    /// Value Size in bytes, for a Store.
    pub value_size: u32,
    /// Key, left-aligned.
    pub key: [u8; KEY_LENGTH_MAX],
    /// Offset in bytes of the value in the Batch's data, for a Store.
    pub value_offset: u32,
    /// Reserved.
    pub rsvd28: u32,
}

const _: () = assert!(size_of::<KvBatchOperation>() == 32);
const _: () = assert!(offset_of!(KvBatchOperation, key) == 8);
const _: () = assert!(offset_of!(KvBatchOperation, value_offset) == 24);

open_enum! {
    /// Status of an operation of a [`KvBatchCommand`], in [`KvBatchCommand::STATUS_BITS`] bits.
    pub struct KvBatchStepStatus(u8) {
        DONE = 0, "Done";
        KEY_DOES_NOT_EXIST = 1, "Key Does Not Exist";
        KEY_EXISTS = 2, "Key Exists";
        CAPACITY_EXCEEDED = 3, "Capacity Exceeded";
        INVALID_KEY_SIZE = 4, "Invalid Key Size";
        INVALID_VALUE_SIZE = 5, "Invalid Value Size";
        INVALID = 6, "Invalid Opcode or options";
    }
}

/// Longest key, in bytes (KV 1.0, section 2.1).
pub const KEY_LENGTH_MAX: usize = 16;

/// Key of 1 to 16 bytes. In a List, an empty key means the first key. Keys are ordered by their bytes, and a prefix comes
/// before longer keys.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct KvKey {
    length: u8,
    /// Key bytes, padded with zeroes.
    bytes: [u8; KEY_LENGTH_MAX],
}

impl KvKey {
    /// Creates a key; `None` if there are too many bytes.
    #[must_use]
    pub fn new(key: &[u8]) -> Option<Self> {
        let mut bytes = [0; KEY_LENGTH_MAX];
        bytes.get_mut(..key.len())?.copy_from_slice(key);
        // At most 16, as checked above.
        let length = key.len() as u8;
        Some(Self { length, bytes })
    }

    /// Reads the key of a command (KV 1.0, section 3.2): bytes 0 to 7 in dwords 2 and 3, bytes 8 to 15 in dwords 14 and
    /// 15, the length in dword 11. Returns `None` if the length is too large.
    #[must_use]
    pub fn from_sqe(sqe: &Sqe) -> Option<Self> {
        let bytes: [u8; KEY_LENGTH_MAX] = transmute!([sqe.cdw2, sqe.cdw3, sqe.cdw14, sqe.cdw15]);
        // The length field has the same position in all commands.
        let KvRetrieveCommand { kl, .. } = KvRetrieveCommand::from(sqe);
        Self::new(bytes.get(..usize::from(kl))?)
    }

    /// Writes the key to a command.
    pub const fn write_to(self, sqe: &mut Sqe) {
        let dwords: [u32; KEY_LENGTH_MAX / 4] = transmute!(self.bytes);
        [sqe.cdw2, sqe.cdw3, sqe.cdw14, sqe.cdw15] = dwords;
        sqe.cdw11 = sqe.cdw11 & !0xFF | self.length as u32;
    }

    /// Returns the key's bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.length)).unwrap_or(&[])
    }

    /// Returns whether the key is empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.length == 0
    }
}

impl Ord for KvKey {
    fn cmp(&self, other: &Self) -> Ordering {
        self.as_bytes().cmp(other.as_bytes())
    }
}

impl PartialOrd for KvKey {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Debug for KvKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({})", self.as_bytes().escape_ascii())
    }
}

/// Data of List (KV 1.0, section 3.2.3): the Number of Returned Keys, then for each key a two-byte length and the key,
/// padded to whole dwords.
#[derive(Clone, Debug)]
pub struct KvKeyList {
    bytes: Vec<u8>,
    capacity: usize,
    count: u32,
}

impl KvKeyList {
    /// Bytes before the first key.
    pub const HEADER_BYTES: usize = 4;

    /// Creates an empty list for a host buffer of `max_bytes` bytes, which must have space for the list's header.
    #[must_use]
    pub fn new(max_bytes: usize) -> Self {
        Self {
            bytes: vec![0; Self::HEADER_BYTES],
            capacity: max_bytes,
            count: 0,
        }
    }

    /// Adds a key if there is space. Returns whether the key was added.
    pub fn push(&mut self, key: &KvKey) -> bool {
        let key = key.as_bytes();
        let end = self.bytes.len() + (2 + key.len()).next_multiple_of(4);
        if end > self.capacity {
            return false;
        }
        self.bytes.extend([key.len() as u8, 0]);
        self.bytes.extend(key);
        self.bytes.resize(end, 0);
        self.count += 1;
        true
    }

    /// Returns the list as data for the host buffer.
    #[must_use]
    pub fn into_bytes(mut self) -> Vec<u8> {
        if let Some(header) = self.bytes.first_chunk_mut() {
            *header = self.count.to_le_bytes();
        }
        self.bytes
    }
}

/// KV Format (KV 1.0, section 4.1.5.1).
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct KvFormat {
    /// KV Key Max Length, in bytes.
    pub kml: u16,
    /// Reserved.
    pub rsvd2: u8,
    /// Additional Format Options: Relative Performance.
    pub fopts: u8,
    /// KV Value Max Length, in bytes.
    pub vml: u32,
    /// Max Num Keys; 0: no limit.
    pub mnk: u32,
    /// Reserved.
    pub rsvd12: u32,
}

const _: () = assert!(size_of::<KvFormat>() == 16);

/// I/O Command Set specific Identify Namespace of the Key Value Command Set (CNS 05h, CSI 01h; KV 1.0,
/// section 4.1.5.1).
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct IdentifyNamespaceKv {
    /// Namespace Size, in bytes.
    pub nsze: u64,
    /// Reserved.
    pub rsvd8: [u8; 8],
    /// Namespace Utilization, in bytes.
    pub nuse: u64,
    /// Namespace Features.
    pub nsfeat: u8,
    /// Number of KV Formats.
    pub nkvf_z: u8,
    /// Namespace Multi-path I/O and Namespace Sharing Capabilities.
    pub nmic: u8,
    /// Reservation Capabilities.
    pub rescap: u8,
    /// Format Progress Indicator.
    pub fpi: u8,
    /// Reserved.
    pub rsvd29: [u8; 3],
    /// Namespace Optimal Value Granularity, in bytes; 0: not reported.
    pub novg: u32,
    /// ANA Group Identifier.
    pub anagrpid: u32,
    /// Reserved.
    pub rsvd40: [u8; 3],
    /// Namespace Attributes.
    pub nsattr: u8,
    /// NVM Set Identifier.
    pub nvmsetid: u16,
    /// Endurance Group Identifier.
    pub endgid: u16,
    /// Namespace Globally Unique Identifier.
    pub nguid: [u8; 16],
    /// IEEE Extended Unique Identifier.
    pub eui64: [u8; 8],
    /// KV Formats.
    pub kvf: [KvFormat; 16],
    /// Reserved, and vendor specific from byte 3840 on.
    pub rsvd328: [u8; 3768],
}

const _: () = assert!(size_of::<IdentifyNamespaceKv>() == IDENTIFY_SIZE);
const _: () = assert!(offset_of!(IdentifyNamespaceKv, novg) == 32);
const _: () = assert!(offset_of!(IdentifyNamespaceKv, nguid) == 48);
const _: () = assert!(offset_of!(IdentifyNamespaceKv, kvf) == 72);

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;
    use crate::opcode::KvOpcode;

    fn key(bytes: &[u8]) -> KvKey {
        KvKey::new(bytes).expect("short enough")
    }

    #[test]
    fn a_key_is_in_four_dwords() {
        let mut sqe = Sqe::new(KvOpcode::STORE.0);
        KvStoreCommand {
            vs: 0x1234,
            must_not_exist: true,
            ..KvStoreCommand::default()
        }
        .write_to(&mut sqe);
        key(b"abcdefghijk").write_to(&mut sqe);
        assert_eq!((sqe.cdw2, sqe.cdw3), (0x6463_6261, 0x6867_6665));
        assert_eq!((sqe.cdw14, sqe.cdw15), (0x006B_6A69, 0));
        assert_eq!((sqe.cdw10, sqe.cdw11), (0x1234, 0x020B));
        assert_eq!(KvKey::from_sqe(&sqe), Some(key(b"abcdefghijk")));
        // Bytes behind a key's length are no part of the key.
        sqe.cdw15 = !0;
        assert_eq!(KvKey::from_sqe(&sqe), Some(key(b"abcdefghijk")));
        sqe.cdw11 = 17;
        assert_eq!(KvKey::from_sqe(&sqe), None);
        sqe.cdw11 = 0;
        assert_eq!(KvKey::from_sqe(&sqe), Some(KvKey::default()));
    }

    #[test]
    fn keys_are_in_the_order_of_their_bytes() {
        let mut keys = [&b"b"[..], b"", b"ab", b"a\0", b"a", b"\xff", b"abc"].map(key);
        keys.sort();
        let sorted = [&b""[..], b"a", b"a\0", b"ab", b"abc", b"b", b"\xff"].map(key);
        assert_eq!(keys, sorted);
        assert_eq!(KvKey::new(&[0; 17]), None);
    }

    #[test]
    fn an_operation_of_a_batch_is_laid_out_as_documented() {
        let operation = KvBatchOperation {
            opcode: KvOpcode::STORE.0,
            key_length: 3,
            options: KvStoreOptions::default().with_must_not_exist(true),
            value_size: 0x1234,
            key: *b"abc\0\0\0\0\0\0\0\0\0\0\0\0\0",
            value_offset: 0x20,
            ..KvBatchOperation::default()
        };
        assert_eq!(
            operation.as_bytes(),
            b"\x01\x03\x02\0\x34\x12\0\0abc\0\0\0\0\0\0\0\0\0\0\0\0\0\x20\0\0\0\0\0\0\0"
        );
        let mut sqe = Sqe::new(KvOpcode::BATCH.0);
        let (length, count) = (4096, 8);
        KvBatchCommand { length, count }.write_to(&mut sqe);
        assert_eq!((sqe.cdw10, sqe.cdw11), (4096, 8));
    }

    #[test]
    fn a_list_has_keys_in_whole_dwords() {
        let mut list = KvKeyList::new(24);
        assert!(list.push(&key(b"a")));
        assert!(list.push(&key(b"abc")));
        // Twelve of twenty bytes are taken, and a key of ten bytes takes twelve.
        assert!(!list.push(&key(b"0123456789")));
        assert!(list.push(&key(b"012345")));
        assert_eq!(
            list.into_bytes(),
            b"\x03\0\0\0\x01\0a\0\x03\0abc\0\0\0\x06\x00012345"
        );
    }

    #[test]
    fn a_namespace_is_laid_out_as_specified() {
        let mut id = IdentifyNamespaceKv::new_zeroed();
        id.nsze = 1 << 32;
        id.nuse = 0x55;
        id.kvf[0] = KvFormat {
            kml: 16,
            vml: 1 << 20,
            mnk: 7,
            ..KvFormat::default()
        };
        let bytes = id.as_bytes();
        assert_eq!((bytes[4], bytes[16]), (1, 0x55));
        assert_eq!(
            bytes[72..88],
            [16, 0, 0, 0, 0, 0, 16, 0, 7, 0, 0, 0, 0, 0, 0, 0]
        );
    }
}

//! Submission queue entries with arbitrary or valid fields (NVMe Base 2.0, section 3.3.3.1).

use std::fmt;

/// Admin opcodes (NVMe Base 2.0, figure 138).
pub mod admin {
    #![expect(missing_docs, reason = "the names are the specification's")]
    pub const DELETE_SQ: u8 = 0x00;
    pub const CREATE_SQ: u8 = 0x01;
    pub const GET_LOG_PAGE: u8 = 0x02;
    pub const DELETE_CQ: u8 = 0x04;
    pub const CREATE_CQ: u8 = 0x05;
    pub const IDENTIFY: u8 = 0x06;
    pub const ABORT: u8 = 0x08;
    pub const SET_FEATURES: u8 = 0x09;
    pub const GET_FEATURES: u8 = 0x0a;
    pub const ASYNC_EVENT_REQUEST: u8 = 0x0c;
    pub const KEEP_ALIVE: u8 = 0x18;
    pub const DOORBELL_BUFFER_CONFIG: u8 = 0x7c;
}

/// I/O opcodes (NVM Command Set 1.0, figure 10; Zoned Namespace Command Set 1.1, section 3.4).
pub mod io {
    #![expect(missing_docs, reason = "the names are the specification's")]
    pub const FLUSH: u8 = 0x00;
    pub const WRITE: u8 = 0x01;
    pub const READ: u8 = 0x02;
    pub const WRITE_UNCORRECTABLE: u8 = 0x04;
    pub const COMPARE: u8 = 0x05;
    pub const WRITE_ZEROES: u8 = 0x08;
    pub const DATASET_MANAGEMENT: u8 = 0x09;
    pub const VERIFY: u8 = 0x0c;
    pub const COPY: u8 = 0x19;
    pub const ZONE_MANAGEMENT_SEND: u8 = 0x79;
    pub const ZONE_MANAGEMENT_RECEIVE: u8 = 0x7a;
    pub const ZONE_APPEND: u8 = 0x7d;
}

/// I/O opcodes of the Key Value Command Set 1.0, section 3.2.
pub mod kv {
    #![expect(missing_docs, reason = "the names are the specification's")]
    pub const FLUSH: u8 = 0x00;
    pub const STORE: u8 = 0x01;
    pub const RETRIEVE: u8 = 0x02;
    pub const LIST: u8 = 0x06;
    pub const DELETE: u8 = 0x10;
    pub const EXIST: u8 = 0x14;
    /// Vendor specific: a batch of key-value operations.
    pub const BATCH: u8 = 0x85;
}

/// CDW12: Force Unit Access.
pub const FUA: u32 = 1 << 30;
/// CDW12: Limited Retry.
pub const LIMITED_RETRY: u32 = 1 << 31;
/// CDW12 of Write Zeroes: Deallocate.
pub const DEAC: u32 = 1 << 25;
/// CDW11 of Dataset Management: Attribute - Deallocate.
pub const DSM_DEALLOCATE: u32 = 1 << 2;

/// Data pointer (DPTR field) of a command: the location of its data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DataPointer {
    words: [u64; 2],
    sgl: bool,
}

impl DataPointer {
    /// Creates a data pointer from two PRP entries, unchecked.
    pub const fn prp(prp1: u64, prp2: u64) -> Self {
        Self {
            words: [prp1, prp2],
            sgl: false,
        }
    }

    /// Creates a data pointer from one SGL descriptor, unchecked. Sets PSDT accordingly.
    pub const fn sgl(descriptor: [u64; 2]) -> Self {
        Self {
            words: descriptor,
            sgl: true,
        }
    }
}

/// A submission queue entry of 64 bytes.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Sqe(pub [u64; 8]);

impl Sqe {
    /// Creates an entry with opcode and namespace, and zeroes in the other fields.
    pub const fn new(opcode: u8, nsid: u32) -> Self {
        Self([opcode as u64 | (nsid as u64) << 32, 0, 0, 0, 0, 0, 0, 0])
    }

    /// Creates an entry from arbitrary bytes.
    pub fn from_bytes(bytes: &[u8; 64]) -> Self {
        let (words, _) = bytes.as_chunks::<8>();
        Self(std::array::from_fn(|i| u64::from_le_bytes(words[i])))
    }

    /// Returns the opcode.
    pub const fn opcode(&self) -> u8 {
        self.0[0] as u8
    }

    /// Returns the command identifier.
    pub const fn cid(&self) -> u16 {
        (self.0[0] >> 16) as u16
    }

    /// Returns the namespace identifier.
    pub const fn nsid(&self) -> u32 {
        (self.0[0] >> 32) as u32
    }

    /// Sets the opcode.
    #[inline]
    #[must_use]
    pub const fn with_opcode(mut self, opcode: u8) -> Self {
        self.0[0] = self.0[0] & !0xff | opcode as u64;
        self
    }

    /// Sets the command identifier.
    #[inline]
    #[must_use]
    pub const fn with_cid(mut self, cid: u16) -> Self {
        self.0[0] = self.0[0] & !0xffff_0000 | (cid as u64) << 16;
        self
    }

    /// Sets bits 15:8 of CDW0: PSDT and FUSE.
    #[must_use]
    pub const fn with_flags(mut self, flags: u8) -> Self {
        self.0[0] = self.0[0] & !0xff00 | (flags as u64) << 8;
        self
    }

    /// Sets MPTR.
    #[must_use]
    pub const fn with_metadata(mut self, mptr: u64) -> Self {
        self.0[2] = mptr;
        self
    }

    /// Sets DPTR and PSDT.
    #[must_use]
    pub const fn with_data(mut self, data: DataPointer) -> Self {
        self.0[3] = data.words[0];
        self.0[4] = data.words[1];
        // PSDT 01b: DPTR is an SGL. MPTR, which is not used, is an address.
        self.0[0] = self.0[0] & !0xc000 | (data.sgl as u64) << 14;
        self
    }

    /// Sets Command Dword `n`, from 2 to 15.
    ///
    /// # Panics
    /// `n` is not a number of a settable dword.
    #[must_use]
    pub const fn with_cdw(mut self, n: usize, value: u32) -> Self {
        let shift = 32 * (n as u32 % 2);
        self.0[n / 2] = self.0[n / 2] & !(0xffff_ffff << shift) | (value as u64) << shift;
        self
    }

    /// Returns Command Dword `n`, from 0 to 15.
    ///
    /// # Panics
    /// `n` is above 15.
    pub const fn cdw(&self, n: usize) -> u32 {
        (self.0[n / 2] >> (32 * (n as u32 % 2))) as u32
    }

    /// Sets SLBA (CDW10 and CDW11).
    #[inline]
    #[must_use]
    pub const fn with_slba(mut self, slba: u64) -> Self {
        self.0[5] = slba;
        self
    }

    /// Creates a command on a range of logical blocks: SLBA, and NLB in CDW12. `blocks` counts from one. NLB is zero-based,
    /// so 0 `blocks` becomes the largest NLB.
    pub const fn range(opcode: u8, nsid: u32, slba: u64, blocks: u32) -> Self {
        Self::new(opcode, nsid)
            .with_slba(slba)
            .with_cdw(12, blocks.wrapping_sub(1) & 0xffff)
    }

    /// Returns Read.
    pub const fn read(nsid: u32, slba: u64, blocks: u32) -> Self {
        Self::range(io::READ, nsid, slba, blocks)
    }

    /// Returns Write.
    pub const fn write(nsid: u32, slba: u64, blocks: u32) -> Self {
        Self::range(io::WRITE, nsid, slba, blocks)
    }

    /// Returns Compare.
    pub const fn compare(nsid: u32, slba: u64, blocks: u32) -> Self {
        Self::range(io::COMPARE, nsid, slba, blocks)
    }

    /// Returns Verify.
    pub const fn verify(nsid: u32, slba: u64, blocks: u32) -> Self {
        Self::range(io::VERIFY, nsid, slba, blocks)
    }

    /// Returns Write Zeroes, with or without the Deallocate bit.
    pub const fn write_zeroes(nsid: u32, slba: u64, blocks: u32, deallocate: bool) -> Self {
        let sqe = Self::range(io::WRITE_ZEROES, nsid, slba, blocks);
        let nlb = sqe.cdw(12);
        sqe.with_cdw(12, if deallocate { nlb | DEAC } else { nlb })
    }

    /// Returns Write Uncorrectable.
    pub const fn write_uncorrectable(nsid: u32, slba: u64, blocks: u32) -> Self {
        Self::range(io::WRITE_UNCORRECTABLE, nsid, slba, blocks)
    }

    /// Returns Flush.
    pub const fn flush(nsid: u32) -> Self {
        Self::new(io::FLUSH, nsid)
    }

    /// Creates Dataset Management with the Deallocate attribute. The ranges are sent as data.
    pub const fn deallocate(nsid: u32, ranges: u32) -> Self {
        Self::new(io::DATASET_MANAGEMENT, nsid)
            .with_cdw(10, ranges.wrapping_sub(1) & 0xff)
            .with_cdw(11, DSM_DEALLOCATE)
    }

    /// Creates Copy to `sdlba` with descriptor format 0. The source ranges are sent as data.
    pub const fn copy(nsid: u32, sdlba: u64, ranges: u32) -> Self {
        Self::new(io::COPY, nsid)
            .with_slba(sdlba)
            .with_cdw(12, ranges.wrapping_sub(1) & 0xff)
    }

    /// Returns Zone Append to the zone that starts at `zslba`.
    pub const fn zone_append(nsid: u32, zslba: u64, blocks: u32) -> Self {
        Self::range(io::ZONE_APPEND, nsid, zslba, blocks)
    }

    /// Creates Zone Management Send: an action on one zone, or on all zones to which the action applies.
    pub const fn zone_send(nsid: u32, zslba: u64, action: u8, all: bool) -> Self {
        Self::new(io::ZONE_MANAGEMENT_SEND, nsid)
            .with_slba(zslba)
            .with_cdw(13, (all as u32) << 8 | action as u32)
    }

    /// Creates Zone Management Receive: a report of `len` bytes about the zones that `option` selects.
    pub const fn zone_receive(nsid: u32, slba: u64, len: usize, option: u8, partial: bool) -> Self {
        Self::new(io::ZONE_MANAGEMENT_RECEIVE, nsid)
            .with_slba(slba)
            .with_cdw(12, (len as u32 / 4).wrapping_sub(1))
            .with_cdw(13, (partial as u32) << 16 | (option as u32) << 8)
    }

    /// Creates a command on a key of at most 16 bytes, with a value or host buffer of `size` bytes.
    ///
    /// # Panics
    /// The key is too long.
    pub fn key_value(opcode: u8, nsid: u32, key: &[u8], size: u32) -> Self {
        let mut bytes = [0; 16];
        bytes[..key.len()].copy_from_slice(key);
        let dword = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| bytes[at + byte]));
        Self::new(opcode, nsid)
            .with_cdw(2, dword(0))
            .with_cdw(3, dword(4))
            .with_cdw(14, dword(8))
            .with_cdw(15, dword(12))
            .with_cdw(10, size)
            .with_cdw(11, key.len() as u32)
    }

    /// Creates Batch, a vendor specific key-value command, with `length` bytes of data.
    pub const fn batch(nsid: u32, operations: u8, length: u32) -> Self {
        Self::new(kv::BATCH, nsid)
            .with_cdw(10, length)
            .with_cdw(11, operations as u32)
    }

    /// Returns Create I/O Completion Queue. `entries` counts from one.
    pub const fn create_cq(id: u16, gpa: u64, entries: u32, vector: Option<u16>) -> Self {
        let interrupt = match vector {
            Some(vector) => (vector as u32) << 16 | 1 << 1,
            None => 0,
        };
        Self::new(admin::CREATE_CQ, 0)
            .with_data(DataPointer::prp(gpa, 0))
            .with_cdw(10, entries.wrapping_sub(1) << 16 | id as u32)
            .with_cdw(11, interrupt | 1)
    }

    /// Returns Create I/O Submission Queue of urgent priority. `entries` counts from one.
    pub const fn create_sq(id: u16, gpa: u64, entries: u32, cq: u16) -> Self {
        Self::new(admin::CREATE_SQ, 0)
            .with_data(DataPointer::prp(gpa, 0))
            .with_cdw(10, entries.wrapping_sub(1) << 16 | id as u32)
            .with_cdw(11, (cq as u32) << 16 | 1)
    }

    /// Returns Delete I/O Submission Queue.
    pub const fn delete_sq(id: u16) -> Self {
        Self::new(admin::DELETE_SQ, 0).with_cdw(10, id as u32)
    }

    /// Returns Delete I/O Completion Queue.
    pub const fn delete_cq(id: u16) -> Self {
        Self::new(admin::DELETE_CQ, 0).with_cdw(10, id as u32)
    }

    /// Returns Identify.
    pub const fn identify(cns: u8, nsid: u32, csi: u8) -> Self {
        Self::new(admin::IDENTIFY, nsid)
            .with_cdw(10, cns as u32)
            .with_cdw(11, (csi as u32) << 24)
    }

    /// Creates Abort of command `cid` of submission queue `sq`.
    pub const fn abort(sq: u16, cid: u16) -> Self {
        Self::new(admin::ABORT, 0).with_cdw(10, (cid as u32) << 16 | sq as u32)
    }
}

impl fmt::Debug for Sqe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sqe")
            .field("opcode", &format_args!("{:#04x}", self.opcode()))
            .field("cid", &self.cid())
            .field("nsid", &self.nsid())
            .field("words", &format_args!("{:x?}", self.0))
            .finish()
    }
}

/// Returns a source range of Copy, descriptor format 0 (NVM Command Set 1.0, figure 41).
pub fn copy_range(slba: u64, blocks: u32) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes[8..16].copy_from_slice(&slba.to_le_bytes());
    bytes[16..18].copy_from_slice(&(blocks.wrapping_sub(1) as u16).to_le_bytes());
    bytes
}

/// Returns a range of Dataset Management (NVM Command Set 1.0, figure 46). `blocks` counts from one.
pub fn dsm_range(slba: u64, blocks: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[4..8].copy_from_slice(&blocks.to_le_bytes());
    bytes[8..16].copy_from_slice(&slba.to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dwords_land_where_the_specification_has_them() {
        let sqe = Sqe::read(7, 0x1_2345_6789, 8)
            .with_cid(0xabcd)
            .with_data(DataPointer::prp(0x1000, 0x2000));
        assert_eq!(sqe.cdw(0), 0xabcd_0002);
        assert_eq!(sqe.cdw(1), 7);
        assert_eq!(
            (sqe.cdw(6), sqe.cdw(7), sqe.cdw(8), sqe.cdw(9)),
            (0x1000, 0, 0x2000, 0)
        );
        assert_eq!((sqe.cdw(10), sqe.cdw(11)), (0x2345_6789, 1));
        assert_eq!(sqe.cdw(12), 7);
        assert_eq!(Sqe::create_cq(2, 0, 64, Some(3)).cdw(10), 63 << 16 | 2);
        assert_eq!(Sqe::create_cq(2, 0, 64, Some(3)).cdw(11), 3 << 16 | 0b11);
        assert_eq!(Sqe::create_sq(2, 0, 64, 9).cdw(11), 9 << 16 | 1);
    }

    #[test]
    fn an_sgl_sets_psdt_and_prps_clear_it() {
        let sqe = Sqe::read(1, 0, 1).with_data(DataPointer::sgl([1, 2]));
        assert_eq!(sqe.cdw(0) >> 14 & 0b11, 0b01);
        assert_eq!(
            sqe.with_data(DataPointer::prp(0, 0)).cdw(0) >> 14 & 0b11,
            0b00
        );
    }

    #[test]
    fn bytes_are_little_endian() {
        let bytes: [u8; 64] = std::array::from_fn(|i| i as u8);
        let sqe = Sqe::from_bytes(&bytes);
        assert_eq!(sqe.opcode(), 0);
        assert_eq!(sqe.cid(), 0x0302);
        assert_eq!(sqe.cdw(15), 0x3f3e_3d3c);
    }
}

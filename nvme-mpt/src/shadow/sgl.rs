//! Translation of Scatter Gather Lists (Base 2.0, section 4.1.2) from guest addresses to IOVAs.
//!
//! Supported are data blocks that describe exactly the command's data, in any chain of segments. Each descriptor is read
//! once. The host controller gets one segment in the slot's own memory. Bit buckets and keyed or transport descriptors are
//! not supported and not advertised.

use nvme_guest::address::{Gpa, Iova};
use nvme_guest::dma::{DmaDirection, RegionHint, RegionTable};
use nvme_mpt_memory::{RawBytes, RawWords};
use nvme_spec::dma::{SglDescriptor, SglSubType, SglType};
use nvme_spec::status::Status;
use zerocopy::transmute;

use super::CommandFailure;
use crate::host::{LIST_BYTES, ListMemory};

/// Maximum number of SGL descriptors of a command. Those that point to segments count too.
pub const MAX_DESCRIPTORS: u32 = (LIST_BYTES / SglDescriptor::SIZE) as u32;

/// Byte offset of a command's SGL descriptor, by which the error log names it.
const SGL1: u16 = 24;

fn failure(status: Status) -> CommandFailure {
    CommandFailure::permanent(status, SGL1)
}

/// Builder of the SGL for the host controller: the data blocks of the guest's SGL, with translated addresses.
struct SglBuilder<'a> {
    table: &'a RegionTable,
    hint: &'a mut RegionHint,
    direction: DmaDirection,
    /// Bytes of the command's data that no descriptor has covered yet.
    missing_bytes: u64,
    lists: &'a mut ListMemory,
    slot: u16,
    count: usize,
    first: SglDescriptor,
}

impl SglBuilder<'_> {
    fn add_data_block(&mut self, guest: SglDescriptor) -> Result<(), CommandFailure> {
        let len = u64::from(guest.length);
        if len == 0 {
            return Ok(());
        }
        self.missing_bytes = self
            .missing_bytes
            .checked_sub(len)
            .ok_or(failure(Status::DATA_SGL_LENGTH_INVALID))?;
        let (address, hint) = (Gpa(guest.address), &mut *self.hint);
        match self.table.translate(address, len, self.direction, hint) {
            Some(iova) => self.push(iova, guest.length),
            None => self.add_block_pieces(address, guest.length),
        }
    }

    /// Adds a range of guest memory as data blocks, each of which is contiguous for the host controller.
    #[cold]
    fn add_block_pieces(&mut self, mut address: Gpa, mut len: u32) -> Result<(), CommandFailure> {
        let outside = failure(Status::DATA_TRANSFER_ERROR);
        loop {
            let (iova, piece) = self
                .table
                .translate_prefix(address, len.into(), self.direction, self.hint)
                .ok_or(outside)?;
            // The piece is at most `len`, a `u32`.
            let piece = piece as u32;
            self.push(iova, piece)?;
            len -= piece;
            if len == 0 {
                return Ok(());
            }
            address = address.checked_add(piece.into()).ok_or(outside)?;
        }
    }

    fn push(&mut self, iova: Iova, len: u32) -> Result<(), CommandFailure> {
        let host = SglDescriptor::data_block(iova.bits(), len);
        if self.count == 0 {
            self.first = host;
        }
        // The number of guest descriptors is limited to the list's size, but their pieces may be more than the list holds.
        let words: [u64; 2] = transmute!(host);
        let (list, _) = self.lists.slot_list(self.slot);
        list.get_mut(2 * self.count..2 * self.count + 2)
            .ok_or(failure(Status::INVALID_NUMBER_OF_SGL_DESCRIPTORS))?
            .copy_from_slice(&words);
        self.count += 1;
        Ok(())
    }

    fn finish(self) -> Result<[u64; 2], CommandFailure> {
        if self.missing_bytes != 0 {
            return Err(failure(Status::DATA_SGL_LENGTH_INVALID));
        }
        if self.count == 1 {
            return Ok(transmute!(self.first));
        }
        let (_, iova) = self.lists.slot_list(self.slot);
        let len = (self.count * SglDescriptor::SIZE) as u32;
        Ok(transmute!(SglDescriptor::last_segment(iova.bits(), len)))
    }
}

/// SGL segment in the guest's memory, which may change. Each word of it is read once.
enum SglSegment<'a> {
    /// The segment is contiguous in this process's address space.
    Contiguous(RawWords<'a>),
    /// The segment starts at a guest address, and its pages are scattered in this process's address space.
    Scattered(&'a RegionTable, Gpa),
}

impl<'a> SglSegment<'a> {
    fn find(
        table: &'a RegionTable,
        descriptor: &SglDescriptor,
        hint: &mut RegionHint,
    ) -> Result<Self, CommandFailure> {
        let (start, len) = (Gpa(descriptor.address), u64::from(descriptor.length));
        match table.bytes(start, len, DmaDirection::FromGuest, hint) {
            Some(bytes) => words(bytes).map(Self::Contiguous),
            None => Ok(Self::Scattered(table, start)),
        }
    }

    #[inline]
    fn read(&self, index: u32, hint: &mut RegionHint) -> Result<SglDescriptor, CommandFailure> {
        match self {
            Self::Contiguous(words) => {
                let word = 2 * index as usize;
                Ok(transmute!([words.read(word), words.read(word + 1)]))
            }
            Self::Scattered(table, start) => read_scattered(table, *start, index, hint),
        }
    }
}

/// Reads a descriptor of a scattered segment, word by word because a page may end between the words.
#[cold]
fn read_scattered(
    table: &RegionTable,
    start: Gpa,
    index: u32,
    hint: &mut RegionHint,
) -> Result<SglDescriptor, CommandFailure> {
    let offset = u64::from(index) * SglDescriptor::SIZE as u64;
    let mut word = |offset| {
        let bytes = start
            .checked_add(offset)
            .and_then(|at| table.bytes(at, 8, DmaDirection::FromGuest, hint));
        let bytes = bytes.ok_or(failure(Status::DATA_TRANSFER_ERROR))?;
        Ok(words(bytes)?.read(0))
    };
    Ok(transmute!([word(offset)?, word(offset + 8)?]))
}

/// Returns the bytes of a segment as words. Fails if they are not whole, aligned words (Base 2.0, section 4.1.2).
fn words(bytes: RawBytes<'_>) -> Result<RawWords<'_>, CommandFailure> {
    let words = bytes.words();
    words.ok_or(failure(Status::INVALID_SGL_SEGMENT_DESCRIPTOR))
}

/// Translates the SGL of a command that transfers `len` bytes (at least one).
pub(super) fn translate(
    table: &RegionTable,
    hint: &mut RegionHint,
    dptr: [u64; 2],
    len: u64,
    direction: DmaDirection,
    lists: &mut ListMemory,
    slot: u16,
) -> Result<[u64; 2], CommandFailure> {
    let mut descriptor: SglDescriptor = transmute!(dptr);
    let mut segment_hint = RegionHint::default();
    let mut seen = 0;
    let first = SglDescriptor::default();
    let mut builder = SglBuilder {
        table,
        hint,
        direction,
        missing_bytes: len,
        lists,
        slot,
        count: 0,
        first,
    };
    // One iteration per segment. The first "segment" is the descriptor in the command.
    loop {
        if descriptor.id.sub_type() != SglSubType::ADDRESS {
            return Err(failure(Status::SGL_DESCRIPTOR_TYPE_INVALID));
        }
        let last = match descriptor.id.sgl_type() {
            SglType::DATA_BLOCK => {
                builder.add_data_block(descriptor)?;
                return builder.finish();
            }
            SglType::SEGMENT => false,
            SglType::LAST_SEGMENT => true,
            _ => return Err(failure(Status::SGL_DESCRIPTOR_TYPE_INVALID)),
        };
        let size = SglDescriptor::SIZE as u32;
        if descriptor.length == 0 || !descriptor.length.is_multiple_of(size) {
            return Err(failure(Status::INVALID_SGL_SEGMENT_DESCRIPTOR));
        }
        let count = descriptor.length / size;
        seen += count;
        if seen > MAX_DESCRIPTORS {
            return Err(failure(Status::INVALID_NUMBER_OF_SGL_DESCRIPTORS));
        }
        let segment = SglSegment::find(table, &descriptor, &mut segment_hint)?;
        let mut read = |index| segment.read(index, &mut segment_hint);
        let blocks = if last { count } else { count - 1 };
        for i in 0..blocks {
            let block = read(i)?;
            match (block.id.sgl_type(), block.id.sub_type()) {
                (SglType::DATA_BLOCK, SglSubType::ADDRESS) => builder.add_data_block(block)?,
                // A descriptor that points to the next segment is allowed only as the last one of a segment.
                (SglType::SEGMENT | SglType::LAST_SEGMENT, _) => {
                    return Err(failure(Status::INVALID_SGL_SEGMENT_DESCRIPTOR));
                }
                _ => return Err(failure(Status::SGL_DESCRIPTOR_TYPE_INVALID)),
            }
        }
        if last {
            return builder.finish();
        }
        descriptor = read(count - 1)?;
        if !matches!(
            descriptor.id.sgl_type(),
            SglType::SEGMENT | SglType::LAST_SEGMENT
        ) {
            return Err(failure(Status::INVALID_SGL_SEGMENT_DESCRIPTOR));
        }
    }
}

//! Data buffer of an admin command: PRP entries (Base 2.0, section 4.1.1).
//!
//! On PCIe, admin commands do not use SGLs (Base 2.0, section 3.3.3.1, PSDT).

use nvme_guest::{DmaError, Gpa, GuestMemory};
use nvme_spec::{
    dma::{PrpEntry, PrpList},
    sqe::Sqe,
    status::Status,
};
use zerocopy::{FromZeros, IntoBytes};

use super::failure::AdminCommandFailure;

/// Page size for CC.MPS = 0, the only value that CAP offers.
const PAGE_SHIFT: u32 = 12;

/// Part of a data buffer within one memory page: its guest address and its length.
type DataBufferSegment = (Gpa, usize);

/// Returns the failure for an access to unmapped memory.
fn unmapped_failure(_: DmaError) -> AdminCommandFailure {
    AdminCommandFailure::NotMapped(Status::DATA_TRANSFER_ERROR)
}

/// Data buffer of one admin command in guest memory, which the command's PRP entries describe.
pub(super) struct DataBuffer<'a> {
    memory: &'a GuestMemory,
    prp: [PrpEntry; 2],
    /// Length in bytes of the whole transfer, as the command defines it. The meaning of PRP2 depends on it.
    length: u64,
}

impl<'a> DataBuffer<'a> {
    /// Creates the buffer of a command that transfers `length` bytes.
    pub(super) fn new(memory: &'a GuestMemory, sqe: &Sqe, length: u64) -> Self {
        Self {
            memory,
            prp: [PrpEntry(sqe.prp1()), PrpEntry(sqe.prp2())],
            length,
        }
    }

    /// Writes `data` to the beginning of the buffer, which must be at least as long.
    pub(super) fn write(&self, data: &[u8]) -> Result<(), AdminCommandFailure> {
        let mut rest = data;
        for (gpa, length) in self.segments(data.len() as u64)? {
            let (chunk, after) = rest.split_at(length);
            self.memory.write(gpa, chunk).map_err(unmapped_failure)?;
            rest = after;
        }
        Ok(())
    }

    /// Reads the beginning of the buffer into `data`, which must not be longer than the buffer.
    pub(super) fn read(&self, data: &mut [u8]) -> Result<(), AdminCommandFailure> {
        let mut rest = data;
        for (gpa, length) in self.segments(rest.len() as u64)? {
            let (chunk, after) = rest.split_at_mut(length);
            self.memory.read(gpa, chunk).map_err(unmapped_failure)?;
            rest = after;
        }
        Ok(())
    }

    /// Returns the first `wanted` bytes of the buffer, split by page. Reads each needed entry of the PRP list once, and no
    /// other entry.
    fn segments(&self, wanted: u64) -> Result<Vec<DataBufferSegment>, AdminCommandFailure> {
        let [first, second] = self.prp;
        let wanted = wanted.min(self.length);
        if wanted == 0 {
            // A command without data may have any data pointer.
            return Ok(Vec::new());
        }
        if !first.is_dword_aligned() {
            return Err(Status::PRP_OFFSET_INVALID.into());
        }
        let offset = first.offset(PAGE_SHIFT);
        let pages = PrpEntry::page_count(offset, self.length, PAGE_SHIFT);
        let pages_wanted = PrpEntry::page_count(offset, wanted, PAGE_SHIFT);
        let following = match pages {
            0 | 1 => Vec::new(),
            2 => vec![second],
            _ => self.read_prp_list(second, pages - 1, pages_wanted - 1)?,
        };

        let mut segments = Vec::new();
        let mut left = wanted;
        for (index, prp) in [first].into_iter().chain(following).enumerate() {
            if left == 0 {
                break;
            }
            if index > 0 && prp.offset(PAGE_SHIFT) != 0 {
                return Err(Status::PRP_OFFSET_INVALID.into());
            }
            let page_bytes = left.min(prp.bytes_to_page_end(PAGE_SHIFT));
            // The cast keeps the value, since a segment has at most the size of a memory page.
            segments.push((Gpa(prp.0), page_bytes as usize));
            left -= page_bytes;
        }
        Ok(segments)
    }

    /// Reads the first `wanted` entries of the PRP list, which has `entries` entries in all.
    fn read_prp_list(
        &self,
        list: PrpEntry,
        entries: u64,
        wanted: u64,
    ) -> Result<Vec<PrpEntry>, AdminCommandFailure> {
        let mut list = PrpList::new(list, entries, PAGE_SHIFT);
        let mut found = Vec::new();
        loop {
            let page = list.page().ok_or(Status::PRP_OFFSET_INVALID)?;
            // If more entries are wanted, the read includes the page's last entry, a link to the next page of the list.
            let missing = wanted - found.len() as u64;
            let length = missing.min(page.count);
            let mut here = vec![PrpEntry::new_zeroed(); length as usize];
            self.memory
                .read(Gpa(page.address), here.as_mut_slice().as_mut_bytes())
                .map_err(unmapped_failure)?;
            if missing <= page.data_entries() {
                found.append(&mut here);
                return Ok(found);
            }
            list.advance(page, here.pop().unwrap_or_default());
            found.append(&mut here);
        }
    }
}

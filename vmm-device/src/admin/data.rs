//! The data buffer of an admin command: PRP entries (Base 2.0, section 4.1.1).
//!
//! SGLs are not for admin commands on PCIe (Base 2.0, section 3.3.3.1, PSDT).

use nvme_mpt::{
    DmaError, Gpa, GuestMemory,
    spec::{
        dma::{PrpEntry, PrpList},
        sqe::Sqe,
        status::Status,
    },
};
use zerocopy::{FromZeros, IntoBytes};

use super::failure::Failure;

/// CC.MPS is 0, the only value that CAP offers.
const PAGE_SHIFT: u32 = 12;

/// A part of a data buffer that lies in one memory page.
type Segment = (Gpa, usize);

/// Returns the failure of an access to memory that is not there.
fn not_mapped(_: DmaError) -> Failure {
    Failure::NotMapped(Status::DATA_TRANSFER_ERROR)
}

/// Buffer that the data of one admin command goes to or comes from.
pub(super) struct DataBuffer<'a> {
    memory: &'a GuestMemory,
    prp: [PrpEntry; 2],
    /// Bytes that the command transfers by its own word, which decides what PRP2 means.
    length: u64,
}

impl<'a> DataBuffer<'a> {
    /// The buffer of a command that transfers `length` bytes.
    pub(super) fn new(memory: &'a GuestMemory, sqe: &Sqe, length: u64) -> Self {
        Self {
            memory,
            prp: [PrpEntry(sqe.prp1()), PrpEntry(sqe.prp2())],
            length,
        }
    }

    /// Writes the beginning of the buffer, or all of it.
    pub(super) fn write(&self, data: &[u8]) -> Result<(), Failure> {
        let mut rest = data;
        for (gpa, length) in self.segments(data.len() as u64)? {
            let (here, after) = rest.split_at(length);
            self.memory.write(gpa, here).map_err(not_mapped)?;
            rest = after;
        }
        Ok(())
    }

    /// Reads the beginning of the buffer, or all of it.
    pub(super) fn read(&self, data: &mut [u8]) -> Result<(), Failure> {
        let mut rest = data;
        for (gpa, length) in self.segments(rest.len() as u64)? {
            let (here, after) = rest.split_at_mut(length);
            self.memory.read(gpa, here).map_err(not_mapped)?;
            rest = after;
        }
        Ok(())
    }

    /// The first `wanted` bytes of the buffer, page by page. A PRP list is read once, and only as
    /// far as they need it.
    fn segments(&self, wanted: u64) -> Result<Vec<Segment>, Failure> {
        let [first, second] = self.prp;
        let wanted = wanted.min(self.length);
        if wanted == 0 {
            // A command without data has no data pointer, whatever is in its place.
            return Ok(Vec::new());
        }
        if !first.is_dword_aligned() {
            return Err(Status::PRP_OFFSET_INVALID.into());
        }
        let offset = first.offset(PAGE_SHIFT);
        let pages = PrpEntry::pages(offset, self.length, PAGE_SHIFT);
        let pages_wanted = PrpEntry::pages(offset, wanted, PAGE_SHIFT);
        let following = match pages {
            0 | 1 => Vec::new(),
            2 => vec![second],
            _ => self.list(second, pages - 1, pages_wanted - 1)?,
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
            let here = left.min(prp.bytes_to_page_end(PAGE_SHIFT));
            // At most a memory page.
            segments.push((Gpa(prp.0), here as usize));
            left -= here;
        }
        Ok(segments)
    }

    /// The first `wanted` of `entries` entries of a PRP list.
    fn list(&self, list: PrpEntry, entries: u64, wanted: u64) -> Result<Vec<PrpEntry>, Failure> {
        let mut list = PrpList::new(list, entries, PAGE_SHIFT);
        let mut found = Vec::new();
        loop {
            let page = list.page().ok_or(Status::PRP_OFFSET_INVALID)?;
            // The wanted entries of this page, and the entry that leads to the next page if more are wanted.
            let missing = wanted - found.len() as u64;
            let length = missing.min(page.count);
            let mut here = vec![PrpEntry::new_zeroed(); length as usize];
            self.memory
                .read(Gpa(page.at), here.as_mut_slice().as_mut_bytes())
                .map_err(not_mapped)?;
            if missing <= page.of_data() {
                found.append(&mut here);
                return Ok(found);
            }
            list.go_on(page, here.pop().unwrap_or_default());
            found.append(&mut here);
        }
    }
}

//! Physical Region Pages (NVMe Base 2.0, section 4.1.1): PRP entries and lists, valid or hand-made.

use crate::command::DataPointer;
use crate::memory::{DmaBuffer, GuestMemory, MemoryError, PAGE_SIZE};

/// Number of entries in a full PRP list page.
pub const ENTRIES_PER_PAGE: usize = PAGE_SIZE / 8;

/// A data pointer with its PRP list pages or SGL segments, which must live until the command completes.
#[derive(Debug)]
pub struct PreparedPointer {
    /// Data pointer for [`crate::command::Sqe::with_data`].
    pub pointer: DataPointer,
    /// PRP list pages or SGL segments, in chain order.
    pub pages: Vec<DmaBuffer>,
}

/// Builds PRPs for `len` bytes from `offset` of a buffer.
///
/// # Errors
/// Memory for the list is exhausted.
///
/// # Panics
/// The range is not within the buffer.
pub fn buffer(data: &DmaBuffer, offset: usize, len: usize) -> Result<PreparedPointer, MemoryError> {
    assert!(offset <= data.len() && len <= data.len() - offset);
    let first = data.gpa() + offset as u64;
    let page = PAGE_SIZE as u64;
    let end = first + len as u64;
    let next = (first / page + 1) * page;
    let pages: Vec<u64> = (next..end.max(next)).step_by(PAGE_SIZE).collect();
    list(data.memory(), first, &pages, 0)
}

/// Builds a data pointer with PRP1 `first` and one PRP for each of `pages`, unchecked. PRP2 is the page itself if `pages`
/// has one page, and a PRP list if it has more. The first list starts `list_offset` bytes into its page, which the
/// specification allows for multiples of 8. Lists are chained at the end of a page.
///
/// # Errors
/// Memory for the list is exhausted.
///
/// # Panics
/// `list_offset` leaves no room for an entry.
pub fn list(
    memory: &GuestMemory,
    first: u64,
    pages: &[u64],
    list_offset: usize,
) -> Result<PreparedPointer, MemoryError> {
    if pages.len() < 2 {
        return Ok(PreparedPointer {
            pointer: DataPointer::prp(first, pages.first().copied().unwrap_or(0)),
            pages: Vec::new(),
        });
    }
    let list = chain(memory, pages, list_offset)?;
    Ok(PreparedPointer {
        pointer: DataPointer::prp(first, list[0].gpa() + list_offset as u64),
        pages: list,
    })
}

/// Writes entries into list pages. If more entries follow after a full page, its last entry points to the next list page.
/// Otherwise, the last entry is an ordinary one.
fn chain(
    memory: &GuestMemory,
    mut entries: &[u64],
    list_offset: usize,
) -> Result<Vec<DmaBuffer>, MemoryError> {
    assert!(list_offset < PAGE_SIZE);
    let mut lists = vec![memory.alloc(PAGE_SIZE)?];
    let mut at = list_offset;
    loop {
        let entries_left = (PAGE_SIZE - at) / 8;
        let last = &lists[lists.len() - 1];
        if entries.len() <= entries_left {
            last.write(at, &to_bytes(entries));
            return Ok(lists);
        }
        let next = memory.alloc(PAGE_SIZE)?;
        let (now, rest) = entries.split_at(entries_left - 1);
        last.write(at, &to_bytes(now));
        last.write(at + now.len() * 8, &next.gpa().to_le_bytes());
        lists.push(next);
        entries = rest;
        at = 0;
    }
}

fn to_bytes(entries: &[u64]) -> Vec<u8> {
    entries.iter().flat_map(|e| e.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Sqe;

    const BASE: u64 = 0x4000_0000;

    fn memory() -> GuestMemory {
        GuestMemory::new(&[(BASE, 16 << 20)]).unwrap()
    }

    fn prps(prepared: &PreparedPointer) -> (u64, u64) {
        let sqe = Sqe::default().with_data(prepared.pointer);
        (sqe.0[3], sqe.0[4])
    }

    fn entry(page: &DmaBuffer, index: usize) -> u64 {
        u64::from_le_bytes(page.to_vec(index * 8, 8).try_into().unwrap())
    }

    #[test]
    fn one_and_two_pages_need_no_list() {
        let memory = memory();
        let data = memory.alloc(4 * PAGE_SIZE).unwrap();
        let g = data.gpa();
        for (offset, len, want) in [
            (0, 512, (g, 0)),
            (0, 4096, (g, 0)),
            (3584, 512, (g + 3584, 0)),
            (3584, 1024, (g + 3584, g + 4096)),
            (0, 8192, (g, g + 4096)),
            (4, 8188, (g + 4, g + 4096)),
        ] {
            let prepared = buffer(&data, offset, len).unwrap();
            assert_eq!(prps(&prepared), want, "{offset}+{len}");
            assert!(prepared.pages.is_empty());
        }
    }

    #[test]
    fn an_offset_can_need_a_page_more() {
        let memory = memory();
        let data = memory.alloc(4 * PAGE_SIZE).unwrap();
        let prepared = buffer(&data, 512, 8192).unwrap();
        assert_eq!(prepared.pages.len(), 1);
        assert_eq!(prps(&prepared), (data.gpa() + 512, prepared.pages[0].gpa()));
        assert_eq!(entry(&prepared.pages[0], 0), data.gpa() + 4096);
        assert_eq!(entry(&prepared.pages[0], 1), data.gpa() + 8192);
        assert_eq!(entry(&prepared.pages[0], 2), 0);
    }

    #[test]
    fn a_full_list_page_is_not_chained_and_one_entry_more_is() {
        let memory = memory();
        let data = memory.alloc(2 << 20 | PAGE_SIZE << 1).unwrap();
        let full = buffer(&data, 0, (ENTRIES_PER_PAGE + 1) * PAGE_SIZE).unwrap();
        assert_eq!(full.pages.len(), 1);
        assert_eq!(
            entry(&full.pages[0], 511),
            data.gpa() + (512 * PAGE_SIZE) as u64
        );

        let more = buffer(&data, 0, (ENTRIES_PER_PAGE + 2) * PAGE_SIZE).unwrap();
        assert_eq!(more.pages.len(), 2);
        assert_eq!(entry(&more.pages[0], 511), more.pages[1].gpa());
        assert_eq!(
            entry(&more.pages[1], 0),
            data.gpa() + (512 * PAGE_SIZE) as u64
        );
        assert_eq!(
            entry(&more.pages[1], 1),
            data.gpa() + (513 * PAGE_SIZE) as u64
        );
    }

    #[test]
    fn a_list_may_start_within_its_page() {
        let memory = memory();
        let pages = [0x1000, 0x2000, 0x3000, 0x4000];
        let prepared = list(&memory, 0x800, &pages, PAGE_SIZE - 16).unwrap();
        assert_eq!(
            prps(&prepared),
            (0x800, prepared.pages[0].gpa() + PAGE_SIZE as u64 - 16)
        );
        assert_eq!(entry(&prepared.pages[0], 510), 0x1000);
        assert_eq!(entry(&prepared.pages[0], 511), prepared.pages[1].gpa());
        assert_eq!(entry(&prepared.pages[1], 0), 0x2000);
        assert_eq!(entry(&prepared.pages[1], 2), 0x4000);
    }
}

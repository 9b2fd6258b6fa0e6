//! Translation of PRP entries and lists (Base 2.0, section 4.1.1) from guest addresses to IOVAs.
//!
//! Each entry is read from guest memory once. A list is rebuilt, entry by entry, in the slot's own memory. So the host
//! controller never reads a list that the guest can still write.

use nvme_guest::address::{Gpa, PAGE_SIZE};
use nvme_guest::dma::{DmaDirection, IovaHint, RegionHint, RegionTable, RunPages};
use nvme_mpt_memory::RawBytes;
use nvme_spec::dma::{PrpEntry, PrpList, PrpListPage};
use nvme_spec::status::Status;

use super::CommandFailure;
use crate::host::ListMemory;

const PAGE_OFFSET_MASK: u64 = PAGE_SIZE - 1;

/// Byte offsets of the two PRP entries in a command, by which the error log names the wrong one.
const PRP1: u16 = 24;
const PRP2: u16 = 32;

/// Places in a region table where the next lookups begin, because the data of most commands lies near that of the last one.
#[derive(Debug, Default)]
pub(super) struct PrpHints {
    /// Place of the page of each command's first PRP entry. The lookup of the entries of its list begins there too.
    page: IovaHint,
    /// Place of pages that entries of a list name outside the contiguous memory region of the command's first entry.
    data: RegionHint,
    list: RegionHint,
}

/// Translates the first PRP entry if the command's data lies in one page, and in the contiguous memory region that held the
/// previous command's data. Returns `None` otherwise. Nearly all commands take this fast path.
#[inline(always)]
pub(super) fn translate_page(
    hints: &PrpHints,
    prp1: u64,
    len: u64,
    direction: DmaDirection,
) -> Option<u64> {
    if prp1.is_multiple_of(4) && prp1 % PAGE_SIZE + len <= PAGE_SIZE {
        let iova = hints.page.translate(Gpa(prp1), len, direction)?;
        return Some(iova.bits());
    }
    None
}

/// Translates the PRP entries of a command that transfers `len` bytes (at least one). If the host controller needs a PRP list,
/// builds it in the slot's list.
#[inline(never)]
pub(super) fn translate(
    table: &RegionTable,
    hints: &mut PrpHints,
    [prp1, prp2]: [u64; 2],
    len: u64,
    direction: DmaDirection,
    lists: &mut ListMemory,
    slot: u16,
) -> Result<[u64; 2], CommandFailure> {
    if !prp1.is_multiple_of(4) {
        return Err(CommandFailure::permanent(Status::PRP_OFFSET_INVALID, PRP1));
    }
    let first = (PAGE_SIZE - prp1 % PAGE_SIZE).min(len);
    let outside = |location| CommandFailure::permanent(Status::DATA_TRANSFER_ERROR, location);
    let host_prp1 = table
        .translate_for_hint(Gpa(prp1), first, direction, &mut hints.page)
        .ok_or(outside(PRP1))?
        .bits();
    let rest = len - first;
    if rest == 0 {
        return Ok([host_prp1, 0]);
    }
    if rest <= PAGE_SIZE {
        if prp2 & PAGE_OFFSET_MASK != 0 {
            return Err(CommandFailure::permanent(Status::PRP_OFFSET_INVALID, PRP2));
        }
        let host_prp2 = table.translate_for_hint(Gpa(prp2), rest, direction, &mut hints.page);
        return Ok([host_prp1, host_prp2.ok_or(outside(PRP2))?.bits()]);
    }
    translate_list(table, hints, prp2, rest, direction, lists, slot)?;
    Ok([host_prp1, lists.slot_iova(slot).bits()])
}

/// Copies the guest's PRP list of a command that transfers `len` bytes to the slot's list, and translates its entries.
#[inline]
fn translate_list(
    table: &RegionTable,
    hints: &mut PrpHints,
    pointer: u64,
    len: u64,
    direction: DmaDirection,
    lists: &mut ListMemory,
    slot: u16,
) -> Result<(), CommandFailure> {
    let (host_list, _) = lists.slot_list(slot);
    // Regions are whole pages, so the page of the last entry lies in one region even if its end is unused.
    let entries = (len - 1) / PAGE_SIZE + 1;
    let list = PrpList::new(PrpEntry(pointer), entries, PAGE_SIZE.ilog2());
    let page = current_page(&list)?;
    if !page.has_next_page {
        let guest_list = page_entries(table, hints, page)?;
        return translate_entries(table, hints, guest_list, direction, host_list);
    }
    translate_chain(table, hints, list, direction, host_list)
}

/// Returns the page that the walk through a guest's PRP list has reached.
#[inline(always)]
fn current_page(list: &PrpList) -> Result<PrpListPage, CommandFailure> {
    list.page()
        .ok_or(CommandFailure::permanent(Status::PRP_OFFSET_INVALID, PRP2))
}

/// Returns the entries of a page of the PRP list, as they lie in guest memory.
#[inline(always)]
fn page_entries<'a>(
    table: &'a RegionTable,
    hints: &mut PrpHints,
    page: PrpListPage,
) -> Result<RawBytes<'a>, CommandFailure> {
    let len = PrpEntry::SIZE as u64 * page.count;
    table
        .bytes(
            Gpa(page.address),
            len,
            DmaDirection::FromGuest,
            &mut hints.list,
        )
        .ok_or(CommandFailure::permanent(Status::DATA_TRANSFER_ERROR, PRP2))
}

/// Copies and translates a PRP list that takes several pages.
#[inline(never)]
fn translate_chain(
    table: &RegionTable,
    hints: &mut PrpHints,
    mut list: PrpList,
    direction: DmaDirection,
    mut host_list: &mut [u64],
) -> Result<(), CommandFailure> {
    loop {
        let page = current_page(&list)?;
        let guest_list = page_entries(table, hints, page)?;
        if !page.has_next_page {
            return translate_entries(table, hints, guest_list, direction, host_list);
        }
        let entries = page.data_entries() as usize;
        let internal = CommandFailure::permanent(Status::INTERNAL_ERROR, PRP2);
        // The list's address is a multiple of an entry's size, and regions are whole pages. So every entry is aligned.
        let next = guest_list.words().ok_or(internal)?.read(entries);
        list.advance(page, PrpEntry(next));
        current_page(&list)?;
        let guest_list = guest_list
            .slice(0, PrpEntry::SIZE * entries)
            .ok_or(internal)?;
        translate_entries(table, hints, guest_list, direction, host_list)?;
        host_list = host_list.get_mut(entries..).ok_or(internal)?;
    }
}

/// Copies entries of the guest's PRP list to the start of the host's list, and translates them as if all pages lay in the
/// contiguous memory region (run) of the command's first entry. If some do not, translates again, one by one.
#[inline(always)]
fn translate_entries(
    table: &RegionTable,
    hints: &mut PrpHints,
    guest_list: RawBytes<'_>,
    direction: DmaDirection,
    host_list: &mut [u64],
) -> Result<(), CommandFailure> {
    // The largest transfer uses half of the entries of a list.
    let host_list = host_list
        .get_mut(..guest_list.len() / PrpEntry::SIZE)
        .ok_or(CommandFailure::permanent(Status::INTERNAL_ERROR, PRP2))?;
    let run = hints
        .page
        .pages(direction)
        .ok_or(CommandFailure::permanent(Status::INTERNAL_ERROR, PRP2))?;
    // The copy has no branch per entry: nearly always, all pages lie in one run.
    let offsets = guest_list.copy_moved_words_to(host_list, run.first, run.iova);
    // Runs start at page boundaries, so the offset in the run includes the offset in the page.
    if offsets & PAGE_OFFSET_MASK != 0 {
        return Err(CommandFailure::permanent(Status::PRP_OFFSET_INVALID, PRP2));
    }
    // `offsets` is the bitwise OR of all offsets, so no offset is larger. Runs end at page boundaries, so a page whose first
    // byte lies in the run lies completely in the run.
    if offsets <= run.last_byte {
        return Ok(());
    }
    translate_one_by_one(table, hints, host_list, run, direction)
}

/// Translates entries again that were translated as if all lay in one run. Those outside the run are looked up.
#[inline(never)]
fn translate_one_by_one(
    table: &RegionTable,
    hints: &mut PrpHints,
    entries: &mut [u64],
    run: RunPages,
    direction: DmaDirection,
) -> Result<(), CommandFailure> {
    for entry in entries {
        let offset = entry.wrapping_sub(run.iova);
        if offset > run.last_byte {
            let guest = Gpa(offset.wrapping_add(run.first));
            let iova = table.translate(guest, PAGE_SIZE, direction, &mut hints.data);
            *entry = iova
                .ok_or(CommandFailure::permanent(Status::DATA_TRANSFER_ERROR, PRP2))?
                .bits();
        }
    }
    Ok(())
}

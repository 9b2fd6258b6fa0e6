//! PRP entries and lists (Base 2.0, section 4.1.1): from the guest's addresses to IOVAs.
//!
//! Each entry is read from guest memory once. A list is rebuilt, entry by entry, in memory of the
//! slot's own, so that a host controller never reads a list that the guest can still write.

use super::Failure;
use super::lists::ListMemory;
use crate::address::{Gpa, PAGE_SIZE};
use crate::dma::{Direction, RegionHint, RegionTable};
use crate::spec::status::Status;

const PAGE_OFFSET: u64 = PAGE_SIZE - 1;

/// Byte offsets of the two PRP entries in a command, for the error log.
const PRP1: u16 = 24;
const PRP2: u16 = 32;

/// Where to look first for data and for lists.
#[derive(Debug, Default)]
pub(super) struct PrpHints {
    data: RegionHint,
    list: RegionHint,
}

/// Translates the PRP entries of a command that transfers `len` bytes, at least one.
///
/// The host controller's list, if it takes one, is built in the slot's part of `lists`.
#[inline]
pub(super) fn translate(
    table: &RegionTable,
    hints: &mut PrpHints,
    [prp1, prp2]: [u64; 2],
    len: u64,
    direction: Direction,
    lists: &ListMemory,
    slot: u16,
) -> Result<[u64; 2], Failure> {
    if prp1 % 4 != 0 {
        return Err(Failure::at(Status::PRP_OFFSET_INVALID, PRP1));
    }
    let first = (PAGE_SIZE - prp1 % PAGE_SIZE).min(len);
    let outside = |location| Failure::at(Status::DATA_TRANSFER_ERROR, location);
    let host_prp1 = table
        .translate(Gpa(prp1), first, direction, &mut hints.data)
        .ok_or(outside(PRP1))?
        .bits();
    let rest = len - first;
    if rest == 0 {
        return Ok([host_prp1, 0]);
    }
    if rest <= PAGE_SIZE {
        if prp2 & PAGE_OFFSET != 0 {
            return Err(Failure::at(Status::PRP_OFFSET_INVALID, PRP2));
        }
        let host_prp2 = table.translate(Gpa(prp2), rest, direction, &mut hints.data);
        return Ok([host_prp1, host_prp2.ok_or(outside(PRP2))?.bits()]);
    }
    let host_list = translate_list(table, hints, prp2, rest, direction, lists, slot)?;
    Ok([host_prp1, host_list])
}

/// Copies and translates a PRP list for `len` bytes. Returns the IOVA of the copy.
fn translate_list(
    table: &RegionTable,
    hints: &mut PrpHints,
    mut pointer: u64,
    len: u64,
    direction: Direction,
    lists: &ListMemory,
    slot: u16,
) -> Result<u64, Failure> {
    if pointer % 8 != 0 {
        return Err(Failure::at(Status::PRP_OFFSET_INVALID, PRP2));
    }
    let outside = Failure::at(Status::DATA_TRANSFER_ERROR, PRP2);
    let (host_list, host_list_iova) = lists.of_slot(slot);
    let entries = len.div_ceil(PAGE_SIZE) as usize;
    let last_page = len - (entries as u64 - 1) * PAGE_SIZE;
    let mut done = 0;
    while done < entries {
        // Up to the end of the list's page; its last entry points on if more are to come.
        let in_page = ((PAGE_SIZE - (pointer & PAGE_OFFSET)) / 8) as usize;
        let remaining = entries - done;
        let (here, goes_on) = if remaining > in_page {
            (in_page - 1, true)
        } else {
            (remaining, false)
        };
        let bytes = 8 * (here + usize::from(goes_on));
        let guest_list = table
            .bytes(
                Gpa(pointer),
                bytes as u64,
                Direction::FromGuest,
                &mut hints.list,
            )
            .ok_or(outside)?;
        for i in 0..here {
            let entry = guest_list.read_u64(i);
            let size = if done + 1 == entries {
                last_page
            } else {
                PAGE_SIZE
            };
            let page = table.translate(Gpa(entry), size, direction, &mut hints.data);
            if entry & PAGE_OFFSET != 0 {
                return Err(Failure::at(Status::PRP_OFFSET_INVALID, PRP2));
            }
            host_list.write_u64(done, page.ok_or(outside)?.bits());
            done += 1;
        }
        if goes_on {
            pointer = guest_list.read_u64(here);
            if pointer & PAGE_OFFSET != 0 {
                return Err(Failure::at(Status::PRP_OFFSET_INVALID, PRP2));
            }
        }
    }
    Ok(host_list_iova.bits())
}

//! Parsing of data pointers: PRP entries and lists, SGLs (NVMe Base 2.0, sections 4.1.1 and 4.1.2).

use super::iommu::ModelIommu;
use crate::command::Sqe;
use crate::memory::PAGE_SIZE;
use crate::sgl::Descriptor;
use crate::status::{self, StatusCode};

const PAGE: u64 = PAGE_SIZE as u64;

/// Maximum number of SGL descriptors of a command.
const DESCRIPTORS: usize = 4096;

/// A part of the data: address and size in bytes.
pub(super) type Piece = (u64, usize);

/// Error of an invalid data pointer: the completion status, and a description of the violation.
#[derive(Debug)]
pub(super) struct InvalidDataPointer {
    pub(super) status: StatusCode,
    pub(super) what: &'static str,
}

fn reject<T>(status: StatusCode, what: &'static str) -> Result<T, InvalidDataPointer> {
    Err(InvalidDataPointer { status, what })
}

/// Returns the parts of memory that hold the command's `len` bytes of data.
pub(super) fn pieces(
    iommu: &ModelIommu,
    sqe: &Sqe,
    len: usize,
) -> Result<Vec<Piece>, InvalidDataPointer> {
    match sqe.cdw(0) >> 14 & 0b11 {
        0 => prp_pieces(iommu, [sqe.0[3], sqe.0[4]], len),
        1 => sgl_pieces(iommu, [sqe.0[3], sqe.0[4]], len),
        _ => reject(status::INVALID_FIELD, "PSDT"),
    }
}

fn word(iommu: &ModelIommu, iova: u64) -> Result<u64, InvalidDataPointer> {
    let mut bytes = [0; 8];
    match iommu.read(iova, &mut bytes) {
        Ok(()) => Ok(u64::from_le_bytes(bytes)),
        Err(_) => reject(status::DATA_TRANSFER_ERROR, "a list outside of memory"),
    }
}

fn prp_pieces(
    iommu: &ModelIommu,
    [prp1, prp2]: [u64; 2],
    len: usize,
) -> Result<Vec<Piece>, InvalidDataPointer> {
    if !prp1.is_multiple_of(4) {
        return reject(status::PRP_OFFSET_INVALID, "PRP1 is not a multiple of 4");
    }
    let first = len.min((PAGE - prp1 % PAGE) as usize);
    let mut pieces = vec![(prp1, first)];
    let mut left = len - first;
    let whole = |entry: u64| match entry.is_multiple_of(PAGE) {
        true => Ok(entry),
        false => reject(status::PRP_OFFSET_INVALID, "a PRP entry has an offset"),
    };
    if left <= PAGE_SIZE {
        if left > 0 {
            pieces.push((whole(prp2)?, left));
        }
        return Ok(pieces);
    }
    let mut entry = prp2;
    if !entry.is_multiple_of(8) {
        return reject(status::PRP_OFFSET_INVALID, "a PRP list not of qwords");
    }
    while left > 0 {
        // If more than one entry is left at the end of a page, the page's last entry points to the next page of the list.
        if entry % PAGE == PAGE - 8 && left > PAGE_SIZE {
            entry = whole(word(iommu, entry)?)?;
            continue;
        }
        let bytes = left.min(PAGE_SIZE);
        pieces.push((whole(word(iommu, entry)?)?, bytes));
        left -= bytes;
        entry += 8;
    }
    Ok(pieces)
}

fn sgl_pieces(
    iommu: &ModelIommu,
    first: Descriptor,
    len: usize,
) -> Result<Vec<Piece>, InvalidDataPointer> {
    let mut pieces = Vec::new();
    let mut total = 0;
    let mut seen = 0;
    // Stack of descriptors that are not read yet. The next descriptor is on top.
    let mut rest = vec![first];
    while let Some([address, word1]) = rest.pop() {
        seen += 1;
        if seen > DESCRIPTORS {
            return reject(status::INVALID_SGL_COUNT, "an SGL without end");
        }
        let bytes = word1 as u32;
        match word1 >> 56 {
            0x00 => {
                total += bytes as usize;
                if bytes > 0 {
                    pieces.push((address, bytes as usize));
                }
            }
            0x20 | 0x30 => {
                if !rest.is_empty() {
                    return reject(
                        status::INVALID_SGL_SEGMENT,
                        "a segment leads on in its middle",
                    );
                }
                if bytes == 0 || !bytes.is_multiple_of(16) || bytes as usize > 16 * DESCRIPTORS {
                    return reject(status::INVALID_SGL_SEGMENT, "the length of a segment");
                }
                for index in (0..bytes / 16).rev() {
                    let at = address.wrapping_add(16 * u64::from(index));
                    rest.push([word(iommu, at)?, word(iommu, at.wrapping_add(8))?]);
                }
            }
            _ => return reject(status::SGL_TYPE_INVALID, "the type of an SGL descriptor"),
        }
    }
    match total == len {
        true => Ok(pieces),
        false => reject(status::SGL_LENGTH_INVALID, "the length of an SGL"),
    }
}

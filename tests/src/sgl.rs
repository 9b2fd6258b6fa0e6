//! Scatter Gather Lists (NVMe Base 2.0, section 4.1.2): descriptors and segments, valid or hand-made.

use crate::command::DataPointer;
use crate::memory::{DmaBuffer, GuestMemory, MemoryError};
use crate::prp::PreparedPointer;

/// An SGL descriptor of 16 bytes.
pub type Descriptor = [u64; 2];

/// Returns a descriptor from address, length, type and sub type, unchecked.
pub const fn descriptor(address: u64, len: u32, kind: u8, sub: u8) -> Descriptor {
    let identifier = (kind << 4 | sub & 0xf) as u64;
    [address, len as u64 | identifier << 56]
}

/// Returns a Data Block descriptor.
pub const fn data_block(gpa: u64, len: u32) -> Descriptor {
    descriptor(gpa, len, 0x0, 0)
}

/// Returns a Bit Bucket descriptor, for source data of a read that is discarded.
pub const fn bit_bucket(len: u32) -> Descriptor {
    descriptor(0, len, 0x1, 0)
}

/// Returns a Segment descriptor: it points to further descriptors, of which the last is a Segment or Last Segment
/// descriptor.
pub const fn segment(gpa: u64, len: u32) -> Descriptor {
    descriptor(gpa, len, 0x2, 0)
}

/// Returns a Last Segment descriptor: it points to further descriptors, all of which describe data.
pub const fn last_segment(gpa: u64, len: u32) -> Descriptor {
    descriptor(gpa, len, 0x3, 0)
}

/// Builds the data pointer for a list of descriptors. A single descriptor is the data pointer itself. Several descriptors
/// are put into segments of at most `per_segment` descriptors, which includes the link to the next segment.
///
/// # Errors
/// Memory for the segments is exhausted.
///
/// # Panics
/// `list` is empty or `per_segment` is below 2.
pub fn build(
    memory: &GuestMemory,
    list: &[Descriptor],
    per_segment: usize,
) -> Result<PreparedPointer, MemoryError> {
    assert!(!list.is_empty() && per_segment >= 2);
    if let [only] = list {
        return Ok(PreparedPointer {
            pointer: DataPointer::sgl(*only),
            pages: Vec::new(),
        });
    }
    // Segments are built from the last one backwards, since a link has the kind and length of the segment to which it
    // points.
    let mut pieces = Vec::new();
    let mut rest = list;
    while rest.len() > per_segment {
        let (piece, more) = rest.split_at(per_segment - 1);
        pieces.push(piece);
        rest = more;
    }
    let (page, mut link) = place(memory, rest, None)?;
    let mut pages = vec![page];
    for piece in pieces.into_iter().rev() {
        let (page, to) = place(memory, piece, Some(link))?;
        pages.push(page);
        link = to;
    }
    pages.reverse();
    Ok(PreparedPointer {
        pointer: DataPointer::sgl(link),
        pages,
    })
}

/// Writes one segment. Returns its memory and the descriptor that links to it.
fn place(
    memory: &GuestMemory,
    piece: &[Descriptor],
    link: Option<Descriptor>,
) -> Result<(DmaBuffer, Descriptor), MemoryError> {
    let bytes: Vec<u8> = piece
        .iter()
        .chain(link.as_ref())
        .flatten()
        .flat_map(|word| word.to_le_bytes())
        .collect();
    let page = memory.alloc(bytes.len())?;
    page.write(0, &bytes);
    let len = bytes.len() as u32;
    let to = match link {
        Some(_) => segment(page.gpa(), len),
        None => last_segment(page.gpa(), len),
    };
    Ok((page, to))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Sqe;

    fn read(page: &DmaBuffer, index: usize) -> Descriptor {
        let bytes = page.to_vec(index * 16, 16);
        let (words, _) = bytes.as_chunks::<8>();
        [u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1])]
    }

    #[test]
    fn the_identifier_is_the_last_byte() {
        assert_eq!(data_block(5, 6), [5, 6]);
        assert_eq!(last_segment(5, 6), [5, 6 | 0x30 << 56]);
        assert_eq!(descriptor(5, 6, 0xf, 1), [5, 6 | 0xf1 << 56]);
    }

    #[test]
    fn segments_are_chained_and_the_last_is_marked() {
        let memory = GuestMemory::new(&[(0x1000, 1 << 20)]).unwrap();
        let list: Vec<_> = (1..=5_u64).map(|i| data_block(i << 12, 512)).collect();
        let prepared = build(&memory, &list, 3).unwrap();
        let sqe = Sqe::default().with_data(prepared.pointer);
        // The first segment has two descriptors and a link, and the last one has three descriptors.
        let [first, second] = &prepared.pages[..] else {
            panic!("{} segments", prepared.pages.len());
        };
        assert_eq!([sqe.0[3], sqe.0[4]], segment(first.gpa(), 48));
        assert_eq!(read(first, 0), list[0]);
        assert_eq!(read(first, 1), list[1]);
        assert_eq!(read(first, 2), last_segment(second.gpa(), 48));
        assert_eq!(read(second, 0), list[2]);
        assert_eq!(read(second, 2), list[4]);
    }

    #[test]
    fn one_descriptor_is_inline() {
        let memory = GuestMemory::new(&[(0x1000, 1 << 20)]).unwrap();
        let prepared = build(&memory, &[data_block(0x2000, 4096)], 16).unwrap();
        assert!(prepared.pages.is_empty());
        assert_eq!(prepared.pointer, DataPointer::sgl([0x2000, 4096]));
    }
}

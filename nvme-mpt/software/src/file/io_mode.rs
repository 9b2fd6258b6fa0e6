//! Path of a file's data: direct I/O or the page cache.
//!
//! Using both for a file loses data: the page cache may write an old page back over data that was written directly, and then
//! reports an error to every user of the file. So the choice depends only on the file, never on a command or a guest's buffer.

use nvme_guest::host::Mdts;

/// Size in bytes of the blocks of a partial write: if a command changes only a part of a block, the block is read, modified and
/// written as a whole. Leases begin and end at multiples of this size, so no other process changes the unwritten part of such a
/// block.
pub(super) const UNIT: u64 = nvme_lease::range::BOUNDARY;

/// Maximum number of bytes that one command transfers, when its range is extended to whole blocks.
pub(super) const STAGE_MAX: usize = Mdts::MAX.bytes() as usize + 2 * UNIT as usize;

/// Alignment that the file system and the device require of direct I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DirectAlignment {
    /// Alignment in bytes of addresses and lengths of memory parts.
    pub(super) memory: usize,
    /// Alignment in bytes of offsets in the file, and of the total length.
    pub(super) offset: u64,
}

/// Path of a file's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileIoMode {
    /// Through the page cache: any offset, length and memory address is possible.
    Cached,
    /// Past the page cache, with aligned offsets, lengths and memory addresses.
    Direct(DirectAlignment),
}

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TransferDirection {
    Read,
    Write,
}

/// Memory that the kernel uses for a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TransferBuffer {
    /// The kernel accesses the command's own memory.
    InPlace,
    /// The kernel accesses a bounce buffer that holds the bytes `start..end` of the file, which include the command's data.
    Staged { start: u64, end: u64 },
}

impl TransferBuffer {
    /// Returns whether the bounce buffer holds more bytes of the file than the command's `len` bytes at `offset`.
    pub(super) fn is_partial(self, offset: u64, len: u64) -> bool {
        match self {
            Self::InPlace => false,
            Self::Staged { start, end } => start != offset || end != offset + len,
        }
    }
}

impl FileIoMode {
    /// Chooses direct I/O or the page cache for a file of `bytes` bytes. `direct` is the alignment that direct I/O requires;
    /// `None` if the file does not support direct I/O.
    ///
    /// For direct I/O, memory parts are aligned to whole blocks as well. Linux requires only the device's memory alignment, but
    /// zram (Linux 6.18) transfers whole pages, even if a part begins or ends within a page.
    pub(super) fn choose(bytes: u64, direct: Option<DirectAlignment>) -> Self {
        match direct {
            Some(alignment)
                if UNIT.is_multiple_of(alignment.offset)
                    && UNIT.is_multiple_of(alignment.memory as u64)
                    && bytes.is_multiple_of(alignment.offset) =>
            {
                Self::Direct(DirectAlignment {
                    memory: alignment.memory.max(alignment.offset as usize),
                    ..alignment
                })
            }
            _ => Self::Cached,
        }
    }

    /// Returns the alignment in bytes at which a partly completed transfer may resume.
    pub(super) fn resume_alignment(self, direction: TransferDirection) -> u64 {
        match (self, direction) {
            (Self::Cached, _) => 1,
            (Self::Direct(alignment), TransferDirection::Read) => alignment.offset,
            (Self::Direct(_), TransferDirection::Write) => UNIT,
        }
    }

    /// Plans the transfer of memory parts (address and length) at `offset` of a file that ends at `file_end`.
    #[inline]
    pub(super) fn plan_transfer(
        self,
        direction: TransferDirection,
        offset: u64,
        parts: impl Iterator<Item = (usize, usize)>,
        file_end: u64,
    ) -> TransferBuffer {
        let Self::Direct(DirectAlignment { memory, .. }) = self else {
            return TransferBuffer::InPlace;
        };
        let step = self.resume_alignment(direction);
        let (mut len, mut aligned) = (0, true);
        for (address, part) in parts {
            aligned &= (address | part).is_multiple_of(memory);
            len += part as u64;
        }
        let end = offset + len;
        // The file's last block may be short: a transfer up to the end of the file covers the whole block.
        let ends_well = end.is_multiple_of(step) || end == file_end;
        if aligned && offset.is_multiple_of(step) && ends_well {
            return TransferBuffer::InPlace;
        }
        let rounded = end.next_multiple_of(step);
        TransferBuffer::Staged {
            start: offset - offset % step,
            end: if end <= file_end {
                rounded.min(file_end)
            } else {
                rounded
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const EXT4: FileIoMode = FileIoMode::Direct(DirectAlignment {
        memory: 512,
        offset: 512,
    });

    #[test]
    fn the_file_decides_on_the_way() {
        let direct = |offset| {
            Some(DirectAlignment {
                memory: 512,
                offset,
            })
        };
        assert_eq!(FileIoMode::choose(1 << 20, direct(512)), EXT4);
        assert_eq!(FileIoMode::choose(1 << 20, None), FileIoMode::Cached);
        // If whole blocks were required, the last bytes of the device would be inaccessible.
        assert_eq!(
            FileIoMode::choose((1 << 20) + 512, direct(4096)),
            FileIoMode::Cached
        );
        assert_eq!(FileIoMode::choose((1 << 20) + 512, direct(512)), EXT4);
        // Such a block may belong to two leases.
        assert_eq!(
            FileIoMode::choose(1 << 20, direct(8192)),
            FileIoMode::Cached
        );
    }

    #[test]
    fn parts_of_blocks_are_staged() {
        let plan = |direction, offset, address, len| {
            EXT4.plan_transfer(direction, offset, [(address, len)].into_iter(), 1 << 20)
        };
        let (read, write) = (TransferDirection::Read, TransferDirection::Write);
        assert_eq!(plan(write, 4096, 0x1000, 8192), TransferBuffer::InPlace);
        assert_eq!(plan(read, 1024, 0x1000, 512), TransferBuffer::InPlace);
        assert_eq!(
            plan(write, 3072, 0x1000, 14_336),
            TransferBuffer::Staged {
                start: 0,
                end: 5 * 4096
            }
        );
        // Memory that is not aligned for the device is copied, for any part of the file.
        assert_eq!(
            plan(write, 4096, 0x1001, 4096),
            TransferBuffer::Staged {
                start: 4096,
                end: 8192
            }
        );
        assert_eq!(
            plan(read, 512, 0x1001, 512),
            TransferBuffer::Staged {
                start: 512,
                end: 1024
            }
        );
    }

    #[test]
    fn parts_of_memory_are_whole_blocks() {
        let zram = DirectAlignment {
            memory: 512,
            offset: 4096,
        };
        let plan = |address| {
            let parts = [
                (address, 4096 - address % 4096),
                (0x10_0000, address % 4096),
            ];
            let parts = parts.into_iter().filter(|(_, len)| *len > 0);
            FileIoMode::choose(1 << 20, Some(zram)).plan_transfer(
                TransferDirection::Read,
                8192,
                parts,
                1 << 20,
            )
        };
        assert_eq!(plan(0x1000), TransferBuffer::InPlace);
        let staged = TransferBuffer::Staged {
            start: 8192,
            end: 12_288,
        };
        assert_eq!(plan(0x1200), staged);
    }

    #[test]
    fn the_end_of_the_file_is_never_moved() {
        let end = (1 << 20) + 1536;
        let plan = |offset, len| {
            EXT4.plan_transfer(
                TransferDirection::Write,
                offset,
                [(0x1000, len)].into_iter(),
                end,
            )
        };
        assert_eq!(plan(1 << 20, 1536), TransferBuffer::InPlace);
        assert_eq!(
            plan((1 << 20) + 512, 512),
            TransferBuffer::Staged {
                start: 1 << 20,
                end
            }
        );
    }

    proptest! {
        #[test]
        fn a_plan_names_whole_blocks_and_all_of_the_data(
            write: bool,
            offset in 0_u64..1000,
            lens in prop::collection::vec((0_usize..3, 1_usize..40), 1..5),
            odd in 0_usize..4,
        ) {
            let (offset, file_end) = (offset * 512, 1_u64 << 20);
            let parts = lens.iter().map(|&(at, len)| (0x10_0000 * (at + 1) + odd * 256, len * 512));
            let len: u64 = lens.iter().map(|&(_, len)| len as u64 * 512).sum();
            let direction = if write { TransferDirection::Write } else { TransferDirection::Read };
            let step = EXT4.resume_alignment(direction);
            match EXT4.plan_transfer(direction, offset, parts, file_end) {
                TransferBuffer::InPlace => {
                    let ends = [offset, offset + len];
                    prop_assert!(ends.iter().all(|end| end.is_multiple_of(step)));
                    prop_assert!(odd.is_multiple_of(2));
                }
                TransferBuffer::Staged { start, end } => {
                    prop_assert!(start <= offset && end >= offset + len);
                    prop_assert!(start.is_multiple_of(step) && end.is_multiple_of(step));
                    prop_assert!(offset - start < step && end - (offset + len) < step);
                }
            }
        }
    }
}

//! Namespaces: their blocks, and the execution of commands.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::command::{Sqe, io};
use crate::identify::field;
use crate::status::{self, StatusCode};

/// Options of a new namespace.
#[derive(Clone, Copy, Debug)]
pub struct NamespaceOptions {
    /// Namespace identifier.
    pub nsid: u32,
    /// Size in logical blocks.
    pub blocks: u64,
    /// Logical block size as a power of two, in bytes.
    pub lba_shift: u8,
    /// Bytes of metadata per logical block.
    pub metadata: u16,
}

impl NamespaceOptions {
    /// Returns options for `bytes` bytes in blocks of 512 or 4096 bytes.
    pub fn new(nsid: u32, bytes: u64, block_size: u32) -> Self {
        let lba_shift = block_size.trailing_zeros() as u8;
        Self {
            nsid,
            blocks: bytes >> lba_shift,
            lba_shift,
            metadata: 0,
        }
    }
}

/// Limits of one Copy command.
#[derive(Clone, Copy, Debug)]
pub(super) struct CopyLimits {
    pub(super) range_blocks: u16,
    pub(super) blocks: u32,
    pub(super) ranges: u8,
}

/// A namespace with its blocks.
#[derive(Debug)]
pub(super) struct Namespace {
    pub(super) options: NamespaceOptions,
    pub(super) copy: CopyLimits,
    /// True after the namespace has changed its size, because the host may not know the new size yet.
    pub(super) resized: bool,
    bytes: Vec<u8>,
    uncorrectable: BTreeSet<u64>,
}

type Done = Result<(), StatusCode>;

impl Namespace {
    pub(super) fn new(options: NamespaceOptions) -> Self {
        Self {
            options,
            copy: CopyLimits {
                range_blocks: 128,
                blocks: 256,
                ranges: 8,
            },
            resized: false,
            bytes: vec![0; (options.blocks << options.lba_shift) as usize],
            uncorrectable: BTreeSet::new(),
        }
    }

    pub(super) fn resize(&mut self, blocks: u64) {
        self.options.blocks = blocks;
        self.resized = true;
        self.bytes
            .resize((blocks << self.options.lba_shift) as usize, 0);
    }

    /// Returns the blocks from `slba` on, including uncorrectable ones.
    pub(super) fn peek(&self, slba: u64, blocks: u64) -> Option<&[u8]> {
        self.bytes.get(self.range(slba, blocks).ok()?)
    }

    /// Changes bytes at an offset directly, without a command.
    pub(super) fn poke(&mut self, offset: usize, bytes: &[u8]) {
        self.bytes[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    /// Returns the number of bytes that a command transfers; 0 for a command without data.
    pub(super) fn transfer(&self, sqe: &Sqe) -> usize {
        match sqe.opcode() {
            io::READ | io::WRITE | io::COMPARE => {
                ((sqe.cdw(12) & 0xFFFF) as usize + 1) << self.options.lba_shift
            }
            io::DATASET_MANAGEMENT => ((sqe.cdw(10) & 0xFF) as usize + 1) * 16,
            io::COPY => ((sqe.cdw(12) & 0xFF) as usize + 1) * 32,
            _ => 0,
        }
    }

    /// Returns the position in bytes of a range of blocks.
    fn range(&self, slba: u64, blocks: u64) -> Result<Range<usize>, StatusCode> {
        match slba.checked_add(blocks) {
            Some(end) if end <= self.options.blocks => {
                let shift = self.options.lba_shift;
                Ok((slba << shift) as usize..(end << shift) as usize)
            }
            _ => Err(status::LBA_OUT_OF_RANGE),
        }
    }

    fn check_readable(&self, slba: u64, blocks: u64) -> Done {
        match self.uncorrectable.range(slba..slba + blocks).next() {
            Some(_) => Err(status::UNRECOVERED_READ_ERROR),
            None => Ok(()),
        }
    }

    fn clear_uncorrectable(&mut self, slba: u64, blocks: u64) {
        self.uncorrectable
            .retain(|lba| !(slba..slba + blocks).contains(lba));
    }

    /// Executes a command, with the data that the host has sent. Returns the data for the host.
    pub(super) fn execute(&mut self, sqe: &Sqe, data: &[u8]) -> Result<&[u8], StatusCode> {
        let (slba, blocks) = (sqe.0[5], u64::from(sqe.cdw(12) & 0xFFFF) + 1);
        match sqe.opcode() {
            io::FLUSH => {}
            io::READ => {
                let range = self.range(slba, blocks)?;
                self.check_readable(slba, blocks)?;
                return Ok(&self.bytes[range]);
            }
            io::WRITE => {
                let range = self.range(slba, blocks)?;
                self.bytes[range].copy_from_slice(data);
                self.clear_uncorrectable(slba, blocks);
            }
            io::COMPARE => {
                let range = self.range(slba, blocks)?;
                self.check_readable(slba, blocks)?;
                if self.bytes[range] != *data {
                    return Err(status::COMPARE_FAILURE);
                }
            }
            io::VERIFY => {
                self.range(slba, blocks)?;
                self.check_readable(slba, blocks)?;
            }
            io::WRITE_ZEROES => {
                let range = self.range(slba, blocks)?;
                self.bytes[range].fill(0);
                self.clear_uncorrectable(slba, blocks);
            }
            io::WRITE_UNCORRECTABLE => {
                self.range(slba, blocks)?;
                self.uncorrectable.extend(slba..slba + blocks);
            }
            io::DATASET_MANAGEMENT => self.manage(sqe, data)?,
            io::COPY => self.copy(slba, data)?,
            _ => return Err(status::INVALID_OPCODE),
        }
        Ok(&[])
    }

    fn manage(&mut self, sqe: &Sqe, data: &[u8]) -> Done {
        let deallocate = sqe.cdw(11) & 1 << 2 != 0;
        for entry in data.chunks_exact(16) {
            let range = self.range(field::u64(entry, 8), field::u32(entry, 4).into())?;
            if deallocate {
                self.bytes[range].fill(0);
                self.clear_uncorrectable(field::u64(entry, 8), field::u32(entry, 4).into());
            }
        }
        Ok(())
    }

    fn copy(&mut self, sdlba: u64, data: &[u8]) -> Done {
        let sources: Vec<(u64, u64)> = data
            .chunks_exact(32)
            .map(|entry| (field::u64(entry, 8), u64::from(field::u16(entry, 16)) + 1))
            .collect();
        let total: u64 = sources.iter().map(|(_, blocks)| blocks).sum();
        let long = sources
            .iter()
            .any(|(_, n)| *n > self.copy.range_blocks.into());
        if long || total > self.copy.blocks.into() || sources.len() > self.copy.ranges.into() {
            return Err(status::SIZE_LIMIT_EXCEEDED);
        }
        self.range(sdlba, total)?;
        let mut to = sdlba;
        for (from, blocks) in sources {
            let source = self.range(from, blocks)?;
            self.check_readable(from, blocks)?;
            let target = self.range(to, blocks)?;
            self.bytes.copy_within(source, target.start);
            self.clear_uncorrectable(to, blocks);
            to += blocks;
        }
        Ok(())
    }
}

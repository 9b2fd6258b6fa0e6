//! Blocking I/O on one namespace through one queue pair, with each kind of data pointer.

use std::time::Duration;

use crate::COMMAND_TIMEOUT;
use crate::command::{FUA, Sqe, copy_range, dsm_range};
use crate::completion::Cqe;
use crate::controller::{Controller, QueueOptions};
use crate::error::{Error, Result};
use crate::identify::IdentifyNamespace;
use crate::memory::{DmaBuffer, GuestMemory};
use crate::prp::{self, PreparedPointer};
use crate::queue::QueuePair;
use crate::sgl;

/// Kind of data pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// PRPs. The data starts at this offset of its first page (a multiple of 4).
    Prp {
        /// Offset in the first page, in bytes.
        offset: usize,
    },
    /// SGL Data Blocks of at most `piece` bytes, in segments of at most `per_segment` descriptors.
    Sgl {
        /// Maximum bytes per Data Block.
        piece: usize,
        /// Maximum descriptors per segment, 2 or more.
        per_segment: usize,
    },
}

impl Transfer {
    /// Allocates memory for `len` bytes of data. Returns the memory, the offset of the data in it, and the data pointer.
    pub(crate) fn prepare(
        self,
        memory: &GuestMemory,
        len: usize,
    ) -> Result<(DmaBuffer, usize, PreparedPointer)> {
        match self {
            Self::Prp { offset } => {
                let data = memory.alloc(offset + len)?;
                let prepared = prp::buffer(&data, offset, len)?;
                Ok((data, offset, prepared))
            }
            Self::Sgl { piece, per_segment } => {
                let data = memory.alloc(len)?;
                let list: Vec<_> = (0..len.max(1))
                    .step_by(piece)
                    .map(|at| sgl::data_block(data.gpa() + at as u64, piece.min(len - at) as u32))
                    .collect();
                let prepared = sgl::build(memory, &list, per_segment)?;
                Ok((data, 0, prepared))
            }
        }
    }
}

/// A namespace with the queue pair for its I/O.
#[derive(Debug)]
pub struct Disk {
    /// Queue pair, which tests use directly for commands that `Disk` has no function for.
    pub queue: QueuePair,
    /// Kind of data pointer.
    pub transfer: Transfer,
    /// Timeout of a command.
    pub timeout: Duration,
    /// True to set Force Unit Access on reads and writes.
    pub fua: bool,
    nsid: u32,
    namespace: IdentifyNamespace,
    memory: GuestMemory,
}

impl Disk {
    /// Uses an existing queue pair for a namespace.
    ///
    /// # Errors
    /// Identify fails or the namespace is not active.
    pub fn new(controller: &mut Controller, queue: QueuePair, nsid: u32) -> Result<Self> {
        let namespace = controller.identify_namespace(nsid)?;
        if !namespace.is_active() {
            return Err(Error::Unsupported("that namespace: it is not active"));
        }
        Ok(Self {
            queue,
            transfer: Transfer::Prp { offset: 0 },
            timeout: COMMAND_TIMEOUT,
            fua: false,
            nsid,
            namespace,
            memory: controller.memory().clone(),
        })
    }

    /// Creates a polled queue pair of 64 entries for namespace 1. `queue` is the identifier of both queues.
    ///
    /// # Errors
    /// As [`Disk::new`]; also, the queues cannot be created.
    pub fn open(controller: &mut Controller, queue: u16) -> Result<Self> {
        let queue = controller.create_queue_pair(queue, &QueueOptions::polled(64))?;
        Self::new(controller, queue, 1)
    }

    /// Returns the namespace identifier.
    pub fn nsid(&self) -> u32 {
        self.nsid
    }

    /// Returns the Identify Namespace data.
    pub fn namespace(&self) -> &IdentifyNamespace {
        &self.namespace
    }

    /// Returns the logical block size in bytes.
    pub fn block_size(&self) -> usize {
        self.namespace.block_size as usize
    }

    /// Returns the size in logical blocks.
    pub fn blocks(&self) -> u64 {
        self.namespace.nsze
    }

    /// Executes a command without data.
    ///
    /// # Errors
    /// The command does not complete with success in time.
    pub fn command(&mut self, sqe: Sqe) -> Result<Cqe> {
        self.queue.execute(sqe, self.timeout)
    }

    /// Executes a command that returns `len` bytes.
    ///
    /// # Errors
    /// As [`Disk::command`].
    pub fn command_in(&mut self, sqe: Sqe, len: usize) -> Result<Vec<u8>> {
        let (data, offset, prepared) = self.transfer.prepare(&self.memory, len)?;
        self.command(sqe.with_data(prepared.pointer))?;
        Ok(data.to_vec(offset, len))
    }

    /// Executes a command that sends bytes.
    ///
    /// # Errors
    /// As [`Disk::command`].
    pub fn command_out(&mut self, sqe: Sqe, bytes: &[u8]) -> Result<Cqe> {
        let (data, offset, prepared) = self.transfer.prepare(&self.memory, bytes.len())?;
        data.write(offset, bytes);
        self.command(sqe.with_data(prepared.pointer))
    }

    fn blocks_of(&self, bytes: &[u8]) -> u32 {
        debug_assert!(bytes.len().is_multiple_of(self.block_size()));
        (bytes.len() / self.block_size()) as u32
    }

    fn with_fua(&self, sqe: Sqe) -> Sqe {
        match self.fua {
            true => sqe.with_cdw(12, sqe.cdw(12) | FUA),
            false => sqe,
        }
    }

    /// Reads `blocks` blocks, 1 to 65,536.
    ///
    /// # Errors
    /// As [`Disk::command`].
    pub fn read(&mut self, slba: u64, blocks: u32) -> Result<Vec<u8>> {
        let sqe = self.with_fua(Sqe::read(self.nsid, slba, blocks));
        self.command_in(sqe, blocks as usize * self.block_size())
    }

    /// Writes whole blocks.
    ///
    /// # Errors
    /// As [`Disk::command`].
    pub fn write(&mut self, slba: u64, bytes: &[u8]) -> Result<()> {
        let sqe = self.with_fua(Sqe::write(self.nsid, slba, self.blocks_of(bytes)));
        self.command_out(sqe, bytes).map(drop)
    }

    /// Compares whole blocks with `bytes`. If they differ, the error is Compare Failure.
    ///
    /// # Errors
    /// As [`Disk::command`].
    pub fn compare(&mut self, slba: u64, bytes: &[u8]) -> Result<()> {
        let sqe = Sqe::compare(self.nsid, slba, self.blocks_of(bytes));
        self.command_out(sqe, bytes).map(drop)
    }

    /// Verifies blocks.
    ///
    /// # Errors
    /// As [`Disk::command`].
    pub fn verify(&mut self, slba: u64, blocks: u32) -> Result<()> {
        self.command(Sqe::verify(self.nsid, slba, blocks)).map(drop)
    }

    /// Writes zeroes.
    ///
    /// # Errors
    /// As [`Disk::command`].
    pub fn write_zeroes(&mut self, slba: u64, blocks: u32, deallocate: bool) -> Result<()> {
        self.command(Sqe::write_zeroes(self.nsid, slba, blocks, deallocate))
            .map(drop)
    }

    /// Marks blocks as uncorrectable.
    ///
    /// # Errors
    /// As [`Disk::command`].
    pub fn write_uncorrectable(&mut self, slba: u64, blocks: u32) -> Result<()> {
        self.command(Sqe::write_uncorrectable(self.nsid, slba, blocks))
            .map(drop)
    }

    /// Executes Flush.
    ///
    /// # Errors
    /// As [`Disk::command`].
    pub fn flush(&mut self) -> Result<()> {
        self.command(Sqe::flush(self.nsid)).map(drop)
    }

    /// Deallocates 1 to 256 ranges, each given by its first block and number of blocks.
    ///
    /// # Errors
    /// As [`Disk::command`].
    pub fn deallocate(&mut self, ranges: &[(u64, u32)]) -> Result<()> {
        let bytes: Vec<u8> = ranges.iter().flat_map(|&(s, n)| dsm_range(s, n)).collect();
        self.command_out(Sqe::deallocate(self.nsid, ranges.len() as u32), &bytes)
            .map(drop)
    }

    /// Copies ranges to consecutive blocks from `sdlba` on. A range is given by its first block and number of blocks.
    ///
    /// # Errors
    /// As [`Disk::command`].
    pub fn copy(&mut self, sdlba: u64, ranges: &[(u64, u32)]) -> Result<()> {
        let bytes: Vec<u8> = ranges.iter().flat_map(|&(s, n)| copy_range(s, n)).collect();
        self.command_out(Sqe::copy(self.nsid, sdlba, ranges.len() as u32), &bytes)
            .map(drop)
    }
}

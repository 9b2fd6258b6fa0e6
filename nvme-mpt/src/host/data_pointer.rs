//! Access to the data of a translated command. A software-defined drive resolves addresses here, as an IOMMU does for hardware.

use nvme_guest::address::PAGE_SIZE;
use nvme_guest::dma::RegionHint;
use nvme_mpt_memory::RawBytes;
use nvme_spec::dma::{SglDescriptor, SglType};
use nvme_spec::sqe::{Psdt, Sqe};
use nvme_spec::status::Status;
use zerocopy::transmute;

use crate::host::HostMemory;
use crate::host::ListMemory;

/// Location of a command's data: PRPs or an SGL of IOVAs, as built by translation.
///
/// Translation has checked the addresses. They are resolved again here, as an IOMMU does, so that a wrong translation does
/// not become an access.
#[derive(Debug)]
pub struct DataPointer {
    psdt: Psdt,
    dptr: [u64; 2],
}

impl DataPointer {
    /// Returns the location of a translated command's data.
    #[must_use]
    pub fn from_sqe(sqe: &Sqe) -> Self {
        Self::new(sqe.cdw0.psdt(), sqe.dptr)
    }

    /// Creates the location from a Data Pointer.
    #[must_use]
    pub fn new(psdt: Psdt, dptr: [u64; 2]) -> Self {
        Self { psdt, dptr }
    }

    /// Calls `part` with each contiguous piece of the first `len` bytes, in order.
    ///
    /// # Errors
    /// Data Transfer Error, or Data SGL Length Invalid.
    #[inline]
    pub fn for_each_piece<'a>(
        &self,
        memory: HostMemory<'a>,
        len: u64,
        mut part: impl FnMut(RawBytes<'a>),
    ) -> Result<(), Status> {
        let mut hint = RegionHint::default();
        self.for_each_iova(memory.lists, len, |iova, len| {
            part(resolve(memory, &mut hint, iova, len)?);
            Ok(())
        })
    }

    /// Returns the first `len` bytes if they lie in one page. Returns `None` otherwise and on errors, which
    /// [`Self::for_each_piece`] distinguishes.
    #[inline]
    #[must_use]
    pub fn single_page_bytes<'a>(&self, memory: HostMemory<'a>, len: u64) -> Option<RawBytes<'a>> {
        let [prp1, _] = self.dptr;
        if self.psdt != Psdt::PRP || prp1 % PAGE_SIZE + len > PAGE_SIZE {
            return None;
        }
        resolve(memory, &mut RegionHint::default(), prp1, len).ok()
    }

    /// Calls `part` with the IOVA and length of each contiguous piece of the first `len` bytes, in order.
    ///
    /// # Errors
    /// Data Transfer Error, Data SGL Length Invalid, and errors of `part`.
    #[inline]
    pub fn for_each_iova(
        &self,
        lists: &ListMemory,
        len: u64,
        part: impl FnMut(u64, u64) -> Result<(), Status>,
    ) -> Result<(), Status> {
        if self.psdt == Psdt::PRP {
            self.for_each_prp(lists, len, part)
        } else {
            self.for_each_sgl(lists, len, part)
        }
    }

    #[inline]
    fn for_each_prp(
        &self,
        lists: &ListMemory,
        len: u64,
        mut part: impl FnMut(u64, u64) -> Result<(), Status>,
    ) -> Result<(), Status> {
        let [prp1, prp2] = self.dptr;
        // Adjacent pages are merged, because longer copies are faster.
        let (mut start, mut run) = (prp1, (PAGE_SIZE - prp1 % PAGE_SIZE).min(len));
        let mut rest = len - run;
        let mut add = |entry: u64, size: u64| {
            if entry == start + run {
                run += size;
            } else {
                part(start, run)?;
                (start, run) = (entry, size);
            }
            Ok::<(), Status>(())
        };
        if rest > PAGE_SIZE {
            let entries = rest.div_ceil(PAGE_SIZE) as usize;
            let list = lists
                .resolve(prp2, 8 * entries)
                .and_then(|list| list.words())
                .ok_or(Status::DATA_TRANSFER_ERROR)?;
            for i in 0..entries {
                let size = rest.min(PAGE_SIZE);
                add(list.read(i), size)?;
                rest -= size;
            }
        } else if rest > 0 {
            add(prp2, rest)?;
        }
        part(start, run)
    }

    fn for_each_sgl(
        &self,
        lists: &ListMemory,
        len: u64,
        mut part: impl FnMut(u64, u64) -> Result<(), Status>,
    ) -> Result<(), Status> {
        let sgl1: SglDescriptor = transmute!(self.dptr);
        if sgl1.id.sgl_type() == SglType::DATA_BLOCK {
            return part(sgl1.address, len);
        }
        let segment = lists
            .resolve(sgl1.address, sgl1.length as usize)
            .and_then(|segment| segment.words())
            .ok_or(Status::DATA_TRANSFER_ERROR)?;
        let mut rest = len;
        for i in 0..sgl1.length as usize / SglDescriptor::SIZE {
            let words = [segment.read(2 * i), segment.read(2 * i + 1)];
            let block: SglDescriptor = transmute!(words);
            let size = u64::from(block.length).min(rest);
            part(block.address, size)?;
            rest -= size;
        }
        if rest == 0 {
            Ok(())
        } else {
            Err(Status::DATA_SGL_LENGTH_INVALID)
        }
    }
}

#[inline]
fn resolve<'a>(
    memory: HostMemory<'a>,
    hint: &mut RegionHint,
    iova: u64,
    len: u64,
) -> Result<RawBytes<'a>, Status> {
    memory
        .table
        .resolve(iova, len as usize, hint)
        // Range lists (to deallocate or copy) are in the slot's own memory.
        .or_else(|| memory.lists.resolve(iova, len as usize))
        .ok_or(Status::DATA_TRANSFER_ERROR)
}

//! Memory is taken from the host before it is pinned, in steps that can be refused.
//!
//! An IOMMU pins all pages of a region, and the kernel takes those that are not there yet meanwhile: all of them, of memory
//! that its VMM has never touched. A host that has too few ends processes, in the middle of a call that nobody can stop. So
//! the pages that are missing are counted first, and promised or refused. Then they are taken step by step, with a look at
//! what is left before each. What the IOMMU pins after that is there.
//!
//! Memory that the process before has left mapped has all its pages. If one is missing, the VMM has freed it, and the IOMMU
//! has the former page: the memory is mapped anew.
//!
//! Pages that were taken when a step is refused stay in the VMM's file: the VMM may have written there meanwhile. It gives
//! them back with the file.

use std::io;
use std::ops::Range;
use std::slice;

use super::bounds::MemoryRefusal;
use super::region::Place;
use crate::iova::IovaSpace;
use crate::memory::holes::lacks_pages;
use crate::memory::present::{Missing, PageFinder, missing_at_most};
use crate::memory_account::{MemoryAccount, PinningRecord, PinningUnderWay, Promise, Shortage};

/// Bytes that are taken between two looks at what is left.
const STEP: u64 = 256 << 20;

/// Bytes of a region whose pages are looked for at once. A look at all pages of a larger one takes longer than the host's
/// figures do.
const LOOK: u64 = 2 << 20;

/// Memory of a region that is to be pinned.
pub(super) struct Pinning<'a> {
    pub(super) space: &'a IovaSpace,
    pub(super) account: &'a MemoryAccount,
    pub(super) function: &'a str,
    pub(super) place: &'a Place,
}

impl Pinning<'_> {
    /// Takes the pages that are missing. Memory that is there costs a system call or two. What is returned is kept until the
    /// memory is pinned: `record` has it until then.
    ///
    /// # Errors
    /// [`MemoryRefusal::Unavailable`].
    pub(super) fn prepare<'r>(
        &self,
        record: Option<&'r PinningRecord>,
    ) -> Result<Option<PinningUnderWay<'r>>, MemoryRefusal> {
        // A VMM's own mapping may have page faults that the VMM resolves.
        if !self.space.has_iommu() || self.place.file.mapping().is_borrowed() {
            return Ok(None);
        }
        let all = self.place.in_file();
        let Some(most) = self.missing_at_most(&all) else {
            return Ok(None);
        };
        let finder = PageFinder::new(self.place.file.as_fd()).ok();
        let finder = finder.as_ref();
        let is_small = self.place.len <= LOOK;
        let missing = match is_small {
            true => count(finder, &all, most),
            false => most,
        };
        let promised = match self.promise(missing) {
            // The bound may be far from what is missing.
            Err(_) if !is_small => self.promise(count(finder, &all, most)),
            promised => promised,
        };
        let Some(mut promise) = promised? else {
            return Ok(None);
        };
        let under_way = record.map(|record| record.begin(missing, self.account));
        for (step, part) in self.steps() {
            let Some(most) = self.missing_at_most(&step) else {
                break;
            };
            let missing = count(finder, &step, most);
            if missing == 0 {
                continue;
            }
            let checked = promise.check(missing);
            checked.map_err(|shortage| self.refused(missing, shortage))?;
            let taken = self.space.take_pages(self.place.file.mapping(), part);
            if let Err(error) = taken {
                // The IOMMU's own error says more.
                log::debug!(
                    "Memory of function {} cannot be taken before: {error}",
                    self.function
                );
                break;
            }
            promise.note_taken(missing);
        }
        Ok(under_way)
    }

    /// Returns whether a page is missing, for certain. A look at all pages is needed only if the file has a hole somewhere.
    pub(super) fn lacks_pages(&self) -> bool {
        let all = self.place.in_file();
        self.missing_at_most(&all).is_some()
            && lacks_pages(self.place.file.file(), slice::from_ref(&all)).unwrap_or(false)
    }

    /// Promises what is missing; `None` if nothing is.
    fn promise(&self, missing: u64) -> Result<Option<Promise>, MemoryRefusal> {
        if missing == 0 {
            return Ok(None);
        }
        let promised = self.account.promise(missing).map(Some);
        promised.map_err(|shortage| self.refused(missing, shortage))
    }

    fn refused(&self, missing: u64, shortage: Shortage) -> MemoryRefusal {
        MemoryRefusal::Unavailable {
            function: self.function.to_owned(),
            asked: self.place.len,
            missing,
            shortage,
        }
    }

    /// Bound of what a range of the file lacks; `None` if all is there, or that cannot be told.
    fn missing_at_most(&self, range: &Range<u64>) -> Option<u64> {
        match missing_at_most(self.place.file.as_fd(), range) {
            Ok(Missing::AtMost(missing)) => Some(missing),
            Ok(Missing::Nothing) | Err(_) => None,
        }
    }

    /// Parts of the region: in the file, and in its mapping.
    fn steps(&self) -> impl Iterator<Item = (Range<u64>, Range<usize>)> {
        let (all, part) = (self.place.in_file(), self.place.part());
        let starts = (0..self.place.len).step_by(STEP as usize);
        starts.map(move |start| {
            let end = (start + STEP).min(all.end - all.start);
            let mapped = part.start + start as usize..part.start + end as usize;
            (all.start + start..all.start + end, mapped)
        })
    }
}

/// Returns what a range of a file lacks, `most` at most: all of that if its pages cannot be looked for.
fn count(finder: Option<&PageFinder>, range: &Range<u64>, most: u64) -> u64 {
    let found = finder.map_or(Err(io::ErrorKind::Unsupported.into()), |finder| {
        finder.missing(range, most)
    });
    found.map_or(most, |missing| missing.min(most))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::Arc;

    use super::*;
    use crate::dma::tests::region;
    use crate::dma::{DmaError, DmaWindow, MemoryLimit, MemoryRegion};
    use crate::iova::{Iommu, Outdated};
    use crate::live::LiveState;
    use crate::memory::sync::Mutex;
    use crate::memory::{Access, Cell64, Mapping};

    /// An IOMMU that looks at a function's live state at each call.
    #[derive(Debug)]
    struct Looking {
        live: Arc<LiveState>,
        seen: Mutex<Vec<Option<u64>>>,
        refuses: bool,
    }

    impl Looking {
        fn look(&self) {
            let seen = LiveState::pinning_in(self.live.fd()).unwrap();
            self.seen.lock().unwrap().push(seen.interrupted());
        }
    }

    impl Iommu for Looking {
        fn map(&self, _: u64, _: &Mapping, _: Range<usize>, _: Access) -> io::Result<()> {
            self.look();
            match self.refuses {
                true => Err(io::ErrorKind::OutOfMemory.into()),
                false => Ok(()),
            }
        }

        fn take_pages(&self, _: &Mapping, _: Range<usize>) -> io::Result<()> {
            self.look();
            Ok(())
        }

        fn unmap(&self, _: u64, _: u64) -> io::Result<()> {
            Ok(())
        }

        fn mappings_max(&self) -> Option<u64> {
            None
        }
    }

    #[test]
    fn memory_that_the_process_before_left_mapped_is_neither_bounded_nor_taken_again() {
        const LEN: u64 = 4 << 20;
        let live = Arc::new(LiveState::new(1).unwrap());
        let iommu = Arc::new(Looking {
            live: live.clone(),
            seen: Mutex::default(),
            refuses: false,
        });
        let usable = [0..=(1 << 39) - 1];
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("proc")).unwrap();
        let meminfo = "MemTotal: 1048576 kB\nMemAvailable: 0 kB\n";
        std::fs::write(folder.path().join("proc/meminfo"), meminfo).unwrap();
        let before = IovaSpace::behind_iommu(iommu.clone(), &usable);
        let before = Arc::new(before);
        let window = DmaWindow::new(before.clone());
        let file = region(0, LEN).fd;
        let of_file = |gpa| MemoryRegion {
            fd: file.try_clone().unwrap(),
            ..region(gpa, LEN)
        };
        window.map(of_file(0)).unwrap();
        // As an IOMMU does that pins it.
        let pinned = Mapping::shared(file.as_fd(), 0, LEN as usize, Access::ReadWrite).unwrap();
        pinned.populate().unwrap();
        let word = Cell64::new(&live_words(), 0).unwrap();
        let left = before.mappings(Outdated::new(word));
        crate::kept::keep_for_good(window);
        let calls = iommu.seen.lock().unwrap().len();

        let next = IovaSpace::behind_iommu(iommu.clone(), &usable);
        let next = Arc::new(next.inheriting(left).unwrap());
        let window = DmaWindow::new(next)
            .with_account(MemoryAccount::below(folder.path()))
            .of_function("a", Some(MemoryLimit::Chosen(LEN / 2)));
        window.map(of_file(0)).unwrap();
        assert_eq!(iommu.seen.lock().unwrap().len(), calls);
        let error = window.map(of_file(1 << 30)).unwrap_err();
        let DmaError::Iommu { source, .. } = error else {
            panic!("{error}");
        };
        assert!(matches!(
            source.downcast(),
            Ok(MemoryRefusal::Limit { mapped: LEN, .. })
        ));
    }

    /// Words that nobody else has.
    fn live_words() -> Arc<Mapping> {
        Arc::new(Mapping::anonymous(4096).unwrap())
    }

    #[test]
    fn missing_memory_is_recorded_until_it_is_pinned() {
        const LEN: u64 = 4 << 20;
        for refuses in [false, true] {
            let live = Arc::new(LiveState::new(1).unwrap());
            let iommu = Arc::new(Looking {
                live: live.clone(),
                seen: Mutex::default(),
                refuses,
            });
            let usable = [0..=(1 << 39) - 1];
            let space = Arc::new(IovaSpace::behind_iommu(iommu.clone(), &usable));
            let window = DmaWindow::new(space).recording(live.pinning());
            let missing = region(0, LEN);
            let there = region(1 << 30, LEN);
            crate::memory::allocate(there.fd.as_fd(), LEN).unwrap();
            for region in [missing, there] {
                let mapped = window.map(region);
                assert!(match refuses {
                    false => mapped.is_ok(),
                    true => matches!(mapped, Err(DmaError::Iommu { .. })),
                });
                assert_eq!(live.pinning().unwrap().interrupted(), None);
            }
            let seen = iommu.seen.lock().unwrap().clone();
            assert_eq!(seen, [Some(LEN), Some(LEN), None]);
        }
    }
}

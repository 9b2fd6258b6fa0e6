//! Allocation of memory before it is pinned, in steps that can be refused.
//!
//! An IOMMU pins all pages of a region, and the kernel allocates missing pages on the way: the whole region, if the VMM has
//! never touched it. If the host runs out of memory, the kernel kills processes in the middle of that call, which cannot be
//! interrupted. So missing pages are first counted, and the memory account either reserves memory for them or refuses. Then the
//! pages are allocated in steps, with a check of the free memory before each step. The VMM may still free pages before the
//! IOMMU pins them, so they are counted again before each piece to pin. If the VMM frees pages between that count and the
//! pinning, the kernel allocates at most one piece without a reservation. A count may also be too low: pages beyond the end of
//! the file can compensate for missing ones, and pages in swap count as present. If one of these cases leads to an OOM kill,
//! the pinning record names the function: it lists each region of more than a few MiB until the region is pinned.
//!
//! Memory that the predecessor left mapped has all its pages. If a page is missing, the VMM has freed it, and the IOMMU has the
//! old page; the memory is then mapped again.
//!
//! If a step is refused, pages allocated so far stay in the VMM's file, because the VMM may have written to them. The VMM frees
//! them with the file.

use std::cell::OnceCell;
use std::io;
use std::mem;
use std::ops::Range;

use nvme_mpt_memory::holes::{MissingBytes, PageFinder, max_missing_bytes, may_lack_pages};

use super::memory_limit::MemoryRefusal;
use super::region::GuestMemoryPart;
use crate::iova::IovaSpace;
use crate::memory_account::{
    MemoryAccount, MemoryPromise, MemoryShortage, OngoingPinning, PinningRecord, RESERVE_USE_MAX,
};

/// Bytes of missing pages to allocate between two checks of the free memory.
const ALLOCATION_STEP: u64 = 256 << 20;

/// Largest region, in bytes, whose missing pages are always counted exactly. For a larger region, a count takes longer than the
/// host's memory statistics stay valid.
const EXACT_COUNT_MAX: u64 = 2 << 20;

/// Maximum bytes of a piece of a region that is pinned by one call. Missing pages are counted before each piece.
const PIN_CHUNK: u64 = 1 << 30;

/// Region that is about to be pinned, and the account and function for which its missing pages are allocated.
#[derive(Debug)]
pub(super) struct RegionPinning<'a> {
    pub(super) space: &'a IovaSpace,
    pub(super) account: &'a MemoryAccount,
    pub(super) function: &'a str,
    pub(super) place: &'a GuestMemoryPart,
}

/// Memory reservation and pinning record of a region that is being pinned. Dropping this value ends both.
#[derive(Debug)]
pub(super) struct PreparedPinning<'a> {
    pinning: &'a RegionPinning<'a>,
    record: Option<&'a PinningRecord>,
    finder: OnceCell<Option<PageFinder>>,
    promise: MemoryPromise,
    ongoing: Option<OngoingPinning<'a>>,
    /// Missing bytes of the piece that is being pinned.
    pending_bytes: u64,
}

impl<'a> RegionPinning<'a> {
    /// Allocates missing pages. If no page is missing, this takes a system call or two. The caller must keep the result
    /// until the memory is pinned, because the result has the memory reservation and the pinning record.
    ///
    /// # Errors
    /// [`MemoryRefusal::Unavailable`].
    pub(super) fn prepare(
        &'a self,
        record: Option<&'a PinningRecord>,
    ) -> Result<Option<PreparedPinning<'a>>, MemoryRefusal> {
        // A VMM may resolve page faults in its own mapping, so missing pages there are not allocated.
        if !self.space.has_iommu() || self.place.file.mapping().is_borrowed() {
            return Ok(None);
        }
        let mut prepared = PreparedPinning {
            pinning: self,
            record,
            finder: OnceCell::new(),
            promise: self.account.promise(self.function),
            ongoing: None,
            pending_bytes: 0,
        };
        let missing = prepared.promise_missing()?;
        let may_be_taken = match self.place.len {
            0..=RESERVE_USE_MAX => missing,
            len => missing.max(len.min(PIN_CHUNK)),
        };
        prepared.begin_pinning(may_be_taken);
        if missing > 0 {
            prepared.allocate_pages()?;
        }
        Ok(Some(prepared))
    }

    /// Returns whether a page of the region may be missing. If the file has no hole, no single page is checked.
    pub(super) fn lacks_pages(&self) -> bool {
        let file = self.place.file.file();
        file.is_none_or(|file| may_lack_pages(file, &self.place.file_range()).unwrap_or(true))
    }

    fn refusal(&self, missing: u64, shortage: MemoryShortage) -> MemoryRefusal {
        MemoryRefusal::Unavailable {
            function: self.function.to_owned(),
            requested: self.place.len,
            missing,
            shortage,
        }
    }

    /// Returns an upper bound of the missing bytes of a file range; `None` if none is missing or the number is unknown.
    fn missing_at_most(&self, range: &Range<u64>) -> Option<u64> {
        match max_missing_bytes(self.place.file.as_fd()?, range) {
            Ok(MissingBytes::AtMost(missing)) => Some(missing),
            Ok(MissingBytes::Nothing) | Err(_) => None,
        }
    }

    /// Returns the region in steps of [`ALLOCATION_STEP`], each as a range in the file and in its mapping.
    fn steps(&self) -> impl Iterator<Item = (Range<u64>, Range<usize>)> {
        let (all, part) = (self.place.file_range(), self.place.mapping_range());
        let starts = (0..self.place.len).step_by(ALLOCATION_STEP as usize);
        starts.map(move |start| {
            let end = (start + ALLOCATION_STEP).min(all.end - all.start);
            let mapped = part.start + start as usize..part.start + end as usize;
            (all.start + start..all.start + end, mapped)
        })
    }
}

impl PreparedPinning<'_> {
    /// Reserves memory of the account for the region's missing pages. Returns the number of missing bytes.
    fn promise_missing(&mut self) -> Result<u64, MemoryRefusal> {
        let all = self.pinning.place.file_range();
        let Some(most) = self.pinning.missing_at_most(&all) else {
            return Ok(0);
        };
        let is_small = self.pinning.place.len <= EXACT_COUNT_MAX;
        let mut missing = match is_small {
            true => self.count_missing(&all, most),
            false => most,
        };
        let mut promised = self.promise.extend_to(missing);
        // The upper bound was refused, but may be far above the number of missing bytes. So the bytes are counted.
        if promised.is_err() && !is_small {
            missing = self.count_missing(&all, most);
            promised = self.promise.extend_to(missing);
        }
        promised.map_err(|shortage| self.pinning.refusal(missing, shortage))?;
        Ok(missing)
    }

    /// Notes in the pinning record that `bytes` bytes are being pinned.
    fn begin_pinning(&mut self, bytes: u64) {
        if bytes > 0 && self.ongoing.is_none() {
            let account = self.pinning.account;
            self.ongoing = self.record.map(|record| record.begin(bytes, account));
        }
    }

    /// Allocates the region's missing pages step by step, after a check of the free memory for each step.
    fn allocate_pages(&mut self) -> Result<(), MemoryRefusal> {
        let RegionPinning { space, place, .. } = self.pinning;
        for (step, part) in self.pinning.steps() {
            let Some(most) = self.pinning.missing_at_most(&step) else {
                break;
            };
            let missing = self.count_missing(&step, most);
            if missing == 0 {
                continue;
            }
            let covered = self.promise.extend_to(missing);
            covered.map_err(|shortage| self.pinning.refusal(missing, shortage))?;
            if let Err(error) = space.allocate_pages(place.file.mapping(), part) {
                // The IOMMU allocates the missing pages when it pins them; if it cannot, its error says more. The reservation
                // lasts until all pages are pinned.
                let function = self.pinning.function;
                log::debug!("Cannot allocate memory of function {function} in advance: {error}");
                break;
            }
            self.promise.note_taken(missing);
        }
        Ok(())
    }

    /// Counts the missing bytes of a part of the mapping just before it is pinned, because the VMM may have freed pages.
    ///
    /// # Errors
    /// [`MemoryRefusal::Unavailable`], wrapped in the IOMMU's error type.
    pub(super) fn recheck_part(&mut self, part: Range<usize>) -> io::Result<()> {
        self.promise.note_taken(mem::take(&mut self.pending_bytes));
        let place = self.pinning.place;
        let start = place.file_range().start + (part.start - place.mapping_range().start) as u64;
        let range = start..start + part.len() as u64;
        let Some(most) = self.pinning.missing_at_most(&range) else {
            return Ok(());
        };
        let missing = self.count_missing(&range, most);
        self.promise.extend_to(missing).map_err(|shortage| {
            let refusal = self.pinning.refusal(missing, shortage);
            io::Error::new(io::ErrorKind::OutOfMemory, refusal)
        })?;
        self.begin_pinning(missing);
        self.pending_bytes = missing;
        Ok(())
    }

    /// Ends the reservation and the record, after all pages are pinned.
    pub(super) fn end(mut self) {
        self.promise.note_taken(self.pending_bytes);
    }

    /// Returns the missing bytes of a file range, at most `most`; returns `most` if its pages cannot be counted.
    fn count_missing(&self, range: &Range<u64>, most: u64) -> u64 {
        let open = || PageFinder::new(self.pinning.place.file.as_fd()?).ok();
        let finder = self.finder.get_or_init(open).as_ref();
        let found = finder.and_then(|finder| finder.missing_bytes(range, most).ok());
        found.map_or(most, |missing| missing.min(most))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::Arc;

    use nvme_mpt_memory::sync::Mutex;
    use nvme_mpt_memory::{MappedWord64, Mapping, MappingAccess};

    use super::*;
    use crate::dma::tests::region;
    use crate::dma::{DmaError, DmaWindow, MemoryLimit, MemoryRegion};
    use crate::inflight::InflightFile;
    use crate::iova::{Iommu, StaleMappingsFlag};

    /// An IOMMU that reads a function's in-flight tracking file at each call.
    #[derive(Debug)]
    struct InflightReadingIommu {
        inflight: Arc<InflightFile>,
        seen: Mutex<Vec<Option<u64>>>,
        refuses: bool,
    }

    impl InflightReadingIommu {
        fn look(&self) {
            let seen = InflightFile::read_pinning(self.inflight.fd()).unwrap();
            self.seen.lock().unwrap().push(seen.interrupted_bytes());
        }
    }

    impl Iommu for InflightReadingIommu {
        fn map(&self, _: u64, _: &Mapping, _: Range<usize>, _: MappingAccess) -> io::Result<()> {
            self.look();
            match self.refuses {
                true => Err(io::ErrorKind::OutOfMemory.into()),
                false => Ok(()),
            }
        }

        fn allocate_pages(&self, _: &Mapping, _: Range<usize>) -> io::Result<()> {
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
        let inflight = Arc::new(InflightFile::new(1).unwrap());
        let iommu = Arc::new(InflightReadingIommu {
            inflight: inflight.clone(),
            seen: Mutex::default(),
            refuses: false,
        });
        let usable = [0..=(1 << 39) - 1];
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("proc")).unwrap();
        let meminfo = "MemTotal: 1048576 kB\nMemAvailable: 0 kB\n";
        std::fs::write(dir.path().join("proc/meminfo"), meminfo).unwrap();
        let before = IovaSpace::with_iommu(iommu.clone(), &usable);
        let before = Arc::new(before);
        let window = DmaWindow::new(before.clone()).with_function("a", None);
        let file = region(0, LEN).fd;
        let of_file = |gpa| MemoryRegion {
            fd: file.try_clone().unwrap(),
            ..region(gpa, LEN)
        };
        window.map(of_file(0)).unwrap();
        // Pin the pages, as an IOMMU does.
        let pinned =
            Mapping::shared(file.as_fd(), 0, LEN as usize, MappingAccess::ReadWrite).unwrap();
        pinned.populate().unwrap();
        let word = MappedWord64::new(&live_words(), 0).unwrap();
        let left = before.list_mappings(StaleMappingsFlag::new(word));
        crate::leaked::leak(window);
        let calls = iommu.seen.lock().unwrap().len();

        // A VMM may claim that the predecessor had mapped its memory. The claim is believed only if it is true.
        for map in [DmaWindow::map_persisted, DmaWindow::map_claimed] {
            let next = IovaSpace::with_iommu(iommu.clone(), &usable);
            let next = Arc::new(next.with_inherited(left.clone()).unwrap());
            let window = DmaWindow::new(next)
                .with_account(MemoryAccount::with_root(dir.path()))
                .with_function("a", Some(MemoryLimit::Configured(LEN / 2)));
            map(&window, of_file(0)).unwrap();
            assert_eq!(iommu.seen.lock().unwrap().len(), calls);
            let error = window.map_claimed(of_file(1 << 30)).unwrap_err();
            let DmaError::Iommu { source, .. } = error else {
                panic!("{error}");
            };
            assert!(matches!(
                source.downcast(),
                Ok(MemoryRefusal::Limit { mapped: LEN, .. })
            ));
            crate::leaked::leak(window);
        }
    }

    /// After a process ends, its VM frees memory and allocates it again. The next process ends soon, too.
    #[test]
    fn remapped_memory_does_not_reuse_inherited_addresses() {
        let inflight = Arc::new(InflightFile::new(1).unwrap());
        let iommu = Arc::new(InflightReadingIommu {
            inflight,
            seen: Mutex::default(),
            refuses: false,
        });
        let file = region(0, 4096).fd;
        let of_file = |gpa| MemoryRegion {
            fd: file.try_clone().unwrap(),
            ..region(gpa, 4096)
        };
        let pinned = Mapping::shared(file.as_fd(), 0, 4096, MappingAccess::ReadWrite).unwrap();
        pinned.populate().unwrap();
        let usable = [0..=(1 << 39) - 1];
        let process = |left: Vec<_>, map: fn(&DmaWindow, MemoryRegion) -> Result<(), DmaError>| {
            let space = IovaSpace::with_iommu(iommu.clone(), &usable);
            let space = Arc::new(space.with_inherited(left).unwrap());
            let window = DmaWindow::new(space.clone()).with_function("a", None);
            map(&window, of_file(0)).unwrap();
            let word = MappedWord64::new(&live_words(), 0).unwrap();
            let left = space.list_mappings(StaleMappingsFlag::new(word));
            crate::leaked::leak(window);
            left
        };
        let first = process(Vec::new(), DmaWindow::map);
        let second = process(first.clone(), DmaWindow::map);
        assert_ne!(first, second);
        assert_eq!(second.len(), 1, "only the new one is there: {second:?}");
        let third = process(second.clone(), DmaWindow::map_claimed);
        assert_eq!(second, third);
    }

    #[test]
    fn claimed_memory_counts_towards_the_limit() {
        const LEN: u64 = 1 << 20;
        let inflight = Arc::new(InflightFile::new(1).unwrap());
        let iommu = Arc::new(InflightReadingIommu {
            inflight,
            seen: Mutex::default(),
            refuses: false,
        });
        let usable = [0..=(1 << 39) - 1];
        let limit = Some(MemoryLimit::Configured(LEN));
        let space = Arc::new(IovaSpace::with_iommu(iommu.clone(), &usable));
        let window = DmaWindow::new(space.clone()).with_function("a", limit);
        let file = region(0, LEN).fd;
        let of_file = |gpa| MemoryRegion {
            fd: file.try_clone().unwrap(),
            ..region(gpa, LEN)
        };
        window.map(of_file(0)).unwrap();
        let pinned =
            Mapping::shared(file.as_fd(), 0, LEN as usize, MappingAccess::ReadWrite).unwrap();
        pinned.populate().unwrap();
        let word = MappedWord64::new(&live_words(), 0).unwrap();
        let left = space.list_mappings(StaleMappingsFlag::new(word));
        crate::leaked::leak(window);

        let space = IovaSpace::with_iommu(iommu, &usable);
        let space = Arc::new(space.with_inherited(left).unwrap());
        let window = DmaWindow::new(space).with_function("a", limit);
        window.map(region(1 << 30, LEN)).unwrap();
        let error = window.map_claimed(of_file(0)).unwrap_err();
        let DmaError::Iommu { source, .. } = error else {
            panic!("{error}");
        };
        assert!(matches!(
            source.downcast(),
            Ok(MemoryRefusal::Limit { mapped: LEN, .. })
        ));
    }

    /// Returns memory for the words of a tracking file.
    fn live_words() -> Arc<Mapping> {
        Arc::new(Mapping::anonymous(4096).unwrap())
    }

    #[test]
    fn missing_memory_is_recorded_until_it_is_pinned() {
        const LEN: u64 = 4 << 20;
        const LARGE: u64 = 48 << 20;
        for refuses in [false, true] {
            let inflight = Arc::new(InflightFile::new(1).unwrap());
            let iommu = Arc::new(InflightReadingIommu {
                inflight: inflight.clone(),
                seen: Mutex::default(),
                refuses,
            });
            let usable = [0..=(1 << 39) - 1];
            let space = Arc::new(IovaSpace::with_iommu(iommu.clone(), &usable));
            let window = DmaWindow::new(space).with_pinning_record(inflight.pinning());
            let missing = region(0, LEN);
            let mapped_region = region(1 << 30, LEN);
            nvme_mpt_memory::allocate(mapped_region.fd.as_fd(), LEN).unwrap();
            // The VMM could free pages before they are pinned.
            let large = region(2 << 30, LARGE);
            nvme_mpt_memory::allocate(large.fd.as_fd(), LARGE).unwrap();
            for region in [missing, mapped_region, large] {
                let mapped = window.map(region);
                assert!(match refuses {
                    false => mapped.is_ok(),
                    true => matches!(mapped, Err(DmaError::Iommu { .. })),
                });
                assert_eq!(inflight.pinning().unwrap().interrupted_bytes(), None);
            }
            let seen = iommu.seen.lock().unwrap().clone();
            assert_eq!(seen, [Some(LEN), Some(LEN), None, Some(LARGE)]);
        }
    }
}

//! Detection of pages that were freed while they were pinned for a drive.
//!
//! Memory of a physical drive's VMs is pinned page by page. The VMM may free a page of its file because of the guest's
//! balloon, free page reporting, or memory that is unplugged before it is unmapped. Then the file gets another page at the
//! next access, but the drive still uses the old one. Data that the drive writes never reach the guest, the drive reads stale
//! data, and the commands complete with success.
//!
//! A VMM must not free such pages, as with any passed-through device. The drive monitor checks a few times a second whether a
//! file has fewer pages than before. If so, it lets another thread check the mapped ranges, because the kernel takes long for
//! large ranges. A missing page in a mapped range is proof: pinning allocates all pages, and memory counts as mapped only once
//! it is pinned. Then all queues of the function fail (`CSTS.CFS`) until the VMM maps the memory again.
//!
//! Three cases are not detected. In the first, a page is freed and allocated again between two checks. In the second, a huge
//! page is freed in a file that also has unmapped huge pages; the kernel reports only their number. In the third, the memory
//! has no file.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Weak};

use log::error;
use nvme_lease::range::ByteSize;
use nvme_mpt_memory::holes::lacks_pages;
use nvme_mpt_memory::sync::{Mutex, try_lock};

use super::region::GuestFile;
use super::{WindowRegions, lock};
use crate::iova::PinnedMemory;

/// File with guest memory, parts of which are mapped and pinned.
struct PinnedFile {
    file: Arc<GuestFile>,
    /// Mapped parts of the file, as byte ranges that do not overlap.
    ranges: Vec<Range<u64>>,
}

impl PinnedMemory for Mutex<WindowRegions> {
    fn has_shrunk(&self) -> bool {
        // A thread that pins memory holds the lock for long, and the next check follows soon. So this check is skipped.
        let Some(changes) = try_lock(self) else {
            return false;
        };
        let files = changes.files.iter().filter_map(Weak::upgrade);
        // All files are checked, even after one that has shrunk, because each check updates the file's count of allocated
        // bytes.
        let shrunk = files.filter(|file| !file.mapping().is_lost() && file.has_shrunk());
        let shrunk: Vec<_> = shrunk.collect();
        shrunk.iter().for_each(|file| file.force_recheck());
        !shrunk.is_empty()
    }

    fn check_freed_pages(&self) {
        // A VM whose memory is being pinned is checked later, so that other VMs need not wait.
        let Some(files) = pinned_files(self) else {
            return;
        };
        for PinnedFile { file, ranges } in files {
            // The file's size is checked before its pages. So the next check finds pages that are freed from now on.
            let shrunk = file.has_shrunk();
            if shrunk && has_missing_pages(&file, &ranges) {
                recheck_file(self, &file);
            }
        }
    }

    fn end_inheritance(&self) {
        let changes = lock(self);
        let regions = changes.regions.values();
        regions.for_each(|region| region.extent.end_inheritance());
    }
}

/// Returns the window's files, each with its mapped ranges; `None` while the memory map is being changed.
fn pinned_files(changes: &Mutex<WindowRegions>) -> Option<Vec<PinnedFile>> {
    let changes = try_lock(changes)?;
    let files = changes.files.iter().filter_map(Weak::upgrade);
    let with_ranges = files.map(|file| {
        let ranges = changes.file_ranges(&file);
        PinnedFile { file, ranges }
    });
    Some(with_ranges.collect())
}

/// Returns whether pages in these ranges of a file are missing. Pages of memory without a file are not checked.
fn has_missing_pages(file: &GuestFile, ranges: &[Range<u64>]) -> bool {
    let lacks = file.file().map(|file| lacks_pages(file, ranges));
    matches!(lacks, Some(Ok(true)))
}

/// Checks a file with missing pages again, under the lock of the regions. In the first check, the pages may have been unmapped
/// before they were freed.
fn recheck_file(changes: &Mutex<WindowRegions>, file: &Arc<GuestFile>) {
    // The lock prevents unmapping during the check.
    let Some(changes) = try_lock(changes) else {
        file.force_recheck();
        return;
    };
    let ranges = changes.file_ranges(file);
    if has_missing_pages(file, &ranges) {
        let bytes: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        error!(
            "The VMM freed guest memory that is mapped for a drive, of {} in one file: what the drive transfers there is \
             lost. All queues of the function stop. A VM on a physical drive must have no balloon and no free page \
             reporting, and unmap memory before it unplugs it",
            ByteSize(bytes)
        );
        file.mapping().mark_lost();
    }
}

impl WindowRegions {
    fn file_ranges(&self, file: &Arc<GuestFile>) -> Vec<Range<u64>> {
        let regions = self.regions.values();
        let of_file = regions.filter(|region| Arc::ptr_eq(&region.place.file, file));
        merge_ranges(of_file.map(|region| region.place.file_range()))
    }
}

/// Merges overlapping and adjacent ranges.
fn merge_ranges(ranges: impl Iterator<Item = Range<u64>>) -> Vec<Range<u64>> {
    let by_start: BTreeMap<u64, u64> = ranges.fold(BTreeMap::new(), |mut all, range| {
        let end = all.entry(range.start).or_default();
        *end = range.end.max(*end);
        all
    });
    let mut merged: Vec<Range<u64>> = Vec::new();
    for (start, end) in by_start {
        match merged.last_mut() {
            Some(last) if start <= last.end => last.end = last.end.max(end),
            _ => merged.push(start..end),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use nvme_mpt_memory::{Mapping, MappingAccess};

    use super::*;
    use crate::address::Gpa;
    use crate::dma::tests::{memfd, part, window};

    const PAGE: u64 = 4096;

    fn is_pin_due(memory: &Mutex<WindowRegions>) -> bool {
        let shrunk = memory.has_shrunk();
        if shrunk {
            memory.check_freed_pages();
        }
        shrunk
    }

    #[test]
    fn a_page_that_is_freed_while_it_is_mapped_is_found_and_others_are_not() {
        let window = window();
        let file = memfd(16 * PAGE);
        let vmm = Mapping::shared(
            file.as_fd(),
            0,
            16 * PAGE as usize,
            MappingAccess::ReadWrite,
        )
        .unwrap();
        vmm.populate().unwrap();
        let free = |page: u64| {
            let page = (page * PAGE) as usize;
            vmm.discard_file(page, PAGE as usize).unwrap();
        };
        // Two regions on the same page of the file, and one behind a hole.
        for (gpa, page) in [(0, 0), (0x10_0000, 0), (0x20_0000, 8)] {
            window.map(part(&file, gpa, page * PAGE, 4 * PAGE)).unwrap();
        }
        let memory = &window.tables().regions;
        free(6);
        assert!(is_pin_due(memory), "the file has shrunk");
        assert!(!window.table().is_lost(), "by a page that is not mapped");
        assert!(!is_pin_due(memory));
        assert_eq!(window.unmap(Gpa(0x20_0000), 4 * PAGE).unwrap(), 4 * PAGE);
        free(8);
        assert!(is_pin_due(memory));
        assert!(!window.table().is_lost(), "it was unmapped first");
        free(2);
        assert!(is_pin_due(memory));
        assert!(window.table().is_lost());
        assert!(!is_pin_due(memory), "once is enough");
        // After the memory is mapped again, nothing is missing.
        assert_eq!(window.unmap_all().unwrap(), 8 * PAGE);
        vmm.populate().unwrap();
        window.map(part(&file, 0, 0, 4 * PAGE)).unwrap();
        assert!(!window.table().is_lost());
    }

    #[test]
    fn memory_that_is_cut_off_is_missing() {
        let window = window();
        let file = memfd(16 * PAGE);
        let vmm = Mapping::shared(
            file.as_fd(),
            0,
            16 * PAGE as usize,
            MappingAccess::ReadWrite,
        )
        .unwrap();
        vmm.populate().unwrap();
        window.map(part(&file, 0, 0, 16 * PAGE)).unwrap();
        File::from(file).set_len(8 * PAGE).unwrap();
        assert!(is_pin_due(&window.tables().regions));
        assert!(window.table().is_lost());
    }

    #[test]
    fn ranges_are_merged() {
        let ranges = [8..12, 0..4, 2..3, 4..6, 0..1, 12..13, 20..21];
        assert_eq!(merge_ranges(ranges.into_iter()), [0..6, 8..13, 20..21]);
    }
}

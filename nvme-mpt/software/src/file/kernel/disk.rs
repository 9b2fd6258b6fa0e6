//! A simulated file on a simulated disk. The file's content exists in three versions: in the page cache, which processes see;
//! in the device, with its volatile cache; and on the stable media.
//!
//! A write through the page cache is visible immediately. It is written back some time afterwards, or by a sync. A failed
//! write-back leaves the page unchanged and marks it as clean, so the next crash loses the page. Each open file description
//! receives the error once, as in `lib/errseq.c` of Linux. The device has a volatile cache, whose content a sync makes stable.
//! After a crash, any subset of the writes in this cache and of the dirty pages is on the stable media.

use std::collections::BTreeMap;

use nvme_mpt_memory::simulation::random;

/// Number of bytes that are written atomically: after a crash, either all or none of them are new.
pub(super) const SECTOR: usize = 512;

/// Size in bytes of a page of the page cache, and of a block of the file system.
pub(super) const PAGE: usize = 4096;

/// Parameters of the simulated disk. A rate of N lets an event happen once in N times on average; 0 stands for never.
#[derive(Clone, Copy, Debug, Default)]
pub struct DiskModelParameters {
    /// True for direct I/O, false for the page cache.
    pub is_direct: bool,
    /// True if the file system can punch holes.
    pub punches_holes: bool,
    /// Rate at which the write-back of a page fails.
    pub failed_write_backs: u64,
    /// Rate at which the flush of the device's cache fails in a sync.
    pub failed_flushes: u64,
    /// Rate at which requests are interrupted, or fail for lack of resources.
    pub interruptions: u64,
    /// Rate at which transfers are short.
    pub short_transfers: u64,
    /// Rate at which the file system refuses to zero or deallocate a slice.
    pub refused_slices: u64,
    /// Rate at which a submission call fails to submit any request.
    pub refused_calls: u64,
    /// Rate at which a request stays pending for many seconds, or until it is cancelled.
    pub held_requests: u64,
    /// Maximum duration of a request in nanoseconds, as a base-2 logarithm.
    pub time_bits: u64,
}

/// Returns `true` once in `one_in` calls on average.
pub(super) fn happens(one_in: u64) -> bool {
    one_in > 0 && random().is_multiple_of(one_in)
}

/// A page of the file in the page cache.
#[derive(Clone, Debug)]
struct CachedPage {
    bytes: Vec<u8>,
    is_dirty: bool,
}

/// An open file description of the simulated file.
#[derive(Clone, Copy, Debug)]
struct OpenFileDescription {
    process: u64,
    /// Number of the last write-back error that this description has received.
    reported_error: u64,
    /// Number of rings and of requests that keep the description open.
    holders: u64,
    is_closed: bool,
}

/// A lock that a description has on bytes of the file.
#[derive(Clone, Copy, Debug)]
struct SimulatedByteRangeLock {
    open: u64,
    is_exclusive: bool,
    start: u64,
    end: u64,
}

#[derive(Debug, Default)]
pub(super) struct SimulatedDisk {
    pub(super) parameters: DiskModelParameters,
    /// Maximum number of further requests that the disk may hold for many seconds.
    pub(super) held_requests_max: u64,
    stable: Vec<u8>,
    /// Content of the device, with the writes in its volatile cache.
    device: Vec<u8>,
    /// Writes in the device's volatile cache, which a crash may lose: offset and bytes.
    volatile: Vec<(usize, Vec<u8>)>,
    cache: BTreeMap<usize, CachedPage>,
    /// Number of the latest write-back error; 0 before the first one.
    error: u64,
    /// True if a description has received the latest write-back error.
    is_error_seen: bool,
    /// Number of write-backs and flushes that have failed.
    pub(super) failures: u64,
    /// Number of times that a description has received an error.
    pub(super) reported_errors: u64,
    descriptions: BTreeMap<u64, OpenFileDescription>,
    locks: Vec<SimulatedByteRangeLock>,
    opened: u64,
}

impl SimulatedDisk {
    /// Creates a disk with a file of zeroes.
    pub(super) fn new(
        bytes: usize,
        parameters: DiskModelParameters,
        held_requests_max: u64,
    ) -> Self {
        Self {
            parameters,
            held_requests_max,
            stable: vec![0; bytes],
            device: vec![0; bytes],
            ..Self::default()
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.device.len() as u64
    }

    pub(super) fn stable(&self, offset: usize, len: usize) -> Vec<u8> {
        self.stable[offset..offset + len].to_vec()
    }

    /// Opens the file for a process. Returns the number of the new description.
    pub(super) fn open(&mut self, process: u64) -> u64 {
        self.opened += 1;
        // If no description has received the latest error, a new description still receives it.
        let reported = match self.is_error_seen {
            true => self.error,
            false => 0,
        };
        let description = OpenFileDescription {
            process,
            reported_error: reported,
            holders: 0,
            is_closed: false,
        };
        self.descriptions.insert(self.opened, description);
        self.opened
    }

    /// Keeps a description open, for a ring or for a request.
    pub(super) fn hold(&mut self, open: u64) {
        if let Some(description) = self.descriptions.get_mut(&open) {
            description.holders += 1;
        }
    }

    /// Ends [`Self::hold`], and closes the description if nothing else keeps it open.
    pub(super) fn release(&mut self, open: u64) {
        if let Some(description) = self.descriptions.get_mut(&open) {
            description.holders -= 1;
            if description.is_closed {
                self.close(open);
            }
        }
    }

    pub(super) fn close(&mut self, open: u64) {
        let Some(description) = self.descriptions.get_mut(&open) else {
            return;
        };
        description.is_closed = true;
        if description.holders == 0 {
            self.descriptions.remove(&open);
            self.locks.retain(|lock| lock.open != open);
        }
    }

    pub(super) fn end_process(&mut self, process: u64) {
        let all = self.descriptions.iter();
        let its = all.filter(|(_, description)| description.process == process);
        let its: Vec<u64> = its.map(|(open, _)| *open).collect();
        its.into_iter().for_each(|open| self.close(open));
    }

    /// Returns whether another description has a conflicting lock.
    pub(super) fn is_locked(&self, open: u64, is_exclusive: bool, start: u64, end: u64) -> bool {
        self.locks.iter().any(|lock| {
            lock.open != open
                && (lock.is_exclusive || is_exclusive)
                && lock.start < end
                && start < lock.end
        })
    }

    /// Takes a lock if no other description has a conflicting one. Returns whether the lock was taken.
    pub(super) fn lock(&mut self, open: u64, is_exclusive: bool, start: u64, end: u64) -> bool {
        let is_free = !self.is_locked(open, is_exclusive, start, end);
        if is_free {
            self.locks.push(SimulatedByteRangeLock {
                open,
                is_exclusive,
                start,
                end,
            });
        }
        is_free
    }

    pub(super) fn unlock(&mut self, open: u64, start: u64, end: u64) {
        self.locks
            .retain(|lock| lock.open != open || lock.start >= end || start >= lock.end);
    }

    pub(super) fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = self.device[offset..offset + len].to_vec();
        for (at, part) in pages(offset, len) {
            if let Some(page) = self.cache.get(&(at / PAGE)) {
                let from = at % PAGE;
                bytes[at - offset..at - offset + part]
                    .copy_from_slice(&page.bytes[from..from + part]);
            }
        }
        bytes
    }

    pub(super) fn write(&mut self, offset: usize, bytes: &[u8]) {
        if self.parameters.is_direct {
            return self.write_device(offset, bytes);
        }
        for (at, part) in pages(offset, bytes.len()) {
            let number = at / PAGE;
            let start = number * PAGE;
            let end = (start + PAGE).min(self.device.len());
            let stored = &self.device[start..end];
            let page = self.cache.entry(number).or_insert_with(|| CachedPage {
                bytes: stored.to_vec(),
                is_dirty: false,
            });
            let from = at - start;
            page.bytes[from..from + part].copy_from_slice(&bytes[at - offset..at - offset + part]);
            page.is_dirty = true;
        }
    }

    /// Zeroes a range, as the file system does.
    pub(super) fn zero(&mut self, offset: usize, len: usize) {
        for (at, part) in pages(offset, len) {
            let is_whole = part == PAGE;
            if is_whole {
                self.cache.remove(&(at / PAGE));
            }
            match is_whole {
                true => self.write_device(at, &vec![0; part]),
                false => self.write(at, &vec![0; part]),
            }
        }
    }

    fn write_device(&mut self, offset: usize, bytes: &[u8]) {
        self.device[offset..offset + bytes.len()].copy_from_slice(bytes);
        self.volatile.push((offset, bytes.to_vec()));
    }

    /// Writes the dirty pages of a range back.
    pub(super) fn write_back(&mut self, offset: usize, len: usize) {
        let dirty = |page: &CachedPage| page.is_dirty;
        let (first, end) = (offset / PAGE, (offset + len).div_ceil(PAGE));
        let range = self.cache.range(first..end);
        let numbers: Vec<usize> = range
            .filter(|(_, page)| dirty(page))
            .map(|(number, _)| *number)
            .collect();
        for number in numbers {
            let Some(page) = self.cache.get_mut(&number) else {
                continue;
            };
            page.is_dirty = false;
            let bytes = page.bytes.clone();
            if happens(self.parameters.failed_write_backs) {
                self.failures += 1;
                if self.is_error_seen || self.error == 0 {
                    self.error += 1;
                    self.is_error_seen = false;
                }
            } else {
                self.write_device(number * PAGE, &bytes);
            }
        }
    }

    pub(super) fn is_dirty(&self) -> bool {
        self.cache.values().any(|page| page.is_dirty)
    }

    /// Writes a random dirty page back, if there is any.
    pub(super) fn write_back_random_page(&mut self) {
        let dirty = self.cache.iter().filter(|(_, page)| page.is_dirty);
        let dirty: Vec<usize> = dirty.map(|(number, _)| *number).collect();
        if !dirty.is_empty() {
            let number = dirty[random() as usize % dirty.len()];
            self.write_back(number * PAGE, PAGE);
        }
    }

    /// Returns the latest write-back error, if the description has not received it yet.
    pub(super) fn report_error(&mut self, open: u64) -> Result<(), i32> {
        let Some(description) = self.descriptions.get_mut(&open) else {
            return Ok(());
        };
        if description.reported_error == self.error {
            return Ok(());
        }
        description.reported_error = self.error;
        self.reported_errors += 1;
        self.is_error_seen = true;
        Err(libc::EIO)
    }

    /// Makes a range durable, and with the range the whole volatile cache of the device.
    pub(super) fn sync(&mut self, open: u64, offset: usize, len: usize) -> Result<(), i32> {
        self.write_back(offset, len);
        let reported = self.report_error(open);
        if happens(self.parameters.failed_flushes) {
            self.failures += 1;
            return reported.and(Err(libc::EIO));
        }
        for (offset, bytes) in self.volatile.drain(..) {
            self.stable[offset..offset + bytes.len()].copy_from_slice(&bytes);
        }
        reported
    }

    /// Simulates a crash of the machine. The file then has the content of the stable media.
    pub(super) fn crash(&mut self) {
        for (number, page) in std::mem::take(&mut self.cache) {
            if page.is_dirty && happens(2) {
                self.write_device(number * PAGE, &page.bytes);
            }
        }
        let writes = std::mem::take(&mut self.volatile);
        let (way, first) = (random() % 4, random() as usize % (writes.len() + 1));
        for (number, (offset, bytes)) in writes.iter().enumerate() {
            let survives = match way {
                0 => false,
                1 => true,
                2 => number < first,
                _ => happens(2),
            };
            if survives {
                let sectors = bytes.len().div_ceil(SECTOR);
                let len = match happens(4) {
                    true => (random() as usize % (sectors + 1) * SECTOR).min(bytes.len()),
                    false => bytes.len(),
                };
                self.stable[*offset..offset + len].copy_from_slice(&bytes[..len]);
            }
        }
        self.device.clone_from(&self.stable);
        self.descriptions.clear();
        self.locks.clear();
        (self.error, self.is_error_seen) = (0, false);
    }
}

/// Splits a range at page boundaries. Returns the offset and the length of each piece.
fn pages(offset: usize, len: usize) -> impl Iterator<Item = (usize, usize)> {
    let end = offset + len;
    let mut at = offset;
    std::iter::from_fn(move || {
        let part = (PAGE - at % PAGE).min(end.checked_sub(at)?);
        (part > 0).then(|| {
            at += part;
            (at - part, part)
        })
    })
}

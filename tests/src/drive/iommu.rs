//! IOMMU in front of the drive: the memory that the drive can access. Any other access is recorded as a fault.
#![expect(
    unsafe_code,
    reason = "DMA: memory that others write at the same time, by address"
)]

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use nvme_guest::iova::{BeforePinning, Iommu};
use nvme_mpt_memory::sync::{Condvar, Mutex, RwLock};
use nvme_mpt_memory::{Mapping, MappingAccess, clock};

use crate::bar::DoorbellWindow;
use crate::mapping;
use crate::rng::Rng;

/// Maximum number of recorded faults. Further faults are only counted.
const RECORDED_FAULTS_MAX: usize = 16;

/// Number of bytes that are pinned in one step.
const PIECE: usize = 64 << 20;

/// The granularity of mappings.
const PAGE: u64 = 4096;

/// An access of the drive to unmapped memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaFault {
    /// The address.
    pub iova: u64,
    /// Size in bytes.
    pub len: usize,
    /// True if it was a write to memory.
    pub write: bool,
}

#[derive(Clone, Copy, Debug)]
struct ModelMapping {
    len: u64,
    start: NonNull<u8>,
    access: MappingAccess,
}

// SAFETY: a mapping is only an address range. Its memory is accessed by copies and atomics, while the IOMMU's lock is held.
unsafe impl Send for ModelMapping {}
// SAFETY: as for `Send`.
unsafe impl Sync for ModelMapping {}

/// The IOMMU in front of the drive.
#[derive(Debug, Default)]
pub struct ModelIommu {
    /// Maximum number of mappings at a time, if there is a limit.
    mappings_max: Option<usize>,
    maps: RwLock<BTreeMap<u64, ModelMapping>>,
    faults: Mutex<Vec<DmaFault>>,
    count: AtomicU64,
    mappings_made: AtomicU64,
    refuses_maps: AtomicBool,
    /// True if mapping allocates missing pages. If false, holes in mapped memory stay.
    pins: AtomicBool,
    /// Bytes of guest memory that were allocated before they were mapped.
    allocated_bytes: AtomicU64,
    allocation_hook: Mutex<Option<PageHook>>,
    pinning_hook: Mutex<Option<PageHook>>,
    gate: MappingGate,
}

/// A test's hook, called while pages are allocated or pinned. Its argument is the number of bytes that are done.
struct PageHook(Box<dyn FnMut(u64) + Send>);

impl fmt::Debug for PageHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Act")
    }
}

/// Random delays of mapping guest memory. Mappings of the driver's own memory are not delayed.
#[derive(Clone, Debug)]
pub struct Pinning {
    /// Random numbers that select the delayed mappings and their delays.
    pub rng: Rng,
    /// Average number of mappings for each delayed mapping.
    pub one_in: u64,
    /// Range of the delays.
    pub times: Range<Duration>,
}

impl Pinning {
    /// Returns the delay of the next mapping.
    fn next(&mut self) -> Duration {
        if self.rng.below(self.one_in) > 0 {
            return Duration::ZERO;
        }
        let Range { start, end } = self.times;
        start + Duration::from_nanos(self.rng.below((end - start).as_nanos() as u64 + 1))
    }
}

/// Gate that delays mappings, as if the IOMMU were pinning memory page by page.
#[derive(Debug, Default)]
struct MappingGate {
    state: Mutex<MappingGateState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct MappingGateState {
    closed: bool,
    waiting: usize,
    pinning_delays: Option<Pinning>,
}

impl MappingGate {
    fn change<T>(&self, change: impl FnOnce(&mut MappingGateState) -> T) -> T {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut state);
        self.changed.notify_all();
        result
    }

    /// Waits until the gate is open, and for the delay of this mapping.
    fn pass(&self, memory: &Mapping) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.waiting += 1;
        while state.closed {
            let woken = self.changed.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting -= 1;
        // Only guest memory is backed by a file, and only its mappings are delayed.
        let pinning = state
            .pinning_delays
            .as_mut()
            .filter(|_| memory.file_place().is_some());
        let time = pinning.map_or(Duration::ZERO, Pinning::next);
        drop(state);
        if !time.is_zero() {
            clock::sleep(time);
        }
    }
}

impl ModelIommu {
    pub(super) fn new(mappings_max: Option<usize>) -> Self {
        Self {
            mappings_max,
            ..Self::default()
        }
    }

    /// Returns the first accesses to unmapped memory.
    pub fn faults(&self) -> Vec<DmaFault> {
        self.faults
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Returns the number of accesses to unmapped memory, including those that were not recorded.
    pub fn fault_count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Returns the number of mapped bytes.
    pub fn mapped_bytes(&self) -> u64 {
        self.read_maps().values().map(|mapped| mapped.len).sum()
    }

    /// Returns the first address of each mapping.
    pub fn iovas(&self) -> Vec<u64> {
        self.read_maps().keys().copied().collect()
    }

    /// Returns the number of mappings that were made, including those that were removed.
    pub fn mappings_made(&self) -> u64 {
        self.mappings_made.load(Ordering::Relaxed)
    }

    /// Makes mappings fail as at the limit of locked memory, or makes them succeed again.
    pub fn refuse_maps(&self, refuse: bool) {
        self.refuses_maps.store(refuse, Ordering::Relaxed);
    }

    /// Makes mappings allocate missing pages.
    pub fn pin_pages(&self) {
        self.pins.store(true, Ordering::Relaxed);
    }

    /// Blocks mappings until [`Self::release_maps`].
    pub fn hold_maps(&self) {
        self.gate.change(|state| state.closed = true);
    }

    /// Returns the number of blocked mappings.
    pub fn held_maps(&self) -> usize {
        self.gate.change(|state| state.waiting)
    }

    /// Ends [`Self::hold_maps`].
    pub fn release_maps(&self) {
        self.gate.change(|state| state.closed = false);
    }

    /// Returns the bytes of guest memory that the driver allocated before mapping. The model itself allocates none.
    pub fn allocated_bytes(&self) -> u64 {
        self.allocated_bytes.load(Ordering::Relaxed)
    }

    /// Calls `act` before each allocation of pages. Its argument is the number of bytes that are allocated already.
    pub fn on_allocation(&self, act: impl FnMut(u64) + Send + 'static) {
        let mut taking = self
            .allocation_hook
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *taking = Some(PageHook(Box::new(act)));
    }

    /// Calls `act` after each pinned piece of a mapping. Its argument is the number of bytes of the mapping that are
    /// pinned.
    pub fn on_piece_pinned(&self, act: impl FnMut(u64) + Send + 'static) {
        let mut pinning = self
            .pinning_hook
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *pinning = Some(PageHook(Box::new(act)));
    }

    /// Delays some mappings of guest memory.
    pub fn pin_slowly(&self, pinning: Pinning) {
        self.gate
            .change(|state| state.pinning_delays = Some(pinning));
    }

    fn read_maps(&self) -> nvme_mpt_memory::sync::RwLockReadGuard<'_, BTreeMap<u64, ModelMapping>> {
        self.maps.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `access` on each part of a range, if the drive may access the whole range. The arguments are the part's start,
    /// its offset in the range, and its size in bytes. The memory stays mapped meanwhile.
    fn for_each_piece(
        &self,
        iova: u64,
        len: usize,
        write: bool,
        mut access: impl FnMut(NonNull<u8>, usize, usize),
    ) -> Result<(), DmaFault> {
        let maps = self.read_maps();
        let mut stretches = Vec::with_capacity(1);
        let mut done = 0;
        while done < len {
            let stretch = iova.checked_add(done as u64).and_then(|at| {
                let (&start, mapped) = maps.range(..=at).next_back()?;
                let offset = at - start;
                let bytes = mapped.len.checked_sub(offset).filter(|bytes| *bytes > 0)?;
                let allowed = !write || mapped.access == MappingAccess::ReadWrite;
                // SAFETY: `offset` is less than the length of the mapped range.
                let first = unsafe { mapped.start.add(offset as usize) };
                allowed.then_some((first, (bytes as usize).min(len - done)))
            });
            let Some((first, bytes)) = stretch else {
                let fault = DmaFault { iova, len, write };
                self.count.fetch_add(1, Ordering::Relaxed);
                let mut faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
                if faults.len() < RECORDED_FAULTS_MAX {
                    faults.push(fault);
                }
                return Err(fault);
            };
            stretches.push((first, done, bytes));
            done += bytes;
        }
        for (first, offset, bytes) in stretches {
            access(first, offset, bytes);
        }
        Ok(())
    }

    /// Copies bytes out of memory.
    pub(super) fn read(&self, iova: u64, into: &mut [u8]) -> Result<(), DmaFault> {
        self.for_each_piece(iova, into.len(), false, |first, offset, bytes| {
            let to = &mut into[offset..offset + bytes];
            // SAFETY: `bytes` bytes are mapped there, and stay mapped while the lock is held. `to` is memory of this
            // process.
            unsafe { ptr::copy_nonoverlapping(first.as_ptr(), to.as_mut_ptr(), bytes) };
        })
    }

    /// Copies bytes into memory.
    pub(super) fn write(&self, iova: u64, from: &[u8]) -> Result<(), DmaFault> {
        self.for_each_piece(iova, from.len(), true, |first, offset, bytes| {
            let from = &from[offset..offset + bytes];
            // SAFETY: `bytes` bytes are mapped there for writing, and stay mapped while the lock is held.
            unsafe { ptr::copy_nonoverlapping(from.as_ptr(), first.as_ptr(), bytes) };
        })
    }

    /// Reads an aligned word (acquire): if its writer stored other data before it, this data is visible afterwards.
    pub(super) fn load32(&self, iova: u64) -> Result<u32, DmaFault> {
        let mut value = 0;
        self.for_each_piece(iova & !3, 4, false, |first, _, _| {
            // SAFETY: the word is mapped, and aligned, as mappings are to pages.
            value = unsafe { AtomicU32::from_ptr(first.as_ptr().cast()) }.load(Ordering::SeqCst);
        })?;
        Ok(u32::from_le(value))
    }

    /// Writes an aligned word.
    pub(super) fn store32(&self, iova: u64, value: u32) -> Result<(), DmaFault> {
        self.for_each_piece(iova & !3, 4, true, |first, _, _| {
            // SAFETY: as in `load32`, and mapped for writing.
            let word = unsafe { AtomicU32::from_ptr(first.as_ptr().cast()) };
            word.store(value.to_le(), Ordering::SeqCst);
        })
    }

    /// Writes two aligned 64-bit words. A reader that sees the second word also sees the first.
    pub(super) fn publish(&self, iova: u64, words: [u64; 2]) -> Result<(), DmaFault> {
        self.for_each_piece(iova & !15, 16, true, |first, _, _| {
            for (index, word) in words.into_iter().enumerate() {
                // SAFETY: both words are mapped for writing, and aligned.
                let to = unsafe { AtomicU64::from_ptr(first.as_ptr().cast::<u64>().add(index)) };
                to.store(word.to_le(), Ordering::Release);
            }
        })
    }
}

impl Iommu for ModelIommu {
    fn map(
        &self,
        iova: u64,
        memory: &Mapping,
        part: Range<usize>,
        access: MappingAccess,
    ) -> io::Result<()> {
        let len = part.len() as u64;
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        if self.refuses_maps.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let bytes = memory.bytes(part.start, part.len()).ok_or_else(invalid)?;
        let start = NonNull::new(bytes.as_ptr()).ok_or_else(invalid)?;
        let end = iova.checked_add(len).ok_or_else(invalid)?;
        if len == 0 || !iova.is_multiple_of(PAGE) || !len.is_multiple_of(PAGE) {
            return Err(invalid());
        }
        self.gate.pass(memory);
        let mut maps = self.maps.write().unwrap_or_else(PoisonError::into_inner);
        if let Some((&start, mapped)) = maps.range(..end).next_back()
            && start + mapped.len > iova
        {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        if self.mappings_max.is_some_and(|max| maps.len() >= max) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.mappings_made.fetch_add(1, Ordering::Relaxed);
        // The caller must keep the memory at least as long as the mapping.
        maps.insert(iova, ModelMapping { len, start, access });
        Ok(())
    }

    fn map_with_check(
        &self,
        iova: u64,
        memory: &Mapping,
        part: Range<usize>,
        access: MappingAccess,
        before_pinning: &mut BeforePinning<'_>,
    ) -> io::Result<()> {
        for start in part.clone().step_by(PIECE) {
            let end = part.end.min(start + PIECE);
            before_pinning(start..end)?;
            let mut pinning = self
                .pinning_hook
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            if let Some(PageHook(act)) = pinning.as_mut() {
                act((end - part.start) as u64);
            }
        }
        self.map(iova, memory, part, access)
    }

    fn unmap(&self, iova: u64, len: u64) -> io::Result<()> {
        // Taking the lock waits for accesses in progress.
        let mut maps = self.maps.write().unwrap_or_else(PoisonError::into_inner);
        match maps.get(&iova) {
            Some(mapped) if mapped.len == len => drop(maps.remove(&iova)),
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        }
        Ok(())
    }

    fn allocate_pages(&self, memory: &Mapping, part: Range<usize>) -> io::Result<()> {
        if self.pins.load(Ordering::Relaxed) {
            memory.populate_part(part.start, part.len())?;
        }
        let before = self
            .allocated_bytes
            .fetch_add(part.len() as u64, Ordering::Relaxed);
        let mut taking = self
            .allocation_hook
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(PageHook(act)) = taking.as_mut() {
            act(before);
        }
        Ok(())
    }

    fn clear(&self, iova: u64, len: u64) -> io::Result<()> {
        let mut maps = self.maps.write().unwrap_or_else(PoisonError::into_inner);
        let end = iova.checked_add(len).ok_or(io::ErrorKind::InvalidInput)?;
        let is_outside = |at: &u64, mapped: &ModelMapping| *at >= end || at + mapped.len <= iova;
        let cuts = |at: &u64, mapped: &ModelMapping| *at < iova || at + mapped.len > end;
        if maps
            .iter()
            .any(|(at, mapped)| !is_outside(at, mapped) && cuts(at, mapped))
        {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        maps.retain(|at, mapped| is_outside(at, mapped));
        Ok(())
    }

    fn mappings_max(&self) -> Option<u64> {
        self.mappings_max.map(|max| max as u64)
    }
}

/// The doorbell registers. The drive takes each stored value once.
#[derive(Debug)]
pub(super) struct DoorbellRegisters {
    pub(super) mapping: Arc<Mapping>,
    memfd: File,
}

/// Value of a doorbell register to which nothing was stored since it was read. Queues have fewer entries.
const UNWRITTEN: u32 = u32::MAX;

impl DoorbellRegisters {
    pub(super) fn new(len: usize) -> io::Result<Self> {
        let memfd = mapping::memfd().map_err(io::Error::other)?;
        memfd.set_len(len as u64)?;
        let mapping = Mapping::shared(memfd.as_fd(), 0, len, MappingAccess::ReadWrite)?;
        let registers = Self {
            mapping: mapping.into(),
            memfd,
        };
        registers.discard_stores();
        Ok(registers)
    }

    /// Maps the registers from index `first` on into a guest. `base` is the offset of all doorbell registers in the guest's
    /// BAR.
    pub(super) fn window(&self, base: u64, first: usize) -> DoorbellWindow {
        let (offset, len) = (first as u64, self.mapping.len() - first);
        let window = DoorbellWindow::map(base + offset, self.memfd.as_fd(), offset, len);
        window.expect("registers on pages of their own")
    }

    fn register(&self, offset: usize) -> Option<&AtomicU32> {
        let bytes = self.mapping.bytes(offset & !3, 4)?;
        // SAFETY: the word lies in the mapping, which `self` keeps, and is aligned. All accesses to it are atomic.
        Some(unsafe { AtomicU32::from_ptr(bytes.as_ptr().cast()) })
    }

    /// Takes the value that was stored to a doorbell since the last call; `None` if nothing was stored.
    pub(super) fn take(&self, offset: usize) -> Option<u32> {
        let value = self
            .register(offset)?
            .swap(UNWRITTEN.to_le(), Ordering::SeqCst);
        (value != UNWRITTEN.to_le()).then(|| u32::from_le(value))
    }

    /// Discards all stored values.
    pub(super) fn discard_stores(&self) {
        for offset in (0..self.mapping.len()).step_by(4) {
            if let Some(register) = self.register(offset) {
                register.store(UNWRITTEN.to_le(), Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_mapped_is_reached() {
        let iommu = ModelIommu::default();
        let [a, b] = [8192, 4096].map(|len| Mapping::anonymous(len).unwrap());
        let map = |iova, memory: &Mapping, access| iommu.map(iova, memory, 0..memory.len(), access);
        map(0x10_0000, &a, MappingAccess::ReadWrite).unwrap();
        map(0x10_2000, &b, MappingAccess::Read).unwrap();
        map(0x10_1000, &b, MappingAccess::Read).unwrap_err();
        map(0xF_F000, &a, MappingAccess::Read).unwrap_err();
        iommu.write(0x10_0FFE, &[1, 2, 3, 4]).unwrap();
        let mut bytes = [0; 3];
        a.bytes(0xFFF, 3).unwrap().copy_to(&mut bytes);
        assert_eq!(bytes, [2, 3, 4]);
        // The next mapping is read-only: reads can continue there, but writes cannot.
        iommu.read(0x10_1FFF, &mut [0; 2]).unwrap();
        assert_eq!(iommu.fault_count(), 0);
        let fault = iommu.write(0x10_1FFF, &[0; 2]).unwrap_err();
        assert!(fault.write);
        iommu.read(0x10_2FFF, &mut [0; 2]).unwrap_err();
        iommu.read(0, &mut [0]).unwrap_err();
        iommu.read(u64::MAX, &mut [0; 2]).unwrap_err();
        assert_eq!((iommu.fault_count(), iommu.faults()[0]), (4, fault));
        iommu.unmap(0x10_0000, 4096).unwrap_err();
        iommu.unmap(0x10_0000, 8192).unwrap();
        iommu.read(0x10_0000, &mut [0]).unwrap_err();
        assert_eq!(iommu.mapped_bytes(), 4096);
    }

    #[test]
    fn memory_of_guests_takes_time_to_pin() {
        let iommu = ModelIommu::default();
        let times = Duration::from_millis(1)..Duration::from_millis(2);
        iommu.pin_slowly(Pinning {
            rng: Rng::new(1),
            one_in: 1,
            times: times.clone(),
        });
        let memfd = mapping::memfd().unwrap();
        memfd.set_len(8192).unwrap();
        let memory = Mapping::shared(memfd.as_fd(), 0, 8192, MappingAccess::ReadWrite).unwrap();
        for iova in [0x10_0000, 0x20_0000] {
            let began = clock::monotonic();
            iommu
                .map(iova, &memory, 0..8192, MappingAccess::Read)
                .unwrap();
            assert!(clock::monotonic() - began >= times.start);
        }
    }

    #[test]
    fn a_doorbell_is_taken_once() {
        let registers = DoorbellRegisters::new(4096).unwrap();
        assert_eq!(registers.take(8), None);
        let cell = nvme_mpt_memory::MappedWord32::new(&registers.mapping, 8).unwrap();
        for value in [0, 7, 7] {
            cell.store(value);
            assert_eq!(registers.take(8), Some(value));
            assert_eq!(registers.take(8), None);
        }
    }
}

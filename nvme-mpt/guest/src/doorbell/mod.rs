//! Doorbells: their registers, the Doorbell Buffer, and reading them in a poller (Base 2.0, sections 3.1.4 and B.5).
//!
//! The doorbell registers are a memfd. The control thread stores trapped writes there. In mapped mode, the guest stores there
//! itself, including the admin doorbells, so a poller watches those too and wakes the control thread. With a Doorbell Buffer,
//! I/O doorbells are read from guest memory.
//!
//! # EventIdx
//! A round is one pass through the queue's entries. While a queue is polled, EventIdx lags the doorbell by a quarter of a
//! round, and moves once per half round. EventIdx must not be right behind the doorbell, because the guest may have stored the
//! doorbell and not yet read EventIdx. EventIdx must not stay unchanged either: one round later, the doorbell would pass it,
//! and the guest would write the register. Therefore the CQ head doorbell is also read at least once per half round.

mod stride;

use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::str::FromStr;
use std::sync::Arc;

use stride::CACHE_LINE_DSTRD;
pub use stride::DoorbellStride;

use nvme_mpt_memory::{MappedWord32, Mapping, MappingAccess, RingIndex, RingSize};
use nvme_spec::registers::Doorbell;
use nvme_spec::registers::offset::DOORBELLS;

use crate::address::{Gpa, PAGE_SIZE};
use crate::dma::RegionTable;
use crate::sync::{Ordering, fence};

/// Maximum number of I/O queue pairs of a guest controller.
pub const MAX_QUEUE_PAIRS: u16 = 1024;

/// Path of a guest's doorbell writes to a poller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum DoorbellMode {
    /// [`Self::Shadow`] for a guest that sets up a Doorbell Buffer. For a guest without one, [`Self::Mapped`] if the function
    /// is in the VMM's own process, and [`Self::Shadow`] if it is not.
    #[default]
    Auto,
    /// The guest stores doorbells to the Doorbell Buffer in its memory. It writes a register only if EventIdx asks for it.
    Shadow,
    /// The guest stores doorbells to registers that are host memory mapped into the guest. In the VMM's own process, the
    /// registers are mapped only while the guest uses them.
    Mapped,
    /// The guest writes doorbell registers, and each write exits to the VMM.
    Trap,
}

impl DoorbellMode {
    /// Returns whether the guest is offered a Doorbell Buffer. It is not offered if the mode relies on register writes, because
    /// a guest with a Doorbell Buffer avoids them.
    #[must_use]
    pub fn offers_buffer(self) -> bool {
        matches!(self, Self::Auto | Self::Shadow)
    }

    /// Returns whether a VMM that can map and unmap the registers at run time should do so.
    #[must_use]
    pub fn should_map_dynamically(self) -> bool {
        matches!(self, Self::Auto | Self::Mapped)
    }
}

impl FromStr for DoorbellMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "shadow" => Ok(Self::Shadow),
            "mapped" => Ok(Self::Mapped),
            "trap" => Ok(Self::Trap),
            _ => Err(format!(
                "`{text}` is not a doorbell mode; use auto, shadow, mapped or trap"
            )),
        }
    }
}

impl fmt::Display for DoorbellMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Shadow => "shadow",
            Self::Mapped => "mapped",
            Self::Trap => "trap",
        })
    }
}

/// Doorbell registers of one guest controller: host memory behind BAR0 from offset 1000h.
///
/// Trapped writes are stored here. While the page is mapped, the guest stores here itself.
#[derive(Debug)]
pub struct DoorbellPage {
    fd: OwnedFd,
    mapping: Arc<Mapping>,
    dstrd: u8,
    queue_pairs: u16,
}

impl DoorbellPage {
    /// Creates the doorbells of the admin queue and of `queue_pairs` I/O queue pairs, all zero.
    ///
    /// # Errors
    /// Returns the kernel's error if there is no memory.
    pub fn new(mode: DoorbellMode, stride: DoorbellStride, queue_pairs: u16) -> io::Result<Self> {
        let dstrd = stride.dstrd(mode, queue_pairs);
        let len = Self::file_len(dstrd, queue_pairs);
        let fd = nvme_mpt_memory::sealed_memfd(c"nvme-mpt-doorbells", len)?;
        let mapping = Mapping::shared(fd.as_fd(), 0, len as usize, MappingAccess::ReadWrite)?;
        Ok(Self {
            fd,
            mapping: Arc::new(mapping),
            dstrd,
            queue_pairs,
        })
    }

    /// Restores the doorbells from their file, which outlived the process of the back end that created it with [`Self::new`].
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if the file is too small or can be truncated; the kernel's error if it cannot be mapped.
    pub fn from_persisted(
        fd: OwnedFd,
        mode: DoorbellMode,
        stride: DoorbellStride,
        queue_pairs: u16,
    ) -> io::Result<Self> {
        if !nvme_mpt_memory::is_size_sealed(fd.as_fd()) {
            let text = "the file of the doorbells can be truncated";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        Self::from_file(fd, stride.dstrd(mode, queue_pairs), queue_pairs)
    }

    /// Opens doorbells created by another process, with that process's [`Self::dstrd`] and number of queue pairs.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if the file is too small; the kernel's error if it cannot be mapped.
    pub fn from_file(fd: OwnedFd, dstrd: u8, queue_pairs: u16) -> io::Result<Self> {
        let too_small = || {
            let text = "the file is smaller than the doorbells that it is to hold";
            io::Error::new(io::ErrorKind::InvalidData, text)
        };
        if dstrd > CACHE_LINE_DSTRD || queue_pairs > MAX_QUEUE_PAIRS {
            return Err(too_small());
        }
        let len = Self::file_len(dstrd, queue_pairs);
        let file = File::from(fd);
        if file.metadata()?.len() < len {
            return Err(too_small());
        }
        let mapping = Mapping::shared(file.as_fd(), 0, len as usize, MappingAccess::ReadWrite)?;
        Ok(Self {
            fd: file.into(),
            mapping: Arc::new(mapping),
            dstrd,
            queue_pairs,
        })
    }

    fn file_len(dstrd: u8, queue_pairs: u16) -> u64 {
        DOORBELLS + Doorbell::area_bytes(queue_pairs, dstrd).next_multiple_of(PAGE_SIZE)
    }

    /// Returns CAP.DSTRD: the stride of the registers and of the Doorbell Buffer.
    #[must_use]
    pub fn dstrd(&self) -> u8 {
        self.dstrd
    }

    /// Returns the length in bytes, a multiple of the memory page size.
    #[must_use]
    pub fn len(&self) -> usize {
        self.mapping.len() - DOORBELLS as usize
    }

    /// Returns whether there are no doorbells, which is never the case.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the file of the doorbells, which a VMM maps into the guest. Offsets in the file are offsets in BAR0, because a
    /// vfio-user client gets one file offset for the whole BAR. The bytes before the doorbells are unused.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Returns the doorbell at an offset in BAR0; `None` if no existing queue has one there.
    #[must_use]
    pub fn at_bar_offset(&self, bar_offset: u64) -> Option<Doorbell> {
        Doorbell::from_bar_offset(bar_offset, self.dstrd)
            .filter(|doorbell| self.has_doorbell(*doorbell))
    }

    /// Returns the last value written to a doorbell; 0 if the doorbell does not exist.
    #[must_use]
    pub fn load(&self, doorbell: Doorbell) -> u32 {
        self.cell(doorbell).map_or(0, |cell| cell.load())
    }

    /// Stores the value of a doorbell write. Does nothing if the doorbell does not exist.
    pub fn store(&self, doorbell: Doorbell, value: u32) {
        if let Some(cell) = self.cell(doorbell) {
            cell.store(value);
        }
    }

    /// Sets all doorbells to zero, as a controller reset does.
    pub fn clear(&self) {
        if let Some(bytes) = self.mapping.bytes(DOORBELLS as usize, self.len()) {
            bytes.zero();
        }
    }

    fn has_doorbell(&self, doorbell: Doorbell) -> bool {
        doorbell.index() / 2 <= u32::from(self.queue_pairs)
    }

    /// Returns the word of a doorbell; `None` if the controller has no such doorbell.
    pub fn cell(&self, doorbell: Doorbell) -> Option<MappedWord32> {
        let offset = doorbell.bar_offset(self.dstrd) as usize;
        self.has_doorbell(doorbell)
            .then(|| MappedWord32::new(&self.mapping, offset))
            .flatten()
    }
}

/// Both pages of a Doorbell Buffer Config command (Base 2.0, section 5.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DoorbellBuffer {
    /// Shadow Doorbell buffer, written by the guest.
    pub shadow: Gpa,
    /// EventIdx buffer, written by the controller.
    pub event_idx: Gpa,
}

/// 32-bit word shared by guest and controller: in mapped memory, or in a model of the doorbell protocol.
pub(crate) trait SharedWord {
    /// Loads the word with acquire semantics.
    fn load(&self) -> u32;
    /// Stores the word with release semantics.
    fn store(&self, value: u32);
}

impl SharedWord for MappedWord32 {
    #[inline]
    fn load(&self) -> u32 {
        MappedWord32::load(self)
    }
    #[inline]
    fn store(&self, value: u32) {
        MappedWord32::store(self, value);
    }
}

/// EventIdx of one doorbell (Base 2.0, section B.5). The guest writes the doorbell register only if its doorbell passes the
/// value in this word: if it moves from at most this value to a later value.
#[derive(Debug)]
pub(crate) struct EventIdx<W> {
    word: W,
    size: RingSize,
    /// Last value stored in the word, below `size`.
    published: u32,
    /// False until the first value is stored in the word.
    is_stored: bool,
}

impl<W: SharedWord> EventIdx<W> {
    /// Creates the EventIdx for a doorbell at `consumed` without storing a value, because a new queue must not write guest
    /// memory before its poller runs. Until the queue's first command or the poller's first sleep, the guest reads the old
    /// content of the word, and may do one unnecessary register write.
    pub(crate) fn new(word: W, consumed: RingIndex) -> Self {
        let size = consumed.size();
        Self {
            word,
            size,
            // The value lies far enough behind that the next `suppress` stores a new one.
            published: size.step_back(consumed.get(), size.entries() / 2 + 1),
            is_stored: false,
        }
    }

    /// Returns a value behind `consumed` that the doorbell passes only after most of a pass through the queue. The value must
    /// not be right behind `consumed`: a guest that has stored the doorbell, and reads EventIdx only now, could then find that
    /// the doorbell has just passed EventIdx.
    fn lagging_value(&self, consumed: u32) -> u32 {
        let lag = (self.size.entries() / 4).max(1);
        self.size.step_back(consumed, lag)
    }

    fn publish(&mut self, value: u32) {
        self.published = value;
        self.is_stored = true;
        self.word.store(value);
    }

    /// Suppresses register writes while the queue is polled. The doorbell is at `consumed`.
    ///
    /// Each store takes the cache line away from the vCPU that reads EventIdx. So the value is stored only once per half pass
    /// through the queue, which suffices because the doorbell reaches it only after most of a pass.
    #[inline]
    pub(crate) fn suppress(&mut self, consumed: u32) {
        let ahead = self.size.distance(self.published, consumed);
        // A distance of 0 is an armed EventIdx: the next move of the doorbell would be a register write.
        if ahead == 0 || ahead > self.size.entries() / 2 {
            self.publish(self.lagging_value(consumed));
        }
    }

    /// Suppresses register writes for a queue that has not stored a value yet. The doorbell is at `consumed`.
    pub(crate) fn suppress_initially(&mut self, consumed: u32) {
        if !self.is_stored {
            self.publish(self.lagging_value(consumed));
        }
    }

    /// Makes the guest write the register when the doorbell next moves from `consumed`. The caller must then read the doorbell
    /// again before it sleeps. The guest stores the doorbell, fences, and reads EventIdx; the poller stores EventIdx, fences,
    /// and reads the doorbell. So at least one side sees the other's store.
    pub(crate) fn arm(&mut self, consumed: u32) {
        self.publish(consumed);
        fence(Ordering::SeqCst);
    }
}

/// Location from which a poller reads one doorbell of an I/O queue.
#[derive(Debug)]
pub struct DoorbellSource {
    value: MappedWord32,
    event_idx: Option<EventIdx<MappedWord32>>,
}

impl DoorbellSource {
    /// Returns the doorbell's register, or its place in the Doorbell Buffer if there is one. Returns `None` if the buffer's
    /// pages are not in the VM's memory.
    pub fn new(
        page: &DoorbellPage,
        doorbell: Doorbell,
        buffer: Option<DoorbellBuffer>,
        table: &RegionTable,
        consumed: RingIndex,
    ) -> Option<Self> {
        let Some(buffer) = buffer else {
            return Some(Self {
                value: page.cell(doorbell)?,
                event_idx: None,
            });
        };
        let offset = doorbell.offset(page.dstrd());
        let word = |start: Gpa| {
            let (mapping, offset) = table.locate(start.checked_add(offset)?, 4)?;
            MappedWord32::new(mapping, offset)
        };
        let (value, event_idx) = (word(buffer.shadow)?, word(buffer.event_idx)?);
        let event_idx = Some(EventIdx::new(event_idx, consumed));
        Some(Self { value, event_idx })
    }

    /// Returns the guest's last value. Everything that the guest wrote before it is visible.
    #[inline]
    pub fn load(&self) -> u32 {
        SharedWord::load(&self.value)
    }

    /// Suppresses notifications (exits for doorbell writes). The poller has seen the doorbell at `consumed`.
    #[inline]
    pub fn suppress(&mut self, consumed: u32) {
        if let Some(event_idx) = &mut self.event_idx {
            event_idx.suppress(consumed);
        }
    }

    /// Returns whether the next move of the doorbell from `consumed` is notified by an exit. Without a Doorbell Buffer, each
    /// move is.
    pub fn is_armed(&self, consumed: u32) -> bool {
        let event_idx = self.event_idx.as_ref();
        event_idx.is_none_or(|event_idx| event_idx.is_stored && event_idx.published == consumed)
    }

    /// Suppresses notifications for a queue that has not stored an EventIdx yet. See `EventIdx::suppress_initially`.
    pub fn suppress_initially(&mut self, consumed: u32) {
        if let Some(event_idx) = &mut self.event_idx {
            event_idx.suppress_initially(consumed);
        }
    }

    /// Asks for a notification when the doorbell next moves from `consumed`. See `EventIdx::arm`.
    pub fn arm(&mut self, consumed: u32) {
        if let Some(event_idx) = &mut self.event_idx {
            event_idx.arm(consumed);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::cell::Cell;

    use nvme_spec::ids::QueueId;

    impl SharedWord for &Cell<u32> {
        fn load(&self) -> u32 {
            self.get()
        }
        fn store(&self, value: u32) {
            self.set(value);
        }
    }

    /// Returns whether a driver writes the register when its doorbell moves from `old` to `new` (Base 2.0, section B.5, with
    /// the 16-bit arithmetic that drivers use).
    pub(crate) fn driver_writes_register(event_idx: u32, new: u32, old: u32) -> bool {
        (new as u16).wrapping_sub(event_idx as u16).wrapping_sub(1)
            < (new as u16).wrapping_sub(old as u16)
    }

    #[test]
    fn doorbells_are_restored_only_from_their_sealed_file() {
        let mode = DoorbellMode::Trap;
        let stride = DoorbellStride::default();
        let made = DoorbellPage::new(mode, stride, 4).expect("memory");
        let doorbell = Doorbell::SqTail(QueueId(2));
        made.store(doorbell, 7);
        let file = || made.fd().try_clone_to_owned().expect("a descriptor");
        let restored = DoorbellPage::from_persisted(file(), mode, stride, 4).expect("the same");
        assert_eq!(
            (restored.load(doorbell), restored.dstrd()),
            (7, made.dstrd())
        );
        File::from(file()).set_len(0).expect_err("sealed");

        let refused = |fd, pairs| {
            let error = DoorbellPage::from_persisted(fd, mode, stride, pairs).expect_err("no good");
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        };
        refused(file(), 64);
        let len = DoorbellPage::file_len(made.dstrd(), 4);
        refused(nvme_mpt_memory::memfd(c"test", len).expect("memory"), 4);
        let plain = tempfile::tempfile().expect("a file");
        plain.set_len(len).expect("room");
        refused(plain.into(), 4);
        let (reader, _) = io::pipe().expect("a pipe");
        refused(reader.into(), 4);
    }

    #[test]
    fn only_doorbells_of_queues_that_can_exist() {
        let stride = DoorbellStride::default();
        let page = DoorbellPage::new(DoorbellMode::Shadow, stride, 3).expect("memory");
        assert_eq!(page.len(), 4096);
        let last = Doorbell::CqHead(QueueId(3));
        assert_eq!(page.at_bar_offset(0x1000 + 7 * 64), Some(last));
        for offset in [0, 0xFFF, 0x1000 + 4, 0x1000 + 8 * 64, u64::MAX] {
            assert_eq!(page.at_bar_offset(offset), None, "{offset:#x}");
        }
        page.store(last, 9);
        assert_eq!(page.load(last), 9);
        page.store(Doorbell::CqHead(QueueId(4)), 9);
        assert_eq!(page.load(Doorbell::CqHead(QueueId(4))), 0);
        page.clear();
        assert_eq!(page.load(last), 0);
        assert_eq!(
            DoorbellPage::new(DoorbellMode::Trap, stride, 64)
                .expect("memory")
                .len(),
            12288
        );
    }

    fn index(entries: u32, index: u32) -> RingIndex {
        let size = RingSize::new(entries).expect("entries");
        RingIndex::from_index(size, index).expect("an entry")
    }

    #[test]
    fn a_polled_queue_never_asks_for_register_writes() {
        for entries in [2_u32, 3, 7, 64, 1024, 65536] {
            let word = Cell::new(0);
            let mut event_idx = EventIdx::new(&word, index(entries, 0));
            event_idx.suppress(0);
            let mut tail = 0;
            for step in 0..5 * entries {
                // Each doorbell adds at most half of the queue, and the poller keeps up.
                let new = (tail + 1 + step % (entries / 2).max(1)) % entries;
                assert!(
                    !driver_writes_register(word.get(), new, tail),
                    "{entries} {tail}->{new}"
                );
                tail = new;
                event_idx.suppress(tail);
            }
        }
    }

    #[test]
    fn a_queue_that_rests_stores_nothing() {
        for entries in [2_u32, 3, 64, 65536] {
            let word = Cell::new(77);
            let mut event_idx = EventIdx::new(&word, index(entries, 1));
            assert_eq!(word.get(), 77);
            assert!(!event_idx.is_stored);
            event_idx.suppress(1);
            assert!(!driver_writes_register(word.get(), 2 % entries, 1));
            // A Completion Queue's doorbell moves before the poller has examined it.
            let mut event_idx = EventIdx::new(&word, index(entries, 0));
            word.set(0);
            event_idx.suppress_initially(0);
            assert!(!driver_writes_register(word.get(), 1, 0));
            event_idx.arm(1);
            event_idx.suppress_initially(1);
            assert!(
                driver_writes_register(word.get(), 2 % entries, 1),
                "it stays armed"
            );
        }
    }

    #[test]
    fn an_armed_queue_asks_for_the_next_write_whatever_it_is() {
        for entries in [2_u32, 5, 64, 1024] {
            let word = Cell::new(0);
            for consumed in 0..entries {
                let mut event_idx = EventIdx::new(&word, index(entries, consumed));
                event_idx.arm(consumed);
                for by in 1..entries {
                    let new = (consumed + by) % entries;
                    assert!(driver_writes_register(word.get(), new, consumed));
                }
                event_idx.suppress(consumed);
                let next = (consumed + 1) % entries;
                assert!(!driver_writes_register(word.get(), next, consumed));
            }
        }
    }
}

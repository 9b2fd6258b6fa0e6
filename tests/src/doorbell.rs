//! Doorbells: trapped registers, mapped registers, or shadow doorbells with a register.
//!
//! Shadow doorbells follow the Doorbell Buffer Config command (NVMe Base 2.0, section 5.8) in the order of Linux: write the
//! shadow doorbell, full barrier, read EventIdx, and write the register only if the new value passed EventIdx.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

#[cfg(simulation)]
use nvme_mpt_memory::simulation;

use crate::bar::Bar;
use crate::error::{Error, Result};
use crate::memory::{DmaBuffer, GuestMemory, MemoryError, PAGE_SIZE, SharedSlice};
use crate::registers::Cap;

/// Way in which the driver rings the I/O queues' doorbells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DoorbellMode {
    /// Register writes, which trap.
    Trap,
    /// Stores to the mapped part of the BAR, which may contain the admin queue's doorbells as well.
    Mapped,
    /// Doorbell Buffer, with register writes when EventIdx requires them.
    Shadow,
}

/// Kind of doorbell: each queue pair has both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Submission queue tail.
    SqTail,
    /// Completion queue head.
    CqHead,
}

impl Side {
    fn index(self, queue: u16) -> usize {
        2 * usize::from(queue) + (self == Self::CqHead) as usize
    }
}

/// Pages of Doorbell Buffer Config: shadow doorbells and EventIdx.
#[derive(Debug)]
pub struct DoorbellBuffer {
    shadow: DmaBuffer,
    event_idx: DmaBuffer,
    /// Doorbell stride in dwords, equal to CAP.DSTRD of the registers.
    stride: usize,
}

impl DoorbellBuffer {
    /// Allocates two zeroed pages.
    ///
    /// # Errors
    /// Guest memory is exhausted.
    pub fn new(memory: &GuestMemory, cap: Cap) -> std::result::Result<Self, MemoryError> {
        Ok(Self {
            shadow: memory.alloc(PAGE_SIZE)?,
            event_idx: memory.alloc(PAGE_SIZE)?,
            stride: (cap.doorbell_stride() / 4) as usize,
        })
    }

    /// Returns the page of shadow doorbells (PRP1 of the command).
    pub fn shadow(&self) -> &DmaBuffer {
        &self.shadow
    }

    /// Returns the page of EventIdx values (PRP2 of the command).
    pub fn event_idx(&self) -> &DmaBuffer {
        &self.event_idx
    }

    /// Returns the shadow doorbell and the EventIdx of a doorbell; `None` if the page ends before them. Such a queue uses
    /// registers only.
    pub fn cells(
        &self,
        queue: u16,
        side: Side,
    ) -> Option<(SharedSlice<AtomicU32>, SharedSlice<AtomicU32>)> {
        let index = side.index(queue) * self.stride;
        (index < PAGE_SIZE / 4).then(|| {
            (
                self.shadow.cells().slice(index, 1),
                self.event_idx.cells().slice(index, 1),
            )
        })
    }
}

/// Returns whether moving a doorbell from `old` to `new` passes `event_idx`, so that the register must be written. All
/// three values have 16 bits and wrap.
#[inline]
pub fn need_event(event_idx: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event_idx).wrapping_sub(1) < new.wrapping_sub(old)
}

enum Register {
    Trapped {
        bar: Arc<dyn Bar>,
        offset: u64,
    },
    Mapped {
        register: SharedSlice<AtomicU32>,
        offset: u64,
    },
}

impl Register {
    fn new(bar: &Arc<dyn Bar>, offset: u64, mapped: bool) -> Result<Self> {
        if !mapped {
            let bar = Arc::clone(bar);
            return Ok(Self::Trapped { bar, offset });
        }
        let found = bar
            .doorbell_windows()
            .iter()
            .find_map(|window| window.register(offset));
        let register = found.ok_or(Error::NotMapped { offset })?;
        Ok(Self::Mapped { register, offset })
    }
}

struct Shadow {
    doorbell: SharedSlice<AtomicU32>,
    event_idx: SharedSlice<AtomicU32>,
    /// Reference that keeps the pages allocated while this queue uses them.
    _buffer: Arc<DoorbellBuffer>,
}

/// A doorbell of a queue.
pub struct Doorbell {
    register: Register,
    shadow: Option<Shadow>,
    value: u16,
    rings: u64,
    writes: u64,
}

impl fmt::Debug for Doorbell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Doorbell")
            .field("shadow", &self.shadow.is_some())
            .field("value", &self.value)
            .field("rings", &self.rings)
            .field("writes", &self.writes)
            .finish()
    }
}

impl Doorbell {
    /// Creates a doorbell that uses its register, mapped or trapped.
    ///
    /// # Errors
    /// `mapped` is set and no window of the BAR contains the register.
    pub fn new(bar: &Arc<dyn Bar>, offset: u64, mapped: bool) -> Result<Self> {
        Ok(Self {
            register: Register::new(bar, offset, mapped)?,
            shadow: None,
            value: 0,
            rings: 0,
            writes: 0,
        })
    }

    /// Switches to the register in another BAR, as after a migration of the guest.
    ///
    /// # Errors
    /// The register is mapped, and in no window of the new BAR.
    pub fn move_to(&mut self, bar: &Arc<dyn Bar>) -> Result<()> {
        let (offset, mapped) = match &self.register {
            Register::Trapped { offset, .. } => (*offset, false),
            Register::Mapped { offset, .. } => (*offset, true),
        };
        self.register = Register::new(bar, offset, mapped)?;
        Ok(())
    }

    /// Uses the Doorbell Buffer from now on, if it has doorbells for this queue.
    pub fn attach(&mut self, buffer: &Arc<DoorbellBuffer>, queue: u16, side: Side) {
        self.shadow = buffer.cells(queue, side).map(|(doorbell, event_idx)| {
            doorbell[0].store(u32::from(self.value), Ordering::Release);
            Shadow {
                doorbell,
                event_idx,
                _buffer: Arc::clone(buffer),
            }
        });
    }

    /// Uses the register again.
    pub fn detach(&mut self) {
        self.shadow = None;
    }

    /// Returns the value that the doorbell was last set to.
    #[inline]
    pub fn value(&self) -> u16 {
        self.value
    }

    /// Returns the number of times that the doorbell was rung, through the shadow doorbell or the register.
    pub fn rings(&self) -> u64 {
        self.rings
    }

    /// Returns the number of trapped register writes, which are VM exits of a guest.
    pub fn writes(&self) -> u64 {
        self.writes
    }

    /// Rings the doorbell with a new value.
    #[inline]
    pub fn ring(&mut self, value: u16) {
        if let Some(old) = self.publish(value) {
            fence(Ordering::SeqCst);
            self.notify(old);
        }
    }

    /// Publishes a new value. For a shadow doorbell, returns the old value, with which the caller must call
    /// [`Doorbell::notify`] after a full barrier. One barrier serves several doorbells.
    #[inline]
    pub(crate) fn publish(&mut self, value: u16) -> Option<u16> {
        let old = std::mem::replace(&mut self.value, value);
        self.rings += 1;
        if let Some(shadow) = &self.shadow {
            #[cfg(simulation)]
            simulation::turn(simulation::ActorStep::GuestRings, [value.into(), 0]);
            // Release: a controller that sees the doorbell value sees the entries, too.
            shadow.doorbell[0].store(u32::from(value), Ordering::Release);
            return Some(old);
        }
        self.write();
        None
    }

    /// Writes the register if EventIdx requires it after a change from the value `old`.
    #[inline]
    pub(crate) fn notify(&mut self, old: u16) {
        if let Some(shadow) = &self.shadow {
            #[cfg(simulation)]
            simulation::turn(
                simulation::ActorStep::GuestReadsEventIdx,
                [self.value.into(), 0],
            );
            let event_idx = shadow.event_idx[0].load(Ordering::Relaxed) as u16;
            if need_event(event_idx, self.value, old) {
                self.write();
            }
        }
    }

    fn write(&mut self) {
        match &self.register {
            Register::Mapped { register, .. } => {
                #[cfg(simulation)]
                simulation::turn(simulation::ActorStep::GuestRings, [self.value.into(), 0]);
                register[0].store(u32::from(self.value), Ordering::Release);
            }
            Register::Trapped { bar, offset } => {
                self.writes += 1;
                fence(Ordering::SeqCst);
                bar.write32(*offset, u32::from(self.value));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use nvme_mpt_memory::sync::Mutex;

    use proptest::prelude::*;

    use super::*;

    #[derive(Default)]
    struct WriteLog(Mutex<Vec<(u64, u32)>>);

    impl Bar for WriteLog {
        fn read32(&self, _: u64) -> u32 {
            u32::MAX
        }
        fn read64(&self, _: u64) -> u64 {
            u64::MAX
        }
        fn write32(&self, offset: u64, value: u32) {
            self.0.lock().unwrap().push((offset, value));
        }
        fn write64(&self, _: u64, _: u64) {}
    }

    proptest! {
        /// Checks `need_event` against the rule in words: the values passed through, `old + 1` to `new`, include `event_idx
        /// + 1`.
        #[test]
        fn need_event_is_passing_the_index(event_idx: u16, old: u16, steps in 0u16..300) {
            let passed = (1..=steps).any(|step| old.wrapping_add(step) == event_idx.wrapping_add(1));
            prop_assert_eq!(need_event(event_idx, old.wrapping_add(steps), old), passed);
        }
    }

    #[test]
    fn the_register_is_written_only_when_the_index_asks() {
        let memory = GuestMemory::new(&[(0x1000, 1 << 20)]).unwrap();
        let log = Arc::new(WriteLog::default());
        let bar: Arc<dyn Bar> = Arc::clone(&log) as _;
        let buffer = Arc::new(DoorbellBuffer::new(&memory, Cap(4 << 32)).unwrap());
        let mut doorbell = Doorbell::new(&bar, 0x1100, false).unwrap();
        doorbell.attach(&buffer, 2, Side::SqTail);
        // The tail doorbell of queue 2 is the fifth doorbell, and each takes 64 bytes.
        let event_idx = buffer.event_idx().cells::<AtomicU32>().slice(4 * 16, 1);
        let shadow = buffer.shadow().cells::<AtomicU32>().slice(4 * 16, 1);

        event_idx[0].store(0xffff - 3, Ordering::Relaxed);
        doorbell.ring(1);
        assert_eq!(shadow[0].load(Ordering::Relaxed), 1);
        assert!(log.0.lock().unwrap().is_empty());

        event_idx[0].store(1, Ordering::Relaxed);
        doorbell.ring(3);
        assert_eq!(*log.0.lock().unwrap(), [(0x1100, 3)]);
        assert_eq!((doorbell.rings(), doorbell.writes()), (2, 1));
    }

    #[test]
    fn queues_beyond_the_page_have_registers_only() {
        let memory = GuestMemory::new(&[(0x1000, 1 << 20)]).unwrap();
        // A page holds 64 doorbells of 64 bytes each: those of 32 queue pairs, including the admin queues.
        let buffer = DoorbellBuffer::new(&memory, Cap(4 << 32)).unwrap();
        assert!(buffer.cells(31, Side::CqHead).is_some());
        assert!(buffer.cells(32, Side::SqTail).is_none());
    }
}

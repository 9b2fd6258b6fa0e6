//! A doorbell of the drive, with or without Doorbell Buffer.

use std::sync::atomic::{Ordering, fence};

use nvme_mpt_memory::MappedWord32;

/// A doorbell's words in the Doorbell Buffer (Base 2.0, section 5.8).
#[derive(Clone, Debug)]
pub struct BufferedDoorbell {
    /// Word in the shadow doorbell buffer, written by the host.
    pub shadow: MappedWord32,
    /// Word in the EventIdx buffer, written by the drive.
    pub event_idx: MappedWord32,
}

/// Places to which one doorbell of the drive is written.
#[derive(Clone, Debug)]
pub struct DriveDoorbell {
    /// Doorbell register (Base 2.0, sections 3.1.3.12 and following).
    pub register: MappedWord32,
    /// Words in the Doorbell Buffer, if the drive uses one.
    pub buffer: Option<BufferedDoorbell>,
}

/// Writer of one doorbell, with the value that was written last.
#[derive(Debug)]
pub(super) struct DoorbellWriter {
    doorbell: DriveDoorbell,
    value: u32,
    /// Number of register writes that EventIdx has avoided.
    pub(super) saved_writes: u64,
}

impl DoorbellWriter {
    /// Creates the writer for a doorbell of a new queue, whose value is 0.
    pub(super) fn new(doorbell: DriveDoorbell) -> Self {
        Self {
            doorbell,
            value: 0,
            saved_writes: 0,
        }
    }

    /// Writes a new value, after which the drive sees all earlier stores.
    #[inline]
    pub(super) fn write(&mut self, value: u32) {
        let last = std::mem::replace(&mut self.value, value);
        if let Some(buffer) = &self.doorbell.buffer {
            buffer.shadow.store(value);
            // The drive stores EventIdx, fences, and reads the doorbell. This side stores the doorbell, fences, and reads
            // EventIdx. So at least one side sees the other side's store.
            fence(Ordering::SeqCst);
            if !needs_register_write(buffer.event_idx.load(), value, last) {
                self.saved_writes += 1;
                return;
            }
        }
        self.doorbell.register.store(value);
    }
}

/// Returns whether the doorbell register must be written: the value passes EventIdx on its way from `old` to `new` (Base 2.0,
/// section B.5).
fn needs_register_write(event_idx: u32, new: u32, old: u32) -> bool {
    (new as u16).wrapping_sub(event_idx as u16).wrapping_sub(1)
        < (new as u16).wrapping_sub(old as u16)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use nvme_mpt_memory::Mapping;

    fn cells() -> [MappedWord32; 3] {
        let mapping = Arc::new(Mapping::anonymous(4096).expect("map"));
        [0, 1024, 2048].map(|offset| MappedWord32::new(&mapping, offset).expect("aligned"))
    }

    #[test]
    fn without_a_buffer_every_value_goes_to_the_register() {
        let [register, ..] = cells();
        let mut writer = DoorbellWriter::new(DriveDoorbell {
            register: register.clone(),
            buffer: None,
        });
        for value in [1, 5, 0] {
            writer.write(value);
            assert_eq!(register.load(), value);
        }
        assert_eq!(writer.saved_writes, 0);
    }

    #[test]
    fn the_register_is_written_when_event_idx_is_passed() {
        let [register, shadow, event_idx] = cells();
        let mut writer = DoorbellWriter::new(DriveDoorbell {
            register: register.clone(),
            buffer: Some(BufferedDoorbell {
                shadow: shadow.clone(),
                event_idx: event_idx.clone(),
            }),
        });
        writer.write(2);
        assert_eq!((shadow.load(), register.load()), (2, 2), "0 was passed");
        event_idx.store(10);
        writer.write(10);
        assert_eq!(
            (shadow.load(), register.load()),
            (10, 2),
            "10 is not passed"
        );
        writer.write(11);
        assert_eq!((shadow.load(), register.load()), (11, 11));
        event_idx.store(3);
        writer.write(3);
        assert_eq!((shadow.load(), register.load()), (3, 11), "went round to 3");
        writer.write(4);
        assert_eq!(register.load(), 4);
        assert_eq!(writer.saved_writes, 2);
    }
}

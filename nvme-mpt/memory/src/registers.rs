//! Device registers: words that are accessed as a whole and in program order.
#![expect(unsafe_code, reason = "volatile access to a device's registers")]

use std::sync::Arc;

use super::Mapping;

/// Registers in a [`Mapping`], little-endian as on PCI.
///
/// Once the device is gone, all registers read as ones, even after writes.
#[derive(Clone, Debug)]
pub struct MappedRegisters {
    mapping: Arc<Mapping>,
}

impl MappedRegisters {
    /// Creates access to the registers in a mapping.
    #[must_use]
    pub fn new(mapping: Arc<Mapping>) -> Self {
        Self { mapping }
    }

    /// Returns the mapping.
    #[inline]
    #[must_use]
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    #[inline]
    fn word<T>(&self, offset: usize) -> Option<*mut T> {
        let bytes = self.mapping.bytes(offset, size_of::<T>())?;
        let word = bytes.as_ptr().cast::<T>();
        word.is_aligned().then_some(word)
    }

    /// Reads the 32-bit register at `offset`; `None` if it is not aligned or not inside the mapping.
    #[inline]
    #[must_use]
    pub fn read32(&self, offset: usize) -> Option<u32> {
        #[cfg(simulation)]
        crate::simulation::turn(
            crate::simulation::ActorStep::ReadRegister,
            [offset as u64, 0],
        );
        let word = self.word::<u32>(offset)?;
        // SAFETY: the word is aligned and in the mapping, which lives as long as `self`.
        let value = u32::from_le(unsafe { word.read_volatile() });
        Some(if self.mapping.is_lost() {
            u32::MAX
        } else {
            value
        })
    }

    /// Reads the 64-bit register at `offset` in one access; `None` if it is not aligned or not inside the mapping.
    #[inline]
    #[must_use]
    pub fn read64(&self, offset: usize) -> Option<u64> {
        #[cfg(simulation)]
        crate::simulation::turn(
            crate::simulation::ActorStep::ReadRegister,
            [offset as u64, 0],
        );
        let word = self.word::<u64>(offset)?;
        // SAFETY: as in `read32`.
        let value = u64::from_le(unsafe { word.read_volatile() });
        Some(if self.mapping.is_lost() {
            u64::MAX
        } else {
            value
        })
    }

    /// Writes the 32-bit register at `offset`; `None` if it is not aligned or not inside the mapping.
    #[inline]
    pub fn write32(&self, offset: usize, value: u32) -> Option<()> {
        #[cfg(simulation)]
        crate::simulation::turn(
            crate::simulation::ActorStep::WriteRegister,
            [offset as u64, 0],
        );
        let word = self.word::<u32>(offset)?;
        // SAFETY: as in `read32`; a device is always mapped for writing.
        unsafe { word.write_volatile(value.to_le()) };
        Some(())
    }

    /// Writes the 64-bit register at `offset` in one access; `None` if it is not aligned or not inside the mapping.
    #[inline]
    pub fn write64(&self, offset: usize, value: u64) -> Option<()> {
        #[cfg(simulation)]
        crate::simulation::turn(
            crate::simulation::ActorStep::WriteRegister,
            [offset as u64, 0],
        );
        let word = self.word::<u64>(offset)?;
        // SAFETY: as in `write32`.
        unsafe { word.write_volatile(value.to_le()) };
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;
    use crate::{host_page_size, memfd};

    fn registers(len: usize) -> (File, MappedRegisters) {
        let file = File::from(memfd(c"registers", len as u64).expect("memory"));
        let mapping = Mapping::device(file.as_fd(), 0, len).expect("map");
        (file, MappedRegisters::new(Arc::new(mapping)))
    }

    #[test]
    fn words_are_little_endian_aligned_and_inside() {
        let (_file, registers) = registers(host_page_size());
        registers.write64(8, 0x0102_0304_0506_0708).expect("inside");
        assert_eq!(registers.read64(8), Some(0x0102_0304_0506_0708));
        assert_eq!(registers.read32(8), Some(0x0506_0708));
        assert_eq!(registers.read32(12), Some(0x0102_0304));
        registers.write32(12, 9).expect("inside");
        assert_eq!(registers.read64(8), Some(0x0000_0009_0506_0708));
        for offset in [2, host_page_size(), usize::MAX - 3] {
            assert_eq!(registers.read32(offset), None);
            assert_eq!(registers.write32(offset, 0), None);
        }
        for offset in [4, host_page_size() - 4] {
            assert_eq!(registers.read64(offset), None);
            assert_eq!(registers.write64(offset, 0), None);
        }
    }

    #[test]
    fn registers_of_a_device_that_is_gone_do_not_keep_what_is_written() {
        let (file, registers) = registers(host_page_size());
        registers.write32(0x14, 1).expect("inside");
        file.set_len(0).expect("cut short");
        registers.write32(0x14, 0x46_0001).expect("inside");
        assert_eq!(registers.read32(0x14), Some(u32::MAX));
        assert_eq!(registers.read64(0x10), Some(u64::MAX));
    }

    #[test]
    fn nobody_reads_anything_between_a_device_and_ones() {
        const PATTERN: u64 = 0xA5A5_5A5A_A5A5_5A5A;
        let len = 2 * host_page_size();
        for _ in 0..100 {
            let (_file, registers) = registers(len);
            registers.write64(len - 8, PATTERN).expect("inside");
            std::thread::scope(|scope| {
                let reader = scope.spawn(|| {
                    let word = registers.word::<u64>(len - 8).expect("inside");
                    loop {
                        // SAFETY: as in `read64`, which cannot be used because it replaces a lost device's value by ones.
                        match unsafe { word.read_volatile() } {
                            PATTERN => {}
                            value => return (value, registers.mapping.is_lost()),
                        }
                    }
                });
                registers.mapping.detach_device().expect("give up");
                assert_eq!(reader.join().expect("the reader"), (u64::MAX, true));
            });
        }
    }
}

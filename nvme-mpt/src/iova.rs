//! A host controller's IOVA space: who has which part of it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Parts start at multiples of this, so that the IOMMU can map them with large pages.
const ALIGNMENT: u64 = 2 << 20;

/// The addresses that a host controller can be given, allotted so that no two parts overlap or
/// touch: a stretch of addresses that goes on without a gap lies in one part.
#[derive(Debug)]
pub struct IovaSpace {
    end: u64,
    /// Start and end of each part that is taken.
    taken: Mutex<BTreeMap<u64, u64>>,
}

impl IovaSpace {
    /// The space of a software controller: as large as a 52-bit physical address space.
    /// Its first part is never allotted, so that no address of a command that was not translated
    /// is ever a valid one.
    #[must_use]
    pub fn software() -> Self {
        Self {
            end: 1 << 52,
            taken: Mutex::new(BTreeMap::from([(0, 1 << 32)])),
        }
    }

    /// Takes the first part with room for `len` bytes; it is given back when dropped.
    #[must_use]
    pub fn allocate(self: &Arc<Self>, len: u64) -> Option<IovaRange> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let mut start = 0_u64;
        for (&next, &end) in taken.iter() {
            if next > start && next - start > len {
                break;
            }
            start = (end + 1).checked_next_multiple_of(ALIGNMENT)?;
        }
        let end = start
            .checked_add(len)
            .filter(|end| *end <= self.end && len > 0)?;
        taken.insert(start, end);
        Some(IovaRange {
            space: self.clone(),
            start,
        })
    }
}

/// A part of an [`IovaSpace`] that is its holder's alone.
#[derive(Debug)]
pub struct IovaRange {
    space: Arc<IovaSpace>,
    start: u64,
}

impl IovaRange {
    /// The first address of the part.
    #[inline]
    #[must_use]
    pub fn start(&self) -> u64 {
        self.start
    }
}

impl Drop for IovaRange {
    fn drop(&mut self) {
        self.space
            .taken
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&self.start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_never_overlap_and_come_back() {
        let space = Arc::new(IovaSpace::software());
        let a = space.allocate(1 << 30).expect("room");
        let b = space.allocate(4096).expect("room");
        let c = space.allocate(1 << 30).expect("room");
        assert!(a.start() >= 1 << 32);
        assert!(b.start() > a.start() + (1 << 30));
        assert!(c.start() >= b.start() + 4096);
        let start = b.start();
        drop(b);
        let touching = space.allocate(ALIGNMENT).expect("room elsewhere");
        assert!(touching.start() > c.start());
        let inside = space.allocate(ALIGNMENT - 1).expect("the gap");
        assert_eq!(inside.start(), start);
        assert!(space.allocate(1 << 52).is_none());
        assert!(space.allocate(u64::MAX).is_none());
        assert!(space.allocate(0).is_none());
    }
}

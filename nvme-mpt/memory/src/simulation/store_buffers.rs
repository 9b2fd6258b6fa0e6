//! Store buffers: stores that an actor has made and that other actors do not see yet. Stores become visible in program
//! order, and a load may be executed before an older store to another location (Intel SDM, volume 3, section 9.2).
#![expect(unsafe_code, reason = "carries out stores that were delayed")]

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use super::{ActorStep, turn, with};

/// Word whose stores can be delayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DelayedStoreTarget {
    Byte(*const AtomicU8),
    Word(*const AtomicU32),
    Long(*const AtomicU64),
}

impl DelayedStoreTarget {
    fn address(self) -> usize {
        match self {
            Self::Byte(place) => place.addr(),
            Self::Word(place) => place.addr(),
            Self::Long(place) => place.addr(),
        }
    }

    fn store(self, value: u64) {
        // SAFETY: a place is valid as long as a store to it is delayed: `forget` is called before it goes away.
        unsafe {
            match self {
                Self::Byte(place) => (*place).store(value as u8, Ordering::SeqCst),
                Self::Word(place) => (*place).store(value as u32, Ordering::SeqCst),
                Self::Long(place) => (*place).store(value, Ordering::SeqCst),
            }
        }
    }

    fn load(self) -> u64 {
        // SAFETY: the caller keeps the place valid.
        unsafe {
            match self {
                Self::Byte(place) => (*place).load(Ordering::SeqCst).into(),
                Self::Word(place) => (*place).load(Ordering::SeqCst).into(),
                Self::Long(place) => (*place).load(Ordering::SeqCst),
            }
        }
    }
}

type StoreBuffers = BTreeMap<usize, VecDeque<(DelayedStoreTarget, u64)>>;

thread_local! {
    static BUFFERS: RefCell<StoreBuffers> = const { RefCell::new(BTreeMap::new()) };
}

/// Stores a value, immediately or with a delay.
pub(crate) fn store(place: DelayedStoreTarget, value: u64) {
    turn(ActorStep::Store, [place.address() as u64, value]);
    let Some((actor, late)) = with(|simulator| (simulator.actor(), simulator.delays_store()))
    else {
        return place.store(value);
    };
    BUFFERS.with_borrow_mut(|buffers| {
        let buffer = buffers.entry(actor).or_default();
        if late || !buffer.is_empty() {
            buffer.push_back((place, value));
        } else {
            place.store(value);
        }
    });
}

/// Loads a value: that of the running actor's own latest store, or else the visible value.
pub(crate) fn load(place: DelayedStoreTarget) -> u64 {
    turn(ActorStep::Load, [place.address() as u64, 0]);
    let own = with(|simulator| {
        BUFFERS.with_borrow(|buffers| {
            let buffer = buffers.get(&simulator.actor())?;
            let mut own = buffer.iter().rev();
            own.find(|(other, _)| *other == place)
                .map(|(_, value)| *value)
        })
    });
    own.flatten().unwrap_or_else(|| place.load())
}

/// Makes all delayed stores of an actor visible.
pub fn drain(actor: usize) {
    while drain_one(actor) {}
}

/// Makes the oldest delayed store of an actor visible. Returns whether there was one.
pub fn drain_one(actor: usize) -> bool {
    BUFFERS.with_borrow_mut(|buffers| {
        let store = buffers.get_mut(&actor).and_then(VecDeque::pop_front);
        store.map(|(place, value)| place.store(value)).is_some()
    })
}

/// Makes all delayed stores of the running actor visible.
pub(crate) fn drain_own() {
    with(|simulator| drain(simulator.actor()));
}

/// Executes all delayed stores to memory that is about to be freed, and all stores before them.
pub(crate) fn forget(memory: &Range<usize>) {
    // A word may be dropped while the thread ends, when the buffers no longer exist.
    let _ended = BUFFERS.try_with(|buffers| {
        for buffer in buffers.borrow_mut().values_mut() {
            let hits = |(place, _): &(DelayedStoreTarget, u64)| memory.contains(&place.address());
            if let Some(last) = buffer.iter().rposition(hits) {
                for (place, value) in buffer.drain(..=last) {
                    place.store(value);
                }
            }
        }
    });
}

/// Drops all delayed stores, because the memory of the simulation was freed.
pub fn clear() {
    BUFFERS.with_borrow_mut(BTreeMap::clear);
}

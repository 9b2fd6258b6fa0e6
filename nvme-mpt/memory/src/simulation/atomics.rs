//! Atomics whose stores may become visible late, and whose accesses let other actors run.

use std::sync::atomic::{self, Ordering};

use super::store_buffers::{self, DelayedStoreTarget};
use super::{ActorStep, turn};

/// Executes a fence. A sequentially consistent one makes all stores of the actor visible.
pub fn fence(order: Ordering) {
    atomic::fence(order);
    // Weaker fences do not prevent a load from being executed before an earlier store.
    if order == Ordering::SeqCst {
        store_buffers::drain_own();
        turn(ActorStep::Fence, [0; 2]);
    }
}

macro_rules! atomic {
    ($(#[$doc:meta])* $name:ident, $value:ty, $place:ident, $word:ty) => {
        $(#[$doc])*
        #[derive(Debug, Default)]
        pub struct $name(atomic::$name);

        impl $name {
            /// Creates a word with this value.
            #[must_use]
            pub const fn new(value: $value) -> Self {
                Self(atomic::$name::new(value))
            }

            fn place(&self) -> DelayedStoreTarget {
                DelayedStoreTarget::$place((&raw const self.0).cast::<$word>())
            }

            /// Reads the word.
            pub fn load(&self, _: Ordering) -> $value {
                from_word(store_buffers::load(self.place()))
            }

            /// Writes the word. A sequentially consistent store is visible immediately.
            pub fn store(&self, value: $value, order: Ordering) {
                store_buffers::store(self.place(), to_word(value));
                if order == Ordering::SeqCst {
                    store_buffers::drain_own();
                }
            }

            /// Writes the word, and returns its previous value.
            pub fn swap(&self, value: $value, order: Ordering) -> $value {
                turn(ActorStep::Swap, [0; 2]);
                store_buffers::drain_own();
                self.0.swap(value, order)
            }

            /// Writes the word if its present value is `current`.
            ///
            /// # Errors
            /// Returns the present value if it is not `current`.
            pub fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                turn(ActorStep::Exchange, [0; 2]);
                store_buffers::drain_own();
                self.0.compare_exchange(current, new, success, failure)
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                let start = (&raw const self.0).addr();
                store_buffers::forget(&(start..start + size_of::<$value>()));
            }
        }
    };
}

trait AtomicValue: Sized {
    fn to(self) -> u64;
    fn from(word: u64) -> Self;
}

impl AtomicValue for bool {
    fn to(self) -> u64 {
        self.into()
    }
    fn from(word: u64) -> Self {
        word != 0
    }
}

impl AtomicValue for u64 {
    fn to(self) -> u64 {
        self
    }
    fn from(word: u64) -> Self {
        word
    }
}

impl AtomicValue for usize {
    fn to(self) -> u64 {
        self as u64
    }
    fn from(word: u64) -> Self {
        word as Self
    }
}

fn to_word<T: AtomicValue>(value: T) -> u64 {
    value.to()
}

fn from_word<T: AtomicValue>(word: u64) -> T {
    T::from(word)
}

atomic!(
    /// Simulated [`std::sync::atomic::AtomicBool`].
    AtomicBool, bool, Byte, atomic::AtomicU8
);
atomic!(
    /// Simulated [`std::sync::atomic::AtomicU64`].
    AtomicU64, u64, Long, atomic::AtomicU64
);
atomic!(
    /// Simulated [`std::sync::atomic::AtomicUsize`].
    AtomicUsize, usize, Long, atomic::AtomicU64
);

macro_rules! counter {
    ($($name:ident: $value:ty),*) => {$(
        impl $name {
            /// Adds to the word, and returns its previous value.
            pub fn fetch_add(&self, value: $value, order: Ordering) -> $value {
                turn(ActorStep::Add, [0; 2]);
                store_buffers::drain_own();
                self.0.fetch_add(value, order)
            }

            /// Subtracts from the word, and returns its previous value.
            pub fn fetch_sub(&self, value: $value, order: Ordering) -> $value {
                turn(ActorStep::Add, [0; 2]);
                store_buffers::drain_own();
                self.0.fetch_sub(value, order)
            }

            /// Raises the word to at least a value, and returns its previous value.
            pub fn fetch_max(&self, value: $value, order: Ordering) -> $value {
                turn(ActorStep::Add, [0; 2]);
                store_buffers::drain_own();
                self.0.fetch_max(value, order)
            }
        }
    )*};
}

counter!(AtomicU64: u64, AtomicUsize: usize);

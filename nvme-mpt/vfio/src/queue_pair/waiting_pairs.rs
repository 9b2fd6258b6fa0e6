//! Queue pairs of a drive on which heavy commands wait.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use nvme_mpt_memory::sync::Mutex;

/// Number of words with a bit for each pair: a drive has at most 65,535 I/O queue pairs.
const WORDS: usize = 1 << 10;

/// Numbers of a drive's queue pairs, and the pairs on which heavy commands wait.
#[derive(Debug)]
pub(super) struct WaitingPairs {
    /// Number of pairs that wait. Most callers need no more than this.
    count: AtomicU64,
    /// The pairs that wait: a bit for each pair, by its number.
    bits: Box<[AtomicU64; WORDS]>,
    /// Number of words that have a bit of a pair.
    used_words: AtomicUsize,
    numbers: Mutex<PairNumbers>,
}

/// Numbers that pairs have, or had.
#[derive(Debug, Default)]
struct PairNumbers {
    /// Smallest number that no pair has had.
    next: u16,
    /// Numbers of pairs that were deleted.
    free: Vec<u16>,
}

impl Default for WaitingPairs {
    fn default() -> Self {
        Self {
            count: AtomicU64::new(0),
            bits: Box::new([const { AtomicU64::new(0) }; WORDS]),
            used_words: AtomicUsize::new(0),
            numbers: Mutex::default(),
        }
    }
}

impl WaitingPairs {
    /// Returns a number for a new pair, which no other pair has.
    pub(super) fn register_pair(&self) -> u16 {
        let mut numbers = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(number) = numbers.free.pop() {
            return number;
        }
        let number = numbers.next;
        numbers.next = number.saturating_add(1);
        let words = usize::from(number) / 64 + 1;
        self.used_words.fetch_max(words, Ordering::Relaxed);
        number
    }

    /// Frees the number of a pair that was deleted. The pair must not wait.
    pub(super) fn unregister_pair(&self, pair: u16) {
        let mut numbers = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        numbers.free.push(pair);
    }

    /// Records that a pair waits now, or that it no longer does. Only called at a change.
    pub(super) fn set_waiting(&self, pair: u16, is_waiting: bool) {
        let (word, bit) = Self::place(pair);
        if is_waiting {
            self.bits[word].fetch_or(bit, Ordering::Relaxed);
            self.count.fetch_add(1, Ordering::Relaxed);
        } else {
            self.bits[word].fetch_and(!bit, Ordering::Relaxed);
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Returns the number of pairs that wait.
    #[inline]
    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Returns the number of pairs that wait, apart from a pair of which it is known whether it does.
    #[inline]
    pub(super) fn count_elsewhere(&self, is_waiting: bool) -> u64 {
        // The pair counts from its own report on, so the difference is never negative.
        self.count() - u64::from(is_waiting)
    }

    /// Returns whether turn `turn` is that of a pair, among the waiting pairs and itself, in the order of their numbers.
    pub(super) fn has_turn(&self, pair: u16, turn: u64) -> bool {
        let (own_word, bit) = Self::place(pair);
        let (mut before, mut count) = (0, 0);
        let words = &self.bits[..self.used_words.load(Ordering::Relaxed)];
        for (index, word) in words.iter().enumerate() {
            let mut bits = word.load(Ordering::Relaxed);
            if index == own_word {
                bits |= bit;
                before = count + u64::from((bits & (bit - 1)).count_ones());
            }
            count += u64::from(bits.count_ones());
        }
        turn % count.max(1) == before
    }

    /// Returns the index of the word with a pair's bit, and the bit.
    fn place(pair: u16) -> (usize, u64) {
        (usize::from(pair) / 64, 1 << (pair % 64))
    }
}

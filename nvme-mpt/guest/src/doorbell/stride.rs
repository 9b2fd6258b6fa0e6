//! Doorbell stride (`CAP.DSTRD`), and the number of queue pairs that it allows (Base 2.0, sections 3.1.3.1 and 5.8).

use std::str::FromStr;

use nvme_spec::registers::Doorbell;

use super::{DoorbellMode, MAX_QUEUE_PAIRS};
use crate::address::PAGE_SIZE;

/// `CAP.DSTRD` for one cache line per doorbell, so that two vCPUs never write the same line.
pub(super) const CACHE_LINE_DSTRD: u8 = 4;

/// Distance between doorbells in bytes, in the registers and in the Doorbell Buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DoorbellStride {
    /// A cache line of 64 bytes, or less if the Doorbell Buffer would otherwise have no room for all queue pairs: 32 bytes from
    /// 32 queue pairs on, 16 from 64 on, 8 from 128 on, 4 from 256 to 511.
    #[default]
    Widest,
    /// 4 bytes (`CAP.DSTRD` = 0), for drivers that support no other stride.
    Bytes4,
    /// 64 bytes (`CAP.DSTRD` = 4), with fewer queue pairs if the Doorbell Buffer has no room for all.
    Bytes64,
}

impl DoorbellStride {
    /// Returns `CAP.DSTRD` of a function with `queue_pairs` I/O queue pairs.
    #[must_use]
    pub fn dstrd(self, mode: DoorbellMode, queue_pairs: u16) -> u8 {
        let fits = |dstrd: &u8| Doorbell::area_bytes(queue_pairs, *dstrd) <= PAGE_SIZE;
        match self {
            Self::Bytes4 => 0,
            Self::Widest if mode.offers_buffer() => {
                (0..=CACHE_LINE_DSTRD).rev().find(fits).unwrap_or(0)
            }
            Self::Widest | Self::Bytes64 => CACHE_LINE_DSTRD,
        }
    }

    /// Returns the maximum number of I/O queue pairs of a function.
    ///
    /// If the guest may use a Doorbell Buffer, the maximum is limited: the buffer has one memory page for all doorbells, with
    /// the stride of the registers. Otherwise there is no such limit.
    #[must_use]
    pub fn queue_pairs_max(self, mode: DoorbellMode) -> u16 {
        if !mode.offers_buffer() {
            return MAX_QUEUE_PAIRS;
        }
        let narrowest = match self {
            Self::Widest | Self::Bytes4 => 0,
            Self::Bytes64 => CACHE_LINE_DSTRD,
        };
        // The result is at most 511.
        (PAGE_SIZE / Doorbell::area_bytes(0, narrowest) - 1) as u16
    }
}

impl FromStr for DoorbellStride {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "4" => Ok(Self::Bytes4),
            "64" => Ok(Self::Bytes64),
            _ => Err("Doorbells lie 4 or 64 bytes apart".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_fit_the_doorbell_buffer() {
        let dstrd = |queues| DoorbellStride::Widest.dstrd(DoorbellMode::Shadow, queues);
        assert_eq!(
            [1, 31, 32, 63, 64, 127, 128, 255, 256, 511].map(dstrd),
            [4, 4, 3, 3, 2, 2, 1, 1, 0, 0]
        );
        for stride in [
            DoorbellStride::Widest,
            DoorbellStride::Bytes4,
            DoorbellStride::Bytes64,
        ] {
            for mode in [DoorbellMode::Auto, DoorbellMode::Shadow] {
                for queues in 1..=stride.queue_pairs_max(mode) {
                    let area = Doorbell::area_bytes(queues, stride.dstrd(mode, queues));
                    assert!(area <= PAGE_SIZE, "{stride:?} {queues}");
                }
            }
        }
        let widest = |mode| DoorbellStride::Widest.dstrd(mode, 64);
        assert_eq!(widest(DoorbellMode::Auto), 2);
        assert_eq!(widest(DoorbellMode::Mapped), 4);
    }

    #[test]
    fn a_stride_that_was_chosen_stays_and_bounds_the_queue_pairs() {
        let most = |stride: DoorbellStride, mode| {
            let pairs = stride.queue_pairs_max(mode);
            (stride.dstrd(mode, pairs), pairs)
        };
        for mode in [DoorbellMode::Auto, DoorbellMode::Shadow] {
            assert_eq!(most(DoorbellStride::Bytes64, mode), (4, 31));
            assert_eq!(most(DoorbellStride::Bytes4, mode), (0, 511));
            assert_eq!(most(DoorbellStride::Widest, mode), (0, 511));
        }
        for mode in [DoorbellMode::Mapped, DoorbellMode::Trap] {
            assert_eq!(most(DoorbellStride::Bytes64, mode), (4, MAX_QUEUE_PAIRS));
            assert_eq!(most(DoorbellStride::Bytes4, mode), (0, MAX_QUEUE_PAIRS));
        }
    }

    #[test]
    fn strides_are_4_and_64_bytes() {
        for (text, stride) in [
            ("4", DoorbellStride::Bytes4),
            ("64", DoorbellStride::Bytes64),
        ] {
            assert_eq!(text.parse(), Ok(stride));
        }
        for wrong in ["", "0", "8", "064", "64B", "128"] {
            assert!(wrong.parse::<DoorbellStride>().is_err(), "{wrong}");
        }
    }
}

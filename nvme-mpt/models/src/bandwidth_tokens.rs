//! Bandwidth that several transfers share: of a flash channel, or of the link to the host.
//!
//! Time is divided into slots. A slot has a token for each byte that can be transferred in it. A transfer takes free tokens,
//! beginning with the slot of its start time. So a transfer that is reserved early but starts late does not delay transfers
//! that start before it.

use crate::time::{TickUnit, TimeSpan};

/// Length of a slot, the unit of time in which bandwidth is counted.
const SLOT_TIME: TimeSpan = TimeSpan(4_000);

/// Number of time slots that are tracked. They cover the next 65 ms. Transfers that start after this time do not delay each
/// other.
const SLOTS: u64 = 1 << 14;

/// A bandwidth and the transfers that are reserved on it.
#[derive(Debug)]
pub(super) struct BandwidthTokens {
    slot_ticks: u64,
    slot_bytes: u64,
    ticks_per_byte: f64,
    /// Number of reserved bytes in each tracked time slot, as a ring.
    reserved: Box<[u32]>,
    /// Number of the first tracked time slot.
    first: u64,
    /// Number of the first time slot that may have bandwidth left. All slots before it are full.
    first_open: u64,
    /// Number of the time slot after the last one with reservations.
    end: u64,
}

impl BandwidthTokens {
    pub(super) fn new(bandwidth: u64, timebase: TickUnit) -> Self {
        let slot_bytes = (bandwidth as f64 * SLOT_TIME.0 as f64 / 1e9) as u64;
        Self {
            slot_ticks: timebase.span_ticks(SLOT_TIME).max(1),
            slot_bytes: slot_bytes.clamp(1, u32::MAX.into()),
            ticks_per_byte: timebase.transfer_ticks(1 << 30, bandwidth) as f64
                / (1_u64 << 30) as f64,
            reserved: vec![0; SLOTS as usize].into_boxed_slice(),
            first: 0,
            first_open: 0,
            end: 0,
        }
    }

    /// Drops the reservations of slots before `now`. The caller may only reserve transfers that start at `now` or afterwards.
    pub(super) fn drop_before(&mut self, now: u64) {
        let first = now / self.slot_ticks;
        if first <= self.first {
            return;
        }
        for slot in self.first..first.min(self.end) {
            self.reserved[(slot % SLOTS) as usize] = 0;
        }
        self.first = first;
        self.first_open = self.first_open.max(first);
    }

    /// Reserves a transfer of `bytes` bytes that starts at `start` at the earliest. Returns the time when the last byte is
    /// transferred.
    pub(super) fn transfer(&mut self, start: u64, bytes: u64) -> u64 {
        let alone = start + (bytes as f64 * self.ticks_per_byte).round() as u64;
        let mut slot = (start / self.slot_ticks).max(self.first_open);
        let mut rest = bytes;
        let mut end = start;
        while rest > 0 {
            if slot >= self.first + SLOTS {
                let beyond = (rest as f64 * self.ticks_per_byte).round() as u64;
                return alone.max(slot.saturating_mul(self.slot_ticks).saturating_add(beyond));
            }
            let taken = &mut self.reserved[(slot % SLOTS) as usize];
            let part = rest.min(self.slot_bytes - u64::from(*taken));
            *taken += part as u32;
            self.end = self.end.max(slot + 1);
            rest -= part;
            if part > 0 {
                let share = u64::from(*taken) as f64 / self.slot_bytes as f64;
                end = slot * self.slot_ticks + (share * self.slot_ticks as f64).round() as u64;
            }
            if slot == self.first_open && u64::from(*taken) == self.slot_bytes {
                self.first_open += 1;
            }
            slot += 1;
        }
        alone.max(end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a bandwidth of 1000 bytes per microsecond.
    fn tokens() -> BandwidthTokens {
        BandwidthTokens::new(1_000_000_000, TickUnit::Nanoseconds)
    }

    #[test]
    fn a_transfer_alone_takes_its_share_of_a_second() {
        assert_eq!(tokens().transfer(1234, 10_000), 11_234);
        assert_eq!(tokens().transfer(0, 1), 1);
        assert_eq!(tokens().transfer(7, 0), 7);
    }

    #[test]
    fn transfers_that_meet_share_the_bandwidth() {
        let mut tokens = tokens();
        let ends = (0..10).map(|_| tokens.transfer(0, 10_000));
        assert_eq!(ends.max(), Some(100_000));
    }

    #[test]
    fn a_later_start_delays_no_others() {
        let mut tokens = tokens();
        assert_eq!(tokens.transfer(1_000_000, 4_000), 1_004_000);
        assert_eq!(tokens.transfer(0, 4_000), 4_000);
        assert!(tokens.transfer(1_000_000, 4_000) >= 1_008_000);
    }

    #[test]
    fn the_bandwidth_is_never_exceeded() {
        let mut tokens = tokens();
        let (mut now, mut seed, mut bytes, mut last) = (0, 1_u64, 0, 0);
        for _ in 0..20_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            now += (seed >> 40) % 8_000;
            tokens.drop_before(now);
            let length = (seed >> 20) % 10_000;
            bytes += length;
            last = last.max(tokens.transfer(now + (seed >> 50) % 20_000, length));
            // The bytes that are transferred until `last` exceed the bandwidth by at most one slot.
            assert!(bytes <= last + 4_000);
        }
    }

    #[test]
    fn a_transfer_in_the_far_future_takes_its_time() {
        let mut tokens = tokens();
        assert!(tokens.transfer(10_000_000_000, 5_000) >= 10_000_005_000);
    }
}

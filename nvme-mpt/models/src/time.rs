//! Time in models: ticks of the host's clock, or ticks of a clock that a test advances.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use nvme_mpt_memory::clock::ticks_in;

/// Unit of a model's ticks, which is chosen when the model is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TickUnit {
    /// A tick of the host's clock.
    Host,
    /// A nanosecond.
    Nanoseconds,
}

impl TickUnit {
    /// Converts nanoseconds into ticks, rounded to the nearest tick.
    pub(crate) fn ticks(self, nanoseconds: f64) -> u64 {
        // The number of ticks in one second gives the rate with nine digits.
        let per_second = match self {
            Self::Host => ticks_in(Duration::from_secs(1)) as f64,
            Self::Nanoseconds => 1e9,
        };
        (nanoseconds * per_second / 1e9).round() as u64
    }

    /// Converts a span to ticks, rounded to the nearest.
    #[must_use]
    pub fn span_ticks(self, span: TimeSpan) -> u64 {
        self.ticks(span.0 as f64)
    }

    /// Returns the number of ticks that a transfer of `bytes` bytes takes with `bandwidth` bytes per second.
    pub(crate) fn transfer_ticks(self, bytes: u64, bandwidth: u64) -> u64 {
        self.ticks(bytes as f64 / bandwidth as f64 * 1e9)
    }
}

/// A duration in nanoseconds, written as a number with a suffix ns, us, ms or s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TimeSpan(pub u64);

/// Maximum duration in a profile: one minute, after which drivers have timed out.
const TIME_SPAN_MAX: u64 = 60_000_000_000;

const SUFFIXES: [(&str, u64); 4] = [
    ("ns", 1),
    ("us", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
];

/// A text that is not a valid [`TimeSpan`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "\"{0}\" is not a time: write a whole number with ns, us, ms or s, up to 60s, such as 12us"
)]
pub struct TimeSpanError(String);

impl FromStr for TimeSpan {
    type Err = TimeSpanError;

    fn from_str(text: &str) -> Result<Self, TimeSpanError> {
        let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
        let suffix = &text[digits.len()..];
        let unit = SUFFIXES.iter().find(|(name, _)| *name == suffix);
        unit.and_then(|(_, unit)| digits.parse::<u64>().ok()?.checked_mul(*unit))
            .filter(|nanoseconds| *nanoseconds <= TIME_SPAN_MAX && !text.starts_with('+'))
            .map(Self)
            .ok_or_else(|| TimeSpanError(text.to_owned()))
    }
}

impl fmt::Display for TimeSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = |(_, unit): &&(&str, u64)| self.0.is_multiple_of(*unit);
        match SUFFIXES.iter().rev().find(exact) {
            Some((suffix, unit)) if self.0 != 0 => write!(f, "{}{suffix}", self.0 / unit),
            _ => write!(f, "{}ns", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_written_as_people_write_them() {
        for (text, nanoseconds) in [
            ("0ns", 0),
            ("12us", 12_000),
            ("3ms", 3_000_000),
            ("60s", TIME_SPAN_MAX),
        ] {
            let span: TimeSpan = text.parse().expect(text);
            assert_eq!((span.0, span.to_string().as_str()), (nanoseconds, text));
        }
        for text in [
            "",
            "12",
            "us",
            "+1us",
            "-1us",
            "1.5us",
            "61s",
            "1 us",
            "9999999999999s",
        ] {
            text.parse::<TimeSpan>().expect_err(text);
        }
    }

    #[test]
    fn a_transfer_takes_its_share_of_a_second() {
        assert_eq!(TickUnit::Nanoseconds.transfer_ticks(4096, 1 << 30), 3815);
        assert_eq!(TickUnit::Nanoseconds.span_ticks(TimeSpan(12)), 12);
        let microsecond = TickUnit::Host.span_ticks(TimeSpan(1_000_000));
        assert!(microsecond.abs_diff(ticks_in(Duration::from_millis(1))) <= 1);
    }
}

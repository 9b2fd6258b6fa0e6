//! Maximum Data Transfer Size that a function reports to its guest (Base 2.0, Figure 275, `MDTS`).

use std::fmt;
use std::str::FromStr;

use nvme_lease::range::ByteSize;

use crate::address::PAGE_SIZE;

/// Maximum Data Transfer Size, as a power of two of 4 KiB pages: 8 KiB to 2 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mdts(u8);

impl Mdts {
    /// Smallest size, 8 KiB: the MDTS value for one page, 0, means no limit.
    pub const MIN: Self = Self(1);

    /// Largest size, 2 MiB: its PRP list fits in one page.
    pub const MAX: Self = Self(9);

    /// Creates the size from a power of two of pages, clamped to the valid range.
    #[must_use]
    pub fn from_log2_pages(log2: u8) -> Self {
        Self(log2).clamp(Self::MIN, Self::MAX)
    }

    /// Returns the power of two of pages, as in Identify Controller.
    #[must_use]
    pub const fn log2_pages(self) -> u8 {
        self.0
    }

    /// Returns the size in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        PAGE_SIZE << self.0
    }
}

impl FromStr for Mdts {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = "It is a power of two from 8K to 2M; of 4K there is no MDTS, as its value stands for no limit";
        let ByteSize(bytes) = text.parse().map_err(|_| wrong)?;
        let sizes = (Self::MIN.0..=Self::MAX.0).map(Self);
        let mut found = sizes.filter(|mdts| mdts.bytes() == bytes);
        found.next().ok_or(wrong)
    }
}

impl fmt::Display for Mdts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        ByteSize(self.bytes()).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_two_from_8_kib_to_2_mib() {
        for (text, log2) in [("8K", 1), ("8192", 1), ("128K", 5), ("1M", 8), ("2048K", 9)] {
            let mdts: Mdts = text.parse().expect(text);
            assert_eq!(mdts.log2_pages(), log2, "{text}");
            assert_eq!(mdts.to_string().parse(), Ok(mdts));
        }
        for wrong in [
            "4K",
            "",
            "0",
            "2K",
            "4095",
            "12K",
            "4M",
            "1G",
            "x",
            "18446744073709551615T",
        ] {
            assert!(wrong.parse::<Mdts>().is_err(), "{wrong}");
        }
        assert_eq!(Mdts::from_log2_pages(200), Mdts::MAX);
    }
}

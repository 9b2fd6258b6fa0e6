//! Weight of a lease relative to other leases.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Weight of a lease among the leases that share queue pairs: 1 to 1000, by default 100.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u16", into = "u16")]
pub struct LeaseWeight(u16);

/// The number or text is not a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "A weight is a whole number from {} to {}, as in 300; {} is the usual one",
    LeaseWeight::MIN.0,
    LeaseWeight::MAX.0,
    LeaseWeight::default().0
)]
pub struct LeaseWeightError;

impl LeaseWeight {
    /// The lowest weight.
    pub const MIN: Self = Self(1);

    /// The highest weight.
    pub const MAX: Self = Self(1000);

    /// Returns the number.
    #[must_use]
    pub fn get(self) -> u16 {
        self.0
    }
}

impl Default for LeaseWeight {
    fn default() -> Self {
        Self(100)
    }
}

impl TryFrom<u16> for LeaseWeight {
    type Error = LeaseWeightError;

    fn try_from(number: u16) -> Result<Self, LeaseWeightError> {
        let weight = Self(number);
        let fits = (Self::MIN..=Self::MAX).contains(&weight);
        fits.then_some(weight).ok_or(LeaseWeightError)
    }
}

impl From<LeaseWeight> for u16 {
    fn from(weight: LeaseWeight) -> Self {
        weight.0
    }
}

impl FromStr for LeaseWeight {
    type Err = LeaseWeightError;

    fn from_str(text: &str) -> Result<Self, LeaseWeightError> {
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        let number: Option<u16> = digits.then(|| text.parse().ok()).flatten();
        number.ok_or(LeaseWeightError)?.try_into()
    }
}

impl fmt::Display for LeaseWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_is_a_number_within_bounds() {
        for number in [1, 100, 300, 1000] {
            let weight: LeaseWeight = number.to_string().parse().expect("a weight");
            assert_eq!(
                (weight.get(), weight.to_string()),
                (number, number.to_string())
            );
        }
        for text in ["", "0", "1001", "65536", "-1", "+5", "1.5", "none", "5%"] {
            assert_eq!(text.parse::<LeaseWeight>(), Err(LeaseWeightError), "{text}");
        }
        assert_eq!(
            LeaseWeightError.to_string(),
            "A weight is a whole number from 1 to 1000, as in 300; 100 is the usual one"
        );
    }
}

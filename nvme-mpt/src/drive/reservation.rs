//! Queue pairs that are reserved for a lease.

use std::any::Any;
use std::fmt;
use std::io;

/// I/O queue pairs of a host controller that are reserved for one lease until this is dropped.
///
/// If queues of the lease live longer than the reservation, their pairs become shared.
#[derive(Debug)]
pub struct QueuePairReservation {
    key: u64,
    pairs: u16,
    _grant: Box<dyn Any + Send + Sync>,
}

impl QueuePairReservation {
    /// Creates a reservation of `pairs` queue pairs. `key` identifies the reservation at the host controller, which frees the
    /// queue pairs when `grant` is dropped.
    pub fn new(key: u64, pairs: u16, grant: impl Any + Send + Sync) -> Self {
        Self {
            key,
            pairs,
            _grant: Box::new(grant),
        }
    }

    /// Returns the reservation's identifier at the host controller.
    #[must_use]
    pub fn key(&self) -> u64 {
        self.key
    }

    /// Returns the number of pairs.
    #[must_use]
    pub fn pairs(&self) -> u16 {
        self.pairs
    }
}

/// Number of queue pairs that a lease has reserved, for messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReservedPairs {
    /// Id of the lease.
    pub lease: String,
    /// Number of its pairs.
    pub pairs: u16,
}

impl fmt::Display for ReservedPairs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { lease, pairs } = self;
        write!(f, "lease \"{lease}\" ({pairs})")
    }
}

/// Errors of reserving queue pairs.
#[derive(Debug, thiserror::Error)]
pub enum ReserveError {
    /// Other reservations leave too few pairs.
    #[error(
        "Drive {drive} cannot reserve {asked} I/O queue pairs: {left} of its {total} are left, as {}, and one stays for \
         queues without a reservation; {}",
        holders_of(holders),
        remedy(*left, holders)
    )]
    TooFew {
        /// The drive.
        drive: String,
        /// Pairs that were requested.
        asked: u16,
        /// Pairs that are available for reservations.
        left: u16,
        /// Total pairs of the drive.
        total: u16,
        /// The leases with reservations.
        holders: Vec<ReservedPairs>,
    },
    /// The number of the host controller's queue pairs is not limited.
    #[error("Only a physical drive has queue pairs to reserve: leave reserve= out")]
    Unbounded,
    /// The error of the kernel or of the drive.
    #[error("Queue pairs cannot be reserved")]
    Io(#[source] io::Error),
}

fn holders_of(holders: &[ReservedPairs]) -> String {
    match holders {
        [] => "no lease has a reservation".to_owned(),
        holders => {
            let holders: Vec<_> = holders.iter().map(ToString::to_string).collect();
            format!("reservations belong to {}", holders.join(", "))
        }
    }
}

fn remedy(left: u16, holders: &[ReservedPairs]) -> String {
    let fewer = match left {
        0 => "leave reserve= out".to_owned(),
        left => format!("use at most reserve={left}"),
    };
    match holders {
        [] => fewer,
        _ => format!("{fewer}, or remove one of these functions"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_the_holders_and_the_remedy() {
        let holder = |lease: &str, pairs| ReservedPairs {
            lease: lease.to_owned(),
            pairs,
        };
        let refusal = |left, holders| {
            let drive = "0000:01:00.0".to_owned();
            let (asked, total) = (4, 8);
            let error = ReserveError::TooFew {
                drive,
                asked,
                left,
                total,
                holders,
            };
            error.to_string()
        };
        assert_eq!(
            refusal(2, vec![holder("a", 4), holder("b", 1)]),
            "Drive 0000:01:00.0 cannot reserve 4 I/O queue pairs: 2 of its 8 are left, as reservations belong to \
             lease \"a\" (4), lease \"b\" (1), and one stays for queues without a reservation; use at most reserve=2, \
             or remove one of these functions"
        );
        let alone = refusal(0, Vec::new());
        assert!(alone.contains("no lease has a reservation"), "{alone}");
        assert!(alone.ends_with("; leave reserve= out"), "{alone}");
    }
}

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
    /// Creates a reservation of `pairs` queue pairs. By `key`, the host controller recognizes the reservation. It frees the
    /// queue pairs when `grant` is dropped.
    pub fn new(key: u64, pairs: u16, grant: impl Any + Send + Sync) -> Self {
        Self {
            key,
            pairs,
            _grant: Box::new(grant),
        }
    }

    /// Returns the identifier of this reservation of queue pairs at the host controller.
    #[must_use]
    pub fn key(&self) -> u64 {
        self.key
    }

    /// Returns the number of reserved queue pairs.
    #[must_use]
    pub fn pairs(&self) -> u16 {
        self.pairs
    }
}

/// A lease that has reserved queue pairs, for messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReservedPairs {
    /// Id of the lease.
    pub lease: String,
    /// Number of queue pairs that are reserved for the lease.
    pub pairs: u16,
}

impl fmt::Display for ReservedPairs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { lease, pairs } = self;
        write!(f, "lease \"{lease}\" ({pairs})")
    }
}

/// Error of a reservation of queue pairs.
#[derive(Debug, thiserror::Error)]
pub enum ReserveError {
    /// Too few queue pairs of the drive are left for the reservation, because other leases have reserved some.
    #[error(
        "Drive {drive} cannot reserve {requested} I/O queue pairs: {left} of its {total} are left, as {}, and one stays for \
         queues without a reservation; {}",
        holders_of(holders),
        remedy(*left, holders)
    )]
    TooFew {
        /// Path of the drive.
        drive: String,
        /// Number of queue pairs that were requested.
        requested: u16,
        /// Number of queue pairs that can still be reserved.
        left: u16,
        /// Total number of queue pairs of the drive.
        total: u16,
        /// Leases that have reserved queue pairs of the drive, each with the number of its pairs.
        holders: Vec<ReservedPairs>,
    },
    /// The host controller does not limit the number of its queue pairs, so that a reservation has no purpose.
    #[error("Only a physical drive has queue pairs to reserve: leave reserve= out")]
    Unbounded,
    /// Error of the kernel or of the drive.
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
            let (requested, total) = (4, 8);
            let error = ReserveError::TooFew {
                drive,
                requested,
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

//! Queue pairs of a drive that belong to one lease.

use std::any::Any;
use std::fmt;
use std::io;

/// I/O queue pairs of a host controller that belong to one lease, given back when dropped.
///
/// It outlives the queues of the lease: a queue that has a pair of it shares the pair afterwards.
#[derive(Debug)]
pub struct QueuePairReservation {
    key: u64,
    pairs: u16,
    _grant: Box<dyn Any + Send + Sync>,
}

impl QueuePairReservation {
    /// A reservation of `pairs` pairs, which its host controller knows by `key` and takes back when `grant` is dropped.
    pub fn new(key: u64, pairs: u16, grant: impl Any + Send + Sync) -> Self {
        Self {
            key,
            pairs,
            _grant: Box::new(grant),
        }
    }

    /// Its name at the host controller.
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

/// Queue pairs that a lease has reserved.
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
        /// Pairs that were asked for.
        asked: u16,
        /// Pairs that can be reserved.
        left: u16,
        /// Pairs of the drive.
        total: u16,
        /// The leases with reservations.
        holders: Vec<ReservedPairs>,
    },
    /// The host controller makes as many queue pairs as there are queues.
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

//! Lease of a back end: status, counters, and what its drive reports.

use std::io;
use std::time::Duration;

use nvme_spec::log::SmartHealth;
use serde::{Deserialize, Serialize};

use crate::host::{LeaseDamage, UnreportedChanges};
use crate::stats::{BackendStats, LeaseCounters};

/// State of a lease that can change while a function holds the lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseStatus {
    /// Number of leased logical blocks that exist in the drive's namespace now; 0 if the namespace was replaced.
    pub blocks: u64,
    /// Number of bytes in use, if the namespace's command set counts them; otherwise 0.
    pub used: u64,
    /// True if the leased blocks exist and the lease is not [revoked](super::LifecycleBackend::revoke).
    pub is_backed: bool,
    /// True if the drive failed permanently or was removed. Every command fails then.
    pub is_gone: bool,
}

/// Lease of a function, and the drive of the lease.
pub trait LeaseBackend {
    /// Returns the state of the lease.
    fn status(&self) -> LeaseStatus;

    /// Checks the lease's data for damage, which takes system calls.
    fn check_damage(&self) -> LeaseDamage;

    /// Returns the drive's SMART / Health Information, which covers all users of the drive together; `None` if the drive
    /// has none.
    ///
    /// # Errors
    /// Returns the drive's error. The information is unavailable while the drive is being reset or is gone.
    fn smart_health(&self) -> io::Result<Option<SmartHealth>>;

    /// Returns changes that the guest did not cause and that have not been reported to it; `None` if the command set has no
    /// change list.
    fn changes(&self) -> Option<UnreportedChanges>;

    /// Removes the changes in `reported`, which were reported to the guest, from the list of changes to report.
    fn remove_changes(&self, reported: &UnreportedChanges);

    /// Returns the lease's counters of commands and data so far, which snapshots contain.
    fn counters(&self) -> LeaseCounters;

    /// Returns the number of I/O commands completed so far.
    fn completed_commands(&self) -> u64;

    /// Returns the statistics of the lease and its queues.
    fn stats(&self) -> BackendStats;

    /// Makes everything durable that has completed so far. After a timeout, the drive still continues the flush.
    ///
    /// # Errors
    /// Returns the drive's error, or an error if completed writes were lost; [`io::ErrorKind::TimedOut`] after `time`.
    fn flush_within(&self, time: Duration) -> io::Result<()>;
}

//! Spare file descriptors of leases, which outlive the process.
//!
//! The kernel reports a failed write-back once to each open file description. If a process is killed before it records the
//! report, the report is lost: a description that is opened later does not get it. The supervisor process therefore holds
//! descriptions that no server uses, and the next server checks them for errors.

use std::fmt;
use std::os::fd::OwnedFd;

/// A store of spare file descriptors, by drive identity and lease id. The supervisor process keeps them open while servers are
/// replaced.
pub trait SpareDescriptorStore: fmt::Debug + Send + Sync {
    /// Returns a lease's descriptors, stored by this process or a predecessor.
    fn load(&self, drive: &str, lease: &str) -> Vec<OwnedFd>;

    /// Stores the lease's descriptors in place of those that the store has of it.
    fn store(&self, drive: &str, lease: &str, spare: &[OwnedFd]);

    /// Forgets and closes a lease's descriptors. After the call, no process has them open.
    fn forget(&self, drive: &str, lease: &str);
}

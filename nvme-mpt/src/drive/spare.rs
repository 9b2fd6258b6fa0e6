//! Spare descriptions of a lease's files, which outlive the process.
//!
//! The kernel reports a failed write-back once to each open file description. A process that is killed before it noted
//! that takes the report with it, as a description that is opened later begins behind it. So the keeper of a server has
//! descriptions that no process uses. The next server asks them.

use std::fmt;
use std::os::fd::OwnedFd;

/// A place for spare descriptions of leases, by the identity of their drive and their id.
pub trait SpareDescriptorStore: fmt::Debug + Send + Sync {
    /// Returns the descriptions that are kept for a lease, by this process or one before.
    fn kept(&self, drive: &str, lease: &str) -> Vec<OwnedFd>;

    /// Keeps descriptions for a lease, in place of others.
    fn keep(&self, drive: &str, lease: &str, spare: &[OwnedFd]);

    /// Closes what is kept for a lease. Once this returns, no process has it open any more.
    fn forget(&self, drive: &str, lease: &str);
}

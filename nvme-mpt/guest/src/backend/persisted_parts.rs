//! Parts of a function that outlive the process of its back end.

use std::io;
use std::os::fd::OwnedFd;

use vmm_sys_util::eventfd::EventFd;

/// Parts of a function that outlive its back end's process: the function holds them for the next one.
#[derive(Debug)]
pub struct PersistedBackendParts {
    /// File of the doorbells, from [`DoorbellPage::fd`](crate::doorbell::DoorbellPage::fd).
    pub doorbells: OwnedFd,
    /// File of the in-flight tracking, from [`InflightFile::fd`](crate::inflight::InflightFile::fd).
    pub inflight: OwnedFd,
    /// Eventfd that is signalled when there are events.
    pub events: EventFd,
}

impl PersistedBackendParts {
    /// Duplicates the descriptors of the parts.
    ///
    /// # Errors
    /// Returns the kernel's error if no descriptors are left.
    pub fn share(&self) -> io::Result<Self> {
        Ok(Self {
            doorbells: self.doorbells.try_clone()?,
            inflight: self.inflight.try_clone()?,
            events: self.events.try_clone()?,
        })
    }
}

/// Files of a function, handed to the back end's next process.
#[derive(Debug)]
pub struct PersistedBackendFiles {
    /// File of the doorbells, from [`DoorbellPage::fd`](crate::doorbell::DoorbellPage::fd).
    pub doorbells: OwnedFd,
    /// File of the in-flight tracking, from [`InflightFile::fd`](crate::inflight::InflightFile::fd).
    pub inflight: OwnedFd,
}

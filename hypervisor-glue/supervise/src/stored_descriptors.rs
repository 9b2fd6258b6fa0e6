//! The supervisor's fd store: descriptors and their names.
#![expect(
    unsafe_code,
    reason = "descriptors are compared by calls without a safe interface"
)]

use std::ffi::OsString;
use std::os::fd::{AsRawFd, OwnedFd};

/// Maximum length of `LISTEN_FDNAMES` (`MAX_ARG_STRLEN` less the variable's name).
const NAMES_MAX: usize = (128 << 10) - 64;

/// Stored descriptors, oldest first.
#[derive(Debug)]
pub(crate) struct StoredDescriptors {
    max: usize,
    descriptors: Vec<(String, OwnedFd)>,
}

/// Reason why the supervisor does not store a descriptor that it received.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FdStoreRefusal {
    /// The store is full.
    Full,
    /// `LISTEN_FDNAMES` would become too long.
    NamesTooLong,
    /// The descriptor's open file description is already stored.
    Duplicate,
}

impl StoredDescriptors {
    pub(crate) fn new(max: usize) -> Self {
        let descriptors = Vec::new();
        Self { max, descriptors }
    }

    pub(crate) fn max(&self) -> usize {
        self.max
    }

    pub(crate) fn add(&mut self, name: &str, descriptor: OwnedFd) -> Result<(), FdStoreRefusal> {
        if self
            .descriptors
            .iter()
            .any(|(_, other)| is_same(other, &descriptor))
        {
            return Err(FdStoreRefusal::Duplicate);
        }
        if self.descriptors.len() >= self.max {
            return Err(FdStoreRefusal::Full);
        }
        let names: usize = self
            .descriptors
            .iter()
            .map(|(name, _)| name.len() + 1)
            .sum();
        if names + name.len() > NAMES_MAX {
            return Err(FdStoreRefusal::NamesTooLong);
        }
        self.descriptors.push((name.to_owned(), descriptor));
        Ok(())
    }

    pub(crate) fn remove(&mut self, name: &str) {
        self.descriptors.retain(|(other, _)| other != name);
    }

    /// Returns the value of `LISTEN_FDNAMES`.
    pub(crate) fn names(&self) -> OsString {
        let names: Vec<_> = self
            .descriptors
            .iter()
            .map(|(name, _)| name.as_str())
            .collect();
        names.join(":").into()
    }

    pub(crate) fn descriptors(&self) -> impl ExactSizeIterator<Item = &OwnedFd> {
        self.descriptors.iter().map(|(_, descriptor)| descriptor)
    }
}

/// Returns whether two descriptors share one open file description. If the kernel supports no call that compares them, the
/// descriptors are treated as different.
fn is_same(one: &OwnedFd, other: &OwnedFd) -> bool {
    // Linux 6.10 (linux/fcntl.h).
    const F_DUPFD_QUERY: libc::c_int = 1027;
    const KCMP_FILE: libc::c_int = 0;
    let (one, other) = (one.as_raw_fd(), other.as_raw_fd());
    // SAFETY: the call takes numbers alone.
    match unsafe { libc::fcntl(one, F_DUPFD_QUERY, other) } {
        0 => false,
        1 => true,
        _ => {
            let own = std::process::id();
            // SAFETY: the call takes numbers alone.
            let order = unsafe { libc::syscall(libc::SYS_kcmp, own, own, KCMP_FILE, one, other) };
            order == 0
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn open() -> OwnedFd {
        File::open("/dev/null").unwrap().into()
    }

    #[test]
    fn an_open_file_is_stored_once_and_each_open_of_a_path_counts() {
        let mut stored = StoredDescriptors::new(8);
        let null = open();
        assert_eq!(stored.add("a", null.try_clone().unwrap()), Ok(()));
        assert_eq!(stored.add("b", null), Err(FdStoreRefusal::Duplicate));
        assert_eq!(stored.add("b", open()), Ok(()));
        assert_eq!(stored.names(), "a:b");
        stored.remove("a");
        assert_eq!(stored.names(), "b");
    }

    #[test]
    fn number_and_names_are_bounded() {
        let mut stored = StoredDescriptors::new(2);
        assert_eq!(stored.add("a", open()), Ok(()));
        assert_eq!(stored.add("a", open()), Ok(()));
        assert_eq!(stored.add("a", open()), Err(FdStoreRefusal::Full));
        let mut stored = StoredDescriptors::new(4096);
        let name = "n".repeat(255);
        let mut count = 0;
        while stored.add(&name, open()).is_ok() {
            count += 1;
        }
        assert_eq!(stored.add(&name, open()), Err(FdStoreRefusal::NamesTooLong));
        assert_eq!(stored.names().len(), count * 256 - 1);
        assert!(stored.names().len() <= NAMES_MAX && count > 500);
    }
}

//! Files in huge pages of 2 MiB, which the kernel sets aside for a test.

use std::fs::{self, File};

use crate::mapping::{self, MemoryError};

/// Bytes of a page.
pub const HUGE_PAGE: u64 = 2 << 20;

const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

/// Huge pages, given back when dropped.
#[derive(Debug)]
pub struct HugePages(u64);

impl HugePages {
    /// Reserves pages of the kernel. `None` where it has none to give, or not to this user.
    #[must_use]
    pub fn set_aside(count: u64) -> Option<Self> {
        let before = pool()?;
        fs::write(POOL, (before + count).to_string()).ok()?;
        // From here on, those that the kernel had are given back.
        let added = pool()?.saturating_sub(before);
        let pages = Self(added);
        (added >= count).then_some(pages)
    }

    /// Returns a file in such pages.
    ///
    /// # Errors
    /// The kernel makes none.
    pub fn file(&self) -> Result<File, MemoryError> {
        mapping::memfd_with(libc::MFD_HUGETLB | libc::MFD_HUGE_2MB)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Some(now) = pool() {
            // Pages that cannot be given back stay in the kernel's pool.
            let _ = fs::write(POOL, now.saturating_sub(self.0).to_string());
        }
    }
}

fn pool() -> Option<u64> {
    fs::read_to_string(POOL).ok()?.trim().parse().ok()
}

//! Files in huge pages of 2 MiB, which a test reserves in the kernel.

use std::fs::{self, File};

use crate::mapping::{self, MemoryError};

/// Size of a huge page in bytes.
pub const HUGE_PAGE: u64 = 2 << 20;

const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

/// Reserved huge pages, released when dropped.
#[derive(Debug)]
pub struct HugePages(u64);

impl HugePages {
    /// Reserves `count` huge pages; `None` if the kernel has too few, or if this user may not reserve them.
    #[must_use]
    pub fn reserve(count: u64) -> Option<Self> {
        let before = pool_size()?;
        fs::write(POOL, (before + count).to_string()).ok()?;
        // From here on, dropping the guard releases the pages that the kernel has reserved, even if there are too few.
        let added = pool_size()?.saturating_sub(before);
        let pages = Self(added);
        (added >= count).then_some(pages)
    }

    /// Creates a memory file in huge pages.
    ///
    /// # Errors
    /// The kernel cannot create the file.
    pub fn file(&self) -> Result<File, MemoryError> {
        mapping::memfd_with(libc::MFD_HUGETLB | libc::MFD_HUGE_2MB)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Some(now) = pool_size() {
            // If this fails, the pages stay in the kernel's pool.
            let _ = fs::write(POOL, now.saturating_sub(self.0).to_string());
        }
    }
}

fn pool_size() -> Option<u64> {
    fs::read_to_string(POOL).ok()?.trim().parse().ok()
}

//! A file whose successful sync covers every earlier write.
//!
//! After a failed write-back, the kernel treats the pages as clean: they stay in the page cache, and the next sync succeeds
//! without writing them (Linux, `mm/filemap.c` and `lib/errseq.c`). A database would then rely on data that is not on disk. So
//! after a failed sync, all ranges that were written since the last successful sync are read and written again before the next
//! sync. If the page cache has dropped such a page, this reads the disk's content, so that page cache and disk are equal again.

use std::io;
use std::ops::Range;
use std::sync::{Arc, PoisonError};

use nvme_mpt_memory::sync::{Mutex, MutexGuard};

use redb::StorageBackend;

/// Maximum number of bytes that are read and rewritten at a time.
const REWRITE_BYTES: u64 = 1 << 20;

/// A file, with the ranges that were written since the last successful sync.
#[derive(Clone, Debug)]
pub(super) struct SyncedFile<B> {
    file: B,
    unsynced: Arc<Mutex<UnsyncedWrites>>,
}

#[derive(Debug)]
struct UnsyncedWrites {
    writes: Vec<Range<u64>>,
    /// True if the last sync failed.
    has_sync_failed: bool,
}

impl<B: StorageBackend> SyncedFile<B> {
    /// Wraps a file. Its whole content counts as written since the last sync, because the predecessor may have written it.
    pub(super) fn new(file: B) -> Self {
        let mut unsynced = UnsyncedWrites {
            writes: Vec::new(),
            has_sync_failed: false,
        };
        unsynced.add(0..u64::MAX);
        Self {
            file,
            unsynced: Arc::new(Mutex::new(unsynced)),
        }
    }

    /// Reads and rewrites a range, as far as the file reaches.
    fn rewrite_range(&self, range: &Range<u64>) -> io::Result<()> {
        let end = range.end.min(self.file.len()?);
        let mut at = range.start;
        while at < end {
            let mut bytes = vec![0; REWRITE_BYTES.min(end - at) as usize];
            self.file.read(at, &mut bytes)?;
            self.file.write(at, &bytes)?;
            at += bytes.len() as u64;
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, UnsyncedWrites> {
        // After a panic, more ranges than necessary may be rewritten, which is harmless.
        self.unsynced.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl UnsyncedWrites {
    fn add(&mut self, write: Range<u64>) {
        match self.writes.last_mut() {
            Some(last) if last.end == write.start => last.end = write.end,
            _ => self.writes.push(write),
        }
    }
}

impl<B: StorageBackend> StorageBackend for SyncedFile<B> {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut unsynced = self.lock();
        if unsynced.has_sync_failed {
            unsynced
                .writes
                .iter()
                .try_for_each(|write| self.rewrite_range(write))?;
        }
        unsynced.has_sync_failed = true;
        self.file.sync_data()?;
        unsynced.has_sync_failed = false;
        unsynced.writes.clear();
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let end = offset + data.len() as u64;
        self.lock().add(offset..end);
        self.file.write(offset, data)
    }
}

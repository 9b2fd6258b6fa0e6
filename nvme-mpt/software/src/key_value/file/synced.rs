//! A file whose successful sync covers every write before it.
//!
//! What the kernel cannot write back counts as written from then on: the page cache still has it, and the next sync
//! succeeds without it (Linux, `mm/filemap.c` and `lib/errseq.c`). A database would then build on pages that no disk
//! has. So what a failed sync was to write is read and written again before the next one. The page cache may have given
//! it up meanwhile; then the disk's content is read, and the two agree again.

use std::io;
use std::ops::Range;
use std::sync::{Arc, PoisonError};

use nvme_mpt::memory::sync::{Mutex, MutexGuard};

use redb::StorageBackend;

/// Most bytes that are written again together.
const PIECE: u64 = 1 << 20;

/// A file, and its writes since the last sync that succeeded.
#[derive(Clone, Debug)]
pub(super) struct Synced<B> {
    file: B,
    unsynced: Arc<Mutex<Unsynced>>,
}

#[derive(Debug)]
struct Unsynced {
    writes: Vec<Range<u64>>,
    /// The last sync failed.
    failed: bool,
}

impl<B: StorageBackend> Synced<B> {
    /// A file that a process before this one may have written without a sync.
    pub(super) fn new(file: B) -> Self {
        let mut unsynced = Unsynced {
            writes: Vec::new(),
            failed: false,
        };
        unsynced.add(0..u64::MAX);
        Self {
            file,
            unsynced: Arc::new(Mutex::new(unsynced)),
        }
    }

    /// Reads and writes a range again, up to the end of the file.
    fn write_again(&self, range: &Range<u64>) -> io::Result<()> {
        let end = range.end.min(self.file.len()?);
        let mut at = range.start;
        while at < end {
            let mut bytes = vec![0; PIECE.min(end - at) as usize];
            self.file.read(at, &mut bytes)?;
            self.file.write(at, &bytes)?;
            at += bytes.len() as u64;
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Unsynced> {
        // At worst, more is written again than has to be.
        self.unsynced.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Unsynced {
    fn add(&mut self, write: Range<u64>) {
        match self.writes.last_mut() {
            Some(last) if last.end == write.start => last.end = write.end,
            _ => self.writes.push(write),
        }
    }
}

impl<B: StorageBackend> StorageBackend for Synced<B> {
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
        if unsynced.failed {
            unsynced
                .writes
                .iter()
                .try_for_each(|write| self.write_again(write))?;
        }
        unsynced.failed = true;
        self.file.sync_data()?;
        unsynced.failed = false;
        unsynced.writes.clear();
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let end = offset + data.len() as u64;
        self.lock().add(offset..end);
        self.file.write(offset, data)
    }
}

//! Persistent zone states: a word for each zone, in memory that is mapped from a file next to the drive's file. The states
//! survive any end of the process, and several processes can use different zones of a drive.
//!
//! A Flush or a write with FUA syncs the file after the drive's data.
//!
//! All blocks of the file are allocated when it is opened, because a store to a hole would be lost if the disk is full. Words
//! can still be lost if the file is truncated or its disk fails. Then the states exist only in this process's memory, so the
//! drive accepts no further changes.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use log::error;

use super::{ZoneError, ZoneGeometry};
use nvme_lease::range::ByteSize;
use nvme_mpt_memory::files::sync_dir;
use nvme_mpt_memory::{Mapping, MappingAccess, SharedWords};
use nvme_mpt_paths::{OFlags, OpenDirectory};

/// Magic number of the file, with its version.
const MAGIC: &[u8; 8] = b"nvmezns1";

/// Number of bytes before the words.
const HEADER: usize = 4096;

/// The state words of a drive's zones.
#[derive(Debug)]
pub(super) struct PersistedZones {
    words: SharedWords,
    path: PathBuf,
    file: Option<Arc<File>>,
    is_lost: AtomicBool,
}

/// Header of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ZoneFileHeader {
    geometry: ZoneGeometry,
    lba_shift: u8,
    count: u32,
}

impl ZoneFileHeader {
    const LEN: usize = MAGIC.len() + 4 * 8;

    fn to_bytes(self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        let ZoneGeometry { size, capacity } = self.geometry;
        for number in [size, capacity, self.lba_shift.into(), self.count.into()] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    fn describe(bytes: &[u8; Self::LEN]) -> Option<String> {
        let numbers = bytes.strip_prefix(MAGIC)?;
        let mut numbers = numbers
            .as_chunks()
            .0
            .iter()
            .copied()
            .map(u64::from_le_bytes);
        let (size, capacity) = (numbers.next()?, numbers.next()?);
        let (lba_shift, count) = (numbers.next()?, numbers.next()?);
        let bytes = |blocks: u64| match blocks.checked_shl(u32::try_from(lba_shift).ok()?) {
            Some(bytes) if bytes >> lba_shift == blocks => Some(ByteSize(bytes)),
            _ => None,
        };
        Some(format!(
            "{count} zones of {}, {} of them to be written, in blocks of {} bytes",
            bytes(size)?,
            bytes(capacity)?,
            bytes(1)?,
        ))
    }
}

/// Returns the path of the state file that belongs to a drive's file.
fn state_path(drive: &Path) -> PathBuf {
    with_suffix(drive, ".zones")
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn words_bytes(count: u32) -> usize {
    count as usize * size_of::<u64>()
}

impl PersistedZones {
    /// Creates words in memory, which are lost when the process ends.
    pub(super) fn in_memory(count: u32) -> io::Result<Self> {
        let mapping = Mapping::anonymous(words_bytes(count))?;
        let words = SharedWords::new(Arc::new(mapping), 0);
        Ok(Self {
            words: words.ok_or(io::ErrorKind::InvalidInput)?,
            path: "memory".into(),
            file: None,
            is_lost: AtomicBool::new(false),
        })
    }

    /// Opens the state file next to a drive's file. If the state file is missing, creates it with all zones empty.
    ///
    /// # Errors
    /// [`ZoneError::OtherZones`], [`ZoneError::NotZones`], [`ZoneError::NoSpace`] and [`ZoneError::Store`].
    pub(super) fn open_beside(
        drive: &Path,
        geometry: ZoneGeometry,
        lba_shift: u8,
        count: u32,
    ) -> Result<Self, ZoneError> {
        let path = state_path(drive);
        let header = ZoneFileHeader {
            geometry,
            lba_shift,
            count,
        };
        let len = HEADER + words_bytes(count);
        let failed = |source: io::Error| {
            let path = path.clone();
            match source.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ZoneError::NoSpace {
                    path,
                    bytes: len,
                    source,
                },
                _ => ZoneError::Store { path, source },
            }
        };
        let mut file = open_or_create(&path, &header).map_err(failed)?;
        let mut found = [0; ZoneFileHeader::LEN];
        match file.read_exact(&mut found) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(ZoneError::NotZones(path));
            }
            read => read.map_err(failed)?,
        }
        let expected = header.to_bytes();
        if found[..] != expected[..] {
            let expected = expected
                .try_into()
                .ok()
                .as_ref()
                .and_then(ZoneFileHeader::describe);
            return Err(match (ZoneFileHeader::describe(&found), expected) {
                (Some(found), Some(expected)) => ZoneError::OtherZones {
                    path,
                    found,
                    expected,
                },
                _ => ZoneError::NotZones(path),
            });
        }
        let mapping =
            Mapping::shared(file.as_fd(), 0, len, MappingAccess::ReadWrite).map_err(failed)?;
        allocate_blocks(&file, &mapping).map_err(failed)?;
        // Syncs the directory even if the file existed: the process that created the file may have ended before its sync.
        sync_parent(&path).map_err(failed)?;
        let words = SharedWords::new(Arc::new(mapping), HEADER);
        Ok(Self {
            words: words.ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?,
            path,
            file: Some(Arc::new(file)),
            is_lost: AtomicBool::new(false),
        })
    }

    pub(super) fn words(&self) -> &SharedWords {
        &self.words
    }

    pub(super) fn file(&self) -> Option<&Arc<File>> {
        self.file.as_ref()
    }

    /// Returns whether words are known to be lost from the file.
    #[inline]
    pub(super) fn is_lost(&self) -> bool {
        if self.words.is_lost() {
            self.mark_lost();
        }
        self.is_lost.load(Ordering::Relaxed)
    }

    /// Returns the error to report for lost words.
    pub(super) fn lost_error(&self) -> ZoneError {
        ZoneError::Lost(self.path.clone())
    }

    /// Records that words are lost, which holds until the drive is opened again.
    pub(super) fn mark_lost(&self) {
        if !self.is_lost.swap(true, Ordering::Relaxed) {
            error!(
                "The zone states in {} are lost, as the file was cut short or changed, or its disk failed. Writes, \
                 Zone Management Sends and Flushes on the drive fail until it is reopened",
                self.path.display()
            );
        }
    }
}

/// Allocates blocks for the whole mapping. The kernel writes to each page once without changing a word, even if other processes
/// store to the file meanwhile.
fn allocate_blocks(file: &File, mapping: &Mapping) -> io::Result<()> {
    match mapping.populate() {
        // The disk is full. Without this call, a store would raise SIGBUS.
        Err(error) if error.raw_os_error() == Some(libc::EFAULT) => {
            return Err(io::ErrorKind::StorageFull.into());
        }
        // Kernels before 5.14 do not support this call. A file that this version created is already allocated.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {}
        done => done?,
    }
    file.sync_all()
}

/// Makes the name of a file durable by a sync of the file's directory.
fn sync_parent(path: &Path) -> io::Result<()> {
    let path = std::path::absolute(path)?;
    let Some(dir) = path.parent() else {
        return Ok(());
    };
    sync_dir(dir)?;
    #[cfg(test)]
    SYNCED.with_borrow_mut(|synced| synced.push(dir.to_owned()));
    Ok(())
}

#[cfg(test)]
thread_local! {
    /// Directories that this thread has synced.
    static SYNCED: std::cell::RefCell<Vec<PathBuf>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// Opens a file, or creates it if it is missing. A new file is first written under another name, and then renamed. If another
/// process has created the file meanwhile, that file is opened. So all processes use one complete file.
fn open_or_create(path: &Path, header: &ZoneFileHeader) -> io::Result<File> {
    // The drive's file may be in another user's directory, so the walk to it must be safe.
    let (directory, name) = OpenDirectory::open_parent(path)?;
    let open = || directory.open_entry(name, OFlags::RDWR);
    match open() {
        Err(error) if error.is_not_found() => {}
        opened => return Ok(opened?),
    }
    directory.create_new(name, 0o600, |file| {
        let mut bytes = header.to_bytes();
        bytes.resize(HEADER + words_bytes(header.count), 0);
        file.write_all(&bytes)?;
        file.sync_all()
    })?;
    Ok(open()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_file_is_durable_once_it_is_open() {
        let dir = tempfile::tempdir().expect("a folder");
        let geometry = ZoneGeometry {
            size: 256,
            capacity: 192,
        };
        let open = || PersistedZones::open_beside(&dir.path().join("drive.img"), geometry, 12, 8);
        // The process that creates the file may end before the file's name is durable. The next process then finds the file.
        for round in ["made", "found"] {
            SYNCED.take();
            drop(open().expect("words"));
            assert_eq!(SYNCED.take(), [dir.path()], "{round}");
        }
    }
}

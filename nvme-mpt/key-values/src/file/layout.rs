//! Layout of a file of key-value pairs: a header page with format and capacity, followed by the database, which grows as
//! needed.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use redb::StorageBackend;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::VERSION;
use crate::KeyValueError;
use nvme_lease::range_lock::{ClaimError, FileRangeLock};
use nvme_mpt_paths::{OFlags, PathEntry};

const MAGIC: [u8; 8] = *b"mpt-kv\r\n";

/// Offset of the database in the file.
const DATABASE_OFFSET: u64 = 4096;

/// First bytes of a database whose creation is complete.
const DATABASE_MAGIC: [u8; 4] = *b"redb";

/// Number of bytes that are read at a time to check whether a file is empty.
const EMPTY_CHECK_BYTES: usize = 1 << 20;

#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct KeyValueFileHeader {
    magic: [u8; 8],
    version: u32,
    reserved: u32,
    /// Capacity in bytes: the length that the file had before it was formatted.
    capacity: u64,
}

/// An open file of key-value pairs.
#[derive(Clone, Debug)]
pub(super) struct KvDatabaseFile {
    path: PathBuf,
    file: Arc<File>,
    capacity: u64,
}

impl KvDatabaseFile {
    /// Opens a file of key-value pairs, or formats an empty file. Locks the file against other processes.
    pub(super) fn open(path: &Path) -> Result<(Self, FileRangeLock), KeyValueError> {
        let io = |source| KeyValueError::Io {
            path: path.to_owned(),
            source,
        };
        // Walks the path safely, since a symbolic link of one user could lead to another user's file.
        let entry = PathEntry::find(path).map_err(|error| io(error.into()))?;
        let path = entry.path().to_owned();
        if !path.symlink_metadata().map_err(io)?.is_file() {
            return Err(KeyValueError::NotAFile(path));
        }
        let open = || entry.reopen(OFlags::RDWR);
        // Length 0 extends the lock to the largest offset.
        let lock =
            FileRangeLock::claim(open().map_err(io)?, 0, 0).map_err(|error| match error {
                ClaimError::Io(source) => io(source),
                taken @ ClaimError::Taken { .. } => KeyValueError::InUse {
                    path: path.clone(),
                    source: taken,
                },
            })?;
        let file = open().map_err(io)?;
        // If a sync of the predecessor failed, the page cache may differ from the disk, so its pages are dropped.
        posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)
            .map_err(|errno| io(errno.into()))?;
        let capacity = match read_header(&file).map_err(io)? {
            Some(KeyValueFileHeader {
                version: VERSION,
                capacity,
                ..
            }) => capacity,
            Some(KeyValueFileHeader { version, .. }) => {
                return Err(KeyValueError::Version { path, version });
            }
            None if file.metadata().map_err(io)?.len() < DATABASE_OFFSET => {
                return Err(KeyValueError::TooSmall(path));
            }
            None if is_empty(&file).map_err(io)? => write_header(&file).map_err(io)?,
            None => return Err(KeyValueError::Foreign(path)),
        };
        // A process ended before it had created the database, so the file has no data to lose.
        if !has_database(&file).map_err(io)? {
            file.set_len(DATABASE_OFFSET).map_err(io)?;
            file.sync_all().map_err(io)?;
        }
        let file = Arc::new(file);
        let pairs = Self {
            path,
            file,
            capacity,
        };
        Ok((pairs, lock))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }
}

/// Reads the header; returns `None` if the file is no file of key-value pairs.
fn read_header(file: &File) -> io::Result<Option<KeyValueFileHeader>> {
    let mut bytes = [0; size_of::<KeyValueFileHeader>()];
    if file.metadata()?.len() < DATABASE_OFFSET {
        return Ok(None);
    }
    file.read_exact_at(&mut bytes, 0)?;
    let header = KeyValueFileHeader::read_from_bytes(&bytes).ok();
    Ok(header.filter(|header| header.magic == MAGIC))
}

/// Writes the header of an empty file. Returns the capacity, which is the file's length.
fn write_header(file: &File) -> io::Result<u64> {
    let capacity = file.metadata()?.len();
    let header = KeyValueFileHeader {
        magic: MAGIC,
        version: VERSION,
        reserved: 0,
        capacity,
    };
    file.write_all_at(header.as_bytes(), 0)?;
    file.sync_all()?;
    Ok(capacity)
}

fn has_database(file: &File) -> io::Result<bool> {
    let mut magic = DATABASE_MAGIC;
    if file.metadata()?.len() < DATABASE_OFFSET + magic.len() as u64 {
        return Ok(false);
    }
    file.read_exact_at(&mut magic, DATABASE_OFFSET)?;
    Ok(magic == DATABASE_MAGIC)
}

/// Returns whether a file contains only zeroes. Any other byte could be data.
fn is_empty(file: &File) -> io::Result<bool> {
    // A file without blocks can have content only at its beginning, stored in the inode.
    let has_blocks = file.metadata()?.blocks() > 0;
    let mut file = file;
    let mut bytes = vec![0; EMPTY_CHECK_BYTES];
    loop {
        let count = file.read(&mut bytes)?;
        if bytes.iter().take(count).any(|byte| *byte != 0) {
            return Ok(false);
        }
        if count == 0 || !has_blocks {
            return Ok(true);
        }
    }
}

/// Storage of the database: the part of the file after the header.
impl StorageBackend for KvDatabaseFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len().saturating_sub(DATABASE_OFFSET))
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(out, DATABASE_OFFSET + offset)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(DATABASE_OFFSET + len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, DATABASE_OFFSET + offset)
    }
}

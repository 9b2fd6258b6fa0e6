//! A file or block device as a drive, through io_uring.

mod lease;
mod queue;
mod uring;
mod watch;

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use log::info;

pub use lease::LeasedFile;
pub use queue::FileQueue;

use watch::Watched;

use super::UncorrectableBlocks;
use crate::origin::{BackingFile, Origin};
use crate::range_lock::RangeLock;

/// How a file must be read and written to bypass the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DirectAlignment {
    /// Buffers start and end at multiples of this, in bytes.
    pub(super) memory: usize,
    /// File offsets and lengths are multiples of this, in bytes.
    pub(super) offset: u64,
}

/// An open file or block device.
#[derive(Clone, Debug)]
pub struct FileStore {
    shared: Arc<SharedFile>,
}

#[derive(Debug)]
pub(super) struct SharedFile {
    path: PathBuf,
    origin: Origin,
    bytes: u64,
    pub(super) lba_shift: u8,
    /// Keeps the file open, and a block device to this process. No I/O uses it: each lease has
    /// descriptions of its own.
    opened: File,
    /// How the file is read and written without the page cache, if the file system can do that.
    pub(super) direct: Option<DirectAlignment>,
    /// Whether it can deallocate, after which a range reads as zeroes.
    pub(super) punches_holes: bool,
    pub(super) uncorrectable: Arc<UncorrectableBlocks>,
    watched: Watched,
    /// What is to be as durable as the blocks are.
    pub(super) companion: OnceLock<Arc<File>>,
}

impl FileStore {
    /// Opens a file or block device for reading and writing.
    ///
    /// # Errors
    /// What the kernel reports; `InvalidInput` for something that is neither.
    pub(super) fn open(path: &Path, lba_shift: u8) -> io::Result<Self> {
        let path = path.canonicalize()?;
        let kind = path.metadata()?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            let what = "it is neither a file nor a block device";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        let origin = Origin::of(&path)?;
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        // A block device that is mounted or otherwise in use refuses an exclusive open.
        let exclusive = if kind.is_block_device() {
            libc::O_EXCL
        } else {
            0
        };
        let mut opened = options.custom_flags(exclusive).open(&path)?;
        let bytes = opened.seek(SeekFrom::End(0))?;
        let direct = options
            .custom_flags(libc::O_DIRECT)
            .open(&path)
            .ok()
            .and_then(|file| uring::direct_alignment(&file));
        if direct.is_none() {
            info!(
                "{} cannot bypass the page cache, which costs a copy",
                path.display()
            );
        }
        let punches_holes = uring::can_punch_holes(&opened, bytes);
        // Said now, not when a guest creates its first queue.
        uring::Uring::new(1).map_err(|error| {
            let what = format!("io_uring cannot be used (is kernel.io_uring_disabled 0?): {error}");
            io::Error::new(error.kind(), what)
        })?;
        let shared = SharedFile {
            path,
            origin,
            bytes,
            lba_shift,
            opened,
            direct,
            punches_holes,
            uncorrectable: Arc::default(),
            watched: Watched::new(kind.is_file(), bytes),
            companion: OnceLock::new(),
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// Its path without links.
    #[must_use]
    pub fn canonical_path(&self) -> &Path {
        &self.shared.path
    }

    /// Returns a name of its bytes, whatever path leads to them.
    #[must_use]
    pub fn identity(&self) -> String {
        self.shared.origin.identity()
    }

    /// Its size when it was opened.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.shared.bytes
    }

    /// Whether deallocated ranges read as zeroes.
    #[must_use]
    pub fn punches_holes(&self) -> bool {
        self.shared.punches_holes
    }

    pub(super) fn uncorrectable(&self) -> &Arc<UncorrectableBlocks> {
        &self.shared.uncorrectable
    }

    /// Locks a range of the file against others who lock what they use.
    ///
    /// # Errors
    /// `WouldBlock` names the processes that have part of it locked; else what the kernel reports.
    pub(super) fn claim(&self, start: u64, length: u64) -> io::Result<RangeLock> {
        let opened = lease::reopen(&self.shared.opened, Some(&self.shared.path), 0)?;
        let mut claim = RangeLock::claim(opened, start, length)?;
        // A program that has the file of a loop device locks that, and knows of no device.
        for below in self.shared.origin.files() {
            let file = open_below(below)?;
            claim = claim.and(RangeLock::claim(file, below.offset + start, length)?);
        }
        Ok(claim)
    }

    /// Makes another file durable from now on whenever blocks are, after them.
    pub(super) fn keep_durable_with(&self, file: Arc<File>) {
        // The first one stays: a drive has one such file.
        let _ = self.shared.companion.set(file);
    }

    /// Opens the file for one lease, which is called `name` in the log and ends at byte `end` of the drive.
    ///
    /// # Errors
    /// What the kernel reports when the file cannot be opened once more.
    pub(super) fn lease(&self, name: &str, end: u64) -> io::Result<Arc<LeasedFile>> {
        let lease = Arc::new(LeasedFile::open(self.shared.clone(), name, end)?);
        self.shared.watched.tell(&lease);
        Ok(lease)
    }
}

/// Opens the file of a loop device.
fn open_below(below: &BackingFile) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).open(&below.path);
    let failed = |why: &str| {
        let path = below.path.display();
        io::Error::other(format!(
            "the loop device's file {path} cannot be locked: {why}"
        ))
    };
    let file = file.map_err(|error| failed(&error.to_string()))?;
    match below.is(&file)? {
        true => Ok(file),
        false => Err(failed("its path leads to another file")),
    }
}

//! States of zones on disk: a word for each, in memory that is shared with a file beside the drive's. So they
//! are what they were however the process ends, and several processes can each have zones of one drive.
//!
//! The file is made durable with the drive's data, by a Flush or a write with FUA.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Geometry, ZoneError};
use nvme_mpt::lease::Bytes;
use nvme_mpt::memory::{Access, Mapping, SharedWords};

/// First bytes of such a file, with its version.
const MAGIC: &[u8; 8] = b"nvmezns1";

/// Bytes before the words.
const HEADER: usize = 4096;

/// The words of a drive's zones.
#[derive(Debug)]
pub(super) struct KeptZones {
    words: SharedWords,
    file: Option<Arc<File>>,
}

/// Description of the words in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    geometry: Geometry,
    lba_shift: u8,
    count: u32,
}

impl Header {
    const LEN: usize = MAGIC.len() + 4 * 8;

    fn to_bytes(self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        let Geometry { size, capacity } = self.geometry;
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
            Some(bytes) if bytes >> lba_shift == blocks => Some(Bytes(bytes)),
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

/// The file beside a drive's file.
fn path_beside(drive: &Path) -> PathBuf {
    with_suffix(drive, ".zones")
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn bytes_of(count: u32) -> usize {
    count as usize * size_of::<u64>()
}

impl KeptZones {
    /// Words that end with the process.
    pub(super) fn in_memory(count: u32) -> io::Result<Self> {
        let mapping = Mapping::anonymous(bytes_of(count))?;
        let words = SharedWords::new(Arc::new(mapping), 0);
        Ok(Self {
            words: words.ok_or(io::ErrorKind::InvalidInput)?,
            file: None,
        })
    }

    /// The words beside a drive, which are made if there are none: all zones are empty then.
    ///
    /// # Errors
    /// [`ZoneError::OtherZones`], [`ZoneError::NotZones`] and [`ZoneError::Keep`].
    pub(super) fn beside(
        drive: &Path,
        geometry: Geometry,
        lba_shift: u8,
        count: u32,
    ) -> Result<Self, ZoneError> {
        let path = path_beside(drive);
        let header = Header {
            geometry,
            lba_shift,
            count,
        };
        let failed = |source| ZoneError::Keep {
            path: path.clone(),
            source,
        };
        let mut file = open_or_make(&path, &header).map_err(failed)?;
        let mut found = [0; Header::LEN];
        match file.read_exact(&mut found) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(ZoneError::NotZones(path));
            }
            read => read.map_err(failed)?,
        }
        let expected = header.to_bytes();
        if found[..] != expected[..] {
            let here = expected.try_into().ok().as_ref().and_then(Header::describe);
            return Err(match (Header::describe(&found), here) {
                (Some(there), Some(here)) => ZoneError::OtherZones { path, there, here },
                _ => ZoneError::NotZones(path),
            });
        }
        let len = HEADER + bytes_of(count);
        let mapping = Mapping::shared(file.as_fd(), 0, len, Access::ReadWrite).map_err(failed)?;
        let words = SharedWords::new(Arc::new(mapping), HEADER);
        Ok(Self {
            words: words.ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?,
            file: Some(Arc::new(file)),
        })
    }

    pub(super) fn words(&self) -> &SharedWords {
        &self.words
    }

    pub(super) fn file(&self) -> Option<&Arc<File>> {
        self.file.as_ref()
    }
}

/// The file at a path. One that is not there is made elsewhere, and moved there unless somebody else
/// was faster: whoever opens it sees all of it, and all see the same.
fn open_or_make(path: &Path, header: &Header) -> io::Result<File> {
    let open = || OpenOptions::new().read(true).write(true).open(path);
    match open() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        opened => return opened,
    }
    let temporary = with_suffix(path, &format!(".{}", std::process::id()));
    let made = make(&temporary, header).and_then(|()| match fs::hard_link(&temporary, path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    });
    // That it stays would be the smaller error.
    let _ = fs::remove_file(&temporary);
    made?;
    open()
}

fn make(path: &Path, header: &Header) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(&header.to_bytes())?;
    file.set_len((HEADER + bytes_of(header.count)) as u64)?;
    file.sync_all()
}

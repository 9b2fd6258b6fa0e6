//! Persistence of the flash state in a file next to the drive's file. The state is loaded when the drive is opened, and saved
//! when the drive is closed. After a crash, the next opening loads the state of the last closing.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use nvme_mpt_paths::{OFlags, OpenDirectory};

use super::SsdModel;
use super::ftl::{Ftl, FtlStateError};

/// Magic number of the file, with its version.
const MAGIC: &[u8; 8] = b"nvmeftl1";

/// Returns the path of the state file that belongs to a drive's file.
pub(crate) fn state_path(drive: &Path) -> PathBuf {
    with_suffix(drive, ".ftl")
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

impl SsdModel {
    /// Loads the saved state. Returns whether the file exists.
    ///
    /// # Errors
    /// Returns any [`FtlStateError`]. An error leaves the model unchanged.
    pub(crate) fn restore(&mut self, path: &Path) -> Result<bool, FtlStateError> {
        let opened = OpenDirectory::open_parent(path)
            .and_then(|(directory, name)| directory.open_entry(name, OFlags::RDONLY));
        let file = match opened {
            Ok(file) => file,
            Err(error) if error.is_not_found() => return Ok(false),
            Err(error) => return Err(io::Error::from(error).into()),
        };
        let mut input = BufReader::new(file);
        let mut magic = [0; 8];
        input.read_exact(&mut magic)?;
        if magic != *MAGIC {
            return Err(FtlStateError::Damaged);
        }
        let mut restored = Vec::with_capacity(self.instances.len());
        for instance in &self.instances {
            restored.push(Ftl::restore(*instance.ftl.geometry(), &mut input)?);
        }
        for (instance, ftl) in self.instances.iter_mut().zip(restored) {
            instance.ftl = ftl;
        }
        Ok(true)
    }

    /// Saves the state. Replaces the file atomically.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub(crate) fn save(&self, path: &Path) -> io::Result<()> {
        // The drive's file may be in another user's directory, so the walk to it must be safe.
        let (directory, name) = OpenDirectory::open_parent(path)?;
        directory.replace(name, 0o666, |file| self.write_to(file))?;
        Ok(())
    }

    fn write_to(&self, file: &mut File) -> io::Result<()> {
        let mut out = BufWriter::new(file);
        out.write_all(MAGIC)?;
        for instance in &self.instances {
            instance.ftl.save(&mut out)?;
        }
        out.into_inner()?.sync_all()
    }
}

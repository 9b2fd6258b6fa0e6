//! The state of a drive's flash beside its file: read when the drive is opened, written when it is
//! closed. After a crash it is that of the last time the drive was closed.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use super::SsdModel;
use super::ftl::{Ftl, StateError};

/// First bytes of such a file, with its version.
const MAGIC: &[u8; 8] = b"nvmeftl1";

/// The file beside a drive's file.
pub(crate) fn beside(drive: &Path) -> PathBuf {
    with_suffix(drive, ".ftl")
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

impl SsdModel {
    /// Takes up what was saved. Returns whether there was anything.
    ///
    /// # Errors
    /// All of [`StateError`]; then nothing is taken up.
    pub(crate) fn restore(&mut self, path: &Path) -> Result<bool, StateError> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        let mut input = BufReader::new(file);
        let mut magic = [0; 8];
        input.read_exact(&mut magic)?;
        if magic != *MAGIC {
            return Err(StateError::Damaged);
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

    /// Saves the state: there is all of it, or what was there before.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub(crate) fn save(&self, path: &Path) -> io::Result<()> {
        let temporary = with_suffix(path, &format!(".{}", std::process::id()));
        let written = self.write_to(&temporary);
        let result = written.and_then(|()| fs::rename(&temporary, path));
        if result.is_err() {
            // The temporary file is of no use then. If it stays, that is the smaller error.
            let _ = fs::remove_file(&temporary);
        }
        result
    }

    fn write_to(&self, path: &Path) -> io::Result<()> {
        let mut out = BufWriter::new(File::create(path)?);
        out.write_all(MAGIC)?;
        for instance in &self.instances {
            instance.ftl.save(&mut out)?;
        }
        out.into_inner()?.sync_all()
    }
}

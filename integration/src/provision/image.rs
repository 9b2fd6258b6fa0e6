//! File system images of directories, created without mounting.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use super::ProvisionError;
use crate::process;

/// Size in bytes of an ext4 file system without its files.
const OVERHEAD: u64 = 32 << 20;

/// Creates an ext4 image with the contents of `dir`, and `spare_bytes` bytes of free space.
///
/// The file system has no journal: after a crash it is created again, and not repaired.
///
/// # Errors
/// The directory cannot be read, or the image cannot be written.
pub(crate) fn make(dir: &Path, image: &Path, spare_bytes: u64) -> Result<(), ProvisionError> {
    let content = size_of(dir)?;
    let at = |source| ProvisionError::File {
        path: image.to_owned(),
        source,
    };
    let size = (content + content / 8 + OVERHEAD + spare_bytes).next_multiple_of(1 << 20);
    File::create(image)
        .and_then(|file| file.set_len(size))
        .map_err(at)?;
    // Debian installs mkfs in a directory that is only in the PATH of root.
    let program = ["/usr/sbin/mkfs.ext4", "/sbin/mkfs.ext4"]
        .into_iter()
        .find(|path| Path::new(path).is_file())
        .unwrap_or("mkfs.ext4");
    process::run(
        Command::new(program)
            .args(["-q", "-F", "-O", "^has_journal", "-m", "0"])
            .args(["-E", "root_owner=0:0,nodiscard", "-d"])
            .arg(dir)
            .arg(image),
    )?;
    Ok(())
}

/// Returns the total size of all files in a directory, each rounded up to whole blocks.
fn size_of(dir: &Path) -> Result<u64, ProvisionError> {
    let at = |source| ProvisionError::File {
        path: dir.to_owned(),
        source,
    };
    let mut sum = 0;
    for entry in fs::read_dir(dir).map_err(at)? {
        let entry = entry.map_err(at)?;
        let kind = entry.file_type().map_err(at)?;
        sum += if kind.is_dir() {
            size_of(&entry.path())?
        } else {
            entry.metadata().map_err(at)?.len().next_multiple_of(4096)
        };
    }
    Ok(sum)
}

//! Writer of initramfs archives (Linux, Documentation/driver-api/early-userspace/buffer-format.rst).

use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use cpio::newc::{self, Builder, ModeFileType};

/// An archive under construction.
#[derive(Debug)]
pub(super) struct CpioArchive<W> {
    out: W,
    inode: u32,
}

impl<W: Write> CpioArchive<W> {
    /// Begins an archive.
    pub(super) fn new(out: W) -> Self {
        Self { out, inode: 0 }
    }

    /// Adds a directory. Its parent directory must have been added before.
    ///
    /// # Errors
    /// Writing fails.
    pub(super) fn directory(&mut self, path: &str) -> io::Result<()> {
        self.member(path, ModeFileType::Directory, 0o755, &[])
    }

    /// Adds a file with the permission bits `mode`.
    ///
    /// # Errors
    /// Writing fails.
    pub(super) fn file(&mut self, path: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        self.member(path, ModeFileType::Regular, mode, content)
    }

    /// Adds a symbolic link.
    ///
    /// # Errors
    /// Writing fails.
    pub(super) fn symlink(&mut self, path: &str, to: &Path) -> io::Result<()> {
        self.member(
            path,
            ModeFileType::Symlink,
            0o777,
            to.as_os_str().as_bytes(),
        )
    }

    /// Ends the archive and returns the underlying writer.
    ///
    /// # Errors
    /// Writing fails.
    pub(super) fn finish(self) -> io::Result<W> {
        let mut out = newc::trailer(self.out)?;
        out.flush()?;
        Ok(out)
    }

    fn member(
        &mut self,
        path: &str,
        kind: ModeFileType,
        mode: u32,
        content: &[u8],
    ) -> io::Result<()> {
        let size = u32::try_from(content.len())
            .map_err(|_| io::Error::other(format!("{path}: too large for a cpio archive")))?;
        self.inode += 1;
        let entry = Builder::new(path).ino(self.inode).mode(mode);
        let mut entry = entry.set_mode_file_type(kind).write(&mut self.out, size);
        entry.write_all(content)?;
        entry.finish()?;
        Ok(())
    }
}

//! Writes cpio archives in the "newc" format: what Linux unpacks as its initial file system
//! (Linux, Documentation/driver-api/early-userspace/buffer-format.rst).

use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;

/// An archive being written.
#[derive(Debug)]
pub(super) struct Archive<W> {
    out: W,
    inode: u32,
}

impl<W: Write> Archive<W> {
    /// Begins an archive.
    pub(super) fn new(out: W) -> Self {
        Self { out, inode: 0 }
    }

    /// Adds a directory. Parents come before what they hold.
    ///
    /// # Errors
    /// If writing fails.
    pub(super) fn directory(&mut self, path: &str) -> io::Result<()> {
        self.member(path, DIRECTORY | 0o755, &[])
    }

    /// Adds a file with the permission bits `mode`.
    ///
    /// # Errors
    /// If writing fails.
    pub(super) fn file(&mut self, path: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        self.member(path, REGULAR | mode, content)
    }

    /// Adds a symbolic link.
    ///
    /// # Errors
    /// If writing fails.
    pub(super) fn symlink(&mut self, path: &str, to: &Path) -> io::Result<()> {
        self.member(path, SYMLINK | 0o777, to.as_os_str().as_bytes())
    }

    /// Ends the archive and returns what it was written to.
    ///
    /// # Errors
    /// If writing fails.
    pub(super) fn finish(mut self) -> io::Result<W> {
        self.inode = 0;
        self.member("TRAILER!!!", 0, &[])?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn member(&mut self, path: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        let size = u32::try_from(content.len())
            .map_err(|_| io::Error::other(format!("{path}: too large for a cpio archive")))?;
        self.inode += 1;
        let links = if mode & DIRECTORY == DIRECTORY { 2 } else { 1 };
        let name_size = path.len() + 1;
        write!(self.out, "070701{:08X}{mode:08X}", self.inode)?;
        // uid, gid, nlink, mtime, filesize, devmajor, devminor, rdevmajor, rdevminor, namesize, check
        write!(self.out, "{:08X}{:08X}{links:08X}{:08X}{size:08X}", 0, 0, 0)?;
        write!(
            self.out,
            "{:08X}{:08X}{:08X}{:08X}{name_size:08X}{:08X}",
            0, 0, 0, 0, 0
        )?;
        self.out.write_all(path.as_bytes())?;
        self.out.write_all(&[0])?;
        // The header is 110 bytes; name and content are padded to a multiple of four.
        self.pad(110 + name_size)?;
        self.out.write_all(content)?;
        self.pad(content.len())
    }

    fn pad(&mut self, written: usize) -> io::Result<()> {
        self.out.write_all(&[0; 3][..written.wrapping_neg() & 3])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_aligned_and_end_with_the_trailer() {
        let mut archive = Archive::new(Vec::new());
        archive.directory("bin").expect("directory");
        archive.file("bin/x", 0o755, b"hello").expect("file");
        archive.symlink("y", Path::new("bin/x")).expect("link");
        let bytes = archive.finish().expect("finish");

        let mut names = Vec::new();
        let mut at = 0;
        while at < bytes.len() {
            assert_eq!(&bytes[at..at + 6], b"070701", "header at {at}");
            let field = |n: usize| {
                let text = &bytes[at + 6 + 8 * n..at + 14 + 8 * n];
                usize::from_str_radix(std::str::from_utf8(text).expect("ASCII"), 16).expect("hex")
            };
            let (size, name_size) = (field(6), field(11));
            let name = &bytes[at + 110..at + 110 + name_size - 1];
            names.push(String::from_utf8_lossy(name).into_owned());
            at = (at + 110 + name_size).next_multiple_of(4);
            at = (at + size).next_multiple_of(4);
        }
        assert_eq!(names, ["bin", "bin/x", "y", "TRAILER!!!"]);
    }
}

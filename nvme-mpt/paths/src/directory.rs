//! Open directories, and the files in them.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{self, AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::PathError;
use crate::walk::{
    self, ExposedDirectory, FileId, FileStatus, PathEntry, is_safe, is_trusted,
    is_writable_by_others, walk,
};

/// An open directory. Its entries are accessed through the descriptor, so that a rename of the directory does not redirect
/// an access.
#[derive(Debug)]
pub struct OpenDirectory(PathEntry);

impl OpenDirectory {
    /// Opens a directory.
    ///
    /// # Errors
    /// See [`PathError`].
    pub fn open(path: &Path) -> Result<Self, PathError> {
        Self::from_entry(walk(path, None)?)
    }

    /// Opens a directory. Creates it and its ancestors if they are missing, with `mode` reduced by the umask.
    ///
    /// # Errors
    /// See [`PathError`].
    pub fn open_or_create(path: &Path, mode: u32) -> Result<Self, PathError> {
        Self::from_entry(walk(path, Some(Mode::from_raw_mode(mode)))?)
    }

    fn from_entry(entry: PathEntry) -> Result<Self, PathError> {
        match entry.kind() {
            FileType::Directory => Ok(Self(entry)),
            _ => Err(PathError::io("use the directory", &entry.path)(
                Errno::NOTDIR,
            )),
        }
    }

    /// Opens the directory of a file. Also returns the name of the file in the directory.
    ///
    /// # Errors
    /// See [`PathError`].
    pub fn open_parent(path: &Path) -> Result<(Self, &OsStr), PathError> {
        let name = path
            .file_name()
            .ok_or_else(|| PathError::NoFileName { path: path.into() })?;
        let directory = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        Ok((Self::open(directory)?, name))
    }

    /// Returns the directory's path without symbolic links.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.descriptor.as_fd()
    }

    /// Returns a path that leads to an entry through the open directory's descriptor. The path is short enough for a socket
    /// address.
    #[must_use]
    pub fn entry_path(&self, name: &OsStr) -> PathBuf {
        self.0.proc_fd_path().join(name)
    }

    /// Changes the mode of the directory.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn set_mode(&self, mode: u32) -> Result<(), PathError> {
        self.0.set_mode(mode)
    }

    /// Returns whether only trusted users can replace an entry of this directory, if the owner of the entry is `owner`.
    pub(crate) fn is_safe_for(&self, owner: u32) -> bool {
        self.0.exposure.is_none() && is_safe(self.fd(), &self.0.stat, owner)
    }

    /// Checks that only trusted users can replace an entry that this process creates in the directory.
    ///
    /// # Errors
    /// Names the directory that another user may write. That may be a directory further up on the path.
    pub fn check_not_exposed(&self, name: &OsStr) -> Result<(), PathError> {
        let path = self.path().join(name);
        if let Some(exposure) = &self.0.exposure {
            return Err(exposure.to_error(&path));
        }
        let stat = &self.0.stat;
        let is_sticky = stat.is_sticky();
        match is_trusted(stat.owner) && (is_sticky || !is_writable_by_others(self.fd(), stat)) {
            true => Ok(()),
            false => Err(ExposedDirectory::new(self.path(), stat).to_error(&path)),
        }
    }

    /// Opens an entry without following a link; `None` if there is no such entry.
    ///
    /// # Errors
    /// See [`PathError`].
    pub fn entry(&self, name: &OsStr) -> Result<Option<PathEntry>, PathError> {
        let path = self.path().join(name);
        let descriptor = match walk::open_entry(self.fd(), name) {
            Ok(descriptor) => descriptor,
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return Err(PathError::io("open", &path)(error)),
        };
        let stat = FileStatus::from_fd(&descriptor).map_err(PathError::io("inspect", &path))?;
        let exposure = match self.is_safe_for(stat.owner) {
            true => None,
            false => Some(
                self.0
                    .exposure
                    .clone()
                    .unwrap_or_else(|| ExposedDirectory::new(self.path(), &self.0.stat)),
            ),
        };
        Ok(Some(PathEntry {
            descriptor,
            stat,
            path,
            exposure,
        }))
    }

    /// Returns the names of the entries.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn names(&self) -> Result<Vec<OsString>, PathError> {
        let entries = std::fs::read_dir(self.0.proc_fd_path());
        let names =
            entries.and_then(|entries| entries.map(|entry| Ok(entry?.file_name())).collect());
        names.map_err(|source| PathError::Io {
            action: "list",
            path: self.path().to_owned(),
            source,
        })
    }

    /// Opens an entry. A symbolic link is not followed.
    ///
    /// # Errors
    /// See [`PathError`].
    pub fn open_entry(&self, name: &OsStr, flags: OFlags) -> Result<File, PathError> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = fs::openat(self.fd(), name, flags, Mode::empty());
        let path = self.path().join(name);
        opened.map(File::from).map_err(PathError::io("open", &path))
    }

    /// Creates a file with an unused name. Returns the name and the file. The umask reduces `mode`.
    fn create_temporary(&self, name: &OsStr, mode: u32) -> Result<(OsString, File), PathError> {
        let temporary = temporary_name(name);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let path = self.path().join(name);
        let made = fs::openat(
            self.fd(),
            &temporary,
            flags | OFlags::CLOEXEC,
            Mode::from_raw_mode(mode),
        );
        let made = made.map_err(PathError::io("make a file for", &path))?;
        Ok((temporary, made.into()))
    }

    /// Replaces a file atomically: a reader finds either the old content, or the complete output of `write`. If the name is
    /// a link, the link itself is replaced. Another user who may write the directory can replace the new file. The new file
    /// is durable once `write` has synced it and the caller has then [synced](Self::sync) the directory's names.
    ///
    /// # Errors
    /// See [`PathError`]. In a directory with the sticky bit, another user's file is not replaced.
    pub fn replace(
        &self,
        name: &OsStr,
        mode: u32,
        write: impl FnOnce(&mut File) -> io::Result<()>,
    ) -> Result<FileId, PathError> {
        let path = self.path().join(name);
        let stat = &self.0.stat;
        if stat.is_sticky()
            && let Some(existing) = self.entry(name)?
            && !is_trusted(existing.stat.owner)
        {
            return Err(PathError::ForeignFile {
                path,
                owner: existing.stat.owner,
                mode: existing.stat.permissions(),
            });
        }
        let (temporary, mut file) = self.create_temporary(name, mode)?;
        let id = FileId::from_file(&file).and_then(|id| write(&mut file).map(|()| id));
        let id = id.map_err(|source| PathError::Io {
            action: "write",
            path: path.clone(),
            source,
        });
        run_test_hook("written", self, &temporary);
        let replaced = id.and_then(|id| {
            // The sandboxes of VMMs do not allow renameat(2).
            let renamed = std::fs::rename(self.entry_path(&temporary), self.entry_path(name));
            renamed.map(|()| id).map_err(|source| PathError::Io {
                action: "replace",
                path: path.clone(),
                source,
            })
        });
        if replaced.is_err() {
            let _ = fs::unlinkat(self.fd(), &temporary, AtFlags::empty());
        }
        replaced
    }

    /// Creates a file with its complete content, unless the name exists. Returns whether the file was created.
    ///
    /// # Errors
    /// See [`PathError`].
    pub fn create_new(
        &self,
        name: &OsStr,
        mode: u32,
        write: impl FnOnce(&mut File) -> io::Result<()>,
    ) -> Result<bool, PathError> {
        let path = self.path().join(name);
        let (temporary, mut file) = self.create_temporary(name, mode)?;
        let made = write(&mut file).map_err(|source| PathError::Io {
            action: "write",
            path: path.clone(),
            source,
        });
        run_test_hook("written", self, &temporary);
        let made = made.and_then(|()| {
            match fs::linkat(self.fd(), &temporary, self.fd(), name, AtFlags::empty()) {
                Ok(()) => Ok(true),
                Err(Errno::EXIST) => Ok(false),
                Err(error) => Err(PathError::io("make", &path)(error)),
            }
        });
        // The file was created, even if its temporary name remains.
        let _ = fs::unlinkat(self.fd(), &temporary, AtFlags::empty());
        made
    }

    /// Makes the names in the directory durable.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn sync(&self) -> Result<(), PathError> {
        let synced = self.0.reopen(OFlags::RDONLY | OFlags::DIRECTORY);
        let synced = synced.and_then(|directory| directory.sync_all());
        synced.map_err(|source| PathError::Io {
            action: "sync",
            path: self.path().to_owned(),
            source,
        })
    }

    /// Returns whether the entry `name` is the file with this identity.
    #[must_use]
    pub fn has_entry(&self, name: &OsStr, id: FileId) -> bool {
        let stat = fs::statat(self.fd(), name, AtFlags::SYMLINK_NOFOLLOW);
        stat.is_ok_and(|stat| FileId::from_stat(&stat) == id)
    }

    /// Removes an entry if it is the file with this identity. Between check and removal, another user may replace the file,
    /// but only one who could have removed it anyway.
    pub fn remove(&self, name: &OsStr, id: FileId) {
        if self.has_entry(name, id) {
            let _ = fs::unlinkat(self.fd(), name, AtFlags::empty());
        }
    }
}

/// Returns an unused name derived from `name`.
pub(crate) fn temporary_name(name: &OsStr) -> OsString {
    let mut random = [0; 8];
    // Without random numbers, the name may be taken. Then the call that creates the file fails.
    let _ = getrandom(&mut random, GetRandomFlags::empty());
    let mut temporary = OsString::from(".");
    temporary.push(name);
    // Names have at most 255 bytes.
    if temporary.len() > 200 {
        temporary = ".nvme-mpt".into();
    }
    temporary.push(format!(".{:016x}", u64::from_ne_bytes(random)));
    temporary
}

/// Hook between two system calls, where tests act as another user.
pub(crate) fn run_test_hook(_name: &'static str, _directory: &OpenDirectory, _entry: &OsStr) {
    #[cfg(test)]
    crate::tests::run_attack(_name, _directory, _entry);
}

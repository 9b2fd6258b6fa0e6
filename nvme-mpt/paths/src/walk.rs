//! Walk of a path, component by component.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{self, AtFlags, FileType, Mode, OFlags, Stat, StatVfsMountFlags};
use rustix::io::Errno;

use nvme_mpt_memory::system::process_user;

use crate::PathError;

/// Maximum number of symbolic links that are followed on a path, as in the kernel.
const LINKS_MAX: u32 = 40;

/// Identity of a file: device and inode number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    pub(crate) fn from_stat(stat: &Stat) -> Self {
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
        }
    }

    /// Returns the identity of an open file.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn from_file(file: impl AsFd) -> io::Result<Self> {
        Ok(Self::from_stat(&fs::fstat(file)?))
    }
}

/// Status of a file or directory: owner, group, mode and identity.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileStatus {
    pub(crate) id: FileId,
    pub(crate) owner: u32,
    pub(crate) group: u32,
    /// Type and permissions of the file.
    pub(crate) mode: u32,
    pub(crate) bytes: u64,
}

impl FileStatus {
    pub(crate) fn from_fd(file: impl AsFd) -> Result<Self, Errno> {
        let stat = fs::fstat(file)?;
        Ok(Self {
            id: FileId::from_stat(&stat),
            owner: stat.st_uid,
            group: stat.st_gid,
            mode: stat.st_mode,
            bytes: u64::try_from(stat.st_size).unwrap_or(0),
        })
    }

    pub(crate) fn permissions(&self) -> u32 {
        self.mode & 0o7777
    }

    pub(crate) fn is_sticky(&self) -> bool {
        self.mode & 0o1000 != 0
    }
}

/// Directory on a path that another user may write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ExposedDirectory {
    pub(crate) directory: PathBuf,
    pub(crate) owner: u32,
    pub(crate) mode: u32,
}

impl ExposedDirectory {
    pub(crate) fn new(directory: &Path, stat: &FileStatus) -> Self {
        Self {
            directory: directory.to_owned(),
            owner: stat.owner,
            mode: stat.permissions(),
        }
    }

    pub(crate) fn to_error(&self, path: &Path) -> PathError {
        PathError::Exposed {
            path: path.to_owned(),
            directory: self.directory.clone(),
            owner: self.owner,
            mode: self.mode,
        }
    }
}

/// File or directory at the end of a path, as a descriptor without read or write access (`O_PATH`).
#[derive(Debug)]
pub struct PathEntry {
    pub(crate) descriptor: OwnedFd,
    pub(crate) stat: FileStatus,
    /// Path without symbolic links.
    pub(crate) path: PathBuf,
    /// First directory on the path in which an untrusted user could replace the entry that the path leads through; `None`
    /// if there is no such directory.
    pub(crate) exposure: Option<ExposedDirectory>,
}

/// Returns whether a user is trusted.
pub(crate) fn is_trusted(user: u32) -> bool {
    user == 0 || user == process_user() || fs::stat("/").is_ok_and(|root| root.st_uid == user)
}

/// Returns whether users other than the owner may write the open file or directory. On a read-only mount, such as a volume
/// of Kubernetes, nobody may.
pub(crate) fn is_writable_by_others(file: BorrowedFd<'_>, stat: &FileStatus) -> bool {
    has_others_write_mode(stat)
        && !fs::fstatvfs(file).is_ok_and(|mount| mount.f_flag.contains(StatVfsMountFlags::RDONLY))
}

fn has_others_write_mode(stat: &FileStatus) -> bool {
    let user = process_user();
    // A group with the owner's number contains only the owner: many distributions give each user such a default group.
    let own_group = user != 0 && stat.owner == user && stat.group == user;
    let group = if own_group { 0 } else { 0o020 };
    stat.mode & (0o002 | group) != 0
}

/// Returns whether only trusted users can replace an entry of `directory`, if the owner of the entry is `owner`.
pub(crate) fn is_safe(directory: BorrowedFd<'_>, stat: &FileStatus, owner: u32) -> bool {
    let is_sticky = stat.is_sticky();
    is_trusted(stat.owner)
        && (is_sticky && is_trusted(owner) || !is_writable_by_others(directory, stat))
}

/// Opens an entry without following a link. Triggers automounts.
pub(crate) fn open_entry(directory: BorrowedFd<'_>, name: &OsStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match fs::openat(directory, name, flags | OFlags::DIRECTORY, Mode::empty()) {
        Err(Errno::NOTDIR | Errno::LOOP) => fs::openat(directory, name, flags, Mode::empty()),
        opened => opened,
    }
}

/// Returns the components of a path, the last one first.
fn reversed_components(path: &Path) -> impl Iterator<Item = OsString> + use<'_> {
    path.components().rev().filter_map(|step| match step {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    })
}

/// Walks a path to its end. If `make` is set, creates missing directories with that mode.
pub(crate) fn walk(path: &Path, make: Option<Mode>) -> Result<PathEntry, PathError> {
    let path = match path.as_os_str().is_empty() {
        true => Path::new("."),
        false => path,
    };
    let path = std::path::absolute(path).map_err(|source| PathError::Io {
        action: "find",
        path: path.to_owned(),
        source,
    })?;
    let root = || {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = fs::open("/", flags, Mode::empty());
        let descriptor = opened.map_err(PathError::io("open", Path::new("/")))?;
        let stat =
            FileStatus::from_fd(&descriptor).map_err(PathError::io("inspect", Path::new("/")))?;
        Ok((descriptor, stat))
    };
    let (descriptor, stat) = root()?;
    let mut entry = PathEntry {
        descriptor,
        stat,
        path: "/".into(),
        exposure: None,
    };
    let mut left: Vec<OsString> = reversed_components(&path).collect();
    let mut links = 0;
    while let Some(name) = left.pop() {
        let next_path = match name.as_bytes() {
            b".." => entry.path.parent().unwrap_or(Path::new("/")).to_owned(),
            _ => entry.path.join(&name),
        };
        let failed = |action| PathError::io(action, &next_path);
        let directory = entry.descriptor.as_fd();
        let next = match (open_entry(directory, &name), make) {
            (Err(Errno::NOENT), Some(mode)) => {
                match fs::mkdirat(directory, &name, mode) {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(error) => return Err(failed("make the directory")(error)),
                }
                open_entry(directory, &name)
            }
            (opened, _) => opened,
        };
        let next = next.map_err(failed("open"))?;
        let stat = FileStatus::from_fd(&next).map_err(failed("inspect"))?;
        let is_safe = is_safe(entry.descriptor.as_fd(), &entry.stat, stat.owner);
        if FileType::from_raw_mode(stat.mode) == FileType::Symlink {
            if !is_safe || !is_trusted(stat.owner) {
                let owner = match is_trusted(stat.owner) {
                    true => entry.stat.owner,
                    false => stat.owner,
                };
                return Err(PathError::ForeignLink {
                    path: next_path,
                    owner,
                });
            }
            links += 1;
            if links > LINKS_MAX {
                return Err(failed("follow")(Errno::LOOP));
            }
            // The sandboxes of VMMs do not allow readlinkat(2). No other user can replace the link.
            let target = std::fs::read_link(proc_fd_path(entry.descriptor.as_fd()).join(&name));
            let target = target.map_err(|source| PathError::Io {
                action: "read the link",
                path: next_path.clone(),
                source,
            })?;
            if target.is_absolute() {
                let (descriptor, stat) = root()?;
                entry.descriptor = descriptor;
                entry.stat = stat;
                entry.path = "/".into();
            }
            left.extend(reversed_components(&target));
            continue;
        }
        if !is_safe && entry.exposure.is_none() {
            entry.exposure = Some(ExposedDirectory::new(&entry.path, &entry.stat));
        }
        entry.descriptor = next;
        entry.stat = stat;
        entry.path = next_path;
    }
    Ok(entry)
}

impl PathEntry {
    /// Finds the file or directory at the end of a path.
    ///
    /// # Errors
    /// See [`PathError`].
    pub fn find(path: &Path) -> Result<Self, PathError> {
        walk(path, None)
    }

    /// Returns the path without symbolic links. It leads to this file until an entry on the path is replaced.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the identity of the file.
    #[must_use]
    pub fn id(&self) -> FileId {
        self.stat.id
    }

    /// Returns the owner.
    #[must_use]
    pub fn owner(&self) -> u32 {
        self.stat.owner
    }

    pub(crate) fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.stat.mode)
    }

    /// Returns a path that leads to this file even after the file was renamed.
    pub(crate) fn proc_fd_path(&self) -> PathBuf {
        proc_fd_path(self.descriptor.as_fd())
    }

    /// Opens this file.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn reopen(&self, flags: OFlags) -> io::Result<File> {
        let opened = fs::open(self.proc_fd_path(), flags | OFlags::CLOEXEC, Mode::empty())?;
        Ok(opened.into())
    }

    /// Changes the mode of this file.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn set_mode(&self, mode: u32) -> Result<(), PathError> {
        // fchmod(2) does not accept `O_PATH` descriptors.
        let changed = fs::chmod(self.proc_fd_path(), Mode::from_raw_mode(mode));
        changed.map_err(PathError::io("set the permissions of", &self.path))
    }

    /// Changes the owner of this file.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub(crate) fn set_owner(&self, user: Option<u32>, group: Option<u32>) -> Result<(), PathError> {
        let user = user.map(fs::Uid::from_raw);
        let group = group.map(fs::Gid::from_raw);
        let changed = fs::chownat(&self.descriptor, "", user, group, AtFlags::EMPTY_PATH);
        changed.map_err(PathError::io("set the owner of", &self.path))
    }

    /// Checks that this is a regular file that only trusted users can write or replace.
    ///
    /// # Errors
    /// Returns an error that describes the access of other users.
    pub fn check_trusted(&self) -> Result<(), PathError> {
        let path = self.path.clone();
        if self.kind() != FileType::RegularFile {
            return Err(PathError::NotAFile { path });
        }
        if !is_trusted(self.stat.owner)
            || is_writable_by_others(self.descriptor.as_fd(), &self.stat)
        {
            return Err(PathError::ForeignFile {
                path,
                owner: self.stat.owner,
                mode: self.stat.permissions(),
            });
        }
        match &self.exposure {
            Some(exposure) => Err(exposure.to_error(&self.path)),
            None => Ok(()),
        }
    }

    /// Reads the file as text. It may have at most `longest` bytes.
    pub(crate) fn read(&self, longest: u64) -> Result<String, PathError> {
        let read = || {
            let mut text = String::new();
            let file = self.reopen(OFlags::RDONLY | OFlags::NONBLOCK)?;
            file.take(longest + 1).read_to_string(&mut text)?;
            if text.len() as u64 > longest {
                let length = self.stat.bytes;
                return Err(io::Error::new(
                    io::ErrorKind::FileTooLarge,
                    format!("it has {length} bytes, and {longest} at most are read"),
                ));
            }
            Ok(text)
        };
        read().map_err(|source| PathError::Io {
            action: "read",
            path: self.path.clone(),
            source,
        })
    }
}

/// Opens an existing file. Refuses symbolic links on its path that another user can change.
///
/// # Errors
/// See [`PathError`].
pub fn open(path: &Path, flags: OFlags) -> Result<File, PathError> {
    let entry = PathEntry::find(path)?;
    entry.reopen(flags).map_err(|source| PathError::Io {
        action: "open",
        path: entry.path,
        source,
    })
}

/// Returns a path in `/proc` that leads to an open descriptor.
pub(crate) fn proc_fd_path(descriptor: BorrowedFd<'_>) -> PathBuf {
    Path::new("/proc/self/fd").join(descriptor.as_raw_fd().to_string())
}

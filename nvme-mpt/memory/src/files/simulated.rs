//! Files and directories on a simulated disk.
//!
//! All processes see a write immediately. A crash of the machine keeps synced data. Of the unsynced changes, it keeps none,
//! all, the first ones, or an arbitrary selection. A write may survive in part, or as zeroes. A sync of a file makes its
//! content durable, but not its name: the name belongs to the directory, which needs a sync of its own.
//!
//! A process that ends keeps its changes and loses its locks.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::{Permissions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path};
use std::time::Duration;

use crate::simulation::{ActorStep, acted, process, random, turn, wait_for};
use crate::system::{LockKind, process_user};

/// Number of the root directory among the nodes.
const ROOT: usize = 0;

/// Maximum duration of a sync in nanoseconds, as a power of two.
const SYNC_BITS: u64 = 22;

/// An unsynced change of a directory.
#[derive(Clone, Debug)]
enum DirectoryChange {
    Added(OsString, usize),
    Renamed(OsString, OsString, usize),
}

impl DirectoryChange {
    fn apply(&self, entries: &mut DirectoryEntries) {
        match self {
            Self::Added(name, node) => {
                entries.insert(name.clone(), *node);
            }
            Self::Renamed(from, to, node) => {
                if entries.get(from) == Some(node) {
                    entries.remove(from);
                }
                entries.insert(to.clone(), *node);
            }
        }
    }
}

/// An unsynced change of a file.
#[derive(Clone, Debug)]
enum FileContentChange {
    Truncated,
    Bytes(usize, Vec<u8>),
}

impl FileContentChange {
    fn apply(&self, content: &mut Vec<u8>) {
        match self {
            Self::Truncated => content.clear(),
            Self::Bytes(at, bytes) => {
                let end = at + bytes.len();
                if content.len() < end {
                    content.resize(end, 0);
                }
                content[*at..end].copy_from_slice(bytes);
            }
        }
    }

    /// Applies the part of a write that survives a crash.
    fn apply_torn(&self, content: &mut Vec<u8>) {
        let Self::Bytes(at, bytes) = self else {
            return self.apply(content);
        };
        match random() % 4 {
            0 => Self::Bytes(*at, vec![0; bytes.len()]).apply(content),
            1 => {
                let len = random() as usize % (bytes.len() + 1);
                Self::Bytes(*at, bytes[..len].to_vec()).apply(content);
            }
            _ => self.apply(content),
        }
    }
}

type DirectoryEntries = BTreeMap<OsString, usize>;

/// State of a file or directory: the visible one, the durable one, and the changes in between.
#[derive(Clone, Debug)]
struct SyncedState<S, C> {
    seen: S,
    durable: S,
    changes: Vec<C>,
    /// Number of changes that are durable.
    synced: usize,
}

impl<S: Clone + Default, C> SyncedState<S, C> {
    /// Returns an empty state.
    fn new() -> Self {
        Self {
            seen: S::default(),
            durable: S::default(),
            changes: Vec::new(),
            synced: 0,
        }
    }

    fn change(&mut self, change: C, apply: impl Fn(&C, &mut S)) {
        apply(&change, &mut self.seen);
        self.changes.push(change);
    }

    /// Returns the number of changes so far.
    const fn count(&self) -> usize {
        self.synced + self.changes.len()
    }

    /// Makes the first `count` changes durable.
    fn sync(&mut self, count: usize, apply: impl Fn(&C, &mut S)) {
        let new = count.saturating_sub(self.synced);
        for change in self.changes.drain(..new) {
            apply(&change, &mut self.durable);
        }
        self.synced += new;
    }

    /// Makes those changes durable that survive a crash of the machine, and drops all others.
    fn crash(&mut self, apply: impl Fn(&C, &mut S)) {
        let changes = std::mem::take(&mut self.changes);
        let (way, first) = (random() % 4, random() as usize % (changes.len() + 1));
        for (number, change) in changes.iter().enumerate() {
            let survives = match way {
                0 => false,
                1 => true,
                2 => number < first,
                _ => random().is_multiple_of(2),
            };
            if survives {
                apply(change, &mut self.durable);
            }
        }
        self.seen = self.durable.clone();
    }
}

#[derive(Clone, Debug)]
enum InodeContent {
    Folder(SyncedState<DirectoryEntries, DirectoryChange>),
    File(SyncedState<Vec<u8>, FileContentChange>),
}

impl InodeContent {
    fn new_dir() -> Self {
        Self::Folder(SyncedState::new())
    }

    fn file() -> Self {
        Self::File(SyncedState::new())
    }
}

/// A lock on a range of a file, or on the whole file.
#[derive(Clone, Copy, Debug)]
struct SimulatedFileLock {
    open: u64,
    /// True for flock locks, which lock the whole file and do not conflict with range locks.
    is_whole: bool,
    exclusive: bool,
    start: u64,
    end: u64,
}

/// A file or a directory.
#[derive(Clone, Debug)]
struct SimulatedInode {
    content: InodeContent,
    mode: u32,
    locks: Vec<SimulatedFileLock>,
}

/// The disk of the simulated machine.
#[derive(Debug)]
struct SimulatedFileSystem {
    nodes: Vec<SimulatedInode>,
    /// Process that has opened each open file.
    opened: BTreeMap<u64, u64>,
    /// Average number of writes and syncs until one fails on purpose; 0 if none fails.
    failing: u64,
}

impl SimulatedFileSystem {
    fn new() -> Self {
        Self {
            nodes: vec![SimulatedInode {
                content: InodeContent::new_dir(),
                mode: 0o755,
                locks: Vec::new(),
            }],
            opened: BTreeMap::new(),
            failing: 0,
        }
    }

    fn entries(
        &mut self,
        dir: usize,
    ) -> io::Result<&mut SyncedState<DirectoryEntries, DirectoryChange>> {
        match &mut self.nodes[dir].content {
            InodeContent::Folder(entries) => Ok(entries),
            InodeContent::File(_) => Err(io::ErrorKind::NotADirectory.into()),
        }
    }

    fn bytes(&mut self, file: usize) -> io::Result<&mut SyncedState<Vec<u8>, FileContentChange>> {
        match &mut self.nodes[file].content {
            InodeContent::File(bytes) => Ok(bytes),
            InodeContent::Folder(_) => Err(io::ErrorKind::IsADirectory.into()),
        }
    }

    fn find(&mut self, path: &Path) -> io::Result<usize> {
        let mut node = ROOT;
        for component in path.components() {
            if let Component::Normal(name) = component {
                let found = self.entries(node)?.seen.get(name).copied();
                node = found.ok_or(io::ErrorKind::NotFound)?;
            }
        }
        Ok(node)
    }

    /// Returns the directory of a path, and the name of the path in it.
    fn place<'p>(&mut self, path: &'p Path) -> io::Result<(usize, &'p OsStr)> {
        let parent = path.parent().unwrap_or(path);
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        Ok((self.find(parent)?, name))
    }

    fn add(&mut self, path: &Path, content: InodeContent, mode: u32) -> io::Result<usize> {
        let (dir, name) = self.place(path)?;
        let node = self.nodes.len();
        let added = DirectoryChange::Added(name.to_owned(), node);
        self.entries(dir)?.change(added, DirectoryChange::apply);
        self.nodes.push(SimulatedInode {
            content,
            mode,
            locks: Vec::new(),
        });
        Ok(node)
    }

    fn open(&mut self, node: usize) -> File {
        let open = OPENED.replace(OPENED.get() + 1);
        self.opened.insert(open, process());
        File {
            open,
            node,
            position: 0,
        }
    }

    /// Fails at random, as often as set.
    fn try_it(&self, kind: io::ErrorKind) -> io::Result<()> {
        match self.failing > 0 && random().is_multiple_of(self.failing) {
            true => Err(kind.into()),
            false => Ok(()),
        }
    }

    fn close(&mut self, open: u64) {
        self.opened.remove(&open);
        for node in &mut self.nodes {
            node.locks.retain(|lock| lock.open != open);
        }
    }

    /// Returns whether another open file has a lock that conflicts with `wanted`.
    fn is_excluded(&self, node: usize, wanted: &SimulatedFileLock) -> bool {
        self.nodes[node].locks.iter().any(|lock| {
            lock.open != wanted.open
                && lock.is_whole == wanted.is_whole
                && (lock.exclusive || wanted.exclusive)
                && lock.start < wanted.end
                && wanted.start < lock.end
        })
    }
}

thread_local! {
    static DISK: RefCell<SimulatedFileSystem> = RefCell::new(SimulatedFileSystem::new());
    static OPENED: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

fn with_disk<T>(call: impl FnOnce(&mut SimulatedFileSystem) -> T) -> T {
    DISK.with_borrow_mut(call)
}

/// Starts with an empty disk. One in `failing` writes and syncs fails; with 0, none fails.
pub fn format(failing: u64) {
    with_disk(|disk| {
        *disk = SimulatedFileSystem {
            failing,
            ..SimulatedFileSystem::new()
        };
    });
}

/// Closes all files of a process, and keeps its changes.
pub fn end_process(process: u64) {
    with_disk(|disk| {
        let opened = disk.opened.iter();
        let its = opened.filter(|(_, of)| **of == process);
        let its: Vec<u64> = its.map(|(open, _)| *open).collect();
        its.into_iter().for_each(|open| disk.close(open));
    });
}

/// Crashes the machine, after all processes have ended.
pub fn crash() {
    with_disk(|disk| {
        disk.opened.clear();
        for node in &mut disk.nodes {
            node.locks.clear();
            match &mut node.content {
                InodeContent::Folder(entries) => entries.crash(DirectoryChange::apply),
                InodeContent::File(bytes) => bytes.crash(FileContentChange::apply_torn),
            }
        }
    });
}

/// File with those operations of [`std::fs::File`] that the ledger uses.
#[derive(Debug)]
pub struct File {
    open: u64,
    node: usize,
    position: usize,
}

impl File {
    /// Opens a file or a directory for reading.
    ///
    /// # Errors
    /// The file or directory does not exist.
    pub fn open(path: impl AsRef<Path>) -> io::Result<Self> {
        OpenOptions::new().read(true).open(path)
    }

    /// Takes the `flock` lock on the whole file, if it is free.
    ///
    /// # Errors
    /// Like [`std::fs::File::try_lock`].
    pub fn try_lock(&self) -> Result<(), TryLockError> {
        let lock = SimulatedFileLock {
            open: self.open,
            is_whole: true,
            exclusive: true,
            start: 0,
            end: u64::MAX,
        };
        match take(self, lock) {
            true => Ok(()),
            false => Err(TryLockError::WouldBlock),
        }
    }

    /// Makes the content of a file, or the names in a directory, durable.
    ///
    /// # Errors
    /// The disk fails.
    pub fn sync_all(&self) -> io::Result<()> {
        turn(ActorStep::SyncFile, [self.node as u64, 0]);
        let count = with_disk(|disk| match &disk.nodes[self.node].content {
            InodeContent::Folder(entries) => entries.count(),
            InodeContent::File(bytes) => bytes.count(),
        });
        // This sync does not make changes durable that other actors make during the wait.
        if random().is_multiple_of(4) {
            let time = random() % (1 << (random() % SYNC_BITS));
            let _waited = wait_for(Some(Duration::from_nanos(time)), || None::<()>);
        }
        with_disk(|disk| {
            disk.try_it(io::ErrorKind::Other)?;
            match &mut disk.nodes[self.node].content {
                InodeContent::Folder(entries) => entries.sync(count, DirectoryChange::apply),
                InodeContent::File(bytes) => bytes.sync(count, FileContentChange::apply),
            }
            Ok(())
        })
    }

    /// Returns the owner and permissions of the file.
    ///
    /// # Errors
    /// None.
    pub fn metadata(&self) -> io::Result<Metadata> {
        Ok(with_disk(|disk| Metadata(disk.nodes[self.node].mode)))
    }

    /// Changes the permissions of the file.
    ///
    /// # Errors
    /// None.
    pub fn set_permissions(&self, permissions: Permissions) -> io::Result<()> {
        with_disk(|disk| disk.nodes[self.node].mode = permissions.mode());
        Ok(())
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // A thread that is ending has no disk any more.
        let _ended = DISK.try_with(|disk| disk.borrow_mut().close(self.open));
        acted();
    }
}

impl io::Write for File {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // As the kernel does, writes less than requested at times.
        let len = match bytes.len() > 1 && random().is_multiple_of(4) {
            true => 1 + random() as usize % bytes.len(),
            false => bytes.len(),
        };
        let written = self.write_at(&bytes[..len], self.position as u64)?;
        self.position += written;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl FileExt for File {
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        turn(ActorStep::ReadFile, [self.node as u64, offset]);
        with_disk(|disk| {
            let content = &disk.bytes(self.node)?.seen;
            let stored = content.get(offset as usize..).unwrap_or_default();
            let len = stored.len().min(bytes.len());
            bytes[..len].copy_from_slice(&stored[..len]);
            Ok(len)
        })
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        turn(ActorStep::WriteFile, [self.node as u64, offset]);
        with_disk(|disk| {
            disk.try_it(io::ErrorKind::StorageFull)?;
            let write = FileContentChange::Bytes(offset as usize, bytes.to_vec());
            disk.bytes(self.node)?
                .change(write, FileContentChange::apply);
            Ok(bytes.len())
        })
    }
}

/// Metadata of a file as in [`std::fs::Metadata`]: its permissions. The owner is the user of this process.
#[derive(Clone, Copy, Debug)]
pub struct Metadata(u32);

/// Access to metadata as in [`std::os::unix::fs::MetadataExt`].
pub trait MetadataExt {
    /// Returns the user id of the owner.
    fn uid(&self) -> u32;
    /// Returns the permissions.
    fn mode(&self) -> u32;
}

impl MetadataExt for Metadata {
    fn uid(&self) -> u32 {
        process_user()
    }

    fn mode(&self) -> u32 {
        self.0
    }
}

/// Options as in [`std::fs::OpenOptions`]. All files can be read and written.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenOptions {
    create: bool,
    truncate: bool,
    mode: u32,
}

impl OpenOptions {
    /// Creates options with which only existing files are opened.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Does nothing, because every file can be read.
    pub const fn read(&mut self, _: bool) -> &mut Self {
        self
    }

    /// Does nothing, because every file can be written.
    pub const fn write(&mut self, _: bool) -> &mut Self {
        self
    }

    /// Sets whether `open` creates a missing file.
    pub const fn create(&mut self, create: bool) -> &mut Self {
        self.create = create;
        self
    }

    /// Sets whether `open` empties the file.
    pub const fn truncate(&mut self, truncate: bool) -> &mut Self {
        self.truncate = truncate;
        self
    }

    /// Opens a file or a directory.
    ///
    /// # Errors
    /// The file does not exist, or the disk is full.
    pub fn open(&self, path: impl AsRef<Path>) -> io::Result<File> {
        let path = path.as_ref();
        turn(ActorStep::OpenFile, [0; 2]);
        with_disk(|disk| {
            let node = match disk.find(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound && self.create => {
                    disk.try_it(io::ErrorKind::StorageFull)?;
                    disk.add(path, InodeContent::file(), self.mode)?
                }
                found => found?,
            };
            if self.truncate {
                disk.bytes(node)?
                    .change(FileContentChange::Truncated, FileContentChange::apply);
            }
            Ok(disk.open(node))
        })
    }
}

impl OpenOptionsExt for OpenOptions {
    fn mode(&mut self, mode: u32) -> &mut Self {
        self.mode = mode;
        self
    }

    fn custom_flags(&mut self, _: i32) -> &mut Self {
        self
    }
}

/// Creation of a directory as in [`std::fs::DirBuilder`].
#[derive(Clone, Copy, Debug, Default)]
pub struct DirBuilder(u32);

impl DirBuilder {
    /// Creates a builder whose directories have no permissions until a mode is set.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a directory.
    ///
    /// # Errors
    /// The directory exists, or its parent directory does not exist.
    pub fn create(&self, path: impl AsRef<Path>) -> io::Result<()> {
        let path = path.as_ref();
        turn(ActorStep::ChangeFolder, [0; 2]);
        with_disk(|disk| {
            if disk.find(path).is_ok() {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            disk.add(path, InodeContent::new_dir(), self.0).map(|_| ())
        })
    }
}

impl DirBuilderExt for DirBuilder {
    fn mode(&mut self, mode: u32) -> &mut Self {
        self.0 = mode;
        self
    }
}

/// Creates a directory and its parents, as [`std::fs::create_dir_all`] does.
///
/// # Errors
/// An entry of the path is a file.
pub fn create_dir_all(path: impl AsRef<Path>) -> io::Result<()> {
    let mut ancestors: Vec<&Path> = path.as_ref().ancestors().collect();
    ancestors.reverse();
    for dir in ancestors {
        match DirBuilder(0o755).create(dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Returns metadata, as [`std::fs::metadata`] does.
///
/// # Errors
/// The file does not exist.
pub fn metadata(path: impl AsRef<Path>) -> io::Result<Metadata> {
    turn(ActorStep::ReadFile, [0; 2]);
    with_disk(|disk| {
        let node = disk.find(path.as_ref())?;
        Ok(Metadata(disk.nodes[node].mode))
    })
}

/// Reads a file, as [`std::fs::read`] does.
///
/// # Errors
/// The file does not exist.
pub fn read(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    turn(ActorStep::ReadFile, [file.node as u64, 0]);
    with_disk(|disk| Ok(disk.bytes(file.node)?.seen.clone()))
}

/// An entry of a directory.
#[derive(Clone, Debug)]
pub struct DirEntry(OsString);

impl DirEntry {
    /// Returns the name of the entry.
    #[must_use]
    pub fn file_name(&self) -> OsString {
        self.0.clone()
    }
}

/// Lists a directory, as [`std::fs::read_dir`] does.
///
/// # Errors
/// The directory does not exist.
pub fn read_dir(path: impl AsRef<Path>) -> io::Result<std::vec::IntoIter<io::Result<DirEntry>>> {
    turn(ActorStep::ReadFile, [0; 2]);
    with_disk(|disk| {
        let node = disk.find(path.as_ref())?;
        let names = disk.entries(node)?.seen.keys();
        let names: Vec<_> = names.map(|name| Ok(DirEntry(name.clone()))).collect();
        Ok(names.into_iter())
    })
}

/// Renames a file within its directory, as [`std::fs::rename`] does.
///
/// # Errors
/// The file does not exist, or the disk fails.
pub fn rename(from: impl AsRef<Path>, to: impl AsRef<Path>) -> io::Result<()> {
    turn(ActorStep::ChangeFolder, [0; 2]);
    with_disk(|disk| {
        let node = disk.find(from.as_ref())?;
        let (dir, from) = disk.place(from.as_ref())?;
        let (other, to) = disk.place(to.as_ref())?;
        if dir != other {
            return Err(io::ErrorKind::CrossesDevices.into());
        }
        disk.try_it(io::ErrorKind::Other)?;
        let renamed = DirectoryChange::Renamed(from.to_owned(), to.to_owned(), node);
        disk.entries(dir)?.change(renamed, DirectoryChange::apply);
        Ok(())
    })
}

/// Changes permissions, as [`std::fs::set_permissions`] does.
///
/// # Errors
/// The file does not exist.
pub fn set_permissions(path: impl AsRef<Path>, permissions: Permissions) -> io::Result<()> {
    with_disk(|disk| {
        let node = disk.find(path.as_ref())?;
        disk.nodes[node].mode = permissions.mode();
        Ok(())
    })
}

fn take(file: &File, lock: SimulatedFileLock) -> bool {
    turn(ActorStep::LockFile, [file.node as u64, lock.start]);
    with_disk(|disk| {
        let is_free = !disk.is_excluded(file.node, &lock);
        if is_free {
            disk.nodes[file.node].locks.push(lock);
        }
        is_free
    })
}

fn range(file: &File, kind: LockKind, start: u64, length: u64) -> SimulatedFileLock {
    SimulatedFileLock {
        open: file.open,
        is_whole: false,
        exclusive: kind == LockKind::Exclusive,
        start,
        end: match length {
            0 => u64::MAX,
            length => start.saturating_add(length),
        },
    }
}

/// Locks a range, as [`crate::system::try_lock`] does.
///
/// # Errors
/// None.
pub fn try_lock(file: &File, kind: LockKind, start: u64, length: u64) -> io::Result<bool> {
    Ok(take(file, range(file, kind, start, length)))
}

/// Unlocks a range, as [`crate::system::unlock`] does. Releases whole locks that overlap the range.
///
/// # Errors
/// None.
pub fn unlock(file: &File, start: u64, length: u64) -> io::Result<()> {
    turn(ActorStep::LockFile, [file.node as u64, start]);
    let gone = range(file, LockKind::Shared, start, length);
    with_disk(|disk| {
        disk.nodes[file.node].locks.retain(|lock| {
            lock.open != file.open || lock.start >= gone.end || gone.start >= lock.end
        });
    });
    acted();
    Ok(())
}

/// Checks for a conflicting lock, as [`crate::system::is_lock_excluded`] does.
///
/// # Errors
/// None.
pub fn is_lock_excluded(file: &File, kind: LockKind, start: u64, length: u64) -> io::Result<bool> {
    let lock = range(file, kind, start, length);
    turn(ActorStep::LockFile, [file.node as u64, start]);
    Ok(with_disk(|disk| disk.is_excluded(file.node, &lock)))
}

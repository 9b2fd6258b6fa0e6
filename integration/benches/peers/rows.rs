//! Measured pairs, each with the ratio that it should reach.

use std::env;
use std::path::PathBuf;

/// A drive of this project.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Drive {
    Null,
    Memory,
    /// A file on tmpfs.
    Tmpfs,
    /// A file beside the build, or in the place that `DISK` names.
    Disk,
}

/// Location of a drive's files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FileLocation {
    Folder(PathBuf),
    /// Block devices instead of files: this project's and the peer's.
    Devices(PathBuf, PathBuf),
}

impl Drive {
    pub(crate) const ALL: [Self; 4] = [Self::Null, Self::Memory, Self::Tmpfs, Self::Disk];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Memory => "memory",
            Self::Tmpfs => "tmpfs",
            Self::Disk => "disk",
        }
    }

    /// Returns the location of the drive's files, if it has any.
    pub(crate) fn place(self) -> Option<FileLocation> {
        match self {
            Self::Null | Self::Memory => None,
            Self::Tmpfs => Some(FileLocation::Folder("/dev/shm".into())),
            Self::Disk => {
                let named = env::var("DISK");
                Some(named.map_or_else(
                    |_| FileLocation::Folder(integration::target_dir()),
                    FileLocation::named,
                ))
            }
        }
    }
}

impl FileLocation {
    /// Parses `FOLDER` or `DEVICE,DEVICE`.
    fn named(named: String) -> Self {
        match named.split_once(',') {
            Some((ours, peer)) => Self::Devices(ours.into(), peer.into()),
            None => Self::Folder(named.into()),
        }
    }
}

/// Polling mode of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Polling {
    /// A poller that parks when it is idle.
    Adaptive,
    /// A poller that never parks while it has queues, like SPDK's.
    Busy,
}

impl Polling {
    pub(crate) const ALL: [Self; 2] = [Self::Adaptive, Self::Busy];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Adaptive => "adaptive",
            Self::Busy => "busy",
        }
    }
}

/// A block device of SPDK.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Device {
    Null,
    Malloc,
    /// Linux AIO on the file on tmpfs.
    AioOnTmpfs,
    /// Linux AIO on the file on the disk.
    AioOnDisk,
    /// io_uring, on the file on the disk.
    UringOnDisk,
}

impl Device {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Malloc => "malloc",
            Self::AioOnTmpfs => "aio-tmpfs",
            Self::AioOnDisk => "aio-disk",
            Self::UringOnDisk => "uring-disk",
        }
    }
}

/// A peer to compare with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peer {
    /// SPDK's target. SPDK's client loads both sides.
    Spdk(Device),
    /// A loop that only copies random blocks of memory.
    Copies,
}

impl Peer {
    pub(crate) fn device(self) -> Option<Device> {
        match self {
            Self::Spdk(device) => Some(device),
            Self::Copies => None,
        }
    }
}

/// Random reads or writes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Load {
    /// Bytes of a command.
    pub(crate) size: u32,
    /// Number of commands in flight.
    pub(crate) depth: u16,
    pub(crate) is_write: bool,
}

/// A drive and its peer under one load.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) drive: Drive,
    pub(crate) peer: Peer,
    pub(crate) load: Load,
    /// Ratio that the drive should reach.
    pub(crate) goal: &'static str,
}

const fn reads(size: u32, depth: u16) -> Load {
    Load {
        size,
        depth,
        is_write: false,
    }
}

const fn writes(size: u32, depth: u16) -> Load {
    Load {
        size,
        depth,
        is_write: true,
    }
}

const fn row(name: &'static str, drive: Drive, peer: Peer, load: Load, goal: &'static str) -> Row {
    Row {
        name,
        drive,
        peer,
        load,
        goal,
    }
}

const K4: u32 = 4 << 10;
const K128: u32 = 128 << 10;
const NULL: Peer = Peer::Spdk(Device::Null);
const MALLOC: Peer = Peer::Spdk(Device::Malloc);
const TMPFS: Peer = Peer::Spdk(Device::AioOnTmpfs);
const AIO: Peer = Peer::Spdk(Device::AioOnDisk);
const URING: Peer = Peer::Spdk(Device::UringOnDisk);

pub(crate) const ROWS: &[Row] = &[
    row(
        "null, 4K reads, depth 1",
        Drive::Null,
        NULL,
        reads(K4, 1),
        "1.3",
    ),
    row(
        "null, 4K reads, depth 32",
        Drive::Null,
        NULL,
        reads(K4, 32),
        "1.9",
    ),
    row(
        "null, 4K reads, depth 128",
        Drive::Null,
        NULL,
        reads(K4, 128),
        "2.2",
    ),
    row(
        "memory, 4K reads, depth 1",
        Drive::Memory,
        MALLOC,
        reads(K4, 1),
        "1.3",
    ),
    row(
        "memory, 4K reads, depth 32",
        Drive::Memory,
        MALLOC,
        reads(K4, 32),
        "",
    ),
    row(
        "memory, 4K writes, depth 32",
        Drive::Memory,
        MALLOC,
        writes(K4, 32),
        "",
    ),
    row(
        "memory, 128K reads, depth 32",
        Drive::Memory,
        MALLOC,
        reads(K128, 32),
        "1.05",
    ),
    row(
        "memory, 4K copies, depth 32",
        Drive::Memory,
        Peer::Copies,
        reads(K4, 32),
        "0.95",
    ),
    row(
        "memory, 4K copies, depth 128",
        Drive::Memory,
        Peer::Copies,
        reads(K4, 128),
        "0.95",
    ),
    row(
        "tmpfs, aio, 4K reads, depth 1",
        Drive::Tmpfs,
        TMPFS,
        reads(K4, 1),
        "1.2",
    ),
    row(
        "tmpfs, aio, 4K reads, depth 32",
        Drive::Tmpfs,
        TMPFS,
        reads(K4, 32),
        "1.2",
    ),
    row(
        "tmpfs, aio, 4K reads, depth 128",
        Drive::Tmpfs,
        TMPFS,
        reads(K4, 128),
        "1.2",
    ),
    row(
        "tmpfs, aio, 4K writes, depth 32",
        Drive::Tmpfs,
        TMPFS,
        writes(K4, 32),
        "",
    ),
    row(
        "tmpfs, aio, 128K reads, depth 32",
        Drive::Tmpfs,
        TMPFS,
        reads(K128, 32),
        "1.0",
    ),
    row(
        "disk, aio, 4K reads, depth 1",
        Drive::Disk,
        AIO,
        reads(K4, 1),
        "1.2",
    ),
    row(
        "disk, aio, 4K reads, depth 32",
        Drive::Disk,
        AIO,
        reads(K4, 32),
        "1.2",
    ),
    row(
        "disk, aio, 128K reads, depth 32",
        Drive::Disk,
        AIO,
        reads(K128, 32),
        "1.2",
    ),
    row(
        "disk, uring, 4K reads, depth 1",
        Drive::Disk,
        URING,
        reads(K4, 1),
        "1.2",
    ),
    row(
        "disk, uring, 4K reads, depth 32",
        Drive::Disk,
        URING,
        reads(K4, 32),
        "1.2",
    ),
    row(
        "disk, uring, 128K reads, depth 32",
        Drive::Disk,
        URING,
        reads(K128, 32),
        "1.2",
    ),
];

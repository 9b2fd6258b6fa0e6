//! Stacked file systems, which show files of other file systems under their own names and inode numbers.
//!
//! A lock on such a file does not lock the file below it, where the bytes have another inode number. So the bytes could be
//! leased twice. A file on overlay is found in the upper directory, and leases and locks use the found file. Files on other
//! stacked file systems are refused.
//!
//! A network file system is allowed if its server provides inode numbers and locks, because then the server and all clients
//! see each other's locks. It is refused if locks are only known to the client, or if the client numbers the inodes.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::kernel_files::{KernelFiles, MountedFileSystem};

/// File system types that stack on other file systems. FUSE file systems report the kind `fuse.` followed by their own name.
const STACKED: &[&str] = &[
    "aufs",
    "ecryptfs",
    "fuse.bindfs",
    "fuse.cryfs",
    "fuse.encfs",
    "fuse.fuse-overlayfs",
    "fuse.gocryptfs",
    "fuse.mergerfs",
    "fuse.mhddfs",
    "fuse.passthrough",
    "fuse.passthrough_fh",
    "fuse.passthrough_hp",
    "fuse.passthrough_ll",
    "fuse.securefs",
    "fuse.unionfs",
    "fuse.unionfs-fuse",
    "shiftfs",
    "unionfs",
    "wrapfs",
];

/// Types of file systems that are on another machine, or on this virtual machine's host. Inode numbers or locks of such a file
/// system may be known only to this client.
const CLIENT_LOCKED: &[&str] = &[
    "9p",
    "afs",
    "cifs",
    "coda",
    "fuse.sshfs",
    "prl_fs",
    "smb3",
    "smbfs",
    "vboxsf",
    "virtiofs",
];

/// Kind of overlay file systems.
const OVERLAY: &str = "overlay";

/// Returns the file that overlay shows at a path; `None` if the file is on no stacked file system.
///
/// # Errors
/// `Unsupported` for a file that has another name as well, and so could be leased twice.
pub(super) fn file_below(system: &KernelFiles, path: &Path) -> io::Result<Option<PathBuf>> {
    let mounts = system.mounts();
    let Some(mount) = MountedFileSystem::find_for_path(&mounts, path) else {
        return Ok(None);
    };
    let kind = mount.kind.as_str();
    if STACKED.contains(&kind) {
        let why = "shows files of other file systems under inode numbers of its own";
        return Err(refusal(
            kind,
            why,
            "give the path of the file that lies below",
        ));
    }
    let local_locks = kind.starts_with("nfs")
        && (mount.has_option("nolock")
            || (mount.option("local_lock")).is_some_and(|how| how != Path::new("none")));
    if CLIENT_LOCKED.contains(&kind) || local_locks {
        let why = "has inode numbers or locks that no other client of it sees";
        let remedy = "use a file on a disk of this host, or NFS with its locks";
        return Err(refusal(kind, why, remedy));
    }
    if kind != OVERLAY {
        return Ok(None);
    }
    let why = "shows files of other file systems under inode numbers of its own";
    let remedy = "use a file on another file system, in a container on a volume";
    match upper_dir(mount) {
        Some(upper) if upper.is_dir() => match find_in_upper(&upper, mount, path) {
            Some(file) => Ok(Some(file)),
            None => Err(refusal(kind, why, remedy)),
        },
        // This is the overlay at the root of a container: no process in the container has another name for the file.
        _ if mount.point == Path::new("/") => Ok(None),
        _ => Err(refusal(kind, why, remedy)),
    }
}

fn refusal(kind: &str, why: &str, remedy: &str) -> io::Error {
    let text =
        format!("it lies on {kind}, which {why}, so that one file could be leased twice: {remedy}");
    io::Error::new(io::ErrorKind::Unsupported, text)
}

/// Returns the directory to which overlay writes.
fn upper_dir(mount: &MountedFileSystem) -> Option<PathBuf> {
    let upper = mount.option("upperdir")?;
    upper.is_absolute().then_some(upper)
}

/// Returns the file at `path` in overlay's upper directory, if it is certainly the file that overlay shows.
fn find_in_upper(upper: &Path, mount: &MountedFileSystem, path: &Path) -> Option<PathBuf> {
    let dir = mount.root.strip_prefix("/").ok()?;
    let file = upper.join(dir).join(path.strip_prefix(&mount.point).ok()?);
    let (shown, below) = (fs::metadata(path).ok()?, fs::symlink_metadata(&file).ok()?);
    // A file that overlay copied up has the inode number of the file in the lower directory, so it is not recognized.
    let is_it = below.is_file() && (shown.ino(), shown.len()) == (below.ino(), below.len());
    if !is_it {
        return None;
    }
    file.canonicalize().ok()
}

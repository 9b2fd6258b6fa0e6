//! Private directories and files of one user. No other user may open a lock file there: opening it suffices to lock it, and
//! so to block the owner.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use log::{info, warn};
use nvme_mpt_memory::files::{self, DirBuilder, File, MetadataExt, OpenOptions};
use nvme_mpt_memory::system::process_user;
use thiserror::Error;

const DIR_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;
/// Search permission of group and others. With it, they can open entries whose names they know, but not list the directory.
const OTHERS_SEARCH: u32 = 0o011;
/// Write permission of group and others.
const OTHERS_WRITE: u32 = 0o022;
const PERMISSIONS: u32 = 0o7777;

/// Error of making a directory or file private.
#[derive(Debug, Error)]
pub enum PrivateFileError {
    /// A system call failed.
    #[error("Cannot {action} {}", path.display())]
    Io {
        /// Action that failed, in words for the message.
        action: &'static str,
        /// The directory or file.
        path: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The directory or file belongs to another user.
    #[error(
        "{} belongs to user {owner}, and this process runs as user {user}: run as user {owner}{}, or choose another \
         directory with --state-dir",
        path.display(),
        become_user(*owner, *user)
    )]
    Foreign {
        /// The directory or file.
        path: PathBuf,
        /// Owner of the directory or file.
        owner: u32,
        /// User of this process.
        user: u32,
    },
    /// Other users may write to the directory, and it contains unknown files, so its mode cannot be changed.
    #[error(
        "Other users may write in {} (mode {mode:04o}), which holds more than leases: make a directory only for \
         leases with `mkdir -m 700`, and name it with --state-dir",
        path.display()
    )]
    Shared {
        /// Path of the directory.
        path: PathBuf,
        /// Mode of the directory.
        mode: u32,
    },
}

/// Formats the command line with which root runs a command as the user of a service.
fn become_user(owner: u32, user: u32) -> String {
    match user {
        0 => format!(" (`setpriv --reuid {owner} --clear-groups nvme-mpt …`)"),
        _ => String::new(),
    }
}

fn io_error(action: &'static str, path: &Path) -> impl Fn(io::Error) -> PrivateFileError {
    move |source| PrivateFileError::Io {
        action,
        path: path.to_owned(),
        source,
    }
}

fn check_owner(path: &Path, owner: u32, user: u32) -> Result<(), PrivateFileError> {
    if owner == user {
        return Ok(());
    }
    Err(PrivateFileError::Foreign {
        path: path.to_owned(),
        owner,
        user,
    })
}

/// Creates a private directory, or makes an existing one private. `is_own` recognizes the names of files that belong there.
/// A directory with other files has another purpose, so its mode is not changed; if other users may write to it, it is
/// refused.
///
/// # Errors
/// See [`PrivateFileError`].
pub(super) fn make_private_dir(
    path: &Path,
    is_own: impl Fn(&str) -> bool,
) -> Result<(), PrivateFileError> {
    if let Some(parent) = path.parent() {
        files::create_dir_all(parent).map_err(io_error("make the directory", parent))?;
    }
    match DirBuilder::new().mode(DIR_MODE).create(path) {
        Ok(()) => return Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(io_error("make the state directory", path)(error)),
    }
    let status = files::metadata(path).map_err(io_error("inspect the state directory", path))?;
    check_owner(path, status.uid(), process_user())?;
    let mode = status.mode() & PERMISSIONS;
    if mode & !(DIR_MODE | OTHERS_SEARCH) == 0 {
        return Ok(());
    }
    let mut entries = files::read_dir(path).map_err(io_error("list the state directory", path))?;
    let only_own = entries.all(|entry| {
        let name = entry.map(|entry| entry.file_name());
        name.is_ok_and(|name| name.to_str().is_some_and(&is_own))
    });
    if only_own {
        info!(
            "The state directory {} was open to other users (mode {mode:04o}): their access was removed",
            path.display()
        );
        let permissions = Permissions::from_mode(DIR_MODE);
        return files::set_permissions(path, permissions)
            .map_err(io_error("take permissions from others at", path));
    }
    if mode & OTHERS_WRITE != 0 {
        return Err(PrivateFileError::Shared {
            path: path.to_owned(),
            mode,
        });
    }
    warn!(
        "The state directory {} is open to other users (mode {mode:04o}), and stays so because it holds more than \
         leases",
        path.display()
    );
    Ok(())
}

/// Gives other users search permission on a directory of [`make_private_dir`], so that they reach their sockets in it.
///
/// # Errors
/// See [`PrivateFileError`].
pub(super) fn allow_search(path: &Path) -> Result<(), PrivateFileError> {
    let status = files::metadata(path).map_err(io_error("inspect the state directory", path))?;
    let mode = status.mode() & PERMISSIONS;
    if mode & OTHERS_SEARCH == OTHERS_SEARCH {
        return Ok(());
    }
    info!(
        "Other users may pass through the state directory {} from now on, to sockets for VMMs",
        path.display()
    );
    files::set_permissions(path, Permissions::from_mode(mode | OTHERS_SEARCH))
        .map_err(io_error("let other users through", path))
}

/// Opens a private file, and creates it if it does not exist.
///
/// # Errors
/// See [`PrivateFileError`].
pub(super) fn open_private_file(
    path: &Path,
    options: &mut OpenOptions,
) -> Result<File, PrivateFileError> {
    let file = options
        .mode(FILE_MODE)
        // A symbolic link could lead to another user's file.
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
        .map_err(io_error("open", path))?;
    let status = file.metadata().map_err(io_error("inspect", path))?;
    check_owner(path, status.uid(), process_user())?;
    if status.mode() & PERMISSIONS & !FILE_MODE != 0 {
        file.set_permissions(Permissions::from_mode(FILE_MODE))
            .map_err(io_error("take permissions from others at", path))?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn mode_of(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & PERMISSIONS
    }

    #[test]
    fn what_is_made_is_for_one_user() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/state");
        make_private_dir(&path, |_| true).unwrap();
        assert_eq!(mode_of(&path), DIR_MODE);
        let file = path.join("lock");
        open_private_file(&file, OpenOptions::new().write(true).create(true)).unwrap();
        assert_eq!(mode_of(&file), FILE_MODE);
    }

    #[test]
    fn what_is_too_open_is_closed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        fs::create_dir(&path).unwrap();
        let file = path.join("lock");
        fs::write(&file, "").unwrap();
        for open in [0o755, 0o750, 0o777, 0o1777, 0o2755] {
            fs::set_permissions(&path, Permissions::from_mode(open)).unwrap();
            fs::set_permissions(&file, Permissions::from_mode(open & 0o666)).unwrap();
            make_private_dir(&path, |name| name == "lock").unwrap();
            open_private_file(&file, OpenOptions::new().write(true)).unwrap();
            assert_eq!((mode_of(&path), mode_of(&file)), (DIR_MODE, FILE_MODE));
        }
        // A directory with stricter permissions is accepted as it is.
        fs::set_permissions(&path, Permissions::from_mode(0o500)).unwrap();
        make_private_dir(&path, |_| false).unwrap();
        assert_eq!(mode_of(&path), 0o500);
    }

    #[test]
    fn others_pass_through_a_directory_and_see_nothing_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        make_private_dir(&path, |_| true).unwrap();
        allow_search(&path).unwrap();
        assert_eq!(mode_of(&path), 0o711);
        make_private_dir(&path, |_| true).unwrap();
        assert_eq!(mode_of(&path), 0o711, "as it was made");
        fs::set_permissions(&path, Permissions::from_mode(0o715)).unwrap();
        make_private_dir(&path, |_| true).unwrap();
        assert_eq!(mode_of(&path), DIR_MODE);
    }

    #[test]
    fn a_directory_of_others_keeps_its_mode() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("else"), "").unwrap();
        let open = |mode| fs::set_permissions(dir.path(), Permissions::from_mode(mode)).unwrap();
        open(0o755);
        make_private_dir(dir.path(), |_| false).unwrap();
        assert_eq!(mode_of(dir.path()), 0o755);
        open(0o1777);
        let error = make_private_dir(dir.path(), |_| false).unwrap_err();
        assert!(matches!(error, PrivateFileError::Shared { .. }), "{error}");
        assert!(error.to_string().contains("mode 1777"), "{error}");
        assert_eq!(mode_of(dir.path()), 0o1777);
    }

    #[test]
    fn what_belongs_to_another_user_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let error = check_owner(dir.path(), 7, 1000).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "{} belongs to user 7, and this process runs as user 1000: run as user 7, or choose another \
                 directory with --state-dir",
                dir.path().display()
            )
        );
        let error = check_owner(Path::new("/state"), 7, 0).unwrap_err();
        let expected = "run as user 7 (`setpriv --reuid 7 --clear-groups nvme-mpt …`), or choose";
        assert!(error.to_string().contains(expected), "{error}");
        // Only root may change the owner of a file.
        if process_user() == 0 {
            let file = dir.path().join("lock");
            fs::write(&file, "").unwrap();
            std::os::unix::fs::chown(&file, Some(65534), None).unwrap();
            let error = open_private_file(&file, OpenOptions::new().write(true)).unwrap_err();
            assert!(matches!(error, PrivateFileError::Foreign { .. }), "{error}");
            std::os::unix::fs::chown(dir.path(), Some(65534), None).unwrap();
            let error = make_private_dir(dir.path(), |_| true).unwrap_err();
            assert!(matches!(error, PrivateFileError::Foreign { .. }), "{error}");
        }
        let target = dir.path().join("target");
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&target, &link).unwrap();
        open_private_file(&link, OpenOptions::new().write(true).create(true)).unwrap_err();
        assert!(!target.exists());
    }
}

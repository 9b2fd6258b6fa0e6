//! Attacks on path resolution: a user with write access to a directory acts between two system calls.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::*;

type Act = Box<dyn FnMut(&str, &Path)>;

thread_local! {
    /// Attack to perform between two calls. Its arguments are the name of the step and the path of the entry.
    static ACT: RefCell<Option<Act>> = const { RefCell::new(None) };
}

pub(crate) fn run_attack(step: &str, directory: &OpenDirectory, entry: &OsStr) {
    ACT.with_borrow_mut(|act| {
        if let Some(act) = act {
            act(step, &directory.path().join(entry));
        }
    });
}

/// Performs the attack at all steps, until this is dropped.
struct Acting;

impl Acting {
    fn with(act: impl FnMut(&str, &Path) + 'static) -> Self {
        ACT.set(Some(Box::new(act)));
        Self
    }
}

impl Drop for Acting {
    fn drop(&mut self) {
        ACT.set(None);
    }
}

/// A user id that no test runs as.
const OTHER: u32 = 65533;

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("not checked: root alone can act as another user");
    }
    is_root
}

const OPEN: SocketPermissions = SocketPermissions {
    mode: 0o666,
    user: Some(OTHER),
    group: Some(OTHER),
};

/// Creates a directory that another user owns, and a file of root outside of it.
fn create_test_dirs() -> (TempDir, PathBuf, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let home = root.path().join("home");
    fs::create_dir(&home).unwrap();
    chown(&home, Some(OTHER), Some(OTHER)).unwrap();
    let secret = root.path().join("secret");
    fs::write(&secret, "secret").unwrap();
    fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
    (root, home, secret)
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

fn owner(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().uid()
}

#[test]
fn a_socket_gets_owner_and_mode_before_its_name() {
    if !is_root() {
        return;
    }
    let (_root, home, _) = create_test_dirs();
    let name = home.join("a.sock");
    let watched = name.clone();
    let _acting = Acting::with(move |step, entry| {
        assert!(!watched.exists(), "{step}");
        if step == "bound" {
            assert_eq!((mode(entry), owner(entry)), (0o600, 0));
        }
    });
    let directory = OpenDirectory::open(&home).unwrap();
    let (listener, id) = directory.listen(OsStr::new("a.sock"), OPEN).unwrap();
    assert_eq!((mode(&name), owner(&name)), (0o666, OTHER));
    assert!(directory.has_entry(OsStr::new("a.sock"), id));
    UnixStream::connect(&name).unwrap();
    assert!(listener.accept().is_ok());
    assert_eq!(fs::read_dir(&home).unwrap().count(), 1);
}

#[test]
fn a_file_swapped_for_the_socket_keeps_its_owner_and_mode() {
    if !is_root() {
        return;
    }
    for at in ["bound", "opened", "permitted"] {
        for kind in ["link", "file", "hard link", "live socket", "dead socket"] {
            let (root, home, secret) = create_test_dirs();
            let live = root.path().join("live.sock");
            let live_socket = UnixListener::bind(&live).unwrap();
            live_socket.set_nonblocking(true).unwrap();
            let dead = root.path().join("dead.sock");
            drop(UnixListener::bind(&dead).unwrap());
            for path in [&live, &dead] {
                fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
            }
            let (secret_path, live_path, dead_path) = (secret.clone(), live.clone(), dead.clone());
            let aside = home.join("aside");
            let _acting = Acting::with(move |step, entry| {
                if step != at {
                    return;
                }
                fs::rename(entry, &aside).unwrap();
                match kind {
                    "link" => symlink(&secret_path, entry).unwrap(),
                    "file" => fs::write(entry, "").unwrap(),
                    "hard link" => fs::hard_link(&secret_path, entry).unwrap(),
                    "live socket" => fs::hard_link(&live_path, entry).unwrap(),
                    _ => fs::hard_link(&dead_path, entry).unwrap(),
                }
            });
            let directory = OpenDirectory::open(&home).unwrap();
            let listened = directory.listen(OsStr::new("a.sock"), OPEN);
            for path in [&secret, &live, &dead] {
                let case = format!("{kind} at {at}: {}", path.display());
                assert_eq!((mode(path), owner(path)), (0o600, 0), "{case}");
            }
            assert_eq!(fs::read(&secret).unwrap(), b"secret");
            match listened {
                // The attack came too late: the socket already had its name.
                Ok(_) => {
                    assert_ne!(at, "bound", "{kind}");
                    UnixStream::connect(home.join("a.sock")).unwrap();
                }
                Err(error) => {
                    assert!(matches!(error, PathError::Replaced { .. }), "{error}");
                    assert_eq!(at, "bound", "{kind}");
                    assert!(!home.join("a.sock").exists());
                }
            }
        }
    }
}

#[test]
fn a_live_socket_that_takes_the_place_of_a_stale_one_stays() {
    let directory = tempfile::tempdir().unwrap();
    let name = OsStr::new("a.sock");
    let path = directory.path().join(name);
    drop(UnixListener::bind(&path).unwrap());
    let came = std::rc::Rc::new(RefCell::new(None));
    let comes = came.clone();
    let _acting = Acting::with(move |step, entry| {
        if step == "stale" {
            fs::remove_file(entry).unwrap();
            *comes.borrow_mut() = Some(UnixListener::bind(entry).unwrap());
        }
    });
    let permissions = SocketPermissions {
        mode: 0o600,
        user: None,
        group: None,
    };
    let opened = OpenDirectory::open(directory.path()).unwrap();
    let error = opened.listen(name, permissions).unwrap_err();
    assert!(matches!(error, PathError::InUse { .. }), "{error}");
    UnixStream::connect(&path).unwrap();
    assert!(came.borrow().as_ref().unwrap().accept().is_ok());
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn another_users_stale_socket_is_replaced_only_in_a_directory_of_ours() {
    if !is_root() {
        return;
    }
    let permissions = SocketPermissions {
        mode: 0o600,
        user: None,
        group: None,
    };
    let name = OsStr::new("a.sock");
    for (dir_mode, is_replaced) in [(0o755, true), (0o1777, false)] {
        let (root, ..) = create_test_dirs();
        let dir = root.path().join("folder");
        fs::create_dir(&dir).unwrap();
        fs::set_permissions(&dir, Permissions::from_mode(dir_mode)).unwrap();
        drop(UnixListener::bind(dir.join(name)).unwrap());
        chown(dir.join(name), Some(OTHER), None).unwrap();
        let listened = OpenDirectory::open(&dir).unwrap().listen(name, permissions);
        assert_eq!(listened.is_ok(), is_replaced, "{dir_mode:o}");
        let expected = if is_replaced { 0 } else { OTHER };
        assert_eq!(owner(&dir.join(name)), expected);
        // The other user may have had access to the directory before.
        let listened = OpenDirectory::open(&dir).unwrap().listen(
            name,
            SocketPermissions {
                user: Some(OTHER),
                ..permissions
            },
        );
        assert!(listened.is_ok() || is_replaced);
    }
}

#[test]
fn links_of_trusted_users_are_followed_and_others_are_refused() {
    if !is_root() {
        return;
    }
    let (root, home, _) = create_test_dirs();
    let real = root.path().join("real");
    fs::create_dir(&real).unwrap();
    let real = real.canonicalize().unwrap();
    // A link as /var/run is one.
    let good = root.path().join("run");
    symlink("real", &good).unwrap();
    assert_eq!(OpenDirectory::open(&good).unwrap().path(), real);
    let twice = root.path().join("twice");
    symlink(&good, &twice).unwrap();
    let through = twice.join("../run/./");
    assert_eq!(OpenDirectory::open(&through).unwrap().path(), real);
    OpenDirectory::open(&good)
        .unwrap()
        .check_not_exposed(OsStr::new("x"))
        .unwrap();

    // A link of root in another user's directory: that user may have moved it there.
    let moved = home.join("moved");
    symlink(&real, &moved).unwrap();
    // A link of another user in a directory of root.
    let others = root.path().join("others");
    symlink(&real, &others).unwrap();
    lchown(&others, Some(OTHER), None).unwrap();
    // A link of another user in a directory that all users may write.
    let all = root.path().join("all");
    fs::create_dir(&all).unwrap();
    fs::set_permissions(&all, Permissions::from_mode(0o1777)).unwrap();
    let of_all = all.join("others");
    symlink(&real, &of_all).unwrap();
    lchown(&of_all, Some(OTHER), None).unwrap();
    for link in [moved, others, of_all] {
        for path in [link.clone(), link.join("below")] {
            let error = PathEntry::find(&path).unwrap_err();
            let named = matches!(&error, PathError::ForeignLink { path, owner: OTHER } if path.file_name() == link.file_name());
            assert!(named, "{error}");
        }
    }
    // A link of root in a directory that all users may write: no other user can replace it.
    let ours = all.join("ours");
    symlink(&real, &ours).unwrap();
    assert_eq!(OpenDirectory::open(&ours).unwrap().path(), real);

    symlink("loop", root.path().join("loop")).unwrap();
    let error = PathEntry::find(&root.path().join("loop")).unwrap_err();
    assert!(matches!(error, PathError::Io { .. }), "{error}");
}

#[test]
fn files_writable_or_replaceable_by_other_users_are_not_trusted() {
    if !is_root() {
        return;
    }
    let (root, home, _) = create_test_dirs();
    let all = root.path().join("all");
    fs::create_dir(&all).unwrap();
    fs::set_permissions(&all, Permissions::from_mode(0o1777)).unwrap();
    let open = root.path().join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, Permissions::from_mode(0o775)).unwrap();
    let below = home.join("below");
    fs::create_dir(&below).unwrap();
    for (dir, user, mode, is_obeyed) in [
        (root.path(), 0, 0o600, true),
        (root.path(), 0, 0o644, true),
        (root.path(), 0, 0o664, false),
        (root.path(), 0, 0o646, false),
        (root.path(), OTHER, 0o600, false),
        (&all, 0, 0o600, true),
        (&all, OTHER, 0o600, false),
        (&open, 0, 0o600, false),
        (&home, 0, 0o600, false),
        (&below, 0, 0o600, false),
    ] {
        let path = dir.join("file");
        fs::write(&path, "text").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        chown(&path, Some(user), None).unwrap();
        let read = read_trusted_file(&path, 4);
        let case = format!("{} of {user}, {mode:o}: {read:?}", path.display());
        assert_eq!(read.is_ok(), is_obeyed, "{case}");
        if let Err(error) = read {
            let message = error.to_string();
            assert!(message.contains(&*path.to_string_lossy()), "{message}");
            assert!(message.contains("owner"), "{message}");
        }
        let makes = OpenDirectory::open(dir)
            .unwrap()
            .check_not_exposed(OsStr::new("file"));
        let exposed = [&open, &home, &below].iter().any(|other| **other == dir);
        assert_eq!(makes.is_err(), exposed, "{}", dir.display());
        fs::remove_file(&path).unwrap();
    }
    let error = read_trusted_file(&home, 4).unwrap_err();
    assert!(matches!(error, PathError::NotAFile { .. }), "{error}");
    let error = read_trusted_file(&root.path().join("none"), 4).unwrap_err();
    assert!(error.is_not_found(), "{error}");
    fs::write(root.path().join("long"), "12345").unwrap();
    let error = read_trusted_file(&root.path().join("long"), 4).unwrap_err();
    assert!(error.to_string().contains("Cannot read"), "{error}");
}

#[test]
fn a_file_is_replaced_as_a_whole_and_no_link_is_written_through() {
    let (root, secret) = {
        let root = tempfile::tempdir().unwrap();
        let secret = root.path().join("secret");
        fs::write(&secret, "secret").unwrap();
        (root, secret)
    };
    let home = root.path().join("home");
    fs::create_dir(&home).unwrap();
    let directory = OpenDirectory::open(&home).unwrap();
    let name = OsStr::new("metrics.prom");
    symlink(&secret, home.join(name)).unwrap();
    // Any user who can read the directory sees the name of the temporary file. The attack replaces that file by a link.
    let target = secret.clone();
    let _acting = Acting::with(move |step, entry| {
        if step == "written" {
            fs::remove_file(entry).unwrap();
            symlink(&target, entry).unwrap();
        }
    });
    directory
        .replace(name, 0o644, |file| file.write_all(b"figures"))
        .unwrap();
    assert_eq!(fs::read(&secret).unwrap(), b"secret");
    drop(_acting);
    let id = directory
        .replace(name, 0o644, |file| file.write_all(b"figures"))
        .unwrap();
    assert_eq!(fs::read(&secret).unwrap(), b"secret");
    assert_eq!(fs::read(home.join(name)).unwrap(), b"figures");
    assert!(fs::symlink_metadata(home.join(name)).unwrap().is_file());
    assert_eq!(mode(&home.join(name)), 0o644);
    let failed = directory.replace(name, 0o644, |_| Err(std::io::ErrorKind::StorageFull.into()));
    assert!(failed.is_err());
    assert_eq!(fs::read(home.join(name)).unwrap(), b"figures");
    assert!(!directory.create_new(name, 0o600, |_| Ok(())).unwrap());
    assert_eq!(fs::read_dir(&home).unwrap().count(), 1);
    // The file that has the name is not the one that was written.
    let later = directory.replace(name, 0o644, |_| Ok(())).unwrap();
    directory.remove(name, id);
    assert!(home.join(name).exists());
    directory.remove(name, later);
    assert!(directory.create_new(name, 0o600, |_| Ok(())).unwrap());
}

#[test]
fn a_file_of_another_user_in_a_directory_of_all_is_not_replaced() {
    if !is_root() {
        return;
    }
    let (root, ..) = create_test_dirs();
    fs::set_permissions(root.path(), Permissions::from_mode(0o1777)).unwrap();
    let path = root.path().join("file");
    fs::write(&path, "theirs").unwrap();
    chown(&path, Some(OTHER), None).unwrap();
    let directory = OpenDirectory::open(root.path()).unwrap();
    let error = directory
        .replace(OsStr::new("file"), 0o600, |_| Ok(()))
        .unwrap_err();
    assert!(matches!(error, PathError::ForeignFile { .. }), "{error}");
    assert_eq!(fs::read(&path).unwrap(), b"theirs");
}

#[test]
fn directories_are_made_where_the_path_leads() {
    let root = tempfile::tempdir().unwrap();
    let deep = root.path().join("a/b");
    let made = OpenDirectory::open_or_create(&deep, 0o700).unwrap();
    assert_eq!(mode(&deep), 0o700);
    made.set_mode(0o755).unwrap();
    assert_eq!(mode(&deep), 0o755);
    OpenDirectory::open_or_create(&deep, 0o700).unwrap();
    fs::write(deep.join("file"), "").unwrap();
    assert!(OpenDirectory::open_or_create(&deep.join("file"), 0o700).is_err());
    let file = deep.join("file");
    let (directory, name) = OpenDirectory::open_parent(&file).unwrap();
    assert_eq!(
        (directory.path().ends_with("a/b"), name),
        (true, OsStr::new("file"))
    );
    assert!(OpenDirectory::open_parent(Path::new("/")).is_err());
    assert!(
        !fs::metadata(directory.entry_path(name))
            .unwrap()
            .file_type()
            .is_socket()
    );
}

//! The guests' user land as an initramfs: busybox, fio, nvme-cli, and tools for file systems and zones, with their
//! libraries. The initramfs is not compressed, since decompressing it in an emulated guest takes longer than reading it.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::apt::{self, DebianSuites};
use super::cache::ProvisionCache;
use super::cpio::CpioArchive;
use super::{ProvisionError, with_path};
use crate::process;

pub(super) const SUITES: DebianSuites = DebianSuites {
    known: &["trixie"],
    preferred: "trixie",
};
pub(super) const PACKAGES: &[&str] = &[
    "btrfs-progs",
    "busybox-static",
    "dmsetup",
    "e2fsprogs",
    "fio",
    "nvme-cli",
    "util-linux",
];
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

/// Programs: path in their package, and path in the guest.
const PROGRAMS: &[(&str, &str)] = &[
    ("usr/bin/busybox", "bin/busybox"),
    ("usr/bin/fio", "sbin/fio"),
    ("usr/sbin/nvme", "sbin/nvme"),
    ("usr/sbin/dmsetup", "sbin/dmsetup"),
    ("usr/sbin/mke2fs", "sbin/mkfs.ext4"),
    ("usr/sbin/e2fsck", "sbin/e2fsck"),
    ("usr/bin/btrfs", "sbin/btrfs"),
    ("usr/sbin/mkfs.btrfs", "sbin/mkfs.btrfs"),
    ("usr/sbin/blkzone", "sbin/blkzone"),
];

/// Scripts: path in the guest, and content.
const SCRIPTS: &[(&str, &str)] = &[
    ("init", include_str!("../../../resources/guest/init")),
    ("sbin/agent", include_str!("../../../resources/guest/agent")),
    ("sbin/event", include_str!("../../../resources/guest/event")),
    (
        "sbin/fsync-records",
        include_str!("../../../resources/guest/fsync-records"),
    ),
];

const FOLDERS: &[&str] = &[
    "bin",
    "sbin",
    "etc",
    "dev",
    "proc",
    "sys",
    "run",
    "tmp",
    "mnt",
    "lib64",
    "lib",
    "lib/x86_64-linux-gnu",
];

/// Returns the image. If the cache does not contain it, creates it.
pub(super) fn provide(cache: &ProvisionCache) -> Result<PathBuf, ProvisionError> {
    let recipe = format!("{PACKAGES:?} of {SUITES:?}: {FOLDERS:?} {PROGRAMS:?} {SCRIPTS:?}");
    let dir = cache.entry("userland", &recipe, |dir| {
        // The packages are a separate entry of the cache. So after a change of a script, they are not fetched again.
        let root = cache.entry(
            "userland-packages",
            &format!("{PACKAGES:?} of {SUITES:?}"),
            |root| apt::unpack(SUITES, PACKAGES, root),
        )?;
        pack(&root, &dir.join("initramfs"))
    })?;
    Ok(dir.join("initramfs"))
}

/// Files that some guests have in addition.
pub(super) struct UserlandAdditions<'a> {
    pub(super) dirs: &'a [&'a str],
    /// Paths and contents of scripts in the guest.
    pub(super) scripts: &'a [(&'a str, &'a str)],
    /// Directory of modules, which the guest has in `lib/modules`.
    pub(super) modules: &'a Path,
}

impl UserlandAdditions<'_> {
    /// Returns an image of `userland` with these additions. It consists of two archives, which Linux unpacks in sequence.
    pub(super) fn to(
        &self,
        cache: &ProvisionCache,
        name: &str,
        userland: &Path,
    ) -> Result<PathBuf, ProvisionError> {
        let Self {
            dirs,
            scripts,
            modules,
        } = self;
        let recipe = format!("{userland:?} {modules:?} {dirs:?} {scripts:?}");
        let dir = cache.entry(name, &recipe, |dir| {
            let image = dir.join("initramfs");
            let write = || -> io::Result<()> {
                let mut out = BufWriter::new(File::create(&image)?);
                io::copy(&mut File::open(userland)?, &mut out)?;
                let mut archive = CpioArchive::new(out);
                for name in *dirs {
                    archive.directory(name)?;
                }
                for (name, text) in *scripts {
                    archive.file(name, 0o755, text.as_bytes())?;
                }
                for entry in fs::read_dir(modules)? {
                    let entry = entry?;
                    let name = entry.file_name();
                    let name = format!("lib/modules/{}", name.to_string_lossy());
                    archive.file(&name, 0o644, &fs::read(entry.path())?)?;
                }
                archive.finish()?.flush()
            };
            write().map_err(with_path(&image))
        })?;
        Ok(dir.join("initramfs"))
    }
}

fn pack(root: &Path, image: &Path) -> Result<(), ProvisionError> {
    let at = |source| ProvisionError::File {
        path: image.to_owned(),
        source,
    };
    let out = BufWriter::new(fs::File::create(image).map_err(at)?);
    let mut archive = CpioArchive::new(out);
    for dir in FOLDERS {
        archive.directory(dir).map_err(at)?;
    }
    for (name, text) in SCRIPTS {
        archive.file(name, 0o755, text.as_bytes()).map_err(at)?;
    }
    for (from, to) in PROGRAMS {
        archive
            .file(to, 0o755, &read(&root.join(from))?)
            .map_err(at)?;
    }
    for library in libraries(root)? {
        let content = read(&library)?;
        let name = library.file_name().unwrap_or_default().to_string_lossy();
        archive
            .file(&format!("lib/x86_64-linux-gnu/{name}"), 0o755, &content)
            .map_err(at)?;
    }
    archive
        .symlink(
            "lib64/ld-linux-x86-64.so.2",
            Path::new("../lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"),
        )
        .map_err(at)?;
    archive.finish().map_err(at)?;
    Ok(())
}

/// Returns all libraries that the programs need, as their loader finds them.
fn libraries(root: &Path) -> Result<BTreeSet<PathBuf>, ProvisionError> {
    let dir = root.join(LIBRARIES);
    let loader = dir.join("ld-linux-x86-64.so.2");
    // fio's RADOS engine has a built-in path for one of its libraries.
    let path = format!("{0}:{0}/ceph", dir.display());
    let mut found = BTreeSet::from([loader.clone()]);
    for (program, _) in PROGRAMS
        .iter()
        .filter(|(program, _)| !program.ends_with("busybox"))
    {
        let listing = process::run(
            Command::new(&loader)
                .args(["--library-path", &path, "--list"])
                .arg(root.join(program)),
        )?;
        // Lines are like "libz.so.1 => /…/libz.so.1 (0x…)". Lines without an arrow are the loader or the vDSO.
        for line in listing.lines() {
            let Some((name, target)) = line.split_once(" => ") else {
                continue;
            };
            let target = target.split(" (").next().unwrap_or_default();
            if !target.starts_with('/') {
                return Err(ProvisionError::NotInPackages {
                    suite: SUITES.preferred.to_owned(),
                    what: format!("{} for {program}", name.trim()),
                });
            }
            found.insert(PathBuf::from(target));
        }
    }
    Ok(found)
}

fn read(path: &Path) -> Result<Vec<u8>, ProvisionError> {
    fs::read(path).map_err(|source| ProvisionError::File {
        path: path.to_owned(),
        source,
    })
}

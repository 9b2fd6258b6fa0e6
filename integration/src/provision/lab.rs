//! What the lab boots: a kernel with the modules of a virtualisation host, a user land, and a disk with
//! all that its own guests need. A program inside the lab finds the same things on that disk.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::apt;
use super::cache::Cache;
use super::cpio::Archive;
use super::host::{self, Tool};
use super::kernel::{self, Kernel, KernelChoice};
use super::qemu::Qemu;
use super::{Assets, ProvisionError, image, modules, userland};
use crate::process;
use crate::progress::Step;

/// Set inside the lab.
const INSIDE_VARIABLE: &str = "NVME_MPT_LAB";
/// Where the lab has the disk of all that its guests need.
const ASSETS: &str = "/lab/assets";
/// Where the lab has what this run brought.
const RUN: &str = "/lab/run";

/// Modules of a virtualisation host. What these need comes with them; what a kernel has built in, as
/// Debian 13's has most of virtio, is not missed.
const MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_blk",
    "virtio_console",
    "kvm_amd",
    "vfio_iommu_type1",
    "vfio_pci",
];

/// Scripts of ours: where the lab has them, what they say.
const SCRIPTS: &[(&str, &str)] = &[
    ("init", include_str!("../../../resources/lab/init")),
    (
        "sbin/lab-ctl",
        include_str!("../../../resources/lab/lab-ctl"),
    ),
    (
        "sbin/lab-bind",
        include_str!("../../../resources/lab/lab-bind"),
    ),
];

const FOLDERS: &[&str] = &["lab", "lab/assets", "lab/run", "lib/modules"];

const TOOLS: &[Tool] = &[
    Tool {
        program: "mkfs.ext4",
        package: "e2fsprogs",
    },
    Tool {
        program: "xz",
        package: "xz-utils",
    },
];

/// All that booting the lab takes.
#[derive(Debug, Clone)]
pub struct LabAssets {
    /// The lab as a guest.
    pub host: Assets,
    /// The disk with all that the guests inside it need.
    pub disk: PathBuf,
}

impl LabAssets {
    /// Provides the lab with `kernel`, which must be one of Debian's.
    ///
    /// # Errors
    /// If something can't be found, fetched or verified.
    pub fn provide(kernel: &KernelChoice) -> Result<Self, ProvisionError> {
        host::ensure(TOOLS)?;
        let cache = Cache::open()?;
        let (kernel, modules) = kernel_with_modules(&cache, kernel)?;
        let userland = userland::provide(&cache)?;
        Ok(Self {
            host: Assets {
                qemu: Qemu::provide(&cache)?,
                kernel,
                initramfs: initramfs(&cache, &userland, &modules)?,
            },
            disk: disk(&cache, &userland)?,
        })
    }
}

/// Whether this program runs inside the lab.
pub fn is_inside() -> bool {
    std::env::var_os(INSIDE_VARIABLE).is_some() && Path::new(ASSETS).is_dir()
}

/// A file that this run brought into the lab.
pub fn brought(name: &str) -> PathBuf {
    Path::new(RUN).join(name)
}

/// What a guest inside the lab boots.
pub(super) fn nested(choice: &KernelChoice) -> Result<Assets, ProvisionError> {
    let assets = Path::new(ASSETS);
    Ok(Assets {
        qemu: Qemu::unpacked_in(assets.join("qemu")),
        kernel: match kernel::packaged(choice) {
            Ok((suites, name)) => Kernel::in_folder(&assets.join(name), suites)?,
            Err(own) => own,
        },
        initramfs: assets.join("initramfs"),
    })
}

fn kernel_with_modules(
    cache: &Cache,
    choice: &KernelChoice,
) -> Result<(Kernel, PathBuf), ProvisionError> {
    let Ok((suites, name)) = kernel::packaged(choice) else {
        return Err(ProvisionError::NoModules);
    };
    let recipe = format!("{} of {suites:?} with {MODULES:?}", kernel::PACKAGE);
    let folder = cache.entry(&format!("lab-{name}"), &recipe, |folder| {
        let root = folder.join("root");
        let copies = folder.join("modules");
        for path in [&root, &copies] {
            fs::create_dir(path).map_err(at(path))?;
        }
        apt::unpack(suites, &[kernel::PACKAGE], &root)?;
        kernel::keep_image(&root, folder, suites)?;
        modules::copy(&root, MODULES, &copies)?;
        fs::remove_dir_all(&root).map_err(at(&root))
    })?;
    Ok((Kernel::in_folder(&folder, suites)?, folder.join("modules")))
}

/// The guests' user land and, over it, what makes it a virtualisation host: Linux unpacks one archive
/// after the other.
fn initramfs(cache: &Cache, userland: &Path, modules: &Path) -> Result<PathBuf, ProvisionError> {
    let recipe = format!("{userland:?} {modules:?} {FOLDERS:?} {SCRIPTS:?}");
    let folder = cache.entry("lab-userland", &recipe, |folder| {
        let image = folder.join("initramfs");
        let write = || -> io::Result<()> {
            let mut out = BufWriter::new(File::create(&image)?);
            io::copy(&mut File::open(userland)?, &mut out)?;
            let mut archive = Archive::new(out);
            for name in FOLDERS {
                archive.directory(name)?;
            }
            for (name, text) in SCRIPTS {
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
        write().map_err(at(&image))
    })?;
    Ok(folder.join("initramfs"))
}

/// A QEMU with its libraries, the guests' kernels and user land.
fn disk(cache: &Cache, userland: &Path) -> Result<PathBuf, ProvisionError> {
    let qemu = Qemu::unpacked(cache)?;
    let mut parts = vec![
        (qemu, "qemu".to_owned()),
        (userland.to_owned(), "initramfs".to_owned()),
    ];
    for choice in [KernelChoice::V6_1, KernelChoice::V6_12] {
        if let Ok((_, name)) = kernel::packaged(&choice) {
            let image = Kernel::provide(cache, &choice)?.image;
            let folder = image.parent().unwrap_or(&image).to_owned();
            parts.push((folder, name.to_owned()));
        }
    }
    let folder = cache.entry("lab-disk", &format!("{parts:?}"), |folder| {
        let step = Step::start("Making the lab's disk");
        let tree = folder.join("tree");
        fs::create_dir(&tree).map_err(at(&tree))?;
        for (from, name) in &parts {
            // The cache is one file system, in which a link costs nothing.
            process::run(
                Command::new("cp")
                    .args(["--archive", "--link"])
                    .arg(from)
                    .arg(tree.join(name)),
            )?;
        }
        image::make(&tree, &folder.join("disk"))?;
        fs::remove_dir_all(&tree).map_err(at(&tree))?;
        step.done("");
        Ok(())
    })?;
    Ok(folder.join("disk"))
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> ProvisionError {
    let path = path.to_owned();
    |source| ProvisionError::File { path, source }
}

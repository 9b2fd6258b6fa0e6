//! Files of the lab: a kernel with the modules of a virtualization host, a user land, and a disk with all files of nested
//! guests. Programs inside the lab use this disk.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::cache::ProvisionCache;
use super::host::{self, HostTool};
use super::kernel::{self, GuestKernel, KernelChoice};
use super::qemu::Qemu;
use super::userland::{self, UserlandAdditions};
use super::{GuestAssets, ProvisionError, image, with_path};
use crate::process;
use crate::progress::ProgressStep;

/// Environment variable that is only set inside the lab.
const INSIDE_VARIABLE: &str = "NVME_MPT_LAB";
/// Mount point of the nested guests' disk in the lab.
const ASSETS: &str = "/lab/assets";
/// Directory inside the lab, with the files that were copied into this lab.
const RUN: &str = "/lab/run";

/// Modules of a virtualization host, without their dependencies. Some may be built into the kernel, such as most of virtio
/// in Debian 13's.
const MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_blk",
    "virtio_console",
    "kvm_amd",
    "vfio_iommu_type1",
    "vfio_pci",
    "dm_delay",
    "dm_flakey",
];

/// Scripts of the lab: path in the lab, and content.
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

/// Modules of nested guests, from Debian 13's kernel.
const GUEST_MODULES: &[&str] = &["virtio_balloon", "virtio_blk"];

const TOOLS: &[HostTool] = &[
    HostTool {
        program: "mkfs.ext4",
        package: "e2fsprogs",
    },
    HostTool {
        program: "xz",
        package: "xz-utils",
    },
];

/// Files that are needed to boot the lab.
#[derive(Debug, Clone)]
pub struct LabAssets {
    /// Files for booting the lab, which is itself a guest.
    pub host: GuestAssets,
    /// Disk image with all files of nested guests.
    pub disk: PathBuf,
}

impl LabAssets {
    /// Provides the files of a lab with the kernel `kernel`, which must be Debian's.
    ///
    /// # Errors
    /// A file cannot be found, fetched or verified.
    pub fn provide(kernel: &KernelChoice) -> Result<Self, ProvisionError> {
        host::ensure(TOOLS)?;
        let cache = ProvisionCache::open()?;
        let (kernel, modules) = GuestKernel::with_modules(&cache, kernel, "lab", MODULES)?;
        let userland = userland::provide(&cache)?;
        // With these additions, the guests' user land becomes that of a virtualization host.
        let additions = UserlandAdditions {
            dirs: FOLDERS,
            scripts: SCRIPTS,
            modules: &modules,
        };
        Ok(Self {
            host: GuestAssets {
                qemu: Qemu::provide(&cache)?,
                kernel,
                initramfs: additions.to(&cache, "lab-userland", &userland)?,
            },
            disk: disk(&cache, &guest_userland(&cache, &userland)?)?,
        })
    }
}

/// Returns whether this program runs inside the lab.
pub fn is_inside() -> bool {
    std::env::var_os(INSIDE_VARIABLE).is_some() && Path::new(ASSETS).is_dir()
}

/// Returns the path of a file that was copied into this lab.
pub fn copied_path(name: &str) -> PathBuf {
    Path::new(RUN).join(name)
}

/// Returns the files for booting a nested guest.
pub(super) fn nested(choice: &KernelChoice) -> Result<GuestAssets, ProvisionError> {
    let assets = Path::new(ASSETS);
    Ok(GuestAssets {
        qemu: Qemu::from_unpacked(assets.join("qemu")),
        kernel: match kernel::packaged(choice) {
            Ok((suites, name)) => GuestKernel::from_dir(&assets.join(name), suites)?,
            Err(own) => own,
        },
        initramfs: assets.join("initramfs"),
    })
}

/// Returns the user land of nested guests.
fn guest_userland(cache: &ProvisionCache, userland: &Path) -> Result<PathBuf, ProvisionError> {
    let (_, modules) =
        GuestKernel::with_modules(cache, &KernelChoice::V6_12, "guest", GUEST_MODULES)?;
    let additions = UserlandAdditions {
        dirs: &["lib/modules"],
        scripts: &[],
        modules: &modules,
    };
    additions.to(cache, "guest-userland", userland)
}

/// Creates a disk with QEMU and its libraries, and with kernels and the user land of nested guests.
fn disk(cache: &ProvisionCache, userland: &Path) -> Result<PathBuf, ProvisionError> {
    let qemu = Qemu::unpacked(cache)?;
    let mut parts = vec![
        (qemu, "qemu".to_owned()),
        (userland.to_owned(), "initramfs".to_owned()),
    ];
    for choice in [KernelChoice::V6_1, KernelChoice::V6_12] {
        if let Ok((_, name)) = kernel::packaged(&choice) {
            let image = GuestKernel::provide(cache, &choice)?.image;
            let dir = image.parent().unwrap_or(&image).to_owned();
            parts.push((dir, name.to_owned()));
        }
    }
    let dir = cache.entry("lab-disk", &format!("{parts:?}"), |dir| {
        let step = ProgressStep::start("Making the lab's disk");
        let tree = dir.join("tree");
        fs::create_dir(&tree).map_err(with_path(&tree))?;
        for (from, name) in &parts {
            // The cache is on one file system, so hard links save space.
            process::run(
                Command::new("cp")
                    .args(["--archive", "--link"])
                    .arg(from)
                    .arg(tree.join(name)),
            )?;
        }
        image::make(&tree, &dir.join("disk"), 0)?;
        fs::remove_dir_all(&tree).map_err(with_path(&tree))?;
        step.done("");
        Ok(())
    })?;
    Ok(dir.join("disk"))
}

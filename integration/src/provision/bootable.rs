//! A disk with Debian 12 that UEFI firmware can boot. GRUB and the kernel are on an EFI system partition; the file system
//! of [`debian`] is on another partition.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::apt::{self, DebianSuites};
use super::cache::ProvisionCache;
use super::debian::DebianRelease;
use super::host::{self, HostTool};
use super::kernel::{GuestKernel, KernelChoice};
use super::{ProvisionError, debian, with_path};
use crate::process;

const SUITES: DebianSuites = DebianSuites {
    known: &["bookworm"],
    preferred: "bookworm",
};
const LOADER_PACKAGES: &[&str] = &["grub-efi-amd64-bin"];
/// GRUB with built-in modules. It reads `/EFI/debian/grub.cfg` on its own partition.
const LOADER: &str = "usr/lib/grub/x86_64-efi/monolithic/grubx64.efi";
const TOOLS: [HostTool; 2] = [
    HostTool {
        program: "sfdisk",
        package: "fdisk",
    },
    HostTool {
        program: "mformat",
        package: "mtools",
    },
];

const MIB: u64 = 1 << 20;
/// Start and size in MiB of the EFI system partition, which lies behind the partition table.
const SYSTEM_PARTITION: (u64, u64) = (1, 64);
/// Free MiB behind the last partition, for the backup partition table.
const END: u64 = 1;
/// Unique identifier of the root partition. The partition is found by this identifier, because the kernel chooses the
/// number of the drive.
const ROOT: &str = "4d9bdff4-5a02-4b3c-9a4b-6e2f2f0f8f01";

/// Returns the GRUB commands, without a menu.
fn loader_configuration() -> String {
    format!(
        "linux /vmlinuz root=PARTUUID={ROOT} rw console=ttyS0 panic=-1 no_timer_check \
         nvme_core.io_timeout=600 nvme_core.admin_timeout=600 systemd.show_status=0\nboot\n"
    )
}

/// Returns the image of the disk. If the cache does not contain it, creates it, which requires root.
///
/// # Errors
/// Packages cannot be fetched or installed.
pub fn provide() -> Result<PathBuf, ProvisionError> {
    // Only one user can have the cache open at a time, so this precedes opening it.
    let root = debian::provide(DebianRelease::Debian12)?;
    let cache = ProvisionCache::open()?;
    let kernel = GuestKernel::provide(&cache, &KernelChoice::V6_1)?;
    let configuration = loader_configuration();
    let recipe = format!(
        "{root:?} by {LOADER_PACKAGES:?} of {SUITES:?} and {kernel:?}: {SYSTEM_PARTITION:?} {configuration}"
    );
    let dir = cache.entry("bootable", &recipe, |dir| {
        host::ensure(&TOOLS)?;
        let packages = dir.join("packages");
        fs::create_dir(&packages).map_err(with_path(&packages))?;
        apt::unpack(SUITES, LOADER_PACKAGES, &packages)?;
        let text = dir.join("grub.cfg");
        fs::write(&text, &configuration).map_err(with_path(&text))?;
        let system = dir.join("system");
        let files = [
            (packages.join(LOADER), "::/EFI/BOOT/BOOTX64.EFI"),
            (text, "::/EFI/debian/grub.cfg"),
            (kernel.image.clone(), "::/vmlinuz"),
        ];
        make_system_partition(&system, &files)?;
        make_disk(&dir.join("disk"), &system, &root)?;
        fs::remove_file(&system).map_err(with_path(&system))?;
        fs::remove_dir_all(&packages).map_err(with_path(&packages))
    })?;
    Ok(dir.join("disk"))
}

/// Creates a FAT file system with these files, each at its path.
fn make_system_partition(image: &Path, files: &[(PathBuf, &str)]) -> Result<(), ProvisionError> {
    let (_, mib) = SYSTEM_PARTITION;
    let sectors = (mib * MIB / 512).to_string();
    let tool = |name: &str| {
        let mut command = Command::new(name);
        command.arg("-i").arg(image);
        command
    };
    process::run(tool("mformat").args(["-C", "-F", "-T", &sectors, "::"]))?;
    process::run(tool("mmd").args(["::/EFI", "::/EFI/BOOT", "::/EFI/debian"]))?;
    for (file, path) in files {
        process::run(tool("mcopy").arg(file).arg(path))?;
    }
    Ok(())
}

/// Creates a disk with two partitions, which get the contents of `system` and `root`.
fn make_disk(disk: &Path, system: &Path, root: &Path) -> Result<(), ProvisionError> {
    let root_mib = fs::metadata(root)
        .map_err(with_path(root))?
        .len()
        .div_ceil(MIB);
    let (start, mib) = SYSTEM_PARTITION;
    let root_start = start + mib;
    fs::File::create(disk)
        .and_then(|file| file.set_len((root_start + root_mib + END) * MIB))
        .map_err(with_path(disk))?;
    let table = disk.with_extension("table");
    let text = format!(
        "label: gpt\n\
         start={start}MiB, size={mib}MiB, type=uefi\n\
         start={root_start}MiB, size={root_mib}MiB, type=linux, uuid={ROOT}\n"
    );
    fs::write(&table, text).map_err(with_path(&table))?;
    // Debian installs sfdisk in a directory that is only in the PATH of root.
    let script = "exec /sbin/sfdisk --quiet \"$0\" < \"$1\"";
    process::run(
        Command::new("sh")
            .args(["-c", script])
            .arg(disk)
            .arg(&table),
    )?;
    for (partition, start) in [(system, start), (root, root_start)] {
        let input = format!("if={}", partition.display());
        let output = format!("of={}", disk.display());
        let seek = format!("seek={start}");
        let how = ["bs=1M", "conv=notrunc,sparse", "status=none"];
        process::run(Command::new("dd").args([input, output, seek]).args(how))?;
    }
    fs::remove_file(&table).map_err(with_path(&table))
}

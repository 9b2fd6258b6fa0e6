//! A regular Debian installation with systemd, and with an agent for the host.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::cache::ProvisionCache;
use super::host::{self, HostTool};
use super::kernel::KernelChoice;
use super::{ProvisionError, apt, image, with_path};
use crate::process;
use crate::progress::ProgressStep;

/// Free space in bytes for the installation of packages. During an upgrade, it must hold two versions of a package.
const FREE_SPACE: u64 = 512 << 20;
const PACKAGES: &str = "systemd,systemd-sysv,udev,e2fsprogs";
const TOOLS: [HostTool; 1] = [HostTool {
    program: "mmdebstrap",
    package: "mmdebstrap",
}];

const AGENT: &str = include_str!("../../../resources/guest/agent");
const AGENT_UNIT: &str = "\
[Unit]
Description=Commands of the host
DefaultDependencies=no
After=local-fs.target systemd-udevd.service

[Service]
ExecStart=/bin/sh /usr/local/sbin/agent
";
/// Directory of services that a guest starts by default.
const TARGET: &str = "multi-user.target.wants";

/// A release of Debian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DebianRelease {
    /// Bullseye.
    Debian11,
    /// Bookworm.
    Debian12,
    /// Trixie.
    Debian13,
}

impl DebianRelease {
    /// Returns the name of the release's suite.
    pub fn suite(self) -> &'static str {
        match self {
            Self::Debian11 => "bullseye",
            Self::Debian12 => "bookworm",
            Self::Debian13 => "trixie",
        }
    }

    /// Returns the release's kernel.
    pub fn kernel(self) -> KernelChoice {
        match self {
            Self::Debian11 => KernelChoice::V5_10,
            Self::Debian12 => KernelChoice::V6_1,
            Self::Debian13 => KernelChoice::V6_12,
        }
    }
}

/// Returns the image of the file system. If the cache does not contain it, creates it, which requires root.
///
/// Its packages are configured and known to `dpkg`.
///
/// # Errors
/// Packages cannot be fetched or installed.
pub fn provide(release: DebianRelease) -> Result<PathBuf, ProvisionError> {
    let cache = ProvisionCache::open()?;
    let suite = release.suite();
    let recipe = format!("{PACKAGES} of {suite}, {FREE_SPACE} free: {AGENT} {AGENT_UNIT}");
    let dir = cache.entry("debian", &recipe, |dir| {
        host::ensure(&TOOLS)?;
        let root = dir.join("root");
        install(suite, &root)?;
        add_agent(&root)?;
        image::make(&root, &dir.join("disk"), FREE_SPACE)?;
        fs::remove_dir_all(&root).map_err(with_path(&root))
    })?;
    Ok(dir.join("disk"))
}

/// Creates a file system image with the contents of `dir`.
///
/// # Errors
/// The directory cannot be read, or the image cannot be written.
pub fn disk(dir: &Path, disk: &Path) -> Result<(), ProvisionError> {
    image::make(dir, disk, 0)
}

fn install(suite: &str, root: &Path) -> Result<(), ProvisionError> {
    let step = ProgressStep::start(format!("Installing Debian {suite} into a directory"));
    let mut command = Command::new("mmdebstrap");
    command
        .args(["--mode=root", "--variant=minbase", "--include", PACKAGES])
        .arg(suite)
        .arg(root)
        .arg(apt::mirror()?);
    process::run(&mut command)?;
    step.done("");
    Ok(())
}

fn add_agent(root: &Path) -> Result<(), ProvisionError> {
    let agent = root.join("usr/local/sbin/agent");
    fs::write(&agent, AGENT).map_err(with_path(&agent))?;
    let units = root.join("etc/systemd/system");
    let unit = units.join("agent.service");
    fs::write(&unit, AGENT_UNIT).map_err(with_path(&unit))?;
    let wants = units.join(TARGET);
    fs::create_dir_all(&wants).map_err(with_path(&wants))?;
    let link = wants.join("agent.service");
    symlink("../agent.service", &link).map_err(with_path(&link))?;
    // The directory becomes the root of the file system, so every user must be able to traverse it.
    fs::set_permissions(root, fs::Permissions::from_mode(0o755)).map_err(with_path(root))
}

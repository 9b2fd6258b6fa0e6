//! Guest kernels: unmodified cloud kernels of Debian. These kernels have NVMe, ext4 and the serial port built in, so that
//! most guests need no modules.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::apt::{self, DebianSuites};
use super::cache::ProvisionCache;
use super::modules;
use super::{ProvisionError, with_path};

/// Kernel package, which has this name in every suite.
pub(super) const PACKAGE: &str = "linux-image-cloud-amd64";

/// Kernel of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KernelChoice {
    /// Debian 11's kernel, for guests only.
    V5_10,
    /// Debian 12's kernel.
    V6_1,
    /// Debian 13's kernel.
    V6_12,
    /// Image of a kernel that the user provides. It must have NVMe, ext4, devtmpfs and the 8250 serial port built in.
    Image(PathBuf),
}

impl FromStr for KernelChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "6.1" => Ok(Self::V6_1),
            "6.12" => Ok(Self::V6_12),
            path if Path::new(path).is_file() => Ok(Self::Image(PathBuf::from(path))),
            other => Err(format!(
                "'{other}' is neither 6.1 nor 6.12 nor the path of a kernel image"
            )),
        }
    }
}

/// Writes the choice as the command line accepts it.
impl fmt::Display for KernelChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::V5_10 => f.write_str("5.10"),
            Self::V6_1 => f.write_str("6.1"),
            Self::V6_12 => f.write_str("6.12"),
            Self::Image(path) => path.display().fmt(f),
        }
    }
}

/// A bootable kernel.
#[derive(Debug, Clone)]
pub struct GuestKernel {
    /// Release as printed by `uname -r`; for an image of the user, the file's name.
    pub name: String,
    /// Path of the image.
    pub image: PathBuf,
}

impl GuestKernel {
    pub(super) fn provide(
        cache: &ProvisionCache,
        choice: &KernelChoice,
    ) -> Result<Self, ProvisionError> {
        let (suites, name) = match packaged(choice) {
            Ok(packaged) => packaged,
            Err(own) => return Ok(own),
        };
        let recipe = format!("{PACKAGE} of {suites:?}, image only");
        let dir = cache.entry(name, &recipe, |dir| {
            keep_image(&package(cache, suites, apt::unpack)?, dir, suites)
        })?;
        Self::from_dir(&dir, suites)
    }

    /// Returns a kernel, and a directory with the modules `wanted` and their dependencies. `whom` distinguishes the entry
    /// in the cache.
    pub(super) fn with_modules(
        cache: &ProvisionCache,
        choice: &KernelChoice,
        whom: &str,
        wanted: &[&str],
    ) -> Result<(Self, PathBuf), ProvisionError> {
        let (suites, name) = match packaged(choice) {
            Ok(packaged) => packaged,
            Err(own) => {
                // The user's kernel has everything built in.
                let none = cache.entry("no-modules", "an empty folder", |_| Ok(()))?;
                return Ok((own, none));
            }
        };
        let recipe = format!("{PACKAGE} of {suites:?} with {wanted:?}");
        let dir = cache.entry(&format!("{whom}-{name}"), &recipe, |dir| {
            let root = package(cache, suites, apt::unpack)?;
            let copies = dir.join("modules");
            fs::create_dir(&copies).map_err(with_path(&copies))?;
            keep_image(&root, dir, suites)?;
            modules::copy(&root, wanted, &copies)
        })?;
        Ok((Self::from_dir(&dir, suites)?, dir.join("modules")))
    }

    /// Returns the kernel whose image is in `dir`.
    pub(super) fn from_dir(dir: &Path, suites: DebianSuites) -> Result<Self, ProvisionError> {
        let image = find_image(dir, suites)?;
        let file = image.file_name().unwrap_or_default().to_string_lossy();
        let name = file.trim_start_matches("vmlinuz-").to_owned();
        Ok(Self { name, image })
    }
}

/// Returns the suites of a Debian kernel, and its name in the cache. For an image of the user, returns the kernel as an
/// error.
pub(super) fn packaged(choice: &KernelChoice) -> Result<(DebianSuites, &'static str), GuestKernel> {
    match choice {
        KernelChoice::V5_10 => Ok((
            DebianSuites {
                known: &["bullseye"],
                preferred: "bullseye",
            },
            "kernel-5.10",
        )),
        KernelChoice::V6_1 => Ok((
            DebianSuites {
                known: &["bookworm"],
                preferred: "bookworm",
            },
            "kernel-6.1",
        )),
        KernelChoice::V6_12 => Ok((
            DebianSuites {
                known: &["trixie"],
                preferred: "trixie",
            },
            "kernel-6.12",
        )),
        KernelChoice::Image(image) => Err(GuestKernel {
            name: image
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            image: image.clone(),
        }),
    }
}

/// Returns the directory of a suite's unpacked kernel package. It stays in the cache, since the modules of the lab and of
/// the guests come from this package.
fn package(
    cache: &ProvisionCache,
    suites: DebianSuites,
    unpack: impl FnOnce(DebianSuites, &[&str], &Path) -> Result<(), ProvisionError>,
) -> Result<PathBuf, ProvisionError> {
    let name = format!("kernel-package-{}", suites.preferred);
    let recipe = format!("{PACKAGE} of {suites:?}");
    cache.entry(&name, &recipe, |root| unpack(suites, &[PACKAGE], root))
}

/// Copies the kernel image of a package, which is unpacked in `root`, to `dir`.
fn keep_image(root: &Path, dir: &Path, suites: DebianSuites) -> Result<(), ProvisionError> {
    let image = find_image(&root.join("boot"), suites)?;
    let stored_image = dir.join(image.file_name().unwrap_or_default());
    fs::copy(&image, stored_image).map_err(with_path(&image))?;
    Ok(())
}

fn find_image(dir: &Path, suites: DebianSuites) -> Result<PathBuf, ProvisionError> {
    for entry in fs::read_dir(dir).map_err(with_path(dir))? {
        let entry = entry.map_err(with_path(dir))?;
        if entry.file_name().to_string_lossy().starts_with("vmlinuz-") {
            return Ok(entry.path());
        }
    }
    Err(ProvisionError::NotInPackages {
        suite: suites.preferred.to_owned(),
        what: "vmlinuz".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_is_fetched_once_for_all_its_uses() {
        let dir = tempfile::tempdir().expect("folder");
        let cache = ProvisionCache::open_at(dir.path());
        let Ok((suites, _)) = packaged(&KernelChoice::V6_12) else {
            panic!("it is packaged");
        };
        let first = package(&cache, suites, |_, packages, root| {
            assert_eq!(packages, [PACKAGE]);
            fs::create_dir(root.join("boot")).expect("folder");
            fs::write(root.join("boot/vmlinuz-6.12"), "image").expect("write");
            Ok(())
        });
        let root = first.expect("unpacked");
        let again = package(&cache, suites, |_, _, _| panic!("fetched twice"));
        assert_eq!(again.expect("the same"), root);
        for name in ["lab", "guest"] {
            let made = dir.path().join(name);
            fs::create_dir(&made).expect("folder");
            keep_image(&root, &made, suites).expect("an image");
            let kernel = GuestKernel::from_dir(&made, suites).expect("a kernel");
            assert_eq!(kernel.name, "6.12");
        }
    }
}

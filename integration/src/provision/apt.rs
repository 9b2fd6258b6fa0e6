//! Fetches verified packages of any Debian suite. The machine's own packages do not change.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::ProvisionError;
use crate::process;
use crate::progress::ProgressStep;

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Debian suites with packages.
#[derive(Debug, Clone, Copy)]
pub struct DebianSuites {
    /// Names of the suites. A backports suite stands behind its base suite.
    pub known: &'static [&'static str],
    /// Suite that is preferred if several suites have a package.
    pub preferred: &'static str,
}

/// Fetches `packages` with all dependencies, and unpacks them into `root`.
///
/// # Errors
/// There is no mirror, or a package cannot be fetched, verified or unpacked.
pub fn unpack(suites: DebianSuites, packages: &[&str], root: &Path) -> Result<(), ProvisionError> {
    let apt = PrivateApt::new(suites, root)?;
    unpack_from(&apt, suites, packages, root)?;
    apt.remove()
}

/// Source of packages.
trait PackageSource {
    /// Fetches the package lists.
    fn update(&self) -> Result<(), ProvisionError>;

    /// Fetches packages with all dependencies, and returns their files.
    fn fetch(&self, packages: &[&str]) -> Result<Vec<PathBuf>, ProvisionError>;
}

/// Fetches and unpacks packages as one progress step. Its announcement lists the packages, so it is unique.
fn unpack_from(
    source: &impl PackageSource,
    suites: DebianSuites,
    packages: &[&str],
    root: &Path,
) -> Result<(), ProvisionError> {
    let step = ProgressStep::start(format!(
        "Packages from Debian {}: {}",
        suites.preferred,
        packages.join(", ")
    ));
    source.update()?;
    let files = source.fetch(packages)?;
    let mut bytes = 0;
    for file in &files {
        bytes += file_size(file)?;
        process::run(Command::new("dpkg-deb").arg("-x").arg(file).arg(root))?;
    }
    step.done(format!(
        "{} packages, {} MiB, signatures checked",
        files.len(),
        bytes >> 20
    ));
    Ok(())
}

/// An apt with a separate directory for its sources, lists and package database.
struct PrivateApt {
    dir: PathBuf,
    preferred: &'static str,
}

impl PrivateApt {
    fn new(suites: DebianSuites, root: &Path) -> Result<Self, ProvisionError> {
        if !Path::new(KEYRING).exists() {
            return Err(ProvisionError::NotDebian);
        }
        let dir = root.join(".apt");
        for part in ["lists/partial", "archives/partial"] {
            let path = dir.join(part);
            fs::create_dir_all(&path).map_err(|source| ProvisionError::File { path, source })?;
        }
        let apt = Self {
            dir,
            preferred: suites.preferred,
        };
        apt.write("status", "")?;
        apt.write(
            "sources.sources",
            &format!(
                "Types: deb\nURIs: {}\nSuites: {}\nComponents: main\nSigned-By: {KEYRING}\n",
                mirror()?,
                suites.known.join(" "),
            ),
        )?;
        apt.write("apt.conf", &apt.configuration())?;
        Ok(apt)
    }

    /// Returns the configuration. apt reads it after the machine's own configuration, so that the machine's proxies and
    /// similar settings stay in effect. Hooks of other programs are removed.
    fn configuration(&self) -> String {
        let dir = self.dir.display();
        format!(
            r#"#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Pre-Install-Pkgs;
#clear DPkg::Post-Invoke;
#clear Acquire::IndexTargets::deb::DEP-11;
Dir::State::lists "{dir}/lists";
Dir::State::status "{dir}/status";
Dir::State::extended_states "{dir}/extended_states";
Dir::Cache::archives "{dir}/archives";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
Dir::Etc::sourcelist "{dir}/sources.sources";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
APT::Architecture "amd64";
APT::Architectures {{ "amd64"; }};
APT::Install-Recommends "false";
APT::Get::AllowUnauthenticated "false";
APT::Sandbox::User "";
Acquire::Languages "none";
Acquire::Retries "3";
"#
        )
    }

    fn command(&self) -> Command {
        let mut command = Command::new("apt-get");
        command
            .arg("-c")
            .arg(self.dir.join("apt.conf"))
            .env("DEBIAN_FRONTEND", "noninteractive")
            .env("LC_ALL", "C");
        command
    }

    /// Removes the package lists and packed packages.
    fn remove(self) -> Result<(), ProvisionError> {
        fs::remove_dir_all(&self.dir).map_err(|source| ProvisionError::File {
            path: self.dir,
            source,
        })
    }

    fn write(&self, name: &str, text: &str) -> Result<(), ProvisionError> {
        let path = self.dir.join(name);
        fs::write(&path, text).map_err(|source| ProvisionError::File { path, source })
    }
}

impl PackageSource for PrivateApt {
    fn update(&self) -> Result<(), ProvisionError> {
        process::run(self.command().args([
            "update",
            "--error-on=any",
            "-o",
            "APT::Get::List-Cleanup=false",
        ]))?;
        Ok(())
    }

    fn fetch(&self, packages: &[&str]) -> Result<Vec<PathBuf>, ProvisionError> {
        process::run(
            self.command()
                .args([
                    "--yes",
                    "--download-only",
                    "--target-release",
                    self.preferred,
                    "install",
                ])
                .args(packages),
        )?;
        let archives = self.dir.join("archives");
        let at = |source| ProvisionError::File {
            path: archives.clone(),
            source,
        };
        let mut files = Vec::new();
        for entry in fs::read_dir(&archives).map_err(at)? {
            let path = entry.map_err(at)?.path();
            if path.extension().is_some_and(|extension| extension == "deb") {
                files.push(path);
            }
        }
        files.sort();
        Ok(files)
    }
}

fn file_size(path: &Path) -> Result<u64, ProvisionError> {
    let metadata = fs::metadata(path).map_err(|source| ProvisionError::File {
        path: path.to_owned(),
        source,
    })?;
    Ok(metadata.len())
}

/// Returns the mirror from which this machine gets packages of its own suite.
pub(super) fn mirror() -> Result<String, ProvisionError> {
    let release = read("/etc/os-release")?;
    let value = |key| {
        release
            .lines()
            .find_map(|line| line.strip_prefix(key))
            .map(|value| value.trim_matches('"').to_owned())
    };
    if value("ID=").as_deref() != Some("debian") {
        return Err(ProvisionError::NotDebian);
    }
    // Until shortly before their release, Debian testing and unstable have no code name in os-release.
    let suite = value("VERSION_CODENAME=").unwrap_or_else(|| "sid".to_owned());

    let mut texts = Vec::new();
    if Path::new("/etc/apt/sources.list").exists() {
        texts.push(("list".to_owned(), read("/etc/apt/sources.list")?));
    }
    if let Ok(entries) = fs::read_dir("/etc/apt/sources.list.d") {
        let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        paths.sort();
        for path in paths {
            let extension = path
                .extension()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            texts.push((extension, read(&path)?));
        }
    }
    texts
        .iter()
        .find_map(|(format, text)| match format.as_str() {
            "list" => mirror_in_list(text, &suite),
            "sources" => mirror_in_deb822(text, &suite),
            _ => None,
        })
        .ok_or(ProvisionError::NoMirror { suite })
}

/// Finds a mirror in sources.list(5), one-line style: `deb [options] uri suite component…`
fn mirror_in_list(text: &str, suite: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let line = line.split('#').next()?.trim().strip_prefix("deb ")?.trim();
        let line = match line.strip_prefix('[') {
            Some(rest) => rest.split_once(']')?.1,
            None => line,
        };
        let mut words = line.split_whitespace();
        let uri = words.next()?;
        (words.next()? == suite).then(|| uri.to_owned())
    })
}

/// Finds a mirror in sources.list(5), deb822 style: stanzas of `Key: value`. Values continue on indented lines.
fn mirror_in_deb822(text: &str, suite: &str) -> Option<String> {
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    lines
        .split(|line| line.trim().is_empty())
        .find_map(|stanza| {
            let field = |key: &str| -> Option<Vec<&str>> {
                let start = stanza.iter().position(|line| {
                    line.split_once(':')
                        .is_some_and(|(name, _)| name.eq_ignore_ascii_case(key))
                })?;
                let first = stanza[start].split_once(':')?.1;
                let rest = stanza[start + 1..]
                    .iter()
                    .take_while(|line| line.starts_with([' ', '\t']));
                let values = std::iter::once(first).chain(rest.copied());
                Some(values.flat_map(str::split_whitespace).collect())
            };
            let usable = field("Types")?.contains(&"deb")
                && field("Suites")?.contains(&suite)
                && field("Enabled").is_none_or(|value| value != ["no"]);
            if usable {
                Some((*field("URIs")?.first()?).to_owned())
            } else {
                None
            }
        })
}

fn read(path: impl AsRef<Path>) -> Result<String, ProvisionError> {
    let path = path.as_ref();
    fs::read_to_string(path).map_err(|source| ProvisionError::File {
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::super::{KernelChoice, kernel, qemu, userland};
    use super::*;
    use crate::progress;

    /// A source that has no packages.
    struct NoPackages;

    impl PackageSource for NoPackages {
        fn update(&self) -> Result<(), ProvisionError> {
            Ok(())
        }

        fn fetch(&self, _: &[&str]) -> Result<Vec<PathBuf>, ProvisionError> {
            Ok(Vec::new())
        }
    }

    #[test]
    fn a_lab_that_fetches_all_its_packages_announces_nothing_twice() {
        let mut fetches = vec![
            (userland::SUITES, userland::PACKAGES),
            (qemu::SUITES, qemu::PACKAGES),
        ];
        let kernel: &[&str] = &[kernel::PACKAGE];
        for choice in [KernelChoice::V6_1, KernelChoice::V6_12] {
            let (suites, _) = kernel::packaged(&choice).expect("it is packaged");
            fetches.push((suites, kernel));
        }
        let root = Path::new("/nonexistent");
        let (result, output) = progress::capture_lines(|| {
            let mut fetches = fetches.iter();
            fetches.try_for_each(|(suites, packages)| {
                unpack_from(&NoPackages, *suites, packages, root)
            })
        });
        result.expect("nothing is unpacked");
        let mut lines: Vec<&str> = output
            .lines()
            .filter(|line| line.starts_with("==> "))
            .collect();
        lines.sort_unstable();
        assert_eq!(lines.len(), fetches.len(), "{output}");
        lines.dedup();
        assert_eq!(lines.len(), fetches.len(), "{output}");
    }

    #[test]
    fn finds_the_mirror_in_one_line_style() {
        let text = "# deb http://old/debian bookworm main\n\
                    deb-src http://src/debian bookworm main\n\
                    deb http://security/debian-security bookworm-security main\n\
                    deb [arch=amd64 signed-by=/k.gpg] http://mirror/debian bookworm main contrib\n";
        assert_eq!(
            mirror_in_list(text, "bookworm").as_deref(),
            Some("http://mirror/debian")
        );
        assert_eq!(mirror_in_list(text, "trixie"), None);
    }

    #[test]
    fn finds_the_mirror_in_deb822_style() {
        let text = "Types: deb\nURIs: http://security/debian-security\nSuites: bookworm-security\n\n\
                    Types: deb\nEnabled: no\nURIs: http://off/debian\nSuites: bookworm\n\n\
                    types: deb deb-src\n# a comment\nURIs:\n http://mirror/debian\n http://second/debian\n\
                    Suites: bookworm bookworm-updates\nComponents: main\n";
        assert_eq!(
            mirror_in_deb822(text, "bookworm").as_deref(),
            Some("http://mirror/debian")
        );
        assert_eq!(mirror_in_deb822(text, "sid"), None);
    }
}

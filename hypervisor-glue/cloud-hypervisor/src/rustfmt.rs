//! Formatting by rustfmt with the checkout's configuration.

use std::path::Path;
use std::process::Command;

use crate::program::{self, ProgramError};

/// A rustfmt that can be started.
#[derive(Debug)]
pub(crate) struct Rustfmt {
    /// Program and its first arguments.
    words: Vec<String>,
    /// True if it has the options of the nightly channel, by which imports are grouped.
    pub(crate) is_nightly: bool,
}

impl Rustfmt {
    /// Finds a rustfmt, one of the nightly channel if there is one.
    pub(crate) fn find() -> Result<Self, ProgramError> {
        let choices: [&[&str]; 2] = [&["rustup", "run", "nightly", "rustfmt"], &["rustfmt"]];
        let mut last = None;
        for words in choices {
            let mut found = Self {
                words: words.iter().map(ToString::to_string).collect(),
                is_nightly: false,
            };
            match program::run(found.command().arg("--version"), "") {
                Ok(output) => {
                    let version = String::from_utf8_lossy(&output.stdout);
                    found.is_nightly = version.contains("nightly");
                    return Ok(found);
                }
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or(ProgramError::Failed {
            command: "rustfmt".to_owned(),
            message: "not found".to_owned(),
        }))
    }

    /// Formats a file of a checkout. The modules that it declares stay as they are.
    pub(crate) fn format(
        &self,
        checkout: &Path,
        path: &str,
        text: &str,
    ) -> Result<String, ProgramError> {
        let mut command = self.command();
        command.args(["--edition", &edition(checkout, Path::new(path))]);
        if [".rustfmt.toml", "rustfmt.toml"]
            .iter()
            .any(|name| checkout.join(name).exists())
        {
            command.arg("--config-path").arg(checkout);
        }
        let dir = checkout.join(path);
        command.current_dir(dir.parent().unwrap_or(checkout));
        let output = program::run(&mut command, text).map_err(|error| match error {
            ProgramError::Failed { message, .. } => ProgramError::Failed {
                command: format!("rustfmt {path}"),
                message,
            },
            error => error,
        })?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).env("RUSTC_BOOTSTRAP", "1");
        command
    }
}

/// Returns the edition of the package that a file is in.
fn edition(checkout: &Path, path: &Path) -> String {
    let read = |dir: &Path, keys: [&str; 3]| -> Option<String> {
        let text = std::fs::read_to_string(dir.join("Cargo.toml")).ok()?;
        let table: toml::Table = toml::from_str(&text).ok()?;
        let mut value = &toml::Value::Table(table);
        for key in keys.iter().filter(|key| !key.is_empty()) {
            value = value.get(key)?;
        }
        value.as_str().map(str::to_owned)
    };
    let dirs = path.ancestors().skip(1).map(|dir| checkout.join(dir));
    dirs.into_iter()
        .find(|dir| dir.join("Cargo.toml").exists())
        .and_then(|dir| read(&dir, ["package", "edition", ""]))
        .or_else(|| read(checkout, ["package", "edition", ""]))
        .or_else(|| read(checkout, ["workspace", "package", "edition"]))
        .unwrap_or_else(|| "2024".to_owned())
}

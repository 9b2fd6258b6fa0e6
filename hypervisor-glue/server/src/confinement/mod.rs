//! Confinement of the server process by the kernel, which holds even if an attacker controls the process.
//!
//! The process confines itself, so a server that runs in a container or was started from a shell is as confined as a
//! systemd service. It confines itself before it starts threads and before it reads data of a guest or client. So the
//! restrictions must allow all later operations of the server, such as adding functions and drives, and upgrades.
//!
//! seccomp filters system calls: see `system_calls`. Landlock optionally restricts files: see `file_rules`. The kernel
//! enforces the restrictions that its Landlock version supports, and the server logs them.
//!
//! # The next server
//!
//! The new process of an upgrade is a child of the predecessor and inherits its confinement permanently. The new process
//! adds neither a filter nor rules, since each upgrade would add a layer of rules, and the kernel allows only 16 layers. A
//! process that the supervisor starts after a crash inherits no confinement. Therefore an operator can apply new confinement
//! options, or the system call list of a new version, by killing the server: the supervisor starts a new one, and guests
//! notice only a short pause.

mod file_rules;
mod system_calls;

use std::env;
use std::error::Error;
use std::fs;
use std::io;
use std::path::Path;
use std::str::FromStr;

use nvme_mpt_vmm::report;
use seccompiler::SeccompAction;
use thiserror::Error;

pub(crate) use self::file_rules::FileRules;
pub use self::file_rules::{FileAccess, FileAccessError, FileRule, LandlockError};

/// Environment variable by which a server tells its successor, a child process, the confinement that the successor has
/// inherited.
const INHERITED_VARIABLE: &str = "NVME_MPT_CONFINED";

/// Word in [`INHERITED_VARIABLE`] that stands for a seccomp filter.
const SECCOMP: &str = "seccomp";

/// Word in [`INHERITED_VARIABLE`] that stands for Landlock rules.
const LANDLOCK: &str = "landlock";

/// Seccomp action for a system call that is not on the list.
const REFUSAL: SeccompAction = SeccompAction::Errno(libc::ENOSYS as u32);

/// Mode of the seccomp filter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SeccompMode {
    /// System calls that are not on the list fail.
    #[default]
    On,
    /// System calls that are not on the list succeed, and the kernel logs them in the audit log.
    Log,
    /// No filter.
    Off,
}

/// Error of parsing a [`SeccompMode`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("\"{0}\" is not a seccomp mode: use true, false or log")]
pub struct SeccompTextError(String);

impl FromStr for SeccompMode {
    type Err = SeccompTextError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "true" => Ok(Self::On),
            "log" => Ok(Self::Log),
            "false" => Ok(Self::Off),
            other => Err(SeccompTextError(other.to_owned())),
        }
    }
}

/// Error of confining the process.
#[derive(Debug, Error)]
pub enum ConfineError {
    /// The kernel refuses the seccomp filter.
    #[error(
        "Cannot filter the system calls of this server; use a kernel with seccomp, or --seccomp false"
    )]
    Seccomp(#[source] io::Error),
    /// Landlock refuses the rules.
    #[error(transparent)]
    Landlock(#[from] LandlockError),
}

/// Requested confinement.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConfinementOptions {
    /// Mode of the seccomp filter.
    pub seccomp: SeccompMode,
    /// True to restrict files with Landlock.
    pub landlock: bool,
    /// Landlock rules of the operator, in addition to those for the initial configuration.
    pub rules: Vec<FileRule>,
}

/// Restrictions that are in effect in this process.
#[derive(Clone, Debug, Default)]
pub(crate) struct ProcessConfinement {
    /// Mechanisms in effect, as words of [`INHERITED_VARIABLE`].
    mechanisms: Vec<&'static str>,
    /// Landlock rules in effect.
    files: Option<FileRules>,
}

impl ProcessConfinement {
    /// Returns the environment variable that names the confinement to a successor.
    pub(crate) fn env_variable(&self) -> (&'static str, String) {
        (INHERITED_VARIABLE, self.mechanisms.join(","))
    }

    /// Returns the first of the accesses `wanted` that Landlock refuses.
    pub(crate) fn find_refused(
        &self,
        wanted: impl IntoIterator<Item = FileRule>,
    ) -> Option<FileRule> {
        let rules = self.files.as_ref()?;
        wanted.into_iter().find(|wanted| !rules.is_allowed(wanted))
    }

    /// Finds out whether Landlock caused an error. If so, returns a `LandlockRefusal`, which names the rule that would allow
    /// the access; otherwise, returns the error unchanged, as `Ok`. `wanted` are the accesses that the failed operation may
    /// have made.
    pub(crate) fn explain<E: Error + Send + Sync + 'static>(
        &self,
        error: E,
        wanted: impl FnOnce() -> Vec<FileRule>,
    ) -> Result<E, LandlockRefusal> {
        if self.files.is_none() || !is_refusal(&error) {
            return Ok(error);
        }
        match self.find_refused(wanted()) {
            Some(rule) => Err(LandlockRefusal::new(rule, Box::new(error))),
            None => Ok(error),
        }
    }
}

/// Error of an operation that Landlock denied.
#[derive(Debug, Error)]
#[error(
    "Landlock denies this server {} ({}): start it with --landlock-rules path={},access={}, or with a \
     [[landlock-rule]] in its file. Under a supervisor, restart it with `kill -KILL`: an upgrade keeps the old rules",
    .rule.path.display(),
    .rule.access,
    parent_dir(.rule).display(),
    .rule.access
)]
pub struct LandlockRefusal {
    rule: FileRule,
    source: Box<dyn Error + Send + Sync>,
}

impl LandlockRefusal {
    pub(crate) fn new(rule: FileRule, source: Box<dyn Error + Send + Sync>) -> Self {
        Self { rule, source }
    }
}

/// Returns the directory to name in the rule that would allow a refused file.
fn parent_dir(refused: &FileRule) -> &Path {
    match refused.path.is_dir() {
        true => &refused.path,
        false => refused.path.parent().unwrap_or(&refused.path),
    }
}

/// Returns whether the error chain contains EACCES, which Landlock returns. Compares the texts, since some errors contain their
/// source's text but do not return the source.
fn is_refusal(error: &dyn Error) -> bool {
    let refusal = io::Error::from_raw_os_error(libc::EACCES).to_string();
    report::chain(error).contains(&refusal)
}

/// Confines the process, which must not have started other threads. `rules` are the Landlock rules; `None` if Landlock is not
/// requested.
///
/// # Errors
/// [`ConfineError`]. If a service manager's filter forbids adding a filter, logs a warning and succeeds.
pub(crate) fn confine(
    confinement: &ConfinementOptions,
    rules: Option<FileRules>,
) -> Result<ProcessConfinement, ConfineError> {
    let inherited = env::var(INHERITED_VARIABLE).unwrap_or_default();
    let inherits = |word| inherited.split(',').any(|inherited| inherited == word);
    let mut confined = ProcessConfinement::default();
    if let Some(rules) = rules {
        let enforced = match inherits(LANDLOCK) {
            true => {
                log::info!(
                    "Confined by the Landlock rules of the previous server; new rules apply once a supervisor restarts \
                     this server"
                );
                true
            }
            false => restrict_files(&rules)?,
        };
        if enforced {
            confined.mechanisms.push(LANDLOCK);
            confined.files = Some(rules);
        }
    }
    match confinement.seccomp {
        SeccompMode::Off => log::info!("Not confined by seccomp, as --seccomp false asks for"),
        // Any process can set the variable, so also check that the kernel has a filter for this process.
        _ if inherits(SECCOMP) && has_filter() => {
            log::info!("The seccomp filter of the previous server stays in force");
            confined.mechanisms.push(SECCOMP);
        }
        choice => match filter_system_calls(choice) {
            Ok(()) => {
                log::info!("{}", describe_filter(choice));
                confined.mechanisms.push(SECCOMP);
            }
            // A filter with which this process was started may forbid adding another one. The start then continues with that
            // filter alone.
            Err(error) if has_filter() => {
                let error = report::chain(&error);
                log::warn!(
                    "Confined only by the system call filter that this process was started with, as its own cannot \
                     be installed: {error}"
                );
            }
            Err(error) => return Err(error),
        },
    }
    Ok(confined)
}

/// Applies Landlock rules. Returns whether the kernel supports Landlock.
fn restrict_files(rules: &FileRules) -> Result<bool, LandlockError> {
    let version = rules.enforce()?;
    match version {
        Some(version) => {
            let restrictions = file_rules::describe_restrictions(version);
            log::info!("Confined by Landlock {version}: {restrictions}");
        }
        None => log::warn!(
            "Not confined by Landlock: this kernel has none, its argument lsm= leaves it out, or a filter that this \
             process was started with refuses its calls"
        ),
    }
    Ok(version.is_some())
}

/// Returns the text that describes a filter mode for the log.
fn describe_filter(seccomp: SeccompMode) -> &'static str {
    match seccomp {
        SeccompMode::Log => {
            "Not confined by seccomp: with --seccomp log, its filter refuses nothing, and reports what it would refuse \
             to the kernel's audit log"
        }
        SeccompMode::On | SeccompMode::Off => "Confined by seccomp",
    }
}

fn filter_system_calls(seccomp: SeccompMode) -> Result<(), ConfineError> {
    let refusal = match seccomp {
        SeccompMode::Log => SeccompAction::Log,
        _ => REFUSAL,
    };
    let filter = system_calls::build_filter(refusal);
    let filter = filter.map_err(|error| ConfineError::Seccomp(io::Error::other(error)))?;
    seccompiler::apply_filter_all_threads(&filter).map_err(|error| {
        ConfineError::Seccomp(match error {
            seccompiler::Error::Prctl(error) | seccompiler::Error::Seccomp(error) => error,
            other => io::Error::other(other),
        })
    })
}

/// Returns whether a seccomp filter applies to this process.
fn has_filter() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mode = status
        .lines()
        .find_map(|line| line.strip_prefix("Seccomp:"));
    mode.is_some_and(|mode| mode.trim() == "2")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_that_only_logs_does_not_confine() {
        assert_eq!(describe_filter(SeccompMode::On), "Confined by seccomp");
        let description = describe_filter(SeccompMode::Log);
        assert!(
            description.starts_with("Not confined by seccomp: "),
            "{description}"
        );
    }

    #[test]
    fn seccomp_choices_match_cloud_hypervisor() {
        for (text, choice) in [
            ("true", SeccompMode::On),
            ("log", SeccompMode::Log),
            ("false", SeccompMode::Off),
        ] {
            assert_eq!(text.parse(), Ok(choice));
        }
        let error = "off".parse::<SeccompMode>().unwrap_err();
        assert!(error.to_string().contains("true, false or log"), "{error}");
    }
}

//! Confinement of the server's process: limits that the kernel sets it, also once an intruder controls it.
//!
//! The process confines itself, so a server in a container or of a plain `nvme-mpt serve` is confined as well as one of
//! systemd. It does so before its first thread starts, and before it reads anything of a guest or of a client. All that it
//! does later has to be possible then: functions and drives that are added, an upgrade, the end. A start needs nothing
//! beyond that.
//!
//! seccomp filters system calls: see `system_calls`. Landlock restricts files, if it is asked for: see `files`. A kernel
//! enforces what its version of Landlock has, and the log reports what that is.
//!
//! # The next server
//!
//! The process of an upgrade is a child of the server before, and inherits its confinement for good. It adds nothing: the
//! kernel stacks filters and rules, and has room for 16 sets of rules. A process that a keeper starts after a death
//! inherits nothing. So `kill -KILL` puts other choices, and the list of another version, into effect under guests that go
//! on.

mod files;
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

pub(crate) use self::files::FileRules;
pub use self::files::{FileAccess, FileAccessError, FileRule, LandlockError};

/// Variable that tells the next server which confinement it inherits.
const INHERITED: &str = "NVME_MPT_CONFINED";

/// Word of [`INHERITED`] for a filter of system calls.
const SECCOMP: &str = "seccomp";

/// Word of [`INHERITED`] for rules about files.
const LANDLOCK: &str = "landlock";

/// Action for a call that is not on the list.
const REFUSAL: SeccompAction = SeccompAction::Errno(libc::ENOSYS as u32);

/// Filter of system calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Seccomp {
    /// Calls that are not on the list are refused.
    #[default]
    On,
    /// Calls that are not on the list are carried out, and the kernel's audit log names them.
    Log,
    /// There is no filter.
    Off,
}

/// Text that is no [`Seccomp`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("\"{0}\" is no choice for seccomp: use true, false or log")]
pub struct SeccompTextError(String);

impl FromStr for Seccomp {
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

/// The process cannot be confined.
#[derive(Debug, Error)]
pub enum ConfineError {
    /// The kernel takes no filter of system calls.
    #[error(
        "Cannot filter the system calls of this server; use a kernel with seccomp, or --seccomp false"
    )]
    Seccomp(#[source] io::Error),
    /// Files cannot be restricted.
    #[error(transparent)]
    Landlock(#[from] LandlockError),
}

/// Confinement that is asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Confinement {
    /// Filter of system calls.
    pub seccomp: Seccomp,
    /// True if Landlock is to restrict files.
    pub landlock: bool,
    /// Rules beside those for what the server begins with.
    pub rules: Vec<FileRule>,
}

/// Confinement of this process.
#[derive(Clone, Debug, Default)]
pub(crate) struct Confined {
    /// Words of [`INHERITED`].
    words: Vec<&'static str>,
    /// Rules that Landlock enforces.
    files: Option<FileRules>,
}

impl Confined {
    /// Returns the variable that names the confinement to a successor, which inherits it.
    pub(crate) fn variable(&self) -> (&'static str, String) {
        (INHERITED, self.words.join(","))
    }

    /// Returns the first that Landlock refuses of what would have been used.
    pub(crate) fn refused(&self, wanted: impl IntoIterator<Item = FileRule>) -> Option<FileRule> {
        let rules = self.files.as_ref()?;
        wanted.into_iter().find(|wanted| !rules.give(wanted))
    }

    /// Returns the error for a failure that Landlock caused, and any other as it is.
    pub(crate) fn explain<E: Error + Send + Sync + 'static>(
        &self,
        error: E,
        wanted: impl FnOnce() -> Vec<FileRule>,
    ) -> Result<E, LandlockRefusal> {
        if self.files.is_none() || !is_refusal(&error) {
            return Ok(error);
        }
        match self.refused(wanted()) {
            Some(rule) => Err(LandlockRefusal::new(rule, Box::new(error))),
            None => Ok(error),
        }
    }
}

/// Landlock refused what a change needs.
#[derive(Debug, Error)]
#[error(
    "Landlock refuses this server the use of {} ({}): start it with --landlock-rules path={},access={}, or with a \
     [[landlock-rule]] in its file. Under a keeper, `kill -KILL` starts it anew, and an upgrade does not",
    .rule.path.display(),
    .rule.access,
    folder(.rule).display(),
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

/// Returns the folder that a rule for a refused file would name.
fn folder(refused: &FileRule) -> &Path {
    match refused.path.is_dir() {
        true => &refused.path,
        false => refused.path.parent().unwrap_or(&refused.path),
    }
}

/// Returns whether an error has the one with which Landlock refuses. Errors that pass their source's text on hide the
/// kernel's own from a look at their types.
fn is_refusal(error: &dyn Error) -> bool {
    let refusal = io::Error::from_raw_os_error(libc::EACCES).to_string();
    report::chain(error).contains(&refusal)
}

/// Confines the process, as long as it has the present thread alone. `rules` are asked for if Landlock is.
///
/// # Errors
/// [`ConfineError`]. A process that is confined by others, as by a service manager, goes on without a filter of its own.
pub(crate) fn confine(
    confinement: &Confinement,
    rules: Option<FileRules>,
) -> Result<Confined, ConfineError> {
    let inherited = env::var(INHERITED).unwrap_or_default();
    let inherits = |word| inherited.split(',').any(|inherited| inherited == word);
    let mut confined = Confined::default();
    if let Some(rules) = rules {
        let enforced = match inherits(LANDLOCK) {
            true => {
                log::info!(
                    "Confined by Landlock, by the rules of the server before; rules that are new hold once a keeper \
                     starts it anew"
                );
                true
            }
            false => restrict_files(&rules)?,
        };
        if enforced {
            confined.words.push(LANDLOCK);
            confined.files = Some(rules);
        }
    }
    match confinement.seccomp {
        Seccomp::Off => log::info!("Not confined by seccomp, as --seccomp false asks for"),
        // A variable alone confines nothing.
        _ if inherits(SECCOMP) && has_filter() => {
            log::info!("Confined by seccomp, by the filter of the server before");
            confined.words.push(SECCOMP);
        }
        choice => match filter_calls(choice) {
            Ok(()) => {
                log::info!("Confined by seccomp");
                confined.words.push(SECCOMP);
            }
            // Their filter may not have the call that adds one.
            Err(error) if has_filter() => {
                let error = report::chain(&error);
                log::warn!(
                    "Confined by the filter of system calls that it was started with, and by none of its own: {error}"
                );
            }
            Err(error) => return Err(error),
        },
    }
    Ok(confined)
}

/// Restricts files. Returns whether the kernel enforces it.
fn restrict_files(rules: &FileRules) -> Result<bool, LandlockError> {
    let version = rules.enforce()?;
    match version {
        Some(version) => {
            let restrictions = files::restrictions(version);
            log::info!("Confined by Landlock {version}: {restrictions}");
        }
        None => log::warn!(
            "Not confined by Landlock: this kernel has none, its argument lsm= leaves it out, or a filter that this \
             process was started with refuses its calls"
        ),
    }
    Ok(version.is_some())
}

fn filter_calls(seccomp: Seccomp) -> Result<(), ConfineError> {
    let refusal = match seccomp {
        Seccomp::Log => SeccompAction::Log,
        _ => REFUSAL,
    };
    let filter = system_calls::filter(refusal);
    let filter = filter.map_err(|error| ConfineError::Seccomp(io::Error::other(error)))?;
    seccompiler::apply_filter_all_threads(&filter).map_err(|error| {
        ConfineError::Seccomp(match error {
            seccompiler::Error::Prctl(error) | seccompiler::Error::Seccomp(error) => error,
            other => io::Error::other(other),
        })
    })
}

/// Returns whether the kernel filters the system calls of this process.
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
    fn choices_are_those_of_cloud_hypervisor() {
        for (text, choice) in [
            ("true", Seccomp::On),
            ("log", Seccomp::Log),
            ("false", Seccomp::Off),
        ] {
            assert_eq!(text.parse(), Ok(choice));
        }
        let error = "off".parse::<Seccomp>().unwrap_err();
        assert!(error.to_string().contains("true, false or log"), "{error}");
    }
}

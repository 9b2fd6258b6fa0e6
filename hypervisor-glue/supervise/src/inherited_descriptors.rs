//! Descriptors that a supervisor passed at the start of this process.
#![expect(unsafe_code, reason = "descriptors are owned by their numbers")]

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::process::{self, Command};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::{FdFlags, fcntl_setfd};

use crate::error::FdStoreError;

/// Number of the first descriptor that a supervisor passes (`SD_LISTEN_FDS_START`).
pub(crate) const LISTEN_FDS_START: RawFd = 3;

/// Environment variables of the supervisor's protocol, which [`clear_env`] removes.
const VARIABLES: [&str; 9] = [
    "NOTIFY_SOCKET",
    "FDSTORE",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "LISTEN_PID",
    "LISTEN_PIDFDID",
    "MAINPID",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
];

static TAKEN: AtomicBool = AtomicBool::new(false);

/// Descriptors that a supervisor passed, by name. Dropping this closes the descriptors that were not taken.
///
/// The environment variables of the supervisor stay set, since other threads may read the environment. So call
/// [`clear_env`] for each command that the process starts.
#[derive(Debug, Default)]
pub struct InheritedDescriptors(BTreeMap<String, Vec<OwnedFd>>);

impl InheritedDescriptors {
    /// Takes the descriptors that the environment names, and sets close-on-exec for them.
    ///
    /// Call this once, at the start of `main`, before the process opens or closes descriptors. Without `LISTEN_FDS`, or
    /// with the `LISTEN_PID` of another process, nothing is inherited.
    ///
    /// # Errors
    ///
    /// A variable is malformed, a descriptor is closed, or the descriptors were taken before.
    pub fn from_env() -> Result<Self, FdStoreError> {
        if TAKEN.swap(true, Ordering::Relaxed) {
            return Err(FdStoreError::TakenBefore);
        }
        let [count, pid, names] = ["LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"].map(env::var_os);
        let mut inherited = Self::default();
        for (number, name) in parse_listen_fds(count, pid, names, process::id())? {
            // SAFETY: the call takes numbers alone.
            if unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
                return Err(FdStoreError::Closed { number });
            }
            // SAFETY: the descriptor is open. The parent opened it for this process. `TAKEN` makes the process take each
            // number once, and no other code of the process has used the number yet.
            let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
            let result = fcntl_setfd(&descriptor, FdFlags::CLOEXEC);
            result.map_err(|error| FdStoreError::system("mark an inherited descriptor", error))?;
            inherited.0.entry(name).or_default().push(descriptor);
        }
        Ok(inherited)
    }

    /// Returns the descriptors of a name without taking them.
    pub fn get(&self, name: &str) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.get(name).into_iter().flatten().map(AsFd::as_fd)
    }

    /// Takes the descriptors of a name, in the order in which they were stored.
    pub fn take(&mut self, name: &str) -> Vec<OwnedFd> {
        self.0.remove(name).unwrap_or_default()
    }

    /// Returns the sorted names of descriptors that were not taken.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}

/// Removes the supervisor's variables from a command's environment.
pub fn clear_env(command: &mut Command) {
    for variable in VARIABLES {
        command.env_remove(variable);
    }
}

/// Returns numbers and names of the inherited descriptors, from the values of `LISTEN_FDS`, `LISTEN_PID` and `LISTEN_FDNAMES`.
fn parse_listen_fds(
    count: Option<OsString>,
    pid: Option<OsString>,
    names: Option<OsString>,
    own: u32,
) -> Result<Vec<(RawFd, String)>, FdStoreError> {
    let (Some(count), Some(pid)) = (count, pid) else {
        return Ok(Vec::new());
    };
    let malformed = |name, value| FdStoreError::Variable { name, value };
    match pid.to_str().and_then(|pid| pid.parse::<u32>().ok()) {
        None => return Err(malformed("LISTEN_PID", pid)),
        Some(pid) if pid != own => return Ok(Vec::new()),
        Some(_) => {}
    }
    // The count fits in `u16`, so the number after the last descriptor does not overflow.
    let parsed = count.to_str().and_then(|count| count.parse::<u16>().ok());
    let Some(number) = parsed.map(RawFd::from) else {
        return Err(malformed("LISTEN_FDS", count));
    };
    let names = names.unwrap_or_default();
    let Some(text) = names.to_str() else {
        return Err(malformed("LISTEN_FDNAMES", names));
    };
    let given = (!text.is_empty()).then(|| text.split(':'));
    let names = given
        .into_iter()
        .flatten()
        .chain(std::iter::repeat("unknown"));
    Ok((LISTEN_FDS_START..LISTEN_FDS_START + number)
        .zip(names.map(str::to_owned))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(
        count: &str,
        pid: &str,
        names: Option<&str>,
    ) -> Result<Vec<(RawFd, String)>, FdStoreError> {
        parse_listen_fds(
            Some(count.into()),
            Some(pid.into()),
            names.map(Into::into),
            7,
        )
    }

    #[test]
    fn names_belong_to_descriptors_and_missing_names_are_unknown() {
        let named = |names: &[(RawFd, &str)]| -> Vec<(RawFd, String)> {
            names
                .iter()
                .map(|(at, name)| (*at, (*name).to_owned()))
                .collect()
        };
        let two = list("2", "7", Some("a:b c")).unwrap();
        assert_eq!(two, named(&[(3, "a"), (4, "b c")]));
        let unknown = list("2", "7", None).unwrap();
        assert_eq!(unknown, named(&[(3, "unknown"), (4, "unknown")]));
        let fewer = list("2", "7", Some("a")).unwrap();
        assert_eq!(fewer, named(&[(3, "a"), (4, "unknown")]));
    }

    #[test]
    fn another_process_inherits_nothing() {
        assert_eq!(list("2", "8", Some("a:b")).unwrap(), []);
        assert_eq!(
            parse_listen_fds(None, Some("7".into()), None, 7).unwrap(),
            []
        );
        assert_eq!(
            parse_listen_fds(Some("1".into()), None, None, 7).unwrap(),
            []
        );
    }

    #[test]
    fn malformed_variables_are_named() {
        for (count, pid, variable) in [
            ("-1", "7", "LISTEN_FDS"),
            ("70000", "7", "LISTEN_FDS"),
            ("", "7", "LISTEN_FDS"),
            ("1", "x", "LISTEN_PID"),
        ] {
            let refused = list(count, pid, None);
            assert!(
                matches!(refused, Err(FdStoreError::Variable { name, .. }) if name == variable),
                "{count} {pid}"
            );
        }
    }

    #[test]
    fn a_cleared_command_has_no_supervisor_variables() {
        let mut command = Command::new("env");
        command.env("KEPT", "1");
        for variable in VARIABLES {
            command.env(variable, "1");
        }
        clear_env(&mut command);
        let output = command.output().unwrap().stdout;
        let output = String::from_utf8(output).unwrap();
        assert!(output.lines().any(|line| line == "KEPT=1"));
        for variable in VARIABLES {
            assert!(!output.contains(&format!("{variable}=")), "{variable}");
        }
    }
}

//! Crashes of the server, and the functions that caused them.
//!
//! A function's in-flight state has a counter of server crashes that happened during work for this function. See
//! [`nvme_mpt_memory::crash`], which distinguishes a crash from a kill and attributes the crash to one function. The supervisor
//! holds the in-flight state, so the counter survives the crash.
//!
//! | crashes | the next server |
//! |---|---|
//! | 0, 1 | restores the function |
//! | 2, 3 | quarantines it: stores its state as a [report](write_report); its VMM stays connected, and its guest sees `CSTS.CFS` |
//! | 4 and more | releases it without reading its state; its VMM loses the drive |
//!
//! If the kernel killed a process for lack of memory while memory was being pinned for a function, the function is quarantined
//! at once ([`PinningRecord`](nvme_guest::memory_account::PinningRecord)). If there are several such functions, only the one
//! with the most bytes being pinned is quarantined. The others are restored last, as are functions whose pinning was
//! interrupted for another reason.
//!
//! For a function in a VMM, the VMM holds the in-flight state. After two crashes, such a function gets no lease.
//!
//! A function stays quarantined until an operator removes it. If the guest or VMM could end the quarantine, they could crash
//! the server twice more each time. The stored state of a quarantined function stays unchanged, so that later servers
//! quarantine the function as well.
//!
//! With a supervisor, a panic of a thread that serves functions ends the process ([`abort_on_panic`]). Unwinding would instead
//! end functions permanently, or leave queues without a poller.

use std::cell::Cell;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::panic;
use std::path::{Path, PathBuf};
use std::sync::Once;

use nvme_guest::threads::{ThreadSpawner, start_thread};
use nvme_lease::{PrivateFileError, make_state_dir};
use nvme_mpt_memory::crash;
use nvme_mpt_paths::{OpenDirectory, PathError};
use thiserror::Error;

/// Number of server crashes that quarantine the function which caused them.
pub(crate) const CRASHES_TO_QUARANTINE: u32 = 2;

/// Number of server crashes from which not even the state of the function is read: the function is removed, and its VMM loses
/// the drive.
pub(super) const CRASHES_TO_RELEASE: u32 = 4;

/// Name of the directory for reports about quarantined functions, in the state directory.
const REPORTS_DIR: &str = "set-aside";

/// Maximum length of the file name that [`report_name`] makes from an id.
const NAME_MAX: usize = 200;

/// Name of the thread of key-value drives, which catches panics of its database. So its panics must not end the process.
const CATCHING_THREAD: &str = "key-values";

/// Error of storing a report about a quarantined function.
#[derive(Debug, Error)]
pub(crate) enum QuarantineReportError {
    /// The directory cannot be made private to the server's user.
    #[error("Cannot use the directory of reports")]
    Dir(#[from] PrivateFileError),
    /// A file cannot be written.
    #[error("Cannot write the report")]
    File(#[from] PathError),
    /// The in-flight state cannot be read.
    #[error("Cannot read the state of the function")]
    State(#[source] io::Error),
}

/// Stores a function's state for a defect report, replacing an earlier report. Returns the directory.
///
/// The directory `set-aside/ID` in the state directory gets `state.json` and `live`, a copy of the in-flight state. Both
/// contain guest addresses and commands, including keys of key-value commands, but no other data.
pub(super) fn write_report(
    state_dir: &Path,
    id: &str,
    state: &[u8],
    inflight: Option<BorrowedFd<'_>>,
) -> Result<PathBuf, QuarantineReportError> {
    let dir = state_dir.join(REPORTS_DIR).join(report_name(id));
    make_state_dir(&state_dir.join(REPORTS_DIR))?;
    make_state_dir(&dir)?;
    let report = OpenDirectory::open(&dir)?;
    let write = |name: &str, bytes: &[u8]| {
        let name = OsStr::new(name);
        report.replace(name, 0o600, |file| file.write_all(bytes))
    };
    write("state.json", state)?;
    if let Some(inflight) = inflight {
        write(
            "live",
            &read_contents(inflight).map_err(QuarantineReportError::State)?,
        )?;
    }
    Ok(dir)
}

fn read_contents(file: BorrowedFd<'_>) -> io::Result<Vec<u8>> {
    let file = fs::File::from(file.try_clone_to_owned()?);
    // The predecessor created the file, with a size of some megabytes.
    let mut bytes = vec![0; usize::try_from(file.metadata()?.len()).unwrap_or(0)];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// Returns a file name for an id with arbitrary characters.
fn report_name(id: &str) -> String {
    let of = |(place, char): (usize, char)| match char {
        'a'..='z' | 'A'..='Z' | '0'..='9' | '-' | '_' => char,
        '.' if place > 0 => char,
        _ => '_',
    };
    id.chars().enumerate().map(of).take(NAME_MAX).collect()
}

thread_local! {
    /// True if a panic of this thread ends the process, in a server with a supervisor.
    static ENDS_PROCESS: Cell<bool> = const { Cell::new(false) };
}

/// Makes panics of this thread end the process, if the server has a supervisor.
pub(crate) fn abort_on_panic() {
    ENDS_PROCESS.set(true);
}

/// Makes panics of this thread, of pollers and of functions' threads end the process, so that the supervisor starts a new
/// server.
pub(super) fn install_panic_hook() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            before(panic);
            if crash::is_recorded() || ENDS_PROCESS.get() {
                std::process::abort();
            }
        }));
    });
    abort_on_panic();
}

/// Returns a thread spawner for threads whose panics end the process.
pub(crate) fn thread_spawner() -> ThreadSpawner {
    ThreadSpawner::from_spawn(|name, work| {
        let catches = name == CATCHING_THREAD;
        start_thread(name, move || {
            if !catches {
                abort_on_panic();
            }
            work();
        })
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn a_crash_report_is_private_and_replaces_the_previous_report() {
        let state = tempfile::tempdir().unwrap();
        let inflight = tempfile::tempfile().unwrap();
        inflight.write_all_at(b"commands", 0).unwrap();
        for bytes in [&b"a long state"[..], b"{}"] {
            let dir = write_report(state.path(), "a", bytes, Some(inflight.as_fd())).unwrap();
            assert_eq!(dir, state.path().join("set-aside/a"));
            assert_eq!(fs::read(dir.join("state.json")).unwrap(), bytes);
            assert_eq!(fs::read(dir.join("live")).unwrap(), b"commands");
            for (path, mode) in [("", 0o700), ("state.json", 0o600), ("live", 0o600)] {
                let permissions = fs::metadata(dir.join(path)).unwrap().permissions();
                assert_eq!(permissions.mode() & 0o777, mode, "{path}");
            }
        }
    }

    /// Environment variable: name of the thread on which the process panics.
    const PANICS: &str = "NVME_MPT_TEST_PANICS";

    /// Body of the processes that panic. Does nothing in a usual test run.
    #[test]
    fn panicking_process() {
        let Ok(name) = std::env::var(PANICS) else {
            return;
        };
        install_panic_hook();
        let spawned = match name.as_str() {
            "usual" => start_thread(&name, || panic!("on purpose")),
            name => thread_spawner().spawn(name, Box::new(|| panic!("on purpose"))),
        };
        spawned.unwrap().join().unwrap_err();
    }

    #[test]
    fn panics_end_the_process_where_nothing_catches_them() {
        for (name, aborts) in [
            ("poll-shared-0", true),
            ("usual", false),
            (CATCHING_THREAD, false),
        ] {
            let output = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "persistence::crashes::tests::panicking_process"])
                .env(PANICS, name)
                .output()
                .unwrap();
            let signal = output.status.signal();
            assert_eq!(
                signal,
                aborts.then_some(libc::SIGABRT),
                "{name}: {output:?}"
            );
            assert_eq!(output.status.success(), !aborts, "{name}: {output:?}");
            let printed = String::from_utf8_lossy(&output.stdout);
            assert!(aborts || printed.contains("1 passed"), "{name}: {output:?}");
        }
    }

    #[test]
    fn report_file_names_are_sanitized_ids() {
        for (id, name) in [
            ("vm-1.a_B", "vm-1.a_B"),
            ("..", "_."),
            ("/run/a.sock", "_run_a.sock"),
            ("ä\0\n", "___"),
        ] {
            assert_eq!(report_name(id), name);
        }
        assert_eq!(report_name(&"n".repeat(300)).len(), NAME_MAX);
    }
}

//! Process that the supervisor started or adopted.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::ExitStatus;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Result, retry_on_intr};
use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal};

/// Process and its pidfd.
#[derive(Debug)]
pub(crate) struct SupervisedProcess {
    pub(crate) pid: Pid,
    pidfd: OwnedFd,
    /// Exit status of the process; `None` until it was collected.
    pub(crate) status: Option<ExitStatus>,
}

impl SupervisedProcess {
    pub(crate) fn open(pid: Pid) -> Result<Self> {
        let descriptor = pidfd_open(pid, PidfdFlags::empty())?;
        let status = None;
        Ok(Self {
            pid,
            pidfd: descriptor,
            status,
        })
    }

    /// Returns whether the process has ended, even if its exit status was not collected yet.
    pub(crate) fn has_ended(&self) -> bool {
        let mut ends = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        retry_on_intr(|| poll(&mut ends, Some(&now))).is_ok_and(|ended| ended > 0)
    }

    /// Sends a signal. Has no effect on a process that has ended.
    pub(crate) fn signal(&self, signal: Signal) {
        if let Err(error) = pidfd_send_signal(&self.pidfd, signal) {
            log::debug!("Process {} has ended: {error}", self.pid.as_raw_pid());
        }
    }
}

impl AsFd for SupervisedProcess {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

/// Returns whether a process is a descendant of this process or of `other`.
pub(crate) fn is_descendant(pid: Pid, other: Option<Pid>) -> bool {
    let ancestors = [Some(getpid()), other].map(|pid| pid.map(Pid::as_raw_pid));
    let mut pid = pid.as_raw_pid();
    while pid > 1 {
        match parent_pid(pid) {
            Some(parent) if ancestors.contains(&Some(parent)) => return true,
            Some(parent) => pid = parent,
            None => return false,
        }
    }
    false
}

/// Returns the id of a process's parent (`proc(5)`: second field after the name in parentheses).
fn parent_pid(pid: i32) -> Option<i32> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(&stat[end + 1..]).ok()?;
    rest.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn only_children_count_as_descendants() {
        // The name contains spaces and parentheses, which break naive parsers of `/proc/PID/stat`.
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("a) R 1 (b");
        std::os::unix::fs::symlink("/bin/cat", &link).unwrap();
        let mut command = Command::new(&link);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child.unwrap();
        assert!(is_descendant(Pid::from_child(&child), None));
        let process = SupervisedProcess::open(Pid::from_child(&child)).unwrap();
        assert!(!process.has_ended());
        drop(child.stdin.take());
        child
            .stdout
            .take()
            .unwrap()
            .read_to_end(&mut Vec::new())
            .unwrap();
        child.wait().unwrap();
        assert!(process.has_ended());
        let parent = rustix::process::getppid().unwrap();
        assert!(!is_descendant(parent, None));
        assert!(!is_descendant(getpid(), None));
        assert!(is_descendant(getpid(), Some(parent)));
    }
}

//! A server with functions for the victims and the attacker on one poller.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, PipeReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::thread;

use tempfile::TempDir;

use super::attack_kind::AttackKind;
use super::error::AttackError;

/// Number of victims.
pub(super) const VICTIMS: usize = 4;
/// Name and size in bytes of the sparse file that is the drive of some attackers.
const SPARSE: &str = "sparse.img";
const SPARSE_LEN: u64 = 64 << 30;
/// A running `nvme-mpt serve`. Dropping it ends the server.
pub(super) struct AttackedServer {
    program: PathBuf,
    child: Child,
    is_supervised: bool,
    dir: TempDir,
    /// Read end of the server's log, for an attacker whose log is not read.
    _unread: Option<PipeReader>,
}

impl AttackedServer {
    /// Starts a server with the functions for this kind of attack, and waits until it is ready.
    pub(super) fn start(program: &Path, kind: AttackKind, cpu: usize) -> Result<Self, AttackError> {
        let system = AttackError::system_error;
        let dir = tempfile::tempdir().map_err(system("Making a directory"))?;
        let at = |name: &str| dir.path().join(name);
        let function = |id: &str, rest: &str| {
            let socket = at(&format!("{id}.sock"));
            format!(
                "id={id},socket={},poll=shared@{cpu},{rest}",
                socket.display()
            )
        };
        // Function number N begins at N * 64 MiB.
        let part = |number: usize| format!("path=memory:320M,range={}M+64M", number * 64);
        let mut functions: Vec<String> = (0..VICTIMS)
            .map(|number| function(&format!("victim-{number}"), &part(number)))
            .collect();
        let attacker = match kind {
            AttackKind::Deallocate | AttackKind::RefusedUpgrade => {
                let sparse = at(SPARSE);
                let file = File::create(&sparse).map_err(system("Making a file"))?;
                file.set_len(SPARSE_LEN)
                    .map_err(system("Making a sparse file"))?;
                format!("path={}", sparse.display())
            }
            _ => format!("{},queues=16", part(VICTIMS)),
        };
        functions.push(function("attacker", &attacker));

        let mut command = Command::new(program);
        let has_supervisor = kind == AttackKind::RefusedUpgrade;
        if has_supervisor {
            command.args(["supervise", "--"]).arg(program);
        }
        command.arg("serve").arg("--control").arg(at("control"));
        command.arg("--state-dir").arg(at("state"));
        for function in &functions {
            command.arg("--function").arg(function);
        }
        let mut unread = None;
        let log = at("log");
        let stderr: Stdio = if kind == AttackKind::Log {
            let (reader, writer) = io::pipe().map_err(system("Making a pipe"))?;
            fill(&writer).map_err(system("Filling a pipe"))?;
            unread = Some(reader);
            writer.into()
        } else {
            let file = File::create(&log).map_err(system("Making a file"))?;
            file.into()
        };
        let started = command
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn();
        let child = started.map_err(|source| AttackError::Start {
            program: program.to_owned(),
            source,
        })?;
        let mut server = Self {
            program: program.to_owned(),
            child,
            is_supervised: has_supervisor,
            dir,
            _unread: unread,
        };
        match server.is_ready() {
            true => Ok(server),
            false => Err(AttackError::NotReady {
                program: program.to_owned(),
                log: fs::read_to_string(log).unwrap_or_default(),
            }),
        }
    }

    /// Waits until the server is ready or has ended. Returns true if it is ready.
    fn is_ready(&mut self) -> bool {
        let Some(stdout) = self.child.stdout.take() else {
            return false;
        };
        let (sender, ready) = mpsc::channel();
        // Standard output is read to its end, so that the server's writes never block.
        thread::spawn(move || {
            let lines = BufReader::new(stdout).lines().map_while(Result::ok);
            for _ in lines.filter(|line| line == "ready") {
                // Only the first line has a receiver.
                let _ = sender.send(());
            }
        });
        ready.recv().is_ok()
    }

    /// Returns the socket of a function.
    pub(super) fn socket(&self, id: &str) -> PathBuf {
        self.dir.path().join(format!("{id}.sock"))
    }

    /// Renames the file of the attacker's drive, which the server has open.
    pub(super) fn move_drive(&self) -> Result<(), AttackError> {
        let drive = self.dir.path().join(SPARSE);
        let renamed = fs::rename(&drive, drive.with_extension("moved"));
        renamed.map_err(AttackError::system_error("Renaming a drive"))
    }

    /// Requests an upgrade.
    pub(super) fn upgrade(&self) -> Result<Output, AttackError> {
        let mut command = Command::new(&self.program);
        let command = command
            .args(["upgrade", "--control"])
            .arg(self.dir.path().join("control"));
        command.output().map_err(|source| AttackError::Start {
            program: self.program.clone(),
            source,
        })
    }

    /// Returns the process id of the server under its supervisor.
    fn supervised_pid(&self) -> Option<String> {
        let supervisor = self.child.id();
        let children =
            fs::read_to_string(format!("/proc/{supervisor}/task/{supervisor}/children")).ok()?;
        children.split_whitespace().last().map(str::to_owned)
    }
}

impl Drop for AttackedServer {
    fn drop(&mut self) {
        let server = match self.is_supervised {
            true => self.supervised_pid(),
            false => None,
        };
        // The supervisor is killed first, since it would restart the server. Errors mean that the process has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(server) = server {
            let _ = Command::new("kill").args(["-s", "KILL", &server]).status();
        }
    }
}

/// Fills a pipe, so that the next write to it blocks.
fn fill(pipe: &impl AsRawFd) -> io::Result<()> {
    // The pipe is opened a second time for the non-blocking writes. So the server's own writes still block.
    let mut end = File::options()
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(format!("/proc/self/fd/{}", pipe.as_raw_fd()))?;
    for bytes in [&[b'x'; 4096][..], b"x"] {
        loop {
            match end.write(bytes) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

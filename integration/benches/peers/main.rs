//! Throughput of drives beside their peers, each pair in turn, in one run.
//!
//! ```text
//! SPDK=/path/of/a/build cargo bench --workspace --bench peers [-- NAME]   # rows with this in their name
//! cargo bench --workspace --bench peers -- --smoke                        # one short round
//! ```
//!
//! Client and server have a processor each. SPDK's own client (`spdk_nvme_perf`) loads both servers, and the server that
//! is not loaded stands still (SIGSTOP), as SPDK's spins. A row's figure is the ratio of our commands per second to the
//! peer's: the median of the rounds, with the lowest and the highest.
//!
//! Without `SPDK`, the rows that need it are named and left out.

use std::env;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use integration::checks::{Failure, at};
use integration::process;
use integration::server::{FunctionOptions, Server};
use integration::{programs, server};

use rows::{Drive, Load, Peer, ROWS, Row};
use spdk::Spdk;

mod copies;
mod rows;
mod spdk;

/// Processor of the clients.
const CLIENT: usize = 0;
/// Processor of the servers, and of the loop that copies.
const SERVER: usize = 1;
/// Bytes of a drive that keeps its data.
const DRIVE: u64 = 256 << 20;

/// Length of a measurement, and number of them.
#[derive(Debug, Clone, Copy)]
struct Effort {
    rounds: usize,
    seconds: u32,
}

const FULL: Effort = Effort {
    rounds: 5,
    seconds: 2,
};
const SMOKE: Effort = Effort {
    rounds: 1,
    seconds: 1,
};

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let is_smoke = arguments.iter().any(|argument| argument == "--smoke");
    let name = arguments
        .iter()
        .find(|argument| !argument.starts_with("--"));
    let rows = ROWS
        .iter()
        .filter(|row| name.is_none_or(|name| row.name.contains(name.as_str())));
    match measure(rows.collect(), if is_smoke { SMOKE } else { FULL }) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{}", integration::error_chain(&*failure));
            ExitCode::FAILURE
        }
    }
}

fn measure(mut rows: Vec<&Row>, effort: Effort) -> Result<(), Failure> {
    if std::thread::available_parallelism()
        .map_err(at("/proc/self"))?
        .get()
        <= SERVER
    {
        return Err("Client and server need a processor each: this machine has one".into());
    }
    let build = env::var_os("SPDK").map(PathBuf::from);
    if build.is_none() {
        let (with, without): (Vec<&Row>, Vec<&Row>) = rows
            .into_iter()
            .partition(|row| matches!(row.peer, Peer::Spdk(_)));
        rows = without;
        if !with.is_empty() {
            println!(
                "NOT MEASURED: {} rows beside SPDK. SPDK=PATH names its build, with --with-vfio-user.",
                with.len()
            );
        }
    }
    if rows.is_empty() {
        return Ok(());
    }
    let folder = tempfile::tempdir().map_err(at(env::temp_dir()))?;
    let drives: Vec<Drive> = Drive::ALL
        .into_iter()
        .filter(|drive| rows.iter().any(|row| row.drive == *drive))
        .collect();
    let files = Files::make(&drives)?;
    let ours = Ours::start(folder.path(), &drives, &files)?;
    let spdk = build
        .filter(|_| rows.iter().any(|row| matches!(row.peer, Peer::Spdk(_))))
        .map(|build| {
            let devices = rows.iter().filter_map(|row| row.peer.device());
            Spdk::start(&build, folder.path(), devices, &files)
        })
        .transpose()?;
    println!(
        "{:<34} {:>12} {:>12} {:>6} {:>13} {:>5}",
        "row", "ours", "peer", "ratio", "from, to", "goal"
    );
    for row in rows {
        let mut rounds = Vec::new();
        for _ in 0..effort.rounds {
            rounds.push(round(row, &ours, spdk.as_ref(), effort)?);
        }
        report(row, rounds);
    }
    Ok(())
}

/// Commands per second of both sides.
#[derive(Debug, Clone, Copy)]
struct Round {
    ours: f64,
    peer: f64,
}

impl Round {
    fn ratio(self) -> f64 {
        self.ours / self.peer
    }
}

fn round(row: &Row, ours: &Ours, spdk: Option<&Spdk>, effort: Effort) -> Result<Round, Failure> {
    let Row { drive, load, .. } = row;
    match (row.peer, spdk) {
        (Peer::Spdk(device), Some(spdk)) => {
            spdk.pause()?;
            let mine = spdk.load(&ours.folder_of(*drive), None, *load, effort.seconds)?;
            spdk.resume()?;
            ours.pause()?;
            let folder = spdk.folder_of(device);
            let peer = spdk.load(&folder, Some(device), *load, effort.seconds)?;
            ours.resume()?;
            Ok(Round { ours: mine, peer })
        }
        (Peer::Copies, _) => {
            if let Some(spdk) = spdk {
                spdk.pause()?;
            }
            let mine = ours.load(*drive, *load, effort.seconds)?;
            let peer = copies::per_second(load.size as usize, effort.seconds)?;
            if let Some(spdk) = spdk {
                spdk.resume()?;
            }
            Ok(Round { ours: mine, peer })
        }
        (Peer::Spdk(_), None) => Err("This row needs SPDK".into()),
    }
}

fn report(row: &Row, mut rounds: Vec<Round>) {
    rounds.sort_by(|one, other| one.ratio().total_cmp(&other.ratio()));
    let Round { ours, peer } = rounds[rounds.len() / 2];
    let (least, most) = (rounds[0].ratio(), rounds[rounds.len() - 1].ratio());
    println!(
        "{:<34} {ours:>12.0} {peer:>12.0} {:>6.2} {:>13} {:>5}",
        row.name,
        ours / peer,
        format!("{least:.2} to {most:.2}"),
        row.goal,
    );
}

/// Has a process stand still, or go on.
fn signal(name: &str, pid: u32) -> Result<(), Failure> {
    process::run(Command::new("kill").args([name, &pid.to_string()]))?;
    Ok(())
}

/// Filled files of the drives that are files, one of ours and one of the peer's for each.
struct Files {
    folders: Vec<(Drive, tempfile::TempDir)>,
}

impl Files {
    fn make(drives: &[Drive]) -> Result<Self, Failure> {
        let mut folders = Vec::new();
        for drive in drives {
            if let Some(place) = drive.folder() {
                let folder = tempfile::tempdir_in(&place).map_err(at(&place))?;
                for name in [OURS, PEER] {
                    fill(&folder.path().join(name))?;
                }
                folders.push((*drive, folder));
            }
        }
        Ok(Self { folders })
    }

    /// Returns a file of a drive that is one.
    fn path(&self, drive: Drive, name: &str) -> Result<PathBuf, Failure> {
        let of_drive = self.folders.iter().find(|(other, _)| *other == drive);
        let (_, folder) = of_drive.ok_or_else(|| format!("{} has no file", drive.name()))?;
        Ok(folder.path().join(name))
    }
}

fn fill(path: &Path) -> Result<(), Failure> {
    let block: Vec<u8> = (0..1 << 20).map(|at: u32| (at / 7) as u8).collect();
    let write = || {
        let mut file = File::create(path)?;
        for _ in 0..DRIVE >> 20 {
            file.write_all(&block)?;
        }
        file.sync_all()
    };
    write().map_err(at(path))
}

const OURS: &str = "ours";
const PEER: &str = "peer";

/// Our server, with a function for each drive.
struct Ours {
    server: Server,
    folder: PathBuf,
    load: PathBuf,
}

impl Ours {
    fn start(folder: &Path, drives: &[Drive], files: &Files) -> Result<Self, Failure> {
        let program = server::build()?;
        let [load] = &programs::build("nvme-load", &["nvme-load"])?[..] else {
            return Err("One program was built".into());
        };
        let folder = folder.join("ours");
        fs::create_dir(&folder).map_err(at(&folder))?;
        let mut functions = Vec::new();
        for drive in drives {
            let path = match drive {
                Drive::Null => format!("null:{DRIVE}"),
                Drive::Memory => format!("memory:{DRIVE}"),
                Drive::Tmpfs | Drive::Disk => files.path(*drive, OURS)?.display().to_string(),
            };
            let function = FunctionOptions::new(drive.name(), path, format!("0+{DRIVE}"));
            // SPDK's client has no Doorbell Buffer, and maps the doorbells.
            let function = function.option("doorbells=mapped");
            functions.push(function.option(format!("poll=shared@{SERVER}")));
        }
        let server = Server::start(&program, &functions, &folder)?;
        // SPDK's client wants a folder, and a socket of this name in it.
        for drive in drives {
            let of_drive = folder.join(drive.name());
            fs::create_dir(&of_drive).map_err(at(&of_drive))?;
            let link = of_drive.join("cntrl");
            symlink(server.socket(drive.name()), &link).map_err(at(&link))?;
        }
        let ours = Self {
            server,
            folder,
            load: load.clone(),
        };
        if drives.contains(&Drive::Memory) {
            ours.fill(Drive::Memory)?;
        }
        Ok(ours)
    }

    /// Writes all of a drive: what was never written is read without a copy.
    fn fill(&self, drive: Drive) -> Result<(), Failure> {
        let size = 128 << 10;
        let count = (DRIVE / size).to_string();
        let pattern = ["--mix", "0", "--pattern", "sequential", "--count", &count];
        process::run(
            self.client(drive)
                .args(["--size", &size.to_string()])
                .args(pattern),
        )?;
        Ok(())
    }

    fn client(&self, drive: Drive) -> Command {
        let mut command = Command::new(&self.load);
        command
            .arg(self.server.socket(drive.name()))
            .args(["--cpu", &CLIENT.to_string()]);
        command
    }

    /// Returns the commands per second of our own client.
    fn load(&self, drive: Drive, load: Load, seconds: u32) -> Result<f64, Failure> {
        let result = self.folder.join("result.json");
        process::run(
            self.client(drive)
                .args(["--qd", &load.depth.to_string()])
                .args(["--size", &load.size.to_string()])
                .args(["--seconds", &seconds.to_string(), "--json"])
                .arg(&result),
        )?;
        let text = fs::read_to_string(&result).map_err(at(&result))?;
        let report: serde_json::Value = serde_json::from_str(&text)?;
        report["iops"]
            .as_f64()
            .ok_or_else(|| format!("{}: no 'iops'", result.display()).into())
    }

    /// Returns the folder by which SPDK's client finds a function.
    fn folder_of(&self, drive: Drive) -> PathBuf {
        self.folder.join(drive.name())
    }

    fn pause(&self) -> Result<(), Failure> {
        signal("-STOP", self.server.pid())
    }

    fn resume(&self) -> Result<(), Failure> {
        signal("-CONT", self.server.pid())
    }
}

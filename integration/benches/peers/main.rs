//! Throughput of drives beside their peers, each pair in turn, in one run.
//!
//! ```text
//! SPDK=/path/of/a/build cargo bench --workspace --bench peers [-- NAME]   # rows with this in their name
//! cargo bench --workspace --bench peers -- --smoke                        # one short round
//! cargo bench --workspace --bench peers -- --json FILE                    # writes the figures, for `cargo figures`
//! ```
//!
//! Client and server have a processor each. SPDK's own client (`spdk_nvme_perf`) loads both servers, and the server that
//! is not loaded stands still (SIGSTOP), as SPDK's spins. Each drive of ours has two functions, with an adaptive and with a
//! busy poller. Each round of a row loads both functions and the peer. A printed line has the ratio of one function's
//! commands per second to the peer's: the median of the rounds, with the lowest and the highest.
//!
//! Without `SPDK`, the rows that need it are named and left out.
//!
//! The files of rows that begin with `disk` lie beside the build. `DISK=FOLDER` has them in another file system.
//! `DISK=DEVICE,DEVICE` names block devices in their place, which are overwritten: ours of 512 MiB, and the peer's of 256.

use std::env;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use figure_data::{FigureData, FigurePanel, FigurePoint, FigureSeries, PlotKind};
use integration::checks::{Failure, with_path};
use integration::process;
use integration::server::{FunctionArgument, Server};
use integration::{programs, server};

use rows::{Drive, FileLocation, Load, Peer, Polling, ROWS, Row};
use spdk::Spdk;

mod copies;
mod rows;
mod spdk;

/// Processor of the clients.
const CLIENT: usize = 0;
/// Processor of the servers and of the copying loop.
const SERVER: usize = 1;
/// Size in bytes of a drive that stores data.
const DRIVE: u64 = 256 << 20;

/// Duration and number of measurements.
#[derive(Debug, Clone, Copy)]
struct MeasuringTime {
    rounds: usize,
    seconds: u32,
}

const FULL: MeasuringTime = MeasuringTime {
    rounds: 5,
    seconds: 2,
};
const SMOKE: MeasuringTime = MeasuringTime {
    rounds: 1,
    seconds: 1,
};

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let is_smoke = arguments.iter().any(|argument| argument == "--smoke");
    let json = figure_data::json_argument(&arguments);
    let is_json = |argument: &String| json.as_deref() == Some(Path::new(argument));
    let name = arguments
        .iter()
        .find(|argument| !argument.starts_with("--") && !is_json(argument));
    let rows = ROWS
        .iter()
        .filter(|row| name.is_none_or(|name| row.name.contains(name.as_str())));
    let effort = if is_smoke { SMOKE } else { FULL };
    let written = measure(rows.collect(), effort).and_then(|measured| {
        let Some(path) = json else {
            return Ok(());
        };
        figure(&measured).write(&path).map_err(Failure::from)
    });
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{}", integration::error_chain(&*failure));
            ExitCode::FAILURE
        }
    }
}

/// Rows with their rounds.
type Measured<'a> = Vec<(&'a Row, Vec<Round>)>;

fn measure(mut rows: Vec<&Row>, effort: MeasuringTime) -> Result<Measured<'_>, Failure> {
    if std::thread::available_parallelism()
        .map_err(with_path("/proc/self"))?
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
        return Ok(Vec::new());
    }
    let dir = tempfile::tempdir().map_err(with_path(env::temp_dir()))?;
    let drives: Vec<Drive> = Drive::ALL
        .into_iter()
        .filter(|drive| rows.iter().any(|row| row.drive == *drive))
        .collect();
    let files = Files::make(&drives)?;
    let ours = OurServer::start(dir.path(), &drives, &files)?;
    let spdk = build
        .filter(|_| rows.iter().any(|row| matches!(row.peer, Peer::Spdk(_))))
        .map(|build| {
            let devices = rows.iter().filter_map(|row| row.peer.device());
            Spdk::start(&build, dir.path(), devices, &files)
        })
        .transpose()?;
    println!(
        "{:<44} {:>12} {:>12} {:>6} {:>13} {:>5}",
        "row, polling", "ours", "peer", "ratio", "from, to", "goal"
    );
    let mut measured = Vec::new();
    for row in rows {
        let mut rounds = Vec::new();
        for _ in 0..effort.rounds {
            rounds.push(round(row, &ours, spdk.as_ref(), effort)?);
        }
        for polling in Polling::ALL {
            report(row, polling, &mut rounds);
        }
        measured.push((row, rounds));
    }
    Ok(measured)
}

/// The medians of the rounds with their spread.
fn figure(measured: &Measured<'_>) -> FigureData {
    let series = |label: &str, value: &dyn Fn(&Round) -> f64| {
        let points = measured.iter().filter_map(|(row, rounds)| {
            let rounds: Vec<f64> = rounds.iter().map(value).collect();
            FigurePoint::from_rounds(row.name, &rounds)
        });
        FigureSeries {
            label: label.to_owned(),
            points: points.collect(),
        }
    };
    let panel = |measured: &str, unit: &str, plot, series| FigurePanel {
        measured: measured.to_owned(),
        unit: unit.to_owned(),
        plot,
        log: false,
        series,
    };
    let ratios = Polling::ALL.map(|polling| {
        let label = format!("{} poller", polling.name());
        series(&label, &|round| round.ratio(polling))
    });
    let rates = Polling::ALL.map(|polling| series(polling.name(), &|round| round.ours(polling)));
    let rates = rates
        .into_iter()
        .chain([series("peer", &|round| round.peer)]);
    let mut figure = FigureData::on_this_machine(
        "Drives beside block devices of SPDK",
        "SPDK=PATH cargo bench --workspace --bench peers",
    );
    let ratio = "commands per second, ours by the peer's";
    figure.panels = vec![
        panel(ratio, "ratio", PlotKind::Bars, ratios.to_vec()),
        panel("commands", "per second", PlotKind::None, rates.collect()),
    ];
    figure
}

/// Commands per second of both of this project's functions, and of their peer.
#[derive(Debug, Clone, Copy)]
struct Round {
    adaptive: f64,
    busy: f64,
    peer: f64,
}

impl Round {
    fn ours(self, polling: Polling) -> f64 {
        match polling {
            Polling::Adaptive => self.adaptive,
            Polling::Busy => self.busy,
        }
    }

    fn ratio(self, polling: Polling) -> f64 {
        self.ours(polling) / self.peer
    }
}

fn round(
    row: &Row,
    ours: &OurServer,
    spdk: Option<&Spdk>,
    effort: MeasuringTime,
) -> Result<Round, Failure> {
    if let Some(spdk) = spdk {
        spdk.pause()?;
    }
    let adaptive = load_ours(row, Polling::Adaptive, ours, spdk, effort)?;
    let busy = load_ours(row, Polling::Busy, ours, spdk, effort)?;
    ours.pause()?;
    let peer = load_peer(row, spdk, effort)?;
    ours.resume()?;
    if let Some(spdk) = spdk {
        spdk.resume()?;
    }
    Ok(Round {
        adaptive,
        busy,
        peer,
    })
}

fn load_ours(
    row: &Row,
    polling: Polling,
    ours: &OurServer,
    spdk: Option<&Spdk>,
    effort: MeasuringTime,
) -> Result<f64, Failure> {
    match (row.peer, spdk) {
        (Peer::Spdk(_), Some(spdk)) => {
            let dir = ours.dir_of(row.drive, polling);
            spdk.load(&dir, None, row.load, effort.seconds)
        }
        (Peer::Spdk(_), None) => Err("This row needs SPDK".into()),
        (Peer::Copies, _) => ours.load(row.drive, polling, row.load, effort.seconds),
    }
}

fn load_peer(row: &Row, spdk: Option<&Spdk>, effort: MeasuringTime) -> Result<f64, Failure> {
    match (row.peer, spdk) {
        (Peer::Spdk(device), Some(spdk)) => {
            spdk.resume()?;
            let dir = spdk.dir_of(device);
            spdk.load(&dir, Some(device), row.load, effort.seconds)
        }
        (Peer::Spdk(_), None) => Err("This row needs SPDK".into()),
        (Peer::Copies, _) => copies::per_second(row.load.size as usize, effort.seconds),
    }
}

fn report(row: &Row, polling: Polling, rounds: &mut [Round]) {
    rounds.sort_by(|one, other| one.ratio(polling).total_cmp(&other.ratio(polling)));
    let median = rounds[rounds.len() / 2];
    let (least, most) = (rounds[0], rounds[rounds.len() - 1]);
    println!(
        "{:<44} {:>12.0} {:>12.0} {:>6.2} {:>13} {:>5}",
        format!("{}, {}", row.name, polling.name()),
        median.ours(polling),
        median.peer,
        median.ratio(polling),
        format!("{:.2} to {:.2}", least.ratio(polling), most.ratio(polling)),
        row.goal,
    );
}

/// Sends a signal to a process, which stops or continues it.
fn signal(name: &str, pid: u32) -> Result<(), Failure> {
    process::run(Command::new("kill").args([name, &pid.to_string()]))?;
    Ok(())
}

/// Files or block devices of drives that have any: one for this project's drive, and one for the peer's.
struct Files {
    paths: Vec<(Drive, Pair)>,
    /// Removed with all their files at the end.
    _folders: Vec<tempfile::TempDir>,
}

/// Path of this project's drive, and path of the peer's drive.
#[derive(Debug)]
struct Pair {
    ours: PathBuf,
    peer: PathBuf,
}

impl Files {
    fn make(drives: &[Drive]) -> Result<Self, Failure> {
        let (mut paths, mut dirs) = (Vec::new(), Vec::new());
        for drive in drives {
            let pair = match drive.place() {
                None => continue,
                Some(FileLocation::Devices(ours, peer)) => Pair { ours, peer },
                Some(FileLocation::Folder(place)) => {
                    let dir = tempfile::tempdir_in(&place).map_err(with_path(&place))?;
                    let [ours, peer] = ["ours", "peer"].map(|name| dir.path().join(name));
                    dirs.push(dir);
                    Pair { ours, peer }
                }
            };
            fill(&pair.ours, OURS_SIZE)?;
            fill(&pair.peer, DRIVE)?;
            paths.push((*drive, pair));
        }
        Ok(Self {
            paths,
            _folders: dirs,
        })
    }

    /// Returns the files of a drive that has files.
    fn pair_of(&self, drive: Drive) -> Result<&Pair, Failure> {
        let of_drive = self.paths.iter().find(|(other, _)| *other == drive);
        let (_, pair) = of_drive.ok_or_else(|| format!("{} has no file", drive.name()))?;
        Ok(pair)
    }
}

fn fill(path: &Path, size: u64) -> Result<(), Failure> {
    // Data that a device cannot compress.
    let block: Vec<u8> = (0..1 << 17)
        .flat_map(|word: u64| word.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes())
        .collect();
    let write = || {
        let mut file = File::create(path)?;
        for _ in 0..size >> 20 {
            file.write_all(&block)?;
        }
        file.sync_all()
    };
    write().map_err(with_path(path))
}

/// Size of this project's drive in bytes: each of its functions is as large as the peer's drive.
const OURS_SIZE: u64 = Polling::ALL.len() as u64 * DRIVE;

/// Returns the name of a function.
fn name(drive: Drive, polling: Polling) -> String {
    format!("{}-{}", drive.name(), polling.name())
}

/// This project's server, with a function for each drive and polling mode.
struct OurServer {
    server: Server,
    dir: PathBuf,
    load: PathBuf,
}

impl OurServer {
    fn start(dir: &Path, drives: &[Drive], files: &Files) -> Result<Self, Failure> {
        let program = server::build()?;
        let [load] = &programs::build("nvme-load", &["nvme-load"])?[..] else {
            return Err("One program was built".into());
        };
        let dir = dir.join("ours");
        fs::create_dir(&dir).map_err(with_path(&dir))?;
        let mut functions = Vec::new();
        for drive in drives {
            let path = match drive {
                Drive::Null => format!("null:{OURS_SIZE}"),
                Drive::Memory => format!("memory:{OURS_SIZE}"),
                Drive::Tmpfs | Drive::Disk => files.pair_of(*drive)?.ours.display().to_string(),
            };
            for (number, polling) in (0_u64..).zip(Polling::ALL) {
                let range = format!("{}+{DRIVE}", number * DRIVE);
                let function = FunctionArgument::new(&name(*drive, polling), &*path, range);
                // SPDK's client does not support the Doorbell Buffer, and maps the doorbells.
                let function = function.option("doorbells=mapped");
                let poll = format!("poll=shared:{}@{SERVER}", polling.name());
                functions.push(function.option(poll));
            }
        }
        let server = Server::start(&program, &functions, &dir)?;
        // SPDK's client expects a directory with a socket of this name.
        for function in &functions {
            let of_function = dir.join(&function.id);
            fs::create_dir(&of_function).map_err(with_path(&of_function))?;
            let link = of_function.join("cntrl");
            symlink(server.socket(&function.id), &link).map_err(with_path(&link))?;
        }
        let ours = Self {
            server,
            dir,
            load: load.clone(),
        };
        if drives.contains(&Drive::Memory) {
            for polling in Polling::ALL {
                ours.fill(Drive::Memory, polling)?;
            }
        }
        Ok(ours)
    }

    /// Writes the whole range of a function, because reads of unwritten blocks need no copy.
    fn fill(&self, drive: Drive, polling: Polling) -> Result<(), Failure> {
        let size = 128 << 10;
        let count = (DRIVE / size).to_string();
        let pattern = ["--mix", "0", "--pattern", "sequential", "--count", &count];
        process::run(
            self.client(drive, polling)
                .args(["--size", &size.to_string()])
                .args(pattern),
        )?;
        Ok(())
    }

    fn client(&self, drive: Drive, polling: Polling) -> Command {
        let mut command = Command::new(&self.load);
        command
            .arg(self.server.socket(&name(drive, polling)))
            .args(["--cpu", &CLIENT.to_string()]);
        command
    }

    /// Measures a load with this project's client. Returns the commands per second.
    fn load(
        &self,
        drive: Drive,
        polling: Polling,
        load: Load,
        seconds: u32,
    ) -> Result<f64, Failure> {
        let result = self.dir.join("result.json");
        process::run(
            self.client(drive, polling)
                .args(["--qd", &load.depth.to_string()])
                .args(["--size", &load.size.to_string()])
                .args(["--seconds", &seconds.to_string(), "--json"])
                .arg(&result),
        )?;
        let text = fs::read_to_string(&result).map_err(with_path(&result))?;
        let report: serde_json::Value = serde_json::from_str(&text)?;
        report["iops"]
            .as_f64()
            .ok_or_else(|| format!("{}: no 'iops'", result.display()).into())
    }

    /// Returns the directory that SPDK's client needs for a function.
    fn dir_of(&self, drive: Drive, polling: Polling) -> PathBuf {
        self.dir.join(name(drive, polling))
    }

    fn pause(&self) -> Result<(), Failure> {
        signal("-STOP", self.server.pid())
    }

    fn resume(&self) -> Result<(), Failure> {
        signal("-CONT", self.server.pid())
    }
}

//! fio on full and failing disks: in a guest with a function, and on the local file for comparison.
//!
//! fio writes sequentially and calls `fsync` after every [`BATCH`] writes until it gets an error. Then the disk is repaired,
//! and fio verifies the data that its `fsync` calls covered.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;
use std::{fs, io};

use integration::guest::fio::{FioJobOutcome, GuestFioJob};
use integration::guest::{GuestConfig, GuestDrive};
use integration::progress::print_line;
use integration::server::{FunctionArgument, ServerError};

use crate::disks::{BATCH, DiskFailure, LEASE, Layer, MappedDisk, PLACE, heal, prepare};
use crate::fixture::{CheckEnvironment, Failure, TIMEOUT, await_that, expect, sh, with_path};

/// Writes per second, slow enough that a flaky disk fails before the last write.
const RATE: u64 = 100;
/// Fewest bytes on the disk before it begins to fail.
const WRITTEN_BEFORE: u64 = 4 << 20;

/// Errors that may result from a disk failure. Linux reports a Write Fault as ENODATA to direct I/O (`nvme_error_status`), and
/// as EIO to `fsync`.
const FAILED: [i64; 2] = [libc::EIO as i64, libc::ENODATA as i64];

/// Compares fio in a guest with fio on the local file or device.
pub(crate) fn compare(
    bench: &CheckEnvironment,
    layer: Layer,
    failure: DiskFailure,
) -> Result<(), Failure> {
    fs::create_dir_all("/mnt").map_err(with_path(Path::new("/mnt")))?;
    for (who, locally) in [("a local file", true), ("a guest", false)] {
        let (disk, path) = prepare(layer, failure)?;
        let outcome = match locally {
            true => run_on_host(&disk, layer, &path, failure)?,
            false => run_in_guest(bench, &disk, layer, &path, failure)?,
        };
        heal(&disk, layer)?;
        let covered = outcome.flushes * BATCH * PLACE;
        print_line(&format!(
            "        {who}: {} MiB were flushed, then fio got {}",
            covered >> 20,
            io::Error::from_raw_os_error(outcome.error as i32)
        ));
        expect(outcome.flushes > 0, || {
            format!("{who} flushed nothing before there was any trouble")
        })?;
        let expected = match failure {
            DiskFailure::Full => outcome.error == i64::from(libc::ENOSPC),
            DiskFailure::Error | DiskFailure::Flaky => FAILED.contains(&outcome.error),
        };
        expect(expected, || {
            format!("{who} got error {} of a disk in {failure:?}", outcome.error)
        })?;
        let job = job(layer, failure, &path).option("verify_only", "1");
        let job = job.option("size", &covered.to_string());
        job.report(&run_job(&job)?)?;
    }
    Ok(())
}

/// Returns a job with direct writes. On a file below which the disk fails, the job uses the page cache, as most programs do.
/// (Write-back to a full device fails with EIO.)
fn job(layer: Layer, failure: DiskFailure, path: &Path) -> GuestFioJob {
    let cached = (layer, failure) == (Layer::File, DiskFailure::Error);
    let direct = if cached { "0" } else { "1" };
    GuestFioJob::new("trouble", "write", &PLACE.to_string(), 1)
        .option("filename", &path.display().to_string())
        .option("size", &LEASE.to_string())
        .option("direct", direct)
        .option("verify", "crc32c")
        .option("verify_fatal", "1")
}

/// Returns a job that only writes.
fn writes(layer: Layer, failure: DiskFailure, path: &Path) -> GuestFioJob {
    job(layer, failure, path)
        .option("do_verify", "0")
        .option("fsync", &BATCH.to_string())
        .option("rate_iops", &RATE.to_string())
}

/// Runs a job on the lab host. Returns its report, which may contain an error.
fn run_job(job: &GuestFioJob) -> Result<String, Failure> {
    let ran = Command::new("sh").args(["-c", &job.script()]).output();
    let output = ran.map_err(with_path(Path::new("sh")))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Starts the failure in the middle of the writes.
fn begin(disk: &MappedDisk, failure: DiskFailure, before: u64) -> Result<(), Failure> {
    if failure != DiskFailure::Full {
        await_that("the disk has some writes", || {
            Ok(disk.written_bytes()? >= before + WRITTEN_BEFORE)
        })?;
    }
    disk.begin(failure)
}

fn run_on_host(
    disk: &MappedDisk,
    layer: Layer,
    path: &Path,
    failure: DiskFailure,
) -> Result<FioJobOutcome, Failure> {
    let job = writes(layer, failure, path);
    let before = disk.written_bytes()?;
    let (done, outcome) = mpsc::channel();
    let local = job.clone();
    thread::spawn(move || {
        // The receiver may be gone at the end of the check.
        let _ = done.send(run_job(&local).map_err(|error| error.to_string()));
    });
    begin(disk, failure, before)?;
    let text = outcome.recv_timeout(TIMEOUT)??;
    Ok(job.outcome(&text)?)
}

fn run_in_guest(
    bench: &CheckEnvironment,
    disk: &MappedDisk,
    layer: Layer,
    path: &Path,
    failure: DiskFailure,
) -> Result<FioJobOutcome, Failure> {
    let options = FunctionArgument::new("x", path.display().to_string(), format!("0+{LEASE}"));
    let mut server = bench.serve(&[options])?;
    let config = GuestConfig::new("guest").drive(GuestDrive::vfio_user(server.socket("x")));
    let mut guest = bench.boot(&config)?;
    let job = writes(layer, failure, &PathBuf::from("/dev/nvme0n1"));
    let before = disk.written_bytes()?;
    let running = guest.start(&job.script())?;
    begin(disk, failure, before)?;
    let output = guest.finish(running, job.timeout().max(Duration::from_secs(300)))?;
    guest.power_off(TIMEOUT)?;
    match server.stop() {
        // The server may be unable to flush, or may report an earlier error.
        Ok(()) | Err(ServerError::Ended { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    // Completes pending writes of the guest and the server before the disk is repaired.
    sh("sync")?;
    Ok(job.outcome(&output.text)?)
}

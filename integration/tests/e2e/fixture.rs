//! Fixtures of end-to-end checks: a bench whose logs are kept after a failure, and functions of booted guests.

use std::fs::{self, File, TryLockError};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub(crate) use integration::checks::{CheckEnvironment, Failure, expect, with_path};
use integration::guest::fio::GuestFioJob;
use integration::guest::{Guest, GuestConfig, GuestDrive};
use integration::progress::print_line;
use integration::provision::{GuestAssets, KernelChoice};
use integration::server::{self, FunctionArgument, Server};

/// Timeout of any operation in a busy guest.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(300);
/// Size of the drive of most checks.
pub(crate) const DRIVE_MIB: u64 = 256;
/// Id of the only function of a guest.
pub(crate) const FUNCTION: &str = "a";

/// The `nvme-mpt` command, and the files that guests boot from.
static PROVIDED: LazyLock<Result<(PathBuf, GuestAssets), String>> = LazyLock::new(|| {
    let provide = || {
        let assets = GuestAssets::provide(&KernelChoice::V6_12)?;
        Ok::<_, Failure>((server::build()?, assets))
    };
    provide().map_err(|failure| integration::error_chain(&*failure))
});

/// A bench with its directories. On drop, its drives are removed, and its logs as well unless a check failed.
pub(crate) struct BenchDir {
    pub(crate) bench: CheckEnvironment,
    drives: PathBuf,
    /// Lock on the drives' directory.
    _lock: File,
    dir: Option<tempfile::TempDir>,
    has_failed: AtomicBool,
}

impl BenchDir {
    /// Creates a place for the check or group of checks called `name`.
    pub(crate) fn new(name: &str) -> Result<Self, Failure> {
        let (program, assets) = PROVIDED.as_ref().map_err(String::as_str)?;
        let dir = tempfile::Builder::new()
            .prefix("nvme-mpt-e2e-")
            .tempdir()
            .map_err(with_path(std::env::temp_dir()))?;
        let drives = integration::target_dir()
            .join("e2e")
            .join(name.replace("::", "-"));
        fs::create_dir_all(&drives).map_err(with_path(&drives))?;
        let lock = File::open(&drives).map_err(with_path(&drives))?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => Failure::from(format!(
                "Another run uses the drives in {}: wait for its end, or set another CARGO_TARGET_DIR",
                drives.display()
            )),
            TryLockError::Error(source) => with_path(&drives)(source),
        })?;
        Ok(Self {
            bench: CheckEnvironment::new(
                dir.path().to_owned(),
                drives.clone(),
                program.clone(),
                assets.clone(),
            ),
            drives,
            _lock: lock,
            dir: Some(dir),
            has_failed: AtomicBool::new(false),
        })
    }

    /// Records the result of a check, and returns it.
    pub(crate) fn record_result<T>(&self, result: Result<T, Failure>) -> Result<T, Failure> {
        self.has_failed.fetch_or(result.is_err(), Ordering::Relaxed);
        result
    }
}

impl Drop for BenchDir {
    fn drop(&mut self) {
        // The next run removes drives that are left.
        let _ = fs::remove_dir_all(&self.drives);
        let failed = self.has_failed.load(Ordering::Relaxed) || std::thread::panicking();
        if let Some(dir) = self.dir.take_if(|_| failed) {
            print_line(&format!(
                "        logs and consoles: {}",
                dir.keep().display()
            ));
        }
    }
}

/// Returns a function on the whole of a new drive.
pub(crate) fn function(bench: &CheckEnvironment) -> Result<FunctionArgument, Failure> {
    let drive = bench.drive("drive.img", DRIVE_MIB)?;
    let range = format!("0+{DRIVE_MIB}M");
    Ok(FunctionArgument::new(
        FUNCTION,
        drive.display().to_string(),
        range,
    ))
}

/// A function of a booted guest, with its server. The guest is dropped before the server.
pub(crate) struct BootedFunction {
    pub(crate) guest: Arc<Guest>,
    server: Arc<Mutex<Server>>,
    /// Id of the function.
    pub(crate) function: String,
    /// Path of the controller in the guest.
    pub(crate) controller: String,
    /// Path of the namespace in the guest.
    pub(crate) namespace: String,
}

impl BootedFunction {
    /// Starts a server with one function, and a guest of Linux 6.12 with that function.
    pub(crate) fn new(bench: &CheckEnvironment, vcpus: u32) -> Result<Self, Failure> {
        Self::boot(bench, bench.v6_12(), function(bench)?, vcpus)
    }

    /// Starts a server with one function, and a guest with that function.
    pub(crate) fn boot(
        bench: &CheckEnvironment,
        assets: &GuestAssets,
        function: FunctionArgument,
        vcpus: u32,
    ) -> Result<Self, Failure> {
        let server = bench.serve(&[function])?;
        let config = GuestConfig::new("guest")
            .vcpus(vcpus)
            .drive(GuestDrive::vfio_user(server.socket(FUNCTION)));
        let guest = bench.boot_with(assets, &config)?;
        Ok(Self {
            guest: Arc::new(guest),
            server: Arc::new(Mutex::new(server)),
            function: FUNCTION.to_owned(),
            controller: "/dev/nvme0".to_owned(),
            namespace: "/dev/nvme0n1".to_owned(),
        })
    }

    /// Starts a server with all `functions`, and a guest of Linux 6.12 with all of them.
    pub(crate) fn boot_all(
        bench: &CheckEnvironment,
        functions: &[FunctionArgument],
        vcpus: u32,
    ) -> Result<Vec<Self>, Failure> {
        let server = bench.serve(functions)?;
        let mut config = GuestConfig::new("guest").vcpus(vcpus);
        for function in functions {
            let drive = GuestDrive::vfio_user(server.socket(&function.id));
            config = config.drive(drive.id(&function.id));
        }
        let guest = Arc::new(bench.boot(&config)?);
        let server = Arc::new(Mutex::new(server));
        let booted = |function: &FunctionArgument| {
            // Linux numbers controllers in the order in which their probes end, so the serial number identifies a controller.
            let serial = lock(&server).function_stats(&function.id)?.serial;
            let named = guest.check(
                &format!(
                    "cd /sys/class/nvme && for c in *; do \
                       if grep -q '^{serial}' $c/serial; then echo $c; (cd $c && ls -d nvme*n1); fi; \
                     done"
                ),
                TIMEOUT,
            )?;
            let mut names = named.split_whitespace();
            let mut name = || {
                let missing = || Failure::from(format!("Names of serial {serial}: '{named}'"));
                let name = names.next().ok_or_else(missing)?;
                Ok::<_, Failure>(format!("/dev/{name}"))
            };
            Ok(Self {
                controller: name()?,
                namespace: name()?,
                function: function.id.clone(),
                guest: Arc::clone(&guest),
                server: Arc::clone(&server),
            })
        };
        functions.iter().map(booted).collect()
    }

    /// Returns the server.
    pub(crate) fn server(&self) -> MutexGuard<'_, Server> {
        lock(&self.server)
    }

    /// Returns [`verified_load`] on this function's namespace.
    pub(crate) fn verified_load(&self, name: &str, jobs: u32) -> GuestFioJob {
        verified_load(name, jobs).option("filename", &self.namespace)
    }

    /// Checks that the server runs, and that the guest's kernel has logged no problem.
    pub(crate) fn expect_healthy(&self) -> Result<(), Failure> {
        self.server().expect_alive()?;
        expect_no_complaints(&self.guest)
    }
}

fn lock(server: &Mutex<Server>) -> MutexGuard<'_, Server> {
    server.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Checks that the guest's kernel has logged no timeouts, aborts or errors of its drive.
pub(crate) fn expect_no_complaints(guest: &Guest) -> Result<(), Failure> {
    let output = guest.check(
        "dmesg | grep -iE '(nvme|blk_|I/O error|EXT4-fs).*(timeout,|timed out|abort|error|fail|invalid|resetting)' \
         || true",
        TIMEOUT,
    )?;
    expect(output.trim().is_empty(), || {
        format!("The guest's kernel complains:\n{output}")
    })
}

/// Returns a fio job that writes and verifies checksums, with a process for each vCPU.
pub(crate) fn verified_load(name: &str, jobs: u32) -> GuestFioJob {
    let share = 32 / jobs;
    GuestFioJob::new(name, "randwrite", "4k", 32)
        .with_verification()
        .option("numjobs", &jobs.to_string())
        .option("size", &format!("{share}m"))
        .option("offset_increment", &format!("{share}m"))
}

/// Runtime of a load that [ends](end_load) when the check has done its part.
pub(crate) const ENDLESS: Duration = Duration::from_secs(600);

/// Waits until a guest runs fio.
pub(crate) fn await_load(guest: &Guest) -> Result<(), Failure> {
    guest.check("until pidof fio > /dev/null; do sleep 0.1; done", TIMEOUT)?;
    Ok(())
}

/// Stops a guest's fio by SIGINT: fio waits for commands in flight, and reports. After an error, fio has already ended.
pub(crate) fn end_load(guest: &Guest) -> Result<(), Failure> {
    guest.check(
        "kill -INT $(pidof fio) || echo fio has ended by itself",
        TIMEOUT,
    )?;
    Ok(())
}

/// Repeats `happened` until it returns true.
pub(crate) fn await_that(
    what: &str,
    mut happened: impl FnMut() -> Result<bool, Failure>,
) -> Result<(), Failure> {
    let deadline = Instant::now() + TIMEOUT;
    while !happened()? {
        expect(Instant::now() < deadline, || {
            format!("Waited {TIMEOUT:?} in vain: {what}")
        })?;
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Waits in the guest until a path exists, or does not exist.
pub(crate) fn await_path(guest: &Guest, path: &str, exists: bool) -> Result<(), Failure> {
    let test = if exists { "-e" } else { "! -e" };
    guest.check(
        &format!(
            "for i in $(seq 1800); do [ {test} {path} ] && exit 0; sleep 0.1; done; \
             echo \"{path}: not as awaited after 180 s\"; exit 1"
        ),
        TIMEOUT,
    )?;
    Ok(())
}

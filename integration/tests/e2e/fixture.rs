//! Tools of a check: provisioned guests, a server to start, a folder of its own.

use std::cell::{Cell, RefCell};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

pub(crate) use integration::checks::{Failure, at, expect};
use integration::guest::fio::Fio;
use integration::guest::{Drive, Guest, GuestConfig};
use integration::progress::say;
use integration::provision::{Assets, KernelChoice};
use integration::server::{self, FunctionOptions, Server};

/// Long enough for anything that ends by itself in a busy guest.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// The drive of most checks.
pub(crate) const DRIVE_MIB: u64 = 256;
/// The guest's name for its only function.
pub(crate) const FUNCTION: &str = "a";

/// State that all checks share.
pub(crate) struct Suite {
    binary: PathBuf,
    v6_1: Assets,
    v6_12: Assets,
}

impl Suite {
    pub(crate) fn provide() -> Result<Self, Failure> {
        let v6_12 = Assets::provide(&KernelChoice::V6_12)?;
        let v6_1 = v6_12.with_kernel(&KernelChoice::V6_1)?;
        Ok(Self {
            binary: server::build()?,
            v6_1,
            v6_12,
        })
    }

    /// Runs `check` in a lab of its own, of which the logs are kept if it fails.
    pub(crate) fn with_lab<T>(
        &self,
        name: &str,
        check: impl FnOnce(&Lab) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let folder = tempfile::Builder::new()
            .prefix("nvme-mpt-e2e-")
            .tempdir()
            .map_err(at(std::env::temp_dir()))?;
        let drives = integration::target_dir()
            .join("e2e")
            .join(name.replace("::", "-"));
        fs::create_dir_all(&drives).map_err(at(&drives))?;
        let lab = Lab {
            suite: self,
            folder: folder.path().to_owned(),
            drives: drives.clone(),
            keep_logs: Cell::new(false),
        };
        let result = check(&lab);
        if result.is_err() || lab.keep_logs.get() {
            say(&format!(
                "        logs and consoles: {}",
                folder.keep().display()
            ));
        }
        fs::remove_dir_all(&drives).map_err(at(&drives))?;
        result
    }
}

/// Possessions of one check.
pub(crate) struct Lab<'a> {
    suite: &'a Suite,
    folder: PathBuf,
    drives: PathBuf,
    keep_logs: Cell<bool>,
}

impl Lab<'_> {
    /// For logs, sockets and the like.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The `nvme-mpt` command.
    pub(crate) fn binary(&self) -> &Path {
        &self.suite.binary
    }

    /// Keeps the logs and consoles for a person to look at.
    pub(crate) fn keep_logs(&self) {
        self.keep_logs.set(true);
    }

    /// Assets with Linux 6.12, Debian 13's kernel.
    pub(crate) fn v6_12(&self) -> &Assets {
        &self.suite.v6_12
    }

    /// Assets with Linux 6.1, Debian 12's kernel.
    pub(crate) fn v6_1(&self) -> &Assets {
        &self.suite.v6_1
    }

    /// A new drive in a file.
    pub(crate) fn drive(&self, name: &str, mib: u64) -> Result<PathBuf, Failure> {
        let path = self.drives.join(name);
        File::create(&path)
            .and_then(|file| file.set_len(mib << 20))
            .map_err(at(&path))?;
        Ok(path)
    }

    /// A function on the whole of a new drive.
    pub(crate) fn function(&self) -> Result<FunctionOptions, Failure> {
        let drive = self.drive("drive.img", DRIVE_MIB)?;
        let range = format!("0+{DRIVE_MIB}M");
        Ok(FunctionOptions::new(
            FUNCTION,
            drive.display().to_string(),
            range,
        ))
    }

    pub(crate) fn serve(&self, functions: &[FunctionOptions]) -> Result<Server, Failure> {
        Ok(Server::start(&self.suite.binary, functions, &self.folder)?)
    }

    pub(crate) fn boot(&self, assets: &Assets, config: &GuestConfig) -> Result<Guest, Failure> {
        Ok(Guest::boot(assets, config, &self.folder)?)
    }

    /// A server with one function, and a guest of Linux 6.12 on it.
    pub(crate) fn bench(&self, vcpus: u32) -> Result<Bench, Failure> {
        self.bench_with(self.v6_12(), self.function()?, vcpus)
    }

    /// A server with one function, and a guest on it.
    pub(crate) fn bench_with(
        &self,
        assets: &Assets,
        function: FunctionOptions,
        vcpus: u32,
    ) -> Result<Bench, Failure> {
        let server = self.serve(&[function])?;
        let config = GuestConfig::new("guest")
            .vcpus(vcpus)
            .drive(Drive::vfio_user(server.socket(FUNCTION)));
        let guest = self.boot(assets, &config)?;
        Ok(Bench {
            guest: Rc::new(guest),
            server: Rc::new(RefCell::new(server)),
            function: FUNCTION.to_owned(),
            controller: "/dev/nvme0".to_owned(),
            namespace: "/dev/nvme0n1".to_owned(),
        })
    }

    /// One server with a function for each of `functions`, and one guest of Linux 6.12 on all of them.
    pub(crate) fn benches(
        &self,
        functions: &[FunctionOptions],
        vcpus: u32,
    ) -> Result<Vec<Bench>, Failure> {
        let server = self.serve(functions)?;
        let mut config = GuestConfig::new("guest").vcpus(vcpus);
        for function in functions {
            let drive = Drive::vfio_user(server.socket(&function.id));
            config = config.drive(drive.id(&function.id));
        }
        let guest = Rc::new(self.boot(self.v6_12(), &config)?);
        let server = Rc::new(RefCell::new(server));
        let bench = |function: &FunctionOptions| {
            // Linux numbers controllers in the order in which its probes end.
            let serial = server.borrow().function_stats(&function.id)?.serial;
            let named = guest.check(
                &format!(
                    "cd /sys/class/nvme && for c in *; do \
                       if grep -q '^{serial}' $c/serial; then echo $c; (cd $c && ls -d nvme*n1); fi; \
                     done"
                ),
                PATIENCE,
            )?;
            let mut names = named.split_whitespace();
            let mut name = || {
                let missing = || Failure::from(format!("Names of serial {serial}: '{named}'"));
                let name = names.next().ok_or_else(missing)?;
                Ok::<_, Failure>(format!("/dev/{name}"))
            };
            Ok(Bench {
                controller: name()?,
                namespace: name()?,
                function: function.id.clone(),
                guest: Rc::clone(&guest),
                server: Rc::clone(&server),
            })
        };
        functions.iter().map(bench).collect()
    }
}

/// One function of a guest, with its server. The guest goes before its server does.
pub(crate) struct Bench {
    pub(crate) guest: Rc<Guest>,
    pub(crate) server: Rc<RefCell<Server>>,
    /// The function's id.
    pub(crate) function: String,
    /// The guest's path of its controller.
    pub(crate) controller: String,
    /// The guest's path of its namespace.
    pub(crate) namespace: String,
}

impl Bench {
    /// [`verified_load`] on this function's namespace.
    pub(crate) fn verified_load(&self, name: &str, jobs: u32) -> Fio {
        verified_load(name, jobs).option("filename", &self.namespace)
    }

    /// Sees that the server lives and that the guest's kernel has nothing to complain of.
    pub(crate) fn expect_well(&self) -> Result<(), Failure> {
        self.server.borrow_mut().expect_alive()?;
        expect_no_complaints(&self.guest)
    }
}

/// Sees that the guest's kernel has said nothing of timeouts, aborts or errors of its drive.
pub(crate) fn expect_no_complaints(guest: &Guest) -> Result<(), Failure> {
    let said = guest.check(
        "dmesg | grep -iE '(nvme|blk_|I/O error|EXT4-fs).*(timeout,|timed out|abort|error|fail|invalid|resetting)' \
         || true",
        PATIENCE,
    )?;
    expect(said.trim().is_empty(), || {
        format!("The guest's kernel complains:\n{said}")
    })
}

/// fio writes and reads back with checksums, as many jobs at once as there are vCPUs.
pub(crate) fn verified_load(name: &str, jobs: u32) -> Fio {
    let share = 32 / jobs;
    Fio::new(name, "randwrite", "4k", 32)
        .verified()
        .option("numjobs", &jobs.to_string())
        .option("size", &format!("{share}m"))
        .option("offset_increment", &format!("{share}m"))
}

/// Waits in the guest until a file is there, or is gone.
pub(crate) fn await_path(guest: &Guest, path: &str, there: bool) -> Result<(), Failure> {
    let test = if there { "-e" } else { "! -e" };
    guest.check(
        &format!(
            "for i in $(seq 400); do [ {test} {path} ] && exit 0; sleep 0.1; done; \
             echo \"{path}: not as awaited after 40 s\"; exit 1"
        ),
        PATIENCE,
    )?;
    Ok(())
}

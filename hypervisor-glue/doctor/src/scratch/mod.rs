//! `nvme-mpt doctor DRIVE --scratch NSID`: overwrites a namespace to test two functions with leases of it.
//!
//! Both functions are in this process. Each has a guest with its own memory, queues and mapped doorbells. Read rates are
//! measured with one queue pair and one poller.

mod guest;
mod pattern;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{self, Read};
use std::num::NonZeroU64;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use nvme_guest::rate_limit::{RateLimit, RateLimits};
use nvme_guest::threads::run_alongside;
use nvme_lease::range::ByteSize;
use nvme_lease::{LeaseError, Ledger, PreviousDataPolicy};
use nvme_mpt::{Drive, PollerPool};
use nvme_mpt_memory::clock::{self, ticks_to_nanoseconds};
use nvme_mpt_vmm::drives::{self, DriveOptions, DrivePath, OpenDriveError};
use nvme_mpt_vmm::open::{self, LeaseLedgers, OpenError};
use nvme_mpt_vmm::options::{FunctionConfig, OptionError};
use nvme_mpt_vmm::report::chain;
use nvme_spec::ids::Nsid;
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use nvme_vfio::bind::{self, BindError};
use nvme_vfio::function::{DiskUser, KernelController, PciAddress, PciFunction, PciFunctionError};
use thiserror::Error;

use self::guest::{
    DEPTH_MAX, GuestWorkload, IO_BYTES, ScratchGuest, ScratchGuestError, build_function,
};
use self::pattern::{HEAD_BYTES, find_signature, io_content};
use super::host::DoctorHost;
use super::report::{CheckOutcome, DoctorCheck};

/// Maximum and minimum size of each of the two leases in bytes.
const LEASE_MAX: u64 = 64 << 20;
const LEASE_MIN: u64 = 1 << 20;

/// Maximum number of bytes that each guest writes and verifies.
const VERIFIED_MAX: u64 = 8 << 20;

/// Number of commands in flight while the test writes and verifies blocks.
const DEPTH: u16 = 32;

/// Range of the IOPS limit that is tested.
const LIMIT_MIN: f64 = 100.0;
const LIMIT_MAX: f64 = 100_000.0;

/// Numbers of in-flight commands in the rate measurements.
const DEPTHS: [u16; 2] = [32, 128];

/// Maximum number of stored read latencies.
const LATENCIES_MAX: usize = 1 << 20;

/// Remedy for failures that indicate a bug.
const REPORT_REMEDY: &str = "file an issue with this report";

/// Allowed relative excess of a rate over its limit.
const TOLERANCE: f64 = 0.02;

/// IOPS per processor core that SPDK has published for its vfio-user target.
const SPDK_PER_CORE: f64 = 4.3e6;

/// Timeout for the host driver's disk to appear, and poll interval.
const DISK_TIMEOUT: Duration = Duration::from_secs(30);
const DISK_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Ids of the two leases.
const IDS: [&str; 2] = ["doctor-1", "doctor-2"];

/// Errors of testing a namespace.
#[derive(Debug, Error)]
pub enum ScratchError {
    /// The operator did not allow erasing the namespace.
    #[error("Not confirmed: nothing was written")]
    NotConfirmed,
    /// The drive is in use.
    #[error("{drive} is in use: {}; end that first", users.iter().map(DiskUser::to_string).collect::<Vec<_>>().join(", "))]
    InUse {
        /// The drive.
        drive: String,
        /// Its users.
        users: Vec<DiskUser>,
    },
    /// The host's driver shows no such namespace.
    #[error(
        "The host's driver shows no namespace {nsid} of {drive} with blocks of 512 or 4096 bytes"
    )]
    NoNamespace {
        /// The drive.
        drive: String,
        /// The namespace.
        nsid: u32,
    },
    /// The namespace is too small for two leases.
    #[error("Namespace {nsid} of {drive} has fewer than {} bytes", 2 * LEASE_MIN)]
    TooSmall {
        /// The drive.
        drive: String,
        /// The namespace.
        nsid: u32,
    },
    /// A file cannot be read.
    #[error("Cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Kernel's error.
        source: io::Error,
    },
    /// The host does not show the PCI function.
    #[error(transparent)]
    Function(#[from] PciFunctionError),
    /// The drive cannot be bound.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The drive cannot be opened.
    #[error(transparent)]
    Drive(#[from] OpenDriveError),
    /// The options of the leases are invalid.
    #[error(transparent)]
    Options(#[from] OptionError),
    /// A lease cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A guest failed.
    #[error("A test guest of {drive} failed")]
    Guest {
        /// The drive.
        drive: String,
        /// Cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// Namespace that the test erases, as the operator is shown it before the operator agrees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScratchNamespace {
    /// The drive.
    pub drive: String,
    /// The namespace.
    pub nsid: u32,
    /// Word that the operator types to confirm: the drive's serial number, or its path if it has none.
    pub confirmation_word: String,
    /// Signature of previous data on the namespace, if there is one.
    pub previous_use: Option<&'static str>,
}

/// Asks the operator whether a namespace may be erased.
pub type ErasureConsent<'a> = dyn FnMut(&ScratchNamespace) -> bool + 'a;

/// IOPS and latencies of reads.
#[derive(Clone, Copy, Debug)]
struct ReadMeasurements {
    /// Reads with one command in flight.
    reads: u64,
    /// Median latency with one command in flight, in nanoseconds; `p99` is the 99th percentile.
    p50: u64,
    p99: u64,
    /// Reads with 32 and with 128 commands in flight.
    by_depth: [ReadRate; 2],
}

/// Rate of reads through one poller.
#[derive(Clone, Copy, Debug)]
struct ReadRate {
    iops: f64,
    /// Number of reads divided by the poller's busy time in seconds; `None` if the poller reported no busy time.
    per_core: Option<f64>,
}

/// Access to the namespace through one driver.
struct NamespaceAccess<'a> {
    host: &'a DoctorHost,
    path: DrivePath,
    /// Namespace identifier on the drive at this path. A block device is a single namespace, so its identifier is always 1.
    nsid: u32,
    /// Duration of each measurement.
    time: Duration,
}

/// Tests a namespace, after the operator has allowed erasing it (`consent`). Each measurement takes `time`.
///
/// If the host's NVMe driver has the drive, the reads are also measured through this driver. The drive is bound to
/// `vfio-pci` for the test, and afterwards to the host's driver again.
///
/// # Errors
/// See [`ScratchError`]. After an error, the drive is bound to the host's driver again, too.
pub fn test_namespace(
    host: &DoctorHost,
    path: &DrivePath,
    nsid: u32,
    time: Duration,
    consent: &mut ErasureConsent<'_>,
) -> Result<Vec<DoctorCheck>, ScratchError> {
    let way = NamespaceAccess {
        host,
        path: path.clone(),
        nsid,
        time,
    };
    let DrivePath::Pci(address) = *path else {
        let (mut checks, _) = way.run_checks(Some(consent))?;
        checks.push(DoctorCheck::not_checked(
            "scratch.host_driver",
            "the host's own driver does not have the drive",
        ));
        return Ok(checks);
    };
    let function = PciFunction::find(&host.root, address)?;
    let Some(controller) = &function.controller else {
        let (mut checks, _) = way.run_checks(Some(consent))?;
        checks.push(
            DoctorCheck::not_checked(
                "scratch.host_driver",
                "the host's own driver does not have the drive",
            )
            .with_remedy(format!(
                "nvme-mpt unbind {address}, and the same command again"
            )),
        );
        return Ok(checks);
    };
    let users = controller.users(&host.root)?;
    if !users.is_empty() {
        let drive = path.to_string();
        return Err(ScratchError::InUse { drive, users });
    }
    let disk = find_disk(host, controller, nsid).ok_or_else(|| way.no_namespace())?;
    let subject = ScratchNamespace {
        drive: path.to_string(),
        nsid,
        confirmation_word: controller.serial.clone(),
        previous_use: find_signature(&read_disk_head(&disk)?),
    };
    if !consent(&subject) {
        return Err(ScratchError::NotConfirmed);
    }
    bind::bind(&host.root, address, false)?;
    let tried = way.run_checks(None);
    let given_back = bind::unbind(&host.root, address);
    if let (Err(_), Err(error)) = (&tried, &given_back) {
        log::error!("Cannot give {address} back to its driver: {}", chain(error));
    }
    let (mut checks, figures) = tried?;
    match given_back {
        Ok(bound) => {
            // The reads through the host's driver find the blocks that the test has written, as the measurements before
            // did.
            checks.push(compare_drivers(way.measure_by_host(address), &figures));
            checks.push(DoctorCheck::ok("scratch.given_back", bound.to_string()));
        }
        Err(error) => checks.push(
            DoctorCheck::new("scratch.given_back", CheckOutcome::Problem, chain(&error))
                .with_remedy(format!("nvme-mpt unbind {address}")),
        ),
    }
    Ok(checks)
}

/// Returns the host driver's block device of a namespace.
fn find_disk(host: &DoctorHost, controller: &KernelController, nsid: u32) -> Option<PathBuf> {
    let mut namespaces = controller.namespaces.iter();
    let namespace = namespaces.find(|namespace| namespace.nsid == nsid)?;
    Some(host.root.dev.join(&namespace.disk))
}

/// Reads the start of a file.
fn read_disk_head(path: &PathBuf) -> Result<Vec<u8>, ScratchError> {
    let mut head = Vec::new();
    let read = File::open(path).and_then(|file| {
        let mut file = file.take(HEAD_BYTES as u64);
        file.read_to_end(&mut head)
    });
    match read {
        Ok(_) => Ok(head),
        Err(source) => Err(ScratchError::Read {
            path: path.clone(),
            source,
        }),
    }
}

/// Compares read rates and latencies of a function (`own`) with those of the host's block device (`by_host`).
fn compare_drivers(
    by_host: Result<ReadMeasurements, ScratchError>,
    own: &ReadMeasurements,
) -> DoctorCheck {
    const NAME: &str = "scratch.host_driver";
    let theirs = match by_host {
        Ok(figures) => figures,
        Err(error) => return DoctorCheck::not_checked(NAME, chain(&error)),
    };
    let times = |own: f64, theirs: f64| own / theirs.max(f64::MIN_POSITIVE);
    let cores: Vec<String> = own
        .by_depth
        .iter()
        .zip(&theirs.by_depth)
        .map(|(own, theirs)| match (own.per_core, theirs.per_core) {
            (Some(own), Some(theirs)) => format!("{:.2}", times(own, theirs)),
            _ => "unknown".to_owned(),
        })
        .collect();
    DoctorCheck::ok(
        NAME,
        format!(
            "a function on the host's block device (io_uring): p50 {:.1} us, p99 {:.1} us, {} and {} IOPS per core; by \
             VFIO, p50 is {:.2} times that, and IOPS per core {} times",
            theirs.p50 as f64 / 1e3,
            theirs.p99 as f64 / 1e3,
            theirs.by_depth[0].format_per_core(),
            theirs.by_depth[1].format_per_core(),
            times(own.p50 as f64, theirs.p50 as f64),
            cores.join(" and ")
        ),
    )
}

impl NamespaceAccess<'_> {
    fn no_namespace(&self) -> ScratchError {
        ScratchError::NoNamespace {
            drive: self.path.to_string(),
            nsid: self.nsid,
        }
    }

    /// Measures the namespace through the host's NVMe driver, after waiting for its block device.
    fn measure_by_host(&self, address: PciAddress) -> Result<ReadMeasurements, ScratchError> {
        let root = &self.host.root;
        let deadline = clock::monotonic() + DISK_TIMEOUT;
        let disk = loop {
            let function = PciFunction::find(root, address)?;
            let controller = function.controller.as_ref();
            let disk = controller.and_then(|it| find_disk(self.host, it, self.nsid));
            match disk {
                Some(disk) if disk.exists() => break disk,
                _ if clock::monotonic() > deadline => return Err(self.no_namespace()),
                _ => clock::sleep(DISK_POLL_INTERVAL),
            }
        };
        let way = NamespaceAccess {
            host: self.host,
            path: DrivePath::File(disk),
            nsid: 1,
            time: self.time,
        };
        way.measure()
    }

    fn guest_error(&self, source: impl std::error::Error + Send + Sync + 'static) -> ScratchError {
        ScratchError::Guest {
            drive: self.path.to_string(),
            source: Box::new(source),
        }
    }

    fn open_drive(&self) -> Result<ScratchDrive<'_>, ScratchError> {
        let options = DriveOptions {
            namespace: Some(Nsid(self.nsid)),
            ..DriveOptions::default()
        };
        let pollers = PollerPool::new();
        let drive = drives::open_with_threads(&self.path, options, pollers.threads())?;
        let bytes = drive.blocks() << drive.lba_shift();
        let lease = (bytes / 2).min(LEASE_MAX) / LEASE_MIN * LEASE_MIN;
        if lease == 0 {
            return Err(ScratchError::TooSmall {
                drive: self.path.to_string(),
                nsid: self.nsid,
            });
        }
        Ok(ScratchDrive {
            access: self,
            ledgers: LeaseLedgers::open(&self.host.state_dir),
            drive,
            pollers,
            lease,
        })
    }

    /// Measures reads of the namespace without writing to it.
    fn measure(&self) -> Result<ReadMeasurements, ScratchError> {
        let bench = self.open_drive()?;
        let mut guest = bench.start_guest(0)?;
        let figures = bench.measure(&mut guest)?;
        guest.end().map_err(|error| self.guest_error(error))?;
        bench.forget_data();
        Ok(figures)
    }

    /// Runs all checks. `consent` is `None` if the operator has already allowed erasing the namespace.
    fn run_checks(
        &self,
        consent: Option<&mut ErasureConsent<'_>>,
    ) -> Result<(Vec<DoctorCheck>, ReadMeasurements), ScratchError> {
        let bench = self.open_drive()?;
        let tried = bench.run_checks(consent);
        bench.forget_data();
        tried
    }
}

/// A drive with room for the two leases.
struct ScratchDrive<'a> {
    access: &'a NamespaceAccess<'a>,
    drive: Arc<Drive>,
    ledgers: LeaseLedgers,
    pollers: Arc<PollerPool>,
    /// Size of each lease in bytes.
    lease: u64,
}

impl ScratchDrive<'_> {
    fn guest_error(&self, source: impl std::error::Error + Send + Sync + 'static) -> ScratchError {
        self.access.guest_error(source)
    }

    /// Attaches a function to the lease of a guest: `which` is the index in [`IDS`].
    fn attach_function(&self, which: usize) -> Result<vmm_device::NvmeFunction, ScratchError> {
        let start = which as u64 * self.lease;
        let config = FunctionConfig::from_keys(|key| match key {
            "path" => Some(self.access.path.to_string()),
            "range" => Some(format!("{start}+{}", self.lease)),
            "lease" => Some(IDS[which].to_owned()),
            // Only physical drives may have several namespaces.
            "namespace" if matches!(self.access.path, DrivePath::Pci(_)) => {
                Some(self.access.nsid.to_string())
            }
            "doorbells" => Some("mapped".to_owned()),
            "queues" => Some("1".to_owned()),
            _ => None,
        })?;
        let (drive, ledgers, pollers) = (&self.drive, &self.ledgers, &self.pollers);
        let stop = AtomicBool::new(false);
        let local_backend = open::attach(&config.options()?, drive, ledgers, pollers, &stop)?;
        Ok(build_function(local_backend))
    }

    fn start_guest(&self, which: usize) -> Result<ScratchGuest, ScratchError> {
        let function = self.attach_function(which)?;
        let guest = ScratchGuest::start(IDS[which], function, self.drive.lba_shift());
        guest.map_err(|error| self.guest_error(error))
    }

    /// Marks the data of both lease ids as not secret, so that no later lease has to wipe this data.
    fn forget_data(&self) {
        if self.drive.is_private() {
            return;
        }
        let ledger = Ledger::open(&self.access.host.state_dir);
        for id in IDS {
            match ledger.decide_data(id, PreviousDataPolicy::Kept) {
                Ok(_) | Err(LeaseError::NoData { .. }) => {}
                Err(error) => log::warn!("Cannot release lease {id}: {}", chain(&error)),
            }
        }
    }

    /// Returns the number of blocks per I/O.
    fn io_blocks(&self) -> u64 {
        IO_BYTES as u64 >> self.drive.lba_shift()
    }

    /// Returns the number of I/Os that a guest writes and verifies.
    fn verified_ios(&self) -> u64 {
        self.lease.min(VERIFIED_MAX) / IO_BYTES as u64
    }

    fn run_checks(
        &self,
        consent: Option<&mut ErasureConsent<'_>>,
    ) -> Result<(Vec<DoctorCheck>, ReadMeasurements), ScratchError> {
        let mut one = self.start_guest(0)?;
        if let Some(consent) = consent {
            let subject = ScratchNamespace {
                drive: self.access.path.to_string(),
                nsid: self.access.nsid,
                confirmation_word: self.confirmation_word(),
                previous_use: find_signature(&self.read_head(&mut one)?),
            };
            if !consent(&subject) {
                return Err(ScratchError::NotConfirmed);
            }
        }
        let mut two = self.start_guest(1)?;
        let mut checks = vec![
            self.sharing(&mut one, &mut two)?,
            self.isolation(&mut one, &mut two)?,
            self.reset(&mut one)?,
        ];
        let (mut one, upgraded) = self.upgrade(one)?;
        checks.push(upgraded);
        let figures = self.measure(&mut one)?;
        checks.push(self.limits(&mut one, figures.by_depth[0].iops)?);
        checks.extend(to_checks(&figures));
        checks.push(self.neighbour(&mut two)?);
        for guest in [one, two] {
            guest.end().map_err(|error| self.guest_error(error))?;
        }
        Ok((checks, figures))
    }

    /// Returns the confirmation word: the serial number at the end of a physical drive's name, else the path.
    fn confirmation_word(&self) -> String {
        match self.access.path {
            DrivePath::Pci(_) => {
                let name = self.drive.identity().name;
                name.rsplit(':').next().unwrap_or(name).to_owned()
            }
            _ => self.access.path.to_string(),
        }
    }

    /// Reads the start of the first lease.
    fn read_head(&self, guest: &mut ScratchGuest) -> Result<Vec<u8>, ScratchError> {
        let mut head = Vec::with_capacity(HEAD_BYTES);
        for index in 0..(HEAD_BYTES / IO_BYTES) as u64 {
            let status = guest.execute(NvmOpcode::READ, index * self.io_blocks());
            match status.map_err(|error| self.guest_error(error))? {
                Status::SUCCESS => head.extend(guest.data(0)),
                status => {
                    let command = "Read";
                    return Err(self.guest_error(ScratchGuestError::Failed { command, status }));
                }
            }
        }
        Ok(head)
    }

    /// Writes or reads all I/Os that a guest verifies.
    fn run_pass(
        &self,
        guest: &mut ScratchGuest,
        opcode: NvmOpcode,
        which: u8,
        round: u8,
    ) -> Result<PatternPass, ScratchError> {
        let mut pass = PatternPass {
            opcode,
            guest: which,
            round,
            blocks: self.io_blocks(),
            places: 0..self.verified_ios(),
            inflight: [0; DEPTH_MAX as usize],
            mismatches: 0,
            failed: None,
        };
        guest
            .run(DEPTH, &mut pass)
            .map_err(|error| self.guest_error(error))?;
        Ok(pass)
    }

    /// Writes the contents of one round, and reads them again.
    fn write_and_verify(
        &self,
        guest: &mut ScratchGuest,
        which: u8,
        round: u8,
    ) -> Result<Option<String>, ScratchError> {
        let written = self.run_pass(guest, NvmOpcode::WRITE, which, round)?;
        let read = self.run_pass(guest, NvmOpcode::READ, which, round)?;
        Ok(written.failure().or(read.failure()))
    }

    /// Lets both guests write and verify concurrently.
    fn sharing(
        &self,
        one: &mut ScratchGuest,
        two: &mut ScratchGuest,
    ) -> Result<DoctorCheck, ScratchError> {
        const NAME: &str = "scratch.sharing";
        let mut other = Ok(None);
        let own = run_alongside(
            "doctor-guest",
            || other = self.write_and_verify(two, 2, 0),
            || self.write_and_verify(one, 1, 0),
        );
        let own = own.map_err(|error| self.guest_error(error))??;
        Ok(match own.or(other?) {
            None => DoctorCheck::ok(
                NAME,
                format!(
                    "two functions at once each wrote and verified {} of a lease of {}",
                    ByteSize(self.verified_ios() * IO_BYTES as u64),
                    ByteSize(self.lease)
                ),
            ),
            Some(complaint) => {
                DoctorCheck::new(NAME, CheckOutcome::Problem, complaint).with_remedy(REPORT_REMEDY)
            }
        })
    }

    /// Makes a guest access blocks beyond its lease. All these commands must fail.
    fn isolation(
        &self,
        one: &mut ScratchGuest,
        two: &mut ScratchGuest,
    ) -> Result<DoctorCheck, ScratchError> {
        const NAME: &str = "scratch.isolation";
        let end = self.lease >> self.drive.lba_shift();
        let mut places = vec![end, u64::MAX - self.io_blocks()];
        if self.io_blocks() > 1 {
            // An I/O across the end of the lease.
            places.push(end - 1);
        }
        one.fill_data(0, &io_content(1, u8::MAX, 0));
        for block in &places {
            for (opcode, name) in [(NvmOpcode::READ, "Read"), (NvmOpcode::WRITE, "Write")] {
                let status = one.execute(opcode, *block);
                let status = status.map_err(|error| self.guest_error(error))?;
                if status.code() != Status::LBA_OUT_OF_RANGE.code() {
                    let finding = format!(
                        "{name} at block {block} of a lease of {end} blocks ended with {status}"
                    );
                    return Ok(DoctorCheck::new(NAME, CheckOutcome::Problem, finding)
                        .with_remedy(REPORT_REMEDY));
                }
            }
        }
        let neighbour = self.run_pass(two, NvmOpcode::READ, 2, 0)?;
        Ok(match neighbour.failure() {
            None => DoctorCheck::ok(
                NAME,
                format!(
                    "{} commands beyond a lease ended with LBA Out of Range; the neighbour's blocks are unchanged",
                    2 * places.len()
                ),
            ),
            Some(complaint) => DoctorCheck::new(
                NAME,
                CheckOutcome::Problem,
                format!("the neighbour's blocks changed: {complaint}"),
            )
            .with_remedy(REPORT_REMEDY),
        })
    }

    /// Resets a controller with writes in flight. They repeat the present content. So the content is known, even if some
    /// writes are not executed.
    fn reset(&self, guest: &mut ScratchGuest) -> Result<DoctorCheck, ScratchError> {
        const NAME: &str = "scratch.reset";
        let commands: Vec<Sqe> = (0..DEPTH)
            .map(|slot| {
                guest.fill_data(slot, &io_content(1, 0, slot.into()));
                guest.build_command(NvmOpcode::WRITE, slot, u64::from(slot) * self.io_blocks())
            })
            .collect();
        guest.submit(&commands);
        let started = clock::monotonic();
        guest.reset().map_err(|error| self.guest_error(error))?;
        let took = clock::monotonic() - started;
        Ok(
            match self.run_pass(guest, NvmOpcode::READ, 1, 0)?.failure() {
                None => DoctorCheck::ok(
                    NAME,
                    format!(
                        "a controller with {DEPTH} writes in flight was ready again after {:.1} ms; all blocks verified",
                        took.as_secs_f64() * 1e3
                    ),
                ),
                Some(complaint) => DoctorCheck::new(NAME, CheckOutcome::Problem, complaint)
                    .with_remedy(REPORT_REMEDY),
            },
        )
    }

    /// Saves a function, ends it, and restores its state into a new function.
    fn upgrade(&self, guest: ScratchGuest) -> Result<(ScratchGuest, DoctorCheck), ScratchError> {
        const NAME: &str = "scratch.upgrade";
        let suspended = match guest.suspend() {
            Ok(suspended) => suspended,
            Err(error) => {
                let check = DoctorCheck::new(NAME, CheckOutcome::Problem, chain(&error))
                    .with_remedy(REPORT_REMEDY);
                return Ok((self.start_guest(0)?, check));
            }
        };
        let bytes = suspended.state_bytes();
        let gone_on = suspended.resume(self.attach_function(0)?);
        let mut guest = gone_on.map_err(|error| self.guest_error(error))?;
        let before = self.run_pass(&mut guest, NvmOpcode::READ, 1, 0)?;
        let complaint = match before.failure() {
            None => self.write_and_verify(&mut guest, 1, 1)?,
            some => some,
        };
        let check = match complaint {
            None => DoctorCheck::ok(
                NAME,
                format!(
                    "the next function restored the state ({bytes} bytes); the same queues continued"
                ),
            ),
            Some(complaint) => {
                DoctorCheck::new(NAME, CheckOutcome::Problem, complaint).with_remedy(REPORT_REMEDY)
            }
        };
        Ok((guest, check))
    }

    /// Verifies, after all other checks, that the second lease is unchanged.
    fn neighbour(&self, two: &mut ScratchGuest) -> Result<DoctorCheck, ScratchError> {
        const NAME: &str = "scratch.neighbour";
        Ok(match self.run_pass(two, NvmOpcode::READ, 2, 0)?.failure() {
            None => DoctorCheck::ok(NAME, "the second lease was not changed by these checks"),
            Some(complaint) => {
                DoctorCheck::new(NAME, CheckOutcome::Problem, complaint).with_remedy(REPORT_REMEDY)
            }
        })
    }

    /// Returns the busy time of the pollers in seconds.
    fn busy_seconds(&self) -> f64 {
        let stats = self.pollers.stats();
        stats.iter().map(|poller| poller.busy_seconds).sum()
    }

    /// Measures random reads for [`time`](NamespaceAccess::time).
    fn measure_reads(
        &self,
        guest: &mut ScratchGuest,
        depth: u16,
    ) -> Result<(RandomReads, ReadRate), ScratchError> {
        let time = self.access.time;
        let mut reads = RandomReads {
            blocks: self.io_blocks(),
            places: self.verified_ios(),
            state: 1,
            until: clock::monotonic() + time,
            latencies: Vec::new(),
            done: 0,
            failed: None,
        };
        let busy = self.busy_seconds();
        let started = clock::monotonic();
        guest
            .run(depth, &mut reads)
            .map_err(|error| self.guest_error(error))?;
        let took = (clock::monotonic() - started).as_secs_f64();
        let busy = self.busy_seconds() - busy;
        if let Some(status) = reads.failed {
            let command = "Read";
            return Err(self.guest_error(ScratchGuestError::Failed { command, status }));
        }
        let done = reads.done as f64;
        let rate = ReadRate {
            iops: done / took.max(f64::MIN_POSITIVE),
            per_core: (busy > 0.0).then(|| done / busy),
        };
        Ok((reads, rate))
    }

    fn measure(&self, guest: &mut ScratchGuest) -> Result<ReadMeasurements, ScratchError> {
        let (mut alone, _) = self.measure_reads(guest, 1)?;
        alone.latencies.sort_unstable();
        let quantile = |share: f64| {
            let at = (alone.latencies.len() as f64 * share) as usize;
            let last = alone.latencies.len().saturating_sub(1);
            ticks_to_nanoseconds(alone.latencies.get(at.min(last)).copied().unwrap_or(0))
        };
        Ok(ReadMeasurements {
            reads: alone.done,
            p50: quantile(0.5),
            p99: quantile(0.99),
            by_depth: [
                self.measure_reads(guest, DEPTHS[0])?.1,
                self.measure_reads(guest, DEPTHS[1])?.1,
            ],
        })
    }

    /// Limits a lease to half of the measured rate, and measures whether the limit holds.
    fn limits(&self, guest: &mut ScratchGuest, reached: f64) -> Result<DoctorCheck, ScratchError> {
        const NAME: &str = "scratch.limits";
        let limit = (reached / 2.0).clamp(LIMIT_MIN, LIMIT_MAX) as u64;
        let per_second = NonZeroU64::new(limit).unwrap_or(NonZeroU64::MIN);
        guest.set_rates(RateLimits {
            iops: Some(RateLimit {
                per_second,
                burst: None,
            }),
            ..RateLimits::default()
        });
        let (_, rate) = self.measure_reads(guest, DEPTHS[0])?;
        guest.set_rates(RateLimits::default());
        let difference = rate.iops / limit as f64 - 1.0;
        let finding = format!(
            "{:.0} IOPS under iops={limit}: {:+.1} %",
            rate.iops,
            difference * 100.0
        );
        // An initial burst, and the commands in flight, may exceed the limit once.
        let at_once = limit as f64 / 100.0 + f64::from(DEPTHS[0]);
        let most = TOLERANCE + at_once / (limit as f64 * self.access.time.as_secs_f64());
        Ok(match difference {
            difference if difference > most => {
                DoctorCheck::new(NAME, CheckOutcome::Problem, finding).with_remedy(REPORT_REMEDY)
            }
            difference if difference < -TOLERANCE => {
                DoctorCheck::new(NAME, CheckOutcome::Warning, finding).with_remedy(
                    "repeat it on an idle machine: the lease got less than it may have",
                )
            }
            _ => DoctorCheck::ok(NAME, finding),
        })
    }
}

/// Sequential writes or reads of known contents.
struct PatternPass {
    opcode: NvmOpcode,
    guest: u8,
    round: u8,
    blocks: u64,
    places: Range<u64>,
    /// I/O index of each slot's command.
    inflight: [u64; DEPTH_MAX as usize],
    /// Number of I/Os that read wrong content.
    mismatches: u64,
    failed: Option<Status>,
}

impl PatternPass {
    fn failure(&self) -> Option<String> {
        let verb = match self.opcode {
            NvmOpcode::WRITE => "written",
            _ => "read",
        };
        match (self.failed, self.mismatches) {
            (Some(status), _) => Some(format!("a block could not be {verb}: {status}")),
            (None, 0) => None,
            (None, wrong) => Some(format!(
                "{wrong} I/Os returned other bytes than were written"
            )),
        }
    }
}

impl GuestWorkload for PatternPass {
    fn next(&mut self, guest: &ScratchGuest, slot: u16) -> Option<Sqe> {
        let place = self.places.next()?;
        self.inflight[usize::from(slot)] = place;
        if self.opcode == NvmOpcode::WRITE {
            guest.fill_data(slot, &io_content(self.guest, self.round, place));
        }
        Some(guest.build_command(self.opcode, slot, place * self.blocks))
    }

    fn on_completion(&mut self, guest: &ScratchGuest, slot: u16, status: Status, _: u64) {
        if status != Status::SUCCESS {
            self.failed = Some(status);
            return;
        }
        let place = self.inflight[usize::from(slot)];
        let expected = io_content(self.guest, self.round, place);
        let is_read = self.opcode == NvmOpcode::READ;
        self.mismatches += u64::from(is_read && guest.data(slot) != expected);
    }
}

/// Random reads for a given time.
struct RandomReads {
    blocks: u64,
    places: u64,
    /// State of the random number generator.
    state: u64,
    until: Duration,
    /// Latencies of the first reads, in ticks.
    latencies: Vec<u64>,
    done: u64,
    failed: Option<Status>,
}

impl GuestWorkload for RandomReads {
    fn next(&mut self, guest: &ScratchGuest, slot: u16) -> Option<Sqe> {
        if clock::monotonic() >= self.until {
            return None;
        }
        // Linear congruential generator of Numerical Recipes. Only its upper bits are random enough.
        self.state = self
            .state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let place = (self.state >> 33) % self.places;
        Some(guest.build_command(NvmOpcode::READ, slot, place * self.blocks))
    }

    fn on_completion(&mut self, _: &ScratchGuest, _: u16, status: Status, took: u64) {
        self.done += 1;
        if self.latencies.len() < LATENCIES_MAX {
            self.latencies.push(took);
        }
        if status != Status::SUCCESS {
            self.failed = Some(status);
        }
    }
}

impl ReadRate {
    /// Formats the rate per core.
    fn format_per_core(&self) -> String {
        self.per_core
            .map_or("unknown".to_owned(), |rate| format!("{rate:.0}"))
    }
}

/// Converts measurements into checks.
fn to_checks(figures: &ReadMeasurements) -> Vec<DoctorCheck> {
    let ReadMeasurements {
        reads,
        p50,
        p99,
        by_depth: deep,
    } = figures;
    let mut checks = vec![DoctorCheck::ok(
        "scratch.latency",
        format!(
            "p50 {:.1} us, p99 {:.1} us: {reads} random reads of 4 KiB, one at a time",
            *p50 as f64 / 1e3,
            *p99 as f64 / 1e3
        ),
    )];
    for (depth, rate) in DEPTHS.iter().zip(deep) {
        let share = rate.per_core.map_or(String::new(), |per_core| {
            format!(
                " ({:.1} % of the {:.1} million that SPDK published for vfio-user)",
                per_core / SPDK_PER_CORE * 100.0,
                SPDK_PER_CORE / 1e6
            )
        });
        checks.push(DoctorCheck::ok(
            format!("scratch.iops_{depth}"),
            format!(
                "{:.0} IOPS with {depth} in flight, {} per poller core{share}",
                rate.iops,
                rate.format_per_core(),
            ),
        ));
    }
    checks
}

//! Labs of groups of checks. A lab is booted for the first check of a group, and again after a guest was lost.

use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;

use integration::checks::FULL;
use integration::guest::{self, LOST_GUEST_LINE, LOST_STATUS};
use integration::lab::options;
use integration::lab::{EchoedOutput, Lab, LabConfig, LabDrive};
use integration::progress::print_line;
use integration::provision::KernelChoice;
use integration::provision::lab::LabAssets;
use integration::vmms::cloud_hypervisor;
use tempfile::TempDir;

use crate::ExpectedRefusals;
use crate::fixture::{Failure, LOGS, expect, with_path};

/// Timeout of a check on a busy machine.
const CHECK_TIMEOUT: Duration = Duration::from_secs(1800);
/// Timeout of collecting the logs.
const LOGS_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum number of labs for a check whose guests are lost.
const ATTEMPTS: u32 = 8;
/// Largest log file that is fetched. Larger files are images of drives or memory, which take minutes to fetch.
const LOG_KIB_MAX: u64 = 4096;

/// Programs and assets of every lab.
pub(crate) struct Suite {
    assets: LabAssets,
    programs: Vec<PathBuf>,
    /// Path of this program inside a lab.
    itself: String,
}

/// Returns the suite, which is provided once.
pub(crate) fn suite() -> Result<&'static Suite, Failure> {
    static SUITE: LazyLock<Result<Suite, String>> = LazyLock::new(|| {
        let cause = |failure: Failure| integration::error_chain(&*failure);
        Suite::provide().map_err(cause)
    });
    Ok(SUITE.as_ref().map_err(String::as_str)?)
}

/// Environment variable with the path of a kernel image for the labs, in place of Debian 13's kernel. Beside what
/// [`KernelChoice::Image`] asks for, the image must have virtio over PCI (disks, console), an Intel IOMMU, VFIO, and KVM for AMD
/// built in.
const KERNEL_VARIABLE: &str = "LAB_KERNEL";

/// Returns the kernel of the labs.
fn kernel() -> Result<KernelChoice, Failure> {
    match std::env::var(KERNEL_VARIABLE) {
        Ok(path) => Ok(path.parse()?),
        Err(_) => Ok(KernelChoice::V6_12),
    }
}

impl Suite {
    fn provide() -> Result<Self, Failure> {
        let itself = std::env::current_exe().map_err(with_path("this program"))?;
        let name = itself.file_name().unwrap_or_default().to_string_lossy();
        let inside = format!("/lab/run/bin/{name}");
        let mut programs = options::build()?;
        programs.extend(cloud_hypervisor::existing_path());
        programs.push(itself);
        Ok(Self {
            assets: LabAssets::provide(&kernel()?)?,
            programs,
            itself: inside,
        })
    }

    fn boot(&self, config: LabConfig, dir: &Path) -> Result<Lab, Failure> {
        let config = self.programs.iter().fold(config, LabConfig::with_file);
        Ok(Lab::boot(&self.assets, &config, dir)?)
    }

    /// Returns the path of this program inside a lab.
    pub(crate) fn program_path(&self) -> &str {
        &self.itself
    }

    /// Boots a lab for `work`. Its logs are kept after a failure.
    pub(crate) fn with_lab<T>(
        &self,
        drives: Vec<LabDrive>,
        work: impl FnOnce(Lab) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        self.with_lab_of(with_drives(drives), work)
    }

    /// Like [`Self::with_lab`], with another configuration.
    pub(crate) fn with_lab_of<T>(
        &self,
        config: LabConfig,
        work: impl FnOnce(Lab) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let dir = temporary("nvme-mpt-lab-")?;
        let result = self.boot(config, dir.path()).and_then(work);
        if result.is_err() {
            keep_dir(dir);
        }
        result
    }
}

fn with_drives(drives: Vec<LabDrive>) -> LabConfig {
    drives.into_iter().fold(LabConfig::new(), LabConfig::drive)
}

fn temporary(prefix: &str) -> Result<TempDir, Failure> {
    let dir = tempfile::Builder::new().prefix(prefix).tempdir();
    dir.map_err(with_path(std::env::temp_dir()))
}

fn keep_dir(dir: TempDir) {
    print_line(&format!(
        "        console and logs: {}",
        dir.keep().display()
    ));
}

/// Prints the cause of a failure without the console output.
fn print_cause(failure: &(dyn std::error::Error + Send + Sync)) {
    let text = integration::error_chain(failure);
    print_line(&format!(
        "        {}",
        text.lines().next().unwrap_or_default()
    ));
}

/// The lab of a group.
pub(crate) struct GroupLab {
    drives: fn() -> Vec<LabDrive>,
    attempts: u32,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The running lab, with the directory of its console.
    lab: Option<(Lab, TempDir)>,
    /// Error of a failed boot, after which no further lab is booted.
    broken: Option<String>,
    /// True if a check has failed in the lab.
    failed: bool,
    /// Number of DMA accesses that the IOMMUs of all labs have refused so far.
    refusals: u64,
}

impl GroupLab {
    /// Creates a group lab, which is booted later.
    pub(crate) fn new(drives: fn() -> Vec<LabDrive>, once: bool) -> Self {
        Self {
            drives,
            attempts: if once { 1 } else { ATTEMPTS },
            state: Mutex::default(),
        }
    }

    /// Runs a check, and repeats it in new labs while its guest is lost.
    pub(crate) fn check(&self, name: &str) -> Result<(), Failure> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut attempt = 1;
        loop {
            let failure = match state.run(self.drives, name) {
                Err(failure) if guest::is_lost(&*failure) => failure,
                result => return result,
            };
            // The drives are in an unknown state, so the lab is discarded.
            if let Err(failure) = state.end_lab() {
                print_cause(&*failure);
            }
            if attempt == self.attempts {
                return Err(failure);
            }
            print_cause(&*failure);
            print_line(&format!(
                "        {name}: {LOST_GUEST_LINE}, in another lab"
            ));
            attempt += 1;
        }
    }

    /// Ends the lab and checks the number of refused accesses.
    pub(crate) fn end(&self, refused: ExpectedRefusals) -> Result<(), Failure> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.end_lab()?;
        refused.expect(state.refusals)
    }
}

impl State {
    /// Runs a check in the running lab, or in a new lab.
    fn run(&mut self, drives: fn() -> Vec<LabDrive>, name: &str) -> Result<(), Failure> {
        let suite = suite()?;
        if let Some(broken) = &self.broken {
            return Err(broken.as_str().into());
        }
        let (lab, dir) = match self.lab.take() {
            Some(running) => running,
            None => self.boot(suite, drives)?,
        };
        let full = match std::env::var_os(FULL) {
            Some(_) => format!("{FULL}=1 "),
            None => String::new(),
        };
        let assignments = full + &cloud_hypervisor::assignment();
        let command = format!("{assignments}{} {name}", suite.itself);
        let mut output = EchoedOutput::default();
        match lab.stream(&command, CHECK_TIMEOUT, &mut output) {
            Ok(status) => {
                self.lab = Some((lab, dir));
                self.failed |= status != 0;
                match status {
                    0 => Ok(()),
                    lost if lost == i32::from(LOST_STATUS) => {
                        Err("In the lab a guest was lost".into())
                    }
                    _ => Err(output.tail().into()),
                }
            }
            Err(error) => {
                keep_dir(dir);
                Err(error.into())
            }
        }
    }

    fn boot(
        &mut self,
        suite: &Suite,
        drives: fn() -> Vec<LabDrive>,
    ) -> Result<(Lab, TempDir), Failure> {
        let dir = temporary("nvme-mpt-lab-")?;
        match suite.boot(with_drives(drives()), dir.path()) {
            Ok(lab) => Ok((lab, dir)),
            Err(failure) => {
                keep_dir(dir);
                if !guest::is_lost(&*failure) {
                    self.broken = Some(integration::error_chain(&*failure));
                }
                Err(failure)
            }
        }
    }

    /// Ends the running lab. Its logs are fetched if a check has failed.
    fn end_lab(&mut self) -> Result<(), Failure> {
        let Some((lab, dir)) = self.lab.take() else {
            return Ok(());
        };
        let logs = temporary("nvme-mpt-lab-logs-")?;
        let failed = std::mem::take(&mut self.failed);
        let files = match failed {
            true => vec![LOGS.to_owned()],
            false => Vec::new(),
        };
        let large =
            format!("[ ! -d {LOGS} ] || find {LOGS} -type f -size +{LOG_KIB_MAX}k -exec rm {{}} +");
        let report = lab
            .run(&large, LOGS_TIMEOUT)
            .and_then(|_| lab.finish(failed.into(), &files, logs.path()));
        match report {
            Ok(report) => {
                self.refusals += report.iommu_faults;
                if !report.files.is_empty() {
                    let path = logs.keep();
                    print_line(&format!("        logs of what failed: {}", path.display()));
                }
                Ok(())
            }
            Err(error) => {
                keep_dir(dir);
                Err(error.into())
            }
        }
    }
}

impl ExpectedRefusals {
    /// Fails unless the number of refused accesses is expected.
    fn expect(self, refusals: u64) -> Result<(), Failure> {
        let as_expected = match self {
            Self::None => refusals == 0,
            Self::AtLeastOne => refusals > 0,
        };
        expect(as_expected, || {
            format!("The IOMMU has refused {refusals} accesses, expected: {self:?}")
        })
    }
}

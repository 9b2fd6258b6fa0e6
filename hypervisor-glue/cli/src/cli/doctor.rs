//! `nvme-mpt doctor`: checks a host or a drive.

use std::error::Error;
use std::io::{self, BufRead, Write};
use std::time::Duration;

use clap::Args;
use nvme_mpt_doctor::scratch::ScratchNamespace;
use nvme_mpt_doctor::{CheckOutcome, DoctorHost, examine};
use nvme_mpt_vmm::drives::DrivePath;
use nvme_vfio::function::HostRoot;
use thiserror::Error;

use super::{StateDirArgs, error_text};
use crate::table::doctor::text;

/// Check a host, and a drive, for what serving needs, and print a report to attach to an issue
///
/// Without --scratch, nothing is changed. A drive that is bound to vfio-pci, and that no process uses, is reset to ask it
/// for its abilities. The command fails if there is a problem; a warning names a drawback.
#[derive(Args, Debug)]
pub(super) struct DoctorArgs {
    /// The drive's PCI address, as in 0000:01:00.0, or its directory in /sys/bus/pci/devices; with --scratch any drive, as in
    /// path=
    #[arg(value_parser = |text: &str| text.parse::<DrivePath>().map_err(|error| error_text(&error)))]
    drive: Option<DrivePath>,
    /// ERASE this namespace of the drive: try sharing, isolation, reset, upgrade and limits on it, and measure
    ///
    /// Two functions in this process write the first 128 MiB, or all of a smaller namespace. A drive that the host's own
    /// driver has is bound to vfio-pci, given back, and measured through the host's driver, too.
    #[arg(long, value_name = "NSID", requires = "drive", value_parser = clap::value_parser!(u32).range(1..))]
    scratch: Option<u32>,
    /// Do not ask before a namespace is erased, unless it shows a partition table or a file system
    #[arg(long, requires = "scratch")]
    yes: bool,
    /// Duration of each measurement
    #[arg(long, value_name = "SECONDS", default_value_t = 2, requires = "scratch", value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: u64,
    /// As JSON, one line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    state: StateDirArgs,
}

/// Error: the drive is not a physical one, so only `--scratch` can check it.
#[derive(Debug, Error)]
#[error(
    "{0} is not a PCI address such as 0000:01:00.0: `nvme-mpt drives` lists the drives of this host; other drives \
     need --scratch NSID"
)]
struct NotPhysical(DrivePath);

/// Error: the checks found problems, which have to be solved first.
#[derive(Debug, Error)]
#[error("Problems found: {0}; the report has the remedies")]
struct ProblemsFound(usize);

/// Error: the namespace was not tried out, although `--scratch` requested this.
#[derive(Debug, Error)]
#[error("Nothing was tried out, and nothing was written; the report has the reason")]
struct NotTried;

impl DoctorArgs {
    pub(super) fn run(self) -> Result<(), Box<dyn Error>> {
        let address = match (&self.drive, self.scratch) {
            (Some(DrivePath::Pci(address)), _) => Some(*address),
            (Some(other), None) => return Err(NotPhysical(other.clone()).into()),
            _ => None,
        };
        let host = DoctorHost {
            root: HostRoot::default(),
            state_dir: self.state.state_dir,
            physical: address.is_some(),
        };
        let mut report = examine(&host, address);
        let mut tried = true;
        if let (Some(path), Some(nsid)) = (&self.drive, self.scratch) {
            let time = Duration::from_secs(self.seconds);
            let mut consent = |subject: &ScratchNamespace| has_consent(subject, self.yes);
            report.test_namespace(&host, path, nsid, time, &mut consent);
            let last = report.sections.last();
            tried = last.is_some_and(|section| section.checks.len() > 1);
        }
        let mut out = io::stdout().lock();
        match self.json {
            true => writeln!(out, "{}", serde_json::to_string(&report)?)?,
            false => write!(out, "{}", text(&report))?,
        }
        match report.count(CheckOutcome::Problem) {
            0 if tried => Ok(()),
            0 => Err(NotTried.into()),
            problems => Err(ProblemsFound(problems).into()),
        }
    }
}

/// Asks for consent to erase a namespace. Uses standard error, so that standard output contains only the report.
fn has_consent(subject: &ScratchNamespace, yes: bool) -> bool {
    let ScratchNamespace {
        drive,
        nsid,
        confirmation_word: word,
        previous_use: former_use,
    } = subject;
    if yes && former_use.is_none() {
        return true;
    }
    let shown = former_use.map_or(String::new(), |shown| format!(", which has {shown},"));
    let mut asked = io::stderr().lock();
    let question = writeln!(
        asked,
        "Namespace {nsid} of {drive}{shown} is ERASED. Type {word} to continue:"
    );
    let mut answer = String::new();
    question.is_ok() && io::stdin().lock().read_line(&mut answer).is_ok() && answer.trim() == word
}

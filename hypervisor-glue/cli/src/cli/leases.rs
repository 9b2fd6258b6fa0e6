//! `nvme-mpt leases`: lists and changes leases in the ledger.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use nvme_mpt_server::control;
use nvme_mpt_server::owner::{resolve_user, user_name};
use serde::Serialize;

use nvme_guest::stats::LeasePairStats;
use nvme_lease::label::DriveName;
use nvme_lease::{
    LeaseEntry, LeaseError, LeaseHolderState, LeaseSettings, Ledger, PreviousDataPolicy,
};

use nvme_mpt_vmm::drives;

use super::{ControlSocketArgs, JsonError, StateDirArgs, error_text};
use crate::table::TextTable;

/// Show the holder of each leased range, or release the lease of a dead holder
#[derive(Args, Debug)]
pub(super) struct LeasesArgs {
    #[command(subcommand)]
    command: Option<LeasesCommand>,
    /// As JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    state: StateDirArgs,
    #[command(flatten)]
    control: ControlSocketArgs,
}

#[derive(Debug, Subcommand)]
enum LeasesCommand {
    /// Show all leases (what `leases` alone does)
    List {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Make another user the owner of an id. A VMM that has the lease keeps it until it disconnects
    Give {
        /// The lease's id
        id: String,
        /// Name or number of the user
        #[arg(value_parser = |text: &str| resolve_user(text).map_err(|error| error_text(&error)))]
        user: u32,
    },
    /// Show the owner of each id, and the limits that an operator gave to its functions in VMMs
    Terms {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Give a file or block device without a serial number a label, by which its leases are found after a start of the host.
    /// It takes the last MiB, which has to be empty. Functions on the drive have drive-id=NAME then
    Label {
        /// The drive
        path: PathBuf,
        /// Its name, which no other drive has
        name: DriveName,
        /// The drive has lost the label of that name, as by growing: write it again
        #[arg(long)]
        again: bool,
        /// The drive is new to this host: it is not one of the missing drives that the ledger knows
        #[arg(long, conflicts_with = "again")]
        other: bool,
    },
    /// Say that a drive which the ledger knows by an old name, as of an earlier boot of the host, is the one that a path leads
    /// to. Its leases continue there, with the names that their guests know
    CarryOver {
        /// The old name, as in a refusal and in the column DRIVE of `leases`
        old: String,
        /// The drive, or the name of a physical drive. If it is OLD itself, its namespaces are accepted as they are now
        path: PathBuf,
    },
    /// Take a stale lease out of the ledger, so that its range can be leased again. The data that the id left is erased
    /// before another id gets the range. Works also for an id whose lease ended by itself. The owner and the limits of the
    /// id are forgotten
    Release {
        /// The lease's id
        id: String,
        /// Hand the data that the id left over to the next lease of its range, whatever its id
        #[arg(long)]
        keep: bool,
        /// Release it although its holder lives. The next lease then shares the range with a process
        /// that may still write
        #[arg(long)]
        force: bool,
    },
}

impl LeasesCommand {
    /// Returns the command with its JSON output enabled if `--json` was given before the subcommand's name.
    fn with_json(self, wanted: bool) -> Result<Self, JsonError> {
        match self {
            Self::List { json } => Ok(Self::List {
                json: json || wanted,
            }),
            Self::Terms { json } => Ok(Self::Terms {
                json: json || wanted,
            }),
            _ if wanted => Err(JsonError("`leases list` and `leases terms`")),
            other => Ok(other),
        }
    }
}

/// A lease as shown by `nvme-mpt leases`.
#[derive(Debug, Serialize)]
pub(super) struct ShownLease {
    #[serde(flatten)]
    pub(super) entry: LeaseEntry,
    /// Use of the drive's queue pairs. `None` if their number is not limited, or if the lease's server does not answer.
    pub(super) queue_pairs: Option<LeasePairStats>,
}

pub(super) fn run_leases(options: LeasesArgs) -> Result<(), Box<dyn Error>> {
    let control = options.control.path(&options.state);
    let state_dir = options.state.state_dir;
    let ledger = Ledger::open(&state_dir);
    let mut out = io::stdout().lock();
    let command = options
        .command
        .unwrap_or(LeasesCommand::List { json: false });
    match command.with_json(options.json)? {
        LeasesCommand::List { json: true } => {
            writeln!(
                out,
                "{}",
                serde_json::to_string(&add_queue_pairs(ledger.list()?, &control))?
            )?;
        }
        LeasesCommand::List { json: false } => {
            let leases = add_queue_pairs(ledger.list()?, &control);
            if leases.is_empty() {
                writeln!(out, "No leases in {}", state_dir.display())?;
            } else {
                write_leases(&mut out, &leases)?;
            }
        }
        LeasesCommand::Give { id, user } => {
            ledger.set_owner(&id, user)?;
            writeln!(out, "Lease {id} belongs to {} now", user_name(user))?;
        }
        LeasesCommand::Label {
            path,
            name,
            again,
            other,
        } => {
            drives::label(&path, &name, &ledger, again, other)?;
            let path = path.display();
            writeln!(
                out,
                "{path} has the label {name}: say path={path},drive-id={name}"
            )?;
        }
        LeasesCommand::CarryOver { old, path } => {
            let drive = drives::ledger_name(&path)?;
            if drive == old && ledger.accept_drive(&drive)? {
                writeln!(
                    out,
                    "The next lease of {drive} accepts its namespaces as they are"
                )?;
                return Ok(());
            }
            match ledger.carry_over_checked(&old, &drive)? {
                true => writeln!(out, "Leases of {old} are now on {drive}")?,
                false => writeln!(out, "{} has no leases of {old}", state_dir.display())?,
            }
        }
        LeasesCommand::Terms { json } => {
            let settings = ledger.settings()?;
            match json {
                true => writeln!(out, "{}", serde_json::to_string(&settings)?)?,
                false if settings.is_empty() => {
                    writeln!(out, "No owners and no limits in {}", state_dir.display())?;
                }
                false => write!(out, "{}", settings_table(&settings))?,
            }
        }
        LeasesCommand::Release { id, keep, force } => {
            let (released, no_lease) = match ledger.release(&id, force) {
                Ok(entry) => (Some(entry), None),
                // The lease has already ended, but its data may remain.
                Err(error @ LeaseError::NoSuchLease { .. }) => (None, Some(error)),
                Err(error) => return Err(error.into()),
            };
            let (policy, description) = match keep {
                true => (PreviousDataPolicy::Kept, "goes to the next lease of"),
                false => (
                    PreviousDataPolicy::Wiped,
                    "is erased before another id gets",
                ),
            };
            let decided = ledger.decide_data(&id, policy);
            if let Some(LeaseEntry { extents, drive, .. }) = &released {
                writeln!(out, "Released {id}: range {extents} of {drive}")?;
            }
            let ranges = match (decided, no_lease) {
                (Err(LeaseError::NoData { .. }), Some(no_lease)) if !keep => {
                    return Err(no_lease.into());
                }
                // The lease was wiping another id's data when it ended. The data is still that id's, and stays marked for
                // wiping.
                (Err(LeaseError::NoData { .. }), None) => {
                    writeln!(
                        out,
                        "{id} left no data of its own; what it had not wiped yet, the next lease wipes"
                    )?;
                    return Ok(());
                }
                (ranges, _) => ranges?,
            };
            let ranges: Vec<String> = ranges.iter().map(ToString::to_string).collect();
            writeln!(out, "The data of {id} {description} {}", ranges.join(", "))?;
        }
    }
    Ok(())
}

fn settings_table(settings: &BTreeMap<String, LeaseSettings>) -> TextTable {
    let mut table = TextTable::new(&["ID", "OWNER", "LIMITS"]);
    for (id, LeaseSettings { owner, limits }) in settings {
        let limits = limits.clone().unwrap_or_else(|| "-".to_owned());
        table.add_row(vec![id.clone(), owner_name(*owner), limits]);
    }
    table
}

fn owner_name(owner: Option<u32>) -> String {
    owner.map_or_else(|| "-".to_owned(), user_name)
}

/// Adds the use of queue pairs to those leases that the server at the control socket `control` reports.
fn add_queue_pairs(leases: Vec<LeaseEntry>, control: &Path) -> Vec<ShownLease> {
    let held = leases
        .iter()
        .any(|lease| lease.state == LeaseHolderState::Held);
    // Without an answer of a server, the leases are shown without their queue pairs. Leases of VMMs and of servers with another
    // control socket never have an answer here.
    let stats = held
        .then(|| control::query_stats(control).ok())
        .flatten()
        .unwrap_or_default();
    let leases = leases.into_iter().map(|entry| {
        let mut functions = stats.functions.iter();
        let function = functions.find(|function| function.id == entry.id);
        let queue_pairs = function.and_then(|function| function.queue_pairs);
        ShownLease { entry, queue_pairs }
    });
    leases.collect()
}

fn write_leases(out: &mut dyn Write, leases: &[ShownLease]) -> io::Result<()> {
    let width = |head: usize, width: fn(&LeaseEntry) -> usize| {
        let widths = leases.iter().map(|lease| width(&lease.entry));
        widths.max().unwrap_or(0).max(head)
    };
    let id_width = width(2, |lease| lease.id.len());
    let range_width = width(5, |lease| lease.extents.to_string().len());
    let owner_width = width(5, |lease| owner_name(lease.owner).len());
    // Only physical drives have a limited number of queue pairs.
    let is_bounded =
        |lease: &ShownLease| lease.queue_pairs.is_some() || lease.entry.reserved_pairs > 0;
    let bounded = leases.iter().any(is_bounded);
    let pairs = |lease: &ShownLease| {
        let used = |of: fn(LeasePairStats) -> u16| match lease.queue_pairs {
            Some(pairs) => of(pairs).to_string(),
            None => "-".to_owned(),
        };
        let reserved = match is_bounded(lease) {
            true => lease.entry.reserved_pairs.to_string(),
            false => "-".to_owned(),
        };
        (
            reserved,
            used(|pairs| pairs.exclusive),
            used(|pairs| pairs.shared),
        )
    };
    let columns = |(reserved, exclusive, shared): (String, String, String)| match bounded {
        true => format!("  {reserved:>8}  {exclusive:>9}  {shared:>6}"),
        false => String::new(),
    };
    let heads = ["RESERVED", "EXCLUSIVE", "SHARED"].map(str::to_owned);
    let head = columns(heads.into());
    writeln!(
        out,
        "{:id_width$}  {:range_width$}  {:6}  {:>10}  {:owner_width$}  {:>9}{head}  DRIVE",
        "ID", "RANGE", "STATE", "PID", "OWNER", "NAMESPACE"
    )?;
    for lease in leases {
        let pairs = columns(pairs(lease));
        let LeaseEntry {
            id,
            drive,
            nsid,
            extents,
            range: _,
            pid,
            owner,
            state,
            reserved_pairs: _,
        } = &lease.entry;
        let owner = owner_name(*owner);
        writeln!(
            out,
            "{id:id_width$}  {extents:range_width$}  {state:6}  {pid:>10}  {owner:owner_width$}  {nsid:>9}{pairs}  {drive}"
        )?;
    }
    if leases
        .iter()
        .any(|lease| lease.entry.state == LeaseHolderState::Ending)
    {
        writeln!(
            out,
            "\nAn ending lease was released with commands in flight. Its range is free once the last of them has \
             ended."
        )?;
    }
    if leases
        .iter()
        .any(|lease| lease.entry.state == LeaseHolderState::Stale)
    {
        writeln!(
            out,
            "\nThe holder of a stale lease ended without releasing it. Start it again with the same options to take \
             the lease over; if its data is no longer needed: nvme-mpt leases release ID"
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(id: &str, reserved: u16, queue_pairs: Option<LeasePairStats>) -> ShownLease {
        let entry = serde_json::json!({
            "id": id, "drive": "d", "nsid": 1, "pid": 7, "state": "held",
            "extents": [{"start": 0, "length": 4096}], "reserved_pairs": reserved,
        });
        ShownLease {
            entry: serde_json::from_value(entry).expect("an entry"),
            queue_pairs,
        }
    }

    fn text(leases: &[ShownLease]) -> Vec<String> {
        let mut out = Vec::new();
        write_leases(&mut out, leases).expect("written");
        let text = String::from_utf8(out).expect("text");
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn leases_of_physical_drives_have_their_queue_pairs() {
        let pairs = LeasePairStats {
            reserved: 4,
            exclusive: 1,
            shared: 2,
        };
        let leases = [
            lease("a", 4, Some(pairs)),
            lease("b", 2, None),
            lease("c", 0, None),
        ];
        let lines = [
            "ID  RANGE  STATE          PID  OWNER  NAMESPACE  RESERVED  EXCLUSIVE  SHARED  DRIVE",
            "a   0+4K   held             7  -              1         4          1       2  d",
            "b   0+4K   held             7  -              1         2          -       -  d",
            "c   0+4K   held             7  -              1         -          -       -  d",
        ];
        assert_eq!(text(&leases), lines);
        let json = serde_json::to_value(&leases[0]).expect("JSON");
        assert_eq!(
            (&json["id"], &json["reserved_pairs"]),
            (&"a".into(), &4.into())
        );
        assert_eq!(json["queue_pairs"]["shared"], 2);
        for key in ["range", "owner"] {
            assert_eq!(json.get(key), Some(&serde_json::Value::Null), "{key}");
        }
    }

    #[test]
    fn leases_of_software_drives_have_no_queue_pair_columns() {
        let lines = text(&[lease("a", 0, None)]);
        assert!(lines[0].ends_with("NAMESPACE  DRIVE"), "{lines:?}");
    }
}

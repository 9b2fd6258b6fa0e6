//! Fault plans in TOML: which faults to inject into a drive. `resources/faults/example.toml` explains every field.

use std::fmt;
use std::fs;
use std::io;
use std::path::Path;

use serde::Deserialize;
use serde::de::{self, Deserializer};

use nvme_lease::range::{ByteRange, ByteSize, RangeError};
use nvme_models::{ProfileSize, TimeSpan};
use nvme_spec::opcode::NvmOpcode;

/// Maximum size of a plan in bytes. The limit detects a path to a wrong, large file.
pub const MAX_PLAN_BYTES: u64 = 64 << 10;

/// Maximum number of faults of a drive. Every command is checked against each fault.
pub const MAX_FAULTS: usize = 64;

/// Name of the empty plan.
const EMPTY_PLAN: &str = "none";

/// Reason why faults cannot be injected.
#[derive(Debug, thiserror::Error)]
pub enum FaultError {
    /// The plan's file cannot be read.
    #[error("Fault plan `{path}` cannot be read; name a file, or `none` to begin without faults")]
    Read {
        /// Path of the file.
        path: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// This build cannot parse fault plans.
    #[error(
        "Fault plan `{source_name}` cannot be read: this program was built without the feature `toml`"
    )]
    NotBuilt {
        /// Source of the plan.
        source_name: String,
    },
    /// The text is not a valid fault plan.
    #[cfg(feature = "toml")]
    #[error(
        "Fault plan `{source_name}` is invalid; resources/faults/example.toml explains every field"
    )]
    Syntax {
        /// Source of the plan.
        source_name: String,
        /// The parse error with its position.
        source: Box<toml::de::Error>,
    },
    /// A field has an invalid value.
    #[error("Fault plan `{source_name}`, fault {number}: {field} cannot be {value}; {allowed}")]
    Value {
        /// Source of the plan.
        source_name: String,
        /// Number of the fault, from 1.
        number: usize,
        /// Name of the field.
        field: &'static str,
        /// Value of the field.
        value: String,
        /// Description of the allowed values.
        allowed: &'static str,
    },
    /// A field is missing, or does not apply to the kind of fault.
    #[error("Fault plan `{source_name}`, fault {number}: {field} {advice}")]
    Field {
        /// Source of the plan.
        source_name: String,
        /// Number of the fault, from 1.
        number: usize,
        /// Name of the field.
        field: &'static str,
        /// Advice for correcting the field.
        advice: &'static str,
    },
    /// The drive does not have that range or size.
    #[error("Fault {number} does not fit the drive")]
    Range {
        /// Number of the fault, from 1.
        number: usize,
        /// The reason.
        source: RangeError,
    },
    /// The requested size exceeds the capacity of the drive's backing store.
    #[error("Fault {number} cannot resize the drive to {size}: it has {capacity} at most")]
    TooLarge {
        /// Number of the fault, from 1.
        number: usize,
        /// Requested size.
        size: ByteSize,
        /// Capacity of the drive.
        capacity: ByteSize,
    },
    /// The requested size is less than a zone, but a zoned drive must have at least one zone.
    #[error("Fault {number} cannot resize the drive to {size}: its zones are of {zone} each")]
    LessThanZone {
        /// Number of the fault, from 1.
        number: usize,
        /// Requested size.
        size: ByteSize,
        /// Size of a zone.
        zone: ByteSize,
    },
    /// The memory file that records the faults for a successor cannot be used.
    #[error("The faults of the drive cannot be stored for the next process")]
    Record(#[source] io::Error),
    /// The drive would have too many faults.
    #[error(
        "A drive has at most {MAX_FAULTS} faults, and these would be {0}: clear those that are there first"
    )]
    TooMany(usize),
}

/// Kind of command to which a fault can be restricted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultOperation {
    /// Flush.
    Flush,
    /// Write.
    Write,
    /// Read.
    Read,
    /// Write Uncorrectable.
    WriteUncorrectable,
    /// Compare.
    Compare,
    /// Write Zeroes.
    WriteZeroes,
    /// Dataset Management.
    DatasetManagement,
    /// Verify.
    Verify,
    /// Copy.
    Copy,
}

impl FaultOperation {
    /// All operations.
    const ALL: [Self; 9] = [
        Self::Flush,
        Self::Write,
        Self::Read,
        Self::WriteUncorrectable,
        Self::Compare,
        Self::WriteZeroes,
        Self::DatasetManagement,
        Self::Verify,
        Self::Copy,
    ];

    const fn opcode(self) -> NvmOpcode {
        match self {
            Self::Flush => NvmOpcode::FLUSH,
            Self::Write => NvmOpcode::WRITE,
            Self::Read => NvmOpcode::READ,
            Self::WriteUncorrectable => NvmOpcode::WRITE_UNCORRECTABLE,
            Self::Compare => NvmOpcode::COMPARE,
            Self::WriteZeroes => NvmOpcode::WRITE_ZEROES,
            Self::DatasetManagement => NvmOpcode::DATASET_MANAGEMENT,
            Self::Verify => NvmOpcode::VERIFY,
            Self::Copy => NvmOpcode::COPY,
        }
    }
}

/// Set of operations, with a bit for each opcode. All opcodes are below 20h.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct FaultOperationSet(pub(super) u32);

impl FaultOperationSet {
    fn from_operations(operations: impl IntoIterator<Item = FaultOperation>) -> Self {
        let bits = operations
            .into_iter()
            .map(|operation| 1 << operation.opcode().0);
        Self(bits.fold(0, |all, bit: u32| all | bit))
    }

    pub(super) fn contains(self, opcode: NvmOpcode) -> bool {
        1_u32.checked_shl(opcode.0.into()).unwrap_or(0) & self.0 != 0
    }
}

/// Probability that a fault hits a command to which it applies, in units of 1/[`Self::CERTAIN`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct FaultProbability(pub(super) u64);

impl FaultProbability {
    /// Number of distinct probabilities: 53 bits, the precision of an `f64`.
    const CERTAIN: u64 = 1 << 53;

    /// Converts a probability. Returns `None` if `share` is not above 0, or is above 1.
    fn new(share: f64) -> Option<Self> {
        let times = (share * Self::CERTAIN as f64).round();
        (share > 0.0 && share <= 1.0).then_some(Self((times as u64).max(1)))
    }

    /// Returns whether a fault with this probability hits a command. `random` is the command's random number.
    pub(super) fn is_hit(self, random: u64) -> bool {
        random >> 11 < self.0
    }
}

/// Effect of a fault on the commands that it hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum FaultEffect {
    /// Completes the command with Unrecovered Read Error or Write Fault.
    MediaError,
    /// Delays the command by this time.
    Latency(TimeSpan),
    /// Never completes the command.
    Lost,
    /// Makes the guest's controller report a fatal status, and never completes the command.
    Fatal,
    /// Removes the drive.
    Removal,
    /// Sets the size of the namespace, in bytes.
    Resize(u64),
    /// Aborts the process.
    Crash,
}

/// A fault of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct PlannedFault {
    pub(super) effect: FaultEffect,
    pub(super) operations: FaultOperationSet,
    /// Byte range of the drive that a command must touch; `None` for any command.
    pub(super) range: Option<ByteRange>,
    pub(super) probability: FaultProbability,
    /// Number of commands to which the fault applies that pass before the first hit.
    pub(super) after: u64,
    /// Maximum number of commands that the fault hits.
    pub(super) count: Option<u64>,
}

impl FaultEffect {
    pub(super) const fn kind(self) -> FaultKind {
        match self {
            Self::MediaError => FaultKind::MediaError,
            Self::Latency(_) => FaultKind::Latency,
            Self::Lost => FaultKind::Lost,
            Self::Fatal => FaultKind::Fatal,
            Self::Removal => FaultKind::Removal,
            Self::Resize(_) => FaultKind::Resize,
            Self::Crash => FaultKind::Crash,
        }
    }
}

/// Kind of fault: the value of `kind` in a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultKind {
    /// `media-error`: the commands that the fault hits fail with a media error.
    MediaError,
    /// `latency`: the commands that the fault hits take longer.
    Latency,
    /// `lost`: the commands that the fault hits never complete.
    Lost,
    /// `fatal`: the guest's controller reports a fatal status, and the command never completes.
    Fatal,
    /// `removal`: the drive is removed when the fault hits a command.
    Removal,
    /// `resize`: the namespace gets another size when the fault hits a command.
    Resize,
    /// `crash`: the process aborts when the fault hits a command.
    Crash,
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::MediaError => "media-error",
            Self::Latency => "latency",
            Self::Lost => "lost",
            Self::Fatal => "fatal",
            Self::Removal => "removal",
            Self::Resize => "resize",
            Self::Crash => "crash",
        })
    }
}

impl FaultKind {
    /// Returns the default operations for this kind of fault.
    fn default_operations(self) -> FaultOperationSet {
        let media = |operation: &FaultOperation| {
            !matches!(
                operation,
                FaultOperation::Flush | FaultOperation::DatasetManagement
            )
        };
        let all = FaultOperation::ALL.into_iter();
        match self {
            Self::MediaError => FaultOperationSet::from_operations(all.filter(media)),
            _ => FaultOperationSet::from_operations(all),
        }
    }

    /// Returns the default for the maximum number of hits of a fault of this kind: one if the effect is lasting, otherwise no
    /// limit.
    const fn default_count(self) -> Option<u64> {
        match self {
            Self::MediaError | Self::Latency | Self::Crash => None,
            Self::Lost | Self::Fatal | Self::Removal | Self::Resize => Some(1),
        }
    }
}

/// A range in the TOML text.
#[derive(Debug)]
struct FaultByteRange(ByteRange);

impl<'de> Deserialize<'de> for FaultByteRange {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(Self).map_err(de::Error::custom)
    }
}

/// A plan in the TOML text.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenPlan {
    #[serde(default)]
    seed: u64,
    #[serde(default)]
    fault: Vec<WrittenFault>,
}

impl WrittenPlan {
    #[cfg(feature = "toml")]
    fn read(source_name: &str, text: &str) -> Result<Self, FaultError> {
        toml::from_str(text).map_err(|source| FaultError::Syntax {
            source_name: source_name.to_owned(),
            source: Box::new(source),
        })
    }

    #[cfg(not(feature = "toml"))]
    fn read(source: &str, _: &str) -> Result<Self, FaultError> {
        Err(FaultError::NotBuilt {
            source_name: source.to_owned(),
        })
    }
}

/// A fault in the TOML text.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenFault {
    kind: FaultKind,
    operations: Option<Vec<FaultOperation>>,
    range: Option<FaultByteRange>,
    probability: Option<f64>,
    after: Option<u64>,
    count: Option<u64>,
    add: Option<TimeSpan>,
    size: Option<ProfileSize>,
}

/// Error in a fault of the TOML text.
enum InvalidFaultField {
    Value(&'static str, String, &'static str),
    Field(&'static str, &'static str),
}

impl WrittenFault {
    fn into_planned(self) -> Result<PlannedFault, InvalidFaultField> {
        let Self { kind, .. } = self;
        let effect = self.effect()?;
        let operations = match self.operations {
            None => kind.default_operations(),
            Some(operations) if operations.is_empty() => {
                let allowed = "name one at least, as in [\"read\"], or leave it out";
                return Err(InvalidFaultField::Value(
                    "operations",
                    "[]".to_owned(),
                    allowed,
                ));
            }
            Some(operations) => FaultOperationSet::from_operations(operations),
        };
        let share = self.probability.unwrap_or(1.0);
        let allowed = "it is above 0, and 1 at most";
        let unlikely = || InvalidFaultField::Value("probability", share.to_string(), allowed);
        let probability = FaultProbability::new(share).ok_or_else(unlikely)?;
        if self.count == Some(0) {
            let allowed = "it is 1 at least; leave the fault out instead";
            return Err(InvalidFaultField::Value("count", "0".to_owned(), allowed));
        }
        Ok(PlannedFault {
            effect,
            operations,
            range: self.range.map(|FaultByteRange(range)| range),
            probability,
            after: self.after.unwrap_or(0),
            count: self.count.or(kind.default_count()),
        })
    }

    fn effect(&self) -> Result<FaultEffect, InvalidFaultField> {
        let meaningless = "is only for other kinds of faults; leave it out";
        if self.add.is_some() && self.kind != FaultKind::Latency {
            return Err(InvalidFaultField::Field("add", meaningless));
        }
        if self.size.is_some() && self.kind != FaultKind::Resize {
            return Err(InvalidFaultField::Field("size", meaningless));
        }
        Ok(match self.kind {
            FaultKind::MediaError => FaultEffect::MediaError,
            FaultKind::Lost => FaultEffect::Lost,
            FaultKind::Fatal => FaultEffect::Fatal,
            FaultKind::Removal => FaultEffect::Removal,
            FaultKind::Crash => FaultEffect::Crash,
            FaultKind::Latency => {
                let missing = "is missing; say how much longer commands take, as in add = \"5ms\"";
                FaultEffect::Latency(self.add.ok_or(InvalidFaultField::Field("add", missing))?)
            }
            FaultKind::Resize => {
                let missing = "is missing; say what the drive has left, as in size = \"1G\"";
                FaultEffect::Resize(
                    self.size
                        .ok_or(InvalidFaultField::Field("size", missing))?
                        .0,
                )
            }
        })
    }
}

/// Faults to inject into a drive.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct FaultPlan {
    pub(super) seed: u64,
    pub(super) faults: Vec<PlannedFault>,
}

impl FaultPlan {
    /// Loads a plan from a file. The name `none` stands for an empty plan, for a drive that gets faults while it runs.
    ///
    /// # Errors
    /// [`FaultError::Read`], and the errors of [`Self::parse`].
    pub fn load(name: &str) -> Result<Self, FaultError> {
        if name == EMPTY_PLAN {
            return Ok(Self::default());
        }
        Self::parse(name, &Self::read_text(name)?)
    }

    /// Reads the text of a plan from a file.
    ///
    /// # Errors
    /// [`FaultError::Read`].
    pub fn read_text(name: &str) -> Result<String, FaultError> {
        let failed = |source| FaultError::Read {
            path: name.to_owned(),
            source,
        };
        let path = Path::new(name);
        if fs::metadata(path).map_err(failed)?.len() > MAX_PLAN_BYTES {
            return Err(failed(io::ErrorKind::FileTooLarge.into()));
        }
        fs::read_to_string(path).map_err(failed)
    }

    /// Parses a plan. In errors, `source` names the source of the text.
    ///
    /// # Errors
    /// `FaultError::Syntax`, [`FaultError::Value`], [`FaultError::Field`], [`FaultError::TooMany`], and
    /// [`FaultError::NotBuilt`] without the feature `toml`.
    pub fn parse(source: &str, text: &str) -> Result<Self, FaultError> {
        let written = WrittenPlan::read(source, text)?;
        if written.fault.len() > MAX_FAULTS {
            return Err(FaultError::TooMany(written.fault.len()));
        }
        let message = |number: usize, unusable| match unusable {
            InvalidFaultField::Value(field, value, allowed) => FaultError::Value {
                source_name: source.to_owned(),
                number,
                field,
                value,
                allowed,
            },
            InvalidFaultField::Field(field, advice) => FaultError::Field {
                source_name: source.to_owned(),
                number,
                field,
                advice,
            },
        };
        let faults = written.fault.into_iter().zip(1..);
        let faults =
            faults.map(|(fault, number)| fault.into_planned().map_err(|e| message(number, e)));
        Ok(Self {
            seed: written.seed,
            faults: faults.collect::<Result<_, _>>()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_text(text: &str) -> String {
        let error = FaultPlan::parse("here", text).expect_err(text);
        let source = std::error::Error::source(&error).map_or(String::new(), |s| s.to_string());
        format!("{error}\n{source}")
    }

    #[test]
    fn the_example_has_a_fault_of_each_kind_and_every_field() {
        let text = include_str!("../../fault-plans/example.toml");
        let plan = FaultPlan::parse("example", text).expect("sound");
        let kinds: Vec<FaultKind> = plan.faults.iter().map(|f| f.effect.kind()).collect();
        let all = [
            FaultKind::MediaError,
            FaultKind::Latency,
            FaultKind::Lost,
            FaultKind::Fatal,
            FaultKind::Removal,
            FaultKind::Resize,
            FaultKind::Crash,
        ];
        assert_eq!(kinds, all);
        for field in [
            "seed",
            "operations",
            "range",
            "probability",
            "after",
            "count",
            "add",
            "size",
        ] {
            assert!(text.contains(&format!("\n{field} = ")), "{field}");
        }
    }

    #[test]
    fn unset_fault_fields_get_the_defaults_of_the_kind() {
        let plan = "[[fault]]\nkind = \"media-error\"\n[[fault]]\nkind = \"lost\"\n";
        let plan = FaultPlan::parse("here", plan).expect("sound");
        let [media, lost] = plan.faults.as_slice() else {
            panic!("{plan:?}");
        };
        assert_eq!((media.count, lost.count), (None, Some(1)));
        assert!(media.operations.contains(NvmOpcode::READ));
        assert!(!media.operations.contains(NvmOpcode::FLUSH));
        assert!(lost.operations.contains(NvmOpcode::FLUSH));
        assert!(!lost.operations.contains(NvmOpcode(0xC0)));
        assert!(media.probability.is_hit(u64::MAX));
        assert_eq!(
            FaultPlan::load("none").expect("a name"),
            FaultPlan::default()
        );
    }

    #[test]
    fn errors_name_the_problem() {
        let fault = |rest: &str| format!("[[fault]]\nkind = \"lost\"\n[[fault]]\n{rest}");
        for (text, expected) in [
            ("kind = \"fire\"", "unknown variant `fire`"),
            ("count = 1", "missing field `kind`"),
            ("kind = \"lost\"\nwhen = 1", "unknown field `when`"),
            (
                "kind = \"lost\"\ncount = 0",
                "fault 2: count cannot be 0; it is 1",
            ),
            ("kind = \"lost\"\nafter = -1", "invalid value: integer `-1`"),
            (
                "kind = \"lost\"\nadd = \"1ms\"",
                "fault 2: add is only for other",
            ),
            (
                "kind = \"lost\"\nsize = \"1M\"",
                "fault 2: size is only for other",
            ),
            ("kind = \"latency\"", "fault 2: add is missing"),
            ("kind = \"latency\"\nadd = \"1h\"", "\"1h\" is not a time"),
            ("kind = \"resize\"", "fault 2: size is missing"),
            (
                "kind = \"lost\"\noperations = []",
                "operations cannot be []",
            ),
            (
                "kind = \"lost\"\noperations = [\"trim\"]",
                "unknown variant `trim`",
            ),
            ("kind = \"lost\"\nrange = \"1M\"", "\"1M\" is not a range"),
            (
                "kind = \"lost\"\nprobability = 0.0",
                "probability cannot be 0; it is above 0",
            ),
            (
                "kind = \"lost\"\nprobability = 1.1",
                "probability cannot be 1.1",
            ),
            (
                "kind = \"lost\"\nprobability = nan",
                "probability cannot be NaN",
            ),
        ] {
            let message = error_text(&fault(text));
            assert!(message.contains(expected), "{expected}: {message}");
        }
        let many = "[[fault]]\nkind = \"lost\"\n".repeat(MAX_FAULTS + 1);
        assert!(error_text(&many).contains("at most 64 faults, and these would be 65"));
        let unread = FaultPlan::load("/nonexistent/plan").expect_err("no file");
        assert!(
            unread.to_string().contains("`/nonexistent/plan`"),
            "{unread}"
        );
    }
}

//! Table of all options of a function: for each its key, its help, its parser, the field of [`FunctionOptions`] that it sets,
//! and the kinds of drives that refuse it. Option strings, files, a VMM's configuration, error messages and help texts all come
//! from this table.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::str::FromStr;
#[cfg(feature = "toml")]
use std::sync::Arc;
use std::time::Duration;

use nvme_guest::MemoryKinds;
use nvme_guest::doorbell::MAX_QUEUE_PAIRS;
use nvme_guest::rate_limit::RateLimit;
#[cfg(feature = "toml")]
use nvme_layers::faults::FaultPlan;
use nvme_lease::range::{ByteSize, SizeError};
#[cfg(feature = "toml")]
use nvme_models::DriveProfile;
use nvme_spec::ids::Nsid;

use super::error::OptionError;
use super::function::{FunctionOptions, NO_WEIGHT_REASON};
use super::option_text::OptionText;
use crate::drives::{DrivePath, LbaSize};

/// Maximum length of a serial number in bytes (Base 2.0, Identify Controller data structure, SN).
const MAX_SERIAL: usize = 20;

/// Maximum timeout of a drive's commands in seconds. It exceeds the default timeout of any guest driver.
const MAX_TIMEOUT: u64 = 3600;

/// Reason for which a value is refused.
type ValueError = Box<dyn Error + Send + Sync>;

/// Parser of an option that is a number in JSON.
type NumberParser = fn(&str) -> Result<Option<u64>, ValueError>;

/// Key, form of the value, and help of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHelp {
    /// The key.
    pub key: &'static str,
    /// Form of the value, as in `START+LENGTH`.
    pub value: &'static str,
    /// Help text. It is wrapped anew for a terminal, so its line breaks have no meaning.
    pub help: &'static str,
}

/// Part of a function that an option describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptionScope {
    /// The drive. Functions that share it agree on the option.
    Drive,
    /// The leased part of the drive.
    Lease,
    /// The function itself.
    Function,
}

/// An option of a function.
#[derive(Clone, Copy, Debug)]
pub struct FunctionOption {
    /// Key and help.
    pub help: OptionHelp,
    /// Part of the function that the option describes.
    pub scope: OptionScope,
    /// Parses a value and sets the option's field.
    set: fn(&mut FunctionOptions, &str) -> Result<(), ValueError>,
    /// For an option that is a number in JSON: returns the number; `None` for a value that means that the option is not given.
    pub(super) number: Option<NumberParser>,
    /// For an option that may name a file: returns whether a value is the path of one.
    names_file: Option<fn(&str) -> bool>,
    /// Conditions under which the option is refused if it is given, each with the reason.
    refusals: &'static [(OptionCondition, &'static str)],
}

/// Condition on the options of a function.
type OptionCondition = fn(&FunctionOptions) -> bool;

impl FunctionOption {
    /// Checks a value without regard to other options.
    pub(super) fn check_value(&self, text: &str) -> Result<(), ValueError> {
        (self.set)(&mut FunctionOptions::new(DrivePath::Null(0)), text)
    }

    const fn of(self, scope: OptionScope) -> Self {
        Self { scope, ..self }
    }

    const fn with_number(self, number: NumberParser) -> Self {
        let number = Some(number);
        Self { number, ..self }
    }

    const fn refused_for(self, refusals: &'static [(OptionCondition, &'static str)]) -> Self {
        Self { refusals, ..self }
    }

    #[cfg(feature = "toml")]
    const fn with_file(self, names_file: fn(&str) -> bool) -> Self {
        let names_file = Some(names_file);
        Self { names_file, ..self }
    }
}

const fn option(
    key: &'static str,
    value: &'static str,
    help: &'static str,
    set: fn(&mut FunctionOptions, &str) -> Result<(), ValueError>,
) -> FunctionOption {
    FunctionOption {
        help: OptionHelp { key, value, help },
        scope: OptionScope::Function,
        set,
        number: None,
        names_file: None,
        refusals: &[],
    }
}

const fn server_option(key: &'static str, value: &'static str, help: &'static str) -> OptionHelp {
    OptionHelp { key, value, help }
}

/// Options of a server's function in addition to [`OPTIONS`]. The first option is mandatory.
pub const SERVER_OPTIONS: &[OptionHelp] = &[
    server_option(
        "socket",
        "PATH",
        "path of the UNIX socket on which the VMM connects",
    ),
    server_option(
        "mode",
        "MODE",
        "file mode of the socket in octal, 0000 to 0777 [default: 0600]",
    ),
    server_option(
        "owner",
        "USER[:GROUP]",
        "user and group that own the socket; the user owns the lease as well [default: those
of the server]",
    ),
];

/// Options of a function. The first option is mandatory.
pub const OPTIONS: &[FunctionOption] = &[
    option(
        "path",
        "DRIVE",
        "the address of a PCI function, as in 0000:01:00.0, a file, a block device,
memory:SIZE or null:SIZE; functions of this server with the same path share the drive",
        |options, text| set_value(&mut options.path, text.parse()),
    )
    .of(OptionScope::Drive),
    option(
        "range",
        "START+LENGTH",
        "the part of the drive that the guest gets, in bytes, as in 64G+64G
[default: all of it]",
        |options, text| set_optional(&mut options.range, text.parse()),
    )
    .of(OptionScope::Lease),
    option(
        "size",
        "SIZE",
        "instead of range=: bytes of a lease wherever the drive has free space, as in 64G; needs id=
or lease=. `nvme-mpt resize` makes it larger while its guest runs",
        |options, text| set_optional(&mut options.size, text.parse()),
    )
    .of(OptionScope::Lease),
    option(
        "unit",
        "SIZE",
        "with size=: extents of the lease begin and end at multiples of it, a power of two,
1M or more [default: 1G; a zone on a drive of zones]",
        |options, text| set_optional(&mut options.unit, text.parse()),
    )
    .of(OptionScope::Lease),
    option(
        "queues",
        "N",
        "most I/O queue pairs that the guest gets: 1 to 1024 with doorbells=mapped or trap, else 1 to
511 [default: 16]",
        |options, text| set_value(&mut options.backend.queue_pairs, parse_queues(text)),
    )
    .with_number(parse_number),
    option(
        "reserve",
        "N",
        "I/O queue pairs of a physical drive that belong to this function alone, at most those
of queues= [default: 0]",
        |options, text| set_value(&mut options.reserve, parse_reserve(text)),
    )
    .with_number(parse_number)
    .refused_for(&[(
        |options| options.reserve > 0 && is_software(options),
        "only a physical drive, as in path=0000:01:00.0, has a bound on its queue pairs",
    )]),
    option(
        "mdts",
        "SIZE",
        "most data of one command, a power of two from 8K to 2M; at most 1M on a physical drive
[default: 1M]",
        |options, text| set_optional(&mut options.backend.mdts, text.parse()),
    ),
    option(
        "id",
        "ID",
        "name of the function and of its lease [default: made from drive and range]",
        |options, text| set_optional(&mut options.id, text.parse()),
    )
    .of(OptionScope::Lease),
    option(
        "lease",
        "ID",
        "the same as id=, for a VMM whose own options have an id=",
        |options, text| set_optional(&mut options.id, text.parse()),
    )
    .of(OptionScope::Lease),
    option(
        "doorbells",
        "auto|shadow|mapped|trap",
        "auto, shadow, mapped or trap [default: auto]",
        |options, text| set_value(&mut options.backend.doorbells, text.parse()),
    ),
    option(
        "doorbell-stride",
        "4|64",
        "bytes from one doorbell to the next; 4 for drivers and firmware that support no other. With
64, a Doorbell Buffer holds 31 queue pairs [default: 64, or less for many queues]",
        |options, text| set_value(&mut options.backend.doorbell_stride, text.parse()),
    )
    .with_number(parse_number),
    option(
        "poll",
        "POLICY",
        "shared or dedicated, then :adaptive, :busy or :event, then @ and processor numbers
joined by +, as in dedicated:busy@2+3, or @vcpu behind dedicated [default: shared]",
        |options, text| set_value(&mut options.backend.poll, text.parse()),
    ),
    option(
        "fixed",
        "NAME+NAME",
        "policies that do not adapt, joined by +: spin, preemption-backoff, coalescing, governor,
doorbells, budget, slices, poll-interval [default: all adapt]",
        |options, text| set_value(&mut options.backend.adaptive, text.parse()),
    )
    .of(OptionScope::Drive),
    option(
        "memory",
        "resident|any",
        "files that may hold the guest's memory: resident (memfd, tmpfs, hugetlbfs), or any, whose
page faults may wait; any needs poll=dedicated [default: resident]",
        |options, text| set_value(&mut options.backend.memory, text.parse()),
    )
    .refused_for(&[(
        |options| options.backend.memory == MemoryKinds::Any && is_physical(options),
        "it pins the memory of all its VMs, and a page fault that waits would delay other VMs",
    )]),
    option(
        "memory-limit",
        "SIZE",
        "most bytes of the guest's memory that are mapped for a physical drive, which pins them,
as in 17G; memory counts as often as it is mapped [default: the memory of the host]",
        |options, text| set_optional(&mut options.backend.memory_limit, parse_memory_limit(text)),
    )
    .refused_for(&[(
        is_software,
        "only a physical drive, as in path=0000:01:00.0, pins the memory of its VMs",
    )]),
    option(
        "iops",
        "NUMBER[+BURST]",
        "most I/O commands per second, and commands that may come at once after idleness, as
in 20000+500 [default: no limit; BURST: those of 10 ms]",
        |options, text| set_optional(&mut options.backend.rates.iops, RateLimit::parse_iops(text)),
    ),
    option(
        "bandwidth",
        "SIZE[+BURST]",
        "most bytes per second that are read and written, as in 100M+1G
[default: no limit; BURST: those of 10 ms]",
        |options, text| set_optional(&mut options.backend.rates.bandwidth, RateLimit::parse_bandwidth(text)),
    ),
    option(
        "weight",
        "N",
        "share of a physical drive beside other busy guests, 1 to 1000: a guest with 300 gets three
times as much as one with 100 [default: 100]",
        |options, text| set_optional(&mut options.backend.rates.weight, text.parse()),
    )
    .with_number(parse_number)
    .refused_for(&[(is_software, NO_WEIGHT_REASON)]),
    option(
        "data",
        "keep|wipe",
        "data that another id left in the range: keep hands it over, wipe erases it first
[default: such a range is refused]",
        |options, text| set_value(&mut options.data, text.parse()),
    )
    .of(OptionScope::Lease),
    option(
        "serial",
        "SERIAL",
        "serial number that the guest sees [default: made from drive, range and id]",
        |options, text| set_optional(&mut options.backend.serial, parse_serial(text)),
    ),
    option(
        "lba",
        "512|4096",
        "bytes of a logical block of a software drive, 512 or 4096 [default: 512]",
        |options, text| set_optional(&mut options.drive.lba, text.parse()),
    )
    .of(OptionScope::Drive)
    .with_number(|text| Ok(Some(text.parse::<LbaSize>()?.bytes().into())))
    .refused_for(&[
        (
            is_physical,
            "a physical drive has the logical block size with which it was formatted",
        ),
        (
            FunctionOptions::is_key_value,
            "a drive of keys and values has no logical blocks",
        ),
    ]),
    option(
        "drive-id",
        "NAME",
        "name of the label that `nvme-mpt leases label` gave the drive, for disks without a serial
number [default: the drive's own identity]",
        |options, text| set_optional(&mut options.drive.name, text.parse()),
    )
    .of(OptionScope::Drive)
    .refused_for(&[(
        |options| !is_file(options) || options.is_key_value(),
        "only a file or block device with logical blocks can have a label",
    )]),
    option(
        "format",
        "raw",
        "raw: the guest gets a file or block device as it is, although it begins with the header of a
disk image or of LUKS [default: its first lease is refused]",
        |options, text| set_value(&mut options.is_raw, parse_format(text)),
    )
    .of(OptionScope::Lease)
    .refused_for(&[(
        |options| !is_file(options),
        "only a file or block device of the host can be a disk image",
    )]),
    // The values of these two are written in TOML.
    #[cfg(feature = "toml")]
    option(
        "profile",
        "PROFILE",
        "kind of software drive: nvm or ssd (timing), zns or zns-ssd (zones), kv or kv-ssd (keys and
values), or a path with a slash to a file like those in resources/drives [default: as fast
as it can be]",
        |options, text| set_optional(&mut options.drive.profile, DriveProfile::load(text).map(Arc::new)),
    )
    .of(OptionScope::Drive)
    .with_file(|name| name.contains('/'))
    .refused_for(&[(is_physical, "a physical drive has its own timing")]),
    #[cfg(feature = "toml")]
    option(
        "faults",
        "PLAN",
        "a file with faults of a software drive, like resources/faults/example.toml, or none, to
inject faults later with `nvme-mpt fault` [default: the drive never fails]",
        |options, text| set_optional(&mut options.drive.faults, FaultPlan::load(text).map(Arc::new)),
    )
    .of(OptionScope::Drive)
    .with_file(|name| name != NO_FAULTS)
    .refused_for(&[
        (
            is_physical,
            "faults can be injected into software drives only",
        ),
        (
            FunctionOptions::is_key_value,
            "faults are declared for logical blocks, which a drive of keys and values does not have",
        ),
    ]),
    option(
        "populate",
        "on|off",
        "on: a drive in memory allocates all of it at the start, so that first writes are as fast
as others [default: off, memory is allocated as it is written]",
        |options, text| set_optional(&mut options.drive.populate, text.parse()),
    )
    .of(OptionScope::Drive)
    .refused_for(&[(
        |options| !is_memory(options) || options.is_key_value(),
        "only the blocks of a drive in memory, as in path=memory:4G, take memory of the host",
    )]),
    option(
        "namespace",
        "N",
        "namespace of a physical drive [default: its first]",
        |options, text| set_optional(&mut options.drive.namespace, parse_namespace(text)),
    )
    .of(OptionScope::Drive)
    .with_number(parse_number)
    .refused_for(&[(
        is_software,
        "only a physical drive, as in path=0000:01:00.0, has more than one namespace",
    )]),
    option(
        "timeout",
        "SECONDS|none",
        "seconds that a drive may take for a command. Then a physical drive aborts it, or is reset;
the guest of a file or block device sees CSTS.CFS [default: 10 if physical, else none]",
        set_timeout,
    )
    .of(OptionScope::Drive)
    .with_number(|text| Ok(parse_timeout(text)?.map(|time| time.as_secs())))
    .refused_for(&[(
        |options| options.drive.timeout.is_some() && is_in_process(options),
        "this process executes its commands in memory, so they cannot hang",
    )]),
    option(
        "arbitration",
        "round-robin|weighted",
        "weighted: a physical drive that has weighted round robin divides itself among busy guests by
weight=, also while it is fast; one value per drive [default: round-robin]",
        |options, text| set_optional(&mut options.drive.arbitration, text.parse()),
    )
    .of(OptionScope::Drive)
    .refused_for(&[(
        is_software,
        "only a physical drive, as in path=0000:01:00.0, has an arbitration between its queues",
    )]),
    option(
        "reconnect",
        "SECONDS",
        "seconds that a function in a VMM waits for a drive server to come back; 0: no wait
[default: no limit]",
        |options, text| set_optional(&mut options.reconnect, parse_seconds(text)),
    )
    .with_number(parse_number)
    .refused_for(&[(
        is_in_process,
        "it is in the memory of the process that opens it, so there is no server to wait for",
    )]),
];

fn is_physical(options: &FunctionOptions) -> bool {
    matches!(options.path, DrivePath::Pci(_))
}

fn is_software(options: &FunctionOptions) -> bool {
    !is_physical(options)
}

fn is_file(options: &FunctionOptions) -> bool {
    matches!(options.path, DrivePath::File(_))
}

fn is_memory(options: &FunctionOptions) -> bool {
    matches!(options.path, DrivePath::Memory(_))
}

/// Returns whether the drive is in the memory of the process that opens it.
fn is_in_process(options: &FunctionOptions) -> bool {
    options.path.is_in_process()
}

/// Sets a field that has a default.
fn set_value<T, E: Into<ValueError>>(field: &mut T, value: Result<T, E>) -> Result<(), ValueError> {
    *field = value.map_err(Into::into)?;
    Ok(())
}

/// Sets a field that is `None` by default.
fn set_optional<T, E: Into<ValueError>>(
    field: &mut Option<T>,
    value: Result<T, E>,
) -> Result<(), ValueError> {
    set_value(field, value.map(Some))
}

/// Error of options without a drive.
pub(super) const NO_PATH: OptionError = OptionError::Missing {
    key: "path",
    example: "DRIVE, a PCI address, a file, a block device, memory:SIZE or null:SIZE",
};

/// Returns the keys of [`OPTIONS`].
pub(super) fn keys() -> impl Iterator<Item = &'static str> + Clone {
    OPTIONS.iter().map(|option| option.help.key)
}

/// Returns the keys of [`OPTIONS`] that describe one part of a function.
pub(super) fn function_keys(scope: OptionScope) -> impl Iterator<Item = &'static str> + Clone {
    let options = OPTIONS.iter().filter(move |option| option.scope == scope);
    options.map(|option| option.help.key)
}

/// Returns [`SERVER_OPTIONS`] and [`OPTIONS`].
pub(super) fn server_options() -> impl Iterator<Item = &'static OptionHelp> + Clone {
    let options = OPTIONS.iter().map(|option| &option.help);
    SERVER_OPTIONS.iter().chain(options)
}

/// Returns the keys of [`SERVER_OPTIONS`] and [`OPTIONS`].
pub(super) fn server_keys() -> impl Iterator<Item = &'static str> + Clone {
    server_options().map(|option| option.key)
}

impl FunctionOptions {
    /// Parses the values of options.
    ///
    /// # Errors
    /// [`OptionError`].
    pub fn from_text(mut text: OptionText) -> Result<Self, OptionError> {
        text.reject_unknown(keys())?;
        let path = text.clone().take_value("path", str::parse)?;
        let mut options = Self::new(path.ok_or(NO_PATH)?);
        if text.get("id").is_some() && text.get("lease").is_some() {
            return Err(OptionError::Conflict {
                key: "id",
                other: "lease",
                why: "they are two names of one option",
            });
        }
        let mut given: Vec<&FunctionOption> = Vec::new();
        for option in OPTIONS {
            let set = |value: &str| (option.set)(&mut options, value);
            given.extend(text.take_value(option.help.key, set)?.map(|()| option));
        }
        for option in given {
            let mut refusals = option.refusals.iter();
            if let Some((_, why)) = refusals.find(|(is_refused, _)| is_refused(&options)) {
                return Err(OptionError::NotApplicable {
                    key: option.help.key,
                    path: options.path,
                    why,
                });
            }
        }
        options.check()?;
        Ok(options)
    }
}

impl FromStr for FunctionOptions {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<Self, OptionError> {
        Self::from_text(text.parse()?)
    }
}

impl OptionText {
    /// Returns the files that options name, with the keys of the options.
    #[must_use]
    pub fn named_files(&self) -> Vec<(&'static str, PathBuf)> {
        let files = OPTIONS.iter().filter_map(|option| {
            let value = self.get(option.help.key)?;
            let is_file = option
                .names_file
                .is_some_and(|names_file| names_file(value));
            is_file.then(|| (option.help.key, value.into()))
        });
        files.collect()
    }

    /// Makes relative paths absolute, starting at the directory `dir`.
    #[must_use]
    pub fn with_absolute_paths(self, dir: &Path) -> Self {
        let named = self.named_files().into_iter();
        let drive = self.get("path").and_then(|path| path.parse().ok());
        let drive = drive.and_then(|path| match path {
            DrivePath::File(path) => Some(("path", path)),
            _ => None,
        });
        let socket = self.get("socket").map(|path| ("socket", path.into()));
        let paths = named.chain(drive).chain(socket).collect::<Vec<_>>();
        paths
            .into_iter()
            .fold(self, |text, (key, path)| match dir.join(path).to_str() {
                Some(path) => text.with_value(key, Some(path)),
                None => text,
            })
    }
}

/// Value of the option `faults` that names no file.
#[cfg(feature = "toml")]
const NO_FAULTS: &str = "none";

fn parse_number(text: &str) -> Result<Option<u64>, ValueError> {
    Ok(Some(text.parse()?))
}

fn set_timeout(options: &mut FunctionOptions, text: &str) -> Result<(), ValueError> {
    options.drive.timeout = parse_timeout(text)?;
    match (options.drive.timeout, &options.path) {
        (None, DrivePath::Pci(_)) => Err("A physical drive needs one: without it, guests wait forever for commands that the drive loses".into()),
        _ => Ok(()),
    }
}

/// Minimum memory limit. A limit without its unit, such as 16 instead of 16G, is below the minimum and therefore refused.
const MEMORY_LIMIT_MIN: u64 = 1 << 20;

/// Parses a memory limit.
///
/// # Errors
/// The text is no size, or the size is too small for any VM.
pub fn parse_memory_limit(text: &str) -> Result<ByteSize, String> {
    let limit: ByteSize = text.parse().map_err(|error: SizeError| error.to_string())?;
    match limit.0 >= MEMORY_LIMIT_MIN {
        true => Ok(limit),
        false => Err(format!(
            "That is too little memory for a VM: write at least {}, as in 16G",
            ByteSize(MEMORY_LIMIT_MIN)
        )),
    }
}

fn parse_queues(text: &str) -> Result<u16, String> {
    text.parse()
        .ok()
        .filter(|queues| (1..=MAX_QUEUE_PAIRS).contains(queues))
        .ok_or_else(|| format!("A function has 1 to {MAX_QUEUE_PAIRS} I/O queue pairs"))
}

fn parse_reserve(text: &str) -> Result<u16, String> {
    let pairs: Option<u16> = text.parse().ok();
    pairs.ok_or_else(|| {
        format!("A function has 0 to {MAX_QUEUE_PAIRS} queue pairs for itself alone")
    })
}

fn parse_namespace(text: &str) -> Result<Nsid, &'static str> {
    text.parse()
        .ok()
        .filter(|nsid| (1..Nsid::BROADCAST.0).contains(nsid))
        .map(Nsid)
        .ok_or("A namespace is a number from 1 to 4294967294; `nvme-mpt drives` shows them")
}

fn parse_format(text: &str) -> Result<bool, &'static str> {
    match text {
        "raw" => Ok(true),
        _ => Err("A guest gets the bytes of a drive as they are: use raw, or leave it out"),
    }
}

/// Value of the option `timeout` that stands for no timeout.
const NO_TIMEOUT: &str = "none";

fn parse_timeout(text: &str) -> Result<Option<Duration>, String> {
    if text == NO_TIMEOUT {
        return Ok(None);
    }
    text.parse()
        .ok()
        .filter(|seconds| (1..=MAX_TIMEOUT).contains(seconds))
        .map(|seconds| Some(Duration::from_secs(seconds)))
        .ok_or_else(|| format!("A timeout is 1 to {MAX_TIMEOUT} whole seconds, or {NO_TIMEOUT}"))
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: Result<u32, _> = text.parse();
    let seconds = seconds.map_err(|_| format!("It is 0 to {} whole seconds", u32::MAX))?;
    Ok(Duration::from_secs(seconds.into()))
}

fn parse_serial(text: &str) -> Result<String, String> {
    let visible = text.bytes().all(|byte| matches!(byte, b' '..=b'~'));
    // The serial number is padded with spaces, so spaces around it would be lost.
    if text.len() > MAX_SERIAL || !visible || text.trim() != text {
        return Err(format!(
            "A serial number has 1 to {MAX_SERIAL} ASCII characters, without spaces around it"
        ));
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_has_one_entry() {
        for (place, key) in server_keys().enumerate() {
            assert!(
                !server_keys().take(place).any(|other| other == key),
                "{key}"
            );
        }
    }

    #[test]
    fn relative_paths_become_absolute() {
        for (given, expected) in [
            ("socket=a.sock,path=d.img", "socket=/f/a.sock,path=/f/d.img"),
            ("path=memory:1G,profile=ssd", "path=memory:1G,profile=ssd"),
            ("path=0000:01:00.0", "path=0000:01:00.0"),
            ("profile=./mine.toml", "profile=/f/./mine.toml"),
            ("faults=plan.toml", "faults=/f/plan.toml"),
            ("faults=none,path=/d", "faults=none,path=/d"),
            ("path=\"a,b.img\"", "path=\"/f/a,b.img\""),
        ] {
            let text: OptionText = given.parse().unwrap();
            let absolute = text.with_absolute_paths(Path::new("/f"));
            assert_eq!(absolute.to_string(), expected);
            let again: OptionText = absolute.to_string().parse().unwrap();
            assert_eq!(again, absolute);
        }
    }
}

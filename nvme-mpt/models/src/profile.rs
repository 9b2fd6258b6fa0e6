//! Profiles: descriptions of modelled drives in TOML. The built-in profiles in `resources/drives/` explain every field.

use std::fmt;
use std::fs;
use std::io;
use std::path::Path;
use std::str::FromStr;

use serde::de::{self, Deserialize, Deserializer};

use super::time::TimeSpan;
use nvme_lease::range::ByteSize;

/// The built-in profiles, by name.
const BUILT_IN: &[(&str, &str)] = &[
    ("nvm", include_str!("../drives/nvm.toml")),
    ("ssd", include_str!("../drives/ssd.toml")),
    ("zns", include_str!("../drives/zns.toml")),
    ("zns-ssd", include_str!("../drives/zns-ssd.toml")),
    ("kv", include_str!("../drives/kv.toml")),
    ("kv-ssd", include_str!("../drives/kv-ssd.toml")),
];

/// Maximum size of a profile in bytes. The limit detects a path to a wrong, large file.
const MAX_PROFILE_BYTES: u64 = 64 << 10;

/// Reason why a profile cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// There is no built-in profile with this name.
    #[error(
        "There is no profile `{name}`; use {}, or a path with a slash to one of your own, as in ./drive.toml",
        built_in_names()
    )]
    Unknown {
        /// The requested name.
        name: String,
    },
    /// The profile's file cannot be read.
    #[error("Profile `{path}` cannot be read")]
    Read {
        /// Path of the file.
        path: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// This build cannot parse profiles.
    #[error(
        "Profile `{source_name}` cannot be read: this program was built without the feature `toml`"
    )]
    NotBuilt {
        /// Name or path of the profile.
        source_name: String,
    },
    /// The text is not a valid profile.
    #[cfg(feature = "toml")]
    #[error(
        "Profile `{source_name}` is invalid; resources/drives has examples with every field explained"
    )]
    Syntax {
        /// Name or path of the profile.
        source_name: String,
        /// The parse error with its position.
        source: Box<toml::de::Error>,
    },
    /// A field has a value out of range.
    #[error("Profile `{source_name}`: {field} cannot be {value}; {allowed}")]
    Value {
        /// Name or path of the profile.
        source_name: String,
        /// Name of the field.
        field: &'static str,
        /// Value of the field.
        value: String,
        /// Description of the allowed values.
        allowed: &'static str,
    },
}

fn built_in_names() -> String {
    let names: Vec<&str> = BUILT_IN.iter().map(|(name, _)| *name).collect();
    names.join(", ")
}

/// A size in bytes, or a bandwidth in bytes per second: a number with a suffix K, M, G or T (powers of 1024).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProfileSize(pub u64);

/// Deserializes a value from a string.
fn from_text<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: FromStr<Err: fmt::Display>,
    D: Deserializer<'de>,
{
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(de::Error::custom)
}

impl<'de> Deserialize<'de> for ProfileSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        from_text(deserializer).map(|ByteSize(bytes)| Self(bytes))
    }
}

impl<'de> Deserialize<'de> for TimeSpan {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        from_text(deserializer)
    }
}

/// Description of a modelled drive.
#[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Deserialize)]
#[serde(tag = "model", rename_all = "lowercase")]
pub enum DriveProfile {
    /// A drive without erase blocks.
    Nvm(NvmProfile),
    /// A drive of NAND flash.
    Ssd(SsdProfile),
    /// A zoned drive.
    Zns(ZnsProfile),
    /// A key-value drive.
    Kv(KvProfile),
}

/// Profile with `model = "nvm"`: a drive without erase blocks.
#[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NvmProfile {
    /// Number of units that work in parallel, each on one stripe; 1 to 1024.
    pub units: u16,
    /// Size of a stripe, whose bytes are on one unit: a power of two, 4K to 1M.
    pub stripe: ProfileSize,
    /// Latency and bandwidth of reads.
    pub read: NvmRates,
    /// Latency and bandwidth of writes.
    pub write: NvmRates,
}

/// Latency and bandwidth of reads or writes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NvmRates {
    /// Latency of a command of one stripe on an idle drive.
    pub latency: TimeSpan,
    /// Bandwidth of all units together, in bytes per second.
    pub bandwidth: ProfileSize,
}

/// Profile with `model = "ssd"`. The backing store determines the drive's capacity.
#[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SsdProfile {
    /// Number of channels to the flash; 1 to 64.
    pub channels: u16,
    /// Number of dies on each channel; 1 to 64.
    pub dies_per_channel: u16,
    /// Number of FTL instances, among which the dies are divided equally; 1 to 64.
    pub instances: u16,
    /// Size of a flash page, which a die reads in one operation: a multiple of 4K.
    pub flash_page: ProfileSize,
    /// Size of a program unit, which a die programs in one operation: a multiple of a flash page.
    pub program_unit: ProfileSize,
    /// Size of an erase block, which a die erases in one operation: a multiple of a program unit, up to 64M.
    pub block: ProfileSize,
    /// Flash beyond the drive's capacity, in percent of the capacity; 3 to 100.
    pub over_provisioning: u8,
    /// Time in which a die reads a flash page.
    pub read: TimeSpan,
    /// Time in which a die programs a program unit.
    pub program: TimeSpan,
    /// Time in which a die erases an erase block.
    pub erase: TimeSpan,
    /// Bandwidth of each channel, in bytes per second.
    pub channel_bandwidth: ProfileSize,
    /// Bandwidth of the link to the host, in bytes per second.
    pub link_bandwidth: ProfileSize,
    /// Size of the buffer for data that is not programmed yet: at least two program units for each FTL instance.
    pub write_buffer: ProfileSize,
    /// Time of the controller for each read.
    pub read_overhead: TimeSpan,
    /// Time of the controller for each write.
    pub write_overhead: TimeSpan,
}

/// Profile with `model = "zns"`. The drive has as many zones as fit into the backing store.
#[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ZnsProfile {
    /// Bytes from the start of a zone to the start of the next zone: a multiple of 4K, 64K to 64G. Linux requires a power of
    /// two.
    pub zone_size: ProfileSize,
    /// Writable bytes of a zone: a multiple of 4K.
    pub zone_capacity: ProfileSize,
    /// Maximum number of open zones on the whole drive; 1 to 1024.
    pub max_open: u32,
    /// Maximum number of open and closed zones together on the whole drive: at least `max_open`, at most 1024.
    pub max_active: u32,
    /// Maximum bytes of a Zone Append: a power of two, 4K to 1M.
    pub append_limit: ProfileSize,
    /// Timing as of a drive without erase blocks. Without `timing` and `flash`, commands are not delayed.
    pub timing: Option<NvmProfile>,
    /// Flash on which the zones are, in place of `timing`.
    pub flash: Option<ZnsFlash>,
}

impl ZnsProfile {
    /// Maximum number of zones of a drive. The poller serves no other queue while it writes a report of all zones, so this time
    /// is limited.
    pub const ZONES_MAX: u64 = 1 << 16;
}

/// Flash of a zoned drive.
#[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ZnsFlash {
    /// Number of channels to the flash; 1 to 64.
    pub channels: u16,
    /// Number of dies on each channel; 1 to 64.
    pub dies_per_channel: u16,
    /// Number of dies on which a zone is: a divisor of the number of all dies.
    pub dies_per_zone: u16,
    /// Size of a flash page, which a die reads in one operation: a multiple of 4K, up to 1M.
    pub flash_page: ProfileSize,
    /// Size of a program unit, which a die programs in one operation: a multiple of a flash page.
    pub program_unit: ProfileSize,
    /// Time in which a die reads a flash page.
    pub read: TimeSpan,
    /// Time in which a die programs a program unit.
    pub program: TimeSpan,
    /// Time in which a die erases its erase block of a zone.
    pub erase: TimeSpan,
    /// Bandwidth of each channel, in bytes per second.
    pub channel_bandwidth: ProfileSize,
    /// Bandwidth of the link to the host, in bytes per second.
    pub link_bandwidth: ProfileSize,
    /// Size of the buffer for data that is not programmed yet: at least a program unit for each active zone, and one more.
    pub write_buffer: ProfileSize,
    /// Time of the controller for each read.
    pub read_overhead: TimeSpan,
    /// Time of the controller for each write.
    pub write_overhead: TimeSpan,
}

/// Profile with `model = "kv"`. The backing store determines the drive's capacity.
#[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvProfile {
    /// Maximum size of a value in bytes; 1 to 1M.
    pub max_value: ProfileSize,
    /// Timing. Without `timing`, commands are not delayed.
    pub timing: Option<KvTiming>,
}

/// Timing of a key-value drive.
#[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvTiming {
    /// Number of operations that run in parallel; 1 to 256.
    pub units: u16,
    /// Latency and bandwidth of Store.
    pub store: KvRates,
    /// Latency and bandwidth of Retrieve. A List transfers its keys with this bandwidth.
    pub retrieve: KvRates,
    /// Time of a Delete.
    pub delete: TimeSpan,
    /// Time of an Exist.
    pub exist: TimeSpan,
    /// Time of a List that returns no keys.
    pub list: TimeSpan,
}

/// Latency and bandwidth of an operation with a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvRates {
    /// Latency of an operation with an empty value on an idle drive.
    pub latency: TimeSpan,
    /// Bandwidth of all values in the direction of the operation, in bytes per second.
    pub bandwidth: ProfileSize,
}

/// Allowed range of bandwidths in bytes per second: 1 MiB/s to 1 TiB/s.
const BANDWIDTHS: std::ops::RangeInclusive<u64> = 1 << 20..=1 << 40;

impl DriveProfile {
    /// Loads a built-in profile by name, or a profile file by a path that contains a slash.
    ///
    /// # Errors
    /// Returns any [`ProfileError`].
    pub fn load(name: &str) -> Result<Self, ProfileError> {
        if !name.contains('/') {
            return Self::find_built_in(name);
        }
        let failed = |source| ProfileError::Read {
            path: name.to_owned(),
            source,
        };
        let path = Path::new(name);
        if fs::metadata(path).map_err(failed)?.len() > MAX_PROFILE_BYTES {
            return Err(failed(io::ErrorKind::FileTooLarge.into()));
        }
        Self::parse(name, &fs::read_to_string(path).map_err(failed)?)
    }

    /// Returns whether the model saves state in a file next to the drive's regular file.
    #[must_use]
    pub fn has_state_file(&self) -> bool {
        matches!(self, Self::Ssd(_) | Self::Zns(_))
    }

    /// Returns a built-in profile.
    ///
    /// # Errors
    /// [`ProfileError::Unknown`] and [`ProfileError::NotBuilt`].
    pub fn find_built_in(name: &str) -> Result<Self, ProfileError> {
        match BUILT_IN.iter().find(|(known, _)| *known == name) {
            Some((_, text)) => Self::parse(name, text),
            None => Err(ProfileError::Unknown {
                name: name.to_owned(),
            }),
        }
    }

    /// Parses a profile. In errors, `source` names the source of the text.
    ///
    /// # Errors
    /// `ProfileError::Syntax`, [`ProfileError::Value`], and [`ProfileError::NotBuilt`] without the feature `toml`.
    pub fn parse(source: &str, text: &str) -> Result<Self, ProfileError> {
        let profile = Self::read(source, text)?;
        let checks = match &profile {
            Self::Nvm(nvm) => nvm.check(),
            Self::Ssd(ssd) => ssd.check(),
            Self::Zns(zns) => zns.check(),
            Self::Kv(kv) => kv.check(),
        };
        match checks {
            Ok(()) => Ok(profile),
            Err(UnusableProfileValue {
                field,
                value,
                allowed,
            }) => Err(ProfileError::Value {
                source_name: source.to_owned(),
                field,
                value,
                allowed,
            }),
        }
    }

    #[cfg(feature = "toml")]
    fn read(source_name: &str, text: &str) -> Result<Self, ProfileError> {
        toml::from_str(text).map_err(|source| ProfileError::Syntax {
            source_name: source_name.to_owned(),
            source: Box::new(source),
        })
    }

    #[cfg(not(feature = "toml"))]
    fn read(source: &str, _: &str) -> Result<Self, ProfileError> {
        Err(ProfileError::NotBuilt {
            source_name: source.to_owned(),
        })
    }
}

/// A field's value that is out of range.
#[derive(Debug)]
pub(super) struct UnusableProfileValue {
    field: &'static str,
    value: String,
    allowed: &'static str,
}

/// Returns an error for the field if `holds` is false.
pub(super) fn require(
    holds: bool,
    field: &'static str,
    value: impl fmt::Display,
    allowed: &'static str,
) -> Result<(), UnusableProfileValue> {
    if holds {
        return Ok(());
    }
    Err(UnusableProfileValue {
        field,
        value: value.to_string(),
        allowed,
    })
}

/// Returns an error for a bandwidth out of range.
pub(super) fn require_bandwidth(
    field: &'static str,
    size: ProfileSize,
) -> Result<(), UnusableProfileValue> {
    let allowed = "a bandwidth is 1M to 1T bytes per second";
    require(
        BANDWIDTHS.contains(&size.0),
        field,
        ByteSize(size.0),
        allowed,
    )
}

/// Returns an error for a number of channels or dies out of range.
fn require_dies(channels: u16, dies_per_channel: u16) -> Result<(), UnusableProfileValue> {
    let few = |number: u16| (1..=64).contains(&number);
    let allowed = "a drive has 1 to 64";
    require(few(channels), "channels", channels, allowed)?;
    let (dies, allowed) = (dies_per_channel, "a channel has 1 to 64");
    require(few(dies), "dies_per_channel", dies, allowed)
}

/// Returns whether a size is a multiple of `of`, and is not 0.
fn is_multiple(size: ProfileSize, of: u64) -> bool {
    size.0 != 0 && size.0.is_multiple_of(of)
}

/// Checks the size of a flash page, and that a program unit is a multiple of it.
fn require_units(
    flash_page: ProfileSize,
    program_unit: ProfileSize,
) -> Result<(), UnusableProfileValue> {
    let is_valid = is_multiple(flash_page, 4096) && flash_page.0 <= 1 << 20;
    let allowed = "a flash page is a multiple of 4K, up to 1M";
    require(is_valid, "flash_page", ByteSize(flash_page.0), allowed)?;
    let is_valid = is_multiple(program_unit, flash_page.0);
    let allowed = "a program unit is a multiple of a flash page";
    require(is_valid, "program_unit", ByteSize(program_unit.0), allowed)
}

impl NvmProfile {
    fn check(&self) -> Result<(), UnusableProfileValue> {
        let units = (1..=1024).contains(&self.units);
        require(units, "units", self.units, "a drive has 1 to 1024")?;
        let ProfileSize(stripe) = self.stripe;
        let is_valid = stripe.is_power_of_two() && (4096..=1 << 20).contains(&stripe);
        let allowed = "a stripe is a power of two, from 4K to 1M";
        require(is_valid, "stripe", ByteSize(stripe), allowed)?;
        require_bandwidth("read.bandwidth", self.read.bandwidth)?;
        require_bandwidth("write.bandwidth", self.write.bandwidth)
    }
}

impl SsdProfile {
    fn check(&self) -> Result<(), UnusableProfileValue> {
        require_dies(self.channels, self.dies_per_channel)?;
        let all = self.channels * self.dies_per_channel;
        let few = (1..=64).contains(&self.instances);
        let is_valid = few && all.is_multiple_of(self.instances);
        let allowed = "a drive has 1 to 64, and its dies are divided evenly among them";
        require(is_valid, "instances", self.instances, allowed)?;
        self.check_sizes()?;
        let is_valid = (3..=100).contains(&self.over_provisioning);
        let allowed = "it is 3 to 100 percent";
        require(
            is_valid,
            "over_provisioning",
            self.over_provisioning,
            allowed,
        )?;
        require_bandwidth("channel_bandwidth", self.channel_bandwidth)?;
        require_bandwidth("link_bandwidth", self.link_bandwidth)
    }

    fn check_sizes(&self) -> Result<(), UnusableProfileValue> {
        let shown = |size: ProfileSize| ByteSize(size.0);
        require_units(self.flash_page, self.program_unit)?;
        let is_valid = is_multiple(self.block, self.program_unit.0) && self.block.0 <= 64 << 20;
        let allowed = "a block is a multiple of a program unit, up to 64M";
        require(is_valid, "block", shown(self.block), allowed)?;
        // While one program unit of each instance is filled, the space of the previous program unit is not free yet.
        let least = 2 * u64::from(self.instances) * self.program_unit.0;
        let is_valid = (least..=1 << 30).contains(&self.write_buffer.0);
        let allowed =
            "a write buffer has two program units for each instance at least, and 1G at most";
        require(is_valid, "write_buffer", shown(self.write_buffer), allowed)
    }
}

impl ZnsProfile {
    fn check(&self) -> Result<(), UnusableProfileValue> {
        let ProfileSize(size) = self.zone_size;
        let is_valid = size.is_multiple_of(4096) && (64 << 10..=64 << 30).contains(&size);
        let allowed = "a zone is a multiple of 4K, from 64K to 64G";
        require(is_valid, "zone_size", ByteSize(size), allowed)?;
        let ProfileSize(capacity) = self.zone_capacity;
        let is_valid = capacity.is_multiple_of(4096) && (4096..=size).contains(&capacity);
        let allowed = "a zone capacity is a multiple of 4K, up to zone_size";
        require(is_valid, "zone_capacity", ByteSize(capacity), allowed)?;
        let is_valid = (1..=1024).contains(&self.max_open);
        require(
            is_valid,
            "max_open",
            self.max_open,
            "1 to 1024 zones are open",
        )?;
        let is_valid = (self.max_open..=1024).contains(&self.max_active);
        let allowed = "at least max_open zones are active, and 1024 at most";
        require(is_valid, "max_active", self.max_active, allowed)?;
        let ProfileSize(limit) = self.append_limit;
        let is_valid = limit.is_power_of_two() && (4096..=1 << 20).contains(&limit);
        let allowed = "the limit of a Zone Append is a power of two, from 4K to 1M";
        require(is_valid, "append_limit", ByteSize(limit), allowed)?;
        if let (Some(_), Some(_)) = (&self.timing, &self.flash) {
            let allowed = "a drive has [timing] or [flash]";
            return require(false, "flash", "beside [timing]", allowed);
        }
        if let Some(flash) = &self.flash {
            flash.check(self)?;
        }
        self.timing.as_ref().map_or(Ok(()), NvmProfile::check)
    }
}

impl ZnsFlash {
    fn check(&self, zns: &ZnsProfile) -> Result<(), UnusableProfileValue> {
        require_dies(self.channels, self.dies_per_channel)?;
        let dies = self.channels * self.dies_per_channel;
        let is_valid = self.dies_per_zone != 0 && dies.is_multiple_of(self.dies_per_zone);
        let allowed = "a zone lies on a divisor of all dies";
        require(is_valid, "dies_per_zone", self.dies_per_zone, allowed)?;
        require_units(self.flash_page, self.program_unit)?;
        let ProfileSize(buffer) = self.write_buffer;
        // Each active zone may have a partial program unit, and one more program unit needs space.
        let least = (u64::from(zns.max_active) + 1).saturating_mul(self.program_unit.0);
        let allowed =
            "a write buffer has a program unit for each active zone and one more, and 1G at most";
        let is_valid = (least..=1 << 30).contains(&buffer);
        require(is_valid, "write_buffer", ByteSize(buffer), allowed)?;
        require_bandwidth("channel_bandwidth", self.channel_bandwidth)?;
        require_bandwidth("link_bandwidth", self.link_bandwidth)
    }
}

impl KvProfile {
    /// Maximum size of a value in bytes: the maximum that a command transfers.
    const MAX_VALUE: u32 = 1 << 20;

    fn check(&self) -> Result<(), UnusableProfileValue> {
        let is_valid = (1..=u64::from(Self::MAX_VALUE)).contains(&self.max_value.0);
        let allowed = "the largest value has 1 to 1M bytes";
        require(is_valid, "max_value", ByteSize(self.max_value.0), allowed)?;
        self.timing.as_ref().map_or(Ok(()), KvTiming::check)
    }

    /// Returns [`Self::max_value`] as a number, but at most the maximum that a command transfers.
    #[must_use]
    pub fn max_value_bytes(&self) -> u32 {
        u32::try_from(self.max_value.0).map_or(Self::MAX_VALUE, |bytes| bytes.min(Self::MAX_VALUE))
    }
}

impl KvTiming {
    fn check(&self) -> Result<(), UnusableProfileValue> {
        let units = (1..=256).contains(&self.units);
        require(units, "timing.units", self.units, "a drive has 1 to 256")?;
        require_bandwidth("timing.store.bandwidth", self.store.bandwidth)?;
        require_bandwidth("timing.retrieve.bandwidth", self.retrieve.bandwidth)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NVM: &str = "model = \"nvm\"\nunits = 2\nstripe = \"4K\"\n\
        read = { latency = \"1us\", bandwidth = \"1G\" }\nwrite = { latency = \"2us\", bandwidth = \"1G\" }\n";

    #[test]
    fn a_drive_of_flash_has_sizes_that_fit_one_another() {
        let text = include_str!("../drives/ssd.toml");
        for (from, to, expected) in [
            ("channels = 8", "channels = 0", "channels cannot be 0"),
            (
                "dies_per_channel = 2",
                "dies_per_channel = 65",
                "dies_per_channel cannot be 65",
            ),
            ("instances = 4", "instances = 5", "divided evenly"),
            (
                "flash_page = \"32K\"",
                "flash_page = \"5000\"",
                "flash_page cannot be 5000",
            ),
            (
                "program_unit = \"64K\"",
                "program_unit = \"48K\"",
                "program_unit cannot be 48K",
            ),
            ("block = \"4M\"", "block = \"65M\"", "block cannot be 65M"),
            (
                "write_buffer = \"8M\"",
                "write_buffer = \"511K\"",
                "write_buffer cannot be 511K",
            ),
            (
                "over_provisioning = 7",
                "over_provisioning = 2",
                "over_provisioning cannot be 2",
            ),
        ] {
            assert!(text.contains(from), "{from}");
            let message = error_text(&text.replacen(from, to, 1));
            assert!(message.contains(expected), "{expected}: {message}");
        }
    }

    fn error_text(text: &str) -> String {
        let error = DriveProfile::parse("here", text).expect_err(text);
        let source = std::error::Error::source(&error).map_or(String::new(), |s| s.to_string());
        format!("{error}\n{source}")
    }

    #[test]
    fn values_have_a_largest_size() {
        let profile = |size: &str| format!("model = \"kv\"\nmax_value = \"{size}\"\n");
        for size in ["1", "1M"] {
            DriveProfile::parse("here", &profile(size)).expect(size);
        }
        for size in ["0", "2M"] {
            let message = error_text(&profile(size));
            assert!(message.contains("1 to 1M bytes"), "{message}");
        }
    }

    #[test]
    fn zones_lie_on_flash_that_has_room_for_them() {
        let text = include_str!("../drives/zns-ssd.toml");
        for (from, to, expected) in [
            ("channels = 8", "channels = 65", "channels cannot be 65"),
            (
                "dies_per_zone = 8",
                "dies_per_zone = 5",
                "dies_per_zone cannot be 5",
            ),
            (
                "dies_per_zone = 8",
                "dies_per_zone = 0",
                "dies_per_zone cannot be 0",
            ),
            (
                "program_unit = \"96K\"",
                "program_unit = \"100K\"",
                "program_unit cannot be 100K",
            ),
            (
                "write_buffer = \"8M\"",
                "write_buffer = \"1439K\"",
                "write_buffer cannot be 1439K",
            ),
            (
                "[flash]",
                "timing = { units = 1, stripe = \"4K\", read = { latency = \"1us\", bandwidth = \"1G\" }, \
                 write = { latency = \"1us\", bandwidth = \"1G\" } }\n[flash]",
                "flash cannot be beside [timing]",
            ),
        ] {
            assert!(text.contains(from), "{from}");
            let message = error_text(&text.replacen(from, to, 1));
            assert!(message.contains(expected), "{expected}: {message}");
        }
    }

    #[test]
    fn zones_have_any_size_of_whole_pages() {
        let text = include_str!("../drives/zns.toml");
        let with = |size: &str| text.replacen("\"64M\"", &format!("\"{size}\""), 1);
        for size in ["96M", "49156K", "64G"] {
            DriveProfile::parse("here", &with(size)).expect(size);
        }
        for (size, expected) in [
            (
                "98305K",
                "zone_size cannot be 98305K; a zone is a multiple of 4K",
            ),
            ("32K", "zone_size cannot be 32K"),
            ("32M", "zone_capacity cannot be 48M"),
        ] {
            let message = error_text(&with(size));
            assert!(message.contains(expected), "{expected}: {message}");
        }
    }

    #[test]
    fn operations_on_keys_have_rates() {
        let text = include_str!("../drives/kv-ssd.toml");
        for (from, to, expected) in [
            ("units = 16", "units = 0", "timing.units cannot be 0"),
            ("units = 16", "units = 257", "timing.units cannot be 257"),
            ("\"1G\"", "\"1K\"", "timing.store.bandwidth cannot be 1K"),
            ("\"2G\"", "\"2T\"", "timing.retrieve.bandwidth cannot be 2T"),
            ("exist =", "exists =", "unknown field `exists`"),
        ] {
            assert!(text.contains(from), "{from}");
            let message = error_text(&text.replacen(from, to, 1));
            assert!(message.contains(expected), "{expected}: {message}");
        }
    }

    #[test]
    fn all_that_come_along_are_sound() {
        for (name, _) in BUILT_IN {
            DriveProfile::load(name).expect(name);
        }
    }

    #[test]
    fn a_profile_is_read_from_a_file() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("mine.toml");
        let name = path.to_str().expect("UTF-8");
        assert!(matches!(
            DriveProfile::load(name),
            Err(ProfileError::Read { .. })
        ));
        fs::write(&path, NVM).expect("written");
        let DriveProfile::Nvm(nvm) = DriveProfile::load(name).expect("sound") else {
            panic!("another model");
        };
        assert_eq!((nvm.units, nvm.write.latency), (2, TimeSpan(2000)));
        fs::write(&path, vec![b'#'; MAX_PROFILE_BYTES as usize + 1]).expect("written");
        assert!(matches!(
            DriveProfile::load(name),
            Err(ProfileError::Read { .. })
        ));
    }

    #[test]
    fn errors_name_the_problem() {
        let unknown = DriveProfile::load("optane")
            .expect_err("unknown")
            .to_string();
        assert!(unknown.contains("`optane`; use nvm, ssd"), "{unknown}");
        for (from, to, expected) in [
            (
                "units = 2",
                "units = 0",
                "units cannot be 0; a drive has 1 to 1024",
            ),
            ("\"4K\"", "\"3K\"", "stripe cannot be 3K"),
            ("\"1G\"", "\"1023K\"", "read.bandwidth cannot be 1023K"),
            ("\"1us\"", "\"1\"", "\"1\" is not a time"),
            ("units", "unit", "unknown field `unit`"),
            ("\"nvm\"", "\"tape\"", "unknown variant `tape`"),
        ] {
            let message = error_text(&NVM.replacen(from, to, 1));
            assert!(message.contains(expected), "{expected}: {message}");
        }
    }
}

//! A function in a VMM's own configuration, with a field for each option. A VMM's API and configuration files use this form
//! instead of an option string.

use std::path::PathBuf;

use crate::drives::{DrivePath, is_block_device};
use nvme_models::DriveProfile;
use nvme_mpt_lease_protocol::sockets_dir;
use serde::{Deserialize, Serialize};

use super::error::OptionError;
use super::function::{FunctionOptions, LbaSize};
use super::key_values::{KeyValues, parse_value};
use super::parsed_options::ParsedFunctionOptions;
use super::server_options::OptionText;

/// Default directory of the lease ledger.
///
/// The ledger must survive a power failure, so that a range stays with its owner until an operator releases it. So the
/// directory is not in /run, which a restart of the host empties.
pub const STATE_DIR: &str = "/var/lib/nvme-mpt";

/// Configuration of a function: the options of [`FunctionOptions`] as text.
///
/// Unknown keys are errors, because a misspelt key is dangerous: `rang` for `range` would lease the whole drive. A type that
/// flattens this type (`serde(flatten)`) must refuse unknown keys itself.
///
/// Unlike an option string, this type has no field `id`, since a device's id is unique within one VM only. The field `lease` is
/// the id of the lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FunctionConfig {
    /// The drive.
    pub path: String,
    /// Range of the drive for the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range: Option<String>,
    /// Size of the lease, whose extents are allocated anywhere on the drive.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<String>,
    /// Unit of which the extents of a lease with `size` are multiples.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// Maximum number of I/O queue pairs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queues: Option<u16>,
    /// Number of the physical drive's I/O queue pairs to reserve for the function.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserve: Option<u16>,
    /// Maximum data transfer of a command.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mdts: Option<String>,
    /// Name of the lease.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lease: Option<String>,
    /// Mode of the guest's doorbells: whether their writes exit to the VMM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub doorbells: Option<String>,
    /// Doorbell stride in bytes.
    #[serde(rename = "doorbell-stride", skip_serializing_if = "Option::is_none")]
    pub doorbell_stride: Option<u16>,
    /// Polling policy of the guest's queues.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub poll: Option<String>,
    /// Names of adaptive policies whose parameters stay fixed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fixed: Option<String>,
    /// Kinds of files that may back the VM's memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<String>,
    /// Maximum bytes of the VM's memory that are mapped for a physical drive.
    #[serde(
        default,
        rename = "memory-limit",
        skip_serializing_if = "Option::is_none"
    )]
    pub memory_limit: Option<String>,
    /// Maximum I/O commands per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops: Option<String>,
    /// Maximum bytes per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<String>,
    /// Weight of the function against other guests on shared queue pairs of a physical drive.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<u16>,
    /// Policy for data that another lease id left in the leased bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
    /// Serial number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// Logical block size of a software drive, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lba: Option<u32>,
    /// Name of the drive's label.
    #[serde(default, rename = "drive-id", skip_serializing_if = "Option::is_none")]
    pub drive_id: Option<String>,
    /// With `raw`, the leased bytes may begin with a disk image header. A guest then sees the image file's bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// Performance model of a software drive.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Fault schedule of a software drive.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub faults: Option<String>,
    /// With `on`, a `memory:` drive allocates all its memory when it is opened. Otherwise, it allocates memory as blocks are
    /// written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub populate: Option<String>,
    /// Namespace of a physical drive.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<u32>,
    /// Timeout of the drive's commands in seconds; the default depends on the kind of drive.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout: Option<u64>,
    /// Arbitration mechanism with which a physical drive is enabled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arbitration: Option<String>,
    /// Maximum time in seconds that the function waits for a new drive server after the old one has ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reconnect: Option<u64>,
    /// Directory of the lease ledger.
    pub state_dir: PathBuf,
}

const NO_PATH: OptionError = OptionError::Missing {
    key: "path",
    example: "DRIVE, a PCI address, a file, a block device, memory:SIZE or null:SIZE",
};

fn default_state_dir() -> PathBuf {
    STATE_DIR.into()
}

impl Default for FunctionConfig {
    /// Returns a configuration with an empty drive path and the default of each option.
    fn default() -> Self {
        Self {
            path: String::new(),
            range: None,
            size: None,
            unit: None,
            queues: None,
            reserve: None,
            mdts: None,
            lease: None,
            doorbells: None,
            doorbell_stride: None,
            poll: None,
            fixed: None,
            memory: None,
            memory_limit: None,
            iops: None,
            bandwidth: None,
            weight: None,
            data: None,
            serial: None,
            lba: None,
            drive_id: None,
            format: None,
            profile: None,
            faults: None,
            populate: None,
            namespace: None,
            timeout: None,
            arbitration: None,
            reconnect: None,
            state_dir: default_state_dir(),
        }
    }
}

impl FunctionConfig {
    /// All keys of the configuration.
    pub const KEYS: &[&str] = &[
        "path",
        "range",
        "size",
        "unit",
        "queues",
        "reserve",
        "mdts",
        "lease",
        "doorbells",
        "doorbell-stride",
        "poll",
        "fixed",
        "memory",
        "memory-limit",
        "iops",
        "bandwidth",
        "weight",
        "data",
        "serial",
        "lba",
        "drive-id",
        "format",
        "profile",
        "faults",
        "populate",
        "namespace",
        "timeout",
        "arbitration",
        "reconnect",
        "state_dir",
    ];

    /// Builds a configuration from the keys and values of options. `get` returns the value of a key, or `None` if the option is
    /// not given.
    ///
    /// # Errors
    /// [`OptionError::Missing`] without a path, and [`OptionError::Value`] for an invalid number. [`Self::options`] checks all
    /// other values.
    pub fn from_keys(mut get: impl FnMut(&str) -> Option<String>) -> Result<Self, OptionError> {
        let path = get("path").ok_or(NO_PATH)?;
        let state_dir = get("state_dir").map_or_else(default_state_dir, PathBuf::from);
        Ok(Self {
            path,
            range: get("range"),
            size: get("size"),
            unit: get("unit"),
            queues: parse_value("queues", get("queues"), str::parse)?,
            reserve: parse_value("reserve", get("reserve"), str::parse)?,
            mdts: get("mdts"),
            lease: get("lease"),
            doorbells: get("doorbells"),
            doorbell_stride: parse_value("doorbell-stride", get("doorbell-stride"), str::parse)?,
            poll: get("poll"),
            fixed: get("fixed"),
            memory: get("memory"),
            memory_limit: get("memory-limit"),
            iops: get("iops"),
            bandwidth: get("bandwidth"),
            weight: parse_value("weight", get("weight"), str::parse)?,
            data: get("data"),
            serial: get("serial"),
            lba: parse_value("lba", get("lba"), str::parse::<LbaSize>)?.map(LbaSize::bytes),
            drive_id: get("drive-id"),
            format: get("format"),
            profile: get("profile"),
            faults: get("faults"),
            populate: get("populate"),
            namespace: parse_value("namespace", get("namespace"), str::parse)?,
            timeout: parse_value(
                "timeout",
                get("timeout").filter(|text| text != "none"),
                str::parse,
            )?,
            arbitration: get("arbitration"),
            reconnect: parse_value("reconnect", get("reconnect"), str::parse)?,
            state_dir,
        })
    }

    /// Returns the parsed options.
    ///
    /// # Errors
    /// Any [`OptionError`] that the options' values can cause.
    pub fn options(&self) -> Result<FunctionOptions, OptionError> {
        let mut keys = KeyValues::from_pairs(self.pairs()?);
        FunctionOptions::take(&mut keys)
    }

    /// Returns the parsed options together with their text.
    ///
    /// # Errors
    /// Any [`OptionError`] that the options' values can cause.
    pub fn options_with_text(&self) -> Result<ParsedFunctionOptions, OptionError> {
        ParsedFunctionOptions::from_text(OptionText::from_pairs(self.pairs()?)?)
    }

    /// Returns the files that a sandbox must allow if this process opens the function's drive itself, each with true if write
    /// access is needed. The ledger's directory must exist. If a server has the drive,
    /// [`required_files`](crate::sandbox::required_files) returns fewer files.
    ///
    /// # Errors
    /// [`OptionError::Value`] if the path names no drive.
    pub fn required_files(&self) -> Result<Vec<(PathBuf, bool)>, OptionError> {
        let path = Some(self.path.clone());
        let mut files = vec![(self.state_dir.clone(), true)];
        match parse_value("path", path, str::parse)? {
            Some(DrivePath::File(file)) => {
                // A disk model writes its state to a file next to the drive, and replaces this file by a rename, so it needs
                // the directory.
                let keeps_state = self.profile.as_deref().is_some_and(|name| {
                    // If the profile cannot be read, a state file is assumed. The function's start reports the error.
                    let profile = DriveProfile::load(name).ok();
                    profile.is_none_or(|profile| profile.has_state_file())
                });
                let has_file = keeps_state && !is_block_device(&file);
                let dir = file.parent().filter(|_| has_file);
                files.push((dir.unwrap_or(&file).to_owned(), true));
                // /sys and /proc show the device of a path, and its other users.
                files.push(("/sys".into(), false));
                files.push(("/proc".into(), false));
                // The device mapper's control file gives access to the extents of logical volumes.
                let mapper = PathBuf::from("/dev/mapper/control");
                if mapper.exists() {
                    files.push((mapper, true));
                }
            }
            Some(DrivePath::Pci(_)) => {
                files.push(("/sys".into(), false));
                files.push(("/proc".into(), false));
                files.push(("/dev/vfio".into(), true));
            }
            // A `null:` or `memory:` drive has no file.
            _ => {}
        }
        if self.poll.as_ref().is_some_and(|poll| poll.contains('@')) {
            files.push(("/sys/devices/system/cpu".into(), false));
            let nodes = PathBuf::from("/sys/devices/system/node");
            if nodes.exists() {
                files.push((nodes, false));
            }
        }
        files.extend(self.profile_and_fault_files());
        Ok(files)
    }

    /// Returns the files that a function needs if a drive server has its drive, each with true if write access is needed.
    pub(crate) fn required_files_with_server(&self) -> Vec<(PathBuf, bool)> {
        let mut files = vec![(sockets_dir(&self.state_dir), false)];
        files.extend(self.profile_and_fault_files());
        files
    }

    /// Returns the profile and fault schedule files that the options name.
    fn profile_and_fault_files(&self) -> impl Iterator<Item = (PathBuf, bool)> {
        let described = [&self.profile, &self.faults].into_iter().flatten();
        let named = described.filter(|name| name.contains('/'));
        named.map(|name| (name.into(), false))
    }

    fn pairs(&self) -> Result<Vec<(String, String)>, OptionError> {
        let Self {
            path,
            range,
            size,
            unit,
            queues,
            reserve,
            mdts,
            lease,
            doorbells,
            doorbell_stride,
            poll,
            fixed,
            memory,
            memory_limit,
            iops,
            bandwidth,
            weight,
            data,
            serial,
            lba,
            drive_id,
            format,
            profile,
            faults,
            populate,
            namespace,
            timeout,
            arbitration,
            reconnect,
            state_dir: _,
        } = self;
        let pairs = [
            ("path", Some(path.clone())),
            ("range", range.clone()),
            ("size", size.clone()),
            ("unit", unit.clone()),
            ("queues", queues.map(|queues| queues.to_string())),
            ("reserve", reserve.map(|pairs| pairs.to_string())),
            ("mdts", mdts.clone()),
            ("lease", lease.clone()),
            ("doorbells", doorbells.clone()),
            (
                "doorbell-stride",
                doorbell_stride.map(|bytes| bytes.to_string()),
            ),
            ("poll", poll.clone()),
            ("fixed", fixed.clone()),
            ("memory", memory.clone()),
            ("memory-limit", memory_limit.clone()),
            ("iops", iops.clone()),
            ("bandwidth", bandwidth.clone()),
            ("weight", weight.map(|weight| weight.to_string())),
            ("data", data.clone()),
            ("serial", serial.clone()),
            ("lba", lba.map(|lba| lba.to_string())),
            ("drive-id", drive_id.clone()),
            ("format", format.clone()),
            ("profile", profile.clone()),
            ("faults", faults.clone()),
            ("populate", populate.clone()),
            ("namespace", namespace.map(|nsid| nsid.to_string())),
            ("timeout", timeout.map(|seconds| seconds.to_string())),
            ("arbitration", arbitration.clone()),
            ("reconnect", reconnect.map(|seconds| seconds.to_string())),
        ];
        if path.is_empty() {
            return Err(NO_PATH);
        }
        let given = pairs.into_iter();
        let given = given.filter_map(|(key, value)| Some((key.to_owned(), value?)));
        Ok(given.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::super::option_help;
    use super::*;

    fn config(pairs: &[(&str, &str)]) -> Result<FunctionConfig, OptionError> {
        let value = |key: &str| pairs.iter().find(|(known, _)| *known == key);
        FunctionConfig::from_keys(|key| value(key).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn keys_and_option_strings_have_the_same_meaning() {
        let pairs = [
            ("path", "/srv/a,b.img"),
            ("range", "1M+2M"),
            ("queues", "3"),
            ("mdts", "128K"),
            ("doorbells", "trap"),
            ("doorbell-stride", "4"),
            ("poll", "shared"),
            ("fixed", "coalescing"),
            ("serial", "S 1"),
            ("lba", "4K"),
        ];
        let config = config(&pairs).expect("valid");
        let string = "path=\"/srv/a,b.img\",range=1M+2M,queues=3,mdts=131072,doorbells=trap,doorbell-stride=4,poll=shared,\
                      fixed=coalescing,serial=S 1,lba=4096";
        let options: FunctionOptions = string.parse().expect("valid");
        assert_eq!(config.options().expect("valid"), options);
        let physical = [
            ("path", "0000:01:00.0"),
            ("reserve", "4"),
            ("weight", "300"),
            ("memory-limit", "16G"),
            ("namespace", "2"),
            ("timeout", "7"),
            ("arbitration", "weighted"),
            ("reconnect", "0"),
        ];
        let config = self::config(&physical).expect("valid");
        let options = "path=0000:01:00.0,reserve=4,weight=300,memory-limit=16G,namespace=2,timeout=7,arbitration=weighted,reconnect=0"
            .parse()
            .expect("valid");
        assert_eq!(config.options().expect("valid"), options);
    }

    #[test]
    fn keys_match_the_option_string_except_the_id() {
        let of_a_string = option_help::keys().filter(|key| *key != "id");
        let keys: Vec<&str> = of_a_string.chain(["state_dir"]).collect();
        assert_eq!(FunctionConfig::KEYS, keys);
    }

    #[test]
    fn every_key_is_queried() {
        let mut lookups = Vec::new();
        let config = FunctionConfig::from_keys(|key| {
            lookups.push(key.to_owned());
            (key == "path").then(|| "null:1G".to_owned())
        });
        assert_eq!(config.expect("valid").state_dir, PathBuf::from(STATE_DIR));
        lookups.sort();
        let mut keys = FunctionConfig::KEYS.to_vec();
        keys.sort_unstable();
        assert_eq!(lookups, keys);
    }

    #[test]
    fn invalid_functions_are_refused_by_option() {
        let message = |pairs: &[(&str, &str)]| {
            let options = config(pairs).and_then(|config| config.options());
            options.expect_err("invalid").to_string()
        };
        assert!(message(&[]).starts_with("Option \"path\" is missing"));
        let path = ("path", "memory:64M");
        for (key, value) in [
            ("queues", "x"),
            ("queues", "0"),
            ("range", "5"),
            ("lba", "520"),
        ] {
            let wrong = format!("Option \"{key}\" cannot be \"{value}\"");
            assert_eq!(message(&[path, (key, value)]), wrong);
        }
        assert!(message(&[path, ("timeout", "1")]).contains("is not for memory:"));
    }

    #[test]
    fn a_configuration_survives_serialization() {
        let pairs = [("path", "/dev/x"), ("queues", "2"), ("state_dir", "/srv/s")];
        let config = config(&pairs).expect("valid");
        let text = serde_json::to_string(&config).expect("kept");
        assert_eq!(text, r#"{"path":"/dev/x","queues":2,"state_dir":"/srv/s"}"#);
        let restored: FunctionConfig = serde_json::from_str(&text).expect("restored");
        assert_eq!(restored, config);
    }

    #[test]
    fn unknown_and_repeated_keys_are_refused() {
        let read = |text: &str| serde_json::from_str::<FunctionConfig>(text);
        for wrong in ["rang", "id", "RANGE", "doorbell_stride", "doorbells "] {
            let error = read(&format!(r#"{{"path":"memory:64M","{wrong}":"0+8M"}}"#));
            let error = error.expect_err(wrong).to_string();
            assert!(
                error.contains(&format!("unknown field `{wrong}`")),
                "{error}"
            );
        }
        // A repeated key is refused.
        read(r#"{"path":"a","path":"b"}"#).expect_err("two paths");
        for key in FunctionConfig::KEYS {
            read(&format!(r#"{{"{key}":null}}"#))
                .map(drop)
                .or_else(|error| match error.to_string().contains("unknown field") {
                    true => Err(error),
                    // Two of the keys accept null.
                    false => Ok(()),
                })
                .expect(key);
        }
    }

    #[test]
    fn defaults_are_the_same_for_keys_strings_and_serialized_text() {
        let default = FunctionConfig::default();
        let read: FunctionConfig = serde_json::from_str("{}").expect("all by default");
        assert_eq!(read, default);
        assert_eq!(default.state_dir, PathBuf::from(STATE_DIR));
        let path = "null:1G".to_owned();
        let by_keys = config(&[("path", &path)]).expect("valid");
        assert_eq!(by_keys, FunctionConfig { path, ..default });
        // The option `path` is mandatory.
        let error = read.options().expect_err("no path").to_string();
        assert!(error.starts_with("Option \"path\" is missing"), "{error}");
        let error = read.options_with_text().expect_err("no path").to_string();
        assert!(error.starts_with("Option \"path\" is missing"), "{error}");
    }

    #[test]
    fn sandbox_files_cover_all_needs_of_a_function() {
        // Device mapper's control file exists only on some hosts.
        let files = |pairs: &[(&str, &str)]| {
            let mut files = config(pairs)
                .expect("valid")
                .required_files()
                .expect("valid");
            files.retain(|(path, _)| path.as_os_str() != "/dev/mapper/control");
            files
        };
        let state = (PathBuf::from(STATE_DIR), true);
        assert_eq!(files(&[("path", "null:1G")]), vec![state.clone()]);
        let image = ("path", "/srv/drive.img");
        let [sys, proc] = ["/sys", "/proc"].map(|path| (PathBuf::from(path), false));
        assert_eq!(
            files(&[image]),
            [
                state.clone(),
                ("/srv/drive.img".into(), true),
                sys.clone(),
                proc.clone()
            ]
        );
        let profile = ("profile", "/etc/slow.toml");
        let described = (PathBuf::from("/etc/slow.toml"), false);
        assert_eq!(
            files(&[image, ("profile", "nvm")]),
            [
                state.clone(),
                ("/srv/drive.img".into(), true),
                sys.clone(),
                proc.clone()
            ]
        );
        assert_eq!(
            files(&[image, profile]),
            [state, ("/srv".into(), true), sys, proc, described.clone()]
        );
        let with_server =
            |pairs: &[(&str, &str)]| config(pairs).expect("valid").required_files_with_server();
        let servers = (PathBuf::from(STATE_DIR).join("servers"), false);
        for pairs in [
            &[image][..],
            &[("path", "0000:01:00.0"), ("poll", "dedicated@vcpu")],
            &[image, ("profile", "ssd"), ("faults", "none")],
        ] {
            assert_eq!(
                with_server(pairs),
                std::slice::from_ref(&servers),
                "{pairs:?}"
            );
        }
        assert_eq!(with_server(&[image, profile]), [servers, described]);
    }
}

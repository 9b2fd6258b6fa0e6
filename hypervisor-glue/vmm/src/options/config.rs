//! A function in a VMM's own configuration. A VMM's API and configuration files use this form instead of an option string.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use nvme_models::DriveProfile;
use nvme_mpt_lease_protocol::sockets_dir;
use serde::de::{DeserializeSeed, Error, MapAccess, Unexpected, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::error::OptionError;
use super::function::FunctionOptions;
use super::option_table::{NO_PATH, OPTIONS, OptionHelp};
use super::option_text::OptionText;
use super::parsed_options::ParsedFunctionOptions;
use crate::drives::{DrivePath, is_block_device};

/// Default directory of the lease ledger.
///
/// The ledger must survive a power failure, so that a range stays with its owner until an operator releases it. So the
/// directory is not in /run, which a restart of the host empties.
pub const STATE_DIR: &str = "/var/lib/nvme-mpt";

/// Key of [`FunctionConfig::state_dir`].
const STATE_DIR_KEY: &str = "state_dir";

/// Help of [`FunctionConfig::state_dir`].
pub(super) const STATE_DIR_HELP: OptionHelp = OptionHelp {
    key: STATE_DIR_KEY,
    value: "DIR",
    help: "directory with the ledger of leases and the sockets of drive servers [default: /var/lib/nvme-mpt]",
};

/// Configuration of a function: the options of [`FunctionOptions`] as text.
///
/// When it is read by serde, unknown keys are errors, because a misspelt key is dangerous: `rang` for `range` would lease the
/// whole drive. A type that flattens this type (`serde(flatten)`) must refuse unknown keys itself.
///
/// Unlike an option string, this type has no key `id`, since a device's id is unique within one VM only. The key `lease` is
/// the id of the lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionConfig {
    /// The options in the order of [`Self::KEYS`].
    text: OptionText,
    /// Directory of the lease ledger.
    pub state_dir: PathBuf,
}

impl Default for FunctionConfig {
    /// Returns a configuration without a drive path and with the default of each option.
    fn default() -> Self {
        Self {
            text: OptionText::default(),
            state_dir: STATE_DIR.into(),
        }
    }
}

/// Returns all keys of a configuration: those of [`OPTIONS`] except `id`, then [`STATE_DIR_KEY`].
const fn config_keys() -> [&'static str; OPTIONS.len()] {
    let mut keys = [STATE_DIR_KEY; OPTIONS.len()];
    let (mut option, mut place) = (0, 0);
    while option < OPTIONS.len() {
        let key = OPTIONS[option].help.key;
        if !matches!(key.as_bytes(), b"id") {
            keys[place] = key;
            place += 1;
        }
        option += 1;
    }
    keys
}

impl FunctionConfig {
    /// All keys of the configuration.
    pub const KEYS: &[&str] = &config_keys();

    /// Builds a configuration from options with the [keys](Self::KEYS) and values of option strings.
    ///
    /// # Errors
    /// [`OptionError::Unknown`], [`OptionError::IdForLease`] or [`OptionError::Duplicate`] for a key, and all errors of
    /// [`Self::from_keys`].
    pub fn from_pairs<K: Into<String>, V: Into<String>>(
        pairs: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, OptionError> {
        let pairs = pairs
            .into_iter()
            .map(|(key, value)| (key.into(), value.into()));
        let text = OptionText::from_pairs(pairs)?;
        if text.get("id").is_some() {
            return Err(OptionError::IdForLease);
        }
        text.reject_unknown(Self::KEYS.iter().copied())?;
        Self::from_keys(|key| text.get(key).map(str::to_owned))
    }

    /// Builds a configuration from a VMM's own options. `get` returns the value of a [key](Self::KEYS), or `None` if the option is
    /// not given. If users write the keys, [`Self::from_pairs`] also refuses unknown ones.
    ///
    /// # Errors
    /// [`OptionError::Missing`] without a path, [`OptionError::EmptyValue`], and [`OptionError::Value`] for an invalid number.
    /// [`Self::options`] checks all other values. A value such as `timeout=none` is left out of the configuration, so it is
    /// checked here, together with the other values.
    pub fn from_keys(mut get: impl FnMut(&str) -> Option<String>) -> Result<Self, OptionError> {
        let mut pairs = Vec::new();
        let mut omitted = Vec::new();
        for option in OPTIONS {
            let key = option.help.key;
            if key == "id" {
                continue;
            }
            let Some(mut value) = get(key) else {
                continue;
            };
            if let Some(number) = option.number {
                match number(&value) {
                    Ok(Some(number)) => value = number.to_string(),
                    Ok(None) => {
                        omitted.push((key.to_owned(), value));
                        continue;
                    }
                    Err(no_number) => {
                        // The option's own parser says which numbers it accepts.
                        let source = option.check_value(&value).err().unwrap_or(no_number);
                        return Err(OptionError::Value { key, value, source });
                    }
                }
            }
            pairs.push((key.to_owned(), value));
        }
        let text = OptionText::from_pairs(pairs.clone())?;
        if text.get("path").is_none() {
            return Err(NO_PATH);
        }
        if !omitted.is_empty() {
            let all = OptionText::from_pairs(pairs.into_iter().chain(omitted))?;
            FunctionOptions::from_text(all)?;
        }
        let state_dir = get(STATE_DIR_KEY).map_or_else(|| STATE_DIR.into(), PathBuf::from);
        Ok(Self { text, state_dir })
    }

    /// Returns the parsed options.
    ///
    /// # Errors
    /// Any [`OptionError`] that the options' values can cause.
    pub fn options(&self) -> Result<FunctionOptions, OptionError> {
        FunctionOptions::from_text(self.text.clone())
    }

    /// Returns the parsed options together with their text.
    ///
    /// # Errors
    /// Any [`OptionError`] that the options' values can cause.
    pub fn options_with_text(&self) -> Result<ParsedFunctionOptions, OptionError> {
        ParsedFunctionOptions::from_text(self.text.clone())
    }

    /// Returns the files that a sandbox must allow if this process opens the function's drive itself, each with true if write
    /// access is needed. The ledger's directory must exist. If a server has the drive,
    /// [`required_files`](crate::sandbox::required_files) returns fewer files.
    ///
    /// # Errors
    /// [`OptionError::Value`] if the path names no drive.
    pub fn required_files(&self) -> Result<Vec<(PathBuf, bool)>, OptionError> {
        let mut files = vec![(self.state_dir.clone(), true)];
        match self.text.clone().take_value("path", str::parse)? {
            Some(DrivePath::File(file)) => {
                // A disk model writes its state to a file next to the drive, and replaces this file by a rename, so it needs
                // the directory.
                let keeps_state = self.text.get("profile").is_some_and(|name| {
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
                // A kernel with iommufd has it.
                let iommu = PathBuf::from("/dev/iommu");
                if iommu.exists() {
                    files.push((iommu, true));
                }
            }
            // A `null:` or `memory:` drive has no file.
            _ => {}
        }
        if self.text.get("poll").is_some_and(|poll| poll.contains('@')) {
            files.push(("/sys/devices/system/cpu".into(), false));
            let nodes = PathBuf::from("/sys/devices/system/node");
            if nodes.exists() {
                files.push((nodes, false));
            }
        }
        files.extend(self.named_files());
        Ok(files)
    }

    /// Returns the files that a function needs if a drive server has its drive, each with true if write access is needed.
    pub(crate) fn required_files_with_server(&self) -> Vec<(PathBuf, bool)> {
        let mut files = vec![(sockets_dir(&self.state_dir), false)];
        files.extend(self.named_files());
        files
    }

    /// Returns the files that options name.
    fn named_files(&self) -> impl Iterator<Item = (PathBuf, bool)> {
        let named = self.text.named_files().into_iter();
        named.map(|(_, path)| (path, false))
    }
}

impl Serialize for FunctionConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for option in OPTIONS {
            let key = option.help.key;
            let Some(value) = self.text.get(key) else {
                continue;
            };
            match value.parse::<u64>() {
                Ok(number) if option.number.is_some() => map.serialize_entry(key, &number)?,
                _ => map.serialize_entry(key, value)?,
            }
        }
        map.serialize_entry(STATE_DIR_KEY, &self.state_dir)?;
        map.end()
    }
}

impl<'de> Deserialize<'de> for FunctionConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // With the list of keys, serde leaves all other keys to a type that flattens this type.
        deserializer.deserialize_struct("FunctionConfig", Self::KEYS, FunctionConfigVisitor)
    }
}

/// Reader of a [`FunctionConfig`] from a map, such as an object of JSON.
struct FunctionConfigVisitor;

impl<'de> Visitor<'de> for FunctionConfigVisitor {
    type Value = FunctionConfig;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the options of a function")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<FunctionConfig, A::Error> {
        let mut values = BTreeMap::new();
        let mut state_dir = None;
        while let Some(key) = map.next_key::<String>()? {
            let option = OPTIONS.iter().find(|option| option.help.key == key);
            let is_new = match option.filter(|_| key != "id") {
                None if key == STATE_DIR_KEY => state_dir.replace(map.next_value()?).is_none(),
                None if key == "id" => return Err(Error::custom(OptionError::IdForLease)),
                None => return Err(Error::unknown_field(&key, FunctionConfig::KEYS)),
                Some(option) if option.number.is_some() => {
                    let number = map.next_value_seed(NumberReader(option.help.key))?;
                    let value = number.map(|number| number.to_string());
                    values.insert(option.help.key, value).is_none()
                }
                Some(option) => {
                    let value: Option<String> = map.next_value()?;
                    values.insert(option.help.key, value).is_none()
                }
            };
            if !is_new {
                return Err(Error::custom(OptionError::Duplicate { key }));
            }
        }
        let given = OPTIONS.iter().filter_map(|option| {
            let value = values.remove(option.help.key)??;
            Some((option.help.key.to_owned(), value))
        });
        Ok(FunctionConfig {
            text: OptionText::from_pairs(given).map_err(Error::custom)?,
            state_dir: state_dir.unwrap_or_else(|| STATE_DIR.into()),
        })
    }
}

/// Reader of the number of the option with this key; `None` for null. An error names the option.
struct NumberReader(&'static str);

impl<'de> DeserializeSeed<'de> for NumberReader {
    type Value = Option<u64>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_option(self)
    }
}

impl<'de> Visitor<'de> for NumberReader {
    type Value = Option<u64>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a whole number for the option \"{}\"", self.0)
    }

    fn visit_none<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_u64(self)
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Self::Value, E> {
        Ok(Some(number))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<Self::Value, E> {
        match u64::try_from(number) {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(E::invalid_value(Unexpected::Signed(number), &self)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::option_table;
    use super::*;

    fn config(pairs: &[(&str, &str)]) -> Result<FunctionConfig, OptionError> {
        FunctionConfig::from_pairs(pairs.iter().copied())
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
        let of_a_string = option_table::keys().filter(|key| *key != "id");
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
    fn no_timeout_is_a_missing_one_except_for_a_physical_drive() {
        let none = ("timeout", "none");
        let file = ("path", "/srv/a.img");
        assert_eq!(
            config(&[file, none]).expect("valid"),
            config(&[file]).expect("valid")
        );
        let refused = config(&[("path", "0000:01:00.0"), none]).expect_err("no limit");
        assert_eq!(refused.to_string(), "Option \"timeout\" cannot be \"none\"");
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
        for wrong in ["rang", "RANGE", "doorbell_stride", "doorbells "] {
            let error = read(&format!(r#"{{"path":"memory:64M","{wrong}":"0+8M"}}"#));
            let error = error.expect_err(wrong).to_string();
            assert!(
                error.contains(&format!("unknown field `{wrong}`")),
                "{error}"
            );
        }
        let of_a_device = config(&[("path", "memory:64M"), ("id", "nvme0")]).expect_err("id");
        for message in [
            of_a_device.to_string(),
            read(r#"{"path":"memory:64M","id":"nvme0"}"#)
                .expect_err("id")
                .to_string(),
        ] {
            assert!(
                message.contains("the id of the lease is lease=ID"),
                "{message}"
            );
        }
        // A repeated key is refused.
        read(r#"{"path":"a","path":"b"}"#).expect_err("two paths");
        for key in FunctionConfig::KEYS {
            read(&format!(r#"{{"{key}":null}}"#))
                .map(drop)
                .or_else(|error| match error.to_string().contains("unknown field") {
                    true => Err(error),
                    // The directory is no option, and does not accept null.
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
        let by_keys = config(&[("path", "null:1G")]).expect("valid");
        let read_path: FunctionConfig =
            serde_json::from_str(r#"{"path":"null:1G"}"#).expect("valid");
        assert_eq!(by_keys, read_path);
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

//! Options for `nvme-mpt serve`: functions on sockets, and drives.

use std::path::PathBuf;
use std::str::FromStr;

use nvme_guest::rate_limit::{LeaseWeight, RateLimit, RateLimits};

use super::error::OptionError;
use super::function::{FunctionOptions, NO_WEIGHT_REASON, check_bandwidth};
use super::option_table::{OptionScope, function_keys, server_keys};
use super::option_text::OptionText;
use crate::drives::DrivePath;

/// Maximum length of a UNIX socket's path in bytes: `sun_path` has 108 bytes, of which one is the terminating zero.
const MAX_SOCKET_PATH: usize = 107;

/// Options of a function that a server offers on a socket.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerFunctionOptions {
    /// Socket on which a VMM connects.
    pub socket: PathBuf,
    /// File mode of the socket. If not given, only the server's user has access.
    pub mode: Option<u32>,
    /// Owner of the socket; the server's user and group if not given.
    pub owner: Option<SocketOwner>,
    /// The function.
    pub function: FunctionOptions,
}

impl FromStr for ServerFunctionOptions {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<Self, OptionError> {
        let mut text: OptionText = text.parse()?;
        text.reject_unknown(server_keys())?;
        let socket = text.take_value("socket", parse_socket_path)?;
        let mode = text.take_value("mode", parse_mode)?;
        let owner = text.take_value("owner", str::parse)?;
        let function = FunctionOptions::from_text(text)?;
        let socket = socket.ok_or(OptionError::Missing {
            key: "socket",
            example: "PATH, where the VMM connects",
        })?;
        Ok(Self {
            socket,
            mode,
            owner,
            function,
        })
    }
}

/// User and group of a socket, by name or number: `USER`, `USER:GROUP` or `:GROUP`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketOwner {
    /// The user.
    pub user: Option<String>,
    /// The group.
    pub group: Option<String>,
}

impl FromStr for SocketOwner {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (user, group) = match text.split_once(':') {
            None => (text, None),
            Some((_, "")) => return Err("Write USER, USER:GROUP or :GROUP"),
            Some((user, group)) => (user, Some(group.to_owned())),
        };
        let user = (!user.is_empty()).then(|| user.to_owned());
        Ok(Self { user, group })
    }
}

/// Options of a drive that a server keeps open, even without functions.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerDriveOptions {
    /// Options of the drive. Options of this type that do not apply to drives have their defaults.
    pub drive: FunctionOptions,
}

impl ServerDriveOptions {
    /// Returns the keys of a drive's options.
    pub fn keys() -> impl Iterator<Item = &'static str> + Clone {
        function_keys(OptionScope::Drive)
    }
}

impl FromStr for ServerDriveOptions {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<Self, OptionError> {
        let text: OptionText = text.parse()?;
        text.reject_unknown(Self::keys())?;
        let drive = FunctionOptions::from_text(text)?;
        Ok(Self { drive })
    }
}

/// Change of a function's limits: `iops=`, `bandwidth=` and `weight=`, each with a value or `none`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateChange {
    iops: Option<Option<RateLimit>>,
    bandwidth: Option<Option<RateLimit>>,
    weight: Option<Option<LeaseWeight>>,
}

impl RateChange {
    /// Keys of a change.
    pub const KEYS: &[&str] = &["iops", "bandwidth", "weight"];

    /// Value of a key that removes a limit, or restores the default weight.
    pub const NONE: &str = "none";

    /// Refuses a bandwidth limit that is too low for guest drivers.
    ///
    /// # Errors
    /// [`OptionError::Value`].
    pub(super) fn check_bandwidth(&self) -> Result<(), OptionError> {
        check_bandwidth(self.bandwidth.flatten())
    }

    /// Refuses a change of limits that the kind of drive does not support, and a bandwidth limit that is too low for guest
    /// drivers.
    ///
    /// # Errors
    /// [`OptionError::NotApplicable`], [`OptionError::Value`].
    pub fn check(&self, path: &DrivePath) -> Result<(), OptionError> {
        self.check_bandwidth()?;
        match (self.weight, path) {
            (Some(Some(_)), path) if !matches!(path, DrivePath::Pci(_)) => {
                Err(OptionError::NotApplicable {
                    key: "weight",
                    path: path.clone(),
                    why: NO_WEIGHT_REASON,
                })
            }
            _ => Ok(()),
        }
    }

    /// Returns the limits after the change. A limit that the change does not mention stays as it is.
    #[must_use]
    pub fn apply_to(self, rates: RateLimits) -> RateLimits {
        RateLimits {
            iops: self.iops.unwrap_or(rates.iops),
            bandwidth: self.bandwidth.unwrap_or(rates.bandwidth),
            weight: self.weight.unwrap_or(rates.weight),
        }
    }
}

impl FromStr for RateChange {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<Self, OptionError> {
        fn or_none<T, E>(
            parse: impl FnOnce(&str) -> Result<T, E>,
        ) -> impl FnOnce(&str) -> Result<Option<T>, E> {
            |text| match text {
                RateChange::NONE => Ok(None),
                text => parse(text).map(Some),
            }
        }
        let mut text: OptionText = text.parse()?;
        text.reject_unknown(Self::KEYS.iter().copied())?;
        Ok(Self {
            iops: text.take_value("iops", or_none(RateLimit::parse_iops))?,
            bandwidth: text.take_value("bandwidth", or_none(RateLimit::parse_bandwidth))?,
            weight: text.take_value("weight", or_none(str::parse))?,
        })
    }
}

/// Checks the length of a UNIX socket's path.
///
/// # Errors
/// The path is too long.
pub fn parse_socket_path(text: &str) -> Result<PathBuf, String> {
    if text.len() > MAX_SOCKET_PATH {
        return Err(format!(
            "The path of a socket has at most {MAX_SOCKET_PATH} bytes, this one has {}: use a shorter directory, \
             such as one in /run",
            text.len()
        ));
    }
    Ok(PathBuf::from(text))
}

pub(super) fn parse_mode(text: &str) -> Result<u32, &'static str> {
    let is_octal = text.bytes().all(|digit| matches!(digit, b'0'..=b'7'));
    u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| is_octal && (3..=4).contains(&text.len()) && *mode <= 0o777)
        .ok_or("A file mode has three octal digits, with or without a 0 before them: 660 or 0660")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report;

    #[test]
    fn a_drive_without_functions_has_the_options_of_its_drive() {
        let options: ServerDriveOptions = "path=memory:1G,populate=on,timeout=none,lba=4096"
            .parse()
            .unwrap();
        assert!(options.drive.drive.populate.is_some());
        let error = "path=memory:1G,queues=2"
            .parse::<ServerDriveOptions>()
            .unwrap_err();
        let message = report::chain(&error);
        assert!(message.contains("faults, populate, namespace"), "{message}");
    }

    #[test]
    fn a_socket_has_a_mode_and_an_owner() {
        let options: ServerFunctionOptions =
            "socket=/run/a.sock,path=null:1G,mode=0660,owner=qemu:kvm"
                .parse()
                .unwrap();
        assert_eq!(options.mode, Some(0o660));
        assert_eq!([parse_mode("660"), parse_mode("0007")], [Ok(0o660), Ok(7)]);
        let owner = |user: Option<&str>, group: Option<&str>| SocketOwner {
            user: user.map(str::to_owned),
            group: group.map(str::to_owned),
        };
        assert_eq!(options.owner, Some(owner(Some("qemu"), Some("kvm"))));
        assert_eq!("107".parse(), Ok(owner(Some("107"), None)));
        assert_eq!(":kvm".parse(), Ok(owner(None, Some("kvm"))));
        for (option, error_message) in [
            ("mode=0o7", "Option \"mode\" cannot be \"0o7\""),
            ("mode=1777", "660 or 0660"),
            ("mode=+660", "660 or 0660"),
            ("mode=60", "660 or 0660"),
            ("mode=00660", "660 or 0660"),
            ("owner=qemu:", "USER:GROUP"),
            ("group=kvm", "socket, mode, owner, path, range"),
        ] {
            let text = format!("socket=/run/a.sock,path=null:1G,{option}");
            let error = text.parse::<ServerFunctionOptions>().unwrap_err();
            let message = report::chain(&error);
            assert!(message.contains(error_message), "{message}");
        }
    }

    #[test]
    fn a_drive_accepts_only_drive_keys() {
        let options: ServerDriveOptions = "path=memory:1G,lba=4096".parse().unwrap();
        assert_eq!(options.drive.path, DrivePath::Memory(1 << 30));
        for text in ["path=memory:1G,range=0+1G", "path=memory:1G,socket=/a"] {
            let message = text.parse::<ServerDriveOptions>().unwrap_err().to_string();
            assert!(
                message.ends_with(
                    "path, fixed, lba, drive-id, profile, faults, populate, namespace, timeout, arbitration"
                ),
                "{message}"
            );
        }
        assert!("lba=512".parse::<ServerDriveOptions>().is_err());
    }

    #[test]
    fn a_change_of_limits_keeps_unnamed_limits() {
        let rates = |text: &str| text.parse::<FunctionOptions>().unwrap().backend.rates;
        let before = rates("path=null:1G,iops=100");
        for (change, after) in [
            ("iops=200", "iops=200"),
            ("iops=none,bandwidth=1M", "bandwidth=1M"),
            ("bandwidth=1M+2M", "iops=100,bandwidth=1M+2M"),
            ("bandwidth=none", "iops=100"),
        ] {
            let change: RateChange = change.parse().unwrap();
            assert_eq!(
                change.apply_to(before),
                rates(&format!("path=null:1G,{after}"))
            );
        }
        let before = rates("path=0000:01:00.0,weight=5");
        for (change, weight) in [("weight=300", 300), ("weight=none", 100), ("iops=1", 5)] {
            let change: RateChange = change.parse().unwrap();
            let after = change.apply_to(before).weight.unwrap_or_default();
            assert_eq!(after.get(), weight);
        }
        for (change, error_message) in [
            ("iops=0", "as in 20000"),
            ("bandwidth=fast", "as in 100M"),
            ("queues=3", "the options are iops, bandwidth, weight"),
            ("iops", "write iops=VALUE"),
            ("weight=0", "from 1 to 1000, as in 300"),
            ("weight=1001", "from 1 to 1000, as in 300"),
        ] {
            let error = change.parse::<RateChange>().unwrap_err();
            let message = report::chain(&error);
            assert!(message.contains(error_message), "{message}");
        }
    }

    #[test]
    fn a_limit_of_bytes_that_is_too_low_for_drivers_is_refused() {
        let path: DrivePath = "/srv/d.img".parse().unwrap();
        let check = |text: &str| text.parse::<RateChange>().unwrap().check(&path);
        let message = report::chain(&check("bandwidth=100").unwrap_err());
        assert!(
            message.contains("\"bandwidth\" cannot be \"100\"") && message.contains("256K"),
            "{message}"
        );
        for text in ["bandwidth=256K", "bandwidth=none", "iops=1"] {
            assert!(check(text).is_ok(), "{text}");
        }
        let function = |text: &str| text.parse::<FunctionOptions>().unwrap();
        let low = function("path=null:1G,bandwidth=100");
        assert!(low.check_rates().is_err());
        assert!(low.warnings().join("\n").contains("256K"));
        let enough = function("path=null:1G,bandwidth=256K");
        assert!(enough.check_rates().is_ok() && enough.warnings().is_empty());
    }

    #[test]
    fn a_software_drive_has_no_use_for_a_weight() {
        let change = |text: &str| text.parse::<RateChange>().unwrap();
        let [software, physical] = ["/srv/d.img", "0000:01:00.0"].map(|path| path.parse().unwrap());
        let error = change("iops=5,weight=300").check(&software).unwrap_err();
        assert_eq!(
            error.to_string(),
            "Option \"weight\" is not for /srv/d.img: only a physical drive, as in path=0000:01:00.0, has queue \
             pairs that guests share; leave it out"
        );
        assert!(change("weight=none").check(&software).is_ok());
        assert!(change("weight=300").check(&physical).is_ok());
    }
}

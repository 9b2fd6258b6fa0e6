//! Options of leases that an operator reserves for functions in VMMs, and options of the socket on which VMMs request these
//! leases.

use std::str::FromStr;

use super::error::OptionError;
use super::function::FunctionOptions;
use super::option_table::{OptionScope, function_keys};
use super::option_text::OptionText;
use super::server_options::{RateChange, SocketOwner, parse_mode};

/// A lease that an operator reserves for the VMMs of one user.
#[derive(Clone, Debug, PartialEq)]
pub struct LeaseReservation {
    /// User that owns the lease, by name or number.
    pub owner: String,
    /// The lease's drive, its range or size, its id, and the policy for data that another id left. All other options have their
    /// defaults.
    pub function: FunctionOptions,
    /// The operator's limits of the lease's functions, in the form of [`RateChange`].
    pub limits: Option<OptionText>,
}

impl LeaseReservation {
    fn keys() -> impl Iterator<Item = &'static str> + Clone {
        let function = function_keys(OptionScope::Lease).chain(function_keys(OptionScope::Drive));
        let limits = RateChange::KEYS.iter().copied();
        std::iter::once("owner").chain(function).chain(limits)
    }
}

impl FromStr for LeaseReservation {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<Self, OptionError> {
        let mut text: OptionText = text.parse()?;
        text.reject_unknown(Self::keys())?;
        let owner = text.take_value("owner", parse_user)?;
        let owner = owner.ok_or(OptionError::Missing {
            key: "owner",
            example: "USER, whose VMMs may have the lease",
        })?;
        let limits = text.split_off(RateChange::KEYS);
        if let Some(limits) = &limits {
            limits
                .to_string()
                .parse::<RateChange>()?
                .check_bandwidth()?;
        }
        Ok(Self {
            owner,
            function: FunctionOptions::from_text(text)?,
            limits,
        })
    }
}

/// Parses a user name or number.
///
/// # Errors
/// The text has a group, as in `USER:GROUP`.
pub fn parse_user(text: &str) -> Result<String, &'static str> {
    match text.contains(':') {
        true => Err("A lease has only a user, without a group"),
        false => Ok(text.to_owned()),
    }
}

/// Options of the socket on which VMMs request leases: `mode=` and `owner=`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmmSocket {
    /// File mode of the socket. If not given, only the server's user has access.
    pub mode: Option<u32>,
    /// Owner of the socket; the server's user and group if not given.
    pub owner: Option<SocketOwner>,
}

impl VmmSocket {
    /// Keys of the options.
    pub const KEYS: &[&str] = &["mode", "owner"];
}

impl FromStr for VmmSocket {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<Self, OptionError> {
        let mut text: OptionText = text.parse()?;
        text.reject_unknown(Self::KEYS.iter().copied())?;
        Ok(Self {
            mode: text.take_value("mode", parse_mode)?,
            owner: text.take_value("owner", str::parse)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report;

    #[test]
    fn a_reservation_has_a_user_a_place_and_limits() {
        let reserved: LeaseReservation = "path=/d,size=1G,lease=a,owner=alice,iops=none,data=wipe"
            .parse()
            .unwrap();
        assert_eq!(reserved.owner, "alice");
        let function: FunctionOptions = "path=/d,size=1G,id=a,data=wipe".parse().unwrap();
        assert_eq!(reserved.function, function);
        let limits = reserved.limits.map(|limits| limits.to_string());
        assert_eq!(limits.as_deref(), Some("iops=none"));
        for (text, error_message) in [
            ("path=/d,id=a", "\"owner\" is missing"),
            ("path=/d,owner=a:b", "without a group"),
            ("path=/d,owner=a,iops=fast", "as in 20000"),
            ("path=/d,owner=a,bandwidth=100", "256K per second or more"),
            (
                "path=/d,owner=a,queues=3",
                "the options are owner, range, size, unit, id, lease, data, format, path, fixed",
            ),
            ("id=a,owner=a", "\"path\" is missing"),
        ] {
            let error = text.parse::<LeaseReservation>().unwrap_err();
            let message = report::chain(&error);
            assert!(message.contains(error_message), "{message}");
        }
    }

    #[test]
    fn the_socket_for_vmms_has_a_mode_and_an_owner() {
        let socket: VmmSocket = "mode=0660,owner=:kvm".parse().unwrap();
        assert_eq!(socket.mode, Some(0o660));
        let owner = socket.owner.and_then(|owner| owner.group);
        assert_eq!(owner.as_deref(), Some("kvm"));
        let error = "socket=/a".parse::<VmmSocket>().unwrap_err();
        assert!(error.to_string().contains("mode, owner"), "{error}");
    }
}

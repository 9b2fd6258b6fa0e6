//! Users and groups that own sockets and leases, by their names.

use nix::unistd::{Group, User};
use nvme_mpt_vmm::options::SocketOwner;
use thiserror::Error;
use vfio_user_server::SocketAccess;

/// A user or a group is not known.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("There is no {kind} \"{name}\": create it, or give its number")]
pub struct UnknownOwner {
    /// `user` or `group`.
    kind: &'static str,
    /// Its name.
    name: String,
}

/// Returns the number of a user, by name or by number.
///
/// # Errors
/// [`UnknownOwner`].
pub fn user_number(name: &str) -> Result<u32, UnknownOwner> {
    let user = |name: &str| Some(User::from_name(name).ok()??.uid.as_raw());
    number("user", name, user)
}

/// Returns the name of a user, or its number if it has none.
pub(crate) fn user_name(number: u32) -> String {
    let user = User::from_uid(number.into()).ok().flatten();
    user.map_or_else(|| number.to_string(), |user| user.name)
}

fn number(
    kind: &'static str,
    name: &str,
    find: impl Fn(&str) -> Option<u32>,
) -> Result<u32, UnknownOwner> {
    // The last one is no user and no group: chown(2) takes it for "unchanged".
    let number = name.parse().ok().filter(|number| *number != u32::MAX);
    number.or_else(|| find(name)).ok_or_else(|| UnknownOwner {
        kind,
        name: name.to_owned(),
    })
}

/// Returns the permissions of a socket.
pub(crate) fn socket_access(
    mode: Option<u32>,
    owner: Option<&SocketOwner>,
) -> Result<SocketAccess, UnknownOwner> {
    let group = |name: &str| Some(Group::from_name(name).ok()??.gid.as_raw());
    let user = owner.and_then(|owner| owner.user.as_deref());
    let its_group = owner.and_then(|owner| owner.group.as_deref());
    Ok(SocketAccess {
        mode: mode.unwrap_or(SocketAccess::default().mode),
        user: user.map(user_number).transpose()?,
        group: its_group
            .map(|name| number("group", name, group))
            .transpose()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_have_names_and_numbers() {
        assert_eq!(user_number("root"), Ok(0));
        assert_eq!(user_number("4000000"), Ok(4_000_000));
        assert_eq!(user_name(0), "root");
        assert_eq!(user_name(4_000_000), "4000000");
        for name in ["no-such-user", "4294967295", "-1", "1.5"] {
            let error = user_number(name).unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
        }
    }
}

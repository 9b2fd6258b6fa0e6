//! Names and numbers of users and groups that own sockets and leases.

use nix::unistd::{Group, User};
use nvme_mpt_vmm::options::SocketOwner;
use thiserror::Error;
use vfio_user_server::SocketAccess;

/// Error of an unknown user or group.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("There is no {kind} \"{name}\": create it, or give its number")]
pub struct UnknownOwner {
    /// `user` or `group`.
    kind: &'static str,
    /// Name of the user or group.
    name: String,
}

/// Returns the numeric id of a user that is given by name or number.
///
/// # Errors
/// [`UnknownOwner`].
pub fn resolve_user(name: &str) -> Result<u32, UnknownOwner> {
    let user = |name: &str| Some(User::from_name(name).ok()??.uid.as_raw());
    resolve_id("user", name, user)
}

/// Returns the name of a user; a user without a name yields the number.
pub fn user_name(number: u32) -> String {
    let user = User::from_uid(number.into()).ok().flatten();
    user.map_or_else(|| number.to_string(), |user| user.name)
}

fn resolve_id(
    kind: &'static str,
    name: &str,
    find: impl Fn(&str) -> Option<u32>,
) -> Result<u32, UnknownOwner> {
    // `u32::MAX` is no valid id: chown(2) takes it for "unchanged".
    let number = name.parse().ok().filter(|number| *number != u32::MAX);
    number.or_else(|| find(name)).ok_or_else(|| UnknownOwner {
        kind,
        name: name.to_owned(),
    })
}

/// Returns the user to whose quota the connections of `user` count. This is the owner of the range in `/etc/subuid` that
/// contains `user`, because the owner can start processes with all ids of the range; else `user` itself.
pub(crate) fn quota_user(user: u32) -> u32 {
    // The files are read directly, since an NSS service may take long to answer. A missing file has no ranges.
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    subuid_owner(user, &read("/etc/subuid"), || read("/etc/passwd"))
}

fn subuid_owner(user: u32, ranges: &str, passwd: impl Fn() -> String) -> u32 {
    let owner = ranges.lines().find_map(|line| {
        let mut fields = line.trim().splitn(3, ':');
        let owner = fields.next()?;
        let first: u32 = fields.next()?.parse().ok()?;
        let count: u32 = fields.next()?.parse().ok()?;
        let is_in = user.checked_sub(first).is_some_and(|place| place < count);
        is_in.then_some(owner)
    });
    let Some(owner) = owner else {
        return user;
    };
    let named = |line: &str| {
        let mut fields = line.split(':');
        let is_named = fields.next() == Some(owner);
        is_named.then(|| fields.nth(1)?.parse().ok()).flatten()
    };
    let number = owner.parse().ok();
    number
        .or_else(|| passwd().lines().find_map(named))
        .unwrap_or(user)
}

/// Converts the options `mode=` and `owner=` of a socket to its permissions.
pub(crate) fn socket_access(
    mode: Option<u32>,
    owner: Option<&SocketOwner>,
) -> Result<SocketAccess, UnknownOwner> {
    let group = |name: &str| Some(Group::from_name(name).ok()??.gid.as_raw());
    let user = owner.and_then(|owner| owner.user.as_deref());
    let its_group = owner.and_then(|owner| owner.group.as_deref());
    Ok(SocketAccess {
        mode: mode.unwrap_or(SocketAccess::default().mode),
        user: user.map(resolve_user).transpose()?,
        group: its_group
            .map(|name| resolve_id("group", name, group))
            .transpose()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_a_range_map_to_its_owner() {
        let ranges = "alice:100000:65536\n1001:165536:65536\n# no range\ngone:300000:10\nx:y:z\n";
        let passwd =
            || "root:x:0:0::/:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh\n".to_owned();
        for (user, owner) in [
            (99_999, 99_999),
            (100_000, 1000),
            (165_535, 1000),
            (165_536, 1001),
            (231_071, 1001),
            (231_072, 231_072),
            (1000, 1000),
            (300_001, 300_001),
        ] {
            assert_eq!(subuid_owner(user, ranges, passwd), owner, "{user}");
        }
    }

    #[test]
    fn users_have_names_and_numbers() {
        assert_eq!(resolve_user("root"), Ok(0));
        assert_eq!(resolve_user("4000000"), Ok(4_000_000));
        assert_eq!(user_name(0), "root");
        assert_eq!(user_name(4_000_000), "4000000");
        for name in ["no-such-user", "4294967295", "-1", "1.5"] {
            let error = resolve_user(name).unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
        }
    }
}

//! Identifiers of queues, commands, namespaces and blocks, each as a type of its own, so that they cannot be confused.

use core::fmt;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Declares an identifier type, which has no arithmetic.
macro_rules! id {
    ($(#[$meta:meta])* $name:ident($repr:ident)) => {
        $(#[$meta])*
        #[repr(transparent)]
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash,
            FromBytes, IntoBytes, Immutable, KnownLayout,
        )]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
        pub struct $name(pub $repr);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl From<$repr> for $name {
            fn from(value: $repr) -> Self {
                Self(value)
            }
        }
    };
}

id! {
    /// Queue Identifier, of a Submission or a Completion Queue (Base 2.0, section 3.3).
    QueueId(u16)
}

impl QueueId {
    /// The Admin Submission Queue and the Admin Completion Queue (Base 2.0, section 3.3.1).
    pub const ADMIN: Self = Self(0);
}

id! {
    /// Command Identifier: unique among the outstanding commands of a Submission Queue
    /// (Base 2.0, section 3.3.3.1, CDW0.CID).
    CommandId(u16)
}

impl CommandId {
    /// Reserved value that identifies no command (Base 2.0, section 3.3.3.1).
    pub const NONE: Self = Self(0xFFFF);
}

id! {
    /// Namespace Identifier (Base 2.0, section 3.2.1).
    Nsid(u32)
}

impl Nsid {
    /// NSID of commands for no namespace, or for the controller as a whole.
    pub const NONE: Self = Self(0);
    /// NSID of commands for all namespaces, where allowed (Base 2.0, section 3.2.1.2).
    pub const BROADCAST: Self = Self(0xFFFF_FFFF);
}

id! {
    /// Address of a logical block in its namespace (NVM Command Set 1.0, section 2.1).
    Lba(u64)
}

impl Lba {
    /// Returns the address of the block `blocks` blocks further on; `None` on overflow.
    #[inline]
    #[must_use]
    pub const fn checked_add(self, blocks: u64) -> Option<Self> {
        match self.0.checked_add(blocks) {
            Some(lba) => Some(Self(lba)),
            None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_lba_never_wraps() {
        assert_eq!(Lba(7).checked_add(8), Some(Lba(15)));
        assert_eq!(Lba(u64::MAX).checked_add(0), Some(Lba(u64::MAX)));
        assert_eq!(Lba(u64::MAX).checked_add(1), None);
    }

    #[test]
    fn ids_print_as_their_number() {
        assert_eq!(QueueId::ADMIN.to_string(), "0");
        assert_eq!(Nsid::BROADCAST.to_string(), "4294967295");
    }
}

//! The identity of a drive: all names that its bytes may be known by.

use std::collections::BTreeMap;

/// Names of the bytes of a drive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// The name that leases, locks and guests know the bytes by.
    pub name: String,
    /// Names that these bytes certainly had in this boot of the host: with an earlier version, or before they got a label. What
    /// the ledger has under them moves to `name`.
    pub formerly: Vec<String>,
    /// Names that the bytes would have if the host reported more of them or less: a disk without its serial number, or a
    /// file on a disk that got one. Data under them refuses a lease, but never gives one.
    pub others: Vec<String>,
    /// Facts of a physical drive.
    pub facts: Option<DriveFacts>,
}

/// Facts of a physical drive, which tell another drive in its place or other content under its name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriveFacts {
    /// Its PCI address.
    pub address: String,
    /// NGUIDs or EUI-64s in hexadecimal digits, by namespace. Namespaces without either may be left out.
    pub ids: BTreeMap<u32, String>,
}

impl From<String> for Identity {
    fn from(name: String) -> Self {
        Self {
            name,
            ..Self::default()
        }
    }
}

/// An [`Identity`] by reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdentityRef<'a> {
    /// As [`Identity::name`].
    pub name: &'a str,
    /// As [`Identity::formerly`].
    pub formerly: &'a [String],
    /// As [`Identity::others`].
    pub others: &'a [String],
    /// As [`Identity::facts`].
    pub facts: Option<&'a DriveFacts>,
}

impl<'a> From<&'a Identity> for IdentityRef<'a> {
    fn from(identity: &'a Identity) -> Self {
        let Identity {
            name,
            formerly,
            others,
            facts,
        } = identity;
        Self {
            name,
            formerly,
            others,
            facts: facts.as_ref(),
        }
    }
}

impl<'a> From<&'a str> for IdentityRef<'a> {
    fn from(name: &'a str) -> Self {
        Self {
            name,
            formerly: &[],
            others: &[],
            facts: None,
        }
    }
}

impl<'a> From<&'a String> for IdentityRef<'a> {
    fn from(name: &'a String) -> Self {
        name.as_str().into()
    }
}

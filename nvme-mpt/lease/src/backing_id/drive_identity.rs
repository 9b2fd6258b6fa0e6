//! Identity of a drive: all possible names of its bytes.

use std::collections::BTreeMap;

/// Names of the bytes of a drive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriveIdentity {
    /// Current name, which leases, locks and guests use.
    pub name: String,
    /// Other names that exactly these bytes have in this boot: the name before the drive got a label. Ledger entries under
    /// these names are moved to `name`.
    pub former_names: Vec<String>,
    /// Names that the bytes would have if the host reported more or fewer of their attributes, such as no serial number.
    /// Data of an id under such a name refuses a lease, but never justifies one.
    pub possible_names: Vec<String>,
    /// Facts about a physical drive.
    pub facts: Option<DriveFacts>,
}

/// Facts about a physical drive, by which the ledger detects an exchanged drive or changed content.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriveFacts {
    /// PCI address of the drive.
    pub address: String,
    /// NGUID or EUI-64 of each namespace, in hexadecimal digits. Namespaces without either may be missing.
    pub ids: BTreeMap<u32, String>,
}

impl From<String> for DriveIdentity {
    fn from(name: String) -> Self {
        Self {
            name,
            ..Self::default()
        }
    }
}

/// Borrowed form of an [`DriveIdentity`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriveIdentityRef<'a> {
    /// See [`DriveIdentity::name`].
    pub name: &'a str,
    /// See [`DriveIdentity::former_names`].
    pub former_names: &'a [String],
    /// See [`DriveIdentity::possible_names`].
    pub possible_names: &'a [String],
    /// See [`DriveIdentity::facts`].
    pub facts: Option<&'a DriveFacts>,
}

impl<'a> From<&'a DriveIdentity> for DriveIdentityRef<'a> {
    fn from(identity: &'a DriveIdentity) -> Self {
        let DriveIdentity {
            name,
            former_names: formerly,
            possible_names: others,
            facts,
        } = identity;
        Self {
            name,
            former_names: formerly,
            possible_names: others,
            facts: facts.as_ref(),
        }
    }
}

impl<'a> From<&'a str> for DriveIdentityRef<'a> {
    fn from(name: &'a str) -> Self {
        Self {
            name,
            former_names: &[],
            possible_names: &[],
            facts: None,
        }
    }
}

impl<'a> From<&'a String> for DriveIdentityRef<'a> {
    fn from(name: &'a String) -> Self {
        name.as_str().into()
    }
}

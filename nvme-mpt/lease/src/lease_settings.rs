//! Settings of an id: the user that owns its leases, and the limits that an operator set.
//!
//! The ledger stores the settings by id, so that they outlive leases and processes. The settings are removed when the operator
//! releases the id, or when the id has neither a lease nor data.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Settings of an id: the owner of its leases, and its limits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeaseSettings {
    /// User id of the owner of the id's leases; `None` if they have no owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<u32>,
    /// Limits that the operator set for functions in VMMs, as the text of command-line options. The ledger does not parse the
    /// text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<String>,
}

/// Settings (owner and limits) of each id that has any.
pub(super) type LeaseSettingsById = BTreeMap<String, LeaseSettings>;

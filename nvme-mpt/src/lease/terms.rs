//! Terms of an id: the user that owns its leases, and the limits that an operator gave them.
//!
//! The ledger has them by the id. They outlive each lease and each process, and end when the operator releases the id,
//! or when no byte has data of the id any more.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Terms of an id.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeaseTerms {
    /// Number of the user that owns leases of the id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<u32>,
    /// Limits of the operator for functions in VMMs, as options. The ledger does not read them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<String>,
}

/// Terms by their ids.
pub(super) type TermsOfIds = BTreeMap<String, LeaseTerms>;

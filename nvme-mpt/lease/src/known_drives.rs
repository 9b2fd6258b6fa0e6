//! Facts about physical drives that the ledger stores.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::range::ByteSize;

/// Facts about a drive that the ledger recorded at its last lease.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct KnownDrive {
    /// PCI address of the drive.
    pub(super) address: String,
    pub(super) namespaces: BTreeMap<u32, KnownNamespace>,
}

/// Facts about a namespace that the ledger recorded at its last lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct KnownNamespace {
    /// NGUID or EUI-64, in hexadecimal digits; empty if the namespace has not reported either.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) id: String,
    pub(super) blocks: u64,
    pub(super) lba_shift: u8,
}

impl KnownNamespace {
    fn bytes(&self) -> ByteSize {
        ByteSize(self.blocks.saturating_mul(1 << self.lba_shift))
    }

    /// Describes a difference between these facts and the present facts `now` that may mean other content; `None` if there is
    /// none.
    pub(super) fn describe_change(&self, now: &Self) -> Option<String> {
        if !self.id.is_empty() && !now.id.is_empty() && self.id != now.id {
            return Some(format!("has the id {}, and had {}", now.id, self.id));
        }
        if self.lba_shift != now.lba_shift {
            let [now, before] = [now, self].map(|of| ByteSize(1 << of.lba_shift));
            return Some(format!("has blocks of {now}, and had blocks of {before}"));
        }
        // A namespace that has grown still has all leased bytes.
        (now.blocks < self.blocks).then(|| format!("has {}, and had {}", now.bytes(), self.bytes()))
    }
}

/// Recorded facts about drives on which an id has a lease or data, by the drives' names.
pub(super) type KnownDrives = BTreeMap<String, KnownDrive>;

//! Formats of a lease's namespace, one for each I/O command set.

use serde::{Deserialize, Serialize};

use crate::spec::ids::Lba;
use crate::spec::key_value::KvFormat;
use crate::spec::zns::ChangedZoneList;

/// Format of a namespace, by its command set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NamespaceFormat {
    /// Logical blocks, of the NVM Command Set.
    Blocks,
    /// Logical blocks in zones, of the Zoned Namespace Command Set.
    Zones(NamespaceZones),
    /// Keys and values, of the Key Value Command Set.
    Keys(KvFormat),
}

impl NamespaceFormat {
    /// Returns the promises that it makes to a guest, by name.
    pub(crate) fn promises(&self) -> Vec<(&'static str, u64)> {
        match *self {
            Self::Blocks => Vec::new(),
            Self::Zones(NamespaceZones {
                geometry,
                resources,
                append_bytes_max,
            }) => vec![
                ("zone size", geometry.size),
                ("zone capacity", geometry.capacity),
                ("open zones (MOR)", resources.open.into()),
                ("active zones (MAR)", resources.active.into()),
                ("bytes of a Zone Append command", append_bytes_max),
            ],
            Self::Keys(KvFormat { kml, vml, mnk, .. }) => vec![
                ("bytes of a key (KML)", kml.into()),
                ("bytes of a value (VML)", vml.into()),
                ("keys (MNK)", mnk.into()),
            ],
        }
    }
}

/// Zones of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceZones {
    /// Division into zones.
    pub geometry: Geometry,
    /// Most zones in use at a time.
    pub resources: Resources,
    /// Most bytes of a Zone Append command, a power of two of memory pages.
    pub append_bytes_max: u64,
}

/// Division of a lease into zones, in logical blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Geometry {
    /// Zone Size: from the start of a zone to that of the next, a power of two.
    pub size: u64,
    /// Zone Capacity: those of them that can be written.
    pub capacity: u64,
}

/// Most zones that can be in use at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// Maximum Open Resources: zones that are open, implicitly or explicitly.
    pub open: u32,
    /// Maximum Active Resources: zones that are open or closed.
    pub active: u32,
}

/// Zones of a lease that change by themselves.
pub trait ZoneChanges {
    /// Returns the zones that changed by themselves.
    fn changed(&self) -> ChangedZones;

    /// Adds zones that changed, and of which the guest was not told.
    fn recall_changed(&self, untold: &ChangedZones);

    /// Forgets zones of which the guest was told; what changed since stays.
    fn forget_changed(&self, told: &ChangedZones);
}

/// Zones that changed by themselves since their guest was told, by their Zone Start LBAs in the lease.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ChangedZones {
    starts: Vec<Lba>,
    /// There are others, which are not known one by one.
    more: bool,
}

impl ChangedZones {
    /// Those that start at some LBAs, and others if there are `more`.
    #[must_use]
    pub fn new(starts: &[Lba], more: bool) -> Self {
        let mut changed = Self::default();
        starts.iter().for_each(|start| changed.add(*start));
        changed.more |= more;
        changed
    }

    /// Those that are known one by one.
    #[must_use]
    pub fn starts(&self) -> &[Lba] {
        &self.starts
    }

    /// Returns whether there are others.
    #[must_use]
    pub fn are_more(&self) -> bool {
        self.more
    }

    /// All of them; `None` if there are more than a Changed Zone List has room for.
    #[must_use]
    pub fn listed(&self) -> Option<&[Lba]> {
        (!self.more).then_some(&self.starts)
    }

    /// Adds a zone, once.
    pub fn add(&mut self, start: Lba) {
        if self.starts.contains(&start) {
        } else if self.starts.len() < ChangedZoneList::CAPACITY {
            self.starts.push(start);
        } else {
            self.more = true;
        }
    }

    /// Adds others.
    pub fn recall(&mut self, untold: &Self) {
        untold.starts.iter().for_each(|start| self.add(*start));
        self.more |= untold.more;
    }

    /// Removes those that the guest was told of; they were the first ones here.
    pub fn forget(&mut self, told: &Self) {
        self.starts
            .drain(..told.starts.len().min(self.starts.len()));
        self.more &= !told.more;
    }
}

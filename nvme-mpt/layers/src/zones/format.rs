//! Format of a zoned namespace, and its description for the guest.

use nvme_guest::address::log2_pages;
use nvme_guest::host::{
    ChangeListDescription, CommandSetDescription, GuestPromise, IdentifyNamespaceData, IoCommand,
    NamespaceContents, SparseStructure,
};
use nvme_spec::event::AsyncEvent;
use nvme_spec::feature::AsyncEventConfiguration;
use nvme_spec::identify::Csi;
use nvme_spec::log::LogPageId;
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::zns::{IdentifyControllerZns, IdentifyNamespaceZns, Ozcs};
use zerocopy::FromZeros;

/// Commands that the command set adds to the NVM Command Set.
pub(super) const COMMANDS: [IoCommand; 3] = [
    IoCommand::writing(NvmOpcode::ZONE_MANAGEMENT_SEND.0),
    IoCommand::reading(NvmOpcode::ZONE_MANAGEMENT_RECEIVE.0),
    IoCommand::writing(NvmOpcode::ZONE_APPEND.0),
];

/// Format of a zoned namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZonedNamespaceFormat {
    /// Division of the lease into zones.
    pub geometry: ZoneGeometry,
    /// Limits of open and active zones.
    pub resources: ZoneResources,
    /// Maximum bytes of a Zone Append: a number of memory pages that is a power of two.
    pub append_bytes_max: u64,
}

/// Division of a lease into zones, in logical blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZoneGeometry {
    /// Zone Size: number of blocks from the start of a zone to the start of the next zone.
    pub size: u64,
    /// Zone Capacity: number of writable blocks of a zone.
    pub capacity: u64,
}

/// Maximum numbers of open and active zones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZoneResources {
    /// Maximum Open Resources: number of zones that may be open, implicitly or explicitly.
    pub open: u32,
    /// Maximum Active Resources: number of zones that may be open or closed.
    pub active: u32,
}

impl ZonedNamespaceFormat {
    /// Describes the namespace to its guest.
    pub(super) fn describe(&self) -> CommandSetDescription {
        let Self {
            geometry: ZoneGeometry { size, capacity },
            resources: ZoneResources { open, active },
            append_bytes_max,
        } = *self;
        CommandSetDescription {
            csi: Csi::ZONED_NAMESPACE,
            contents: NamespaceContents::Blocks {
                unit: size,
                writable: capacity,
            },
            commands: COMMANDS.to_vec(),
            namespace: self.identify_namespace(),
            controller: self.identify_controller(),
            change_list: Some(ChangeListDescription {
                lid: LogPageId::CHANGED_ZONE_LIST,
                event: AsyncEvent::ZONE_DESCRIPTOR_CHANGED,
                notice: AsyncEventConfiguration::default().with_zone_descriptor(true),
                unit: size,
            }),
            promises: vec![
                GuestPromise::new("zone size", size),
                GuestPromise::new("zone capacity", capacity),
                GuestPromise::new("open zones (MOR)", open),
                GuestPromise::new("active zones (MAR)", active),
                GuestPromise::new("bytes of a Zone Append command", append_bytes_max),
            ],
        }
    }

    /// Builds Identify Namespace (ZNS 1.1, section 4.1.5.1). There are no zone descriptor extensions, no random write areas,
    /// and no recommended limits.
    fn identify_namespace(&self) -> IdentifyNamespaceData {
        let mut id = IdentifyNamespaceZns::new_zeroed();
        id.ozcs = Ozcs::default().with_razb(true);
        id.mar_z = self.resources.active.saturating_sub(1);
        id.mor_z = self.resources.open.saturating_sub(1);
        id.lbafe[0].zsze = self.geometry.size;
        IdentifyNamespaceData {
            structure: SparseStructure::from_structure(&id),
            facts: Vec::new(),
        }
    }

    /// Builds Identify Controller (ZNS 1.1, section 4.1.5.2).
    fn identify_controller(&self) -> SparseStructure {
        let mut id = IdentifyControllerZns::new_zeroed();
        id.zasl = log2_pages(self.append_bytes_max);
        SparseStructure::from_structure(&id)
    }
}

//! Zones of a namespace, and their description for its guest.

use nvme_mpt::address::log2_pages;
use nvme_mpt::host::{
    ChangeListDescription, CommandSetDescription, Contents, IdentifyNamespaceData, IoCommand,
    Promise, Structure,
};
use nvme_mpt::spec::event::AsyncEvent;
use nvme_mpt::spec::feature::AsyncEventConfiguration;
use nvme_mpt::spec::identify::Csi;
use nvme_mpt::spec::log::LogPageId;
use nvme_mpt::spec::opcode::NvmOpcode;
use nvme_mpt::spec::zns::{IdentifyControllerZns, IdentifyNamespaceZns, Ozcs};
use zerocopy::FromZeros;

/// Commands beside those of the NVM Command Set.
pub(super) const COMMANDS: [IoCommand; 3] = [
    IoCommand::writing(NvmOpcode::ZONE_MANAGEMENT_SEND.0),
    IoCommand::reading(NvmOpcode::ZONE_MANAGEMENT_RECEIVE.0),
    IoCommand::writing(NvmOpcode::ZONE_APPEND.0),
];

/// Zones of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceZones {
    /// Division into zones.
    pub geometry: Geometry,
    /// Most zones in use at a time.
    pub resources: Resources,
    /// Most bytes of a Zone Append command, a power of two of memory pages.
    pub append_bytes_max: u64,
}

/// Division of a lease into zones, in logical blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Zone Size: from the start of a zone to that of the next.
    pub size: u64,
    /// Zone Capacity: those of them that can be written.
    pub capacity: u64,
}

/// Most zones that can be in use at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resources {
    /// Maximum Open Resources: zones that are open, implicitly or explicitly.
    pub open: u32,
    /// Maximum Active Resources: zones that are open or closed.
    pub active: u32,
}

impl NamespaceZones {
    /// Describes the namespace to its guest.
    pub(super) fn describe(&self) -> CommandSetDescription {
        let Self {
            geometry: Geometry { size, capacity },
            resources: Resources { open, active },
            append_bytes_max,
        } = *self;
        CommandSetDescription {
            csi: Csi::ZONED_NAMESPACE,
            contents: Contents::Blocks {
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
                Promise::new("zone size", size),
                Promise::new("zone capacity", capacity),
                Promise::new("open zones (MOR)", open),
                Promise::new("active zones (MAR)", active),
                Promise::new("bytes of a Zone Append command", append_bytes_max),
            ],
        }
    }

    /// ZNS 1.1, section 4.1.5.1. No zone descriptor extensions, no random write areas, no limits after which
    /// anything is recommended.
    fn identify_namespace(&self) -> IdentifyNamespaceData {
        let mut id = IdentifyNamespaceZns::new_zeroed();
        id.ozcs = Ozcs::default().with_razb(true);
        id.mar_z = self.resources.active.saturating_sub(1);
        id.mor_z = self.resources.open.saturating_sub(1);
        id.lbafe[0].zsze = self.geometry.size;
        IdentifyNamespaceData {
            structure: Structure::of(&id),
            facts: Vec::new(),
        }
    }

    /// ZNS 1.1, section 4.1.5.2.
    fn identify_controller(&self) -> Structure {
        let mut id = IdentifyControllerZns::new_zeroed();
        id.zasl = log2_pages(self.append_bytes_max);
        Structure::of(&id)
    }
}

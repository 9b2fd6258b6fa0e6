//! The Zoned Namespace Command Set.

use nvme_mpt::{
    Limits,
    host::{ChangedZones, NamespaceZones},
    spec::{
        identify::{Csi, IoCommandSetVector},
        log::LogPageId,
        opcode::NvmOpcode,
        status::Status,
        zns::{ChangedZoneList, IdentifyControllerZns, IdentifyNamespaceZns, Ozcs},
    },
};
use zerocopy::{FromZeros, IntoBytes};

use super::{CommandSet, IoCommand, nvm::Nvm};
use crate::admin::subject::{Subject, bytes, in_pages};

/// Commands beside those of the NVM Command Set, and whether they change the content of logical blocks.
const COMMANDS: [(NvmOpcode, bool); 3] = [
    (NvmOpcode::ZONE_MANAGEMENT_SEND, true),
    (NvmOpcode::ZONE_MANAGEMENT_RECEIVE, false),
    (NvmOpcode::ZONE_APPEND, true),
];

impl CommandSet for NamespaceZones {
    fn csi(&self) -> Csi {
        Csi::ZONED_NAMESPACE
    }

    fn combine(&self, vector: IoCommandSetVector) -> IoCommandSetVector {
        vector.with_zoned(true)
    }

    fn capacity(&self, blocks: u64) -> Option<u64> {
        Some(blocks / self.geometry.size * self.geometry.capacity)
    }

    /// ZNS 1.1, section 4.1.5.1. No zone descriptor extensions, no random write areas, no limits after which
    /// anything is recommended.
    fn namespace(&self, csi: Csi, subject: &Subject<'_>) -> Result<Vec<u8>, Status> {
        if csi != self.csi() {
            return Nvm.namespace(csi, subject);
        }
        let mut id = IdentifyNamespaceZns::new_zeroed();
        id.ozcs = Ozcs::default().with_razb(true);
        id.mar_z = self.resources.active.saturating_sub(1);
        id.mor_z = self.resources.open.saturating_sub(1);
        id.lbafe[0].zsze = self.geometry.size;
        Ok(bytes(id))
    }

    /// ZNS 1.1, section 4.1.5.2.
    fn controller(&self, _: &Subject<'_>) -> Vec<u8> {
        let mut id = IdentifyControllerZns::new_zeroed();
        id.zasl = in_pages(self.append_bytes_max);
        bytes(id)
    }

    fn commands(&self, limits: &Limits) -> Vec<IoCommand> {
        let mut commands = Nvm.commands(limits);
        commands.extend(COMMANDS.map(|(opcode, changes_content)| IoCommand {
            opcode: opcode.0,
            changes_content,
        }));
        commands
    }

    fn log_page(&self) -> Option<LogPageId> {
        Some(LogPageId::CHANGED_ZONE_LIST)
    }

    fn has_zone_notices(&self) -> bool {
        true
    }
}

/// See [`super::changed_zone_list`].
pub(super) fn changed_zone_list(changed: &ChangedZones) -> Vec<u8> {
    let mut log = ChangedZoneList::new_zeroed();
    match changed.listed() {
        Some(zones) => {
            for (place, zone) in log.zids.iter_mut().zip(zones) {
                *place = *zone;
            }
            log.nrzid = u16::try_from(zones.len()).unwrap_or(ChangedZoneList::OVERFLOW);
        }
        None => log.nrzid = ChangedZoneList::OVERFLOW,
    }
    log.as_bytes().to_vec()
}

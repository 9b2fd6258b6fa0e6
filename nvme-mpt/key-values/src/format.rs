//! Format of a key-value namespace, and its description for the guest.

use core::mem::offset_of;

use nvme_guest::host::{
    CommandSetDescription, GuestPromise, IdentifyNamespaceData, IoCommand, NamespaceContents,
    NamespaceFact, NamespaceFactOffset, SparseStructure,
};
use nvme_spec::identify::Csi;
use nvme_spec::key_value::{IdentifyNamespaceKv, KEY_LENGTH_MAX, KvFormat};
use nvme_spec::opcode::KvOpcode;
use zerocopy::FromZeros;

use super::pairs::PAIR_BYTES;

/// Commands of the command set.
pub(super) const COMMANDS: [IoCommand; 7] = [
    IoCommand::reading(KvOpcode::FLUSH.0),
    IoCommand::writing(KvOpcode::STORE.0),
    IoCommand::reading(KvOpcode::RETRIEVE.0),
    IoCommand::reading(KvOpcode::LIST.0),
    IoCommand::writing(KvOpcode::DELETE.0),
    IoCommand::reading(KvOpcode::EXIST.0),
    IoCommand::writing(KvOpcode::BATCH.0),
];

/// Fields of Identify Namespace that the guest's function fills in.
const FACTS: [NamespaceFactOffset; 3] = [
    NamespaceFactOffset {
        offset: offset_of!(IdentifyNamespaceKv, nuse) as u16,
        fact: NamespaceFact::Used,
    },
    NamespaceFactOffset {
        offset: offset_of!(IdentifyNamespaceKv, nguid) as u16,
        fact: NamespaceFact::Nguid,
    },
    NamespaceFactOffset {
        offset: offset_of!(IdentifyNamespaceKv, eui64) as u16,
        fact: NamespaceFact::Eui64,
    },
];

/// Format of a key-value namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvNamespaceFormat {
    /// Capacity in bytes for all keys and values, including an overhead for each pair.
    pub capacity: u64,
    /// Maximum size of a value in bytes.
    pub value_bytes_max: u32,
}

impl KvNamespaceFormat {
    /// Describes the namespace to its guest. For this command set, all of Identify Controller is reserved.
    pub(super) fn describe(&self) -> CommandSetDescription {
        let format = self.format();
        CommandSetDescription {
            csi: Csi::KEY_VALUE,
            contents: NamespaceContents::Other("keys and values".to_owned()),
            commands: COMMANDS.to_vec(),
            namespace: self.identify_namespace(format),
            controller: SparseStructure::default(),
            change_list: None,
            promises: vec![
                GuestPromise::new("bytes of a key (KML)", format.kml),
                GuestPromise::new("bytes of a value (VML)", format.vml),
                GuestPromise::new("keys (MNK)", format.mnk),
            ],
        }
    }

    /// Returns the key value format. Its maximum number of keys is the number of pairs with empty values that fit.
    fn format(&self) -> KvFormat {
        KvFormat {
            kml: KEY_LENGTH_MAX as u16,
            vml: self.value_bytes_max,
            mnk: u32::try_from(self.capacity / PAIR_BYTES).unwrap_or(u32::MAX),
            ..KvFormat::default()
        }
    }

    /// Builds Identify Namespace (KV 1.0, section 4.1.5.1).
    fn identify_namespace(&self, format: KvFormat) -> IdentifyNamespaceData {
        let mut id = IdentifyNamespaceKv::new_zeroed();
        id.nsze = self.capacity;
        id.kvf[0] = format;
        IdentifyNamespaceData {
            structure: SparseStructure::from_structure(&id),
            facts: FACTS.to_vec(),
        }
    }
}

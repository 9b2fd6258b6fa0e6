//! The Key Value Command Set.

use nvme_mpt::{
    Limits,
    spec::{
        identify::{Csi, IDENTIFY_SIZE, IoCommandSetVector},
        key_value::{IdentifyNamespaceKv, KvFormat},
        opcode::KvOpcode,
        status::Status,
    },
};
use zerocopy::FromZeros;

use super::{CommandSet, IoCommand};
use crate::admin::subject::{Subject, bytes};

/// Commands, and whether they change keys and values.
const COMMANDS: [(KvOpcode, bool); 6] = [
    (KvOpcode::FLUSH, false),
    (KvOpcode::STORE, true),
    (KvOpcode::RETRIEVE, false),
    (KvOpcode::LIST, false),
    (KvOpcode::DELETE, true),
    (KvOpcode::EXIST, false),
];

impl CommandSet for KvFormat {
    fn csi(&self) -> Csi {
        Csi::KEY_VALUE
    }

    fn combine(&self, vector: IoCommandSetVector) -> IoCommandSetVector {
        vector.with_key_value(true)
    }

    fn capacity(&self, _: u64) -> Option<u64> {
        None
    }

    /// KV 1.0, section 4.1.5.1.
    fn namespace(&self, csi: Csi, subject: &Subject<'_>) -> Result<Vec<u8>, Status> {
        if csi != self.csi() {
            return Err(Status::INVALID_IO_COMMAND_SET);
        }
        let namespace = subject.namespace;
        let mut id = IdentifyNamespaceKv::new_zeroed();
        id.nsze = subject.blocks << namespace.lba_shift;
        id.nuse = subject.used;
        id.nguid = namespace.nguid;
        id.eui64 = namespace.eui64;
        id.kvf[0] = *self;
        Ok(bytes(id))
    }

    /// All of it is reserved.
    fn controller(&self, _: &Subject<'_>) -> Vec<u8> {
        vec![0; IDENTIFY_SIZE]
    }

    fn commands(&self, _: &Limits) -> Vec<IoCommand> {
        let commands = COMMANDS.map(|(opcode, changes_content)| IoCommand {
            opcode: opcode.0,
            changes_content,
        });
        commands.to_vec()
    }
}

//! The drive's own description: Identify data structures and log pages.

use super::{Controller, DoorbellBufferUse};
use crate::identify::{IDENTIFY_SIZE, OACS_DOORBELL_BUFFER, cns};
use crate::status::{self, StatusCode};

/// Writes a field of a data structure.
fn put(structure: &mut [u8], at: usize, field: &[u8]) {
    structure[at..at + field.len()].copy_from_slice(field);
}

/// Writes an ASCII field, padded with spaces to its length.
fn put_text(structure: &mut [u8], at: usize, len: usize, text: &str) {
    structure[at..at + len].fill(b' ');
    put(structure, at, text.as_bytes());
}

impl Controller {
    pub(super) fn identify(&self, kind: u8, nsid: u32) -> Result<Vec<u8>, StatusCode> {
        let mut data = vec![0; IDENTIFY_SIZE];
        match kind {
            cns::CONTROLLER => self.identify_controller(&mut data),
            cns::NAMESPACE => {
                if nsid == 0 || nsid > self.nn() {
                    return Err(status::INVALID_NAMESPACE);
                }
                self.identify_namespace(nsid, &mut data);
            }
            cns::ACTIVE_NAMESPACES => {
                let above = self.namespaces.range(nsid.saturating_add(1)..);
                for (index, (id, _)) in above.take(1024).enumerate() {
                    put(&mut data, 4 * index, &id.to_le_bytes());
                }
            }
            cns::CSI_CONTROLLER if self.options.version >= 0x2_0000 => {
                data[..3].fill(self.options.no_data_limit);
            }
            _ => return Err(status::INVALID_FIELD),
        }
        Ok(data)
    }

    fn nn(&self) -> u32 {
        self.namespaces.keys().last().copied().unwrap_or(1)
    }

    fn identify_controller(&self, data: &mut [u8]) {
        let options = &self.options;
        put(data, 0, &0x1D1D_u16.to_le_bytes());
        put_text(data, 4, 20, "MODEL0001");
        put_text(data, 24, 40, "Model of an NVMe Drive");
        put_text(data, 64, 8, "1.0");
        // RAB (Recommended Arbitration Burst): four commands.
        data[72] = 2;
        data[77] = options.mdts;
        put(data, 80, &options.version.to_le_bytes());
        // OAES (Optional Asynchronous Events Supported): Namespace Attribute Notices.
        put(data, 92, &(1_u32 << 8).to_le_bytes());
        let oacs = match options.doorbell_buffer {
            DoorbellBufferUse::None => 0,
            _ => OACS_DOORBELL_BUFFER,
        };
        put(data, 256, &oacs.to_le_bytes());
        // ACL, AERL and ELPE: 4 each. The fields are zero-based.
        (data[258], data[259], data[262]) = (3, 3, 3);
        // WCTEMP and CCTEMP, in kelvins.
        put(data, 266, &350_u16.to_le_bytes());
        put(data, 268, &370_u16.to_le_bytes());
        put(data, 270, &options.mtfa.to_le_bytes());
        (data[512], data[513]) = (0x66, 0x44);
        put(data, 516, &self.nn().to_le_bytes());
        put(data, 520, &options.oncs.to_le_bytes());
        data[525] = options.volatile_cache.into();
        // AWUN is 8 blocks, and AWUPF is 1 block. Both fields are zero-based.
        put(data, 526, &7_u16.to_le_bytes());
        // OCFS: Copy descriptor format 0.
        data[534] = 1;
        put(data, 536, &u32::from(options.sgl).to_le_bytes());
        put(data, 768, b"nqn.2014-08.org.example:model");
    }

    fn identify_namespace(&self, nsid: u32, data: &mut [u8]) {
        // The data structure of an inactive namespace is all zeroes.
        let Some(namespace) = self.namespaces.get(&nsid) else {
            return;
        };
        let options = namespace.options;
        for at in [0, 8, 16] {
            put(data, at, &options.blocks.to_le_bytes());
        }
        // DLFEAT: deallocated blocks read as zeroes.
        data[33] = 1;
        put(data, 74, &namespace.copy.range_blocks.to_le_bytes());
        put(data, 76, &namespace.copy.blocks.to_le_bytes());
        data[80] = namespace.copy.ranges - 1;
        put(data, 120, &u64::from(nsid).to_be_bytes());
        put(data, 128, &options.metadata.to_le_bytes());
        data[130] = options.lba_shift;
    }

    pub(super) fn health(&self) -> Vec<u8> {
        let mut data = vec![0; 512];
        data[0] = self.critical_warning;
        put(&mut data, 1, &self.temperature.to_le_bytes());
        (data[3], data[4], data[5]) = (100, 10, 1);
        put(&mut data, 64, &self.counters.completed.to_le_bytes());
        put(&mut data, 176, &self.error_count.to_le_bytes());
        data
    }

    /// Returns the log page with the newest error.
    pub(super) fn error_information(&self) -> Vec<u8> {
        let mut data = vec![0; 64];
        put(&mut data, 0, &self.error_count.to_le_bytes());
        data
    }

    pub(super) fn changed_namespaces(&self) -> Vec<u8> {
        let list = self.changed_namespaces.iter();
        list.flat_map(|nsid| nsid.to_le_bytes()).collect()
    }
}

//! Identify (Base 2.0, section 5.17; NVM 1.0, section 4.1.5). The lease's [`CommandSets`] describe the differences between
//! command sets.

use nvme_guest::host::{CommandSetDescription, CommandSets, NamespaceFact};
use nvme_spec::{
    admin::IdentifyCommand,
    feature::AsyncEventConfiguration,
    identify::{
        Cns, ControllerType, Csi, DeallocatedRead, Dlfeat, FlushBroadcast, Frmw, IDENTIFY_SIZE,
        IdentifyController, IdentifyNamespace, IdentifyNamespaceIndependent, IoCommandSetVector,
        LbaFormat, Lpa, NsIdDescriptorHeader, NsIdType, Nstat, Oacs, Oaes, Oncs, QueueEntrySizes,
        Sgls, Vwc,
    },
    ids::Nsid,
    opcode::NvmOpcode,
    registers::NvmeVersion,
    status::Status,
};
use zerocopy::{FromZeros, IntoBytes, little_endian::U128};

use super::{
    abort, async_events, error_log,
    identify_subject::{IdentifySubject, saturating_u32, structure_bytes},
};
use crate::pci::config_space::VENDOR_ID;

/// `CNTLID`, the controller's identifier: zero, because each controller is the only one of its NVM subsystem.
pub(super) const CONTROLLER_ID: u16 = 0;
/// `CNTID` value that stands for the controller that processes the command.
const THIS_CONTROLLER: u16 = 0xFFFF;
/// Firmware Revision: this crate's version, padded with spaces.
pub(super) const FIRMWARE_REVISION: [u8; 8] = padded(env!("CARGO_PKG_VERSION"));
/// `RTD3E`, in microseconds: expected time of a shutdown, including a flush of the drive.
const SHUTDOWN_TIME: u32 = 5_000_000;
/// Largest `NOIOB` in blocks: the largest power of two that fits into the field.
const NOIOB_MAX: u64 = 1 << 15;
/// `RAB`, as a base-2 logarithm: 64 commands.
pub(super) const ARBITRATION_BURST: u8 = 6;

impl IdentifySubject<'_> {
    /// Returns the data structure of 4,096 bytes that an Identify command requests.
    pub(super) fn identify(&self, command: IdentifyCommand, nsid: Nsid) -> Result<Vec<u8>, Status> {
        let structure = match command.cns {
            Cns::NAMESPACE => {
                self.require_namespace(nsid)?;
                let capacity = self.command_set().contents.capacity(self.blocks);
                let capacity = capacity.ok_or(Status::INVALID_IO_COMMAND_SET)?;
                self.with_namespace_or_zeroes(nsid, |subject| subject.namespace(capacity))?
            }
            Cns::CONTROLLER => self.controller(),
            Cns::ACTIVE_NSID_LIST => self.active_namespaces(nsid)?,
            Cns::NS_ID_DESCRIPTOR_LIST => self.with_namespace(nsid, Self::namespace_descriptors)?,
            Cns::IOCS_NAMESPACE => {
                self.require_namespace(nsid)?;
                let structure = self.command_set_namespace(command.csi)?;
                self.with_namespace_or_zeroes(nsid, |_| structure)?
            }
            Cns::IOCS_CONTROLLER => {
                let set = self.command_sets().find(command.csi);
                let set = set.ok_or(Status::INVALID_FIELD)?;
                set.controller.to_bytes(IDENTIFY_SIZE)
            }
            Cns::IOCS_ACTIVE_NSID_LIST => match command.csi {
                csi if csi == self.csi() => self.active_namespaces(nsid)?,
                // The NVM Command Set is listed only because other command sets are based on it, so it has no namespaces here.
                Csi::NVM => vec![0; IDENTIFY_SIZE],
                _ => return Err(Status::INVALID_FIELD),
            },
            Cns::INDEPENDENT_NAMESPACE => {
                self.with_namespace_or_zeroes(nsid, Self::namespace_independent)?
            }
            Cns::IO_COMMAND_SETS => self.combinations(command.cntid)?,
            _ => return Err(Status::INVALID_FIELD),
        };
        debug_assert_eq!(structure.len(), IDENTIFY_SIZE);
        Ok(structure)
    }

    fn with_namespace(
        &self,
        nsid: Nsid,
        structure: impl FnOnce(&Self) -> Vec<u8>,
    ) -> Result<Vec<u8>, Status> {
        self.require_namespace(nsid)?;
        // An identifier of an inactive namespace is an invalid field (Base 2.0, section 3.2.1.3).
        if !self.is_active {
            return Err(Status::INVALID_FIELD);
        }
        Ok(structure(self))
    }

    /// Returns a data structure of the namespace. All its bytes are zero if the namespace is inactive (Base 2.0, section
    /// 5.17.2, Figure 273).
    fn with_namespace_or_zeroes(
        &self,
        nsid: Nsid,
        structure: impl FnOnce(&Self) -> Vec<u8>,
    ) -> Result<Vec<u8>, Status> {
        self.require_namespace(nsid)?;
        if !self.is_active {
            return Ok(vec![0; IDENTIFY_SIZE]);
        }
        Ok(structure(self))
    }

    /// Checks that `nsid` is the guest's namespace. The broadcast value is refused, since there is no Namespace Management.
    pub(super) fn require_namespace(&self, nsid: Nsid) -> Result<(), Status> {
        if nsid != self.namespace.nsid {
            return Err(Status::INVALID_NAMESPACE_OR_FORMAT);
        }
        Ok(())
    }

    /// Identify Controller (Base 2.0, section 5.17.2.1). A field that stays zero reports that a feature is not supported, or
    /// that there is no limit.
    fn controller(&self) -> Vec<u8> {
        let mut id = IdentifyController::new_zeroed();
        id.vid = VENDOR_ID;
        id.ssvid = VENDOR_ID;
        id.sn = padded(&self.namespace.serial);
        id.mn = padded(&self.namespace.model);
        id.fr = FIRMWARE_REVISION;
        id.rab = ARBITRATION_BURST;
        id.mdts = self.limits.mdts;
        id.cntlid = CONTROLLER_ID;
        id.ver = NvmeVersion::V2_0;
        id.rtd3e = SHUTDOWN_TIME;
        let AsyncEventConfiguration(notices) = self.notices();
        id.oaes = Oaes(notices).with_namespace_attribute(true);
        id.cntrltype = ControllerType::IO;
        id.oacs = Oacs::default().with_doorbell_buffer_config(self.has_doorbell_buffer);
        id.acl_z = abort::LIMIT_Z;
        id.aerl_z = async_events::LIMIT_Z;
        id.frmw = Frmw::default()
            .with_first_slot_read_only(true)
            .with_slots(1);
        id.lpa = Lpa::default()
            .with_smart_per_namespace(true)
            .with_commands_effects(true)
            .with_extended_data(true);
        id.elpe_z = error_log::ENTRIES_Z;
        id.wctemp = self.thresholds.warning;
        id.cctemp = self.thresholds.critical;
        id.sqes = QueueEntrySizes::SQ;
        id.cqes = QueueEntrySizes::CQ;
        id.nn = self.namespace.nsid.0;
        let supports = |opcode| self.limits.supports(opcode);
        id.oncs = Oncs::default()
            .with_compare(supports(NvmOpcode::COMPARE))
            .with_write_uncorrectable(supports(NvmOpcode::WRITE_UNCORRECTABLE))
            .with_dsm(supports(NvmOpcode::DATASET_MANAGEMENT))
            .with_write_zeroes(supports(NvmOpcode::WRITE_ZEROES))
            .with_save_select(true)
            .with_timestamp(true)
            .with_verify(supports(NvmOpcode::VERIFY))
            .with_copy(supports(NvmOpcode::COPY));
        id.vwc = Vwc::default()
            .with_present(self.limits.volatile_write_cache)
            .with_flush_broadcast(FlushBroadcast::SUPPORTED);
        id.awun_z = self.limits.awun_z;
        id.awupf_z = self.limits.awupf_z;
        // Copy has source range entries of format 0 only.
        id.cdfs = supports(NvmOpcode::COPY).into();
        // SGLs can have any alignment, if the controller supports SGLs.
        id.sgls = Sgls::default().with_support(u8::from(self.limits.sgl_descriptors_max > 0));
        copy_text(&mut id.subnqn, &subsystem_nqn(&self.namespace.uuid));
        structure_bytes(id)
    }

    fn command_sets(&self) -> &CommandSets {
        &self.namespace.command_sets
    }

    /// Returns the description of the command set that the namespace has.
    fn command_set(&self) -> &CommandSetDescription {
        self.command_sets().native()
    }

    fn csi(&self) -> Csi {
        self.command_set().csi
    }

    /// Returns the I/O Command Set specific Identify Namespace data structure (CNS 05h) of a command set.
    fn command_set_namespace(&self, csi: Csi) -> Result<Vec<u8>, Status> {
        let Some(set) = self.command_sets().find_executed(csi) else {
            return Err(match self.command_set().has_blocks() {
                true => Status::INVALID_FIELD,
                false => Status::INVALID_IO_COMMAND_SET,
            });
        };
        let used = self.used_bytes.to_le_bytes();
        let value = |fact| match fact {
            NamespaceFact::Used => used.as_slice(),
            NamespaceFact::Nguid => &self.namespace.nguid,
            NamespaceFact::Eui64 => &self.namespace.eui64,
        };
        Ok(set.namespace.to_bytes(IDENTIFY_SIZE, value))
    }

    /// Identify Namespace (NVM 1.0, section 4.1.5.1).
    fn namespace(&self, capacity: u64) -> Vec<u8> {
        let namespace = self.namespace;
        let mut id = IdentifyNamespace::new_zeroed();
        id.nsze = self.blocks;
        id.ncap = capacity;
        id.nuse = capacity;
        if self.limits.deallocated_reads_zeroes {
            id.dlfeat = Dlfeat::default()
                .with_read(DeallocatedRead::ZEROES)
                .with_write_zeroes_deac(self.limits.supports(NvmOpcode::WRITE_ZEROES));
        }
        id.nvmcap = U128::new(u128::from(self.blocks) << namespace.lba_shift);
        if self.limits.supports(NvmOpcode::COPY) {
            let (blocks, ranges) = (
                self.bytes_to_blocks(self.limits.copy_bytes_max),
                self.limits.copy_ranges_max,
            );
            id.mssrl = u16::try_from(blocks).unwrap_or(u16::MAX);
            id.mcl = saturating_u32(blocks);
            id.msrc_z = u8::try_from(ranges.saturating_sub(1)).unwrap_or(u8::MAX);
        }
        // `NOIOB` (NVM 1.0, Figure 97). If the unit exceeds the field, a smaller power of two is reported, since its boundaries
        // include those of the unit.
        let boundary = self.unit_blocks.map_or(0, |unit| unit.min(NOIOB_MAX));
        id.noiob = boundary as u16;
        id.nguid = namespace.nguid;
        id.eui64 = namespace.eui64;
        id.lbaf[0] = LbaFormat::default().with_lbads(namespace.lba_shift);
        structure_bytes(id)
    }

    /// I/O Command Set Independent Identify Namespace (Base 2.0, section 5.17.2.8).
    fn namespace_independent(&self) -> Vec<u8> {
        let mut id = IdentifyNamespaceIndependent::new_zeroed();
        id.nstat = Nstat::default().with_nrdy(true);
        structure_bytes(id)
    }

    /// Active Namespace ID list: active identifiers above `nsid` (Base 2.0, section 5.17.2.2).
    fn active_namespaces(&self, nsid: Nsid) -> Result<Vec<u8>, Status> {
        if nsid.0 >= Nsid::BROADCAST.0 - 1 {
            return Err(Status::INVALID_NAMESPACE_OR_FORMAT);
        }
        let mut list = vec![0; IDENTIFY_SIZE];
        if self.is_active && self.namespace.nsid > nsid {
            list[..4].copy_from_slice(self.namespace.nsid.as_bytes());
        }
        Ok(list)
    }

    /// Namespace Identification Descriptor list (Base 2.0, section 5.17.2.3).
    fn namespace_descriptors(&self) -> Vec<u8> {
        let mut list = Vec::with_capacity(IDENTIFY_SIZE);
        let mut add = |nidt: NsIdType, id: &[u8]| {
            if let Some(header) = NsIdDescriptorHeader::new(nidt) {
                list.extend_from_slice(header.as_bytes());
                list.extend_from_slice(id);
            }
        };
        add(NsIdType::EUI64, &self.namespace.eui64);
        add(NsIdType::NGUID, &self.namespace.nguid);
        add(NsIdType::UUID, &self.namespace.uuid);
        add(NsIdType::CSI, &[self.csi().0]);
        list.resize(IDENTIFY_SIZE, 0);
        list
    }

    /// Identify I/O Command Set: one combination (Base 2.0, section 5.17.2.21). A command set other than NVM is always combined
    /// with NVM, because hosts request the data structures of NVM before they read those of the namespace's command set.
    fn combinations(&self, controller: u16) -> Result<Vec<u8>, Status> {
        if controller != THIS_CONTROLLER && controller != CONTROLLER_ID {
            return Err(Status::INVALID_FIELD);
        }
        let mut vectors = vec![0; IDENTIFY_SIZE];
        let vector = IoCommandSetVector::default()
            .with_nvm(true)
            .with_csi(self.csi());
        vectors[..8].copy_from_slice(vector.as_bytes());
        Ok(vectors)
    }
}

/// Returns printable ASCII, padded with spaces (Base 2.0, section 1.4.2).
const fn padded<const N: usize>(text: &str) -> [u8; N] {
    let text = text.as_bytes();
    let mut field = [b' '; N];
    let mut index = 0;
    while index < N && index < text.len() {
        let byte = text[index];
        field[index] = if byte.is_ascii_graphic() || byte == b' ' {
            byte
        } else {
            b'?'
        };
        index += 1;
    }
    field
}

fn copy_text(field: &mut [u8], text: &str) {
    for (byte, character) in field.iter_mut().zip(text.bytes()) {
        *byte = character;
    }
}

/// Returns the UUID-based NVMe Qualified Name (Base 2.0, section 4.5).
fn subsystem_nqn(uuid: &[u8; 16]) -> String {
    let mut nqn = String::from("nqn.2014-08.org.nvmexpress:uuid:");
    for (index, byte) in uuid.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            nqn.push('-');
        }
        for nibble in [byte >> 4, byte & 0xF] {
            nqn.push(char::from_digit(u32::from(nibble), 16).unwrap_or('0'));
        }
    }
    nqn
}

#[cfg(test)]
mod tests;

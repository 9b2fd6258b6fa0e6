//! Identify (Base 2.0, section 5.17; NVM 1.0, section 4.1.5).

use nvme_mpt::{
    LeasedNamespace, Limits,
    host::TemperatureThresholds,
    spec::{
        admin::Identify,
        identify::{
            Cns, ControllerType, Csi, DeallocatedRead, Dlfeat, FlushBroadcast, Frmw, IDENTIFY_SIZE,
            IdentifyController, IdentifyControllerNvm, IdentifyNamespace,
            IdentifyNamespaceIndependent, IdentifyNamespaceNvm, IoCommandSetVector, LbaFormat, Lpa,
            NsIdDescriptorHeader, NsIdType, Nstat, Oacs, Oaes, Oncs, QueueEntrySizes, Sgls, Vwc,
        },
        ids::Nsid,
        opcode::NvmOpcode,
        registers::Version,
        status::Status,
    },
};
use zerocopy::{FromZeros, IntoBytes, little_endian::U128};

use super::{abort, async_events, error_log};
use crate::pci::config_space::VENDOR_ID;

/// `CNTLID`: each controller is alone in an NVM subsystem of its own.
pub(super) const CONTROLLER_ID: u16 = 0;
/// `CNTID` that stands for the controller that processes the command.
const THIS_CONTROLLER: u16 = 0xFFFF;
/// Firmware Revision: this crate's version, padded with spaces.
pub(super) const FIRMWARE_REVISION: [u8; 8] = padded(env!("CARGO_PKG_VERSION"));
/// `RTD3E`, in microseconds: what a shutdown is expected to take, with a flush of the drive.
const SHUTDOWN_TIME: u32 = 5_000_000;
/// `RAB`, as a power of two: 64 commands.
pub(super) const ARBITRATION_BURST: u8 = 6;

/// What Identify describes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Subject<'a> {
    pub(super) namespace: &'a LeasedNamespace,
    pub(super) limits: &'a Limits,
    /// Whether Doorbell Buffer Config is offered.
    pub(super) doorbell_buffer: bool,
    /// Whether the namespace is active: a drive that is gone leaves a controller without one.
    pub(super) active: bool,
    pub(super) thresholds: TemperatureThresholds,
}

impl Subject<'_> {
    /// The data structure that a command asks for, or at least its beginning: what is left of
    /// 4,096 bytes is zero.
    pub(super) fn identify(&self, command: Identify, nsid: Nsid) -> Result<Vec<u8>, Status> {
        let structure = match command.cns {
            Cns::NAMESPACE => self.with_namespace_or_zeroes(nsid, Self::namespace)?,
            Cns::CONTROLLER => self.controller(),
            Cns::ACTIVE_NSID_LIST => self.active_namespaces(nsid)?,
            Cns::NS_ID_DESCRIPTOR_LIST => self.with_namespace(nsid, Self::descriptors)?,
            Cns::IOCS_NAMESPACE => {
                require_nvm(command.csi)?;
                // No protection information, hence no storage tags and no extended formats.
                self.with_namespace_or_zeroes(nsid, |_| bytes(IdentifyNamespaceNvm::new_zeroed()))?
            }
            Cns::IOCS_CONTROLLER => {
                require_nvm(command.csi)?;
                self.controller_nvm()
            }
            Cns::IOCS_ACTIVE_NSID_LIST => {
                require_nvm(command.csi)?;
                self.active_namespaces(nsid)?
            }
            Cns::INDEPENDENT_NAMESPACE => {
                self.with_namespace_or_zeroes(nsid, Self::namespace_independent)?
            }
            Cns::IO_COMMAND_SETS => command_sets(command.cntid)?,
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
        // Base 2.0, section 3.2.1.3.
        if !self.active {
            return Err(Status::INVALID_FIELD);
        }
        Ok(structure(self))
    }

    /// A structure that is filled with zeroes for a namespace that is not active (Base 2.0, section
    /// 5.17.2, Figure 273).
    fn with_namespace_or_zeroes(
        &self,
        nsid: Nsid,
        structure: impl FnOnce(&Self) -> Vec<u8>,
    ) -> Result<Vec<u8>, Status> {
        self.require_namespace(nsid)?;
        if !self.active {
            return Ok(vec![0; IDENTIFY_SIZE]);
        }
        Ok(structure(self))
    }

    /// The namespace must be the one there is. The broadcast value stands for what namespaces have
    /// in common only where there is Namespace Management.
    pub(super) fn require_namespace(&self, nsid: Nsid) -> Result<(), Status> {
        if nsid != self.namespace.nsid {
            return Err(Status::INVALID_NAMESPACE_OR_FORMAT);
        }
        Ok(())
    }

    /// Identify Controller (Base 2.0, section 5.17.2.1). What is not set is not supported, or has
    /// no limit to report.
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
        id.ver = Version::V2_0;
        id.rtd3e = SHUTDOWN_TIME;
        id.oaes = Oaes::default().with_namespace_attribute(true);
        id.cntrltype = ControllerType::IO;
        id.oacs = Oacs::default().with_doorbell_buffer_config(self.doorbell_buffer);
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
        let offers = |opcode| self.limits.offers(opcode);
        id.oncs = Oncs::default()
            .with_compare(offers(NvmOpcode::COMPARE))
            .with_write_uncorrectable(offers(NvmOpcode::WRITE_UNCORRECTABLE))
            .with_dsm(offers(NvmOpcode::DATASET_MANAGEMENT))
            .with_write_zeroes(offers(NvmOpcode::WRITE_ZEROES))
            .with_save_select(true)
            .with_timestamp(true)
            .with_verify(offers(NvmOpcode::VERIFY))
            .with_copy(offers(NvmOpcode::COPY));
        id.vwc = Vwc::default()
            .with_present(self.limits.volatile_write_cache)
            .with_flush_broadcast(FlushBroadcast::SUPPORTED);
        id.awun_z = self.limits.awun_z;
        id.awupf_z = self.limits.awupf_z;
        // Source Range Entries of Copy: format 0.
        id.cdfs = offers(NvmOpcode::COPY).into();
        // SGLs at any alignment, if a command may have any.
        id.sgls = Sgls::default().with_support(u8::from(self.limits.sgl_descriptors_max > 0));
        copy_text(&mut id.subnqn, &subsystem_nqn(&self.namespace.uuid));
        bytes(id)
    }

    /// Identify Controller of the NVM Command Set (NVM 1.0, section 4.1.5.4).
    fn controller_nvm(&self) -> Vec<u8> {
        let size_limit = |opcode| match self.limits.offers(opcode) {
            true => self.size_limit(),
            false => 0,
        };
        let mut id = IdentifyControllerNvm::new_zeroed();
        id.vsl = size_limit(NvmOpcode::VERIFY);
        id.wzsl = size_limit(NvmOpcode::WRITE_ZEROES);
        id.wusl = size_limit(NvmOpcode::WRITE_UNCORRECTABLE);
        if self.limits.offers(NvmOpcode::DATASET_MANAGEMENT) {
            // 256 ranges are what a command can have: no limit.
            id.dmrl = u8::try_from(self.limits.dsm_ranges_max).unwrap_or(0);
            id.dmrsl = saturating_u32(self.blocks(self.limits.dsm_range_bytes_max));
        }
        bytes(id)
    }

    /// `no_data_bytes_max` as a power of two of memory pages. Limits are no smaller than a page.
    fn size_limit(&self) -> u8 {
        let pages = self.limits.no_data_bytes_max / nvme_mpt::address::PAGE_SIZE;
        pages.checked_ilog2().map_or(0, |power| power as u8)
    }

    /// Identify Namespace (NVM 1.0, section 4.1.5.1).
    fn namespace(&self) -> Vec<u8> {
        let namespace = self.namespace;
        let mut id = IdentifyNamespace::new_zeroed();
        id.nsze = namespace.blocks;
        id.ncap = namespace.blocks;
        id.nuse = namespace.blocks;
        if self.limits.deallocated_reads_zeroes {
            id.dlfeat = Dlfeat::default()
                .with_read(DeallocatedRead::ZEROES)
                .with_write_zeroes_deac(self.limits.offers(NvmOpcode::WRITE_ZEROES));
        }
        id.nvmcap = U128::new(u128::from(namespace.blocks) << namespace.lba_shift);
        if self.limits.offers(NvmOpcode::COPY) {
            let (blocks, ranges) = (
                self.blocks(self.limits.copy_bytes_max),
                self.limits.copy_ranges_max,
            );
            id.mssrl = u16::try_from(blocks).unwrap_or(u16::MAX);
            id.mcl = saturating_u32(blocks);
            id.msrc_z = u8::try_from(ranges.saturating_sub(1)).unwrap_or(u8::MAX);
        }
        id.nguid = namespace.nguid;
        id.eui64 = namespace.eui64;
        id.lbaf[0] = LbaFormat::default().with_lbads(namespace.lba_shift);
        bytes(id)
    }

    /// I/O Command Set Independent Identify Namespace (Base 2.0, section 5.17.2.8).
    fn namespace_independent(&self) -> Vec<u8> {
        let mut id = IdentifyNamespaceIndependent::new_zeroed();
        id.nstat = Nstat::default().with_nrdy(true);
        bytes(id)
    }

    /// Active Namespace ID list: those above `nsid` (Base 2.0, section 5.17.2.2).
    fn active_namespaces(&self, nsid: Nsid) -> Result<Vec<u8>, Status> {
        if nsid.0 >= Nsid::BROADCAST.0 - 1 {
            return Err(Status::INVALID_NAMESPACE_OR_FORMAT);
        }
        let mut list = vec![0; IDENTIFY_SIZE];
        if self.active && self.namespace.nsid > nsid {
            list[..4].copy_from_slice(self.namespace.nsid.as_bytes());
        }
        Ok(list)
    }

    /// Namespace Identification Descriptor list (Base 2.0, section 5.17.2.3).
    fn descriptors(&self) -> Vec<u8> {
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
        add(NsIdType::CSI, &[Csi::NVM.0]);
        list.resize(IDENTIFY_SIZE, 0);
        list
    }

    fn blocks(&self, bytes: u64) -> u64 {
        bytes >> self.namespace.lba_shift
    }
}

/// Identify I/O Command Set: one combination, the NVM Command Set alone (Base 2.0, section
/// 5.17.2.21).
fn command_sets(controller: u16) -> Result<Vec<u8>, Status> {
    if controller != THIS_CONTROLLER && controller != CONTROLLER_ID {
        return Err(Status::INVALID_FIELD);
    }
    let mut vectors = vec![0; IDENTIFY_SIZE];
    vectors[..8].copy_from_slice(IoCommandSetVector::default().with_nvm(true).as_bytes());
    Ok(vectors)
}

fn require_nvm(csi: Csi) -> Result<(), Status> {
    if csi == Csi::NVM {
        Ok(())
    } else {
        Err(Status::INVALID_FIELD)
    }
}

fn bytes(structure: impl IntoBytes + zerocopy::Immutable) -> Vec<u8> {
    structure.as_bytes().to_vec()
}

fn saturating_u32(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

/// Printable ASCII, padded with spaces (Base 2.0, section 1.4.2).
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

/// The UUID-based NVMe Qualified Name (Base 2.0, section 4.5).
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
mod tests {
    use super::*;
    use crate::fixtures;

    fn identify(cns: u8, csi: u8, cntid: u16, nsid: u32) -> Result<Vec<u8>, Status> {
        let (namespace, limits) = (fixtures::namespace(), fixtures::limits());
        let subject = Subject {
            namespace: &namespace,
            limits: &limits,
            doorbell_buffer: true,
            active: true,
            thresholds: fixtures::THRESHOLDS,
        };
        let command = Identify {
            cns: Cns(cns),
            csi: Csi(csi),
            cntid,
            ..Identify::default()
        };
        subject.identify(command, Nsid(nsid))
    }

    fn structure(cns: u8, nsid: u32) -> Vec<u8> {
        let structure = identify(cns, 0, 0, nsid).expect("a structure");
        assert_eq!(structure.len(), 4096);
        structure
    }

    #[test]
    fn the_controller_promises_what_it_keeps() {
        let id = structure(0x01, 0);
        assert_eq!(id[0..4], [0x50, 0x4D, 0x50, 0x4D]);
        assert_eq!(&id[4..24], b"0123456789          ");
        assert_eq!(&id[24..64], b"nvme-mpt memory                         ");
        assert_eq!(&id[64..72], b"0.1.0   ");
        assert_eq!(id[77], 8, "MDTS: 1 MiB");
        assert_eq!(id[78..80], [0, 0], "CNTLID");
        assert_eq!(id[80..84], [0, 0, 2, 0], "VER");
        assert_eq!(
            id[92..96],
            [0, 1, 0, 0],
            "OAES: Namespace Attribute Notices"
        );
        assert_eq!(id[111], 1, "I/O controller");
        assert_eq!(id[256..258], [0x00, 0x01], "OACS: Doorbell Buffer Config");
        assert_eq!(id[258..264], [3, 3, 0x03, 0b111, 63, 0], "ACL to NPSS");
        assert_eq!(id[266..270], [0x57, 0x01, 0x75, 0x01], "WCTEMP, CCTEMP");
        assert_eq!(id[320..322], [0, 0], "KAS");
        assert_eq!(id[512..514], [0x66, 0x44]);
        assert_eq!(id[516..520], [1, 0, 0, 0], "NN");
        assert_eq!(id[520..522], [0xDF, 0x01], "ONCS: all but reservations");
        assert_eq!(id[525], 0b111, "VWC: present, broadcast flush");
        assert_eq!(id[526..530], [0; 4], "AWUN, AWUPF");
        assert_eq!(
            id[534..540],
            [1, 0, 1, 0, 0, 0],
            "Copy format 0, SGLs at any byte"
        );
        let nqn = b"nqn.2014-08.org.nvmexpress:uuid:00112233-4455-6677-8899-aabbccddeeff\0";
        assert_eq!(&id[768..768 + nqn.len()], nqn);
    }

    #[test]
    fn doorbell_buffer_config_is_offered_in_shadow_mode_only() {
        let (namespace, limits) = (fixtures::namespace(), fixtures::limits());
        let subject = Subject {
            namespace: &namespace,
            limits: &limits,
            doorbell_buffer: false,
            active: true,
            thresholds: fixtures::THRESHOLDS,
        };
        let command = Identify {
            cns: Cns::CONTROLLER,
            ..Identify::default()
        };
        assert_eq!(
            subject.identify(command, Nsid(0)).expect("a structure")[256..258],
            [0, 0]
        );
    }

    #[test]
    fn nothing_is_promised_that_the_drive_does_not_keep() {
        let namespace = fixtures::namespace();
        let limits = Limits {
            commands: Oncs::default().with_write_zeroes(true).with_verify(true),
            awun_z: 0x1234,
            awupf_z: 0x0056,
            volatile_write_cache: false,
            deallocated_reads_zeroes: false,
            sgl_descriptors_max: 0,
            ..fixtures::limits()
        };
        let subject = Subject {
            namespace: &namespace,
            limits: &limits,
            doorbell_buffer: true,
            active: true,
            thresholds: TemperatureThresholds {
                warning: 0x155,
                critical: 0,
            },
        };
        let identify = |cns, nsid| {
            let command = Identify {
                cns: Cns(cns),
                ..Identify::default()
            };
            subject.identify(command, Nsid(nsid)).expect("a structure")
        };
        let id = identify(0x01, 0);
        assert_eq!(id[266..270], [0x55, 0x01, 0, 0], "WCTEMP, CCTEMP");
        assert_eq!(
            id[520..522],
            [0b1101_1000, 0],
            "ONCS: with Timestamp and Save"
        );
        assert_eq!(id[525], 0b110, "VWC: not present");
        assert_eq!(id[526..530], [0x34, 0x12, 0x56, 0], "AWUN, AWUPF");
        assert_eq!(id[534..540], [0; 6], "no Copy format, no SGLs");
        // VSL and WZSL, but no WUSL, DMRL, DMRSL.
        assert_eq!(identify(0x06, 0)[..8], [18, 18, 0, 0, 0, 0, 0, 0]);
        let id = identify(0x00, 1);
        assert_eq!(id[33], 0, "DLFEAT");
        assert_eq!(id[74..81], [0; 7], "MSSRL, MCL, MSRC");
    }

    #[test]
    fn a_namespace_that_is_not_active_is_listed_nowhere() {
        let (namespace, limits) = (fixtures::namespace(), fixtures::limits());
        let subject = Subject {
            namespace: &namespace,
            limits: &limits,
            doorbell_buffer: true,
            active: false,
            thresholds: fixtures::THRESHOLDS,
        };
        let identify = |cns, nsid| {
            let command = Identify {
                cns: Cns(cns),
                ..Identify::default()
            };
            subject.identify(command, Nsid(nsid))
        };
        for cns in [0x02, 0x07] {
            assert_eq!(identify(cns, 0), Ok(vec![0; 4096]), "CNS {cns:#x}");
        }
        for cns in [0x00, 0x05, 0x08] {
            assert_eq!(identify(cns, 1), Ok(vec![0; 4096]), "CNS {cns:#x}");
            let invalid = Err(Status::INVALID_NAMESPACE_OR_FORMAT);
            assert_eq!(identify(cns, 2), invalid, "CNS {cns:#x}");
        }
        assert_eq!(identify(0x03, 1), Err(Status::INVALID_FIELD));
        assert_eq!(identify(0x01, 0).expect("a structure")[516], 1, "NN stays");
    }

    #[test]
    fn the_namespace_is_the_lease() {
        let id = structure(0x00, 1);
        for field in [0..8, 8..16, 16..24] {
            assert_eq!(id[field], 0x20_0000_u64.to_le_bytes(), "NSZE, NCAP, NUSE");
        }
        assert_eq!(id[24..27], [0, 0, 0], "NSFEAT, NLBAF, FLBAS");
        assert_eq!(id[33], 0b1001, "deallocated blocks read as zero");
        assert_eq!(id[48..64], (1_u128 << 30).to_le_bytes(), "NVMCAP");
        assert_eq!(id[74..76], [0x00, 0x08], "MSSRL: 1 MiB");
        assert_eq!(id[76..80], [0x00, 0x08, 0, 0], "MCL: 1 MiB");
        assert_eq!(id[80], 127, "MSRC");
        assert_eq!(id[104..120], [0xA0; 16], "NGUID");
        assert_eq!(id[120..128], [0xE0; 8], "EUI64");
        assert_eq!(
            id[128..136],
            [0, 0, 9, 0, 0, 0, 0, 0],
            "one format, of 512 bytes"
        );
    }

    #[test]
    fn a_namespace_that_is_not_there_is_invalid() {
        for cns in [0x00, 0x03, 0x05, 0x08] {
            for nsid in [0, 2, 0xFFFF_FFFE, 0xFFFF_FFFF] {
                let invalid = Err(Status::INVALID_NAMESPACE_OR_FORMAT);
                assert_eq!(
                    identify(cns, 0, 0, nsid),
                    invalid,
                    "CNS {cns:#x} NSID {nsid:#x}"
                );
            }
        }
    }

    #[test]
    fn active_namespaces_are_those_above_the_one_named() {
        for cns in [0x02, 0x07] {
            assert_eq!(structure(cns, 0)[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
            for nsid in [1, 2, 0xFFFF_FFFD] {
                assert_eq!(structure(cns, nsid), [0; 4096]);
            }
            for nsid in [0xFFFF_FFFE, 0xFFFF_FFFF] {
                let invalid = Err(Status::INVALID_NAMESPACE_OR_FORMAT);
                assert_eq!(identify(cns, 0, 0, nsid), invalid);
            }
        }
    }

    #[test]
    fn a_namespace_has_four_descriptors() {
        let list = structure(0x03, 1);
        assert_eq!(
            list[..12],
            [1, 8, 0, 0, 0xE0, 0xE0, 0xE0, 0xE0, 0xE0, 0xE0, 0xE0, 0xE0]
        );
        assert_eq!(list[12..16], [2, 16, 0, 0]);
        assert_eq!(list[32..40], [3, 16, 0, 0, 0x00, 0x11, 0x22, 0x33]);
        assert_eq!(
            list[52..58],
            [4, 1, 0, 0, 0, 0],
            "the NVM command set, and the end"
        );
    }

    #[test]
    fn structures_of_the_nvm_command_set() {
        assert_eq!(structure(0x05, 1), [0; 4096]);
        let controller = structure(0x06, 0);
        // 1 GiB for VSL, WZSL and WUSL; 64 ranges of 1 GiB.
        assert_eq!(controller[..8], [18, 18, 18, 64, 0x00, 0x00, 0x20, 0x00]);
        assert_eq!(structure(0x08, 1)[14], 1, "ready");
        for cns in [0x05, 0x06, 0x07] {
            for csi in [1, 2, 0x30] {
                assert_eq!(identify(cns, csi, 0, 1), Err(Status::INVALID_FIELD));
            }
        }
    }

    #[test]
    fn the_nvm_command_set_is_the_only_combination() {
        for cntid in [0, 0xFFFF] {
            let vectors = identify(0x1C, 0, cntid, 0).expect("a structure");
            assert_eq!(
                vectors[..16],
                [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
            );
        }
        assert_eq!(identify(0x1C, 0, 1, 0), Err(Status::INVALID_FIELD));
    }

    #[test]
    fn unknown_structures_are_invalid_fields() {
        for cns in 0..=u8::MAX {
            let known = matches!(cns, 0x00..=0x03 | 0x05..=0x08 | 0x1C);
            if !known {
                assert_eq!(
                    identify(cns, 0, 0, 1),
                    Err(Status::INVALID_FIELD),
                    "{cns:#x}"
                );
            }
        }
    }

    #[test]
    fn text_is_printable_and_padded() {
        assert_eq!(&padded::<6>("ab"), b"ab    ");
        assert_eq!(&padded::<2>("abc"), b"ab");
        assert_eq!(&padded::<4>("a\n\u{e9}"), b"a???");
    }
}

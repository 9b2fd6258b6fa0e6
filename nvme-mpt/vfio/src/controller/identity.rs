//! Identity of a physical controller, and the limits that guests get from it.
//!
//! Guests get an MDTS of 1 MiB on every drive, because longer commands are split (`queue_pair/split.rs`). Guests see the
//! optional commands, atomic units, range limits and volatile write cache of the drive. Commands that the drive lacks are not
//! offered and complete with Invalid Opcode (`ControllerLimits::offers`). SGLs are offered only if the drive accepts a guest's
//! longest command without a split.

use std::collections::BTreeMap;

use zerocopy::FromZeros;

use super::admin_queue::AdminQueue;
use super::error::ControllerError;
use nvme_driver::DriverError;
use nvme_guest::address::PAGE_SIZE;
use nvme_guest::host::ControllerLimits;
use nvme_lease::backing_id::nvme_names::{self, ascii_text};
use nvme_mpt::drive::HostNamespace;
use nvme_mpt::shadow::MAX_SGL_DESCRIPTORS;
use nvme_spec::identify::{
    Cns, DeallocatedRead, IdentifyController, IdentifyControllerNvm, IdentifyNamespace, Oncs,
};
use nvme_spec::ids::Nsid;
use nvme_spec::registers::NvmeVersion;

/// MDTS that guests see: 1 MiB. Commands that are too long for the drive are split.
const GUEST_MDTS: u8 = 8;

/// Maximum number of entries of a guest's queue. It does not depend on the size of the host queues.
const GUEST_ENTRIES: u32 = 4096;

/// Supported logical block sizes in bytes, as exponents of powers of two, ascending.
const LBA_SHIFTS: [u8; 2] = [9, 12];

/// Number of entries in a page of the namespace list. If a drive has more namespaces, they are ignored.
const NSIDS_PER_LIST: usize = 1024;

/// Maximum bytes of a command without data on a drive that reports no limit: the largest number of blocks in a command (NLB),
/// of 512 bytes each.
const NO_DATA_BYTES_MAX: u64 = 1 << 25;

/// Maximum bytes of a Deallocate on a drive that reports no limit. A command for all blocks of the drive may exceed its
/// timeout, and the reset that follows would disturb all guests.
const DSM_BYTES_MAX: u64 = 256 << 20;

/// Identity of a drive as read by Identify.
#[derive(Debug)]
pub(super) struct IdentifiedDrive {
    /// Name of the drive, which does not depend on its PCI slot.
    pub(super) name: String,
    /// Further names of the drive, which stay unchanged if new firmware reports another NQN or model.
    pub(super) other_names: Vec<String>,
    /// NGUID or EUI-64 of each namespace, in hexadecimal digits.
    pub(super) namespace_ids: BTreeMap<u32, String>,
    pub(super) model: String,
    pub(super) controller: IdentifyController,
    pub(super) namespaces: Vec<HostNamespace>,
    pub(super) limits: ControllerLimits,
    /// Maximum data bytes of a command on this drive.
    pub(super) max_transfer: u64,
}

impl IdentifiedDrive {
    /// Reads the identity of a drive. Fails if none of its namespaces can be used.
    pub(super) fn read(
        admin: &mut AdminQueue,
        version: NvmeVersion,
    ) -> Result<Self, ControllerError> {
        let mut controller = IdentifyController::new_zeroed();
        admin.identify(Cns::CONTROLLER, Nsid(0), &mut controller)?;
        let (namespaces, common, refused) = CommonNamespaceFacts::read(admin)?;
        if let Some(error) = refused.filter(|_| namespaces.is_empty()) {
            return Err(error);
        }
        let max_transfer = match controller.mdts {
            0 => u64::MAX,
            mdts => PAGE_SIZE.checked_shl(mdts.into()).unwrap_or(u64::MAX),
        };
        let nvm = identify_nvm(admin, version)?;
        let limits = limits(&controller, nvm.as_ref(), &common, max_transfer);
        let described = describe_namespaces(admin, &namespaces)?;
        let ids = described
            .iter()
            .filter_map(|(nsid, namespace)| Some((nsid.0, namespace_id(namespace)?)));
        let names = name_fields(&controller);
        Ok(Self {
            // The name is never empty, because the vendor is always known.
            name: names.name().unwrap_or_default(),
            other_names: names.serial_name().into_iter().collect(),
            namespace_ids: ids.collect(),
            model: ascii_text(&controller.mn),
            controller,
            namespaces,
            limits,
            max_transfer,
        })
    }

    /// Reads the namespaces again. Returns the usable ones, which may be none. If the NGUID or EUI-64 of a namespace has
    /// changed, the namespace was deleted and created again. Such a namespace is skipped until the drive is opened again.
    pub(super) fn read_namespaces(
        &self,
        admin: &mut AdminQueue,
    ) -> Result<Vec<HostNamespace>, ControllerError> {
        let (mut namespaces, _, _) = CommonNamespaceFacts::read(admin)?;
        let described = describe_namespaces(admin, &namespaces)?;
        for (nsid, structure) in described {
            let (known, now) = (self.namespace_ids.get(&nsid.0), namespace_id(&structure));
            if let (Some(known), Some(now)) = (known, now)
                && *known != now
            {
                log::warn!(
                    "Namespace {nsid} of {} has the id {now}, and had {known}: it is another one: start the server \
                     again to lease it",
                    self.name
                );
                namespaces.retain(|namespace| namespace.nsid != nsid);
            }
        }
        Ok(namespaces)
    }
}

/// Reads Identify Namespace of the namespaces with these identifiers.
pub(super) fn describe_namespaces(
    admin: &mut AdminQueue,
    namespaces: &[HostNamespace],
) -> Result<Vec<(Nsid, IdentifyNamespace)>, ControllerError> {
    let mut described = Vec::with_capacity(namespaces.len());
    for HostNamespace { nsid, .. } in namespaces {
        let mut structure = IdentifyNamespace::new_zeroed();
        admin.identify(Cns::NAMESPACE, *nsid, &mut structure)?;
        described.push((*nsid, structure));
    }
    Ok(described)
}

/// Reads the limits of the NVM Command Set, if the controller can report them.
fn identify_nvm(
    admin: &mut AdminQueue,
    version: NvmeVersion,
) -> Result<Option<IdentifyControllerNvm>, ControllerError> {
    if version.mjr() < 2 {
        return Ok(None);
    }
    let mut structure = IdentifyControllerNvm::new_zeroed();
    match admin.identify(Cns::IOCS_CONTROLLER, Nsid(0), &mut structure) {
        Ok(()) => Ok(Some(structure)),
        // The drive need not have this structure, so a failed command is not an error.
        Err(DriverError::Admin { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Properties that hold for all usable namespaces together.
#[derive(Debug)]
struct CommonNamespaceFacts {
    deallocated_reads_zeroes: bool,
    copy_bytes_max: u64,
    copy_ranges_max: u32,
    /// True if any namespace has atomic boundaries. Writes across a boundary are not atomic.
    has_atomic_boundaries: bool,
    /// Smallest logical block size in bytes, as the exponent of a power of two.
    lba_shift_min: u8,
}

/// Usable namespaces, their common properties, and the reason why the first unusable namespace was left out.
type IdentifiedNamespaces = (
    Vec<HostNamespace>,
    CommonNamespaceFacts,
    Option<ControllerError>,
);

impl CommonNamespaceFacts {
    /// Properties before any namespace was added.
    const NONE: Self = Self {
        deallocated_reads_zeroes: true,
        copy_bytes_max: u64::MAX,
        copy_ranges_max: u32::MAX,
        has_atomic_boundaries: false,
        lba_shift_min: LBA_SHIFTS[1],
    };

    fn read(admin: &mut AdminQueue) -> Result<IdentifiedNamespaces, ControllerError> {
        let mut list = [0_u32; NSIDS_PER_LIST];
        admin.identify(Cns::ACTIVE_NSID_LIST, Nsid(0), &mut list)?;
        let mut common = Self::NONE;
        let mut namespaces = Vec::new();
        let mut refused = None;
        for nsid in list.into_iter().take_while(|nsid| *nsid != 0).map(Nsid) {
            let mut structure = IdentifyNamespace::new_zeroed();
            admin.identify(Cns::NAMESPACE, nsid, &mut structure)?;
            match usable_namespace(nsid, &structure) {
                Ok(namespace) => {
                    common.add_namespace(&structure, namespace.lba_shift);
                    namespaces.push(namespace);
                }
                Err(reason) => {
                    let error = ControllerError::Namespace { nsid, reason };
                    log::warn!("{error}");
                    refused = refused.or(Some(error));
                }
            }
        }
        Ok((namespaces, common, refused))
    }

    fn add_namespace(&mut self, structure: &IdentifyNamespace, lba_shift: u8) {
        self.deallocated_reads_zeroes &= structure.dlfeat.read() == DeallocatedRead::ZEROES;
        let blocks = u64::from(structure.mcl).min(structure.mssrl.into());
        self.copy_bytes_max = self.copy_bytes_max.min(blocks << lba_shift);
        self.copy_ranges_max = self.copy_ranges_max.min(u32::from(structure.msrc_z) + 1);
        // 0 means no boundary (NVM 1.0, section 2.1.4.3).
        self.has_atomic_boundaries |= structure.nabsn_z > 0 || structure.nabspf_z > 0;
        self.lba_shift_min = self.lba_shift_min.min(lba_shift);
    }
}

/// Returns the namespace, if guests can use its blocks unchanged; else the reason why not.
fn usable_namespace(
    nsid: Nsid,
    structure: &IdentifyNamespace,
) -> Result<HostNamespace, &'static str> {
    let format = structure
        .current_lba_format()
        .ok_or("its LBA format is not one that it lists")?;
    if format.ms() > 0 {
        return Err("its blocks have metadata");
    }
    if !LBA_SHIFTS.contains(&format.lbads()) {
        return Err("its blocks are neither of 512 nor of 4096 bytes");
    }
    // A size in bytes must fit into 64 bits.
    if structure.nsze > u64::MAX >> format.lbads() {
        return Err("it reports more bytes than there are addresses for");
    }
    Ok(HostNamespace {
        nsid,
        blocks: structure.nsze,
        lba_shift: format.lbads(),
    })
}

fn limits(
    id: &IdentifyController,
    nvm: Option<&IdentifyControllerNvm>,
    common: &CommonNamespaceFacts,
    max_transfer: u64,
) -> ControllerLimits {
    // Children of a split command would need rewritten SGLs, so SGLs are offered only if no command has to be split.
    let whole = max_transfer >= PAGE_SIZE << GUEST_MDTS;
    let sgl = id.sgls.support() == 1 && whole;
    // Guests cannot heed atomic boundaries, which are relative to the namespace, while a lease begins anywhere in it.
    let atomic = whole && !common.has_atomic_boundaries;
    // Guests are offered only Copy format 0.
    let copy = id.oncs.copy() && id.cdfs & 1 != 0 && common.copy_bytes_max > 0;
    ControllerLimits {
        mdts: GUEST_MDTS,
        entries_max: GUEST_ENTRIES,
        commands: Oncs(0)
            .with_compare(id.oncs.compare())
            .with_write_uncorrectable(id.oncs.write_uncorrectable())
            .with_dsm(id.oncs.dsm())
            .with_write_zeroes(id.oncs.write_zeroes())
            .with_verify(id.oncs.verify())
            .with_copy(copy),
        // If guests' writes may be split, only single blocks are atomic.
        awun_z: if atomic { id.awun_z } else { 0 },
        awupf_z: if atomic { id.awupf_z } else { 0 },
        volatile_write_cache: id.vwc.present(),
        deallocated_reads_zeroes: common.deallocated_reads_zeroes,
        sgl_descriptors_max: if sgl { MAX_SGL_DESCRIPTORS } else { 0 },
        no_data_bytes_max: no_data_bytes_max(nvm, max_transfer),
        // DMRSL is in logical blocks of any namespace (NVM 1.0, section 4.1.5.4), so the smallest block size applies.
        dsm_range_bytes_max: match nvm.map_or(0, |nvm| nvm.dmrsl) {
            0 => DSM_BYTES_MAX,
            blocks => u64::from(blocks) << common.lba_shift_min,
        },
        dsm_ranges_max: match nvm.map_or(0, |nvm| nvm.dmrl) {
            0 => 256,
            ranges => ranges.into(),
        },
        copy_bytes_max: common.copy_bytes_max,
        copy_ranges_max: common.copy_ranges_max,
        // Command sets other than NVM are not supported.
        own_bytes_max: 0,
    }
}

/// Returns the maximum bytes of a command without data: the smallest of VSL, WZSL and WUSL (NVM 1.0, section 4.1.5.2). For a
/// drive that cannot report them (before NVMe 2.0), returns the maximum of data, because some drives are slow with longer
/// commands.
fn no_data_bytes_max(nvm: Option<&IdentifyControllerNvm>, max_transfer: u64) -> u64 {
    let Some(nvm) = nvm else {
        return max_transfer.min(NO_DATA_BYTES_MAX);
    };
    [nvm.vsl, nvm.wzsl, nvm.wusl]
        .into_iter()
        .filter(|limit| *limit > 0)
        .map(|limit| PAGE_SIZE.checked_shl(limit.into()).unwrap_or(u64::MAX))
        .fold(NO_DATA_BYTES_MAX, u64::min)
}

/// Returns the fields of Identify Controller from which the drive's names are made.
fn name_fields(id: &IdentifyController) -> nvme_names::ControllerNameFields<'_> {
    let end = id.subnqn.iter().position(|byte| *byte == 0);
    nvme_names::ControllerNameFields {
        nqn: &id.subnqn[..end.unwrap_or(id.subnqn.len())],
        vendor: Some(id.vid),
        model: &id.mn,
        serial: &id.sn,
    }
}

/// Returns the NGUID of a namespace, or its EUI-64; `None` if it has neither.
fn namespace_id(namespace: &IdentifyNamespace) -> Option<String> {
    let ids = [&namespace.nguid[..], &namespace.eui64[..]];
    let id = ids
        .into_iter()
        .find(|id| id.iter().any(|byte| *byte != 0))?;
    Some(id.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvme_spec::identify::{Dlfeat, LbaFormat, Sgls, Vwc};

    fn namespace(lbads: u8, ms: u16) -> IdentifyNamespace {
        let mut structure = IdentifyNamespace::new_zeroed();
        structure.nsze = 1 << 20;
        structure.dlfeat = Dlfeat::default().with_read(DeallocatedRead::ZEROES);
        structure.lbaf[0] = LbaFormat::default().with_lbads(lbads).with_ms(ms);
        (structure.mssrl, structure.mcl, structure.msrc_z) = (128, 256, 127);
        structure
    }

    #[test]
    fn a_namespace_has_the_id_that_it_reports() {
        let mut reported = namespace(9, 0);
        assert_eq!(namespace_id(&reported), None);
        reported.eui64 = [0, 0x25, 0x38, 0, 0, 0, 0, 1];
        assert_eq!(namespace_id(&reported).as_deref(), Some("0025380000000001"));
        reported.nguid[15] = 0xab;
        let nguid = namespace_id(&reported);
        assert_eq!(nguid.as_deref(), Some("000000000000000000000000000000ab"));
    }

    #[test]
    fn only_plain_blocks_of_512_and_4096_bytes_are_shared() {
        assert_eq!(
            usable_namespace(Nsid(3), &namespace(12, 0)),
            Ok(HostNamespace {
                nsid: Nsid(3),
                blocks: 1 << 20,
                lba_shift: 12
            })
        );
        assert!(usable_namespace(Nsid(1), &namespace(9, 0)).is_ok());
        usable_namespace(Nsid(1), &namespace(9, 8)).expect_err("metadata");
        usable_namespace(Nsid(1), &namespace(13, 0)).expect_err("8192 bytes");
        usable_namespace(Nsid(1), &namespace(0, 0)).expect_err("no format");
        let mut endless = namespace(12, 0);
        endless.nsze = u64::MAX >> 12;
        assert!(usable_namespace(Nsid(1), &endless).is_ok());
        endless.nsze += 1;
        usable_namespace(Nsid(1), &endless).expect_err("more than 64 bits of bytes");
    }

    fn common(structures: &[(IdentifyNamespace, u8)]) -> CommonNamespaceFacts {
        let mut common = CommonNamespaceFacts::NONE;
        for (structure, lba_shift) in structures {
            common.add_namespace(structure, *lba_shift);
        }
        common
    }

    #[test]
    fn guests_are_promised_what_the_drive_keeps() {
        let mut id = IdentifyController::new_zeroed();
        id.oncs = Oncs(0).with_compare(true).with_copy(true);
        id.vwc = Vwc::default().with_present(true);
        id.sgls = Sgls::default().with_support(1);
        (id.awun_z, id.cdfs) = (7, 1);
        let common = common(&[(namespace(9, 0), 9), (namespace(12, 0), 12)]);
        let wide = limits(&id, None, &common, u64::MAX);
        assert!(wide.commands.compare() && wide.commands.copy() && !wide.commands.dsm());
        assert!(wide.volatile_write_cache && wide.deallocated_reads_zeroes);
        assert_eq!((wide.awun_z, wide.sgl_descriptors_max > 0), (7, true));
        assert_eq!((wide.copy_bytes_max, wide.copy_ranges_max), (128 << 9, 128));
        // On a drive with a maximum transfer of 128 KiB, commands are split, so smaller limits are reported to guests.
        let narrow = limits(&id, None, &common, 128 << 10);
        assert_eq!((narrow.mdts, narrow.awun_z), (8, 0));
        assert_eq!(narrow.sgl_descriptors_max, 0);
        assert_eq!(narrow.no_data_bytes_max, 128 << 10);
    }

    #[test]
    fn no_write_of_more_than_a_block_is_promised_as_atomic_where_there_are_boundaries() {
        let mut id = IdentifyController::new_zeroed();
        (id.awun_z, id.awupf_z) = (7, 7);
        let promised = |structure| {
            let common = common(&[(namespace(9, 0), 9), (structure, 9)]);
            let limits = limits(&id, None, &common, u64::MAX);
            (limits.awun_z, limits.awupf_z)
        };
        assert_eq!(promised(namespace(9, 0)), (7, 7));
        let (mut normal, mut power_fail) = (namespace(9, 0), namespace(9, 0));
        (normal.nabsn_z, power_fail.nabspf_z) = (31, 31);
        assert_eq!(promised(normal), (0, 0));
        assert_eq!(promised(power_fail), (0, 0));
    }

    #[test]
    fn a_range_to_deallocate_may_have_as_many_blocks_as_the_drive_reports() {
        let id = IdentifyController::new_zeroed();
        let mut nvm = IdentifyControllerNvm::new_zeroed();
        nvm.dmrsl = 2048;
        let longest = |structures: &[(IdentifyNamespace, u8)]| {
            limits(&id, Some(&nvm), &common(structures), u64::MAX).dsm_range_bytes_max
        };
        let (small, large) = ((namespace(9, 0), 9), (namespace(12, 0), 12));
        assert_eq!(longest(&[small]), 2048 * 512);
        assert_eq!(longest(&[large]), 2048 * 4096);
        // All namespaces get one limit in bytes, which the smallest block size determines.
        assert_eq!(longest(&[large, small]), 2048 * 512);
    }

    #[test]
    fn the_smallest_limit_of_commands_without_data_holds() {
        let mut nvm = IdentifyControllerNvm::new_zeroed();
        assert_eq!(no_data_bytes_max(Some(&nvm), 4096), NO_DATA_BYTES_MAX);
        (nvm.vsl, nvm.wzsl) = (6, 5);
        assert_eq!(no_data_bytes_max(Some(&nvm), 4096), PAGE_SIZE << 5);
        nvm.wusl = 0xFF;
        assert_eq!(no_data_bytes_max(Some(&nvm), 4096), PAGE_SIZE << 5);
    }

    #[test]
    fn names_hold_nothing_unprintable() {
        let mut id = IdentifyController::new_zeroed();
        id.vid = 0x1B36;
        id.sn[..3].copy_from_slice(b"abc");
        id.mn[..4].copy_from_slice(b"Q\nX ");
        assert_eq!(
            name_fields(&id).name().as_deref(),
            Some("nvme:1b36:Q?X:abc")
        );
        id.subnqn[..10].copy_from_slice(b"nqn.2014:x");
        assert_eq!(
            name_fields(&id).name().as_deref(),
            Some("nvme:nqn.2014:x:abc")
        );
    }
}

//! Get Log Page (Base 2.0, section 5.16).

use nvme_guest::{
    LeaseCounters,
    host::{ChangeListDescription, UnreportedChanges},
};
use nvme_spec::{
    event::AsyncEventType,
    feature::FeatureId,
    identify::Csi,
    ids::Nsid,
    log::{
        ActiveFirmware, ChangedNamespaceList, CommandEffects, CommandsSupportedAndEffects,
        FeatureEffects, FeaturesSupportedAndEffects, FirmwareSlots, LogPageId, LogPageRequest,
        LogPageSupport, SupportedLogPages,
    },
    status::Status,
};
use zerocopy::{FromZeros, IntoBytes, little_endian::U128};

use super::{
    command::AdminCommand,
    error_log::ErrorLog,
    features::{self, ControllerFeatures, FeatureContext},
    health::GuestDriveHealth,
    identify::FIRMWARE_REVISION,
    identify_subject::IdentifySubject,
};

/// Log pages that every function supports. They include all pages that version 2.0 requires of an I/O controller (Base 2.0,
/// section 3.1.2.1.2).
const SUPPORTED: [LogPageId; 7] = [
    LogPageId::SUPPORTED_LOG_PAGES,
    LogPageId::ERROR_INFORMATION,
    LogPageId::SMART_HEALTH,
    LogPageId::FIRMWARE_SLOT,
    LogPageId::CHANGED_NAMESPACE_LIST,
    LogPageId::COMMANDS_SUPPORTED_AND_EFFECTS,
    LogPageId::FEATURES_SUPPORTED_AND_EFFECTS,
];

/// Sources from which the data of log pages is read.
pub(super) struct LogPages<'a> {
    pub(super) subject: IdentifySubject<'a>,
    pub(super) features: &'a ControllerFeatures,
    pub(super) context: FeatureContext<'a>,
    pub(super) errors: &'a ErrorLog,
    pub(super) counters: LeaseCounters,
    pub(super) health: &'a GuestDriveHealth,
    /// True if the namespace has changed since the guest last read the Changed Namespace List.
    pub(super) namespace_changed: bool,
    /// Changes by the drive that the guest has not read; `None` if the command set has no log of changes.
    pub(super) changes: Option<&'a UnreportedChanges>,
}

impl LogPages<'_> {
    /// Returns the requested part of a log page. If the command requests more than the log page has, the data ends with the
    /// page, because dwords beyond the end are undefined (Base 2.0, section 5.16).
    pub(super) fn read(&self, request: &LogPageRequest, nsid: Nsid) -> Result<Vec<u8>, Status> {
        if request.length() > self.subject.limits.max_transfer_bytes() {
            return Err(Status::INVALID_FIELD);
        }
        // The offset must be in bytes, since no log page advertises index offsets.
        if request.ot || !request.lpo.is_multiple_of(4) {
            return Err(Status::INVALID_FIELD);
        }
        let mut page = self.page(request, nsid)?;
        let offset = usize::try_from(request.lpo)
            .ok()
            .filter(|offset| *offset < page.len());
        let mut part = page.split_off(offset.ok_or(Status::INVALID_FIELD)?);
        part.truncate(usize::try_from(request.length()).unwrap_or(usize::MAX));
        Ok(part)
    }

    fn page(&self, request: &LogPageRequest, nsid: Nsid) -> Result<Vec<u8>, Status> {
        match request.lid {
            LogPageId::SUPPORTED_LOG_PAGES => Ok(self.supported_log_pages()),
            LogPageId::ERROR_INFORMATION => Ok(self.errors.page()),
            LogPageId::SMART_HEALTH => {
                // The controller has one namespace, so the controller's page is also the namespace's page.
                if !matches!(nsid, Nsid::NONE | Nsid::BROADCAST) {
                    self.subject.require_namespace(nsid)?;
                }
                Ok(self.smart_health())
            }
            LogPageId::FIRMWARE_SLOT => Ok(firmware_slots()),
            LogPageId::CHANGED_NAMESPACE_LIST => Ok(self.changed_namespaces()),
            LogPageId::COMMANDS_SUPPORTED_AND_EFFECTS => Ok(self.supported_commands(request.csi)),
            LogPageId::FEATURES_SUPPORTED_AND_EFFECTS => Ok(self.supported_features()),
            lid if self.change_list().is_some_and(|list| list.lid == lid) => {
                let changes = self.changes.ok_or(Status::INVALID_LOG_PAGE)?;
                // The change list belongs to the namespace, so the identifier must name it.
                self.subject.require_namespace(nsid)?;
                Ok(changes.page())
            }
            _ => Err(Status::INVALID_LOG_PAGE),
        }
    }

    fn change_list(&self) -> Option<ChangeListDescription> {
        self.subject.namespace.command_sets.native().change_list
    }

    /// Supported Log Pages (Base 2.0, section 5.16.1.1).
    fn supported_log_pages(&self) -> Vec<u8> {
        let mut log = SupportedLogPages::new_zeroed();
        let own = self.change_list().map(|list| list.lid);
        for lid in SUPPORTED.into_iter().chain(own) {
            log.0[usize::from(lid.0)] = LogPageSupport::default().with_lsupp(true);
        }
        log.as_bytes().to_vec()
    }

    /// Feature Identifiers Supported and Effects (Base 2.0, section 5.16.1.18).
    fn supported_features(&self) -> Vec<u8> {
        let mut log = FeaturesSupportedAndEffects::new_zeroed();
        for (fid, entry) in (0..=u8::MAX).zip(&mut log.0) {
            let Some(capabilities) = features::capabilities(FeatureId(fid), &self.context) else {
                continue;
            };
            let scope = match capabilities.namespace_specific() {
                true => FeatureEffects::NAMESPACE,
                false => FeatureEffects::CONTROLLER,
            };
            *entry = FeatureEffects::default().with_fsupp(true).with_fsp(scope);
        }
        log.as_bytes().to_vec()
    }

    /// SMART / Health Information (Base 2.0, section 5.16.1.3). The health values are the drive's. Commands and data are
    /// counted for the lease since the function was created.
    fn smart_health(&self) -> Vec<u8> {
        let counters = &self.counters;
        let mut log = self.health.page(self.features);
        log.data_units_read = data_units(counters.bytes_read);
        log.data_units_written = data_units(counters.bytes_written);
        log.host_read_commands = to_u128(counters.reads);
        log.host_write_commands = to_u128(counters.writes);
        log.media_errors = to_u128(counters.media_errors);
        log.error_log_entries = to_u128(self.errors.count());
        log.as_bytes().to_vec()
    }

    /// Changed Namespace List (Base 2.0, section 5.16.1.5), with the namespace identifiers that the guest sees.
    fn changed_namespaces(&self) -> Vec<u8> {
        let mut log = ChangedNamespaceList::new_zeroed();
        if self.namespace_changed {
            log.0[0] = self.subject.namespace.nsid;
        }
        log.as_bytes().to_vec()
    }

    /// Commands Supported and Effects (Base 2.0, section 5.16.1.6). For a command set that the controller lacks, the page is
    /// empty. An error would be worse, because tools query all command sets and stop at the first error.
    fn supported_commands(&self, csi: Csi) -> Vec<u8> {
        let supported = CommandEffects::default().with_csupp(true);
        let mut log = CommandsSupportedAndEffects::new_zeroed();
        let has_doorbell_buffer = self.subject.has_doorbell_buffer;
        for opcode in AdminCommand::supported_opcodes(has_doorbell_buffer) {
            log.acs[usize::from(opcode.0)] = supported;
        }
        for command in self.subject.namespace.command_sets.commands(csi) {
            log.iocs[usize::from(command.opcode)] = supported.with_lbcc(command.changes_content);
        }
        log.as_bytes().to_vec()
    }
}

/// Returns the type of event that is unmasked when the guest reads a log page. Log pages of a single command set are not
/// covered.
pub(super) fn unmasked_event_type(lid: LogPageId) -> Option<AsyncEventType> {
    match lid {
        LogPageId::ERROR_INFORMATION => Some(AsyncEventType::ERROR),
        LogPageId::SMART_HEALTH => Some(AsyncEventType::SMART_HEALTH),
        LogPageId::CHANGED_NAMESPACE_LIST => Some(AsyncEventType::NOTICE),
        _ => None,
    }
}

/// Firmware Slot Information (Base 2.0, section 5.16.1.4): one slot, with the running firmware.
fn firmware_slots() -> Vec<u8> {
    let mut log = FirmwareSlots::new_zeroed();
    log.afi = ActiveFirmware::default().with_active(1);
    log.frs[0] = FIRMWARE_REVISION;
    log.as_bytes().to_vec()
}

/// Converts bytes into data units of 1000 times 512 bytes, rounded up.
fn data_units(bytes: u64) -> U128 {
    to_u128(bytes.div_ceil(512 * 1000))
}

fn to_u128(value: u64) -> U128 {
    U128::new(u128::from(value))
}

#[cfg(test)]
mod tests {
    use nvme_guest::{ControllerLimits, DoorbellMode, ErrorEntry, LeasedNamespace};
    use nvme_spec::{
        identify::Oncs,
        ids::{CommandId, QueueId},
    };

    use super::*;
    use crate::fixtures;

    struct LogPagesFixture {
        namespace: LeasedNamespace,
        limits: ControllerLimits,
        features: ControllerFeatures,
        errors: ErrorLog,
        counters: LeaseCounters,
        health: GuestDriveHealth,
        namespace_changed: bool,
    }

    impl LogPagesFixture {
        fn new() -> Self {
            let mut health = GuestDriveHealth::new(None, fixtures::fixture_clock());
            health.refresh(&fixtures::local_backend(DoorbellMode::Trap));
            Self {
                namespace: fixtures::namespace(),
                limits: fixtures::limits(),
                features: ControllerFeatures::new(&fixtures::fixture_clock()),
                errors: ErrorLog::default(),
                counters: LeaseCounters::default(),
                health,
                namespace_changed: false,
            }
        }

        fn read(&self, request: LogPageRequest, nsid: u32) -> Result<Vec<u8>, Status> {
            let subject = IdentifySubject {
                namespace: &self.namespace,
                blocks: self.namespace.blocks,
                used_bytes: 0,
                limits: &self.limits,
                has_doorbell_buffer: true,
                is_active: true,
                thresholds: fixtures::THRESHOLDS,
                unit_blocks: None,
            };
            let context = FeatureContext {
                namespace: &self.namespace,
                blocks: self.namespace.blocks,
                volatile_write_cache: self.limits.volatile_write_cache,
                queue_pairs_max: 4,
                default_threshold: 343,
                vectors: 5,
                io_queues_exist: false,
            };
            LogPages {
                subject,
                features: &self.features,
                context,
                errors: &self.errors,
                counters: self.counters,
                health: &self.health,
                namespace_changed: self.namespace_changed,
                changes: None,
            }
            .read(&request, Nsid(nsid))
        }
    }

    fn request(lid: u8, dwords: u32) -> LogPageRequest {
        let [low, high] = [(dwords - 1) as u16, ((dwords - 1) >> 16) as u16];
        LogPageRequest {
            lid: LogPageId(lid),
            numdl: low,
            numdu: high,
            ..LogPageRequest::default()
        }
    }

    #[test]
    fn each_page_has_its_size_and_ends_there() {
        let fixture = LogPagesFixture::new();
        for (lid, size) in [
            (0, 1024),
            (1, 4096),
            (2, 512),
            (3, 512),
            (4, 4096),
            (5, 4096),
            (0x12, 1024),
        ] {
            // The request is for 64 KiB, which exceeds the page.
            let page = fixture.read(request(lid, 16_384), 0).expect("a page");
            assert_eq!(page.len(), size, "log page {lid:#x}");
        }
        for lid in (6..=u8::MAX).filter(|lid| *lid != 0x12) {
            assert_eq!(
                fixture.read(request(lid, 1), 0),
                Err(Status::INVALID_LOG_PAGE)
            );
        }
    }

    #[test]
    fn pages_are_read_from_an_offset() {
        let fixture = LogPagesFixture::new();
        let whole = fixture.read(request(0x05, 1024), 0).expect("a page");
        let at = |lpo, dwords| {
            fixture.read(
                LogPageRequest {
                    lpo,
                    ..request(0x05, dwords)
                },
                0,
            )
        };
        assert_eq!(at(1028, 2).expect("a part"), whole[1028..1036]);
        assert_eq!(at(4092, 2).expect("the end"), whole[4092..]);
        for lpo in [4096, 4100, 2, 1 << 40, u64::MAX - 3] {
            assert_eq!(at(lpo, 1), Err(Status::INVALID_FIELD), "{lpo:#x}");
        }
        let indexed = LogPageRequest {
            ot: true,
            ..request(0x05, 1)
        };
        assert_eq!(fixture.read(indexed, 0), Err(Status::INVALID_FIELD));
    }

    #[test]
    fn more_than_mdts_is_refused() {
        let fixture = LogPagesFixture::new();
        assert!(fixture.read(request(0x02, 1 << 18), 0).is_ok());
        assert_eq!(
            fixture.read(request(0x02, (1 << 18) + 1), 0),
            Err(Status::INVALID_FIELD)
        );
        let most = LogPageRequest {
            numdl: 0xFFFF,
            numdu: 0xFFFF,
            ..request(0x02, 1)
        };
        assert_eq!(fixture.read(most, 0), Err(Status::INVALID_FIELD));
    }

    #[test]
    fn supported_pages_are_listed() {
        let page = LogPagesFixture::new()
            .read(request(0x00, 256), 0)
            .expect("a page");
        for (lid, entry) in page.chunks(4).enumerate() {
            let supported = lid < 6 || lid == 0x12;
            assert_eq!(entry, [u8::from(supported), 0, 0, 0], "log page {lid:#x}");
        }
    }

    #[test]
    fn features_are_listed_as_get_features_has_them() {
        let mut fixture = LogPagesFixture::new();
        for cache in [true, false] {
            fixture.limits.volatile_write_cache = cache;
            let page = fixture.read(request(0x12, 256), 0).expect("a page");
            for (fid, entry) in page.chunks(4).enumerate() {
                let want = match fid {
                    0x03 | 0x05 => [1, 0, 0x10, 0],
                    0x06 if !cache => [0; 4],
                    0x01 | 0x02 | 0x04 | 0x06..=0x0B | 0x0E | 0x16 | 0x19 => [1, 0, 0x20, 0],
                    _ => [0; 4],
                };
                assert_eq!(entry, want, "feature {fid:#x}");
            }
        }
    }

    #[test]
    fn health_counts_what_was_done() {
        let mut fixture = LogPagesFixture::new();
        fixture.counters = LeaseCounters {
            reads: 3,
            writes: 0x1_0000_0000,
            bytes_read: 512_000,
            bytes_written: 512_001,
            media_errors: 7,
            errors: 9,
        };
        fixture.errors.log_command_error(&ErrorEntry {
            sqid: QueueId(1),
            cid: CommandId(1),
            status: Status::LBA_OUT_OF_RANGE,
            lba: 0,
            nsid: Nsid(1),
            parameter_location: 40,
        });
        for nsid in [0, 1, 0xFFFF_FFFF] {
            let page = fixture.read(request(0x02, 128), nsid).expect("a page");
            assert_eq!(
                page[..6],
                [0, 0x36, 0x01, 100, 10, 0],
                "37 degrees, all spare"
            );
            assert_eq!(page[32..48], 1_u128.to_le_bytes(), "data units read");
            assert_eq!(
                page[48..64],
                2_u128.to_le_bytes(),
                "data units written, rounded up"
            );
            assert_eq!(page[64..80], 3_u128.to_le_bytes(), "read commands");
            assert_eq!(page[80..96], (1_u128 << 32).to_le_bytes(), "write commands");
            assert_eq!(page[112..128], 1_u128.to_le_bytes(), "power cycles");
            assert_eq!(page[128..144], [0; 16], "power on hours");
            assert_eq!(page[160..176], 7_u128.to_le_bytes(), "media errors");
            assert_eq!(page[176..192], 1_u128.to_le_bytes(), "error log entries");
        }
        let other = fixture.read(request(0x02, 128), 2);
        assert_eq!(other, Err(Status::INVALID_NAMESPACE_OR_FORMAT));
    }

    #[test]
    fn a_changed_namespace_is_listed_as_the_guest_numbers_it() {
        let mut fixture = LogPagesFixture::new();
        assert_eq!(fixture.read(request(0x04, 1024), 0), Ok(vec![0; 4096]));
        fixture.namespace_changed = true;
        let page = fixture.read(request(0x04, 1024), 0).expect("a page");
        assert_eq!(page[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn firmware_is_in_its_one_slot() {
        let page = LogPagesFixture::new()
            .read(request(0x03, 128), 0)
            .expect("a page");
        assert_eq!(page[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(&page[8..16], b"0.1.0   ");
        assert_eq!(page[16..24], [0; 8]);
    }

    #[test]
    fn effects_list_the_commands() {
        let fixture = LogPagesFixture::new();
        let page = fixture
            .read(request(0x05, 1024), 0xFFFF_FFFF)
            .expect("a page");
        for (opcode, entry) in page[..1024].chunks(4).enumerate() {
            let known = matches!(opcode, 0x00..=0x02 | 0x04..=0x06 | 0x08..=0x0A | 0x0C | 0x7C);
            assert_eq!(
                entry,
                [u8::from(known), 0, 0, 0],
                "admin command {opcode:#x}"
            );
        }
        for (opcode, entry) in page[1024..2048].chunks(4).enumerate() {
            let expected = match opcode {
                0x00 | 0x02 | 0x05 | 0x0C => 0b01,
                0x01 | 0x04 | 0x08 | 0x09 | 0x19 => 0b11,
                _ => 0,
            };
            assert_eq!(entry, [expected, 0, 0, 0], "I/O command {opcode:#x}");
        }
        let mut fewer = LogPagesFixture::new();
        fewer.limits.commands = Oncs::default().with_dsm(true);
        fewer.namespace.command_sets = fixtures::command_sets(&fewer.limits, 9);
        let page = fewer.read(request(0x05, 1024), 0).expect("a page");
        for (opcode, entry) in page[1024..2048].chunks(4).enumerate() {
            let offered = matches!(opcode, 0x00..=0x02 | 0x09);
            assert_eq!(entry[0] & 1, u8::from(offered), "I/O command {opcode:#x}");
        }
        let page = fixture.read(request(0x05, 1024), 0).expect("a page");
        let zoned = LogPageRequest {
            csi: Csi(2),
            ..request(0x05, 1024)
        };
        let zoned = fixture.read(zoned, 0).expect("a page");
        assert_eq!(zoned[..1024], page[..1024]);
        assert_eq!(
            zoned[1024..2048],
            [0; 1024],
            "none of a set that is not there"
        );
    }
}

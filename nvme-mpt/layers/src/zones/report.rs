//! Reports of zones, as Zone Management Receive returns them (ZNS 1.1, section 3.4.2).

use zerocopy::{FromZeros, IntoBytes};

use super::table::{Zone, ZoneTable};
use nvme_spec::ids::Lba;
use nvme_spec::status::Status;
use nvme_spec::zns::{
    ReportZonesHeader, ReportingOptions, ZoneDescriptor, ZoneManagementReceive, ZoneReceiveAction,
    ZoneState, ZoneStateByte, ZoneType, ZoneTypeByte,
};

/// `WP` of a zone without a write pointer.
const NO_WRITE_POINTER: Lba = Lba(u64::MAX);

/// Builds the report of zones for a command, up to the length that the command requests. The command's SLBA is relative to the
/// lease.
pub(super) fn build_report(
    table: &ZoneTable,
    command: &ZoneManagementReceive,
    capacity: u64,
    report: &mut Vec<u8>,
) -> Result<(), Status> {
    // An extended report has zone descriptor extensions, which are not supported (LBAFE.ZDES).
    if command.zra != ZoneReceiveAction::REPORT_ZONES || command.zrasf > ReportingOptions::OFFLINE {
        return Err(Status::INVALID_FIELD);
    }
    let first = table.zone_containing(command.slba)?;
    let length = usize::try_from(command.length()).map_err(|_| Status::INVALID_FIELD)?;
    let max_zones =
        length.saturating_sub(size_of::<ReportZonesHeader>()) / size_of::<ZoneDescriptor>();
    report.clear();
    report.extend_from_slice(ReportZonesHeader::new_zeroed().as_bytes());
    let mut zones = table.reported_zones(first, command.zrasf);
    let mut count = 0;
    for (start, zone) in zones.by_ref().take(max_zones) {
        report.extend_from_slice(zone_descriptor(start, zone, capacity).as_bytes());
        count += 1;
    }
    if !command.partial {
        count += zones.count();
    }
    let header = ReportZonesHeader {
        nz: count as u64,
        ..ReportZonesHeader::new_zeroed()
    };
    report[..size_of::<ReportZonesHeader>()].copy_from_slice(header.as_bytes());
    // A command may request less than the report's header.
    report.truncate(length);
    Ok(())
}

fn zone_descriptor(start: Lba, zone: Zone, capacity: u64) -> ZoneDescriptor {
    let has_write_pointer = !matches!(
        zone.state,
        ZoneState::FULL | ZoneState::READ_ONLY | ZoneState::OFFLINE
    );
    ZoneDescriptor {
        zt: ZoneTypeByte::default().with_zt(ZoneType::SEQUENTIAL_WRITE_REQUIRED),
        zs: ZoneStateByte::default().with_zs(zone.state),
        zcap: capacity,
        zslba: start,
        wp: match has_write_pointer {
            true => Lba(start.0 + zone.written),
            false => NO_WRITE_POINTER,
        },
        ..ZoneDescriptor::new_zeroed()
    }
}

//! Log pages and asynchronous events of a drive (Base 2.0, sections 5.2 and 5.16).

use zerocopy::FromZeros;

use super::admin_queue::AdminQueue;
use super::error::ControllerError;
use nvme_driver::DriverError;
use nvme_guest::address::PAGE_SIZE;
use nvme_spec::feature::{AsyncEventConfiguration, FeatureId};
use nvme_spec::identify::IdentifyController;
use nvme_spec::ids::Nsid;
use nvme_spec::log::{
    ChangedNamespaceList, CriticalWarning, ErrorInformation, LogPageId, LogPageRequest, SmartHealth,
};

/// Sets of critical warnings whose events are requested, in the order of attempts: first all warnings of the specification,
/// then smaller sets. A drive of an earlier version knows fewer warnings. For an unknown one, it may refuse the whole command,
/// and with it the events about namespaces.
const CRITICAL_WARNINGS: [CriticalWarning; 3] = [
    CriticalWarning(0b11_1111),
    CriticalWarning(0b1_1111),
    CriticalWarning(0),
];

/// Number of Error Information entries that fit into a memory page.
const ERRORS_PER_PAGE: usize = PAGE_SIZE as usize / size_of::<ErrorInformation>();

/// Reads at most a memory page of a log page. If `keep_event` (RAE) is true, the read does not clear the event of this log
/// page. Only the drive monitor clears events.
fn read_log_page<T>(
    admin: &mut AdminQueue,
    lid: LogPageId,
    len: usize,
    keep_event: bool,
    page: &mut T,
) -> Result<(), ControllerError>
where
    T: zerocopy::FromBytes + zerocopy::IntoBytes,
{
    let request = LogPageRequest {
        lid,
        rae: keep_event,
        numdl: (len / 4 - 1) as u16,
        ..LogPageRequest::default()
    };
    Ok(admin.get_log_page(request, page)?)
}

pub(super) fn smart_health(
    admin: &mut AdminQueue,
    keep_event: bool,
) -> Result<SmartHealth, ControllerError> {
    let mut page = SmartHealth::new_zeroed();
    let len = size_of_val(&page);
    read_log_page(admin, LogPageId::SMART_HEALTH, len, keep_event, &mut page)?;
    Ok(page)
}

/// Reads the drive's latest `entries` errors, newest first.
pub(super) fn error_information(
    admin: &mut AdminQueue,
    entries: u16,
    keep_event: bool,
) -> Result<Vec<ErrorInformation>, ControllerError> {
    let mut page = [ErrorInformation::default(); ERRORS_PER_PAGE];
    let entries = usize::from(entries).min(ERRORS_PER_PAGE);
    let len = entries * size_of::<ErrorInformation>();
    let lid = LogPageId::ERROR_INFORMATION;
    read_log_page(admin, lid, len, keep_event, &mut page)?;
    // Unused entries have an error count of 0 (section 5.16.1.2).
    let valid = page[..entries].iter().filter(|entry| entry.error_count > 0);
    Ok(valid.copied().collect())
}

/// Reads the beginning of a log page whose contents are not used, to clear its event.
pub(super) fn clear_event(admin: &mut AdminQueue, lid: LogPageId) -> Result<(), ControllerError> {
    // Telemetry pages are read in units of 512 bytes (Base 2.0, section 5.16.1).
    let mut beginning = [0; 512];
    let len = beginning.len();
    read_log_page(admin, lid, len, false, &mut beginning)
}

/// Reads the identifiers of the namespaces that have changed since the last call; `None` if the drive's list has overflowed.
pub(super) fn changed_namespaces(
    admin: &mut AdminQueue,
) -> Result<Option<Vec<Nsid>>, ControllerError> {
    let mut page = ChangedNamespaceList([Nsid(0); 1024]);
    let len = size_of_val(&page);
    let lid = LogPageId::CHANGED_NAMESPACE_LIST;
    read_log_page(admin, lid, len, false, &mut page)?;
    if page.0[0] == Nsid::BROADCAST {
        return Ok(None);
    }
    let listed = page.0.into_iter().take_while(|nsid| nsid.0 != 0);
    Ok(Some(listed.collect()))
}

/// Lets the drive report events for health and namespaces, and requests the first event. Logs at `level` which events the drive
/// refuses.
pub(super) fn enable_events(
    admin: &mut AdminQueue,
    id: &IdentifyController,
    level: log::Level,
) -> Result<(), ControllerError> {
    let (mut accepted, mut refusal) = (None, None);
    for warnings in CRITICAL_WARNINGS {
        let wanted = AsyncEventConfiguration(0)
            .with_critical_warnings(warnings)
            .with_namespace_attribute(id.oaes.namespace_attribute());
        match admin.set_feature(FeatureId::ASYNC_EVENT_CONFIGURATION, wanted.0) {
            Ok(_) => {
                accepted = Some(warnings);
                break;
            }
            Err(error @ DriverError::Admin { .. }) => refusal = Some(ControllerError::from(error)),
            Err(error) => return Err(error.into()),
        }
    }
    if let (Some(missing), Some(error)) = (missing_events_message(accepted), refusal) {
        log::log!(level, "{missing}: {error}");
    }
    admin.request_event();
    Ok(())
}

/// Returns a message about the events that the drive does not raise, if there are any. `accepted` is the set of critical
/// warnings that the drive accepted; `None` if it refused all sets.
fn missing_events_message(accepted: Option<CriticalWarning>) -> Option<&'static str> {
    match accepted {
        // The drive need not support this feature.
        None => Some(
            "The drive chooses its events itself, and may not report critical warnings and changed namespaces",
        ),
        Some(CriticalWarning(0)) => Some(
            "The drive has no event for critical warnings, and they are noticed when its health is read",
        ),
        // The only missing warning concerns the Persistent Memory Region, which is not used.
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_events_are_named() {
        let [all, without_pmr, none] =
            CRITICAL_WARNINGS.map(|warnings| missing_events_message(Some(warnings)));
        assert_eq!((all, without_pmr), (None, None));
        assert!(none.is_some_and(|text| text.contains("critical warnings")));
        let own_choice = missing_events_message(None).expect("a message");
        for what in ["critical warnings", "changed namespaces"] {
            assert!(own_choice.contains(what), "{own_choice}");
        }
    }
}

//! The Error Information log (Base 2.0, section 5.16.1.2), newest entry first.

use std::collections::VecDeque;

use nvme_guest::{BackendStateError, ErrorEntry};
use nvme_spec::{
    ids::{CommandId, Lba, Nsid, QueueId},
    log::{ErrorInformation, ErrorStatus, ParameterErrorLocation},
    status::Status,
};
use zerocopy::{FromBytes, IntoBytes};

use crate::state::parts::ErrorLogState;

/// Error Log Page Entries, `ELPE`, as a zero-based value: 64 entries, which fill one memory page.
pub(super) const ENTRIES_Z: u8 = 63;
const ENTRIES: usize = ENTRIES_Z as usize + 1;

/// SQID and CID of an entry for an error that belongs to no command.
const NO_COMMAND: u16 = 0xFFFF;

/// Log of the errors since the function was created. A reset of the controller does not clear it.
#[derive(Debug, Default)]
pub(super) struct ErrorLog {
    entries: VecDeque<ErrorInformation>,
    count: u64,
}

impl ErrorLog {
    /// Logs the error of a command.
    pub(super) fn log_command_error(&mut self, error: &ErrorEntry) {
        self.push(ErrorInformation {
            sqid: error.sqid,
            cid: error.cid,
            status: ErrorStatus::default().with_status(error.status),
            parameter_error_location: ParameterErrorLocation(error.parameter_location),
            lba: Lba(error.lba),
            nsid: error.nsid,
            ..ErrorInformation::default()
        });
    }

    /// Logs an error that belongs to no command.
    pub(super) fn log_controller_error(&mut self, status: Status) {
        self.push(ErrorInformation {
            sqid: QueueId(NO_COMMAND),
            cid: CommandId(NO_COMMAND),
            status: ErrorStatus::default().with_status(status),
            parameter_error_location: ParameterErrorLocation::NONE,
            nsid: Nsid::NONE,
            ..ErrorInformation::default()
        });
    }

    /// Returns the number of errors so far, including errors that are no longer in the log.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Returns the log page. Unused entries are zero.
    pub(super) fn page(&self) -> Vec<u8> {
        let mut page: Vec<u8> = self
            .entries
            .iter()
            .flat_map(|entry| entry.as_bytes())
            .copied()
            .collect();
        page.resize(ENTRIES * size_of::<ErrorInformation>(), 0);
        page
    }

    pub(super) fn save(&self) -> ErrorLogState {
        let Self { entries, count } = self;
        let bytes = entries.iter().flat_map(|entry| entry.as_bytes());
        ErrorLogState {
            entries: bytes.copied().collect(),
            count: *count,
        }
    }

    pub(super) fn check(state: &ErrorLogState) -> Result<(), BackendStateError> {
        let len = state.entries.len();
        let entry = size_of::<ErrorInformation>();
        if len.is_multiple_of(entry) && len <= ENTRIES * entry {
            return Ok(());
        }
        let valid = format!("up to {ENTRIES} times {entry}");
        Err(BackendStateError::invalid(
            "bytes of the error log",
            len,
            valid,
        ))
    }

    /// Restores the log from a checked state.
    pub(super) fn from_state(state: &ErrorLogState) -> Self {
        let entries = state.entries.chunks_exact(size_of::<ErrorInformation>());
        Self {
            entries: entries
                .filter_map(|entry| ErrorInformation::read_from_bytes(entry).ok())
                .collect(),
            count: state.count,
        }
    }

    fn push(&mut self, entry: ErrorInformation) {
        self.count = self.count.wrapping_add(1);
        self.entries.truncate(ENTRIES - 1);
        self.entries.push_front(ErrorInformation {
            error_count: self.count,
            ..entry
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_error_comes_first_and_the_oldest_is_forgotten() {
        let mut log = ErrorLog::default();
        assert_eq!(log.page(), [0; 4096]);
        for cid in 1..=65 {
            log.log_command_error(&ErrorEntry {
                sqid: QueueId(1),
                cid: CommandId(cid),
                status: Status::LBA_OUT_OF_RANGE.with_dnr(true),
                lba: 0x1234,
                nsid: Nsid(1),
                parameter_location: 40,
            });
        }
        let page = log.page();
        assert_eq!(page.len(), 4096);
        assert_eq!(
            page[..32],
            [
                65, 0, 0, 0, 0, 0, 0, 0, // error count
                1, 0, 65, 0, 0x00, 0x81, 40, 0, // SQID, CID, status with DNR, location
                0x34, 0x12, 0, 0, 0, 0, 0, 0, // LBA
                1, 0, 0, 0, 0, 0, 0, 0, // NSID
            ]
        );
        assert_eq!(page[63 * 64], 2, "the first error is gone");
        assert_eq!(log.count(), 65);
    }

    #[test]
    fn an_error_without_a_command_has_no_command_identifier() {
        let mut log = ErrorLog::default();
        log.log_controller_error(Status::INTERNAL_ERROR);
        assert_eq!(
            log.page()[8..16],
            [0xFF, 0xFF, 0xFF, 0xFF, 0x0C, 0x00, 0xFF, 0xFF]
        );
    }
}

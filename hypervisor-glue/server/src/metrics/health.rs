//! Health of physical drives, polled once a minute.
//!
//! Reading the health needs a command, which a hanging drive may complete late. Therefore, a separate thread polls the
//! drives, and a scrape reads the latest answers that this thread stored.

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use jiff::Timestamp;
use nvme_guest::threads::start_thread;
use nvme_mpt::Drive;
use nvme_mpt::wipe::WipeStats;
use nvme_spec::log::SmartHealth;

use crate::stats::DriveStats;

/// Interval between two polls of a drive's SMART / Health Information.
const POLL_INTERVAL: Duration = Duration::from_secs(60);

/// Temperature of 0 °C in kelvins, rounded to 273 as drives do.
const ZERO_CELSIUS: f64 = 273.0;

/// SMART / Health Information of a drive, in Prometheus' base units such as seconds and bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct DriveHealth {
    /// Time at which the drive answered, in seconds since the epoch.
    pub(super) time: f64,
    pub(super) celsius: f64,
    pub(super) spare: f64,
    pub(super) percentage_used: f64,
    pub(super) critical_warning: u8,
    pub(super) media_errors: u64,
    pub(super) unsafe_shutdowns: u64,
}

impl DriveHealth {
    pub(super) fn new(smart: &SmartHealth, at: Timestamp) -> Self {
        // The log page has counters of 128 bits, which do not exceed 64 bits in practice.
        let low = |number: u128| u64::try_from(number).unwrap_or(u64::MAX);
        Self {
            time: at.as_millisecond() as f64 / 1e3,
            celsius: f64::from(smart.composite_temperature.get()) - ZERO_CELSIUS,
            spare: f64::from(smart.available_spare) / 100.0,
            percentage_used: f64::from(smart.percentage_used) / 100.0,
            critical_warning: smart.critical_warning.0,
            media_errors: low(smart.media_errors.get()),
            unsafe_shutdowns: low(smart.unsafe_shutdowns.get()),
        }
    }
}

/// Latest health of each drive, by path. Clones share the data.
#[derive(Clone, Debug, Default)]
pub struct HealthAnswers(Arc<Mutex<BTreeMap<String, DriveHealth>>>);

impl HealthAnswers {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, DriveHealth>> {
        // A poisoned lock is usable: no change can be interrupted by a panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the latest health of all drives.
    pub(crate) fn snapshot(&self) -> BTreeMap<String, DriveHealth> {
        self.lock().clone()
    }

    /// Copies critical warnings into the drives' statistics.
    pub(crate) fn copy_warnings_to(&self, drives: &mut [DriveStats]) {
        let answers = self.lock();
        for drive in drives {
            let health = answers.get(&drive.path);
            drive.critical_warning = health.map(|health| health.critical_warning);
        }
    }
}

/// Thread that polls the drives. Dropping it waits for the current answer and ends the thread.
#[derive(Debug)]
pub(super) struct HealthWatch {
    stop: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl HealthWatch {
    /// Starts polling the drives that `drives` returns, and stores the results in `answers`.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub(super) fn start(
        drives: impl Fn() -> Vec<Arc<Drive>> + Send + 'static,
        answers: HealthAnswers,
    ) -> io::Result<Self> {
        let (stop, stopped) = mpsc::sync_channel(0);
        let watch = move || {
            while stopped.recv_timeout(poll_drives(drives(), &answers))
                == Err(RecvTimeoutError::Timeout)
            {}
        };
        Ok(Self {
            stop: Some(stop),
            thread: Some(start_thread("drive-health", watch)?),
        })
    }
}

impl Drop for HealthWatch {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("The thread that asks drives for their health panicked");
        }
    }
}

/// Polls each drive. Returns the time until the next poll.
fn poll_drives(drives: Vec<Arc<Drive>>, answers: &HealthAnswers) -> Duration {
    let mut present = BTreeMap::new();
    for drive in drives {
        let path = drive.path().to_owned();
        match drive.controller().smart_health() {
            Ok(Some(smart)) => {
                present.insert(path, DriveHealth::new(&smart, Timestamp::now()));
            }
            Ok(None) => {}
            // The drive's previous answer stays, with the time of that answer.
            Err(error) => {
                log::info!("Drive {path} does not report its health: {error}");
                let known = answers.lock().get(&path).cloned();
                present.extend(known.map(|known| (path, known)));
            }
        }
    }
    *answers.lock() = present;
    POLL_INTERVAL
}

/// Statistics of a server's process.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProcessStats {
    /// Wiped bytes and ranges.
    pub wiped: WipeStats,
    /// Number of messages dropped because the log's reader was too slow.
    pub dropped_messages: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drive_statistics_have_the_last_known_warnings() {
        let answers = HealthAnswers::default();
        let health = DriveHealth {
            time: 1e9,
            celsius: 41.0,
            spare: 0.03,
            percentage_used: 0.99,
            critical_warning: 0b1001,
            media_errors: 0,
            unsafe_shutdowns: 0,
        };
        let drive = |path: &str| DriveStats {
            path: path.to_owned(),
            ..DriveStats::default()
        };
        let mut drives = [drive("0000:01:00.0"), drive("0000:02:00.0")];
        let mut warnings = || {
            answers.copy_warnings_to(&mut drives);
            [drives[0].critical_warning, drives[1].critical_warning]
        };
        assert_eq!(warnings(), [None, None]);
        answers.lock().insert("0000:01:00.0".to_owned(), health);
        assert_eq!(warnings(), [Some(0b1001), None]);
        answers.lock().clear();
        assert_eq!(warnings(), [None, None]);
    }
}

//! Health of physical drives, asked for once a minute.
//!
//! A drive answers with a command, and one that hangs answers late. So a thread asks, and a scrape reads the last answer.

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use jiff::Timestamp;
use nvme_mpt::Drive;
use nvme_mpt::poller::start_thread;
use nvme_mpt::spec::log::SmartHealth;
use nvme_mpt::wipe::Wiped;

use crate::stats::DriveStats;

/// Time between two questions.
const INTERVAL: Duration = Duration::from_secs(60);

/// Kelvins at 0 °C, as drives round them.
const FREEZING: f64 = 273.0;

/// Health of a drive, in base units.
#[derive(Clone, Debug, PartialEq)]
pub struct DriveHealth {
    /// Seconds since the epoch at which the drive answered.
    pub(super) at: f64,
    pub(super) celsius: f64,
    pub(super) spare: f64,
    pub(super) used: f64,
    pub(super) critical_warning: u8,
    pub(super) media_errors: u64,
    pub(super) unsafe_shutdowns: u64,
}

impl DriveHealth {
    pub(super) fn new(smart: &SmartHealth, at: Timestamp) -> Self {
        // No drive counts beyond 64 bits.
        let low = |number: u128| u64::try_from(number).unwrap_or(u64::MAX);
        Self {
            at: at.as_millisecond() as f64 / 1e3,
            celsius: f64::from(smart.composite_temperature.get()) - FREEZING,
            spare: f64::from(smart.available_spare) / 100.0,
            used: f64::from(smart.percentage_used) / 100.0,
            critical_warning: smart.critical_warning.0,
            media_errors: low(smart.media_errors.get()),
            unsafe_shutdowns: low(smart.unsafe_shutdowns.get()),
        }
    }
}

/// Last answers of drives about their health, by path. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct HealthAnswers(Arc<Mutex<BTreeMap<String, DriveHealth>>>);

impl HealthAnswers {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, DriveHealth>> {
        // Each change is complete before anything can panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns all of them.
    pub(crate) fn all(&self) -> BTreeMap<String, DriveHealth> {
        self.lock().clone()
    }

    /// Notes the warnings of drives in their figures.
    pub(crate) fn note_in(&self, drives: &mut [DriveStats]) {
        let answers = self.lock();
        for drive in drives {
            let health = answers.get(&drive.path);
            drive.critical_warning = health.map(|health| health.critical_warning);
        }
    }
}

/// Thread that asks the drives. It ends when this is dropped, after the answer that it waits for.
#[derive(Debug)]
pub(super) struct HealthWatch {
    stop: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl HealthWatch {
    /// Asks all drives that `drives` returns, now and then, and notes their answers.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub(super) fn start(
        drives: impl Fn() -> Vec<Arc<Drive>> + Send + 'static,
        answers: HealthAnswers,
    ) -> io::Result<Self> {
        let (stop, stopped) = mpsc::sync_channel(0);
        let watch = move || {
            while stopped.recv_timeout(ask(drives(), &answers)) == Err(RecvTimeoutError::Timeout) {}
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

/// Asks each drive. Returns the time until the next question.
fn ask(drives: Vec<Arc<Drive>>, answers: &HealthAnswers) -> Duration {
    let mut present = BTreeMap::new();
    for drive in drives {
        let path = drive.path().to_owned();
        match drive.controller().smart_health() {
            Ok(Some(smart)) => {
                present.insert(path, DriveHealth::new(&smart, Timestamp::now()));
            }
            Ok(None) => {}
            // The last answer stays, with its date.
            Err(error) => {
                log::info!("Drive {path} does not report its health: {error}");
                let known = answers.lock().get(&path).cloned();
                present.extend(known.map(|known| (path, known)));
            }
        }
    }
    *answers.lock() = present;
    INTERVAL
}

/// Figures of a server's process.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProcessFigures {
    /// Its wipes.
    pub wiped: Wiped,
    /// Messages that were dropped because the log's reader did not keep up.
    pub dropped_messages: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_drives_have_the_warnings_of_their_last_answers() {
        let answers = HealthAnswers::default();
        let health = DriveHealth {
            at: 1e9,
            celsius: 41.0,
            spare: 0.03,
            used: 0.99,
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
            answers.note_in(&mut drives);
            [drives[0].critical_warning, drives[1].critical_warning]
        };
        assert_eq!(warnings(), [None, None]);
        answers.lock().insert("0000:01:00.0".to_owned(), health);
        assert_eq!(warnings(), [Some(0b1001), None]);
        answers.lock().clear();
        assert_eq!(warnings(), [None, None]);
    }
}

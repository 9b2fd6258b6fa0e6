//! Health of a drive, as one of its guests may see it (Base 2.0, section 5.16.1.3).
//!
//! All guests of a drive share its wear, temperature and failures. So each guest sees the drive's spare, wear, temperatures,
//! hours and power cycles. Data read, data written and lost writes are counted per lease, so that no guest sees the activity of
//! other guests.
//!
//! The drive's log is read at most once a second for a guest. It is read every 10 s while the guest has health events enabled,
//! and whenever the drive raises an event. After the drive failed or was removed, the guest has a working controller without a
//! namespace. CSTS.CFS would not help: Linux would reset the controller, and the reset would not bring back the drive.

use std::sync::Arc;
use std::time::Duration;

use nvme_guest::{
    ControllerBackend,
    host::{LeaseDamage, TemperatureThresholds},
};
use nvme_mpt_memory::deadline::WaitClock;
use nvme_spec::log::{CriticalWarning, SmartHealth};
use zerocopy::{
    FromZeros,
    little_endian::{U16, U128},
};

use super::features::ControllerFeatures;

/// Time for which a report of the drive is used again. So a guest that polls its health log does not occupy the drive's admin
/// queue.
const REPORT_AGE_MAX: Duration = Duration::from_secs(1);

/// Interval at which the drive's health is read while the guest has health events enabled. A drive reports only that its own
/// thresholds are crossed, not those that a guest has set.
pub(crate) const HEALTH_POLL_INTERVAL: Duration = Duration::from_secs(10);

/// Composite Temperature, WCTEMP and CCTEMP in kelvins of a drive without a sensor: 37 °C, 70 °C and 100 °C.
const TEMPERATURE: u16 = 310;
const THRESHOLDS: TemperatureThresholds = TemperatureThresholds {
    warning: 343,
    critical: 373,
};

/// Available Spare, in percent, that is reported for a drive that does not wear out.
const SPARE: u8 = 100;
const SPARE_THRESHOLD: u8 = 10;

/// Result of the latest attempt to read the drive's health.
#[derive(Debug)]
enum HealthReading {
    /// There is no report: the drive was not asked yet, or it has not answered.
    Unknown,
    /// The drive has no health log, because it does not wear out.
    None,
    /// The drive's last report.
    Drive(Box<SmartHealth>),
}

/// The drive's health as the function last read it.
#[derive(Debug)]
pub(super) struct GuestDriveHealth {
    thresholds: Option<TemperatureThresholds>,
    reading: HealthReading,
    last_read: Option<Duration>,
    is_drive_gone: bool,
    damage: LeaseDamage,
    powered_since: Duration,
    /// Time for which previous processes had the controller powered. The time in this process is added to it.
    powered_before: Duration,
    clock: Arc<dyn WaitClock>,
}

impl GuestDriveHealth {
    /// Creates an empty cache. `thresholds` are the drive's temperature thresholds; `None` if the drive measures no
    /// temperature.
    pub(super) fn new(
        thresholds: Option<TemperatureThresholds>,
        clock: Arc<dyn WaitClock>,
    ) -> Self {
        Self {
            thresholds,
            reading: HealthReading::Unknown,
            last_read: None,
            is_drive_gone: false,
            damage: LeaseDamage::default(),
            powered_since: clock.now(),
            powered_before: Duration::ZERO,
            clock,
        }
    }

    /// Replaces the clock. The time of the last read is discarded, because it was by the old clock.
    pub(super) fn set_clock(&mut self, clock: Arc<dyn WaitClock>) {
        self.last_read = None;
        self.powered_since = clock.now();
        self.clock = clock;
    }

    /// Returns the time for which the controller has been powered, in all processes.
    pub(super) fn powered_time(&self) -> Duration {
        let powered_for = self.clock.now().saturating_sub(self.powered_since);
        powered_for.saturating_add(self.powered_before)
    }

    /// Sets the time for which previous processes had the controller powered.
    pub(super) fn set_powered_time(&mut self, powered: Duration) {
        (self.powered_since, self.powered_before) = (self.clock.now(), powered);
    }

    /// Returns whether the drive's health was last read at least `time` ago.
    fn is_older_than(&self, time: Duration) -> bool {
        self.last_read
            .is_none_or(|last_update| self.clock.now().saturating_sub(last_update) >= time)
    }

    /// Returns `WCTEMP` and `CCTEMP`.
    pub(super) fn thresholds(&self) -> TemperatureThresholds {
        self.thresholds.unwrap_or(THRESHOLDS)
    }

    /// Returns the default Over Temperature Threshold: `WCTEMP`, if the drive reports one.
    pub(super) fn default_threshold(&self) -> u16 {
        match self.thresholds().warning {
            0 => u16::MAX,
            warning => warning,
        }
    }

    /// Returns whether the drive's health can change by itself: the drive measures its temperature.
    pub(super) fn can_change(&self) -> bool {
        self.thresholds.is_some()
    }

    /// Records damage of the lease's own data, without access to the drive.
    pub(super) fn set_damage(&mut self, damage: LeaseDamage) {
        self.damage = damage;
    }

    /// Reads the drive's health if the last read was at least [`REPORT_AGE_MAX`] ago.
    pub(super) fn refresh(&mut self, host: &dyn ControllerBackend) {
        if self.is_older_than(REPORT_AGE_MAX) {
            self.read(host);
        }
    }

    /// Returns whether the drive's health was last read at least [`HEALTH_POLL_INTERVAL`] ago.
    pub(super) fn is_due(&self) -> bool {
        self.is_older_than(HEALTH_POLL_INTERVAL)
    }

    /// Reads the drive's health. If the drive does not answer, the last report stays.
    pub(super) fn read(&mut self, host: &dyn ControllerBackend) {
        self.last_read = Some(self.clock.now());
        self.is_drive_gone = host.status().is_gone;
        if self.is_drive_gone {
            return;
        }
        match host.smart_health() {
            Ok(Some(log)) => self.reading = HealthReading::Drive(Box::new(log)),
            Ok(None) => self.reading = HealthReading::None,
            Err(error) => log::info!("The drive does not report its health: {error}"),
        }
    }

    /// Returns the Composite Temperature in kelvins; 0 if it is unknown.
    fn temperature(&self) -> u16 {
        match &self.reading {
            HealthReading::Unknown => 0,
            HealthReading::None => TEMPERATURE,
            HealthReading::Drive(log) => log.composite_temperature.get(),
        }
    }

    /// Returns Critical Warning. The bits are the drive's, with three exceptions. The temperature bit results from a comparison
    /// with this guest's thresholds. Bit 2 (reliability) is also set if the drive failed or the lease's data is damaged. Bit 3
    /// (read only) is also set if completed writes were lost. The specification allows the last exception, because the cause is
    /// no write protection of the namespace (Base 2.0, Figure 207).
    pub(super) fn warnings(&self, features: &ControllerFeatures) -> CriticalWarning {
        let LeaseDamage {
            lost_writes,
            cut_short,
            replaced,
        } = self.damage;
        let damaged = lost_writes || cut_short || replaced;
        let temperature = self.temperature();
        let beyond =
            temperature != 0 && features.is_beyond_threshold(temperature, self.default_threshold());
        let drive = match &self.reading {
            HealthReading::Drive(log) => log.critical_warning,
            HealthReading::Unknown | HealthReading::None => CriticalWarning::default(),
        };
        CriticalWarning::default()
            .with_spare(drive.spare())
            .with_temperature(beyond)
            .with_reliability(drive.reliability() || self.is_drive_gone || damaged)
            .with_read_only(drive.read_only() || lost_writes)
            .with_volatile_backup(drive.volatile_backup())
    }

    /// Returns the log page with the drive's values. The lease's counters in the page are zero, for the caller to fill in.
    pub(super) fn page(&self, features: &ControllerFeatures) -> SmartHealth {
        let mut page = SmartHealth::new_zeroed();
        page.critical_warning = self.warnings(features);
        page.composite_temperature = U16::new(self.temperature());
        match &self.reading {
            HealthReading::Drive(drive) => {
                page.available_spare = drive.available_spare;
                page.available_spare_threshold = drive.available_spare_threshold;
                page.percentage_used = drive.percentage_used;
                page.controller_busy_time = drive.controller_busy_time;
                page.power_cycles = drive.power_cycles;
                page.power_on_hours = drive.power_on_hours;
                page.unsafe_shutdowns = drive.unsafe_shutdowns;
                page.warning_temperature_time = drive.warning_temperature_time;
                page.critical_temperature_time = drive.critical_temperature_time;
                page.temperature_sensors = drive.temperature_sensors;
                page.thermal_transitions = drive.thermal_transitions;
                page.thermal_time = drive.thermal_time;
            }
            HealthReading::None => {
                page.available_spare = SPARE;
                page.available_spare_threshold = SPARE_THRESHOLD;
                page.power_cycles = U128::new(1);
                let hours = self.powered_time().as_secs() / 3600;
                page.power_on_hours = U128::new(hours.into());
            }
            HealthReading::Unknown => {
                page.available_spare = SPARE;
                page.available_spare_threshold = SPARE_THRESHOLD;
            }
        }
        page
    }
}

#[cfg(test)]
mod tests;

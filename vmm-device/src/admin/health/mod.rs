//! The health of the drive, as one of its users may know it (Base 2.0, section 5.16.1.3).
//!
//! All users share one drive that wears out, heats up or fails. So each of them gets its state: spare, wear,
//! temperatures, hours, power cycles. Data read, written and lost is counted for the lease alone: no guest learns
//! what others do.
//!
//! The drive's log is read at most once a second for a guest. It is read every 10 s while the guest has health
//! events enabled, and whenever the drive raises an event. A drive that is gone leaves its guest a controller that
//! works and has no namespace. CSTS.CFS would make Linux reset the controller in vain.

use std::sync::Arc;
use std::time::Duration;

use nvme_mpt::{
    HostSide,
    deadline::WaitClock,
    host::{Damage, TemperatureThresholds},
    spec::log::{CriticalWarning, SmartHealth},
};
use zerocopy::{
    FromZeros,
    little_endian::{U16, U128},
};

use super::features::Features;

/// Time for which the drive's last report is taken as true: a guest that asks again and again does not keep
/// the drive's admin queue busy, which others need.
const FRESH: Duration = Duration::from_secs(1);

/// Interval at which the drive is asked while the guest wants to hear of warnings. A drive reports its own
/// thresholds by itself, not those that a guest has set.
pub(crate) const WATCH_INTERVAL: Duration = Duration::from_secs(10);

/// Of a drive without a sensor: 37 °C, 70 °C and 100 °C.
const TEMPERATURE: u16 = 310;
const THRESHOLDS: TemperatureThresholds = TemperatureThresholds {
    warning: 343,
    critical: 373,
};

/// Available Spare of a drive that does not wear out, in percent.
const SPARE: u8 = 100;
const SPARE_THRESHOLD: u8 = 10;

/// Knowledge of the drive's health.
#[derive(Debug)]
enum Reading {
    /// Nobody asked, or the drive did not answer yet.
    Unknown,
    /// The drive keeps no log: nothing in it wears out.
    None,
    /// The drive's last report.
    Drive(Box<SmartHealth>),
}

/// The drive's health, read when somebody wants to know it.
#[derive(Debug)]
pub(super) struct Health {
    thresholds: Option<TemperatureThresholds>,
    reading: Reading,
    asked: Option<Duration>,
    gone: bool,
    damage: Damage,
    since: Duration,
    /// Time for which the controller was on before that, in other processes.
    powered_before: Duration,
    clock: Arc<dyn WaitClock>,
}

impl Health {
    /// Knows nothing yet. `thresholds` are those of the drive; `None` if it measures no temperature.
    pub(super) fn new(
        thresholds: Option<TemperatureThresholds>,
        clock: Arc<dyn WaitClock>,
    ) -> Self {
        Self {
            thresholds,
            reading: Reading::Unknown,
            asked: None,
            gone: false,
            damage: Damage::default(),
            since: clock.now(),
            powered_before: Duration::ZERO,
            clock,
        }
    }

    /// Goes by another clock from now on. The drive was not asked by it.
    pub(super) fn set_clock(&mut self, clock: Arc<dyn WaitClock>) {
        self.asked = None;
        self.since = clock.now();
        self.clock = clock;
    }

    /// Returns the time for which the controller has been on.
    pub(super) fn powered(&self) -> Duration {
        let here = self.clock.now().saturating_sub(self.since);
        here.saturating_add(self.powered_before)
    }

    /// Goes on as a controller that was on for some time before.
    pub(super) fn go_on(&mut self, powered: Duration) {
        (self.since, self.powered_before) = (self.clock.now(), powered);
    }

    /// Returns whether the drive was not asked for at least `time`.
    fn is_older_than(&self, time: Duration) -> bool {
        self.asked
            .is_none_or(|asked| self.clock.now().saturating_sub(asked) >= time)
    }

    /// `WCTEMP` and `CCTEMP`.
    pub(super) fn thresholds(&self) -> TemperatureThresholds {
        self.thresholds.unwrap_or(THRESHOLDS)
    }

    /// The Over Temperature Threshold that nobody has set: `WCTEMP`, if the drive reports one.
    pub(super) fn default_threshold(&self) -> u16 {
        match self.thresholds().warning {
            0 => u16::MAX,
            warning => warning,
        }
    }

    /// Returns whether the drive's health can change at all.
    pub(super) fn can_change(&self) -> bool {
        self.thresholds.is_some()
    }

    /// Takes note of the lease's own damage, which costs the drive nothing.
    pub(super) fn note(&mut self, damage: Damage) {
        self.damage = damage;
    }

    /// Asks the drive, unless it was asked just now.
    pub(super) fn refresh(&mut self, host: &dyn HostSide) {
        if self.is_older_than(FRESH) {
            self.read(host);
        }
    }

    /// Returns whether the drive was not asked for so long that its guest may have missed something.
    pub(super) fn is_due(&self) -> bool {
        self.is_older_than(WATCH_INTERVAL)
    }

    /// Asks the drive. While it does not answer, what it said last stays.
    pub(super) fn read(&mut self, host: &dyn HostSide) {
        self.asked = Some(self.clock.now());
        self.gone = host.status().is_gone;
        if self.gone {
            return;
        }
        match host.smart_health() {
            Ok(Some(log)) => self.reading = Reading::Drive(Box::new(log)),
            Ok(None) => self.reading = Reading::None,
            Err(error) => log::info!("The drive does not tell its health: {error}"),
        }
    }

    /// Composite Temperature in kelvins; 0 if not known.
    fn temperature(&self) -> u16 {
        match &self.reading {
            Reading::Unknown => 0,
            Reading::None => TEMPERATURE,
            Reading::Drive(log) => log.composite_temperature.get(),
        }
    }

    /// Critical Warning: the drive's own, but for its temperature, which is held against the
    /// thresholds of this guest; and a drive that is gone is not reliable. A lease whose
    /// data is damaged is less reliable by an internal error (bit 2). One that lost completed writes takes no
    /// writes either (bit 3), which no write protection of the namespace has brought about (Base 2.0, Figure 207).
    pub(super) fn warnings(&self, features: &Features) -> CriticalWarning {
        let Damage {
            lost_writes,
            cut_short,
            replaced,
        } = self.damage;
        let damaged = lost_writes || cut_short || replaced;
        let temperature = self.temperature();
        let beyond =
            temperature != 0 && features.is_beyond_threshold(temperature, self.default_threshold());
        let drive = match &self.reading {
            Reading::Drive(log) => log.critical_warning,
            Reading::Unknown | Reading::None => CriticalWarning::default(),
        };
        CriticalWarning::default()
            .with_spare(drive.spare())
            .with_temperature(beyond)
            .with_reliability(drive.reliability() || self.gone || damaged)
            .with_read_only(drive.read_only() || lost_writes)
            .with_volatile_backup(drive.volatile_backup())
    }

    /// The drive's part of the log page; what is counted for a lease is zero.
    pub(super) fn page(&self, features: &Features) -> SmartHealth {
        let mut page = SmartHealth::new_zeroed();
        page.critical_warning = self.warnings(features);
        page.composite_temperature = U16::new(self.temperature());
        match &self.reading {
            Reading::Drive(drive) => {
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
            Reading::None => {
                page.available_spare = SPARE;
                page.available_spare_threshold = SPARE_THRESHOLD;
                page.power_cycles = U128::new(1);
                let hours = self.powered().as_secs() / 3600;
                page.power_on_hours = U128::new(hours.into());
            }
            Reading::Unknown => {
                page.available_spare = SPARE;
                page.available_spare_threshold = SPARE_THRESHOLD;
            }
        }
        page
    }
}

#[cfg(test)]
mod tests;

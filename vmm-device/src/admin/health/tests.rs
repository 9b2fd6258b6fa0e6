//! SMART / Health Information of a drive, as a guest sees it.

use nvme_guest::DoorbellMode;
use zerocopy::IntoBytes;

use super::*;
use crate::fixtures::{FixtureClock, fixture_clock};

fn log(change: impl FnOnce(&mut SmartHealth)) -> SmartHealth {
    let mut log = SmartHealth::new_zeroed();
    log.composite_temperature = U16::new(320);
    change(&mut log);
    log
}

fn health(log: SmartHealth) -> GuestDriveHealth {
    GuestDriveHealth {
        thresholds: Some(TemperatureThresholds {
            warning: 350,
            critical: 360,
        }),
        reading: HealthReading::Drive(Box::new(log)),
        last_read: Some(Duration::ZERO),
        is_drive_gone: false,
        damage: LeaseDamage::default(),
        powered_since: Duration::ZERO,
        powered_before: Duration::ZERO,
        clock: fixture_clock(),
    }
}

#[test]
fn health_shows_the_drives_state_but_not_its_io_counts() {
    let mut filled = SmartHealth::new_zeroed();
    filled.as_mut_bytes().fill(0xFF);
    let page = health(filled).page(&ControllerFeatures::new(&fixture_clock()));
    let bytes = page.as_bytes();
    assert_eq!(bytes[0], 0b1_1111, "every warning but that of a PMR");
    assert_eq!(bytes[1..6], [0xFF; 5], "temperature, spare, wear");
    assert_eq!(bytes[6..32], [0; 26], "no endurance group");
    assert_eq!(bytes[32..96], [0; 64], "data units and commands");
    assert_eq!(
        bytes[96..160],
        [0xFF; 64],
        "busy time, power, unsafe shutdowns"
    );
    assert_eq!(bytes[160..192], [0; 32], "media errors and error log");
    assert_eq!(bytes[192..232], [0xFF; 40], "temperatures");
    assert_eq!(bytes[232..], [0; 280]);
}

#[test]
fn the_temperature_is_compared_with_the_guests_thresholds() {
    let features = ControllerFeatures::new(&fixture_clock());
    let warns = |health: &GuestDriveHealth| health.warnings(&features).temperature();
    let with = |kelvins| health(log(|log| log.composite_temperature = U16::new(kelvins)));
    assert!(!warns(&with(349)) && warns(&with(350)), "WCTEMP");
    assert!(!warns(&with(0)), "not reported");
    // The drive's own thresholds matter only to the host, not to the guest.
    let hot = CriticalWarning::default().with_temperature(true);
    assert!(!warns(&health(log(|log| log.critical_warning = hot))));

    let mut unknown = with(1000);
    unknown.thresholds = Some(TemperatureThresholds {
        warning: 0,
        critical: 0,
    });
    assert_eq!(unknown.default_threshold(), u16::MAX);
    assert!(!warns(&unknown));
}

#[test]
fn a_removed_drive_is_unreliable_and_keeps_its_last_values() {
    let mut health = health(log(|log| log.percentage_used = 7));
    assert_eq!(
        health.warnings(&ControllerFeatures::new(&fixture_clock())),
        CriticalWarning::default()
    );
    health.is_drive_gone = true;
    let page = health.page(&ControllerFeatures::new(&fixture_clock()));
    assert!(page.critical_warning.reliability());
    assert_eq!(page.percentage_used, 7);
}

#[test]
fn a_drive_without_wear_is_healthy() {
    let host = crate::fixtures::local_backend(DoorbellMode::Trap);
    let mut health = GuestDriveHealth::new(host.facts().thresholds, fixture_clock());
    assert_eq!(
        health
            .page(&ControllerFeatures::new(&fixture_clock()))
            .composite_temperature,
        U16::new(0),
        "nobody asked"
    );
    health.refresh(&host);
    let page = health.page(&ControllerFeatures::new(&fixture_clock()));
    assert_eq!(page.as_bytes()[..6], [0, 0x36, 0x01, 100, 10, 0]);
    assert!(!health.can_change());
    assert_eq!(health.thresholds(), crate::fixtures::THRESHOLDS);
}

#[test]
fn drive_health_may_be_refreshed_after_a_second_and_is_due_after_ten() {
    let host = crate::fixtures::local_backend(DoorbellMode::Trap);
    let clock = Arc::new(FixtureClock::default());
    let mut health = GuestDriveHealth::new(None, clock.clone());
    assert!(health.is_due(), "never asked");
    health.refresh(&host);
    let first = health.last_read;
    clock.sleep(REPORT_AGE_MAX - Duration::from_millis(1));
    health.refresh(&host);
    assert_eq!(health.last_read, first, "asked just now");
    clock.sleep(Duration::from_millis(1));
    health.refresh(&host);
    assert_eq!(health.last_read, Some(REPORT_AGE_MAX));
    clock.sleep(HEALTH_POLL_INTERVAL - Duration::from_millis(1));
    assert!(!health.is_due());
    clock.sleep(Duration::from_millis(1));
    assert!(health.is_due());
}

#[test]
fn without_a_drive_log_power_on_hours_count_from_the_functions_start() {
    let host = crate::fixtures::local_backend(DoorbellMode::Trap);
    let clock = Arc::new(FixtureClock::default());
    let mut health = GuestDriveHealth::new(None, clock.clone());
    health.refresh(&host);
    clock.sleep(Duration::from_secs(3 * 3600 - 1));
    let hours = |health: &GuestDriveHealth| {
        health
            .page(&ControllerFeatures::new(&health.clock))
            .power_on_hours
    };
    assert_eq!(hours(&health), U128::new(2));
    clock.sleep(Duration::from_secs(1));
    assert_eq!(hours(&health), U128::new(3));
    // The successor continues from the time for which the controller was powered.
    let mut next = GuestDriveHealth::new(None, clock.clone());
    next.refresh(&host);
    next.set_powered_time(health.powered_time());
    clock.sleep(Duration::from_secs(3600));
    assert_eq!(hours(&next), U128::new(4));
}

//! A guest's view of a drive's health.

use nvme_mpt::DoorbellMode;
use nvme_mpt::deadline::SystemClock;
use zerocopy::IntoBytes;

use super::*;

fn log(change: impl FnOnce(&mut SmartHealth)) -> SmartHealth {
    let mut log = SmartHealth::new_zeroed();
    log.composite_temperature = U16::new(320);
    change(&mut log);
    log
}

fn health(log: SmartHealth) -> Health {
    Health {
        thresholds: Some(TemperatureThresholds {
            warning: 350,
            critical: 360,
        }),
        reading: Reading::Drive(Box::new(log)),
        asked: Some(SystemClock.now()),
        gone: false,
        damage: Damage::default(),
        since: SystemClock.now(),
        clock: SystemClock::shared(),
    }
}

#[test]
fn the_state_is_the_drives_and_no_count_is() {
    let mut filled = SmartHealth::new_zeroed();
    filled.as_mut_bytes().fill(0xFF);
    let page = health(filled).page(&Features::new(&SystemClock::shared()));
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
fn the_temperature_is_held_against_the_guests_thresholds() {
    let features = Features::new(&SystemClock::shared());
    let warns = |health: &Health| health.warnings(&features).temperature();
    let with = |kelvins| health(log(|log| log.composite_temperature = U16::new(kelvins)));
    assert!(!warns(&with(349)) && warns(&with(350)), "WCTEMP");
    assert!(!warns(&with(0)), "not reported");
    // The drive's own thresholds are the host's affair.
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
fn a_drive_that_is_gone_is_not_reliable_and_what_it_said_stays() {
    let mut health = health(log(|log| log.percentage_used = 7));
    assert_eq!(
        health.warnings(&Features::new(&SystemClock::shared())),
        CriticalWarning::default()
    );
    health.gone = true;
    let page = health.page(&Features::new(&SystemClock::shared()));
    assert!(page.critical_warning.reliability());
    assert_eq!(page.percentage_used, 7);
}

#[test]
fn a_drive_that_does_not_wear_out_is_well() {
    let host = crate::fixtures::attachment(DoorbellMode::Trap);
    let mut health = Health::new(host.facts().thresholds, SystemClock::shared());
    assert_eq!(
        health
            .page(&Features::new(&SystemClock::shared()))
            .composite_temperature,
        U16::new(0),
        "nobody asked"
    );
    health.refresh(&host);
    let page = health.page(&Features::new(&SystemClock::shared()));
    assert_eq!(page.as_bytes()[..6], [0, 0x36, 0x01, 100, 10, 0]);
    assert!(!health.can_change());
    assert_eq!(health.thresholds(), crate::fixtures::THRESHOLDS);
}

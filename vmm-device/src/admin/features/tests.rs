//! Defaults, capabilities, accepted values and refusals of all features.

use std::time::Duration;

use super::*;
use crate::fixtures::fixture_clock;

const VECTORS: usize = 5;

struct Fixture {
    features: ControllerFeatures,
    namespace: LeasedNamespace,
    volatile_write_cache: bool,
    io_queues_exist: bool,
}

impl Fixture {
    fn new() -> Self {
        Self {
            features: ControllerFeatures::new(&fixture_clock()),
            namespace: crate::fixtures::namespace(),
            volatile_write_cache: true,
            io_queues_exist: false,
        }
    }

    fn context(&self) -> FeatureContext<'_> {
        FeatureContext {
            namespace: &self.namespace,
            blocks: self.namespace.blocks,
            volatile_write_cache: self.volatile_write_cache,
            queue_pairs_max: 4,
            default_threshold: 343,
            vectors: VECTORS,
            io_queues_exist: self.io_queues_exist,
        }
    }

    fn get(&self, fid: u8, select: u8, dword11: u32, nsid: u32) -> Result<FeatureValue, Status> {
        let (fid, select) = (FeatureId(fid), FeatureSelect(select));
        self.features
            .get(fid, select, dword11, Nsid(nsid), &self.context())
    }

    /// Returns dword 0 of the feature's current value.
    fn current(&self, fid: u8, dword11: u32) -> Result<u32, Status> {
        let nsid = if matches!(fid, 0x03 | 0x05) { 1 } else { 0 };
        self.get(fid, 0, dword11, nsid).map(|value| value.dw0)
    }

    fn set(&mut self, fid: u8, dword11: u32, data: &[u8]) -> Result<u32, Status> {
        let mut features = self.features.clone();
        let result = features.set(FeatureId(fid), dword11, data, &self.context());
        self.features = features;
        result
    }

    fn check_set(&self, fid: u8, save: bool, nsid: u32) -> Result<(), Status> {
        check_set(FeatureId(fid), save, Nsid(nsid), &self.context())
    }
}

/// Identifiers of all features.
const FIDS: [u8; 14] = [
    0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, 0x09, 0x0A, 0x0B, 0x0E, 0x16, 0x19,
];

#[test]
fn current_and_saved_values_are_initially_the_defaults() {
    let fixture = Fixture::new();
    for (fid, expected) in [
        (0x01, 0x0000_0006),
        (0x02, 0),
        (0x03, 0),
        (0x04, 343),
        (0x05, 0),
        (0x06, 1),
        (0x07, 0x0003_0003),
        (0x08, 0),
        (0x09, 0),
        (0x0A, 0),
        (0x0B, 0),
        (0x0E, 0),
        (0x16, 0),
        (0x19, 0),
    ] {
        for select in 0..=2 {
            let nsid = u32::from(matches!(fid, 0x03 | 0x05));
            let dw0 = fixture.get(fid, select, 0, nsid).map(|value| value.dw0);
            assert_eq!(dw0, Ok(expected), "feature {fid:#x}, select {select}");
        }
    }
}

#[test]
fn capabilities_say_what_set_features_does() {
    let fixture = Fixture::new();
    for fid in 0..=u8::MAX {
        let expected = match fid {
            0x03 => Ok(0b010),
            0x05 => Ok(0b110),
            0x06 => Ok(0b000),
            fid if FIDS.contains(&fid) => Ok(0b100),
            _ => Err(Status::INVALID_FIELD),
        };
        let capabilities = fixture.get(fid, 3, 0, 0).map(|value| value.dw0);
        assert_eq!(capabilities, expected, "feature {fid:#x}");
        if expected.is_err() {
            assert_eq!(fixture.get(fid, 0, 0, 0), Err(Status::INVALID_FIELD));
            assert_eq!(fixture.check_set(fid, false, 0), Err(Status::INVALID_FIELD));
        } else {
            assert_eq!(
                fixture.check_set(fid, true, 1),
                Err(Status::FEATURE_NOT_SAVEABLE)
            );
        }
    }
    for select in 4..=7 {
        assert_eq!(fixture.get(0x01, select, 0, 0), Err(Status::INVALID_FIELD));
    }
}

#[test]
fn only_namespace_specific_features_accept_a_namespace() {
    let fixture = Fixture::new();
    let invalid = Err(Status::INVALID_NAMESPACE_OR_FORMAT);
    let not_specific = Err(Status::FEATURE_NOT_NAMESPACE_SPECIFIC);
    for (fid, nsid, expected) in [
        (0x05, 0, invalid),
        (0x05, 1, Ok(())),
        (0x05, 2, invalid),
        (0x05, 0xFFFF_FFFF, Ok(())),
        (0x03, 1, Err(Status::FEATURE_NOT_CHANGEABLE)),
        (0x01, 0, Ok(())),
        (0x01, 1, not_specific),
        (0x01, 2, invalid),
        (0x01, 0xFFFF_FFFF, Ok(())),
    ] {
        assert_eq!(
            fixture.check_set(fid, false, nsid),
            expected,
            "{fid:#x} of {nsid:#x}"
        );
    }
    for nsid in [0, 2, 0xFFFF_FFFF] {
        let result = fixture.get(0x03, 0, 0, nsid);
        assert_eq!(result, Err(Status::INVALID_NAMESPACE_OR_FORMAT));
    }
}

#[test]
fn simple_values_read_back_without_their_reserved_bits() {
    let mut fixture = Fixture::new();
    for (fid, written, expected) in [
        (0x01, 0xFFFF_FFFF, 0xFFFF_FF07),
        (0x02, 0xFFFF_FFE0, 0x0000_00E0),
        (0x05, 0xFFFE_FFFF, 0x0000_FFFF),
        (0x06, 0x0000_0001, 0x0000_0001),
        (0x08, 0xFFFF_1234, 0x0000_1234),
        (0x0A, 0xFFFF_FFFF, 0x0000_0001),
        (0x0B, 0xFFFF_FFFF, 0x0000_01FF),
        (0x19, 0xFFFF_FE00, 0x0000_0000),
    ] {
        assert_eq!(fixture.set(fid, written, &[]), Ok(0));
        assert_eq!(fixture.current(fid, 0), Ok(expected), "feature {fid:#x}");
    }
    let default = fixture.get(0x08, 1, 0, 0).map(|value| value.dw0);
    assert_eq!(default, Ok(0), "a default is no current value");
}

#[test]
fn invalid_feature_values_are_refused() {
    let mut fixture = Fixture::new();
    for (fid, dword11, status) in [
        (0x02, 1, Status::INVALID_FIELD),
        (0x04, 0x0001_0150, Status::INVALID_FIELD),
        (0x04, 0x0020_0150, Status::INVALID_FIELD),
        (0x05, 0x0001_0000, Status::INVALID_FIELD),
        (0x06, 0, Status::FEATURE_NOT_CHANGEABLE),
        (0x07, 0x0000_FFFF, Status::INVALID_FIELD),
        (0x07, 0xFFFF_0000, Status::INVALID_FIELD),
        (0x09, VECTORS as u32, Status::INVALID_FIELD),
        (0x0E, 0, Status::DATA_TRANSFER_ERROR),
        (0x16, 0, Status::DATA_TRANSFER_ERROR),
        (0x19, 1, Status::IO_COMMAND_SET_COMBINATION_REJECTED),
    ] {
        assert_eq!(
            fixture.set(fid, dword11, &[]),
            Err(status),
            "{fid:#x} {dword11:#x}"
        );
    }
    let temperature_of_sensor_1 = fixture.current(0x04, 0x0001_0000);
    assert_eq!(temperature_of_sensor_1, Err(Status::INVALID_FIELD));
    assert_eq!(
        fixture.current(0x09, VECTORS as u32),
        Err(Status::INVALID_FIELD)
    );
}

#[test]
fn queues_are_allocated_up_to_the_controllers_limit() {
    let mut fixture = Fixture::new();
    assert_eq!(fixture.set(0x07, 0x0001_0002, &[]), Ok(0x0001_0002));
    let allocated = fixture.features.allocated_queues(&fixture.context());
    assert_eq!(
        allocated,
        IoQueueAllocation {
            submission: 3,
            completion: 2
        }
    );
    assert_eq!(fixture.set(0x07, 0xFFFE_FFFE, &[]), Ok(0x0003_0003));
    assert_eq!(fixture.current(0x07, 0), Ok(0x0003_0003));
    fixture.io_queues_exist = true;
    assert_eq!(
        fixture.set(0x07, 0, &[]),
        Err(Status::COMMAND_SEQUENCE_ERROR)
    );
    assert_eq!(fixture.current(0x07, 0), Ok(0x0003_0003));
}

#[test]
fn thresholds_are_kept_and_compared() {
    let mut fixture = Fixture::new();
    let beyond =
        |features: &ControllerFeatures, temperature| features.is_beyond_threshold(temperature, 343);
    assert!(!beyond(&fixture.features, 342));
    assert!(beyond(&fixture.features, 343), "the drive's own threshold");
    assert_eq!(fixture.set(0x04, 310, &[]), Ok(0));
    assert_eq!(fixture.current(0x04, 0), Ok(310));
    assert!(beyond(&fixture.features, 310) && !beyond(&fixture.features, 309));
    assert_eq!(fixture.set(0x04, 0x000F_0157, &[]), Ok(0), "all sensors");
    assert!(!beyond(&fixture.features, 310));
    assert_eq!(
        fixture.set(0x04, 0x0010_0136, &[]),
        Ok(0),
        "under temperature"
    );
    assert_eq!(fixture.current(0x04, 0x0010_0000), Ok(310));
    assert!(beyond(&fixture.features, 310) && !beyond(&fixture.features, 311));
}

#[test]
fn coalescing_is_disabled_by_vector() {
    let mut fixture = Fixture::new();
    assert_eq!(fixture.set(0x09, 0x0001_0004, &[]), Ok(0));
    assert_eq!(fixture.current(0x09, 4), Ok(0x0001_0004));
    assert_eq!(fixture.current(0x09, 3), Ok(0x0000_0003));
    assert_eq!(fixture.set(0x09, 0x0000_0004, &[]), Ok(0));
    assert_eq!(fixture.current(0x09, 4), Ok(0x0000_0004));
}

#[test]
fn the_namespace_is_one_lba_range() {
    let value = Fixture::new().get(0x03, 0, 0, 1).expect("a value");
    assert_eq!((value.dw0, value.data.len()), (0, 4096));
    assert_eq!(
        value.data[..2],
        [0, 1],
        "general purpose, may be overwritten"
    );
    assert_eq!(value.data[16..24], [0; 8]);
    assert_eq!(
        value.data[24..32],
        0x1F_FFFF_u64.to_le_bytes(),
        "1 GiB less one block"
    );
}

#[test]
fn without_a_write_cache_its_feature_is_invalid() {
    let mut fixture = Fixture::new();
    fixture.volatile_write_cache = false;
    assert_eq!(fixture.current(0x06, 0), Err(Status::INVALID_FIELD));
    assert_eq!(
        fixture.check_set(0x06, false, 0),
        Err(Status::INVALID_FIELD)
    );
}

#[test]
fn the_timestamp_continues_from_the_set_value() {
    let mut fixture = Fixture::new();
    let set = [0x06, 0x05, 0x04, 0x03, 0x02, 0x01, 0xFF, 0xFF];
    assert_eq!(fixture.set(0x0E, 0, &set), Ok(0));
    fixture.features.clock.sleep(Duration::from_millis(0x10));
    let value = fixture.get(0x0E, 0, 0, 0).expect("a timestamp");
    let now = Timestamp::read_from_bytes(&value.data).expect("8 bytes");
    assert_eq!(now.milliseconds(), 0x0102_0304_0516);
    assert_eq!(value.data[6], 0b10, "set by Set Features");
}

#[test]
fn host_behavior_fields_are_zero_or_one() {
    let mut fixture = Fixture::new();
    let mut data = [0; 512];
    data[0] = 1;
    assert_eq!(fixture.set(0x16, 0, &data), Ok(0));
    assert_eq!(fixture.get(0x16, 0, 0, 0).expect("a value").data, data);
    data[2] = 2;
    assert_eq!(fixture.set(0x16, 0, &data), Err(Status::INVALID_FIELD));
}

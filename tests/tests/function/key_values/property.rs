//! Random commands on keys, compared with a map, in memory and in a file.

use std::collections::BTreeMap;

use nvme_mpt_tests::Error;
use nvme_mpt_tests::command::kv;
use nvme_mpt_tests::disk::Transfer;
use nvme_mpt_tests::doorbell::DoorbellMode;
use nvme_mpt_tests::key_value::{KeyValues, Operation, option, step as step_status};
use nvme_mpt_tests::registers::CC_CSS_ALL;
use nvme_mpt_tests::status::{CAPACITY_EXCEEDED, KEY_DOES_NOT_EXIST, KEY_EXISTS, SUCCESS};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::{DRIVE, PROFILE, attach_with, file_host_with, host_with, open, timed, value};
use crate::common::{LEASE, MODES, Setup};

/// A command chosen by random numbers.
#[derive(Clone, Debug)]
struct Step {
    command: u8,
    key: Vec<u8>,
    size: usize,
    options: u32,
    transfer: Transfer,
}

fn steps() -> impl Strategy<Value = Step> {
    let key = prop::collection::vec(prop::sample::select(vec![0, 1, b'a', 0xFF]), 1..=16);
    // There are few keys, so most keys exist at times.
    let key = prop_oneof![
        3 => key,
        7 => prop::collection::vec(prop::sample::select(b"ab".to_vec()), 1..=2)
    ];
    let size = prop_oneof![0..200_usize, 0..20_000_usize, Just(4096), Just(8192)];
    let options = prop::sample::select(vec![0, option::MUST_EXIST, option::MUST_NOT_EXIST]);
    let transfer = prop_oneof![
        (0..1024_usize).prop_map(|words| Transfer::Prp { offset: 4 * words }),
        (200..5000_usize, 2..30_usize)
            .prop_map(|(piece, per_segment)| Transfer::Sgl { piece, per_segment }),
    ];
    (0..14_u8, key, size, options, transfer).prop_map(|(command, key, size, options, transfer)| {
        Step {
            command,
            key,
            size,
            options,
            transfer,
        }
    })
}

/// Expected contents of a key space.
type Model = BTreeMap<Vec<u8>, Vec<u8>>;

/// Size of the lease in bytes. It is small, so that the lease is full at times.
const CAPACITY: u64 = 128 << 10;

fn footprint(value: &[u8]) -> u64 {
    64 + (value.len() as u64).next_multiple_of(64)
}

fn step(
    pairs: &mut KeyValues,
    model: &mut Model,
    tag: u64,
    step: &Step,
) -> Result<(), TestCaseError> {
    let Step {
        command,
        key,
        size,
        options,
        transfer,
    } = step;
    pairs.transfer = *transfer;
    let code = |result: &Result<(), Error>| match result {
        Ok(()) => SUCCESS,
        Err(error) => error
            .completion()
            .map_or(SUCCESS, |cqe| cqe.status().code()),
    };
    let there = model.get(key);
    match command {
        0..5 => {
            let bytes = value(tag, *size);
            let used: u64 = model.values().map(|value| footprint(value)).sum();
            let left = used - there.map_or(0, |value| footprint(value));
            let after = left + footprint(&bytes);
            let expected = match (*options, there) {
                (option::MUST_EXIST, None) => KEY_DOES_NOT_EXIST,
                (option::MUST_NOT_EXIST, Some(_)) => KEY_EXISTS,
                _ if after > CAPACITY => CAPACITY_EXCEEDED,
                _ => SUCCESS,
            };
            let result = pairs.store_with(key, &bytes, *options);
            prop_assert_eq!(code(&result), expected);
            if expected == SUCCESS {
                model.insert(key.clone(), bytes);
            }
        }
        5..8 => match (pairs.retrieve(key, *size), there) {
            (Ok((bytes, len)), Some(value)) => {
                prop_assert_eq!(len as usize, value.len());
                prop_assert!(bytes == value[..value.len().min(*size)]);
            }
            (result, there) => {
                prop_assert_eq!(code(&result.map(drop)), KEY_DOES_NOT_EXIST);
                prop_assert!(there.is_none());
            }
        },
        8 => prop_assert_eq!(pairs.exists(key).unwrap(), there.is_some()),
        9 => {
            let result = pairs.delete(key);
            let expected = match model.remove(key) {
                Some(_) => SUCCESS,
                None => KEY_DOES_NOT_EXIST,
            };
            prop_assert_eq!(code(&result), expected);
        }
        12.. => {
            // A Store with its expected result.
            let operation = |opcode, value| Operation {
                opcode,
                key: key.clone(),
                options: 0,
                value,
            };
            let bytes = value(tag, *size);
            let used: u64 = model.values().map(|value| footprint(value)).sum();
            let left = used - there.map_or(0, |value| footprint(value));
            let fits = left + footprint(&bytes) <= CAPACITY;
            let (missing, done) = (step_status::KEY_DOES_NOT_EXIST, step_status::DONE);
            let exists = |is_there: bool| if is_there { done } else { missing };
            let before = exists(there.is_some());
            let after = exists(there.is_some() || fits);
            let deletes = size % 2 == 0;
            let last = if deletes { kv::DELETE } else { kv::EXIST };
            let found = pairs.batch(&[
                operation(kv::EXIST, Vec::new()),
                operation(kv::STORE, bytes.clone()),
                operation(last, Vec::new()),
                operation(kv::EXIST, Vec::new()),
            ]);
            let stored = match fits {
                true => done,
                false => step_status::CAPACITY_EXCEEDED,
            };
            let at_last = if deletes { missing } else { after };
            prop_assert_eq!(found.unwrap(), [before, stored, after, at_last]);
            if fits {
                model.insert(key.clone(), bytes);
            }
            if deletes {
                model.remove(key);
            }
        }
        _ => {
            let buffer_bytes = 4 + size % 200;
            let mut left = buffer_bytes - 4;
            let expected: Vec<_> = model
                .range(key.clone()..)
                .map(|(key, _)| key.clone())
                .take_while(|key| {
                    let taken = (2 + key.len()).next_multiple_of(4);
                    let fits = taken <= left;
                    left = left.saturating_sub(taken);
                    fits
                })
                .collect();
            prop_assert_eq!(pairs.list(key, buffer_bytes).unwrap(), expected);
        }
    }
    Ok(())
}

fn run(
    in_file: bool,
    profile: &str,
    doorbells: DoorbellMode,
    steps: &[Step],
) -> Result<(), TestCaseError> {
    let (_file, host) = match in_file {
        true => {
            let (file, host) = file_host_with(profile);
            (Some(file), host)
        }
        false => (None, host_with(DRIVE, profile)),
    };
    let setup = Setup {
        start: LEASE,
        length: CAPACITY,
        ..Setup::default()
    };
    let machine = host.machine(&setup.doorbells(doorbells));
    let mut controller = attach_with(&machine, CC_CSS_ALL, doorbells);
    let mut pairs = open(&mut controller, 1);
    let mut model = Model::new();
    for (tag, each) in (0..).zip(steps) {
        step(&mut pairs, &mut model, tag, each)?;
    }
    for (key, value) in &model {
        let (found, _) = pairs.retrieve(key, 20_000).unwrap();
        prop_assert!(found == *value);
    }
    let all: Vec<_> = model.keys().cloned().collect();
    pairs.transfer = Transfer::Prp { offset: 0 };
    prop_assert_eq!(pairs.list(b"", 65_536).unwrap(), all);
    let used = KeyValues::namespace(&mut controller, 1).unwrap().used;
    prop_assert_eq!(
        used,
        model.values().map(|value| footprint(value)).sum::<u64>()
    );
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn random_commands_match_a_map(
        in_file in any::<bool>(),
        is_timed in any::<bool>(),
        doorbells in prop::sample::select(MODES.to_vec()),
        steps in prop::collection::vec(steps(), 1..150),
    ) {
        let timed = timed("20us");
        let profile = if is_timed { &timed } else { PROFILE };
        run(in_file, profile, doorbells, &steps)?;
    }
}

//! Batch, a vendor specific command that combines several operations on keys.
//!
//! The operations are executed in order, without another command in between. A failed operation does not affect the other
//! operations. Dword 0 of the completion has a status for each operation.

use super::pairs::{KeyPresence, KvBatchStep, KvChange};
use nvme_spec::key_value::{KvBatchCommand, KvBatchOperation, KvBatchStepStatus, KvKey};
use nvme_spec::opcode::KvOpcode;
use nvme_spec::status::Status;
use zerocopy::FromBytes;

/// Parses the `count` operations of a Batch from data that the guest wrote. In place of an operation that cannot be executed,
/// the result has the operation's status.
///
/// # Errors
/// Returns Invalid Field if the data is malformed. In this case, no operation may be executed.
pub(super) fn parse_steps(
    data: &[u8],
    count: u8,
    value_bytes_max: u32,
) -> Result<Vec<Result<KvBatchStep, KvBatchStepStatus>>, Status> {
    let mut operations = data;
    let mut bytes = 0;
    (0..count.min(KvBatchCommand::OPERATIONS_MAX))
        .map(|_| {
            let (operation, rest) = KvBatchOperation::read_from_prefix(operations)
                .map_err(|_too_short| Status::INVALID_FIELD)?;
            operations = rest;
            if KvOpcode(operation.opcode) == KvOpcode::STORE {
                // Operations may name overlapping values, which could take more memory than the data. So the sum of their sizes
                // is limited.
                bytes += u64::from(operation.value_size);
            }
            if bytes > data.len() as u64 {
                return Err(Status::INVALID_FIELD);
            }
            parse_step(&operation, data, value_bytes_max)
        })
        .collect()
}

fn parse_step(
    operation: &KvBatchOperation,
    data: &[u8],
    value_bytes_max: u32,
) -> Result<Result<KvBatchStep, KvBatchStepStatus>, Status> {
    let opcode = KvOpcode(operation.opcode);
    // An invalid value offset is an error of the guest's driver, so the whole command fails.
    let value = match opcode {
        KvOpcode::STORE => {
            let start = operation.value_offset as usize;
            let end = start.checked_add(operation.value_size as usize);
            let value = end.and_then(|end| data.get(start..end));
            value.ok_or(Status::INVALID_FIELD)?
        }
        _ => &[],
    };
    let bytes = operation.key.get(..usize::from(operation.key_length));
    let Some(key) = bytes.and_then(KvKey::new).filter(|key| !key.is_empty()) else {
        return Ok(Err(KvBatchStepStatus::INVALID_KEY_SIZE));
    };
    let options = operation.options;
    Ok(match opcode {
        KvOpcode::STORE if operation.value_size > value_bytes_max => {
            Err(KvBatchStepStatus::INVALID_VALUE_SIZE)
        }
        KvOpcode::STORE => match (options.must_exist(), options.must_not_exist()) {
            (true, true) => Err(KvBatchStepStatus::INVALID),
            (must_exist, must_not_exist) => Ok(KvBatchStep::Change(KvChange::Store {
                key,
                value: value.to_vec(),
                only_if: match (must_exist, must_not_exist) {
                    (true, _) => Some(KeyPresence::Present),
                    (_, true) => Some(KeyPresence::Absent),
                    _ => None,
                },
            })),
        },
        KvOpcode::DELETE => Ok(KvBatchStep::Change(KvChange::Delete { key })),
        KvOpcode::EXIST => Ok(KvBatchStep::Exist { key }),
        _ => Err(KvBatchStepStatus::INVALID),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use zerocopy::IntoBytes;

    use super::*;
    use nvme_spec::key_value::KvStoreOptions;

    fn operation(opcode: KvOpcode, key: &[u8]) -> KvBatchOperation {
        let mut operation = KvBatchOperation {
            opcode: opcode.0,
            key_length: key.len() as u8,
            ..KvBatchOperation::default()
        };
        operation.key[..key.len()].copy_from_slice(key);
        operation
    }

    fn data(operations: &[KvBatchOperation], values: &[u8]) -> Vec<u8> {
        [operations.as_bytes(), values].concat()
    }

    #[test]
    fn each_operation_becomes_a_step_or_has_the_status_of_its_error() {
        let store = |key: &[u8], offset, size, options| KvBatchOperation {
            options,
            value_offset: offset,
            value_size: size,
            ..operation(KvOpcode::STORE, key)
        };
        let none = KvStoreOptions::default();
        let both = none.with_must_exist(true).with_must_not_exist(true);
        let operations = [
            store(b"a", 8 * 32, 3, none.with_must_not_exist(true)),
            store(b"0123456789abcdef", 8 * 32 + 2, 3, none),
            operation(KvOpcode::DELETE, b"b"),
            operation(KvOpcode::EXIST, b"c"),
            operation(KvOpcode::EXIST, b""),
            store(b"d", 8 * 32, 5, none),
            store(b"e", 8 * 32, 0, both),
            operation(KvOpcode::RETRIEVE, b"f"),
        ];
        let key = |bytes: &[u8]| KvKey::new(bytes).expect("short");
        let change = |key, value: &[u8], only_if| {
            Ok(KvBatchStep::Change(KvChange::Store {
                key,
                value: value.to_vec(),
                only_if,
            }))
        };
        let expected = vec![
            change(key(b"a"), b"one", Some(KeyPresence::Absent)),
            change(key(b"0123456789abcdef"), b"eXY", None),
            Ok(KvBatchStep::Change(KvChange::Delete { key: key(b"b") })),
            Ok(KvBatchStep::Exist { key: key(b"c") }),
            Err(KvBatchStepStatus::INVALID_KEY_SIZE),
            Err(KvBatchStepStatus::INVALID_VALUE_SIZE),
            Err(KvBatchStepStatus::INVALID),
            Err(KvBatchStepStatus::INVALID),
        ];
        let data = data(&operations, b"oneXY");
        assert_eq!(parse_steps(&data, 8, 4), Ok(expected));
        let long = KvBatchOperation {
            key_length: 17,
            ..operation(KvOpcode::DELETE, b"b")
        };
        let found = parse_steps(long.as_bytes(), 1, 4);
        assert_eq!(found, Ok(vec![Err(KvBatchStepStatus::INVALID_KEY_SIZE)]));
    }

    #[test]
    fn data_that_ends_before_its_operations_or_values_do_is_refused() {
        let whole = data(&[operation(KvOpcode::DELETE, b"b"); 2], &[]);
        assert!(parse_steps(&whole, 2, 4).is_ok());
        for (data, count) in [(&whole[..], 3), (&whole[..63], 2), (&[], 1)] {
            assert_eq!(parse_steps(data, count, 4), Err(Status::INVALID_FIELD));
        }
        // The values overlap, and their sizes together exceed the data.
        let whole = KvBatchOperation {
            value_size: 64,
            ..operation(KvOpcode::STORE, b"a")
        };
        assert_eq!(
            parse_steps(&data(&[whole; 2], &[]), 2, 64),
            Err(Status::INVALID_FIELD)
        );
        for (offset, size) in [(32, 1), (33, 0), (u32::MAX, u32::MAX), (0, 33)] {
            let store = KvBatchOperation {
                value_offset: offset,
                value_size: size,
                ..operation(KvOpcode::STORE, b"a")
            };
            let found = parse_steps(store.as_bytes(), 1, 4);
            assert_eq!(found, Err(Status::INVALID_FIELD), "{offset} {size}");
        }
    }

    proptest! {
        #[test]
        fn any_data_is_some_steps_or_refused(
            mut data in prop::collection::vec(any::<u8>(), 0..300),
            opcodes in prop::collection::vec(prop::sample::select(vec![0x01, 0x02, 0x10, 0x14]), 8),
            count in any::<u8>(),
        ) {
            for (place, opcode) in data.iter_mut().step_by(32).zip(opcodes) {
                *place = opcode;
            }
            if let Ok(found) = parse_steps(&data, count, 100) {
                prop_assert_eq!(found.len(), usize::from(count.min(8)));
                for step in found.into_iter().flatten() {
                    if let KvBatchStep::Change(KvChange::Store { value, .. }) = step {
                        prop_assert!(value.len() <= 100);
                    }
                }
            }
        }
    }
}

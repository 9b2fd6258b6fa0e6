//! A snapshot of a function that was forged or changed.
//!
//! The first byte of the input chooses the doorbell mode and the kind of the rest: a snapshot with its first line, or a state
//! as JSON. A JSON state gets the facts of the present function, since fuzzing could not guess its names. An accepted state is
//! restored. Then the function must be as after power-on, or continue, and it can be saved and reset.

use std::cell::RefCell;
use std::collections::BTreeMap;

use nvme_guest::DoorbellMode;
use serde_json::Value;
use vmm_device::{Bar, FunctionState, MsixMasking};

use crate::Fixture;

thread_local! {
    static FIXTURES: RefCell<BTreeMap<u8, Fixture>> = const { RefCell::new(BTreeMap::new()) };
}

fn fixture(choice: u8) -> Fixture {
    let mode = match choice {
        0 => DoorbellMode::Shadow,
        _ => DoorbellMode::Mapped,
    };
    Fixture::new(mode, MsixMasking::Function)
}

fn check(fixture: &mut Fixture, state: &FunctionState) {
    let cap = [fixture.register(0x00), fixture.register(0x04)];
    match fixture.function.restore(state) {
        Ok(_) => {
            if let (Some(state), Ok(saved)) = (state.backend_state(), fixture.function.save()) {
                let saved = saved.backend_state().expect("paused");
                let mut wanted = state.queues.clone();
                wanted.sort_by_key(|queue| queue.qid);
                assert_eq!(saved.queues, wanted);
            }
            fixture.function.resume();
            fixture.function.process_events();
            for doorbell in 0..8 {
                let value = [doorbell as u8, 0, 0, 0];
                fixture
                    .function
                    .write_bar(Bar::Registers, 0x1000 + doorbell * 64, &value);
            }
            fixture.function.process_events();
            fixture.function.pause().expect("idle");
            fixture
                .function
                .save()
                .expect("paused")
                .to_bytes()
                .expect("bytes");
            fixture.function.resume();
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            assert!(!fixture.function.is_paused());
        }
    }
    // CAP.TO is a part of the saved state, since a driver does not read it again.
    let of_function = [fixture.register(0x00) & 0x00FF_FFFF, fixture.register(0x04)];
    assert_eq!(of_function, [cap[0] & 0x00FF_FFFF, cap[1]]);
    // A reset must work in any state.
    for enable in [1, 0] {
        let cc = [enable, 0, 0, 0];
        fixture.function.write_bar(Bar::Registers, 0x14, &cc);
    }
    assert_eq!(fixture.register(0x1C) & 0b11, 0);
}

/// Parses a state, and adds the facts of the present function.
fn parse_snapshot(input: &[u8], fixture: &Fixture) -> Option<FunctionState> {
    let mut state: Value = serde_json::from_slice(input).ok()?;
    let facts = serde_json::to_value(fixture.function.facts()).expect("text");
    state.as_object_mut()?.insert("facts".to_owned(), facts);
    serde_json::from_value(state).ok()
}

/// Runs one input.
pub fn run(input: &[u8]) {
    let Some((choice, input)) = input.split_first() else {
        return;
    };
    FIXTURES.with_borrow_mut(|fixtures| {
        let mode = choice & 1;
        let fixture = fixtures.entry(mode).or_insert_with(|| fixture(mode));
        fixture.reset(&[]);
        let state = if choice & 2 == 0 {
            FunctionState::from_bytes(input).ok()
        } else {
            parse_snapshot(input, fixture)
        };
        if let Some(state) = state {
            check(fixture, &state);
        }
    });
}

//! Pause, snapshot and restore.
//!
//! A guest with commands in flight continues in another function. A snapshot that does not fit or is damaged is refused with a
//! specific error.

mod load;

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use nvme_lease::Ledger;
use nvme_mpt_tests::admin::{AsyncEvent, LogPage, Select, feature, log};
use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::controller::QueueOptions;
use nvme_mpt_tests::doorbell::{DoorbellMode, Side};
use nvme_spec::registers::Doorbell;
use proptest::prelude::*;
use vmm_device::{Bar, FunctionState, FunctionStateError, MsixMasking};

use crate::common::bystander::Bystander;
use crate::common::{
    HANG, Host, LEASE, MODES, Machine, Setup, Suspended, UNMAPPED_ADDRESS, fit_poll_policy,
    queue_pair,
};
use load::Load;

/// Returns the contents of the guest's memory.
fn memory_of(machine: &Machine) -> Vec<u8> {
    let regions = machine.memory.regions();
    let mut all = vec![0; regions.iter().map(|region| region.len as usize).sum()];
    let file = std::fs::File::from(machine.memory.fd().try_clone_to_owned().unwrap());
    let mut rest = all.as_mut_slice();
    for region in regions {
        let (chunk, after) = rest.split_at_mut(region.len as usize);
        file.read_exact_at(chunk, region.fd_offset).unwrap();
        rest = after;
    }
    all
}

/// Restores and resumes another machine.
#[track_caller]
fn restore_and_resume(host: &Host, suspended: &Suspended, setup: &Setup) -> Machine {
    let machine = host.restore(suspended, setup).unwrap();
    machine.function().resume();
    machine
}

/// Parameters of a migration.
#[derive(Clone, Copy, Debug)]
struct Variant {
    /// True for a file that is closed and opened again, false for a drive in memory.
    file: bool,
    doorbells: DoorbellMode,
    poll: &'static str,
    queues: u16,
    entries: u32,
    seed: u64,
}

fn variants() -> impl Strategy<Value = Variant> {
    (
        any::<bool>(),
        prop::sample::select(MODES.to_vec()),
        prop::sample::select(vec!["shared", "dedicated", "shared:busy", "shared:event"]),
        1_u16..4,
        prop::sample::select(vec![2_u32, 3, 16, 64]),
        any::<u64>(),
    )
        .prop_map(|(file, doorbells, poll, queues, entries, seed)| Variant {
            file,
            doorbells,
            poll: fit_poll_policy(poll, doorbells),
            queues,
            entries,
            seed,
        })
}

/// Actions of the guest before, during and after a migration.
#[derive(Clone, Copy, Debug)]
struct MigrationActions {
    /// True to fill every queue, false to submit some commands.
    fills_queues: bool,
    /// Number of submissions and completions before the pause.
    rounds: u8,
    /// Leaves the head doorbells unwritten, so that Completion Queues stay full.
    has_full_cqs: bool,
    /// Submits more commands between the snapshot and the end of the restore.
    submits_meanwhile: bool,
    /// Waits for interrupts afterwards instead of polling.
    waits_for_interrupts: bool,
}

fn migration_actions() -> impl Strategy<Value = MigrationActions> {
    (any::<[bool; 4]>(), 0_u8..20).prop_map(|([full, untrapped, meanwhile, sleeps], polls)| {
        MigrationActions {
            fills_queues: full,
            rounds: polls,
            has_full_cqs: untrapped,
            submits_meanwhile: meanwhile,
            waits_for_interrupts: sleeps,
        }
    })
}

fn run(variant: Variant, actions: &[MigrationActions]) {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(LEASE).unwrap();
    let leases = tempfile::tempdir().unwrap();
    // Namespace identifiers depend on the ledger, so hosts of a reopened file share a ledger directory.
    let open = || match variant.file {
        true => Host {
            ledger: Ledger::open(leases.path()),
            ..Host::of_file(file.path(), 512)
        },
        false => Host::new("memory:16M", 512),
    };
    let setup = Setup::default()
        .doorbells(variant.doorbells)
        .poll(variant.poll);
    let mut host = open();
    let mut machine = host.machine(&setup);
    let mut load = Load::new(&machine, variant.queues, variant.entries, variant.seed);
    for step in actions {
        load.submit(step.fills_queues);
        for _ in 0..step.rounds {
            load.reap(!step.has_full_cqs);
            load.submit(false);
            std::thread::sleep(Duration::from_micros(20));
        }
        let suspended = machine.suspend();
        if step.submits_meanwhile && variant.doorbells == DoorbellMode::Shadow {
            load.submit(true);
        }
        if variant.file {
            // The process ends, and its drive is closed.
            drop(host);
            host = open();
        }
        machine = restore_and_resume(&host, &suspended, &setup);
        load.move_to(&machine);
        if step.waits_for_interrupts {
            load.drain_by_interrupts();
        } else {
            load.drain();
        }
    }
    load.verify();
    assert_eq!(
        load.controller.status().unwrap(),
        1,
        "ready and nothing else"
    );
}

proptest! {
    // Each case creates several functions and executes thousands of commands.
    #![proptest_config(ProptestConfig { cases: 48, max_shrink_iters: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn io_continues_in_another_function(
        variant in variants(),
        actions in prop::collection::vec(migration_actions(), 1..6),
    ) {
        run(variant, &actions);
    }
}

/// Returns a snapshot as text, without the checksum and the timestamp.
fn without_time(state: &[u8]) -> String {
    let text = String::from_utf8(state.to_vec()).unwrap();
    let (_, text) = text.split_once('\n').unwrap();
    let (before, after) = text.split_once("\"milliseconds\":").unwrap();
    format!(
        "{before}{}",
        after.trim_start_matches(|c: char| c.is_ascii_digit())
    )
}

#[test]
fn saving_a_restored_function_gives_the_same_snapshot() {
    for mode in MODES {
        let host = Host::new("memory:16M", 512);
        let setup = Setup::default().doorbells(mode);
        let machine = host.machine(&setup);
        let mut load = Load::new(&machine, 2, 16, 1);
        load.controller.request_async_event().unwrap();
        load.submit(true);
        load.drain();
        // Until the function has processed the doorbells, a restore reposts entries that the guest has consumed, with an
        // interrupt.
        machine.function().process_events();
        let first = machine.suspend();
        let restored = host.restore(&first, &setup).unwrap();
        let again = restored.suspend();
        assert_eq!(
            without_time(&first.state),
            without_time(&again.state),
            "{mode:?}"
        );
    }
}

#[test]
fn nothing_touches_memory_while_paused() {
    let host = Host::new("memory:32M", 512);
    let bystander = Bystander::start(&host, &Setup::nth(1));
    for mode in MODES {
        let machine = host.machine(&Setup::nth(0).doorbells(mode));
        let mut load = Load::new(&machine, 3, 64, 2);
        load.submit(true);
        machine.function().pause().unwrap();
        let found = load.in_flight();
        load.submit(true);
        let before = memory_of(&machine);
        bystander.wait_for_progress();
        std::thread::sleep(Duration::from_millis(20));
        assert!(memory_of(&machine) == before, "{mode:?}");
        // Memory can be unmapped while paused, without a wait.
        let region = machine.memory.regions()[2].clone();
        machine.unmap(&region);
        machine.map(&region);
        machine.function().resume();
        load.drain();
        assert!(load.completed() >= found as u64);
        load.verify();
    }
    bystander.finish();
}

#[test]
fn a_paused_controller_can_be_reset() {
    for mode in MODES {
        let host = Host::new("memory:16M", 512);
        let machine = host.machine(&Setup::default().doorbells(mode));
        let mut load = Load::new(&machine, 2, 16, 3);
        load.submit(true);
        machine.function().pause().unwrap();
        load.controller.disable().unwrap();
        assert!(!machine.has_queue(Doorbell::CqHead(1.into())));
        machine.function().resume();
        let (_controller, mut disk) = machine.disk();
        disk.write(0, &[7; 512]).unwrap();
        assert_eq!(disk.read(0, 1).unwrap(), [7; 512], "{mode:?}");
    }
}

#[test]
fn admin_commands_wait_while_paused() {
    let host = Host::new("memory:16M", 512);
    let setup = Setup::default();
    let machine = host.machine(&setup);
    let mut controller = machine.attach();
    machine.function().pause().unwrap();
    let queue = controller.admin_queue().unwrap();
    let cid = queue.submit(Sqe::flush(0).with_cid(0)).unwrap();
    queue.ring();
    machine.function().process_events();
    assert!(queue.poll().is_none(), "nothing is carried out");
    let suspended = machine.suspend();
    let machine = restore_and_resume(&host, &suspended, &setup);
    controller.move_to(machine.bar()).unwrap();
    // Opcode 0 deletes a Submission Queue, and identifier 0 is invalid.
    let queue = controller.admin_queue().unwrap();
    assert!(!queue.wait(cid, HANG).unwrap().status().is_success());
}

#[test]
fn requests_and_events_are_kept() {
    let host = Host::new("memory:16M", 512);
    let setup = Setup::default().doorbells(DoorbellMode::Trap);
    let machine = host.machine(&setup);
    let mut controller = machine.attach();
    let _queue = queue_pair(&mut controller, 1, 16);
    controller.request_async_event().unwrap();
    controller.request_async_event().unwrap();
    let invalid = |machine: &Machine, controller: &_| {
        machine.write_raw_doorbell(controller, 1, Side::SqTail, 999);
    };
    // One event is reported. Then its type is masked.
    invalid(&machine, &controller);
    let event = AsyncEvent {
        kind: 0,
        info: 1,
        log_page: log::ERROR,
    };
    assert_eq!(controller.async_event(HANG).unwrap(), Some(event));
    let suspended = machine.suspend();
    let machine = restore_and_resume(&host, &suspended, &setup);
    controller.move_to(machine.bar()).unwrap();
    // A repeated value causes no event. The event of another value stays masked.
    invalid(&machine, &controller);
    machine.write_raw_doorbell(&controller, 1, Side::SqTail, 998);
    // The log has an entry for the reported event and one for the masked event.
    let page = LogPage::of_controller(log::ERROR, 64);
    let errors = loop {
        let page = controller.log_page(page).unwrap();
        if page[0] == 2 {
            break page;
        }
    };
    assert_eq!(errors[8..12], [0xFF; 4], "no command's error");
    assert_eq!(controller.async_event(HANG).unwrap(), Some(event));
    assert_eq!(controller.outstanding_event_requests(), 0);
}

#[test]
fn features_logs_and_identity_are_kept() {
    let host = Host::new("memory:16M", 512);
    let setup = Setup::default();
    let machine = host.machine(&setup);
    let (mut controller, mut disk) = machine.disk();
    disk.write(0, &[1; 8192]).unwrap();
    disk.read(0, 8).unwrap();
    disk.read(disk.blocks(), 1).unwrap_err();
    controller
        .set_feature(feature::INTERRUPT_COALESCING, 0, 0x0203)
        .unwrap();
    controller
        .set_feature(feature::TEMPERATURE_THRESHOLD, 0, 345)
        .unwrap();
    let timestamp = 1_700_000_000_000_u64.to_le_bytes();
    controller
        .set_feature_data(feature::TIMESTAMP, 0, 0, &timestamp)
        .unwrap();
    let read_state = |controller: &mut nvme_mpt_tests::controller::Controller| {
        let mut seen = vec![
            controller.identify(1, 0, 0).unwrap(),
            controller.identify(0, 1, 0).unwrap(),
            controller.identify(3, 1, 0).unwrap(),
        ];
        for id in [log::ERROR, log::SMART] {
            let page = LogPage::of_controller(id, 512);
            seen.push(controller.log_page(page).unwrap());
        }
        for id in [1, 2, 4, 7, 8, 9, 0x0A, 0x0B] {
            let value = controller.get_feature(id, Select::Current, 0, 0);
            seen.push(value.unwrap().to_le_bytes().to_vec());
        }
        seen
    };
    let before = read_state(&mut controller);
    let suspended = machine.suspend();
    let machine = restore_and_resume(&host, &suspended, &setup);
    controller.move_to(machine.bar()).unwrap();
    disk.queue.move_to(&machine.bar()).unwrap();
    assert!(
        read_state(&mut controller) == before,
        "something that the guest sees changed"
    );
    let clock = controller
        .get_feature_data(feature::TIMESTAMP, Select::Current, 0, 8)
        .unwrap();
    let milliseconds = clock[..6]
        .iter()
        .rev()
        .fold(0, |all, byte| all << 8 | u64::from(*byte));
    let elapsed = milliseconds - 1_700_000_000_000;
    assert!(elapsed < HANG.as_millis() as u64, "{elapsed}");
    assert_eq!(clock[6] & 1, 1, "it says that it may have stood still");
    assert_eq!(disk.read(0, 16).unwrap(), [1; 8192]);
}

#[test]
fn interrupts_that_were_masked_come_afterwards() {
    let host = Host::new("memory:16M", 512);
    let setup = Setup {
        masking: MsixMasking::Function,
        ..Setup::default()
    };
    let machine = host.machine(&setup);
    // BAR4 has an address, MSI-X is enabled, and vector 1 is masked as after a reset.
    let _ = machine.function().write_config(0x20, &[0, 0, 0, 0xE0]);
    let _ = machine.function().write_config(0x04, &[0x06, 0]);
    let _ = machine.function().write_config(0x53, &[0x80]);
    let message = [0x04, 0, 0xE0, 0xFE, 0, 0, 0, 0, 0x41, 0, 0, 0];
    machine.function().write_bar(Bar::Msix, 16, &message);
    let mut controller = machine.attach();
    let interrupt = machine.interrupts[1].clone();
    let options = QueueOptions::interrupting(16, 1, interrupt.clone());
    let mut queue = controller.create_queue_pair(1, &options).unwrap();
    let cid = queue.submit(Sqe::flush(1)).unwrap();
    queue.ring();

    let suspended = machine.suspend();
    let machine = host.restore(&suspended, &setup).unwrap();
    assert_eq!(machine.function().bar_address(Bar::Msix), Some(0xE000_0000));
    let message = machine.function().msix_message(1).unwrap();
    assert_eq!((message.address, message.data), (0xFEE0_0004, 0x41));
    assert!(message.masked);
    machine.function().resume();
    controller.move_to(machine.bar()).unwrap();
    queue.move_to(&machine.bar()).unwrap();
    assert_eq!(interrupt.take().unwrap(), 0, "masked still");
    machine.function().write_bar(Bar::Msix, 28, &[0; 4]);
    // The poller may signal again for a pending interrupt.
    assert!((1..=2).contains(&interrupt.wait(HANG).unwrap()));
    queue.wait(cid, HANG).unwrap();
}

#[test]
fn a_snapshot_that_does_not_fit_is_refused_by_name() {
    let host = Host::new("memory:32M", 512);
    let setup = Setup::default();
    let machine = host.machine(&setup);
    let load = Load::new(&machine, 1, 16, 4);
    let suspended = machine.suspend();
    let refused = |host: &Host, setup: &Setup| {
        let error = host.restore(&suspended, setup).err().expect("refused");
        assert!(
            matches!(error, FunctionStateError::State(_)),
            "{error}: a value that is not what it was"
        );
        error.to_string()
    };
    for (host, setup, named) in [
        (
            &host,
            Setup {
                length: LEASE / 2,
                ..setup.clone()
            },
            ["blocks", "32768", "16384"],
        ),
        (
            &host,
            Setup {
                queue_pairs: 2,
                ..setup.clone()
            },
            ["I/O queue pairs", "is 2", " 4,"],
        ),
        (
            &host,
            setup.clone().doorbells(DoorbellMode::Trap),
            ["Doorbell Buffer Config", "true", "false"],
        ),
        (
            &Host::new("memory:32M", 4096),
            setup.clone(),
            ["LBA size", "512", "4096"],
        ),
        (
            &Host::new("null:32M", 512),
            setup.clone(),
            ["serial number", "MPT", "is MPT"],
        ),
    ] {
        let error = refused(host, &setup);
        for word in named {
            assert!(error.contains(word), "`{error}` should name `{word}`");
        }
    }
    // The snapshot can still be restored where it fits.
    let machine = restore_and_resume(&host, &suspended, &setup);
    let mut load = load;
    load.move_to(&machine);
    load.submit(true);
    load.verify();
}

#[test]
fn a_snapshot_needs_its_memory() {
    let host = Host::new("memory:16M", 512);
    let setup = Setup::default();
    let machine = host.machine(&setup);
    let _load = Load::new(&machine, 1, 16, 5);
    let suspended = machine.suspend();
    let moved = Suspended {
        memory: nvme_mpt_tests::memory::GuestMemory::new(&[(UNMAPPED_ADDRESS, 1 << 20)]).unwrap(),
        ..suspended
    };
    let error = host.restore(&moved, &setup).err().expect("refused");
    assert!(error.to_string().contains("has to be mapped"), "{error}");
}

#[test]
fn damaged_bytes_are_refused() {
    let host = Host::new("memory:16M", 512);
    let machine = host.machine(&Setup::default());
    let mut load = Load::new(&machine, 2, 16, 6);
    load.submit(true);
    let bytes = machine.suspend().state;
    FunctionState::from_bytes(&bytes).expect("sound");
    let mut errors = BTreeSet::new();
    for at in 0..bytes.len() {
        let cut = FunctionState::from_bytes(&bytes[..at]).expect_err("cut short");
        let mut changed = bytes.clone();
        changed[at] ^= 1 << (at % 8);
        let changed = FunctionState::from_bytes(&changed).expect_err("changed");
        for error in [cut, changed] {
            let text = error.to_string();
            errors.insert(text.chars().take(24).collect::<String>());
        }
    }
    let longer = [&bytes[..], b" "].concat();
    FunctionState::from_bytes(&longer).expect_err("longer");
    // Version, length, checksum and header each have their own error.
    assert!(errors.len() >= 4, "{errors:?}");
}

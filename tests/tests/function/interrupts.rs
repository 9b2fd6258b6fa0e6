//! Interrupts: one for each batch, none while masked, none lost, and coalescing (NVMe Base 2.0, sections 5.27.1.6 and 5.27.1.7;
//! PCI Local Bus 3.0, section 6.8.2).

use std::sync::Arc;
use std::time::{Duration, Instant};

use nvme_guest::interrupt::PinDeassertion;
use nvme_mpt_tests::admin::feature;
use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::controller::{Controller, QueueOptions};
use nvme_mpt_tests::doorbell::DoorbellMode;
use nvme_mpt_tests::queue::QueuePair;
use nvme_mpt_tests::rng::Rng;
use nvme_mpt_tests::status::INVALID_INTERRUPT_VECTOR;
use vmm_device::{Bar, MsixMasking};

use crate::common::bystander::Bystander;
use crate::common::{HANG, Host, LEASE, LOW, MODES, Machine, Setup, admin_status, remote};

/// Creates queue pair `id` with 64 entries and the vector `id`.
fn interrupting(machine: &Machine, controller: &mut Controller, id: u16) -> QueuePair {
    let interrupt = Arc::clone(&machine.interrupts[usize::from(id)]);
    let options = QueueOptions::interrupting(64, id, interrupt);
    controller.create_queue_pair(id, &options).unwrap()
}

/// Submits Flush commands with one doorbell write.
fn submit(queue: &mut QueuePair, count: u16) {
    for _ in 0..count {
        queue.submit(Sqe::flush(1)).unwrap();
    }
    queue.ring();
}

/// Consumes all completions. Returns their number.
fn consume(queue: &mut QueuePair) -> u16 {
    let mut count = 0;
    while let Some(cqe) = queue.poll() {
        assert!(cqe.status().is_success());
        count += 1;
    }
    queue.ring();
    count
}

#[test]
fn one_interrupt_per_batch() {
    for mode in MODES {
        let host = Host::new("memory:32M", 512);
        let bystander = Bystander::start(&host, &Setup::nth(1));
        let machine = host.machine(&Setup::nth(0).doorbells(mode));
        let mut controller = machine.attach();
        let mut queue = interrupting(&machine, &mut controller, 1);
        for round in 0..200 {
            // On a drive in memory, the whole batch completes before the interrupt.
            let batch = 1 + round % 60;
            submit(&mut queue, batch);
            assert_eq!(machine.interrupts[1].wait(HANG).unwrap(), 1);
            assert_eq!(consume(&mut queue), batch, "{mode:?}");
        }
        controller.delete_queue_pair(queue).unwrap();
        assert_eq!(machine.interrupts[1].take().unwrap(), 0);
        assert_eq!(machine.queue_stats(1).interrupts, 200, "{mode:?}");
        bystander.finish();
    }
}

#[test]
fn a_guest_that_waits_for_interrupts_is_never_left_waiting() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(2 * LEASE).unwrap();
    for host in [
        Host::new("memory:32M", 512),
        Host::of_file(file.path(), 512),
    ] {
        let bystander = Bystander::start(&host, &Setup::nth(1));
        for mode in MODES {
            let machine = host.machine(&Setup::nth(0).doorbells(mode));
            let mut controller = machine.attach();
            let mut queue = interrupting(&machine, &mut controller, 2);
            let mut rng = Rng::new(11);
            let (mut in_flight, mut done) = (0, 0);
            while done < 3000 {
                let count = rng.below(u64::from(33 - in_flight)) as u16;
                let count = if in_flight == 0 { count.max(1) } else { count };
                submit(&mut queue, count);
                in_flight += count;
                // The guest sleeps until the interrupt, polls once, and continues with the completions found.
                assert!(machine.interrupts[2].wait(HANG).unwrap() > 0, "{mode:?}");
                let found = consume(&mut queue);
                in_flight -= found;
                done += found;
            }
            while in_flight > 0 {
                assert!(machine.interrupts[2].wait(HANG).unwrap() > 0, "{mode:?}");
                in_flight -= consume(&mut queue);
            }
            controller.delete_queue_pair(queue).unwrap();
            let stats = machine.queue_stats(2);
            assert!(stats.interrupts <= stats.commands, "{stats:?}");
        }
        bystander.finish();
    }
}

#[test]
fn more_queues_than_vectors_share_vectors() {
    const LAST: u16 = 127;
    let host = Host::new("memory:16M", 512);
    let machine = host.machine(&Setup {
        queue_pairs: 300,
        ..Setup::nth(0).doorbells(DoorbellMode::Mapped)
    });
    assert_eq!(machine.interrupts.len(), usize::from(LAST) + 1);
    let mut controller = machine.attach();
    let beyond = Sqe::create_cq(1, LOW, 16, Some(LAST + 1));
    let refused = admin_status(&mut controller, beyond);
    assert_eq!(refused, INVALID_INTERRUPT_VECTOR);
    let last = machine.interrupts[usize::from(LAST)].clone();
    let mut queues = [LAST, 200, 300].map(|id| {
        let options = QueueOptions::interrupting(64, LAST, last.clone());
        controller.create_queue_pair(id, &options).unwrap()
    });
    for round in 0..60 {
        let queue = &mut queues[round % 3];
        submit(queue, 2);
        assert_eq!(last.wait(HANG).unwrap(), 1, "{round}");
        assert_eq!(consume(queue), 2);
    }
    for interrupt in &machine.interrupts[1..usize::from(LAST)] {
        assert_eq!(interrupt.take().unwrap(), 0, "no other vector");
    }
}

#[test]
fn only_the_queues_own_vector() {
    let host = Host::new("memory:16M", 512);
    let machine = host.machine(&Setup::nth(0));
    let mut controller = machine.attach();
    let mut loud = interrupting(&machine, &mut controller, 3);
    let mut silent = controller
        .create_queue_pair(1, &QueueOptions::polled(64))
        .unwrap();
    for interrupt in &machine.interrupts {
        interrupt.take().unwrap();
    }
    for _ in 0..50 {
        silent.execute(Sqe::flush(1), HANG).unwrap();
        submit(&mut loud, 2);
        assert_eq!(machine.interrupts[3].wait(HANG).unwrap(), 1);
        assert_eq!(consume(&mut loud), 2);
    }
    // The queues are idle before their deletion, so later interrupts can only be the admin queue's.
    controller.delete_queue_pair(silent).unwrap();
    controller.delete_queue_pair(loud).unwrap();
    for (vector, interrupt) in machine.interrupts.iter().enumerate().skip(1) {
        assert_eq!(interrupt.take().unwrap(), 0, "vector {vector}");
    }
    assert!(
        machine.interrupts[0].wait(HANG).unwrap() > 0,
        "admin commands"
    );
}

/// Writes Message Control of the MSI-X capability.
fn msix_control(machine: &Machine, enabled: bool, function_mask: bool) {
    let mut function = machine.function();
    let mut at = [0];
    function.read_config(0x34, &mut at);
    loop {
        let mut header = [0; 2];
        function.read_config(at[0].into(), &mut header);
        if header[0] == 0x11 {
            break;
        }
        at[0] = header[1];
        assert_ne!(at[0], 0, "no MSI-X capability");
    }
    let value = u16::from(enabled) << 15 | u16::from(function_mask) << 14;
    let _moved = function.write_config(u64::from(at[0]) + 2, &value.to_le_bytes());
}

fn mask_vector(machine: &Machine, vector: u64, masked: bool) {
    machine
        .function()
        .write_bar(Bar::Msix, 16 * vector + 12, &[u8::from(masked), 0, 0, 0]);
}

/// Returns a vector's bit in the Pending Bit Array.
fn is_pending(machine: &Machine, vector: u64) -> bool {
    let mut bits = [0; 8];
    machine.function().read_bar(Bar::Msix, 0x1000, &mut bits);
    u64::from_le_bytes(bits) >> vector & 1 == 1
}

#[test]
fn one_interrupt_after_a_mask_and_none_during_it() {
    let host = Host::new("memory:16M", 512);
    let setup = Setup {
        masking: MsixMasking::Function,
        ..Setup::nth(0)
    };
    let machine = host.machine(&setup);
    let mut controller = machine.attach();
    let mut queue = interrupting(&machine, &mut controller, 1);
    let interrupt = &machine.interrupts[1];
    let masks: [(&str, &dyn Fn(bool)); 3] = [
        ("vector", &|masked| mask_vector(&machine, 1, masked)),
        ("function", &|masked| msix_control(&machine, true, masked)),
        ("disabled", &|masked| msix_control(&machine, !masked, false)),
    ];
    msix_control(&machine, true, false);
    mask_vector(&machine, 1, false);
    for (name, mask) in masks {
        submit(&mut queue, 3);
        assert_eq!(interrupt.wait(HANG).unwrap(), 1, "{name}");
        assert_eq!(consume(&mut queue), 3);
        mask(true);
        submit(&mut queue, 4);
        crate::common::wait_for("a pending bit", || is_pending(&machine, 1));
        assert_eq!(interrupt.take().unwrap(), 0, "{name}");
        mask(false);
        assert_eq!(interrupt.wait(HANG).unwrap(), 1, "{name}");
        assert!(!is_pending(&machine, 1));
        assert_eq!(consume(&mut queue), 4);
    }
}

/// Offset of Message Control of the MSI capability.
const MSI_CONTROL: u64 = 0xA2;
const INTMS: u64 = 0x0C;
const INTMC: u64 = 0x10;

/// Writes a controller register.
fn write_register(machine: &Machine, offset: u64, value: u32) {
    let value = value.to_le_bytes();
    machine.function().write_bar(Bar::Registers, offset, &value);
}

#[test]
fn messages_of_msi_wait_for_intmc() {
    let host = Host::new("memory:32M", 512);
    let bystander = Bystander::start(&host, &Setup::nth(1));
    for masking in [MsixMasking::Function, MsixMasking::Client] {
        let machine = host.machine(&Setup {
            masking,
            ..Setup::nth(0)
        });
        let mut controller = machine.attach();
        let mut queue = interrupting(&machine, &mut controller, 1);
        let interrupt = &machine.interrupts[1];
        // Enable four messages.
        let _moved = machine.function().write_config(MSI_CONTROL, &[0x21]);
        for round in 1..60 {
            submit(&mut queue, round);
            assert_eq!(interrupt.wait(HANG).unwrap(), 1, "one per batch");
            assert_eq!(consume(&mut queue), round);
        }
        let all = 1 << 1;
        write_register(&machine, INTMS, all);
        submit(&mut queue, 4);
        crate::common::wait_for("a pending message", || {
            machine.function().vectors()[1].is_pending()
        });
        assert_eq!(interrupt.take().unwrap(), 0);
        write_register(&machine, INTMC, all);
        assert_eq!(interrupt.wait(HANG).unwrap(), 1);
        assert_eq!(consume(&mut queue), 4);
    }
    bystander.finish();
}

#[test]
fn the_interrupt_pin_is_high_until_all_completions_are_consumed() {
    let host = Host::new("memory:16M", 512);
    for poll in ["shared", "shared:busy"] {
        for mode in MODES {
            let machine = host.machine(&Setup::nth(0).doorbells(mode).poll(poll));
            assert_eq!(machine.function().has_pin(), !remote::is_enabled());
            if remote::is_enabled() {
                continue;
            }
            machine
                .function()
                .set_pin(Some(PinDeassertion::Acknowledgement));
            let acknowledge = || machine.function().on_end_of_interrupt();
            let mut controller = machine.attach();
            let pin = Arc::clone(&machine.interrupts[0]);
            // All queues share the pin, including the admin queue.
            let mut queues = [1, 2].map(|id| {
                let options = QueueOptions::interrupting(64, 0, Arc::clone(&pin));
                controller.create_queue_pair(id, &options).unwrap()
            });
            acknowledge();
            pin.take().unwrap();
            let mut rng = Rng::new(7);
            let (mut in_flight, mut done) = ([0; 2], 0);
            while done < 2000 {
                for (queue, in_flight) in queues.iter_mut().zip(&mut in_flight) {
                    let count = rng.below(u64::from(33 - *in_flight)) as u16;
                    submit(queue, count);
                    *in_flight += count;
                }
                if in_flight == [0; 2] {
                    continue;
                }
                // If a handler leaves entries, the interrupt is signalled again.
                assert_eq!(pin.wait(HANG).unwrap(), 1, "{mode:?} {poll} {in_flight:?}");
                for (queue, in_flight) in queues.iter_mut().zip(&mut in_flight) {
                    if rng.below(3) > 0 {
                        let found = consume(queue);
                        *in_flight -= found;
                        done += found;
                    }
                }
                acknowledge();
            }
            while in_flight != [0; 2] {
                assert_eq!(pin.wait(HANG).unwrap(), 1, "{mode:?} {poll} {in_flight:?}");
                for (queue, in_flight) in queues.iter_mut().zip(&mut in_flight) {
                    *in_flight -= consume(queue);
                }
                acknowledge();
            }
        }
    }
}

#[test]
fn a_pin_that_stays_high_gives_its_handler_an_entry() {
    if remote::is_enabled() {
        return;
    }
    let host = Host::new("memory:16M", 512);
    let machine = host.machine(&Setup::nth(0));
    machine.function().set_pin(Some(PinDeassertion::Access));
    let mut controller = machine.attach();
    let pin = Arc::clone(&machine.interrupts[0]);
    let options = QueueOptions::interrupting(64, 0, Arc::clone(&pin));
    let mut queue = controller.create_queue_pair(1, &options).unwrap();
    machine.function().on_end_of_interrupt();
    pin.take().unwrap();
    let process_events_after = |after: u64| {
        host.clock.advance(Duration::from_millis(after));
        machine.function().process_events();
    };
    // Another handler of the line takes the entry before the level rises. Then nothing lowers the level.
    submit(&mut queue, 1);
    assert_eq!(pin.wait(HANG).unwrap(), 1);
    assert_eq!(consume(&mut queue), 1);
    // Without an event request, the test cannot make the guest's handler run.
    process_events_after(0);
    process_events_after(200);
    machine.function().on_end_of_interrupt();
    process_events_after(0);
    controller.request_async_event().unwrap();
    submit(&mut queue, 1);
    assert_eq!(pin.wait(HANG).unwrap(), 1);
    assert_eq!(consume(&mut queue), 1);
    process_events_after(0);
    process_events_after(50);
    assert_eq!(controller.async_event(Duration::ZERO).unwrap(), None);
    process_events_after(50);
    let event = controller.async_event(HANG).unwrap().expect("an event");
    assert_eq!((event.kind, event.info, event.log_page), (7, 0, 0));
    // The head doorbell of the admin queue is written, and the level falls.
    machine.function().on_end_of_interrupt();
    controller.request_async_event().unwrap();
    process_events_after(0);
    process_events_after(200);
    assert_eq!(controller.async_event(Duration::ZERO).unwrap(), None);
}

/// Aggregation time in the test, with slack for clocks that differ.
const AGGREGATION: Duration = Duration::from_micros(25_000);

#[test]
fn coalescing_waits_for_its_time_or_its_threshold() {
    let host = Host::new("memory:16M", 512);
    // A busy poller is needed, since a poller that goes to sleep signals earlier.
    let machine = host.machine(&Setup::nth(0).poll("shared:busy"));
    let mut controller = machine.attach();
    let mut queue = interrupting(&machine, &mut controller, 1);
    let interrupt = Arc::clone(&machine.interrupts[1]);
    let mut elapsed = |count: u16| {
        let began = Instant::now();
        submit(&mut queue, count);
        assert_eq!(interrupt.wait(HANG).unwrap(), 1);
        let elapsed = began.elapsed();
        assert_eq!(consume(&mut queue), count);
        elapsed
    };
    // Aggregate 4 completions or 25.5 ms.
    controller
        .set_feature(feature::INTERRUPT_COALESCING, 0, 255 << 8 | 3)
        .unwrap();
    for _ in 0..5 {
        assert!(elapsed(1) >= AGGREGATION);
        assert!(elapsed(3) >= AGGREGATION);
    }
    // A round with coalescing takes longer than this, so the first fast round proves that coalescing is off.
    let rounds = HANG.as_millis() / AGGREGATION.as_millis();
    assert!(
        (0..rounds).any(|_| elapsed(4) < AGGREGATION),
        "the threshold was not honoured"
    );
    // Set Coalescing Disable for this vector.
    controller
        .set_feature(feature::INTERRUPT_VECTOR_CONFIG, 0, 1 << 16 | 1)
        .unwrap();
    assert!(
        (0..rounds).any(|_| elapsed(1) < AGGREGATION),
        "the vector still coalesces"
    );
    controller
        .set_feature(feature::INTERRUPT_VECTOR_CONFIG, 0, 1)
        .unwrap();
    assert!(elapsed(1) >= AGGREGATION);
    // An aggregation time of 0 disables coalescing.
    controller
        .set_feature(feature::INTERRUPT_COALESCING, 0, 3)
        .unwrap();
    assert!(
        (0..rounds).any(|_| elapsed(1) < AGGREGATION),
        "coalescing is still on"
    );
}

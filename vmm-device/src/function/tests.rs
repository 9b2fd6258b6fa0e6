//! The function as a guest and its VMM use it.

use std::{os::fd::OwnedFd, sync::Mutex, thread, time::Duration};

use nvme_guest::{Gpa, MemoryRegion};
use nvme_spec::{sqe::Sqe, status::Status};
use vm_device::DeviceMmio;
use vmm_sys_util::eventfd::EFD_NONBLOCK;

use super::*;
use crate::fixtures::{self, DATA, MEMORY, QUEUE_PAIRS, TestGuest, UNMAPPED};

const IO_CQ: u64 = DATA + 0x10_0000;
const IO_SQ: u64 = DATA + 0x11_0000;

/// Waits for an action of another thread. Counts polls instead of time, so a machine that pauses does not fail the test.
#[track_caller]
fn wait_for(mut condition: impl FnMut() -> bool) {
    for _ in 0..180_000 {
        if condition() {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
    panic!("it never happened");
}

fn identify() -> Sqe {
    Sqe {
        dptr: [DATA, 0],
        cdw10: 1,
        ..Sqe::new(0x06)
    }
}

/// Creates queue pair 1, with 16 entries, on vector 1.
fn create_queue_pair(guest: &mut TestGuest) {
    let cq = Sqe {
        dptr: [IO_CQ, 0],
        cdw10: 0x000F_0001,
        cdw11: 0x0001_0003,
        ..Sqe::new(0x05)
    };
    let sq = Sqe {
        dptr: [IO_SQ, 0],
        cdw10: 0x000F_0001,
        cdw11: 0x0001_0001,
        ..Sqe::new(0x01)
    };
    guest.write_memory(IO_CQ, &[0; 4096]);
    for sqe in [cq, sq] {
        assert_eq!(guest.admin(sqe).status(), Status::SUCCESS);
    }
}

fn flr(guest: &mut TestGuest) {
    let _ = guest.function.write_config(0x68, &[0x10, 0xA8]);
}

#[test]
fn io_runs_through_the_queues_that_admin_commands_made() {
    for mode in [
        DoorbellMode::Trap,
        DoorbellMode::Shadow,
        DoorbellMode::Mapped,
    ] {
        let mut guest = TestGuest::with_enabled_controller(mode);
        let interrupt = EventFd::new(EFD_NONBLOCK).expect("eventfd");
        let ours = interrupt.try_clone().expect("eventfd");
        guest.function.vectors()[1].set_eventfd(Some(ours));
        create_queue_pair(&mut guest);
        guest.write_memory(DATA, &[0x5A; 512]);
        // Write, then Read, of block 7.
        for (index, (opcode, at)) in [(0x01, DATA), (0x02, DATA + 0x1000)]
            .into_iter()
            .enumerate()
        {
            let mut sqe = Sqe {
                dptr: [at, 0],
                cdw10: 7,
                ..Sqe::new(opcode)
            };
            sqe.nsid.0 = 1;
            guest.write_memory(
                IO_SQ + 64 * index as u64,
                zerocopy::IntoBytes::as_bytes(&sqe),
            );
            guest.doorbell(Doorbell::SqTail(QueueId(1)), index as u32 + 1);
            let phase_and_status = IO_CQ + 16 * index as u64 + 14;
            wait_for(|| guest.read_memory(phase_and_status, 1)[0] & 1 == 1);
            assert_eq!(
                guest.read_memory(phase_and_status, 2),
                [1, 0],
                "{mode}: success"
            );
            wait_for(|| interrupt.read().is_ok());
            guest.doorbell(Doorbell::CqHead(QueueId(1)), index as u32 + 1);
        }
        assert_eq!(guest.read_memory(DATA + 0x1000, 512), [0x5A; 512], "{mode}");
        let log = Sqe {
            dptr: [DATA, 0],
            cdw10: 0x007F_0002,
            ..Sqe::new(0x02)
        };
        assert_eq!(guest.admin(log).status(), Status::SUCCESS);
        assert_eq!(
            guest.read_memory(DATA + 32, 1),
            [1],
            "{mode}: data units read"
        );
        assert_eq!(
            guest.read_memory(DATA + 64, 1),
            [1],
            "{mode}: read commands"
        );
        assert_eq!(
            guest.read_memory(DATA + 80, 1),
            [1],
            "{mode}: write commands"
        );
    }
}

#[test]
fn a_reset_ends_all_queues_and_can_be_repeated() {
    let mut guest = TestGuest::new(DoorbellMode::Shadow);
    for round in 0..12 {
        guest.enable();
        if round % 3 > 0 {
            let config = Sqe {
                dptr: [DATA, DATA + 0x1000],
                ..Sqe::new(0x7C)
            };
            assert_eq!(guest.admin(config).status(), Status::SUCCESS);
            create_queue_pair(&mut guest);
        }
        guest.submit(Sqe::new(0x0C));
        match round % 4 {
            0 => guest.write_register(0x14, 0x0046_0000),
            1 => flr(&mut guest),
            2 => drop(guest.function.reset()),
            _ => {
                guest.write_register(0x14, 0x0046_4001);
                assert_eq!(guest.csts(), 0b1001, "shutdown complete");
                guest.write_register(0x14, 0);
            }
        }
        assert_eq!(guest.csts(), 0, "round {round}");
        assert_eq!(guest.read_register(0x14), 0);
        assert!(guest.function.backend().io_doorbells().wakers.is_empty());
        assert!(guest.peek().is_none(), "requests for events vanish");
    }
    flr(&mut guest);
    flr(&mut guest);
    guest.enable();
    assert_eq!(guest.admin(identify()).status(), Status::SUCCESS);
    let resets = ResetStats {
        controller: 6,
        function_level: 5,
        vmm: 3,
    };
    assert_eq!(guest.function.reset_stats(), resets);
}

#[test]
fn a_reset_forgets_the_doorbell_buffer() {
    let mut guest = TestGuest::with_enabled_controller(DoorbellMode::Shadow);
    let config = Sqe {
        dptr: [DATA, DATA + 0x1000],
        ..Sqe::new(0x7C)
    };
    assert_eq!(guest.admin(config).status(), Status::SUCCESS);
    create_queue_pair(&mut guest);
    guest.write_register(0x14, 0);
    // The pages now belong to the next driver, which uses them for other data.
    guest.write_memory(DATA, &[0xC3; 0x2000]);
    guest.enable();
    create_queue_pair(&mut guest);
    let mut flush = Sqe::new(0x00);
    flush.nsid.0 = 1;
    guest.write_memory(IO_SQ, zerocopy::IntoBytes::as_bytes(&flush));
    guest.doorbell(Doorbell::SqTail(QueueId(1)), 1);
    wait_for(|| guest.read_memory(IO_CQ + 14, 1)[0] & 1 == 1);
    guest.doorbell(Doorbell::CqHead(QueueId(1)), 1);
    guest.write_register(0x14, 0);
    assert_eq!(guest.read_memory(DATA, 0x2000), [0xC3; 0x2000]);
}

#[test]
fn a_controller_that_is_not_running_ignores_its_doorbells() {
    let mut guest = TestGuest::with_enabled_controller(DoorbellMode::Trap);
    guest.write_register(0x14, 0x0046_4001);
    assert_eq!(guest.csts(), 0b1001);
    guest.submit(identify());
    assert!(guest.peek().is_none());
    guest.write_register(0x14, 0);
    guest.submit(identify());
    assert!(guest.peek().is_none());
    guest.enable();
    assert_eq!(guest.function.admin_stats().commands, 0);
    assert_eq!(guest.admin(identify()).status(), Status::SUCCESS);
}

#[test]
fn doorbells_are_dwords() {
    let mut guest = TestGuest::with_enabled_controller(DoorbellMode::Trap);
    guest.enqueue(identify());
    for data in [&[1][..], &[1, 0], &[1, 0, 0]] {
        guest.function.write_bar(Bar::Registers, 0x1000, data);
        guest.function.process_events();
        assert!(guest.peek().is_none());
    }
    guest
        .function
        .write_bar(Bar::Registers, 0x1000, &[1, 0, 0, 0, 9, 9, 9, 9]);
    guest.function.process_events();
    assert_eq!(guest.completion().status(), Status::SUCCESS);
    let mut data = [0xA5; 8];
    guest.function.read_bar(Bar::Registers, 0x1000, &mut data);
    assert_eq!(data, [0; 8]);
    assert_eq!(
        guest.function.admin_stats().doorbell_exits,
        2,
        "tail and head"
    );
}

#[test]
fn mapped_doorbells_wake_the_admin_queue() {
    let mut guest = TestGuest::with_enabled_controller(DoorbellMode::Mapped);
    let region = guest.function.doorbell_region().expect("doorbells to map");
    assert_eq!(region.offset, 0x1000);
    assert_eq!(region.length % 4096, 0);
    assert!(region.offset + region.length <= guest.function.bar_size(Bar::Registers));
    for round in 1..=3 {
        let cid = guest.enqueue(identify());
        // A store to mapped memory, without a notification.
        let doorbells = guest.function.backend().shared_parts().doorbells;
        doorbells.store(ADMIN_SQ_TAIL, round);
        wait_for(|| guest.function.events_fd().read().is_ok());
        guest.function.process_events();
        let cqe = guest.peek().expect("a completion");
        assert_eq!(cqe.cid(), cid);
        doorbells.store(ADMIN_CQ_HEAD, round);
    }
    assert_eq!(guest.function.admin_stats().doorbell_exits, 0);
    // A VMM that cannot map the doorbells traps them.
    guest.enqueue(identify());
    guest.ring();
    assert!(guest.peek().is_some());
}

#[test]
fn doorbells_are_mapped_in_mapped_mode_only() {
    for mode in [DoorbellMode::Shadow, DoorbellMode::Trap] {
        assert!(TestGuest::new(mode).function.doorbell_region().is_none());
    }
}

#[test]
fn a_queue_that_lost_its_memory_fails_the_controller() {
    let mut guest = TestGuest::with_enabled_controller(DoorbellMode::Trap);
    create_queue_pair(&mut guest);
    guest.function.backend().unmap_all().expect("unmapped");
    guest.doorbell(Doorbell::SqTail(QueueId(1)), 1);
    wait_for(|| {
        guest.function.process_events();
        guest.csts() & 0b10 != 0
    });
    flr(&mut guest);
    assert_eq!(guest.csts(), 0);
}

/// Creates a guest with a ready controller. Returns its memory as well.
fn guest_with_memory() -> (TestGuest, OwnedFd) {
    let memory = fixtures::guest_memory();
    let function = fixtures::function(DoorbellMode::Trap, MsixMasking::Client);
    let mut guest = TestGuest::with_function(function, memory.try_clone().expect("a descriptor"));
    guest.enable();
    (guest, memory)
}

#[test]
fn admin_commands_wait_for_their_queue_to_be_mapped_again() {
    let (mut guest, memory) = guest_with_memory();
    let interval = guest.function.events_poll_interval();
    let cid = guest.enqueue(identify());
    guest.function.backend().unmap_all().expect("unmapped");
    guest.ring();
    assert_eq!(guest.csts(), 1, "it waits");
    assert_eq!(
        guest.function.events_poll_interval(),
        Some(MEMORY_POLL_INTERVAL)
    );
    fixtures::map_memory(&guest.function, memory);
    guest.function.process_events();
    let cqe = guest.completion();
    assert_eq!((cqe.cid(), cqe.status()), (cid, Status::SUCCESS));
    assert_eq!(guest.function.events_poll_interval(), interval);
    assert_eq!(guest.function.admin_stats().commands, 1);
}

#[test]
fn admin_completions_wait_for_their_queue_to_be_mapped_again() {
    let (mut guest, memory) = guest_with_memory();
    let cid = guest.submit(Sqe::new(0x0C));
    guest.function.backend().unmap_all().expect("unmapped");
    // Causes an event, because this queue does not exist.
    guest.doorbell(Doorbell::SqTail(QueueId(1)), 1);
    guest.function.process_events();
    assert_eq!(guest.csts(), 1, "it waits");
    assert!(guest.interrupt.read().is_err(), "nothing is posted");
    fixtures::map_memory(&guest.function, memory);
    guest.function.process_events();
    assert_eq!(guest.interrupt.read().expect("an interrupt"), 1);
    let cqe = guest.completion();
    assert_eq!((cqe.cid(), cqe.dw0()), (cid, 0x0001_0000));
    guest.function.process_events();
    assert!(guest.peek().is_none(), "it is posted once");
}

#[test]
fn admin_queues_that_stay_unmapped_fail_the_controller() {
    let (mut guest, _) = guest_with_memory();
    guest.enqueue(identify());
    guest.function.backend().unmap_all().expect("unmapped");
    guest.ring();
    assert_eq!(guest.csts(), 1);
    guest.function.clock.sleep(Duration::from_secs(31));
    guest.function.process_events();
    assert_eq!(guest.csts(), 0b11, "CFS");
    // Only a reset recovers the controller.
    guest.write_register(0x14, 0);
    assert_eq!(guest.csts(), 0);
}

/// Returns a region beside the guest's memory, for data alone.
fn data_memory() -> MemoryRegion {
    MemoryRegion {
        gpa: Gpa(UNMAPPED),
        len: MEMORY.end - MEMORY.start,
        fd: fixtures::guest_memory(),
        offset: 0,
        readable: true,
        writable: true,
    }
}

/// Checks that a command waits for memory at [`UNMAPPED`], which is unmapped right before the command. Returns whether the
/// check was possible, and the guest.
fn check_waits_for_memory(command: Sqe) -> (bool, TestGuest) {
    let mut guest = TestGuest::with_enabled_controller(DoorbellMode::Shadow);
    let interval = guest.function.events_poll_interval();
    guest.function.backend().map(data_memory()).expect("mapped");
    let len = MEMORY.end - MEMORY.start;
    let unmapped = guest.function.backend().unmap(Gpa(UNMAPPED), len);
    assert_eq!(unmapped.expect("unmapped"), len);
    let cid = guest.submit(command);
    if let Some(cqe) = guest.peek() {
        // The command waits only shortly after a change of the memory, and the machine stalled for longer.
        let unchanged_for = guest.function.memory().time_since_change();
        assert!(unchanged_for > Duration::from_secs(1), "{cqe:?}");
        return (false, guest);
    }
    assert_eq!(guest.csts(), 1);
    assert_eq!(
        guest.function.events_poll_interval(),
        Some(MEMORY_POLL_INTERVAL)
    );
    guest.function.backend().map(data_memory()).expect("mapped");
    guest.function.process_events();
    let cqe = guest.completion();
    assert_eq!((cqe.cid(), cqe.status()), (cid, Status::SUCCESS));
    assert_eq!(guest.function.events_poll_interval(), interval);
    assert_eq!(guest.function.admin_stats().commands, 1);
    (true, guest)
}

#[test]
fn a_guest_that_enables_its_controller_often_waits_for_the_check_of_its_memory() {
    let mut guest = TestGuest::new(DoorbellMode::Shadow);
    let clock = Arc::new(fixtures::FixtureClock::default());
    guest.function.clock = clock.clone();
    guest.enable();
    guest.write_register(0x14, 0);
    let second = Duration::from_secs(1);
    guest
        .function
        .memory_checks
        .record_check(Duration::ZERO, second);
    guest.write_register(0x14, 0x0046_0001);
    assert_eq!(guest.csts(), 0);
    assert_eq!(
        guest.function.events_poll_interval(),
        Some(DRAIN_POLL_INTERVAL)
    );
    guest.function.process_events();
    assert_eq!(guest.csts(), 0);
    clock.sleep(3 * second);
    guest.function.process_events();
    assert_eq!(guest.csts(), 1);
    // A guest that disables the controller immediately does not wait.
    guest.write_register(0x14, 0);
    guest
        .function
        .memory_checks
        .record_check(3 * second, 4 * second);
    guest.write_register(0x14, 0x0046_0001);
    guest.write_register(0x14, 0);
    clock.sleep(3 * second);
    guest.function.process_events();
    assert_eq!(guest.csts(), 0);
}

#[test]
fn the_data_of_an_admin_command_waits_to_be_mapped_again() {
    let identify = Sqe {
        dptr: [UNMAPPED, 0],
        ..identify()
    };
    let guest = loop {
        let (is_checked, guest) = check_waits_for_memory(identify);
        if is_checked {
            break guest;
        }
    };
    assert_ne!(guest.read_memory(UNMAPPED, 4096), [0; 4096]);
}

#[test]
fn creating_queues_and_doorbell_buffers_waits_for_their_memory() {
    let completion_queue = Sqe {
        dptr: [UNMAPPED, 0],
        cdw10: 15 << 16 | 1,
        cdw11: 1,
        ..Sqe::new(0x05)
    };
    let doorbell_buffer = Sqe {
        dptr: [UNMAPPED, UNMAPPED + 0x1000],
        ..Sqe::new(0x7C)
    };
    for command in [completion_queue, doorbell_buffer] {
        while !check_waits_for_memory(command).0 {}
    }
}

#[test]
fn data_that_stays_unmapped_fails_the_command_alone() {
    let mut guest = TestGuest::with_enabled_controller(DoorbellMode::Trap);
    let nowhere = Sqe {
        dptr: [UNMAPPED, 0],
        ..identify()
    };
    let cids = [guest.enqueue(nowhere), guest.enqueue(identify())];
    guest.ring();
    guest.function.clock.sleep(Duration::from_secs(31));
    guest.function.process_events();
    let failed = guest.completion();
    let failure = Status::DATA_TRANSFER_ERROR.with_dnr(true);
    assert_eq!((failed.cid(), failed.status()), (cids[0], failure));
    let next = guest.completion();
    assert_eq!((next.cid(), next.status()), (cids[1], Status::SUCCESS));
    assert_eq!(guest.csts(), 1);
    // A reset ends the wait.
    guest.submit(nowhere);
    guest.write_register(0x14, 0);
    guest.enable();
    assert_eq!(guest.admin(identify()).status(), Status::SUCCESS);
}

/// A clock that stops the thread for 40 s at one of its readings. Meanwhile, the missing memory is mapped again.
#[derive(Debug)]
struct StallingClock {
    host: Arc<dyn ControllerBackend>,
    pause: Mutex<Stall>,
}

#[derive(Debug, Default)]
struct Stall {
    now: Duration,
    /// Number of readings that precede the stop.
    readings: u32,
    /// Memory that is mapped while the thread stops. `None` until the stop is set up, and after it.
    memory: Option<MemoryRegion>,
    /// True if the machine itself was slow, so that the memory was missing for longer than the timeout.
    is_gone: bool,
}

impl WaitClock for StallingClock {
    fn now(&self) -> Duration {
        let mut pause = self.pause.lock().expect("sound");
        if pause.readings > 0 {
            pause.readings -= 1;
        } else if let Some(memory) = pause.memory.take() {
            pause.is_gone =
                self.host.shared_parts().memory.time_since_change() > Duration::from_secs(1);
            self.host.map(memory).expect("mapped");
            pause.now += Duration::from_secs(40);
        }
        pause.now
    }

    fn wait(&self, _: Duration, attempt: &mut dyn FnMut(Duration) -> bool) -> bool {
        attempt(Duration::from_secs(3600))
    }

    fn sleep(&self, time: Duration) {
        self.pause.lock().expect("sound").now += time;
    }
}

/// Checks that a command which waits for memory succeeds if the thread stops, at a reading of the clock, while the memory is
/// mapped again. Returns whether the clock was read that often.
fn continues_after_pause(readings: u32, gone: u64, command: Sqe) -> bool {
    let host = Arc::new(fixtures::local_backend(DoorbellMode::Trap));
    let clock = Arc::new(StallingClock {
        host: host.clone(),
        pause: Mutex::default(),
    });
    let function = NvmeFunction::new(host, MsixMasking::Client).with_clock(clock.clone());
    let memory = fixtures::guest_memory();
    let mut guest = TestGuest::with_function(function, memory.try_clone().expect("a descriptor"));
    guest.enable();
    let data = data_memory();
    let data_fd = data.fd.try_clone().expect("a descriptor");
    guest.function.backend().map(data).expect("mapped");
    let cid = guest.enqueue(command);
    let len = MEMORY.end - MEMORY.start;
    let unmapped = guest.function.backend().unmap(Gpa(gone), len);
    assert_eq!(unmapped.expect("unmapped"), len);
    guest.ring();
    if guest.function.events_poll_interval() != Some(MEMORY_POLL_INTERVAL) {
        // The command waits only shortly after a change of the memory, and the machine stalled for longer.
        assert_eq!(gone, UNMAPPED);
        return true;
    }
    *clock.pause.lock().expect("sound") = Stall {
        now: Duration::ZERO,
        readings,
        memory: Some(MemoryRegion {
            gpa: Gpa(gone),
            fd: if gone == UNMAPPED { data_fd } else { memory },
            ..data_memory()
        }),
        is_gone: false,
    };
    guest.function.process_events();
    assert_eq!(guest.csts(), 1, "reading {readings}");
    {
        let pause = clock.pause.lock().expect("sound");
        if pause.memory.is_some() {
            return false;
        }
        if pause.is_gone && gone == UNMAPPED {
            return true;
        }
    }
    guest.function.process_events();
    let cqe = guest.completion();
    assert_eq!(
        (cqe.cid(), cqe.status()),
        (cid, Status::SUCCESS),
        "reading {readings}"
    );
    true
}

#[test]
fn memory_remapped_while_the_thread_pauses_is_found() {
    let data = Sqe {
        dptr: [UNMAPPED, 0],
        ..identify()
    };
    for (gone, command) in [(MEMORY.start, identify()), (UNMAPPED, data)] {
        let readings = (0..).take_while(|reading| continues_after_pause(*reading, gone, command));
        assert!(readings.count() > 0);
    }
}

#[test]
fn a_queue_failure_from_before_a_reset_is_ignored_after_it() {
    let mut guest = TestGuest::with_enabled_controller(DoorbellMode::Trap);
    create_queue_pair(&mut guest);
    guest.function.backend().unmap_all().expect("unmapped");
    guest.doorbell(Doorbell::SqTail(QueueId(1)), 1);
    wait_for(|| guest.function.events_fd().read().is_ok());
    guest.write_register(0x14, 0);
    guest.function.process_events();
    assert_eq!(guest.csts(), 0);
}

#[test]
fn an_invalid_io_doorbell_value_is_an_event() {
    let mut guest = TestGuest::with_enabled_controller(DoorbellMode::Trap);
    create_queue_pair(&mut guest);
    guest.submit(Sqe::new(0x0C));
    guest.doorbell(Doorbell::SqTail(QueueId(1)), 16);
    let mut cqe = None;
    wait_for(|| {
        guest.function.process_events();
        cqe = guest.peek();
        cqe.is_some()
    });
    assert_eq!(cqe.map(|cqe| cqe.dw0()), Some(0x0001_0100));
    assert_eq!(guest.csts(), 1);
}

#[test]
fn both_bars_are_reached_where_the_guest_put_them() {
    let guest = TestGuest::new(DoorbellMode::Shadow);
    let mut function = guest.function;
    let (bar0, bar4) = (0x8_FEBF_0000_u64, 0xC000_0000_u64);
    assert!(function.write_config(0x10, &bar0.to_le_bytes()).is_empty());
    assert!(function.write_config(0x20, &bar4.to_le_bytes()).is_empty());
    let size = function.bar_size(Bar::Registers);
    assert_eq!(
        function.write_config(0x04, &[0x06, 0x00]),
        [
            BarMove {
                bar: Bar::Registers,
                size,
                from: None,
                to: Some(bar0)
            },
            BarMove {
                bar: Bar::Msix,
                size: 0x2000,
                from: None,
                to: Some(bar4)
            },
        ]
    );
    let device = Mutex::new(function);
    let read = |base, offset| {
        let mut data = [0; 4];
        device.mmio_read(MmioAddress(base), offset, &mut data);
        u32::from_le_bytes(data)
    };
    assert_eq!(read(bar0, 8), 0x0002_0000, "VS");
    assert_eq!(read(bar4, 12), 1, "vector 0 is masked");
    device.mmio_write(MmioAddress(bar4), 12, &[0; 4]);
    assert_eq!(read(bar4 + 8, 4), 0, "whatever the base is");
    for (base, offset) in [(bar0, size), (bar4, 0x2000), (0x1000, 0), (u64::MAX, 2)] {
        assert_eq!(read(base, offset), 0xFFFF_FFFF);
        device.mmio_write(MmioAddress(base), offset, &[0; 4]);
    }
}

#[test]
fn interrupts_wait_for_the_guest_to_unmask_them() {
    let mut function = fixtures::function(DoorbellMode::Shadow, MsixMasking::Function);
    assert_eq!(function.vectors().len(), usize::from(QUEUE_PAIRS) + 1);
    let interrupt = EventFd::new(EFD_NONBLOCK).expect("eventfd");
    function.vectors()[3].set_eventfd(Some(interrupt.try_clone().expect("eventfd")));
    function.vectors()[3].signal();
    function.write_bar(
        Bar::Msix,
        3 * 16,
        &[0x00, 0x10, 0xE0, 0xFE, 0, 0, 0, 0, 0x33, 0, 0, 0],
    );
    function.write_bar(Bar::Msix, 3 * 16 + 12, &[0; 4]);
    assert!(interrupt.read().is_err(), "MSI-X is disabled");
    let _ = function.write_config(0x52, &[0x00, 0x80]);
    assert_eq!(interrupt.read().expect("it was pending"), 1);
    let message = function.msix_message(3).expect("a message");
    assert_eq!(
        (message.address, message.data, message.masked),
        (0xFEE0_1000, 0x33, false)
    );
    let _ = function.reset();
    function.vectors()[3].signal();
    assert!(interrupt.read().is_err(), "masked by the reset");
}

/// Writes INTMS or INTMC.
fn write_mask(function: &mut NvmeFunction, register: u64, vectors: u32) {
    function.write_bar(Bar::Registers, register, &vectors.to_le_bytes());
}

const INTMS: u64 = 0x0C;
const INTMC: u64 = 0x10;

#[test]
fn intms_and_intmc_mask_msi_and_not_msix() {
    for masking in [MsixMasking::Function, MsixMasking::Client] {
        let mut function = fixtures::function(DoorbellMode::Shadow, masking);
        let interrupt = EventFd::new(EFD_NONBLOCK).expect("eventfd");
        function.vectors()[1].set_eventfd(Some(interrupt.try_clone().expect("eventfd")));
        // Enables MSI with two messages.
        let _ = function.write_config(0xA2, &[0x11]);
        let raise = |function: &NvmeFunction| {
            function.vectors()[1].signal();
            interrupt.read().is_ok()
        };
        assert!(raise(&function), "{masking:?}");
        write_mask(&mut function, INTMS, 0b10);
        assert!(!raise(&function));
        write_mask(&mut function, INTMC, 0b01);
        assert!(interrupt.read().is_err(), "another one");
        write_mask(&mut function, INTMC, 0b10);
        assert!(interrupt.read().is_ok(), "what was pending");
        // A controller reset clears the masks.
        write_mask(&mut function, INTMS, u32::MAX);
        function.write_bar(Bar::Registers, 0x14, &0x0046_0001_u32.to_le_bytes());
        function.write_bar(Bar::Registers, 0x14, &0x0046_0000_u32.to_le_bytes());
        assert!(raise(&function), "{masking:?}");
        // With MSI-X, the masks have no effect.
        write_mask(&mut function, INTMS, u32::MAX);
        function.write_bar(Bar::Msix, 16 + 12, &[0; 4]);
        let _ = function.write_config(0x52, &[0x00, 0x80]);
        assert!(raise(&function), "{masking:?}");
    }
}

#[test]
fn a_controller_reset_discards_masked_interrupts() {
    const INTMS: u64 = 0x0C;
    const CC: u64 = 0x14;
    let mut guest = TestGuest::with_enabled_controller(DoorbellMode::Shadow);
    guest
        .function
        .set_pin(Some(PinDeassertion::Acknowledgement));
    let pin = EventFd::new(EFD_NONBLOCK).expect("eventfd");
    guest.function.vectors()[0].set_eventfd(Some(pin.try_clone().expect("eventfd")));
    guest.write_register(INTMS, 1);
    guest.submit(Sqe::new(0x7F));
    assert!(pin.read().is_err(), "it is masked");
    guest.write_register(CC, 0x0046_0000);
    assert!(pin.read().is_err(), "there are no entries any more");
    guest.enable();
    assert!(pin.read().is_err(), "there are none yet");
    guest.submit(Sqe::new(0x7F));
    assert!(pin.read().is_ok(), "raised");
    for masking in [MsixMasking::Function, MsixMasking::Client] {
        let mut function = fixtures::function(DoorbellMode::Shadow, masking);
        let interrupt = EventFd::new(EFD_NONBLOCK).expect("eventfd");
        function.vectors()[1].set_eventfd(Some(interrupt.try_clone().expect("eventfd")));
        // Enables MSI with two messages.
        let _ = function.write_config(0xA2, &[0x11]);
        write_mask(&mut function, INTMS, 0b10);
        function.vectors()[1].signal();
        for cc in [0x0046_0001_u32, 0x0046_0000] {
            function.write_bar(Bar::Registers, CC, &cc.to_le_bytes());
        }
        assert!(interrupt.read().is_err(), "{masking:?}");
        function.vectors()[1].signal();
        assert!(interrupt.read().is_ok(), "{masking:?}");
    }
}

#[test]
fn the_pin_is_high_while_admin_completions_are_unconsumed() {
    let mut guest = TestGuest::with_enabled_controller(DoorbellMode::Shadow);
    guest.function.set_pin(Some(PinDeassertion::Access));
    let pin = EventFd::new(EFD_NONBLOCK).expect("eventfd");
    guest.function.vectors()[0].set_eventfd(Some(pin.try_clone().expect("eventfd")));
    guest.function.on_end_of_interrupt();
    assert!(pin.read().is_err(), "there was no command");
    guest.submit(Sqe::new(0x7F));
    assert!(pin.read().is_ok(), "raised");
    guest.submit(Sqe::new(0x7F));
    assert!(pin.read().is_err(), "it is high");
    for _ in 0..2 {
        guest.function.on_end_of_interrupt();
        assert!(pin.read().is_ok(), "the guest has left the entries");
    }
    for _ in 0..2 {
        assert_ne!(guest.completion().status(), Status::SUCCESS);
    }
    guest.function.on_end_of_interrupt();
    assert!(pin.read().is_err(), "the entries are consumed");
}

#[test]
fn intms_holds_the_pin_back_until_intmc() {
    for fall in [PinDeassertion::Acknowledgement, PinDeassertion::Access] {
        let mut guest = TestGuest::with_enabled_controller(DoorbellMode::Shadow);
        guest.function.set_pin(Some(fall));
        let pin = EventFd::new(EFD_NONBLOCK).expect("eventfd");
        guest.function.vectors()[0].set_eventfd(Some(pin.try_clone().expect("eventfd")));
        guest.write_register(INTMS, 0b01);
        guest.submit(Sqe::new(0x7F));
        assert!(pin.read().is_err(), "{fall:?}: masked");
        guest.write_register(INTMC, 0b10);
        assert!(pin.read().is_err(), "{fall:?}: that is another vector");
        guest.write_register(INTMC, 0b01);
        assert_eq!(pin.read().expect("what was held back"), 1, "{fall:?}");
        // The level falls while the vector is masked, and the guest has not consumed the entry.
        guest.write_register(INTMS, 0b01);
        guest.function.on_end_of_interrupt();
        assert!(pin.read().is_err(), "{fall:?}: masked");
        guest.write_register(INTMC, 0b01);
        assert_eq!(pin.read().expect("the entry is left"), 1, "{fall:?}");
        assert_ne!(guest.completion().status(), Status::SUCCESS);
        guest.function.on_end_of_interrupt();
        assert!(pin.read().is_err(), "{fall:?}: the entry is consumed");
    }
}

#[test]
fn after_a_pause_the_pin_rises_for_unconsumed_admin_completions() {
    let mut guest = TestGuest::with_enabled_controller(DoorbellMode::Shadow);
    guest
        .function
        .set_pin(Some(PinDeassertion::Acknowledgement));
    let pin = EventFd::new(EFD_NONBLOCK).expect("eventfd");
    guest.function.vectors()[0].set_eventfd(Some(pin.try_clone().expect("eventfd")));
    guest.submit(Sqe::new(0x7F));
    assert!(pin.read().is_ok(), "raised");
    guest.function.pause().expect("it rests");
    guest.function.on_end_of_interrupt();
    assert!(pin.read().is_err(), "it is paused");
    guest.function.resume();
    assert!(pin.read().is_ok(), "the guest has left the entry");
    // Without Bus Master Enable, the function is paused as well.
    let _ = guest.function.write_config(4, &[0x02]);
    guest.function.on_end_of_interrupt();
    assert!(pin.read().is_err(), "it reads no memory");
    let _ = guest.function.write_config(4, &[0x06]);
    assert!(pin.read().is_ok(), "the guest has left the entry");
    assert_ne!(guest.completion().status(), Status::SUCCESS);
    guest.function.pause().expect("it rests");
    guest.function.on_end_of_interrupt();
    guest.function.resume();
    assert!(pin.read().is_err(), "the entry is consumed");
}

#[test]
fn interrupt_status_tells_of_the_pin() {
    let mut guest = TestGuest::with_enabled_controller(DoorbellMode::Shadow);
    guest.function.set_pin(Some(PinDeassertion::Access));
    let has_interrupt = |guest: &TestGuest| {
        let (mut status, mut with_command) = ([0; 2], [0; 4]);
        guest.function.read_config(6, &mut status);
        guest.function.read_config(4, &mut with_command);
        assert_eq!(with_command[2..], status);
        status[0] & 1 << 3 != 0
    };
    assert!(!has_interrupt(&guest));
    guest.submit(Sqe::new(0x7F));
    assert!(has_interrupt(&guest));
    let _ = guest.function.write_config(4, &[0x06, 0x04]);
    assert!(has_interrupt(&guest), "Interrupt Disable");
    let _ = guest.function.write_config(4, &[0x06, 0x00]);
    guest.write_register(0x0C, 1);
    assert!(!has_interrupt(&guest), "INTMS");
    guest.write_register(0x10, 1);
    assert!(has_interrupt(&guest), "INTMC");
    // Enables MSI-X.
    let _ = guest.function.write_config(0x53, &[0x80]);
    assert!(!has_interrupt(&guest), "it sends messages");
    let _ = guest.function.write_config(0x53, &[0x00]);
    assert_ne!(guest.completion().status(), Status::SUCCESS);
    guest.function.on_end_of_interrupt();
    assert!(!has_interrupt(&guest), "the entry is consumed");
}

#[test]
fn guest_memory_can_be_unmapped_once_the_controller_is_disabled() {
    let mut guest = TestGuest::with_enabled_controller(DoorbellMode::Shadow);
    create_queue_pair(&mut guest);
    guest.write_register(0x14, 0);
    let unmapped = guest.function.backend().unmap_all().expect("unmapped");
    assert_eq!(unmapped, MEMORY.end - MEMORY.start);
}

//! Bus Master Enable: while the bit is clear, the device must not access guest memory (PCI Express 4.0, section 7.5.1.1.3).

use nvme_mpt_tests::admin::feature;
use nvme_mpt_tests::command::{DataPointer, Sqe, admin};
use nvme_mpt_tests::registers::{CC, CC_ENABLE, CSTS, CSTS_READY};
use nvme_mpt_tests::status::SUCCESS;

use crate::common::sentinel::Sentinel;
use crate::common::{HANG, Host, MODES, Machine, Setup};

const MEMORY_SPACE: u16 = 1 << 1;
const BUS_MASTER: u16 = 1 << 2;

/// Writes the Command register.
fn command(machine: &Machine, value: u16) {
    let bar_moves = machine.function().write_config(0x04, &value.to_le_bytes());
    drop(bar_moves);
}

/// Returns a command that accesses no memory except for its queue.
fn number_of_queues() -> Sqe {
    Sqe::new(admin::GET_FEATURES, 0).with_cdw(10, feature::NUMBER_OF_QUEUES.into())
}

#[test]
fn no_commands_without_bus_master_enable() {
    for mode in MODES {
        let host = Host::new("memory:32M", 512);
        let other = host.machine(&Setup::nth(1));
        let (_controller, mut neighbour) = other.disk();
        let machine = host.machine(&Setup::nth(0).doorbells(mode));
        // A user-space driver may not write the Command register. Its commands are still executed.
        let (mut controller, mut disk) = machine.disk();
        disk.verify(0, 8).unwrap();
        for _ in 0..3 {
            command(&machine, MEMORY_SPACE);
            let sentinel = Sentinel::new(&machine.memory, 4096);
            let taken = machine.queue_stats(1).commands;
            let read = Sqe::read(1, 0, 8).with_data(DataPointer::prp(sentinel.gpa(), 0));
            let read = disk.queue.submit(read).unwrap();
            disk.queue.ring();
            let queue = controller.admin_queue().unwrap();
            let request = queue.submit(number_of_queues()).unwrap();
            queue.ring();
            // The neighbour's queue shows that the poller makes a round, and so does the function's thread.
            neighbour.verify(0, 8).unwrap();
            machine.function().process_events();
            assert!(disk.queue.poll().is_none(), "{mode:?}");
            assert!(
                controller.admin_queue().unwrap().poll().is_none(),
                "{mode:?}"
            );
            assert_eq!(machine.queue_stats(1).commands, taken);
            sentinel.check();

            command(&machine, MEMORY_SPACE | BUS_MASTER);
            let cqe = disk.queue.wait(read, HANG).unwrap();
            assert_eq!(cqe.status().code(), SUCCESS, "{mode:?}");
            let queue = controller.admin_queue().unwrap();
            assert_eq!(queue.wait(request, HANG).unwrap().status().code(), SUCCESS);
            disk.verify(0, 8).unwrap();
        }
    }
}

#[test]
fn a_function_level_reset_clears_bus_master_enable() {
    let host = Host::new("memory:32M", 512);
    let machine = host.machine(&Setup::nth(0));
    command(&machine, MEMORY_SPACE | BUS_MASTER);
    let mut controller = machine.attach();
    controller.identify_controller().unwrap();
    machine.function_level_reset();
    // Registers work as usual, while the admin queue waits.
    let bar = machine.bar();
    assert_eq!(bar.read32(CC) & CC_ENABLE, 0);
    command(&machine, MEMORY_SPACE);
    let memory = machine.memory.alloc(2 * 4096).unwrap();
    bar.write32(0x24, 7 << 16 | 7);
    bar.write64(0x28, memory.gpa());
    bar.write64(0x30, memory.gpa() + 4096);
    bar.write32(CC, CC_ENABLE);
    assert_eq!(bar.read32(CSTS) & CSTS_READY, CSTS_READY);
    let sqe = number_of_queues().with_cid(7);
    let sqe: Vec<u8> = sqe.0.iter().flat_map(|word| word.to_le_bytes()).collect();
    machine.memory.write(memory.gpa(), &sqe).unwrap();
    bar.write32(0x1000, 1);
    machine.function().process_events();
    let completion = || {
        let mut entry = [0; 16];
        machine
            .memory
            .read(memory.gpa() + 4096, &mut entry)
            .unwrap();
        entry
    };
    assert_eq!(completion(), [0; 16]);
    command(&machine, MEMORY_SPACE | BUS_MASTER);
    machine.function().process_events();
    assert_ne!(completion(), [0; 16]);
}

#[test]
fn bus_master_enable_stays_clear_after_a_snapshot() {
    let host = Host::new("memory:32M", 512);
    let other = host.machine(&Setup::nth(1));
    let (_controller, mut neighbour) = other.disk();
    let setup = Setup::nth(0);
    let machine = host.machine(&setup);
    command(&machine, MEMORY_SPACE | BUS_MASTER);
    let (mut controller, mut disk) = machine.disk();
    command(&machine, 0);
    let flush = disk.queue.submit(Sqe::flush(1)).unwrap();
    disk.queue.ring();
    let suspended = machine.suspend();
    let machine = host.restore(&suspended, &setup).unwrap();
    machine.function().resume();
    controller.move_to(machine.bar()).unwrap();
    disk.queue.move_to(&machine.bar()).unwrap();
    neighbour.verify(0, 8).unwrap();
    assert!(disk.queue.poll().is_none());
    command(&machine, MEMORY_SPACE | BUS_MASTER);
    let cqe = disk.queue.wait(flush, HANG).unwrap();
    assert_eq!(cqe.status().code(), SUCCESS);
}

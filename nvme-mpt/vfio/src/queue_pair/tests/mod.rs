//! Queue pairs on a drive that the test controls.

mod arbitration;
mod ballooning;
mod control;
mod drive;
mod migration;
mod owners;
mod property;
mod sharing;
mod users;
mod weights;

use super::VfioQueue;
use nvme_guest::dma::RegionTable;
use nvme_guest::iova::IovaSpace;
use nvme_mpt::host::ListMemory;
use nvme_mpt::host::{HostBatch, HostCompletion, HostMemory, HostQueue};
use nvme_mpt_memory::clock::Ticks;
use nvme_spec::ids::CommandId;
use nvme_spec::nvm::ReadWrite;
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::Sqe;

/// Resources of a shadow queue that its host queue uses.
struct HostMemoryFixture {
    table: RegionTable,
    lists: ListMemory,
}

impl HostMemoryFixture {
    fn new(slots: usize) -> Self {
        let space = std::sync::Arc::new(IovaSpace::software());
        Self {
            table: RegionTable::default(),
            lists: ListMemory::new(&space, slots).expect("memory"),
        }
    }

    fn memory(&self) -> HostMemory<'_> {
        HostMemory {
            table: &self.table,
            lists: &self.lists,
        }
    }
}

/// Returns a Read or Write of `blocks` blocks of 512 bytes, in slot `slot`.
fn command(opcode: NvmOpcode, slot: u16, slba: u64, blocks: u32) -> Sqe {
    let mut sqe = Sqe::new(opcode.0);
    ReadWrite {
        slba: nvme_spec::ids::Lba(slba),
        nlb_z: (blocks - 1) as u16,
        ..ReadWrite::default()
    }
    .write_to(&mut sqe);
    sqe.set_cid(CommandId(slot));
    sqe
}

/// Returns all completions of a queue.
fn reap(queue: &mut VfioQueue) -> Vec<HostCompletion> {
    let mut done = Vec::new();
    queue.reap_with_clock(Ticks::now, |completion: HostCompletion| {
        done.push(completion)
    });
    done
}

/// Submits commands and rings the doorbell.
fn submit(queue: &mut VfioQueue, lender: &HostMemoryFixture, commands: &[Sqe]) {
    submit_at(queue, lender, commands, Ticks::now());
}

/// Calls [`submit`] at a given time.
fn submit_at(queue: &mut VfioQueue, lender: &HostMemoryFixture, commands: &[Sqe], now: Ticks) {
    let mut batch = queue.batch();
    batch.announce(commands.len() as u32, now);
    for command in commands {
        batch.submit(command);
    }
    batch.ring(lender.memory());
}

//! Blocks of a simulated drive, which outlive the process that uses the drive.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nvme_lease::backing_id::DriveIdentity;
use nvme_lease::range::BlockRange;
use nvme_mpt::drive::{HostLease, HostLeaseError, HostLeaseRequest, StoreLease};
use nvme_mpt::host::{DataPointer, HostMemory};
use nvme_mpt::shadow::HostQueuePair;
use nvme_mpt_memory::RawBytes;
use nvme_mpt_memory::simulation::costs;
use nvme_software::{BackingStore, CommandExecutor, ExecutionStep, SoftwareQueue};
use nvme_spec::ids::Lba;
use nvme_spec::nvm::ReadWrite;
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

use crate::history::BLOCK;

/// A drive in memory.
#[derive(Clone, Debug)]
pub(crate) struct Blocks {
    bytes: Arc<Mutex<Vec<u8>>>,
    path: Option<PathBuf>,
    /// Processor time that each command takes.
    time: Duration,
}

impl Blocks {
    /// Creates a drive whose blocks are all zeroes.
    pub(crate) fn new(blocks: usize) -> Self {
        Self {
            bytes: Arc::new(Mutex::new(vec![0; blocks * BLOCK])),
            path: None,
            time: Duration::ZERO,
        }
    }

    /// Makes each command take processor time.
    pub(crate) fn with_time(self, time: Duration) -> Self {
        Self { time, ..self }
    }

    /// Places the drive at `path`, beside which its metadata files lie. The blocks stay the same.
    pub(crate) fn at(self, path: &Path) -> Self {
        Self {
            path: Some(path.to_owned()),
            ..self
        }
    }

    fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BackingStore for Blocks {
    type Lease = LeasedBlocks;

    fn identity(&self) -> DriveIdentity {
        "simulated:blocks".to_owned().into()
    }

    fn model(&self) -> &'static str {
        "Simulated blocks"
    }

    fn bytes(&self) -> u64 {
        self.bytes().len() as u64
    }

    fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    fn open_lease(&self, request: &HostLeaseRequest<'_>) -> Result<LeasedBlocks, HostLeaseError> {
        Ok(LeasedBlocks {
            blocks: self.clone(),
            range: request.single_part()?,
        })
    }
}

/// Host controller of the drive for one lease.
#[derive(Clone, Debug)]
pub(crate) struct LeasedBlocks {
    blocks: Blocks,
    range: BlockRange,
}

impl CommandExecutor for LeasedBlocks {
    fn execute(&mut self, sqe: &Sqe, memory: HostMemory<'_>) -> Status {
        let ReadWrite { slba, nlb_z, .. } = ReadWrite::from(sqe);
        let blocks = u64::from(nlb_z) + 1;
        let opcode = NvmOpcode(sqe.opcode());
        if [NvmOpcode::READ, NvmOpcode::WRITE, NvmOpcode::WRITE_ZEROES].contains(&opcode) {
            let BlockRange {
                start,
                blocks: most,
            } = self.range;
            assert!(
                slba.0 >= start.0 && slba.0 + blocks <= start.0 + most,
                "{opcode:?} of {blocks} blocks from {slba:?} on lies beside the lease {:?}",
                self.range
            );
        }
        costs::work(self.blocks.time);
        let (start, len) = (slba.0 as usize * BLOCK, blocks as usize * BLOCK);
        let data = DataPointer::from_sqe(sqe);
        let mut at = 0;
        // The lock is released here, because an access to guest memory may make this thread wait for other actors.
        let moved = match opcode {
            NvmOpcode::READ => {
                let read = self.blocks.bytes()[start..start + len].to_vec();
                data.for_each_piece(memory, len as u64, |part: RawBytes<'_>| {
                    part.copy_from(&read[at..at + part.len()]);
                    at += part.len();
                })
            }
            NvmOpcode::WRITE => {
                let mut written = vec![0; len];
                let moved = data.for_each_piece(memory, len as u64, |part: RawBytes<'_>| {
                    part.copy_to(&mut written[at..at + part.len()]);
                    at += part.len();
                });
                self.blocks.bytes()[start..start + at].copy_from_slice(&written[..at]);
                moved
            }
            NvmOpcode::WRITE_ZEROES => {
                self.blocks.bytes()[start..start + len].fill(0);
                Ok(())
            }
            _ => Ok(()),
        };
        moved.err().unwrap_or(Status::SUCCESS)
    }

    fn prefetch(&self, _: &Sqe) {}

    const HAS_LONG_COMMANDS: bool = true;

    fn is_long(sqe: &Sqe) -> bool {
        NvmOpcode(sqe.opcode()) == NvmOpcode::WRITE_ZEROES
    }

    /// Executes one step of a command that zeroes blocks: one block per step, so that commands of other queues run in
    /// between.
    fn execute_step(&mut self, sqe: &Sqe, memory: HostMemory<'_>, steps: usize) -> ExecutionStep {
        let ReadWrite { slba, nlb_z, .. } = ReadWrite::from(sqe);
        let mut block = *sqe;
        ReadWrite {
            slba: Lba(slba.0 + steps as u64),
            nlb_z: 0,
            ..ReadWrite::default()
        }
        .write_to(&mut block);
        let status = self.execute(&block, memory);
        let is_last = steps == usize::from(nlb_z) || !status.is_success();
        ExecutionStep {
            bytes: u64::MAX,
            status: is_last.then_some(status),
        }
    }
}

impl HostLease for LeasedBlocks {
    fn create_queue(&self, slots: u16) -> io::Result<HostQueuePair> {
        Ok(HostQueuePair::new(self.create_delayable_queue(slots)?))
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

impl StoreLease for LeasedBlocks {
    type Queue = SoftwareQueue<Self>;

    fn create_delayable_queue(&self, slots: u16) -> io::Result<Self::Queue> {
        Ok(SoftwareQueue::new(self.clone(), slots))
    }
}

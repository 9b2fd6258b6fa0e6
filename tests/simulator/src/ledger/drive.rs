//! A drive whose write cache is lost in a crash of the machine.

use std::io;

use nvme_guest::host::ControllerLimits;
use nvme_lease::backing_id::DriveIdentity;
use nvme_lease::range::BlockRange;
use nvme_mpt::drive::{HostLease, HostLeaseError, HostLeaseRequest, StoreLease};
use nvme_mpt::host::HostMemory;
use nvme_mpt::shadow::HostQueuePair;
use nvme_mpt_memory::simulation::{ActorStep, process, turn};
use nvme_software::{BackingStore, CommandExecutor, SoftwareQueue};
use nvme_spec::nvm::ReadWrite;
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

use super::lease_model::{CELL, CELLS, LeaseModel};

/// Binary logarithm of the logical block size.
pub(super) const LBA_SHIFT: u8 = 12;

/// A process's handle of the drive. The model of leases has the contents.
#[derive(Clone, Debug)]
pub(super) struct CellStore(pub(super) LeaseModel);

impl CommandExecutor for CellStore {
    fn execute(&mut self, sqe: &Sqe, _: HostMemory<'_>) -> Status {
        let ReadWrite { slba, nlb_z, .. } = ReadWrite::from(sqe);
        let blocks = u64::from(nlb_z) + 1;
        let [first, count] = [slba.0, blocks].map(|blocks| {
            let bytes = blocks << LBA_SHIFT;
            assert!(bytes.is_multiple_of(CELL), "a wipe of {bytes} bytes");
            (bytes / CELL) as usize
        });
        assert_eq!(NvmOpcode(sqe.opcode()), NvmOpcode::WRITE_ZEROES);
        for cell in first..first + count {
            turn(ActorStep::Submit, [cell as u64, 0]);
            self.0.record_zeroing(process(), cell);
        }
        Status::SUCCESS
    }

    fn prefetch(&self, _: &Sqe) {}
}

impl BackingStore for CellStore {
    type Lease = Self;

    fn identity(&self) -> DriveIdentity {
        "simulated:cells".to_owned().into()
    }

    fn model(&self) -> &'static str {
        "Simulated cells"
    }

    fn bytes(&self) -> u64 {
        CELLS as u64 * CELL
    }

    fn limits(&self, limits: ControllerLimits) -> ControllerLimits {
        // Commands are small, so that a wipe takes several commands.
        ControllerLimits {
            no_data_bytes_max: 2 * CELL,
            ..limits
        }
    }

    fn open_lease(&self, _: &HostLeaseRequest<'_>) -> Result<Self, HostLeaseError> {
        Ok(self.clone())
    }
}

impl HostLease for CellStore {
    fn create_queue(&self, slots: u16) -> io::Result<HostQueuePair> {
        Ok(HostQueuePair::new(self.create_delayable_queue(slots)?))
    }

    fn add_part(&self, _: BlockRange) -> Result<(), HostLeaseError> {
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        turn(ActorStep::SyncFile, [0; 2]);
        self.0.record_flush();
        Ok(())
    }
}

impl StoreLease for CellStore {
    type Queue = SoftwareQueue<Self>;

    fn create_delayable_queue(&self, slots: u16) -> io::Result<Self::Queue> {
        Ok(SoftwareQueue::new(self.clone(), slots))
    }
}

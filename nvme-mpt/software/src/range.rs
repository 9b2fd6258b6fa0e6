//! The ranges of commands that have them as data: Dataset Management and Copy (NVM 1.0, sections 3.2.3 and 3.2.2).

use nvme_mpt::host::HostMemory;
use nvme_mpt::spec::sqe::Sqe;
use nvme_mpt::spec::status::Status;
use zerocopy::FromBytes;

/// A range of those that a translated command has for its data. They lie in memory of the slot's
/// own, so they are what was checked.
pub(crate) fn range<T: FromBytes>(
    sqe: &Sqe,
    memory: HostMemory<'_>,
    index: usize,
) -> Result<T, Status> {
    let size = size_of::<T>();
    let address = sqe.prp1() + (index * size) as u64;
    let mut bytes = [0; 64];
    memory
        .lists
        .resolve(address, size)
        .ok_or(Status::INTERNAL_ERROR)?
        .copy_to(&mut bytes);
    T::read_from_bytes(&bytes[..size]).map_err(|_| Status::INTERNAL_ERROR)
}

//! Range descriptors of Dataset Management and Copy (NVM 1.0, sections 3.2.3 and 3.2.2).

use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use zerocopy::FromBytes;

use super::queue::HostMemory;

/// Returns a range descriptor of a translated command. The translation copied the descriptors to memory of the command's slot
/// and checked the copies, so that the guest cannot change them afterwards.
///
/// # Errors
/// [`Status::INTERNAL_ERROR`] if the command has no such descriptor.
pub fn range_descriptor<T: FromBytes>(
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

//! Interrupt vectors of a VMM that has the interrupts of a device as a group.
//!
//! The published crate vm-device (0.1) has no interface to interrupts. Several VMMs have one of their own, in the shape of
//! Cloud Hypervisor's `InterruptSourceGroup`: `notifier` returns the eventfd of a vector, and `update` sets the vector's message.
//! [`GroupVectors`] makes a function's vectors from these two, so that [`Vmm::vectors`](crate::Vmm::vectors) is one expression.

use std::fmt;
use std::io;

use vmm_device::MsixMessage;
use vmm_sys_util::eventfd::EventFd;

use crate::vmm::{VmmError, VmmVectors};

/// Interrupt vectors over the `notifier` and the `update` of a VMM's interrupt group.
///
/// Dropping the vectors updates each of them with a masked message without an address, so that the VMM removes its routes. The
/// closures own the group, so it is freed afterwards.
///
/// # Example
///
/// ```
/// use std::io;
/// use std::sync::Arc;
///
/// use nvme_mpt_vmm::{GroupVectors, MsixMessage, VmmVectors};
/// use vmm_sys_util::eventfd::EventFd;
///
/// // The interface of the VMM.
/// trait InterruptSourceGroup: Send + Sync {
///     fn notifier(&self, index: u32) -> Option<EventFd>;
///     fn update(&self, index: u32, address: u64, data: u32, masked: bool) -> io::Result<()>;
/// }
///
/// // The body of `Vmm::vectors`, after the VMM has made a group of `count` interrupts.
/// fn vectors(group: Arc<dyn InterruptSourceGroup>, count: u16) -> Box<dyn VmmVectors> {
///     let notifiers = group.clone();
///     Box::new(GroupVectors::new(
///         count,
///         move |vector| notifiers.notifier(vector.into()),
///         move |vector, message: MsixMessage| {
///             group.update(vector.into(), message.address, message.data, message.masked)
///         },
///     ))
/// }
/// ```
pub struct GroupVectors<N, U>
where
    U: Fn(u16, MsixMessage) -> io::Result<()>,
{
    count: u16,
    notifier: N,
    update: U,
}

impl<N, U> GroupVectors<N, U>
where
    N: Fn(u16) -> Option<EventFd> + Send,
    U: Fn(u16, MsixMessage) -> io::Result<()> + Send,
{
    /// Creates `count` vectors. `notifier` returns the eventfd that raises a vector, and `update` sets a vector's message.
    ///
    /// The message that `update` gets is not masked while the function exists, because the function does not raise masked vectors.
    pub fn new(count: u16, notifier: N, update: U) -> Self {
        Self {
            count,
            notifier,
            update,
        }
    }
}

impl<N, U> fmt::Debug for GroupVectors<N, U>
where
    U: Fn(u16, MsixMessage) -> io::Result<()>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupVectors")
            .field("count", &self.count)
            .finish_non_exhaustive()
    }
}

impl<N, U> VmmVectors for GroupVectors<N, U>
where
    N: Fn(u16) -> Option<EventFd> + Send,
    U: Fn(u16, MsixMessage) -> io::Result<()> + Send,
{
    fn eventfd(&self, vector: u16) -> io::Result<EventFd> {
        let known = Some(vector).filter(|vector| *vector < self.count);
        known
            .and_then(&self.notifier)
            .ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn set_message(&self, vector: u16, message: MsixMessage) -> Result<(), VmmError> {
        (self.update)(vector, message)
            .map_err(|error| VmmError::new(format!("route interrupt vector {vector}"), error))
    }
}

impl<N, U> Drop for GroupVectors<N, U>
where
    U: Fn(u16, MsixMessage) -> io::Result<()>,
{
    fn drop(&mut self) {
        let nowhere = MsixMessage {
            address: 0,
            data: 0,
            masked: true,
        };
        for vector in 0..self.count {
            if let Err(error) = (self.update)(vector, nowhere) {
                log::error!("Interrupt vector {vector} stays routed: {error}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[test]
    fn vectors_follow_the_group_until_they_are_dropped() {
        let eventfd = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let (raised, updates) = (eventfd.try_clone().unwrap(), Arc::new(Mutex::default()));
        let seen = updates.clone();
        let vectors = GroupVectors::new(
            2,
            move |vector| (vector == 0).then(|| eventfd.try_clone().unwrap()),
            move |vector, message: MsixMessage| {
                let mut seen: std::sync::MutexGuard<'_, Vec<_>> = seen.lock().unwrap();
                seen.push((vector, message.address, message.masked));
                match vector {
                    0 => Ok(()),
                    _ => Err(io::ErrorKind::OutOfMemory.into()),
                }
            },
        );
        vectors.eventfd(0).unwrap().write(1).unwrap();
        assert_eq!(raised.read().unwrap(), 1);
        for missing in [1, 2] {
            let error = vectors.eventfd(missing).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::NotFound);
        }
        let message = MsixMessage {
            address: 0xFEE0_0000,
            data: 0x31,
            masked: false,
        };
        vectors.set_message(0, message).unwrap();
        let error = vectors.set_message(1, message).unwrap_err();
        assert_eq!(error.to_string(), "Cannot route interrupt vector 1");
        drop(vectors);
        let expected = [
            (0, 0xFEE0_0000, false),
            (1, 0xFEE0_0000, false),
            (0, 0, true),
            (1, 0, true),
        ];
        assert_eq!(*updates.lock().unwrap(), expected);
    }
}

//! The VMM's side of an interrupt vector.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use nvme_guest::interrupt::VectorLink;
use nvme_mpt_memory::eventfd;
use vmm_sys_util::eventfd::EventFd;

use crate::call;
use crate::message::VectorChange;
use crate::server_link::{ServerLink, VectorConnection};

/// Interrupt vector whose changes are forwarded to the server.
#[derive(Debug)]
pub(crate) struct RemoteVector {
    pub(crate) number: u16,
    pub(crate) link: Arc<ServerLink>,
}

impl RemoteVector {
    fn send_change(&self, change: VectorChange) -> bool {
        self.change_and_record(change, None, |_| {})
    }

    /// Changes the vector in the server, and records the change for the next server.
    fn change_and_record(
        &self,
        change: VectorChange,
        eventfd: Option<OwnedFd>,
        note: impl FnOnce(&mut VectorConnection),
    ) -> bool {
        let number = self.number;
        let call = call::change_vector(number, change);
        let mut state = self.link.state();
        // The request fails if there is no server, which then delivers no interrupts. The link has already logged the loss of
        // the server.
        let answer = self.link.call_locked(&mut state, call, eventfd.as_ref());
        if let Some(wire) = state.settings.vectors.get_mut(usize::from(number)) {
            note(wire);
            if matches!(change, VectorChange::Connect | VectorChange::Disconnect) {
                wire.eventfd = eventfd;
            }
        }
        answer.unwrap_or(false)
    }
}

impl VectorLink for RemoteVector {
    fn set_eventfd(&self, eventfd: Option<&EventFd>) -> bool {
        let Some(eventfd) = eventfd else {
            return self.send_change(VectorChange::Disconnect);
        };
        match eventfd::share(eventfd) {
            Ok(descriptor) => {
                self.change_and_record(VectorChange::Connect, Some(descriptor), |_| {})
            }
            Err(error) => {
                log::error!("Cannot connect vector {}: {error}", self.number);
                false
            }
        }
    }

    fn set_masked(&self, masked: bool) -> bool {
        let change = match masked {
            true => VectorChange::Mask,
            false => VectorChange::Unmask,
        };
        self.change_and_record(change, None, |wire| wire.masked = masked)
    }

    fn is_pending(&self) -> bool {
        self.send_change(VectorChange::Ask)
    }

    fn clear_pending(&self) {
        self.send_change(VectorChange::Clear);
    }
}

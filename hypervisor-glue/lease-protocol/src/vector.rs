//! The VMM's side of an interrupt vector.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use nvme_guest::interrupt::VectorLink;
use nvme_mpt_memory::eventfd;
use vmm_sys_util::eventfd::EventFd;

use crate::link::{ServerLink, VectorConnection};
use crate::message::{BackendRequest, VectorChange};

/// Interrupt vector whose changes are forwarded to the server.
#[derive(Debug)]
pub(crate) struct RemoteVector {
    pub(crate) number: u16,
    pub(crate) link: Arc<ServerLink>,
}

impl RemoteVector {
    fn change(&self, change: VectorChange) -> bool {
        self.wire(change, None, |_| {})
    }

    /// Changes the vector in the server, and records the change for the next server.
    fn wire(
        &self,
        change: VectorChange,
        eventfd: Option<OwnedFd>,
        note: impl FnOnce(&mut VectorConnection),
    ) -> bool {
        let number = self.number;
        let request = BackendRequest::Vector { number, change };
        let mut state = self.link.state();
        // Without a server, no interrupt is raised. The link has reported the loss.
        let answer = self.link.ask_in(&mut state, &request, eventfd.as_ref());
        if let Some(wire) = state.standing.vectors.get_mut(usize::from(number)) {
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
            return self.change(VectorChange::Disconnect);
        };
        match eventfd::share(eventfd) {
            Ok(descriptor) => self.wire(VectorChange::Connect, Some(descriptor), |_| {}),
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
        self.wire(change, None, |wire| wire.masked = masked)
    }

    fn pending(&self) -> bool {
        self.change(VectorChange::Ask)
    }

    fn clear_pending(&self) {
        self.change(VectorChange::Clear);
    }
}

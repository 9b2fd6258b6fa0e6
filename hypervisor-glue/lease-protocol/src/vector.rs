//! The VMM's side of an interrupt vector.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use nvme_mpt::interrupt::VectorLink;
use nvme_mpt::memory::eventfd;
use vmm_sys_util::eventfd::EventFd;

use crate::client::Link;
use crate::message::{Request, VectorChange};

/// Tells the server of the changes of a vector.
#[derive(Debug)]
pub(crate) struct RemoteVector {
    pub(crate) number: u16,
    pub(crate) link: Arc<Link>,
}

impl RemoteVector {
    fn change(&self, change: VectorChange, eventfd: Option<&OwnedFd>) -> bool {
        let number = self.number;
        // Without a server nothing is raised, and the link has reported that it is lost.
        let answer = self.link.ask(&Request::Vector { number, change }, eventfd);
        answer.unwrap_or(false)
    }
}

impl VectorLink for RemoteVector {
    fn set_eventfd(&self, eventfd: Option<&EventFd>) -> bool {
        let Some(eventfd) = eventfd else {
            return self.change(VectorChange::Disconnect, None);
        };
        match eventfd::share(eventfd) {
            Ok(descriptor) => self.change(VectorChange::Connect, Some(&descriptor)),
            Err(error) => {
                log::error!("Vector {} stays unconnected: {error}", self.number);
                false
            }
        }
    }

    fn set_masked(&self, masked: bool) -> bool {
        let change = match masked {
            true => VectorChange::Mask,
            false => VectorChange::Unmask,
        };
        self.change(change, None)
    }

    fn pending(&self) -> bool {
        self.change(VectorChange::Ask, None)
    }

    fn clear_pending(&self) {
        self.change(VectorChange::Clear, None);
    }
}

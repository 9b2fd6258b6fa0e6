// SPDX-License-Identifier: Apache-2.0

//! INTx of an NVMe function: a pin of the IOAPIC, which several functions may share.

use std::sync::{Arc, Mutex};
use std::{fmt, io};

use devices::interrupt_controller::InterruptController;
use devices::ioapic::Ioapic;
use nvme_mpt_vmm::IntxPin;
use vmm_sys_util::eventfd::EventFd;

pub(super) struct NvmeMptPin {
    ioapic: Arc<Mutex<Ioapic>>,
    irq: usize,
    raise: EventFd,
    ended: Arc<EventFd>,
}

impl NvmeMptPin {
    pub(super) fn connect(ioapic: Arc<Mutex<Ioapic>>, irq: usize) -> io::Result<Self> {
        let ended = Arc::new(EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?);
        let raise = {
            let mut ioapic = ioapic.lock().unwrap();
            let raise = ioapic.notifier(irq).ok_or(io::ErrorKind::NotFound)?;
            ioapic
                .watch_level(irq, ended.clone())
                .map_err(io::Error::other)?;
            raise
        };
        Ok(NvmeMptPin {
            ioapic,
            irq,
            raise,
            ended,
        })
    }
}

impl fmt::Debug for NvmeMptPin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NvmeMptPin").finish_non_exhaustive()
    }
}

impl IntxPin for NvmeMptPin {
    fn raise_eventfd(&self) -> io::Result<EventFd> {
        self.raise.try_clone()
    }

    fn resample_eventfd(&self) -> io::Result<EventFd> {
        self.ended.try_clone()
    }
}

impl Drop for NvmeMptPin {
    fn drop(&mut self) {
        self.ioapic
            .lock()
            .unwrap()
            .unwatch_level(self.irq, &self.ended);
    }
}

//! One function that is offered: its lease, its socket and its thread.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};

use nvme_mpt::attachment::GrowError;
use nvme_mpt::host::Contents;
use nvme_mpt::lease::Claim;
use nvme_mpt::limit::RateLimits;
use nvme_mpt::range::Bytes;
use nvme_mpt::{Attachment, Drive};
use nvme_mpt_vmm::drives::DrivePath;
use nvme_mpt_vmm::open;
use nvme_mpt_vmm::options::{FunctionOptions, ServedFunction};
use nvme_mpt_vmm::report;
use vmm_device::{MsixMasking, NvmeFunction};

use super::declared::DeclaredFunction;
use super::error::OfferError;
use super::owner::socket_access;
use super::roster::Terms;
use crate::adaptor::NvmeDevice;
use crate::change::{FunctionEntry, FunctionState};
use crate::function_thread::FunctionThread;

/// A function that is offered.
#[derive(Debug)]
pub(super) struct Offer {
    pub(super) declared: DeclaredFunction,
    pub(super) entry: FunctionEntry,
    /// Queue pairs of the drive that it may use.
    pub(super) queues: u16,
    pub(super) drive: Arc<Drive>,
    /// The function alone keeps its attachment.
    attachment: Weak<Attachment>,
    pub(super) thread: FunctionThread,
}

impl Offer {
    /// Leases what the function asks for of its drive, and serves it on its socket.
    pub(super) fn new(
        declared: &DeclaredFunction,
        drive: Arc<Drive>,
        terms: &Terms,
    ) -> Result<Self, OfferError> {
        let ServedFunction {
            socket,
            mode,
            owner,
            function,
        } = &declared.function;
        let access = socket_access(*mode, owner.as_ref())?;
        let claim = access.user.map_or(Claim::Operator, Claim::For);
        let Terms {
            ledgers,
            pollers,
            stop,
            ..
        } = terms;
        let attachment = open::attach(function, &drive, &ledgers.claiming(claim), pollers, stop)?;
        let id = attachment.lease().id().to_owned();
        let extents = attachment.lease().extents();
        let queues = attachment.max_queue_pairs();
        let summary = summary(function, &drive, &attachment);
        let attachment = Arc::new(attachment);
        let weak = Arc::downgrade(&attachment);
        let device = NvmeFunction::new(attachment, MsixMasking::Client);
        let device = NvmeDevice::new(device).map_err(OfferError::Doorbells)?;
        let thread = FunctionThread::start(&id, socket, access, device)?;
        Ok(Self {
            declared: declared.clone(),
            entry: FunctionEntry {
                id,
                socket: socket.clone(),
                drive: function.path.to_string(),
                range: extents.only(),
                extents: Some(extents),
                origin: declared.origin,
                limits: function.rates.to_string(),
                state: FunctionState::Waiting,
                summary,
            },
            queues,
            drive,
            attachment: weak,
            thread,
        })
    }

    /// Ends the function. Returns the error for a person, if it did not end well.
    pub(super) fn end(self) -> Option<String> {
        let Self { entry, thread, .. } = self;
        let error = thread.end().err()?;
        Some(format!(
            "Function {} did not end well: {}",
            entry.id,
            report::chain(&error)
        ))
    }

    /// Returns whether the guest has less than `size`, and its lease no more than that.
    pub(super) fn grows_to(&self, size: Bytes) -> bool {
        // A function that has ended by itself has no lease.
        self.attachment.upgrade().is_some_and(|attachment| {
            let leased = attachment.lease().extents().length();
            attachment.stats().capacity_bytes < size.0 && leased <= size.0
        })
    }

    /// Makes the lease larger, under the guest.
    pub(super) fn grow(&mut self, size: Bytes, stop: &AtomicBool) -> Result<(), GrowError> {
        // A function that has ended by itself has no lease.
        if let Some(attachment) = self.attachment.upgrade() {
            let grown = attachment.grow(size.0, stop);
            let summary = summary(&self.declared.function.function, &self.drive, &attachment);
            self.entry
                .set_extents(attachment.lease().extents(), summary);
            grown?;
        }
        self.declared.set_size(size);
        Ok(())
    }

    /// Changes the limits, under the guest.
    pub(super) fn set_rates(&mut self, rates: RateLimits) {
        self.declared.function.function.rates = rates;
        self.entry.limits = rates.to_string();
        // A function that has ended by itself has no queues to limit.
        if let Some(attachment) = self.attachment.upgrade() {
            attachment.set_rates(rates);
        }
    }
}

/// Returns the facts of a function for a person.
fn summary(options: &FunctionOptions, drive: &Drive, attachment: &Attachment) -> String {
    let namespace = attachment.namespace();
    let contents = match &namespace.command_sets.own().contents {
        Contents::Other(name) => name.clone(),
        Contents::Blocks { .. } => format!(
            "{} blocks of {} bytes",
            attachment.stats().capacity_bytes >> namespace.lba_shift,
            1_u64 << namespace.lba_shift
        ),
    };
    let drive = match options.path {
        DrivePath::Pci(_) => format!("{} namespace {}", options.path, drive.namespace().nsid),
        _ => options.path.to_string(),
    };
    format!(
        "{drive}, range {} ({contents}); serial {}; doorbells {}, poll {}, {} queue pairs",
        attachment.lease().extents(),
        namespace.serial,
        options.doorbells,
        options.poll,
        attachment.max_queue_pairs(),
    )
}

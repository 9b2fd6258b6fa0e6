//! Interrupt routes of a function. The hypervisor's routes follow the messages that the guest writes to the MSI-X table or the
//! MSI capability. While the guest has enabled neither MSI-X nor MSI, the first vector raises the INTx pin.

use std::io;
use std::sync::Arc;

use nvme_guest::interrupt::PinDeassertion;
use vmm_device::{Bar, BarMove, MsixMessage, NvmeFunction};

use crate::report;
use crate::vmm::{IntxPin, Vmm, VmmVectors};

/// Size of an MSI-X table entry (PCI Local Bus 3.0, section 6.8.2).
const ENTRY_SIZE: u64 = 16;
/// Offset of Vector Control in an MSI-X table entry.
const VECTOR_CONTROL: u64 = 12;
/// Size in bytes of a driver's write to the MSI-X table.
const DWORD: u64 = 4;

/// Routes of one function's vectors.
#[derive(Debug)]
pub(super) struct VectorRoutes {
    vmm: Arc<dyn Vmm>,
    vectors: Box<dyn VmmVectors>,
    /// Message (address and data) of the route that the hypervisor has for each vector; `None` for a vector without a route.
    routed_messages: Vec<Option<(u64, u32)>>,
    pin: Option<Box<dyn IntxPin>>,
    /// Set while the first vector is connected to the INTx pin.
    is_pin_connected: bool,
}

/// Vector that raises the INTx pin while the guest has enabled neither MSI-X nor MSI.
const PIN_VECTOR: u16 = 0;

impl VectorRoutes {
    /// Connects the vectors of `function` to the eventfds of the VMM, and the first vector to the INTx pin if the guest uses
    /// it.
    pub(super) fn connect(
        vmm: Arc<dyn Vmm>,
        vectors: Box<dyn VmmVectors>,
        pin: Option<Box<dyn IntxPin>>,
        function: &NvmeFunction,
    ) -> io::Result<Self> {
        for (number, vector) in (0..).zip(function.vectors()) {
            vector.set_eventfd(Some(vectors.eventfd(number)?));
        }
        let mut routes = Self {
            vmm,
            vectors,
            routed_messages: vec![None; function.vectors().len()],
            pin,
            is_pin_connected: false,
        };
        routes.update_pin(function);
        Ok(routes)
    }

    /// Returns whether the first vector is connected to the INTx pin.
    pub(super) fn is_pin_connected(&self) -> bool {
        self.is_pin_connected
    }

    /// Makes the first vector raise the INTx pin while the guest has enabled neither MSI-X nor MSI. Otherwise, the vector sends
    /// its message. A restored guest gets no INTx pin if its function had none when it was saved.
    fn update_pin(&mut self, function: &NvmeFunction) {
        let may_be = function.has_pin() && !function.is_msi_or_msix_enabled();
        let wanted = self.pin.as_ref().filter(|_| may_be);
        let is_pin = wanted.is_some();
        if is_pin == self.is_pin_connected {
            return;
        }
        let eventfd = match wanted {
            Some(pin) => pin.raise_eventfd(),
            None => self.vectors.eventfd(PIN_VECTOR),
        };
        match (eventfd, function.vectors().first()) {
            (Ok(eventfd), Some(vector)) => {
                // Disconnect the present eventfd (of the pin or of the message) first, so that a pending interrupt is delivered
                // only through the new one.
                vector.set_eventfd(None);
                function.set_pin(is_pin.then_some(PinDeassertion::Acknowledgement));
                vector.set_eventfd(Some(eventfd));
                self.is_pin_connected = is_pin;
                // Reports no vCPU for the pin, since the vCPU that handles the pin's interrupts is unknown.
                self.update_vcpu_threads(function);
            }
            (Err(error), _) => {
                log::error!("The guest's controller gets no interrupts: {error}");
            }
            (_, None) => {}
        }
    }

    /// Writes to the MSI-X table. A vector's route must be set before the vector can be raised. So it is set after an unmasked
    /// message changes, and before a write of Vector Control, which may unmask the vector. A write is split into dwords, since
    /// no dword holds parts of both the message and Vector Control. Drivers must write dwords anyway (PCI Local Bus 3.0,
    /// section 6.8.2).
    pub(super) fn write_table(&mut self, function: &mut NvmeFunction, offset: u64, data: &[u8]) {
        let mut rest = data;
        let mut offset = offset;
        while !rest.is_empty() {
            let to_boundary = (DWORD - offset % DWORD) as usize;
            let (dword, later) = rest.split_at(to_boundary.min(rest.len()));
            let vector = u16::try_from(offset / ENTRY_SIZE).unwrap_or(u16::MAX);
            let is_control = offset % ENTRY_SIZE >= VECTOR_CONTROL;
            if is_control {
                self.update_route(function, vector);
            }
            function.write_bar(Bar::Msix, offset, dword);
            let unmasked = |message: MsixMessage| !message.masked;
            if !is_control && function.msix_message(vector).is_some_and(unmasked) {
                self.update_route(function, vector);
            }
            offset = offset.saturating_add(dword.len() as u64);
            rest = later;
        }
    }

    /// Writes configuration space. Such a write may change the MSI messages, enable MSI or MSI-X, or unmask a vector. All
    /// routes are set before the vector is unmasked. Returns the BARs that moved.
    pub(super) fn write_config(
        &mut self,
        function: &mut NvmeFunction,
        offset: u64,
        data: &[u8],
    ) -> Vec<BarMove> {
        function.write_config_and_route(offset, data, |function| self.update_all(function))
    }

    /// Sets the routes of all vectors that have a message, and connects or disconnects the INTx pin.
    pub(super) fn update_all(&mut self, function: &NvmeFunction) {
        for vector in 0..self.routed_messages.len() {
            // The cast keeps the value: a function has at most 128 vectors.
            let vector = vector as u16;
            let given = |message: MsixMessage| message.address != 0;
            if function.msix_message(vector).is_some_and(given) {
                self.update_route(function, vector);
            }
        }
        self.update_pin(function);
    }

    /// Asks the VMM again for the vCPU threads of all vectors that have a message.
    pub(super) fn update_vcpu_threads(&self, function: &NvmeFunction) {
        let vectors = (0..).zip(function.vectors()).zip(&self.routed_messages);
        for ((number, vector), route) in vectors {
            let is_message = number != PIN_VECTOR || !self.is_pin_connected;
            let route = route.filter(|_| is_message);
            let message = route.and_then(|_| message_for_vmm(function, number));
            vector.set_vcpu_thread(message.and_then(|message| self.vmm.vcpu_thread(message)));
        }
    }

    fn update_route(&mut self, function: &NvmeFunction, vector: u16) {
        let Some(message) = message_for_vmm(function, vector) else {
            return;
        };
        let Some(route) = self.routed_messages.get_mut(usize::from(vector)) else {
            return;
        };
        let wanted = Some((message.address, message.data));
        let moved = match *route == wanted {
            true => Ok(()),
            false => self.vectors.set_message(vector, message),
        };
        match moved {
            Ok(()) => {
                *route = wanted;
                // Look up the vCPU thread even if the message is unchanged. The vCPU may have had no thread at the last lookup,
                // for example because the guest had taken the vCPU offline.
                if let Some(vector) = function.vectors().get(usize::from(vector)) {
                    vector.set_vcpu_thread(self.vmm.vcpu_thread(message));
                }
            }
            Err(error) => log::error!(
                "Cannot change vector {vector} of the guest's controller: {}",
                report::chain(&error)
            ),
        }
    }
}

/// Returns the message of a vector as the VMM gets it: never masked. A driver unmasks the vector after it has written the message,
/// of which the VMM is not told, since the function itself holds masked vectors back.
fn message_for_vmm(function: &NvmeFunction, vector: u16) -> Option<MsixMessage> {
    let message = function.msix_message(vector)?;
    Some(MsixMessage {
        masked: false,
        ..message
    })
}

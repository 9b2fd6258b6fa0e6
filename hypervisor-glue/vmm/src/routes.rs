//! Keeps the hypervisor's interrupt routes as the guest's messages say, those of its MSI-X table or of MSI, and connects
//! the pin while the guest has enabled neither.

use std::io;
use std::sync::Arc;

use nvme_mpt::interrupt::PinFall;
use vmm_device::{Bar, BarMove, MsixMessage, NvmeFunction};

use crate::report;
use crate::vmm::{Pin, Vectors, Vmm};

/// Bytes of an MSI-X table entry (PCI Local Bus 3.0, section 6.8.2).
const ENTRY_SIZE: u64 = 16;
/// Offset of the Vector Control in it.
const VECTOR_CONTROL: u64 = 12;
/// The unit in which a driver is to write the table.
const DWORD: u64 = 4;

/// The routes of one function's vectors.
#[derive(Debug)]
pub(super) struct Routes {
    vmm: Arc<dyn Vmm>,
    vectors: Box<dyn Vectors>,
    /// The hypervisor's last routes.
    told: Vec<Option<(u64, u32)>>,
    pin: Option<Box<dyn Pin>>,
    /// True if the first vector is connected as the pin.
    is_pin: bool,
}

/// Vector that the pin takes the place of.
const PIN_VECTOR: u16 = 0;

impl Routes {
    /// Connects the vectors of `function`.
    pub(super) fn connect(
        vmm: Arc<dyn Vmm>,
        vectors: Box<dyn Vectors>,
        pin: Option<Box<dyn Pin>>,
        function: &NvmeFunction,
    ) -> io::Result<Self> {
        for (number, vector) in (0..).zip(function.vectors()) {
            vector.set_eventfd(Some(vectors.eventfd(number)?));
        }
        let mut routes = Self {
            vmm,
            vectors,
            told: vec![None; function.vectors().len()],
            pin,
            is_pin: false,
        };
        routes.follow_pin(function);
        Ok(routes)
    }

    /// Returns whether the first vector is connected as the pin.
    pub(super) fn is_pin(&self) -> bool {
        self.is_pin
    }

    /// Makes the first vector the pin while the guest has enabled no messages, and a message otherwise. A guest that was
    /// saved where it was offered no pin has none here.
    fn follow_pin(&mut self, function: &NvmeFunction) {
        let may_be = function.has_pin() && !function.sends_messages();
        let wanted = self.pin.as_ref().filter(|_| may_be);
        let is_pin = wanted.is_some();
        if is_pin == self.is_pin {
            return;
        }
        let eventfd = match wanted {
            Some(pin) => pin.raise(),
            None => self.vectors.eventfd(PIN_VECTOR),
        };
        match (eventfd, function.vectors().first()) {
            (Ok(eventfd), Some(vector)) => {
                // What is pending goes the new way alone.
                vector.set_eventfd(None);
                function.set_pin(is_pin.then_some(PinFall::Acknowledgement));
                vector.set_eventfd(Some(eventfd));
                self.is_pin = is_pin;
                // The pin leads to no vCPU that is known.
                self.find_vcpus(function);
            }
            (Err(error), _) => {
                log::error!("The guest's controller stays without interrupts: {error}");
            }
            (_, None) => {}
        }
    }

    /// Passes a write on to the MSI-X table. A vector's route is as the table says before the vector
    /// can be raised: it is set when a message changes that is not masked, and before a Vector
    /// Control is written, which may unmask it. So that no write does both, it is taken dword by
    /// dword, as the specification has drivers write them (PCI Local Bus 3.0, section 6.8.2).
    pub(super) fn write_table(&mut self, function: &mut NvmeFunction, offset: u64, data: &[u8]) {
        let mut rest = data;
        let mut offset = offset;
        while !rest.is_empty() {
            let to_boundary = (DWORD - offset % DWORD) as usize;
            let (dword, later) = rest.split_at(to_boundary.min(rest.len()));
            let vector = u16::try_from(offset / ENTRY_SIZE).unwrap_or(u16::MAX);
            let is_control = offset % ENTRY_SIZE >= VECTOR_CONTROL;
            if is_control {
                self.follow(function, vector);
            }
            function.write_bar(Bar::Msix, offset, dword);
            let unmasked = |message: MsixMessage| !message.masked;
            if !is_control && function.msix_message(vector).is_some_and(unmasked) {
                self.follow(function, vector);
            }
            offset = offset.saturating_add(dword.len() as u64);
            rest = later;
        }
    }

    /// Passes a write on to configuration space, which may change the messages of MSI, or enable them or MSI-X. All routes
    /// are as the messages say before the write unmasks a vector. Returns the BARs that moved.
    pub(super) fn write_config(
        &mut self,
        function: &mut NvmeFunction,
        offset: u64,
        data: &[u8],
    ) -> Vec<BarMove> {
        function.write_config_routed(offset, data, |function| self.follow_all(function))
    }

    /// Sets the routes of all vectors that the guest has given a message, and connects or disconnects the pin.
    pub(super) fn follow_all(&mut self, function: &NvmeFunction) {
        for vector in 0..self.told.len() {
            // At most 128.
            let vector = vector as u16;
            let given = |message: MsixMessage| message.address != 0;
            if function.msix_message(vector).is_some_and(given) {
                self.follow(function, vector);
            }
        }
        self.follow_pin(function);
    }

    /// Asks the VMM once more for the threads of the vCPUs that the messages go to.
    pub(super) fn find_vcpus(&self, function: &NvmeFunction) {
        let vectors = (0..).zip(function.vectors()).zip(&self.told);
        for ((number, vector), told) in vectors {
            let is_message = number != PIN_VECTOR || !self.is_pin;
            let told = told.filter(|_| is_message);
            let message = told.and_then(|_| function.msix_message(number));
            vector.set_vcpu_thread(message.and_then(|message| self.vmm.vcpu_thread(message)));
        }
    }

    fn follow(&mut self, function: &NvmeFunction, vector: u16) {
        let Some(message) = function.msix_message(vector) else {
            return;
        };
        let Some(told) = self.told.get_mut(usize::from(vector)) else {
            return;
        };
        let wanted = Some((message.address, message.data));
        let moved = match *told == wanted {
            true => Ok(()),
            false => self.vectors.set_message(vector, message),
        };
        match moved {
            Ok(()) => {
                *told = wanted;
                // Also of the same message: it may have led nowhere when the VMM's threads changed, as that of a processor
                // that the guest took offline.
                if let Some(vector) = function.vectors().get(usize::from(vector)) {
                    vector.set_vcpu_thread(self.vmm.vcpu_thread(message));
                }
            }
            Err(error) => log::error!(
                "Vector {vector} of the guest's controller stays where it was: {}",
                report::chain(&error)
            ),
        }
    }
}

//! What a machine without legacy hardware has beside PCI: a serial port, and power.

use std::io::{self, Stdout, Write};
use std::sync::mpsc::Sender;

use vm_device::MutDevicePio;
use vm_device::bus::{PioAddress, PioAddressOffset};
use vm_superio::serial::NoEvents;
use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::EventFd;

use super::machine::Ended;
use super::snapshot::ConsoleState;

/// SLP_TYP of soft off, as the DSDT says (ACPI 6.5, section 7.4.2.6).
pub(super) const SLEEP_TYPE_OFF: u8 = 5;
/// What resets the machine, as the FADT says (ACPI 6.5, section 4.8.3.6).
pub(super) const RESET_VALUE: u8 = 1;

/// Sleep Control Register: SLP_EN, and where SLP_TYP is (ACPI 6.5, section 4.8.3.7).
const SLEEP_ENABLE: u8 = 1 << 5;
const SLEEP_TYPE_SHIFT: u8 = 2;

/// An interrupt line that rises.
pub(super) struct Line(EventFd);

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// The serial port: what the guest says goes to standard output.
pub(super) struct Console(Serial<Line, NoEvents, Stdout>);

impl Console {
    /// One whose interrupts are signalled on `line`.
    pub(super) fn new(line: EventFd) -> Self {
        Self(Serial::new(Line(line), io::stdout()))
    }

    /// One that goes on where another one was. `None` if it never was there.
    pub(super) fn restored(line: EventFd, state: ConsoleState) -> Option<Self> {
        let state = state.into();
        let serial = Serial::from_state(&state, Line(line), NoEvents, io::stdout());
        serial.ok().map(Self)
    }

    /// Where it is.
    pub(super) fn save(&self) -> ConsoleState {
        self.0.state().into()
    }
}

impl MutDevicePio for Console {
    fn pio_read(&mut self, _: PioAddress, offset: PioAddressOffset, data: &mut [u8]) {
        data.fill(0xFF);
        if let (Ok(offset), Some(byte)) = (u8::try_from(offset), data.first_mut()) {
            *byte = self.0.read(offset);
        }
    }

    fn pio_write(&mut self, _: PioAddress, offset: PioAddressOffset, data: &[u8]) {
        let (Ok(offset), Some(byte)) = (u8::try_from(offset), data.first()) else {
            return;
        };
        // Nobody is left to be told that standard output is gone.
        let _ = self.0.write(offset, *byte);
        let _ = self.0.writer_mut().flush();
    }
}

/// Sleep control, sleep status and reset, a port each.
pub(super) struct PowerControl(pub(super) Sender<Ended>);

impl MutDevicePio for PowerControl {
    fn pio_read(&mut self, _: PioAddress, _: PioAddressOffset, data: &mut [u8]) {
        data.fill(0);
    }

    fn pio_write(&mut self, _: PioAddress, offset: PioAddressOffset, data: &[u8]) {
        const OFF: u8 = SLEEP_TYPE_OFF << SLEEP_TYPE_SHIFT | SLEEP_ENABLE;
        let ended = match (offset, data.first()) {
            (0, Some(&OFF)) => Ended::PoweredOff,
            (2, Some(&RESET_VALUE)) => Ended::Reset,
            _ => return,
        };
        // It ends once, whoever says so first.
        let _ = self.0.send(ended);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn only_soft_off_and_reset_end_the_machine() {
        let (sender, ended) = mpsc::channel();
        let mut power = PowerControl(sender);
        let mut write = |offset, data: &[u8]| power.pio_write(PioAddress(0x600), offset, data);
        write(0, &[]);
        write(0, &[SLEEP_TYPE_OFF << 2]);
        write(0, &[1 << 5]);
        write(1, &[0x34]);
        write(2, &[0]);
        write(u16::MAX, &[1]);
        assert_eq!(ended.try_recv().ok(), None);
        write(0, &[0x34]);
        assert_eq!(ended.try_recv(), Ok(Ended::PoweredOff));
        write(2, &[1]);
        assert_eq!(ended.try_recv(), Ok(Ended::Reset));
    }
}

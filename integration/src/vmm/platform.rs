//! Platform devices of a machine without legacy hardware: serial ports and power control.

use std::io::{self, Read, Write};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use vm_device::MutDevicePio;
use vm_device::bus::{PioAddress, PioAddressOffset};
use vm_superio::serial::SerialEvents;
use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::EventFd;

use super::MachineEnd;
use super::snapshot::SerialPortState;

/// Value of SLP_TYP for soft off, which the DSDT declares (ACPI 6.5, section 7.4.2.6).
pub(super) const SLEEP_TYPE_OFF: u8 = 5;
/// Value that resets the machine, which the FADT declares (ACPI 6.5, section 4.8.3.6).
pub(super) const RESET_VALUE: u8 = 1;

/// Bits of the Sleep Control Register: SLP_EN, and the position of SLP_TYP (ACPI 6.5, section 4.8.3.7).
const SLEEP_ENABLE: u8 = 1 << 5;
const SLEEP_TYPE_SHIFT: u8 = 2;

/// Offsets of the Interrupt Enable, Interrupt Identification and Line Status Registers, and the bit Data Ready of the last.
const IER: u8 = 1;
const IIR: u8 = 2;
const LSR: u8 = 5;
const LSR_DATA_READY: u8 = 1 << 0;

/// An edge-triggered interrupt line.
pub(super) struct InterruptLine(EventFd);

impl Trigger for InterruptLine {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Wakes a thread that waits for space in a port: see [`SerialPort::feed`].
struct SpaceWaker(Arc<Condvar>);

impl SerialEvents for SpaceWaker {
    fn buffer_read(&self) {}

    fn out_byte(&self) {}

    fn tx_lost_byte(&self) {}

    fn in_buffer_empty(&self) {
        self.0.notify_all();
    }
}

/// A serial port, and the writer for its output.
pub(super) struct SerialPort {
    serial: Serial<InterruptLine, SpaceWaker, Box<dyn Write + Send>>,
    space: Arc<Condvar>,
}

impl SerialPort {
    /// Creates a serial port that raises interrupts on `line`. If there is a saved state, restores it; returns `None` if it
    /// is invalid.
    pub(super) fn new(
        line: EventFd,
        writer: Box<dyn Write + Send>,
        state: Option<SerialPortState>,
    ) -> Option<Self> {
        let space = Arc::new(Condvar::new());
        let (line, events) = (InterruptLine(line), SpaceWaker(space.clone()));
        let serial = match state {
            Some(state) => Serial::from_state(&state.into(), line, events, writer).ok()?,
            None => Serial::with_events(line, events, writer),
        };
        Some(Self { serial, space })
    }

    /// Returns the port's state.
    pub(super) fn save(&self) -> SerialPortState {
        self.serial.state().into()
    }

    /// Raises the interrupt again while there is data, as a UART does (16550D data sheet, section 8.5). The emulated port
    /// clears the interrupt when the first byte is read. So a guest that reads a limited number of bytes per interrupt
    /// would not read the remaining bytes.
    fn raise_if_data(&mut self) {
        if self.serial.read(LSR) & LSR_DATA_READY != 0 {
            let enabled = self.serial.read(IER);
            // When an interrupt is enabled whose cause is present, the port raises it.
            let _ = self.serial.write(IER, enabled);
        }
    }

    /// Sends all input of `reader` to the guest. Waits while the port has no space.
    pub(super) fn feed(port: &Mutex<Self>, mut reader: impl Read) {
        let mut bytes = [0; 64];
        loop {
            let mut piece = match reader.read(&mut bytes) {
                Ok(0) | Err(_) => return,
                Ok(len) => &bytes[..len],
            };
            let mut port = port.lock().unwrap_or_else(PoisonError::into_inner);
            while !piece.is_empty() {
                let space = port.space.clone();
                port = space
                    .wait_while(port, |port| port.serial.fifo_capacity() == 0)
                    .unwrap_or_else(PoisonError::into_inner);
                match port.serial.enqueue_raw_bytes(piece) {
                    // In loopback mode, the port accepts no input.
                    Ok(0) | Err(_) => break,
                    Ok(taken) => piece = &piece[taken..],
                }
            }
        }
    }
}

impl MutDevicePio for SerialPort {
    fn pio_read(&mut self, _: PioAddress, offset: PioAddressOffset, data: &mut [u8]) {
        data.fill(0xFF);
        if let (Ok(offset), Some(byte)) = (u8::try_from(offset), data.first_mut()) {
            if offset == IIR {
                self.raise_if_data();
            }
            *byte = self.serial.read(offset);
        }
    }

    fn pio_write(&mut self, _: PioAddress, offset: PioAddressOffset, data: &[u8]) {
        let (Ok(offset), Some(byte)) = (u8::try_from(offset), data.first()) else {
            return;
        };
        // Errors of the writer are ignored, as there is no way to handle them.
        let _ = self.serial.write(offset, *byte);
        let _ = self.serial.writer_mut().flush();
    }
}

/// Sleep control, sleep status and reset registers, one port each.
pub(super) struct PowerControl(pub(super) Sender<MachineEnd>);

impl MutDevicePio for PowerControl {
    fn pio_read(&mut self, _: PioAddress, _: PioAddressOffset, data: &mut [u8]) {
        data.fill(0);
    }

    fn pio_write(&mut self, _: PioAddress, offset: PioAddressOffset, data: &[u8]) {
        const OFF: u8 = SLEEP_TYPE_OFF << SLEEP_TYPE_SHIFT | SLEEP_ENABLE;
        let ended = match (offset, data.first()) {
            (0, Some(&OFF)) => MachineEnd::PoweredOff,
            (2, Some(&RESET_VALUE)) => MachineEnd::Reset,
            _ => return,
        };
        // Only the first reason of the end counts. Later ones are dropped.
        let _ = self.0.send(ended);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_serial_port_accepts_input_as_fast_as_the_guest_reads() {
        const SENT: usize = 1000;
        const LINE_STATUS: u16 = 5;
        const DATA_READY: u8 = 1;
        let line = EventFd::new(libc::EFD_NONBLOCK).expect("eventfd");
        let port = SerialPort::new(line, Box::new(io::sink()), None).expect("port");
        let port = Arc::new(Mutex::new(port));
        let sent: Vec<u8> = (0..SENT).map(|byte| byte as u8).collect();
        let feeder = std::thread::spawn({
            let (port, sent) = (port.clone(), sent.clone());
            move || SerialPort::feed(&port, Cursor::new(sent))
        });
        let read = |offset| {
            let mut byte = [0];
            let mut port = port.lock().expect("port");
            port.pio_read(PioAddress(0x2F8), offset, &mut byte);
            byte[0]
        };
        let mut received = Vec::new();
        while received.len() < SENT {
            if read(LINE_STATUS) & DATA_READY == 0 {
                std::thread::sleep(std::time::Duration::from_micros(20));
            } else {
                received.push(read(0));
            }
        }
        feeder.join().expect("feeder");
        assert_eq!(received, sent);
        assert_eq!(read(LINE_STATUS) & DATA_READY, 0);
    }

    /// Linux reads the cause in the IIR, then at most 256 bytes, then the IIR again.
    #[test]
    fn unread_serial_data_raises_its_cause_again() {
        const IER_DATA: u8 = 1 << 0;
        const IIR_CAUSE: u8 = 0b1111;
        const IIR_DATA: u8 = 0b0100;
        const IIR_NONE: u8 = 0b0001;
        let line = EventFd::new(libc::EFD_NONBLOCK).expect("eventfd");
        let mut port = SerialPort::new(line, Box::new(io::sink()), None).expect("port");
        let read = |port: &mut SerialPort, offset: u8| {
            let mut byte = [0];
            port.pio_read(PioAddress(0x2F8), offset.into(), &mut byte);
            byte[0]
        };
        let cause = |port: &mut SerialPort| read(port, IIR) & IIR_CAUSE;
        port.pio_write(PioAddress(0x2F8), IER.into(), &[IER_DATA]);
        assert_eq!(port.serial.enqueue_raw_bytes(b"abc").expect("room"), 3);
        assert_eq!(cause(&mut port), IIR_DATA);
        assert_eq!(read(&mut port, 0), b'a');
        // Another byte arrives while the guest reads. The next read clears the interrupt that reports this byte.
        assert_eq!(port.serial.enqueue_raw_bytes(b"d").expect("room"), 1);
        assert_eq!(read(&mut port, 0), b'b');
        assert_eq!(cause(&mut port), IIR_DATA);
        assert_eq!([read(&mut port, 0), read(&mut port, 0)], *b"cd");
        assert_eq!(cause(&mut port), IIR_NONE);
    }

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
        assert_eq!(ended.try_recv(), Ok(MachineEnd::PoweredOff));
        write(2, &[1]);
        assert_eq!(ended.try_recv(), Ok(MachineEnd::Reset));
    }
}

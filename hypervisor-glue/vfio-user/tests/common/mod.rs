//! A device without regions, and raw messages of a client.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;

use vfio_user_server::{
    DeviceRegion, DmaRegion, IrqCommand, IrqIndex, IrqInfo, RegionIndex, VfioUserDevice,
};

/// A device without regions and interrupts.
pub(crate) struct Nothing;

impl VfioUserDevice for Nothing {
    fn region(&self, _: RegionIndex) -> DeviceRegion {
        DeviceRegion::default()
    }
    fn read(&mut self, _: RegionIndex, _: u64, _: &mut [u8]) {}
    fn write(&mut self, _: RegionIndex, _: u64, _: &[u8]) {}
    fn dma_map(&mut self, _: DmaRegion) -> io::Result<()> {
        Ok(())
    }
    fn dma_unmap(&mut self, _: Option<(u64, u64)>) -> io::Result<u64> {
        Ok(0)
    }
    fn irq(&self, _: IrqIndex) -> IrqInfo {
        IrqInfo::default()
    }
    fn set_irqs(&mut self, _: IrqCommand) -> io::Result<()> {
        Ok(())
    }
    fn reset(&mut self) {}
    fn on_disconnected(&mut self) {}
}

/// A `VERSION` message for 0.1, without version data.
pub(crate) const VERSION: [u8; 20] = [1, 0, 1, 0, 20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0];

/// A `DEVICE_RESET` message.
pub(crate) const RESET: [u8; 16] = [2, 0, 13, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Reads a reply, and returns its errno.
pub(crate) fn read_reply(mut stream: &UnixStream) -> u32 {
    let mut header = [0; 16];
    stream.read_exact(&mut header).unwrap();
    let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
    io::copy(&mut stream.take(u64::from(word(4)) - 16), &mut io::sink()).unwrap();
    word(12)
}

//! Devices that stand for quarantined functions, so that their clients stay connected.

use std::io;
use std::os::fd::BorrowedFd;

use nvme_mpt_memory::crash::CrashRecord;
use vfio_user_server::{
    DeviceRegion, DmaRegion, IrqCommand, IrqIndex, IrqInfo, RegionIndex, VfioUserDevice,
};
use vmm_device::NvmeFunction;

use crate::nvme_device::{ControlledDevice, NvmeDevice};
use crate::persistence::persisted_function::FdStoreKey;
use crate::stats::GuestPause;

/// A quarantined function as a vfio-user device.
///
/// The client stays connected, but the device ignores its requests about memory and interrupts. The state that the
/// supervisor stores for the function stays unchanged.
#[derive(Debug)]
pub(crate) struct QuarantinedDevice {
    device: NvmeDevice,
    store_key: FdStoreKey,
    crash_record: CrashRecord,
}

impl QuarantinedDevice {
    /// Wraps a device whose function is [quarantined](NvmeFunction::quarantine).
    pub(crate) fn new(device: NvmeDevice, store_key: FdStoreKey, crashes: CrashRecord) -> Self {
        Self {
            device,
            store_key,
            crash_record: crashes,
        }
    }
}

impl ControlledDevice for QuarantinedDevice {
    fn function(&self) -> &NvmeFunction {
        self.device.function()
    }

    fn function_mut(&mut self) -> &mut NvmeFunction {
        self.device.function_mut()
    }

    fn forget_persisted(&self) {
        self.store_key.forget();
    }

    fn guest_pause(&self) -> Option<GuestPause> {
        None
    }

    fn crash_record(&self) -> Option<CrashRecord> {
        Some(self.crash_record.clone())
    }
}

impl VfioUserDevice for QuarantinedDevice {
    fn region(&self, index: RegionIndex) -> DeviceRegion {
        self.device.region(index)
    }

    fn read(&mut self, region: RegionIndex, offset: u64, data: &mut [u8]) {
        self.device.read(region, offset, data);
    }

    fn write(&mut self, region: RegionIndex, offset: u64, data: &[u8]) {
        self.device.write(region, offset, data);
    }

    fn max_dma_maps(&self) -> u32 {
        self.device.max_dma_maps()
    }

    fn dma_map(&mut self, _: DmaRegion) -> io::Result<()> {
        Ok(())
    }

    fn dma_unmap(&mut self, _: Option<(u64, u64)>) -> io::Result<u64> {
        Ok(0)
    }

    fn irq(&self, index: IrqIndex) -> IrqInfo {
        self.device.irq(index)
    }

    fn set_irqs(&mut self, _: IrqCommand) -> io::Result<()> {
        Ok(())
    }

    fn reset(&mut self) {
        self.device.reset();
    }

    fn persist_client(&mut self, _: BorrowedFd<'_>) -> io::Result<()> {
        let reason = "the function is quarantined; `nvme-mpt list` has the remedy";
        Err(io::Error::other(reason))
    }

    fn on_disconnected(&mut self) {}
}

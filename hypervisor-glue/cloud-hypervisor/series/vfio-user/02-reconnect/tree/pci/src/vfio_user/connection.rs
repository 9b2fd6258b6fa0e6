// SPDX-License-Identifier: Apache-2.0

//! Connection of a vfio-user device, which outlives its server.
//!
//! While the server is away, reads return all ones and writes are dropped, as
//! for a PCI device that does not answer. A thread connects to the socket
//! again, and gives the new server what the old one had: the DMA map, the
//! interrupts, and the command register.

use std::collections::BTreeMap;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::Duration;
use std::{fmt, io, thread};

use log::{error, warn};
use thiserror::Error;
use vfio_bindings::bindings::vfio::*;
use vfio_ioctls::VfioIrq;
use vfio_user::{Client, Error as VfioUserError, IrqInfo, Region};
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{Address, FileOffset, GuestMemoryRegion, GuestRegionMmap};
use vmm_sys_util::eventfd::EventFd;

use super::{VfioUserClientWrapper, VfioUserPciDevice, VfioUserPciDeviceError};
use crate::VfioPciError;
use crate::configuration::COMMAND_REG;
use crate::vfio::{Vfio, VfioCommon, VfioError};

/// A guest that does not access its device learns after this time at most that
/// the server has gone. The client has no file descriptor to wait for.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);
const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(50);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(1);

const COMMAND_OFFSET: u64 = (COMMAND_REG * 4) as u64;
const CLASS_OFFSET: u64 = 0x8;
/// The revision, which a newer server may change, is no part of the class.
const CLASS_MASK: u32 = 0xffff_ff00;

#[derive(Error, Debug)]
enum ReconnectError {
    #[error("Failed to connect")]
    Connect(#[source] VfioUserError),
    #[error("Server has another device: {0}, not {1}")]
    Identity(DeviceIdentity, DeviceIdentity),
    #[error("Server has another region {0}: {1}, not {2}")]
    Region(u32, String, String),
    #[error("Server has another IRQ {0}: {1}, not {2}")]
    Irq(u32, IrqProperties, IrqProperties),
    #[error("Failed to DMA map")]
    DmaMap(#[source] VfioUserError),
    #[error("Failed to restore interrupts")]
    Interrupts(#[source] VfioPciError),
    #[error("Failed to map regions")]
    MapRegions(#[source] VfioUserPciDeviceError),
    #[error("Request to the server failed")]
    Request(#[source] VfioUserError),
    #[error("Server has gone again")]
    Lost,
}

/// Vendor and device ID, and class code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DeviceIdentity {
    vendor_device: u32,
    class: u32,
}

impl fmt::Display for DeviceIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (device, vendor) = (self.vendor_device >> 16, self.vendor_device & 0xffff);
        write!(f, "{vendor:04x}:{device:04x}, class {:06x}", self.class >> 8)
    }
}

impl DeviceIdentity {
    fn read(client: &mut Client) -> Result<Self, VfioUserError> {
        let mut read = |offset| {
            let mut data = [0; 4];
            client.region_read(VFIO_PCI_CONFIG_REGION_INDEX, offset, &mut data)?;
            Ok(u32::from_le_bytes(data))
        };
        Ok(Self {
            vendor_device: read(0)?,
            class: read(CLASS_OFFSET)? & CLASS_MASK,
        })
    }
}

/// Flags and number of interrupts of an IRQ index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct IrqProperties {
    flags: u32,
    count: u32,
}

impl fmt::Display for IrqProperties {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} interrupts, flags {:#x}", self.count, self.flags)
    }
}

impl From<IrqInfo> for IrqProperties {
    fn from(info: IrqInfo) -> Self {
        Self {
            flags: info.flags,
            count: info.count,
        }
    }
}

/// Part of the DMA map, by its IOVA.
#[derive(Clone, Debug)]
pub(super) struct DmaRange {
    pub(super) size: u64,
    pub(super) file: FileOffset,
}

/// Removes a part of a DMA map, which may be a part of a range.
fn remove_range(ranges: &mut BTreeMap<u64, DmaRange>, iova: u64, size: u64) {
    let end = iova.saturating_add(size);
    let overlapping: Vec<_> = ranges
        .range(..end)
        .filter(|(start, range)| start.saturating_add(range.size) > iova)
        .map(|(start, _)| *start)
        .collect();
    for start in overlapping {
        let Some(range) = ranges.remove(&start) else {
            continue;
        };
        let range_end = start.saturating_add(range.size);
        for (from, to) in [(start, iova), (end, range_end)] {
            if from < to {
                let offset = range.file.start() + (from - start);
                let file = FileOffset::from_arc(range.file.arc().clone(), offset);
                let size = to - from;
                ranges.insert(from, DmaRange { size, file });
            }
        }
    }
}

#[derive(Default)]
struct State {
    is_lost: bool,
    /// True if regions are mapped from files of an earlier server.
    has_old_mappings: bool,
    /// Last value of the command register that was written.
    command: [Option<u8>; 2],
    /// IRQs that the device was asked for.
    irqs: BTreeMap<u32, IrqProperties>,
}

/// Connection of a vfio-user device. Locks are taken in this order: the device,
/// the DMA map, the client, the state.
pub(super) struct VfioUserConnection {
    id: String,
    client: Arc<Mutex<Client>>,
    identity: Option<DeviceIdentity>,
    dma_map: Mutex<BTreeMap<u64, DmaRange>>,
    state: Mutex<State>,
    lost: Condvar,
}

impl VfioUserConnection {
    pub(super) fn new(id: String, client: Arc<Mutex<Client>>) -> Self {
        let identity = DeviceIdentity::read(&mut client.lock().unwrap()).ok();
        Self {
            id,
            client,
            identity,
            dma_map: Mutex::default(),
            state: Mutex::default(),
            lost: Condvar::new(),
        }
    }

    fn is_lost(&self) -> bool {
        self.state.lock().unwrap().is_lost
    }

    /// Notes an error of the client. Returns whether the server has gone.
    fn report(&self, e: &VfioUserError) -> bool {
        if !is_end_of_connection(e) {
            error!("Request to the vfio-user server of device {} failed: {e}", self.id);
            return false;
        }
        let mut state = self.state.lock().unwrap();
        if !state.is_lost {
            warn!("vfio-user server of device {} has gone: {e}", self.id);
            state.is_lost = true;
            self.lost.notify_all();
        }
        true
    }

    /// Sends a request. Returns `None` if the server has gone.
    fn request<T>(
        &self,
        send: impl FnOnce(&mut Client) -> Result<T, VfioUserError>,
    ) -> Option<T> {
        if self.is_lost() {
            return None;
        }
        let result = send(&mut self.client.lock().unwrap());
        result.inspect_err(|e| _ = self.report(e)).ok()
    }

    /// Checks whether the server is still there, by a request without effect.
    fn probe(&self) -> bool {
        self.request(|client| client.get_irq_info(VFIO_PCI_INTX_IRQ_INDEX));
        !self.is_lost()
    }

    /// Adds to the DMA map. `send` does so at the server.
    pub(super) fn map_dma<E>(
        &self,
        iova: u64,
        range: DmaRange,
        send: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let mut dma_map = self.dma_map.lock().unwrap();
        self.send_dma(send)?;
        dma_map.insert(iova, range);
        Ok(())
    }

    /// Removes from the DMA map. `send` does so at the server.
    pub(super) fn unmap_dma<E>(
        &self,
        iova: u64,
        size: u64,
        send: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let mut dma_map = self.dma_map.lock().unwrap();
        self.send_dma(send)?;
        remove_range(&mut dma_map, iova, size);
        Ok(())
    }

    /// A server that has gone gets the whole map when it is back.
    fn send_dma<E>(&self, send: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        if self.is_lost() {
            return Ok(());
        }
        send().or_else(|e| if self.probe() { Err(e) } else { Ok(()) })
    }

    /// Checks that a new server has the same device.
    fn check(&self, client: &mut Client) -> Result<(), ReconnectError> {
        for index in 0..VFIO_PCI_NUM_REGIONS {
            let old = describe(self.client.lock().unwrap().region(index));
            let new = describe(client.region(index));
            if old != new {
                return Err(ReconnectError::Region(index, new, old));
            }
        }
        let irqs = self.state.lock().unwrap().irqs.clone();
        for (index, old) in irqs {
            let new = client.get_irq_info(index);
            let new = new.map_err(ReconnectError::Request)?.into();
            if old != new {
                return Err(ReconnectError::Irq(index, new, old));
            }
        }
        if let Some(old) = self.identity {
            let new =
                DeviceIdentity::read(client).map_err(ReconnectError::Request)?;
            if old != new {
                return Err(ReconnectError::Identity(new, old));
            }
        }
        Ok(())
    }

    /// Replaces the client, and gives the new server what the old one had. The
    /// device must be locked, so that no request of the guest comes between.
    fn restore(&self, mut client: Client, common: &VfioCommon) -> Result<(), ReconnectError> {
        {
            let dma_map = self.dma_map.lock().unwrap();
            for (iova, range) in dma_map.iter() {
                let fd = range.file.file().as_raw_fd();
                client
                    .dma_map(range.file.start(), *iova, range.size, fd)
                    .map_err(ReconnectError::DmaMap)?;
            }
            let mut old = self.client.lock().unwrap();
            let has_other_files =
                (0..VFIO_PCI_NUM_REGIONS).any(|i| file_of(old.region(i)) != file_of(client.region(i)));
            *old = client;
            let mut state = self.state.lock().unwrap();
            state.is_lost = false;
            state.has_old_mappings |= has_other_files;
        }

        // The interrupts come first: a device may send one once it may access memory.
        common
            .restore_interrupts()
            .map_err(ReconnectError::Interrupts)?;
        let command = self.state.lock().unwrap().command;
        for (offset, byte) in (COMMAND_OFFSET..).zip(command) {
            if let Some(byte) = byte {
                self.request(|client| {
                    client.region_write(VFIO_PCI_CONFIG_REGION_INDEX, offset, &[byte])
                });
            }
        }
        if self.is_lost() {
            return Err(ReconnectError::Lost);
        }
        Ok(())
    }

    /// Has the thread connect again after a server that could not be used.
    fn give_up(&self) {
        self.state.lock().unwrap().is_lost = true;
        // It may have gone by itself.
        let _ = self.client.lock().unwrap().shutdown();
    }

    /// Connects to the socket again each time that the server has gone.
    /// `is_removed` ends this, and `resume` gives a new client to the device.
    fn run(
        &self,
        socket: &Path,
        is_removed: impl Fn() -> bool,
        resume: impl Fn(Client) -> Result<(), ReconnectError>,
    ) {
        let (mut interval, mut last_error) = (MIN_RETRY_INTERVAL, String::new());
        loop {
            self.wait_for_loss();
            if is_removed() {
                return;
            }
            if !self.is_lost() {
                if self.probe() {
                    interval = MIN_RETRY_INTERVAL;
                }
                continue;
            }
            thread::sleep(interval);
            interval = MAX_RETRY_INTERVAL.min(interval * 2);
            let result = Client::new(socket)
                .map_err(ReconnectError::Connect)
                .and_then(|mut client| self.check(&mut client).map(|()| client))
                .and_then(&resume);
            match result {
                _ if is_removed() => return,
                Ok(()) => {
                    warn!("vfio-user server of device {} is back", self.id);
                    last_error.clear();
                }
                Err(e) => {
                    let error = format!("{:#}", anyhow::Error::from(e));
                    // It is logged once, not at each attempt.
                    if error != last_error {
                        warn!(
                            "vfio-user device {} cannot use a server at {}, trying again: {error}",
                            self.id,
                            socket.display()
                        );
                        last_error = error;
                    }
                }
            }
        }
    }

    fn wait_for_loss(&self) {
        let state = self.state.lock().unwrap();
        let wait = self
            .lost
            .wait_timeout_while(state, PROBE_INTERVAL, |state| !state.is_lost);
        drop(wait.unwrap());
    }
}

/// Describes the properties of a region that a guest relies on.
fn describe(region: Option<&Region>) -> String {
    let Some(region) = region else {
        return "none".to_owned();
    };
    let areas: Vec<_> = region
        .sparse_areas
        .iter()
        .map(|area| format!("{:#x}+{:#x}", area.offset, area.size))
        .collect();
    format!("{:#x} bytes, flags {:#x}, mappable {areas:?}", region.size, region.flags)
}

/// Returns what identifies the file of a region that can be mapped.
fn file_of(region: Option<&Region>) -> Option<(u64, u64, u64)> {
    let file = region?.file_offset.as_ref()?;
    let status = file.file().metadata().ok()?;
    Some((status.dev(), status.ino(), file.start()))
}

fn is_end_of_connection(e: &VfioUserError) -> bool {
    let e = match e {
        VfioUserError::StreamRead(e) | VfioUserError::StreamWrite(e) => e.kind(),
        VfioUserError::SendWithFd(e) | VfioUserError::ReceiveWithFd(e) => {
            io::Error::from_raw_os_error(e.errno()).kind()
        }
        _ => return false,
    };
    matches!(
        e,
        io::ErrorKind::UnexpectedEof
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::NotConnected
    )
}

/// Client of a server that may go and come back.
pub(super) struct ReconnectingClientWrapper {
    inner: VfioUserClientWrapper,
    connection: Arc<VfioUserConnection>,
}

impl ReconnectingClientWrapper {
    pub(super) fn new(inner: VfioUserClientWrapper, connection: Arc<VfioUserConnection>) -> Self {
        Self { inner, connection }
    }

    /// Changes an interrupt. A server that has gone gets the interrupts as they
    /// are when it is back.
    fn change_irq(
        &self,
        change: impl FnOnce(&VfioUserClientWrapper) -> Result<(), VfioError>,
    ) -> Result<(), VfioError> {
        if self.connection.is_lost() {
            return Ok(());
        }
        match change(&self.inner) {
            Err(VfioError::VfioUser(e)) if self.connection.report(&e) => Ok(()),
            result => result,
        }
    }
}

impl Vfio for ReconnectingClientWrapper {
    fn region_read(&self, index: u32, offset: u64, data: &mut [u8]) {
        let read = self
            .connection
            .request(|client| client.region_read(index, offset, data));
        if read.is_none() {
            data.fill(0xff);
        }
    }

    fn region_write(&self, index: u32, offset: u64, data: &[u8]) {
        if index == VFIO_PCI_CONFIG_REGION_INDEX {
            let mut state = self.connection.state.lock().unwrap();
            for (offset, byte) in (offset..).zip(data) {
                let at = offset.checked_sub(COMMAND_OFFSET).map(|at| at as usize);
                if let Some(command) = at.and_then(|at| state.command.get_mut(at)) {
                    *command = Some(*byte);
                }
            }
        }
        self.connection
            .request(|client| client.region_write(index, offset, data));
    }

    fn get_irq_info(&self, irq_index: u32) -> Option<VfioIrq> {
        let info = self
            .connection
            .request(|client| client.get_irq_info(irq_index))?;
        let mut state = self.connection.state.lock().unwrap();
        state.irqs.insert(irq_index, info.into());
        Some(VfioIrq {
            index: info.index,
            flags: info.flags,
            count: info.count,
        })
    }

    fn enable_irq(&self, irq_index: u32, event_fds: Vec<&EventFd>) -> Result<(), VfioError> {
        self.change_irq(|inner| inner.enable_irq(irq_index, event_fds))
    }

    fn disable_irq(&self, irq_index: u32) -> Result<(), VfioError> {
        self.change_irq(|inner| inner.disable_irq(irq_index))
    }

    fn unmask_irq(&self, irq_index: u32) -> Result<(), VfioError> {
        self.change_irq(|inner| inner.unmask_irq(irq_index))
    }
}

impl VfioUserPciDevice {
    pub fn dma_map(
        &mut self,
        region: &GuestRegionMmap<AtomicBitmap>,
    ) -> Result<(), VfioUserPciDeviceError> {
        let Some(file) = region.file_offset().cloned() else {
            return Ok(());
        };
        let range = DmaRange {
            size: region.len(),
            file,
        };
        let connection = Arc::clone(&self.connection);
        connection.map_dma(region.start_addr().raw_value(), range, || {
            self.dma_map_at_server(region)
        })
    }

    pub fn dma_unmap(
        &mut self,
        region: &GuestRegionMmap<AtomicBitmap>,
    ) -> Result<(), VfioUserPciDeviceError> {
        let connection = Arc::clone(&self.connection);
        connection.unmap_dma(region.start_addr().raw_value(), region.len(), || {
            self.dma_unmap_at_server(region)
        })
    }

    /// Connects to the socket again each time that the server has gone, until
    /// the device is removed. This is for a thread of its own.
    pub fn keep_connected(device: &Weak<Mutex<Self>>, socket: &Path) {
        let Some(strong) = device.upgrade() else {
            return;
        };
        let connection = Arc::clone(&strong.lock().unwrap().connection);
        drop(strong);
        let is_removed = || device.strong_count() == 0;
        connection.run(socket, is_removed, |client| match device.upgrade() {
            Some(device) => device.lock().unwrap().resume(client),
            None => Ok(()),
        });
    }

    fn resume(&mut self, client: Client) -> Result<(), ReconnectError> {
        let connection = Arc::clone(&self.connection);
        let restored = connection
            .restore(client, &self.common)
            .and_then(|()| self.replace_mappings());
        restored.inspect_err(|_| connection.give_up())
    }

    /// Maps regions whose files are not those of the server before.
    fn replace_mappings(&mut self) -> Result<(), ReconnectError> {
        if !self.connection.state.lock().unwrap().has_old_mappings {
            return Ok(());
        }
        self.unmap_mmio_regions();
        self.map_mmio_regions()
            .map_err(ReconnectError::MapRegions)?;
        self.connection.state.lock().unwrap().has_old_mappings = false;
        Ok(())
    }
}

#[cfg(test)]
mod unit_tests {
    use std::fs::File;
    use std::panic::resume_unwind;
    use std::path::PathBuf;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread::JoinHandle;

    use vfio_user::{DmaMapFlags, DmaUnmapFlags, Server, ServerBackend, ServerRegion};
    use vm_device::interrupt::{
        InterruptIndex, InterruptManager, InterruptSourceConfig, InterruptSourceGroup,
        MsiIrqGroupConfig,
    };
    use vmm_sys_util::tempdir::TempDir;
    use vmm_sys_util::tempfile::TempFile;

    use super::super::PciVfioUserSubclass;
    use super::*;
    use crate::vfio::VfioCommonConfig;

    const BAR: u32 = VFIO_PCI_BAR0_REGION_INDEX;
    const CONFIG: u32 = VFIO_PCI_CONFIG_REGION_INDEX;
    /// A write to this offset of the BAR ends the server.
    const CRASH_OFFSET: u64 = 0x80;
    const MSIX_CAP: u8 = 0x40;
    const MSIX_CONTROL: u64 = MSIX_CAP as u64 + 2;
    const MSIX_VECTORS: u16 = 3;
    const MSIX_ENABLE: u16 = 1 << 15;

    #[derive(Debug, PartialEq, Eq)]
    enum Event {
        Write(u32, u64, Vec<u8>),
        Map(u64, u64, u64),
        Unmap(u64, u64),
        SetIrqs(u32, u32, usize),
        Reset,
    }

    struct Backend {
        config: [u8; 256],
        events: Sender<Event>,
    }

    impl Backend {
        fn send(&self, event: Event) {
            let _ = self.events.send(event);
        }
    }

    impl ServerBackend for Backend {
        fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()> {
            match region {
                CONFIG => {
                    let start = offset as usize;
                    data.copy_from_slice(&self.config[start..start + data.len()]);
                }
                _ => data.fill(0x5a),
            }
            Ok(())
        }

        fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> io::Result<()> {
            if (region, offset) == (BAR, CRASH_OFFSET) {
                // The connection is closed without a reply, and no message is printed.
                resume_unwind(Box::new(()));
            }
            self.send(Event::Write(region, offset, data.to_vec()));
            Ok(())
        }

        fn dma_map(
            &mut self,
            _: DmaMapFlags,
            offset: u64,
            address: u64,
            size: u64,
            fd: Option<File>,
        ) -> io::Result<()> {
            assert!(fd.is_some());
            self.send(Event::Map(offset, address, size));
            Ok(())
        }

        fn dma_unmap(&mut self, _: DmaUnmapFlags, address: u64, size: u64) -> io::Result<()> {
            self.send(Event::Unmap(address, size));
            Ok(())
        }

        fn reset(&mut self) -> io::Result<()> {
            self.send(Event::Reset);
            Ok(())
        }

        fn set_irqs(
            &mut self,
            index: u32,
            _flags: u32,
            start: u32,
            count: u32,
            fds: Vec<File>,
        ) -> io::Result<()> {
            assert_eq!(start, 0);
            self.send(Event::SetIrqs(index, count, fds.len()));
            Ok(())
        }
    }

    /// Device with a BAR and MSI-X, of a server that runs in a thread.
    #[derive(Clone)]
    struct TestDevice {
        device_id: u16,
        bar_size: u64,
        msix_vectors: u32,
    }

    impl Default for TestDevice {
        fn default() -> Self {
            Self {
                device_id: 0x1000,
                bar_size: 0x1000,
                msix_vectors: u32::from(MSIX_VECTORS),
            }
        }
    }

    struct TestServer {
        thread: JoinHandle<()>,
        events: Receiver<Event>,
    }

    impl TestServer {
        fn start(socket: &Path, device: &TestDevice) -> Self {
            let mut config = [0; 256];
            config[0..2].copy_from_slice(&0x1b36_u16.to_le_bytes());
            config[2..4].copy_from_slice(&device.device_id.to_le_bytes());
            // The status has the bit for a list of capabilities.
            config[6] = 1 << 4;
            config[0x34] = MSIX_CAP;
            let cap = usize::from(MSIX_CAP);
            config[cap] = 0x11;
            config[cap + 2..cap + 4].copy_from_slice(&(MSIX_VECTORS - 1).to_le_bytes());

            let regions = (0..VFIO_PCI_NUM_REGIONS).map(|index| ServerRegion {
                region_info: vfio_region_info {
                    argsz: size_of::<vfio_region_info>() as u32,
                    flags: VFIO_REGION_INFO_FLAG_READ | VFIO_REGION_INFO_FLAG_WRITE,
                    index,
                    size: match index {
                        BAR => device.bar_size,
                        CONFIG => 256,
                        _ => 0,
                    },
                    ..Default::default()
                },
                sparse_areas: Vec::new(),
                mmap_fd: None,
            });
            let irqs = (0..VFIO_PCI_NUM_IRQS).map(|index| IrqInfo {
                index,
                flags: VFIO_IRQ_INFO_EVENTFD,
                count: match index {
                    VFIO_PCI_INTX_IRQ_INDEX => 1,
                    VFIO_PCI_MSIX_IRQ_INDEX => device.msix_vectors,
                    _ => 0,
                },
            });
            let server = Server::new(socket, false, irqs.collect(), regions.collect()).unwrap();
            let (sender, events) = channel();
            let mut backend = Backend {
                config,
                events: sender,
            };
            let thread = thread::spawn(move || server.run(&mut backend).unwrap());
            Self { thread, events }
        }

        /// Returns the next events, of which there must be as many.
        fn next(&self, number: usize) -> Vec<Event> {
            let next = || self.events.recv_timeout(Duration::from_secs(20)).unwrap();
            (0..number).map(|_| next()).collect()
        }

        fn has_no_more_events(&self) -> bool {
            self.events.try_recv().is_err()
        }

        fn crash(self, common: &VfioCommon) {
            common.vfio_wrapper.region_write(BAR, CRASH_OFFSET, &[1]);
            self.thread.join().unwrap_err();
        }
    }

    struct TestInterrupts(Vec<EventFd>);

    impl TestInterrupts {
        fn new(count: InterruptIndex) -> Self {
            Self((0..count).map(|_| EventFd::new(0).unwrap()).collect())
        }
    }

    impl InterruptSourceGroup for TestInterrupts {
        fn trigger(&self, _: InterruptIndex) -> io::Result<()> {
            Ok(())
        }

        fn notifier(&self, index: InterruptIndex) -> Option<EventFd> {
            self.0.get(index as usize)?.try_clone().ok()
        }

        fn update(
            &self,
            _: InterruptIndex,
            _: InterruptSourceConfig,
            _: bool,
            _: bool,
        ) -> io::Result<()> {
            Ok(())
        }

        fn set_gsi(&self) -> io::Result<()> {
            Ok(())
        }
    }

    struct TestInterruptManager;

    impl InterruptManager for TestInterruptManager {
        type GroupConfig = MsiIrqGroupConfig;

        fn create_group(
            &self,
            config: MsiIrqGroupConfig,
        ) -> io::Result<Arc<dyn InterruptSourceGroup>> {
            Ok(Arc::new(TestInterrupts::new(config.count)))
        }

        fn destroy_group(&self, _: Arc<dyn InterruptSourceGroup>) -> io::Result<()> {
            Ok(())
        }
    }

    /// Device of a VM without a hypervisor.
    fn connect(socket: &Path) -> (Arc<VfioUserConnection>, VfioCommon) {
        let client = Arc::new(Mutex::new(Client::new(socket).unwrap()));
        let inner = VfioUserClientWrapper {
            client: Arc::clone(&client),
        };
        let connection = Arc::new(VfioUserConnection::new("data".to_owned(), client));
        let wrapper = ReconnectingClientWrapper::new(inner, Arc::clone(&connection));
        let common = VfioCommon::new(
            Arc::new(TestInterruptManager),
            Some(Arc::new(TestInterrupts::new(1))),
            Arc::new(wrapper),
            &PciVfioUserSubclass::VfioUserSubclass,
            0.into(),
            None,
            VfioCommonConfig::default(),
        );
        (connection, common.unwrap())
    }

    fn socket() -> (TempDir, PathBuf) {
        let dir = TempDir::new_with_prefix("/tmp/ch-vfio-user-").unwrap();
        let socket = dir.as_path().join("socket");
        (dir, socket)
    }

    fn range(start: u64, size: u64) -> DmaRange {
        let file = FileOffset::new(TempFile::new().unwrap().into_file(), start);
        DmaRange { size, file }
    }

    fn enable_msix(common: &mut VfioCommon) {
        let control = (MSIX_ENABLE | (MSIX_VECTORS - 1)).to_le_bytes();
        common.write_config_register(usize::from(MSIX_CAP) / 4, 2, &control);
    }

    const SENT: fn() -> io::Result<()> = || Ok(());

    #[test]
    fn test_reads_are_all_ones_while_the_server_is_away() {
        let (_dir, socket) = socket();
        let server = TestServer::start(&socket, &TestDevice::default());
        let (connection, mut common) = connect(&socket);
        let mut data = [0; 4];
        common.vfio_wrapper.region_read(BAR, 0, &mut data);
        assert_eq!(data, [0x5a; 4]);
        assert!(connection.probe());

        server.crash(&common);
        assert!(connection.is_lost());
        common.vfio_wrapper.region_read(BAR, 0, &mut data);
        assert_eq!(data, [0xff; 4]);
        common.vfio_wrapper.region_write(BAR, 0, &data);
        assert_eq!(common.read_config_register(0), 0xffff_ffff);
        // Walks of the capabilities end, and the interrupts of the guest change.
        enable_msix(&mut common);
        assert!(!common.interrupt.intx_in_use());
    }

    #[test]
    fn test_probe_finds_that_the_server_has_gone() {
        let (_dir, socket) = socket();
        let server = TestServer::start(&socket, &TestDevice::default());
        let (connection, common) = connect(&socket);
        connection.client.lock().unwrap().shutdown().unwrap();
        server.thread.join().unwrap();
        assert!(!connection.is_lost());
        assert!(!connection.probe());
        assert!(connection.is_lost());
        drop(common);
    }

    #[test]
    fn test_new_server_gets_what_the_old_one_had() {
        let (_dir, socket) = socket();
        let device = TestDevice::default();
        let old = TestServer::start(&socket, &device);
        let (connection, mut common) = connect(&socket);
        assert_eq!(old.next(1), [Event::SetIrqs(VFIO_PCI_INTX_IRQ_INDEX, 1, 1)]);
        enable_msix(&mut common);
        common.write_config_register(COMMAND_REG, 0, &[0x06, 0x04]);
        connection.map_dma(0, range(0x1000, 0x2000), SENT).unwrap();
        connection.map_dma(0x8000, range(0, 0x1000), SENT).unwrap();
        old.crash(&common);

        // The guest and the VMM go on meanwhile.
        common.write_config_register(COMMAND_REG, 0, &[0x02]);
        let not_sent = || -> io::Result<()> { panic!("The server is away") };
        connection.unmap_dma(0x8000, 0x1000, not_sent).unwrap();
        connection
            .map_dma(0x4000_0000, range(0, 0x4000), not_sent)
            .unwrap();

        let new = TestServer::start(&socket, &device);
        let mut client = Client::new(&socket).unwrap();
        connection.check(&mut client).unwrap();
        connection.restore(client, &common).unwrap();
        let control = (MSIX_ENABLE | (MSIX_VECTORS - 1)).to_le_bytes().to_vec();
        assert_eq!(
            new.next(6),
            [
                Event::Map(0x1000, 0, 0x2000),
                Event::Map(0, 0x4000_0000, 0x4000),
                Event::SetIrqs(VFIO_PCI_MSIX_IRQ_INDEX, 3, 3),
                Event::Write(CONFIG, MSIX_CONTROL, control),
                Event::Write(CONFIG, COMMAND_OFFSET, vec![0x02]),
                Event::Write(CONFIG, COMMAND_OFFSET + 1, vec![0x04]),
            ]
        );
        assert!(new.has_no_more_events());
        let mut data = [0; 4];
        common.vfio_wrapper.region_read(BAR, 0, &mut data);
        assert_eq!(data, [0x5a; 4]);
    }

    #[test]
    fn test_intx_is_enabled_and_unmasked_again() {
        let (_dir, socket) = socket();
        let old = TestServer::start(&socket, &TestDevice::default());
        let (connection, common) = connect(&socket);
        old.crash(&common);
        let new = TestServer::start(&socket, &TestDevice::default());
        connection
            .restore(Client::new(&socket).unwrap(), &common)
            .unwrap();
        let control = (MSIX_VECTORS - 1).to_le_bytes().to_vec();
        assert_eq!(
            new.next(3),
            [
                Event::SetIrqs(VFIO_PCI_INTX_IRQ_INDEX, 1, 1),
                Event::SetIrqs(VFIO_PCI_INTX_IRQ_INDEX, 1, 0),
                Event::Write(CONFIG, MSIX_CONTROL, control),
            ]
        );
    }

    #[test]
    fn test_another_device_is_refused() {
        let (_dir, socket) = socket();
        let old = TestServer::start(&socket, &TestDevice::default());
        let (connection, common) = connect(&socket);
        old.crash(&common);
        let refuse = |device: TestDevice, message: &str| {
            let server = TestServer::start(&socket, &device);
            let mut client = Client::new(&socket).unwrap();
            let error = connection.check(&mut client).unwrap_err().to_string();
            assert!(error.contains(message), "{message}: {error}");
            client.shutdown().unwrap();
            server.thread.join().unwrap();
        };
        let device = TestDevice::default;
        refuse(
            TestDevice {
                bar_size: 0x2000,
                ..device()
            },
            "another region 0: 0x2000 bytes",
        );
        refuse(
            TestDevice {
                msix_vectors: 2,
                ..device()
            },
            "another IRQ 2: 2 interrupts",
        );
        refuse(
            TestDevice {
                device_id: 0x1001,
                ..device()
            },
            "another device: 1b36:1001, class 000000, not 1b36:1000",
        );
    }

    #[test]
    fn test_thread_connects_each_time() {
        let (_dir, socket) = socket();
        let mut server = TestServer::start(&socket, &TestDevice::default());
        let (connection, common) = connect(&socket);
        server.next(1);
        let is_removed = Mutex::new(false);
        let (resumed, resumes) = channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                connection.run(
                    &socket,
                    || *is_removed.lock().unwrap(),
                    |client| {
                        let result = connection.restore(client, &common);
                        resumed.send(result.is_ok()).unwrap();
                        result
                    },
                );
            });
            for _ in 0..2 {
                server.crash(&common);
                server = TestServer::start(&socket, &TestDevice::default());
                assert!(resumes.recv_timeout(Duration::from_secs(20)).unwrap());
                server.next(3);
                assert!(!connection.is_lost());
            }
            *is_removed.lock().unwrap() = true;
            connection.lost.notify_all();
        });
    }

    #[test]
    fn test_parts_of_dma_ranges_are_removed() {
        let mut ranges = BTreeMap::from([(0x1000, range(0x100, 0x4000)), (0x8000, range(0, 0x1000))]);
        remove_range(&mut ranges, 0x2000, 0x1000);
        let left = |ranges: &BTreeMap<u64, DmaRange>| -> Vec<_> {
            let each = ranges.iter();
            each.map(|(iova, range)| (*iova, range.size, range.file.start()))
                .collect()
        };
        assert_eq!(
            left(&ranges),
            [(0x1000, 0x1000, 0x100), (0x3000, 0x2000, 0x2100), (0x8000, 0x1000, 0)]
        );
        remove_range(&mut ranges, 0x1800, 0x7000);
        assert_eq!(left(&ranges), [(0x1000, 0x800, 0x100), (0x8800, 0x800, 0x800)]);
        remove_range(&mut ranges, 0, u64::MAX);
        assert!(ranges.is_empty());
    }
}

//! BAR0 of a controller behind a vfio-user socket.

use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::sync::PoisonError;

use ::vfio_user::Client;

use crate::bar::{Bar, DoorbellWindow};
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
use crate::memory::{GuestMemory, Region};
use nvme_mpt_memory::sync::{Mutex, MutexGuard};

/// VFIO_PCI_BAR0_REGION_INDEX.
const BAR0: u32 = 0;
/// VFIO_PCI_CONFIG_REGION_INDEX.
const CONFIG: u32 = 7;
/// VFIO_PCI_INTX_IRQ_INDEX.
const INTX: u32 = 0;
/// VFIO_PCI_MSI_IRQ_INDEX.
const MSI: u32 = 1;
/// VFIO_PCI_MSIX_IRQ_INDEX.
const MSIX: u32 = 2;
/// VFIO_REGION_INFO_FLAG_MMAP.
const REGION_MMAP: u32 = 1 << 2;
/// VFIO_IRQ_SET_DATA_EVENTFD and VFIO_IRQ_SET_ACTION_TRIGGER.
const TRIGGER_EVENTFD: u32 = 1 << 2 | 1 << 5;
/// VFIO_IRQ_SET_DATA_EVENTFD and VFIO_IRQ_SET_ACTION_UNMASK.
const UNMASK_EVENTFD: u32 = 1 << 2 | 1 << 4;
/// VFIO_IRQ_SET_DATA_NONE and VFIO_IRQ_SET_ACTION_UNMASK.
const UNMASK: u32 = 1 << 0 | 1 << 4;

/// BAR0 of a device that a vfio-user client accesses.
pub struct VfioUserBar {
    client: Mutex<Client>,
    windows: Vec<DoorbellWindow>,
}

impl std::fmt::Debug for VfioUserBar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VfioUserBar")
            .field("windows", &self.windows.len())
            .finish_non_exhaustive()
    }
}

impl VfioUserBar {
    /// Connects to the server, and maps the parts of BAR0 that the server allows to map.
    ///
    /// # Errors
    /// The server is unreachable or no PCI device, or a mapping fails.
    pub fn connect(socket: &Path) -> Result<Self> {
        let client = Client::new(socket).map_err(Error::VfioUser)?;
        let mut windows = Vec::new();
        if let Some(region) = client.region(BAR0)
            && let Some(file) = &region.file_offset
            && region.flags & REGION_MMAP != 0
        {
            let mut map = |offset: u64, len: u64| -> Result<()> {
                windows.push(DoorbellWindow::map(
                    offset,
                    file.file().as_fd(),
                    file.start() + offset,
                    len as usize,
                )?);
                Ok(())
            };
            if region.sparse_areas.is_empty() {
                map(0, region.size)?;
            }
            for area in &region.sparse_areas {
                map(area.offset, area.size)?;
            }
        }
        Ok(Self {
            client: Mutex::new(client),
            windows,
        })
    }

    /// Connects to the server, maps all guest memory for DMA, and enables bus mastering.
    ///
    /// # Errors
    /// As [`VfioUserBar::connect`]; also, a request fails.
    pub fn attach(socket: &Path, memory: &GuestMemory) -> Result<Self> {
        let bar = Self::connect(socket)?;
        for region in memory.regions() {
            bar.dma_map(memory, &region)?;
        }
        // Command register: Memory Space Enable and Bus Master Enable.
        let mut command = [0; 2];
        bar.config_read(0x04, &mut command)?;
        bar.config_write(0x04, &(u16::from_le_bytes(command) | 0b110).to_le_bytes())?;
        Ok(bar)
    }

    /// Returns the client, for raw requests.
    pub fn client(&self) -> MutexGuard<'_, Client> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps a region of guest memory for DMA.
    ///
    /// # Errors
    /// The request cannot be sent or answered.
    pub fn dma_map(&self, memory: &GuestMemory, region: &Region) -> Result<()> {
        let fd = memory.fd().as_raw_fd();
        self.client()
            .dma_map(region.fd_offset, region.gpa, region.len, fd)
            .map_err(Error::VfioUser)
    }

    /// Unmaps a region of guest memory.
    ///
    /// # Errors
    /// The request cannot be sent or answered.
    pub fn dma_unmap(&self, region: &Region) -> Result<()> {
        self.client()
            .dma_unmap(region.gpa, region.len)
            .map_err(Error::VfioUser)
    }

    /// Resets the device.
    ///
    /// # Errors
    /// The request cannot be sent or answered.
    pub fn reset(&self) -> Result<()> {
        self.client().reset().map_err(Error::VfioUser)
    }

    /// Sets one eventfd for each MSI-X vector from 0 on, unmasks the vectors, and enables MSI-X.
    ///
    /// # Errors
    /// A request fails, or the device has no MSI-X capability.
    pub fn enable_msix<'a>(&self, vectors: impl IntoIterator<Item = &'a Interrupt>) -> Result<()> {
        let capability = self.capability(0x11, "MSI-X")?;
        let mut table = [0; 4];
        self.config_read(capability + 4, &mut table)?;
        let table = u32::from_le_bytes(table);
        let (table_bar, table_offset) = (table & 0b111, u64::from(table & !0b111));
        for (vector, interrupt) in (0_u32..).zip(vectors) {
            self.client()
                .set_irqs(MSIX, TRIGGER_EVENTFD, vector, 1, &[interrupt.as_raw_fd()])
                .map_err(Error::VfioUser)?;
            // Address and data are arbitrary, since the eventfd replaces the message. Vector Control 0 unmasks.
            let mut entry = [0; 16];
            entry[..4].copy_from_slice(&0xfee0_0000_u32.to_le_bytes());
            entry[8..12].copy_from_slice(&vector.to_le_bytes());
            for (at, word) in (0..).step_by(4).zip(entry.chunks(4)) {
                let offset = table_offset + 16 * u64::from(vector) + at;
                self.client()
                    .region_write(table_bar, offset, word)
                    .map_err(Error::VfioUser)?;
            }
        }
        let mut control = [0; 2];
        self.config_read(capability + 2, &mut control)?;
        // MSI-X Enable on, Function Mask off.
        let control = u16::from_le_bytes(control) & !(1 << 14) | 1 << 15;
        self.config_write(capability + 2, &control.to_le_bytes())
    }

    /// Sets one eventfd for each MSI message from 0 on, and enables MSI with at least that number of messages.
    ///
    /// # Errors
    /// A request fails, or the device has no MSI capability.
    pub fn enable_msi<'a>(&self, vectors: impl IntoIterator<Item = &'a Interrupt>) -> Result<()> {
        let capability = self.capability(0x05, "MSI")?;
        let mut count = 0_u32;
        for interrupt in vectors {
            self.client()
                .set_irqs(MSI, TRIGGER_EVENTFD, count, 1, &[interrupt.as_raw_fd()])
                .map_err(Error::VfioUser)?;
            count += 1;
        }
        self.config_write(capability + 4, &0xfee0_0000_u64.to_le_bytes())?;
        self.config_write(capability + 12, &0x40_u16.to_le_bytes())?;
        // MSI Enable, and Multiple Message Enable.
        let messages = count.max(1).next_power_of_two().trailing_zeros() as u16;
        self.config_write(capability + 2, &(messages << 4 | 1).to_le_bytes())
    }

    /// Sets an eventfd for the device's interrupt pin. Each signal masks the pin. [`Self::unmask_pin`] unmasks it; if
    /// `acknowledged` is given, a signal of this eventfd does.
    ///
    /// # Errors
    /// A request fails.
    pub fn enable_pin(&self, pin: &Interrupt, acknowledged: Option<&Interrupt>) -> Result<()> {
        self.client()
            .set_irqs(INTX, TRIGGER_EVENTFD, 0, 1, &[pin.as_raw_fd()])
            .map_err(Error::VfioUser)?;
        if let Some(acknowledged) = acknowledged {
            self.client()
                .set_irqs(INTX, UNMASK_EVENTFD, 0, 1, &[acknowledged.as_raw_fd()])
                .map_err(Error::VfioUser)?;
        }
        Ok(())
    }

    /// Reports to the device that its pin was deasserted, which unmasks the pin.
    ///
    /// # Errors
    /// The request fails.
    pub fn unmask_pin(&self) -> Result<()> {
        self.client()
            .set_irqs(INTX, UNMASK, 0, 1, &[])
            .map_err(Error::VfioUser)
    }

    /// Returns the offset of a capability in configuration space.
    fn capability(&self, id: u8, name: &'static str) -> Result<u64> {
        let mut pointer = [0; 1];
        self.config_read(0x34, &mut pointer)?;
        // Configuration space holds at most 48 capabilities, which bounds a cyclic list.
        for _ in 0..48 {
            let at = u64::from(pointer[0] & !0b11);
            if at == 0 {
                break;
            }
            let mut header = [0; 2];
            self.config_read(at, &mut header)?;
            if header[0] == id {
                return Ok(at);
            }
            pointer[0] = header[1];
        }
        Err(Error::Unsupported(name))
    }

    /// Reads configuration space.
    ///
    /// # Errors
    /// The request cannot be sent or answered.
    pub fn config_read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.client()
            .region_read(CONFIG, offset, into)
            .map_err(Error::VfioUser)
    }

    /// Writes configuration space.
    ///
    /// # Errors
    /// The request cannot be sent or answered.
    pub fn config_write(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.client()
            .region_write(CONFIG, offset, from)
            .map_err(Error::VfioUser)
    }

    fn read<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut bytes = [0xff; N];
        match self.client().region_read(BAR0, offset, &mut bytes) {
            Ok(()) => bytes,
            // Reads of a missing device return all ones, as on a bus.
            Err(_) => [0xff; N],
        }
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        // A write to a missing device is lost, as on a bus. The next read of CSTS shows that it is gone.
        let _lost = self.client().region_write(BAR0, offset, bytes);
    }
}

impl Bar for VfioUserBar {
    fn read32(&self, offset: u64) -> u32 {
        u32::from_le_bytes(self.read(offset))
    }

    fn read64(&self, offset: u64) -> u64 {
        u64::from_le_bytes(self.read(offset))
    }

    fn write32(&self, offset: u64, value: u32) {
        self.write(offset, &value.to_le_bytes());
    }

    fn write64(&self, offset: u64, value: u64) {
        self.write(offset, &value.to_le_bytes());
    }

    fn doorbell_windows(&self) -> &[DoorbellWindow] {
        &self.windows
    }
}

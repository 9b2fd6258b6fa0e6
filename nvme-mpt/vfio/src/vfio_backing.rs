//! An NVMe function behind `vfio-pci`.
//!
//! # Releasing the function
//! One thread may read registers while another thread releases the function, and users of mapped doorbells hold the mapping.
//! The kernel returns the function to the host only once its file is closed, and each mapping of a BAR keeps that file open.
//! [`VfioBacking::release`] therefore replaces the mapped pages before it closes the file. The close makes the kernel reset the
//! function. Memory is unmapped from the IOMMU only after that reset, so no DMA in progress hits an unmapped address.

use std::fs::{self, File};
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};

use log::{debug, info, warn};
use vfio_bindings::bindings::vfio as abi;

use super::device_backing::DeviceBacking;
use super::error::VfioError;
use super::function::{HostRoot, PciAddress, PciFunction, VFIO_PCI};
use super::ioctl::{self, VfioDeviceRegion};
use super::iommu::{IommuContext, VfioIommu};
use nvme_driver::ControllerAccess;
use nvme_guest::iova::{Iommu, IommuMapping};
use nvme_mpt_memory::sync::RwLock;
use nvme_mpt_memory::{MappedRegisters, Mapping, eventfd};

/// Start of the doorbells in BAR0 (NVMe over PCIe Transport 1.0, section 3.1.2).
const DOORBELLS_OFFSET: u64 = 0x1000;

/// Maximum length of the doorbell area to map: two doorbells for each of 65,536 queue identifiers at the smallest stride. With
/// a larger stride, fewer queues can be used.
const DOORBELLS_LEN_MAX: u64 = 2 * 65_536 * 4;

/// Minimum length of BAR0: the registers and one page of doorbells.
const BAR0_LEN_MIN: u64 = 0x2000;

/// Command register of the configuration space (PCI Express Base 5.0, section 7.5.1.1.3).
const COMMAND_OFFSET: u64 = 0x04;
const COMMAND_MEMORY_SPACE: u16 = 1 << 1;
const COMMAND_BUS_MASTER: u16 = 1 << 2;

/// Offset of Revision ID and class code. The kernel does not cache this register, and its value is never all ones. So reading
/// all ones shows that the device does not answer.
const REVISION_AND_CLASS: u64 = 0x08;

/// An NVMe function that this process drives through the kernel's `vfio-pci` driver.
#[derive(Debug)]
pub struct VfioBacking {
    name: String,
    /// File of the VFIO device; `None` once released.
    device: RwLock<Option<File>>,
    context: Arc<dyn IommuContext>,
    can_reset: bool,
    numa_node: Option<u32>,
    config: VfioDeviceRegion,
    bar0: VfioDeviceRegion,
    doorbells: BarWindow,
    /// Mapped registers; `None` if the kernel cannot map them, so that they are accessed through the file.
    registers: Option<BarWindow>,
    removal: Option<OwnedFd>,
    is_gone: AtomicBool,
}

/// A mapped part of BAR0, which has registers or doorbells.
#[derive(Clone, Debug)]
struct BarWindow {
    /// Offset of the part in BAR0.
    start: usize,
    registers: MappedRegisters,
}

impl BarWindow {
    fn map(device: &File, bar: &VfioDeviceRegion, start: u64, end: u64) -> io::Result<Self> {
        let too_large = |_| io::Error::from(io::ErrorKind::InvalidInput);
        let len = usize::try_from(end - start).map_err(too_large)?;
        let mapping = Mapping::device(device.as_fd(), bar.offset + start, len)?;
        Ok(Self {
            start: usize::try_from(start).map_err(too_large)?,
            registers: MappedRegisters::new(Arc::new(mapping)),
        })
    }
}

/// Returns start and end of the part of BAR0 that contains `offset` and that can be mapped; `None` if there is none.
fn mappable_part(bar: &VfioDeviceRegion, offset: u64) -> Option<(u64, u64)> {
    let last = DOORBELLS_OFFSET + DOORBELLS_LEN_MAX;
    bar.mappable
        .iter()
        .map(|(start, len)| (*start, (start + len).min(last)))
        .find(|(start, end)| (*start..*end).contains(&offset))
}

impl VfioBacking {
    /// Opens the function at `address`, which must be bound to `vfio-pci`. The kernel resets the function; its DMA stays
    /// disabled until [`set_bus_master`](DeviceBacking::set_bus_master) enables it.
    ///
    /// # Errors
    /// Returns why the function cannot be used, with the remedy.
    pub fn open(address: PciAddress) -> Result<Self, VfioError> {
        Self::open_in(&HostRoot::default(), address)
    }

    /// Restores the function at `address` that a predecessor [handed over](DeviceBacking::hand_over), with its [I/O address
    /// space](DeviceBacking::ioas) if it had one. `mapped` lists the mappings of the function's IOMMU. The function is not reset.
    ///
    /// # Errors
    /// Returns why the function cannot be used. The function is then released.
    pub fn from_predecessor(
        address: PciAddress,
        mut descriptors: Vec<OwnedFd>,
        ioas: Option<u32>,
        mapped: &[IommuMapping],
    ) -> Result<Self, VfioError> {
        let root = HostRoot::default();
        let function = PciFunction::find(&root, address)?;
        let device = descriptors.pop();
        let device = device.ok_or(VfioError::NoContainer { address })?;
        let context = VfioIommu::from_predecessor(&root, &function, descriptors, ioas, mapped)?;
        Self::new(&function, Arc::new(context), device.into(), 0)
    }

    /// Opens the function at `address` with the [IOMMU](DeviceBacking::persist_iommu) of a dead predecessor. `mapped` lists the
    /// mappings of this IOMMU. The function is reset, as by [`Self::open`].
    ///
    /// # Errors
    /// Returns why the function cannot be used. The IOMMU is then unchanged.
    pub fn with_predecessor_iommu(
        address: PciAddress,
        iommu: Vec<OwnedFd>,
        mapped: &[IommuMapping],
    ) -> Result<Self, VfioError> {
        let root = HostRoot::default();
        let function = Self::find(&root, address)?;
        let context = VfioIommu::from_predecessor(&root, &function, iommu, None, mapped)?;
        let device = context.open_device()?;
        Self::new(&function, Arc::new(context), device, COMMAND_BUS_MASTER)
    }

    fn open_in(root: &HostRoot, address: PciAddress) -> Result<Self, VfioError> {
        let function = Self::find(root, address)?;
        let context = VfioIommu::open(root, &function)?;
        let device = context.open_device()?;
        Self::new(&function, Arc::new(context), device, COMMAND_BUS_MASTER)
    }

    /// Reads the function from sysfs, and checks that it is an NVMe controller and bound to `vfio-pci`.
    fn find(root: &HostRoot, address: PciAddress) -> Result<PciFunction, VfioError> {
        let function = PciFunction::find(root, address)?;
        if !function.is_nvme() {
            let class = function.class;
            return Err(VfioError::NotNvme { address, class });
        }
        match function.driver.clone() {
            Some(driver) if driver == VFIO_PCI => {}
            Some(driver) => return Err(VfioError::OtherDriver { address, driver }),
            None => return Err(VfioError::NoDriver { address }),
        }
        Ok(function)
    }

    /// Creates the value for a function that VFIO has opened: maps its registers, and clears the bits `clear` of its Command
    /// register.
    fn new(
        function: &PciFunction,
        context: Arc<dyn IommuContext>,
        device: File,
        clear: u16,
    ) -> Result<Self, VfioError> {
        let address = function.address;
        let refused = |what| {
            move |source| VfioError::Refused {
                address,
                what,
                source,
            }
        };
        let flags = ioctl::device_flags(&device).map_err(refused("read the capabilities"))?;
        let config = ioctl::region(&device, abi::VFIO_PCI_CONFIG_REGION_INDEX)
            .map_err(refused("find the configuration space"))?;
        let bar0 = ioctl::region(&device, abi::VFIO_PCI_BAR0_REGION_INDEX)
            .map_err(refused("find BAR0"))?;
        if bar0.size < BAR0_LEN_MIN {
            let size = bar0.size;
            return Err(VfioError::SmallBar { address, size });
        }
        // Access to a mapped BAR faults while the memory space is disabled.
        update_command_register(&device, &config, COMMAND_MEMORY_SPACE, clear)
            .map_err(refused("enable the memory space"))?;
        let (start, end) = mappable_part(&bar0, DOORBELLS_OFFSET)
            .ok_or(VfioError::DoorbellsNotMappable { address })?;
        let doorbells = BarWindow::map(&device, &bar0, start, end).map_err(refused("map BAR0"))?;
        let registers = match mappable_part(&bar0, 0) {
            Some(same) if same == (start, end) => Some(doorbells.clone()),
            Some((start, end)) => {
                Some(BarWindow::map(&device, &bar0, start, end).map_err(refused("map BAR0"))?)
            }
            None => None,
        };
        let removal = create_removal_event(&device).map_err(refused("watch for the removal"))?;
        debug!("{address}: BAR0 {bar0:x?}, flags {flags:#x}");
        Ok(Self {
            name: address.to_string(),
            device: RwLock::new(Some(device)),
            context,
            can_reset: flags & abi::VFIO_DEVICE_FLAGS_RESET != 0,
            numa_node: function.numa_node,
            config,
            bar0,
            doorbells,
            registers,
            removal,
            is_gone: AtomicBool::new(false),
        })
    }

    /// Calls `act` with the function's file.
    ///
    /// # Errors
    /// `NotConnected` if the function was removed or released.
    fn with_device<T>(&self, act: impl FnOnce(&File) -> io::Result<T>) -> io::Result<T> {
        let device = self.device.read().unwrap_or_else(PoisonError::into_inner);
        let Some(device) = device
            .as_ref()
            .filter(|_| !self.is_gone.load(Ordering::Acquire))
        else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        act(device).map_err(|error| {
            if is_absent(device, &self.config) {
                io::ErrorKind::NotConnected.into()
            } else {
                error
            }
        })
    }

    fn read_unmapped(&self, offset: u64) -> u32 {
        let mut word = [0; 4];
        let read =
            self.with_device(|device| device.read_exact_at(&mut word, self.bar0.offset + offset));
        // Reads of an absent function return all ones.
        read.map_or(u32::MAX, |()| u32::from_le_bytes(word))
    }

    fn write_unmapped(&self, offset: u64, value: u32) {
        let written = self.with_device(|device| {
            device.write_all_at(&value.to_le_bytes(), self.bar0.offset + offset)
        });
        if let Err(error) = written {
            debug!("{}: register {offset:#x} not written: {error}", self.name);
        }
    }

    /// Returns the mapped parts of BAR0.
    fn windows(&self) -> impl Iterator<Item = &BarWindow> {
        self.registers.iter().chain([&self.doorbells])
    }

    /// Replaces the mapped registers by memory that reads as all ones, for all that use them. The registers of an absent
    /// function read like that.
    fn detach_registers(&self) {
        for window in self.windows() {
            if let Err(error) = window.registers.mapping().detach_device() {
                warn!(
                    "{}: BAR0 cannot be unmapped, so the function cannot be given back: {error}",
                    self.name
                );
            }
        }
    }

    /// Returns the mapped registers, and the offset in them of the register at `offset` of BAR0.
    fn mapped_register(&self, offset: u64) -> Option<(&MappedRegisters, usize)> {
        let window = self.registers.as_ref()?;
        let offset = (offset as usize).checked_sub(window.start)?;
        Some((&window.registers, offset))
    }
}

impl ControllerAccess for VfioBacking {
    fn read32(&self, offset: u64) -> u32 {
        self.mapped_register(offset)
            .and_then(|(registers, offset)| registers.read32(offset))
            .unwrap_or_else(|| self.read_unmapped(offset))
    }

    fn read64(&self, offset: u64) -> u64 {
        // Unmapped registers are read in two halves, low half first (Base 2.0, section 3.1).
        self.mapped_register(offset)
            .and_then(|(registers, offset)| registers.read64(offset))
            .unwrap_or_else(|| {
                let low = self.read_unmapped(offset);
                u64::from(low) | u64::from(self.read_unmapped(offset + 4)) << 32
            })
    }

    fn write32(&self, offset: u64, value: u32) {
        if self
            .mapped_register(offset)
            .and_then(|(registers, offset)| registers.write32(offset, value))
            .is_none()
        {
            self.write_unmapped(offset, value);
        }
    }

    fn write64(&self, offset: u64, value: u64) {
        if self
            .mapped_register(offset)
            .and_then(|(registers, offset)| registers.write64(offset, value))
            .is_none()
        {
            self.write_unmapped(offset, value as u32);
            self.write_unmapped(offset + 4, (value >> 32) as u32);
        }
    }

    /// Returns whether the kernel has requested the function back. A link recovery or a reset by the kernel is no such request.
    fn is_removal_requested(&self) -> bool {
        let removal = self.removal.as_ref().map(AsFd::as_fd);
        removal.is_some_and(|removal| eventfd::is_readable(removal).unwrap_or(false))
    }

    fn is_gone(&self) -> bool {
        if self.is_gone.load(Ordering::Acquire) {
            return true;
        }
        let is_lost = self
            .windows()
            .any(|window| window.registers.mapping().is_lost());
        let is_gone = is_lost
            || self
                .with_device(|device| {
                    Ok(is_absent(device, &self.config) && self.is_removal_requested())
                })
                .unwrap_or(true);
        if is_gone && !self.is_gone.swap(true, Ordering::AcqRel) {
            warn!("{} no longer exists", self.name);
            // The driver relies on reads of all ones, but not every bus returns them for an absent device.
            self.detach_registers();
        }
        is_gone
    }
}

impl DeviceBacking for VfioBacking {
    fn name(&self) -> &str {
        &self.name
    }

    fn numa_node(&self) -> Option<u32> {
        self.numa_node
    }

    fn doorbells(&self) -> (Arc<Mapping>, usize) {
        let BarWindow { start, registers } = &self.doorbells;
        (
            registers.mapping().clone(),
            DOORBELLS_OFFSET as usize - start,
        )
    }

    fn iommu(&self) -> Arc<dyn Iommu> {
        self.context.clone()
    }

    fn usable_iovas(&self) -> Vec<RangeInclusive<u64>> {
        self.context.usable_iovas().to_vec()
    }

    fn set_bus_master(&self, enabled: bool) -> io::Result<()> {
        let (set, clear) = if enabled {
            (COMMAND_MEMORY_SPACE | COMMAND_BUS_MASTER, 0)
        } else {
            (COMMAND_MEMORY_SPACE, COMMAND_BUS_MASTER)
        };
        self.with_device(|device| {
            update_command_register(device, &self.config, set, clear)?;
            // The kernel emulates part of the Command register and accepts writes even if the device is absent.
            if is_absent(device, &self.config) {
                return Err(io::ErrorKind::NotConnected.into());
            }
            Ok(())
        })
    }

    fn reset(&self) -> io::Result<()> {
        if !self.can_reset {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!("{} offers no way to reset it by itself", self.name),
            ));
        }
        self.with_device(ioctl::reset)
    }

    fn removal_request(&self) -> Option<BorrowedFd<'_>> {
        self.removal.as_ref().map(AsFd::as_fd)
    }

    fn hand_over(&self) -> io::Result<Vec<OwnedFd>> {
        let mut descriptors = self.context.hand_over()?;
        let device = self.with_device(File::try_clone)?;
        descriptors.push(device.into());
        Ok(descriptors)
    }

    fn persist_iommu(&self) -> io::Result<Vec<OwnedFd>> {
        let release = fs::read_to_string(HostRoot::default().proc.join("sys/kernel/osrelease"))?;
        if !can_unbind_while_open(&release) {
            let what = format!(
                "Linux {} would wait for it when the function is unbound (6.2 does not)",
                release.trim()
            );
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        self.context.persist()
    }

    fn ioas(&self) -> Option<u32> {
        self.context.ioas()
    }

    fn release(&self) {
        self.is_gone.store(true, Ordering::Release);
        // A second caller waits for the lock until the release is complete.
        let mut device = self.device.write().unwrap_or_else(PoisonError::into_inner);
        let Some(device) = device.take() else {
            return;
        };
        if let Err(error) = update_command_register(&device, &self.config, 0, COMMAND_BUS_MASTER) {
            // Not a problem: the function was removed, or the close below resets it.
            debug!("{}: bus mastering is not disabled: {error}", self.name);
        }
        self.detach_registers();
        drop(device);
        self.context.release();
        info!("{} is given up", self.name);
    }
}

impl Drop for VfioBacking {
    fn drop(&mut self) {
        self.release();
    }
}

/// Sets and clears bits of the Command register.
fn update_command_register(
    device: &File,
    config: &VfioDeviceRegion,
    set: u16,
    clear: u16,
) -> io::Result<()> {
    let at = config.offset + COMMAND_OFFSET;
    let mut bytes = [0; 2];
    device.read_exact_at(&mut bytes, at)?;
    let command = u16::from_le_bytes(bytes);
    let changed = command & !clear | set;
    if changed != command {
        device.write_all_at(&changed.to_le_bytes(), at)?;
    }
    Ok(())
}

/// Returns whether the function does not answer now.
fn is_absent(device: &File, config: &VfioDeviceRegion) -> bool {
    let mut word = [0; 4];
    let read = device.read_exact_at(&mut word, config.offset + REVISION_AND_CLASS);
    read.is_err() || word == [0xFF; 4]
}

/// Creates an eventfd that the kernel signals when it wants the function back. Returns `None` if the kernel does not have such
/// an event.
fn create_removal_event(device: &File) -> io::Result<Option<OwnedFd>> {
    if !ioctl::has_event(device, abi::VFIO_PCI_REQ_IRQ_INDEX)? {
        return Ok(None);
    }
    let event = ioctl::event_fd()?;
    ioctl::set_event(device, abi::VFIO_PCI_REQ_IRQ_INDEX, &event)?;
    Ok(Some(event))
}

/// Returns whether a kernel with this release string returns a function to the host while its group and container are still
/// open. Kernels before 6.2 wait until both are closed. With such a kernel, a supervisor process that has them open would block
/// an unbind of the function: while no server runs, no process tells the supervisor to close them.
fn can_unbind_while_open(release: &str) -> bool {
    let numbers = release.split(|c: char| !c.is_ascii_digit());
    let numbers: Vec<u32> = numbers.map_while(|number| number.parse().ok()).collect();
    matches!(numbers[..], [major, minor, ..] if (major, minor) >= (6, 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bar(mappable: &[(u64, u64)]) -> VfioDeviceRegion {
        VfioDeviceRegion {
            size: 1 << 30,
            offset: 0,
            mappable: mappable.to_vec(),
        }
    }

    #[test]
    fn registers_and_doorbells_are_mapped_where_they_can_be() {
        let whole = bar(&[(0, 0x4000)]);
        assert_eq!(mappable_part(&whole, 0), Some((0, 0x4000)));
        assert_eq!(mappable_part(&whole, DOORBELLS_OFFSET), Some((0, 0x4000)));
        // The MSI-X table is never mapped, at any place in the BAR.
        let after = bar(&[(0, 0x2000), (0x3000, 0x1000)]);
        assert_eq!(mappable_part(&after, DOORBELLS_OFFSET), Some((0, 0x2000)));
        let before = bar(&[(0x1000, 0x3000)]);
        assert_eq!(mappable_part(&before, 0), None);
        assert_eq!(
            mappable_part(&before, DOORBELLS_OFFSET),
            Some((0x1000, 0x4000))
        );
        let on_top = bar(&[(0, 0x1000), (0x2000, 0x2000)]);
        assert_eq!(mappable_part(&on_top, DOORBELLS_OFFSET), None);
        assert_eq!(mappable_part(&bar(&[]), DOORBELLS_OFFSET), None);
    }

    #[test]
    fn no_more_is_mapped_than_has_doorbells() {
        let large = bar(&[(0, 1 << 30)]);
        assert_eq!(mappable_part(&large, DOORBELLS_OFFSET), Some((0, 0x81_000)));
        let beyond = bar(&[(0, 0x2000), (0x10_0000, 0x1000)]);
        assert_eq!(mappable_part(&beyond, DOORBELLS_OFFSET), Some((0, 0x2000)));
    }

    #[test]
    fn kernels_that_wait_for_a_supervisor_are_known() {
        for release in ["6.2.0", "6.12.9+deb13-amd64\n", "7.0-rc1"] {
            assert!(can_unbind_while_open(release), "{release}");
        }
        for release in ["6.1.0-18-amd64", "5.10.0", "6", "unknown", ""] {
            assert!(!can_unbind_while_open(release), "{release}");
        }
    }
}

//! Interface of the PCI function that the server offers.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::message::{NUM_IRQS, NUM_REGIONS};

/// A PCI function behind a vfio-user server.
///
/// All methods are called on the thread that runs the server's event loop, and the client waits for the reply. A guest's
/// register access therefore takes at least as long as [`read`](VfioUserDevice::read) or [`write`](VfioUserDevice::write).
///
/// A method must accept every argument that the protocol allows, because the server does not know the rules of the device. For
/// example, an access of three bytes at an odd offset reaches `read`.
pub trait VfioUserDevice {
    /// Returns the size, access rights and mappable area of a region. The server calls this once per region, when it starts, so
    /// a region must not change afterwards.
    fn region(&self, index: RegionIndex) -> DeviceRegion;

    /// Reads registers or config space: one byte or more, all within the region. `data` is filled with all ones beforehand, the
    /// value of unimplemented bytes. A read cannot return an error, because some clients would wait for the data for ever.
    fn read(&mut self, region: RegionIndex, offset: u64, data: &mut [u8]);

    /// Writes registers or config space: one byte or more, all within the region. The device ignores read-only bytes.
    fn write(&mut self, region: RegionIndex, offset: u64, data: &[u8]);

    /// Returns the maximum number of DMA regions, which the server announces to the client. Clients reject more than 65,535,
    /// the protocol's default.
    fn max_dma_maps(&self) -> u32 {
        65_535
    }

    /// Adds a region of the client's memory. The end address does not overflow 64 bits. Address and size may not be multiples
    /// of this host's page size.
    ///
    /// # Errors
    ///
    /// The errno is sent to the client. Return `EEXIST` for an overlap with an existing region (section `VFIO_USER_DMA_MAP`),
    /// and `ENOSPC` for too many regions. The device must accept a region without memory: clients announce ROMs and other
    /// devices' BARs in this way, and disconnect if a region is refused.
    fn dma_map(&mut self, region: DmaRegion) -> io::Result<()>;

    /// Removes the regions within `range` (address, bytes), or all regions for `None`. Returns the total bytes of the removed
    /// regions. After the return, nothing may access their memory.
    ///
    /// If the range contains no region, return 0, not an error. With a guest IOMMU, a VMM unmaps more than it has mapped, and
    /// Cloud Hypervisor hangs if an unmap is refused.
    ///
    /// # Errors
    ///
    /// The errno is sent to the client. Return `EINVAL` if a region lies only partly in the range.
    fn dma_unmap(&mut self, range: Option<(u64, u64)>) -> io::Result<u64>;

    /// Returns the properties of an interrupt type. Called for each request of a client.
    fn irq(&self, index: IrqIndex) -> IrqInfo;

    /// Connects interrupts with eventfds, masks them or triggers them. `start + count` is at most the `count` of
    /// [`irq`](VfioUserDevice::irq).
    ///
    /// # Errors
    ///
    /// The errno is sent to the client.
    fn set_irqs(&mut self, command: IrqCommand) -> io::Result<()>;

    /// Resets the function like a function-level reset. A client can request this at any time: some clients reset a device
    /// right after connecting, without checking that the device supports a reset.
    fn reset(&mut self);

    /// Notes that a client has connected and has not sent a request yet. `process` is the process that connected, if the kernel
    /// reports it. This process may already have passed the socket to another process.
    fn on_connected(&mut self, _process: Option<ClientProcess>) {}

    /// Keeps a duplicate of a client's socket that outlives the process. A server with a [`RequestLog`](crate::RequestLog)
    /// calls this for each accepted client before it reads from the socket. The device closes the duplicate when the client
    /// [disconnects](VfioUserDevice::on_disconnected).
    ///
    /// # Errors
    ///
    /// If this fails, the server closes the client's connection.
    fn persist_client(&mut self, _stream: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }

    /// Returns the state for the successor process, if it has changed since the last call. A server with a
    /// [`RequestLog`](crate::RequestLog) calls this after each request. The state has at most
    /// [`MAX_DEVICE_STATE`](crate::MAX_DEVICE_STATE) bytes.
    ///
    /// If this process ends during a request, the successor creates the device from the last saved bytes and carries out that
    /// request again. So every effect that is not in these bytes must be safe to repeat.
    fn save(&mut self) -> Option<Vec<u8>> {
        None
    }

    /// Notes that the state which the last call of [`save`](VfioUserDevice::save) returned is committed to the request log. The
    /// device may now delete earlier states, and files to which only an earlier state refers.
    fn on_saved(&mut self) {}

    /// Handles the end of the connection. The device must remove all DMA regions, as by
    /// [`dma_unmap`](VfioUserDevice::dma_unmap), and close all eventfds. All other state, such as registers, stays as it is for
    /// the next client (section Client Disconnection).
    fn on_disconnected(&mut self);
}

/// Process that connected to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientProcess {
    /// Process identifier, or 0 if it is not visible in this process's namespace.
    pub pid: u32,
    /// User identifier.
    pub user: u32,
}

/// A PCI function's regions, in the order of `VFIO_PCI_*_REGION_INDEX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum RegionIndex {
    /// BAR 0, including BAR 1 if it is a 64-bit BAR.
    Bar0,
    /// BAR 1.
    Bar1,
    /// BAR 2, including BAR 3 if it is a 64-bit BAR.
    Bar2,
    /// BAR 3.
    Bar3,
    /// BAR 4, including BAR 5 if it is a 64-bit BAR.
    Bar4,
    /// BAR 5.
    Bar5,
    /// The expansion ROM.
    Rom,
    /// Configuration space.
    Config,
    /// Legacy VGA addresses.
    Vga,
}

impl RegionIndex {
    /// All regions, in the order of their numbers.
    pub const ALL: [Self; NUM_REGIONS as usize] = [
        Self::Bar0,
        Self::Bar1,
        Self::Bar2,
        Self::Bar3,
        Self::Bar4,
        Self::Bar5,
        Self::Rom,
        Self::Config,
        Self::Vga,
    ];

    /// Returns the region with this number.
    pub fn new(index: u32) -> Option<Self> {
        Self::ALL.get(index as usize).copied()
    }
}

/// Properties of a region.
#[derive(Clone, Debug, Default)]
pub struct DeviceRegion {
    /// Size in bytes; 0 if the function does not have the region.
    pub size: u64,
    /// True if the client may read the region.
    pub readable: bool,
    /// True if the client may write the region.
    pub writable: bool,
    /// Part that the client may map into the guest. Accesses outside this part are trapped.
    pub mappable: Option<MappableArea>,
}

/// Part of a region that the guest accesses directly, in memory that server and guest share.
///
/// A region has at most one mappable area, because clients disagree about several: some expect a file descriptor for each area,
/// QEMU expects one for all areas.
#[derive(Clone, Debug)]
pub struct MappableArea {
    /// Offset from the beginning of the region, a multiple of the page size.
    pub offset: u64,
    /// Size in bytes, a multiple of the page size.
    pub size: u64,
    /// File whose pages the client maps.
    pub memory: Arc<OwnedFd>,
    /// Offset of the *region* in `memory`: the area begins at `base + offset`. The protocol has one such offset for the whole
    /// region, so `memory` must also cover the part of the region before the area. In a memfd, that part is a hole and takes no
    /// memory.
    pub base: u64,
}

/// A region of the client's memory.
#[derive(Debug)]
pub struct DmaRegion {
    /// First DMA address. This need not be a guest-physical address: a user-space driver chooses its own I/O virtual addresses.
    pub iova: u64,
    /// Size in bytes, not 0. `iova + size - 1` does not overflow.
    pub size: u64,
    /// True if the device may read the region.
    pub readable: bool,
    /// True if the device may write the region.
    pub writable: bool,
    /// Shared memory of the region; `None` if the client cannot share it.
    pub memory: Option<DmaMemory>,
}

/// File that backs a DMA region. The server does not check that the file is large enough for the region.
#[derive(Debug)]
pub struct DmaMemory {
    /// Descriptor of the file, received from the client.
    pub fd: OwnedFd,
    /// Offset of the region in the file. Offset plus region size does not overflow.
    pub offset: u64,
}

/// A PCI function's interrupt types, in the order of `VFIO_PCI_*_IRQ_INDEX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum IrqIndex {
    /// INTx.
    Intx,
    /// MSI.
    Msi,
    /// MSI-X.
    Msix,
    /// Device error (ERR). When this interrupt is signalled, the VMM stops the guest.
    Err,
    /// Request to return the device (REQ). When this interrupt is signalled, the VMM unplugs the device.
    Req,
}

impl IrqIndex {
    /// All interrupt types, in the order of their numbers.
    pub const ALL: [Self; NUM_IRQS as usize] =
        [Self::Intx, Self::Msi, Self::Msix, Self::Err, Self::Req];

    /// Returns the interrupt type with this number.
    pub fn new(index: u32) -> Option<Self> {
        Self::ALL.get(index as usize).copied()
    }
}

/// Properties of an interrupt type. All interrupts are signalled through eventfds.
#[derive(Clone, Copy, Debug, Default)]
pub struct IrqInfo {
    /// Number of interrupts; 0 if the function does not have the type.
    pub count: u32,
    /// Set if the client can mask and unmask the interrupts.
    pub maskable: bool,
    /// Set if an interrupt masks itself when it is signalled.
    pub automasked: bool,
    /// Set if the number of connected interrupts is fixed: a client must disconnect all interrupts before it can connect more.
    pub noresize: bool,
}

/// Request of a client for the interrupts `start..start + count` of a type.
#[derive(Debug)]
pub struct IrqCommand {
    /// The interrupt type.
    pub index: IrqIndex,
    /// The first interrupt.
    pub start: u32,
    /// Number of interrupts. If this is 0, with [`IrqData::None`] and [`IrqAction::Trigger`], the device must disconnect all
    /// interrupts of the type.
    pub count: u32,
    /// Action to perform with `data`.
    pub action: IrqAction,
    /// Selected interrupts, or their eventfds.
    pub data: IrqData,
}

/// Action on interrupts, as requested by a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IrqAction {
    /// Mask; with eventfds: connect the eventfds to signal when the guest masks.
    Mask,
    /// Unmask; with eventfds: connect the eventfds to signal when the guest unmasks.
    Unmask,
    /// Signal the interrupts; with eventfds: connect the interrupts' eventfds.
    Trigger,
}

/// Interrupts to which an [`IrqCommand`] applies, or their eventfds.
#[derive(Debug)]
pub enum IrqData {
    /// All interrupts of `start..start + count`.
    None,
    /// The interrupts whose value is `true`; `count` values.
    Bools(Vec<bool>),
    /// All interrupts of `start..start + count`, to be connected with these `count` eventfds.
    Connect(Vec<OwnedFd>),
    /// All interrupts of `start..start + count`, whose eventfds are to be disconnected.
    Disconnect,
}

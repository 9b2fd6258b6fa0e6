//! The PCI function that the server offers.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::message::{NUM_IRQS, NUM_REGIONS};

/// A PCI function behind a vfio-user server.
///
/// All methods are called on the thread that runs the server's event loop, and a client waits for
/// the reply meanwhile: a register access takes as long as [`read`](Device::read) or
/// [`write`](Device::write) does.
///
/// A method must cope with every value: the server checks what the protocol says, not what the
/// device needs (an access of three bytes at an odd offset reaches `read`).
pub trait Device {
    /// A region: where it can be accessed and mapped. Asked once per region, when the server
    /// starts: regions do not change while it runs.
    fn region(&self, index: RegionIndex) -> Region;

    /// Reads registers or config space: one byte or more, all within the region. `data` comes
    /// filled with all ones, which is the answer where nothing is: a read has no way to fail,
    /// because a client may wait for ever for the data that an error reply does not carry.
    fn read(&mut self, region: RegionIndex, offset: u64, data: &mut [u8]);

    /// Writes registers or config space: one byte or more, all within the region. The device
    /// ignores bytes that cannot be written.
    fn write(&mut self, region: RegionIndex, offset: u64, data: &[u8]);

    /// Largest number of DMA regions that [`dma_map`](Device::dma_map) takes, told to the client.
    /// The protocol's default, which a client does not let a server exceed, is 65,535.
    fn max_dma_maps(&self) -> u32 {
        65_535
    }

    /// Adds a region of the client's memory. Its end does not overflow; its addresses and sizes
    /// need not be aligned to this host's pages.
    ///
    /// # Errors
    ///
    /// The errno goes to the client. Mapping over an existing region is `EEXIST` (section
    /// `VFIO_USER_DMA_MAP`); more regions than the device takes is `ENOSPC`. A region without
    /// memory must be taken: clients announce ROMs and other devices' BARs so, and fail as a whole
    /// when it is refused.
    fn dma_map(&mut self, region: DmaRegion) -> io::Result<()>;

    /// Removes the regions that lie within `range` (address, bytes), or all with `None`, and
    /// returns how many bytes they had. When it returns, nothing touches their memory any more.
    ///
    /// A range without regions is no error: it returns 0. An IOMMU in the guest makes a VMM unmap
    /// more than it mapped, and Cloud Hypervisor waits for ever when an unmap is refused.
    ///
    /// # Errors
    ///
    /// The errno goes to the client: `EINVAL` where a region lies within the range in part.
    fn dma_unmap(&mut self, range: Option<(u64, u64)>) -> io::Result<u64>;

    /// An interrupt type. Asked whenever a client asks.
    fn irq(&self, index: IrqIndex) -> IrqInfo;

    /// Connects interrupts with eventfds, masks or triggers them. `start + count` is at most the
    /// `count` of [`irq`](Device::irq).
    ///
    /// # Errors
    ///
    /// The errno goes to the client.
    fn set_irqs(&mut self, command: IrqCommand) -> io::Result<()>;

    /// Resets the function as a function-level reset does. Comes at any time: clients reset a
    /// device as soon as they have connected, some without looking whether that is offered.
    fn reset(&mut self);

    /// A client has connected and not yet sent a request. `process` made the connection, if the kernel tells. Another process
    /// may hold the socket by now.
    fn connected(&mut self, _process: Option<ClientProcess>) {}

    /// Keeps the socket of a client where it outlives the process. Called by a server with a
    /// [`Journal`](crate::Journal) for each client that it accepts, before it reads anything. The device lets go of the socket
    /// when the client is [gone](Device::disconnected).
    ///
    /// # Errors
    ///
    /// The client is refused.
    fn keep_client(&mut self, _stream: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }

    /// Returns the state for the process after this one, if it changed since the last call. Called by a server with a
    /// [`Journal`](crate::Journal) after each request. At most [`MAX_DEVICE_STATE`](crate::MAX_DEVICE_STATE) bytes.
    ///
    /// The next process makes the device of these bytes. It carries out again what was carried out after the
    /// call: effects of a request that are not in the state must bear to be repeated.
    fn save(&mut self) -> Option<Vec<u8>> {
        None
    }

    /// Notes that the state which [`save`](Device::save) returned last is stored. Nothing needs the earlier states now, nor the
    /// files that they alone name.
    fn saved(&mut self) {}

    /// The client is gone. All DMA regions are to be removed as by [`dma_unmap`](Device::dma_unmap)
    /// and all eventfds closed; the rest of the state is retained (section Client Disconnection).
    fn disconnected(&mut self);
}

/// A process that connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientProcess {
    /// Its number, or 0 if it cannot be seen from here.
    pub pid: u32,
    /// Its user.
    pub user: u32,
}

/// A PCI function's regions, in the order of `VFIO_PCI_*_REGION_INDEX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum RegionIndex {
    /// BAR 0, with BAR 1 where it is a 64-bit one.
    Bar0,
    /// BAR 1.
    Bar1,
    /// BAR 2, with BAR 3 where it is a 64-bit one.
    Bar2,
    /// BAR 3.
    Bar3,
    /// BAR 4, with BAR 5 where it is a 64-bit one.
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

    /// The region with this number.
    pub fn new(index: u32) -> Option<Self> {
        Self::ALL.get(index as usize).copied()
    }
}

/// Rights of a client to a region.
#[derive(Clone, Debug, Default)]
pub struct Region {
    /// Bytes; 0 where the function does not have the region.
    pub size: u64,
    /// The client may read it.
    pub readable: bool,
    /// The client may write it.
    pub writable: bool,
    /// The part that the client maps into the guest, all the rest being trapped.
    pub mappable: Option<MappableArea>,
}

/// The part of a region that is memory of ours, shared with the guest.
///
/// There is at most one in a region because clients disagree on more: some want a file descriptor
/// for each area, QEMU takes one file descriptor in all.
#[derive(Clone, Debug)]
pub struct MappableArea {
    /// First byte, from the beginning of the region; a multiple of the page size.
    pub offset: u64,
    /// Bytes; a multiple of the page size.
    pub size: u64,
    /// The memory.
    pub memory: Arc<OwnedFd>,
    /// Start of the *region* in `memory`: the area begins at `base + offset`. A client knows this one number
    /// for the whole region. So the memory has room for what lies before the area (a memfd has it for
    /// nothing).
    pub base: u64,
}

/// A region of the client's memory.
#[derive(Debug)]
pub struct DmaRegion {
    /// First DMA address. Need not be a guest address: a user-space driver uses its own.
    pub iova: u64,
    /// Bytes, not 0. `iova + size - 1` does not overflow.
    pub size: u64,
    /// The device may read it.
    pub readable: bool,
    /// The device may write it.
    pub writable: bool,
    /// Memory to map to get at it; `None` where the client cannot share it.
    pub memory: Option<DmaMemory>,
}

/// The file that a DMA region is part of. Its size is not checked against the region's.
#[derive(Debug)]
pub struct DmaMemory {
    /// The file.
    pub fd: OwnedFd,
    /// Start of the region in it. The region's end does not overflow.
    pub offset: u64,
}

/// A PCI function's interrupt types, in the order of `VFIO_PCI_*_IRQ_INDEX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum IrqIndex {
    /// The pin.
    Intx,
    /// MSI.
    Msi,
    /// MSI-X.
    Msix,
    /// The device failed: the VMM stops the guest.
    Err,
    /// The device is wanted back: the VMM unplugs it.
    Req,
}

impl IrqIndex {
    /// All interrupt types, in the order of their numbers.
    pub const ALL: [Self; NUM_IRQS as usize] =
        [Self::Intx, Self::Msi, Self::Msix, Self::Err, Self::Req];

    /// The interrupt type with this number.
    pub fn new(index: u32) -> Option<Self> {
        Self::ALL.get(index as usize).copied()
    }
}

/// An interrupt type. All are signalled through eventfds.
#[derive(Clone, Copy, Debug, Default)]
pub struct IrqInfo {
    /// Interrupts of this type; 0 where the function has none.
    pub count: u32,
    /// Can be masked and unmasked by the client.
    pub maskable: bool,
    /// Masks itself when it is signalled.
    pub automasked: bool,
    /// Interrupts cannot be added to those that are connected.
    pub noresize: bool,
}

/// Request of a client for interrupts `start..start + count` of a type.
#[derive(Debug)]
pub struct IrqCommand {
    /// The interrupt type.
    pub index: IrqIndex,
    /// The first interrupt.
    pub start: u32,
    /// Number of interrupts; 0 with [`IrqData::None`] and [`IrqAction::Trigger`]: disconnect all.
    pub count: u32,
    /// Use of `data`.
    pub action: IrqAction,
    /// The interrupts that are meant, or their eventfds.
    pub data: IrqData,
}

/// Request of a client for interrupts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IrqAction {
    /// Mask; with eventfds: signal them when the guest masks.
    Mask,
    /// Unmask; with eventfds: signal them when the guest unmasks.
    Unmask,
    /// Signal; with eventfds: these are what is signalled.
    Trigger,
}

/// The interrupts that an [`IrqCommand`] is for, or their eventfds.
#[derive(Debug)]
pub enum IrqData {
    /// All of `start..start + count`.
    None,
    /// Those with `true`; `count` values.
    Bools(Vec<bool>),
    /// All: signal these from now on; `count` of them.
    Connect(Vec<OwnedFd>),
    /// All: they have no eventfd from now on.
    Disconnect,
}

//! Wire format: structures, command numbers, flags.
//!
//! Field order and sizes are those of the protocol's section with the structure's name. Integers are little-endian. The
//! structures are unaligned, so that they can be read in the receive buffer without a copy.

use std::fmt;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The protocol uses the host's byte order, as client and server share a host.
const _: () = assert!(cfg!(target_endian = "little"));

/// Largest `count` of a region access, announced as `max_data_xfer_size` (the protocol's default).
pub const MAX_DATA_XFER_SIZE: u32 = 1024 * 1024;

/// Value of `max_msg_fds`. Clients split a message that has more descriptors, and QEMU refuses values above 16.
pub const MAX_MSG_FDS: u32 = 16;

/// Maximum number of file descriptors accepted with one message: the kernel's limit for a control message (`SCM_MAX_FD`). It
/// exceeds [`MAX_MSG_FDS`], because Cloud Hypervisor sends the eventfds of all vectors in one message regardless of
/// `max_msg_fds`.
pub const MAX_FDS_ACCEPTED: usize = 253;

/// Largest payload of a message other than `REGION_WRITE`, in bytes. Valid messages are smaller: the largest is a
/// `REGION_WRITE_MULTI` of 200 writes with 4,808 bytes.
pub const MAX_CONTROL_PAYLOAD: usize = 64 * 1024;

/// `VFIO_PCI_NUM_REGIONS`: six BARs, the expansion ROM, config space, VGA.
pub const NUM_REGIONS: u32 = 9;

/// `VFIO_PCI_NUM_IRQS`: INTx, MSI, MSI-X, ERR, REQ.
pub const NUM_IRQS: u32 = 5;

/// Command number. This is not an enum, because a client can send any value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VfioUserCommand(pub u16);

impl VfioUserCommand {
    /// `VFIO_USER_VERSION`
    pub const VERSION: Self = Self(1);
    /// `VFIO_USER_DMA_MAP`
    pub const DMA_MAP: Self = Self(2);
    /// `VFIO_USER_DMA_UNMAP`
    pub const DMA_UNMAP: Self = Self(3);
    /// `VFIO_USER_DEVICE_GET_INFO`
    pub const DEVICE_GET_INFO: Self = Self(4);
    /// `VFIO_USER_DEVICE_GET_REGION_INFO`
    pub const DEVICE_GET_REGION_INFO: Self = Self(5);
    /// `VFIO_USER_DEVICE_GET_REGION_IO_FDS`
    pub const DEVICE_GET_REGION_IO_FDS: Self = Self(6);
    /// `VFIO_USER_DEVICE_GET_IRQ_INFO`
    pub const DEVICE_GET_IRQ_INFO: Self = Self(7);
    /// `VFIO_USER_DEVICE_SET_IRQS`
    pub const DEVICE_SET_IRQS: Self = Self(8);
    /// `VFIO_USER_REGION_READ`
    pub const REGION_READ: Self = Self(9);
    /// `VFIO_USER_REGION_WRITE`
    pub const REGION_WRITE: Self = Self(10);
    /// `VFIO_USER_DEVICE_RESET`
    pub const DEVICE_RESET: Self = Self(13);
    /// `VFIO_USER_REGION_WRITE_MULTI`
    pub const REGION_WRITE_MULTI: Self = Self(15);
    /// `VFIO_USER_DEVICE_FEATURE`
    pub const DEVICE_FEATURE: Self = Self(16);

    /// Returns the largest payload accepted for this command. No memory is allocated for a larger message.
    pub fn max_payload(self) -> usize {
        match self {
            Self::REGION_WRITE => size_of::<RegionAccess>() + MAX_DATA_XFER_SIZE as usize,
            _ => MAX_CONTROL_PAYLOAD,
        }
    }
}

impl fmt::Display for VfioUserCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.0 {
            1 => "VERSION",
            2 => "DMA_MAP",
            3 => "DMA_UNMAP",
            4 => "DEVICE_GET_INFO",
            5 => "DEVICE_GET_REGION_INFO",
            6 => "DEVICE_GET_REGION_IO_FDS",
            7 => "DEVICE_GET_IRQ_INFO",
            8 => "DEVICE_SET_IRQS",
            9 => "REGION_READ",
            10 => "REGION_WRITE",
            11 => "DMA_READ",
            12 => "DMA_WRITE",
            13 => "DEVICE_RESET",
            14 => "DIRTY_PAGES",
            15 => "REGION_WRITE_MULTI",
            16 => "DEVICE_FEATURE",
            17 => "MIG_DATA_READ",
            18 => "MIG_DATA_WRITE",
            number => return write!(f, "command {number}"),
        };
        f.write_str(name)
    }
}

/// Header of every message (section Header).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct VfioUserHeader {
    /// Identifier chosen by the sender and echoed in the reply; need not be unique.
    pub message_id: U16,
    /// Command number, see [`VfioUserCommand`].
    pub command: U16,
    /// Size of the message in bytes, including this header.
    pub message_size: U32,
    /// Message type (see [`Self::TYPE_MASK`]), and the flags [`Self::NO_REPLY`] and [`Self::ERROR`].
    pub flags: U32,
    /// In a reply with the Error flag, a UNIX errno.
    pub error: U32,
}

const _: () = assert!(size_of::<VfioUserHeader>() == VfioUserHeader::SIZE);

impl VfioUserHeader {
    /// Size in bytes.
    pub const SIZE: usize = 16;

    /// Mask of the message type in `flags`.
    pub const TYPE_MASK: u32 = 0xf;
    /// Type of a command message.
    pub const TYPE_COMMAND: u32 = 0;
    /// Type of a reply message.
    pub const TYPE_REPLY: u32 = 1;
    /// Flag: the sender wants no reply.
    pub const NO_REPLY: u32 = 1 << 4;
    /// Flag: the command failed.
    pub const ERROR: u32 = 1 << 5;

    /// Returns the message's command.
    pub fn command(&self) -> VfioUserCommand {
        VfioUserCommand(self.command.get())
    }

    /// Returns the message type, in the low four bits of `flags`.
    pub fn message_type(&self) -> u32 {
        self.flags.get() & Self::TYPE_MASK
    }

    /// Returns whether the sender wants no reply.
    pub fn is_no_reply(&self) -> bool {
        self.flags.get() & Self::NO_REPLY != 0
    }

    /// Returns the header of a reply to this command with `payload` bytes of payload.
    pub fn reply(&self, payload: usize) -> Self {
        Self {
            message_id: self.message_id,
            command: self.command,
            // The cast keeps the value: a reply's payload is at most that of a region access, far below 4 GiB.
            message_size: ((Self::SIZE + payload) as u32).into(),
            flags: Self::TYPE_REPLY.into(),
            error: 0.into(),
        }
    }

    /// Returns the error reply to this command, which is a header only (section Header).
    pub fn error_reply(&self, errno: u32) -> Self {
        Self {
            flags: (Self::TYPE_REPLY | Self::ERROR).into(),
            error: errno.into(),
            ..self.reply(0)
        }
    }
}

/// Fixed part of `VERSION`, before the JSON.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct VersionPayload {
    /// Major version, which changes with incompatible changes of the protocol.
    pub major: U16,
    /// Minor version, which changes with compatible additions.
    pub minor: U16,
}

const _: () = assert!(size_of::<VersionPayload>() == 4);

/// Payload of `DMA_MAP`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DmaMap {
    /// Size of this structure.
    pub argsz: U32,
    /// Flags of the region: any of [`DmaMap::READ`], [`DmaMap::WRITE`] and [`DmaMap::MMAP`]; [`DmaMap::FILE_IO`] is refused.
    pub flags: U32,
    /// Offset of the region in the file that accompanies the message.
    pub offset: U64,
    /// First DMA address.
    pub address: U64,
    /// Size in bytes.
    pub size: U64,
}

const _: () = assert!(size_of::<DmaMap>() == 32);

impl DmaMap {
    /// The device may read the region.
    pub const READ: u32 = 1 << 0;
    /// The device may write the region.
    pub const WRITE: u32 = 1 << 1;
    /// The region can be mapped: its file descriptor accompanies the message. Only recent clients set this flag.
    pub const MMAP: u32 = 1 << 2;
    /// The region must be accessed through `pread` and `pwrite`.
    pub const FILE_IO: u32 = 1 << 3;
}

/// Payload of `DMA_UNMAP` and of its reply.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DmaUnmap {
    /// Maximum reply payload that the client accepts, in bytes.
    pub argsz: U32,
    /// Flags as in `struct vfio_iommu_type1_dma_unmap`.
    pub flags: U32,
    /// First DMA address.
    pub address: U64,
    /// Size in bytes.
    pub size: U64,
}

const _: () = assert!(size_of::<DmaUnmap>() == 24);

impl DmaUnmap {
    /// `VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP`
    pub const GET_DIRTY_BITMAP: u32 = 1 << 0;
    /// `VFIO_DMA_UNMAP_FLAG_ALL`: unmap everything; address and size are zero.
    pub const ALL: u32 = 1 << 1;
}

/// Payload of `DEVICE_GET_INFO` and of its reply.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DeviceInfo {
    /// Request: maximum reply payload that the client accepts. Reply: size of this structure.
    pub argsz: U32,
    /// Flags of the device: [`DeviceInfo::RESET`] and [`DeviceInfo::PCI`].
    pub flags: U32,
    /// Number of regions: [`NUM_REGIONS`].
    pub num_regions: U32,
    /// Number of interrupt types: [`NUM_IRQS`].
    pub num_irqs: U32,
}

const _: () = assert!(size_of::<DeviceInfo>() == 16);

impl DeviceInfo {
    /// `VFIO_DEVICE_FLAGS_RESET`: the device supports `DEVICE_RESET`.
    pub const RESET: u32 = 1 << 0;
    /// `VFIO_DEVICE_FLAGS_PCI`: the device is a PCI function.
    pub const PCI: u32 = 1 << 1;
}

/// Payload of `DEVICE_GET_REGION_INFO`, and the fixed part of its reply.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RegionInfo {
    /// Request: maximum reply payload that the client accepts. Reply: size of the full reply payload.
    pub argsz: U32,
    /// Flags of the region: any of [`Self::READ`], [`Self::WRITE`], [`Self::MMAP`] and [`Self::CAPS`].
    pub flags: U32,
    /// Index of the region.
    pub index: U32,
    /// Offset of the first capability, from the beginning of this structure.
    pub cap_offset: U32,
    /// Size in bytes; 0 for a region that does not exist.
    pub size: U64,
    /// Offset of the region in the file that the client maps. To map an area, the client adds the area's offset in the region.
    pub offset: U64,
}

const _: () = assert!(size_of::<RegionInfo>() == 32);

impl RegionInfo {
    /// `VFIO_REGION_INFO_FLAG_READ`: the client may read the region.
    pub const READ: u32 = 1 << 0;
    /// `VFIO_REGION_INFO_FLAG_WRITE`: the client may write the region.
    pub const WRITE: u32 = 1 << 1;
    /// `VFIO_REGION_INFO_FLAG_MMAP`: the client may map the areas that the sparse mmap capability names.
    pub const MMAP: u32 = 1 << 2;
    /// `VFIO_REGION_INFO_FLAG_CAPS`: the reply has capabilities, from `cap_offset` on.
    pub const CAPS: u32 = 1 << 3;
}

/// Sparse mmap capability with one area (section VFIO region info cap sparse mmap), including the capability header.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SparseMmap {
    /// `VFIO_REGION_INFO_CAP_SPARSE_MMAP`
    pub id: U16,
    /// Capability version, 1.
    pub version: U16,
    /// Offset of the next capability; 0 if there is none.
    pub next: U32,
    /// Number of areas, 1.
    pub nr_areas: U32,
    /// No value is defined, so zero.
    pub reserved: U32,
    /// Offset of the area in the region.
    pub offset: U64,
    /// Size of the area in bytes.
    pub size: U64,
}

const _: () = assert!(size_of::<SparseMmap>() == 32);

impl SparseMmap {
    /// `VFIO_REGION_INFO_CAP_SPARSE_MMAP`
    pub const ID: u16 = 1;
}

/// Payload of `DEVICE_GET_REGION_IO_FDS`, and the fixed part of its reply.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RegionIoFds {
    /// Request: maximum reply payload that the client accepts. Reply: size of the full reply payload.
    pub argsz: U32,
    /// No value is defined, so zero.
    pub flags: U32,
    /// Index of the region.
    pub index: U32,
    /// Request: zero. Reply: number of sub-regions that follow.
    pub count: U32,
}

const _: () = assert!(size_of::<RegionIoFds>() == 16);

/// Payload of `DEVICE_GET_IRQ_INFO` and of its reply.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IrqInfoPayload {
    /// Request: maximum reply payload that the client accepts. Reply: size of this structure.
    pub argsz: U32,
    /// Flags of the interrupt type: any of [`Self::EVENTFD`], [`Self::MASKABLE`], [`Self::AUTOMASKED`] and [`Self::NORESIZE`].
    pub flags: U32,
    /// Index of the interrupt type.
    pub index: U32,
    /// Number of interrupts of this type.
    pub count: U32,
}

const _: () = assert!(size_of::<IrqInfoPayload>() == 16);

impl IrqInfoPayload {
    /// `VFIO_IRQ_INFO_EVENTFD`: the interrupts are signalled through eventfds.
    pub const EVENTFD: u32 = 1 << 0;
    /// `VFIO_IRQ_INFO_MASKABLE`: the client can mask and unmask the interrupts.
    pub const MASKABLE: u32 = 1 << 1;
    /// `VFIO_IRQ_INFO_AUTOMASKED`: an interrupt masks itself when it is signalled.
    pub const AUTOMASKED: u32 = 1 << 2;
    /// `VFIO_IRQ_INFO_NORESIZE`: the client must disconnect all interrupts before it can connect more.
    pub const NORESIZE: u32 = 1 << 3;
}

/// Payload of `DEVICE_SET_IRQS`, before the array of booleans.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IrqSet {
    /// Size of the payload.
    pub argsz: U32,
    /// One of the `DATA_` flags (contents of the payload), and one of the `ACTION_` flags (action on the interrupts).
    pub flags: U32,
    /// Index of the interrupt type.
    pub index: U32,
    /// First selected interrupt.
    pub start: U32,
    /// Number of selected interrupts.
    pub count: U32,
}

const _: () = assert!(size_of::<IrqSet>() == 20);

impl IrqSet {
    /// `VFIO_IRQ_SET_DATA_NONE`: the payload has no array, so the action applies to all selected interrupts.
    pub const DATA_NONE: u32 = 1 << 0;
    /// `VFIO_IRQ_SET_DATA_BOOL`: the payload has a byte for each selected interrupt; the action applies if it is not 0.
    pub const DATA_BOOL: u32 = 1 << 1;
    /// `VFIO_IRQ_SET_DATA_EVENTFD`: an eventfd for each selected interrupt accompanies the message.
    pub const DATA_EVENTFD: u32 = 1 << 2;
    /// `VFIO_IRQ_SET_ACTION_MASK`: mask the interrupts.
    pub const ACTION_MASK: u32 = 1 << 3;
    /// `VFIO_IRQ_SET_ACTION_UNMASK`: unmask the interrupts.
    pub const ACTION_UNMASK: u32 = 1 << 4;
    /// `VFIO_IRQ_SET_ACTION_TRIGGER`: signal the interrupts, or connect their eventfds.
    pub const ACTION_TRIGGER: u32 = 1 << 5;
}

/// Payload of `REGION_READ` and `REGION_WRITE` and of their replies, before the data.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RegionAccess {
    /// Offset in the region.
    pub offset: U64,
    /// Index of the region.
    pub region: U32,
    /// Number of bytes.
    pub count: U32,
}

const _: () = assert!(size_of::<RegionAccess>() == 16);

/// Single write of a `REGION_WRITE_MULTI` (section Single Device Write Format).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SingleWrite {
    /// Region, offset and size of the write.
    pub access: RegionAccess,
    /// Data, of which the first `count` bytes are written.
    pub data: [u8; 8],
}

const _: () = assert!(size_of::<SingleWrite>() == 24);

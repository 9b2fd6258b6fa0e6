//! Messages on the wire: structures, command numbers, flags.
//!
//! Offsets and sizes are those of the protocol's section of the same name. Integers are
//! little-endian; the structures have no alignment, so that they are read in place.

use std::fmt;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The protocol has the host's byte order, and a client and its server share a host.
const _: () = assert!(cfg!(target_endian = "little"));

/// Largest `count` of a region access, announced as `max_data_xfer_size` (the protocol's default).
pub const MAX_DATA_XFER_SIZE: u32 = 1024 * 1024;

/// Announced as `max_msg_fds`. A client may refuse more than 16 (QEMU does), and splits what it
/// sends by it.
pub const MAX_MSG_FDS: u32 = 16;

/// File descriptors that one message can carry: the kernel's limit for one control message
/// (`SCM_MAX_FD`). Cloud Hypervisor sends the eventfds of all vectors at once, whatever
/// `max_msg_fds` says.
pub const MAX_FDS_ACCEPTED: usize = 253;

/// Largest payload of a message other than `REGION_WRITE`. The largest that a client has a reason
/// for is a `REGION_WRITE_MULTI` of 200 writes, 4,808 bytes.
pub const MAX_CONTROL_PAYLOAD: usize = 64 * 1024;

/// `VFIO_PCI_NUM_REGIONS`: six BARs, the expansion ROM, config space, VGA.
pub const NUM_REGIONS: u32 = 9;

/// `VFIO_PCI_NUM_IRQS`: INTx, MSI, MSI-X, ERR, REQ.
pub const NUM_IRQS: u32 = 5;

/// A command number. Any value can come from a client, so this is no enum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command(pub u16);

impl Command {
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

    /// Largest payload that is read for this command; a message with more is not allocated for.
    pub fn max_payload(self) -> usize {
        match self {
            Self::REGION_WRITE => size_of::<RegionAccess>() + MAX_DATA_XFER_SIZE as usize,
            _ => MAX_CONTROL_PAYLOAD,
        }
    }
}

impl fmt::Display for Command {
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

/// The 16 bytes before every message (section Header).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Header {
    /// Chosen by the sender, echoed in the reply; need not be unique.
    pub message_id: U16,
    /// See [`Command`].
    pub command: U16,
    /// Size of the message, this header included.
    pub message_size: U32,
    /// Type, No_reply, Error.
    pub flags: U32,
    /// In a reply with the Error flag, a UNIX errno.
    pub error: U32,
}

const _: () = assert!(size_of::<Header>() == Header::SIZE);

impl Header {
    /// Bytes on the wire.
    pub const SIZE: usize = 16;

    /// The bits of `flags` that hold the message type.
    pub const TYPE_MASK: u32 = 0xf;
    /// Type of a command message.
    pub const TYPE_COMMAND: u32 = 0;
    /// Type of a reply message.
    pub const TYPE_REPLY: u32 = 1;
    /// No reply is wanted.
    pub const NO_REPLY: u32 = 1 << 4;
    /// The command failed.
    pub const ERROR: u32 = 1 << 5;

    /// The command that the message is or answers.
    pub fn command(&self) -> Command {
        Command(self.command.get())
    }

    /// The message type, in the low four bits of `flags`.
    pub fn message_type(&self) -> u32 {
        self.flags.get() & Self::TYPE_MASK
    }

    /// Returns whether the sender wants no reply.
    pub fn no_reply(&self) -> bool {
        self.flags.get() & Self::NO_REPLY != 0
    }

    /// The header of the reply to this command, for a payload of `payload` bytes.
    pub fn reply(&self, payload: usize) -> Self {
        Self {
            message_id: self.message_id,
            command: self.command,
            // A reply's payload is at most a region access's, far below 4 GiB.
            message_size: ((Self::SIZE + payload) as u32).into(),
            flags: Self::TYPE_REPLY.into(),
            error: 0.into(),
        }
    }

    /// The reply to this command when it failed: the header alone (section Header).
    pub fn error_reply(&self, errno: u32) -> Self {
        Self {
            flags: (Self::TYPE_REPLY | Self::ERROR).into(),
            error: errno.into(),
            ..self.reply(0)
        }
    }
}

/// The fixed part of `VERSION`, before the JSON.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Version {
    /// Changes with incompatible changes of the protocol.
    pub major: U16,
    /// Changes with compatible additions.
    pub minor: U16,
}

const _: () = assert!(size_of::<Version>() == 4);

/// Payload of `DMA_MAP`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DmaMap {
    /// Size of this structure.
    pub argsz: U32,
    /// `READ`, `WRITE`, `MMAP`.
    pub flags: U32,
    /// Start of the region in the file that comes with the message.
    pub offset: U64,
    /// First DMA address.
    pub address: U64,
    /// Bytes.
    pub size: U64,
}

const _: () = assert!(size_of::<DmaMap>() == 32);

impl DmaMap {
    /// The device may read the region.
    pub const READ: u32 = 1 << 0;
    /// The device may write the region.
    pub const WRITE: u32 = 1 << 1;
    /// The region is to be mapped: a file descriptor comes with it. Newer clients say so.
    pub const MMAP: u32 = 1 << 2;
    /// The region is to be accessed through `pread` and `pwrite`.
    pub const FILE_IO: u32 = 1 << 3;
}

/// Payload of `DMA_UNMAP` and of its reply.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DmaUnmap {
    /// Largest reply payload.
    pub argsz: U32,
    /// As in `struct vfio_iommu_type1_dma_unmap`.
    pub flags: U32,
    /// First DMA address.
    pub address: U64,
    /// Bytes.
    pub size: U64,
}

const _: () = assert!(size_of::<DmaUnmap>() == 24);

impl DmaUnmap {
    /// `VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP`
    pub const GET_DIRTY_BITMAP: u32 = 1 << 0;
    /// `VFIO_DMA_UNMAP_FLAG_ALL`: address and size are zero, everything is unmapped.
    pub const ALL: u32 = 1 << 1;
}

/// Payload of `DEVICE_GET_INFO` and of its reply.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DeviceInfo {
    /// Request: largest reply payload. Reply: the size of this structure.
    pub argsz: U32,
    /// `RESET`, `PCI`.
    pub flags: U32,
    /// [`NUM_REGIONS`].
    pub num_regions: U32,
    /// [`NUM_IRQS`].
    pub num_irqs: U32,
}

const _: () = assert!(size_of::<DeviceInfo>() == 16);

impl DeviceInfo {
    /// `VFIO_DEVICE_FLAGS_RESET`: the device takes `DEVICE_RESET`.
    pub const RESET: u32 = 1 << 0;
    /// `VFIO_DEVICE_FLAGS_PCI`
    pub const PCI: u32 = 1 << 1;
}

/// Payload of `DEVICE_GET_REGION_INFO`, and the fixed part of its reply.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RegionInfo {
    /// Request: largest reply payload. Reply: size of the full reply payload.
    pub argsz: U32,
    /// `READ`, `WRITE`, `MMAP`, `CAPS`.
    pub flags: U32,
    /// Index of the region.
    pub index: U32,
    /// Offset of the capabilities, from the beginning of this structure.
    pub cap_offset: U32,
    /// Bytes; 0 for a region that does not exist.
    pub size: U64,
    /// Number that a client adds to an area's offset to get the file offset to map.
    pub offset: U64,
}

const _: () = assert!(size_of::<RegionInfo>() == 32);

impl RegionInfo {
    /// `VFIO_REGION_INFO_FLAG_READ`
    pub const READ: u32 = 1 << 0;
    /// `VFIO_REGION_INFO_FLAG_WRITE`
    pub const WRITE: u32 = 1 << 1;
    /// `VFIO_REGION_INFO_FLAG_MMAP`
    pub const MMAP: u32 = 1 << 2;
    /// `VFIO_REGION_INFO_FLAG_CAPS`
    pub const CAPS: u32 = 1 << 3;
}

/// A sparse mmap capability of one area (section VFIO region info cap sparse mmap), capability
/// header included.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SparseMmap {
    /// `VFIO_REGION_INFO_CAP_SPARSE_MMAP`
    pub id: U16,
    /// 1
    pub version: U16,
    /// Offset of the next capability; 0: there is none.
    pub next: U32,
    /// 1
    pub nr_areas: U32,
    /// Zero.
    pub reserved: U32,
    /// Start of the area in the region.
    pub offset: U64,
    /// Bytes of the area.
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
    /// Request: largest reply payload. Reply: size of the full reply payload.
    pub argsz: U32,
    /// Zero.
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
pub struct IrqInfo {
    /// Request: largest reply payload. Reply: the size of this structure.
    pub argsz: U32,
    /// `EVENTFD`, `MASKABLE`, `AUTOMASKED`, `NORESIZE`.
    pub flags: U32,
    /// Index of the interrupt type.
    pub index: U32,
    /// Interrupts of this type.
    pub count: U32,
}

const _: () = assert!(size_of::<IrqInfo>() == 16);

impl IrqInfo {
    /// `VFIO_IRQ_INFO_EVENTFD`
    pub const EVENTFD: u32 = 1 << 0;
    /// `VFIO_IRQ_INFO_MASKABLE`
    pub const MASKABLE: u32 = 1 << 1;
    /// `VFIO_IRQ_INFO_AUTOMASKED`
    pub const AUTOMASKED: u32 = 1 << 2;
    /// `VFIO_IRQ_INFO_NORESIZE`
    pub const NORESIZE: u32 = 1 << 3;
}

/// Payload of `DEVICE_SET_IRQS`, before the array of booleans.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IrqSet {
    /// Size of the payload.
    pub argsz: U32,
    /// One `DATA_` and one `ACTION_` flag.
    pub flags: U32,
    /// Index of the interrupt type.
    pub index: U32,
    /// First interrupt that is meant.
    pub start: U32,
    /// Interrupts that are meant.
    pub count: U32,
}

const _: () = assert!(size_of::<IrqSet>() == 20);

impl IrqSet {
    /// `VFIO_IRQ_SET_DATA_NONE`
    pub const DATA_NONE: u32 = 1 << 0;
    /// `VFIO_IRQ_SET_DATA_BOOL`
    pub const DATA_BOOL: u32 = 1 << 1;
    /// `VFIO_IRQ_SET_DATA_EVENTFD`
    pub const DATA_EVENTFD: u32 = 1 << 2;
    /// `VFIO_IRQ_SET_ACTION_MASK`
    pub const ACTION_MASK: u32 = 1 << 3;
    /// `VFIO_IRQ_SET_ACTION_UNMASK`
    pub const ACTION_UNMASK: u32 = 1 << 4;
    /// `VFIO_IRQ_SET_ACTION_TRIGGER`
    pub const ACTION_TRIGGER: u32 = 1 << 5;
}

/// Payload of `REGION_READ` and `REGION_WRITE` and of their replies, before the data.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RegionAccess {
    /// First byte, from the beginning of the region.
    pub offset: U64,
    /// Index of the region.
    pub region: U32,
    /// Bytes.
    pub count: U32,
}

const _: () = assert!(size_of::<RegionAccess>() == 16);

/// One write of `REGION_WRITE_MULTI` (section Single Device Write Format).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SingleWrite {
    /// Place of the access.
    pub access: RegionAccess,
    /// The first `count` bytes are written.
    pub data: [u8; 8],
}

const _: () = assert!(size_of::<SingleWrite>() == 24);

//! System calls of VFIO and iommufd (documented in `linux/vfio.h` and `linux/iommufd.h`) and the admin passthrough of the kernel's
//! `nvme` driver. Each function returns the kernel's error.
//!
//! The structures come from `vfio_bindings` and `iommufd_bindings`. This module makes the calls itself instead of through a wrapper
//! crate, because any call may fail when a drive is pulled, and the caller needs the error.
#![expect(
    unsafe_code,
    reason = "system calls on files of VFIO and of the nvme driver"
)]

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use iommufd_bindings as iommufd_abi;
use libc::c_ulong;
use vfio_bindings::bindings::vfio as abi;
use vmm_sys_util::ioctl::{
    ioctl, ioctl_with_mut_ptr, ioctl_with_mut_ref, ioctl_with_ptr, ioctl_with_ref, ioctl_with_val,
};
use zerocopy::IntoBytes;

use nvme_mpt_memory::RawBytes;
use nvme_spec::sqe::Sqe;

/// Returns the request code of a VFIO ioctl. VFIO's codes encode neither size nor direction.
const fn request(number: c_ulong) -> c_ulong {
    ((abi::VFIO_TYPE as c_ulong) << 8) | (abi::VFIO_BASE as c_ulong + number)
}

const GET_API_VERSION: c_ulong = request(0);
const CHECK_EXTENSION: c_ulong = request(1);
const SET_IOMMU: c_ulong = request(2);
const GROUP_GET_STATUS: c_ulong = request(3);
const GROUP_SET_CONTAINER: c_ulong = request(4);
const GROUP_UNSET_CONTAINER: c_ulong = request(5);
const GROUP_GET_DEVICE_FD: c_ulong = request(6);
const DEVICE_GET_INFO: c_ulong = request(7);
const DEVICE_GET_REGION_INFO: c_ulong = request(8);
const DEVICE_GET_IRQ_INFO: c_ulong = request(9);
const DEVICE_SET_IRQS: c_ulong = request(10);
const DEVICE_RESET: c_ulong = request(11);
const IOMMU_GET_INFO: c_ulong = request(12);
const IOMMU_MAP_DMA: c_ulong = request(13);
const IOMMU_UNMAP_DMA: c_ulong = request(14);
const DEVICE_BIND_IOMMUFD: c_ulong = request(18);
const DEVICE_ATTACH_IOMMUFD_PT: c_ulong = request(19);

/// Returns the request code of an ioctl of iommufd, which has VFIO's type and numbers from 80h.
const fn iommufd_request(number: c_ulong) -> c_ulong {
    ((abi::VFIO_TYPE as c_ulong) << 8) | (0x80 + number)
}

const IOAS_ALLOC: c_ulong = iommufd_request(1);
const IOAS_IOVA_RANGES: c_ulong = iommufd_request(4);
const IOAS_MAP: c_ulong = iommufd_request(5);
const IOAS_UNMAP: c_ulong = iommufd_request(6);

/// Request code of `NVME_IOCTL_ADMIN_CMD`: `_IOWR('N', 0x41, struct nvme_admin_cmd)`.
const NVME_ADMIN: c_ulong = 0xC048_4E41;

/// `struct nvme_passthru_cmd` (Linux, `include/uapi/linux/nvme_ioctl.h`).
#[derive(Default)]
#[repr(C)]
struct NvmePassthroughCommand {
    opcode: u8,
    flags: u8,
    rsvd1: u16,
    nsid: u32,
    cdw2: u32,
    cdw3: u32,
    metadata: u64,
    addr: u64,
    metadata_len: u32,
    data_len: u32,
    cdw10: [u32; 6],
    timeout_ms: u32,
    result: u32,
}

const _: () = assert!(size_of::<NvmePassthroughCommand>() == 72);

/// Maximum length of a structure that the kernel may return, in bytes.
const INFO_BYTES_MAX: usize = 1 << 20;

/// Converts the result of a system call: a negative one to the error in `errno`.
fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Returns the `argsz` field for a structure of type `T`.
const fn argsz<T>() -> u32 {
    size_of::<T>() as u32
}

/// Sends an admin command, which transfers exactly `data`, through the file of a controller that the kernel's `nvme` driver
/// has. Returns dword 0 of the completion.
pub(super) fn nvme_admin(controller: &File, sqe: &Sqe, data: &mut [u8]) -> io::Result<u32> {
    let mut command = NvmePassthroughCommand {
        opcode: sqe.cdw0.opcode(),
        nsid: sqe.nsid.0,
        cdw2: sqe.cdw2,
        cdw3: sqe.cdw3,
        addr: data.as_mut_ptr() as u64,
        data_len: u32::try_from(data.len()).map_err(io::Error::other)?,
        cdw10: [
            sqe.cdw10, sqe.cdw11, sqe.cdw12, sqe.cdw13, sqe.cdw14, sqe.cdw15,
        ],
        ..NvmePassthroughCommand::default()
    };
    // SAFETY: the kernel reads and writes the structure, whose size is part of the call's number. The drive writes
    // `data_len` bytes at `addr`, which are the bytes of `data`: the command transfers exactly that many.
    match checked(unsafe { ioctl_with_mut_ref(controller, NVME_ADMIN, &mut command) })? {
        0 => Ok(command.result),
        status => Err(io::Error::other(format!(
            "the drive's status is {status:03X}h"
        ))),
    }
}

/// Returns whether the container supports the known version of the VFIO API.
pub(super) fn is_version_known(container: &File) -> io::Result<bool> {
    // SAFETY: the call has no argument.
    let version = checked(unsafe { ioctl(container, GET_API_VERSION) })?;
    Ok(u32::try_from(version) == Ok(abi::VFIO_API_VERSION))
}

/// Returns whether the container supports an extension, such as a type of IOMMU.
pub(super) fn has_extension(container: &File, extension: u32) -> io::Result<bool> {
    // SAFETY: the argument is a number.
    let result = unsafe { ioctl_with_val(container, CHECK_EXTENSION, extension.into()) };
    Ok(checked(result)? > 0)
}

/// Selects the IOMMU type of a container that already has a group.
pub(super) fn set_iommu(container: &File, kind: u32) -> io::Result<()> {
    // SAFETY: the argument is a number.
    checked(unsafe { ioctl_with_val(container, SET_IOMMU, kind.into()) }).map(drop)
}

/// Returns `VFIO_GROUP_FLAGS_*` of a group.
pub(super) fn group_flags(group: &File) -> io::Result<u32> {
    let mut status = abi::vfio_group_status {
        argsz: argsz::<abi::vfio_group_status>(),
        flags: 0,
    };
    // SAFETY: the kernel fills the structure, whose size is in it.
    checked(unsafe { ioctl_with_mut_ref(group, GROUP_GET_STATUS, &mut status) })?;
    Ok(status.flags)
}

/// Puts a group into a container.
pub(super) fn set_container(group: &File, container: &File) -> io::Result<()> {
    let container = container.as_raw_fd();
    // SAFETY: the kernel reads a descriptor's number.
    checked(unsafe { ioctl_with_ref(group, GROUP_SET_CONTAINER, &container) }).map(drop)
}

/// Removes a group from its container. The caller ensures that no device of the group is open.
pub(super) fn unset_container(group: &File) -> io::Result<()> {
    // SAFETY: the call has no argument.
    checked(unsafe { ioctl(group, GROUP_UNSET_CONTAINER) }).map(drop)
}

/// Opens a device of a group.
pub(super) fn open_device(group: &File, name: &CStr) -> io::Result<File> {
    // SAFETY: the kernel reads the C string; the returned descriptor has no other owner.
    unsafe {
        let fd = checked(ioctl_with_ptr(group, GROUP_GET_DEVICE_FD, name.as_ptr()))?;
        Ok(File::from_raw_fd(fd))
    }
}

/// Returns `VFIO_DEVICE_FLAGS_*` of a device.
pub(super) fn device_flags(device: &File) -> io::Result<u32> {
    let mut info = abi::vfio_device_info {
        argsz: argsz::<abi::vfio_device_info>(),
        ..Default::default()
    };
    // SAFETY: the kernel writes at most `argsz` bytes, the size of the structure.
    checked(unsafe { ioctl_with_mut_ref(device, DEVICE_GET_INFO, &mut info) })?;
    Ok(info.flags)
}

/// A region of a device, such as a BAR.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct VfioDeviceRegion {
    /// Length of the region in bytes; 0 if the device has no such region.
    pub(super) size: u64,
    /// Offset of the region in the device's file.
    pub(super) offset: u64,
    /// Parts of the region that can be mapped, each as offset in the region and length.
    pub(super) mappable: Vec<(u64, u64)>,
}

/// Reads the description of the region that has this index in VFIO.
pub(super) fn region(device: &File, index: u32) -> io::Result<VfioDeviceRegion> {
    type Fixed = abi::vfio_region_info;
    let info = VfioCapabilityChain::query(
        device,
        DEVICE_GET_REGION_INFO,
        size_of::<Fixed>(),
        Some((offset_of!(Fixed, index), index)),
    )?;
    Ok(parse_region(&info))
}

fn parse_region(info: &VfioCapabilityChain) -> VfioDeviceRegion {
    type Fixed = abi::vfio_region_info;
    type Sparse = abi::vfio_region_info_cap_sparse_mmap;
    let flags = info.u32(offset_of!(Fixed, flags));
    let size = info.u64(offset_of!(Fixed, size));
    let mut mappable = Vec::new();
    if flags & abi::VFIO_REGION_INFO_FLAG_MMAP != 0 {
        let sparse = (flags & abi::VFIO_REGION_INFO_FLAG_CAPS != 0)
            .then(|| info.u32(offset_of!(Fixed, cap_offset)))
            .and_then(|first| info.capability(first, abi::VFIO_REGION_INFO_CAP_SPARSE_MMAP));
        match sparse {
            None => mappable.push((0, size)),
            Some(at) => {
                let count = info.u32(at + offset_of!(Sparse, nr_areas));
                mappable = info.read_pairs(at + offset_of!(Sparse, areas), count);
                mappable.retain(|(start, len)| {
                    *len > 0 && start.checked_add(*len).is_some_and(|end| end <= size)
                });
            }
        }
    }
    VfioDeviceRegion {
        size,
        offset: info.u64(offset_of!(Fixed, offset)),
        mappable,
    }
}

/// Returns whether a device can signal an eventfd for an interrupt, which is given by its index in VFIO.
pub(super) fn has_event(device: &File, index: u32) -> io::Result<bool> {
    let mut info = abi::vfio_irq_info {
        argsz: argsz::<abi::vfio_irq_info>(),
        index,
        ..Default::default()
    };
    // SAFETY: the kernel fills the structure, whose size is in it.
    checked(unsafe { ioctl_with_mut_ref(device, DEVICE_GET_IRQ_INFO, &mut info) })?;
    Ok(info.count > 0 && info.flags & abi::VFIO_IRQ_INFO_EVENTFD != 0)
}

/// Creates a non-blocking eventfd.
pub(super) fn event_fd() -> io::Result<OwnedFd> {
    // SAFETY: the call has no pointers; the returned descriptor has no other owner.
    unsafe {
        let fd = checked(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Makes the kernel signal `event` for the first interrupt of an index of VFIO.
pub(super) fn set_event(device: &File, index: u32, event: &impl AsRawFd) -> io::Result<()> {
    #[repr(C)]
    struct SetEvent {
        header: abi::vfio_irq_set,
        event: i32,
    }
    let set = SetEvent {
        header: abi::vfio_irq_set {
            argsz: argsz::<SetEvent>(),
            flags: abi::VFIO_IRQ_SET_DATA_EVENTFD | abi::VFIO_IRQ_SET_ACTION_TRIGGER,
            index,
            start: 0,
            count: 1,
            ..Default::default()
        },
        event: event.as_raw_fd(),
    };
    // SAFETY: the kernel reads the structure, whose size is in it; one descriptor number follows the header, as `count`
    // says.
    checked(unsafe { ioctl_with_ref(device, DEVICE_SET_IRQS, &set) }).map(drop)
}

/// Resets a device.
pub(super) fn reset(device: &File) -> io::Result<()> {
    // SAFETY: the call has no argument.
    checked(unsafe { ioctl(device, DEVICE_RESET) }).map(drop)
}

/// Properties of a type 1 IOMMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct IommuInfo {
    /// Supported page sizes, one bit each.
    pub(super) page_sizes: u64,
    /// IOVA ranges that the IOMMU translates; `None` if the kernel does not report them (before 5.4).
    pub(super) usable_iovas: Option<Vec<RangeInclusive<u64>>>,
    /// Number of mappings that can still be added; `None` if the kernel does not report it (before 5.10).
    pub(super) mappings_left: Option<u32>,
}

/// Reads the properties of a container's IOMMU.
pub(super) fn iommu_info(container: &File) -> io::Result<IommuInfo> {
    let fixed = size_of::<abi::vfio_iommu_type1_info>();
    Ok(parse_iommu(&VfioCapabilityChain::query(
        container,
        IOMMU_GET_INFO,
        fixed,
        None,
    )?))
}

fn parse_iommu(info: &VfioCapabilityChain) -> IommuInfo {
    type Fixed = abi::vfio_iommu_type1_info;
    type Ranges = abi::vfio_iommu_type1_info_cap_iova_range;
    type Avail = abi::vfio_iommu_type1_info_dma_avail;
    let flags = info.u32(offset_of!(Fixed, flags));
    let capability = |id| {
        (flags & abi::VFIO_IOMMU_INFO_CAPS != 0)
            .then(|| info.u32(offset_of!(Fixed, cap_offset)))
            .and_then(|first| info.capability(first, id))
    };
    let usable = capability(abi::VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE).map(|at| {
        let count = info.u32(at + offset_of!(Ranges, nr_iovas));
        let ranges = info.read_pairs(at + offset_of!(Ranges, iova_ranges), count);
        ranges
            .into_iter()
            .map(|(start, end)| start..=end)
            .filter(|range| !range.is_empty())
            .collect()
    });
    let page_sizes = if flags & abi::VFIO_IOMMU_INFO_PGSIZES != 0 {
        info.u64(offset_of!(Fixed, iova_pgsizes))
    } else {
        0
    };
    IommuInfo {
        page_sizes,
        usable_iovas: usable,
        mappings_left: capability(abi::VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL)
            .map(|at| info.u32(at + offset_of!(Avail, avail))),
    }
}

/// Maps `size` bytes at `iova` for DMA of the container's devices. `size` is the length of `memory`, rounded up to whole pages.
pub(super) fn map_dma(
    container: &File,
    memory: RawBytes<'_>,
    iova: u64,
    size: u64,
    writable: bool,
) -> io::Result<()> {
    let write = if writable {
        abi::VFIO_DMA_MAP_FLAG_WRITE
    } else {
        0
    };
    let map = abi::vfio_iommu_type1_dma_map {
        argsz: argsz::<abi::vfio_iommu_type1_dma_map>(),
        flags: abi::VFIO_DMA_MAP_FLAG_READ | write,
        vaddr: memory.as_ptr() as u64,
        iova,
        size,
    };
    // SAFETY: the kernel reads the structure, and pins pages that are mapped in this process, or refuses. The pages
    // belong to a `Mapping`, which others may write at any time and which is only accessed raw.
    checked(unsafe { ioctl_with_ref(container, IOMMU_MAP_DMA, &map) }).map(drop)
}

/// Removes mappings. Returns the number of unmapped bytes.
pub(super) fn unmap_dma(container: &File, iova: u64, size: u64) -> io::Result<u64> {
    let mut unmap = abi::vfio_iommu_type1_dma_unmap {
        argsz: argsz::<abi::vfio_iommu_type1_dma_unmap>(),
        iova,
        size,
        ..Default::default()
    };
    // SAFETY: the kernel reads the structure and stores a size into it.
    checked(unsafe { ioctl_with_mut_ref(container, IOMMU_UNMAP_DMA, &mut unmap) })?;
    Ok(unmap.size)
}

/// Makes iommufd the IOMMU of a device that was opened by its own node (VFIO cdev). From then on, the device can be used.
pub(super) fn bind_iommufd(device: &File, iommufd: &File) -> io::Result<()> {
    let mut bind = abi::vfio_device_bind_iommufd {
        argsz: argsz::<abi::vfio_device_bind_iommufd>(),
        iommufd: iommufd.as_raw_fd(),
        ..Default::default()
    };
    // SAFETY: the kernel reads the structure and stores a number into it.
    checked(unsafe { ioctl_with_mut_ref(device, DEVICE_BIND_IOMMUFD, &mut bind) }).map(drop)
}

/// Attaches a device to an I/O address space of its iommufd.
pub(super) fn attach_ioas(device: &File, ioas: u32) -> io::Result<()> {
    let mut attach = abi::vfio_device_attach_iommufd_pt {
        argsz: argsz::<abi::vfio_device_attach_iommufd_pt>(),
        pt_id: ioas,
        ..Default::default()
    };
    // SAFETY: the kernel reads the structure and stores a number into it.
    checked(unsafe { ioctl_with_mut_ref(device, DEVICE_ATTACH_IOMMUFD_PT, &mut attach) }).map(drop)
}

/// Creates an I/O address space (IOAS). Returns its number.
pub(super) fn allocate_ioas(iommufd: &File) -> io::Result<u32> {
    let mut ioas = iommufd_abi::iommu_ioas_alloc {
        size: argsz::<iommufd_abi::iommu_ioas_alloc>(),
        ..Default::default()
    };
    // SAFETY: the kernel reads the structure and stores a number into it.
    checked(unsafe { ioctl_with_mut_ref(iommufd, IOAS_ALLOC, &mut ioas) })?;
    Ok(ioas.out_ioas_id)
}

/// Properties of an I/O address space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct IoasInfo {
    /// IOVA ranges that the IOMMUs of all attached devices translate.
    pub(super) usable_iovas: Vec<RangeInclusive<u64>>,
    /// Alignment in bytes of the start and the end of a mapping.
    pub(super) alignment: u64,
}

/// Reads the properties of an I/O address space.
pub(super) fn ioas_info(iommufd: &File, ioas: u32) -> io::Result<IoasInfo> {
    let mut ranges = vec![iommufd_abi::iommu_iova_range::default(); 16];
    loop {
        let mut info = iommufd_abi::iommu_ioas_iova_ranges {
            size: argsz::<iommufd_abi::iommu_ioas_iova_ranges>(),
            ioas_id: ioas,
            num_iovas: u32::try_from(ranges.len()).map_err(io::Error::other)?,
            allowed_iovas: ranges.as_mut_ptr() as u64,
            ..Default::default()
        };
        // SAFETY: the kernel reads and writes the structure, and writes at most `num_iovas` elements of `ranges`.
        let result = checked(unsafe { ioctl_with_mut_ref(iommufd, IOAS_IOVA_RANGES, &mut info) });
        let count = info.num_iovas as usize;
        match result {
            Ok(_) => {
                let ranges = ranges.iter().take(count);
                let usable = ranges.map(|range| range.start..=range.last);
                return Ok(IoasInfo {
                    usable_iovas: usable.filter(|range| !range.is_empty()).collect(),
                    alignment: info.out_iova_alignment,
                });
            }
            Err(error)
                if error.raw_os_error() == Some(libc::EMSGSIZE)
                    && count > ranges.len()
                    && count * size_of::<iommufd_abi::iommu_iova_range>() <= INFO_BYTES_MAX =>
            {
                ranges.resize(count, iommufd_abi::iommu_iova_range::default());
            }
            Err(error) => return Err(error),
        }
    }
}

/// Maps `size` bytes at `iova` for DMA of the devices of an I/O address space. `size` is the length of `memory`, rounded up to
/// whole pages.
pub(super) fn map_ioas(
    iommufd: &File,
    ioas: u32,
    memory: RawBytes<'_>,
    iova: u64,
    size: u64,
    writable: bool,
) -> io::Result<()> {
    let write = if writable {
        iommufd_abi::iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE
    } else {
        0
    };
    let mut map = iommufd_abi::iommu_ioas_map {
        size: argsz::<iommufd_abi::iommu_ioas_map>(),
        flags: iommufd_abi::iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA
            | iommufd_abi::iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE
            | write,
        ioas_id: ioas,
        user_va: memory.as_ptr() as u64,
        length: size,
        iova,
        ..Default::default()
    };
    // SAFETY: the kernel reads the structure, and pins pages that are mapped in this process, or refuses. The pages
    // belong to a `Mapping`, which others may write at any time and which is only accessed raw.
    checked(unsafe { ioctl_with_mut_ref(iommufd, IOAS_MAP, &mut map) }).map(drop)
}

/// Removes mappings from an I/O address space. Returns the number of unmapped bytes.
pub(super) fn unmap_ioas(iommufd: &File, ioas: u32, iova: u64, size: u64) -> io::Result<u64> {
    let mut unmap = iommufd_abi::iommu_ioas_unmap {
        size: argsz::<iommufd_abi::iommu_ioas_unmap>(),
        ioas_id: ioas,
        iova,
        length: size,
    };
    // SAFETY: the kernel reads the structure and stores a size into it.
    match checked(unsafe { ioctl_with_mut_ref(iommufd, IOAS_UNMAP, &mut unmap) }) {
        Ok(_) => Ok(unmap.length),
        // Nothing is mapped there.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(0),
        Err(error) => Err(error),
    }
}

/// A structure of the kernel that is followed by a chain of capabilities.
///
/// Reads beyond the end of the chain return zero.
struct VfioCapabilityChain {
    /// Content, in 64-bit words for alignment.
    words: Vec<u64>,
}

impl VfioCapabilityChain {
    /// Reads a structure of `fixed` bytes and its capability chain from the kernel. `argument` is a word to store in the
    /// structure before the call, with its offset.
    fn query(
        file: &File,
        request: c_ulong,
        fixed: usize,
        argument: Option<(usize, u32)>,
    ) -> io::Result<Self> {
        let mut len = fixed;
        loop {
            let mut info = Self {
                words: vec![0; len.div_ceil(8)],
            };
            // `argsz` is the first word of each structure. The length is at most `INFO_BYTES_MAX`, so it fits into 32 bits.
            info.set_u32(0, len as u32);
            if let Some((offset, value)) = argument {
                info.set_u32(offset, value);
            }
            // SAFETY: the kernel writes at most `argsz` bytes, and `words` has at least that many.
            checked(unsafe { ioctl_with_mut_ptr(file, request, info.words.as_mut_ptr()) })?;
            let needed = info.u32(0) as usize;
            if needed <= len {
                return Ok(info);
            }
            if needed > INFO_BYTES_MAX {
                return Err(io::Error::other(format!(
                    "the kernel's answer has {needed} bytes, more than {INFO_BYTES_MAX}"
                )));
            }
            len = needed;
        }
    }

    fn set_u32(&mut self, offset: usize, value: u32) {
        if let Some(bytes) = self.words.as_mut_bytes().get_mut(offset..offset + 4) {
            bytes.copy_from_slice(&value.to_ne_bytes());
        }
    }

    fn u32(&self, offset: usize) -> u32 {
        let bytes = self.words.as_bytes().get(offset..).unwrap_or_default();
        bytes.first_chunk().map_or(0, |b| u32::from_ne_bytes(*b))
    }

    fn u64(&self, offset: usize) -> u64 {
        let bytes = self.words.as_bytes().get(offset..).unwrap_or_default();
        bytes.first_chunk().map_or(0, |b| u64::from_ne_bytes(*b))
    }

    /// Reads `count` pairs of 64-bit numbers, which begin at an offset. Leaves out those beyond the end of the structure.
    fn read_pairs(&self, offset: usize, count: u32) -> Vec<(u64, u64)> {
        let max_entries = self.words.as_bytes().len().saturating_sub(offset) / 16;
        (0..max_entries.min(count as usize))
            .map(|index| {
                let at = offset + 16 * index;
                (self.u64(at), self.u64(at + 8))
            })
            .collect()
    }

    /// Returns the offset of the capability `id` in the chain that begins at `first`.
    fn capability(&self, first: u32, id: u32) -> Option<usize> {
        type Header = abi::vfio_info_cap_header;
        let mut at = first as usize;
        // The bound ends the walk through a cyclic chain.
        for _ in 0..self.words.len() {
            if at == 0 {
                return None;
            }
            // `id` and `version` are 16 bits each.
            let bytes = self.words.as_bytes().get(at + offset_of!(Header, id)..);
            let found = bytes?.first_chunk().map(|b| u16::from_ne_bytes(*b))?;
            if u32::from(found) == id {
                return Some(at);
            }
            at = self.u32(at + offset_of!(Header, next)) as usize;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(words: &[u32]) -> VfioCapabilityChain {
        let words = words.chunks(2).map(|pair| {
            let high = pair.get(1).copied().unwrap_or(0);
            u64::from(pair[0]) | u64::from(high) << 32
        });
        VfioCapabilityChain {
            words: words.collect(),
        }
    }

    #[test]
    fn a_bar_without_capabilities_is_mapped_as_a_whole() {
        let mmap = abi::VFIO_REGION_INFO_FLAG_MMAP;
        let region = parse_region(&info(&[32, mmap | 3, 0, 0, 0x4000, 0, 0, 1 << 8]));
        assert_eq!((region.size, region.offset), (0x4000, 1 << 40));
        assert_eq!(region.mappable, [(0, 0x4000)]);
        let region = parse_region(&info(&[32, 3, 0, 0, 0x4000, 0, 0, 0]));
        assert_eq!(region.mappable, []);
    }

    #[test]
    fn the_chain_of_a_bar_tells_what_can_be_mapped() {
        let flags = abi::VFIO_REGION_INFO_FLAG_MMAP | abi::VFIO_REGION_INFO_FLAG_CAPS;
        let words = [
            96,
            flags,
            0,
            32,
            0x8000,
            0,
            0,
            0, // the region
            2 | 1 << 16,
            48,
            0,
            0, // some other capability
            1 | 1 << 16,
            0,
            3,
            0, // areas, of which one is beyond the region
            0,
            0,
            0x2000,
            0, //
            0x3000,
            0,
            0x5000,
            0, //
            0x7000,
            0,
            0x2000,
            0,
        ];
        let region = parse_region(&info(&words));
        assert_eq!(region.mappable, [(0, 0x2000), (0x3000, 0x5000)]);
        // The kernel announced more areas than it returned. Only the returned areas are used.
        let region = parse_region(&info(&words[..20]));
        assert_eq!(region.mappable, [(0, 0x2000)]);
    }

    #[test]
    fn the_chain_of_an_iommu_tells_its_addresses_and_mappings() {
        let flags = abi::VFIO_IOMMU_INFO_PGSIZES | abi::VFIO_IOMMU_INFO_CAPS;
        let words = [
            104,
            flags,
            0x4020_1000,
            0,
            24,
            0, // the IOMMU
            3 | 1 << 16,
            40,
            65_535,
            0, // mappings left
            1 | 1 << 16,
            0,
            2,
            0, //
            0,
            0,
            0xFEDF_FFFF,
            0, //
            0xFEF0_0000,
            0,
            0xFFFF_FFFF,
            0x7F,
        ];
        let parsed = parse_iommu(&info(&words));
        assert_eq!(parsed.page_sizes, 0x4020_1000);
        assert_eq!(parsed.mappings_left, Some(65_535));
        let usable = [0..=0xFEDF_FFFF, 0xFEF0_0000..=0x7F_FFFF_FFFF];
        assert_eq!(parsed.usable_iovas.as_deref(), Some(&usable[..]));

        let parsed = parse_iommu(&info(&[24, abi::VFIO_IOMMU_INFO_PGSIZES, 4096, 0, 0, 0]));
        assert_eq!((parsed.usable_iovas, parsed.mappings_left), (None, None));
    }

    #[test]
    fn a_chain_that_leads_out_or_round_ends() {
        let flags = abi::VFIO_IOMMU_INFO_CAPS;
        for (first, next) in [(1000, 0), (u32::MAX, 0), (24, 24), (24, u32::MAX), (31, 31)] {
            let words = [40, flags, 0, 0, first, 0, 9 | 1 << 16, next, 0, 0];
            assert_eq!(
                parse_iommu(&info(&words)).usable_iovas,
                None,
                "{first} {next}"
            );
        }
    }
}

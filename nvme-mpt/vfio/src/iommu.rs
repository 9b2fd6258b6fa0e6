//! IOMMU of a drive's function: a VFIO container with the function's group, or an I/O address space of iommufd.
//!
//! Each drive has its own. So each drive has its own IOVA space, and a fault of one affects no other drive.
//!
//! A kernel has containers and groups, iommufd and a device node for each function, or both. A container is preferred, since its
//! mappings outlive the process that made them: an I/O address space forgets the memory of a process that has ended once no device
//! is attached to it.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::{Range, RangeInclusive};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;

use log::debug;
use vfio_bindings::bindings::vfio as abi;

use super::error::VfioError;
use super::function::{HostRoot, PciAddress, PciFunction};
use super::ioctl;
use nvme_guest::iova::{BeforePinning, Iommu, IommuMapping, StuckMappingError};
use nvme_mpt_memory::sync::{Mutex, RwLock};
use nvme_mpt_memory::{Mapping, MappingAccess, RawBytes, host_page_size};

/// IOMMU as the driver of a VFIO function uses it: [`VfioIommu`], or a substitute in tests.
pub(super) trait IommuContext: Iommu {
    /// Opens the VFIO device of the function.
    fn open_device(&self) -> Result<File, VfioError>;

    /// Returns descriptors with which a successor process continues to use the IOMMU while the device file stays open.
    fn hand_over(&self) -> io::Result<Vec<OwnedFd>>;

    /// Returns descriptors that preserve all mappings, even if the device file is closed.
    ///
    /// # Errors
    /// `Unsupported` if mappings end with the use of the device.
    fn persist(&self) -> io::Result<Vec<OwnedFd>>;

    /// Returns the number of the I/O address space; `None` for a container.
    fn ioas(&self) -> Option<u32>;

    /// Returns the IOVA ranges that the IOMMU translates: sorted, disjoint.
    fn usable_iovas(&self) -> &[RangeInclusive<u64>];

    /// Unmaps all memory and releases the IOMMU. The caller has closed the device file before. After the release, mapping
    /// fails, and unmapping has no effect.
    fn release(&self);
}

/// Default number of mappings per container (`dma_entry_limit` of `vfio_iommu_type1`). Linux 5.1 to 5.9 do not report the
/// limit. iommufd has no limit of its own: this one keeps a VM from filling the kernel's memory, and is shared among VMs.
const MAPPINGS_MAX: u32 = 65_535;

/// Maximum bytes to map, and so to pin, per call. During the call the kernel holds the container's lock, so other calls that
/// map guest memory or rings for the drive wait.
const PIN_BYTES_MAX: u64 = 1 << 30;

/// Maximum bytes of memory whose pages one call populates. During the call, other threads of the process cannot map memory.
const POPULATE_BYTES_MAX: usize = 16 << 20;

/// Splits a range of IOVAs at multiples of [`PIN_BYTES_MAX`]. Returns the offsets in the range at which each piece begins and
/// ends.
fn pieces(iova: u64, len: u64) -> impl Iterator<Item = Range<u64>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let left = len.checked_sub(at).filter(|left| *left > 0)?;
        let start = at;
        let bytes_to_boundary = PIN_BYTES_MAX - iova.wrapping_add(at) % PIN_BYTES_MAX;
        at += left.min(bytes_to_boundary);
        Some(start..at)
    })
}

/// Unmaps a range of IOVAs, in the [`pieces`] in which it was mapped. Returns the number of unmapped bytes.
fn unmap_pieces(files: &IommuFiles, iova: u64, len: u64) -> io::Result<u64> {
    let mut unmapped = 0;
    for piece in pieces(iova, len) {
        let bytes = piece.end - piece.start;
        match files.unmap(iova + piece.start, bytes) {
            Ok(bytes) => unmapped += bytes,
            // Earlier releases of nvme-mpt mapped the range as a whole, and the kernel cannot unmap a part of a mapping.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) && piece.start == 0 => {
                return files.unmap(iova, len);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(unmapped)
}

/// Unmaps a range of IOVAs as [`unmap_pieces`] does.
///
/// # Errors
/// Returns the kernel's error, or an error if fewer bytes were unmapped.
fn unmap_all(files: &IommuFiles, iova: u64, len: u64) -> io::Result<()> {
    let unmapped = unmap_pieces(files, iova, len)?;
    if unmapped == len {
        return Ok(());
    }
    Err(io::Error::other(VfioError::PartlyUnmapped {
        iova,
        len,
        unmapped,
    }))
}

/// Maps the `len` bytes at an IOVA in [`pieces`], each with `map`. If one piece fails, the earlier ones are unmapped by `unmap`,
/// which gets their total length, so that either the whole range or nothing is mapped.
fn map_pieces(
    iova: u64,
    len: u64,
    mut map: impl FnMut(Range<u64>) -> io::Result<()>,
    unmap: impl FnOnce(u64) -> io::Result<()>,
) -> io::Result<()> {
    for piece in pieces(iova, len) {
        let start = piece.start;
        if let Err(error) = map(piece) {
            if start > 0
                && let Err(unmapping) = unmap(start)
            {
                return Err(StuckMappingError::wrap(error, unmapping));
            }
            return Err(error);
        }
    }
    Ok(())
}

/// IOMMU of a function that is bound to `vfio-pci`.
#[derive(Debug)]
pub(super) struct VfioIommu {
    address: PciAddress,
    /// Files of the IOMMU; `None` once released. Only `release` locks this for writing; mapping and unmapping lock it for
    /// reading.
    files: RwLock<Option<IommuFiles>>,
    usable_iovas: Vec<RangeInclusive<u64>>,
    /// Smallest page size of the IOMMU, in bytes.
    page_bytes: u64,
    /// Maximum number of mappings.
    mappings_max: u32,
}

/// Files of an IOMMU.
#[derive(Debug)]
enum IommuFiles {
    /// A container with the type 1 IOMMU and the function's group.
    Type1 { group: File, container: File },
    /// An I/O address space of iommufd.
    Iommufd {
        iommufd: File,
        /// Number of the I/O address space.
        ioas: u32,
        /// The function's file, until it is opened.
        device: Mutex<Option<File>>,
    },
}

impl IommuFiles {
    fn map(&self, memory: RawBytes<'_>, iova: u64, size: u64, writable: bool) -> io::Result<()> {
        match self {
            Self::Type1 { container, .. } => {
                ioctl::map_dma(container, memory, iova, size, writable)
            }
            Self::Iommufd { iommufd, ioas, .. } => {
                ioctl::map_ioas(iommufd, *ioas, memory, iova, size, writable)
            }
        }
    }

    /// Removes mappings. Returns the number of unmapped bytes.
    fn unmap(&self, iova: u64, size: u64) -> io::Result<u64> {
        match self {
            Self::Type1 { container, .. } => ioctl::unmap_dma(container, iova, size),
            Self::Iommufd { iommufd, ioas, .. } => ioctl::unmap_ioas(iommufd, *ioas, iova, size),
        }
    }
}

/// Converts the kernel's error into one that names the action `what`, for `map_err`.
fn refused(address: PciAddress, what: &'static str) -> impl FnOnce(io::Error) -> VfioError {
    move |source| VfioError::Refused {
        address,
        what,
        source,
    }
}

impl VfioIommu {
    /// Opens the function's IOMMU.
    pub(super) fn open(root: &HostRoot, function: &PciFunction) -> Result<Self, VfioError> {
        let group = group_number(function)?;
        let vfio = root.dev.join("vfio");
        match root.device_node(&function.address.to_string()) {
            Some(node)
                if !(vfio.join("vfio").exists() && vfio.join(group.to_string()).exists()) =>
            {
                Self::open_ioas(root, function, node)
            }
            _ => Self::open_container(root, function, group),
        }
    }

    /// Opens the function's group and puts the group into a new container.
    fn open_container(
        root: &HostRoot,
        function: &PciFunction,
        group_number: u32,
    ) -> Result<Self, VfioError> {
        let address = function.address;
        let vfio = root.dev.join("vfio");
        let group_path = vfio.join(group_number.to_string());
        // Without an IOMMU, the kernel names the group `noiommu-…`.
        if vfio.join(format!("noiommu-{group_number}")).exists() {
            return Err(VfioError::NoIommu { address });
        }
        let open = |path| open_vfio_file(root, function, path);
        let container = open(vfio.join("vfio"))?;
        if !ioctl::is_version_known(&container)
            .map_err(refused(address, "ask for the version of the VFIO"))?
            || !ioctl::has_extension(&container, abi::VFIO_TYPE1v2_IOMMU)
                .map_err(refused(address, "ask for the kind of IOMMU"))?
        {
            return Err(VfioError::NoType1);
        }
        let group = open(group_path.clone())?;
        let flags =
            ioctl::group_flags(&group).map_err(refused(address, "ask for the IOMMU group"))?;
        if flags & abi::VFIO_GROUP_FLAGS_VIABLE == 0 {
            return Err(not_viable_error(function));
        }
        if flags & abi::VFIO_GROUP_FLAGS_CONTAINER_SET != 0 {
            return Err(in_use_error(root, function, group_path));
        }
        ioctl::set_container(&group, &container)
            .map_err(refused(address, "give a container to the IOMMU group"))?;
        ioctl::set_iommu(&container, abi::VFIO_TYPE1v2_IOMMU).map_err(|source| {
            if source.raw_os_error() == Some(libc::EPERM) {
                VfioError::UnsafeInterrupts { address }
            } else {
                refused(address, "set up the IOMMU")(source)
            }
        })?;
        Self::with_container(root, function, [group, container], 0)
    }

    /// Opens the function's node, and attaches the function to a new I/O address space.
    fn open_ioas(
        root: &HostRoot,
        function: &PciFunction,
        node: PathBuf,
    ) -> Result<Self, VfioError> {
        let address = function.address;
        let iommufd = open_vfio_file(root, function, root.dev.join("iommu"))?;
        let device = open_vfio_file(root, function, node.clone())?;
        ioctl::bind_iommufd(&device, &iommufd).map_err(|source| match source.raw_os_error() {
            Some(libc::EPERM) => VfioError::UnsafeInterrupts { address },
            Some(libc::EBUSY) if function.others_with_host_drivers().next().is_some() => {
                not_viable_error(function)
            }
            // EINVAL: the function is open in another process.
            Some(libc::EBUSY | libc::EINVAL) => in_use_error(root, function, node),
            _ => refused(address, "set up the IOMMU")(source),
        })?;
        let ioas = ioctl::allocate_ioas(&iommufd)
            .map_err(refused(address, "create an I/O address space"))?;
        ioctl::attach_ioas(&device, ioas)
            .map_err(refused(address, "set up the I/O address space"))?;
        Self::with_ioas(function, iommufd, ioas, Some(device))
    }

    /// Restores the IOMMU of a predecessor: group and container, or the file of iommufd with its I/O address space `ioas`. `mapped`
    /// lists the mappings.
    pub(super) fn from_predecessor(
        root: &HostRoot,
        function: &PciFunction,
        descriptors: Vec<OwnedFd>,
        ioas: Option<u32>,
        mapped: &[IommuMapping],
    ) -> Result<Self, VfioError> {
        let address = function.address;
        let mut files = descriptors.into_iter().map(File::from);
        let (group, container) = match (ioas, files.next(), files.next()) {
            (Some(ioas), Some(iommufd), None) => {
                return Self::with_ioas(function, iommufd, ioas, None);
            }
            (None, Some(group), Some(container)) => (group, container),
            _ => return Err(VfioError::NoContainer { address }),
        };
        let flags = ioctl::group_flags(&group);
        let is_set = |flags: u32| flags & abi::VFIO_GROUP_FLAGS_CONTAINER_SET != 0;
        // The kernel removes the group from the container when the function is unbound or removed.
        if !flags.is_ok_and(is_set) {
            return Err(VfioError::NoContainer { address });
        }
        let entries = mapped.iter().map(|mapping| {
            let pieces = pieces(mapping.iova, mapping.len);
            u32::try_from(pieces.count()).unwrap_or(u32::MAX)
        });
        let mapped = entries.fold(0, u32::saturating_add);
        Self::with_container(root, function, [group, container], mapped)
    }

    /// Creates the value for a container that is set up and has `mapped` mappings, and reads the properties of its IOMMU.
    fn with_container(
        root: &HostRoot,
        function: &PciFunction,
        [group, container]: [File; 2],
        mapped: u32,
    ) -> Result<Self, VfioError> {
        let address = function.address;
        let group_number = group_number(function)?;
        let info = ioctl::iommu_info(&container).map_err(refused(address, "ask for the IOMMU"))?;
        let usable = match info.usable_iovas {
            Some(usable) => usable,
            None => derive_usable_iovas(root, group_number).map_err(refused(
                address,
                "find the addresses that are reserved in the IOMMU group",
            ))?,
        };
        if usable.is_empty() {
            return Err(VfioError::NoAddresses { address });
        }
        debug!(
            "{address}: IOMMU group {group_number}, page sizes {:#x}, {:?} mappings, IOVAs {usable:x?}",
            info.page_sizes, info.mappings_left
        );
        let max = info.mappings_left;
        Ok(Self {
            address,
            files: RwLock::new(Some(IommuFiles::Type1 { group, container })),
            usable_iovas: usable,
            page_bytes: match info.page_sizes {
                0 => host_page_size() as u64,
                sizes => 1 << sizes.trailing_zeros(),
            },
            mappings_max: max.map_or(MAPPINGS_MAX, |left| left.saturating_add(mapped)),
        })
    }

    /// Creates the value for an I/O address space to which the function is attached, and reads its properties.
    fn with_ioas(
        function: &PciFunction,
        iommufd: File,
        ioas: u32,
        device: Option<File>,
    ) -> Result<Self, VfioError> {
        let address = function.address;
        let info = ioctl::ioas_info(&iommufd, ioas)
            .map_err(refused(address, "ask for the I/O address space"))?;
        if info.usable_iovas.is_empty() {
            return Err(VfioError::NoAddresses { address });
        }
        debug!("{address}: I/O address space {ioas}, {info:x?}");
        let files = IommuFiles::Iommufd {
            iommufd,
            ioas,
            device: Mutex::new(device),
        };
        Ok(Self {
            address,
            files: RwLock::new(Some(files)),
            usable_iovas: info.usable_iovas,
            page_bytes: info.alignment.max(1),
            mappings_max: MAPPINGS_MAX,
        })
    }

    /// Returns the size of a DMA mapping of `len` bytes at `iova`: `len` rounded up to the kernel's page size, because memory
    /// is mapped in whole pages.
    fn mapping_len(&self, iova: u64, len: u64) -> io::Result<u64> {
        let size = len.checked_next_multiple_of(host_page_size() as u64);
        match size {
            Some(size) if size % self.page_bytes == 0 && iova.is_multiple_of(self.page_bytes) => {
                Ok(size)
            }
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "{len:#x} bytes at IOVA {iova:#x} are no whole pages of the IOMMU of {}, which has pages of {:#x} bytes",
                    self.address, self.page_bytes
                ),
            )),
        }
    }

    fn map_error(&self, files: &IommuFiles, error: io::Error, len: u64) -> io::Error {
        let lock_error = |error| io::Error::new(io::ErrorKind::OutOfMemory, error);
        match (error.raw_os_error(), files) {
            // iommufd counts the memory of all processes of a user.
            (Some(libc::ENOMEM), IommuFiles::Iommufd { .. }) => match lock_limit() {
                Some(limit) => lock_error(VfioError::MemoryLockOfUser { len, limit }),
                None => error,
            },
            (Some(libc::ENOMEM), IommuFiles::Type1 { .. }) => {
                match (locked_memory(), lock_limit()) {
                    (Some(locked), Some(limit)) if locked.saturating_add(len) > limit => {
                        lock_error(VfioError::MemoryLock { len, locked, limit })
                    }
                    // Mappings are still free, so the kernel has run out of memory.
                    _ => error,
                }
            }
            (Some(libc::ENOSPC), _) => {
                let limit = self.mappings_max;
                io::Error::new(io::ErrorKind::StorageFull, VfioError::Mappings { limit })
            }
            _ => error,
        }
    }
}

impl Iommu for VfioIommu {
    fn map(
        &self,
        iova: u64,
        memory: &Mapping,
        part: Range<usize>,
        access: MappingAccess,
    ) -> io::Result<()> {
        self.map_with_check(iova, memory, part, access, &mut |_| Ok(()))
    }

    fn map_with_check(
        &self,
        iova: u64,
        memory: &Mapping,
        part: Range<usize>,
        access: MappingAccess,
        before_pinning: &mut BeforePinning<'_>,
    ) -> io::Result<()> {
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner);
        let Some(files) = &*files else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        let size = self.mapping_len(iova, part.len() as u64)?;
        let mut writable = access == MappingAccess::ReadWrite;
        if !writable && memory.access() == MappingAccess::ReadWrite {
            match memory.populate() {
                Ok(()) => {}
                // If the kernel cannot populate the pages, the DMA mapping is made writable. This process may write the memory
                // anyway.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => writable = true,
                Err(error) => return Err(error),
            }
        }
        let map = |piece: Range<u64>| {
            let len = (piece.end - piece.start).min(part.len() as u64 - piece.start);
            let start = part.start + piece.start as usize;
            let bytes = memory
                .bytes(start, len as usize)
                .ok_or(io::ErrorKind::InvalidInput)?;
            let (at, size) = (iova + piece.start, piece.end - piece.start);
            before_pinning(start..start + len as usize)?;
            files
                .map(bytes, at, size, writable)
                .map_err(|error| self.map_error(files, error, size))
        };
        map_pieces(iova, size, map, |mapped| unmap_all(files, iova, mapped))
    }

    fn unmap(&self, iova: u64, len: u64) -> io::Result<()> {
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner);
        let Some(files) = &*files else {
            // The release removed all mappings.
            return Ok(());
        };
        let len = self.mapping_len(iova, len)?;
        unmap_all(files, iova, len)
    }

    fn allocate_pages(&self, memory: &Mapping, part: Range<usize>) -> io::Result<()> {
        for start in part.clone().step_by(POPULATE_BYTES_MAX) {
            let end = part.end.min(start + POPULATE_BYTES_MAX);
            memory.populate_part(start, end - start)?;
        }
        Ok(())
    }

    fn clear(&self, iova: u64, len: u64) -> io::Result<()> {
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner);
        let Some(files) = &*files else {
            return Ok(());
        };
        let len = self.mapping_len(iova, len)?;
        files.unmap(iova, len).map(drop)
    }

    fn mappings_max(&self) -> Option<u64> {
        Some(self.mappings_max.into())
    }
}

impl IommuContext for VfioIommu {
    fn open_device(&self) -> Result<File, VfioError> {
        let refused = refused(self.address, "open the function");
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner);
        match &*files {
            None => Err(refused(io::ErrorKind::NotConnected.into())),
            Some(IommuFiles::Type1 { group, .. }) => match CString::new(self.address.to_string()) {
                Ok(name) => ioctl::open_device(group, &name).map_err(refused),
                Err(error) => Err(refused(error.into())),
            },
            Some(IommuFiles::Iommufd { device, .. }) => {
                let mut device = device.lock().unwrap_or_else(PoisonError::into_inner);
                device
                    .take()
                    .ok_or_else(|| refused(io::ErrorKind::AlreadyExists.into()))
            }
        }
    }

    fn hand_over(&self) -> io::Result<Vec<OwnedFd>> {
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner);
        match &*files {
            None => Err(io::ErrorKind::NotConnected.into()),
            Some(IommuFiles::Type1 { group, container }) => Ok(vec![
                group.try_clone()?.into(),
                container.try_clone()?.into(),
            ]),
            Some(IommuFiles::Iommufd { iommufd, .. }) => Ok(vec![iommufd.try_clone()?.into()]),
        }
    }

    fn persist(&self) -> io::Result<Vec<OwnedFd>> {
        match self.ioas() {
            None => self.hand_over(),
            Some(_) => Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "iommufd forgets the memory of a process that has ended",
            )),
        }
    }

    fn ioas(&self) -> Option<u32> {
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner);
        match &*files {
            Some(IommuFiles::Iommufd { ioas, .. }) => Some(*ioas),
            _ => None,
        }
    }

    fn usable_iovas(&self) -> &[RangeInclusive<u64>] {
        &self.usable_iovas
    }

    fn release(&self) {
        let mut files = self.files.write().unwrap_or_else(PoisonError::into_inner);
        let Some(IommuFiles::Type1 { group, container }) = files.take() else {
            // Closing iommufd removes its mappings.
            return;
        };
        // Removing the last group from a container removes all its mappings. If the function was pulled, the kernel has removed
        // the group already, and closing the container removes the mappings.
        if let Err(error) = ioctl::unset_container(&group) {
            debug!(
                "{}: its IOMMU group is in no container: {error}",
                self.address
            );
        }
        drop(group);
        drop(container);
    }
}

fn group_number(function: &PciFunction) -> Result<u32, VfioError> {
    let address = function.address;
    let group = function.iommu_group.as_ref();
    Ok(group.ok_or(VfioError::NoIommu { address })?.number)
}

/// Opens a file of VFIO. If it does not exist or cannot be opened, returns the error that says what an operator can do.
fn open_vfio_file(
    root: &HostRoot,
    function: &PciFunction,
    path: PathBuf,
) -> Result<File, VfioError> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_CLOEXEC)
        .open(&path)
        .map_err(|source| match source.raw_os_error() {
            // ENODEV: the file still exists, but the driver behind it was unloaded.
            Some(libc::ENOENT | libc::ENODEV) => VfioError::NoVfio(path),
            Some(libc::EACCES | libc::EPERM) => VfioError::Permission(path),
            Some(libc::EBUSY) => in_use_error(root, function, path),
            _ => VfioError::Refused {
                address: function.address,
                what: "open the VFIO file",
                source,
            },
        })
}

/// Returns the error for a group or a function's node that another process has open.
fn in_use_error(root: &HostRoot, function: &PciFunction, group: PathBuf) -> VfioError {
    let users = function.iommu_group.as_ref();
    VfioError::InUse {
        address: function.address,
        group,
        users: users.map_or_else(Vec::new, |group| group.users(root)),
    }
}

fn not_viable_error(function: &PciFunction) -> VfioError {
    let group = function.iommu_group.as_ref();
    VfioError::NotViable {
        address: function.address,
        group: group.map_or(0, |group| group.number),
        others: function
            .others_with_host_drivers()
            .map(|(member, driver)| format!("{member}: {driver}"))
            .collect(),
    }
}

/// Returns the number of bytes of memory that this process has locked; `None` if the kernel does not report it.
fn locked_memory() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmLck:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Returns the maximum number of bytes of memory that this process may lock; `None` if it is unlimited.
fn lock_limit() -> Option<u64> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max locked memory"))?;
    // The soft limit comes first.
    line.split_whitespace().next()?.parse().ok()
}

/// Smallest IOVA width of any supported IOMMU, in bits.
const IOVA_BITS_MIN: u32 = 39;

/// Derives the usable IOVAs on a kernel that does not report them: all IOVAs of [`IOVA_BITS_MIN`] bits, except the group's
/// reserved regions.
fn derive_usable_iovas(root: &HostRoot, group: u32) -> io::Result<Vec<RangeInclusive<u64>>> {
    let path = root
        .sys
        .join(format!("kernel/iommu_groups/{group}/reserved_regions"));
    Ok(without_reserved(&read_reserved(&path)?))
}

/// Reads the reserved regions of an IOMMU group: lines of the form `0x00000000fee00000 0x00000000feefffff msi`.
fn read_reserved(path: &Path) -> io::Result<Vec<RangeInclusive<u64>>> {
    let text = fs::read_to_string(path)?;
    let number = |word: &str| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok();
    let mut reserved: Vec<_> = text
        .lines()
        .map(|line| {
            let mut words = line.split_whitespace();
            let range = words.next().and_then(number)?..=words.next().and_then(number)?;
            Some(range)
        })
        .collect::<Option<_>>()
        .ok_or_else(|| {
            let what = format!("{} has lines of an unknown form", path.display());
            io::Error::new(io::ErrorKind::InvalidData, what)
        })?;
    reserved.sort_by_key(|range| *range.start());
    Ok(reserved)
}

fn without_reserved(reserved: &[RangeInclusive<u64>]) -> Vec<RangeInclusive<u64>> {
    let last = (1 << IOVA_BITS_MIN) - 1;
    let mut usable = Vec::new();
    let mut next = 0_u64;
    for range in reserved {
        if next < *range.start() && next <= last {
            usable.push(next..=last.min(range.start() - 1));
        }
        next = next.max(range.end().saturating_add(1));
    }
    if next <= last {
        usable.push(next..=last);
    }
    usable
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_tells_what_is_locked() {
        // The limit may have any value, or be unlimited: the test checks that the file can be parsed.
        assert!(locked_memory().is_some());
        let limits = fs::read_to_string("/proc/self/limits").expect("limits");
        let unlimited = limits
            .lines()
            .any(|line| line.starts_with("Max locked memory") && line.contains("unlimited"));
        assert!(lock_limit().is_some() || unlimited, "{limits}");
    }

    #[test]
    fn large_memory_is_pinned_in_pieces() {
        let ends = |iova, len| pieces(iova, len).map(|piece| piece.end).collect::<Vec<_>>();
        assert_eq!(ends(4096, 8192), [8192]);
        assert_eq!(ends(0, PIN_BYTES_MAX), [PIN_BYTES_MAX]);
        let first = PIN_BYTES_MAX - 4096;
        let expected = [
            first,
            first + PIN_BYTES_MAX,
            first + 2 * PIN_BYTES_MAX,
            3 * PIN_BYTES_MAX,
        ];
        assert_eq!(ends(5 * PIN_BYTES_MAX + 4096, 3 * PIN_BYTES_MAX), expected);
        assert!(ends(4096, 0).is_empty());
        let mut pieces = pieces(4096, 8 * PIN_BYTES_MAX);
        let first = pieces.next().unwrap();
        let joined = pieces.fold(first, |before, piece| {
            assert_eq!(before.end, piece.start);
            before.start..piece.end
        });
        assert_eq!(joined, 0..8 * PIN_BYTES_MAX);
    }

    #[test]
    fn a_range_is_mapped_as_a_whole_or_not_at_all() {
        let map = |fails_at: Option<u64>, unmapped: io::Result<()>| {
            let (mut mapped, mut removed) = (0, None);
            let map = |piece: Range<u64>| {
                if fails_at == Some(piece.start) {
                    return Err(io::ErrorKind::OutOfMemory.into());
                }
                mapped += piece.end - piece.start;
                Ok(())
            };
            let unmap = |len| {
                removed = Some(len);
                unmapped
            };
            let result = map_pieces(0, 3 * PIN_BYTES_MAX, map, unmap);
            (result, mapped, removed)
        };
        let (result, mapped, removed) = map(None, Ok(()));
        result.expect("no error");
        assert_eq!((mapped, removed), (3 * PIN_BYTES_MAX, None));
        let (result, _, removed) = map(Some(0), Ok(()));
        result.expect_err("the first piece fails");
        assert_eq!(removed, None);
        let is_stuck = |error: &io::Error| {
            let inner = error.get_ref();
            assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
            inner.is_some_and(|inner| inner.is::<StuckMappingError>())
        };
        let (result, mapped, removed) = map(Some(2 * PIN_BYTES_MAX), Ok(()));
        assert!(!is_stuck(&result.expect_err("the last piece fails")));
        assert_eq!(removed, Some(mapped));
        let (result, ..) = map(Some(PIN_BYTES_MAX), Err(io::ErrorKind::InvalidInput.into()));
        assert!(is_stuck(&result.expect_err("the first piece stays")));
    }

    #[test]
    fn reserved_addresses_are_not_usable() {
        let dir = tempfile::tempdir().expect("folder");
        let path = dir.path().join("reserved_regions");
        let text = "0x00000000fee00000 0x00000000feefffff msi\n\
                    0x0000000000000000 0x0000000000000fff direct-relaxable\n\
                    0x000000fd00000000 0x000000ffffffffff reserved\n";
        fs::write(&path, text).expect("write");
        let reserved = read_reserved(&path).expect("known form");
        assert_eq!(
            without_reserved(&reserved),
            [0x1000..=0xFEDF_FFFF, 0xFEF0_0000..=0x7F_FFFF_FFFF]
        );
        let overlapping = [0..=0x1FFF, 0x1000..=0x17FF, 0x70_0000_0000..=u64::MAX];
        assert_eq!(without_reserved(&overlapping), [0x2000..=0x6F_FFFF_FFFF]);
        assert_eq!(without_reserved(&[]), [0..=0x7F_FFFF_FFFF]);
        assert_eq!(without_reserved(&[0..=u64::MAX]), []);

        fs::write(&path, "fee00000 feefffff msi\n").expect("write");
        assert!(read_reserved(&path).is_err());
    }
}

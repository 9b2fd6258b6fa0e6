//! IOMMU of a function's DMA: of type 1, in a container of its own.
//!
//! A container for each drive: its IOVA space is its own, and what goes wrong with one touches no
//! other.

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
use nvme_mpt::iova::{BeforePinning, Iommu, IommuMapping};
use nvme_mpt::memory::sync::RwLock;
use nvme_mpt::memory::{Mapping, MappingAccess, host_page_size};

/// VFIO's layer between a function and memory: the type 1 container, or a replacement of it.
pub(super) trait IommuContext: Iommu {
    /// Opens the function's file.
    fn open_device(&self) -> Result<File, VfioError>;

    /// Returns descriptors by which another process goes on with it. They keep all mappings, whatever becomes of the
    /// function's file.
    fn hand_over(&self) -> io::Result<Vec<OwnedFd>>;

    /// The addresses that it translates: sorted, not overlapping.
    fn usable_iovas(&self) -> &[RangeInclusive<u64>];

    /// Takes all memory from the function, and gives it up. Its file must be closed. From now on
    /// nothing can be mapped, and nothing is left to be unmapped.
    fn release(&self);
}

/// Mappings that a container takes by default (`dma_entry_limit` of `vfio_iommu_type1`): Linux 5.1 to 5.9 do not
/// tell how many there can be.
const MAPPINGS_MAX: u32 = 65_535;

/// Memory, in bytes, that the kernel pins at a time. Meanwhile, it holds a lock of the container that each mapping needs,
/// those of other functions' memory and rings as well.
const PIECE: u64 = 1 << 30;

/// Memory, in bytes, whose pages are taken at a time. Meanwhile, other threads of the process map no memory.
const PAGES_AT_ONCE: usize = 16 << 20;

/// Cuts a range at multiples of [`PIECE`]. Returns the offsets of each part.
fn pieces(iova: u64, len: u64) -> impl Iterator<Item = Range<u64>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let left = len.checked_sub(at).filter(|left| *left > 0)?;
        let start = at;
        let room = PIECE - iova.wrapping_add(at) % PIECE;
        at += left.min(room);
        Some(start..at)
    })
}

/// Takes a mapping away in the pieces in which it was made. Returns the bytes that were unmapped.
fn unmap_pieces(container: &File, iova: u64, len: u64) -> io::Result<u64> {
    let mut unmapped = 0;
    for piece in pieces(iova, len) {
        let bytes = piece.end - piece.start;
        match ioctl::unmap_dma(container, iova + piece.start, bytes) {
            Ok(bytes) => unmapped += bytes,
            // An earlier release made it as a whole, and the kernel divides none.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) && piece.start == 0 => {
                return ioctl::unmap_dma(container, iova, len);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(unmapped)
}

/// A container of VFIO's with one group in it.
#[derive(Debug)]
pub(super) struct Type1Container {
    address: PciAddress,
    /// `None` once released. Written to be released; mapping and unmapping only read.
    files: RwLock<Option<ContainerFiles>>,
    usable: Vec<RangeInclusive<u64>>,
    /// Smallest page that the IOMMU maps.
    page: u64,
    /// Most mappings.
    mappings_max: u32,
}

#[derive(Debug)]
struct ContainerFiles {
    group: File,
    container: File,
}

impl Type1Container {
    /// Opens the function's group and gives it a container.
    pub(super) fn open(root: &HostRoot, function: &PciFunction) -> Result<Self, VfioError> {
        let address = function.address;
        let group_number = group_number(function)?;
        let refused = |what| {
            move |source| VfioError::Refused {
                address,
                what,
                source,
            }
        };
        let vfio = root.dev.join("vfio");
        let group_path = vfio.join(group_number.to_string());
        // A group without an IOMMU is there by another name; it translates nothing.
        if vfio.join(format!("noiommu-{group_number}")).exists() {
            return Err(VfioError::NoIommu { address });
        }
        let open = |path| open(root, function, path);
        let container = open(vfio.join("vfio"))?;
        if !ioctl::is_version_known(&container)
            .map_err(refused("ask for the version of the VFIO"))?
            || !ioctl::has_extension(&container, abi::VFIO_TYPE1v2_IOMMU)
                .map_err(refused("ask for the kind of IOMMU"))?
        {
            return Err(VfioError::NoType1);
        }
        let group = open(group_path.clone())?;
        let flags = ioctl::group_flags(&group).map_err(refused("ask for the IOMMU group"))?;
        if flags & abi::VFIO_GROUP_FLAGS_VIABLE == 0 {
            return Err(not_viable(function));
        }
        if flags & abi::VFIO_GROUP_FLAGS_CONTAINER_SET != 0 {
            return Err(in_use(root, function, group_path));
        }
        ioctl::set_container(&group, &container)
            .map_err(refused("give a container to the IOMMU group"))?;
        ioctl::set_iommu(&container, abi::VFIO_TYPE1v2_IOMMU).map_err(|source| {
            if source.raw_os_error() == Some(libc::EPERM) {
                VfioError::UnsafeInterrupts { address }
            } else {
                refused("set up the IOMMU")(source)
            }
        })?;
        Self::new(root, function, ContainerFiles { group, container }, 0)
    }

    /// Goes on with the group and the container of another process, which has these mappings in it.
    pub(super) fn handed_over(
        root: &HostRoot,
        function: &PciFunction,
        [group, container]: [OwnedFd; 2],
        mapped: &[IommuMapping],
    ) -> Result<Self, VfioError> {
        let [group, container] = [group, container].map(File::from);
        let flags = ioctl::group_flags(&group);
        let is_set = |flags: u32| flags & abi::VFIO_GROUP_FLAGS_CONTAINER_SET != 0;
        // The kernel takes the group out of the container when the function is unbound or removed.
        if !flags.is_ok_and(is_set) {
            let address = function.address;
            return Err(VfioError::NoContainer { address });
        }
        let entries = mapped.iter().map(|mapping| {
            let pieces = pieces(mapping.iova, mapping.len);
            u32::try_from(pieces.count()).unwrap_or(u32::MAX)
        });
        let mapped = entries.fold(0, u32::saturating_add);
        Self::new(root, function, ContainerFiles { group, container }, mapped)
    }

    /// A container that is set up, with so many mappings.
    fn new(
        root: &HostRoot,
        function: &PciFunction,
        files: ContainerFiles,
        mapped: u32,
    ) -> Result<Self, VfioError> {
        let address = function.address;
        let group_number = group_number(function)?;
        let refused = |what| {
            move |source| VfioError::Refused {
                address,
                what,
                source,
            }
        };
        let info = ioctl::iommu_info(&files.container).map_err(refused("ask for the IOMMU"))?;
        let usable = match info.usable {
            Some(usable) => usable,
            None => usable_by_reservations(root, group_number).map_err(refused(
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
        Ok(Self {
            address,
            files: RwLock::new(Some(files)),
            usable,
            page: match info.page_sizes {
                0 => host_page_size() as u64,
                sizes => 1 << sizes.trailing_zeros(),
            },
            mappings_max: info
                .mappings_left
                .map_or(MAPPINGS_MAX, |left| left.saturating_add(mapped)),
        })
    }

    /// Returns the bytes that are mapped for `len` bytes: whole pages of the kernel's, as memory is mapped in
    /// those. The rest of a last page belongs to the same mapping.
    fn whole_pages(&self, iova: u64, len: u64) -> io::Result<u64> {
        let size = len.checked_next_multiple_of(host_page_size() as u64);
        match size {
            Some(size) if size % self.page == 0 && iova.is_multiple_of(self.page) => Ok(size),
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "{len:#x} bytes at IOVA {iova:#x} are no whole pages of the IOMMU of {}, which has pages of {:#x} bytes",
                    self.address, self.page
                ),
            )),
        }
    }

    fn map_error(&self, error: io::Error, len: u64) -> io::Error {
        match error.raw_os_error() {
            Some(libc::ENOMEM) => {
                match (locked_memory(), lock_limit()) {
                    (Some(locked), Some(limit)) if locked.saturating_add(len) > limit => {
                        let error = VfioError::MemoryLock { len, locked, limit };
                        io::Error::new(io::ErrorKind::OutOfMemory, error)
                    }
                    // It is not the limit: memory has run out.
                    _ => error,
                }
            }
            Some(libc::ENOSPC) => {
                let limit = self.mappings_max;
                io::Error::new(io::ErrorKind::StorageFull, VfioError::Mappings { limit })
            }
            _ => error,
        }
    }
}

impl Iommu for Type1Container {
    fn map(
        &self,
        iova: u64,
        memory: &Mapping,
        part: Range<usize>,
        access: MappingAccess,
    ) -> io::Result<()> {
        self.map_after(iova, memory, part, access, &mut |_| Ok(()))
    }

    fn map_after(
        &self,
        iova: u64,
        memory: &Mapping,
        part: Range<usize>,
        access: MappingAccess,
        before: &mut BeforePinning<'_>,
    ) -> io::Result<()> {
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner);
        let Some(ContainerFiles { container, .. }) = &*files else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        let size = self.whole_pages(iova, part.len() as u64)?;
        let mut writable = access == MappingAccess::ReadWrite;
        if !writable && memory.access() == MappingAccess::ReadWrite {
            match memory.populate() {
                Ok(()) => {}
                // A kernel that cannot do it gives a device that may write what we write.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => writable = true,
                Err(error) => return Err(error),
            }
        }
        for piece in pieces(iova, size) {
            let len = (piece.end - piece.start).min(part.len() as u64 - piece.start);
            let start = part.start + piece.start as usize;
            let bytes = memory
                .bytes(start, len as usize)
                .ok_or(io::ErrorKind::InvalidInput)?;
            let (at, size) = (iova + piece.start, piece.end - piece.start);
            let mapped = before(start..start + len as usize).and_then(|()| {
                ioctl::map_dma(container, bytes, at, size, writable)
                    .map_err(|error| self.map_error(error, size))
            });
            if let Err(error) = mapped {
                // None of it is mapped, or all.
                if piece.start > 0 {
                    ioctl::unmap_dma(container, iova, piece.start)?;
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn unmap(&self, iova: u64, len: u64) -> io::Result<()> {
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner);
        let Some(ContainerFiles { container, .. }) = &*files else {
            // The function was given up, and all of its mappings with it.
            return Ok(());
        };
        let len = self.whole_pages(iova, len)?;
        let unmapped = unmap_pieces(container, iova, len)?;
        if unmapped != len {
            return Err(io::Error::other(VfioError::PartlyUnmapped {
                iova,
                len,
                unmapped,
            }));
        }
        Ok(())
    }

    fn take_pages(&self, memory: &Mapping, part: Range<usize>) -> io::Result<()> {
        for start in part.clone().step_by(PAGES_AT_ONCE) {
            let end = part.end.min(start + PAGES_AT_ONCE);
            memory.populate_part(start, end - start)?;
        }
        Ok(())
    }

    fn clear(&self, iova: u64, len: u64) -> io::Result<()> {
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner);
        let Some(ContainerFiles { container, .. }) = &*files else {
            return Ok(());
        };
        let len = self.whole_pages(iova, len)?;
        ioctl::unmap_dma(container, iova, len).map(drop)
    }

    fn mappings_max(&self) -> Option<u64> {
        Some(self.mappings_max.into())
    }
}

impl IommuContext for Type1Container {
    fn open_device(&self) -> Result<File, VfioError> {
        let refused = |source| VfioError::Refused {
            address: self.address,
            what: "open the function",
            source,
        };
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner);
        let Some(ContainerFiles { group, .. }) = &*files else {
            return Err(refused(io::ErrorKind::NotConnected.into()));
        };
        let name = CString::new(self.address.to_string()).map_err(|error| refused(error.into()))?;
        ioctl::open_device(group, &name).map_err(refused)
    }

    fn hand_over(&self) -> io::Result<Vec<OwnedFd>> {
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner);
        let Some(ContainerFiles { group, container }) = &*files else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        Ok(vec![
            group.try_clone()?.into(),
            container.try_clone()?.into(),
        ])
    }

    fn usable_iovas(&self) -> &[RangeInclusive<u64>] {
        &self.usable
    }

    fn release(&self) {
        let mut files = self.files.write().unwrap_or_else(PoisonError::into_inner);
        let Some(ContainerFiles { group, container }) = files.take() else {
            return;
        };
        // The last group to go takes all mappings with it. When a function is pulled, the kernel takes the group out
        // before us. The mappings then go when the container is closed.
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

/// Opens one of VFIO's files.
fn open(root: &HostRoot, function: &PciFunction, path: PathBuf) -> Result<File, VfioError> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_CLOEXEC)
        .open(&path)
        .map_err(|source| match source.raw_os_error() {
            // ENODEV: the file is left, and its driver is gone.
            Some(libc::ENOENT | libc::ENODEV) => VfioError::NoVfio(path),
            Some(libc::EACCES | libc::EPERM) => VfioError::Permission(path),
            Some(libc::EBUSY) => in_use(root, function, path),
            _ => VfioError::Refused {
                address: function.address,
                what: "open the VFIO file",
                source,
            },
        })
}

/// Returns the error for a group that another process has.
fn in_use(root: &HostRoot, function: &PciFunction, group: PathBuf) -> VfioError {
    let users = function.iommu_group.as_ref();
    VfioError::InUse {
        address: function.address,
        group,
        users: users.map_or_else(Vec::new, |group| group.users(root)),
    }
}

fn not_viable(function: &PciFunction) -> VfioError {
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

/// Returns the bytes of this process that are locked, as far as the kernel reports.
fn locked_memory() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmLck:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Returns the most bytes that this process may lock; `None` without a limit.
fn lock_limit() -> Option<u64> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max locked memory"))?;
    // The soft limit comes first.
    line.split_whitespace().next()?.parse().ok()
}

/// Addresses that every IOMMU translates: those of the smallest width that one has.
const WIDTH_MIN: u32 = 39;

/// The usable addresses where the kernel does not tell them: what the narrowest IOMMU translates,
/// without what is reserved in the group.
fn usable_by_reservations(root: &HostRoot, group: u32) -> io::Result<Vec<RangeInclusive<u64>>> {
    let path = root
        .sys
        .join(format!("kernel/iommu_groups/{group}/reserved_regions"));
    Ok(without_reserved(&read_reserved(&path)?))
}

/// Reads lines of the form `0x00000000fee00000 0x00000000feefffff msi`.
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
    let last = (1 << WIDTH_MIN) - 1;
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
        // Any number, but one: the form is what is tested, and the limit may be none.
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
        assert_eq!(ends(0, PIECE), [PIECE]);
        let first = PIECE - 4096;
        let expected = [first, first + PIECE, first + 2 * PIECE, 3 * PIECE];
        assert_eq!(ends(5 * PIECE + 4096, 3 * PIECE), expected);
        assert!(ends(4096, 0).is_empty());
        let mut pieces = pieces(4096, 8 * PIECE);
        let first = pieces.next().unwrap();
        let joined = pieces.fold(first, |before, piece| {
            assert_eq!(before.end, piece.start);
            before.start..piece.end
        });
        assert_eq!(joined, 0..8 * PIECE);
    }

    #[test]
    fn reserved_addresses_are_not_usable() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("reserved_regions");
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

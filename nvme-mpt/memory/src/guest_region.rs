//! Mappings of guest memory that a VMM has as a region of the crate vm-memory.
#![expect(
    unsafe_code,
    reason = "borrows a region, which stays mapped while it is referenced"
)]

use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;

use vm_memory::bitmap::Bitmap;
use vm_memory::{FileOffset, GuestRegionMmap};

use super::mapping::{Mapping, MappingAccess};

impl Mapping {
    /// Borrows a region of guest memory from a VMM. The mapping holds a reference to the region, so the region stays mapped as long
    /// as the mapping exists.
    ///
    /// The mapping has a [place in a file](Self::file_place) if [`shared_file`] returns the file of the region.
    ///
    /// # Errors
    /// Returns `InvalidInput` if the region's memory cannot be read by this process, and the error of `fstat`.
    pub fn from_guest_region<B>(region: &Arc<GuestRegionMmap<B>>) -> io::Result<Self>
    where
        B: Bitmap + Send + Sync + 'static,
    {
        let unreadable = || io::Error::new(io::ErrorKind::InvalidInput, "it cannot be read");
        let access = match (
            region.prot() & libc::PROT_READ,
            region.prot() & libc::PROT_WRITE,
        ) {
            (0, _) => return Err(unreadable()),
            (_, 0) => MappingAccess::Read,
            _ => MappingAccess::ReadWrite,
        };
        let start = NonNull::new(region.as_ptr()).ok_or_else(unreadable)?;
        let (len, owner) = (region.size(), region.clone());
        match shared_file(region) {
            Some(file) => {
                let (fd, offset) = (file.file().as_fd(), file.start());
                // SAFETY: the region is a shared mapping of this part of the file with these rights, and stays mapped while
                // `owner` holds a reference to it. vm-memory makes no Rust reference to guest memory.
                unsafe { Self::borrowed(start, len, access, fd, offset, owner) }
            }
            // SAFETY: as above, without a file.
            None => Ok(unsafe { Self::borrowed_anonymous(start, len, access, owner) }),
        }
    }
}

/// Returns the file of a region, by which other mappings share the region's memory; `None` for anonymous memory, and for a
/// private mapping of a file, whose pages differ from the file's once they are written.
#[must_use]
pub fn shared_file<B: Bitmap>(region: &GuestRegionMmap<B>) -> Option<&FileOffset> {
    let is_shared = region.flags() & libc::MAP_SHARED != 0;
    region.file_offset().filter(|_| is_shared)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use vm_memory::{GuestAddress, MmapRegion};

    use super::*;

    fn region(file: Option<FileOffset>, rights: i32, flags: i32) -> Arc<GuestRegionMmap> {
        let mapping = MmapRegion::build(file, 0x2000, rights, flags).expect("mapped");
        Arc::new(GuestRegionMmap::new(mapping, GuestAddress(0x8000)).expect("in 64 bits"))
    }

    fn file() -> Option<FileOffset> {
        let file = crate::memfd(c"guest", 0x4000).expect("memory");
        Some(FileOffset::new(File::from(file), 0x1000))
    }

    #[test]
    fn a_region_stays_mapped_while_it_is_borrowed() {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let anonymous = libc::MAP_ANONYMOUS | libc::MAP_PRIVATE;
        for (file, flags, has_place) in [
            (file(), libc::MAP_SHARED, true),
            (file(), libc::MAP_PRIVATE, false),
            (None, anonymous, false),
        ] {
            let region = region(file, rights, flags);
            let mapping = Mapping::from_guest_region(&region).expect("readable");
            assert!(mapping.is_borrowed());
            assert_eq!(mapping.access(), MappingAccess::ReadWrite);
            let offset = mapping.file_place().map(|place| place.offset);
            assert_eq!(offset, has_place.then_some(0x1000));
            drop(region);
            let bytes = mapping.bytes(0x1FFF, 1).expect("inside");
            bytes.copy_from(&[7]);
            let mut read = [0];
            bytes.copy_to(&mut read);
            assert_eq!(read, [7]);
            assert!(mapping.bytes(0x1FFF, 2).is_none());
        }
    }

    #[test]
    fn rights_are_those_of_the_region() {
        let constant = region(file(), libc::PROT_READ, libc::MAP_SHARED);
        let mapping = Mapping::from_guest_region(&constant).expect("readable");
        assert_eq!(mapping.access(), MappingAccess::Read);
        let hidden = region(file(), libc::PROT_NONE, libc::MAP_SHARED);
        let error = Mapping::from_guest_region(&hidden).expect_err("no rights");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }
}

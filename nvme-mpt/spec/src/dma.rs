//! Data pointers of commands: PRP entries and SGL descriptors (Base 2.0, section 4.1).

use core::mem::{offset_of, size_of};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Physical Region Page entry (Base 2.0, section 4.1.1): the address of a memory page. The first entry of a command and
/// a pointer to a PRP list may have an offset in the page.
///
/// The host selects the memory page size in `CC.MPS`. Methods get it as a power of two, `12 + CC.MPS`.
#[repr(transparent)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct PrpEntry(pub u64);

impl PrpEntry {
    /// Size of an entry in a PRP list, in bytes.
    pub const SIZE: usize = size_of::<Self>();

    /// Returns the offset within the memory page.
    #[inline]
    #[must_use]
    pub const fn offset(self, page_shift: u32) -> u64 {
        self.0 & Self::offset_mask(page_shift)
    }

    /// Returns the address of the memory page.
    #[inline]
    #[must_use]
    pub const fn page(self, page_shift: u32) -> u64 {
        self.0 & !Self::offset_mask(page_shift)
    }

    /// Returns the number of bytes from the entry's address to the end of its memory page.
    #[inline]
    #[must_use]
    pub const fn bytes_to_page_end(self, page_shift: u32) -> u64 {
        (1 << page_shift) - self.offset(page_shift)
    }

    /// Returns whether the address is aligned as required for all entries: the two low bits are clear.
    #[inline]
    #[must_use]
    pub const fn is_dword_aligned(self) -> bool {
        self.0.is_multiple_of(4)
    }

    /// Returns the number of memory pages that `length` bytes take, if they begin at `offset` in the first page. The data
    /// need as many PRP entries.
    #[inline]
    #[must_use]
    pub const fn page_count(offset: u64, length: u64, page_shift: u32) -> u64 {
        (offset + length).div_ceil(1 << page_shift)
    }

    const fn offset_mask(page_shift: u32) -> u64 {
        (1 << page_shift) - 1
    }
}

/// Walk through a PRP list, one memory page at a time (Base 2.0, section 4.1.1). If more entries follow at the end of a
/// page, the page's last entry points to the next page of the list.
#[derive(Clone, Copy, Debug)]
pub struct PrpList {
    pointer: PrpEntry,
    /// Number of remaining entries.
    remaining: u64,
    /// Required alignment of `pointer`. A list may start at any entry of a page, but continues at the start of a page. So
    /// each further page has at least one data entry.
    alignment: u64,
    page_shift: u32,
}

/// Entries of a PRP list in one memory page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrpListPage {
    /// Address of the first entry.
    pub address: u64,
    /// Number of entries, including a pointer to the next page.
    pub count: u64,
    /// True if the last entry points to the next page of the list.
    pub has_next_page: bool,
}

impl PrpListPage {
    /// Returns the number of entries that describe data.
    #[inline(always)]
    #[must_use]
    pub const fn data_entries(self) -> u64 {
        self.count - self.has_next_page as u64
    }
}

impl PrpList {
    /// Creates a walk through a list of `entries` entries.
    #[inline(always)]
    #[must_use]
    pub const fn new(pointer: PrpEntry, entries: u64, page_shift: u32) -> Self {
        Self {
            pointer,
            remaining: entries,
            alignment: PrpEntry::SIZE as u64,
            page_shift,
        }
    }

    /// Returns the current page of the list; `None` if the pointer to it is misaligned.
    #[inline(always)]
    #[must_use]
    pub const fn page(&self) -> Option<PrpListPage> {
        if !self.pointer.0.is_multiple_of(self.alignment) {
            return None;
        }
        let slots = self.pointer.bytes_to_page_end(self.page_shift) / PrpEntry::SIZE as u64;
        let continues = self.remaining > slots;
        Some(PrpListPage {
            address: self.pointer.0,
            count: if continues { slots } else { self.remaining },
            has_next_page: continues,
        })
    }

    /// Continues after `page`, whose last entry is `pointer`.
    pub const fn advance(&mut self, page: PrpListPage, pointer: PrpEntry) {
        self.remaining -= page.data_entries();
        self.pointer = pointer;
        self.alignment = 1 << self.page_shift;
    }
}

/// SGL descriptor (Base 2.0, section 4.1.2.1). The fields are those of descriptor types with an address and a length:
/// data block, segment and last segment. A bit bucket has no address.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct SglDescriptor {
    /// Address or offset, depending on the sub type.
    pub address: u64,
    /// Length in bytes.
    pub length: u32,
    /// Reserved.
    pub rsvd12: [u8; 3],
    /// SGL Identifier: type and sub type.
    pub id: SglId,
}

const _: () = assert!(size_of::<SglDescriptor>() == 16);
const _: () = assert!(offset_of!(SglDescriptor, id) == 15);

impl SglDescriptor {
    /// Size of a descriptor in a segment, in bytes.
    pub const SIZE: usize = size_of::<Self>();

    /// Creates a data block descriptor for `length` bytes at an address.
    #[inline]
    #[must_use]
    pub const fn data_block(address: u64, length: u32) -> Self {
        Self::with_type(SglType::DATA_BLOCK, address, length)
    }

    /// Creates a segment descriptor: the next segment has `length` bytes of descriptors and is not the last one.
    #[inline]
    #[must_use]
    pub const fn segment(address: u64, length: u32) -> Self {
        Self::with_type(SglType::SEGMENT, address, length)
    }

    /// Creates a last segment descriptor: the last segment has `length` bytes of descriptors.
    #[inline]
    #[must_use]
    pub const fn last_segment(address: u64, length: u32) -> Self {
        Self::with_type(SglType::LAST_SEGMENT, address, length)
    }

    const fn with_type(sgl_type: SglType, address: u64, length: u32) -> Self {
        let id = SglId(0).with_sgl_type(sgl_type);
        Self {
            address,
            length,
            rsvd12: [0; 3],
            id,
        }
    }
}

bit_field! {
    /// SGL Identifier, the last byte of an [`SglDescriptor`] (Base 2.0, section 4.1.2.1).
    pub struct SglId(u8) {
        /// SGL Descriptor Sub Type.
        sub_type / with_sub_type: SglSubType(u8) [3:0];
        /// SGL Descriptor Type.
        sgl_type / with_sgl_type: SglType(u8) [7:4];
    }
}

open_enum! {
    /// SGL Descriptor Type (Base 2.0, section 4.1.2.1).
    pub struct SglType(u8) {
        DATA_BLOCK = 0x0, "SGL Data Block descriptor";
        BIT_BUCKET = 0x1, "SGL Bit Bucket descriptor";
        SEGMENT = 0x2, "SGL Segment descriptor";
        LAST_SEGMENT = 0x3, "SGL Last Segment descriptor";
        KEYED_DATA_BLOCK = 0x4, "Keyed SGL Data Block descriptor";
        TRANSPORT_DATA_BLOCK = 0x5, "Transport SGL Data Block descriptor";
        VENDOR_SPECIFIC = 0xF, "Vendor specific";
    }
}

open_enum! {
    /// SGL Descriptor Sub Type (Base 2.0, section 4.1.2.1).
    pub struct SglSubType(u8) {
        ADDRESS = 0x0, "Address";
        OFFSET = 0x1, "Offset";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prp_entry_splits_at_the_page_size() {
        let prp = PrpEntry(0x1_2345_6FFC);
        assert_eq!((prp.page(12), prp.offset(12)), (0x1_2345_6000, 0xFFC));
        assert_eq!(prp.bytes_to_page_end(12), 4);
        assert_eq!((prp.page(16), prp.offset(16)), (0x1_2345_0000, 0x6FFC));
        assert_eq!(PrpEntry(0x2000).bytes_to_page_end(12), 4096);
        assert!(prp.is_dword_aligned() && !PrpEntry(0x1002).is_dword_aligned());
    }

    #[test]
    fn entries_are_counted_by_page() {
        assert_eq!(PrpEntry::page_count(0, 4096, 12), 1);
        assert_eq!(PrpEntry::page_count(0, 4097, 12), 2);
        assert_eq!(PrpEntry::page_count(512, 4096, 12), 2);
        assert_eq!(PrpEntry::page_count(4092, 4, 12), 1);
        assert_eq!(PrpEntry::page_count(0, 0, 12), 0);
        assert_eq!(PrpEntry::page_count(512, 1 << 20, 12), 257);
    }

    #[test]
    fn a_list_goes_on_in_the_page_that_its_last_entry_names() {
        // The first page has two of the five entries.
        let mut list = PrpList::new(PrpEntry(0x1FF0), 5, 12);
        let page = list.page().expect("at an entry");
        let expected = PrpListPage {
            address: 0x1FF0,
            count: 2,
            has_next_page: true,
        };
        assert_eq!((page, page.data_entries()), (expected, 1));
        list.advance(page, PrpEntry(0x7000));
        let page = list.page().expect("at a page");
        assert_eq!(
            (page.address, page.count, page.has_next_page),
            (0x7000, 4, false)
        );
        list.advance(expected, PrpEntry(0x7008));
        assert_eq!(
            list.page(),
            None,
            "a list that continues another begins a page"
        );
        assert_eq!(PrpList::new(PrpEntry(0x1004), 1, 12).page(), None);
        // A list that ends exactly at the end of its page.
        let full = PrpList::new(PrpEntry(0x1FF0), 2, 12)
            .page()
            .expect("at an entry");
        assert!(!full.has_next_page && full.count == 2);
    }

    #[test]
    fn sgl_descriptors_have_their_type_in_the_last_byte() {
        assert_eq!(
            SglDescriptor::last_segment(0x1122_3344_5566_7788, 0x30).as_bytes(),
            [
                0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0x30, 0, 0, 0, 0, 0, 0, 0x30
            ]
        );
        assert_eq!(SglDescriptor::segment(0, 0).id.0, 0x20);
        let id = SglId(0x41);
        assert_eq!(id.sgl_type(), SglType::KEYED_DATA_BLOCK);
        assert_eq!(id.sub_type(), SglSubType::OFFSET);
        assert_eq!(SglId(0xA0).sgl_type().name(), None);
    }
}

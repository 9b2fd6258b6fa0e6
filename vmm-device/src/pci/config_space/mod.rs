//! PCI configuration space: a type 0 header and four capabilities.
//!
//! All of it is two arrays: what a read returns, and which bits a write changes. Sizing a BAR by
//! writing all ones, read-only fields and reserved bits all follow from the second one. A write's
//! other effects (a BAR moves, the function resets) are derived by comparing before and after.
//!
//! Releases up to 0.1 had MSI-X alone. A function that goes on keeps what its guest has seen: [`Offer`] is read from the
//! saved bytes.

use nvme_mpt::{StateError, spec::registers::offset::DOORBELLS};

use super::{
    capabilities::{msi, msix, pcie, pm},
    msi::MsiControl,
    msix::{BAR_SIZE as MSIX_BAR_SIZE, MsixControl, PBA_OFFSET, TABLE_OFFSET},
};

/// Vendor ID, "MP": free in the public list of PCI IDs.
///
/// Guest drivers find an NVMe controller by its class code and use the IDs for quirks alone. Those
/// of other emulated and physical controllers are bound to quirks of theirs: Linux restricts
/// namespace identifiers for 1B36:0010, stalls queue creation for others, and so on. An ID that
/// nobody has gets the behaviour that the specification describes.
pub const VENDOR_ID: u16 = 0x4D50;
/// Device ID.
pub const DEVICE_ID: u16 = 0x0001;

/// Bytes of configuration space (PCI Express 4.0, section 7.2).
pub const CONFIG_SPACE_SIZE: u64 = 4096;

/// Bytes that hold anything: from here on lie extended capabilities, of which there are none, and
/// a first one of zero says so (PCI Express 4.0, section 7.6.1).
const COMPATIBLE_SIZE: usize = 256;

/// Smallest BAR0: a guest driver in wide use masks the address with FFFF_C000h.
const REGISTERS_BAR_MIN: u64 = 0x4000;

const COMMAND: u8 = 0x04;
/// Memory Space Enable, as a bit of the lower byte of Command.
const MEMORY_SPACE: u8 = 1 << 1;
/// Bus Master Enable, as a bit of the lower byte of Command.
const BUS_MASTER: u8 = 1 << 2;
/// Memory Space, Bus Master, Parity Error Response, SERR#, Interrupt Disable. There is no I/O BAR,
/// so I/O Space is read-only. Memory Space is not enforced on accesses that reach the function: a
/// driver in user space does not set it.
const COMMAND_WRITABLE: u16 = 1 << 1 | 1 << 2 | 1 << 6 | 1 << 8 | 1 << 10;
const STATUS: u8 = 0x06;
/// Interrupt Status, as a bit of the lower byte of Status.
const INTERRUPT_STATUS: u8 = 1 << 3;
/// Status: Capabilities List.
const CAPABILITIES_LIST: u16 = 1 << 4;
const REVISION_ID: u8 = 0x08;
/// Class code 01-08-02: mass storage, non-volatile memory, NVM Express I/O controller
/// (PCIe 1.0, section 3.8.1).
const CLASS_CODE: [u8; 3] = [0x02, 0x08, 0x01];
const BARS: u8 = 0x10;
/// A memory BAR's type: 64-bit, not prefetchable.
const BAR_MEMORY_64: u64 = 0b100;
const SUBSYSTEM_VENDOR_ID: u8 = 0x2C;
const SUBSYSTEM_ID: u8 = 0x2E;
const CAPABILITIES_POINTER: u8 = 0x34;
const INTERRUPT_LINE: u8 = 0x3C;
const INTERRUPT_PIN: u8 = 0x3D;
/// Interrupt Pin: INTA#.
const INTA: u8 = 1;
/// Interrupt Disable, as a bit of the upper byte of Command.
const INTERRUPT_DISABLE: u8 = 1 << 2;

/// A memory BAR of the function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bar {
    /// BAR0: controller properties and doorbells.
    Registers,
    /// BAR4: MSI-X table and pending bits. They do not share BAR0's pages, so that a VMM which
    /// traps the one can map the other.
    Msix,
}

impl Bar {
    /// All BARs.
    pub const ALL: [Self; 2] = [Self::Registers, Self::Msix];

    /// Index of its lower half among the six BARs of the header.
    #[must_use]
    pub const fn index(self) -> u8 {
        match self {
            Self::Registers => 0,
            Self::Msix => 4,
        }
    }

    /// Offset of its address in configuration space, in eight bytes.
    #[must_use]
    pub const fn config_offset(self) -> u64 {
        (BARS + 4 * self.index()) as u64
    }

    const fn offset(self) -> usize {
        self.config_offset() as usize
    }
}

/// A BAR that a guest has given another place in its address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarMove {
    /// Which one.
    pub bar: Bar,
    /// Its size in bytes.
    pub size: u64,
    /// Address at which it was decoded before, if any.
    pub from: Option<u64>,
    /// Address at which it is decoded from now on, if any.
    pub to: Option<u64>,
}

/// Effects of a write to configuration space besides changed bits.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ConfigWrite {
    /// BARs that moved, appeared or vanished.
    pub(crate) moves: Vec<BarMove>,
    /// A Function Level Reset was initiated. Configuration space is as after power-on already.
    pub(crate) function_level_reset: bool,
}

/// Interrupts that a function offers its guest beside MSI-X.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    /// MSI.
    pub(crate) msi: bool,
    /// INTx: the pin.
    pub(crate) pin: bool,
}

impl Offer {
    /// Releases up to 0.1.
    const MSIX_ALONE: Self = Self {
        msi: false,
        pin: false,
    };

    /// Returns what the guest of these contents was offered.
    fn of(contents: &[u8]) -> Self {
        let at = |offset: u8| contents.get(usize::from(offset)).copied();
        Self {
            msi: at(pcie::OFFSET + 1) == Some(msi::OFFSET),
            pin: at(INTERRUPT_PIN) == Some(INTA),
        }
    }
}

/// Configuration space of one function.
#[derive(Clone, Debug)]
pub(crate) struct ConfigSpace {
    contents: [u8; COMPATIBLE_SIZE],
    layout: Layout,
    /// Offer to a guest that is new.
    newest: Offer,
    /// Command was written since power-on.
    commanded: bool,
}

/// Facts that do not change while a function lives.
#[derive(Clone, Debug)]
struct Layout {
    doorbells: u64,
    vectors: u16,
    offer: Offer,
    registers_bar_size: u64,
    /// Contents after a reset.
    reset: [u8; COMPATIBLE_SIZE],
    /// Bits that a write changes.
    writable: [u8; COMPATIBLE_SIZE],
}

impl ConfigSpace {
    /// Configuration space of a function with so many bytes of doorbells and so many MSI-X
    /// vectors, of which there is at least one.
    pub(crate) fn new(doorbells: u64, vectors: u16, newest: Offer) -> Self {
        let layout = Layout::new(doorbells, vectors, newest);
        Self {
            contents: layout.reset,
            layout,
            newest,
            commanded: false,
        }
    }

    /// As after power-on, of a function for a guest that is new.
    pub(crate) fn renew(&mut self) {
        let Layout {
            doorbells, vectors, ..
        } = self.layout;
        *self = Self::new(doorbells, vectors, self.newest);
    }

    /// Returns whether it is as releases up to 0.1 had it.
    pub(crate) fn is_of_first_releases(&self) -> bool {
        self.layout.offer == Offer::MSIX_ALONE
    }

    /// As after power-on.
    pub(crate) fn reset(&mut self) -> Vec<BarMove> {
        let before = self.addresses();
        self.commanded = false;
        self.contents = self.layout.reset;
        self.moves_since(before)
    }

    /// Reads any number of bytes from any offset; what is not there reads as zero.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        for (byte, content) in data
            .iter_mut()
            .zip(self.contents.iter().skip(saturate(offset)))
        {
            *byte = *content;
        }
    }

    /// Writes any number of bytes to any offset; what is not there or read-only stays as it is.
    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) -> ConfigWrite {
        let start = saturate(offset);
        let before = self.addresses();
        let power_state = self.power_state();
        let end = start.saturating_add(data.len());
        self.commanded |= (start..end).contains(&usize::from(COMMAND));

        let writable = self
            .contents
            .iter_mut()
            .zip(&self.layout.writable)
            .skip(start);
        for ((content, mask), byte) in writable.zip(data) {
            *content = *content & !mask | byte & mask;
        }

        if !matches!(self.power_state(), pm::D0 | pm::D3HOT) {
            // A state that is not supported: the write is discarded (PCI Power Management 1.2,
            // section 3.2.4).
            let pmcsr = &mut self.contents[usize::from(pm::OFFSET + pm::PMCSR)];
            *pmcsr = *pmcsr & !pm::POWER_STATE | power_state;
        }

        let flr_byte = usize::from(pcie::OFFSET + pcie::DEVICE_CONTROL + 1);
        let function_level_reset = flr_byte
            .checked_sub(start)
            .and_then(|index| data.get(index))
            .is_some_and(|byte| byte & pcie::INITIATE_FLR != 0);
        if function_level_reset {
            self.contents = self.layout.reset;
        }
        ConfigWrite {
            moves: self.moves_since(before),
            function_level_reset,
        }
    }

    /// Its contents, for a snapshot.
    pub(crate) fn save(&self) -> Vec<u8> {
        self.contents.to_vec()
    }

    /// Checks whether these can be its contents: those of a function with other BARs, vectors or capabilities
    /// cannot.
    pub(crate) fn check(&self, saved: &[u8]) -> Result<(), StateError> {
        if saved.len() != COMPATIBLE_SIZE {
            let valid = COMPATIBLE_SIZE.to_string();
            return Err(StateError::invalid(
                "bytes of configuration space",
                saved.len(),
                valid,
            ));
        }
        let Layout {
            reset, writable, ..
        } = &self.layout_of(saved);
        for (offset, saved) in saved.iter().enumerate() {
            let (fixed, mask) = (reset[offset] & !writable[offset], !writable[offset]);
            if saved & mask != fixed {
                return Err(StateError::Mismatch {
                    promise: format!("configuration space byte {offset:#04x}"),
                    saved: format!("{:#04x}", saved & mask),
                    here: format!("{fixed:#04x}"),
                });
            }
        }
        let power_state = saved[usize::from(pm::OFFSET + pm::PMCSR)] & pm::POWER_STATE;
        if !matches!(power_state, pm::D0 | pm::D3HOT) {
            return Err(StateError::invalid("power state", power_state, "0 or 3"));
        }
        Ok(())
    }

    /// Returns the layout of contents that this program or an earlier one has saved.
    fn layout_of(&self, saved: &[u8]) -> Layout {
        let Layout {
            doorbells, vectors, ..
        } = self.layout;
        let was = Offer::of(saved);
        let offer = Offer {
            // What this function does not have is a mismatch.
            pin: was.pin && self.newest.pin,
            msi: was.msi && self.newest.msi,
        };
        Layout::new(doorbells, vectors, offer)
    }

    /// Returns whether Command was written and enables nothing. Its contents alone do not tell that.
    pub(crate) fn is_switched_off(&self) -> bool {
        self.commanded && self.contents[usize::from(COMMAND)] == 0
    }

    /// Takes over contents that have been checked, and what [`Self::is_switched_off`] returned. Returns the BARs that
    /// moved.
    pub(crate) fn restore(&mut self, saved: &[u8], switched_off: bool) -> Vec<BarMove> {
        let before = self.addresses();
        self.layout = self.layout_of(saved);
        for (content, saved) in self.contents.iter_mut().zip(saved) {
            *content = *saved;
        }
        self.commanded = switched_off || self.contents[usize::from(COMMAND)] != 0;
        self.moves_since(before)
    }

    /// Returns the address at which a BAR is decoded: none until the guest has given it an address and set
    /// Memory Space Enable.
    pub(crate) fn bar_address(&self, bar: Bar) -> Option<u64> {
        let enabled = self.contents[usize::from(COMMAND)] & MEMORY_SPACE != 0;
        let mut raw = [0; 8];
        raw.copy_from_slice(&self.contents[bar.offset()..][..8]);
        let address = u64::from_le_bytes(raw) & !(self.bar_size(bar) - 1);
        // All ones is sizing in progress, with Memory Space left enabled.
        let sizing = address == !(self.bar_size(bar) - 1);
        (enabled && address != 0 && !sizing).then_some(address)
    }

    /// Returns whether the function may read and write memory and send interrupt messages: Bus Master Enable
    /// (PCI Express 4.0, section 7.5.1.1.3).
    ///
    /// A client that never writes Command may as well: a driver in user space that leaves configuration
    /// space alone. All guests write it, and their firmware does, before they can access the BARs. SPDK's and
    /// libvfn's drivers set Bus Master Enable.
    pub(crate) fn is_bus_master(&self) -> bool {
        !self.commanded || self.contents[usize::from(COMMAND)] & BUS_MASTER != 0
    }

    /// Size of a BAR, a power of two.
    pub(crate) fn bar_size(&self, bar: Bar) -> u64 {
        self.layout.bar_size(bar)
    }

    /// Message Control of the MSI-X capability.
    pub(crate) fn msix_control(&self) -> MsixControl {
        let at = usize::from(msix::OFFSET + msix::CONTROL);
        let control = u16::from_le_bytes([self.contents[at], self.contents[at + 1]]);
        MsixControl {
            enabled: control & msix::ENABLE != 0,
            function_masked: control & msix::FUNCTION_MASK != 0,
            msi: None,
        }
    }

    /// MSI, as the guest has set it up.
    pub(crate) fn msi_control(&self) -> MsiControl {
        let word = |at: u8| {
            let at = usize::from(msi::OFFSET + at);
            u16::from_le_bytes([self.contents[at], self.contents[at + 1]])
        };
        let control = word(msi::CONTROL);
        let address = usize::from(msi::OFFSET + msi::ADDRESS);
        let mut raw = [0; 8];
        raw.copy_from_slice(&self.contents[address..][..8]);
        let allocated = (control & msi::ENABLE_MASK) >> msi::ENABLE_SHIFT;
        MsiControl {
            enabled: control & msi::ENABLE != 0,
            messages_log2: allocated.min(messages_log2(self.layout.vectors)),
            address: u64::from_le_bytes(raw),
            data: word(msi::DATA),
        }
    }

    /// Returns the number of messages that MSI has; 0 if the function does not offer it.
    pub(crate) fn msi_messages(&self) -> u16 {
        match self.layout.offer.msi {
            true => 1 << messages_log2(self.layout.vectors),
            false => 0,
        }
    }

    /// Returns whether the function has a pin.
    pub(crate) fn has_pin(&self) -> bool {
        self.layout.offer.pin
    }

    /// Returns whether the guest has switched the pin off: Interrupt Disable.
    pub(crate) fn is_pin_disabled(&self) -> bool {
        self.contents[usize::from(COMMAND) + 1] & INTERRUPT_DISABLE != 0
    }

    fn power_state(&self) -> u8 {
        self.contents[usize::from(pm::OFFSET + pm::PMCSR)] & pm::POWER_STATE
    }

    fn addresses(&self) -> [Option<u64>; Bar::ALL.len()] {
        Bar::ALL.map(|bar| self.bar_address(bar))
    }

    fn moves_since(&self, before: [Option<u64>; Bar::ALL.len()]) -> Vec<BarMove> {
        let after = self.addresses();
        Bar::ALL
            .into_iter()
            .zip(before.into_iter().zip(after))
            .filter(|(_, (from, to))| from != to)
            .map(|(bar, (from, to))| BarMove {
                bar,
                size: self.bar_size(bar),
                from,
                to,
            })
            .collect()
    }
}

/// Sets Interrupt Status in bytes that were read from `offset` on, if they have it.
pub(crate) fn set_interrupt_status(offset: u64, data: &mut [u8]) {
    let place = u64::from(STATUS).checked_sub(offset);
    if let Some(byte) = place.and_then(|place| data.get_mut(saturate(place))) {
        *byte |= INTERRUPT_STATUS;
    }
}

/// Messages of MSI for so many vectors, as a power of two.
fn messages_log2(vectors: u16) -> u16 {
    // At most 15, for at least one vector.
    let floor = vectors.checked_ilog2().unwrap_or_default() as u16;
    floor.min(msi::MESSAGES_LOG2_MAX)
}

/// An offset as an index: one that is too large for an index is beyond everything anyway.
fn saturate(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

impl Layout {
    fn new(doorbells: u64, vectors: u16, offer: Offer) -> Self {
        let registers_bar_size = (DOORBELLS + doorbells)
            .next_power_of_two()
            .max(REGISTERS_BAR_MIN);
        let mut layout = Self {
            doorbells,
            vectors,
            offer,
            registers_bar_size,
            reset: [0; COMPATIBLE_SIZE],
            writable: [0; COMPATIBLE_SIZE],
        };
        layout.header();
        layout.power_management();
        layout.msix(vectors);
        layout.pci_express();
        if offer.msi {
            layout.msi();
        }
        layout
    }

    fn bar_size(&self, bar: Bar) -> u64 {
        match bar {
            Bar::Registers => self.registers_bar_size,
            Bar::Msix => MSIX_BAR_SIZE,
        }
    }

    fn header(&mut self) {
        self.put(0x00, &VENDOR_ID.to_le_bytes());
        self.put(0x02, &DEVICE_ID.to_le_bytes());
        self.allow(COMMAND, &COMMAND_WRITABLE.to_le_bytes());
        self.put(STATUS, &CAPABILITIES_LIST.to_le_bytes());
        self.put(REVISION_ID + 1, &CLASS_CODE);
        for bar in Bar::ALL {
            let at = BARS + 4 * bar.index();
            self.put(at, &BAR_MEMORY_64.to_le_bytes());
            self.allow(at, &(!(self.bar_size(bar) - 1)).to_le_bytes());
        }
        self.put(SUBSYSTEM_VENDOR_ID, &VENDOR_ID.to_le_bytes());
        self.put(SUBSYSTEM_ID, &DEVICE_ID.to_le_bytes());
        self.put(CAPABILITIES_POINTER, &[pm::OFFSET]);
        // Firmware keeps a number here.
        self.allow(INTERRUPT_LINE, &[0xFF]);
        if self.offer.pin {
            self.put(INTERRUPT_PIN, &[INTA]);
        }
    }

    fn power_management(&mut self) {
        self.put(pm::OFFSET, &[pm::ID, msix::OFFSET]);
        self.put(pm::OFFSET + 2, &pm::PMC.to_le_bytes());
        self.put(pm::OFFSET + pm::PMCSR, &[pm::NO_SOFT_RESET]);
        self.allow(pm::OFFSET + pm::PMCSR, &[pm::POWER_STATE]);
    }

    fn msix(&mut self, vectors: u16) {
        let bir = u32::from(Bar::Msix.index());
        self.put(msix::OFFSET, &[msix::ID, pcie::OFFSET]);
        // Table Size is zero-based.
        self.put(msix::OFFSET + msix::CONTROL, &(vectors - 1).to_le_bytes());
        self.allow(
            msix::OFFSET + msix::CONTROL,
            &(msix::ENABLE | msix::FUNCTION_MASK).to_le_bytes(),
        );
        self.put(
            msix::OFFSET + msix::TABLE,
            &(TABLE_OFFSET as u32 | bir).to_le_bytes(),
        );
        self.put(
            msix::OFFSET + msix::PBA,
            &(PBA_OFFSET as u32 | bir).to_le_bytes(),
        );
    }

    fn msi(&mut self) {
        self.put(pcie::OFFSET + 1, &[msi::OFFSET]);
        self.put(msi::OFFSET, &[msi::ID, 0]);
        let capable = messages_log2(self.vectors) << msi::CAPABLE_SHIFT;
        let control = msi::ADDRESS_64 | capable;
        self.put(msi::OFFSET + msi::CONTROL, &control.to_le_bytes());
        self.allow(
            msi::OFFSET + msi::CONTROL,
            &(msi::ENABLE | msi::ENABLE_MASK).to_le_bytes(),
        );
        // Messages are dwords, so the two low bits of the address are zero.
        self.allow(msi::OFFSET + msi::ADDRESS, &(!0b11_u64).to_le_bytes());
        self.allow(msi::OFFSET + msi::DATA, &u16::MAX.to_le_bytes());
    }

    fn pci_express(&mut self) {
        let at = pcie::OFFSET;
        self.put(at, &[pcie::ID, 0]);
        self.put(at + 2, &pcie::CAPABILITIES.to_le_bytes());
        self.put(
            at + pcie::DEVICE_CAPABILITIES,
            &pcie::DEVICE_CAPABILITIES_VALUE.to_le_bytes(),
        );
        self.put(
            at + pcie::DEVICE_CONTROL,
            &pcie::DEVICE_CONTROL_DEFAULT.to_le_bytes(),
        );
        self.allow(
            at + pcie::DEVICE_CONTROL,
            &pcie::DEVICE_CONTROL_WRITABLE.to_le_bytes(),
        );
        self.put(
            at + pcie::LINK_CAPABILITIES,
            &pcie::LINK_CAPABILITIES_VALUE.to_le_bytes(),
        );
        self.allow(
            at + pcie::LINK_CONTROL,
            &pcie::LINK_CONTROL_WRITABLE.to_le_bytes(),
        );
        self.put(at + pcie::LINK_STATUS, &pcie::LINK.to_le_bytes());
        self.put(
            at + pcie::DEVICE_CAPABILITIES_2,
            &pcie::DEVICE_CAPABILITIES_2_VALUE.to_le_bytes(),
        );
        self.allow(
            at + pcie::DEVICE_CONTROL_2,
            &pcie::DEVICE_CONTROL_2_WRITABLE.to_le_bytes(),
        );
        self.put(
            at + pcie::LINK_CAPABILITIES_2,
            &pcie::LINK_CAPABILITIES_2_VALUE.to_le_bytes(),
        );
        self.put(
            at + pcie::LINK_CONTROL_2,
            &pcie::LINK_CONTROL_2_VALUE.to_le_bytes(),
        );
    }

    fn put(&mut self, offset: u8, bytes: &[u8]) {
        self.reset[usize::from(offset)..][..bytes.len()].copy_from_slice(bytes);
    }

    fn allow(&mut self, offset: u8, mask: &[u8]) {
        self.writable[usize::from(offset)..][..mask.len()].copy_from_slice(mask);
    }
}

#[cfg(test)]
mod tests;

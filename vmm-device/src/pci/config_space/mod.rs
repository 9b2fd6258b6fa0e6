//! PCI configuration space: a type 0 header and four capabilities.
//!
//! Two arrays describe configuration space: the bytes that reads return, and a mask of the bits that writes change. BAR sizing,
//! read-only fields and reserved bits follow from this mask. Further effects of a write, such as a moved BAR or a function
//! reset, are found by comparing the state before and after the write.
//!
//! Releases up to 0.1 had MSI-X only. The layout must not change for a guest whose function is restored, so the saved bytes
//! determine the [`OfferedInterrupts`].

use nvme_guest::BackendStateError;
use nvme_spec::registers::offset::DOORBELLS;

use super::{
    capabilities::{msi, msix, pcie, pm},
    msi::MsiControl,
    msix::{BAR_SIZE as MSIX_BAR_SIZE, MsixControl, PBA_OFFSET, TABLE_OFFSET},
};

/// Vendor ID, "MP", unassigned in the public list of PCI IDs.
///
/// Guest drivers find an NVMe controller by its class code, and use the IDs for quirks only. The IDs of other controllers
/// trigger such quirks. For example, Linux restricts namespace identifiers for 1B36:0010 (QEMU), and delays the creation of
/// queues for some physical drives. With an unassigned ID, drivers follow the specification.
pub const VENDOR_ID: u16 = 0x4D50;
/// Device ID of the function.
pub const DEVICE_ID: u16 = 0x0001;

/// Size of configuration space in bytes (PCI Express 4.0, section 7.2).
pub const CONFIG_SPACE_SIZE: u64 = 4096;

/// Size in bytes of the PCI-compatible part. Only this part has content: a first extended capability of zero reports that there
/// are no extended capabilities (PCI Express 4.0, section 7.6.1).
const COMPATIBLE_SIZE: usize = 256;

/// Minimum size of BAR0 in bytes. A guest driver in wide use masks the BAR's address with FFFF_C000h.
const REGISTERS_BAR_MIN: u64 = 0x4000;

const COMMAND: u8 = 0x04;
/// Memory Space Enable, as a bit of the lower byte of Command.
const MEMORY_SPACE: u8 = 1 << 1;
/// Bus Master Enable, as a bit of the lower byte of Command.
const BUS_MASTER: u8 = 1 << 2;
/// Writable bits of Command: Memory Space, Bus Master, Parity Error Response, SERR#, Interrupt Disable. I/O Space is read-only,
/// as there is no I/O BAR. The function answers register accesses even if Memory Space is clear, because drivers in user space
/// do not set this bit.
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
/// Type of a memory BAR: 64-bit, not prefetchable.
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
    /// BAR4: MSI-X table and pending bits. They are not in BAR0, so that a VMM can trap BAR4 and map BAR0.
    Msix,
}

impl Bar {
    /// All BARs of the function.
    pub const ALL: [Self; 2] = [Self::Registers, Self::Msix];

    /// Returns the index of the BAR's lower half among the six BARs of the header.
    #[must_use]
    pub const fn index(self) -> u8 {
        match self {
            Self::Registers => 0,
            Self::Msix => 4,
        }
    }

    /// Returns the offset in configuration space of the BAR's address, which has eight bytes.
    #[must_use]
    pub const fn config_offset(self) -> u64 {
        (BARS + 4 * self.index()) as u64
    }

    const fn offset(self) -> usize {
        self.config_offset() as usize
    }
}

/// Change of a BAR's guest address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarMove {
    /// BAR that moved.
    pub bar: Bar,
    /// Size of the BAR in bytes.
    pub size: u64,
    /// Previous guest address; `None` if the BAR was not decoded.
    pub from: Option<u64>,
    /// New guest address; `None` if the BAR is not decoded.
    pub to: Option<u64>,
}

/// Side effects of a write to configuration space.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ConfigWrite {
    /// BARs whose guest address has changed, or whose decoding has begun or ended.
    pub(crate) bar_moves: Vec<BarMove>,
    /// True if the write has initiated a Function Level Reset. Configuration space is then already in its power-on state.
    pub(crate) function_level_reset: bool,
}

/// Interrupt types that a function offers its guest in addition to MSI-X.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OfferedInterrupts {
    /// True if MSI is offered.
    pub(crate) msi: bool,
    /// True if INTx is offered, through the interrupt pin.
    pub(crate) pin: bool,
}

impl OfferedInterrupts {
    /// Returns the interrupt types that saved configuration space offers.
    fn from_config_space(contents: &[u8]) -> Self {
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
    layout: ConfigSpaceLayout,
    /// Interrupt types that a new guest is offered. A restored guest may have been offered others.
    offered_to_new_guests: OfferedInterrupts,
    /// True if the guest has written Command since power-on.
    is_command_written: bool,
}

/// Layout of configuration space: its properties that stay constant for a guest.
#[derive(Clone, Debug)]
struct ConfigSpaceLayout {
    doorbell_bytes: u64,
    vectors: u16,
    offered: OfferedInterrupts,
    registers_bar_size: u64,
    /// Contents after power-on, and after a function reset.
    reset_contents: [u8; COMPATIBLE_SIZE],
    /// Mask of the bits that the guest can write.
    writable_mask: [u8; COMPATIBLE_SIZE],
}

impl ConfigSpace {
    /// Creates configuration space for `doorbells` bytes of doorbells and `vectors` MSI-X vectors. At least one vector is
    /// needed.
    pub(crate) fn new(doorbells: u64, vectors: u16, newest: OfferedInterrupts) -> Self {
        let layout = ConfigSpaceLayout::new(doorbells, vectors, newest);
        Self {
            contents: layout.reset_contents,
            layout,
            offered_to_new_guests: newest,
            is_command_written: false,
        }
    }

    /// Resets configuration space to its power-on state for a new guest, which is offered all interrupt types.
    pub(crate) fn reset_for_new_guest(&mut self) {
        let ConfigSpaceLayout {
            doorbell_bytes: doorbells,
            vectors,
            ..
        } = self.layout;
        *self = Self::new(doorbells, vectors, self.offered_to_new_guests);
    }

    /// Resets the contents to their power-on values. Returns the BARs that have moved.
    pub(crate) fn reset(&mut self) -> Vec<BarMove> {
        let before = self.bar_addresses();
        self.is_command_written = false;
        self.contents = self.layout.reset_contents;
        self.bar_moves_since(before)
    }

    /// Reads any number of bytes at any offset. Bytes beyond the end of configuration space read as zero.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        for (byte, content) in data
            .iter_mut()
            .zip(self.contents.iter().skip(to_saturated_index(offset)))
        {
            *byte = *content;
        }
    }

    /// Writes any number of bytes at any offset. Read-only bits and bytes beyond the end of configuration space are ignored.
    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) -> ConfigWrite {
        let start = to_saturated_index(offset);
        let before = self.bar_addresses();
        let power_state = self.power_state();
        let end = start.saturating_add(data.len());
        self.is_command_written |= (start..end).contains(&usize::from(COMMAND));

        let writable = self
            .contents
            .iter_mut()
            .zip(&self.layout.writable_mask)
            .skip(start);
        for ((content, mask), byte) in writable.zip(data) {
            *content = *content & !mask | byte & mask;
        }

        if !matches!(self.power_state(), pm::D0 | pm::D3HOT) {
            // The guest wrote a power state that the function does not support, so the write is discarded (PCI Power Management
            // 1.2, section 3.2.4).
            let pmcsr = &mut self.contents[usize::from(pm::OFFSET + pm::PMCSR)];
            *pmcsr = *pmcsr & !pm::POWER_STATE | power_state;
        }

        let flr_byte = usize::from(pcie::OFFSET + pcie::DEVICE_CONTROL + 1);
        let function_level_reset = flr_byte
            .checked_sub(start)
            .and_then(|index| data.get(index))
            .is_some_and(|byte| byte & pcie::INITIATE_FLR != 0);
        if function_level_reset {
            self.contents = self.layout.reset_contents;
        }
        ConfigWrite {
            bar_moves: self.bar_moves_since(before),
            function_level_reset,
        }
    }

    /// Returns the contents, to be saved.
    pub(crate) fn save(&self) -> Vec<u8> {
        self.contents.to_vec()
    }

    /// Checks that saved bytes fit this function. Bytes with other BARs, other numbers of vectors or other capabilities are
    /// refused.
    pub(crate) fn check(&self, saved: &[u8]) -> Result<(), BackendStateError> {
        if saved.len() != COMPATIBLE_SIZE {
            let valid = COMPATIBLE_SIZE.to_string();
            return Err(BackendStateError::invalid(
                "bytes of configuration space",
                saved.len(),
                valid,
            ));
        }
        let ConfigSpaceLayout {
            reset_contents: reset,
            writable_mask: writable,
            ..
        } = &self.saved_layout(saved);
        for (offset, saved) in saved.iter().enumerate() {
            let (fixed, mask) = (reset[offset] & !writable[offset], !writable[offset]);
            if saved & mask != fixed {
                return Err(BackendStateError::Mismatch {
                    promise: format!("configuration space byte {offset:#04x}"),
                    saved: format!("{:#04x}", saved & mask),
                    here: format!("{fixed:#04x}"),
                });
            }
        }
        let power_state = saved[usize::from(pm::OFFSET + pm::PMCSR)] & pm::POWER_STATE;
        if !matches!(power_state, pm::D0 | pm::D3HOT) {
            return Err(BackendStateError::invalid(
                "power state",
                power_state,
                "0 or 3",
            ));
        }
        Ok(())
    }

    /// Returns the layout of saved bytes. They may come from a function that offered fewer interrupt types.
    fn saved_layout(&self, saved: &[u8]) -> ConfigSpaceLayout {
        let ConfigSpaceLayout {
            doorbell_bytes: doorbells,
            vectors,
            ..
        } = self.layout;
        let was = OfferedInterrupts::from_config_space(saved);
        let offer = OfferedInterrupts {
            // If the saved bytes offer an interrupt type that this function lacks, the check finds a difference and refuses
            // them.
            pin: was.pin && self.offered_to_new_guests.pin,
            msi: was.msi && self.offered_to_new_guests.msi,
        };
        ConfigSpaceLayout::new(doorbells, vectors, offer)
    }

    /// Returns whether the guest has written zero to Command. A snapshot needs this in addition to the bytes, because Command
    /// is zero before the first write as well.
    pub(crate) fn is_command_cleared(&self) -> bool {
        self.is_command_written && self.contents[usize::from(COMMAND)] == 0
    }

    /// Restores checked bytes. `switched_off` is the result of [`Self::is_command_cleared`] at the save. Returns the BARs that
    /// have moved.
    pub(crate) fn restore(&mut self, saved: &[u8], switched_off: bool) -> Vec<BarMove> {
        let before = self.bar_addresses();
        self.layout = self.saved_layout(saved);
        for (content, saved) in self.contents.iter_mut().zip(saved) {
            *content = *saved;
        }
        self.is_command_written = switched_off || self.contents[usize::from(COMMAND)] != 0;
        self.bar_moves_since(before)
    }

    /// Returns the address at which a BAR is decoded; `None` until the guest has set an address and Memory Space Enable.
    pub(crate) fn bar_address(&self, bar: Bar) -> Option<u64> {
        let enabled = self.contents[usize::from(COMMAND)] & MEMORY_SPACE != 0;
        let mut raw = [0; 8];
        raw.copy_from_slice(&self.contents[bar.offset()..][..8]);
        let address = u64::from_le_bytes(raw) & !(self.bar_size(bar) - 1);
        // An address of all ones shows that the guest sizes the BAR while Memory Space is enabled.
        let sizing = address == !(self.bar_size(bar) - 1);
        (enabled && address != 0 && !sizing).then_some(address)
    }

    /// Returns whether the function may access memory and send interrupt messages: Bus Master Enable (PCI Express 4.0, section
    /// 7.5.1.1.3).
    ///
    /// Also returns `true` if Command was never written. A user-space driver may not access configuration space at all, while a
    /// guest or its firmware must write Command before the BARs can be accessed. The drivers of SPDK and libvfn do set Bus
    /// Master Enable.
    pub(crate) fn is_bus_master(&self) -> bool {
        !self.is_command_written || self.contents[usize::from(COMMAND)] & BUS_MASTER != 0
    }

    /// Returns the size of a BAR in bytes, a power of two.
    pub(crate) fn bar_size(&self, bar: Bar) -> u64 {
        self.layout.bar_size(bar)
    }

    /// Returns the settings in the MSI-X capability's Message Control.
    pub(crate) fn msix_control(&self) -> MsixControl {
        let at = usize::from(msix::OFFSET + msix::CONTROL);
        let control = u16::from_le_bytes([self.contents[at], self.contents[at + 1]]);
        MsixControl {
            enabled: control & msix::ENABLE != 0,
            function_masked: control & msix::FUNCTION_MASK != 0,
            msi: None,
        }
    }

    /// Returns the guest's MSI settings.
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

    /// Returns the number of MSI messages, or 0 if the function does not offer MSI.
    pub(crate) fn msi_messages(&self) -> u16 {
        match self.layout.offered.msi {
            true => 1 << messages_log2(self.layout.vectors),
            false => 0,
        }
    }

    /// Returns whether the function offers an interrupt pin.
    pub(crate) fn has_pin(&self) -> bool {
        self.layout.offered.pin
    }

    /// Returns whether the guest has set Interrupt Disable.
    pub(crate) fn is_pin_disabled(&self) -> bool {
        self.contents[usize::from(COMMAND) + 1] & INTERRUPT_DISABLE != 0
    }

    fn power_state(&self) -> u8 {
        self.contents[usize::from(pm::OFFSET + pm::PMCSR)] & pm::POWER_STATE
    }

    fn bar_addresses(&self) -> [Option<u64>; Bar::ALL.len()] {
        Bar::ALL.map(|bar| self.bar_address(bar))
    }

    fn bar_moves_since(&self, before: [Option<u64>; Bar::ALL.len()]) -> Vec<BarMove> {
        let after = self.bar_addresses();
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

/// Sets Interrupt Status in `data`, which was read from `offset`, if `data` covers this bit.
pub(crate) fn set_interrupt_status(offset: u64, data: &mut [u8]) {
    let place = u64::from(STATUS).checked_sub(offset);
    if let Some(byte) = place.and_then(|place| data.get_mut(to_saturated_index(place))) {
        *byte |= INTERRUPT_STATUS;
    }
}

/// Returns the number of MSI messages that a function with `vectors` vectors offers, as a base-2 logarithm.
fn messages_log2(vectors: u16) -> u16 {
    // The cast keeps the value: the logarithm of a `u16` is at most 15.
    let floor = vectors.checked_ilog2().unwrap_or_default() as u16;
    floor.min(msi::MESSAGES_LOG2_MAX)
}

/// Converts an offset into an index. An offset beyond `usize` becomes the largest index, which is out of range as well.
fn to_saturated_index(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

impl ConfigSpaceLayout {
    fn new(doorbells: u64, vectors: u16, offer: OfferedInterrupts) -> Self {
        let registers_bar_size = (DOORBELLS + doorbells)
            .next_power_of_two()
            .max(REGISTERS_BAR_MIN);
        let mut layout = Self {
            doorbell_bytes: doorbells,
            vectors,
            offered: offer,
            registers_bar_size,
            reset_contents: [0; COMPATIBLE_SIZE],
            writable_mask: [0; COMPATIBLE_SIZE],
        };
        layout.add_header();
        layout.add_power_management();
        layout.add_msix(vectors);
        layout.add_pci_express();
        if offer.msi {
            layout.add_msi();
        }
        layout
    }

    fn bar_size(&self, bar: Bar) -> u64 {
        match bar {
            Bar::Registers => self.registers_bar_size,
            Bar::Msix => MSIX_BAR_SIZE,
        }
    }

    fn add_header(&mut self) {
        self.set_reset_bytes(0x00, &VENDOR_ID.to_le_bytes());
        self.set_reset_bytes(0x02, &DEVICE_ID.to_le_bytes());
        self.set_writable_bits(COMMAND, &COMMAND_WRITABLE.to_le_bytes());
        self.set_reset_bytes(STATUS, &CAPABILITIES_LIST.to_le_bytes());
        self.set_reset_bytes(REVISION_ID + 1, &CLASS_CODE);
        for bar in Bar::ALL {
            let at = BARS + 4 * bar.index();
            self.set_reset_bytes(at, &BAR_MEMORY_64.to_le_bytes());
            self.set_writable_bits(at, &(!(self.bar_size(bar) - 1)).to_le_bytes());
        }
        self.set_reset_bytes(SUBSYSTEM_VENDOR_ID, &VENDOR_ID.to_le_bytes());
        self.set_reset_bytes(SUBSYSTEM_ID, &DEVICE_ID.to_le_bytes());
        self.set_reset_bytes(CAPABILITIES_POINTER, &[pm::OFFSET]);
        // Firmware and drivers store a value in Interrupt Line. The function does not use it.
        self.set_writable_bits(INTERRUPT_LINE, &[0xFF]);
        if self.offered.pin {
            self.set_reset_bytes(INTERRUPT_PIN, &[INTA]);
        }
    }

    fn add_power_management(&mut self) {
        self.set_reset_bytes(pm::OFFSET, &[pm::ID, msix::OFFSET]);
        self.set_reset_bytes(pm::OFFSET + 2, &pm::PMC.to_le_bytes());
        self.set_reset_bytes(pm::OFFSET + pm::PMCSR, &[pm::NO_SOFT_RESET]);
        self.set_writable_bits(pm::OFFSET + pm::PMCSR, &[pm::POWER_STATE]);
    }

    fn add_msix(&mut self, vectors: u16) {
        let bir = u32::from(Bar::Msix.index());
        self.set_reset_bytes(msix::OFFSET, &[msix::ID, pcie::OFFSET]);
        // The field Table Size is zero-based.
        self.set_reset_bytes(msix::OFFSET + msix::CONTROL, &(vectors - 1).to_le_bytes());
        self.set_writable_bits(
            msix::OFFSET + msix::CONTROL,
            &(msix::ENABLE | msix::FUNCTION_MASK).to_le_bytes(),
        );
        self.set_reset_bytes(
            msix::OFFSET + msix::TABLE,
            &(TABLE_OFFSET as u32 | bir).to_le_bytes(),
        );
        self.set_reset_bytes(
            msix::OFFSET + msix::PBA,
            &(PBA_OFFSET as u32 | bir).to_le_bytes(),
        );
    }

    fn add_msi(&mut self) {
        self.set_reset_bytes(pcie::OFFSET + 1, &[msi::OFFSET]);
        self.set_reset_bytes(msi::OFFSET, &[msi::ID, 0]);
        let capable = messages_log2(self.vectors) << msi::CAPABLE_SHIFT;
        let control = msi::ADDRESS_64 | capable;
        self.set_reset_bytes(msi::OFFSET + msi::CONTROL, &control.to_le_bytes());
        self.set_writable_bits(
            msi::OFFSET + msi::CONTROL,
            &(msi::ENABLE | msi::ENABLE_MASK).to_le_bytes(),
        );
        // A message is a dword, so the two low bits of its address are zero.
        self.set_writable_bits(msi::OFFSET + msi::ADDRESS, &(!0b11_u64).to_le_bytes());
        self.set_writable_bits(msi::OFFSET + msi::DATA, &u16::MAX.to_le_bytes());
    }

    fn add_pci_express(&mut self) {
        let at = pcie::OFFSET;
        self.set_reset_bytes(at, &[pcie::ID, 0]);
        self.set_reset_bytes(at + 2, &pcie::CAPABILITIES.to_le_bytes());
        self.set_reset_bytes(
            at + pcie::DEVICE_CAPABILITIES,
            &pcie::DEVICE_CAPABILITIES_VALUE.to_le_bytes(),
        );
        self.set_reset_bytes(
            at + pcie::DEVICE_CONTROL,
            &pcie::DEVICE_CONTROL_DEFAULT.to_le_bytes(),
        );
        self.set_writable_bits(
            at + pcie::DEVICE_CONTROL,
            &pcie::DEVICE_CONTROL_WRITABLE.to_le_bytes(),
        );
        self.set_reset_bytes(
            at + pcie::LINK_CAPABILITIES,
            &pcie::LINK_CAPABILITIES_VALUE.to_le_bytes(),
        );
        self.set_writable_bits(
            at + pcie::LINK_CONTROL,
            &pcie::LINK_CONTROL_WRITABLE.to_le_bytes(),
        );
        self.set_reset_bytes(at + pcie::LINK_STATUS, &pcie::LINK.to_le_bytes());
        self.set_reset_bytes(
            at + pcie::DEVICE_CAPABILITIES_2,
            &pcie::DEVICE_CAPABILITIES_2_VALUE.to_le_bytes(),
        );
        self.set_writable_bits(
            at + pcie::DEVICE_CONTROL_2,
            &pcie::DEVICE_CONTROL_2_WRITABLE.to_le_bytes(),
        );
        self.set_reset_bytes(
            at + pcie::LINK_CAPABILITIES_2,
            &pcie::LINK_CAPABILITIES_2_VALUE.to_le_bytes(),
        );
        self.set_reset_bytes(
            at + pcie::LINK_CONTROL_2,
            &pcie::LINK_CONTROL_2_VALUE.to_le_bytes(),
        );
    }

    fn set_reset_bytes(&mut self, offset: u8, bytes: &[u8]) {
        self.reset_contents[usize::from(offset)..][..bytes.len()].copy_from_slice(bytes);
    }

    fn set_writable_bits(&mut self, offset: u8, mask: &[u8]) {
        self.writable_mask[usize::from(offset)..][..mask.len()].copy_from_slice(mask);
    }
}

#[cfg(test)]
mod tests;

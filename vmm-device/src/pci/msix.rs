//! MSI-X table and pending bit array in BAR4 (PCI Local Bus 3.0, section 6.8.2).

use std::sync::Arc;

use nvme_guest::{BackendStateError, InterruptVector};

use crate::state::parts::{MsixEntryState, MsixState};

/// Offset of the table in BAR4.
pub(super) const TABLE_OFFSET: u64 = 0;
/// Offset of the pending bits in BAR4, on another page than the table.
pub(super) const PBA_OFFSET: u64 = 0x1000;
/// Size of BAR4 in bytes: a page for the table, and a page for the pending bits.
pub(super) const BAR_SIZE: u64 = 0x2000;

const ENTRY_SIZE: usize = 16;
/// Mask Bit of Vector Control, whose other bits are reserved.
const MASK_BIT: u32 = 1;
/// Maximum number of vectors of a function.
pub const MSIX_VECTORS_MAX: u16 = nvme_guest::interrupt::VECTORS_MAX;
const _: () = assert!(MSIX_VECTORS_MAX as usize * ENTRY_SIZE <= PBA_OFFSET as usize);

/// Side that masks the function's vectors, and holds back interrupts of masked ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MsixMasking {
    /// The function. The guest's accesses to the table and to Message Control reach the function.
    Function,
    /// The vfio-user client. It emulates the table for the guest, and gives the function one eventfd for each vector. So the
    /// function's own table is memory without an effect.
    Client,
}

/// Settings that the guest has made in Message Control: of MSI-X, or of MSI if the guest uses MSI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MsixControl {
    /// True if the guest has set MSI-X Enable.
    pub(crate) enabled: bool,
    /// True if the guest has set Function Mask, which masks all vectors.
    pub(crate) function_masked: bool,
    /// Number of MSI messages that the guest has enabled; `None` if it does not use MSI.
    pub(crate) msi: Option<u16>,
}

impl MsixControl {
    const RESET: Self = Self {
        enabled: false,
        function_masked: false,
        msi: None,
    };
}

/// Message that a vector sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MsixMessage {
    /// Message Address.
    pub address: u64,
    /// Message Data.
    pub data: u32,
    /// True if the message is masked by its Mask Bit.
    pub masked: bool,
}

impl MsixMessage {
    /// Value of a table entry after a reset (PCI Local Bus 3.0, section 6.8.2.9).
    const RESET: Self = Self {
        address: 0,
        data: 0,
        masked: true,
    };

    fn to_bytes(self) -> [u8; ENTRY_SIZE] {
        let mut bytes = [0; ENTRY_SIZE];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.data.to_le_bytes());
        bytes[12..].copy_from_slice(&u32::from(self.masked).to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: [u8; ENTRY_SIZE]) -> Self {
        let [
            a0,
            a1,
            a2,
            a3,
            a4,
            a5,
            a6,
            a7,
            d0,
            d1,
            d2,
            d3,
            v0,
            v1,
            v2,
            v3,
        ] = bytes;
        Self {
            // A message is a dword, so the two low bits of its address read as zero.
            address: u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]) & !0b11,
            data: u32::from_le_bytes([d0, d1, d2, d3]),
            masked: u32::from_le_bytes([v0, v1, v2, v3]) & MASK_BIT != 0,
        }
    }
}

/// MSI-X table and vectors of one function.
#[derive(Debug)]
pub(crate) struct MsixTable {
    masking: MsixMasking,
    table: Vec<MsixMessage>,
    vectors: Vec<Arc<InterruptVector>>,
}

impl MsixTable {
    /// Creates the table for `vectors`. Its entries are masked, as after power-on. Vectors beyond [`MSIX_VECTORS_MAX`] are
    /// dropped.
    pub(crate) fn new(mut vectors: Vec<Arc<InterruptVector>>, masking: MsixMasking) -> Self {
        vectors.truncate(MSIX_VECTORS_MAX.into());
        let msix = Self {
            masking,
            table: vec![MsixMessage::RESET; vectors.len()],
            vectors,
        };
        msix.apply(MsixControl::RESET);
        msix
    }

    /// Returns a vector by its number; `None` if there is no such vector.
    pub(crate) fn vector(&self, number: u16) -> Option<&Arc<InterruptVector>> {
        self.vectors.get(usize::from(number))
    }

    /// Returns the number of vectors.
    pub(crate) fn count(&self) -> u16 {
        // The cast keeps the value: there are at most `MSIX_VECTORS_MAX` vectors.
        self.vectors.len() as u16
    }

    /// Returns all vectors by number.
    pub(crate) fn vectors(&self) -> &[Arc<InterruptVector>] {
        &self.vectors
    }

    /// Returns a vector's table entry.
    pub(crate) fn message(&self, number: u16) -> Option<MsixMessage> {
        self.table.get(usize::from(number)).copied()
    }

    /// Masks or unmasks the vectors, after a change of Message Control or of the table. Does nothing if the client masks the
    /// vectors.
    pub(crate) fn apply(&self, control: MsixControl) {
        if self.masking == MsixMasking::Client {
            return;
        }
        let MsixControl {
            enabled,
            function_masked,
            msi,
        } = control;
        for (number, (entry, vector)) in (0..).zip(self.table.iter().zip(&self.vectors)) {
            let is_off = match msi {
                Some(messages) => number >= messages || function_masked,
                // While neither MSI nor MSI-X is enabled, only the pin can be unmasked. The pin has masks of its own, and does
                // not need Bus Master Enable.
                None if !enabled => !vector.is_pin(),
                None => entry.masked || function_masked,
            };
            vector.set_masked(is_off);
        }
    }

    /// Resets the table, the control settings and the pending bits to their power-on state. The vectors' eventfds belong to the
    /// VMM and stay connected.
    pub(crate) fn reset(&mut self) {
        self.table.fill(MsixMessage::RESET);
        self.clear_pending();
        self.apply(MsixControl::RESET);
    }

    /// Discards the pending interrupts of all vectors.
    pub(crate) fn clear_pending(&self) {
        for vector in &self.vectors {
            vector.clear_pending();
        }
    }

    /// Returns the state of the table and of the pending bits, to be saved.
    pub(crate) fn save(&self) -> MsixState {
        let save = |message: &MsixMessage| {
            let MsixMessage {
                address,
                data,
                masked,
            } = *message;
            MsixEntryState {
                address,
                data,
                masked,
            }
        };
        let vectors = (0..).zip(&self.vectors);
        MsixState {
            table: self.table.iter().map(save).collect(),
            pending: vectors
                .filter(|(_, vector)| vector.is_pending())
                .map(|(number, _)| number)
                .collect(),
        }
    }

    /// Checks that a saved state fits this table.
    pub(crate) fn check(&self, state: &MsixState) -> Result<(), BackendStateError> {
        let MsixState { table, pending } = state;
        if table.len() != self.table.len() {
            return Err(BackendStateError::Mismatch {
                promise: "MSI-X vectors".to_owned(),
                saved: table.len().to_string(),
                here: self.table.len().to_string(),
            });
        }
        for vector in pending {
            if usize::from(*vector) >= table.len() {
                let valid = format!("less than {}", table.len());
                return Err(BackendStateError::invalid("pending vector", vector, valid));
            }
        }
        for entry in table {
            if entry.address & 0b11 != 0 {
                let address = format!("{:#x}", entry.address);
                let valid = "a multiple of 4";
                return Err(BackendStateError::invalid(
                    "MSI-X message address",
                    address,
                    valid,
                ));
            }
        }
        Ok(())
    }

    /// Restores the table from a checked state. The caller then calls [`Self::apply`], and raises the pending vectors when the
    /// function resumes.
    pub(crate) fn restore(&mut self, state: &MsixState) {
        for (entry, saved) in self.table.iter_mut().zip(&state.table) {
            let MsixEntryState {
                address,
                data,
                masked,
            } = *saved;
            *entry = MsixMessage {
                address,
                data,
                masked,
            };
        }
    }

    /// Reads any number of bytes at any offset in BAR4. Bytes outside the table and the pending bits read as zero.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        for (byte, at) in data.iter_mut().zip(ConsecutiveOffsets(offset)) {
            *byte = self.byte(at).unwrap_or(0);
        }
    }

    /// Writes any number of bytes at any offset in BAR4. Pending bits are read-only. The caller then calls [`Self::apply`].
    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) {
        for (byte, at) in data.iter().zip(ConsecutiveOffsets(offset)) {
            let Some((number, within)) = Self::entry_at(at) else {
                continue;
            };
            let Some(entry) = self.table.get_mut(number) else {
                continue;
            };
            let mut bytes = entry.to_bytes();
            bytes[within] = *byte;
            *entry = MsixMessage::from_bytes(bytes);
        }
    }

    fn byte(&self, at: u64) -> Option<u8> {
        if let Some((number, within)) = Self::entry_at(at) {
            return Some(self.table.get(number)?.to_bytes()[within]);
        }
        let first = usize::try_from(at.checked_sub(PBA_OFFSET)?.checked_mul(8)?).ok()?;
        let vectors = self.vectors.get(first..)?;
        Some(
            vectors
                .iter()
                .take(8)
                .enumerate()
                .fold(0, |bits, (bit, vector)| {
                    bits | u8::from(vector.is_pending()) << bit
                }),
        )
    }

    /// Returns the index of the table entry at an offset in the table, and the offset in that entry.
    fn entry_at(at: u64) -> Option<(usize, usize)> {
        let at = usize::try_from(at).ok().filter(|_| at < PBA_OFFSET)?;
        Some((at / ENTRY_SIZE, at % ENTRY_SIZE))
    }
}

/// Iterator over consecutive offsets. It ends at the largest offset, and does not wrap to zero.
struct ConsecutiveOffsets(u64);

impl Iterator for ConsecutiveOffsets {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        let at = self.0;
        self.0 = at.checked_add(1)?;
        Some(at)
    }
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

    use super::*;

    const ENABLED: MsixControl = MsixControl {
        enabled: true,
        function_masked: false,
        msi: None,
    };
    const FUNCTION_MASKED: MsixControl = MsixControl {
        enabled: true,
        function_masked: true,
        msi: None,
    };
    const DISABLED: MsixControl = MsixControl {
        enabled: false,
        function_masked: false,
        msi: None,
    };

    fn msix(vectors: usize, masking: MsixMasking) -> MsixTable {
        let vectors = (0..vectors).map(|_| InterruptVector::new());
        MsixTable::new(vectors.collect(), masking)
    }

    fn with_eventfd(msix: &MsixTable, vector: u16) -> EventFd {
        let eventfd = EventFd::new(EFD_NONBLOCK).unwrap();
        msix.vector(vector)
            .unwrap()
            .set_eventfd(Some(eventfd.try_clone().unwrap()));
        eventfd
    }

    fn write(msix: &mut MsixTable, offset: u64, data: &[u8], control: MsixControl) {
        msix.write(offset, data);
        msix.apply(control);
    }

    fn unmask(msix: &mut MsixTable, vector: u64) {
        write(msix, vector * 16 + 12, &[0; 4], ENABLED);
    }

    fn read_u32(msix: &MsixTable, offset: u64) -> u32 {
        let mut data = [0xA5; 4];
        msix.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn entries_read_back_what_was_written() {
        let mut msix = msix(3, MsixMasking::Function);
        assert_eq!(read_u32(&msix, 12), 1, "masked after reset");
        write(
            &mut msix,
            16,
            &[0x07, 0x00, 0xE0, 0xFE, 0x01, 0, 0, 0, 0x41, 0, 0, 0],
            ENABLED,
        );
        write(&mut msix, 28, &[0xFE, 0xFF, 0xFF, 0xFF], ENABLED);
        assert_eq!(read_u32(&msix, 16), 0xFEE0_0004, "low bits are zero");
        assert_eq!(read_u32(&msix, 20), 1);
        assert_eq!(read_u32(&msix, 24), 0x41);
        assert_eq!(read_u32(&msix, 28), 0, "only the mask bit");
        assert_eq!(
            msix.message(1),
            Some(MsixMessage {
                address: 0x1_FEE0_0004,
                data: 0x41,
                masked: false
            })
        );
        msix.reset();
        assert_eq!(msix.message(1), Some(MsixMessage::RESET));
        assert_eq!(msix.message(3), None);
    }

    #[test]
    fn a_masked_vector_is_pending_until_it_is_unmasked() {
        let mut msix = msix(10, MsixMasking::Function);
        let eventfd = with_eventfd(&msix, 9);
        msix.apply(ENABLED);
        msix.vector(9).unwrap().signal();
        assert!(eventfd.read().is_err());
        assert_eq!(read_u32(&msix, 0x1000), 1 << 9);
        unmask(&mut msix, 9);
        assert_eq!(eventfd.read().unwrap(), 1);
        assert_eq!(read_u32(&msix, 0x1000), 0);
        msix.vector(9).unwrap().signal();
        assert_eq!(eventfd.read().unwrap(), 1);
    }

    #[test]
    fn the_function_mask_holds_all_vectors() {
        let mut msix = msix(2, MsixMasking::Function);
        let eventfd = with_eventfd(&msix, 1);
        unmask(&mut msix, 1);
        for control in [FUNCTION_MASKED, DISABLED] {
            msix.apply(control);
            msix.vector(1).unwrap().signal();
            assert!(eventfd.read().is_err());
            assert!(msix.vector(1).unwrap().is_pending());
            msix.apply(ENABLED);
            assert_eq!(eventfd.read().unwrap(), 1);
        }
    }

    #[test]
    fn vectors_follow_msi_instead_of_the_table() {
        let msix = msix(4, MsixMasking::Function);
        let eventfds = [1, 2].map(|vector| with_eventfd(&msix, vector));
        let control = MsixControl {
            msi: Some(2),
            ..DISABLED
        };
        msix.apply(control);
        for vector in [1, 2] {
            msix.vector(vector).unwrap().signal();
        }
        assert_eq!(eventfds[0].read().unwrap(), 1, "whatever its entry says");
        assert!(eventfds[1].read().is_err(), "the guest has two messages");
        msix.apply(MsixControl {
            function_masked: true,
            ..control
        });
        msix.vector(1).unwrap().signal();
        assert!(eventfds[0].read().is_err(), "no bus master");
    }

    #[test]
    fn with_client_masking_only_the_clients_mask_applies() {
        let mut msix = msix(2, MsixMasking::Client);
        let eventfd = with_eventfd(&msix, 1);
        msix.vector(1).unwrap().signal();
        assert_eq!(eventfd.read().unwrap(), 1);
        write(&mut msix, 28, &[1, 0, 0, 0], FUNCTION_MASKED);
        msix.reset();
        msix.vector(1).unwrap().signal();
        assert_eq!(eventfd.read().unwrap(), 1);
        msix.vector(1).unwrap().set_masked(true);
        write(&mut msix, 28, &[0; 4], ENABLED);
        msix.vector(1).unwrap().signal();
        assert!(
            eventfd.read().is_err(),
            "what the client masks stays masked"
        );
    }

    #[test]
    fn accesses_of_any_place_and_length_are_safe() {
        let mut msix = msix(3, MsixMasking::Function);
        for offset in [
            0,
            1,
            15,
            47,
            48,
            0xFFF,
            0x1000,
            0x1001,
            0x1FFF,
            0x2000,
            u64::MAX - 2,
        ] {
            for length in [0, 1, 2, 3, 4, 8, 9, 64, 9000] {
                write(&mut msix, offset, &vec![0; length], ENABLED);
                let mut data = vec![0xA5; length];
                msix.read(offset, &mut data);
                assert!(data.iter().all(|byte| matches!(byte, 0 | 1)), "{data:x?}");
            }
        }
        assert_eq!(read_u32(&msix, 48), 0, "beyond the table");
        assert_eq!(read_u32(&msix, 0x1004), 0, "beyond the pending bits");
    }
}

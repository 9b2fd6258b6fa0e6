//! Controller properties (NVMe Base 2.0, section 3.1.3).

/// Controller Capabilities, 8 bytes.
pub const CAP: u64 = 0x00;
/// Version.
pub const VS: u64 = 0x08;
/// Interrupt Mask Set.
pub const INTMS: u64 = 0x0c;
/// Interrupt Mask Clear.
pub const INTMC: u64 = 0x10;
/// Controller Configuration.
pub const CC: u64 = 0x14;
/// Controller Status.
pub const CSTS: u64 = 0x1c;
/// NVM Subsystem Reset.
pub const NSSR: u64 = 0x20;
/// Admin Queue Attributes.
pub const AQA: u64 = 0x24;
/// Admin Submission Queue Base Address, 8 bytes.
pub const ASQ: u64 = 0x28;
/// Admin Completion Queue Base Address, 8 bytes.
pub const ACQ: u64 = 0x30;
/// Controller Memory Buffer Location.
pub const CMBLOC: u64 = 0x38;
/// Controller Memory Buffer Size.
pub const CMBSZ: u64 = 0x3c;
/// Offset of the first doorbell (PCIe Transport 1.0, section 3.1.2).
pub const DOORBELLS: u64 = 0x1000;

/// CC.EN.
pub const CC_ENABLE: u32 = 1 << 0;
/// CC.CSS: the NVM Command Set.
pub const CC_CSS_NVM: u32 = 0 << 4;
/// CC.CSS: all supported I/O Command Sets.
pub const CC_CSS_ALL: u32 = 0b110 << 4;
/// Mask of CC.SHN.
pub const CC_SHN_MASK: u32 = 0b11 << 14;
/// CC.SHN: normal shutdown.
pub const CC_SHN_NORMAL: u32 = 0b01 << 14;
/// CC.SHN: abrupt shutdown.
pub const CC_SHN_ABRUPT: u32 = 0b10 << 14;
/// CC.IOSQES: entries of 64 bytes.
pub const CC_IOSQES_64: u32 = 6 << 16;
/// CC.IOCQES: entries of 16 bytes.
pub const CC_IOCQES_16: u32 = 4 << 20;

/// CSTS.RDY.
pub const CSTS_READY: u32 = 1 << 0;
/// CSTS.PP.
pub const CSTS_PAUSED: u32 = 1 << 5;
/// CSTS.CFS.
pub const CSTS_FATAL: u32 = 1 << 1;
/// Mask of CSTS.SHST.
pub const CSTS_SHST_MASK: u32 = 0b11 << 2;
/// CSTS.SHST: shutdown processing complete.
pub const CSTS_SHST_COMPLETE: u32 = 0b10 << 2;

/// The CAP register (section 3.1.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cap(pub u64);

impl Cap {
    fn field(self, shift: u32, bits: u32) -> u64 {
        self.0 >> shift & ((1 << bits) - 1)
    }

    /// Returns MQES as a number of entries, which is one more than the field.
    pub fn max_queue_entries(self) -> u32 {
        self.field(0, 16) as u32 + 1
    }

    /// Returns CQR: I/O queues must be physically contiguous.
    pub fn contiguous_queues(self) -> bool {
        self.field(16, 1) == 1
    }

    /// Returns TO, the maximum time for CSTS.RDY to follow CC.EN, in milliseconds.
    pub fn timeout_ms(self) -> u64 {
        self.field(24, 8) * 500
    }

    /// Returns DSTRD as the doorbell stride in bytes.
    pub fn doorbell_stride(self) -> u64 {
        4 << self.field(32, 4)
    }

    /// Returns NSSRS: NVM Subsystem Reset is supported.
    pub fn subsystem_reset(self) -> bool {
        self.field(36, 1) == 1
    }

    /// Returns CSS, the bits of the supported command sets.
    pub fn command_sets(self) -> u8 {
        self.field(37, 8) as u8
    }

    /// Returns MPSMIN in bytes.
    pub fn min_page_size(self) -> u64 {
        1 << (12 + self.field(48, 4))
    }

    /// Returns MPSMAX in bytes.
    pub fn max_page_size(self) -> u64 {
        1 << (12 + self.field(52, 4))
    }

    /// Returns the offset of a submission queue's tail doorbell in BAR0.
    pub fn sq_doorbell(self, queue: u16) -> u64 {
        DOORBELLS + 2 * u64::from(queue) * self.doorbell_stride()
    }

    /// Returns the offset of a completion queue's head doorbell in BAR0.
    pub fn cq_doorbell(self, queue: u16) -> u64 {
        DOORBELLS + (2 * u64::from(queue) + 1) * self.doorbell_stride()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_where_the_specification_has_them() {
        // MQES 1023, CQR, TO 7.5 s, DSTRD 4 (64 bytes), CSS NVM, MPSMIN 0, MPSMAX 4.
        let cap = Cap(1023 | 1 << 16 | 15 << 24 | 4 << 32 | 1 << 37 | 4 << 52);
        assert_eq!(cap.max_queue_entries(), 1024);
        assert!(cap.contiguous_queues());
        assert_eq!(cap.timeout_ms(), 7500);
        assert_eq!(cap.doorbell_stride(), 64);
        assert!(!cap.subsystem_reset());
        assert_eq!(cap.command_sets(), 1);
        assert_eq!((cap.min_page_size(), cap.max_page_size()), (4096, 65536));
        assert_eq!(cap.sq_doorbell(3), 0x1000 + 6 * 64);
        assert_eq!(cap.cq_doorbell(3), 0x1000 + 7 * 64);
    }
}

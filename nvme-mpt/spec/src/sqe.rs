//! Submission queue entries (Base 2.0, section 3.3.3.1).

use core::mem::{offset_of, size_of};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, transmute};

use super::{
    dma::SglDescriptor,
    ids::{CommandId, Nsid},
};

/// `CC.IOSQES`: the size of an [`Sqe`] as a power of two.
pub const IOSQES: u8 = 6;

bit_field! {
    /// Command Dword 0 (Base 2.0, section 3.3.3.1, "Command Dword 0").
    pub struct Cdw0(u32) {
        /// Opcode.
        opcode / with_opcode: u8 [7:0];
        /// Fused Operation.
        fuse / with_fuse: FusedOperation(u8) [9:8];
        /// PRP or SGL for Data Transfer.
        psdt / with_psdt: Psdt(u8) [15:14];
        /// Command Identifier.
        cid / with_cid: CommandId(u16) [31:16];
    }
}

open_enum! {
    /// Fused Operation, `CDW0.FUSE` (Base 2.0, section 3.3.3.1).
    pub struct FusedOperation(u8) {
        NORMAL = 0b00, "Normal operation";
        FIRST = 0b01, "Fused operation, first command";
        SECOND = 0b10, "Fused operation, second command";
    }
}

open_enum! {
    /// PRP or SGL for Data Transfer, `CDW0.PSDT` (Base 2.0, section 3.3.3.1).
    pub struct Psdt(u8) {
        PRP = 0b00, "PRPs";
        SGL_MPTR_BUFFER = 0b01, "SGLs, MPTR is the address of a contiguous buffer";
        SGL_MPTR_SGL = 0b10, "SGLs, MPTR is the address of an SGL segment";
    }
}

/// Submission Queue Entry, Common Command Format (Base 2.0, section 3.3.3.1).
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct Sqe {
    /// Command Dword 0: opcode, fused operation, PRP or SGL, command identifier.
    pub cdw0: Cdw0,
    /// Namespace Identifier.
    pub nsid: Nsid,
    /// Command Dword 2, command specific.
    pub cdw2: u32,
    /// Command Dword 3, command specific.
    pub cdw3: u32,
    /// Metadata Pointer.
    pub mptr: u64,
    /// Data Pointer: two PRP entries, or one SGL descriptor.
    pub dptr: [u64; 2],
    /// Command Dword 10; dwords 10 to 15 are command specific.
    pub cdw10: u32,
    /// Command Dword 11.
    pub cdw11: u32,
    /// Command Dword 12.
    pub cdw12: u32,
    /// Command Dword 13.
    pub cdw13: u32,
    /// Command Dword 14.
    pub cdw14: u32,
    /// Command Dword 15.
    pub cdw15: u32,
}

const _: () = assert!(size_of::<Sqe>() == 1 << IOSQES);
const _: () = assert!(offset_of!(Sqe, mptr) == 16);
const _: () = assert!(offset_of!(Sqe, dptr) == 24);
const _: () = assert!(offset_of!(Sqe, cdw10) == 40);

impl Sqe {
    /// Creates an entry with this opcode. All other fields are zero.
    #[inline]
    #[must_use]
    pub fn new(opcode: u8) -> Self {
        Self {
            cdw0: Cdw0::default().with_opcode(opcode),
            ..Self::default()
        }
    }

    /// Returns the opcode, whose meaning depends on the queue's command set.
    #[inline]
    #[must_use]
    pub const fn opcode(&self) -> u8 {
        self.cdw0.opcode()
    }

    /// Returns the Command Identifier.
    #[inline]
    #[must_use]
    pub const fn cid(&self) -> CommandId {
        self.cdw0.cid()
    }

    /// Replaces the Command Identifier.
    #[inline]
    pub const fn set_cid(&mut self, cid: CommandId) {
        self.cdw0 = self.cdw0.with_cid(cid);
    }

    /// Returns PRP Entry 1 of the Data Pointer.
    #[inline]
    #[must_use]
    pub const fn prp1(&self) -> u64 {
        self.dptr[0]
    }

    /// Returns PRP Entry 2 of the Data Pointer: a second page or a PRP list.
    #[inline]
    #[must_use]
    pub const fn prp2(&self) -> u64 {
        self.dptr[1]
    }

    /// Returns SGL Entry 1 of the Data Pointer.
    #[inline]
    #[must_use]
    pub const fn sgl1(&self) -> SglDescriptor {
        transmute!(self.dptr)
    }

    /// Sets the Data Pointer to an SGL descriptor. The caller also sets [`Cdw0::psdt`].
    #[inline]
    pub const fn set_sgl1(&mut self, descriptor: SglDescriptor) {
        self.dptr = transmute!(descriptor);
    }

    /// Returns Command Dwords 10 and 11 as one number, which is the Starting LBA in many commands.
    #[inline]
    #[must_use]
    pub const fn cdw10_11(&self) -> u64 {
        self.cdw10 as u64 | (self.cdw11 as u64) << 32
    }

    /// Replaces Command Dwords 10 and 11 by one number.
    #[inline]
    pub const fn set_cdw10_11(&mut self, value: u64) {
        self.cdw10 = value as u32;
        self.cdw11 = (value >> 32) as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::opcode::NvmOpcode;

    /// A Read, written by hand as the specification lays it out.
    const READ: [u8; 64] = [
        0x02, 0x00, 0x34, 0x12, // opcode, FUSE and PSDT, CID
        0x01, 0x00, 0x00, 0x00, // NSID
        0, 0, 0, 0, 0, 0, 0, 0, // CDW2, CDW3
        0, 0, 0, 0, 0, 0, 0, 0, // MPTR
        0x00, 0x10, 0x00, 0x00, 0x01, 0x00, 0x00, 0x00, // PRP1
        0x00, 0x20, 0x00, 0x00, 0x01, 0x00, 0x00, 0x00, // PRP2
        0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, // SLBA
        0x0F, 0x00, 0x00, 0x40, // NLB, FUA
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ];

    #[test]
    fn an_entry_reads_and_writes_its_bytes() {
        let sqe = Sqe::read_from_bytes(&READ).unwrap();
        assert_eq!(NvmOpcode(sqe.opcode()), NvmOpcode::READ);
        assert_eq!(sqe.cid(), CommandId(0x1234));
        assert_eq!(sqe.nsid, Nsid(1));
        assert_eq!((sqe.prp1(), sqe.prp2()), (0x1_0000_1000, 0x1_0000_2000));
        assert_eq!(sqe.cdw10_11(), 0x1122_3344_5566_7788);
        assert_eq!(sqe.cdw12, 0x4000_000F);

        let mut built = Sqe::new(NvmOpcode::READ.0);
        built.set_cid(CommandId(0x1234));
        built.nsid = Nsid(1);
        built.dptr = [0x1_0000_1000, 0x1_0000_2000];
        built.set_cdw10_11(0x1122_3344_5566_7788);
        built.cdw12 = 0x4000_000F;
        assert_eq!(built.as_bytes(), READ);
    }

    #[test]
    fn cdw0_keeps_fuse_and_psdt_apart() {
        let cdw0 = Cdw0::default()
            .with_fuse(FusedOperation::SECOND)
            .with_psdt(Psdt::SGL_MPTR_BUFFER);
        assert_eq!(cdw0.0, 0x4200);
        assert_eq!(Cdw0(0xC000).psdt().name(), None);
    }

    #[test]
    fn an_sgl_descriptor_is_the_data_pointer() {
        let mut sqe = Sqe::default();
        sqe.set_sgl1(SglDescriptor::data_block(0x1000, 512));
        assert_eq!(sqe.dptr, [0x1000, 512]);
        assert_eq!(sqe.sgl1(), SglDescriptor::data_block(0x1000, 512));
    }
}

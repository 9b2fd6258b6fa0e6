//! Completion queue entries (NVMe Base 2.0, section 3.3.3.2).

use std::fmt;

use crate::status::Status;

/// A completion queue entry: Dwords 0 and 1, then Dwords 2 and 3.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Cqe {
    /// Dwords 0 and 1: command specific result.
    pub result: u64,
    /// Dwords 2 and 3: SQHD, SQID, CID, phase tag and status.
    pub tail: u64,
}

impl Cqe {
    /// Bit position of the phase tag in [`Cqe::tail`].
    pub(crate) const PHASE_SHIFT: u32 = 48;

    /// Returns Dword 0.
    #[inline]
    pub fn dw0(self) -> u32 {
        self.result as u32
    }

    /// Returns the submission queue head pointer.
    #[inline]
    pub fn sq_head(self) -> u16 {
        self.tail as u16
    }

    /// Returns the submission queue identifier.
    #[inline]
    pub fn sq_id(self) -> u16 {
        (self.tail >> 16) as u16
    }

    /// Returns the command identifier.
    #[inline]
    pub fn cid(self) -> u16 {
        (self.tail >> 32) as u16
    }

    /// Returns the Status Field without the phase tag.
    #[inline]
    pub fn status(self) -> Status {
        Status((self.tail >> (Self::PHASE_SHIFT + 1)) as u16)
    }
}

impl fmt::Debug for Cqe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cqe")
            .field("cid", &self.cid())
            .field("status", &self.status())
            .field("sq_id", &self.sq_id())
            .field("sq_head", &self.sq_head())
            .field("result", &format_args!("{:#x}", self.result))
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status;

    #[test]
    fn fields_are_where_the_specification_has_them() {
        let cqe = Cqe {
            result: 0xffff_ffff_0000_0005,
            tail: 0x0012 | 3 << 16 | 0xbeef << 32 | 1 << 48 | 0x80 << 49 | 1 << 63,
        };
        assert_eq!((cqe.dw0(), cqe.sq_head(), cqe.sq_id()), (5, 0x12, 3));
        assert_eq!(cqe.cid(), 0xbeef);
        assert_eq!(cqe.status().code(), status::LBA_OUT_OF_RANGE);
        assert!(cqe.status().do_not_retry());
    }
}

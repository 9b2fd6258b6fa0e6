//! Completion queue entries (Base 2.0, section 3.3.3.2).

use core::{fmt, mem::size_of};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{
    ids::{CommandId, QueueId},
    status::Status,
};

/// `CC.IOCQES`: the size of a [`Cqe`] as a power of two.
pub const IOCQES: u8 = 4;

/// Completion Queue Entry (Base 2.0, section 3.3.3.2), as the two halves in which it is published. The second half has the
/// Phase Tag. So once a reader sees a new Phase Tag, the first half is valid as well.
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Cqe {
    /// Dwords 0 and 1, command specific.
    pub low: u64,
    /// Dwords 2 and 3: the command's identification, status, and phase tag.
    pub high: CqeHigh,
}

const _: () = assert!(size_of::<Cqe>() == 1 << IOCQES);

bit_field! {
    /// Dwords 2 and 3 of a [`Cqe`] (Base 2.0, section 3.3.3.2).
    pub struct CqeHigh(u64) {
        /// SQ Head Pointer.
        sqhd / with_sqhd: u16 [15:0];
        /// SQ Identifier.
        sqid / with_sqid: QueueId(u16) [31:16];
        /// Command Identifier.
        cid / with_cid: CommandId(u16) [47:32];
        /// Phase Tag.
        phase / with_phase: bool [48];
        /// Status Field.
        status / with_status: Status(u16) [63:49];
    }
}

/// A Phase Tag at its bit position in a [`CqeHigh`], so that it is set and compared without a shift.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhaseTag(u64);

impl PhaseTag {
    const BIT: u64 = CqeHigh(0).with_phase(true).0;

    /// Creates a Phase Tag.
    #[must_use]
    pub const fn new(phase: bool) -> Self {
        Self(CqeHigh(0).with_phase(phase).0)
    }

    /// Returns the Phase Tag as a boolean.
    #[inline]
    #[must_use]
    pub const fn phase(self) -> bool {
        self.0 != 0
    }

    /// Returns the Phase Tag of the next or previous pass through the queue.
    #[inline]
    #[must_use]
    pub const fn inverted(self) -> Self {
        Self(self.0 ^ Self::BIT)
    }
}

impl CqeHigh {
    /// Returns whether the entry has this Phase Tag.
    #[inline]
    #[must_use]
    pub const fn has_tag(self, tag: PhaseTag) -> bool {
        self.0 & PhaseTag::BIT == tag.0
    }

    /// Sets the Phase Tag, which must be clear.
    #[inline]
    #[must_use]
    pub const fn add_tag(self, tag: PhaseTag) -> Self {
        debug_assert!(!self.phase());
        Self(self.0 | tag.0)
    }
}

/// Source of completions: a Submission Queue and its head pointer, at their bit positions in a [`CqeHigh`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubmissionQueuePosition(u64);

impl SubmissionQueuePosition {
    /// Creates the source for a Submission Queue with this head.
    #[inline]
    #[must_use]
    pub const fn new(sqid: QueueId, sqhd: u16) -> Self {
        Self(CqeHigh(0).with_sqhd(sqhd).with_sqid(sqid).0)
    }
}

impl Cqe {
    /// Creates an entry whose Phase Tag is clear.
    #[inline]
    #[must_use]
    pub const fn new(
        sqid: QueueId,
        sqhd: u16,
        cid: CommandId,
        status: Status,
        dw0: u32,
        dw1: u32,
    ) -> Self {
        Self::from_position(
            SubmissionQueuePosition::new(sqid, sqhd),
            cid,
            status,
            dw0,
            dw1,
        )
    }

    /// Creates an entry as [`Self::new`] does, from a `position` that several completions can share.
    #[inline]
    #[must_use]
    pub const fn from_position(
        position: SubmissionQueuePosition,
        cid: CommandId,
        status: Status,
        dw0: u32,
        dw1: u32,
    ) -> Self {
        Self {
            low: dw0 as u64 | (dw1 as u64) << 32,
            high: CqeHigh(CqeHigh(0).with_cid(cid).with_status(status).0 | position.0),
        }
    }

    /// Returns the entry with the given Phase Tag.
    #[inline]
    #[must_use]
    pub const fn with_phase(self, phase: bool) -> Self {
        Self {
            low: self.low,
            high: self.high.with_phase(phase),
        }
    }

    /// Sets the Phase Tag, which must be clear.
    #[inline]
    #[must_use]
    pub const fn add_tag(self, tag: PhaseTag) -> Self {
        Self {
            low: self.low,
            high: self.high.add_tag(tag),
        }
    }

    /// Returns dword 0, which is command specific.
    #[inline]
    #[must_use]
    pub const fn dw0(&self) -> u32 {
        self.low as u32
    }

    /// Returns dword 1, which is command specific.
    #[inline]
    #[must_use]
    pub const fn dw1(&self) -> u32 {
        (self.low >> 32) as u32
    }

    /// Returns the SQ Head Pointer: the index up to which the controller has consumed the Submission Queue.
    #[inline]
    #[must_use]
    pub const fn sqhd(&self) -> u16 {
        self.high.sqhd()
    }

    /// Returns the SQ Identifier.
    #[inline]
    #[must_use]
    pub const fn sqid(&self) -> QueueId {
        self.high.sqid()
    }

    /// Returns the Command Identifier.
    #[inline]
    #[must_use]
    pub const fn cid(&self) -> CommandId {
        self.high.cid()
    }

    /// Returns the Phase Tag.
    #[inline]
    #[must_use]
    pub const fn phase(&self) -> bool {
        self.high.phase()
    }

    /// Returns the Status Field.
    #[inline]
    #[must_use]
    pub const fn status(&self) -> Status {
        self.high.status()
    }
}

impl fmt::Debug for Cqe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cqe")
            .field("dw0", &self.dw0())
            .field("dw1", &self.dw1())
            .field("sqhd", &self.sqhd())
            .field("sqid", &self.sqid())
            .field("cid", &self.cid())
            .field("phase", &self.phase())
            .field("status", &self.status())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_laid_out_as_specified() {
        let status = Status::LBA_OUT_OF_RANGE.with_dnr(true);
        let cqe = Cqe::new(
            QueueId(2),
            7,
            CommandId(0x1234),
            status,
            0xAABB_CCDD,
            0x1122_3344,
        );
        assert_eq!(
            cqe.with_phase(true).as_bytes(),
            [
                0xDD, 0xCC, 0xBB, 0xAA, 0x44, 0x33, 0x22, 0x11, // dwords 0 and 1
                0x07, 0x00, 0x02, 0x00, // SQHD, SQID
                0x34, 0x12, 0x01, 0x81, // CID, then P | SC 80h << 1 | DNR << 15
            ]
        );
        assert_eq!(cqe.dw0(), 0xAABB_CCDD);
        assert_eq!(cqe.dw1(), 0x1122_3344);
        assert_eq!(
            (cqe.sqid(), cqe.sqhd(), cqe.cid()),
            (QueueId(2), 7, CommandId(0x1234))
        );
        assert_eq!((cqe.phase(), cqe.status()), (false, status));
    }

    #[test]
    fn the_phase_tag_does_not_touch_its_neighbours() {
        let cqe = Cqe {
            low: u64::MAX,
            high: CqeHigh(u64::MAX),
        };
        assert_eq!(cqe.with_phase(false).high.0, !(1 << 48));
        assert_eq!(cqe.with_phase(false).cid(), CommandId(0xFFFF));
        assert_eq!(cqe.with_phase(false).status().0, 0x7FFF);
    }

    #[test]
    fn a_tag_in_its_place_is_the_phase() {
        let clear = Cqe::from_position(
            SubmissionQueuePosition::new(QueueId(2), 7),
            CommandId(0xFFFF),
            Status(0x7FFF),
            1,
            2,
        );
        let expected = Cqe::new(QueueId(2), 7, CommandId(0xFFFF), Status(0x7FFF), 1, 2);
        assert_eq!(clear, expected);
        for phase in [false, true] {
            let tag = PhaseTag::new(phase);
            let entry = clear.add_tag(tag);
            assert_eq!((tag.phase(), entry.phase()), (phase, phase));
            assert_eq!(entry, clear.with_phase(phase));
            assert_eq!(clear.add_tag(tag.inverted()), clear.with_phase(!phase));
            assert!(entry.high.has_tag(tag));
            assert!(!entry.high.has_tag(tag.inverted()));
        }
    }
}

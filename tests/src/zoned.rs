//! Zones of a namespace: commands and answers of the Zoned Namespace Command Set 1.1.

use crate::command::Sqe;
use crate::disk::Disk;
use crate::error::Result;
use crate::identify::field;

/// Zone Send Actions (section 3.4.3).
pub mod action {
    #![expect(missing_docs, reason = "the names are the specification's")]
    pub const CLOSE: u8 = 0x01;
    pub const FINISH: u8 = 0x02;
    pub const OPEN: u8 = 0x03;
    pub const RESET: u8 = 0x04;
    pub const OFFLINE: u8 = 0x05;
}

/// Zone States (section 3.4.2).
pub mod state {
    #![expect(missing_docs, reason = "the names are the specification's")]
    pub const EMPTY: u8 = 0x1;
    pub const IMPLICITLY_OPENED: u8 = 0x2;
    pub const EXPLICITLY_OPENED: u8 = 0x3;
    pub const CLOSED: u8 = 0x4;
    pub const READ_ONLY: u8 = 0xd;
    pub const FULL: u8 = 0xe;
    pub const OFFLINE: u8 = 0xf;
}

/// Size in bytes of a report's header, which is also the size of a zone descriptor.
pub const DESCRIPTOR: usize = 64;

/// A zone descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zone {
    /// Zone Type.
    pub kind: u8,
    /// Zone State.
    pub state: u8,
    /// Zone Capacity, in blocks.
    pub capacity: u64,
    /// Zone Start LBA.
    pub start: u64,
    /// Write Pointer.
    pub write_pointer: u64,
}

impl Zone {
    /// Parses a descriptor of 64 bytes.
    ///
    /// # Panics
    /// The data is too short.
    pub fn parse(bytes: &[u8]) -> Self {
        Self {
            kind: bytes[0] & 0xf,
            state: bytes[1] >> 4,
            capacity: field::u64(bytes, 8),
            start: field::u64(bytes, 16),
            write_pointer: field::u64(bytes, 24),
        }
    }
}

/// Parses a report: the Number of Zones, and the descriptors in the report.
pub fn parse_report(bytes: &[u8]) -> (u64, Vec<Zone>) {
    let count = field::u64(bytes, 0);
    let descriptors = bytes[DESCRIPTOR..].chunks_exact(DESCRIPTOR);
    let listed = usize::try_from(count).unwrap_or(usize::MAX);
    (count, descriptors.take(listed).map(Zone::parse).collect())
}

impl Disk {
    /// Reports at most `max_zones` zones from `slba` on. `option` selects zones by their state.
    ///
    /// # Errors
    /// As [`Disk::command`].
    pub fn report_zones(
        &mut self,
        slba: u64,
        max_zones: usize,
        option: u8,
        partial: bool,
    ) -> Result<(u64, Vec<Zone>)> {
        let len = DESCRIPTOR * (1 + max_zones);
        let sqe = Sqe::zone_receive(self.nsid(), slba, len, option, partial);
        self.command_in(sqe, len)
            .map(|report| parse_report(&report))
    }

    /// Returns the zone that starts at `zslba`.
    ///
    /// # Errors
    /// As [`Disk::command`].
    ///
    /// # Panics
    /// The report contains no zone.
    pub fn zone(&mut self, zslba: u64) -> Result<Zone> {
        Ok(self.report_zones(zslba, 1, 0, true)?.1[0])
    }

    /// Executes an action on the zone that starts at `zslba`.
    ///
    /// # Errors
    /// As [`Disk::command`].
    pub fn zone_action(&mut self, zslba: u64, action: u8) -> Result<()> {
        self.command(Sqe::zone_send(self.nsid(), zslba, action, false))
            .map(drop)
    }

    /// Executes an action on all zones to which the action applies.
    ///
    /// # Errors
    /// As [`Disk::command`].
    pub fn all_zones_action(&mut self, action: u8) -> Result<()> {
        self.command(Sqe::zone_send(self.nsid(), 0, action, true))
            .map(drop)
    }

    /// Appends whole blocks to the zone that starts at `zslba`. Returns the LBA of the data.
    ///
    /// # Errors
    /// As [`Disk::command`].
    pub fn append(&mut self, zslba: u64, bytes: &[u8]) -> Result<u64> {
        let blocks = bytes.len() / self.block_size();
        let sqe = Sqe::zone_append(self.nsid(), zslba, blocks as u32);
        Ok(self.command_out(sqe, bytes)?.result)
    }
}

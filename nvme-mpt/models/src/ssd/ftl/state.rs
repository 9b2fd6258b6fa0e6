//! Saved state of a translation layer, which is stored while the drive is closed: the mapping of pages and the erase counts. It
//! affects only the drive's timing, and not its data.
//!
//! The format is a sequence of 32-bit little-endian numbers. The file is untrusted, so all values on which the translation
//! layer relies are checked.

use std::io::{self, Read, Write};

use super::super::geometry::{FlashGeometry, FlashPage};
use super::{FlashLine, FlashLineState, FlashWear, Ftl, WritePoint};

/// Reason why a saved state cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FtlStateError {
    /// The file cannot be read.
    #[error("It cannot be read")]
    Read(#[from] io::Error),
    /// The state belongs to flash of another geometry.
    #[error("It is that of a drive of another size or profile")]
    OtherDrive,
    /// The state is inconsistent.
    #[error("It is damaged")]
    Damaged,
}

/// Maximum accepted erase count of a line.
const ERASE_COUNT_MAX: u32 = u32::MAX >> 4;

fn write_u32(out: &mut impl Write, number: u32) -> io::Result<()> {
    out.write_all(&number.to_le_bytes())
}

fn read_u32(input: &mut impl Read) -> io::Result<u32> {
    let mut bytes = [0; 4];
    input.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

fn write_u64(out: &mut impl Write, number: u64) -> io::Result<()> {
    write_u32(out, number as u32)?;
    write_u32(out, (number >> 32) as u32)
}

/// Reads a counter. Refuses values close to an overflow.
fn read_counter(input: &mut impl Read) -> Result<u64, FtlStateError> {
    let (low, high) = (read_u32(input)?, read_u32(input)?);
    if high > u32::MAX >> 4 {
        return Err(FtlStateError::Damaged);
    }
    Ok(u64::from(low) | u64::from(high) << 32)
}

impl FlashGeometry {
    fn to_array(self) -> [u32; 6] {
        let Self {
            dies,
            unit_pages,
            read_pages,
            line_pages,
            lines,
            logical_pages,
        } = self;
        [
            dies,
            unit_pages,
            read_pages,
            line_pages,
            lines,
            logical_pages,
        ]
    }
}

impl Ftl {
    /// Saves the state. Progress within a victim line is not saved: after loading, garbage collection starts at the line's
    /// first page.
    pub(in super::super) fn save(&self, out: &mut impl Write) -> io::Result<()> {
        let Self {
            geometry,
            map,
            reverse_map: _,
            lines,
            free,
            host_point: host,
            copy_point: copies,
            victim: _,
            wear,
        } = self;
        for number in geometry.to_array() {
            write_u32(out, number)?;
        }
        for page in map {
            write_u32(out, *page)?;
        }
        for line in lines {
            write_u32(out, line.erase_count)?;
        }
        write_u32(out, free.len() as u32)?;
        for line in free {
            write_u32(out, *line)?;
        }
        for point in [host, copies] {
            write_u32(out, point.next_page)?;
            write_u32(out, point.remaining_pages)?;
        }
        let FlashWear {
            host_pages,
            copied_pages,
            padded_pages,
            erased_blocks,
        } = *wear;
        for number in [host_pages, copied_pages, padded_pages, erased_blocks] {
            write_u64(out, number)?;
        }
        Ok(())
    }

    /// Loads the saved state of a translation layer with the geometry `geometry`.
    pub(in super::super) fn restore(
        geometry: FlashGeometry,
        input: &mut impl Read,
    ) -> Result<Self, FtlStateError> {
        for number in geometry.to_array() {
            if read_u32(input)? != number {
                return Err(FtlStateError::OtherDrive);
            }
        }
        let mut ftl = Self::new(geometry);
        for logical in 0..geometry.logical_pages {
            if let Some(page) = read_u32(input)?.checked_sub(1) {
                ftl.map_restored_page(logical, FlashPage(page))?;
            }
        }
        for line in &mut ftl.lines {
            line.state = FlashLineState::Closed;
            line.erase_count = read_u32(input)?;
            if line.erase_count > ERASE_COUNT_MAX {
                return Err(FtlStateError::Damaged);
            }
        }
        let count = read_u32(input)?;
        ftl.free.clear();
        for _ in 0..count.min(geometry.lines) {
            let line = read_u32(input)?;
            ftl.claim_line(line, FlashLineState::Free)?;
            ftl.free.push_back(line);
        }
        ftl.host_point = ftl.read_write_point(input)?;
        ftl.copy_point = ftl.read_write_point(input)?;
        ftl.check_space()?;
        ftl.wear = FlashWear {
            host_pages: read_counter(input)?,
            copied_pages: read_counter(input)?,
            padded_pages: read_counter(input)?,
            erased_blocks: read_counter(input)?,
        };
        Ok(ftl)
    }

    /// Maps a logical page to a flash page. No other logical page may be mapped to this flash page.
    fn map_restored_page(&mut self, logical: u32, page: FlashPage) -> Result<(), FtlStateError> {
        match self.reverse_map.get(page.0 as usize) {
            Some(0) => {
                self.map_page(logical, page);
                Ok(())
            }
            _ => Err(FtlStateError::Damaged),
        }
    }

    /// Changes the state of a closed line to free or open.
    fn claim_line(&mut self, line: u32, state: FlashLineState) -> Result<(), FtlStateError> {
        match self.lines.get_mut(line as usize) {
            Some(FlashLine {
                state: closed @ FlashLineState::Closed,
                valid_pages: valid,
                ..
            }) if *valid == 0 || state == FlashLineState::Open => {
                *closed = state;
                Ok(())
            }
            _ => Err(FtlStateError::Damaged),
        }
    }

    fn read_write_point(&mut self, input: &mut impl Read) -> Result<WritePoint, FtlStateError> {
        let point = WritePoint {
            next_page: read_u32(input)?,
            remaining_pages: read_u32(input)?,
        };
        if point.remaining_pages == 0 {
            return Ok(WritePoint::default());
        }
        let line_pages = self.geometry.line_pages;
        let line = point.next_page / line_pages;
        self.claim_line(line, FlashLineState::Open)?;
        let rest = (line + 1) * line_pages - point.next_page;
        let unwritten = self.reverse_map.iter().skip(point.next_page as usize);
        let mut unwritten = unwritten.take(rest as usize);
        if point.remaining_pages != rest || unwritten.any(|owner| *owner != 0) {
            return Err(FtlStateError::Damaged);
        }
        Ok(point)
    }

    /// Checks that garbage collection has free pages for its copies. Without them, pages would be lost.
    fn check_space(&self) -> Result<(), FtlStateError> {
        let closed = self.lines.iter();
        let closed = closed.filter(|line| line.state == FlashLineState::Closed);
        let least = closed.map(|line| line.valid_pages).min().unwrap_or(0);
        if self.free.len() < super::RESERVED_LINES && self.copy_point.remaining_pages < least {
            return Err(FtlStateError::Damaged);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::geometry::DiePageCounts;
    use super::super::tests::FtlTestDrive;
    use super::*;

    const GEOMETRY: (u32, DiePageCounts, u32, u32) = (4, DiePageCounts::new(2, 4, 16), 5000, 10);

    fn geometry() -> FlashGeometry {
        let (dies, pages, logical, spare) = GEOMETRY;
        FlashGeometry::new(dies, pages, logical, spare)
    }

    fn used_drive() -> (FtlTestDrive, Vec<u8>) {
        let mut drive = FtlTestDrive::new(geometry());
        let mut seed = 1_u64;
        for i in 0..30_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let page = (seed >> 33) as u32 % 5000;
            match i % 10 {
                9 => drive.deallocate(page),
                _ => drive.write(page),
            }
        }
        let mut state = Vec::new();
        drive.ftl.save(&mut state).expect("memory");
        (drive, state)
    }

    #[test]
    fn a_drive_goes_on_where_it_was() {
        let (mut drive, state) = used_drive();
        drive.ftl = Ftl::restore(geometry(), &mut state.as_slice()).expect("sound");
        drive.check();
        (0..20_000).for_each(|i| drive.write(i * 7919 % 5000));
        drive.check();
        let mut again = Vec::new();
        let restored = Ftl::restore(geometry(), &mut state.as_slice()).expect("sound");
        restored.save(&mut again).expect("memory");
        assert_eq!(again, state);
    }

    #[test]
    fn a_state_of_other_flash_is_refused() {
        let (_, state) = used_drive();
        let other = FlashGeometry::new(4, DiePageCounts::new(2, 4, 16), 5001, 10);
        let refused = Ftl::restore(other, &mut state.as_slice());
        assert!(matches!(refused, Err(FtlStateError::OtherDrive)));
        let cut = Ftl::restore(geometry(), &mut &state[..state.len() - 1]);
        assert!(matches!(cut, Err(FtlStateError::Read(_))));
    }

    /// If any numbers of a saved state are changed, the state is refused, or the layer still works.
    #[test]
    fn a_state_that_is_damaged_is_refused_or_harmless() {
        let (_, state) = used_drive();
        let (mut refused, mut seed) = (0, 3_u64);
        for _ in 0..300 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let mut damaged = state.clone();
            let at = (seed >> 33) as usize % (state.len() / 4) * 4;
            let number = [0, 1, u32::MAX, (seed >> 20) as u32 % 6000][(seed >> 60) as usize % 4];
            damaged[at..at + 4].copy_from_slice(&number.to_le_bytes());
            match Ftl::restore(geometry(), &mut damaged.as_slice()) {
                Err(_) => refused += 1,
                Ok(ftl) => {
                    let mut flash = super::super::tests::NullFlash;
                    let mut ftl = ftl;
                    (0..10_000).for_each(|i| ftl.write(i % 5000, &mut flash));
                }
            }
        }
        assert!(refused > 100, "{refused}");
    }
}

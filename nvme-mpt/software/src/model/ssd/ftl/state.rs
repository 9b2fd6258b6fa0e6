//! Saved state of a translation layer, stored while the drive is closed: the mapping of pages and the erase counts. Only the
//! drive's timing depends on it, not its data.
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
    /// The state belongs to different flash.
    #[error("It is that of a drive of another size or profile")]
    OtherDrive,
    /// The state is inconsistent.
    #[error("It is damaged")]
    Damaged,
}

/// Maximum erase count that is accepted for a line.
const MOST_ERASED: u32 = u32::MAX >> 4;

fn put(out: &mut impl Write, number: u32) -> io::Result<()> {
    out.write_all(&number.to_le_bytes())
}

fn get(input: &mut impl Read) -> io::Result<u32> {
    let mut bytes = [0; 4];
    input.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

fn put_wide(out: &mut impl Write, number: u64) -> io::Result<()> {
    put(out, number as u32)?;
    put(out, (number >> 32) as u32)
}

/// Reads a counter, and rejects values close to overflow.
fn get_count(input: &mut impl Read) -> Result<u64, FtlStateError> {
    let (low, high) = (get(input)?, get(input)?);
    if high > u32::MAX >> 4 {
        return Err(FtlStateError::Damaged);
    }
    Ok(u64::from(low) | u64::from(high) << 32)
}

impl FlashGeometry {
    fn numbers(&self) -> [u32; 6] {
        let Self {
            dies,
            unit_pages,
            read_pages,
            line_pages,
            lines,
            logical_pages,
        } = *self;
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
    /// Saves the state. After loading, garbage collection of a partly collected line starts from the line's first page.
    pub(in super::super) fn save(&self, out: &mut impl Write) -> io::Result<()> {
        let Self {
            geometry,
            map,
            owner: _,
            lines,
            free,
            host,
            copies,
            victim: _,
            wear,
        } = self;
        for number in geometry.numbers() {
            put(out, number)?;
        }
        for page in map {
            put(out, *page)?;
        }
        for line in lines {
            put(out, line.erased)?;
        }
        put(out, free.len() as u32)?;
        for line in free {
            put(out, *line)?;
        }
        for point in [host, copies] {
            put(out, point.next)?;
            put(out, point.left)?;
        }
        let FlashWear {
            host_pages,
            copied_pages,
            padded_pages,
            erased_blocks,
        } = *wear;
        for number in [host_pages, copied_pages, padded_pages, erased_blocks] {
            put_wide(out, number)?;
        }
        Ok(())
    }

    /// Loads the saved state of a translation layer with this geometry.
    pub(in super::super) fn restore(
        geometry: FlashGeometry,
        input: &mut impl Read,
    ) -> Result<Self, FtlStateError> {
        for number in geometry.numbers() {
            if get(input)? != number {
                return Err(FtlStateError::OtherDrive);
            }
        }
        let mut ftl = Self::new(geometry);
        for logical in 0..geometry.logical_pages {
            if let Some(page) = get(input)?.checked_sub(1) {
                ftl.put_back(logical, FlashPage(page))?;
            }
        }
        for line in &mut ftl.lines {
            line.state = FlashLineState::Closed;
            line.erased = get(input)?;
            if line.erased > MOST_ERASED {
                return Err(FtlStateError::Damaged);
            }
        }
        let count = get(input)?;
        ftl.free.clear();
        for _ in 0..count.min(geometry.lines) {
            let line = get(input)?;
            ftl.claim(line, FlashLineState::Free)?;
            ftl.free.push_back(line);
        }
        ftl.host = ftl.read_point(input)?;
        ftl.copies = ftl.read_point(input)?;
        ftl.check_room()?;
        ftl.wear = FlashWear {
            host_pages: get_count(input)?,
            copied_pages: get_count(input)?,
            padded_pages: get_count(input)?,
            erased_blocks: get_count(input)?,
        };
        Ok(ftl)
    }

    /// Maps a logical page to a flash page. The flash page must have no other logical page.
    fn put_back(&mut self, logical: u32, page: FlashPage) -> Result<(), FtlStateError> {
        match self.owner.get(page.0 as usize) {
            Some(0) => {
                self.set(logical, page);
                Ok(())
            }
            _ => Err(FtlStateError::Damaged),
        }
    }

    /// Changes the state of a closed line to free or open.
    fn claim(&mut self, line: u32, state: FlashLineState) -> Result<(), FtlStateError> {
        match self.lines.get_mut(line as usize) {
            Some(FlashLine {
                state: closed @ FlashLineState::Closed,
                valid,
                ..
            }) if *valid == 0 || state == FlashLineState::Open => {
                *closed = state;
                Ok(())
            }
            _ => Err(FtlStateError::Damaged),
        }
    }

    fn read_point(&mut self, input: &mut impl Read) -> Result<WritePoint, FtlStateError> {
        let point = WritePoint {
            next: get(input)?,
            left: get(input)?,
        };
        if point.left == 0 {
            return Ok(WritePoint::default());
        }
        let line_pages = self.geometry.line_pages;
        let line = point.next / line_pages;
        self.claim(line, FlashLineState::Open)?;
        let rest = (line + 1) * line_pages - point.next;
        let unwritten = self.owner.iter().skip(point.next as usize);
        let mut unwritten = unwritten.take(rest as usize);
        if point.left != rest || unwritten.any(|owner| *owner != 0) {
            return Err(FtlStateError::Damaged);
        }
        Ok(point)
    }

    /// Checks that garbage collection has space for the pages that it copies. Otherwise, pages would be lost.
    fn check_room(&self) -> Result<(), FtlStateError> {
        let closed = self.lines.iter();
        let closed = closed.filter(|line| line.state == FlashLineState::Closed);
        let least = closed.map(|line| line.valid).min().unwrap_or(0);
        if self.free.len() < super::RESERVED && self.copies.left < least {
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

    fn used() -> (FtlTestDrive, Vec<u8>) {
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
        let (mut drive, state) = used();
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
        let (_, state) = used();
        let other = FlashGeometry::new(4, DiePageCounts::new(2, 4, 16), 5001, 10);
        let refused = Ftl::restore(other, &mut state.as_slice());
        assert!(matches!(refused, Err(FtlStateError::OtherDrive)));
        let cut = Ftl::restore(geometry(), &mut &state[..state.len() - 1]);
        assert!(matches!(cut, Err(FtlStateError::Read(_))));
    }

    /// With any numbers changed, the state is refused, or the layer works.
    #[test]
    fn a_state_that_is_damaged_is_refused_or_harmless() {
        let (_, state) = used();
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

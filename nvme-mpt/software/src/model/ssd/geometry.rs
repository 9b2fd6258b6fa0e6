//! Layout of the flash of an FTL instance.
//!
//! Pages are counted in the order in which they are written. A program unit lies on one die, the next
//! unit on the next die, and so on around; a line is one erase block of each die.

/// Bytes of a logical page, the unit of the mapping.
pub(super) const PAGE: u64 = 4096;

/// Lines that an instance has beyond what its logical pages fill, whatever its over-provisioning:
/// two are written to, two are kept free, and with one more there is always something to collect.
const SPARE_LINES: u32 = 5;

/// A page of the flash of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FlashPage(pub(super) u32);

/// The flash of one FTL instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Geometry {
    pub(super) dies: u32,
    /// Pages that a die programs at once.
    pub(super) unit_pages: u32,
    /// Pages that a die reads at once.
    pub(super) read_pages: u32,
    /// Pages of a line.
    pub(super) line_pages: u32,
    pub(super) lines: u32,
    pub(super) logical_pages: u32,
}

/// Pages of each thing that a die does at once.
#[derive(Clone, Copy, Debug)]
pub(super) struct PagesPer {
    pub(super) read: u32,
    /// Program unit.
    pub(super) unit: u32,
    /// Block, which is erased at once.
    pub(super) block: u32,
}

#[cfg(test)]
impl PagesPer {
    pub(super) const fn new(read: u32, unit: u32, block: u32) -> Self {
        Self { read, unit, block }
    }
}

impl Geometry {
    /// Flash for `logical_pages` and so many percent more.
    pub(super) fn new(
        dies: u32,
        pages: PagesPer,
        logical_pages: u32,
        over_provisioning: u32,
    ) -> Self {
        let line_pages = dies * pages.block;
        let physical = u64::from(logical_pages) * u64::from(100 + over_provisioning) / 100;
        let lines = physical.div_ceil(line_pages.into()) as u32;
        let least = logical_pages.div_ceil(line_pages) + SPARE_LINES;
        Self {
            dies,
            unit_pages: pages.unit,
            read_pages: pages.read,
            line_pages,
            lines: lines.max(least),
            logical_pages,
        }
    }

    pub(super) fn pages(&self) -> usize {
        self.lines as usize * self.line_pages as usize
    }

    /// The line that a page is of.
    pub(super) fn line(&self, page: FlashPage) -> u32 {
        page.0 / self.line_pages
    }

    /// The die that a page is on.
    pub(super) fn die(&self, page: FlashPage) -> u32 {
        page.0 % self.line_pages / self.unit_pages % self.dies
    }

    /// The program unit that a page is in.
    pub(super) fn unit(&self, page: FlashPage) -> u32 {
        page.0 / self.unit_pages
    }

    /// The pages that are read at once with a page.
    pub(super) fn read_group(&self, page: FlashPage) -> u32 {
        page.0 / self.read_pages
    }

    /// Returns whether a page is the last of its program unit.
    pub(super) fn ends_unit(&self, page: FlashPage) -> bool {
        (page.0 + 1).is_multiple_of(self.unit_pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_go_around_the_dies() {
        // Lines of 2 dies with 3 units of 4 pages.
        let geometry = Geometry::new(2, PagesPer::new(2, 4, 12), 100, 10);
        assert_eq!((geometry.line_pages, geometry.lines), (24, 10));
        let dies: Vec<u32> = (0..7)
            .map(|unit| geometry.die(FlashPage(4 * unit)))
            .collect();
        assert_eq!(dies, [0, 1, 0, 1, 0, 1, 0]);
        assert_eq!(geometry.line(FlashPage(24)), 1);
        assert_eq!(geometry.unit(FlashPage(7)), 1);
        assert_eq!(geometry.read_group(FlashPage(7)), 3);
        assert!(geometry.ends_unit(FlashPage(7)) && !geometry.ends_unit(FlashPage(6)));
        assert_eq!(
            Geometry::new(2, PagesPer::new(2, 4, 12), 2400, 10).lines,
            110
        );
    }
}

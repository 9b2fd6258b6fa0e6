//! Layout of the flash of an FTL instance.
//!
//! Flash pages are numbered in the order in which they are written. Consecutive program units are on consecutive dies, in
//! rotation. A *line* (superblock) has one erase block of each die, and is erased as a whole.

/// Size of a logical page in bytes, the granularity of the mapping.
pub(super) const PAGE: u64 = 4096;

/// Number of lines that an instance has beyond the lines that its logical pages fill, even without over-provisioning. Two lines
/// are being written and two lines are kept free. A fifth line ensures that garbage collection can always free pages.
const SPARE_LINES: u32 = 5;

/// Number of a flash page within its FTL instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FlashPage(pub(super) u32);

/// The flash of one FTL instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FlashGeometry {
    pub(super) dies: u32,
    /// Number of pages that a die programs in one operation (a program unit).
    pub(super) unit_pages: u32,
    /// Number of pages that a die reads in one operation.
    pub(super) read_pages: u32,
    /// Number of pages in a line.
    pub(super) line_pages: u32,
    pub(super) lines: u32,
    pub(super) logical_pages: u32,
}

/// Numbers of pages on which the operations of a die work.
#[derive(Clone, Copy, Debug)]
pub(super) struct DiePageCounts {
    pub(super) read: u32,
    /// Number of pages in a program unit.
    pub(super) unit: u32,
    /// Number of pages in an erase block.
    pub(super) block: u32,
}

#[cfg(test)]
impl DiePageCounts {
    pub(super) const fn new(read: u32, unit: u32, block: u32) -> Self {
        Self { read, unit, block }
    }
}

impl FlashGeometry {
    /// Creates the layout for `logical_pages` logical pages, with `over_provisioning` percent more flash.
    pub(super) fn new(
        dies: u32,
        pages: DiePageCounts,
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

    /// Returns the line that contains a flash page.
    pub(super) fn line(&self, page: FlashPage) -> u32 {
        page.0 / self.line_pages
    }

    /// Returns the die of a flash page.
    pub(super) fn die(&self, page: FlashPage) -> u32 {
        page.0 % self.line_pages / self.unit_pages % self.dies
    }

    /// Returns the program unit of a flash page.
    pub(super) fn unit(&self, page: FlashPage) -> u32 {
        page.0 / self.unit_pages
    }

    /// Returns the number of the group of pages that a die reads together with `page`.
    pub(super) fn read_group(&self, page: FlashPage) -> u32 {
        page.0 / self.read_pages
    }

    /// Returns whether a flash page is the last page of its program unit.
    pub(super) fn is_unit_end(&self, page: FlashPage) -> bool {
        (page.0 + 1).is_multiple_of(self.unit_pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_go_around_the_dies() {
        // A line has 2 dies, each with 3 program units of 4 pages.
        let geometry = FlashGeometry::new(2, DiePageCounts::new(2, 4, 12), 100, 10);
        assert_eq!((geometry.line_pages, geometry.lines), (24, 10));
        let dies: Vec<u32> = (0..7)
            .map(|unit| geometry.die(FlashPage(4 * unit)))
            .collect();
        assert_eq!(dies, [0, 1, 0, 1, 0, 1, 0]);
        assert_eq!(geometry.line(FlashPage(24)), 1);
        assert_eq!(geometry.unit(FlashPage(7)), 1);
        assert_eq!(geometry.read_group(FlashPage(7)), 3);
        assert!(geometry.is_unit_end(FlashPage(7)) && !geometry.is_unit_end(FlashPage(6)));
        assert_eq!(
            FlashGeometry::new(2, DiePageCounts::new(2, 4, 12), 2400, 10).lines,
            110
        );
    }
}

//! A page-mapped flash translation layer with garbage collection. It maps logical pages to flash pages, and reports each flash
//! operation to a [`FlashMedia`], which computes the operation's time.
//!
//! A *line* (superblock) is the unit of erasure and garbage collection: it has one erase block of each die. Pages that the host
//! writes and pages that garbage collection copies go to separate lines, so that long-lived data is kept together. Garbage
//! collection chooses the line with the fewest valid pages as its victim. For each page that the host writes, garbage
//! collection copies only a few pages of the victim, so that no write waits until a whole line is collected.

mod state;

use std::collections::VecDeque;

use super::geometry::{FlashGeometry, FlashPage};
pub(crate) use state::FtlStateError;

/// Minimum number of free lines. Garbage collection runs while there are fewer.
const GC_FREE_LINES_MIN: usize = 4;

/// Number of free lines that only garbage collection may use, for the pages that it copies.
const RESERVED_LINES: usize = 1;

/// Receiver of the FTL's flash operations, which computes their times.
pub(super) trait FlashMedia {
    /// Writes a host page.
    fn write(&mut self, to: FlashPage);
    /// Copies a page for garbage collection.
    fn copy(&mut self, from: FlashPage, to: FlashPage);
    /// Programs a program unit that is not full. `last` is the unit's last page.
    fn pad(&mut self, last: FlashPage);
    /// Erases all blocks of a line.
    fn erase(&mut self, line: u32);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FlashLineState {
    Free,
    /// The host or garbage collection is writing pages to the line.
    Open,
    /// All pages of the line are written, until the line is erased.
    Closed,
}

#[derive(Clone, Copy, Debug)]
struct FlashLine {
    state: FlashLineState,
    /// Number of the line's pages that have the present data of a logical page.
    valid_pages: u32,
    /// Number of times that the line was erased.
    erase_count: u32,
}

/// Position of the next write: one exists for pages of the host, and one for copied pages.
#[derive(Clone, Copy, Debug, Default)]
struct WritePoint {
    /// Next page of the open line, and number of pages that are left in this line.
    next_page: u32,
    remaining_pages: u32,
}

/// Line (superblock) that garbage collection has chosen as its victim.
#[derive(Clone, Copy, Debug)]
struct VictimLine {
    line: u32,
    /// Offset within the line of the next page that garbage collection checks.
    next: u32,
    /// Number of pages to copy for each page that the host writes. With this number, the victim is erased before the host has
    /// written as many pages as the erasure frees.
    copies_per_write: u32,
}

/// Wear of the flash since the drive was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlashWear {
    /// Number of pages that the host wrote.
    pub host_pages: u64,
    /// Number of pages that garbage collection copied.
    pub copied_pages: u64,
    /// Number of pages that were programmed without data, because a flush programmed a partial program unit.
    pub padded_pages: u64,
    /// Number of erase blocks that were erased.
    pub erased_blocks: u64,
}

/// An instance of the translation layer.
#[derive(Debug)]
pub(super) struct Ftl {
    geometry: FlashGeometry,
    /// For each logical page, the number of its flash page plus one; 0 if unmapped. The vector is zero-initialised, so memory
    /// is only allocated for pages that were written.
    map: Vec<u32>,
    /// For each flash page, the number of its logical page plus one; 0 if the flash page has no present data.
    reverse_map: Vec<u32>,
    lines: Vec<FlashLine>,
    free: VecDeque<u32>,
    host_point: WritePoint,
    copy_point: WritePoint,
    victim: Option<VictimLine>,
    wear: FlashWear,
}

impl Ftl {
    pub(super) fn new(geometry: FlashGeometry) -> Self {
        let line = FlashLine {
            state: FlashLineState::Free,
            valid_pages: 0,
            erase_count: 0,
        };
        Self {
            map: vec![0; geometry.logical_pages as usize],
            reverse_map: vec![0; geometry.pages()],
            lines: vec![line; geometry.lines as usize],
            free: (0..geometry.lines).collect(),
            host_point: WritePoint::default(),
            copy_point: WritePoint::default(),
            victim: None,
            wear: FlashWear::default(),
            geometry,
        }
    }

    pub(super) fn geometry(&self) -> &FlashGeometry {
        &self.geometry
    }

    pub(super) fn wear(&self) -> FlashWear {
        self.wear
    }

    /// Returns the flash page of a logical page; `None` if the logical page is unmapped.
    pub(super) fn find(&self, logical: u32) -> Option<FlashPage> {
        self.map
            .get(logical as usize)?
            .checked_sub(1)
            .map(FlashPage)
    }

    /// Returns whether a page is in the write buffer, because its program unit is not full yet.
    pub(super) fn is_buffered(&self, page: FlashPage) -> bool {
        self.host_point.remaining_pages != 0
            && page.0 < self.host_point.next_page
            && self.geometry.unit(page) == self.geometry.unit(FlashPage(self.host_point.next_page))
    }

    /// Writes a logical page. A page number beyond the drive's capacity is ignored.
    pub(super) fn write(&mut self, logical: u32, media: &mut impl FlashMedia) {
        if logical >= self.geometry.logical_pages {
            return;
        }
        self.collect_for_write(media);
        self.unmap_page(logical);
        if self.host_point.remaining_pages == 0 {
            // This ends, because each collected line frees at least one page.
            while self.free.len() <= RESERVED_LINES && self.collect_garbage(u32::MAX, media) {}
            self.host_point = self.open_line();
        }
        if let Some(page) = Self::take_page(&mut self.host_point, &self.geometry, &mut self.lines) {
            self.map_page(logical, page);
            self.wear.host_pages += 1;
            media.write(page);
        }
    }

    /// Unmaps a logical page.
    pub(super) fn deallocate(&mut self, logical: u32) {
        self.unmap_page(logical);
    }

    /// Programs the host's pages in the write buffer, even if their program unit is not full.
    pub(super) fn flush(&mut self, media: &mut impl FlashMedia) {
        let unit = self.geometry.unit_pages;
        let padding = (unit - self.host_point.next_page % unit) % unit;
        if self.host_point.remaining_pages == 0 || padding == 0 {
            return;
        }
        self.wear.padded_pages += u64::from(padding);
        self.host_point.next_page += padding;
        self.host_point.remaining_pages -= padding;
        let last = FlashPage(self.host_point.next_page - 1);
        if self.host_point.remaining_pages == 0 {
            self.close_line(last);
        }
        media.pad(last);
    }

    fn close_line(&mut self, last: FlashPage) {
        let line = self.geometry.line(last) as usize;
        self.lines[line].state = FlashLineState::Closed;
    }

    fn map_page(&mut self, logical: u32, page: FlashPage) {
        self.map[logical as usize] = page.0 + 1;
        self.reverse_map[page.0 as usize] = logical + 1;
        self.lines[self.geometry.line(page) as usize].valid_pages += 1;
    }

    fn unmap_page(&mut self, logical: u32) {
        if let Some(page) = self.find(logical) {
            self.map[logical as usize] = 0;
            self.reverse_map[page.0 as usize] = 0;
            self.lines[self.geometry.line(page) as usize].valid_pages -= 1;
        }
    }

    /// Takes a free line for writing. If no line is free, returns a write point without pages.
    fn open_line(&mut self) -> WritePoint {
        let Some(line) = self.free.pop_front() else {
            return WritePoint::default();
        };
        self.lines[line as usize].state = FlashLineState::Open;
        WritePoint {
            next_page: line * self.geometry.line_pages,
            remaining_pages: self.geometry.line_pages,
        }
    }

    /// Takes the next page of a write point.
    fn take_page(
        point: &mut WritePoint,
        geometry: &FlashGeometry,
        lines: &mut [FlashLine],
    ) -> Option<FlashPage> {
        point.remaining_pages = point.remaining_pages.checked_sub(1)?;
        let page = FlashPage(point.next_page);
        point.next_page += 1;
        if point.remaining_pages == 0 {
            lines[geometry.line(page) as usize].state = FlashLineState::Closed;
        }
        Some(page)
    }

    /// Copies as many pages for garbage collection as one page of the host requires.
    fn collect_for_write(&mut self, media: &mut impl FlashMedia) {
        if self.free.len() < GC_FREE_LINES_MIN {
            let rate = self.victim.map_or(1, |victim| victim.copies_per_write);
            self.collect_garbage(rate, media);
        }
    }

    /// Copies up to `pages` valid pages of the victim line. Erases the line when it has no valid page left. Returns `false` if
    /// collecting a line would free no pages.
    fn collect_garbage(&mut self, pages: u32, media: &mut impl FlashMedia) -> bool {
        let Some(mut victim) = self.victim.or_else(|| self.choose_victim()) else {
            return false;
        };
        let line_pages = self.geometry.line_pages;
        let first = victim.line * line_pages;
        let mut copied = 0;
        while victim.next < line_pages && copied < pages {
            let from = FlashPage(first + victim.next);
            victim.next += 1;
            if let Some(logical) = self.reverse_map[from.0 as usize].checked_sub(1) {
                self.relocate_page(logical, from, media);
                copied += 1;
            }
        }
        if victim.next < line_pages {
            self.victim = Some(victim);
            return true;
        }
        self.victim = None;
        let line = &mut self.lines[victim.line as usize];
        line.state = FlashLineState::Free;
        line.erase_count += 1;
        self.free.push_back(victim.line);
        self.wear.erased_blocks += u64::from(self.geometry.dies);
        media.erase(victim.line);
        true
    }

    fn relocate_page(&mut self, logical: u32, from: FlashPage, media: &mut impl FlashMedia) {
        if self.copy_point.remaining_pages == 0 {
            self.copy_point = self.open_line();
        }
        // A page is free: one line is reserved for copies, and the erasure of the victim replaces this line.
        if let Some(to) = Self::take_page(&mut self.copy_point, &self.geometry, &mut self.lines) {
            self.unmap_page(logical);
            self.map_page(logical, to);
            self.wear.copied_pages += 1;
            media.copy(from, to);
        }
    }

    /// Chooses the closed line with the fewest valid pages as the victim; `None` if all its pages are valid, since its erasure
    /// would free no pages.
    fn choose_victim(&self) -> Option<VictimLine> {
        let closed = (0_u32..).zip(&self.lines);
        let closed = closed.filter(|(_, line)| line.state == FlashLineState::Closed);
        let (line, valid) = closed
            .map(|(index, line)| (index, line.valid_pages))
            .min_by_key(|&(_, valid)| valid)?;
        let gained = self.geometry.line_pages.checked_sub(valid)?;
        Some(VictimLine {
            line,
            next: 0,
            copies_per_write: valid.checked_div(gained)? + 1,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::geometry::DiePageCounts;
    use super::*;

    /// Flash that records the contents of each page, and checks the rules of flash.
    struct RecordingFlash {
        geometry: FlashGeometry,
        /// Content of each flash page: the number of the host's write that produced it.
        pages: Vec<Option<u64>>,
        writing: u64,
    }

    impl RecordingFlash {
        fn program(&mut self, page: FlashPage, content: u64) {
            let page = &mut self.pages[page.0 as usize];
            assert!(page.is_none(), "a page is written once between two erases");
            *page = Some(content);
        }
    }

    impl FlashMedia for RecordingFlash {
        fn write(&mut self, to: FlashPage) {
            self.program(to, self.writing);
        }

        fn copy(&mut self, from: FlashPage, to: FlashPage) {
            let content = self.pages[from.0 as usize].expect("something to copy");
            self.program(to, content);
        }

        fn pad(&mut self, last: FlashPage) {
            assert!(self.geometry.is_unit_end(last));
            let unit = self.geometry.unit_pages;
            for page in &mut self.pages[(last.0 + 1 - unit) as usize..=last.0 as usize] {
                // A page without data in a programmed unit cannot be written any more.
                page.get_or_insert(u64::MAX);
            }
        }

        fn erase(&mut self, line: u32) {
            let pages = self.geometry.line_pages as usize;
            self.pages[line as usize * pages..][..pages].fill(None);
        }
    }

    /// Flash that ignores all operations.
    pub(super) struct NullFlash;

    impl FlashMedia for NullFlash {
        fn write(&mut self, _: FlashPage) {}
        fn copy(&mut self, _: FlashPage, _: FlashPage) {}
        fn pad(&mut self, _: FlashPage) {}
        fn erase(&mut self, _: u32) {}
    }

    pub(super) struct FtlTestDrive {
        pub(super) ftl: Ftl,
        flash: RecordingFlash,
        /// Number of the host's last write to each logical page.
        expected: Vec<Option<u64>>,
    }

    impl FtlTestDrive {
        pub(super) fn new(geometry: FlashGeometry) -> Self {
            Self {
                ftl: Ftl::new(geometry),
                flash: RecordingFlash {
                    geometry,
                    pages: vec![None; geometry.pages()],
                    writing: 0,
                },
                expected: vec![None; geometry.logical_pages as usize],
            }
        }

        pub(super) fn write(&mut self, logical: u32) {
            self.flash.writing += 1;
            self.ftl.write(logical, &mut self.flash);
            self.expected[logical as usize] = Some(self.flash.writing);
        }

        pub(super) fn deallocate(&mut self, logical: u32) {
            self.ftl.deallocate(logical);
            self.expected[logical as usize] = None;
        }

        pub(super) fn check(&self) {
            let Ftl {
                geometry,
                map,
                reverse_map: owner,
                lines,
                free,
                host_point: host,
                copy_point: copies,
                ..
            } = &self.ftl;
            for (logical, expected) in self.expected.iter().enumerate() {
                let found = self.ftl.find(logical as u32);
                let content = found.and_then(|page| self.flash.pages[page.0 as usize]);
                assert_eq!(content, *expected, "logical page {logical}");
                if let Some(page) = found {
                    assert_eq!(owner[page.0 as usize], logical as u32 + 1);
                }
            }
            let mapped = map.iter().filter(|page| **page != 0).count();
            assert_eq!(mapped, owner.iter().filter(|owner| **owner != 0).count());
            for (index, line) in lines.iter().enumerate() {
                let pages = index * geometry.line_pages as usize..;
                let owners = &owner[pages][..geometry.line_pages as usize];
                let valid = owners.iter().filter(|owner| **owner != 0).count();
                assert_eq!(line.valid_pages as usize, valid, "line {index}");
                let listed = free.iter().filter(|free| **free as usize == index).count();
                assert_eq!(
                    listed,
                    usize::from(line.state == FlashLineState::Free),
                    "no line is lost"
                );
            }
            let open = lines
                .iter()
                .filter(|line| line.state == FlashLineState::Open)
                .count();
            let points = [host, copies]
                .iter()
                .filter(|point| point.remaining_pages != 0)
                .count();
            assert_eq!(open, points);
            let erased: u32 = lines.iter().map(|line| line.erase_count).sum();
            let wear = self.ftl.wear();
            assert_eq!(
                wear.erased_blocks,
                u64::from(erased) * u64::from(geometry.dies)
            );
            assert_eq!(wear.host_pages, self.flash.writing);
        }
    }

    #[test]
    fn a_full_drive_can_be_overwritten_for_ever() {
        const PAGES: u32 = 20_000;
        let geometry = FlashGeometry::new(4, DiePageCounts::new(2, 4, 16), PAGES, 25);
        let mut drive = FtlTestDrive::new(geometry);
        (0..PAGES).for_each(|logical| drive.write(logical));
        assert_eq!(drive.ftl.wear().copied_pages, 0);
        let mut seed = 1_u64;
        for _ in 0..10 * PAGES {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            drive.write((seed >> 33) as u32 % PAGES);
        }
        drive.check();
        let wear = drive.ftl.wear();
        let amplification = (wear.host_pages + wear.copied_pages) as f64 / wear.host_pages as f64;
        // For uniform writes to a flash of which a part u is used, greedy collection is known to write about 1 / 2(1 - u) pages
        // for each page of the host, which is 2.5 here.
        assert!((2.0..=3.0).contains(&amplification), "{amplification}");
        // Lines are used in rotation, so all lines wear out at about equal rates.
        let erased = drive.ftl.lines.iter().map(|line| line.erase_count);
        let (least, most) = (erased.clone().min(), erased.max());
        assert!(least > Some(3) && most < Some(100), "{least:?} {most:?}");
    }

    #[test]
    fn writing_in_order_copies_nothing() {
        let geometry = FlashGeometry::new(4, DiePageCounts::new(2, 4, 32), 8000, 7);
        let mut drive = FtlTestDrive::new(geometry);
        for _ in 0..10 {
            (0..8000).for_each(|logical| drive.write(logical));
        }
        drive.check();
        assert_eq!(drive.ftl.wear().copied_pages, 0);
    }

    #[test]
    fn deallocated_pages_are_not_copied() {
        let geometry = FlashGeometry::new(4, DiePageCounts::new(2, 4, 32), 8000, 7);
        let run = |deallocate: bool| {
            let mut drive = FtlTestDrive::new(geometry);
            let mut seed = 1_u64;
            (0..8000).for_each(|logical| drive.write(logical));
            if deallocate {
                (0..8000)
                    .filter(|l| l % 2 == 0)
                    .for_each(|logical| drive.deallocate(logical));
            }
            for _ in 0..50_000 {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                drive.write(((seed >> 33) as u32 % 4000) * 2 + 1);
            }
            drive.check();
            drive.ftl.wear().copied_pages
        };
        let (without, with) = (run(false), run(true));
        assert!(with * 5 < without, "{with} of {without}");
    }

    #[derive(Clone, Debug)]
    enum FtlTestStep {
        Write(u32, u32),
        Deallocate(u32, u32),
        Flush,
    }

    fn steps() -> impl Strategy<Value = Vec<FtlTestStep>> {
        let step = prop_oneof![
            6 => (0..400_u32, 1..80_u32).prop_map(|(start, count)| FtlTestStep::Write(start, count)),
            1 => (0..400_u32, 1..80_u32).prop_map(|(start, count)| FtlTestStep::Deallocate(start, count)),
            1 => Just(FtlTestStep::Flush),
        ];
        prop::collection::vec(step, 1..200)
    }

    proptest! {
        /// Each logical page has its last content, no block is lost, and wear is counted.
        #[test]
        fn it_loses_nothing(
            steps in steps(),
            dies in 1..5_u32,
            unit_shift in 0..3_u32,
            units in 1..5_u32,
            logical in 1..400_u32,
        ) {
            let unit = 1 << unit_shift;
            let geometry = FlashGeometry::new(dies, DiePageCounts::new(1, unit, unit * units), logical, 7);
            let mut drive = FtlTestDrive::new(geometry);
            for step in steps {
                match step {
                    FtlTestStep::Write(start, count) => {
                        (start..start + count).for_each(|page| drive.write(page % logical));
                    }
                    FtlTestStep::Deallocate(start, count) => {
                        (start..start + count).for_each(|page| drive.deallocate(page % logical));
                    }
                    FtlTestStep::Flush => drive.ftl.flush(&mut drive.flash),
                }
                drive.check();
            }
        }
    }
}

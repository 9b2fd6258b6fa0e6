//! `model = "ssd"`: a drive of NAND flash, with a page-mapped translation layer and garbage collection.
//!
//! Logical pages of 4 KiB go around the FTL instances, which have dies of their own each. A write is
//! done when it is in the write buffer; when a program unit of it is full, it goes over its die's
//! channel and is programmed, and its room is free again. A read waits for its die, for the channel
//! and for the link. Copies and erasures of garbage collection keep dies and channels busy as the
//! host's commands do, and whoever comes after them waits.
//!
//! `geometry` defines where pages lie, and `ftl` maps them and collects garbage. `flash` has the instances use dies. `keep` keeps the map beside a drive's file.

mod flash;
mod ftl;
mod geometry;
mod keep;

pub use ftl::Wear;
pub(crate) use keep::beside;

use super::flash::{Flash, FlashParts};
use super::profile::SsdProfile;
use super::time::Timebase;
use super::tokens::Tokens;
use super::{Access, Work};
use flash::{Timed, Units};
use ftl::Ftl;
use geometry::{FlashPage, Geometry, PAGE, PagesPer};

/// Logical pages of an instance at most, so that its flash pages have numbers of 32 bits.
const MOST_PAGES: u64 = 1 << 30;

/// An FTL instance with its part of the flash.
#[derive(Debug)]
struct Instance {
    ftl: Ftl,
    units: Units,
    first_die: usize,
}

impl Instance {
    fn flash<'a>(&'a mut self, flash: &'a mut Flash, now: u64) -> (&'a mut Ftl, Timed<'a>) {
        let timed = Timed {
            flash,
            units: &mut self.units,
            geometry: *self.ftl.geometry(),
            first_die: self.first_die,
            now,
        };
        (&mut self.ftl, timed)
    }
}

impl SsdProfile {
    fn flash(&self) -> FlashParts {
        FlashParts {
            channels: self.channels,
            dies_per_channel: self.dies_per_channel,
            read: self.read,
            program: self.program,
            erase: self.erase,
            channel_bandwidth: self.channel_bandwidth,
            write_buffer: self.write_buffer,
            program_unit: self.program_unit,
        }
    }
}

/// A drive of flash. All its queues share it.
#[derive(Debug)]
pub(crate) struct SsdModel {
    /// Logical blocks of a page as a power of two.
    page_shift: u32,
    block_bytes: u64,
    read_overhead: u64,
    write_overhead: u64,
    link: Tokens,
    flash: Flash,
    instances: Vec<Instance>,
}

impl SsdModel {
    /// A profile is sound when it was loaded.
    pub(super) fn new(
        profile: &SsdProfile,
        blocks: u64,
        lba_shift: u8,
        timebase: Timebase,
    ) -> Self {
        let page_shift = PAGE.ilog2() - u32::from(lba_shift);
        let instances = u64::from(profile.instances);
        let pages = blocks.div_ceil(1 << page_shift).div_ceil(instances);
        let dies = u64::from(profile.channels) * u64::from(profile.dies_per_channel) / instances;
        let in_pages = |bytes: u64| (bytes / PAGE) as u32;
        let geometry = Geometry::new(
            dies as u32,
            PagesPer {
                read: in_pages(profile.flash_page.0),
                unit: in_pages(profile.program_unit.0),
                block: in_pages(profile.block.0),
            },
            // Pages beyond what a map can name are never mapped, and cost what an unwritten one does.
            pages.min(MOST_PAGES) as u32,
            profile.over_provisioning.into(),
        );
        let instance = |index| Instance {
            ftl: Ftl::new(geometry),
            units: Units::default(),
            first_die: (index * dies) as usize,
        };
        Self {
            page_shift,
            block_bytes: 1 << lba_shift,
            read_overhead: timebase.of(profile.read_overhead),
            write_overhead: timebase.of(profile.write_overhead),
            link: Tokens::new(profile.link_bandwidth.0, timebase),
            flash: Flash::new(&profile.flash(), timebase),
            instances: (0..instances).map(instance).collect(),
        }
    }

    /// Returns the effects on the flash so far.
    pub(crate) fn wear(&self) -> Wear {
        let mut sum = Wear::default();
        for instance in &self.instances {
            let wear = instance.ftl.wear();
            sum.host_pages += wear.host_pages;
            sum.copied_pages += wear.copied_pages;
            sum.padded_pages += wear.padded_pages;
            sum.erased_blocks += wear.erased_blocks;
        }
        sum
    }

    /// Commands arrive at `now`, and none before it any more.
    pub(super) fn begin(&mut self, now: u64) {
        self.link.forget(now);
        self.flash.forget(now);
    }

    /// When something that arrives `now` is done.
    pub(super) fn due(&mut self, work: &Work, now: u64) -> u64 {
        match work.access {
            Access::Read => self.read(work, now),
            Access::Write => self.write(work, now),
            Access::Deallocate => self.deallocate(work, now),
            Access::Flush => self.flush(now),
        }
    }

    /// The logical pages that hold blocks.
    fn pages(&self, work: &Work) -> std::ops::Range<u64> {
        let first = work.slba >> self.page_shift;
        let end = (work.slba + work.blocks).div_ceil(1 << self.page_shift);
        first..end.max(first)
    }

    /// Returns the instance that has a page, and the page's number there.
    fn instance_of(&self, page: u64) -> (usize, u32) {
        let instances = self.instances.len() as u64;
        // Pages beyond the map's numbers are mapped nowhere.
        let logical = u32::try_from(page / instances).unwrap_or(u32::MAX);
        ((page % instances) as usize, logical)
    }

    fn read(&mut self, work: &Work, now: u64) -> u64 {
        let now = now.saturating_add(self.read_overhead);
        let there = self.fetch(work, now);
        self.link.transfer(there, work.blocks * self.block_bytes)
    }

    /// Reads blocks from flash. Returns when they are with the controller.
    fn fetch(&mut self, work: &Work, now: u64) -> u64 {
        let pages = self.pages(work);
        // Less than a page is read of one that holds all of them.
        let bytes = PAGE.min(work.blocks * self.block_bytes);
        let instances = self.instances.len() as u64;
        let mut there = now;
        // Each instance in turn, so that what a die reads at once is found to lie together.
        for first in (pages.start..pages.end).take(self.instances.len()) {
            let (instance, logical) = self.instance_of(first);
            let count = (pages.end - first).div_ceil(instances) as u32;
            let mine = logical..logical.saturating_add(count);
            if let Some(instance) = self.instances.get(instance) {
                there = there.max(fetch(instance, &mut self.flash, mine, bytes, now));
            }
        }
        there
    }

    fn write(&mut self, work: &Work, now: u64) -> u64 {
        let now = now.saturating_add(self.write_overhead);
        let sent = self.link.transfer(now, work.blocks * self.block_bytes);
        let page_blocks = 1 << self.page_shift;
        let end = work.slba + work.blocks;
        let mut done = sent;
        for page in self.pages(work) {
            let first = page << self.page_shift;
            let mut there = sent;
            if first < work.slba || first + page_blocks > end {
                // The rest of the page is kept, and has to be read for that.
                let rest = Work {
                    access: Access::Read,
                    slba: first,
                    blocks: page_blocks,
                };
                there = self.fetch(&rest, sent);
            }
            let room = self.flash.buffer.admit(there, PAGE);
            let (instance, logical) = self.instance_of(page);
            if let Some(instance) = self.instances.get_mut(instance) {
                let (ftl, mut flash) = instance.flash(&mut self.flash, room);
                ftl.write(logical, &mut flash);
            }
            done = done.max(room);
        }
        done
    }

    /// Pages that are deallocated in part stay as they are.
    fn deallocate(&mut self, work: &Work, now: u64) -> u64 {
        let first = work.slba.div_ceil(1 << self.page_shift);
        for page in first..(work.slba + work.blocks) >> self.page_shift {
            let (instance, logical) = self.instance_of(page);
            if let Some(instance) = self.instances.get_mut(instance) {
                instance.ftl.deallocate(logical);
            }
        }
        now.saturating_add(self.write_overhead)
    }

    fn flush(&mut self, now: u64) -> u64 {
        for instance in &mut self.instances {
            let (ftl, mut flash) = instance.flash(&mut self.flash, now);
            ftl.flush(&mut flash);
        }
        self.flash.buffer.programmed().max(now)
    }
}

/// Reads pages of one instance, so many bytes of each. Returns when they are with the controller.
fn fetch(
    instance: &Instance,
    flash: &mut Flash,
    pages: std::ops::Range<u32>,
    bytes: u64,
    now: u64,
) -> u64 {
    let Instance { ftl, first_die, .. } = instance;
    let geometry = ftl.geometry();
    let mut read = |(page, bytes): (FlashPage, u64)| {
        flash.read(first_die + geometry.die(page) as usize, now, bytes)
    };
    let mut there = now;
    let mut group: Option<(FlashPage, u64)> = None;
    for logical in pages {
        // The drive's memory serves pages that were never written, and those that wait to be programmed.
        let Some(found) = ftl.find(logical).filter(|page| !ftl.is_buffered(*page)) else {
            continue;
        };
        match &mut group {
            Some((first, length)) if geometry.read_group(*first) == geometry.read_group(found) => {
                *length += bytes;
            }
            _ => {
                if let Some(complete) = group.replace((found, bytes)) {
                    there = there.max(read(complete));
                }
            }
        }
    }
    group.map_or(there, |last| there.max(read(last)))
}

#[cfg(test)]
mod tests;

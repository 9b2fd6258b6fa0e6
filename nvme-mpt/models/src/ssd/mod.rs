//! `model = "ssd"`: a drive of NAND flash, with a page-mapped translation layer and garbage collection.
//!
//! Logical pages of 4 KiB are distributed in rotation to the FTL instances, each of which has dies of its own. A write
//! completes when it is in the write buffer. A full program unit in the buffer is transferred over its die's channel and
//! programmed, which frees its buffer space. A read waits for its die, the channel and the link. Copies and erasures of garbage
//! collection occupy dies and channels like commands of the host, and so delay further commands.
//!
//! `geometry` defines on which die each page is. `ftl` maps pages and collects garbage. `flash` connects an instance to its
//! dies. `persistence` saves the mapping next to a drive's file.

mod flash;
mod ftl;
mod geometry;
mod persistence;

pub use ftl::FlashWear;
pub(crate) use persistence::state_path;

use super::bandwidth_tokens::BandwidthTokens;
use super::flash::{FlashParts, ModelledFlash};
use super::profile::SsdProfile;
use super::time::TickUnit;
use super::{MediaAccess, MediaWork};
use flash::{OpenProgramUnit, TimedFlash};
use ftl::Ftl;
use geometry::{DiePageCounts, FlashGeometry, FlashPage, PAGE};

/// Maximum number of logical pages of an FTL instance. It keeps the numbers of flash pages within 32 bits.
const INSTANCE_PAGES_MAX: u64 = 1 << 30;

/// An FTL instance with its part of the flash.
#[derive(Debug)]
struct FtlInstance {
    ftl: Ftl,
    units: OpenProgramUnit,
    first_die: usize,
}

impl FtlInstance {
    fn flash<'a>(
        &'a mut self,
        flash: &'a mut ModelledFlash,
        now: u64,
    ) -> (&'a mut Ftl, TimedFlash<'a>) {
        let timed = TimedFlash {
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
    fn flash_parts(&self) -> FlashParts {
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

/// Timing model of a flash drive, which all queues of the drive share.
#[derive(Debug)]
pub(crate) struct SsdModel {
    /// Number of logical blocks in a logical page, as a base-2 logarithm.
    page_shift: u32,
    block_bytes: u64,
    read_overhead: u64,
    write_overhead: u64,
    link: BandwidthTokens,
    flash: ModelledFlash,
    instances: Vec<FtlInstance>,
}

impl SsdModel {
    /// Creates the model. Loading the profile has checked it.
    pub(super) fn new(
        profile: &SsdProfile,
        blocks: u64,
        lba_shift: u8,
        timebase: TickUnit,
    ) -> Self {
        let page_shift = PAGE.ilog2() - u32::from(lba_shift);
        let instances = u64::from(profile.instances);
        let pages = blocks.div_ceil(1 << page_shift).div_ceil(instances);
        let dies = u64::from(profile.channels) * u64::from(profile.dies_per_channel) / instances;
        let in_pages = |bytes: u64| (bytes / PAGE) as u32;
        let geometry = FlashGeometry::new(
            dies as u32,
            DiePageCounts {
                read: in_pages(profile.flash_page.0),
                unit: in_pages(profile.program_unit.0),
                block: in_pages(profile.block.0),
            },
            // Pages beyond this maximum are never mapped, so they cost as much as unwritten pages.
            pages.min(INSTANCE_PAGES_MAX) as u32,
            profile.over_provisioning.into(),
        );
        let instance = |index| FtlInstance {
            ftl: Ftl::new(geometry),
            units: OpenProgramUnit::default(),
            first_die: (index * dies) as usize,
        };
        Self {
            page_shift,
            block_bytes: 1 << lba_shift,
            read_overhead: timebase.span_ticks(profile.read_overhead),
            write_overhead: timebase.span_ticks(profile.write_overhead),
            link: BandwidthTokens::new(profile.link_bandwidth.0, timebase),
            flash: ModelledFlash::new(&profile.flash_parts(), timebase),
            instances: (0..instances).map(instance).collect(),
        }
    }

    /// Returns the wear of all instances together.
    pub(crate) fn wear(&self) -> FlashWear {
        let mut sum = FlashWear::default();
        for instance in &self.instances {
            let wear = instance.ftl.wear();
            sum.host_pages += wear.host_pages;
            sum.copied_pages += wear.copied_pages;
            sum.padded_pages += wear.padded_pages;
            sum.erased_blocks += wear.erased_blocks;
        }
        sum
    }

    /// Starts a batch of commands that arrive at `now`. Commands of further batches must not arrive before `now`.
    pub(super) fn begin_batch(&mut self, now: u64) {
        self.link.drop_before(now);
        self.flash.drop_before(now);
    }

    /// Computes the time when work that arrives at `now` completes.
    pub(super) fn due_time(&mut self, work: &MediaWork, now: u64) -> u64 {
        match work.access {
            MediaAccess::Read => self.read(work, now),
            MediaAccess::Write => self.write(work, now),
            MediaAccess::Deallocate => self.deallocate(work, now),
            MediaAccess::Flush => self.flush(now),
        }
    }

    /// Returns the logical pages that contain the work's blocks.
    fn page_range(&self, work: &MediaWork) -> std::ops::Range<u64> {
        let first = work.slba >> self.page_shift;
        let end = (work.slba + work.blocks).div_ceil(1 << self.page_shift);
        first..end.max(first)
    }

    /// Returns the FTL instance of a logical page, and the page's number within this instance.
    fn locate_page(&self, page: u64) -> (usize, u32) {
        let instances = self.instances.len() as u64;
        // Pages beyond the maximum of an instance are never mapped.
        let logical = u32::try_from(page / instances).unwrap_or(u32::MAX);
        ((page % instances) as usize, logical)
    }

    fn read(&mut self, work: &MediaWork, now: u64) -> u64 {
        let now = now.saturating_add(self.read_overhead);
        let arrived_at = self.read_flash(work, now);
        self.link
            .transfer(arrived_at, work.blocks * self.block_bytes)
    }

    /// Reads blocks from flash. Returns the time when the controller has their data.
    fn read_flash(&mut self, work: &MediaWork, now: u64) -> u64 {
        let pages = self.page_range(work);
        // Of blocks smaller than a page, only the blocks' bytes are transferred.
        let bytes = PAGE.min(work.blocks * self.block_bytes);
        let instances = self.instances.len() as u64;
        let mut arrived_at = now;
        // Processes one instance after the other, so that pages that a die reads together are adjacent.
        for first in (pages.start..pages.end).take(self.instances.len()) {
            let (instance, logical) = self.locate_page(first);
            let count = (pages.end - first).div_ceil(instances) as u32;
            let mine = logical..logical.saturating_add(count);
            if let Some(instance) = self.instances.get(instance) {
                arrived_at =
                    arrived_at.max(read_instance(instance, &mut self.flash, mine, bytes, now));
            }
        }
        arrived_at
    }

    fn write(&mut self, work: &MediaWork, now: u64) -> u64 {
        let now = now.saturating_add(self.write_overhead);
        let sent = self.link.transfer(now, work.blocks * self.block_bytes);
        let page_blocks = 1 << self.page_shift;
        let end = work.slba + work.blocks;
        let mut done = sent;
        for page in self.page_range(work) {
            let first = page << self.page_shift;
            let mut arrived_at = sent;
            if first < work.slba || first + page_blocks > end {
                // A write of a part of a page reads the page's other blocks first.
                let rest = MediaWork {
                    access: MediaAccess::Read,
                    slba: first,
                    blocks: page_blocks,
                };
                arrived_at = self.read_flash(&rest, sent);
            }
            let space = self.flash.buffer.reserve(arrived_at, PAGE);
            let (instance, logical) = self.locate_page(page);
            if let Some(instance) = self.instances.get_mut(instance) {
                let (ftl, mut flash) = instance.flash(&mut self.flash, space);
                ftl.write(logical, &mut flash);
            }
            done = done.max(space);
        }
        done
    }

    /// Deallocates logical pages. A page of which only a part is deallocated stays mapped.
    fn deallocate(&mut self, work: &MediaWork, now: u64) -> u64 {
        let first = work.slba.div_ceil(1 << self.page_shift);
        for page in first..(work.slba + work.blocks) >> self.page_shift {
            let (instance, logical) = self.locate_page(page);
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
        self.flash.buffer.programmed_at().max(now)
    }
}

/// Reads `bytes` bytes of each page of an FTL instance. Returns the time when the controller has their data.
fn read_instance(
    instance: &FtlInstance,
    flash: &mut ModelledFlash,
    pages: std::ops::Range<u32>,
    bytes: u64,
    now: u64,
) -> u64 {
    let FtlInstance { ftl, first_die, .. } = instance;
    let geometry = ftl.geometry();
    let mut read = |(page, bytes): (FlashPage, u64)| {
        flash.read(first_die + geometry.die(page) as usize, now, bytes)
    };
    let mut arrived_at = now;
    let mut group: Option<(FlashPage, u64)> = None;
    for logical in pages {
        // The drive's memory serves unwritten pages and pages in the write buffer.
        let Some(found) = ftl.find(logical).filter(|page| !ftl.is_buffered(*page)) else {
            continue;
        };
        match &mut group {
            Some((first, length)) if geometry.read_group(*first) == geometry.read_group(found) => {
                *length += bytes;
            }
            _ => {
                if let Some(complete) = group.replace((found, bytes)) {
                    arrived_at = arrived_at.max(read(complete));
                }
            }
        }
    }
    group.map_or(arrived_at, |last| arrived_at.max(read(last)))
}

#[cfg(test)]
mod tests;

//! A guest that tries to access memory outside of its device's mappings and blocks outside of its range, with every kind of
//! data pointer, range and race.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use nvme_mpt_tests::bar::Bar;
use nvme_mpt_tests::command::{DataPointer, FUA, Sqe, copy_range, dsm_range, io};
use nvme_mpt_tests::controller::{Config, Controller, QueueOptions};
use nvme_mpt_tests::doorbell::DoorbellMode;
use nvme_mpt_tests::memory::{DmaBuffer, GuestMemory, PAGE_SIZE};
use nvme_mpt_tests::prp;
use nvme_mpt_tests::queue::QueuePair;
use nvme_mpt_tests::rng::Rng;
use nvme_mpt_tests::sgl::{self, Descriptor, data_block, last_segment, segment};
use nvme_mpt_tests::vfio_user::VfioUserBar;

use crate::fixture::{Failure, expect};

const PAGE: u64 = PAGE_SIZE as u64;
/// Region that is mapped for the device. Memory below and above is not mapped.
const BASE: u64 = 1 << 32;
const SIZE: u64 = 8 << 20;
const HIDDEN: u64 = BASE + SIZE;
const HIDDEN_SIZE: u64 = 1 << 20;
const TIMEOUT: Duration = Duration::from_secs(30);
/// Byte that fills memory which the device must not write.
const SENTINEL: u8 = 0xA5;
/// Number of commands whose data pointer changes while the device reads it.
const RACES: u64 = 400;

/// Numbers of attempts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AttemptCounts {
    pub(crate) commands: u64,
    pub(crate) refused: u64,
}

pub(crate) struct HostileGuest {
    memory: GuestMemory,
    controller: Controller,
    queue: QueuePair,
    /// Guest memory that is not mapped for the device.
    unmapped: DmaBuffer,
    /// Mapped memory that no valid command uses.
    unused: DmaBuffer,
    data: DmaBuffer,
    /// Numbers of logical blocks in the range and in a page.
    blocks: u64,
    per_page: u32,
    attempts: AttemptCounts,
}

impl HostileGuest {
    /// Connects to a function with a range of `range` bytes.
    pub(crate) fn attach(socket: &Path, range: u64) -> Result<Self, Failure> {
        let memory = GuestMemory::new(&[(BASE, SIZE)])?;
        let bar = VfioUserBar::attach(socket, &memory)?;
        let hidden = memory.add_region(HIDDEN, HIDDEN_SIZE)?;
        let hidden = memory.alloc_at(hidden.gpa, HIDDEN_SIZE as usize)?;
        hidden.fill(SENTINEL);
        let unnamed = memory.alloc(16 * PAGE_SIZE)?;
        unnamed.fill(SENTINEL);
        let config = Config {
            doorbells: DoorbellMode::Shadow,
            ..Config::default()
        };
        let bar: Arc<dyn Bar> = Arc::new(bar);
        let mut controller = Controller::attach(bar, memory.clone(), config, 1)?;
        let queue = controller.create_queue_pair(1, &QueueOptions::polled(64))?;
        let namespace = controller.identify_namespace(1)?;
        let block = u64::from(namespace.block_size);
        expect(namespace.nsze * block == range, || {
            format!(
                "A namespace of {} blocks for a range of {range} bytes",
                namespace.nsze
            )
        })?;
        let data = memory.alloc(64 * PAGE_SIZE)?;
        Ok(Self {
            memory,
            controller,
            queue,
            unmapped: hidden,
            unused: unnamed,
            data,
            blocks: namespace.nsze,
            per_page: (PAGE / block) as u32,
            attempts: AttemptCounts::default(),
        })
    }

    /// Makes every attempt once. Each invalid command must be refused.
    pub(crate) fn try_everything(&mut self) -> Result<AttemptCounts, Failure> {
        self.pointers()?;
        self.lists()?;
        self.descriptors()?;
        self.segments()?;
        self.ranges()?;
        self.ranges_in_data()?;
        self.race_with_a_list()?;
        // If the drive's transfer limit is below a guest's, commands are split, and SGLs are not offered.
        if self.controller.identity()?.sgl() {
            self.race_with_a_segment()?;
        }
        self.race_with_ranges()?;
        self.expect_untouched()?;
        Ok(self.attempts)
    }

    /// Checks that guest memory contains none of these block prefixes.
    pub(crate) fn expect_no_secrets(&self, secrets: &HashSet<[u8; 16]>) -> Result<(), Failure> {
        let mut bytes = vec![0; MIB];
        for gpa in (BASE..BASE + SIZE).step_by(MIB) {
            self.memory.read(gpa, &mut bytes)?;
            let found = bytes.chunks(16).position(|chunk| {
                chunk
                    .first_chunk()
                    .is_some_and(|chunk| secrets.contains(chunk))
            });
            expect(found.is_none(), || {
                let at = gpa + 16 * found.unwrap_or(0) as u64;
                format!("The guest has another's data in its memory, at {at:#x}")
            })?;
        }
        Ok(())
    }

    pub(crate) fn end(mut self) -> Result<(), Failure> {
        Ok(self.controller.disable()?)
    }

    /// Runs a command. Returns whether it succeeded.
    fn command(&mut self, sqe: Sqe) -> Result<bool, Failure> {
        let status = self.queue.submit_and_wait(sqe, TIMEOUT)?.status();
        self.attempts.commands += 1;
        self.attempts.refused += u64::from(!status.is_success());
        Ok(status.is_success())
    }

    /// Checks that commands with `pages` pages of data, in both directions, are refused.
    fn expect_refused(
        &mut self,
        what: &str,
        pointer: DataPointer,
        pages: u32,
    ) -> Result<(), Failure> {
        for opcode in [io::READ, io::WRITE, io::COMPARE] {
            let sqe = Sqe::range(opcode, 1, 0, pages * self.per_page).with_data(pointer);
            let executed = self.command(sqe)?;
            expect(!executed, || {
                format!("{what}, opcode {opcode:#x}: it was executed")
            })?;
        }
        self.expect_untouched()
    }

    fn expect_untouched(&self) -> Result<(), Failure> {
        for (name, memory) in [
            ("not given to", &self.unmapped),
            ("not named to", &self.unused),
        ] {
            let bytes = memory.to_vec(0, memory.len());
            expect(bytes.iter().all(|byte| *byte == SENTINEL), || {
                format!("Memory was written that was {name} the device")
            })?;
        }
        Ok(())
    }

    fn list(&self, entries: &[u64]) -> Result<DmaBuffer, Failure> {
        let list = self.memory.alloc((8 * entries.len()).max(PAGE_SIZE))?;
        let bytes: Vec<u8> = entries
            .iter()
            .flat_map(|entry| entry.to_le_bytes())
            .collect();
        list.write(0, &bytes);
        Ok(list)
    }

    fn descriptor_list(&self, list: &[Descriptor]) -> Result<DmaBuffer, Failure> {
        let words: Vec<u64> = list.iter().flatten().copied().collect();
        self.list(&words)
    }

    /// PRP1 and PRP2, outside of memory and misaligned (NVMe Base 2.0, 4.1.1).
    fn pointers(&mut self) -> Result<(), Failure> {
        let (data, unnamed) = (self.data.gpa(), self.unused.gpa());
        for gpa in outside_addresses() {
            self.expect_refused("PRP1", DataPointer::prp(gpa, 0), 1)?;
            self.expect_refused("PRP2", DataPointer::prp(data, gpa), 2)?;
        }
        for offset in [1, 2, 3, 4095] {
            self.expect_refused(
                "PRP1",
                DataPointer::prp(unnamed + offset, unnamed + PAGE),
                1,
            )?;
        }
        for offset in [1, 4, 512, 4092] {
            self.expect_refused("PRP2", DataPointer::prp(data, unnamed + offset), 2)?;
        }
        Ok(())
    }

    /// PRP lists and their entries.
    fn lists(&mut self) -> Result<(), Failure> {
        let data = self.data.gpa();
        for gpa in outside_addresses()
            .into_iter()
            .chain([self.unused.gpa() + 8])
        {
            for bad in 0..3 {
                let mut entries: Vec<u64> = (1..4).map(|page| data + page * PAGE).collect();
                entries[bad] = gpa;
                let list = self.list(&entries)?;
                self.expect_refused("a PRP list's entry", DataPointer::prp(data, list.gpa()), 4)?;
            }
        }
        for gpa in outside_addresses() {
            self.expect_refused("a PRP list", DataPointer::prp(data, gpa), 4)?;
        }
        // The list continues in memory that is not mapped for the device.
        let edge = self.memory.alloc_at(BASE + SIZE - PAGE, PAGE_SIZE)?;
        edge.write(PAGE_SIZE - 16, &data.to_le_bytes());
        edge.write(PAGE_SIZE - 8, &HIDDEN.to_le_bytes());
        let pointer = DataPointer::prp(data, edge.gpa() + PAGE - 16);
        self.expect_refused("a PRP list that goes on outside", pointer, 4)?;
        // A list that links to itself. The device follows it only for the length of the command.
        let list = self.list(&vec![data; PAGE_SIZE / 8])?;
        list.write(PAGE_SIZE - 8, &list.gpa().to_le_bytes());
        let pointer = DataPointer::prp(data, list.gpa() + PAGE - 8);
        let endless = Sqe::write(1, 0, 17 * self.per_page).with_data(pointer);
        let executed = self.command(endless)?;
        expect(executed, || {
            "A list that names itself is no list".to_owned()
        })
    }

    /// SGL Data Blocks (4.1.2).
    fn descriptors(&mut self) -> Result<(), Failure> {
        let data = self.data.gpa();
        let len = PAGE as u32;
        for gpa in outside_addresses()
            .into_iter()
            .chain([BASE - 1, HIDDEN - 8, u64::MAX - 4094])
        {
            self.expect_refused("an SGL", DataPointer::sgl(data_block(gpa, len)), 1)?;
            let list =
                self.descriptor_list(&[data_block(data, 1024), data_block(gpa, len - 1024)])?;
            let pointer = DataPointer::sgl(last_segment(list.gpa(), 32));
            self.expect_refused("an SGL's second block", pointer, 1)?;
        }
        for wrong in [1, 512, len - 1, len + 1, u32::MAX] {
            self.expect_refused(
                "an SGL's length",
                DataPointer::sgl(data_block(data, wrong)),
                1,
            )?;
        }
        let wrapping = [
            data_block(data, 1 << 31),
            data_block(data, 1 << 31),
            data_block(data, len),
        ];
        let list = self.descriptor_list(&wrapping)?;
        let pointer = DataPointer::sgl(last_segment(list.gpa(), 48));
        self.expect_refused("lengths that wrap", pointer, 1)?;
        // Offset, Transport, Keyed, vendor specific and undefined descriptor types.
        for kind in (1..16).filter(|kind| ![2, 3].contains(kind)) {
            let pointer = DataPointer::sgl(sgl::descriptor(data, len, kind, 0));
            self.expect_refused("an SGL's type", pointer, 1)?;
        }
        for sub in 1..16 {
            let pointer = DataPointer::sgl(sgl::descriptor(data, len, 0, sub));
            self.expect_refused("an SGL's sub type", pointer, 1)?;
        }
        Ok(())
    }

    /// SGL segments.
    fn segments(&mut self) -> Result<(), Failure> {
        let data = self.data.gpa();
        for gpa in outside_addresses().into_iter().chain([HIDDEN - 16, !15]) {
            for link in [segment(gpa, 32), last_segment(gpa, 32)] {
                self.expect_refused("a segment", DataPointer::sgl(link), 1)?;
            }
            let list = self.descriptor_list(&[data_block(data, 512), last_segment(gpa, 32)])?;
            let pointer = DataPointer::sgl(segment(list.gpa(), 32));
            self.expect_refused("a segment in a segment", pointer, 1)?;
        }
        let list = self.descriptor_list(&[data_block(data, 512); 8])?;
        for len in [0, 15, 17, 31, 1 << 31, !15] {
            let pointer = DataPointer::sgl(last_segment(list.gpa(), len));
            self.expect_refused("a segment's length", pointer, 1)?;
        }
        let loops = self.descriptor_list(&[data_block(data, 0); 2])?;
        let back: Vec<u8> = segment(loops.gpa(), 32)
            .iter()
            .flat_map(|w| w.to_le_bytes())
            .collect();
        loops.write(16, &back);
        let pointer = DataPointer::sgl(segment(loops.gpa(), 32));
        self.expect_refused("segments in a loop", pointer, 1)
    }

    /// Blocks beyond the range, in the command itself.
    fn ranges(&mut self) -> Result<(), Failure> {
        for (slba, count) in ranges_beyond(self.blocks) {
            for opcode in [
                io::READ,
                io::WRITE,
                io::COMPARE,
                io::VERIFY,
                io::WRITE_ZEROES,
                io::WRITE_UNCORRECTABLE,
            ] {
                for flags in [0, FUA] {
                    let pages = prp::buffer(&self.data, 0, 8 * PAGE_SIZE)?;
                    let sqe = Sqe::range(opcode, 1, slba, count).with_data(pages.pointer);
                    let executed = self.command(sqe.with_cdw(12, sqe.cdw(12) | flags))?;
                    expect(!executed, || {
                        format!("Opcode {opcode:#x} at {slba:#x}+{count}")
                    })?;
                }
            }
        }
        // The drive's other namespaces, and the broadcast identifier.
        for nsid in [0, 2, 3, u32::MAX - 1, u32::MAX] {
            let pages = prp::buffer(&self.data, 0, PAGE_SIZE)?;
            for opcode in [io::READ, io::WRITE, io::WRITE_ZEROES] {
                let sqe = Sqe::range(opcode, nsid, 0, self.per_page).with_data(pages.pointer);
                let executed = self.command(sqe)?;
                expect(!executed, || {
                    format!("Opcode {opcode:#x} in namespace {nsid:#x}")
                })?;
            }
        }
        Ok(())
    }

    /// Runs a command with a list of ranges as data.
    fn with_bytes(&mut self, sqe: Sqe, bytes: &[u8]) -> Result<bool, Failure> {
        let data = self.memory.alloc(bytes.len())?;
        data.write(0, bytes);
        let prepared = prp::buffer(&data, 0, bytes.len())?;
        self.command(sqe.with_data(prepared.pointer))
    }

    /// Blocks beyond the range, in the ranges of Dataset Management and Copy.
    fn ranges_in_data(&mut self) -> Result<(), Failure> {
        for (slba, count) in ranges_beyond(self.blocks) {
            for before in [0, 1, 31] {
                let mut bytes = dsm_range(self.blocks / 2, 1).repeat(before);
                bytes.extend(dsm_range(slba, count));
                let executed = self.with_bytes(Sqe::deallocate(1, before as u32 + 1), &bytes)?;
                expect(!executed, || format!("{slba:#x}+{count} was deallocated"))?;
                let mut bytes = copy_range(0, 1).repeat(before);
                bytes.extend(copy_range(slba, count));
                let sqe = Sqe::copy(1, self.blocks / 2, before as u32 + 1);
                let executed = self.with_bytes(sqe, &bytes)?;
                expect(!executed, || format!("{slba:#x}+{count} was copied"))?;
            }
            let executed = self.with_bytes(Sqe::copy(1, slba, 1), &copy_range(0, count))?;
            expect(!executed, || format!("{slba:#x}+{count} was copied to"))?;
        }
        Ok(())
    }

    /// Runs `command` repeatedly while `change` modifies the data that the command points to.
    fn race(
        &mut self,
        what: &str,
        command: impl Fn(u64) -> Sqe,
        change: impl Fn(&mut Rng) + Sync,
    ) -> Result<(), Failure> {
        let stop = AtomicBool::new(false);
        let raced = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut rng = Rng::new(9);
                while !stop.load(Ordering::Relaxed) {
                    change(&mut rng);
                    if rng.below(256) == 0 {
                        std::thread::sleep(Duration::from_micros(20));
                    }
                }
            });
            let result = (0..RACES).try_fold(0, |executed, round| {
                Ok::<_, Failure>(executed + u64::from(self.command(command(round))?))
            });
            stop.store(true, Ordering::Relaxed);
            result
        })?;
        expect(raced > 0, || {
            format!("No command got through with {what} that changes: this tests nothing")
        })?;
        self.expect_untouched()
    }

    fn race_with_a_list(&mut self) -> Result<(), Failure> {
        const ENTRIES: u64 = 15;
        let (data, unnamed) = (self.data.gpa(), self.unused.gpa());
        let entries: Vec<u64> = (1..=ENTRIES).map(|page| data + page * PAGE).collect();
        let list = self.list(&entries)?;
        let cells = list.cells::<AtomicU64>();
        let pointer = DataPointer::prp(data, list.gpa());
        let blocks = (ENTRIES as u32 + 1) * self.per_page;
        self.race(
            "a PRP list",
            |round| Sqe::range(opcode(round), 1, 0, blocks).with_data(pointer),
            |rng| {
                let at = rng.below(ENTRIES);
                let bad = [HIDDEN, BASE - PAGE, unnamed + 4][rng.below(3) as usize];
                cells[at as usize].store(bad, Ordering::Relaxed);
                cells[at as usize].store(data + (at + 1) * PAGE, Ordering::Relaxed);
            },
        )
    }

    fn race_with_a_segment(&mut self) -> Result<(), Failure> {
        let data = self.data.gpa();
        let list = self.descriptor_list(&[data_block(data, PAGE as u32 / 8); 8])?;
        let cells = list.cells::<AtomicU64>();
        let pointer = DataPointer::sgl(last_segment(list.gpa(), 128));
        let blocks = self.per_page;
        self.race(
            "an SGL segment",
            |round| Sqe::range(opcode(round), 1, 0, blocks).with_data(pointer),
            |rng| {
                let at = 2 * rng.below(8) as usize;
                match rng.below(3) {
                    0 => cells[at].store(HIDDEN, Ordering::Relaxed),
                    1 => cells[at + 1].store(u64::MAX, Ordering::Relaxed),
                    _ => cells[at + 1].store(segment(data, 512)[1], Ordering::Relaxed),
                }
                cells[at].store(data, Ordering::Relaxed);
                cells[at + 1].store(PAGE / 8, Ordering::Relaxed);
            },
        )
    }

    /// Deallocates ranges that briefly point to a neighbour's blocks.
    fn race_with_ranges(&mut self) -> Result<(), Failure> {
        let good = self.blocks / 2;
        let bad = [
            self.blocks,
            self.blocks + 64,
            self.blocks.wrapping_neg(),
            u64::MAX - 4,
        ];
        let data = self.memory.alloc(PAGE_SIZE)?;
        data.write(0, &dsm_range(good, 8).repeat(16));
        let cells = data.cells::<AtomicU64>();
        let pointer = prp::buffer(&data, 0, 256)?.pointer;
        self.race(
            "ranges",
            |_| Sqe::deallocate(1, 16).with_data(pointer),
            |rng| {
                // SLBA is the second 64-bit word of a range.
                let at = 2 * rng.below(16) as usize + 1;
                cells[at].store(bad[rng.below(4) as usize], Ordering::Relaxed);
                cells[at].store(good, Ordering::Relaxed);
            },
        )
    }
}

const MIB: usize = 1 << 20;

fn opcode(round: u64) -> u8 {
    [io::READ, io::WRITE][round as usize % 2]
}

/// Returns addresses with at least one byte outside of the device's mappings.
fn outside_addresses() -> [u64; 6] {
    [0, BASE - PAGE, HIDDEN, HIDDEN + PAGE, !(PAGE - 1), 1 << 63]
}

/// Returns ranges (first block, number of blocks) beyond a namespace of `blocks` blocks.
fn ranges_beyond(blocks: u64) -> [(u64, u32); 10] {
    [
        (blocks, 1),
        (blocks - 1, 2),
        (blocks - 7, 8),
        (blocks + 1, 1),
        (2 * blocks, 1),
        (u64::MAX, 1),
        (u64::MAX - 6, 8),
        (blocks.wrapping_neg(), 1),
        // Byte addresses that wrap around into the range.
        (1 << 55, 1),
        (1 << 52, 8),
    ]
}

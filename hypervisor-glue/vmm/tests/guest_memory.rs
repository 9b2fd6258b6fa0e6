//! Guest memory of the crate vm-memory: a function in a VMM follows its changes, and marks the pages that it writes.

#[expect(dead_code, reason = "the example's `main`")]
#[path = "../examples/minimal.rs"]
mod minimal;

use std::fs::File;
use std::io::Write;
use std::sync::Arc;

use nvme_mpt_memory::memfd;
use nvme_mpt_vmm::options::FunctionConfig;
use nvme_mpt_vmm::{FunctionDevice, Vmm, poller_pool};
use vm_memory::bitmap::{AtomicBitmap, Bitmap};
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryAtomic, GuestMemoryMmap, GuestRegionMmap,
};

use minimal::NoHypervisor;
use minimal::guest::Guest;

const LEN: usize = 1 << 20;
/// Guest address of memory that comes and goes.
const PLUGGED: u64 = 0x100_0000;

#[test]
fn the_minimal_vmm_reads_what_is_on_the_drive() {
    let mut drive = tempfile::NamedTempFile::new().unwrap();
    drive.write_all(b"the first block").unwrap();
    drive.as_file().set_len(1 << 20).unwrap();
    let state = tempfile::tempdir().unwrap();
    let path = drive.path().display().to_string();
    let (model, block) = minimal::read_first_block(&path, state.path()).unwrap();
    assert!(model.contains("nvme-mpt"), "{model}");
    assert!(block.starts_with(b"the first block\0"));
    minimal::read_first_block("memory:64M", state.path()).unwrap();
}

fn function() -> FunctionDevice {
    let vmm: Arc<dyn Vmm> = Arc::new(NoHypervisor::new().unwrap());
    let pollers = poller_pool(vmm.clone());
    let config = FunctionConfig::from_keys(|key| (key == "path").then(|| "memory:1M".to_owned()));
    nvme_mpt_vmm::start(&config.unwrap(), "nvme0", vmm, &pollers).unwrap()
}

/// Makes a region, in a file or anonymous.
fn region(at: u64, is_file: bool) -> Arc<GuestRegionMmap> {
    let file = is_file.then(|| {
        let file = memfd(c"guest", 2 * LEN as u64).unwrap();
        FileOffset::new(File::from(file), LEN as u64)
    });
    Arc::new(GuestRegionMmap::from_range(GuestAddress(at), LEN, file).unwrap())
}

/// Writes a page to the drive from `at`, and reads it back into the first region.
fn copies(guest: &mut Guest, at: u64) -> bool {
    let text = at.to_le_bytes();
    guest.memory.write_slice(&text, GuestAddress(at)).unwrap();
    if guest.execute(1, [0x01, 1, at as u32, 0, 0, 7]).is_err() {
        return false;
    }
    guest.execute(1, [0x02, 1, 0x8000, 0, 0, 7]).unwrap();
    let mut read = [0; 8];
    let read_back = guest.memory.read_slice(&mut read, GuestAddress(0x8000));
    read_back.unwrap();
    read == text
}

#[test]
fn regions_with_and_without_a_file_come_and_go() {
    for is_file in [false, true] {
        let function = function();
        let first = GuestMemoryMmap::from_arc_regions(vec![region(0, is_file)]).unwrap();
        let atomic = GuestMemoryAtomic::new(first.clone());
        function.set_guest_memory(&atomic).unwrap();
        let mut guest = Guest::boot(Arc::new(function), first.clone()).unwrap();
        assert!(copies(&mut guest, 0x9000));

        let plugged = region(PLUGGED, !is_file);
        let held = Arc::downgrade(&plugged);
        let both = first.insert_region(plugged).unwrap();
        guest.memory = both.clone();
        assert!(
            !copies(&mut guest, PLUGGED),
            "the function does not know it yet"
        );
        atomic.lock().unwrap().replace(both);
        guest.function.set_guest_memory(&atomic).unwrap();
        assert!(copies(&mut guest, PLUGGED));
        guest.function.set_guest_memory(&atomic).unwrap();
        assert!(copies(&mut guest, PLUGGED), "nothing has changed");

        // Another region at the same address, as if memory was unplugged and plugged between two calls.
        let other = first.insert_region(region(PLUGGED, is_file)).unwrap();
        guest.function.set_guest_memory(&other).unwrap();
        guest.memory = other;
        assert!(copies(&mut guest, PLUGGED));

        atomic.lock().unwrap().replace(first.clone());
        guest.function.set_guest_memory(&atomic).unwrap();
        assert!(!copies(&mut guest, PLUGGED), "it was unplugged");
        assert!(held.upgrade().is_none(), "no function has it any more");
        assert!(copies(&mut guest, 0x9000));
        guest.function.stop().unwrap();
    }
}

#[test]
fn written_pages_are_marked_in_the_memorys_own_bitmap() {
    type TrackedMemory = GuestMemoryMmap<AtomicBitmap>;
    let file = memfd(c"guest", 2 * LEN as u64).unwrap();
    let file = FileOffset::new(File::from(file), 0);
    let ranges = [(GuestAddress(0), 2 * LEN, Some(file.clone()))];
    // The guest accesses the file by its own mapping, so that only the function's writes are marked.
    let memory = GuestMemoryMmap::from_ranges_with_files(&ranges).unwrap();
    let tracked = TrackedMemory::from_ranges_with_files(ranges).unwrap();
    let function = function();
    function.set_guest_memory(&tracked).unwrap();
    let mut guest = Guest::boot(Arc::new(function), memory).unwrap();
    guest.function.mark_dirty_pages(&tracked).unwrap_err();
    guest.function.start_dirty_log().unwrap();
    guest.execute(1, [0x02, 1, 0x2_0000, 0, 0, 7]).unwrap();
    guest.function.mark_dirty_pages(&tracked).unwrap();
    let region = tracked.remove_region(GuestAddress(0), 2 * LEN as u64);
    let (_, region) = region.unwrap();
    let dirty = (0..2 * LEN).step_by(4096);
    let dirty: Vec<usize> = dirty
        .filter(|page| (**region).bitmap().dirty_at(*page))
        .collect();
    // The completion queue, and the data.
    assert_eq!(dirty, [0x4000, 0x2_0000]);
    region.bitmap().reset();
    guest.function.mark_dirty_pages(&tracked).unwrap();
    assert!(!(**region).bitmap().dirty_at(0x2_0000), "once is enough");
}

//! A VM's memory behind an IOMMU: limits on its size and mappings, and the time to map it.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

use nvme_guest::memory_account::MemoryAccount;
use nvme_guest::{DmaError, DmaWindow, Gpa, MemoryLimit, MemoryRefusal, MemoryRegion};
use nvme_mpt_memory::{Mapping, MappingAccess};
use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::controller::{Config, Controller, QueueOptions};
use nvme_mpt_tests::doorbell::DoorbellMode;
use nvme_mpt_tests::drive::Options;
use nvme_mpt_tests::memory::PAGE_SIZE;
use nvme_mpt_tests::status::SUCCESS;
use nvme_spec::ids::QueueId;

use crate::common::{HANG, Host, LONG, REGION, Setup, UNMAPPED_ADDRESS, queue_pair, status};
use crate::load::Load;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Creates a function's window, on a host that gives no information about its own memory.
fn window(host: &Host, function: &str, limit: Option<u64>) -> DmaWindow {
    let window = DmaWindow::new(host.drive.controller().iova_space().clone());
    let window = window.with_account(MemoryAccount::with_root("/proc/self/fdinfo"));
    window.with_function(function, limit.map(MemoryLimit::Configured))
}

/// Creates a sparse memory file.
fn sparse(bytes: u64) -> File {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(bytes).unwrap();
    file
}

/// Maps the start of a file at a guest address.
fn map(window: &DmaWindow, file: &File, gpa: u64, len: u64) -> Result<(), DmaError> {
    window.map(MemoryRegion {
        gpa: Gpa(gpa),
        len,
        fd: file.try_clone().unwrap().into(),
        offset: 0,
        readable: true,
        writable: true,
    })
}

/// Maps the same bytes at more and more addresses. Returns the number of mappings and the final error.
fn map_aliases(window: &DmaWindow, file: &File, len: u64) -> (u64, DmaError) {
    for nth in 0.. {
        if let Err(error) = map(window, file, nth * len, len) {
            return (nth, error);
        }
    }
    unreachable!("there is a bound");
}

/// Returns the reason why a map was refused.
#[track_caller]
fn refusal(error: DmaError) -> MemoryRefusal {
    let DmaError::Iommu { source, .. } = error else {
        panic!("{error}");
    };
    let refusal = source.downcast::<MemoryRefusal>();
    refusal.unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn endless_aliases_are_refused_with_numbers() {
    let host = Host::with(Options::default(), LONG);
    let iommu = host.model.model_iommu();
    let before = iommu.mapped_bytes();
    let file = sparse(MIB);
    let hostile = window(&host, "vm-1", Some(64 * MIB));
    let (mapped, error) = map_aliases(&hostile, &file, MIB);
    assert_eq!(mapped, 64);
    let message = nvme_mpt_vmm::report::chain(&error);
    for part in [
        "Function vm-1 has 64M",
        "asks for 1M more",
        "may have 64M (memory-limit)",
        "raise memory-limit=",
    ] {
        assert!(message.contains(part), "{message}");
    }
    let limit = MemoryLimit::Configured(64 * MIB);
    let (function, mapped) = ("vm-1".to_owned(), 64 * MIB);
    let requested = MIB;
    let expected = MemoryRefusal::Limit {
        function,
        mapped,
        requested,
        limit,
    };
    assert_eq!(refusal(error), expected);
    // A refused map leaves no mappings, and an unmap makes space again.
    assert_eq!(iommu.mapped_bytes(), before + 64 * MIB);
    assert_eq!(hostile.unmap(Gpa(5 * MIB), 2 * MIB).unwrap(), 2 * MIB);
    map(&hostile, &file, 5 * MIB, MIB).unwrap();
    map(&hostile, &file, 64 * MIB, 2 * MIB).unwrap_err();
    map(&hostile, &file, 64 * MIB, MIB).unwrap();
    // The neighbour has enough memory.
    Load::start(&host, &Setup::nth(0), 2, 4).finish_undisturbed();
    let before = iommu.mapped_bytes();
    drop(hostile);
    assert_eq!(iommu.mapped_bytes(), before - 64 * MIB);
    host.finish();
}

#[test]
fn a_function_has_the_limit_that_its_options_give_it() {
    let host = Host::with(Options::default(), LONG);
    let setup = Setup {
        memory_limit: Some(4 * MIB),
        ..Setup::nth(0)
    };
    let local_backend = host.open_local_backend("vm-1", &setup);
    let file = sparse(MIB);
    let map = |nth| {
        let fd = file.try_clone().unwrap().into();
        nvme_guest::MemoryBackend::map(
            &*local_backend,
            MemoryRegion {
                gpa: Gpa(nth * MIB),
                len: MIB,
                fd,
                offset: 0,
                readable: true,
                writable: true,
            },
        )
    };
    for nth in 0..4 {
        map(nth).unwrap();
    }
    let message = nvme_mpt_vmm::report::chain(&map(4).unwrap_err());
    let limit =
        "Function vm-1 has 4M of memory mapped for its drive and asks for 1M more; it may have 4M";
    assert!(message.contains(limit), "{message}");
    drop(local_backend);
    host.finish();
}

#[test]
fn without_a_limit_a_function_can_map_the_hosts_memory_once() {
    let host = Host::with(Options::default(), LONG);
    let space = host.drive.controller().iova_space();
    let window = DmaWindow::new(space.clone()).with_function("a", Some(MemoryLimit::Host(2 * GIB)));
    let window = window.with_account(MemoryAccount::with_root("/proc/self/fdinfo"));
    let file = sparse(GIB);
    let (mapped, error) = map_aliases(&window, &file, GIB);
    assert_eq!(mapped, 2);
    let message = nvme_mpt_vmm::report::chain(&error);
    let host_has = "it may have 2G, the memory of the host, as it has no memory-limit=";
    assert!(message.contains(host_has), "{message}");
    drop(window);
    host.finish();
}

/// Fake files with a host's memory statistics.
struct HostMemoryFiles(tempfile::TempDir);

impl HostMemoryFiles {
    fn new(total: u64, available: u64) -> Self {
        let files = Self(tempfile::tempdir().unwrap());
        std::fs::create_dir(files.0.path().join("proc")).unwrap();
        Self::write(files.0.path(), total, available);
        files
    }

    fn write(root: &Path, total: u64, available: u64) {
        let [total, available] = [total, available].map(|bytes| bytes >> 10);
        let text = format!("MemTotal: {total} kB\nMemAvailable: {available} kB\n");
        std::fs::write(root.join("proc/meminfo"), text).unwrap();
    }

    /// Creates a function's window on this host.
    fn window(&self, host: &Host, function: &str) -> DmaWindow {
        let account = MemoryAccount::with_root(self.0.path());
        window(host, function, None).with_account(account)
    }
}

#[test]
fn sparse_memory_that_the_host_does_not_have_is_refused_before_a_page_is_taken() {
    let host = Host::with(Options::default(), LONG);
    let iommu = host.model.model_iommu();
    let before = iommu.mapped_bytes();
    let files = HostMemoryFiles::new(4 * GIB, 3 * GIB);
    let hostile = files.window(&host, "vm-1");
    let file = sparse(16 * GIB);
    let error = map(&hostile, &file, 0, 16 * GIB).unwrap_err();
    let message = nvme_mpt_vmm::report::chain(&error);
    for part in [
        "Function vm-1 asks for 16G of memory of which 16G are not there yet",
        "the host has 3G available, of which 256M stay free",
        "prealloc",
    ] {
        assert!(message.contains(part), "{message}");
    }
    assert!(matches!(
        refusal(error),
        MemoryRefusal::Unavailable { missing, .. } if missing == 16 * GIB
    ));
    assert_eq!((iommu.allocated_bytes(), iommu.mapped_bytes()), (0, before));
    assert_eq!(file.metadata().unwrap().blocks(), 0);
    // The host has this much memory, which is taken in steps.
    map(&hostile, &file, 0, 2 * GIB).unwrap();
    assert_eq!(iommu.allocated_bytes(), 2 * GIB);
    // The neighbour continues.
    Load::start(&host, &Setup::nth(0), 1, 4).finish_undisturbed();
    drop(hostile);
    host.finish();
}

#[test]
fn a_host_whose_memory_runs_out_meanwhile_refuses_the_next_step() {
    let host = Host::with(Options::default(), LONG);
    let iommu = host.model.model_iommu();
    let before = iommu.mapped_bytes();
    let files = HostMemoryFiles::new(4 * GIB, 3 * GIB);
    let hostile = files.window(&host, "vm-1");
    let file = sparse(2 * GIB);
    let root = files.0.path().to_owned();
    iommu.on_allocation(move |taken| {
        if taken == 512 * MIB {
            HostMemoryFiles::write(&root, 4 * GIB, 300 * MIB);
        }
    });
    let error = map(&hostile, &file, 0, 2 * GIB).unwrap_err();
    let message = nvme_mpt_vmm::report::chain(&error);
    assert!(
        message.contains("of which 256M are not there yet"),
        "{message}"
    );
    assert!(message.contains("has 300M available"), "{message}");
    assert_eq!(
        (iommu.allocated_bytes(), iommu.mapped_bytes()),
        (768 * MIB, before)
    );
    // The reservation ended with the map, including everything counted for the map.
    HostMemoryFiles::write(files.0.path(), 4 * GIB, 3 * GIB);
    map(&hostile, &file, 0, 2 * GIB).unwrap();
    drop(hostile);
    host.finish();
}

#[test]
fn pages_that_are_freed_while_others_are_pinned_are_refused_if_the_host_has_too_few() {
    const PIECE: u64 = 64 * MIB;
    let host = Host::with(Options::default(), LONG);
    let iommu = host.model.model_iommu();
    let before = iommu.mapped_bytes();
    let files = HostMemoryFiles::new(GIB, 100 * MIB);
    let hostile = files.window(&host, "vm-1");
    let file = sparse(3 * PIECE);
    nvme_mpt_memory::allocate(file.as_fd(), 3 * PIECE).unwrap();
    let own = Mapping::shared(
        file.as_fd(),
        0,
        3 * PIECE as usize,
        MappingAccess::ReadWrite,
    )
    .unwrap();
    iommu.on_piece_pinned(move |pinned| {
        if pinned < 3 * PIECE {
            own.discard_file(pinned as usize, PIECE as usize).unwrap();
        }
    });
    let error = map(&hostile, &file, 0, 3 * PIECE).unwrap_err();
    let message = nvme_mpt_vmm::report::chain(&error);
    assert!(
        message.contains("of which 64M are not there yet"),
        "{message}"
    );
    assert!(message.contains("has 100M available"), "{message}");
    assert!(matches!(
        refusal(error),
        MemoryRefusal::Unavailable { missing: PIECE, .. }
    ));
    // No mappings are left.
    assert_eq!(iommu.mapped_bytes(), before);
    assert_eq!(hostile.stats().bytes, 0);
    // A host with enough memory accepts the map.
    HostMemoryFiles::write(files.0.path(), GIB, 512 * MIB);
    map(&hostile, &file, 0, 3 * PIECE).unwrap();
    drop(hostile);
    host.finish();
}

#[test]
fn pages_are_promised_until_the_kernel_has_pinned_them() {
    const LEN: u64 = 64 * MIB;
    let host = Host::with(Options::default(), LONG);
    let iommu = host.model.model_iommu();
    let files = HostMemoryFiles::new(GIB, 160 * MIB);
    let account = MemoryAccount::with_root(files.0.path());
    let first = window(&host, "vm-1", None).with_account(account.clone());
    // The model does not populate pages, so they are missing until they are pinned, as before Linux 5.14.
    let other = account.clone();
    iommu.on_piece_pinned(move |_| {
        other.promise("vm-2").extend_to(LEN).unwrap_err();
    });
    map(&first, &sparse(LEN), 0, LEN).unwrap();
    account.promise("vm-2").extend_to(LEN).unwrap();
    drop(first);
    host.finish();
}

#[test]
fn a_small_region_is_mapped_on_a_host_with_little_left() {
    let host = Host::with(Options::default(), LONG);
    host.model.model_iommu().pin_pages();
    let files = HostMemoryFiles::new(4 * GIB, 200 * MIB);
    let window = files.window(&host, "vm-1");
    map(&window, &sparse(16 * MIB), 0, 16 * MIB).unwrap();
    map(&window, &sparse(PAGE_SIZE as u64), GIB, PAGE_SIZE as u64).unwrap();
    // More than 32 MiB in total.
    let error = map(&window, &sparse(16 * MIB), 2 * GIB, 16 * MIB).unwrap_err();
    let message = nvme_mpt_vmm::report::chain(&error);
    assert!(message.contains("of which 256M stay free"), "{message}");
    drop(window);
    host.finish();
}

#[test]
fn populated_memory_is_never_refused() {
    let host = Host::with(Options::default(), LONG);
    let iommu = host.model.model_iommu();
    let files = HostMemoryFiles::new(4 * GIB, 0);
    let window = files.window(&host, "vm-1");
    // Fully allocated, by writes or by fallocate; and partly allocated, with holes beside the region.
    let allocated = sparse(4 * MIB);
    nvme_mpt_memory::allocate(allocated.as_fd(), 4 * MIB).unwrap();
    map(&window, &allocated, 0, 4 * MIB).unwrap();
    let written = sparse(16 * MIB);
    written.write_all_at(&vec![1; 4 << 20], 0).unwrap();
    map(&window, &written, 4 * MIB, 4 * MIB).unwrap();
    assert_eq!(iommu.allocated_bytes(), 0);
    let error = map(&window, &written, 8 * MIB, 8 * MIB).unwrap_err();
    assert!(matches!(
        refusal(error),
        MemoryRefusal::Unavailable { missing, .. } if missing == 4 * MIB
    ));
    drop(window);
    host.finish();
}

#[test]
fn a_software_drive_pins_nothing_and_has_no_limit() {
    let space = std::sync::Arc::new(nvme_guest::iova::IovaSpace::software());
    let limit = Some(MemoryLimit::Configured(MIB));
    let window = DmaWindow::new(space).with_function("a", limit);
    let file = sparse(MIB);
    for nth in 0..16 {
        map(&window, &file, nth * MIB, MIB).unwrap();
    }
}

#[test]
fn part_of_a_39_bit_space_is_reserved_for_other_vms() {
    let host = Host::with(Options::default(), LONG);
    let early = Load::start(&host, &Setup::nth(0), 1, 4);
    let file = sparse(8 * GIB);
    let hostile: Vec<_> = (0..12)
        .map(|nth| {
            let hostile = window(&host, &format!("vm-{nth}"), None);
            let (mapped, error) = map_aliases(&hostile, &file, 8 * GIB);
            (hostile, mapped, error)
        })
        .collect();
    // The first VM uses a third of the unassigned mappings, which is the maximum for a VM on such a host.
    let mapped: Vec<_> = hostile.iter().map(|(_, mapped, _)| *mapped).collect();
    assert!(mapped[0] >= 128 / 8 && mapped[0] <= 152 / 8, "{mapped:?}");
    let [.., (_, _, error)] = &hostile[..] else {
        unreachable!("twelve");
    };
    let message = nvme_mpt_vmm::report::chain(error);
    for part in [
        "Function vm-11 has taken",
        "of IOVA space",
        "gets no 8G more",
        "are left",
    ] {
        assert!(message.contains(part), "{message}");
    }
    // The neighbours have their assured mappings.
    let neighbours = ["x", "y", "z"].map(|function| window(&host, function, None));
    for neighbour in &neighbours {
        map(neighbour, &file, 0, 2 * GIB).unwrap();
    }
    Load::start(&host, &Setup::nth(1), 4, 8).finish_undisturbed();
    early.finish_undisturbed();
    drop((hostile, neighbours));
    // Returned mappings are available to others.
    let alone = window(&host, "alone", None);
    let large = sparse(200 * GIB);
    map(&alone, &large, 0, 200 * GIB).unwrap();
    drop(alone);
    host.finish();
}

#[test]
fn a_poller_goes_on_while_memory_is_pinned() {
    let host = Host::with(Options::default(), LONG);
    let machine = host.machine(&Setup::nth(0).doorbells(DoorbellMode::Mapped));
    let mut controller = machine.attach();
    let mut queue = queue_pair(&mut controller, 1, 16);
    assert_eq!(status(&mut queue, Sqe::flush(1)), SUCCESS);
    let local_backend = host.latest_backend.lock().unwrap().upgrade().unwrap();
    let taken = local_backend.take_queue(QueueId(1));
    let mut shadow = taken.unwrap();
    // A table that the queue has not adopted yet.
    let regions = [0, 1].map(|nth| {
        let gpa = UNMAPPED_ADDRESS + nth * 2 * REGION;
        machine.memory.add_region(gpa, REGION).unwrap()
    });
    machine.map(&regions[0]);

    let iommu = host.model.model_iommu();
    iommu.hold_maps();
    std::thread::scope(|scope| {
        let map = scope.spawn(|| machine.map(&regions[1]));
        let deadline = Instant::now() + HANG;
        while iommu.held_maps() == 0 {
            assert!(Instant::now() < deadline, "no map reached the IOMMU");
            std::thread::sleep(std::time::Duration::from_micros(20));
        }
        let cid = queue.submit(Sqe::flush(1)).unwrap();
        queue.ring();
        let poller = scope.spawn(move || {
            while !shadow.poll() {}
            while !shadow.is_drained() {
                shadow.poll();
            }
            shadow
        });
        let completions = queue.drain(&[cid], HANG);
        let pinning = !map.is_finished();
        iommu.release_maps();
        map.join().unwrap();
        let shadow = poller.join().unwrap();
        let returned = local_backend.return_queue(shadow);
        returned.unwrap();
        assert!(pinning, "memory was pinned meanwhile");
        let completions = completions.expect("a completion while memory is pinned");
        assert_eq!(completions[0].status().code(), SUCCESS);
    });
    assert_eq!(status(&mut queue, Sqe::flush(1)), SUCCESS);
    drop((queue, controller, local_backend, machine));
    host.finish();
}

#[test]
fn a_guest_whose_pages_were_freed_under_the_drive_stops_and_others_go_on() {
    let host = Host::with(Options::default(), LONG);
    let neighbour = Load::start(&host, &Setup::nth(1), 1, 4);
    let machine = host.machine(&Setup::nth(0));
    let mut controller = machine.attach();
    let mut queue = queue_pair(&mut controller, 1, 16);
    let fd = machine.memory.fd();
    let regions = machine.memory.regions();
    // Touch all pages, as pinning does.
    let vmm = regions.iter().map(|region| {
        let len = region.len as usize;
        Mapping::shared(fd, region.fd_offset, len, MappingAccess::ReadWrite).unwrap()
    });
    let vmm: Vec<_> = vmm.collect();
    vmm.iter().for_each(|mapping| mapping.populate().unwrap());
    // Two checks of the memory with all its pages present.
    let resets = host.incidents().resets;
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(status(&mut queue, Sqe::flush(1)), SUCCESS);
    // A balloon takes a page.
    let last = vmm.last().unwrap();
    last.discard_file(last.len() - PAGE_SIZE, PAGE_SIZE)
        .unwrap();
    machine.wait_fatal(&controller);
    // A reset does not restore the memory.
    drop((queue, controller));
    let config = Config {
        admin_timeout: Duration::from_secs(2),
        ..Config::default()
    };
    let (bar, memory) = (machine.bar(), machine.memory.clone());
    let mut controller = Controller::attach(bar, memory, config, 1).unwrap();
    // The controller may fail before it answers.
    let queue = controller.create_queue_pair(1, &QueueOptions::polled(16));
    machine.wait_fatal(&controller);
    neighbour.wait_for_progress();
    neighbour.finish();
    assert_eq!(host.incidents().resets, resets, "of the drive");
    drop((queue, controller, machine));
    host.finish();
}

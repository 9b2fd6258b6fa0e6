//! Memory whose page faults the process resolves itself (userfaultfd), accessed by a mapping of the file and by the
//! process's own mapping.
#![expect(
    clippy::disallowed_methods,
    reason = "tests have threads and real time of their own"
)]
#![expect(
    unsafe_code,
    reason = "userfaultfd is reached through system calls alone"
)]

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use nvme_mpt_memory::userfaultfd::{MemoryHolder, is_incomplete};
use nvme_mpt_memory::{Mapping, MappingAccess, memfd};
use vmm_sys_util::eventfd::EventFd;

const LEN: usize = 1 << 16;
const PAGE: usize = 4096;

// linux/userfaultfd.h
const UFFD_API: u64 = 0xAA;
const UFFDIO_API: u64 = 0xC018_AA3F;
const UFFDIO_REGISTER: u64 = 0xC020_AA00;
const UFFDIO_UNREGISTER: u64 = 0x8010_AA01;
const UFFDIO_COPY: u64 = 0xC028_AA03;
const UFFDIO_CONTINUE: u64 = 0xC020_AA07;
const MODE_MISSING: u64 = 1;
const MODE_WRITE_PROTECT: u64 = 2;
const MODE_MINOR: u64 = 4;
const FEATURE_MISSING_HUGETLBFS: u64 = 1 << 4;
const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
const FEATURE_MINOR_SHMEM: u64 = 1 << 10;
const FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
const UFFD_EVENT_PAGEFAULT: u8 = 0x12;
/// `struct uffd_msg`.
const MESSAGE: usize = 32;

/// Creates a userfaultfd; prints a message and returns `None` if the kernel refuses.
fn userfaultfd(features: u64, test: &str) -> Option<File> {
    let created = || -> io::Result<File> {
        // SAFETY: the descriptor is new and owned once.
        let file = unsafe {
            let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            File::from_raw_fd(fd as libc::c_int)
        };
        control(&file, UFFDIO_API, &mut [UFFD_API, features, 0])?;
        Ok(file)
    };
    created()
        .inspect_err(|error| {
            // Written to stderr directly, because the test harness hides the output of passing tests.
            let _ = writeln!(
                io::stderr(),
                "NOT CHECKED: {test}: userfaultfd cannot be had here: {error}"
            );
        })
        .ok()
}

fn control<const N: usize>(file: &File, request: u64, argument: &mut [u64; N]) -> io::Result<()> {
    // SAFETY: the argument is the structure of that request, in words. Some libraries have requests of 32 bits.
    match unsafe { libc::ioctl(file.as_raw_fd(), request as _, argument.as_mut_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Guest memory in a VMM: a file, and the VMM's own mapping of the file.
struct Guest {
    memory: OwnedFd,
    start: usize,
}

impl Guest {
    fn new() -> Self {
        let memory = memfd(c"guest", LEN as u64).unwrap();
        let start = map(&memory);
        Self { memory, start }
    }

    fn register(&self, faults: &File, offset: usize, len: usize, mode: u64) {
        let mut range = [(self.start + offset) as u64, len as u64, mode, 0];
        control(faults, UFFDIO_REGISTER, &mut range).unwrap();
    }

    fn is_incomplete(&self) -> bool {
        is_incomplete(MemoryHolder::ThisProcess, self.memory.as_fd()).unwrap()
    }

    /// Returns the VMM's mapping in the form that functions in the VMM's process use.
    fn own(&self) -> Mapping {
        let start = NonNull::new(self.start as *mut u8).unwrap();
        let (fd, owner) = (self.memory.as_fd(), Arc::new(()));
        // SAFETY: the mapping is never unmapped, and is only accessed through mappings.
        unsafe { Mapping::borrowed(start, LEN, MappingAccess::ReadWrite, fd, 0, owner) }.unwrap()
    }
}

/// Maps a file, and never unmaps it.
fn map(memory: &OwnedFd) -> usize {
    // SAFETY: a new mapping, which is never unmapped.
    let start = unsafe {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        let fd = memory.as_raw_fd();
        libc::mmap(std::ptr::null_mut(), LEN, prot, flags, fd, 0)
    };
    assert_ne!(start, libc::MAP_FAILED);
    start as usize
}

/// Runs `access` on a thread. Returns when the thread has finished or waits for a page fault, and whether it waits.
fn run<T: Send + 'static>(
    client: &File,
    access: impl FnOnce() -> T + Send + 'static,
) -> (JoinHandle<T>, bool) {
    let done = EventFd::new(0).unwrap();
    let tell = done.try_clone().unwrap();
    let thread = thread::spawn(move || {
        let result = access();
        tell.write(1).unwrap();
        result
    });
    let watch = |fd: RawFd| libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    let mut watched = [client.as_raw_fd(), done.as_raw_fd()].map(watch);
    // SAFETY: the kernel writes only to the given number of entries.
    let ready = unsafe { libc::poll(watched.as_mut_ptr(), 2, -1) };
    assert!(ready > 0, "{}", io::Error::last_os_error());
    let events = watched.map(|fd| fd.revents);
    let is_held_up = events == [libc::POLLIN, 0];
    assert!(is_held_up || events == [0, libc::POLLIN], "{events:?}");
    (thread, is_held_up)
}

/// Takes the reported page fault, and returns its page.
fn fault(mut client: &File) -> u64 {
    let mut message = [0; MESSAGE];
    client.read_exact(&mut message).unwrap();
    assert_eq!(message[0], UFFD_EVENT_PAGEFAULT);
    u64::from_ne_bytes(message[16..24].try_into().unwrap()) & !(PAGE as u64 - 1)
}

fn copy(client: &File, page: u64, content: u8) {
    let content = [content; PAGE];
    let mut copied = [page, content.as_ptr() as u64, PAGE as u64, 0, 0];
    control(client, UFFDIO_COPY, &mut copied).unwrap();
}

fn byte(mapping: &Mapping, offset: usize) -> u8 {
    let mut byte = [9];
    mapping.bytes(offset, 1).unwrap().copy_to(&mut byte);
    byte[0]
}

#[test]
fn a_mapping_of_the_file_reads_zeros_where_the_content_is_still_to_come() {
    let name = "a_mapping_of_the_file_reads_zeros_where_the_content_is_still_to_come";
    let Some(client) = userfaultfd(FEATURE_MISSING_SHMEM, name) else {
        return;
    };
    let guest = Guest::new();
    guest.register(&client, 0, LEN, MODE_MISSING);
    let ours = Mapping::shared(guest.memory.as_fd(), 0, LEN, MappingAccess::ReadWrite).unwrap();
    let (thread, is_held_up) = run(&client, move || (byte(&ours, 5), ours));
    // So a mapping of the file must not be used before all pages are there.
    assert!(!is_held_up);
    assert_eq!(thread.join().unwrap().0, 0);
    // The page is now visible in all mappings, so the VMM cannot fill it any more.
    let content = [7_u8; PAGE];
    let page = guest.start as u64;
    let mut copied = [page, content.as_ptr() as u64, PAGE as u64, 0, 0];
    let error = control(&client, UFFDIO_COPY, &mut copied).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EEXIST));
}

#[test]
fn the_vmms_own_mapping_waits_for_the_content() {
    let name = "the_vmms_own_mapping_waits_for_the_content";
    let Some(client) = userfaultfd(FEATURE_MISSING_SHMEM, name) else {
        return;
    };
    let guest = Guest::new();
    guest.register(&client, 0, LEN, MODE_MISSING);
    let own = guest.own();
    let (thread, is_held_up) = run(&client, move || {
        let read = byte(&own, 0x8005);
        // A write of less than a page leaves all other bytes of the page unchanged.
        own.bytes(0x9000, 1).unwrap().copy_from(&[7]);
        [read, byte(&own, 0x9000), byte(&own, 0x9001)]
    });
    assert!(is_held_up);
    for offset in [0x8000, 0x9000] {
        let events = libc::POLLIN;
        let fd = client.as_raw_fd();
        let mut ready = libc::pollfd {
            fd,
            events,
            revents: 0,
        };
        // SAFETY: one entry, which the kernel writes to.
        assert_eq!(unsafe { libc::poll(&raw mut ready, 1, -1) }, 1);
        let page = fault(&client);
        assert_eq!(page, (guest.start + offset) as u64);
        copy(&client, page, 0x5A);
    }
    assert_eq!(thread.join().unwrap(), [0x5A, 7, 0x5A]);
}

#[test]
fn the_vmms_own_mapping_waits_for_minor_faults() {
    let name = "the_vmms_own_mapping_waits_for_minor_faults";
    let features = FEATURE_MISSING_SHMEM | FEATURE_MINOR_SHMEM;
    let Some(client) = userfaultfd(features, name) else {
        return;
    };
    let guest = Guest::new();
    // The page exists, but does not have the guest's data yet.
    let other_mapping =
        Mapping::shared(guest.memory.as_fd(), 0, LEN, MappingAccess::ReadWrite).unwrap();
    other_mapping.bytes(0, LEN).unwrap().copy_from(&[1; LEN]);
    guest.register(&client, 0, LEN, MODE_MINOR);
    assert!(guest.is_incomplete());
    let own = guest.own();
    let (thread, is_held_up) = run(&client, move || byte(&own, 0x3000));
    assert!(is_held_up);
    let page = fault(&client);
    other_mapping.bytes(0x3000, 1).unwrap().copy_from(&[0x5A]);
    control(&client, UFFDIO_CONTINUE, &mut [page, PAGE as u64, 0, 0]).unwrap();
    assert_eq!(thread.join().unwrap(), 0x5A);
}

#[test]
fn memory_is_incomplete_until_no_fault_is_still_to_come() {
    let name = "memory_is_incomplete_until_no_fault_is_still_to_come";
    let Some(client) = userfaultfd(FEATURE_MISSING_SHMEM, name) else {
        return;
    };
    let guest = Guest::new();
    assert!(!guest.is_incomplete());
    // The memory is mapped a second time, where one page is registered.
    let second = Guest {
        memory: guest.memory.try_clone().unwrap(),
        start: map(&guest.memory),
    };
    second.register(&client, 0x4000, PAGE, MODE_MISSING);
    assert!(guest.is_incomplete());
    let other = Guest::new();
    assert!(!other.is_incomplete());
    // A page that exists causes no page faults, although its range is registered.
    copy(&client, (second.start + 0x4000) as u64, 0x5A);
    assert!(!guest.is_incomplete());
    second.register(&client, 0x5000, PAGE, MODE_MISSING);
    assert!(guest.is_incomplete());
    let mut range = [(second.start + 0x5000) as u64, PAGE as u64];
    control(&client, UFFDIO_UNREGISTER, &mut range).unwrap();
    assert!(!guest.is_incomplete());
    // Closing the descriptor ends its registrations.
    second.register(&client, 0x6000, PAGE, MODE_MISSING);
    assert!(guest.is_incomplete());
    drop(client);
    assert!(!guest.is_incomplete());
}

/// Needs no huge pages of the host, because no page is accessed.
#[test]
fn huge_pages_that_are_registered_are_incomplete() {
    const HUGE: usize = 2 << 20;
    let name = "huge_pages_that_are_registered_are_incomplete";
    let Some(client) = userfaultfd(FEATURE_MISSING_HUGETLBFS, name) else {
        return;
    };
    // SAFETY: a new file, which is owned once, and a new mapping, which is never unmapped.
    let (memory, start) = unsafe {
        let flags = libc::MFD_CLOEXEC | libc::MFD_HUGETLB | libc::MFD_HUGE_2MB;
        let fd = libc::memfd_create(c"guest".as_ptr(), flags);
        assert!(fd >= 0, "{}", io::Error::last_os_error());
        let memory = File::from_raw_fd(fd);
        memory.set_len(HUGE as u64).unwrap();
        let (prot, flags) = (libc::PROT_READ, libc::MAP_SHARED | libc::MAP_NORESERVE);
        let start = libc::mmap(std::ptr::null_mut(), HUGE, prot, flags, fd, 0);
        assert_ne!(start, libc::MAP_FAILED, "{}", io::Error::last_os_error());
        (memory, start as u64)
    };
    let check = || is_incomplete(MemoryHolder::ThisProcess, memory.as_fd()).unwrap();
    assert!(!check());
    control(
        &client,
        UFFDIO_REGISTER,
        &mut [start, HUGE as u64, MODE_MISSING, 0],
    )
    .unwrap();
    assert!(check());
    drop(client);
    assert!(!check());
}

#[test]
fn write_protection_hides_no_content() {
    let name = "write_protection_hides_no_content";
    let features = FEATURE_MISSING_SHMEM | FEATURE_WP_HUGETLBFS_SHMEM;
    let Some(client) = userfaultfd(features, name) else {
        return;
    };
    let guest = Guest::new();
    guest.register(&client, 0, LEN, MODE_WRITE_PROTECT);
    assert!(!guest.is_incomplete());
}

#[test]
fn a_client_is_found_by_its_number_and_by_its_user() {
    let name = "a_client_is_found_by_its_number_and_by_its_user";
    let Some(client) = userfaultfd(FEATURE_MISSING_SHMEM, name) else {
        return;
    };
    let guest = Guest::new();
    guest.register(&client, 0, LEN, MODE_MISSING);
    // SAFETY: the call has no preconditions.
    let uid = unsafe { libc::getuid() };
    let check = |pid| is_incomplete(MemoryHolder::Client { pid, uid }, guest.memory.as_fd());
    assert!(check(std::process::id()).unwrap());
    // The client that connected was a launcher, which has ended.
    assert!(check(0).unwrap());
    let trusted = is_incomplete(MemoryHolder::Trusted, guest.memory.as_fd());
    assert!(!trusted.unwrap());
}

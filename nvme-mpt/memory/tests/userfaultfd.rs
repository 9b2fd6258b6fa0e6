//! A client that keeps page faults to itself: userfaultfd in its address space holds up none of ours.
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
use std::os::fd::{AsFd, AsRawFd, FromRawFd, RawFd};
use std::thread::{self, JoinHandle};

use nvme_mpt_memory::{Access, Mapping, memfd};
use vmm_sys_util::eventfd::EventFd;

const LEN: usize = 1 << 16;

// linux/userfaultfd.h
const UFFD_API: u64 = 0xAA;
const UFFDIO_API: libc::c_ulong = 0xC018_AA3F;
const UFFDIO_REGISTER: libc::c_ulong = 0xC020_AA00;
const UFFDIO_REGISTER_MODE_MISSING: u64 = 1;
const UFFD_FEATURE_MISSING_SHMEM: u64 = 1 << 5;
const UFFD_EVENT_PAGEFAULT: u8 = 0x12;
/// `struct uffd_msg`.
const MESSAGE: usize = 32;

fn userfaultfd() -> io::Result<File> {
    // SAFETY: the descriptor is new and owned once.
    let file = unsafe {
        let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        File::from_raw_fd(fd as libc::c_int)
    };
    control(
        &file,
        UFFDIO_API,
        &mut [UFFD_API, UFFD_FEATURE_MISSING_SHMEM, 0],
    )?;
    Ok(file)
}

fn control<const N: usize>(
    file: &File,
    request: libc::c_ulong,
    argument: &mut [u64; N],
) -> io::Result<()> {
    // SAFETY: the argument is the structure of that request, in words.
    match unsafe { libc::ioctl(file.as_raw_fd(), request, argument.as_mut_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Runs `access` on a thread of its own. Returns once it is done or one of its faults is held up, and whether one is.
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
    // SAFETY: the kernel writes to as many entries as there are.
    let ready = unsafe { libc::poll(watched.as_mut_ptr(), 2, -1) };
    assert!(ready > 0, "{}", io::Error::last_os_error());
    let events = watched.map(|fd| fd.revents);
    let is_held_up = events == [libc::POLLIN, 0];
    assert!(is_held_up || events == [0, libc::POLLIN], "{events:?}");
    (thread, is_held_up)
}

#[test]
fn faults_of_ours_wait_for_nothing_that_a_client_registered() {
    let client = match userfaultfd() {
        Ok(client) => client,
        Err(error) => {
            // Not through the harness, which shows no output of a test that passes.
            let _ = writeln!(
                io::stderr(),
                "NOT CHECKED: faults_of_ours_wait_for_nothing_that_a_client_registered: userfaultfd cannot be had \
                 here: {error}"
            );
            return;
        }
    };
    let memory = memfd(c"guest", LEN as u64).unwrap();
    // SAFETY: a new mapping, which is never unmapped.
    let start = unsafe {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        libc::mmap(
            std::ptr::null_mut(),
            LEN,
            prot,
            flags,
            memory.as_raw_fd(),
            0,
        )
    };
    assert_ne!(start, libc::MAP_FAILED);
    let start = start as usize;
    let mut range = [start as u64, LEN as u64, UFFDIO_REGISTER_MODE_MISSING, 0];
    control(&client, UFFDIO_REGISTER, &mut range).unwrap();

    let ours = Mapping::shared(memory.as_fd(), 0, LEN, Access::ReadWrite).unwrap();
    let (thread, is_held_up) = run(&client, move || {
        let mut read = [9; 2];
        ours.bytes(5, 1).unwrap().copy_to(&mut read[..1]);
        ours.bytes(0x3000, 1).unwrap().copy_from(&[7]);
        ours.bytes(0x3000, 1).unwrap().copy_to(&mut read[1..]);
        read
    });
    assert!(!is_held_up);
    assert_eq!(thread.join().unwrap(), [0, 7]);

    // The client's own faults are held up, so the registration counts.
    let (thread, is_held_up) = run(&client, move || {
        // SAFETY: inside the mapping.
        unsafe { (start as *const u8).add(0x8000).read_volatile() }
    });
    assert!(is_held_up);
    let mut message = [0; MESSAGE];
    (&client).read_exact(&mut message).unwrap();
    assert_eq!(message[0], UFFD_EVENT_PAGEFAULT);
    assert!(!thread.is_finished());
    drop(client);
    assert_eq!(thread.join().unwrap(), 0);
}

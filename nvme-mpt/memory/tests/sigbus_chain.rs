//! The SIGBUS handler of this crate, after a VMM has installed one. This is a test program of its own, because a process
//! has only one handler.
#![expect(unsafe_code, reason = "installs a signal handler and sends signals")]

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};

use nvme_mpt_memory::{Mapping, MappingAccess, memfd};

const LEN: usize = 1 << 16;

/// Number of calls of the VMM's handler; the next word has the last fault address.
static CALLS: AtomicUsize = AtomicUsize::new(0);
static ADDRESS: AtomicUsize = AtomicUsize::new(0);

/// Handler of a VMM, which repairs the VMM's own memory by mapping a page of zeroes.
extern "C" fn of_the_vmm(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel and the handler under test pass a valid siginfo.
    let address = unsafe { (*info).si_addr() } as usize;
    CALLS.fetch_add(1, Ordering::Relaxed);
    ADDRESS.store(address, Ordering::Relaxed);
    let page = address & !0xFFF;
    // SAFETY: the page belongs to a mapping of this test, which faulted there.
    unsafe {
        libc::mmap(
            page as *mut libc::c_void,
            0x1000,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
            -1,
            0,
        );
    }
}

fn install(handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void)) {
    // SAFETY: the action is fully initialised, and the handler is async-signal-safe.
    unsafe {
        let mut action = std::mem::zeroed::<libc::sigaction>();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&raw mut action.sa_mask);
        assert_eq!(
            libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()),
            0
        );
    }
}

/// Sends this thread the signal by which the kernel reports a memory error without an access.
fn report_memory_error(address: usize, code: libc::c_int) {
    // SAFETY: the siginfo is fully initialised: signal, errno and code, and the address at byte 16 of it,
    // as the kernel lays it out on 64-bit machines. A process may send itself any code.
    unsafe {
        let mut info = std::mem::zeroed::<libc::siginfo_t>();
        info.si_signo = libc::SIGBUS;
        info.si_code = code;
        std::ptr::from_mut(&mut info)
            .cast::<u8>()
            .add(16)
            .cast::<usize>()
            .write_unaligned(address);
        let sent = libc::syscall(
            libc::SYS_rt_tgsigqueueinfo,
            libc::getpid(),
            libc::gettid(),
            libc::SIGBUS,
            &raw const info,
        );
        assert_eq!(sent, 0, "{}", std::io::Error::last_os_error());
    }
}

fn byte(mapping: &Mapping, offset: usize) -> u8 {
    let mut byte = [9];
    mapping.bytes(offset, 1).unwrap().copy_to(&mut byte);
    byte[0]
}

#[test]
fn each_handler_gets_the_faults_of_its_own_memory() {
    install(of_the_vmm);
    let ours = |fill: u8| {
        let fd = memfd(c"guest", LEN as u64).unwrap();
        let mapping = Mapping::shared(fd.as_fd(), 0, LEN, MappingAccess::ReadWrite).unwrap();
        mapping.bytes(0, LEN).unwrap().copy_from(&[fill; LEN]);
        (File::from(fd), mapping)
    };

    // A fault in memory that this crate has mapped: the VMM's handler is not called.
    let (file, mapping) = ours(1);
    file.set_len(0).unwrap();
    assert_eq!(byte(&mapping, 5000), 0);
    assert!(mapping.is_lost());
    assert_eq!(CALLS.load(Ordering::Relaxed), 0);

    // A fault in memory that the VMM has mapped: its handler repairs the memory, and this crate's handler stays installed.
    let foreign = File::from(memfd(c"the VMM's own", LEN as u64).unwrap());
    // SAFETY: a new mapping, which is never unmapped.
    let start = unsafe {
        use std::os::fd::AsRawFd;
        let (prot, flags) = (libc::PROT_READ, libc::MAP_SHARED);
        libc::mmap(
            std::ptr::null_mut(),
            LEN,
            prot,
            flags,
            foreign.as_raw_fd(),
            0,
        )
    };
    assert_ne!(start, libc::MAP_FAILED);
    foreign.set_len(0).unwrap();
    // SAFETY: the address is in the mapping, and the VMM's handler maps a page there.
    let read = unsafe { start.cast::<u8>().add(0x2345).read_volatile() };
    assert_eq!((read, CALLS.load(Ordering::Relaxed)), (0, 1));
    assert_eq!(ADDRESS.load(Ordering::Relaxed), start as usize + 0x2345);

    // A hardware error in a page that this crate has mapped: the page becomes zeroes, and the mapping is lost.
    for code in [libc::BUS_MCEERR_AR, libc::BUS_MCEERR_AO] {
        let (_file, mapping) = ours(7);
        let address = mapping.bytes(0x3000, 1).unwrap().as_ptr() as usize;
        report_memory_error(address + 1, code);
        assert!(mapping.is_lost(), "code {code}");
        let read = [0x2FFF, 0x3000, 0x3FFF, 0x4000].map(|offset| byte(&mapping, offset));
        assert_eq!(read, [7, 0, 0, 7], "code {code}");
        assert_eq!(CALLS.load(Ordering::Relaxed), 1);
    }

    // A hardware error in the VMM's memory is passed to the VMM.
    report_memory_error(start as usize + 0x5000, libc::BUS_MCEERR_AO);
    assert_eq!(CALLS.load(Ordering::Relaxed), 2);

    // The handler of this crate is still installed.
    let (file, mapping) = ours(1);
    file.set_len(0).unwrap();
    assert_eq!(byte(&mapping, 0), 0);
    assert!(mapping.is_lost());
}

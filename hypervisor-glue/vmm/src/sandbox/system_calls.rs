//! System calls of functions, by kind of thread. Each entry says what needs the call.

use libc::c_long;

/// Kind of a thread of a VMM's process, by what it does for functions.
///
/// A thread inherits the seccomp filter of the thread that starts it, and a second filter can only forbid more. Managers start the
/// other threads, and a control thread starts pollers. So the system calls of a manager include those of control threads, which
/// include those of pollers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadKind {
    /// Thread of the VMM that starts, pauses, restores, resets and stops functions, and maps guest memory for them. Often, this is
    /// not one thread: a vCPU thread that unplugs a function for its guest does a manager's work.
    Manager,
    /// Control thread of a function, or one of the threads that help: they flush, watch a drive or a server, or execute commands on
    /// keys. [`Vmm::spawn`](crate::Vmm::spawn) starts them. A thread of the VMM with
    /// [`FunctionEvents`](crate::FunctionEvents) does such work, too.
    Control,
    /// Poller, which executes the guests' I/O commands. [`Vmm::spawn`](crate::Vmm::spawn) starts it.
    Poller,
    /// vCPU thread, whose accesses to configuration space and BARs the VMM forwards.
    Vcpu,
}

impl ThreadKind {
    /// Returns the kind of a thread that [`Vmm::spawn`](crate::Vmm::spawn) starts, by the thread's name.
    #[must_use]
    pub fn of_thread(name: &str) -> Self {
        match name.starts_with("poll-") && name != "poll-watch" {
            true => Self::Poller,
            false => Self::Control,
        }
    }

    /// Returns whether this thread needs the calls of a thread of kind `other`, because it is one or may start one.
    fn includes(self, other: Self) -> bool {
        let started: &[Self] = match self {
            Self::Manager => &[Self::Manager, Self::Control, Self::Poller],
            Self::Control => &[Self::Control, Self::Poller],
            Self::Poller => &[Self::Poller],
            Self::Vcpu => &[Self::Vcpu],
        };
        started.contains(&other)
    }
}

/// System call that functions make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SystemCall {
    /// Number on this architecture.
    pub number: c_long,
    /// Name in libc, such as `SYS_futex`.
    constant: &'static str,
    /// Use of the call, in a few words.
    pub reason: &'static str,
}

impl SystemCall {
    /// Returns the name, as strace(1) prints it.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.constant.trim_start_matches("SYS_")
    }
}

/// Request of the system call `ioctl`, its second argument, that functions make. A VMM's own [`Vmm`](crate::Vmm) may need others,
/// such as those of KVM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoctlRequest {
    /// Number of the request.
    pub number: u32,
    /// Name of the request in the kernel's headers.
    pub name: &'static str,
    /// Use of the request, in a few words.
    pub reason: &'static str,
}

/// Functions that make a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallScope {
    /// Every function.
    Every,
    /// Functions whose drive has a path, and is opened by this process: its lease is in a ledger.
    Leased,
    /// Functions on a file or block device that this process opens.
    File,
    /// Functions on a physical drive that this process opens.
    Physical,
    /// Functions whose drive a server has, or may have.
    Served,
}

/// Entry of a table of calls.
struct TableEntry<T: 'static> {
    scope: CallScope,
    /// Threads that make the call, without those that need it because they start others.
    threads: &'static [ThreadKind],
    call: T,
}

impl<T> TableEntry<T> {
    fn is_for(&self, kind: ThreadKind, scopes: &[CallScope]) -> bool {
        let needs = self.threads.iter().any(|thread| kind.includes(*thread));
        needs && scopes.contains(&self.scope)
    }
}

/// Returns the calls of a kind of thread, each once, for functions of these scopes.
pub(super) fn system_calls(
    kind: ThreadKind,
    scopes: &[CallScope],
) -> impl Iterator<Item = &'static SystemCall> + use<> {
    let entries = SYSTEM_CALLS
        .iter()
        .filter(|entry| entry.is_for(kind, scopes));
    let mut calls: Vec<&SystemCall> = entries.map(|entry| &entry.call).collect();
    calls.sort_by_key(|call| call.number);
    calls.dedup_by_key(|call| call.number);
    calls.into_iter()
}

/// Returns the requests of `ioctl` of a kind of thread, for functions of these scopes.
pub(super) fn ioctls(
    kind: ThreadKind,
    scopes: &[CallScope],
) -> impl Iterator<Item = &'static IoctlRequest> + use<> {
    let entries = IOCTLS.iter().filter(|entry| entry.is_for(kind, scopes));
    let requests: Vec<&IoctlRequest> = entries.map(|entry| &entry.call).collect();
    requests.into_iter()
}

/// Every thread.
const ALL: &[ThreadKind] = &[ThreadKind::Poller, ThreadKind::Control, ThreadKind::Vcpu];
/// Pollers, and threads that start them.
const POLLER: &[ThreadKind] = &[ThreadKind::Poller];
/// Control threads, and threads that start them.
const CONTROL: &[ThreadKind] = &[ThreadKind::Control];
/// Control threads, threads that start them, and vCPUs, whose accesses a server answers.
const CONTROL_AND_VCPU: &[ThreadKind] = &[ThreadKind::Control, ThreadKind::Vcpu];
/// Managers alone.
const MANAGER: &[ThreadKind] = &[ThreadKind::Manager];

const fn call(
    scope: CallScope,
    threads: &'static [ThreadKind],
    (number, constant): (c_long, &'static str),
    reason: &'static str,
) -> TableEntry<SystemCall> {
    TableEntry {
        scope,
        threads,
        call: SystemCall {
            number,
            constant,
            reason,
        },
    }
}

/// Number and name of a constant of libc.
macro_rules! sys {
    ($constant:ident) => {
        (libc::$constant, stringify!($constant))
    };
}

use CallScope::{Every, File, Leased, Physical, Served};

const SYSTEM_CALLS: &[TableEntry<SystemCall>] = &[
    // Memory of the process.
    call(Every, ALL, sys!(SYS_brk), "allocator"),
    call(Every, ALL, sys!(SYS_madvise), "allocator, stacks"),
    call(Every, ALL, sys!(SYS_mmap), "allocator, stacks, mappings"),
    call(Every, ALL, sys!(SYS_mprotect), "allocator, stacks"),
    call(Every, ALL, sys!(SYS_mremap), "allocator"),
    call(Every, ALL, sys!(SYS_munmap), "allocator, stacks, mappings"),
    call(
        Every,
        ALL,
        sys!(SYS_openat),
        "allocator (/proc/sys/vm/overcommit_memory), files",
    ),
    // Threads, signals, time.
    call(Every, ALL, sys!(SYS_clock_gettime), "time, without a vDSO"),
    call(Every, ALL, sys!(SYS_clock_nanosleep), "bounded waits"),
    call(Every, ALL, sys!(SYS_exit), "end of a thread"),
    call(Every, ALL, sys!(SYS_exit_group), "abort"),
    call(Every, ALL, sys!(SYS_futex), "locks"),
    call(Every, ALL, sys!(SYS_getpid), "abort"),
    call(Every, ALL, sys!(SYS_gettid), "start of a thread, abort"),
    call(Every, ALL, sys!(SYS_restart_syscall), "interrupted waits"),
    call(Every, ALL, sys!(SYS_rt_sigaction), "handler of SIGBUS"),
    call(
        Every,
        ALL,
        sys!(SYS_rt_sigprocmask),
        "start and end of a thread",
    ),
    call(Every, ALL, sys!(SYS_rt_sigreturn), "handler of SIGBUS"),
    call(
        Every,
        ALL,
        sys!(SYS_sched_getaffinity),
        "start of a thread, vCPUs",
    ),
    call(Every, ALL, sys!(SYS_sched_yield), "contended locks"),
    call(
        Every,
        ALL,
        sys!(SYS_sigaltstack),
        "start and end of a thread",
    ),
    call(Every, ALL, sys!(SYS_tgkill), "abort"),
    call(Every, POLLER, sys!(SYS_clone), "start of a thread"),
    call(Every, POLLER, sys!(SYS_clone3), "start of a thread"),
    call(Every, POLLER, sys!(SYS_getrandom), "random numbers"),
    call(Every, POLLER, sys!(SYS_nanosleep), "bounded waits"),
    call(Every, POLLER, sys!(SYS_prctl), "names and slack of threads"),
    call(Every, POLLER, sys!(SYS_rseq), "start of a thread"),
    call(Every, POLLER, sys!(SYS_sched_setaffinity), "poll=...@CPU"),
    call(
        Every,
        POLLER,
        sys!(SYS_seccomp),
        "the VMM's filter of a thread that is started",
    ),
    call(
        Every,
        POLLER,
        sys!(SYS_set_robust_list),
        "start of a thread",
    ),
    // Events.
    call(Every, ALL, sys!(SYS_close), "descriptors"),
    call(Every, ALL, sys!(SYS_fcntl), "duplicates of eventfds"),
    call(Every, ALL, sys!(SYS_read), "eventfds, files"),
    call(Every, ALL, sys!(SYS_write), "eventfds, log"),
    call(Every, POLLER, sys!(SYS_dup), "duplicates of descriptors"),
    call(Every, POLLER, sys!(SYS_epoll_ctl), "events"),
    call(Every, POLLER, sys!(SYS_epoll_pwait), "sleep"),
    #[cfg(target_arch = "x86_64")]
    call(Every, POLLER, sys!(SYS_epoll_wait), "sleep"),
    call(Every, POLLER, sys!(SYS_timerfd_settime), "deadlines"),
    call(Every, CONTROL, sys!(SYS_epoll_create1), "event loops"),
    call(Every, CONTROL, sys!(SYS_eventfd2), "wake-ups, interrupts"),
    call(Every, CONTROL, sys!(SYS_timerfd_create), "deadlines"),
    // Files: memory, processors, control groups, the process's own mappings.
    call(Every, POLLER, sys!(SYS_fstat), "files"),
    call(Every, POLLER, sys!(SYS_lseek), "holes of memory and files"),
    call(Every, POLLER, sys!(SYS_newfstatat), "files"),
    call(Every, POLLER, sys!(SYS_statx), "files"),
    call(Every, CONTROL, sys!(SYS_fstatfs), "kind of guest memory"),
    call(Every, CONTROL, sys!(SYS_ftruncate), "memory files"),
    call(Every, CONTROL, sys!(SYS_getcwd), "paths"),
    call(Every, CONTROL, sys!(SYS_getdents64), "folders"),
    call(Every, CONTROL, sys!(SYS_memfd_create), "doorbells"),
    call(Every, CONTROL, sys!(SYS_pread64), "own mappings, files"),
    #[cfg(target_arch = "x86_64")]
    call(Every, CONTROL, sys!(SYS_readlink), "paths"),
    call(Every, CONTROL, sys!(SYS_readlinkat), "paths"),
    // Ledger of leases. Pollers enter blocks that a guest makes unreadable.
    call(Leased, POLLER, sys!(SYS_fchmod), "ledger"),
    call(Leased, POLLER, sys!(SYS_fdatasync), "ledger, flushes"),
    call(Leased, POLLER, sys!(SYS_flock), "ledger"),
    call(Leased, POLLER, sys!(SYS_fsync), "ledger"),
    #[cfg(target_arch = "x86_64")]
    call(Leased, POLLER, sys!(SYS_chmod), "ledger"),
    call(Leased, POLLER, sys!(SYS_fchmodat), "ledger"),
    #[cfg(target_arch = "x86_64")]
    call(Leased, POLLER, sys!(SYS_mkdir), "ledger"),
    call(Leased, POLLER, sys!(SYS_mkdirat), "ledger"),
    #[cfg(target_arch = "x86_64")]
    call(Leased, POLLER, sys!(SYS_open), "ledger"),
    call(
        Leased,
        POLLER,
        sys!(SYS_pwrite64),
        "ledger, configuration space",
    ),
    #[cfg(target_arch = "x86_64")]
    call(Leased, POLLER, sys!(SYS_rename), "ledger"),
    call(Leased, POLLER, sys!(SYS_renameat), "ledger"),
    // Files and block devices.
    call(
        File,
        POLLER,
        sys!(SYS_fallocate),
        "deallocated and zeroed blocks",
    ),
    call(File, POLLER, sys!(SYS_io_uring_enter), "I/O"),
    call(File, POLLER, sys!(SYS_sync_file_range), "flushes"),
    call(File, CONTROL, sys!(SYS_io_uring_register), "I/O queues"),
    call(File, CONTROL, sys!(SYS_io_uring_setup), "I/O queues"),
    call(
        File,
        CONTROL,
        sys!(SYS_fadvise64),
        "drives of keys and values",
    ),
    // Lease protocol of a drive's server.
    call(Served, CONTROL, sys!(SYS_connect), "server"),
    call(Served, CONTROL_AND_VCPU, sys!(SYS_recvfrom), "server"),
    call(Served, CONTROL_AND_VCPU, sys!(SYS_recvmsg), "server"),
    call(Served, CONTROL_AND_VCPU, sys!(SYS_sendmsg), "server"),
    call(Served, CONTROL, sys!(SYS_setsockopt), "server"),
    call(Served, CONTROL_AND_VCPU, sys!(SYS_shutdown), "server"),
    call(Served, CONTROL, sys!(SYS_socket), "server"),
];

const fn ioctl(
    scope: CallScope,
    threads: &'static [ThreadKind],
    (number, name): (u32, &'static str),
    reason: &'static str,
) -> TableEntry<IoctlRequest> {
    TableEntry {
        scope,
        threads,
        call: IoctlRequest {
            number,
            name,
            reason,
        },
    }
}

/// Requests, with the numbers of the kernel's headers (`linux/vfio.h`, `linux/iommufd.h`, `linux/fs.h`, `linux/dm-ioctl.h`).
const IOCTLS: &[TableEntry<IoctlRequest>] = &[
    ioctl(
        File,
        CONTROL,
        (0xC020_660B, "FS_IOC_FIEMAP"),
        "extents of the file",
    ),
    ioctl(
        File,
        MANAGER,
        (0xC138_FD0C, "DM_TABLE_STATUS"),
        "extents of volumes",
    ),
    ioctl(
        Physical,
        MANAGER,
        (0x3B64, "VFIO_GET_API_VERSION"),
        "container",
    ),
    ioctl(
        Physical,
        MANAGER,
        (0x3B65, "VFIO_CHECK_EXTENSION"),
        "container",
    ),
    ioctl(Physical, MANAGER, (0x3B66, "VFIO_SET_IOMMU"), "container"),
    ioctl(
        Physical,
        MANAGER,
        (0x3B67, "VFIO_GROUP_GET_STATUS"),
        "group",
    ),
    ioctl(
        Physical,
        MANAGER,
        (0x3B68, "VFIO_GROUP_SET_CONTAINER"),
        "group",
    ),
    ioctl(
        Physical,
        MANAGER,
        (0x3B69, "VFIO_GROUP_UNSET_CONTAINER"),
        "group",
    ),
    ioctl(
        Physical,
        MANAGER,
        (0x3B6A, "VFIO_GROUP_GET_DEVICE_FD"),
        "drive",
    ),
    ioctl(Physical, MANAGER, (0x3B6B, "VFIO_DEVICE_GET_INFO"), "drive"),
    ioctl(
        Physical,
        MANAGER,
        (0x3B6C, "VFIO_DEVICE_GET_REGION_INFO"),
        "registers",
    ),
    ioctl(
        Physical,
        MANAGER,
        (0x3B6D, "VFIO_DEVICE_GET_IRQ_INFO"),
        "removal",
    ),
    ioctl(
        Physical,
        MANAGER,
        (0x3B6E, "VFIO_DEVICE_SET_IRQS"),
        "removal",
    ),
    ioctl(Physical, CONTROL, (0x3B6F, "VFIO_DEVICE_RESET"), "recovery"),
    ioctl(
        Physical,
        MANAGER,
        (0x3B70, "VFIO_IOMMU_GET_INFO"),
        "container",
    ),
    ioctl(
        Physical,
        CONTROL,
        (0x3B71, "VFIO_IOMMU_MAP_DMA"),
        "guest memory",
    ),
    ioctl(
        Physical,
        CONTROL,
        (0x3B72, "VFIO_IOMMU_UNMAP_DMA"),
        "guest memory",
    ),
    ioctl(
        Physical,
        MANAGER,
        (0x3B76, "VFIO_DEVICE_BIND_IOMMUFD"),
        "drive",
    ),
    ioctl(
        Physical,
        MANAGER,
        (0x3B77, "VFIO_DEVICE_ATTACH_IOMMUFD_PT"),
        "drive",
    ),
    ioctl(
        Physical,
        MANAGER,
        (0x3B81, "IOMMU_IOAS_ALLOC"),
        "I/O address space",
    ),
    ioctl(
        Physical,
        MANAGER,
        (0x3B84, "IOMMU_IOAS_IOVA_RANGES"),
        "I/O address space",
    ),
    ioctl(
        Physical,
        CONTROL,
        (0x3B85, "IOMMU_IOAS_MAP"),
        "guest memory",
    ),
    ioctl(
        Physical,
        CONTROL,
        (0x3B86, "IOMMU_IOAS_UNMAP"),
        "guest memory",
    ),
];

#[cfg(test)]
mod tests {
    use super::super::FunctionCalls;
    use super::*;

    #[test]
    fn threads_need_the_calls_of_those_that_they_start() {
        let calls = |kind| -> Vec<&str> {
            FunctionCalls::OF_ANY
                .system_calls(kind)
                .map(SystemCall::name)
                .collect()
        };
        let (manager, control) = (calls(ThreadKind::Manager), calls(ThreadKind::Control));
        let (poller, vcpu) = (calls(ThreadKind::Poller), calls(ThreadKind::Vcpu));
        assert!(control.iter().all(|call| manager.contains(call)));
        assert!(poller.iter().all(|call| control.contains(call)));
        assert!(vcpu.iter().all(|call| control.contains(call)));
        assert!(control.contains(&"eventfd2") && !poller.contains(&"eventfd2"));
        assert!(poller.contains(&"io_uring_enter") && !vcpu.contains(&"io_uring_enter"));
        assert_eq!(FunctionCalls::OF_ANY.ioctls(ThreadKind::Vcpu).count(), 0);
    }

    #[test]
    fn threads_of_served_drives_have_no_call_that_opens_or_changes_a_drive() {
        let served = FunctionCalls::OF_SERVED;
        let calls: Vec<&str> = served
            .system_calls(ThreadKind::Manager)
            .map(SystemCall::name)
            .collect();
        for call in [
            "io_uring_enter",
            "io_uring_setup",
            "fallocate",
            "fdatasync",
            "fsync",
            "sync_file_range",
            "pwrite64",
        ] {
            assert!(!calls.contains(&call), "{call}");
        }
        assert!(calls.contains(&"connect"));
        assert_eq!(served.ioctls(ThreadKind::Manager).count(), 0);
    }

    #[test]
    fn every_call_has_one_entry() {
        for (place, entry) in SYSTEM_CALLS.iter().enumerate() {
            let call = &entry.call;
            let mut earlier = SYSTEM_CALLS[..place].iter();
            assert!(
                !earlier.any(|earlier| earlier.call.number == call.number),
                "{}",
                call.name()
            );
            assert!(!call.reason.is_empty());
        }
    }

    #[test]
    fn kinds_of_threads_follow_from_their_names() {
        for (name, kind) in [
            ("nvme0", ThreadKind::Control),
            ("nvme-flush", ThreadKind::Control),
            ("poll-watch", ThreadKind::Control),
            ("poll-shared-0", ThreadKind::Poller),
            ("poll-apart-3", ThreadKind::Poller),
            ("poll-queue-1", ThreadKind::Poller),
        ] {
            assert_eq!(ThreadKind::of_thread(name), kind, "{name}");
        }
    }
}

//! System calls that a server may make, as a seccomp filter.
//!
//! # Allow list
//!
//! The list is systemd's `@system-service` without some calls that would help an attacker and that the server never makes:
//! changes of user, namespaces and mounts, other processes' memory, keys, device nodes, SysV IPC, `userfaultfd`,
//! `personality` and priorities. This list is stricter than the list in `resources/nvme-mpt.service`. A deny list would
//! permit each system call that a new kernel adds.
//!
//! The new process of an upgrade is a child of this process and inherits this filter. Therefore, the list contains all
//! ordinary calls, even calls that only a later version may make. A later version that needs further calls gets its own
//! filter only when a supervisor starts it: see [`confine`](super).
//!
//! # ENOSYS
//!
//! A refused call returns ENOSYS, as on a kernel without this call. glibc and Rust's library then fall back to an older
//! call, such as from `clone3` to `clone`. They treat EPERM as final. So with EPERM, a newer library could not start
//! threads as long as its newer call is missing from this list. If the filter killed the process instead, one refused call
//! would take the drives from all guests.
//!
//! # Arguments
//!
//! - `clone` may create threads and processes, but no namespaces. `clone3` is refused: its flags are in memory, which a
//!   filter cannot read.
//! - `socket` may create UNIX and IP sockets.
//! - `mmap` may not map memory writable and executable. `mprotect` may not make memory executable.
//! - `ioctl` may not insert terminal input.
//!
//! The filter does not see requests that are submitted to an io_uring. Such requests can open files and sockets of any
//! kind, but none of them can start a process, create a namespace or access another process.

use std::collections::BTreeMap;
use std::env::consts::ARCH;

use libc::c_long;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

/// Calls that every process makes: memory, threads, signals, time, exit.
const PROCESS: &[c_long] = &[
    libc::SYS_brk,
    libc::SYS_capget,
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_execve,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_get_mempolicy,
    libc::SYS_get_robust_list,
    libc::SYS_getcpu,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getgroups,
    libc::SYS_getitimer,
    libc::SYS_getpgid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getpriority,
    libc::SYS_getrandom,
    libc::SYS_getresgid,
    libc::SYS_getresuid,
    libc::SYS_getrlimit,
    libc::SYS_getrusage,
    libc::SYS_getsid,
    libc::SYS_gettid,
    libc::SYS_gettimeofday,
    libc::SYS_getuid,
    libc::SYS_kill,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_memfd_create,
    libc::SYS_mincore,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_mlockall,
    libc::SYS_mremap,
    libc::SYS_mseal,
    libc::SYS_msync,
    libc::SYS_munlock,
    libc::SYS_munlockall,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal,
    libc::SYS_prctl,
    libc::SYS_prlimit64,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigsuspend,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_sched_get_priority_max,
    libc::SYS_sched_get_priority_min,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_getattr,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    // For `poll=…@2+3`, which pins pollers to processors.
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_setitimer,
    libc::SYS_setpgid,
    libc::SYS_setsid,
    libc::SYS_sigaltstack,
    libc::SYS_sysinfo,
    libc::SYS_tgkill,
    libc::SYS_timer_create,
    libc::SYS_timer_delete,
    libc::SYS_timer_getoverrun,
    libc::SYS_timer_gettime,
    libc::SYS_timer_settime,
    libc::SYS_times,
    libc::SYS_tkill,
    libc::SYS_umask,
    libc::SYS_uname,
    libc::SYS_wait4,
    libc::SYS_waitid,
];

/// Calls on files and descriptors. File modes and Landlock decide which files they may access.
const FILES: &[c_long] = &[
    libc::SYS_chdir,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_copy_file_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fadvise64,
    libc::SYS_fallocate,
    libc::SYS_fchdir,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    // For `owner=`, which changes a socket's user or group.
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_fcntl,
    libc::SYS_fdatasync,
    libc::SYS_fgetxattr,
    libc::SYS_flistxattr,
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_getxattr,
    libc::SYS_inotify_add_watch,
    libc::SYS_inotify_init1,
    libc::SYS_inotify_rm_watch,
    libc::SYS_lgetxattr,
    libc::SYS_linkat,
    libc::SYS_listxattr,
    libc::SYS_llistxattr,
    libc::SYS_lseek,
    libc::SYS_mkdirat,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_pipe2,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_read,
    libc::SYS_readahead,
    libc::SYS_readlinkat,
    libc::SYS_readv,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_sendfile,
    libc::SYS_splice,
    libc::SYS_statfs,
    libc::SYS_statx,
    libc::SYS_symlinkat,
    libc::SYS_sync,
    libc::SYS_sync_file_range,
    libc::SYS_syncfs,
    libc::SYS_tee,
    libc::SYS_truncate,
    libc::SYS_unlinkat,
    libc::SYS_utimensat,
    libc::SYS_write,
    libc::SYS_writev,
];

/// Calls for sockets, events and asynchronous I/O.
const EVENTS: &[c_long] = &[
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_io_cancel,
    libc::SYS_io_destroy,
    libc::SYS_io_getevents,
    libc::SYS_io_setup,
    libc::SYS_io_submit,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_listen,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_recvfrom,
    libc::SYS_recvmmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendmmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_signalfd4,
    libc::SYS_socketpair,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_gettime,
    libc::SYS_timerfd_settime,
];

/// Calls by which a process confines itself further. A successor of a later version may need them.
const CONFINING: &[c_long] = &[
    libc::SYS_landlock_add_rule,
    libc::SYS_landlock_create_ruleset,
    libc::SYS_landlock_restrict_self,
    libc::SYS_seccomp,
];

/// Legacy forms of calls that the other lists have in their newer form. Newer architectures lack the legacy forms.
#[cfg(target_arch = "x86_64")]
const OLDER: &[c_long] = &[
    libc::SYS_access,
    libc::SYS_alarm,
    libc::SYS_arch_prctl,
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_creat,
    libc::SYS_dup2,
    libc::SYS_epoll_create,
    libc::SYS_epoll_wait,
    libc::SYS_eventfd,
    libc::SYS_fork,
    libc::SYS_futimesat,
    libc::SYS_getdents,
    libc::SYS_getpgrp,
    libc::SYS_inotify_init,
    libc::SYS_lchown,
    libc::SYS_link,
    libc::SYS_lstat,
    libc::SYS_mkdir,
    libc::SYS_open,
    libc::SYS_pause,
    libc::SYS_pipe,
    libc::SYS_poll,
    libc::SYS_readlink,
    libc::SYS_rename,
    libc::SYS_rmdir,
    libc::SYS_select,
    libc::SYS_signalfd,
    libc::SYS_stat,
    libc::SYS_symlink,
    libc::SYS_time,
    libc::SYS_unlink,
    libc::SYS_utime,
    libc::SYS_utimes,
    libc::SYS_vfork,
];

#[cfg(not(target_arch = "x86_64"))]
const OLDER: &[c_long] = &[];

/// `clone` flags that create namespaces.
const NAMESPACES: libc::c_int = libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWUTS;

/// Socket families that a server may create.
const SOCKET_FAMILIES: [libc::c_int; 3] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6];

/// `ioctl` requests that insert input into a terminal, which a shell on that terminal would execute like typed input.
/// The kernel reads 32 bits of them, but their types differ between C libraries.
const TERMINAL_INPUT_IOCTLS: [libc::c_int; 2] = [libc::TIOCSTI as _, libc::TIOCLINUX as _];

/// Returns the compiled filter. Calls that are not on the list get the action `refusal`.
pub(super) fn build_filter(refusal: SeccompAction) -> Result<BpfProgram, BackendError> {
    let unconditional = [PROCESS, FILES, EVENTS, CONFINING, OLDER].concat();
    let mut rules: BTreeMap<c_long, Vec<SeccompRule>> = unconditional
        .into_iter()
        .map(|call| (call, vec![]))
        .collect();
    rules.extend(conditional_rules()?);
    let architecture = TargetArch::try_from(ARCH)?;
    SeccompFilter::new(rules, refusal, SeccompAction::Allow, architecture)?.try_into()
}

/// Returns the calls whose arguments are checked, each with its rules. A call is allowed if one of its rules matches.
fn conditional_rules() -> Result<Vec<(c_long, Vec<SeccompRule>)>, BackendError> {
    // Compares only the low 32 bits, since the kernel ignores the upper bits of these arguments.
    let argument = |number, operator, value: u64| {
        SeccompCondition::new(number, SeccompCmpArgLen::Dword, operator, value)
    };
    let without = |number, flags: libc::c_int| {
        let none = argument(number, SeccompCmpOp::MaskedEq(bits(flags)), 0)?;
        SeccompRule::new(vec![none])
    };
    let families = SOCKET_FAMILIES.map(|family| {
        let is_family = argument(0, SeccompCmpOp::Eq, bits(family))?;
        SeccompRule::new(vec![is_family])
    });
    let other_requests =
        TERMINAL_INPUT_IOCTLS.map(|request| argument(1, SeccompCmpOp::Ne, bits(request)));
    let other_requests: Result<Vec<_>, _> = other_requests.into_iter().collect();
    Ok(vec![
        (libc::SYS_clone, vec![without(0, NAMESPACES)?]),
        (
            libc::SYS_socket,
            families.into_iter().collect::<Result<_, _>>()?,
        ),
        (
            libc::SYS_mmap,
            vec![without(2, libc::PROT_WRITE)?, without(2, libc::PROT_EXEC)?],
        ),
        (libc::SYS_mprotect, vec![without(2, libc::PROT_EXEC)?]),
        (libc::SYS_ioctl, vec![SeccompRule::new(other_requests?)?]),
    ])
}

/// Converts an argument to the form in which a seccomp rule compares it.
fn bits(value: libc::c_int) -> u64 {
    value.cast_unsigned().into()
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io;
    use std::os::unix::net::UnixStream;
    use std::process::Command;

    use nvme_guest::threads::start_thread;
    use rustix::fs::{MemfdFlags, memfd_create};
    use rustix::io::Errno;
    use rustix::net::{AddressFamily, SocketType, socket};
    use vm_memory::MmapRegion;

    use super::*;

    /// Runs `work` on a thread with the filter.
    fn run_filtered<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
        let filtered = || {
            let filter = build_filter(super::super::REFUSAL).unwrap();
            seccompiler::apply_filter(&filter).unwrap();
            work()
        };
        start_thread("filtered", filtered).unwrap().join().unwrap()
    }

    /// Maps memory with the given protection.
    fn map_memory(rights: libc::c_int) -> Result<(), String> {
        let flags = libc::MAP_ANONYMOUS | libc::MAP_PRIVATE;
        let mapped = MmapRegion::<()>::build(None, 4096, rights, flags);
        mapped.map(drop).map_err(|error| error.to_string())
    }

    #[test]
    fn each_call_is_listed_once() {
        let lists = [PROCESS, FILES, EVENTS, CONFINING, OLDER].concat();
        let conditional = conditional_rules().unwrap();
        let mut calls: Vec<c_long> = conditional.iter().map(|(call, _)| *call).collect();
        calls.extend(&lists);
        let count = calls.len();
        calls.sort_unstable();
        calls.dedup();
        assert_eq!(calls.len(), count);
    }

    #[test]
    fn a_process_does_its_ordinary_work() {
        run_filtered(|| {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("file");
            fs::write(&path, "text").unwrap();
            fs::rename(&path, dir.path().join("other")).unwrap();
            File::open(dir.path()).unwrap().sync_all().unwrap();
            UnixStream::pair().unwrap();
            memfd_create("memory", MemfdFlags::CLOEXEC).unwrap();
            // Starting threads and processes uses clone3 or its fallback.
            start_thread("another", || {}).unwrap().join().unwrap();
            assert!(Command::new("true").status().unwrap().success());
            map_memory(libc::PROT_READ | libc::PROT_WRITE).unwrap();
        });
    }

    #[test]
    fn an_intruder_is_refused() {
        let root = || rustix::process::chroot("/");
        // Without the filter, only the lack of CAP_SYS_CHROOT makes the call fail.
        assert!(matches!(root(), Ok(()) | Err(Errno::PERM)));
        run_filtered(move || {
            assert_eq!(root(), Err(Errno::NOSYS));
            for family in [AddressFamily::NETLINK, AddressFamily::PACKET] {
                let made = socket(family, SocketType::RAW, None);
                assert_eq!(made.unwrap_err(), Errno::NOSYS);
            }
            socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
            let refused =
                map_memory(libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC).unwrap_err();
            let reason = io::Error::from_raw_os_error(libc::ENOSYS).to_string();
            assert!(refused.contains(&reason), "{refused}");
            // A program that the confined process starts is confined, too.
            let unshare = Command::new("unshare").args(["--user", "true"]).output();
            let unshare = unshare.unwrap();
            assert!(!unshare.status.success());
            let stderr = String::from_utf8(unshare.stderr).unwrap();
            assert!(stderr.contains("Function not implemented"), "{stderr}");
        });
    }
}

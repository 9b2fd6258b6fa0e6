// SPDX-License-Identifier: Apache-2.0

//! System calls of the threads that reconnect vfio-user devices.

use seccompiler::SeccompCmpOp::Eq;
use seccompiler::{
    BackendError, SeccompCmpArgLen as ArgLen, SeccompCondition as Cond, SeccompRule,
};

#[cfg(feature = "kvm")]
use super::create_vcpu_ioctl_seccomp_rule_kvm;
#[cfg(feature = "mshv")]
use super::create_vcpu_ioctl_seccomp_rule_mshv;

/// Regions are mapped, and the device may be dropped, by the same requests as
/// from a vCPU thread.
fn hypervisor_ioctl_rules() -> Result<Vec<SeccompRule>, BackendError> {
    Ok([
        #[cfg(feature = "kvm")]
        create_vcpu_ioctl_seccomp_rule_kvm()?,
        #[cfg(feature = "mshv")]
        create_vcpu_ioctl_seccomp_rule_mshv()?,
    ]
    .concat())
}

pub(super) fn vfio_user_reconnect_thread_rules()
-> Result<Vec<(i64, Vec<SeccompRule>)>, BackendError> {
    let unix_socket = Cond::new(0, ArgLen::Dword, Eq, libc::AF_UNIX as u64)?;
    Ok(vec![
        (libc::SYS_brk, vec![]),
        (libc::SYS_clock_gettime, vec![]),
        (libc::SYS_clock_nanosleep, vec![]),
        (libc::SYS_close, vec![]),
        (libc::SYS_connect, vec![]),
        (libc::SYS_dup, vec![]),
        (libc::SYS_exit, vec![]),
        (libc::SYS_fcntl, vec![]),
        (libc::SYS_fstat, vec![]),
        (libc::SYS_futex, vec![]),
        (libc::SYS_getrandom, vec![]),
        (libc::SYS_ioctl, hypervisor_ioctl_rules()?),
        (libc::SYS_madvise, vec![]),
        (libc::SYS_mmap, vec![]),
        (libc::SYS_mprotect, vec![]),
        (libc::SYS_mremap, vec![]),
        (libc::SYS_munmap, vec![]),
        (libc::SYS_nanosleep, vec![]),
        (libc::SYS_recvfrom, vec![]),
        (libc::SYS_recvmsg, vec![]),
        (libc::SYS_restart_syscall, vec![]),
        // The end of a thread blocks its signals.
        (libc::SYS_rt_sigprocmask, vec![]),
        (libc::SYS_rt_sigreturn, vec![]),
        (libc::SYS_sched_yield, vec![]),
        (libc::SYS_sendmsg, vec![]),
        (libc::SYS_sendto, vec![]),
        (libc::SYS_shutdown, vec![]),
        (libc::SYS_sigaltstack, vec![]),
        (libc::SYS_socket, vec![SeccompRule::new(vec![unix_socket])?]),
        (libc::SYS_statx, vec![]),
        (libc::SYS_writev, vec![]),
    ])
}

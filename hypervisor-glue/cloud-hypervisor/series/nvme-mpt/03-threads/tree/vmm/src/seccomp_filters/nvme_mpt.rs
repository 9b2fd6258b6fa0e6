// SPDX-License-Identifier: Apache-2.0

//! System calls of threads that carry out what guests ask of NVMe functions.

use seccompiler::SeccompCmpOp::Eq;
use seccompiler::{
    BackendError, SeccompCmpArgLen as ArgLen, SeccompCondition as Cond, SeccompRule,
};

#[cfg(feature = "mshv")]
use super::create_vcpu_ioctl_seccomp_rule_mshv;
#[cfg(feature = "kvm")]
use super::kvm::*;
use super::{
    FIONBIO, VFIO_CHECK_EXTENSION, VFIO_DEVICE_GET_INFO, VFIO_DEVICE_GET_IRQ_INFO,
    VFIO_DEVICE_GET_REGION_INFO, VFIO_DEVICE_RESET, VFIO_DEVICE_SET_IRQS, VFIO_GET_API_VERSION,
    VFIO_GROUP_GET_DEVICE_FD, VFIO_GROUP_GET_STATUS, VFIO_GROUP_SET_CONTAINER,
    VFIO_GROUP_UNSET_CONTAINER, VFIO_IOMMU_MAP_DMA, VFIO_IOMMU_UNMAP_DMA, VFIO_SET_IOMMU,
};

// See include/uapi/linux/vfio.h in the kernel code.
const VFIO_IOMMU_GET_INFO: u64 = 0x3b70;
// See include/uapi/linux/dm-ioctl.h in the kernel code.
const DM_TABLE_STATUS: u64 = 0xc138_fd0c;
// See include/uapi/linux/fs.h in the kernel code.
const FS_IOC_FIEMAP: u64 = 0xc020_660b;

type Rules = Vec<(i64, Vec<SeccompRule>)>;

fn requests(requests: &[u64]) -> Result<Vec<SeccompRule>, BackendError> {
    let rule = |request: &u64| {
        let condition = Cond::new(1, ArgLen::Dword, Eq, *request)?;
        SeccompRule::new(vec![condition])
    };
    requests.iter().map(rule).collect()
}

/// Interrupts, doorbells, and memory that is mapped into the guest.
fn hypervisor_requests() -> Result<Vec<SeccompRule>, BackendError> {
    let mut rules = requests(&[FIONBIO])?;
    #[cfg(feature = "kvm")]
    rules.extend(requests(&[
        KVM_CHECK_EXTENSION,
        KVM_IOEVENTFD,
        KVM_IRQFD,
        KVM_SET_GSI_ROUTING,
        KVM_SET_USER_MEMORY_REGION,
        KVM_SET_USER_MEMORY_REGION2,
    ])?);
    #[cfg(feature = "mshv")]
    rules.extend(create_vcpu_ioctl_seccomp_rule_mshv()?);
    Ok(rules)
}

fn drive_requests() -> Result<Vec<SeccompRule>, BackendError> {
    requests(&[
        DM_TABLE_STATUS,
        FS_IOC_FIEMAP,
        VFIO_CHECK_EXTENSION,
        VFIO_DEVICE_GET_INFO,
        VFIO_DEVICE_GET_IRQ_INFO,
        VFIO_DEVICE_GET_REGION_INFO,
        VFIO_DEVICE_RESET,
        VFIO_DEVICE_SET_IRQS,
        VFIO_GET_API_VERSION,
        VFIO_GROUP_GET_DEVICE_FD,
        VFIO_GROUP_GET_STATUS,
        VFIO_GROUP_SET_CONTAINER,
        VFIO_GROUP_UNSET_CONTAINER,
        VFIO_IOMMU_GET_INFO,
        VFIO_IOMMU_MAP_DMA,
        VFIO_IOMMU_UNMAP_DMA,
        VFIO_SET_IOMMU,
    ])
}

/// Rules for functions that open their drives in this process. The thread that starts the others
/// has them as well.
pub(super) fn nvme_mpt_thread_rules() -> Result<Rules, BackendError> {
    let mut ioctls = hypervisor_requests()?;
    ioctls.extend(drive_requests()?);
    let mut rules = common_rules(ioctls);
    rules.extend([
        // Drives of keys and values are directories.
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_chmod, vec![]),
        #[cfg(not(target_arch = "x86_64"))]
        (libc::SYS_fchmodat, vec![]),
        (libc::SYS_fadvise64, vec![]),
        (libc::SYS_fallocate, vec![]),
        (libc::SYS_fchmod, vec![]),
        (libc::SYS_fdatasync, vec![]),
        (libc::SYS_flock, vec![]),
        (libc::SYS_fsync, vec![]),
        (libc::SYS_io_uring_enter, vec![]),
        (libc::SYS_io_uring_register, vec![]),
        (libc::SYS_io_uring_setup, vec![]),
        (libc::SYS_landlock_add_rule, vec![]),
        (libc::SYS_landlock_create_ruleset, vec![]),
        (libc::SYS_landlock_restrict_self, vec![]),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_mkdir, vec![]),
        (libc::SYS_mkdirat, vec![]),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_rename, vec![]),
        (libc::SYS_renameat, vec![]),
        (libc::SYS_sync_file_range, vec![]),
    ]);
    Ok(rules)
}

/// Rules for functions whose drives another process opens: no call that reaches a drive.
pub(super) fn nvme_mpt_served_thread_rules() -> Result<Rules, BackendError> {
    Ok(common_rules(hypervisor_requests()?))
}

fn common_rules(ioctls: Vec<SeccompRule>) -> Rules {
    vec![
        (libc::SYS_brk, vec![]),
        (libc::SYS_clock_gettime, vec![]),
        (libc::SYS_clock_nanosleep, vec![]),
        (libc::SYS_clone, vec![]),
        (libc::SYS_clone3, vec![]),
        (libc::SYS_close, vec![]),
        (libc::SYS_connect, vec![]),
        (libc::SYS_dup, vec![]),
        (libc::SYS_epoll_create1, vec![]),
        (libc::SYS_epoll_ctl, vec![]),
        (libc::SYS_epoll_pwait, vec![]),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_epoll_wait, vec![]),
        (libc::SYS_eventfd2, vec![]),
        (libc::SYS_exit, vec![]),
        (libc::SYS_exit_group, vec![]),
        (libc::SYS_fcntl, vec![]),
        (libc::SYS_fstat, vec![]),
        (libc::SYS_fstatfs, vec![]),
        (libc::SYS_ftruncate, vec![]),
        (libc::SYS_futex, vec![]),
        (libc::SYS_getcwd, vec![]),
        (libc::SYS_getdents64, vec![]),
        (libc::SYS_getrandom, vec![]),
        (libc::SYS_ioctl, ioctls),
        (libc::SYS_lseek, vec![]),
        (libc::SYS_madvise, vec![]),
        (libc::SYS_memfd_create, vec![]),
        (libc::SYS_mmap, vec![]),
        (libc::SYS_mprotect, vec![]),
        (libc::SYS_mremap, vec![]),
        (libc::SYS_munmap, vec![]),
        (libc::SYS_nanosleep, vec![]),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_newfstatat, vec![]),
        (libc::SYS_openat, vec![]),
        (libc::SYS_prctl, vec![]),
        (libc::SYS_pread64, vec![]),
        (libc::SYS_pwrite64, vec![]),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_readlink, vec![]),
        (libc::SYS_readlinkat, vec![]),
        (libc::SYS_recvfrom, vec![]),
        (libc::SYS_recvmsg, vec![]),
        (libc::SYS_restart_syscall, vec![]),
        (libc::SYS_rseq, vec![]),
        (libc::SYS_rt_sigreturn, vec![]),
        (libc::SYS_sched_getaffinity, vec![]),
        (libc::SYS_sched_setaffinity, vec![]),
        (libc::SYS_sched_yield, vec![]),
        (libc::SYS_seccomp, vec![]),
        (libc::SYS_sendmsg, vec![]),
        (libc::SYS_set_robust_list, vec![]),
        (libc::SYS_setsockopt, vec![]),
        (libc::SYS_shutdown, vec![]),
        (libc::SYS_sigaltstack, vec![]),
        (libc::SYS_socket, vec![]),
        (libc::SYS_statx, vec![]),
        (libc::SYS_timerfd_create, vec![]),
        (libc::SYS_timerfd_settime, vec![]),
    ]
}

#[cfg(test)]
mod unit_tests {
    use super::*;

    #[test]
    fn test_served_functions_reach_no_drive() {
        let served = nvme_mpt_served_thread_rules().unwrap();
        let own = nvme_mpt_thread_rules().unwrap();
        for call in [
            libc::SYS_io_uring_enter,
            libc::SYS_io_uring_setup,
            libc::SYS_fallocate,
            libc::SYS_fdatasync,
            libc::SYS_fsync,
            libc::SYS_landlock_restrict_self,
        ] {
            assert!(!served.iter().any(|(allowed, _)| *allowed == call));
            assert!(own.iter().any(|(allowed, _)| *allowed == call));
        }
        let ioctls = |rules: &Rules| {
            let ioctl = rules.iter().find(|(call, _)| *call == libc::SYS_ioctl);
            ioctl.unwrap().1.len()
        };
        assert_eq!(ioctls(&own), ioctls(&served) + drive_requests().unwrap().len());
    }
}

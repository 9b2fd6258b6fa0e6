// SPDX-License-Identifier: Apache-2.0

//! System calls of threads that carry out what guests ask of NVMe functions. The crate of the
//! functions has the tables, with a reason for each call.

use nvme_mpt_vmm::sandbox::{FunctionCalls, ThreadKind};
use seccompiler::SeccompCmpOp::Eq;
use seccompiler::{
    BackendError, SeccompCmpArgLen as ArgLen, SeccompCondition as Cond, SeccompRule,
};

use super::FIONBIO;
#[cfg(feature = "mshv")]
use super::create_vcpu_ioctl_seccomp_rule_mshv;
#[cfg(feature = "kvm")]
use super::kvm::*;

type Rules = Vec<(i64, Vec<SeccompRule>)>;

fn request(number: u64) -> Result<SeccompRule, BackendError> {
    let condition = Cond::new(1, ArgLen::Dword, Eq, number)?;
    SeccompRule::new(vec![condition])
}

/// Interrupts, doorbells, and memory that is mapped into the guest.
fn hypervisor_requests() -> Result<Vec<SeccompRule>, BackendError> {
    let requests = [
        FIONBIO,
        #[cfg(feature = "kvm")]
        KVM_CHECK_EXTENSION,
        #[cfg(feature = "kvm")]
        KVM_IOEVENTFD,
        #[cfg(feature = "kvm")]
        KVM_IRQFD,
        #[cfg(feature = "kvm")]
        KVM_SET_GSI_ROUTING,
        #[cfg(feature = "kvm")]
        KVM_SET_USER_MEMORY_REGION,
        #[cfg(feature = "kvm")]
        KVM_SET_USER_MEMORY_REGION2,
    ];
    let rules: Result<Vec<_>, _> = requests.into_iter().map(request).collect();
    #[cfg(feature = "mshv")]
    let rules = rules.and_then(|mut rules| {
        rules.extend(create_vcpu_ioctl_seccomp_rule_mshv()?);
        Ok(rules)
    });
    rules
}

fn rules_of(calls: FunctionCalls) -> Result<Rules, BackendError> {
    // A thread that starts and stops functions starts all other threads, which inherit its filter.
    let kind = ThreadKind::Manager;
    let mut ioctls = hypervisor_requests()?;
    for ioctl in calls.ioctls(kind) {
        ioctls.push(request(ioctl.number.into())?);
    }
    let mut rules: Rules = calls
        .system_calls(kind)
        .map(|call| (call.number, vec![]))
        .collect();
    rules.push((libc::SYS_ioctl, ioctls));
    Ok(rules)
}

/// Rules for functions that open their drives in this process. The thread that starts the others
/// has them as well, and confines itself by Landlock.
pub(super) fn nvme_mpt_thread_rules() -> Result<Rules, BackendError> {
    let mut rules = rules_of(FunctionCalls::OF_ANY)?;
    rules.extend([
        (libc::SYS_landlock_add_rule, vec![]),
        (libc::SYS_landlock_create_ruleset, vec![]),
        (libc::SYS_landlock_restrict_self, vec![]),
    ]);
    Ok(rules)
}

/// Rules for functions on drives of a server. No call reaches a drive.
pub(super) fn nvme_mpt_served_thread_rules() -> Result<Rules, BackendError> {
    rules_of(FunctionCalls::OF_SERVED)
}

#[cfg(test)]
mod unit_tests {
    use super::*;

    fn calls(rules: &Rules) -> Vec<i64> {
        rules.iter().map(|(call, _)| *call).collect()
    }

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
            assert!(!calls(&served).contains(&call));
            assert!(calls(&own).contains(&call));
        }
    }

    #[test]
    fn test_threads_can_start_threads() {
        // pthread_create(3) blocks signals meanwhile.
        for rules in [nvme_mpt_thread_rules(), nvme_mpt_served_thread_rules()] {
            let rules = rules.unwrap();
            for call in [libc::SYS_clone3, libc::SYS_mmap, libc::SYS_rt_sigprocmask] {
                assert!(calls(&rules).contains(&call));
            }
        }
    }
}

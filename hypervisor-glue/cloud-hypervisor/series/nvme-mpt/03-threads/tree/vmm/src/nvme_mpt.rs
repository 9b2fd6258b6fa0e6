// SPDX-License-Identifier: Apache-2.0

//! Threads of NVMe functions.

use std::sync::OnceLock;
use std::thread::JoinHandle;
use std::{fs, io};

use log::error;
use nvme_mpt_vmm::{SpawnerThread, ThreadWork, sandbox};
use seccompiler::{BpfProgram, SeccompAction, apply_filter};

use crate::landlock::{Landlock, LandlockError};
use crate::seccomp_filters::{Thread, get_seccomp_filter};
use crate::vm_config::{ApplyLandlock, LandlockResult, VmConfig};

/// The thread that starts the others. It outlives VMs, as threads started later would inherit the
/// filter of the VMM thread.
static SPAWNER: OnceLock<SpawnerThread> = OnceLock::new();

fn confine(filter: &BpfProgram) -> io::Result<()> {
    if filter.is_empty() {
        return Ok(());
    }
    apply_filter(filter).map_err(io::Error::other)
}

/// Starts the thread that starts the others. Its caller must not be confined yet.
pub(crate) fn start_spawner(seccomp_action: &SeccompAction) -> io::Result<()> {
    let filter =
        get_seccomp_filter(seccomp_action, Thread::NvmeMpt, None).map_err(io::Error::other)?;
    let spawner = SpawnerThread::start("nvme_mpt", move || confine(&filter))?;
    // A second one has the same filter.
    let _ = SPAWNER.set(spawner);
    Ok(())
}

fn spawner() -> io::Result<&'static SpawnerThread> {
    SPAWNER
        .get()
        .ok_or_else(|| io::Error::other("The thread of NVMe functions was not started"))
}

/// Starts a thread, which has the filter of `thread_type`.
pub(crate) fn spawn(
    seccomp_action: &SeccompAction,
    thread_type: Thread,
    name: &str,
    work: ThreadWork,
) -> io::Result<JoinHandle<()>> {
    let filter = get_seccomp_filter(seccomp_action, thread_type, None).map_err(io::Error::other)?;
    spawner()?.spawn(
        name,
        Box::new(move || {
            if let Err(e) = confine(&filter) {
                error!("Error applying seccomp filter: {e:?}");
                return;
            }
            work();
        }),
    )
}

/// Restricts all threads that are started from now on: they may use the files of the VM's functions
/// and of the user's Landlock rules.
pub(crate) fn apply_landlock(vm_config: &VmConfig) -> LandlockResult<()> {
    let functions = vm_config
        .nvme_mpt
        .iter()
        .flatten()
        .map(|function| function.function_config())
        .collect::<Result<Vec<_>, _>>()
        .map_err(|_| LandlockError::InvalidPath)?;
    let user_rules = vm_config.landlock_rules.clone();

    spawner()
        .and_then(|spawner| {
            spawner.run(move || {
                let mut landlock = Landlock::new()?;
                for function in &functions {
                    // A rule is for a directory that exists.
                    fs::create_dir_all(&function.state_dir).map_err(LandlockError::OpenPath)?;
                    let files = sandbox::required_files(function)
                        .map_err(|_| LandlockError::InvalidPath)?;
                    for (path, writable) in files {
                        landlock.add_rule_with_access(&path, if writable { "rw" } else { "r" })?;
                    }
                }
                for rule in user_rules.iter().flatten() {
                    rule.apply_landlock(&mut landlock)?;
                }
                landlock.restrict_self()
            })
        })
        .map_err(LandlockError::OpenPath)?
}

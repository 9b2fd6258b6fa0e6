// SPDX-License-Identifier: Apache-2.0

//! Threads of the vCPUs, which pollers of NVMe functions stay beside.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

use nvme_mpt_vmm::{FunctionDevice, FunctionThread, MsixMessage, ThreadId, local_apic};

/// The threads that run vCPUs, and the functions that follow them.
#[derive(Default)]
pub struct VcpuThreads {
    /// By the identifiers of their vCPUs' local APICs
    running: Mutex<BTreeMap<u32, ThreadId>>,
    followers: Mutex<Vec<Weak<FunctionThread>>>,
}

/// A vCPU that runs on a thread, until this is dropped.
pub struct RunningVcpu {
    threads: Arc<VcpuThreads>,
    apic_id: u32,
}

impl VcpuThreads {
    /// Records that the calling thread runs a vCPU.
    pub fn enter(self: Arc<Self>, apic_id: u32) -> RunningVcpu {
        let thread = ThreadId::current();
        self.running.lock().unwrap().insert(apic_id, thread);
        self.tell();
        RunningVcpu {
            threads: self,
            apic_id,
        }
    }

    /// Returns the thread of the vCPU to which an interrupt message is sent; `None` if it has several
    /// destinations, or if the vCPU does not run.
    pub fn of_message(&self, message: MsixMessage) -> Option<ThreadId> {
        let apic_id = local_apic(message)?;
        self.running.lock().unwrap().get(&apic_id).copied()
    }

    /// Tells a function of changes as long as it exists.
    pub fn follow(&self, function: &Arc<FunctionThread>) {
        let mut followers = self.followers.lock().unwrap();
        followers.retain(|follower| follower.strong_count() > 0);
        followers.push(Arc::downgrade(function));
    }

    fn tell(&self) {
        // A function that is busy for long delays this thread only.
        let followers = self.followers.lock().unwrap().clone();
        for function in followers.iter().filter_map(Weak::upgrade) {
            function.post(FunctionDevice::update_vcpu_threads);
        }
    }
}

impl Drop for RunningVcpu {
    fn drop(&mut self) {
        self.threads.running.lock().unwrap().remove(&self.apic_id);
        self.threads.tell();
    }
}

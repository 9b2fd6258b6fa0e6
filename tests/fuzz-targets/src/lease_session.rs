//! A VMM that sends arbitrary messages of the lease protocol to a drive server. See `talk.rs` for the input.
//!
//! The server must neither panic nor block, and the lease must have no queue and no memory afterwards.

use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, LazyLock};
use std::thread;

use nvme_guest::rate_limit::RateLimits;
use nvme_guest::{
    ControllerBackend, DoorbellMode, LifecycleBackend, MemoryBackend, PersistedBackendParts,
    QueueBackend,
};
use nvme_mpt::LocalBackend;
use nvme_mpt_lease_protocol::{
    LeaseAdmission, LeaseEndCause, LeaseSession, LeaseSource, PeerIdentity,
};

use crate::{new_local_backend, talk};

static HOST: LazyLock<Arc<LocalBackend>> =
    LazyLock::new(|| Arc::new(new_local_backend(DoorbellMode::Shadow)));

struct FixedLeaseSource;

impl LeaseSource for FixedLeaseSource {
    fn attach(
        &self,
        _: PeerIdentity,
        options: &str,
        _: Option<PersistedBackendParts>,
        _: &AtomicBool,
    ) -> LeaseAdmission {
        match options {
            "refused" => LeaseAdmission::Refused("as it says".to_owned()),
            "other" => LeaseAdmission::NotServed,
            _ => LeaseAdmission::Attached(HOST.clone()),
        }
    }

    fn on_lease_end(&self, _: &Arc<dyn ControllerBackend>) -> LeaseEndCause {
        LeaseEndCause::Removed
    }
}

/// Runs one input.
pub fn run(input: &[u8]) {
    let (server, vmm) = UnixStream::pair().expect("a pair");
    let session = thread::spawn(move || {
        let _ = LeaseSession::new(server)
            .expect("credentials")
            .run(&FixedLeaseSource);
    });
    talk::send_lines(&vmm, input);
    talk::listen(&vmm);
    session.join().expect("no panic");
    assert!(HOST.io_doorbells().wakers.is_empty(), "a queue is left");
    assert_eq!(HOST.unmap_all().expect("idle"), 0, "memory is left");
    HOST.resume();
    HOST.set_rates(RateLimits::default());
}

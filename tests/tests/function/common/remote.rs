//! Functions with a remote back end, reached through the lease protocol. All tests can run in this way.

use std::env;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::thread;

use nvme_guest::threads::ThreadSpawner;
use nvme_guest::{ControllerBackend, PersistedBackendParts};
use nvme_mpt_lease_protocol::{
    LeaseAdmission, LeaseEndCause, LeaseSession, LeaseSource, PeerIdentity, attach_stream,
};

/// Environment variable. With the value `remote`, functions have remote back ends.
const CHOICE: &str = "NVME_MPT_BACKEND";

pub(crate) fn is_enabled() -> bool {
    env::var(CHOICE).is_ok_and(|choice| choice == "remote")
}

/// Server side of one session, with an existing lease.
pub(crate) struct OneLease(pub(crate) Mutex<Option<Arc<dyn ControllerBackend>>>);

impl LeaseSource for OneLease {
    fn attach(
        &self,
        _: PeerIdentity,
        options: &str,
        _: Option<PersistedBackendParts>,
        _: &AtomicBool,
    ) -> LeaseAdmission {
        assert_eq!(options, "options");
        match self.0.lock().unwrap().take() {
            Some(host) => LeaseAdmission::Attached(host),
            None => LeaseAdmission::NotServed,
        }
    }

    fn on_lease_end(&self, _: &Arc<dyn ControllerBackend>) -> LeaseEndCause {
        LeaseEndCause::Disconnected
    }
}

/// Wraps a back end: returns a remote back end that is connected to it by a session of its own.
pub(crate) fn wrap_remote(host: Arc<dyn ControllerBackend>) -> Arc<dyn ControllerBackend> {
    let (ours, theirs) = UnixStream::pair().unwrap();
    thread::spawn(move || {
        let leases = OneLease(Mutex::new(Some(host)));
        LeaseSession::new(theirs).unwrap().run(&leases).unwrap();
    });
    let threads = ThreadSpawner::default();
    let remote = attach_stream(ours, Path::new("pair"), "options", &threads).unwrap();
    Arc::new(remote.unwrap())
}

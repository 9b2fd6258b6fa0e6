//! A VMM that says anything to a drive server, in the lease protocol. See `support/talk.rs` for the input.
//!
//! Whatever is said, the server neither panics nor stalls, and the lease has no queue and no memory afterwards.

use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, LazyLock};
use std::thread;

use nvme_mpt::limit::RateLimits;
use nvme_mpt::{Attachment, DoorbellMode, HostSide, KeptParts};
use nvme_mpt_lease_protocol::{Admission, End, Leases, Peer, Session};

use crate::{attachment, talk};

static HOST: LazyLock<Arc<Attachment>> =
    LazyLock::new(|| Arc::new(attachment(DoorbellMode::Shadow)));

struct Always;

impl Leases for Always {
    fn attach(&self, _: Peer, options: &str, _: Option<KeptParts>, _: &AtomicBool) -> Admission {
        match options {
            "refused" => Admission::Refused("as it says".to_owned()),
            "other" => Admission::NotServed,
            _ => Admission::Attached(HOST.clone()),
        }
    }

    fn ended(&self, _: &Arc<dyn HostSide>) -> End {
        End::Removed
    }
}

/// Runs one input.
pub fn run(input: &[u8]) {
    let (server, vmm) = UnixStream::pair().expect("a pair");
    let session = thread::spawn(move || {
        let _ = Session::new(server).expect("credentials").run(&Always);
    });
    talk::say(&vmm, input);
    talk::listen(&vmm);
    session.join().expect("no panic");
    assert!(HOST.io_doorbells().wakers.is_empty(), "a queue is left");
    assert_eq!(HOST.unmap_all().expect("idle"), 0, "memory is left");
    HOST.resume();
    HOST.set_rates(RateLimits::default());
}

//! A drive server that sends arbitrary messages of the lease protocol to a VMM. See `talk.rs` for the input.
//!
//! The VMM must neither panic nor block.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::Duration;

use nvme_guest::rate_limit::RateLimits;
use nvme_guest::threads::ThreadSpawner;
use nvme_guest::{ControllerBackend, CqConfig, Gpa, MemoryRegion, SqConfig};
use nvme_mpt_lease_protocol::attach_stream;
use nvme_mpt_memory::memfd;
use nvme_spec::ids::QueueId;
use nvme_spec::registers::Doorbell;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::talk;

const MEMORY: u64 = 1 << 20;
/// Timeout of each wait.
const TIME: Duration = Duration::from_secs(1);

/// Calls each method of the back end once.
fn call_everything(host: &dyn ControllerBackend) {
    let qid = QueueId(1);
    let _ = host.map(MemoryRegion {
        gpa: Gpa(0),
        len: MEMORY,
        fd: memfd(c"guest", MEMORY).expect("memory"),
        offset: 0,
        readable: true,
        writable: true,
    });
    let base = Gpa(0);
    let vector = Some(1);
    let _ = host.create_cq(CqConfig {
        qid,
        base,
        entries: 4,
        vector,
    });
    let sq = SqConfig {
        qid,
        cqid: qid,
        base,
        entries: 4,
    };
    let _ = host.create_sq_within(sq, TIME);
    host.ring(Doorbell::SqTail(qid), 1);
    let _ = host.io_doorbells();
    if let Some(vector) = host.shared_parts().vectors.get(1) {
        vector.set_eventfd(Some(EventFd::new(EFD_NONBLOCK).expect("eventfd")));
        vector.set_masked(true);
        let _ = vector.is_pending();
        vector.set_masked(false);
        vector.clear_pending();
    }
    let _ = (host.status(), host.check_damage(), host.smart_health());
    let _ = (host.counters(), host.completed_commands(), host.stats());
    if let Some(changes) = host.changes() {
        host.remove_changes(&changes);
    }
    let _ = host.take_events();
    let _ = host.start_dirty_log();
    let _ = host.take_dirty_pages();
    host.stop_dirty_log();
    host.set_rate_limits(RateLimits::default());
    let _ = host.pause();
    if let Ok(state) = host.save() {
        let _ = host.check_state(&state);
        let _ = host.restore(&state);
    }
    host.resume();
    let _ = host.flush_within(TIME);
    let _ = host.delete_sq_within(qid, TIME);
    let _ = host.delete_cq_within(qid, TIME);
    let _ = host.reset_within(TIME);
    let _ = host.unmap_all();
}

/// Runs one input.
pub fn run(input: &[u8]) {
    let (server, vmm) = UnixStream::pair().expect("a pair");
    let input = input.to_vec();
    let server = thread::spawn(move || {
        talk::send_lines(&server, &input);
        talk::listen(&server);
    });
    let threads = ThreadSpawner::default();
    if let Ok(Some(host)) = attach_stream(vmm, Path::new("pair"), "options", &threads) {
        call_everything(&host);
    }
    server.join().expect("no panic");
}

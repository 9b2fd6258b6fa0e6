//! VMMs that send invalid messages to a drive server, or disconnect in the middle of a message.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use nvme_guest::{
    ControllerBackend, CqConfig, DmaError, EventReader, Gpa, MemoryRegion, PersistedBackendParts,
    SqConfig, VmmMapping,
};
use nvme_lease::PreviousDataPolicy;
use nvme_mpt::{LocalBackend, SharedBackendPartsSource};
use nvme_mpt_lease_protocol::{
    LeaseAdmission, LeaseEndCause, LeaseSession, LeaseSource, MESSAGE_MAX, PeerIdentity,
    SessionError, VERSION,
};
use nvme_mpt_memory::deadline::DRAIN_DEADLINE;
use nvme_mpt_memory::{Mapping, MappingAccess, memfd};
use nvme_spec::ids::QueueId;
use nvme_spec::registers::Doorbell;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use crate::common::remote::OneLease;
use crate::common::{Host, Setup, remote, wait_for};

/// Returns a message with its header.
fn message(text: &str, descriptors: u32) -> Vec<u8> {
    let length = (text.len() as u32).to_le_bytes();
    [&length[..], &descriptors.to_le_bytes(), text.as_bytes()].concat()
}

fn opening() -> Vec<u8> {
    let text = format!(r#"{{"version":{VERSION},"options":"options"}}"#);
    message(&text, 0)
}

/// Result of a session, the bytes it sent, and its lease.
type Ended = (Result<(), SessionError>, Vec<u8>, Weak<LocalBackend>);

/// Runs a session until the VMM disconnects. `vmm_says` sends the VMM's messages.
fn run_session(host: &Host, vmm_says: impl FnOnce(&mut UnixStream)) -> Ended {
    let (mut vmm, server) = UnixStream::pair().unwrap();
    let local_backend = host.open_local_backend_with(
        "lease",
        &Setup::nth(0),
        SharedBackendPartsSource::Outliving(EventReader::Trusted),
    );
    let attached: Weak<LocalBackend> = Arc::downgrade(&local_backend);
    let lease = OneLease(Mutex::new(Some(local_backend)));
    let session = std::thread::spawn(move || LeaseSession::new(server).unwrap().run(&lease));
    vmm_says(&mut vmm);
    let _ = vmm.shutdown(Shutdown::Write);
    let mut answers = Vec::new();
    let _ = vmm.read_to_end(&mut answers);
    (session.join().unwrap(), answers, attached)
}

/// Runs a session that receives these bytes.
fn run_session_with(host: &Host, bytes: &[u8]) -> Ended {
    // The write may fail: a server that has refused a message reads no more.
    run_session(host, |vmm| drop(vmm.write_all(bytes)))
}

/// Returns whether the lease of a session is free.
fn is_free(host: &Host, attached: &Weak<LocalBackend>) -> bool {
    attached.upgrade().is_none()
        && host
            .lease("lease", &Setup::nth(0), PreviousDataPolicy::Kept)
            .is_ok()
}

#[test]
fn a_vmm_that_disconnects_at_any_byte_leaves_no_state() {
    let host = Host::new("memory:16M", 512);
    let status = message(r#"{"status":{}}"#, 0);
    let whole = [opening(), status.clone(), status].concat();
    for end in 0..=whole.len() {
        let (result, _, attached) = run_session_with(&host, &whole[..end]);
        result.unwrap();
        wait_for("the end of the lease", || is_free(&host, &attached));
    }
}

#[test]
fn a_vmm_that_goes_between_two_messages_leaves_nothing_behind() {
    let host = Host::new("memory:16M", 512);
    let memory = memfd(c"guest", 4 * 4096).unwrap();
    let map =
        r#"{"map":{"region":{"gpa":0,"len":16384,"offset":0,"readable":true,"writable":true}}}"#;
    let messages = [
        r#"{"create_cq":{"config":{"qid":1,"base":0,"entries":8,"vector":null}}}"#,
        r#"{"create_sq_within":{"config":{"qid":1,"cqid":1,"base":4096,"entries":8},"time":{"secs":30,"nanos":0}}}"#,
        r#"{"io_doorbells":{}}"#,
        r#"{"start_dirty_log":{}}"#,
        r#"{"pause":{}}"#,
        r#"{"save":{}}"#,
        r#"{"resume":{}}"#,
        r#"{"flush_within":{"time":{"secs":30,"nanos":0}}}"#,
        r#"{"delete_sq_within":{"qid":1,"time":{"secs":30,"nanos":0}}}"#,
        r#"{"delete_cq_within":{"qid":1,"time":{"secs":30,"nanos":0}}}"#,
        r#"{"unmap_within":{"gpa":0,"len":16384,"time":{"secs":30,"nanos":0}}}"#,
    ];
    for end in 0..=messages.len() {
        let (result, answers, attached) = run_session(&host, |vmm| {
            vmm.write_all(&opening()).unwrap();
            let map = message(map, 1);
            let sent = vmm.send_with_fd(&map[..], memory.as_raw_fd());
            assert_eq!(sent.unwrap(), map.len());
            for text in &messages[..end] {
                vmm.write_all(&message(text, 0)).unwrap();
            }
        });
        result.unwrap();
        let answers = String::from_utf8_lossy(&answers);
        assert!(!answers.contains("\"Err\""), "{answers}");
        wait_for("the end of the lease", || is_free(&host, &attached));
    }
}

#[test]
fn an_invalid_message_ends_only_its_own_lease() {
    let host = Host::new("memory:16M", 512);
    let map =
        r#"{"map":{"region":{"gpa":0,"len":4096,"offset":0,"readable":true,"writable":true}}}"#;
    let mut too_large = message("", 0);
    too_large[..4].copy_from_slice(&(MESSAGE_MAX as u32 + 1).to_le_bytes());
    for (wrong, reason) in [
        (message("{", 0), "not one of the lease protocol"),
        (
            message(r#"{"unheard_of":{}}"#, 0),
            "not one of the lease protocol",
        ),
        (message(map, 0), "0 descriptors instead of 1"),
        (message(r#"{"status":{}}"#, 1), "0 descriptors instead of 1"),
        (too_large, "more than the 4194304 that are allowed"),
    ] {
        let (result, _, attached) = run_session_with(&host, &[opening(), wrong].concat());
        let SessionError::Channel(error) = result.unwrap_err() else {
            panic!("another error");
        };
        assert!(error.to_string().contains(reason), "{error}");
        wait_for("the end of the lease", || is_free(&host, &attached));
    }
}

#[test]
fn a_descriptor_that_nobody_asked_for_is_refused() {
    let host = Host::new("memory:16M", 512);
    let (vmm, server) = UnixStream::pair().unwrap();
    let local_backend = host.open_local_backend_with(
        "lease",
        &Setup::nth(0),
        SharedBackendPartsSource::Outliving(EventReader::Trusted),
    );
    let lease = OneLease(Mutex::new(Some(local_backend)));
    let session = std::thread::spawn(move || LeaseSession::new(server).unwrap().run(&lease));
    let sent = [opening(), message(r#"{"status":{}}"#, 0)];
    vmm.send_with_fds(&[&sent[0][..]], &[]).unwrap();
    vmm.send_with_fd(&sent[1][..], vmm.as_raw_fd()).unwrap();
    let error = session.join().unwrap().unwrap_err();
    let SessionError::Channel(error) = error else {
        panic!("another error");
    };
    assert!(
        error.to_string().contains("1 descriptors instead of 0"),
        "{error}"
    );
}

#[test]
fn another_version_is_refused_by_name() {
    let host = Host::new("memory:16M", 512);
    let future = r#"{"version":77,"options":"options","more":{"fields":[1]}}"#;
    let (result, answers, attached) = run_session_with(&host, &message(future, 0));
    result.unwrap();
    let answers = String::from_utf8_lossy(&answers).into_owned();
    assert!(
        answers.contains("the VMM speaks version 77 of the lease protocol"),
        "{answers}"
    );
    wait_for("the end of the lease", || is_free(&host, &attached));
}

/// A server whose lease takes until the server is stopped, like a lease with a long wipe.
struct EndlessLeaseSource;

impl LeaseSource for EndlessLeaseSource {
    fn attach(
        &self,
        _: PeerIdentity,
        _: &str,
        _: Option<PersistedBackendParts>,
        stop: &AtomicBool,
    ) -> LeaseAdmission {
        wait_for("the stop of a lease that is made", || {
            stop.load(Ordering::Relaxed)
        });
        LeaseAdmission::Refused("it was stopped".to_owned())
    }

    fn is_server_ending(&self) -> bool {
        true
    }

    fn on_lease_end(&self, _: &Arc<dyn ControllerBackend>) -> LeaseEndCause {
        LeaseEndCause::Disconnected
    }
}

#[test]
fn a_stopping_server_cancels_leases_in_preparation() {
    let (mut vmm, server) = UnixStream::pair().unwrap();
    // The VMM waits for the lease, and stays connected.
    vmm.write_all(&opening()).unwrap();
    let session =
        std::thread::spawn(move || LeaseSession::new(server).unwrap().run(&EndlessLeaseSource));
    session.join().unwrap().unwrap();
    let mut answers = String::new();
    vmm.read_to_string(&mut answers).unwrap();
    assert!(answers.contains("it was stopped"), "{answers}");
}

#[test]
fn vmm_doorbell_counts_appear_in_server_statistics() {
    const PAGE: u64 = 4096;
    let host = Host::new("memory:16M", 512);
    let local_backend = host.open_local_backend_with(
        "lease",
        &Setup::nth(0),
        SharedBackendPartsSource::Outliving(EventReader::Trusted),
    );
    let function = remote::wrap_remote(local_backend.clone());
    let region = MemoryRegion {
        gpa: Gpa(0),
        len: 4 * PAGE,
        fd: memfd(c"guest", 4 * PAGE).unwrap(),
        offset: 0,
        readable: true,
        writable: true,
    };
    function.map(region).unwrap();
    let (qid, entries) = (QueueId(2), 8);
    let cq = CqConfig {
        qid,
        base: Gpa(0),
        entries,
        vector: None,
    };
    function.create_cq(cq).unwrap();
    let sq = SqConfig {
        qid,
        cqid: qid,
        base: Gpa(PAGE),
        entries,
    };
    function.create_sq_within(sq, DRAIN_DEADLINE).unwrap();
    for doorbell in [Doorbell::SqTail(qid), Doorbell::CqHead(qid)] {
        for _ in 0..3 {
            assert!(function.ring(doorbell, 0));
        }
    }
    assert!(!function.ring(Doorbell::SqTail(QueueId(1)), 0));
    let stats = local_backend.stats();
    let exits: Vec<(u16, u64)> = (stats.queues.iter())
        .map(|queue| (queue.qid, queue.doorbell_exits))
        .collect();
    assert_eq!(exits, [(2, 6)]);
}

#[test]
fn a_server_gets_no_memory_that_its_vmm_has_not_completed() {
    let host = Host::new("memory:16M", 512);
    let local_backend = host.open_local_backend_with(
        "lease",
        &Setup::nth(0),
        SharedBackendPartsSource::Outliving(EventReader::Trusted),
    );
    let function = remote::wrap_remote(local_backend.clone());
    let len = 4 * 4096;
    let file = memfd(c"guest", len).unwrap();
    let map = |is_complete| {
        let memory = MemoryRegion {
            gpa: Gpa(0),
            len,
            fd: file.try_clone().unwrap(),
            offset: 0,
            readable: true,
            writable: true,
        };
        let own = Mapping::shared(file.as_fd(), 0, len as usize, MappingAccess::ReadWrite);
        let own = VmmMapping {
            memory: own.unwrap(),
            is_complete,
        };
        function.map_in_place(memory, own)
    };
    let refused = map(false).unwrap_err();
    assert!(matches!(refused, DmaError::Incomplete { .. }), "{refused}");
    assert_eq!(local_backend.stats().memory.regions, 0);
    map(true).unwrap();
    assert_eq!(local_backend.stats().memory.regions, 1);
    function
        .shared_parts()
        .memory
        .write(Gpa(4096), &[7])
        .unwrap();
    let mut byte = [0];
    local_backend
        .shared_parts()
        .memory
        .read(Gpa(4096), &mut byte)
        .unwrap();
    assert_eq!(byte, [7]);
}

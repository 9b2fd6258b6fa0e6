use std::sync::atomic::{AtomicU32, Ordering};

use nvme_guest::backend::{ControllerBackend, CqConfig, MemoryBackend, QueueBackend};
use nvme_guest::dma::MemoryRegion;
use nvme_guest::event::{DriveEvent, IoQueueEvent};
use nvme_lease::{LeaseRequest, Ledger, PreviousDataPolicy, RequestedBytes};
use nvme_mpt_memory::memfd;
use nvme_spec::ids::Nsid;
use nvme_spec::registers::Doorbell;

use super::*;
use crate::drive::idle_controller::IdleController;

fn config(drive: &Arc<Drive>, range: &str) -> LocalBackendConfig {
    // Uses a separate ledger, like a server with another state directory.
    let lease = Ledger::in_process().acquire(&LeaseRequest {
        id: "test",
        drive: drive.identity(),
        nsid: Nsid(1),
        wanted: RequestedBytes::Range(range.parse().expect("a range")),
        lba_shift: drive.lba_shift(),
        blocks: drive.blocks(),
        previous_data: PreviousDataPolicy::Refused,
    });
    LocalBackendConfig {
        drive: drive.clone(),
        lease: lease.expect("free"),
        reservation: None,
        pollers: PollerPool::new(),
        options: BackendOptions {
            queue_pairs: 1,
            doorbells: DoorbellMode::Shadow,
            ..BackendOptions::default()
        },
    }
}

#[test]
fn impossible_backends_are_refused_by_name() {
    let drive = IdleController::drive();
    let attach = |change: fn(&mut LocalBackendConfig)| {
        let mut config = config(&drive, "0+1M");
        change(&mut config);
        LocalBackend::new(config).expect_err("refused").to_string()
    };
    assert!(attach(|config| config.options.queue_pairs = 0).contains("1 to 511"));
    assert!(attach(|config| config.options.queue_pairs = 512).contains("512"));
    let message = attach(|config| {
        config.options.queue_pairs = 32;
        config.options.doorbell_stride = nvme_guest::DoorbellStride::Bytes64;
    });
    assert!(message.contains("1 to 31"), "{message}");
    let message = attach(|config| config.options.mdts = Some(Mdts::MAX));
    assert!(
        message.contains("2M") && message.contains("8K to 1M"),
        "{message}"
    );
    let message = attach(|config| config.options.memory = MemoryKinds::Any);
    assert!(message.contains("poll=dedicated"), "{message}");
    assert!(attach(|config| config.options.serial = Some("x".repeat(21))).contains("20 printable"));
    assert!(attach(|config| config.options.serial = Some("a\nb".into())).contains("20 printable"));
}

fn local_backend() -> LocalBackend {
    LocalBackend::new(config(&IdleController::drive(), "0+1M")).expect("an attachment")
}

#[test]
fn a_guest_gets_events_of_its_own_namespace_only() {
    let backend = local_backend();
    let changed = |nsid| IoQueueEvent::Drive(DriveEvent::NamespaceChanged(Nsid(nsid)));
    let health = IoQueueEvent::Drive(DriveEvent::Health);
    for event in [changed(7), health, changed(1)] {
        backend.context.events.report(event);
    }
    assert_eq!(backend.take_events(), [health, changed(1)]);
}

#[test]
fn statistics_do_not_wait_for_changing_queues() {
    let backend = local_backend();
    let stats = backend.try_stats().expect("nothing changes");
    assert_eq!(stats.id, "test");
    // The lock is held as in a queue deletion, until the commands in flight have ended.
    let change = backend.queues();
    assert!(backend.try_stats().is_none());
    drop(change);
    assert!(backend.try_stats().is_some());
}

#[test]
fn slow_queue_creation_delays_neither_statistics_nor_doorbells() {
    let controller = IdleController::new();
    let on_queue = controller.on_queue();
    let drive = Drive::new("idle", controller, None).expect("a namespace");
    let local_backend = LocalBackend::new(config(&drive, "0+1M")).expect("an attachment");
    let local_backend = Arc::new(local_backend);
    let hook_calls = Arc::new(AtomicU32::new(0));
    let (watched, counted) = (Arc::downgrade(&local_backend), hook_calls.clone());
    on_queue.set(move || {
        let local_backend = watched.upgrade().expect("it creates a queue");
        assert!(local_backend.try_stats().is_some(), "figures wait");
        assert!(!local_backend.ring(Doorbell::SqTail(QueueId(1)), 7));
        counted.fetch_add(1, Ordering::Relaxed);
    });
    // The drive is not called for an invalid queue.
    let nowhere = CqConfig {
        qid: QueueId(1),
        base: nvme_guest::Gpa(0x1000),
        entries: 2,
        vector: None,
    };
    let error = local_backend.create_cq(nowhere).expect_err("no memory");
    assert!(matches!(error, QueueError::NotMapped { .. }), "{error}");
    let wrong = CqConfig {
        qid: QueueId(2),
        ..nowhere
    };
    let error = local_backend.create_cq(wrong).expect_err("there is one");
    assert!(matches!(error, QueueError::InvalidQueueId(_)), "{error}");
    assert_eq!(hook_calls.load(Ordering::Relaxed), 0);
    let memory = MemoryRegion {
        gpa: nvme_guest::Gpa(0x1_0000),
        len: 0x1_0000,
        fd: memfd(c"test", 0x1_0000).expect("memory"),
        offset: 0,
        readable: true,
        writable: true,
    };
    let config = CqConfig {
        base: memory.gpa,
        ..nowhere
    };
    local_backend.map(memory).expect("mapped");
    local_backend.create_cq(config).expect("a queue");
    assert_eq!(hook_calls.load(Ordering::Relaxed), 1);
}

#[test]
fn a_doorbell_of_no_queue_keeps_no_value() {
    let backend = local_backend();
    for doorbell in [Doorbell::SqTail(QueueId(1)), Doorbell::CqHead(QueueId(1))] {
        assert!(!backend.ring(doorbell, 7));
        assert_eq!(backend.shared_parts().doorbells.load(doorbell), 0);
    }
    assert_eq!(backend.stats().queues, [], "no exit is counted");
}

#[test]
fn a_vector_that_the_function_does_not_have_is_refused() {
    let backend = local_backend();
    let config = CqConfig {
        qid: QueueId(1),
        base: nvme_guest::Gpa(0x1000),
        entries: 2,
        vector: Some(2),
    };
    let error = backend.create_cq(config).expect_err("there are two");
    assert!(matches!(error, QueueError::InvalidVector(2)), "{error}");
}

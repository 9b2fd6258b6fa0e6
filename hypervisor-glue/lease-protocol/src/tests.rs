//! Texts of messages, which VMMs and servers of different releases exchange. A change that breaks these tests needs a new
//! [version](crate::VERSION).

use std::time::Duration;

use nvme_guest::backend::CoalescingConfig;
use nvme_guest::host::{
    ChangeListDescription, CommandSetDescription, GuestPromise, IdentifyNamespaceData, IoCommand,
    NamespaceContents, NamespaceFact, NamespaceFactOffset, SparseStructure, UnreportedChanges,
};
use nvme_guest::rate_limit::RateLimits;
use nvme_guest::{
    CqConfig, DirtyRange, DmaError, DoorbellBuffer, DriveEvent, Gpa, IoQueueEvent, PersistedQueues,
    QueueError, QueueFailure, SqConfig,
};
use nvme_spec::event::AsyncEvent;
use nvme_spec::feature::AsyncEventConfiguration;
use nvme_spec::identify::Csi;
use nvme_spec::ids::QueueId;
use nvme_spec::log::LogPageId;
use nvme_spec::registers::Doorbell;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::call::{self, BackendCall};
use crate::message::{
    AttachReply, AttachRequest, DirtyPages, IoDoorbellsReply, LeaseEndNotice, MemoryRegionMessage,
    RemoteIoError, VERSION, VectorChange,
};

/// Checks the text of a message, and that parsing the text returns the same message.
#[track_caller]
fn assert_json<M: Serialize + DeserializeOwned>(message: &M, text: &str) {
    assert_eq!(serde_json::to_string(message).unwrap(), text);
    let read: M = serde_json::from_str(text).unwrap();
    assert_eq!(serde_json::to_string(&read).unwrap(), text);
}

/// Checks the text of a call's request.
#[track_caller]
fn assert_call<Reply>(call: BackendCall<Reply>, text: &str) {
    assert_json(&call.request, text);
}

#[test]
fn requests() {
    let request = AttachRequest {
        version: VERSION,
        options: "path=/srv/a".to_owned(),
        only_asks: false,
    };
    assert_json(&request, r#"{"version":1,"options":"path=/srv/a"}"#);
    let asking = AttachRequest {
        only_asks: true,
        ..request
    };
    let text = r#"{"version":1,"options":"path=/srv/a","only_asks":true}"#;
    assert_json(&asking, text);
    let region = MemoryRegionMessage {
        gpa: Gpa(4096),
        len: 8192,
        offset: 0,
        readable: true,
        writable: false,
    };
    let text =
        r#"{"map":{"region":{"gpa":4096,"len":8192,"offset":0,"readable":true,"writable":false}}}"#;
    assert_call(call::map(region), text);
    assert_call(
        call::map_claimed(region),
        &text.replace("map", "map_claimed"),
    );
    let (gpa, time) = (Gpa(4096), Duration::from_millis(1500));
    let text = r#"{"unmap_within":{"gpa":4096,"len":1,"time":{"secs":1,"nanos":500000000}}}"#;
    assert_call(call::unmap_within(gpa, 1, time), text);
    let (qid, entries) = (QueueId(1), 8);
    let cq = CqConfig {
        qid,
        base: gpa,
        entries,
        vector: Some(1),
    };
    let text = r#"{"create_cq":{"config":{"qid":1,"base":4096,"entries":8,"vector":1}}}"#;
    assert_call(call::create_cq(cq), text);
    let sq = SqConfig {
        qid,
        cqid: qid,
        base: gpa,
        entries,
    };
    let text = r#"{"create_sq_within":{"config":{"qid":1,"cqid":1,"base":4096,"entries":8},"time":{"secs":1,"nanos":500000000}}}"#;
    assert_call(call::create_sq_within(sq, time), text);
    let text = r#"{"delete_sq_within":{"qid":1,"time":{"secs":1,"nanos":500000000}}}"#;
    assert_call(call::delete_sq_within(qid, time), text);
    let text = r#"{"delete_cq_within":{"qid":1,"time":{"secs":1,"nanos":500000000}}}"#;
    assert_call(call::delete_cq_within(qid, time), text);
    let coalescing = CoalescingConfig {
        threshold_z: 1,
        time_100us: 2,
        disabled: u128::MAX,
    };
    let text = r#"{"set_coalescing":{"coalescing":{"threshold_z":1,"time_100us":2,"disabled":340282366920938463463374607431768211455}}}"#;
    assert_call(call::set_coalescing(coalescing), text);
    let text = r#"{"set_rate_limits":{"rates":{"iops":null,"bandwidth":null}}}"#;
    assert_call(call::set_rate_limits(RateLimits::default()), text);
    let buffer = DoorbellBuffer {
        shadow: gpa,
        event_idx: Gpa(8192),
    };
    let text = r#"{"set_doorbell_buffer_within":{"buffer":{"shadow":4096,"event_idx":8192},"time":{"secs":1,"nanos":500000000}}}"#;
    assert_call(call::set_doorbell_buffer_within(buffer, time), text);
    let queues = PersistedQueues {
        cqs: vec![cq],
        sqs: vec![sq],
        doorbell_buffer: Some(buffer),
        revoked: false,
    };
    let text = r#"{"restore_running":{"queues":{"cqs":[{"qid":1,"base":4096,"entries":8,"vector":1}],"sqs":[{"qid":1,"cqid":1,"base":4096,"entries":8}],"doorbell_buffer":{"shadow":4096,"event_idx":8192},"revoked":false}}}"#;
    assert_call(call::restore_running(queues), text);
    let text = r#"{"pause_within":{"time":{"secs":1,"nanos":500000000}}}"#;
    assert_call(call::pause_within(time), text);
    let text = r#"{"reset_within":{"time":{"secs":1,"nanos":500000000}}}"#;
    assert_call(call::reset_within(time), text);
    let text = r#"{"flush_within":{"time":{"secs":1,"nanos":500000000}}}"#;
    assert_call(call::flush_within(time), text);
    let reported = UnreportedChanges::new(&[7], true);
    let text = r#"{"remove_changes":{"reported":{"ids":[7],"more":true}}}"#;
    assert_call(call::remove_changes(reported), text);
    for (change, name) in [
        (VectorChange::Connect, "connect"),
        (VectorChange::Disconnect, "disconnect"),
        (VectorChange::Mask, "mask"),
        (VectorChange::Unmask, "unmask"),
        (VectorChange::Ask, "ask"),
        (VectorChange::Clear, "clear"),
    ] {
        let text = format!(r#"{{"change_vector":{{"number":3,"change":"{name}"}}}}"#);
        assert_call(call::change_vector(3, change), &text);
    }
    for (request, name) in [
        (call::status().request, "status"),
        (call::check_damage().request, "check_damage"),
        (call::smart_health().request, "smart_health"),
        (call::changes().request, "changes"),
        (call::counters().request, "counters"),
        (call::completed_commands().request, "completed_commands"),
        (call::stats().request, "stats"),
        (call::take_events().request, "take_events"),
        (call::start_dirty_log().request, "start_dirty_log"),
        (call::take_dirty_pages().request, "take_dirty_pages"),
        (call::stop_dirty_log().request, "stop_dirty_log"),
        (call::io_doorbells().request, "io_doorbells"),
        (
            call::begin_untrapped_doorbells().request,
            "begin_untrapped_doorbells",
        ),
        (
            call::end_untrapped_doorbells().request,
            "end_untrapped_doorbells",
        ),
        (
            call::watch_admin_doorbells().request,
            "watch_admin_doorbells",
        ),
        (call::reset_connection().request, "reset_connection"),
        (call::pause().request, "pause"),
        (call::resume().request, "resume"),
        (call::revoke().request, "revoke"),
        (call::save().request, "save"),
    ] {
        assert_json(&request, &format!(r#"{{"{name}":{{}}}}"#));
    }
}

#[test]
fn command_sets() {
    let event = AsyncEvent(0x00BF_EF02);
    let list = ChangeListDescription {
        lid: LogPageId(0xBF),
        event,
        notice: AsyncEventConfiguration(1 << 27),
        unit: 8,
    };
    let own = CommandSetDescription {
        csi: Csi(2),
        contents: NamespaceContents::Blocks {
            unit: 8,
            writable: 6,
        },
        commands: vec![IoCommand::writing(0x7D)],
        namespace: IdentifyNamespaceData {
            structure: SparseStructure::from_structure(&[0_u8, 7, 8]),
            facts: vec![NamespaceFactOffset {
                offset: 16,
                fact: NamespaceFact::Used,
            }],
        },
        controller: SparseStructure::default(),
        change_list: Some(list),
        promises: vec![GuestPromise::new("size", 8_u64)],
    };
    let text = r#"{"csi":2,"contents":{"Blocks":{"unit":8,"writable":6}},"commands":[{"opcode":125,"changes_content":true}],"namespace":{"structure":[{"offset":1,"bytes":[7,8]}],"facts":[{"offset":16,"fact":"Used"}]},"controller":[],"change_list":{"lid":191,"event":12578562,"notice":134217728,"unit":8},"promises":[{"name":"size","value":8}]}"#;
    assert_json(&own, text);
}

#[test]
fn replies() {
    assert_json(&AttachReply::NotServed, r#""not_served""#);
    assert_json(&AttachReply::Served, r#""served""#);
    assert_json(&AttachReply::Waiting, r#""waiting""#);
    assert_json(&LeaseEndNotice::Removed, r#""removed""#);
    assert_json(&LeaseEndNotice::Ended, r#""ended""#);
    let reason = "no".to_owned();
    assert_json(
        &AttachReply::Refused { reason },
        r#"{"refused":{"reason":"no"}}"#,
    );
    let doorbells = IoDoorbellsReply {
        are_buffered: true,
        are_untrapped: false,
        wakers: vec![(Doorbell::SqTail(QueueId(1)), 0)],
        new_wakers: vec![0],
    };
    let text = r#"{"are_buffered":true,"are_untrapped":false,"wakers":[[{"SqTail":1},0]],"new_wakers":[0]}"#;
    assert_json(&doorbells, text);
    let (gpa, len) = (Gpa(4096), 4096);
    let pages = DirtyPages {
        ranges: vec![DirtyRange { gpa, len }],
        more: false,
    };
    assert_json(
        &pages,
        r#"{"ranges":[{"gpa":4096,"len":4096}],"more":false}"#,
    );
    let qid = QueueId(1);
    let reason = QueueFailure::HostQueue;
    let events = vec![
        IoQueueEvent::QueueFailed { qid, reason },
        IoQueueEvent::Drive(DriveEvent::Gone),
    ];
    let text = r#"[{"QueueFailed":{"qid":1,"reason":"HostQueue"}},{"Drive":"Gone"}]"#;
    assert_json(&events, text);
    let busy: Result<(), DmaError> = Err(DmaError::Busy { gpa, len });
    assert_json(&busy, r#"{"Err":{"Busy":{"gpa":4096,"len":4096}}}"#);
    let source = std::io::Error::from_raw_os_error(28);
    let host: Result<(), QueueError> = Err(QueueError::Host { qid, source });
    let text = r#"{"Err":{"Host":{"qid":1,"source":{"errno":28,"text":"No space left on device (os error 28)"}}}}"#;
    assert_json(&host, text);
    let source = std::io::Error::new(std::io::ErrorKind::ResourceBusy, "it is reset");
    let reset: Result<(), QueueError> = Err(QueueError::Host { qid, source });
    let text =
        r#"{"Err":{"Host":{"qid":1,"source":{"kind":"resource_busy","text":"it is reset"}}}}"#;
    assert_json(&reset, text);
    let late = std::io::Error::new(std::io::ErrorKind::TimedOut, "late");
    let late: Result<(), RemoteIoError> = Err(RemoteIoError(late));
    assert_json(&late, r#"{"Err":{"kind":"timed_out","text":"late"}}"#);
}

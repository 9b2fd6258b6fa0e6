use super::*;
use crate::host::idle::IdleController;
use crate::lease::{FormerData, LeaseRequest, Ledger};

fn config(drive: &Arc<Drive>, range: &str) -> AttachmentConfig {
    // A ledger of its own, as a server with another state folder has.
    let lease = Ledger::in_process().acquire(&LeaseRequest {
        id: "test",
        drive: drive.identity(),
        nsid: Nsid(1),
        range: range.parse().expect("a range"),
        lba_shift: drive.lba_shift(),
        blocks: drive.blocks(),
        former_data: FormerData::Refused,
    });
    AttachmentConfig {
        drive: drive.clone(),
        lease: lease.expect("free"),
        queue_pairs: 1,
        doorbells: DoorbellMode::Shadow,
        poll: PollPolicy::default(),
        pollers: Pollers::new(),
        memory: MemoryKinds::default(),
        serial: None,
    }
}

#[test]
fn impossible_attachments_are_refused_by_name() {
    let drive = IdleController::drive();
    let attach = |change: fn(&mut AttachmentConfig)| {
        let mut config = config(&drive, "0+1M");
        change(&mut config);
        Attachment::new(config).expect_err("refused").to_string()
    };
    assert!(attach(|config| config.queue_pairs = 0).contains("1 to 64"));
    assert!(attach(|config| config.queue_pairs = 65).contains("65"));
    let message = attach(|config| config.memory = MemoryKinds::Any);
    assert!(message.contains("poll=dedicated"), "{message}");
    assert!(attach(|config| config.serial = Some("x".repeat(21))).contains("20 printable"));
    assert!(attach(|config| config.serial = Some("a\nb".into())).contains("20 printable"));
}

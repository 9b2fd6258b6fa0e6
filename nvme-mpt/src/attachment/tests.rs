use super::*;
use crate::drive::DriveOptions;
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
fn a_range_of_a_file_is_attached_once_whatever_the_ledger_says() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    file.as_file().set_len(1 << 20).expect("set_len");
    let path = file
        .path()
        .to_str()
        .expect("UTF-8")
        .parse()
        .expect("a path");
    let open = || Drive::open(&path, DriveOptions::default()).expect("opens");
    let (one, other) = (open(), open());
    let first = Attachment::new(config(&one, "0+512K")).expect("free");
    let error = Attachment::new(config(&other, "256K+512K")).expect_err("taken");
    assert!(matches!(error, AttachError::InUse { .. }), "{error}");
    assert!(error.to_string().contains("256K+512K"), "{error}");
    let holder = std::error::Error::source(&error).expect("names the holder");
    let process = format!("process {} (", std::process::id());
    assert!(holder.to_string().contains(&process), "{holder}");
    Attachment::new(config(&other, "512K+512K")).expect("another range");
    drop(first);
    Attachment::new(config(&other, "256K+512K")).expect("free again");
}

#[test]
fn impossible_attachments_are_refused_by_name() {
    let path = "null:1M".parse().expect("a path");
    let drive = Drive::open(&path, DriveOptions::default()).expect("opens");
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

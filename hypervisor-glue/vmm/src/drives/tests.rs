use std::fs;

use nvme_guest::DoorbellMode;
use nvme_layers::faults::FaultPlan;
use nvme_lease::{LeaseRequest, Ledger, PreviousDataPolicy, RequestedBytes};
use nvme_models::ProfileSize;
use nvme_mpt::{BackendOptions, LocalBackend, LocalBackendConfig, LocalBackendError, PollerPool};
use nvme_spec::ids::Nsid;

use super::*;

#[test]
fn paths_name_drives() {
    let parse = |text: &str| text.parse::<DrivePath>();
    assert_eq!(parse("null:1T").expect("valid"), DrivePath::Null(1 << 40));
    assert_eq!(
        parse("memory:512M").expect("valid"),
        DrivePath::Memory(512 << 20)
    );
    assert_eq!(
        parse("/tmp/a:b").expect("valid"),
        DrivePath::File("/tmp/a:b".into())
    );
    let pci = DrivePath::Pci("0000:01:00.0".parse().expect("valid"));
    assert_eq!(parse("0000:01:00.0").expect("valid"), pci);
    assert_eq!(parse("01:00.0").expect("valid"), pci);
    assert_eq!(
        parse("/sys/bus/pci/devices/0000:01:00.0/").expect("valid"),
        pci
    );
    for text in [
        "",
        "null:",
        "memory:0",
        "memory:-1",
        "memory:99999999T",
        "null:1X",
        "null:G",
    ] {
        parse(text).expect_err(text);
    }
}

#[test]
fn a_process_opens_a_drive_once() {
    let dir = tempfile::tempdir().expect("a folder");
    let [path, link] = ["drive", "link"].map(|name| dir.path().join(name));
    std::fs::write(&path, vec![0; 1 << 20]).expect("written");
    std::fs::hard_link(&path, &link).expect("linked");
    let open_file = |path: &std::path::Path, options: &DriveOptions| {
        open(&DrivePath::File(path.to_owned()), options.clone())
    };
    let shares = |a: &Drive, b: &Drive| std::ptr::addr_eq(a.controller(), b.controller());
    let small = DriveOptions::default();
    let large = DriveOptions {
        lba: Some(LbaSize::B4096),
        ..DriveOptions::default()
    };
    let faulty = DriveOptions {
        faults: Some(Arc::new(FaultPlan::default())),
        ..DriveOptions::default()
    };
    let profile = "model = \"nvm\"\nunits = 1\nstripe = \"4K\"\n\
         read = { latency = \"1us\", bandwidth = \"1G\" }\n\
         write = { latency = \"1us\", bandwidth = \"1G\" }\n";
    let modelled = DriveOptions {
        profile: Some(Arc::new(
            DriveProfile::parse("test", profile).expect("a profile"),
        )),
        ..DriveOptions::default()
    };
    let first = open_file(&path, &small).expect("opened");
    for path in [&path, &link] {
        assert!(shares(&first, &open_file(path, &small).expect("found")));
        for (other, key) in [(&large, "lba"), (&faulty, "faults"), (&modelled, "profile")] {
            let error = open_file(path, other).expect_err("refused").to_string();
            assert!(error.contains("in this process"), "{error}");
            assert!(error.contains(&format!("the same {key}=")), "{error}");
        }
    }
    assert!(is_open(&DrivePath::File(link.clone())));
    drop(first);
    assert!(!is_open(&DrivePath::File(link)));
    // All functions of a drive share the drive's faults and profile.
    for (options, other) in [(&faulty, &modelled), (&modelled, &faulty)] {
        let first = open_file(&path, options).expect("opened");
        assert!(shares(&first, &open_file(&path, options).expect("found")));
        assert!(shares(&first, &open_file(&path, &small).expect("found")));
        open_file(&path, other).expect_err("refused");
    }

    let memory = DrivePath::Memory(1 << 20);
    let each = [(); 2].map(|()| open(&memory, small.clone()).expect("memory"));
    assert!(!shares(&each[0], &each[1]));
}

#[test]
fn finding_a_drive_returns_only_open_drives() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    file.as_file().set_len(1 << 20).expect("set_len");
    let path = DrivePath::File(file.path().to_owned());
    let options = DriveOptions::default();
    let error = find(&path, &options).expect_err("it is not open");
    assert!(matches!(error, OpenDriveError::Closed(_)), "{error}");
    assert!(!is_open(&path));
    let opened = open(&path, options.clone()).expect("opened");
    let found = find(&path, &options).expect("found");
    assert!(std::ptr::addr_eq(opened.controller(), found.controller()));
}

#[test]
fn drives_are_refused_with_a_reason() {
    let open = |path: &str, lba| {
        let path = path.parse().expect("valid");
        open(
            &path,
            DriveOptions {
                lba: Some(lba),
                ..DriveOptions::default()
            },
        )
        .expect_err("refused")
        .to_string()
    };
    assert!(open("/nonexistent/file", LbaSize::B512).contains("truncate -s"));
    assert!(open("null:4000", LbaSize::B4096).contains("smaller than one logical block"));
    assert!(open("fffe:1f:1f.7", LbaSize::B512).contains("fffe:1f:1f.7"));
    assert!(open("/dev/null", LbaSize::B512).contains("cannot be opened"));
}

#[test]
fn drives_of_keys_and_values_are_refused_with_a_reason() {
    let refused = |path: &str, faults: Option<&str>| {
        let path: DrivePath = path.parse().expect("a path");
        let options = DriveOptions {
            profile: Some(Arc::new(DriveProfile::Kv(KvProfile {
                max_value: ProfileSize(1 << 20),
                timing: None,
            }))),
            faults: faults.map(|plan| Arc::new(FaultPlan::parse("test", plan).expect("a plan"))),
            ..DriveOptions::default()
        };
        open(&path, options).expect_err("refused")
    };
    let describe = |error: OpenDriveError| error.to_string();
    assert!(describe(refused("null:1G", None)).contains("use memory:SIZE or a file"));
    assert!(describe(refused("memory:1G", Some("seed = 1"))).contains("leave faults= out"));
    assert!(describe(refused("/nonexistent/file", None)).contains("truncate -s"));
    assert!(describe(refused("/dev/null", None)).contains("not a regular file"));
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("drive.img");
    fs::write(&path, []).expect("written");
    let path = path.to_str().expect("UTF-8");
    assert!(describe(refused(path, None)).contains("truncate -s 16G"));
    assert_eq!(fs::metadata(path).expect("there").len(), 0);
}

fn config(drive: &Arc<Drive>, range: &str) -> LocalBackendConfig {
    // The ledger is private to this lease, as the ledger of a server with another state directory is.
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
fn a_range_of_a_file_is_attached_once_even_with_separate_ledgers() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    file.as_file().set_len(1 << 20).expect("set_len");
    let path = file
        .path()
        .to_str()
        .expect("UTF-8")
        .parse()
        .expect("a path");
    let open = || super::open(&path, DriveOptions::default()).expect("opens");
    let (one, other) = (open(), open());
    let first = LocalBackend::new(config(&one, "0+512K")).expect("free");
    let error = LocalBackend::new(config(&other, "256K+512K")).expect_err("taken");
    assert!(matches!(error, LocalBackendError::InUse { .. }), "{error}");
    assert!(error.to_string().contains("256K+512K"), "{error}");
    let holder = std::error::Error::source(&error).expect("names the holder");
    let process = format!("process {} (", std::process::id());
    assert!(holder.to_string().contains(&process), "{holder}");
    LocalBackend::new(config(&other, "512K+512K")).expect("another range");
    drop(first);
    LocalBackend::new(config(&other, "256K+512K")).expect("free again");
}

#[test]
fn a_disk_image_is_served_raw_only_on_request() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("image");
    let state = dir.path().join("state");
    let reserve = |options: &str| {
        let options = format!("path={},{options}", path.display());
        let options: crate::options::FunctionOptions = options.parse().expect("valid");
        let drive = open(&options.path, options.drive_options()).expect("opened");
        let ledgers = crate::open::LeaseLedgers::open(&state);
        let stop = std::sync::atomic::AtomicBool::new(false);
        let reserved = crate::open::reserve(&options, None, &drive, &ledgers, &stop);
        reserved.map(|_| ()).map_err(|error| error.to_string())
    };
    let write = |at: u64, mark: &[u8]| {
        use std::os::unix::fs::FileExt;
        let file = std::fs::OpenOptions::new().write(true).open(&path);
        file.expect("a file")
            .write_all_at(mark, at)
            .expect("written");
    };
    let qcow2 = b"QFI\xFB\0\0\0\x03";
    let file = std::fs::File::create(&path).expect("a file");
    file.set_len(64 << 20).expect("a length");
    write(0, qcow2);
    for place in ["range=0+8M", "range=8M+8M", "size=8M,unit=1M"] {
        let error = reserve(&format!("id=a,{place}")).expect_err("an image");
        assert!(
            error.contains("a qcow2 image") && error.contains("format=raw"),
            "{error}"
        );
        assert!(error.contains("qemu-img convert"), "{error}");
    }
    reserve("id=a,range=0+8M,format=raw").expect("the operator's word");
    // The ledger records that the range was leased with format=raw.
    reserve("id=a,range=0+8M").expect("leased before");
    reserve("id=b,range=8M+8M").expect("the header is data of a guest");
    // A header that a guest has written does not block a lease of its bytes, neither for this guest nor for another one.
    write(8 << 20, b"LUKS\xBA\xBE");
    reserve("id=b,range=8M+8M").expect("a guest's");
    reserve("id=c,range=8M+8M,data=keep").expect("handed over");
    // The check applies to bytes in the middle of the drive that were never leased, too.
    write(16 << 20, b"LUKS\xBA\xBE");
    let error = reserve("id=d,range=16M+8M").expect_err("encrypted");
    assert!(
        error.contains("from 16M on") && error.contains("cryptsetup"),
        "{error}"
    );
    reserve("id=d,range=24M+8M").expect("nothing there");
    let memory = "path=memory:8M,format=raw".parse::<crate::options::FunctionOptions>();
    let error = memory.expect_err("no image").to_string();
    assert!(error.contains("\"format\" is not for memory:8M"), "{error}");
}

/// Files that stand for disks of a host, and a state directory.
struct Host {
    dir: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn disk(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        let file = fs::File::create(&path).expect("a file");
        file.set_len(16 << 20).expect("a length");
        path
    }

    fn ledger(&self) -> Ledger {
        Ledger::open(&self.path("state"))
    }

    fn label(&self, disk: &str, name: &str, again: bool) -> Result<DriveLabel, String> {
        let name = name.parse().expect("a name");
        let labelled = label(&self.path(disk), &name, &self.ledger(), again, false);
        labelled.map_err(|error| crate::report::chain(&error))
    }

    /// Reserves a part of a disk. Returns its extents.
    fn reserve(&self, disk: &str, options: &str) -> Result<nvme_lease::LeaseExtents, String> {
        let options = format!("path={},{options}", self.path(disk).display());
        let options: crate::options::FunctionOptions = options.parse().expect("valid");
        let drive = open(&options.path, options.drive_options());
        let drive = drive.map_err(|error| crate::report::chain(&error))?;
        let ledgers = crate::open::LeaseLedgers::open(&self.path("state"));
        let stop = std::sync::atomic::AtomicBool::new(false);
        let reserved = crate::open::reserve(&options, None, &drive, &ledgers, &stop);
        let reserved = reserved.map(|(_, extents)| extents);
        reserved.map_err(|error| crate::report::chain(&error))
    }
}

fn assert_refused<T: std::fmt::Debug>(result: Result<T, String>, expected: &str) {
    let error = result.expect_err(expected);
    assert!(error.contains(expected), "{error}");
}

#[test]
fn a_drive_is_used_by_the_label_that_the_operator_gave_it() {
    let host = Host::new();
    host.disk("a");
    host.disk("b");
    host.reserve("a", "id=before,range=0+1M").expect("leased");
    let names = |drive: &str| {
        let lease = host.ledger().acquire(&LeaseRequest {
            id: "before",
            drive: drive.into(),
            nsid: Nsid(1),
            wanted: RequestedBytes::Range("0+1M".parse().expect("a range")),
            lba_shift: 9,
            blocks: (16 << 20) >> 9,
            previous_data: PreviousDataPolicy::Refused,
        });
        lease.expect("its own").identity()
    };
    let before = names(&ledger_name(&host.path("a")).expect("a file"));
    assert_refused(
        host.reserve("a", "id=x,size=1M,unit=1M,drive-id=pool"),
        "leases label",
    );
    host.label("a", "pool", false).expect("labelled");
    // Leases from before the label continue, and their guests see unchanged names.
    assert_eq!(
        names(&ledger_name(&host.path("a")).expect("a file")),
        before
    );
    host.reserve("a", "id=before,range=0+1M,drive-id=pool")
        .expect("its own");
    host.reserve("a", "id=x,size=1M,unit=1M,drive-id=pool")
        .expect("leased");
    // Leases without the label's name, with another name, on another drive, and on one of two drives with one label are
    // refused.
    assert_refused(
        host.reserve("a", "id=x,size=1M,unit=1M"),
        "say drive-id=pool",
    );
    assert_refused(
        host.reserve("a", "id=x,size=1M,unit=1M,drive-id=other"),
        "has the label drive-id=pool",
    );
    assert_refused(
        host.reserve("b", "id=x,size=1M,unit=1M,drive-id=pool"),
        "has no label drive-id=pool",
    );
    assert_refused(host.label("b", "pool", false), "choose another name");
    assert_refused(
        host.label("a", "other", false),
        "has the label drive-id=pool",
    );
    fs::copy(host.path("a"), host.path("copy")).expect("copied");
    let name: DriveName = "pool".parse().expect("a name");
    let by_name = || DriveOptions {
        name: Some(name.clone()),
        ..DriveOptions::default()
    };
    let open_at = |disk: &str| open(&DrivePath::File(host.path(disk)), by_name());
    let held = open_at("a").expect("opened");
    let error = open_at("copy").expect_err("a copy");
    assert!(
        matches!(error, OpenDriveError::DuplicateLabel { .. }),
        "{error}"
    );
    drop(held);
    // No lease can include the label's blocks.
    assert_refused(host.reserve("a", "id=y,range=15M+1M,drive-id=pool"), "15M");
    // The drive has grown, so its label is not at the end any more.
    let file = fs::OpenOptions::new()
        .write(true)
        .open(host.path("a"))
        .expect("a file");
    file.set_len(32 << 20).expect("longer");
    assert_refused(
        host.reserve("a", "id=x,size=1M,unit=1M,drive-id=pool"),
        "has no label",
    );
    host.label("a", "pool", true).expect("labelled again");
    assert_eq!(
        names(&ledger_name(&host.path("a")).expect("a file")),
        before
    );
    let extents = host.reserve("a", "id=x,size=1M,unit=1M,drive-id=pool");
    assert_eq!(extents.expect("its own").to_string(), "1M+1M");
}

#[test]
fn a_label_is_refused_where_blocks_are_in_use() {
    let host = Host::new();
    host.disk("a");
    host.reserve("a", "id=all").expect("leased");
    assert_refused(
        host.label("a", "pool", false),
        "is not empty, or belongs to a lease",
    );
    let path = host.disk("b");
    let file = fs::OpenOptions::new()
        .write(true)
        .open(path)
        .expect("a file");
    file.write_all_at(b"x", (16 << 20) - 1).expect("written");
    assert_refused(
        host.label("b", "pool", false),
        "is not empty, or belongs to a lease",
    );
    file.set_len(1 << 20).expect("shorter");
    assert_refused(host.label("b", "pool", false), "too small");
    // A guest that writes a label into its lease does not change the drive's name.
    host.disk("c");
    host.label("c", "pool", false).expect("labelled");
    host.reserve("c", "id=x,size=1M,unit=1M,drive-id=pool")
        .expect("leased");
    let forged = DriveLabel::new("pool".parse().expect("a name"));
    let file = fs::OpenOptions::new()
        .write(true)
        .open(host.path("a"))
        .expect("a file");
    file.write_all_at(&forged.to_block(), 15 << 20)
        .expect("written");
    host.reserve("a", "id=all").expect("its own");
}

#[test]
fn a_drive_that_lost_its_label_is_refused_by_its_other_names() {
    let host = Host::new();
    let path = host.disk("a");
    host.label("a", "pool", false).expect("labelled");
    host.reserve("a", "id=x,size=4M,unit=1M,drive-id=pool")
        .expect("leased");
    let file = fs::OpenOptions::new().write(true).open(path);
    let file = file.expect("a file");
    file.write_all_at(&[0; LABEL_BYTES], 15 << 20)
        .expect("overwritten");
    for place in ["size=4M,unit=1M", "range=0+1M"] {
        assert_refused(host.reserve("a", &format!("id=y,{place}")), "--again");
    }
    host.reserve("a", "id=y,range=8M+1M,data=keep")
        .expect("the operator's word");
    assert_refused(host.reserve("a", "id=z,size=4M,unit=1M"), "--again");
    // The ledger knows a labelled drive that this host seems to lack, because the label was overwritten. So the drive gets no
    // label with another name.
    assert_refused(host.label("a", "other", false), "drive-id:pool");
    host.label("a", "pool", true).expect("labelled again");
    let extents = host.reserve("a", "id=x,size=4M,unit=1M,drive-id=pool");
    assert_eq!(extents.expect("its own").to_string(), "0+4M");
}

/// The names of three disks change at each of 20 boots. Each function names its disk by path and label, and gets this disk or
/// an error.
#[test]
fn labelled_disks_in_changed_order_are_right_or_refused() {
    let host = Host::new();
    let mut order = [0_usize, 1, 2];
    for disk in order {
        host.disk(&format!("vd{disk}"));
        host.label(&format!("vd{disk}"), &format!("disk{disk}"), false)
            .expect("labelled");
    }
    let mut seed = 7_u64;
    let (mut right, mut refusals) = (0, 0);
    for boot in 0..20 {
        for (i, last) in [2, 1].into_iter().enumerate() {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let other = (seed >> 33) as usize % (3 - i);
            if other == last {
                continue;
            }
            let [one, two] = [last, other].map(|name| host.path(&format!("vd{name}")));
            let aside = host.path("aside");
            fs::rename(&one, &aside).expect("renamed");
            fs::rename(&two, &one).expect("renamed");
            fs::rename(&aside, &two).expect("renamed");
            order.swap(last, other);
        }
        for (number, disk) in order.into_iter().enumerate() {
            // The order of the functions alternates, because the first function gets the first free blocks.
            for id in [boot % 2, 1 - boot % 2] {
                let options = format!("id=vm{number}-{id},size=4M,unit=1M,drive-id=disk{number}");
                let reserved = host.reserve(&format!("vd{number}"), &options);
                assert_eq!(
                    reserved.is_ok(),
                    number == disk,
                    "boot {boot}: {reserved:?}"
                );
                let Ok(extents) = reserved else {
                    refusals += 1;
                    continue;
                };
                right += 1;
                let path = host.path(&format!("vd{number}"));
                let mut opening = fs::OpenOptions::new();
                let file = opening.read(true).write(true).open(path).expect("a disk");
                let own = format!("data of vm{number}-{id}");
                for part in extents.parts() {
                    let mut found = vec![0; own.len()];
                    file.read_exact_at(&mut found, part.start()).expect("read");
                    assert!(
                        found == own.as_bytes() || found.iter().all(|byte| *byte == 0),
                        "boot {boot}: {own} finds {found:?}"
                    );
                    file.write_all_at(own.as_bytes(), part.start())
                        .expect("written");
                }
            }
        }
    }
    assert!(
        right > 0 && refusals > 0,
        "{right} right, {refusals} refused"
    );
}

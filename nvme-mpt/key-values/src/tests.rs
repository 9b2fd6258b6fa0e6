use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use nvme_lease::range::BlockRange;
use nvme_spec::ids::Lba;

use super::*;
use nvme_models::ProfileSize;

const PROFILE: KvProfile = KvProfile {
    max_value: ProfileSize(1 << 20),
    timing: None,
};

fn open(path: &Path) -> Result<KeyValueController, KeyValueError> {
    KeyValueController::open_file(path, &PROFILE, &ThreadSpawner::default())
}

/// Creates an empty file.
fn create_empty_file(dir: &Path, len: u64) -> PathBuf {
    let path = dir.join("drive.img");
    File::create(&path)
        .and_then(|file| file.set_len(len))
        .expect("room");
    path
}

fn capacity(drive: &KeyValueController) -> u64 {
    drive.namespace.blocks << drive.namespace.lba_shift
}

#[test]
fn an_empty_file_becomes_a_drive_of_its_size() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = create_empty_file(dir.path(), 64 << 20);
    let drive = open(&path).expect("empty");
    assert_eq!(capacity(&drive), 64 << 20);
    let length = fs::metadata(&path).expect("there").len();
    assert!(length < 64 << 20, "it takes what its pairs take: {length}");
    drop(drive);
    assert_eq!(capacity(&open(&path).expect("its own")), 64 << 20);
    // The process ended after it had written the header, and before it had written the database.
    let file = File::options().write(true).open(&path).expect("there");
    for length in [4096, 4097, 64 << 20] {
        file.set_len(4096).expect("shorter");
        file.set_len(length).expect("as long");
        assert_eq!(capacity(&open(&path).expect("begun")), 64 << 20);
    }
}

#[test]
fn a_file_is_open_once() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = create_empty_file(dir.path(), 1 << 20);
    let drive = open(&path).expect("empty");
    let error = open(&path).expect_err("locked");
    assert!(matches!(error, KeyValueError::InUse { .. }), "{error}");
    // The file's blocks are not offered as a drive either.
    let blocks = Arc::new(nvme_software::SoftwareController::open_file(&path, 9).expect("a file"));
    let request = HostLeaseRequest {
        name: "test",
        namespace: blocks.namespaces()[0],
        parts: &[BlockRange {
            start: Lba(0),
            blocks: 1,
        }],
        reservation: None,
    };
    let error = blocks.clone().open_lease(&request).expect_err("locked");
    assert!(matches!(error, HostLeaseError::InUse(_)), "{error}");
    drop(drive);
    let _lease = blocks.open_lease(&request).expect("not locked any more");
    let error = open(&path).expect_err("locked");
    assert!(matches!(error, KeyValueError::InUse { .. }), "{error}");
}

#[test]
fn other_files_are_refused_and_unchanged() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = create_empty_file(dir.path(), 4 << 20);
    let file = File::options().write(true).open(&path).expect("there");
    // A file system may have its superblock here, for example.
    file.write_all_at(&[1], 3 << 20).expect("written");
    let error = open(&path).expect_err("somebody's");
    assert!(matches!(error, KeyValueError::Foreign(_)), "{error}");
    let bytes = fs::read(&path).expect("there");
    assert_eq!(bytes.len(), 4 << 20);
    assert_eq!(bytes.iter().filter(|byte| **byte != 0).count(), 1);

    let error = open(dir.path()).expect_err("a folder");
    assert!(matches!(error, KeyValueError::NotAFile(_)), "{error}");

    let path = create_empty_file(dir.path(), 1 << 20);
    drop(open(&path).expect("empty"));
    let file = File::options().write(true).open(&path).expect("there");
    // Overwrites the middle of the database's own header.
    file.write_all_at(&[0xFF; 4000], 4096 + 9).expect("written");
    let error = open(&path).expect_err("damaged");
    assert!(matches!(error, KeyValueError::Store { .. }), "{error}");
    file.write_all_at(&[2], 8).expect("written");
    let error = open(&path).expect_err("of a later version");
    assert!(
        matches!(error, KeyValueError::Version { version: 2, .. }),
        "{error}"
    );
}

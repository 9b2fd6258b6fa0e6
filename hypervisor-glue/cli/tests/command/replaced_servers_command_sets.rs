//! Guests with zones and with key-value pairs, whose servers are killed and replaced.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use nvme_mpt_tests::Error;
use nvme_mpt_tests::command::kv;
use nvme_mpt_tests::controller::{Config, Controller};
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::key_value::{KeyValues, Operation, step};
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::registers::CC_CSS_ALL;
use nvme_mpt_tests::rng::{Rng, fill_blocks};
use nvme_mpt_tests::status::COMMAND_INTERRUPTED;
use nvme_mpt_tests::vfio_user::VfioUserBar;
use nvme_mpt_tests::zoned::{action, state};

use crate::supervised_server::SupervisedServer;
use crate::support::{Bench, TIMEOUT};

/// Number of servers that end in a test; half of them are killed by SIGKILL.
const ENDS: u32 = 20;
/// Maximum number of commands of the guest between the ends of two servers.
const COMMANDS: u64 = 100;

/// Progress of a test, shared with its guest.
#[derive(Default)]
struct TestProgress {
    commands: AtomicU64,
    is_over: AtomicBool,
}

impl TestProgress {
    fn count(&self) {
        self.commands.fetch_add(1, Ordering::Relaxed);
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }
}

/// Ends a test when it is dropped, even by a panic.
struct EndTestOnDrop<'a>(&'a TestProgress);

impl Drop for EndTestOnDrop<'_> {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Relaxed);
    }
}

/// Runs a guest, while servers are killed and replaced in turn.
fn run_across_servers(
    supervised: &SupervisedServer,
    bench: &Bench,
    work: impl FnOnce(&TestProgress) + Send,
) {
    let course = &TestProgress::default();
    thread::scope(|scope| {
        let guest = scope.spawn(move || work(course));
        let ending = EndTestOnDrop(course);
        let mut rng = Rng::new(7);
        for end in 0..ENDS {
            let enough = course.commands.load(Ordering::Relaxed) + 1 + rng.below(COMMANDS);
            while course.commands.load(Ordering::Relaxed) < enough && !guest.is_finished() {
                thread::sleep(Duration::from_millis(1));
            }
            if guest.is_finished() {
                break;
            }
            match end % 2 {
                0 => supervised.kill_server(),
                _ => supervised.upgrade(bench),
            }
        }
        drop(ending);
        guest.join().unwrap();
    });
}

fn attach(bench: &Bench) -> Controller {
    let memory = GuestMemory::new(&[(1 << 20, 16 << 20)]).unwrap();
    let bar = VfioUserBar::attach(&bench.path("a.sock"), &memory).unwrap();
    let config = Config {
        command_set: CC_CSS_ALL,
        admin_timeout: TIMEOUT,
        ..Config::default()
    };
    Controller::attach(Arc::new(bar), memory, config, 1).unwrap()
}

/// Asserts the status of an interrupted command: its server was killed, and the command cannot be repeated.
#[track_caller]
fn assert_interrupted(error: &Error) {
    let status = error.completion().map(|cqe| cqe.status().code());
    assert_eq!(status, Some(COMMAND_INTERRUPTED), "{error}");
}

/// Sizes of a zone and of a command, in blocks of 4 KiB.
const ZONE: u64 = 256;
const PIECE: u64 = 16;
/// Number of zones that the guest uses.
const ZONES: u64 = 4;

const ZONED: &str = "model = \"zns\"\nzone_size = \"1M\"\nzone_capacity = \"1M\"\n\
                     max_open = 8\nmax_active = 8\nappend_limit = \"64K\"\n";

/// Returns the contents of a command's blocks.
fn blocks(tag: u64, slba: u64) -> Vec<u8> {
    let mut bytes = vec![0; PIECE as usize * 4096];
    fill_blocks(&mut bytes, tag, slba, 4096);
    bytes
}

fn pieces(zslba: u64) -> impl Iterator<Item = u64> {
    (zslba..zslba + ZONE).step_by(PIECE as usize)
}

/// Fills a zone, by writes and appends in turn. Returns false if an append was interrupted.
fn fill(disk: &mut Disk, zslba: u64, tag: u64, course: &TestProgress) -> bool {
    for (index, slba) in (0..).zip(pieces(zslba)) {
        let bytes = blocks(tag, slba);
        if index % 2 == 0 {
            disk.write(slba, &bytes).unwrap();
        } else {
            match disk.append(zslba, &bytes) {
                Ok(at) => assert_eq!(at, slba),
                Err(error) => {
                    assert_interrupted(&error);
                    let zone = disk.zone(zslba).unwrap();
                    let end = match zone.state {
                        state::FULL => zslba + ZONE,
                        _ => zone.write_pointer,
                    };
                    assert!([slba, slba + PIECE].contains(&end), "{slba}: {zone:?}");
                    return false;
                }
            }
        }
        course.count();
    }
    true
}

#[test]
fn zones_in_a_file_outlive_their_servers() {
    let bench = Bench::new();
    fs::write(bench.path("zones.toml"), ZONED).unwrap();
    let function = "path=drive.img,lba=4096,profile=./zones.toml,socket=a.sock,id=a";
    let supervised = SupervisedServer::start(&bench, &[function]);
    let mut controller = attach(&bench);
    let mut disk = Disk::open(&mut controller, 1).unwrap();
    disk.timeout = TIMEOUT;
    run_across_servers(&supervised, &bench, |course| {
        let (mut tag, mut filled) = (0, 0);
        while !course.is_over() {
            for zslba in (0..ZONES).map(|zone| zone * ZONE) {
                tag += 1;
                disk.zone_action(zslba, action::RESET).unwrap();
                if !fill(&mut disk, zslba, tag, course) {
                    continue;
                }
                assert_eq!(disk.zone(zslba).unwrap().state, state::FULL);
                for slba in pieces(zslba) {
                    let read = disk.read(slba, PIECE as u32).unwrap();
                    assert!(read == blocks(tag, slba), "block {slba}: other data");
                    course.count();
                }
                filled += 1;
            }
        }
        assert!(filled > 0);
    });
    drop((disk, controller));
    supervised.stop();
}

/// Size of a buffer in bytes. It is larger than any value.
const BUFFER_BYTES: usize = 8192;

fn value(tag: u64) -> Vec<u8> {
    let mut bytes = vec![0; 8 * (1 + tag as usize % 512)];
    fill_blocks(&mut bytes, tag, 0, 8);
    bytes
}

/// Key-value pairs of a guest. Each key is one byte.
struct Pairs {
    pairs: KeyValues,
    /// Tags of the values, by key.
    expected_tags: BTreeMap<u8, u64>,
}

impl Pairs {
    fn exists(&mut self, key: u8) -> bool {
        self.pairs.exists(&[key]).unwrap()
    }

    fn check(&mut self, key: u8) {
        match self.expected_tags.get(&key).copied() {
            Some(tag) => {
                let found = self.pairs.retrieve(&[key], BUFFER_BYTES).unwrap().0;
                assert!(found == value(tag), "key {key}: another value");
            }
            None => assert!(!self.exists(key), "key {key} is there"),
        }
    }

    fn store(&mut self, key: u8, tag: u64) {
        self.pairs.store(&[key], &value(tag)).unwrap();
        self.expected_tags.insert(key, tag);
    }

    fn delete(&mut self, key: u8) {
        if !self.expected_tags.contains_key(&key) {
            return;
        }
        if let Err(error) = self.pairs.delete(&[key]) {
            assert_interrupted(&error);
            if self.exists(key) {
                return;
            }
        }
        self.expected_tags.remove(&key);
    }

    /// Stores a value and deletes another key by one atomic command.
    fn replace(&mut self, key: u8, tag: u64) {
        let Some(other) = self
            .expected_tags
            .keys()
            .copied()
            .find(|other| *other != key)
        else {
            return;
        };
        let operation = |opcode, key, value| Operation {
            opcode,
            key: vec![key],
            options: 0,
            value,
        };
        let operations = [
            operation(kv::STORE, key, value(tag)),
            operation(kv::DELETE, other, Vec::new()),
        ];
        match self.pairs.batch(&operations) {
            Ok(found) => assert_eq!(found, [step::DONE; 2]),
            Err(error) => {
                assert_interrupted(&error);
                if self.exists(other) {
                    self.check(other);
                    return;
                }
            }
        }
        self.expected_tags.insert(key, tag);
        self.expected_tags.remove(&other);
        self.check(other);
    }
}

#[test]
fn keys_and_values_in_a_file_outlive_their_servers() {
    let bench = Bench::new();
    let supervised =
        SupervisedServer::start(&bench, &["path=drive.img,profile=kv,socket=a.sock,id=a"]);
    let mut controller = attach(&bench);
    let mut pairs = KeyValues::open(&mut controller, 1).unwrap();
    pairs.timeout = TIMEOUT;
    let mut guest = Pairs {
        pairs,
        expected_tags: BTreeMap::new(),
    };
    run_across_servers(&supervised, &bench, |course| {
        let mut rng = Rng::new(3);
        for tag in 1.. {
            if course.is_over() {
                break;
            }
            let key = b'a' + rng.below(8) as u8;
            match rng.below(4) {
                0 => guest.delete(key),
                1 => guest.replace(key, tag),
                _ => guest.store(key, tag),
            }
            guest.check(key);
            course.count();
        }
        for key in b'a'..=b'h' {
            guest.check(key);
        }
    });
    drop((guest, controller));
    supervised.stop();
}

//! Database contents after a power failure and after an error of the file system. Any part of the data that was not synced may
//! have reached the disk.

use std::io;

use proptest::prelude::*;

use super::*;
use crate::file::request_queue::KvReplyQueue;
use crate::pairs::{KvBatchStep, KvChange, KvQuery};
use nvme_mpt_memory::sync::{Mutex, MutexGuard};

/// A change of a disk since its last sync.
#[derive(Clone, Debug)]
enum Unsynced {
    Write(u64, Vec<u8>),
    Length(u64),
}

#[derive(Clone, Debug, Default)]
struct State {
    durable: Vec<u8>,
    now: Vec<u8>,
    unsynced: Vec<Unsynced>,
    /// Number of further writes that succeed, after which all writes fail; `None` if no write fails.
    writes_left: Option<usize>,
    /// Number of further syncs that succeed, after which one sync fails; `None` if no sync fails.
    syncs_left: Option<usize>,
}

impl State {
    /// Writes changes that were not synced to the disk, each with the probability of `chance`.
    fn write_back(&mut self, mut chance: impl FnMut() -> bool) {
        for done in self.unsynced.drain(..) {
            match done {
                Unsynced::Write(offset, data) => {
                    for (sector, bytes) in (0..).zip(data.chunks(512)) {
                        if chance() {
                            write(&mut self.durable, offset + 512 * sector, bytes);
                        }
                    }
                }
                Unsynced::Length(length) => {
                    if chance() {
                        self.durable.resize(length as usize, 0);
                    }
                }
            }
        }
    }
}

/// A disk in memory. After a power failure, the disk has the synced data and any part of the data that was not synced.
#[derive(Clone, Debug, Default)]
struct Disk(Arc<Mutex<State>>);

impl Disk {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("nothing panics with it")
    }

    /// Returns the disk after a power failure. `chance` decides for each sector whether its new content was written.
    fn cut_power(&self, chance: impl FnMut() -> bool) -> Self {
        let mut state = self.lock().clone();
        state.write_back(chance);
        Self::from_content(state.durable)
    }

    fn from_content(content: Vec<u8>) -> Self {
        Self(Arc::new(Mutex::new(State {
            durable: content.clone(),
            now: content,
            ..State::default()
        })))
    }
}

fn write(disk: &mut Vec<u8>, offset: u64, bytes: &[u8]) {
    let offset = offset as usize;
    let end = offset + bytes.len();
    if disk.len() < end {
        disk.resize(end, 0);
    }
    disk[offset..end].copy_from_slice(bytes);
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        Ok(self.lock().now.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let state = self.lock();
        let bytes = state.now.get(offset as usize..).unwrap_or(&[]);
        let bytes = bytes.get(..out.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        out.copy_from_slice(bytes);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut state = self.lock();
        state.now.resize(len as usize, 0);
        state.unsynced.push(Unsynced::Length(len));
        Ok(())
    }

    /// Works like Linux: data that a sync cannot write counts as written afterwards, and is still read from the page cache.
    fn sync_data(&self) -> io::Result<()> {
        let mut state = self.lock();
        if let Some(left) = state.syncs_left {
            state.syncs_left = left.checked_sub(1);
            if left == 0 {
                let mut count = 0;
                state.write_back(|| {
                    count += 1;
                    count % 3 == 0
                });
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
        }
        state.write_back(|| true);
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut state = self.lock();
        if let Some(left) = &mut state.writes_left {
            *left = left.checked_sub(1).ok_or(io::ErrorKind::StorageFull)?;
        }
        write(&mut state.now, offset, data);
        state.unsynced.push(Unsynced::Write(offset, data.to_vec()));
        Ok(())
    }
}

fn open(disk: &Disk) -> (KeyValueDatabase<Disk>, Arc<KeySpaceUsages>) {
    let usages = Arc::new(KeySpaceUsages::default());
    let store = KeyValueDatabase::open("disk".into(), disk.clone(), usages.clone()).expect("sound");
    (store, usages)
}

/// Executes requests on a key space in one transaction. Returns the replies in order.
fn execute_requests(
    store: &mut KeyValueDatabase<Disk>,
    name: u64,
    requests: Vec<KvRequest>,
) -> Vec<KvReply> {
    let mailbox = Arc::new(KvReplyQueue::new(requests.len()).expect("an eventfd"));
    let queued = (0..).zip(requests).map(|(slot, request)| {
        let queued_request = QueuedKvRequest {
            mailbox: mailbox.clone(),
            slot,
            capacity: 1 << 30,
            request,
        };
        (name, queued_request)
    });
    store.execute_requests(queued.collect());
    let mut replies = Vec::new();
    mailbox.take(&mut replies);
    replies.into_iter().map(|(_, reply)| reply).collect()
}

fn key(number: u8) -> KvKey {
    KvKey::new(&[b'k', number]).expect("short")
}

fn stored(number: u8, value: &[u8]) -> KvRequest {
    KvRequest::Change(KvChange::Store {
        key: key(number),
        value: value.to_vec(),
        only_if: None,
    })
}

/// Returns the values of a key space, by the numbers of their keys.
fn content(store: &mut KeyValueDatabase<Disk>, name: u64) -> BTreeMap<u8, Vec<u8>> {
    let max_bytes = 1 << 20;
    let numbers: Vec<u8> = (0..8).collect();
    let queries = numbers.iter().map(|number| {
        KvRequest::Query(KvQuery::Retrieve {
            key: key(*number),
            max_bytes,
        })
    });
    let replies = execute_requests(store, name, queries.collect());
    numbers
        .into_iter()
        .zip(replies)
        .filter(|(_, reply)| reply.status.is_success())
        .map(|(number, reply)| (number, reply.data))
        .collect()
}

type Changes = Vec<(u8, Option<(u8, usize)>)>;

fn requests(changes: &Changes) -> Vec<KvRequest> {
    let requests = changes.iter().map(|(number, value)| match value {
        Some((byte, len)) => stored(*number, &vec![*byte; *len]),
        None => KvRequest::Change(KvChange::Delete { key: key(*number) }),
    });
    requests.collect()
}

/// Combines the requests into one Batch if `as_one` is true.
fn combine_changes(as_one: bool, requests: Vec<KvRequest>) -> Vec<KvRequest> {
    if !as_one {
        return requests;
    }
    let steps = requests.into_iter().map(|request| match request {
        KvRequest::Change(change) => Ok(KvBatchStep::Change(change)),
        other => panic!("no change: {other:?}"),
    });
    vec![KvRequest::Batch(steps.collect())]
}

fn apply(model: &mut BTreeMap<u8, Vec<u8>>, changes: &Changes) {
    for (number, value) in changes {
        match value {
            Some((byte, len)) => drop(model.insert(*number, vec![*byte; *len])),
            None => drop(model.remove(number)),
        }
    }
}

fn batches() -> impl Strategy<Value = Vec<Changes>> {
    let len = prop_oneof![0..300_usize, 0..9000_usize, Just(100_000)];
    let value = prop::option::weighted(0.7, (any::<u8>(), len));
    prop::collection::vec(prop::collection::vec((0..8_u8, value), 1..6), 1..8)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// After a power failure, all acknowledged changes are present. Changes that were executed together and not acknowledged
    /// are all present or all absent.
    #[test]
    fn acknowledged_changes_survive_a_power_failure(
        batches in batches(),
        last in prop::collection::vec((0..8_u8, prop::option::weighted(0.7, (any::<u8>(), 0..20_000_usize))), 1..6),
        chances in prop::collection::vec(any::<bool>(), 64),
        failing in 0..12_usize,
        as_one in any::<bool>(),
    ) {
        let disk = Disk::default();
        let (mut store, _) = open(&disk);
        let mut model = BTreeMap::new();
        for changes in &batches {
            for reply in execute_requests(&mut store, 5, combine_changes(as_one, requests(changes))) {
                let status = reply.status;
                prop_assert!(status.is_success() || status == Status::KV_KEY_DOES_NOT_EXIST);
            }
            apply(&mut model, changes);
        }
        let mut chances = chances.iter().copied().cycle();
        let (mut after, usages) = open(&disk.cut_power(|| chances.next().unwrap_or(false)));
        prop_assert!(content(&mut after, 5) == model);
        prop_assert_eq!(usages.get(5).keys, model.len() as u64);
        prop_assert!(content(&mut after, 4).is_empty());

        // The power fails during the last changes, after a number of their writes.
        disk.lock().writes_left = Some(failing);
        let replies = execute_requests(&mut store, 5, combine_changes(as_one, requests(&last)));
        let mut changed = model.clone();
        apply(&mut changed, &last);
        let done = replies.iter().all(|reply| reply.status != Status::UNRECOVERED_ERROR);
        let (mut after, usages) = open(&disk.cut_power(|| chances.next().unwrap_or(false)));
        let found = content(&mut after, 5);
        prop_assert!(found == changed || (!done && found == model));
        prop_assert_eq!(usages.get(5).keys, found.len() as u64);

        // The disk is used again, and its writes succeed now.
        disk.lock().writes_left = None;
        let reply = execute_requests(&mut store, 5, vec![stored(7, b"again")]);
        prop_assert!(reply[0].status.is_success());
        let found = content(&mut store, 5);
        prop_assert_eq!(found.get(&7).map(Vec::as_slice), Some(&b"again"[..]));
        model.insert(7, b"again".to_vec());
        changed.insert(7, b"again".to_vec());
        prop_assert!(found == changed || (!done && found == model));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// A failed sync loses writes, and the syncs after it succeed. No change may rely on the lost writes.
    #[test]
    fn changes_lost_by_a_failed_sync_are_written_again(
        before in batches(),
        after in batches(),
        failing in 0..3_usize,
        failures in 1..3_usize,
        chances in prop::collection::vec(any::<bool>(), 64),
    ) {
        let disk = Disk::default();
        let (mut store, _) = open(&disk);
        let mut model = BTreeMap::new();
        for changes in &before {
            execute_requests(&mut store, 5, requests(changes));
            apply(&mut model, changes);
        }
        for _ in 0..failures {
            disk.lock().syncs_left = Some(failing);
            while disk.lock().syncs_left.is_some() {
                execute_requests(&mut store, 5, vec![stored(0, &[9; 9000])]);
            }
        }
        let reply = execute_requests(&mut store, 5, vec![stored(1, b"there")]);
        prop_assert!(reply[0].status.is_success());
        model.insert(1, b"there".to_vec());
        let found = content(&mut store, 5);
        let lost = model.insert(0, vec![9; 9000]);
        if found != model {
            match lost {
                Some(lost) => drop(model.insert(0, lost)),
                None => drop(model.remove(&0)),
            }
            prop_assert!(found == model);
        }
        // These changes do not write to the pages of the first key again.
        for changes in &after {
            let changes = &changes.iter().filter(|(number, _)| *number > 0).copied().collect();
            execute_requests(&mut store, 5, requests(changes));
            apply(&mut model, changes);
        }
        prop_assert!(content(&mut store, 5) == model);
        let mut chances = chances.iter().copied().cycle();
        let (mut left, usages) = open(&disk.cut_power(|| chances.next().unwrap_or(false)));
        prop_assert!(content(&mut left, 5) == model);
        prop_assert_eq!(usages.get(5).keys, model.len() as u64);
    }
}

#[test]
fn changes_lost_by_the_predecessor_are_written_again() {
    let disk = Disk::default();
    let (mut store, _) = open(&disk);
    execute_requests(&mut store, 5, vec![stored(1, b"kept")]);
    // The process is killed while a transaction is in the page cache, and the kernel fails to write the transaction back.
    disk.lock().writes_left = Some(3);
    execute_requests(&mut store, 5, vec![stored(2, &[7; 9000])]);
    disk.lock().writes_left = None;
    disk.lock().syncs_left = Some(0);
    let (mut store, _) = open(&disk);
    let found = content(&mut store, 5);
    let (mut left, _) = open(&disk.cut_power(|| false));
    assert_eq!(content(&mut left, 5), found);
    assert_eq!(found.get(&1).map(Vec::as_slice), Some(&b"kept"[..]));
}

#[test]
fn key_spaces_lie_apart() {
    let (mut store, usages) = open(&Disk::default());
    let names = [0, 1, 255, 256, u64::MAX - 1, u64::MAX];
    for (number, name) in (0..).zip(names) {
        execute_requests(&mut store, name, vec![stored(number, &[number])]);
    }
    for (number, name) in (0..).zip(names) {
        let expected = BTreeMap::from([(number, vec![number])]);
        assert_eq!(content(&mut store, name), expected);
        let from = KvKey::default();
        let list = KvRequest::Query(KvQuery::List {
            from,
            max_bytes: 4096,
        });
        let reply = execute_requests(&mut store, name, vec![list]);
        assert_eq!(reply[0].data, [1, 0, 0, 0, 2, 0, b'k', number]);
        assert_eq!(usages.get(name).keys, 1);
    }
}

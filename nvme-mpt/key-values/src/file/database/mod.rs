//! Execution of requests on the key-value pairs in a file, in transactions.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use log::error;
use redb::{
    Database, ReadableDatabase, ReadableTable, StorageBackend, StorageError, Table,
    TableDefinition, WriteTransaction,
};

use super::KeySpaceUsages;
use super::request_queue::QueuedKvRequest;
use super::synced_file::SyncedFile;
use crate::pairs::{
    KeySpaceUsage, KeyValuePairs, KeyValuePairsMut, KvReply, KvRequest, execute_batch,
    execute_change, execute_query,
};
use nvme_spec::key_value::{KEY_LENGTH_MAX, KvKey};
use nvme_spec::status::Status;

/// Table of values, by key space name and key.
const PAIRS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("pairs");

/// Table of used bytes and numbers of keys, by key space name.
const USAGE: TableDefinition<'_, u64, (u64, u64)> = TableDefinition::new("usage");

/// Maximum size of the database's cache, in bytes.
const CACHE_BYTES: usize = 64 << 20;

/// The database of a file of pairs.
#[derive(Debug)]
pub(super) struct KeyValueDatabase<B> {
    /// Path of the file for log messages.
    path: PathBuf,
    file: SyncedFile<B>,
    /// Open database; `None` after a failure, until it can be opened again.
    database: Option<Database>,
    /// True if the failure was logged that the database has at present.
    is_failing: bool,
    usages: Arc<KeySpaceUsages>,
}

impl<B: StorageBackend + Clone> KeyValueDatabase<B> {
    /// Opens or creates the database. Opening rolls back a transaction that a crash interrupted.
    pub(super) fn open(
        path: PathBuf,
        file: B,
        usages: Arc<KeySpaceUsages>,
    ) -> Result<Self, redb::Error> {
        let mut store = Self {
            path,
            file: SyncedFile::new(file),
            database: None,
            is_failing: false,
            usages,
        };
        store.database = Some(store.open_database()?);
        Ok(store)
    }

    fn open_database(&self) -> Result<Database, redb::Error> {
        // After a failed sync, the page cache differs from the disk, and the database would trust the page cache. A successful
        // sync makes both equal: after a failed one, the next attempt writes the data again.
        let synced = self.file.sync_data().or_else(|_| self.file.sync_data());
        synced.map_err(StorageError::Io)?;
        let database = Database::builder()
            .set_cache_size(CACHE_BYTES)
            .create_with_backend(self.file.clone())?;
        let transaction = database.begin_write()?;
        transaction.open_table(PAIRS)?;
        let usages: Result<Vec<_>, redb::Error> = transaction
            .open_table(USAGE)?
            .iter()?
            .map(|entry| {
                let (name, usage) = entry?;
                let (bytes, keys) = usage.value();
                Ok((name.value(), KeySpaceUsage { bytes, keys }))
            })
            .collect();
        transaction.commit()?;
        self.usages.set(usages?);
        Ok(database)
    }

    /// Executes requests, with all changes in one transaction, and replies once the transaction is durable.
    pub(super) fn execute_requests(&mut self, batch: Vec<(u64, QueuedKvRequest)>) {
        let (places, requests): (Vec<_>, Vec<_>) = batch
            .into_iter()
            .map(|(name, request)| {
                let place = (request.mailbox, request.slot);
                (place, (name, request.capacity, request.request))
            })
            .unzip();
        // The database may panic on a damaged file. Guests must get replies in this case, too.
        let replies = catch_unwind(AssertUnwindSafe(|| self.try_execute(requests)));
        let replies = replies.unwrap_or_else(|_panic| {
            Err(StorageError::Corrupted("the database panicked".to_owned()).into())
        });
        let failing = std::mem::replace(&mut self.is_failing, replies.is_err());
        let replies = replies.unwrap_or_else(|error| {
            if !failing {
                let path = self.path.display();
                error!("The keys and values in {path} cannot be read or written: {error}");
            }
            // After an error, the database refuses all requests. It is reopened, which restores the state before the
            // transaction.
            self.database = None;
            let failed = KvReply::from_status(Status::UNRECOVERED_ERROR);
            vec![failed; places.len()]
        });
        for ((mailbox, slot), reply) in places.into_iter().zip(replies) {
            mailbox.push(slot, reply);
        }
    }

    fn try_execute(
        &mut self,
        requests: Vec<(u64, u64, KvRequest)>,
    ) -> Result<Vec<KvReply>, redb::Error> {
        let database = match self.database.take() {
            Some(database) => database,
            None => self.open_database()?,
        };
        let database = self.database.insert(database);
        let changes = requests
            .iter()
            .any(|(_, _, request)| !matches!(request, KvRequest::Query(_)));
        if changes {
            let transaction = database.begin_write()?;
            return execute_transaction(transaction, requests, &self.usages);
        }
        let transaction = database.begin_read()?;
        let table = &transaction.open_table(PAIRS)?;
        let mut replies = Vec::with_capacity(requests.len());
        for (name, _, request) in requests {
            if let KvRequest::Query(query) = request {
                replies.push(execute_query(&TableKeySpace { table, name }, query)?);
            }
        }
        Ok(replies)
    }
}

/// Executes requests in a transaction, and commits the transaction if a request has changed something.
fn execute_transaction(
    transaction: WriteTransaction,
    requests: Vec<(u64, u64, KvRequest)>,
    usages: &KeySpaceUsages,
) -> Result<Vec<KvReply>, redb::Error> {
    let mut changed: BTreeMap<u64, KeySpaceUsage> = BTreeMap::new();
    let mut replies = Vec::with_capacity(requests.len());
    let mut table = transaction.open_table(PAIRS)?;
    for (name, capacity, request) in requests {
        let reply = match request {
            KvRequest::Query(query) => {
                let table = &table;
                execute_query(&TableKeySpace { table, name }, query)?
            }
            asked => {
                let mut usage_now = match changed.get(&name) {
                    Some(usage) => *usage,
                    None => usages.get(name),
                };
                let table = &mut table;
                let (space, usage) = (&mut TableKeySpaceMut { table, name }, &mut usage_now);
                let reply = match asked {
                    KvRequest::Query(query) => execute_query(space, query)?,
                    KvRequest::Change(change) => execute_change(space, usage, capacity, change)?,
                    KvRequest::Batch(steps) => execute_batch(space, usage, capacity, steps)?,
                };
                if reply.status.is_success() {
                    changed.insert(name, usage_now);
                }
                reply
            }
        };
        replies.push(reply);
    }
    drop(table);
    if changed.is_empty() {
        transaction.abort()?;
        return Ok(replies);
    }
    let mut table = transaction.open_table(USAGE)?;
    for (name, KeySpaceUsage { bytes, keys }) in &changed {
        table.insert(name, (*bytes, *keys))?;
    }
    drop(table);
    transaction.commit()?;
    usages.set(changed);
    Ok(replies)
}

/// A key in the database's table: the key space name followed by the key's bytes, so that the keys of a key space are adjacent.
#[derive(Clone, Copy, Debug)]
struct TableKey {
    bytes: [u8; Self::NAME_BYTES + KEY_LENGTH_MAX],
    length: usize,
}

impl TableKey {
    const NAME_BYTES: usize = size_of::<u64>();

    fn new(name: u64, key: &KvKey) -> Self {
        let mut bytes = [0; Self::NAME_BYTES + KEY_LENGTH_MAX];
        let (space, rest) = bytes.split_at_mut(Self::NAME_BYTES);
        // Big-endian, so that the bytes of names sort like their numbers.
        space.copy_from_slice(&name.to_be_bytes());
        let key = key.as_bytes();
        for (place, byte) in rest.iter_mut().zip(key) {
            *place = *byte;
        }
        let length = Self::NAME_BYTES + key.len();
        Self { bytes, length }
    }

    fn as_slice(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or(&self.bytes)
    }
}

/// A key space in the database's table.
struct TableKeySpace<'a, T> {
    table: &'a T,
    name: u64,
}

impl<T: ReadableTable<&'static [u8], &'static [u8]>> KeyValuePairs for TableKeySpace<'_, T> {
    type Error = redb::Error;

    fn with_value<R>(
        &self,
        key: &KvKey,
        show: impl FnOnce(&[u8]) -> R,
    ) -> Result<Option<R>, redb::Error> {
        let key = TableKey::new(self.name, key);
        let value = self.table.get(key.as_slice())?;
        Ok(value.map(|value| show(value.value())))
    }

    fn for_each_key(
        &self,
        from: &KvKey,
        mut show: impl FnMut(&KvKey) -> bool,
    ) -> Result<(), redb::Error> {
        let from = TableKey::new(self.name, from);
        for entry in self.table.range::<&[u8]>(from.as_slice()..)? {
            let (key, _) = entry?;
            let Some((name, key)) = key.value().split_first_chunk() else {
                break;
            };
            let ours = u64::from_be_bytes(*name) == self.name;
            let Some(key) = KvKey::new(key).filter(|_| ours) else {
                break;
            };
            if !show(&key) {
                break;
            }
        }
        Ok(())
    }
}

/// A key space in a write transaction, like [`TableKeySpace`].
struct TableKeySpaceMut<'a, 'txn> {
    table: &'a mut Table<'txn, &'static [u8], &'static [u8]>,
    name: u64,
}

impl KeyValuePairs for TableKeySpaceMut<'_, '_> {
    type Error = redb::Error;

    fn with_value<R>(
        &self,
        key: &KvKey,
        show: impl FnOnce(&[u8]) -> R,
    ) -> Result<Option<R>, redb::Error> {
        self.as_space().with_value(key, show)
    }

    fn for_each_key(
        &self,
        from: &KvKey,
        show: impl FnMut(&KvKey) -> bool,
    ) -> Result<(), redb::Error> {
        self.as_space().for_each_key(from, show)
    }
}

impl<'txn> TableKeySpaceMut<'_, 'txn> {
    fn as_space(&self) -> TableKeySpace<'_, Table<'txn, &'static [u8], &'static [u8]>> {
        TableKeySpace {
            table: self.table,
            name: self.name,
        }
    }
}

impl KeyValuePairsMut for TableKeySpaceMut<'_, '_> {
    fn insert(&mut self, key: &KvKey, value: Vec<u8>) -> Result<(), redb::Error> {
        let key = TableKey::new(self.name, key);
        self.table.insert(key.as_slice(), value.as_slice())?;
        Ok(())
    }

    fn remove(&mut self, key: &KvKey) -> Result<(), redb::Error> {
        let key = TableKey::new(self.name, key);
        self.table.remove(key.as_slice())?;
        Ok(())
    }
}

#[cfg(test)]
mod tests;

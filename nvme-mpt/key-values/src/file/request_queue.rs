//! Request queue from the queue pairs to the thread of a file of key-value pairs, and mailboxes for the replies.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

use log::error;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::pairs::{KvBatchStep, KvChange, KvQuery, KvReply, KvRequest};
use nvme_mpt_memory::sync::{Condvar, Mutex, MutexGuard};

/// Limits of a key space's requests in one transaction: the maximum number of requests, and the number of bytes at which no
/// further request is added. So a guest with many requests delays other guests only for a limited time.
const BATCH_REQUESTS_MAX: usize = 64;
const BATCH_BYTES_MAX: usize = 4 << 20;

/// A request of a queue pair.
#[derive(Debug)]
pub(in super::super) struct QueuedKvRequest {
    /// Mailbox for the reply.
    pub(in super::super) mailbox: Arc<KvReplyQueue>,
    /// Slot of the request's command in its queue pair.
    pub(in super::super) slot: u16,
    /// Capacity of the request's key space in bytes.
    pub(in super::super) capacity: u64,
    pub(in super::super) request: KvRequest,
}

impl QueuedKvRequest {
    /// Returns the maximum number of bytes that the request transfers in either direction.
    fn bytes(&self) -> usize {
        match &self.request {
            KvRequest::Change(KvChange::Store { value, .. }) => value.len(),
            KvRequest::Query(
                KvQuery::Retrieve { max_bytes, .. } | KvQuery::List { max_bytes, .. },
            ) => *max_bytes,
            KvRequest::Change(KvChange::Delete { .. })
            | KvRequest::Query(KvQuery::Exist { .. }) => 0,
            KvRequest::Batch(steps) => steps
                .iter()
                .map(|step| match step {
                    Ok(KvBatchStep::Change(KvChange::Store { value, .. })) => value.len(),
                    _ => 0,
                })
                .sum(),
        }
    }
}

/// Requests of all queue pairs that the thread has not taken. A queue pair limits the number of its own requests.
#[derive(Debug, Default)]
pub(super) struct KvRequestQueue {
    state: Mutex<KvRequestQueueState>,
    waker: Condvar,
    /// Number of batches of requests that the thread has taken.
    batches: AtomicU64,
}

#[derive(Debug, Default)]
struct KvRequestQueueState {
    /// Requests by key space name, in order of arrival.
    requests: BTreeMap<u64, VecDeque<QueuedKvRequest>>,
    is_closed: bool,
}

impl KvRequestQueue {
    pub(super) fn push(&self, name: u64, requests: Vec<QueuedKvRequest>) {
        self.lock()
            .requests
            .entry(name)
            .or_default()
            .extend(requests);
        self.waker.notify_one();
    }

    /// Returns the number of batches that the thread has taken. While this number does not change, the thread executes the last
    /// batch, or has no batch.
    pub(super) fn batches(&self) -> u64 {
        self.batches.load(Ordering::Relaxed)
    }

    /// Closes the queue: no request is added after this.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.waker.notify_one();
    }

    /// Waits for requests and takes a batch, with requests of each key space. Returns `None` once the queue is closed and
    /// empty.
    pub(super) fn next_batch(&self) -> Option<Vec<(u64, QueuedKvRequest)>> {
        let state = self.lock();
        let mut state = self
            .waker
            .wait_while(state, |state| state.requests.is_empty() && !state.is_closed)
            .unwrap_or_else(PoisonError::into_inner);
        let mut batch = Vec::new();
        for (&name, queue) in &mut state.requests {
            let mut bytes = 0;
            for _ in 0..BATCH_REQUESTS_MAX {
                let Some(request) = queue.pop_front() else {
                    break;
                };
                bytes += request.bytes();
                batch.push((name, request));
                if bytes >= BATCH_BYTES_MAX {
                    break;
                }
            }
        }
        state.requests.retain(|_, queue| !queue.is_empty());
        self.batches.fetch_add(1, Ordering::Relaxed);
        (!batch.is_empty()).then_some(batch)
    }

    fn lock(&self) -> MutexGuard<'_, KvRequestQueueState> {
        // The state is consistent at each point at which a panic can occur.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Mailbox for the replies to the requests of a queue pair.
///
/// The eventfd is readable exactly while the mailbox has replies, because both change under one lock. So each reply wakes a
/// sleeping poller, and an empty mailbox wakes none.
#[derive(Debug)]
pub(in super::super) struct KvReplyQueue {
    replies: Mutex<Vec<(u16, KvReply)>>,
    /// True if the mailbox has replies, so that a poller can check this without the lock.
    has_replies: AtomicBool,
    event: EventFd,
}

impl KvReplyQueue {
    pub(in super::super) fn new(slots: usize) -> io::Result<Self> {
        Ok(Self {
            replies: Mutex::new(Vec::with_capacity(slots)),
            has_replies: AtomicBool::new(false),
            event: EventFd::new(EFD_NONBLOCK)?,
        })
    }

    /// Returns a descriptor that is readable while the mailbox has replies.
    pub(in super::super) fn wait_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    #[inline]
    pub(in super::super) fn has_replies(&self) -> bool {
        self.has_replies.load(Ordering::Acquire)
    }

    /// Takes all replies.
    pub(in super::super) fn take(&self, into: &mut Vec<(u16, KvReply)>) {
        let mut replies = self.lock();
        into.append(&mut replies);
        if self.has_replies.swap(false, Ordering::Relaxed)
            && let Err(error) = self.event.read()
        {
            error!("Cannot stop waking a poller for keys and values: {error}");
        }
    }

    pub(super) fn push(&self, slot: u16, reply: KvReply) {
        let mut replies = self.lock();
        replies.push((slot, reply));
        if !self.has_replies.swap(true, Ordering::Release) {
            self.signal();
        }
    }

    fn signal(&self) {
        if let Err(error) = self.event.write(1) {
            error!("Cannot wake a poller for keys and values: {error}");
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(u16, KvReply)>> {
        // The state is consistent at each point at which a panic can occur.
        self.replies.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvme_spec::key_value::KvKey;

    fn queued_request(mailbox: &Arc<KvReplyQueue>, slot: u16, bytes: usize) -> QueuedKvRequest {
        QueuedKvRequest {
            mailbox: mailbox.clone(),
            slot,
            capacity: 0,
            request: KvRequest::Change(KvChange::Store {
                key: KvKey::default(),
                value: vec![0; bytes],
                only_if: None,
            }),
        }
    }

    #[test]
    fn a_guest_that_asks_for_a_lot_leaves_others_their_part() {
        let (desk, mailbox) = (
            KvRequestQueue::default(),
            Arc::new(KvReplyQueue::new(1).expect("an eventfd")),
        );
        let many = |count: u16, bytes: usize| {
            (0..count)
                .map(|n| queued_request(&mailbox, n, bytes))
                .collect()
        };
        desk.push(1, many(150, 10));
        desk.push(2, many(10, 1 << 20));
        desk.push(3, many(1, 10));
        desk.close();
        let mut slots = BTreeMap::<u64, Vec<u16>>::new();
        let mut counts = Vec::new();
        while let Some(batch) = desk.next_batch() {
            let count = |wanted: u64| batch.iter().filter(|(name, _)| *name == wanted).count();
            counts.push([1, 2, 3].map(count));
            for (name, requests) in batch {
                slots.entry(name).or_default().push(requests.slot);
            }
        }
        assert_eq!(counts, [[64, 4, 1], [64, 4, 0], [22, 2, 0]]);
        // A key space's replies are in the order of its requests.
        for slots in slots.values() {
            assert!(slots.is_sorted());
        }
    }

    #[test]
    fn a_mailbox_wakes_while_there_are_replies() {
        let mailbox = KvReplyQueue::new(4).expect("an eventfd");
        let mut replies = Vec::new();
        let is_signalled = || mailbox.event.read().inspect(|_| mailbox.signal()).is_ok();
        for _ in 0..3 {
            assert!(!mailbox.has_replies() && !is_signalled());
            mailbox.push(1, KvReply::SUCCESS);
            mailbox.push(2, KvReply::SUCCESS);
            assert!(mailbox.has_replies() && is_signalled());
            mailbox.take(&mut replies);
            // Takes again, as a reader does that was woken after the replies were taken.
            mailbox.take(&mut replies);
        }
        let slots: Vec<u16> = replies.into_iter().map(|(slot, _)| slot).collect();
        assert_eq!(slots, [1, 2, 1, 2, 1, 2]);
    }
}

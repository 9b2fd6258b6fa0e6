//! Queue of messages for the log thread.
//!
//! The log's reader determines the duration of a write: a stopped terminal, a full pipe or a full journal socket can block
//! it forever. Therefore, threads that log only put messages into a bounded queue, and the log thread writes them. If the
//! queue is full, messages are dropped and counted. Once the queue has space again, the number of dropped messages is
//! logged.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use log::Level;

/// Maximum number of queued messages.
const MESSAGES_MAX: usize = 1024;

/// Maximum size of all queued messages in bytes.
const BYTES_MAX: usize = 512 << 10;

/// A log message with owned contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LogMessage {
    pub(super) time: Timestamp,
    pub(super) level: Level,
    pub(super) target: String,
    /// Source file and line.
    pub(super) location: (Option<&'static str>, Option<u32>),
    pub(super) thread: String,
    pub(super) text: String,
    /// True to write only the text, without time, level and thread.
    pub(super) is_plain: bool,
    /// Fields for the journal.
    pub(super) fields: Vec<(String, String)>,
}

impl LogMessage {
    fn bytes(&self) -> usize {
        let fields = self.fields.iter();
        let fields = fields.map(|(key, value)| key.len() + value.len());
        size_of::<Self>() + self.text.len() + fields.sum::<usize>()
    }

    fn dropped_notice(number: u64) -> Self {
        Self {
            time: Timestamp::now(),
            level: Level::Warn,
            target: module_path!().to_owned(),
            location: (None, None),
            thread: "log".to_owned(),
            is_plain: false,
            text: format!("{number} messages were dropped, as the log's reader was too slow"),
            fields: Vec::new(),
        }
    }
}

#[derive(Debug, Default)]
struct QueuedMessages {
    messages: VecDeque<LogMessage>,
    bytes: usize,
    /// Number of dropped messages that are not reported yet.
    dropped: u64,
    /// Numbers of messages that were enqueued, and that were written.
    enqueued: u64,
    written: u64,
}

/// A bounded queue of messages. Its lock is held while a message is moved into or out of the queue, and never during a
/// write.
#[derive(Debug, Default)]
pub(super) struct MessageQueue {
    queued: Mutex<QueuedMessages>,
    not_empty: Condvar,
    message_written: Condvar,
    /// True if a message is queued or being written.
    has_unwritten: AtomicBool,
    dropped: AtomicU64,
}

impl MessageQueue {
    fn lock(&self) -> MutexGuard<'_, QueuedMessages> {
        // A poisoned lock is usable: no change can be interrupted by a panic.
        self.queued.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enqueues a message; if the queue is full, counts it as dropped. Does not wait for the reader.
    pub(super) fn put(&self, message: LogMessage) {
        let mut waiting = self.lock();
        let bytes = message.bytes();
        let is_full = waiting.messages.len() >= MESSAGES_MAX || waiting.bytes + bytes > BYTES_MAX;
        if is_full {
            waiting.dropped += 1;
            drop(waiting);
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        waiting.report_dropped();
        waiting.push(message);
        self.has_unwritten.store(true, Ordering::Release);
        drop(waiting);
        self.not_empty.notify_one();
    }

    /// Writes messages as they are enqueued. Never returns.
    pub(super) fn write_all(&self, mut write: impl FnMut(&LogMessage)) -> ! {
        loop {
            self.write_next(&mut write);
        }
    }

    fn write_next(&self, write: &mut impl FnMut(&LogMessage)) {
        let mut waiting = self.lock();
        let message = loop {
            match waiting.messages.pop_front() {
                Some(message) => break message,
                None => {
                    waiting = self
                        .not_empty
                        .wait(waiting)
                        .unwrap_or_else(PoisonError::into_inner);
                }
            }
        };
        waiting.bytes -= message.bytes();
        drop(waiting);
        write(&message);
        let mut waiting = self.lock();
        waiting.written += 1;
        if waiting.messages.is_empty() {
            waiting.report_dropped();
        }
        let has_unwritten = !waiting.messages.is_empty();
        self.has_unwritten.store(has_unwritten, Ordering::Release);
        drop(waiting);
        self.message_written.notify_all();
    }

    /// Waits until all queued messages are written, for at most `time`. Returns true if all were written.
    pub(super) fn flush(&self, time: Duration) -> bool {
        let waiting = self.lock();
        let put = waiting.enqueued;
        let waited = self
            .message_written
            .wait_timeout_while(waiting, time, |waiting| waiting.written < put);
        let (waiting, _) = waited.unwrap_or_else(PoisonError::into_inner);
        waiting.written >= put
    }

    /// Returns whether a message is queued or being written. Takes no lock, so that signal handlers can call this.
    pub(super) fn has_unwritten(&self) -> bool {
        self.has_unwritten.load(Ordering::Acquire)
    }

    /// Returns the total number of dropped messages.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

impl QueuedMessages {
    fn push(&mut self, message: LogMessage) {
        self.bytes += message.bytes();
        self.enqueued += 1;
        self.messages.push_back(message);
    }

    /// Enqueues a message that reports the number of dropped messages, if there are any.
    fn report_dropped(&mut self) {
        match std::mem::take(&mut self.dropped) {
            0 => {}
            number => self.push(LogMessage::dropped_notice(number)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use nvme_guest::threads::start_thread;

    use super::*;

    fn message(text: &str) -> LogMessage {
        LogMessage {
            time: Timestamp::UNIX_EPOCH,
            level: Level::Info,
            target: "test".to_owned(),
            location: (None, None),
            is_plain: false,
            thread: "main".to_owned(),
            text: text.to_owned(),
            fields: Vec::new(),
        }
    }

    /// Creates a queue whose messages the test reads one at a time.
    fn with_reader() -> (Arc<MessageQueue>, mpsc::Receiver<String>) {
        let queue = Arc::new(MessageQueue::default());
        // The channel has no buffer, so a write lasts until the test reads its message.
        let (pipe, read) = mpsc::sync_channel(0);
        let writer = queue.clone();
        let write = move || {
            writer.write_all(|message| {
                let _ = pipe.send(message.text.clone());
            })
        };
        start_thread("log", write).unwrap();
        (queue, read)
    }

    #[test]
    fn a_stalled_log_reader_blocks_no_thread_and_gets_the_number_of_lost_messages() {
        let (queue, read) = with_reader();
        queue.put(message("first"));
        // All these calls return, although the first write blocks.
        let sent = MESSAGES_MAX as u64 + 100;
        for number in 0..sent {
            queue.put(message(&number.to_string()));
        }
        assert!(!queue.flush(Duration::from_millis(1)), "nothing is read");
        assert!(queue.has_unwritten());
        let dropped = queue.dropped();
        assert!((100..=101).contains(&dropped), "{dropped}");
        assert_eq!(read.recv().unwrap(), "first");
        for number in 0..sent - dropped {
            assert_eq!(read.recv().unwrap(), number.to_string());
        }
        let told = read.recv().unwrap();
        assert!(
            told.starts_with(&format!("{dropped} messages were dropped")),
            "{told}"
        );
        assert!(queue.flush(Duration::from_secs(180)));
        assert!(!queue.has_unwritten());
        queue.put(message("last"));
        assert_eq!(read.recv().unwrap(), "last");
    }

    #[test]
    fn messages_are_bounded_by_their_bytes_too() {
        let queue = MessageQueue::default();
        let long = "x".repeat(4096);
        for _ in 0..2 * BYTES_MAX / long.len() {
            queue.put(message(&long));
        }
        let waiting = queue.lock();
        assert!(waiting.bytes <= BYTES_MAX && waiting.bytes > BYTES_MAX - 2 * long.len());
        let kept = waiting.messages.len() as u64;
        assert_eq!(kept + waiting.dropped, (2 * BYTES_MAX / long.len()) as u64);
    }
}

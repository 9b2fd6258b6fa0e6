//! Ledger writer thread: writes this process into the ledger as the holder of leases that it took over from a predecessor.
//!
//! A write of the ledger waits for the disk while the ledger is locked. If a hand-over wrote the ledger for each lease, the
//! guests would wait for all these writes. Since the holder's name is only information for operators, this thread writes it
//! later.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::thread::JoinHandle;
use std::time::Duration;

use nvme_guest::threads::start_thread;
use nvme_lease::Ledger;

use crate::report;

/// Time since the last reported lease after which the ledger is written.
const WRITE_DELAY: Duration = Duration::from_secs(1);

/// Ledger writer thread. Dropping it ends the thread.
#[derive(Debug)]
pub(crate) struct LedgerWriterThread {
    /// Channel of requests to write the ledger; `None` once the thread is to end.
    requests: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl LedgerWriterThread {
    /// Starts the thread for a ledger.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub(crate) fn start(ledger: Ledger) -> std::io::Result<Self> {
        let (asked, requests) = mpsc::sync_channel(1);
        let thread = start_thread("clerk", move || run(&ledger, &requests))?;
        Ok(Self {
            requests: Some(asked),
            thread: Some(thread),
        })
    }

    /// Reports that this process has taken over another lease.
    pub(crate) fn request_write(&self) {
        if let Some(asked) = &self.requests {
            // If the channel is full, a request is pending already.
            let _ = asked.try_send(());
        }
    }
}

impl Drop for LedgerWriterThread {
    fn drop(&mut self) {
        self.requests = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("The thread that names this process in the ledger panicked");
        }
    }
}

/// Writes the ledger once no further lease has been reported for `WRITE_DELAY`.
fn run(ledger: &Ledger, requests: &Receiver<()>) {
    while requests.recv().is_ok() {
        loop {
            match requests.recv_timeout(WRITE_DELAY) {
                Ok(()) => {}
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
        if let Err(error) = ledger.record_holder() {
            log::warn!(
                "Cannot name this process in the ledger, which names an earlier one for its leases: {}",
                report::chain(&error)
            );
        }
    }
}

//! Ledger writer thread: writes this process into the ledger as the holder of leases that it took over from a predecessor.
//!
//! Each write of the ledger locks the ledger and waits for the disk. If a hand-over wrote the ledger once for each lease, the
//! guests would be paused for all these writes. The holder's name is only information for operators, so this thread writes it
//! after the hand-over, once for all leases.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::thread::JoinHandle;
use std::time::Duration;

use nvme_guest::threads::start_thread;
use nvme_lease::Ledger;

use crate::report;

/// Delay between the last reported lease and the write of the ledger.
const WRITE_DELAY: Duration = Duration::from_secs(1);

/// Ledger writer thread. Dropping it ends the thread.
#[derive(Debug)]
pub(crate) struct LedgerWriterThread {
    /// Channel of requests to write the ledger. Closed (`None`) to end the thread.
    requests: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl LedgerWriterThread {
    /// Starts the thread for a ledger.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub(crate) fn start(ledger: Ledger) -> std::io::Result<Self> {
        let (sender, requests) = mpsc::sync_channel(1);
        let thread = start_thread("ledger-writer", move || run(&ledger, &requests))?;
        Ok(Self {
            requests: Some(sender),
            thread: Some(thread),
        })
    }

    /// Requests a write of the ledger, after this process has taken over a further lease.
    pub(crate) fn request_write(&self) {
        if let Some(sender) = &self.requests {
            // If the channel is full, a request is pending already.
            let _ = sender.try_send(());
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

/// Waits for requests. Writes the ledger once no further request has arrived for `WRITE_DELAY`.
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

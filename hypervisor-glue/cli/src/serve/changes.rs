//! Changes of a running server's functions, one after the other, on a thread of their own.

use std::path::Path;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TrySendError};
use std::thread::JoinHandle;
use std::time::Duration;

use nvme_mpt::poller::start_thread;
use nvme_mpt::range::Bytes;
use nvme_mpt_vmm::report;

use super::error::ChangeError;
use super::pending::Comparer;
use super::roster::Roster;
use crate::change::{Change, Changed, Reloaded, Reserved};
use crate::control::Reply;
use crate::kept::crashes::end_by_panic;
use crate::kept::predecessor::UpgradeError;
use crate::logging;

/// Changes that wait while another one is made.
const QUEUE: usize = 64;

/// Time between two attempts to offer functions whose VMs wait.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// A change, and its reply; `None` for a signal.
type Request = (Change, Option<Reply>);

/// Place to hand changes in.
#[derive(Clone, Debug)]
pub(super) struct ChangeQueue(SyncSender<Request>);

impl ChangeQueue {
    /// Hands a change in, which is replied to when it is made, or refused.
    pub(super) fn push(&self, change: Change, reply: Reply) {
        let (reply, reason) = match self.0.try_send((change, Some(reply))) {
            Ok(()) => return,
            Err(TrySendError::Full((_, reply))) => {
                let reason = format!("{QUEUE} changes wait already: try again later");
                (reply, reason)
            }
            Err(TrySendError::Disconnected((_, reply))) => {
                (reply, "it makes no changes any more: restart it".to_owned())
            }
        };
        if let Some(reply) = reply {
            reply.send(Err(reason));
        }
    }
}

/// Thread that makes changes. It ends when no [`ChangeQueue`] is left.
#[derive(Debug)]
pub(super) struct ChangeThread {
    thread: JoinHandle<Roster>,
    queue: ChangeQueue,
}

impl ChangeThread {
    /// Makes changes of `roster`.
    ///
    /// # Errors
    /// Returns the kernel's error. Then the functions have ended.
    pub(super) fn start(
        roster: Roster,
        comparer: Comparer,
    ) -> std::io::Result<(Self, ChangeQueue)> {
        let (queue, requests) = mpsc::sync_channel(QUEUE);
        let thread = start_thread("changes", move || run(roster, &comparer, &requests))?;
        let queue = ChangeQueue(queue);
        let changes = queue.clone();
        Ok((Self { thread, queue }, changes))
    }

    /// Requests a reload of the file after a signal. The log has the result.
    pub(super) fn reload(&self) {
        log::info!("SIGHUP: the file is reloaded");
        if let Err(error) = self
            .queue
            .0
            .try_send((Change::Reload { force: false }, None))
        {
            log::error!("The file is not reloaded, as many changes wait: {error}");
        }
    }

    /// Waits for the last change, and returns the roster; `None` if the thread panicked, which ended all functions.
    pub(super) fn end(self) -> Option<Roster> {
        let Self { thread, queue } = self;
        drop(queue);
        thread.join().ok()
    }
}

fn run(mut roster: Roster, comparer: &Comparer, requests: &Receiver<Request>) -> Roster {
    end_by_panic();
    // Functions wait that the start of the server had no time for.
    let mut pause = Duration::ZERO;
    loop {
        let request = match roster.is_waited_for() {
            true => requests.recv_timeout(std::mem::replace(&mut pause, RETRY_INTERVAL)),
            false => requests.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        let (change, reply) = match request {
            Ok(request) => request,
            Err(RecvTimeoutError::Timeout) => {
                roster.offer_waiting();
                continue;
            }
            Err(RecvTimeoutError::Disconnected) => break,
        };
        if let Change::Upgrade { binary } = change {
            let pending = comparer.differences().sentences();
            if let Some(reply) = reply {
                upgrade(&roster, binary.as_deref(), pending, reply);
            }
            continue;
        }
        let made = make(&mut roster, change);
        let made = made.map_err(|error| report::chain(&error));
        match (reply, made) {
            (Some(reply), made) => reply.send(made),
            (None, Err(reason)) => log::error!("The file is not reloaded: {reason}"),
            (None, Ok(_)) => {}
        }
    }
    roster
}

/// Has another process take this one's place, which ends then.
fn upgrade(roster: &Roster, binary: Option<&Path>, pending: Vec<String>, reply: Reply) {
    match roster.upgrade(binary) {
        Ok(process) => {
            log::info!("Process {process} takes the place of this server");
            reply.send(Ok(Changed::Upgraded { process, pending }));
            logging::flush(logging::CRASH_PATIENCE);
            // At once: whatever this process did now would be done to what its successor has.
            std::process::exit(0);
        }
        Err(error) => {
            let reason = report::chain(&error);
            if !matches!(error, UpgradeError::NoKeeper) {
                log::error!("This server is not replaced, and goes on: {reason}");
            }
            reply.send(Err(reason));
        }
    }
}

fn make(roster: &mut Roster, change: Change) -> Result<Changed, ChangeError> {
    roster.check_runs()?;
    Ok(match change {
        Change::Add { options } => {
            let entry = roster.add(options.parse()?)?;
            let (id, socket) = (entry.id.as_str(), entry.socket.display());
            log::info!(function = id; "Added function {id} on {socket}");
            Changed::Added(entry)
        }
        Change::Remove { id, force } => {
            let (function, trouble) = roster.remove(&id, force)?;
            let id = function.id.as_str();
            log::info!(function = id; "Removed function {id}");
            if let Some(trouble) = &trouble {
                log::error!(function = id; "{trouble}");
            }
            Changed::Removed { function, trouble }
        }
        Change::Limit { id, limits } => {
            let entry = roster.limit(&id, &limits)?;
            let id = entry.id.as_str();
            log::info!(function = id; "Function {id} has new limits: {limits}");
            Changed::Limited(entry)
        }
        Change::Resize {
            id,
            bytes,
            truncate,
        } => {
            let entry = roster.resize(&id, Bytes(bytes), truncate)?;
            let id = entry.id.as_str();
            log::info!(function = id; "Function {id} has {} now", Bytes(bytes));
            Changed::Resized(entry)
        }
        Change::Reserve { options } => {
            let reserved = roster.reserve(options.parse()?)?;
            let Reserved { id, owner, .. } = &reserved;
            log::info!(lease = id.as_str(); "Lease {id} is reserved for user {owner}");
            Changed::Reserved(reserved)
        }
        // It ends the process: see `upgrade`.
        Change::Upgrade { .. } => return Err(ChangeError::Ending),
        Change::Reload { force } => {
            let reloaded = roster.reload(force)?;
            let Reloaded {
                added,
                changed,
                limited,
                resized,
                removed,
                unchanged,
            } = &reloaded;
            log::info!(
                "Reloaded: {} added, {} changed, {} with other limits, {} larger, {} removed, {unchanged} unchanged",
                added.len(),
                changed.len(),
                limited.len(),
                resized.len(),
                removed.len()
            );
            Changed::Reloaded(reloaded)
        }
    })
}

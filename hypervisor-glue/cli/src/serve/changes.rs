//! Changes of a running server's functions, one after the other, on a thread of their own.

use std::path::Path;
use std::sync::mpsc::{self, Receiver, SyncSender, TrySendError};
use std::thread::JoinHandle;

use nvme_mpt::poller::start_thread;
use nvme_mpt::range::Bytes;
use nvme_mpt_vmm::report;

use super::error::ChangeError;
use super::roster::Roster;
use crate::change::{Change, Changed, Reloaded, Reserved};
use crate::control::Reply;
use crate::kept::crashes::end_by_panic;
use crate::kept::predecessor::UpgradeError;
use crate::logging;

/// Changes that wait while another one is made.
const QUEUE: usize = 64;

type Request = (Change, Reply);

/// Place to hand changes in.
#[derive(Clone, Debug)]
pub(super) struct ChangeQueue(SyncSender<Request>);

impl ChangeQueue {
    /// Hands a change in, which is replied to when it is made, or refused.
    pub(super) fn push(&self, change: Change, reply: Reply) {
        let (reply, reason) = match self.0.try_send((change, reply)) {
            Ok(()) => return,
            Err(TrySendError::Full((_, reply))) => {
                let reason = format!("{QUEUE} changes wait already: try again later");
                (reply, reason)
            }
            Err(TrySendError::Disconnected((_, reply))) => {
                (reply, "it makes no changes any more: restart it".to_owned())
            }
        };
        reply.send(Err(reason));
    }
}

/// Thread that makes changes. It ends when no [`ChangeQueue`] is left.
#[derive(Debug)]
pub(super) struct ChangeThread(JoinHandle<Roster>);

impl ChangeThread {
    /// Makes changes of `roster`.
    ///
    /// # Errors
    /// Returns the kernel's error. Then the functions have ended.
    pub(super) fn start(roster: Roster) -> std::io::Result<(Self, ChangeQueue)> {
        let (queue, requests) = mpsc::sync_channel(QUEUE);
        let thread = start_thread("changes", move || run(roster, &requests))?;
        Ok((Self(thread), ChangeQueue(queue)))
    }

    /// Waits for the last change, and returns the roster; `None` if the thread panicked, which ended all functions.
    pub(super) fn end(self) -> Option<Roster> {
        self.0.join().ok()
    }
}

fn run(mut roster: Roster, requests: &Receiver<Request>) -> Roster {
    end_by_panic();
    for (change, reply) in requests {
        if let Change::Upgrade { binary } = change {
            upgrade(&roster, binary.as_deref(), reply);
            continue;
        }
        let made = make(&mut roster, change);
        reply.send(made.map_err(|error| report::chain(&error)));
    }
    roster
}

/// Has another process take this one's place, which ends then.
fn upgrade(roster: &Roster, binary: Option<&Path>, reply: Reply) {
    match roster.upgrade(binary) {
        Ok(process) => {
            log::info!("Process {process} takes the place of this server");
            reply.send(Ok(Changed::Upgraded { process }));
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

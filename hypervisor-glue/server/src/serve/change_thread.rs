//! The change thread: changes a running server's functions, one change at a time.

use std::path::Path;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TrySendError};
use std::thread::JoinHandle;
use std::time::Duration;

use nvme_guest::threads::start_thread;
use nvme_lease::range::ByteSize;
use nvme_mpt_logging as logging;
use nvme_mpt_memory::clock;
use nvme_mpt_vmm::report;

use super::configuration_differences::ConfigurationComparer;
use super::error::ChangeError;
use super::registry::FunctionRegistry;
use super::starting_registry::StartingRegistry;
use crate::change::{ChangeResult, FunctionChange, ReloadResult, ReservedLease};
use crate::control::ChangeReply;
use crate::persistence::crashes::abort_on_panic;
use crate::persistence::predecessor::UpgradeError;

/// Maximum number of changes that wait for the change thread. Further changes are refused.
const QUEUE_LEN: usize = 64;

/// Interval between attempts to restore functions whose VMs wait for a server.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum interval between attempts that take long.
const RETRY_INTERVAL_MAX: Duration = Duration::from_secs(5);

/// A change, and the channel for its reply. The channel is `None` for a reload by SIGHUP, which has no client.
pub(super) type ChangeRequest = (FunctionChange, Option<ChangeReply>);

/// Handle that submits changes to the thread.
#[derive(Clone, Debug)]
pub(super) struct ChangeQueue(SyncSender<ChangeRequest>);

impl ChangeQueue {
    /// Creates a queue, and its end for [`ChangeThread::start`].
    pub(super) fn new() -> (Self, Receiver<ChangeRequest>) {
        let (queue, requests) = mpsc::sync_channel(QUEUE_LEN);
        (Self(queue), requests)
    }

    /// Submits a change. `reply` gets the result once the change is made or refused.
    pub(super) fn push(&self, change: FunctionChange, reply: ChangeReply) {
        let (reply, reason) = match self.0.try_send((change, Some(reply))) {
            Ok(()) => return,
            Err(TrySendError::Full((_, reply))) => {
                let reason = format!("{QUEUE_LEN} changes are waiting already: try again later");
                (reply, reason)
            }
            Err(TrySendError::Disconnected((_, reply))) => {
                (reply, "it no longer makes changes: restart it".to_owned())
            }
        };
        if let Some(reply) = reply {
            reply.send(Err(reason));
        }
    }
}

/// Thread that makes changes to the functions. It ends when the last [`ChangeQueue`] is dropped.
#[derive(Debug)]
pub(super) struct ChangeThread {
    thread: JoinHandle<FunctionRegistry>,
    queue: ChangeQueue,
}

impl ChangeThread {
    /// Starts the change thread, which owns the function registry `registry` from now on. `requests` is the end of `queue`.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub(super) fn start(
        registry: StartingRegistry,
        comparer: ConfigurationComparer,
        queue: ChangeQueue,
        requests: Receiver<ChangeRequest>,
    ) -> std::io::Result<Self> {
        let thread = start_thread("changes", move || {
            run_changes(registry.into_started(), &comparer, &requests)
        })?;
        Ok(Self { thread, queue })
    }

    /// Requests a reload of the configuration file after a SIGHUP. The change thread logs the result.
    pub(super) fn reload(&self) {
        log::info!("SIGHUP: the file is reloaded");
        if let Err(error) = self
            .queue
            .0
            .try_send((FunctionChange::Reload { force: false }, None))
        {
            log::error!("Cannot reload the file, as too many changes are waiting: {error}");
        }
    }

    /// Waits for the last change and returns the function registry; `None` if the change thread panicked, which has ended
    /// all functions.
    pub(super) fn end(self) -> Option<FunctionRegistry> {
        let Self { thread, queue } = self;
        drop(queue);
        thread.join().ok()
    }
}

fn run_changes(
    mut registry: FunctionRegistry,
    comparer: &ConfigurationComparer,
    requests: &Receiver<ChangeRequest>,
) -> FunctionRegistry {
    abort_on_panic();
    // Functions that the start has postponed are restored now, so the first retry follows immediately.
    let mut next_retry = Duration::ZERO;
    loop {
        let request = match registry.has_waiting_vms() {
            true => requests.recv_timeout(next_retry.saturating_sub(clock::monotonic())),
            false => requests.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        let (change, reply) = match request {
            Ok(request) => request,
            Err(RecvTimeoutError::Timeout) => {
                let start = clock::monotonic();
                registry.retry_waiting();
                // A drive that does not answer delays each attempt. Changes get time between attempts.
                let end = clock::monotonic();
                let took = end.saturating_sub(start);
                next_retry = end + took.clamp(RETRY_INTERVAL, RETRY_INTERVAL_MAX);
                continue;
            }
            Err(RecvTimeoutError::Disconnected) => break,
        };
        if let FunctionChange::Upgrade { binary } = change {
            let pending = comparer.differences().to_sentences();
            if let Some(reply) = reply {
                upgrade_server(&registry, binary.as_deref(), pending, reply);
            }
            continue;
        }
        let made = apply_change(&mut registry, change);
        let made = made.map_err(|error| report::chain(&error));
        match (reply, made) {
            (Some(reply), made) => reply.send(made),
            (None, Err(reason)) => log::error!("Cannot reload the file: {reason}"),
            (None, Ok(_)) => {}
        }
    }
    registry
}

/// Starts a successor process, and ends this process once the successor has taken over.
fn upgrade_server(
    registry: &FunctionRegistry,
    binary: Option<&Path>,
    pending: Vec<String>,
    reply: ChangeReply,
) {
    match registry.upgrade(binary) {
        Ok(process) => {
            log::info!("Process {process} is replacing this server");
            reply.send(Ok(ChangeResult::Upgraded { process, pending }));
            logging::flush(logging::CRASH_TIMEOUT);
            // The successor owns the state now, so this process exits without running any destructors.
            std::process::exit(0);
        }
        Err(error) => {
            let reason = report::chain(&error);
            if !matches!(error, UpgradeError::NoSupervisor) {
                log::error!("This server was not replaced, and continues: {reason}");
            }
            reply.send(Err(reason));
        }
    }
}

fn apply_change(
    registry: &mut FunctionRegistry,
    change: FunctionChange,
) -> Result<ChangeResult, ChangeError> {
    registry.check_running()?;
    Ok(match change {
        FunctionChange::Add { options } => {
            registry.check_all_read()?;
            let entry = registry.add(options.parse()?)?;
            let (id, socket) = (entry.id.as_str(), entry.socket.display());
            log::info!(function = id; "Added function {id} on {socket}");
            ChangeResult::Added(entry)
        }
        FunctionChange::Remove { id, force } => {
            let (function, failure) = registry.remove(&id, force)?;
            let id = function.id.as_str();
            log::info!(function = id; "Removed function {id}");
            if let Some(failure) = &failure {
                log::error!(function = id; "{failure}");
            }
            ChangeResult::Removed { function, failure }
        }
        FunctionChange::Limit { id, limits } => {
            let entry = registry.set_limits(&id, &limits)?;
            let id = entry.id.as_str();
            log::info!(function = id; "Function {id} has new limits: {limits}");
            ChangeResult::Limited(entry)
        }
        FunctionChange::Resize {
            id,
            bytes,
            truncate,
        } => {
            registry.check_all_read()?;
            let entry = registry.resize(&id, ByteSize(bytes), truncate)?;
            let id = entry.id.as_str();
            log::info!(function = id; "Function {id} has a size of {} now", ByteSize(bytes));
            ChangeResult::Resized(entry)
        }
        FunctionChange::Reserve { options } => {
            let reserved = registry.reserve(options.parse()?)?;
            let ReservedLease { id, owner, .. } = &reserved;
            log::info!(lease = id.as_str(); "Lease {id} is reserved for user {owner}");
            ChangeResult::Reserved(reserved)
        }
        // Not reached: upgrades are handled before this match, by `upgrade_server`.
        FunctionChange::Upgrade { .. } => return Err(ChangeError::Ending),
        FunctionChange::Reload { force } => {
            registry.check_all_read()?;
            let reloaded = registry.reload(force)?;
            let ReloadResult {
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
            ChangeResult::Reloaded(reloaded)
        }
    })
}

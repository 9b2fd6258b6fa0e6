//! Drive monitor: the thread that handles timeouts, fatal status, removal and events of a drive.
//!
//! The monitor checks everything ten times a second, and carries out resets and Aborts itself. It also gives free queue pairs
//! to queues that share a pair. So a failing drive costs pollers and other drives no more than the lock of a queue pair.
//!
//! An overdue command (`timeout=`, 10 s; `drive_progress.rs`) is aborted. Its identifier is not reused before the drive has
//! answered the Abort. If the command is still in flight a second later, the controller is reset and its queues are created
//! again (`recovery.rs`). The controller is also reset if it reports CSTS.CFS, if it answers no admin command, or if its
//! registers are readable again after they have read as all ones.
//!
//! While the drive has paused processing (CSTS.PP), it is neither sent Aborts nor reset, up to a time limit.
//!
//! After a change of namespaces, the monitor reads the namespaces, and repeats this until it succeeds, because leases depend on
//! them. It also reads the namespaces after each reset, because a reset drops unread events.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use log::{debug, warn};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::admin_queue::AdminQueue;
use super::drive_progress::DriveProgress;
use super::error::{ControllerError, REMOVAL_REQUESTED, REMOVED};
use super::{PhysicalDrive, lock, log_pages};
use crate::queue_pair::{LateCommand, VfioQueuePair};
use nvme_guest::event::DriveEvent;
use nvme_guest::threads::ThreadSpawner;
use nvme_mpt::drive::{DriveIncidents, HostNamespace};
use nvme_mpt_memory::clock::{Ticks, ticks_in};
use nvme_mpt_memory::deadline::{Deadline, WaitClock};
use nvme_mpt_memory::eventfd;
use nvme_mpt_memory::sync::JoinHandle;
use nvme_spec::admin::AbortCommand;
use nvme_spec::event::{AsyncEvent, AsyncEventType};
use nvme_spec::identify::IdentifyController;
use nvme_spec::ids::{CommandId, Nsid, QueueId};
use nvme_spec::log::LogPageId;
use nvme_spec::opcode::AdminOpcode;
use nvme_spec::registers::Csts;
use nvme_spec::sqe::Sqe;

/// Interval of the drive monitor's checks.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Number of the monitor's checks between two searches for freed pages in pinned memory.
const CHECKS_PER_MEMORY_CHECK: u32 = 2;

/// Time that an aborted command may take to complete. After it, the drive is reset if enough checks have found the command in
/// flight. The time alone does not suffice: if the monitor got no processor time, pollers may not have got any either.
const ABORT_GRACE: Duration = Duration::from_secs(1);
const ABORT_CHECKS: u32 = 5;

/// Delay before an event is cleared that was not asked for. It bounds the work for a drive that raises the event again after
/// each read. After Firmware Activation Starting, the drive pauses immediately. By the end of the delay, the monitor has seen
/// the pause, and sends nothing until the pause ends.
const CLEAR_DELAY: Duration = Duration::from_secs(1);

/// Returns the maximum time for which a drive may pause processing (CSTS.PP). `deadline` is the timeout of a command.
pub(super) fn longest_pause(controller: &IdentifyController, deadline: Duration) -> Duration {
    let most = Duration::from_millis(100) * u32::from(controller.mtfa);
    most.max(deadline)
}

/// Counters of a drive's incidents, and what was logged about it.
#[derive(Debug, Default)]
pub(super) struct DriveCounters {
    pub(super) resets: AtomicU64,
    /// Number of commands that exceeded the timeout.
    timeouts: AtomicU64,
    /// Number of Abort commands sent.
    aborts: AtomicU64,
    /// True once queues have had to share queue pairs. From then on, the drive monitor also evens out the queues among the
    /// pairs.
    pub(super) is_sharing: AtomicBool,
    /// True once a queue has got an idle pair of another priority class, because no pair of its own class could be created.
    /// This is logged once.
    pub(super) has_other_class: AtomicBool,
}

impl DriveCounters {
    pub(super) fn incidents(&self, gone: bool) -> DriveIncidents {
        DriveIncidents {
            timeouts: self.timeouts.load(Ordering::Relaxed),
            aborts: self.aborts.load(Ordering::Relaxed),
            resets: self.resets.load(Ordering::Relaxed),
            is_gone: gone,
        }
    }
}

/// Starts the drive monitor on one of `threads`. The monitor ends when the drive is being closed or was given up.
pub(super) fn start(
    drive: Arc<PhysicalDrive>,
    threads: &ThreadSpawner,
) -> io::Result<JoinHandle<()>> {
    let epoll = Epoll::new()?;
    let watch = |fd: RawFd| {
        let event = EpollEvent::new(EventSet::IN, fd as u64);
        epoll.ctl(ControlOperation::Add, fd, event)
    };
    watch(drive.monitor_waker.as_raw_fd())?;
    let removal = drive.backing.removal_request().map(|fd| fd.as_raw_fd());
    if let Some(fd) = removal {
        watch(fd)?;
    }
    let mut monitor = DriveMonitor {
        clock: drive.backing.clock(),
        drive,
        epoll,
        removal,
        overdue: Vec::new(),
        progress: DriveProgress::default(),
        namespaces: NamespaceListState::Known,
        threads: threads.clone(),
        checks: 0,
        memory_check: None,
        pause: None,
        uncleared_events: Vec::new(),
        logged_events: BTreeSet::new(),
    };
    let work = move || while monitor.run_interval() {};
    threads.spawn("nvme-monitor", Box::new(work))
}

/// A command that exceeded the timeout, and for which an Abort was sent.
struct OverdueCommand {
    qid: QueueId,
    late: LateCommand,
    grace: Deadline,
    /// Number of checks, since the Abort, that have found the command in flight.
    checks: u32,
}

/// State of the monitor's knowledge of the drive's namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NamespaceListState {
    /// All namespaces are known as they are.
    Known,
    /// Some namespaces may have changed.
    Stale,
    /// Some namespaces may have changed, and reading them has failed. The drive's list of changes may be lost, so any namespace
    /// may have changed.
    Unread,
}

struct DriveMonitor {
    clock: Arc<dyn WaitClock>,
    drive: Arc<PhysicalDrive>,
    epoll: Epoll,
    removal: Option<RawFd>,
    overdue: Vec<OverdueCommand>,
    progress: DriveProgress,
    namespaces: NamespaceListState,
    threads: ThreadSpawner,
    checks: u32,
    /// Thread that searches pinned memory for freed pages, while a search is in progress.
    memory_check: Option<JoinHandle<()>>,
    /// End of the time for which the drive may pause processing; `None` if it has not paused.
    pause: Option<Deadline>,
    /// Log pages of events that were not asked for, with the times at which they are read to clear the events.
    uncleared_events: Vec<(LogPageId, Deadline)>,
    /// Types and infos of events that were not asked for and have been logged.
    logged_events: BTreeSet<(AsyncEventType, u8)>,
}

impl DriveMonitor {
    /// Waits for one interval, then makes all checks. Returns false when the monitor must end.
    fn run_interval(&mut self) -> bool {
        let mut ready = [EpollEvent::default(); 2];
        // An interrupted wait counts as a short wait.
        let count = eventfd::wait(&self.epoll, Some(CHECK_INTERVAL), &mut ready).unwrap_or(0);
        let _ = self.drive.monitor_waker.read();
        let drive = &self.drive;
        if drive.registers.is_closing() || drive.is_gone() {
            return false;
        }
        let is_removal = |event: &EpollEvent| Some(event.fd()) == self.removal;
        if ready[..count].iter().any(is_removal) {
            drive.give_up(REMOVAL_REQUESTED);
            return false;
        }
        let status = drive.registers.status();
        // Checked before the status is used: a pulled drive can read as zeroes for a moment, like a controller after a reset.
        if drive.backing.is_gone() {
            drive.give_up(REMOVED);
            return false;
        }
        let is_reset_wanted = drive.needs_reset.load(Ordering::Acquire);
        match status {
            None => self.reset("its registers read as all ones"),
            Some(csts) if csts.cfs() => self.reset("it reports a fatal status (CSTS.CFS)"),
            Some(csts) if self.is_paused(csts) => {}
            Some(_) if is_reset_wanted => {
                self.reset("it does not answer admin commands");
            }
            Some(csts) if !csts.rdy() => self.reset("another program has reset it (CSTS.RDY)"),
            Some(_) => {
                self.check_deadlines();
                self.drive.rebalance();
                self.check_events();
                self.clear_events();
                self.check_namespaces();
                self.check_memory();
                self.drive.check_predecessor_mappings(&self.threads);
            }
        }
        !self.drive.is_gone()
    }

    /// Returns whether the drive has paused processing, for example to activate firmware (Base 2.0, section 3.11), for no
    /// longer than it may. During such a pause, the drive keeps its commands.
    fn is_paused(&mut self, csts: Csts) -> bool {
        if !csts.pp() {
            self.pause = None;
            return false;
        }
        let drive = &self.drive;
        let pause = self.pause.get_or_insert_with(|| {
            let most = longest_pause(&drive.identity.controller, drive.options.command_timeout);
            let name = drive.backing.name();
            warn!(drive = name; "Drive {name} has paused by itself (CSTS.PP); it is waited for, for {most:?} at most");
            Deadline::after(&self.clock, most)
        });
        if pause.has_passed() {
            return false;
        }
        // The time limits of aborted commands also start again after a pause.
        for overdue in &mut self.overdue {
            overdue.grace = Deadline::after(&self.clock, ABORT_GRACE);
        }
        true
    }

    /// Starts a search for pages that are pinned but that a VMM has freed (`nvme-mpt/guest/src/dma/pinned_file.rs`).
    fn check_memory(&mut self) {
        self.checks = self.checks.wrapping_add(1);
        if !self.checks.is_multiple_of(CHECKS_PER_MEMORY_CHECK) {
            return;
        }
        // Memory that shrinks during a search is covered by the next search.
        if self
            .memory_check
            .as_ref()
            .is_some_and(|check| !check.is_finished())
        {
            return;
        }
        self.memory_check = None;
        let shrunk = self.drive.space.find_shrunk_memory();
        if shrunk.is_empty() {
            return;
        }
        let work = move || shrunk.iter().for_each(|memory| memory.check_freed_pages());
        match self.threads.spawn("nvme-memory", Box::new(work)) {
            Ok(check) => self.memory_check = Some(check),
            Err(error) => warn!("Cannot look for memory that lost pages yet: {error}"),
        }
    }

    /// Aborts commands that exceed the timeout. Resets the drive if an aborted command stays in flight.
    fn check_deadlines(&mut self) {
        let late = self.find_overdue();
        if let Some(OverdueCommand { qid, late, .. }) = self
            .overdue
            .iter()
            .find(|overdue| overdue.checks >= ABORT_CHECKS && overdue.grace.has_passed())
        {
            let cid = late.cid();
            let cause = format!("command {cid} of queue {qid} was to be aborted and is not done");
            self.reset(&cause);
            return;
        }
        let count = late.len() as u64;
        self.drive
            .counters
            .timeouts
            .fetch_add(count, Ordering::Relaxed);
        for (qid, pair, late) in late {
            // If the command has completed by now, no Abort is needed.
            if pair.has_command(&late)
                && let Err(error) = self.abort(qid, late.cid())
            {
                let cid = late.cid();
                if self.drive.registers.status().is_some_and(Csts::pp) {
                    // The drive has paused processing after the check began, and must not be reset during the pause.
                    self.drive.needs_reset.store(true, Ordering::Release);
                    return;
                }
                // The reset also ends the remaining Aborts.
                self.reset(&format!(
                    "command {cid} of queue {qid} is overdue, and: {error}"
                ));
                return;
            }
            pair.end_abort(&late);
            let grace = Deadline::after(&self.clock, ABORT_GRACE);
            self.overdue.push(OverdueCommand {
                qid,
                late,
                grace,
                checks: 0,
            });
        }
    }

    /// Returns the commands that have exceeded the timeout since the last call. Forgets aborted commands that have completed.
    fn find_overdue(&mut self) -> Vec<(QueueId, VfioQueuePair, LateCommand)> {
        let pairs = lock(&self.drive.pairs);
        let samples: Vec<_> = pairs
            .iter()
            .map(|(qid, pair)| (qid, pair.sample_inflight()))
            .collect();
        let now = Ticks::now();
        let deadline = ticks_in(self.drive.options.command_timeout);
        let mut late = Vec::new();
        let count = |moments: &[Ticks]| {
            let mut sums = vec![0; moments.len()];
            for (_, pair) in pairs.iter() {
                let counts = pair.count_submitted_by(moments);
                sums.iter_mut()
                    .zip(counts)
                    .for_each(|(sum, count)| *sum += count);
            }
            sums
        };
        for watched in self.progress.check(&samples, count, now, deadline) {
            let Some(pair) = pairs.get(watched.qid) else {
                continue;
            };
            let mut commands = Vec::new();
            if pair.mark_reported(&watched.command) {
                commands.push(watched.command);
            }
            if pair.count_submitted_by(&[watched.latest_submission]) == [watched.in_flight] {
                // If a queue is stuck as a whole, all commands that were submitted to it until then are overdue.
                commands.extend(
                    pair.overdue(now, now.since(watched.latest_submission).saturating_sub(1)),
                );
            }
            for command in commands {
                // Marked while the pairs are locked, before the drive can complete the command.
                pair.begin_abort(&command);
                late.push((watched.qid, pair.clone(), command));
            }
        }
        self.overdue.retain_mut(|overdue| {
            overdue.checks += 1;
            let pair = pairs.get(overdue.qid);
            pair.is_some_and(|pair| pair.has_command(&overdue.late))
        });
        late
    }

    fn reset(&mut self, cause: &str) {
        self.overdue.clear();
        self.progress.forget();
        self.uncleared_events.clear();
        self.drive.reset(cause);
        self.mark_namespaces_stale();
    }

    /// Sends an Abort (Base 2.0, section 5.1). At most one Abort is outstanding, so the drive's limit (`ACL`) does not matter.
    fn abort(&self, qid: QueueId, cid: CommandId) -> Result<(), ControllerError> {
        let name = self.drive.backing.name();
        warn!(drive = name; "Drive {name}: command {cid} of queue {qid} is overdue, and aborted");
        let mut sqe = Sqe::new(AdminOpcode::ABORT.0);
        AbortCommand { sqid: qid, cid }.write_to(&mut sqe);
        self.drive.counters.aborts.fetch_add(1, Ordering::Relaxed);
        // Bit 0 of dword 0, which reports whether the command was aborted, is not needed: the command's own completion shows
        // that.
        self.drive
            .with_admin(|admin| Ok(admin.execute(sqe)?))
            .map(|_| ())
    }

    /// Handles the events that the drive has reported, and requests the next one.
    fn check_events(&mut self) {
        let events = {
            let mut admin = lock(&self.drive.admin);
            admin.queue.take_events()
        };
        if events.is_empty() {
            return;
        }
        for event in events {
            if let Err(error) = self.handle_event(event) {
                warn!(
                    "Drive {}: an event cannot be handled: {error}",
                    self.drive.backing.name()
                );
            }
        }
        // A failure means that a reset is pending, and a reset requests events itself.
        let _ = self.drive.with_admin(|admin| {
            admin.request_event();
            Ok(())
        });
    }

    /// Handles one event. Reads the event's log page, so that the drive can report the next event of its type.
    fn handle_event(&mut self, event: AsyncEvent) -> Result<(), ControllerError> {
        let drive = &self.drive;
        let name = drive.backing.name();
        match (event.event_type(), event.lid()) {
            (AsyncEventType::ERROR, _) => {
                warn!("Drive {name}: {event:?}");
                drive.with_admin(|admin| log_pages::error_information(admin, 1, false))?;
            }
            (AsyncEventType::SMART_HEALTH, _) => {
                warn!("Drive {name}: {event:?}");
                drive.with_admin(|admin| log_pages::smart_health(admin, false))?;
                drive.report_event(DriveEvent::Health);
            }
            (_, lid @ LogPageId::CHANGED_NAMESPACE_LIST) => {
                warn!("Drive {name}: {event:?}");
                // `check_namespaces` reads the list of a drive that declares it, and so clears the event.
                if !drive.identity.controller.oaes.namespace_attribute() {
                    self.clear_later(event, lid);
                }
                self.mark_namespaces_stale();
            }
            (_, lid) => self.clear_later(event, lid),
        }
        Ok(())
    }

    /// Schedules the read of an event's log page. For events that the driver did not ask for, but that mask others: until the
    /// page is read, the drive raises no event of that type, such as a notice about namespaces.
    fn clear_later(&mut self, event: AsyncEvent, lid: LogPageId) {
        let drive = &self.drive;
        let name = drive.backing.name();
        // A drive that raises the event again after each read must not fill the log.
        match self
            .logged_events
            .insert((event.event_type(), event.info()))
        {
            true => warn!("Drive {name}: {event:?}"),
            false => debug!("Drive {name}: {event:?}"),
        }
        if !self.uncleared_events.iter().any(|(other, _)| *other == lid) {
            let due = Deadline::after(&self.clock, CLEAR_DELAY);
            self.uncleared_events.push((lid, due));
        }
    }

    /// Reads the log pages of [`Self::clear_later`] whose delay has passed.
    fn clear_events(&mut self) {
        let drive = &self.drive;
        self.uncleared_events.retain(|(lid, due)| {
            let is_due = due.has_passed();
            if is_due
                && let Err(error) = drive.with_admin(|admin| log_pages::clear_event(admin, *lid))
            {
                let name = drive.backing.name();
                debug!("Drive {name}: the event with log page {lid:?} cannot be cleared: {error}");
            }
            !is_due
        });
    }

    /// Records that some namespaces may have changed.
    fn mark_namespaces_stale(&mut self) {
        if self.namespaces == NamespaceListState::Known {
            self.namespaces = NamespaceListState::Stale;
        }
    }

    /// Reads the namespaces if they may have changed. After a failure, the next check tries again.
    fn check_namespaces(&mut self) {
        if self.namespaces == NamespaceListState::Known || self.drive.is_gone() {
            return;
        }
        let Err(error) = self.read_namespaces() else {
            self.namespaces = NamespaceListState::Known;
            return;
        };
        if self.namespaces == NamespaceListState::Stale {
            warn!(
                "Drive {}: its namespaces may have changed, and cannot be read yet: {error}",
                self.drive.backing.name()
            );
        }
        self.namespaces = NamespaceListState::Unread;
    }

    /// Reads the namespaces, and reports those that changed to the functions.
    fn read_namespaces(&self) -> Result<(), ControllerError> {
        let drive = &self.drive;
        let has_list = drive.identity.controller.oaes.namespace_attribute();
        let read = |admin: &mut AdminQueue| {
            // The list of changes is read before the namespaces, so that a later change raises another event.
            let listed = match has_list.then(|| log_pages::changed_namespaces(admin)) {
                None => Some(Vec::new()),
                Some(Err(ControllerError::Admin { .. })) => None,
                Some(listed) => listed?,
            };
            Ok((listed, drive.identity.read_namespaces(admin)?))
        };
        let (listed, now) = drive.with_admin(read)?;
        let before = drive.update_namespaces(&now);
        let is_listed = self.namespaces == NamespaceListState::Stale && listed.is_some();
        let is_same =
            |namespace: &&HostNamespace| before.contains(namespace) && now.contains(namespace);
        let others = before.iter().chain(&now);
        let others = others.filter(|namespace| !is_listed || !is_same(namespace));
        let changed = others.map(|namespace| namespace.nsid);
        let changed: BTreeSet<Nsid> = changed.chain(listed.unwrap_or_default()).collect();
        for nsid in changed {
            drive.report_event(DriveEvent::NamespaceChanged(nsid));
        }
        Ok(())
    }
}

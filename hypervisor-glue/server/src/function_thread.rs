//! The control thread of a vfio-user function. It serves the socket, executes admin commands and reports statistics.
//!
//! Each function has its own thread. So a function that its client or guest keeps busy, or that waits for a reset, delays
//! no other function.

use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::thread::JoinHandle;
use std::time::Duration;

use thiserror::Error;
use vmm_device::EndError;
use vmm_device::quiesce::pause_all;
use vmm_sys_util::epoll::{ControlOperation, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use crate::nvme_device::ControlledDevice;
use crate::persistence::crashes::abort_on_panic;
use crate::stats::{FunctionAdminStats, FunctionStats, ResetCounts};
use nvme_guest::threads::start_thread;
use nvme_mpt_logging::set_function;
use nvme_mpt_memory::crash::run_recorded;
use nvme_mpt_memory::deadline::{Deadline, SystemClock};
use nvme_mpt_memory::{clock, system};
use nvme_mpt_vmm::control_loop::{ControlLoop, ControlLoopHandler};
use nvme_mpt_vmm::report;
use vfio_user_server::VfioUserServer;

/// Timeout for a function's statistics. A function answers within microseconds, or later if it waits for in-flight
/// commands.
const STATS_TIMEOUT: Duration = Duration::from_secs(1);

/// Error of serving a function.
#[derive(Debug, Error)]
pub enum FunctionThreadError {
    /// The thread or its epoll cannot be created.
    #[error("Cannot start the control thread of {id}")]
    Thread {
        /// The function.
        id: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// The function did not end cleanly.
    #[error(transparent)]
    End(#[from] EndError),
    /// The thread panicked.
    #[error("The control thread panicked")]
    Panicked,
}

/// Timeout for a function's answer to the request to end. The timeout is longer than any wait of the function itself.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(45);

/// Request to a control thread.
#[derive(Debug)]
enum FunctionRequest {
    /// Send statistics.
    Stats(SyncSender<FunctionStats>),
    /// End the function; with `force` even while a VMM is connected. If the requester has stopped waiting for the answer,
    /// the function continues.
    Shutdown {
        force: bool,
        answer: SyncSender<ShutdownAnswer>,
    },
    /// Pause before the deadline, for a hand-over to the next server. The result is sent to the requester.
    Quiesce(Deadline, SyncSender<Result<QuiescedFunctionGuard, String>>),
}

/// A paused function whose state is committed for the next server. Dropping the guard resumes the function.
#[derive(Debug)]
pub(crate) struct QuiescedFunctionGuard {
    _resume: Sender<()>,
}

/// Response to a request to end a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShutdownAnswer {
    /// The function is ending or has ended.
    Accepted,
    /// The function continues, as a VMM is connected.
    Connected,
    /// The function continues, as it did not respond in time.
    Busy,
}

/// Handle for sending requests to a control thread from any thread.
#[derive(Clone, Debug)]
pub struct FunctionHandle {
    requests: Sender<FunctionRequest>,
    control: Arc<ControlLoop>,
}

impl FunctionHandle {
    /// Returns the statistics of the functions. Omits functions that have ended, or that do not answer within one second.
    #[must_use]
    pub fn collect_stats<'a>(handles: impl IntoIterator<Item = &'a Self>) -> Vec<FunctionStats> {
        // Send all requests before waiting, so that they share one deadline.
        let answers: Vec<_> = handles
            .into_iter()
            .filter_map(Self::request_stats)
            .collect();
        let deadline = Deadline::after(&SystemClock::shared(), STATS_TIMEOUT);
        let in_time =
            |answer: Receiver<FunctionStats>| answer.recv_timeout(deadline.remaining()).ok();
        answers.into_iter().filter_map(in_time).collect()
    }

    fn request_stats(&self) -> Option<Receiver<FunctionStats>> {
        let (answer, stats) = mpsc::sync_channel(1);
        self.requests.send(FunctionRequest::Stats(answer)).ok()?;
        self.control.wake();
        Some(stats)
    }

    /// Pauses all functions concurrently. Returns guards that keep the functions paused, and the host's time at which the
    /// last function was asked to pause.
    ///
    /// # Errors
    /// If a function did not pause, returns its index and the reason, and all functions are resumed.
    pub(crate) fn quiesce_all(
        handles: &[Self],
    ) -> Result<(Vec<QuiescedFunctionGuard>, Duration), (usize, String)> {
        let mut requested_at = system::host_time();
        let paused = pause_all(handles.len(), |places, time| {
            requested_at = system::host_time();
            Self::request_quiesce(handles, places, time)
        })?;
        Ok((paused, requested_at))
    }

    /// Asks each function to pause within `time`. A function that cannot pause in time continues.
    fn request_quiesce(
        handles: &[Self],
        places: &[usize],
        time: Duration,
    ) -> Vec<Result<QuiescedFunctionGuard, String>> {
        let deadline = Deadline::after(&SystemClock::shared(), time);
        let gone = || "its thread has ended".to_owned();
        let ask = |place: &usize| {
            let handle = handles.get(*place).ok_or_else(gone)?;
            let (answer, result) = mpsc::sync_channel(1);
            let request = FunctionRequest::Quiesce(deadline.clone(), answer);
            let sent = handle.requests.send(request);
            handle.control.wake();
            sent.map(|()| result).map_err(|_| gone())
        };
        let answers: Vec<_> = places.iter().map(ask).collect();
        let wait = |result: Receiver<Result<QuiescedFunctionGuard, String>>| {
            // If a function answers after this timeout, its answer has no receiver, and the function continues.
            match result.recv_timeout(deadline.remaining()) {
                Ok(result) => result,
                Err(RecvTimeoutError::Timeout) => {
                    Err(format!("it has had commands in flight for over {time:?}"))
                }
                Err(RecvTimeoutError::Disconnected) => Err(gone()),
            }
        };
        answers
            .into_iter()
            .map(|answer| answer.and_then(wait))
            .collect()
    }

    fn request_shutdown(&self, force: bool) -> ShutdownAnswer {
        // Rendezvous channel: after the requester's timeout, the answer fails and the function continues.
        let (answer, decision) = mpsc::sync_channel(0);
        if self
            .requests
            .send(FunctionRequest::Shutdown { force, answer })
            .is_err()
        {
            return ShutdownAnswer::Accepted;
        }
        self.control.wake();
        match decision.recv_timeout(SHUTDOWN_TIMEOUT) {
            Ok(leave) => leave,
            Err(RecvTimeoutError::Timeout) => ShutdownAnswer::Busy,
            // The thread has ended before it received the request, so the function has ended.
            Err(RecvTimeoutError::Disconnected) => ShutdownAnswer::Accepted,
        }
    }
}

/// A running control thread. Dropping it ends the function.
#[derive(Debug)]
pub struct FunctionThread {
    handle: FunctionHandle,
    thread: Option<JoinHandle<Result<(), EndError>>>,
}

impl FunctionThread {
    /// Starts serving the function `id` on the socket of `server`.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn start<D: ControlledDevice + Send + 'static>(
        id: &str,
        server: VfioUserServer<D>,
    ) -> Result<Self, FunctionThreadError> {
        let thread_error = |source| FunctionThreadError::Thread {
            id: id.to_owned(),
            source,
        };
        let (requests, receiver) = mpsc::channel();
        let control = Arc::new(ControlLoop::new().map_err(thread_error)?);
        server.watch(&mut control.epoll()).map_err(thread_error)?;
        let events = server.device().function().events_fd().as_raw_fd();
        control.watch(events, EVENTS_TOKEN).map_err(thread_error)?;
        let mut function = FunctionThreadState {
            id: id.to_owned(),
            socket: server.path().to_owned(),
            server,
            receiver,
            control: control.clone(),
            checked_at: clock::monotonic(),
            unmask_eventfd: None,
        };
        function.watch_unmask_eventfd();
        let crashes = function.server.device().crash_record();
        let control_function = move || {
            abort_on_panic();
            set_function(&function.id);
            run_recorded(crashes.as_ref(), || {
                let control = function.control.clone();
                control.run(&function.id.clone(), &mut function);
                function.end()
            })
        };
        let thread = start_thread(id, control_function).map_err(thread_error)?;
        Ok(Self {
            handle: FunctionHandle { requests, control },
            thread: Some(thread),
        })
    }

    /// Returns a handle for requests to the function.
    #[must_use]
    pub fn handle(&self) -> FunctionHandle {
        self.handle.clone()
    }

    /// Asks the function to end. Without `force`, a function refuses while a VMM is connected. [`Self::end`] waits until
    /// the function has ended.
    #[must_use]
    pub fn shut_down(&self, force: bool) -> ShutdownAnswer {
        self.handle.request_shutdown(force)
    }

    /// Asks the thread to end. [`Self::end`] waits until it has ended.
    pub fn stop(&self) {
        self.handle.control.stop();
    }

    /// Ends the thread. On success, nothing more is written to the drive, and the lease is released.
    ///
    /// # Errors
    /// Commands did not end within 30 seconds, and the lease is held until they end; the drive could not be flushed; or the
    /// thread panicked.
    pub fn end(mut self) -> Result<(), FunctionThreadError> {
        self.join()
    }

    fn join(&mut self) -> Result<(), FunctionThreadError> {
        self.stop();
        match self.thread.take().map(JoinHandle::join) {
            None | Some(Ok(Ok(()))) => Ok(()),
            Some(Ok(Err(error))) => Err(error.into()),
            Some(Err(_)) => Err(FunctionThreadError::Panicked),
        }
    }
}

impl Drop for FunctionThread {
    fn drop(&mut self) {
        if let Err(error) = self.join() {
            log::error!("{}", report::chain(&error));
        }
    }
}

/// Epoll token of the function's events. It differs from [`VfioUserServer::TOKENS`], which the vfio-user server uses.
const EVENTS_TOKEN: u64 = 0x100;
/// Epoll token of the eventfd by which the client reports that the INTx pin's level fell.
const UNMASK_TOKEN: u64 = 0x101;

/// State of the control thread.
struct FunctionThreadState<D: ControlledDevice> {
    id: String,
    socket: PathBuf,
    server: VfioUserServer<D>,
    receiver: Receiver<FunctionRequest>,
    control: Arc<ControlLoop>,
    /// Time of the last periodic check for events of the drive.
    checked_at: Duration,
    /// The eventfd by which the client reports that the INTx pin's level fell. It stays open while epoll watches it.
    unmask_eventfd: Option<Arc<EventFd>>,
}

impl<D: ControlledDevice> FunctionThreadState<D> {
    /// Makes epoll watch the eventfd by which the client now reports that the INTx pin's level fell, in place of an earlier
    /// one.
    fn watch_unmask_eventfd(&mut self) {
        let wanted = self.server.device().unmask_eventfd();
        let watched = self.unmask_eventfd.as_ref();
        if watched.map(Arc::as_ptr) == wanted.map(Arc::as_ptr) {
            return;
        }
        let wanted = wanted.cloned();
        if let Some(watched) = watched
            && let Err(error) = self.control.unwatch(watched.as_raw_fd())
        {
            log::error!("{}: cannot stop watching an eventfd: {error}", self.id);
        }
        if let Some(wanted) = &wanted {
            // Edge-triggered, so that each signal is one event, even if the client leaves the eventfd readable.
            let events = EventSet::IN | EventSet::EDGE_TRIGGERED;
            let event = EpollEvent::new(events, UNMASK_TOKEN);
            let added = self
                .control
                .epoll()
                .ctl(ControlOperation::Add, wanted.as_raw_fd(), event);
            if let Err(error) = added {
                log::error!("{}: the interrupt pin stays high: {error}", self.id);
            }
        }
        self.unmask_eventfd = wanted;
    }

    /// Ends the function. Releases its lease last.
    fn end(mut self) -> Result<(), EndError> {
        let ended = self.server.device_mut().function_mut().end();
        self.server.device().forget_persisted();
        ended
    }

    /// Returns the time until the next periodic check of the drive; `None` if the drive needs no checks.
    fn time_until_check(&mut self) -> Option<Duration> {
        let interval = self.server.device().function().events_poll_interval()?;
        let elapsed = clock::monotonic().saturating_sub(self.checked_at);
        Some(interval.saturating_sub(elapsed))
    }

    fn answer_requests(&mut self) {
        while let Ok(request) = self.receiver.try_recv() {
            match request {
                FunctionRequest::Quiesce(deadline, answer) => self.quiesce(&deadline, &answer),
                FunctionRequest::Stats(answer) => {
                    // The send fails if the requester has stopped waiting for the answer.
                    let _ = answer.try_send(self.stats());
                }
                FunctionRequest::Shutdown { force, answer } => self.answer_shutdown(force, &answer),
            }
        }
    }

    /// Pauses the function before the deadline. The function then stays paused until the requester drops the guard, or
    /// until the process ends.
    fn quiesce(
        &mut self,
        deadline: &Deadline,
        answer: &SyncSender<Result<QuiescedFunctionGuard, String>>,
    ) {
        let function = self.server.device_mut().function_mut();
        if let Err(error) = function.pause_with_timeout(deadline.remaining()) {
            // The send fails if the requester has stopped waiting for the answer.
            let _ = answer.send(Err(report::chain(&error)));
            return;
        }
        let committed = self.server.commit();
        let (resume, end) = mpsc::channel();
        let result = match committed {
            Ok(()) => Ok(QuiescedFunctionGuard { _resume: resume }),
            Err(error) => Err(report::chain(&error)),
        };
        // The channel holds one answer, so this does not block. If the requester has timed out, the guard is dropped here
        // and the function resumes.
        let _ = answer.send(result);
        let _: Result<(), _> = end.recv();
        self.server.device_mut().function_mut().resume();
    }

    /// Ends the function, if no VMM is connected or `force` is set. If the requester has stopped waiting for the answer,
    /// the function continues.
    fn answer_shutdown(&self, force: bool, answer: &SyncSender<ShutdownAnswer>) {
        if self.server.is_connected() && !force {
            let _ = answer.send(ShutdownAnswer::Connected);
        } else if answer.send(ShutdownAnswer::Accepted).is_ok() {
            self.control.stop();
        }
    }

    fn stats(&self) -> FunctionStats {
        let function = self.server.device().function();
        let facts = function.facts();
        let namespace = &facts.namespace;
        let (admin, resets) = (function.admin_stats(), function.reset_stats());
        let lease = function.backend().stats();
        FunctionStats {
            id: self.id.clone(),
            socket: self.socket.to_string_lossy().into_owned(),
            connected: self.server.is_connected(),
            process: None,
            model: namespace.model.clone(),
            serial: namespace.serial.clone(),
            capacity_bytes: lease.capacity_bytes,
            doorbells: facts.doorbells.to_string(),
            queue_pairs: lease.queue_pairs,
            memory: lease.memory,
            queues: lease.queues,
            latency: lease.latency,
            errors: lease.errors,
            processor_seconds: lease.processor_seconds,
            admin: FunctionAdminStats {
                commands: admin.commands,
                doorbell_exits: admin.doorbell_exits,
                interrupts: admin.interrupts,
                aborts: admin.aborts,
            },
            resets: ResetCounts {
                controller: resets.controller,
                function_level: resets.function_level,
                vmm: resets.vmm,
            },
            pause: self.server.device().guest_pause(),
        }
    }
}

impl<D: ControlledDevice> ControlLoopHandler for FunctionThreadState<D> {
    fn next_timeout(&mut self) -> Option<Duration> {
        let server = self.server.next_timeout(clock::monotonic());
        self.time_until_check().into_iter().chain(server).min()
    }

    fn turn(&mut self, ready: &[u64]) {
        for token in ready {
            match u32::try_from(*token) {
                Ok(token) if VfioUserServer::<D>::TOKENS.contains(&token) => {
                    self.server.handle_event(token, &mut self.control.epoll());
                    self.watch_unmask_eventfd();
                }
                Ok(token) if u64::from(token) == UNMASK_TOKEN => {
                    self.server
                        .device_mut()
                        .function_mut()
                        .on_end_of_interrupt();
                }
                _ => self.server.device_mut().function_mut().process_events(),
            }
        }
        if self.time_until_check().is_some_and(|left| left.is_zero()) {
            self.server.device_mut().function_mut().process_events();
            self.checked_at = clock::monotonic();
        }
        let mut epoll = self.control.epoll();
        self.server.check_timeouts(clock::monotonic(), &mut epoll);
        if let Err(error) = self.server.commit() {
            log::error!("{}: {}", self.id, report::chain(&error));
        }
        self.answer_requests();
    }
}

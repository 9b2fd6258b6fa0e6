//! The control thread of one function: it serves the function's socket, carries out its admin
//! commands, and answers what others want to know of it.
//!
//! One thread per function, so that a client or guest that keeps its function busy, or makes it
//! wait for a reset, delays no other function.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender, SyncSender, TryRecvError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
use thiserror::Error;
use vmm_device::EndError;
use vmm_sys_util::eventfd::EventFd;

use crate::adaptor::NvmeDevice;
use crate::stats::{AdminStats, FunctionStats};
use nvme_mpt_vmm::report;
use vfio_user_server::Server;

/// Time that a function has to report its figures. It needs microseconds, unless it waits for commands in
/// flight.
const STATS_PATIENCE: Duration = Duration::from_secs(1);

/// A function cannot be served.
#[derive(Debug, Error)]
pub enum FunctionThreadError {
    /// The server cannot be made.
    #[error(transparent)]
    Server(#[from] vfio_user_server::Error),
    /// The thread or what it waits with cannot be made.
    #[error("Cannot start the control thread of {id}")]
    Thread {
        /// The function.
        id: String,
        /// Kernel's error.
        source: io::Error,
    },
    /// The function has not ended in order.
    #[error(transparent)]
    End(#[from] EndError),
    /// The thread died.
    #[error("The control thread panicked")]
    Panicked,
    /// Events cannot be waited for.
    #[error("Cannot wait for events of {id}")]
    Events {
        /// The function.
        id: String,
        /// Kernel's error.
        source: event_manager::Error,
    },
}

/// Request to a control thread.
enum Message {
    /// The figures of the function.
    Stats(SyncSender<FunctionStats>),
    /// To end.
    Stop,
}

/// A handle to ask a control thread, from any thread.
#[derive(Debug)]
pub struct FunctionHandle {
    messages: Sender<Message>,
    wake: EventFd,
}

impl FunctionHandle {
    /// The figures of all these functions, but for those that are busy for long, or gone.
    #[must_use]
    pub fn stats_of(handles: &[Self]) -> Vec<FunctionStats> {
        // All are asked before the first is waited for, so that they share one deadline.
        let answers: Vec<_> = handles.iter().filter_map(Self::ask).collect();
        let deadline = Instant::now() + STATS_PATIENCE;
        let in_time = |answer: Receiver<FunctionStats>| {
            let left = deadline.saturating_duration_since(Instant::now());
            answer.recv_timeout(left).ok()
        };
        answers.into_iter().filter_map(in_time).collect()
    }

    fn ask(&self) -> Option<Receiver<FunctionStats>> {
        let (answer, figures) = mpsc::sync_channel(1);
        self.send(Message::Stats(answer)).ok()?;
        Some(figures)
    }

    fn send(&self, message: Message) -> io::Result<()> {
        self.messages
            .send(message)
            .map_err(|_| io::ErrorKind::BrokenPipe)?;
        self.wake.write(1)
    }

    fn try_clone(&self) -> io::Result<Self> {
        Ok(Self {
            messages: self.messages.clone(),
            wake: self.wake.try_clone()?,
        })
    }
}

/// A function that is served until this is dropped.
#[derive(Debug)]
pub struct FunctionThread {
    handle: FunctionHandle,
    thread: Option<JoinHandle<Result<(), EndError>>>,
}

impl FunctionThread {
    /// Serves `device`, the function `id`, on a socket at `path`.
    ///
    /// # Errors
    /// The socket or the thread cannot be made.
    pub fn start(id: &str, path: &Path, device: NvmeDevice) -> Result<Self, FunctionThreadError> {
        let thread_error = |source| FunctionThreadError::Thread {
            id: id.to_owned(),
            source,
        };
        let events_error = |source| FunctionThreadError::Events {
            id: id.to_owned(),
            source,
        };
        let (messages, inbox) = mpsc::channel();
        let wake = EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK).map_err(thread_error)?;
        let function = Function {
            id: id.to_owned(),
            socket: path.to_owned(),
            server: Server::bind(path, device)?,
            inbox,
            wake: wake.try_clone().map_err(thread_error)?,
            ended: false,
            looked: Instant::now(),
        };
        let events = EventManager::new().map_err(events_error)?;
        let thread = thread::Builder::new()
            .name(id.to_owned())
            .spawn(move || run(events, function))
            .map_err(thread_error)?;
        Ok(Self {
            handle: FunctionHandle { messages, wake },
            thread: Some(thread),
        })
    }

    /// A handle to ask for the function's figures.
    ///
    /// # Errors
    /// Returns the kernel's error when there are no file descriptors left.
    pub fn handle(&self) -> io::Result<FunctionHandle> {
        self.handle.try_clone()
    }

    /// Asks the thread to end. [`Self::end`] waits until it has.
    pub fn stop(&self) {
        // It has ended already if nobody takes the message.
        let _ = self.handle.send(Message::Stop);
    }

    /// Ends the thread: when this returns, nothing is written to the drive any more, and the lease
    /// is given back.
    ///
    /// # Errors
    /// Commands did not end within 30 seconds, and keep the lease until they have; the drive could not be
    /// flushed; or the thread panicked.
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

/// The control thread.
fn run(mut events: EventManager<Function>, function: Function) -> Result<(), EndError> {
    let id = events.add_subscriber(function);
    loop {
        let patience = match events.subscriber_mut(id) {
            Ok(function) if !function.ended => function.look_after_drive(),
            _ => break,
        };
        if let Err(error) = events.run_with_timeout(patience) {
            log::error!("The function is not served any more: {error}");
            break;
        }
    }
    match events.remove_subscriber(id) {
        Ok(function) => function.end(),
        // It was added just now, and by nobody removed.
        Err(_) => Ok(()),
    }
}

/// Token of a message's wake-up; the server's own tokens are small.
const WAKE: u32 = 0x100;
/// Token of events of the function.
const EVENTS: u32 = 0x101;

/// State of the control thread: the server, with the function in it, and its other wake-ups.
struct Function {
    id: String,
    socket: PathBuf,
    server: Server<NvmeDevice>,
    inbox: Receiver<Message>,
    wake: EventFd,
    ended: bool,
    /// When the function had its last look at its drive.
    looked: Instant,
}

impl Function {
    /// Leaves the drive as the guest may expect to find it again. The lease goes last.
    fn end(mut self) -> Result<(), EndError> {
        self.server.device_mut().function_mut().end()
    }

    /// Lets the function look how its drive fares, if it is time. Returns how long events may be
    /// waited for until it is time again, in milliseconds; -1 for however long it takes.
    fn look_after_drive(&mut self) -> i32 {
        let function = self.server.device_mut().function_mut();
        let Some(interval) = function.events_interval() else {
            return -1;
        };
        let mut left = interval.saturating_sub(self.looked.elapsed());
        if left.is_zero() {
            function.process_events();
            self.looked = Instant::now();
            left = interval;
        }
        // Not too early, where a part of a millisecond is left.
        i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX)
    }

    fn take_messages(&mut self) {
        // Nothing to read is no error: messages may be taken before their wake-up is.
        let _ = self.wake.read();
        loop {
            match self.inbox.try_recv() {
                // Who asked may have stopped waiting.
                Ok(Message::Stats(answer)) => drop(answer.try_send(self.stats())),
                Ok(Message::Stop) | Err(TryRecvError::Disconnected) => {
                    self.ended = true;
                    return;
                }
                Err(TryRecvError::Empty) => return,
            }
        }
    }

    fn stats(&self) -> FunctionStats {
        let function = self.server.device().function();
        let attachment = function.attachment();
        let namespace = attachment.namespace();
        let admin = function.admin_stats();
        FunctionStats {
            id: self.id.clone(),
            socket: self.socket.to_string_lossy().into_owned(),
            model: namespace.model.clone(),
            serial: namespace.serial.clone(),
            capacity_bytes: namespace.blocks << namespace.lba_shift,
            doorbells: attachment.doorbell_mode().to_string(),
            queues: attachment.stats().queues,
            admin: AdminStats {
                commands: admin.commands,
                doorbell_exits: admin.doorbell_exits,
                interrupts: admin.interrupts,
            },
        }
    }
}

impl MutEventSubscriber for Function {
    fn init(&mut self, ops: &mut EventOps) {
        self.server.init(ops);
        let function = self.server.device().function();
        for events in [
            Events::with_data(&self.wake, WAKE, EventSet::IN),
            Events::with_data(function.events_fd(), EVENTS, EventSet::IN),
        ] {
            if let Err(error) = ops.add(events) {
                log::error!("The function is not served: {error}");
                self.ended = true;
            }
        }
    }

    fn process(&mut self, events: Events, ops: &mut EventOps) {
        match events.data() {
            WAKE => self.take_messages(),
            EVENTS => self.server.device_mut().function_mut().process_events(),
            _ => self.server.process(events, ops),
        }
    }
}

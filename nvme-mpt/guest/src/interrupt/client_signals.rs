//! Signals to eventfds of clients, with bounded time on a shared poller.
//!
//! A client controls how long a signal to its eventfd takes. It can make the write block. It can watch the eventfd with a
//! hundred thousand epoll instances, and a signal wakes them all with interrupts disabled. So the time of each signal is
//! measured:
//!
//! | client | signal |
//! |---|---|
//! | trusted | a [watched write](nvme_mpt_memory::watched_write), until a write blocked |
//! | not trusted, or its eventfd made a write block | the kernel's [asynchronous I/O](nvme_mpt_memory::notifier) |
//! | its signals are slow, or there is no asynchronous I/O | a separate thread |
//!
//! Two reads of the time stamp counter detect a possibly slow signal. The poller may also have been preempted, so the
//! processor time of the next signals is measured. In a virtual machine, that time includes steal time, so the decision takes
//! three slow signals. The thread of a slow client sleeps so that it uses at most 1 % of a processor. After a number of
//! quick signals, the client is signalled without the thread again. This number doubles each time.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use nvme_mpt_memory::clock::{self, Ticks, ticks_in};
use nvme_mpt_memory::notifier::EventfdNotifier;
use nvme_mpt_memory::processors::{ThreadId, current_processors, set_affinity};
use nvme_mpt_memory::sync::Mutex;
use nvme_mpt_memory::sync::mpsc::{Receiver, Sender, channel};
use nvme_mpt_memory::system::thread_time;
use vmm_sys_util::eventfd::EventFd;

use crate::threads::start_thread;

/// Time from which a signal counts as possibly slow by its duration, and as slow by its processor time. In a virtual machine, a
/// signal to a vCPU takes some microseconds.
const SLOW_SIGNAL: Duration = Duration::from_micros(50);

/// Number of signals to a client whose processor time is measured after a possibly slow signal. The number doubles each time,
/// because a client can make signals slow as soon as they are no longer measured.
const MEASURED_SIGNALS: u32 = 16;

/// Number of slow signals, among the measured ones, after which the client is signalled by a thread of its own instead of by
/// the poller.
const SLOW_MAX: u32 = 3;

/// Maximum number of doublings of [`MEASURED_SIGNALS`].
const DOUBLINGS_MAX: u32 = 16;

/// Number of quick signals by a client's thread after which the poller signals the client itself again. The number doubles each
/// time.
const QUICK_SIGNALS: u32 = 64;

/// Time for which a slow client's thread sleeps after a signal, as a multiple of the signal's processor time. The time is at
/// most [`REST_MAX`].
const REST_FACTOR: u32 = 99;

/// Maximum time for which a slow client's thread sleeps. It is limited because a guest's driver waits for the interrupt with a
/// timeout.
const REST_MAX: Duration = Duration::from_secs(1);

/// Minimum time between two attempts to start a client's thread.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Number of trusted clients with a blocked write from which no further client is signalled by a direct write.
const BLOCKED_MAX: u32 = 3;

/// Number of trusted clients whose eventfd made a write block.
static BLOCKED_CLIENTS: AtomicU32 = AtomicU32::new(0);

/// Values of `path`, which says who signals a client: the poller (`DIRECT`), the poller with measurements (`SUSPECT`), or a
/// thread of the client (`THREAD`).
const DIRECT: u8 = 0;
const SUSPECT: u8 = 1;
const THREAD: u8 = 2;

/// Trust in the process that reads an eventfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventReader {
    /// The reader's process has full power over this process anyway, see [`is_trusted`](nvme_mpt_memory::system::is_trusted).
    Trusted,
    /// The reader's process belongs to another user, and may make signals slow or block them.
    Untrusted,
}

/// Signals to the eventfds of one client.
#[derive(Debug)]
pub struct ClientSignals {
    state: Arc<ClientSignalState>,
    thread: Mutex<SignalThread>,
}

/// Thread that signals a slow client, if it was started.
#[derive(Debug, Default)]
struct SignalThread {
    sender: Option<Sender<Arc<ClientEventFd>>>,
    /// Time of the last failed attempt to start the thread.
    failed_at: Option<Ticks>,
}

/// Measurements of a client's signals, and the path that they take.
#[derive(Debug)]
struct ClientSignalState {
    name: String,
    path: AtomicU8,
    /// Number of signals whose processor time is still to be measured.
    unmeasured: AtomicU32,
    /// Number of slow signals among the measured ones.
    slow: AtomicU32,
    /// Number of possibly slow signals that were seen while no measurement ran.
    suspicions: AtomicU32,
    /// True if the poller may signal by a write, because the client is trusted and no write has blocked.
    uses_writes: AtomicBool,
    notifier: OnceLock<Arc<EventfdNotifier>>,
    /// Number of times that the client's signals became quick again, so that the poller took them over from the client's
    /// thread.
    returns: AtomicU32,
    slow_ticks: u64,
}

/// Eventfd received from a client.
#[derive(Debug)]
pub struct ClientEventFd {
    eventfd: Arc<EventFd>,
    signals: Arc<ClientSignals>,
    /// True if the client's thread was asked to signal the eventfd and has not done so.
    is_due: AtomicBool,
}

impl ClientSignals {
    /// Creates the signals to a client. `name` is the name of its thread.
    #[must_use]
    pub fn new(name: &str, client: EventReader) -> Arc<Self> {
        let signals = Self {
            state: Arc::new(ClientSignalState {
                name: name.to_owned(),
                path: AtomicU8::new(DIRECT),
                unmeasured: AtomicU32::new(0),
                slow: AtomicU32::new(0),
                suspicions: AtomicU32::new(0),
                uses_writes: AtomicBool::new(true),
                notifier: OnceLock::new(),
                returns: AtomicU32::new(0),
                slow_ticks: ticks_in(SLOW_SIGNAL),
            }),
            thread: Mutex::default(),
        };
        signals.set_client(client);
        Arc::new(signals)
    }

    /// Switches to another client of the same function. The measurements of earlier clients stay valid.
    pub fn set_client(&self, client: EventReader) {
        let is_trusted = client == EventReader::Trusted
            && BLOCKED_CLIENTS.load(Ordering::Relaxed) < BLOCKED_MAX
            && self.state.uses_writes.load(Ordering::Relaxed)
            && start_write_watch();
        if !is_trusted {
            self.state.stop_writing();
        }
    }

    /// Wraps an eventfd of the client that came through [`eventfd::from_client`](nvme_mpt_memory::eventfd::from_client).
    #[must_use]
    pub fn eventfd(self: &Arc<Self>, eventfd: impl Into<Arc<EventFd>>) -> Arc<ClientEventFd> {
        Arc::new(ClientEventFd {
            eventfd: eventfd.into(),
            signals: self.clone(),
            is_due: AtomicBool::new(false),
        })
    }

    /// Asks the client's thread to signal an eventfd, without waiting. Starts the thread if there is none, but tries that at
    /// most once per [`RETRY_INTERVAL`]. Returns whether there is a thread.
    #[cold]
    fn delegate(&self, eventfd: &Arc<ClientEventFd>) -> bool {
        self.delegate_with(eventfd, || self.state.clone().start())
    }

    /// Lets the client's thread signal an eventfd, as [`Self::delegate`] does. `start` starts the thread if there is none.
    fn delegate_with(
        &self,
        eventfd: &Arc<ClientEventFd>,
        start: impl FnOnce() -> io::Result<Sender<Arc<ClientEventFd>>>,
    ) -> bool {
        if eventfd.is_due.swap(true, Ordering::AcqRel) {
            return true;
        }
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.sender.is_none() {
            let now = Ticks::now();
            let retry = ticks_in(RETRY_INTERVAL);
            if thread.failed_at.is_none_or(|at| now.since(at) >= retry) {
                match start() {
                    Ok(sender) => {
                        *thread = SignalThread {
                            sender: Some(sender),
                            failed_at: None,
                        }
                    }
                    Err(error) => {
                        if thread.failed_at.replace(now).is_none() {
                            log::error!(
                                "{}: there is no thread for slow interrupts: {error}",
                                self.state.name
                            );
                        }
                    }
                }
            }
        }
        let Some(sender) = &thread.sender else {
            eventfd.is_due.store(false, Ordering::Release);
            return false;
        };
        // The thread runs for as long as `self` exists, so it gets the eventfd.
        sender.send(eventfd.clone()).is_ok()
    }
}

impl ClientEventFd {
    /// Signals the eventfd. Returns `false` if that failed or the counter was full. The next signal then makes up for this one.
    #[inline]
    pub(crate) fn signal(self: &Arc<Self>) -> bool {
        let state = &self.signals.state;
        let way = state.path.load(Ordering::Relaxed);
        if way == THREAD {
            return self.signals.delegate(self);
        }
        let measured = (way == SUSPECT).then(thread_time);
        let began = Ticks::now();
        let signalled = state.signal(&self.eventfd);
        let ticks = Ticks::now().since(began);
        if ticks > state.slow_ticks || measured.is_some() {
            state.record_duration(
                ticks,
                measured.map(|before| thread_time().saturating_sub(before)),
            );
        }
        match signalled {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                state.record_blocked();
                match state.path.load(Ordering::Relaxed) {
                    THREAD => self.signals.delegate(self),
                    _ => state.signal(&self.eventfd).is_ok(),
                }
            }
            Err(_) => false,
        }
    }
}

impl ClientSignalState {
    fn signal(&self, eventfd: &EventFd) -> io::Result<()> {
        match self.notifier.get() {
            Some(notifier) if !self.uses_writes.load(Ordering::Relaxed) => notifier.signal(eventfd),
            _ => write(eventfd),
        }
    }

    /// Stops signalling the client by writes: switches to asynchronous I/O, or to the client's thread if there is no
    /// asynchronous I/O.
    fn stop_writing(&self) {
        if self.notifier.get().is_none() {
            match EventfdNotifier::shared() {
                Ok(notifier) => drop(self.notifier.set(notifier)),
                Err(error) => {
                    log::warn!(
                        "{}: a thread signals interrupts, which takes longer: {error}",
                        self.name
                    );
                    // The thread's writes must be watched.
                    start_write_watch();
                    self.path.store(THREAD, Ordering::Relaxed);
                }
            }
        }
        self.uses_writes.store(false, Ordering::Relaxed);
    }

    /// Records that a write to the client's eventfd blocked.
    #[cold]
    fn record_blocked(&self) {
        if self.uses_writes.load(Ordering::Relaxed) {
            BLOCKED_CLIENTS.fetch_add(1, Ordering::Relaxed);
            log::warn!(
                "{}: writes to an interrupt eventfd of its VMM block, so they are made without blocking from now on",
                self.name
            );
            self.stop_writing();
        }
    }

    /// Records the duration of a signal, and its processor time if that was measured.
    #[cold]
    fn record_duration(&self, ticks: u64, processor: Option<Duration>) {
        match processor {
            Some(time) if time > SLOW_SIGNAL => {
                if self.slow.fetch_add(1, Ordering::Relaxed) + 1 < SLOW_MAX {
                    return;
                }
                log::warn!(
                    "{}: an interrupt took {time:?} of processor time, as for a VMM that watches its eventfds many times: a thread of \
                     its own signals them from now on",
                    self.name
                );
                self.path.store(THREAD, Ordering::Relaxed);
            }
            None => {
                let doublings = self.suspicions.fetch_add(1, Ordering::Relaxed);
                let signals = MEASURED_SIGNALS << doublings.min(DOUBLINGS_MAX);
                self.unmeasured.store(signals, Ordering::Relaxed);
                self.slow.store(0, Ordering::Relaxed);
                self.switch_path(DIRECT, SUSPECT);
            }
            // The poller was preempted, so this duration says nothing about the client.
            Some(_) if ticks > self.slow_ticks => {}
            Some(_) => {
                let left = self.unmeasured.load(Ordering::Relaxed).saturating_sub(1);
                self.unmeasured.store(left, Ordering::Relaxed);
                if left == 0 {
                    self.switch_path(SUSPECT, DIRECT);
                }
            }
        }
    }

    /// Changes the path for signals, unless another poller of the client's queues has changed it.
    fn switch_path(&self, from: u8, to: u8) {
        let (success, failure) = (Ordering::Relaxed, Ordering::Relaxed);
        let _ = self.path.compare_exchange(from, to, success, failure);
    }

    /// Starts the client's thread.
    fn start(self: Arc<Self>) -> io::Result<Sender<Arc<ClientEventFd>>> {
        let (sender, eventfds) = channel();
        let name = self.name.clone();
        start_thread(&name, move || self.signal_all(&eventfds))?;
        Ok(sender)
    }

    /// Signals each received eventfd, until the sender of the client is dropped.
    fn signal_all(&self, eventfds: &Receiver<Arc<ClientEventFd>>) {
        avoid_poller_processor();
        let mut quick = 0;
        while let Ok(eventfd) = eventfds.recv() {
            // The flag is cleared before the signal, so that a request during the signal causes another signal.
            eventfd.is_due.store(false, Ordering::Release);
            let before = thread_time();
            let signalled = self.signal(&eventfd.eventfd);
            if signalled.is_err_and(|error| error.kind() == io::ErrorKind::Interrupted) {
                self.record_blocked();
            }
            drop(eventfd);
            let pause = self.record_thread_signal(thread_time().saturating_sub(before), &mut quick);
            if !pause.is_zero() {
                clock::sleep(pause);
            }
        }
    }

    /// Records the processor time of a signal by the client's thread. Returns the time for which the thread rests.
    fn record_thread_signal(&self, time: Duration, quick: &mut u32) -> Duration {
        if time > SLOW_SIGNAL {
            *quick = 0;
            return (time * REST_FACTOR).min(REST_MAX);
        }
        *quick += 1;
        let has_other_way =
            self.notifier.get().is_some() || self.uses_writes.load(Ordering::Relaxed);
        let returns = self.returns.load(Ordering::Relaxed);
        if has_other_way && *quick >= QUICK_SIGNALS.saturating_mul(1 << returns.min(20)) {
            *quick = 0;
            self.returns.store(returns + 1, Ordering::Relaxed);
            self.unmeasured.store(MEASURED_SIGNALS, Ordering::Relaxed);
            self.slow.store(0, Ordering::Relaxed);
            self.path.store(SUSPECT, Ordering::Relaxed);
        }
        Duration::ZERO
    }
}

#[cfg(simulation)]
use nvme_mpt_memory::eventfd::signal as write;
#[cfg(not(simulation))]
use nvme_mpt_memory::watched_write::signal as write;

/// Starts the thread that watches for blocked writes, unless it was started. Returns `false` if it cannot run.
fn start_write_watch() -> bool {
    #[cfg(simulation)]
    return true;
    #[cfg(not(simulation))]
    {
        use nvme_mpt_memory::watched_write::{install_handler, run_watcher};
        static IS_WATCHED: OnceLock<bool> = OnceLock::new();
        *IS_WATCHED.get_or_init(|| {
            let watch_all = || {
                if let Err(error) = run_watcher() {
                    log::error!("Writes to eventfds of VMMs are not watched any more: {error}");
                }
            };
            let started = install_handler().and_then(|()| start_thread("eventfds", watch_all));
            if let Err(error) = &started {
                log::warn!("Writes to eventfds of VMMs are not watched, and not made: {error}");
            }
            started.is_ok()
        })
    }
}

/// Allows the calling thread to run on all processors of the process except for those of the poller that started the
/// thread.
fn avoid_poller_processor() {
    if cfg!(simulation) {
        return;
    }
    let main = ThreadId(nvme_mpt_memory::system::process_id().cast_signed());
    let (Ok(own), Ok(all)) = (current_processors(), main.processors()) else {
        return;
    };
    let others = all.difference(&own);
    if !others.is_empty() {
        // On failure, the thread stays on the poller's processors.
        let _ = set_affinity(&others);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signals(client: EventReader) -> Arc<ClientSignals> {
        ClientSignals::new("vm", client)
    }

    #[test]
    fn a_thread_that_cannot_be_started_is_tried_once_a_second() {
        let signals = signals(EventReader::Trusted);
        let eventfd = signals.eventfd(EventFd::new(libc::EFD_NONBLOCK).expect("free"));
        let tries = AtomicU32::new(0);
        let refuse = || {
            tries.fetch_add(1, Ordering::Relaxed);
            Err(io::ErrorKind::WouldBlock.into())
        };
        for _ in 0..100 {
            assert!(!signals.delegate_with(&eventfd, refuse));
        }
        // A start is tried about once per second. Ten tries allow for a machine that pauses between two of them.
        assert!(tries.load(Ordering::Relaxed) <= 10);
        let (sender, handed) = channel();
        signals.thread.lock().expect("no panic").failed_at = Some(Ticks(0));
        assert!(signals.delegate_with(&eventfd, || Ok(sender)));
        assert!(handed.try_recv().is_ok());
        assert_eq!(signals.thread.lock().expect("no panic").failed_at, None);
    }

    fn way(signals: &ClientSignals) -> u8 {
        signals.state.path.load(Ordering::Relaxed)
    }

    const QUICKLY: Duration = Duration::from_micros(2);
    const SLOWLY: Duration = Duration::from_millis(9);

    #[test]
    fn slow_signals_move_to_a_thread_by_their_processor_time_alone() {
        let signals = signals(EventReader::Untrusted);
        let state = &signals.state;
        let (quick, slow) = (state.slow_ticks / 10, state.slow_ticks * 100);
        // The poller was preempted during the slow signal.
        state.record_duration(slow, None);
        assert_eq!(way(&signals), SUSPECT);
        state.record_duration(slow, Some(QUICKLY));
        for _ in 0..MEASURED_SIGNALS {
            assert_eq!(way(&signals), SUSPECT);
            state.record_duration(quick, Some(QUICKLY));
        }
        assert_eq!(way(&signals), DIRECT);
        let decide = || {
            for _ in 0..SLOW_MAX {
                assert_eq!(way(&signals), SUSPECT);
                state.record_duration(slow, Some(SLOWLY));
            }
            assert_eq!(way(&signals), THREAD);
        };
        state.record_duration(slow, None);
        decide();
        // The client's thread gets a hundredth of a processor. After each return to the poller, the thread has to signal for
        // longer before the next return.
        let mut done = 0;
        let pause = state.record_thread_signal(SLOWLY, &mut done);
        assert_eq!(pause, SLOWLY * REST_FACTOR);
        for returns in 0..3 {
            for _ in 0..QUICK_SIGNALS << returns {
                assert_eq!(way(&signals), THREAD, "{returns}");
                let pause = state.record_thread_signal(QUICKLY, &mut done);
                assert_eq!(pause, Duration::ZERO);
            }
            decide();
        }
    }

    #[test]
    fn an_eventfd_that_makes_writes_wait_holds_up_no_second_signal() {
        let signals = signals(EventReader::Trusted);
        let theirs = EventFd::new(0).unwrap();
        let ours = signals.eventfd(theirs.try_clone().unwrap());
        assert!(ours.signal());
        assert_eq!(theirs.read().unwrap(), 1);
        theirs.write(u64::MAX - 1).unwrap();
        // No process reads the eventfd, so the write is interrupted.
        ours.signal();
        assert!(!signals.state.uses_writes.load(Ordering::Relaxed));
        for _ in 0..1000 {
            ours.signal();
        }
        theirs.read().unwrap();
        assert!(ours.signal());
        assert_eq!(theirs.read().unwrap(), 1);
        // The next client of the function inherits the state.
        signals.set_client(EventReader::Trusted);
        assert!(!signals.state.uses_writes.load(Ordering::Relaxed));
    }

    #[test]
    fn a_client_without_asynchronous_io_is_signalled_by_its_thread() {
        let signals = signals(EventReader::Trusted);
        signals.state.path.store(THREAD, Ordering::Relaxed);
        let theirs = EventFd::new(0).unwrap();
        let ours = signals.eventfd(theirs.try_clone().unwrap());
        for _ in 0..3 {
            assert!(ours.signal());
            assert!(theirs.read().unwrap() > 0, "it waits for the signal");
        }
    }

    /// A client among five on one poller, in simulated time. A tick is a nanosecond.
    struct SignalTestClient {
        name: &'static str,
        /// Returns the processor time of the next direct signal, and whether its write blocks.
        signal: fn(&ClientSignalState) -> (u64, bool),
    }

    /// Simulated times in nanoseconds of a signal to a vCPU, of a signal by asynchronous I/O, and of handing a signal to a
    /// thread.
    const WRITE: u64 = 300;
    const NOTIFY: u64 = 1000;
    const HAND_OVER: u64 = 100;

    /// Clients that each slow down signals in one way. A new kind of effect needs an entry here.
    const ATTACKERS: &[SignalTestClient] = &[
        SignalTestClient {
            name: "100,000 watches",
            signal: |_| (10_000_000, false),
        },
        SignalTestClient {
            name: "1,500 watches",
            signal: |_| (67_500, false),
        },
        SignalTestClient {
            name: "a blocking eventfd that is full",
            signal: |state| match state.uses_writes.load(Ordering::Relaxed) {
                true => (15_000_000, true),
                false => (NOTIFY, false),
            },
        },
        SignalTestClient {
            name: "watches that come and go, as soon as its signals are direct again",
            signal: |state| match state.path.load(Ordering::Relaxed) {
                THREAD => (WRITE, false),
                _ => (10_000_000, false),
            },
        },
        SignalTestClient {
            name: "one of its eventfds is watched, and signalled whenever signals are not measured",
            signal: |state| match state.path.load(Ordering::Relaxed) {
                DIRECT => (10_000_000, false),
                _ => (WRITE, false),
            },
        },
    ];

    /// Returns the time that 99.9 % of the poller's passes do not exceed. Each pass has a command of each client. All clients
    /// but the attacker have fast direct signals.
    fn pass_of_1000(attacker: Option<&SignalTestClient>) -> u64 {
        const PASSES: u64 = 100_000;
        const COMMAND: u64 = 500;
        let signals = signals(EventReader::Trusted);
        let state = ClientSignalState {
            slow_ticks: SLOW_SIGNAL.as_nanos() as u64,
            ..Arc::into_inner(Arc::into_inner(signals).expect("one").state).expect("one")
        };
        let mut by_thread = 0;
        let pass = |_| {
            let others = 4 * (COMMAND + WRITE) + COMMAND;
            let Some(attacker) = attacker else {
                return others + WRITE;
            };
            let way = state.path.load(Ordering::Relaxed);
            let (time, waited) = (attacker.signal)(&state);
            if way == THREAD {
                // Meanwhile, the client's thread signals.
                state.record_thread_signal(Duration::from_nanos(time), &mut by_thread);
                return others + HAND_OVER;
            }
            let processor = (way == SUSPECT && !waited).then_some(Duration::from_nanos(time));
            if time > state.slow_ticks || processor.is_some() {
                state.record_duration(time, processor);
            }
            if waited {
                state.record_blocked();
            }
            others + time
        };
        let mut passes: Vec<_> = (0..PASSES).map(pass).collect();
        passes.sort_unstable();
        passes[(PASSES - PASSES / 1000) as usize - 1]
    }

    #[test]
    fn others_on_the_poller_of_an_attacker_take_twice_their_time_at_most() {
        let alone = pass_of_1000(None);
        for attacker in ATTACKERS {
            let attacked = pass_of_1000(Some(attacker));
            assert!(
                attacked <= 2 * alone,
                "{}: {alone}, {attacked}",
                attacker.name
            );
        }
    }
}

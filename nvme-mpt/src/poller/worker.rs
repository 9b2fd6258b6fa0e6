//! Thread of a poller: it spins while there is work, then spins for a limited time, then parks.
//!
//! A poller owns its shadow queues. Other threads reach it by mail (to add, remove and watch) and by its waker. The path of an
//! I/O takes no lock: the mailbox is read only when its flag is set.

use std::io;
use std::ops::Deref;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use log::{error, warn};
use nvme_guest::event::EventQueue;
use nvme_guest::learn::{
    AdaptivePolicies, PollInterval, PreemptionBackoff, SpinTime, ThreadProcessorUse,
};
use nvme_guest::park::PollerWaker;
use nvme_guest::stats::PollerStats;
use nvme_guest::threads::ThreadSpawner;
use nvme_mpt_memory::clock::{TickRate, Ticks};
use nvme_mpt_memory::processors::{ThreadId, are_virtual, own_processors, run_on};
use nvme_mpt_memory::sync::mpsc::{Receiver, SendError, SyncSender, sync_channel};
use nvme_mpt_memory::sync::{JoinHandle, Mutex};
use nvme_mpt_memory::system::{thread_preemptions, thread_time};
use nvme_mpt_memory::{MappedWord32, eventfd};
use vmm_sys_util::epoll::{ControlOperation, EpollEvent, EventSet};
use vmm_sys_util::timerfd::TimerFd;

use super::affinity::ThreadPinning;
use super::arbiter::{FunctionArbitration, FunctionQuantum};
use super::beside::{PollerLocality, VcpuAffinity};
use super::policy::PollerIdleMode;
use super::seat::{TakeoverSlot as SeatOf, is_blocked};
use crate::processor_time::{self, ProcessorTime, ProcessorTimeCharge, ProcessorTimeDivision};
use crate::shadow::ShadowQueue;

/// New poller for a thread from whose seat another thread has taken the functions.
pub(super) struct TakeoverTicket {
    pub(super) shared: Arc<PollerState>,
    pub(super) sleeper: PollerSleep,
}

/// Seat of a poller's thread.
type PollerTakeoverSlot = SeatOf<PolledFunctions, TakeoverTicket>;

/// Number of consecutive passes without work that are made without a pause. A guest with one command in flight sends its next
/// command during these passes, and a pause would add to the latency.
///
/// A pause leaves the core to its other hardware threads. A poller in a virtual machine never pauses: the hypervisor may
/// intercept PAUSE (AMD64 APM, volume 2, section 15.14.4). QEMU's emulator takes its global lock at each PAUSE.
const EAGER_PASSES: u32 = 64;

/// Maximum sleep that ends with the precision of a timer. Longer sleeps end with a precision of a millisecond.
const EXACT_MAX: Duration = Duration::from_millis(20);

/// Limits of the sleeps of a poller that sleeps instead of spinning, because other threads need its processor.
const REST_MIN: Duration = Duration::from_micros(5);
const REST_MAX: Duration = Duration::from_micros(50);

/// Time that a thread gets to run before it is checked whether it is blocked.
const LOOK: Duration = Duration::from_micros(500);

/// Watched doorbells of a mapped admin queue, whose values another thread handles.
#[derive(Debug)]
pub(crate) struct DoorbellWatch {
    pub(crate) id: u64,
    pub(crate) doorbells: [MappedWord32; 2],
    pub(crate) seen: [u32; 2],
    pub(crate) events: Arc<EventQueue>,
    /// Processor time spent on the watch by its poller.
    pub(crate) bill: ProcessorTimeCharge,
}

impl DoorbellWatch {
    fn look(&mut self) -> bool {
        let now = [self.doorbells[0].load(), self.doorbells[1].load()];
        let changed = now != self.seen;
        if changed {
            self.seen = now;
            self.events.signal();
        }
        changed
    }
}

/// Treatment of the commands of a queue that leaves its poller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueRemovalMode {
    /// Commands complete.
    Drains,
    /// Commands end after their current step.
    Ends,
}

/// Shadow queue that its poller hands over.
#[derive(Debug)]
pub(crate) struct QueueRemoval {
    queue: Receiver<Box<ShadowQueue>>,
    is_decided: Arc<AtomicBool>,
}

impl QueueRemoval {
    /// Keeps the queue with its poller, after [`Poller::stay`]. Returns the queue if it has already left.
    ///
    /// Does not wait for the poller's next pass, because a function may block the thread in the kernel.
    pub(crate) fn stay(self) -> Option<Box<ShadowQueue>> {
        match self.is_decided.swap(true, Ordering::AcqRel) {
            false => None,
            // The queue was sent, or the poller is about to send it.
            true => self.queue.recv().ok(),
        }
    }
}

impl Deref for QueueRemoval {
    type Target = Receiver<Box<ShadowQueue>>;

    fn deref(&self) -> &Self::Target {
        &self.queue
    }
}

/// Requester of a queue's hand-over.
#[derive(Clone)]
struct QueueRemovalReply {
    reply: SyncSender<Box<ShadowQueue>>,
    /// Set by the poller when it hands over the queue, or by the requester to keep the queue with the poller. The first one to
    /// set it decides.
    is_decided: Arc<AtomicBool>,
}

enum PollerRequest {
    Add(Box<ShadowQueue>),
    Remove(u64, QueueRemovalMode, QueueRemovalReply),
    /// Cuts the commands of a leaving queue short, because the queue is deleted.
    CutShort(u64),
    /// Keeps a leaving queue. Its requester also calls [`QueueRemoval::stay`], which returns the queue if it has already left.
    Stay(u64),
    Watch(DoorbellWatch),
    Unwatch(u64),
    /// Answered after the next pass.
    AfterPass(SyncSender<()>),
    Stop,
}

/// State of a poller that other threads can see.
pub(super) struct PollerState {
    name: String,
    cpu: Option<usize>,
    waker: Arc<PollerWaker>,
    mail: Mutex<Vec<PollerRequest>>,
    has_mail: AtomicBool,
    queues: AtomicUsize,
    busy_ticks: AtomicU64,
    parked_ticks: AtomicU64,
    /// Processor time of the thread at the last settlement.
    processor_nanoseconds: AtomicU64,
    /// Time at which the thread fell asleep, in ticks; 0 while it is awake.
    asleep_since: AtomicU64,
    parks: AtomicU64,
    spurious_wakes: AtomicU64,
    started: Ticks,
    spin: PollerIdleMode,
    learning: AdaptivePolicies,
    threads: ThreadSpawner,
    /// Seat of the thread that currently runs the poller.
    seat: Mutex<Arc<PollerTakeoverSlot>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Processors for a poller's thread.
pub(super) enum ThreadPlacement {
    /// Chosen by the kernel.
    Anywhere,
    /// This processor.
    Processor(usize),
    /// Processors beside a vCPU.
    Beside(PollerLocality),
}

/// Handle of a poller. Its thread ends when the handle is dropped.
pub(crate) struct Poller {
    shared: Arc<PollerState>,
}

impl std::fmt::Debug for Poller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Poller")
            .field("name", &self.shared.name)
            .finish_non_exhaustive()
    }
}

impl Poller {
    pub(super) fn start(
        name: &str,
        home: ThreadPlacement,
        spin: PollerIdleMode,
        learning: AdaptivePolicies,
        threads: &ThreadSpawner,
    ) -> io::Result<Self> {
        let cpu = match home {
            ThreadPlacement::Processor(cpu) => Some(cpu),
            ThreadPlacement::Anywhere | ThreadPlacement::Beside(_) => None,
        };
        let shared = PollerState::new(name, cpu, spin, learning, threads)?;
        let mut worker = PollerThread::new(&shared)?;
        let work = Box::new(move || {
            if let ThreadPlacement::Beside(neighbours) = home {
                worker.beside = VcpuAffinity::begin(neighbours, &worker.shared.name);
            }
            worker.run();
        });
        let thread = threads.spawn(name, work)?;
        *shared.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(Self { shared })
    }

    /// Lets another thread watch whether a function's turn blocks the poller's thread.
    pub(super) fn begin_watch(&self) {
        self.shared.seat().begin_watch();
    }

    /// Returns whether the poller's thread is awake.
    pub(super) fn is_awake(&self) -> bool {
        self.shared.asleep_since.load(Ordering::Relaxed) == 0
    }

    /// If a function's turn has blocked the thread for at least `limit` ticks, moves all other functions and the mailbox to a
    /// new thread. The blocking function keeps the old thread, which the returned poller represents.
    ///
    /// # Errors
    /// The kernel's error. Nothing has changed then.
    pub(super) fn relieve(
        &self,
        limit: u64,
        number: usize,
        threads: &ThreadSpawner,
    ) -> io::Result<Option<Arc<Self>>> {
        let shared = &self.shared;
        let seat = shared.seat();
        let Some((began, thread)) = seat.turn(|polled, index| shared.has_others(polled, index))
        else {
            return Ok(None);
        };
        if Ticks::now().since(began) < limit {
            return Ok(None);
        }
        // The thread may just have waited for the lock of its seat, which this check held.
        nvme_mpt_memory::clock::sleep(LOOK);
        if !is_blocked(thread) {
            return Ok(None);
        }
        // Everything that can fail comes first. If the new thread is not needed after all, it ends at once.
        let (sender, receiver) = sync_channel::<PolledFunctions>(1);
        let mut worker = PollerThread::new(shared)?;
        worker.seat = Arc::default();
        worker.seat.begin_watch();
        let next = worker.seat.clone();
        let work = Box::new(move || {
            if let Ok(polled) = receiver.recv() {
                worker.take_over(polled);
                worker.run();
            }
        });
        let apart = PollerState::new(
            &format!("poll-apart-{number}"),
            None,
            shared.spin,
            shared.learning,
            threads,
        )?;
        let ticket = TakeoverTicket {
            sleeper: PollerSleep::new(&apart.waker)?,
            shared: apart.clone(),
        };
        let thread = threads.spawn(&shared.name, work)?;
        let Some((mut polled, index)) = seat.take_over(began, ticket) else {
            return Ok(None);
        };
        *shared.seat.lock().unwrap_or_else(PoisonError::into_inner) = next;
        *shared.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        let function = polled.functions.remove(index);
        let queues = function.ids.len();
        shared.queues.fetch_sub(queues, Ordering::Relaxed);
        apart.queues.fetch_add(queues, Ordering::Relaxed);
        for fd in function.ids.iter().filter_map(|(_, fd)| *fd) {
            let _ = shared
                .waker
                .epoll()
                .ctl(ControlOperation::Delete, fd, EpollEvent::default());
        }
        let poller = Arc::new(Self { shared: apart });
        let is_its = |id: u64| function.ids.iter().any(|(own, _)| *own == id);
        let (its, others) = std::mem::take(&mut polled.leaving)
            .into_iter()
            .partition(|(id, _)| is_its(*id));
        polled.leaving = others;
        for (id, requester) in its {
            poller.send(PollerRequest::Remove(
                id,
                QueueRemovalMode::Drains,
                requester,
            ));
        }
        polled.apart.push(IsolatedFunction {
            function: Arc::downgrade(&function.function),
            poller: poller.clone(),
        });
        // The new thread waits for them.
        let _ = sender.send(polled);
        Ok(Some(poller))
    }

    /// Returns the waker of the poller.
    pub(crate) fn waker(&self) -> &Arc<PollerWaker> {
        &self.shared.waker
    }

    /// Returns the name of the poller.
    pub(crate) fn name(&self) -> &str {
        &self.shared.name
    }

    /// Returns the processor that the poller is pinned to.
    pub(crate) fn cpu(&self) -> Option<usize> {
        self.shared.cpu
    }

    /// Returns the number of shadow queues that the poller runs.
    pub(crate) fn queues(&self) -> usize {
        self.shared.queues.load(Ordering::Relaxed)
    }

    /// Adds a shadow queue to run.
    pub(crate) fn add(&self, queue: Box<ShadowQueue>) {
        self.shared.queues.fetch_add(1, Ordering::Relaxed);
        self.send(PollerRequest::Add(queue));
    }

    /// Removes a shadow queue. The queue takes no more commands from now on, and is handed over once none of its commands is in
    /// flight at the host controller.
    pub(crate) fn remove(&self, id: u64) -> QueueRemoval {
        self.let_leave(id, QueueRemovalMode::Drains)
    }

    /// Removes a queue as [`Self::remove`] does, and cuts its commands short, because the queue is deleted.
    pub(crate) fn end(&self, id: u64) -> QueueRemoval {
        self.let_leave(id, QueueRemovalMode::Ends)
    }

    fn let_leave(&self, id: u64, departure: QueueRemovalMode) -> QueueRemoval {
        let (reply, queue) = sync_channel(1);
        let is_decided = Arc::new(AtomicBool::new(false));
        let requester = QueueRemovalReply {
            reply,
            is_decided: is_decided.clone(),
        };
        self.send(PollerRequest::Remove(id, departure, requester));
        QueueRemoval { queue, is_decided }
    }

    /// Cuts the commands of a leaving queue short, as [`Self::end`] does.
    pub(crate) fn cut_short(&self, id: u64) {
        self.send(PollerRequest::CutShort(id));
    }

    /// Keeps a leaving queue. Call [`QueueRemoval::stay`] next, which returns the queue if it has already left.
    pub(crate) fn stay(&self, id: u64) {
        self.send(PollerRequest::Stay(id));
    }

    /// Starts to watch doorbells.
    pub(crate) fn watch(&self, watch: DoorbellWatch) {
        self.send(PollerRequest::Watch(watch));
    }

    pub(crate) fn unwatch(&self, id: u64) {
        self.send(PollerRequest::Unwatch(id));
    }

    /// Requests a pass over everything that the poller has been given so far. The answer follows the pass.
    pub(super) fn ask_for_pass(&self) -> Receiver<()> {
        let (sender, receiver) = sync_channel(1);
        self.send(PollerRequest::AfterPass(sender));
        receiver
    }

    fn send(&self, mail: PollerRequest) {
        self.shared
            .mail
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(mail);
        self.shared.has_mail.store(true, Ordering::Release);
        self.shared.waker.wake();
    }

    pub(crate) fn stats(&self) -> PollerStats {
        let shared = &self.shared;
        let now = Ticks::now();
        let life = now.since(shared.started).max(1);
        let share = |ticks: u64| (ticks as f64 / life as f64).min(1.0);
        let seconds = |ticks: u64| nvme_mpt_memory::clock::nanoseconds(ticks) as f64 / 1e9;
        let asleep = match shared.asleep_since.load(Ordering::Relaxed) {
            0 => 0,
            since => now.since(Ticks(since)),
        };
        let busy = shared.busy_ticks.load(Ordering::Relaxed);
        let parked = shared.parked_ticks.load(Ordering::Relaxed) + asleep;
        PollerStats {
            name: shared.name.clone(),
            cpu: shared.cpu,
            life_seconds: seconds(life),
            busy_seconds: seconds(busy),
            parked_seconds: seconds(parked),
            processor_seconds: shared.processor_nanoseconds.load(Ordering::Relaxed) as f64 / 1e9,
            busy_share: share(busy),
            parked_share: share(parked),
            queues: self.queues(),
            parks: shared.parks.load(Ordering::Relaxed),
            spurious_wakes: shared.spurious_wakes.load(Ordering::Relaxed),
        }
    }
}

impl Drop for Poller {
    fn drop(&mut self) {
        self.send(PollerRequest::Stop);
        let thread = self
            .shared
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            error!("Poller {} panicked", self.shared.name);
        }
    }
}

/// Share of a poller's queues that wait for the limits of their leases: none, some or all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ThrottledQueues {
    None,
    Some,
    All,
}

/// Queues and watches of a function.
#[derive(Default)]
struct FunctionQueues {
    #[expect(clippy::vec_box, reason = "queues move between threads and are large")]
    queues: Vec<Box<ShadowQueue>>,
    watches: Vec<DoorbellWatch>,
}

/// Function that a poller runs.
struct PolledFunction {
    function: Arc<ProcessorTime>,
    turns: FunctionArbitration,
    /// Empty while the function has its turn.
    members: FunctionQueues,
    /// Identifiers of the function's queues, with the descriptors that wake a sleeping poller for these queues.
    ids: Vec<(u64, Option<RawFd>)>,
}

/// Function that once blocked all others and now has its own poller.
struct IsolatedFunction {
    /// The reference is weak, because several pollers may know the function, and strong references in them would keep the
    /// function alive.
    function: Weak<ProcessorTime>,
    poller: Arc<Poller>,
}

/// All functions of a poller. Another thread may take them over while a function has its turn.
#[derive(Default)]
pub(super) struct PolledFunctions {
    functions: Vec<PolledFunction>,
    /// Queues to hand over once none of their commands is in flight.
    leaving: Vec<(u64, QueueRemovalReply)>,
    apart: Vec<IsolatedFunction>,
}

impl PolledFunctions {
    fn queues(&self) -> impl Iterator<Item = &ShadowQueue> {
        let functions = self.functions.iter();
        functions.flat_map(|function| function.members.queues.iter().map(Box::as_ref))
    }

    fn queues_mut(&mut self) -> impl Iterator<Item = &mut ShadowQueue> {
        let functions = self.functions.iter_mut();
        functions.flat_map(|function| function.members.queues.iter_mut().map(Box::as_mut))
    }

    fn queue(&mut self, id: u64) -> Option<&mut ShadowQueue> {
        self.queues_mut().find(|queue| queue.id() == id)
    }

    fn watches(&self) -> impl Iterator<Item = &DoorbellWatch> {
        self.functions
            .iter()
            .flat_map(|function| function.members.watches.iter())
    }

    /// Returns the function that a bill is charged to, and adds the function if it is new.
    fn function(&mut self, bill: &ProcessorTimeCharge) -> &mut PolledFunction {
        let own = bill.function();
        let at = self
            .functions
            .iter()
            .position(|function| Arc::ptr_eq(&function.function, own));
        let at = at.unwrap_or_else(|| {
            self.functions.push(PolledFunction {
                function: own.clone(),
                turns: FunctionArbitration::default(),
                members: FunctionQueues::default(),
                ids: Vec::new(),
            });
            self.functions.len() - 1
        });
        &mut self.functions[at]
    }

    /// Returns the function that a bill is charged to, if the function has its own poller.
    fn apart(&mut self, bill: &ProcessorTimeCharge) -> Option<&mut IsolatedFunction> {
        let own = bill.function();
        self.apart
            .iter_mut()
            .find(|apart| apart.function.as_ptr() == Arc::as_ptr(own))
    }
}

struct PollerThread {
    shared: Arc<PollerState>,
    seat: Arc<PollerTakeoverSlot>,
    sleeper: PollerSleep,
    polled: PolledFunctions,
    quantum: FunctionQuantum,
    stop: bool,
    /// True if all queues and watches belong to one function, which is charged all of the time, and none is leaving.
    is_plain: bool,
    /// True if the function has its own poller, which the wakers given out earlier do not wake.
    is_apart: bool,
    /// Processor time of the thread that is already charged.
    settled: Duration,
    /// Nanoseconds to add to this thread's processor time to get the poller's processor time, because a poller may change its
    /// thread.
    beside_nanoseconds: u64,
    /// Placement beside a vCPU, if requested.
    beside: Option<VcpuAffinity>,
}

impl PollerState {
    fn new(
        name: &str,
        cpu: Option<usize>,
        spin: PollerIdleMode,
        learning: AdaptivePolicies,
        threads: &ThreadSpawner,
    ) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            name: name.to_owned(),
            cpu,
            waker: PollerWaker::new()?,
            mail: Mutex::default(),
            has_mail: AtomicBool::new(false),
            queues: AtomicUsize::new(0),
            busy_ticks: AtomicU64::new(0),
            parked_ticks: AtomicU64::new(0),
            processor_nanoseconds: AtomicU64::new(0),
            asleep_since: AtomicU64::new(0),
            parks: AtomicU64::new(0),
            spurious_wakes: AtomicU64::new(0),
            started: Ticks::now(),
            spin,
            learning,
            threads: threads.clone(),
            seat: Mutex::default(),
            thread: Mutex::default(),
        }))
    }

    fn seat(&self) -> Arc<PollerTakeoverSlot> {
        self.seat
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Returns whether the poller has, or is about to get, functions other than the one at `index`.
    fn has_others(&self, polled: &PolledFunctions, index: usize) -> bool {
        let function = polled.functions.get(index);
        let is_other = |bill: &ProcessorTimeCharge| {
            function.is_none_or(|function| !Arc::ptr_eq(&function.function, bill.function()))
        };
        polled.functions.len() > 1
            || self.has_mail.load(Ordering::Acquire)
                && self
                    .mail
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .iter()
                    .any(|mail| match mail {
                        PollerRequest::Add(queue) => is_other(queue.bill()),
                        PollerRequest::Watch(watch) => is_other(&watch.bill),
                        _ => false,
                    })
    }
}

impl PollerThread {
    fn new(shared: &Arc<PollerState>) -> io::Result<Self> {
        Ok(Self {
            shared: shared.clone(),
            seat: shared.seat(),
            sleeper: PollerSleep::new(&shared.waker)?,
            polled: PolledFunctions::default(),
            quantum: FunctionQuantum::new(TickRate::of_this_machine()),
            stop: false,
            is_plain: true,
            is_apart: false,
            settled: Duration::ZERO,
            beside_nanoseconds: 0,
            beside: None,
        })
    }

    /// Takes over the functions of a blocked thread.
    fn take_over(&mut self, polled: PolledFunctions) {
        self.beside_nanoseconds = self.shared.processor_nanoseconds.load(Ordering::Relaxed);
        self.polled = polled;
        self.shared.waker.withdraw();
        self.follow_change();
    }

    /// Gives a function its turn, which starts at `began`. If another thread takes over the other functions during the turn,
    /// this thread runs only this function from then on.
    #[inline]
    fn turn<R>(
        &mut self,
        index: usize,
        began: Ticks,
        work: impl FnOnce(&mut FunctionQueues) -> R,
    ) -> R {
        let mut members = std::mem::take(&mut self.polled.functions[index].members);
        if !self.seat.is_watched() {
            let result = work(&mut members);
            self.polled.functions[index].members = members;
            return result;
        }
        let polled = std::mem::take(&mut self.polled);
        self.seat.leave(polled, index, began);
        let result = work(&mut members);
        match self.seat.come_back() {
            Ok(polled) => {
                self.polled = polled;
                self.polled.functions[index].members = members;
            }
            Err(ticket) => self.go_apart(ticket, members, began),
        }
        result
    }

    /// Continues with one function, after another thread has taken over the others.
    #[cold]
    fn go_apart(&mut self, ticket: Option<TakeoverTicket>, members: FunctionQueues, began: Ticks) {
        let Some(TakeoverTicket { shared, sleeper }) = ticket else {
            // A take-over always leaves a ticket.
            error!("Poller {} lost its place", self.shared.name);
            return;
        };
        let held = nvme_mpt_memory::clock::nanoseconds(Ticks::now().since(began)) / 1_000_000;
        warn!(
            "A function blocked poller {} for {held} ms, by slow memory, storage or a descriptor: it has a poller of \
             its own from now on, {}",
            self.shared.name, shared.name
        );
        self.seat = shared.seat();
        self.shared = shared;
        self.sleeper = sleeper;
        self.is_apart = true;
        let time = u64::try_from(thread_time().as_nanos()).unwrap_or(u64::MAX);
        self.beside_nanoseconds = 0_u64.wrapping_sub(time);
        self.settled = thread_time();
        let FunctionQueues { queues, watches } = members;
        for queue in queues {
            self.take_in(queue);
        }
        for watch in watches {
            self.polled
                .function(&watch.bill)
                .members
                .watches
                .push(watch);
        }
        self.follow_change();
    }

    /// Starts to run a queue.
    fn take_in(&mut self, queue: Box<ShadowQueue>) {
        let fd = queue.wait_fd();
        if let Some(fd) = fd {
            self.sleeper.watch(fd);
        }
        let function = self.polled.function(queue.bill());
        function.ids.push((queue.id(), fd));
        function.members.queues.push(queue);
    }

    fn run(mut self) {
        let (spin, learning) = (self.shared.spin, self.shared.learning);
        self.seat.sit_down(ThreadId::of_this_thread());
        let processor = self.shared.cpu;
        // Processors for the thread if it loses its seat.
        let anywhere = processor.and_then(|_| own_processors().ok());
        let mut pinning = processor.map(|cpu| ThreadPinning::begin(cpu, &self.shared.name));
        let rate = TickRate::of_this_machine();
        let early = spin.spins_before_due();
        let due_soon = rate.ticks(early);
        let mut spin_time = SpinTime::new(learning.spin, rate);
        let mut courtesy = PreemptionBackoff::new(learning.courtesy, rate);
        let looks = PollInterval::new(learning.looks);
        let mut idle_since = None;
        // Like `idle_since`, but since the last sleep.
        let mut spin_since = None;
        let eager_passes = if are_virtual() {
            u32::MAX
        } else {
            EAGER_PASSES
        };
        let mut empty_passes = 0_u32;
        let mut pass_began = Ticks::now();
        let period = rate.ticks(processor_time::PERIOD);
        let mut settles_at = pass_began;
        loop {
            if self.shared.has_mail.load(Ordering::Acquire) {
                self.read_mail();
            }
            if self.stop {
                return;
            }
            let worked = self.pass(pass_began);
            let now = Ticks::now();
            if now >= settles_at {
                self.settle();
                if let Some(beside) = &mut self.beside {
                    beside.follow(now, &self.shared.name);
                }
                // A function that is alone on the thread has no right to the processor of the others.
                if self.is_apart
                    && pinning.take().is_some()
                    && let Some(all) = &anywhere
                {
                    // On failure, it stays where it is.
                    let _ = run_on(all);
                }
                if let Some(pinning) = &mut pinning {
                    pinning.follow(now, &self.shared.name);
                }
                settles_at = Ticks(now.0.saturating_add(period));
            }
            let spun = spin_since.map_or(0, |since| pass_began.since(since));
            let on_processor = || ThreadProcessorUse {
                ticks: rate.ticks(thread_time()),
                preemptions: thread_preemptions(),
            };
            if courtesy.passed(now, spun, now.since(pass_began), on_processor) {
                spin_time.crowded();
            }
            if worked {
                add(&self.shared.busy_ticks, now.since(pass_began));
                idle_since = None;
                spin_since = None;
                empty_passes = 0;
                pass_began = now;
                continue;
            }
            pass_began = now;
            empty_passes = empty_passes.saturating_add(1);
            let idle = now.since(*idle_since.get_or_insert(now));
            spin_since.get_or_insert(now);
            if empty_passes > eager_passes {
                std::hint::spin_loop();
            }
            let rests = self.rests();
            let patience = match rests {
                ThrottledQueues::None => spin_time.ticks(),
                ThrottledQueues::Some => spin_time.shortest(),
                ThrottledQueues::All => 0,
            };
            // A poller that follows a vCPU must check the vCPU's processors.
            let has_nothing =
                self.has_no_queues() && self.has_no_watches() && self.beside.is_none();
            // A separated function's poller must not occupy a processor permanently.
            let spin = match self.is_apart {
                true if spin == PollerIdleMode::Busy => PollerIdleMode::Adaptive,
                _ => spin,
            };
            let parks = has_nothing
                || spin
                    .patience(patience)
                    .is_some_and(|patience| idle >= patience || self.has_no_queues());
            let leaves = courtesy.is_due(now, idle);
            if !(parks || leaves) || self.until_due(now).is_some_and(|ticks| ticks <= due_soon) {
                continue;
            }
            spin_since = None;
            if parks {
                let (found_work, slept) = self.park(idle, early, looks);
                // The timer ends a rest, however long the poller spins before it.
                if rests == ThrottledQueues::None {
                    spin_time.slept(slept, found_work);
                }
                pass_began = Ticks::now();
                // Doorbells that are checked periodically stay idle until they move.
                if found_work || !self.is_timed() {
                    idle_since = None;
                }
            } else {
                let half = Duration::from_nanos(nvme_mpt_memory::clock::nanoseconds(idle) / 2);
                self.sleeper.sleep(Some(half.clamp(REST_MIN, REST_MAX)));
                pass_began = Ticks::now();
            }
        }
    }

    fn has_no_queues(&self) -> bool {
        self.polled.queues().next().is_none()
    }

    fn has_no_watches(&self) -> bool {
        self.polled.watches().next().is_none()
    }

    /// Runs every queue once, or the queues whose turn it is. Returns whether any queue had work or was skipped. `began` is the
    /// current time.
    #[inline]
    fn pass(&mut self, began: Ticks) -> bool {
        if !self.is_plain {
            return self.measured_pass(false);
        }
        if self.polled.functions.is_empty() {
            return false;
        }
        self.turn(0, began, |FunctionQueues { queues, watches }| {
            let mut worked = false;
            for queue in queues {
                worked |= queue.poll();
            }
            for watch in watches {
                worked |= watch.look();
            }
            worked
        })
    }

    /// Runs the queues whose turn it is, or `all` once. Adds each queue's ticks to the queue's bill, and hands over leaving
    /// queues. Returns whether any queue had work or was skipped.
    #[inline(never)]
    fn measured_pass(&mut self, all: bool) -> bool {
        let mut worked = false;
        let mut began = Ticks::now();
        let quantum = self.quantum;
        let mut index = 0;
        while let Some(function) = self.polled.functions.get(index) {
            let mut turns = function.turns;
            let turns_of = &mut turns;
            (worked, began) = self.turn(index, began, move |FunctionQueues { queues, watches }| {
                let (mut worked, mut last) = (worked, began);
                let mut taken = || {
                    let now = Ticks::now();
                    now.since(std::mem::replace(&mut last, now))
                };
                let count = queues.len();
                let mut poll = |index: usize| {
                    let Some(queue) = queues.get_mut(index) else {
                        return 0;
                    };
                    worked |= queue.poll();
                    let ticks = taken();
                    queue.bill_mut().add(ticks);
                    ticks
                };
                let left_out = if all {
                    for index in 0..count {
                        poll(index);
                    }
                    false
                } else {
                    turns_of.turn(quantum, count, poll)
                };
                worked |= left_out;
                for watch in watches {
                    worked |= watch.look();
                    watch.bill.add(taken());
                }
                (worked, last)
            });
            if let Some(function) = self.polled.functions.get_mut(index) {
                function.turns = turns;
            }
            index += 1;
        }
        if !self.polled.leaving.is_empty() {
            self.hand_back();
        }
        worked
    }

    /// Calls a closure with the queues and watches of each function, in that function's turn. Returns whether any call returned
    /// `true`.
    fn each(&mut self, mut work: impl FnMut(&mut FunctionQueues) -> bool) -> bool {
        let (mut index, mut any) = (0, false);
        while index < self.polled.functions.len() {
            any |= self.turn(index, Ticks::now(), &mut work);
            index += 1;
        }
        any
    }

    /// Charges the thread's time since the last settlement to the functions that it was spent on. Time without a queue or watch
    /// is not charged.
    #[cold]
    fn settle(&mut self) {
        let time = thread_time();
        let spent = time.saturating_sub(std::mem::replace(&mut self.settled, time));
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let nanoseconds = nanoseconds.wrapping_add(self.beside_nanoseconds);
        self.shared
            .processor_nanoseconds
            .store(nanoseconds, Ordering::Relaxed);
        let settlement = ProcessorTimeDivision::new(spent, self.bills());
        for PolledFunction { members, .. } in &mut self.polled.functions {
            let queues = members.queues.iter_mut().map(|queue| queue.bill_mut());
            let watches = members.watches.iter_mut().map(|watch| &mut watch.bill);
            queues
                .chain(watches)
                .for_each(|bill| settlement.settle(bill));
        }
    }

    fn bills(&self) -> impl Iterator<Item = &ProcessorTimeCharge> {
        let queues = self.polled.queues().map(ShadowQueue::bill);
        queues.chain(self.polled.watches().map(|watch| &watch.bill))
    }

    /// Updates derived state after a change of the queues and watches.
    fn follow_change(&mut self) {
        let functions = &mut self.polled.functions;
        functions.retain(|PolledFunction { members, .. }| {
            !(members.queues.is_empty() && members.watches.is_empty())
        });
        let is_of_one = functions.len() <= 1;
        self.is_plain = is_of_one && self.polled.leaving.is_empty();
        for queue in self.polled.queues_mut() {
            queue.share_poller(!is_of_one);
        }
        self.polled
            .apart
            .retain(|apart| apart.function.strong_count() > 0);
    }

    /// Sleeps until there is work, or until `early` ticks before a command is due. Returns whether there was work afterwards,
    /// and the ticks slept.
    fn park(&mut self, idle: u64, early: Duration, looks: PollInterval) -> (bool, u64) {
        self.each(|members| {
            for queue in &mut members.queues {
                queue.arm();
            }
            false
        });
        let waker = self.shared.waker.clone();
        waker.announce();
        // Between arming and the second check: see `Silence`.
        let timed = self.is_timed();
        let mut found = self.shared.has_mail.load(Ordering::Acquire);
        found |= self.each(|FunctionQueues { queues, watches }| {
            let mut found = false;
            for queue in queues {
                found |= queue.look_again();
            }
            found | watches.iter_mut().any(DoorbellWatch::look)
        });
        if !Arc::ptr_eq(&waker, &self.shared.waker) {
            // The waker belongs to another thread now.
            return (true, 0);
        }
        let began = Ticks::now();
        self.shared.asleep_since.store(began.0, Ordering::Relaxed);
        let mut timeout = None;
        if !found {
            let silent = timed.then(|| {
                let idle = Duration::from_nanos(nvme_mpt_memory::clock::nanoseconds(idle));
                if self.polled.queues().any(ShadowQueue::has_silent_work) {
                    PollInterval::at_work(idle)
                } else {
                    looks.at_doorbells(idle)
                }
            });
            // A spinning poller spins for the remaining time, so that the command completes on time.
            let due = self.until_due(began).map(|ticks| {
                let until = Duration::from_nanos(nvme_mpt_memory::clock::nanoseconds(ticks));
                until.saturating_sub(early).max(Duration::from_micros(1))
            });
            let rest = self.polled.queues().filter_map(ShadowQueue::rests_until);
            let rest = rest.min().map(|end| {
                Duration::from_nanos(nvme_mpt_memory::clock::nanoseconds(end.since(began)))
                    .max(Duration::from_micros(1))
            });
            timeout = [silent, due, rest].into_iter().flatten().min();
            self.shared.parks.fetch_add(1, Ordering::Relaxed);
            self.sleeper.sleep(timeout);
        }
        waker.withdraw();
        let slept = Ticks::now().since(began);
        self.shared.asleep_since.store(0, Ordering::Relaxed);
        add(&self.shared.parked_ticks, slept);
        if !found {
            found = self.pass(Ticks::now()) || self.shared.has_mail.load(Ordering::Acquire);
            if !found && timeout.is_none() {
                self.shared.spurious_wakes.fetch_add(1, Ordering::Relaxed);
            }
        }
        (found, slept)
    }

    /// Returns whether queues wait for the limits of their leases.
    fn rests(&self) -> ThrottledQueues {
        let rests = self.polled.queues().filter_map(ShadowQueue::rests_until);
        match rests.count() {
            0 => ThrottledQueues::None,
            count if count == self.polled.queues().count() && self.has_no_watches() => {
                ThrottledQueues::All
            }
            _ => ThrottledQueues::Some,
        }
    }

    /// Returns the ticks until the first timed event of a queue, if there is any.
    fn until_due(&self, now: Ticks) -> Option<u64> {
        let due = self.polled.queues().filter_map(ShadowQueue::next_due);
        due.min().map(|due| due.since(now))
    }

    /// Returns whether a doorbell here is only stored to, so that no store wakes the poller.
    fn is_timed(&self) -> bool {
        !self.has_no_watches()
            || (self.is_apart && !self.has_no_queues())
            || self.polled.queues().any(ShadowQueue::is_silent)
    }

    #[cold]
    fn read_mail(&mut self) {
        // Leaving queues are charged up to now, and new queues from now on.
        self.settle();
        self.shared.has_mail.store(false, Ordering::Relaxed);
        let mail = {
            let mut mail = self
                .shared
                .mail
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut *mail)
        };
        let mut answers = Vec::new();
        for mail in mail {
            match mail {
                PollerRequest::Add(queue) => match self.polled.apart(queue.bill()) {
                    Some(apart) => {
                        self.shared.queues.fetch_sub(1, Ordering::Relaxed);
                        apart.poller.add(queue);
                    }
                    None => self.take_in(queue),
                },
                PollerRequest::Remove(id, departure, requester) => match self.polled.queue(id) {
                    Some(queue) => {
                        queue.stop();
                        if departure == QueueRemovalMode::Ends {
                            queue.cut_short();
                        }
                        // An earlier requester has stopped waiting.
                        self.polled.leaving.retain(|(other, _)| *other != id);
                        self.polled.leaving.push((id, requester));
                    }
                    None => {
                        for IsolatedFunction { poller, .. } in &self.polled.apart {
                            poller.send(PollerRequest::Remove(id, departure, requester.clone()));
                        }
                    }
                },
                PollerRequest::CutShort(id) => match self.polled.queue(id) {
                    Some(queue) => queue.cut_short(),
                    None => self
                        .polled
                        .apart
                        .iter()
                        .for_each(|apart| apart.poller.cut_short(id)),
                },
                PollerRequest::Stay(id) => {
                    match self.polled.queue(id) {
                        Some(queue) => queue.resume(),
                        None => self
                            .polled
                            .apart
                            .iter()
                            .for_each(|apart| apart.poller.stay(id)),
                    }
                    self.polled.leaving.retain(|(other, _)| *other != id);
                }
                PollerRequest::Watch(watch) => match self.polled.apart(&watch.bill) {
                    Some(apart) => apart.poller.watch(watch),
                    None => self
                        .polled
                        .function(&watch.bill)
                        .members
                        .watches
                        .push(watch),
                },
                PollerRequest::Unwatch(id) => {
                    for function in &mut self.polled.functions {
                        function.members.watches.retain(|watch| watch.id != id);
                    }
                    for apart in &self.polled.apart {
                        apart.poller.unwatch(id);
                    }
                }
                PollerRequest::AfterPass(answer) => answers.push(answer),
                PollerRequest::Stop => self.stop = true,
            }
        }
        self.follow_change();
        if !answers.is_empty() {
            self.measured_pass(true);
        }
        for answer in answers {
            // The requester may have stopped waiting.
            let _ = answer.send(());
        }
    }

    #[cold]
    fn hand_back(&mut self) {
        let goes = |queue: &ShadowQueue| {
            let mut leaving = self.polled.leaving.iter();
            queue.is_drained() && leaving.any(|(id, _)| *id == queue.id())
        };
        if self.polled.queues().any(goes) {
            self.settle();
        }
        let Self {
            polled: PolledFunctions {
                functions, leaving, ..
            },
            sleeper,
            shared,
            ..
        } = self;
        let mut abandoned = Vec::new();
        leaving.retain(|(id, requester)| {
            let found = functions.iter_mut().find_map(|function| {
                let queues = &function.members.queues;
                let index = queues.iter().position(|queue| queue.id() == *id)?;
                Some((function, index))
            });
            let Some((function, index)) = found else {
                return false;
            };
            if !function.members.queues[index].is_drained() {
                return true;
            }
            if requester.is_decided.swap(true, Ordering::AcqRel) {
                // The queue stays. The mail that says so will arrive.
                function.members.queues[index].resume();
                return false;
            }
            let queue = function.members.queues.swap_remove(index);
            function.ids.retain(|(other, _)| other != id);
            shared.queues.fetch_sub(1, Ordering::Relaxed);
            if let Some(fd) = queue.wait_fd() {
                sleeper.unwatch(fd);
            }
            if let Err(SendError(queue)) = requester.reply.send(queue) {
                abandoned.push(queue);
            }
            false
        });
        end_apart(&shared.threads, abandoned);
        self.follow_change();
    }
}

/// Drops queues whose requesters are gone, on a separate thread, because the drop may wait for the drive and the ledger.
#[expect(clippy::vec_box, reason = "queues move between threads and are large")]
fn end_apart(threads: &ThreadSpawner, queues: Vec<Box<ShadowQueue>>) {
    if queues.is_empty() {
        return;
    }
    // Without a thread, they are dropped here, and a failure to start is logged.
    let _ = threads.spawn("queue-end", Box::new(move || drop(queues)));
}

/// Adds to a counter that only this thread writes.
fn add(counter: &AtomicU64, by: u64) {
    counter.store(
        counter.load(Ordering::Relaxed).wrapping_add(by),
        Ordering::Relaxed,
    );
}

/// Sleep of a parked poller.
pub(super) struct PollerSleep {
    timer: TimerFd,
    bell: RawFd,
    waker: Arc<PollerWaker>,
}

impl PollerSleep {
    fn new(waker: &Arc<PollerWaker>) -> io::Result<Self> {
        let sleeper = Self {
            timer: TimerFd::new()?,
            bell: waker.eventfd().as_raw_fd(),
            waker: waker.clone(),
        };
        sleeper.control(ControlOperation::Add, sleeper.timer.as_raw_fd())?;
        Ok(sleeper)
    }

    fn control(&self, operation: ControlOperation, fd: RawFd) -> io::Result<()> {
        self.waker
            .epoll()
            .ctl(operation, fd, EpollEvent::new(EventSet::IN, fd as u64))
    }

    fn watch(&self, fd: RawFd) {
        if let Err(error) = self.control(ControlOperation::Add, fd) {
            // Completions are then found only when the poller is awake for another reason.
            error!("A host queue's completions cannot wake its poller: {error}");
        }
    }

    fn unwatch(&self, fd: RawFd) {
        // A closed descriptor has already left the epoll set.
        let _ = self.control(ControlOperation::Delete, fd);
    }

    fn sleep(&mut self, timeout: Option<Duration>) {
        // A long sleep needs no precise end, so it saves the system calls for a timer. A simulator's clock is always precise.
        let needs_timer = |timeout: &Duration| *timeout <= EXACT_MAX && !cfg!(simulation);
        let exact = timeout.filter(needs_timer);
        if let Some(timeout) = exact
            && let Err(error) = self.timer.reset(timeout, None)
        {
            warn!("A poller cannot set its timer: {error}");
            return;
        }
        let mut events = [EpollEvent::default(); 8];
        let rest = timeout.filter(|_| exact.is_none());
        // An interrupted sleep counts as a short one: the poller checks for work and sleeps again.
        let ready = eventfd::wait(self.waker.epoll(), rest, &mut events).unwrap_or(0);
        if events[..ready].iter().any(|event| event.fd() == self.bell) {
            // An empty eventfd is no error: the signal may belong to the previous sleep.
            let _ = self.waker.eventfd().read();
        }
        if exact.is_some() {
            let _ = self.timer.clear();
        }
    }
}

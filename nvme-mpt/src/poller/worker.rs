//! Thread of a poller. It polls without a pause while there is work, then spins for a limited time, then parks.
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
use nvme_guest::adaptive::{
    AdaptivePolicies, PollInterval, PreemptionBackoff, SpinTime, ThreadProcessorUse,
};
use nvme_guest::event::EventQueue;
use nvme_guest::park::PollerWaker;
use nvme_guest::stats::PollerStats;
use nvme_guest::threads::ThreadSpawner;
use nvme_mpt_memory::clock::{TickRate, Ticks};
use nvme_mpt_memory::processors::{ThreadId, current_processors, is_virtual_machine, set_affinity};
use nvme_mpt_memory::sync::mpsc::{Receiver, SendError, SyncSender, sync_channel};
use nvme_mpt_memory::sync::{JoinHandle, Mutex};
use nvme_mpt_memory::system::{thread_preemptions, thread_time};
use nvme_mpt_memory::{MappedWord32, eventfd};
use vmm_sys_util::epoll::{ControlOperation, EpollEvent, EventSet};
use vmm_sys_util::timerfd::TimerFd;

use super::affinity::ThreadPinning;
use super::arbitration::{FunctionArbitration, FunctionQuantum};
use super::locality::{PollerLocality, VcpuAffinity};
use super::policy::PollerIdleMode;
use super::takeover_slot::{TakeoverSlot as SeatOf, is_blocked};
use crate::processor_time::{self, ProcessorTime, ProcessorTimeCharge, ProcessorTimeDivision};
use crate::shadow::ShadowQueue;

/// Ticket that a thread finds in its takeover slot if its turn blocked and another thread has taken all other functions: the
/// new poller with which the first thread runs the blocking function from now on.
pub(super) struct TakeoverTicket {
    pub(super) shared: Arc<PollerState>,
    pub(super) sleeper: PollerSleep,
}

/// Takeover slot of a poller's thread, from which another thread takes functions if a turn blocks.
type PollerTakeoverSlot = SeatOf<PolledFunctions, TakeoverTicket>;

/// Number of consecutive passes without work that are made without a PAUSE instruction. A guest with one command in flight
/// sends its next command during these passes, and a PAUSE would add to the latency.
///
/// A PAUSE leaves the core to its other hardware threads. A poller in a virtual machine never executes it: the hypervisor may
/// intercept PAUSE (AMD64 APM, volume 2, section 15.14.4). QEMU's emulator takes its global lock at each PAUSE.
const EAGER_PASSES: u32 = 64;

/// Maximum sleep that a timer ends precisely. Longer sleeps end with the precision of epoll, a millisecond.
const PRECISE_SLEEP_MAX: Duration = Duration::from_millis(20);

/// Limits of the sleeps of a poller that backs off. Such a poller sleeps instead of spinning, because other threads need its
/// processor.
const BACKOFF_SLEEP_MIN: Duration = Duration::from_micros(5);
const BACKOFF_SLEEP_MAX: Duration = Duration::from_micros(50);

/// Pause between two checks of a long turn: first that it exceeds its limit, then whether its thread is blocked. The first
/// check holds the lock of the thread's slot. A thread that waits only for that lock continues during the pause.
const BLOCK_CHECK_DELAY: Duration = Duration::from_micros(500);

/// Watch of the doorbells of an admin queue that the guest writes without an exit. The poller sees changes of them, and wakes
/// the thread that handles admin commands.
#[derive(Debug)]
pub(crate) struct DoorbellWatch {
    pub(crate) id: u64,
    pub(crate) doorbells: [MappedWord32; 2],
    pub(crate) last_values: [u32; 2],
    pub(crate) events: Arc<EventQueue>,
    /// Processor time that pollers spend on the watch.
    pub(crate) cpu_charge: ProcessorTimeCharge,
}

impl DoorbellWatch {
    fn check_doorbells(&mut self) -> bool {
        let now = [self.doorbells[0].load(), self.doorbells[1].load()];
        let changed = now != self.last_values;
        if changed {
            self.last_values = now;
            self.events.signal();
        }
        changed
    }
}

/// Treatment of the commands of a queue that leaves its poller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueRemovalMode {
    /// In-flight commands complete.
    Drain,
    /// In-flight commands end after their current step.
    CutShort,
}

/// Requester's end of the hand-over of a shadow queue: receives the queue from its poller.
#[derive(Debug)]
pub(crate) struct QueueRemoval {
    queue: Receiver<Box<ShadowQueue>>,
    is_decided: Arc<AtomicBool>,
}

impl QueueRemoval {
    /// Completes a cancellation, after [`Poller::cancel_removal`] was called: the queue stays with its poller. Returns the queue
    /// if it has already left.
    ///
    /// Does not wait for the poller's next pass, because another function may be blocking the poller in the kernel.
    pub(crate) fn cancel(self) -> Option<Box<ShadowQueue>> {
        match self.is_decided.swap(true, Ordering::AcqRel) {
            false => None,
            // The poller has sent the queue, or is about to send it.
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

/// Poller's end of the hand-over of a shadow queue to a requester.
#[derive(Clone)]
struct QueueRemovalReply {
    reply: SyncSender<Box<ShadowQueue>>,
    /// Set by the poller when it sends the queue, or by the requester when it cancels the hand-over. The one that sets it first
    /// decides.
    is_decided: Arc<AtomicBool>,
}

enum PollerRequest {
    Add(Box<ShadowQueue>),
    Remove(u64, QueueRemovalMode, QueueRemovalReply),
    /// Cuts the commands of a queue short that is being removed, because the queue is now going to be deleted.
    CutShort(u64),
    /// Cancels the removal of a queue. The requester also calls [`QueueRemoval::cancel`], which returns the queue if the queue
    /// has already left.
    CancelRemoval(u64),
    Watch(DoorbellWatch),
    Unwatch(u64),
    /// Requests an answer after the poller's next pass over all queues.
    AfterPass(SyncSender<()>),
    Stop,
}

/// State of a poller that other threads can see.
pub(super) struct PollerState {
    name: String,
    cpu: Option<usize>,
    waker: Arc<PollerWaker>,
    mailbox: Mutex<Vec<PollerRequest>>,
    has_mail: AtomicBool,
    queue_count: AtomicUsize,
    busy_ticks: AtomicU64,
    parked_ticks: AtomicU64,
    /// Processor time of the thread when it was last charged to functions.
    processor_nanoseconds: AtomicU64,
    /// Time at which the thread fell asleep, in ticks; 0 while it is awake.
    asleep_since: AtomicU64,
    parks: AtomicU64,
    spurious_wakes: AtomicU64,
    started: Ticks,
    idle_mode: PollerIdleMode,
    adaptive: AdaptivePolicies,
    threads: ThreadSpawner,
    /// Takeover slot of the thread that runs the poller at present.
    takeover_slot: Mutex<Arc<PollerTakeoverSlot>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Processors on which a poller's thread may run.
pub(super) enum ThreadPlacement {
    /// Chosen by the kernel.
    Anywhere,
    /// The given processor.
    Processor(usize),
    /// Processors near a vCPU.
    NearVcpu(PollerLocality),
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
        placement: ThreadPlacement,
        spin: PollerIdleMode,
        policies: AdaptivePolicies,
        threads: &ThreadSpawner,
    ) -> io::Result<Self> {
        let cpu = match placement {
            ThreadPlacement::Processor(cpu) => Some(cpu),
            ThreadPlacement::Anywhere | ThreadPlacement::NearVcpu(_) => None,
        };
        let shared = PollerState::new(name, cpu, spin, policies, threads)?;
        let mut worker = PollerThread::new(&shared)?;
        let work = Box::new(move || {
            if let ThreadPlacement::NearVcpu(neighbours) = placement {
                worker.vcpu_affinity = VcpuAffinity::start(neighbours, &worker.shared.name);
            }
            worker.run();
        });
        let thread = threads.spawn(name, work)?;
        *shared.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(Self { shared })
    }

    /// Lets the watchdog thread see the turns of the poller, so that it finds a function that blocks the poller's thread.
    pub(super) fn enable_watch(&self) {
        self.shared.takeover_slot().enable_watch();
    }

    /// Returns whether the poller's thread is awake.
    pub(super) fn is_awake(&self) -> bool {
        self.shared.asleep_since.load(Ordering::Relaxed) == 0
    }

    /// If a function's turn has blocked the thread for at least `limit` ticks, moves all other functions and the mailbox to a
    /// new thread. The blocking function keeps the old thread, which the returned poller represents.
    ///
    /// # Errors
    /// The kernel's error. Nothing has changed after an error.
    pub(super) fn take_over_if_blocked(
        &self,
        limit: u64,
        number: usize,
        threads: &ThreadSpawner,
    ) -> io::Result<Option<Arc<Self>>> {
        let shared = &self.shared;
        let takeover = shared.takeover_slot();
        let Some((began, thread)) =
            takeover.current_turn(|polled, index| shared.has_other_functions(polled, index))
        else {
            return Ok(None);
        };
        if Ticks::now().since(began) < limit {
            return Ok(None);
        }
        // The thread may have waited only for the lock of its slot, which this check held.
        nvme_mpt_memory::clock::sleep(BLOCK_CHECK_DELAY);
        if !is_blocked(thread) {
            return Ok(None);
        }
        // All steps that can fail come first. If the functions do not move after all, the new thread ends immediately.
        let (sender, receiver) = sync_channel::<PolledFunctions>(1);
        let mut worker = PollerThread::new(shared)?;
        worker.takeover_slot = Arc::default();
        worker.takeover_slot.enable_watch();
        let next = worker.takeover_slot.clone();
        let work = Box::new(move || {
            if let Ok(polled) = receiver.recv() {
                worker.take_over(polled);
                worker.run();
            }
        });
        let apart = PollerState::new(
            &format!("poll-apart-{number}"),
            None,
            shared.idle_mode,
            shared.adaptive,
            threads,
        )?;
        let ticket = TakeoverTicket {
            sleeper: PollerSleep::new(&apart.waker)?,
            shared: apart.clone(),
        };
        let thread = threads.spawn(&shared.name, work)?;
        let Some((mut polled, index)) = takeover.take_over(began, ticket) else {
            return Ok(None);
        };
        *shared
            .takeover_slot
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = next;
        *shared.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        let function = polled.functions.remove(index);
        let queues = function.ids.len();
        shared.queue_count.fetch_sub(queues, Ordering::Relaxed);
        apart.queue_count.fetch_add(queues, Ordering::Relaxed);
        for fd in function.ids.iter().filter_map(|(_, fd)| *fd) {
            let _ = shared
                .waker
                .epoll()
                .ctl(ControlOperation::Delete, fd, EpollEvent::default());
        }
        let poller = Arc::new(Self { shared: apart });
        let is_its = |id: u64| function.ids.iter().any(|(own, _)| *own == id);
        let (its, others) = std::mem::take(&mut polled.pending_removals)
            .into_iter()
            .partition(|(id, _)| is_its(*id));
        polled.pending_removals = others;
        for (id, requester) in its {
            poller.send(PollerRequest::Remove(
                id,
                QueueRemovalMode::Drain,
                requester,
            ));
        }
        polled.isolated.push(IsolatedFunction {
            function: Arc::downgrade(&function.function),
            poller: poller.clone(),
        });
        // The new thread waits for these functions.
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

    /// Returns the processor that the poller is pinned to; `None` if it is not pinned.
    pub(crate) fn cpu(&self) -> Option<usize> {
        self.shared.cpu
    }

    /// Returns the number of shadow queues that the poller runs.
    pub(crate) fn queue_count(&self) -> usize {
        self.shared.queue_count.load(Ordering::Relaxed)
    }

    /// Adds a shadow queue to run.
    pub(crate) fn add(&self, queue: Box<ShadowQueue>) {
        self.shared.queue_count.fetch_add(1, Ordering::Relaxed);
        self.send(PollerRequest::Add(queue));
    }

    /// Starts the removal of a shadow queue. The queue takes no new commands from now on. It is handed over once none of its
    /// commands is in flight at the host controller.
    pub(crate) fn remove(&self, id: u64) -> QueueRemoval {
        self.request_removal(id, QueueRemovalMode::Drain)
    }

    /// Starts the removal of a queue as [`Self::remove`] does, and cuts its commands short, because the queue is deleted.
    pub(crate) fn delete(&self, id: u64) -> QueueRemoval {
        self.request_removal(id, QueueRemovalMode::CutShort)
    }

    fn request_removal(&self, id: u64, mode: QueueRemovalMode) -> QueueRemoval {
        let (reply, queue) = sync_channel(1);
        let is_decided = Arc::new(AtomicBool::new(false));
        let requester = QueueRemovalReply {
            reply,
            is_decided: is_decided.clone(),
        };
        self.send(PollerRequest::Remove(id, mode, requester));
        QueueRemoval { queue, is_decided }
    }

    /// Cuts the commands of a queue short that is being removed, as [`Self::delete`] does.
    pub(crate) fn cut_short(&self, id: u64) {
        self.send(PollerRequest::CutShort(id));
    }

    /// Cancels the removal of a queue. The caller then calls [`QueueRemoval::cancel`], which returns the queue if the queue has
    /// already left.
    pub(crate) fn cancel_removal(&self, id: u64) {
        self.send(PollerRequest::CancelRemoval(id));
    }

    /// Starts to watch doorbells.
    pub(crate) fn watch_doorbells(&self, watch: DoorbellWatch) {
        self.send(PollerRequest::Watch(watch));
    }

    pub(crate) fn unwatch_doorbells(&self, id: u64) {
        self.send(PollerRequest::Unwatch(id));
    }

    /// Requests a pass over all queues and requests that the poller has been given so far. The answer arrives after the pass.
    pub(super) fn request_pass(&self) -> Receiver<()> {
        let (sender, receiver) = sync_channel(1);
        self.send(PollerRequest::AfterPass(sender));
        receiver
    }

    fn send(&self, mail: PollerRequest) {
        self.shared
            .mailbox
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
        let seconds = |ticks: u64| nvme_mpt_memory::clock::ticks_to_nanoseconds(ticks) as f64 / 1e9;
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
            queues: self.queue_count(),
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

/// Share of a poller's queues that take no commands at present, because the rate limits of their leases are used up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ThrottledQueues {
    None,
    Some,
    All,
}

/// Queues and watched doorbells of a function.
#[derive(Default)]
struct FunctionQueues {
    #[expect(clippy::vec_box, reason = "queues move between threads and are large")]
    queues: Vec<Box<ShadowQueue>>,
    watches: Vec<DoorbellWatch>,
}

/// Function that a poller runs.
struct PolledFunction {
    function: Arc<ProcessorTime>,
    arbitration: FunctionArbitration,
    /// Queues and watches of the function; empty while the function has its turn.
    queues: FunctionQueues,
    /// Identifiers of the function's queues. Each has the descriptor that wakes a sleeping poller when the drive completes
    /// commands of the queue, if there is one.
    ids: Vec<(u64, Option<RawFd>)>,
}

/// Function that once blocked the poller's other functions, and now has its own poller.
struct IsolatedFunction {
    /// The reference is weak, because several pollers may list the function, and strong references would keep the function
    /// alive after its end.
    function: Weak<ProcessorTime>,
    poller: Arc<Poller>,
}

/// All functions of a poller. Another thread may take them over while a function has its turn.
#[derive(Default)]
pub(super) struct PolledFunctions {
    functions: Vec<PolledFunction>,
    /// Queues of the poller that a requester wants, with the requesters' ends. Each is handed over once none of its commands is
    /// in flight.
    pending_removals: Vec<(u64, QueueRemovalReply)>,
    isolated: Vec<IsolatedFunction>,
}

impl PolledFunctions {
    fn queues(&self) -> impl Iterator<Item = &ShadowQueue> {
        let functions = self.functions.iter();
        functions.flat_map(|function| function.queues.queues.iter().map(Box::as_ref))
    }

    fn queues_mut(&mut self) -> impl Iterator<Item = &mut ShadowQueue> {
        let functions = self.functions.iter_mut();
        functions.flat_map(|function| function.queues.queues.iter_mut().map(Box::as_mut))
    }

    fn queue(&mut self, id: u64) -> Option<&mut ShadowQueue> {
        self.queues_mut().find(|queue| queue.id() == id)
    }

    fn watches(&self) -> impl Iterator<Item = &DoorbellWatch> {
        self.functions
            .iter()
            .flat_map(|function| function.queues.watches.iter())
    }

    /// Returns the function that owns a charge. Adds the function if the poller does not have it yet.
    fn get_or_add_function(&mut self, charge: &ProcessorTimeCharge) -> &mut PolledFunction {
        let own = charge.function();
        let at = self
            .functions
            .iter()
            .position(|function| Arc::ptr_eq(&function.function, own));
        let at = at.unwrap_or_else(|| {
            self.functions.push(PolledFunction {
                function: own.clone(),
                arbitration: FunctionArbitration::default(),
                queues: FunctionQueues::default(),
                ids: Vec::new(),
            });
            self.functions.len() - 1
        });
        &mut self.functions[at]
    }

    /// Returns the function that owns a charge, if the function has its own poller because it blocked others.
    fn isolated_function(&mut self, charge: &ProcessorTimeCharge) -> Option<&mut IsolatedFunction> {
        let own = charge.function();
        self.isolated
            .iter_mut()
            .find(|apart| apart.function.as_ptr() == Arc::as_ptr(own))
    }
}

struct PollerThread {
    shared: Arc<PollerState>,
    takeover_slot: Arc<PollerTakeoverSlot>,
    sleeper: PollerSleep,
    polled: PolledFunctions,
    quantum: FunctionQuantum,
    should_stop: bool,
    /// True if all queues and watches belong to one function, which is charged all of the time, and no queue is being removed.
    has_single_function: bool,
    /// True if the thread runs only a function that has blocked others. Wakers that were given out before wake the thread with
    /// the other functions, not this one.
    is_isolated: bool,
    /// CPU time of the thread that is already charged to functions.
    charged_time: Duration,
    /// Nanoseconds to add to this thread's CPU time to get the poller's, because a poller may continue on another thread.
    offset_nanoseconds: u64,
    /// Placement of the thread beside a vCPU, if the polling policy says so.
    vcpu_affinity: Option<VcpuAffinity>,
}

impl PollerState {
    fn new(
        name: &str,
        cpu: Option<usize>,
        spin: PollerIdleMode,
        policies: AdaptivePolicies,
        threads: &ThreadSpawner,
    ) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            name: name.to_owned(),
            cpu,
            waker: PollerWaker::new()?,
            mailbox: Mutex::default(),
            has_mail: AtomicBool::new(false),
            queue_count: AtomicUsize::new(0),
            busy_ticks: AtomicU64::new(0),
            parked_ticks: AtomicU64::new(0),
            processor_nanoseconds: AtomicU64::new(0),
            asleep_since: AtomicU64::new(0),
            parks: AtomicU64::new(0),
            spurious_wakes: AtomicU64::new(0),
            started: Ticks::now(),
            idle_mode: spin,
            adaptive: policies,
            threads: threads.clone(),
            takeover_slot: Mutex::default(),
            thread: Mutex::default(),
        }))
    }

    fn takeover_slot(&self) -> Arc<PollerTakeoverSlot> {
        self.takeover_slot
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Returns whether the poller has other functions than the one at `index`, or a request to add one.
    fn has_other_functions(&self, polled: &PolledFunctions, index: usize) -> bool {
        let function = polled.functions.get(index);
        let is_other = |charge: &ProcessorTimeCharge| {
            function.is_none_or(|function| !Arc::ptr_eq(&function.function, charge.function()))
        };
        polled.functions.len() > 1
            || self.has_mail.load(Ordering::Acquire)
                && self
                    .mailbox
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .iter()
                    .any(|mail| match mail {
                        PollerRequest::Add(queue) => is_other(queue.cpu_charge()),
                        PollerRequest::Watch(watch) => is_other(&watch.cpu_charge),
                        _ => false,
                    })
    }
}

impl PollerThread {
    fn new(shared: &Arc<PollerState>) -> io::Result<Self> {
        Ok(Self {
            shared: shared.clone(),
            takeover_slot: shared.takeover_slot(),
            sleeper: PollerSleep::new(&shared.waker)?,
            polled: PolledFunctions::default(),
            quantum: FunctionQuantum::new(TickRate::measured()),
            should_stop: false,
            has_single_function: true,
            is_isolated: false,
            charged_time: Duration::ZERO,
            offset_nanoseconds: 0,
            vcpu_affinity: None,
        })
    }

    /// Continues, on this new thread, with the poller's functions, because the poller's previous thread is blocked.
    fn take_over(&mut self, polled: PolledFunctions) {
        self.offset_nanoseconds = self.shared.processor_nanoseconds.load(Ordering::Relaxed);
        self.polled = polled;
        self.shared.waker.end_park();
        self.on_queues_changed();
    }

    /// Gives a function its turn, which starts at `began`: calls `work` with its queues. If another thread takes the other
    /// functions during the turn, this thread runs only the function in turn from then on.
    #[inline]
    fn run_turn<R>(
        &mut self,
        index: usize,
        began: Ticks,
        work: impl FnOnce(&mut FunctionQueues) -> R,
    ) -> R {
        let mut function_queues = std::mem::take(&mut self.polled.functions[index].queues);
        if !self.takeover_slot.is_watched() {
            let result = work(&mut function_queues);
            self.polled.functions[index].queues = function_queues;
            return result;
        }
        let polled = std::mem::take(&mut self.polled);
        self.takeover_slot.begin_turn(polled, index, began);
        let result = work(&mut function_queues);
        match self.takeover_slot.end_turn() {
            Ok(polled) => {
                self.polled = polled;
                self.polled.functions[index].queues = function_queues;
            }
            Err(ticket) => self.continue_isolated(ticket, function_queues, began),
        }
        result
    }

    /// Makes the new poller of the ticket run on this thread, with only the function in turn, after another thread has taken
    /// the others.
    #[cold]
    fn continue_isolated(
        &mut self,
        ticket: Option<TakeoverTicket>,
        function_queues: FunctionQueues,
        began: Ticks,
    ) {
        let Some(TakeoverTicket { shared, sleeper }) = ticket else {
            // A thread that takes functions always leaves a ticket.
            error!("Poller {} lost its place", self.shared.name);
            return;
        };
        let held =
            nvme_mpt_memory::clock::ticks_to_nanoseconds(Ticks::now().since(began)) / 1_000_000;
        warn!(
            "A function blocked poller {} for {held} ms, by slow memory, storage or a descriptor: it has a poller of \
             its own from now on, {}",
            self.shared.name, shared.name
        );
        self.takeover_slot = shared.takeover_slot();
        self.shared = shared;
        self.sleeper = sleeper;
        self.is_isolated = true;
        let time = u64::try_from(thread_time().as_nanos()).unwrap_or(u64::MAX);
        self.offset_nanoseconds = 0_u64.wrapping_sub(time);
        self.charged_time = thread_time();
        let FunctionQueues { queues, watches } = function_queues;
        for queue in queues {
            self.add_queue(queue);
        }
        for watch in watches {
            self.polled
                .get_or_add_function(&watch.cpu_charge)
                .queues
                .watches
                .push(watch);
        }
        self.on_queues_changed();
    }

    /// Adds a queue and watches its completion descriptor.
    fn add_queue(&mut self, queue: Box<ShadowQueue>) {
        let fd = queue.wait_fd();
        if let Some(fd) = fd {
            self.sleeper.watch_fd(fd);
        }
        let function = self.polled.get_or_add_function(queue.cpu_charge());
        function.ids.push((queue.id(), fd));
        function.queues.queues.push(queue);
    }

    fn run(mut self) {
        let (spin, policies) = (self.shared.idle_mode, self.shared.adaptive);
        self.takeover_slot.set_thread(ThreadId::current());
        let processor = self.shared.cpu;
        // Processors for the thread if it is left with a function that blocks others.
        let anywhere = processor.and_then(|_| current_processors().ok());
        let mut pinning =
            processor.map(|cpu| ThreadPinning::pin_current_thread(cpu, &self.shared.name));
        let rate = TickRate::measured();
        let early = spin.spin_lead();
        let due_soon = rate.ticks(early);
        let mut spin_time = SpinTime::new(policies.spin, rate);
        let mut backoff = PreemptionBackoff::new(policies.preemption_backoff, rate);
        let poll_interval = PollInterval::new(policies.poll_interval);
        let mut idle_since = None;
        // Like `idle_since`, but starts again after each sleep.
        let mut spin_since = None;
        let eager_passes = if is_virtual_machine() {
            u32::MAX
        } else {
            EAGER_PASSES
        };
        let mut empty_passes = 0_u32;
        let mut pass_began = Ticks::now();
        let period = rate.ticks(processor_time::ACCOUNTING_PERIOD);
        let mut settles_at = pass_began;
        loop {
            if self.shared.has_mail.load(Ordering::Acquire) {
                self.read_mail();
            }
            if self.should_stop {
                return;
            }
            let worked = self.run_pass(pass_began);
            let now = Ticks::now();
            if now >= settles_at {
                self.charge_time();
                if let Some(affinity) = &mut self.vcpu_affinity {
                    affinity.follow_vcpu(now, &self.shared.name);
                }
                // The pinned processor belongs to the thread that runs the other functions, so an isolated function's thread is
                // unpinned.
                if self.is_isolated
                    && pinning.take().is_some()
                    && let Some(all) = &anywhere
                {
                    // On failure, the thread stays on its processor.
                    let _ = set_affinity(all);
                }
                if let Some(pinning) = &mut pinning {
                    pinning.check(now, &self.shared.name);
                }
                settles_at = Ticks(now.0.saturating_add(period));
            }
            let spun = spin_since.map_or(0, |since| pass_began.since(since));
            let on_processor = || ThreadProcessorUse {
                ticks: rate.ticks(thread_time()),
                preemptions: thread_preemptions(),
            };
            if backoff.on_pass(now, spun, now.since(pass_began), on_processor) {
                spin_time.on_contention();
            }
            if worked {
                add_to_counter(&self.shared.busy_ticks, now.since(pass_began));
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
            let throttled = self.throttled_queues();
            let timeout = match throttled {
                ThrottledQueues::None => spin_time.ticks(),
                ThrottledQueues::Some => spin_time.min_ticks(),
                ThrottledQueues::All => 0,
            };
            // A poller that follows a vCPU must check the vCPU's processors, even without queues.
            let has_nothing =
                self.has_no_queues() && self.has_no_watches() && self.vcpu_affinity.is_none();
            // The poller of an isolated function must not occupy a processor permanently.
            let spin = match self.is_isolated {
                true if spin == PollerIdleMode::Busy => PollerIdleMode::Adaptive,
                _ => spin,
            };
            let parks = has_nothing
                || spin
                    .park_timeout(timeout)
                    .is_some_and(|timeout| idle >= timeout || self.has_no_queues());
            let leaves = backoff.should_sleep(now, idle);
            if !(parks || leaves)
                || self
                    .ticks_until_due(now)
                    .is_some_and(|ticks| ticks <= due_soon)
            {
                continue;
            }
            spin_since = None;
            if parks {
                let (found_work, slept) = self.park(idle, early, poll_interval);
                // If queues wait for their limits, a timer ends the sleep, and a longer spin would not have found work. So such
                // sleeps do not adapt the spin time.
                if throttled == ThrottledQueues::None {
                    spin_time.on_sleep(slept, found_work);
                }
                pass_began = Ticks::now();
                // A check of doorbells that finds nothing does not end the idle period.
                if found_work || !self.needs_timed_wakes() {
                    idle_since = None;
                }
            } else {
                let half =
                    Duration::from_nanos(nvme_mpt_memory::clock::ticks_to_nanoseconds(idle) / 2);
                self.sleeper
                    .sleep(Some(half.clamp(BACKOFF_SLEEP_MIN, BACKOFF_SLEEP_MAX)));
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

    /// Runs every queue once, or, on a poller with several functions, the queues whose turn it is. Returns whether any queue
    /// had work or was skipped. `began` is the current time.
    #[inline]
    fn run_pass(&mut self, began: Ticks) -> bool {
        if !self.has_single_function {
            return self.run_measured_pass(false);
        }
        if self.polled.functions.is_empty() {
            return false;
        }
        self.run_turn(0, began, |FunctionQueues { queues, watches }| {
            let mut worked = false;
            for queue in queues {
                worked |= queue.poll();
            }
            for watch in watches {
                worked |= watch.check_doorbells();
            }
            worked
        })
    }

    /// Runs the queues whose turn it is, or each queue once if `all` is true. Charges the ticks to the queues, and hands over
    /// the queues in removal that have no commands in flight. Returns whether any queue had work or was skipped.
    #[inline(never)]
    fn run_measured_pass(&mut self, all: bool) -> bool {
        let mut worked = false;
        let mut began = Ticks::now();
        let quantum = self.quantum;
        let mut index = 0;
        while let Some(function) = self.polled.functions.get(index) {
            let mut arbitration = function.arbitration;
            let turns_of = &mut arbitration;
            (worked, began) =
                self.run_turn(index, began, move |FunctionQueues { queues, watches }| {
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
                        queue.cpu_charge_mut().add(ticks);
                        ticks
                    };
                    let left_out = if all {
                        for index in 0..count {
                            poll(index);
                        }
                        false
                    } else {
                        turns_of.run_turn(quantum, count, poll)
                    };
                    worked |= left_out;
                    for watch in watches {
                        worked |= watch.check_doorbells();
                        watch.cpu_charge.add(taken());
                    }
                    (worked, last)
                });
            if let Some(function) = self.polled.functions.get_mut(index) {
                function.arbitration = arbitration;
            }
            index += 1;
        }
        if !self.polled.pending_removals.is_empty() {
            self.hand_over_drained();
        }
        worked
    }

    /// Calls a closure once for each function, in the function's turn, with its queues and watches. Returns whether any call
    /// returned `true`.
    fn for_each_function(&mut self, mut work: impl FnMut(&mut FunctionQueues) -> bool) -> bool {
        let (mut index, mut any) = (0, false);
        while index < self.polled.functions.len() {
            any |= self.run_turn(index, Ticks::now(), &mut work);
            index += 1;
        }
        any
    }

    /// Charges the thread's CPU time since the last call to the functions that it was spent on. Does not charge time in which
    /// the poller had neither a queue nor a watch.
    #[cold]
    fn charge_time(&mut self) {
        let time = thread_time();
        let spent = time.saturating_sub(std::mem::replace(&mut self.charged_time, time));
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let nanoseconds = nanoseconds.wrapping_add(self.offset_nanoseconds);
        self.shared
            .processor_nanoseconds
            .store(nanoseconds, Ordering::Relaxed);
        let division = ProcessorTimeDivision::new(spent, self.charges());
        for PolledFunction {
            queues: members, ..
        } in &mut self.polled.functions
        {
            let queues = members
                .queues
                .iter_mut()
                .map(|queue| queue.cpu_charge_mut());
            let watches = members
                .watches
                .iter_mut()
                .map(|watch| &mut watch.cpu_charge);
            queues
                .chain(watches)
                .for_each(|charge| division.charge_share(charge));
        }
    }

    fn charges(&self) -> impl Iterator<Item = &ProcessorTimeCharge> {
        let queues = self.polled.queues().map(ShadowQueue::cpu_charge);
        queues.chain(self.polled.watches().map(|watch| &watch.cpu_charge))
    }

    /// Updates what depends on the set of queues and watches, after some were added or removed.
    fn on_queues_changed(&mut self) {
        let functions = &mut self.polled.functions;
        functions.retain(
            |PolledFunction {
                 queues: members, ..
             }| { !(members.queues.is_empty() && members.watches.is_empty()) },
        );
        let is_of_one = functions.len() <= 1;
        self.has_single_function = is_of_one && self.polled.pending_removals.is_empty();
        for queue in self.polled.queues_mut() {
            queue.set_poller_shared(!is_of_one);
        }
        self.polled
            .isolated
            .retain(|apart| apart.function.strong_count() > 0);
    }

    /// Sleeps until there is work, or until `early` before a timed command is due. Returns whether there was work after the
    /// sleep, and the ticks slept.
    fn park(&mut self, idle: u64, early: Duration, poll_interval: PollInterval) -> (bool, u64) {
        self.for_each_function(|function_queues| {
            for queue in &mut function_queues.queues {
                queue.arm_notifications();
            }
            false
        });
        let waker = self.shared.waker.clone();
        waker.begin_park();
        // Read between arming and the second check: see `UntrappedDoorbells`.
        let timed = self.needs_timed_wakes();
        let mut found = self.shared.has_mail.load(Ordering::Acquire);
        found |= self.for_each_function(|FunctionQueues { queues, watches }| {
            let mut found = false;
            for queue in queues {
                found |= queue.recheck();
            }
            found | watches.iter_mut().any(DoorbellWatch::check_doorbells)
        });
        if !Arc::ptr_eq(&waker, &self.shared.waker) {
            // Another thread has taken the functions and the waker.
            return (true, 0);
        }
        let began = Ticks::now();
        self.shared.asleep_since.store(began.0, Ordering::Relaxed);
        let mut timeout = None;
        if !found {
            let doorbell_timeout = timed.then(|| {
                let idle = Duration::from_nanos(nvme_mpt_memory::clock::ticks_to_nanoseconds(idle));
                if self.polled.queues().any(ShadowQueue::has_unsignalled_work) {
                    PollInterval::for_pending_work(idle)
                } else {
                    poll_interval.for_doorbells(idle)
                }
            });
            // The sleep ends `early` before a command is due. The poller spins for the remaining time, so that the command
            // completes on time.
            let due = self.ticks_until_due(began).map(|ticks| {
                let until =
                    Duration::from_nanos(nvme_mpt_memory::clock::ticks_to_nanoseconds(ticks));
                until.saturating_sub(early).max(Duration::from_micros(1))
            });
            let wait = self
                .polled
                .queues()
                .filter_map(ShadowQueue::throttled_until);
            let wait = wait.min().map(|end| {
                Duration::from_nanos(nvme_mpt_memory::clock::ticks_to_nanoseconds(
                    end.since(began),
                ))
                .max(Duration::from_micros(1))
            });
            timeout = [doorbell_timeout, due, wait].into_iter().flatten().min();
            self.shared.parks.fetch_add(1, Ordering::Relaxed);
            self.sleeper.sleep(timeout);
        }
        waker.end_park();
        let slept = Ticks::now().since(began);
        self.shared.asleep_since.store(0, Ordering::Relaxed);
        add_to_counter(&self.shared.parked_ticks, slept);
        if !found {
            found = self.run_pass(Ticks::now()) || self.shared.has_mail.load(Ordering::Acquire);
            if !found && timeout.is_none() {
                self.shared.spurious_wakes.fetch_add(1, Ordering::Relaxed);
            }
        }
        (found, slept)
    }

    /// Returns the share of the poller's queues that wait for the rate limits of their leases. The share is not `All` while the
    /// poller watches doorbells.
    fn throttled_queues(&self) -> ThrottledQueues {
        let throttled = self
            .polled
            .queues()
            .filter_map(ShadowQueue::throttled_until);
        match throttled.count() {
            0 => ThrottledQueues::None,
            count if count == self.polled.queues().count() && self.has_no_watches() => {
                ThrottledQueues::All
            }
            _ => ThrottledQueues::Some,
        }
    }

    /// Returns the ticks until the earliest timed event of any queue, such as the due time of a command; `None` if there is
    /// none.
    fn ticks_until_due(&self, now: Ticks) -> Option<u64> {
        let due = self.polled.queues().filter_map(ShadowQueue::next_due);
        due.min().map(|due| due.since(now))
    }

    /// Returns whether work may arrive that does not wake a sleeping poller, such as a store to a mapped doorbell.
    fn needs_timed_wakes(&self) -> bool {
        !self.has_no_watches()
            || (self.is_isolated && !self.has_no_queues())
            || self.polled.queues().any(ShadowQueue::needs_polling)
    }

    #[cold]
    fn read_mail(&mut self) {
        // Queues in removal are charged up to now, and new queues from now on.
        self.charge_time();
        self.shared.has_mail.store(false, Ordering::Relaxed);
        let mail = {
            let mut mail = self
                .shared
                .mailbox
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut *mail)
        };
        let mut answers = Vec::new();
        for mail in mail {
            match mail {
                PollerRequest::Add(queue) => {
                    match self.polled.isolated_function(queue.cpu_charge()) {
                        Some(apart) => {
                            self.shared.queue_count.fetch_sub(1, Ordering::Relaxed);
                            apart.poller.add(queue);
                        }
                        None => self.add_queue(queue),
                    }
                }
                PollerRequest::Remove(id, mode, requester) => match self.polled.queue(id) {
                    Some(queue) => {
                        queue.stop();
                        if mode == QueueRemovalMode::CutShort {
                            queue.cut_short();
                        }
                        // The requester of an earlier removal of this queue has stopped waiting.
                        self.polled
                            .pending_removals
                            .retain(|(other, _)| *other != id);
                        self.polled.pending_removals.push((id, requester));
                    }
                    None => {
                        for IsolatedFunction { poller, .. } in &self.polled.isolated {
                            poller.send(PollerRequest::Remove(id, mode, requester.clone()));
                        }
                    }
                },
                PollerRequest::CutShort(id) => match self.polled.queue(id) {
                    Some(queue) => queue.cut_short(),
                    None => self
                        .polled
                        .isolated
                        .iter()
                        .for_each(|apart| apart.poller.cut_short(id)),
                },
                PollerRequest::CancelRemoval(id) => {
                    match self.polled.queue(id) {
                        Some(queue) => queue.resume(),
                        None => self
                            .polled
                            .isolated
                            .iter()
                            .for_each(|apart| apart.poller.cancel_removal(id)),
                    }
                    self.polled
                        .pending_removals
                        .retain(|(other, _)| *other != id);
                }
                PollerRequest::Watch(watch) => {
                    match self.polled.isolated_function(&watch.cpu_charge) {
                        Some(apart) => apart.poller.watch_doorbells(watch),
                        None => self
                            .polled
                            .get_or_add_function(&watch.cpu_charge)
                            .queues
                            .watches
                            .push(watch),
                    }
                }
                PollerRequest::Unwatch(id) => {
                    for function in &mut self.polled.functions {
                        function.queues.watches.retain(|watch| watch.id != id);
                    }
                    for apart in &self.polled.isolated {
                        apart.poller.unwatch_doorbells(id);
                    }
                }
                PollerRequest::AfterPass(answer) => answers.push(answer),
                PollerRequest::Stop => self.should_stop = true,
            }
        }
        self.on_queues_changed();
        if !answers.is_empty() {
            self.run_measured_pass(true);
        }
        for answer in answers {
            // The requester may have stopped waiting.
            let _ = answer.send(());
        }
    }

    #[cold]
    fn hand_over_drained(&mut self) {
        let goes = |queue: &ShadowQueue| {
            let mut leaving = self.polled.pending_removals.iter();
            queue.is_drained() && leaving.any(|(id, _)| *id == queue.id())
        };
        if self.polled.queues().any(goes) {
            self.charge_time();
        }
        let Self {
            polled:
                PolledFunctions {
                    functions,
                    pending_removals: leaving,
                    ..
                },
            sleeper,
            shared,
            ..
        } = self;
        let mut abandoned = Vec::new();
        leaving.retain(|(id, requester)| {
            let found = functions.iter_mut().find_map(|function| {
                let queues = &function.queues.queues;
                let index = queues.iter().position(|queue| queue.id() == *id)?;
                Some((function, index))
            });
            let Some((function, index)) = found else {
                return false;
            };
            if !function.queues.queues[index].is_drained() {
                return true;
            }
            if requester.is_decided.swap(true, Ordering::AcqRel) {
                // The requester has cancelled the removal, so the queue stays. The mail about the cancellation will arrive.
                function.queues.queues[index].resume();
                return false;
            }
            let queue = function.queues.queues.swap_remove(index);
            function.ids.retain(|(other, _)| other != id);
            shared.queue_count.fetch_sub(1, Ordering::Relaxed);
            if let Some(fd) = queue.wait_fd() {
                sleeper.unwatch_fd(fd);
            }
            if let Err(SendError(queue)) = requester.reply.send(queue) {
                abandoned.push(queue);
            }
            false
        });
        drop_queues_in_thread(&shared.threads, abandoned);
        self.on_queues_changed();
    }
}

/// Drops queues whose requesters no longer exist. Does so on a new thread, because the drop may wait for the drive and the
/// ledger.
#[expect(clippy::vec_box, reason = "queues move between threads and are large")]
fn drop_queues_in_thread(threads: &ThreadSpawner, queues: Vec<Box<ShadowQueue>>) {
    if queues.is_empty() {
        return;
    }
    // If the thread cannot be started, which is logged, the closure drops the queues here.
    let _ = threads.spawn("queue-end", Box::new(move || drop(queues)));
}

/// Adds to a counter of the poller, which other threads only read.
fn add_to_counter(counter: &AtomicU64, by: u64) {
    counter.store(
        counter.load(Ordering::Relaxed).wrapping_add(by),
        Ordering::Relaxed,
    );
}

/// Place where a parked poller sleeps, until its waker, a completion or a timer wakes it.
pub(super) struct PollerSleep {
    timer: TimerFd,
    waker_fd: RawFd,
    waker: Arc<PollerWaker>,
}

impl PollerSleep {
    fn new(waker: &Arc<PollerWaker>) -> io::Result<Self> {
        let sleeper = Self {
            timer: TimerFd::new()?,
            waker_fd: waker.eventfd().as_raw_fd(),
            waker: waker.clone(),
        };
        sleeper.control_epoll(ControlOperation::Add, sleeper.timer.as_raw_fd())?;
        Ok(sleeper)
    }

    fn control_epoll(&self, operation: ControlOperation, fd: RawFd) -> io::Result<()> {
        self.waker
            .epoll()
            .ctl(operation, fd, EpollEvent::new(EventSet::IN, fd as u64))
    }

    fn watch_fd(&self, fd: RawFd) {
        if let Err(error) = self.control_epoll(ControlOperation::Add, fd) {
            // Without the descriptor, completions are found only when the poller is awake for another reason.
            error!("A host queue's completions cannot wake its poller: {error}");
        }
    }

    fn unwatch_fd(&self, fd: RawFd) {
        // If the descriptor is closed, it has already left the epoll set, and the error does not matter.
        let _ = self.control_epoll(ControlOperation::Delete, fd);
    }

    fn sleep(&mut self, timeout: Option<Duration>) {
        // A long sleep need not end precisely, and saves the system calls for a timer. A simulator's clock is always precise.
        let needs_timer = |timeout: &Duration| *timeout <= PRECISE_SLEEP_MAX && !cfg!(simulation);
        let exact = timeout.filter(needs_timer);
        if let Some(timeout) = exact
            && let Err(error) = self.timer.reset(timeout, None)
        {
            warn!("A poller cannot set its timer: {error}");
            return;
        }
        let mut events = [EpollEvent::default(); 8];
        let epoll_timeout = timeout.filter(|_| exact.is_none());
        // An interrupted sleep counts as a short sleep: the poller checks for work and sleeps again.
        let ready = eventfd::wait(self.waker.epoll(), epoll_timeout, &mut events).unwrap_or(0);
        if events[..ready]
            .iter()
            .any(|event| event.fd() == self.waker_fd)
        {
            // An empty eventfd is no error: the signal may belong to the previous sleep.
            let _ = self.waker.eventfd().read();
        }
        if exact.is_some() {
            let _ = self.timer.clear();
        }
    }
}

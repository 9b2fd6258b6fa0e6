//! Placement: the choice of poller and processor for each shadow queue.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use log::warn;
use nvme_guest::adaptive::AdaptivePolicies;
use nvme_guest::stats::PollerStats;
use nvme_guest::threads::ThreadSpawner;
use nvme_mpt_memory::clock;
use nvme_mpt_memory::sync::Mutex;

use super::locality::PollerLocality;
use super::policy::{PollPolicy, PollerIdleMode, PollerProcessors, PollerSharing};
use super::worker::{Poller, ThreadPlacement};

/// Processors per shared poller if the policy does not name processors. The processors without a poller run guests.
const PROCESSORS_PER_SHARED_POLLER: usize = 4;

/// All pollers of the process.
#[derive(Debug, Default)]
pub struct PollerPool {
    threads: ThreadSpawner,
    groups: Mutex<Vec<PollerGroup>>,
    /// True once the watchdog thread runs, which finds functions that block a shared poller.
    are_watched: AtomicBool,
    /// Processors for which a warning about several pollers on one processor was logged.
    crowded: Mutex<Vec<usize>>,
}

/// Pollers that run the queues of one polling policy with one choice of adaptive policies.
#[derive(Debug)]
struct PollerGroup {
    policy: PollPolicy,
    /// Adaptive policies that the group's pollers use.
    adaptive: AdaptivePolicies,
    /// Pollers of the policy. Shared pollers live as long as the group, dedicated ones as long as their queue.
    shared: Vec<Arc<Poller>>,
    dedicated: Vec<Weak<Poller>>,
    /// Pollers of functions that have blocked a shared poller of the group. Each such function has its own poller.
    isolated: Vec<Weak<Poller>>,
    /// Pollers of drives on which a submission may block, each with the number of its drive. They live as long as their queues.
    drive_pollers: Vec<(usize, Weak<Poller>)>,
    started: usize,
}

/// Returns the number of processors that the process may use.
fn processor_count() -> usize {
    // The result of a simulation must not depend on the machine.
    #[cfg(simulation)]
    return nvme_mpt_memory::simulation::costs::shared_pollers() * PROCESSORS_PER_SHARED_POLLER;
    #[cfg(not(simulation))]
    std::thread::available_parallelism().map_or(1, |number| number.get())
}

impl PollerGroup {
    fn start(
        &mut self,
        neighbours: PollerLocality,
        threads: &ThreadSpawner,
    ) -> io::Result<Arc<Poller>> {
        let in_turn = |named: &[usize]| {
            let turn = self.started.checked_rem(named.len())?;
            named.get(turn).copied()
        };
        let processors = match &self.policy.processors {
            PollerProcessors::Any => ThreadPlacement::Anywhere,
            PollerProcessors::Named(named) => {
                in_turn(named).map_or(ThreadPlacement::Anywhere, ThreadPlacement::Processor)
            }
            PollerProcessors::Vcpu => ThreadPlacement::NearVcpu(neighbours),
        };
        let kind = match self.policy.sharing {
            PollerSharing::Shared => "shared",
            PollerSharing::Dedicated => "queue",
        };
        let poller = Poller::start(
            &format!("poll-{kind}-{}", self.started),
            processors,
            self.policy.idle_mode,
            self.adaptive,
            threads,
        )?;
        self.started += 1;
        Ok(Arc::new(poller))
    }

    /// Returns the running pollers of the group.
    fn running_pollers(&self) -> Vec<Arc<Poller>> {
        let others = self.dedicated.iter().chain(&self.isolated);
        let others = others.chain(self.drive_pollers.iter().map(|(_, poller)| poller));
        let others = others.filter_map(Weak::upgrade);
        self.shared.iter().cloned().chain(others).collect()
    }

    /// Returns the maximum number of shared pollers in the group.
    fn shared_max(&self) -> usize {
        match &self.policy.processors {
            PollerProcessors::Named(named) => named.len().max(1),
            PollerProcessors::Any | PollerProcessors::Vcpu => {
                let processors = processor_count();
                (processors / PROCESSORS_PER_SHARED_POLLER).max(1)
            }
        }
    }
}

impl PollerPool {
    /// Creates an empty pool. Pollers are started when queues need them.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Creates an empty pool whose threads are started by `threads`.
    #[must_use]
    pub fn with_threads(threads: ThreadSpawner) -> Arc<Self> {
        Arc::new(Self {
            threads,
            groups: Mutex::default(),
            are_watched: AtomicBool::new(false),
            crowded: Mutex::default(),
        })
    }

    /// Returns the spawner of the pollers' threads, which drives opened for these pollers use too.
    #[must_use]
    pub fn threads(&self) -> &ThreadSpawner {
        &self.threads
    }

    /// Lets the watchdog thread see the turns of all present and future shared pollers.
    pub(super) fn enable_watch(&self) {
        self.are_watched.store(true, Ordering::Relaxed);
        self.shared_pollers()
            .iter()
            .for_each(|poller| poller.enable_watch());
    }

    /// Returns the shared pollers of all groups.
    pub(super) fn shared_pollers(&self) -> Vec<Arc<Poller>> {
        let groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        groups
            .iter()
            .flat_map(|group| group.shared.iter().cloned())
            .collect()
    }

    /// Adds the new poller of a function that has blocked a shared poller to the group of that shared poller.
    pub(super) fn add_isolated(&self, held: &Arc<Poller>, apart: &Arc<Poller>) {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let its =
            |group: &&mut PollerGroup| group.shared.iter().any(|poller| Arc::ptr_eq(poller, held));
        if let Some(group) = groups.iter_mut().find(its) {
            group.isolated.retain(|poller| poller.strong_count() > 0);
            group.isolated.push(Arc::downgrade(apart));
        }
    }

    /// Starts the first poller of a policy with shared pollers, before the policy's queues exist. Dedicated pollers are started
    /// with their queue.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn prepare(&self, policy: &PollPolicy, policies: AdaptivePolicies) -> io::Result<()> {
        match policy.sharing {
            PollerSharing::Shared => self
                .choose_poller(policy, policies, PollerLocality::default(), None)
                .map(drop),
            PollerSharing::Dedicated => Ok(()),
        }
    }

    /// Waits until each poller has made a pass over all queues and requests that it was given before the call, or until the
    /// maximum time has passed. While the calling thread waits, pollers can use its processor. Without the wait, the kernel
    /// might run the pollers a scheduler tick later.
    pub fn await_passes(&self, timeout: Duration) {
        let running: Vec<_> = {
            let groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
            groups
                .iter()
                .flat_map(PollerGroup::running_pollers)
                .collect()
        };
        let deadline = clock::monotonic() + timeout;
        // All pollers are asked before the first wait.
        let passes: Vec<_> = running.iter().map(|poller| poller.request_pass()).collect();
        for answer in passes {
            let left = deadline.saturating_sub(clock::monotonic());
            // After a timeout, the poller makes the requested pass without a waiter.
            let _ = answer.recv_timeout(left);
        }
    }

    /// Returns the poller for a new shadow queue with these placement hints. The last argument is the number of the queue's
    /// drive if submitting commands to the drive may block a poller. Such a drive shares no poller with other drives.
    pub(crate) fn choose_poller(
        &self,
        policy: &PollPolicy,
        policies: AdaptivePolicies,
        neighbours: PollerLocality,
        blocks: Option<usize>,
    ) -> io::Result<Arc<Poller>> {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let poller = self.choose_poller_among(
            &mut groups,
            policy,
            policies.for_poller(),
            neighbours,
            blocks,
        )?;
        let mut reported = self.crowded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cpu) = poller.cpu()
            && let Some(names) = crowded_pollers(&groups, cpu)
            && !reported.contains(&cpu)
        {
            reported.push(cpu);
            warn!(
                "Pollers {} are pinned to processor {cpu}, and one of them never sleeps: they take turns by time \
                 slices. Name as many processors in poll= as there are queues, or leave out :busy",
                names.join(", ")
            );
        }
        Ok(poller)
    }

    fn choose_poller_among(
        &self,
        groups: &mut Vec<PollerGroup>,
        policy: &PollPolicy,
        policies: AdaptivePolicies,
        neighbours: PollerLocality,
        blocks: Option<usize>,
    ) -> io::Result<Arc<Poller>> {
        let is_same = |group: &PollerGroup| group.policy == *policy && group.adaptive == policies;
        let index = match groups.iter().position(is_same) {
            Some(index) => index,
            None => {
                let policy = policy.clone();
                groups.push(PollerGroup {
                    policy,
                    adaptive: policies,
                    shared: Vec::new(),
                    dedicated: Vec::new(),
                    isolated: Vec::new(),
                    drive_pollers: Vec::new(),
                    started: 0,
                });
                groups.len() - 1
            }
        };
        let group = &mut groups[index];
        match policy.sharing {
            PollerSharing::Dedicated => {
                let poller = group.start(neighbours, &self.threads)?;
                group.dedicated.retain(|poller| poller.strong_count() > 0);
                group.dedicated.push(Arc::downgrade(&poller));
                Ok(poller)
            }
            PollerSharing::Shared if blocks.is_some() => {
                let drive = blocks.unwrap_or_default();
                let same = group
                    .drive_pollers
                    .iter()
                    .find(|(other, _)| *other == drive);
                if let Some(poller) = same.and_then(|(_, poller)| poller.upgrade()) {
                    return Ok(poller);
                }
                let poller = group.start(neighbours, &self.threads)?;
                group
                    .drive_pollers
                    .retain(|(_, poller)| poller.strong_count() > 0);
                group.drive_pollers.push((drive, Arc::downgrade(&poller)));
                Ok(poller)
            }
            PollerSharing::Shared => {
                let idlest = group
                    .shared
                    .iter()
                    .min_by_key(|poller| poller.queue_count());
                match idlest {
                    Some(poller)
                        if poller.queue_count() == 0
                            || group.shared.len() >= group.shared_max() =>
                    {
                        Ok(poller.clone())
                    }
                    _ => {
                        let poller = group.start(neighbours, &self.threads)?;
                        if self.are_watched.load(Ordering::Relaxed) {
                            poller.enable_watch();
                        }
                        group.shared.push(poller.clone());
                        Ok(poller)
                    }
                }
            }
        }
    }

    /// Returns statistics of all running pollers.
    #[must_use]
    pub fn stats(&self) -> Vec<PollerStats> {
        let groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let all = groups.iter().flat_map(PollerGroup::running_pollers);
        all.map(|poller| poller.stats()).collect()
    }
}

/// Returns the names of the pollers that are pinned to a processor, if there are several and one of them never sleeps.
fn crowded_pollers(groups: &[PollerGroup], cpu: usize) -> Option<Vec<String>> {
    let (mut names, mut busy) = (Vec::new(), false);
    for group in groups {
        let pinned = group.running_pollers().into_iter();
        for poller in pinned.filter(|poller| poller.cpu() == Some(cpu)) {
            names.push(poller.name().to_owned());
            busy |= group.policy.idle_mode == PollerIdleMode::Busy;
        }
    }
    (busy && names.len() > 1).then_some(names)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use nvme_guest::interrupt::InterruptVector;
    use nvme_mpt_memory::processors::{
        ProcessorSet, ThreadId, current_processors, pin_current_thread,
    };

    use super::*;

    fn place_in(pollers: &PollerPool, policy: &PollPolicy) -> io::Result<Arc<Poller>> {
        pollers.choose_poller(
            policy,
            AdaptivePolicies::default(),
            PollerLocality::default(),
            None,
        )
    }

    #[test]
    fn policies_read_and_print_alike() {
        for text in [
            "shared",
            "dedicated",
            "shared:busy",
            "shared:event@1",
            "dedicated@3",
            "dedicated:busy@2+3",
            "dedicated@vcpu",
            "dedicated:event@vcpu",
        ] {
            let policy: PollPolicy = text.parse().expect("valid");
            assert_eq!(policy.to_string(), text);
        }
        let adaptive: PollPolicy = "shared:adaptive".parse().expect("valid");
        assert_eq!(adaptive, PollPolicy::default());
        for text in [
            "",
            "busy",
            "shared:",
            "shared@",
            "shared@x",
            "dedicated:lazy",
            "shared@1,2",
            "shared@vcpu",
            "dedicated@vcpu+1",
            "dedicated@1024",
        ] {
            let error = text.parse::<PollPolicy>().expect_err(text);
            assert!(error.contains("dedicated:busy@2+3"), "{error}");
        }
    }

    #[test]
    fn dedicated_pollers_are_not_shared_and_end_with_their_queue() {
        let pollers = PollerPool::new();
        let policy = PollPolicy {
            sharing: PollerSharing::Dedicated,
            ..PollPolicy::default()
        };
        let first = place_in(&pollers, &policy).expect("thread");
        let second = place_in(&pollers, &policy).expect("thread");
        assert!(!Arc::ptr_eq(&first, &second));
        assert_eq!(pollers.stats().len(), 2);
        drop(first);
        assert_eq!(pollers.stats().len(), 1);
        let place = |fixed: &str| {
            let policies = fixed.parse().expect("names");
            pollers
                .choose_poller(
                    &PollPolicy::default(),
                    policies,
                    PollerLocality::default(),
                    None,
                )
                .expect("thread")
        };
        let shared = place_in(&pollers, &PollPolicy::default()).expect("thread");
        assert_eq!(pollers.stats().len(), 2);
        // Policies of the poller itself, such as `spin`, need separate pollers; other policies do not.
        assert!(Arc::ptr_eq(&shared, &place("coalescing+governor")));
        assert!(!Arc::ptr_eq(&shared, &place("spin+governor")));
        assert_eq!(pollers.stats().len(), 3);
    }

    #[test]
    fn a_busy_poller_without_queues_sleeps() {
        let pollers = PollerPool::new();
        let policy = "shared:busy".parse().expect("valid");
        let _poller = place_in(&pollers, &policy).expect("thread");
        while pollers.stats()[0].parks == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_shared_poller_that_was_prepared_gets_the_first_queue() {
        let pollers = PollerPool::new();
        let prepare = |policy: &PollPolicy| {
            let prepared = pollers.prepare(policy, AdaptivePolicies::default());
            prepared.expect("thread");
        };
        prepare(&"dedicated".parse().expect("valid"));
        assert!(pollers.stats().is_empty());
        let shared = PollPolicy::default();
        prepare(&shared);
        prepare(&shared);
        assert_eq!(pollers.stats().len(), 1);
        let _placed = place_in(&pollers, &shared).expect("thread");
        assert_eq!(pollers.stats().len(), 1);
    }

    #[test]
    fn a_wait_for_passes_ends_after_each_poller_has_passed() {
        let (open, gate) = mpsc::channel();
        let gate = Mutex::new(Some(gate));
        let runs = Arc::new(AtomicBool::new(false));
        let seen = runs.clone();
        let threads = ThreadSpawner::from_spawn(move |_, work| {
            let gate = gate.lock().expect("not poisoned").take();
            let gate = gate.expect("one poller");
            let runs = runs.clone();
            std::thread::Builder::new().spawn(move || {
                gate.recv().expect("a test");
                runs.store(true, Ordering::Relaxed);
                work();
            })
        });
        let pollers = PollerPool::with_threads(threads);
        let _poller = place_in(&pollers, &PollPolicy::default()).expect("a thread");
        // The poller has made no pass at this point.
        pollers.await_passes(Duration::ZERO);
        assert!(!seen.load(Ordering::Relaxed));
        open.send(()).expect("it waits");
        pollers.await_passes(Duration::from_secs(600));
        assert!(seen.load(Ordering::Relaxed));
        // A sleeping poller wakes up for a requested pass.
        while pollers.stats()[0].parks == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        pollers.await_passes(Duration::from_secs(600));
    }

    #[test]
    fn busy_pollers_that_share_a_processor_are_told_of_once() {
        let place = |policies: &[&str]| {
            let pollers = PollerPool::new();
            let policies = policies.iter().map(|text| text.parse().expect("valid"));
            let placed: Vec<_> = policies
                .map(|policy: PollPolicy| place_in(&pollers, &policy).expect("thread"))
                .collect();
            let reported = pollers.crowded.lock().expect("not poisoned").clone();
            drop(placed);
            reported
        };
        assert_eq!(place(&["dedicated:busy@0"; 3]), [0]);
        assert_eq!(place(&["dedicated:busy@0", "shared@0"]), [0]);
        assert_eq!(place(&["dedicated@0", "shared:busy@0"]), [0]);
        for alone in [
            &["dedicated:busy@0"][..],
            &["dedicated@0", "dedicated@0"],
            &["dedicated:busy", "dedicated:busy"],
            &["shared:busy@0", "shared:busy@0"],
        ] {
            assert!(place(alone).is_empty(), "{alone:?}");
        }
        let pollers = PollerPool::new();
        let policy = "dedicated:busy@0".parse().expect("valid");
        drop(place_in(&pollers, &policy).expect("thread"));
        let _next = place_in(&pollers, &policy).expect("thread");
        assert!(
            pollers.crowded.lock().expect("not poisoned").is_empty(),
            "one after the other"
        );
    }

    #[test]
    fn threads_are_started_by_whoever_wants_to() {
        let started = Arc::new(Mutex::new(Vec::new()));
        let names = started.clone();
        let threads = ThreadSpawner::from_spawn(move |name, work| {
            let mut names = names.lock().expect("not poisoned");
            if names.len() == 2 {
                return Err(io::Error::other("enough"));
            }
            names.push(name.to_owned());
            std::thread::Builder::new().spawn(work)
        });
        let pollers = PollerPool::with_threads(threads);
        let dedicated = PollPolicy {
            sharing: PollerSharing::Dedicated,
            ..PollPolicy::default()
        };
        let _shared = place_in(&pollers, &PollPolicy::default()).expect("a thread");
        let _queue = place_in(&pollers, &dedicated).expect("a thread");
        assert_eq!(
            *started.lock().expect("not poisoned"),
            ["poll-shared-0", "poll-queue-0"]
        );
        let refused = place_in(&pollers, &dedicated).expect_err("no more");
        assert_eq!(refused.to_string(), "enough");
        assert_eq!(pollers.stats().len(), 2);
    }

    /// A thread that stands for a vCPU thread and runs on the requested processor.
    struct PlacementTestVcpu {
        thread: ThreadId,
        orders: mpsc::Sender<usize>,
        done: mpsc::Receiver<()>,
    }

    impl PlacementTestVcpu {
        fn start() -> Self {
            let (orders, receiver) = mpsc::channel();
            let (tell, done) = mpsc::channel();
            let (name, named) = mpsc::channel();
            std::thread::spawn(move || {
                name.send(ThreadId::current()).expect("a test");
                for processor in receiver {
                    pin_current_thread(processor).expect("it may run there");
                    tell.send(()).expect("a test");
                }
            });
            let thread = named.recv().expect("it started");
            Self {
                thread,
                orders,
                done,
            }
        }

        fn pin(&self, processor: usize) {
            self.orders.send(processor).expect("it runs");
            self.done.recv().expect("it is pinned");
        }

        fn end(self) {
            let Self { thread, orders, .. } = self;
            drop(orders);
            while thread.processors().is_ok() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Waits until a poller's thread may run on processors that `is_right` accepts.
    fn await_place(poller: ThreadId, is_right: impl Fn(&ProcessorSet) -> bool) {
        while !is_right(&poller.processors().expect("it runs")) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_poller_stays_beside_the_vcpu_of_its_queue_wherever_that_goes() {
        let allowed = current_processors().expect("there are fewer than a set has room for");
        let processors: Vec<usize> = allowed.iter().collect();
        let [first, .., last] = processors[..] else {
            // A single processor has no neighbours.
            return;
        };
        let (names, started) = mpsc::channel();
        let threads = ThreadSpawner::from_spawn(move |name, work| {
            let names = names.clone();
            std::thread::Builder::new()
                .name(name.to_owned())
                .spawn(move || {
                    names.send(ThreadId::current()).expect("a test");
                    work();
                })
        });
        let pollers = PollerPool::with_threads(threads);
        let vector = InterruptVector::new();
        let neighbours = PollerLocality {
            vector: Some(vector.clone()),
            node: None,
        };
        // A poller that never sleeps checks the vCPU's processors itself.
        let policy = "dedicated:busy@vcpu".parse().expect("valid");
        let _poller = pollers
            .choose_poller(&policy, AdaptivePolicies::default(), neighbours, None)
            .expect("a thread");
        let poller = started.recv().expect("it started");
        let is_beside =
            |vcpu| move |place: &ProcessorSet| !place.contains(vcpu) && !place.is_empty();
        await_place(poller, |place| *place == allowed);

        let [one, other] = [PlacementTestVcpu::start(), PlacementTestVcpu::start()];
        one.pin(first);
        other.pin(last);
        vector.set_vcpu_thread(Some(one.thread));
        await_place(poller, is_beside(first));
        // The VMM moves the thread.
        one.pin(last);
        await_place(poller, is_beside(last));
        one.pin(first);
        await_place(poller, is_beside(first));
        // The guest moves the interrupt.
        vector.set_vcpu_thread(Some(other.thread));
        await_place(poller, is_beside(last));
        // The vCPU is unplugged.
        other.end();
        await_place(poller, |place| *place == allowed);
        vector.set_vcpu_thread(Some(one.thread));
        await_place(poller, is_beside(first));
        vector.set_vcpu_thread(None);
        await_place(poller, |place| *place == allowed);
    }
}

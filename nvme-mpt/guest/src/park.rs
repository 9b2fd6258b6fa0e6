//! Park and wake protocol, which lets a poller sleep without losing a notification.
//!
//! The poller announces that it parks, fences, checks all its sources of work once more, and only then sleeps. A notifier
//! first stores its data, fences, and then checks whether the poller is parked. Either the poller sees the data, or the
//! notifier sees that the poller is parked.

use std::io;
use std::sync::Arc;

use std::os::fd::AsRawFd;

use nvme_mpt_memory::eventfd;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use crate::sync::{AtomicBool, Ordering, fence};

/// Wakes a sleeping poller.
pub trait WakeTarget {
    /// Wakes the sleeper now, or as soon as it falls asleep.
    fn wake(&self);
}

/// Eventfd that wakes a thread, and the epoll set on which the thread sleeps.
#[derive(Debug)]
pub struct ThreadWaker {
    eventfd: EventFd,
    epoll: Epoll,
}

impl WakeTarget for ThreadWaker {
    fn wake(&self) {
        // If the counter is full, the sleeper wakes up as well.
        let _ = eventfd::signal(&self.eventfd);
    }
}

/// Waker of a poller, which signals only while the poller is parked.
#[derive(Debug)]
pub struct ParkWaker<B> {
    parked: AtomicBool,
    target: B,
}

impl<B: WakeTarget> ParkWaker<B> {
    fn with_target(waker: B) -> Self {
        Self {
            parked: AtomicBool::new(false),
            target: waker,
        }
    }

    /// Wakes the poller if it is parked. Callers store their data for the poller first, so that an awake poller finds the data
    /// at its next pass.
    pub fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.parked.load(Ordering::Relaxed) {
            self.target.wake();
        }
    }

    /// Announces that the poller is about to sleep. The poller then checks all its sources of work once more before it sleeps.
    pub fn begin_park(&self) {
        self.parked.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Records that the poller is awake.
    pub fn end_park(&self) {
        self.parked.store(false, Ordering::Relaxed);
    }
}

/// Flag for untrapped doorbells: true while the doorbell page is mapped into the guest, which can then write doorbells without
/// an exit. While the flag is set, a parked poller polls the doorbells by a timer.
///
/// Pages are mapped and unmapped while guests write and pollers park. The flag is set before the page is mapped, and parked
/// pollers are then woken, because they started to sleep without a timer. The flag is cleared after the page is unmapped, when
/// all doorbell stores are in memory. A poller reads the flag after it announced that it parks, so it either sees the flag set
/// or is woken. It reads the flag before its last check of the doorbells, so a poller that sees the flag cleared also sees all
/// earlier stores.
#[derive(Debug)]
pub struct UntrappedDoorbells(AtomicBool);

impl UntrappedDoorbells {
    /// Creates the flag. It is set at first if `is` is true: the doorbell page may be mapped already.
    pub fn new(is: bool) -> Self {
        Self(AtomicBool::new(is))
    }

    /// Sets the flag before the page is mapped. The caller then [wakes](ParkWaker::wake) all pollers of the guest's
    /// queues, before it maps the page.
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Clears the flag after the page is unmapped.
    pub fn clear(&self) {
        self.0.store(false, Ordering::Release);
    }

    /// Returns whether the doorbell page may be mapped.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// The waker of a poller's thread.
pub type PollerWaker = ParkWaker<ThreadWaker>;

impl PollerWaker {
    /// Creates the waker of a thread that is awake.
    ///
    /// # Errors
    /// Returns the kernel's error when there are no file descriptors left.
    pub fn new() -> io::Result<Arc<Self>> {
        let eventfd = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?;
        let epoll = Epoll::new()?;
        let event = EpollEvent::new(EventSet::IN, eventfd.as_raw_fd() as u64);
        epoll.ctl(ControlOperation::Add, eventfd.as_raw_fd(), event)?;
        Ok(Arc::new(Self::with_target(ThreadWaker { eventfd, epoll })))
    }

    /// Returns the eventfd, which is readable after the poller was woken.
    pub fn eventfd(&self) -> &EventFd {
        &self.target.eventfd
    }

    /// Returns the epoll set on which the poller sleeps. It includes the waker's eventfd.
    pub fn epoll(&self) -> &Epoll {
        &self.target.epoll
    }
}

/// Eventfd with which another process wakes a poller.
///
/// A process with access to the poller's own eventfd could reset it, and all other wake-ups would be lost. So each
/// process gets its own eventfds. The poller never reads them, and each write wakes it.
#[derive(Debug)]
pub(crate) struct EventfdWaker {
    eventfd: EventFd,
    waker: Arc<PollerWaker>,
}

impl EventfdWaker {
    /// Creates an eventfd that wakes the poller of `waker` until it is dropped.
    pub(crate) fn new(waker: Arc<PollerWaker>) -> io::Result<Self> {
        let eventfd = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?;
        let event = EpollEvent::new(
            EventSet::IN | EventSet::EDGE_TRIGGERED,
            eventfd.as_raw_fd() as u64,
        );
        let operation = ControlOperation::Add;
        waker.epoll().ctl(operation, eventfd.as_raw_fd(), event)?;
        Ok(Self { eventfd, waker })
    }

    pub(crate) fn eventfd(&self) -> &EventFd {
        &self.eventfd
    }

    pub(crate) fn waker(&self) -> &Arc<PollerWaker> {
        &self.waker
    }
}

impl Drop for EventfdWaker {
    fn drop(&mut self) {
        // Another process may still have the descriptor, so closing it here would not remove it from the epoll set.
        let (operation, event) = (ControlOperation::Delete, EpollEvent::default());
        let _ = self
            .waker
            .epoll()
            .ctl(operation, self.eventfd.as_raw_fd(), event);
    }
}

#[cfg(all(test, loom))]
mod loom_models {
    use nvme_mpt_memory::{RingIndex, RingSize};

    use super::*;
    use crate::doorbell::{EventIdx, SharedWord};
    use loom::sync::atomic::AtomicU32;
    use loom::sync::{Condvar, Mutex};
    use loom::thread;

    /// An eventfd in a form that the model checker can examine.
    #[derive(Default)]
    struct LoomWakeTarget {
        rung: Mutex<bool>,
        changed: Condvar,
    }

    impl LoomWakeTarget {
        fn sleep(&self) {
            let mut rung = self.rung.lock().unwrap();
            while !*rung {
                rung = self.changed.wait(rung).unwrap();
            }
            *rung = false;
        }
    }

    impl WakeTarget for LoomWakeTarget {
        fn wake(&self) {
            *self.rung.lock().unwrap() = true;
            self.changed.notify_one();
        }
    }

    impl SharedWord for loom::sync::Arc<AtomicU32> {
        fn load(&self) -> u32 {
            AtomicU32::load(self, Ordering::Acquire)
        }
        fn store(&self, value: u32) {
            AtomicU32::store(self, value, Ordering::Release);
        }
    }

    /// Runs the poller's loop until it has seen `goal`. A lost wake-up is a deadlock, which the model checker reports.
    fn poll_until(
        goal: u32,
        waker: &ParkWaker<LoomWakeTarget>,
        mut read_doorbell: impl FnMut() -> u32,
        mut arm: impl FnMut(u32),
    ) {
        loop {
            let seen = read_doorbell();
            if seen == goal {
                return;
            }
            arm(seen);
            waker.begin_park();
            if read_doorbell() == seen {
                waker.target.sleep();
            }
            waker.end_park();
        }
    }

    #[test]
    fn a_trapped_doorbell_is_never_missed() {
        loom::model(|| {
            let waker = loom::sync::Arc::new(ParkWaker::with_target(LoomWakeTarget::default()));
            let doorbell = loom::sync::Arc::new(AtomicU32::new(0));
            let guest = {
                let (waker, doorbell) = (waker.clone(), doorbell.clone());
                thread::spawn(move || {
                    for tail in 1..=2 {
                        SharedWord::store(&doorbell, tail);
                        waker.wake();
                    }
                })
            };
            poll_until(2, &waker, || SharedWord::load(&doorbell), |_| ());
            guest.join().unwrap();
        });
    }

    #[test]
    fn a_shadow_doorbell_is_never_missed() {
        const ENTRIES: u32 = 3;
        // The model checks all executions with up to three preemptions. With a fourth, it takes minutes and found no more.
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let waker = loom::sync::Arc::new(ParkWaker::with_target(LoomWakeTarget::default()));
            let shadow = loom::sync::Arc::new(AtomicU32::new(0));
            let word = loom::sync::Arc::new(AtomicU32::new(0));
            let first = RingIndex::new(RingSize::new(ENTRIES).expect("entries"));
            let mut event_idx = EventIdx::new(word.clone(), first);
            let guest = {
                let (waker, shadow) = (waker.clone(), shadow.clone());
                thread::spawn(move || {
                    let mut old = 0;
                    for tail in 1..=2 {
                        SharedWord::store(&shadow, tail);
                        fence(Ordering::SeqCst);
                        let requested = SharedWord::load(&word);
                        if crate::doorbell::tests::driver_writes_register(requested, tail, old) {
                            // A register write reaches the poller through the function's control thread.
                            waker.wake();
                        }
                        old = tail;
                    }
                })
            };
            poll_until(
                2,
                &waker,
                || SharedWord::load(&shadow),
                |seen| event_idx.arm(seen),
            );
            guest.join().unwrap();
        });
    }

    /// A guest's doorbell whose page is mapped and unmapped while the guest writes.
    #[derive(Default)]
    struct ToggledDoorbell {
        /// True while the page is mapped. A store holds the lock, because a hypervisor changes a mapping only between
        /// stores.
        mapped: Mutex<bool>,
        value: loom::sync::Arc<AtomicU32>,
    }

    impl ToggledDoorbell {
        fn write(&self, tail: u32, waker: &ParkWaker<LoomWakeTarget>) {
            let mapped = self.mapped.lock().unwrap();
            if *mapped {
                SharedWord::store(&self.value, tail);
            } else {
                drop(mapped);
                // The VMM handles the exit at any later time.
                SharedWord::store(&self.value, tail);
                waker.wake();
            }
        }
    }

    /// Polls as a poller does whose guest's doorbells may be untrapped, until it has seen `goal`. A sleep with a timer loses
    /// nothing: it only delays the next poll, which sees all stores until then. So the model treats such a sleep as a yield.
    fn poll_toggled(
        goal: u32,
        doorbell: &ToggledDoorbell,
        untrapped: &UntrappedDoorbells,
        waker: &ParkWaker<LoomWakeTarget>,
    ) {
        loop {
            let seen = SharedWord::load(&doorbell.value);
            if seen == goal {
                return;
            }
            waker.begin_park();
            let timed = untrapped.is_set();
            if SharedWord::load(&doorbell.value) == seen {
                if timed {
                    thread::yield_now();
                } else {
                    waker.target.sleep();
                }
            }
            waker.end_park();
        }
    }

    fn toggled(
        was_mapped: bool,
        toggle: fn(&ToggledDoorbell, &UntrappedDoorbells, &ParkWaker<LoomWakeTarget>),
    ) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let waker = loom::sync::Arc::new(ParkWaker::with_target(LoomWakeTarget::default()));
            let untrapped = loom::sync::Arc::new(UntrappedDoorbells::new(was_mapped));
            let doorbell = loom::sync::Arc::new(ToggledDoorbell {
                mapped: Mutex::new(was_mapped),
                value: loom::sync::Arc::default(),
            });
            let guest = {
                let (waker, doorbell) = (waker.clone(), doorbell.clone());
                thread::spawn(move || {
                    for tail in 1..=2 {
                        doorbell.write(tail, &waker);
                    }
                })
            };
            let control = {
                let (waker, doorbell) = (waker.clone(), doorbell.clone());
                let untrapped = untrapped.clone();
                thread::spawn(move || toggle(&doorbell, &untrapped, &waker))
            };
            poll_toggled(2, &doorbell, &untrapped, &waker);
            guest.join().unwrap();
            control.join().unwrap();
        });
    }

    fn map(
        doorbell: &ToggledDoorbell,
        untrapped: &UntrappedDoorbells,
        waker: &ParkWaker<LoomWakeTarget>,
    ) {
        untrapped.set();
        waker.wake();
        *doorbell.mapped.lock().unwrap() = true;
    }

    fn unmap(
        doorbell: &ToggledDoorbell,
        untrapped: &UntrappedDoorbells,
        _: &ParkWaker<LoomWakeTarget>,
    ) {
        *doorbell.mapped.lock().unwrap() = false;
        untrapped.clear();
    }

    #[test]
    fn a_doorbell_that_is_mapped_meanwhile_is_never_missed() {
        toggled(false, map);
    }

    #[test]
    fn a_doorbell_that_is_unmapped_meanwhile_is_never_missed() {
        toggled(true, unmap);
    }

    #[test]
    fn a_doorbell_that_is_unmapped_and_mapped_meanwhile_is_never_missed() {
        toggled(true, |doorbell, untrapped, bell| {
            unmap(doorbell, untrapped, bell);
            map(doorbell, untrapped, bell);
        });
    }
}

//! A poller with several functions, one of which blocks because it waits for another process.

use std::sync::mpsc;
use std::time::Duration;

use nvme_guest::adaptive::AdaptivePolicies;

use super::*;
use crate::poller::{PollerLocality, PollerPool};

/// A host queue that completes its commands, and blocks when the test requests it.
#[derive(Debug, Default)]
struct WaitingHost {
    commands: Vec<Sqe>,
    /// Each wait lasts until a message arrives here.
    waits: Option<mpsc::Receiver<()>>,
    /// Gets a message whenever a wait begins.
    begins: Option<mpsc::Sender<()>>,
    /// Makes the drop of the queue wait for the test.
    _end: Option<SlowEnd>,
}

/// A value whose drop waits for the test.
#[derive(Debug)]
struct SlowEnd(mpsc::Receiver<()>);

impl Drop for SlowEnd {
    fn drop(&mut self) {
        let _ = self.0.recv();
    }
}

impl HostQueue for WaitingHost {
    const COMPLETION_TIMING: CompletionTiming = CompletionTiming::Deferred;

    type Commands = crate::shadow::NvmCommands;

    type Batch<'a> = Batch<'a>;

    fn batch(&mut self) -> Batch<'_> {
        Batch(&mut self.commands)
    }

    fn reap(&mut self, _: HostMemory<'_>, mut taker: impl CompletionTaker) {
        if let (Some(waits), Some(begins)) = (&self.waits, &self.begins)
            && !self.commands.is_empty()
        {
            begins.send(()).expect("a test");
            waits.recv().expect("a test");
        }
        for command in self.commands.drain(..) {
            taker.take(HostCompletion {
                slot: command.cid().0,
                status: Status::SUCCESS,
                dw0: 0,
            });
        }
    }

    fn cut_short(&mut self) {}

    fn drain(&mut self) -> bool {
        true
    }

    fn wait_fd(&self) -> Option<RawFd> {
        None
    }
}

/// Creates a guest with one page of data, whose queue a poller of the test will run.
fn guest(host: WaitingHost) -> Guest {
    let mut guest = Guest::new(Arc::new(IovaSpace::software()));
    guest.window.map(region(Gpa(0x8000), PAGE)).expect("free");
    guest.poll(&mut Host::default());
    guest.queue.host = HostQueuePair::new(host);
    guest
}

/// Takes the shadow queue out of the guest, to add it to a poller.
fn queue_of(guest: &mut Guest) -> Box<ShadowQueue> {
    let idle = Guest::new(Arc::new(IovaSpace::software()));
    std::mem::replace(&mut guest.queue, idle.queue)
}

#[track_caller]
fn await_completion(pollers: &PollerPool, guest: &Guest, index: u64) {
    for _ in 0..60_000 {
        if guest.completion(index).is_some() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("{:#?}", pollers.stats());
}

#[test]
fn a_function_that_waits_holds_up_no_other_and_goes_on_alone() {
    let (end, waits) = mpsc::channel();
    let (begins, began) = mpsc::channel();
    let mut slow = guest(WaitingHost {
        waits: Some(waits),
        begins: Some(begins),
        ..WaitingHost::default()
    });
    let mut others = [(); 3].map(|()| guest(WaitingHost::default()));
    let pollers = PollerPool::new();
    pollers.start_watchdog().expect("a thread");
    let policy = "shared:busy".parse().expect("valid");
    let place = || {
        pollers.choose_poller(
            &policy,
            AdaptivePolicies::default(),
            PollerLocality::default(),
            None,
        )
    };
    let poller = place().expect("a thread");
    // The slow queue is added first, so that the other queues wait for it.
    let id = slow.queue.id();
    poller.add(queue_of(&mut slow));
    let ids = [0, 1, 2].map(|index| {
        let queue = queue_of(&mut others[index]);
        let id = queue.id();
        poller.add(queue);
        id
    });
    for guest in &mut others {
        guest.submit_read([0x8000, 0]);
        await_completion(&pollers, guest, 0);
    }
    slow.submit_read([0x8000, 0]);
    began.recv().expect("its turn");
    // The slow queue blocks until the test releases it.
    for round in 1..4 {
        for guest in &mut others {
            guest.submit_read([0x8000, 0]);
            await_completion(&pollers, guest, round);
        }
    }
    assert_eq!(slow.completion(0), None);
    let names = || -> Vec<_> {
        pollers
            .stats()
            .into_iter()
            .map(|stats| stats.name)
            .collect()
    };
    // On a loaded machine, other functions may look blocked too and get pollers of their own.
    assert!(names().len() >= 2, "{:?}", names());
    // The removal of the slow queue is requested, and the queue arrives when the wait ends.
    end.send(()).expect("it waits");
    await_completion(&pollers, &slow, 0);
    slow.submit_read([0x8000, 0]);
    began.recv().expect("its turn");
    // A cancelled removal does not wait for the poller's thread, which is in the queue's turn.
    let leaves = poller.remove(id);
    poller.cancel_removal(id);
    assert!(leaves.cancel().is_none());
    let leaves = poller.remove(id);
    end.send(()).expect("it waits");
    let queue = leaves.recv().expect("it is drained");
    assert_eq!(queue.id(), id);
    await_completion(&pollers, &slow, 1);
    // After the queue is added to its old poller again, it continues where it stopped.
    let mut queue = queue;
    queue.resume();
    poller.add(queue);
    slow.submit_read([0x8000, 0]);
    began.recv().expect("its turn");
    others[0].submit_read([0x8000, 0]);
    await_completion(&pollers, &others[0], 4);
    end.send(()).expect("it waits");
    await_completion(&pollers, &slow, 2);
    for id in ids.into_iter().chain([id]) {
        drop(poller.remove(id).recv().expect("it is drained"));
    }
}

#[test]
fn a_function_that_comes_while_the_only_other_one_waits_is_served() {
    let pollers = PollerPool::new();
    let (end, waits) = mpsc::channel();
    let (begins, began) = mpsc::channel();
    let mut slow = guest(WaitingHost {
        waits: Some(waits),
        begins: Some(begins),
        ..WaitingHost::default()
    });
    let mut other = guest(WaitingHost::default());
    pollers.start_watchdog().expect("a thread");
    let policy = "shared:busy".parse().expect("valid");
    let poller = pollers
        .choose_poller(
            &policy,
            AdaptivePolicies::default(),
            PollerLocality::default(),
            None,
        )
        .expect("a thread");
    let id = slow.queue.id();
    poller.add(queue_of(&mut slow));
    slow.submit_read([0x8000, 0]);
    began.recv().expect("its turn");
    // No function is waiting for the slow queue at this point.
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(pollers.stats().len(), 1);
    let other_id = other.queue.id();
    poller.add(queue_of(&mut other));
    other.submit_read([0x8000, 0]);
    await_completion(&pollers, &other, 0);
    assert_eq!(pollers.stats().len(), 2);
    end.send(()).expect("it waits");
    await_completion(&pollers, &slow, 0);
    for id in [id, other_id] {
        drop(poller.remove(id).recv().expect("it is drained"));
    }
}

#[test]
fn a_queue_that_nobody_waits_for_ends_without_its_poller() {
    let pollers = PollerPool::new();
    let (end_wait, waits) = mpsc::channel();
    let (begins, began) = mpsc::channel();
    let (end, ends) = mpsc::channel();
    let mut gone = guest(WaitingHost {
        waits: Some(waits),
        begins: Some(begins),
        _end: Some(SlowEnd(ends)),
        ..WaitingHost::default()
    });
    let mut other = guest(WaitingHost::default());
    let policy = "shared:busy".parse().expect("valid");
    let poller = pollers
        .choose_poller(
            &policy,
            AdaptivePolicies::default(),
            PollerLocality::default(),
            None,
        )
        .expect("a thread");
    let [id, other_id] = [gone.queue.id(), other.queue.id()];
    poller.add(queue_of(&mut gone));
    poller.add(queue_of(&mut other));
    gone.submit_read([0x8000, 0]);
    began.recv().expect("its turn");
    drop(poller.remove(id));
    end_wait.send(()).expect("it waits");
    await_completion(&pollers, &gone, 0);
    other.submit_read([0x8000, 0]);
    await_completion(&pollers, &other, 0);
    drop(poller.remove(other_id).recv().expect("it is drained"));
    drop(end);
}

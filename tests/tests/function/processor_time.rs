//! Pollers' processor time is charged to the functions that caused it.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, PoisonError};
use std::thread;

use nix::time::ClockId;
use nix::unistd::{Pid, gettid};
use nvme_guest::threads::ThreadSpawner;
use nvme_mpt::{LocalBackend, PollerPool};
use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::prp;

use crate::common::{HANG, Host, Machine, Setup, queue_pair, wait_for};

/// Permitted relative difference between the charged time and the kernel's time.
const TOLERANCE: f64 = 0.05;

/// Charged time before the comparison, in seconds. The charge may lag by a millisecond.
const CHARGED_MIN: f64 = 0.2;

/// Creates a host whose poller reports its thread id.
fn host() -> (Host, Receiver<Pid>) {
    let (sender, threads) = channel();
    let mut host = Host::new("memory:32M", 512);
    host.pollers = PollerPool::with_threads(ThreadSpawner::from_spawn(move |name, work| {
        let sender = name.starts_with("poll-").then(|| sender.clone());
        thread::Builder::new().spawn(move || {
            if let Some(sender) = sender {
                let _ = sender.send(gettid());
            }
            work();
        })
    }));
    (host, threads)
}

/// Returns the processor time of a thread of this process in seconds, as measured by the kernel.
fn kernel_seconds(thread: Pid) -> f64 {
    // Encoding of CPU clocks in Linux: the inverted thread id, then three bits for the scheduler clock of a thread.
    let clock = ClockId::from_raw((!thread.as_raw() << 3) | 0b110);
    let time = clock.now().unwrap();
    time.tv_sec() as f64 + time.tv_nsec() as f64 / 1e9
}

/// Creates a machine. Returns the back end of its function too.
fn machine(host: &Host, index: u64, poll: &'static str) -> (Machine, Arc<LocalBackend>) {
    let machine = host.machine(&Setup::nth(index).poll(poll));
    let attached = host.latest_backend.lock();
    let attached = attached.unwrap_or_else(PoisonError::into_inner).upgrade();
    (machine, attached.unwrap())
}

fn charged_seconds(attachments: &[&LocalBackend]) -> f64 {
    let seconds = attachments
        .iter()
        .map(|local_backend| local_backend.stats().processor_seconds);
    seconds.sum()
}

/// Three readings in sequence: kernel time of a thread, charged time, kernel time.
struct Reading([f64; 3]);

impl Reading {
    fn take(thread: Pid, attachments: &[&LocalBackend]) -> Self {
        let before = kernel_seconds(thread);
        let charged = charged_seconds(attachments);
        Self([before, charged, kernel_seconds(thread)])
    }

    /// Checks that the time charged since `earlier` is the kernel's time.
    fn check_since(&self, earlier: &Self) {
        let charged = self.0[1] - earlier.0[1];
        let (least, most) = (self.0[0] - earlier.0[2], self.0[2] - earlier.0[0]);
        println!("{charged:.4} s are charged, and the kernel has {least:.4} s to {most:.4} s");
        assert!(
            charged >= least * (1.0 - TOLERANCE) && charged <= most * (1.0 + TOLERANCE),
            "{charged} s are charged, and the kernel has {least} s to {most} s"
        );
    }
}

#[test]
fn the_time_of_a_dedicated_poller_is_its_functions() {
    let (host, threads) = host();
    for (index, poll) in [(0, "dedicated:busy"), (1, "dedicated")] {
        let (machine, local_backend) = machine(&host, index, poll);
        let attachments = [local_backend.as_ref()];
        let mut controller = machine.attach();
        let mut queue = queue_pair(&mut controller, 1, 32);
        let thread = threads.recv().unwrap();
        let data = machine.memory.alloc(4096).unwrap();
        let read = Sqe::read(1, 0, 8).with_data(prp::buffer(&data, 0, 4096).unwrap().pointer);
        queue.execute(read, HANG).unwrap();
        wait_for("time is charged", || charged_seconds(&attachments) > 0.0);
        let begin = Reading::take(thread, &attachments);
        while charged_seconds(&attachments) < begin.0[1] + CHARGED_MIN {
            queue.execute(read, HANG).unwrap();
        }
        let worked = Reading::take(thread, &attachments);
        worked.check_since(&begin);
        // A poller that parks takes hardly any time without commands.
        if poll == "dedicated:busy" {
            wait_for("empty passes are charged", || {
                charged_seconds(&attachments) >= worked.0[1] + CHARGED_MIN
            });
            Reading::take(thread, &attachments).check_since(&worked);
        }
    }
}

#[test]
fn functions_that_share_a_poller_have_its_time_between_them() {
    let (host, threads) = host();
    let poll = "shared:busy@0";
    let (first, second) = (machine(&host, 0, poll), machine(&host, 1, poll));
    let (mut of_first, mut of_second) = (first.0.attach(), second.0.attach());
    let mut queue = queue_pair(&mut of_first, 1, 32);
    let _idle = queue_pair(&mut of_second, 1, 32);
    let thread = threads.recv().unwrap();
    assert!(threads.try_recv().is_err(), "there is one poller");
    let (busy, idle) = ([first.1.as_ref()], [second.1.as_ref()]);
    let both = [first.1.as_ref(), second.1.as_ref()];
    wait_for("time is charged to both", || {
        charged_seconds(&busy) > 0.0 && charged_seconds(&idle) > 0.0
    });
    let begin = Reading::take(thread, &both);
    let (busy_at_first, idle_at_first) = (charged_seconds(&busy), charged_seconds(&idle));
    const LEN: usize = 128 << 10;
    let data = first.0.memory.alloc(LEN).unwrap();
    let buffer = prp::buffer(&data, 0, LEN).unwrap();
    let write = Sqe::write(1, 0, (LEN / 512) as u32).with_data(buffer.pointer);
    // Several commands are in flight, so that the poller always has work: it spends its empty passes on both functions alike,
    // and more of them while this thread does not run.
    let mut in_flight = VecDeque::new();
    let mut commands = 0;
    while commands < 4000 || charged_seconds(&both) < begin.0[1] + CHARGED_MIN {
        while in_flight.len() < 31 {
            in_flight.push_back(queue.submit(write).unwrap());
        }
        let cqe = queue.wait(in_flight.pop_front().unwrap(), HANG).unwrap();
        assert!(cqe.status().is_success(), "{cqe:?}");
        commands += 1;
    }
    Reading::take(thread, &both).check_since(&begin);
    let (busy, idle) = (
        charged_seconds(&busy) - busy_at_first,
        charged_seconds(&idle) - idle_at_first,
    );
    // If the time were divided equally, the quotient would be one.
    assert!(
        busy > 1.25 * idle,
        "{busy} s for writes, and {idle} s for none"
    );
}

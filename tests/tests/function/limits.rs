//! Limits of I/Os and bytes per second: the limit is never exceeded, and the poller sleeps while commands wait.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nvme_guest::rate_limit::{RateLimit, RateLimits};
use nvme_mpt::LocalBackend;
use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::doorbell::DoorbellMode;
use nvme_mpt_tests::prp;
use nvme_mpt_tests::queue::QueuePair;

use crate::common::{HANG, Host, MODES, Machine, Setup, queue_pair};

fn rates(iops: &str, bandwidth: &str) -> RateLimits {
    RateLimits {
        iops: RateLimit::parse_iops(iops).ok(),
        bandwidth: RateLimit::parse_bandwidth(bandwidth).ok(),
        weight: None,
    }
}

fn limited(doorbells: DoorbellMode, rates: RateLimits) -> Setup {
    Setup {
        rates,
        ..Setup::nth(0).doorbells(doorbells)
    }
}

/// Returns the back end of the host's only function.
fn local_backend(host: &Host) -> Arc<LocalBackend> {
    host.latest_backend.lock().unwrap().upgrade().unwrap()
}

/// Executes `count` reads of `bytes` each, with up to `depth` outstanding on each queue. Returns the time for all reads.
fn read(
    machine: &Machine,
    queues: &mut [QueuePair],
    count: u32,
    depth: u32,
    bytes: usize,
) -> Duration {
    let data = machine.memory.alloc(bytes).unwrap();
    let pointer = prp::buffer(&data, 0, bytes).unwrap().pointer;
    let blocks = u32::try_from(bytes / 512).unwrap();
    let read = Sqe::read(1, 0, blocks).with_data(pointer);
    let began = Instant::now();
    let (mut begun, mut done) = (0, 0);
    let mut in_flight = vec![0; queues.len()];
    while done < count {
        for (queue, in_flight) in queues.iter_mut().zip(&mut in_flight) {
            while *in_flight < depth && begun < count {
                queue.submit(read).unwrap();
                *in_flight += 1;
                begun += 1;
            }
            queue.ring();
            while let Some(cqe) = queue.poll() {
                assert!(cqe.status().is_success(), "{cqe:?}");
                *in_flight -= 1;
                done += 1;
            }
        }
        assert!(began.elapsed() < HANG, "{done} of {count} are done");
        std::thread::sleep(Duration::from_micros(20));
    }
    began.elapsed()
}

#[test]
fn no_more_commands_pass_than_the_limit_in_each_doorbell_mode() {
    for doorbells in MODES {
        let host = Host::new("memory:16M", 512);
        let machine = host.machine(&limited(doorbells, rates("2000+20", "")));
        let mut controller = machine.attach();
        // The queues of a lease share its limit.
        let mut queues = [
            queue_pair(&mut controller, 1, 32),
            queue_pair(&mut controller, 2, 32),
        ];
        let time = read(&machine, &mut queues, 1000, 8, 4096);
        assert!(
            time >= Duration::from_millis(480),
            "{doorbells:?}: {time:?}"
        );
    }
}

#[test]
fn a_guest_at_its_limit_spins_no_poller() {
    // The poller takes all commands at once, so most of them wait for seconds.
    const FLUSHES: usize = 31;
    for doorbells in MODES {
        let host = Host::new("memory:16M", 512);
        let machine = host.machine(&limited(doorbells, rates("1+1", "")));
        let mut controller = machine.attach();
        let mut queue = queue_pair(&mut controller, 1, 32);
        let (parks, began) = (host.park_count(), Instant::now());
        for _ in 0..FLUSHES {
            queue.submit(Sqe::flush(1)).unwrap();
        }
        queue.ring();
        let mut done = 0;
        loop {
            done += std::iter::from_fn(|| queue.poll()).count();
            // Read the statistics before `done` is checked: this thread may lose its processor until all commands are done.
            if machine.queue_stats(1).throttled_ms > 0 && host.park_count() > parks {
                break;
            }
            assert!(done < FLUSHES, "{doorbells:?}: the poller spun");
            assert!(began.elapsed() < HANG, "{doorbells:?}: {done} are done");
            std::thread::sleep(Duration::from_millis(1));
        }
        let throttled = u128::from(machine.queue_stats(1).throttled_ms);
        // The two clocks may differ, since one may be slewed.
        let most = began.elapsed().mul_f64(1.1).as_millis() + 1;
        assert!(throttled <= most, "{throttled} ms");
        local_backend(&host).set_rates(RateLimits::default());
        while done < FLUSHES {
            done += std::iter::from_fn(|| queue.poll()).count();
            assert!(began.elapsed() < HANG, "{doorbells:?}: {done} are done");
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

#[test]
fn no_more_bytes_pass_than_the_limit() {
    let host = Host::new("memory:16M", 512);
    let setup = limited(DoorbellMode::Shadow, rates("", "64M+64K"));
    let machine = host.machine(&setup);
    let mut controller = machine.attach();
    let mut queues = [queue_pair(&mut controller, 1, 32)];
    let time = read(&machine, &mut queues, 512, 4, 64 << 10);
    // 32 MiB, less the burst and the debt after the last batch.
    assert!(time >= Duration::from_millis(480), "{time:?}");
}

#[test]
fn a_limit_ends_under_its_guest() {
    let host = Host::new("memory:16M", 512);
    let machine = host.machine(&limited(DoorbellMode::Shadow, rates("1+1", "")));
    let mut controller = machine.attach();
    let mut queue = queue_pair(&mut controller, 1, 32);
    let flush = Sqe::flush(1);
    queue.execute(flush, HANG).unwrap();
    let waits: Vec<u16> = (0..8).map(|_| queue.submit(flush).unwrap()).collect();
    queue.ring();
    // The poller sleeps for a second, or is about to.
    local_backend(&host).set_rates(RateLimits::default());
    let began = Instant::now();
    queue.drain(&waits, HANG).unwrap();
    read(&machine, std::slice::from_mut(&mut queue), 10_000, 8, 4096);
    assert!(began.elapsed() < HANG);
    // Set the limit again.
    local_backend(&host).set_rates(rates("1000+10", ""));
    let time = read(&machine, std::slice::from_mut(&mut queue), 300, 8, 4096);
    assert!(time >= Duration::from_millis(280), "{time:?}");
}

#[test]
fn a_resting_queue_can_be_deleted_and_reset() {
    let host = Host::new("memory:16M", 512);
    let machine = host.machine(&limited(DoorbellMode::Shadow, rates("1+1", "")));
    let mut controller = machine.attach();
    for _ in 0..3 {
        let mut queue = queue_pair(&mut controller, 1, 32);
        for _ in 0..8 {
            queue.submit(Sqe::flush(1)).unwrap();
        }
        queue.ring();
        drop(queue);
        machine.function_level_reset();
        controller = machine.attach();
    }
}

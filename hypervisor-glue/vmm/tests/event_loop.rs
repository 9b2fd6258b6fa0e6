//! A function whose control work is done by an event loop of the VMM, in place of a thread of the function's own.
#![expect(
    clippy::disallowed_methods,
    reason = "tests have threads and real time of their own"
)]

#[expect(dead_code, reason = "the example's `main`")]
#[path = "../examples/minimal.rs"]
mod minimal;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use event_manager::{EventManager, SubscriberOps};
use nvme_mpt_vmm::options::FunctionConfig;
use nvme_mpt_vmm::{FunctionEvents, Vmm, poller_pool};
use vm_memory::{GuestAddress, GuestMemoryMmap};

use minimal::NoHypervisor;
use minimal::guest::Guest;

#[test]
fn one_event_loop_serves_functions_until_they_are_stopped() {
    let vmm: Arc<dyn Vmm> = Arc::new(NoHypervisor::new().unwrap());
    let pollers = poller_pool(vmm.clone());
    let config = FunctionConfig::from_keys(|key| (key == "path").then(|| "memory:1M".to_owned()));
    let config = config.unwrap();
    let mut event_loop = EventManager::<FunctionEvents>::new().unwrap();
    let functions = [1, 2].map(|number| {
        let id = format!("nvme{number}");
        let started = nvme_mpt_vmm::start_in_loop(&config, &id, vmm.clone(), &pollers);
        let (function, events) = started.unwrap();
        event_loop.add_subscriber(events);
        function
    });
    let is_ended = Arc::new(AtomicBool::new(false));
    let thread = thread::spawn({
        let is_ended = is_ended.clone();
        move || {
            let mut turns = 0;
            while !is_ended.load(Ordering::Acquire) {
                turns += event_loop.run_with_timeout(10).unwrap();
            }
            // A function that was stopped wakes the loop at most once more.
            while event_loop.run_with_timeout(0).unwrap() > 0 {}
            turns
        }
    });
    for function in functions {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        function.set_guest_memory(&memory).unwrap();
        // Admin commands complete by the event loop alone.
        let mut guest = Guest::boot(Arc::new(function), memory).unwrap();
        guest.execute(0, [0x06, 0, 0x1_0000, 1, 0, 0]).unwrap();
        guest.execute(1, [0x02, 1, 0x1_0000, 0, 0, 0]).unwrap();
        guest.function.stop().unwrap();
        guest.function.stop().unwrap();
    }
    is_ended.store(true, Ordering::Release);
    assert!(thread.join().unwrap() > 0);
}

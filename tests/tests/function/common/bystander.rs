//! A second guest on another range of the same drive, served by the same pollers. It verifies that its data is unchanged.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use nvme_mpt_tests::disk::{Disk, Transfer};
use nvme_mpt_tests::model::{Limits, Model, Op};
use nvme_mpt_tests::rng::Rng;

use super::{Host, Machine, Setup, wait_for};

/// Size of the largest transfer in blocks.
const TRANSFER: u32 = 32;

/// A guest that runs verified I/O until it is stopped.
pub(crate) struct Bystander {
    stop: Arc<AtomicBool>,
    steps: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Bystander {
    /// Starts a guest. Returns after some verified I/O.
    pub(crate) fn start(host: &Host, setup: &Setup) -> Self {
        let machine = host.machine(setup);
        let (stop, steps) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let thread = {
            let (stop, steps) = (stop.clone(), steps.clone());
            std::thread::spawn(move || run(&machine, &stop, &steps))
        };
        let bystander = Self {
            stop,
            steps,
            thread: Some(thread),
        };
        bystander.wait_for_progress();
        bystander
    }

    /// Waits for some more verified I/O.
    #[track_caller]
    pub(crate) fn wait_for_progress(&self) {
        let until = self.steps.load(Ordering::Relaxed) + 20;
        wait_for("the other guest's I/O", || {
            let ended = self.thread.as_ref().is_none_or(JoinHandle::is_finished);
            assert!(!ended, "the other guest was disturbed");
            self.steps.load(Ordering::Relaxed) >= until
        });
    }

    /// Lets the guest continue for a while, then verifies all written data.
    #[track_caller]
    pub(crate) fn finish(mut self) {
        self.wait_for_progress();
        self.end();
    }

    fn end(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && let Err(panic) = thread.join()
            && !std::thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}

impl Drop for Bystander {
    fn drop(&mut self) {
        self.end();
    }
}

fn run(machine: &Machine, stop: &AtomicBool, steps: &AtomicU64) {
    let (controller, mut disk) = machine.disk();
    let limits = Limits::for_disk(&disk, TRANSFER);
    let mut model = Model::new(limits, true);
    let mut rng = Rng::new(disk.blocks());
    while !stop.load(Ordering::Relaxed) {
        disk.transfer = transfer(&mut rng);
        let op = Op::choose(std::array::from_fn(|_| rng.next_u64()), &limits);
        step(&mut model, &mut disk, &op);
        steps.fetch_add(1, Ordering::Relaxed);
        // The guest under test may share this processor.
        std::thread::sleep(std::time::Duration::from_micros(20));
    }
    model.verify_all(&mut disk).unwrap();
    assert_eq!(controller.status().unwrap(), 1, "ready and nothing else");
}

#[track_caller]
fn step(model: &mut Model, disk: &mut Disk, op: &Op) {
    if let Err(mismatch) = model.step(disk, op) {
        panic!("{mismatch}");
    }
}

fn transfer(rng: &mut Rng) -> Transfer {
    match rng.below(3) {
        0 => Transfer::Prp { offset: 0 },
        1 => Transfer::Prp {
            offset: 4 * rng.below(1024) as usize,
        },
        _ => Transfer::Sgl {
            piece: 512,
            per_segment: 8,
        },
    }
}

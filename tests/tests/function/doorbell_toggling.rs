//! Doorbells that are mapped and unmapped while the guest writes them: no write may be lost, for the I/O queues of a sleeping
//! poller and for the admin queue.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, RwLock};
use std::time::Duration;

use nvme_mpt_tests::bar::{Bar, DoorbellWindow};
use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::controller::{Config, Controller};
use nvme_mpt_tests::doorbell::DoorbellMode;
use nvme_mpt_tests::prp;
use nvme_mpt_tests::rng::Rng;

use crate::common::{HANG, Host, Machine, Setup, queue_pair};

/// Offset of the doorbells.
const DOORBELLS: u64 = 0x1000;
/// Longest pause of the guest, and between mapping and unmapping, in microseconds. It exceeds a poller's spin time.
const PAUSE: u64 = 300;
/// Minimum number of events of each kind.
const COMMANDS: u64 = 5000;
const TOGGLES: u64 = 1000;
const WRITES: u64 = 100;

/// BAR0 with doorbells that are mapped at times.
struct ToggledBar {
    trapped: Arc<dyn Bar>,
    page: DoorbellWindow,
    /// As with a hypervisor, no store is in progress while the mapping changes, but an exit may be.
    mapped: RwLock<bool>,
    stores: AtomicU64,
    exits: AtomicU64,
}

impl Bar for ToggledBar {
    fn read32(&self, offset: u64) -> u32 {
        self.trapped.read32(offset)
    }

    fn read64(&self, offset: u64) -> u64 {
        self.trapped.read64(offset)
    }

    fn write32(&self, offset: u64, value: u32) {
        if offset >= DOORBELLS {
            let mapped = self.mapped.read().unwrap();
            if *mapped {
                let register = self.page.register(offset).unwrap();
                register[0].store(value, Ordering::Release);
                self.stores.fetch_add(1, Ordering::Relaxed);
                return;
            }
            self.exits.fetch_add(1, Ordering::Relaxed);
        }
        self.trapped.write32(offset, value);
    }

    fn write64(&self, offset: u64, value: u64) {
        self.trapped.write64(offset, value);
    }
}

impl ToggledBar {
    fn of(machine: &Machine) -> Arc<Self> {
        let function = machine.function();
        let region = function.doorbell_memory();
        let len = region.length as usize;
        let page = DoorbellWindow::map(region.offset, region.fd, region.offset, len).unwrap();
        drop(function);
        Arc::new(Self {
            trapped: machine.bar(),
            page,
            mapped: RwLock::default(),
            stores: AtomicU64::new(0),
            exits: AtomicU64::new(0),
        })
    }

    fn map(&self, machine: &Machine) {
        let mut function = machine.function();
        function.begin_mapped_doorbells().unwrap();
        *self.mapped.write().unwrap() = true;
    }

    fn unmap(&self, machine: &Machine) {
        let mut function = machine.function();
        *self.mapped.write().unwrap() = false;
        function.end_mapped_doorbells();
    }
}

fn pause(rng: &mut Rng) {
    match rng.below(3) {
        0 => {}
        1 => (0..rng.below(60_000)).for_each(|_| std::hint::spin_loop()),
        _ => std::thread::sleep(Duration::from_micros(rng.below(PAUSE))),
    }
}

#[test]
fn no_doorbell_write_is_lost_while_the_mapping_changes() {
    let host = Host::new("memory:16M", 512);
    let machine = host.machine(&Setup::nth(0).doorbells(DoorbellMode::Trap));
    let bar = ToggledBar::of(&machine);
    let config = Config {
        admin_timeout: HANG,
        ..Config::default()
    };
    let (toggles, done) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut rng = Rng::new(1);
            while !done.load(Ordering::Relaxed) {
                bar.map(&machine);
                pause(&mut rng);
                bar.unmap(&machine);
                toggles.fetch_add(1, Ordering::Relaxed);
                pause(&mut rng);
            }
        });
        // If this thread panics, the other thread ends too.
        let _done = SetOnDrop(&done);
        let guest: Arc<dyn Bar> = bar.clone();
        let mut controller = Controller::attach(guest, machine.memory.clone(), config, 1).unwrap();
        let mut queue = queue_pair(&mut controller, 1, 32);
        let data = machine.memory.alloc(4096).unwrap();
        let read = Sqe::read(1, 0, 8).with_data(prp::buffer(&data, 0, 4096).unwrap().pointer);
        let mut rng = Rng::new(2);
        let enough = |count: &AtomicU64, least| count.load(Ordering::Relaxed) >= least;
        let mut commands = 0;
        while commands < COMMANDS
            || !enough(&toggles, TOGGLES)
            || !enough(&bar.stores, WRITES)
            || !enough(&bar.exits, WRITES)
        {
            // A lost doorbell write shows as a timeout.
            queue.execute(read, HANG).unwrap_or_else(|error| {
                panic!("command {commands}: {error}");
            });
            if commands % 50 == 0 {
                controller.identify_controller().unwrap();
            }
            commands += 1;
            pause(&mut rng);
        }
    });
}

struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

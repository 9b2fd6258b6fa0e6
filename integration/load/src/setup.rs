//! Setup of a load: memory, an enabled controller, and queue pairs with their slots.

use std::sync::Arc;
use std::time::Duration;

use nvme_mpt_tests::bar::Bar;
use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::controller::{Config, Controller, QueueOptions};
use nvme_mpt_tests::doorbell::DoorbellMode;
use nvme_mpt_tests::interrupt::Interrupt;
use nvme_mpt_tests::memory::{GuestMemory, PAGE_SIZE};
use nvme_mpt_tests::prp;

use super::LoadError;
use super::clock::Calibration;
use super::lane::Lane;
use super::options::{AccessPattern, LoadOptions};
use super::target::LoadTarget;

/// Guest physical address of the memory: above 4 GiB, as in large guests.
const MEMORY_BASE: u64 = 1 << 32;
const HUGE_PAGE: usize = 2 << 20;
/// Namespace under load.
const NSID: u32 = 1;

/// Timeout of admin commands, independent of `--timeout`.
const ADMIN_TIMEOUT: Duration = Duration::from_secs(180);

/// Interrupt vectors by number: one of the admin queue, which is not used, and one for each I/O queue.
pub(super) type Vectors = Vec<Arc<Interrupt>>;

/// Returns the distance in bytes between the data of consecutive slots, in whole pages.
fn stride(options: &LoadOptions) -> usize {
    options.transfer().next_multiple_of(PAGE_SIZE)
}

fn entries(options: &LoadOptions) -> u32 {
    (u32::from(options.depth()) + 1).next_power_of_two().max(64)
}

/// Allocates memory for all data, lists and rings.
pub(super) fn memory(options: &LoadOptions) -> Result<GuestMemory, LoadError> {
    if options.size > 1 << 30 {
        return Err(LoadError::Options(format!(
            "--size {} is more than 1 GiB",
            options.size
        )));
    }
    let slots = usize::from(options.queues) * usize::from(options.depth());
    let lists = (stride(options) / PAGE_SIZE * 8).next_multiple_of(PAGE_SIZE) + PAGE_SIZE;
    let rings = usize::from(options.queues) * (entries(options) as usize * 80 + 2 * PAGE_SIZE);
    let data = slots * (stride(options) + lists);
    // The data of each queue starts at a huge page.
    let alignment = (usize::from(options.queues) + 2) * HUGE_PAGE;
    let len = (data + rings + alignment).next_multiple_of(HUGE_PAGE);
    Ok(GuestMemory::new(&[(MEMORY_BASE, len as u64)])?)
}

/// Creates the interrupt vectors; `None` if completions are polled.
pub(super) fn vectors(options: &LoadOptions) -> Result<Option<Vectors>, LoadError> {
    if !options.interrupts {
        return Ok(None);
    }
    let vectors = (0..=options.queues)
        .map(|_| Interrupt::new().map(Arc::new))
        .collect::<Result<_, _>>()
        .map_err(|source| LoadError::System {
            what: "Making eventfds",
            source,
        })?;
    Ok(Some(vectors))
}

/// Enables the controller with the requested doorbell mode, and adapts the options to the namespace.
pub(super) fn bring_up(
    bar: Arc<dyn Bar>,
    memory: GuestMemory,
    options: &LoadOptions,
) -> Result<(Controller, LoadTarget), LoadError> {
    let config = |doorbells| Config {
        doorbells,
        admin_timeout: ADMIN_TIMEOUT,
        ..Config::default()
    };
    let attach = |mode| {
        Controller::attach(
            Arc::clone(&bar),
            memory.clone(),
            config(mode),
            options.queues,
        )
    };
    let (mut controller, doorbells) = match options.doorbells.doorbell_mode() {
        Some(mode) => (attach(mode)?, mode),
        None => {
            let controller = attach(DoorbellMode::Trap)?;
            if controller.identity()?.doorbell_buffer() {
                (attach(DoorbellMode::Shadow)?, DoorbellMode::Shadow)
            } else if !bar.doorbell_windows().is_empty() {
                (attach(DoorbellMode::Mapped)?, DoorbellMode::Mapped)
            } else {
                (controller, DoorbellMode::Trap)
            }
        }
    };
    let namespace = controller.identify_namespace(NSID)?;
    let identity = controller.identity()?;
    let block_size = u64::from(namespace.block_size);
    let capacity = namespace.nsze * block_size;
    let range = options.range.unwrap_or(capacity);
    let target = LoadTarget {
        model: identity.model.clone(),
        capacity,
        block_size: namespace.block_size as usize,
        blocks_per_command: u32::try_from(options.size / block_size.max(1)).unwrap_or(u32::MAX),
        positions: range / options.size,
        doorbells,
        ticks_per_second: Calibration::start().ticks_per_second(),
    };
    let max_transfer = identity.max_transfer().min(65536 * block_size as usize);
    check(&target, range, max_transfer, options)?;
    if entries(options) > controller.cap().max_queue_entries() {
        return Err(LoadError::Options(format!(
            "--qd {} needs queues of {} entries, and the controller allows {}",
            options.qd,
            entries(options),
            controller.cap().max_queue_entries()
        )));
    }
    Ok((controller, target))
}

/// Checks that the options contradict neither the namespace nor each other.
fn check(
    target: &LoadTarget,
    range: u64,
    max_transfer: usize,
    options: &LoadOptions,
) -> Result<(), LoadError> {
    let wrong = |text: String| Err(LoadError::Options(text));
    let size = options.size;
    if !size.is_multiple_of(target.block_size as u64) {
        return wrong(format!(
            "--size {size} is not a multiple of the logical block size, {}",
            target.block_size
        ));
    }
    if options.transfer() > max_transfer {
        return wrong(format!(
            "--size {size} is above the controller's limit for a command, {max_transfer}"
        ));
    }
    if range > target.capacity {
        return wrong(format!(
            "--range {range} is above the namespace's capacity, {}",
            target.capacity
        ));
    }
    let queues = u64::from(options.queues);
    let apart = options.verify || options.pattern == AccessPattern::Sequential;
    let needed = match (options.verify, apart) {
        // There are twice as many positions as commands, so that a position without a command always exists.
        (true, _) => queues * 2 * u64::from(options.depth()),
        (false, true) => queues,
        (false, false) => 1,
    };
    if target.positions < needed {
        return wrong(format!(
            "The range has capacity for {} commands, but the load needs {needed}",
            target.positions
        ));
    }
    let own_threads = options.interrupts || options.pause_us.is_some();
    if own_threads && options.threads.is_some_and(|n| n < options.queues) {
        return wrong("--interrupts and --pause-us need a thread for each queue".to_owned());
    }
    Ok(())
}

/// Creates queue pairs and prepares their slots.
pub(super) fn lanes(
    controller: &mut Controller,
    target: &LoadTarget,
    vectors: Option<&[Arc<Interrupt>]>,
    options: &LoadOptions,
) -> Result<Vec<Lane>, LoadError> {
    let memory = controller.memory().clone();
    let depth = usize::from(options.depth());
    let mut lanes = Vec::with_capacity(usize::from(options.queues));
    for id in 1..=options.queues {
        let interrupt = vectors.map(|vectors| (id, Arc::clone(&vectors[usize::from(id)])));
        let queue_options = QueueOptions {
            entries: entries(options),
            interrupt,
        };
        let queue = controller.create_queue_pair(id, &queue_options)?;
        let stride = stride(options);
        let buffer = memory.alloc_aligned(depth * stride, HUGE_PAGE)?;
        let mut lists = Vec::new();
        let mut entries = Vec::with_capacity(depth);
        for slot in 0..depth {
            let prepared = prp::buffer(&buffer, slot * stride, options.transfer())?;
            let sqe = Sqe::read(NSID, 0, target.blocks_per_command);
            entries.push(sqe.with_data(prepared.pointer));
            lists.extend(prepared.pages);
        }
        lanes.push(Lane::new(queue, entries, buffer, stride, lists));
    }
    Ok(lanes)
}

//! A malicious guest, which puts random values into every field. Its neighbours must not notice it, and the host must
//! survive it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nvme_mpt_memory::clock;
use nvme_mpt_tests::bar::Bar;
use nvme_mpt_tests::controller::{Config, Controller, QueueOptions};
use nvme_mpt_tests::doorbell::{DoorbellMode, Side};
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::queue::{QueuePair, SQE_SIZE};
use nvme_mpt_tests::rng::Rng;

use crate::registers::BLOCKS;

/// Entries of the guest's queues.
const ENTRIES: u32 = 16;

/// Attaches repeatedly, and does things that no driver does.
///
/// # Panics
/// The controller does not become ready, although the drive cannot fail.
pub(crate) fn run(
    bar: &Arc<dyn Bar>,
    memory: &GuestMemory,
    doorbells: DoorbellMode,
    may_fail: bool,
    mut rng: Rng,
) {
    for _ in 0..1 + rng.below(4) {
        let config = Config {
            doorbells,
            admin_timeout: Duration::from_secs(60),
            ..Config::default()
        };
        // Earlier actions may have made the controller fail, from which a reset recovers it.
        let controller = Controller::attach(bar.clone(), memory.clone(), config, 2);
        let mut controller = match controller {
            Ok(controller) => controller,
            Err(_) if may_fail => continue,
            Err(error) => panic!("a hostile guest does not attach: {error}"),
        };
        let options = QueueOptions::polled(ENTRIES);
        let Ok(mut queue) = controller.create_queue_pair(1, &options) else {
            continue;
        };
        for _ in 0..rng.below(60) {
            misbehave_once(&controller, &mut queue, &mut rng);
            let bits = rng.below(18);
            clock::sleep(Duration::from_nanos(rng.below(2 << bits)));
        }
    }
}

fn misbehave_once(controller: &Controller, queue: &mut QueuePair, rng: &mut Rng) {
    let entry = |rng: &mut Rng| {
        let mut words: [u64; SQE_SIZE / 8] = std::array::from_fn(|_| rng.next_u64());
        // Opcode and namespace are often valid, so that the checks of addresses and lengths are reached.
        let opcode = [0, 1, 2, 8, 9, 0x19, rng.below(256)][rng.below(7) as usize];
        let nsid = [1, 1, 1, rng.next_u64() >> 32][rng.below(4) as usize];
        words[0] = opcode | rng.below(1 << 16) << 16 | nsid << 32;
        let pages = [
            rng.below(4 << 20),
            rng.next_u64(),
            queue.sq.memory().gpa(),
            queue.cq.memory().gpa(),
        ];
        words[3] = pages[rng.below(4) as usize];
        words[4] = pages[rng.below(4) as usize];
        words[5] = [rng.below(2 * BLOCKS as u64), rng.next_u64()][rng.below(2) as usize];
        words[6] = rng.below(64) | rng.below(2) << 26;
        words.map(u64::to_le_bytes).concat()
    };
    match rng.below(4) {
        0 => {
            let value = [rng.below(u64::from(2 * ENTRIES)), rng.next_u64()][rng.below(2) as usize];
            let side = [Side::SqTail, Side::CqHead][rng.below(2) as usize];
            ring(controller, rng.below(4) as u16, side, value as u32);
        }
        1 => {
            // Overwrites an entry of the ring without ringing the doorbell.
            let bytes = entry(rng);
            let at = rng.below(u64::from(ENTRIES)) as usize * SQE_SIZE;
            queue.sq.memory().write(at, &bytes);
        }
        _ => {
            for index in 0..ENTRIES as usize {
                let bytes = entry(rng);
                queue.sq.memory().write(index * SQE_SIZE, &bytes);
            }
            let tail = rng.below(u64::from(ENTRIES)) as u32;
            ring(controller, 1, Side::SqTail, tail);
            // Consumes a random number of completions, or none.
            while rng.below(2) == 0 && queue.cq.poll().is_some() {}
            ring(controller, 1, Side::CqHead, queue.cq.head());
        }
    }
}

fn ring(controller: &Controller, queue: u16, side: Side, value: u32) {
    if let Some(buffer) = controller.doorbell_buffer()
        && let Some((shadow, event_idx)) = buffer.cells(queue, side)
    {
        shadow[0].store(value, Ordering::Release);
        event_idx[0].store(value, Ordering::Release);
    }
    controller.write_doorbell(queue, side, value);
}

//! The lower bound of work for a memory drive: a loop that copies random blocks.

use std::hint::black_box;
use std::time::{Duration, Instant};

use integration::checks::{Failure, with_path};
use nvme_mpt_memory::processors::pin_current_thread;

use super::{DRIVE, SERVER};

/// Number of buffers that the loop copies to in turn, as a guest with as many commands in flight.
const BUFFERS: usize = 128;
/// Number of copies between two reads of the clock.
const BATCH: usize = 1024;

/// Returns the number of copies per second on the processor of the servers.
pub(crate) fn per_second(size: usize, seconds: u32) -> Result<f64, Failure> {
    let copied = std::thread::spawn(move || {
        pin_current_thread(SERVER).map_err(with_path("the thread's processors"))?;
        Ok::<_, Failure>(copy(size, seconds))
    });
    copied.join().map_err(|_| "The loop panicked")?
}

fn copy(size: usize, seconds: u32) -> f64 {
    let source: Vec<u8> = (0..DRIVE).map(|at| (at / 7) as u8).collect();
    let mut buffers = vec![1_u8; BUFFERS * size];
    let blocks = source.len() / size;
    let mut random = 1_u64;
    let (mut copies, started) = (0_u64, Instant::now());
    let end = Duration::from_secs(u64::from(seconds));
    while started.elapsed() < end {
        for turn in 0..BATCH {
            // Xorshift: cheap, and unpredictable for the processor's prefetchers.
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let from = (random as usize % blocks) * size;
            let to = (turn % BUFFERS) * size;
            buffers[to..to + size].copy_from_slice(&source[from..from + size]);
            black_box(&mut buffers);
        }
        copies += BATCH as u64;
    }
    copies as f64 / started.elapsed().as_secs_f64()
}

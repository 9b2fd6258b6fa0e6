//! Work of a guest with overlapping reads and writes. The model treats each block as a register.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nvme_mpt_tests::command::{DSM_DEALLOCATE, Sqe, dsm_range, io};
use nvme_mpt_tests::registers::CC_CSS_NVM;
use nvme_mpt_tests::rng::Rng;

use crate::guest::{CommandEnd, Data, Work};
use crate::history::{BLOCK, History};

/// Number of blocks that a guest uses. It is small, so that commands overlap.
pub(crate) const BLOCKS: usize = 96;

/// Maximum number of blocks of a command.
pub(crate) const BLOCKS_MAX: u64 = 12;

/// Model of the blocks, with all values that were written.
#[derive(Debug)]
pub(crate) struct Registers(Arc<Mutex<History>>);

/// A command on blocks.
#[derive(Debug)]
pub(crate) struct Command {
    opcode: u8,
    slba: u64,
    blocks: u64,
    /// Values written to the blocks, one for each block.
    values: Vec<u64>,
}

impl Registers {
    /// Creates work on blocks that are all zeroes.
    pub(crate) fn new(guest: u64) -> Self {
        Self::with_history(Arc::new(Mutex::new(History::new(guest, BLOCKS))))
    }

    /// Creates work on blocks that have the history of a previous guest.
    pub(crate) fn with_history(history: Arc<Mutex<History>>) -> Self {
        Self(history)
    }

    fn history(&self) -> MutexGuard<'_, History> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the contents of a block that has a value.
pub(crate) fn bytes_of(value: u64) -> Vec<u8> {
    [value.to_le_bytes(); BLOCK / 8].concat()
}

/// Returns the value of a block with these contents.
///
/// # Panics
/// The contents are a mixture of several values.
pub(crate) fn value_of(block: u64, bytes: &[u8]) -> u64 {
    let (words, _) = bytes.as_chunks::<8>();
    let value = u64::from_le_bytes(words[0]);
    assert!(
        words.iter().all(|word| u64::from_le_bytes(*word) == value),
        "block {block} is torn: {words:x?}"
    );
    value
}

impl Work for Registers {
    type Command = Command;

    const COMMAND_SETS: u32 = CC_CSS_NVM;

    fn choose(&mut self, rng: &mut Rng) -> Command {
        let opcode = match rng.below(16) {
            0..7 => io::READ,
            7..13 => io::WRITE,
            13 => io::FLUSH,
            14 => io::WRITE_ZEROES,
            _ => io::DATASET_MANAGEMENT,
        };
        let mut history = self.history();
        let blocks = 1 + rng.below(BLOCKS_MAX);
        let slba = rng.below(history.blocks() - blocks);
        let values = match opcode {
            io::WRITE => (slba..slba + blocks)
                .map(|block| history.value(block))
                .collect(),
            io::WRITE_ZEROES | io::DATASET_MANAGEMENT => vec![0; blocks as usize],
            _ => Vec::new(),
        };
        Command {
            opcode,
            slba,
            blocks,
            values,
        }
    }

    fn to_sqe(&self, command: &Command) -> (Sqe, Data) {
        let Command {
            opcode,
            slba,
            blocks,
            ref values,
        } = *command;
        let count = blocks as u32;
        match opcode {
            io::READ => {
                let data = Data::In(blocks as usize * BLOCK);
                (Sqe::read(1, slba, count), data)
            }
            io::WRITE => {
                let data = values.iter().flat_map(|value| bytes_of(*value)).collect();
                (Sqe::write(1, slba, count), Data::Out(data))
            }
            io::WRITE_ZEROES => (Sqe::write_zeroes(1, slba, count, false), Data::None),
            io::DATASET_MANAGEMENT => {
                let sqe = Sqe::new(opcode, 1).with_cdw(11, DSM_DEALLOCATE);
                (sqe, Data::Out(dsm_range(slba, count).to_vec()))
            }
            _ => (Sqe::flush(1), Data::None),
        }
    }

    fn begin(&mut self, command: &mut Command, now: Duration) {
        let mut history = self.history();
        for (block, value) in (command.slba..).zip(&command.values) {
            history.begin(block, *value, now);
        }
    }

    fn end(&mut self, command: Command, end: &CommandEnd<'_>) {
        let Command {
            opcode,
            slba,
            values,
            ..
        } = command;
        if let Some(cqe) = end.cqe {
            assert!(
                end.has_succeeded() || end.is_excused,
                "opcode {opcode:#x} failed: {cqe:?}"
            );
            // These commands return no result in dword 0.
            assert_eq!(cqe.result, 0, "opcode {opcode:#x}: {cqe:?}");
        }
        let mut history = self.history();
        if opcode == io::READ && end.has_succeeded() {
            for (block, bytes) in (slba..).zip(end.data.chunks_exact(BLOCK)) {
                if let Err(error) = history.judge(block, value_of(block, bytes), end.began) {
                    panic!("{error}");
                }
            }
        }
        // Deallocate is a hint, so the blocks may keep their contents.
        let sure = end.has_succeeded() && opcode != io::DATASET_MANAGEMENT;
        for (block, _) in (slba..).zip(&values) {
            history.end(block, end.began, end.now, sure);
        }
    }

    fn verification_commands(&self) -> Vec<Command> {
        let count = self.history().blocks();
        let starts = (0..count).step_by(BLOCKS_MAX as usize);
        starts
            .map(|slba| Command {
                opcode: io::READ,
                slba,
                blocks: BLOCKS_MAX.min(count - slba),
                values: Vec::new(),
            })
            .collect()
    }
}

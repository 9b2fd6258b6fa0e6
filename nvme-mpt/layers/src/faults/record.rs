//! Record of a drive's faults in a memory file, for a successor process.
//!
//! The first word has the offset of the present list of faults. The file has space for two lists: a changed list is written to
//! the unused space, and then the first word is updated. Further words hold the state of each fault and of the drive. The state
//! of a fault is stored before the fault takes effect. So a fault that aborts the process is already counted when the successor
//! starts.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::ArmedFault;
use super::plan::{FaultEffect, FaultOperationSet, FaultProbability, MAX_FAULTS, PlannedFault};
use super::schedule::FaultSchedule;
use nvme_lease::range::ByteRange;
use nvme_models::TimeSpan;
use nvme_mpt_memory::{MappedWord64, Mapping, MappingAccess};

/// Size of the file in bytes.
const FILE_BYTES: usize = 4096 + 2 * LIST_BYTES;

/// Offsets of the two parts of the file that can store the list of faults. A list begins with its length.
const LIST_OFFSETS: [u64; 2] = [4096, 4096 + LIST_BYTES as u64];

/// Size of a part, and so the maximum size of a list in bytes. A fault takes several hundred bytes.
const LIST_BYTES: usize = 64 << 10;

/// Offsets of the drive's state: a word that is 1 if the drive was removed, and the number of blocks.
const GONE_OFFSET: usize = 8;
const BLOCKS_OFFSET: usize = 16;

/// Offset of the state of the first fault; the number of words per fault follows.
const FAULTS_OFFSET: usize = 64;
const FAULT_WORDS: usize = 3;
const _: () = assert!(FAULTS_OFFSET + 8 * FAULT_WORDS * MAX_FAULTS <= 4096);

/// A fault, in the form in which it is recorded.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RecordedFault {
    effect: RecordedEffect,
    operations: u32,
    range: Option<ByteRange>,
    probability: u64,
    after: u64,
    count: Option<u64>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum RecordedEffect {
    MediaError,
    /// Delay in nanoseconds.
    Latency(u64),
    Lost,
    Fatal,
    Removal,
    /// Size in bytes.
    Resize(u64),
    Crash,
}

impl From<&PlannedFault> for RecordedFault {
    fn from(fault: &PlannedFault) -> Self {
        let PlannedFault {
            effect,
            operations: FaultOperationSet(operations),
            range,
            probability: FaultProbability(probability),
            after,
            count,
        } = *fault;
        let effect = match effect {
            FaultEffect::MediaError => RecordedEffect::MediaError,
            FaultEffect::Latency(TimeSpan(nanoseconds)) => RecordedEffect::Latency(nanoseconds),
            FaultEffect::Lost => RecordedEffect::Lost,
            FaultEffect::Fatal => RecordedEffect::Fatal,
            FaultEffect::Removal => RecordedEffect::Removal,
            FaultEffect::Resize(bytes) => RecordedEffect::Resize(bytes),
            FaultEffect::Crash => RecordedEffect::Crash,
        };
        Self {
            effect,
            operations,
            range,
            probability,
            after,
            count,
        }
    }
}

impl From<RecordedFault> for PlannedFault {
    fn from(recorded: RecordedFault) -> Self {
        let effect = match recorded.effect {
            RecordedEffect::MediaError => FaultEffect::MediaError,
            RecordedEffect::Latency(nanoseconds) => FaultEffect::Latency(TimeSpan(nanoseconds)),
            RecordedEffect::Lost => FaultEffect::Lost,
            RecordedEffect::Fatal => FaultEffect::Fatal,
            RecordedEffect::Removal => FaultEffect::Removal,
            RecordedEffect::Resize(bytes) => FaultEffect::Resize(bytes),
            RecordedEffect::Crash => FaultEffect::Crash,
        };
        Self {
            effect,
            operations: FaultOperationSet(recorded.operations),
            range: recorded.range,
            probability: FaultProbability(recorded.probability),
            after: recorded.after,
            count: recorded.count,
        }
    }
}

/// Faults and state that a predecessor recorded.
pub(super) struct RecordedFaults {
    /// Faults, each with the state of its random number generator and its schedule.
    pub(super) faults: Vec<(PlannedFault, u64, FaultSchedule)>,
    pub(super) is_gone: bool,
    pub(super) blocks: u64,
}

#[derive(Debug)]
pub(super) struct FaultRecord {
    file: File,
    current_list: MappedWord64,
    gone: MappedWord64,
    blocks: MappedWord64,
    faults: Box<[[MappedWord64; FAULT_WORDS]]>,
}

impl FaultRecord {
    /// Opens the record in a memory file, which must be empty at first. Also returns the faults that a predecessor recorded;
    /// `None` for a new file.
    pub(super) fn open(file: &OwnedFd) -> io::Result<(Self, Option<RecordedFaults>)> {
        let file = File::from(file.try_clone()?);
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "no record of faults");
        let len = file.metadata()?.len();
        if len == 0 {
            file.set_len(FILE_BYTES as u64)?;
        } else if len != FILE_BYTES as u64 {
            return Err(invalid());
        }
        let mapping = Arc::new(Mapping::shared(
            file.as_fd(),
            0,
            4096,
            MappingAccess::ReadWrite,
        )?);
        let word = |offset: usize| MappedWord64::new(&mapping, offset).ok_or_else(invalid);
        let of_fault = |fault: usize| {
            let first = FAULTS_OFFSET + 8 * FAULT_WORDS * fault;
            Ok([word(first)?, word(first + 8)?, word(first + 16)?])
        };
        let faults = (0..MAX_FAULTS).map(of_fault);
        let record = Self {
            current_list: word(0)?,
            gone: word(GONE_OFFSET)?,
            blocks: word(BLOCKS_OFFSET)?,
            faults: faults.collect::<io::Result<_>>()?,
            file,
        };
        let recorded = match record.current_list.load() {
            0 => None,
            place if LIST_OFFSETS.contains(&place) => Some(record.read_list(place)?),
            _ => return Err(invalid()),
        };
        Ok((record, recorded))
    }

    fn read_list(&self, place: u64) -> io::Result<RecordedFaults> {
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "a damaged record of faults");
        let mut len = [0; 8];
        self.file.read_exact_at(&mut len, place)?;
        let len = usize::try_from(u64::from_le_bytes(len)).ok();
        let len = len.filter(|len| *len <= LIST_BYTES - 8);
        let mut text = vec![0; len.ok_or_else(invalid)?];
        self.file.read_exact_at(&mut text, place + 8)?;
        let list: Vec<RecordedFault> = serde_json::from_slice(&text)?;
        if list.len() > MAX_FAULTS {
            return Err(invalid());
        }
        let faults = list.into_iter().map(PlannedFault::from).zip(&self.faults);
        let faults = faults.map(|(fault, words)| {
            let [random, seen, hits] = words.each_ref().map(MappedWord64::load);
            let schedule = FaultSchedule::with_progress(fault.after, fault.count, seen, hits);
            (fault, random, schedule)
        });
        Ok(RecordedFaults {
            faults: faults.collect(),
            is_gone: self.gone.load() != 0,
            blocks: self.blocks.load(),
        })
    }

    /// Records the list of faults, with the state of each fault.
    pub(super) fn store_list(&self, armed: &[ArmedFault]) -> io::Result<()> {
        let list: Vec<_> = armed
            .iter()
            .map(|armed| RecordedFault::from(&armed.fault))
            .collect();
        let text = serde_json::to_vec(&list)?;
        if text.len() > LIST_BYTES - 8 {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        for (index, armed) in armed.iter().enumerate() {
            self.store_fault(index, armed);
        }
        let [first, second] = LIST_OFFSETS;
        let place = if self.current_list.load() == first {
            second
        } else {
            first
        };
        self.file.write_all_at(&text, place + 8)?;
        let len = text.len() as u64;
        self.file.write_all_at(&len.to_le_bytes(), place)?;
        self.current_list.store(place);
        Ok(())
    }

    /// Records the state of a fault.
    pub(super) fn store_fault(&self, index: usize, armed: &ArmedFault) {
        let Some([random, seen, hits]) = self.faults.get(index) else {
            return;
        };
        random.store(armed.rng_state);
        seen.store(armed.schedule.seen());
        hits.store(armed.schedule.hits());
    }

    /// Records the state of the drive.
    pub(super) fn store_drive(&self, gone: bool, blocks: u64) {
        self.blocks.store(blocks);
        self.gone.store(gone.into());
    }
}

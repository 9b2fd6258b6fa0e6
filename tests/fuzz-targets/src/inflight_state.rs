//! In-flight tracking and guest memory with arbitrary contents. The function's owner can write the first, and the guest the
//! second.
//!
//! The input is split into these pieces, and missing bytes are zero:
//!
//! | bytes | |
//! |---|---|
//! | 1 | choices, see below |
//! | 3 | entries of the Completion Queue and of both Submission Queues, less 2 |
//! | 6 | doorbells: tail of the first Submission Queue, head of the Completion Queue, tail of the second |
//! | 2 * 128 | positions of both queue pairs |
//! | 16 * 64 | records of the first queue pair's slots |
//! | 16 * 16 | entries of the Completion Queue |
//! | 2 * 16 * 64 | entries of both Submission Queues |
//! | remaining | the guest's data |
//!
//! Choices: bit 0 adds the second Submission Queue, bit 1 puts the doorbells into a Doorbell Buffer, bit 2 connects the
//! queue to an interrupt, bit 3 revokes the lease, and bit 4 lays 16 further bytes over the beginning of the file, ahead of
//! the data.
//!
//! The in-flight tracking must be refused, or its queues must continue. If they continue, no more commands may complete
//! than the Completion Queue has entries, and it must be possible to save and restore the state again.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::LazyLock;

use nvme_guest::inflight::InflightFile;
use nvme_guest::{
    CqConfig, DoorbellBuffer, DoorbellMode, DoorbellPage, EventReader, Gpa, LifecycleBackend,
    MemoryBackend, MemoryRegion, PersistedBackendParts, PersistedQueues, SqConfig,
};
use nvme_mpt::{LocalBackend, LocalBackendError, SharedBackendPartsSource};
use nvme_mpt_memory::memfd;
use nvme_spec::ids::QueueId;
use nvme_spec::registers::Doorbell;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::{Host, Input, QUEUE_PAIRS};

const PAGE: u64 = 4096;
const FIRST: QueueId = QueueId(1);
const SECOND: QueueId = QueueId(2);
/// Maximum number of entries of a queue.
const ENTRIES: u8 = 16;
/// Layout of guest memory.
const CQ: u64 = PAGE;
const SQS: [u64; 2] = [2 * PAGE, 3 * PAGE];
const BUFFER: DoorbellBuffer = DoorbellBuffer {
    shadow: Gpa(4 * PAGE),
    event_idx: Gpa(5 * PAGE),
};
const DATA: u64 = 6 * PAGE;
const MEMORY: u64 = 16 * PAGE;
/// Number of bytes that the positions of a queue pair use.
const POSITIONS: usize = 128;
/// Number of polls after which no work must be left: each poll takes all commands, and the drive completes them
/// immediately.
const POLLS: usize = 64;

static HOST: LazyLock<Host> = LazyLock::new(Host::open);

/// Files that the previous process left behind.
struct LeftFiles {
    memory: File,
    inflight: OwnedFd,
    doorbells: DoorbellPage,
}

impl LeftFiles {
    fn new(
        mode: DoorbellMode,
        queues: &PersistedQueues,
        input: &mut Input<'_>,
        choices: u8,
    ) -> Self {
        let memory = File::from(memfd(c"guest", MEMORY).expect("memory"));
        let doorbells = DoorbellPage::new(mode, nvme_guest::DoorbellStride::default(), QUEUE_PAIRS)
            .expect("memory");
        let numbers = [
            Doorbell::SqTail(FIRST),
            Doorbell::CqHead(FIRST),
            Doorbell::SqTail(SECOND),
        ];
        for doorbell in numbers {
            let value = u32::from(input.number());
            doorbells.store(doorbell, value);
            if queues.doorbell_buffer.is_some() {
                let place = BUFFER.shadow.0 + doorbell.offset(doorbells.dstrd());
                write(&memory, place, &value.to_le_bytes());
            }
        }

        let inflight = InflightFile::new(QUEUE_PAIRS).expect("memory");
        let inflight = inflight.fd().try_clone_to_owned().expect("a descriptor");
        let file = share(inflight.as_fd());
        let len = file.metadata().expect("a file").len();
        let pair = (len - PAGE) / u64::from(QUEUE_PAIRS);
        for index in 0..2 {
            write(&file, PAGE + index * pair, input.piece(POSITIONS));
        }
        write(&file, 2 * PAGE, input.piece(usize::from(ENTRIES) * 64));
        write(&memory, CQ, input.piece(usize::from(ENTRIES) * 16));
        for sq in SQS {
            write(&memory, sq, input.piece(usize::from(ENTRIES) * 64));
        }
        if choices & 16 != 0 {
            write(&file, 0, input.piece(16));
        }
        write(&memory, DATA, input.piece((MEMORY - DATA) as usize));
        Self {
            memory,
            inflight,
            doorbells,
        }
    }

    /// Creates the local back end of the next process, with guest memory mapped.
    fn attach(&self, mode: DoorbellMode) -> Result<LocalBackend, LocalBackendError> {
        let parts = SharedBackendPartsSource::Persisted(
            PersistedBackendParts {
                doorbells: share(self.doorbells.fd()).into(),
                inflight: share(self.inflight.as_fd()).into(),
                events: EventFd::new(EFD_NONBLOCK).expect("eventfd"),
            },
            EventReader::Trusted,
        );
        let local_backend = HOST.open_local_backend(mode, parts)?;
        let region = MemoryRegion {
            gpa: Gpa(0),
            len: MEMORY,
            fd: share(self.memory.as_fd()).into(),
            offset: 0,
            readable: true,
            writable: true,
        };
        MemoryBackend::map(&local_backend, region).expect("memory");
        Ok(local_backend)
    }
}

fn share(fd: BorrowedFd<'_>) -> File {
    File::from(fd.try_clone_to_owned().expect("a descriptor"))
}

fn write(file: &File, at: u64, bytes: &[u8]) {
    file.write_all_at(bytes, at).expect("memory");
}

/// Returns the queues that the guest has created.
fn queues(choices: u8, input: &mut Input<'_>) -> PersistedQueues {
    let mut entries = || u32::from(input.byte() % (ENTRIES - 1)) + 2;
    let cq = CqConfig {
        qid: FIRST,
        base: Gpa(CQ),
        entries: entries(),
        vector: (choices & 4 != 0).then_some(1),
    };
    let mut sqs: Vec<_> = [FIRST, SECOND]
        .into_iter()
        .zip(SQS)
        .map(|(qid, base)| SqConfig {
            qid,
            cqid: FIRST,
            base: Gpa(base),
            entries: entries(),
        })
        .collect();
    sqs.truncate(usize::from(choices & 1) + 1);
    PersistedQueues {
        cqs: vec![cq],
        sqs,
        doorbell_buffer: (choices & 2 != 0).then_some(BUFFER),
        revoked: choices & 8 != 0,
    }
}

/// Checks the state of a paused back end.
fn check(local_backend: &LocalBackend, queues: &PersistedQueues) {
    let state = LifecycleBackend::save(local_backend).expect("paused");
    LifecycleBackend::check_state(local_backend, &state).expect("a state as any other");
    assert_eq!(PersistedQueues::from_state(&state), *queues);
}

/// Polls the queue until no work is left.
fn work(local_backend: &LocalBackend, queues: &PersistedQueues) {
    let mut queue = local_backend.take_queue(FIRST).expect("the queue");
    for _ in 0..POLLS {
        queue.poll();
    }
    local_backend.return_queue(queue).expect("it is known");
    // The Completion Queue's head advances at most once, to the value of its doorbell. So each entry is used at most once
    // before this and once afterwards.
    let done: u64 = local_backend
        .stats()
        .queues
        .iter()
        .map(|queue| queue.commands)
        .sum();
    let capacity = u64::from(queues.cqs[0].entries) - 1;
    assert!(
        done <= 2 * capacity,
        "{done} completions, room for {capacity}"
    );
}

/// Restores the state in a new local back end. Returns whether the state was accepted.
fn restore_queues(left: &LeftFiles, mode: DoorbellMode, queues: &PersistedQueues) -> bool {
    let local_backend = match left.attach(mode) {
        Ok(local_backend) => local_backend,
        Err(error) => {
            assert!(matches!(error, LocalBackendError::Io(_)), "{error}");
            return false;
        }
    };
    // Paused, so that no poller runs the queues before the state is checked.
    LifecycleBackend::pause(&local_backend).expect("idle");
    if let Err(error) = LifecycleBackend::restore_running(&local_backend, queues) {
        assert!(!error.to_string().is_empty());
        let state = LifecycleBackend::save(&local_backend).expect("paused");
        assert!(state.queues.is_empty(), "a queue is left");
        return false;
    }
    check(&local_backend, queues);
    LifecycleBackend::resume(&local_backend);
    work(&local_backend, queues);
    LifecycleBackend::pause(&local_backend).expect("nothing takes long");
    check(&local_backend, queues);
    true
}

/// Runs one input.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    let choices = input.byte();
    let queues = queues(choices, &mut input);
    let mode = match queues.doorbell_buffer {
        Some(_) => DoorbellMode::Shadow,
        None => DoorbellMode::Trap,
    };
    let left = LeftFiles::new(mode, &queues, &mut input, choices);
    if restore_queues(&left, mode, &queues) {
        // By now, entries in guest memory may look like further completions, so the state may be refused.
        restore_queues(&left, mode, &queues);
    }
}

//! Persisted state of a function whose process has ended, with arbitrary changes.
//!
//! A guest may have crashed the process, or another program may have written the state.
//!
//! A guest enables its controller, creates queues and uses them. Then the process ends. The input describes changes to the
//! state before the next process restores the function. Its first byte chooses the doorbell mode. The remaining bytes are a
//! list of changes:
//!
//! | first byte, modulo 6 | what follows | change |
//! |---|---|---|
//! | 0 | leaf in 2 bytes, number in 8 | a leaf of the state gets this number |
//! | 1 | leaf in 2 bytes, number in 2 | the same |
//! | 2 | leaf in 2 bytes | a leaf becomes null, or a Boolean is inverted |
//! | 3 | list, place | an element of a list is duplicated |
//! | 4 | list, place | an element of a list is removed |
//! | 5 | file, offset / 8 in 2 bytes, length, bytes | the doorbells, the in-flight tracking or guest memory get these bytes |
//!
//! The state is a JSON tree. Leaves and lists are numbered in the tree's order, without the facts.
//!
//! The state must be refused without changes to the function, or be restored. If it is restored, the state of the restored
//! function must be restorable, too. After the guest resets the controller, it must work as after power-on.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use nvme_guest::inflight::InflightFile;
use nvme_guest::{DoorbellMode, DoorbellPage, Gpa, MemoryRegion, PersistedBackendFiles};
use nvme_mpt::{LocalBackendError, SharedBackendPartsSource};
use nvme_mpt_memory::memfd;
use nvme_spec::ids::QueueId;
use nvme_spec::registers::Doorbell;
use serde_json::{Value, json};
use vmm_device::{Bar, FunctionState, MsixMasking, NvmeFunction};

use crate::{Host, Input, QUEUE_PAIRS};

const MODES: [DoorbellMode; 3] = [
    DoorbellMode::Shadow,
    DoorbellMode::Mapped,
    DoorbellMode::Trap,
];

const PAGE: u64 = 4096;
/// Layout of guest memory.
const ADMIN_SQ: u64 = PAGE;
const ADMIN_CQ: u64 = 2 * PAGE;
const CQ: u64 = 3 * PAGE;
const SQS: [u64; 2] = [4 * PAGE, 5 * PAGE];
const SHADOW: u64 = 6 * PAGE;
const EVENT_IDX: u64 = 7 * PAGE;
const DATA: u64 = 8 * PAGE;
const MEMORY: u64 = 16 * PAGE;

/// Number of entries of each queue.
const ENTRIES: u32 = 8;
/// Feature identifier of Number of Queues.
const NUMBER_OF_QUEUES: u32 = 7;

static HOST: LazyLock<Host> = LazyLock::new(Host::open);
/// States that processes left behind, one for each doorbell mode.
static LEFT: LazyLock<[LeftState; 3]> = LazyLock::new(|| MODES.map(LeftState::new));

/// Files of a function that outlive its process: doorbells, in-flight tracking and guest memory.
struct Files([File; 3]);

impl Files {
    fn new(mode: DoorbellMode) -> Self {
        let doorbells = DoorbellPage::new(mode, nvme_guest::DoorbellStride::default(), QUEUE_PAIRS)
            .expect("memory");
        let inflight = InflightFile::new(QUEUE_PAIRS).expect("memory");
        let memory = memfd(c"guest", MEMORY).expect("memory");
        Self([
            share(doorbells.fd()),
            share(inflight.fd()),
            File::from(memory),
        ])
    }

    /// Creates a function in its state after power-on, with these files.
    fn function(&self, mode: DoorbellMode) -> Result<NvmeFunction, LocalBackendError> {
        let [doorbells, inflight, memory] = self.0.each_ref().map(AsFd::as_fd).map(share);
        let parts = SharedBackendPartsSource::Continued(Some(PersistedBackendFiles {
            doorbells: doorbells.into(),
            inflight: inflight.into(),
        }));
        let local_backend = HOST.open_local_backend(mode, parts)?;
        let function = NvmeFunction::new(Arc::new(local_backend), MsixMasking::Client);
        let region = MemoryRegion {
            gpa: Gpa(0),
            len: MEMORY,
            fd: memory.into(),
            offset: 0,
            readable: true,
            writable: true,
        };
        function.backend().map(region).expect("memory");
        Ok(function)
    }

    fn contents(&self) -> [Vec<u8>; 3] {
        self.0.each_ref().map(|file| {
            let mut bytes = vec![0; length(file)];
            file.read_exact_at(&mut bytes, 0).expect("memory");
            bytes
        })
    }

    /// Writes bytes into a file, as far as they lie within its size, which does not change.
    fn write(&self, file: usize, at: usize, bytes: &[u8]) {
        let file = &self.0[file];
        let len = length(file).saturating_sub(at).min(bytes.len());
        file.write_all_at(&bytes[..len], at as u64).expect("memory");
    }
}

fn share(fd: BorrowedFd<'_>) -> File {
    File::from(fd.try_clone_to_owned().expect("a descriptor"))
}

fn length(file: &File) -> usize {
    file.metadata().expect("a file").len() as usize
}

/// State that a process left behind.
struct LeftState {
    contents: [Vec<u8>; 3],
    state: Value,
}

impl LeftState {
    fn new(mode: DoorbellMode) -> Self {
        let files = Files::new(mode);
        let mut guest = Guest::with_function(files.function(mode).expect("new files"));
        guest.enable();
        let queues = u32::from(QUEUE_PAIRS) - 1;
        guest.expect_admin(0x09, [0, 0], [NUMBER_OF_QUEUES, queues << 16 | queues]);
        if mode == DoorbellMode::Shadow {
            guest.expect_admin(0x7C, [SHADOW, EVENT_IDX], [0, 0]);
        }
        guest.create_queues();
        guest.io(0x02);
        guest.io(0x01);
        // The guest does not consume the completion of this command.
        guest.submit_io(0x00);
        // Asynchronous Event Requests stay outstanding, and a vector is masked.
        for _ in 0..2 {
            guest.submit_admin(0x0C, [0, 0], [0, 0]);
        }
        guest.function.write_bar(Bar::Msix, 16 + 12, &[1, 0, 0, 0]);
        guest.function.process_events();
        let state = serde_json::to_value(guest.function.running_state()).expect("JSON");
        drop(guest);
        Self {
            contents: files.contents(),
            state,
        }
    }

    /// Returns new files with the contents that the process left behind.
    fn files(&self, mode: DoorbellMode) -> Files {
        let files = Files::new(mode);
        for (index, content) in self.contents.iter().enumerate() {
            files.write(index, 0, content);
        }
        files
    }
}

/// A guest's driver.
struct Guest {
    function: NvmeFunction,
    admin: Queue,
    io: Queue,
}

/// A queue pair of a driver.
struct Queue {
    qid: QueueId,
    sq: u64,
    cq: u64,
    tail: u32,
    head: u32,
    phase: u16,
}

impl Queue {
    fn new(qid: QueueId, sq: u64, cq: u64) -> Self {
        Self {
            qid,
            sq,
            cq,
            tail: 0,
            head: 0,
            phase: 1,
        }
    }

    /// Submits a command and rings the doorbell: the register, and the Doorbell Buffer if there is one.
    fn submit(
        &mut self,
        function: &mut NvmeFunction,
        opcode: u8,
        dptr: [u64; 2],
        dwords: [u32; 2],
    ) -> u16 {
        let cid = self.tail as u16;
        let mut entry = [0; 64];
        entry[0] = opcode;
        entry[2..4].copy_from_slice(&cid.to_le_bytes());
        entry[4] = u8::from(self.qid != QueueId::ADMIN);
        for (place, pointer) in [24, 32].into_iter().zip(dptr) {
            entry[place..place + 8].copy_from_slice(&pointer.to_le_bytes());
        }
        for (place, dword) in [40, 44].into_iter().zip(dwords) {
            entry[place..place + 4].copy_from_slice(&dword.to_le_bytes());
        }
        write(function, self.sq + u64::from(self.tail) * 64, &entry);
        self.tail = (self.tail + 1) % ENTRIES;
        ring(function, Doorbell::SqTail(self.qid), self.tail);
        cid
    }

    /// Waits for the next completion, and consumes it. Returns its command identifier and status.
    fn complete(&mut self, function: &mut NvmeFunction) -> [u16; 2] {
        let at = Gpa(self.cq + u64::from(self.head) * 16 + 12);
        let mut bytes = [0; 4];
        loop {
            function.process_events();
            function.memory().read(at, &mut bytes).expect("memory");
            if u16::from(bytes[2] & 1) == self.phase {
                break;
            }
            // libFuzzer's timeout ends an endless wait.
            std::thread::sleep(Duration::from_micros(20));
        }
        self.head = (self.head + 1) % ENTRIES;
        self.phase ^= u16::from(self.head == 0);
        let [low, high, status, more] = bytes;
        [
            u16::from_le_bytes([low, high]),
            u16::from_le_bytes([status, more]) >> 1,
        ]
    }

    fn consume(&self, function: &mut NvmeFunction) {
        ring(function, Doorbell::CqHead(self.qid), self.head);
    }
}

fn write(function: &NvmeFunction, at: u64, bytes: &[u8]) {
    function.memory().write(Gpa(at), bytes).expect("memory");
}

fn ring(function: &mut NvmeFunction, doorbell: Doorbell, value: u32) {
    let offset = function.doorbell_offset(doorbell);
    // In a Doorbell Buffer, the doorbell is at the register's offset behind the first doorbell.
    write(function, SHADOW + offset - 0x1000, &value.to_le_bytes());
    function.write_bar(Bar::Registers, offset, &value.to_le_bytes());
    function.process_events();
}

impl Guest {
    fn with_function(function: NvmeFunction) -> Self {
        Self {
            function,
            admin: Queue::new(QueueId::ADMIN, ADMIN_SQ, ADMIN_CQ),
            io: Queue::new(QueueId(1), SQS[0], CQ),
        }
    }

    fn register(&self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.function.read_bar(Bar::Registers, offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn set_register(&mut self, offset: u64, value: u64) {
        let bytes = value.to_le_bytes();
        // ASQ and ACQ have 8 bytes, and the registers before them have 4.
        let size = if offset < 0x28 { 4 } else { 8 };
        self.function
            .write_bar(Bar::Registers, offset, &bytes[..size]);
    }

    /// Enables the disabled controller.
    fn enable(&mut self) {
        // Sets Memory Space Enable and Bus Master Enable.
        let _ = self.function.write_config(0x04, &[6, 0]);
        for queue in [ADMIN_CQ, CQ] {
            write(&self.function, queue, &[0; ENTRIES as usize * 16]);
        }
        let entries = u64::from(ENTRIES) - 1;
        self.set_register(0x24, entries << 16 | entries);
        self.set_register(0x28, ADMIN_SQ);
        self.set_register(0x30, ADMIN_CQ);
        self.set_register(0x14, 0x0046_0001);
        assert_eq!(self.register(0x1C), 1, "CSTS of an enabled controller");
    }

    fn submit_admin(&mut self, opcode: u8, dptr: [u64; 2], dwords: [u32; 2]) -> u16 {
        self.admin.submit(&mut self.function, opcode, dptr, dwords)
    }

    fn expect_admin(&mut self, opcode: u8, dptr: [u64; 2], dwords: [u32; 2]) {
        let cid = self.submit_admin(opcode, dptr, dwords);
        let completion = self.admin.complete(&mut self.function);
        assert_eq!(completion, [cid, 0], "admin command {opcode:#x}");
        self.admin.consume(&mut self.function);
    }

    /// Creates a Completion Queue with an interrupt, and two Submission Queues.
    fn create_queues(&mut self) {
        let size = (ENTRIES - 1) << 16;
        self.expect_admin(0x05, [CQ, 0], [size | 1, 1 << 16 | 3]);
        for (qid, base) in [(1, SQS[0]), (2, SQS[1])] {
            self.expect_admin(0x01, [base, 0], [size | qid, 1 << 16 | 1]);
        }
    }

    fn submit_io(&mut self, opcode: u8) -> u16 {
        self.io
            .submit(&mut self.function, opcode, [DATA, 0], [0, 0])
    }

    fn io(&mut self, opcode: u8) {
        let cid = self.submit_io(opcode);
        let completion = self.io.complete(&mut self.function);
        assert_eq!(completion, [cid, 0], "I/O command {opcode:#x}");
        self.io.consume(&mut self.function);
    }
}

/// Paths to the leaves and lists of a control state.
#[derive(Default)]
struct StatePaths {
    leaves: Vec<String>,
    lists: Vec<String>,
}

impl StatePaths {
    fn of(state: &Value) -> Self {
        let mut places = Self::default();
        places.add(state, String::new());
        places
    }

    fn add(&mut self, value: &Value, at: String) {
        match value {
            Value::Object(fields) => {
                for (name, field) in fields.iter().filter(|(name, _)| *name != "facts") {
                    self.add(field, format!("{at}/{name}"));
                }
            }
            Value::Array(elements) => {
                for (index, element) in elements.iter().enumerate() {
                    self.add(element, format!("{at}/{index}"));
                }
                self.lists.push(at);
            }
            _ => self.leaves.push(at),
        }
    }
}

fn pick(paths: &[String], number: u16) -> &str {
    &paths[usize::from(number) % paths.len()]
}

/// Applies one change of the input.
fn change(input: &mut Input<'_>, state: &mut Value, files: &Files) {
    let kind = input.byte() % 6;
    if kind == 5 {
        let file = usize::from(input.byte() % 3);
        let at = usize::from(input.number()) * 8;
        let length = input.byte();
        return files.write(file, at, input.piece(length.into()));
    }
    let places = StatePaths::of(state);
    if kind > 2 {
        let list = pick(&places.lists, input.byte().into());
        let place = usize::from(input.byte());
        let Some(list) = state.pointer_mut(list).and_then(Value::as_array_mut) else {
            return;
        };
        let place = place.checked_rem(list.len());
        match (kind, place) {
            (3, Some(place)) => list.push(list[place].clone()),
            (3, None) => list.push(json!(0)),
            (_, Some(place)) => drop(list.remove(place)),
            _ => {}
        }
        return;
    }
    let Some(leaf) = state.pointer_mut(pick(&places.leaves, input.number())) else {
        return;
    };
    let value = match kind {
        0 => {
            let halves = [(); 4].map(|()| u64::from(input.number()));
            let number = halves
                .into_iter()
                .rev()
                .fold(0, |all, half| all << 16 | half);
            json!(number)
        }
        1 => json!(input.number()),
        _ => leaf
            .as_bool()
            .map_or(Value::Null, |boolean| json!(!boolean)),
    };
    *leaf = value;
}

/// Returns a function's state without the time.
fn comparable_state(function: &NvmeFunction) -> Value {
    let mut state = serde_json::to_value(function.running_state()).expect("JSON");
    state["admin"]["features"]["timestamp"].take();
    state["stored_at"].take();
    state
}

/// Restores a function. Returns `None` if the state is refused.
fn restore_function(
    files: &Files,
    mode: DoorbellMode,
    state: &FunctionState,
) -> Option<NvmeFunction> {
    let mut function = match files.function(mode) {
        Ok(function) => function,
        Err(error) => {
            assert!(matches!(error, LocalBackendError::Io(_)), "{error}");
            return None;
        }
    };
    let before = comparable_state(&function);
    if let Err(error) = function.restore_running(state) {
        assert!(!error.to_string().is_empty());
        assert_eq!(comparable_state(&function), before, "refused, but changed");
        return None;
    }
    function.process_events();
    Some(function)
}

/// Runs one input.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    let choice = usize::from(input.byte()) % MODES.len();
    let (mode, left) = (MODES[choice], &LEFT[choice]);
    let files = left.files(mode);
    let mut state = left.state.clone();
    while !input.is_empty() {
        change(&mut input, &mut state, &files);
    }
    let Ok(state) = serde_json::from_value::<FunctionState>(state) else {
        return;
    };
    let Some(function) = restore_function(&files, mode, &state) else {
        return;
    };
    // The next process restores the unchanged live state and this state.
    let bytes = serde_json::to_vec(&function.running_state()).expect("JSON");
    drop(function);
    let state = serde_json::from_slice(&bytes).expect("its own JSON");
    let function = restore_function(&files, mode, &state).expect("a function's own state");

    let mut guest = Guest::with_function(function);
    guest.set_register(0x14, 0);
    assert_eq!(guest.register(0x1C), 0, "CSTS after a reset");
    guest.enable();
    guest.create_queues();
    guest.io(0x02);
}

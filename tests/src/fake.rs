//! A toy controller for the tests of the driver itself: one thread, one lock, a disk in a vector.
//!
//! It is no model of a good device: it trusts the driver, knows only sound commands, and reads guest
//! memory as it likes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use crate::bar::{Bar, DoorbellWindow};
use crate::command::{Sqe, admin};
use crate::doorbell::Side;
use crate::interrupt::Interrupt;
use crate::memory::{GuestMemory, SharedSlice};
use crate::registers::{
    ACQ, AQA, ASQ, CAP, CC, CC_ENABLE, CC_SHN_MASK, CSTS, CSTS_READY, CSTS_SHST_COMPLETE, Cap, VS,
};
use crate::status::{self, StatusCode};

mod commands;

/// Queue pairs, the admin queue's among them.
const QUEUES: usize = 9;
const BLOCK: usize = 512;

/// Options of the toy.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Logical blocks of 512 bytes.
    pub blocks: u64,
    /// Reads and writes move no data.
    pub null: bool,
    /// I/O doorbells (a page each) are mapped.
    pub mapped: bool,
    /// Asks for every shadow doorbell by EventIdx, and looks at no shadow without it.
    pub parked: bool,
    /// I/O commands after which it takes no more.
    pub silent_after: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            blocks: 4096,
            null: false,
            mapped: false,
            parked: false,
            silent_after: u64::MAX,
        }
    }
}

struct Sq {
    ring: SharedSlice<[AtomicU64; 8]>,
    head: u32,
    cq: u16,
    seen: u32,
}

struct Cq {
    ring: SharedSlice<[AtomicU64; 2]>,
    tail: u32,
    phase: u64,
    vector: Option<usize>,
}

#[derive(Default)]
struct State {
    registers: BTreeMap<u64, u64>,
    sqs: BTreeMap<u16, Sq>,
    cqs: BTreeMap<u16, Cq>,
    shadow: Option<[SharedSlice<AtomicU32>; 2]>,
    events: Vec<u16>,
    disk: Vec<u8>,
    bad: BTreeSet<u64>,
    served: u64,
}

struct Shared {
    options: Options,
    cap: Cap,
    memory: GuestMemory,
    interrupts: Vec<Arc<Interrupt>>,
    /// Registers that are trapped.
    doorbells: [AtomicU32; 2 * QUEUES],
    /// Writes of each since the last look.
    written: [AtomicU32; 2 * QUEUES],
    /// The same doorbells, where they are mapped.
    window: Option<DoorbellWindow>,
    state: Mutex<State>,
    stop: AtomicBool,
}

/// The toy, running until dropped.
pub struct Fake {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

type Outcome = Result<u32, StatusCode>;

impl Fake {
    /// Starts a controller that does DMA to `memory` and signals `interrupts` by vector.
    ///
    /// # Panics
    /// When memory cannot be had.
    pub fn start(memory: &GuestMemory, options: Options, interrupts: &[Arc<Interrupt>]) -> Self {
        // MQES 1023, CQR, TO 5 s, CSS NVM. DSTRD: a page where doorbells are mapped, else 16 bytes.
        let stride = if options.mapped { 10 } else { 2 };
        let cap = Cap(1023 | 1 << 16 | 10 << 24 | stride << 32 | 1 << 37);
        let window = options.mapped.then(|| {
            // The toy's own memory, behind the admin doorbells, which stay trapped.
            let registers = GuestMemory::new(&[(0, 1 << 20)]).expect("doorbell memory");
            DoorbellWindow::map(cap.sq_doorbell(1), registers.fd(), 0, 64 << 10).expect("window")
        });
        let shared = Arc::new(Shared {
            options,
            cap,
            memory: memory.clone(),
            interrupts: interrupts.to_vec(),
            doorbells: Default::default(),
            written: Default::default(),
            window,
            state: Mutex::new(State {
                disk: vec![
                    0;
                    if options.null {
                        0
                    } else {
                        options.blocks as usize * BLOCK
                    }
                ],
                ..State::default()
            }),
            stop: AtomicBool::new(false),
        });
        let thread = Arc::clone(&shared);
        Self {
            shared,
            thread: Some(std::thread::spawn(move || {
                while !thread.stop.load(Ordering::Relaxed) {
                    if !thread.turn() {
                        std::thread::yield_now();
                    }
                }
            })),
        }
    }

    /// The registers.
    pub fn bar(&self) -> Arc<dyn Bar> {
        Arc::clone(&self.shared) as _
    }

    /// Changes a bit on the disk, behind everyone's back.
    pub fn flip_bit(&self, byte: usize) {
        self.shared.lock().disk[byte] ^= 1;
    }

    /// Completes the oldest Asynchronous Event Request.
    pub fn raise_event(&self, dw0: u32) -> bool {
        let mut state = self.shared.lock();
        let Some(cid) = (!state.events.is_empty()).then(|| state.events.remove(0)) else {
            return false;
        };
        self.shared.complete(&mut state, 0, cid, Ok(dw0));
        true
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ended = thread.join();
        }
    }
}

impl Bar for Shared {
    fn read32(&self, offset: u64) -> u32 {
        self.read64(offset) as u32
    }

    fn read64(&self, offset: u64) -> u64 {
        match offset {
            CAP => self.cap.0,
            VS => 0x2_0000,
            _ => self.lock().registers.get(&offset).copied().unwrap_or(0),
        }
    }

    fn write32(&self, offset: u64, value: u32) {
        if offset < 0x1000 {
            return self.write64(offset, u64::from(value));
        }
        let index = ((offset - 0x1000) / self.cap.doorbell_stride()) as usize;
        self.doorbells[index].store(value, Ordering::Release);
        self.written[index].fetch_add(1, Ordering::AcqRel);
    }

    fn write64(&self, offset: u64, value: u64) {
        let mut state = self.lock();
        let before = state.registers.insert(offset, value).unwrap_or(0) as u32;
        if offset == CC {
            self.configure(&mut state, before, value as u32);
        }
    }

    fn doorbell_windows(&self) -> &[DoorbellWindow] {
        self.window.as_slice()
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn configure(&self, state: &mut State, before: u32, cc: u32) {
        let mut csts = 0;
        if cc & CC_ENABLE != 0 {
            csts |= CSTS_READY;
            if before & CC_ENABLE == 0 {
                let register = |at| state.registers.get(&at).copied().unwrap_or(0);
                let (aqa, asq, acq) = (register(AQA), register(ASQ), register(ACQ));
                self.add_cq(state, 0, acq, (aqa >> 16 & 0xfff) as u32 + 1, None);
                self.add_sq(state, 0, asq, (aqa & 0xfff) as u32 + 1, 0);
            }
        } else {
            state.sqs.clear();
            state.cqs.clear();
            state.shadow = None;
            state.events.clear();
        }
        if cc & CC_SHN_MASK != 0 {
            csts |= CSTS_SHST_COMPLETE;
        }
        state.registers.insert(CSTS, u64::from(csts));
    }

    fn add_sq(&self, state: &mut State, id: u16, gpa: u64, entries: u32, cq: u16) -> bool {
        self.reset_doorbell(id, Side::SqTail);
        let Ok(ring) = self.memory.cells(gpa, entries as usize) else {
            return false;
        };
        let sq = Sq {
            ring,
            head: 0,
            cq,
            seen: 0,
        };
        state.sqs.insert(id, sq);
        true
    }

    fn add_cq(&self, state: &mut State, id: u16, gpa: u64, n: u32, vector: Option<usize>) -> bool {
        self.reset_doorbell(id, Side::CqHead);
        let Ok(ring) = self.memory.cells(gpa, n as usize) else {
            return false;
        };
        let cq = Cq {
            ring,
            tail: 0,
            phase: 1,
            vector,
        };
        state.cqs.insert(id, cq);
        true
    }

    fn reset_doorbell(&self, queue: u16, side: Side) {
        let index = 2 * usize::from(queue) + (side == Side::CqHead) as usize;
        self.doorbells[index].store(0, Ordering::Relaxed);
        self.written[index].store(0, Ordering::Relaxed);
        if let Some(register) = self.mapped(queue, side) {
            register[0].store(0, Ordering::Relaxed);
        }
    }

    fn mapped(&self, queue: u16, side: Side) -> Option<SharedSlice<AtomicU32>> {
        let window = self.window.as_ref()?;
        window.register(match side {
            Side::SqTail => self.cap.sq_doorbell(queue),
            Side::CqHead => self.cap.cq_doorbell(queue),
        })
    }

    /// Returns the guest's last ring, from wherever it rings.
    fn doorbell(&self, state: &State, queue: u16, side: Side) -> u32 {
        let index = 2 * usize::from(queue) + (side == Side::CqHead) as usize;
        match &state.shadow {
            Some([shadow, _]) if queue != 0 => {
                shadow[index * (self.cap.doorbell_stride() / 4) as usize].load(Ordering::Acquire)
            }
            _ => match self.mapped(queue, side) {
                Some(register) => register[0].load(Ordering::Acquire),
                None => self.doorbells[index].load(Ordering::Acquire),
            },
        }
    }

    /// Serves every queue once; false when there was nothing to do.
    fn turn(&self) -> bool {
        let mut state = self.lock();
        let ids: Vec<u16> = state.sqs.keys().copied().collect();
        let mut busy = false;
        for id in ids {
            busy |= self.serve(&mut state, id);
        }
        busy
    }

    fn serve(&self, state: &mut State, id: u16) -> bool {
        let shadowed = state.shadow.is_some() && id != 0;
        let rung = self.written[2 * usize::from(id)].swap(0, Ordering::AcqRel) != 0;
        let Some(sq) = state.sqs.get(&id) else {
            return false;
        };
        let (size, cq, seen) = (sq.ring.len() as u32, sq.cq, sq.seen);
        let tail = if shadowed && self.options.parked && !rung {
            seen
        } else {
            self.doorbell(state, id, Side::SqTail)
        };
        let mut done = false;
        while let Some(sq) = state.sqs.get_mut(&id) {
            sq.seen = tail;
            if sq.head == tail % size {
                break;
            }
            if id != 0 && state.served == self.options.silent_after {
                break;
            }
            state.served += u64::from(id != 0);
            // A full completion queue holds commands back.
            let head = self.doorbell(state, cq, Side::CqHead);
            let Some(sq) = state.sqs.get_mut(&id) else {
                break;
            };
            if let Some(to) = state.cqs.get(&cq)
                && (to.tail + 1) % to.ring.len() as u32 == head
            {
                break;
            }
            let entry = &sq.ring[sq.head as usize];
            let sqe = Sqe(std::array::from_fn(|i| entry[i].load(Ordering::Relaxed)));
            sq.head = (sq.head + 1) % size;
            done = true;
            let outcome = match id {
                0 if sqe.opcode() == admin::ASYNC_EVENT_REQUEST => {
                    state.events.push(sqe.cid());
                    continue;
                }
                0 => self.admin(state, &sqe),
                _ => self.io(state, &sqe),
            };
            self.complete(state, id, sqe.cid(), outcome);
        }
        if done && let Some(vector) = state.cqs.get(&cq).and_then(|cq| cq.vector) {
            let _full = self.interrupts[vector].event().write(1);
        }
        if shadowed && let Some([shadow, event_idx]) = &state.shadow {
            let stride = (self.cap.doorbell_stride() / 4) as usize;
            let index = 2 * usize::from(id) * stride;
            let head = (2 * usize::from(cq) + 1) * stride;
            // The tail itself is passed by the next command; half a ring away is passed by none for long.
            let far = |value: u32| (value + size / 2) % size;
            let ask = if self.options.parked { tail } else { far(tail) };
            event_idx[index].store(ask, Ordering::Release);
            // The head is looked at with every command: it needs no doorbell.
            let behind = far(shadow[head].load(Ordering::Relaxed));
            event_idx[head].store(behind, Ordering::Release);
            fence(Ordering::SeqCst);
            if self.options.parked && shadow[index].load(Ordering::Relaxed) != tail {
                self.written[2 * usize::from(id)].fetch_add(1, Ordering::AcqRel);
            }
        }
        done
    }

    fn complete(&self, state: &mut State, id: u16, cid: u16, outcome: Outcome) {
        let Some(sq) = state.sqs.get(&id) else {
            return;
        };
        let (head, cq) = (sq.head, sq.cq);
        let Some(cq) = state.cqs.get_mut(&cq) else {
            return;
        };
        let (result, code) = match outcome {
            Ok(result) => (result, status::SUCCESS),
            Err(code) => (0, code),
        };
        let status = u64::from(code.sc) | u64::from(code.sct) << 8;
        let tail = u64::from(head)
            | u64::from(id) << 16
            | u64::from(cid) << 32
            | cq.phase << 48
            | status << 49;
        let entry = &cq.ring[cq.tail as usize];
        entry[0].store(u64::from(result), Ordering::Relaxed);
        entry[1].store(tail, Ordering::Release);
        cq.tail += 1;
        if cq.tail as usize == cq.ring.len() {
            cq.tail = 0;
            cq.phase ^= 1;
        }
    }
}

//! The admin queue pair: two rings in guest memory and their doorbells (Base 2.0, section 3.3.1).
//!
//! Some drivers (Linux, SPDK) always write the doorbell registers of queue 0. Other drivers (libvfn) use the Doorbell Buffer
//! for queue 0 as well, and write a register only when EventIdx asks for it. To support both kinds, EventIdx is set to each new
//! tail and head, so every move leads to a register write. If the driver has changed a doorbell in the buffer, the value in the
//! buffer counts.

use std::sync::atomic::{Ordering, fence};

use nvme_guest::{
    BackendStateError, DmaError, DoorbellBuffer, Gpa, GuestMemory, SharedBackendParts,
};
use nvme_mpt_memory::{
    CompletionCredit, CompletionIndices, InvalidIndex, PhasedIndex, RingIndex, RingSize,
};
use nvme_spec::{
    cqe::Cqe,
    ids::{CommandId, QueueId},
    registers::Doorbell,
    sqe::Sqe,
    status::Status,
};
use zerocopy::{FromZeros, IntoBytes};

use crate::{registers::AdminQueues, state::parts::AdminRingsState};

/// Maximum number of entries of an admin queue that AQA can express.
const ENTRIES_MAX: u32 = 4096;

/// Completion of an admin command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AdminCompletion {
    pub(super) cid: CommandId,
    pub(super) status: Status,
    pub(super) dw0: u32,
}

/// Result of a read of both admin doorbells.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AdminDoorbellPoll {
    /// True if a doorbell had a value that is invalid for its queue, for the first time.
    pub(super) has_invalid_value: bool,
    /// True if the driver changed a doorbell during each read, so that the caller must read the doorbells again.
    pub(super) needs_another_read: bool,
}

/// Admin queue pair of an enabled controller.
#[derive(Debug)]
pub(super) struct GuestAdminRings {
    sq_base: Gpa,
    sq_head: RingIndex,
    /// Last valid value of the Submission Queue's tail doorbell.
    sq_tail: u32,
    cq_base: Gpa,
    cq: CompletionIndices,
    /// Last value of each doorbell (tail, head), valid or not, from the register or the Doorbell Buffer.
    seen: [u32; 2],
    /// Value of each doorbell in the Doorbell Buffer at the last read. A change shows that the driver uses the buffer for the
    /// admin queue.
    seen_buffered: [u32; 2],
    /// For each doorbell (tail, head): a register that is up to this many positions behind `seen` is ignored, because the driver
    /// has stored its value in the Doorbell Buffer earlier.
    lag_max: [u32; 2],
    buffer: Option<DoorbellBuffer>,
}

/// Maximum number of times that one call reads a doorbell that the driver keeps changing.
const READS_MAX: u32 = 4;

impl GuestAdminRings {
    /// Creates empty rings; `None` if a queue has 0 entries.
    pub(super) fn new(queues: AdminQueues) -> Option<Self> {
        Some(Self {
            sq_base: queues.sq_base,
            sq_head: RingIndex::new(RingSize::new(queues.sq_entries)?),
            sq_tail: 0,
            cq_base: queues.cq_base,
            cq: CompletionIndices::new(RingSize::new(queues.cq_entries)?),
            seen: [0; 2],
            seen_buffered: [0; 2],
            lag_max: [0; 2],
            buffer: None,
        })
    }

    /// Reads both doorbells, from the registers and the Doorbell Buffer, and applies their values.
    pub(super) fn read_doorbells(&mut self, shared: &SharedBackendParts) -> AdminDoorbellPoll {
        let mut poll = AdminDoorbellPoll::default();
        // An invalid value of one doorbell does not prevent reading the other doorbell.
        for doorbell in [
            Doorbell::CqHead(QueueId::ADMIN),
            Doorbell::SqTail(QueueId::ADMIN),
        ] {
            self.read_doorbell(doorbell, shared, &mut poll);
        }
        poll
    }

    /// Reads one doorbell, and makes the driver write the doorbell's register at its next move.
    ///
    /// Some drivers (Linux, SPDK) write only the registers of the admin queue. Other drivers (libvfn; Base 2.0, sections 5.8
    /// and B.5) keep the doorbells of the admin queue in the buffer, and write the register only if EventIdx asks for that. If
    /// EventIdx equals the doorbell's value, the driver writes the register at the next move. The driver stores the doorbell,
    /// then reads EventIdx. This function stores EventIdx, then reads the doorbell. If the driver moves twice in a row, the
    /// second move may find EventIdx one move behind, and write no register. The read after the store of EventIdx sees the
    /// second move.
    ///
    /// A changed value in the buffer is the newest value. A register write that arrives afterwards may have an older value.
    /// This function has already read the older value from the buffer, and therefore ignores it.
    fn read_doorbell(
        &mut self,
        doorbell: Doorbell,
        shared: &SharedBackendParts,
        poll: &mut AdminDoorbellPoll,
    ) {
        let place = doorbell_index(doorbell);
        for _ in 0..READS_MAX {
            // Reads the register before the buffer, since the driver stores to the buffer before it writes the register.
            let register = shared.doorbells.load(doorbell);
            let buffered = self.buffered_doorbell(doorbell, shared);
            let moved = buffered.filter(|value| *value != self.seen_buffered[place]);
            if moved.is_none() && self.is_known_value(doorbell, register) {
                return;
            }
            let before = self.doorbell_value(doorbell);
            let value = moved.unwrap_or(register);
            poll.has_invalid_value |= self.apply_doorbell(doorbell, value).is_err();
            if buffered.is_none() {
                return;
            }
            if let Some(moved) = moved {
                self.seen_buffered[place] = moved;
                let by = self
                    .size(doorbell)
                    .distance(before, self.doorbell_value(doorbell));
                self.lag_max[place] = self.lag_max[place].saturating_add(by);
            } else {
                self.lag_max[place] = 0;
            }
            self.request_register_write(doorbell, shared);
        }
        poll.needs_another_read = true;
    }

    /// Returns whether a register has no new value: it equals the last value, or one that the driver has stored in the Doorbell
    /// Buffer before.
    fn is_known_value(&mut self, doorbell: Doorbell, register: u32) -> bool {
        let place = doorbell_index(doorbell);
        let seen = self.seen[place];
        let lag = if register == seen {
            0
        } else {
            let register = RingIndex::from_index(self.size(doorbell), register);
            match register.map(|register| register.distance_to(seen)) {
                Some(Ok(lag)) => lag,
                _ => return false,
            }
        };
        let is_told = lag <= self.lag_max[place];
        if is_told {
            self.lag_max[place] = lag;
        }
        is_told
    }

    fn size(&self, doorbell: Doorbell) -> RingSize {
        match doorbell {
            Doorbell::SqTail(_) => self.sq_head.size(),
            Doorbell::CqHead(_) => self.cq.size(),
        }
    }

    /// Starts to use a new Doorbell Buffer. Stores the present doorbell values in it, and asks the driver to write the register
    /// at each move.
    pub(super) fn use_doorbell_buffer(
        &mut self,
        buffer: DoorbellBuffer,
        shared: &SharedBackendParts,
    ) {
        self.buffer = Some(buffer);
        self.lag_max = [0; 2];
        for doorbell in [
            Doorbell::CqHead(QueueId::ADMIN),
            Doorbell::SqTail(QueueId::ADMIN),
        ] {
            // A driver that uses the buffer continues from the stored value.
            let position = self.doorbell_value(doorbell);
            store_buffered_doorbell(buffer.shadow, doorbell, position, shared);
            self.seen_buffered[doorbell_index(doorbell)] = position;
            self.request_register_write(doorbell, shared);
        }
    }

    /// Returns a doorbell's value in the Doorbell Buffer; `None` if there is no buffer.
    fn buffered_doorbell(&self, doorbell: Doorbell, shared: &SharedBackendParts) -> Option<u32> {
        let gpa = buffered_doorbell_gpa(self.buffer?.shadow, doorbell, shared)?;
        shared.memory.load(gpa)
    }

    /// Asks the guest to write the doorbell's register at its next move, if there is a Doorbell Buffer (Base 2.0, section B.5).
    /// Afterwards, the caller must read the doorbell once more, because the guest may have moved the doorbell before it could
    /// see the request.
    fn request_register_write(&self, doorbell: Doorbell, shared: &SharedBackendParts) {
        if let Some(buffer) = self.buffer {
            store_buffered_doorbell(
                buffer.event_idx,
                doorbell,
                self.doorbell_value(doorbell),
                shared,
            );
        }
        fence(Ordering::SeqCst);
    }

    /// Returns the last valid value of a doorbell: the tail or the head.
    fn doorbell_value(&self, doorbell: Doorbell) -> u32 {
        match doorbell {
            Doorbell::SqTail(_) => self.sq_tail,
            Doorbell::CqHead(_) => self.cq.head().get(),
        }
    }

    /// Applies a doorbell value. An invalid value changes nothing, and is reported only when it is read for the first time.
    pub(super) fn apply_doorbell(
        &mut self,
        doorbell: Doorbell,
        value: u32,
    ) -> Result<(), InvalidIndex> {
        let seen = &mut self.seen[doorbell_index(doorbell)];
        if *seen == value {
            return Ok(());
        }
        *seen = value;
        match doorbell {
            Doorbell::SqTail(_) => {
                self.sq_head.distance_to(value)?;
                self.sq_tail = value;
                Ok(())
            }
            Doorbell::CqHead(_) => self.cq.move_head(value),
        }
    }

    /// Reserves an entry of the Completion Queue. Returns `None` if all entries have completions that the guest has not
    /// consumed.
    pub(super) fn reserve(&mut self) -> Option<CompletionCredit> {
        self.cq.reserve()
    }

    /// Returns whether the Completion Queue has a free entry.
    pub(super) fn has_free_slot(&self) -> bool {
        self.cq.free_entries() > 0
    }

    /// Returns the number of submitted commands that the controller has not taken yet.
    pub(super) fn pending_commands(&self) -> u32 {
        self.sq_head
            .size()
            .distance(self.sq_head.get(), self.sq_tail)
    }

    /// Takes the next command of the Submission Queue, if there is one. Frees the reserved Completion Queue entry, which only
    /// proves that the command could complete now: a command that waits for an event must not occupy an entry.
    pub(super) fn take(
        &mut self,
        credit: CompletionCredit,
        memory: &GuestMemory,
    ) -> Result<Option<Sqe>, DmaError> {
        self.cq.return_credits(credit.into());
        if self.pending_commands() == 0 {
            return Ok(None);
        }
        let mut sqe = Sqe::new_zeroed();
        memory.read(
            entry_gpa(self.sq_base, self.sq_head.get(), size_of::<Sqe>()),
            sqe.as_mut_bytes(),
        )?;
        self.sq_head.advance();
        Ok(Some(sqe))
    }

    /// Posts a completion in its reserved entry. If the memory is not mapped, frees the entry and fails.
    pub(super) fn post(
        &mut self,
        credit: CompletionCredit,
        completion: AdminCompletion,
        memory: &GuestMemory,
    ) -> Result<(), DmaError> {
        let posted = self.write(completion, memory);
        match posted {
            Ok(()) => self.cq.spend(credit),
            Err(_) => self.cq.return_credits(credit.into()),
        }
        posted
    }

    /// Writes a completion to the entry at the Completion Queue's tail.
    fn write(&self, completion: AdminCompletion, memory: &GuestMemory) -> Result<(), DmaError> {
        let AdminCompletion { cid, status, dw0 } = completion;
        // The cast keeps the value: indices stay below 4,096, the maximum of AQA.
        let sqhd = self.sq_head.get() as u16;
        let tail = self.cq.tail();
        let cqe = Cqe::new(QueueId::ADMIN, sqhd, cid, status, dw0, 0).with_phase(tail.phase());
        let at = entry_gpa(self.cq_base, tail.get(), size_of::<Cqe>());
        memory.write(at, cqe.low.as_bytes())?;
        // Orders the entry's other bytes before the new phase tag: a host that sees the tag may read the whole entry.
        fence(Ordering::Release);
        memory.write(Gpa(at.0.wrapping_add(8)), cqe.high.as_bytes())
    }
}

impl GuestAdminRings {
    pub(super) fn save(&self) -> AdminRingsState {
        let Self {
            sq_base,
            sq_head,
            sq_tail,
            cq_base,
            cq,
            seen,
            seen_buffered: held,
            lag_max: behind,
            // The back end's state contains the buffer's addresses.
            buffer: _,
        } = self;
        AdminRingsState {
            sq_base: sq_base.0,
            sq_entries: sq_head.size().entries(),
            sq_head: sq_head.get(),
            sq_tail: *sq_tail,
            cq_base: cq_base.0,
            cq_entries: cq.size().entries(),
            cq_head: cq.head().get(),
            cq_tail: cq.tail().get(),
            phase: cq.tail().phase(),
            seen: *seen,
            held: *held,
            behind: *behind,
        }
    }

    /// Checks that a guest can have brought its admin queues into a saved state.
    pub(super) fn check(state: &AdminRingsState) -> Result<(), BackendStateError> {
        let AdminRingsState {
            sq_entries,
            sq_head,
            sq_tail,
            cq_entries,
            cq_head,
            cq_tail,
            ..
        } = *state;
        for (name, entries) in [("submission", sq_entries), ("completion", cq_entries)] {
            if !(2..=ENTRIES_MAX).contains(&entries) {
                let field = format!("entries of the admin {name} queue");
                let valid = format!("2 to {ENTRIES_MAX}");
                return Err(BackendStateError::invalid(field, entries, valid));
            }
        }
        for (name, index, entries) in [
            ("head of the admin submission queue", sq_head, sq_entries),
            ("tail of the admin submission queue", sq_tail, sq_entries),
            ("head of the admin completion queue", cq_head, cq_entries),
            ("tail of the admin completion queue", cq_tail, cq_entries),
        ] {
            if index >= entries {
                let valid = format!("less than its entries, {entries}");
                return Err(BackendStateError::invalid(name, index, valid));
            }
        }
        Ok(())
    }

    /// Restores a [checked](Self::check) state. Returns `None` for a state that the check would refuse.
    pub(super) fn from_state(
        state: &AdminRingsState,
        buffer: Option<DoorbellBuffer>,
    ) -> Option<Self> {
        let AdminRingsState {
            sq_base,
            sq_entries,
            sq_head,
            sq_tail,
            cq_base,
            cq_entries,
            cq_head,
            cq_tail,
            phase,
            seen,
            held,
            behind,
        } = *state;
        let sq_head = RingIndex::from_index(RingSize::new(sq_entries)?, sq_head)?;
        sq_head.distance_to(sq_tail).ok()?;
        let cq_tail = RingIndex::from_index(RingSize::new(cq_entries)?, cq_tail)?;
        Some(Self {
            sq_base: Gpa(sq_base),
            sq_head,
            sq_tail,
            cq_base: Gpa(cq_base),
            cq: CompletionIndices::from_positions(
                PhasedIndex::with_phase(cq_tail, phase),
                cq_head,
            )?,
            seen,
            seen_buffered: held,
            lag_max: behind,
            buffer,
        })
    }

    /// Returns whether the Completion Queue has completions that the guest has not consumed.
    pub(super) fn has_unconsumed_completions(&self) -> bool {
        self.cq.unconsumed() != 0
    }
}

/// Returns the guest address of a doorbell in a page of the Doorbell Buffer.
fn buffered_doorbell_gpa(
    page: Gpa,
    doorbell: Doorbell,
    shared: &SharedBackendParts,
) -> Option<Gpa> {
    page.checked_add(doorbell.offset(shared.doorbells.dstrd()))
}

/// Stores a doorbell's value in a page of the Doorbell Buffer. Drops it if the page is not mapped.
fn store_buffered_doorbell(page: Gpa, doorbell: Doorbell, value: u32, shared: &SharedBackendParts) {
    if let Some(gpa) = buffered_doorbell_gpa(page, doorbell, shared) {
        shared.memory.store(gpa, value);
    }
}

/// Returns the index of a doorbell in `seen`, `seen_buffered` and `lag_max`.
fn doorbell_index(doorbell: Doorbell) -> usize {
    match doorbell {
        Doorbell::SqTail(_) => 0,
        Doorbell::CqHead(_) => 1,
    }
}

/// Returns the guest address of an entry of a queue. If the queue crosses the end of the address space, returns an address that
/// is never mapped.
fn entry_gpa(base: Gpa, index: u32, size: usize) -> Gpa {
    Gpa(base.0.wrapping_add(u64::from(index) * size as u64))
}

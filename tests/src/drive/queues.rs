//! Rings and doorbells: fetching commands and posting completions (NVMe Base 2.0, sections 3.3 and 5.8).

use std::collections::VecDeque;
use std::ops::Bound;
use std::time::Duration;

use nvme_mpt_memory::eventfd;

use super::faults::Effect;
use super::{Controller, DoorbellBufferUse, FETCHED_QUEUES_MAX, ModelCommand};
use crate::command::Sqe;
use crate::queue::{CQE_SIZE, SQE_SIZE};
use crate::status::{self, StatusCode};

/// Do Not Retry, in the upper half of an entry.
const DNR: u64 = 1 << 63;

/// Asynchronous event that reports an invalid doorbell value. Details are in the Error Information log page.
const INVALID_DOORBELL_VALUE: u32 = 1 << 8 | 1 << 16;

/// A Submission Queue.
#[derive(Debug)]
pub(super) struct Sq {
    base: u64,
    entries: u32,
    head: u32,
    tail: u32,
    pub(super) cq: u16,
    /// QPRIO.
    pub(super) priority: u8,
    /// Entries to post later, each with the number of commands that the drive must fetch first.
    delayed: Vec<(u16, [u64; 2])>,
}

impl Sq {
    pub(super) fn new(base: u64, entries: u32, cq: u16, priority: u8) -> Self {
        Self {
            base,
            entries,
            head: 0,
            tail: 0,
            cq,
            priority,
            delayed: Vec::new(),
        }
    }

    /// Returns the number of waiting commands.
    pub(super) fn waiting(&self) -> u32 {
        (self.tail + self.entries - self.head) % self.entries
    }

    /// Sets the number of waiting commands.
    #[cfg(test)]
    pub(super) fn with_waiting(self, commands: u32) -> Self {
        Self {
            tail: commands,
            ..self
        }
    }

    /// Removes and returns the delayed entries that are due when the drive fetches its next command.
    fn take_due(&mut self) -> Vec<[u64; 2]> {
        for (further, _) in &mut self.delayed {
            *further = further.saturating_sub(1);
        }
        let due = self.delayed.extract_if(.., |(further, _)| *further == 0);
        due.map(|(_, entry)| entry).collect()
    }
}

/// QPRIO of the class Urgent, which has strict priority.
const URGENT: u8 = 0;

/// QPRIO of the weighted classes: High, Medium, Low.
const WEIGHTED: [u8; 3] = [1, 2, 3];

/// State of weighted round robin arbitration.
#[derive(Debug, Default)]
pub(super) struct WeightedTurns {
    /// Number of commands that each weighted class may still have in this round.
    credits: [u32; WEIGHTED.len()],
    /// Queue that each class, by QPRIO, was served from last.
    last: [u16; 1 + WEIGHTED.len()],
}

/// A Completion Queue.
#[derive(Debug)]
pub(super) struct Cq {
    base: u64,
    entries: u32,
    tail: u32,
    head: u32,
    phase: bool,
    vector: Option<usize>,
    /// Entries, still without a phase tag, that wait for a free place in the ring.
    held: VecDeque<[u64; 2]>,
}

impl Cq {
    pub(super) fn new(base: u64, entries: u32, vector: Option<usize>) -> Self {
        Self {
            base,
            entries,
            tail: 0,
            head: 0,
            phase: true,
            vector,
            held: VecDeque::new(),
        }
    }

    fn is_full(&self) -> bool {
        (self.tail + 1) % self.entries == self.head
    }
}

impl Controller {
    /// Returns the distance of a doorbell from the first one, in bytes. `head` selects the doorbell of a Completion Queue
    /// instead of that of a Submission Queue.
    pub(super) fn doorbell_offset(&self, queue: u16, head: bool) -> usize {
        (2 * usize::from(queue) + usize::from(head)) * (4 << self.options.dstrd)
    }

    /// Returns the base and size of a Submission Queue, and the base of its Completion Queue. `None` if both queues differ
    /// in size.
    pub(super) fn rings(&self, id: u16) -> Option<(u64, u32, u64)> {
        let sq = self.sqs.get(&id).filter(|_| id != 0)?;
        let cq = self.cqs.get(&sq.cq)?;
        (cq.entries == sq.entries).then_some((sq.base, sq.entries, cq.base))
    }

    /// Returns the value of a doorbell; `None` if it cannot be new.
    fn doorbell(&mut self, queue: u16, head: bool) -> Option<u32> {
        let offset = self.doorbell_offset(queue, head);
        let register = self.doorbells.take(offset);
        self.counters.doorbells += u64::from(register.is_some());
        let Some([shadow, _]) = self.shadow.filter(|_| queue != 0) else {
            return register;
        };
        if register.is_none() && self.options.doorbell_buffer == DoorbellBufferUse::EventIdx {
            return None;
        }
        // The host writes the buffer before the register, so the value in the buffer is the newer one.
        self.iommu.load32(shadow + offset as u64).ok()
    }

    /// Reads all doorbells. Returns whether a value changed.
    pub(super) fn take_doorbells(&mut self) -> bool {
        let mut rung = false;
        let last = if self.options.is_manual {
            0
        } else {
            self.options.queue_pairs
        };
        for queue in 0..=last {
            for head in [false, true] {
                let Some(value) = self.doorbell(queue, head) else {
                    continue;
                };
                rung |= self.ring(queue, head, value);
            }
        }
        rung
    }

    /// Handles a doorbell value. Returns false if the value is unchanged.
    fn ring(&mut self, queue: u16, head: bool, value: u32) -> bool {
        let (known, entries) = match head {
            false => match self.sqs.get_mut(&queue) {
                Some(sq) => (&mut sq.tail, sq.entries),
                None => return self.on_unknown_doorbell(queue, value),
            },
            true => match self.cqs.get_mut(&queue) {
                Some(cq) => (&mut cq.head, cq.entries),
                None => return self.on_unknown_doorbell(queue, value),
            },
        };
        if value >= entries {
            self.record_violation(format!(
                "Doorbell of queue {queue}: {value} of {entries} entries"
            ));
            self.events.push_back(INVALID_DOORBELL_VALUE);
            return false;
        }
        std::mem::replace(known, value) != value
    }

    fn on_unknown_doorbell(&mut self, queue: u16, value: u32) -> bool {
        // In a Doorbell Buffer, doorbells of queues that do not exist may have any value.
        if self.shadow.is_none() || queue == 0 {
            self.record_violation(format!("Doorbell of queue {queue}, which is not: {value}"));
        }
        false
    }

    /// Requests register writes for the next doorbell values by EventIdx, if the drive is configured to do so.
    pub(super) fn request_doorbells(&mut self) {
        let Some([shadow, event_idx]) = self.shadow else {
            return;
        };
        let uses_event_idx = self.options.doorbell_buffer == DoorbellBufferUse::EventIdx;
        let sqs = self
            .sqs
            .iter()
            .map(|(&id, sq)| (id, false, sq.tail, sq.entries));
        let cqs = self
            .cqs
            .iter()
            .map(|(&id, cq)| (id, true, cq.head, cq.entries));
        let doorbells: Vec<_> = sqs.chain(cqs).filter(|(id, ..)| *id != 0).collect();
        for (id, head, value, entries) in doorbells {
            let offset = self.doorbell_offset(id, head) as u64;
            // With the present value as EventIdx, the next value requests a register write. With the farthest value, none
            // does.
            let ask = match uses_event_idx {
                true => value,
                false => (value + entries / 2) % entries,
            };
            let stored = self.iommu.store32(event_idx + offset, ask);
            // The host may have rung the doorbell before it could see the new EventIdx, so the doorbell is read again.
            if uses_event_idx
                && stored.is_ok()
                && let Ok(now) = self.iommu.load32(shadow + offset)
                && now != value
            {
                self.ring(id, head, now);
            }
        }
    }

    /// Fetches commands while there are commands and the drive can execute more.
    pub(super) fn take_commands(&mut self, now: Duration) -> bool {
        match self.is_weighted() {
            true => self.take_by_weight(now),
            false => self.take_in_turn(now),
        }
    }

    /// Returns the number of commands of each class in a round: High, Medium, Low.
    pub(super) fn weights(&self) -> [u32; WEIGHTED.len()] {
        [24, 16, 8].map(|at| (self.arbitration >> at & 0xFF) + 1)
    }

    /// Arbitrates by weighted round robin with an urgent class (section 3.4.4.2): first admin commands, then urgent queues.
    /// Each of the remaining classes may have as many commands per round as its weight. Queues of one class take turns.
    fn take_by_weight(&mut self, now: Duration) -> bool {
        let mut taken = false;
        while !self.fatal
            && !self.hung
            && let Some(id) = self.next_by_weight()
            && self.take_command(id, now)
        {
            taken = true;
        }
        taken
    }

    /// Returns whether the drive can execute another I/O command. Admin commands are not limited.
    pub(super) fn has_space(&self) -> bool {
        let of_io = self.fetched.iter().filter(|work| work.sq != 0);
        of_io.count() < self.options.parallel
    }

    /// Returns the queue from which the next command is fetched.
    pub(super) fn next_by_weight(&mut self) -> Option<u16> {
        if self.sqs.get(&0).is_some_and(|admin| admin.waiting() > 0) {
            return Some(0);
        }
        if !self.has_space() {
            return None;
        }
        if let Some(urgent) = self.next_of_class(URGENT) {
            self.weighted_turns.last[usize::from(URGENT)] = urgent;
            return Some(urgent);
        }
        let next = WEIGHTED.map(|class| self.next_of_class(class));
        let may = |credits: [u32; WEIGHTED.len()]| {
            (0..WEIGHTED.len()).find(|class| next[*class].is_some() && credits[*class] > 0)
        };
        let class = may(self.weighted_turns.credits).or_else(|| {
            self.weighted_turns.credits = self.weights();
            may(self.weighted_turns.credits)
        })?;
        self.weighted_turns.credits[class] -= 1;
        self.weighted_turns.last[usize::from(WEIGHTED[class])] = next[class]?;
        next[class]
    }

    /// Returns the next non-empty queue of a class.
    fn next_of_class(&self, class: u8) -> Option<u16> {
        let last = self.weighted_turns.last[usize::from(class)];
        let behind = self
            .sqs
            .range((Bound::Excluded(last), Bound::Unbounded))
            .chain(self.sqs.range(..=last));
        let mut waiting =
            behind.filter(|(id, sq)| **id != 0 && sq.priority == class && sq.waiting() > 0);
        waiting.next().map(|(&id, _)| id)
    }

    /// Arbitrates by round robin (section 3.4.4.1): the queues take turns, with one command each.
    fn take_in_turn(&mut self, now: Duration) -> bool {
        let mut taken = false;
        loop {
            // The turn continues behind the last served queue, even if the drive could not take commands in between.
            let (last, sqs) = (self.last_fetched, &self.sqs);
            let behind = sqs.range((Bound::Excluded(last), Bound::Unbounded));
            let order = behind.chain(sqs.range(..=last));
            let ids: Vec<u16> = order.map(|(&id, _)| id).collect();
            let mut more = false;
            for id in ids {
                let can_run = id == 0 || self.can_fetch(now);
                if can_run && !self.fatal && !self.hung && self.take_command(id, now) {
                    more = true;
                    // The admin queue is served without round robin.
                    if id != 0 {
                        self.last_fetched = id;
                    }
                }
            }
            if !more {
                return taken;
            }
            taken = true;
        }
    }

    fn take_command(&mut self, id: u16, now: Duration) -> bool {
        let Some(sq) = self.sqs.get_mut(&id).filter(|sq| sq.head != sq.tail) else {
            return false;
        };
        let at = sq.base + u64::from(sq.head) * SQE_SIZE as u64;
        sq.head = (sq.head + 1) % sq.entries;
        if let Some(cq) = self.cqs.get_mut(&sq.cq) {
            cq.held.extend(sq.take_due());
        }
        let mut bytes = [0; SQE_SIZE];
        if !self.bus_master || self.iommu.read(at, &mut bytes).is_err() {
            self.record_violation(format!("Submission queue {id} cannot be read"));
            self.fatal = true;
            return false;
        }
        let sqe = Sqe::from_bytes(&bytes);
        let same = |work: &&ModelCommand| work.sq == id && work.sqe.cid() == sqe.cid();
        let requests = &self.event_requests;
        if self.fetched.iter().any(|work| same(&work)) || id == 0 && requests.contains(&sqe.cid()) {
            self.record_violation(format!(
                "Queue {id}: command identifier {:#x} twice",
                sqe.cid()
            ));
            self.complete(id, &sqe, Err(status::COMMAND_ID_CONFLICT), true);
            return true;
        }
        let effect = self.faults.effect_on(id, &sqe);
        self.counters.faults_matched = self.faults.matched;
        if id != 0 {
            self.counters.commands += 1;
            if self.fetched_queues.len() < FETCHED_QUEUES_MAX {
                self.fetched_queues.push(id);
            }
        }
        let mut due = Some(match id {
            0 => now + self.options.latency,
            _ => self.begin_service(&sqe, now),
        });
        match effect {
            Some(Effect::Lose | Effect::Hold | Effect::Vanish) => due = None,
            Some(Effect::Delay(time)) => due = Some(now + time),
            Some(Effect::Fatal) => self.fatal = true,
            Some(Effect::Hang) => self.hung = true,
            _ => {}
        }
        self.fetched.push(ModelCommand {
            sq: id,
            sqe,
            due,
            effect,
        });
        true
    }

    /// Completes a command. If the command failed, `dnr` sets Do Not Retry.
    pub(super) fn complete(
        &mut self,
        sq: u16,
        sqe: &Sqe,
        outcome: Result<u32, StatusCode>,
        dnr: bool,
    ) {
        let entry = entry(sq, sqe, outcome, dnr);
        self.post(sq, entry);
    }

    /// Posts an entry later: after the drive has fetched `further` more commands of the entry's Submission Queue.
    pub(super) fn post_delayed(&mut self, sq: u16, entry: [u64; 2], further: u16) {
        if let Some(sq) = self.sqs.get_mut(&sq) {
            sq.delayed.push((further, entry));
        }
    }

    /// Queues an entry for the Completion Queue that belongs to a Submission Queue.
    pub(super) fn post(&mut self, sq: u16, entry: [u64; 2]) {
        if let Some(sq) = self.sqs.get(&sq)
            && let Some(cq) = self.cqs.get_mut(&sq.cq)
        {
            cq.held.push_back(entry);
        }
    }

    /// Writes queued entries into the Completion Queues, as far as they have free entries.
    pub(super) fn post_waiting(&mut self) -> bool {
        let mut posted = false;
        let mut unreachable = None;
        for (id, cq) in &mut self.cqs {
            let signals = cq.vector.filter(|_| !cq.held.is_empty() && !cq.is_full());
            while !cq.is_full()
                && let Some([lower, upper]) = cq.held.pop_front()
            {
                // SQHD is the head at this time. An entry of random bytes may name a queue that does not exist.
                let sqid = (upper >> 16) as u16;
                let head = self.sqs.get(&sqid).map_or(0, |sq| sq.head);
                let upper =
                    upper & !0xFFFF & !(1 << 48) | u64::from(head) | u64::from(cq.phase) << 48;
                let at = cq.base + u64::from(cq.tail) * CQE_SIZE as u64;
                if !self.bus_master || self.iommu.publish(at, [lower, upper]).is_err() {
                    unreachable = Some(*id);
                }
                cq.tail += 1;
                if cq.tail == cq.entries {
                    (cq.tail, cq.phase) = (0, !cq.phase);
                }
                posted = true;
            }
            if let Some(interrupt) = signals.and_then(|vector| self.interrupts.get(vector)) {
                // If the counter is full, the guest has a pending signal already.
                let _full = eventfd::signal(interrupt.event());
            }
        }
        if let Some(id) = unreachable {
            self.record_violation(format!("Completion queue {id} cannot be written"));
            self.fatal = true;
        }
        posted
    }
}

/// Returns the completion queue entry of a command. If the command failed, `dnr` sets Do Not Retry.
pub(super) fn entry(sq: u16, sqe: &Sqe, outcome: Result<u32, StatusCode>, dnr: bool) -> [u64; 2] {
    let (result, code) = match outcome {
        Ok(result) => (result, status::SUCCESS),
        Err(code) => (0, code),
    };
    let status = u64::from(code.sc) << 49 | u64::from(code.sct) << 57;
    let dnr = if dnr && code != status::SUCCESS {
        DNR
    } else {
        0
    };
    let upper = u64::from(sq) << 16 | u64::from(sqe.cid()) << 32 | status | dnr;
    [result.into(), upper]
}

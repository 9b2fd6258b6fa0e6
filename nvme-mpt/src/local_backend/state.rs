//! Saving a paused local back end, and restoring its state into another one.
//!
//! Each part is saved and restored by its owner with full destructuring, so that an added field cannot be forgotten.

use std::io;

use nvme_guest::address::PAGE_SIZE;
use nvme_guest::backend::state::{
    BackendState, BackendStateError, DoorbellBufferState, UnreportedChangesState,
};
use nvme_guest::doorbell::DoorbellBuffer;
use nvme_guest::host::UnreportedChanges;
use nvme_spec::ids::QueueId;
use nvme_spec::registers::Doorbell;

use super::LocalBackend;
use super::queue_limits::QueueLimits;
use crate::shadow::UnmappedRing;

impl LocalBackend {
    /// Saves the back end, while it is [paused](Self::pause).
    ///
    /// # Errors
    /// [`BackendStateError::NotPaused`].
    pub(super) fn save(&self) -> Result<BackendState, BackendStateError> {
        let queues = self.queues();
        if !queues.is_paused {
            return Err(BackendStateError::NotPaused);
        }
        let doorbells = self.doorbells();
        let saved = queues.cqs.values().filter_map(|entry| {
            let queue = entry.detached.as_ref()?;
            Some(queue.save(&self.vectors))
        });
        Ok(BackendState {
            doorbells: doorbell_registers(self.max_queue_pairs())
                .map(|doorbell| doorbells.load(doorbell))
                .collect(),
            doorbell_buffer: queues.buffer.map(|buffer| DoorbellBufferState {
                shadow: buffer.shadow.0,
                event_idx: buffer.event_idx.0,
            }),
            queues: saved.collect(),
            revoked: queues.is_revoked,
            counters: self.own_counters() + queues.previous_counters,
            changes: self.save_changes(),
            lost_writes: self.open_lease.host().damage().lost_writes,
        })
    }

    fn save_changes(&self) -> UnreportedChangesState {
        let Some(log) = self.change_log() else {
            return UnreportedChangesState::default();
        };
        let changes = log.changes();
        UnreportedChangesState {
            ids: changes.ids().to_vec(),
            more: changes.has_more(),
        }
    }

    /// Restores a saved state. The back end must have no queues, be paused, and have the guest's memory in its window.
    ///
    /// # Errors
    /// All of [`BackendStateError`]; after [`BackendStateError::Queue`] some queues exist, until the next reset.
    pub(super) fn restore(&self, state: &BackendState) -> Result<(), BackendStateError> {
        self.check(state)?;
        let BackendState {
            doorbells,
            doorbell_buffer,
            queues: saved,
            revoked,
            counters,
            changes,
            lost_writes,
        } = state;
        let mut queues = self.queues();
        if !queues.is_paused {
            return Err(BackendStateError::NotPaused);
        }
        if !queues.cqs.is_empty() {
            return Err(BackendStateError::NotEmpty(queues.cqs.len()));
        }
        for (doorbell, value) in doorbell_registers(self.max_queue_pairs()).zip(doorbells) {
            self.doorbells().store(doorbell, *value);
        }
        queues.buffer = doorbell_buffer.map(DoorbellBuffer::from);
        queues.is_revoked = *revoked;
        queues.previous_counters = *counters;
        if let Some(inflight) = &self.context.inflight {
            inflight.set_previous_counters(*counters);
        }
        if let Some(log) = self.change_log() {
            let UnreportedChangesState { ids, more } = changes;
            log.restore(&UnreportedChanges::new(ids, *more));
        }
        if *lost_writes {
            self.open_lease.host().record_earlier_write_errors();
        }
        // This process opened the lease after writes that precede the snapshot, so errors of these writes must be fetched.
        self.open_lease.host().restore_write_errors();
        for state in saved {
            let qid = QueueId(state.qid);
            self.restore_queue(&mut queues, state, UnmappedRing::Refused)
                .map_err(|source| BackendStateError::Queue { qid, source })?;
        }
        Ok(())
    }

    /// Checks a state as far as possible before anything is created from it.
    ///
    /// # Errors
    /// [`BackendStateError::Mismatch`] and [`BackendStateError::Invalid`].
    pub(super) fn check(&self, state: &BackendState) -> Result<(), BackendStateError> {
        let BackendState {
            doorbells,
            doorbell_buffer,
            queues,
            revoked,
            counters: _,
            changes,
            lost_writes: _,
        } = state;
        self.check_changes(changes)?;
        if !revoked && !self.has_blocks() {
            return Err(BackendStateError::Mismatch {
                promise: "namespace".to_owned(),
                saved: "attached".to_owned(),
                here: "gone, or formatted to other blocks".to_owned(),
            });
        }
        let count = doorbell_registers(self.max_queue_pairs()).count();
        if doorbells.len() != count {
            let valid = format!("{count} registers");
            return Err(BackendStateError::invalid(
                "doorbells",
                doorbells.len(),
                valid,
            ));
        }
        self.check_doorbell_buffer(doorbell_buffer.map(DoorbellBuffer::from))?;
        QueueLimits::from_backend(self).check(queues)
    }

    /// Checks that a guest can have set up this Doorbell Buffer.
    pub(super) fn check_doorbell_buffer(
        &self,
        buffer: Option<DoorbellBuffer>,
    ) -> Result<(), BackendStateError> {
        let Some(DoorbellBuffer { shadow, event_idx }) = buffer else {
            return Ok(());
        };
        if !self.facts.doorbells.offers_buffer() {
            let valid = "null, as Doorbell Buffer Config is not offered";
            return Err(BackendStateError::invalid(
                "doorbell_buffer",
                shadow.0,
                valid,
            ));
        }
        check_page_aligned("doorbell_buffer.shadow", shadow.0)?;
        check_page_aligned("doorbell_buffer.event_idx", event_idx.0)
    }

    fn check_changes(&self, state: &UnreportedChangesState) -> Result<(), BackendStateError> {
        let namespace = self.namespace();
        let Some(list) = &namespace.command_sets.native().change_list else {
            if state.is_empty() {
                return Ok(());
            }
            let (count, valid) = (state.ids.len(), "left out, as no list of changes exists");
            return Err(BackendStateError::invalid(
                UnreportedChangesState::NAME,
                count,
                valid,
            ));
        };
        let field = format!("{}.starts", UnreportedChangesState::NAME);
        if state.ids.len() > UnreportedChanges::CAPACITY {
            let (count, valid) = (state.ids.len(), UnreportedChanges::CAPACITY);
            let valid = format!("up to {valid} changes");
            return Err(BackendStateError::invalid(field, count, valid));
        }
        let (unit, blocks) = (list.unit, namespace.blocks);
        let is_wrong = |id: &&u64| !id.is_multiple_of(unit) || **id >= blocks;
        match state.ids.iter().find(is_wrong) {
            None => Ok(()),
            Some(id) => {
                let valid = format!("a multiple of {unit} below {blocks}");
                Err(BackendStateError::invalid(field, id, valid))
            }
        }
    }
}

fn check_page_aligned(field: &str, value: u64) -> Result<(), BackendStateError> {
    if value.is_multiple_of(PAGE_SIZE) {
        return Ok(());
    }
    let value = format!("{value:#x}");
    Err(BackendStateError::invalid(
        field,
        value,
        "the start of a page",
    ))
}

/// Returns all doorbell registers in the order of their offsets.
fn doorbell_registers(queue_pairs: u16) -> impl Iterator<Item = Doorbell> {
    (0..=queue_pairs).flat_map(|qid| {
        let qid = QueueId(qid);
        [Doorbell::SqTail(qid), Doorbell::CqHead(qid)]
    })
}

/// Returns the error for saving or restoring queues of a lease whose blocks no longer exist.
pub(super) fn blocks_gone_error() -> io::Error {
    let gone = "The drive is gone, or its namespace is not the one that was leased";
    io::Error::new(io::ErrorKind::NotConnected, gone)
}

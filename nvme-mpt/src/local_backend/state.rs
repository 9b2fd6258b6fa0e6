//! Saving a paused local back end, and restoring its state into another one.
//!
//! Each part is saved and restored by its owner with full destructuring, so that an added field cannot be forgotten.

use std::fmt::{Display, Write};
use std::io;

use nvme_guest::address::PAGE_SIZE;
use nvme_guest::backend::LeasedNamespace;
use nvme_guest::backend::state::{
    BackendState, BackendStateError, DoorbellBufferState, GuestPromiseState, UnreportedChangesState,
};
use nvme_guest::doorbell::DoorbellBuffer;
use nvme_guest::event::{DriveEvent, IoQueueEvent};
use nvme_guest::host::{ControllerLimits, UnreportedChanges};
use nvme_spec::ids::QueueId;
use nvme_spec::registers::Doorbell;

use super::LocalBackend;
use super::queue_limits::QueueLimits;
use crate::shadow::UnmappedRing;

/// Name of the promise that is the number of blocks. A lease by size may have grown beyond that number.
const BLOCKS: &str = "blocks";

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
            promises: self.promises(),
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
            promises,
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
        if let Some(live) = &self.context.inflight {
            live.set_previous_counters(*counters);
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
        let mut blocks = promises.iter().filter(|promise| promise.name == BLOCKS);
        if blocks.any(|promise| self.has_grown(&promise.value)) {
            let changed = DriveEvent::NamespaceChanged(self.lease().nsid());
            self.context.events.report(IoQueueEvent::Drive(changed));
        }
        Ok(())
    }

    /// Checks a state as far as possible before anything is created from it.
    ///
    /// # Errors
    /// [`BackendStateError::Mismatch`] and [`BackendStateError::Invalid`].
    pub(super) fn check(&self, state: &BackendState) -> Result<(), BackendStateError> {
        let BackendState {
            promises,
            doorbells,
            doorbell_buffer,
            queues,
            revoked,
            counters: _,
            changes,
            lost_writes: _,
        } = state;
        self.check_promises(promises)?;
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

    /// Returns whether the lease has grown beyond the saved number of blocks.
    fn has_grown(&self, saved: &str) -> bool {
        let blocks = self.context.blocks();
        let saved: Result<u64, _> = saved.parse();
        blocks.can_grow() && saved.is_ok_and(|saved| saved < blocks.blocks())
    }

    fn check_promises(&self, saved: &[GuestPromiseState]) -> Result<(), BackendStateError> {
        let here = self.promises();
        let value = |promises: &[GuestPromiseState], name: &str| {
            let promise = promises.iter().find(|promise| promise.name == name);
            promise.map_or_else(|| "not there".to_owned(), |promise| promise.value.clone())
        };
        // The first mismatch is reported. Promises of this back end come first, in the order of their importance; promises that
        // only `saved` has follow.
        for GuestPromiseState { name, .. } in here.iter().chain(saved) {
            let (saved, here) = (value(saved, name), value(&here, name));
            let is_kept = match name.as_str() {
                BLOCKS => self.has_grown(&saved),
                _ => false,
            };
            if saved != here && !is_kept {
                return Err(BackendStateError::Mismatch {
                    promise: name.clone(),
                    saved,
                    here,
                });
            }
        }
        Ok(())
    }

    /// Returns the properties that were promised to the guest, which may rely on them as long as its controller exists.
    fn promises(&self) -> Vec<GuestPromiseState> {
        let LeasedNamespace {
            nsid,
            lba_shift,
            // Only the initial number; the present one is saved below.
            blocks: _,
            serial,
            model,
            nguid,
            eui64,
            uuid,
            command_sets,
        } = self.namespace();
        let ControllerLimits {
            mdts,
            entries_max,
            commands,
            awun_z,
            awupf_z,
            volatile_write_cache,
            deallocated_reads_zeroes,
            sgl_descriptors_max,
            // Commands beyond these limits are executed in parts on any drive.
            no_data_bytes_max: _,
            dsm_range_bytes_max: _,
            dsm_ranges_max: _,
            copy_bytes_max,
            copy_ranges_max,
            // The command set itself promises this limit.
            own_bytes_max: _,
        } = self.limits();
        let blocks = self.context.blocks().blocks();
        let promises: [(&str, &dyn Display); 21] = [
            ("I/O queue pairs", &self.max_queue_pairs()),
            ("doorbell stride (CAP.DSTRD)", &self.doorbells().dstrd()),
            (
                "Doorbell Buffer Config",
                &self.facts.doorbells.offers_buffer(),
            ),
            ("namespace", nsid),
            ("LBA size", &(1_u64 << lba_shift)),
            (BLOCKS, &blocks),
            // These names differ on a different drive.
            ("serial number", serial),
            ("model number", model),
            ("NGUID", &hex(nguid)),
            ("EUI-64", &hex(eui64)),
            ("namespace UUID", &hex(uuid)),
            ("MDTS", mdts),
            ("queue entries (CAP.MQES + 1)", entries_max),
            ("optional commands (ONCS)", &commands.0),
            ("AWUN", awun_z),
            ("AWUPF", awupf_z),
            ("volatile write cache", volatile_write_cache),
            (
                "deallocated blocks read as zeroes",
                deallocated_reads_zeroes,
            ),
            ("SGL descriptors", sgl_descriptors_max),
            ("bytes of a Copy command", copy_bytes_max),
            ("Copy ranges", copy_ranges_max),
        ];
        let own = command_sets.native().promises.iter();
        let own = own.map(|promise| (promise.name.as_str(), &promise.value as &dyn Display));
        promises
            .into_iter()
            .chain(own)
            .map(|(name, value)| GuestPromiseState {
                name: name.to_owned(),
                value: value.to_string(),
            })
            .collect()
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

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Returns the error for a queue of a lease whose blocks no longer exist.
pub(super) fn blocks_gone_error() -> io::Error {
    let gone = "The drive is gone, or its namespace is not the one that was leased";
    io::Error::new(io::ErrorKind::NotConnected, gone)
}

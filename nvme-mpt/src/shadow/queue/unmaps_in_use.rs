//! In-flight commands that use unmapped memory. An unmap is released when the last of its commands ends.
//!
//! The tracking costs nothing per command: the entry sent to the host controller shows where a command's data lies. When a
//! region is unmapped, the poller searches its in-flight commands.

use std::sync::Arc;

use nvme_guest::dma::{PendingUnmap, TableUse};

use crate::host::ListMemory;
use crate::shadow::slot::{CommandSlot, CommandSlots, CompletionWork};

/// Pending unmap with in-flight commands that use its memory.
#[derive(Debug)]
struct UnmapInUse {
    unmap: Arc<PendingUnmap>,
    /// For each slot, true if its command in flight uses the memory.
    commands: Box<[bool]>,
    /// Number of commands in flight that use the memory.
    count: usize,
}

/// All pending unmaps whose memory is used by in-flight commands of a shadow queue.
#[derive(Debug, Default)]
pub(super) struct UnmapsInUse {
    unmaps: Vec<UnmapInUse>,
    /// True if no command uses the memory of some entry of `unmaps` any more, so that the entry can be released.
    has_ended: bool,
}

impl UnmapsInUse {
    /// Finds the in-flight commands that use memory of a pending unmap, and adds the unmap if there are any. Returns whether
    /// there are.
    pub(super) fn track(
        &mut self,
        unmap: &Arc<PendingUnmap>,
        slots: &mut CommandSlots,
        lists: &ListMemory,
    ) -> bool {
        let mut users = vec![false; slots.count()].into_boxed_slice();
        let mut count = 0;
        for (number, slot) in slots.in_flight_mut() {
            if slot.bytes > 0 && has_overlap(slot, unmap, lists) {
                slot.completion_work.add(CompletionWork::STALE);
                users[number] = true;
                count += 1;
            }
        }
        if count > 0 {
            self.unmaps.push(UnmapInUse {
                unmap: unmap.clone(),
                commands: users,
                count,
            });
        }
        count > 0
    }

    /// Handles the end of a command that uses memory of at least one pending unmap.
    #[cold]
    pub(super) fn on_command_completed(&mut self, slot: u16) {
        for held in &mut self.unmaps {
            if let Some(uses @ true) = held.commands.get_mut(usize::from(slot)) {
                *uses = false;
                held.count -= 1;
                self.has_ended |= held.count == 0;
            }
        }
    }

    /// Returns whether [`Self::release_ended`] has work to do.
    #[inline]
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Reports the pending unmaps that no command uses any more, and removes them.
    #[cold]
    pub(super) fn release_ended(&mut self, user: Option<&TableUse>) {
        self.has_ended = false;
        self.unmaps.retain(|held| {
            if held.count == 0
                && let Some(user) = user
            {
                user.release(held.unmap.generation());
            }
            held.count > 0
        });
    }

    /// Notes in the dirty log a write of at most `len` bytes at an IOVA, if a pending unmap has the address. Returns the number
    /// of noted bytes, which ends at the end of that unmap; 0 if none has the address.
    pub(super) fn mark_dirty_iova(&self, iova: u64, len: u64) -> u64 {
        let mut pending_unmaps = self.unmaps.iter().map(|held| &held.unmap);
        pending_unmaps
            .find_map(|unmap| match unmap.mark_dirty_iova(iova, len) {
                0 => None,
                noted => Some(noted),
            })
            .unwrap_or(0)
    }
}

/// Returns whether a command's data overlaps memory of a pending unmap.
fn has_overlap(slot: &CommandSlot, unmap: &PendingUnmap, lists: &ListMemory) -> bool {
    let mut uses = false;
    let data = slot.data_pointer();
    let walked = data.for_each_iova(lists, slot.bytes.into(), |iova, len| {
        uses |= len > 0 && unmap.overlaps_iova(iova, len);
        Ok(())
    });
    // The data pointer was built by the translator and has not changed since, so the walk succeeds.
    debug_assert!(walked.is_ok());
    uses || walked.is_err()
}

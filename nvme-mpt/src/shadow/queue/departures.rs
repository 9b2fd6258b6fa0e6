//! Commands in flight whose memory was unmapped: which they are, and when the last of them is done.
//!
//! Commands cost nothing more for this. The entries that the host controller was given show where a command's data
//! lies. So the poller looks through its commands in flight when a region goes.

use std::sync::Arc;

use crate::dma::{Departure, TableUse};
use crate::host::ListMemory;
use crate::shadow::slot::{Slot, Slots, Special};

/// A departure with commands in flight that use its memory.
#[derive(Debug)]
struct Held {
    departure: Arc<Departure>,
    /// By slot: whether its command does.
    commands: Box<[bool]>,
    /// Number of such commands.
    count: usize,
}

/// All departures that a shadow queue has commands in flight of.
#[derive(Debug, Default)]
pub(super) struct HeldDepartures {
    held: Vec<Held>,
    /// True if one of them has no command any more.
    has_ended: bool,
}

impl HeldDepartures {
    /// Looks for commands in flight that use memory of a departure. Returns whether there are any.
    pub(super) fn hold(
        &mut self,
        departure: &Arc<Departure>,
        slots: &mut Slots,
        lists: &ListMemory,
    ) -> bool {
        let mut users = vec![false; slots.count()].into_boxed_slice();
        let mut count = 0;
        for (number, slot) in slots.in_flight_mut() {
            if slot.bytes > 0 && uses(slot, departure, lists) {
                slot.special.add(Special::STALE);
                users[number] = true;
                count += 1;
            }
        }
        if count > 0 {
            self.held.push(Held {
                departure: departure.clone(),
                commands: users,
                count,
            });
        }
        count > 0
    }

    /// A command is done that uses memory of one of them at least.
    #[cold]
    pub(super) fn completed(&mut self, slot: u16) {
        for held in &mut self.held {
            if let Some(uses @ true) = held.commands.get_mut(usize::from(slot)) {
                *uses = false;
                held.count -= 1;
                self.has_ended |= held.count == 0;
            }
        }
    }

    /// Returns whether [`Self::let_go`] has anything to do.
    #[inline]
    pub(super) fn have_ended(&self) -> bool {
        self.has_ended
    }

    /// Reports those that no command uses any more.
    #[cold]
    pub(super) fn let_go(&mut self, user: Option<&TableUse>) {
        self.has_ended = false;
        self.held.retain(|held| {
            if held.count == 0
                && let Some(user) = user
            {
                user.let_go(held.departure.generation());
            }
            held.count > 0
        });
    }

    /// Notes a write of at most `len` bytes at an IOVA: of as many as lie in memory that went, which it returns.
    pub(super) fn note_written_by_drive(&self, iova: u64, len: u64) -> u64 {
        let mut departures = self.held.iter().map(|held| &held.departure);
        departures
            .find_map(
                |departure| match departure.note_written_by_drive(iova, len) {
                    0 => None,
                    noted => Some(noted),
                },
            )
            .unwrap_or(0)
    }
}

/// Returns whether a command's data lies in memory of a departure, even in part.
fn uses(slot: &Slot, departure: &Departure, lists: &ListMemory) -> bool {
    let mut uses = false;
    let data = slot.data();
    let walked = data.for_each_iova(lists, slot.bytes.into(), |iova, len| {
        uses |= len > 0 && departure.has_iova(iova, len);
        Ok(())
    });
    // It was translated by us, and has not changed since.
    debug_assert!(walked.is_ok());
    uses || walked.is_err()
}

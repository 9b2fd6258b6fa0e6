//! Doorbell Buffer Config (Base 2.0, section 5.8).
//!
//! I/O queues take their doorbell values from the buffers. For the admin queue, EventIdx always requests a register write for
//! the next doorbell move, see [`GuestAdminRings`](super::admin_rings::GuestAdminRings). A controller reset drops the buffers,
//! because the next driver may use their pages for other data.

use nvme_guest::{DoorbellBuffer, Gpa, LeaseFacts, QueueError};
use nvme_spec::{sqe::Sqe, status::Status};

use super::{AdminCommandContext, failure::AdminCommandFailure};

/// Returns whether the controller offers Doorbell Buffer Config.
pub(super) fn is_supported(facts: &LeaseFacts) -> bool {
    facts.doorbells.offers_buffer()
}

/// Carries out Doorbell Buffer Config: lets the I/O queues use the buffer. Returns the buffer, for the admin queue.
pub(super) fn configure(
    controller: AdminCommandContext<'_>,
    sqe: &Sqe,
) -> Result<DoorbellBuffer, AdminCommandFailure> {
    if !is_supported(controller.facts) {
        return Err(Status::INVALID_OPCODE.into());
    }
    let buffer = DoorbellBuffer {
        shadow: Gpa(sqe.prp1()),
        event_idx: Gpa(sqe.prp2()),
    };
    if !buffer.shadow.is_page_aligned() || !buffer.event_idx.is_page_aligned() {
        return Err(Status::INVALID_FIELD.into());
    }
    controller
        .backend
        .set_doorbell_buffer_within(buffer, controller.deadline.remaining())
        .map_err(|error| match error {
            QueueError::Timeout(_) => AdminCommandFailure::QueueBusy,
            QueueError::NotMapped { .. } => AdminCommandFailure::NotMapped(Status::INVALID_FIELD),
            error => {
                log::warn!("Doorbell Buffer Config failed: {error}");
                Status::INVALID_FIELD.into()
            }
        })?;
    Ok(buffer)
}

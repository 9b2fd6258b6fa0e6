//! Abort (Base 2.0, section 5.1).
//!
//! Only Asynchronous Event Requests can be aborted, because no other admin command waits for long in this controller. I/O
//! commands are already at the drive, which completes them. So an Abort of an I/O command returns "not aborted" without a wait,
//! and the guest's driver then waits or resets the controller.

use nvme_spec::{admin::AbortCommand, ids::QueueId};

use super::{admin_rings::AdminCompletion, async_events::AsyncEvents};

/// Abort Command Limit, `ACL`, as a zero-based value: four commands, as the specification recommends. A guest never reaches the
/// limit, because an Abort completes without a wait.
pub(super) const LIMIT_Z: u8 = 3;

/// Value of completion dword 0 for a command that was aborted. Bit 0 is set if the command was *not* aborted.
const ABORTED: u32 = 0;
const NOT_ABORTED: u32 = 1;

/// Aborts an Asynchronous Event Request that waits for an event. Returns the completion of the aborted request, which must be
/// posted first, and dword 0 of the Abort's completion.
pub(super) fn abort(
    command: AbortCommand,
    events: &mut AsyncEvents,
) -> (Option<AdminCompletion>, u32) {
    let request = if command.sqid == QueueId::ADMIN {
        events.abort(command.cid)
    } else {
        None
    };
    let dw0 = if request.is_some() {
        ABORTED
    } else {
        NOT_ABORTED
    };
    (request, dw0)
}

#[cfg(test)]
mod tests {
    use nvme_spec::{ids::CommandId, status::Status};

    use super::*;

    #[test]
    fn a_request_for_events_is_aborted() {
        let mut events = AsyncEvents::default();
        events.add_request(CommandId(5)).unwrap();
        let command = AbortCommand {
            sqid: QueueId::ADMIN,
            cid: CommandId(5),
        };
        let completion = AdminCompletion {
            cid: CommandId(5),
            status: Status::ABORT_REQUESTED,
            dw0: 0,
        };
        assert_eq!(abort(command, &mut events), (Some(completion), 0));
        assert_eq!(
            abort(command, &mut events),
            (None, 1),
            "there is none any more"
        );
    }

    #[test]
    fn an_io_command_is_not_aborted() {
        let mut events = AsyncEvents::default();
        events.add_request(CommandId(5)).unwrap();
        let command = AbortCommand {
            sqid: QueueId(1),
            cid: CommandId(5),
        };
        assert_eq!(abort(command, &mut events), (None, 1));
    }
}

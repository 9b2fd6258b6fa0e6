//! Asynchronous events (Base 2.0, section 5.2). After the controller has reported an event, it masks the event's type until the
//! guest reads the associated log page.

use std::collections::VecDeque;

use nvme_guest::BackendStateError;
use nvme_spec::{
    event::{AsyncEvent, AsyncEventType},
    ids::CommandId,
    status::Status,
};

use super::admin_rings::AdminCompletion;
use crate::state::parts::AsyncEventsState;

/// Asynchronous Event Request Limit, `AERL`, as a zero-based value: four requests, the minimum that is recommended.
pub(super) const LIMIT_Z: u8 = 3;

/// Asynchronous events of one controller, and the guest's requests for them.
#[derive(Debug, Default)]
pub(super) struct AsyncEvents {
    /// Identifiers of the guest's requests that wait for an event, oldest first.
    requests: VecDeque<CommandId>,
    /// Events that wait for a request of the guest, without duplicates.
    events: VecDeque<AsyncEvent>,
    /// Masked types of events, one bit each. A type is masked from the report of an event until the guest reads its log page.
    masked: u8,
}

impl AsyncEvents {
    /// Adds an Asynchronous Event Request of the guest. It completes when an event occurs. Fails if the limit is reached.
    pub(super) fn add_request(&mut self, cid: CommandId) -> Result<(), Status> {
        if self.requests.len() > usize::from(LIMIT_Z) {
            return Err(Status::ASYNC_EVENT_LIMIT_EXCEEDED);
        }
        self.requests.push_back(cid);
        Ok(())
    }

    /// Aborts a request that waits for an event. Returns its completion; `None` if there is no such request.
    pub(super) fn abort(&mut self, cid: CommandId) -> Option<AdminCompletion> {
        let index = self.requests.iter().position(|request| *request == cid)?;
        self.requests.remove(index)?;
        Some(AdminCompletion {
            cid,
            status: Status::ABORT_REQUESTED,
            dw0: 0,
        })
    }

    /// Adds an event for the guest. Returns `false` if an equal event already waits for a request.
    pub(super) fn raise(&mut self, event: AsyncEvent) -> bool {
        let news = !self.events.contains(&event);
        if news {
            self.events.push_back(event);
        }
        news
    }

    /// Adds an event for the guest, in front of all events that wait for a request.
    pub(super) fn raise_first(&mut self, event: AsyncEvent) {
        self.events.retain(|other| *other != event);
        self.events.push_front(event);
    }

    /// Completes a request without an event, so that the guest's interrupt handler finds a completion. Masks no type of event,
    /// because the guest will not read a log page, which would unmask it. Returns `None` if no request waits.
    pub(super) fn complete_without_event(&mut self) -> Option<AdminCompletion> {
        Some(AdminCompletion {
            cid: self.requests.pop_front()?,
            status: Status::SUCCESS,
            dw0: AsyncEvent::EMPTY.0,
        })
    }

    /// Unmasks an event type, because the guest has read its log page with Retain Asynchronous Event clear.
    pub(super) fn unmask(&mut self, event_type: AsyncEventType) {
        self.masked &= !event_type_bit(event_type);
    }

    /// Completes a request with the first event that may be reported, and masks the event's type. Returns `None` if there is no
    /// request, or no such event.
    pub(super) fn report_next(&mut self) -> Option<AdminCompletion> {
        let masked = self.masked;
        let index = self
            .events
            .iter()
            .position(|event| event_type_bit(event.event_type()) & masked == 0)?;
        let cid = self.requests.pop_front()?;
        let event = self.events.remove(index)?;
        self.masked |= event_type_bit(event.event_type());
        Some(AdminCompletion {
            cid,
            status: Status::SUCCESS,
            dw0: event.0,
        })
    }
}

/// Maximum number of waiting events in a saved state. It is above the number of events that differ.
const EVENTS_MAX: usize = 32;

impl AsyncEvents {
    pub(super) fn save(&self) -> AsyncEventsState {
        let Self {
            requests,
            events,
            masked,
        } = self;
        AsyncEventsState {
            requests: requests.iter().map(|cid| cid.0).collect(),
            events: events.iter().map(|event| event.0).collect(),
            masked: *masked,
        }
    }

    pub(super) fn check(state: &AsyncEventsState) -> Result<(), BackendStateError> {
        let AsyncEventsState {
            requests,
            events,
            masked: _,
        } = state;
        for (name, count, most) in [
            (
                "Asynchronous Event Requests",
                requests.len(),
                usize::from(LIMIT_Z) + 1,
            ),
            ("asynchronous events", events.len(), EVENTS_MAX),
        ] {
            if count > most {
                return Err(BackendStateError::invalid(
                    name,
                    count,
                    format!("at most {most}"),
                ));
            }
        }
        Ok(())
    }

    /// Restores the events from a checked state.
    pub(super) fn from_state(state: &AsyncEventsState) -> Self {
        let AsyncEventsState {
            requests,
            events,
            masked,
        } = state;
        Self {
            requests: requests.iter().copied().map(CommandId).collect(),
            events: events.iter().copied().map(AsyncEvent).collect(),
            masked: *masked,
        }
    }
}

fn event_type_bit(event_type: AsyncEventType) -> u8 {
    1 << (event_type.0 & 0b111)
}

#[cfg(test)]
mod tests {
    use nvme_spec::event::SmartEvent;

    use super::*;

    fn completion(cid: u16, dw0: u32) -> Option<AdminCompletion> {
        Some(AdminCompletion {
            cid: CommandId(cid),
            status: Status::SUCCESS,
            dw0,
        })
    }

    #[test]
    fn an_event_completes_the_oldest_request() {
        let mut events = AsyncEvents::default();
        events.add_request(CommandId(7)).unwrap();
        events.add_request(CommandId(8)).unwrap();
        assert_eq!(events.report_next(), None);
        assert!(events.raise(AsyncEvent::INVALID_DOORBELL_VALUE));
        assert_eq!(events.report_next(), completion(7, 0x0001_0100));
        assert_eq!(events.report_next(), None);
    }

    #[test]
    fn an_event_waits_for_a_request_and_waits_once() {
        let mut events = AsyncEvents::default();
        assert!(events.raise(AsyncEvent::INVALID_DOORBELL_VALUE));
        assert!(!events.raise(AsyncEvent::INVALID_DOORBELL_VALUE));
        assert_eq!(events.report_next(), None);
        events.add_request(CommandId(1)).unwrap();
        assert_eq!(events.report_next(), completion(1, 0x0001_0100));
    }

    #[test]
    fn a_type_is_masked_until_its_log_page_is_read() {
        let mut events = AsyncEvents::default();
        for cid in 1..=4 {
            events.add_request(CommandId(cid)).unwrap();
        }
        events.raise(AsyncEvent::INVALID_DOORBELL_VALUE);
        assert!(events.report_next().is_some());
        events.raise(AsyncEvent::INVALID_DOORBELL_REGISTER);
        assert_eq!(events.report_next(), None, "errors are masked");
        events.raise(AsyncEvent::smart(SmartEvent::TEMPERATURE_THRESHOLD));
        assert_eq!(
            events.report_next(),
            completion(2, 0x0002_0101),
            "health is not"
        );
        events.unmask(AsyncEventType::SMART_HEALTH);
        assert_eq!(events.report_next(), None);
        events.unmask(AsyncEventType::ERROR);
        assert_eq!(events.report_next(), completion(3, 0x0001_0000));
    }

    #[test]
    fn requests_beyond_the_limit_are_refused() {
        let mut events = AsyncEvents::default();
        for cid in 0..4 {
            assert_eq!(events.add_request(CommandId(cid)), Ok(()));
        }
        let refused = Err(Status::ASYNC_EVENT_LIMIT_EXCEEDED);
        assert_eq!(events.add_request(CommandId(4)), refused);
        assert_eq!(
            events
                .abort(CommandId(2))
                .map(|completion| completion.status),
            Some(Status::ABORT_REQUESTED)
        );
        assert_eq!(events.abort(CommandId(2)), None);
        assert_eq!(events.add_request(CommandId(4)), Ok(()));
        events.raise(AsyncEvent::INVALID_DOORBELL_VALUE);
        assert_eq!(events.report_next(), completion(0, 0x0001_0100));
    }
}

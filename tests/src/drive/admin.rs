//! Admin commands that host drivers need (NVMe Base 2.0, section 5).

use super::data;
use super::faults::AbortReaction;
use super::queues::{Cq, Sq};
use super::{Controller, DoorbellBufferUse, ModelCommand, UnreadEvent};
use crate::admin::{feature, log};
use crate::command::{Sqe, admin};
use crate::identify::IDENTIFY_SIZE;
use crate::memory::PAGE_SIZE;
use crate::status::{self, StatusCode};

const PAGE: u64 = PAGE_SIZE as u64;

/// CC.IOSQES and CC.IOCQES: entries of 64 and of 16 bytes.
const ENTRY_SIZES: u32 = 4 << 20 | 6 << 16;

/// Maximum number of outstanding Asynchronous Event Requests.
const EVENT_REQUESTS: usize = 4;

/// Asynchronous Event Configuration: enables Namespace Attribute Notices.
const NAMESPACE_NOTICES: u32 = 1 << 8;

type Answer = Result<u32, StatusCode>;

impl Controller {
    pub(super) fn admin(&mut self, sqe: &Sqe) {
        let answer = match sqe.opcode() {
            admin::ASYNC_EVENT_REQUEST => {
                if self.event_requests.len() < EVENT_REQUESTS {
                    return self.event_requests.push_back(sqe.cid());
                }
                self.record_violation("More Asynchronous Event Requests than AERL allows");
                Err(status::AER_LIMIT_EXCEEDED)
            }
            admin::ABORT => {
                self.counters.aborts += 1;
                if self.faults.aborts == AbortReaction::Hang {
                    return self.fetched.push(ModelCommand {
                        sq: 0,
                        sqe: *sqe,
                        due: None,
                        effect: None,
                    });
                }
                Ok(self.abort(sqe))
            }
            admin::IDENTIFY => match self.identify(sqe.cdw(10) as u8, sqe.nsid()) {
                Ok(data) => self.send(sqe, &data),
                Err(code) => Err(code),
            },
            admin::GET_LOG_PAGE => self.log_page(sqe),
            admin::CREATE_CQ => self.create_cq(sqe),
            admin::CREATE_SQ => self.create_sq(sqe),
            admin::DELETE_SQ => self.delete_sq(sqe.cdw(10) as u16),
            admin::DELETE_CQ => self.delete_cq(sqe.cdw(10) as u16),
            admin::SET_FEATURES => self.set_features(sqe),
            admin::GET_FEATURES => self.get_features(sqe),
            admin::DOORBELL_BUFFER_CONFIG => self.configure_doorbell_buffer(sqe),
            _ => Err(status::INVALID_OPCODE),
        };
        self.complete(0, sqe, answer, true);
    }

    /// Returns data to the host, at most as much as the command's two PRP entries describe.
    fn send(&mut self, sqe: &Sqe, data: &[u8]) -> Answer {
        let mut data = data.to_vec();
        let len = data.len();
        if let Some(forge) = &mut self.forger {
            forge(sqe, &mut data);
            data.resize(len, 0);
        }
        let data = &data[..];
        let sent = data::pieces(&self.iommu, sqe, data.len()).and_then(|pieces| {
            let mut rest = data;
            for (iova, len) in pieces {
                let (now, later) = rest.split_at(len);
                let unsound = |_| data::InvalidDataPointer {
                    status: status::DATA_TRANSFER_ERROR,
                    what: "data outside of memory",
                };
                self.iommu.write(iova, now).map_err(unsound)?;
                rest = later;
            }
            Ok(0)
        });
        sent.map_err(|unsound| {
            self.record_violation(format!("{}: {sqe:?}", unsound.what));
            unsound.status
        })
    }

    /// Returns Dword 0 of the Abort: 1 if the command was not aborted.
    fn abort(&mut self, sqe: &Sqe) -> u32 {
        let (sqid, cid) = (sqe.cdw(10) as u16, (sqe.cdw(10) >> 16) as u16);
        let named = |work: &ModelCommand| work.sq == sqid && work.sqe.cid() == cid;
        match self.fetched.iter().position(named) {
            Some(index) if self.faults.aborts == AbortReaction::Work => {
                let work = self.fetched.remove(index);
                self.counters.completed += u64::from(sqid != 0);
                self.complete(sqid, &work.sqe, Err(status::ABORT_REQUESTED), false);
                0
            }
            _ => 1,
        }
    }

    fn queue_memory(&mut self, sqe: &Sqe) -> Result<(u16, u64, u32), StatusCode> {
        let (id, entries) = (sqe.cdw(10) as u16, (sqe.cdw(10) >> 16) + 1);
        let base = sqe.0[3];
        let unsound = if id == 0 || id > self.options.queue_pairs {
            Some((status::INVALID_QUEUE_ID, "identifier"))
        } else if entries < 2 || entries > self.options.entries_max {
            Some((status::INVALID_QUEUE_SIZE, "size"))
        } else if sqe.cdw(11) & 1 == 0 || !base.is_multiple_of(PAGE) {
            Some((
                status::INVALID_FIELD,
                "memory, which is to be contiguous pages",
            ))
        } else if self.cc & (0xFF << 16) != ENTRY_SIZES {
            Some((
                status::INVALID_QUEUE_SIZE,
                "entry size (CC.IOSQES, CC.IOCQES)",
            ))
        } else {
            None
        };
        match unsound {
            Some((code, what)) => {
                self.record_violation(format!("A queue's {what}: {sqe:?}"));
                Err(code)
            }
            None => Ok((id, base, entries)),
        }
    }

    fn create_cq(&mut self, sqe: &Sqe) -> Answer {
        let (id, base, entries) = self.queue_memory(sqe)?;
        if self.cqs.contains_key(&id) {
            self.record_violation(format!("Completion queue {id} is there already"));
            return Err(status::INVALID_QUEUE_ID);
        }
        let interrupts = sqe.cdw(11) & 1 << 1 != 0;
        let vector = interrupts.then_some((sqe.cdw(11) >> 16) as usize);
        self.cqs.insert(id, Cq::new(base, entries, vector));
        Ok(0)
    }

    fn create_sq(&mut self, sqe: &Sqe) -> Answer {
        let (id, base, entries) = self.queue_memory(sqe)?;
        let cq = (sqe.cdw(11) >> 16) as u16;
        if self.sqs.contains_key(&id) || cq == 0 || !self.cqs.contains_key(&cq) {
            self.record_violation(format!("Submission queue {id} cannot be created: {sqe:?}"));
            return Err(match self.sqs.contains_key(&id) {
                true => status::INVALID_QUEUE_ID,
                false => status::CQ_INVALID,
            });
        }
        let priority = (sqe.cdw(11) >> 1 & 0b11) as u8;
        self.sqs.insert(id, Sq::new(base, entries, cq, priority));
        self.counters.queues_created += 1;
        let now = self.sqs.len() as u64 - 1;
        self.counters.queues_most = self.counters.queues_most.max(now);
        Ok(0)
    }

    fn delete_sq(&mut self, id: u16) -> Answer {
        if id == 0 || !self.sqs.contains_key(&id) {
            self.record_violation(format!(
                "Submission queue {id}, which is not, was to be deleted"
            ));
            return Err(status::INVALID_QUEUE_ID);
        }
        let of_queue = self.fetched.extract_if(.., |work| work.sq == id);
        for work in of_queue.collect::<Vec<_>>() {
            self.counters.completed += 1;
            self.complete(id, &work.sqe, Err(status::ABORTED_SQ_DELETION), false);
        }
        self.post_waiting();
        self.sqs.remove(&id);
        Ok(0)
    }

    fn delete_cq(&mut self, id: u16) -> Answer {
        let used = self.sqs.values().any(|sq| sq.cq == id);
        if id == 0 || used || self.cqs.remove(&id).is_none() {
            self.record_violation(format!("Completion queue {id} cannot be deleted"));
            return Err(match used {
                true => status::INVALID_QUEUE_DELETION,
                false => status::INVALID_QUEUE_ID,
            });
        }
        Ok(0)
    }

    fn set_features(&mut self, sqe: &Sqe) -> Answer {
        match sqe.cdw(10) as u8 {
            feature::NUMBER_OF_QUEUES => {
                if self.sqs.len() > 1 || self.cqs.len() > 1 {
                    self.record_violation("Number of Queues while there are I/O queues");
                    return Err(status::COMMAND_SEQUENCE_ERROR);
                }
                let mut granted = (u32::from(self.options.queue_pairs - 1) * 0x1_0001)
                    .to_le_bytes()
                    .to_vec();
                if let Some(forge) = &mut self.forger {
                    forge(sqe, &mut granted);
                    granted.resize(4, 0);
                }
                Ok(crate::identify::field::u32(&granted, 0))
            }
            feature::ARBITRATION => {
                self.counters.arbitrations += 1;
                self.arbitration = sqe.cdw(11);
                Ok(0)
            }
            feature::ASYNC_EVENT_CONFIG => {
                self.event_config = sqe.cdw(11);
                Ok(0)
            }
            feature::VOLATILE_WRITE_CACHE if self.options.volatile_cache => Ok(0),
            _ => Err(status::INVALID_FIELD),
        }
    }

    fn get_features(&mut self, sqe: &Sqe) -> Answer {
        match sqe.cdw(10) as u8 {
            feature::NUMBER_OF_QUEUES => Ok(u32::from(self.options.queue_pairs - 1) * 0x1_0001),
            feature::ARBITRATION => Ok(self.arbitration),
            feature::ASYNC_EVENT_CONFIG => Ok(self.event_config),
            feature::VOLATILE_WRITE_CACHE if self.options.volatile_cache => Ok(1),
            _ => Err(status::INVALID_FIELD),
        }
    }

    fn configure_doorbell_buffer(&mut self, sqe: &Sqe) -> Answer {
        if self.options.doorbell_buffer == DoorbellBufferUse::None {
            self.record_violation("Doorbell Buffer Config, which is not offered");
            return Err(status::INVALID_OPCODE);
        }
        let pages = [sqe.0[3], sqe.0[4]];
        if pages.iter().any(|page| !page.is_multiple_of(PAGE)) {
            self.record_violation("The Doorbell Buffer is not of pages");
            return Err(status::INVALID_FIELD);
        }
        self.shadow = Some(pages);
        Ok(0)
    }

    fn log_page(&mut self, sqe: &Sqe) -> Answer {
        let id = sqe.cdw(10) as u8;
        let dwords = (sqe.cdw(10) >> 16) as usize | ((sqe.cdw(11) & 0xFFFF) as usize) << 16;
        let (len, offset) = (4 * (dwords + 1), sqe.cdw(12) as usize);
        if len > IDENTIFY_SIZE {
            return Err(status::INVALID_FIELD);
        }
        let mut page = match id {
            log::ERROR => self.error_information(),
            log::SMART => self.health(),
            log::CHANGED_NAMESPACES => self.changed_namespaces(),
            log::ENDURANCE_GROUP_EVENTS => vec![0; 8],
            log::FIRMWARE_SLOT => vec![0; 512],
            log::TELEMETRY_CONTROLLER_INITIATED if len % 512 == 0 => vec![0; 512],
            _ => return Err(status::INVALID_LOG_PAGE),
        };
        page.resize(offset + len, 0);
        let answer = self.send(sqe, &page[offset..]);
        let retain = sqe.cdw(10) & 1 << 15 != 0;
        if !retain && answer.is_ok() {
            self.unread_events.retain(|event| event.log_page != id);
            if id == log::CHANGED_NAMESPACES {
                self.changed_namespaces.clear();
            }
        }
        answer
    }

    /// Queues an event, if the host has enabled its kind (Asynchronous Event Configuration).
    pub(super) fn queue_event(&mut self, kind: u8, info: u8, log_page: u8) {
        let wanted = match kind {
            1 => self.event_config & 0xFF != 0,
            2 => self.event_config & NAMESPACE_NOTICES != 0,
            _ => true,
        };
        if wanted {
            let event = u32::from(kind) | u32::from(info) << 8 | u32::from(log_page) << 16;
            self.events.push_back(event);
        }
    }

    /// Completes Asynchronous Event Requests with queued events. After an event, its type is masked until the host reads
    /// its log page.
    pub(super) fn report_events(&mut self) {
        let kind = |event: &u32| (event & 0b111) as u8;
        let tellable = |event: &u32| {
            let mut unread = self.unread_events.iter();
            unread.all(|masking| masking.kind != kind(event))
        };
        if let Some(index) = self.events.iter().position(tellable)
            && let Some(cid) = self.event_requests.pop_front()
            && let Some(event) = self.events.remove(index)
        {
            let log_page = (event >> 16) as u8;
            let kind = kind(&event);
            self.unread_events.push(UnreadEvent { kind, log_page });
            let request = Sqe::new(admin::ASYNC_EVENT_REQUEST, 0).with_cid(cid);
            self.complete(0, &request, Ok(event), false);
            self.post_waiting();
        }
    }
}

//! Admin commands of the guest driver (NVMe Base 2.0, section 5).

use std::time::Duration;

use crate::command::{Sqe, admin};
use crate::controller::Controller;
use crate::doorbell::DoorbellBuffer;
use crate::error::{Error, Result};
use crate::identify::{
    IDENTIFY_SIZE, IdentifyController, IdentifyNamespace, NamespaceDescriptor, cns,
    namespace_descriptors, namespace_list,
};
use crate::prp;
use crate::queue::{RESERVED_CIDS, WaitTimeout};

/// Feature identifiers (NVMe Base 2.0, figure 317).
pub mod feature {
    #![expect(missing_docs, reason = "the names are the specification's")]
    pub const ARBITRATION: u8 = 0x01;
    pub const POWER_MANAGEMENT: u8 = 0x02;
    pub const LBA_RANGE_TYPE: u8 = 0x03;
    pub const TEMPERATURE_THRESHOLD: u8 = 0x04;
    pub const ERROR_RECOVERY: u8 = 0x05;
    pub const VOLATILE_WRITE_CACHE: u8 = 0x06;
    pub const NUMBER_OF_QUEUES: u8 = 0x07;
    pub const INTERRUPT_COALESCING: u8 = 0x08;
    pub const INTERRUPT_VECTOR_CONFIG: u8 = 0x09;
    pub const WRITE_ATOMICITY: u8 = 0x0a;
    pub const ASYNC_EVENT_CONFIG: u8 = 0x0b;
    pub const TIMESTAMP: u8 = 0x0e;
    pub const HOST_BEHAVIOR: u8 = 0x16;
}

/// Log page identifiers (NVMe Base 2.0, figure 202).
pub mod log {
    #![expect(missing_docs, reason = "the names are the specification's")]
    pub const SUPPORTED_PAGES: u8 = 0x00;
    pub const ERROR: u8 = 0x01;
    pub const SMART: u8 = 0x02;
    pub const FIRMWARE_SLOT: u8 = 0x03;
    pub const CHANGED_NAMESPACES: u8 = 0x04;
    pub const COMMAND_EFFECTS: u8 = 0x05;
    pub const TELEMETRY_CONTROLLER_INITIATED: u8 = 0x08;
    pub const ENDURANCE_GROUP_EVENTS: u8 = 0x0f;
    pub const CHANGED_ZONES: u8 = 0xbf;
}

/// Value of a feature that Get Features returns (NVMe Base 2.0, figure 193).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Select {
    /// The current value.
    Current = 0,
    /// The default value.
    Default = 1,
    /// The saved value.
    Saved = 2,
    /// Capabilities of the feature.
    Capabilities = 3,
}

/// Decoded completion of an Asynchronous Event Request (NVMe Base 2.0, figure 145).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AsyncEvent {
    /// Type: 0 error, 1 SMART, 2 notice.
    pub kind: u8,
    /// Additional information about the event; its meaning depends on the type.
    pub info: u8,
    /// Log page with details. Reading it clears the event.
    pub log_page: u8,
}

/// Parameters of Get Log Page (NVMe Base 2.0, section 5.16).
#[derive(Clone, Copy, Debug)]
pub struct LogPage {
    /// Log page identifier.
    pub id: u8,
    /// Namespace, or all ones for the controller.
    pub nsid: u32,
    /// Offset in the log page, in bytes.
    pub offset: u64,
    /// Size in bytes, a multiple of 4.
    pub len: usize,
    /// Retain Asynchronous Event: reading does not clear the event.
    pub retain: bool,
}

impl LogPage {
    /// Returns the parameters for a whole log page of the controller.
    pub fn of_controller(id: u8, len: usize) -> Self {
        Self {
            id,
            nsid: u32::MAX,
            offset: 0,
            len,
            retain: false,
        }
    }
}

impl Controller {
    /// Executes an admin command and returns its `len` bytes of data.
    ///
    /// # Errors
    /// The command fails.
    pub fn admin_read(&mut self, sqe: Sqe, len: usize) -> Result<Vec<u8>> {
        let data = self.memory().alloc(len)?;
        let prepared = prp::buffer(&data, 0, len)?;
        self.admin(sqe.with_data(prepared.pointer))?;
        Ok(data.to_vec(0, len))
    }

    /// Executes an admin command that sends data. Returns Dword 0 of the completion.
    ///
    /// # Errors
    /// The command fails.
    pub fn admin_write(&mut self, sqe: Sqe, bytes: &[u8]) -> Result<u32> {
        let data = self.memory().alloc(bytes.len())?;
        data.write(0, bytes);
        let prepared = prp::buffer(&data, 0, bytes.len())?;
        Ok(self.admin(sqe.with_data(prepared.pointer))?.dw0())
    }

    /// Executes Identify with any CNS.
    ///
    /// # Errors
    /// The command fails.
    pub fn identify(&mut self, cns: u8, nsid: u32, csi: u8) -> Result<Vec<u8>> {
        self.admin_read(Sqe::identify(cns, nsid, csi), IDENTIFY_SIZE)
    }

    /// Executes Identify Controller.
    ///
    /// # Errors
    /// The command fails.
    pub fn identify_controller(&mut self) -> Result<IdentifyController> {
        self.identify(cns::CONTROLLER, 0, 0)
            .map(IdentifyController::parse)
    }

    /// Executes Identify Namespace.
    ///
    /// # Errors
    /// The command fails, or the logical block size is invalid.
    pub fn identify_namespace(&mut self, nsid: u32) -> Result<IdentifyNamespace> {
        let namespace = self
            .identify(cns::NAMESPACE, nsid, 0)
            .map(IdentifyNamespace::parse)?;
        match namespace.block_size {
            512..=65536 => Ok(namespace),
            _ if !namespace.is_active() => Ok(namespace),
            size => Err(Error::Invalid {
                what: "logical block size",
                value: size.to_string(),
            }),
        }
    }

    /// Returns the active namespaces with identifiers above `after`.
    ///
    /// # Errors
    /// The command fails.
    pub fn active_namespaces(&mut self, after: u32) -> Result<Vec<u32>> {
        let raw = self.identify(cns::ACTIVE_NAMESPACES, after, 0)?;
        Ok(namespace_list(&raw))
    }

    /// Returns the identification descriptors of a namespace.
    ///
    /// # Errors
    /// The command fails.
    pub fn namespace_descriptors(&mut self, nsid: u32) -> Result<Vec<NamespaceDescriptor>> {
        let raw = self.identify(cns::NAMESPACE_DESCRIPTORS, nsid, 0)?;
        Ok(namespace_descriptors(&raw))
    }

    /// Executes Get Features. Returns Dword 0 of the completion.
    ///
    /// # Errors
    /// The command fails.
    pub fn get_feature(&mut self, id: u8, select: Select, nsid: u32, cdw11: u32) -> Result<u32> {
        Ok(self.admin(get_features(id, select, nsid, cdw11))?.dw0())
    }

    /// Executes Get Features of a feature with a data structure, and returns the data.
    ///
    /// # Errors
    /// The command fails.
    pub fn get_feature_data(
        &mut self,
        id: u8,
        select: Select,
        nsid: u32,
        len: usize,
    ) -> Result<Vec<u8>> {
        self.admin_read(get_features(id, select, nsid, 0), len)
    }

    /// Executes Set Features without saving. Returns Dword 0 of the completion.
    ///
    /// # Errors
    /// The command fails.
    pub fn set_feature(&mut self, id: u8, nsid: u32, cdw11: u32) -> Result<u32> {
        Ok(self.admin(set_features(id, nsid, cdw11))?.dw0())
    }

    /// Executes Set Features of a feature with a data structure.
    ///
    /// # Errors
    /// The command fails.
    pub fn set_feature_data(&mut self, id: u8, nsid: u32, cdw11: u32, bytes: &[u8]) -> Result<u32> {
        self.admin_write(set_features(id, nsid, cdw11), bytes)
    }

    /// Requests `pairs` I/O queue pairs. Returns the granted number, which may be larger than `pairs`.
    ///
    /// # Errors
    /// The command fails.
    pub fn set_number_of_queues(&mut self, pairs: u16) -> Result<u16> {
        // Both counts are zero-based; FFFFh is reserved.
        let count = u32::from(pairs.saturating_sub(1).min(0xfffe));
        let granted = self.set_feature(feature::NUMBER_OF_QUEUES, 0, count << 16 | count)?;
        Ok((granted as u16)
            .min((granted >> 16) as u16)
            .saturating_add(1))
    }

    /// Executes Doorbell Buffer Config with these pages.
    ///
    /// # Errors
    /// The command fails.
    pub fn doorbell_buffer_config(&mut self, buffer: &DoorbellBuffer) -> Result<()> {
        let pages =
            crate::command::DataPointer::prp(buffer.shadow().gpa(), buffer.event_idx().gpa());
        self.admin(Sqe::new(admin::DOORBELL_BUFFER_CONFIG, 0).with_data(pages))?;
        Ok(())
    }

    /// Executes Get Log Page.
    ///
    /// # Errors
    /// The command fails.
    pub fn log_page(&mut self, page: LogPage) -> Result<Vec<u8>> {
        let dwords = (page.len / 4).saturating_sub(1) as u32;
        let sqe = Sqe::new(admin::GET_LOG_PAGE, page.nsid)
            .with_cdw(
                10,
                dwords << 16 | u32::from(page.retain) << 15 | u32::from(page.id),
            )
            .with_cdw(11, dwords >> 16)
            .with_cdw(12, page.offset as u32)
            .with_cdw(13, (page.offset >> 32) as u32);
        self.admin_read(sqe, page.len)
    }

    /// Sends Abort, and returns whether the controller reports the command as aborted.
    ///
    /// # Errors
    /// The Abort command itself fails.
    pub fn abort(&mut self, sq: u16, cid: u16) -> Result<bool> {
        Ok(self.admin(Sqe::abort(sq, cid))?.dw0() & 1 == 0)
    }

    /// Executes Keep Alive.
    ///
    /// # Errors
    /// The command fails.
    pub fn keep_alive(&mut self) -> Result<()> {
        self.admin(Sqe::new(admin::KEEP_ALIVE, 0))?;
        Ok(())
    }

    /// Submits an Asynchronous Event Request.
    ///
    /// # Errors
    /// The controller is disabled or its queue is full.
    pub fn request_async_event(&mut self) -> Result<()> {
        let cid = self.next_event_cid;
        let sqe = Sqe::new(admin::ASYNC_EVENT_REQUEST, 0).with_cid(cid);
        let queue = self.admin_queue()?;
        if !queue.push(&sqe) {
            return Err(Error::QueueFull { queue: 0 });
        }
        queue.ring();
        // FFFFh is skipped: in the Error Information log page, it means "no command".
        self.next_event_cid = match cid {
            0xfffe => RESERVED_CIDS,
            cid => cid + 1,
        };
        self.event_requests.push(cid);
        Ok(())
    }

    /// Returns the number of outstanding Asynchronous Event Requests.
    pub fn outstanding_event_requests(&self) -> usize {
        self.event_requests.len()
    }

    /// Returns the next asynchronous event; `None` if no request completes in time.
    ///
    /// # Errors
    /// The controller is disabled, a request completes with an error, or a completion belongs to another command.
    pub fn async_event(&mut self, timeout: Duration) -> Result<Option<AsyncEvent>> {
        let mut wait = WaitTimeout::new(timeout);
        loop {
            let queue = self.admin_queue()?;
            if let Some(cqe) = queue.poll() {
                queue.ring();
                let Some(at) = self.event_requests.iter().position(|&c| c == cqe.cid()) else {
                    return Err(Error::UnexpectedCompletion { queue: 0, cqe });
                };
                self.event_requests.remove(at);
                if !cqe.status().is_success() {
                    let opcode = admin::ASYNC_EVENT_REQUEST;
                    return Err(Error::Status { opcode, cqe });
                }
                return Ok(Some(AsyncEvent {
                    kind: (cqe.dw0() & 0b111) as u8,
                    info: (cqe.dw0() >> 8) as u8,
                    log_page: (cqe.dw0() >> 16) as u8,
                }));
            }
            if !wait.pause() {
                return Ok(None);
            }
        }
    }
}

fn get_features(id: u8, select: Select, nsid: u32, cdw11: u32) -> Sqe {
    Sqe::new(admin::GET_FEATURES, nsid)
        .with_cdw(10, (select as u32) << 8 | u32::from(id))
        .with_cdw(11, cdw11)
}

fn set_features(id: u8, nsid: u32, cdw11: u32) -> Sqe {
    Sqe::new(admin::SET_FEATURES, nsid)
        .with_cdw(10, u32::from(id))
        .with_cdw(11, cdw11)
}

//! Bring-up, reset and shutdown (NVMe Base 2.0, sections 3.5 and 3.6), and creation of I/O queues.

use std::sync::Arc;
use std::time::Duration;

use crate::COMMAND_TIMEOUT;
use crate::bar::Bar;
use crate::command::Sqe;
use crate::completion::Cqe;
use crate::doorbell::{Doorbell, DoorbellBuffer, DoorbellMode};
use crate::error::{Error, Result};
use crate::identify::IdentifyController;
use crate::interrupt::Interrupt;
use crate::memory::{GuestMemory, PAGE_SIZE};
use crate::queue::{
    CQE_SIZE, CompletionQueue, QueuePair, RESERVED_CIDS, SQE_SIZE, SubmissionQueue, WaitTimeout,
};
use crate::registers::{
    ACQ, AQA, ASQ, CAP, CC, CC_CSS_NVM, CC_ENABLE, CC_IOCQES_16, CC_IOSQES_64, CC_SHN_ABRUPT,
    CC_SHN_MASK, CC_SHN_NORMAL, CSTS, CSTS_FATAL, CSTS_READY, CSTS_SHST_COMPLETE, CSTS_SHST_MASK,
    Cap, VS,
};

/// Options for bringing up the controller.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Entries of each admin queue.
    pub admin_entries: u16,
    /// Way in which the driver rings doorbells.
    pub doorbells: DoorbellMode,
    /// The command sets to select in CC.CSS.
    pub command_set: u32,
    /// Timeout of admin commands.
    pub admin_timeout: Duration,
    /// True if the admin queue uses the Doorbell Buffer as well, as in libvfn.
    pub admin_in_buffer: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            admin_entries: 32,
            doorbells: DoorbellMode::Trap,
            command_set: CC_CSS_NVM,
            admin_timeout: COMMAND_TIMEOUT,
            admin_in_buffer: false,
        }
    }
}

/// Options of a new I/O queue pair.
#[derive(Clone, Debug)]
pub struct QueueOptions {
    /// Entries of each of the two queues.
    pub entries: u32,
    /// Vector of the completion queue, with its number; `None` for a polled queue.
    pub interrupt: Option<(u16, Arc<Interrupt>)>,
}

impl QueueOptions {
    /// Returns options for polled queues of `entries` entries.
    pub fn polled(entries: u32) -> Self {
        Self {
            entries,
            interrupt: None,
        }
    }

    /// Returns options for queues of `entries` entries that signal a vector.
    pub fn interrupting(entries: u32, vector: u16, interrupt: Arc<Interrupt>) -> Self {
        Self {
            entries,
            interrupt: Some((vector, interrupt)),
        }
    }
}

/// A controller under test.
pub struct Controller {
    bar: Arc<dyn Bar>,
    memory: GuestMemory,
    config: Config,
    cap: Cap,
    admin: Option<QueuePair>,
    doorbell_buffer: Option<Arc<DoorbellBuffer>>,
    identity: Option<IdentifyController>,
    /// Identifiers of outstanding Asynchronous Event Requests.
    pub(crate) event_requests: Vec<u16>,
    pub(crate) next_event_cid: u16,
}

impl std::fmt::Debug for Controller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Controller")
            .field("cap", &self.cap)
            .field("config", &self.config)
            .field("enabled", &self.admin.is_some())
            .finish()
    }
}

impl Controller {
    /// Creates a driver. Of the controller, this only reads CAP.
    pub fn new(bar: Arc<dyn Bar>, memory: GuestMemory, config: Config) -> Self {
        let cap = Cap(bar.read64(CAP));
        Self {
            bar,
            memory,
            config,
            cap,
            admin: None,
            doorbell_buffer: None,
            identity: None,
            event_requests: Vec::new(),
            next_event_cid: RESERVED_CIDS,
        }
    }

    /// Resets and enables the controller, identifies it, requests `queues` I/O queue pairs, and configures the Doorbell
    /// Buffer for [`DoorbellMode::Shadow`]. The controller is then ready for [`Controller::create_queue_pair`].
    ///
    /// # Errors
    /// The controller does not come up, lacks a requested feature, or grants fewer queue pairs.
    pub fn attach(
        bar: Arc<dyn Bar>,
        memory: GuestMemory,
        config: Config,
        queues: u16,
    ) -> Result<Self> {
        let mut controller = Self::new(bar, memory, config);
        controller.reset()?;
        if controller.set_number_of_queues(queues)? < queues {
            return Err(Error::Unsupported("that many I/O queue pairs"));
        }
        if config.doorbells == DoorbellMode::Shadow {
            controller.configure_doorbell_buffer(&mut [])?;
        }
        Ok(controller)
    }

    /// Switches to another BAR of the controller, as after a migration of the guest. Existing queue pairs need
    /// [`QueuePair::move_to`].
    ///
    /// # Errors
    /// A mapped doorbell is in no window of the new BAR.
    pub fn move_to(&mut self, bar: Arc<dyn Bar>) -> Result<()> {
        if let Some(admin) = &mut self.admin {
            admin.move_to(&bar)?;
        }
        self.bar = bar;
        Ok(())
    }

    /// Returns the registers.
    pub fn bar(&self) -> &Arc<dyn Bar> {
        &self.bar
    }

    /// Returns the guest's memory.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Returns the CAP register.
    pub fn cap(&self) -> Cap {
        self.cap
    }

    /// Returns the VS register.
    pub fn version(&self) -> u32 {
        self.bar.read32(VS)
    }

    /// Returns the CSTS register.
    ///
    /// # Errors
    /// The register reads all ones.
    pub fn status(&self) -> Result<u32> {
        match self.bar.read32(CSTS) {
            u32::MAX => Err(Error::Gone),
            csts => Ok(csts),
        }
    }

    /// Returns the Identify Controller data that was read when the controller was enabled.
    ///
    /// # Errors
    /// The controller is disabled.
    pub fn identity(&self) -> Result<&IdentifyController> {
        self.identity.as_ref().ok_or(Error::Disabled)
    }

    /// Returns the Doorbell Buffer in use.
    pub fn doorbell_buffer(&self) -> Option<&Arc<DoorbellBuffer>> {
        self.doorbell_buffer.as_ref()
    }

    /// Returns the admin queue pair.
    ///
    /// # Errors
    /// The controller is disabled.
    pub fn admin_queue(&mut self) -> Result<&mut QueuePair> {
        self.admin.as_mut().ok_or(Error::Disabled)
    }

    /// Returns the timeout for CSTS to follow CC: CAP.TO, or one unit of CAP.TO if it is zero.
    fn ready_timeout(&self) -> Duration {
        Duration::from_millis(self.cap.timeout_ms().max(500))
    }

    /// Waits until the bits of CSTS in `mask` are `value`.
    fn wait_status(&self, mask: u32, value: u32, want: &'static str) -> Result<()> {
        let after = self.ready_timeout();
        let mut wait = WaitTimeout::new(after);
        loop {
            let csts = self.status()?;
            if csts & mask == value {
                return Ok(());
            }
            // A failed controller can still be disabled, but never becomes ready.
            if csts & CSTS_FATAL != 0 && value & CSTS_READY != 0 {
                return Err(Error::Fatal { csts });
            }
            if !wait.pause() {
                return Err(Error::NotReached { want, after, csts });
            }
        }
    }

    /// Clears CC.EN and waits until CSTS.RDY follows. Existing I/O queue pairs become invalid.
    ///
    /// # Errors
    /// CSTS does not follow.
    pub fn disable(&mut self) -> Result<()> {
        let cc = self.bar.read32(CC);
        self.bar.write32(CC, cc & !CC_ENABLE & !CC_SHN_MASK);
        self.wait_status(CSTS_READY, 0, "CSTS.RDY=0")?;
        self.admin = None;
        self.doorbell_buffer = None;
        self.identity = None;
        self.event_requests.clear();
        Ok(())
    }

    /// Sets up the admin queues, sets CC.EN, waits for CSTS.RDY, and identifies the controller.
    ///
    /// # Errors
    /// CSTS does not follow, or the Identify command fails.
    pub fn enable(&mut self) -> Result<()> {
        if self.cap.min_page_size() > PAGE_SIZE as u64 {
            return Err(Error::Unsupported("memory pages of 4 KiB"));
        }
        let entries = u32::from(self.config.admin_entries);
        let sq = self.memory.alloc(entries as usize * SQE_SIZE)?;
        let cq = self.memory.alloc(entries as usize * CQE_SIZE)?;
        self.bar.write32(AQA, (entries - 1) << 16 | (entries - 1));
        self.bar.write64(ASQ, sq.gpa());
        self.bar.write64(ACQ, cq.gpa());
        // Admin doorbells may not be mappable. If no window contains them, they are trapped.
        let mapped = self.config.doorbells == DoorbellMode::Mapped;
        let doorbell = |offset| {
            Doorbell::new(&self.bar, offset, mapped)
                .or_else(|_| Doorbell::new(&self.bar, offset, false))
        };
        let sq_doorbell = doorbell(self.cap.sq_doorbell(0))?;
        let cq_doorbell = doorbell(self.cap.cq_doorbell(0))?;
        self.admin = Some(QueuePair::new(
            SubmissionQueue::new(0, sq, entries, sq_doorbell),
            CompletionQueue::new(0, cq, entries, cq_doorbell, None),
        ));
        self.bar.write32(
            CC,
            CC_ENABLE | self.config.command_set | CC_IOSQES_64 | CC_IOCQES_16,
        );
        self.wait_status(CSTS_READY, CSTS_READY, "CSTS.RDY=1")?;
        self.identity = Some(self.identify_controller()?);
        Ok(())
    }

    /// Disables and enables the controller again (Controller Level Reset).
    ///
    /// # Errors
    /// As [`Controller::disable`] and [`Controller::enable`].
    pub fn reset(&mut self) -> Result<()> {
        self.disable()?;
        self.enable()
    }

    /// Shuts down the controller, normally or abruptly, and waits for CSTS.SHST. After that, the controller needs a reset.
    ///
    /// # Errors
    /// CSTS does not follow.
    pub fn shutdown(&mut self, abrupt: bool) -> Result<()> {
        let kind = if abrupt { CC_SHN_ABRUPT } else { CC_SHN_NORMAL };
        let cc = self.bar.read32(CC);
        self.bar.write32(CC, cc & !CC_SHN_MASK | kind);
        self.wait_status(CSTS_SHST_MASK, CSTS_SHST_COMPLETE, "CSTS.SHST=10b")
    }

    /// Executes an admin command and returns its completion, with any status.
    ///
    /// # Errors
    /// The controller is disabled or does not complete the command in time.
    pub fn admin_raw(&mut self, sqe: Sqe) -> Result<Cqe> {
        let timeout = self.config.admin_timeout;
        self.admin_queue()?.submit_and_wait(sqe, timeout)
    }

    /// Executes an admin command, which must succeed.
    ///
    /// # Errors
    /// As [`Controller::admin_raw`]. The status is not success.
    pub fn admin(&mut self, sqe: Sqe) -> Result<Cqe> {
        let timeout = self.config.admin_timeout;
        self.admin_queue()?.execute(sqe, timeout)
    }

    /// Allocates a Doorbell Buffer and sends it to the controller (Doorbell Buffer Config). New queue pairs use it. The
    /// idle queue pairs `existing` use it as well: as in Linux, they write their shadow doorbells before the command.
    ///
    /// # Errors
    /// The controller does not support the command, or the command fails. Then the `existing` queue pairs are unchanged.
    pub fn configure_doorbell_buffer(
        &mut self,
        existing: &mut [&mut QueuePair],
    ) -> Result<Arc<DoorbellBuffer>> {
        if !self.identity()?.doorbell_buffer() {
            return Err(Error::Unsupported("Doorbell Buffer Config"));
        }
        let buffer = Arc::new(DoorbellBuffer::new(&self.memory, self.cap)?);
        for queue in existing.iter_mut() {
            queue.attach(&buffer);
        }
        if let Err(error) = self.doorbell_buffer_config(&buffer) {
            for queue in existing {
                queue.detach();
            }
            return Err(error);
        }
        if self.config.admin_in_buffer {
            self.admin_queue()?.attach(&buffer);
        }
        self.doorbell_buffer = Some(Arc::clone(&buffer));
        Ok(buffer)
    }

    /// Returns the doorbell of an I/O queue in the configured mode, without a shadow doorbell.
    fn io_doorbell(&self, offset: u64) -> Result<Doorbell> {
        let mapped = self.config.doorbells == DoorbellMode::Mapped;
        Doorbell::new(&self.bar, offset, mapped)
    }

    /// Creates a completion queue.
    ///
    /// # Errors
    /// Memory is exhausted or the command fails.
    pub fn create_cq(&mut self, id: u16, options: &QueueOptions) -> Result<CompletionQueue> {
        let entries = options.entries;
        let ring = self.memory.alloc(entries as usize * CQE_SIZE)?;
        let doorbell = self.io_doorbell(self.cap.cq_doorbell(id))?;
        let vector = options.interrupt.as_ref().map(|(vector, _)| *vector);
        self.admin(Sqe::create_cq(id, ring.gpa(), entries, vector))?;
        let interrupt = options.interrupt.as_ref().map(|(_, i)| Arc::clone(i));
        Ok(CompletionQueue::new(id, ring, entries, doorbell, interrupt))
    }

    /// Creates a submission queue with completion queue `cq`.
    ///
    /// # Errors
    /// Memory is exhausted or the command fails.
    pub fn create_sq(&mut self, id: u16, entries: u32, cq: u16) -> Result<SubmissionQueue> {
        let ring = self.memory.alloc(entries as usize * SQE_SIZE)?;
        let doorbell = self.io_doorbell(self.cap.sq_doorbell(id))?;
        self.admin(Sqe::create_sq(id, ring.gpa(), entries, cq))?;
        Ok(SubmissionQueue::new(id, ring, entries, doorbell))
    }

    /// Creates a queue pair whose queues both have identifier `id`, 1 or more.
    ///
    /// # Errors
    /// Memory is exhausted or a command fails.
    pub fn create_queue_pair(&mut self, id: u16, options: &QueueOptions) -> Result<QueuePair> {
        let cq = self.create_cq(id, options)?;
        let sq = self.create_sq(id, options.entries, id)?;
        let mut queue = QueuePair::new(sq, cq);
        if let Some(buffer) = &self.doorbell_buffer {
            queue.attach(buffer);
        }
        Ok(queue)
    }

    /// Deletes both queues of a pair, the submission queue first. Returns the pair, so that the caller can read completions
    /// of aborted commands.
    ///
    /// # Errors
    /// A command fails.
    pub fn delete_queue_pair(&mut self, queue: QueuePair) -> Result<QueuePair> {
        self.admin(Sqe::delete_sq(queue.sq.id()))?;
        self.admin(Sqe::delete_cq(queue.cq.id()))?;
        Ok(queue)
    }

    /// Writes any value to a doorbell register, regardless of the doorbell mode.
    pub fn write_doorbell(&self, queue: u16, side: crate::doorbell::Side, value: u32) {
        let offset = match side {
            crate::doorbell::Side::SqTail => self.cap.sq_doorbell(queue),
            crate::doorbell::Side::CqHead => self.cap.cq_doorbell(queue),
        };
        self.bar.write32(offset, value);
    }
}

//! A function all of whose work is done by threads of its own, for a VMM that confines its other threads.
//!
//! A VMM gives each of its threads a seccomp filter and Landlock rules for that thread's work. With a [`FunctionDevice`], the
//! calling thread does the function's work: a vCPU thread that enables the controller reads and writes the lease ledger's
//! files, for example. With a [`FunctionThread`], the calling thread only waits on a futex, which any filter allows.
//!
//! A new thread inherits the filter and the rules of the thread that starts it. So the function's threads are started by a
//! [`SpawnerThread`], which the VMM starts before it confines itself.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::time::Duration;

use nvme_guest::threads::{ThreadWork, start_thread};
use nvme_mpt::PollerPool;
use nvme_mpt_memory::sync::JoinHandle;

use crate::device::{DeviceError, FunctionDevice};
use crate::options::FunctionConfig;
use crate::report;
use crate::start::{StartError, start};
use crate::vmm::Vmm;

/// Maximum number of posted calls that have not begun. A further call waits, so a guest that writes registers without end
/// uses no more memory.
const POSTED_CALLS_MAX: usize = 64;

/// Time for which [`FunctionThread::resize`] waits for its end.
const RESIZE_WAIT: Duration = Duration::from_secs(1);

type Call = Box<dyn FnOnce(&FunctionDevice) + Send>;

/// A function, and the thread that does all work on it: starting it, the guest's register accesses, changes of guest memory,
/// pause, snapshot and stop.
///
/// Calls are carried out one after another in the order in which they were made. A function with a slow call, such as a pause
/// that waits for the drive, does not delay other functions.
///
/// Dropping this stops the function, and waits until it has ended.
pub struct FunctionThread {
    id: String,
    vmm: Arc<dyn Vmm>,
    /// `None` only while this is dropped.
    calls: Option<SyncSender<Call>>,
    thread: Option<JoinHandle<()>>,
}

impl FunctionThread {
    /// Starts the function that `config` describes, as [`start`] does, on a thread that [`Vmm::spawn`] starts.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start(
        config: FunctionConfig,
        id: &str,
        vmm: Arc<dyn Vmm>,
        pollers: Arc<PollerPool>,
    ) -> Result<Self, StartError> {
        let (calls, received) = mpsc::sync_channel(POSTED_CALLS_MAX);
        let (report_start, started) = mpsc::channel();
        let work = {
            let (id, vmm) = (id.to_owned(), vmm.clone());
            move || match start(&config, &id, vmm, &pollers) {
                Ok(device) => {
                    // Fails if the caller has ended meanwhile: then there are no calls, and the function is stopped.
                    let _ = report_start.send(Ok(()));
                    carry_out(&device, &received);
                }
                Err(error) => {
                    let _ = report_start.send(Err(error));
                }
            }
        };
        let thread = vmm.spawn(id, Box::new(work));
        let thread = thread.map_err(|source| DeviceError::Thread {
            id: id.to_owned(),
            source,
        })?;
        let panicked = || DeviceError::Panicked(id.to_owned());
        started.recv().map_err(|_| panicked())??;
        Ok(Self {
            id: id.to_owned(),
            vmm,
            calls: Some(calls),
            thread: Some(thread),
        })
    }

    /// Returns the id that was given to [`Self::start`].
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Calls `work` with the function on the function's thread, and waits for the result.
    ///
    /// # Errors
    /// [`DeviceError::Panicked`] if the function's thread has panicked, now or earlier.
    pub fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&FunctionDevice) -> T + Send + 'static,
    ) -> Result<T, DeviceError> {
        let (reply, result) = mpsc::sync_channel(1);
        self.post(move |device| {
            // The caller waits for the reply below.
            let _ = reply.send(work(device));
        });
        result
            .recv()
            .map_err(|_| DeviceError::Panicked(self.id.clone()))
    }

    /// Has `work` called on the function's thread, and does not wait for it, as a write to a BAR does not (PCI Express Base
    /// Specification, section 2.4: memory writes are posted). Waits if 64 posted calls have not begun yet.
    pub fn post(&self, work: impl FnOnce(&FunctionDevice) + Send + 'static) {
        if let Some(calls) = &self.calls {
            // Fails if the thread has panicked. A slot without function drops writes as well.
            let _ = calls.send(Box::new(work));
        }
    }

    /// Grows the function's lease, which was requested by size, to `bytes`, on a thread for that. Added blocks that have
    /// earlier data are wiped. If that takes more than a second, it continues after this returns, and an error is in the log.
    ///
    /// # Errors
    /// [`DeviceError::Resize`], [`DeviceError::ServerLease`], [`DeviceError::HandedOver`], [`DeviceError::Empty`],
    /// [`DeviceError::Panicked`], [`DeviceError::Thread`].
    pub fn resize(&self, bytes: u64) -> Result<(), DeviceError> {
        let resizer = self.call(FunctionDevice::lease_resizer)??;
        let (report_end, ended) = mpsc::channel();
        let id = self.id.clone();
        let work = move || {
            if let Err(mpsc::SendError(Err(error))) = report_end.send(resizer.grow(bytes)) {
                log::error!("{id}: {}", report::chain(&error));
            }
        };
        let spawned = self.vmm.spawn("resize", Box::new(work));
        spawned.map_err(|source| DeviceError::Thread {
            id: self.id.clone(),
            source,
        })?;
        match ended.recv_timeout(RESIZE_WAIT) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => {
                log::info!("{}: the added blocks are being wiped", self.id);
                Ok(())
            }
            Err(RecvTimeoutError::Disconnected) => Err(DeviceError::Panicked(self.id.clone())),
        }
    }

    /// Reads from the BAR at the guest address `base`, like [`FunctionDevice::read_at`]. Returns all ones if the function's
    /// thread has panicked.
    pub fn read_at(&self, base: u64, offset: u64, data: &mut [u8]) {
        let len = data.len();
        self.read(data, move |device| {
            let mut read = vec![0; len];
            device.read_at(base, offset, &mut read);
            read
        });
    }

    /// Posts a write to the BAR at the guest address `base`. See [`FunctionDevice::write_at`].
    pub fn write_at(&self, base: u64, offset: u64, data: &[u8]) {
        let data = data.to_vec();
        self.post(move |device| device.write_at(base, offset, &data));
    }

    /// Reads configuration space, like [`FunctionDevice::read_config`]. Returns all ones if the function's thread has panicked.
    pub fn read_config(&self, offset: u64, data: &mut [u8]) {
        let len = data.len();
        self.read(data, move |device| {
            let mut read = vec![0; len];
            device.read_config(offset, &mut read);
            read
        });
    }

    fn read(
        &self,
        data: &mut [u8],
        read: impl FnOnce(&FunctionDevice) -> Vec<u8> + Send + 'static,
    ) {
        match self.call(read) {
            Ok(read) => data.copy_from_slice(&read),
            Err(_) => data.fill(0xFF),
        }
    }
}

/// Carries out calls until the [`FunctionThread`] is dropped.
fn carry_out(device: &FunctionDevice, calls: &Receiver<Call>) {
    while let Ok(call) = calls.recv() {
        call(device);
    }
    if let Err(error) = device.stop() {
        log::error!("{}: {}", device.id(), report::chain(&error));
    }
}

impl fmt::Debug for FunctionThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FunctionThread")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

impl Drop for FunctionThread {
    fn drop(&mut self) {
        drop(self.calls.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("The thread of {} panicked", self.id);
        }
    }
}

type SpawnRequest = Box<dyn FnOnce() + Send>;

/// A thread that starts other threads, which so inherit this thread's seccomp filter and Landlock rules, not those of the
/// thread that asks for them.
///
/// The thread ends when this is dropped. Threads that it has started continue.
#[derive(Debug)]
pub struct SpawnerThread {
    requests: Sender<SpawnRequest>,
}

impl SpawnerThread {
    /// Starts the thread. It first calls `prepare`, which may confine it.
    ///
    /// # Errors
    /// Returns the error of `prepare`, or the kernel's error of starting the thread.
    pub fn start(
        name: &str,
        prepare: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> io::Result<Self> {
        let (requests, received) = mpsc::channel::<SpawnRequest>();
        let (report_preparation, prepared) = mpsc::channel();
        let run = move || {
            let result = prepare();
            let is_prepared = result.is_ok();
            // Fails if the caller has ended meanwhile: then no requests come, and the thread ends.
            let _ = report_preparation.send(result);
            if is_prepared {
                received.into_iter().for_each(|request| request());
            }
        };
        drop(start_thread(name, run)?);
        prepared.recv().map_err(|_| ended())??;
        Ok(Self { requests })
    }

    /// Starts a thread that does `work`. [`Vmm::spawn`] can be implemented by this method.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn spawn(&self, name: &str, work: ThreadWork) -> io::Result<JoinHandle<()>> {
        let name = name.to_owned();
        self.run(move || start_thread(&name, work))?
    }

    /// Calls `work` on this thread, for example to confine it further, and returns its result. Further requests wait
    /// meanwhile.
    ///
    /// # Errors
    /// The thread has ended, since earlier `work` panicked.
    pub fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let (reply, result) = mpsc::sync_channel(1);
        let request = Box::new(move || {
            // The caller waits for the reply below.
            let _ = reply.send(work());
        });
        self.requests.send(request).map_err(|_| ended())?;
        result.recv().map_err(|_| ended())
    }
}

fn ended() -> io::Error {
    io::Error::other("The thread that starts threads has ended")
}

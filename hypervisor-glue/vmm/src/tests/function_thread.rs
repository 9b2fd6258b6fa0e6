//! Functions whose work is done by threads of their own.

use std::collections::BTreeMap;
use std::env::consts::ARCH;
use std::thread;

use nvme_guest::threads::ThreadWork;
use nvme_mpt_memory::sync::JoinHandle;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

use super::*;
use crate::options::FunctionConfig;
use crate::report;
use crate::{FunctionThread, SpawnerThread, poller_pool};

/// A VMM whose functions' threads are started by a thread for that.
#[derive(Debug)]
struct SpawningVmm {
    vmm: FakeVmm,
    spawner: SpawnerThread,
}

impl SpawningVmm {
    fn new() -> Self {
        Self {
            vmm: FakeVmm::default(),
            spawner: SpawnerThread::start("spawner", || Ok(())).unwrap(),
        }
    }
}

impl Vmm for SpawningVmm {
    fn map(&self, gpa: Gpa, memory: &Arc<Mapping>) -> Result<(), VmmError> {
        self.vmm.map(gpa, memory)
    }

    fn unmap(&self, gpa: Gpa) -> Result<(), VmmError> {
        self.vmm.unmap(gpa)
    }

    fn register_ioeventfd(&self, address: Gpa, eventfd: &EventFd) -> Result<(), VmmError> {
        self.vmm.register_ioeventfd(address, eventfd)
    }

    fn unregister_ioeventfd(&self, address: Gpa, eventfd: &EventFd) -> Result<(), VmmError> {
        self.vmm.unregister_ioeventfd(address, eventfd)
    }

    fn vectors(&self, count: u16) -> Result<Box<dyn VmmVectors>, VmmError> {
        self.vmm.vectors(count)
    }

    fn spawn(&self, name: &str, work: ThreadWork) -> io::Result<JoinHandle<()>> {
        self.spawner.spawn(name, work)
    }
}

fn config(path: &str, state_dir: &str) -> FunctionConfig {
    let value = |key: &str| match key {
        "path" => Some(path.to_owned()),
        "state_dir" => Some(state_dir.to_owned()),
        _ => None,
    };
    FunctionConfig::from_keys(value).unwrap()
}

/// Starts a function on a drive in memory, on threads of its own.
fn function() -> FunctionThread {
    let vmm: Arc<dyn Vmm> = Arc::new(SpawningVmm::new());
    let pollers = poller_pool(vmm.clone());
    FunctionThread::start(config("memory:1M", "/nonexistent"), "test", vmm, pollers).unwrap()
}

fn register(function: &FunctionThread, offset: u64) -> [u8; 4] {
    let mut data = [0; 4];
    function.read_at(BAR, offset, &mut data);
    data
}

/// Places BAR0 and enables memory accesses.
fn place(function: &FunctionThread) {
    let moves = function.call(|device| {
        let _ = device.set_bar_address(Bar::Registers, BAR);
        device.write_config(COMMAND.0, &COMMAND.1)
    });
    assert_eq!(moves.unwrap().len(), 1);
}

/// Returns a filter with which a thread can allocate memory and wait for others, and do nothing else.
fn filter_of_a_waiting_thread() -> BpfProgram {
    let calls = [
        libc::SYS_brk,
        libc::SYS_exit,
        libc::SYS_futex,
        libc::SYS_madvise,
        libc::SYS_mmap,
        libc::SYS_mprotect,
        libc::SYS_munmap,
        libc::SYS_rt_sigprocmask,
        libc::SYS_sched_yield,
        libc::SYS_sigaltstack,
    ];
    let rules: BTreeMap<_, _> = calls.map(|call| (call, Vec::new())).into();
    let denied = SeccompAction::Errno(libc::EPERM as u32);
    let filter = SeccompFilter::new(
        rules,
        denied,
        SeccompAction::Allow,
        ARCH.try_into().unwrap(),
    );
    filter.unwrap().try_into().unwrap()
}

#[test]
fn a_thread_that_may_only_wait_starts_and_uses_a_function() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("drive.img");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    let config = config(
        path.to_str().unwrap(),
        dir.path().join("state").to_str().unwrap(),
    );
    let vmm: Arc<dyn Vmm> = Arc::new(SpawningVmm::new());
    let pollers = poller_pool(vmm.clone());
    let filter = filter_of_a_waiting_thread();
    let confined = thread::spawn(move || {
        seccompiler::apply_filter(&filter).unwrap();
        // The filter is effective: this thread cannot open a drive.
        assert!(std::fs::File::open(&path).is_err());
        let function = FunctionThread::start(config, "test", vmm, pollers).unwrap();
        place(&function);
        let vs = register(&function, 0x08);
        // The guest's memory was mapped by the caller, whose filter does not allow it, so the controller has none.
        function.call(FunctionDevice::pause).unwrap().unwrap();
        let saved = function.call(FunctionDevice::save).unwrap();
        function.call(FunctionDevice::resume).unwrap().unwrap();
        function.call(FunctionDevice::stop).unwrap().unwrap();
        (vs, saved.is_ok())
    });
    let (vs, is_saved) = confined.join().unwrap();
    // Version 2.x of the NVM Express Base Specification.
    assert_eq!(vs[2], 2, "{vs:?}");
    assert!(is_saved);
}

#[test]
fn reads_come_after_posted_writes() {
    let function = function();
    place(&function);
    for asq in 1..=200_u32 {
        function.write_at(BAR, 0x28, &(asq << 12).to_le_bytes());
        if asq % 50 == 0 {
            assert_eq!(register(&function, 0x28), (asq << 12).to_le_bytes());
        }
    }
}

#[test]
fn a_function_whose_thread_panicked_is_like_an_empty_slot() {
    let function = function();
    place(&function);
    let panicked = function.call(|_| panic!("on purpose"));
    assert!(matches!(panicked, Err::<(), _>(DeviceError::Panicked(id)) if id == "test"));
    assert_eq!(register(&function, 0x08), [0xFF; 4]);
    function.write_at(BAR, 0x14, &[0; 4]);
    let mut id = [0; 4];
    function.read_config(0, &mut id);
    assert_eq!(id, [0xFF; 4]);
}

#[test]
fn a_refused_function_reports_its_error() {
    let vmm: Arc<dyn Vmm> = Arc::new(SpawningVmm::new());
    let pollers = poller_pool(vmm.clone());
    let config = config("/nonexistent/drive.img", "/nonexistent");
    let error = FunctionThread::start(config, "test", vmm, pollers).unwrap_err();
    let error = report::chain(&error);
    assert!(error.contains("/nonexistent/drive.img"), "{error}");
}

#[test]
fn a_thread_that_cannot_be_prepared_starts_no_threads() {
    let error = SpawnerThread::start("spawner", || Err(io::Error::other("not confined")));
    assert_eq!(error.unwrap_err().to_string(), "not confined");
    let spawner = SpawnerThread::start("spawner", || Ok(())).unwrap();
    assert_eq!(spawner.run(|| 3).unwrap(), 3);
    spawner.run(|| panic!("on purpose")).unwrap_err();
    spawner.spawn("late", Box::new(|| {})).unwrap_err();
}

/// Returns the size of the lease that the function's back end reports.
fn capacity_bytes(function: &FunctionThread) -> u64 {
    let stats = function.call(|device| device.with_function(|function| function.backend().stats()));
    stats.unwrap().unwrap().capacity_bytes
}

#[test]
fn a_lease_by_size_grows_while_the_function_is_used() {
    let dir = tempfile::tempdir().unwrap();
    let (path, state) = (dir.path().join("drive.img"), dir.path().join("state"));
    std::fs::write(&path, vec![0xA5; 16 << 20]).unwrap();
    let [path, state] = [&path, &state].map(|path| path.to_str().unwrap());
    let value = |key: &str| {
        let value = match key {
            "path" => path,
            "size" => "4M",
            "unit" => "1M",
            "lease" => "grown",
            "format" => "raw",
            "state_dir" => state,
            _ => return None,
        };
        Some(value.to_owned())
    };
    let config = FunctionConfig::from_keys(value).unwrap();
    let vmm: Arc<dyn Vmm> = Arc::new(SpawningVmm::new());
    let pollers = poller_pool(vmm.clone());
    let function = FunctionThread::start(config, "test", vmm, pollers).unwrap();
    assert_eq!(capacity_bytes(&function), 4 << 20);
    function.resize(8 << 20).unwrap();
    assert_eq!(capacity_bytes(&function), 8 << 20);
    // A smaller size, and one that the drive does not have.
    for refused in [4 << 20, 1 << 30] {
        let error = function.resize(refused).unwrap_err();
        assert!(matches!(error, DeviceError::Resize(_)), "{error:?}");
        assert_eq!(capacity_bytes(&function), 8 << 20);
    }
    function.call(FunctionDevice::stop).unwrap().unwrap();
    assert!(matches!(
        function.resize(12 << 20),
        Err(DeviceError::Empty(_))
    ));
}

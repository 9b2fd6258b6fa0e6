//! Functions in a jail that allows what `sandbox::requirements` lists, and nothing else: files, system calls and descriptors.
#![expect(
    clippy::disallowed_methods,
    reason = "tests have threads and real time of their own"
)]
#![expect(unsafe_code, reason = "the handler of SIGSYS names the refused call")]

#[expect(dead_code, reason = "the example's `main`")]
#[path = "../examples/minimal.rs"]
mod minimal;

use std::collections::BTreeMap;
use std::env;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Barrier, Mutex};
use std::thread::{self, JoinHandle};

use landlock::{
    ABI, Access, AccessFs, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus,
    path_beneath_rules,
};
use nvme_guest::{ControllerBackend, EventReader, PersistedBackendParts};
use nvme_mpt::SharedBackendPartsSource;
use nvme_mpt_lease_protocol::{
    LeaseAdmission, LeaseEndCause, LeaseSession, LeaseSource, PeerIdentity, socket_path,
    sockets_dir,
};
use nvme_mpt_memory::memfd;
use nvme_mpt_vmm::drives;
use nvme_mpt_vmm::open::{self, LeaseLedgers};
use nvme_mpt_vmm::options::FunctionConfig;
use nvme_mpt_vmm::report;
use nvme_mpt_vmm::sandbox::{self, Requirements, ThreadKind};
use nvme_mpt_vmm::{
    Bar, Gpa, Mapping, PollerPool, ThreadWork, Vmm, VmmError, VmmVectors, poller_pool,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::signal::register_signal_handler;

use minimal::NoHypervisor;
use minimal::guest::Guest;

/// Environment variable with the options of the function that a child process starts in its jail.
const JAILED: &str = "NVME_MPT_TEST_JAILED";

/// Option of a test's function that gives its drive to a server.
const SERVED: &str = "served=yes";

/// Returns the options of the functions, one set for each way in which a function uses the kernel.
fn scenarios(dir: &str) -> Vec<String> {
    let file = format!("path={dir}/drive.img");
    vec![
        "path=null:64M".to_owned(),
        "path=memory:64M".to_owned(),
        "path=memory:64M,populate=on,poll=dedicated:event".to_owned(),
        "path=memory:64M,profile=zns".to_owned(),
        "path=memory:64M,poll=dedicated@0,iops=1000".to_owned(),
        file.clone(),
        format!("{file},poll=dedicated,queues=2"),
        format!("{file},poll=shared:event"),
        format!("{file},profile=ssd"),
        format!("{file},faults=none,timeout=10"),
        format!("path={dir}/keys.img,profile=kv"),
        format!("{file},{SERVED}"),
    ]
}

/// A VMM without a hypervisor that confines each thread.
#[derive(Debug)]
struct JailedVmm(Requirements, NoHypervisor);

impl Vmm for JailedVmm {
    fn map(&self, gpa: Gpa, memory: &Arc<Mapping>) -> Result<(), VmmError> {
        self.1.map(gpa, memory)
    }

    fn unmap(&self, gpa: Gpa) -> Result<(), VmmError> {
        self.1.unmap(gpa)
    }

    fn register_ioeventfd(&self, address: Gpa, eventfd: &EventFd) -> Result<(), VmmError> {
        self.1.register_ioeventfd(address, eventfd)
    }

    fn unregister_ioeventfd(&self, address: Gpa, eventfd: &EventFd) -> Result<(), VmmError> {
        self.1.unregister_ioeventfd(address, eventfd)
    }

    fn vectors(&self, count: u16) -> Result<Box<dyn VmmVectors>, VmmError> {
        self.1.vectors(count)
    }

    fn spawn(&self, name: &str, work: ThreadWork) -> io::Result<JoinHandle<()>> {
        spawn_jailed(&self.0, name, ThreadKind::of_thread(name), work)
    }
}

/// Returns the filter that allows what `requirements` lists for a kind of thread. Any other call raises SIGSYS.
fn filter(requirements: &Requirements, kind: ThreadKind) -> BpfProgram {
    let calls = requirements.system_calls(kind);
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        calls.map(|call| (call.number, Vec::new())).collect();
    let requests = requirements.ioctls(kind).map(|ioctl| {
        let request = u64::from(ioctl.number);
        let is_it =
            SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, request).unwrap();
        SeccompRule::new(vec![is_it]).unwrap()
    });
    let requests: Vec<SeccompRule> = requests.collect();
    if !requests.is_empty() {
        rules.insert(libc::SYS_ioctl, requests);
    }
    let architecture = env::consts::ARCH.try_into().unwrap();
    let (refused, allowed) = (SeccompAction::Trap, SeccompAction::Allow);
    let filter = SeccompFilter::new(rules, refused, allowed, architecture);
    filter.unwrap().try_into().unwrap()
}

/// Confines this thread, and those that it starts, to files.
fn confine_to_files(files: &[(PathBuf, bool)]) -> RulesetStatus {
    let abi = ABI::V3;
    let mut ruleset = Ruleset::default()
        .handle_access(AccessFs::from_all(abi))
        .unwrap()
        .create()
        .unwrap();
    for (path, is_written) in files {
        let access = match is_written {
            true => AccessFs::from_all(abi),
            false => AccessFs::from_read(abi),
        };
        let rules = path_beneath_rules([path], access);
        ruleset = ruleset.add_rules(rules).unwrap();
    }
    ruleset.restrict_self().unwrap().ruleset
}

fn spawn_jailed(
    requirements: &Requirements,
    name: &str,
    kind: ThreadKind,
    work: ThreadWork,
) -> io::Result<JoinHandle<()>> {
    let filter = filter(requirements, kind);
    // Other threads inherit the manager's restriction.
    let files = (kind == ThreadKind::Manager).then(|| requirements.files.clone());
    thread::Builder::new().name(name.to_owned()).spawn(move || {
        if let Some(files) = files
            && confine_to_files(&files) == RulesetStatus::NotEnforced
        {
            let _ = writeln!(
                io::stderr(),
                "NOT CHECKED: files: there is no Landlock here"
            );
        }
        if env::var_os("NVME_MPT_TEST_UNFILTERED").is_none() {
            seccompiler::apply_filter(&filter).unwrap();
        }
        work();
    })
}

/// Prints the number of the refused call and ends the process.
extern "C" fn refuse(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // The call's number follows the fields of `siginfo_t` that all signals have, and the address of the call.
    const CALL: usize = 24;
    // SAFETY: the kernel passes a structure with at least 128 bytes.
    let call = unsafe { info.cast::<u8>().add(CALL).cast::<i32>().read_unaligned() };
    let thread = thread::current();
    let name = thread.name().unwrap_or_default();
    eprintln!("System call {call} of thread {name} is not among the requirements");
    // SAFETY: ends the process.
    unsafe { libc::_exit(1) };
}

/// Server of one drive, with a back end for one function.
struct DriveServer(Mutex<Option<Arc<dyn ControllerBackend>>>);

impl LeaseSource for DriveServer {
    fn attach(
        &self,
        _: PeerIdentity,
        _: &str,
        _: Option<PersistedBackendParts>,
        _: &AtomicBool,
    ) -> LeaseAdmission {
        match self.0.lock().unwrap().take() {
            Some(host) => LeaseAdmission::Attached(host),
            None => LeaseAdmission::NotServed,
        }
    }

    fn has_drive(&self, _: &str) -> bool {
        true
    }

    fn on_lease_end(&self, _: &Arc<dyn ControllerBackend>) -> LeaseEndCause {
        LeaseEndCause::Disconnected
    }
}

/// Serves the drive of a function, on threads that are not confined.
fn serve(state_dir: &Path, config: &FunctionConfig) {
    let (options, pollers) = (config.options().unwrap(), PollerPool::new());
    let ledgers = LeaseLedgers::open(state_dir);
    let drive = drives::open(&options.path, options.drive_options()).unwrap();
    let parts = SharedBackendPartsSource::Outliving(EventReader::Trusted);
    let stop = AtomicBool::new(false);
    let host = open::attach_with(&options, &drive, &ledgers, &pollers, parts, &stop).unwrap();
    fs::create_dir_all(sockets_dir(state_dir)).unwrap();
    let listener = UnixListener::bind(socket_path(state_dir, "1")).unwrap();
    let source = DriveServer(Mutex::new(Some(Arc::new(host))));
    thread::spawn(move || {
        thread::scope(|threads| {
            for stream in listener.incoming() {
                let session = LeaseSession::new(stream.unwrap()).unwrap();
                threads.spawn(|| session.run(&source).unwrap());
            }
        });
    });
}

/// Runs a function in a jail, in all the ways in which a VMM and its guest use it. Prints the descriptors that it takes.
fn run_jailed(options: &str, state_dir: &str) {
    register_signal_handler(libc::SIGSYS, refuse).unwrap();
    let pairs: BTreeMap<&str, &str> = options
        .split(',')
        .filter_map(|option| option.split_once('='))
        .collect();
    let config = FunctionConfig::from_keys(|key| match key {
        "state_dir" => Some(state_dir.to_owned()),
        key => pairs.get(key).map(|value| (*value).to_owned()),
    })
    .unwrap();
    fs::create_dir_all(state_dir).unwrap();
    let is_served = options.contains(SERVED);
    if is_served {
        serve(Path::new(state_dir), &config);
    }
    let requirements = sandbox::requirements(&config).unwrap();
    assert_eq!(sandbox::is_left_to_servers(&config), is_served);
    let (most, is_blocks) = (requirements.descriptors, !options.contains("profile=kv"));
    // The manager's thread waits twice, so that this thread, which is not confined, counts descriptors.
    let counted = Arc::new(Barrier::new(2));
    let manager = {
        let (requirements, counted) = (requirements.clone(), counted.clone());
        move || manage(&config, requirements, (is_blocks, is_served), &counted)
    };
    let before = open_descriptors();
    let kind = ThreadKind::Manager;
    let manager = spawn_jailed(&requirements, "manager", kind, Box::new(manager)).unwrap();
    counted.wait();
    let descriptors = open_descriptors() - before;
    counted.wait();
    manager.join().unwrap();
    println!("{options}: {descriptors} of {most} descriptors");
    assert!(descriptors <= most);
}

fn open_descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Makes guest memory of one MiB at each of the addresses, anonymous or in files.
fn memory(addresses: &[u64], is_file: bool) -> GuestMemoryMmap {
    let ranges = addresses.iter().map(|address| {
        let file = is_file.then(|| {
            let file = memfd(c"guest", 1 << 20).unwrap();
            FileOffset::new(File::from(file), 0)
        });
        (GuestAddress(*address), 1 << 20, file)
    });
    GuestMemoryMmap::from_ranges_with_files(ranges).unwrap()
}

/// Starts a function, gives it a guest, and ends it.
fn manage(
    config: &FunctionConfig,
    jail: Requirements,
    (is_blocks, is_served): (bool, bool),
    counted: &Barrier,
) {
    let vmm: Arc<dyn Vmm> = Arc::new(JailedVmm(jail.clone(), NoHypervisor::new().unwrap()));
    let pollers = poller_pool(vmm.clone());
    let function = nvme_mpt_vmm::start(config, "nvme0", vmm, &pollers).unwrap();
    let function = Arc::new(function);
    let anonymous = function.set_guest_memory(&memory(&[0, 1 << 30], false));
    match is_served {
        false => anonymous.unwrap(),
        true => {
            let error = report::chain(&anonymous.unwrap_err());
            assert!(error.contains("0x0+0x100000 has no file"), "{error}");
            assert!(error.contains("give the VM shared memory"), "{error}");
        }
    }
    let memory = memory(&[0], is_served);
    function.set_guest_memory(&memory).unwrap();
    let io = {
        let function = function.clone();
        move || use_drive(&mut Guest::boot(function, memory).unwrap(), is_blocks)
    };
    let vcpu = spawn_jailed(&jail, "vcpu", ThreadKind::Vcpu, Box::new(io)).unwrap();
    vcpu.join().unwrap();
    counted.wait();
    counted.wait();
    function.start_dirty_log().unwrap();
    function.pause().unwrap();
    let saved = function.save().unwrap();
    function.resume().unwrap();
    function.take_dirty_pages().unwrap();
    drop(function.reset());
    drop(function.restore(&saved).unwrap());
    function.resume().unwrap();
    function.stop().unwrap();
}

/// Executes all kinds of commands, and resets the controller, as a guest does. Commands that a drive does not have fail.
fn use_drive(guest: &mut Guest, is_blocks: bool) {
    let data = 0x1_0000;
    for page in 0..2 {
        // Identify, Get Log Page (SMART), Get Features (Temperature), Set Features (Volatile Write Cache).
        let _ = guest.execute(0, [0x06, page, data, page, 0, 0]);
    }
    let _ = guest.execute(0, [0x02, 0xFFFF_FFFF, data, 127 << 16 | 2, 0, 0]);
    let _ = guest.execute(0, [0x0A, 0, 0, 4, 0, 0]);
    let _ = guest.execute(0, [0x09, 0, 0, 6, 1, 0]);
    if is_blocks {
        // Write, Read, Compare, Write Zeroes (also with Deallocate), Verify, Write Uncorrectable, Dataset Management, Flush.
        for (opcode, dword12) in [
            (0x01, 7),
            (0x01, 1 << 30 | 7),
            (0x02, 7),
            (0x05, 7),
            (0x08, 7),
            (0x08, 1 << 25 | 7),
            (0x0C, 7),
            (0x04, 7),
            (0x09, 0),
            (0x00, 0),
        ] {
            let _ = guest.execute(1, [opcode, 1, data, 0, 4, dword12]);
        }
    }
    let _ = guest.execute(1, [0x00, 1, 0, 0, 0, 0]);
    // A normal shutdown, then the controller is disabled.
    for cc in [4 << 20 | 6 << 16 | 1 << 14 | 1, 0_u32] {
        guest
            .function
            .write_bar(Bar::Registers, 0x14, &cc.to_le_bytes());
    }
}

#[test]
fn functions_need_no_more_than_their_requirements() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().display().to_string();
    if let Ok(options) = env::var(JAILED) {
        let (options, state_dir) = options.split_once(' ').unwrap();
        run_jailed(options, state_dir);
        return;
    }
    for name in ["drive.img", "keys.img"] {
        let file = File::create(dir.path().join(name)).unwrap();
        file.set_len(64 << 20).unwrap();
    }
    for options in scenarios(&path) {
        // A process of its own, because the handler of SIGSYS ends it.
        let name = "functions_need_no_more_than_their_requirements";
        let output = Command::new(env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(JAILED, format!("{options} {path}/state"))
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{options}:\n{text}\n{errors}");
        for line in text.lines().chain(errors.lines()) {
            let is_report = line.contains("descriptors") || line.contains("NOT CHECKED");
            if is_report {
                println!("{line}");
            }
        }
    }
}

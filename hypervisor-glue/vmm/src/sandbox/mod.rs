//! Requirements of functions on the jail of their VMM, and drives that this process never opens itself, because a drive server
//! has them.
//!
//! A VMM confines itself once, before its guest runs: by Landlock (files), seccomp (system calls), resource limits and capabilities.
//! [`requirements`] returns what a function with given options needs of each. A function that is added later needs no more than it
//! would have needed from the start, so a VMM asks for each function that may be added. [`FunctionCalls`] has the system calls of
//! all.
//!
//! # System calls
//!
//! A filter is given to each thread by its [kind](ThreadKind). A VMM applies those of control threads and pollers in its
//! [`Vmm::spawn`](crate::Vmm::spawn), which knows the thread's [name](ThreadKind::of_thread):
//!
//! ```
//! use std::collections::BTreeMap;
//!
//! use nvme_mpt_vmm::options::FunctionConfig;
//! use nvme_mpt_vmm::sandbox::{self, ThreadKind};
//! use seccompiler::{
//!     BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = FunctionConfig::from_keys(|key| (key == "path").then(|| "memory:64M".to_owned()))?;
//! let requirements = sandbox::requirements(&config)?;
//! let kind = ThreadKind::of_thread("poll-shared-0");
//! // No rule for a call: its arguments do not matter.
//! let calls = requirements.system_calls(kind);
//! let mut rules: BTreeMap<_, _> = calls.map(|call| (call.number, Vec::new())).collect();
//! let mut requests = Vec::new();
//! for ioctl in requirements.ioctls(kind) {
//!     let number = ioctl.number.into();
//!     let is_it = SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, number)?;
//!     requests.push(SeccompRule::new(vec![is_it])?);
//! }
//! if !requests.is_empty() {
//!     rules.insert(libc::SYS_ioctl, requests);
//! }
//! let architecture = std::env::consts::ARCH.try_into()?;
//! let filter = SeccompFilter::new(rules, SeccompAction::Trap, SeccompAction::Allow, architecture)?;
//! let filter: BpfProgram = filter.try_into()?;
//! // In the new thread, before it does its work: seccompiler::apply_filter(&filter)?;
//! # Ok(())
//! # }
//! ```
//!
//! The tables have each call with its reason. They hold for glibc on x86-64 and aarch64. Functions also make the calls of the VMM's
//! own [`Vmm`](crate::Vmm), such as KVM's ioctls, on control threads and vCPU threads.
//!
//! # Descriptors, memory and capabilities
//!
//! [`Requirements::descriptors`] is an upper bound for `RLIMIT_NOFILE`. A physical drive pins guest memory, which counts against
//! `RLIMIT_MEMLOCK`. No other capability is needed: the owner of a VFIO group's file in `/dev/vfio`, or of a
//! function's node and `/dev/iommu`, may open it.
//!
//! # Drives of servers
//!
//! A sandbox such as Landlock is set up once, and lasts until the process ends. A function on a server's drive only needs
//! access to the directory of the servers' sockets. If the server ends, the function waits for the next server, so the VMM
//! never needs the right to open the drive. A VMM that had this right would pass it to a guest that takes over the VMM, and the
//! guest could access the whole drive.
//!
//! So [`required_files`] looks for the drive's server while the sandbox is set up. If there is a server, this process leaves
//! the drive to servers from then on: a function that is added afterwards is refused while no server has the drive.

mod requirements;
mod system_calls;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nvme_mpt_lease_protocol::is_served;
use nvme_mpt_memory::userfaultfd::open_own_mappings;

use crate::drives::DrivePath;
use crate::options::{FunctionConfig, OptionError, ParsedFunctionOptions};

pub use requirements::{Capability, FunctionCalls, Requirements};
pub use system_calls::{IoctlRequest, SystemCall, ThreadKind};

/// Absolute paths of the drives that this process leaves to servers: it never opens them itself, because its sandbox was set up
/// while a server had them.
static LEFT_TO_SERVERS: Mutex<Vec<DrivePath>> = Mutex::new(Vec::new());

fn left_to_servers() -> MutexGuard<'static, Vec<DrivePath>> {
    // A panic cannot leave a partial change.
    LEFT_TO_SERVERS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

/// Returns the files that a sandbox must allow for a function, each with true if write access is needed. If a server has the
/// function's drive, this process leaves the drive to servers from now on: see [`is_left_to_servers`].
///
/// Call this once for each function that the sandbox must allow, and confine the process to the returned files. If no server
/// has the drive, the ledger's directory must already exist.
///
/// # Errors
/// Any [`OptionError`] that the options' values can cause.
pub fn required_files(config: &FunctionConfig) -> Result<Vec<(PathBuf, bool)>, OptionError> {
    let parsed = config.options_with_text()?;
    // Functions need this file to detect pages of guest memory that the VMM has not restored yet.
    if let Err(error) = open_own_mappings() {
        log::warn!("Functions cannot use guest memory that the VMM passes as a file: {error}");
    }
    let path = drive_path(&parsed);
    if has_server(&config.state_dir, &parsed) {
        log::info!("A drive server has {path}: this process leaves the drive to servers");
        let mut left = left_to_servers();
        if !left.contains(&path) {
            left.push(path);
        }
    } else if !left_to_servers().contains(&path) {
        return config.required_files();
    }
    Ok(config.required_files_with_server())
}

/// Returns the requirements of a function on the jail of its VMM: files, system calls, descriptors and capabilities. Like
/// [`required_files`], this leaves the drive to servers if a server has it. It does not check that the
/// files exist. [`start`](crate::start) creates the ledger's directory (`state_dir`), which a sandbox would refuse: create it before.
///
/// # Errors
/// As [`required_files`].
pub fn requirements(config: &FunctionConfig) -> Result<Requirements, OptionError> {
    let files = required_files(config)?;
    let parsed = config.options_with_text()?;
    Ok(Requirements::new(parsed.options(), files, is_left(&parsed)))
}

/// Returns whether this process leaves the function's drive to servers, until the process ends. If so, no thread of this
/// process opens the drive or does its I/O.
#[must_use]
pub fn is_left_to_servers(config: &FunctionConfig) -> bool {
    config
        .options_with_text()
        .is_ok_and(|parsed| is_left(&parsed))
}

/// Returns whether this process leaves the drive of a function to servers (see [`is_left_to_servers`]).
pub(crate) fn is_left(parsed: &ParsedFunctionOptions) -> bool {
    left_to_servers().contains(&drive_path(parsed))
}

/// Returns whether a server can share the drive at `path` with VMMs. It cannot share a drive that is in the memory of the
/// process that opens it.
pub(crate) fn can_be_served(path: &DrivePath) -> bool {
    matches!(path, DrivePath::Pci(_) | DrivePath::File(_))
}

/// Returns whether a server has the drive of a function at present.
fn has_server(state_dir: &Path, parsed: &ParsedFunctionOptions) -> bool {
    can_be_served(&parsed.options().path) && is_served(state_dir, &parsed.text().to_string())
}

/// Returns the absolute path of a function's drive.
fn drive_path(parsed: &ParsedFunctionOptions) -> DrivePath {
    let absolute = parsed.text().get("path").and_then(|path| path.parse().ok());
    absolute.unwrap_or_else(|| parsed.options().path.clone())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::net::UnixListener;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::thread::{self, JoinHandle};

    use nvme_guest::{ControllerBackend, PersistedBackendParts};
    use nvme_mpt::PollerPool;
    use nvme_mpt_lease_protocol::{
        LeaseAdmission, LeaseEndCause, LeaseSession, LeaseSource, PeerIdentity, socket_path,
        sockets_dir,
    };

    use super::*;
    use crate::open::{self, LeaseLedgers, OpenError};

    /// A server that first answers that it has a drive, and no longer has the drive when a function requests a lease.
    struct VanishingDriveServer(String);

    impl LeaseSource for VanishingDriveServer {
        fn attach(
            &self,
            _: PeerIdentity,
            options: &str,
            _: Option<PersistedBackendParts>,
            _: &AtomicBool,
        ) -> LeaseAdmission {
            assert!(options.starts_with("path="), "{options}");
            LeaseAdmission::NotServed
        }

        fn has_drive(&self, options: &str) -> bool {
            options.contains(&self.0)
        }

        fn on_lease_end(&self, _: &Arc<dyn ControllerBackend>) -> LeaseEndCause {
            LeaseEndCause::Disconnected
        }
    }

    /// Runs a server that answers `count` VMMs and ends.
    fn serve(state_dir: &Path, drive: &Path, count: usize) -> JoinHandle<()> {
        fs::create_dir_all(sockets_dir(state_dir)).unwrap();
        let listener = UnixListener::bind(socket_path(state_dir, "1")).unwrap();
        let leases = VanishingDriveServer(drive.display().to_string());
        thread::spawn(move || {
            for stream in listener.incoming().take(count) {
                LeaseSession::new(stream.unwrap())
                    .unwrap()
                    .run(&leases)
                    .unwrap();
            }
        })
    }

    #[test]
    fn only_drives_of_a_server_are_left_to_servers() {
        let dir = tempfile::tempdir().unwrap();
        let state_dir = dir.path().join("state");
        let [server_file, own] = ["served.img", "own.img"].map(|name| {
            let path = dir.path().join(name);
            File::create(&path).unwrap().set_len(1 << 20).unwrap();
            path
        });
        let config = |path: &Path| {
            let value = |key: &str| match key {
                "path" => Some(path.display().to_string()),
                "state_dir" => Some(state_dir.display().to_string()),
                _ => None,
            };
            FunctionConfig::from_keys(value).unwrap()
        };
        let ledgers = LeaseLedgers::open(&state_dir);
        let start = |config: &FunctionConfig| {
            open::open_backend(
                &config.options_with_text().unwrap(),
                &ledgers,
                &PollerPool::new(),
            )
        };
        // Each function asks the server when the sandbox is set up, and when the function starts.
        let server = serve(&state_dir, &server_file, 4);

        let left = config(&server_file);
        assert!(!is_left_to_servers(&left));
        let files = required_files(&left).unwrap();
        assert_eq!(files, [(sockets_dir(&state_dir), false)]);
        assert!(is_left_to_servers(&left));
        let error = start(&left).unwrap_err();
        assert!(matches!(error, OpenError::LeftToServers(_)), "{error}");
        let message = error.to_string();
        for words in ["served.img", "start the server again"] {
            assert!(message.contains(words), "{message}");
        }

        let other = config(&own);
        assert_eq!(
            required_files(&other).unwrap(),
            other.required_files().unwrap()
        );
        assert!(!is_left_to_servers(&other));
        let (id, _host) = start(&other).unwrap();
        assert!(!id.is_empty());
        server.join().unwrap();

        // A sandbox cannot be extended, so the drive stays left to servers after its server has ended.
        assert_eq!(
            required_files(&left).unwrap(),
            [(sockets_dir(&state_dir), false)]
        );
        assert!(matches!(start(&left), Err(OpenError::LeftToServers(_))));
    }
}

//! Requirements of a function on the jail of its VMM.

use std::path::PathBuf;

use super::system_calls::{self, CallScope, IoctlRequest, SystemCall, ThreadKind};
use crate::drives::DrivePath;
use crate::options::FunctionOptions;

/// Requirements of a function on the jail of its VMM, from [`requirements`](super::requirements).
#[derive(Clone, Debug)]
pub struct Requirements {
    /// Files, each with true if write access is needed.
    pub files: Vec<(PathBuf, bool)>,
    /// Maximum number of file descriptors that the function takes, with all its I/O queues and vectors, beside the one of each
    /// region of guest memory in a file. `RLIMIT_NOFILE` must leave room for them.
    pub descriptors: usize,
    /// Capabilities.
    pub capabilities: Vec<Capability>,
    /// True if the drive pins the guest's memory. Then `RLIMIT_MEMLOCK` must allow all of it, and that of each further physical
    /// drive again, unless the process has [`Capability::IpcLock`].
    pub locks_memory: bool,
    scopes: Vec<CallScope>,
}

/// Linux capability that a function needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capability {
    /// `CAP_IPC_LOCK`: a physical drive pins the guest's memory. Not needed if `RLIMIT_MEMLOCK` allows that memory.
    IpcLock,
}

impl Capability {
    /// Returns the name in the kernel's headers.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::IpcLock => "CAP_IPC_LOCK",
        }
    }

    /// Returns the number in the kernel's headers.
    #[must_use]
    pub const fn number(self) -> u32 {
        match self {
            Self::IpcLock => 14,
        }
    }
}

impl Requirements {
    /// Creates the requirements of a function that needs `files`. `is_served` is true if this process leaves the drive to servers.
    pub(super) fn new(
        options: &FunctionOptions,
        files: Vec<(PathBuf, bool)>,
        is_served: bool,
    ) -> Self {
        use CallScope::{Every, File, Leased, Physical, Served};
        let scopes = match &options.path {
            _ if is_served => FunctionCalls::OF_SERVED.scopes.to_vec(),
            // A server may have the drive when the function takes it back after a hand-over.
            DrivePath::File(_) => vec![Every, Leased, File, Served],
            DrivePath::Pci(_) => vec![Every, Leased, Physical, Served],
            _ => vec![Every],
        };
        let locks_memory = scopes.contains(&Physical);
        let capabilities = Some(Capability::IpcLock).filter(|_| locks_memory);
        Self {
            files,
            descriptors: max_descriptors(options),
            capabilities: capabilities.into_iter().collect(),
            locks_memory,
            scopes,
        }
    }

    /// Returns the system calls that a thread of this kind makes for the function, by ascending numbers. `ioctl` is not among them:
    /// allow it for [`Self::ioctls`].
    ///
    /// They are those of the function, of Rust's library and of glibc. A VMM adds what its own [`Vmm`](crate::Vmm) makes, and what
    /// its logger makes.
    pub fn system_calls(
        &self,
        kind: ThreadKind,
    ) -> impl Iterator<Item = &'static SystemCall> + use<> {
        system_calls::system_calls(kind, &self.scopes)
    }

    /// Returns the requests for which a thread of this kind makes the system call `ioctl`.
    pub fn ioctls(&self, kind: ThreadKind) -> impl Iterator<Item = &'static IoctlRequest> + use<> {
        system_calls::ioctls(kind, &self.scopes)
    }
}

/// System calls of functions that are not known yet, for filters that are made before functions are added.
#[derive(Clone, Copy, Debug)]
pub struct FunctionCalls {
    scopes: &'static [CallScope],
}

impl FunctionCalls {
    /// Calls of every function.
    pub const OF_ANY: Self = Self {
        scopes: &[
            CallScope::Every,
            CallScope::Leased,
            CallScope::File,
            CallScope::Physical,
            CallScope::Served,
        ],
    };
    /// Calls of functions on drives that this process [leaves to servers](super::is_left_to_servers).
    pub const OF_SERVED: Self = Self {
        scopes: &[CallScope::Every, CallScope::Served],
    };

    /// Returns the system calls of a kind of thread, as [`Requirements::system_calls`] does for one function.
    pub fn system_calls(
        self,
        kind: ThreadKind,
    ) -> impl Iterator<Item = &'static SystemCall> + use<> {
        system_calls::system_calls(kind, self.scopes)
    }

    /// Returns the requests of the system call `ioctl`, as [`Requirements::ioctls`] does for one function.
    pub fn ioctls(self, kind: ThreadKind) -> impl Iterator<Item = &'static IoctlRequest> + use<> {
        system_calls::ioctls(kind, self.scopes)
    }
}

/// Descriptors of a function without I/O queues: its event loop, eventfds, memory files, drive, ledger and process-wide files.
const FIXED_DESCRIPTORS: usize = 32;

/// Returns the maximum number of descriptors of a function.
fn max_descriptors(options: &FunctionOptions) -> usize {
    let queues = usize::from(options.queue_pairs());
    // A vector has an eventfd of the VMM and a duplicate. A queue may have a poller with two descriptors, an io_uring, and a
    // duplicate of a waker's eventfd for each of its two doorbells.
    FIXED_DESCRIPTORS + 2 * (queues + 1) + 5 * queues
}

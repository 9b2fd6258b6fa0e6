//! A server of NVMe functions over vfio-user, for VMMs that do not embed them.
//!
//! [`serve()`](serve::serve) opens drives, leases parts of them and serves each function on a socket, until a signal ends
//! the server. An [`nvme_device`] presents an NVMe function as a `vfio_user_server::VfioUserDevice`, and a
//! [`function_thread`] serves this device.
//!
//! Other processes talk to a running server on its [`control`] socket: they read its statistics ([`stats`]) and the free
//! capacity of its drives ([`capacity`]), and change its functions ([`change`]) and injected faults ([`faults`]). The crate
//! contains both sides of this protocol. [`metrics`] exports statistics to Prometheus. [`vmm_arguments`] has the arguments
//! with which VMMs attach a function.
//!
//! [`confinement`] restricts a server with Landlock and seccomp. [`persistence`] stores the state of a server with its
//! supervisor process ([`nvme_mpt_supervise`]), so that a successor can restore the state. `quarantine` serves functions that
//! crashed a server, without executing their I/O.
//!
//! [`nvme_mpt_logging`] is the logger of a server, and writes its standard output. Neither blocks a serving thread when its
//! reader is slow.
//!
//! # Example
//!
//! A function on a drive in memory, offered to a VMM:
//!
//! ```
//! use std::sync::Arc;
//! use std::sync::atomic::AtomicBool;
//!
//! use nvme_mpt::PollerPool;
//! use nvme_mpt_server::nvme_device::NvmeDevice;
//! use nvme_mpt_server::vmm_arguments;
//! use nvme_mpt_vmm::open::{self, LeaseLedgers};
//! use nvme_mpt_vmm::options::FunctionConfig;
//! use vfio_user_server::{RegionIndex, VfioUserDevice, VfioUserServer};
//! use vmm_device::{MsixMasking, NvmeFunction};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let dir = tempfile::tempdir()?;
//! let value = |key: &str| (key == "path").then(|| "memory:64M".to_owned());
//! let options = FunctionConfig::from_keys(value)?.options()?;
//! let ledgers = LeaseLedgers::open(dir.path());
//! let backend = open::open(&options, &ledgers, &PollerPool::new(), &AtomicBool::new(false))?;
//! let function = NvmeFunction::new(Arc::new(backend), MsixMasking::Client);
//! let mut device = NvmeDevice::new(function)?;
//!
//! // A VMM reads the class code of the PCI function.
//! let mut class = [0; 4];
//! device.read(RegionIndex::Config, 0x08, &mut class);
//! assert_eq!(class[1..], [0x02, 0x08, 0x01]);
//!
//! let server = VfioUserServer::bind(dir.path().join("nvme0.sock"), device)?;
//! println!("qemu-system-x86_64 {}", vmm_arguments::qemu_arguments("nvme0", server.path()));
//! # Ok(())
//! # }
//! ```
//!
//! # Not implemented
//!
//! `nvme-mpt-vmm` defines the options of functions, drives and leases. `vfio-user-server` implements the vfio-user
//! protocol. This crate parses no command line and prints no tables: `nvme-mpt-cli` does. A VMM that embeds functions in
//! its own process does not need this crate.

pub mod capacity;
pub mod change;
pub mod confinement;
pub mod control;
pub mod faults;
pub mod function_thread;
pub mod metrics;
pub mod nvme_device;
pub mod owner;
pub mod persistence;
mod quarantine;
pub mod serve;
pub mod signals;
pub mod stats;
pub mod vmm_arguments;

//! NVMe functions in a VMM's own process.
//!
//! A function's doorbells and interrupts go through the hypervisor, without another process in between. A VMM implements
//! [`Vmm`], the interface that functions use, and holds a [`FunctionDevice`] for each function. The VMM forwards accesses to
//! configuration space and to the BARs, follows BARs that move, and reports guest memory that is added or removed.
//!
//! # Embedding in one hour
//!
//! 1. **The VMM**: implement [`Vmm`], as below, or use `kvm::KvmVmm` with a `VmFd`. Make one [pool of pollers](poller_pool).
//! 2. **The function**: [`start`] opens the drive and takes the lease that a [`FunctionConfig`](options::FunctionConfig) describes. A
//!    VMM's own configuration can contain it, since it implements serde's traits.
//! 3. **Memory**: `FunctionDevice::set_guest_memory` takes a `GuestMemoryMmap` or `GuestMemoryAtomic` of vm-memory, now and after
//!    each change (feature `vm-memory`). Other VMMs describe [regions](FunctionDevice::map_memory).
//! 4. **Accesses**: forward configuration space to [`FunctionDevice::read_config`] and [`FunctionDevice::write_config`], which
//!    returns the BARs that moved. Forward accesses to BARs by `DeviceMmio` of the crate vm-device, or by
//!    [`FunctionDevice::read_bar`] and [`FunctionDevice::write_bar`].
//! 5. **Threads**: [`Vmm::spawn`] may confine them. A VMM with one event loop uses [`start_in_loop`].
//! 6. **Jail**: [`sandbox::requirements`] lists files, system calls, descriptors and capabilities.
//! 7. **Pause, snapshot, migration**: [`FunctionDevice::pause`], [`save`](FunctionDevice::save),
//!    [`restore`](FunctionDevice::restore), [`resume`](FunctionDevice::resume), and
//!    [`start_dirty_log`](FunctionDevice::start_dirty_log).
//! 8. **Removal**: [`FunctionDevice::stop`] ends the function's threads, and gives back its lease, mappings and vectors.
//!
//! `examples/minimal.rs` is a whole VMM without a hypervisor, whose driver reads a block. `integration/src/vmm/` boots Linux on KVM.
//!
//! # Example
//!
//! A function on a drive in memory, in a VMM that maps and raises nothing:
//!
//! ```
//! use std::io;
//! use std::sync::Arc;
//!
//! use nvme_mpt_vmm::options::FunctionConfig;
//! use nvme_mpt_vmm::{Bar, EventFd, Gpa, GroupVectors, Mapping, Vmm, VmmError, VmmVectors};
//!
//! #[derive(Debug)]
//! struct Hypervisor;
//!
//! impl Vmm for Hypervisor {
//!     fn map(&self, _: Gpa, _: &Arc<Mapping>) -> Result<(), VmmError> {
//!         Ok(())
//!     }
//!
//!     fn unmap(&self, _: Gpa) -> Result<(), VmmError> {
//!         Ok(())
//!     }
//!
//!     fn register_ioeventfd(&self, _: Gpa, _: &EventFd) -> Result<(), VmmError> {
//!         Ok(())
//!     }
//!
//!     fn unregister_ioeventfd(&self, _: Gpa, _: &EventFd) -> Result<(), VmmError> {
//!         Ok(())
//!     }
//!
//!     fn vectors(&self, count: u16) -> Result<Box<dyn VmmVectors>, VmmError> {
//!         let eventfds = (0..count).map(|_| EventFd::new(libc::EFD_NONBLOCK));
//!         let eventfds = eventfds.collect::<io::Result<Vec<_>>>();
//!         let eventfds = eventfds.map_err(|error| VmmError::new("make eventfds", error))?;
//!         let notifier = move |vector| eventfds.get(usize::from(vector))?.try_clone().ok();
//!         Ok(Box::new(GroupVectors::new(count, notifier, |_, _| Ok(()))))
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let vmm: Arc<dyn Vmm> = Arc::new(Hypervisor);
//! let pollers = nvme_mpt_vmm::poller_pool(vmm.clone());
//! let config = FunctionConfig::from_pairs([("path", "memory:64M")])?;
//! let function = nvme_mpt_vmm::start(&config, "nvme0", vmm, &pollers)?;
//! # #[cfg(feature = "vm-memory")]
//! # {
//! use vm_memory::{GuestAddress, GuestMemoryMmap};
//!
//! let memory: GuestMemoryMmap = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)])?;
//! function.set_guest_memory(&memory)?;
//! # }
//!
//! // A guest's firmware reads the class code and gives BAR0 an address.
//! let mut class = [0; 4];
//! function.read_config(0x08, &mut class);
//! assert_eq!(class[1..], [0x02, 0x08, 0x01]);
//! for bar in function.set_bar_address(Bar::Registers, 0xE000_0000) {
//!     println!("Accesses to {bar:?} go to the function from now on");
//! }
//! function.stop()?;
//! # Ok(())
//! # }
//! ```
//!
//! # Modules
//!
//! | module | job |
//! |---|---|
//! | [`drives`] | opens drives by their paths, each once in a process |
//! | [`options`] | parses and checks the options of a function |
//! | [`open`] | leases a part of a drive, and creates the controller backend for a guest |
//! | [`control_loop`] | runs the control thread of a function |
//! | [`report`] | prints an error with its causes |
//! | [`sandbox`] | lists what the jail of a VMM must allow its functions |
//! | `guest_memory` | reads guest memory of the crate vm-memory, and marks dirty pages in it |
//! | `kvm` | implements [`Vmm`] over KVM's own interface |
//!
//! # Features
//!
//! All features are off by default.
//!
//! - `vm-memory`: the module `guest_memory`, for versions 0.17 and 0.18 of the crate vm-memory.
//! - `event-manager`: [`FunctionEvents`] is a subscriber of the crate event-manager.
//! - `kvm`: the module `kvm`, for x86-64 only, because its interrupt routes are those of a PC.
//! - `key-value-files`: drives of keys and values in files.
//! - `toml`: the options `profile=` and `faults=`, whose values are written in TOML. Without this feature, they are unknown
//!   options.
//!
//! # Not implemented
//!
//! This crate serves no sockets and reads no command line: `nvme-mpt-server` and `nvme-mpt-cli` do. It does not emulate a PCI
//! bus: the VMM decides at which address a function is and which accesses reach it.

#![cfg_attr(
    test,
    expect(
        clippy::disallowed_methods,
        reason = "tests have threads and real time of their own"
    )
)]
#![cfg_attr(not(all(feature = "kvm", target_arch = "x86_64")), forbid(unsafe_code))]

mod apic;
pub mod control_loop;
mod device;
pub mod drives;
mod function_thread;
mod group_vectors;
#[cfg(feature = "vm-memory")]
pub mod guest_memory;
#[cfg(all(feature = "kvm", target_arch = "x86_64"))]
pub mod kvm;
mod ledger_writer;
mod mapped_doorbells;
pub mod open;
pub mod options;
pub mod report;
pub mod sandbox;
mod start;
#[cfg(test)]
mod tests;
mod vector_routes;
mod vmm;

pub use apic::local_apic;
pub use device::{DeviceError, FunctionDevice, FunctionEvents, FunctionFactory, LeaseResizer};
pub use function_thread::{FunctionThread, SpawnerThread};
pub use group_vectors::GroupVectors;
pub use mapped_doorbells::DoorbellMappingStats;
pub use nvme_guest::stats::{BackendStats, QueueStats};
pub use nvme_guest::threads::ThreadWork;
pub use nvme_guest::{AnonymousRegion, DirtyRange, DmaError, Gpa, MemoryRegion, VmmMapping};
pub use nvme_mpt::PollerPool;
pub use nvme_mpt_memory::processors::ThreadId;
pub use nvme_mpt_memory::{FilePlace, Mapping, MappingAccess, RawBytes, RawWords};
pub use start::{StartError, start, start_in_loop};
pub use vmm::{IntxPin, Vmm, VmmError, VmmVectors, poller_pool};
pub use vmm_device::{Bar, BarMove, FunctionState, FunctionStateError, MsixMessage};
pub use vmm_sys_util::eventfd::EventFd;

//! Access to memory that guests and NVMe drives may write at any time.
//!
//! The crate contains the unsafe code of the data path, behind safe interfaces:
//!
//! - [`Mapping`] is a range of guest memory or of a device's registers. If the memory is lost (a truncated file, a removed
//!   drive), it is replaced by zeroes or ones, and an access raises no SIGBUS. With the feature `vm-memory`,
//!   `Mapping::from_guest_region` borrows a region of the crate vm-memory.
//! - [`RawBytes`], [`RawWords`], [`MappedWord32`], [`MappedWord64`], [`SharedWords`] and [`MappedRegisters`] read and write
//!   bytes and words of a mapping.
//! - [`SubmissionRing`] and [`CompletionRing`] are the queues of a guest; [`HostSubmissionRing`] and [`HostCompletionRing`]
//!   are those of a drive. [`RingIndex`] and [`CompletionIndices`] are the indices of all these queues.
//!   [`CompletionCredit`] is the permit to fill an entry of a Completion Queue.
//! - [`SlotRecords`] records the commands in flight, in memory that outlives the writing process.
//! - [`crash`] counts crashes of the process for the work that caused them.
//! - [`sync`] has locks, channels, atomics and threads, and [`files`] the file operations of the ledger. A simulator
//!   replaces both modules.
//! - [`process_liveness`] lets other processes detect that nothing of this process runs any more.
//! - [`clock`] reads the time stamp counter. [`deadline`] has the clock and the deadlines of waits. [`system`],
//!   [`processors`], [`file_system`], [`device_mapper`] and [`eventfd`] make system calls for which std has no safe
//!   interface.
//!
//! No Rust reference to shared memory leaves the crate. Bytes are copied in and out, and words are read and written by
//! volatile or atomic access. A word may change between two reads, so callers read it once and use the copy.
//!
//! The crate does not know guest physical addresses, IOVAs or commands. It copies queue entries without validating them.
//!
//! # Example
//!
//! A guest writes a command into its submission queue, and the device reads it:
//!
//! ```
//! use std::os::fd::AsFd;
//! use std::sync::Arc;
//!
//! use nvme_mpt_memory::{Mapping, MappingAccess, SubmissionRing, memfd};
//! use nvme_spec::{opcode::NvmOpcode, sqe::Sqe};
//! use zerocopy::IntoBytes;
//!
//! # fn main() -> std::io::Result<()> {
//! let file = memfd(c"guest", 1 << 20)?;
//! let guest = Mapping::shared(file.as_fd(), 0, 1 << 20, MappingAccess::ReadWrite)?;
//! let device = Mapping::shared(file.as_fd(), 0, 1 << 20, MappingAccess::ReadWrite)?;
//!
//! let entry = Sqe::new(NvmOpcode::FLUSH.0);
//! let slot = guest.bytes(0x1000 + 3 * 64, 64).expect("inside");
//! slot.copy_from(entry.as_bytes());
//!
//! let ring = SubmissionRing::new(&Arc::new(device), 0x1000, 16).expect("aligned and inside");
//! assert_eq!(ring.read(3), entry);
//! # Ok(())
//! # }
//! ```

#![cfg_attr(
    test,
    expect(
        clippy::disallowed_methods,
        reason = "tests have threads and real time of their own"
    )
)]

mod bytes;
pub mod clock;
pub mod crash;
mod current_work;
pub mod deadline;
pub mod device_mapper;
mod error_text;
pub mod eventfd;
pub mod file_system;
pub mod files;
#[cfg(feature = "vm-memory")]
mod guest_region;
pub mod holes;
mod host_ring;
mod indices;
mod mapped_word;
mod mapping;
pub mod notifier;
mod private_words;
pub mod process_liveness;
pub mod processors;
mod registers;
mod ring;
mod shared_words;
mod sigbus;
#[cfg(simulation)]
pub mod simulation;
mod slot_records;
pub mod sync;
pub mod system;
pub mod userfaultfd;
#[cfg(not(simulation))]
pub mod watched_write;

pub use bytes::{RawBytes, RawWords};
pub use error_text::describe_error;
pub use file_system::{allocate, host_page_size, is_size_sealed, memfd, sealed_memfd};
#[cfg(feature = "vm-memory")]
pub use guest_region::shared_file;
pub use host_ring::{HostCompletionRing, HostSubmissionRing};
pub use indices::{
    CompletionCredit, CompletionCredits, CompletionIndices, InvalidIndex, PhasedIndex, RingIndex,
    RingSize,
};
pub use mapped_word::{MappedWord32, MappedWord64};
pub use mapping::{FilePlace, Mapping, MappingAccess};
pub use private_words::PrivateWords;
pub use registers::MappedRegisters;
pub use ring::{CompletionRing, PAGE_SIZE, SubmissionRing};
pub use shared_words::SharedWords;
pub use sigbus::lost_memory_epoch;
pub use slot_records::SlotRecords;

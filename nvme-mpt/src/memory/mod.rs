//! Memory that somebody else can write at any time: guests' RAM, doorbell pages, rings.
//!
//! This is where the crate's raw memory access lives. Nothing here hands out a Rust reference to
//! such memory: it is copied in and out, or read and written a word at a time by volatile or
//! atomic access. What is read may change between two reads, so callers read once and use the
//! copy.

mod bytes;
mod cell;
mod file_system;
mod host_ring;
mod mapping;
mod private;
mod registers;
mod ring;
mod sigbus;
mod words;

pub use bytes::{RawBytes, RawWords};
pub use cell::Cell32;
pub(crate) use file_system::{is_memory, type_of};
pub(crate) use host_ring::{HostCompletionRing, HostSubmissionRing};
pub(crate) use mapping::host_page_size;
#[cfg(test)]
pub(crate) use mapping::tests as tests_support;
pub use mapping::{Access, Mapping, memfd};
pub use private::PrivateWords;
pub use registers::Registers;
pub use ring::{CompletionRing, SubmissionRing};
pub(crate) use sigbus::lost_memory_epoch;
pub(crate) use words::SharedWords;

//! An independent NVMe guest driver for tests across crates.
//!
//! The driver is written from the NVMe Base specification 2.0 and the NVM Command Set specification, with its own
//! constants. It shares no wire types with the device under test, so that it does not repeat the device's mistakes. It
//! accesses a controller through [`bar::Bar`], which is implemented for functions in this process ([`function`]), vfio-user
//! clients ([`vfio_user`]) and the model of a drive ([`drive`]).
//!
//! From the bottom up:
//!
//! | module | holds |
//! |---|---|
//! | [`memory`] | guest memory: a memfd at guest physical addresses, with a page allocator |
//! | [`bar`], [`interrupt`] | register access, mapped doorbells, interrupt vectors |
//! | [`registers`], [`command`], [`completion`], [`status`], [`identify`] | the wire format |
//! | [`prp`], [`sgl`] | data pointers |
//! | [`function`] | a function in this process, as a VMM uses it |
//! | [`doorbell`], [`queue`] | rings, and ways to ring their doorbells; pipelined I/O |
//! | [`controller`], [`admin`] | bring-up and admin commands |
//! | [`disk`] | blocking I/O on one namespace |
//! | [`key_value`] | key-value commands on one namespace |
//! | [`zoned`] | zone commands on one namespace |
//! | [`model`] | expected answers of a namespace, for property tests |
//! | [`drive`] | a model of a physical drive with fault injection, for tests of host drivers |
//!
//! Tests can act as a malicious guest: they can send any submission queue entry, doorbell value, PRP list or SGL segment,
//! and create queues at any address.
//!
//! Not implemented: metadata and protection information, controller memory buffers, fabrics, namespace management.

pub mod admin;
pub mod attached_guest;
pub mod bar;
pub mod command;
pub mod completion;
pub mod controller;
pub mod disk;
pub mod doorbell;
pub mod drive;
#[cfg(test)]
mod driver_tests;
mod error;
pub mod function;
pub mod huge_pages;
pub mod identify;
pub mod interrupt;
pub mod key_value;
mod mapping;
pub mod memory;
pub mod model;
pub mod not_checked;
pub mod prp;
pub mod queue;
pub mod registers;
pub mod rng;
pub mod sgl;
pub mod status;
pub mod vfio_user;
pub mod zoned;

pub use error::{Error, Result};

/// Default timeout of a command. A virtual machine may be stopped for a minute while its clock continues.
pub const COMMAND_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(180);

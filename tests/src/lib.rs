//! An independent guest NVMe driver for the tests that cross crates.
//!
//! The driver is written from the NVMe Base and NVM Command Set specifications 2.0, with constants of
//! its own: it shares no wire type with the device under test, so that a mistake there is not repeated
//! here. It reaches a controller through [`bar::Bar`], which an in-process function, a vfio-user client
//! ([`vfio_user`]) or anything else with an NVMe BAR0 can implement.
//!
//! From the bottom up:
//!
//! | module | holds |
//! |---|---|
//! | [`memory`] | guest memory: a memfd at guest physical addresses, with a page allocator |
//! | [`bar`], [`interrupt`] | register access, mapped doorbells, interrupt vectors |
//! | [`registers`], [`command`], [`completion`], [`status`], [`identify`] | the wire format |
//! | [`prp`], [`sgl`] | data pointers |
//! | [`function`] | a function in this process, as a VMM has it |
//! | [`doorbell`], [`queue`] | rings and how their doorbells are rung; the pipelined form of I/O |
//! | [`controller`], [`admin`] | bring-up and admin commands |
//! | [`disk`] | blocking I/O on one namespace |
//! | [`key_value`] | keys and values of one namespace |
//! | [`zoned`] | what a namespace with zones has beside that |
//! | [`model`] | what a namespace must answer, for property tests |
//! | [`drive`] | the other side of a driver: a model of a physical drive, and what goes wrong with it |
//!
//! Everything hostile is possible: raw submission queue entries, raw doorbell values, hand-made PRP
//! lists and SGL segments, queues at any address.
//!
//! Not here: metadata and protection information, controller memory buffers, fabrics, namespace
//! management.

pub mod admin;
pub mod attached;
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

/// Time that a command may take, unless a test says otherwise. A virtual machine may stand still for a minute, in which
/// its clock goes on.
pub const PATIENCE: std::time::Duration = std::time::Duration::from_secs(180);

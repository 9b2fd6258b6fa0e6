//! Joins the NVMe function to a VMM.
//!
//! A person describes a function with an option string ([`options`]). The `nvme-mpt` command
//! ([`cli`]) opens the drives, leases their parts, and offers each function over [`vfio_user`]
//! ([`serve`]): an [`adaptor`] makes the NVMe function what the protocol server wants, and a
//! [`function_thread`] runs both. What they did is asked for on a socket ([`control`], [`stats`]).
//! Physical drives are found ([`drives`]) and taken from the host's own driver ([`mod@bind`]).

pub mod adaptor;
pub mod attach;
pub mod bind;
pub mod cli;
pub mod control;
pub mod drives;
pub mod faults;
pub mod function_thread;
mod irq_fd;
pub mod logging;
pub mod open;
pub mod options;
pub mod profile;
pub mod report;
pub mod serve;
pub mod signals;
pub mod stats;
pub mod vfio_user;
pub mod vmm;

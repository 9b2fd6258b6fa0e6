//! The `nvme-mpt` command.
//!
//! `nvme-mpt serve` opens drives, leases parts of them and serves each function over vfio-user ([`serve`]). An [`adaptor`]
//! presents an NVMe function as a `vfio_user_server::Device`, and a [`function_thread`] runs both.
//!
//! Other commands talk to a running server on its control socket ([`control`]). They read its statistics ([`stats`]) and the
//! free capacity of its drives ([`room`]), and change its functions ([`change`]) and injected faults ([`faults`]). The
//! remaining commands list the host's physical drives ([`drives`]) and rebind them to VFIO ([`mod@bind`]). They also measure
//! drive profiles ([`profile`]), and check a host or a drive ([`doctor`]).
//!
//! [`confine`] restricts a server with Landlock and seccomp. `kept` stores the state of a server with its keeper
//! ([`nvme_mpt_keep`]), so that a successor can restore it. `set_aside` serves quarantined functions, which crashed a server.
//!
//! [`top`] shows rates in a terminal. [`metrics`] exports statistics to Prometheus. [`logging`] is the logger of the commands.
//!
//! # Not implemented
//!
//! `nvme-mpt-vmm` defines the options of functions, drives and leases. `vfio-user-server` implements the protocol. A VMM that
//! embeds functions in its own process does not need this crate.

pub mod adaptor;
pub mod attach;
pub mod bind;
pub mod change;
pub mod cli;
pub mod confine;
pub mod control;
pub mod doctor;
pub mod drives;
pub mod faults;
pub mod function_thread;
pub mod kept;
pub mod logging;
pub mod metrics;
mod owner;
pub mod profile;
pub mod room;
pub mod serve;
mod set_aside;
pub mod signals;
pub mod stats;
mod table;
pub mod top;

//! The `nvme-mpt` command.
//!
//! `nvme-mpt serve` opens drives, leases their parts, and offers each function over vfio-user ([`serve`]). An
//! [`adaptor`] makes an NVMe function a `vfio_user_server::Device`, and a [`function_thread`] runs the
//! two. Other commands ask a server on its control socket ([`control`]): for its figures ([`stats`]) and its drives' room ([`room`]), to change its
//! functions ([`change`]) and the faults of its drives ([`faults`]). The rest find the host's physical drives
//! ([`drives`]), take them from the host's own driver ([`mod@bind`]), make profiles of drives ([`profile`]), and report on
//! a host and a drive ([`doctor`]).
//!
//! [`confine`] has the kernel confine a server. `kept` has what outlives it in its keeper ([`nvme_mpt_keep`]), with which its successor goes on. `set_aside` has functions
//! that brought a server down.
//!
//! [`top`] shows rates in a terminal. [`metrics`] offers a server's figures to Prometheus. [`logging`] is what a program of ours logs with.
//!
//! # Not implemented
//!
//! Options of functions, drives and leases are `nvme-mpt-vmm`'s, the protocol is `vfio-user-server`'s. A VMM that holds
//! functions in its own process needs nothing of this crate.

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
mod list;
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

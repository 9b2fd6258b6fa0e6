//! The `nvme-mpt` command.
//!
//! [`cli`] has the arguments of all commands: it parses them, calls, and prints. `nvme-mpt serve` is
//! [`nvme_mpt_server::serve`]. Most other commands ask a running server on its control socket ([`nvme_mpt_server::control`]);
//! `table` formats the answers, and [`top`] shows rates in a terminal.
//!
//! The remaining commands need no server. They list the host's physical drives ([`drives`]) and rebind them to VFIO
//! ([`mod@bind`]), measure drive profiles ([`profile`]), and check a host or a drive ([`doctor`]).

#![forbid(unsafe_code)]

pub mod bind;
pub mod cli;
pub mod doctor;
pub mod drives;
pub mod profile;
mod table;
pub mod top;

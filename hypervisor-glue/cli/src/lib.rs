//! The `nvme-mpt` command.
//!
//! [`cli`] defines the arguments of all commands, parses them, calls the functions that execute a command, and prints the
//! results. `nvme-mpt serve` calls [`nvme_mpt_server::serve`]. Most other commands send a request to a running server on its
//! control socket ([`nvme_mpt_server::control`]); `table` formats the answers as tables, and [`top`] shows rates in a terminal.
//!
//! The remaining commands need no server. They list the host's physical drives ([`nvme_mpt_doctor::host_drives`]) and rebind
//! them to VFIO ([`nvme_vfio::bind`]), make profiles of drives ([`nvme_models::fit`]), and check a host or a drive
//! ([`nvme_mpt_doctor`]).

#![forbid(unsafe_code)]

pub mod cli;
mod table;
pub mod top;

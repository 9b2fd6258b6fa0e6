//! The `nvme-mpt` command, as processes.

mod leases;
mod serve;
mod support;

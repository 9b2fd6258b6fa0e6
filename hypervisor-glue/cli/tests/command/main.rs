//! The `nvme-mpt` command, as processes.

mod documents;
mod leases;
mod serve;
mod support;

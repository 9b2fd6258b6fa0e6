//! The `nvme-mpt` command, as processes.

mod changes;
mod churn;
mod documents;
mod leases;
mod limits;
mod owners;
mod serve;
mod sizes;
mod support;
mod vmms;

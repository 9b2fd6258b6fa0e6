//! Tests of the `nvme-mpt` command as a process.

#![expect(
    clippy::disallowed_methods,
    reason = "tests have threads and real time of their own"
)]

mod attackers;
mod changes;
mod churn;
mod confinement;
mod doctor;
mod documents;
mod edits;
mod leases;
mod limits;
mod logs;
mod manual;
mod messages;
mod metrics;
mod owners;
mod replaced_servers;
mod replaced_servers_command_sets;
mod serve;
mod service;
mod sizes;
mod spare_descriptions;
mod support;
mod vmms;

//! Tests of the `nvme-mpt` command as a process.

#![expect(
    clippy::disallowed_methods,
    reason = "tests have threads and real time of their own"
)]

mod attackers;
mod changes;
mod churn;
mod confinement;
mod continued_functions;
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
mod quarantine;
mod replaced_servers;
mod replaced_servers_command_sets;
mod serve;
mod service;
mod sizes;
mod spare_descriptions;
mod stored_versions;
mod supervised_server;
mod supervisors;
mod support;
mod verifying_guest;
mod vmms;
mod waiting_functions;

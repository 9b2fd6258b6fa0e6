//! Tests of the `nvme-mpt` command as a process.

#![expect(
    clippy::disallowed_methods,
    reason = "tests have threads and real time of their own"
)]

mod attackers;
mod changes;
mod churn;
mod confine;
mod doctor;
mod documents;
mod edits;
mod kept;
mod kept_sets;
mod leases;
mod limits;
mod logs;
mod manual;
mod messages;
mod metrics;
mod owners;
mod serve;
mod service;
mod sizes;
mod spares;
mod support;
mod vmms;

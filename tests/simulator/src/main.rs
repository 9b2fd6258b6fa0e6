//! `cargo simulate`: functions, local back ends, pollers and drives under one scheduler, with one clock and one seed.
//!
//! The simulation runs the product's code, built with `cfg(simulation)`. At each access to shared memory, this code lets
//! the scheduler choose the actor that continues (`nvme_mpt_memory::simulation`). Guests check the results of their
//! commands, and the drive model checks the host.
//!
//! A seed identifies a failure: on each machine, it leads to the same steps.

#[cfg(simulation)]
mod blocks;
#[cfg(simulation)]
mod contention;
#[cfg(simulation)]
mod ended_tenant;
#[cfg(simulation)]
mod engine;
#[cfg(simulation)]
mod files;
#[cfg(simulation)]
mod frozen;
#[cfg(simulation)]
mod governor;
#[cfg(simulation)]
mod guest;
#[cfg(simulation)]
mod history;
#[cfg(simulation)]
mod hostile;
#[cfg(simulation)]
mod keys;
#[cfg(simulation)]
mod ledger;
#[cfg(simulation)]
mod mutations;
#[cfg(simulation)]
mod protocol;
#[cfg(simulation)]
mod registers;
#[cfg(simulation)]
mod regressions;
#[cfg(simulation)]
mod removal;
#[cfg(simulation)]
mod restarts;
#[cfg(simulation)]
mod runs;
#[cfg(simulation)]
mod scenario;
#[cfg(simulation)]
mod snapshots;
#[cfg(simulation)]
mod tenants;
#[cfg(simulation)]
mod zones;

#[cfg(simulation)]
fn main() -> std::process::ExitCode {
    runs::main()
}

#[cfg(not(simulation))]
fn main() -> std::process::ExitCode {
    eprintln!("This program was built without its scheduler: run it by `cargo simulate`");
    std::process::ExitCode::FAILURE
}

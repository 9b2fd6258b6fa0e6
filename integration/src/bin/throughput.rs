//! `cargo throughput`: measures a drive through each way of giving it to a guest, in the lab.

use std::process::ExitCode;

use clap::Parser;
use integration::throughput::{self, ThroughputOptions};

fn main() -> ExitCode {
    match throughput::run(&ThroughputOptions::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            integration::print_error(&error);
            ExitCode::FAILURE
        }
    }
}

//! `cargo throughput`: a drive through each way into a guest, in the lab.

use std::process::ExitCode;

use clap::Parser;
use integration::throughput::{self, Options};

fn main() -> ExitCode {
    match throughput::run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            integration::print_error(&error);
            ExitCode::FAILURE
        }
    }
}

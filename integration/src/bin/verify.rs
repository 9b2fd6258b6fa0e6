//! `cargo verify`: runs all verification steps of a change.

use std::process::ExitCode;

use clap::Parser;
use integration::verify::{self, VerifyOptions};

fn main() -> ExitCode {
    match verify::run(&VerifyOptions::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            integration::print_error(&error);
            ExitCode::FAILURE
        }
    }
}

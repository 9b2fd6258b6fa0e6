//! `cargo verify`: everything that must hold.

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

//! `cargo debian`: the Debian package.

use std::process::ExitCode;

use clap::Parser;
use integration::package::{self, Options};

fn main() -> ExitCode {
    match package::run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            integration::print_error(&error);
            ExitCode::FAILURE
        }
    }
}

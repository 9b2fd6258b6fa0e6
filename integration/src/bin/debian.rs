//! `cargo debian`: builds the Debian package.

use std::process::ExitCode;

use clap::Parser;
use integration::package::{self, PackageOptions};

fn main() -> ExitCode {
    match package::run(&PackageOptions::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            integration::print_error(&error);
            ExitCode::FAILURE
        }
    }
}

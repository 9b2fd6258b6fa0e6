//! `cargo demo`: demonstrates guests that share one drive.

use std::process::ExitCode;

use clap::Parser;
use integration::demo::{self, DemoOptions};
use integration::guest;

fn main() -> ExitCode {
    match demo::run(&DemoOptions::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            integration::print_error(&error);
            if guest::is_lost(&error) {
                ExitCode::from(guest::LOST_STATUS)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}

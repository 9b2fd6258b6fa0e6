//! `cargo attackers`: what guests notice of a neighbour that attacks.

use std::process::ExitCode;

use clap::Parser;
use integration::server;
use nvme_load::attackers::{self, Options, Report, Row};

fn main() -> ExitCode {
    let options = Options::parse();
    let program = match &options.server {
        Some(program) => program.clone(),
        None => match server::build() {
            Ok(program) => program,
            Err(error) => {
                integration::print_error(&error);
                return ExitCode::FAILURE;
            }
        },
    };
    println!("{}", Row::header());
    let outcome = attackers::run(&program, &options, |row| println!("{row}"));
    println!("{}", Report::LEFT_OUT);
    match outcome {
        Ok(report) if report.is_good() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            integration::print_error(&error);
            ExitCode::FAILURE
        }
    }
}

//! `cargo attackers`: measures the effect of an attacking guest on its neighbours.

use std::process::ExitCode;

use clap::Parser;
use integration::server;
use nvme_load::attackers::{self, AttackReport, AttackRow, AttackerOptions};

fn main() -> ExitCode {
    let options = AttackerOptions::parse();
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
    println!("{}", AttackRow::header());
    let outcome = attackers::run(&program, &options, |row| println!("{row}"));
    println!("{}", AttackReport::LEFT_OUT);
    match outcome {
        Ok(report) if report.has_no_errors() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            integration::print_error(&error);
            ExitCode::FAILURE
        }
    }
}

//! `cargo figures`: draws the figures of the documents from their data.

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use figures::figure_directory::{self, FigureDirError};

/// Draws the figures of the documents from their data
///
/// Each docs/figures/NAME.json with a plot becomes docs/figures/NAME.svg.
#[derive(Debug, Parser)]
#[command(name = "figures", version)]
struct FigureOptions {
    /// Only these figures
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    only: Vec<String>,

    /// Compares the pictures with their data, and draws nothing
    #[arg(long)]
    check: bool,

    /// Directory of the figures
    #[arg(long, value_name = "DIR", default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/figures"))]
    dir: PathBuf,
}

fn main() -> ExitCode {
    match run(&FigureOptions::parse()) {
        Ok(is_good) if is_good => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprint!("Error: {error}");
            let causes = std::iter::successors(error.source(), |cause| (*cause).source());
            causes.for_each(|cause| eprint!(": {cause}"));
            eprintln!();
            ExitCode::FAILURE
        }
    }
}

/// Draws or compares the figures. Returns true if no picture is out of date.
fn run(options: &FigureOptions) -> Result<bool, FigureDirError> {
    if options.check {
        let outdated = figure_directory::check(&options.dir, &options.only)?;
        for picture in &outdated {
            println!("{picture}");
        }
        return Ok(outdated.is_empty());
    }
    for name in figure_directory::draw(&options.dir, &options.only)? {
        println!("{name}.svg");
    }
    Ok(true)
}

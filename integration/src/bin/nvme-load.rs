//! Puts load on a function of `nvme-mpt serve`: a native vfio-user client, for figures that mean
//! something without hardware virtualisation.

use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use integration::load::options::Options;
use integration::load::report::Report;

/// Load on a function of `nvme-mpt serve`, over vfio-user
#[derive(Parser)]
#[command(name = "nvme-load")]
struct Arguments {
    #[command(flatten)]
    load: Options,
}

fn main() -> ExitCode {
    let options = Arguments::parse().load;
    let report = match integration::load::run(&options) {
        Ok(report) => report,
        Err(error) => {
            integration::print_error(&error);
            return ExitCode::FAILURE;
        }
    };
    println!("{report}");
    if options.latency {
        print!("{}", report.histogram());
    }
    if let Some(path) = &options.json
        && let Err(error) = write_json(path, &report)
    {
        integration::print_error(&error);
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

fn write_json(path: &Path, report: &Report) -> std::io::Result<()> {
    let mut text = serde_json::to_string_pretty(report)?;
    text.push('\n');
    std::fs::write(path, text)
}

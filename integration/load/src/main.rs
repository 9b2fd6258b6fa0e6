//! Command that generates load on a function of `nvme-mpt serve`, as a native vfio-user client. Its results are meaningful
//! on machines without hardware virtualization, too.

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use nvme_load::options::LoadOptions;
use nvme_load::report::LoadReport;

/// Load on a function of `nvme-mpt serve`, over vfio-user
#[derive(Parser)]
#[command(name = "nvme-load")]
struct Arguments {
    #[command(flatten)]
    load: LoadOptions,
}

fn main() -> ExitCode {
    let options = Arguments::parse().load;
    let report = match nvme_load::run(&options) {
        Ok(report) => report,
        Err(error) => {
            print_error(&error);
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
        print_error(&error);
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

fn write_json(path: &Path, report: &LoadReport) -> std::io::Result<()> {
    let mut text = serde_json::to_string_pretty(report)?;
    text.push('\n');
    std::fs::write(path, text)
}

/// Prints an error and its causes, one per line.
fn print_error(error: &dyn Error) {
    eprintln!("Error: {error}");
    let mut cause = error.source();
    while let Some(error) = cause {
        eprintln!("  {error}");
        cause = error.source();
    }
}

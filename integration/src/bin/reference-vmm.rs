//! `reference-vmm`: see `integration::vmm`.

use std::process::ExitCode;

use clap::Parser;
use integration::vmm::Ended;
use integration::vmm::options::{self, Options};
use nvme_mpt_server::logging::{self, LevelFilter};

fn main() -> ExitCode {
    logging::start(None, LevelFilter::Warn);
    match options::run(Options::parse()) {
        Ok(Ended::PoweredOff | Ended::Suspended) => ExitCode::SUCCESS,
        // The VMM does not restart itself: the status reports that the guest reset the machine.
        Ok(Ended::Reset) => ExitCode::from(2),
        Ok(Ended::Failed(why)) => {
            eprintln!("Error: {why}");
            ExitCode::FAILURE
        }
        Err(error) => {
            integration::print_error(&error);
            ExitCode::FAILURE
        }
    }
}

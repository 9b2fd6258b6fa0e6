//! `reference-vmm`: a minimal VMM; see `integration::vmm`.

use std::process::ExitCode;

use clap::Parser;
use integration::vmm::MachineEnd;
use integration::vmm::options::{self, ReferenceVmmOptions};
use nvme_mpt_logging::LevelFilter;

fn main() -> ExitCode {
    nvme_mpt_logging::start(None, LevelFilter::Warn);
    match options::run(ReferenceVmmOptions::parse()) {
        Ok(MachineEnd::PoweredOff | MachineEnd::Suspended) => ExitCode::SUCCESS,
        // The VMM does not restart itself: the status reports that the guest reset the machine.
        Ok(MachineEnd::Reset) => ExitCode::from(2),
        Ok(MachineEnd::Failed(why)) => {
            eprintln!("Error: {why}");
            ExitCode::FAILURE
        }
        Err(error) => {
            integration::print_error(&error);
            ExitCode::FAILURE
        }
    }
}

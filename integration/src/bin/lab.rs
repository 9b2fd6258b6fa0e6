//! `cargo lab`: runs a command on an emulated host with NVMe drives, an IOMMU and KVM.

use std::process::ExitCode;

use clap::Parser;
use integration::lab::options::{self, LabOptions};

fn main() -> ExitCode {
    match options::run(&LabOptions::parse()) {
        // An exit status that does not fit into a byte is reported as a failure.
        Ok(report) => ExitCode::from(u8::try_from(report.status).unwrap_or(u8::MAX)),
        Err(error) => {
            integration::print_error(&error);
            ExitCode::FAILURE
        }
    }
}

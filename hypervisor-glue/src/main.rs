//! The `nvme-mpt` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    hypervisor_glue::cli::run()
}

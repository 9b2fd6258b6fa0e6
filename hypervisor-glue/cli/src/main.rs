//! The `nvme-mpt` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    nvme_mpt_cli::cli::run()
}

//! Guests, the lab and end-to-end tests for nvme-mpt.
//!
//! The modules, bottom up:
//! - [`process`] and [`progress`]: child processes that end with this process, and progress messages of steps;
//! - [`provision`]: builds guests from Debian's signed packages and finds a QEMU, with a cache;
//! - [`guest`]: boots guests, runs commands in them, plugs devices and kills guests;
//! - [`package`]: the Debian package;
//! - [`server`]: `nvme-mpt serve` as a child process, and its statistics;
//! - [`checks`]: a harness and tools for checks that boot machines;
//! - [`lab`]: an emulated host with NVMe drives, an IOMMU and KVM;
//! - [`verify`]: all verification steps;
//! - [`demo`]: the demonstration;
//! - [`throughput`]: throughput of a drive for each way of giving it to a guest, in the lab;
//! - [`vmm`]: the reference VMM, with functions in its own process;
//! - [`vmms`]: all VMMs behind one trait, for checks that run with each VMM.

pub mod checks;
pub mod demo;
pub mod guest;
pub mod lab;
pub mod package;
pub mod process;
pub mod programs;
pub mod progress;
pub mod provision;
pub mod server;
pub mod throughput;
pub mod verify;
pub mod vmm;
pub mod vmms;

use std::path::{Path, PathBuf};

pub use nvme_mpt_vmm::report::chain as error_chain;

/// Returns the directory of the workspace, where cargo runs.
pub fn workspace_dir() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package)
}

/// Returns the directory for builds and provisioned files.
pub fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        // Cargo interprets a relative path relative to its working directory.
        Some(path) => std::path::absolute(&path).unwrap_or_else(|_| PathBuf::from(path)),
        None => workspace_dir().join("target"),
    }
}

/// Parses a size in bytes, or with suffix K, M, G or T.
pub(crate) fn parse_size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(['K', 'M', 'G', 'T']);
    let shift = match &text[digits.len()..] {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// Prints an error and its causes.
pub fn print_error(error: &dyn std::error::Error) {
    eprintln!("Error: {}", error_chain(error));
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory;

    #[test]
    fn each_command_has_a_distinct_first_line_of_help() {
        let commands = [
            super::demo::DemoOptions::command(),
            super::lab::options::LabOptions::command(),
            super::package::PackageOptions::command(),
            super::throughput::ThroughputOptions::command(),
            super::verify::VerifyOptions::command(),
            nvme_load::attackers::AttackerOptions::command(),
        ];
        let first = |command: &clap::Command| command.get_about().map(ToString::to_string);
        let lines: BTreeSet<_> = commands.iter().filter_map(first).collect();
        assert_eq!(lines.len(), commands.len(), "{lines:?}");
    }
}

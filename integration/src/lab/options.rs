//! Command line of `cargo lab`, and the lab that it boots for one command.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Parser;

use super::{Lab, LabConfig, LabDrive, LabError, LabReport, quote, static_keys};
use crate::programs;
use crate::progress::{ProgressStep, print_line, seconds};
use crate::provision::KernelChoice;
use crate::provision::lab::LabAssets;

/// Programs of this project that are copied into every lab.
const PROGRAMS: &[&str] = &[
    "nvme-mpt",
    "nvme-load",
    "demo",
    "reference-vmm",
    static_keys::PROGRAM,
];

/// Runs a command on an emulated host with NVMe drives, an IOMMU and KVM
///
/// Ends with the command's exit status.
#[derive(Debug, Parser)]
#[command(name = "lab", version)]
pub struct LabOptions {
    /// A drive: id=NAME[,size=SIZE][,lba=512|4096][,namespaces=N][,queues=N][,mdts=N][,dbcs=on|off]
    /// [,iops=N][,bandwidth=SIZE][,image=FILE]. By default, one drive 'a' of 1 GiB
    #[arg(long = "drive", value_name = "DRIVE")]
    drives: Vec<LabDrive>,
    /// Boots without any drive
    #[arg(long, conflicts_with = "drives")]
    no_drive: bool,
    /// The host's kernel: 6.1 (Debian 12) or 6.12 (Debian 13)
    #[arg(long, default_value = "6.12")]
    kernel: KernelChoice,
    /// The host's CPUs
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=16))]
    vcpus: u32,
    /// The host's memory
    #[arg(long, value_name = "MIB", default_value_t = super::MEMORY_MIB)]
    memory: u32,
    /// Copies a file into the lab, to /lab/run/bin, which is in the command's PATH
    #[arg(long = "put", value_name = "FILE")]
    put: Vec<PathBuf>,
    /// Copies a file of the lab to the directory of --into
    #[arg(long = "get", value_name = "FILE")]
    get: Vec<String>,
    /// Directory to which files of the lab are copied
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    into: PathBuf,
    /// Timeout of the command
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    timeout: u64,
    /// Keeps the console, the logs and the drives' images
    #[arg(long)]
    keep: bool,
    /// The command. A single word is a shell script. If the first word is the path of a file on this
    /// machine, the file is copied into the lab and run
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

/// Runs one command in a new lab.
///
/// # Errors
/// The lab cannot be provided or dies, or the command does not end in time.
pub fn run(options: &LabOptions) -> Result<LabReport, LabError> {
    let programs = build()?;
    let assets = LabAssets::provide(&options.kernel)?;
    let dir = tempfile::Builder::new()
        .prefix("nvme-mpt-lab-")
        .tempdir()
        .map_err(|source| LabError::File {
            path: std::env::temp_dir(),
            source,
        })?;
    let result = run_in(options, &programs, &assets, dir.path());
    if options.keep || result.is_err() {
        print_line(&format!(
            "The lab's console, logs and images: {}",
            dir.keep().display()
        ));
    }
    result
}

fn run_in(
    options: &LabOptions,
    programs: &[PathBuf],
    assets: &LabAssets,
    dir: &Path,
) -> Result<LabReport, LabError> {
    let mut config = LabConfig::new()
        .vcpus(options.vcpus)
        .memory_mib(options.memory);
    for file in programs.iter().chain(&options.put) {
        config = config.with_file(file);
    }
    if options.drives.is_empty() && !options.no_drive {
        config = config.drive(LabDrive::new("a", 1 << 30));
    }
    for drive in &options.drives {
        config = config.drive(drive.clone());
    }
    let (script, brought) = script(&options.command);
    if let Some(file) = brought {
        config = config.with_file(file);
    }

    let step = ProgressStep::start(format!(
        "Booting the lab, kernel {}",
        assets.host.kernel.name
    ));
    let lab = Lab::boot(assets, &config, dir)?;
    step.done("");
    let started = Instant::now();
    let timeout = Duration::from_secs(options.timeout);
    let status = lab.stream(&script, timeout, &mut io::stdout())?;
    let took = seconds(started.elapsed());
    let report = lab.finish(status, &options.get, &options.into)?;
    print_line(&format!(
        "==> exit status {status} after {took}, {} IOMMU faults",
        report.iommu_faults
    ));
    Ok(report)
}

/// Returns the script for a command, and the program on this machine to copy into the lab, if the command names one.
fn script(command: &[String]) -> (String, Option<PathBuf>) {
    let file = command
        .first()
        .map(PathBuf::from)
        .filter(|path| path.components().count() > 1 && path.is_file());
    if let [script] = command
        && file.is_none()
    {
        return (script.clone(), None);
    }
    let mut words = command.to_vec();
    if let (Some(file), Some(first)) = (&file, words.first_mut()) {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        *first = format!("/lab/run/bin/{name}");
    }
    let quoted: Vec<String> = words.iter().map(|word| quote(word)).collect();
    (quoted.join(" "), file)
}

/// Builds the lab's programs and returns their paths.
///
/// # Errors
/// A program does not build.
pub fn build() -> Result<Vec<PathBuf>, LabError> {
    Ok(programs::build("the programs that the lab runs", PROGRAMS)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn one_word_is_a_script_and_several_are_words() {
        let (one, _) = script(&words(&["ls | wc -l"]));
        assert_eq!(one, "ls | wc -l");
        let (several, file) = script(&words(&["echo", "a b", "c"]));
        assert_eq!(several, "'echo' 'a b' 'c'");
        assert_eq!(file, None);
    }

    #[test]
    fn a_local_file_argument_is_copied_into_the_lab() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let program = dir.path().join("prog");
        std::fs::write(&program, "").expect("write");
        let (text, file) = script(&[program.display().to_string(), "-x".to_owned()]);
        assert_eq!(text, "'/lab/run/bin/prog' '-x'");
        assert_eq!(file, Some(program));
    }

    #[test]
    fn the_command_line_is_understood() {
        let options = LabOptions::try_parse_from([
            "lab",
            "--drive",
            "id=a",
            "--drive",
            "id=b,lba=4096",
            "--get",
            "/tmp/x",
            "uname",
            "-a",
        ])
        .expect("options");
        assert_eq!(options.drives.len(), 2);
        assert_eq!(options.get, ["/tmp/x"]);
        assert_eq!(options.command, ["uname", "-a"]);
        assert!(LabOptions::try_parse_from(["lab"]).is_err());
        assert!(LabOptions::try_parse_from(["lab", "--drive", "id=A", "true"]).is_err());
    }
}

//! The reference VMM's command line.

use std::path::PathBuf;

use clap::Parser;
use nvme_mpt_vmm::options::ParsedFunctionOptions;

use super::{Machine, MachineConfig, MachineEnd, MachineError};

/// The smallest VMM that has NVMe functions in its own process: an example, and no product.
#[derive(Debug, Parser)]
#[command(name = "reference-vmm")]
pub struct ReferenceVmmOptions {
    /// The kernel, a bzImage.
    #[arg(long, required_unless_present = "restore")]
    kernel: Option<PathBuf>,
    /// Initramfs archive, from which the kernel unpacks the initial user land.
    #[arg(long)]
    initramfs: Option<PathBuf>,
    /// Command line of the kernel.
    #[arg(long, default_value = "console=ttyS0 root=/dev/nvme0n1 rw")]
    cmdline: String,
    /// Number of vCPUs, 1 to 4.
    #[arg(long, default_value_t = 1)]
    cpus: u8,
    /// Memory in MiB.
    #[arg(long, default_value_t = 512)]
    memory: u64,
    /// An NVMe function, as in path=disk.img,range=0+1G. Repeat this for further functions.
    #[arg(long = "nvme-mpt", value_name = "OPTIONS")]
    functions: Vec<ParsedFunctionOptions>,
    /// Directory with the ledger of leases.
    #[arg(long, default_value = "/run/nvme-mpt")]
    state_dir: PathBuf,
    /// Prints KVM's counters of the machine whenever the guest writes to address 0xfe000000.
    #[arg(long)]
    counters: bool,
    /// Path of a listening socket, to which the second serial port is connected.
    #[arg(long)]
    serial: Option<PathBuf>,
    /// Path of a listening socket, for adding and removing functions and for snapshots.
    #[arg(long)]
    control: Option<PathBuf>,
    /// Resumes the machine that was written to this directory, with the functions that it had.
    #[arg(long, conflicts_with_all = ["kernel", "initramfs", "cpus", "memory"])]
    restore: Option<PathBuf>,
}

/// Runs a machine until it ends.
///
/// # Errors
/// See [`MachineError`].
pub fn run(options: ReferenceVmmOptions) -> Result<MachineEnd, MachineError> {
    let config = MachineConfig {
        kernel: options.kernel.unwrap_or_default(),
        initramfs: options.initramfs,
        command_line: options.cmdline,
        vcpus: options.cpus,
        memory_mib: options.memory,
        functions: options.functions,
        state_dir: options.state_dir,
        counters: options.counters,
        serial: options.serial,
        control: options.control,
        restore: options.restore,
    };
    Machine::start(&config)?.wait()
}

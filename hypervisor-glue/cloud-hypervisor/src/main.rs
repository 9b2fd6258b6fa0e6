//! `cargo patch-vmm CHECKOUT`: adds the option `--nvme-mpt` to a checkout of Cloud Hypervisor.

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use patch_vmm::{CLOUD_HYPERVISOR, Patch, VERSION};

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let (Some(checkout), None) = (arguments.next(), arguments.next()) else {
        eprintln!("Usage: cargo patch-vmm CHECKOUT, a checkout of Cloud Hypervisor {VERSION}");
        return ExitCode::from(2);
    };
    let checkout = PathBuf::from(checkout);
    let applied = Patch::parse(CLOUD_HYPERVISOR)
        .map_err(Box::<dyn Error>::from)
        .and_then(|patch| Ok(patch.apply(&checkout)?));
    match applied {
        Ok(0) => println!("{} has the patch already", checkout.display()),
        Ok(files) => println!("{files} files of {} are patched", checkout.display()),
        Err(error) => {
            eprintln!("Error: {error}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

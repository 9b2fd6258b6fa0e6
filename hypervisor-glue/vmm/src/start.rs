//! Starts the function that a VMM's configuration describes.

use std::sync::Arc;
use std::time::Duration;

use nvme_mpt::Pollers;
use thiserror::Error;
use vmm_device::{MsixMasking, NvmeFunction};

use crate::device::{DeviceError, FunctionDevice, Remake};
use crate::open::{self, Ledgers, OpenError};
use crate::options::{FunctionConfig, OptionError};
use crate::vmm::Vmm;

/// Error starting a configured function.
#[derive(Debug, Error)]
pub enum StartError {
    /// The description is that of no function.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// The drive or its part cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The function cannot be put into the VMM.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Longest wait for a drive that was handed over, while another process has it: longer than a process that
/// failed to take it takes to end, and shorter than a guest's driver waits for I/O.
const TAKE_BACK_PATIENCE: Duration = Duration::from_secs(5);

/// Puts the function that `config` describes into `vmm`, which knows it as `id`. It reaches no guest
/// memory until it is told of some with [`FunctionDevice::map_memory`].
///
/// # Errors
/// See [`StartError`].
pub fn start(
    config: &FunctionConfig,
    id: &str,
    vmm: Arc<dyn Vmm>,
    pollers: &Arc<Pollers>,
) -> Result<FunctionDevice, StartError> {
    let ledgers = Ledgers::open(&config.state_dir);
    let asked = config.asked()?;
    let pollers = pollers.clone();
    let make = move || -> Result<NvmeFunction, OpenError> {
        let (_, host) = open::host_side(&asked, &ledgers, &pollers)?;
        Ok(NvmeFunction::new(host, MsixMasking::Function))
    };
    let device = FunctionDevice::start(id, make()?, vmm)?;
    Ok(device.remade_by(Remake::new(make, TAKE_BACK_PATIENCE)))
}

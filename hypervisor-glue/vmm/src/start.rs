//! Start of a function from its configuration.

use std::sync::Arc;
use std::time::Duration;

use nvme_mpt::PollerPool;
use thiserror::Error;
use vmm_device::{MsixMasking, NvmeFunction};

use crate::device::{DeviceError, FunctionDevice, FunctionEvents, FunctionFactory, GrowingLease};
use crate::open::{self, LeaseLedgers, OpenError};
use crate::options::{FunctionConfig, OptionError};
use crate::vmm::Vmm;

/// Error of starting a configured function.
#[derive(Debug, Error)]
pub enum StartError {
    /// The configuration is invalid.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// The drive, or the leased part of the drive, cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The function cannot be put into the VMM.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Maximum time for which taking a hand-over back waits until the other process has released the drive. If that process failed
/// to receive the guest, it ends within this time. The wait must be shorter than a guest driver's I/O timeout.
const TAKE_BACK_TIMEOUT: Duration = Duration::from_secs(5);

/// Starts the function that `config` describes, and puts it into `vmm` as device `id`. The function accesses no guest memory
/// until `set_guest_memory`, [`FunctionDevice::map_memory`], [`FunctionDevice::map_vmm_memory`] or
/// [`FunctionDevice::map_anonymous_memory`] adds memory.
///
/// # Errors
/// See [`StartError`].
pub fn start(
    config: &FunctionConfig,
    id: &str,
    vmm: Arc<dyn Vmm>,
    pollers: &Arc<PollerPool>,
) -> Result<FunctionDevice, StartError> {
    let lease = Arc::<GrowingLease>::default();
    let make = function_maker(config, pollers, &lease)?;
    let device = FunctionDevice::start(id, make()?, vmm)?.with_growing_lease(lease);
    Ok(device.with_factory(FunctionFactory::new(make, TAKE_BACK_TIMEOUT)))
}

/// Starts a function as [`start`] does, without a control thread: an event loop of the VMM has to do the control work by the
/// returned [`FunctionEvents`].
///
/// # Errors
/// See [`StartError`].
pub fn start_in_loop(
    config: &FunctionConfig,
    id: &str,
    vmm: Arc<dyn Vmm>,
    pollers: &Arc<PollerPool>,
) -> Result<(FunctionDevice, FunctionEvents), StartError> {
    let lease = Arc::<GrowingLease>::default();
    let make = function_maker(config, pollers, &lease)?;
    let (device, events) = FunctionDevice::start_in_loop(id, make()?, vmm)?;
    let device = device.with_growing_lease(lease);
    let factory = FunctionFactory::new(make, TAKE_BACK_TIMEOUT);
    Ok((device.with_factory(factory), events))
}

/// Returns what creates the function that `config` describes, and notes its back end in `lease`.
fn function_maker(
    config: &FunctionConfig,
    pollers: &Arc<PollerPool>,
    lease: &Arc<GrowingLease>,
) -> Result<impl Fn() -> Result<NvmeFunction, OpenError> + Send + Sync + 'static, OptionError> {
    let ledgers = LeaseLedgers::open(&config.state_dir);
    let parsed = config.options_with_text()?;
    let (pollers, lease) = (pollers.clone(), lease.clone());
    Ok(move || {
        let opened = open::open_either_backend(&parsed, &ledgers, &pollers)?;
        lease.set_backend(opened.local());
        Ok(NvmeFunction::new(
            opened.into_backend(),
            MsixMasking::Function,
        ))
    })
}

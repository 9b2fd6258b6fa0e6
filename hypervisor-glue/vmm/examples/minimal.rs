//! A VMM in a hundred lines: guest memory of the crate vm-memory, and one function, from which a guest reads a block.
//!
//! There is no hypervisor, so nothing is mapped or raised, and `guest/mod.rs` plays the guest. A VMM that boots Linux on KVM is the
//! program `reference-vmm`, in `integration/src/vmm/`. The first argument is the drive, as in the option `path`:
//!
//! ```sh
//! cargo run -p nvme-mpt-vmm --example minimal -- drive.img
//! ```

pub(crate) mod guest;

use std::env;
use std::error::Error;
use std::io;
use std::path::Path;
use std::sync::Arc;

use nvme_mpt_vmm::options::FunctionConfig;
use nvme_mpt_vmm::{EventFd, Gpa, GroupVectors, Mapping, Vmm, VmmError, VmmVectors, poller_pool};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use guest::{DATA, Guest};

/// Services of a VMM for its functions. A real VMM asks its hypervisor.
#[derive(Debug)]
pub(crate) struct NoHypervisor {
    /// Eventfd of all vectors. A hypervisor ties one to each (irqfd).
    interrupt: EventFd,
}

impl NoHypervisor {
    pub(crate) fn new() -> io::Result<Self> {
        let interrupt = EventFd::new(libc::EFD_NONBLOCK)?;
        Ok(Self { interrupt })
    }
}

impl Vmm for NoHypervisor {
    fn map(&self, _: Gpa, _: &Arc<Mapping>) -> Result<(), VmmError> {
        Ok(())
    }

    fn unmap(&self, _: Gpa) -> Result<(), VmmError> {
        Ok(())
    }

    fn register_ioeventfd(&self, _: Gpa, _: &EventFd) -> Result<(), VmmError> {
        Ok(())
    }

    fn unregister_ioeventfd(&self, _: Gpa, _: &EventFd) -> Result<(), VmmError> {
        Ok(())
    }

    fn vectors(&self, count: u16) -> Result<Box<dyn VmmVectors>, VmmError> {
        let interrupt = self.interrupt.try_clone();
        let interrupt = interrupt.map_err(|error| VmmError::new("copy an eventfd", error))?;
        let notifier = move |_| interrupt.try_clone().ok();
        Ok(Box::new(GroupVectors::new(count, notifier, |_, _| Ok(()))))
    }
}

/// Starts a function on `drive`, and returns the model name of its controller and its first block, as the guest reads them.
///
/// `state` is the directory of the ledger, which says who has leased which part of a drive.
pub(crate) fn read_first_block(
    drive: &str,
    state: &Path,
) -> Result<(String, Vec<u8>), Box<dyn Error>> {
    let vmm = Arc::new(NoHypervisor::new()?);
    let pollers = poller_pool(vmm.clone());
    let state = state.display().to_string();
    let config = FunctionConfig::from_pairs([("path", drive), ("state_dir", &state[..])])?;
    let function = nvme_mpt_vmm::start(&config, "nvme0", vmm.clone(), &pollers)?;
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 16 << 20)])?;
    function.set_guest_memory(&memory)?;

    let mut guest = Guest::boot(Arc::new(function), memory)?;
    guest.enable_msix(vmm.interrupt.try_clone()?)?;
    guest.execute(0, [0x06, 0, DATA, 1, 0, 0])?; // Identify Controller
    let mut model = [0; 40];
    guest
        .memory
        .read_slice(&mut model, GuestAddress(u64::from(DATA) + 24))?;
    let model = String::from_utf8_lossy(&model).trim().to_owned();
    guest.execute(1, [0x02, 1, DATA, 0, 0, 0])?; // Read block 0
    let mut block = vec![0; 512];
    guest
        .memory
        .read_slice(&mut block, GuestAddress(DATA.into()))?;
    guest.function.stop()?;
    Ok((model, block))
}

fn main() -> Result<(), Box<dyn Error>> {
    let drive = env::args().nth(1);
    let drive = drive.as_deref().unwrap_or("memory:64M");
    let (model, block) = read_first_block(drive, &env::temp_dir().join("nvme-mpt-minimal"))?;
    println!("Controller: {model}");
    println!("Block 0 begins with {:02X?}", &block[..16]);
    Ok(())
}

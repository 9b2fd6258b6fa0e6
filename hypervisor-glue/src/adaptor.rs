//! An NVMe function as the vfio-user server wants a PCI function to be.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use nvme_mpt::dma::{DmaError, MAX_REGIONS, MemoryRegion};
use nvme_mpt::{Gpa, InterruptVector};
use vmm_device::{Bar, CONFIG_SPACE_SIZE, NvmeFunction};

use crate::irq_fd;
use crate::report;
use crate::vfio_user::{
    Device, DmaMemory, DmaRegion, IrqAction, IrqCommand, IrqData, IrqIndex, IrqInfo, MappableArea,
    Region, RegionIndex,
};

/// An NVMe function behind a vfio-user server.
#[derive(Debug)]
pub struct NvmeDevice {
    function: NvmeFunction,
    registers: Region,
}

impl NvmeDevice {
    /// Offers `function`, which was made for a client that emulates the MSI-X table.
    ///
    /// # Errors
    /// What the kernel reports when there are no file descriptors left.
    pub fn new(function: NvmeFunction) -> io::Result<Self> {
        let mappable = match function.doorbell_region() {
            None => None,
            Some(doorbells) => Some(MappableArea {
                offset: doorbells.offset,
                size: doorbells.length,
                memory: Arc::new(doorbells.fd.try_clone_to_owned()?),
                base: 0,
            }),
        };
        let registers = Region {
            size: function.bar_size(Bar::Registers),
            readable: true,
            writable: true,
            mappable,
        };
        Ok(Self {
            function,
            registers,
        })
    }

    /// The function.
    #[must_use]
    pub fn function(&self) -> &NvmeFunction {
        &self.function
    }

    /// The function.
    pub fn function_mut(&mut self) -> &mut NvmeFunction {
        &mut self.function
    }

    /// Whoever attaches next finds the function as after power-on, and nothing of the guest's
    /// before.
    fn forget_client(&mut self) {
        for vector in self.function.vectors() {
            vector.set_eventfd(None);
            vector.set_masked(false);
        }
        self.reset();
        for vector in self.function.vectors() {
            vector.clear_pending();
        }
    }
}

impl Device for NvmeDevice {
    fn region(&self, index: RegionIndex) -> Region {
        match index {
            RegionIndex::Bar0 => self.registers.clone(),
            RegionIndex::Bar4 => Region {
                size: self.function.bar_size(Bar::Msix),
                readable: true,
                writable: true,
                mappable: None,
            },
            RegionIndex::Config => Region {
                size: CONFIG_SPACE_SIZE,
                readable: true,
                writable: true,
                mappable: None,
            },
            _ => Region::default(),
        }
    }

    fn read(&mut self, region: RegionIndex, offset: u64, data: &mut [u8]) {
        match region {
            RegionIndex::Bar0 => self.function.read_bar(Bar::Registers, offset, data),
            RegionIndex::Bar4 => self.function.read_bar(Bar::Msix, offset, data),
            RegionIndex::Config => self.function.read_config(offset, data),
            // All ones are there already.
            _ => {}
        }
    }

    fn write(&mut self, region: RegionIndex, offset: u64, data: &[u8]) {
        match region {
            RegionIndex::Bar0 => self.function.write_bar(Bar::Registers, offset, data),
            RegionIndex::Bar4 => self.function.write_bar(Bar::Msix, offset, data),
            // The client sees the same write and follows the BARs by itself.
            RegionIndex::Config => drop(self.function.write_config(offset, data)),
            _ => {}
        }
    }

    fn max_dma_maps(&self) -> u32 {
        // A few hundred.
        MAX_REGIONS as u32
    }

    fn dma_map(&mut self, region: DmaRegion) -> io::Result<()> {
        let DmaRegion {
            iova,
            size,
            readable,
            writable,
            memory,
        } = region;
        // What the client cannot share cannot be reached: a command that points there fails as one
        // that points nowhere.
        let Some(DmaMemory { fd, offset }) = memory else {
            return Ok(());
        };
        self.function
            .memory()
            .map(MemoryRegion {
                gpa: Gpa(iova),
                len: size,
                fd,
                offset,
                readable,
                writable,
            })
            .map_err(refused)
    }

    fn dma_unmap(&mut self, range: Option<(u64, u64)>) -> io::Result<u64> {
        let memory = self.function.memory();
        match range {
            Some((iova, size)) => memory.unmap(Gpa(iova), size),
            None => memory.unmap_all(),
        }
        .map_err(refused)
    }

    fn irq(&self, index: IrqIndex) -> IrqInfo {
        match index {
            IrqIndex::Msix => IrqInfo {
                // At most 128.
                count: self.function.vectors().len() as u32,
                maskable: true,
                automasked: false,
                noresize: false,
            },
            _ => IrqInfo::default(),
        }
    }

    fn set_irqs(&mut self, command: IrqCommand) -> io::Result<()> {
        let IrqCommand {
            index,
            start,
            count,
            action,
            data,
        } = command;
        if index != IrqIndex::Msix {
            // There are none of the others: clients disconnect them all the same.
            return Ok(());
        }
        let vectors = self.function.vectors();
        let start = start as usize;
        let chosen = vectors
            .get(start..)
            .and_then(|vectors| vectors.get(..count as usize))
            .ok_or_else(invalid)?;
        match (action, data) {
            (IrqAction::Trigger, IrqData::None) if count == 0 => connect(vectors, Vec::new()),
            (IrqAction::Trigger, IrqData::Connect(fds)) => connect(chosen, fds),
            (IrqAction::Trigger, IrqData::Disconnect) => connect(chosen, Vec::new()),
            (_, IrqData::None) => {
                chosen.iter().for_each(|vector| act(vector, action));
                Ok(())
            }
            (_, IrqData::Bools(wanted)) => {
                let wanted = chosen.iter().zip(wanted).filter(|(_, wanted)| *wanted);
                wanted.for_each(|(vector, _)| act(vector, action));
                Ok(())
            }
            // To be told when the guest masks a vector is for interrupts that mask themselves.
            (IrqAction::Mask | IrqAction::Unmask, IrqData::Connect(_) | IrqData::Disconnect) => {
                Err(invalid())
            }
        }
    }

    fn reset(&mut self) {
        // The client resets its own view of the BARs.
        drop(self.function.reset());
    }

    fn disconnected(&mut self) {
        // First, so that no queue finds its memory gone, and nothing is in flight below.
        self.forget_client();
        if let Err(error) = self.function.memory().unmap_all() {
            log::error!("Memory of a client that is gone stays mapped: {error}");
        }
    }
}

/// Connects the vectors with the eventfds in order, and disconnects those that get none.
fn connect(vectors: &[Arc<InterruptVector>], fds: Vec<OwnedFd>) -> io::Result<()> {
    // All or none.
    let eventfds = fds
        .into_iter()
        .map(irq_fd::take)
        .collect::<io::Result<Vec<_>>>()?;
    let mut eventfds = eventfds.into_iter();
    for vector in vectors {
        vector.set_eventfd(eventfds.next());
    }
    Ok(())
}

fn act(vector: &InterruptVector, action: IrqAction) {
    match action {
        IrqAction::Mask => vector.set_masked(true),
        IrqAction::Unmask => vector.set_masked(false),
        IrqAction::Trigger => vector.signal(),
    }
}

/// What a client is told, as an errno, and a person, in the log.
fn refused(error: DmaError) -> io::Error {
    log::warn!(
        "A request of the client about its memory is refused: {}",
        report::chain(&error)
    );
    let errno = match error {
        DmaError::InvalidRegion { .. } | DmaError::PartialUnmap { .. } => libc::EINVAL,
        DmaError::Overlap { .. } => libc::EEXIST,
        DmaError::TooManyRegions | DmaError::NoIova { .. } => libc::ENOSPC,
        DmaError::NotMapped { .. } => libc::ENOENT,
        DmaError::Busy { .. } => libc::EBUSY,
        DmaError::Map { source, .. } => return source,
    };
    io::Error::from_raw_os_error(errno)
}

fn invalid() -> io::Error {
    io::Error::from_raw_os_error(libc::EINVAL)
}

//! Execution of requests: device calls and replies.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use log::{debug, warn};
use zerocopy::IntoBytes;

use crate::connection::VfioUserMessage;
use crate::device::{
    DeviceRegion, IrqCommand, IrqIndex, MappableArea, RegionIndex, VfioUserDevice,
};
use crate::error::{Error, RequestRefusal};
use crate::message::{
    DeviceInfo, DmaUnmap, IrqInfoPayload, MAX_DATA_XFER_SIZE, NUM_IRQS, NUM_REGIONS, RegionAccess,
    RegionInfo, RegionIoFds, SparseMmap, VersionPayload,
};
use crate::request::{RegionWrite, VfioUserRequest};
use crate::request_log::NegotiatedVersion;
use crate::version::VersionReply;

/// Granularity of a mappable area in bytes: the smallest page size of any host.
const PAGE: u64 = 4096;

/// Regions of the device, as it described them at the start of the server.
#[derive(Debug)]
pub(crate) struct DeviceRegions([DeviceRegion; NUM_REGIONS as usize]);

impl DeviceRegions {
    /// Reads the regions from the device, and checks their mappable areas.
    pub(crate) fn from_device(device: &impl VfioUserDevice) -> Result<Self, Error> {
        let regions = RegionIndex::ALL.map(|index| device.region(index));
        for (index, region) in RegionIndex::ALL.into_iter().zip(&regions) {
            let Some(area) = &region.mappable else {
                continue;
            };
            let (offset, size) = (area.offset, area.size);
            let inside = range_end(offset, size).is_some_and(|end| end <= region.size);
            // The sums are checked against 63 bits, since file offsets are signed.
            let file_end = range_end(area.base, offset).and_then(|offset| range_end(offset, size));
            let in_file = file_end.is_some_and(|end| i64::try_from(end).is_ok());
            let pages = [offset, size, area.base].iter().all(|x| x % PAGE == 0);
            if size == 0 || !inside || !in_file || !pages {
                return Err(Error::MappableArea {
                    region: index,
                    region_size: region.size,
                    offset,
                    size,
                });
            }
        }
        Ok(Self(regions))
    }

    fn get(&self, index: RegionIndex) -> &DeviceRegion {
        &self.0[index as usize]
    }

    /// Returns the region of an access if the access lies completely in the region.
    fn find(&self, region: u32, offset: u64, count: usize) -> Option<(RegionIndex, &DeviceRegion)> {
        let index = RegionIndex::new(region)?;
        let region = self.get(index);
        let inside = range_end(offset, count as u64).is_some_and(|end| end <= region.size);
        inside.then_some((index, region))
    }
}

fn range_end(start: u64, size: u64) -> Option<u64> {
    start.checked_add(size)
}

/// Answers the requests of one client.
#[derive(Debug)]
pub(crate) struct RequestDispatcher {
    regions: Arc<DeviceRegions>,
    /// Result of the client's `VERSION` command; `None` until the client sends it.
    negotiated: Option<NegotiatedVersion>,
    /// Value of `max_data_xfer_size` that was announced to the client, in bytes.
    max_data_xfer_size: u32,
    pub(crate) error_log: ClientErrorLog,
}

impl RequestDispatcher {
    pub(crate) fn new(regions: Arc<DeviceRegions>) -> Self {
        Self::resume(regions, None, MAX_DATA_XFER_SIZE)
    }

    /// Creates the dispatcher for a client whose `VERSION` command a predecessor has answered with the result `agreed`.
    pub(crate) fn resume(
        regions: Arc<DeviceRegions>,
        agreed: Option<NegotiatedVersion>,
        max_data_xfer_size: u32,
    ) -> Self {
        Self {
            regions,
            negotiated: agreed,
            max_data_xfer_size,
            error_log: ClientErrorLog::default(),
        }
    }

    pub(crate) fn negotiated(&self) -> Option<NegotiatedVersion> {
        self.negotiated
    }

    /// Returns the memory of a region's mappable area.
    pub(crate) fn region_memory(&self, index: RegionIndex) -> Option<Arc<OwnedFd>> {
        let area = self.regions.get(index).mappable.as_ref()?;
        Some(area.memory.clone())
    }

    /// Carries out a message and appends the reply's payload to `reply`. If the reply must carry a region's
    /// [memory](Self::region_memory), returns that region.
    pub(crate) fn handle_message<D: VfioUserDevice>(
        &mut self,
        device: &mut D,
        message: VfioUserMessage<'_>,
        reply: &mut Vec<u8>,
    ) -> Result<Option<RegionIndex>, RequestRefusal> {
        let command = message.header.command();
        if message.has_lost_fds {
            return Err(RequestRefusal::FdsLost { command });
        }
        let request = VfioUserRequest::parse(&message.header, message.payload, message.fds)?;
        match (&self.negotiated, &request) {
            (None, VfioUserRequest::Version(_)) | (Some(_), _) => {}
            (None, _) => return Err(RequestRefusal::NotNegotiated { command }),
        }
        let refused = |source| RequestRefusal::Device { command, source };

        match request {
            VfioUserRequest::Version(_) if self.negotiated.is_some() => {
                return Err(RequestRefusal::NegotiatedTwice);
            }
            VfioUserRequest::Version(proposal) => {
                let VersionReply { major, minor, data } =
                    proposal.reply(device.max_dma_maps(), self.max_data_xfer_size);
                let version = VersionPayload {
                    major: major.into(),
                    minor: minor.into(),
                };
                reply.extend_from_slice(version.as_bytes());
                reply.extend_from_slice(&data);
                self.negotiated = Some(proposal.negotiated_version());
            }
            VfioUserRequest::DmaMap(region) => device.dma_map(region).map_err(refused)?,
            VfioUserRequest::DmaUnmap { payload, range } => {
                let unmapped = device.dma_unmap(range).map_err(refused)?;
                let payload = DmaUnmap {
                    size: unmapped.into(),
                    ..payload
                };
                reply.extend_from_slice(payload.as_bytes());
            }
            VfioUserRequest::DeviceGetInfo => {
                let info = DeviceInfo {
                    argsz: (size_of::<DeviceInfo>() as u32).into(),
                    flags: (DeviceInfo::RESET | DeviceInfo::PCI).into(),
                    num_regions: NUM_REGIONS.into(),
                    num_irqs: NUM_IRQS.into(),
                };
                reply.extend_from_slice(info.as_bytes());
            }
            VfioUserRequest::DeviceGetRegionInfo { region, argsz } => {
                return Ok(self.region_info(region, argsz, reply));
            }
            VfioUserRequest::DeviceGetRegionIoFds { region } => {
                let none = RegionIoFds {
                    argsz: (size_of::<RegionIoFds>() as u32).into(),
                    index: (region as u32).into(),
                    ..RegionIoFds::default()
                };
                reply.extend_from_slice(none.as_bytes());
            }
            VfioUserRequest::DeviceGetIrqInfo { index } => irq_info(device, index, reply),
            VfioUserRequest::DeviceSetIrqs(command) => {
                check_irqs(device, &command)?;
                device.set_irqs(command).map_err(refused)?;
            }
            VfioUserRequest::RegionRead {
                region,
                offset,
                count,
            } => self.read(device, region, offset, count, reply),
            VfioUserRequest::RegionWrite(write) => {
                self.write(device, write);
                let access = RegionAccess {
                    offset: write.offset.into(),
                    region: write.region.into(),
                    // The cast keeps the value, since the length was checked against `max_data_xfer_size`.
                    count: (write.data.len() as u32).into(),
                };
                reply.extend_from_slice(access.as_bytes());
            }
            VfioUserRequest::RegionWriteMulti(writes) => {
                for write in writes {
                    let count = write.access.count.get() as usize;
                    let write = RegionWrite {
                        region: write.access.region.get(),
                        offset: write.access.offset.get(),
                        data: &write.data[..count],
                    };
                    self.write(device, write);
                }
                reply.extend_from_slice((writes.len() as u64).as_bytes());
            }
            VfioUserRequest::DeviceReset => device.reset(),
        }
        Ok(None)
    }

    /// Answers `DEVICE_GET_REGION_INFO`. Mapping is offered only if `argsz` has space for the whole sparse-mmap capability. A
    /// client that sees the MMAP flag without this capability would map the whole region. QEMU refuses a CAPS flag without
    /// capabilities.
    fn region_info(
        &self,
        index: RegionIndex,
        argsz: u32,
        reply: &mut Vec<u8>,
    ) -> Option<RegionIndex> {
        const FIXED: u32 = size_of::<RegionInfo>() as u32;
        const FULL: u32 = FIXED + size_of::<SparseMmap>() as u32;

        let region = self.regions.get(index);
        let takes_fds = self.negotiated.is_some_and(|agreed| agreed.accepts_fds);
        let area = region.mappable.as_ref().filter(|_| takes_fds);
        let reported_area: Option<&MappableArea> = area.filter(|_| argsz >= FULL);

        let mut flags = 0;
        if region.readable {
            flags |= RegionInfo::READ;
        }
        if region.writable {
            flags |= RegionInfo::WRITE;
        }
        if reported_area.is_some() {
            flags |= RegionInfo::MMAP | RegionInfo::CAPS;
        }
        let info = RegionInfo {
            argsz: area.map_or(FIXED, |_| FULL).into(),
            flags: flags.into(),
            index: (index as u32).into(),
            cap_offset: reported_area.map_or(0, |_| FIXED).into(),
            size: region.size.into(),
            offset: reported_area.map_or(0, |area| area.base).into(),
        };
        reply.extend_from_slice(info.as_bytes());

        let area = reported_area?;
        let sparse = SparseMmap {
            id: SparseMmap::ID.into(),
            version: 1.into(),
            next: 0.into(),
            nr_areas: 1.into(),
            reserved: 0.into(),
            offset: area.offset.into(),
            size: area.size.into(),
        };
        reply.extend_from_slice(sparse.as_bytes());
        Some(index)
    }

    fn read<D: VfioUserDevice>(
        &mut self,
        device: &mut D,
        region: u32,
        offset: u64,
        count: u32,
        reply: &mut Vec<u8>,
    ) {
        let access = RegionAccess {
            offset: offset.into(),
            region: region.into(),
            count: count.into(),
        };
        reply.extend_from_slice(access.as_bytes());
        let start = reply.len();
        let count = count as usize;
        reply.resize(start + count, 0xff);
        if count == 0 {
            return;
        }
        match self.regions.find(region, offset, count) {
            Some((index, found)) if found.readable => {
                device.read(index, offset, &mut reply[start..]);
            }
            _ => self.error_log.log(format_args!(
                "Read of {count} bytes at {offset:#x} of region {region} reads nothing"
            )),
        }
    }

    fn write<D: VfioUserDevice>(&mut self, device: &mut D, write: RegionWrite<'_>) {
        let RegionWrite {
            region,
            offset,
            data,
        } = write;
        if data.is_empty() {
            return;
        }
        match self.regions.find(region, offset, data.len()) {
            Some((index, found)) if found.writable => device.write(index, offset, data),
            _ => self.error_log.log(format_args!(
                "Write of {} bytes at {offset:#x} of region {region} writes nothing",
                data.len()
            )),
        }
    }
}

fn irq_info<D: VfioUserDevice>(device: &D, index: IrqIndex, reply: &mut Vec<u8>) {
    let irq = device.irq(index);
    let flags = [
        (irq.count > 0, IrqInfoPayload::EVENTFD),
        (irq.maskable, IrqInfoPayload::MASKABLE),
        (irq.automasked, IrqInfoPayload::AUTOMASKED),
        (irq.noresize, IrqInfoPayload::NORESIZE),
    ];
    let flags = flags.iter().filter(|(set, _)| *set);
    let info = IrqInfoPayload {
        argsz: (size_of::<IrqInfoPayload>() as u32).into(),
        flags: flags.fold(0, |flags, (_, flag)| flags | flag).into(),
        index: (index as u32).into(),
        count: irq.count.into(),
    };
    reply.extend_from_slice(info.as_bytes());
}

fn check_irqs<D: VfioUserDevice>(device: &D, command: &IrqCommand) -> Result<(), RequestRefusal> {
    let available = device.irq(command.index).count;
    let end = command.start.checked_add(command.count);
    if end.is_some_and(|end| end <= available) {
        return Ok(());
    }
    Err(RequestRefusal::IrqRange {
        index: command.index,
        start: command.start,
        count: command.count,
        available,
    })
}

/// Logs a client's errors, up to a maximum number, so that a client cannot fill the log.
#[derive(Debug)]
pub(crate) struct ClientErrorLog {
    remaining: u32,
}

impl Default for ClientErrorLog {
    fn default() -> Self {
        Self { remaining: 16 }
    }
}

impl ClientErrorLog {
    pub(crate) fn log(&mut self, what: fmt::Arguments<'_>) {
        match self.remaining {
            0 => debug!("vfio-user: {what}"),
            1 => warn!("vfio-user: {what}; no more is logged of this client"),
            _ => warn!("vfio-user: {what}"),
        }
        self.remaining = self.remaining.saturating_sub(1);
    }

    /// Logs a refused command with its cause.
    pub(crate) fn log_refusal(&mut self, refusal: &RequestRefusal) {
        match std::error::Error::source(refusal) {
            Some(source) => self.log(format_args!("{refusal}: {source}")),
            None => self.log(format_args!("{refusal}")),
        }
    }
}

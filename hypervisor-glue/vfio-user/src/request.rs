//! Parsing and validation of requests: all rules of the protocol that can be checked without the device.

use std::os::fd::OwnedFd;

use zerocopy::FromBytes;

use crate::device::{DmaMemory, DmaRegion, IrqAction, IrqCommand, IrqData, IrqIndex, RegionIndex};
use crate::error::RequestRefusal;
use crate::message::{
    DeviceInfo, DmaMap, DmaUnmap, IrqInfoPayload, IrqSet, MAX_DATA_XFER_SIZE, RegionAccess,
    RegionInfo, RegionIoFds, SingleWrite, VersionPayload, VfioUserCommand, VfioUserHeader,
};
use crate::version::VersionProposal;

/// Command of a client that follows all rules of the protocol. The device may still refuse the command.
#[derive(Debug)]
pub enum VfioUserRequest<'a> {
    /// `VERSION`
    Version(VersionProposal),
    /// `DMA_MAP`
    DmaMap(DmaRegion),
    /// `DMA_UNMAP` of a range (address, bytes) or of everything.
    DmaUnmap {
        /// Payload of the request, which the reply repeats.
        payload: DmaUnmap,
        /// Range to unmap; `None` for all.
        range: Option<(u64, u64)>,
    },
    /// `DEVICE_GET_INFO`
    DeviceGetInfo,
    /// `DEVICE_GET_REGION_INFO`
    DeviceGetRegionInfo {
        /// The region.
        region: RegionIndex,
        /// Size of the client's reply buffer, at least the fixed part.
        argsz: u32,
    },
    /// `DEVICE_GET_REGION_IO_FDS`
    DeviceGetRegionIoFds {
        /// The region.
        region: RegionIndex,
    },
    /// `DEVICE_GET_IRQ_INFO`
    DeviceGetIrqInfo {
        /// The interrupt type.
        index: IrqIndex,
    },
    /// `DEVICE_SET_IRQS`. The device may not have these interrupts.
    DeviceSetIrqs(IrqCommand),
    /// `REGION_READ`. If the device does not have the region, the client reads all ones.
    RegionRead {
        /// Number of the region.
        region: u32,
        /// Offset in the region.
        offset: u64,
        /// Number of bytes, at most [`MAX_DATA_XFER_SIZE`].
        count: u32,
    },
    /// `REGION_WRITE`
    RegionWrite(RegionWrite<'a>),
    /// `REGION_WRITE_MULTI`
    RegionWriteMulti(&'a [SingleWrite]),
    /// `DEVICE_RESET`
    DeviceReset,
}

/// Write to a region. If the device does not have the region, the write is ignored.
#[derive(Clone, Copy, Debug)]
pub struct RegionWrite<'a> {
    /// Number of the region.
    pub region: u32,
    /// Offset in the region.
    pub offset: u64,
    /// Data to write.
    pub data: &'a [u8],
}

impl<'a> VfioUserRequest<'a> {
    /// Parses a message. File descriptors that the request does not use are closed.
    ///
    /// # Errors
    ///
    /// Returns the refusal to send to the client.
    pub fn parse(
        header: &VfioUserHeader,
        payload: &'a [u8],
        fds: Vec<OwnedFd>,
    ) -> Result<Self, RequestRefusal> {
        let command = header.command();
        if header.message_type() != VfioUserHeader::TYPE_COMMAND {
            return Err(RequestRefusal::NotACommand {
                command,
                found: header.message_type(),
            });
        }
        match command {
            VfioUserCommand::VERSION => {
                let (version, data) = split_prefix::<VersionPayload>(command, payload)?;
                VersionProposal::parse(version.major.get(), version.minor.get(), data)
                    .map(Self::Version)
            }
            VfioUserCommand::DMA_MAP => parse_dma_map(payload, fds).map(Self::DmaMap),
            VfioUserCommand::DMA_UNMAP => parse_dma_unmap(payload),
            VfioUserCommand::DEVICE_GET_INFO => {
                let (info, _) = split_prefix::<DeviceInfo>(command, payload)?;
                check_argsz::<DeviceInfo>(command, info.argsz.get())?;
                Ok(Self::DeviceGetInfo)
            }
            VfioUserCommand::DEVICE_GET_REGION_INFO => {
                // The client may send as many bytes as the reply will have, so bytes may follow the fixed part.
                let (info, _) = split_prefix::<RegionInfo>(command, payload)?;
                Ok(Self::DeviceGetRegionInfo {
                    region: parse_region(command, info.index.get())?,
                    argsz: check_argsz::<RegionInfo>(command, info.argsz.get())?,
                })
            }
            VfioUserCommand::DEVICE_GET_REGION_IO_FDS => {
                let (info, _) = split_prefix::<RegionIoFds>(command, payload)?;
                check_argsz::<RegionIoFds>(command, info.argsz.get())?;
                Ok(Self::DeviceGetRegionIoFds {
                    region: parse_region(command, info.index.get())?,
                })
            }
            VfioUserCommand::DEVICE_GET_IRQ_INFO => {
                let (info, _) = split_prefix::<IrqInfoPayload>(command, payload)?;
                check_argsz::<IrqInfoPayload>(command, info.argsz.get())?;
                Ok(Self::DeviceGetIrqInfo {
                    index: parse_irq(command, info.index.get())?,
                })
            }
            VfioUserCommand::DEVICE_SET_IRQS => {
                parse_set_irqs(payload, fds).map(Self::DeviceSetIrqs)
            }
            VfioUserCommand::REGION_READ => {
                let (access, _) = split_prefix::<RegionAccess>(command, payload)?;
                Ok(Self::RegionRead {
                    region: access.region.get(),
                    offset: access.offset.get(),
                    count: check_count(command, access.count.get().into(), MAX_DATA_XFER_SIZE)?,
                })
            }
            VfioUserCommand::REGION_WRITE => {
                let (access, data) = split_prefix::<RegionAccess>(command, payload)?;
                let count = check_count(command, access.count.get().into(), MAX_DATA_XFER_SIZE)?;
                check_size(command, payload, size_of::<RegionAccess>(), count.into(), 1)?;
                Ok(Self::RegionWrite(RegionWrite {
                    region: access.region.get(),
                    offset: access.offset.get(),
                    data,
                }))
            }
            VfioUserCommand::REGION_WRITE_MULTI => parse_region_write_multi(payload),
            VfioUserCommand::DEVICE_RESET => Ok(Self::DeviceReset),
            _ => Err(RequestRefusal::Unsupported { command }),
        }
    }
}

fn parse_dma_map(payload: &[u8], mut fds: Vec<OwnedFd>) -> Result<DmaRegion, RequestRefusal> {
    let command = VfioUserCommand::DMA_MAP;
    let (map, _) = split_prefix::<DmaMap>(command, payload)?;
    check_argsz::<DmaMap>(command, map.argsz.get())?;

    let flags = map.flags.get();
    if flags & DmaMap::FILE_IO != 0 {
        return Err(RequestRefusal::Unsupported { command });
    }
    if flags & !(DmaMap::READ | DmaMap::WRITE | DmaMap::MMAP) != 0 {
        return Err(RequestRefusal::Flags { command, flags });
    }

    let (iova, size) = check_range(command, map.address.get(), map.size.get())?;
    let found = fds.len();
    let memory = match (fds.pop(), found) {
        (fd, 0 | 1) => fd,
        _ => {
            return Err(RequestRefusal::Fds {
                command,
                found,
                needed: "0 or 1",
            });
        }
    };
    let memory = match memory {
        Some(fd) => {
            let (offset, _) = check_range(command, map.offset.get(), size)?;
            Some(DmaMemory { fd, offset })
        }
        None if flags & DmaMap::MMAP != 0 => {
            return Err(RequestRefusal::Fds {
                command,
                found,
                needed: "1",
            });
        }
        None => None,
    };
    Ok(DmaRegion {
        iova,
        size,
        readable: flags & DmaMap::READ != 0,
        writable: flags & DmaMap::WRITE != 0,
        memory,
    })
}

/// Parses `DMA_UNMAP`. A client may send the region's file descriptor again; this descriptor is closed.
fn parse_dma_unmap(payload: &[u8]) -> Result<VfioUserRequest<'_>, RequestRefusal> {
    let command = VfioUserCommand::DMA_UNMAP;
    let (unmap, _) = split_prefix::<DmaUnmap>(command, payload)?;
    check_argsz::<DmaUnmap>(command, unmap.argsz.get())?;

    let (address, size) = (unmap.address.get(), unmap.size.get());
    let range = match unmap.flags.get() {
        0 => Some(check_range(command, address, size)?),
        DmaUnmap::ALL if address == 0 && size == 0 => None,
        DmaUnmap::ALL => {
            return Err(RequestRefusal::Range {
                command,
                address,
                size,
            });
        }
        flags if flags & DmaUnmap::GET_DIRTY_BITMAP != 0 => {
            return Err(RequestRefusal::Unsupported { command });
        }
        flags => return Err(RequestRefusal::Flags { command, flags }),
    };
    Ok(VfioUserRequest::DmaUnmap {
        payload: *unmap,
        range,
    })
}

fn parse_set_irqs(payload: &[u8], fds: Vec<OwnedFd>) -> Result<IrqCommand, RequestRefusal> {
    let command = VfioUserCommand::DEVICE_SET_IRQS;
    let (set, data) = split_prefix::<IrqSet>(command, payload)?;
    check_argsz::<IrqSet>(command, set.argsz.get())?;

    let flags = set.flags.get();
    let bad_flags = RequestRefusal::Flags { command, flags };
    const DATA: u32 = IrqSet::DATA_NONE | IrqSet::DATA_BOOL | IrqSet::DATA_EVENTFD;
    let action = match flags & !DATA {
        IrqSet::ACTION_MASK => IrqAction::Mask,
        IrqSet::ACTION_UNMASK => IrqAction::Unmask,
        IrqSet::ACTION_TRIGGER => IrqAction::Trigger,
        _ => return Err(bad_flags),
    };
    let index = parse_irq(command, set.index.get())?;
    let (start, count) = (set.start.get(), set.count.get());

    // Only the command that disconnects all interrupts of a type may have a count of zero.
    let all = (flags, start) == (IrqSet::DATA_NONE | IrqSet::ACTION_TRIGGER, 0);
    if count == 0 && !all {
        return Err(RequestRefusal::NoIrqs { start, flags });
    }

    let data = match flags & DATA {
        IrqSet::DATA_NONE => IrqData::None,
        IrqSet::DATA_BOOL => {
            check_size(command, payload, size_of::<IrqSet>(), count.into(), 1)?;
            IrqData::Bools(data.iter().map(|&byte| byte != 0).collect())
        }
        // A command without descriptors disconnects the eventfds of the range. Otherwise, there is one descriptor for each
        // interrupt.
        IrqSet::DATA_EVENTFD if fds.is_empty() => IrqData::Disconnect,
        IrqSet::DATA_EVENTFD if fds.len() == count as usize => IrqData::Connect(fds),
        IrqSet::DATA_EVENTFD => {
            return Err(RequestRefusal::Fds {
                command,
                found: fds.len(),
                needed: "none, or as many as interrupts",
            });
        }
        _ => return Err(bad_flags),
    };
    Ok(IrqCommand {
        index,
        start,
        count,
        action,
        data,
    })
}

fn parse_region_write_multi(payload: &[u8]) -> Result<VfioUserRequest<'_>, RequestRefusal> {
    let command = VfioUserCommand::REGION_WRITE_MULTI;
    let (wr_cnt, writes) = split_prefix::<zerocopy::little_endian::U64>(command, payload)?;
    check_size(
        command,
        payload,
        size_of::<u64>(),
        wr_cnt.get(),
        size_of::<SingleWrite>(),
    )?;
    let writes =
        <[SingleWrite]>::ref_from_bytes(writes).map_err(|_| RequestRefusal::PayloadSize {
            command,
            size: payload.len(),
            needed: wr_cnt.get(),
        })?;
    // All writes are checked before the first is carried out, so that a refused message has written nothing.
    for write in writes {
        let maximum = write.data.len() as u32;
        check_count(command, write.access.count.get().into(), maximum)?;
    }
    Ok(VfioUserRequest::RegionWriteMulti(writes))
}

/// Splits a payload into its fixed structure and the bytes after it.
fn split_prefix<T>(command: VfioUserCommand, payload: &[u8]) -> Result<(&T, &[u8]), RequestRefusal>
where
    T: FromBytes + zerocopy::KnownLayout + zerocopy::Immutable + zerocopy::Unaligned,
{
    T::ref_from_prefix(payload).map_err(|_| RequestRefusal::PayloadSize {
        command,
        size: payload.len(),
        needed: size_of::<T>() as u64,
    })
}

/// Checks that `argsz` covers a `T`.
fn check_argsz<T>(command: VfioUserCommand, argsz: u32) -> Result<u32, RequestRefusal> {
    if argsz as usize >= size_of::<T>() {
        Ok(argsz)
    } else {
        Err(RequestRefusal::Argsz {
            command,
            argsz,
            needed: size_of::<T>(),
        })
    }
}

/// Checks that a payload consists of a fixed part and `count` elements.
fn check_size(
    command: VfioUserCommand,
    payload: &[u8],
    fixed: usize,
    count: u64,
    element: usize,
) -> Result<(), RequestRefusal> {
    let needed = count
        .saturating_mul(element as u64)
        .saturating_add(fixed as u64);
    if payload.len() as u64 == needed {
        Ok(())
    } else {
        Err(RequestRefusal::PayloadSize {
            command,
            size: payload.len(),
            needed,
        })
    }
}

/// Checks that a region access's `count` is at most `maximum`.
fn check_count(command: VfioUserCommand, count: u64, maximum: u32) -> Result<u32, RequestRefusal> {
    match u32::try_from(count) {
        Ok(count) if count <= maximum => Ok(count),
        _ => Err(RequestRefusal::Count {
            command,
            count,
            maximum,
        }),
    }
}

/// Checks that a range is not empty and its last byte has a 64-bit address.
fn check_range(
    command: VfioUserCommand,
    address: u64,
    size: u64,
) -> Result<(u64, u64), RequestRefusal> {
    size.checked_sub(1)
        .and_then(|last| address.checked_add(last))
        .map(|_| (address, size))
        .ok_or(RequestRefusal::Range {
            command,
            address,
            size,
        })
}

fn parse_region(command: VfioUserCommand, index: u32) -> Result<RegionIndex, RequestRefusal> {
    RegionIndex::new(index).ok_or(RequestRefusal::NoSuchRegion { command, index })
}

fn parse_irq(command: VfioUserCommand, index: u32) -> Result<IrqIndex, RequestRefusal> {
    IrqIndex::new(index).ok_or(RequestRefusal::NoSuchIrq { command, index })
}

//! Conversations with a client: effects of each command on the device, and the replies.

mod dma;
mod irqs;
mod regions;
mod restore;

use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use zerocopy::IntoBytes;

use crate::device::{IrqAction, IrqData, IrqIndex, RegionIndex};
use crate::message::{
    DeviceInfo, DmaMap, DmaUnmap, IrqInfoPayload, IrqSet, MAX_DATA_XFER_SIZE, NUM_IRQS,
    NUM_REGIONS, RegionAccess, RegionInfo, RegionIoFds, SingleWrite, SparseMmap, VersionPayload,
    VfioUserCommand, VfioUserHeader,
};
use crate::session::SessionReadiness;
use crate::testing::{
    BAR0_SIZE, CONFIG_SIZE, DescriptorTracer, MSIX_VECTORS, RecordingDevice, SessionFixture,
    message,
};

const EINVAL: u32 = libc::EINVAL as u32;
const ENOTSUP: u32 = libc::ENOTSUP as u32;

fn dma_map(flags: u32, offset: u64, address: u64, size: u64) -> Vec<u8> {
    let map = DmaMap {
        argsz: 32.into(),
        flags: flags.into(),
        offset: offset.into(),
        address: address.into(),
        size: size.into(),
    };
    map.as_bytes().to_vec()
}

fn dma_unmap(flags: u32, address: u64, size: u64) -> Vec<u8> {
    let unmap = DmaUnmap {
        argsz: 24.into(),
        flags: flags.into(),
        address: address.into(),
        size: size.into(),
    };
    unmap.as_bytes().to_vec()
}

fn access(region: u32, offset: u64, count: u32) -> Vec<u8> {
    let access = RegionAccess {
        offset: offset.into(),
        region: region.into(),
        count: count.into(),
    };
    access.as_bytes().to_vec()
}

fn write(region: u32, offset: u64, data: &[u8]) -> Vec<u8> {
    [&access(region, offset, data.len() as u32), data].concat()
}

fn region_info(index: u32, argsz: u32) -> Vec<u8> {
    let info = RegionInfo {
        argsz: argsz.into(),
        index: index.into(),
        ..RegionInfo::default()
    };
    info.as_bytes().to_vec()
}

fn irq_set(flags: u32, index: IrqIndex, start: u32, count: u32) -> Vec<u8> {
    let set = IrqSet {
        argsz: 20.into(),
        flags: flags.into(),
        index: (index as u32).into(),
        start: start.into(),
        count: count.into(),
    };
    set.as_bytes().to_vec()
}

const CONNECT: u32 = IrqSet::DATA_EVENTFD | IrqSet::ACTION_TRIGGER;

/// Creates pipes in place of eventfds. A pipe shows when its descriptor is closed.
fn tracers(count: usize) -> (Vec<DescriptorTracer>, Vec<OwnedFd>) {
    (0..count).map(|_| DescriptorTracer::new()).unzip()
}

fn raw(fds: &[OwnedFd]) -> Vec<RawFd> {
    fds.iter().map(AsRawFd::as_raw_fd).collect()
}

#[test]
fn version_comes_first_and_once() {
    let mut session = SessionFixture::begin(RecordingDevice::new());
    // A command before the version message is refused, and can be sent again later.
    for (command, payload) in [
        (VfioUserCommand::DEVICE_RESET, vec![]),
        (VfioUserCommand::REGION_READ, access(0, 0, 8)),
        (VfioUserCommand::REGION_WRITE, write(0, 0, &[0; 9])),
        (VfioUserCommand::DMA_MAP, dma_map(DmaMap::READ, 0, 0, 4096)),
        (VfioUserCommand(99), vec![1, 2, 3]),
    ] {
        let errno = session.request(command, &payload).errno();
        assert!(
            errno == EINVAL || command == VfioUserCommand(99),
            "{command}"
        );
    }
    assert_eq!(session.device.resets, 0);
    assert!(session.device.accesses.is_empty());

    // An invalid version message is refused, and a valid one may follow.
    assert_eq!(
        session
            .request(VfioUserCommand::VERSION, &[0, 0, 1])
            .errno(),
        EINVAL
    );
    assert_eq!(
        session
            .request(VfioUserCommand::VERSION, b"\0\0\x01\0{")
            .errno(),
        EINVAL
    );
    let reply = session.request(
        VfioUserCommand::VERSION,
        b"\0\0\x05\0{\"capabilities\":{}}\0",
    );
    let version: VersionPayload = reply.read();
    assert_eq!((version.major.get(), version.minor.get()), (0, 1));
    assert_eq!(reply.payload.last(), Some(&0));

    assert_eq!(
        session
            .request(VfioUserCommand::VERSION, &[0, 0, 1, 0])
            .errno(),
        EINVAL
    );
    assert_eq!(
        session.request(VfioUserCommand::DEVICE_RESET, &[]).errno(),
        0
    );
    assert_eq!(session.device.resets, 1);
}

#[test]
fn another_major_version_ends_the_connection_with_an_error() {
    let mut session = SessionFixture::begin(RecordingDevice::new());
    let message = session.message(VfioUserCommand::VERSION, &[1, 0, 0, 0]);
    std::io::Write::write_all(&mut &session.client, &message).unwrap();
    assert_eq!(session.run(), SessionReadiness::Ended);
    assert_eq!(session.receive_reply().unwrap().errno(), ENOTSUP);
    assert!(session.closes_for_client());
}

#[test]
fn reset_is_harmless_right_after_version() {
    let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
    for resets in 1..=3 {
        let reply = session.request(VfioUserCommand::DEVICE_RESET, &[]);
        assert_eq!((reply.errno(), reply.payload.len()), (0, 0));
        assert_eq!(session.device.resets, resets);
    }
}

#[test]
fn device_info_is_a_pci_function_with_nine_regions_and_five_interrupt_types() {
    let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
    // Cloud Hypervisor's client sends an `argsz` of 32.
    for argsz in [16_u32, 32, u32::MAX] {
        let mut payload = [0; 16];
        payload[..4].copy_from_slice(argsz.as_bytes());
        let reply = session.request(VfioUserCommand::DEVICE_GET_INFO, &payload);
        assert_eq!(reply.payload.len(), 16);
        let info: DeviceInfo = reply.read();
        assert_eq!(info.argsz.get(), 16);
        assert_eq!(info.flags.get(), DeviceInfo::RESET | DeviceInfo::PCI);
        assert_eq!(info.num_regions.get(), NUM_REGIONS);
        assert_eq!(info.num_irqs.get(), NUM_IRQS);
    }
    let short = session.request(
        VfioUserCommand::DEVICE_GET_INFO,
        &[15, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    );
    assert_eq!(short.errno(), EINVAL);
    let mut payload = [0; 16];
    payload[0] = 15;
    assert_eq!(
        session
            .request(VfioUserCommand::DEVICE_GET_INFO, &payload)
            .errno(),
        EINVAL
    );
}

#[test]
fn errno_of_the_device_reaches_the_client() {
    let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
    let (tracer, fd) = DescriptorTracer::new();
    for (command, payload) in [
        (VfioUserCommand::DMA_MAP, dma_map(3, 0, 0, 0x1000)),
        (VfioUserCommand::DMA_UNMAP, dma_unmap(0, 0, 0x1000)),
        (
            VfioUserCommand::DEVICE_SET_IRQS,
            irq_set(CONNECT, IrqIndex::Msix, 0, 1),
        ),
    ] {
        session.device.next_errno = Some(libc::EEXIST);
        let reply = session.request_with_fds(command, &payload, &[fd.as_raw_fd()]);
        assert_eq!(reply.errno(), libc::EEXIST as u32, "{command}");
    }
    drop(fd);
    assert!(tracer.is_closed());
}

#[test]
fn unsupported_commands_return_enotsup() {
    let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
    for number in [0, 11, 12, 14, 16, 17, 18, 19, 0x7fff, u16::MAX] {
        for payload in [&[][..], &[0; 8], &[0xff; 4096]] {
            assert_eq!(
                session.request(VfioUserCommand(number), payload).errno(),
                ENOTSUP
            );
        }
    }
    assert_eq!(
        session.request(VfioUserCommand::DEVICE_RESET, &[]).errno(),
        0
    );
}

#[test]
fn file_descriptors_that_no_command_wants_are_closed() {
    let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
    let (tracer, fd) = DescriptorTracer::new();
    for (command, payload) in [
        (VfioUserCommand::REGION_READ, access(0, 0, 4)),
        (VfioUserCommand::REGION_WRITE, write(0, 0, &[0; 4])),
        (VfioUserCommand::DEVICE_RESET, vec![]),
        (VfioUserCommand::DEVICE_GET_REGION_INFO, region_info(0, 32)),
        (VfioUserCommand(77), vec![]),
    ] {
        session.request_with_fds(command, &payload, &[fd.as_raw_fd(); 5]);
    }
    drop(fd);
    assert!(tracer.is_closed());
}

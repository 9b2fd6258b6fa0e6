//! DMA mappings of the client's memory.

use super::*;

#[test]
fn dma_region_comes_with_its_file() {
    let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
    let (tracer, fd) = DescriptorTracer::new();
    // A user-space driver uses its virtual addresses as IOVAs.
    let payload = dma_map(
        DmaMap::READ | DmaMap::WRITE,
        0x3000,
        0x7fff_ffe0_0000,
        0x20_0000,
    );
    let reply = session.request_with_fds(VfioUserCommand::DMA_MAP, &payload, &[fd.as_raw_fd()]);
    assert_eq!((reply.errno(), reply.payload.len()), (0, 0));
    drop(fd);

    let map = &session.device.maps[0];
    assert_eq!((map.iova, map.size), (0x7fff_ffe0_0000, 0x20_0000));
    assert!(map.readable && map.writable);
    assert_eq!(map.memory.as_ref().unwrap().offset, 0x3000);
    assert!(!tracer.is_closed(), "the device has it");

    let (extra, again) = DescriptorTracer::new();
    let payload = dma_unmap(0, 0x7fff_ffe0_0000, 0x20_0000);
    let reply =
        session.request_with_fds(VfioUserCommand::DMA_UNMAP, &payload, &[again.as_raw_fd()]);
    drop(again);
    assert_eq!((reply.errno(), &reply.payload), (0, &payload));
    assert!(session.device.maps.is_empty());
    assert!(tracer.is_closed() && extra.is_closed());
}

#[test]
fn dma_region_without_a_file_is_taken() {
    let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
    let reply = session.request(
        VfioUserCommand::DMA_MAP,
        &dma_map(DmaMap::READ, 0, 0xfffc_0000, 0x4_0000),
    );
    assert_eq!(reply.errno(), 0);
    let map = &session.device.maps[0];
    assert!(map.memory.is_none() && map.readable && !map.writable);
    // The mapping reaches the end of the address space.
    let reply = session.request(
        VfioUserCommand::DMA_MAP,
        &dma_map(3, 0, u64::MAX - 0xfff, 0x1000),
    );
    assert_eq!(reply.errno(), 0);
}

#[test]
fn dma_unmap_returns_the_unmapped_size() {
    let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
    let nothing: DmaUnmap = session
        .request(VfioUserCommand::DMA_UNMAP, &dma_unmap(0, 0, 0x1000))
        .read();
    assert_eq!(nothing.size.get(), 0);
    for address in [0, 0x1000, 0x10000] {
        session.request(VfioUserCommand::DMA_MAP, &dma_map(3, 0, address, 0x1000));
    }
    let one: DmaUnmap = session
        .request(VfioUserCommand::DMA_UNMAP, &dma_unmap(0, 0, 0x1000))
        .read();
    assert_eq!((one.address.get(), one.size.get()), (0, 0x1000));
    let all = session.request(VfioUserCommand::DMA_UNMAP, &dma_unmap(DmaUnmap::ALL, 0, 0));
    assert_eq!(all.payload.len(), 24);
    assert_eq!(all.read::<DmaUnmap>().size.get(), 0x2000);
    assert!(session.device.maps.is_empty());
}

#[test]
fn dma_commands_that_are_not_allowed_are_refused() {
    let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
    let (tracer, fd) = DescriptorTracer::new();
    let one = [fd.as_raw_fd()];
    let two = [fd.as_raw_fd(), fd.as_raw_fd()];
    let mut small_argsz = dma_map(3, 0, 0, 0x1000);
    small_argsz[0] = 31;
    let mut check = |command, payload: &[u8], fds: &[RawFd], errno| {
        let reply = session.request_with_fds(command, payload, fds);
        assert_eq!(reply.errno(), errno, "{command} {payload:?}");
    };
    for (payload, fds, errno) in [
        (dma_map(3, 0, 0, 0), &one[..], EINVAL),
        (dma_map(3, 0, u64::MAX, 2), &one, EINVAL),
        (dma_map(3, 0, 1, u64::MAX), &one[..0], 0),
        (dma_map(3, 2, 0, u64::MAX), &one, EINVAL),
        (dma_map(3, 0, 0, 0x1000), &two, EINVAL),
        (dma_map(7, 0, 0, 0x1000), &[], EINVAL),
        (dma_map(0x10, 0, 0, 0x1000), &one, EINVAL),
        (dma_map(0xb, 0, 0, 0x1000), &one, ENOTSUP),
        (small_argsz, &one, EINVAL),
        (vec![32; 31], &one, EINVAL),
    ] {
        check(VfioUserCommand::DMA_MAP, &payload, fds, errno);
    }
    let bitmap = DmaUnmap::GET_DIRTY_BITMAP;
    for (payload, fds, errno) in [
        (dma_unmap(0, 0, 0), &one[..], EINVAL),
        (dma_unmap(0, 2, u64::MAX), &[], EINVAL),
        (dma_unmap(DmaUnmap::ALL, 0, 1), &[], EINVAL),
        (dma_unmap(DmaUnmap::ALL, 1, 0), &[], EINVAL),
        (dma_unmap(bitmap, 0, 0x1000), &[], ENOTSUP),
        (dma_unmap(3, 0, 0), &[], ENOTSUP),
        (dma_unmap(4, 0, 0x1000), &[], EINVAL),
        (vec![24; 23], &[], EINVAL),
    ] {
        check(VfioUserCommand::DMA_UNMAP, &payload, fds, errno);
    }
    drop(fd);
    assert!(tracer.is_closed());
    assert_eq!(session.device.maps.len(), 1);
}

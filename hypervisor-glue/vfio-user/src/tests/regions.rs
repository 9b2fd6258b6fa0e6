//! Region information and register accesses.

use super::*;

#[test]
fn every_region_has_an_answer() {
    let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
    for index in 0..NUM_REGIONS {
        let reply = session.request(
            VfioUserCommand::DEVICE_GET_REGION_INFO,
            &region_info(index, 32),
        );
        assert_eq!((reply.payload.len(), reply.fds.len()), (32, 0));
        let info: RegionInfo = reply.read();
        assert_eq!(info.index.get(), index);
        assert_eq!(info.argsz.get(), 32);
        assert_eq!((info.cap_offset.get(), info.offset.get()), (0, 0));
        let size = match index {
            0 => BAR0_SIZE,
            7 => CONFIG_SIZE,
            _ => 0,
        };
        assert_eq!(info.size.get(), size);
        let flags = if size > 0 {
            RegionInfo::READ | RegionInfo::WRITE
        } else {
            0
        };
        assert_eq!(info.flags.get(), flags);
    }
    for index in [NUM_REGIONS, u32::MAX] {
        let reply = session.request(
            VfioUserCommand::DEVICE_GET_REGION_INFO,
            &region_info(index, 32),
        );
        assert_eq!(reply.errno(), EINVAL);
    }
    let reply = session.request(VfioUserCommand::DEVICE_GET_REGION_INFO, &region_info(0, 31));
    assert_eq!(reply.errno(), EINVAL);
}

#[test]
fn mappable_area_is_told_when_argsz_has_room_for_all_of_it() {
    let mut session = SessionFixture::begin_negotiated(RecordingDevice::mappable());
    for argsz in [32, 33, 63] {
        let reply = session.request(
            VfioUserCommand::DEVICE_GET_REGION_INFO,
            &region_info(0, argsz),
        );
        assert_eq!((reply.payload.len(), reply.fds.len()), (32, 0));
        let info: RegionInfo = reply.read();
        assert_eq!(info.argsz.get(), 64, "the size to ask with");
        // The flags lack MMAP and CAPS, because a client that sees MMAP alone would map the whole region.
        assert_eq!(info.flags.get(), RegionInfo::READ | RegionInfo::WRITE);
        assert_eq!(info.cap_offset.get(), 0);
    }
    for argsz in [64, 65, 4064, u32::MAX] {
        let reply = session.request(
            VfioUserCommand::DEVICE_GET_REGION_INFO,
            &region_info(0, argsz),
        );
        assert_eq!(reply.payload.len(), 64);
        assert_eq!(reply.fds.len(), 1, "one area, one file descriptor");
        let info: RegionInfo = reply.read();
        let all = RegionInfo::READ | RegionInfo::WRITE | RegionInfo::MMAP | RegionInfo::CAPS;
        assert_eq!((info.argsz.get(), info.flags.get()), (64, all));
        assert_eq!((info.cap_offset.get(), info.offset.get()), (32, 0x10000));
        assert_eq!(info.size.get(), BAR0_SIZE);
        let sparse: SparseMmap =
            zerocopy::FromBytes::read_from_bytes(&reply.payload[32..]).unwrap();
        assert_eq!((sparse.id.get(), sparse.version.get()), (1, 1));
        assert_eq!((sparse.next.get(), sparse.nr_areas.get()), (0, 1));
        assert_eq!((sparse.offset.get(), sparse.size.get()), (0x1000, 0x2000));
    }
}

#[test]
fn region_info_request_may_be_as_long_as_the_reply_it_wants() {
    let mut session = SessionFixture::begin_negotiated(RecordingDevice::mappable());
    let mut payload = region_info(0, 4064);
    payload.resize(4064, 0);
    let reply = session.request(VfioUserCommand::DEVICE_GET_REGION_INFO, &payload);
    assert_eq!(
        (reply.errno(), reply.payload.len(), reply.fds.len()),
        (0, 64, 1)
    );
}

#[test]
fn client_that_takes_no_fds_is_not_offered_a_mapping() {
    let mut session = SessionFixture::begin(RecordingDevice::mappable());
    let data = b"\0\0\x01\0{\"capabilities\":{\"max_msg_fds\":0}}\0";
    assert_eq!(session.request(VfioUserCommand::VERSION, data).errno(), 0);
    let reply = session.request(
        VfioUserCommand::DEVICE_GET_REGION_INFO,
        &region_info(0, 4064),
    );
    assert_eq!((reply.payload.len(), reply.fds.len()), (32, 0));
    assert_eq!(reply.read::<RegionInfo>().flags.get() & RegionInfo::MMAP, 0);
}

#[test]
fn regions_have_no_io_fds() {
    let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
    let request = |index: u32, argsz: u32| {
        let request = RegionIoFds {
            argsz: argsz.into(),
            index: index.into(),
            ..RegionIoFds::default()
        };
        request.as_bytes().to_vec()
    };
    let reply = session.request(VfioUserCommand::DEVICE_GET_REGION_IO_FDS, &request(2, 4096));
    assert_eq!((reply.payload.len(), reply.fds.len()), (16, 0));
    let none: RegionIoFds = reply.read();
    assert_eq!((none.argsz.get(), none.index.get()), (16, 2));
    assert_eq!((none.flags.get(), none.count.get()), (0, 0));
    for (index, argsz) in [(9, 16), (0, 15)] {
        let reply = session.request(
            VfioUserCommand::DEVICE_GET_REGION_IO_FDS,
            &request(index, argsz),
        );
        assert_eq!(reply.errno(), EINVAL);
    }
}

#[test]
fn registers_are_read_and_written_in_any_size() {
    let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
    for size in [1, 2, 4, 8, 16, 4096] {
        let data: Vec<u8> = (0..size).map(|byte| byte as u8 ^ 0x5a).collect();
        let reply = session.request(VfioUserCommand::REGION_WRITE, &write(0, 8, &data));
        assert_eq!(
            (reply.errno(), &reply.payload),
            (0, &access(0, 8, size as u32))
        );
        assert_eq!(session.device.bar0[8..][..size], data);

        let reply = session.request(VfioUserCommand::REGION_READ, &access(0, 8, size as u32));
        assert_eq!((reply.errno(), reply.payload), (0, write(0, 8, &data)));
    }
    // Config space is read in words, whatever the Command register says.
    let reply = session.request(VfioUserCommand::REGION_READ, &access(7, 4, 2));
    assert_eq!(reply.errno(), 0);
    assert_eq!(
        session.device.accesses.last(),
        Some(&(RegionIndex::Config, 4, 2))
    );

    // An empty access does not reach the device, whether or not the region exists.
    session.device.accesses.clear();
    for region in [0, 2] {
        let reply = session.request(VfioUserCommand::REGION_READ, &access(region, 0, 0));
        assert_eq!((reply.errno(), reply.payload.len()), (0, 16));
        let reply = session.request(VfioUserCommand::REGION_WRITE, &access(region, 0, 0));
        assert_eq!((reply.errno(), reply.payload.len()), (0, 16));
    }
    assert!(session.device.accesses.is_empty());
}

#[test]
fn reads_of_nothing_are_all_ones_and_never_an_error() {
    let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
    for (region, offset, count) in [
        (0, BAR0_SIZE, 4),
        (0, BAR0_SIZE - 4, 8),
        (0, u64::MAX, 8),
        (0, u64::MAX - 7, 8),
        (0, 1 << 63, 1),
        (7, CONFIG_SIZE, 2),
        (1, 0, 4),
        (8, 0, 1),
        (9, 0, 4),
        (u32::MAX, u64::MAX, 4),
        (0, 0, MAX_DATA_XFER_SIZE),
    ] {
        let message = session.message(VfioUserCommand::REGION_READ, &access(region, offset, count));
        std::io::Write::write_all(&mut &session.client, &message).unwrap();
        let mut reply = Vec::new();
        while reply.len() < VfioUserHeader::SIZE + 16 + count as usize {
            session.run();
            let mut buffer = vec![0; 1 << 16];
            let read = std::io::Read::read(&mut &session.client, &mut buffer).unwrap();
            reply.extend_from_slice(&buffer[..read]);
        }
        assert_eq!(reply[8], 1, "a reply, no error");
        assert_eq!(reply[16..32], access(region, offset, count));
        assert!(reply[32..].iter().all(|&byte| byte == 0xff));
        assert_eq!(reply.len(), 32 + count as usize);
    }
    assert!(session.device.accesses.is_empty());
}

#[test]
fn writes_to_nothing_are_ignored_and_never_an_error() {
    let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
    for (region, offset) in [(0, BAR0_SIZE - 3), (0, u64::MAX), (3, 0), (9, 0)] {
        let reply = session.request(
            VfioUserCommand::REGION_WRITE,
            &write(region, offset, &[1; 4]),
        );
        assert_eq!((reply.errno(), reply.payload.len()), (0, 16));
    }
    assert!(session.device.accesses.is_empty());
}

#[test]
fn accesses_that_contradict_themselves_are_refused() {
    let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
    let too_many = access(0, 0, MAX_DATA_XFER_SIZE + 1);
    for (command, payload) in [
        (VfioUserCommand::REGION_READ, &too_many[..]),
        (VfioUserCommand::REGION_READ, &access(0, 0, u32::MAX)),
        (VfioUserCommand::REGION_READ, &access(0, 0, 4)[..15]),
        (VfioUserCommand::REGION_WRITE, &too_many),
        (VfioUserCommand::REGION_WRITE, &access(0, 0, 4)),
        (VfioUserCommand::REGION_WRITE, &write(0, 0, &[0; 4])[..19]),
        (
            VfioUserCommand::REGION_WRITE,
            &[write(0, 0, &[0; 4]), vec![0]].concat(),
        ),
        (VfioUserCommand::REGION_WRITE, &[]),
    ] {
        assert_eq!(
            session.request(command, payload).errno(),
            EINVAL,
            "{payload:?}"
        );
    }
    assert!(session.device.accesses.is_empty());
    assert_eq!(
        session
            .request(VfioUserCommand::REGION_READ, &access(0, 0, 4))
            .errno(),
        0
    );
}

fn write_multi(count: u64, writes: &[SingleWrite]) -> Vec<u8> {
    [count.as_bytes(), writes.as_bytes()].concat()
}

fn single(offset: u64, count: u32, data: [u8; 8]) -> SingleWrite {
    SingleWrite {
        access: RegionAccess {
            offset: offset.into(),
            region: 0.into(),
            count: count.into(),
        },
        data,
    }
}

#[test]
fn several_writes_come_in_one_message() {
    let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
    let writes = [
        single(0x10, 4, [1; 8]),
        single(BAR0_SIZE, 8, [2; 8]),
        single(0x20, 8, [3; 8]),
        single(0x30, 0, [4; 8]),
    ];
    let reply = session.request(
        VfioUserCommand::REGION_WRITE_MULTI,
        &write_multi(4, &writes),
    );
    assert_eq!(
        (reply.errno(), reply.payload),
        (0, 4_u64.as_bytes().to_vec())
    );
    assert_eq!(session.device.bar0[0x10..0x15], [1, 1, 1, 1, 0x14]);
    assert_eq!(session.device.bar0[0x20..0x28], [3; 8]);

    // QEMU sends as many writes as fit, without a reply.
    let writes = vec![single(0x40, 1, [7; 8]); 200];
    let posted = message(
        9,
        VfioUserCommand::REGION_WRITE_MULTI,
        VfioUserHeader::NO_REPLY,
        &write_multi(200, &writes),
    );
    std::io::Write::write_all(&mut &session.client, &posted).unwrap();
    assert_eq!(session.run(), SessionReadiness::Reading);
    assert_eq!(session.device.bar0[0x40], 7);
    assert!(session.receive_reply().is_none());

    session.device.accesses.clear();
    for (count, writes) in [
        (2, &writes[..1]),
        (1, &writes[..2]),
        (u64::MAX, &writes[..1]),
        (u64::MAX / 24 + 1, &writes[..1]),
        (2, &[single(0, 1, [0; 8]), single(0, 9, [0; 8])]),
    ] {
        let reply = session.request(
            VfioUserCommand::REGION_WRITE_MULTI,
            &write_multi(count, writes),
        );
        assert_eq!(reply.errno(), EINVAL);
    }
    assert!(session.device.accesses.is_empty(), "all or nothing");
}

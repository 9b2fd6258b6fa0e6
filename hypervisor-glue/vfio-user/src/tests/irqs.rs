//! Interrupts of the device.

use super::*;

#[test]
fn interrupt_types_are_told() {
    let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
    let request = |index: u32, argsz: u32| {
        let request = IrqInfoPayload {
            argsz: argsz.into(),
            index: index.into(),
            ..IrqInfoPayload::default()
        };
        request.as_bytes().to_vec()
    };
    for (index, count) in [(0, 0), (1, 0), (2, MSIX_VECTORS), (3, 1), (4, 1)] {
        let reply = session.request(VfioUserCommand::DEVICE_GET_IRQ_INFO, &request(index, 16));
        assert_eq!(reply.payload.len(), 16);
        let info: IrqInfoPayload = reply.read();
        assert_eq!((info.argsz.get(), info.index.get()), (16, index));
        assert_eq!(info.count.get(), count);
        assert_eq!(
            info.flags.get(),
            if count > 0 {
                IrqInfoPayload::EVENTFD
            } else {
                0
            }
        );
    }
    for (index, argsz) in [(5, 16), (u32::MAX, 16), (2, 15)] {
        let reply = session.request(VfioUserCommand::DEVICE_GET_IRQ_INFO, &request(index, argsz));
        assert_eq!(reply.errno(), EINVAL);
    }
}

#[test]
fn interrupts_are_connected_and_disconnected() {
    let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
    // Connects all vectors by one message, which exceeds `max_msg_fds`, as Cloud Hypervisor does.
    let (tracers, fds) = tracers(MSIX_VECTORS as usize);
    let payload = irq_set(CONNECT, IrqIndex::Msix, 0, MSIX_VECTORS);
    let reply = session.request_with_fds(VfioUserCommand::DEVICE_SET_IRQS, &payload, &raw(&fds));
    assert_eq!((reply.errno(), reply.payload.len()), (0, 0));
    drop(fds);
    let command = session.device.irqs.pop().unwrap();
    assert_eq!(
        (command.index, command.action),
        (IrqIndex::Msix, IrqAction::Trigger)
    );
    assert_eq!((command.start, command.count), (0, MSIX_VECTORS));
    let IrqData::Connect(connected) = command.data else {
        panic!("{:?}", command.data);
    };
    assert_eq!(connected.len(), tracers.len());
    assert!(tracers.iter().all(|tracer| !tracer.is_closed()));
    drop(connected);
    assert!(tracers.iter().all(DescriptorTracer::is_closed));

    // QEMU connects a part of the vectors, and disconnects the other vectors by messages without descriptors.
    let reply = session.request(
        VfioUserCommand::DEVICE_SET_IRQS,
        &irq_set(CONNECT, IrqIndex::Msix, 16, 4),
    );
    assert_eq!(reply.errno(), 0);
    let command = session.device.irqs.pop().unwrap();
    assert!(matches!(command.data, IrqData::Disconnect));
    assert_eq!((command.start, command.count), (16, 4));
    let none = IrqSet::DATA_NONE | IrqSet::ACTION_TRIGGER;
    for index in IrqIndex::ALL {
        let reply = session.request(
            VfioUserCommand::DEVICE_SET_IRQS,
            &irq_set(none, index, 0, 0),
        );
        assert_eq!(reply.errno(), 0);
        let command = session.device.irqs.pop().unwrap();
        assert!(matches!(command.data, IrqData::None));
        assert_eq!((command.index, command.count), (index, 0));
    }
}

#[test]
fn interrupts_are_masked_and_triggered() {
    let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
    let bools = IrqSet::DATA_BOOL | IrqSet::ACTION_MASK;
    let payload = [irq_set(bools, IrqIndex::Msix, 1, 3), vec![1, 0, 7]].concat();
    assert_eq!(
        session
            .request(VfioUserCommand::DEVICE_SET_IRQS, &payload)
            .errno(),
        0
    );
    let command = session.device.irqs.pop().unwrap();
    assert_eq!(command.action, IrqAction::Mask);
    assert!(matches!(command.data, IrqData::Bools(which) if which == [true, false, true]));

    let unmask = IrqSet::DATA_NONE | IrqSet::ACTION_UNMASK;
    let payload = irq_set(unmask, IrqIndex::Req, 0, 1);
    assert_eq!(
        session
            .request(VfioUserCommand::DEVICE_SET_IRQS, &payload)
            .errno(),
        0
    );
    assert_eq!(session.device.irqs.pop().unwrap().action, IrqAction::Unmask);
}

#[test]
fn absent_interrupts_are_refused_and_their_fds_closed() {
    let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
    let (tracers, fds) = tracers(2);
    let msix = IrqIndex::Msix;
    let none = IrqSet::DATA_NONE;
    let trigger = IrqSet::ACTION_TRIGGER;
    let mut small_argsz = irq_set(CONNECT, msix, 0, 2);
    small_argsz[0] = 19;
    let mut no_index = irq_set(CONNECT, msix, 0, 2);
    no_index[8] = 5;
    let two_bools = [0, 1];
    for payload in [
        irq_set(CONNECT, msix, MSIX_VECTORS - 1, 2),
        irq_set(CONNECT, msix, u32::MAX, 2),
        irq_set(CONNECT, msix, 0, 1),
        irq_set(CONNECT, msix, 0, 3),
        irq_set(CONNECT, msix, 0, u32::MAX),
        irq_set(CONNECT, msix, 0, 0),
        irq_set(CONNECT, IrqIndex::Intx, 0, 2),
        irq_set(none | trigger, msix, 1, 0),
        irq_set(none | trigger, msix, MSIX_VECTORS + 1, 1),
        irq_set(none | trigger, msix, 0, MSIX_VECTORS + 1),
        irq_set(none | IrqSet::ACTION_MASK, msix, 0, 0),
        irq_set(none, msix, 0, 2),
        irq_set(trigger, msix, 0, 2),
        irq_set(CONNECT | none, msix, 0, 2),
        irq_set(CONNECT | IrqSet::ACTION_MASK, msix, 0, 2),
        irq_set(CONNECT | 0x40, msix, 0, 2),
        irq_set(IrqSet::DATA_BOOL | trigger, msix, 0, u32::MAX),
        irq_set(IrqSet::DATA_BOOL | trigger, msix, 0, 2),
        [
            &irq_set(IrqSet::DATA_BOOL | trigger, msix, 0, 1)[..],
            &two_bools,
        ]
        .concat(),
        small_argsz,
        no_index,
        vec![20; 19],
    ] {
        let reply =
            session.request_with_fds(VfioUserCommand::DEVICE_SET_IRQS, &payload, &raw(&fds));
        assert_eq!(reply.errno(), EINVAL, "{payload:?}");
    }
    drop(fds);
    assert!(tracers.iter().all(DescriptorTracer::is_closed));
    assert!(session.device.irqs.is_empty());
}

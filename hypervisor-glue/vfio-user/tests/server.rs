//! The vfio-user server over a real socket and a real event loop, with Cloud Hypervisor's client.

#![expect(
    clippy::disallowed_methods,
    reason = "tests have threads and real time of their own"
)]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
use tempfile::TempDir;
use vfio_user::Client;
use vfio_user_server::{
    DeviceRegion, DmaRegion, Error, IrqCommand, IrqData, IrqIndex, IrqInfo, MappableArea,
    RegionIndex, VfioUserDevice, VfioUserServer,
};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const BAR0_SIZE: u64 = 0x4000;
const AREA: (u64, u64) = (0x1000, 0x1000);
const VECTORS: u32 = 128;

/// State of the device, shared between the test and the server.
#[derive(Default)]
struct State {
    registers: BTreeMap<u64, u8>,
    maps: Vec<DmaRegion>,
    vectors: BTreeMap<u32, OwnedFd>,
    resets: u32,
}

/// A register file. A write to the last register signals the eventfds.
struct TestDevice {
    state: Arc<Mutex<State>>,
    area: Arc<OwnedFd>,
    /// Sends a message when a client has disconnected.
    disconnects: Sender<()>,
}

impl VfioUserDevice for TestDevice {
    fn region(&self, index: RegionIndex) -> DeviceRegion {
        let (size, mappable) = match index {
            RegionIndex::Bar0 => {
                let area = MappableArea {
                    offset: AREA.0,
                    size: AREA.1,
                    memory: self.area.clone(),
                    base: 0,
                };
                (BAR0_SIZE, Some(area))
            }
            RegionIndex::Config => (0x1000, None),
            _ => (0, None),
        };
        DeviceRegion {
            size,
            readable: true,
            writable: true,
            mappable,
        }
    }

    fn read(&mut self, region: RegionIndex, offset: u64, data: &mut [u8]) {
        if region == RegionIndex::Bar0 {
            let state = self.state.lock().unwrap();
            for (byte, address) in data.iter_mut().zip(offset..) {
                *byte = state.registers.get(&address).copied().unwrap_or(0);
            }
        }
    }

    fn write(&mut self, region: RegionIndex, offset: u64, data: &[u8]) {
        let mut state = self.state.lock().unwrap();
        if region == RegionIndex::Bar0 && offset == BAR0_SIZE - 4 {
            let vector = u32::from_le_bytes(data.try_into().unwrap());
            let fd = state.vectors[&vector].try_clone().unwrap();
            File::from(fd).write_all(&1_u64.to_ne_bytes()).unwrap();
        } else if region == RegionIndex::Bar0 {
            state.registers.extend((offset..).zip(data.iter().copied()));
        }
    }

    fn dma_map(&mut self, region: DmaRegion) -> io::Result<()> {
        self.state.lock().unwrap().maps.push(region);
        Ok(())
    }

    fn dma_unmap(&mut self, range: Option<(u64, u64)>) -> io::Result<u64> {
        let maps = &mut self.state.lock().unwrap().maps;
        let bytes = |maps: &[DmaRegion]| maps.iter().map(|map| map.size).sum::<u64>();
        let before = bytes(maps);
        maps.retain(|map| range.is_some_and(|range| range != (map.iova, map.size)));
        Ok(before - bytes(maps))
    }

    fn irq(&self, index: IrqIndex) -> IrqInfo {
        IrqInfo {
            count: if index == IrqIndex::Msix { VECTORS } else { 0 },
            ..IrqInfo::default()
        }
    }

    fn set_irqs(&mut self, command: IrqCommand) -> io::Result<()> {
        let vectors = &mut self.state.lock().unwrap().vectors;
        match command.data {
            IrqData::Connect(fds) => vectors.extend((command.start..).zip(fds)),
            IrqData::None if command.count == 0 => vectors.clear(),
            _ => return Err(io::Error::from(io::ErrorKind::Unsupported)),
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.state.lock().unwrap().resets += 1;
    }

    fn on_disconnected(&mut self) {
        let mut state = self.state.lock().unwrap();
        state.maps.clear();
        state.vectors.clear();
        // Sending fails if the test has dropped the receiver.
        let _ = self.disconnects.send(());
    }
}

/// Eventfd subscriber that ends the thread of the event loop.
struct Stop {
    event: EventFd,
    stopped: Arc<Mutex<bool>>,
}

impl MutEventSubscriber for Stop {
    fn process(&mut self, _: Events, _: &mut EventOps) {
        *self.stopped.lock().unwrap() = true;
    }

    fn init(&mut self, ops: &mut EventOps) {
        ops.add(Events::new(&self.event, EventSet::IN)).unwrap();
    }
}

/// Servers whose event loop runs on a separate thread.
struct Running {
    directory: TempDir,
    states: Vec<Arc<Mutex<State>>>,
    disconnects: Vec<Receiver<()>>,
    area: File,
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    fn one() -> Self {
        Self::start(1)
    }

    fn start(servers: usize) -> Self {
        let directory = TempDir::new().unwrap();
        let area = tempfile::tempfile().unwrap();
        area.set_len(AREA.0 + AREA.1).unwrap();
        let stop = EventFd::new(EFD_NONBLOCK).unwrap();
        let stopped = Arc::new(Mutex::new(false));

        let (mut states, mut gone, mut bound) = (Vec::new(), Vec::new(), Vec::new());
        for number in 0..servers {
            let state = Arc::new(Mutex::new(State::default()));
            let (sender, receiver) = mpsc::channel();
            let device = TestDevice {
                state: state.clone(),
                area: Arc::new(area.try_clone().unwrap().into()),
                disconnects: sender,
            };
            states.push(state);
            gone.push(receiver);
            bound.push(VfioUserServer::bind(socket(directory.path(), number), device).unwrap());
        }
        let last = Stop {
            event: stop.try_clone().unwrap(),
            stopped: stopped.clone(),
        };
        let thread = thread::spawn(move || {
            let mut manager = EventManager::<Box<dyn MutEventSubscriber>>::new().unwrap();
            for server in bound {
                manager.add_subscriber(Box::new(server));
            }
            manager.add_subscriber(Box::new(last));
            while !*stopped.lock().unwrap() {
                manager.run().unwrap();
            }
        });
        Self {
            directory,
            states,
            disconnects: gone,
            area,
            stop,
            thread: Some(thread),
        }
    }

    fn path(&self) -> PathBuf {
        socket(self.directory.path(), 0)
    }

    fn client(&self) -> Client {
        Client::new(&self.path()).unwrap()
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.states[0].lock().unwrap()
    }

    /// Waits until the server has noticed that its client disconnected.
    fn wait_for_disconnect(&self) {
        self.disconnects[0].recv().unwrap();
    }

    fn stop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.stop.write(1).unwrap();
            thread.join().unwrap();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
    }
}

fn socket(directory: &Path, number: usize) -> PathBuf {
    directory.join(format!("{number}.sock"))
}

fn raw(fds: &[EventFd]) -> Vec<RawFd> {
    fds.iter().map(AsRawFd::as_raw_fd).collect()
}

/// `VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER`
const CONNECT: u32 = 0x24;
/// `VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_TRIGGER`
const DISCONNECT: u32 = 0x21;

#[test]
fn client_finds_the_regions_and_one_mappable_area_with_its_file() {
    let running = Running::one();
    let client = running.client();
    for index in 0..9 {
        let region = client.region(index).unwrap();
        let size = match index {
            0 => BAR0_SIZE,
            7 => 0x1000,
            _ => 0,
        };
        assert_eq!(region.size, size, "region {index}");
        assert_eq!(region.sparse_areas.len(), usize::from(index == 0));
        assert_eq!(region.file_offset.is_some(), index == 0);
    }
    let bar0 = client.region(0).unwrap();
    let area = &bar0.sparse_areas[0];
    assert_eq!((area.offset, area.size), AREA);

    // The client got the area's memory, at the offset that the client computes.
    let file = bar0.file_offset.as_ref().unwrap();
    let place = file.start() + area.offset;
    file.file().write_all_at(b"doorbell", place).unwrap();
    let mut seen = [0; 8];
    running.area.read_exact_at(&mut seen, AREA.0).unwrap();
    assert_eq!(&seen, b"doorbell");
}

#[test]
fn client_reads_and_writes_registers() {
    let running = Running::one();
    let mut client = running.client();
    for size in [1, 2, 4, 8] {
        let written: Vec<u8> = (1..=size).collect();
        client.region_write(0, 0x38, &written).unwrap();
        let mut read = vec![0; written.len()];
        client.region_read(0, 0x38, &mut read).unwrap();
        assert_eq!(read, written);
    }
    for (region, offset) in [(0, BAR0_SIZE), (0, u64::MAX), (1, 0), (9, 0), (7, 0xfff)] {
        client.region_write(region, offset, &[0; 4]).unwrap();
        let mut read = [0; 4];
        client.region_read(region, offset, &mut read).unwrap();
        assert_eq!(read, [0xff; 4], "region {region} at {offset:#x}");
    }
}

#[test]
fn a_client_maps_and_unmaps_memory() {
    let running = Running::one();
    let mut client = running.client();
    let memory = tempfile::tempfile().unwrap();
    memory.set_len(0x3000).unwrap();
    memory.write_all_at(b"guest", 0x2000).unwrap();
    client
        .dma_map(0x2000, 0x1_0000_0000, 0x1000, memory.as_raw_fd())
        .unwrap();
    client
        .dma_map(0, 0x7fff_0000_0000, 0x2000, memory.as_raw_fd())
        .unwrap();
    {
        let state = running.state();
        let map = &state.maps[0];
        assert_eq!((map.iova, map.size), (0x1_0000_0000, 0x1000));
        assert!(map.readable && map.writable);
        let shared = map.memory.as_ref().unwrap();
        let file = File::from(shared.fd.try_clone().unwrap());
        let mut seen = [0; 5];
        file.read_exact_at(&mut seen, shared.offset).unwrap();
        assert_eq!(&seen, b"guest");
    }
    client.dma_unmap(0x1_0000_0000, 0x1000).unwrap();
    client.dma_unmap(0x9000_0000, 0x1000).unwrap();
    assert_eq!(running.state().maps.len(), 1);
}

#[test]
fn client_gets_interrupts_on_all_vectors() {
    let running = Running::one();
    let mut client = running.client();
    let msix = client.get_irq_info(2).unwrap();
    assert_eq!((msix.count, msix.flags), (VECTORS, 1));
    assert_eq!(client.get_irq_info(0).unwrap().count, 0);

    let events: Vec<EventFd> = (0..VECTORS)
        .map(|_| EventFd::new(EFD_NONBLOCK).unwrap())
        .collect();
    client
        .set_irqs(2, CONNECT, 0, VECTORS, &raw(&events))
        .unwrap();
    for vector in [0, 1, VECTORS - 1] {
        client
            .region_write(0, BAR0_SIZE - 4, &vector.to_le_bytes())
            .unwrap();
        assert_eq!(events[vector as usize].read().unwrap(), 1);
    }
    client.set_irqs(2, DISCONNECT, 0, 0, &[]).unwrap();
    assert!(running.state().vectors.is_empty());
}

#[test]
fn client_may_reset_as_soon_as_it_has_connected() {
    let running = Running::one();
    let mut client = running.client();
    // The client inverts the reset flag: it would reset a device only if the device does not offer resets.
    assert!(!client.resettable());
    client.reset().unwrap();
    client.region_write(0, 0, &[5]).unwrap();
    assert_eq!(running.state().resets, 1);
}

#[test]
fn a_second_client_is_refused_and_the_first_continues() {
    let running = Running::one();
    let mut first = running.client();
    for _ in 0..20 {
        assert!(Client::new(&running.path()).is_err());
    }
    // A second client that sends nothing is refused as well.
    let mut idle = UnixStream::connect(running.path()).unwrap();
    assert_eq!(idle.read(&mut [0; 1]).unwrap(), 0);
    first.region_write(0, 0, &[1]).unwrap();
    assert!(running.disconnects[0].try_recv().is_err());
}

#[test]
fn a_reconnected_client_finds_its_registers_but_no_memory() {
    let running = Running::one();
    let mut client = running.client();
    let memory = tempfile::tempfile().unwrap();
    let event = EventFd::new(EFD_NONBLOCK).unwrap();
    client.region_write(0, 0x14, &[1, 2, 3, 4]).unwrap();
    client.dma_map(0, 0, 0x1000, memory.as_raw_fd()).unwrap();
    client
        .set_irqs(2, CONNECT, 3, 1, &[event.as_raw_fd()])
        .unwrap();
    drop(client);
    running.wait_for_disconnect();
    assert!(running.state().maps.is_empty());
    assert!(running.state().vectors.is_empty());

    let mut client = running.client();
    let mut read = [0; 4];
    client.region_read(0, 0x14, &mut read).unwrap();
    assert_eq!(read, [1, 2, 3, 4]);
}

/// A `VERSION` message for 0.1, without version data.
const VERSION: [u8; 20] = [1, 0, 1, 0, 20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0];

/// A VMM restarts: the new client has connected, and the old client has closed its connection. Both events are pending, and the
/// server handles the new connection first.
#[test]
fn client_may_be_replaced_without_a_pause() {
    let directory = TempDir::new().unwrap();
    let path = socket(directory.path(), 0);
    let state = Arc::new(Mutex::new(State::default()));
    let (sender, gone) = mpsc::channel();
    let area = tempfile::tempfile().unwrap();
    let device = TestDevice {
        state: state.clone(),
        area: Arc::new(area.into()),
        disconnects: sender,
    };
    let mut manager = EventManager::new().unwrap();
    let server = manager.add_subscriber(VfioUserServer::bind(&path, device).unwrap());

    let mut old = UnixStream::connect(&path).unwrap();
    old.write_all(&VERSION).unwrap();
    manager.run().unwrap();
    manager.run().unwrap();
    old.read_exact(&mut [0; 20]).unwrap();
    // No event is pending, so the events of the following calls are handled in the order in which they happen.
    assert_eq!(manager.run_with_timeout(0).unwrap(), 0);

    let mut new = UnixStream::connect(&path).unwrap();
    let write_without_reply = [2, 0, 10, 0, 33, 0, 0, 0, 0x10];
    let mut last_words = [&write_without_reply[..], &[0; 24]].concat();
    (last_words[28], last_words[32]) = (1, 77);
    old.write_all(&last_words).unwrap();
    drop(old);
    manager.run().unwrap();
    assert_eq!(gone.try_iter().count(), 1);
    assert_eq!(state.lock().unwrap().registers.get(&0), Some(&77));

    new.write_all(&VERSION).unwrap();
    manager.run().unwrap();
    new.read_exact(&mut [0; 20]).unwrap();
    assert!(manager.subscriber_mut(server).unwrap().is_connected());
}

#[test]
fn after_a_client_dies_in_a_message_the_next_is_served() {
    let running = Running::one();
    for cut in 1..VERSION.len() {
        let mut dying = UnixStream::connect(running.path()).unwrap();
        dying.write_all(&VERSION[..cut]).unwrap();
        drop(dying);
        running.wait_for_disconnect();
    }
    running.client().region_write(0, 0, &[1]).unwrap();
}

#[test]
fn an_invalid_message_disconnects_the_client() {
    let running = Running::one();
    let mut talker = UnixStream::connect(running.path()).unwrap();
    talker.write_all(&[0xff; 64]).unwrap();
    let mut replies = Vec::new();
    // The server closes with unread bytes, which some kernels report as a reset.
    let _ = talker.read_to_end(&mut replies);
    running.wait_for_disconnect();
    running.client().region_write(0, 0, &[1]).unwrap();
}

/// A single thread serves both clients. The replies of the first fill its socket.
#[test]
fn a_client_that_does_not_read_blocks_no_other() {
    let running = Running::start(2);
    let mut deaf = UnixStream::connect(running.path()).unwrap();
    deaf.set_nonblocking(true).unwrap();
    deaf.write_all(&VERSION).unwrap();
    let mut read = vec![1, 0, 9, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    read.extend([0; 12]);
    read.extend(0x10_0000_u32.to_le_bytes());
    // Sends until the server has stopped reading, and the socket is full.
    let full = loop {
        if let Err(error) = deaf.write_all(&read) {
            break error;
        }
    };
    assert_eq!(full.kind(), io::ErrorKind::WouldBlock);

    let mut client = Client::new(&socket(running.directory.path(), 1)).unwrap();
    for value in 0..100 {
        client.region_write(0, 0, &[value]).unwrap();
    }
    drop(deaf);
    running.wait_for_disconnect();
    running.client().region_write(0, 0, &[1]).unwrap();
}

#[test]
fn socket_file_is_the_servers_own() {
    let mut running = Running::one();
    let path = running.path();
    let (gone, _) = mpsc::channel();
    let other = || TestDevice {
        state: Arc::default(),
        area: Arc::new(tempfile::tempfile().unwrap().into()),
        disconnects: gone.clone(),
    };
    let refused = VfioUserServer::bind(&path, other()).map(drop).unwrap_err();
    assert!(matches!(&refused, Error::SocketInUse { path: named } if *named == path));
    assert!(refused.to_string().contains(path.to_str().unwrap()));
    running.client().region_write(0, 0, &[1]).unwrap();

    running.stop();
    assert!(!path.exists());
    let server = VfioUserServer::bind(&path, other()).unwrap();
    assert_eq!(server.path(), path);
    assert!(!server.is_connected());
}

#[test]
fn a_stopped_server_releases_the_clients_memory() {
    let mut running = Running::one();
    let mut client = running.client();
    let memory = tempfile::tempfile().unwrap();
    client.dma_map(0, 0, 0x1000, memory.as_raw_fd()).unwrap();
    running.stop();
    running.wait_for_disconnect();
    assert!(running.state().maps.is_empty());
    assert!(client.region_read(0, 0, &mut [0; 4]).is_err());
}

#[test]
fn an_unmappable_area_is_refused() {
    struct Odd(MappableArea);
    impl VfioUserDevice for Odd {
        fn region(&self, index: RegionIndex) -> DeviceRegion {
            DeviceRegion {
                size: BAR0_SIZE,
                mappable: (index == RegionIndex::Bar2).then(|| self.0.clone()),
                ..DeviceRegion::default()
            }
        }
        fn read(&mut self, _: RegionIndex, _: u64, _: &mut [u8]) {}
        fn write(&mut self, _: RegionIndex, _: u64, _: &[u8]) {}
        fn dma_map(&mut self, _: DmaRegion) -> io::Result<()> {
            Ok(())
        }
        fn dma_unmap(&mut self, _: Option<(u64, u64)>) -> io::Result<u64> {
            Ok(0)
        }
        fn irq(&self, _: IrqIndex) -> IrqInfo {
            IrqInfo::default()
        }
        fn set_irqs(&mut self, _: IrqCommand) -> io::Result<()> {
            Ok(())
        }
        fn reset(&mut self) {}
        fn on_disconnected(&mut self) {}
    }

    let directory = TempDir::new().unwrap();
    let memory = Arc::new(OwnedFd::from(tempfile::tempfile().unwrap()));
    for (offset, size, base, good) in [
        (0, BAR0_SIZE, 0, true),
        (0x1000, 0x1000, 0x7fff_ffff_ffff_d000, true),
        (0x1000, 0x1000, 0x7fff_ffff_ffff_f000, false),
        (0x1000, 0x1000, !0xfff, false),
        (0, 0, 0, false),
        (0x800, 0x1000, 0, false),
        (0x1000, 0x800, 0, false),
        (0, 0x1000, 0x10, false),
        (0x1000, BAR0_SIZE, 0, false),
        (!0xfff, 0x1000, 0, false),
    ] {
        let device = Odd(MappableArea {
            offset,
            size,
            memory: memory.clone(),
            base,
        });
        let result = VfioUserServer::bind(directory.path().join("odd.sock"), device);
        match result.map(drop) {
            Ok(()) => assert!(good, "{offset:#x}+{size:#x} at {base:#x}"),
            Err(Error::MappableArea { region, .. }) => {
                assert_eq!(region, RegionIndex::Bar2);
                assert!(!good, "{offset:#x}+{size:#x} at {base:#x}");
            }
            Err(other) => panic!("{other}"),
        }
    }
}

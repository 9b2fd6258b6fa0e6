//! Implementations of the attacks.

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nvme_mpt_memory::eventfd;
use nvme_mpt_tests::COMMAND_TIMEOUT;
use nvme_mpt_tests::command::{Sqe, dsm_range};
use nvme_mpt_tests::doorbell::Side;
use nvme_mpt_tests::interrupt::Interrupt;
use nvme_mpt_tests::memory::{DmaBuffer, PAGE_SIZE};
use nvme_mpt_tests::prp::{self, PreparedPointer};
use nvme_mpt_tests::queue::QueuePair;
use rustix::fs::FallocateFlags;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::attack_kind::AttackKind;
use super::client::{GuestClient, NSID, keep_busy};
use super::error::AttackError;
use super::server::AttackedServer;

/// Size of a small read in bytes.
const SMALL: u64 = 4096;
/// Size of a large read in bytes.
const LARGE: u64 = 128 << 10;
/// Number of queues of the attacker with many queues.
const QUEUES: u16 = 16;
/// Number of in-flight commands in each queue of the attacker with many queues.
const DEPTH: usize = 32;
/// Size in bytes of the memory of an attacker's guest.
const MEMORY: u64 = 8 << 20;
/// Size in bytes of the memory in which holes are punched.
const HOLES: usize = 64 << 20;
/// Number of epoll instances that watch an eventfd, and number of descriptors of the eventfd that each instance watches:
/// together 20,000 watches.
const WATCHES: [usize; 2] = [100, 200];
/// Size of a deallocated range in bytes.
const RANGE: u64 = 32 << 20;
/// Time for which a client with a full eventfd stays connected before it reconnects.
const CONNECTED_TIME: Duration = Duration::from_millis(50);
/// Number of invalid connections before each guest that writes invalid doorbell values.
const NONSENSE: u64 = 32;
/// Timeout for the server to close a connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// A connected attacker. It is idle until [`Self::attack`] is called.
pub(super) trait Attack: Send {
    /// Attacks until `stop`. Returns the number of operations.
    fn attack(&mut self, stop: &AtomicBool) -> Result<u64, AttackError>;
}

/// Connects an attacker to the server.
pub(super) fn prepare<'a>(
    kind: AttackKind,
    server: &'a AttackedServer,
) -> Result<Box<dyn Attack + 'a>, AttackError> {
    let socket = server.socket("attacker");
    Ok(match kind {
        AttackKind::Spin => Box::new(SpinAttack),
        AttackKind::Queues => Box::new(ReadAttack::connect(&socket, QUEUES, LARGE, DEPTH)?),
        AttackKind::EventfdWatched => Box::new(WatchedEventfdAttack::connect(&socket)?),
        AttackKind::EventfdFull => Box::new(FullEventfdAttack { socket }),
        AttackKind::Holes => Box::new(HolePunchAttack::connect(&socket)?),
        AttackKind::Log => Box::new(LogFloodAttack { socket }),
        AttackKind::Deallocate => Box::new(DeallocateAttack::connect(&socket)?),
        AttackKind::RefusedUpgrade => Box::new(RefusedUpgradeAttack::connect(server)?),
    })
}

fn interrupt() -> Result<Interrupt, AttackError> {
    Interrupt::new().map_err(AttackError::system_error("Making an eventfd"))
}

/// Connects again. Until the server has noticed the end of the previous connection, it refuses, so this tries again.
fn reconnect<C>(connect: impl Fn() -> Result<C, AttackError>) -> Result<C, AttackError> {
    let end = Instant::now() + COMMAND_TIMEOUT;
    loop {
        match connect() {
            Err(AttackError::Driver { .. }) if Instant::now() < end => {
                thread::sleep(Duration::from_millis(1));
            }
            outcome => return outcome,
        }
    }
}

/// Control attack: uses only processor time.
struct SpinAttack;

impl Attack for SpinAttack {
    fn attack(&mut self, stop: &AtomicBool) -> Result<u64, AttackError> {
        while !stop.load(Ordering::Relaxed) {
            std::hint::spin_loop();
        }
        Ok(0)
    }
}

/// Attacker that reads into one buffer on several queues.
struct ReadAttack {
    queues: Vec<QueuePair>,
    depth: usize,
    bytes: u64,
    prepared: PreparedPointer,
    _data: DmaBuffer,
    client: GuestClient,
}

impl ReadAttack {
    fn connect(socket: &Path, queues: u16, bytes: u64, depth: usize) -> Result<Self, AttackError> {
        let client = GuestClient::connect(socket, MEMORY, queues, interrupt()?)?;
        Self::with_client(client, queues, bytes, depth)
    }

    fn with_client(
        mut client: GuestClient,
        queues: u16,
        bytes: u64,
        depth: usize,
    ) -> Result<Self, AttackError> {
        let data = client.memory.alloc(bytes as usize)?;
        let queues = (1..=queues).map(|id| client.queue(id, true));
        Ok(Self {
            queues: queues.collect::<Result<_, _>>()?,
            depth,
            bytes,
            prepared: prp::buffer(&data, 0, bytes as usize)?,
            _data: data,
            client,
        })
    }
}

impl Attack for ReadAttack {
    fn attack(&mut self, stop: &AtomicBool) -> Result<u64, AttackError> {
        let Self {
            queues,
            depth,
            bytes,
            prepared,
            client,
            ..
        } = self;
        let read = |number| client.read(number, *bytes).with_data(prepared.pointer);
        Ok(keep_busy(queues, *depth, read, stop))
    }
}

/// Attacker whose eventfd has many watches. For each interrupt, the server's write calls a kernel function for each watch.
struct WatchedEventfdAttack {
    reads: ReadAttack,
    _watches: Vec<Epoll>,
    _descriptors: Vec<EventFd>,
}

impl WatchedEventfdAttack {
    fn connect(socket: &Path) -> Result<Self, AttackError> {
        let failed = AttackError::system_error("Watching an eventfd 20,000 times");
        let event = EventFd::new(EFD_NONBLOCK).map_err(&failed)?;
        let descriptors: Result<Vec<_>, _> = (0..WATCHES[1]).map(|_| event.try_clone()).collect();
        let descriptors = descriptors.map_err(&failed)?;
        let watch = |_| {
            let epoll = Epoll::new()?;
            for descriptor in &descriptors {
                let event = EpollEvent::new(EventSet::IN, 0);
                epoll.ctl(ControlOperation::Add, descriptor.as_raw_fd(), event)?;
            }
            Ok(epoll)
        };
        let watches: Result<Vec<_>, std::io::Error> = (0..WATCHES[0]).map(watch).collect();
        let watches = watches.map_err(&failed)?;
        let interrupt = Interrupt::from_event(event).map_err(&failed)?;
        let client = GuestClient::connect(socket, MEMORY, 1, interrupt)?;
        Ok(Self {
            reads: ReadAttack::with_client(client, 1, SMALL, 1)?,
            _watches: watches,
            _descriptors: descriptors,
        })
    }
}

impl Attack for WatchedEventfdAttack {
    fn attack(&mut self, stop: &AtomicBool) -> Result<u64, AttackError> {
        self.reads.attack(stop)
    }
}

/// Attacker that connects repeatedly with a full eventfd, on which the next write blocks.
struct FullEventfdAttack {
    socket: PathBuf,
}

impl Attack for FullEventfdAttack {
    fn attack(&mut self, stop: &AtomicBool) -> Result<u64, AttackError> {
        let mut count = 0;
        while !stop.load(Ordering::Relaxed) {
            count += self.connect_once(stop)?;
        }
        Ok(count)
    }
}

impl FullEventfdAttack {
    fn connect_once(&self, stop: &AtomicBool) -> Result<u64, AttackError> {
        let mut reads = reconnect(|| ReadAttack::connect(&self.socket, 1, SMALL, 8))?;
        let event = reads.client.vectors[1].event();
        let failed = AttackError::system_error("Filling an eventfd");
        // No thread reads the eventfd, so it stays full.
        event.write(u64::MAX - 1).map_err(&failed)?;
        // The server has set the eventfd to non-blocking. Any process that shares the eventfd can undo this.
        let descriptor = eventfd::share(event).map_err(&failed)?;
        rustix::io::ioctl_fionbio(descriptor, false).map_err(|error| failed(error.into()))?;
        let end = AtomicBool::new(false);
        let leave = Instant::now() + CONNECTED_TIME;
        thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) && Instant::now() < leave {
                    thread::sleep(Duration::from_millis(1));
                }
                end.store(true, Ordering::Relaxed);
            });
            reads.attack(&end)
        })
    }
}

/// Attacker that punches holes in the memory of its buffers.
struct HolePunchAttack {
    client: GuestClient,
    queues: Vec<QueuePair>,
    prepared: Vec<PreparedPointer>,
    data: DmaBuffer,
}

impl HolePunchAttack {
    fn connect(socket: &Path) -> Result<Self, AttackError> {
        let mut client = GuestClient::connect(socket, MEMORY + HOLES as u64, 1, interrupt()?)?;
        let data = client.memory.alloc(HOLES)?;
        let places = (0..HOLES).step_by(LARGE as usize);
        let prepared = places.map(|at| prp::buffer(&data, at, LARGE as usize));
        Ok(Self {
            queues: vec![client.queue(1, true)?],
            prepared: prepared.collect::<Result<_, _>>()?,
            data,
            client,
        })
    }

    /// Returns the offset of the buffers in the guest's memory file.
    fn offset(&self) -> u64 {
        let regions = self.client.memory.regions();
        let gpa = self.data.gpa();
        let region = regions.iter().find(|region| gpa - region.gpa < region.len);
        region.map_or(0, |region| region.fd_offset + gpa - region.gpa)
    }
}

impl Attack for HolePunchAttack {
    fn attack(&mut self, stop: &AtomicBool) -> Result<u64, AttackError> {
        let offset = self.offset();
        let Self {
            client,
            queues,
            prepared,
            ..
        } = self;
        let punch = || {
            let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let mut count = 0;
            while !stop.load(Ordering::Relaxed) {
                rustix::fs::fallocate(client.memory.fd(), how, offset, HOLES as u64)?;
                count += 1;
            }
            Ok(count)
        };
        let punched: Result<u64, std::io::Error> = thread::scope(|scope| {
            let puncher = scope.spawn(punch);
            let read = |number: u64| {
                let data = &prepared[number as usize % prepared.len()];
                client.read(number, LARGE).with_data(data.pointer)
            };
            keep_busy(queues, DEPTH, read, stop);
            puncher.join().unwrap_or(Ok(0))
        });
        punched.map_err(AttackError::system_error("Punching holes in memory"))
    }
}

/// Attacker that makes the server log: first by invalid connections, then by a guest that writes invalid doorbell values
/// and resets its controller.
struct LogFloodAttack {
    socket: PathBuf,
}

impl LogFloodAttack {
    /// Connects and sends an invalid message, which the server logs before it closes the connection.
    fn send_invalid_message(&self) -> std::io::Result<()> {
        let mut stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(CLOSE_TIMEOUT))?;
        // Errors are expected: the server may close the connection early, or may still have the previous client.
        if stream.write_all(&[0xFF; 64]).is_ok() {
            let _ = stream.read_to_end(&mut Vec::new());
        }
        Ok(())
    }

    /// Connects a guest that writes invalid values to doorbells: to those of an existing queue, and of one that does not
    /// exist.
    fn write_invalid_doorbells(&self) -> Result<(), AttackError> {
        let mut client = reconnect(|| GuestClient::connect(&self.socket, MEMORY, 1, interrupt()?))?;
        let _queue = client.queue(1, true)?;
        for value in 0x8000..0x8010 {
            for queue in 0..3 {
                for side in [Side::SqTail, Side::CqHead] {
                    client.controller.write_doorbell(queue, side, value);
                }
            }
        }
        let reset = client.controller.disable();
        reset.map_err(AttackError::driver_error(&client.name))
    }
}

impl Attack for LogFloodAttack {
    fn attack(&mut self, stop: &AtomicBool) -> Result<u64, AttackError> {
        let failed = AttackError::system_error("Connecting");
        let mut count = 0;
        while !stop.load(Ordering::Relaxed) {
            for _ in 0..NONSENSE {
                self.send_invalid_message().map_err(&failed)?;
            }
            self.write_invalid_doorbells()?;
            count += NONSENSE + 1;
        }
        Ok(count)
    }
}

/// Attacker that deallocates blocks which are deallocated already.
struct DeallocateAttack {
    queues: Vec<QueuePair>,
    /// Ranges, each in a separate page.
    ranges: Vec<(DmaBuffer, PreparedPointer)>,
    _client: GuestClient,
}

impl DeallocateAttack {
    fn connect(socket: &Path) -> Result<Self, AttackError> {
        let mut client = GuestClient::connect(socket, MEMORY, 1, interrupt()?)?;
        let blocks = RANGE / client.block_size;
        let range = |number: u64| {
            let data = client.memory.alloc(PAGE_SIZE)?;
            data.write(0, &dsm_range(number * blocks, blocks as u32));
            let prepared = prp::buffer(&data, 0, size_of::<[u64; 2]>())?;
            Ok((data, prepared))
        };
        let count = (client.blocks / blocks).min(DEPTH as u64 * 8);
        let ranges: Result<_, AttackError> = (0..count).map(range).collect();
        Ok(Self {
            ranges: ranges?,
            queues: vec![client.queue(1, true)?],
            _client: client,
        })
    }
}

impl Attack for DeallocateAttack {
    fn attack(&mut self, stop: &AtomicBool) -> Result<u64, AttackError> {
        let Self { queues, ranges, .. } = self;
        let deallocate = |number: u64| {
            let (_, range) = &ranges[number as usize % ranges.len()];
            Sqe::deallocate(NSID, 1).with_data(range.pointer)
        };
        Ok(keep_busy(queues, DEPTH, deallocate, stop))
    }
}

/// Attacker that requests upgrades while the path of its drive does not exist.
struct RefusedUpgradeAttack<'a> {
    server: &'a AttackedServer,
    _client: GuestClient,
}

impl<'a> RefusedUpgradeAttack<'a> {
    fn connect(server: &'a AttackedServer) -> Result<Self, AttackError> {
        let client = GuestClient::connect(&server.socket("attacker"), MEMORY, 1, interrupt()?)?;
        server.move_drive()?;
        Ok(Self {
            server,
            _client: client,
        })
    }
}

impl Attack for RefusedUpgradeAttack<'_> {
    fn attack(&mut self, stop: &AtomicBool) -> Result<u64, AttackError> {
        let mut count = 0;
        while count == 0 || !stop.load(Ordering::Relaxed) {
            let output = self.server.upgrade()?;
            let stderr = String::from_utf8_lossy(&output.stderr);
            if output.status.success() || !stderr.contains("is open") {
                return Err(AttackError::unexpected_upgrade(&output));
            }
            count += 1;
        }
        Ok(count)
    }
}

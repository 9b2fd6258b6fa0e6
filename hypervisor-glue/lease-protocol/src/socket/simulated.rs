//! Stream sockets of the simulator.
//!
//! They carry bytes in order with their descriptors, like the kernel's (unix(7)). A send may accept only a random part of
//! its bytes, and a receive may return only a random part of the data. When a process dies, the other side still receives
//! the bytes that the process has sent, which may end in the middle of a message. `close_all` then closes the sockets of
//! the dead process.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nvme_mpt_memory::simulation::{
    ActorStep, acted, fence_and_act, process, random, turn, wait_for,
};
use nvme_mpt_memory::system::process_user;

use super::{PeerIdentity, ReceivedBytes};
use crate::message::SIGNS;

/// Capacity of each direction of a connection: the maximum number of bytes that were sent and not received. Many messages are
/// longer, so that their senders block in the middle.
const ROOM: usize = 300;

/// Bytes of the end notice, the last message of a server. A function that disconnects before its first request never reads this
/// message, so it does not count as unread.
const LAST_WORDS: &[u8] = b"\x07\0\0\0\0\0\0\0\"ended\"";

/// Bytes of one send.
#[derive(Debug)]
struct SentSegment {
    bytes: VecDeque<u8>,
    /// Descriptors that are received together with the first byte.
    descriptors: Vec<OwnedFd>,
}

/// State of one end of a connection.
#[derive(Debug, Default)]
struct ConnectionSide {
    other: u64,
    process: u64,
    /// Number of [`Stream`]s of this side.
    handles: u64,
    arrived: VecDeque<SentSegment>,
    /// Set if this side receives nothing more.
    is_deaf: bool,
    /// Set if this side can send nothing more.
    is_mute: bool,
    read_timeout: Option<Duration>,
    write_timeout: Option<Duration>,
}

impl ConnectionSide {
    fn unread(&self) -> usize {
        self.arrived.iter().map(|segment| segment.bytes.len()).sum()
    }

    fn unread_bytes(&self) -> Vec<u8> {
        let segments = self.arrived.iter();
        segments
            .flat_map(|segment| &segment.bytes)
            .copied()
            .collect()
    }
}

/// Name under which a server listens or has listened.
#[derive(Debug)]
struct SocketName {
    process: u64,
    /// Sides of connections that were not accepted yet; `None` if there is no listener.
    waiting: Option<VecDeque<u64>>,
}

#[derive(Debug, Default)]
struct SimulatedSockets {
    sides: BTreeMap<u64, ConnectionSide>,
    names: BTreeMap<PathBuf, SocketName>,
    /// Number of connection sides that were created.
    made: u64,
    sends: u64,
    /// Number of client sockets that were closed, other than by a crash, while they had unread bytes. Bytes of the server's end
    /// notice do not count (`LAST_WORDS`). See `unread`.
    unread: u64,
    /// Processes that have ended.
    ended: BTreeSet<u64>,
}

thread_local! {
    static SOCKETS: RefCell<SimulatedSockets> = RefCell::default();
}

fn with<T>(call: impl FnOnce(&mut SimulatedSockets) -> T) -> T {
    SOCKETS.with_borrow_mut(call)
}

impl SimulatedSockets {
    fn send(
        &mut self,
        side: u64,
        bytes: &[u8],
        descriptors: &mut Vec<OwnedFd>,
    ) -> Option<io::Result<usize>> {
        let own = self.sides.get(&side)?;
        let (other, is_mute) = (own.other, own.is_mute);
        let Some(other) = self.sides.get_mut(&other).filter(|_| !is_mute) else {
            return Some(Err(io::ErrorKind::BrokenPipe.into()));
        };
        let most = bytes.len().min(ROOM.saturating_sub(other.unread()));
        if most == 0 {
            return None;
        }
        let sent = part(most);
        other.arrived.push_back(SentSegment {
            bytes: bytes[..sent].iter().copied().collect(),
            descriptors: std::mem::take(descriptors),
        });
        self.sends += 1;
        Some(Ok(sent))
    }

    fn receive(
        &mut self,
        side: u64,
        buffer: &mut [u8],
        descriptors: &mut Vec<OwnedFd>,
    ) -> Option<usize> {
        let own = self.sides.get_mut(&side)?;
        let Some(segment) = own.arrived.front_mut() else {
            return own.is_deaf.then_some(0);
        };
        let taken = part(segment.bytes.len().min(buffer.len()));
        for (place, byte) in buffer.iter_mut().zip(segment.bytes.drain(..taken)) {
            *place = byte;
        }
        descriptors.append(&mut segment.descriptors);
        if segment.bytes.is_empty() {
            own.arrived.pop_front();
        }
        Some(taken)
    }

    fn shut_down(&mut self, side: u64, how: Shutdown) {
        let Some(own) = self.sides.get_mut(&side) else {
            return;
        };
        let (reads, writes) = (how != Shutdown::Write, how != Shutdown::Read);
        own.is_deaf |= reads;
        own.is_mute |= writes;
        let other = own.other;
        if let Some(other) = self.sides.get_mut(&other) {
            other.is_mute |= reads;
            other.is_deaf |= writes;
        }
    }

    fn close(&mut self, side: u64) {
        self.shut_down(side, Shutdown::Both);
        self.sides.remove(&side);
    }

    /// Creates a connection between two processes. Returns its sides.
    fn connect(&mut self, processes: [u64; 2]) -> [u64; 2] {
        let first = self.made;
        self.made += 2;
        for (index, process) in (0..).zip(processes) {
            let side = ConnectionSide {
                other: first + 1 - index,
                process,
                handles: u64::from(index == 0),
                ..ConnectionSide::default()
            };
            self.sides.insert(first + index, side);
        }
        [first, first + 1]
    }
}

/// Returns whether a side belongs to the process that connected.
const fn is_of_client(side: u64) -> bool {
    side.is_multiple_of(2)
}

/// Returns a random number of bytes from 1 to `most`; often `most` itself.
fn part(most: usize) -> usize {
    match random() % 4 {
        0 => 1 + random() as usize % most,
        _ => most,
    }
}

/// Handle of one end of a connection, by its number.
#[derive(Debug)]
pub struct Stream(u64);

impl Stream {
    pub(crate) fn set_read_timeout(&self, time: Option<Duration>) -> io::Result<()> {
        self.change(|side| side.read_timeout = time);
        Ok(())
    }

    pub(crate) fn set_write_timeout(&self, time: Option<Duration>) -> io::Result<()> {
        self.change(|side| side.write_timeout = time);
        Ok(())
    }

    /// Accepts only `false`: simulated sockets are always blocking.
    pub(crate) fn set_nonblocking(&self, is: bool) -> io::Result<()> {
        assert!(!is, "sockets of a simulator block");
        Ok(())
    }

    /// Shuts down one direction of the connection, or both.
    ///
    /// # Errors
    /// None.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        turn(ActorStep::Send, [self.0, 0]);
        fence_and_act();
        with(|sockets| sockets.shut_down(self.0, how));
        Ok(())
    }

    /// Returns another handle of this side.
    ///
    /// # Errors
    /// None.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.change(|side| side.handles += 1);
        Ok(Self(self.0))
    }

    fn change<T>(&self, change: impl FnOnce(&mut ConnectionSide) -> T) -> Option<T> {
        with(|sockets| sockets.sides.get_mut(&self.0).map(change))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // At the end of a thread, `SOCKETS` may be destroyed already. Then nothing is left to be closed.
        let Ok(true) = SOCKETS.try_with(|sockets| {
            let mut sockets = sockets.borrow_mut();
            let side = sockets.sides.get_mut(&self.0);
            side.is_some_and(|side| {
                side.handles -= 1;
                side.handles == 0
            })
        }) else {
            return;
        };
        turn(ActorStep::Send, [self.0, 0]);
        fence_and_act();
        with(|sockets| {
            let was_asked = |side: &ConnectionSide| LAST_WORDS.starts_with(&side.unread_bytes());
            let was_asked = sockets.sides.get(&self.0).is_none_or(was_asked);
            sockets.unread += u64::from(is_of_client(self.0) && !was_asked);
            sockets.close(self.0);
        });
    }
}

impl Read for &Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        receive(self, buffer, &mut Vec::new()).map(|received| received.bytes)
    }
}

impl Write for &Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match bytes.is_empty() {
            true => Ok(0),
            false => send(self, bytes, &[]),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Sends bytes with descriptors. Returns the number of bytes sent.
pub(crate) fn send(
    stream: &Stream,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    let descriptors = descriptors.iter().map(BorrowedFd::try_clone_to_owned);
    let mut descriptors = descriptors.collect::<io::Result<Vec<OwnedFd>>>()?;
    turn(ActorStep::Send, [stream.0, bytes.len() as u64]);
    let time = stream.change(|side| side.write_timeout).flatten();
    fence_and_act();
    let sent = wait_for(time, || {
        with(|sockets| sockets.send(stream.0, bytes, &mut descriptors))
    });
    acted();
    sent.unwrap_or_else(|| Err(io::ErrorKind::WouldBlock.into()))
}

/// Receives some bytes and the accompanying descriptors.
pub(crate) fn receive(
    stream: &Stream,
    buffer: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
) -> io::Result<ReceivedBytes> {
    turn(ActorStep::Receive, [stream.0, buffer.len() as u64]);
    let time = stream.change(|side| side.read_timeout).flatten();
    let bytes = wait_for(time, || {
        with(|sockets| sockets.receive(stream.0, buffer, descriptors))
    });
    // Space is free again, so senders that waited for it continue.
    fence_and_act();
    let bytes = bytes.ok_or(io::ErrorKind::WouldBlock)?;
    Ok(ReceivedBytes {
        bytes,
        has_lost_descriptors: false,
    })
}

/// Connects to a server.
pub(crate) fn connect(socket: &Path) -> io::Result<Stream> {
    turn(ActorStep::Send, [0; 2]);
    fence_and_act();
    let process = process();
    with(|sockets| {
        let Some(name) = sockets.names.get(socket) else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let server = name.process;
        if name.waiting.is_none() {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let [ours, theirs] = sockets.connect([process, server]);
        let name = sockets.names.get_mut(socket);
        if let Some(waiting) = name.and_then(|name| name.waiting.as_mut()) {
            waiting.push_back(theirs);
        }
        Ok(Stream(ours))
    })
}

/// Returns the socket names in a directory, including names of servers that have ended.
pub(crate) fn list_dir(dir: &Path) -> io::Result<Vec<PathBuf>> {
    turn(ActorStep::Receive, [0; 2]);
    with(|sockets| {
        let names = sockets.names.keys();
        let inside = names.filter(|name| name.parent() == Some(dir));
        Ok(inside.cloned().collect())
    })
}

/// Returns the process at the other end.
pub(crate) fn peer(stream: &Stream) -> io::Result<PeerIdentity> {
    let other = with(|sockets| {
        let other = sockets.sides.get(&stream.0)?.other;
        Some(sockets.sides.get(&other)?.process)
    });
    let uid = process_user();
    Ok(PeerIdentity {
        pid: other.unwrap_or_default() as i32,
        uid,
        gid: uid,
    })
}

/// Waits until the other side closes the connection.
pub(crate) fn wait_for_end(stream: &Stream) -> io::Result<()> {
    turn(ActorStep::Receive, [stream.0, 0]);
    let ended = || stream.change(|side| side.is_deaf).unwrap_or(true);
    let _ended = wait_for(None, || ended().then_some(()));
    Ok(())
}

/// Signals the complete end of a server's process.
#[derive(Debug)]
pub(crate) struct ServerExitSigns {
    /// Number of the process; `None` if the process had already ended.
    process: Option<u64>,
}

impl ServerExitSigns {
    /// Ignores the descriptors: they belong to the simulator's process, which continues.
    pub(crate) fn new(stream: &Stream, _: [OwnedFd; SIGNS]) -> Self {
        let process = with(|sockets| {
            let other = sockets.sides.get(&stream.0)?.other;
            Some(sockets.sides.get(&other)?.process)
        });
        Self { process }
    }

    /// Returns whether the server's process has ended completely.
    pub(crate) fn have_occurred(&self) -> io::Result<bool> {
        turn(ActorStep::Receive, [0; 2]);
        Ok(self.has_ended())
    }

    /// Waits until the server's process has ended completely.
    pub(crate) fn await_all(&self) -> io::Result<()> {
        turn(ActorStep::Receive, [0; 2]);
        let _ended = wait_for(None, || self.has_ended().then_some(()));
        Ok(())
    }

    fn has_ended(&self) -> bool {
        let is_known = |process| with(|sockets| sockets.ended.contains(&process));
        self.process.is_none_or(is_known)
    }
}

/// Listening socket of a server, under a name.
#[derive(Debug)]
pub struct SimulatedListener(PathBuf);

impl SimulatedListener {
    /// Listens under a name, replacing an earlier listener.
    #[must_use]
    pub fn bind(name: &Path) -> Self {
        turn(ActorStep::Send, [0; 2]);
        fence_and_act();
        let listening = SocketName {
            process: process(),
            waiting: Some(VecDeque::new()),
        };
        with(|sockets| sockets.names.insert(name.to_owned(), listening));
        Self(name.to_owned())
    }

    /// Waits for a connection; `None` once the listener is closed.
    #[must_use]
    pub fn accept(&self) -> Option<Stream> {
        turn(ActorStep::Receive, [0; 2]);
        let accepted = wait_for(None, || {
            with(|sockets| {
                let name = sockets.names.get_mut(&self.0);
                let Some(waiting) = name.and_then(|name| name.waiting.as_mut()) else {
                    return Some(None);
                };
                let side = waiting.pop_front()?;
                if let Some(side) = sockets.sides.get_mut(&side) {
                    side.handles = 1;
                }
                Some(Some(Stream(side)))
            })
        });
        accepted.flatten()
    }

    /// Closes the listener and the connections that were not accepted.
    pub fn close(&self) {
        turn(ActorStep::Send, [0; 2]);
        fence_and_act();
        with(|sockets| {
            let waiting = sockets.names.remove(&self.0).and_then(|name| name.waiting);
            for side in waiting.into_iter().flatten() {
                sockets.close(side);
            }
        });
    }
}

/// Closes the sockets of a killed process.
pub fn close_all(process: u64) {
    with(|sockets| {
        for name in sockets.names.values_mut() {
            if name.process == process {
                name.waiting = None;
            }
        }
        let sides = sockets.sides.iter();
        let its = sides.filter(|(_, side)| side.process == process);
        for side in its.map(|(number, _)| *number).collect::<Vec<_>>() {
            sockets.close(side);
        }
    });
}

/// Records that a killed process has ended completely.
pub fn end_process(process: u64) {
    with(|sockets| sockets.ended.insert(process));
}

/// Returns the numbers of open connections and of listening servers.
#[must_use]
pub fn open() -> (usize, usize) {
    with(|sockets| {
        let listening = sockets.names.values().filter(|name| name.waiting.is_some());
        (sockets.sides.len().div_ceil(2), listening.count())
    })
}

/// Returns the number of connections that clients closed without a crash, although they had unread bytes: messages that the
/// client did not request, or answers for which it did not wait.
#[must_use]
pub fn unread() -> u64 {
    with(|sockets| sockets.unread)
}

/// Returns the number of sends so far.
#[must_use]
pub fn sends() -> u64 {
    with(|sockets| sockets.sends)
}

/// Drops all sockets of an earlier simulation.
pub fn clear() {
    with(|sockets| {
        sockets.sides.clear();
        sockets.names.clear();
        sockets.ended.clear();
        sockets.unread = 0;
    });
}

//! Connection with one client.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use log::{error, info, warn};
use nvme_mpt_memory::describe_error;

use crate::connection::{MessageReader, ReplyWriter, StreamEnd};
use crate::device::VfioUserDevice;
use crate::dispatch::{DeviceRegions, RequestDispatcher};
use crate::error::Error;
use crate::message::VfioUserHeader;
use crate::socket;

/// Maximum number of messages that one event answers, so that the thread's other event sources get a turn. The socket stays
/// readable while messages remain.
pub(crate) const MESSAGES_PER_TURN: usize = 32;

/// Event that a [`VfioUserSession`] waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionReadiness {
    /// The socket becomes readable.
    Reading,
    /// The socket becomes writable. Its buffer is full, because the client has not read its replies.
    Writing,
    /// No event: the connection has ended.
    Ended,
}

/// Progress of a request that was carried out and is not finished: a part of the reply is unsent, or a part of the request is
/// still in the socket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UnfinishedRequest {
    /// Number of bytes of the reply that were sent.
    pub(crate) sent_bytes: u32,
    /// Number of bytes of the request that are left in the socket.
    pub(crate) unread_bytes: u32,
}

/// Connection with one client, from the first message to the end.
#[derive(Debug)]
pub struct VfioUserSession {
    pub(crate) stream: UnixStream,
    pub(crate) reader: MessageReader,
    pub(crate) writer: ReplyWriter,
    pub(crate) dispatcher: RequestDispatcher,
    /// Progress of the last request until the request is finished. Only used with a request log.
    pub(crate) unfinished: Option<UnfinishedRequest>,
}

impl VfioUserSession {
    /// Creates a session on a connected socket, with a client that has not sent anything yet.
    ///
    /// # Errors
    ///
    /// A mappable area of the device is invalid.
    pub fn new<D: VfioUserDevice>(stream: UnixStream, device: &D) -> Result<Self, Error> {
        Ok(Self::with_regions(
            stream,
            Arc::new(DeviceRegions::from_device(device)?),
        ))
    }

    pub(crate) fn with_regions(stream: UnixStream, regions: Arc<DeviceRegions>) -> Self {
        Self {
            stream,
            reader: MessageReader::default(),
            writer: ReplyWriter::default(),
            dispatcher: RequestDispatcher::new(regions),
            unfinished: None,
        }
    }

    /// Answers the client's requests until the socket blocks. Call this again when the returned event has happened.
    ///
    /// The socket must be non-blocking for sending. At the end of the connection, the caller must call
    /// [`VfioUserDevice::on_disconnected`]; the session does not.
    pub fn run<D: VfioUserDevice>(&mut self, device: &mut D) -> SessionReadiness {
        for _ in 0..MESSAGES_PER_TURN {
            match self.answer_message(device) {
                Ok(None) => {}
                Ok(Some(progress)) => return progress,
                Err(ended) => {
                    self.end_connection(ended);
                    return SessionReadiness::Ended;
                }
            }
        }
        SessionReadiness::Reading
    }

    /// Returns whether the client has closed the connection. Requests that it sent earlier may still be unanswered.
    pub(crate) fn has_hung_up(&self) -> bool {
        socket::has_hung_up(&self.stream).unwrap_or(false)
    }

    /// Answers one message. Returns the event to wait for if the session cannot continue now.
    fn answer_message<D: VfioUserDevice>(
        &mut self,
        device: &mut D,
    ) -> Result<Option<SessionReadiness>, StreamEnd> {
        // Sends the unsent bytes of the previous reply before it reads a message, so memory holds at most one reply.
        if !self.writer.flush(&self.stream).map_err(StreamEnd::Failed)? {
            return Ok(Some(SessionReadiness::Writing));
        }
        let Some(message) = self.reader.next(&self.stream)? else {
            return Ok(Some(SessionReadiness::Reading));
        };

        let header = message.header;
        let answer = self
            .dispatcher
            .handle_message(device, message, self.writer.begin_reply());
        match answer {
            Ok(region) => {
                let memory = region.and_then(|index| self.dispatcher.region_memory(index));
                self.writer.complete_reply(&header, memory);
            }
            Err(refusal) => {
                if refusal.ends_connection() {
                    return Err(StreamEnd::InvalidMessage { header, refusal });
                }
                self.dispatcher.error_log.log_refusal(&refusal);
                self.writer.replace_by_error(&header, refusal.errno());
            }
        }
        if header.is_no_reply() {
            self.writer.discard();
        }
        match self.writer.flush(&self.stream).map_err(StreamEnd::Failed)? {
            true => Ok(None),
            false => Ok(Some(SessionReadiness::Writing)),
        }
    }

    pub(crate) fn end_connection(&mut self, ended: StreamEnd) {
        match ended {
            StreamEnd::Closed { cut_short: false } => {
                info!("vfio-user: the client has disconnected")
            }
            StreamEnd::Closed { cut_short: true } => {
                warn!("vfio-user: the client has disconnected in the middle of a message");
            }
            // Sending fails with this error after a client was killed.
            StreamEnd::Failed(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                info!("vfio-user: the client has disconnected without waiting for a reply");
            }
            StreamEnd::Failed(error) => warn!("vfio-user: the connection failed: {error}"),
            StreamEnd::InvalidMessage { header, refusal } => {
                self.dispatcher.error_log.log_refusal(&refusal);
                warn!("vfio-user: the connection is closed");
                self.send_error(&header, refusal.errno());
            }
            StreamEnd::Refused => warn!("vfio-user: the connection is closed"),
            StreamEnd::RequestLog(error) => {
                error!(
                    "vfio-user: the connection is closed: {}",
                    describe_error(&error)
                )
            }
        }
    }

    /// Sends an error reply before the connection is closed. If the socket's buffer is full, the unsent bytes of the reply are
    /// dropped.
    fn send_error(&mut self, header: &VfioUserHeader, errno: u32) {
        if header.message_type() == VfioUserHeader::TYPE_COMMAND && !header.is_no_reply() {
            self.writer.replace_by_error(header, errno);
            // An error needs no handling, since the connection ends after this reply.
            let _ = self.writer.flush(&self.stream);
        }
    }
}

impl AsRawFd for VfioUserSession {
    fn as_raw_fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;

    use vmm_sys_util::sock_ctrl_msg::ScmSocket;

    use super::*;
    use crate::message::{MAX_CONTROL_PAYLOAD, MAX_DATA_XFER_SIZE, VfioUserCommand};
    use crate::testing::{DescriptorTracer, RecordingDevice, SessionFixture, message};

    const VERSION: &[u8] = b"\0\0\x01\0{\"capabilities\":{}}\0";

    /// A payload of 20 bytes, which connects one MSI-X vector.
    const SET_IRQS: [u32; 5] = [20, 0x24, 2, 0, 1];

    fn irqs() -> Vec<u8> {
        SET_IRQS
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect()
    }

    fn write_all(session: &SessionFixture, bytes: &[u8]) {
        (&session.client).write_all(bytes).unwrap();
    }

    #[test]
    fn messages_may_come_in_pieces_cut_anywhere() {
        let stream = [
            message(1, VfioUserCommand::VERSION, 0, VERSION),
            message(
                2,
                VfioUserCommand::REGION_WRITE,
                0,
                &[&[0; 12][..], &[4, 0, 0, 0, 9, 9, 9, 9]].concat(),
            ),
            message(3, VfioUserCommand::DEVICE_RESET, 0, &[]),
        ]
        .concat();
        for cut in 0..=stream.len() {
            let mut session = SessionFixture::begin(RecordingDevice::new());
            for piece in [&stream[..cut], &stream[cut..]] {
                write_all(&session, piece);
                assert_eq!(session.run(), SessionReadiness::Reading, "cut at {cut}");
            }
            for id in 1..=3 {
                let reply = session.receive_reply().unwrap();
                assert_eq!((reply.header.message_id.get(), reply.errno()), (id, 0));
            }
            assert!(session.receive_reply().is_none());
            assert_eq!((session.device.resets, session.device.bar0[0]), (1, 9));
        }
    }

    #[test]
    fn fds_belong_to_the_message_whose_bytes_they_come_with() {
        let stream = [
            message(1, VfioUserCommand::VERSION, 0, VERSION),
            message(2, VfioUserCommand::DEVICE_RESET, 0, &[]),
            message(3, VfioUserCommand::DEVICE_SET_IRQS, 0, &irqs()),
            message(4, VfioUserCommand::DEVICE_RESET, 0, &[]),
        ];
        let before = stream[..2].concat().len();
        let stream = stream.concat();
        // Each case sends the descriptor with another byte of the message: of the header, of the payload, or with the last
        // byte.
        for with in before..before + 36 {
            let mut session = SessionFixture::begin(RecordingDevice::new());
            let (tracer, fd) = DescriptorTracer::new();
            write_all(&session, &stream[..with]);
            let one = [&stream[with..][..1]];
            session
                .client
                .send_with_fds(&one, &[fd.as_raw_fd()])
                .unwrap();
            drop(fd);
            write_all(&session, &stream[with + 1..]);
            assert_eq!(session.run(), SessionReadiness::Reading);
            for _ in 0..4 {
                assert_eq!(
                    session.receive_reply().unwrap().errno(),
                    0,
                    "with byte {with}"
                );
            }
            assert_eq!(session.device.irqs.len(), 1);
            assert!(!tracer.is_closed());
            session.device.irqs.clear();
            assert!(tracer.is_closed());
        }
    }

    #[test]
    fn a_client_may_disconnect_at_any_byte() {
        let stream = [
            message(1, VfioUserCommand::VERSION, 0, VERSION),
            message(2, VfioUserCommand::DEVICE_SET_IRQS, 0, &irqs()),
        ]
        .concat();
        let first = message(1, VfioUserCommand::VERSION, 0, VERSION).len();
        for cut in 0..=stream.len() {
            let mut session = SessionFixture::begin(RecordingDevice::new());
            let (tracer, fd) = DescriptorTracer::new();
            write_all(&session, &stream[..cut.min(first)]);
            if cut > first {
                let rest = [&stream[first..cut]];
                session
                    .client
                    .send_with_fds(&rest, &[fd.as_raw_fd()])
                    .unwrap();
            }
            drop(fd);
            session.client.shutdown(std::net::Shutdown::Write).unwrap();
            assert!(session.session.has_hung_up());
            assert_eq!(session.run(), SessionReadiness::Ended, "cut at {cut}");
            assert_eq!(session.device.irqs.len(), usize::from(cut == stream.len()));
            drop(session);
            assert!(tracer.is_closed());
        }
    }

    #[test]
    fn invalid_message_sizes_end_the_connection_with_an_error() {
        let region_write = 32 + MAX_DATA_XFER_SIZE;
        let control = (VfioUserHeader::SIZE + MAX_CONTROL_PAYLOAD) as u32;
        for (command, size) in [
            (VfioUserCommand::DEVICE_RESET, 0),
            (VfioUserCommand::DEVICE_RESET, 15),
            (VfioUserCommand::DEVICE_RESET, control + 1),
            (VfioUserCommand::VERSION, control + 1),
            (VfioUserCommand::DMA_MAP, u32::MAX),
            (VfioUserCommand(999), u32::MAX),
            (VfioUserCommand::REGION_WRITE, region_write + 1),
        ] {
            let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
            let mut message = message(7, command, 0, &[]);
            message[4..8].copy_from_slice(&size.to_le_bytes());
            write_all(&session, &message);
            assert_eq!(
                session.run(),
                SessionReadiness::Ended,
                "{command} of {size}"
            );
            let reply = session.receive_reply().unwrap();
            assert_eq!(reply.errno(), libc::EINVAL as u32);
            assert_eq!(reply.header.message_id.get(), 7);
            assert!(session.closes_for_client());
        }
    }

    #[test]
    fn largest_messages_are_taken() {
        let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
        let payload = vec![0; MAX_CONTROL_PAYLOAD];
        assert_ne!(session.request(VfioUserCommand(999), &payload).errno(), 0);

        let access = [&[0; 12][..], &MAX_DATA_XFER_SIZE.to_le_bytes()].concat();
        let payload = [&access[..], &vec![3; MAX_DATA_XFER_SIZE as usize]].concat();
        let message = message(8, VfioUserCommand::REGION_WRITE, 0, &payload);
        for piece in message.chunks(100_000) {
            write_all(&session, piece);
            assert_eq!(session.run(), SessionReadiness::Reading);
        }
        // The accesses lie beyond the end of the region, so they write nothing.
        let reply = session.receive_reply().unwrap();
        assert_eq!((reply.errno(), reply.payload), (0, access));
        assert_eq!(
            session.request(VfioUserCommand::DEVICE_RESET, &[]).errno(),
            0
        );
    }

    #[test]
    fn replies_are_no_commands() {
        let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
        for kind in [1, 2, 15] {
            write_all(
                &session,
                &message(kind as u16, VfioUserCommand::DEVICE_RESET, kind, &[1, 2]),
            );
            assert_eq!(session.run(), SessionReadiness::Reading);
            assert_eq!(
                session.receive_reply().unwrap().errno(),
                libc::EINVAL as u32
            );
        }
        assert_eq!(session.device.resets, 0);
        assert_eq!(
            session.request(VfioUserCommand::DEVICE_RESET, &[]).errno(),
            0
        );
    }

    #[test]
    fn no_reply_is_sent_where_none_is_wanted() {
        let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
        let stream = [
            message(
                1,
                VfioUserCommand::DEVICE_RESET,
                VfioUserHeader::NO_REPLY,
                &[],
            ),
            message(
                2,
                VfioUserCommand::REGION_READ,
                VfioUserHeader::NO_REPLY,
                &[0; 3],
            ),
            message(3, VfioUserCommand(999), VfioUserHeader::NO_REPLY, &[]),
            message(4, VfioUserCommand::DEVICE_RESET, 0, &[]),
        ];
        write_all(&session, &stream.concat());
        assert_eq!(session.run(), SessionReadiness::Reading);
        assert_eq!(session.receive_reply().unwrap().header.message_id.get(), 4);
        assert!(session.receive_reply().is_none());
        assert_eq!(session.device.resets, 2);

        let mut bad_size = message(
            5,
            VfioUserCommand::DEVICE_RESET,
            VfioUserHeader::NO_REPLY,
            &[],
        );
        bad_size[4] = 1;
        write_all(&session, &bad_size);
        assert_eq!(session.run(), SessionReadiness::Ended);
        assert!(session.receive_reply().is_none());
    }

    #[test]
    fn more_fds_than_a_message_can_have_end_the_connection() {
        let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
        let (tracer, fd) = DescriptorTracer::new();
        let message = message(1, VfioUserCommand::DEVICE_SET_IRQS, 0, &irqs());
        let fds = [fd.as_raw_fd(); 100];
        for byte in message[..3].chunks(1) {
            session.client.send_with_fds(&[byte], &fds).unwrap();
        }
        drop(fd);
        assert_eq!(session.run(), SessionReadiness::Ended);
        drop(session);
        assert!(tracer.is_closed());
    }

    /// The client sends and does not read, so its requests stay in its socket.
    #[test]
    fn unread_replies_stop_the_client_and_nothing_else() {
        let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
        let read = [&[0; 12][..], &MAX_DATA_XFER_SIZE.to_le_bytes()].concat();
        let requested = 20_u16;
        for id in 0..requested {
            write_all(
                &session,
                &message(id, VfioUserCommand::REGION_READ, 0, &read),
            );
        }
        for _ in 0..100 {
            assert_eq!(session.run(), SessionReadiness::Writing);
        }
        assert!(session.device.accesses.is_empty(), "beyond the end of BAR0");

        // The client begins to read, and gets every reply.
        let whole = 32 + MAX_DATA_XFER_SIZE as usize;
        let mut stream = Vec::new();
        let mut buffer = vec![0; 1 << 20];
        while stream.len() < whole * usize::from(requested) {
            let read = (&session.client).read(&mut buffer).unwrap();
            stream.extend_from_slice(&buffer[..read]);
            session.run();
        }
        for (id, reply) in (0..requested).zip(stream.chunks(whole)) {
            assert_eq!(reply[..2], id.to_le_bytes());
            assert!(reply[32..].iter().all(|&byte| byte == 0xff));
        }
        assert_eq!(session.run(), SessionReadiness::Reading);
        assert_eq!(
            session.request(VfioUserCommand::DEVICE_RESET, &[]).errno(),
            0
        );
    }

    #[test]
    fn a_client_that_disconnects_without_reading_ends_the_session() {
        let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
        let read = [&[0; 12][..], &MAX_DATA_XFER_SIZE.to_le_bytes()].concat();
        write_all(
            &session,
            &message(1, VfioUserCommand::REGION_READ, 0, &read),
        );
        assert_eq!(session.run(), SessionReadiness::Writing);
        let SessionFixture {
            client,
            mut session,
            mut device,
            ..
        } = session;
        drop(client);
        assert_eq!(session.run(&mut device), SessionReadiness::Ended);
    }

    #[test]
    fn a_busy_client_does_not_occupy_the_thread() {
        let mut session = SessionFixture::begin_negotiated(RecordingDevice::new());
        let posted = message(
            1,
            VfioUserCommand::DEVICE_RESET,
            VfioUserHeader::NO_REPLY,
            &[],
        );
        let messages = 3 * MESSAGES_PER_TURN;
        write_all(&session, &posted.repeat(messages));
        assert_eq!(session.run(), SessionReadiness::Reading);
        assert_eq!(session.device.resets as usize, MESSAGES_PER_TURN);
        session.run();
        session.run();
        assert_eq!(session.device.resets as usize, messages);
    }
}

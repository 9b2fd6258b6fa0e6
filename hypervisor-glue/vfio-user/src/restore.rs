//! Sessions that a successor process continues after the server's process has ended. The client does not notice.
//!
//! A request is carried out and answered in steps. After SIGKILL between any two instructions, the successor finds the next
//! step from the state that outlives a process: the [`RequestLog`], its file position and the socket.
//!
//! 1. The request is peeked and stays in the socket (`MSG_PEEK`). Its descriptors are duplicates.
//! 2. The request is carried out. If the process ends here, the successor carries it out again, from the device's state before
//!    the request.
//! 3. The reply is written, then request, reply and the device's new state are committed. After the commit, no successor
//!    carries out the request again.
//! 4. The reply is sent from the request log. The log's file position shows the number of sent bytes.
//! 5. The request is removed from the socket. `SO_PEEK_OFF` shows the number of bytes that are left: the kernel raised it by
//!    the peek, and lowers it by each read.
//! 6. The file position moves to the next reply's slot, and the memory of the sent reply is freed.
//!
//! # A reply with a descriptor
//!
//! sendfile(2) cannot send descriptors. So a reply with a descriptor is sent from memory, and the file position is moved
//! afterwards. Before the reply is sent, the numbers of unread bytes in both directions of the socket are committed. If a
//! process ends between this commit and the move, it is unknown whether the reply was sent. The successor then compares the
//! socket with the committed numbers. If either direction has more unread bytes than committed, the reply was sent: the client
//! has not read it yet, or has read it and sent another request. Otherwise, the successor sends the reply.
//!
//! Two cases remain undetected. If the client has read the reply and sent nothing since, it gets the reply twice. If it has
//! sent a request without waiting for the reply, it does not get the reply. Both require a process that ends within three
//! successive system calls, and a client that reads or sends meanwhile.
//!
//! # Limits
//!
//! The socket's buffer must hold the request as a whole. So a request has at most [`MAX_REQUEST`] bytes, and the client gets a
//! matching `max_data_xfer_size`. A client that cuts a message into hundreds of pieces, or shrinks its socket's buffer, fills
//! the buffer before the message is complete, and blocks only itself.
//!
//! If a process ends between accept(2) and [`VfioUserDevice::persist_client`], the connection is lost. The client has not got
//! an answer to `VERSION` yet, and finds the connection closed.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use event_manager::EventSet;

use crate::connection::{MessageReader, StreamEnd};
use crate::device::VfioUserDevice;
use crate::dispatch::{DeviceRegions, RequestDispatcher};
use crate::error::RequestRefusal;
use crate::kill_point::crash_point;
use crate::message::VfioUserHeader;
use crate::request_log::{
    LoggedConnection, LoggedRequest, RequestLog, RequestLogError, SocketQueueBytes,
};
use crate::session::{MESSAGES_PER_TURN, UnfinishedRequest, VfioUserSession};
use crate::socket;

#[cfg(doc)]
use crate::request_log::MAX_REQUEST;

/// Value of `max_data_xfer_size` for a server with a request log, whose clients' requests must fit into the socket's buffer.
const MAX_LOGGED_DATA_XFER: u32 = 32 * 1024;

/// Outcome of one attempt to receive and answer a request.
enum RequestStepOutcome {
    /// The session answered a request.
    Answered,
    /// The session must wait for one of these socket events before the next attempt.
    Waiting(EventSet),
}

impl VfioUserSession {
    /// Creates a session with a client that has not sent anything yet. The caller commits the session to the request log.
    pub(crate) fn begin_logged(
        stream: UnixStream,
        regions: Arc<DeviceRegions>,
        request_log: &mut RequestLog,
    ) -> Result<Self, RequestLogError> {
        request_log.finish_request()?;
        reset_peek_offset(&stream)?;
        Ok(Self::with_connection(
            stream,
            regions,
            LoggedConnection::default(),
            None,
        ))
    }

    /// Continues the predecessor's session.
    pub(crate) fn resume_logged(
        stream: UnixStream,
        regions: Arc<DeviceRegions>,
        connected: LoggedConnection,
        request_log: &mut RequestLog,
    ) -> Result<Self, RequestLogError> {
        let LoggedRequest {
            request_bytes: request,
            reply_bytes: reply,
            memory_region: memory_of,
            ..
        } = request_log.head();
        let left = socket::peek_offset(&stream)
            .map_err(socket_error)?
            .min(request);
        let pending = request_log.sent_bytes()?.map(|sent| UnfinishedRequest {
            sent_bytes: sent,
            unread_bytes: left,
        });
        // The rest of the request is unfinished if bytes are unsent or unread, or if the connection must be closed after the
        // reply: closing is then left to this session.
        let pending = pending.filter(|rest| {
            connected.is_closing || rest.sent_bytes < reply || rest.unread_bytes > 0
        });
        if pending.is_none() {
            // The predecessor may have ended between sending the reply and freeing the reply's memory.
            request_log.finish_request()?;
            reset_peek_offset(&stream)?;
        }
        let mut this = Self::with_connection(stream, regions, connected, pending);
        if let (Some(UnfinishedRequest { sent_bytes: 0, .. }), Some(region)) =
            (this.unfinished, memory_of)
        {
            if this.dispatcher.region_memory(region).is_none() {
                return Err(RequestLogError::NoMemory { region });
            }
            let now = socket_queue_bytes(&this.stream).map_err(socket_error)?;
            let before = request_log.head().before_sending;
            if before.is_some_and(|before| now.has_more_than(before)) {
                request_log.set_sent_bytes(reply)?;
                this.unfinished = Some(UnfinishedRequest {
                    sent_bytes: reply,
                    unread_bytes: left,
                });
            }
        }
        Ok(this)
    }

    fn with_connection(
        stream: UnixStream,
        regions: Arc<DeviceRegions>,
        connected: LoggedConnection,
        pending: Option<UnfinishedRequest>,
    ) -> Self {
        Self {
            stream,
            reader: MessageReader::default(),
            writer: Default::default(),
            dispatcher: RequestDispatcher::resume(
                regions,
                connected.negotiated,
                MAX_LOGGED_DATA_XFER,
            ),
            unfinished: pending,
        }
    }

    /// Returns the socket events that a session waits for before it runs for the first time.
    pub(crate) fn initial_events(&self, request_log: &RequestLog) -> EventSet {
        match self.unfinished {
            Some(pending) if pending.sent_bytes < request_log.head().reply_bytes => EventSet::OUT,
            // Bytes of the request that are left in the socket make it readable, so the session continues with them.
            _ => EventSet::IN,
        }
    }

    /// Answers the client's requests until the socket blocks. Returns the socket events to wait for, or `None` if the
    /// connection has ended.
    pub(crate) fn run_logged<D: VfioUserDevice>(
        &mut self,
        device: &mut D,
        request_log: &mut RequestLog,
    ) -> Option<EventSet> {
        for _ in 0..MESSAGES_PER_TURN {
            match self.answer_logged(device, request_log) {
                Ok(RequestStepOutcome::Answered) => {}
                Ok(RequestStepOutcome::Waiting(events)) => return Some(events),
                Err(ended) => {
                    self.end_connection(ended);
                    return None;
                }
            }
        }
        Some(EventSet::IN)
    }

    fn answer_logged<D: VfioUserDevice>(
        &mut self,
        device: &mut D,
        request_log: &mut RequestLog,
    ) -> Result<RequestStepOutcome, StreamEnd> {
        if self.unfinished.is_some() && !self.finish_request(request_log)? {
            return Ok(RequestStepOutcome::Waiting(EventSet::OUT));
        }
        let mut connected = LoggedConnection::default();
        let mut request = 0;
        let mut memory_of = None;
        let (header, refusal) = match self.reader.peek(&self.stream) {
            Ok(Some(message)) => {
                crash_point();
                let header = message.header;
                // The cast keeps the value, since the length was checked against `MAX_REQUEST`.
                request = (VfioUserHeader::SIZE + message.payload.len()) as u32;
                let reply = self.writer.begin_reply();
                match self.dispatcher.handle_message(device, message, reply) {
                    Ok(region) => {
                        memory_of = region;
                        (header, None)
                    }
                    Err(refusal) => {
                        connected.is_closing = refusal.ends_connection();
                        (header, Some(refusal))
                    }
                }
            }
            Ok(None) => {
                let mut events = EventSet::IN;
                // A partial message stays in the socket, so a level-triggered event would be reported for ever. Edge triggering
                // reports the socket again when further bytes arrive.
                events.set(EventSet::EDGE_TRIGGERED, self.reader.is_partial());
                return Ok(RequestStepOutcome::Waiting(events));
            }
            Err(StreamEnd::InvalidMessage { header, refusal }) => {
                connected.is_closing = true;
                (header, Some(refusal))
            }
            Err(ended) => return Err(ended),
        };
        crash_point();

        self.write_reply(&header, refusal.as_ref(), connected.is_closing);
        connected.negotiated = self.dispatcher.negotiated();
        let mut head = request_log.head().next(connected);
        head.request_bytes = request;
        let reply = self.writer.bytes();
        // The cast keeps the value: the reply has at most `max_data_xfer_size` bytes and two headers.
        head.reply_bytes = reply.len() as u32;
        if !reply.is_empty() {
            request_log.write_reply(head.sequence, reply)?;
            head.memory_region = memory_of;
        }
        request_log.commit(head, device.save())?;
        device.on_saved();
        self.unfinished = Some(UnfinishedRequest {
            sent_bytes: 0,
            unread_bytes: request,
        });
        match self.finish_request(request_log)? {
            true => Ok(RequestStepOutcome::Answered),
            false => Ok(RequestStepOutcome::Waiting(EventSet::OUT)),
        }
    }

    /// Writes the reply to a message into the session's writer, or drops the reply if the client expects none.
    fn write_reply(
        &mut self,
        header: &VfioUserHeader,
        refusal: Option<&RequestRefusal>,
        ends: bool,
    ) {
        match refusal {
            None => self.writer.complete_reply(header, None),
            Some(refusal) => {
                self.dispatcher.error_log.log_refusal(refusal);
                self.writer.replace_by_error(header, refusal.errno());
            }
        }
        let stray = ends && header.message_type() != VfioUserHeader::TYPE_COMMAND;
        if header.is_no_reply() || stray {
            self.writer.discard();
        }
    }

    /// Sends the unsent bytes of the reply, and removes the request's bytes from the socket. Returns true once both are done.
    fn finish_request(&mut self, request_log: &mut RequestLog) -> Result<bool, StreamEnd> {
        let Some(pending) = &mut self.unfinished else {
            return Ok(true);
        };
        let mut head = request_log.head();
        let ends = head.client.is_some_and(|client| client.is_closing);
        while pending.sent_bytes < head.reply_bytes {
            let memory = head.memory_region.filter(|_| pending.sent_bytes == 0);
            let sent = match memory {
                Some(region) => {
                    let memory = self.dispatcher.region_memory(region);
                    let reply = request_log.reply()?;
                    head.before_sending =
                        Some(socket_queue_bytes(&self.stream).map_err(StreamEnd::Failed)?);
                    request_log.commit(head, None)?;
                    let sent = socket::send(&self.stream, &reply, memory.as_deref());
                    if sent.is_err() {
                        head.before_sending = None;
                        request_log.commit(head, None)?;
                    }
                    // The cast keeps the value, since sent bytes are at most the reply's size.
                    sent.map(|sent| sent as u32)
                }
                None => request_log.send(&self.stream, head.reply_bytes - pending.sent_bytes),
            };
            match sent {
                Ok(sent) => {
                    crash_point();
                    pending.sent_bytes += sent;
                    if memory.is_some() {
                        request_log.set_sent_bytes(pending.sent_bytes)?;
                        crash_point();
                    }
                }
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => {
                    return Err(StreamEnd::Failed(error));
                }
                Err(_) if ends => break,
                Err(_) => return Ok(false),
            }
        }
        if ends {
            return Err(StreamEnd::Refused);
        }

        let mut scrap = [0; 4096];
        while pending.unread_bytes > 0 {
            let len = scrap.len().min(pending.unread_bytes as usize);
            match (&self.stream).read(&mut scrap[..len]) {
                Ok(0) => return Err(StreamEnd::Failed(io::ErrorKind::UnexpectedEof.into())),
                // The cast keeps the value: `taken` is at most `unread_bytes`.
                Ok(taken) => pending.unread_bytes -= taken as u32,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(StreamEnd::Failed(error)),
            }
            crash_point();
        }
        request_log.finish_request()?;
        self.writer.discard();
        self.unfinished = None;
        Ok(true)
    }
}

fn socket_queue_bytes(stream: &UnixStream) -> io::Result<SocketQueueBytes> {
    let unanswered = rustix::io::ioctl_fionread(stream)?;
    Ok(SocketQueueBytes {
        unread: socket::unread_bytes(stream)?,
        unanswered: u32::try_from(unanswered).unwrap_or(u32::MAX),
    })
}

/// Resets the socket's peek offset, so that the next peek begins with the first byte in the socket.
fn reset_peek_offset(stream: &UnixStream) -> Result<(), RequestLogError> {
    socket::set_peek_offset(stream, 0).map_err(socket_error)
}

fn socket_error(source: io::Error) -> RequestLogError {
    RequestLogError::File {
        action: "compare the client's socket with",
        source,
    }
}

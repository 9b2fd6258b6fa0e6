//! One client that asks for metrics: a request is read, an answer is written, and the connection ends.
//!
//! A client never makes the thread wait: what it has not sent or taken yet is read or written later. Its time and the
//! length of its request are bounded.

use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use nvme_mpt::deadline::{Deadline, SystemClock};

use super::export::Format;

/// Time that a client has for its request and for taking the answer.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 180 } else { 5 });

/// Longest request in bytes.
const REQUEST_MAX: usize = 8 << 10;

/// Most header lines of a request.
const HEADERS_MAX: usize = 64;

/// Path of the metrics.
const PATH: &str = "/metrics";

/// A socket of a client, which does not block.
pub(super) trait Stream: Read + Write + AsFd + Send + fmt::Debug {}

impl<T: Read + Write + AsFd + Send + fmt::Debug> Stream for T {}

/// Request of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    /// For the metrics, with their text or with the head of the answer alone.
    Metrics { format: Format, with_text: bool },
    /// For something else: status and explanation.
    Wrong(&'static str, &'static str),
}

impl Request {
    /// Reads the head of a request; `None` if there is more to come.
    fn parse(head: &[u8]) -> Option<Self> {
        let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
        let mut request = httparse::Request::new(&mut headers);
        match request.parse(head) {
            Ok(httparse::Status::Complete(_)) => {}
            Ok(httparse::Status::Partial) if head.len() < REQUEST_MAX => return None,
            Ok(httparse::Status::Partial) => {
                return Some(Self::Wrong(
                    "431 Request Header Fields Too Large",
                    "Ask in fewer words",
                ));
            }
            Err(_) => return Some(Self::Wrong("400 Bad Request", "Ask with GET /metrics")),
        }
        let path = request.path.unwrap_or_default();
        let path = path.split_once('?').map_or(path, |(path, _)| path);
        if path != PATH {
            return Some(Self::Wrong("404 Not Found", "The metrics are at /metrics"));
        }
        let with_text = match request.method {
            Some("GET") => true,
            Some("HEAD") => false,
            _ => {
                return Some(Self::Wrong(
                    "405 Method Not Allowed",
                    "Ask with GET /metrics",
                ));
            }
        };
        let mut accepted = request.headers.iter();
        let open = accepted.any(|header| {
            let value = String::from_utf8_lossy(header.value).to_ascii_lowercase();
            header.name.eq_ignore_ascii_case("accept")
                && value.contains("application/openmetrics-text")
        });
        let format = match open {
            true => Format::OpenMetrics,
            false => Format::Prometheus,
        };
        Some(Self::Metrics { format, with_text })
    }
}

#[derive(Debug)]
enum State {
    Reads(Vec<u8>),
    Writes {
        head: Vec<u8>,
        text: Arc<str>,
        written: usize,
    },
}

/// Progress of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// Something has to be read or written first.
    Waits,
    /// It has its answer.
    Done,
}

/// A client.
#[derive(Debug)]
pub(super) struct Client {
    stream: Box<dyn Stream>,
    deadline: Deadline,
    state: State,
}

impl Client {
    pub(super) fn new(stream: Box<dyn Stream>) -> Self {
        Self {
            stream,
            deadline: Deadline::after(&SystemClock::shared(), PATIENCE),
            state: State::Reads(Vec::new()),
        }
    }

    pub(super) fn stream(&self) -> &dyn Stream {
        &*self.stream
    }

    /// Returns whether it waits to be written to.
    pub(super) fn writes(&self) -> bool {
        matches!(self.state, State::Writes { .. })
    }

    /// Returns the time that it has left.
    pub(super) fn left(&self) -> Duration {
        self.deadline.left()
    }

    /// Reads and writes what can be read and written now. `text` returns the metrics.
    ///
    /// # Errors
    /// The client went.
    pub(super) fn go_on(
        &mut self,
        text: &mut dyn FnMut(Format) -> Arc<str>,
    ) -> io::Result<Progress> {
        loop {
            let more = match &mut self.state {
                State::Reads(head) => match read(&mut *self.stream, head)? {
                    false => false,
                    true => match Request::parse(head) {
                        None => true,
                        Some(request) => {
                            self.state = answer(request, text);
                            true
                        }
                    },
                },
                State::Writes {
                    head,
                    text,
                    written,
                } => {
                    let rest = match head.get(*written..) {
                        Some(rest) if !rest.is_empty() => rest,
                        _ => &text.as_bytes()[*written - head.len()..],
                    };
                    if rest.is_empty() {
                        return Ok(Progress::Done);
                    }
                    match unless_blocked(self.stream.write(rest))? {
                        Some(0) => return Err(io::ErrorKind::WriteZero.into()),
                        Some(count) => {
                            *written += count;
                            true
                        }
                        None => false,
                    }
                }
            };
            if !more {
                return Ok(Progress::Waits);
            }
        }
    }
}

/// Reads once. Returns whether anything came.
fn read(stream: &mut dyn Stream, head: &mut Vec<u8>) -> io::Result<bool> {
    let mut chunk = [0; 1024];
    match unless_blocked(stream.read(&mut chunk))? {
        Some(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Some(count) => {
            head.extend_from_slice(&chunk[..count]);
            Ok(true)
        }
        None => Ok(false),
    }
}

/// Returns the result; `None` if the socket would block.
fn unless_blocked(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(count) => Ok(Some(count)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(None),
        Err(error) => Err(error),
    }
}

fn answer(request: Request, text: &mut dyn FnMut(Format) -> Arc<str>) -> State {
    let (status, kind, text, with_text) = match request {
        Request::Metrics { format, with_text } => {
            ("200 OK", format.content_type(), text(format), with_text)
        }
        Request::Wrong(status, explanation) => {
            let text = format!("{explanation}\n").into();
            (status, "text/plain; charset=utf-8", text, true)
        }
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        text.len()
    );
    State::Writes {
        head: head.into_bytes(),
        text: if with_text { text } else { "".into() },
        written: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Option<Request> {
        Request::parse(text.as_bytes())
    }

    fn metrics(format: Format) -> Option<Request> {
        Some(Request::Metrics {
            format,
            with_text: true,
        })
    }

    #[test]
    fn the_form_is_the_one_that_is_accepted() {
        let plain = "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n";
        assert_eq!(parse(plain), metrics(Format::Prometheus));
        let open = "GET /metrics?x=y HTTP/1.1\r\naccept: application/openmetrics-text;version=1.0.0,*/*;q=0.1\r\n\r\n";
        assert_eq!(parse(open), metrics(Format::OpenMetrics));
        let head = "HEAD /metrics HTTP/1.0\r\n\r\n";
        let with_text = false;
        let format = Format::Prometheus;
        assert_eq!(parse(head), Some(Request::Metrics { format, with_text }));
    }

    #[test]
    fn a_request_is_waited_for_up_to_its_longest() {
        let whole = "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n";
        for end in 0..whole.len() {
            assert_eq!(parse(&whole[..end]), None, "{end}");
        }
        let long = format!("GET /metrics HTTP/1.1\r\nx: {}", "y".repeat(REQUEST_MAX));
        assert!(
            matches!(parse(&long), Some(Request::Wrong(status, _)) if status.starts_with("431"))
        );
    }

    #[test]
    fn what_is_no_request_for_metrics_is_refused() {
        for (text, status) in [
            ("GET / HTTP/1.1\r\n\r\n", "404"),
            ("GET /metrics/.. HTTP/1.1\r\n\r\n", "404"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
            ("\0\0\0\0", "400"),
            ("GET /metrics SMTP\r\n\r\n", "400"),
        ] {
            let request = parse(text);
            assert!(
                matches!(request, Some(Request::Wrong(got, _)) if got.starts_with(status)),
                "{text:?}: {request:?}"
            );
        }
        let many = format!(
            "GET /metrics HTTP/1.1\r\n{}\r\n",
            "a: b\r\n".repeat(HEADERS_MAX + 1)
        );
        assert!(
            matches!(parse(&many), Some(Request::Wrong(status, _)) if status.starts_with("400"))
        );
    }
}

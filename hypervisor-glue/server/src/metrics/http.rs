//! An HTTP client of the metrics: reads a request, writes the answer and closes the connection.
//!
//! A client never blocks the thread, since the client's socket is non-blocking. The time of a connection and the size of a
//! request are limited.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use nvme_mpt_memory::deadline::{Deadline, SystemClock};

use super::export::MetricsFormat;

/// Timeout for sending the request and receiving the answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 180 } else { 5 });

/// Maximum size of a request in bytes.
const REQUEST_MAX: usize = 8 << 10;

/// Maximum number of header lines.
const HEADERS_MAX: usize = 64;

/// URL path of the metrics.
const PATH: &str = "/metrics";

/// A client's non-blocking socket.
pub(super) trait HttpStream: Read + Write + AsFd + Send + fmt::Debug {}

impl<T: Read + Write + AsFd + Send + fmt::Debug> HttpStream for T {}

/// A parsed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HttpRequest {
    /// A request for the metrics: with a body for GET, without one for HEAD.
    Metrics {
        format: MetricsFormat,
        has_body: bool,
    },
    /// An invalid request: status and explanation to return.
    Invalid(&'static str, &'static str),
}

/// Host names that clients may use over TCP.
///
/// The check protects against DNS rebinding. A browser on this host sends the name of the visited web site as `Host:`. The
/// site's owner could make this name resolve to this host, so that the site's scripts could read the metrics. Therefore,
/// only names that no stranger can own are accepted.
#[derive(Clone, Debug, Default)]
pub(super) struct AllowedHosts(Vec<String>);

impl AllowedHosts {
    /// Accepts the operator's names and the host name.
    pub(super) fn new(allowed: &[String]) -> Self {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let host = Some(host.trim().to_owned()).filter(|name| !name.is_empty());
        Self(allowed.iter().cloned().chain(host).collect())
    }

    /// Returns whether a `Host:` header has an IP address, `localhost` or an accepted name.
    fn is_allowed(&self, header: &str) -> bool {
        let header = header.trim();
        if header.parse::<IpAddr>().is_ok() || header.parse::<SocketAddr>().is_ok() {
            return true;
        }
        let name = match header.rsplit_once(':') {
            Some((name, port)) if port.parse::<u16>().is_ok() => name,
            Some(_) => return header.starts_with('[') && is_bracketed_address(header),
            None => header,
        };
        if is_bracketed_address(name) {
            return true;
        }
        let name = name.strip_suffix('.').unwrap_or(name);
        let local = name
            .rsplit('.')
            .next()
            .is_some_and(|last| last.eq_ignore_ascii_case("localhost"));
        local || self.0.iter().any(|other| other.eq_ignore_ascii_case(name))
    }
}

fn is_bracketed_address(text: &str) -> bool {
    let address = text
        .strip_prefix('[')
        .and_then(|text| text.strip_suffix(']'));
    address.is_some_and(|address| address.parse::<Ipv6Addr>().is_ok())
}

impl HttpRequest {
    /// Parses the request line and the headers. Returns `None` if they are incomplete. For a TCP client, `hosts` are the
    /// accepted names of the `Host:` header.
    fn parse(head: &[u8], hosts: Option<&AllowedHosts>) -> Option<Self> {
        let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
        let mut request = httparse::Request::new(&mut headers);
        match request.parse(head) {
            Ok(httparse::Status::Complete(_)) => {}
            Ok(httparse::Status::Partial) if head.len() < REQUEST_MAX => return None,
            Ok(httparse::Status::Partial) => {
                return Some(Self::Invalid(
                    "431 Request Header Fields Too Large",
                    "Send a shorter request",
                ));
            }
            Err(_) => return Some(Self::Invalid("400 Bad Request", "Use GET /metrics")),
        }
        if let Some(refusal) = hosts.and_then(|hosts| find_refusal(request.headers, hosts)) {
            return Some(refusal);
        }
        let path = request.path.unwrap_or_default();
        let path = path.split_once('?').map_or(path, |(path, _)| path);
        if path != PATH {
            return Some(Self::Invalid(
                "404 Not Found",
                "The metrics are at /metrics",
            ));
        }
        let with_text = match request.method {
            Some("GET") => true,
            Some("HEAD") => false,
            _ => {
                return Some(Self::Invalid("405 Method Not Allowed", "Use GET /metrics"));
            }
        };
        let mut accepted = request.headers.iter();
        let open = accepted.any(|header| {
            let value = String::from_utf8_lossy(header.value).to_ascii_lowercase();
            header.name.eq_ignore_ascii_case("accept")
                && value.contains("application/openmetrics-text")
        });
        let format = match open {
            true => MetricsFormat::OpenMetrics,
            false => MetricsFormat::Prometheus,
        };
        Some(Self::Metrics {
            format,
            has_body: with_text,
        })
    }
}

/// Returns the refusal of a cross-site request of a browser, or of a `Host:` name that a stranger may own; `None` if the
/// request is allowed.
fn find_refusal(headers: &[httparse::Header<'_>], hosts: &AllowedHosts) -> Option<HttpRequest> {
    let of = |name: &'static str| {
        let named = headers.iter();
        named.filter(move |header| header.name.eq_ignore_ascii_case(name))
    };
    let foreign = |header: &httparse::Header<'_>| !matches!(header.value, b"none" | b"same-origin");
    if of("origin").next().is_some() || of("sec-fetch-site").any(foreign) {
        return Some(HttpRequest::Invalid(
            "403 Forbidden",
            "Requests from pages of other sites are refused",
        ));
    }
    // A client that sends no `Host:` header is not a browser.
    let mut named = of("host");
    let first = named.next()?;
    let is_known = std::str::from_utf8(first.value).is_ok_and(|name| hosts.is_allowed(name));
    (!is_known || named.next().is_some()).then_some(HttpRequest::Invalid(
        "421 Misdirected Request",
        "Use the address of this host, or allow its name with --metrics-host",
    ))
}

#[derive(Debug)]
enum HttpConnectionState {
    Reading(Vec<u8>),
    Writing {
        head: Vec<u8>,
        text: Arc<str>,
        written: usize,
    },
}

/// Progress of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HttpProgress {
    /// The client has not sent its whole request or received its whole answer yet.
    Pending,
    /// The answer is sent.
    Done,
}

/// A connected client.
#[derive(Debug)]
pub(super) struct HttpConnection {
    stream: Box<dyn HttpStream>,
    deadline: Deadline,
    /// Names accepted in a `Host:` header. `None` for a Unix socket, which browsers cannot reach.
    hosts: Option<Arc<AllowedHosts>>,
    state: HttpConnectionState,
}

impl HttpConnection {
    pub(super) fn new(stream: Box<dyn HttpStream>, hosts: Option<Arc<AllowedHosts>>) -> Self {
        Self {
            stream,
            hosts,
            deadline: Deadline::after(&SystemClock::shared(), CLIENT_TIMEOUT),
            state: HttpConnectionState::Reading(Vec::new()),
        }
    }

    pub(super) fn stream(&self) -> &dyn HttpStream {
        &*self.stream
    }

    /// Returns whether the client is receiving its answer.
    pub(super) fn is_writing(&self) -> bool {
        matches!(self.state, HttpConnectionState::Writing { .. })
    }

    /// Returns the time left until the client's timeout.
    pub(super) fn time_left(&self) -> Duration {
        self.deadline.remaining()
    }

    /// Reads the request and writes the answer as far as possible without blocking. `text` returns the metrics.
    ///
    /// # Errors
    /// The client has disconnected.
    pub(super) fn advance(
        &mut self,
        text: &mut dyn FnMut(MetricsFormat) -> Arc<str>,
    ) -> io::Result<HttpProgress> {
        loop {
            let more = match &mut self.state {
                HttpConnectionState::Reading(head) => match read(&mut *self.stream, head)? {
                    false => false,
                    true => match HttpRequest::parse(head, self.hosts.as_deref()) {
                        None => true,
                        Some(request) => {
                            self.state = build_response(request, text);
                            true
                        }
                    },
                },
                HttpConnectionState::Writing {
                    head,
                    text,
                    written,
                } => {
                    let rest = match head.get(*written..) {
                        Some(rest) if !rest.is_empty() => rest,
                        _ => &text.as_bytes()[*written - head.len()..],
                    };
                    if rest.is_empty() {
                        return Ok(HttpProgress::Done);
                    }
                    match nonblocking_result(self.stream.write(rest))? {
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
                return Ok(HttpProgress::Pending);
            }
        }
    }
}

/// Reads once. Returns whether data arrived.
fn read(stream: &mut dyn HttpStream, head: &mut Vec<u8>) -> io::Result<bool> {
    let mut chunk = [0; 1024];
    match nonblocking_result(stream.read(&mut chunk))? {
        Some(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Some(count) => {
            head.extend_from_slice(&chunk[..count]);
            Ok(true)
        }
        None => Ok(false),
    }
}

/// Converts the result of a call on a non-blocking socket: `None` if the call would block.
fn nonblocking_result(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(count) => Ok(Some(count)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(None),
        Err(error) => Err(error),
    }
}

fn build_response(
    request: HttpRequest,
    text: &mut dyn FnMut(MetricsFormat) -> Arc<str>,
) -> HttpConnectionState {
    let (status, kind, text, with_text) = match request {
        HttpRequest::Metrics {
            format,
            has_body: with_text,
        } => ("200 OK", format.content_type(), text(format), with_text),
        HttpRequest::Invalid(status, explanation) => {
            let text = format!("{explanation}\n").into();
            (status, "text/plain; charset=utf-8", text, true)
        }
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        text.len()
    );
    HttpConnectionState::Writing {
        head: head.into_bytes(),
        text: if with_text { text } else { "".into() },
        written: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Option<HttpRequest> {
        HttpRequest::parse(text.as_bytes(), None)
    }

    #[test]
    fn foreign_host_names_and_cross_site_requests_are_refused() {
        let hosts = AllowedHosts::new(&["metrics.example".to_owned()]);
        let status = |headers: &str| {
            let text = format!("GET /metrics HTTP/1.1\r\n{headers}\r\n");
            match HttpRequest::parse(text.as_bytes(), Some(&hosts)) {
                Some(HttpRequest::Invalid(status, _)) => status.split_once(' ').unwrap().0,
                _ => "200",
            }
        };
        for host in [
            "127.0.0.1",
            "127.0.0.1:9469",
            "10.1.2.3:80",
            "[::1]",
            "[::1]:9469",
            "localhost",
            "LocalHost:9469",
            "localhost.",
            "a.localhost:1",
            "metrics.example",
            "Metrics.Example.:9469",
        ] {
            assert_eq!(status(&format!("Host: {host}\r\n")), "200", "{host}");
        }
        let own = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        assert_eq!(status(&format!("Host: {}:9469\r\n", own.trim())), "200");
        for host in [
            "attacker.example",
            "attacker.example:9469",
            "localhost.attacker.example",
            "127.0.0.1.attacker.example",
            "metrics.example.attacker.example",
            "127.0.0.1@attacker.example",
            "[attacker.example]:9469",
            "localhost:http",
            "",
            "\u{e9}",
        ] {
            assert_eq!(status(&format!("Host: {host}\r\n")), "421", "{host}");
        }
        assert_eq!(status(""), "200", "HTTP/1.0 has no names");
        assert_eq!(status("Host: localhost\r\nHost: a.example\r\n"), "421");
        for header in [
            "Origin: http://attacker.example",
            "origin: null",
            "Origin: http://localhost:9469",
            "Sec-Fetch-Site: cross-site",
            "Sec-Fetch-Site: same-site",
        ] {
            let headers = format!("Host: localhost\r\n{header}\r\n");
            assert_eq!(status(&headers), "403", "{header}");
        }
        let typed = "Host: localhost\r\nSec-Fetch-Site: none\r\n";
        assert_eq!(status(typed), "200", "in an address bar");
    }

    fn metrics(format: MetricsFormat) -> Option<HttpRequest> {
        Some(HttpRequest::Metrics {
            format,
            has_body: true,
        })
    }

    #[test]
    fn the_metrics_format_follows_the_accept_header() {
        let plain = "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n";
        assert_eq!(parse(plain), metrics(MetricsFormat::Prometheus));
        let open = "GET /metrics?x=y HTTP/1.1\r\naccept: application/openmetrics-text;version=1.0.0,*/*;q=0.1\r\n\r\n";
        assert_eq!(parse(open), metrics(MetricsFormat::OpenMetrics));
        let head = "HEAD /metrics HTTP/1.0\r\n\r\n";
        let has_body = false;
        let format = MetricsFormat::Prometheus;
        assert_eq!(parse(head), Some(HttpRequest::Metrics { format, has_body }));
    }

    #[test]
    fn an_incomplete_request_waits_until_the_size_limit() {
        let whole = "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n";
        for end in 0..whole.len() {
            assert_eq!(parse(&whole[..end]), None, "{end}");
        }
        let long = format!("GET /metrics HTTP/1.1\r\nx: {}", "y".repeat(REQUEST_MAX));
        assert!(
            matches!(parse(&long), Some(HttpRequest::Invalid(status, _)) if status.starts_with("431"))
        );
    }

    #[test]
    fn other_http_requests_than_for_metrics_are_refused() {
        for (text, status) in [
            ("GET / HTTP/1.1\r\n\r\n", "404"),
            ("GET /metrics/.. HTTP/1.1\r\n\r\n", "404"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
            ("\0\0\0\0", "400"),
            ("GET /metrics SMTP\r\n\r\n", "400"),
        ] {
            let request = parse(text);
            assert!(
                matches!(request, Some(HttpRequest::Invalid(got, _)) if got.starts_with(status)),
                "{text:?}: {request:?}"
            );
        }
        let many = format!(
            "GET /metrics HTTP/1.1\r\n{}\r\n",
            "a: b\r\n".repeat(HEADERS_MAX + 1)
        );
        assert!(
            matches!(parse(&many), Some(HttpRequest::Invalid(status, _)) if status.starts_with("400"))
        );
    }
}

//! The thread that serves metrics and writes the metrics file.
//!
//! One thread serves a bounded number of clients without blocking on any client. All clients get the same text, which is at
//! most [`TEXT_AGE_MAX`] old, so the work of collecting statistics does not grow with the number of clients.

use std::io::{self, PipeReader, PipeWriter, Write};
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nvme_guest::threads::start_thread;
use nvme_mpt_memory::clock;
use nvme_mpt_paths::{FileId, OpenDirectory};
use vfio_user_server::SocketListener;

use super::export::{MetricsFormat, MetricsSnapshot, MonotonicPollerStats};
use super::health::HealthWatch;
use super::http::{AllowedHosts, HttpConnection, HttpProgress, HttpStream};
use super::{MetricsAddress, MetricsError, MetricsOptions, MetricsSource};

/// Maximum number of clients. A new client beyond this number replaces the oldest client. A client that sends its request
/// promptly is answered long before it becomes the oldest.
const CLIENTS_MAX: usize = 64;

/// Maximum age of a cached metrics text. An older text is created anew for the next client.
const TEXT_AGE_MAX: Duration = Duration::from_millis(500);

/// Interval of writing the file.
const FILE_INTERVAL: Duration = Duration::from_secs(15);

/// Time after a failed accept during which no client is accepted, for example if descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug)]
enum MetricsSocket {
    Tcp(TcpListener, Arc<AllowedHosts>),
    Unix(SocketListener),
}

impl MetricsSocket {
    fn bind(address: &MetricsAddress, hosts: &[String]) -> Result<Self, MetricsError> {
        match address {
            MetricsAddress::Unix(path) => SocketListener::bind(path)
                .map(Self::Unix)
                .map_err(MetricsError::Socket),
            MetricsAddress::Tcp(address) => {
                let listen = || {
                    let listener = TcpListener::bind(address)?;
                    listener.set_nonblocking(true)?;
                    Ok(listener)
                };
                let address = *address;
                let listener =
                    listen().map_err(|source| MetricsError::Listen { address, source })?;
                if !address.ip().is_loopback() {
                    log::warn!(
                        "Every host that reaches {address} can read the metrics, which name functions and drives"
                    );
                }
                Ok(Self::Tcp(listener, Arc::new(AllowedHosts::new(hosts))))
            }
        }
    }

    fn accept(&mut self) -> io::Result<Option<HttpConnection>> {
        let (stream, hosts): (Box<dyn HttpStream>, _) = match self {
            Self::Tcp(listener, hosts) => match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(true)?;
                    (Box::new(stream), Some(hosts.clone()))
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error),
            },
            Self::Unix(listener) => match listener.accept()? {
                Some(stream) => {
                    stream.set_nonblocking(true)?;
                    (Box::new(stream), None)
                }
                None => return Ok(None),
            },
        };
        Ok(Some(HttpConnection::new(stream, hosts)))
    }
}

impl AsFd for MetricsSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener, _) => listener.as_fd(),
            Self::Unix(listener) => listener.as_fd(),
        }
    }
}

/// The metrics file. Dropping this removes the file, so that the node exporter does not export outdated metrics.
#[derive(Debug)]
struct MetricsFile {
    path: PathBuf,
    /// Identity of the last written file.
    written: Option<FileId>,
}

impl MetricsFile {
    fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            written: None,
        }
    }

    /// Replaces the file atomically. The directory may belong to the node exporter's user, who may have replaced files in it
    /// since the last write.
    fn write(&mut self, text: &str) -> Result<(), MetricsError> {
        let written = OpenDirectory::open_parent(&self.path).and_then(|(directory, name)| {
            // The file is readable for the node exporter's user. It must be replaced atomically, as the node exporter reads
            // every `.prom` file at any time.
            directory.replace(name, 0o666, |file| file.write_all(text.as_bytes()))
        });
        let id = written.map_err(|source| MetricsError::File {
            path: self.path.clone(),
            source,
        })?;
        self.written = Some(id);
        Ok(())
    }
}

impl Drop for MetricsFile {
    fn drop(&mut self) {
        // The identity check avoids removing a file of another server or user.
        if let Some(id) = self.written
            && let Ok((directory, name)) = OpenDirectory::open_parent(&self.path)
        {
            directory.remove(name, id);
        }
    }
}

/// Bound socket and created file, which no thread serves yet.
#[derive(Debug)]
pub struct MetricsListener {
    socket: Option<MetricsSocket>,
    file: Option<MetricsFile>,
}

impl MetricsListener {
    /// Binds the socket and creates the file, if they are requested.
    ///
    /// # Errors
    /// The socket or the file cannot be created, or the node exporter ignores the file's name.
    pub fn bind(options: &MetricsOptions) -> Result<Self, MetricsError> {
        if let Some(path) = &options.file
            && path.extension().is_none_or(|extension| extension != "prom")
        {
            return Err(MetricsError::FileName { path: path.clone() });
        }
        let mut file = options.file.as_deref().map(MetricsFile::new);
        if let Some(file) = &mut file {
            file.write(&MetricsSnapshot::default().into_text(MetricsFormat::Prometheus))?;
        }
        let socket = options.address.as_ref();
        let socket = socket.map(|address| MetricsSocket::bind(address, &options.hosts));
        let socket = socket.transpose()?;
        Ok(Self { socket, file })
    }
}

/// The running metrics thread, and the running thread that polls the drives' health.
#[derive(Debug)]
pub struct MetricsServer {
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
    _health: HealthWatch,
}

impl MetricsServer {
    /// Starts serving the statistics of `source` and polling its drives' health. Without a socket and a file, only polls the
    /// health.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start(
        listener: MetricsListener,
        source: impl MetricsSource,
    ) -> Result<Self, MetricsError> {
        let MetricsListener { socket, file } = listener;
        let source: Arc<dyn MetricsSource> = Arc::new(source);
        let drive_source = source.clone();
        let health = HealthWatch::start(move || drive_source.drives(), source.health());
        let health = health.map_err(MetricsError::Thread)?;
        if socket.is_none() && file.is_none() {
            return Ok(Self {
                stop: None,
                thread: None,
                _health: health,
            });
        }
        let (stopped, stop) = io::pipe().map_err(MetricsError::Thread)?;
        let cache = MetricsTextCache {
            source,
            monotonic_pollers: MonotonicPollerStats::default(),
            texts: Vec::new(),
        };
        let serving = MetricsThreadState {
            socket,
            clients: Vec::new(),
            file: file.map(|file| (file, Duration::ZERO)),
            accept_after: Duration::ZERO,
            texts: cache,
        };
        let thread = start_thread("metrics", move || serving.run(&stopped));
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread.map_err(MetricsError::Thread)?),
            _health: health,
        })
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("The thread of metrics panicked");
        }
    }
}

/// Metrics texts for the clients, made from the server's statistics and cached for [`TEXT_AGE_MAX`].
struct MetricsTextCache {
    source: Arc<dyn MetricsSource>,
    monotonic_pollers: MonotonicPollerStats,
    /// Recent texts, each with the time of its creation.
    texts: Vec<(MetricsFormat, Duration, Arc<str>)>,
}

impl MetricsTextCache {
    fn text(&mut self, format: MetricsFormat) -> Arc<str> {
        let now = clock::monotonic();
        self.texts
            .retain(|(_, made, _)| now.saturating_sub(*made) < TEXT_AGE_MAX);
        if let Some((_, _, text)) = self.texts.iter().find(|(other, ..)| *other == format) {
            return text.clone();
        }
        let mut snapshot = self.source.snapshot();
        self.monotonic_pollers
            .make_monotonic(&mut snapshot.stats.pollers);
        let text: Arc<str> = snapshot.into_text(format).into();
        self.texts.push((format, now, text.clone()));
        text
    }
}

/// State of the metrics thread.
struct MetricsThreadState {
    socket: Option<MetricsSocket>,
    clients: Vec<HttpConnection>,
    /// The metrics file, and the time of its next write.
    file: Option<(MetricsFile, Duration)>,
    /// Time before which no client is accepted, after an accept has failed.
    accept_after: Duration,
    texts: MetricsTextCache,
}

/// Result of waiting for events: which sockets are ready, and whether the thread must stop.
struct MetricsReadiness {
    should_stop: bool,
    can_accept: bool,
    clients: Vec<bool>,
}

impl MetricsThreadState {
    fn run(mut self, stopped: &PipeReader) {
        loop {
            self.write_file();
            let ready = match self.wait(stopped) {
                Ok(ready) => ready,
                Err(error) => {
                    log::error!("Metrics are not served any more: {error}");
                    return;
                }
            };
            if ready.should_stop {
                return;
            }
            let mut index = 0;
            let Self {
                clients,
                texts: cache,
                ..
            } = &mut self;
            clients.retain_mut(|client| {
                let is_ready = ready.clients.get(index).is_some_and(|ready| *ready);
                index += 1;
                let progress = match is_ready {
                    true => client.advance(&mut |format| cache.text(format)),
                    false => Ok(HttpProgress::Pending),
                };
                matches!(progress, Ok(HttpProgress::Pending)) && !client.time_left().is_zero()
            });
            if ready.can_accept {
                self.accept();
            }
        }
    }

    fn write_file(&mut self) {
        let now = clock::monotonic();
        if let Some((file, next)) = &mut self.file
            && now >= *next
        {
            if let Err(error) = file.write(&self.texts.text(MetricsFormat::Prometheus)) {
                log::warn!("{}", nvme_mpt_vmm::report::chain(&error));
            }
            *next = now + FILE_INTERVAL;
        }
    }

    /// Waits for events or for the next deadline.
    fn wait(&self, stopped: &PipeReader) -> io::Result<MetricsReadiness> {
        let now = clock::monotonic();
        let mut times: Vec<Duration> = self.clients.iter().map(HttpConnection::time_left).collect();
        times.extend(self.file.iter().map(|(_, next)| next.saturating_sub(now)));
        let accept_wait = self.accept_after.saturating_sub(now);
        let accepts = accept_wait.is_zero();
        times.extend(Some(accept_wait).filter(|accept_wait| !accept_wait.is_zero()));
        let timeout = match times.into_iter().min() {
            None => PollTimeout::NONE,
            // Rounded up, so that the deadline has passed when the wait ends.
            Some(time) => {
                PollTimeout::try_from(time + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
            }
        };
        let mut fds = vec![PollFd::new(stopped.as_fd(), PollFlags::POLLIN)];
        fds.extend(self.clients.iter().map(|client| {
            let flags = match client.is_writing() {
                true => PollFlags::POLLOUT,
                false => PollFlags::POLLIN,
            };
            PollFd::new(client.stream().as_fd(), flags)
        }));
        let socket = self.socket.iter().filter(|_| accepts);
        fds.extend(socket.map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLIN)));
        match poll(&mut fds, timeout) {
            Ok(_) => {}
            Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let is_ready = |fd: &PollFd<'_>| fd.revents().is_some_and(|events| !events.is_empty());
        let clients = 1..=self.clients.len();
        Ok(MetricsReadiness {
            should_stop: is_ready(&fds[0]),
            can_accept: fds.get(clients.end() + 1).is_some_and(is_ready),
            clients: fds[clients].iter().map(is_ready).collect(),
        })
    }

    fn accept(&mut self) {
        let Some(socket) = &mut self.socket else {
            return;
        };
        match socket.accept() {
            Ok(None) => {}
            Ok(Some(client)) => {
                // All clients with a complete request were answered before this. So the oldest client is idle or slow.
                if self.clients.len() >= CLIENTS_MAX {
                    self.clients.remove(0);
                }
                self.clients.push(client);
            }
            Err(error) => {
                log::warn!("Cannot accept a client of the metrics: {error}");
                self.accept_after = clock::monotonic() + ACCEPT_PAUSE;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Read;
    use std::net::TcpStream;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicU64, Ordering};

    use nvme_mpt::Drive;

    use super::super::export::tests::full;
    use super::super::health::HealthAnswers;
    use super::*;

    /// A source that counts its snapshots.
    struct CountingMetricsSource(Arc<AtomicU64>);

    impl MetricsSource for CountingMetricsSource {
        fn snapshot(&self) -> MetricsSnapshot {
            let mut snapshot = full();
            snapshot.process.wiped.parts = self.0.fetch_add(1, Ordering::Relaxed);
            snapshot
        }

        fn drives(&self) -> Vec<Arc<Drive>> {
            Vec::new()
        }

        fn health(&self) -> HealthAnswers {
            HealthAnswers::default()
        }
    }

    fn server(options: &MetricsOptions) -> (MetricsServer, Option<MetricsAddress>) {
        let listener = MetricsListener::bind(options).unwrap();
        let address = match &listener.socket {
            Some(MetricsSocket::Tcp(socket, _)) => {
                Some(MetricsAddress::Tcp(socket.local_addr().unwrap()))
            }
            _ => options.address.clone(),
        };
        let server = MetricsServer::start(listener, CountingMetricsSource(Arc::default())).unwrap();
        (server, address)
    }

    fn connect(address: &MetricsAddress) -> Box<dyn HttpStream> {
        match address {
            MetricsAddress::Tcp(address) => Box::new(TcpStream::connect(address).unwrap()),
            MetricsAddress::Unix(path) => Box::new(UnixStream::connect(path).unwrap()),
        }
    }

    fn get(address: &MetricsAddress, accept: &str) -> String {
        let mut stream = connect(address);
        let request =
            format!("GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn tcp_options(address: &str) -> MetricsOptions {
        MetricsOptions {
            address: Some(address.parse().unwrap()),
            ..MetricsOptions::default()
        }
    }

    #[test]
    fn metrics_are_served_over_tcp_and_unix_sockets_in_both_formats() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("m.sock");
        for place in ["0", &format!("unix:{}", socket.display())] {
            let (server, address) = server(&tcp_options(place));
            let address = address.unwrap();
            let plain = get(&address, "*/*");
            let (head, text) = plain.split_once("\r\n\r\n").unwrap();
            assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
            assert!(
                head.contains("Content-Type: text/plain; version=0.0.4"),
                "{head}"
            );
            assert!(
                head.contains(&format!("Content-Length: {}\r\n", text.len())),
                "{head}"
            );
            assert!(
                text.contains("# TYPE nvme_mpt_drive_resets_total counter\n"),
                "{text}"
            );
            let open = get(&address, "application/openmetrics-text; version=1.0.0");
            assert!(
                open.contains("Content-Type: application/openmetrics-text"),
                "{open}"
            );
            assert!(open.ends_with("# EOF\n"), "{open}");
            drop(server);
        }
        assert!(!socket.exists());
    }

    #[test]
    fn clients_that_hang_hold_up_no_other() {
        let (_server, address) = server(&tcp_options("0"));
        let address = address.unwrap();
        // Slow clients: they send a part of a request, read no answer, or send nothing.
        let mut slow = connect(&address);
        slow.write_all(b"GET /metr").unwrap();
        let mut deaf = connect(&address);
        deaf.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let idle = connect(&address);
        assert!(get(&address, "*/*").starts_with("HTTP/1.1 200"));
        slow.write_all(b"ics HTTP/1.1\r\n\r\n").unwrap();
        let mut answer = String::new();
        slow.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        drop((deaf, idle));
        assert!(get(&address, "*/*").starts_with("HTTP/1.1 200"));
    }

    #[test]
    fn many_silent_clients_delay_no_scrape() {
        let (_server, address) = server(&tcp_options("0"));
        let address = address.unwrap();
        let mut held: Vec<_> = (0..4 * CLIENTS_MAX).map(|_| connect(&address)).collect();
        assert!(get(&address, "*/*").starts_with("HTTP/1.1 200"));
        // The first connections were closed to make room for new clients.
        assert_eq!(held[0].read(&mut [0]).unwrap_or(0), 0);
    }

    #[test]
    fn invalid_requests_are_refused_and_the_next_scrape_is_served() {
        let (_server, address) = server(&tcp_options("0"));
        let address = address.unwrap();
        for (request, status) in [
            (&b"POST /metrics HTTP/1.1\r\n\r\n"[..], "405"),
            (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", "400"),
            (b"GET /etc/passwd HTTP/1.1\r\n\r\n", "404"),
        ] {
            let mut stream = connect(&address);
            stream.write_all(request).unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            assert!(
                answer.starts_with(&format!("HTTP/1.1 {status}")),
                "{answer}"
            );
        }
        assert!(get(&address, "*/*").starts_with("HTTP/1.1 200"));
    }

    #[test]
    fn clients_that_ask_at_once_share_a_text() {
        let mut cache = MetricsTextCache {
            source: Arc::new(CountingMetricsSource(Arc::default())),
            monotonic_pollers: MonotonicPollerStats::default(),
            texts: Vec::new(),
        };
        let first = cache.text(MetricsFormat::Prometheus);
        cache.texts[0].1 = clock::monotonic() + TIMEOUT;
        assert!(Arc::ptr_eq(&first, &cache.text(MetricsFormat::Prometheus)));
        // Expires the cached texts.
        cache.texts.clear();
        assert!(!Arc::ptr_eq(&first, &cache.text(MetricsFormat::Prometheus)));
    }

    /// Timeout that exceeds any delay of a busy machine.
    const TIMEOUT: Duration = Duration::from_secs(180);

    #[test]
    fn the_metrics_file_exists_while_the_server_runs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("nvme-mpt.prom");
        let options = MetricsOptions {
            file: Some(path.clone()),
            ..MetricsOptions::default()
        };
        let listener = MetricsListener::bind(&options).unwrap();
        let at_first = fs::read_to_string(&path).unwrap();
        assert!(at_first.contains("nvme_mpt_build_info"), "{at_first}");
        let server = MetricsServer::start(listener, CountingMetricsSource(Arc::default())).unwrap();
        let deadline = clock::monotonic() + TIMEOUT;
        // Every read must find a complete file.
        while clock::monotonic() < deadline {
            let text = fs::read_to_string(&path).unwrap();
            assert!(
                text.ends_with('\n') && text.contains("nvme_mpt_wipes_total"),
                "{text}"
            );
            if text.contains("nvme_mpt_function_up") {
                break;
            }
            clock::sleep(Duration::from_millis(1));
        }
        assert!(
            fs::read_to_string(&path)
                .unwrap()
                .contains("function=\"vm-1\"")
        );
        drop(server);
        assert_eq!(dir.path().read_dir().unwrap().count(), 0);
    }

    #[test]
    fn a_metrics_file_that_the_node_exporter_ignores_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["nvme-mpt.txt", "nvme-mpt", "prom"] {
            let file = Some(dir.path().join(name));
            let error = MetricsListener::bind(&MetricsOptions {
                file,
                ..MetricsOptions::default()
            });
            let message = error.unwrap_err().to_string();
            assert!(
                message.contains(&format!("/{name}: use --metrics-file")),
                "{message}"
            );
            assert!(message.ends_with(".prom"), "{message}");
        }
        assert_eq!(dir.path().read_dir().unwrap().count(), 0);
    }

    #[test]
    fn an_unavailable_metrics_address_is_named_in_the_error() {
        let dir = tempfile::tempdir().unwrap();
        let file = Some(dir.path().join("absent/nvme-mpt.prom"));
        let error = MetricsListener::bind(&MetricsOptions {
            file,
            ..MetricsOptions::default()
        });
        assert!(error.unwrap_err().to_string().contains("--metrics-file"));
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port().to_string();
        let error = MetricsListener::bind(&tcp_options(&port)).unwrap_err();
        assert!(error.to_string().contains(&port), "{error}");
    }
}

//! Metrics of a server for Prometheus: over HTTP, and as a file for the node exporter.
//!
//! - `families`: the metrics
//! - `export`: formats metrics as text
//! - `http`: one HTTP client
//! - `server`: the thread that serves clients and writes the file
//! - `health`: polls the drives' health, even if metrics are not exported
//!
//! The metrics thread requests statistics directly from the functions' control threads. So a scrape takes no time of
//! pollers, and does not wait for clients of the control socket.

mod export;
mod families;
mod health;
mod http;
mod server;

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use nvme_mpt::Drive;
use nvme_mpt_paths::PathError;
use thiserror::Error;

pub use self::export::{MetricsFormat, MetricsSnapshot};
pub use self::health::{HealthAnswers, ProcessStats};
pub use self::server::{MetricsListener, MetricsServer};

/// Address on which metrics are served over HTTP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsAddress {
    /// A TCP socket.
    Tcp(SocketAddr),
    /// A Unix socket, accessible only to the server's user.
    Unix(PathBuf),
}

/// Error of parsing a [`MetricsAddress`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "\"{0}\" is not an address for metrics: use PORT (on the loopback interface), ADDRESS:PORT or unix:PATH"
)]
pub struct MetricsAddressError(String);

impl FromStr for MetricsAddress {
    type Err = MetricsAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || MetricsAddressError(text.to_owned());
        if let Some(path) = text.strip_prefix("unix:") {
            return match path {
                "" => Err(wrong()),
                path => Ok(Self::Unix(path.into())),
            };
        }
        // A bare port must not expose metrics to other hosts.
        let loopback = |port| SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port);
        let address = text.parse().map(loopback).or_else(|_| text.parse());
        address.map(Self::Tcp).map_err(|_| wrong())
    }
}

/// Destination of a server's metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetricsOptions {
    /// HTTP address.
    pub address: Option<MetricsAddress>,
    /// Names of this host that clients may use over TCP, in addition to IP addresses, `localhost` and the host name.
    pub hosts: Vec<String>,
    /// File for the node exporter.
    pub file: Option<PathBuf>,
}

/// Error of exporting metrics.
#[derive(Debug, Error)]
pub enum MetricsError {
    /// The address cannot be used.
    #[error("Cannot offer metrics on {address}; choose another --metrics")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Cause.
        source: io::Error,
    },
    /// The socket cannot be bound.
    #[error("Cannot offer metrics on a socket; choose another --metrics")]
    Socket(#[source] vfio_user_server::Error),
    /// The file cannot be written.
    #[error(
        "Cannot write the metrics file {}; choose another --metrics-file in a directory that exists",
        path.display()
    )]
    File {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: PathError,
    },
    /// The node exporter would not read the file.
    #[error(
        "The node exporter reads only files whose names end in .prom, and so not {}: use --metrics-file {}",
        path.display(),
        path.with_extension("prom").display()
    )]
    FileName {
        /// The file.
        path: PathBuf,
    },
    /// The thread or its pipe cannot be created.
    #[error("Cannot start the thread of metrics")]
    Thread(#[source] io::Error),
}

/// Source of a server's statistics.
pub trait MetricsSource: Send + Sync + 'static {
    /// Takes a snapshot of the statistics. Waits at most one second for functions.
    fn snapshot(&self) -> MetricsSnapshot;

    /// Returns the open drives, without duplicates.
    fn drives(&self) -> Vec<Arc<Drive>>;

    /// Returns the answers of the health thread, which it fills and which snapshots include.
    fn health(&self) -> HealthAnswers;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_is_on_the_loopback_interface() {
        let address = |text: &str| text.parse::<MetricsAddress>();
        let tcp = |text: &str| Ok(MetricsAddress::Tcp(text.parse().unwrap()));
        assert_eq!(address("9469"), tcp("127.0.0.1:9469"));
        assert_eq!(address("0.0.0.0:9469"), tcp("0.0.0.0:9469"));
        assert_eq!(address("[::1]:9469"), tcp("[::1]:9469"));
        assert_eq!(
            address("unix:/run/m.sock"),
            Ok(MetricsAddress::Unix("/run/m.sock".into()))
        );
        for text in ["", "unix:", "65536", "localhost", "/run/m.sock", "1.2.3.4"] {
            let error = address(text).unwrap_err();
            assert!(error.to_string().contains("PORT"), "{text}: {error}");
        }
    }
}

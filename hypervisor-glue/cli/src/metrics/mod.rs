//! Metrics of a server for Prometheus: over HTTP, and in a file for the node exporter.
//!
//! `families` has the metrics, `export` writes them as text, `http` is one client, and `server` is the thread that serves
//! clients and writes the file. `health` asks drives for their health, also in a server without a place for metrics.
//!
//! The thread asks functions for their figures as `nvme-mpt stats` does, so a scrape takes nothing from a poller and does
//! not wait for the control socket.

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

pub use self::export::{Format, Snapshot};
pub use self::health::{HealthAnswers, ProcessFigures};
pub use self::server::{MetricsListener, MetricsServer};

/// Place where metrics are offered over HTTP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsAddress {
    /// A TCP socket.
    Tcp(SocketAddr),
    /// A Unix socket, for this user alone.
    Unix(PathBuf),
}

/// Text that is no [`MetricsAddress`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "\"{0}\" is no place for metrics: use PORT (on the loopback interface), ADDRESS:PORT or unix:PATH"
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
        // Who names a port alone offers nothing to other hosts.
        let loopback = |port| SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port);
        let address = text.parse().map(loopback).or_else(|_| text.parse());
        address.map(Self::Tcp).map_err(|_| wrong())
    }
}

/// Ways in which a server offers its metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetricsOptions {
    /// Over HTTP.
    pub address: Option<MetricsAddress>,
    /// Names of this host by which clients may ask over TCP, beside addresses, `localhost` and the host's own name.
    pub hosts: Vec<String>,
    /// In a file.
    pub file: Option<PathBuf>,
}

/// Metrics cannot be offered.
#[derive(Debug, Error)]
pub enum MetricsError {
    /// The address cannot be used.
    #[error("Cannot offer metrics on {address}; choose another --metrics")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// The socket cannot be made.
    #[error("Cannot offer metrics on a socket; choose another --metrics")]
    Socket(#[source] vfio_user_server::Error),
    /// The file cannot be written.
    #[error("Cannot write the metrics file {}; choose another --metrics-file in a folder that exists", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: PathError,
    },
    /// The thread or what it waits with cannot be made.
    #[error("Cannot start the thread of metrics")]
    Thread(#[source] io::Error),
}

/// Source of a server's figures.
pub trait Source: Send + Sync + 'static {
    /// Returns the figures of now. It waits for functions for a second at most.
    fn snapshot(&self) -> Snapshot;

    /// Returns the drives that are open, each once.
    fn drives(&self) -> Vec<Arc<Drive>>;

    /// Returns the place for the drives' answers about their health. Snapshots have them.
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

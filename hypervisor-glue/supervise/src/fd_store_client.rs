//! The server's messages to its supervisor.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::SendFlags;
use rustix::pipe::{PipeFlags, pipe_with};

use crate::datagram::{self, DESCRIPTORS_MAX};
use crate::error::FdStoreError;

/// Timeout for sending a message while the supervisor's queue is full.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// Connection to the process's supervisor.
#[derive(Debug)]
pub struct FdStoreClient {
    address: OsString,
    socket: UnixDatagram,
    max: u64,
}

impl FdStoreClient {
    /// Connects to the supervisor at the address in `NOTIFY_SOCKET`. Returns `None` if the variable is not set.
    ///
    /// # Errors
    ///
    /// `NOTIFY_SOCKET` is malformed, or nothing listens at its address.
    pub fn from_env() -> Result<Option<Self>, FdStoreError> {
        let Some(address) = env::var_os("NOTIFY_SOCKET") else {
            return Ok(None);
        };
        let limit = env::var_os("FDSTORE").unwrap_or_else(|| "0".into());
        let number = limit.to_str().and_then(|limit| limit.parse::<u64>().ok());
        let Some(number) = number else {
            let (name, value) = ("FDSTORE", limit);
            return Err(FdStoreError::Variable { name, value });
        };
        Self::connect(&address, number).map(Some)
    }

    /// Connects to the supervisor at an address: a path, or `@` and an abstract name. `max` is the maximum number of
    /// descriptors that the supervisor stores.
    ///
    /// # Errors
    ///
    /// The address has another form, or nothing listens there.
    pub fn connect(address: &OsStr, max: u64) -> Result<Self, FdStoreError> {
        let place = match address.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
            [b'/', ..] => SocketAddr::from_pathname(address),
            _ => {
                let (name, value) = ("NOTIFY_SOCKET", address.to_owned());
                return Err(FdStoreError::Variable { name, value });
            }
        };
        let address = address.to_owned();
        match place.and_then(|place| connect_socket(&place)) {
            Ok(socket) => Ok(Self {
                address,
                socket,
                max,
            }),
            Err(source) => Err(FdStoreError::Connect { address, source }),
        }
    }

    /// Returns the environment variables with which another process of the server finds this supervisor.
    #[must_use]
    pub fn env_variables(&self) -> [(&'static str, OsString); 2] {
        [
            ("NOTIFY_SOCKET", self.address.clone()),
            ("FDSTORE", self.max.to_string().into()),
        ]
    }

    /// Returns whether the supervisor's process has ended. A connection to the supervisor's socket shows this without waking
    /// the supervisor. If the socket's file is missing, the check sends an empty message instead, which wakes a running
    /// supervisor.
    #[must_use]
    pub fn has_supervisor_ended(&self) -> bool {
        match Self::connect(&self.address, self.max) {
            Err(FdStoreError::Connect { source, .. }) => match source.kind() {
                io::ErrorKind::ConnectionRefused => true,
                // A cleanup of temporary files may have removed the socket's file of a supervisor that runs.
                io::ErrorKind::NotFound => {
                    let sent = self.send_with("", &[], SendFlags::DONTWAIT);
                    sent.is_err_and(|error| error.is_supervisor_gone())
                }
                _ => false,
            },
            _ => false,
        }
    }

    /// Returns whether the supervisor stores descriptors (`FDSTORE`, which systemd sets since version 254).
    #[must_use]
    pub fn can_store(&self) -> bool {
        self.max > 0
    }

    /// Returns the maximum number of descriptors that the supervisor stores (`FDSTORE`); zero if it does not store
    /// descriptors.
    #[must_use]
    pub fn max(&self) -> u64 {
        self.max
    }

    /// Adds descriptors to the supervisor's store. Descriptors already stored under that name stay.
    ///
    /// A supervisor sends no reply. A supervisor that already stores [`Self::max`] descriptors silently closes further
    /// ones, so the caller must count the stored descriptors. Up to [`DESCRIPTORS_MAX`] descriptors are stored atomically:
    /// after a crash of the caller, all or none are stored. If a descriptor is already stored under another name, it stays
    /// under that name only.
    ///
    /// # Errors
    ///
    /// The name is invalid, or the supervisor is gone or stuck.
    pub fn store(&self, name: &str, descriptors: &[BorrowedFd<'_>]) -> Result<(), FdStoreError> {
        check_name(name)?;
        let text = format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}");
        for some in descriptors.chunks(DESCRIPTORS_MAX) {
            self.send(&text, some)?;
        }
        Ok(())
    }

    /// Removes all descriptors of a name from the supervisor's store.
    pub fn remove(&self, name: &str) -> Result<(), FdStoreError> {
        check_name(name)?;
        self.send(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), &[])
    }

    /// Sends assignments of `sd_notify(3)`, one per line, for example `READY=1`; at most 4096 bytes.
    ///
    /// # Errors
    ///
    /// The supervisor is gone or stuck.
    pub fn notify(&self, assignments: &str) -> Result<(), FdStoreError> {
        self.send(assignments, &[])
    }

    /// Waits until the supervisor has processed all earlier messages. If a signal interrupts the wait, the timeout starts
    /// again.
    ///
    /// # Errors
    ///
    /// The supervisor is gone, or has not processed the messages within the timeout.
    pub fn barrier(&self, timeout: Duration) -> Result<(), FdStoreError> {
        let pipe = pipe_with(PipeFlags::CLOEXEC);
        let (ours, theirs) =
            pipe.map_err(|error| FdStoreError::system("make a pipe for a barrier", error))?;
        self.send("BARRIER=1", &[theirs.as_fd()])?;
        drop(theirs);
        let time = Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        // The supervisor closes its copy of the pipe's writing end. poll reports this hang-up even if no events are requested.
        let mut ends = [PollFd::new(&ours, PollFlags::empty())];
        let ended = retry_on_intr(|| poll(&mut ends, Some(&time)));
        match ended.map_err(|error| FdStoreError::system("wait for a barrier", error))? {
            0 => Err(FdStoreError::Barrier {
                milliseconds: timeout.as_millis(),
            }),
            _ => Ok(()),
        }
    }

    fn send(&self, text: &str, descriptors: &[BorrowedFd<'_>]) -> Result<(), FdStoreError> {
        self.send_with(text, descriptors, SendFlags::empty())
    }

    fn send_with(
        &self,
        text: &str,
        descriptors: &[BorrowedFd<'_>],
        flags: SendFlags,
    ) -> Result<(), FdStoreError> {
        let sent = datagram::send(&self.socket, text.as_bytes(), descriptors, flags);
        sent.map_err(|error| match error {
            // The first message after the supervisor's end and later messages fail with different errors.
            Errno::CONNREFUSED | Errno::CONNRESET | Errno::NOTCONN => FdStoreError::Gone {
                source: error.into(),
            },
            _ => FdStoreError::Send {
                message: text.to_owned(),
                source: error.into(),
            },
        })
    }
}

fn connect_socket(address: &SocketAddr) -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(address)?;
    socket.set_write_timeout(Some(SEND_TIMEOUT))?;
    Ok(socket)
}

/// Returns whether a name is valid for stored descriptors.
pub(crate) fn is_valid_name(name: &str) -> bool {
    let printable = |byte: u8| matches!(byte, b' '..=b'~') && byte != b':';
    (1..=255).contains(&name.len()) && name.bytes().all(printable)
}

fn check_name(name: &str) -> Result<(), FdStoreError> {
    match is_valid_name(name) {
        true => Ok(()),
        false => Err(FdStoreError::Name {
            name: name.to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use rustix::net::RecvFlags;

    use super::*;

    #[test]
    fn a_name_is_printable_has_no_colon_and_fits() {
        for name in ["a", "bag 7", "~", &"n".repeat(255)] {
            assert!(is_valid_name(name), "{name}");
        }
        for name in ["", "a:b", "a\nb", "\u{7f}", "ä", &"n".repeat(256)] {
            assert!(!is_valid_name(name), "{name}");
        }
    }

    fn bind_supervisor() -> (tempfile::TempDir, UnixDatagram, FdStoreClient) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        let store = FdStoreClient::connect(path.as_os_str(), 4096).unwrap();
        (dir, socket, store)
    }

    fn next(socket: &UnixDatagram) -> (String, usize) {
        let mut buffer = [0; 512];
        let came = datagram::receive(socket, &mut buffer, RecvFlags::DONTWAIT).unwrap();
        assert!(!came.is_truncated);
        let text = String::from_utf8(buffer[..came.bytes].to_vec()).unwrap();
        (text, came.descriptors.len())
    }

    #[test]
    fn messages_have_the_form_of_sd_notify() {
        let (_dir, socket, store) = bind_supervisor();
        let descriptor = socket.as_fd();
        store.store("drive 0", &[descriptor; 254]).unwrap();
        let stored = "FDSTORE=1\nFDPOLL=0\nFDNAME=drive 0".to_owned();
        assert_eq!(next(&socket), (stored.clone(), 253));
        assert_eq!(next(&socket), (stored, 1));
        store.remove("drive 0").unwrap();
        let removed = "FDSTOREREMOVE=1\nFDNAME=drive 0".to_owned();
        assert_eq!(next(&socket), (removed, 0));
        assert!(matches!(
            store.remove("a:b"),
            Err(FdStoreError::Name { name }) if name == "a:b"
        ));
    }

    #[test]
    fn a_barrier_ends_when_the_supervisor_closes_its_end() {
        let (_dir, socket, store) = bind_supervisor();
        let passed = store.barrier(Duration::ZERO);
        assert!(matches!(
            passed,
            Err(FdStoreError::Barrier { milliseconds: 0 })
        ));
        assert_eq!(next(&socket), ("BARRIER=1".to_owned(), 1));
        // The kernel closes the descriptors in the queue of a supervisor that has ended.
        drop(socket);
        for _ in 0..3 {
            assert!(matches!(
                store.barrier(Duration::MAX),
                Err(FdStoreError::Gone { .. })
            ));
        }
    }

    #[test]
    fn the_end_of_a_supervisor_is_seen_with_and_without_the_path_of_its_socket() {
        for loses_path in [false, true] {
            let (dir, socket, store) = bind_supervisor();
            assert!(!store.has_supervisor_ended());
            if loses_path {
                std::fs::remove_file(dir.path().join("notify")).unwrap();
                assert!(!store.has_supervisor_ended());
                assert_eq!(next(&socket), (String::new(), 0));
            }
            let none = datagram::receive(&socket, &mut [0; 8], RecvFlags::DONTWAIT);
            assert_eq!(none.err(), Some(Errno::AGAIN), "it was woken");
            drop(socket);
            assert!(store.has_supervisor_ended() && store.has_supervisor_ended());
        }
    }

    #[test]
    fn an_address_is_a_path_or_an_abstract_name() {
        for address in ["", "vsock:2:1", "relative"] {
            let refused = FdStoreClient::connect(OsStr::new(address), 1);
            assert!(
                matches!(refused, Err(FdStoreError::Variable { .. })),
                "{address}"
            );
        }
        let nowhere = FdStoreClient::connect(OsStr::new("@nvme-mpt-supervise/nobody-listens"), 1);
        assert!(matches!(nowhere, Err(FdStoreError::Connect { .. })));
    }
}

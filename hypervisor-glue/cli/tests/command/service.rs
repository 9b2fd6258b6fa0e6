//! The service.

use std::os::unix::net::UnixDatagram;

use crate::support::{Bench, PATIENCE, Server};

#[test]
fn a_manager_that_keeps_nothing_is_told_as_well() {
    let bench = Bench::new();
    let manager = UnixDatagram::bind(bench.path("notify")).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let next = || {
        let mut message = [0; 64];
        let length = manager.recv(&mut message).unwrap();
        String::from_utf8(message[..length].to_vec()).unwrap()
    };
    let mut serve = bench.serve_command("one", &[]);
    serve.env("NOTIFY_SOCKET", bench.path("notify"));
    let server = Server::start(serve).unwrap();
    assert_eq!(next(), "READY=1");
    server.stop();
    assert_eq!(next(), "STOPPING=1");
}

//! Checks of a server's metrics, as Prometheus and the node exporter read them.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use vfio_user::Client;

use crate::support::{Bench, Server, TIMEOUT};

/// Returns the metrics of a server whose socket is `m.sock`. Repeats the scrape until `complete` accepts the text.
fn scrape(bench: &Bench, complete: impl Fn(&str) -> bool) -> String {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let mut stream = UnixStream::connect(bench.path("m.sock")).unwrap();
        let mut answer = String::new();
        let request = stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n");
        let answered = request.and_then(|()| stream.read_to_string(&mut answer));
        // If the host holds up the client for some seconds, the server closes the connection. Then the answer is empty.
        if answered.is_ok_and(|length| length > 0) {
            assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
            if complete(&answer) {
                return answer;
            }
        }
        assert!(Instant::now() < deadline, "{answer}");
        thread::sleep(Duration::from_millis(100));
    }
}

fn serve(bench: &Bench, functions: &[&str]) -> Server {
    let mut serve = bench.serve_command("one", functions);
    serve.args(["--metrics", "unix:m.sock", "--metrics-file", "m.prom"]);
    Server::start(serve).unwrap()
}

#[test]
fn metrics_show_functions_that_are_added_connected_and_removed() {
    let bench = Bench::new();
    let server = serve(
        &bench,
        &["socket=a.sock,path=drive.img,range=0+16M,id=a,iops=1000"],
    );
    let waits = scrape(&bench, |text| {
        text.contains("function_up{function=\"a\"} 1")
    });
    for line in [
        "nvme_mpt_function_connected{function=\"a\"} 0",
        "nvme_mpt_function_capacity_bytes{function=\"a\"} 16777216",
        "nvme_mpt_wiped_bytes_total 0",
    ] {
        assert!(waits.contains(line), "{line}: {waits}");
    }
    let mut client = Client::new(&bench.path("a.sock")).unwrap();
    client.region_read(0, 8, &mut [0; 4]).unwrap();
    scrape(&bench, |text| {
        text.contains("function_connected{function=\"a\"} 1")
    });

    let other = "socket=b.sock,path=drive.img,range=16M+16M,id=b";
    bench.ask("add", &[other]).unwrap();
    // The server may send a text that it created before the function was complete, so the scrape is repeated.
    let lease = "nvme_mpt_lease_extents{lease=\"b\",drive=\"";
    scrape(&bench, |text| {
        text.contains("function_up{function=\"b\"} 1") && text.contains(lease)
    });
    bench.ask("remove", &["b"]).unwrap();
    scrape(&bench, |text| !text.contains("\"b\""));

    let next = "socket=c.sock,path=drive.img,range=16M+16M,id=c,data=wipe";
    bench.ask("add", &[next]).unwrap();
    let wiped = scrape(&bench, |text| {
        text.contains("function_up{function=\"c\"} 1") && text.contains("wipes_total 1")
    });
    for line in [
        "nvme_mpt_wiped_bytes_total 16777216",
        "nvme_mpt_wipes_total 1",
    ] {
        assert!(wiped.contains(line), "{line}: {wiped}");
    }
    bench.ask("remove", &["c"]).unwrap();

    let file = fs::read_to_string(bench.path("m.prom")).unwrap();
    assert!(file.contains("# TYPE nvme_mpt_build_info gauge"), "{file}");
    let (status, log) = server.signal("TERM");
    assert!(status.success() && log.contains("is wiped"), "{log}");
    assert_eq!(
        bench.names(),
        ["drive.img", "one.control.functions.toml", "state"]
    );
}

#[test]
fn a_hanging_metrics_client_blocks_neither_the_server_nor_its_stop() {
    let bench = Bench::new();
    let server = serve(&bench, &["socket=a.sock,path=drive.img,id=a"]);
    let mut hanging: Vec<UnixStream> = Vec::new();
    for _ in 0..8 {
        let mut stream = UnixStream::connect(bench.path("m.sock")).unwrap();
        stream.write_all(b"GET /metr").unwrap();
        hanging.push(stream);
    }
    scrape(&bench, |text| {
        text.contains("function_up{function=\"a\"} 1")
    });
    bench.ask("stats", &[]).unwrap();
    server.stop();
    drop(hanging);
}

#[test]
fn a_used_metrics_address_is_refused_before_a_drive_is_opened() {
    let bench = Bench::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let mut serve = bench.serve_command("one", &["socket=a.sock,path=absent.img"]);
    serve.args(["--metrics", &port]);
    let refused = Server::start(serve).unwrap_err();
    assert!(
        refused.stderr.contains("choose another --metrics"),
        "{refused:?}"
    );
    assert_eq!(bench.names(), ["drive.img"]);
}

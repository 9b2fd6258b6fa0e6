//! `nvme-mpt serve` and `stats` as operators, VMMs and monitoring tools use them.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::Instant;

use crate::support::{Bench, Server, TIMEOUT, exists};
use vfio_user::Client;

/// Offsets in BAR0 (Base 2.0, section 3.1.3).
const VS: u64 = 0x08;
const CC: u64 = 0x14;
const CSTS: u64 = 0x1C;
/// Region numbers of a PCI function.
const BAR0: u32 = 0;
const CONFIG: u32 = 7;

fn read_u32(client: &mut Client, region: u32, offset: u64) -> u32 {
    let mut data = [0; 4];
    client.region_read(region, offset, &mut data).unwrap();
    u32::from_le_bytes(data)
}

#[test]
fn a_client_finds_an_nvme_controller_and_so_does_the_next() {
    let bench = Bench::new();
    let server = bench
        .serve("one", &["socket=a.sock,path=drive.img,range=0+16M"])
        .unwrap();
    for _ in 0..3 {
        let mut client = Client::new(&bench.path("a.sock")).unwrap();
        assert_eq!(read_u32(&mut client, BAR0, VS), 0x0002_0000, "2.0");
        let class = read_u32(&mut client, CONFIG, 0x08) >> 8;
        assert_eq!(class, 0x01_08_02, "NVM Express I/O controller");
        // The first client changed this register in its own controller, which was reset when it disconnected.
        assert_eq!(read_u32(&mut client, BAR0, CC), 0);
        client
            .region_write(BAR0, CC, &0x0046_0000_u32.to_le_bytes())
            .unwrap();
        assert_eq!(read_u32(&mut client, BAR0, CC), 0x0046_0000);
        assert_eq!(read_u32(&mut client, BAR0, CSTS) & 1, 0);
        client.shutdown().unwrap();
    }
    server.stop();
}

#[test]
fn sigterm_and_sigint_stop_the_server_with_and_without_clients() {
    for signal in ["TERM", "INT"] {
        let bench = Bench::new();
        let server = bench
            .serve(
                "one",
                &[
                    "socket=a.sock,path=drive.img,range=0+16M",
                    "socket=b.sock,path=memory:16M",
                ],
            )
            .unwrap();
        let _idle = Client::new(&bench.path("a.sock")).unwrap();
        let mut half = UnixStream::connect(bench.path("b.sock")).unwrap();
        half.write_all(&[1, 0, 1]).unwrap();
        let (status, stderr) = server.signal(signal);
        assert!(status.success(), "{signal}: {status}: {stderr}");
        assert_eq!(bench.names(), ["drive.img", "state"], "{signal}");
        assert_eq!(bench.leases(), [], "{signal}");
    }
}

#[test]
fn a_second_signal_does_not_shorten_the_stop() {
    for (first, second) in [("TERM", "INT"), ("INT", "TERM")] {
        let bench = Bench::new();
        let server = bench
            .serve("one", &["socket=a.sock,path=drive.img,range=0+16M"])
            .unwrap();
        // The server is stopped, so that both signals are pending when it continues.
        for signal in ["STOP", first, second] {
            server.send(signal);
        }
        let (status, stderr) = server.signal("CONT");
        assert!(status.success(), "{first}, {second}: {status}: {stderr}");
        assert_eq!(bench.leases(), [], "{first}, {second}");
        assert_eq!(bench.names(), ["drive.img", "state"]);
    }
}

#[test]
fn other_signals_end_no_server_and_sighup_reloads_its_file() {
    let bench = Bench::new();
    let function = |id: &str| {
        let drive = if id == "a" { "memory:1M" } else { "memory:2M" };
        format!("[[function]]\nid = \"{id}\"\nsocket = \"{id}.sock\"\npath = \"{drive}\"\n")
    };
    fs::write(bench.path("serve.toml"), function("a")).unwrap();
    let mut serve = bench.serve_command("one", &[]);
    serve.args(["--config", "serve.toml"]);
    let server = Server::start(serve).unwrap();
    let mut client = Client::new(&bench.path("a.sock")).unwrap();
    for signal in [
        "ALRM", "IO", "PIPE", "PROF", "PWR", "TTIN", "TTOU", "USR1", "USR2", "VTALRM", "XCPU",
        "XFSZ",
    ] {
        server.send(signal);
        assert_eq!(read_u32(&mut client, BAR0, VS), 0x0002_0000, "{signal}");
    }
    fs::write(
        bench.path("serve.toml"),
        [function("a"), function("b")].concat(),
    )
    .unwrap();
    server.send("HUP");
    let has_b = |printed: &str| printed.contains("b.sock");
    let listed = bench.ask_until("list", &[], has_b).unwrap();
    assert!(has_b(&listed), "{listed}");
    assert_eq!(read_u32(&mut client, BAR0, VS), 0x0002_0000);
    // An invalid file changes nothing.
    fs::write(bench.path("serve.toml"), "[[function").unwrap();
    server.send("HUP");
    assert_eq!(read_u32(&mut client, BAR0, VS), 0x0002_0000);
    client.shutdown().unwrap();
    let (status, stderr) = server.signal("TERM");
    assert!(status.success(), "{status}: {stderr}");
}

#[test]
fn the_printed_arguments_attach_each_function() {
    let bench = Bench::new();
    let server = bench
        .serve(
            "one",
            &["socket=a.sock,path=drive.img,range=16M+16M,id=vm-1,queues=4"],
        )
        .unwrap();
    let socket = bench.path("a.sock");
    let socket = socket.display();
    for part in [
        format!("Function vm-1 on {socket}\n"),
        "drive.img, range 16M+16M (32768 blocks of 512 bytes); serial MPT".to_owned(),
        "doorbells auto, poll shared, 4 queue pairs".to_owned(),
        format!("--memory size=2G,shared=on --user-device socket={socket},id=vm-1\n"),
        "-object memory-backend-memfd,id=mem0,size=2G,share=on".to_owned(),
        format!(r#""socket":{{"path":"{socket}","type":"unix"}}"#),
    ] {
        assert!(server.printed.contains(&part), "{part}: {}", server.printed);
    }
    server.stop();
}

#[test]
fn a_start_that_fails_leaves_nothing_behind() {
    let bench = Bench::new();
    let good = "socket=a.sock,path=drive.img,range=0+16M";
    for (bad, message) in [
        ("socket=b.sock,path=none.img", "truncate -s"),
        (
            "socket=b.sock,path=drive.img,range=48M+32M",
            "the longest range from there is 48M+16M",
        ),
        (
            "socket=b.sock,path=drive.img,range=8M+16M",
            "choose ranges that do not overlap",
        ),
        (
            "socket=./a.sock,path=memory:1M",
            "Two functions have the socket",
        ),
        (
            "socket=no/such/b.sock,path=memory:1M",
            "No such file or directory",
        ),
        (
            "socket=b.sock,path=drive.img,range=16M+16M,lba=4096",
            "give the same lba= to each",
        ),
        ("socket=b.sock,path=ffff:ff:1f.7", "ffff:ff:1f.7"),
    ] {
        let good = if bad.contains("lba=") {
            format!("{good},lba=512")
        } else {
            good.to_owned()
        };
        let failure = bench.serve("one", &[&good, bad]).unwrap_err();
        assert_eq!(failure.status.code(), Some(1), "{bad}");
        assert!(
            failure.stderr.starts_with("nvme-mpt: ") && failure.stderr.contains(message),
            "{bad}: {}",
            failure.stderr
        );
        assert!(!exists(&bench.path("a.sock")), "{bad}");
        assert!(!exists(&bench.path("one.control")), "{bad}");
        assert_eq!(bench.leases(), [], "{bad}");
    }
    bench.serve("one", &[good]).unwrap().stop();
}

#[test]
fn wrong_options_are_reported_before_any_change() {
    let bench = Bench::new();
    let long = format!("socket=/{},path=memory:1M", "x".repeat(120));
    for (function, message) in [
        ("path=memory:1M", "Option \"socket\" is missing"),
        ("socket=a.sock", "Option \"path\" is missing"),
        (
            "socket=a.sock,path=memory:1M,length=1",
            "There is no option \"length\": the options are socket, mode, owner, path, range,",
        ),
        (
            "socket=a.sock,path=memory:1M,queues=0",
            "A function has 1 to 1024",
        ),
        (
            "socket=a.sock,path=memory:1X",
            "Option \"path\" cannot be \"memory:1X\"",
        ),
        (&long, "at most 107 bytes"),
    ] {
        let failure = bench.serve("one", &[function]).unwrap_err();
        assert_eq!(failure.status.code(), Some(2), "{function}");
        assert!(
            failure.stderr.contains(message),
            "{function}: {}",
            failure.stderr
        );
    }
    assert_eq!(bench.names(), ["drive.img"]);
}

#[test]
fn statistics_are_available_as_text_and_json() {
    let bench = Bench::new();
    let nobody = bench.run("stats", &["--control", "one.control"]);
    assert_eq!(nobody.status.code(), Some(1));
    let stderr = String::from_utf8(nobody.stderr).unwrap();
    assert!(stderr.contains("start `nvme-mpt serve`"), "{stderr}");

    let server = bench
        .serve("one", &["socket=a.sock,path=memory:1M,id=vm-1"])
        .unwrap();
    let has_function = |printed: &str| printed.contains("vm-1");
    let json = bench.ask_until("stats", &["--json"], has_function).unwrap();
    let stats: serde_json::Value = serde_json::from_str(&json).unwrap();
    let function = &stats["functions"][0];
    assert_eq!(function["id"], "vm-1");
    assert_eq!(function["socket"], bench.path("a.sock").to_str().unwrap());
    assert_eq!(function["capacity_bytes"], 1 << 20);
    assert_eq!(function["doorbells"], "auto");
    assert_eq!(function["admin"]["commands"], 0);
    assert!(stats["pollers"].is_array());

    let table = bench.ask_until("stats", &[], has_function).unwrap();
    assert!(table.starts_with("vm-1: ") && table.contains("doorbell exits"));

    // It is no error if the reader of a command's output closes the pipe early.
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let watch = ["--control", "one.control", "--json", "--watch", "0.1"];
        let mut watch = bench
            .command("stats", &watch)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
        let mut read = 0;
        for line in lines.by_ref().take(2) {
            serde_json::from_str::<serde_json::Value>(&line.unwrap()).unwrap();
            read += 1;
        }
        drop(lines);
        let output = watch.wait_with_output().unwrap();
        if output.status.success() {
            assert_eq!(read, 2, "{output:?}");
            break;
        }
        // If the host holds up the server, it does not answer in time.
        let message = String::from_utf8_lossy(&output.stderr);
        let held_up = message.contains("does not answer");
        assert!(held_up && Instant::now() < deadline, "{output:?}");
    }
    server.stop();
}

#[test]
fn a_noisy_client_does_not_flood_the_log() {
    let bench = Bench::new();
    let server = bench
        .serve(
            "one",
            &[
                "socket=a.sock,path=memory:1M,id=noisy",
                "socket=b.sock,path=memory:2M,id=quiet",
            ],
        )
        .unwrap();
    let started = Instant::now();
    for _ in 0..500 {
        let mut stream = UnixStream::connect(bench.path("a.sock")).unwrap();
        // No message has this size, so the server logs an error and closes the connection.
        let _ = stream.write_all(&[0xFF; 16]);
        let _ = stream.read(&mut [0; 64]);
    }
    drop(Client::new(&bench.path("b.sock")).unwrap());
    let (status, stderr) = server.signal("TERM");
    assert!(status.success());
    let noise = stderr.lines().count();
    // The budget allows 20 messages immediately and then one message each second. Each may be preceded by a line about
    // suppressed messages.
    let most = 40 + 2 * started.elapsed().as_secs() as usize;
    assert!((1..=most).contains(&noise), "{noise} lines: {stderr}");
    assert!(
        stderr.lines().all(|line| line.contains("[noisy]")),
        "{stderr}"
    );
}

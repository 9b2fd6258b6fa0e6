//! Tests of a server's log: its filter, and its fields in systemd's journal.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead, PipeWriter, Read, Write};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nvme_mpt_lease_protocol::VERSION;
use nvme_mpt_memory::clock;
use nvme_mpt_tests::admin::{LogPage, log};
use nvme_mpt_tests::bar::Bar;
use nvme_mpt_tests::controller::{Config, Controller};
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::not_checked::not_checked;
use nvme_mpt_tests::vfio_user::VfioUserBar;
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::process::{Pid, Signal, kill_process};
use vfio_user::Client;

use crate::support::{Bench, Server, TIMEOUT};

const FUNCTION: &str = "socket=a.sock,path=drive.img,id=a";

/// Shell script that runs a command with a directory mounted over the journal's. Standard error is a file, which
/// `JOURNAL_STREAM` declares to be the journal.
const IN_JOURNAL: &str = r#"
set -e
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/journal
mount --bind "$1" /run/systemd/journal
exec 2> "$2"
JOURNAL_STREAM=$(stat --dereference --format=%d:%i /proc/self/fd/2)
export JOURNAL_STREAM
shift 2
exec "$@"
"#;

#[test]
fn the_filter_of_the_log_changes_while_the_server_runs() {
    let bench = Bench::new();
    let mut serve = bench.serve_command("one", &[FUNCTION]);
    serve.args(["--log", "warn"]).env("RUST_LOG", "trace");
    let server = Server::start(serve).unwrap();
    assert_eq!(bench.ask("log", &[]).unwrap(), "warn\n");
    bench.ask("limit", &["a", "iops=500"]).unwrap();
    let wide = "warn,nvme_mpt_server=info";
    assert_eq!(bench.ask("log", &[wide]).unwrap(), format!("{wide}\n"));
    bench.ask("limit", &["a", "iops=600"]).unwrap();
    let narrow = bench.ask("log", &["--json", "error"]).unwrap();
    assert_eq!(narrow, "{\"log\":\"error\"}\n");
    bench.ask("limit", &["a", "iops=700"]).unwrap();
    let refused = bench.ask("log", &["inof"]).unwrap_err();
    assert!(refused.contains("'inof' is not a level"), "{refused}");
    assert_eq!(bench.ask("log", &[]).unwrap(), "error\n");

    let (status, log) = server.signal("TERM");
    assert!(status.success(), "{log}");
    let messages: Vec<_> = log
        .lines()
        .filter_map(|line| line.split_once("] "))
        .collect();
    // If the host holds up the client, the server closes the connection, and the client asks again.
    let unanswered = "Cannot answer a control client: ";
    let messages = messages.iter().map(|(_, message)| *message);
    let mut messages: Vec<_> = messages
        .filter(|message| !message.starts_with(unanswered))
        .collect();
    messages.dedup();
    assert_eq!(
        messages,
        [
            "The filter of the log is warn,nvme_mpt_server=info from now on",
            "Function a has new limits: iops=600",
            "The filter of the log is error from now on",
        ]
    );
}

#[test]
fn an_invalid_log_filter_in_the_environment_is_reported() {
    let bench = Bench::new();
    let mut serve = bench.serve_command("one", &[FUNCTION]);
    serve.env("RUST_LOG", "loud");
    let server = Server::start(serve).unwrap();
    assert_eq!(bench.ask("log", &[]).unwrap(), "info\n");
    let (status, log) = server.signal("TERM");
    assert!(status.success(), "{log}");
    assert!(
        log.contains("WARN [main] Ignored RUST_LOG: 'loud' is not a level"),
        "{log}"
    );
}

#[test]
fn a_server_without_functions_logs_how_to_add_one() {
    let none: &[&str] = &[];
    for (functions, hint) in [(none, true), (&[FUNCTION], false)] {
        let bench = Bench::new();
        let mut serve = bench.serve_command("one", functions);
        serve.args(["--log", "info"]);
        let server = Server::start(serve).unwrap();
        let (status, log) = server.signal("TERM");
        assert!(status.success(), "{log}");
        let line = "There is no function yet: add one with `nvme-mpt add --control ";
        let line = log.lines().find(|logged| logged.contains(line));
        assert_eq!(line.is_some(), hint, "{log}");
        assert!(
            line.is_none_or(|line| line.ends_with("one.control`")),
            "{log}"
        );
    }
}

/// Fills a pipe, as if its reader had stopped.
fn fill(mut writer: &PipeWriter) {
    fcntl_setfl(writer, OFlags::NONBLOCK).unwrap();
    // Single bytes fill the space that is too small for a block.
    for bytes in [&[b'x'; 4096][..], b"x"] {
        while writer.write(bytes).is_ok() {}
    }
    fcntl_setfl(writer, OFlags::empty()).unwrap();
}

#[test]
fn a_full_log_and_output_block_neither_start_nor_guests_nor_stop() {
    let bench = Bench::new();
    let (mut printed, stdout) = io::pipe().unwrap();
    let (mut logged, stderr) = io::pipe().unwrap();
    fill(&stdout);
    fill(&stderr);
    let neighbour = "socket=b.sock,path=memory:16M,id=b";
    let mut serve = bench.serve_command("one", &[FUNCTION, neighbour]);
    serve.args(["--log", "info"]);
    let mut server = serve.stdout(stdout).stderr(stderr).spawn().unwrap();
    // Dropped, because the command holds the ends of the pipes, too.
    drop(serve);
    let start = Instant::now();
    while bench
        .run("list", &["--control", "one.control"])
        .status
        .code()
        != Some(0)
    {
        assert!(start.elapsed() < TIMEOUT, "the server does not start");
        clock::sleep(Duration::from_millis(10));
    }
    let connect = |socket: &str| {
        let memory = GuestMemory::new(&[(1 << 20, 16 << 20)]).unwrap();
        let bar = VfioUserBar::attach(&bench.path(socket), &memory).unwrap();
        let bar: Arc<dyn Bar> = Arc::new(bar);
        let mut controller = Controller::attach(bar, memory, Config::default(), 1).unwrap();
        let disk = Disk::open(&mut controller, 1).unwrap();
        (controller, disk)
    };
    let (a, mut short) = connect("a.sock");
    let (b, mut whole) = connect("b.sock");
    // The poller, which serves both functions, reports that the file was truncated.
    let drive = fs::File::options()
        .write(true)
        .open(bench.path("drive.img"));
    drive.unwrap().set_len(1 << 20).unwrap();
    short.write(8 << 10, &[1; 512]).unwrap_err();
    for iops in 1..=10 {
        bench.ask("limit", &["a", &format!("iops={iops}")]).unwrap();
        whole.write(7, &[7; 512]).unwrap();
        assert_eq!(whole.read(7, 1).unwrap(), [7; 512]);
    }
    drop((short, a, whole, b));
    kill_process(Pid::from_child(&server), Signal::TERM).unwrap();
    server.wait().unwrap();
    let mut text = String::new();
    printed.read_to_string(&mut text).unwrap();
    assert_eq!(text.trim_matches('x'), "", "nothing of it had room");
    text.clear();
    logged.read_to_string(&mut text).unwrap();
    assert_eq!(text.trim_matches('x'), "", "nothing of it had room");
}

#[test]
fn a_returning_log_reader_gets_waiting_messages() {
    let bench = Bench::new();
    let (mut logged, stderr) = io::pipe().unwrap();
    fill(&stderr);
    let mut serve = bench.serve_command("one", &[FUNCTION]);
    serve.args(["--log", "info"]);
    let mut server = serve.stdout(Stdio::piped()).stderr(stderr).spawn().unwrap();
    drop(serve);
    let mut printed = io::BufReader::new(server.stdout.take().unwrap()).lines();
    while printed.next().unwrap().unwrap() != "ready" {}
    bench.ask("limit", &["a", "iops=500"]).unwrap();
    let read = std::thread::spawn(move || {
        let mut text = String::new();
        logged.read_to_string(&mut text).map(|_| text)
    });
    kill_process(Pid::from_child(&server), Signal::TERM).unwrap();
    assert!(server.wait().unwrap().success());
    let text = read.join().unwrap().unwrap();
    for message in ["has new limits: iops=500", "SIGTERM: no more clients"] {
        assert!(text.contains(message), "{message}: {text}");
    }
}

#[test]
fn text_of_clients_is_one_bounded_line_of_the_log() {
    let bench = Bench::new();
    let server = bench.serve("one", &[]).unwrap();
    bench.ask("log", &["info"]).unwrap();
    let forged = "a\\n2026-11-29T00:00:00.000000Z ERROR [main] Drive sda has failed\\u001b[31m";
    let long = "a".repeat(1 << 20);
    let sockets = fs::read_dir(bench.path("state/servers")).unwrap();
    let mut sockets = sockets.map(|entry| entry.unwrap().path());
    let socket = sockets.find(|path| path.extension().is_some_and(|is| is == "sock"));
    let socket = socket.unwrap();
    for id in [forged, &long] {
        let options = format!("path=drive.img,id={id},no-such-key=1");
        let ask = format!("{{\"version\":{VERSION},\"options\":\"{options}\"}}");
        let head = [ask.len() as u32, 0].map(u32::to_le_bytes).concat();
        let mut vmm = UnixStream::connect(&socket).unwrap();
        vmm.write_all(&[&head, ask.as_bytes()].concat()).unwrap();
        let mut answer = Vec::new();
        vmm.read_to_end(&mut answer).unwrap();
        assert!(!answer.is_empty(), "it is refused");
    }
    let (status, log) = server.signal("TERM");
    assert!(status.success(), "{log}");
    assert!(log.lines().all(|line| line.len() < 5000), "{log}");
    assert!(log.contains("is refused: "), "{log}");
    let is_message = |line: &str| {
        line.split_once("Z ")
            .is_some_and(|(_, rest)| rest.contains('['))
    };
    assert!(log.lines().all(is_message), "{log}");
    assert!(!log.contains('\u{1b}'), "{log}");
    assert!(
        !log.lines()
            .any(|line| line.starts_with("2026-11-29T00:00:00.000000Z")),
        "{log}"
    );
}

#[test]
fn messages_in_the_journal_have_their_function_and_its_lease() {
    if !nix::unistd::getuid().is_root() {
        return not_checked("root alone can put a folder in place of the journal's");
    }
    let bench = Bench::new();
    let dir = bench.path("journal");
    fs::create_dir(&dir).unwrap();
    let journal = UnixDatagram::bind(dir.join("socket")).unwrap();
    journal
        .set_read_timeout(Some(Duration::from_secs(180)))
        .unwrap();
    let await_message = |part: &str| loop {
        let mut entry = vec![0; 1 << 16];
        let length = journal.recv(&mut entry).unwrap();
        let fields = fields_of(&entry[..length]);
        if fields
            .get("MESSAGE")
            .is_some_and(|text| text.contains(part))
        {
            return fields;
        }
    };

    let serve = bench.serve_command("one", &[FUNCTION]);
    let errors = bench.path("errors");
    let mut inside = Command::new("unshare");
    inside
        .args(["--mount", "sh", "-c", IN_JOURNAL, "sh"])
        .args([&dir, &errors])
        .arg(serve.get_program())
        .args(serve.get_args())
        .args(["--log", "info"])
        .current_dir(bench.path(""))
        .stdin(Stdio::null());
    let server = Server::start(inside).unwrap();

    let client = Client::new(&bench.path("a.sock")).unwrap();
    let connected = await_message("A client has connected to");
    for (field, value) in [
        ("FUNCTION", "a"),
        ("LEASE", "a"),
        ("THREAD", "a"),
        ("PRIORITY", "5"),
        ("SYSLOG_IDENTIFIER", "nvme-mpt"),
    ] {
        assert_eq!(connected[field], value, "{field}");
    }
    bench.ask("limit", &["a", "iops=500"]).unwrap();
    let limited = await_message("has new limits: iops=500");
    assert_eq!(limited["FUNCTION"], "a");
    assert_eq!(limited["THREAD"], "changes");
    drop(client);
    assert_eq!(await_message("has disconnected")["FUNCTION"], "a");

    let (status, printed) = server.signal("TERM");
    assert!(status.success(), "{printed}");
    let ending = await_message("SIGTERM: no more clients are accepted");
    assert_eq!(ending.get("FUNCTION"), None);
    assert_eq!(fs::read_to_string(errors).unwrap(), "");
}

#[test]
fn a_truncated_and_replaced_file_is_logged_once() {
    let bench = Bench::new();
    let server = bench.serve("one", &[FUNCTION]).unwrap();
    let memory = GuestMemory::new(&[(1 << 20, 16 << 20)]).unwrap();
    let bar = VfioUserBar::attach(&bench.path("a.sock"), &memory).unwrap();
    let bar: Arc<dyn Bar> = Arc::new(bar);
    let mut controller = Controller::attach(bar, memory, Config::default(), 1).unwrap();

    let drive = bench.path("drive.img");
    let file = fs::File::options().write(true).open(&drive).unwrap();
    file.set_len(32 << 20).unwrap();
    fs::write(bench.path("other"), "").unwrap();
    fs::rename(bench.path("other"), &drive).unwrap();
    for _ in 0..3 {
        let health = LogPage::of_controller(log::SMART, 512);
        controller.log_page(health).unwrap();
    }
    drop(controller);
    // The exit status is ignored: the server cannot flush blocks beyond the end of the truncated file.
    let (_, log) = server.signal("TERM");
    for message in [
        "was cut short from 67108864 to 33554432 bytes",
        "was removed or replaced while it is served",
    ] {
        let lines = log.lines().filter(|line| line.contains(message));
        let lines: Vec<_> = lines.collect();
        assert_eq!(lines.len(), 1, "{message}:\n{log}");
        assert!(
            lines[0].contains(drive.to_str().unwrap()) && lines[0].contains("ERROR"),
            "{log}"
        );
    }
}

/// Returns the fields of an entry in the journal's native protocol. Values with line breaks are preceded by their length.
fn fields_of(entry: &[u8]) -> BTreeMap<String, String> {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let mut fields = BTreeMap::new();
    let mut rest = entry;
    while !rest.is_empty() {
        let end = rest.iter().position(|byte| *byte == b'\n').unwrap();
        let (line, after) = (&rest[..end], &rest[end + 1..]);
        if let Some(equals) = line.iter().position(|byte| *byte == b'=') {
            fields.insert(text(&line[..equals]), text(&line[equals + 1..]));
            rest = after;
            continue;
        }
        let (length, after) = after.split_first_chunk().unwrap();
        let (value, after) = after.split_at(u64::from_le_bytes(*length) as usize);
        fields.insert(text(line), text(value));
        rest = &after[1..];
    }
    fields
}

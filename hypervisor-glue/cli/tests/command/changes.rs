//! Tests that add functions to a running server, remove them, list them, and reload its configuration file.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use nvme_mpt_server::change::FunctionChange;
use nvme_mpt_server::control::request_change;
use nvme_mpt_tests::controller::{Config, Controller};
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::not_checked::not_checked;
use nvme_mpt_tests::vfio_user::VfioUserBar;
use serde_json::{Value, json};
use vfio_user::Client;

use crate::support::{Bench, Server, TIMEOUT, exists};

fn ask(bench: &Bench, command: &str, arguments: &[&str]) -> Result<String, String> {
    bench.ask(command, arguments)
}

/// Returns id, source of the declaration and state of each function that `nvme-mpt list` shows.
pub(crate) fn list(bench: &Bench) -> Vec<(String, String, String)> {
    let listed: Value = serde_json::from_str(&ask(bench, "list", &["--json"]).unwrap()).unwrap();
    let text = |value: &Value| match value {
        Value::String(text) => text.clone(),
        other => other.as_object().unwrap().keys().next().unwrap().clone(),
    };
    let entries = listed.as_array().unwrap().iter();
    let entries = entries.map(|entry| {
        (
            text(&entry["id"]),
            text(&entry["origin"]),
            text(&entry["state"]),
        )
    });
    entries.collect()
}

fn entry(id: &str, source: &str, state: &str) -> (String, String, String) {
    (id.to_owned(), source.to_owned(), state.to_owned())
}

/// Starts the server with a configuration file of functions and drives.
pub(crate) fn serve_file(bench: &Bench, file: &str) -> Result<Server, String> {
    fs::write(bench.path("serve.toml"), file).unwrap();
    let mut serve = bench.serve_command("one", &[]);
    serve.args(["--config", "serve.toml"]);
    Server::start(serve).map_err(|failure| failure.stderr)
}

fn function(id: &str, range: &str) -> String {
    format!(
        "[[function]]\nid = \"{id}\"\nsocket = \"{id}.sock\"\npath = \"drive.img\"\nrange = \"{range}\"\n\n"
    )
}

#[test]
fn functions_are_added_and_removed_beside_others() {
    let bench = Bench::new();
    let server = bench.serve("one", &[]).unwrap();
    assert_eq!(server.printed, "");
    assert!(
        ask(&bench, "list", &[])
            .unwrap()
            .starts_with("No functions")
    );
    let first = "socket=a.sock,path=drive.img,range=0+16M,id=a";
    let printed = ask(&bench, "add", &[first]).unwrap();
    assert!(printed.starts_with("Function a on "), "{printed}");
    assert!(printed.contains("--user-device socket="), "{printed}");

    let mut client = Client::new(&bench.path("a.sock")).unwrap();
    let second = "socket=b.sock,path=drive.img,range=16M+16M,id=b";
    let added = ask(&bench, "add", &[second, "--json"]).unwrap();
    let added: Value = serde_json::from_str(&added).unwrap();
    assert_eq!(added["id"], "b");
    assert_eq!(added["socket"], json!(bench.path("b.sock")));
    assert_eq!(
        list(&bench),
        [
            entry("a", "added", "connected"),
            entry("b", "added", "waiting")
        ]
    );
    let table = ask(&bench, "list", &[]).unwrap();
    assert!(table.contains("16M+16M"), "{table}");

    let removed = ask(&bench, "remove", &["b"]).unwrap();
    assert!(removed.starts_with("Removed b: "), "{removed}");
    assert!(!exists(&bench.path("b.sock")));
    assert_eq!(bench.leases().len(), 1, "the lease of b is given back");
    ask(&bench, "add", &[second]).unwrap();
    ask(&bench, "remove", &["./b.sock"]).unwrap();

    let refused = ask(&bench, "remove", &["a"]).unwrap_err();
    assert!(
        refused.contains("A VMM is connected to function a"),
        "{refused}"
    );
    // The refused commands have not disconnected the client.
    client.region_read(0, 8, &mut [0; 4]).unwrap();
    ask(&bench, "remove", &["a", "--force"]).unwrap();
    assert!(client.region_read(0, 8, &mut [0; 4]).is_err());
    assert_eq!(bench.leases(), []);
    server.stop();
    assert_eq!(
        bench.names(),
        ["drive.img", "one.control.functions.toml", "state"]
    );
}

#[test]
fn added_functions_are_restored_after_a_stop_and_after_a_crash() {
    let bench = Bench::new();
    let server = bench
        .serve("one", &["socket=c.sock,path=memory:1M,id=c"])
        .unwrap();
    ask(
        &bench,
        "add",
        &["socket=a.sock,path=drive.img,range=0+16M,id=a"],
    )
    .unwrap();
    ask(
        &bench,
        "add",
        &["socket=b.sock,path=drive.img,range=16M+16M,id=b"],
    )
    .unwrap();
    ask(&bench, "remove", &["b"]).unwrap();
    server.stop();
    for crash in [true, false] {
        let server = bench.serve("one", &[]).unwrap();
        assert_eq!(list(&bench), [entry("a", "added", "waiting")], "{crash}");
        assert!(
            server.printed.contains("Function a on "),
            "{}",
            server.printed
        );
        match crash {
            true => server.kill(),
            false => server.stop(),
        }
    }
}

#[test]
fn a_data_decision_does_not_apply_to_the_next_owner() {
    for data in ["keep", "wipe"] {
        let bench = Bench::new();
        let add = |id: &str| {
            let options =
                format!("socket={id}.sock,path=drive.img,range=0+16M,id={id},data={data}");
            ask(&bench, "add", &[&options]).unwrap();
        };
        let server = bench.serve("one", &[]).unwrap();
        add("a");
        ask(&bench, "remove", &["a"]).unwrap();
        add("b");
        let (status, _) = server.signal("TERM");
        assert!(status.success());
        // While the server is stopped, the range gets a new owner.
        let other = "socket=c.sock,path=drive.img,range=0+16M,id=c,data=keep";
        let (status, _) = bench.serve("two", &[other]).unwrap().signal("TERM");
        assert!(status.success());
        let server = bench.serve("one", &[]).unwrap();
        assert_eq!(list(&bench), [entry("b", "added", "failed")], "{data}");
        let table = ask(&bench, "list", &[]).unwrap();
        assert!(table.contains("data of lease \"c\""), "{table}");
        let (status, _) = server.signal("TERM");
        assert!(status.success());
    }
}

#[test]
fn a_stored_function_that_fails_blocks_no_other() {
    let bench = Bench::new();
    let server = bench.serve("one", &[]).unwrap();
    ask(
        &bench,
        "add",
        &["socket=a.sock,path=drive.img,range=0+16M,id=a"],
    )
    .unwrap();
    ask(&bench, "add", &["socket=b.sock,path=memory:1M,id=b"]).unwrap();
    server.stop();
    fs::rename(bench.path("drive.img"), bench.path("away.img")).unwrap();
    let server = bench.serve("one", &[]).unwrap();
    assert_eq!(
        list(&bench),
        [
            entry("b", "added", "waiting"),
            entry("a", "added", "failed")
        ]
    );
    let table = ask(&bench, "list", &[]).unwrap();
    assert!(table.contains("does not exist"), "{table}");
    let (status, _) = server.signal("TERM");
    assert!(status.success());

    // A stored function with invalid options does not prevent other functions from being served.
    let stored_file = bench.path("one.control.functions.toml");
    let text = fs::read_to_string(&stored_file).unwrap();
    let text = text
        + "\n[[function]]\nsocket = \"/c.sock\"\npath = \"null:1G\"\nprofile = \"/gone.toml\"\n";
    fs::write(&stored_file, text).unwrap();
    let server = bench.serve("one", &[]).unwrap();
    assert_eq!(list(&bench)[2], entry("/c.sock", "added", "failed"));
    ask(&bench, "remove", &["/c.sock"]).unwrap();
    drop(server);

    // The server still has the function in its list.
    fs::rename(bench.path("away.img"), bench.path("drive.img")).unwrap();
    let server = bench.serve("one", &[]).unwrap();
    assert_eq!(list(&bench).len(), 2);
    assert!(list(&bench).iter().all(|(_, _, state)| state == "waiting"));
    server.stop();

    fs::rename(bench.path("drive.img"), bench.path("away.img")).unwrap();
    let server = bench.serve("one", &[]).unwrap();
    ask(&bench, "remove", &["a"]).unwrap();
    assert_eq!(list(&bench), [entry("b", "added", "waiting")]);
    drop(server);
}

#[test]
fn a_function_that_cannot_be_added_changes_nothing() {
    let bench = Bench::new();
    let server = bench
        .serve(
            "one",
            &["socket=a.sock,path=drive.img,range=0+16M,id=a,lba=512"],
        )
        .unwrap();
    for (options, message) in [
        (
            "socket=a.sock,path=memory:1M",
            "Two functions have the socket",
        ),
        (
            "socket=b.sock,path=memory:1M,id=a",
            "Two functions have the id \"a\"",
        ),
        (
            "socket=b.sock,path=drive.img,range=8M+16M",
            "choose ranges that do not overlap",
        ),
        (
            "socket=b.sock,path=drive.img,range=16M+16M,lba=4096",
            "different lba=",
        ),
        ("socket=b.sock,path=none.img", "truncate -s 16G"),
        (
            "socket=b.sock,path=memory:1M,queues=0",
            "A function has 1 to 1024",
        ),
        (
            "socket=b.sock,path=memory:1M,length=1",
            "There is no option \"length\"",
        ),
        (
            "socket=b.sock,path=memory:1M,owner=no-such-user",
            "no user \"no-such-user\"",
        ),
        ("path=memory:1M", "Option \"socket\" is missing"),
    ] {
        let error = ask(&bench, "add", &[options]).unwrap_err();
        assert!(error.contains(message), "{options}: {error}");
        assert!(!exists(&bench.path("b.sock")), "{options}");
        assert_eq!(list(&bench), [entry("a", "command-line", "waiting")]);
        assert_eq!(bench.leases().len(), 1, "{options}");
    }
    let error = ask(&bench, "remove", &["b"]).unwrap_err();
    assert!(
        error.contains("no function \"b\"; the functions are: a"),
        "{error}"
    );
    let error = ask(&bench, "reload", &[]).unwrap_err();
    assert!(error.contains("start it with --config FILE"), "{error}");
    server.stop();
    assert!(!exists(&bench.path("one.control.functions.toml")));
}

#[test]
fn a_drive_stays_open_without_functions() {
    let bench = Bench::new();
    let mut serve = bench.serve_command("one", &[]);
    serve.args(["--drive", "path=memory:1M,lba=4096"]);
    let server = Server::start(serve).unwrap();
    let add = |lba: &str| {
        let options = format!("socket=a.sock,path=memory:1M,id=a{lba}");
        ask(&bench, "add", &[&options])
    };
    // Without an option, the block size is that of the drive.
    assert!(add("").unwrap().contains("256 blocks of 4096 bytes"));
    ask(&bench, "remove", &["a"]).unwrap();
    assert!(add(",lba=512").unwrap_err().contains("different lba="));
    server.stop();
}

#[test]
fn a_functions_socket_gets_the_requested_mode_and_owner() {
    let bench = Bench::new();
    let server = bench.serve("one", &[]).unwrap();
    // Numeric ids, because the test host may have no names for users and groups.
    let ours = fs::metadata(bench.path("drive.img")).unwrap();
    let owner = match ours.uid() {
        0 => (1001, 1002),
        user => {
            not_checked("root alone gives a socket to another user");
            (user, ours.gid())
        }
    };
    let (user, group) = owner;
    for (id, given, expected) in [
        ("a", format!("{user}:{group}"), owner),
        ("b", user.to_string(), (user, ours.gid())),
        ("c", format!(":{group}"), (ours.uid(), group)),
    ] {
        let socket = format!("{id}.sock");
        let options = format!("id={id},socket={socket},path=drive.img,mode=0660,owner={given}");
        let options = format!("{options},size=1M,unit=1M");
        ask(&bench, "add", &[&options]).unwrap();
        let metadata = fs::metadata(bench.path(&socket)).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, 0o660, "{given}");
        assert_eq!((metadata.uid(), metadata.gid()), expected, "{given}");
    }
    server.stop();
}

#[test]
fn each_change_has_its_result_for_programs() {
    let bench = Bench::new();
    let server = bench.serve("one", &[]).unwrap();
    let changed = |command: &str, arguments: &[&str]| -> Value {
        let printed = ask(&bench, command, &[arguments, &["--json"]].concat()).unwrap();
        assert_eq!(printed.lines().count(), 1, "{printed}");
        serde_json::from_str(&printed).unwrap()
    };
    let user = fs::metadata(bench.path("drive.img")).unwrap().uid();
    let sized = "socket=a.sock,path=drive.img,id=a,size=4M,unit=1M";
    let reserved = format!("path=drive.img,range=32M+16M,id=b,owner={user}");
    let result = changed("add", &[sized]);
    assert_eq!(result["id"], "a");
    assert_eq!(result["state"], "waiting");
    let result = changed("limit", &["a", "iops=500"]);
    assert_eq!(result["id"], "a");
    assert_eq!(result["limits"], "iops=500");
    let result = changed("resize", &["a", "6M"]);
    assert_eq!(result["id"], "a");
    assert_eq!(result["range"], json!({ "start": 0, "length": 6 << 20 }));
    // A connected VMM does not change what each answer says.
    let _client = Client::new(&bench.path("a.sock")).unwrap();
    for (command, arguments) in [("limit", ["a", "iops=600"]), ("resize", ["a", "8M"])] {
        assert_eq!(
            changed(command, &arguments)["state"],
            "connected",
            "{command}"
        );
    }
    let result = changed("reserve", &[&reserved]);
    assert_eq!(result["id"], "b");
    assert_eq!(result["owner"], user);
    let result = changed("remove", &["a", "--force"]);
    assert_eq!(
        (&result["id"], &result["state"]),
        (&json!("a"), &json!("connected"))
    );
    server.stop();
}

#[test]
fn a_reload_applies_the_file_and_keeps_unchanged_functions() {
    let bench = Bench::new();
    let [a, b] = [function("a", "0+16M"), function("b", "16M+16M")];
    let server = serve_file(&bench, &format!("{a}{b}")).unwrap();
    let mut client = Client::new(&bench.path("a.sock")).unwrap();
    ask(&bench, "add", &["socket=z.sock,path=memory:1M,id=z"]).unwrap();

    // The file moves function b and adds function c.
    let [moved, c] = [function("b", "48M+16M"), function("c", "32M+16M")];
    fs::write(bench.path("serve.toml"), format!("{c}{moved}{a}")).unwrap();
    let reloaded = ask(&bench, "reload", &["--json"]).unwrap();
    let reloaded: Value = serde_json::from_str(&reloaded).unwrap();
    assert_eq!(
        reloaded,
        json!({
            "added": ["c"], "changed": ["b"], "limited": [], "resized": [], "removed": [], "unchanged": 1,
        })
    );
    client.region_read(0, 8, &mut [0; 4]).unwrap();
    assert_eq!(
        list(&bench),
        [
            entry("a", "file", "connected"),
            entry("z", "added", "waiting"),
            entry("c", "file", "waiting"),
            entry("b", "file", "waiting"),
        ]
    );
    let again = ask(&bench, "reload", &[]).unwrap();
    assert_eq!(again, "Unchanged: 3\n");

    let error = ask(&bench, "remove", &["c"]).unwrap_err();
    assert!(
        error.contains("take it out there, then run `nvme-mpt reload`"),
        "{error}"
    );
    fs::write(bench.path("serve.toml"), "").unwrap();
    let error = ask(&bench, "reload", &[]).unwrap_err();
    assert!(
        error.contains("A VMM is connected to function a"),
        "{error}"
    );
    assert_eq!(list(&bench).len(), 4);
    let forced = ask(&bench, "reload", &["--force"]).unwrap();
    assert_eq!(forced, "Removed: a, c, b\nUnchanged: 0\n");
    assert_eq!(list(&bench), [entry("z", "added", "waiting")]);
    server.stop();
}

#[test]
fn a_reload_follows_a_replaced_symlink() {
    let bench = Bench::new();
    let [a, b] = [function("a", "0+16M"), function("b", "16M+16M")];
    fs::write(bench.path("first.toml"), &a).unwrap();
    fs::write(bench.path("second.toml"), format!("{a}{b}")).unwrap();
    symlink("first.toml", bench.path("serve.toml")).unwrap();
    let mut serve = bench.serve_command("one", &[]);
    serve.args(["--config", "serve.toml"]);
    let server = Server::start(serve).unwrap();
    // Replaces the link atomically, as deployment tools do for a whole configuration.
    symlink("second.toml", bench.path("next")).unwrap();
    fs::rename(bench.path("next"), bench.path("serve.toml")).unwrap();
    assert_eq!(
        ask(&bench, "reload", &[]).unwrap(),
        "Added: b\nUnchanged: 1\n"
    );
    server.stop();
}

#[test]
fn limits_change_under_a_guest_and_are_restored() {
    let bench = Bench::new();
    let file = function("a", "0+16M");
    let server = serve_file(&bench, &file).unwrap();
    let mut client = Client::new(&bench.path("a.sock")).unwrap();
    ask(&bench, "add", &["socket=b.sock,path=memory:1M,id=b,iops=5"]).unwrap();
    for (id, limits) in [("a", "iops=1000"), ("b", "iops=none,bandwidth=1M+2M")] {
        let limited = ask(&bench, "limit", &[id, limits]).unwrap();
        assert_eq!(limited, format!("Limited {id}: {limits}\n"));
    }
    let table = ask(&bench, "list", &[]).unwrap();
    assert!(
        table.contains("limits iops=1000\n") && table.contains("limits bandwidth=1M+2M\n"),
        "{table}"
    );
    let added = fs::read_to_string(bench.path("one.control.functions.toml")).unwrap();
    assert!(added.contains("bandwidth = \"1M+2M\"\n"), "{added}");
    assert!(!added.contains("iops"), "{added}");
    // The file has no limit for the function, so the reload removes the limit that `nvme-mpt limit` set.
    assert_eq!(
        ask(&bench, "reload", &[]).unwrap(),
        "Limited: a\nUnchanged: 0\n"
    );
    fs::write(bench.path("serve.toml"), file + "iops = 500\n").unwrap();
    assert_eq!(
        ask(&bench, "reload", &[]).unwrap(),
        "Limited: a\nUnchanged: 0\n"
    );
    assert_eq!(ask(&bench, "reload", &[]).unwrap(), "Unchanged: 1\n");
    client.region_read(0, 8, &mut [0; 4]).unwrap();
    for (id, limits, message) in [
        ("c", "iops=1", "no function \"c\""),
        ("a", "iops=1K", "as in 20000"),
        ("a", "queues=1", "the options are iops, bandwidth, weight"),
        ("a", "weight=0", "from 1 to 1000"),
        ("a", "iops=7,weight=300", "only a physical drive"),
    ] {
        let error = ask(&bench, "limit", &[id, limits]).unwrap_err();
        assert!(error.contains(message), "{error}");
    }
    server.stop();
}

#[test]
fn a_file_with_one_bad_function_changes_nothing() {
    let bench = Bench::new();
    let [a, b] = [function("a", "0+16M"), function("b", "16M+16M")];
    let bad = function("c", "8M+16M");
    let error = serve_file(&bench, &format!("{a}{b}{bad}")).unwrap_err();
    assert!(
        error.contains("choose ranges that do not overlap"),
        "{error}"
    );
    assert_eq!(bench.leases(), []);

    let server = serve_file(&bench, &format!("{a}{b}")).unwrap();
    for (bad, message) in [
        (bad, "choose ranges that do not overlap"),
        (function("d", "60M+16M"), "the longest range from there"),
        (
            "[[function]]\npath = \"memory:1M\"\n".to_owned(),
            "function 2 is invalid",
        ),
        (function("a", "16M+16M"), "Two functions have the socket"),
        ("[[function]\n".to_owned(), "not written in TOML"),
        ("[[drive]]\npath = \"none.img\"\n".to_owned(), "truncate -s"),
    ] {
        // The new file has no b, and a is unchanged.
        fs::write(bench.path("serve.toml"), format!("{a}{bad}")).unwrap();
        let error = ask(&bench, "reload", &[]).unwrap_err();
        assert!(error.contains(message), "{message}: {error}");
        let mut left = list(&bench);
        left.sort();
        let expected = [entry("a", "file", "waiting"), entry("b", "file", "waiting")];
        assert_eq!(left, expected, "{message}");
        let mut client = Client::new(&bench.path("b.sock")).unwrap();
        client.region_read(0, 8, &mut [0; 4]).unwrap();
        client.shutdown().unwrap();
    }
    server.stop();
}

#[test]
fn a_file_with_one_bad_function_keeps_data_of_memory_drives() {
    let bench = Bench::new();
    let memory = |id: &str, path: &str, more: &str| {
        format!("[[function]]\nid = \"{id}\"\nsocket = \"{id}.sock\"\npath = \"{path}\"\n{more}\n")
    };
    let drive = "[[drive]]\npath = \"memory:3M\"\n";
    let [a, b] = [("a", "memory:1M"), ("b", "memory:2M")].map(|(id, path)| memory(id, path, ""));
    let server = serve_file(&bench, &format!("{a}{b}{drive}")).unwrap();
    let on_disk = |id: &str, work: &dyn Fn(&mut Disk)| {
        let memory = GuestMemory::new(&[(1 << 20, 16 << 20)]).unwrap();
        let bar = VfioUserBar::attach(&bench.path(&format!("{id}.sock")), &memory).unwrap();
        let controller = Controller::attach(Arc::new(bar), memory, Config::default(), 1);
        let mut controller = controller.unwrap();
        work(&mut Disk::open(&mut controller, 1).unwrap());
        drop(controller);
        let waits = |printed: &str| !printed.contains("connected");
        let listed = bench.ask_until("list", &[], waits).unwrap();
        assert!(waits(&listed), "{id}: {listed}");
    };
    let written = vec![0x5A; 512];
    let c = "socket=c.sock,path=memory:3M,id=c";
    ask(&bench, "add", &[c]).unwrap();
    for id in ["a", "b", "c"] {
        on_disk(id, &|disk| disk.write(7, &written).unwrap());
    }
    ask(&bench, "remove", &["c"]).unwrap();

    // In the new file, a has changed, b is missing, the drive of c is missing, and d has no image.
    let changed = memory("a", "memory:1M", "queues = 2\n");
    let bad = memory("d", "none.img", "");
    fs::write(bench.path("serve.toml"), format!("{changed}{bad}")).unwrap();
    let error = ask(&bench, "reload", &[]).unwrap_err();
    assert!(error.contains("truncate -s"), "{error}");
    ask(&bench, "add", &[c]).unwrap();
    for id in ["a", "b", "c"] {
        on_disk(id, &|disk| {
            assert!(disk.read(7, 1).unwrap() == written, "the content of {id}");
        });
    }
    server.stop();
}

#[test]
fn the_example_file_is_a_valid_configuration() {
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../resources/serve.toml");
    let example = fs::read_to_string(example).unwrap();
    let bench = Bench::new();
    let server = serve_file(&bench, &example).unwrap();
    assert!(!list(&bench).is_empty());
    server.stop();
}

/// Creates a drive whose wipe takes two minutes. Returns a closure that builds the options of a function from its id and
/// its options for existing data.
fn slow_to_wipe(bench: &Bench) -> impl Fn(&str, &str) -> String {
    slow_to_wipe_of(bench, 64 << 30, "500ms")
}

/// Creates a drive of `bytes` bytes, which is wiped in steps of 256 MiB. Each step takes `time`.
fn slow_to_wipe_of(bench: &Bench, bytes: u64, time: &str) -> impl Fn(&str, &str) -> String {
    let big = fs::File::create(bench.path("big.img")).unwrap();
    big.set_len(bytes).unwrap();
    // A wipe has eight commands in flight. They make up one step, and take `time` together.
    let slow = format!(
        "[[fault]]\nkind = \"latency\"\nadd = \"{time}\"\noperations = [\"write-zeroes\"]\n"
    );
    fs::write(bench.path("slow.toml"), slow).unwrap();
    |id, data| format!("socket={id}.sock,path=big.img,id={id},faults=slow.toml{data}")
}

#[test]
fn a_wipe_for_an_added_function_ends_with_the_server() {
    let bench = Bench::new();
    let options = slow_to_wipe(&bench);
    let server = bench.serve("one", &[]).unwrap();
    ask(&bench, "add", &[&options("a", "")]).unwrap();
    ask(&bench, "remove", &["a"]).unwrap();
    let refused = thread::scope(|scope| {
        let bench = &bench;
        let wiped = options("b", ",data=wipe");
        let add = scope.spawn(move || ask(bench, "add", &[&wiped]));
        // The server records the lease in the ledger before it starts the wipe.
        while bench.leases().is_empty() {
            thread::sleep(Duration::from_micros(20));
        }
        assert_eq!(list(bench), [], "others are answered meanwhile");
        let (status, stderr) = server.signal("TERM");
        assert!(status.success(), "{stderr}");
        add.join().unwrap().unwrap_err()
    });
    assert!(
        refused.contains("was stopped, as the server ends"),
        "{refused}"
    );
    assert_eq!(bench.leases(), []);
    // The range is not completely wiped yet, so another id does not get it.
    let server = bench.serve("one", &[]).unwrap();
    let refused = ask(&bench, "add", &[&options("b", "")]).unwrap_err();
    assert!(refused.contains("data=wipe"), "{refused}");
    server.stop();
}

#[test]
fn a_wipe_that_is_killed_in_the_middle_is_done_by_the_next_server() {
    const BYTES: u64 = 1 << 29;
    const PIECE: usize = 1 << 20;
    let bench = Bench::new();
    // A step takes 60 s, so the server is killed during the first of two steps.
    let options = slow_to_wipe_of(&bench, BYTES, "60s");
    let server = bench.serve("one", &[]).unwrap();
    ask(&bench, "add", &[&options("a", "")]).unwrap();
    ask(&bench, "remove", &["a"]).unwrap();
    let mut access = fs::File::options();
    access.read(true).write(true);
    let drive = access.open(bench.path("big.img")).unwrap();
    let data = [0xA5; 4096];
    for at in (0..BYTES).step_by(PIECE) {
        drive.write_all_at(&data, at).unwrap();
    }
    let first_byte = |at: u64| {
        let mut byte = [0];
        drive.read_exact_at(&mut byte, at).unwrap();
        byte[0]
    };
    let last = BYTES - PIECE as u64;
    let gone = thread::scope(|scope| {
        let bench = &bench;
        let wiped = options("b", ",data=wipe");
        let add = scope.spawn(move || ask(bench, "add", &[&wiped]));
        let deadline = Instant::now() + TIMEOUT;
        while first_byte(0) != 0 {
            assert!(Instant::now() < deadline, "the wipe begins");
            thread::sleep(Duration::from_millis(1));
        }
        server.kill();
        add.join().unwrap()
    });
    assert!(gone.is_err(), "{gone:?}");
    assert_eq!(first_byte(last), 0xA5, "a part is left");

    // After an interrupted wipe, no id gets the range, not even the id to which it belongs.
    let server = bench.serve("one", &[]).unwrap();
    let quick = |id, data| options(id, data).replace(",faults=slow.toml", "");
    for (id, reason) in [("b", "data=wipe"), ("c", "overlaps lease \"b\"")] {
        let refused = ask(&bench, "add", &[&quick(id, "")]).unwrap_err();
        assert!(refused.contains(reason), "{refused}");
    }
    // The release reports that the lease no longer exists, and that its data belongs to a previous owner.
    let released = bench.run("leases", &["release", "b"]);
    let stdout = String::from_utf8(released.stdout).unwrap();
    assert!(released.status.success(), "{stdout}");
    assert!(
        stdout.starts_with("Released b: range 0+512M")
            && stdout.contains("b left no data of its own"),
        "{stdout}"
    );
    let refused = ask(&bench, "add", &[&quick("b", "")]).unwrap_err();
    assert!(refused.contains("data=wipe"), "{refused}");
    ask(&bench, "add", &[&quick("b", ",data=wipe")]).unwrap();
    let (zeroes, mut piece) = (vec![0; PIECE], vec![0; PIECE]);
    for at in (0..BYTES).step_by(PIECE) {
        drive.read_exact_at(&mut piece, at).unwrap();
        assert!(piece == zeroes, "data of another id at {at}");
    }
    let (status, stderr) = server.signal("TERM");
    assert!(status.success(), "{stderr}");
    assert!(stderr.contains("Lease b: 0+512M"), "{stderr}");
}

#[test]
fn a_wipe_at_the_start_ends_with_a_signal() {
    let bench = Bench::new();
    let options = slow_to_wipe(&bench);
    bench.serve("one", &[&options("a", "")]).unwrap().stop();
    let mut serve = bench.serve_command("one", &[&options("b", ",data=wipe")]);
    let mut serve = serve.stderr(Stdio::piped()).spawn().unwrap();
    while bench.leases().is_empty() {
        thread::sleep(Duration::from_micros(20));
    }
    let pid = serve.id().to_string();
    let sent = Command::new("kill").args(["-s", "TERM", &pid]).status();
    assert!(sent.unwrap().success());
    let mut stderr = String::new();
    serve
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut stderr)
        .unwrap();
    assert_eq!(serve.wait().unwrap().code(), Some(1));
    assert!(
        stderr.contains("was stopped, as the server ends"),
        "{stderr}"
    );
    assert_eq!(bench.leases(), []);
    assert!(!exists(&bench.path("one.control")));
}

/// Returns the number of open files, threads and mappings of a process, and its resident bytes.
fn holdings(server: &Server) -> [u64; 4] {
    let dir = PathBuf::from(format!("/proc/{}", server.pid()));
    let entries = |name: &str| dir.join(name).read_dir().unwrap().count() as u64;
    let maps = fs::read_to_string(dir.join("maps")).unwrap();
    let statm = fs::read_to_string(dir.join("statm")).unwrap();
    let resident: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
    let maps = maps.lines().count() as u64;
    [entries("fd"), entries("task"), maps, resident * 4096]
}

/// Sends a change to the server. Repeats it while the server is too busy to answer.
fn change(control: &Path, change: &FunctionChange) {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match request_change(control, change.clone()) {
            Ok(_) => return,
            Err(error) => {
                let held_up = error.to_string().contains("does not answer");
                assert!(held_up && Instant::now() < deadline, "{error}");
            }
        }
        thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_thousand_functions_leave_nothing_behind() {
    let bench = Bench::new();
    let server = bench
        .serve("one", &["socket=z.sock,path=drive.img,range=32M+32M,id=z"])
        .unwrap();
    let mut other_client = Client::new(&bench.path("z.sock")).unwrap();
    let control = bench.path("one.control");
    let socket = bench.path("a.sock");
    let drive = bench.path("drive.img");
    let mut come_and_go = |count: u32| {
        for number in 0..count {
            let path = match number % 2 {
                0 => drive.display().to_string(),
                _ => "memory:1M".to_owned(),
            };
            let options = format!(
                "socket={},path={path},range=0+1M,id=a{number},data=keep",
                socket.display()
            );
            change(&control, &FunctionChange::Add { options });
            let mut client = Client::new(&socket).unwrap();
            client.region_read(0, 8, &mut [0; 4]).unwrap();
            other_client.region_read(0, 8, &mut [0; 4]).unwrap();
            let remove = FunctionChange::Remove {
                id: format!("a{number}"),
                force: true,
            };
            change(&control, &remove);
        }
    };
    come_and_go(100);
    let before = holdings(&server);
    come_and_go(1000);
    // Allowances: the server may not have closed a connection yet, or a thread may be ending.
    let more = [8, 2, 8, 4 << 20];
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let after = holdings(&server);
        if (0..4).all(|one| after[one] <= before[one] + more[one]) {
            break;
        }
        assert!(
            Instant::now() < deadline,
            "files, threads, mappings, bytes: {after:?}, before: {before:?}"
        );
        thread::sleep(Duration::from_millis(100));
    }
    drop(other_client);
    server.stop();
}

#[test]
fn a_partial_request_of_a_disconnected_client_changes_nothing() {
    let bench = Bench::new();
    let server = bench.serve("one", &[]).unwrap();
    let socket = bench.path("a.sock");
    let options = format!("socket={},path=memory:1M,id=a", socket.display());
    let change = FunctionChange::Add { options };
    let request = json!({ "command": "change", "change": change }).to_string() + "\n";
    let say = |bytes: &[u8]| {
        let mut stream = UnixStream::connect(bench.path("one.control")).unwrap();
        stream.write_all(bytes).unwrap();
    };
    for end in 0..request.len() {
        say(&request.as_bytes()[..end]);
    }
    // The server makes changes in the order of the requests. When this change is complete, all earlier ones are, too.
    ask(&bench, "add", &["socket=b.sock,path=memory:2M,id=b"]).unwrap();
    assert_eq!(list(&bench), [entry("b", "added", "waiting")]);
    assert!(!exists(&socket));

    // The server carries out a complete request, even if its client does not read the answer.
    say(request.as_bytes());
    let is_there = |listed: &str| listed.contains("\"id\":\"a\"");
    let listed = bench.ask_until("list", &["--json"], is_there).unwrap();
    assert!(is_there(&listed), "{listed}");
    server.stop();
}

#[test]
fn concurrent_changes_are_made_in_sequence() {
    let bench = Bench::new();
    let server = bench.serve("one", &[]).unwrap();
    thread::scope(|scope| {
        for number in 0..8 {
            let bench = &bench;
            scope.spawn(move || {
                let id = format!("f{number}");
                let options = format!("socket={id}.sock,path=drive.img,range={number}M+1M,id={id}");
                for _ in 0..4 {
                    ask(bench, "add", &[&options]).unwrap();
                    ask(bench, "remove", &[&id]).unwrap();
                }
                ask(bench, "add", &[&options]).unwrap();
            });
        }
        // These clients disconnect before the answer.
        for _ in 0..20 {
            let stream = UnixStream::connect(bench.path("one.control")).unwrap();
            drop(stream);
        }
    });
    assert_eq!(list(&bench).len(), 8);
    assert_eq!(bench.leases().len(), 8);
    server.stop();
}

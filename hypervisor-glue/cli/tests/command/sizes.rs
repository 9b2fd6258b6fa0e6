//! Tests of leases by size: their extents, growth and truncation.

use std::fs;
use std::sync::Arc;

use nvme_mpt_tests::COMMAND_TIMEOUT;
use nvme_mpt_tests::admin::feature;
use nvme_mpt_tests::bar::Bar;
use nvme_mpt_tests::controller::{Config, Controller};
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::vfio_user::VfioUserBar;
use serde_json::{Value, json};

use crate::support::{Bench, Server, exists};
use crate::vmms::{self, TestVmm};

const MIB: u64 = 1 << 20;

/// Returns the options of a function with a size.
fn sized(id: &str, size: &str) -> String {
    format!("socket={id}.sock,path=drive.img,id={id},size={size},unit=1M")
}

/// Returns the output of `nvme-mpt list --json`.
fn list(bench: &Bench) -> Vec<Value> {
    let listed = bench.ask("list", &["--json"]).unwrap();
    serde_json::from_str(&listed).unwrap()
}

/// Returns the entry of one function.
fn entry(bench: &Bench, id: &str) -> Value {
    let mut entries = list(bench).into_iter();
    entries.find(|entry| entry["id"] == id).unwrap()
}

/// Returns the output of `nvme-mpt leases list --json`.
fn leases(bench: &Bench) -> Vec<Value> {
    let output = bench.run("leases", &["list", "--json"]);
    assert!(output.status.success(), "{output:?}");
    let mut leases: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    // A lease that was released and acquired again is the last in the ledger, so leases are sorted.
    leases.sort_by_key(|lease| lease["id"].as_str().unwrap().to_owned());
    leases
}

/// An id with data on a drive: the id, the MiB of its data, and whether it has a lease.
type Part = (String, u64, bool);

/// Returns the free MiB of the only drive, and the ids with data on the drive, from `nvme-mpt capacity`.
fn capacity(bench: &Bench) -> (u64, Vec<Part>) {
    let shown = bench.ask("capacity", &["--json", "--unit", "1M"]).unwrap();
    let drives: Vec<Value> = serde_json::from_str(&shown).unwrap();
    assert_eq!(drives.len(), 1, "{shown}");
    let mib = |entry: &Value, key: &str| entry[key].as_u64().unwrap() / MIB;
    let uses = drives[0]["uses"].as_array().unwrap().iter();
    let uses = uses.map(|entry| {
        let id = entry["id"].as_str().unwrap().to_owned();
        (id, mib(entry, "bytes"), entry["leased"].as_bool().unwrap())
    });
    (mib(&drives[0], "free"), uses.collect())
}

#[test]
fn leases_and_unreleased_data_use_capacity() {
    let bench = Bench::new();
    let mut serve = bench.serve_command("one", &[]);
    serve.args(["--drive", "path=drive.img"]);
    let _server = Server::start(serve).unwrap();
    assert_eq!(capacity(&bench), (64, vec![]));
    bench.ask("add", &[&sized("a", "20M")]).unwrap();
    assert_eq!(capacity(&bench), (44, vec![("a".to_owned(), 20, true)]));
    bench.ask("remove", &["a"]).unwrap();
    assert_eq!(capacity(&bench), (44, vec![("a".to_owned(), 20, false)]));
    let output = bench.run("leases", &["release", "a"]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(capacity(&bench), (64, vec![]));
    let table = bench.ask("capacity", &[]).unwrap();
    assert!(table.contains("free"), "{table}");
    let message = bench.ask("capacity", &["--unit", "3M"]).unwrap_err();
    assert!(message.contains("power of two"), "{message}");
}

/// Returns the starts and lengths of an entry's extents, in MiB.
fn extents_of(entry: &Value) -> Vec<(u64, u64)> {
    let parts = entry["extents"].as_array().unwrap().iter();
    let number = |part: &Value, key: &str| part[key].as_u64().unwrap() / MIB;
    let parts: Vec<(u64, u64)> = parts
        .map(|part| (number(part, "start"), number(part, "length")))
        .collect();
    match &parts[..] {
        [only] => {
            let range = (
                number(&entry["range"], "start"),
                number(&entry["range"], "length"),
            );
            assert_eq!(range, *only);
        }
        _ => assert!(entry["range"].is_null(), "{entry}"),
    }
    parts
}

/// Returns the extents of a function, on which server and ledger must agree.
fn extents(bench: &Bench, id: &str) -> Vec<(u64, u64)> {
    let mut leases = leases(bench).into_iter();
    let lease = leases.find(|lease| lease["id"] == id).unwrap();
    let extents = extents_of(&lease);
    assert_eq!(extents_of(&entry(bench, id)), extents);
    extents
}

fn resize(bench: &Bench, arguments: &[&str]) -> Result<String, String> {
    bench.ask("resize", arguments)
}

/// Runs a command that must be refused and must change nothing. Returns its error.
fn refused(bench: &Bench, command: &str, arguments: &[&str]) -> String {
    let before = (list(bench), leases(bench));
    let message = bench.ask(command, arguments).unwrap_err();
    assert_eq!((list(bench), leases(bench)), before, "{arguments:?}");
    message
}

/// Waits until no VMM is connected.
fn await_no_guest(bench: &Bench) {
    let busy = ["\"connected\"", "\"busy\""];
    let waits = |listed: &str| !busy.iter().any(|state| listed.contains(state));
    let listed = bench.ask_until("list", &["--json"], waits).unwrap();
    assert!(waits(&listed), "{listed}");
}

/// A guest's driver on a vfio-user socket.
struct Guest {
    controller: Controller,
    disk: Disk,
}

impl Guest {
    fn attach(bench: &Bench, socket: &str) -> Self {
        let memory = GuestMemory::new(&[(MIB, 16 * MIB)]).unwrap();
        let bar = VfioUserBar::attach(&bench.path(socket), &memory).unwrap();
        let bar: Arc<dyn Bar> = Arc::new(bar);
        let mut controller = Controller::attach(bar, memory, Config::default(), 1).unwrap();
        // Enables the event for changed namespace attributes.
        controller
            .set_feature(feature::ASYNC_EVENT_CONFIG, 0, 1 << 8)
            .unwrap();
        controller.request_async_event().unwrap();
        let disk = Disk::open(&mut controller, 1).unwrap();
        Self { controller, disk }
    }

    /// Waits for the event that the namespace has changed. Returns the new size in bytes.
    fn growth(&mut self) -> u64 {
        let event = self
            .controller
            .async_event(COMMAND_TIMEOUT)
            .unwrap()
            .unwrap();
        // Notice: Namespace Attribute Changed.
        assert_eq!((event.kind, event.info), (2, 0));
        self.size()
    }

    fn size(&mut self) -> u64 {
        let namespace = self.controller.identify_namespace(1).unwrap();
        namespace.nsze * u64::from(namespace.block_size)
    }

    /// Fills a range with one byte.
    fn fill(&mut self, (start, length): (u64, u64), byte: u8) {
        let piece = vec![byte; 64 << 10];
        for at in (start..start + length).step_by(piece.len()) {
            self.disk.write(at / 512, &piece).unwrap();
        }
    }

    fn has(&mut self, (start, length): (u64, u64), byte: u8) -> bool {
        let piece = vec![byte; 64 << 10];
        let mut offsets = (start..start + length).step_by(piece.len());
        offsets.all(|at| self.disk.read(at / 512, 128).unwrap() == piece)
    }
}

/// Returns whether a range of the drive's file, in MiB, is filled with one byte.
fn file_has(bench: &Bench, (start, length): (u64, u64), byte: u8) -> bool {
    let drive = fs::read(bench.path("drive.img")).unwrap();
    let bytes = &drive[(start * MIB) as usize..((start + length) * MIB) as usize];
    bytes.iter().all(|one| *one == byte)
}

#[test]
fn leases_by_size_use_gaps_between_other_ranges() {
    let bench = Bench::new();
    let ranges = [
        "socket=r.sock,path=drive.img,id=r,range=8M+8M",
        "socket=s.sock,path=drive.img,id=s,range=24M+32M",
    ];
    let server = bench.serve("one", &ranges).unwrap();
    for (id, size, parts) in [
        ("a", "4M", &[(0, 4)][..]),
        ("b", "8M", &[(16, 8)]),
        ("c", "10M", &[(56, 8), (4, 2)]),
    ] {
        let printed = bench.ask("add", &[&sized(id, size)]).unwrap();
        assert!(
            printed.starts_with(&format!("Function {id} on ")),
            "{printed}"
        );
        assert_eq!(extents(&bench, id), parts, "{id}");
    }
    let tables = [bench.ask("list", &[]).unwrap(), {
        let output = bench.run("leases", &[]);
        String::from_utf8(output.stdout).unwrap()
    }];
    for table in tables {
        for parts in ["0+4M ", "16M+8M ", "56M+8M and 4M+2M "] {
            assert!(table.contains(parts), "{table}");
        }
    }

    let d = "socket=d.sock,path=drive.img";
    for (options, complaints) in [
        (
            "id=d,size=3M,unit=1M",
            &["/drive.img: it has 2M free in whole units of 1M, the largest extent 2M"][..],
        ),
        (
            "id=d,size=1536K,unit=1M",
            &["The size 1536K", "1M and 2M are"],
        ),
        (
            "id=d,size=3M,unit=3M",
            &["The unit 3M", "power of two: 2M and 4M are"],
        ),
        ("id=d,size=1M,unit=512K", &["the smallest is 1M"]),
        ("id=d,size=1M,unit=2M", &["use size=2M"]),
        (
            "id=d,size=1M",
            &["The unit 1G", "which has 64M: choose a smaller unit"],
        ),
        (
            "id=d,size=1M,unit=1M,range=6M+1M",
            &["\"range\" and \"size\""],
        ),
        ("size=1M,unit=1M", &["needs lease="]),
        ("id=d,lease=d,size=1M,unit=1M", &["\"id\" and \"lease\""]),
        (
            "id=d,size=1M,unit=1M,data=keep",
            &["use range= instead of size="],
        ),
        ("id=d,unit=1M", &["\"unit=1M\" needs size="]),
        ("id=a,size=1M,unit=1M", &["Two functions have the id \"a\""]),
    ] {
        let message = refused(&bench, "add", &[&format!("{d},{options}")]);
        for part in complaints {
            assert!(message.contains(part), "{options}: {message}");
        }
        assert!(!exists(&bench.path("d.sock")), "{options}");
    }
    // The option `lease` is an alias of `id`. This lease takes all remaining capacity.
    let last = format!("{d},lease=d,size=2M,unit=1M");
    bench.ask("add", &[&last]).unwrap();
    assert_eq!(extents(&bench, "d"), [(6, 2)]);
    let message = refused(&bench, "add", &[&sized("e", "1M")]);
    assert!(
        message.contains("it has 0 free") && message.contains("the largest extent 0"),
        "{message}"
    );
    server.stop();
}

#[test]
fn a_grown_function_keeps_its_size_after_a_stop_and_after_a_crash() {
    let bench = Bench::new();
    let mut server = bench.serve("one", &[]).unwrap();
    for id in ["a", "b"] {
        bench.ask("add", &[&sized(id, "4M")]).unwrap();
    }
    let before = entry(&bench, "a");
    let serial = |entry: &Value| {
        let (_, behind) = entry["summary"]
            .as_str()
            .unwrap()
            .split_once("serial ")
            .unwrap();
        behind.split(';').next().unwrap().to_owned()
    };
    let mut guest = Guest::attach(&bench, "a.sock");
    assert_eq!(guest.size(), 4 * MIB);
    guest.fill((0, 4 * MIB), 1);
    assert_eq!(resize(&bench, &["a", "6M"]).unwrap(), "Resized a: 6M\n");
    assert_eq!(guest.growth(), 6 * MIB);
    assert_eq!(extents(&bench, "a"), [(0, 4), (8, 2)]);
    assert!(guest.has((4 * MIB, 2 * MIB), 0));
    guest.fill((4 * MIB, 2 * MIB), 2);
    let table = bench.ask("list", &[]).unwrap();
    assert!(table.contains(" 0+4M and 8M+2M "), "{table}");
    // If the host holds up a function's thread, statistics omit the function for a moment.
    let is_larger = |stats: &str| stats.contains("\"capacity_bytes\":6291456");
    let stats = bench.ask_until("stats", &["--json"], is_larger).unwrap();
    assert!(is_larger(&stats), "{stats}");
    // The function already has this size, and the command succeeds.
    let resized = resize(&bench, &["./a.sock", "6M", "--json"]).unwrap();
    let resized: Value = serde_json::from_str(&resized).unwrap();
    assert_eq!(extents_of(&resized), [(0, 4), (8, 2)]);
    let message = refused(&bench, "resize", &["a", "64M"]);
    assert!(
        message.contains("Cannot resize function a")
            && message.contains("no capacity for 58M more")
            && message.contains("/drive.img: it has 54M free"),
        "{message}"
    );
    drop(guest);
    await_no_guest(&bench);

    let grown = entry(&bench, "a");
    assert_eq!(serial(&grown), serial(&before));
    let summary = grown["summary"].as_str().unwrap();
    assert!(
        summary.contains("range 0+4M and 8M+2M (12288 blocks of 512 bytes)"),
        "{summary}"
    );
    for crash in [false, true, false] {
        match crash {
            true => server.kill(),
            false => server.stop(),
        }
        let added = fs::read_to_string(bench.path("one.control.functions.toml")).unwrap();
        assert!(added.contains("size = \"6M\"\n"), "{added}");
        assert!(added.contains("size = \"4M\"\n"), "{added}");
        server = bench.serve("one", &[]).unwrap();
        assert_eq!(entry(&bench, "a"), grown, "{crash}");
        let mut guest = Guest::attach(&bench, "a.sock");
        assert_eq!(guest.size(), 6 * MIB);
        assert!(guest.has((0, 4 * MIB), 1), "{crash}");
        assert!(guest.has((4 * MIB, 2 * MIB), 2), "{crash}");
        drop(guest);
        await_no_guest(&bench);
    }
    server.stop();
}

#[test]
fn a_function_shrinks_only_on_request_and_released_extents_are_erased() {
    let bench = Bench::new();
    let server = bench.serve("one", &[]).unwrap();
    bench.ask("add", &[&sized("z", "1M")]).unwrap();
    bench.ask("add", &[&sized("a", "8M")]).unwrap();
    bench.ask("add", &[&sized("y", "1M")]).unwrap();
    let order = |bench: &Bench| -> Vec<String> {
        let ids = list(bench).into_iter();
        ids.map(|entry| entry["id"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(extents(&bench, "a"), [(1, 8)]);
    // In the second round, another id gets the extents that id a releases.
    for others in [false, true] {
        let mut guest = Guest::attach(&bench, "a.sock");
        guest.fill((0, 8 * MIB), 1);
        let error_message = refused(&bench, "resize", &["a", "2M"]);
        assert!(
            error_message.contains("`nvme-mpt resize a 2M --truncate`"),
            "{error_message}"
        );
        let error_message = refused(&bench, "resize", &["a", "2M", "--truncate"]);
        assert!(
            error_message.contains("A VMM is connected to function a")
                && !error_message.contains("--force"),
            "{error_message}"
        );
        assert!(guest.has((0, 8 * MIB), 1));
        drop(guest);
        await_no_guest(&bench);
        for (size, error_message) in [
            ("2560K", "not a multiple of its unit 1M: 2M and 3M are"),
            ("0", "less than a unit"),
        ] {
            let message = refused(&bench, "resize", &["a", size, "--truncate"]);
            assert!(
                message.contains("Cannot resize function a") && message.contains(error_message),
                "{message}"
            );
        }
        let error_message = refused(&bench, "resize", &["a", "2M"]);
        assert!(error_message.contains("--truncate"), "{error_message}");

        let resized = resize(&bench, &["a", "2M", "--truncate"]).unwrap();
        assert_eq!(resized, "Resized a: 2M\n");
        assert_eq!(extents(&bench, "a"), [(1, 2)]);
        assert_eq!(order(&bench), ["z", "a", "y"]);
        let added = fs::read_to_string(bench.path("one.control.functions.toml")).unwrap();
        assert!(added.contains("size = \"2M\"\n"), "{added}");
        // In both rounds, 54 MiB have no data, and the request needs more.
        let (id, parts) = match others {
            false => {
                resize(&bench, &["a", "60M"]).unwrap();
                ("a", vec![(1, 8), (10, 52)])
            }
            true => {
                bench.ask("add", &[&sized("b", "58M")]).unwrap();
                ("b", vec![(10, 54), (3, 4)])
            }
        };
        assert_eq!(extents(&bench, id), parts);
        for (start, length) in parts {
            let own = if start == 1 { 2 } else { 0 };
            assert!(
                file_has(&bench, (start + own, length - own), 0),
                "{start}+{length}"
            );
        }
        let mut guest = Guest::attach(&bench, &format!("{id}.sock"));
        let remaining_bytes = if others { 0 } else { 2 * MIB };
        assert!(guest.has((remaining_bytes, 58 * MIB), 0));
        drop(guest);
        await_no_guest(&bench);
        assert!(file_has(&bench, (1, 2), 1));
    }
    let (status, log) = server.signal("TERM");
    assert!(status.success(), "{log}");
    assert!(
        log.contains("Lease a: ") && log.contains("Lease b: ") && log.contains("is wiped"),
        "{log}"
    );
    // After a restart, the function still has the smaller size.
    let server = bench.serve("one", &[]).unwrap();
    assert_eq!(extents(&bench, "a"), [(1, 2)]);
    server.stop();
}

#[test]
fn a_lease_keeps_its_size_if_the_smaller_size_cannot_be_stored() {
    let bench = Bench::new();
    let server = bench.serve("one", &[]).unwrap();
    bench.ask("add", &[&sized("a", "8M")]).unwrap();
    let stored = || fs::read_to_string(bench.path("one.control.functions.toml")).unwrap();
    let before = stored();
    // A directory at this path prevents the server from replacing the file.
    let file = bench.path("one.control.functions.toml");
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    let message = refused(&bench, "resize", &["a", "2M", "--truncate"]);
    assert!(message.contains("Cannot write"), "{message}");
    assert_eq!(extents(&bench, "a"), [(0, 8)]);
    fs::remove_dir(&file).unwrap();
    fs::write(&file, before).unwrap();
    server.kill();
    let server = bench.serve("one", &[]).unwrap();
    assert_eq!(extents(&bench, "a"), [(0, 8)]);
    let resized = resize(&bench, &["a", "2M", "--truncate"]).unwrap();
    assert_eq!(resized, "Resized a: 2M\n");
    assert!(stored().contains("size = \"2M\"\n"), "{}", stored());
    server.stop();
}

/// Writes a configuration file with a function by size and a function with a range.
fn write_file(bench: &Bench, size: &str, more: &str) {
    let file = format!(
        "[[function]]\nid = \"r\"\nsocket = \"r.sock\"\npath = \"drive.img\"\nrange = \"4M+4M\"\n\n\
         [[function]]\nid = \"a\"\nsocket = \"a.sock\"\npath = \"drive.img\"\nunit = \"1M\"\nsize = \"{size}\"\n{more}"
    );
    fs::write(bench.path("serve.toml"), file).unwrap();
}

fn serve_file(bench: &Bench) -> Server {
    let mut serve = bench.serve_command("one", &[]);
    serve.args(["--config", "serve.toml"]);
    Server::start(serve).unwrap()
}

#[test]
fn a_configured_function_grows_by_a_reload_without_interruption() {
    let bench = Bench::new();
    write_file(&bench, "8M", "");
    let server = serve_file(&bench);
    assert_eq!(extents(&bench, "a"), [(8, 8)]);
    let mut guest = Guest::attach(&bench, "a.sock");
    let in_the_file = "serve.toml: change it there, then run `nvme-mpt reload`";
    for (arguments, reason) in [
        (&["a", "12M"][..], in_the_file),
        (&["a", "4M"], in_the_file),
        (&["a", "12M", "--truncate"], in_the_file),
        (&["a", "4M", "--truncate"], "shrinks only without one"),
    ] {
        let error_message = refused(&bench, "resize", arguments);
        assert!(error_message.contains(reason), "{error_message}");
    }
    let reload = || bench.ask("reload", &[]);
    write_file(&bench, "12M", "");
    let reloaded = bench.ask("reload", &["--json"]).unwrap();
    let reloaded: Value = serde_json::from_str(&reloaded).unwrap();
    assert_eq!(
        reloaded,
        json!({
            "added": [], "changed": [], "limited": [], "resized": ["a"], "removed": [], "unchanged": 1,
        })
    );
    assert_eq!(guest.growth(), 12 * MIB);
    guest.fill((8 * MIB, 4 * MIB), 1);
    assert_eq!(extents(&bench, "a"), [(8, 12)]);
    assert_eq!(entry(&bench, "a")["state"], "connected");
    assert_eq!(reload().unwrap(), "Unchanged: 2\n");

    write_file(&bench, "4M", "");
    assert_eq!(reload().unwrap(), "Unchanged: 2\n");
    assert_eq!(extents(&bench, "a"), [(8, 12)]);
    // After a refused reload, no function has changed, and none was added.
    let other = "\n[[function]]\nid = \"n\"\nsocket = \"n.sock\"\npath = \"memory:1M\"\n";
    for (size, error_message) in [
        ("61M", "no capacity for 49M more"),
        ("14848K", "not a multiple of its unit 1M"),
    ] {
        write_file(&bench, size, other);
        let message = refused(&bench, "reload", &[]);
        assert!(
            message.contains("Cannot resize function a") && message.contains(error_message),
            "{message}"
        );
        assert!(!exists(&bench.path("n.sock")));
    }
    write_file(&bench, "14M", "iops = 500\n");
    assert_eq!(reload().unwrap(), "Limited: a\nResized: a\nUnchanged: 1\n");
    assert_eq!(guest.size(), 14 * MIB);
    assert!(guest.has((8 * MIB, 4 * MIB), 1));
    drop(guest);
    server.stop();

    // The file asks for a smaller size than the lease has. The server starts, and the lease keeps its size.
    write_file(&bench, "8M", "");
    let server = serve_file(&bench);
    assert_eq!(extents(&bench, "a"), [(8, 14)]);
    for size in ["10M", "14M"] {
        write_file(&bench, size, "");
        assert_eq!(reload().unwrap(), "Unchanged: 2\n", "{size}");
        assert_eq!(extents(&bench, "a"), [(8, 14)]);
    }
    write_file(&bench, "15M", "");
    assert_eq!(reload().unwrap(), "Resized: a\nUnchanged: 1\n");
    assert_eq!(extents(&bench, "a"), [(8, 15)]);
    // A lease shrinks only if the operator requests it.
    write_file(&bench, "9M", "");
    assert_eq!(reload().unwrap(), "Unchanged: 2\n");
    resize(&bench, &["a", "9M", "--truncate"]).unwrap();
    assert_eq!(extents(&bench, "a"), [(8, 9)]);
    assert_eq!(reload().unwrap(), "Unchanged: 2\n");
    assert_eq!(extents(&bench, "a"), [(8, 9)]);
    server.stop();
}

#[test]
fn resize_refuses_ranges_and_lists_ids_for_an_unknown_id() {
    let bench = Bench::new();
    let mut serve = bench.serve_command(
        "one",
        &[
            "socket=r.sock,path=drive.img,id=r,range=0+8M",
            &sized("a", "4M"),
        ],
    );
    serve.args(["--drive", "path=drive.img"]);
    let server = Server::start(serve).unwrap();
    let mut vmm = TestVmm::start(&bench, "path=drive.img,range=16M+16M,id=v", 1);
    assert_eq!(vmm.report(), "attached");
    for (arguments, error_message) in [
        (&["r", "16M"][..], "only leases by size (size=)"),
        (&["r", "4M"], "only leases by size (size=)"),
        (&["r", "4M", "--truncate"], "has a range="),
        (&["v", "32M"], "only leases by size (size=)"),
        (&["v", "8M", "--truncate"], "only leases by size (size=)"),
        (
            &["x", "8M"],
            "no function \"x\"; the functions are: r, a, v",
        ),
        (
            &["./x.sock", "8M", "--truncate"],
            "x.sock\"; the functions are: r, a, v",
        ),
    ] {
        let message = refused(&bench, "resize", arguments);
        assert!(message.contains(error_message), "{arguments:?}: {message}");
    }
    assert_eq!(vmm.pass(), "passed");
    vmm.end();
    server.stop();
}

#[test]
fn a_function_in_a_vmm_grows_while_it_is_attached() {
    let bench = Bench::new();
    let server = vmms::server(&bench);
    let options = "path=drive.img,size=16M,unit=1M,lease=first";
    let mut vmm = TestVmm::start(&bench, options, 1);
    assert_eq!(vmm.report(), "attached");
    assert_eq!(vmm.order("blocks"), "32768 blocks");
    assert_eq!(vmm.pass(), "passed");
    assert_eq!(extents(&bench, "first"), [(0, 16)]);
    bench.ask("add", &[&sized("a", "4M")]).unwrap();

    assert_eq!(vmm.order("listen"), "listens");
    let resized = resize(&bench, &["first", "32M"]).unwrap();
    assert_eq!(resized, "Resized first: 32M\n");
    assert_eq!(vmm.order("growth"), "0, 65536 blocks");
    assert_eq!(extents(&bench, "first"), [(0, 16), (20, 16)]);
    let grown = entry(&bench, "first");
    let summary = grown["summary"].as_str().unwrap();
    assert!(
        summary.contains("range 0+16M and 20M+16M; in process "),
        "{summary}"
    );
    let is_larger = |stats: &str| stats.contains("\"capacity_bytes\":33554432");
    let stats = bench.ask_until("stats", &["--json"], is_larger).unwrap();
    assert!(is_larger(&stats), "{stats}");
    assert_eq!([vmm.pass(), vmm.order("read")], ["passed", "passed"]);

    let message = refused(&bench, "resize", &["first", "8M"]);
    assert!(message.contains("--truncate"), "{message}");
    let message = refused(&bench, "resize", &["first", "8M", "--truncate"]);
    assert!(
        message.contains("A VMM is connected to function first"),
        "{message}"
    );
    let message = refused(&bench, "resize", &["first", "64M"]);
    assert!(message.contains("no capacity for 32M more"), "{message}");
    assert_eq!(vmm.pass(), "passed");

    // The next server restores the lease with its grown size, although the function's options have the previous size.
    server.kill();
    let server = vmms::server(&bench);
    assert_eq!(vmm.order("blocks"), "65536 blocks");
    assert_eq!([vmm.order("read"), vmm.pass()], ["passed", "passed"]);
    assert_eq!(extents(&bench, "first"), [(0, 16), (20, 16)]);
    vmm.end();
    let mut next = TestVmm::start(&bench, options, 1);
    assert_eq!(next.report(), "attached");
    assert_eq!(next.order("blocks"), "65536 blocks");
    next.end();
    server.stop();
}

#[test]
fn a_smaller_size_on_the_command_line_keeps_the_leases_size() {
    let bench = Bench::new();
    let server = bench.serve("one", &[&sized("a", "8M")]).unwrap();
    resize(&bench, &["a", "12M"]).unwrap();
    assert_eq!(extents(&bench, "a"), [(0, 12)]);
    let grown = entry(&bench, "a");
    server.stop();
    for (size, crash) in [("8M", true), ("4M", false), ("12M", true)] {
        let server = bench.serve("one", &[&sized("a", size)]).unwrap();
        assert_eq!(entry(&bench, "a"), grown, "{size}");
        assert_eq!(extents(&bench, "a"), [(0, 12)], "{size}");
        match crash {
            true => server.kill(),
            false => server.stop(),
        }
    }
    // A larger size in the options grows the lease. A resize is allowed, whatever the options say.
    let server = bench.serve("one", &[&sized("a", "16M")]).unwrap();
    assert_eq!(extents(&bench, "a"), [(0, 16)]);
    resize(&bench, &["a", "2M", "--truncate"]).unwrap();
    assert_eq!(extents(&bench, "a"), [(0, 2)]);
    server.stop();
    // The functions of the command line were not stored as added ones.
    assert!(!exists(&bench.path("one.control.functions.toml")));
    let server = bench.serve("one", &[&sized("a", "1M")]).unwrap();
    assert_eq!(extents(&bench, "a"), [(0, 2)]);
    server.stop();
}

//! Checks of messages, most of which have misled users in an earlier form.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use vfio_user::Client;

use crate::support::{Bench, Server, TIMEOUT};

/// Returns the standard error of a command that is refused.
fn error_text(bench: &Bench, command: &str, arguments: &[&str]) -> String {
    let output = bench.run(command, arguments);
    assert!(!output.status.success(), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

fn printed(bench: &Bench, command: &str, arguments: &[&str]) -> String {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let output = bench.run(command, arguments);
        // If the host holds up the client, the server does not read its request, and the test repeats the command.
        let is_held_up = String::from_utf8_lossy(&output.stderr).contains("does not answer");
        if !is_held_up || Instant::now() > deadline {
            assert!(output.status.success(), "{output:?}");
            return String::from_utf8(output.stdout).unwrap();
        }
    }
}

#[test]
fn no_message_suggests_creating_an_absent_device_as_a_file() {
    let bench = Bench::new();
    let function = ["--function", "socket=a.sock,path=/dev/nvme9n9"];
    let message = error_text(&bench, "serve", &function);
    for part in [
        "There is no device `/dev/nvme9n9`",
        "lsblk",
        "nvme-mpt drives",
    ] {
        assert!(message.contains(part), "{message}");
    }
    assert!(!message.contains("truncate"), "{message}");
    let function = ["--function", "socket=a.sock,path=absent.img"];
    let message = error_text(&bench, "serve", &function);
    assert!(message.contains("move it back"), "{message}");
    assert!(message.contains("created with: truncate -s"), "{message}");
}

#[test]
fn a_blank_between_options_is_called_a_blank() {
    let bench = Bench::new();
    for command in [
        &["serve", "--function", "socket=a.sock, path=drive.img"][..],
        &["add", "socket=a.sock, path=drive.img"],
    ] {
        let message = error_text(&bench, command[0], &command[1..]);
        assert!(message.contains("blank"), "{command:?}: {message}");
        assert!(!message.contains("is missing"), "{command:?}: {message}");
    }
}

#[test]
fn another_user_gets_a_permission_error() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("left out: root alone can be several users");
        return;
    }
    let bench = Bench::new();
    fs::set_permissions(bench.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    let server = bench
        .serve("one", &["socket=a.sock,path=drive.img"])
        .unwrap();
    let mut stats = bench.command("stats", &["--control", "one.control"]);
    let output = stats.uid(4_000_000).gid(4_000_000).output().unwrap();
    assert!(!output.status.success(), "{output:?}");
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(
        stderr
            .contains("User 4000000 may not use the control socket one.control: run this as root"),
        "{stderr}"
    );
    assert!(!stderr.contains("start `nvme-mpt serve`"), "{stderr}");
    server.stop();
    let message = error_text(&bench, "stats", &["--control", "one.control"]);
    assert!(message.contains("start `nvme-mpt serve`"), "{message}");
}

#[test]
fn json_output_does_not_need_the_word_list() {
    let bench = Bench::new();
    let server = bench
        .serve("one", &["socket=a.sock,path=drive.img,id=a,faults=none"])
        .unwrap();
    let control = ["--control", "one.control"];
    for (command, arguments) in [
        ("leases", &["--json"][..]),
        ("leases", &["list", "--json"]),
        ("leases", &["--json", "list"]),
        ("leases", &["--json", "terms"]),
        ("fault", &["--json"]),
        ("fault", &["--json", "list"]),
    ] {
        let text = printed(&bench, command, &[&control, arguments].concat());
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert!(json.is_array() || json.is_object(), "{command}: {json}");
    }
    for (command, arguments) in [
        ("leases", &["--json", "release", "a"][..]),
        ("fault", &["--json", "clear", "drive.img"]),
    ] {
        let message = error_text(&bench, command, &[&control, arguments].concat());
        assert!(message.contains("--json is an option of `"), "{message}");
    }
    server.stop();
}

#[test]
fn the_help_has_the_variable_that_sets_the_level_of_the_log() {
    let bench = Bench::new();
    for arguments in [&["--help"][..], &["-h"]] {
        let text = printed(&bench, "serve", arguments);
        assert!(text.contains("RUST_LOG"), "{text}");
    }
    let mut help = std::process::Command::new(env!("CARGO_BIN_EXE_nvme-mpt"));
    let output = help.arg("--help").output().unwrap();
    assert!(
        String::from_utf8(output.stdout)
            .unwrap()
            .contains("RUST_LOG")
    );
}

#[test]
fn the_log_of_a_server_has_clients_and_limits_by_default() {
    let bench = Bench::new();
    let mut serve = bench.serve_command("one", &["socket=a.sock,path=drive.img,id=a"]);
    serve.env_remove("RUST_LOG");
    let server = Server::start(serve).unwrap();
    let socket = bench.path("a.sock");
    let client = Client::new(&socket).unwrap();
    assert!(Client::new(&socket).is_err());
    // The client shuts the socket down: a program that another test starts may hold a copy of it.
    client.shutdown().unwrap();
    // The server accepts the next client once it has noticed the disconnect.
    let _next = Client::new(&socket).unwrap();
    bench.ask("limit", &["a", "iops=500"]).unwrap();
    let (status, log) = server.signal("TERM");
    assert!(status.success(), "{log}");
    for line in [
        "INFO [a] A client has connected to",
        "WARN [a] Refused a client on",
        "INFO [a] vfio-user: the client has disconnected",
        "INFO [changes] Function a has new limits: iops=500",
        "INFO [main] SIGTERM: no more clients are accepted",
    ] {
        assert!(log.contains(line), "{line}:\n{log}");
    }
}

/// Returns the string literals of a source file.
fn literals(source: &str) -> Vec<String> {
    let mut literals = Vec::new();
    let mut rest = source.chars().peekable();
    while let Some(c) = rest.next() {
        match c {
            '/' if rest.peek() == Some(&'/') => {
                rest.by_ref().find(|c| *c == '\n');
            }
            // A character literal, which may contain a quote, or else a lifetime.
            '\'' if rest.peek() == Some(&'\\') => {
                rest.nth(1);
            }
            '\'' if rest.peek() == Some(&'"') => {
                rest.next();
            }
            '"' => {
                let mut text = String::new();
                while let Some(c) = rest.next().filter(|c| *c != '"') {
                    match c {
                        '\\' => text.extend(rest.next()),
                        _ => text.push(c),
                    }
                }
                literals.push(text.split_whitespace().collect::<Vec<_>>().join(" "));
            }
            _ => {}
        }
    }
    literals
}

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let is_test = matches!(
            &*name,
            "tests" | "tests.rs" | "benches" | "target" | "examples"
        );
        if is_test {
            continue;
        }
        if path.is_dir() {
            sources(&path, found);
        } else if name.ends_with(".rs") {
            found.push(path);
        }
    }
}

/// Phrases of remedies that destroy data.
const ERASING: &[&str] = &[
    "leases release",
    "--truncate",
    "data=wipe",
    "--wipe",
    "nvme format",
    "erased",
    "delete it to",
    "delete that file",
    "move it away",
];

/// Phrases of remedies that keep data. A message must name such a remedy before one that destroys data.
const KEEPING: &[&str] = &[
    "data=keep",
    "choose ",
    "use another",
    "say ",
    "lease it",
    "restore",
    "use the profile",
    "start its holder",
    "Start it again with the same options",
    "to keep",
    "--keep",
    "without ",
    "use the version",
];

/// Texts that report a result or explain a command, and so are not remedies.
const FACTS: &[&str] = &[
    "is erased before another id gets",
    "was taken out of the ledger",
    "Bytes of previous owners that were erased",
    "Ranges with data of previous owners",
    "cannot be erased",
    "{release} has it erased, and the lease begins empty",
];

#[test]
fn no_message_offers_data_loss_as_the_first_remedy() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files = Vec::new();
    for dir in ["nvme-mpt", "vmm-device", "hypervisor-glue"] {
        sources(&root.join(dir), &mut files);
    }
    let mut looked_at = 0;
    let mut wrong = Vec::new();
    for file in files {
        let source = fs::read_to_string(&file).unwrap();
        // Unit tests stand at the end of a file.
        let source = source.split("#[cfg(test)]").next().unwrap();
        for text in literals(source) {
            let erasing = ERASING.iter().filter_map(|word| text.find(word)).min();
            // Shorter literals are parts of commands and names.
            let Some(at) = erasing.filter(|_| text.len() > 40) else {
                continue;
            };
            looked_at += 1;
            let is_fact = FACTS.iter().any(|fact| text.contains(fact));
            let is_allowed = KEEPING.iter().any(|word| text[..at].contains(word));
            if !is_fact && !is_allowed {
                wrong.push(format!("{}: {text}", file.display()));
            }
        }
    }
    assert!(looked_at >= 10, "the texts are found: {looked_at}");
    assert!(wrong.is_empty(), "{wrong:#?}");
}

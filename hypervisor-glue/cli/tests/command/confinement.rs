//! Servers under seccomp and Landlock.
//!
//! The system call filter is on by default, so all other tests of the command run with the filter, too.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;

use nvme_mpt_tests::not_checked::not_checked;
use tempfile::TempDir;

use crate::supervised_server::SupervisedServer;
use crate::support::{Bench, Server};

/// Functions of a server: a file, memory, and a null drive with a dedicated poller on processor 0.
const FUNCTIONS: [&str; 3] = [
    "socket=a.sock,path=drive.img,id=a",
    "socket=b.sock,path=memory:1M,id=b",
    "socket=c.sock,path=null:1G,poll=dedicated:event@0,id=c",
];

/// Returns a field of `/proc/PROCESS/task/THREAD/status`, for each thread.
fn thread_status_values(process: &str, field: &str) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let statuses =
        tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("status")).ok());
    let values = statuses.map(|status| {
        let value = status.lines().find_map(|line| line.strip_prefix(field));
        value.expect(field).trim().parse().unwrap()
    });
    values.collect()
}

/// Returns the number of seccomp filters of each thread.
fn filters(process: &str) -> Vec<u32> {
    thread_status_values(process, "Seccomp_filters:")
}

fn own_filters() -> u32 {
    filters("self")[0]
}

/// Asserts that each thread of a server has one filter more than this process.
fn assert_filtered(process: &str) {
    let filters = filters(process);
    assert!(filters.len() > 3, "{filters:?}");
    let expected = own_filters() + 1;
    assert!(
        filters.iter().all(|count| *count == expected),
        "{filters:?}"
    );
    assert!(
        thread_status_values(process, "Seccomp:")
            .iter()
            .all(|mode| *mode == 2)
    );
    assert!(
        thread_status_values(process, "NoNewPrivs:")
            .iter()
            .all(|set| *set == 1)
    );
}

#[test]
fn each_thread_has_the_filter_of_system_calls() {
    let bench = Bench::new();
    let server = bench.serve("one", &FUNCTIONS).unwrap();
    assert_filtered(&server.pid().to_string());
    bench
        .ask("add", &["socket=d.sock,path=memory:2M,id=d"])
        .unwrap();
    assert_filtered(&server.pid().to_string());
    server.stop();
}

#[test]
fn a_filter_can_be_left_out_and_can_log_alone() {
    let bench = Bench::new();
    for (choice, more) in [("false", 0), ("log", 1), ("true", 1)] {
        let mut serve = bench.serve_command("one", &FUNCTIONS);
        serve.args(["--seccomp", choice]);
        let server = Server::start(serve).unwrap();
        let filters = filters(&server.pid().to_string());
        let expected = own_filters() + more;
        assert!(
            filters.iter().all(|count| *count == expected),
            "{choice}: {filters:?}"
        );
        server.stop();
    }
    let mut serve = bench.serve_command("one", &FUNCTIONS);
    let refused = serve.args(["--seccomp", "off"]).output().unwrap();
    let stderr = String::from_utf8(refused.stderr).unwrap();
    assert!(stderr.contains("use true, false or log"), "{stderr}");
}

#[test]
fn the_next_server_inherits_the_filter_and_adds_none() {
    let bench = Bench::new();
    let supervised = SupervisedServer::start(&bench, &FUNCTIONS);
    for _ in 0..3 {
        assert_filtered(&supervised.server_pid().unwrap());
        supervised.upgrade(&bench);
    }
    assert_filtered(&supervised.server_pid().unwrap());
    // The supervisor has no filter, so the server that it starts inherits none.
    supervised.kill_server();
    assert_filtered(&supervised.server_pid().unwrap());
    supervised.stop();
}

/// Creates a directory with an image and a profile. No Landlock rule of a server gives access to this directory.
fn outside() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let image = File::create(dir.path().join("outside.img")).unwrap();
    image.set_len(1 << 20).unwrap();
    let profile = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../resources/drives/nvm.toml");
    fs::copy(profile, dir.path().join("profile.toml")).unwrap();
    dir
}

/// Returns whether the log says that Landlock confines the server.
fn is_restricted(log: &str) -> bool {
    let is_restricted = log.contains("Confined by Landlock");
    if !is_restricted {
        assert!(
            log.contains("Not confined by Landlock: this kernel"),
            "{log}"
        );
        not_checked("this kernel has no Landlock, so no rule is enforced");
    }
    is_restricted
}

/// Asserts that Landlock refuses an `add`, and that the message names the rule that would allow it.
fn assert_refused(bench: &Bench, options: &str, path: &Path, rule: &str) {
    let message = bench.ask("add", &[options]).unwrap_err();
    let refused = format!("Landlock denies this server {}", path.display());
    assert!(message.contains(&refused), "{message}");
    assert!(
        message.contains(&format!("--landlock-rules {rule}")),
        "{message}"
    );
    assert!(message.contains("Permission denied"), "{message}");
}

#[test]
fn landlock_refuses_files_that_no_rule_names() {
    let (bench, outside) = (Bench::new(), outside());
    let dir = outside.path().display();
    let rule = format!("path={dir},access=rw");
    let mut serve = bench.serve_command("one", &FUNCTIONS);
    serve.args(["--landlock", "--log", "info"]);
    let server = Server::start(serve).unwrap();

    let image = outside.path().join("outside.img");
    let add = format!("socket=d.sock,path={},id=d", image.display());
    let outside_options = format!("socket={dir}/d.sock,path=memory:2M,id=d");
    let profile = format!("socket=d.sock,path=memory:2M,id=d,profile={dir}/profile.toml");
    let is_enforced = bench.ask("add", &[&add]).is_err();
    if is_enforced {
        assert_refused(&bench, &add, &image, &rule);
        assert_refused(&bench, &outside_options, outside.path(), &rule);
        let readable = format!("path={dir},access=r");
        assert_refused(&bench, &profile, outside.path(), &readable);
        let reserve = format!("owner=0,path={},id=r,size=1M", image.display());
        let message = bench.ask("reserve", &[&reserve]).unwrap_err();
        assert!(message.contains("Landlock denies"), "{message}");
    }
    // Files beside the server's own files are allowed, and existing functions work.
    let image = File::create(bench.path("inside.img")).unwrap();
    image.set_len(1 << 20).unwrap();
    bench
        .ask("add", &["socket=e.sock,path=inside.img,id=e"])
        .unwrap();
    bench.ask("remove", &["e"]).unwrap();
    let absent = bench.ask("add", &["socket=e.sock,path=absent.img,id=e"]);
    assert!(absent.unwrap_err().contains("does not exist"));
    let (status, log) = server.signal("TERM");
    assert!(status.success(), "{log}");
    assert_eq!(is_restricted(&log), is_enforced, "{log}");
}

#[test]
fn an_image_behind_a_link_may_have_a_profile() {
    let (bench, outside) = (Bench::new(), outside());
    let image = outside.path().join("outside.img");
    symlink(image, bench.path("linked.img")).unwrap();
    let profile = outside.path().join("profile.toml");
    let function = format!(
        "socket=a.sock,path=linked.img,id=a,profile={}",
        profile.display()
    );
    let mut serve = bench.serve_command("one", &[&function]);
    serve.args(["--landlock", "--log", "info"]);
    let (status, log) = Server::start(serve).unwrap().signal("TERM");
    assert!(status.success(), "{log}");
    is_restricted(&log);
}

#[test]
fn landlock_rules_apply_to_the_next_server() {
    let (bench, outside) = (Bench::new(), outside());
    fs::write(bench.path("serve.toml"), "").unwrap();
    let mut serve = bench.serve_command("one", &FUNCTIONS);
    serve.args(["--landlock", "--log", "info", "--config", "serve.toml"]);
    let supervised = SupervisedServer::start_command(&bench, &["--delay", "0"], &serve);
    let image = outside.path().join("outside.img");
    let add = format!("socket=d.sock,path={},id=d", image.display());
    if is_restricted(&supervised.log()) {
        let dir = outside.path().display();
        let rule = format!("path={dir},access=rw");
        assert_refused(&bench, &add, &image, &rule);
        let table = format!("[[landlock-rule]]\npath = \"{dir}\"\naccess = \"rw\"\n");
        fs::write(bench.path("serve.toml"), table).unwrap();
        bench.ask("reload", &[]).unwrap();
        assert_refused(&bench, &add, &image, &rule);
        // More upgrades than the 16 layers of Landlock rules that the kernel allows.
        for _ in 0..17 {
            supervised.upgrade(&bench);
        }
        let message = bench.ask("add", &[&add]).unwrap_err();
        assert!(message.contains("Permission denied"), "{message}");
        // The supervisor starts a new server, which inherits no rules.
        supervised.kill_server();
    }
    bench.ask("add", &[&add]).unwrap();
    supervised.upgrade(&bench);
    supervised.kill_server();
    let listed = bench.ask("list", &[]).unwrap();
    assert!(!listed.contains("failed"), "{listed}");
    supervised.stop();
}

#[test]
fn the_program_of_an_upgrade_needs_a_rule_as_well() {
    let (bench, outside) = (Bench::new(), outside());
    let program = outside.path().join("nvme-mpt");
    fs::copy(env!("CARGO_BIN_EXE_nvme-mpt"), &program).unwrap();
    let program = program.to_str().unwrap();
    let mut serve = bench.serve_command("one", &FUNCTIONS);
    serve.args(["--landlock", "--log", "info"]);
    let supervised = SupervisedServer::start_command(&bench, &["--delay", "0"], &serve);
    if is_restricted(&supervised.log()) {
        let message = bench.ask("upgrade", &["--binary", program]).unwrap_err();
        assert!(
            message.contains(&format!("Landlock denies this server {program} (rx)")),
            "{message}"
        );
    }
    supervised.upgrade(&bench);
    supervised.stop();

    let rule = format!("path={},access=rx", outside.path().display());
    serve.args(["--landlock-rules", &rule]);
    let supervised = SupervisedServer::start_command(&bench, &["--delay", "0"], &serve);
    bench.ask("upgrade", &["--binary", program]).unwrap();
    supervised.stop();
}

#[test]
fn an_invalid_rule_is_refused_and_a_rule_for_an_absent_path_is_named() {
    let bench = Bench::new();
    for (arguments, message) in [
        (
            &["--landlock", "--landlock-rules", "path=.,access=ro"][..],
            "use letters of rwx",
        ),
        (&["--landlock-rules", "path=.,access=rw"], "--landlock"),
    ] {
        let mut serve = bench.serve_command("one", &FUNCTIONS);
        let output = serve.args(arguments).output().unwrap();
        assert!(!output.status.success());
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.contains(message), "{stderr}");
    }
    // When a supervisor starts the next server, a directory that a rule names may have been removed.
    let mut serve = bench.serve_command("one", &FUNCTIONS);
    serve.args(["--landlock", "--landlock-rules", "path=absent,access=rw"]);
    let (status, log) = Server::start(serve).unwrap().signal("TERM");
    assert!(status.success(), "{log}");
    assert!(
        log.contains("absent, which a Landlock rule names, does not exist"),
        "{log}"
    );
}

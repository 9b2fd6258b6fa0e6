//! Tests that edit a server's configuration file before they replace or kill the server. The next server must serve the
//! functions of the old one.

use std::fs;
use std::path::Path;

use nvme_mpt_tests::controller::{Config, Controller};
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::rng::Rng;
use nvme_mpt_tests::vfio_user::VfioUserBar;

use crate::supervised_server::SupervisedServer;
use crate::support::Bench;

/// Client of a function, which must not lose its drive.
struct Guest {
    disk: Disk,
    _controller: Controller,
    id: String,
    /// First byte of each block, by block.
    written: Vec<u8>,
}

impl Guest {
    fn connect(bench: &Bench, id: &str) -> Self {
        let memory = GuestMemory::new(&[(1 << 20, 16 << 20)]).unwrap();
        let bar = VfioUserBar::attach(&bench.path(&format!("{id}.sock")), &memory).unwrap();
        let config = Config::default();
        let mut controller =
            Controller::attach(std::sync::Arc::new(bar), memory, config, 1).unwrap();
        let disk = Disk::open(&mut controller, 1).unwrap();
        Self {
            disk,
            _controller: controller,
            id: id.to_owned(),
            written: vec![0; 8],
        }
    }

    /// Writes a block, and verifies all blocks.
    fn check(&mut self, rng: &mut Rng, after: &str) {
        let block = rng.below(self.written.len() as u64);
        let byte = rng.below(255) as u8 + 1;
        let lost = format!("{} lost its drive after {after}", self.id);
        self.disk.write(block, &[byte; 512]).expect(&lost);
        self.written[block as usize] = byte;
        for (block, byte) in (0..).zip(&self.written) {
            let read = self.disk.read(block, 1).expect(&lost);
            assert_eq!(read, vec![*byte; 512], "{lost}");
        }
    }
}

/// The configuration file of a server.
struct EditedConfig<'a> {
    bench: &'a Bench,
    /// Lines with the keys of each function, by id.
    functions: Vec<(String, Vec<String>)>,
    /// Drives that stay open without functions.
    drives: Vec<String>,
}

impl EditedConfig<'_> {
    /// Creates a configuration with functions a, b and c.
    fn new(bench: &Bench) -> EditedConfig<'_> {
        let keys = |id: &str, more: &[&str]| {
            let common = [
                format!("socket = \"{id}.sock\""),
                "path = \"drive.img\"".to_owned(),
            ];
            let more = more.iter().map(|line| (*line).to_owned());
            (id.to_owned(), common.into_iter().chain(more).collect())
        };
        EditedConfig {
            bench,
            functions: vec![
                keys("a", &["range = \"0+8M\"", "profile = \"./nvm.toml\""]),
                keys(
                    "b",
                    &[
                        "range = \"8M+8M\"",
                        "iops = 100000",
                        "profile = \"./nvm.toml\"",
                    ],
                ),
                keys(
                    "c",
                    &["size = \"8M\"", "unit = \"1M\"", "profile = \"./nvm.toml\""],
                ),
            ],
            drives: vec!["path = \"memory:3M\"".to_owned()],
        }
    }

    fn path(&self) -> std::path::PathBuf {
        self.bench.path("serve.toml")
    }

    fn write(&self) {
        let mut text = String::new();
        for (id, keys) in &self.functions {
            text += &format!("[[function]]\nid = \"{id}\"\n{}\n\n", keys.join("\n"));
        }
        for drive in &self.drives {
            text += &format!("[[drive]]\n{drive}\n\n");
        }
        fs::write(self.path(), text).unwrap();
    }

    /// Makes a random edit. Returns its name.
    fn edit(&mut self, rng: &mut Rng) -> String {
        let place = rng.below(3) as usize;
        let set = |keys: &mut Vec<String>, key: &str, value: &str| {
            keys.retain(|line| !line.starts_with(key));
            keys.push(format!("{key} = {value}"));
        };
        // The previous edit may have left a directory at the path.
        let _ = fs::remove_dir(self.path());
        let name = match rng.below(13) {
            0 => {
                *self = EditedConfig::new(self.bench);
                "the first file".to_owned()
            }
            1 => {
                let place = place.min(self.functions.len().saturating_sub(1));
                if place < self.functions.len() {
                    self.functions.remove(place);
                }
                "a removed section".to_owned()
            }
            2 => {
                self.functions.clear();
                self.drives.clear();
                "an empty file".to_owned()
            }
            3 => {
                let id = format!("n{}", rng.below(3));
                let keys = vec![
                    format!("socket = \"{id}.sock\""),
                    "path = \"memory:2M\"".to_owned(),
                ];
                self.functions.retain(|(other, _)| *other != id);
                self.functions.push((id, keys));
                "a new section".to_owned()
            }
            4 => {
                fs::write(self.path(), "[[function").unwrap();
                return "a file that is no TOML".to_owned();
            }
            5 => {
                let _ = fs::remove_file(self.path());
                return "a removed file".to_owned();
            }
            6 => {
                let _ = fs::remove_file(self.path());
                let _ = fs::create_dir(self.path());
                return "a folder in its place".to_owned();
            }
            7 => {
                let profile = self.bench.path("nvm.toml");
                let good =
                    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../resources/drives/nvm.toml");
                match rng.below(2) {
                    0 => fs::write(profile, "model = ").unwrap(),
                    _ => drop(fs::copy(good, profile).unwrap()),
                }
                return "another profile".to_owned();
            }
            kind => {
                let Some((id, keys)) = self.functions.get_mut(place) else {
                    return "no edit".to_owned();
                };
                let number = rng.below(4);
                match kind {
                    8 => set(keys, "range", &format!("\"{number}M+16M\"")),
                    9 => set(keys, "queues", &format!("{}", number + 1)),
                    10 => set(keys, "serial", &format!("\"S{number}\"")),
                    11 => set(keys, "iops", &format!("{}", 100_000 + number)),
                    _ => *id = format!("r{number}"),
                }
                format!("an edit of kind {kind}")
            }
        };
        self.write();
        name
    }
}

/// Runs clients of three configured functions and of one added function, while `steps` random steps edit the file, reload
/// it, kill the server and upgrade the server.
fn no_client_loses_its_drive(seed: u64, steps: usize) {
    let bench = Bench::new();
    let profile = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../resources/drives/nvm.toml");
    fs::copy(profile, bench.path("nvm.toml")).unwrap();
    // Installs the program like a package: an upgrade of the package replaces the file.
    let program = bench.path("nvme-mpt");
    let install = || {
        let _ = fs::remove_file(&program);
        if fs::hard_link(env!("CARGO_BIN_EXE_nvme-mpt"), &program).is_err() {
            fs::copy(env!("CARGO_BIN_EXE_nvme-mpt"), &program).unwrap();
        }
    };
    install();
    let mut file = EditedConfig::new(&bench);
    file.write();
    let mut serve = bench.serve_command("one", &[]);
    serve.args(["--config", "serve.toml"]);
    let serve = {
        let mut installed = std::process::Command::new(&program);
        installed.args(serve.get_args());
        installed
    };
    let options = ["--deaths", "100000", "--delay", "0"];
    let supervised = SupervisedServer::start_command(&bench, &options, &serve);
    let added = "path=memory:4M,socket=d.sock,id=d";
    bench.ask("add", &[added]).unwrap();
    let mut guests = ["a", "b", "c", "d"].map(|id| Guest::connect(&bench, id));
    let mut rng = Rng::new(seed);
    for step in 0..steps {
        let name = match rng.below(10) {
            0..4 => file.edit(&mut rng),
            4 => {
                // The server may refuse the reload, because a client is connected to a function that changes.
                let _ = bench.ask("reload", &[]);
                "reload".to_owned()
            }
            5 => {
                supervised.upgrade(&bench);
                "upgrade".to_owned()
            }
            6 => {
                // The postinst script of the package reloads the unit, which upgrades the server.
                install();
                supervised.upgrade(&bench);
                "an upgrade of the package".to_owned()
            }
            7 => {
                let number = rng.below(100);
                let _ = bench.ask("limit", &["b", &format!("iops={}", 200_000 + number)]);
                let _ = bench.ask("resize", &["c", &format!("{}M", 8 + number % 4)]);
                "limit and resize".to_owned()
            }
            8 => {
                let _ = bench.ask("add", &["path=memory:5M,socket=e.sock,id=e"]);
                let _ = bench.ask("remove", &["e"]);
                "add and remove".to_owned()
            }
            _ => {
                supervised.kill_server();
                "SIGKILL".to_owned()
            }
        };
        for guest in &mut guests {
            guest.check(&mut rng, &format!("step {step} of seed {seed}, {name}"));
        }
    }
    let listed = bench.ask("list", &[]).unwrap();
    assert_eq!(listed.matches("connected").count(), 4, "{listed}");
    drop(guests);
    supervised.stop();
}

#[test]
fn edits_of_the_file_take_no_drive_from_a_client() {
    no_client_loses_its_drive(1, 60);
}

#[test]
#[ignore = "takes 2,000 steps, of which 700 start a server"]
fn two_thousand_edits_of_the_file_take_no_drive_from_a_client() {
    for seed in 2..12 {
        no_client_loses_its_drive(seed, 200);
    }
}

#[test]
fn functions_continue_after_an_edit_and_differences_are_reported_until_a_reload() {
    let bench = Bench::new();
    let write = |range: &str| {
        let text = format!(
            "[[function]]\nid = \"a\"\nsocket = \"a.sock\"\npath = \"drive.img\"\nrange = \"{range}\"\n"
        );
        fs::write(bench.path("serve.toml"), text).unwrap();
    };
    write("0+8M");
    let mut serve = bench.serve_command("one", &[]);
    serve.args(["--config", "serve.toml"]);
    let supervised =
        SupervisedServer::start_command(&bench, &["--deaths", "100000", "--delay", "0"], &serve);
    let mut guest = Guest::connect(&bench, "a");
    let mut rng = Rng::new(7);
    let list = || bench.ask("list", &[]).unwrap();
    let upgrade = |arguments: &[&str]| {
        let control = ["--control", "one.control"];
        let output = bench.run("upgrade", &[&control, arguments].concat());
        let stderr = String::from_utf8(output.stderr).unwrap();
        (output.status.code(), stderr)
    };
    assert_eq!(upgrade(&["--strict"]), (Some(0), String::new()));
    assert!(!list().contains("the file"), "{}", list());
    write("0+16M");
    let pending_note = "pending: the file has another range";
    assert!(list().contains(pending_note), "{}", list());
    let (code, error_message) = upgrade(&[]);
    let warning = "warning: Function a is served as before, but the file has another range";
    assert_eq!(code, Some(0), "{error_message}");
    assert!(error_message.contains(warning), "{error_message}");
    guest.check(&mut rng, "an upgrade");
    let (code, error_message) = upgrade(&["--strict"]);
    assert_eq!(code, Some(3), "{error_message}");
    assert!(error_message.contains(warning), "{error_message}");
    guest.check(&mut rng, "a strict upgrade");
    supervised.kill_server();
    guest.check(&mut rng, "a SIGKILL");
    assert!(list().contains(pending_note), "{}", list());
    let message =
        "Function a is served as before, but the file has another range: `nvme-mpt reload`";
    assert!(supervised.log().contains(message), "{}", supervised.log());
    fs::write(bench.path("serve.toml"), "[[function").unwrap();
    let (code, error_message) = upgrade(&["--strict"]);
    assert_eq!(code, Some(3), "{error_message}");
    assert!(
        error_message.contains("is not written in TOML"),
        "{error_message}"
    );
    supervised.kill_server();
    guest.check(&mut rng, "a broken file");
    write("0+16M");
    let refused = bench.ask("reload", &[]).unwrap_err();
    assert!(refused.contains("A VMM is connected"), "{refused}");
    guest.check(&mut rng, "a reload that was refused");
    drop(guest);
    let applied = bench.ask_until("reload", &["--force"], |_| true).unwrap();
    assert!(applied.contains("Changed: a"), "{applied}");
    assert!(!list().contains("the file"), "{}", list());
    supervised.kill_server();
    assert!(list().contains("0+16M"), "{}", list());
    supervised.stop();
}

#[test]
fn a_function_of_a_whole_drive_that_grew_keeps_its_range() {
    let bench = Bench::new();
    let supervised = SupervisedServer::start(&bench, &["path=drive.img,socket=a.sock,id=a"]);
    let mut guest = Guest::connect(&bench, "a");
    let mut rng = Rng::new(3);
    let drive = fs::File::options()
        .write(true)
        .open(bench.path("drive.img"));
    drive.unwrap().set_len(128 << 20).unwrap();
    for kills in [false, true, false] {
        match kills {
            true => supervised.kill_server(),
            false => supervised.upgrade(&bench),
        }
        guest.check(&mut rng, "the drive grew");
        let listed = bench.ask("list", &[]).unwrap();
        assert!(listed.contains("0+64M"), "{listed}");
    }
    drop(guest);
    supervised.stop();
}

#[test]
fn an_upgrade_is_refused_while_a_drives_path_names_another_file() {
    let bench = Bench::new();
    let supervised = SupervisedServer::start(&bench, &["path=drive.img,socket=a.sock,id=a"]);
    let mut guest = Guest::connect(&bench, "a");
    let mut rng = Rng::new(4);
    let (path, aside) = (bench.path("drive.img"), bench.path("aside.img"));
    fs::rename(&path, &aside).unwrap();
    for (what, message) in [
        ("a rename", "No such file"),
        ("another file at its path", "its first byte was 0 of file:"),
    ] {
        let refused = bench.ask("upgrade", &[]).unwrap_err();
        assert!(
            refused.contains(message)
                && refused.contains("drive.img does not lead to the open drive"),
            "{refused}"
        );
        guest.check(&mut rng, what);
        fs::write(&path, vec![0x5a; 64 << 20]).unwrap();
    }
    // A killed server cannot refuse to be replaced. Its successor waits for the drive, and gives the guest no other drive.
    supervised.kill_server();
    let listed = bench.ask("list", &[]).unwrap();
    assert!(listed.contains("failed"), "{listed}");
    fs::rename(&aside, &path).unwrap();
    let listed = bench.ask_until("list", &[], |listed| listed.contains("connected"));
    assert!(listed.as_ref().unwrap().contains("connected"), "{listed:?}");
    guest.check(&mut rng, "the death of its server without the drive's path");
    supervised.upgrade(&bench);
    guest.check(&mut rng, "an upgrade with the drive's path");
    drop(guest);
    supervised.stop();
}

#[test]
fn a_function_that_cannot_be_stored_is_not_removed() {
    let bench = Bench::new();
    let supervised = SupervisedServer::start(&bench, &[]);
    bench
        .ask("add", &["path=memory:1M,socket=a.sock,id=a"])
        .unwrap();
    let mut guest = Guest::connect(&bench, "a");
    // A directory at this path prevents the server from replacing the file.
    let file = bench.path("one.control.functions.toml");
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    let error = bench.ask("remove", &["a", "--force"]).unwrap_err();
    assert!(error.contains("Cannot write"), "{error}");
    guest.check(&mut Rng::new(4), "a removal that was refused");
    fs::remove_dir(&file).unwrap();
    bench.ask("remove", &["a", "--force"]).unwrap();
    let listed = bench.ask("list", &[]).unwrap();
    assert!(listed.contains("No functions"), "{listed}");
    supervised.stop();
}

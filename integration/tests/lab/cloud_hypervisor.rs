//! Guests of patched Cloud Hypervisor in its sandbox, under load: functions come and go, the VM pauses, is restored and
//! migrates. All data must be right, and no thread of the VMM may use a system call or a file that its filter or Landlock
//! refuses.

use std::env;
use std::fs;
use std::process;
use std::thread;
use std::time::Duration;

use integration::checks::FULL;
use integration::progress::print_line;
use integration::vmms::cloud_hypervisor::{read, request};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use serde_json::{Map, Value, json};

use crate::fixture::{CheckEnvironment, Failure, await_that, expect, sh, with_path};
use crate::loaded_guest::{LoadedGuest, Migration};
use crate::vmms::is_patched_cloud_hypervisor_named;
use crate::{ExpectedRefusals, Group};

pub(crate) const GROUP: Group = Group::Inside {
    name: "cloud_hypervisor",
    drives: Vec::new,
    refused: ExpectedRefusals::None,
    checks: &[
        ("adds_and_removes_functions", adds_and_removes_functions),
        ("pauses_and_restores", pauses_and_restores),
        ("migrates", migrates),
    ],
};

/// Functions that are added and removed.
const FUNCTIONS: usize = 5;
/// Functions that are added and removed with `--full`.
const FUNCTIONS_OF_FULL: usize = 100;
/// Pauses of the VM, and how long each lasts.
const PAUSES: usize = 3;
const PAUSE: Duration = Duration::from_secs(1);
const PLUGGED_BYTES: u64 = 1 << 20;

/// Sandbox of a VMM: Landlock, and seccomp filters that log what they would refuse.
struct Sandbox {
    arguments: Vec<String>,
    /// Number of refusals in the host's log before the VMM was started.
    refusals: usize,
}

/// Returns the refusals of seccomp filters in the host's log.
fn refusals() -> Result<Vec<String>, Failure> {
    // Record type of seccomp (linux/audit.h, AUDIT_SECCOMP).
    let logged = sh("dmesg | grep 'type=1326' || true")?;
    Ok(logged.lines().map(str::to_owned).collect())
}

/// Makes a system call that a filter logs. Else, a VMM could seem to be quiet because nothing is logged at all.
fn log_a_refusal() -> Result<(), Failure> {
    let before = refusals()?.len();
    let thread = thread::spawn(|| -> Result<u32, seccompiler::Error> {
        let rules = [(libc::SYS_getpid, Vec::new())].into();
        let architecture = env::consts::ARCH.try_into()?;
        let (other, match_action) = (SeccompAction::Allow, SeccompAction::Log);
        let filter = SeccompFilter::new(rules, other, match_action, architecture)?;
        let filter: BpfProgram = filter.try_into()?;
        seccompiler::apply_filter(&filter)?;
        Ok(process::id())
    });
    let result = thread.join().map_err(|_| "The thread panicked")?;
    result.map_err(|error| error.to_string())?;
    await_that("a refusal in the log", || Ok(refusals()?.len() > before))
}

impl Sandbox {
    fn new(bench: &CheckEnvironment) -> Result<Self, Failure> {
        log_a_refusal()?;
        // With the images of functions that are added later, and the state directory.
        let files = format!("path={},access=rw", bench.dir().display());
        let arguments = ["--seccomp", "log", "--landlock", "--landlock-rules", &files];
        Ok(Self {
            arguments: arguments.map(str::to_owned).to_vec(),
            refusals: refusals()?.len(),
        })
    }

    /// Returns arguments of a VMM that boots a guest.
    fn of_boot(&self) -> Vec<&str> {
        self.arguments.iter().map(String::as_str).collect()
    }

    /// Returns arguments of a VMM that restores or receives a guest, whose configuration has the rules of Landlock.
    fn of_successor(&self) -> Vec<&str> {
        self.of_boot().into_iter().take(2).collect()
    }

    /// Fails if a thread has used a system call that its filter refuses.
    fn expect_quiet(&self) -> Result<(), Failure> {
        let refusals = refusals()?;
        expect(refusals.len() == self.refusals, || {
            format!("The filters refuse:\n{}", refusals.join("\n"))
        })
    }
}

/// Adds a function and removes it, again and again. The guest verifies each.
fn adds_and_removes_functions(bench: &CheckEnvironment) -> Result<(), Failure> {
    if !is_patched_cloud_hypervisor_named()? {
        return Ok(());
    }
    let sandbox = Sandbox::new(bench)?;
    let mut guest = LoadedGuest::start(bench, false, &sandbox.of_boot())?;
    let image = bench.dir().join("plugged.img");
    let file = fs::File::create(&image).and_then(|file| file.set_len(PLUGGED_BYTES));
    file.map_err(with_path(&image))?;
    guest.await_passes()?;
    let functions = match env::var_os(FULL) {
        Some(_) => FUNCTIONS_OF_FULL,
        None => FUNCTIONS,
    };
    for number in 1..=functions {
        let id = format!("plugged{number}");
        let function = json!({"id": id, "path": image, "state_dir": bench.state_dir()});
        request(bench.dir(), "vm.add-nvme-mpt", &function)?;
        guest.await_line(&format!("guest: plugged {number}."))?;
        let counters = read(bench.dir(), "vm.counters")?;
        // A queue has counters once it was used: which of them was depends on the guest's processors.
        let queues = format!("{id}/queue");
        let mut names = counters.as_object().into_iter().flat_map(Map::keys);
        expect(names.any(|name| name.starts_with(&queues)), || {
            format!("vm.counters has no {queues}: {counters}")
        })?;
        request(bench.dir(), "vm.remove-device", &json!({"id": id}))?;
        guest.await_line(&format!("guest: unplugged {number}."))?;
        // The guest ejects the slot after its driver has let go.
        await_that(&format!("the end of {id}"), || {
            let info = read(bench.dir(), "vm.info")?;
            Ok(info["device_tree"].get(&id).is_none())
        })?;
    }
    guest.forget()?;
    guest.await_passes()?;
    sandbox.expect_quiet()?;
    fs::remove_file(&image).map_err(with_path(&image))?;
    guest.end(bench)
}

/// Pauses and resumes the VM, saves it, and restores it in another process.
fn pauses_and_restores(bench: &CheckEnvironment) -> Result<(), Failure> {
    if !is_patched_cloud_hypervisor_named()? {
        return Ok(());
    }
    let sandbox = Sandbox::new(bench)?;
    let mut guest = LoadedGuest::start(bench, false, &sandbox.of_boot())?;
    for _ in 0..PAUSES {
        guest.await_passes()?;
        request(bench.dir(), "vm.pause", &Value::Null)?;
        thread::sleep(PAUSE);
        request(bench.dir(), "vm.resume", &Value::Null)?;
        guest.forget()?;
    }
    for mode in ["copy", "ondemand"] {
        // A snapshot does not have the drive's content, so each is restored once.
        let url = guest.save(bench)?;
        guest.restore(bench, &url, mode, &sandbox.of_successor())?;
        guest.await_passes()?;
        guest.remove_snapshot(bench)?;
    }
    sandbox.expect_quiet()?;
    guest.end(bench)
}

/// Migrates a VM to another process, locally and over TCP.
fn migrates(bench: &CheckEnvironment) -> Result<(), Failure> {
    if !is_patched_cloud_hypervisor_named()? {
        return Ok(());
    }
    sh("ip link set lo up")?;
    let sandbox = Sandbox::new(bench)?;
    for how in [Migration::Local, Migration::PreCopy] {
        let mut guest = LoadedGuest::start(bench, false, &sandbox.of_boot())?;
        guest.await_passes()?;
        let mut sender = guest.migrate(bench, how, &sandbox.of_successor())?;
        sender.kill();
        print_line(&format!("        {how:?}: migrated"));
        guest.await_passes()?;
        guest.end(bench)?;
    }
    sandbox.expect_quiet()
}

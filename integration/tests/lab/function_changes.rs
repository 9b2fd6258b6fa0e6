//! Functions that are added and removed while a guest of the reference VMM runs, and guests that continue in another process.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use integration::process::{SupervisedChild, file_tail};
use integration::progress::print_line;
use integration::vmms::reference;

use crate::fixture::{CheckEnvironment, Failure, TIMEOUT, await_that, expect, sh, with_path};
use crate::vmm::root;
use crate::{ExpectedRefusals, Group, init};

pub(crate) const GROUP: Group = Group::Inside {
    name: "comings",
    drives: Vec::new,
    refused: ExpectedRefusals::None,
    checks: &[
        ("functions_come_and_go", functions_come_and_go),
        (
            "verify_goes_on_in_other_processes",
            verify_goes_on_in_other_processes,
        ),
    ],
};

/// Number of migrations of a guest, and of additions of a function.
const MOVES: usize = 20;
const ADDITIONS: usize = 50;

/// Additions after which the allocator's caches are full, and most KiB by which they may grow later.
const WARM_UP_ADDITIONS: usize = 10;
const GROWTH_MAX_KIB: u64 = 1024;

/// Timeout for closing unused resources.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Byte that fills the second disk, and bytes of the disk that are read.
const FILL: u8 = 0x5A;
const READ: usize = 65536;

/// Writes and verifies checksums in rounds.
const VERIFY: &str = r"
n=0
while true; do
    echo guest: begins $n.
    fio --name=verify --filename=/data --size=1m --rw=randwrite --bs=4k --iodepth=32 \
        --ioengine=libaio --direct=1 --verify=crc32c --verify_fatal=1 --randseed=$n --eta=never \
        --output=/tmp/fio || { cat /tmp/fio; echo guest: lost $n.; break; }
    echo guest: verified $n.
    n=$((n + 1))
done
";

/// Finds a second function, reads its disk, removes it, and waits until the host has taken it away, while fio verifies the
/// first function. The bus is rescanned only when the slot has a function: a function that the host is about to take would be
/// found again.
const ADD_REMOVE_SCRIPT: &str = r#"
(while [ ! -e /tmp/stop ]; do
    fio --name=verify --filename=/data --size=1m --rw=randwrite --bs=4k --iodepth=8 \
        --ioengine=libaio --direct=1 --verify=crc32c --verify_fatal=1 --eta=never \
        --output=/tmp/fio || { cat /tmp/fio; echo guest: lost; break; }
    echo >>/tmp/rounds
done) &
second=/sys/bus/pci/devices/0000:00:02.0
present() { [ $(devmem 0xE0010000 16) != 0xFFFF ]; }
n=0
while [ $n -lt ADDITIONS_COUNT ]; do
    echo guest: wants $n.
    until present; do usleep 20000; done
    echo 1 >/sys/bus/pci/rescan
    until disk=$(basename $second/nvme/nvme*/nvme*n1) && [ -b "/dev/$disk" ]; do usleep 20000; done
    echo guest: read $(head -c 65536 /dev/$disk | md5sum)
    echo 1 >$second/remove
    echo guest: lets go $n.
    while present; do usleep 20000; done
    echo guest: misses $n.
    n=$((n + 1))
done
touch /tmp/stop
wait
[ -s /tmp/rounds ] && echo guest: had I/O
"#;

/// A machine that is controlled by its control socket.
struct ControlledMachine {
    vmm: SupervisedChild,
    dir: PathBuf,
}

impl ControlledMachine {
    /// Boots a guest that runs `script` from a function. Returns the machine, and the options of the function.
    fn boot(bench: &CheckEnvironment, log: &str, script: &str) -> Result<(Self, String), Failure> {
        let assets = bench.v6_1()?;
        let image = root(bench, &assets, &init::script(script))?;
        let function = format!("path={}", image.display());
        let kernel = assets.kernel.image.display().to_string();
        let arguments = ["--cpus", "2", "--memory", "256"];
        let guest = ["--kernel", &kernel, "--cmdline", init::COMMAND_LINE];
        let function_argument = ["--nvme-mpt", &function];
        let arguments = [&arguments[..], &guest, &function_argument].concat();
        Ok((Self::start(bench, log, &arguments)?, function))
    }

    fn start(bench: &CheckEnvironment, log: &str, arguments: &[&str]) -> Result<Self, Failure> {
        let dir = bench.dir().to_owned();
        let vmm = reference::spawn(&dir, &bench.state_dir(), &dir.join(log), arguments)?;
        Ok(Self { vmm, dir })
    }

    /// Returns the machine's answer to a request. An error answer is an `Err`.
    fn request(&mut self, request: &str) -> Result<String, Failure> {
        let answer = reference::request(&self.dir, request);
        if answer.is_err() {
            // If the machine has ended, its end explains the missing answer.
            self.expect_alive()?;
        }
        Ok(answer?)
    }

    fn expect_alive(&mut self) -> Result<(), Failure> {
        let ended = self.vmm.try_wait()?;
        expect(ended.is_none(), || {
            let status = ended.map_or_else(String::new, |status| status.to_string());
            format!("It ended with {status}:\n{}", file_tail(self.vmm.log()))
        })
    }

    /// Waits until the guest has printed a line.
    fn await_line(&mut self, wanted: &str) -> Result<(), Failure> {
        await_that(wanted, || {
            let output = read_log(self.vmm.log())?;
            if output.contains(wanted) {
                return Ok(true);
            }
            self.expect_alive()?;
            expect(!output.contains("guest: lost"), || {
                format!("In vain for {wanted:?}:\n{output}")
            })?;
            Ok(false)
        })
    }

    /// Kills the machine, as a power cut would.
    fn stop(mut self) -> Result<String, Failure> {
        self.vmm.kill();
        read_log(self.vmm.log())
    }

    /// Returns the resources that a function must not leave behind.
    fn held_resources(&mut self) -> Result<MachineResources, Failure> {
        let of = |what: &str| PathBuf::from(format!("/proc/{}/{what}", self.vmm.pid()));
        let count = |path: PathBuf, is_ours: fn(&Path) -> bool| {
            let entries = fs::read_dir(&path).map_err(with_path(path))?;
            let entries = entries.flatten().filter(|entry| is_ours(&entry.path()));
            Ok::<_, Failure>(entries.count())
        };
        // The kernel starts and ends io_uring workers at any time.
        let is_of_process = |task: &Path| {
            fs::read_to_string(task.join("comm")).is_ok_and(|name| !name.starts_with("iou-"))
        };
        Ok(MachineResources {
            files: count(of("fd"), |_| true)?,
            threads: count(of("task"), is_of_process)?,
            // The allocator splits and joins anonymous mappings at any time.
            mappings: read_log(&of("maps"))?
                .lines()
                .filter(|line| line.contains(['/', '[']))
                .count(),
            kvm_resources: self.request("count")?,
        })
    }

    /// Waits until the machine holds at most `wanted`, and returns its resources. A connection of this test may be closed late,
    /// and may have been counted before.
    fn await_resources(&mut self, wanted: &MachineResources) -> Result<MachineResources, Failure> {
        let deadline = Instant::now() + CLOSE_TIMEOUT;
        loop {
            let holds = self.held_resources()?;
            let files = holds.files.max(wanted.files);
            if (MachineResources {
                files,
                ..holds.clone()
            }) == *wanted
            {
                return Ok(holds);
            }
            expect(Instant::now() < deadline, || {
                format!("{wanted:?} became {holds:?}")
            })?;
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns private memory in KiB, without the guest's shared memory.
    fn memory_kib(&self) -> Result<u64, Failure> {
        let status = read_log(&PathBuf::from(format!("/proc/{}/status", self.vmm.pid())))?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        kib.ok_or_else(|| Failure::from(format!("No RssAnon:\n{status}")))
    }

    /// Waits until the machine has ended successfully. Returns its log.
    fn await_end(mut self) -> Result<String, Failure> {
        let status = self.vmm.wait(TIMEOUT)?;
        expect(status.success(), || {
            format!("It ended with {status}:\n{}", file_tail(self.vmm.log()))
        })?;
        read_log(self.vmm.log())
    }
}

/// Resources of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
struct MachineResources {
    files: usize,
    threads: usize,
    /// Mappings of files, of named memory, and of the heap.
    mappings: usize,
    kvm_resources: String,
}

fn read_log(log: &Path) -> Result<String, Failure> {
    let output = fs::read(log).map_err(with_path(log))?;
    Ok(String::from_utf8_lossy(&output).into_owned())
}

/// Checks that a verifying guest continues from a snapshot in another process, repeatedly.
fn verify_goes_on_in_other_processes(bench: &CheckEnvironment) -> Result<(), Failure> {
    let (mut machine, function) = ControlledMachine::boot(bench, "console-0", VERIFY)?;
    let dir = bench.dir().join("snapshot");
    let path = dir.display().to_string();
    machine.await_line("guest: begins")?;
    let mut output = String::new();
    for moved in 0..MOVES {
        // The snapshot comes at a varying time of a round: while fio starts, writes or verifies.
        std::thread::sleep(Duration::from_millis(170 * (moved as u64 * 7 % 20)));
        machine.request(&format!("snapshot {path}"))?;
        output += &machine.await_end()?;
        let log = format!("console-{}", moved + 1);
        let restore = ["--restore", &path, "--nvme-mpt", &function];
        machine = ControlledMachine::start(bench, &log, &restore)?;
        // The guest must verify its data before the next migration.
        machine.await_line("guest: verified")?;
    }
    output += &machine.stop()?;
    // The guest is stopped at any time, so the last line may be incomplete.
    let whole = output.rfind('\n').map_or(0, |end| end + 1);
    let verified: Vec<&str> = output[..whole]
        .lines()
        .filter_map(|line| line.strip_prefix("guest: verified "))
        .collect();
    let rounds = (0..verified.len()).map(|round| format!("{round}."));
    expect(
        verified.len() >= MOVES && rounds.eq(verified.iter().copied()),
        || format!("The guest verified these rounds in {MOVES} moves: {verified:?}"),
    )?;
    fs::remove_dir_all(&dir).map_err(with_path(&dir))
}

/// Adds and removes a function repeatedly: the guest sees each function, and no resources are left behind.
fn functions_come_and_go(bench: &CheckEnvironment) -> Result<(), Failure> {
    let second = bench.dir().join("second.img");
    fs::write(&second, vec![FILL; 4 << 20]).map_err(with_path(&second))?;
    let script = ADD_REMOVE_SCRIPT.replace("ADDITIONS_COUNT", &ADDITIONS.to_string());
    let (mut machine, _) = ControlledMachine::boot(bench, "console", &script)?;
    let (mut held, mut memory) = (None, Vec::new());
    for coming in 0..ADDITIONS {
        machine.await_line(&format!("guest: wants {coming}."))?;
        let id = machine.request(&format!("add path={},id=second", second.display()))?;
        machine.await_line(&format!("guest: lets go {coming}."))?;
        machine.request(&format!("remove {id}"))?;
        machine.await_line(&format!("guest: misses {coming}."))?;
        // The first addition may leave resources that later additions reuse.
        let before = match held.take() {
            Some(before) => before,
            None => machine.held_resources()?,
        };
        held = Some(machine.await_resources(&before)?);
        memory.push(machine.memory_kib()?);
    }
    let output = machine.await_end()?;
    let (before, after) = (memory[WARM_UP_ADDITIONS], memory[ADDITIONS - 1]);
    print_line(&format!(
        "        {ADDITIONS} times the same: {}; from {before} to {after} KiB of memory",
        held.as_ref()
            .map_or_else(String::new, |held| format!("{held:?}"))
    ));
    // About 2 MiB may be allocated once at any time and kept. A leak grows with each addition.
    let steps = memory[WARM_UP_ADDITIONS..].windows(2);
    let once = steps.map(|step| step[1].saturating_sub(step[0])).max();
    expect(
        after <= before + GROWTH_MAX_KIB + once.unwrap_or_default(),
        || format!("Memory grew: {memory:?} KiB"),
    )?;
    let sum = sh(&format!(
        "head -c {READ} {} | md5sum | cut -d ' ' -f 1",
        second.display()
    ))?;
    let read = output
        .matches(&format!("guest: read {}", sum.trim()))
        .count();
    expect(
        read == ADDITIONS && output.contains("guest: had I/O"),
        || format!("The guest read the second disk {read} times:\n{output}"),
    )
}

//! Guests of VMMs with the function in their own process: the reference VMM, and patched Cloud Hypervisor.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use integration::process::{ProcessError, SupervisedChild, describe_process, file_tail};
use integration::provision::{GuestAssets, KernelChoice};
use integration::vmm::counters::{KvmCounters, has_host_registers};
use integration::vmms::{cloud_hypervisor, reference};
use serde_json::json;

use crate::fixture::{CheckEnvironment, Failure, TIMEOUT, await_that, expect, sh, with_path};
use crate::vmms::is_patched_cloud_hypervisor_named;
use crate::{ExpectedRefusals, Group, exits, init, late_memory};

pub(crate) const GROUP: Group = Group::Inside {
    name: "vmm",
    drives: Vec::new,
    refused: ExpectedRefusals::None,
    checks: &[
        ("root_with_mapped_doorbells", root_with_mapped_doorbells),
        ("root_with_trapped_doorbells", root_with_trapped_doorbells),
        (
            "exits_with_a_doorbell_buffer",
            exits::with_a_doorbell_buffer,
        ),
        (
            "exits_without_a_doorbell_buffer",
            exits::without_a_doorbell_buffer,
        ),
        ("exits_with_virtio_blk", exits::with_virtio_blk),
        ("doorbells_come_and_go", exits::doorbells_come_and_go),
        ("root_with_the_pin", root_with_the_pin),
        ("root_on_a_servers_drive", root_on_a_servers_drive),
        ("exits_on_a_servers_drive", exits::on_a_servers_drive),
        ("root_outlives_its_servers", root_outlives_its_servers),
        (
            "pollers_stay_beside_their_vcpus",
            pollers_stay_beside_their_vcpus,
        ),
        (
            "cloud_hypervisor_root_with_the_pin",
            cloud_hypervisor_root_with_the_pin,
        ),
        (
            "cloud_hypervisor_pollers_stay_beside_their_vcpus",
            cloud_hypervisor_pollers_stay_beside_their_vcpus,
        ),
        (
            "cloud_hypervisor_restores_on_demand",
            late_memory::restores_on_demand,
        ),
        (
            "cloud_hypervisor_restores_by_a_server",
            late_memory::restores_by_a_server,
        ),
        (
            "cloud_hypervisor_migrates_by_post_copy",
            late_memory::migrates_by_post_copy,
        ),
    ],
};

/// Script by which the guest verifies its root.
const VERIFY: &str = r"
echo guest: cpus $(nproc)
echo guest: root $(sed -n 's/ .*ext4.*//p' /proc/mounts)
echo guest: model $(cat /sys/class/nvme/nvme0/model)
nvme id-ctrl /dev/nvme0 | grep -q ^oacs && echo guest: identified
fio --name=verify --filename=/data --size=8m --rw=randwrite --bs=4k --iodepth=32 --ioengine=libaio \
    --direct=1 --verify=crc32c --verify_fatal=1 --eta=never --output=/tmp/fio && echo guest: verified
sync
dd if=/dev/urandom of=/more bs=64k count=64 2>/dev/null && sum=$(md5sum </more)
echo 3 >/proc/sys/vm/drop_caches
[ $(md5sum </more | cut -c-32) = ${sum%% *} ] && echo guest: same
";

fn root_with_mapped_doorbells(bench: &CheckEnvironment) -> Result<(), Failure> {
    verify(bench, &KernelChoice::V6_12, "mapped", 1, Owner::Vmm)
}

fn root_with_trapped_doorbells(bench: &CheckEnvironment) -> Result<(), Failure> {
    verify(bench, &KernelChoice::V6_1, "trap", 4, Owner::Vmm)
}

fn root_on_a_servers_drive(bench: &CheckEnvironment) -> Result<(), Failure> {
    verify(bench, &KernelChoice::V6_12, "auto", 2, Owner::Server)
}

/// Kernel parameter that disables MSI and MSI-X.
const NO_MESSAGES: &str = "pci=nomsi";

/// Returns the script of a guest with [`NO_MESSAGES`].
fn script_with_the_pin() -> String {
    init::script(&format!(
        "{VERIFY}echo guest: pin $(grep -c 'IO-APIC.*nvme0q0' /proc/interrupts)
        echo guest: ignored $(dmesg | grep -c 'nobody cared')\n"
    ))
}

/// Lines that the guest must print.
const PIN_LINES: [&str; 4] = [
    "guest: verified",
    "guest: same",
    "guest: pin 1",
    "guest: ignored 0",
];

/// Line by which a guest requests its second function.
const PLUG: &str = "guest: plug";

/// Boots a guest without MSI. A function that is plugged in later shares the interrupt line.
fn root_with_the_pin(bench: &CheckEnvironment) -> Result<(), Failure> {
    let later = bench.dir().join("later.img");
    sh(&format!("truncate -s 64M {}", later.display()))?;
    let script = format!(
        "{VERIFY}
        echo guest: pin $(grep -c 'IO-APIC.*nvme0q0' /proc/interrupts)
        echo {PLUG}
        until [ -b /dev/nvme1n1 ]; do echo 1 >/sys/bus/pci/rescan; sleep 1; done
        echo guest: line $(grep -c 'IO-APIC.*nvme0q0.*nvme1q0' /proc/interrupts)
        fio --name=plugged --filename=/dev/nvme1n1 --size=4m --rw=randwrite --bs=4k --iodepth=32 --ioengine=libaio \
            --direct=1 --verify=crc32c --verify_fatal=1 --eta=never --output=/tmp/fio && echo guest: loaded
        dmesg | grep -i 'nobody cared' || echo guest: cared
        "
    );
    let plugged = format!("path={},id=later", later.display());
    let command_line = format!("{} {NO_MESSAGES}", init::COMMAND_LINE);
    let output = boot_with(
        bench,
        &KernelChoice::V6_12,
        &init::script(&script),
        ("auto", Owner::Vmm),
        (command_line.as_str(), Some(plugged.as_str())),
        &["--cpus", "2"],
    )?;
    let wanted = ["verified", "same", "pin 1", "line 1", "loaded", "cared"];
    expect_lines(&output, wanted.map(|wanted| format!("guest: {wanted}")))?;
    fs::remove_file(&later).map_err(with_path(&later))
}

/// Like [`root_with_the_pin`], in Cloud Hypervisor, which emulates the I/O APIC.
fn cloud_hypervisor_root_with_the_pin(bench: &CheckEnvironment) -> Result<(), Failure> {
    if !is_patched_cloud_hypervisor_named()? {
        return Ok(());
    }
    let assets = GuestAssets::provide(&KernelChoice::V6_12)?;
    let image = root(bench, &assets, &script_with_the_pin())?;
    let (mut vmm, console) =
        spawn_cloud_hypervisor(bench, &assets, &image, NO_MESSAGES, "doorbells=auto", &[])?;
    await_end(&mut vmm, &console)?;
    expect_clean_root(&image)?;
    expect_lines(&console_output(&console)?, PIN_LINES)
}

/// Starts patched Cloud Hypervisor with two vCPUs and its guest's root on a function. `parameters` extend the kernel command
/// line, `options` are options of the function, and `arguments` further ones of the VMM. Returns the guest's console log as
/// well.
pub(crate) fn spawn_cloud_hypervisor(
    bench: &CheckEnvironment,
    assets: &GuestAssets,
    image: &Path,
    parameters: &str,
    options: &str,
    arguments: &[&str],
) -> Result<(SupervisedChild, PathBuf), Failure> {
    let console = bench.dir().join("console");
    let state_dir = bench.state_dir();
    let function = format!(
        "path={},{options},state_dir={}",
        image.display(),
        state_dir.display()
    );
    let machine = [
        ["--kernel", &assets.kernel.image.display().to_string()],
        ["--memory", "size=384M,shared=on"],
        ["--cpus", "boot=2,max=2"],
        ["--cmdline", &format!("{} {parameters}", init::COMMAND_LINE)],
        // A virtio console needs MSI-X.
        ["--console", "off"],
        ["--serial", &format!("file={}", console.display())],
        ["--nvme-mpt", &function],
    ];
    let arguments = machine.as_flattened().iter().chain(arguments);
    let vmm = cloud_hypervisor::spawn(bench.dir(), arguments)?;
    Ok((vmm, console))
}

/// Number of servers that are killed in sequence, each during a pass of the guest's I/O.
const KILLS: u32 = 3;

/// Time without a server.
const OUTAGE: Duration = Duration::from_millis(500);

/// Kills servers while fio works on a guest's root: neither fio nor the guest's kernel may see an error, no controller is
/// reset, and all data is verified.
fn root_outlives_its_servers(bench: &CheckEnvironment) -> Result<(), Failure> {
    let script = format!(
        r"
for pass in $(seq {KILLS}); do
    echo guest: pass $pass
    fio --name=verify --filename=/data$pass --size=8m --rw=randwrite --bs=4k --iodepth=32 --ioengine=libaio         --direct=1 --loops=3 --verify=crc32c --verify_fatal=1 --eta=never --output=/tmp/fio         && echo guest: verified $pass
done
echo 3 >/proc/sys/vm/drop_caches
for pass in $(seq {KILLS}); do
    fio --name=verify --filename=/data$pass --size=8m --rw=randread --bs=4k --ioengine=libaio --direct=1         --verify=crc32c --verify_fatal=1 --verify_only --eta=never --output=/tmp/fio && echo guest: same $pass
done
echo guest: resets $(dmesg | grep -c 'resetting controller')
echo guest: errors $(dmesg | grep -cE 'Buffer I/O|I/O Cmd|I/O error|EXT4-fs (error|warning)|emounting')
"
    );
    let function = ("auto", Owner::KilledServers);
    let script = init::script(&script);
    let output = boot(
        bench,
        &KernelChoice::V6_12,
        &script,
        function,
        &["--cpus", "2"],
    )?;
    let passes = (1..=KILLS).flat_map(|pass| [format!("verified {pass}"), format!("same {pass}")]);
    let wanted = passes.chain(["resets 0".to_owned(), "errors 0".to_owned()]);
    expect_lines(&output, wanted.map(|wanted| format!("guest: {wanted}")))
}

/// Returns a load of `seconds` seconds in which two vCPUs read.
fn reads(seconds: u32) -> String {
    format!(
        "fio --name=read --filename=/data --size=8m --rw=randread --bs=4k --direct=1 --numjobs=2 \
         --cpus_allowed=0-1 --cpus_allowed_policy=split --time_based --runtime={seconds} --output=/tmp/fio"
    )
}

/// Options of a function whose pollers follow vCPUs. With mapped doorbells, the admin queue would have the first poller.
const POLLER_OPTIONS: &str = "doorbells=shadow,poll=dedicated@vcpu";

/// Processors of two vCPUs, in sequence.
const VCPU_PROCESSORS: [[&str; 2]; 3] = [["0", "1"], ["1", "0"], ["0", "1"]];

/// Runs a guest with two vCPUs that both read. The test pins the vCPU threads to one processor each, then swaps the processors.
/// The poller of each vCPU's queue must move to the processor that its vCPU does not use.
fn pollers_stay_beside_their_vcpus(bench: &CheckEnvironment) -> Result<(), Failure> {
    let assets = GuestAssets::provide(&KernelChoice::V6_12)?;
    let image = root(bench, &assets, &init::script(&reads(3600)))?;
    let console = bench.dir().join("console");
    let kernel = assets.kernel.image.display().to_string();
    let function = format!("path={},{POLLER_OPTIONS}", image.display());
    let machine = [
        ["--kernel", kernel.as_str()],
        ["--memory", "384"],
        ["--cpus", "2"],
        ["--cmdline", init::COMMAND_LINE],
        ["--nvme-mpt", function.as_str()],
    ];
    let machine = machine.as_flattened();
    let mut vmm = reference::spawn(bench.dir(), &bench.state_dir(), &console, machine)?;
    for processors in VCPU_PROCESSORS {
        expect_pollers_beside(vmm.pid(), ["vcpu-0", "vcpu-1"], processors)?;
    }
    expect(vmm.try_wait()?.is_none(), || {
        format!("The VMM ended:\n{}", file_tail(&console))
    })?;
    vmm.kill();
    fs::remove_file(&image).map_err(with_path(&image))?;
    Ok(())
}

/// Like [`pollers_stay_beside_their_vcpus`], in Cloud Hypervisor with its seccomp filters. Then the second vCPU is unplugged
/// and plugged in again, which gives it another thread.
fn cloud_hypervisor_pollers_stay_beside_their_vcpus(
    bench: &CheckEnvironment,
) -> Result<(), Failure> {
    const VCPUS: [&str; 2] = ["vcpu0", "vcpu1"];
    if !is_patched_cloud_hypervisor_named()? {
        return Ok(());
    }
    let assets = GuestAssets::provide(&KernelChoice::V6_12)?;
    // A plugged vCPU is offline at first, and an earlier load does not use it.
    let script = format!(
        "(while :; do echo 1 >/sys/devices/system/cpu/cpu1/online; sleep 1; done) >/dev/null 2>&1 &
        while :; do {} || sleep 1; done",
        reads(5)
    );
    let image = root(bench, &assets, &init::script(&script))?;
    let (mut vmm, console) =
        spawn_cloud_hypervisor(bench, &assets, &image, "", POLLER_OPTIONS, &[])?;
    let pid = vmm.pid();
    for processors in VCPU_PROCESSORS {
        expect_pollers_beside(pid, VCPUS, processors)?;
    }
    let resize = |count: u32| {
        let vcpus = json!({"desired_vcpus": count});
        cloud_hypervisor::request(bench.dir(), "vm.resize", &vcpus)
    };
    resize(1)?;
    // After the guest has released the vCPU, the VMM refuses another request until it has joined the vCPU's thread.
    await_that("the end of the second vCPU", || {
        let thread_names = sh(&format!("cat /proc/{pid}/task/*/comm || true"))?;
        Ok(thread_names.lines().all(|name| name != VCPUS[1]))
    })?;
    await_that("the second vCPU", || Ok(resize(2).is_ok()))?;
    for processors in VCPU_PROCESSORS {
        expect_pollers_beside(pid, VCPUS, processors)?;
    }
    expect(vmm.try_wait()?.is_none(), || {
        let log = file_tail(&bench.dir().join("vmm.log"));
        format!("The VMM ended:\n{}{log}", file_tail(&console))
    })?;
    vmm.kill();
    fs::remove_file(&image).map_err(with_path(&image))?;
    Ok(())
}

/// Pins the threads of two vCPUs to a processor each, and waits until the poller of each vCPU's queue runs on the other vCPU's
/// processor.
fn expect_pollers_beside(pid: u32, vcpus: [&str; 2], processors: [&str; 2]) -> Result<(), Failure> {
    for (vcpu, processor) in vcpus.into_iter().zip(processors) {
        let vcpu = await_thread(pid, vcpu)?;
        sh(&format!("taskset -pc {processor} {vcpu}"))?;
    }
    let [first, second] = processors;
    // Linux assigns the first queue to the first vCPU.
    for (number, expected_processor) in [second, first].into_iter().enumerate() {
        let name = format!("poll-queue-{number}");
        let poller = await_thread(pid, &name)?;
        let is_there = || {
            let output = sh(&format!("taskset -pc {poller}"))?;
            Ok(output
                .trim_end()
                .ends_with(&format!(": {expected_processor}")))
        };
        await_that(
            &format!("{name} on processor {expected_processor}"),
            is_there,
        )
        .map_err(|error| {
            let threads = sh(&format!(
                "cd /proc/{pid}/task && grep -H Cpus_allowed_list */status && grep -H . */comm"
            ));
            Failure::from(format!("{error}:\n{}", threads.unwrap_or_default()))
        })?;
    }
    Ok(())
}

/// Waits for a thread of a process. Returns the thread id.
fn await_thread(pid: u32, name: &str) -> Result<String, Failure> {
    let mut found = None;
    await_that(&format!("thread {name} of process {pid}"), || {
        let script = format!("grep -lx {name} /proc/{pid}/task/*/comm || true");
        let output = sh(&script)?;
        found = output.split('/').nth(4).map(str::to_owned);
        Ok(found.is_some())
    })?;
    found.ok_or_else(|| Failure::from(format!("There is no thread {name}")))
}

/// Process that has opened the drive of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The VMM, which also does the I/O.
    Vmm,
    /// A drive server, from which the VMM's function has a lease.
    Server,
    /// A drive server that is killed and restarted in each pass of the guest.
    KilledServers,
}

/// Boots a guest that verifies its own I/O on its root.
fn verify(
    bench: &CheckEnvironment,
    kernel: &KernelChoice,
    doorbells: &str,
    cpus: u8,
    owner: Owner,
) -> Result<(), Failure> {
    let cpus_argument = cpus.to_string();
    let arguments = ["--cpus", &cpus_argument];
    let function = (doorbells, owner);
    let output = boot(bench, kernel, &init::script(VERIFY), function, &arguments)?;
    let cpus = format!("guest: cpus {cpus}");
    let wanted = [
        cpus.as_str(),
        "guest: root /dev/root",
        "guest: model nvme-mpt file drive",
        "guest: identified",
        "guest: verified",
        "guest: same",
    ];
    expect_lines(&output, wanted)
}

/// Checks that a guest printed each of these lines.
fn expect_lines<S: AsRef<str>>(
    output: &str,
    wanted: impl IntoIterator<Item = S>,
) -> Result<(), Failure> {
    for wanted in wanted {
        let wanted = wanted.as_ref();
        expect(
            output.lines().any(|line| line.trim_end().ends_with(wanted)),
            || format!("The guest does not say {wanted:?}:\n{output}"),
        )?;
    }
    Ok(())
}

/// Boots a guest with its root on a function of the VMM. The guest runs a script and turns itself off. Returns its console
/// output.
pub(crate) fn boot(
    bench: &CheckEnvironment,
    kernel: &KernelChoice,
    script: &str,
    function: (&str, Owner),
    arguments: &[&str],
) -> Result<String, Failure> {
    boot_with(
        bench,
        kernel,
        script,
        function,
        (init::COMMAND_LINE, None),
        arguments,
    )
}

/// Like [`boot`], with a kernel command line, and a function that is plugged in once the guest [asks](PLUG) for it.
fn boot_with(
    bench: &CheckEnvironment,
    kernel: &KernelChoice,
    script: &str,
    (doorbells, owner): (&str, Owner),
    (command_line, plugged): (&str, Option<&str>),
    arguments: &[&str],
) -> Result<String, Failure> {
    let assets = GuestAssets::provide(kernel)?;
    let image = root(bench, &assets, script)?;
    let mut server = match owner {
        Owner::Vmm => None,
        Owner::Server | Owner::KilledServers => {
            Some(bench.hold(&[format!("path={}", image.display())])?)
        }
    };
    let console = bench.dir().join("console");
    let function = format!("path={},doorbells={doorbells}", image.display());
    let machine = [
        OsStr::new("--kernel"),
        assets.kernel.image.as_os_str(),
        "--memory".as_ref(),
        "384".as_ref(),
        "--cmdline".as_ref(),
        command_line.as_ref(),
        "--nvme-mpt".as_ref(),
        function.as_ref(),
    ];
    let machine = machine.into_iter().chain(arguments.iter().map(OsStr::new));
    let mut vmm = reference::spawn(bench.dir(), &bench.state_dir(), &console, machine)?;
    if let Some(server) = &server {
        await_that("the lease", || Ok(server.list()?.len() == 1))?;
    }
    if let (Owner::KilledServers, Some(server)) = (owner, &mut server) {
        for pass in 1..=KILLS {
            let begun = format!("guest: pass {pass}");
            await_that(&begun, || Ok(console_output(&console)?.contains(&begun)))?;
            // The server is killed in the middle of the pass.
            thread::sleep(Duration::from_secs(1));
            server.kill();
            thread::sleep(OUTAGE);
            server.restart()?;
        }
    }
    if let Some(plugged) = plugged {
        await_that(PLUG, || Ok(console_output(&console)?.contains(PLUG)))?;
        reference::request(bench.dir(), &format!("add {plugged}"))?;
    }
    await_end(&mut vmm, &console)?;
    if let Some(server) = &mut server {
        await_that("the end of the lease", || Ok(server.list()?.is_empty()))?;
        server.stop()?;
    }
    expect_clean_root(&image)?;
    console_output(&console)
}

/// Waits until a guest has turned itself off.
fn await_end(vmm: &mut SupervisedChild, console: &Path) -> Result<(), Failure> {
    let status = vmm.wait(TIMEOUT).map_err(|error| match error {
        ProcessError::StillRuns { .. } if has_host_registers(vmm.pid()) => {
            Failure::from(format!("{error}, and it runs with its host's registers"))
        }
        ProcessError::StillRuns { .. } => {
            let output = file_tail(console);
            Failure::from(format!("{error}:\n{}{output}", describe_vmm(vmm.pid())))
        }
        error => error.into(),
    })?;
    expect(status.success(), || {
        format!("It ended with {status}:\n{}", file_tail(console))
    })
}

/// Checks that the guest left its file system clean, and removes the image.
fn expect_clean_root(image: &Path) -> Result<(), Failure> {
    sh(&format!("e2fsck -fn {}", image.display()))?;
    fs::remove_file(image).map_err(with_path(image))
}

/// Returns the console output of a guest.
pub(crate) fn console_output(console: &Path) -> Result<String, Failure> {
    let output = fs::read(console).map_err(with_path(console))?;
    Ok(String::from_utf8_lossy(&output).into_owned())
}

/// Describes a VMM that does not end, by two samples a few seconds apart: its guest runs, waits, or is lost.
fn describe_vmm(pid: u32) -> String {
    let read_state = |_| {
        thread::sleep(Duration::from_secs(2));
        let counters = match KvmCounters::from_process(pid) {
            Ok(counters) => counters.to_string(),
            Err(error) => error.to_string(),
        };
        format!("{}; {counters}\n", describe_process(pid))
    };
    (0..2).map(read_state).collect()
}

/// Creates a file system image with the guests' user land and the script.
pub(crate) fn root(
    bench: &CheckEnvironment,
    assets: &GuestAssets,
    text: &str,
) -> Result<PathBuf, Failure> {
    let tree = bench.dir().join("tree");
    let image = bench.dir().join("root.img");
    let script = bench.dir().join("check");
    fs::write(&script, text).map_err(with_path(&script))?;
    sh(&format!(
        "set -e; mkdir {tree}; cd {tree}; cpio -i <{initramfs} 2>/dev/null; \
         install -m 755 {script} check; mkfs.ext4 -q -d {tree} {image} 256M; cd /; rm -r {tree}",
        tree = tree.display(),
        initramfs = assets.initramfs.display(),
        script = script.display(),
        image = image.display(),
    ))?;
    Ok(image)
}

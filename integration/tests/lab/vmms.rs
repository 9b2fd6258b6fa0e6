//! A list of checks for every available VMM: a guest with its root on a function, to which a second function is added while it
//! runs. The checks report abilities that a VMM lacks.

use std::env;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use integration::checks::FULL;
use integration::guest::fio::GuestFioJob;
use integration::progress::{print_line, seconds};
use integration::provision::{GuestAssets, KernelChoice};
use integration::server::{FunctionArgument, Server, ServerReplacement};
use integration::vmm::counters::KvmCounters;
use integration::vmms::cloud_hypervisor::{self, CloudHypervisor};
use integration::vmms::{
    QemuVmm, ReferenceVmm, RequestOutcome, RootLocation, VmmSetup, VmmUnderTest, VmmsError,
};

use crate::fixture::{CheckEnvironment, Failure, TIMEOUT, expect, sh, with_path};
use crate::vmm::{Owner, root};
use crate::{ExpectedRefusals, Group};

pub(crate) const GROUP: Group = Group::Inside {
    name: "vmms",
    drives: Vec::new,
    refused: ExpectedRefusals::None,
    checks: &[
        ("qemu", |bench| run_on::<QemuVmm>(bench, Owner::Vmm)),
        ("reference_vmm", |bench| {
            run_on::<ReferenceVmm>(bench, Owner::Vmm)
        }),
        ("reference_vmm_leased", |bench| {
            run_on::<ReferenceVmm>(bench, Owner::Server)
        }),
        ("cloud_hypervisor", run_on_cloud_hypervisor),
        ("cloud_hypervisor_leased", run_on_leased_cloud_hypervisor),
    ],
};

/// The checks in order. Each starts from the state that the previous check left.
const LIST: &[(&str, Check)] = &[
    ("identifies the drive of its root", identifies_its_root),
    ("verifies what it wrote", verifies),
    ("reboots", reboots),
    ("finds a function that is plugged", finds_what_is_plugged),
    ("uses the Doorbell Buffer", uses_the_doorbell_buffer),
    ("resets its controller", resets),
    ("outlives its servers", outlives_its_servers),
    ("flushes and discards", flushes_and_discards),
    ("lets go of a function", releases_function),
    ("powers off", powers_off),
];

type Check = fn(&mut Subject<'_>) -> Result<RequestOutcome, Failure>;

/// Serial numbers and sizes of the functions.
const ROOT: &str = "LISTROOT";
const ROOT_BYTES: u64 = 256 << 20;
const PLUGGED: &str = "LISTPLUGGED";
const PLUGGED_BYTES: u64 = 64 << 20;
const BLOCK: u64 = 512;

/// Number of the guest's vCPUs.
const VCPUS: u32 = 2;
/// Number of measured reads, and maximum number of MMIO exits per read.
const READS: u64 = 1000;
const MMIO_EXITS_MAX: f64 = 0.01;
/// Number of controller resets under load.
const RESETS: usize = 3;
/// Ends of servers of vfio-user functions in one round.
const SERVER_ENDS: [ServerReplacement; 2] = [ServerReplacement::Kill, ServerReplacement::Upgrade];
/// Number of rounds without `--full`.
const ROUNDS: usize = 3;
/// Number of rounds with `--full`.
const ROUNDS_OF_FULL: usize = 50;
/// Bytes that are written and discarded.
const PATTERN_BYTES: u64 = 1 << 20;
/// Bit of OACS: Doorbell Buffer Config (NVMe Base 2.0, figure 275).
const OACS_DOORBELL_BUFFER: u64 = 1 << 8;
/// Maximum number of a guest's polls for a change of its functions, one every 0.1 s.
const TRIES: u32 = 200;

/// A VMM, with the resources of its functions.
struct Subject<'a> {
    vmm: Box<dyn VmmUnderTest>,
    images: &'a Images,
    /// The guest's name of the plugged controller.
    plugged: String,
    /// The server that has the drives, unless the VMM has them.
    server: Option<Server>,
}

fn run_on_cloud_hypervisor(bench: &CheckEnvironment) -> Result<(), Failure> {
    if cloud_hypervisor::configured_path().is_none() {
        print_line(&format!("        NOT CHECKED: {}", VmmsError::NotNamed));
        return Ok(());
    }
    run_on::<CloudHypervisor>(bench, Owner::Vmm)
}

/// Uses functions in the VMM's process, on drives of a server.
fn run_on_leased_cloud_hypervisor(bench: &CheckEnvironment) -> Result<(), Failure> {
    match is_patched_cloud_hypervisor_named()? {
        true => run_on::<CloudHypervisor>(bench, Owner::Server),
        false => Ok(()),
    }
}

/// Returns whether the configured Cloud Hypervisor supports functions in its own process. If not, prints that the check is
/// skipped.
pub(crate) fn is_patched_cloud_hypervisor_named() -> Result<bool, Failure> {
    match cloud_hypervisor::has_own_functions() {
        Ok(true) => return Ok(true),
        Ok(false) => {
            print_line(
                "        NOT CHECKED: it has no functions in its own process, as it has no patch",
            );
        }
        Err(error @ VmmsError::NotNamed) => print_line(&format!("        NOT CHECKED: {error}")),
        Err(error) => return Err(error.into()),
    }
    Ok(false)
}

/// Runs the list on a VMM. `owner` has the drives.
fn run_on<V: VmmUnderTest + 'static>(
    bench: &CheckEnvironment,
    owner: Owner,
) -> Result<(), Failure> {
    let assets = GuestAssets::provide(&KernelChoice::V6_12)?;
    let images = Images {
        root: root(bench, &assets, "")?,
        plugged: bench.dir().join("plugged.img"),
    };
    let file = fs::File::create(&images.plugged).and_then(|file| file.set_len(PLUGGED_BYTES));
    file.map_err(with_path(&images.plugged))?;
    let function = |id: &str, path: &Path, serial: &str, poll: &str| {
        let range = format!("0+{}", path.metadata().map_or(0, |metadata| metadata.len()));
        FunctionArgument::new(id, path.display().to_string(), range)
            .option(format!("serial={serial}"))
            // Mapped doorbells would avoid exits without the Doorbell Buffer, and a parked poller requests exits.
            .option("doorbells=shadow")
            .option(format!("poll={poll}"))
    };
    let server = match owner {
        Owner::Vmm => None,
        Owner::Server | Owner::KilledServers => {
            let drives = [&images.root, &images.plugged];
            Some(bench.hold(&drives.map(|path| format!("path={}", path.display())))?)
        }
    };
    let started = Instant::now();
    let vmm = V::launch(&VmmSetup {
        vcpus: VCPUS,
        root: RootLocation::Function,
        first: function("root", &images.root, ROOT, "shared"),
        pluggable: function("plugged", &images.plugged, PLUGGED, "shared:busy"),
        assets: &assets,
        dir: bench.dir(),
        state_dir: &bench.state_dir(),
    })?;
    print_time("boots with its root on a function", started);
    let mut subject = Subject {
        vmm: Box::new(vmm),
        images: &images,
        plugged: String::new(),
        server,
    };
    for (name, check) in LIST {
        let started = Instant::now();
        let outcome = check(&mut subject).map_err(|failure| {
            let chain = integration::error_chain(&*failure);
            Failure::from(format!("It {name}, and does not: {chain}"))
        })?;
        print_time(name, started);
        if let RequestOutcome::Unsupported(what) = outcome {
            print_line(&format!("        NOT CHECKED: {what}"));
        }
        if let Some(server) = &mut subject.server {
            server.expect_alive()?;
        }
    }
    match &mut subject.server {
        Some(server) => Ok(server.stop()?),
        None => Ok(()),
    }
}

/// Image files, which are removed after the check because they occupy memory.
struct Images {
    root: PathBuf,
    plugged: PathBuf,
}

impl Drop for Images {
    fn drop(&mut self) {
        for image in [&self.root, &self.plugged] {
            // A leftover image only occupies space.
            let _ = fs::remove_file(image);
        }
    }
}

fn print_time(name: &str, started: Instant) {
    print_line(&format!("        {name} ({})", seconds(started.elapsed())));
}

impl Subject<'_> {
    /// Runs a script in the guest, which must succeed.
    fn check(&self, script: &str) -> Result<String, Failure> {
        Ok(self.vmm.guest().check(script, TIMEOUT)?)
    }

    /// Waits until the guest can open a drive with this serial number, because the device node may appear earlier. Checks the
    /// drive's identity, and returns the guest's name of its controller.
    fn identify(&self, serial: &str, bytes: u64) -> Result<String, Failure> {
        let output = self.check(&format!(
            "for try in $(seq {TRIES}); do
                for controller in /sys/class/nvme/*; do
                    name=${{controller##*/}}
                    [ \"$(tr -d ' ' 2>/dev/null <$controller/serial)\" = {serial} ] &&
                        blockdev --getsize64 /dev/${{name}}n1 >/dev/null 2>&1 && break 2
                done
                sleep 0.1
            done
            echo controller : $name
            echo bytes : $(blockdev --getsize64 /dev/${{name}}n1)
            nvme id-ctrl /dev/$name && nvme id-ns /dev/${{name}}n1",
        ))?;
        for (name, wanted) in [
            ("mn", "nvme-mpt file drive".to_owned()),
            ("sn", serial.to_owned()),
            ("nsze", format!("{:#x}", bytes / BLOCK)),
            ("bytes", bytes.to_string()),
        ] {
            let found = field(&output, name)?;
            expect(found == wanted, || {
                format!("The guest says that {name} is {found:?}, and not {wanted:?}:\n{output}")
            })?;
        }
        let oacs = field(&output, "oacs")?;
        let has = u64::from_str_radix(oacs.trim_start_matches("0x"), 16)
            .is_ok_and(|oacs| oacs & OACS_DOORBELL_BUFFER != 0);
        expect(has, || {
            format!("Doorbell Buffer Config is not offered: OACS is {oacs}")
        })?;
        Ok(field(&output, "controller")?.to_owned())
    }
}

/// Returns a field of nvme-cli's output, such as `nsze : 0x80000`.
fn field<'a>(text: &'a str, name: &str) -> Result<&'a str, Failure> {
    let mut fields = text.lines().filter_map(|line| line.split_once(':'));
    let found = fields.find(|(found, _)| found.trim() == name);
    found
        .map(|(_, value)| value.trim())
        .ok_or_else(|| Failure::from(format!("nvme-cli does not tell of {name}:\n{text}")))
}

fn identifies_its_root(subject: &mut Subject<'_>) -> Result<RequestOutcome, Failure> {
    let controller = subject.identify(ROOT, ROOT_BYTES)?;
    expect(controller == "nvme0", || {
        format!("The drive that the guest booted from is {controller}")
    })?;
    subject.check("grep -q '^/dev/root / ext4 rw' /proc/mounts")?;
    Ok(RequestOutcome::Done)
}

fn verifies(subject: &mut Subject<'_>) -> Result<RequestOutcome, Failure> {
    const BYTES: u64 = 4 << 20;
    let written = GuestFioJob::new("verify", "randwrite", "4k", 32)
        .option("filename", "/data")
        .option("size", &BYTES.to_string())
        .with_verification()
        .run(subject.vmm.guest())?;
    expect(written.write.ios == BYTES / 4096, || {
        format!("fio wrote {} blocks", written.write.ios)
    })?;
    Ok(RequestOutcome::Done)
}

/// Checks that earlier data exists after a reboot.
fn reboots(subject: &mut Subject<'_>) -> Result<RequestOutcome, Failure> {
    const PERSISTED_FILE_SCRIPT: &str = "md5sum </kept; cat /proc/sys/kernel/random/boot_id";
    let write = format!(
        "dd if=/dev/urandom of=/kept bs=64k count=32 2>/dev/null && {PERSISTED_FILE_SCRIPT}"
    );
    let before = subject.check(&write)?;
    let outcome = subject.vmm.reboot()?;
    let after = subject.check(PERSISTED_FILE_SCRIPT)?;
    let lines = before.lines().zip(after.lines());
    let same: Vec<bool> = lines.map(|(before, after)| before == after).collect();
    expect(same == [true, false], || {
        format!("What it wrote, and its boot's identity:\n{before}\nAfterwards:\n{after}")
    })?;
    Ok(outcome)
}

fn finds_what_is_plugged(subject: &mut Subject<'_>) -> Result<RequestOutcome, Failure> {
    subject.check(&format!("! grep -q {PLUGGED} /sys/class/nvme/*/serial"))?;
    subject.vmm.plug()?;
    subject.plugged = subject.identify(PLUGGED, PLUGGED_BYTES)?;
    Ok(RequestOutcome::Done)
}

/// Checks that the guest writes doorbells to memory: KVM counts hardly any register access during I/O.
fn uses_the_doorbell_buffer(subject: &mut Subject<'_>) -> Result<RequestOutcome, Failure> {
    // A first run loads the programs from the root's drive, whose poller parks.
    let reads = format!(
        "sync; dd if=/dev/{}n1 of=/dev/null iflag=direct bs=4k count=",
        subject.plugged
    );
    subject.check(&format!("{reads}1"))?;
    let counters = || {
        KvmCounters::from_process(subject.vmm.guest().pid())
            .map_err(with_path(Path::new("/sys/kernel/debug/kvm")))
    };
    let before = counters()?;
    let output = subject.check(&format!("{reads}{READS}"))?;
    let after = counters()?;
    expect(output.contains(&format!("{READS}+0 records in")), || {
        format!("The guest has not read: {output}")
    })?;
    expect(after.exits > before.exits, || {
        "KVM has counted nothing".to_owned()
    })?;
    let exits = (after.mmio_exits - before.mmio_exits) as f64 / READS as f64;
    print_line(&format!(
        "        {exits:.4} MMIO exits for each of {READS} reads"
    ));
    expect(exits < MMIO_EXITS_MAX, || {
        format!("{exits} MMIO exits for each read")
    })?;
    Ok(RequestOutcome::Done)
}

/// Kills and upgrades the servers under a verified load. The next servers continue.
fn outlives_its_servers(subject: &mut Subject<'_>) -> Result<RequestOutcome, Failure> {
    let rounds = match env::var_os(FULL) {
        Some(_) => ROUNDS_OF_FULL,
        None => ROUNDS,
    };
    let ends = match subject.server {
        // Ends of the server with the drives of functions in the VMM's process.
        Some(_) => SERVER_ENDS[..1].to_vec(),
        None => SERVER_ENDS.repeat(rounds),
    };
    let load = GuestFioJob::new("load", "randwrite", "4k", 32)
        .option("filename", &format!("/dev/{}n1", subject.plugged))
        .option("size", "8m")
        .with_verification()
        .script();
    subject.check(&format!(
        "rm -f /run/outcome; touch /run/load; dmesg -c >/dev/null
        (status=0
        while [ $status = 0 ] && [ -e /run/load ]; do ({load}) || status=1; done
        echo $status >/run/outcome) >/run/fio 2>&1 </dev/null &"
    ))?;
    let mut outcome = RequestOutcome::Done;
    for end in ends {
        // Field 5 counts completed writes (Linux, Documentation/block/stat.rst).
        subject.check(&format!(
            "written() {{ awk '{{print $5}}' /sys/block/{}n1/stat; }}
            before=$(written)
            until [ $(written) -gt $((before + 500)) ] || [ -e /run/outcome ]; do sleep 0.1; done",
            subject.plugged
        ))?;
        outcome = match &mut subject.server {
            Some(server) => {
                server.kill();
                thread::sleep(Duration::from_millis(500));
                server.restart()?;
                RequestOutcome::Done
            }
            None => subject.vmm.replace_server(end)?,
        };
        if outcome != RequestOutcome::Done {
            break;
        }
    }
    let output = subject.check(
        "rm /run/load
        while [ ! -e /run/outcome ]; do sleep 0.1; done
        [ $(cat /run/outcome) = 0 ] || { cat /run/fio; exit 1; }
        dmesg | grep -E 'timeout|abort|reset|I/O Cmd|I/O error' || true",
    )?;
    // The kernel must have logged no such message about either drive.
    expect(output.trim().is_empty(), || {
        format!("The guest's kernel tells of it: {}", output.trim())
    })?;
    Ok(outcome)
}

/// Resets the controller under a verified load.
fn resets(subject: &mut Subject<'_>) -> Result<RequestOutcome, Failure> {
    let controller = &subject.plugged;
    let load = GuestFioJob::new("load", "randwrite", "4k", 32)
        .option("filename", &format!("/dev/{controller}n1"))
        .option("size", "2m")
        .with_verification();
    let output = subject.check(&format!(
        "set_up() {{ dmesg | grep -c '{controller}: .* default/read/poll queues'; }}
        before=$(set_up)
        touch /run/load
        while [ -e /run/load ]; do ({load}) >/run/fio || exit 1; done & load=$!
        for reset in $(seq {RESETS}); do
            sleep 0.5
            nvme reset /dev/{controller} || exit 1
        done
        rm /run/load
        wait $load || {{ cat /run/fio; exit 1; }}
        echo $(cat /sys/class/nvme/{controller}/state), $(($(set_up) - before)) times anew",
        load = load.script(),
    ))?;
    expect(
        output.trim() == format!("live, {RESETS} times anew"),
        || format!("The controller is {output}"),
    )?;
    Ok(RequestOutcome::Done)
}

/// Checks that flushed data is in the file, and that discarded data is removed from the file and reads as zeroes.
fn flushes_and_discards(subject: &mut Subject<'_>) -> Result<RequestOutcome, Failure> {
    let (controller, file) = (&subject.plugged, &subject.images.plugged);
    let occupied = || {
        let metadata = file.metadata().map_err(with_path(file))?;
        Ok::<_, Failure>(metadata.blocks() * BLOCK)
    };
    let count = PATTERN_BYTES >> 16;
    // Field 16 counts completed flushes (Linux, Documentation/block/stat.rst).
    let written = subject.check(&format!(
        "set -e
        flushed() {{ awk '{{print $16}}' /sys/block/{controller}n1/stat; }}
        before=$(flushed)
        dd if=/dev/urandom of=/run/pattern bs=64k count={count} 2>/dev/null
        dd if=/run/pattern of=/dev/{controller}n1 bs=64k conv=fsync,notrunc 2>/dev/null
        [ $(flushed) -gt $before ]
        nvme flush /dev/{controller}n1 >/dev/null
        md5sum </run/pattern"
    ))?;
    let found = sh(&format!(
        "head -c {PATTERN_BYTES} {} | md5sum",
        file.display()
    ))?;
    expect(found == written, || {
        format!("The file has {found}, and the guest wrote {written}")
    })?;
    let before = occupied()?;
    subject.check(&format!(
        "blkdiscard -o 0 -l {PATTERN_BYTES} /dev/{controller}n1 &&
        dd if=/dev/{controller}n1 iflag=direct bs=64k count={count} 2>/dev/null |
        cmp -n {PATTERN_BYTES} - /dev/zero"
    ))?;
    let after = occupied()?;
    expect(after + PATTERN_BYTES <= before, || {
        format!("The file took {before} bytes before, and {after} afterwards")
    })?;
    Ok(RequestOutcome::Done)
}

fn releases_function(subject: &mut Subject<'_>) -> Result<RequestOutcome, Failure> {
    let controller = &subject.plugged;
    let outcome = subject.vmm.unplug(controller)?;
    // The drive of the guest's root stays.
    subject.check(&format!(
        "for try in $(seq {TRIES}); do
            [ -e /dev/{controller}n1 ] || [ -e /sys/class/nvme/{controller} ] || break
            sleep 0.1
        done
        ! grep -q {PLUGGED} /sys/class/nvme/*/serial &&
        echo 3 >/proc/sys/vm/drop_caches && md5sum /kept"
    ))?;
    Ok(outcome)
}

/// Powers the guest off, and checks that its file system is clean.
fn powers_off(subject: &mut Subject<'_>) -> Result<RequestOutcome, Failure> {
    subject.vmm.power_off()?;
    sh(&format!("e2fsck -fn {}", subject.images.root.display()))?;
    Ok(RequestOutcome::Done)
}

//! VMMs that share a physical drive through its server: two VMMs with functions in their own processes, beside a function that
//! joins and leaves, or beside QEMU or Cloud Hypervisor over vfio-user.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use integration::guest::fio::GuestFioJob;
use integration::guest::{Guest, GuestAgent, GuestConfig, GuestDrive, ScriptJob};
use integration::lab::{LabDrive, inside};
use integration::progress::{print_line, seconds};
use integration::server::{FunctionArgument, Server};
use integration::vmm::counters::KvmCounters;
use integration::vmms::cloud_hypervisor::{self, CloudHypervisor};
use integration::vmms::{
    ReferenceVmm, RequestOutcome, RootLocation, VmmSetup, VmmUnderTest, VmmsError,
};

use crate::fixture::{
    CheckEnvironment, Failure, TIMEOUT, await_that, expect, on_processor, sh, with_path,
};
use crate::remote_functions::expect_refused;
use crate::vmms::is_patched_cloud_hypervisor_named;
use crate::{ExpectedRefusals, Group};

pub(crate) const GROUP: Group = Group::Inside {
    name: "shared",
    drives: || vec![LabDrive::new("a", 128 << 20)],
    refused: ExpectedRefusals::None,
    checks: &[
        ("reference_1_of_5", share_among_references),
        ("reference_2_of_5", share_among_references),
        ("reference_3_of_5", share_among_references),
        ("reference_4_of_5", share_among_references),
        ("reference_5_of_5", share_among_references),
        ("reference_and_qemu", |bench| {
            share::<ReferenceVmm>(bench, NeighbourKind::Qemu)
        }),
        ("reference_and_cloud_hypervisor", |bench| {
            if cloud_hypervisor::configured_path().is_none() {
                print_line(&format!("        NOT CHECKED: {}", VmmsError::NotNamed));
                return Ok(());
            }
            share::<ReferenceVmm>(bench, NeighbourKind::CloudHypervisor)
        }),
        ("cloud_hypervisor_1_of_5", share_among_cloud_hypervisors),
        ("cloud_hypervisor_2_of_5", share_among_cloud_hypervisors),
        ("cloud_hypervisor_3_of_5", share_among_cloud_hypervisors),
        ("cloud_hypervisor_4_of_5", share_among_cloud_hypervisors),
        ("cloud_hypervisor_5_of_5", share_among_cloud_hypervisors),
        ("cloud_hypervisor_and_qemu", |bench| {
            share_if_patched(bench, NeighbourKind::Qemu)
        }),
    ],
};

/// Bytes of each range, and bytes of the unleased gaps between ranges.
const RANGE: u64 = 16 << 20;
const GUARD: u64 = 4 << 20;
const GUARD_BYTE: u8 = 0xA5;
/// Functions of the drive, in the order of their ranges.
const ONE: &str = "one";
const TWO: &str = "two";
const NEIGHBOUR_ID: &str = "beside";
const JOINER_ID: &str = "third";
const ALL: [&str; 4] = [ONE, TWO, NEIGHBOUR_ID, JOINER_ID];
/// Number of times that the function joins and leaves.
const JOINS: usize = 50;
/// Number of checks into which both VMMs divide these. The emulated host loses one of two machines under load after a minute or
/// two.
const PARTS: usize = 5;
/// Bytes that the joining function writes each time.
const JOINER_BYTES: u64 = 64 << 10;
/// Maximum number of a VMM's MMIO exits per command of its guest.
const MMIO_EXITS_MAX: f64 = 0.01;
/// Maximum number of a guest's polls for a new function, one every 0.1 s.
const TRIES: u32 = 600;

/// Neighbour of the two VMMs. More concurrent machines are avoided, because KVM in the lab then loses more of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NeighbourKind {
    /// A function of one VMM, which joins and leaves the given number of times.
    JoiningFunction(usize),
    /// An unmodified QEMU.
    Qemu,
    /// Cloud Hypervisor over vfio-user, with or without the patch.
    CloudHypervisor,
}

fn share_among_references(bench: &CheckEnvironment) -> Result<(), Failure> {
    share::<ReferenceVmm>(bench, NeighbourKind::JoiningFunction(JOINS / PARTS))
}

fn share_among_cloud_hypervisors(bench: &CheckEnvironment) -> Result<(), Failure> {
    share_if_patched(bench, NeighbourKind::JoiningFunction(JOINS / PARTS))
}

/// Shares the drive between two Cloud Hypervisors, if the configured program has the patch.
fn share_if_patched(
    bench: &CheckEnvironment,
    neighbour_kind: NeighbourKind,
) -> Result<(), Failure> {
    match is_patched_cloud_hypervisor_named()? {
        true => share::<CloudHypervisor>(bench, neighbour_kind),
        false => Ok(()),
    }
}

/// Shares the drive between two VMMs, each pinned to a processor of the lab host.
fn share<V: VmmUnderTest>(
    bench: &CheckEnvironment,
    neighbour_kind: NeighbourKind,
) -> Result<(), Failure> {
    mark()?;
    inside::bind("a", "vfio-pci")?;
    let a = inside::address("a")?;
    let server = bench.hold(&[format!("path={a}")])?;
    let function = |id| function(&a, id);
    let dir = |id| {
        let dir = bench.dir().join(id);
        fs::create_dir_all(&dir).map_err(with_path(&dir))?;
        Ok::<_, Failure>(dir)
    };
    let state_dir = server.state_dir();
    let setup = VmmSetup {
        assets: bench.v6_12(),
        vcpus: 1,
        root: RootLocation::Memory,
        first: function(ONE),
        pluggable: function(JOINER_ID),
        dir: bench.dir(),
        state_dir: &state_dir,
    };
    let launch = |id| {
        let before = server.list()?;
        let vmm = V::launch(&VmmSetup {
            first: function(id),
            pluggable: setup.pluggable.clone(),
            dir: &dir(id)?,
            ..setup
        })?;
        let lease = server
            .list()?
            .into_iter()
            .find(|lease| !before.contains(lease));
        let lease = lease.ok_or_else(|| format!("The function of {id} has no lease"))?;
        Ok::<_, Failure>(Tenant { id, lease, vmm })
    };
    // The guests boot one after the other, because concurrent boots lose a guest more often. Each is pinned to its own
    // processor, so that both run at the same time.
    let one = on_processor(0, || launch(ONE))?;
    let two = on_processor(1, || launch(TWO))?;
    let neighbour = match neighbour_kind {
        NeighbourKind::JoiningFunction(_) => None,
        NeighbourKind::Qemu => {
            server.add(&function(NEIGHBOUR_ID))?;
            let drive = GuestDrive::vfio_user(server.socket(NEIGHBOUR_ID));
            let config = GuestConfig::new(NEIGHBOUR_ID).memory_mib(384).drive(drive);
            let guest = on_processor(0, || bench.boot(&config))?;
            Some(Neighbour::Qemu(Box::new(guest)))
        }
        NeighbourKind::CloudHypervisor => {
            server.add(&function(NEIGHBOUR_ID))?;
            let (dir, socket) = (dir(NEIGHBOUR_ID)?, server.socket(NEIGHBOUR_ID));
            let setup = VmmSetup {
                first: function(NEIGHBOUR_ID),
                dir: &dir,
                ..setup
            };
            let launch = || Ok(CloudHypervisor::launch_over_vfio_user(&setup, &socket)?);
            let vmm = on_processor(0, launch)?;
            Some(Neighbour::CloudHypervisor(Box::new(vmm)))
        }
    };
    let mut scene = Scene {
        server,
        one,
        two,
        neighbour,
        seeds: (1..=ALL.len() as u64).map(|guest| guest << 16).collect(),
    };
    scene.verify_all()?;
    let last = match neighbour_kind {
        NeighbourKind::JoiningFunction(times) => Some(scene.verify_during_joins(times)?),
        NeighbourKind::Qemu | NeighbourKind::CloudHypervisor => None,
    };
    scene.expect_overlaps_refused(&a)?;
    let sums = scene.finish()?;
    expect_on_the_drive(&sums, last.as_deref())
}

/// Returns the start of a function's range.
fn start(id: &str) -> u64 {
    let place = ALL.iter().position(|other| *other == id);
    place.unwrap_or(ALL.len()) as u64 * (RANGE + GUARD)
}

fn function(path: &str, id: &str) -> FunctionArgument {
    FunctionArgument::new(id, path, format!("{}+{RANGE}", start(id))).option(format!("serial={id}"))
}

/// Fills the drive, so that every written block is visible.
fn mark() -> Result<(), Failure> {
    inside::bind("a", "nvme")?;
    let device = inside::block_device("a", 1)?;
    let file = File::options().write(true).open(&device);
    let file = file.map_err(with_path(&device))?;
    let bytes = vec![GUARD_BYTE; GUARD as usize];
    for offset in (0..start("")).step_by(bytes.len()) {
        file.write_all_at(&bytes, offset)
            .map_err(with_path(&device))?;
    }
    file.sync_all().map_err(with_path(&device))
}

/// Returns the load of a guest on its first function. Its data depends on the seed.
fn load(seed: &str) -> GuestFioJob {
    GuestFioJob::new("verify", "randwrite", "4k", 32)
        .option("size", "8m")
        .option("randseed", seed)
        .with_verification()
}

/// Returns a script that runs the load with increasing seeds until its file is removed. It prints the last seed.
fn rounds(seed: u64) -> String {
    let load = load("SEED").script();
    let load = load.replace("'--randseed=SEED'", "--randseed=$seed");
    format!(
        "touch /run/rounds
        seed={seed}
        while [ -e /run/rounds ]; do
            seed=$((seed + 1))
            ({load}) >/run/fio || {{ cat /run/fio; exit 1; }}
        done
        echo $seed"
    )
}

/// Starts a script and waits until it runs. A guest may leave a part of its input unread until more input follows.
fn begin(guest: &GuestAgent, script: &str) -> Result<ScriptJob, Failure> {
    let job = guest.start(script)?;
    guest.check("true", TIMEOUT)?;
    Ok(job)
}

/// The drive's server, tenants and neighbour.
struct Scene<V> {
    server: Server,
    one: Tenant<V>,
    two: Tenant<V>,
    neighbour: Option<Neighbour>,
    /// Seed of each guest's last data. All seeds differ.
    seeds: Vec<u64>,
}

/// A VMM, and its function on the drive.
struct Tenant<V> {
    id: &'static str,
    /// Name of the lease: the function's id, or a name derived from the drive's range.
    lease: String,
    vmm: V,
}

/// A VMM with a function over vfio-user.
enum Neighbour {
    Qemu(Box<Guest>),
    CloudHypervisor(Box<CloudHypervisor>),
}

impl Neighbour {
    fn guest(&self) -> &GuestAgent {
        match self {
            Self::Qemu(guest) => guest,
            Self::CloudHypervisor(vmm) => vmm.guest(),
        }
    }

    fn power_off(&mut self) -> Result<(), Failure> {
        match self {
            Self::Qemu(guest) => drop(guest.power_off(TIMEOUT)?),
            Self::CloudHypervisor(vmm) => vmm.power_off()?,
        }
        Ok(())
    }
}

/// A guest with a range.
struct Holder<'a> {
    id: &'static str,
    lease: &'a str,
    guest: &'a GuestAgent,
}

impl<V: VmmUnderTest> Tenant<V> {
    fn holder(&self) -> Holder<'_> {
        Holder {
            id: self.id,
            lease: &self.lease,
            guest: self.vmm.guest(),
        }
    }
}

/// Counters of a VMM so far.
#[derive(Clone, Copy)]
struct Counts {
    mmio_exits: u64,
    exits: u64,
    commands: u64,
}

/// Total times of all additions.
#[derive(Clone, Copy, Default)]
struct AdditionTimes {
    plug: Duration,
    work: Duration,
    removal: Duration,
}

impl<V: VmmUnderTest> Scene<V> {
    fn holders(&self) -> impl Iterator<Item = Holder<'_>> {
        let neighbour = self.neighbour.as_ref().map(|neighbour| Holder {
            id: NEIGHBOUR_ID,
            lease: NEIGHBOUR_ID,
            guest: neighbour.guest(),
        });
        [self.one.holder(), self.two.holder()]
            .into_iter()
            .chain(neighbour)
    }

    fn counts(&self, tenant: &Tenant<V>) -> Result<Counts, Failure> {
        let kvm = KvmCounters::from_process(tenant.vmm.guest().pid());
        let kvm = kvm.map_err(with_path("/sys/kernel/debug/kvm"))?;
        Ok(Counts {
            mmio_exits: kvm.mmio_exits,
            exits: kvm.exits,
            commands: self.server.queue_totals(&tenant.lease)?.commands,
        })
    }

    /// Checks the number of exits since `before`.
    fn expect_few_exits(&self, tenant: &Tenant<V>, before: Counts) -> Result<(), Failure> {
        let (id, after) = (tenant.id, self.counts(tenant)?);
        expect(after.exits > before.exits, || {
            "KVM has counted nothing".to_owned()
        })?;
        let commands = after.commands.saturating_sub(before.commands);
        let exits = after.mmio_exits.saturating_sub(before.mmio_exits);
        let per_io = exits as f64 / commands as f64;
        print_line(&format!(
            "        {id}: {per_io:.4} MMIO exits for each of {commands} I/Os"
        ));
        expect(per_io < MMIO_EXITS_MAX, || {
            format!("{id}: {exits} MMIO exits for {commands} I/Os")
        })
    }

    /// Runs the verified loads of all guests at the same time.
    fn verify_all(&self) -> Result<(), Failure> {
        let before = [self.counts(&self.one)?, self.counts(&self.two)?];
        let mut jobs = Vec::new();
        for (Holder { guest, .. }, seed) in self.holders().zip(&self.seeds) {
            let load = load(&seed.to_string());
            jobs.push((guest, begin(guest, &load.script())?, load));
        }
        for (guest, job, load) in jobs {
            load.report(&guest.finish(job, load.timeout())?.text)?;
        }
        self.expect_few_exits(&self.one, before[0])?;
        self.expect_few_exits(&self.two, before[1])
    }

    /// Adds and removes a function of one guest repeatedly, while all guests run verified loads. Returns the checksum of the
    /// function's last data.
    fn verify_during_joins(&mut self, times: usize) -> Result<String, Failure> {
        let before = self.counts(&self.two)?;
        let jobs = self.holders().zip(&self.seeds);
        let jobs = jobs.map(|(holder, seed)| begin(holder.guest, &rounds(*seed)));
        let jobs: Vec<ScriptJob> = jobs.collect::<Result<_, _>>()?;
        let mut last = None;
        let mut took = AdditionTimes::default();
        for _ in 0..times {
            last = Some(self.join_and_leave(last.as_deref(), &mut took)?);
        }
        let mean = |all: Duration| seconds(all / times as u32);
        print_line(&format!(
            "        {JOINER_ID}: {times} times, plugged in {}, used in {}, removed in {} (means)",
            mean(took.plug),
            mean(took.work),
            mean(took.removal)
        ));
        let mut seeds = Vec::new();
        for ((Holder { id, guest, .. }, job), seed) in self.holders().zip(jobs).zip(&self.seeds) {
            guest.check("rm /run/rounds", TIMEOUT)?;
            let written: u64 = guest.finish_successfully(job, TIMEOUT)?.trim().parse()?;
            print_line(&format!(
                "        {id}: {} rounds meanwhile",
                written - seed
            ));
            seeds.push(written);
        }
        self.seeds = seeds;
        // Only the second VMM is checked, because rescanning the bus of the first causes exits.
        self.expect_few_exits(&self.two, before)?;
        last.ok_or_else(|| Failure::from("It never came"))
    }

    /// Returns whether the server has another lease than these. A lease disappears if its guest was lost.
    fn has_other_lease(&self, leases: &[String]) -> Result<bool, Failure> {
        let now = self.server.list()?;
        Ok(now.iter().any(|lease| !leases.contains(lease)))
    }

    /// Adds the function, reads the data of the `last` time, writes other data, and removes the function.
    fn join_and_leave(
        &mut self,
        last: Option<&str>,
        took: &mut AdditionTimes,
    ) -> Result<String, Failure> {
        let started = Instant::now();
        let before = self.server.list()?;
        self.one.vmm.plug()?;
        took.plug += started.elapsed();
        let started = Instant::now();
        let output = self.one.vmm.guest().check(
            &format!(
                "for try in $(seq {TRIES}); do
                    for controller in /sys/class/nvme/*; do
                        read -r serial 2>/dev/null <$controller/serial
                        [ \"$serial\" = {JOINER_ID} ] && [ -b /dev/${{controller##*/}}n1 ] && break 2
                    done
                    sleep 0.1
                done
                name=${{controller##*/}} disk=/dev/${{controller##*/}}n1
                set -e
                found=$(dd if=$disk bs={JOINER_BYTES} count=1 iflag=direct 2>/dev/null | md5sum)
                dd if=/dev/urandom of=/run/left bs={JOINER_BYTES} count=1 2>/dev/null
                dd if=/run/left of=$disk bs={JOINER_BYTES} conv=fsync,notrunc 2>/dev/null
                left=$(md5sum </run/left)
                echo $name ${{found%% *}} ${{left%% *}}"
            ),
            TIMEOUT,
        )?;
        let [name, found, left] = output.split_whitespace().collect::<Vec<_>>()[..] else {
            return Err(format!("The guest says {output:?}").into());
        };
        expect(last.is_none_or(|last| last == found), || {
            format!("It wrote {last:?} last, and finds {found}")
        })?;
        took.work += started.elapsed();
        let started = Instant::now();
        expect(self.has_other_lease(&before)?, || {
            format!("{JOINER_ID} has no lease of its own")
        })?;
        match self.one.vmm.unplug(name)? {
            RequestOutcome::Done => {}
            RequestOutcome::Unsupported(what) => return Err(what.into()),
        }
        await_that("the end of the lease", || {
            Ok(!self.has_other_lease(&before)?)
        })?;
        took.removal += started.elapsed();
        Ok(left.to_owned())
    }

    /// Checks that the server refuses ranges that overlap a lease, and names the lease.
    fn expect_overlaps_refused(&self, path: &str) -> Result<(), Failure> {
        for Holder { id, lease, .. } in self.holders() {
            for start in [start(id), start(id) + RANGE - GUARD] {
                let range = format!("{start}+{}", 2 * GUARD);
                let fourth = FunctionArgument::new("fourth", path, range);
                expect_refused(&self.server, &fourth, lease)?;
            }
        }
        Ok(())
    }

    /// Verifies the data of all guests, and ends them. Returns the checksums of the ranges, as the guests compute them.
    fn finish(mut self) -> Result<Vec<(&'static str, String)>, Failure> {
        let mut sums = Vec::new();
        for (Holder { id, guest, .. }, seed) in self.holders().zip(&self.seeds) {
            load(&seed.to_string())
                .option("verify_only", "1")
                .run(guest)?;
            let output = guest.check(&sum(Path::new("/dev/nvme0n1"), 0), TIMEOUT)?;
            sums.push((id, output));
        }
        self.one.vmm.power_off()?;
        self.two.vmm.power_off()?;
        if let Some(neighbour) = &mut self.neighbour {
            neighbour.power_off()?;
            self.server.await_no_client(NEIGHBOUR_ID)?;
            self.server.remove(NEIGHBOUR_ID)?;
        }
        await_that("the end of all leases", || {
            Ok(self.server.list()?.is_empty())
        })?;
        self.server.stop()?;
        Ok(sums)
    }
}

/// Returns a script that computes the checksum of a range of a device.
fn sum(device: &Path, start: u64) -> String {
    let (skip, count) = (start >> 20, RANGE >> 20);
    format!(
        "dd if={} bs=1M skip={skip} count={count} iflag=direct 2>/dev/null | md5sum",
        device.display()
    )
}

/// Checks by the host's driver that each range holds its guest's data, and that nothing was written elsewhere.
fn expect_on_the_drive(sums: &[(&str, String)], last: Option<&str>) -> Result<(), Failure> {
    inside::bind("a", "nvme")?;
    let device = inside::block_device("a", 1)?;
    for (id, wanted) in sums {
        let found = sh(&sum(&device, start(id)))?;
        expect(found == *wanted, || {
            format!("{id} had {wanted}, and the drive has {found}")
        })?;
    }
    let mut guarded_ranges: Vec<_> = ALL.map(|id| (start(id) + RANGE, GUARD)).into();
    let third = start(JOINER_ID);
    match last {
        None => guarded_ranges.push((third, RANGE)),
        Some(last) => {
            let found = sh(&format!(
                "dd if={} bs={JOINER_BYTES} skip={} count=1 2>/dev/null | md5sum",
                device.display(),
                third / JOINER_BYTES
            ))?;
            expect(found.starts_with(last), || {
                format!("{JOINER_ID} wrote {last}, and the drive has {found}")
            })?;
            guarded_ranges.extend([
                (third + JOINER_BYTES, RANGE - JOINER_BYTES),
                (start(NEIGHBOUR_ID), RANGE),
            ]);
        }
    }
    let file = File::open(&device).map_err(with_path(&device))?;
    for (start, bytes) in guarded_ranges {
        let mut found = vec![0; bytes as usize];
        file.read_exact_at(&mut found, start)
            .map_err(with_path(&device))?;
        expect(found.iter().all(|byte| *byte == GUARD_BYTE), || {
            format!(
                "Something was written between {start} and {}",
                start + bytes
            )
        })?;
    }
    Ok(())
}

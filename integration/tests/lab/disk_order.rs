//! Disks without serial numbers, whose order changes at each boot of a host with a persistent ledger.
//!
//! Each check boots a lab repeatedly, with three virtio disks without `serial=`, and another disk for the ledger. Inside the
//! lab, this program requests every lease on every path that its disk may have. A lease must go to the owner of its data, or be
//! refused with a reason.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use integration::lab::{EchoedOutput, LabConfig, LabDrive, inside};
use integration::process::{self, SupervisedChild};
use integration::progress::print_line;
use nvme_mpt_tests::bar::Bar;
use nvme_mpt_tests::controller::{Config, Controller};
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::vfio_user::VfioUserBar;

use crate::Group;
use crate::fixture::{Failure, TIMEOUT, expect, sh, with_path};
use crate::harness::Suite;

pub(crate) const GROUP: Group = Group::Around {
    name: "order",
    checks: &[
        ("of_disks_without_names", |suite| {
            over_boots(suite, NAMELESS, 6)
        }),
        ("of_a_label_and_a_file_system", |suite| {
            over_boots(suite, NAMED, 14)
        }),
    ],
};

/// First argument of this program inside the lab.
pub(crate) const ARGUMENT: &str = "order";
/// Case: three disks with a lease by `range=` each.
const NAMELESS: &str = "nameless";
/// Case: a disk with a lease by range, a disk with a label, and a disk with a file system, whose image has leases.
const NAMED: &str = "named";

/// Orders in which the disks are plugged, by number.
const ORDERS: [[usize; 3]; 6] = [
    [0, 1, 2],
    [1, 2, 0],
    [2, 1, 0],
    [0, 2, 1],
    [2, 0, 1],
    [1, 0, 2],
];
/// Paths of the first, second and third disk.
const PATHS: [&str; 3] = ["/dev/vdc", "/dev/vdd", "/dev/vde"];
const DISK: u64 = 64 << 20;
/// The drive with the ledger, its mount point, and the ledger's directory.
const STATE: &str = "state";
const STATE_DIR: &str = "/state";
const LEDGER: &str = "/state/leases";
/// Mount point of the disk with a file system.
const FILES_DIR: &str = "/files";
const IMAGE: &str = "/files/drive.img";
const IMAGE_BYTES: u64 = 32 << 20;
/// Size of each lease in bytes.
const LEASE: u64 = 4 << 20;
const BY_SIZE: &str = "size=4M,unit=1M";
const BY_RANGE: &str = "range=8M+4M";
/// Label of the labelled disk.
const LABEL: &str = "pool";

/// Timeout of the requests in one boot, on a busy machine.
const BOOT_TIMEOUT: Duration = Duration::from_secs(900);
const MEMORY: (u64, u64) = (1 << 32, 4 << 20);
const SECTOR: u64 = 512;
const PIECE: u64 = 64 << 10;

/// Boots a lab `boots` times.
fn over_boots(suite: &Suite, kind: &str, boots: usize) -> Result<(), Failure> {
    let dir = tempfile::tempdir().map_err(with_path(std::env::temp_dir()))?;
    let disks = [0, 1, 2].map(|disk| dir.path().join(format!("disk{disk}.img")));
    for disk in &disks {
        fs::File::create(disk)
            .and_then(|file| file.set_len(DISK))
            .map_err(with_path(disk))?;
    }
    for boot in 0..boots {
        let order = ORDERS[boot % ORDERS.len()];
        let state = LabDrive::new(STATE, DISK).image(dir.path().join("state.img"));
        let config = order
            .iter()
            .fold(LabConfig::new().drive(state), |config, disk| {
                config.disk(&disks[*disk])
            });
        suite.with_lab_of(config, |lab| {
            let order = order.map(|disk| disk.to_string()).join(" ");
            let command = format!("{} {ARGUMENT} {kind} {boot} {order}", suite.program_path());
            let mut output = EchoedOutput::default();
            let status = lab.stream(&command, BOOT_TIMEOUT, &mut output)?;
            expect(status == 0, || {
                format!("Boot {boot}, disks {order}: {}", output.tail())
            })?;
            lab.finish(0, &[], dir.path())?;
            Ok(())
        })?;
    }
    Ok(())
}

/// Main function inside the lab, with the arguments after [`ARGUMENT`].
pub(crate) fn main(arguments: &[String]) -> ExitCode {
    match run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            println!("{}", integration::error_chain(&*failure));
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Result<(), Failure> {
    let [kind, numbers @ ..] = arguments else {
        return Err("It takes a kind, the boot, and the order of the disks".into());
    };
    let numbers: Vec<usize> = numbers
        .iter()
        .map(|number| number.parse())
        .collect::<Result<_, _>>()?;
    let &[boot, first, second, third] = &numbers[..] else {
        return Err(format!("Not a boot and three disks: {numbers:?}").into());
    };
    inside::bind(STATE, "nvme")?;
    let state = inside::block_device(STATE, 1)?;
    if boot == 0 {
        sh(&format!("mkfs.ext4 -q -F {}", state.display()))?;
    }
    sh(&format!(
        "mkdir {STATE_DIR} {FILES_DIR} && mount -t ext4 {} {STATE_DIR}",
        state.display()
    ))?;
    for path in PATHS {
        let name = path.trim_start_matches("/dev/");
        let serial = sh(&format!("cat /sys/block/{name}/serial"))?;
        expect(serial.trim().is_empty(), || {
            format!("{path} has a serial number: {serial}")
        })?;
    }
    let mut host = Host {
        boot,
        order: [first, second, third],
        granted: 0,
        refused: 0,
    };
    match kind.as_str() {
        NAMELESS => host.nameless()?,
        _ => host.named()?,
    }
    sh(&format!(
        "grep -q {FILES_DIR} /proc/mounts && umount {FILES_DIR}; umount {STATE_DIR}; sync"
    ))?;
    print_line(&format!(
        "        boot {boot}, disks in order {:?}: {} leases right, {} refused",
        host.order, host.granted, host.refused
    ));
    Ok(())
}

/// The host in one of its boots.
struct Host {
    boot: usize,
    order: [usize; 3],
    granted: u32,
    refused: u32,
}

impl Host {
    /// Returns the path of a disk in this boot.
    fn path(&self, disk: usize) -> Result<&'static str, Failure> {
        let place = self.order.iter().position(|number| *number == disk);
        let place = place.ok_or_else(|| Failure::from(format!("There is no disk {disk}")))?;
        Ok(PATHS[place])
    }

    /// Checks owners with a range on a disk each. After a boot, each is refused until the operator has identified the disks.
    fn nameless(&mut self) -> Result<(), Failure> {
        let tenants = ["tenant0", "tenant1", "tenant2"];
        for (tenant, path) in tenants.into_iter().zip(PATHS) {
            if self.boot == 0 {
                self.expect_refused("sized", path, BY_SIZE, &["leases label", "range="])?;
                self.expect_granted(tenant, path, BY_RANGE)?;
                continue;
            }
            let why = ["before the host was restarted", "leases carry-over"];
            self.expect_refused("sized", path, BY_SIZE, &why)?;
            // The refusal does not depend on the id: the first owner of the path, another owner, or an unknown id.
            for id in [tenant, "tenant1", "stranger"] {
                self.expect_refused(id, path, BY_RANGE, &why)?;
            }
        }
        // At every other boot, the operator identifies the disks: a refusal names a drive of an earlier boot, and an owner of
        // its data.
        if self.boot % 2 == 1 {
            let mut unsaid = vec![0, 1, 2];
            while let Some(disk) = unsaid.last() {
                let refusal = refusal("stranger", self.path(*disk)?, BY_RANGE)?;
                let (owner, id) = parse_refusal(&refusal)?;
                let named = tenants.iter().position(|tenant| *tenant == id);
                let named = named.filter(|disk| unsaid.contains(disk));
                let named = named.ok_or_else(|| Failure::from(refusal.clone()))?;
                nvme_mpt(&["leases", "carry-over", &owner, self.path(named)?])?;
                unsaid.retain(|disk| *disk != named);
            }
            for (disk, tenant) in tenants.into_iter().enumerate() {
                let path = self.path(disk)?;
                // Other ids are refused: their lease is on another disk, or the range has this owner's data.
                let others = tenants.into_iter().filter(|other| *other != tenant);
                for other in others.chain(["stranger"]) {
                    self.expect_refused(other, path, BY_RANGE, &["lease"])?;
                }
                self.expect_granted(tenant, path, BY_RANGE)?;
            }
        }
        Ok(())
    }

    /// Checks a bare disk, a labelled disk, and a disk with a file system. The leases of the latter two must be right at each
    /// boot.
    fn named(&mut self) -> Result<(), Failure> {
        let (bare, labelled, with_files) = (0, 1, 2);
        let pool = format!("{BY_SIZE},drive-id={LABEL}");
        if self.boot == 0 {
            nvme_mpt(&["leases", "label", self.path(labelled)?, LABEL])?;
            sh(&format!("mkfs.ext4 -q -F {}", self.path(with_files)?))?;
            self.expect_granted("bare", self.path(bare)?, BY_RANGE)?;
        }
        self.mount_files()?;
        // The order of requests alternates, because the first one gets free blocks first.
        let mut ids = [0, 1];
        ids.rotate_left(self.boot % 2);
        for path in PATHS {
            for number in ids {
                let id = format!("pool{number}");
                if path == self.path(labelled)? {
                    self.expect_granted(&id, path, &pool)?;
                } else {
                    self.expect_refused(&id, path, &pool, &[path])?;
                }
            }
            // Without the label's name, a lease by size is refused on every disk.
            self.expect_refused("pool0", path, BY_SIZE, &[])?;
            if self.boot > 0 {
                self.expect_refused("bare", path, BY_RANGE, &[])?;
            }
        }
        for number in ids {
            self.expect_granted(&format!("file{number}"), IMAGE, BY_SIZE)?;
        }
        Ok(())
    }

    /// Mounts the disk with a file system.
    fn mount_files(&self) -> Result<(), Failure> {
        let mount = |path: &&str| sh(&format!("mount -t ext4 {path} {FILES_DIR}")).is_ok();
        PATHS
            .iter()
            .find(|path| mount(path))
            .ok_or("No file system")?;
        if self.boot == 0 {
            let image = Path::new(IMAGE);
            fs::File::create(image)
                .and_then(|file| file.set_len(IMAGE_BYTES))
                .map_err(with_path(image))?;
        }
        Ok(())
    }

    /// Checks that an id gets its lease and finds its data.
    fn expect_granted(&mut self, id: &str, path: &str, which: &str) -> Result<(), Failure> {
        let server = match FunctionServer::start(id, path, which)? {
            LeaseOutcome::Served(server) => server,
            LeaseOutcome::Refused(text) => {
                return Err(format!("{id} is refused {which} on {path}:\n{text}").into());
            }
        };
        server.find_and_write(id, self.boot == 0)?;
        // At every other boot, the server is killed with the host.
        if self.boot.is_multiple_of(2) {
            server.stop()?;
        }
        self.granted += 1;
        Ok(())
    }

    /// Checks that a lease is refused by a message with all `words`.
    fn expect_refused(
        &mut self,
        id: &str,
        path: &str,
        which: &str,
        words: &[&str],
    ) -> Result<(), Failure> {
        let text = refusal(id, path, which)?;
        for word in words {
            expect(text.contains(word), || {
                format!("{id} is refused {which} on {path}, without \"{word}\":\n{text}")
            })?;
        }
        self.refused += 1;
        Ok(())
    }
}

/// Returns the message that refuses a lease.
fn refusal(id: &str, path: &str, which: &str) -> Result<String, Failure> {
    match FunctionServer::start(id, path, which)? {
        LeaseOutcome::Refused(text) => Ok(text),
        LeaseOutcome::Served(_) => Err(format!("{id} was given {which} on {path}").into()),
    }
}

/// Returns the drive of an earlier boot that a refusal names, and an id with data there.
fn parse_refusal(refusal: &str) -> Result<(String, String), Failure> {
    let between = |start: &str, end: &str| {
        let (_, rest) = refusal.split_once(start)?;
        Some(rest.split_once(end)?.0.to_owned())
    };
    let names = between("leases carry-over '", "'").zip(between("with data of \"", "\""));
    names.ok_or_else(|| format!("It names no drive of an earlier boot:\n{refusal}").into())
}

fn nvme_mpt(arguments: &[&str]) -> Result<String, Failure> {
    let mut command = Command::new(inside::copied_path("nvme-mpt"));
    command.args(arguments).args(["--state-dir", LEDGER]);
    Ok(process::run(&mut command)?)
}

/// A server with one function.
struct FunctionServer {
    process: SupervisedChild,
    socket: PathBuf,
}

/// Result of a request for a lease.
enum LeaseOutcome {
    Served(FunctionServer),
    Refused(String),
}

impl FunctionServer {
    /// Starts a server, which ends if its function's lease is refused.
    fn start(id: &str, path: &str, which: &str) -> Result<LeaseOutcome, Failure> {
        let socket = PathBuf::from("/run/x.sock");
        let log = PathBuf::from("/tmp/serve.log");
        // Removes the log of the previous server.
        let _ = fs::remove_file(&log);
        let mut command = Command::new(inside::copied_path("nvme-mpt"));
        command
            .args(["serve", "--control", "/run/control.sock"])
            .args(["--state-dir", LEDGER, "--function"])
            .arg(format!(
                "socket={},id={id},path={path},{which}",
                socket.display()
            ));
        let mut process = SupervisedChild::spawn("nvme-mpt serve", &command, &log)?;
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let output = fs::read_to_string(&log).map_err(with_path(&log))?;
            if output.lines().any(|line| line == "ready") {
                return Ok(LeaseOutcome::Served(Self { process, socket }));
            }
            if process.try_wait()?.is_some() {
                return Ok(LeaseOutcome::Refused(process::file_tail(&log)));
            }
            expect(Instant::now() < deadline, || {
                format!("The server does not say that it is ready:\n{output}")
            })?;
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Reads the whole lease, which must hold this id's data, or no data at first. Then writes the data.
    fn find_and_write(&self, id: &str, is_first: bool) -> Result<(), Failure> {
        let memory = GuestMemory::new(&[MEMORY])?;
        let bar: Arc<dyn Bar> = Arc::new(VfioUserBar::attach(&self.socket, &memory)?);
        let mut controller = Controller::attach(bar, memory, Config::default(), 1)?;
        let mut disk = Disk::open(&mut controller, 1)?;
        let mut own = format!("data of {id};").into_bytes();
        own.resize(SECTOR as usize, b'.');
        let own = own.repeat((PIECE / SECTOR) as usize);
        for start in (0..LEASE).step_by(PIECE as usize) {
            let slba = start / SECTOR;
            let found = disk.read(slba, (PIECE / SECTOR) as u32)?;
            let is_right = match is_first {
                true => !found.windows(7).any(|bytes| bytes == b"data of"),
                false => found == own,
            };
            expect(is_right, || {
                let found = String::from_utf8_lossy(&found[..32]).into_owned();
                format!("{id} finds {found:?} at byte {start}")
            })?;
            disk.write(slba, &own)?;
        }
        disk.flush()?;
        Ok(())
    }

    fn stop(mut self) -> Result<(), Failure> {
        let status = self.process.terminate(TIMEOUT)?;
        expect(status.success(), || {
            format!(
                "It ended with {status}:\n{}",
                process::file_tail(self.process.log())
            )
        })
    }
}

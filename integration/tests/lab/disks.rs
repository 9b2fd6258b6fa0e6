//! Full and failing disks below a drive: every success that was reported to a guest must hold.
//!
//! A client writes and flushes through a function, and a peer does the same to a local file with `write` and `fsync`. Half-way,
//! the disk begins to fail. After the disk was repaired, flushed data is read from it. `fio.rs` does the same with fio in a
//! guest, and with fio on the local file.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use integration::lab::{LabDrive, inside};
use integration::progress::print_line;
use integration::server::{FunctionArgument, Server, ServerError};
use nvme_mpt_tests::bar::Bar;
use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::controller::{Config, Controller};
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::prp;
use nvme_mpt_tests::rng::Rng;
use nvme_mpt_tests::vfio_user::VfioUserBar;

use crate::fixture::{CheckEnvironment, Failure, await_that, expect, sh, with_path};
use crate::{ExpectedRefusals, Group, fio};

pub(crate) const GROUP: Group = Group::Inside {
    name: "disks",
    drives: || vec![LabDrive::new("a", DISK)],
    refused: ExpectedRefusals::None,
    checks: &[
        ("full_under_a_file", |bench| {
            compare(bench, Layer::File, DiskFailure::Full)
        }),
        ("failing_under_a_file", |bench| {
            compare(bench, Layer::File, DiskFailure::Error)
        }),
        ("flaky_under_a_file", |bench| {
            compare(bench, Layer::File, DiskFailure::Flaky)
        }),
        ("failing", |bench| {
            compare(bench, Layer::Device, DiskFailure::Error)
        }),
        ("flaky", |bench| {
            compare(bench, Layer::Device, DiskFailure::Flaky)
        }),
        ("full_under_fio", |bench| {
            fio::compare(bench, Layer::File, DiskFailure::Full)
        }),
        ("failing_file_under_fio", |bench| {
            fio::compare(bench, Layer::File, DiskFailure::Error)
        }),
        ("flaky_file_under_fio", |bench| {
            fio::compare(bench, Layer::File, DiskFailure::Flaky)
        }),
        ("failing_under_fio", |bench| {
            fio::compare(bench, Layer::Device, DiskFailure::Error)
        }),
        ("flaky_under_fio", |bench| {
            fio::compare(bench, Layer::Device, DiskFailure::Flaky)
        }),
        ("one_drive_by_every_path", one_drive),
        (
            "killed_with_a_write_in_flight",
            killed_with_a_write_in_flight,
        ),
    ],
};

/// Size of the disk in bytes.
const DISK: u64 = 96 << 20;
/// Size of the lease in bytes.
pub(crate) const LEASE: u64 = 48 << 20;
/// Size in bytes of a file system that is too small for the lease.
const SMALL: u64 = 40 << 20;
const SECTOR: u64 = 512;
/// Bytes of a write, which all hold one generation.
pub(crate) const PLACE: u64 = 64 << 10;
const PLACES: u64 = LEASE / PLACE;
/// Number of writes before each flush.
pub(crate) const BATCH: u64 = 8;
/// Minimum number of flushes before, and after, the disk begins to fail.
const FLUSHES: u64 = 12;
/// Minimum duration of the failure: a flaky disk alternates between a good second and a failing second.
const FAILURE_TIME: Duration = Duration::from_secs(5);
/// Device mapper device on top of the disk.
const MAPPED: &str = "/dev/mapper/trouble";
const MEMORY: (u64, u64) = (1 << 32, 4 << 20);

/// Storage below a drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layer {
    /// An image on an ext4 file system.
    File,
    /// The disk itself.
    Device,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DiskFailure {
    /// The file system is smaller than the image.
    Full,
    /// Every access fails.
    Error,
    /// Writes fail during every other second.
    Flaky,
}

/// Destination of a check's writes.
trait Target {
    fn write(&mut self, place: u64, bytes: &[u8]) -> Result<(), String>;
    fn flush(&mut self) -> Result<(), String>;
}

/// A local file or device, used with plain system calls.
struct Local(File);

impl Target for Local {
    fn write(&mut self, place: u64, bytes: &[u8]) -> Result<(), String> {
        let written = self.0.write_all_at(bytes, place * PLACE);
        written.map_err(|error| error.to_string())
    }

    fn flush(&mut self) -> Result<(), String> {
        self.0.sync_all().map_err(|error| error.to_string())
    }
}

/// A function of a server.
struct Function {
    disk: Disk,
    // Queues must be dropped before the controller.
    _controller: Controller,
    server: Server,
}

impl Function {
    fn connect(bench: &CheckEnvironment, path: &Path) -> Result<Self, Failure> {
        let options = FunctionArgument::new("x", path.display().to_string(), format!("0+{LEASE}"));
        let server = bench.serve(&[options])?;
        let memory = GuestMemory::new(&[MEMORY])?;
        let bar: Arc<dyn Bar> = Arc::new(VfioUserBar::attach(&server.socket("x"), &memory)?);
        let mut controller = Controller::attach(bar, memory, Config::default(), 1)?;
        let disk = Disk::open(&mut controller, 1)?;
        Ok(Self {
            disk,
            _controller: controller,
            server,
        })
    }

    /// Stops the server, which must report an error exactly if it could not flush.
    fn end(self, lost_writes: bool) -> Result<(), Failure> {
        let Self {
            disk,
            _controller: controller,
            mut server,
        } = self;
        drop((disk, controller));
        let ended = server.stop();
        match ended {
            Err(ServerError::Ended { .. }) if lost_writes => Ok(()),
            ended => Ok(ended?),
        }
    }
}

impl Target for Function {
    fn write(&mut self, place: u64, bytes: &[u8]) -> Result<(), String> {
        let slba = place * (PLACE / SECTOR);
        let written = self.disk.write(slba, bytes);
        written.map_err(|error| integration::error_chain(&error))
    }

    fn flush(&mut self) -> Result<(), String> {
        let flushed = self.disk.flush();
        flushed.map_err(|error| integration::error_chain(&error))
    }
}

/// Results of a writer, and the contents that they imply.
#[derive(Debug, Default)]
struct WriteRecord {
    /// Generation of the last successful flush, by place. The place holds this generation or a later one.
    flushed: BTreeMap<u64, u64>,
    /// Generation of the last successful write since the last flush, by place.
    written: BTreeMap<u64, u64>,
    /// Numbers of successful and failed writes, and of successful and failed flushes.
    writes: (u64, u64),
    flushes: (u64, u64),
    /// Successful flushes of new writes after a failed flush.
    recovered: u64,
    first_error: Option<String>,
}

impl WriteRecord {
    fn write(&mut self, target: &mut impl Target, place: u64, generation: u64) {
        let bytes = generation.to_le_bytes().repeat((PLACE / 8) as usize);
        match target.write(place, &bytes) {
            Ok(()) => {
                self.writes.0 += 1;
                self.written.insert(place, generation);
            }
            Err(error) => {
                self.writes.1 += 1;
                self.first_error.get_or_insert(error);
            }
        }
    }

    /// Flushes. After a failed flush, earlier writes need not become durable.
    fn flush(&mut self, target: &mut impl Target) {
        match target.flush() {
            Ok(()) => {
                self.flushes.0 += 1;
                if self.flushes.1 > 0 && !self.written.is_empty() {
                    self.recovered += 1;
                }
                self.flushed.append(&mut self.written);
            }
            Err(error) => {
                self.flushes.1 += 1;
                self.written.clear();
                self.first_error.get_or_insert(error);
            }
        }
    }

    fn failures(&self) -> u64 {
        self.writes.1 + self.flushes.1
    }
}

/// Writes and flushes, and calls `begin` half-way to start the failure.
fn write_with_failure(
    target: &mut impl Target,
    failure: DiskFailure,
    begin: impl FnOnce() -> Result<(), Failure>,
) -> Result<WriteRecord, Failure> {
    let mut record = WriteRecord::default();
    let mut rng = Rng::new(7);
    let mut generation = 0;
    let mut batch = |record: &mut WriteRecord, places: &mut dyn FnMut() -> u64| {
        for _ in 0..BATCH {
            generation += 1;
            record.write(target, places(), generation);
        }
        record.flush(target);
    };
    if failure == DiskFailure::Full {
        // Writes each place once, which exceeds the capacity of the file system.
        let mut next = 0..PLACES;
        for _ in 0..PLACES / BATCH {
            batch(&mut record, &mut || next.next().unwrap_or(0));
        }
        return Ok(record);
    }
    let mut anywhere = || rng.below(PLACES);
    for _ in 0..FLUSHES {
        batch(&mut record, &mut anywhere);
    }
    expect(record.failures() == 0, || {
        format!("Before there was any trouble: {:?}", record.first_error)
    })?;
    begin()?;
    let started = Instant::now();
    let before = record.flushes;
    while record.flushes.0 + record.flushes.1 < before.0 + FLUSHES
        || started.elapsed() < FAILURE_TIME
    {
        batch(&mut record, &mut anywhere);
    }
    Ok(record)
}

/// The disk with a device mapper device.
pub(crate) struct MappedDisk {
    device: PathBuf,
    bytes: u64,
}

impl MappedDisk {
    fn create(bytes: u64) -> Result<Self, Failure> {
        inside::bind("a", "nvme")?;
        let device = inside::block_device("a", 1)?;
        let mapped = Self { device, bytes };
        let table = mapped.linear();
        sh(&format!(
            "DM_DISABLE_UDEV=1 dmsetup create trouble --table '{table}'"
        ))?;
        Ok(mapped)
    }

    fn sectors(&self) -> u64 {
        self.bytes / SECTOR
    }

    fn linear(&self) -> String {
        format!("0 {} linear {} 0", self.sectors(), self.device.display())
    }

    fn load(&self, table: &str) -> Result<(), Failure> {
        sh(&format!(
            "export DM_DISABLE_UDEV=1; dmsetup load trouble --table '{table}' \
             && dmsetup suspend --noflush --nolockfs trouble && dmsetup resume trouble"
        ))?;
        Ok(())
    }

    /// Returns the number of bytes written so far (Linux, Documentation/block/stat.rst).
    pub(crate) fn written_bytes(&self) -> Result<u64, Failure> {
        let sectors = sh("awk '{ print $7 }' /sys/block/dm-0/stat")?;
        let sectors = sectors.trim().parse::<u64>();
        let sectors = sectors.map_err(|_| Failure::from("The disk counts no sectors"))?;
        Ok(sectors * SECTOR)
    }

    pub(crate) fn begin(&self, failure: DiskFailure) -> Result<(), Failure> {
        let (sectors, device) = (self.sectors(), self.device.display());
        match failure {
            DiskFailure::Full => Ok(()),
            DiskFailure::Error => self.load(&format!("0 {sectors} error")),
            DiskFailure::Flaky => {
                self.load(&format!("0 {sectors} flakey {device} 0 1 1 1 error_writes"))
            }
        }
    }

    fn end(&self) -> Result<(), Failure> {
        self.load(&self.linear())
    }
}

impl Drop for MappedDisk {
    fn drop(&mut self) {
        // If a check failed, the next check creates the device again.
        let _ = sh("umount /mnt 2> /dev/null; DM_DISABLE_UDEV=1 dmsetup remove --retry trouble");
    }
}

fn open(path: &Path) -> Result<File, Failure> {
    let opened = OpenOptions::new().read(true).write(true).open(path);
    opened.map_err(with_path(path))
}

/// Creates a new disk. Returns the path of the image or device on it as well.
pub(crate) fn prepare(
    layer: Layer,
    failure: DiskFailure,
) -> Result<(MappedDisk, PathBuf), Failure> {
    let bytes = if failure == DiskFailure::Full {
        SMALL
    } else {
        DISK
    };
    let disk = MappedDisk::create(bytes)?;
    let path = match layer {
        Layer::Device => PathBuf::from(MAPPED),
        Layer::File => {
            sh(&format!("mkfs.ext4 -q -F {MAPPED} && mount {MAPPED} /mnt"))?;
            let path = PathBuf::from("/mnt/drive.img");
            let image = File::create(&path).map_err(with_path(&path))?;
            image.set_len(LEASE).map_err(with_path(&path))?;
            if failure != DiskFailure::Full {
                // All blocks are allocated, so that the check writes only data.
                let zeroes = vec![0; PLACE as usize];
                for place in 0..PLACES {
                    let written = image.write_all_at(&zeroes, place * PLACE);
                    written.map_err(with_path(&path))?;
                }
                image.sync_all().map_err(with_path(&path))?;
                drop(image);
                // Writes all metadata back, so that its errors do not hide errors of the data.
                sh(&format!("umount /mnt && mount {MAPPED} /mnt"))?;
            }
            path
        }
    };
    Ok((disk, path))
}

/// Repairs the disk, and empties the page cache so that reads come from the disk.
pub(crate) fn heal(disk: &MappedDisk, layer: Layer) -> Result<(), Failure> {
    disk.end()?;
    sh(&match layer {
        Layer::File => format!("umount /mnt && mount {MAPPED} /mnt"),
        Layer::Device => "echo 3 > /proc/sys/vm/drop_caches".to_owned(),
    })?;
    Ok(())
}

/// Runs the work on a new disk, through a function or locally. Returns the writer's results.
fn run(
    bench: &CheckEnvironment,
    layer: Layer,
    failure: DiskFailure,
    locally: bool,
) -> Result<WriteRecord, Failure> {
    let (disk, path) = prepare(layer, failure)?;
    let begin = || disk.begin(failure);
    let record = if locally {
        write_with_failure(&mut Local(open(&path)?), failure, begin)?
    } else {
        let mut function = Function::connect(bench, &path)?;
        let record = write_with_failure(&mut function, failure, begin)?;
        function.end(record.flushes.1 > 0)?;
        record
    };
    heal(&disk, layer)?;
    verify(&path, &record)?;
    Ok(record)
}

/// Checks that each place holds its flushed generation or a later one.
fn verify(path: &Path, record: &WriteRecord) -> Result<(), Failure> {
    let file = open(path)?;
    let mut bytes = vec![0; PLACE as usize];
    for (place, flushed) in &record.flushed {
        file.read_exact_at(&mut bytes, place * PLACE)
            .map_err(with_path(path))?;
        let old = bytes
            .chunks_exact(8)
            .map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()))
            .find(|found| found < flushed);
        if let Some(old) = old {
            return Err(Failure::from(format!(
                "Place {place} holds generation {old}, and {flushed} was flushed with success"
            )));
        }
    }
    Ok(())
}

/// Checks one namespace by three paths: a mapping, the block device, and the PCI address. A stale lease by one path refuses
/// another id by each path, and its own id takes it over by any path.
fn one_drive(bench: &CheckEnvironment) -> Result<(), Failure> {
    let disk = MappedDisk::create(DISK)?;
    let device = disk.device.display().to_string();
    let serve = |id: &str, path: &str| {
        let options = FunctionArgument::new(id, path, format!("0+{LEASE}"));
        bench.serve(&[options])
    };
    let refused = |path: &str| match serve("b", path) {
        Ok(_) => Err(format!("{path} was leased twice").into()),
        Err(error) => {
            let message = integration::error_chain(error.as_ref());
            expect(message.contains("overlaps lease \"a\""), || message)
        }
    };
    // Dropping the server kills it.
    drop(serve("a", MAPPED)?);
    refused(MAPPED)?;
    drop(disk);
    refused(&device)?;
    drop(serve("a", &device)?);
    inside::bind("a", "vfio-pci")?;
    let address = inside::address("a")?;
    refused(&address)?;
    serve("a", &address)?.stop()?;
    inside::bind("a", "nvme")?;
    Ok(())
}

/// Checks a server that is killed with a write which the disk executes seconds later. The next server waits for that write, so
/// that its guest never sees a block change without a command.
fn killed_with_a_write_in_flight(bench: &CheckEnvironment) -> Result<(), Failure> {
    let late = Duration::from_secs(6);
    let mapped = MappedDisk::create(DISK)?;
    let (sectors, device) = (mapped.sectors(), mapped.device.display());
    let late_ms = late.as_millis();
    mapped.load(&format!(
        "0 {sectors} delay {device} 0 0 {device} 0 {late_ms}"
    ))?;
    let is_written = || -> Result<bool, Failure> {
        sh("echo 3 > /proc/sys/vm/drop_caches")?;
        let mut bytes = vec![0; PLACE as usize];
        let path = Path::new(MAPPED);
        open(path)?
            .read_exact_at(&mut bytes, 0)
            .map_err(with_path(path))?;
        Ok(bytes.iter().all(|&byte| byte == 0x5A))
    };

    let options = FunctionArgument::new("x", MAPPED, format!("0+{LEASE}"));
    let server = bench.serve(std::slice::from_ref(&options))?;
    let memory = GuestMemory::new(&[MEMORY])?;
    let bar: Arc<dyn Bar> = Arc::new(VfioUserBar::attach(&server.socket("x"), &memory)?);
    let mut controller = Controller::attach(bar, memory.clone(), Config::default(), 1)?;
    let mut disk = Disk::open(&mut controller, 1)?;
    let data = memory.alloc(PLACE as usize)?;
    data.fill(0x5A);
    let pointer = prp::buffer(&data, 0, data.len())?.pointer;
    disk.queue
        .submit(Sqe::write(1, 0, (PLACE / SECTOR) as u32).with_data(pointer))?;
    disk.queue.ring();
    // The disk delays the write for seconds.
    let ring = format!(
        "grep -l '^SqTail:[[:space:]]*1$' /proc/{}/fdinfo/*",
        server.pid()
    );
    await_that("the kernel has the write", || Ok(sh(&ring).is_ok()))?;
    // Dropping the server kills it.
    drop(server);
    expect(!is_written()?, || {
        "The kernel waited with the end of the server for its write".to_owned()
    })?;
    drop((disk, controller));

    let began = Instant::now();
    let mut next = bench.serve(&[options])?;
    print_line(&format!(
        "        the next server was there {:.1} s after the first one was killed",
        began.elapsed().as_secs_f64()
    ));
    expect(is_written()?, || {
        "The next server began before the last write of the killed one".to_owned()
    })?;
    Ok(next.stop()?)
}

fn compare(bench: &CheckEnvironment, layer: Layer, failure: DiskFailure) -> Result<(), Failure> {
    fs::create_dir_all("/mnt").map_err(with_path(Path::new("/mnt")))?;
    for (who, locally) in [("a local file", true), ("a function", false)] {
        let record = run(bench, layer, failure, locally)?;
        let WriteRecord {
            writes, flushes, ..
        } = record;
        print_line(&format!(
            "        {who}: writes {} done, {} failed; flushes {} done, {} failed: {}",
            writes.0,
            writes.1,
            flushes.0,
            flushes.1,
            record.first_error.as_deref().unwrap_or("no error")
        ));
        expect(record.failures() > 0, || format!("{who} got no error"))?;
        expect(locally || record.recovered == 0, || {
            let times = record.recovered;
            format!("After a flush that failed, {times} succeeded before the VMM connected again")
        })?;
    }
    Ok(())
}

//! Tenants that share a file: a quiet tenant verifies its data, while loud tenants storm their ranges. A storm consists of
//! Deallocate, Write Zeroes, Flush, unaligned writes of odd lengths, and memory that is mapped and unmapped.
//!
//! The loud tenants are native clients, because an emulated guest is too slow. The quiet tenant is a native client as well,
//! except in the checks with guests, where two quiet tenants are functions of a guest that runs fio.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use clap::Parser;
use integration::guest::fio::FioJobReport;
use integration::guest::{GuestConfig, GuestDrive};
use integration::progress::print_line;
use integration::provision::host::{self, HostTool};
use integration::server::{FunctionArgument, Server};
use nvme_mpt_tests::bar::Bar;
use nvme_mpt_tests::controller::{Config, Controller};
use nvme_mpt_tests::disk::{Disk, Transfer};
use nvme_mpt_tests::memory::{GuestMemory, Region};
use nvme_mpt_tests::rng::Rng;
use nvme_mpt_tests::vfio_user::VfioUserBar;

use crate::Group;
use crate::fixture::{
    CheckEnvironment, Failure, TIMEOUT, expect, expect_no_complaints, verified_load, with_path,
};
use crate::mounts::{self, LoopDevice, Mounted};

pub(crate) const GROUP: Group = Group::Alone {
    name: "tenants",
    checks: &[
        ("on_a_file", |bench| {
            check_storm(bench, &bench.drive("shared.img", SHARED_MIB)?)
        }),
        ("on_tmpfs", |bench| on_tmpfs(bench, check_storm)),
        ("on_ext4", |bench| on_ext4(bench, check_storm)),
        ("on_xfs", |bench| on_xfs(bench, check_storm)),
        ("on_a_loop_device", |bench| {
            on_a_loop_device(bench, check_storm)
        }),
        ("guest_on_tmpfs", |bench| {
            on_tmpfs(bench, check_storm_with_guest)
        }),
        ("guest_on_ext4", |bench| {
            on_ext4(bench, check_storm_with_guest)
        }),
        ("guest_on_xfs", |bench| {
            on_xfs(bench, check_storm_with_guest)
        }),
        ("guest_on_a_loop_device", |bench| {
            on_a_loop_device(bench, check_storm_with_guest)
        }),
    ],
};

const SHARED_MIB: u64 = 512;
const RANGE_MIB: u64 = 64;
const QUIET: [&str; 2] = ["quiet1", "quiet2"];
const LOUD: [&str; 3] = ["loud1", "loud2", "loud3"];
const SECONDS: &str = "8";
/// Duration of the quiet load without a storm, whose latencies are printed for comparison.
const SECONDS_ALONE: &str = "2";
/// Fewest commands of each loud tenant.
const LOUD_COMMANDS: u64 = 100;

/// Memory of a loud client, and memory that is mapped and unmapped: start and length.
const MEMORY: (u64, u64) = (1 << 32, 16 << 20);
const PLUGGED_REGION: (u64, u64) = (1 << 33, 1 << 20);
/// Maximum number of blocks of a write, and of a range of Deallocate or Write Zeroes.
const WRITE_BLOCKS: u64 = 300;
const RANGE_BLOCKS: u64 = 2048;

/// A test on a drive.
type Scene = fn(&CheckEnvironment, &Path) -> Result<(), Failure>;

fn on_tmpfs(bench: &CheckEnvironment, scene: Scene) -> Result<(), Failure> {
    let dir = tempfile::Builder::new()
        .prefix("nvme-mpt-e2e-")
        .tempdir_in("/dev/shm")
        .map_err(with_path("/dev/shm"))?;
    scene(bench, &image(dir.path())?)
}

fn on_ext4(bench: &CheckEnvironment, scene: Scene) -> Result<(), Failure> {
    on_a_file_system(bench, "mkfs.ext4", scene)
}

fn on_xfs(bench: &CheckEnvironment, scene: Scene) -> Result<(), Failure> {
    host::ensure(&[HostTool {
        program: "mkfs.xfs",
        package: "xfsprogs",
    }])?;
    on_a_file_system(bench, "mkfs.xfs", scene)
}

/// Creates a file system on a loop device, and runs `scene` on an image in it.
fn on_a_file_system(bench: &CheckEnvironment, mkfs: &str, scene: Scene) -> Result<(), Failure> {
    let disk = LoopDevice::attach(&bench.drive("disk.img", 2 * SHARED_MIB)?)?;
    mounts::run(mkfs, &[Path::new("-q"), &disk.path])?;
    let mounted = Mounted::at(&disk.path, bench.dir().join("mounted"))?;
    scene(bench, &image(&mounted.dir)?)
}

fn on_a_loop_device(bench: &CheckEnvironment, scene: Scene) -> Result<(), Failure> {
    let disk = LoopDevice::attach(&bench.drive("loop.img", SHARED_MIB)?)?;
    scene(bench, &disk.path)
}

fn image(dir: &Path) -> Result<PathBuf, Failure> {
    let path = dir.join("shared.img");
    fs::File::create(&path)
        .and_then(|file| file.set_len(SHARED_MIB << 20))
        .map_err(with_path(&path))?;
    Ok(path)
}

#[derive(Parser)]
struct Quiet {
    #[command(flatten)]
    load: nvme_load::options::LoadOptions,
}

/// Runs the quiet tenant's load, which fails on the first wrong block.
fn run_verified_load(
    socket: &Path,
    seconds: &str,
) -> Result<nvme_load::report::LoadReport, Failure> {
    let arguments = [
        "quiet",
        "--verify",
        "--mix",
        "50",
        "--qd",
        "4",
        "--size",
        "4K",
        "--range",
        "16M",
        "--seconds",
        seconds,
        "--timeout",
        "300",
    ];
    let arguments = arguments.iter().map(|word| (*word).into());
    let quiet = Quiet::try_parse_from(arguments.chain([socket.as_os_str().to_owned()]))?;
    nvme_load::run(&quiet.load)
        .map_err(|error| Failure::from(format!("Quiet: {}", integration::error_chain(&error))))
}

fn check_storm(bench: &CheckEnvironment, drive: &Path) -> Result<(), Failure> {
    let mut server = serve(bench, drive, &["quiet"])?;
    let alone = run_verified_load(&server.socket("quiet"), SECONDS_ALONE)?;
    // A process that another check starts may briefly hold a copy of the client's connection.
    server.await_no_client("quiet")?;
    let (loaded, commands) = during_storm(&server, || {
        run_verified_load(&server.socket("quiet"), SECONDS)
    })?;
    print_line(&format!(
        "        quiet p99: {:.0} us alone, {:.0} us in a storm of {commands} commands; max {:.0} and {:.0} us",
        alone.latency_us.p99, loaded.latency_us.p99, alone.latency_us.max, loaded.latency_us.max
    ));
    server.stop()?;
    Ok(())
}

/// Like [`storm`], with fio on two functions of a guest.
fn check_storm_with_guest(bench: &CheckEnvironment, drive: &Path) -> Result<(), Failure> {
    let mut server = serve(bench, drive, &QUIET)?;
    let mut config = GuestConfig::new("quiet").vcpus(2);
    for id in QUIET {
        config = config.drive(GuestDrive::vfio_user(server.socket(id)).id(id));
    }
    let mut guest = bench.boot(&config)?;
    let verify = || -> Result<FioJobReport, Failure> {
        let job = verified_load("verify", 1).option("filename", "/dev/nvme0n1:/dev/nvme1n1");
        Ok(job.run(&guest)?)
    };
    let alone = verify()?;
    let (loaded, commands) = during_storm(&server, verify)?;
    let (alone, loaded) = (alone.write, loaded.write);
    print_line(&format!(
        "        two tenants of fio, p99: {:.0} us alone, {:.0} us in a storm of {commands} commands; max {:.0} and \
         {:.0} us",
        alone.p99_us, loaded.p99_us, alone.max_us, loaded.max_us
    ));
    expect_no_complaints(&guest)?;
    guest.power_off(TIMEOUT)?;
    server.stop()?;
    Ok(())
}

/// Serves the quiet and the loud tenants, each with a range of the drive.
fn serve(bench: &CheckEnvironment, drive: &Path, quiet: &[&str]) -> Result<Server, Failure> {
    let functions: Vec<_> = quiet
        .iter()
        .chain(&LOUD)
        .zip(0_u64..)
        .map(|(id, place)| {
            let range = format!("{}M+{RANGE_MIB}M", place * RANGE_MIB);
            FunctionArgument::new(id, drive.display().to_string(), range)
        })
        .collect();
    bench.serve(&functions)
}

/// Runs `quiet` during a storm of the loud tenants. Returns its result, and the number of the loud tenants' commands.
fn during_storm<T>(
    server: &Server,
    quiet: impl FnOnce() -> Result<T, Failure>,
) -> Result<(T, u64), Failure> {
    let (stop, commands) = (AtomicBool::new(false), AtomicU64::new(0));
    let (loaded, loud) = std::thread::scope(|scope| {
        let tenants: Vec<_> = LOUD
            .iter()
            .zip(1..)
            .map(|(id, seed)| {
                let (socket, stop, commands) = (server.socket(id), &stop, &commands);
                scope.spawn(move || LoudTenant::connect(&socket, seed)?.run_until(stop, commands))
            })
            .collect();
        let loaded = quiet();
        stop.store(true, Ordering::Relaxed);
        let loud: Vec<_> = tenants
            .into_iter()
            .map(|tenant| {
                let panicked = |_| Err(Failure::from("A loud tenant's thread panicked"));
                tenant.join().unwrap_or_else(panicked)
            })
            .collect();
        (loaded, loud)
    });
    let loaded = loaded?;
    for (id, result) in LOUD.iter().zip(loud) {
        result.map_err(|failure| {
            Failure::from(format!("{id}: {}", integration::error_chain(&*failure)))
        })?;
    }
    let commands = commands.into_inner();
    expect(commands >= LOUD_COMMANDS * LOUD.len() as u64, || {
        format!("The storm was {commands} commands")
    })?;
    Ok((loaded, commands))
}

/// Expected content of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    /// A deallocated block: zeroes or the previous data.
    Any,
    /// Every 8 bytes hold this value.
    Filled(u64),
}

/// A loud tenant.
struct LoudTenant {
    bar: Arc<VfioUserBar>,
    memory: GuestMemory,
    plugged: Region,
    disk: Disk,
    // Queues must be dropped before the controller.
    _controller: Controller,
    blocks: Vec<Block>,
    rng: Rng,
    writes: u64,
}

impl LoudTenant {
    fn connect(socket: &Path, seed: u64) -> Result<Self, Failure> {
        let memory = GuestMemory::new(&[MEMORY])?;
        let bar = Arc::new(VfioUserBar::attach(socket, &memory)?);
        let registers: Arc<dyn Bar> = bar.clone();
        let mut controller = Controller::attach(registers, memory.clone(), Config::default(), 1)?;
        let disk = Disk::open(&mut controller, 1)?;
        let coming = memory.add_region(PLUGGED_REGION.0, PLUGGED_REGION.1)?;
        let blocks = vec![Block::Any; usize::try_from(disk.blocks()).unwrap_or(0)];
        Ok(Self {
            bar,
            memory,
            plugged: coming,
            disk,
            _controller: controller,
            blocks,
            rng: Rng::new(seed),
            writes: seed << 32,
        })
    }

    /// Returns a random range of at most `most` blocks.
    fn range(&mut self, most: u64) -> (usize, u32) {
        let start = self.rng.below(self.blocks.len() as u64 - most);
        let blocks = 1 + self.rng.below(most);
        (start as usize, blocks as u32)
    }

    fn run_until(mut self, stop: &AtomicBool, commands: &AtomicU64) -> Result<(), Failure> {
        // A tenant that begins late also sends its commands.
        let mut made = 0;
        while made < LOUD_COMMANDS || !stop.load(Ordering::Relaxed) {
            made += 1;
            match self.rng.below(100) {
                0..40 => self.write()?,
                40..70 => self.read()?,
                70..80 => self.deallocate()?,
                80..85 => self.write_zeroes()?,
                85..95 => self.disk.flush()?,
                _ => self.plug_and_write()?,
            }
            commands.fetch_add(1, Ordering::Relaxed);
        }
        // Verifies the whole range at the end.
        for start in (0..self.blocks.len()).step_by(256) {
            self.check(start, 256)?;
        }
        Ok(())
    }

    fn write(&mut self) -> Result<(), Failure> {
        let (start, blocks) = self.range(WRITE_BLOCKS);
        self.disk.transfer = match self.rng.below(3) {
            0 => Transfer::Prp { offset: 0 },
            1 => Transfer::Prp {
                offset: 4 * (1 + self.rng.below(1000) as usize),
            },
            _ => Transfer::Prp { offset: 512 },
        };
        self.disk.fua = self.rng.below(8) == 0;
        self.writes += 1;
        let bytes: Vec<u8> = self.writes.to_le_bytes().repeat(blocks as usize * 64);
        self.disk.write(start as u64, &bytes)?;
        self.blocks[start..start + blocks as usize].fill(Block::Filled(self.writes));
        Ok(())
    }

    fn read(&mut self) -> Result<(), Failure> {
        let (start, blocks) = self.range(WRITE_BLOCKS);
        self.check(start, blocks)
    }

    fn check(&mut self, start: usize, blocks: u32) -> Result<(), Failure> {
        let found = self.disk.read(start as u64, blocks)?;
        for (place, bytes) in (start..).zip(found.chunks(512)) {
            let Block::Filled(word) = self.blocks[place] else {
                continue;
            };
            let wrong = bytes.chunks(8).find(|chunk| **chunk != word.to_le_bytes());
            if let Some(wrong) = wrong {
                return Err(Failure::from(format!(
                    "Block {place} of the lease holds {wrong:02x?}, and was filled with {:02x?}",
                    word.to_le_bytes()
                )));
            }
        }
        Ok(())
    }

    fn deallocate(&mut self) -> Result<(), Failure> {
        let ranges: Vec<_> = (0..1 + self.rng.below(16))
            .map(|_| self.range(RANGE_BLOCKS))
            .collect();
        let described: Vec<_> = ranges.iter().map(|(s, n)| (*s as u64, *n)).collect();
        self.disk.deallocate(&described)?;
        for (start, blocks) in ranges {
            self.blocks[start..start + blocks as usize].fill(Block::Any);
        }
        Ok(())
    }

    fn write_zeroes(&mut self) -> Result<(), Failure> {
        let (start, blocks) = self.range(RANGE_BLOCKS);
        let deallocate = self.rng.below(2) == 0;
        self.disk.write_zeroes(start as u64, blocks, deallocate)?;
        self.blocks[start..start + blocks as usize].fill(Block::Filled(0));
        Ok(())
    }

    /// Maps memory, writes from it at once, and unmaps it.
    fn plug_and_write(&mut self) -> Result<(), Failure> {
        self.bar.dma_map(&self.memory, &self.plugged)?;
        let (start, _) = self.range(WRITE_BLOCKS);
        self.writes += 1;
        let data = self.memory.alloc_at(PLUGGED_REGION.0, 4096)?;
        data.write(0, &self.writes.to_le_bytes().repeat(512));
        let prepared = nvme_mpt_tests::prp::buffer(&data, 0, 4096)?;
        let write = nvme_mpt_tests::command::Sqe::write(self.disk.nsid(), start as u64, 8);
        self.disk.command(write.with_data(prepared.pointer))?;
        self.blocks[start..start + 8].fill(Block::Filled(self.writes));
        drop(data);
        self.bar.dma_unmap(&self.plugged)?;
        Ok(())
    }
}

//! SPDK's target with its block devices, and SPDK's client.

use std::fs;
use std::io::Write;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use integration::checks::{Failure, with_path};
use integration::process::{self, SupervisedChild};
use serde_json::{Value, json};

use super::rows::{Device, Drive, Load};
use super::{CLIENT, DRIVE, Files, SERVER, signal};

/// Huge pages of the target and of the client in MiB.
const TARGET_MIB: u64 = 768;
const CLIENT_MIB: u64 = 256;
/// Number of 2 MiB huge pages that both need.
const HUGE_PAGES: u64 = (TARGET_MIB + CLIENT_MIB) / 2;
const BLOCK: u64 = 512;
/// Prefix of subsystem names.
const NQN: &str = "nqn.2024-01.io.peer";
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// The target process, and the path of the client program.
pub(crate) struct Spdk {
    target: SupervisedChild,
    client: PathBuf,
    dir: PathBuf,
}

impl Spdk {
    /// Starts the target from a build, with a subsystem for each device.
    pub(crate) fn start(
        build: &Path,
        dir: &Path,
        devices: impl Iterator<Item = Device>,
        files: &Files,
    ) -> Result<Self, Failure> {
        expect_huge_pages()?;
        let program = |name: &str| {
            let path = build.join("build/bin").join(name);
            match path.is_file() {
                true => Ok(path),
                false => Err(Failure::from(format!(
                    "SPDK={}: there is no {}. Build it there, with --with-vfio-user.",
                    build.display(),
                    path.display()
                ))),
            }
        };
        let (target, client) = (program("nvmf_tgt")?, program("spdk_nvme_perf")?);
        let dir = dir.join("spdk");
        fs::create_dir(&dir).map_err(with_path(&dir))?;
        let socket = dir.join("rpc");
        let mut command = Command::new(&target);
        command
            .args(["-m", &format!("{:#x}", 1 << SERVER)])
            .args(["-s", &TARGET_MIB.to_string(), "-r"])
            .arg(&socket);
        let target = SupervisedChild::spawn("nvmf_tgt", &command, &dir.join("log"))?;
        let mut spdk = Self {
            target,
            client,
            dir,
        };
        spdk.await_socket(&socket)?;
        let call = |method: &str, parameters: Value| call(&socket, method, parameters);
        call("nvmf_create_transport", json!({"trtype": "VFIOUSER"}))?;
        for device in devices {
            let (name, dir) = (device.name(), spdk.dir_of(device));
            if dir.exists() {
                continue;
            }
            create(device, files, call)?;
            fs::create_dir(&dir).map_err(with_path(&dir))?;
            let nqn = nqn(device);
            call(
                "nvmf_create_subsystem",
                json!({"nqn": nqn, "allow_any_host": true, "serial_number": name}),
            )?;
            call(
                "nvmf_subsystem_add_ns",
                json!({"nqn": nqn, "namespace": {"bdev_name": name}}),
            )?;
            let address = json!({"trtype": "VFIOUSER", "traddr": dir, "trsvcid": "0"});
            call(
                "nvmf_subsystem_add_listener",
                json!({"nqn": nqn, "listen_address": address}),
            )?;
        }
        Ok(spdk)
    }

    /// Waits until the target answers requests.
    fn await_socket(&mut self, socket: &Path) -> Result<(), Failure> {
        let deadline = Instant::now() + START_TIMEOUT;
        while UnixStream::connect(socket).is_err() {
            if self.target.try_wait()?.is_some() || Instant::now() >= deadline {
                let log = process::file_tail(self.target.log());
                return Err(format!("SPDK's target did not start:\n{log}").into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Returns the directory by which the client finds a device.
    pub(crate) fn dir_of(&self, device: Device) -> PathBuf {
        self.dir.join(device.name())
    }

    /// Measures a load on the controller in `dir`: on a device of the target, or on this project's function. Returns the
    /// commands per second.
    pub(crate) fn load(
        &self,
        dir: &Path,
        device: Option<Device>,
        load: Load,
        seconds: u32,
    ) -> Result<f64, Failure> {
        // Without a name, the client takes any controller for a discovery controller without namespaces. This project's
        // controller has no such name.
        let nqn = device.map_or_else(|| format!("{NQN}:ours"), nqn);
        let transport = format!("trtype:VFIOUSER traddr:{} subnqn:{nqn}", dir.display());
        let text = process::run(
            Command::new(&self.client)
                .args(["-r", &transport])
                .args(["-q", &load.depth.to_string()])
                .args(["-o", &load.size.to_string()])
                .args([
                    "-w",
                    if load.is_write {
                        "randwrite"
                    } else {
                        "randread"
                    },
                ])
                .args(["-t", &seconds.to_string()])
                .args(["-c", &format!("{:#x}", 1 << CLIENT)])
                // Memory in a single file, because the client passes one descriptor per region.
                .args(["-s", &CLIENT_MIB.to_string(), "-g"]),
        )?;
        let total = text.lines().find(|line| line.starts_with("Total"));
        let values = total.and_then(|line| line.split_once(':'));
        let figure = values.and_then(|(_, values)| values.split_whitespace().next()?.parse().ok());
        figure.ok_or_else(|| format!("SPDK's client printed no total:\n{text}").into())
    }

    pub(crate) fn pause(&self) -> Result<(), Failure> {
        signal("-STOP", self.target.pid())
    }

    pub(crate) fn resume(&self) -> Result<(), Failure> {
        signal("-CONT", self.target.pid())
    }
}

fn is_device(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_block_device())
}

fn nqn(device: Device) -> String {
    format!("{NQN}:{}", device.name())
}

fn create(
    device: Device,
    files: &Files,
    call: impl Fn(&str, Value) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let name = device.name();
    let blocks = DRIVE / BLOCK;
    let in_memory = json!({"name": name, "num_blocks": blocks, "block_size": BLOCK});
    // The target detects the block size of a block device.
    let on = |path: &Path| match is_device(path) {
        true => json!({"name": name, "filename": path}),
        false => json!({"name": name, "filename": path, "block_size": BLOCK}),
    };
    match device {
        Device::Null => call("bdev_null_create", in_memory),
        Device::Malloc => call("bdev_malloc_create", in_memory),
        Device::AioOnTmpfs => call("bdev_aio_create", on(&files.pair_of(Drive::Tmpfs)?.peer)),
        Device::AioOnDisk => call("bdev_aio_create", on(&files.pair_of(Drive::Disk)?.peer)),
        Device::UringOnDisk => call("bdev_uring_create", on(&files.pair_of(Drive::Disk)?.peer)),
    }
}

/// Sends a JSON-RPC 2.0 request.
fn call(socket: &Path, method: &str, parameters: Value) -> Result<(), Failure> {
    let mut stream = UnixStream::connect(socket).map_err(with_path(socket))?;
    let request = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": parameters});
    stream
        .write_all(request.to_string().as_bytes())
        .map_err(with_path(socket))?;
    let mut answers = serde_json::Deserializer::from_reader(&stream).into_iter::<Value>();
    let answer = answers.next().ok_or("SPDK's target did not answer")??;
    match answer.get("error") {
        Some(error) => Err(format!("SPDK's target refused {request}: {error}").into()),
        None => Ok(()),
    }
}

fn expect_huge_pages() -> Result<(), Failure> {
    let path = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
    let free = fs::read_to_string(path).map_err(with_path(path))?;
    if free.trim().parse::<u64>().unwrap_or(0) < HUGE_PAGES {
        return Err(format!(
            "SPDK needs {HUGE_PAGES} free huge pages of 2 MiB, and there are {}. Run: echo {HUGE_PAGES} > /proc/sys/vm/nr_hugepages",
            free.trim()
        )
        .into());
    }
    let mounts = fs::read_to_string("/proc/mounts").map_err(with_path("/proc/mounts"))?;
    if !mounts.contains(" hugetlbfs ") {
        return Err(
            "SPDK needs a mounted hugetlbfs, and there is none. Run: mount -t hugetlbfs none /dev/hugepages".into(),
        );
    }
    Ok(())
}

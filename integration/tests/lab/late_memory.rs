//! Guests of patched Cloud Hypervisor whose memory arrives late: restored on demand, or received by post-copy, while fio writes
//! and verifies. All data must be right, or the function must be refused with the reason.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use integration::process::{SupervisedChild, file_tail};
use integration::progress::print_line;
use integration::provision::{GuestAssets, KernelChoice};
use integration::server::Server;
use integration::vmms::cloud_hypervisor::{self, request};
use serde_json::{Value, json};

use crate::fixture::{CheckEnvironment, Failure, await_that, expect, sh, with_path};
use crate::init;
use crate::vmm::{console_output, root, spawn_cloud_hypervisor};
use crate::vmms::is_patched_cloud_hypervisor_named;

/// Passes of the guest's load before and after the restore.
const PASSES: usize = 2;
/// Part of the message that refuses incomplete memory.
const REFUSAL: &str = "restored on demand";
/// Address at which the receiving VMM listens, on this host.
const RECEIVER: &str = "127.0.0.1:7001";

/// Returns an endless load. Each pass prints whether its data was verified, and the number of kernel errors so far.
fn load() -> String {
    init::script(
        "pass=0
while :; do
    pass=$((pass + 1))
    if fio --name=verify --filename=/data --size=8m --rw=randwrite --bs=4k --iodepth=8 --ioengine=libaio \
           --direct=1 --verify=crc32c --verify_fatal=1 --eta=never --output=/tmp/fio; then
        echo guest: verified $pass, errors $(dmesg | grep -cE 'nvme.*(timeout|reset)|I/O error|EXT4-fs (error|warning)')
    else
        echo guest: wrong $pass
        cat /tmp/fio
    fi
done
",
    )
}

/// A guest under load. It is dropped before the server of its drive.
struct LoadedGuest {
    vmm: SupervisedChild,
    console: PathBuf,
    image: PathBuf,
    server: Option<Server>,
}

impl LoadedGuest {
    /// Boots a guest, whose drive belongs to the VMM or to a server.
    fn start(bench: &CheckEnvironment, is_served: bool) -> Result<Self, Failure> {
        let assets = GuestAssets::provide(&KernelChoice::V6_12)?;
        let image = root(bench, &assets, &load())?;
        let server = match is_served {
            true => Some(bench.hold(&[format!("path={}", image.display())])?),
            false => None,
        };
        let (vmm, console) = spawn_cloud_hypervisor(bench, &assets, &image, "", "doorbells=auto")?;
        Ok(Self {
            vmm,
            console,
            image,
            server,
        })
    }

    /// Saves the guest into a directory, and ends its VMM.
    fn save(&mut self, bench: &CheckEnvironment) -> Result<String, Failure> {
        await_passes(&self.console, &mut self.vmm)?;
        let snapshot = bench.dir().join("snapshot");
        fs::create_dir(&snapshot).map_err(with_path(&snapshot))?;
        let url = format!("file://{}", snapshot.display());
        request(bench.dir(), "vm.pause", &Value::Null)?;
        request(bench.dir(), "vm.snapshot", &json!({"destination_url": url}))?;
        self.vmm.kill();
        self.forget()?;
        Ok(url)
    }

    /// Empties the console log.
    fn forget(&self) -> Result<(), Failure> {
        fs::write(&self.console, "").map_err(with_path(&self.console))
    }

    /// Restores and resumes the guest.
    fn restore(&mut self, bench: &CheckEnvironment, url: &str, mode: &str) -> Result<(), Failure> {
        let restore = format!("source_url={url},memory_restore_mode={mode},resume=true");
        self.vmm = cloud_hypervisor::spawn(bench.dir(), ["--restore", &restore])?;
        Ok(())
    }

    /// Ends the guest, and removes its files, which occupy memory.
    fn end(mut self, bench: &CheckEnvironment) -> Result<(), Failure> {
        self.vmm.kill();
        if let Some(server) = &mut self.server {
            server.stop()?;
        }
        sh(&format!(
            "rm -rf {} {}",
            self.image.display(),
            bench.dir().join("snapshot").display()
        ))?;
        Ok(())
    }
}

/// Waits for passes of the load. None may have found an error.
fn await_passes(console: &Path, vmm: &mut SupervisedChild) -> Result<(), Failure> {
    let pid = vmm.pid();
    await_that(&format!("passes of fio in process {pid}"), || {
        let output = console_output(console).unwrap_or_default();
        if let Some(status) = vmm.try_wait()? {
            let log = file_tail(vmm.log());
            return Err(format!("The VMM ended with {status}:\n{log}\n{output}").into());
        }
        // The last line may be incomplete.
        let errors = output.lines().filter_map(|line| {
            let (_, pass) = line.split_once("guest: verified ")?;
            let (_, errors) = pass.split_once(", errors ")?;
            // A kernel message may follow the number.
            let errors = errors.split(|c: char| !c.is_ascii_digit()).next();
            errors.filter(|errors| !errors.is_empty())
        });
        let errors: Vec<&str> = errors.collect();
        let is_right = !output.contains("guest: wrong") && errors.iter().all(|count| *count == "0");
        expect(is_right, || output.clone())?;
        Ok(errors.len() >= PASSES)
    })
}

/// If the VMM has the drive, its function restores pages on access.
pub(crate) fn restores_on_demand(bench: &CheckEnvironment) -> Result<(), Failure> {
    if !is_patched_cloud_hypervisor_named()? {
        return Ok(());
    }
    let mut guest = LoadedGuest::start(bench, false)?;
    let url = guest.save(bench)?;
    guest.restore(bench, &url, "ondemand")?;
    await_passes(&guest.console, &mut guest.vmm)?;
    guest.end(bench)
}

/// If a server has the drive, it maps the memory's file: a restore on demand is refused, and a restore by copy works.
pub(crate) fn restores_by_a_server(bench: &CheckEnvironment) -> Result<(), Failure> {
    if !is_patched_cloud_hypervisor_named()? {
        return Ok(());
    }
    let mut guest = LoadedGuest::start(bench, true)?;
    let url = guest.save(bench)?;
    guest.restore(bench, &url, "ondemand")?;
    await_that("the end of a restore that is refused", || {
        let log = file_tail(guest.vmm.log());
        Ok(log.contains(REFUSAL) || guest.vmm.try_wait()?.is_some())
    })?;
    let log = file_tail(guest.vmm.log());
    expect(log.contains(REFUSAL), || {
        format!("It is refused for another reason, or not at all:\n{log}")
    })?;
    guest.vmm.kill();
    guest.restore(bench, &url, "copy")?;
    await_passes(&guest.console, &mut guest.vmm)?;
    guest.end(bench)
}

/// The guest migrates to another process on this host, and its memory follows.
pub(crate) fn migrates_by_post_copy(bench: &CheckEnvironment) -> Result<(), Failure> {
    if !is_patched_cloud_hypervisor_named()? {
        return Ok(());
    }
    sh("ip link set lo up")?;
    let mut guest = LoadedGuest::start(bench, false)?;
    await_passes(&guest.console, &mut guest.vmm)?;
    let dir = bench.dir().join("receiver");
    fs::create_dir(&dir).map_err(with_path(&dir))?;
    let no_arguments: [&str; 0] = [];
    let mut receiver = cloud_hypervisor::spawn(&dir, no_arguments)?;
    await_that("the receiver", || Ok(dir.join("api").exists()))?;
    let receives = {
        let dir = dir.clone();
        let migration =
            json!({"receiver_url": format!("tcp:{RECEIVER}"), "memory_mode": "Postcopy"});
        thread::spawn(move || request(&dir, "vm.receive-migration", &migration))
    };
    let sent = json!({"destination_url": format!("tcp:{RECEIVER}"), "memory_mode": "Postcopy"});
    await_that("the receiver's socket", || {
        Ok(sh("grep -qi ':1B59 .* 0A ' /proc/net/tcp").is_ok())
    })?;
    guest.forget()?;
    let sent = request(bench.dir(), "vm.send-migration", &sent);
    let received = receives
        .join()
        .map_err(|_| "The receiver's thread failed")?;
    if let Err(error) = sent.and(received) {
        let log = file_tail(guest.vmm.log()) + &file_tail(receiver.log());
        expect(log.contains(REFUSAL), || {
            format!("It is refused for another reason: {error}\n{log}")
        })?;
        print_line("        refused: the memory is restored on demand");
        return guest.end(bench);
    }
    // The sender remains, without a guest.
    await_passes(&guest.console, &mut receiver)?;
    receiver.kill();
    guest.end(bench)
}

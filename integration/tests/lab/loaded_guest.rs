//! A guest of patched Cloud Hypervisor under load: fio writes and verifies on the guest's root, without end. The guest outlives
//! its VMM in a snapshot or by a migration.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use integration::process::{SupervisedChild, file_tail};
use integration::provision::{GuestAssets, KernelChoice};
use integration::server::Server;
use integration::vmms::cloud_hypervisor::{self, request};
use serde_json::{Value, json};

use crate::fixture::{CheckEnvironment, Failure, await_that, expect, sh, with_path};
use crate::init;
use crate::vmm::{console_output, root, spawn_cloud_hypervisor};

/// Passes of the guest's load for which a check waits.
const PASSES: usize = 2;
/// Directory of a receiving VMM, in the check's.
const RECEIVER_DIR: &str = "receiver";
/// Address at which a receiving VMM listens, on this host.
const RECEIVER: &str = "127.0.0.1:7001";
/// Entry of that address in `/proc/net/tcp`, if a socket listens.
const LISTENS: &str = ":1B59 .* 0A ";

/// Returns an endless load. Each pass prints whether its data was verified, and the number of kernel errors so far. A second
/// loop verifies each function that is plugged in, and prints when it came and when it went.
fn load() -> String {
    init::script(
        "(
count=0
while :; do
    until [ -b /dev/nvme1n1 ]; do sleep 0.1; done
    count=$((count + 1))
    fio --name=plugged --filename=/dev/nvme1n1 --size=256k --rw=randwrite --bs=4k --iodepth=8 --ioengine=libaio \
        --direct=1 --verify=crc32c --verify_fatal=1 --eta=never --output=/tmp/plugged && echo guest: plugged $count.
    while [ -e /sys/class/nvme/nvme1 ]; do sleep 0.1; done
    echo guest: unplugged $count.
done
) &
pass=0
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

/// Ways to migrate a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Migration {
    /// Over a Unix socket, with the memory itself.
    Local,
    /// Over TCP, the memory before the guest stops.
    PreCopy,
    /// Over TCP, the memory after the guest has gone on.
    PostCopy,
}

/// A guest under load. It is dropped before the server of its drive.
pub(crate) struct LoadedGuest {
    pub(crate) vmm: SupervisedChild,
    pub(crate) console: PathBuf,
    image: PathBuf,
    server: Option<Server>,
}

impl LoadedGuest {
    /// Boots a guest, whose drive belongs to the VMM or to a server. `arguments` are further ones of the VMM.
    pub(crate) fn start(
        bench: &CheckEnvironment,
        is_served: bool,
        arguments: &[&str],
    ) -> Result<Self, Failure> {
        let assets = GuestAssets::provide(&KernelChoice::V6_12)?;
        let image = root(bench, &assets, &load())?;
        let server = match is_served {
            true => Some(bench.hold(&[format!("path={}", image.display())])?),
            false => None,
        };
        let (vmm, console) =
            spawn_cloud_hypervisor(bench, &assets, &image, "", "doorbells=auto", arguments)?;
        Ok(Self {
            vmm,
            console,
            image,
            server,
        })
    }

    /// Saves the guest into a directory, and ends its VMM.
    pub(crate) fn save(&mut self, bench: &CheckEnvironment) -> Result<String, Failure> {
        self.await_passes()?;
        let snapshot = bench.dir().join("snapshot");
        fs::create_dir(&snapshot).map_err(with_path(&snapshot))?;
        let url = format!("file://{}", snapshot.display());
        request(bench.dir(), "vm.pause", &Value::Null)?;
        request(bench.dir(), "vm.snapshot", &json!({"destination_url": url}))?;
        self.vmm.kill();
        self.forget()?;
        Ok(url)
    }

    /// Removes the files of [`Self::save`].
    pub(crate) fn remove_snapshot(&self, bench: &CheckEnvironment) -> Result<(), Failure> {
        let snapshot = bench.dir().join("snapshot");
        fs::remove_dir_all(&snapshot).map_err(with_path(&snapshot))
    }

    /// Empties the console log.
    pub(crate) fn forget(&self) -> Result<(), Failure> {
        fs::write(&self.console, "").map_err(with_path(&self.console))
    }

    /// Restores and resumes the guest. `arguments` are further ones of the VMM.
    pub(crate) fn restore(
        &mut self,
        bench: &CheckEnvironment,
        url: &str,
        mode: &str,
        arguments: &[&str],
    ) -> Result<(), Failure> {
        let restore = format!("source_url={url},memory_restore_mode={mode},resume=true");
        let arguments = [&["--restore", &restore], arguments].concat();
        self.vmm = cloud_hypervisor::spawn(bench.dir(), arguments)?;
        Ok(())
    }

    /// Migrates the guest to another process on this host, which gets the directory `receiver` of the check and `arguments`.
    /// Returns the sender, which has no guest any more.
    ///
    /// # Errors
    /// The sender or the receiver refuses the migration.
    pub(crate) fn migrate(
        &mut self,
        bench: &CheckEnvironment,
        how: Migration,
        arguments: &[&str],
    ) -> Result<SupervisedChild, Failure> {
        let dir = bench.dir().join(RECEIVER_DIR);
        fs::create_dir_all(&dir).map_err(with_path(&dir))?;
        let mut receiver = cloud_hypervisor::spawn(&dir, arguments)?;
        await_that("the receiver", || Ok(dir.join("api").exists()))?;
        let url = match how {
            Migration::Local => format!("unix:{}", dir.join("migration").display()),
            Migration::PreCopy | Migration::PostCopy => format!("tcp:{RECEIVER}"),
        };
        let mode = match how {
            Migration::PostCopy => "Postcopy",
            Migration::Local | Migration::PreCopy => "Precopy",
        };
        let receives = {
            let (dir, migration) = (
                dir.clone(),
                json!({"receiver_url": url, "memory_mode": mode}),
            );
            thread::spawn(move || request(&dir, "vm.receive-migration", &migration))
        };
        await_that("the receiver's socket", || match how {
            Migration::Local => Ok(dir.join("migration").exists()),
            Migration::PreCopy | Migration::PostCopy => {
                Ok(sh(&format!("grep -qi '{LISTENS}' /proc/net/tcp")).is_ok())
            }
        })?;
        self.forget()?;
        let is_local = matches!(how, Migration::Local);
        let migration = json!({"destination_url": url, "memory_mode": mode, "local": is_local});
        let sent = request(bench.dir(), "vm.send-migration", &migration);
        let received = receives
            .join()
            .map_err(|_| "The receiver's thread failed")?;
        if let Err(error) = sent.and(received) {
            let log = file_tail(self.vmm.log()) + &file_tail(receiver.log());
            receiver.kill();
            return Err(format!("{error}\n{log}").into());
        }
        Ok(std::mem::replace(&mut self.vmm, receiver))
    }

    /// Waits for passes of the load. None may have found an error.
    pub(crate) fn await_passes(&mut self) -> Result<(), Failure> {
        await_passes(&self.console, &mut self.vmm)
    }

    /// Waits until the guest has printed a text.
    pub(crate) fn await_line(&mut self, line: &str) -> Result<(), Failure> {
        await_that(line, || {
            let output = console_output(&self.console)?;
            if let Some(status) = self.vmm.try_wait()? {
                let log = file_tail(self.vmm.log());
                return Err(format!("The VMM ended with {status}:\n{log}\n{output}").into());
            }
            Ok(output.contains(line))
        })
    }

    /// Ends the guest, and removes its files, which occupy memory.
    pub(crate) fn end(mut self, bench: &CheckEnvironment) -> Result<(), Failure> {
        self.vmm.kill();
        if let Some(server) = &mut self.server {
            server.stop()?;
        }
        sh(&format!(
            "rm -rf {} {} {}",
            self.image.display(),
            bench.dir().join("snapshot").display(),
            bench.dir().join(RECEIVER_DIR).display(),
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

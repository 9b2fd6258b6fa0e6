//! Guests of the reference VMM that go on in another process.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use integration::lab::inside;
use integration::process::{Supervised, file_tail};
use integration::provision::{Assets, KernelChoice};

use crate::fixture::{Bench, Fault, PATIENCE, await_that, expect};
use crate::vmm::root;
use crate::{Group, Refused};

pub(crate) const GROUP: Group = Group::Inside {
    name: "comings",
    drives: Vec::new,
    refused: Refused::Nothing,
    checks: &[(
        "verify_goes_on_in_other_processes",
        verify_goes_on_in_other_processes,
    )],
};

/// How often a guest is moved.
const MOVES: usize = 20;

/// What guests begin with.
const PROLOGUE: &str = r"#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/sbin:/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tmpfs tmpfs /tmp
";

/// Writes and reads back with checksums, round after round.
const VERIFY: &str = r"
n=0
while true; do
    echo guest: begins $n.
    fio --name=verify --filename=/data --size=2m --rw=randwrite --bs=4k --iodepth=32 \
        --ioengine=libaio --direct=1 --verify=crc32c --verify_fatal=1 --randseed=$n --eta=never \
        --output=/tmp/fio || { cat /tmp/fio; echo guest: lost $n.; break; }
    echo guest: verified $n.
    n=$((n + 1))
done
";

/// A machine that is asked by its control socket.
struct Asked {
    vmm: Supervised,
    control: PathBuf,
}

impl Asked {
    /// With `arguments` besides what all have.
    fn start(bench: &Bench, log: &str, arguments: &[&str]) -> Result<Self, Fault> {
        let control = bench.folder().join("control");
        let mut command = Command::new(inside::brought("reference-vmm"));
        command.arg("--control").arg(&control);
        command.arg("--state-dir").arg(bench.folder());
        command.args(arguments);
        let vmm = Supervised::spawn("reference-vmm", &command, &bench.folder().join(log))?;
        Ok(Self { vmm, control })
    }

    /// What it says to a request; an error is one.
    fn ask(&self, request: &str) -> Result<String, Fault> {
        let file = |source| Fault::File {
            path: self.control.clone(),
            source,
        };
        let mut stream = UnixStream::connect(&self.control).map_err(file)?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(file)?;
        writeln!(stream, "{request}").map_err(file)?;
        let mut answer = String::new();
        BufReader::new(stream)
            .read_line(&mut answer)
            .map_err(file)?;
        match answer.trim_end().strip_prefix("ok") {
            Some(rest) => Ok(rest.trim().to_owned()),
            None => Err(Fault::Wrong(format!("{request}: {answer}"))),
        }
    }

    /// Waits until the guest has said a line.
    fn said(&mut self, wanted: &str) -> Result<(), Fault> {
        await_that(wanted, || {
            let said = said(self.vmm.log())?;
            if said.contains(wanted) {
                return Ok(true);
            }
            let ended = self.vmm.ended()?;
            expect(ended.is_none() && !said.contains("guest: lost"), || {
                format!("In vain for {wanted:?}:\n{}", file_tail(self.vmm.log()))
            })?;
            Ok(false)
        })
    }

    /// Ends it, as a power cut would.
    fn stop(mut self) -> Result<String, Fault> {
        self.vmm.kill();
        said(self.vmm.log())
    }

    /// Waits until it has ended well.
    fn ends(mut self) -> Result<String, Fault> {
        let status = self.vmm.wait(PATIENCE)?;
        expect(status.success(), || {
            format!("It ended with {status}:\n{}", file_tail(self.vmm.log()))
        })?;
        said(self.vmm.log())
    }
}

fn said(log: &Path) -> Result<String, Fault> {
    let said = fs::read(log).map_err(|source| Fault::File {
        path: log.to_owned(),
        source,
    })?;
    Ok(String::from_utf8_lossy(&said).into_owned())
}

/// A guest that verifies is written to a folder, its process ends, and another process has it go on.
fn verify_goes_on_in_other_processes(bench: &Bench) -> Result<(), Fault> {
    let assets = Assets::provide(&KernelChoice::V6_1)?;
    let image = root(bench, &assets, &format!("{PROLOGUE}{VERIFY}"))?;
    let function = format!("path={}", image.display());
    let kernel = assets.kernel.image.display().to_string();
    let start = [
        "--kernel",
        &kernel,
        "--cpus",
        "2",
        "--memory",
        "256",
        "--cmdline",
        "console=ttyS0 quiet root=/dev/nvme0n1 rw init=/check panic=-1",
        "--nvme-mpt",
        &function,
    ];
    let mut machine = Asked::start(bench, "console-0", &start)?;
    let folder = bench.folder().join("snapshot");
    let path = folder.display().to_string();
    machine.said("guest: begins")?;
    let mut said = String::new();
    for moved in 0..MOVES {
        // Somewhere in a round: while fio starts, writes, or reads back.
        std::thread::sleep(Duration::from_millis(170 * (moved as u64 * 7 % 20)));
        machine.ask(&format!("snapshot {path}"))?;
        said += &machine.ends()?;
        let log = format!("console-{}", moved + 1);
        let restore = ["--restore", &path, "--nvme-mpt", &function];
        machine = Asked::start(bench, &log, &restore)?;
        // What was moved is read back before it moves again.
        machine.said("guest: verified")?;
    }
    said += &machine.stop()?;
    let verified: Vec<&str> = said
        .lines()
        .filter_map(|line| line.strip_prefix("guest: verified "))
        .collect();
    let rounds = (0..verified.len()).map(|round| format!("{round}."));
    expect(
        verified.len() >= MOVES && rounds.eq(verified.iter().copied()),
        || format!("The guest verified these rounds in {MOVES} moves: {verified:?}"),
    )?;
    fs::remove_dir_all(&folder).map_err(|source| Fault::File {
        path: folder.clone(),
        source,
    })
}

//! Drives that move between the host's own driver and VFIO, by `nvme-mpt bind`, `unbind` and `drives`. The commands name
//! obstacles.

use std::fs;
use std::process::{Child, Command, Stdio};

use integration::lab::{LabDrive, inside};
use integration::server::{FunctionArgument, Server};
use serde_json::Value;

use crate::fixture::{CheckEnvironment, Failure, await_that, expect, sh, with_path};
use crate::{ExpectedRefusals, Group};

pub(crate) const GROUP: Group = Group::Inside {
    name: "bind",
    drives: || {
        vec![
            LabDrive::new("a", 64 << 20),
            LabDrive::new("b", 32 << 20)
                .lba_size(4096)
                .namespaces(2)
                .max_ioqpairs(4),
        ]
    },
    refused: ExpectedRefusals::None,
    checks: &[
        ("there_and_back_keeps_the_data", bind_and_unbind),
        ("every_way_to_name_a_drive", every_name),
        ("what_is_mounted_stays", mounted),
        ("what_is_mounted_elsewhere_stays", mounted_elsewhere),
        ("swap_stays", swap),
        ("what_is_open_takes_force", open),
        ("a_bound_drive_tells_how_to_be_served", listed),
        ("a_served_drive_is_listed_and_kept", serve_bound_drive),
        ("a_drive_is_reusable_after_a_crash", crashed),
        ("what_keeps_a_drive_from_being_served", unservable),
        ("others_are_no_drives", others),
    ],
};

/// Runs `nvme-mpt`. Returns its output on success, and its error otherwise.
fn nvme_mpt(arguments: &str) -> Result<Result<String, String>, Failure> {
    let program = inside::copied_path("nvme-mpt");
    let output = Command::new(&program)
        .args(arguments.split_whitespace())
        .output()
        .map_err(with_path(program))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
    Ok(if output.status.success() {
        Ok(text(&output.stdout))
    } else {
        Err(text(&output.stderr))
    })
}

fn expect_ok(arguments: &str, wanted: &str) -> Result<(), Failure> {
    let output = nvme_mpt(arguments)?;
    expect(output.as_deref() == Ok(wanted), || {
        format!("nvme-mpt {arguments}: {output:?} instead of {wanted:?}")
    })
}

/// Checks that a command is refused by a message that contains all `words`.
fn expect_refusal(arguments: &str, words: &[&str]) -> Result<(), Failure> {
    let output = nvme_mpt(arguments)?;
    let is_refusal = output
        .as_ref()
        .is_err_and(|text| words.iter().all(|word| text.contains(word)));
    expect(is_refusal, || {
        format!("nvme-mpt {arguments}: {output:?} instead of a refusal with {words:?}")
    })
}

/// A drive with the `nvme` driver, whose first block device exists.
struct HostDrive {
    address: String,
    disk: String,
}

impl HostDrive {
    fn ready(id: &str) -> Result<Self, Failure> {
        let address = inside::address(id)?;
        nvme_mpt(&format!("unbind {address}"))?.map_err(Failure::from)?;
        await_that("the disk", || Ok(inside::block_device(id, 1).is_ok()))?;
        let disk = inside::block_device(id, 1)?.display().to_string();
        Ok(Self { address, disk })
    }

    fn bind(&self) -> String {
        format!("bind {}", self.address)
    }

    fn driver(&self) -> Result<String, Failure> {
        let link = format!("/sys/bus/pci/devices/{}/driver", self.address);
        Ok(sh(&format!("basename $(readlink {link})"))?
            .trim()
            .to_owned())
    }

    /// Checks that the drive is still bound to the host's driver, and works.
    fn expect_untouched(&self) -> Result<(), Failure> {
        let driver = self.driver()?;
        expect(driver == "nvme", || {
            format!("{} has {driver}", self.address)
        })?;
        sh(&format!(
            "dd if={} of=/dev/null bs=4k count=1 iflag=direct",
            self.disk
        ))?;
        Ok(())
    }

    /// Returns the drive's entry in `nvme-mpt drives --json`.
    fn list_entry(&self, more: &str) -> Result<Value, Failure> {
        let text = nvme_mpt(&format!("drives --json {more}"))?.map_err(Failure::from)?;
        let wrong = |why: String| Failure::from(format!("{why}: {text}"));
        let drives: Value =
            serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        let mut drives = drives.as_array().into_iter().flatten();
        drives
            .find(|drive| drive["address"] == *self.address)
            .cloned()
            .ok_or_else(|| wrong(format!("No {}", self.address)))
    }
}

fn expect_is(found: &Value, wanted: Value) -> Result<(), Failure> {
    expect(*found == wanted, || format!("{found} instead of {wanted}"))
}

fn bind_and_unbind(_: &CheckEnvironment) -> Result<(), Failure> {
    let a = HostDrive::ready("a")?;
    sh(&format!(
        "echo still here | dd of={} bs=512 seek=7 conv=sync oflag=direct",
        a.disk
    ))?;
    let address = &a.address;
    expect_ok(
        &a.bind(),
        &format!("{address} is now bound to vfio-pci (before: nvme)"),
    )?;
    expect(a.driver()? == "vfio-pci", || {
        "Said, but not done".to_owned()
    })?;
    expect_ok(
        &a.bind(),
        &format!("{address} is bound to vfio-pci already"),
    )?;
    sh("ls /dev/vfio | grep -q '[0-9]'")?;
    expect_ok(
        &format!("unbind {address}"),
        &format!("{address} is now bound to nvme (before: vfio-pci)"),
    )?;
    expect_ok(
        &format!("unbind {address}"),
        &format!("{address} is bound to nvme already"),
    )?;
    // No override prevents binding another driver.
    let left = fs::read_to_string(format!("/sys/bus/pci/devices/{address}/driver_override"));
    expect(
        left.as_ref().is_ok_and(|name| name.trim() == "(null)"),
        || format!("driver_override: {left:?}"),
    )?;
    let a = HostDrive::ready("a")?;
    sh(&format!(
        "dd if={} bs=512 skip=7 count=1 iflag=direct | grep -q 'still here'",
        a.disk
    ))?;
    Ok(())
}

fn every_name(_: &CheckEnvironment) -> Result<(), Failure> {
    let a = HostDrive::ready("a")?;
    let short = a.address.trim_start_matches("0000:");
    for name in [short, &format!("/sys/bus/pci/devices/{}", a.address)] {
        expect_ok(
            &format!("bind {name}"),
            &format!("{} is now bound to vfio-pci (before: nvme)", a.address),
        )?;
        HostDrive::ready("a")?;
    }
    Ok(())
}

fn mounted(_: &CheckEnvironment) -> Result<(), Failure> {
    let a = HostDrive::ready("a")?;
    let disk = &a.disk;
    sh(&format!(
        "mkfs.ext4 -q -F {disk} && mkdir -p '/mnt/a b' && mount {disk} '/mnt/a b'"
    ))?;
    let name = disk.trim_start_matches("/dev/");
    let wanted = format!("{name} is mounted on /mnt/a b");
    for force in ["", " --force"] {
        expect_refusal(
            &format!("{}{force}", a.bind()),
            &[&wanted, "end that first"],
        )?;
    }
    let listed = a.list_entry("")?;
    expect(listed["in_the_way"][0] == wanted, || listed.to_string())?;
    sh("umount '/mnt/a b'")?;
    a.expect_untouched()
}

fn mounted_elsewhere(_: &CheckEnvironment) -> Result<(), Failure> {
    let a = HostDrive::ready("a")?;
    let script = format!(
        "mkfs.ext4 -q -F {} && mount {} /mnt && touch /tmp/mounted && exec sleep 1000",
        a.disk, a.disk
    );
    let mut holder = Process(
        Command::new("unshare")
            .args(["-m", "sh", "-c", &script])
            .spawn()
            .map_err(with_path("unshare"))?,
    );
    await_that("the mount", || {
        Ok(fs::exists("/tmp/mounted").unwrap_or(false))
    })?;
    expect_refusal(
        &format!("{} --force", a.bind()),
        &["is in exclusive use by a process that cannot be seen from here"],
    )?;
    holder.end();
    a.expect_untouched()
}

fn swap(_: &CheckEnvironment) -> Result<(), Failure> {
    let b = HostDrive::ready("b")?;
    // Uses the second namespace: one used namespace blocks the whole drive.
    let disk = inside::block_device("b", 2)?.display().to_string();
    sh(&format!("mkswap {disk} && swapon {disk}"))?;
    let wanted = format!("{} is swap space", disk.trim_start_matches("/dev/"));
    expect_refusal(&format!("{} --force", b.bind()), &[&wanted])?;
    sh(&format!("swapoff {disk}"))?;
    b.expect_untouched()
}

/// A process, which is killed on drop.
struct Process(Child);

impl Process {
    fn end(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

fn open(_: &CheckEnvironment) -> Result<(), Failure> {
    let a = HostDrive::ready("a")?;
    for device in [a.disk.clone(), a.disk.trim_end_matches("n1").to_owned()] {
        let file = fs::File::open(&device).map_err(with_path(&device))?;
        let mut sleeper = Command::new("sleep");
        sleeper.arg("1000").stdin(Stdio::from(file));
        let reader = Process(sleeper.spawn().map_err(with_path(&device))?);
        drop(sleeper);
        let wanted = format!(
            "{} is open in process {} (sleep)",
            device.trim_start_matches("/dev/"),
            reader.0.id()
        );
        expect_refusal(&a.bind(), &[&wanted, "--force"])?;
        a.expect_untouched()?;
    }
    let _reader = Process(
        Command::new("sh")
            .args(["-c", &format!("exec sleep 1000 <{}", a.disk)])
            .spawn()
            .map_err(with_path("sh"))?,
    );
    expect_ok(
        &format!("{} --force", a.bind()),
        &format!("{} is now bound to vfio-pci (before: nvme)", a.address),
    )
}

fn listed(_: &CheckEnvironment) -> Result<(), Failure> {
    let b = HostDrive::ready("b")?;
    // The namespaces appear one after the other.
    await_that("both namespaces", || {
        Ok(inside::block_device("b", 2).is_ok())
    })?;
    let drive = b.list_entry("")?;
    expect_is(&drive["driver"], "nvme".into())?;
    let namespace = |nsid| serde_json::json!({"nsid": nsid, "bytes": 32 << 20, "lba_bytes": 4096});
    expect_is(
        &drive["namespaces"],
        vec![namespace(1), namespace(2)].into(),
    )?;
    let wanted = format!("bound to nvme: nvme-mpt bind {}", b.address);
    expect_is(&drive["in_the_way"], vec![wanted].into())?;
    expect_is(&drive["queue_pairs"], Value::Null)?;

    nvme_mpt(&b.bind())?.map_err(Failure::from)?;
    let drive = b.list_entry("")?;
    expect_is(&drive["driver"], "vfio-pci".into())?;
    expect_is(&drive["namespaces"], Value::Null)?;
    expect_is(&drive["in_the_way"], Value::Array(Vec::new()))?;
    let text = nvme_mpt("drives")?.map_err(Failure::from)?;
    expect(
        text.contains(&format!("ready: serve it with path={}", b.address)),
        || text.clone(),
    )
}

/// Starts a server with drive `b`. Returns the arguments that select its control socket as well.
fn serve(bench: &CheckEnvironment, b: &HostDrive) -> Result<(Server, String), Failure> {
    nvme_mpt(&b.bind())?.map_err(Failure::from)?;
    let function = FunctionArgument::new("v", b.address.as_str(), "0+32M");
    let server = bench.serve(&[function])?;
    let control = server.socket("v").with_file_name("control.sock");
    Ok((server, format!("--control {}", control.display())))
}

fn serve_bound_drive(bench: &CheckEnvironment) -> Result<(), Failure> {
    let b = HostDrive::ready("b")?;
    let (mut server, control) = serve(bench, &b)?;
    let drive = b.list_entry(&control)?;
    expect_is(&drive["served"], true.into())?;
    expect_is(&drive["queue_pairs"]["total"], 4.into())?;
    expect_is(&drive["queue_pairs"]["free"], 4.into())?;
    expect_is(&drive["namespaces"][1]["nsid"], 2.into())?;
    expect_is(&drive["in_the_way"], Value::Array(Vec::new()))?;
    // Without the server's answer, the listing still shows that a process holds the drive.
    let has_it = format!("is open in process {} (nvme-mpt)", server.pid());
    let drive = b.list_entry("")?;
    let obstacle = drive["in_the_way"][0].as_str().unwrap_or_default();
    expect(obstacle.ends_with(&has_it), || drive.to_string())?;

    expect_refusal(&format!("unbind {}", b.address), &[&has_it])?;
    expect_refusal(
        &format!(
            "serve --state-dir /tmp/other --function socket=/tmp/o.sock,path={}",
            b.address
        ),
        &[
            "is in use: /dev/vfio/",
            &has_it,
            "nvme-mpt serve --drive path=",
        ],
    )?;
    server.expect_alive()?;
    server.stop()?;
    HostDrive::ready("b")?.expect_untouched()
}

fn crashed(bench: &CheckEnvironment) -> Result<(), Failure> {
    let b = HostDrive::ready("b")?;
    let (mut server, _) = serve(bench, &b)?;
    server.kill();
    server.restart()?;
    server.kill();
    HostDrive::ready("b")?.expect_untouched()
}

fn unservable(_: &CheckEnvironment) -> Result<(), Failure> {
    let a = HostDrive::ready("a")?;
    let serve = |state: &str, path: &str| {
        format!("serve --state-dir /tmp/{state} --function socket=/tmp/n.sock,path={path}")
    };
    let bind = format!("run: nvme-mpt bind {}", a.address);
    expect_refusal(
        &serve("none", &a.address),
        &["is bound to the driver `nvme`", &bind],
    )?;
    nvme_mpt(&a.bind())?.map_err(Failure::from)?;
    // An unprivileged user, who may lock no memory.
    sh(
        "grep -q ^nobody /etc/passwd || echo 'nobody:x:65534:65534::/:/bin/sh' >>/etc/passwd; \
        mkdir -p -m 700 /tmp/nobody && chown nobody /tmp/nobody",
    )?;
    let group = sh(&format!(
        "basename $(readlink /sys/bus/pci/devices/{}/iommu_group)",
        a.address
    ))?;
    let group = format!("/dev/vfio/{}", group.trim());
    let as_nobody = |before: &str| {
        let command = format!(
            "{before} {} {}",
            inside::copied_path("nvme-mpt").display(),
            serve("nobody", &a.address)
        );
        let output = Command::new("su")
            .args(["nobody", "-s", "/bin/sh", "-c", &command])
            .output()
            .map_err(with_path("su"))?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        expect(!output.status.success(), || "It is served".to_owned()).map(|()| text)
    };
    let text = as_nobody("")?;
    expect(
        text.contains(&format!("No permission to open {group}")),
        || text.clone(),
    )?;
    sh(&format!("chmod 666 {group}"))?;
    let text = as_nobody("ulimit -l 16;")?;
    expect(
        text.contains("of 16384 that are allowed; raise the limit with `ulimit -l`"),
        || text.clone(),
    )
}

fn others(_: &CheckEnvironment) -> Result<(), Failure> {
    let bridge = sh("for f in /sys/bus/pci/devices/*; do \
                     grep -q 0x0601 $f/class && basename $f; done | head -n 1")?;
    for command in ["bind", "unbind"] {
        expect_refusal(
            &format!("{command} {}", bridge.trim()),
            &["is not an NVMe controller: its class code is 0601"],
        )?;
        expect_refusal(
            &format!("{command} 0000:fe:1f.7"),
            &["There is no PCI function 0000:fe:1f.7"],
        )?;
        expect_refusal(&format!("{command} nvme0"), &["is not a PCI address"])?;
    }
    Ok(())
}

//! nvme-cli in a guest: all commands of the device, and the status of commands that must fail.

use serde_json::Value;

use crate::fixture::{BootedFunction, DRIVE_MIB, Failure, TIMEOUT, await_path, await_that, expect};

/// Status codes (NVMe Base 2.0, 4.6.1.2): Status Code Type in bits 10:8.
mod status {
    pub(super) const SUCCESS: u16 = 0x000;
    pub(super) const INVALID_OPCODE: u16 = 0x001;
    pub(super) const INVALID_FIELD: u16 = 0x002;
    pub(super) const LBA_OUT_OF_RANGE: u16 = 0x080;
    pub(super) const UNRECOVERED_READ_ERROR: u16 = 0x281;
    pub(super) const COMPARE_FAILURE: u16 = 0x285;
}

/// Returns the output of `nvme COMMAND -o json`.
fn json(booted: &BootedFunction, command: &str) -> Result<Value, Failure> {
    let text = booted
        .guest
        .expect_nvme(&format!("{command} -o json"), status::SUCCESS)?;
    serde_json::from_str(&text)
        .map_err(|error| Failure::from(format!("`nvme {command}`: {error}:\n{text}")))
}

fn number(value: &Value, field: &str) -> Result<u64, Failure> {
    value[field]
        .as_u64()
        .ok_or_else(|| Failure::from(format!("No number '{field}' in {value}")))
}

/// Fills `blocks` blocks from `start` with `byte`.
fn write_blocks(
    booted: &BootedFunction,
    start: u64,
    blocks: u64,
    byte: char,
) -> Result<(), Failure> {
    let namespace = &booted.namespace;
    let bytes = blocks * 512;
    booted.guest.check(
        &format!("head -c {bytes} /dev/zero | tr '\\0' '{byte}' > /tmp/data"),
        TIMEOUT,
    )?;
    booted.guest.expect_nvme(
        &format!(
            "write {namespace} -s {start} -c {} -z {bytes} -d /tmp/data",
            blocks - 1
        ),
        status::SUCCESS,
    )?;
    Ok(())
}

/// Fails unless `blocks` blocks from `start` are filled with `byte`, in tr's notation.
fn expect_blocks(
    booted: &BootedFunction,
    start: u64,
    blocks: u64,
    byte: &str,
) -> Result<(), Failure> {
    let namespace = &booted.namespace;
    let bytes = blocks * 512;
    // nvme-cli does not truncate an existing file.
    booted.guest.check("rm -f /tmp/found", TIMEOUT)?;
    booted.guest.expect_nvme(
        &format!(
            "read {namespace} -s {start} -c {} -z {bytes} -d /tmp/found",
            blocks - 1
        ),
        status::SUCCESS,
    )?;
    booted.guest.check(
        &format!(
            "head -c {bytes} /dev/zero | tr '\\0' '{byte}' | cmp - /tmp/found && \
             [ $(stat -c %s /tmp/found) = {bytes} ]"
        ),
        TIMEOUT,
    )?;
    Ok(())
}

pub(crate) fn id_ctrl(booted: &BootedFunction) -> Result<(), Failure> {
    let controller = &booted.controller;
    let controller = json(booted, &format!("id-ctrl {controller}"))?;
    let stats = booted.server().function_stats(&booted.function)?;
    let text = |field: &str| {
        controller[field]
            .as_str()
            .unwrap_or_default()
            .trim()
            .to_owned()
    };
    expect(
        text("mn") == stats.model && text("sn") == stats.serial,
        || {
            format!(
                "Model and serial are '{}', '{}'; the server reports {stats:?}",
                text("mn"),
                text("sn")
            )
        },
    )?;
    // MDTS is in units of the smallest page size, 4 KiB here: 8 is 1 MiB, and 0 is unlimited.
    let mdts = number(&controller, "mdts")?;
    expect(mdts == 0 || mdts >= 8, || format!("MDTS {mdts}"))?;
    expect(number(&controller, "nn")? == 1, || {
        format!("NN in {controller}")
    })?;
    let version = number(&controller, "ver")?;
    expect(version >= 0x0002_0000, || format!("VER {version:#x}"))
}

pub(crate) fn id_ns(booted: &BootedFunction) -> Result<(), Failure> {
    let controller = &booted.controller;
    let namespace = &booted.namespace;
    let identified = json(booted, &format!("id-ns {namespace}"))?;
    let blocks = (DRIVE_MIB << 20) / 512;
    for field in ["nsze", "ncap"] {
        let found = number(&identified, field)?;
        expect(found == blocks, || format!("{field} {found}, not {blocks}"))?;
    }
    let identity = format!("{}{}", identified["nguid"], identified["eui64"]);
    expect(
        identity.contains(|c: char| c.is_ascii_hexdigit() && c != '0'),
        || format!("The namespace has neither an NGUID nor an EUI-64: {identified}"),
    )?;
    // The descriptor list, and the list of active namespaces.
    booted
        .guest
        .expect_nvme(&format!("ns-descs {namespace}"), status::SUCCESS)?;
    let active = booted
        .guest
        .expect_nvme(&format!("list-ns {controller}"), status::SUCCESS)?;
    expect(active.contains("0x1"), || format!("list-ns: {active}"))
}

pub(crate) fn list(booted: &BootedFunction) -> Result<(), Failure> {
    let namespace = &booted.namespace;
    let devices = json(booted, "list")?;
    let listed = devices["Devices"].as_array().cloned().unwrap_or_default();
    let device = listed
        .iter()
        .find(|device| device["DevicePath"] == **namespace)
        .ok_or_else(|| Failure::from(format!("nvme list, without {namespace}: {devices}")))?;
    let size = number(device, "PhysicalSize")?;
    expect(size == DRIVE_MIB << 20, || {
        format!("nvme list: size {size}")
    })
}

pub(crate) fn smart_log(booted: &BootedFunction) -> Result<(), Failure> {
    let controller = &booted.controller;
    let before = json(booted, &format!("smart-log {controller}"))?;
    expect(number(&before, "critical_warning")? == 0, || {
        format!("{before}")
    })?;
    let reads = number(&before, "host_read_commands")?;
    expect_read(booted)?;
    // The read may be counted after the guest has seen its completion.
    await_that("a read to be counted", || {
        let after = json(booted, &format!("smart-log {controller}"))?;
        Ok(number(&after, "host_read_commands")? > reads)
    })
}

fn expect_read(booted: &BootedFunction) -> Result<(), Failure> {
    let namespace = &booted.namespace;
    booted.guest.expect_nvme(
        &format!("read {namespace} -s 0 -c 0 -z 512 -d /tmp/found"),
        status::SUCCESS,
    )?;
    Ok(())
}

pub(crate) fn error_log(booted: &BootedFunction) -> Result<(), Failure> {
    let controller = &booted.controller;
    let log = json(booted, &format!("error-log {controller}"))?;
    expect(log["errors"].is_array(), || format!("error-log: {log}"))
}

pub(crate) fn fw_log(booted: &BootedFunction) -> Result<(), Failure> {
    let controller = &booted.controller;
    let text = booted
        .guest
        .expect_nvme(&format!("fw-log {controller}"), status::SUCCESS)?;
    expect(text.contains("afi"), || format!("fw-log: {text}"))
}

pub(crate) fn effects_log(booted: &BootedFunction) -> Result<(), Failure> {
    let controller = &booted.controller;
    // Without --csi, nvme-cli maps the registers, which the kernel reserves for its driver.
    let text = booted.guest.expect_nvme(
        &format!("effects-log {controller} --csi=0"),
        status::SUCCESS,
    )?;
    for supported in ["Identify", "Get Log Page", "Read", "Write", "Flush", "Copy"] {
        expect(text.contains(supported), || {
            format!("{supported} is not in the effects log:\n{text}")
        })?;
    }
    Ok(())
}

pub(crate) fn get_feature(booted: &BootedFunction) -> Result<(), Failure> {
    let controller = &booted.controller;
    // NVMe Base 2.0, figure 317: arbitration, power, LBA range type, temperature, error recovery, write
    // cache, queues, interrupt coalescing, vector configuration, write atomicity, async events,
    // timestamp, host behaviour.
    let advertised = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0x0a, 0x0b, 0x0e, 0x16];
    // Features of a namespace need its identifier, and other features need identifier 0.
    let named = advertised.map(|feature| match feature {
        3 | 5 => format!("{feature}:1"),
        _ => format!("{feature}:0"),
    });
    let script = format!(
        "for feature in {}; do for select in 0 1; do \
           nvme get-feature {controller} -f ${{feature%:*}} -n ${{feature#*:}} -s $select || \
           {{ echo \"feature:namespace $feature, select $select\"; exit 1; }}; \
         done; done",
        named.join(" ")
    );
    booted.guest.check(&script, TIMEOUT)?;
    booted.guest.expect_nvme(
        &format!("get-feature {controller} -f 0x7f"),
        status::INVALID_FIELD,
    )?;
    Ok(())
}

pub(crate) fn dsm(booted: &BootedFunction) -> Result<(), Failure> {
    let namespace = &booted.namespace;
    write_blocks(booted, 64, 16, 'd')?;
    booted.guest.expect_nvme(
        &format!("dsm {namespace} --ad -s 64 -b 16"),
        status::SUCCESS,
    )?;
    // Deallocated blocks may read as zeroes or with old data (NVM Command Set 1.0, 3.2.3.2), but must be readable.
    booted.guest.expect_nvme(
        &format!("read {namespace} -s 64 -c 15 -z 8192 -d /tmp/found"),
        status::SUCCESS,
    )?;
    booted.guest.expect_nvme(
        &format!(
            "dsm {namespace} --ad -s {} -b 16",
            (DRIVE_MIB << 20) / 512 - 8
        ),
        status::LBA_OUT_OF_RANGE,
    )?;
    Ok(())
}

pub(crate) fn write_zeroes(booted: &BootedFunction) -> Result<(), Failure> {
    let namespace = &booted.namespace;
    write_blocks(booted, 128, 16, 'z')?;
    booted.guest.expect_nvme(
        &format!("write-zeroes {namespace} -s 132 -c 7"),
        status::SUCCESS,
    )?;
    expect_blocks(booted, 128, 4, "z")?;
    expect_blocks(booted, 132, 8, "\\0")?;
    expect_blocks(booted, 140, 4, "z")
}

pub(crate) fn compare(booted: &BootedFunction) -> Result<(), Failure> {
    let namespace = &booted.namespace;
    write_blocks(booted, 256, 8, 'c')?;
    let compare = |start| format!("compare {namespace} -s {start} -c 7 -z 4096 -d /tmp/data");
    booted.guest.expect_nvme(&compare(256), status::SUCCESS)?;
    booted
        .guest
        .expect_nvme(&compare(257), status::COMPARE_FAILURE)?;
    Ok(())
}

pub(crate) fn verify(booted: &BootedFunction) -> Result<(), Failure> {
    let namespace = &booted.namespace;
    write_blocks(booted, 320, 8, 'v')?;
    booted
        .guest
        .expect_nvme(&format!("verify {namespace} -s 320 -c 7"), status::SUCCESS)?;
    Ok(())
}

pub(crate) fn copy(booted: &BootedFunction) -> Result<(), Failure> {
    let namespace = &booted.namespace;
    write_blocks(booted, 512, 8, '1')?;
    write_blocks(booted, 600, 4, '2')?;
    // Two ranges. nvme-cli takes their lengths zero-based.
    booted.guest.expect_nvme(
        &format!("copy {namespace} --sdlba=700 --slbs=512,600 --blocks=7,3"),
        status::SUCCESS,
    )?;
    expect_blocks(booted, 700, 8, "1")?;
    expect_blocks(booted, 708, 4, "2")?;
    let end = (DRIVE_MIB << 20) / 512;
    booted.guest.expect_nvme(
        &format!("copy {namespace} --sdlba=700 --slbs={} --blocks=7", end - 4),
        status::LBA_OUT_OF_RANGE,
    )?;
    booted.guest.expect_nvme(
        &format!("copy {namespace} --sdlba={} --slbs=512 --blocks=7", end - 4),
        status::LBA_OUT_OF_RANGE,
    )?;
    Ok(())
}

pub(crate) fn write_uncor_then_read(booted: &BootedFunction) -> Result<(), Failure> {
    let namespace = &booted.namespace;
    write_blocks(booted, 800, 4, 'u')?;
    booted.guest.expect_nvme(
        &format!("write-uncor {namespace} -s 801 -c 0"),
        status::SUCCESS,
    )?;
    let read = |start| format!("read {namespace} -s {start} -c 0 -z 512 -d /tmp/found");
    booted
        .guest
        .expect_nvme(&read(801), status::UNRECOVERED_READ_ERROR)?;
    booted.guest.expect_nvme(
        &format!("verify {namespace} -s 800 -c 3"),
        status::UNRECOVERED_READ_ERROR,
    )?;
    expect_blocks(booted, 800, 1, "u")?;
    expect_blocks(booted, 802, 2, "u")?;
    // A write makes the block readable again.
    write_blocks(booted, 801, 1, 'U')?;
    expect_blocks(booted, 801, 1, "U")
}

pub(crate) fn flush(booted: &BootedFunction) -> Result<(), Failure> {
    let namespace = &booted.namespace;
    booted
        .guest
        .expect_nvme(&format!("flush {namespace}"), status::SUCCESS)?;
    Ok(())
}

pub(crate) fn lba_out_of_range(booted: &BootedFunction) -> Result<(), Failure> {
    let namespace = &booted.namespace;
    let end = (DRIVE_MIB << 20) / 512;
    let last = end - 1;
    booted.guest.expect_nvme(
        &format!("read {namespace} -s {last} -c 0 -z 512"),
        status::SUCCESS,
    )?;
    for (start, blocks) in [
        (end, 1),
        (last, 2),
        (u64::MAX, 1),
        (u64::MAX - 1, 2),
        (1 << 55, 8),
    ] {
        let bytes = blocks * 512;
        let range = format!("-s {start} -c {} -z {bytes}", blocks - 1);
        booted.guest.expect_nvme(
            &format!("read {namespace} {range}"),
            status::LBA_OUT_OF_RANGE,
        )?;
        booted.guest.expect_nvme(
            &format!("write {namespace} {range} -d /dev/zero"),
            status::LBA_OUT_OF_RANGE,
        )?;
    }
    booted.guest.expect_nvme(
        &format!("write-zeroes {namespace} -s {last} -c 1"),
        status::LBA_OUT_OF_RANGE,
    )?;
    Ok(())
}

pub(crate) fn unknown_commands(booted: &BootedFunction) -> Result<(), Failure> {
    let controller = &booted.controller;
    let namespace = &booted.namespace;
    for opcode in ["0x3f", "0x7f"] {
        booted.guest.expect_nvme(
            &format!("admin-passthru {controller} --opcode={opcode}"),
            status::INVALID_OPCODE,
        )?;
        booted.guest.expect_nvme(
            &format!("io-passthru {namespace} --opcode={opcode} --namespace-id=1"),
            status::INVALID_OPCODE,
        )?;
    }
    // Identify with a CNS that does not exist.
    booted.guest.expect_nvme(
        &format!("admin-passthru {controller} --opcode=6 --cdw10=0xff --data-len=4096 --read"),
        status::INVALID_FIELD,
    )?;
    Ok(())
}

pub(crate) fn reset(booted: &BootedFunction) -> Result<(), Failure> {
    let controller = &booted.controller;
    for _ in 0..3 {
        booted
            .guest
            .expect_nvme(&format!("reset {controller}"), status::SUCCESS)?;
        expect_read(booted)?;
    }
    Ok(())
}

pub(crate) fn unbind_and_bind(booted: &BootedFunction) -> Result<(), Failure> {
    let (controller, namespace) = (&booted.controller, &booted.namespace);
    for _ in 0..3 {
        booted.guest.check(
            &format!(
                "address=$(basename $(readlink -f /sys/class/nvme/$(basename {controller})/device)) && \
                 cd /sys/bus/pci/drivers/nvme && echo $address > unbind && [ ! -e {namespace} ] && \
                 echo $address > bind"
            ),
            TIMEOUT,
        )?;
        await_path(&booted.guest, namespace, true)?;
    }
    booted.verified_load("after-bind", 1).run(&booted.guest)?;
    booted.server().expect_alive()?;
    Ok(())
}

//! A key-value drive. Linux creates only a character device, to which nvme-cli sends commands.

use integration::guest::{Guest, GuestConfig, GuestDrive};
use integration::server::FunctionArgument;

use crate::Group;
use crate::fixture::{
    BootedFunction, CheckEnvironment, FUNCTION, Failure, TIMEOUT, expect, expect_no_complaints,
};

pub(crate) const GROUP: Group = Group::Alone {
    name: "key_value",
    checks: &[
        (
            "nvme_cli_stores_and_retrieves",
            nvme_cli_stores_and_retrieves,
        ),
        (
            "values_outlive_a_server_that_is_killed",
            values_outlive_a_server_that_is_killed,
        ),
    ],
};

const NAMESPACE: &str = "/dev/ng0n1";

/// Opcodes (Key Value Command Set 1.0, section 3.2).
mod opcode {
    pub(super) const STORE: u8 = 0x01;
    pub(super) const RETRIEVE: u8 = 0x02;
    pub(super) const LIST: u8 = 0x06;
    pub(super) const DELETE: u8 = 0x10;
    pub(super) const EXIST: u8 = 0x14;
    /// Vendor specific command Batch, see docs/software-drives.md.
    pub(super) const BATCH: u8 = 0x85;
}

/// Status codes (section 3.1.2), and an option in dword 11 beside the length of the key.
mod status {
    pub(super) const SUCCESS: u16 = 0x000;
    pub(super) const INVALID_VALUE_SIZE: u16 = 0x085;
    pub(super) const INVALID_KEY_SIZE: u16 = 0x086;
    pub(super) const KEY_DOES_NOT_EXIST: u16 = 0x087;
    pub(super) const KEY_EXISTS: u16 = 0x089;
}
const MUST_NOT_EXIST: u32 = 1 << 9;

/// Returns a function on the second half of the drive.
fn function(bench: &CheckEnvironment) -> Result<FunctionArgument, Failure> {
    let drive = bench.drive("pairs.img", 64)?.display().to_string();
    Ok(FunctionArgument::new(FUNCTION, drive, "32M+32M").option("profile=kv"))
}

/// A command on a key. The key length in dword 11 may be wrong on purpose.
struct Command<'a> {
    opcode: u8,
    key: &'a [u8],
    /// Dword 11.
    dword11: u32,
    len: usize,
    /// Data arguments for nvme-cli.
    data: &'a str,
}

impl<'a> Command<'a> {
    fn new(opcode: u8, key: &'a [u8]) -> Self {
        Self {
            opcode,
            key,
            dword11: key.len() as u32,
            len: 0,
            data: "",
        }
    }

    fn data(mut self, len: usize, data: &'a str) -> Self {
        (self.len, self.data) = (len, data);
        self
    }

    /// Runs the command, and returns nvme-cli's output.
    fn run(&self, guest: &Guest, status: u16) -> Result<String, Failure> {
        let dword = |at: usize| {
            let bytes = [0, 1, 2, 3].map(|byte| self.key.get(at + byte).copied().unwrap_or(0));
            u32::from_le_bytes(bytes)
        };
        let line = format!(
            "io-passthru {NAMESPACE} --opcode={} --namespace-id=1 --cdw2={} --cdw3={} --cdw14={} \
             --cdw15={} --cdw10={len} --cdw11={} --data-len={len} {}",
            self.opcode,
            dword(0),
            dword(4),
            dword(8),
            dword(12),
            self.dword11,
            self.data,
            len = self.len,
        );
        Ok(guest.expect_nvme(&line, status)?)
    }
}

/// Creates a file of `len` random bytes in the guest.
fn make_value(guest: &Guest, file: &str, len: usize) -> Result<(), Failure> {
    guest.check(&format!("head -c {len} /dev/urandom > {file}"), TIMEOUT)?;
    Ok(())
}

fn store(guest: &Guest, key: &[u8], file: &str, len: usize) -> Result<(), Failure> {
    let data = format!("--write --input-file={file}");
    let command = Command::new(opcode::STORE, key).data(len, &data);
    command.run(guest, status::SUCCESS)?;
    Ok(())
}

/// Fails unless the value of a key equals a file in the guest.
fn expect_value(guest: &Guest, key: &[u8], file: &str, len: usize) -> Result<(), Failure> {
    let command = Command::new(opcode::RETRIEVE, key);
    let output = command
        .data(len, "--read --raw-binary > /tmp/found")
        .run(guest, status::SUCCESS)?;
    expect(output.contains(&format!("{len:08x}")), || {
        format!("The size of the value, {len:#x}, is not the result: {output}")
    })?;
    guest.check(&format!("cmp {file} /tmp/found"), TIMEOUT)?;
    Ok(())
}

fn nvme_cli_stores_and_retrieves(bench: &CheckEnvironment) -> Result<(), Failure> {
    let booted = BootedFunction::boot(bench, bench.v6_12(), function(bench)?, 2)?;
    let guest = &booted.guest;
    guest.check(&format!("[ -c {NAMESPACE} ]"), TIMEOUT)?;
    let blocks = guest.check("grep -c nvme /proc/partitions || true", TIMEOUT)?;
    expect(blocks.trim() == "0", || {
        format!("There are block devices: {blocks}")
    })?;

    make_value(guest, "/tmp/small", 5)?;
    make_value(guest, "/tmp/large", 100_000)?;
    let long = b"0123456789abcdef";
    let exist = |key| Command::new(opcode::EXIST, key);
    exist(b"a").run(guest, status::KEY_DOES_NOT_EXIST)?;
    store(guest, b"a", "/tmp/small", 5)?;
    store(guest, long, "/tmp/large", 100_000)?;
    exist(b"a").run(guest, status::SUCCESS)?;
    expect_value(guest, b"a", "/tmp/small", 5)?;
    expect_value(guest, long, "/tmp/large", 100_000)?;

    // Two keys with their lengths, each padded to dwords.
    Command::new(opcode::LIST, b"")
        .data(64, "--read --raw-binary > /tmp/list")
        .run(guest, status::SUCCESS)?;
    let listed = "printf '\\2\\0\\0\\0\\20\\0000123456789abcdef\\0\\0\\1\\0a\\0'";
    guest.check(
        &format!("{listed} > /tmp/listed; head -c 28 /tmp/list | cmp /tmp/listed -"),
        TIMEOUT,
    )?;

    let data = "--write --input-file=/tmp/small";
    let mut command = Command::new(opcode::STORE, b"a").data(5, data);
    command.dword11 |= MUST_NOT_EXIST;
    command.run(guest, status::KEY_EXISTS)?;
    for (opcode, len) in [
        (opcode::STORE, 17),
        (opcode::EXIST, 0),
        (opcode::DELETE, 255),
    ] {
        let mut command = Command::new(opcode, long);
        command.dword11 = len;
        command.run(guest, status::INVALID_KEY_SIZE)?;
    }
    // The size exceeds the maximum of a value, so the device refuses the command before it reads the data.
    let line = format!(
        "io-passthru {NAMESPACE} --opcode=1 --namespace-id=1 --cdw2=97 --cdw10={} --cdw11=1",
        (1 << 20) + 1
    );
    guest.expect_nvme(&line, status::INVALID_VALUE_SIZE)?;

    Command::new(opcode::DELETE, b"a").run(guest, status::SUCCESS)?;
    Command::new(opcode::DELETE, b"a").run(guest, status::KEY_DOES_NOT_EXIST)?;
    exist(b"a").run(guest, status::KEY_DOES_NOT_EXIST)?;
    expect_value(guest, long, "/tmp/large", 100_000)?;
    batch(guest)?;
    booted.expect_healthy()
}

/// Returns an operation of a Batch, on a key of one byte. `value` is length and offset of the value in bytes.
fn operation(opcode: u8, key: u8, value: (u8, u8)) -> [u8; 32] {
    let (len, offset) = value;
    let mut bytes = [0; 32];
    (bytes[0], bytes[1], bytes[4], bytes[8], bytes[24]) = (opcode, 1, len, key, offset);
    bytes
}

/// Sends several operations in one command: stores a key, finds it, and looks for a missing key.
fn batch(guest: &Guest) -> Result<(), Failure> {
    const VALUE: &str = "hello";
    let operations = [
        operation(opcode::STORE, b'b', (VALUE.len() as u8, 96)),
        operation(opcode::EXIST, b'b', (0, 0)),
        operation(opcode::EXIST, b'c', (0, 0)),
    ];
    let data = [operations.as_flattened(), VALUE.as_bytes()].concat();
    let escapes: String = data.iter().map(|byte| format!("\\{byte:03o}")).collect();
    guest.check(
        &format!("printf '{escapes}' > /tmp/batch; printf {VALUE} > /tmp/value"),
        TIMEOUT,
    )?;
    let line = format!(
        "io-passthru {NAMESPACE} --opcode={} --namespace-id=1 --cdw10={len} --cdw11={} --data-len={len} --write \
         --input-file=/tmp/batch",
        opcode::BATCH,
        operations.len(),
        len = data.len(),
    );
    let output = guest.expect_nvme(&line, status::SUCCESS)?;
    // Four bits for each operation: success, success, KV Key Does Not Exist.
    expect(output.contains("00000100"), || {
        format!("The operations have other results: {output}")
    })?;
    expect_value(guest, b"b", "/tmp/value", VALUE.len())
}

/// Uses Linux 6.1, whose character devices are the same.
fn values_outlive_a_server_that_is_killed(bench: &CheckEnvironment) -> Result<(), Failure> {
    let mut server = bench.serve(&[function(bench)?])?;
    let config = GuestConfig::new("guest").drive(GuestDrive::vfio_user(server.socket(FUNCTION)));
    let guest = bench.boot_with(&bench.v6_1()?, &config)?;
    let keys: [&[u8]; 3] = [b"a", b"some key", b"0123456789abcdef"];
    let mut sums = String::new();
    for (index, key) in (0..).zip(keys) {
        let (file, len) = (format!("/tmp/value{index}"), 1000 + 50_000 * index);
        make_value(&guest, &file, len)?;
        store(&guest, key, &file, len)?;
        sums = guest.check("md5sum /tmp/value*", TIMEOUT)?;
    }
    // Without a flush: completed commands must be durable.
    server.kill();
    drop(guest);
    server.restart()?;
    let guest = bench.boot_with(&bench.v6_1()?, &config)?;
    for (index, key) in (0..).zip(keys) {
        let data = format!("--read --raw-binary > /tmp/value{index}");
        Command::new(opcode::RETRIEVE, key)
            .data(1000 + 50_000 * index, &data)
            .run(&guest, status::SUCCESS)?;
    }
    let found = guest.check("md5sum /tmp/value*", TIMEOUT)?;
    expect(found == sums, || {
        format!("Values are not what they were:\n{found}\nwere:\n{sums}")
    })?;
    expect_no_complaints(&guest)?;
    server.expect_alive()?;
    Ok(())
}

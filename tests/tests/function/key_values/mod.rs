//! Key-value drives from the guest's view: a private key space and a private capacity.

mod crash;
mod property;

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nvme_models::DriveProfile;
use nvme_mpt_tests::admin::log;
use nvme_mpt_tests::command::{DataPointer, Sqe, admin, io, kv};
use nvme_mpt_tests::controller::{Config, Controller};
use nvme_mpt_tests::doorbell::DoorbellMode;
use nvme_mpt_tests::identify::cns;
use nvme_mpt_tests::key_value::{CSI, KeyValues, Namespace, Operation, batch_data, option, step};
use nvme_mpt_tests::not_checked::not_checked;
use nvme_mpt_tests::registers::{CC_CSS_ALL, CC_CSS_NVM};
use nvme_mpt_tests::status::{
    CAPACITY_EXCEEDED, DATA_TRANSFER_ERROR, INVALID_COMMAND_SET, INVALID_FIELD, INVALID_KEY_SIZE,
    INVALID_NAMESPACE, INVALID_OPCODE, INVALID_VALUE_SIZE, KEY_DOES_NOT_EXIST, KEY_EXISTS,
    PRP_OFFSET_INVALID, SUCCESS, StatusCode,
};
use nvme_mpt_tests::{Error, prp, rng};
use nvme_mpt_vmm::drives::{self, DriveOptions, DrivePath};

use crate::common::{
    HANG, HIGH, Host, LEASE, LOW, Machine, Setup, UNMAPPED_ADDRESS, check_commands, children,
    status,
};
use crate::file_drive;

/// A drive with space for two leases.
const DRIVE: &str = "memory:32M";

fn options(profile: &str) -> DriveOptions {
    DriveOptions {
        profile: Some(Arc::new(DriveProfile::parse("test", profile).unwrap())),
        ..DriveOptions::default()
    }
}

const PROFILE: &str = "model = \"kv\"\nmax_value = \"1M\"\n";

/// Returns a profile of such a drive whose operations take `latency`.
fn timed(latency: &str) -> String {
    format!(
        "{PROFILE}timing = {{ units = 4, delete = \"{latency}\", exist = \"{latency}\", list = \"{latency}\", \
         store = {{ latency = \"{latency}\", bandwidth = \"4G\" }}, \
         retrieve = {{ latency = \"{latency}\", bandwidth = \"4G\" }} }}\n"
    )
}

fn host(path: &str) -> Host {
    host_with(path, PROFILE)
}

fn host_with(path: &str, profile: &str) -> Host {
    Host::from_drive(drives::open(&path.parse().unwrap(), options(profile)).unwrap())
}

fn host_in(path: &Path) -> Host {
    host_in_with(path, PROFILE)
}

fn host_in_with(path: &Path, profile: &str) -> Host {
    let path = DrivePath::File(path.to_owned());
    children::wait_for_spawns();
    Host::from_drive(drives::open(&path, options(profile)).unwrap())
}

/// Creates a drive in a file with space for two leases.
fn file_host() -> (tempfile::NamedTempFile, Host) {
    file_host_with(PROFILE)
}

fn file_host_with(profile: &str) -> (tempfile::NamedTempFile, Host) {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(2 * LEASE).unwrap();
    let host = host_in_with(file.path(), profile);
    (file, host)
}

fn attach_with(machine: &Machine, command_set: u32, doorbells: DoorbellMode) -> Controller {
    let config = Config {
        command_set,
        doorbells,
        admin_timeout: HANG,
        ..Config::default()
    };
    let queues = machine.function().facts().queue_pairs;
    Controller::attach(machine.bar(), machine.memory.clone(), config, queues).unwrap()
}

/// Attaches a driver with all command sets enabled. Returns its namespace too.
fn attach(machine: &Machine) -> (Controller, KeyValues) {
    let mut controller = attach_with(machine, CC_CSS_ALL, DoorbellMode::Shadow);
    let pairs = open(&mut controller, 1);
    (controller, pairs)
}

fn open(controller: &mut Controller, queue: u16) -> KeyValues {
    let mut pairs = KeyValues::open(controller, queue).unwrap();
    pairs.timeout = HANG;
    pairs
}

fn value(tag: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len.next_multiple_of(8)];
    rng::fill_blocks(&mut bytes, tag, 0, 8);
    bytes.truncate(len);
    bytes
}

/// Returns the status of a failed command.
#[track_caller]
fn failed_status<T: std::fmt::Debug>(result: Result<T, Error>) -> StatusCode {
    let error = result.unwrap_err();
    error.completion().unwrap().status().code()
}

#[test]
fn a_driver_finds_the_command_set_and_its_limits() {
    let host = host(DRIVE);
    let machine = host.machine(&Setup::nth(1));
    let (mut controller, mut pairs) = attach(&machine);
    let descriptors = controller
        .identify(cns::NAMESPACE_DESCRIPTORS, 1, 0)
        .unwrap();
    assert_eq!(descriptors[52..57], [4, 1, 0, 0, CSI]);
    let sets = controller.identify(cns::COMMAND_SETS, 0, 0).unwrap();
    assert_eq!(sets[..9], [0b011, 0, 0, 0, 0, 0, 0, 0, 0], "NVM and KV");
    for (csi, listed) in [(0, 0), (CSI, 1)] {
        let list = controller
            .identify(cns::CSI_ACTIVE_NAMESPACES, 0, csi)
            .unwrap();
        assert_eq!(list[0], listed, "active namespaces of command set {csi}");
    }
    let empty = Namespace {
        size: LEASE,
        used: 0,
        key_max: 16,
        value_max: 1 << 20,
        keys_max: (LEASE / 64) as u32,
    };
    assert_eq!(KeyValues::namespace(&mut controller, 1).unwrap(), empty);
    pairs.store(b"key", &value(1, 100)).unwrap();
    pairs.store(b"other", &[]).unwrap();
    let used = Namespace {
        used: 64 + 128 + 64,
        ..empty
    };
    assert_eq!(KeyValues::namespace(&mut controller, 1).unwrap(), used);
    pairs.delete(b"key").unwrap();
    pairs.delete(b"other").unwrap();
    assert_eq!(KeyValues::namespace(&mut controller, 1).unwrap(), empty);

    let id = controller.identify(cns::CSI_CONTROLLER, 0, CSI).unwrap();
    assert_eq!(id, [0; 4096]);
    let independent = controller
        .identify(cns::CSI_INDEPENDENT_NAMESPACE, 1, 0)
        .unwrap();
    assert_eq!(independent[14], 1, "NSTAT: ready");
    for (cns, csi) in [
        (cns::NAMESPACE, 0),
        (cns::CSI_NAMESPACE, 0),
        (cns::CSI_NAMESPACE, 2),
    ] {
        let result = controller.identify(cns, 1, csi);
        assert_eq!(
            failed_status(result),
            INVALID_COMMAND_SET,
            "CNS {cns}, CSI {csi}"
        );
    }
    let id = controller.identify_controller().unwrap();
    assert_eq!(id.raw[520..522], [0b0101_0000, 0], "ONCS: no command");
    assert_eq!(id.raw[525] & 1, 0, "VWC: what completed is durable");
    let effects = |controller: &mut Controller, csi: u32| {
        let sqe = Sqe::new(admin::GET_LOG_PAGE, 0xFFFF_FFFF)
            .with_cdw(10, 1023 << 16 | u32::from(log::COMMAND_EFFECTS))
            .with_cdw(14, csi << 24);
        let page = controller.admin_read(sqe, 4096).unwrap();
        [0x00, 0x01, 0x02, 0x05, 0x06, 0x10, 0x14].map(|opcode| page[1024 + 4 * opcode])
    };
    assert_eq!(effects(&mut controller, 1), [1, 3, 1, 0, 1, 3, 1]);
    assert_eq!(effects(&mut controller, 0), [0; 7]);
}

#[test]
fn accepted_commands_match_the_effects_log() {
    let host = host(DRIVE);
    let machine = host.machine(&Setup::nth(0));
    let (mut controller, mut pairs) = attach(&machine);
    check_commands(&mut controller, &mut pairs.queue, CSI);
}

#[test]
fn a_driver_that_does_not_enable_the_command_set_finds_no_namespace() {
    let host = host(DRIVE);
    let machine = host.machine(&Setup::nth(0));
    let mut controller = attach_with(&machine, CC_CSS_NVM, DoorbellMode::Shadow);
    assert!(controller.active_namespaces(0).unwrap().is_empty());
}

fn check_all_commands(host: &Host) {
    let machine = host.machine(&Setup::nth(0));
    let (_controller, mut pairs) = attach(&machine);
    let (small, large) = (value(1, 5), value(2, 1 << 20));
    assert_eq!(failed_status(pairs.retrieve(b"a", 16)), KEY_DOES_NOT_EXIST);
    assert_eq!(failed_status(pairs.delete(b"a")), KEY_DOES_NOT_EXIST);
    assert!(!pairs.exists(b"a").unwrap());

    pairs.store(b"a", &small).unwrap();
    pairs.store(b"0123456789abcdef", &large).unwrap();
    pairs.store(b"a\0", &[]).unwrap();
    pairs.flush().unwrap();
    assert!(pairs.exists(b"a").unwrap() && pairs.exists(b"a\0").unwrap());
    assert_eq!(pairs.retrieve(b"a", 4096).unwrap(), (small.clone(), 5));
    assert_eq!(pairs.retrieve(b"a\0", 4096).unwrap(), (Vec::new(), 0));
    // A truncated Retrieve returns the beginning of the value, and reports the full size.
    assert_eq!(pairs.retrieve(b"a", 3).unwrap(), (small[..3].to_vec(), 5));
    assert_eq!(pairs.retrieve(b"a", 0).unwrap(), (Vec::new(), 5));
    for buffer_bytes in [1 << 20, (1 << 20) - 1, 12_289, 8192, 4097, 1] {
        let (bytes, size) = pairs.retrieve(b"0123456789abcdef", buffer_bytes).unwrap();
        assert_eq!(size, 1 << 20);
        assert!(bytes == large[..buffer_bytes], "{buffer_bytes} bytes");
    }
    // The buffer behind the value is unchanged, for all layouts of pages.
    let sqe = Sqe::key_value(kv::RETRIEVE, 1, b"a", 20_000);
    let (cqe, bytes) = pairs.command_in(sqe, 20_000, 0xEE).unwrap();
    assert_eq!((cqe.dw0(), &bytes[..5]), (5, &small[..]));
    assert!(bytes[5..].iter().all(|byte| *byte == 0xEE));

    assert_eq!(
        failed_status(pairs.store_with(b"a", &large, option::MUST_NOT_EXIST)),
        KEY_EXISTS
    );
    assert_eq!(
        failed_status(pairs.store_with(b"b", &small, option::MUST_EXIST)),
        KEY_DOES_NOT_EXIST
    );
    let options = option::MUST_NOT_EXIST | option::NO_COMPRESSION;
    pairs.store_with(b"b", &small, options).unwrap();
    pairs
        .store_with(b"a", &small[..2], option::MUST_EXIST)
        .unwrap();
    assert_eq!(pairs.retrieve(b"a", 64).unwrap(), (small[..2].to_vec(), 2));

    let all: [&[u8]; 4] = [b"0123456789abcdef", b"a", b"a\0", b"b"];
    assert_eq!(pairs.list(b"", 4096).unwrap(), all);
    assert_eq!(pairs.list(b"0123456789abcdef", 4096).unwrap(), all);
    assert_eq!(pairs.list(b"1", 4096).unwrap(), all[1..]);
    assert_eq!(pairs.list(b"a\0", 4096).unwrap(), all[2..]);
    assert_eq!(pairs.list(b"c", 4096).unwrap(), all[4..]);
    // In the list, a key of 16 bytes takes 20 bytes, a key of 1 byte takes 4 bytes, and the count takes 4 bytes.
    assert_eq!(pairs.list(b"", 27).unwrap(), all[..1]);
    assert_eq!(pairs.list(b"", 28).unwrap(), all[..2]);
    assert_eq!(pairs.list(b"", 4).unwrap(), all[..0]);
    let sqe = Sqe::key_value(kv::LIST, 1, b"b", 4096);
    let (_, bytes) = pairs.command_in(sqe, 4096, 0xEE).unwrap();
    assert_eq!(bytes[..8], [1, 0, 0, 0, 1, 0, b'b', 0]);
    assert!(bytes[8..].iter().all(|byte| *byte == 0xEE));

    pairs.delete(b"a").unwrap();
    assert!(!pairs.exists(b"a").unwrap());
    assert_eq!(pairs.list(b"", 4096).unwrap().len(), 3);
}

#[test]
fn commands_do_what_they_say_in_memory() {
    check_all_commands(&host(DRIVE));
}

#[test]
fn commands_do_what_they_say_in_a_file() {
    let (_file, host) = file_host();
    check_all_commands(&host);
}

/// Sends invalid commands and checks their status codes. Another guest's keys must be unchanged.
fn check_hostile_commands(host: &Host) {
    let machines = [0, 1].map(|index| host.machine(&Setup::nth(index)));
    let (_quiet, mut quiet) = attach(&machines[1]);
    for number in 0..20_u64 {
        let key = number.to_be_bytes();
        quiet.store(&key, &value(number, 1000)).unwrap();
    }
    let (_controller, mut pairs) = attach(&machines[0]);
    assert!(pairs.list(b"", 4096).unwrap().is_empty());
    assert_eq!(
        failed_status(pairs.retrieve(&7_u64.to_be_bytes(), 4096)),
        KEY_DOES_NOT_EXIST
    );
    pairs.store(b"mine", b"value").unwrap();

    let queue = &mut pairs.queue;
    let page = machines[0].memory.alloc(4096).unwrap();
    let data = DataPointer::prp(page.gpa(), 0);
    let with_length = |opcode: u8, length: u32, size: u32| {
        let sqe = Sqe::key_value(opcode, 1, b"mine", size).with_data(data);
        sqe.with_cdw(11, length)
    };
    // Invalid key lengths. Only List accepts length 0, which means the first key.
    for opcode in [kv::STORE, kv::RETRIEVE, kv::DELETE, kv::EXIST, kv::LIST] {
        for length in [17, 32, 255] {
            let code = status(queue, with_length(opcode, length, 64));
            assert_eq!(code, INVALID_KEY_SIZE, "{opcode:#x}: {length}");
        }
        if opcode != kv::LIST {
            assert_eq!(status(queue, with_length(opcode, 0, 64)), INVALID_KEY_SIZE);
        }
    }
    // Invalid value sizes.
    for size in [(1 << 20) + 1, u32::MAX] {
        let code = status(queue, with_length(kv::STORE, 4, size));
        assert_eq!(code, INVALID_VALUE_SIZE, "{size}");
        for opcode in [kv::RETRIEVE, kv::LIST] {
            let code = status(queue, with_length(opcode, 4, size));
            assert_eq!(code, INVALID_FIELD, "{size}");
        }
    }
    for size in 0..4 {
        let code = status(queue, with_length(kv::LIST, 4, size));
        assert_eq!(code, INVALID_FIELD, "a list without room for its count");
    }
    // Options that exclude each other.
    let both = option::MUST_EXIST | option::MUST_NOT_EXIST;
    let sqe = with_length(kv::STORE, 4, 64);
    let sqe = sqe.with_cdw(11, sqe.cdw(11) | both);
    assert_eq!(status(queue, sqe), INVALID_FIELD);
    // Data pointers without memory, and pointers that are invalid for PRPs.
    for opcode in [kv::STORE, kv::RETRIEVE, kv::LIST] {
        for (prp1, prp2, size, expected) in [
            (UNMAPPED_ADDRESS, 0, 64, DATA_TRANSFER_ERROR),
            (LOW - 4096, 0, 64, DATA_TRANSFER_ERROR),
            (HIGH - 4, 0, 64, DATA_TRANSFER_ERROR),
            (u64::MAX - 3, 0, 64, DATA_TRANSFER_ERROR),
            (page.gpa() + 1, 0, 64, PRP_OFFSET_INVALID),
            (page.gpa(), UNMAPPED_ADDRESS, 8192, DATA_TRANSFER_ERROR),
            (page.gpa(), page.gpa() + 8, 8192, PRP_OFFSET_INVALID),
            (page.gpa(), UNMAPPED_ADDRESS, 65_536, DATA_TRANSFER_ERROR),
        ] {
            let sqe = Sqe::key_value(opcode, 1, b"mine", size);
            let code = status(queue, sqe.with_data(DataPointer::prp(prp1, prp2)));
            assert_eq!(code, expected, "{opcode:#x}: {prp1:#x}, {prp2:#x}");
        }
    }
    // Commands of other command sets, and invalid namespaces.
    for opcode in [
        io::WRITE_UNCORRECTABLE,
        io::COMPARE,
        io::COPY,
        0x79,
        0x7D,
        0xC1,
    ] {
        let sqe = Sqe::key_value(opcode, 1, b"mine", 64).with_data(data);
        assert_eq!(status(queue, sqe), INVALID_OPCODE, "{opcode:#x}");
    }
    for opcode in [kv::STORE, kv::RETRIEVE, kv::DELETE, kv::EXIST, kv::LIST] {
        for nsid in [0, 2, u32::MAX] {
            let sqe = Sqe::key_value(opcode, nsid, b"mine", 64).with_data(data);
            assert_eq!(status(queue, sqe), INVALID_NAMESPACE, "{opcode:#x}");
        }
    }
    assert_eq!(pairs.retrieve(b"mine", 64).unwrap().0, b"value");
    assert_eq!(pairs.list(b"", 4096).unwrap(), [b"mine"]);

    for number in 0..20_u64 {
        let found = quiet.retrieve(&number.to_be_bytes(), 1000).unwrap();
        assert!(found == (value(number, 1000), 1000));
    }
    assert_eq!(quiet.list(b"", 4096).unwrap().len(), 20);
}

#[test]
fn hostile_commands_in_memory() {
    check_hostile_commands(&host(DRIVE));
}

#[test]
fn hostile_commands_in_a_file() {
    let (_file, host) = file_host();
    check_hostile_commands(&host);
}

/// A guest that fills its lease gets an error, does not affect other guests, and can free space again.
fn check_full_lease(host: &Host) {
    let setup = |index: u64| Setup {
        start: index * LEASE,
        length: 64 << 10,
        ..Setup::default()
    };
    let machines = [0, 1].map(|index| host.machine(&setup(index)));
    let (_controller, mut pairs) = attach(&machines[0]);
    let (_other, mut other) = attach(&machines[1]);
    // A pair occupies 64 bytes plus the value.
    let data = value(3, 4096 - 64);
    for number in 0..16_u8 {
        pairs.store(&[number], &data).unwrap();
    }
    assert_eq!(
        failed_status(pairs.store(b"one more", &[])),
        CAPACITY_EXCEEDED
    );
    assert_eq!(
        failed_status(pairs.store(&[3], &value(4, 4096 - 63))),
        CAPACITY_EXCEEDED
    );
    assert_eq!(pairs.retrieve(&[3], 4096).unwrap().0, data);
    other.store(b"one more", &data).unwrap();
    pairs.store(&[3], &data[..1024]).unwrap();
    pairs.store(b"one more", &data[..1024]).unwrap();
    pairs.delete(&[4]).unwrap();
    pairs.store(&[3], &data).unwrap();
    assert_eq!(pairs.list(b"", 4096).unwrap().len(), 16);
}

#[test]
fn a_full_lease_in_memory() {
    check_full_lease(&host(DRIVE));
}

#[test]
fn a_full_lease_in_a_file() {
    let (_file, host) = file_host();
    check_full_lease(&host);
}

/// Submits commands together, and waits until all have succeeded.
fn run_all(pairs: &mut KeyValues, commands: &[Sqe]) {
    let cids: Vec<u16> = commands
        .iter()
        .map(|sqe| pairs.queue.submit(*sqe).unwrap())
        .collect();
    for cqe in pairs.queue.drain(&cids, HANG).unwrap() {
        assert_eq!(cqe.status().code(), SUCCESS);
    }
}

#[test]
fn a_queue_accepts_more_commands_than_its_store_executes() {
    let (_file, host) = file_host();
    let machine = host.machine(&Setup::from_start(2 * LEASE));
    let (_controller, mut pairs) = attach(&machine);
    const LEN: usize = 1 << 20;
    let buffers: Vec<_> = (0..20_u64)
        .map(|number| {
            let data = machine.memory.alloc(LEN).unwrap();
            data.write(0, &value(number, LEN));
            let prepared = prp::buffer(&data, 0, LEN).unwrap();
            (data, prepared)
        })
        .collect();
    let commands = |opcode: u8| -> Vec<Sqe> {
        (0..20_u64)
            .zip(&buffers)
            .map(|(number, (_, prepared))| {
                Sqe::key_value(opcode, 1, &number.to_be_bytes(), LEN as u32)
                    .with_data(prepared.pointer)
            })
            .collect()
    };
    run_all(&mut pairs, &commands(kv::STORE));
    for (data, _) in &buffers {
        data.fill(0);
    }
    run_all(&mut pairs, &commands(kv::RETRIEVE));
    for (number, (data, _)) in (0..).zip(&buffers) {
        assert!(data.to_vec(0, LEN) == value(number, LEN));
    }
}

fn store(key: &[u8], value: Vec<u8>, options: u32) -> Operation {
    Operation {
        opcode: kv::STORE,
        key: key.to_vec(),
        options,
        value,
    }
}

fn on_key(opcode: u8, key: &[u8]) -> Operation {
    Operation {
        opcode,
        ..store(key, Vec::new(), 0)
    }
}

#[test]
fn operations_of_a_batch_are_carried_out_in_their_order_and_each_has_its_status() {
    let (_file, in_file) = file_host();
    for host in [host(DRIVE), in_file] {
        let machine = host.machine(&Setup::nth(1));
        let (mut controller, mut pairs) = attach(&machine);
        let found = pairs.batch(&[
            store(b"a", value(1, 9000), option::MUST_NOT_EXIST),
            store(b"a", value(2, 10), option::MUST_NOT_EXIST),
            store(b"b", value(3, 0), 0),
            on_key(kv::EXIST, b"b"),
            on_key(kv::DELETE, b"b"),
            on_key(kv::EXIST, b"b"),
            store(b"c", value(4, 70), option::MUST_EXIST),
            store(b"0123456789abcdef", value(5, 70), 0),
        ]);
        use step::{DONE, KEY_DOES_NOT_EXIST, KEY_EXISTS};
        let expected = [
            DONE,
            KEY_EXISTS,
            DONE,
            DONE,
            DONE,
            KEY_DOES_NOT_EXIST,
            KEY_DOES_NOT_EXIST,
            DONE,
        ];
        assert_eq!(found.unwrap(), expected);
        assert_eq!(pairs.retrieve(b"a", 9000).unwrap().0, value(1, 9000));
        let keys = [&b"0123456789abcdef"[..], b"a"];
        assert_eq!(pairs.list(b"", 4096).unwrap(), keys);
        let namespace = KeyValues::namespace(&mut controller, 1).unwrap();
        assert_eq!(namespace.used, 64 + 9024 + 64 + 128);
        // An error of one operation does not affect the others.
        let found = pairs.batch(&[
            on_key(kv::DELETE, b""),
            on_key(kv::RETRIEVE, b"a"),
            store(
                b"d",
                value(1, 1),
                option::MUST_EXIST | option::MUST_NOT_EXIST,
            ),
            on_key(kv::EXIST, b"a"),
        ]);
        let expected = [step::INVALID_KEY_SIZE, step::INVALID, step::INVALID, DONE];
        assert_eq!(found.unwrap(), expected);
    }
}

#[test]
fn an_invalid_batch_changes_nothing() {
    let host = host(DRIVE);
    let machine = host.machine(&Setup::nth(1));
    let (_controller, mut pairs) = attach(&machine);
    let data = machine.memory.alloc(8192).unwrap();
    let pointer = prp::buffer(&data, 0, 4096).unwrap().pointer;
    let whole = batch_data(&[store(b"a", value(1, 100), 0), store(b"b", value(1, 100), 0)]);
    let mut status = |bytes: &[u8], count, length| {
        data.write(0, bytes);
        let sqe = Sqe::batch(1, count, length).with_data(pointer);
        status(&mut pairs.queue, sqe)
    };
    for (count, length) in [
        (0, 264),
        (9, 4096),
        (255, 4096),
        (2, 0),
        (2, 63),
        // The second value ends beyond the data.
        (2, 263),
        (2, 2 << 20),
    ] {
        assert_eq!(
            status(&whole, count, length),
            INVALID_FIELD,
            "{count} {length}"
        );
    }
    // Two overlapping values, which would take more than the data.
    let mut shared = whole.clone();
    for operation in [0, 32] {
        shared[operation + 4..operation + 8].copy_from_slice(&200_u32.to_le_bytes());
        shared[operation + 24..operation + 28].copy_from_slice(&64_u32.to_le_bytes());
    }
    assert_eq!(status(&shared, 2, 264), INVALID_FIELD);
    let nowhere = Sqe::batch(1, 2, 264).with_data(DataPointer::prp(UNMAPPED_ADDRESS, 0));
    assert_eq!(
        pairs
            .queue
            .submit_and_wait(nowhere, HANG)
            .unwrap()
            .status()
            .code(),
        DATA_TRANSFER_ERROR
    );
    assert!(pairs.list(b"", 4096).unwrap().is_empty());
    let sqe = Sqe::batch(1, 2, 264).with_data(pointer);
    data.write(0, &whole);
    pairs.command(sqe).unwrap();
    assert_eq!(pairs.list(b"", 4096).unwrap(), [b"a", b"b"]);
}

#[test]
fn no_operation_completes_before_its_time() {
    // As in `timed.rs`: longer than a poller spins, less the maximum slew of the system clock.
    const LATENCY_MIN: Duration = Duration::from_micros(9_990);
    let (_file, in_file) = file_host_with(&timed("10ms"));
    for host in [host_with(DRIVE, &timed("10ms")), in_file] {
        let machine = host.machine(&Setup::nth(0));
        let (_controller, mut pairs) = attach(&machine);
        let mut operation = |kind: u8| match kind {
            0 => pairs.store(b"a", &value(1, 5000)).unwrap(),
            // The completion reports the value's size although the command was delayed.
            1 => assert_eq!(pairs.retrieve(b"a", 100).unwrap().1, 5000),
            2 => assert!(pairs.exists(b"a").unwrap()),
            3 => assert_eq!(pairs.list(b"", 64).unwrap(), [b"a"]),
            4 => pairs.delete(b"a").unwrap(),
            // A lookup of an absent key takes the latency too.
            _ => assert_eq!(failed_status(pairs.delete(b"a")), KEY_DOES_NOT_EXIST),
        };
        for kind in 0..6 {
            let begin = Instant::now();
            operation(kind);
            let taken = begin.elapsed();
            assert!(taken >= LATENCY_MIN, "operation {kind}: {taken:?}");
        }
    }
}

#[test]
fn a_reset_waits_for_no_operation_that_waits_for_its_time() {
    let (_file, in_file) = file_host_with(&timed("60s"));
    for host in [host_with(DRIVE, &timed("60s")), in_file] {
        let machine = host.machine(&Setup::nth(0));
        let mut controller = attach_with(&machine, CC_CSS_ALL, DoorbellMode::Shadow);
        for _ in 0..3 {
            let mut pairs = open(&mut controller, 1);
            for key in 0..20 {
                let sqe = Sqe::key_value(kv::EXIST, 1, &[key], 0);
                pairs.queue.submit(sqe).unwrap();
            }
            // As on a real drive, the reset drops commands in flight without delay.
            controller.disable().unwrap();
            controller.reset().unwrap();
            controller.set_number_of_queues(4).unwrap();
        }
    }
}

#[test]
fn completed_stores_survive_reopening() {
    let (file, host) = file_host();
    let fill = |index: u64, base: u64| {
        let machine = host.machine(&Setup::nth(index));
        let (_controller, mut pairs) = attach(&machine);
        for number in base..base + 10 {
            let key = number.to_be_bytes();
            pairs
                .store(&key, &value(number, number as usize * 100))
                .unwrap();
        }
        pairs.delete(&base.to_be_bytes()).unwrap();
    };
    fill(0, 0);
    fill(1, 5);
    drop(host);
    let host = host_in(file.path());
    assert_eq!(host.drive.blocks() << host.drive.lba_shift(), 2 * LEASE);
    for (index, base) in [(0, 0), (1, 5)] {
        let machine = host.machine(&Setup::nth(index));
        let (mut controller, mut pairs) = attach(&machine);
        let mut used = 0;
        for number in base + 1..base + 10 {
            let found = pairs.retrieve(&u64::to_be_bytes(number), 4096).unwrap();
            let len = number as usize * 100;
            assert!(found == (value(number, len), len as u32));
            used += 64 + (len as u64).next_multiple_of(64);
        }
        assert_eq!(pairs.list(b"", 4096).unwrap().len(), 9);
        let namespace = KeyValues::namespace(&mut controller, 1).unwrap();
        assert_eq!(namespace.used, used);
    }
}

#[test]
fn a_file_that_is_opened_again_is_read_from_its_disk() {
    let (file, host) = file_host();
    let machine = host.machine(&Setup::nth(0));
    let (controller, mut pairs) = attach(&machine);
    for key in 0..16 {
        pairs.store(&[key], &value(key.into(), 400_000)).unwrap();
    }
    let cached = || file_drive::cached(file.as_file()).map(|[pages, ..]| pages);
    if !file_drive::has_dirty_page_counts() {
        not_checked(
            "temporary files lie in memory, or the kernel does not tell what it has of them",
        );
        return;
    }
    let before = cached().unwrap();
    assert!(before > 1000, "{before} pages");
    drop((pairs, controller));
    drop((machine, host));
    // If the version is unknown, only the header is read.
    file.as_file().write_all_at(&[0xFF], 8).unwrap();
    file.as_file().sync_data().unwrap();
    let path = DrivePath::File(file.path().to_owned());
    drives::open(&path, options(PROFILE)).unwrap_err();
    let after = cached().unwrap();
    assert!(after < before / 4, "{after} of {before} pages");
}

#[test]
fn a_guest_goes_on_with_its_keys_in_another_function() {
    let (_file, host) = file_host();
    let setup = Setup::nth(1);
    let machine = host.machine(&setup);
    let (_controller, mut pairs) = attach(&machine);
    pairs.store(b"before", &value(1, 5000)).unwrap();
    let suspended = machine.suspend();
    let machine = host.restore(&suspended, &setup).unwrap();
    machine.function().resume();
    pairs.queue.move_to(&machine.bar()).unwrap();
    assert_eq!(pairs.retrieve(b"before", 5000).unwrap().0, value(1, 5000));
    pairs.store(b"after", b"").unwrap();
    assert_eq!(pairs.list(b"", 64).unwrap(), [&b"after"[..], b"before"]);
}

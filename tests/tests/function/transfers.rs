//! Maximum data transfer size (`mdts=`; NVMe Base 2.0, Figure 275, MDTS).

use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::prp;
use nvme_mpt_tests::rng;
use nvme_mpt_tests::status::{INVALID_FIELD, SUCCESS};

use crate::common::bystander::Bystander;
use crate::common::{HIGH, Host, LOW, Setup, queue_pair, status};

const BLOCK: usize = 512;

/// Returns a setup with enough memory for large buffers.
fn setup(mdts: &'static str) -> Setup {
    Setup {
        mdts: Some(mdts),
        regions: vec![(LOW, 32 << 20), (HIGH, 16 << 20)],
        ..Setup::nth(0)
    }
}

/// Checks transfers up to the limit and beyond, with buffers that start at a page and within a page.
fn check(host: &Host, mdts: &'static str, bytes: usize) {
    let machine = host.machine(&setup(mdts));
    let mut controller = machine.attach();
    let identity = controller.identify_controller().unwrap();
    assert_eq!(identity.max_transfer(), bytes);
    let mut queue = queue_pair(&mut controller, 1, 16);
    let buffer = machine.memory.alloc(bytes + 2 * 4096).unwrap();
    let mut expected = vec![0; bytes];
    for (seed, offset) in [(1, 0), (2, 4), (3, 4092)] {
        let blocks = (bytes / BLOCK) as u32;
        rng::fill_blocks(&mut expected, seed, 8, BLOCK);
        buffer.write(offset, &expected);
        let data = prp::buffer(&buffer, offset, bytes).unwrap();
        let write = Sqe::write(1, 8, blocks).with_data(data.pointer);
        assert_eq!(status(&mut queue, write), SUCCESS, "{mdts} {offset}");
        buffer.fill(0xEE);
        let read = Sqe::read(1, 8, blocks).with_data(data.pointer);
        assert_eq!(status(&mut queue, read), SUCCESS, "{mdts} {offset}");
        let mut found = vec![0; bytes];
        buffer.read(offset, &mut found);
        assert!(found == expected, "{mdts} {offset}: other data");
        let compare = Sqe::compare(1, 8, blocks).with_data(data.pointer);
        assert_eq!(status(&mut queue, compare), SUCCESS, "{mdts} {offset}");
        // One more block is refused before the data pointer is examined.
        let beyond = Sqe::read(1, 8, blocks + 1).with_data(data.pointer);
        assert_eq!(status(&mut queue, beyond), INVALID_FIELD, "{mdts}");
    }
    drop(machine);
}

#[test]
fn transfers_are_as_large_as_the_operator_lets_them_be() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(32 << 20).unwrap();
    for host in [
        Host::new("memory:32M", 512),
        Host::of_file(file.path(), 512),
    ] {
        let bystander = Bystander::start(&host, &Setup::nth(1));
        for (mdts, bytes) in [
            ("8K", 8 << 10),
            ("64K", 64 << 10),
            ("1M", 1 << 20),
            ("2M", 2 << 20),
        ] {
            check(&host, mdts, bytes);
        }
        bystander.finish();
    }
}

#[test]
fn sgls_are_offered_up_to_the_usual_limit() {
    let host = Host::new("memory:16M", 512);
    for (mdts, offered) in [("8K", true), ("1M", true), ("2M", false)] {
        let machine = host.machine(&setup(mdts));
        assert_eq!(
            machine.function().facts().limits.sgl_descriptors_max > 0,
            offered
        );
        let mut controller = machine.attach();
        let identity = controller.identify_controller().unwrap();
        assert_eq!(identity.sgls & 0b11 != 0, offered, "{mdts}");
    }
}

#[test]
fn a_snapshot_keeps_its_limit() {
    let host = Host::new("memory:16M", 512);
    let machine = host.machine(&setup("128K"));
    let promised = machine.function().facts().limits.mdts;
    let suspended = machine.suspend();
    let error = host
        .restore(&suspended, &setup("64K"))
        .err()
        .expect("refused");
    assert!(error.to_string().contains("MDTS"), "{error}");
    // A lease that supports more keeps the promise.
    for other in ["128K", "1M"] {
        let machine = host.restore(&suspended, &setup(other)).unwrap();
        machine.function().resume();
        assert_eq!(machine.function().facts().limits.mdts, promised, "{other}");
    }
}

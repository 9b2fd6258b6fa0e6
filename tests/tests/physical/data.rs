//! Random commands on the complete data path, compared with a model of the namespace. Commands are split, and guests share
//! queue pairs.

use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::disk::{Disk, Transfer};
use nvme_mpt_tests::drive::{DoorbellBufferUse, NamespaceOptions, ONCS_ALL, Options};
use nvme_mpt_tests::identify::ONCS_COPY;
use nvme_mpt_tests::model::{Limits, Model, Op};
use nvme_mpt_tests::prp;
use nvme_mpt_tests::rng::{self, Rng};
use nvme_mpt_tests::status::{INVALID_FIELD, SUCCESS};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use crate::common::{Host, LEASE, LONG, Setup, queue_pair, status};
use crate::load::Load;

/// Allocation unit of a lease by size, in bytes.
const UNIT: u64 = 1 << 20;

/// Parameters of the drive and of its use.
#[derive(Clone, Copy, Debug)]
struct Variant {
    lba_size: u32,
    mdts: u8,
    queue_pairs: u16,
    entries_max: u32,
    doorbell_buffer: DoorbellBufferUse,
    /// Seed for a random order of completions. `None` keeps the order.
    seed: Option<u64>,
    parallel: usize,
    /// True for a lease of several extents, with other leases between them.
    has_extents: bool,
    poll: &'static str,
    /// Size of the largest transfer in bytes.
    transfer: u32,
}

fn variants() -> impl Strategy<Value = Variant> {
    let select = |values: &[u32]| prop::sample::select(values.to_vec());
    (
        (
            select(&[512, 4096]),
            select(&[0, 1, 2, 5, 8]),
            select(&[1, 2, 8]),
        ),
        (
            select(&[2, 5, 64, 1024]),
            any::<Option<u64>>(),
            select(&[1, 4, 256]),
            any::<bool>(),
        ),
        prop::sample::select(vec![
            DoorbellBufferUse::None,
            DoorbellBufferUse::Watched,
            DoorbellBufferUse::EventIdx,
        ]),
        prop::sample::select(vec!["shared", "dedicated", "shared:busy", "shared:event"]),
        select(&[32 << 10, 32 << 10, 1 << 20]),
    )
        .prop_map(|(drive, more, doorbell_buffer, poll, transfer)| Variant {
            lba_size: drive.0,
            mdts: drive.1 as u8,
            queue_pairs: drive.2 as u16,
            entries_max: more.0,
            seed: more.1,
            parallel: more.2 as usize,
            has_extents: more.3,
            doorbell_buffer,
            poll,
            transfer,
        })
}

/// Converts a random number to a data layout.
fn layout(number: u32, disk_takes_sgl: bool) -> Transfer {
    match number % 4 {
        0 => Transfer::Prp { offset: 0 },
        3 if disk_takes_sgl => Transfer::Sgl {
            piece: 12_288,
            per_segment: 4 + (number / 16 % 100) as usize,
        },
        _ => Transfer::Prp {
            offset: 4 * (number / 16 % 1024) as usize,
        },
    }
}

fn run(variant: Variant, steps: &[([u64; 4], u32)]) -> Result<(), TestCaseError> {
    let options = Options {
        namespaces: vec![NamespaceOptions::new(1, 3 * LEASE, variant.lba_size)],
        mdts: variant.mdts,
        queue_pairs: variant.queue_pairs,
        entries_max: variant.entries_max,
        doorbell_buffer: variant.doorbell_buffer,
        seed: variant.seed,
        parallel: variant.parallel,
        ..Options::default()
    };
    let host = Host::with(options, LONG);
    // A neighbour that uses the same queue pairs. Its commands must not be confused with this guest's.
    let neighbour = Load::start(&host, &Setup::nth(0).poll(variant.poll), 1, 6);
    let (setup, between) = match variant.has_extents {
        true => (
            Setup::default().with_allocation_unit(UNIT),
            LEASE..3 * LEASE,
        ),
        false => (Setup::nth(1), 0..0),
    };
    let others = host.lease_ranges(between.step_by(2 * UNIT as usize).map(|at| (at, UNIT)));
    let machine = host.machine(&setup.poll(variant.poll));
    let (controller, mut disk) = machine.disk();
    let sgl = controller.identity().unwrap().sgl();
    let limits = Limits::for_disk(&disk, variant.transfer / variant.lba_size);
    let mut model = Model::new(limits, true);
    let fail = |mismatch| TestCaseError::fail(format!("{variant:?}: {mismatch}"));
    for &(words, number) in steps {
        disk.transfer = layout(number, sgl);
        model
            .step(&mut disk, &Op::choose(words, &limits))
            .map_err(fail)?;
    }
    disk.transfer = Transfer::Prp { offset: 0 };
    model.verify_all(&mut disk).map_err(fail)?;
    neighbour.finish_undisturbed();
    drop((disk, controller, machine, others));
    host.finish();
    Ok(())
}

proptest! {
    // Each case starts a drive and executes dozens of commands.
    #![proptest_config(ProptestConfig { cases: 16, max_shrink_iters: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn commands_do_what_the_model_says(
        variant in variants(),
        steps in prop::collection::vec((any::<[u64; 4]>(), any::<u32>()), 1..60),
    ) {
        run(variant, &steps)?;
    }
}

#[test]
fn data_lies_at_the_leases_blocks_on_the_drive() {
    let options = Options {
        namespaces: vec![NamespaceOptions::new(1, 4 * LEASE, 512)],
        mdts: 3,
        ..Options::default()
    };
    let host = Host::with(options, LONG);
    let machine = host.machine(&Setup::nth(2));
    let (_controller, mut disk) = machine.disk();
    let bytes: Vec<u8> = (0..1 << 20).map(|at| (at / 5) as u8).collect();
    disk.transfer = Transfer::Prp { offset: 8 };
    disk.write(10, &bytes).unwrap();
    let first = 2 * LEASE / 512;
    assert!(host.model.peek(1, first + 10, 2048) == bytes);
    let neighbours = [
        host.model.peek(1, 0, first + 10),
        host.model.peek(1, first + 2058, 8),
    ];
    assert!(neighbours.concat().iter().all(|byte| *byte == 0));
    host.model.poke(1, (2 * LEASE) as usize, &[0xAB; 512]);
    assert_eq!(disk.read(0, 1).unwrap(), [0xAB; 512]);
    drop((disk, _controller, machine));
    host.finish();
}

/// Writes and reads the maximum transfer size, from buffers that start at a page and within a page. One more block is refused.
fn transfer(host: &Host, setup: &Setup, most: usize) {
    let machine = host.machine(setup);
    let mut controller = machine.attach();
    let identity = controller.identify_controller().unwrap();
    assert_eq!(identity.max_transfer(), most);
    let mut queue = queue_pair(&mut controller, 1, 16);
    let buffer = machine.memory.alloc(most + 8192).unwrap();
    let blocks = (most / 512) as u32;
    let mut expected = vec![0; most];
    for (seed, offset) in [(1, 0), (2, 4092)] {
        rng::fill_blocks(&mut expected, seed, 8, 512);
        buffer.write(offset, &expected);
        let data = prp::buffer(&buffer, offset, most).unwrap();
        let write = Sqe::write(1, 8, blocks).with_data(data.pointer);
        assert_eq!(status(&mut queue, write), SUCCESS, "{most} {offset}");
        buffer.fill(0xEE);
        let read = Sqe::read(1, 8, blocks).with_data(data.pointer);
        assert_eq!(status(&mut queue, read), SUCCESS, "{most} {offset}");
        let mut found = vec![0; most];
        buffer.read(offset, &mut found);
        assert!(found == expected, "{most} {offset}: other data");
        let beyond = Sqe::read(1, 8, blocks + 1).with_data(data.pointer);
        assert_eq!(status(&mut queue, beyond), INVALID_FIELD, "{most}");
    }
}

#[test]
fn the_operator_limits_transfers_whatever_the_drive_takes_at_once() {
    for mdts in [0, 1, 3, 8] {
        let options = Options {
            mdts,
            namespaces: vec![NamespaceOptions::new(1, 4 * LEASE, 512)],
            ..Options::default()
        };
        let host = Host::with(options, LONG);
        let neighbour = Load::start(&host, &Setup::nth(0), 1, 6);
        let limits = [("8K", 8 << 10), ("128K", 128 << 10), ("1M", 1 << 20)];
        for (nth, (limit, most)) in (1..).zip(limits) {
            let setup = Setup {
                mdts: Some(limit),
                ..Setup::nth(nth)
            };
            transfer(&host, &setup, most);
        }
        neighbour.finish_undisturbed();
        host.finish();
    }
}

#[test]
fn guests_on_few_queue_pairs_have_their_own_data() {
    for (queue_pairs, mdts, entries_max) in [(1, 0, 1024), (1, 3, 8), (2, 5, 64)] {
        let options = Options {
            queue_pairs,
            mdts,
            entries_max,
            namespaces: vec![NamespaceOptions::new(1, 4 * LEASE, 512)],
            ..Options::default()
        };
        let host = Host::with(options, LONG);
        let loads: Vec<Load> = (0..4)
            .map(|nth| Load::start(&host, &Setup::nth(nth), 2, 16))
            .collect();
        let pairs = host.drive.controller().queue_pairs().unwrap();
        assert_eq!((pairs.shared, pairs.total), (queue_pairs, queue_pairs));
        for load in &loads {
            load.wait_for_progress();
        }
        for load in loads {
            load.finish_undisturbed();
        }
        host.finish();
    }
}

#[test]
fn drives_without_some_commands_still_agree_with_the_model() {
    let options = Options {
        oncs: ONCS_ALL & !ONCS_COPY,
        no_data_limit: 2,
        ..Options::default()
    };
    let host = Host::with(options, LONG);
    let machine = host.machine(&Setup::nth(0));
    let (_controller, mut disk) = machine.disk();
    // Transfers of at most 16 KiB.
    let limits = Limits::for_disk(&disk, 32);
    let mut model = Model::new(limits, true);
    let mut rng = Rng::new(11);
    let mut step = |disk: &mut Disk| {
        let op = Op::choose(std::array::from_fn(|_| rng.next_u64()), &limits);
        if !matches!(op, Op::Copy { .. })
            && let Err(mismatch) = model.step(disk, &op)
        {
            panic!("{mismatch}");
        }
    };
    for _ in 0..1000 {
        step(&mut disk);
    }
    drop((disk, _controller, machine));
    host.finish();
}

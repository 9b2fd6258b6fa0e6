//! Random I/O commands with random data pointers, compared with a model, on all kinds of drives.

use nvme_mpt_tests::disk::Transfer;
use nvme_mpt_tests::doorbell::DoorbellMode;
use nvme_mpt_tests::model::{Limits, Model, Op};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use crate::common::{Host, LEASE, MODES, Setup, fit_poll_policy};

/// Parameters of a test run.
#[derive(Clone, Copy, Debug)]
struct Variant {
    file: bool,
    lba_size: u32,
    doorbells: DoorbellMode,
    /// True if the guest's pages are mapped one by one.
    scattered: bool,
    /// Bit mask of the drive's units that other leases have. If it is nonzero, the lease is by size.
    taken: u32,
    poll: &'static str,
    /// Size of the largest transfer in bytes.
    transfer: u32,
}

/// Allocation unit of a lease by size, in bytes. A drive has one unit for each bit of `taken`.
const UNIT: u64 = 1 << 20;

const SMALL: u32 = 32 << 10;
const LARGE: u32 = 1 << 20;

fn variants() -> impl Strategy<Value = Variant> {
    (
        any::<bool>(),
        prop::sample::select(vec![512, 4096]),
        prop::sample::select(MODES.to_vec()),
        prop::sample::select(vec![false, false, false, true]),
        prop_oneof![Just(0), any::<u32>().prop_map(spread)],
        prop::sample::select(vec!["shared", "dedicated", "shared:busy", "shared:event"]),
        prop::sample::select(vec![SMALL, SMALL, SMALL, LARGE]),
    )
        .prop_map(
            |(file, lba_size, doorbells, scattered, taken, poll, transfer)| Variant {
                file,
                lba_size,
                doorbells,
                scattered,
                taken,
                poll: fit_poll_policy(poll, doorbells),
                transfer,
            },
        )
}

/// Clears bits until at most half of the drive's units are taken, so that the lease has space.
fn spread(bits: u32) -> u32 {
    let mut taken = bits;
    while taken.count_ones() > 16 {
        taken &= taken - 1;
    }
    taken
}

/// Converts a random number to a data layout within the maximum number of descriptors.
fn layout(number: u32, largest: u32) -> Transfer {
    let choice = number / 4 % 4;
    match number % 4 {
        0 => Transfer::Prp { offset: 0 },
        1 => Transfer::Prp {
            offset: 4 * (number / 16 % 1024) as usize,
        },
        _ => Transfer::Sgl {
            piece: match (largest, choice) {
                (SMALL, 0) => 100,
                (SMALL, 1) => 512,
                (_, 2) => 4096,
                _ => 12_288,
            },
            per_segment: 4 + (number / 16 % 300) as usize,
        },
    }
}

fn run(variant: Variant, steps: &[([u64; 4], u32)]) -> Result<(), TestCaseError> {
    let file = tempfile::NamedTempFile::new()?;
    file.as_file().set_len(2 * LEASE)?;
    let host = match variant.file {
        true => Host::of_file(file.path(), variant.lba_size),
        false => Host::new("memory:32M", variant.lba_size),
    };
    let setup = Setup::nth(1)
        .doorbells(variant.doorbells)
        .poll(variant.poll);
    let setup = match variant.scattered {
        true => setup.scattered(),
        false => setup,
    };
    let units = (0..u32::BITS).filter(|unit| variant.taken >> unit & 1 != 0);
    let _others = host.lease_ranges(units.map(|unit| (u64::from(unit) * UNIT, UNIT)));
    let setup = match variant.taken {
        0 => setup,
        _ => setup.with_allocation_unit(UNIT),
    };
    let machine = host.machine(&setup);
    let (_controller, mut disk) = machine.disk();
    let limits = Limits::for_disk(&disk, variant.transfer / variant.lba_size);
    let mut model = Model::new(limits, true);
    let fail = |mismatch| TestCaseError::fail(format!("{variant:?}: {mismatch}"));
    for &(words, number) in steps {
        disk.transfer = layout(number, variant.transfer);
        model
            .step(&mut disk, &Op::choose(words, &limits))
            .map_err(fail)?;
    }
    disk.transfer = Transfer::Prp { offset: 0 };
    model.verify_all(&mut disk).map_err(fail)
}

proptest! {
    // Each case starts a function and executes dozens of commands.
    #![proptest_config(ProptestConfig { cases: 160, max_shrink_iters: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn commands_do_what_the_model_says(
        variant in variants(),
        steps in prop::collection::vec((any::<[u64; 4]>(), any::<u32>()), 1..60),
    ) {
        run(variant, &steps)?;
    }
}

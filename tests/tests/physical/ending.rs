//! Functions that end while the drive has commands of theirs: lease and memory stay until the last of
//! these commands has ended, and no further step of them begins.

use std::time::Duration;

use nvme_mpt::lease::{FormerData, LeaseState};
use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::controller::Controller;
use nvme_mpt_tests::drive::{HandQueue, NamespaceOptions, Options};
use nvme_mpt_tests::memory::DmaBuffer;
use nvme_mpt_tests::prp;
use nvme_mpt_tests::queue::QueuePair;
use nvme_mpt_tests::registers::{CSTS, CSTS_FATAL, CSTS_READY};

use crate::common::{Host, LEASE, Machine, Setup, pollers_look, queue_pair, remote, wait_for};

/// The drive may take as long as it likes: the test completes its commands.
const FOR_EVER: Duration = Duration::from_secs(24 * 3600);

/// Longest wait of a reset or an end, in all.
const DEADLINE: Duration = Duration::from_secs(30);

const CC: u64 = 0x14;

const QUEUE_PAIRS: u16 = 4;

/// Pages that the drive takes per command, as a power of two.
const MDTS: u8 = 1;
/// Entries of the drive's rings: it has one command less at a time.
const ENTRIES: u32 = 4;
const LEN: usize = 64 << 10;
/// Parts of a write of that length.
const PARTS: usize = LEN / (4096 << MDTS);

fn host() -> Host {
    let options = Options {
        // One more for flushes.
        queue_pairs: QUEUE_PAIRS + 1,
        mdts: MDTS,
        entries_max: ENTRIES,
        namespaces: vec![NamespaceOptions::new(1, 2 * LEASE, 512)],
        by_hand: true,
        ..Options::default()
    };
    Host::with(options, FOR_EVER)
}

/// Takes all commands that the host has sent.
fn take(hand: &mut HandQueue) -> Vec<Sqe> {
    std::iter::from_fn(|| hand.take()).collect()
}

/// The drive's end of a write in more parts than it takes at once.
struct Stuck {
    hand: HandQueue,
    /// The parts that the drive has.
    begun: Vec<Sqe>,
}

/// The guest's driver's part in such a write.
type Driver = (QueuePair, DmaBuffer, prp::Prepared);

/// Leaves a write at the drive, by a queue of its own.
fn begin(host: &Host, machine: &Machine, controller: &mut Controller, id: u16) -> (Stuck, Driver) {
    let mut queue = queue_pair(controller, id, 64);
    let mut hand = host.model.hand_queue(id).unwrap();
    let buffer = machine.memory.alloc(LEN).unwrap();
    let prepared = prp::buffer(&buffer, 0, LEN).unwrap();
    let write = Sqe::write(1, 0, (LEN / 512) as u32).with_data(prepared.pointer);
    assert!(queue.push(&write));
    queue.ring();
    let mut begun = Vec::new();
    wait_for("the first parts of the write", || {
        begun.extend(take(&mut hand));
        begun.len() == ENTRIES as usize - 1
    });
    assert!(begun.len() < PARTS, "some wait for their turn");
    (Stuck { hand, begun }, (queue, buffer, prepared))
}

impl Stuck {
    /// Completes what the drive has.
    fn complete(&mut self) {
        for sqe in self.begun.drain(..) {
            self.hand.post([0, u64::from(sqe.cid()) << 32]);
        }
    }

    #[track_caller]
    fn has_no_more(&mut self) {
        assert_eq!(take(&mut self.hand), [], "a further step began");
    }
}

#[test]
fn a_lease_lives_until_its_last_command_has_ended() {
    let host = host();
    let machine = host.machine(&Setup::nth(0));
    let mapped = host.model.model_iommu().mapped();
    let mut controller = machine.attach();
    let (mut stuck, driver) = begin(&host, &machine, &mut controller, 1);
    host.clock.skip_waits(true);
    drop((driver, controller, machine));
    pollers_look(&host);

    let next = || host.lease("next", &Setup::nth(0), FormerData::Kept);
    let error = next().expect_err("the drive has commands of the range");
    assert!(error.to_string().contains("ending"), "{error}");
    let [entry] = &host.ledger.list().unwrap()[..] else {
        panic!("one lease");
    };
    assert_eq!(entry.state, LeaseState::Ending);
    assert!(
        host.model.model_iommu().mapped() >= mapped,
        "the drive can reach the memory that its commands name"
    );

    stuck.complete();
    wait_for("the lease's end", || {
        stuck.has_no_more();
        next().is_ok()
    });
    stuck.has_no_more();
    host.finish();
}

#[test]
fn all_queues_of_a_reset_share_one_deadline() {
    let host = host();
    let machine = host.machine(&Setup::nth(0));
    let mut controller = machine.attach();
    let mut stuck = Vec::new();
    let mut drivers = Vec::new();
    for id in 1..=QUEUE_PAIRS {
        let (one, driver) = begin(&host, &machine, &mut controller, id);
        stuck.push(one);
        drivers.push(driver);
    }
    host.clock.skip_waits(true);
    let bar = machine.bar();
    bar.write32(CC, bar.read32(CC) & !1);
    let csts = bar.read32(CSTS);
    assert_ne!(csts & CSTS_FATAL, 0, "{csts:#x}");
    assert_ne!(csts & CSTS_READY, 0, "the reset is not complete: {csts:#x}");
    assert_eq!(host.clock.waited(), DEADLINE, "for {QUEUE_PAIRS} queues");
    pollers_look(&host);

    // Once the drive is done, the next reset succeeds.
    stuck.iter_mut().for_each(Stuck::complete);
    host.clock.skip_waits(false);
    bar.write32(CC, bar.read32(CC) | 1);
    bar.write32(CC, bar.read32(CC) & !1);
    assert_eq!(bar.read32(CSTS), 0);
    stuck.iter_mut().for_each(Stuck::has_no_more);
    // A server flushes the drive of a VMM that goes. Nobody plays a drive that answers here.
    if remote::is_chosen() {
        return;
    }
    drop((drivers, controller, bar, machine));
    host.lease("next", &Setup::nth(0), FormerData::Kept)
        .unwrap();
    host.finish();
}

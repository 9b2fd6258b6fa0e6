//! Entries of a queue pair, divided among leases with different weights. Shares are counted in commands that reach the drive.

use std::sync::Arc;

use super::super::{
    ClassLoad, DriveGovernor, DriveSurvey, LeaseShare, PRIORITY_CLASSES, VfioQueue, VfioQueuePair,
};
use super::drive::FakeDrive;
use super::{HostMemoryFixture, command, submit_at};
use nvme_guest::adaptive::{PolicyChoice, WINDOW_MAX};
use nvme_guest::rate_limit::LeaseWeight;
use nvme_mpt::host::{HostCompletion, HostQueue};
use nvme_mpt_memory::clock::{TickRate, Ticks};
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

/// Number of entries of the pair's rings.
const ENTRIES: u32 = 17;

/// Maximum number of commands that heavy queues can have in flight. Of the ring's entries, one is left to light queues, and one
/// distinguishes a full ring from an empty one.
const PLACES: usize = 15;

/// Number of commands that a loud queue has outstanding at any time.
const DEPTH: u16 = 32;

/// Number of the lowest bit, in the block address of a command, of the number of its queue.
const QUEUE: u32 = 32;

fn lease(weight: u16) -> Arc<LeaseShare> {
    let lease = LeaseShare::new(None);
    lease.set_weight(LeaseWeight::try_from(weight).expect("within bounds"));
    lease
}

struct Guest {
    queue: VfioQueue,
    lender: HostMemoryFixture,
    index: u64,
    opcode: NvmOpcode,
    blocks: u32,
    free: Vec<u16>,
}

impl Guest {
    fn new(pair: &VfioQueuePair, lease: &Arc<LeaseShare>, index: u64, depth: u16) -> Self {
        Self {
            queue: pair.join_lease(depth, 9, lease),
            lender: HostMemoryFixture::new(depth.into()),
            index,
            opcode: NvmOpcode::READ,
            blocks: 8,
            free: (0..depth).collect(),
        }
    }

    /// Reaps completions, and submits commands in all free slots.
    fn poll(&mut self, now: u64) {
        let free = &mut self.free;
        self.queue.reap_with_clock(
            || Ticks(now),
            |completion: HostCompletion| free.push(completion.slot),
        );
        let (opcode, lists) = (self.opcode, &mut self.lender.lists);
        let make = |slot| {
            let mut sqe = command(opcode, slot, self.index << QUEUE, self.blocks);
            if opcode == NvmOpcode::DATASET_MANAGEMENT {
                // Dataset Management that deallocates one range.
                let (list, iova) = lists.slot_list(slot);
                list[0] = u64::from(self.blocks) << 32;
                (sqe.dptr[0], sqe.cdw11, sqe.cdw12) = (iova.bits(), 1 << 2, 0);
                (sqe.cdw10, sqe.cdw13) = (0, self.index as u32);
            }
            sqe
        };
        let commands: Vec<Sqe> = free.drain(..).map(make).collect();
        if !commands.is_empty() {
            submit_at(&mut self.queue, &self.lender, &commands, Ticks(now));
        }
    }
}

/// Returns the number of the queue that submitted a command.
fn queue_of(sqe: &Sqe) -> usize {
    match NvmOpcode(sqe.opcode()) {
        NvmOpcode::DATASET_MANAGEMENT => sqe.cdw13 as usize,
        _ => (sqe.cdw10_11() >> QUEUE) as usize,
    }
}

/// A drive that executes one command at a time, with guests that have one queue each.
struct World {
    drive: FakeDrive,
    pair: VfioQueuePair,
    guests: Vec<Guest>,
    now: u64,
}

impl World {
    fn new(guests: &[(&Arc<LeaseShare>, u16)]) -> Self {
        let (drive, pair) = FakeDrive::new(ENTRIES, u64::MAX, false);
        let guests = guests.iter().zip(0..);
        let guests = guests
            .map(|((lease, depth), index)| Guest::new(&pair, lease, index, *depth))
            .collect();
        Self {
            drive,
            pair,
            guests,
            now: 1,
        }
    }

    /// Polls all guests.
    fn poll(&mut self) {
        self.now += 1000;
        for guest in &mut self.guests {
            guest.poll(self.now);
        }
        self.drive.fetch();
    }

    /// Completes the oldest command in the drive. Returns the number of its queue.
    fn complete(&mut self) -> usize {
        let done = self.drive.complete(0, Status::SUCCESS);
        self.poll();
        queue_of(&done)
    }

    /// Completes `commands` commands. Returns how many of them each guest submitted.
    fn run(&mut self, commands: usize) -> Vec<usize> {
        let mut counts = vec![0; self.guests.len()];
        for _ in 0..commands {
            counts[self.complete()] += 1;
        }
        counts
    }

    /// Returns the number of a queue's commands that are in the drive.
    fn in_drive(&self, queue: usize) -> usize {
        let of_queue = |sqe: &&Sqe| queue_of(sqe) == queue;
        self.drive.commands.iter().filter(of_queue).count()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.pair.kill(Status::COMMAND_INTERRUPTED);
    }
}

/// Checks that the numbers of commands are proportional to the weights, except for as many commands as fit into the pair.
#[track_caller]
fn check(counts: &[usize], weights: &[usize]) {
    let (all, weight) = (counts.iter().sum::<usize>(), weights.iter().sum::<usize>());
    for (count, of) in counts.iter().zip(weights) {
        let due = all * of / weight;
        assert!(count.abs_diff(due) <= 4, "{counts:?}, by {weights:?}");
    }
}

#[test]
fn two_leases_get_commands_by_their_weights() {
    let leases = [lease(100), lease(300)];
    let mut world = World::new(&[(&leases[0], DEPTH), (&leases[1], DEPTH)]);
    world.poll();
    world.run(PLACES);
    check(&world.run(2000), &[100, 300]);
    let in_drive = [0, 1].map(|queue| world.in_drive(queue));
    assert_eq!(in_drive.iter().sum::<usize>(), PLACES);
    assert!(in_drive[0].abs_diff(PLACES / 4) <= 1, "{in_drive:?}");
}

#[test]
fn bytes_count_where_commands_differ() {
    let leases = [lease(100), lease(100)];
    let mut world = World::new(&[(&leases[0], DEPTH), (&leases[1], DEPTH)]);
    world.guests[1].blocks = 32;
    world.poll();
    world.run(PLACES);
    check(&world.run(2000), &[4, 1]);
}

/// Commands without data count by the size of their range, so 64 KiB of zeroes count more than 4 KiB of data.
#[test]
fn zeroes_and_deallocations_count_what_they_touch() {
    for opcode in [NvmOpcode::WRITE_ZEROES, NvmOpcode::DATASET_MANAGEMENT] {
        let leases = [lease(100), lease(100)];
        let mut world = World::new(&[(&leases[0], DEPTH), (&leases[1], DEPTH)]);
        (world.guests[1].opcode, world.guests[1].blocks) = (opcode, 128);
        world.poll();
        world.run(PLACES);
        check(&world.run(1700), &[16, 1]);
    }
}

/// A deallocation of a whole lease counts as at most the largest window. Otherwise the guest would wait until its neighbour has
/// transferred as many bytes.
#[test]
fn a_deallocation_counts_as_the_largest_window_at_most() {
    let leases = [lease(100), lease(100)];
    let mut world = World::new(&[(&leases[0], DEPTH), (&leases[1], DEPTH)]);
    (world.guests[1].opcode, world.guests[1].blocks) = (NvmOpcode::DATASET_MANAGEMENT, u32::MAX);
    world.poll();
    world.run(PLACES);
    let window = (WINDOW_MAX >> 12) as usize;
    check(&world.run(4 * (window + 1)), &[window, 1]);
}

#[test]
fn a_lease_of_four_queues_has_one_share() {
    let leases = [lease(100), lease(300)];
    let mut guests = vec![(&leases[0], DEPTH); 4];
    guests.push((&leases[1], DEPTH));
    let mut world = World::new(&guests);
    world.poll();
    world.run(PLACES);
    check(&world.run(2000), &[25, 25, 25, 25, 300]);
}

#[test]
fn a_weight_changes_while_commands_are_in_flight() {
    let leases = [lease(100), lease(300)];
    let mut world = World::new(&[(&leases[0], DEPTH), (&leases[1], DEPTH)]);
    world.poll();
    world.run(PLACES);
    for (weights, shares) in [([900, 300], [3, 1]), ([7, 7], [1, 1]), ([1, 9], [1, 9])] {
        for (lease, weight) in leases.iter().zip(weights) {
            lease.set_weight(LeaseWeight::try_from(weight).expect("within bounds"));
        }
        // The commands that are in the drive now were chosen by the old weights.
        world.run(PLACES);
        check(&world.run(1000), &shares);
    }
}

#[test]
fn unused_share_of_a_lease_goes_to_others() {
    let leases = [lease(1), lease(1000)];
    // A guest with one command of 64 KiB at a time: it is heavy, but uses less than its share.
    let mut world = World::new(&[(&leases[0], DEPTH), (&leases[1], 1)]);
    world.guests[1].blocks = 128;
    world.poll();
    let mut missing = 0;
    for _ in 0..500 {
        assert_eq!(world.drive.commands.len(), PLACES, "all places are used");
        missing = if world.in_drive(1) == 1 {
            0
        } else {
            missing + 1
        };
        assert!(missing <= 1, "the next place that is free is the other's");
        world.complete();
    }
}

#[test]
fn leases_come_and_go_while_others_wait() {
    let leases = [lease(100), lease(200), lease(300)];
    let mut world = World::new(&[(&leases[0], DEPTH), (&leases[1], DEPTH)]);
    world.poll();
    world.run(PLACES);
    check(&world.run(600), &[100, 200]);
    let guest = Guest::new(&world.pair, &leases[2], 2, DEPTH);
    world.guests.push(guest);
    world.poll();
    world.run(PLACES);
    check(&world.run(600), &[100, 200, 300]);
    // A queue is deleted while it has commands in flight and waiting commands. The waiting commands are never submitted.
    world.guests[1].queue.cut_short();
    let left = world.in_drive(1);
    world.guests[1].free.clear();
    let mut counts = vec![0; 3];
    for _ in 0..600 {
        let done = world.drive.complete(0, Status::SUCCESS);
        counts[queue_of(&done)] += 1;
        world.now += 1000;
        for index in [0, 2] {
            world.guests[index].poll(world.now);
        }
        world.drive.fetch();
    }
    assert_eq!(counts[1], left);
    let first = counts[0].abs_diff((600 - left) / 4);
    assert!(first <= PLACES, "{counts:?}");
    assert_eq!(world.in_drive(0) + world.in_drive(2), PLACES);
}

#[test]
fn a_reset_keeps_the_shares() {
    let leases = [lease(100), lease(300)];
    let mut world = World::new(&[(&leases[0], DEPTH), (&leases[1], DEPTH)]);
    world.poll();
    world.run(PLACES);
    for _ in 0..5 {
        world.pair.stop();
        world.pair.fail_in_flight(Status::COMMAND_INTERRUPTED);
        let doorbells = world.drive.restart();
        world.pair.restart(doorbells);
        // The interrupted commands are submitted again.
        world.poll();
        assert_eq!(world.drive.commands.len(), PLACES);
        check(&world.run(400), &[100, 300]);
    }
}

#[test]
fn a_queue_that_moves_takes_its_lease_along() {
    let leases = [lease(100), lease(300)];
    let mut world = World::new(&[(&leases[0], DEPTH)]);
    let (_other, first) = FakeDrive::new(ENTRIES, u64::MAX, false);
    let mover = Guest::new(&first, &leases[1], 1, DEPTH);
    world.guests.push(mover);
    assert!(first.migrate_one(&world.pair, |_| true));
    world.poll();
    world.run(PLACES);
    check(&world.run(1000), &[100, 300]);
}

#[test]
fn a_quiet_queue_finds_a_place_whatever_the_others_weigh() {
    let leases = [lease(1), lease(1000), lease(1000)];
    let guests = [(&leases[0], 1), (&leases[1], DEPTH), (&leases[2], DEPTH)];
    let mut world = World::new(&guests);
    // The loud queues submit before the quiet queue.
    world.guests[0].free.clear();
    world.poll();
    assert_eq!(world.drive.commands.len(), PLACES);
    world.guests[0].free.push(0);
    world.poll();
    let mut waits = Vec::new();
    for _ in 0..500 {
        assert_eq!(world.in_drive(0), 1, "it waits in front of the drive");
        let of_others = std::iter::repeat_with(|| world.complete()).take_while(|queue| *queue != 0);
        waits.push(of_others.count());
    }
    // Only the commands that were already in the drive are ahead of the quiet queue's command, not the backlog of the loud
    // queues.
    assert_eq!(waits[0], PLACES);
    // After some commands, the governor has reduced the window to one command.
    assert!(
        waits.iter().skip(100).all(|waited| *waited <= 1),
        "{waits:?}"
    );
}

/// Queues on other pairs have used up the lease's share. The queue still sends a command to the drive every 62 ms, so that a
/// command in a queue of 256 does not exceed the driver's timeout.
#[test]
fn a_queue_whose_lease_has_used_up_its_share_goes_on_slowly() {
    const MILLISECOND: u64 = 1_000_000;
    let governor = Arc::new(DriveGovernor::new(
        PolicyChoice::Adaptive,
        TickRate::NANOSECOND,
    ));
    let (mut drive, pair) = FakeDrive::governed(64, u64::MAX, false, governor.clone());
    let share = lease(100);
    let mut guest = Guest::new(&pair, &share, 0, DEPTH);
    let mut launched = Vec::new();
    for now in (1..1000).map(|step| step * MILLISECOND) {
        if now % (100 * MILLISECOND) == MILLISECOND {
            // The drive monitor finds that the lease has used up its share.
            governor.limit_by_weight(Ticks(now));
            share.set_byte_limit(Some(0));
        }
        guest.poll(now);
        let count = drive.fetch();
        launched.extend(std::iter::repeat_n(now / MILLISECOND, count));
        while !drive.commands.is_empty() {
            drive.complete(0, Status::SUCCESS);
        }
    }
    pair.kill(Status::COMMAND_INTERRUPTED);
    assert!((15..=16).contains(&launched.len()), "{launched:?}");
    let pauses = launched.windows(2).map(|two| two[1] - two[0]);
    let mut pauses = pauses.filter(|pause| !(62..=64).contains(pause));
    assert_eq!(pauses.next(), None, "{launched:?}");
}

/// Creates a pair that many leases share. All but one of them have used up their bytes. Returns the drive, the pair, the busy
/// guest that still has bytes, and the guests whose commands wait.
fn held_back_guests(
    shares: &[Arc<LeaseShare>],
    governor: &Arc<DriveGovernor>,
    now: u64,
) -> (FakeDrive, VfioQueuePair, Guest, Vec<Guest>) {
    let (drive, pair) = FakeDrive::governed(64, u64::MAX, false, governor.clone());
    let busy = Guest::new(&pair, &lease(100), 0, DEPTH);
    governor.limit_by_weight(Ticks(now));
    let others = shares.iter().zip(1..).map(|(share, index)| {
        share.set_byte_limit(Some(0));
        let mut guest = Guest::new(&pair, share, index, DEPTH);
        guest.poll(now);
        guest
    });
    let others = others.collect();
    (drive, pair, busy, others)
}

#[test]
fn a_poll_looks_at_no_user_that_is_held_back() {
    const HELD: usize = 48;
    const POLLS: u64 = 1000;
    let governor = Arc::new(DriveGovernor::new(
        PolicyChoice::Adaptive,
        TickRate::NANOSECOND,
    ));
    let shares = [(); HELD].map(|()| lease(100));
    let now = 1_000_000;
    let (mut drive, pair, mut busy, held) = held_back_guests(&shares, &governor, now);
    let mut completed = 0;
    // All polls are within the time before the first user that is held back is due.
    for now in (now..).step_by(100).take(POLLS as usize) {
        busy.poll(now);
        completed += drive.fetch() as u64;
        drive.complete(0, Status::SUCCESS);
    }
    let checks = pair.shared.lock().held_back_checks.get();
    let are_all_busy = drive.commands.iter().all(|sqe| queue_of(sqe) == 0);
    pair.kill(Status::COMMAND_INTERRUPTED);
    drop(held);
    assert!(are_all_busy && completed >= POLLS, "{completed}");
    assert!(
        checks <= completed + 2 * HELD as u64,
        "{checks} for {completed}"
    );
}

/// A user that is held back continues once its limit is removed, even if it does not poll and its neighbour keeps the pair
/// busy.
#[test]
fn a_user_that_is_held_back_goes_on_once_it_may() {
    let governor = Arc::new(DriveGovernor::new(
        PolicyChoice::Adaptive,
        TickRate::NANOSECOND,
    ));
    let shares = [lease(100), lease(100)];
    let now = 1_000_000;
    let (mut drive, pair, mut busy, held) = held_back_guests(&shares, &governor, now);
    let in_drive = |drive: &FakeDrive| {
        [0, 1, 2].map(|queue| {
            let commands = drive.commands.iter();
            commands.filter(|sqe| queue_of(sqe) == queue).count()
        })
    };
    busy.poll(now);
    drive.fetch();
    assert_eq!(in_drive(&drive), [DEPTH.into(), 0, 0]);
    // The next survey removes the limit of one of the users that are held back.
    shares[1].set_byte_limit(None);
    drive.complete(0, Status::SUCCESS);
    busy.poll(now + 1_000_000);
    drive.fetch();
    let [first, second, third] = in_drive(&drive);
    assert!(first > 0 && second == 0 && third > 0, "{third}");
    // When all limits end, the other user that is held back continues immediately.
    governor.end_weight_limits();
    for _ in 0..8 {
        drive.complete(0, Status::SUCCESS);
    }
    busy.poll(now + 1_000_001);
    drive.fetch();
    assert!(in_drive(&drive)[1] > 0);
    pair.kill(Status::COMMAND_INTERRUPTED);
    drop(held);
}

/// A quiet lease also counts in the class weights, because its queues take turns with queues of busy leases in their class.
#[test]
fn leases_weigh_in_the_classes_of_their_pairs_by_their_queues() {
    const LOOK: u64 = 100_000_000;
    let governor = Arc::new(DriveGovernor::new(
        PolicyChoice::Adaptive,
        TickRate::NANOSECOND,
    ));
    let (mut drives, pairs): (Vec<_>, Vec<_>) = PRIORITY_CLASSES
        .map(|class| FakeDrive::of_class(64, u64::MAX, false, governor.clone(), class))
        .into_iter()
        .unzip();
    let leases = [lease(300), lease(100), lease(50), lease(10)];
    // Class, lease and depth of each queue. The last queue belongs to the quiet guest.
    let queues = [
        (0, 0, DEPTH),
        (1, 0, DEPTH),
        (1, 1, DEPTH),
        (2, 2, DEPTH),
        (2, 3, 1),
    ];
    let mut guests: Vec<_> = queues
        .into_iter()
        .map(|(class, lease, depth)| Guest::new(&pairs[class], &leases[lease], 0, depth))
        .collect();
    guests.iter_mut().for_each(|guest| guest.poll(LOOK - 1));
    let mut survey = DriveSurvey::new(TickRate::NANOSECOND);
    let mut observe = |nth: u64| {
        survey.survey_pairs(&governor, &pairs, Ticks(nth * LOOK));
        survey.class_loads()
    };
    let loads = observe(1);
    let unit = loads[2].weight / 60;
    let busy = |weights: [u64; 3]| {
        weights.map(|weight| ClassLoad {
            weight: weight * unit,
            is_busy: true,
        })
    };
    assert_eq!(loads, busy([150, 250, 60]));
    // A changed weight takes effect at the next check.
    leases[1].set_weight(LeaseWeight::try_from(200).expect("within bounds"));
    assert_eq!(observe(2), busy([150, 350, 60]));
    // A lease without commands still counts for five seconds. Its waiting commands go to the drive in the second round.
    for _ in 0..3 {
        for drive in &mut drives {
            drive.fetch();
            while !drive.commands.is_empty() {
                drive.complete(0, Status::SUCCESS);
            }
        }
        for guest in &mut guests {
            guest.queue.reap_with_clock(|| Ticks(2 * LOOK), |_| ());
        }
    }
    let last = (3..=51).map(&mut observe).last();
    assert_eq!(last, Some(busy([150, 350, 60])));
    let last = (52..=54).map(&mut observe).last();
    assert_eq!(last, Some([ClassLoad::default(); 3]));
}

#[test]
fn a_class_of_quiet_leases_is_not_busy_and_no_queue_weighs_nothing() {
    let governor = Arc::new(DriveGovernor::new(
        PolicyChoice::Adaptive,
        TickRate::NANOSECOND,
    ));
    let (_drives, pairs): (Vec<_>, Vec<_>) = PRIORITY_CLASSES
        .map(|class| FakeDrive::of_class(256, u64::MAX, false, governor.clone(), class))
        .into_iter()
        .unzip();
    let (quiet, lightest) = (lease(300), lease(1));
    // The lightest lease has 100 queues, one of which is alone in its class.
    let mut guests = vec![
        Guest::new(&pairs[0], &quiet, 0, 1),
        Guest::new(&pairs[1], &lightest, 0, 8),
    ];
    guests.extend((0..99).map(|_| Guest::new(&pairs[2], &lightest, 0, 1)));
    guests.iter_mut().for_each(|guest| guest.poll(1));
    let mut survey = DriveSurvey::new(TickRate::NANOSECOND);
    survey.survey_pairs(&governor, &pairs, Ticks(100_000_000));
    let [high, medium, low] = survey.class_loads();
    assert!(high.weight > 0 && !high.is_busy, "{high:?}");
    assert!(medium.weight > 0 && medium.is_busy, "{medium:?}");
    assert!(low.weight > medium.weight && low.is_busy, "{low:?}");
    pairs
        .iter()
        .for_each(|pair| pair.kill(Status::COMMAND_INTERRUPTED));
}

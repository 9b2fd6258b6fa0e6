//! A VM's memory behind an IOMMU that takes its time.

use std::time::Instant;

use nvme_mpt::spec::ids::QueueId;
use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::doorbell::DoorbellMode;
use nvme_mpt_tests::drive::Options;
use nvme_mpt_tests::status::SUCCESS;

use crate::common::{HANG, Host, LONG, NOWHERE, REGION, Setup, queue_pair, status};

#[test]
fn a_poller_goes_on_while_memory_is_pinned() {
    let host = Host::with(Options::default(), LONG);
    let machine = host.machine(&Setup::nth(0).doorbells(DoorbellMode::Mapped));
    let mut controller = machine.attach();
    let mut queue = queue_pair(&mut controller, 1, 16);
    assert_eq!(status(&mut queue, Sqe::flush(1)), SUCCESS);
    let attachment = host.attached.lock().unwrap().upgrade().unwrap();
    let taken = attachment.take_queue(QueueId(1));
    let mut shadow = taken.unwrap();
    // A table that the queue has not taken up yet.
    let regions = [0, 1].map(|nth| {
        let gpa = NOWHERE + nth * 2 * REGION;
        machine.memory.add_region(gpa, REGION).unwrap()
    });
    machine.map(&regions[0]);

    let iommu = host.model.model_iommu();
    iommu.hold_maps();
    std::thread::scope(|scope| {
        let map = scope.spawn(|| machine.map(&regions[1]));
        let deadline = Instant::now() + HANG;
        while iommu.held_maps() == 0 {
            assert!(Instant::now() < deadline, "no map reached the IOMMU");
            std::thread::sleep(std::time::Duration::from_micros(20));
        }
        let cid = queue.submit(Sqe::flush(1)).unwrap();
        queue.ring();
        let poller = scope.spawn(move || {
            while !shadow.poll() {}
            while !shadow.is_drained() {
                shadow.poll();
            }
            shadow
        });
        let completions = queue.drain(&[cid], HANG);
        let pinning = !map.is_finished();
        iommu.let_maps_through();
        map.join().unwrap();
        let shadow = poller.join().unwrap();
        let returned = attachment.give_queue_back(shadow);
        returned.unwrap();
        assert!(pinning, "memory was pinned meanwhile");
        let completions = completions.expect("a completion while memory is pinned");
        assert_eq!(completions[0].status().code(), SUCCESS);
    });
    assert_eq!(status(&mut queue, Sqe::flush(1)), SUCCESS);
    drop((queue, controller, attachment, machine));
    host.finish();
}

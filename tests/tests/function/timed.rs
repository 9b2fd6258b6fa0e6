//! Software drives with a timing model: only the time of completion differs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nvme_models::DriveProfile;
use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::disk::Transfer;
use nvme_mpt_tests::doorbell::DoorbellMode;
use nvme_mpt_tests::model::{Limits, Model, Op};
use nvme_mpt_tests::prp;
use nvme_mpt_tests::rng::Rng;
use nvme_mpt_vmm::drives::{self, DriveOptions};

use crate::common::bystander::Bystander;
use crate::common::{HANG, Host, LEASE, Setup, queue_pair, wait_for};

fn host(path: &str, profile: DriveProfile) -> Host {
    let options = DriveOptions {
        profile: Some(Arc::new(profile)),
        ..DriveOptions::default()
    };
    Host::from_drive(drives::open(&path.parse().unwrap(), options).unwrap())
}

/// Returns a profile with this latency for all commands, at any queue depth.
fn slow(latency: &str) -> DriveProfile {
    let text = format!(
        "model = \"nvm\"\nunits = 64\nstripe = \"4K\"\n\
         read = {{ latency = \"{latency}\", bandwidth = \"64G\" }}\n\
         write = {{ latency = \"{latency}\", bandwidth = \"64G\" }}\n"
    );
    DriveProfile::parse("test", &text).unwrap()
}

/// Executes random commands, and compares the results with a model of the namespace.
fn verify(host: &Host, setup: &Setup, seed: u64) {
    let machine = host.machine(setup);
    let (_controller, mut disk) = machine.disk();
    let limits = Limits::for_disk(&disk, 64);
    let mut model = Model::new(limits, true);
    let mut rng = Rng::new(seed);
    for _ in 0..1000 {
        disk.transfer = Transfer::Prp {
            offset: 4 * rng.below(1024) as usize,
        };
        let op = Op::choose(std::array::from_fn(|_| rng.next_u64()), &limits);
        model.step(&mut disk, &op).unwrap();
    }
    model.verify_all(&mut disk).unwrap();
}

#[test]
fn every_model_changes_nothing_but_time() {
    for name in ["nvm", "ssd"] {
        // The file of the flash state lies beside the drive's file.
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("drive.img");
        std::fs::File::create(&file)
            .unwrap()
            .set_len(2 * LEASE)
            .unwrap();
        for path in ["memory:32M", file.to_str().unwrap()] {
            let host = host(path, DriveProfile::find_built_in(name).unwrap());
            std::thread::scope(|scope| {
                for index in 0..2 {
                    let host = &host;
                    scope.spawn(move || verify(host, &Setup::nth(index), index + 1));
                }
            });
        }
        let is_saved = dir.path().join("drive.img.ftl").exists();
        assert_eq!(is_saved, name == "ssd");
    }
}

#[test]
fn no_command_completes_before_its_time() {
    // Longer than a poller spins, so the poller sleeps, and only the timer wakes it. Less than the nominal latency, since the
    // system clock may be slewed by up to 500 ppm.
    const LATENCY_MIN: Duration = Duration::from_micros(9_990);
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(LEASE).unwrap();
    for path in ["null:16M", "memory:16M", file.path().to_str().unwrap()] {
        for (mode, poll) in [
            (DoorbellMode::Shadow, "shared"),
            (DoorbellMode::Mapped, "shared"),
            (DoorbellMode::Shadow, "shared:event"),
        ] {
            let host = host(path, slow("10ms"));
            let machine = host.machine(&Setup::nth(0).doorbells(mode).poll(poll));
            let mut controller = machine.attach();
            let mut queue = queue_pair(&mut controller, 1, 32);
            let data = machine.memory.alloc(4096).unwrap();
            let pointer = prp::buffer(&data, 0, 4096).unwrap().pointer;
            let parks = host.park_count();
            for command in [Sqe::write(1, 0, 8), Sqe::read(1, 0, 8)].repeat(4) {
                let begin = Instant::now();
                queue.execute(command.with_data(pointer), HANG).unwrap();
                let taken = begin.elapsed();
                assert!(taken >= LATENCY_MIN, "{path} {mode:?} {poll}: {taken:?}");
            }
            wait_for("the poller sleeps", || {
                queue
                    .execute(Sqe::read(1, 0, 8).with_data(pointer), HANG)
                    .unwrap();
                host.park_count() > parks
            });
        }
    }
}

#[test]
fn a_reset_waits_for_no_command_that_waits_for_its_time() {
    let host = host("memory:32M", slow("60s"));
    let machine = host.machine(&Setup::nth(0));
    let mut controller = machine.attach();
    for _ in 0..3 {
        let mut queue = queue_pair(&mut controller, 1, 128);
        for cid in 0..100 {
            assert!(queue.push(&Sqe::read(1, 0, 8).with_cid(cid)));
        }
        queue.ring();
        // As on a real drive, the reset drops commands in flight without delay.
        controller.disable().unwrap();
        assert_eq!(host.clock.waited(), Duration::ZERO);
        controller.reset().unwrap();
        controller.set_number_of_queues(4).unwrap();
    }
}

#[test]
fn a_guest_that_keeps_a_drive_busy_leaves_the_others_whole() {
    let host = host("memory:32M", DriveProfile::find_built_in("ssd").unwrap());
    let bystander = Bystander::start(&host, &Setup::nth(1));
    verify(&host, &Setup::nth(0), 9);
    bystander.finish();
}

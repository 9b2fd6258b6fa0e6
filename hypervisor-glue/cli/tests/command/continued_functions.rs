//! State of functions that continues with the next server: settings, counters, faults, data and interrupts.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use nvme_mpt_tests::admin::{LogPage, Select};
use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::controller::{Config, Controller, QueueOptions};
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::interrupt::Interrupt;
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::vfio_user::VfioUserBar;

use crate::supervised_server::{SupervisedServer, await_waiting};
use crate::support::{Bench, TIMEOUT};

/// Connects a client to a function, and opens its disk.
pub(crate) fn attach(bench: &Bench, socket: &str) -> (Disk, Controller) {
    let memory = GuestMemory::new(&[(1 << 20, 16 << 20)]).unwrap();
    let bar = VfioUserBar::attach(&bench.path(socket), &memory).unwrap();
    let mut controller = Controller::attach(Arc::new(bar), memory, Config::default(), 1).unwrap();
    (Disk::open(&mut controller, 1).unwrap(), controller)
}

/// Reads all log pages and features of the controller except the timestamp.
fn seen_by_guest(controller: &mut Controller) -> BTreeMap<String, Vec<u8>> {
    const ERRORS: u8 = 0x01;
    const SMART: u8 = 0x02;
    const CHANGED: u8 = 0x04;
    const FEATURES: u8 = 0x12;
    const TIMESTAMP: u8 = 0x0E;
    let mut seen = BTreeMap::new();
    for (page, len) in [(ERRORS, 4096), (SMART, 512), (CHANGED, 4096)] {
        let content = controller.log_page(LogPage::of_controller(page, len));
        seen.insert(format!("log page {page:#x}"), content.unwrap());
    }
    let features = LogPage::of_controller(FEATURES, 1024);
    let features = controller.log_page(features).unwrap();
    let features = (0..=u8::MAX).zip(features.chunks(4));
    for (fid, _) in features.filter(|(fid, effects)| effects[0] & 1 != 0 && *fid != TIMESTAMP) {
        for selected in 0..2 {
            // A Get Features command selects by this dword: for feature 4, the Over or Under Temperature Threshold; for feature
            // 9, one of two vectors.
            let dword = match fid {
                0x04 => selected << 20,
                0x09 => selected,
                _ => 0,
            };
            let nsid = u32::from(matches!(fid, 0x03 | 0x05));
            let name = format!("feature {fid:#x}, {dword:#x}");
            let value = match fid {
                0x03 => controller.get_feature_data(fid, Select::Current, nsid, 4096),
                0x16 => controller.get_feature_data(fid, Select::Current, nsid, 512),
                _ => controller
                    .get_feature(fid, Select::Current, nsid, dword)
                    .map(|value| value.to_le_bytes().to_vec()),
            };
            seen.insert(name, value.unwrap());
        }
    }
    seen
}

#[test]
fn guest_settings_and_counters_survive_kills_and_upgrades() {
    for drive in ["path=drive.img", "path=memory:64M,range=0+1M"] {
        let bench = Bench::new();
        let supervised = SupervisedServer::start(&bench, &[&format!("{drive},socket=a.sock,id=a")]);
        let (mut disk, mut controller) = attach(&bench, "a.sock");
        for (fid, nsid, value) in [
            (0x01, 0, 0x0102_0303),
            (0x02, 0, 1 << 5),
            (0x04, 0, 0x0155),
            (0x04, 0, 1 << 20 | 0x0101),
            (0x05, 1, 0x1234),
            (0x08, 0, 0x0505),
            (0x09, 0, 1 << 16 | 1),
            (0x0A, 0, 1),
            (0x0B, 0, 0x0100),
        ] {
            controller.set_feature(fid, nsid, value).unwrap();
        }
        let mut behavior = [0; 512];
        behavior[0] = 1;
        controller.set_feature_data(0x16, 0, 0, &behavior).unwrap();
        controller.request_async_event().unwrap();
        disk.write(7, &[0x5A; 512]).unwrap();
        for round in 0..4 {
            // Each round marks blocks as uncorrectable. The second of them is then overwritten.
            disk.write_uncorrectable(7 + 10 * round, 4).unwrap();
            disk.write(8 + 10 * round, &[0x11; 512]).unwrap();
            disk.read(7 + 10 * round, 1).unwrap_err();
            disk.read(1 << 40, 1).unwrap_err();
            let before = seen_by_guest(&mut controller);
            match round % 2 {
                0 => supervised.kill_server(),
                _ => supervised.upgrade(&bench),
            }
            let after = seen_by_guest(&mut controller);
            for (name, content) in &before {
                assert_eq!(
                    after.get(name),
                    Some(content),
                    "{drive}, round {round}: {name}"
                );
            }
            for block in (0..=round).map(|round| 7 + 10 * round) {
                disk.read(block, 1).unwrap_err();
                assert_eq!(disk.read(block + 1, 1).unwrap(), [0x11; 512]);
                disk.read(block + 2, 2).unwrap_err();
            }
        }
        assert_eq!(controller.outstanding_event_requests(), 1);
        drop((disk, controller));
        await_waiting(&bench);
        // The next guest finds the data of the disk, and no settings of the first guest.
        let (mut disk, mut controller) = attach(&bench, "a.sock");
        disk.read(7, 1).unwrap_err();
        assert_eq!(disk.read(8, 1).unwrap(), [0x11; 512]);
        let set = controller.get_feature(0x05, Select::Current, 1, 0).unwrap();
        assert_eq!(set, 0);
        drop((disk, controller));
        supervised.stop();
        if drive == "path=drive.img" {
            // First server of a new supervisor, as after a boot of the host.
            let supervised =
                SupervisedServer::start(&bench, &["path=drive.img,socket=a.sock,id=a"]);
            let (mut disk, _controller) = attach(&bench, "a.sock");
            disk.read(7, 1).unwrap_err();
            assert_eq!(disk.read(8, 1).unwrap(), [0x11; 512]);
            drop(disk);
            supervised.stop();
        }
    }
}

#[test]
fn injected_faults_survive_kills_and_upgrades() {
    let bench = Bench::new();
    let function = "path=drive.img,socket=a.sock,id=a,faults=plan.toml";
    let fault_plan = "[[fault]]\nkind = \"media-error\"\nrange = \"0+4K\"\ncount = 5\n";
    fs::write(bench.path("plan.toml"), fault_plan).unwrap();
    let supervised = SupervisedServer::start(&bench, &[function]);
    let injected = "[[fault]]\nkind = \"media-error\"\nrange = \"1M+4K\"\ncount = 3\n";
    fs::write(bench.path("injected.toml"), injected).unwrap();
    let drive = bench.path("drive.img");
    let drive = drive.to_str().unwrap();
    let plan = bench.path("injected.toml");
    bench
        .ask("fault", &["inject", drive, plan.to_str().unwrap()])
        .unwrap();
    let (mut disk, controller) = attach(&bench, "a.sock");
    for round in 0..6 {
        let end = |result: nvme_mpt_tests::Result<Vec<u8>>| result.is_err();
        assert_eq!(end(disk.read(0, 1)), round < 5, "round {round}");
        assert_eq!(end(disk.read(2048, 1)), round < 3, "round {round}");
        let before = bench.ask("fault", &["list"]).unwrap();
        match round % 2 {
            0 => supervised.kill_server(),
            _ => supervised.upgrade(&bench),
        }
        assert_eq!(bench.ask("fault", &["list"]).unwrap(), before);
    }
    bench.ask("fault", &["clear", drive]).unwrap();
    supervised.kill_server();
    let listed = bench.ask("fault", &["list"]).unwrap();
    assert!(listed.contains("no faults"), "{listed}");
    drop((disk, controller));
    supervised.stop();
}

#[test]
fn memory_drives_keep_data_for_later_clients() {
    let bench = Bench::new();
    let supervised =
        SupervisedServer::start(&bench, &["path=memory:64M,range=0+1M,socket=a.sock,id=a"]);
    let written = vec![0x5A; 512];
    let attach = || attach(&bench, "a.sock");
    let (mut disk, controller) = attach();
    disk.write(7, &written).unwrap();
    let serial = controller.identity().unwrap().serial.clone();
    drop((disk, controller));
    await_waiting(&bench);
    supervised.kill_server();
    let (mut disk, controller) = attach();
    assert_eq!(disk.read(7, 1).unwrap(), written);
    assert_eq!(controller.identity().unwrap().serial, serial);
    supervised.stop();
}

/// Interrupts of a client without MSI-X.
#[derive(Clone, Copy, Debug)]
enum Interrupts {
    Msi,
    /// INTx. The client reports by a message that the level has fallen.
    PinByMessage,
    /// INTx. The client reports by an eventfd that the level has fallen.
    PinByEventfd,
}

/// Checks that the next server wakes a guest that sleeps until an interrupt.
fn check_interrupts_continue(interrupts: Interrupts) {
    let bench = Bench::new();
    let supervised =
        SupervisedServer::start(&bench, &["path=memory:64M,range=0+1M,socket=a.sock,id=a"]);
    let memory = GuestMemory::new(&[(1 << 20, 16 << 20)]).unwrap();
    let bar = Arc::new(VfioUserBar::attach(&bench.path("a.sock"), &memory).unwrap());
    let vectors = [(); 2].map(|()| Arc::new(Interrupt::new().unwrap()));
    let acknowledged = Interrupt::new().unwrap();
    let vector = match interrupts {
        Interrupts::Msi => {
            bar.enable_msi(vectors.iter().map(Arc::as_ref)).unwrap();
            1
        }
        Interrupts::PinByMessage => {
            bar.enable_pin(&vectors[0], None).unwrap();
            0
        }
        Interrupts::PinByEventfd => {
            bar.enable_pin(&vectors[0], Some(&acknowledged)).unwrap();
            0
        }
    };
    let acknowledge = || match interrupts {
        Interrupts::Msi => {}
        Interrupts::PinByMessage => bar.unmask_pin().unwrap(),
        Interrupts::PinByEventfd => acknowledged.event().write(1).unwrap(),
    };
    let config = Config::default();
    let mut controller = Controller::attach(bar.clone(), memory, config, 1).unwrap();
    let interrupt = Arc::clone(&vectors[usize::from(vector)]);
    let options = QueueOptions::interrupting(64, vector, Arc::clone(&interrupt));
    let mut queue = controller.create_queue_pair(1, &options).unwrap();
    acknowledge();
    let mut rounds = |count: u16| {
        for round in 0..count {
            let commands = 1 + round % 20;
            for _ in 0..commands {
                queue.submit(Sqe::flush(1)).unwrap();
            }
            queue.ring();
            let mut consumed = 0;
            while consumed < commands {
                let signals = interrupt.wait(TIMEOUT).unwrap();
                assert!(signals > 0, "{interrupts:?}: {consumed} of {commands}");
                while let Some(cqe) = queue.poll() {
                    assert!(cqe.status().is_success());
                    consumed += 1;
                }
                queue.ring();
                acknowledge();
            }
        }
    };
    rounds(200);
    for _ in 0..3 {
        supervised.kill_server();
        rounds(50);
        supervised.upgrade(&bench);
        rounds(50);
    }
    drop((queue, controller));
    supervised.stop();
}

#[test]
fn clients_without_msix_are_interrupted_by_the_next_server() {
    for interrupts in [
        Interrupts::Msi,
        Interrupts::PinByMessage,
        Interrupts::PinByEventfd,
    ] {
        check_interrupts_continue(interrupts);
    }
}

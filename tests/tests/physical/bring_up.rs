//! Differences between drives: which features are used, what guests see, and which drives are refused.

use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{io, thread};

use nvme_guest::threads::ThreadSpawner;
use nvme_mpt_tests::command::admin;
use nvme_mpt_tests::drive::{
    DoorbellBufferUse, Effect, Fault, FaultMatch, ModelDrive, NamespaceOptions, ONCS_ALL, Options,
    ResetReaction,
};
use nvme_mpt_tests::identify::{IdentifyController, ONCS_DSM, ONCS_WRITE_ZEROES};
use nvme_mpt_tests::status;
use nvme_vfio::{
    ControllerAccess, ControllerError, ControllerOptions, DeviceBacking, VfioController,
};

use crate::common::{Host, LEASE, LONG, READY_TIMEOUT, Setup, open, wait_for};
use crate::load::Load;

fn small() -> Vec<NamespaceOptions> {
    vec![NamespaceOptions::new(1, 2 * LEASE, 512)]
}

fn plain() -> Options {
    Options {
        namespaces: small(),
        ..Options::default()
    }
}

/// Runs two guests with verified I/O on a drive.
#[track_caller]
fn check_works(options: Options) -> IdentifyController {
    let host = Host::with(options, LONG);
    let loads: Vec<Load> = (0..2)
        .map(|nth| Load::start(&host, &Setup::nth(nth), 2, 12))
        .collect();
    let mut machines: Vec<_> = loads
        .into_iter()
        .map(|load| {
            let (machine, tally) = load.finish();
            assert_eq!((tally.interrupted, tally.failed.len()), (0, 0));
            machine
        })
        .collect();
    let machine = machines.pop().unwrap();
    drop(machines);
    let identity = machine.attach().identity().unwrap().clone();
    drop(machine);
    host.finish();
    identity
}

#[test]
fn a_drive_says_where_it_is() {
    let model = ModelDrive::start(plain());
    let drive = open(&model, LONG).unwrap();
    let facts = drive.identity().facts.expect("facts of a physical drive");
    assert_eq!(facts.address, model.name());
}

#[test]
fn doorbells_at_any_stride() {
    for dstrd in [0, 1, 4, 10] {
        check_works(Options { dstrd, ..plain() });
    }
}

#[test]
fn queues_that_are_small() {
    for entries_max in [2, 3, 16, 65536] {
        check_works(Options {
            entries_max,
            ..plain()
        });
    }
}

#[test]
fn blocks_of_4096_bytes() {
    check_works(Options {
        namespaces: vec![NamespaceOptions::new(1, 2 * LEASE, 4096)],
        ..plain()
    });
}

#[test]
fn transfers_of_any_size() {
    for mdts in [0, 1, 3, 5, 8, 9] {
        let identity = check_works(Options { mdts, ..plain() });
        assert_eq!(identity.max_transfer(), 1 << 20, "MDTS {mdts}");
        // Split commands describe their data by PRPs.
        assert_eq!(identity.sgl(), matches!(mdts, 0 | 8..), "MDTS {mdts}");
    }
}

#[test]
fn drives_without_sgl_support() {
    let identity = check_works(Options {
        sgl: false,
        ..plain()
    });
    assert!(!identity.sgl());
}

#[test]
fn drives_with_mandatory_features_only() {
    let identity = check_works(Options {
        version: 0x1_0200,
        oncs: 0,
        sgl: false,
        volatile_cache: false,
        mdts: 5,
        queue_pairs: 1,
        ..plain()
    });
    assert_eq!((identity.oncs & ONCS_ALL, identity.vwc & 1), (0, 0));
}

#[test]
fn offered_features_match_the_drive() {
    let oncs = ONCS_DSM | ONCS_WRITE_ZEROES;
    let identity = check_works(Options { oncs, ..plain() });
    assert_eq!(identity.oncs & ONCS_ALL, oncs);
}

#[test]
fn doorbell_buffers_of_the_drive() {
    for (doorbell_buffer, dstrd) in [
        (DoorbellBufferUse::Watched, 0),
        (DoorbellBufferUse::EventIdx, 0),
        (DoorbellBufferUse::EventIdx, 4),
        // The doorbells exceed the buffer's page.
        (DoorbellBufferUse::EventIdx, 8),
    ] {
        check_works(Options {
            doorbell_buffer,
            dstrd,
            ..plain()
        });
    }
}

#[test]
fn a_watched_doorbell_buffer_spares_register_writes() {
    let host = Host::with(
        Options {
            doorbell_buffer: DoorbellBufferUse::Watched,
            ..plain()
        },
        LONG,
    );
    let load = Load::start(&host, &Setup::nth(0), 1, 16);
    let before = host.model.counters();
    for _ in 0..10 {
        load.wait_for_progress();
    }
    let after = host.model.counters();
    load.finish_undisturbed();
    let (commands, doorbells) = (
        after.commands - before.commands,
        after.doorbells - before.doorbells,
    );
    assert!(
        commands >= 900 && doorbells < commands / 20,
        "{doorbells} of {commands}"
    );
    host.finish();
}

#[test]
fn queue_pairs_are_limited_by_the_drive_and_bar0() {
    for (queue_pairs, doorbell_bytes, total) in [
        (1, None, 1),
        (2, None, 2),
        (5, None, 5),
        // The page has doorbells for the admin queue and seven more pairs.
        (64, Some(4096), 63),
    ] {
        let options = Options {
            queue_pairs,
            doorbell_bytes,
            dstrd: if doorbell_bytes.is_some() { 3 } else { 0 },
            ..plain()
        };
        let host = Host::with(options, LONG);
        let pairs = host.drive.controller().queue_pairs().unwrap();
        assert_eq!(pairs.total, total);
        let loads: Vec<Load> = (0..2)
            .map(|nth| Load::start(&host, &Setup::nth(nth), 4, 8))
            .collect();
        let pairs = host.drive.controller().queue_pairs().unwrap();
        assert_eq!(pairs.exclusive + pairs.shared, total.min(8));
        assert_eq!(host.model.queue_pairs(), usize::from(total.min(8)));
        for load in loads {
            load.finish_undisturbed();
        }
        host.finish();
    }
}

#[test]
fn namespaces_side_by_side() {
    let options = Options {
        namespaces: vec![
            NamespaceOptions::new(1, LEASE, 512),
            NamespaceOptions::new(3, LEASE, 4096),
            // A namespace with metadata is not used.
            NamespaceOptions {
                metadata: 8,
                ..NamespaceOptions::new(7, LEASE, 512)
            },
        ],
        queue_pairs: 2,
        mdts: 5,
        ..plain()
    };
    let host = Host::with(options, LONG);
    let namespaces = host.drive.controller().namespaces();
    let seen: Vec<_> = namespaces.iter().map(|n| (n.nsid.0, n.lba_shift)).collect();
    assert_eq!(seen, [(1, 9), (3, 12)]);
    let other = crate::function::Host {
        drive: host.drive.sibling(Some(namespaces[1].nsid)).unwrap(),
        ..crate::function::Host::from_drive(host.drive.clone())
    };
    host.model.poke(7, 0, &[0x77; 512]);
    let loads = [
        Load::start(&host, &Setup::nth(0), 2, 16),
        Load::start(&other, &Setup::nth(0), 2, 16),
    ];
    for load in loads {
        load.wait_for_progress();
        load.finish_undisturbed();
    }
    drop(other);
    assert_eq!(host.model.peek(7, 0, 1), [0x77; 512]);
    host.finish();
}

/// Opens a drive that cannot be used. Returns the error.
#[track_caller]
fn refused(options: Options, prepare: impl Fn(&ModelDrive)) -> ControllerError {
    let model = ModelDrive::start(options);
    prepare(&model);
    let error = open(&model, LONG).expect_err("a drive that cannot be used");
    assert!(model.is_released(), "{error}");
    model.check_host().unwrap();
    assert_eq!(model.model_iommu().mapped_bytes(), 0);
    error
}

#[test]
fn unusable_drives_are_released() {
    let fails = |opcode, code| {
        let fault = Fault::once(FaultMatch::Admin(opcode), Effect::Fail(code, true));
        move |model: &ModelDrive| model.inject(fault.clone())
    };
    let nothing = |_: &ModelDrive| {};
    let error = refused(
        Options {
            mpsmin: 1,
            ..plain()
        },
        nothing,
    );
    assert!(matches!(
        error,
        ControllerError::MemoryPageSize { min: 8192 }
    ));
    let error = refused(
        Options {
            command_sets: 1 << 7,
            ..plain()
        },
        nothing,
    );
    assert!(matches!(error, ControllerError::NoNvmCommandSet));
    let error = refused(plain(), ModelDrive::vanish);
    assert!(matches!(error, ControllerError::Gone), "{error}");
    let error = refused(
        Options {
            timeout: READY_TIMEOUT,
            ..plain()
        },
        |model| model.set_resets(ResetReaction::NeverReady),
    );
    assert!(
        matches!(error, ControllerError::StateTimeout { .. }),
        "{error}"
    );
    let error = refused(plain(), fails(admin::IDENTIFY, status::INTERNAL_ERROR));
    assert!(matches!(error, ControllerError::Admin { .. }), "{error}");
    let error = refused(plain(), fails(admin::SET_FEATURES, status::INTERNAL_ERROR));
    assert!(matches!(error, ControllerError::Admin { .. }), "{error}");
    let error = refused(plain(), |model| model.model_iommu().refuse_maps(true));
    assert!(matches!(error, ControllerError::Memory(_)), "{error}");
    let error = refused(
        Options {
            namespaces: vec![NamespaceOptions {
                metadata: 64,
                ..NamespaceOptions::new(1, LEASE, 4096)
            }],
            ..plain()
        },
        nothing,
    );
    assert!(
        matches!(error, ControllerError::Namespace { .. }),
        "{error}"
    );
}

#[test]
fn a_drive_that_was_left_enabled_is_begun_anew() {
    let model = ModelDrive::start(plain());
    // State after a crash: enabled, with queues in unknown memory.
    model.set_bus_master(true).unwrap();
    let memory = Arc::new(nvme_mpt_memory::Mapping::anonymous(8192).unwrap());
    let iommu = model.iommu();
    iommu
        .map(
            0x1000,
            &memory,
            0..8192,
            nvme_mpt_memory::MappingAccess::ReadWrite,
        )
        .unwrap();
    model.write32(0x24, 0x1F_001F);
    model.write64(0x28, 0x1000);
    model.write64(0x30, 0x2000);
    model.write32(0x14, 0x46_0001);
    wait_for("CSTS.RDY", || model.read32(0x1C) == 1);
    let drive = open(&model, LONG).unwrap();
    iommu.unmap(0x1000, 8192).unwrap();
    assert_eq!(model.counters().disables, 1);
    drop(drive);
    wait_for("the drive's release", || model.is_released());
    model.check_host().unwrap();
    assert_eq!(model.counters().shutdowns, 1);
}

#[test]
fn a_drive_may_take_its_time() {
    let host = Host::with(
        Options {
            reset_time: Duration::from_millis(700),
            ..plain()
        },
        LONG,
    );
    Load::start(&host, &Setup::nth(0), 1, 4).finish_undisturbed();
    host.finish();
}

/// Maps a VM's memory page by page until a map fails. Returns the window, the number of mapped pages, and the error.
fn map_page_by_page(host: &Host) -> (nvme_guest::DmaWindow, u64, nvme_guest::DmaError) {
    let memory = nvme_mpt_tests::memory::GuestMemory::new(&[(0, 4 << 20)]).unwrap();
    let window = nvme_guest::DmaWindow::new(host.drive.controller().iova_space().clone());
    for page in 0.. {
        let mapped = window.map(nvme_guest::MemoryRegion {
            gpa: nvme_guest::Gpa(page * 4096),
            len: 4096,
            fd: memory.fd().try_clone_to_owned().unwrap(),
            offset: page * 4096,
            readable: true,
            writable: true,
        });
        if let Err(refused) = mapped {
            return (window, page, refused);
        }
    }
    unreachable!("memory ends");
}

#[test]
fn vms_that_map_without_end_leave_mappings_for_others_and_for_the_drive() {
    const MAPPINGS: usize = 2048;
    let options = Options {
        mappings_max: Some(MAPPINGS),
        ..plain()
    };
    let host = Host::with(options, LONG);
    let early = Load::start(&host, &Setup::nth(0), 1, 4);
    let hostile: Vec<_> = (0..6).map(|_| map_page_by_page(&host)).collect();
    for (nth, (_, mapped, refused)) in hostile.iter().enumerate() {
        let nvme_guest::DmaError::TooManyMappings { taken, max, .. } = refused else {
            panic!("{refused}");
        };
        assert_eq!((*taken, *max), (*mapped, MAPPINGS as u64));
        // The first VM uses a third of the unassigned mappings, and every VM gets its assured mappings.
        assert!(nth > 0 || *mapped > 450, "{mapped}");
        assert!(*mapped >= 64, "{mapped}");
    }
    // The next guest gets enough mappings for memory, queues, and page lists.
    Load::start(&host, &Setup::nth(1), 4, 8).finish_undisturbed();
    early.finish_undisturbed();
    // Returned mappings are available to others.
    drop(hostile);
    let (alone, mapped, _) = map_page_by_page(&host);
    assert!(mapped > 450, "{mapped}");
    drop(alone);
    host.finish();
}

#[test]
fn memory_that_cannot_be_mapped_is_refused_and_nothing_else_is_lost() {
    let host = Host::with(plain(), LONG);
    let load = Load::start(&host, &Setup::nth(0), 1, 4);
    host.model.model_iommu().refuse_maps(true);
    let region = nvme_mpt_tests::memory::GuestMemory::new(&[(0, 1 << 20)]).unwrap();
    let window = nvme_guest::DmaWindow::new(host.drive.controller().iova_space().clone());
    let refused = window.map(nvme_guest::MemoryRegion {
        gpa: nvme_guest::Gpa(0),
        len: 1 << 20,
        fd: region.fd().try_clone_to_owned().unwrap(),
        offset: 0,
        readable: true,
        writable: true,
    });
    assert!(matches!(refused, Err(nvme_guest::DmaError::Iommu { .. })));
    host.model.model_iommu().refuse_maps(false);
    load.wait_for_progress();
    load.finish_undisturbed();
    drop(window);
    host.finish();
}

#[test]
fn the_thread_spawner_starts_the_drive_monitor() {
    let started = Arc::new(Mutex::new(Vec::new()));
    let names = started.clone();
    let threads = ThreadSpawner::from_spawn(move |name, work| {
        names.lock().unwrap().push(name.to_owned());
        thread::Builder::new().spawn(work)
    });
    let options = ControllerOptions::default();
    let controller = VfioController::open(ModelDrive::start(plain()), options, &threads).unwrap();
    drop(controller);
    assert_eq!(*started.lock().unwrap(), ["nvme-monitor"]);

    let refuse = ThreadSpawner::from_spawn(|_, _| Err(io::Error::other("no more threads")));
    let refused = VfioController::open(ModelDrive::start(plain()), options, &refuse).unwrap_err();
    assert!(matches!(refused, ControllerError::Monitor(_)), "{refused}");
}

#[test]
fn a_drive_describes_itself_while_it_is_used() {
    let model = ModelDrive::start(Options {
        queue_pairs: 5,
        ..plain()
    });
    let controller = VfioController::open(
        model.clone(),
        ControllerOptions::default(),
        &ThreadSpawner::default(),
    )
    .unwrap();
    let description = controller.describe().unwrap();
    assert_eq!(description.queue_pairs, Some(5));
    assert_eq!(description.controller_memory, Some(false));
    let arbitration = description.arbitration.expect("registers");
    assert!(!arbitration.has_weighted && !arbitration.is_weighted);
    assert!(description.controller.oncs.write_zeroes());
    assert!(description.health.is_some());
    let [(nsid, namespace)] = &description.namespaces[..] else {
        panic!("{:?}", description.namespaces);
    };
    assert_eq!((nsid.0, namespace.nsze << 9), (1, 2 * LEASE));
    model.vanish();
    let error = controller.describe().unwrap_err();
    assert!(matches!(error, ControllerError::Gone), "{error}");
}

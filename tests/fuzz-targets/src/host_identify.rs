//! A drive with arbitrary registers, Identify data structures, log pages, and numbers of queues.
//!
//! The input starts with the registers (CAP, VS). Changes to the results of admin commands follow, in the order of the
//! commands: two bytes for the position, one for the number of bytes, and the bytes.
//!
//! The drive must be opened or refused. If it is opened, the limits for guests must be consistent, reading the health log
//! must not panic, and the drive must be released properly.

use nvme_guest::threads::ThreadSpawner;
use nvme_lease::range::BlockRange;
use nvme_mpt::drive::{HostController, HostLeaseRequest};
use nvme_mpt_tests::drive::{DoorbellBufferUse, ModelDrive, NamespaceOptions, Options};
use nvme_spec::ids::Lba;
use nvme_vfio::{ControllerOptions, VfioController};

use crate::Input;

/// Maximum number of changes to one result.
const CHANGES: usize = 8;

/// Runs one input.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    let flags = input.byte();
    let options = Options {
        version: u32::from(input.number()) << 8,
        entries_max: u32::from(input.number().max(1)) + 1,
        // BAR0 has the doorbells of three queues, for any stride.
        dstrd: input.byte() % 16,
        mpsmin: if flags & 1 == 0 { 0 } else { input.byte() % 12 },
        command_sets: if flags & 2 == 0 { 1 } else { input.byte() },
        queue_pairs: 2,
        doorbell_buffer: match flags & 4 {
            0 => DoorbellBufferUse::None,
            _ => DoorbellBufferUse::Watched,
        },
        namespaces: vec![
            NamespaceOptions::new(1, 1 << 20, 512),
            NamespaceOptions::new(2, 1 << 20, 4096),
        ],
        ..Options::default()
    };
    let model = ModelDrive::start(options);
    let mut rest = input.0.to_vec();
    model.forge(Box::new(move |_, data| {
        let mut input = Input(&rest);
        let changes = usize::from(input.byte()) % CHANGES;
        for _ in 0..changes {
            let at = usize::from(input.number()) % data.len();
            let len = usize::from(input.byte()) % 32;
            for (to, from) in data[at..].iter_mut().zip(input.piece(len)) {
                *to = *from;
            }
        }
        rest = input.0.to_vec();
    }));
    if let Ok(controller) = VfioController::open(
        model.clone(),
        ControllerOptions::default(),
        &ThreadSpawner::default(),
    ) {
        let limits = controller.limits();
        assert!(limits.max_transfer_bytes() >= 4096 && limits.entries_max >= 2);
        let namespaces = controller.namespaces();
        for namespace in &namespaces {
            assert!(matches!(namespace.lba_shift, 9 | 12), "{namespace:?}");
            assert!(
                namespace
                    .blocks
                    .checked_mul(1 << namespace.lba_shift)
                    .is_some()
            );
        }
        let pairs = controller.queue_pairs().expect("a number of them");
        assert!(pairs.total > 0 && pairs.free() == pairs.total);
        assert!(!controller.identity().name.is_empty());
        let name = [controller.identity().name, controller.model()].concat();
        assert!(
            name.chars().all(|c| c.is_ascii_graphic() || c == ' '),
            "{name:?}"
        );
        // The drive may report any health, so its report may be refused.
        let _ = controller.smart_health();
        let _ = controller.error_information();
        // The drive may report no namespace.
        if let Some(&namespace) = namespaces.first() {
            let request = HostLeaseRequest {
                name: "fuzz",
                namespace,
                parts: &[BlockRange {
                    start: Lba(0),
                    blocks: namespace.blocks,
                }],
                reservation: None,
            };
            let lease = controller.open_lease(&request).expect("nobody else has it");
            drop(lease.create_queue(4));
        }
    }
    assert!(model.is_released());
    assert_eq!(model.model_iommu().fault_count(), 0);
    assert_eq!(model.model_iommu().mapped_bytes(), 0);
}

//! A fault plan as written by a user or by a client of the control socket.
//!
//! The plan must be accepted, or refused with a message. An accepted plan is injected into a drive, which may refuse it
//! with a message. A drive must never have more faults than the limit.

use std::sync::Arc;

use nvme_layers::LayeredController;
use nvme_layers::faults::{FaultPlan, MAX_FAULTS};
use nvme_mpt_vmm::drives::{self, DriveOptions, OpenDriveError};
use nvme_mpt_vmm::report;

/// Runs one input, which is the text of a plan.
pub fn run(input: &[u8]) {
    let Ok(text) = str::from_utf8(input) else {
        return;
    };
    let plan = match FaultPlan::parse("fuzz", text) {
        Ok(plan) => plan,
        Err(error) => return assert!(!report::chain(&error).is_empty()),
    };
    let options = DriveOptions {
        faults: Some(Arc::new(plan.clone())),
        ..DriveOptions::default()
    };
    let Ok(path) = "null:1M".parse() else { return };
    match drives::open(&path, options) {
        Ok(drive) => {
            let drive = LayeredController::downcast(drive.controller());
            let Some(faults) = drive.and_then(LayeredController::faults) else {
                panic!("a drive with faults has none");
            };
            let before = faults.stats();
            assert!(before.len() <= MAX_FAULTS);
            let added = faults.inject(&plan).is_ok();
            let expected = before.len() * if added { 2 } else { 1 };
            assert_eq!(faults.stats().len(), expected);
            assert!(expected <= MAX_FAULTS);
            for fault in faults.stats() {
                assert_eq!((fault.seen, fault.struck), (0, 0));
                assert_ne!(fault.count, Some(0));
            }
        }
        Err(error @ OpenDriveError::Faults(_)) => assert!(!report::chain(&error).is_empty()),
        Err(error) => panic!("{error}"),
    }
}

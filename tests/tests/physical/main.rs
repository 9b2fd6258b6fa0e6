//! The complete path of an I/O to a physical drive in this process: guest driver, function, shadow queues, driver of the
//! physical controller, and a drive model that checks the host.
//!
//! Every test ends with this check: no DMA outside of mapped memory, no protocol violations by the host, and a drive that was
//! disabled before its release.

mod all_ones;
mod arbitration;
mod bring_up;
mod common;
mod data;
mod ending;
mod events;
mod failures;
#[path = "../function/common/mod.rs"]
#[expect(dead_code, reason = "the tests of functions use more of it")]
mod function;
mod guests;
mod hand_over;
mod load;
mod memory;
#[path = "../function/prp.rs"]
mod prp;
mod reservations;
#[path = "../function/sgl.rs"]
mod sgl;
mod weights;

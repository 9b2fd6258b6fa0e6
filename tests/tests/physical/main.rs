//! The whole way of an I/O to a physical drive in this process: a guest's driver, a function, shadow
//! queues, the driver of a physical controller, and a model of a drive that judges what it is told.
//!
//! Every test ends with that judgement: no DMA outside of what was mapped, nothing that a host must not
//! do, and a drive that was given back disabled.

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
mod silence;
mod weights;

//! Tests across crates: functions in this process, and guests that use the functions' public interface.
//!
//! Most tests of a hostile guest run a second guest with verified I/O on another range of the same drive. The same poller
//! serves both guests, and the second guest must notice nothing.

mod common;

mod admin;
mod blocks;
mod bus_master;
mod deadlines;
mod dirty_pages;
mod doorbell_toggling;
mod doorbells;
mod drive_identity;
mod extents;
mod faults;
mod file_drive;
mod inflight;
mod interrupts;
mod key_values;
mod lease_protocol;
mod leases;
mod limits;
mod lost_writes;
mod memory;
mod pages;
mod parking;
mod physical;
mod processor_time;
mod property;
mod prp;
mod queues;
mod ranges;
mod resets;
mod sgl;
mod snapshot;
mod strides;
mod timed;
mod transfers;
mod zones;

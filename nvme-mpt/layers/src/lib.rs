//! Layers in front of a software drive: zones, faults, and time by a model.
//!
//! A [`LayeredController`] puts them in front of any [`StoreController`](nvme_mpt::drive::StoreController). From the guest to the
//! store, commands pass [zones], [faults] and the [timing model](nvme_models). Each layer is a
//! [`HostQueue`](nvme_mpt::host::HostQueue) in front of the next, and exists only if it was asked for.
//!
//! # Features
//!
//! - `toml`, on by default: parsing of profiles and fault plans.

#![forbid(unsafe_code)]

mod controller;
pub mod faults;
mod store;
pub mod zones;

pub use controller::LayeredController;

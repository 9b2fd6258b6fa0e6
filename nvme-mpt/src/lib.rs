//! Host side of NVMe mediated pass-through.

pub mod lease;
pub mod spec;

//! Host side of NVMe mediated pass-through.

pub mod spec;

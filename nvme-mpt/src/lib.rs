//! Host side of NVMe mediated pass-through.

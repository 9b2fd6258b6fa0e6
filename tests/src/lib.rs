//! An independent guest NVMe driver for the tests that cross crates.

//! The `nvme-mpt` command.

fn main() {}

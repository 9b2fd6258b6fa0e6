//! Zeroes to write where the file system zeroes no range: the same memory for all commands of the process.

use std::sync::OnceLock;

use nvme_mpt::memory::{Mapping, RawBytes};

/// Bytes of it: as many as one command writes.
pub(super) const BYTES: usize = 1 << 20;

/// Some zeroes; `None` if there is no memory for them, or more are asked for than there are.
pub(super) fn bytes(len: usize) -> Option<RawBytes<'static>> {
    // Memory that is only read is one page of zeroes that all processes share.
    static ZEROES: OnceLock<Option<Mapping>> = OnceLock::new();
    ZEROES
        .get_or_init(|| Mapping::anonymous(BYTES).ok())
        .as_ref()?
        .bytes(0, len)
}

//! A buffer of zeroes, shared by all commands of the process, for files whose file system cannot zero ranges.

use std::sync::OnceLock;

use nvme_mpt_memory::{Mapping, RawBytes};

/// Size of the buffer in bytes, which is also the maximum length of one write of zeroes.
pub(super) const BYTES: usize = 1 << 20;

/// Returns `len` bytes of zeroes; `None` if `len` exceeds [`BYTES`] or the buffer cannot be mapped.
pub(super) fn bytes(len: usize) -> Option<RawBytes<'static>> {
    // Reading untouched anonymous memory maps the kernel's one zero page, so the buffer needs no memory.
    static ZEROES: OnceLock<Option<Mapping>> = OnceLock::new();
    ZEROES
        .get_or_init(|| Mapping::anonymous(BYTES).ok())
        .as_ref()?
        .bytes(0, len)
}

//! The NVMe wire format: what registers, commands, completions and data structures look like.
//!
//! After the *NVM Express Base Specification 2.0* ("Base 2.0"), the *NVM Command Set Specification
//! 1.0* ("NVM 1.0"), the *Zoned Namespace Command Set Specification 1.1* ("ZNS 1.1"), the *Key Value
//! Command Set Specification 1.0* ("KV 1.0") and the *NVMe over PCIe Transport Specification 1.0*
//! ("PCIe 1.0"). Layouts, numbers and their names only: no decision is taken here and nothing is read
//! or written.
//!
//! - Numbers are *open*: a value that the specification does not name is kept as it is.
//! - Structures are laid out as on the wire and convert to and from bytes (`zerocopy`).
//! - Names are the specification's own, in Rust's spelling. A field that ends in `_z` is zero-based:
//!   it holds one less than what it counts.
//! - Reserved bits and bytes are kept by a structure and ignored by its getters.

#[macro_use]
mod macros;

pub mod admin;
pub mod cqe;
pub mod dma;
pub mod event;
pub mod feature;
pub mod identify;
pub mod ids;
pub mod key_value;
pub mod log;
pub mod nvm;
pub mod opcode;
pub mod registers;
pub mod sqe;
pub mod status;
pub mod zns;

/// The wire format is little-endian, and so are the integers of its structures.
const _: () = assert!(
    cfg!(target_endian = "little"),
    "NVMe structures are little-endian"
);

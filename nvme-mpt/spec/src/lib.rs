//! NVMe wire format: registers, commands, completions and data structures.
//!
//! The types follow the *NVM Express Base Specification 2.0* ("Base 2.0"), the *NVM Command Set
//! Specification 1.0* ("NVM 1.0"), the *Zoned Namespace Command Set Specification 1.1* ("ZNS 1.1"),
//! the *Key Value Command Set Specification 1.0* ("KV 1.0") and the *NVMe over PCIe Transport
//! Specification 1.0* ("PCIe 1.0"). Each item names its section.
//!
//! The crate holds layouts, opcodes, status codes and their names:
//! - Numbers are *open*: a value without a name in the specification is preserved.
//! - Structures have the layout of the wire format and convert to and from bytes (`zerocopy`).
//! - Names are the specification's own, in Rust's spelling. A field that ends in `_z` is zero-based: it holds the
//!   number of items minus one.
//! - A structure keeps its reserved bits and bytes; its getters ignore them.
//!
//! The crate has no queues, no controller and no driver. It makes no decisions, validates no values, and accesses no
//! memory except its arguments. It includes the registers of the PCIe transport, and no messages of NVMe over Fabrics.
//!
//! # Example
//!
//! A host writes a command, and a controller reads the same 64 bytes:
//!
//! ```
//! use nvme_spec::ids::{CommandId, Lba, Nsid};
//! use nvme_spec::nvm::ReadWrite;
//! use nvme_spec::opcode::NvmOpcode;
//! use nvme_spec::sqe::Sqe;
//! use zerocopy::{FromBytes, IntoBytes};
//!
//! let mut entry = Sqe::new(NvmOpcode::READ.0);
//! entry.set_cid(CommandId(7));
//! entry.nsid = Nsid(1);
//! let fields = ReadWrite { slba: Lba(4096), nlb_z: 7, ..Default::default() };
//! fields.write_to(&mut entry);
//! let bytes: &[u8] = entry.as_bytes();
//!
//! let read = Sqe::read_from_bytes(bytes).expect("64 bytes");
//! assert_eq!(NvmOpcode(read.opcode()).to_string(), "Read");
//! let fields = ReadWrite::from(&read);
//! assert_eq!((fields.slba, fields.nlb_z + 1), (Lba(4096), 8));
//! ```

#![forbid(unsafe_code)]

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

/// The wire format is little-endian, and the structures here have integers of the target.
const _: () = assert!(
    cfg!(target_endian = "little"),
    "NVMe structures are little-endian"
);

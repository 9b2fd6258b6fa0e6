//! Byte offsets of fields in a command, for the error log.

/// Opcode.
pub const OPCODE: u16 = 0;
/// Fused operation, and PRPs or SGLs.
pub const FUSE_AND_PSDT: u16 = 1;
/// Namespace Identifier.
pub const NSID: u16 = 4;
/// Dword 10.
pub const CDW10: u16 = 40;
/// Dword 11.
pub const CDW11: u16 = 44;
/// Dword 12.
pub const CDW12: u16 = 48;
/// Dword 13.
pub const CDW13: u16 = 52;
/// Data Pointer.
pub const DATA: u16 = 24;

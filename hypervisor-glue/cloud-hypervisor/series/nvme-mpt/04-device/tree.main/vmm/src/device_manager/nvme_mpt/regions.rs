// SPDX-License-Identifier: Apache-2.0

//! The trait with the regions of guest memory.

pub(super) use vm_memory::GuestMemoryBackend as GuestMemoryRegions;

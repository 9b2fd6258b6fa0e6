//! Layout of the guest's physical address space.

/// The Global Descriptor Table that the kernel starts with.
pub(super) const GDT: u64 = 0x500;
/// `boot_params` (Linux, Documentation/arch/x86/zero-page.rst).
pub(super) const ZERO_PAGE: u64 = 0x7000;
/// Page tables that map the first 4 GiB to themselves: six pages.
pub(super) const PAGE_TABLES: u64 = 0x9000;
/// The kernel's command line.
pub(super) const COMMAND_LINE: u64 = 0x2_0000;
/// Maximum length of the command line, including its terminator.
pub(super) const COMMAND_LINE_MAX: usize = 0x1000;
/// End of low memory.
pub(super) const LOW_MEMORY_END: u64 = 0x9_FC00;
/// ACPI tables, at an address that kernels search. The memory map does not contain it.
pub(super) const ACPI_TABLES: u64 = 0xE_0000;
/// Start of high memory.
pub(super) const HIGH_MEMORY: u64 = 0x10_0000;
/// Addresses of BARs, between memory and the interrupt controllers.
pub(super) const BAR_WINDOW: (u32, u32) = (0xC000_0000, 0xDFFF_FFFF);
/// Configuration space of bus 0 (PCI Express 4.0, section 7.2.2).
pub(super) const ECAM: u64 = 0xE000_0000;
/// Size of a bus's configuration space: 1 MiB.
pub(super) const ECAM_SIZE: u64 = 0x10_0000;
/// Register that prints KVM's counters, if enabled: see [`super::counters::CounterPrinter`].
pub(super) const COUNTERS: u64 = 0xFE00_0000;
/// Size of a page, the smallest unit that a guest's user space can map.
pub(super) const COUNTERS_SIZE: u64 = 0x1000;
/// The I/O APIC.
pub(super) const IOAPIC: u32 = 0xFEC0_0000;
/// The local APICs.
pub(super) const LOCAL_APIC: u32 = 0xFEE0_0000;
/// Three pages that KVM needs on Intel processors.
pub(super) const KVM_TSS: usize = 0xFFFB_D000;

/// Serial ports: their first I/O port and their interrupt.
pub(super) const SERIAL: [(u16, u32); 2] = [(0x3F8, 4), (0x2F8, 3)];
/// Number of registers of each.
pub(super) const SERIAL_PORTS: u16 = 8;
/// I/O APIC pin that all functions on the bus share as INTx: the first pin without a legacy device.
pub(super) const INTX: u32 = 16;
/// Sleep control, sleep status, reset: see [`super::platform::PowerControl`].
pub(super) const POWER: u16 = 0x600;
/// Number of its registers.
pub(super) const POWER_PORTS: u16 = 3;

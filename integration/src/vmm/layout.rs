//! Layout of the guest's physical address space.

/// Global Descriptor Table with which the kernel starts.
pub(super) const GDT: u64 = 0x500;
/// `boot_params` (Linux, Documentation/arch/x86/zero-page.rst).
pub(super) const ZERO_PAGE: u64 = 0x7000;
/// Page tables that map the first 4 GiB to equal physical addresses: six pages.
pub(super) const PAGE_TABLES: u64 = 0x9000;
/// Command line of the kernel.
pub(super) const COMMAND_LINE: u64 = 0x2_0000;
/// Maximum length of the command line, including its terminator.
pub(super) const COMMAND_LINE_MAX: usize = 0x1000;
/// End of low memory.
pub(super) const LOW_MEMORY_END: u64 = 0x9_FC00;
/// ACPI tables, at an address where kernels search them. The memory map does not contain this address.
pub(super) const ACPI_TABLES: u64 = 0xE_0000;
/// Start of high memory, at 1 MiB.
pub(super) const HIGH_MEMORY: u64 = 0x10_0000;
/// Addresses of BARs, between memory and the interrupt controllers.
pub(super) const BAR_WINDOW: (u32, u32) = (0xC000_0000, 0xDFFF_FFFF);
/// Configuration space of bus 0 (PCI Express 4.0, section 7.2.2).
pub(super) const ECAM: u64 = 0xE000_0000;
/// Size of a bus's configuration space: 1 MiB.
pub(super) const ECAM_SIZE: u64 = 0x10_0000;
/// Register that makes the VMM print KVM's counters, if this is enabled: see [`super::counters::CounterPrinter`].
pub(super) const COUNTERS: u64 = 0xFE00_0000;
/// Size of a page, which is the smallest unit that a program of the guest can map.
pub(super) const COUNTERS_SIZE: u64 = 0x1000;
/// The I/O APIC.
pub(super) const IOAPIC: u32 = 0xFEC0_0000;
/// The local APICs.
pub(super) const LOCAL_APIC: u32 = 0xFEE0_0000;
/// Three pages that KVM needs on Intel processors.
pub(super) const KVM_TSS: usize = 0xFFFB_D000;

/// Serial ports: their first I/O port and their interrupt.
pub(super) const SERIAL: [(u16, u32); 2] = [(0x3F8, 4), (0x2F8, 3)];
/// Number of registers of each serial port.
pub(super) const SERIAL_PORTS: u16 = 8;
/// I/O APIC pin that all functions on the bus share as INTx: the first pin without a legacy device.
pub(super) const INTX: u32 = 16;
/// First port of the sleep control, sleep status and reset registers: see [`super::platform::PowerControl`].
pub(super) const POWER: u16 = 0x600;
/// Number of these registers.
pub(super) const POWER_PORTS: u16 = 3;

//! Layout of the guest's physical address space.

/// The Global Descriptor Table that the kernel starts with.
pub(super) const GDT: u64 = 0x500;
/// `boot_params` (Linux, Documentation/arch/x86/zero-page.rst).
pub(super) const ZERO_PAGE: u64 = 0x7000;
/// Page tables that map the first 4 GiB to themselves: six pages.
pub(super) const PAGE_TABLES: u64 = 0x9000;
/// The kernel's command line.
pub(super) const COMMAND_LINE: u64 = 0x2_0000;
/// Longest command line, with its end.
pub(super) const COMMAND_LINE_MAX: usize = 0x1000;
/// End of low memory.
pub(super) const LOW_MEMORY_END: u64 = 0x9_FC00;
/// ACPI tables, where kernels look for them; not declared as memory.
pub(super) const ACPI_TABLES: u64 = 0xE_0000;
/// Start of high memory.
pub(super) const HIGH_MEMORY: u64 = 0x10_0000;
/// BARs: what lies between memory and the interrupt controllers.
pub(super) const BAR_WINDOW: (u32, u32) = (0xC000_0000, 0xDFFF_FFFF);
/// Configuration space of bus 0 (PCI Express 4.0, section 7.2.2).
pub(super) const ECAM: u64 = 0xE000_0000;
/// A bus has 1 MiB of it.
pub(super) const ECAM_SIZE: u64 = 0x10_0000;
/// Tells KVM's counters, where the machine is made so: see [`super::counters::Teller`].
pub(super) const COUNTERS: u64 = 0xFE00_0000;
/// A page, which is what a guest's user space can map.
pub(super) const COUNTERS_SIZE: u64 = 0x1000;
/// The I/O APIC.
pub(super) const IOAPIC: u32 = 0xFEC0_0000;
/// The local APICs.
pub(super) const LOCAL_APIC: u32 = 0xFEE0_0000;
/// Three pages that KVM needs on processors of one vendor.
pub(super) const KVM_TSS: usize = 0xFFFB_D000;

/// The serial ports: where their registers are, and their interrupts.
pub(super) const SERIAL: [(u16, u32); 2] = [(0x3F8, 4), (0x2F8, 3)];
/// The registers of each.
pub(super) const SERIAL_PORTS: u16 = 8;
/// Pin of the I/O APIC that all functions on the bus share as INTx: the first that no legacy device has.
pub(super) const INTX: u32 = 16;
/// Sleep control, sleep status, reset: see [`super::platform::PowerControl`].
pub(super) const POWER: u16 = 0x600;
/// Its registers.
pub(super) const POWER_PORTS: u16 = 3;

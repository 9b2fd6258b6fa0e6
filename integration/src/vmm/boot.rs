//! Loads a kernel and the data that it needs to boot (Linux, Documentation/arch/x86/boot.rst, "64-bit Boot Protocol").

use std::fs::File;
use std::path::Path;

use kvm_bindings::{Msrs, kvm_msr_entry, kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use linux_loader::loader::{BzImage, KernelLoader};
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestMemoryBackend, ReadVolatile};

use super::memory::MachineMemory;
use super::{MachineError, acpi, layout};

/// Offset of the 64-bit entry point from the start of the loaded kernel.
const ENTRY_64: u64 = 0x200;
/// Identifier for boot loaders that have no assigned number.
const LOADER_UNDEFINED: u8 = 0xFF;
const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;

const PAGE: u64 = 0x1000;
/// Bits of page table entries: present and writable; page of 2 MiB.
const PRESENT_WRITABLE: u64 = 0b11;
const LARGE: u64 = 1 << 7;
const ENTRIES: u64 = 512;
const GIB_MAPPED: u64 = 4;

/// Segment selectors that the protocol requires: `__BOOT_CS` and `__BOOT_DS`.
const CODE_SELECTOR: u16 = 0x10;
const DATA_SELECTOR: u16 = 0x18;
const GDT: [u64; 4] = [0, 0, 0x00AF_9B00_0000_FFFF, 0x00CF_9300_0000_FFFF];

/// Entry point of the first vCPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct EntryPoint {
    address: u64,
}

/// Loads the kernel at `path`, and an initramfs file if there is one.
pub(super) fn load(
    memory: &MachineMemory,
    vcpus: u8,
    path: &Path,
    initramfs: Option<&Path>,
    command_line: &str,
) -> Result<EntryPoint, MachineError> {
    let open = |path: &Path| {
        File::open(path).map_err(|source| MachineError::File {
            path: path.to_owned(),
            source,
        })
    };
    let guest = memory.guest();
    let loaded = BzImage::load(
        guest,
        None,
        &mut open(path)?,
        Some(GuestAddress(layout::HIGH_MEMORY)),
    )
    .map_err(|source| MachineError::Kernel {
        path: path.to_owned(),
        source,
    })?;

    let mut params = boot_params {
        hdr: loaded.setup_header.unwrap_or_default(),
        acpi_rsdp_addr: layout::ACPI_TABLES,
        ..Default::default()
    };
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.cmd_line_ptr = layout::COMMAND_LINE as u32;
    if let Some(initramfs) = initramfs {
        let mut file = open(initramfs)?;
        let len = file.metadata().map_or(0, |metadata| metadata.len());
        // The initramfs is loaded at the end of memory, far from the kernel, which decompresses itself.
        let start = memory
            .len()
            .checked_sub(len.next_multiple_of(PAGE))
            .filter(|start| *start > loaded.kernel_end)
            .ok_or(MachineError::Place("the initial user land"))?;
        read_all(guest, GuestAddress(start), &mut file, len)
            .ok_or(MachineError::Place("the initial user land"))?;
        // The cast loses nothing: all memory is below 3 GiB.
        params.hdr.ramdisk_image = start as u32;
        params.hdr.ramdisk_size = len as u32;
    }
    let ranges = [
        (0, layout::LOW_MEMORY_END, E820_RAM),
        (
            layout::HIGH_MEMORY,
            memory.len() - layout::HIGH_MEMORY,
            E820_RAM,
        ),
        // Kernels use configuration space only if the memory map reserves it.
        (layout::ECAM, layout::ECAM_SIZE, E820_RESERVED),
    ];
    for (entry, (addr, size, kind)) in params.e820_table.iter_mut().zip(ranges) {
        *entry = boot_e820_entry {
            addr,
            size,
            r#type: kind,
        };
    }
    params.e820_entries = ranges.len() as u8;

    let mut line = command_line.as_bytes().to_vec();
    line.push(0);
    if line.len() > layout::COMMAND_LINE_MAX {
        return Err(MachineError::Place("so long a command line"));
    }
    write(guest, layout::COMMAND_LINE, &line, "the command line")?;
    write(guest, layout::ZERO_PAGE, params.as_slice(), "boot_params")?;
    let tables = acpi::tables(layout::ACPI_TABLES, vcpus);
    write(guest, layout::ACPI_TABLES, &tables, "the ACPI tables")?;
    let words =
        |words: &[u64]| -> Vec<u8> { words.iter().flat_map(|word| word.to_le_bytes()).collect() };
    write(guest, layout::GDT, &words(&GDT), "its descriptor table")?;
    let tables = words(&page_tables());
    write(guest, layout::PAGE_TABLES, &tables, "its page tables")?;
    Ok(EntryPoint {
        address: loaded.kernel_load.0 + ENTRY_64,
    })
}

fn read_all(
    guest: &impl GuestMemoryBackend,
    start: GuestAddress,
    file: &mut impl ReadVolatile,
    len: u64,
) -> Option<()> {
    let len = usize::try_from(len).ok()?;
    guest.read_exact_volatile_from(start, file, len).ok()
}

fn write(
    guest: &impl GuestMemoryBackend,
    at: u64,
    bytes: &[u8],
    what: &'static str,
) -> Result<(), MachineError> {
    guest
        .write_slice(bytes, GuestAddress(at))
        .map_err(|_| MachineError::Place(what))
}

/// Returns page tables: PML4, PDPT and four page directories.
fn page_tables() -> Vec<u64> {
    let table = |index: u64| layout::PAGE_TABLES + index * PAGE;
    let mut words = vec![0; ((2 + GIB_MAPPED) * ENTRIES) as usize];
    words[0] = table(1) | PRESENT_WRITABLE;
    for gib in 0..GIB_MAPPED {
        words[(ENTRIES + gib) as usize] = table(2 + gib) | PRESENT_WRITABLE;
    }
    for page in 0..GIB_MAPPED * ENTRIES {
        words[(2 * ENTRIES + page) as usize] = page << 21 | PRESENT_WRITABLE | LARGE;
    }
    words
}

impl EntryPoint {
    /// Sets the registers of the first vCPU as the protocol requires, in long mode.
    pub(super) fn set(self, vcpu: &VcpuFd) -> Result<(), kvm_ioctls::Error> {
        const PROTECTED_MODE: u64 = 1;
        const PAGING: u64 = 1 << 31;
        const PHYSICAL_ADDRESS_EXTENSION: u64 = 1 << 5;
        const LONG_MODE: u64 = 0b101 << 8;
        let segment = |selector: u16, kind: u8| kvm_segment {
            base: 0,
            limit: 0xFFFF_FFFF,
            selector,
            type_: kind,
            present: 1,
            dpl: 0,
            db: u8::from(selector != CODE_SELECTOR),
            s: 1,
            l: u8::from(selector == CODE_SELECTOR),
            g: 1,
            ..Default::default()
        };
        let mut sregs = vcpu.get_sregs()?;
        sregs.cs = segment(CODE_SELECTOR, 0b1011);
        let data = segment(DATA_SELECTOR, 0b0011);
        (sregs.ds, sregs.es, sregs.ss) = (data, data, data);
        sregs.gdt.base = layout::GDT;
        sregs.gdt.limit = (size_of_val(&GDT) - 1) as u16;
        sregs.cr3 = layout::PAGE_TABLES;
        sregs.cr4 |= PHYSICAL_ADDRESS_EXTENSION;
        sregs.cr0 |= PROTECTED_MODE | PAGING;
        sregs.efer |= LONG_MODE;
        vcpu.set_sregs(&sregs)?;
        vcpu.set_regs(&kvm_regs {
            rip: self.address,
            rsi: layout::ZERO_PAGE,
            // Bit 1 of RFLAGS is always set.
            rflags: 0b10,
            ..Default::default()
        })
    }
}

/// Sets the registers that firmware would set on every processor.
pub(super) fn set_msrs(vcpu: &VcpuFd) -> Result<(), kvm_ioctls::Error> {
    /// MTRR default type: MTRRs are enabled, with write-back memory, so that page tables decide how memory is cached.
    const MTRR_DEF_TYPE: (u32, u64) = (0x2FF, 1 << 11 | 6);
    /// Enables fast string operations.
    const MISC_ENABLE: (u32, u64) = (0x1A0, 1);
    let entries = [MTRR_DEF_TYPE, MISC_ENABLE].map(|(index, data)| kvm_msr_entry {
        index,
        data,
        ..Default::default()
    });
    let msrs = Msrs::from_entries(&entries).map_err(|_| kvm_ioctls::Error::new(libc::E2BIG))?;
    vcpu.set_msrs(&msrs).map(drop)
}

//! ACPI tables of a machine without legacy hardware (ACPI 6.5, section 4.1, "Hardware-Reduced").

use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, Device, EISAName, IO, Interrupt, Memory32Fixed, Name,
    Package, ResourceTemplate, Scope, ZERO,
};
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace as Space, GAS};
use acpi_tables::madt::{
    EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic,
};
use acpi_tables::mcfg::MCFG;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, AmlSink};

use super::layout;
use super::pci::SLOTS;
use super::platform::{RESET_VALUE, SLEEP_TYPE_OFF};

const OEM: [u8; 6] = *b"NVMMPT";
const TABLE: [u8; 8] = *b"REFERENC";
const REVISION: u32 = 1;
const IOAPIC_ID: u8 = 0;
/// FADT flags for absent legacy hardware (ACPI 6.5, table 5.11).
const NO_VGA: u16 = 1 << 2;
const NO_CMOS_RTC: u16 = 1 << 5;

/// Returns all tables as the memory from address `start` on contains them, beginning with the RSDP.
pub(super) fn tables(start: u64, vcpus: u8) -> Vec<u8> {
    let bytes = |table: &dyn Aml| {
        let mut bytes = Vec::new();
        table.to_aml_bytes(&mut bytes);
        bytes
    };
    let mut placed = PlacedTables {
        start,
        bytes: vec![0; Rsdp::len()],
    };
    let dsdt = placed.add(&bytes(&dsdt()));
    let fadt = placed.add(&bytes(&fadt(dsdt).finalize()));
    let madt = placed.add(&bytes(&madt(vcpus)));
    let mut mcfg = MCFG::new(OEM, TABLE, REVISION);
    mcfg.add_ecam(layout::ECAM, 0, 0, 0);
    let mcfg = placed.add(&bytes(&mcfg));
    let mut xsdt = XSDT::new(OEM, TABLE, REVISION);
    for table in [fadt, madt, mcfg] {
        xsdt.add_entry(table);
    }
    let xsdt = placed.add(&bytes(&xsdt));
    let rsdp = bytes(&Rsdp::new(OEM, xsdt));
    placed.bytes[..rsdp.len()].copy_from_slice(&rsdp);
    placed.bytes
}

/// Tables that stand in memory one behind the other.
struct PlacedTables {
    start: u64,
    bytes: Vec<u8>,
}

impl PlacedTables {
    /// Appends a table, and returns the table's address.
    fn add(&mut self, table: &[u8]) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(16), 0);
        let at = self.start + self.bytes.len() as u64;
        self.bytes.extend_from_slice(table);
        at
    }
}

fn fadt(dsdt: u64) -> FADTBuilder {
    let port = |offset: u16| {
        let port = u64::from(layout::POWER + offset);
        GAS::new(Space::SystemIo, 8, 0, AccessSize::ByteAccess, port)
    };
    let mut fadt = FADTBuilder::new(OEM, TABLE, REVISION)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        // The machine has no power and sleep buttons: the flags mean that they are not fixed hardware.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .dsdt_64(dsdt);
    fadt.iapc_boot_arch = (NO_VGA | NO_CMOS_RTC).into();
    fadt.sleep_control_reg = port(0);
    fadt.sleep_status_reg = port(1);
    fadt.reset_reg = port(2);
    fadt.reset_value = RESET_VALUE;
    fadt
}

fn madt(vcpus: u8) -> MADT {
    let address = LocalInterruptController::Address(layout::LOCAL_APIC);
    let mut madt = MADT::new(OEM, TABLE, REVISION, address);
    for id in 0..vcpus {
        madt.add_structure(ProcessorLocalApic::new(id, id, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(IOAPIC_ID, layout::IOAPIC, 0));
    madt
}

/// A serial port, given by its index in [`layout::SERIAL`].
struct AcpiSerialPort(u8);

impl Aml for AcpiSerialPort {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let (port, gsi) = layout::SERIAL[usize::from(self.0)];
        let interrupt = Interrupt::new(true, true, false, false, gsi);
        let ports = IO::new(port, port, 0, layout::SERIAL_PORTS as u8);
        let resources = ResourceTemplate::new(vec![&interrupt, &ports]);
        Device::new(
            format!("COM{}", self.0 + 1).as_str().into(),
            vec![
                &Name::new("_HID".into(), &EISAName::new("PNP0501")),
                &Name::new("_UID".into(), &self.0),
                &Name::new("_CRS".into(), &resources),
            ],
        )
        .to_aml_bytes(sink);
    }
}

/// Interrupt route of the pin INTA of a device number (ACPI 6.5, section 6.2.13).
struct AcpiIntxRoute(u32);

impl Aml for AcpiIntxRoute {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        /// Matches all functions of the device.
        const FUNCTIONS: u32 = 0xFFFF;
        let address = self.0 << 16 | FUNCTIONS;
        // Pin 0 is INTA. There is no link device, as the interrupt is hard-wired.
        Package::new(vec![&address, &ZERO, &ZERO, &layout::INTX]).to_aml_bytes(sink);
    }
}

fn dsdt() -> Sdt {
    let mut body = Vec::new();
    let (first, last) = layout::BAR_WINDOW;
    let memory = AddressSpaceCacheable::NotCacheable;
    let bus = AddressSpace::new_bus_number(0_u16, 0_u16);
    let memory = AddressSpace::new_memory(memory, true, first, last, None);
    let windows = ResourceTemplate::new(vec![&bus, &memory]);
    let ecam = Memory32Fixed::new(true, layout::ECAM as u32, layout::ECAM_SIZE as u32);
    let ecam = ResourceTemplate::new(vec![&ecam]);
    // The cast loses nothing: there are at most 31 slots.
    let routes: Vec<_> = (1..=SLOTS as u32).map(AcpiIntxRoute).collect();
    let routes = Package::new(routes.iter().map(|route| route as &dyn Aml).collect());
    Scope::new(
        "\\_SB_".into(),
        vec![
            &Device::new(
                "PCI0".into(),
                vec![
                    &Name::new("_HID".into(), &EISAName::new("PNP0A08")),
                    &Name::new("_CID".into(), &EISAName::new("PNP0A03")),
                    &Name::new("_SEG".into(), &ZERO),
                    &Name::new("_UID".into(), &ZERO),
                    &Name::new("_CRS".into(), &windows),
                    &Name::new("_PRT".into(), &routes),
                ],
            ),
            // Kernels use configuration space only if it is among the resources of a device.
            &Device::new(
                "MB00".into(),
                vec![
                    &Name::new("_HID".into(), &EISAName::new("PNP0C02")),
                    &Name::new("_UID".into(), &ZERO),
                    &Name::new("_CRS".into(), &ecam),
                ],
            ),
            &AcpiSerialPort(0),
            &AcpiSerialPort(1),
        ],
    )
    .to_aml_bytes(&mut body);
    Name::new("\\_S5_".into(), &Package::new(vec![&SLEEP_TYPE_OFF])).to_aml_bytes(&mut body);
    let mut dsdt = Sdt::new(*b"DSDT", 36, 6, OEM, TABLE, REVISION);
    dsdt.append_slice(&body);
    dsdt
}

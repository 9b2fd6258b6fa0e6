//! PCI capabilities of the function: their offsets, their values, and the bits that a guest may change.

/// Power Management capability (PCI Power Management 1.2, section 3.2).
pub(super) mod pm {
    pub(in crate::pci) const OFFSET: u8 = 0x40;
    pub(in crate::pci) const ID: u8 = 0x01;
    /// PMC: version 3, without D1, D2 and PME.
    pub(in crate::pci) const PMC: u16 = 0x0003;
    /// Offset of PMCSR in the capability.
    pub(in crate::pci) const PMCSR: u8 = 4;
    /// PMCSR: PowerState.
    pub(in crate::pci) const POWER_STATE: u8 = 0b11;
    pub(in crate::pci) const D0: u8 = 0b00;
    pub(in crate::pci) const D3HOT: u8 = 0b11;
    /// PMCSR: No_Soft_Reset. The function's state survives D3hot.
    pub(in crate::pci) const NO_SOFT_RESET: u8 = 1 << 3;
}

/// MSI-X capability (PCI Local Bus 3.0, section 6.8.2).
pub(super) mod msix {
    pub(in crate::pci) const OFFSET: u8 = 0x50;
    pub(in crate::pci) const ID: u8 = 0x11;
    /// Offset of Message Control in the capability.
    pub(in crate::pci) const CONTROL: u8 = 2;
    /// Offset of Table Offset and Table BIR in the capability.
    pub(in crate::pci) const TABLE: u8 = 4;
    /// Offset of PBA Offset and PBA BIR in the capability.
    pub(in crate::pci) const PBA: u8 = 8;
    /// Message Control: Function Mask.
    pub(in crate::pci) const FUNCTION_MASK: u16 = 1 << 14;
    /// Message Control: MSI-X Enable.
    pub(in crate::pci) const ENABLE: u16 = 1 << 15;
}

/// MSI capability with a 64-bit address, without per-vector masking (PCI Local Bus 3.0, section 6.8.1).
pub(super) mod msi {
    pub(in crate::pci) const OFFSET: u8 = 0xA0;
    pub(in crate::pci) const ID: u8 = 0x05;
    /// Offset of Message Control in the capability.
    pub(in crate::pci) const CONTROL: u8 = 2;
    /// Offset of Message Address, which has eight bytes, in the capability.
    pub(in crate::pci) const ADDRESS: u8 = 4;
    /// Offset of Message Data, which has two bytes, in the capability.
    pub(in crate::pci) const DATA: u8 = 12;
    /// Message Control: MSI Enable.
    pub(in crate::pci) const ENABLE: u16 = 1;
    /// Message Control: bit position of Multiple Message Capable, a base-2 logarithm.
    pub(in crate::pci) const CAPABLE_SHIFT: u16 = 1;
    /// Message Control: bit position of Multiple Message Enable, a base-2 logarithm.
    pub(in crate::pci) const ENABLE_SHIFT: u16 = 4;
    pub(in crate::pci) const ENABLE_MASK: u16 = 0b111 << ENABLE_SHIFT;
    /// Message Control: 64-bit Address Capable.
    pub(in crate::pci) const ADDRESS_64: u16 = 1 << 7;
    /// Largest value of Multiple Message Capable and Multiple Message Enable, a base-2 logarithm.
    pub(in crate::pci) const MESSAGES_LOG2_MAX: u16 = 5;
}

/// PCI Express capability, version 2 (PCI Express 4.0, section 7.5.3).
pub(super) mod pcie {
    pub(in crate::pci) const OFFSET: u8 = 0x60;
    pub(in crate::pci) const ID: u8 = 0x10;
    /// Capability Version 2, Device/Port Type 0000b: PCI Express Endpoint.
    pub(in crate::pci) const CAPABILITIES: u16 = 0x0002;

    pub(in crate::pci) const DEVICE_CAPABILITIES: u8 = 0x04;
    /// Device Capabilities: payloads of 128 bytes, Role-Based Error Reporting, Function Level Reset Capability.
    pub(in crate::pci) const DEVICE_CAPABILITIES_VALUE: u32 = 1 << 28 | 1 << 15;

    pub(in crate::pci) const DEVICE_CONTROL: u8 = 0x08;
    /// Device Control after a conventional reset: read requests of 512 bytes, no-snoop, relaxed ordering.
    pub(in crate::pci) const DEVICE_CONTROL_DEFAULT: u16 = 0x2810;
    /// Writable bits of Device Control. Extended Tag, Phantom Functions and Aux Power are not offered, and Initiate Function
    /// Level Reset reads as zero.
    pub(in crate::pci) const DEVICE_CONTROL_WRITABLE: u16 = 0x78FF;
    /// Initiate Function Level Reset, bit 15, as a bit of Device Control's upper byte.
    pub(in crate::pci) const INITIATE_FLR: u8 = 1 << 7;

    pub(in crate::pci) const LINK_CAPABILITIES: u8 = 0x0C;
    /// Link Capabilities: 8 GT/s, four lanes, ASPM Optionality Compliance without ASPM. No link is modelled. Tools show these
    /// values, and drivers find nothing to tune in them.
    pub(in crate::pci) const LINK_CAPABILITIES_VALUE: u32 = 1 << 22 | LINK as u32;
    pub(in crate::pci) const LINK_CONTROL: u8 = 0x10;
    /// Writable bits of Link Control: ASPM Control, Common Clock Configuration and Extended Synch. They are stored without
    /// effect.
    pub(in crate::pci) const LINK_CONTROL_WRITABLE: u16 = 0x00C3;
    pub(in crate::pci) const LINK_STATUS: u8 = 0x12;
    /// Speed 3 (8 GT/s) and width 4, as Link Capabilities and Link Status encode them.
    pub(in crate::pci) const LINK: u16 = 4 << 4 | 3;

    pub(in crate::pci) const DEVICE_CAPABILITIES_2: u8 = 0x24;
    /// Device Capabilities 2: Completion Timeout Disable Supported, which Endpoints must offer.
    pub(in crate::pci) const DEVICE_CAPABILITIES_2_VALUE: u32 = 1 << 4;
    pub(in crate::pci) const DEVICE_CONTROL_2: u8 = 0x28;
    /// Writable bit of Device Control 2: Completion Timeout Disable.
    pub(in crate::pci) const DEVICE_CONTROL_2_WRITABLE: u16 = 1 << 4;
    pub(in crate::pci) const LINK_CAPABILITIES_2: u8 = 0x2C;
    /// Link Capabilities 2: Supported Link Speeds 2.5, 5 and 8 GT/s.
    pub(in crate::pci) const LINK_CAPABILITIES_2_VALUE: u32 = 0b111 << 1;
    pub(in crate::pci) const LINK_CONTROL_2: u8 = 0x30;
    /// Link Control 2: Target Link Speed 3 (8 GT/s).
    pub(in crate::pci) const LINK_CONTROL_2_VALUE: u16 = 3;
}

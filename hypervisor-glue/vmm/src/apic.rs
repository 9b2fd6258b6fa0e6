//! Decodes the destination of interrupt messages (MSI) on a PC.

use vmm_device::MsixMessage;

/// Returns the identifier of the local APIC to which an MSI message is sent (Intel SDM, volume 3A, section 11.11.1, Message
/// Address Register Format). Returns `None` if the message has several destinations, or if an IOMMU remaps the message.
///
/// Bits 11:5 extend the identifier for guests of KVM (Linux, `Documentation/virt/kvm/x86/cpuid.rst`,
/// `KVM_FEATURE_MSI_EXT_DEST_ID`). A logical destination is decoded by the flat model, in which bit N usually stands for
/// processor N.
#[must_use]
pub fn local_apic(message: MsixMessage) -> Option<u32> {
    const REMAPPABLE: u32 = 1 << 4;
    const LOGICAL: u32 = 1 << 2;
    const BROADCAST: u32 = 0xFF;
    let address = u32::try_from(message.address).ok()?;
    if address >> 20 != 0xFEE || address & REMAPPABLE != 0 {
        return None;
    }
    let (id, extension) = (address >> 12 & 0xFF, address >> 5 & 0x7F);
    if address & LOGICAL != 0 {
        return (id.is_power_of_two() && extension == 0).then(|| id.trailing_zeros());
    }
    (id != BROADCAST || extension != 0).then_some(extension << 8 | id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_the_local_apic_that_they_are_for() {
        for (address, apic) in [
            (0xFEE0_0000, Some(0)),
            (0xFEE0_3000, Some(3)),
            // Message with the Redirection Hint bit, and with physical destination mode.
            (0xFEE0_3008, Some(3)),
            // Messages in flat logical mode, to one processor and to several.
            (0xFEE0_400C, Some(2)),
            (0xFEE0_3004, None),
            (0xFEEF_F000, None),
            (0xFEEF_F020, Some(0x1FF)),
            (0xFEE0_0FE0, Some(0x7F00)),
            (0xFEE0_0010, None),
            (0xFEC0_0000, None),
            (0x1_FEE0_0000, None),
        ] {
            let message = MsixMessage {
                address,
                data: 0x31,
                masked: false,
            };
            assert_eq!(local_apic(message), apic, "{address:#x}");
        }
    }
}

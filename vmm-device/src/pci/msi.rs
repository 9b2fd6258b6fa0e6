//! MSI messages (PCI Local Bus 3.0, section 6.8.1).

use super::msix::MsixMessage;

/// MSI settings that the guest has made in configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MsiControl {
    /// True if the guest has set MSI Enable.
    pub(crate) enabled: bool,
    /// Base-2 logarithm of the number of messages that the guest has enabled, which is at most the number offered.
    pub(crate) messages_log2: u16,
    /// Message Address.
    pub(crate) address: u64,
    /// Message Data.
    pub(crate) data: u16,
}

impl MsiControl {
    /// Returns the number of messages that the guest has enabled.
    pub(crate) fn messages(&self) -> u16 {
        1 << self.messages_log2
    }

    /// Returns the message of a vector; `None` if the guest has enabled fewer messages.
    pub(crate) fn message(&self, vector: u16) -> Option<MsixMessage> {
        // The message number replaces the low bits of the data (section 6.8.1.6).
        let low = self.messages() - 1;
        (vector <= low).then(|| MsixMessage {
            address: self.address,
            data: u32::from(self.data & !low | vector),
            masked: false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_differ_in_the_low_bits_of_their_data() {
        let msi = MsiControl {
            enabled: true,
            messages_log2: 2,
            address: 0xFEE0_1000,
            data: 0x4F,
        };
        let data = |vector| msi.message(vector).map(|message| message.data);
        assert_eq!([0, 1, 3].map(data), [0x4C, 0x4D, 0x4F].map(Some));
        assert_eq!([4, u16::MAX].map(data), [None, None]);
        let one = MsiControl {
            messages_log2: 0,
            ..msi
        };
        assert_eq!(one.message(0).map(|message| message.data), Some(0x4F));
        assert_eq!(one.message(1), None);
    }
}

//! Identify data structures (Base 2.0, section 5.17; NVM 1.0, section 4.1.5).

mod controller;
mod namespace;
mod power;

use core::mem::size_of;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub use self::{controller::*, namespace::*, power::*};
use super::ids::Nsid;

/// Size of every Identify data structure, in bytes.
pub const IDENTIFY_SIZE: usize = 4096;

open_enum! {
    /// Controller or Namespace Structure: selects the structure that Identify returns (Base 2.0, section 5.17.1).
    pub struct Cns(u8) {
        NAMESPACE = 0x00, "Identify Namespace";
        CONTROLLER = 0x01, "Identify Controller";
        ACTIVE_NSID_LIST = 0x02, "Active Namespace ID list";
        NS_ID_DESCRIPTOR_LIST = 0x03, "Namespace Identification Descriptor list";
        NVM_SET_LIST = 0x04, "NVM Set List";
        IOCS_NAMESPACE = 0x05, "I/O Command Set specific Identify Namespace";
        IOCS_CONTROLLER = 0x06, "I/O Command Set specific Identify Controller";
        IOCS_ACTIVE_NSID_LIST = 0x07, "I/O Command Set specific Active Namespace ID list";
        INDEPENDENT_NAMESPACE = 0x08, "I/O Command Set Independent Identify Namespace";
        NAMESPACE_FOR_FORMAT = 0x09, "Identify Namespace for a User Data Format";
        IOCS_NAMESPACE_FOR_FORMAT = 0x0A,
            "I/O Command Set specific Identify Namespace for a User Data Format";
        ALLOCATED_NSID_LIST = 0x10, "Allocated Namespace ID list";
        ALLOCATED_NAMESPACE = 0x11, "Identify Namespace for an allocated namespace";
        NAMESPACE_CONTROLLER_LIST = 0x12, "Namespace Attached Controller list";
        CONTROLLER_LIST = 0x13, "Controller list";
        PRIMARY_CONTROLLER_CAPABILITIES = 0x14, "Primary Controller Capabilities";
        SECONDARY_CONTROLLER_LIST = 0x15, "Secondary Controller list";
        NAMESPACE_GRANULARITY_LIST = 0x16, "Namespace Granularity List";
        UUID_LIST = 0x17, "UUID List";
        DOMAIN_LIST = 0x18, "Domain List";
        ENDURANCE_GROUP_LIST = 0x19, "Endurance Group List";
        IOCS_ALLOCATED_NSID_LIST = 0x1A, "I/O Command Set specific Allocated Namespace ID list";
        IOCS_ALLOCATED_NAMESPACE = 0x1B,
            "I/O Command Set specific Identify Namespace for an allocated namespace";
        IO_COMMAND_SETS = 0x1C, "Identify I/O Command Set";
    }
}

open_enum! {
    /// Command Set Identifier (Base 2.0, section 5.17.1).
    pub struct Csi(u8) {
        NVM = 0x00, "NVM Command Set";
        KEY_VALUE = 0x01, "Key Value Command Set";
        ZONED_NAMESPACE = 0x02, "Zoned Namespace Command Set";
    }
}

/// List of namespace identifiers in ascending order, terminated by zeroes unless it is full (CNS 02h, 07h, 10h, 1Ah;
/// Base 2.0, section 5.17.2.2).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct NsidList(pub [Nsid; IDENTIFY_SIZE / size_of::<Nsid>()]);

const _: () = assert!(size_of::<NsidList>() == IDENTIFY_SIZE);

/// Header of a Namespace Identification Descriptor (CNS 03h; Base 2.0, section 5.17.2.3). An identifier of `nidl` bytes
/// follows. A header with an `nidl` of 0 terminates the list.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct NsIdDescriptorHeader {
    /// Namespace Identifier Type.
    pub nidt: NsIdType,
    /// Namespace Identifier Length, in bytes.
    pub nidl: u8,
    /// Reserved.
    pub rsvd2: [u8; 2],
}

const _: () = assert!(size_of::<NsIdDescriptorHeader>() == 4);

impl NsIdDescriptorHeader {
    /// Creates the header for an identifier; `None` if the type's length is unknown.
    #[must_use]
    pub const fn new(nidt: NsIdType) -> Option<Self> {
        match nidt.length() {
            Some(nidl) => Some(Self {
                nidt,
                nidl,
                rsvd2: [0; 2],
            }),
            None => None,
        }
    }
}

open_enum! {
    /// Namespace Identifier Type (Base 2.0, section 5.17.2.3).
    pub struct NsIdType(u8) {
        EUI64 = 0x1, "IEEE Extended Unique Identifier";
        NGUID = 0x2, "Namespace Globally Unique Identifier";
        UUID = 0x3, "Namespace UUID";
        CSI = 0x4, "Command Set Identifier";
    }
}

impl NsIdType {
    /// Returns the length of an identifier of this type in bytes; `None` for unknown types.
    #[must_use]
    pub const fn length(self) -> Option<u8> {
        match self {
            Self::EUI64 => Some(8),
            Self::NGUID | Self::UUID => Some(16),
            Self::CSI => Some(1),
            _ => None,
        }
    }
}

/// Identify I/O Command Set: combinations of command sets that can be enabled together (CNS 1Ch; Base 2.0, section
/// 5.17.2.21).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct IoCommandSets(pub [IoCommandSetVector; IDENTIFY_SIZE / 8]);

const _: () = assert!(size_of::<IoCommandSets>() == IDENTIFY_SIZE);

bit_field! {
    /// I/O Command Set Vector (CNS 1Ch), with a bit for each [`Csi`].
    pub struct IoCommandSetVector(u64) {
        /// NVM Command Set.
        nvm / with_nvm: bool [0];
        /// Key Value Command Set.
        key_value / with_key_value: bool [1];
        /// Zoned Namespace Command Set.
        zoned / with_zoned: bool [2];
    }
}

impl IoCommandSetVector {
    /// Returns the vector with the bit of a command set. A command set without a bit changes nothing.
    #[must_use]
    pub const fn with_csi(self, csi: Csi) -> Self {
        match 1_u64.checked_shl(csi.0 as u32) {
            Some(bit) => Self(self.0 | bit),
            None => self,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identification_descriptor_begins_with_type_and_length() {
        let header = NsIdDescriptorHeader::new(NsIdType::NGUID).unwrap();
        assert_eq!(header.as_bytes(), [2, 16, 0, 0]);
        assert_eq!(
            NsIdDescriptorHeader::new(NsIdType::CSI).unwrap().as_bytes(),
            [4, 1, 0, 0]
        );
        assert_eq!(NsIdDescriptorHeader::new(NsIdType(9)), None);
    }

    #[test]
    fn command_sets_are_bits_of_a_vector() {
        assert_eq!(
            IoCommandSetVector::default().with_nvm(true).as_bytes(),
            [1, 0, 0, 0, 0, 0, 0, 0]
        );
        assert!(IoCommandSetVector(1 << Csi::ZONED_NAMESPACE.0).zoned());
    }
}

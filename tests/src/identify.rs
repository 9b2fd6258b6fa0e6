//! Identify data structures (NVMe Base 2.0, section 5.17; NVM Command Set 1.0, section 4.1.5): the fields that a driver
//! uses. `raw` has all bytes of a structure.

/// CNS values (NVMe Base 2.0, figure 274).
pub mod cns {
    #![expect(missing_docs, reason = "the names are the specification's")]
    pub const NAMESPACE: u8 = 0x00;
    pub const CONTROLLER: u8 = 0x01;
    pub const ACTIVE_NAMESPACES: u8 = 0x02;
    pub const NAMESPACE_DESCRIPTORS: u8 = 0x03;
    pub const CSI_NAMESPACE: u8 = 0x05;
    pub const CSI_CONTROLLER: u8 = 0x06;
    pub const CSI_ACTIVE_NAMESPACES: u8 = 0x07;
    pub const CSI_INDEPENDENT_NAMESPACE: u8 = 0x08;
    pub const ALLOCATED_NAMESPACES: u8 = 0x10;
    pub const ALLOCATED_NAMESPACE: u8 = 0x11;
    pub const ATTACHED_CONTROLLERS: u8 = 0x12;
    pub const CONTROLLERS: u8 = 0x13;
    pub const COMMAND_SETS: u8 = 0x1c;
}

/// Size of every Identify data structure in bytes.
pub const IDENTIFY_SIZE: usize = 4096;

/// Little-endian fields of an Identify data structure or a log page.
///
/// # Panics
/// All functions panic if the field is beyond the end of the bytes.
pub mod field {
    /// Reads 2 bytes at `at`.
    pub fn u16(bytes: &[u8], at: usize) -> u16 {
        u16::from_le_bytes([bytes[at], bytes[at + 1]])
    }

    /// Reads 4 bytes at `at`.
    pub fn u32(bytes: &[u8], at: usize) -> u32 {
        u32::from(u16(bytes, at)) | u32::from(u16(bytes, at + 2)) << 16
    }

    /// Reads 8 bytes at `at`.
    pub fn u64(bytes: &[u8], at: usize) -> u64 {
        u64::from(u32(bytes, at)) | u64::from(u32(bytes, at + 4)) << 32
    }

    /// Reads an ASCII string of `len` bytes, without its padding.
    pub fn text(bytes: &[u8], at: usize, len: usize) -> String {
        String::from_utf8_lossy(&bytes[at..at + len])
            .trim_end_matches([' ', '\0'])
            .to_owned()
    }
}

/// OACS bit: Doorbell Buffer Config.
pub const OACS_DOORBELL_BUFFER: u16 = 1 << 8;
/// ONCS bit: Compare.
pub const ONCS_COMPARE: u16 = 1 << 0;
/// ONCS bit: Write Uncorrectable.
pub const ONCS_WRITE_UNCORRECTABLE: u16 = 1 << 1;
/// ONCS bit: Dataset Management.
pub const ONCS_DSM: u16 = 1 << 2;
/// ONCS bit: Write Zeroes.
pub const ONCS_WRITE_ZEROES: u16 = 1 << 3;
/// ONCS bit: Verify.
pub const ONCS_VERIFY: u16 = 1 << 7;
/// ONCS bit: Copy.
pub const ONCS_COPY: u16 = 1 << 8;
/// SGLS field: SGLs are supported for the NVM Command Set (bits 1:0 not 0).
pub const SGLS_SUPPORTED: u32 = 0b11;
/// SGLS bit: Bit Bucket descriptors.
pub const SGLS_BIT_BUCKET: u32 = 1 << 16;

/// Identify Controller.
#[derive(Clone, Debug)]
pub struct IdentifyController {
    /// Complete data structure.
    pub raw: Vec<u8>,
    /// PCI vendor.
    pub vid: u16,
    /// Serial number, without padding.
    pub serial: String,
    /// Model number, without padding.
    pub model: String,
    /// Firmware revision, without padding.
    pub firmware: String,
    /// Maximum Data Transfer Size as a power of two of the minimum page size; 0 is no limit.
    pub mdts: u8,
    /// Controller identifier.
    pub cntlid: u16,
    /// Version.
    pub version: u32,
    /// Optional Admin Command Support.
    pub oacs: u16,
    /// Maximum number of outstanding Asynchronous Event Requests.
    pub max_async_events: u16,
    /// Maximum number of outstanding Aborts.
    pub max_aborts: u16,
    /// Log Page Attributes.
    pub lpa: u8,
    /// Maximum Outstanding Commands; 0 is no limit.
    pub max_commands: u16,
    /// Number of Namespaces.
    pub nn: u32,
    /// Optional NVM Command Support.
    pub oncs: u16,
    /// Volatile Write Cache.
    pub vwc: u8,
    /// SGL Support.
    pub sgls: u32,
    /// NVM Subsystem NVMe Qualified Name.
    pub subnqn: String,
}

impl IdentifyController {
    /// Reads the fields of the data structure.
    ///
    /// # Panics
    /// The data is shorter than [`IDENTIFY_SIZE`].
    pub fn parse(raw: Vec<u8>) -> Self {
        assert!(raw.len() >= IDENTIFY_SIZE);
        Self {
            vid: field::u16(&raw, 0),
            serial: field::text(&raw, 4, 20),
            model: field::text(&raw, 24, 40),
            firmware: field::text(&raw, 64, 8),
            mdts: raw[77],
            cntlid: field::u16(&raw, 78),
            version: field::u32(&raw, 80),
            oacs: field::u16(&raw, 256),
            // ACL and AERL are zero-based.
            max_aborts: u16::from(raw[258]) + 1,
            max_async_events: u16::from(raw[259]) + 1,
            lpa: raw[261],
            max_commands: field::u16(&raw, 514),
            nn: field::u32(&raw, 516),
            oncs: field::u16(&raw, 520),
            vwc: raw[525],
            sgls: field::u32(&raw, 536),
            subnqn: field::text(&raw, 768, 256),
            raw,
        }
    }

    /// Returns the maximum transfer in bytes, for a minimum page size of 4 KiB. Without a limit, or with a larger one,
    /// returns 1 GiB.
    pub fn max_transfer(&self) -> usize {
        match self.mdts {
            0 => 1 << 30,
            mdts => 4096 << mdts.min(18),
        }
    }

    /// Returns whether Doorbell Buffer Config is supported.
    pub fn doorbell_buffer(&self) -> bool {
        self.oacs & OACS_DOORBELL_BUFFER != 0
    }

    /// Returns whether SGLs are supported.
    pub fn sgl(&self) -> bool {
        self.sgls & SGLS_SUPPORTED != 0
    }
}

/// Identify Namespace of the NVM Command Set.
#[derive(Clone, Debug)]
pub struct IdentifyNamespace {
    /// Complete data structure.
    pub raw: Vec<u8>,
    /// Namespace Size in logical blocks.
    pub nsze: u64,
    /// Namespace Capacity in logical blocks.
    pub ncap: u64,
    /// Namespace Utilization in logical blocks.
    pub nuse: u64,
    /// Namespace Features.
    pub nsfeat: u8,
    /// Deallocate Logical Block Features.
    pub dlfeat: u8,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// Metadata bytes per logical block.
    pub metadata_size: u16,
    /// Maximum logical blocks per source range of Copy.
    pub mssrl: u16,
    /// Maximum logical blocks per Copy.
    pub mcl: u32,
    /// Maximum source ranges per Copy.
    pub max_copy_ranges: u16,
    /// Globally unique identifier.
    pub nguid: [u8; 16],
    /// IEEE extended unique identifier.
    pub eui64: [u8; 8],
}

impl IdentifyNamespace {
    /// Reads the fields of the data structure.
    ///
    /// # Panics
    /// The data is shorter than [`IDENTIFY_SIZE`].
    pub fn parse(raw: Vec<u8>) -> Self {
        assert!(raw.len() >= IDENTIFY_SIZE);
        let flbas = raw[26];
        // The format index has more than four bits if there are more than 16 formats: bits 6:5 are its upper bits.
        let upper = match raw[25] {
            0..16 => 0,
            _ => flbas >> 5 & 0b11,
        };
        let format = usize::from(flbas & 0xf | upper << 4);
        let lbaf = field::u32(&raw, 128 + 4 * format);
        Self {
            nsze: field::u64(&raw, 0),
            ncap: field::u64(&raw, 8),
            nuse: field::u64(&raw, 16),
            nsfeat: raw[24],
            dlfeat: raw[33],
            block_size: 1_u32.checked_shl(lbaf >> 16 & 0xff).unwrap_or(0),
            metadata_size: lbaf as u16,
            mssrl: field::u16(&raw, 74),
            mcl: field::u32(&raw, 76),
            max_copy_ranges: u16::from(raw[80]) + 1,
            nguid: std::array::from_fn(|i| raw[104 + i]),
            eui64: std::array::from_fn(|i| raw[120 + i]),
            raw,
        }
    }

    /// Returns whether the namespace is active: the data of an inactive one is all zeroes.
    pub fn is_active(&self) -> bool {
        self.nsze != 0
    }
}

/// Entry of the Namespace Identification Descriptor list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceDescriptor {
    /// Type: 1 EUI-64, 2 NGUID, 3 UUID, 4 command set identifier.
    pub kind: u8,
    /// The identifier.
    pub id: Vec<u8>,
}

/// Parses a Namespace Identification Descriptor list (CNS 03h) up to its end or a truncated entry.
pub fn namespace_descriptors(raw: &[u8]) -> Vec<NamespaceDescriptor> {
    let mut list = Vec::new();
    let mut rest = raw;
    while let [kind, len, _, _, tail @ ..] = rest
        && *len != 0
        && tail.len() >= usize::from(*len)
    {
        let (id, more) = tail.split_at(usize::from(*len));
        list.push(NamespaceDescriptor {
            kind: *kind,
            id: id.to_vec(),
        });
        rest = more;
    }
    list
}

/// Parses a list of 32-bit identifiers (CNS 02h, 07h, 10h) up to the first 0.
pub fn namespace_list(raw: &[u8]) -> Vec<u32> {
    let (words, _) = raw.as_chunks::<4>();
    words
        .iter()
        .map(|word| u32::from_le_bytes(*word))
        .take_while(|&id| id != 0)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_is_read_by_its_format_in_use() {
        let mut raw = vec![0; IDENTIFY_SIZE];
        raw[0..8].copy_from_slice(&1000_u64.to_le_bytes());
        raw[25] = 1;
        raw[26] = 1;
        raw[128 + 2] = 9;
        raw[132 + 2] = 12;
        let namespace = IdentifyNamespace::parse(raw);
        assert_eq!((namespace.nsze, namespace.block_size), (1000, 4096));
        assert!(namespace.is_active());
    }

    #[test]
    fn lists_end_at_zero() {
        let mut raw = vec![0; IDENTIFY_SIZE];
        raw[0] = 1;
        raw[4] = 5;
        assert_eq!(namespace_list(&raw), [1, 5]);

        let mut raw = vec![0; 64];
        raw[..4].copy_from_slice(&[3, 16, 0, 0]);
        raw[4..20].fill(0xaa);
        raw[20..24].copy_from_slice(&[4, 1, 0, 0]);
        let list = namespace_descriptors(&raw);
        assert_eq!(list.len(), 2);
        assert_eq!((list[0].kind, list[0].id.len()), (3, 16));
        assert_eq!((list[1].kind, &list[1].id[..]), (4, &[0][..]));
        // A length beyond the end of the structure ends the list.
        raw[21] = 200;
        assert_eq!(namespace_descriptors(&raw).len(), 1);
    }

    #[test]
    fn the_transfer_limit_is_in_pages() {
        let mut raw = vec![0; IDENTIFY_SIZE];
        raw[77] = 8;
        raw[257] = 1;
        let controller = IdentifyController::parse(raw);
        assert_eq!(controller.max_transfer(), 1 << 20);
        assert!(controller.doorbell_buffer());
    }
}

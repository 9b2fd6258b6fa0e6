//! `VERSION`: negotiation of capabilities.

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use crate::error::RequestRefusal;
use crate::message::MAX_MSG_FDS;
use crate::request_log::NegotiatedVersion;

/// Major version of the protocol. Other major versions are incompatible.
const MAJOR: u16 = 0;

/// Newest supported minor version.
const MINOR: u16 = 1;

/// Largest `max_dma_maps` that clients accept.
const MAX_DMA_MAPS: u32 = 65_535;

/// Supported page sizes of DMA regions, one bit for each power of two: 4 KiB, the smallest page of any host, and all larger
/// ones.
const PAGE_SIZES: u64 = !0xfff;

/// Version proposal of a client.
#[derive(Clone, Debug, Default)]
pub struct VersionProposal {
    /// Minor version; the major version is 0.
    minor: u16,
    /// Capabilities in the client's version data; the protocol's defaults if the data is missing.
    capabilities: ProposedCapabilities,
}

#[derive(Debug, Default, Deserialize)]
struct VersionData {
    capabilities: Option<ProposedCapabilities>,
}

/// Capabilities of a client that affect the server. Other capabilities are ignored.
#[derive(Clone, Debug, Default, Deserialize)]
struct ProposedCapabilities {
    max_msg_fds: Option<u64>,
    max_dma_maps: Option<u64>,
    pgsizes: Option<u64>,
    write_multiple: Option<bool>,
    /// Not supported. Listed here to show that the reply leaves this capability out on purpose.
    #[serde(rename = "twin_socket")]
    _twin_socket: Option<IgnoredAny>,
}

impl VersionProposal {
    /// Parses a proposal; `data` is everything after the two version numbers.
    pub(crate) fn parse(major: u16, minor: u16, data: &[u8]) -> Result<Self, RequestRefusal> {
        if major != MAJOR {
            return Err(RequestRefusal::Version { major, minor });
        }
        // The size includes the terminating NUL. Bytes after it are not version data.
        let json = data.split(|&byte| byte == 0).next().unwrap_or_default();
        let data: VersionData = if json.is_empty() {
            // Version data is optional. A client that is in use sends none.
            VersionData::default()
        } else {
            serde_json::from_slice(json).map_err(RequestRefusal::VersionData)?
        };
        Ok(Self {
            minor,
            capabilities: data.capabilities.unwrap_or_default(),
        })
    }

    /// Returns whether the client accepts a file descriptor with a reply: `max_msg_fds` is not 0 (the default is 1).
    pub(crate) fn accepts_fds(&self) -> bool {
        self.capabilities.max_msg_fds != Some(0)
    }

    /// Returns the parts of the result that later requests need.
    pub(crate) fn negotiated_version(&self) -> NegotiatedVersion {
        NegotiatedVersion {
            accepts_fds: self.accepts_fds(),
        }
    }

    /// Returns the reply to the proposal.
    ///
    /// The reply always has the server's `max_msg_fds` and `max_data_xfer_size`. It has another capability only if the client
    /// proposed this capability, as the protocol requires. So the reply is no larger than the request. This matters because
    /// QEMU receives the reply into a buffer of its request's size.
    pub(crate) fn reply(&self, max_dma_maps: u32, max_data_xfer_size: u32) -> VersionReply {
        let proposed = &self.capabilities;
        let data = VersionReplyData {
            capabilities: ReplyCapabilities {
                max_msg_fds: MAX_MSG_FDS,
                max_data_xfer_size,
                max_dma_maps: proposed
                    .max_dma_maps
                    .map(|theirs| theirs.min(max_dma_maps.min(MAX_DMA_MAPS).into())),
                pgsizes: proposed
                    .pgsizes
                    .map(|theirs| theirs & PAGE_SIZES)
                    .filter(|&common| common != 0),
                write_multiple: proposed.write_multiple.filter(|&wanted| wanted),
            },
        };
        // Serialization cannot fail for numbers and booleans under fixed names.
        let mut json = serde_json::to_vec(&data).unwrap_or_else(|_| b"{}".to_vec());
        json.push(0);
        VersionReply {
            major: MAJOR,
            minor: self.minor.min(MINOR),
            data: json,
        }
    }
}

/// Reply to a client's version.
pub(crate) struct VersionReply {
    pub(crate) major: u16,
    pub(crate) minor: u16,
    /// Version data, with its NUL.
    pub(crate) data: Vec<u8>,
}

#[derive(Serialize)]
struct VersionReplyData {
    capabilities: ReplyCapabilities,
}

#[derive(Serialize)]
struct ReplyCapabilities {
    max_msg_fds: u32,
    max_data_xfer_size: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_dma_maps: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pgsizes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    write_multiple: Option<bool>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::MAX_DATA_XFER_SIZE;

    /// Version data of QEMU 10.1.
    const QEMU: &[u8] = b"{\"capabilities\": {\"max_dma_maps\": 65535, \"max_msg_fds\": 16, \
        \"max_data_xfer_size\": 1048576, \"migration\": {\"pgsize\": 4096, \"max_bitmap_size\": \
        268435456}, \"pgsizes\": 4096, \"write_multiple\": true}}\0";

    fn answer(data: &[u8]) -> serde_json::Value {
        let mut json = VersionProposal::parse(0, 1, data)
            .unwrap()
            .reply(1000, MAX_DATA_XFER_SIZE)
            .data;
        assert_eq!(json.pop(), Some(0), "terminating NUL");
        serde_json::from_slice(&json).unwrap()
    }

    #[test]
    fn answers_what_qemu_proposes_within_the_size_of_its_request() {
        assert_eq!(
            answer(QEMU),
            serde_json::json!({"capabilities": {
                "max_msg_fds": 16, "max_data_xfer_size": 1_048_576, "max_dma_maps": 1000,
                "pgsizes": 4096, "write_multiple": true,
            }})
        );
        let reply = VersionProposal::parse(0, 0, QEMU)
            .unwrap()
            .reply(65_535, MAX_DATA_XFER_SIZE)
            .data;
        assert!(reply.len() <= QEMU.len());
    }

    #[test]
    fn takes_a_client_without_version_data() {
        let limits = serde_json::json!({"capabilities": {
            "max_msg_fds": 16, "max_data_xfer_size": 1_048_576,
        }});
        for data in [&b""[..], b"\0", b"{}\0", b"{}", b"{\"capabilities\":{}}\0"] {
            assert_eq!(answer(data), limits, "{data:?}");
            assert!(VersionProposal::parse(0, 1, data).unwrap().accepts_fds());
        }
    }

    #[test]
    fn unknown_and_unsupported_capabilities_are_ignored() {
        let data =
            br#"{"later":[1],"capabilities":{"twin_socket":{"supported":true},"x":{"y":null},
            "write_multiple":false,"pgsizes":2048,"max_dma_maps":7}}"#;
        assert_eq!(
            answer(data)["capabilities"],
            serde_json::json!({
                "max_msg_fds": 16, "max_data_xfer_size": 1_048_576, "max_dma_maps": 7,
            })
        );
    }

    #[test]
    fn minor_version_is_at_most_the_proposed_one() {
        for (theirs, agreed) in [(0, 0), (1, 1), (2, 1), (u16::MAX, 1)] {
            let proposal = VersionProposal::parse(0, theirs, b"").unwrap();
            assert_eq!(proposal.reply(1, MAX_DATA_XFER_SIZE).minor, agreed);
        }
        let refused = VersionProposal::parse(1, 0, b"").unwrap_err();
        assert!(refused.ends_connection());
    }

    #[test]
    fn refuses_malformed_version_data() {
        let deep = [&b"{\"capabilities\":"[..], &vec![b'['; 60_000]].concat();
        for data in [
            &b"{"[..],
            b"[]",
            b"1",
            b"{\"capabilities\":3}",
            b"{\"capabilities\":{\"max_msg_fds\":\"8\"}}",
            b"{\"capabilities\":{\"max_msg_fds\":-1}}",
            b"{\"capabilities\":{\"pgsizes\":1.5}}",
            b"\xff\xfe",
            &deep,
        ] {
            let refused = VersionProposal::parse(0, 1, data).unwrap_err();
            assert!(
                matches!(refused, RequestRefusal::VersionData(_)),
                "{data:?}"
            );
            assert!(!refused.ends_connection());
        }
    }

    #[test]
    fn a_client_without_fds_is_recognised() {
        let none = VersionProposal::parse(0, 1, b"{\"capabilities\":{\"max_msg_fds\":0}}").unwrap();
        assert!(!none.accepts_fds());
    }
}

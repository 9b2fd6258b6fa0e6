//! Names of NVMe drives. A drive has the same name whether it is found by its PCI address or by its block device.

use std::borrow::Cow;

use super::backing_extent;

/// Kind of a base that is an NVMe drive.
const KIND: &str = "nvme";

/// Prefix of the NQN that Linux generates for a drive without one (`drivers/nvme/host/core.c`, `nvme_init_subnqn`).
const GENERATED_NQN_PREFIX: &str = "nqn.2014.08.org.nvmexpress:";

/// Fields of Identify Controller that name a drive.
#[derive(Clone, Copy, Debug)]
pub struct ControllerNameFields<'a> {
    /// `SUBNQN`.
    pub nqn: &'a [u8],
    /// PCI vendor, if known.
    pub vendor: Option<u16>,
    /// Model Number.
    pub model: &'a [u8],
    /// Serial Number.
    pub serial: &'a [u8],
}

impl ControllerNameFields<'_> {
    /// Returns the drive's name: its NVM subsystem's NQN, or vendor, model and serial number for a drive without one.
    /// Returns `None` if the vendor is needed but unknown.
    #[must_use]
    pub fn name(&self) -> Option<String> {
        let (nqn, serial) = (ascii_text(self.nqn), ascii_text(self.serial));
        let name = if nqn.starts_with("nqn.") && !nqn.starts_with(GENERATED_NQN_PREFIX) {
            format!("{nqn}:{serial}")
        } else {
            format!("{:04x}:{}:{serial}", self.vendor?, ascii_text(self.model))
        };
        Some(backing_extent::base_name(KIND, &name))
    }

    /// Returns a name that stays the same if firmware reports another NQN or model. It is not unique to a drive. Returns
    /// `None` without a vendor, or if all characters of the serial number are equal.
    #[must_use]
    pub fn serial_name(&self) -> Option<String> {
        let (vendor, serial) = (self.vendor?, ascii_text(self.serial));
        let first = serial.chars().next()?;
        let says = serial.chars().any(|other| other != first);
        says.then(|| backing_extent::base_name(KIND, &format!("{vendor:04x}:{serial}")))
    }
}

/// Returns whether a drive's name is that of an NVMe drive.
#[must_use]
pub fn is_nvme_name(drive: &str) -> bool {
    drive.split_once(':').is_some_and(|(kind, _)| kind == KIND)
}

/// Returns the name that the block device of a namespace has, on the drive with the name `name`.
#[must_use]
pub fn namespace_name(name: &str, nsid: u32) -> String {
    match nsid {
        1 => name.to_owned(),
        _ => format!("{name}/{nsid}"),
    }
}

/// Returns the name and NSID of a namespace in the form that its block device has, for comparisons with block devices. The NSID
/// of an NVMe drive's namespace becomes part of the name.
#[must_use]
pub fn as_block_device(drive: &str, nsid: u32) -> (Cow<'_, str>, u32) {
    match drive.split_once(':') {
        Some((KIND, _)) if nsid != 1 => (Cow::Owned(namespace_name(drive, nsid)), 1),
        _ => (Cow::Borrowed(drive), nsid),
    }
}

/// Returns an ASCII field without its padding. Unprintable bytes are replaced, because the field is untrusted.
#[must_use]
pub fn ascii_text(field: &[u8]) -> String {
    let printable = |byte: &u8| match byte {
        0x20..0x7F => char::from(*byte),
        _ => '?',
    };
    let text: String = field.iter().map(printable).collect();
    text.trim_matches([' ', '?']).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drive_has_one_name_with_and_without_a_subsystem() {
        let drive = ControllerNameFields {
            nqn: b"nqn.2014-08.org.nvmexpress:uuid:1 ",
            vendor: Some(0x144D),
            model: b"SSD 980 PRO   ",
            serial: b"S4 EV  ",
        };
        let name = "nvme:nqn.2014-08.org.nvmexpress:uuid:1:S4_EV";
        assert_eq!(drive.name().as_deref(), Some(name));
        let older = Some("nvme:144d:SSD_980_PRO:S4_EV");
        for nqn in [&b""[..], b"nqn.2014.08.org.nvmexpress:144d144dS4 EV  SSD"] {
            assert_eq!(
                ControllerNameFields { nqn, ..drive }.name().as_deref(),
                older
            );
        }
        let unknown = ControllerNameFields {
            nqn: b"",
            vendor: None,
            ..drive
        };
        assert_eq!(unknown.name(), None);
        assert_eq!(unknown.serial_name(), None);
        for (nqn, model) in [(&b""[..], &b"SSD"[..]), (b"nqn.2014:x", b"Other")] {
            let numbered = ControllerNameFields {
                nqn,
                model,
                ..drive
            }
            .serial_name();
            assert_eq!(numbered.as_deref(), Some("nvme:144d:S4_EV"));
        }
        for serial in [&b""[..], b"  ", b"0000"] {
            assert_eq!(ControllerNameFields { serial, ..drive }.serial_name(), None);
        }
    }

    #[test]
    fn namespaces_of_a_drive_are_drives() {
        assert_eq!(as_block_device("nvme:a", 1), ("nvme:a".into(), 1));
        assert_eq!(as_block_device("nvme:a", 2), ("nvme:a/2".into(), 1));
        assert_eq!(
            as_block_device("0+8 of nvme:a", 1),
            ("0+8 of nvme:a".into(), 1)
        );
        assert_eq!(as_block_device("disk:a", 2), ("disk:a".into(), 2));
    }
}

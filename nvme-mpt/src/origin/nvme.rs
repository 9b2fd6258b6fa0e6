//! Names of NVMe drives, which are the same for the drive behind a PCI address and for its block devices.

use std::borrow::Cow;

use super::extent;

/// Kind of the bases.
const KIND: &str = "nvme";

/// Linux makes such a name for a drive that has none (`drivers/nvme/host/core.c`, `nvme_init_subnqn`).
const MADE_UP: &str = "nqn.2014.08.org.nvmexpress:";

/// Identify Controller's fields that name a drive.
#[derive(Clone, Copy, Debug)]
pub struct Controller<'a> {
    /// `SUBNQN`.
    pub nqn: &'a [u8],
    /// PCI vendor, if it is known.
    pub vendor: Option<u16>,
    /// Model Number.
    pub model: &'a [u8],
    /// Serial Number.
    pub serial: &'a [u8],
}

impl Controller<'_> {
    /// Returns a name of the drive: its NVM subsystem's, or what identified one before there were those names; `None`
    /// if its vendor would be needed.
    #[must_use]
    pub fn name(&self) -> Option<String> {
        let (nqn, serial) = (text(self.nqn), text(self.serial));
        let name = if nqn.starts_with("nqn.") && !nqn.starts_with(MADE_UP) {
            format!("{nqn}:{serial}")
        } else {
            format!("{:04x}:{}:{serial}", self.vendor?, text(self.model))
        };
        Some(extent::base(KIND, &name))
    }

    /// Returns a name that stays if firmware reports another NQN or another model; `None` without a vendor, or with a serial number
    /// that says nothing. Two drives may have it.
    #[must_use]
    pub fn numbered(&self) -> Option<String> {
        let (vendor, serial) = (self.vendor?, text(self.serial));
        let first = serial.chars().next()?;
        let says = serial.chars().any(|other| other != first);
        says.then(|| extent::base(KIND, &format!("{vendor:04x}:{serial}")))
    }
}

/// Returns whether a drive has the name of an NVMe drive.
#[must_use]
pub fn is_name(drive: &str) -> bool {
    drive.split_once(':').is_some_and(|(kind, _)| kind == KIND)
}

/// Returns the name of a namespace of the drive `name`, as one of a block device, which has no namespaces.
#[must_use]
pub fn namespace(name: &str, nsid: u32) -> String {
    match nsid {
        1 => name.to_owned(),
        _ => format!("{name}/{nsid}"),
    }
}

/// Returns a drive and its namespace as if it were a block device: a namespace of an NVMe drive has a name of its own.
#[must_use]
pub fn as_block_device(drive: &str, nsid: u32) -> (Cow<'_, str>, u32) {
    match drive.split_once(':') {
        Some((KIND, _)) if nsid != 1 => (Cow::Owned(namespace(drive, nsid)), 1),
        _ => (Cow::Borrowed(drive), nsid),
    }
}

/// Returns an ASCII field without its padding. Bytes that are not printable are replaced: they come from outside.
#[must_use]
pub fn text(field: &[u8]) -> String {
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
        let drive = Controller {
            nqn: b"nqn.2014-08.org.nvmexpress:uuid:1 ",
            vendor: Some(0x144D),
            model: b"SSD 980 PRO   ",
            serial: b"S4 EV  ",
        };
        let name = "nvme:nqn.2014-08.org.nvmexpress:uuid:1:S4_EV";
        assert_eq!(drive.name().as_deref(), Some(name));
        let older = Some("nvme:144d:SSD_980_PRO:S4_EV");
        for nqn in [&b""[..], b"nqn.2014.08.org.nvmexpress:144d144dS4 EV  SSD"] {
            assert_eq!(Controller { nqn, ..drive }.name().as_deref(), older);
        }
        let unknown = Controller {
            nqn: b"",
            vendor: None,
            ..drive
        };
        assert_eq!(unknown.name(), None);
        assert_eq!(unknown.numbered(), None);
        for (nqn, model) in [(&b""[..], &b"SSD"[..]), (b"nqn.2014:x", b"Other")] {
            let numbered = Controller {
                nqn,
                model,
                ..drive
            }
            .numbered();
            assert_eq!(numbered.as_deref(), Some("nvme:144d:S4_EV"));
        }
        for serial in [&b""[..], b"  ", b"0000"] {
            assert_eq!(Controller { serial, ..drive }.numbered(), None);
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

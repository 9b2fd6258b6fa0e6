//! The address of a PCI function.

use std::fmt;
use std::str::FromStr;

/// Address of a PCI function: domain, bus, device and function number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

/// Error for a text that is not the address of a PCI function.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a PCI address; use the form 0000:01:00.0 or 01:00.0, or /sys/bus/pci/devices/0000:01:00.0"
)]
pub struct PciAddressError(String);

/// Parses a hexadecimal number without a sign, whose number of digits is in the given range. Returns `None` for other texts.
fn hex(text: &str, digits: std::ops::RangeInclusive<usize>) -> Option<u32> {
    let is_hex = text.bytes().all(|byte| byte.is_ascii_hexdigit());
    (is_hex && digits.contains(&text.len()))
        .then(|| u32::from_str_radix(text, 16).ok())
        .flatten()
}

impl PciAddress {
    fn parse(text: &str) -> Option<Self> {
        let (rest, function) = text.rsplit_once('.')?;
        let (rest, device) = rest.rsplit_once(':')?;
        let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0000", rest));
        Some(Self {
            // Domains of emulated buses have more digits than hardware domains.
            domain: hex(domain, 4..=8)?,
            bus: u8::try_from(hex(bus, 2..=2)?).ok()?,
            device: u8::try_from(hex(device, 2..=2)?)
                .ok()
                .filter(|number| *number < 32)?,
            function: u8::try_from(hex(function, 1..=1)?)
                .ok()
                .filter(|number| *number < 8)?,
        })
    }
}

impl FromStr for PciAddress {
    type Err = PciAddressError;

    /// Parses an address with or without domain, or the path of the function's directory in sysfs.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let dir = text.trim_end_matches('/');
        let address = match dir.rsplit_once('/') {
            Some((parent, name)) if parent.starts_with("/sys/") => name,
            _ => text,
        };
        Self::parse(address).ok_or_else(|| PciAddressError(text.to_owned()))
    }
}

impl fmt::Display for PciAddress {
    /// Writes the address as the kernel names the function's directory.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            domain,
            bus,
            device,
            function,
        } = self;
        let text = format!("{domain:04x}:{bus:02x}:{device:02x}.{function}");
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_name_a_function() {
        for (text, address) in [
            ("0000:01:00.0", "0000:01:00.0"),
            ("01:00.0", "0000:01:00.0"),
            ("/sys/bus/pci/devices/0000:0A:1f.7", "0000:0a:1f.7"),
            ("/sys/bus/pci/devices/0000:0a:1f.7/", "0000:0a:1f.7"),
            (
                "/sys/devices/pci0000:00/0000:00:02.0/0000:01:00.0",
                "0000:01:00.0",
            ),
            ("10000:e1:00.0", "10000:e1:00.0"),
        ] {
            let parsed: PciAddress = text.parse().expect(text);
            assert_eq!(parsed.to_string(), address);
        }
        for text in [
            "",
            "0000:01:00",
            "01:00",
            "1:00.0",
            "0000:01:20.0",
            "0000:01:00.8",
            "0000:01:00.00",
            "+000:01:00.0",
            "0000:01:0g.0",
            "/dev/0000:01:00.0",
            "0000:01:00.0/",
            "0000:01:00.0/driver",
            "123456789:01:00.0",
        ] {
            assert!(text.parse::<PciAddress>().is_err(), "{text}");
        }
    }
}

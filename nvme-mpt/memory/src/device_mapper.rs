//! Tables of device-mapper devices (Linux, `include/uapi/linux/dm-ioctl.h`).
#![expect(unsafe_code, reason = "the table is read by an ioctl")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Target of a table: a part of the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceMapperTarget {
    /// First sector, in units of 512 bytes.
    pub start: u64,
    /// Number of sectors.
    pub sectors: u64,
    /// Type, such as `linear`.
    pub kind: String,
    /// Parameters of the target. They are left empty for `crypt`, because they contain the key.
    pub parameters: String,
}

/// `struct dm_ioctl`.
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
struct DmIoctlHeader {
    version: [u32; 3],
    data_size: u32,
    data_start: u32,
    target_count: u32,
    open_count: i32,
    flags: u32,
    event_nr: u32,
    padding: u32,
    dev: u64,
    name: [u8; 128],
    uuid: [u8; 129],
    data: [u8; 7],
}

/// `struct dm_target_spec`, followed by zero-terminated parameters.
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
struct DmTargetSpec {
    start: u64,
    sectors: u64,
    status: i32,
    /// Offset of the next target, counted from the first target.
    next: u32,
    kind: [u8; 16],
}

const _: () = assert!(size_of::<DmIoctlHeader>() == 312 && size_of::<DmTargetSpec>() == 40);

/// `_IOWR(DM_IOCTL, DM_TABLE_STATUS_CMD, struct dm_ioctl)`.
const TABLE_STATUS: libc::Ioctl = 0xC138_FD0C_u32 as libc::Ioctl;
/// Flag: the kernel returns the table instead of the status.
const STATUS_TABLE: u32 = 1 << 4;
/// Flag: the kernel found the buffer too short.
const BUFFER_FULL: u32 = 1 << 8;
/// Flag: the kernel clears its copy of the data.
const SECURE_DATA: u32 = 1 << 15;

/// Minimum and maximum (`BUFFER_MAX`) size of the buffer for a table, in bytes.
const BUFFER_MIN: usize = 16 << 10;
const BUFFER_MAX: usize = 16 << 20;

/// Reads the active table of the device-mapper device with this number.
///
/// # Errors
/// Returns the kernel's error; `InvalidData` for a table that does not have the documented form.
pub fn read_table(major: u32, minor: u32) -> io::Result<Vec<DeviceMapperTarget>> {
    let control = File::options()
        .read(true)
        .write(true)
        .open("/dev/mapper/control")?;
    let mut len = BUFFER_MIN;
    loop {
        let mut buffer = vec![0_u64; len / 8];
        let bytes = buffer.as_mut_bytes();
        let mut header = DmIoctlHeader::new_zeroed();
        header.version = [4, 0, 0];
        header.data_size = len as u32;
        header.data_start = size_of::<DmIoctlHeader>() as u32;
        header.flags = STATUS_TABLE | SECURE_DATA;
        header.dev =
            u64::from(major) << 8 | u64::from(minor & 0xFF) | u64::from(minor & !0xFF) << 12;
        bytes[..size_of::<DmIoctlHeader>()].copy_from_slice(header.as_bytes());
        // SAFETY: the buffer is aligned, begins with the structure that the call takes, and has the length given there.
        let result = unsafe { libc::ioctl(control.as_raw_fd(), TABLE_STATUS, bytes.as_mut_ptr()) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        let (header, _) =
            DmIoctlHeader::read_from_prefix(bytes).map_err(|_| io::ErrorKind::InvalidData)?;
        if header.flags & BUFFER_FULL != 0 && len < BUFFER_MAX {
            len *= 4;
            continue;
        }
        let data = bytes.get(header.data_start as usize..);
        let targets = data.and_then(|data| parse(data, header.target_count));
        bytes.fill(0);
        std::hint::black_box(bytes);
        return targets.ok_or_else(|| io::ErrorKind::InvalidData.into());
    }
}

/// Parses `count` targets.
fn parse(data: &[u8], count: u32) -> Option<Vec<DeviceMapperTarget>> {
    let mut targets = Vec::new();
    let mut at = 0;
    for _ in 0..count {
        let (spec, rest) = DmTargetSpec::read_from_prefix(data.get(at..)?).ok()?;
        let text = |bytes: &[u8]| {
            let end = bytes.iter().position(|byte| *byte == 0)?;
            Some(String::from_utf8_lossy(&bytes[..end]).into_owned())
        };
        let kind = text(&spec.kind)?;
        let parameters = match kind.as_str() {
            "crypt" => String::new(),
            _ => text(rest)?,
        };
        targets.push(DeviceMapperTarget {
            start: spec.start,
            sectors: spec.sectors,
            kind,
            parameters,
        });
        at = spec.next as usize;
    }
    Some(targets)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns data in the kernel's format.
    fn data(targets: &[(u64, u64, &str, &str)]) -> Vec<u8> {
        let mut data = Vec::new();
        for &(start, sectors, kind, parameters) in targets {
            let next = data.len() + size_of::<DmTargetSpec>() + parameters.len() + 1;
            let next = next.next_multiple_of(8);
            let mut spec = DmTargetSpec {
                start,
                sectors,
                status: 0,
                next: next as u32,
                kind: [0; 16],
            };
            spec.kind[..kind.len()].copy_from_slice(kind.as_bytes());
            data.extend_from_slice(spec.as_bytes());
            data.extend_from_slice(parameters.as_bytes());
            data.resize(next, 0);
        }
        data
    }

    #[test]
    fn a_table_is_read() {
        let data = data(&[
            (0, 2048, "linear", "7:0 4096"),
            (2048, 8, "error", ""),
            (2056, 8, "crypt", "aes-xts-plain64 00112233 0 7:1 0"),
        ]);
        let targets = parse(&data, 3).unwrap();
        let expected = [
            (0, 2048, "linear", "7:0 4096"),
            (2048, 8, "error", ""),
            (2056, 8, "crypt", ""),
        ];
        let expected = expected.map(|(start, sectors, kind, parameters)| DeviceMapperTarget {
            start,
            sectors,
            kind: kind.to_owned(),
            parameters: parameters.to_owned(),
        });
        assert_eq!(targets, expected);
        assert_eq!(parse(&data, 0).unwrap(), []);
        // Data that is cut off at any length is invalid.
        let last = data.iter().rposition(|byte| *byte != 0).unwrap();
        for len in 0..size_of::<DmTargetSpec>() * 3 {
            assert!(parse(&data[..len.min(last)], 3).is_none(), "{len}");
        }
    }
}

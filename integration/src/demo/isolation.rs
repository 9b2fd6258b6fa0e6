//! Division of the drive among guests, and the check that each guest wrote only to its own range.
//!
//! Before, between and after the ranges are guards, which belong to no guest. The host writes a mark to each guard. Each
//! guest fills its range with blocks that contain the guest's name and the block's position. In the end, the host reads the
//! whole drive, where only one value is valid for each byte.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::{DemoError, host};
use crate::guest::Guest;
use crate::guest::fio::{FioError, GuestFioJob};

const MIB: u64 = 1 << 20;
const GUARD: u64 = 16 * MIB;
/// Size of a guest's range: large enough for every job, and small enough to be filled in seconds.
const RANGE: u64 = 256 * MIB;
const SMALLEST_RANGE: u64 = 64 * MIB;
/// Block size of a guest's pattern. Each block contains its position.
const BLOCK: u64 = 128 << 10;
/// Mark in the blocks of a guard. Each block also contains its position.
const GUARD_TAG: [u8; 8] = *b"no-lease";
/// Maximum number of faults that are printed.
const FAULTS: usize = 10;

/// Part of the drive that one guest leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GuestRange {
    start: u64,
    length: u64,
}

impl GuestRange {
    /// Returns `START+LENGTH` for the option string.
    pub(super) fn option(self) -> String {
        format!("{}+{}", self.start, self.length)
    }
}

/// Location of the drive's data, which determines how the host can read it.
#[derive(Debug)]
enum DataLocation {
    /// Memory of the server, which the host cannot read.
    Memory,
    /// A file or block device.
    File(PathBuf),
    /// Physical drive with this PCI address. The host reads and writes it through the host's driver, before and after the
    /// drive is served.
    Function(String),
}

/// A drive, and its division among guests.
#[derive(Debug)]
pub(super) struct DriveLayout {
    place: DataLocation,
    size: u64,
    ranges: Vec<GuestRange>,
}

/// Checks that a drive's path exists, so that a mistyped path creates no file.
pub(super) fn check_exists(path: &Path) -> Result<(), DemoError> {
    match path.exists() {
        true => Ok(()),
        false => Err(DemoError::NoDrive {
            path: path.to_owned(),
        }),
    }
}

impl DriveLayout {
    pub(super) fn in_memory(size: u64, guests: u32) -> Result<Self, DemoError> {
        Ok(Self {
            place: DataLocation::Memory,
            size,
            ranges: divide(size, guests)?,
        })
    }

    /// Divides a file among guests. An empty file is extended to the necessary size.
    pub(super) fn on_file(path: &Path, guests: u32) -> Result<Self, DemoError> {
        let at = |source| DemoError::File {
            path: path.to_owned(),
            source,
        };
        let mut file = open(path)?;
        let mut size = file.seek(SeekFrom::End(0)).map_err(at)?;
        if size == 0 {
            size = GUARD + u64::from(guests) * (RANGE + GUARD);
            file.set_len(size).map_err(at)?;
        }
        let path = std::fs::canonicalize(path).map_err(at)?;
        Ok(Self {
            place: DataLocation::File(path),
            size,
            ranges: divide(size, guests)?,
        })
    }

    /// Divides a physical drive, which the host's driver has, among guests.
    pub(super) fn on_function(address: &str, guests: u32) -> Result<Self, DemoError> {
        let path = host::block_device(address)?;
        let at = |source| DemoError::File {
            path: path.clone(),
            source,
        };
        let size = open(&path)?.seek(SeekFrom::End(0)).map_err(at)?;
        Ok(Self {
            place: DataLocation::Function(address.to_owned()),
            size,
            ranges: divide(size, guests)?,
        })
    }

    /// Returns the drive as in an option string.
    pub(super) fn drive(&self) -> String {
        match &self.place {
            DataLocation::Memory => format!("memory:{}", self.size),
            DataLocation::File(path) => path.display().to_string(),
            DataLocation::Function(address) => address.clone(),
        }
    }

    /// Returns the PCI address of a physical drive; `None` for any other drive.
    pub(super) fn function(&self) -> Option<&str> {
        match &self.place {
            DataLocation::Function(address) => Some(address),
            DataLocation::Memory | DataLocation::File(_) => None,
        }
    }

    /// Returns the path through which the host reads and writes the drive's data; `None` if it cannot. While the path is
    /// used, no server may have the drive open.
    fn path(&self) -> Result<Option<PathBuf>, DemoError> {
        match &self.place {
            DataLocation::Memory => Ok(None),
            DataLocation::File(path) => Ok(Some(path.clone())),
            DataLocation::Function(address) => host::block_device(address).map(Some),
        }
    }

    pub(super) fn describe(&self) -> String {
        format!(
            "{} MiB for each of {} guests, {} MiB between them",
            self.ranges[0].length / MIB,
            self.ranges.len(),
            GUARD / MIB
        )
    }

    pub(super) fn ranges(&self) -> impl Iterator<Item = GuestRange> {
        self.ranges.iter().copied()
    }

    pub(super) fn has_guards(&self) -> bool {
        !matches!(self.place, DataLocation::Memory)
    }

    /// Writes the mark to all guards.
    pub(super) fn mark_guards(&self) -> Result<(), DemoError> {
        let Some(path) = &self.path()? else {
            return Ok(());
        };
        let at = |source| DemoError::File {
            path: path.clone(),
            source,
        };
        let mut file = open(path)?;
        for guard in self.guards() {
            file.seek(SeekFrom::Start(guard.start)).map_err(at)?;
            for block in 0..guard.length / BLOCK {
                let bytes = pattern(guard.start + block * BLOCK, GUARD_TAG);
                file.write_all(&bytes).map_err(at)?;
            }
        }
        file.sync_all().map_err(at)
    }

    /// Reads the whole drive and returns all faults.
    pub(super) fn check(&self, names: &[String]) -> Result<Vec<String>, DemoError> {
        let Some(path) = &self.path()? else {
            return Ok(Vec::new());
        };
        let mut file = open(path)?;
        let mut faults = Vec::new();
        for (range, name) in self.ranges.iter().zip(names) {
            let what = format!("the range of {name}");
            check_part(path, &mut file, *range, 0, tag(name), &what, &mut faults)?;
        }
        for guard in self.guards() {
            let what = "the space that nobody leases";
            check_part(
                path,
                &mut file,
                guard,
                guard.start,
                GUARD_TAG,
                what,
                &mut faults,
            )?;
        }
        faults.truncate(FAULTS);
        Ok(faults)
    }

    /// Returns the guards. Behind the last guard, the drive may have an unused remainder.
    fn guards(&self) -> impl Iterator<Item = GuestRange> {
        let ends = self.ranges.iter().map(|range| range.start + range.length);
        std::iter::once(0).chain(ends).map(|start| GuestRange {
            start,
            length: GUARD,
        })
    }
}

/// Divides a drive of `size` bytes into alternating guards and ranges, with a guard at each end. Returns the ranges.
fn divide(size: u64, guests: u32) -> Result<Vec<GuestRange>, DemoError> {
    let count = u64::from(guests);
    let least = GUARD + count * (SMALLEST_RANGE + GUARD);
    if size < least {
        return Err(DemoError::TooSmall {
            size,
            guests,
            least,
        });
    }
    let length = ((size - GUARD) / count - GUARD).min(RANGE) / MIB * MIB;
    Ok((0..count)
        .map(|n| GuestRange {
            start: GUARD + n * (length + GUARD),
            length,
        })
        .collect())
}

/// Opens the drive. A block device must have no other user.
fn open(path: &Path) -> Result<File, DemoError> {
    let mut options = File::options();
    options.read(true).write(true);
    match std::fs::metadata(path) {
        // For a block device, O_EXCL fails if the device is mounted or otherwise claimed.
        Ok(metadata) if metadata.file_type().is_block_device() => {
            options.custom_flags(libc::O_EXCL);
        }
        _ => {
            options.create(true);
        }
    }
    options.open(path).map_err(|source| DemoError::File {
        path: path.to_owned(),
        source,
    })
}

/// Returns the tag of a guest's blocks: the last eight bytes of its name.
fn tag(name: &str) -> [u8; 8] {
    let mut tag = [b'.'; 8];
    let prefix_len = name.len().min(tag.len());
    // Names of guests differ at their ends: guest-1, guest-2, …
    tag[..prefix_len].copy_from_slice(&name.as_bytes()[name.len() - prefix_len..]);
    tag
}

/// Returns a block that repeats its position and a tag.
fn pattern(position: u64, tag: [u8; 8]) -> Vec<u8> {
    let mut unit = position.to_le_bytes().to_vec();
    unit.extend(tag);
    unit.repeat(BLOCK as usize / unit.len())
}

fn check_part(
    path: &Path,
    file: &mut File,
    part: GuestRange,
    base: u64,
    tag: [u8; 8],
    what: &str,
    faults: &mut Vec<String>,
) -> Result<(), DemoError> {
    let at = |source| DemoError::File {
        path: path.to_owned(),
        source,
    };
    file.seek(SeekFrom::Start(part.start)).map_err(at)?;
    let mut found = vec![0; BLOCK as usize];
    for offset in (0..part.length).step_by(BLOCK as usize) {
        file.read_exact(&mut found).map_err(at)?;
        let right = pattern(base + offset, tag);
        if found != right {
            let differ = |(a, b)| a != b;
            let first = found.iter().zip(&right).position(differ).unwrap_or(0);
            let unit = first / 16 * 16;
            faults.push(format!(
                "{what}: at byte {} of the drive is {:02x?} instead of {:02x?}",
                part.start + offset + unit as u64,
                &found[unit..unit + 16],
                &right[unit..unit + 16],
            ));
            if faults.len() >= FAULTS {
                break;
            }
        }
    }
    Ok(())
}

/// Returns a fio job that writes or reads the guest's pattern in its whole range.
fn pattern_job(guest: &Guest, name: &str, pattern: &str) -> GuestFioJob {
    let tag = tag(guest.name());
    GuestFioJob::new(name, pattern, "128k", 8)
        .option("size", "100%")
        .option("verify", "pattern")
        // `%o` is the offset of the block: eight bytes, little endian.
        .option(
            "verify_pattern",
            &format!("%o\"{}\"", String::from_utf8_lossy(&tag)),
        )
        .option("verify_fatal", "1")
}

/// Fills the guest's whole range with its pattern.
pub(super) fn fill(guest: &Guest) -> Result<(), FioError> {
    pattern_job(guest, "fill", "write")
        .option("do_verify", "0")
        .option("end_fsync", "1")
        .run(guest)?;
    Ok(())
}

/// Reads the guest's whole range, and verifies that it has the guest's pattern.
pub(super) fn read_back(guest: &Guest) -> Result<(), FioError> {
    pattern_job(guest, "read-back", "read").run(guest)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, position: u64, bytes: &[u8]) {
        let mut file = File::options().write(true).open(path).expect("open");
        file.seek(SeekFrom::Start(position)).expect("seek");
        file.write_all(bytes).expect("write");
    }

    /// Returns a drive to which two guests have written correctly.
    fn drive(dir: &Path) -> (DriveLayout, Vec<String>) {
        let path = dir.join("drive.img");
        File::create(&path)
            .expect("create")
            .set_len(180 * MIB)
            .expect("size");
        let layout = DriveLayout::on_file(&path, 2).expect("layout");
        layout.mark_guards().expect("guards");
        let names = vec!["guest-1".to_owned(), "guest-2".to_owned()];
        for (range, name) in layout.ranges().zip(&names) {
            for offset in (0..range.length).step_by(BLOCK as usize) {
                write(&path, range.start + offset, &pattern(offset, tag(name)));
            }
        }
        (layout, names)
    }

    #[test]
    fn an_absent_path_is_refused_and_not_created() {
        let dir = tempfile::tempdir().expect("folder");
        let path = dir.path().join("drvie.img");
        let error = check_exists(&path).expect_err("it is absent");
        assert!(error.to_string().contains("drvie.img: give one"), "{error}");
        assert!(!path.exists());
        File::create(&path).expect("create");
        check_exists(&path).expect("a file");
    }

    #[test]
    fn a_drive_with_each_guests_data_in_place_passes() {
        let dir = tempfile::tempdir().expect("folder");
        let (layout, names) = drive(dir.path());
        assert_eq!(layout.check(&names).expect("check"), Vec::<String>::new());
    }

    #[test]
    fn one_wrong_byte_is_found_wherever_it_is() {
        let dir = tempfile::tempdir().expect("folder");
        let (layout, names) = drive(dir.path());
        let path = layout.path().expect("path").expect("file");
        let second = layout.ranges[1];
        for (position, whose) in [
            (0, "nobody"),
            (layout.ranges[0].start, "guest-1"),
            (second.start - 1, "nobody"),
            (second.start + second.length - 1, "guest-2"),
            (second.start + second.length, "nobody"),
        ] {
            let mut was = [0];
            let mut file = open(&path).expect("open");
            file.seek(SeekFrom::Start(position)).expect("seek");
            file.read_exact(&mut was).expect("read");
            write(&path, position, &[was[0] ^ 1]);
            let faults = layout.check(&names).expect("check");
            assert_eq!(faults.len(), 1, "byte {position}: {faults:?}");
            assert!(faults[0].contains(whose), "byte {position}: {faults:?}");
            write(&path, position, &was);
        }
    }

    #[test]
    fn a_block_of_the_other_guest_is_found() {
        let dir = tempfile::tempdir().expect("folder");
        let (layout, names) = drive(dir.path());
        let path = layout.path().expect("path").expect("file");
        write(&path, layout.ranges[1].start, &pattern(0, tag(&names[0])));
        assert_eq!(layout.check(&names).expect("check").len(), 1);
    }

    #[test]
    fn a_drive_too_small_is_refused() {
        assert!(matches!(
            divide(100 * MIB, 2),
            Err(DemoError::TooSmall { .. })
        ));
        let ranges = divide(u64::MAX, 16).expect("ranges");
        assert_eq!(ranges.len(), 16);
        assert!(ranges.iter().all(|range| range.length == RANGE));
    }
}

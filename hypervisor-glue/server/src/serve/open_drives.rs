//! Drives that a server has open: one entry for each namespace in use. Namespaces of one physical drive share its host
//! controller.

use std::io;
use std::path::Path;
use std::slice;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nvme_guest::threads::start_thread;
use nvme_lease::backing_id::{BackingId, start_location};
use nvme_models::DriveProfile;
use nvme_mpt::Drive;
use nvme_mpt_memory::deadline::{Deadline, SystemClock};
use nvme_mpt_memory::system;
use nvme_mpt_vmm::drives::{
    self, DriveOptions, DrivePath, OpenDriveError, PersistedDriveDescriptors,
};
use nvme_mpt_vmm::options::FunctionOptions;
use thiserror::Error;

use crate::confinement::LandlockRefusal;
use crate::persistence::{PersistenceError, ServerPersistence};

/// Errors of opening a drive for a function.
#[derive(Debug, Error)]
pub enum FunctionDriveError {
    /// Functions that share a drive disagree on an option of the drive.
    #[error(
        "Drive {path} is opened once, but the functions that share it ask for different {key}=: give the same {key}= to each"
    )]
    Differ {
        /// The drive.
        path: DrivePath,
        /// The option that differs.
        key: &'static str,
    },
    /// The drive cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenDriveError),
    /// The server's sandbox does not allow the drive's files.
    #[error(transparent)]
    Landlock(#[from] LandlockRefusal),
    /// The content of a `memory:` drive cannot be stored for the successor process.
    #[error(transparent)]
    Persistence(Box<PersistenceError>),
}

impl From<PersistenceError> for FunctionDriveError {
    fn from(error: PersistenceError) -> Self {
        Self::Persistence(Box::new(error))
    }
}

/// Maximum wait for the path lookup of a drive that no function uses.
const UNUSED_LOOKUP_TIMEOUT: Duration = Duration::from_millis(100);

/// An open drive whose path now leads to another file or device, or to nothing. Also has the reason for which this is assumed.
#[derive(Debug, Error)]
#[error("The path of drive {path} does not lead to the open drive: {reason}")]
pub(super) struct MovedDrive {
    path: DrivePath,
    reason: io::Error,
}

/// Result of [`first_byte_name`], which may block as long as the file system does.
type PathLookup = Receiver<io::Result<String>>;

#[derive(Debug)]
struct OpenDrive {
    drive: Arc<Drive>,
    path: DrivePath,
    /// Location of the drive's first byte on its file or device when the drive was opened, as a name that no other drive has;
    /// `None` for a drive without a file.
    first_byte_name: Option<String>,
    /// Path lookup that has not finished, if there is one.
    pending_lookup: Mutex<Option<PathLookup>>,
    options: DriveOptions,
}

impl OpenDrive {
    /// Returns the reason why a successor would not find the drive by its path; `None` if it would. A file system that does not
    /// answer until the deadline is such a reason, too.
    fn find_move(&self, deadline: &Deadline) -> Option<MovedDrive> {
        let (DrivePath::File(file), Some(known)) = (&self.path, &self.first_byte_name) else {
            return None;
        };
        let reason = match self.look_up_path(file, deadline) {
            Ok(present) if present == *known => return None,
            Ok(present) => io::Error::other(format!("its first byte was {known} and is {present}")),
            Err(error) => error,
        };
        let path = self.path.clone();
        Some(MovedDrive { path, reason })
    }

    /// Returns the location of the first byte behind the path, which a separate thread looks up. If the thread of an earlier
    /// call is still blocked, waits for this thread instead of starting another one.
    fn look_up_path(&self, file: &Path, deadline: &Deadline) -> io::Result<String> {
        let mut lookup = self
            .pending_lookup
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // If the earlier caller had timed out, the result may be out of date.
        let is_pending =
            |lookup: &PathLookup| matches!(lookup.try_recv(), Err(TryRecvError::Empty));
        let pending = match lookup.take().filter(is_pending) {
            Some(pending) => pending,
            None => {
                let (sender, receiver) = sync_channel(1);
                let file = file.to_owned();
                // The send fails if the receiver has timed out.
                start_thread("path", move || drop(sender.send(first_byte_name(&file))))?;
                receiver
            }
        };
        match pending.recv_timeout(deadline.remaining()) {
            Ok(found) => found,
            Err(RecvTimeoutError::Timeout) => {
                *lookup = Some(pending);
                let text = "its file system does not answer";
                Err(io::Error::new(io::ErrorKind::TimedOut, text))
            }
            Err(RecvTimeoutError::Disconnected) => Err(io::Error::other("the check panicked")),
        }
    }
}

/// Returns the location of the first byte of a file or block device, as a name. Equal names mean the same bytes.
fn first_byte_name(file: &Path) -> io::Result<String> {
    Ok(start_location(&BackingId::from_path(file)?.identity().name))
}

/// The open drives.
#[derive(Debug, Default)]
pub(super) struct OpenDrives(Vec<OpenDrive>);

impl OpenDrives {
    /// Opens drives while another server has them open: first the drives in `held`, then those of `functions`. Later calls
    /// of [`Self::open`] must use equal paths to find these drives.
    ///
    /// Opens only regular files without a profile and faults. If one drive cannot be opened, closes all of them without an
    /// error: the error will be reported when the drive is opened for its function.
    pub(super) fn open_beside(held: &[FunctionOptions], functions: &[FunctionOptions]) -> Self {
        let is_plain = |path: &DrivePath| {
            let mut all = held.iter().chain(functions);
            matches!(path, DrivePath::File(file) if file.is_file())
                && all.all(|other| {
                    other.path != *path
                        || (other.drive.profile.is_none() && other.drive.faults.is_none())
                })
        };
        let mut drives = Self::default();
        let alone = |function| (function, slice::from_ref(function));
        let held = held.iter().map(alone);
        let shared = functions.iter().map(|function| (function, functions));
        for (function, sharing) in held.chain(shared) {
            if is_plain(&function.path) && drives.open(function, sharing.iter(), None).is_err() {
                return Self::default();
            }
        }
        drives
    }

    /// Returns the drive of a function, and opens the drive if necessary. `sharing` are all functions that share the drive,
    /// including this one. Their drive options must agree.
    pub(super) fn open<'a>(
        &mut self,
        function: &FunctionOptions,
        sharing: impl Iterator<Item = &'a FunctionOptions> + Clone,
        persistence: Option<&ServerPersistence>,
    ) -> Result<Arc<Drive>, FunctionDriveError> {
        let path = &function.path;
        let differ = |key| FunctionDriveError::Differ {
            path: path.clone(),
            key,
        };
        let open = self.0.iter().find(|open| open.path == *path);
        let (drive, options) = match open {
            Some(open) => {
                let wanted = function.drive_options();
                if let Some(key) = wanted.conflicting_option(path, &open.options) {
                    return Err(differ(key));
                }
                let drive = open.drive.sibling(function.drive.namespace);
                (drive.map_err(OpenDriveError::from)?, open.options.clone())
            }
            None => {
                let sharing = sharing.filter(|other| other.path == *path);
                let shared = DriveOptions::merge(sharing.map(FunctionOptions::drive_options));
                let shared = shared.map_err(differ)?;
                let memory = match (path, persistence) {
                    (DrivePath::Memory(bytes), Some(persistence))
                        if can_outlive_process(function) =>
                    {
                        Some(persistence.memory_file(*bytes)?)
                    }
                    _ => None,
                };
                let kept_faults = match (&shared.faults, persistence) {
                    (Some(_), Some(persistence)) => Some(persistence.fault_file(path)?),
                    _ => None,
                };
                let options = DriveOptions {
                    namespace: function.drive.namespace,
                    memory,
                    persisted_faults: kept_faults,
                    ..shared
                };
                let outliving = match (path, persistence) {
                    (DrivePath::Pci(_), Some(persistence)) => {
                        persistence.drive_descriptors(&path.to_string())?
                    }
                    _ => PersistedDriveDescriptors::default(),
                };
                let drive = drives::open_with_descriptors(path, options.clone(), outliving);
                if let (DrivePath::Pci(_), Some(persistence)) = (path, persistence) {
                    // The drive is open or has failed, so the descriptors that the predecessor left are not needed any more.
                    match &drive {
                        Ok(_) => persistence.reclaim_drive(&path.to_string()),
                        Err(_) => persistence.release_drive(&path.to_string()),
                    }
                }
                if drive.is_ok() && function.pins_memory() {
                    // The server does not know which VMMs will connect, so it warns about all of them.
                    log::warn!(
                        "Drive {path} pins the memory of its VMs: they must have no balloon and no free page reporting, \
                         unless their VMM prevents both, as QEMU does"
                    );
                }
                (drive?, options)
            }
        };
        let nsid = drive.namespace().nsid;
        let same = |open: &&OpenDrive| open.path == *path && open.drive.namespace().nsid == nsid;
        if let Some(open) = self.0.iter().find(same) {
            return Ok(open.drive.clone());
        }
        self.0.push(OpenDrive {
            drive: drive.clone(),
            path: path.clone(),
            first_byte_name: match path {
                DrivePath::File(file) => first_byte_name(file).ok(),
                _ => None,
            },
            pending_lookup: Mutex::default(),
            options,
        });
        Ok(drive)
    }

    /// Closes unused drives whose path now leads to another file or device. A function that waits for this path will then
    /// open the new file or device.
    pub(super) fn close_moved(&mut self, is_used: impl Fn(&Arc<Drive>) -> bool) {
        self.0.retain(|open| {
            let deadline = Deadline::after(&SystemClock::shared(), UNUSED_LOOKUP_TIMEOUT);
            let is_elsewhere = |moved: MovedDrive| {
                moved.reason.kind() != io::ErrorKind::TimedOut
                    && !system::is_exhaustion(&moved.reason)
            };
            is_used(&open.drive) || !open.find_move(&deadline).is_some_and(is_elsewhere)
        });
    }

    /// Closes all drives for which `used` returns false. Returns the paths of the closed drives.
    pub(super) fn close_unused(
        &mut self,
        used: impl Fn(&DrivePath, &Arc<Drive>) -> bool,
    ) -> Vec<DrivePath> {
        let all = std::mem::take(&mut self.0);
        let used = |open: &OpenDrive| used(&open.path, &open.drive);
        let (open, closed): (Vec<_>, Vec<_>) = all.into_iter().partition(used);
        self.0 = open;
        let mut paths: Vec<_> = closed.into_iter().map(|closed| closed.path).collect();
        paths.retain(|path| self.0.iter().all(|open| open.path != *path));
        paths
    }

    /// Returns a drive that the successor process would not find by its path: a file that was renamed, removed or replaced, or
    /// a device with another number.
    pub(super) fn find_moved(&self, deadline: &Deadline) -> Option<MovedDrive> {
        self.0.iter().find_map(|open| open.find_move(deadline))
    }

    /// Returns all drives with the paths by which they were opened.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&DrivePath, &Arc<Drive>)> {
        self.0.iter().map(|open| (&open.path, &open.drive))
    }

    /// Returns one drive of each host controller.
    pub(super) fn controllers(&self) -> Vec<Arc<Drive>> {
        let mut controllers: Vec<Arc<Drive>> = Vec::new();
        for OpenDrive { drive, .. } in &self.0 {
            if controllers.iter().all(|other| other.path() != drive.path()) {
                controllers.push(drive.clone());
            }
        }
        controllers
    }
}

/// Returns whether a function with these options can continue in the server's successor process. A function on a zoned or
/// key-value `memory:` drive cannot, since the drive's content is lost with the process.
pub(super) fn can_outlive_process(options: &FunctionOptions) -> bool {
    let in_process = matches!(
        options.drive.profile.as_deref(),
        Some(DriveProfile::Zns(_) | DriveProfile::Kv(_))
    );
    !(in_process && matches!(options.path, DrivePath::Memory(_)))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::PathBuf;

    use super::*;

    /// Creates a drive's file.
    fn file(dir: &tempfile::TempDir, name: &str) -> PathBuf {
        let path = dir.path().join(name);
        File::create(&path).unwrap().set_len(1 << 20).unwrap();
        path
    }

    fn options(path: &std::path::Path, more: &str) -> FunctionOptions {
        format!("path={}{more}", path.display()).parse().unwrap()
    }

    fn paths(drives: &OpenDrives) -> Vec<DrivePath> {
        drives.iter().map(|(path, _)| path.clone()).collect()
    }

    #[test]
    fn only_regular_files_are_opened_beside_another_server() {
        let dir = tempfile::tempdir().unwrap();
        let [held, plain, modelled] = ["held", "plain", "modelled"].map(|name| file(&dir, name));
        let held = [options(&held, "")];
        let functions = [
            options(&plain, ",range=0+4K"),
            options(&plain, ",range=4K+4K"),
            options(&modelled, ""),
            options(&modelled, ",profile=ssd"),
            options(&dir.path().join("none"), ""),
            "path=null:1M".parse().unwrap(),
            "path=memory:1M".parse().unwrap(),
        ];
        let mut drives = OpenDrives::open_beside(&held, &functions);
        let opened = [held[0].path.clone(), functions[0].path.clone()];
        assert_eq!(paths(&drives), opened);
        // The functions use the drives that `open_beside` has opened.
        let before: Vec<_> = drives.controllers();
        for function in &functions[..2] {
            let drive = drives.open(function, functions.iter(), None).unwrap();
            assert!(drive.shares_controller_with(&before[1]));
        }
        assert_eq!(paths(&drives), opened);
    }

    #[test]
    fn if_one_drive_fails_none_is_opened_beside_another_server() {
        let dir = tempfile::tempdir().unwrap();
        let [good, bad] = ["good", "bad"].map(|name| file(&dir, name));
        let functions = [
            options(&good, ""),
            options(&bad, ",lba=512"),
            options(&bad, ",lba=4096"),
        ];
        assert!(paths(&OpenDrives::open_beside(&[], &functions)).is_empty());
    }
    #[test]
    fn an_unresponsive_path_is_queried_once_and_closes_no_drive() {
        let dir = tempfile::tempdir().unwrap();
        let image = file(&dir, "drive");
        let wanted = [options(&image, "")];
        let mut drives = OpenDrives::default();
        drop(drives.open(&wanted[0], wanted.iter(), None).unwrap());
        let (answer, pending) = sync_channel(1);
        *drives.0[0].pending_lookup.lock().unwrap() = Some(pending);
        let within = |time| Deadline::after(&SystemClock::shared(), time);
        for _ in 0..2 {
            let moved = drives.find_moved(&within(Duration::ZERO)).unwrap();
            assert!(moved.to_string().contains("does not answer"), "{moved}");
        }
        drives.close_moved(|_| false);
        assert_eq!(drives.0.len(), 1);
        // The late answer is discarded, and the path is looked up again.
        answer.send(Ok("0 of disk:other".to_owned())).unwrap();
        let minute = Duration::from_secs(60);
        let moved = drives.find_moved(&within(minute));
        assert!(moved.is_none(), "{moved:?}");
        std::fs::remove_file(&image).unwrap();
        let moved = drives.find_moved(&within(minute)).unwrap();
        assert!(moved.to_string().contains("No such file"), "{moved}");
    }
}

//! A drive's identity is its storage: several paths to the same storage are one drive, and a drive in use is refused. Needs
//! loop devices.

use std::fs::OpenOptions;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use nvme_guest::DoorbellMode;
use nvme_lease::range::ByteRange;
use nvme_lease::{Lease, LeaseError, LeaseRequest, Ledger, RequestedBytes};
use nvme_mpt::{
    BackendOptions, Drive, LocalBackend, LocalBackendConfig, LocalBackendError, PollerPool,
};
use nvme_mpt_vmm::drives::{self, DriveOptions, DrivePath, OpenDriveError};
use nvme_mpt_vmm::report;

use crate::common::loop_device::{LoopDevice, Mounted, run};
use crate::common::{LEASE, children};

fn open(path: &Path) -> Result<Arc<Drive>, OpenDriveError> {
    // A child may still have copies of descriptors that this process has closed.
    children::wait_for_spawns();
    drives::open(&DrivePath::File(path.to_owned()), DriveOptions::default())
}

fn lease(ledger: &Ledger, id: &str, drive: &Drive, start: u64) -> Result<Lease, LeaseError> {
    children::wait_for_spawns();
    ledger.acquire(&LeaseRequest {
        id,
        drive: drive.identity(),
        nsid: drive.namespace().nsid,
        wanted: RequestedBytes::Range(ByteRange::new(start, LEASE).unwrap()),
        lba_shift: drive.lba_shift(),
        blocks: drive.blocks(),
        previous_data: nvme_lease::PreviousDataPolicy::Kept,
    })
}

fn attach(drive: &Arc<Drive>, lease: Lease) -> Result<LocalBackend, LocalBackendError> {
    LocalBackend::new(LocalBackendConfig {
        drive: drive.clone(),
        lease,
        reservation: None,
        pollers: PollerPool::new(),
        options: BackendOptions {
            queue_pairs: 1,
            doorbells: DoorbellMode::Shadow,
            ..BackendOptions::default()
        },
    })
}

#[test]
fn a_file_and_its_loop_devices_are_one_drive_for_leases_and_names() {
    let Some(device) = LoopDevice::new(4 * LEASE, 1 << 20) else {
        return;
    };
    let Some(part) = device.attach_another(LEASE) else {
        return;
    };
    let file = open(device.file()).unwrap();
    let whole = open(device.device()).unwrap();
    let part = open(&part).unwrap();
    assert_eq!(file.identity().name, whole.identity().name);
    assert_ne!(file.identity().name, part.identity().name);

    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(dir.path());
    let first = lease(&ledger, "a", &file, LEASE).unwrap();
    let refused = |drive, start| {
        let error = lease(&ledger, "b", drive, start).unwrap_err();
        assert!(matches!(error, LeaseError::Overlap { .. }), "{error}");
    };
    refused(&whole, LEASE);
    refused(&part, 0);
    let second = lease(&ledger, "b", &part, LEASE).unwrap();
    refused(&file, 2 * LEASE);
    let third = lease(&ledger, "c", &whole, 0).unwrap();
    let names = first.identity();
    drop((first, second, third));
    let again = lease(&ledger, "a", &part, 0).unwrap();
    assert_eq!(again.identity(), names, "the same bytes by another path");
}

#[test]
fn a_loop_device_and_its_file_share_locks_with_any_ledger() {
    let Some(device) = LoopDevice::new(4 * LEASE, 1 << 20) else {
        return;
    };
    let Some(part) = device.attach_another(LEASE) else {
        return;
    };
    let drives = [device.file(), device.device(), &part].map(|path| open(path).unwrap());
    let [file, whole, part] = &drives;
    let ours = |drive: &Arc<Drive>, start| {
        let ledger = Ledger::in_process();
        attach(drive, lease(&ledger, "id", drive, start).unwrap())
    };
    for (holds, at) in [(file, LEASE), (whole, LEASE), (part, 0)] {
        let held = ours(holds, at).unwrap();
        for (wants, at) in [(file, LEASE), (whole, LEASE), (part, 0)] {
            let error = ours(wants, at).unwrap_err();
            assert!(matches!(error, LocalBackendError::InUse { .. }), "{error}");
        }
        let neighbours = [(file, 0), (whole, 2 * LEASE), (part, 2 * LEASE)];
        let neighbours = neighbours.map(|(drive, at)| ours(drive, at).unwrap());
        drop((held, neighbours));
    }
}

/// A loop device of a file. Drop detaches it.
struct AttachedLoopDevice(String);

impl AttachedLoopDevice {
    fn new(file: &Path, direct: &str) -> Option<Self> {
        let direct = format!("--direct-io={direct}");
        let file = file.to_str().unwrap();
        let device = run(&["losetup", "--find", "--show", &direct, file])?;
        Some(Self(device.trim().to_owned()))
    }

    fn path(&self) -> &Path {
        Path::new(&self.0)
    }
}

impl Drop for AttachedLoopDevice {
    fn drop(&mut self) {
        run(&["losetup", "--detach", &self.0]);
    }
}

/// On ext4, the file is opened with direct I/O, and its loop device uses the page cache by default.
#[test]
fn a_file_is_used_past_the_page_cache_or_through_it() {
    let Some(disk) = LoopDevice::new(64 << 20, 80 << 20) else {
        return;
    };
    let Some(mounted) = Mounted::ext4(disk.device(), "^has_journal") else {
        return;
    };
    let path = mounted.path().join("drive.img");
    let image = std::fs::File::create(&path).unwrap();
    image.set_len(4 * LEASE).unwrap();
    let (Some(cached), Some(direct)) = (
        AttachedLoopDevice::new(&path, "off"),
        AttachedLoopDevice::new(&path, "on"),
    ) else {
        return;
    };
    let ours = |path: &Path, start| {
        let drive = open(path).unwrap();
        attach(
            &drive,
            lease(&Ledger::in_process(), "id", &drive, start).unwrap(),
        )
    };
    let refused = |path: &Path, start| {
        let error = report::chain(&ours(path, start).unwrap_err());
        assert!(error.contains("the page cache"), "{error}");
    };
    let held = ours(&path, 0).unwrap();
    refused(cached.path(), LEASE);
    let neighbours = [ours(&path, LEASE), ours(direct.path(), 2 * LEASE)].map(Result::unwrap);
    drop((held, neighbours));
    let held = ours(cached.path(), 0).unwrap();
    refused(&path, LEASE);
    refused(direct.path(), LEASE);
    drop(held);
    ours(&path, LEASE).unwrap();
}

/// Mount points. Drop unmounts them.
#[derive(Default)]
struct Mounts(Vec<String>);

impl Mounts {
    fn add(&mut self, options: &[&str], source: &Path, point: &Path) -> Option<()> {
        std::fs::create_dir(point).unwrap();
        let point = point.to_str().unwrap();
        run(&[&["mount"], options, &[source.to_str().unwrap(), point]].concat())?;
        self.0.push(point.to_owned());
        Some(())
    }
}

impl Drop for Mounts {
    fn drop(&mut self) {
        for point in self.0.iter().rev() {
            run(&["umount", "--lazy", point]);
        }
    }
}

#[test]
fn a_file_of_a_subvolume_is_one_drive_by_every_mount() {
    let dir = tempfile::tempdir().unwrap();
    let mut mounts = Mounts::default();
    let [image, top, bound, own] =
        ["image", "top", "bound", "own"].map(|name| dir.path().join(name));
    let file = std::fs::File::create(&image).unwrap();
    file.set_len(256 << 20).unwrap();
    let volume = top.join("volume");
    let made = run(&["mkfs.btrfs", "--quiet", image.to_str().unwrap()])
        .and_then(|_| mounts.add(&["-o", "loop"], &image, &top))
        .and_then(|()| run(&["btrfs", "subvolume", "create", volume.to_str().unwrap()]));
    if made.is_none() {
        return;
    }
    let dirs = [top.join("folder"), volume.join("folder")];
    let inodes = dirs.each_ref().map(|directory| {
        std::fs::create_dir(directory).unwrap();
        let file = std::fs::File::create(directory.join("drive.img")).unwrap();
        file.set_len(LEASE).unwrap();
        file.metadata().unwrap().ino()
    });
    assert_eq!(inodes[0], inodes[1], "each subvolume numbers its own");
    let options = ["-o", "loop,subvol=volume"];
    mounts.add(&["--bind"], &dirs[1], &bound).unwrap();
    mounts.add(&options, &image, &own).unwrap();
    let identity = |directory: &Path| {
        let drive = open(&directory.join("drive.img")).unwrap();
        drive.identity().name.to_owned()
    };
    let [other, first] = dirs.each_ref().map(|directory| identity(directory));
    assert_ne!(other, first);
    assert_eq!(identity(&bound), first);
    assert_eq!(identity(&own.join("folder")), first);
}

#[test]
fn functions_of_one_process_share_a_block_device() {
    let Some(device) = LoopDevice::new(4 * LEASE, 1 << 20) else {
        return;
    };
    let ledger = Ledger::in_process();
    let drives = [(); 2].map(|()| open(device.device()).unwrap());
    let leases =
        [("a", 0), ("b", LEASE)].map(|(id, at)| lease(&ledger, id, &drives[0], at).unwrap());
    let held: Vec<_> = drives
        .iter()
        .zip(leases)
        .map(|(drive, lease)| attach(drive, lease).unwrap())
        .collect();
    assert_eq!(held.len(), 2);
}

#[test]
fn what_is_mounted_or_open_exclusively_is_refused_with_its_user() {
    let Some(device) = LoopDevice::new(4 * LEASE, 8 << 20) else {
        return;
    };
    let (node, file) = (device.device(), device.file());
    let user = |path: &Path| match open(path).map(drop) {
        Err(OpenDriveError::InUse { user, .. }) => Some(user),
        result => {
            result.unwrap();
            None
        }
    };
    assert_eq!((user(node), user(file)), (None, None));
    let text = node.to_str().unwrap();
    let point = tempfile::tempdir().unwrap();
    let at = point.path().to_str().unwrap();
    if run(&["mkfs.ext4", "-q", text]).is_none() || run(&["mount", text, at]).is_none() {
        return;
    }
    let users = [node, file].map(user);
    let swapped = {
        run(&["umount", at]).unwrap();
        run(&["mkswap", "-q", text])
            .and_then(|_| run(&["swapon", text]))
            .map(|_| {
                let users = [node, file].map(user);
                run(&["swapoff", text]).unwrap();
                users
            })
    };
    let mounted = format!("the file system on {at}");
    assert_eq!(users, [Some(mounted.clone()), Some(mounted)]);
    if let Some(users) = swapped {
        let swap = format!("swap ({text})");
        assert_eq!(users, [Some(swap.clone()), Some(swap)]);
    }

    let mut options = OpenOptions::new();
    let options = options.read(true).custom_flags(libc::O_EXCL);
    let held = options.open(node).unwrap();
    let exclusive = user(node).unwrap();
    assert!(
        exclusive.contains(&format!("fuser -v {text}")),
        "{exclusive}"
    );
    drop(held);
    children::wait_for_spawns();
    assert_eq!((user(node), user(file)), (None, None));
}

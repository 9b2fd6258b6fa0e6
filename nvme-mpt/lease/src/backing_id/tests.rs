//! Identity of backing storage, derived from fake sysfs and proc trees.

use std::os::unix::fs::symlink;

use tempfile::TempDir;

use super::*;

/// Fake sysfs and proc file systems of a machine.
struct Tree {
    dir: TempDir,
    system: KernelFiles,
}

impl Tree {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let system = KernelFiles::with_root(dir.path());
        let tree = Self { dir, system };
        tree.write("proc/sys/kernel/random/boot_id", "this-boot\n");
        tree
    }

    fn write(&self, path: &str, content: &str) {
        let path = self.dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    /// Creates a block device with a directory in `sys/devices` and the given attributes.
    fn device(&self, dir: &str, number: &str, attributes: &[(&str, &str)]) -> DeviceNumber {
        for (name, value) in attributes {
            self.write(&format!("sys/devices/{dir}/{name}"), &format!("{value}\n"));
        }
        self.write(&format!("sys/devices/{dir}/dev"), number);
        let links = self.dir.path().join("sys/dev/block");
        fs::create_dir_all(&links).unwrap();
        let target = self.dir.path().join("sys/devices").join(dir);
        symlink(target, links.join(number)).unwrap();
        let (major, minor) = number.split_once(':').unwrap();
        DeviceNumber(libc::makedev(
            major.parse().unwrap(),
            minor.parse().unwrap(),
        ))
    }

    fn loop_device(&self, nth: u32, file: &Path, (offset, sectors): (u64, u64)) -> DeviceNumber {
        let attributes = [
            ("size", sectors.to_string()),
            ("loop/backing_file", file.display().to_string()),
            ("loop/offset", offset.to_string()),
        ];
        let attributes = attributes
            .each_ref()
            .map(|(name, value)| (*name, value.as_str()));
        self.device(
            &format!("virtual/loop{nth}"),
            &format!("7:{nth}"),
            &attributes,
        )
    }

    fn mount(&self, device: &str, point: &str) {
        let line = format!("36 35 {device} / {point} rw - ext4 /dev/any rw\n");
        self.write("proc/self/mountinfo", &line);
    }

    fn backing_id(&self, device: DeviceNumber) -> BackingId {
        let BackingDevice { extents, files, .. } = BackingDevice::resolve(&self.system, device);
        BackingId {
            identity: backing_extent::format_identity(&extents).into(),
            extents,
            files,
        }
    }

    /// Creates a device-mapper device with the given table (in the format of `dmsetup table`) and devices below it.
    fn mapped(&self, minor: u32, uuid: &str, table: &str, slaves: &[&str]) -> DeviceNumber {
        let sectors = table.lines().last().map_or(0, |line| {
            let mut words = line.split(' ').map(|word| word.parse::<u64>());
            let [Some(Ok(start)), Some(Ok(length))] = [words.next(), words.next()] else {
                panic!("a target: {line}");
            };
            start + length
        });
        let number = format!("253:{minor}");
        let size = sectors.to_string();
        let attributes = [
            ("size", size.as_str()),
            ("dm/uuid", uuid),
            ("dm/name", uuid),
        ];
        let dir = format!("virtual/dm-{minor}");
        let device = self.device(&dir, &number, &attributes);
        self.write(&format!("tables/{number}"), table);
        for slave in slaves {
            let path = format!("sys/devices/{dir}/slaves/{slave}/dev");
            self.write(&path, slave);
        }
        device
    }

    fn identity(&self, device: DeviceNumber) -> String {
        self.backing_id(device).identity.name
    }

    fn of_file(&self, path: &Path) -> BackingId {
        BackingId::from_path_in(&self.system, path).unwrap()
    }
}

const GIB: u64 = 1 << 30;

fn image() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(GIB).unwrap();
    file
}

#[test]
fn a_disk_keeps_its_name_when_the_kernel_numbers_it_anew() {
    let disk = |wwid: &'static str| [("size", "2097152"), ("device/wwid", wwid)];
    let (one, other) = ("naa.5000c500a1b2c3d4", "t10.ATA     QEMU HARDDISK  QM00001");
    let partition = [("size", "1048576"), ("start", "2048"), ("partition", "1")];
    let identities = |first, second| {
        let tree = Tree::new();
        let a = tree.device("pci/ata1/sda", "8:0", &disk(first));
        let a1 = tree.device("pci/ata1/sda/sda1", "8:1", &partition);
        let b = tree.device("pci/ata2/sdb", "8:16", &disk(second));
        let b1 = tree.device("pci/ata2/sdb/sdb1", "8:17", &partition);
        [a, a1, b, b1].map(|device| tree.identity(device))
    };
    let before = identities(one, other);
    assert_eq!(
        before,
        [
            "disk:naa.5000c500a1b2c3d4",
            "1048576+536870912 of disk:naa.5000c500a1b2c3d4",
            "disk:t10.ATA_____QEMU_HARDDISK__QM00001",
            "1048576+536870912 of disk:t10.ATA_____QEMU_HARDDISK__QM00001",
        ]
    );
    let [a, a1, b, b1] = identities(other, one);
    assert_eq!(before, [b, b1, a, a1]);
}

#[test]
fn disks_of_each_kind_have_a_name_that_is_not_the_kernels() {
    let tree = Tree::new();
    let names = [
        // The serial number belongs to the controller, and so to all its namespaces.
        (
            "259:0",
            "nvme0n1",
            &[("wwid", "eui.0025385b71b0a1c2"), ("device/serial", "S4EV")][..],
            "disk:eui.0025385b71b0a1c2",
        ),
        ("254:0", "vda", &[("serial", "root disk")], "disk:root_disk"),
        (
            "179:0",
            "mmcblk0",
            &[("device/cid", "1501004d")],
            "disk:1501004d",
        ),
        (
            "253:0",
            "dm-0",
            &[("dm/uuid", "LVM-abc"), ("dm/name", "vg-lv")],
            "dm:LVM-abc",
        ),
        (
            "253:1",
            "dm-1",
            &[("dm/uuid", ""), ("dm/name", "by hand")],
            "dm:by_hand",
        ),
        ("9:0", "md0", &[("md/uuid", "1234")], "md:1234"),
        // These devices can be identified only until the next boot.
        ("43:0", "nbd0", &[("diskseq", "9")], "disk:this-boot/9"),
        ("252:1", "vdb", &[("serial", "")], "disk:this-boot/252:1"),
        // These devices lose their content at a reboot.
        (
            "252:0",
            "zram0",
            &[("diskseq", "9"), ("comp_algorithm", "[lzo]")],
            "ram:this-boot/9",
        ),
        ("1:0", "ram0", &[("serial", "")], "ram:this-boot/1:0"),
    ];
    for (number, dir, attributes, identity) in names {
        let device = tree.device(dir, number, attributes);
        assert_eq!(tree.identity(device), identity);
    }
}

#[test]
fn a_loop_device_is_its_file() {
    let tree = Tree::new();
    let file = image();
    let of_file = tree.of_file(file.path());
    let whole = tree.loop_device(0, file.path(), (0, 1 << 21));
    assert_eq!(tree.identity(whole), of_file.identity().name);
    let again = tree.loop_device(1, file.path(), (0, 1 << 20));
    assert_eq!(
        tree.identity(again),
        of_file.identity().name,
        "a shorter one"
    );
    let part = tree.loop_device(2, file.path(), (4096, 8));
    let base = of_file.identity().name.clone();
    assert_eq!(tree.identity(part), format!("4096+4096 of {base}"));
    let long = tree.loop_device(3, file.path(), (4096, 1 << 20));
    let on_long = [("size", "8"), ("start", "2048"), ("partition", "1")];
    let on_long = tree.device("virtual/loop3/loop3p1", "259:10", &on_long);
    assert_eq!(tree.identity(on_long), format!("1052672+4096 of {base}"));
    let files = tree.backing_id(on_long).files;
    assert_eq!(files.len(), 1);
    assert_eq!(
        (files[0].path.as_path(), files[0].offset),
        (file.path(), 1_052_672)
    );
    assert!(files[0].is_same_file(&file.reopen().unwrap()).unwrap());
    assert!(
        !files[0]
            .is_same_file(&tempfile::tempfile().unwrap())
            .unwrap()
    );
    assert_eq!(tree.backing_id(long).files.len(), 1);

    let other = image();
    assert_ne!(tree.of_file(other.path()).identity().name, base);
    let link = tree.dir.path().join("link");
    fs::hard_link(file.path(), &link).unwrap();
    assert_eq!(
        tree.of_file(&link).identity().name,
        base,
        "another path of one inode"
    );

    let deleted = tree.loop_device(4, Path::new("/gone (deleted)"), (0, 8));
    assert_eq!(tree.identity(deleted), "disk:this-boot/7:4");
}

#[test]
fn a_file_is_of_the_disk_that_its_file_system_is_on() {
    let tree = Tree::new();
    let file = image();
    let metadata = file.as_file().metadata().unwrap();
    let number = DeviceNumber(metadata.dev()).to_string();
    let inode = metadata.ino();
    if !number.starts_with("0:") {
        tree.device("disk", &number, &[("serial", "abc")]);
        assert_eq!(
            tree.of_file(file.path()).identity().name,
            format!("file:{inode}@disk:abc")
        );
    }
    // The identity is the same whether the process can read the volume's table or not.
    for table in ["0 2048 linear 8:0 2048\n", "unreadable"] {
        if number.starts_with("0:") {
            break;
        }
        let tree = Tree::new();
        tree.device("sda", "8:0", &[("size", "4096"), ("serial", "abc")]);
        let volume = [("size", "2048"), ("dm/uuid", "LVM-a"), ("dm/name", "a")];
        tree.device("virtual/dm-0", &number, &volume);
        tree.write(&format!("tables/{number}"), table);
        tree.write("sys/devices/virtual/dm-0/slaves/sda/dev", "8:0");
        assert_eq!(
            tree.of_file(file.path()).identity().name,
            format!("file:{inode}@dm:LVM-a")
        );
    }
    let tree = Tree::new();
    let mount = |kind, source| {
        let dir = file.path().parent().unwrap().display();
        let lines = format!(
            "1 0 0:9 / / rw - overlay overlay rw\n2 1 0:99 /sub {dir} rw - {kind} {source} rw\n"
        );
        tree.write("proc/self/mountinfo", &lines);
        tree.of_file(file.path()).identity().name.clone()
    };
    assert_eq!(
        mount("nfs4", "host:/export"),
        format!("file:{inode}@nfs4:host:/export:/")
    );
    assert_eq!(
        mount("tmpfs", "none"),
        format!("file:{inode}@this-boot/{number}")
    );
}

#[test]
fn a_bind_mount_gives_a_file_no_other_name() {
    let tree = Tree::new();
    let file = image();
    let dir = file.path().parent().unwrap().display();
    let identity = |root: &str, kind: &str, source: &str, options: &str| {
        let line = format!("2 1 0:99 {root} {dir} rw - {kind} {source} {options}\n");
        tree.write("proc/self/mountinfo", &line);
        tree.of_file(file.path()).identity().name.clone()
    };
    let zfs = |root| identity(root, "zfs", "pool/data", "rw,xattr");
    assert_eq!(zfs("/srv"), zfs("/"));
    let nfs = |root, source| identity(root, "nfs4", source, "rw,vers=4.2");
    assert_eq!(nfs("/srv", "host:/export/srv"), nfs("/", "host:/export"));
    assert_ne!(nfs("/", "host:/export/srv"), nfs("/", "host:/export"));

    // The mount options contain the subvolume of the mounted directory.
    let btrfs = |root, volume| identity(root, "btrfs", "/dev/absent", volume);
    let volume = "rw,space_cache=v2,subvolid=256,subvol=/@\\054\\040a";
    let whole = btrfs("/@,\\040a", volume);
    assert!(whole.ends_with("@btrfs:/dev/absent:/@,_a"), "{whole}");
    assert_eq!(btrfs("/@,\\040a/srv", volume), whole);
    let other = "rw,space_cache=v2,subvolid=257,subvol=/@/srv";
    assert_ne!(btrfs("/@/srv", other), whole);
    assert_ne!(btrfs("/", "rw,subvolid=5,subvol=/"), whole);
}

#[test]
fn what_is_mounted_or_swapped_on_is_in_use() {
    let tree = Tree::new();
    let disk = tree.device(
        "sda",
        "8:0",
        &[("size", "2097152"), ("device/wwid", "naa.1")],
    );
    let partition = |number, start| {
        let attributes = [("size", "1048576"), ("start", start), ("partition", "1")];
        tree.device(&format!("sda/{number}"), number, &attributes)
    };
    let (first, second) = (partition("8:1", "0"), partition("8:2", "1048576"));
    let file = image();
    let whole = tree.loop_device(0, file.path(), (0, 1 << 20));
    let far = tree.loop_device(1, file.path(), (1 << 29, 1 << 20));
    let of_file = tree.of_file(file.path());
    let crypt = [("size", "2048"), ("dm/uuid", "CRYPT-1")];
    tree.device("virtual/dm-0", "253:0", &crypt);
    tree.write("sys/devices/virtual/dm-0/slaves/loop0/dev", "7:0\n");

    let user = |backing_id: &BackingId| backing_id.find_user_in(&tree.system);
    let all = [disk, first, second, whole, far].map(|device| tree.backing_id(device));
    let used = || {
        let devices = all.each_ref().map(|backing_id| user(backing_id).is_some());
        (devices, user(&of_file).is_some())
    };
    assert_eq!(used(), ([false; 5], false));
    tree.mount("8:1", "/mnt\\040one");
    assert_eq!(user(&all[1]).unwrap(), "the file system on /mnt one");
    assert_eq!(used(), ([true, true, false, false, false], false));
    tree.mount("7:0", "/mnt");
    assert_eq!(used(), ([false, false, false, true, false], true));
    tree.mount("253:0", "/mnt");
    assert_eq!(
        used(),
        ([false, false, false, true, false], true),
        "through a mapping"
    );
    tree.mount("7:1", "/mnt");
    assert_eq!(used(), ([false, false, false, false, true], true));
    tree.mount("0:30", "/mnt");
    assert_eq!(used(), ([false; 5], false));
    tree.write(
        "proc/swaps",
        &format!("Filename\n{} file 1 2 3\n", file.path().display()),
    );
    assert_eq!(used(), ([false, false, false, true, true], true));
    assert!(user(&of_file).unwrap().starts_with("swap (/"));
}

#[test]
fn the_names_of_holders_are_those_of_a_disk_and_its_partitions() {
    let tree = Tree::new();
    let disk = tree.device("sda", "8:0", &[("size", "2048")]);
    tree.device(
        "sda/sda1",
        "8:1",
        &[("partition", "1"), ("start", "0"), ("size", "8")],
    );
    assert!(tree.system.holders(disk).is_empty());
    tree.write("sys/devices/sda/sda1/holders/dm-3/dev", "253:3");
    tree.write("sys/devices/sda/holders/md0/dev", "9:0");
    assert_eq!(tree.system.holders(disk), ["dm-3", "md0"]);
}

#[test]
fn circular_devices_terminate() {
    let tree = Tree::new();
    let device = tree.device("virtual/dm-0", "253:0", &[("size", "8"), ("dm/uuid", "a")]);
    tree.write("sys/devices/virtual/dm-0/slaves/dm-0/dev", "253:0");
    assert_eq!(tree.identity(device), "0+4096 of dm:a over 0+4096/dm:a");
}

#[test]
fn a_mapped_device_is_its_table() {
    let tree = Tree::new();
    let disk = [("size", "2097152"), ("device/wwid", "naa.1")];
    tree.device("sda", "8:0", &disk);
    let partition = [("size", "1048576"), ("start", "2048"), ("partition", "1")];
    tree.device("sda/sda1", "8:1", &partition);
    let other = [("size", "2097152"), ("device/wwid", "naa.2")];
    tree.device("sdb", "8:16", &other);
    let linear = tree.mapped(0, "LVM-a", "0 2048 linear 8:1 4096\n", &["8:1"]);
    assert_eq!(tree.identity(linear), "3145728+1048576 of disk:naa.1");
    let table = "0 8 linear 8:16 0\n8 16 linear 253:0 8\n";
    let two = tree.mapped(1, "LVM-b", table, &["8:16", "253:0"]);
    assert_eq!(
        tree.identity(two),
        "0+4096 of disk:naa.2 and 3149824+8192 of disk:naa.1"
    );
    // Two targets map the same part of a device.
    let table = "0 8 linear 8:16 8\n8 16 linear 8:16 16\n";
    let one = tree.mapped(5, "LVM-c", table, &["8:16"]);
    assert_eq!(tree.identity(one), "4096+12288 of disk:naa.2");
    // A part beyond the end of the underlying device, a hole, and an unreadable table.
    for (minor, table) in [
        (2, "0 8 linear 8:16 2097152\n"),
        (3, "0 8 linear 8:16 0\n16 8 linear 8:16 8\n"),
        (4, "unreadable"),
    ] {
        let number = format!("253:{minor}");
        let attributes = [("size", "8"), ("dm/uuid", "x"), ("dm/name", "x")];
        let dir = format!("virtual/dm-{minor}");
        let device = tree.device(&dir, &number, &attributes);
        tree.write(&format!("tables/{number}"), table);
        tree.write(&format!("sys/devices/{dir}/slaves/sdb/dev"), "8:16");
        assert_eq!(
            tree.identity(device),
            "0+4096 of dm:x over 0+1073741824/disk:naa.2"
        );
    }
}

#[test]
fn a_mapping_that_moves_bytes_overlaps_all_that_is_below() {
    let tree = Tree::new();
    let size = [("size", "2097152"), ("device/wwid", "naa.1")];
    let disk = tree.device("sda", "8:0", &size);
    let half = tree.mapped(0, "half", "0 1048576 linear 8:0 0\n", &["8:0"]);
    let rest = tree.mapped(1, "rest", "0 1048576 linear 8:0 1048576\n", &["8:0"]);
    let crypt = tree.mapped(2, "CRYPT-1", "0 8 crypt\n8 8 error\n", &["253:0"]);
    assert_eq!(
        tree.identity(crypt),
        "0+4096 of dm:CRYPT-1 over 0+536870912/disk:naa.1 and 4096+4096 of dm:CRYPT-1"
    );
    let striped = tree.mapped(
        3,
        "s",
        "0 16 striped 2 8 8:0 0 253:1 0\n",
        &["8:0", "253:1"],
    );
    let overlaps = |one: DeviceNumber, other: DeviceNumber| {
        let range = "0+4K".parse().unwrap();
        let (one, other) = (tree.identity(one), tree.identity(other));
        let of = |drive| backing_extent::DriveByteRange { drive, range };
        let found = backing_extent::do_overlap(of(&one), of(&other));
        assert_eq!(backing_extent::do_overlap(of(&other), of(&one)), found);
        found
    };
    assert!(overlaps(crypt, disk) && overlaps(crypt, half) && overlaps(crypt, striped));
    assert!(!overlaps(crypt, rest) && overlaps(striped, rest));
    // Volumes on the same mapping are identified by their offsets in the mapping.
    let first = tree.mapped(4, "LVM-1", "0 8 linear 253:3 0\n", &["253:3"]);
    let second = tree.mapped(5, "LVM-2", "0 8 linear 253:3 8\n", &["253:3"]);
    assert!(overlaps(first, striped) && overlaps(first, half));
    assert!(!overlaps(first, second));
}

#[test]
fn thin_volumes_and_snapshots_are_apart() {
    let tree = Tree::new();
    tree.device(
        "sda",
        "8:0",
        &[("size", "2097152"), ("device/wwid", "naa.1")],
    );
    let data = tree.mapped(0, "data", "0 4096 linear 8:0 0\n", &["8:0"]);
    let pool = "0 4096 thin-pool 253:0 253:0 128 0\n";
    tree.mapped(1, "POOL", pool, &["253:0"]);
    let thin = |minor, number| {
        let table = format!("0 64 thin 253:1 {number}\n");
        tree.mapped(minor, &format!("thin-{minor}"), &table, &["253:1"])
    };
    let [one, two, again] = [(2, 1), (3, 2), (4, 1)].map(|(minor, number)| thin(minor, number));
    let real = tree.mapped(5, "real", "0 64 linear 8:0 8192\n", &["8:0"]);
    let cow = tree.mapped(6, "cow", "0 64 linear 8:0 16384\n", &["8:0"]);
    let snapshot = "0 64 snapshot 253:5 253:6 P 16\n";
    let snapshot = tree.mapped(7, "snapshot", snapshot, &["253:5", "253:6"]);
    let origin = "0 64 snapshot-origin 253:5\n";
    let origin = tree.mapped(8, "origin", origin, &["253:5"]);
    let overlaps = |one: DeviceNumber, other: DeviceNumber| {
        let range = "0+4K".parse().unwrap();
        let (one, other) = (tree.identity(one), tree.identity(other));
        let of = |drive| backing_extent::DriveByteRange { drive, range };
        backing_extent::do_overlap(of(&one), of(&other))
    };
    assert_eq!(tree.identity(one), tree.identity(again));
    assert!(!overlaps(one, two) && overlaps(one, data));
    assert!(overlaps(origin, real) && overlaps(snapshot, cow));
    assert!(!overlaps(snapshot, origin) && !overlaps(snapshot, real));
}

#[test]
fn a_mapped_device_locks_its_parts_of_files() {
    let tree = Tree::new();
    let (one, two) = (image(), image());
    tree.loop_device(0, one.path(), (4096, 16));
    tree.loop_device(1, two.path(), (0, 16));
    let table = "0 8 linear 7:0 8\n8 8 linear 7:1 0\n";
    let mapped = tree.mapped(0, "both", table, &["7:0", "7:1"]);
    let files = tree.backing_id(mapped).files;
    let parts = |start, length| {
        let parts = files.iter().map(|file| file.file_part(start, length));
        parts.collect::<Vec<_>>()
    };
    assert_eq!(files.len(), 2);
    assert_eq!(parts(0, 8192), [Some((8192, 4096)), Some((0, 4096))]);
    assert_eq!(parts(2048, 1024), [Some((10_240, 1024)), None]);
    assert_eq!(parts(4096, 4096), [None, Some((0, 4096))]);
}

#[test]
fn an_nvme_namespace_is_named_like_its_drive_behind_a_pci_address() {
    let tree = Tree::new();
    let namespace = |nth: u32, nsid, nqn| {
        let attributes = [
            ("size", "2097152"),
            ("wwid", "eui.1"),
            ("nsid", nsid),
            ("device/subsysnqn", nqn),
            ("device/serial", "S4EV"),
            ("device/model", "SSD 980"),
            ("device/device/vendor", "0x144d"),
        ];
        tree.device(&format!("nvme{nth}n1"), &format!("259:{nth}"), &attributes)
    };
    let nqn = "nqn.1994-11.com.samsung:nvme:980:S4EV";
    let [one, two] = ["1", "2"].map(|nsid| namespace(nsid.parse().unwrap(), nsid, nqn));
    assert_eq!(tree.identity(one), format!("nvme:{nqn}:S4EV"));
    assert_eq!(tree.identity(two), format!("nvme:{nqn}:S4EV/2"));
    let part = [("size", "8"), ("start", "8"), ("partition", "1")];
    let part = tree.device("nvme2n1/nvme2n1p1", "259:9", &part);
    assert_eq!(
        tree.identity(part),
        format!("4096+4096 of nvme:{nqn}:S4EV/2")
    );
    let made_up = "nqn.2014.08.org.nvmexpress:144d144dS4EV";
    let older = namespace(3, "1", made_up);
    assert_eq!(tree.identity(older), "nvme:144d:SSD_980:S4EV");
}

#[test]
fn a_file_on_a_disk_without_a_name_is_named_by_its_file_system() {
    let boot = "0b000000-0000-4000-8000-000000000001";
    let file = image();
    let metadata = file.as_file().metadata().unwrap();
    let (number, inode) = (DeviceNumber(metadata.dev()).to_string(), metadata.ino());
    let label = file_system::uuid_name(file.path());
    let tree = Tree::new();
    tree.write("proc/sys/kernel/random/boot_id", boot);
    let (name, by_boot) = match number.starts_with("0:") {
        // The file system is btrfs, or in memory.
        true => {
            let dir = file.path().parent().unwrap().display();
            tree.device("vda", "252:0", &[("diskseq", "7")]);
            let line = format!("2 1 252:0 / {dir} rw - ext4 /dev/vda rw\n");
            tree.write("proc/self/mountinfo", &line);
            let old_format = format!("file:{inode}@ext4:disk:{boot}/7:/");
            (format!("file:{inode}@fs:"), old_format)
        }
        false => {
            tree.device("vda", &number, &[("diskseq", "7")]);
            let old_format = format!("file:{inode}@disk:{boot}/7");
            (format!("file:{inode}@fs:"), old_format)
        }
    };
    let backing_id = tree.of_file(file.path());
    match label {
        Some(label) => {
            assert_eq!(backing_id.identity().name, format!("{name}{label}"));
            assert!(backing_id.identity().possible_names.contains(&by_boot));
        }
        None => {
            assert_eq!(backing_id.identity().name, by_boot);
        }
    }
    // The identity of a volume on a named disk does not change.
    tree.write("sys/devices/vda/serial", "abc");
    let backing_id = tree.of_file(file.path());
    assert!(
        backing_id.identity().name.contains("disk:abc"),
        "{backing_id:?}"
    );
}

#[test]
fn a_drive_has_all_names_that_it_may_be_known_by() {
    let boot = "0b000000-0000-4000-8000-000000000001";
    let tree = Tree::new();
    tree.write("proc/sys/kernel/random/boot_id", boot);
    let names = |device: DeviceNumber| {
        let resolved = |naming| {
            backing_extent::format_identity(
                &BackingDevice::resolve(&tree.system.with_naming(naming), device).extents,
            )
        };
        let mut names = vec![resolved(DeviceNaming::Current)];
        names.extend(DeviceNaming::ALTERNATIVES.map(resolved));
        names.dedup();
        names
    };
    let attributes = [("diskseq", "7"), ("wwid", "eui.1"), ("serial", "abc")];
    let disk = tree.device("vda", "252:0", &attributes);
    let by_boot = format!("disk:{boot}/7");
    assert_eq!(
        names(disk),
        ["disk:eui.1", "disk:abc", "disk:eui.1", &by_boot]
    );
    let part = [("size", "8"), ("start", "8"), ("partition", "1")];
    let part = tree.device("vda/vda1", "252:1", &part);
    assert_eq!(names(part)[1], "4096+4096 of disk:abc");
    let bare = tree.device("vdb", "252:16", &[("diskseq", "8")]);
    assert_eq!(names(bare), [format!("disk:{boot}/8")]);
    // The host's disks, found under any of their names.
    let host = HostDisks::from_system(&tree.system);
    assert_eq!(host.boot_id, boot);
    for known in [
        "disk:eui.1",
        "disk:abc",
        &by_boot,
        "file:1@disk:abc",
        "file:1@8+8_of_disk:abc",
        "file:1@btrfs:disk:abc:/@",
    ] {
        assert!(host.has_disk(known), "{known}");
    }
    for unknown in [
        "disk:ab",
        "disk:abcd",
        "disk:eui.1/2",
        "disk:9",
        "file:1@fs:ext-1",
    ] {
        assert!(!host.has_disk(unknown), "{unknown}");
    }
}

/// Adds a directory on overlayfs to the mount table. The visible files are links to files in the upper directory.
fn overlay(tree: &Tree, point: &Path, root: &str, upper: &Path) {
    let (point, upper) = (point.display(), upper.display());
    let line = format!(
        "1 0 0:98 / / rw - zfs pool rw\n2 1 0:99 {root} {point} rw - overlay overlay rw,lowerdir=/a,upperdir={upper}\n"
    );
    tree.write("proc/self/mountinfo", &line);
}

#[test]
fn a_file_on_overlay_is_the_one_in_the_upper_directory() {
    let tree = Tree::new();
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().canonicalize().unwrap();
    let [shown, upper] = ["shown", "upper"].map(|name| dir.join(name));
    fs::create_dir_all(shown.join("sub")).unwrap();
    fs::create_dir_all(upper.join("sub")).unwrap();
    let file = upper.join("sub/x");
    fs::write(&file, "data").unwrap();
    let path = shown.join("sub/x");
    fs::hard_link(&file, &path).unwrap();
    overlay(&tree, &shown, "/", &upper);
    let below = tree.of_file(&file);
    let backing_id = tree.of_file(&path);
    assert_eq!(backing_id.identity().name, below.identity().name);
    assert!(below.files().is_empty());
    let [locked] = backing_id.files() else {
        panic!("one file is locked below: {backing_id:?}");
    };
    assert_eq!(
        (&locked.path, locked.file_part(1, 2)),
        (&file, Some((1, 2)))
    );
    assert!(
        locked
            .is_same_file(&fs::File::open(&file).unwrap())
            .unwrap()
    );
    // The overlay is visible through a bind mount of a subdirectory.
    overlay(&tree, &shown.join("sub"), "/sub", &upper);
    assert_eq!(tree.of_file(&path).identity().name, below.identity().name);
    // A loop device on the overlay is backed by both files.
    overlay(&tree, &shown, "/", &upper);
    let device = tree.loop_device(0, &path, (0, 8));
    assert_eq!(tree.identity(device), below.identity().name);
    let files = tree.backing_id(device).files;
    let files: Vec<_> = files.iter().map(|file| &file.path).collect();
    assert_eq!(files, [&file, &path]);
}

#[test]
fn a_file_in_use_under_another_name_is_refused() {
    let tree = Tree::new();
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().canonicalize().unwrap();
    let [shown, upper] = ["shown", "upper"].map(|name| dir.join(name));
    fs::create_dir_all(&shown).unwrap();
    fs::create_dir_all(&upper).unwrap();
    let path = shown.join("x");
    fs::write(&path, "data").unwrap();
    let refusal = || {
        let error = BackingId::from_path_in(&tree.system, &path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Unsupported);
        error.to_string()
    };
    // The file is missing in the upper directory, is a different file, or was copied up.
    overlay(&tree, &shown, "/", &upper);
    assert!(refusal().contains("could be leased twice"), "{}", refusal());
    fs::write(upper.join("x"), "data").unwrap();
    assert!(refusal().contains("volume"), "{}", refusal());
    overlay(&tree, &shown, "/", &dir.join("absent"));
    refusal();
    let mount = |kind: &str, options: &str| {
        let line = format!("2 1 0:99 / {} rw - {kind} s rw{options}\n", shown.display());
        tree.write("proc/self/mountinfo", &line);
    };
    for kind in [
        "ecryptfs",
        "aufs",
        "fuse.bindfs",
        "fuse.mergerfs",
        "9p",
        "virtiofs",
        "cifs",
    ] {
        mount(kind, "");
        assert!(refusal().contains(kind), "{}", refusal());
        let device = tree.loop_device(0, &path, (0, 8));
        let resolved = BackingDevice::resolve(&tree.system, device);
        assert!(resolved.refusal.is_some(), "{kind}");
        fs::remove_file(tree.dir.path().join("sys/dev/block/7:0")).unwrap();
    }
    mount("nfs4", ",vers=4.2,local_lock=all");
    refusal();
    mount("nfs", ",vers=3,nolock");
    refusal();
    for (kind, options) in [
        ("nfs4", ",vers=4.2,local_lock=none"),
        ("fuse", ",user_id=0"),
        ("fuse.glusterfs", ""),
        ("ceph", ""),
        ("zfs", ""),
    ] {
        mount(kind, options);
        tree.of_file(&path);
    }
    // This is the root file system of a container. Its lower directories have no other name in the container.
    let absent = "1 0 0:9 / / rw - overlay overlay rw,lowerdir=/absent/a,upperdir=/absent/b\n";
    tree.write("proc/self/mountinfo", absent);
    assert!(
        tree.of_file(&path)
            .identity()
            .name
            .ends_with("@overlay:overlay:/")
    );
}

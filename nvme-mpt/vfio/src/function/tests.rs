//! PCI functions on fake hosts, which are directories.

use std::os::unix::fs::symlink;

use super::*;

/// A fake host with one NVMe function, which is alone in IOMMU group 7 and bound to the `nvme` driver.
struct Host {
    dir: tempfile::TempDir,
    root: HostRoot,
}

const ADDRESS: &str = "0000:01:00.0";

impl Host {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("folder");
        let at = |name: &str| dir.path().join(name);
        let root = HostRoot {
            sys: at("sys"),
            proc: at("proc"),
            dev: at("dev"),
        };
        let host = Self { dir, root };
        host.function(ADDRESS, "0x010802", Some("nvme"));
        host.disk("nvme0", "nvme0n1", "1", "2097152", "512", "259:0");
        host.write(
            &format!("{}/nvme/nvme0/model", host.path(ADDRESS)),
            "A drive                \n",
        );
        host.write(&format!("{}/nvme/nvme0/serial", host.path(ADDRESS)), "S1\n");
        host.write(
            "proc/self/mountinfo",
            "22 1 0:20 / / rw - ext4 /dev/vda1 rw\n",
        );
        host
    }

    fn path(&self, address: &str) -> String {
        format!("sys/bus/pci/devices/{address}")
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.dir.path().join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("folder");
        fs::write(path, text).expect("write");
    }

    fn link(&self, path: &str, target: impl AsRef<Path>) {
        let path = self.dir.path().join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("folder");
        symlink(target, path).expect("link");
    }

    /// Adds a function to IOMMU group 7.
    fn function(&self, address: &str, class: &str, driver: Option<&str>) {
        let path = self.path(address);
        for (file, text) in [
            ("vendor", "0x1b36"),
            ("device", "0x0010"),
            ("class", class),
            ("driver_override", "(null)"),
            ("numa_node", "-1"),
        ] {
            self.write(&format!("{path}/{file}"), &format!("{text}\n"));
        }
        if let Some(driver) = driver {
            self.link(
                &format!("{path}/driver"),
                format!("../../../bus/pci/drivers/{driver}"),
            );
        }
        let group = self.root.sys.join("kernel/iommu_groups/7");
        self.link(&format!("{path}/iommu_group"), &group);
        let function = self.dir.path().join(&path);
        self.link(
            &format!("sys/kernel/iommu_groups/7/devices/{address}"),
            function,
        );
    }

    fn disk(&self, controller: &str, disk: &str, nsid: &str, sectors: &str, lba: &str, dev: &str) {
        let path = format!("{}/nvme/{controller}/{disk}", self.path(ADDRESS));
        self.disk_at(&path, nsid, sectors, lba, dev);
        self.write(&format!("dev/{disk}"), "");
    }

    fn disk_at(&self, path: &str, nsid: &str, sectors: &str, lba: &str, dev: &str) {
        for (file, text) in [
            ("nsid", nsid),
            ("size", sectors),
            ("queue/logical_block_size", lba),
            ("dev", dev),
        ] {
            self.write(&format!("{path}/{file}"), &format!("{text}\n"));
        }
    }

    fn disk_path(&self) -> String {
        format!("{}/nvme/nvme0/nvme0n1", self.path(ADDRESS))
    }

    fn find(&self) -> PciFunction {
        let address = ADDRESS.parse().expect("address");
        PciFunction::find(&self.root, address).expect("function")
    }

    fn users(&self) -> Vec<String> {
        let controller = self.find().controller.expect("controller");
        let users = controller.users(&self.root).expect("users");
        users.iter().map(DiskUser::to_string).collect()
    }
}

#[test]
fn a_function_is_what_the_kernel_shows() {
    let host = Host::new();
    host.disk("nvme0", "nvme0n3", "3", "16", "4096", "259:5");
    let found = host.find();
    assert_eq!((found.vendor, found.device), (0x1B36, 0x10));
    assert!(found.is_nvme());
    assert_eq!(found.driver.as_deref(), Some("nvme"));
    assert_eq!((&found.driver_override, found.numa_node), (&None, None));
    let group = found.iommu_group.expect("group");
    assert_eq!((group.number, group.members.len()), (7, 1));
    let controller = found.controller.expect("controller");
    let KernelController {
        name,
        model,
        serial,
        namespaces,
    } = controller;
    assert_eq!((&*name, &*model, &*serial), ("nvme0", "A drive", "S1"));
    let namespaces: Vec<_> = namespaces
        .iter()
        .map(|namespace| {
            (
                namespace.nsid,
                &*namespace.disk,
                namespace.bytes,
                namespace.lba_size,
            )
        })
        .collect();
    assert_eq!(
        namespaces,
        [(1, "nvme0n1", 1 << 30, 512), (3, "nvme0n3", 8192, 4096)]
    );

    host.write(
        &format!("{}/driver_override", host.path(ADDRESS)),
        "vfio-pci\n",
    );
    host.write(&format!("{}/numa_node", host.path(ADDRESS)), "1\n");
    let found = host.find();
    assert_eq!(found.driver_override.as_deref(), Some(VFIO_PCI));
    assert_eq!(found.numa_node, Some(1));
}

#[test]
fn namespaces_with_several_paths_are_found_at_their_disk() {
    let host = Host::new();
    let controller = format!("{}/nvme/nvme0", host.path(ADDRESS));
    host.write(&format!("{controller}/nvme1c0n2/size"), "0\n");
    host.disk_at("sys/block/nvme1n2", "2", "8", "512", "259:9");
    let namespaces = host.find().controller.expect("controller").namespaces;
    let disks: Vec<_> = namespaces
        .iter()
        .map(|namespace| &*namespace.disk)
        .collect();
    assert_eq!(disks, ["nvme0n1", "nvme1n2"]);
}

#[test]
fn functions_are_listed_by_class_and_address() {
    let host = Host::new();
    host.function("0000:00:1f.2", "0x010601", Some("ahci"));
    host.function("0000:00:04.0", "0x010802", None);
    let functions = PciFunction::list(&host.root).expect("functions");
    let addresses: Vec<_> = functions.iter().map(|f| f.address.to_string()).collect();
    assert_eq!(addresses, ["0000:00:04.0", ADDRESS]);

    let other_address = "0000:02:00.0".parse().expect("address");
    let error = PciFunction::find(&host.root, other_address).expect_err("none");
    assert!(matches!(error, PciFunctionError::NotFound(_)), "{error}");
    let nothing = HostRoot {
        sys: host.dir.path().join("nothing"),
        ..host.root.clone()
    };
    assert_eq!(PciFunction::list(&nothing).expect("none"), []);
}

#[test]
fn what_others_of_the_group_need() {
    let host = Host::new();
    host.function("0000:00:1c.0", "0x060400", Some("pcieport"));
    host.function("0000:01:00.1", "0x010802", Some("vfio-pci"));
    host.function("0000:01:00.2", "0x020000", None);
    assert_eq!(host.find().others_with_host_drivers().count(), 0);
    host.function("0000:01:00.3", "0x020000", Some("e1000e"));
    let function = host.find();
    let others: Vec<_> = function.others_with_host_drivers().collect();
    assert_eq!(others, [("0000:01:00.3", "e1000e")]);
}

#[test]
fn a_disk_that_nobody_uses() {
    let host = Host::new();
    assert_eq!(host.users(), [] as [String; 0]);
    let (_claim, users) = {
        let controller = host.find().controller.expect("controller");
        controller.claim_disks(&host.root).expect("claim")
    };
    assert_eq!(users, []);
}

#[test]
fn mounts_swap_and_holders_are_users() {
    let host = Host::new();
    let disk = host.disk_path();
    for (part, dev) in [
        ("nvme0n1p1", "259:1"),
        ("nvme0n1p2", "259:2"),
        ("nvme0n1p3", "259:3"),
    ] {
        host.write(&format!("{disk}/{part}/partition"), "1\n");
        host.write(&format!("{disk}/{part}/dev"), dev);
    }
    host.write(
        "proc/self/mountinfo",
        "22 1 0:20 / / rw - ext4 /dev/vda1 rw\n\
         30 22 259:1 / /mnt/a\\040b rw,relatime shared:1 - ext4 /dev/nvme0n1p1 rw\n\
         31 22 0:41 /@home /home rw - btrfs /dev/nvme0n1p3 rw\n",
    );
    host.write(
        "proc/swaps",
        "Filename Type Size Used Priority\n/dev/nvme0n1p2 partition 1 0 -2\n/swap.img file 1 0 -3\n",
    );
    host.write("sys/devices/virtual/block/dm-0/dm/name", "vg0-root\n");
    let holder = host.root.sys.join("devices/virtual/block/dm-0");
    host.link(&format!("{disk}/holders/dm-0"), &holder);
    host.link(
        &format!("{disk}/nvme0n1p3/holders/md127"),
        host.root.sys.join("md127"),
    );
    let users = host.users();
    assert_eq!(
        users,
        [
            "nvme0n1p1 is mounted on /mnt/a b",
            "nvme0n1p3 is mounted on /home",
            "nvme0n1p2 is swap space",
            "nvme0n1 is part of dm-0 (vg0-root)",
            "nvme0n1p3 is part of md127",
        ]
    );
    let controller = host.find().controller.expect("controller");
    let users = controller.users(&host.root).expect("users");
    assert!(users.iter().all(|user| !user.can_be_overridden()));
}

#[test]
fn a_mount_by_another_name_of_the_disk() {
    let host = Host::new();
    host.link("dev/disk/by-id/nvme-A_drive_S1", "../../nvme0n1");
    host.write(
        "proc/self/mountinfo",
        "31 22 0:41 / /home rw - btrfs /dev/disk/by-id/nvme-A_drive_S1 rw\n",
    );
    assert_eq!(host.users(), ["nvme0n1 is mounted on /home"]);
}

#[test]
fn disks_that_are_mounted_in_other_mount_namespaces() {
    let host = Host::new();
    host.link("proc/self/ns/mnt", "mnt:[1]");
    let theirs = "30 22 0:41 / /data rw - btrfs /dev/nvme0n1 rw\n";
    for (pid, namespace) in [
        (41, "mnt:[1]"),
        (42, "mnt:[2]"),
        (43, "mnt:[2]"),
        (44, "mnt:[3]"),
    ] {
        host.link(&format!("proc/{pid}/ns/mnt"), namespace);
        host.write(&format!("proc/{pid}/comm"), "postgres\n");
        host.write(&format!("proc/{pid}/mountinfo"), theirs);
    }
    assert_eq!(
        host.users(),
        ["nvme0n1 is mounted on /data in the mount namespace of process 42 (postgres)"]
    );
    // The mount namespace of the host has this mount too, which is reported once.
    host.write("proc/self/mountinfo", theirs);
    assert_eq!(host.users(), ["nvme0n1 is mounted on /data"]);
}

#[test]
fn processes_that_have_a_device_open() {
    let host = Host::new();
    // /dev/null stands for the controller's character device, since it has a device number too.
    host.link("dev/nvme0", "/dev/null");
    host.write("proc/42/comm", "smartd\n");
    host.link("proc/42/fd/3", "/dev/null");
    host.link("proc/42/fd/4", "/dev/null");
    host.link("proc/42/fd/5", "/dev/zero");
    host.link(&format!("proc/{}/fd/3", std::process::id()), "/dev/null");
    host.link("proc/43/fd/3", "/dev/zero");
    assert_eq!(host.users(), ["nvme0 is open in process 42 (smartd)"]);
    let controller = host.find().controller.expect("controller");
    let users = controller.users(&host.root).expect("users");
    assert!(users[0].can_be_overridden());
}

#[test]
fn processes_that_have_an_iommu_group() {
    let host = Host::new();
    let group = host.find().iommu_group.expect("group");
    assert_eq!(group.users(&host.root), []);
    // /dev/null stands for the group's file. It can be opened, so no other process has exclusive use.
    host.link("dev/vfio/7", "/dev/null");
    assert_eq!(group.exclusive_users(&host.root), []);
    host.write("proc/42/comm", "qemu-system-x86\n");
    host.link("proc/42/fd/9", "/dev/null");
    let users = group.users(&host.root);
    let expected = format!(
        "{} is open in process 42 (qemu-system-x86)",
        host.root.dev.join("vfio/7").display()
    );
    assert_eq!(users[0].to_string(), expected);
    assert_eq!(users, group.exclusive_users(&host.root));
}

#[test]
fn processes_that_have_a_function_by_its_own_node() {
    let host = Host::new();
    let group = host.find().iommu_group.expect("group");
    let address = group.members[0].address.clone();
    host.write(
        &format!("sys/bus/pci/devices/{address}/vfio-dev/vfio3/dev"),
        "511:3\n",
    );
    assert_eq!(host.root.device_node(&address), None, "it has no file");
    host.link("dev/vfio/devices/vfio3", "/dev/null");
    host.write("proc/42/comm", "nvme-mpt\n");
    host.link("proc/42/fd/9", "/dev/null");
    let node = host.root.dev.join("vfio/devices/vfio3");
    assert_eq!(host.root.device_node(&address), Some(node.clone()));
    let expected = format!("{} is open in process 42 (nvme-mpt)", node.display());
    assert_eq!(group.users(&host.root)[0].to_string(), expected);
}

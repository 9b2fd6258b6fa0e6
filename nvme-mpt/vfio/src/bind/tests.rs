//! Refusals and failures of binding, on a fake host: a directory of files, where no kernel changes drivers. Tests in the
//! lab bind real drivers.

use std::fs;
use std::os::unix::fs::symlink;

use super::*;

const ADDRESS: &str = "0000:01:00.0";

struct Host {
    dir: tempfile::TempDir,
    root: HostRoot,
    address: PciAddress,
}

impl Host {
    /// Creates a host with a drive of the given driver, and with the drivers nvme and vfio-pci.
    fn new(driver: Option<&str>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = HostRoot {
            sys: dir.path().join("sys"),
            proc: dir.path().join("proc"),
            dev: dir.path().join("dev"),
        };
        let host = Self {
            dir,
            root,
            address: ADDRESS.parse().unwrap(),
        };
        for (file, text) in [
            ("vendor", "0x1b36\n"),
            ("device", "0x0010\n"),
            ("class", "0x010802\n"),
            ("driver_override", "(null)\n"),
        ] {
            host.write(&format!("sys/bus/pci/devices/{ADDRESS}/{file}"), text);
        }
        host.write("sys/bus/pci/drivers_probe", "");
        host.write("proc/self/mountinfo", "");
        for name in ["nvme", "vfio-pci", "uio_pci_generic"] {
            host.write(&format!("sys/bus/pci/drivers/{name}/unbind"), "");
        }
        host.write("sys/kernel/iommu_groups/7/type", "DMA\n");
        host.link("iommu_group", "sys/kernel/iommu_groups/7");
        if let Some(driver) = driver {
            host.link("driver", &format!("sys/bus/pci/drivers/{driver}"));
        }
        if driver == Some("nvme") {
            let disk = "nvme/nvme0/nvme0n1";
            for (file, text) in [
                ("nsid", "1"),
                ("size", "2048"),
                ("queue/logical_block_size", "512"),
                ("dev", "259:0"),
            ] {
                host.write(
                    &format!("sys/bus/pci/devices/{ADDRESS}/{disk}/{file}"),
                    text,
                );
            }
            host.write("dev/nvme0n1", "");
        }
        host
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Creates a link in the function's sysfs directory.
    fn link(&self, name: &str, target: &str) {
        let dir = self.root.function_dir(self.address);
        symlink(self.dir.path().join(target), dir.join(name)).unwrap();
    }

    fn read(&self, path: &str) -> String {
        fs::read_to_string(self.dir.path().join("sys/bus/pci").join(path)).unwrap()
    }

    /// Returns the contents of the files that are written for the kernel: driver_override, unbind of the nvme driver, and
    /// drivers_probe.
    fn written_files(&self) -> [String; 3] {
        [
            self.read(&format!("devices/{ADDRESS}/driver_override")),
            self.read("drivers/nvme/unbind"),
            self.read("drivers_probe"),
        ]
    }

    fn bind(&self, force: bool) -> String {
        bind(&self.root, self.address, force)
            .unwrap_err()
            .to_string()
    }
}

const NOTHING: [&str; 3] = ["(null)\n", "", ""];

#[test]
fn a_mounted_drive_is_refused_also_by_force() {
    let host = Host::new(Some("nvme"));
    host.write(
        "proc/self/mountinfo",
        "30 22 259:0 / /srv rw - ext4 /dev/nvme0n1 rw\n",
    );
    for force in [false, true] {
        assert_eq!(
            host.bind(force),
            "0000:01:00.0 is in use: nvme0n1 is mounted on /srv; \
             end that first (--force does not change this)"
        );
    }
    assert_eq!(host.written_files(), NOTHING);
}

#[test]
fn an_open_drive_is_bound_only_with_force() {
    let host = Host::new(Some("nvme"));
    host.write("proc/42/comm", "smartd\n");
    fs::create_dir(host.root.proc.join("42/fd")).unwrap();
    symlink("/dev/null", host.root.proc.join("42/fd/3")).unwrap();
    symlink("/dev/null", host.root.dev.join("nvme0")).unwrap();
    assert_eq!(
        host.bind(false),
        "0000:01:00.0 is in use: nvme0 is open in process 42 (smartd); \
         end that first, or take the drive from it with --force"
    );
    assert_eq!(host.written_files(), NOTHING);
    // No kernel reads the files, so the driver does not change, and the command undoes its request.
    let refused = host.bind(true);
    assert!(
        refused.starts_with("The driver vfio-pci refused 0000:01:00.0, which is now bound to nvme"),
        "{refused}"
    );
    assert_eq!(host.written_files(), ["\nfio-pci", ADDRESS, ADDRESS]);
}

#[test]
fn a_bound_drive_is_not_bound_again() {
    let host = Host::new(Some("vfio-pci"));
    let bound = bind(&host.root, host.address, false).unwrap();
    assert_eq!(
        bound.to_string(),
        "0000:01:00.0 is bound to vfio-pci already"
    );
    assert_eq!(host.written_files(), NOTHING);

    let host = Host::new(Some("nvme"));
    let bound = unbind(&host.root, host.address).unwrap();
    assert_eq!(bound.to_string(), "0000:01:00.0 is bound to nvme already");
    assert_eq!(host.written_files(), NOTHING);
}

#[test]
fn other_functions_of_the_iommu_group_are_named() {
    let host = Host::new(Some("vfio-pci"));
    let member = "sys/kernel/iommu_groups/7/devices/0000:01:00.1";
    host.write(&format!("{member}/class"), "0x020000\n");
    host.write("sys/bus/pci/drivers/e1000e/unbind", "");
    symlink(
        host.root.sys.join("bus/pci/drivers/e1000e"),
        host.dir.path().join(member).join("driver"),
    )
    .unwrap();
    let bound = bind(&host.root, host.address, false).unwrap();
    assert_eq!(
        bound.to_string(),
        "0000:01:00.0 is bound to vfio-pci already\n\
         0000:01:00.1, in the same IOMMU group 7, is bound to e1000e: \
         bind it to vfio-pci as well, or to no driver"
    );
}

#[test]
fn missing_requirements_are_reported_before_any_change() {
    let host = Host::new(Some("nvme"));
    fs::remove_dir_all(host.root.sys.join("bus/pci/drivers/vfio-pci")).unwrap();
    assert_eq!(
        host.bind(false),
        "The host's kernel has no driver vfio-pci; load it with: modprobe vfio-pci"
    );
    fs::remove_file(host.root.function_dir(host.address).join("iommu_group")).unwrap();
    assert!(host.bind(true).starts_with("0000:01:00.0 has no IOMMU"));
    host.write(
        &format!("sys/bus/pci/devices/{ADDRESS}/class"),
        "0x010601\n",
    );
    assert!(
        host.bind(true)
            .starts_with("0000:01:00.0 is not an NVMe controller: its class code is 010601h")
    );
    assert_eq!(host.written_files(), NOTHING);
    let elsewhere = "0000:02:00.0".parse().unwrap();
    let error = bind(&host.root, elsewhere, true).unwrap_err().to_string();
    assert!(
        error.starts_with("There is no PCI function 0000:02:00.0"),
        "{error}"
    );
}

#[test]
fn functions_of_other_drivers_are_not_unbound() {
    let host = Host::new(Some("uio_pci_generic"));
    assert!(
        host.bind(false)
            .contains("bound to the driver `uio_pci_generic`")
    );
    let error = unbind(&host.root, host.address).unwrap_err().to_string();
    assert!(error.contains("nothing was changed"), "{error}");
    assert_eq!(host.written_files(), NOTHING);
}

#[test]
fn a_drive_open_by_vfio_is_not_unbound() {
    let host = Host::new(Some("vfio-pci"));
    fs::create_dir_all(host.root.proc.join("42/fd")).unwrap();
    fs::create_dir_all(host.root.dev.join("vfio")).unwrap();
    host.write("proc/42/comm", "nvme-mpt\n");
    symlink("/dev/null", host.root.proc.join("42/fd/3")).unwrap();
    symlink("/dev/null", host.root.dev.join("vfio/7")).unwrap();
    let error = unbind(&host.root, host.address).unwrap_err().to_string();
    assert!(
        error.ends_with("vfio/7 is open in process 42 (nvme-mpt); end that first"),
        "{error}"
    );
    assert_eq!(host.written_files(), NOTHING);
}

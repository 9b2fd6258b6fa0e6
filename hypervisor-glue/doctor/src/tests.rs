//! Checks of fake hosts: directories with the kernel's files.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use nvme_spec::identify::{
    DeallocatedRead, Dlfeat, IdentifyController, IdentifyNamespace, LbaFormat, Oncs,
};
use nvme_spec::ids::Nsid;
use nvme_spec::log::{CriticalWarning, SmartHealth};
use nvme_vfio::ArbitrationDescription;
use nvme_vfio::function::HostRoot;
use proptest::prelude::*;
use zerocopy::FromZeros;

use super::*;

const ADDRESS: &str = "0000:01:00.0";
const FUNCTION: &str = "sys/bus/pci/devices/0000:01:00.0";
const DISK: &str = "sys/bus/pci/devices/0000:01:00.0/nvme/nvme0/nvme0n1";

/// All files that the checks read, with contents of a healthy host.
const FILES: &[(&str, &str)] = &[
    ("proc/sys/kernel/osrelease", "6.12.9+deb13-amd64\n"),
    ("proc/sys/kernel/io_uring_disabled", "0\n"),
    (
        "proc/self/limits",
        "Limit                     Soft Limit           Hard Limit           Units     \n\
         Max open files            524288               524288               files     \n\
         Max locked memory         8388608              8388608              bytes     \n",
    ),
    (
        "proc/self/status",
        "Name:\tnvme-mpt\nCapEff:\t000001ffffffffff\n",
    ),
    (
        "proc/self/mountinfo",
        "22 1 0:20 / / rw - ext4 /dev/vda1 rw\n",
    ),
    ("proc/swaps", "Filename Type Size Used Priority\n"),
    (
        "proc/meminfo",
        "MemTotal:       16384000 kB\nMemFree: 1 kB\n",
    ),
    (
        "sys/module/vfio_iommu_type1/parameters/dma_entry_limit",
        "65535\n",
    ),
    (
        "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
        "512\n",
    ),
    (
        "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages",
        "500\n",
    ),
    (
        "sys/kernel/mm/transparent_hugepage/enabled",
        "always [madvise] never\n",
    ),
    ("sys/bus/pci/devices/0000:01:00.0/vendor", "0x144d\n"),
    ("sys/bus/pci/devices/0000:01:00.0/device", "0xa80a\n"),
    ("sys/bus/pci/devices/0000:01:00.0/class", "0x010802\n"),
    (
        "sys/bus/pci/devices/0000:01:00.0/driver_override",
        "(null)\n",
    ),
    ("sys/bus/pci/devices/0000:01:00.0/numa_node", "0\n"),
    (
        "sys/bus/pci/devices/0000:01:00.0/current_link_speed",
        "16.0 GT/s PCIe\n",
    ),
    ("sys/bus/pci/devices/0000:01:00.0/current_link_width", "4\n"),
    (
        "sys/bus/pci/devices/0000:01:00.0/max_link_speed",
        "16.0 GT/s PCIe\n",
    ),
    ("sys/bus/pci/devices/0000:01:00.0/max_link_width", "4\n"),
    (
        "sys/bus/pci/devices/0000:01:00.0/nvme/nvme0/nvme0n1/nsid",
        "1\n",
    ),
    (
        "sys/bus/pci/devices/0000:01:00.0/nvme/nvme0/nvme0n1/size",
        "2048\n",
    ),
    (
        "sys/bus/pci/devices/0000:01:00.0/nvme/nvme0/nvme0n1/queue/logical_block_size",
        "512\n",
    ),
    (
        "sys/bus/pci/devices/0000:01:00.0/nvme/nvme0/nvme0n1/dev",
        "259:0\n",
    ),
    (
        "sys/bus/pci/devices/0000:01:00.0/nvme/nvme0/model",
        "A drive\n",
    ),
    ("sys/bus/pci/devices/0000:01:00.0/nvme/nvme0/serial", "S1\n"),
];

struct FakeHostDir {
    dir: tempfile::TempDir,
    host: DoctorHost,
}

impl FakeHostDir {
    /// Creates a healthy host with a drive that is bound to `driver`.
    fn new(driver: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let host = DoctorHost {
            root: HostRoot {
                sys: at("sys"),
                proc: at("proc"),
                dev: at("dev"),
            },
            state_dir: at("state"),
            physical: true,
        };
        let made = Self { dir, host };
        for (path, text) in FILES {
            made.write(path, text.as_bytes());
        }
        for path in ["dev/vfio/vfio", "dev/kvm", "dev/nvme0n1"] {
            made.write(path, b"");
        }
        made.write("sys/bus/pci/drivers/vfio-pci/unbind", b"");
        made.write("sys/class/iommu/dmar0/name", b"");
        made.link(
            &format!("{FUNCTION}/driver"),
            &format!("sys/bus/pci/drivers/{driver}"),
        );
        made.link(
            &format!("{FUNCTION}/iommu_group"),
            "sys/kernel/iommu_groups/7",
        );
        made.link(
            &format!("sys/kernel/iommu_groups/7/devices/{ADDRESS}"),
            FUNCTION,
        );
        fs::create_dir(&made.host.state_dir).unwrap();
        made
    }

    fn write(&self, path: &str, text: &[u8]) {
        let path = self.dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn link(&self, path: &str, target: &str) {
        let path = self.dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(self.dir.path().join(target), path).unwrap();
    }

    fn read(&self, path: &str) -> String {
        fs::read_to_string(self.dir.path().join(path)).unwrap()
    }

    fn remove(&self, path: &str) {
        let path = self.dir.path().join(path);
        match path.symlink_metadata().unwrap().is_dir() {
            true => fs::remove_dir_all(path).unwrap(),
            false => fs::remove_file(path).unwrap(),
        }
    }

    fn checks(&self) -> Vec<DoctorCheck> {
        let mut checks = self.host.checks();
        let drive = check_drive(&self.host, ADDRESS.parse().unwrap(), |_| Ok(description()));
        checks.extend(drive);
        checks
    }

    #[track_caller]
    fn expect(&self, name: &str, outcome: CheckOutcome, finding: &str, remedy: &str) {
        expect(&self.checks(), name, outcome, finding, remedy);
    }
}

#[track_caller]
fn expect(checks: &[DoctorCheck], name: &str, outcome: CheckOutcome, finding: &str, remedy: &str) {
    let check = checks.iter().find(|check| check.name == name);
    let check = check.unwrap_or_else(|| panic!("no {name} in {checks:#?}"));
    assert_eq!(check.outcome, outcome, "{check:?}");
    assert!(check.finding.contains(finding), "{check:?}");
    let advice = check.remedy.as_deref().unwrap_or_default();
    assert!(advice.contains(remedy), "{check:?}");
    assert_eq!(advice.is_empty(), remedy.is_empty(), "{check:?}");
}

/// A healthy drive with all optional commands.
fn description() -> DriveDescription {
    let mut controller = IdentifyController::new_zeroed();
    controller.mn[..7].copy_from_slice(b"A drive");
    controller.sn[..2].copy_from_slice(b"S1");
    controller.mdts = 5;
    controller.cdfs = 1;
    controller.oncs = Oncs(0)
        .with_compare(true)
        .with_dsm(true)
        .with_write_zeroes(true)
        .with_verify(true)
        .with_copy(true);
    let mut namespace = IdentifyNamespace::new_zeroed();
    namespace.nsze = 1 << 21;
    namespace.lbaf[0] = LbaFormat::default().with_lbads(9);
    namespace.dlfeat = Dlfeat::default().with_read(DeallocatedRead::ZEROES);
    (namespace.mcl, namespace.mssrl) = (256, 128);
    let mut health = SmartHealth::new_zeroed();
    health.composite_temperature.set(310);
    health.available_spare = 100;
    DriveDescription {
        controller,
        namespaces: vec![(Nsid(1), namespace)],
        health: Some(health),
        queue_pairs: Some(128),
        controller_memory: Some(false),
        arbitration: Some(ArbitrationDescription {
            has_weighted: false,
            is_weighted: false,
        }),
    }
}

#[test]
fn a_suitable_host_and_drive_have_no_problems() {
    let dir = FakeHostDir::new("vfio-pci");
    let checks = dir.checks();
    for check in &checks {
        assert_eq!(check.outcome, CheckOutcome::Ok, "{check:?}");
    }
    let mut names: Vec<&str> = checks.iter().map(|check| &*check.name).collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count, "each name once");
    for (name, finding) in [
        ("host.kernel", "Linux 6.12.9+deb13-amd64"),
        ("host.iommu", "on: 1 IOMMU groups by dmar0"),
        (
            "host.huge_pages",
            "500 of 512 of 2048kB free; transparent: madvise",
        ),
        ("drive.iommu_group", "7, the drive alone"),
        ("drive.link", "16.0 GT/s PCIe, 4 lanes"),
        ("drive.model", "A drive, serial S1"),
        (
            "drive.health",
            "37 °C, 0 % used, 100 % spare, 0 media errors",
        ),
        ("drive.transfer", "128K a command"),
        ("drive.namespace.1", "1G, blocks of 512 bytes; formats: 512"),
        ("drive.copy", "up to 128 blocks a range"),
    ] {
        expect(&checks, name, CheckOutcome::Ok, finding, "");
    }
}

#[test]
fn each_obstacle_of_a_host_has_its_remedy() {
    use CheckOutcome::{NotChecked, Problem, Warning};
    let dir = FakeHostDir::new("vfio-pci");
    let changed = |path: &str, text: &str| dir.write(path, text.as_bytes());
    changed("proc/sys/kernel/osrelease", "5.10.0-28-amd64\n");
    dir.expect(
        "host.kernel",
        Warning,
        "Linux 5.10.0-28-amd64",
        "Linux 6.1 or newer",
    );
    changed("proc/sys/kernel/osrelease", "unknown");
    dir.expect("host.kernel", NotChecked, "unknown form: unknown", "");
    changed("proc/sys/kernel/io_uring_disabled", "2\n");
    dir.expect(
        "host.io_uring",
        Warning,
        "is 2",
        "sysctl kernel.io_uring_disabled=0",
    );
    changed("proc/self/status", "CapEff:\t0000000000000000\n");
    changed("proc/sys/kernel/io_uring_disabled", "1\n");
    dir.expect("host.io_uring", Warning, "is 1", "sysctl");
    dir.expect(
        "host.locked_memory",
        Problem,
        "8M may be locked",
        "ulimit -l",
    );
    let limits =
        "Max locked memory  1073741824 1073741824 bytes\nMax open files 1024 524288 files\n";
    changed("proc/self/limits", limits);
    dir.expect(
        "host.locked_memory",
        Warning,
        "1G may be locked",
        "LimitMEMLOCK=",
    );
    dir.expect(
        "host.descriptors",
        Warning,
        "1024 (at most 524288)",
        "ulimit -n",
    );
    changed(
        "proc/self/limits",
        "Max locked memory  unlimited unlimited bytes\n",
    );
    dir.expect(
        "host.locked_memory",
        CheckOutcome::Ok,
        "without a limit",
        "",
    );
    dir.expect("host.descriptors", NotChecked, "does not report", "");
    changed(
        "sys/kernel/mm/transparent_hugepage/enabled",
        "always madvise [never]\n",
    );
    dir.expect("host.huge_pages", Warning, "are off", "echo madvise");
    dir.remove("dev/kvm");
    dir.expect("host.kvm", Warning, "kvm does not exist", "kvm_intel");
    dir.remove("dev/vfio/vfio");
    dir.expect("host.vfio_device", Problem, "does not exist", "modprobe");
    dir.remove("sys/module/vfio_iommu_type1");
    dir.expect(
        "host.vfio_iommu_type1",
        Problem,
        "not loaded",
        "modprobe vfio_iommu_type1",
    );
    dir.write("dev/iommu", b"");
    let (ok, none) = (CheckOutcome::Ok, "");
    dir.expect("host.vfio_device", ok, "dev/iommu can be read", none);
    dir.expect("host.vfio_iommu_type1", ok, "iommufd does its work", none);
    dir.remove("dev/iommu");
    dir.remove("sys/bus/pci/drivers/vfio-pci");
    dir.expect("host.vfio_pci", Problem, "not loaded", "modprobe vfio-pci");
    dir.remove("sys/kernel/iommu_groups");
    dir.expect("host.iommu", Problem, "makes no groups", "intel_iommu=on");
    dir.remove("sys/class/iommu");
    dir.expect("host.iommu", Problem, "no IOMMU", "intel_iommu=on");
    dir.remove("state");
    dir.expect(
        "host.state_folder",
        CheckOutcome::Ok,
        "does not exist yet",
        "",
    );
    dir.write("state", b"");
    let host = DoctorHost {
        physical: false,
        state_dir: dir.host.state_dir.join("below/a/file"),
        ..dir.host.clone()
    };
    let checks = host.checks();
    expect(&checks, "host.iommu", Warning, "no IOMMU", "firmware");
    expect(&checks, "host.vfio_pci", Warning, "not loaded", "modprobe");
    expect(
        &checks,
        "host.state_folder",
        Problem,
        "cannot be made in",
        "--state-dir",
    );
}

#[test]
fn each_obstacle_of_a_drive_has_its_remedy() {
    use CheckOutcome::{NotChecked, Problem, Warning};
    let dir = FakeHostDir::new("nvme");
    dir.expect(
        "drive.driver",
        Warning,
        "own driver",
        "nvme-mpt bind 0000:01:00.0",
    );
    let mount = b"30 22 259:0 / /srv rw - ext4 /dev/nvme0n1 rw\n";
    dir.write("proc/self/mountinfo", mount);
    dir.expect(
        "drive.users",
        Problem,
        "nvme0n1 is mounted on /srv",
        "end that use",
    );
    dir.write(&format!("{FUNCTION}/current_link_width"), b"1\n");
    dir.expect("drive.link", Warning, "1 lanes; the drive can do", "slot");
    let other = "sys/kernel/iommu_groups/7/devices/0000:01:00.1";
    dir.write(&format!("{other}/class"), b"0x020000\n");
    dir.link(&format!("{other}/driver"), "sys/bus/pci/drivers/e1000e");
    dir.expect(
        "drive.iommu_group",
        Problem,
        "0000:01:00.1 (e1000e)",
        "0000:01:00.1",
    );
    dir.remove(&format!("{FUNCTION}/iommu_group"));
    dir.expect("drive.iommu_group", Problem, "all memory", "host.iommu");
    dir.write(&format!("{DISK}/size"), b"many\n");
    dir.expect("drive.function", Problem, "an unknown form: `many`", "");
    dir.write(&format!("{DISK}/size"), b"8\n");
    dir.write(&format!("{FUNCTION}/class"), b"0x010601\n");
    dir.expect(
        "drive.function",
        Problem,
        "not an NVMe controller",
        "nvme-mpt drives",
    );
    dir.remove(FUNCTION);
    dir.expect("drive.function", Problem, "There is no PCI function", "");
    let dir = FakeHostDir::new("uio_pci_generic");
    dir.expect("drive.driver", Problem, "uio_pci_generic", "--force");
    // The fake device file of the controller is not a device, so the drive cannot be queried.
    let dir = FakeHostDir::new("nvme");
    let address = ADDRESS.parse().unwrap();
    let report = examine(&dir.host, Some(address));
    let checks = &report.sections[1].checks;
    expect(checks, "drive.model", NotChecked, "Cannot open", "");
    dir.write("dev/nvme0", b"");
    let report = examine(&dir.host, Some(address));
    let checks = &report.sections[1].checks;
    expect(checks, "drive.model", NotChecked, "Identify Controller", "");
}

#[test]
fn missing_abilities_of_a_drive_are_named() {
    use CheckOutcome::{NotChecked, Ok, Problem, Warning};
    let mut poor = description();
    poor.controller.oncs = Oncs(0);
    poor.queue_pairs = Some(1);
    poor.controller_memory = None;
    poor.namespaces[0].1.lbaf[0] = LbaFormat::default().with_lbads(9).with_ms(8);
    let health = poor.health.as_mut().unwrap();
    health.critical_warning = CriticalWarning(0).with_read_only(true);
    let checks = drive::check_description(&poor);
    expect(
        &checks,
        "drive.health",
        Problem,
        "media are read only",
        "replace",
    );
    expect(&checks, "drive.queue_pairs", Warning, "1: ", "");
    expect(
        &checks,
        "drive.namespace.1",
        Problem,
        "8 bytes of metadata",
        "nvme format",
    );
    expect(
        &checks,
        "drive.wiping",
        Warning,
        "no Write Zeroes",
        "data=keep",
    );
    expect(&checks, "drive.deallocate", Ok, "cannot discard", "");
    expect(&checks, "drive.copy", Ok, "no Copy", "");
    expect(
        &checks,
        "drive.commands",
        Ok,
        "optional: none; missing: Compare",
        "",
    );
    expect(
        &checks,
        "drive.controller_memory",
        NotChecked,
        "cannot be read",
        "",
    );
    for (is_weighted, finding) in [(false, "arbitration=weighted"), (true, "in use")] {
        poor.arbitration = Some(ArbitrationDescription {
            has_weighted: true,
            is_weighted,
        });
        let checks = drive::check_description(&poor);
        expect(&checks, "drive.arbitration", Ok, finding, "");
    }
    poor.controller.oncs = Oncs(0).with_copy(true);
    poor.namespaces[0].1.mssrl = 0;
    let checks = drive::check_description(&poor);
    expect(&checks, "drive.copy", Ok, "limits are 0", "");
    poor.health = None;
    poor.queue_pairs = None;
    poor.namespaces.clear();
    let checks = drive::check_description(&poor);
    expect(&checks, "drive.health", NotChecked, "does not return", "");
    expect(
        &checks,
        "drive.queue_pairs",
        NotChecked,
        "does not report",
        "",
    );
    expect(
        &checks,
        "drive.namespaces",
        Problem,
        "none is active",
        "nvme create-ns",
    );
}

/// Generates a file's contents: the usual text with one part replaced, or arbitrary bytes.
fn content(usual: &'static str) -> impl Strategy<Value = Vec<u8>> {
    let bytes = proptest::collection::vec(any::<u8>(), 0..64);
    let number = any::<u64>().prop_map(|number| format!("0x{number:x}\n").into_bytes());
    let decimal = any::<i128>().prop_map(|number| format!("{number}\n").into_bytes());
    let spliced = (bytes.clone(), any::<proptest::sample::Index>()).prop_map(move |(part, at)| {
        let mut text = usual.as_bytes().to_vec();
        let at = at.index(text.len() + 1);
        text.splice(at..at, part);
        text
    });
    prop_oneof![
        bytes,
        number,
        decimal,
        spliced,
        Just(usual.as_bytes().to_vec())
    ]
}

fn write_or_remove(dir: &FakeHostDir, path: &str, text: Option<&[u8]>) {
    match text {
        Some(text) => dir.write(path, text),
        None if dir.dir.path().join(path).is_file() => dir.remove(path),
        None => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn arbitrary_kernel_files_do_not_stop_the_checks(
        texts in FILES.iter().map(|(_, usual)| proptest::option::of(content(usual))).collect::<Vec<_>>(),
        driver in prop_oneof![Just("nvme"), Just("vfio-pci")],
    ) {
        let dir = FakeHostDir::new(driver);
        for ((path, _), text) in FILES.iter().zip(&texts) {
            write_or_remove(&dir, path, text.as_deref());
        }
        let report = DoctorReport {
            version: String::new(),
            time: String::new(),
            sections: vec![ReportSection { subject: "All".to_owned(), checks: dir.checks() }],
        };
        prop_assert!(serde_json::to_string(&report).is_ok());
    }

    #[test]
    fn arbitrary_drive_descriptions_do_not_stop_the_checks(
        controller in proptest::collection::vec(any::<u8>(), 4096),
        namespace in proptest::collection::vec(any::<u8>(), 4096),
        health in proptest::collection::vec(any::<u8>(), 512),
    ) {
        use zerocopy::FromBytes;
        let any = DriveDescription {
            controller: IdentifyController::read_from_bytes(&controller).unwrap(),
            namespaces: vec![(Nsid(u32::MAX), IdentifyNamespace::read_from_bytes(&namespace).unwrap())],
            health: Some(SmartHealth::read_from_bytes(&health).unwrap()),
            queue_pairs: None,
            controller_memory: None,
            arbitration: None,
        };
        prop_assert!(drive::check_description(&any).len() > 10);
    }
}

#[test]
fn the_host_of_this_test_is_examined() {
    let host = DoctorHost {
        root: HostRoot::default(),
        state_dir: Path::new("/nonexistent/state").to_owned(),
        physical: false,
    };
    let report = examine(&host, None);
    assert_eq!(report.sections.len(), 1);
    let kernel = &report.sections[0].checks[0];
    assert_ne!(kernel.outcome, CheckOutcome::NotChecked, "{report:#?}");
}

/// Tests a namespace of the drive. Returns the only check, and the namespace that the operator was asked to erase.
fn try_out(
    dir: &FakeHostDir,
    nsid: u32,
    consent: bool,
) -> (DoctorCheck, Option<scratch::ScratchNamespace>) {
    let address = ADDRESS.parse().unwrap();
    let mut report = examine(&dir.host, Some(address));
    let mut asked = None;
    let path = DrivePath::Pci(address);
    report.test_namespace(&dir.host, &path, nsid, Duration::ZERO, &mut |subject| {
        asked = Some(subject.clone());
        consent
    });
    let checks = report.sections.pop().unwrap().checks;
    let [check] = &checks[..] else {
        panic!("{checks:#?}");
    };
    (check.clone(), asked)
}

#[test]
fn a_drive_of_the_host_is_bound_only_after_consent() {
    use CheckOutcome::{NotChecked, Problem};
    let dir = FakeHostDir::new("nvme");
    dir.write("sys/bus/pci/drivers/nvme/unbind", b"");
    dir.write("sys/bus/pci/drivers_probe", b"");
    let told = || dir.read("sys/bus/pci/drivers/nvme/unbind");
    let (check, asked) = try_out(&dir, 9, true);
    expect(
        &[check],
        "scratch.setup",
        Problem,
        "shows no namespace 9",
        "",
    );
    assert_eq!(asked, None);
    dir.write("dev/nvme0n1", &[&[0; 512][..], b"EFI PART"].concat());
    let (check, asked) = try_out(&dir, 1, false);
    expect(&[check], "scratch.setup", NotChecked, "Not confirmed", "");
    let asked = asked.unwrap();
    assert_eq!((&*asked.confirmation_word, asked.nsid), ("S1", 1));
    assert_eq!(asked.previous_use, Some("a GUID partition table"));
    assert_eq!(told(), "");
    // No kernel binds the driver, but the request was written to the file.
    let (check, _) = try_out(&dir, 1, true);
    expect(
        &[check],
        "scratch.setup",
        Problem,
        "refused 0000:01:00.0",
        "",
    );
    assert_eq!(told(), ADDRESS);
    dir.write("sys/bus/pci/drivers/nvme/unbind", b"");
    dir.write("proc/42/comm", b"smartd\n");
    symlink("/dev/null", dir.dir.path().join("dev/nvme0")).unwrap();
    fs::create_dir(dir.dir.path().join("proc/42/fd")).unwrap();
    symlink("/dev/null", dir.dir.path().join("proc/42/fd/3")).unwrap();
    let (check, asked) = try_out(&dir, 1, true);
    expect(
        &[check],
        "scratch.setup",
        Problem,
        "is open in process 42 (smartd)",
        "",
    );
    assert_eq!((asked, told()), (None, String::new()));
}

//! Checks of a physical drive: driver and IOMMU group, users on the host, and the data that the drive reports about itself
//! (Identify).

use std::path::Path;

use nvme_lease::backing_id::nvme_names::ascii_text;
use nvme_lease::range::ByteSize;
use nvme_spec::identify::{DeallocatedRead, IdentifyController, IdentifyNamespace};
use nvme_spec::ids::Nsid;
use nvme_spec::log::SmartHealth;
use nvme_vfio::function::{DiskUser, HostRoot, PciFunction, VFIO_PCI};
use nvme_vfio::{ArbitrationDescription, DriveDescription};

use super::report::{CheckOutcome, DoctorCheck};

/// Name of the host's NVMe driver.
const NVME: &str = "nvme";

/// Base-2 logarithm of the memory page size in bytes, which is the unit of a drive's MDTS.
const PAGE_SHIFT: u8 = 12;

/// Value of Percentage Used from which the report advises replacing the drive.
const WORN_PERCENT: u8 = 90;

/// Offset between kelvins and degrees Celsius.
const ZERO_CELSIUS: i32 = 273;

/// Checks the function's driver, IOMMU group and users on the host.
pub(super) fn check_placement(root: &HostRoot, function: &PciFunction) -> Vec<DoctorCheck> {
    vec![
        class(function),
        driver(function),
        group(function),
        users(root, function),
        link(root, function),
        node(function),
    ]
}

fn class(function: &PciFunction) -> DoctorCheck {
    const NAME: &str = "drive.function";
    let PciFunction {
        address,
        vendor,
        device,
        class,
        ..
    } = function;
    let finding = format!("{address}, PCI ID {vendor:04x}:{device:04x}, class {class:06x}h");
    match function.is_nvme() {
        true => DoctorCheck::ok(NAME, finding),
        false => DoctorCheck::new(
            NAME,
            CheckOutcome::Problem,
            format!("{finding}: not an NVMe controller"),
        )
        .with_remedy("nvme-mpt drives lists those of this host"),
    }
}

fn driver(function: &PciFunction) -> DoctorCheck {
    const NAME: &str = "drive.driver";
    let bind = format!("nvme-mpt bind {}", function.address);
    match function.driver.as_deref() {
        Some(VFIO_PCI) => DoctorCheck::ok(NAME, "vfio-pci: it can be served"),
        Some(NVME) => DoctorCheck::new(
            NAME,
            CheckOutcome::Warning,
            "nvme: the host's own driver has it, so it cannot be served",
        )
        .with_remedy(bind),
        Some(other) => DoctorCheck::new(
            NAME,
            CheckOutcome::Problem,
            format!("{other}: its users are not known"),
        )
        .with_remedy(format!("{bind} --force")),
        None => DoctorCheck::new(NAME, CheckOutcome::Warning, "none").with_remedy(bind),
    }
}

fn group(function: &PciFunction) -> DoctorCheck {
    const NAME: &str = "drive.iommu_group";
    let Some(group) = &function.iommu_group else {
        return DoctorCheck::new(
            NAME,
            CheckOutcome::Problem,
            "none: it would reach all memory of the host",
        )
        .with_remedy("enable the IOMMU, as host.iommu shows");
    };
    let own = function.address.to_string();
    let others = group.members.iter().filter(|member| member.address != own);
    let others: Vec<String> = others
        .map(|member| {
            let driver = member.driver.as_deref().unwrap_or("no driver");
            format!("{} ({driver})", member.address)
        })
        .collect();
    let number = group.number;
    if others.is_empty() {
        return DoctorCheck::ok(NAME, format!("{number}, the drive alone"));
    }
    let finding = format!("{number}, with {}", others.join(", "));
    let in_the_way: Vec<&str> = function
        .others_with_host_drivers()
        .map(|(address, _)| address)
        .collect();
    match in_the_way.is_empty() {
        true => DoctorCheck::ok(NAME, finding),
        false => DoctorCheck::new(NAME, CheckOutcome::Problem, finding).with_remedy(format!(
            "bind to vfio-pci as well, or to no driver: {}",
            in_the_way.join(", ")
        )),
    }
}

fn users(root: &HostRoot, function: &PciFunction) -> DoctorCheck {
    const NAME: &str = "drive.users";
    let users = match (&function.controller, &function.iommu_group) {
        (Some(controller), _) => match controller.users(root) {
            Ok(users) => users,
            Err(error) => return DoctorCheck::not_checked(NAME, error.to_string()),
        },
        (None, Some(group)) if function.driver.as_deref() == Some(VFIO_PCI) => group.users(root),
        _ => Vec::new(),
    };
    if users.is_empty() {
        return DoctorCheck::ok(NAME, "none");
    }
    let lost = users.iter().any(|user| !user.can_be_overridden());
    let listed: Vec<String> = users.iter().map(DiskUser::to_string).collect();
    let listed = listed.join("; ");
    match lost {
        true => DoctorCheck::new(NAME, CheckOutcome::Problem, listed)
            .with_remedy("end that use first: --force does not override it"),
        false => DoctorCheck::new(NAME, CheckOutcome::Warning, listed)
            .with_remedy("end these processes first"),
    }
}

fn link(root: &HostRoot, function: &PciFunction) -> DoctorCheck {
    const NAME: &str = "drive.link";
    let dir = root.function_dir(function.address);
    let values = [
        "current_link_speed",
        "current_link_width",
        "max_link_speed",
        "max_link_width",
    ];
    let [Some(speed), Some(width), Some(max_speed), Some(max_width)] =
        values.map(|file| read_text(&dir.join(file)))
    else {
        return DoctorCheck::not_checked(NAME, "the kernel does not report the PCIe link");
    };
    let finding = format!("{speed}, {width} lanes");
    if (&speed, &width) == (&max_speed, &max_width) {
        return DoctorCheck::ok(NAME, finding);
    }
    DoctorCheck::new(
        NAME,
        CheckOutcome::Warning,
        format!("{finding}; the drive can do {max_speed}, {max_width} lanes"),
    )
    .with_remedy(
        "use a slot with as many lanes of that speed; some drives slow the link down while idle",
    )
}

fn node(function: &PciFunction) -> DoctorCheck {
    const NAME: &str = "drive.numa_node";
    match function.numa_node {
        Some(node) => DoctorCheck::ok(
            NAME,
            format!("{node}: pollers of its functions are best on this node"),
        ),
        None => DoctorCheck::ok(NAME, "one node, or none reported"),
    }
}

fn read_text(path: &Path) -> Option<String> {
    let bytes = std::fs::read(path).ok()?;
    Some(String::from_utf8_lossy(&bytes).trim().to_owned())
}

/// Checks the drive's own description.
pub(super) fn check_description(description: &DriveDescription) -> Vec<DoctorCheck> {
    let DriveDescription {
        controller,
        namespaces,
        health,
        queue_pairs,
        controller_memory,
        arbitration,
    } = description;
    let mut checks = vec![model(controller), self::health(health.as_ref())];
    checks.push(self::queue_pairs(*queue_pairs));
    checks.push(transfer(controller));
    match namespaces.is_empty() {
        true => checks.push(
            DoctorCheck::new("drive.namespaces", CheckOutcome::Problem, "none is active")
                .with_remedy("nvme create-ns and nvme attach-ns, with the host's own driver"),
        ),
        false => checks.extend(namespaces.iter().map(|(nsid, it)| namespace(*nsid, it))),
    }
    checks.extend([
        wiping(controller, namespaces),
        deallocation(controller, namespaces),
        copying(controller, namespaces),
        commands(controller),
        sgl(controller),
        doorbells(controller),
        cache(controller),
        self::controller_memory(*controller_memory),
    ]);
    // The host's NVMe driver does not expose arbitration.
    checks.extend(arbitration.map(self::arbitration));
    checks
}

fn model(controller: &IdentifyController) -> DoctorCheck {
    let version = controller.ver;
    DoctorCheck::ok(
        "drive.model",
        format!(
            "{}, serial {}, firmware {}, NVMe {}.{}.{}",
            ascii_text(&controller.mn),
            ascii_text(&controller.sn),
            ascii_text(&controller.fr),
            version.mjr(),
            version.mnr(),
            version.ter()
        ),
    )
}

fn health(health: Option<&SmartHealth>) -> DoctorCheck {
    const NAME: &str = "drive.health";
    let Some(health) = health else {
        return DoctorCheck::not_checked(NAME, "the drive does not return its health log");
    };
    let warning = health.critical_warning;
    let critical: Vec<&str> = [
        (warning.spare(), "spare blocks are below the threshold"),
        (
            warning.temperature(),
            "a temperature is beyond its threshold",
        ),
        (warning.reliability(), "reliability is degraded"),
        (warning.read_only(), "media are read only"),
        (
            warning.volatile_backup(),
            "the backup of volatile memory has failed",
        ),
        (warning.pmr(), "the persistent memory region is unreliable"),
    ]
    .into_iter()
    .filter_map(|(is_set, meaning)| is_set.then_some(meaning))
    .collect();
    let celsius = i32::from(health.composite_temperature.get()) - ZERO_CELSIUS;
    let media_errors = health.media_errors.get();
    let figures = format!(
        "{celsius} °C, {} % used, {} % spare, {media_errors} media errors",
        health.percentage_used, health.available_spare
    );
    if !critical.is_empty() {
        return DoctorCheck::new(
            NAME,
            CheckOutcome::Problem,
            format!("{}; {figures}", critical.join(", ")),
        )
        .with_remedy("replace the drive, or cool it if the temperature alone is reported");
    }
    if health.percentage_used >= WORN_PERCENT || media_errors > 0 {
        return DoctorCheck::new(NAME, CheckOutcome::Warning, figures)
            .with_remedy("plan to replace the drive");
    }
    DoctorCheck::ok(NAME, figures)
}

fn queue_pairs(pairs: Option<u16>) -> DoctorCheck {
    const NAME: &str = "drive.queue_pairs";
    match pairs {
        None => DoctorCheck::not_checked(NAME, "the drive does not report them"),
        Some(1) => DoctorCheck::new(
            NAME,
            CheckOutcome::Warning,
            "1: all functions share it in turn",
        ),
        Some(pairs) => DoctorCheck::ok(
            NAME,
            format!("{pairs}; guests' queues beyond that share pairs in turn"),
        ),
    }
}

/// Reports the maximum data transfer of a command.
fn transfer(controller: &IdentifyController) -> DoctorCheck {
    const NAME: &str = "drive.transfer";
    let bytes = 1_u64
        .checked_shl((controller.mdts.saturating_add(PAGE_SHIFT)).into())
        .filter(|_| controller.mdts > 0);
    DoctorCheck::ok(
        NAME,
        match bytes {
            Some(bytes) if bytes < 1 << 20 => format!(
                "{} a command; longer commands of guests are split, and guests have no SGLs",
                ByteSize(bytes)
            ),
            Some(bytes) => format!("{} a command", ByteSize(bytes)),
            None => "any size a command".to_owned(),
        },
    )
}

fn namespace(nsid: Nsid, namespace: &IdentifyNamespace) -> DoctorCheck {
    let name = format!("drive.namespace.{}", nsid.0);
    let Some(format) = namespace.current_lba_format() else {
        return DoctorCheck::new(
            name,
            CheckOutcome::Problem,
            "its LBA format is not one that it lists",
        );
    };
    let (shift, metadata) = (format.lbads(), format.ms());
    let bytes = 1_u64.checked_shl(shift.into());
    let size = bytes.and_then(|bytes| namespace.nsze.checked_mul(bytes));
    let others = namespace
        .lbaf
        .iter()
        .take(usize::from(namespace.nlbaf_z) + 1);
    let others: Vec<String> = others
        .filter(|format| format.lbads() != 0)
        .map(|format| match format.ms() {
            0 => format_block_size(format.lbads()),
            metadata => format!("{}+{metadata}", format_block_size(format.lbads())),
        })
        .collect();
    let finding = format!(
        "{}, blocks of {} bytes{}; formats: {}",
        size.map_or("of unknown size".to_owned(), |size| ByteSize(size)
            .to_string()),
        format_block_size(shift),
        match metadata {
            0 => String::new(),
            metadata => format!(" and {metadata} bytes of metadata"),
        },
        others.join(", ")
    );
    if metadata == 0 && matches!(shift, 9 | 12) && size.is_some() {
        return DoctorCheck::ok(name, finding);
    }
    DoctorCheck::new(
        name,
        CheckOutcome::Problem,
        format!("{finding}; it cannot be served"),
    )
    .with_remedy(
        "use another namespace, or, if its data is not needed, nvme format --lbaf=N to blocks of 512 or 4096 bytes without \
         metadata, which erases it",
    )
}

/// Formats a logical block size. The drive reports the size's exponent, which may be invalidly large.
fn format_block_size(shift: u8) -> String {
    let bytes = 1_u64.checked_shl(shift.into());
    bytes.map_or_else(|| format!("2^{shift}"), |bytes| bytes.to_string())
}

/// Returns the namespaces for which the drive does not guarantee that deallocated blocks read as zeroes.
fn nonzero_namespaces(namespaces: &[(Nsid, IdentifyNamespace)]) -> Vec<String> {
    let others = namespaces
        .iter()
        .filter(|(_, namespace)| namespace.dlfeat.read() != DeallocatedRead::ZEROES);
    others.map(|(nsid, _)| nsid.0.to_string()).collect()
}

fn wiping(
    controller: &IdentifyController,
    namespaces: &[(Nsid, IdentifyNamespace)],
) -> DoctorCheck {
    const NAME: &str = "drive.wiping";
    if !controller.oncs.write_zeroes() {
        return DoctorCheck::new(
            NAME,
            CheckOutcome::Warning,
            "no Write Zeroes: data of a previous owner cannot be erased",
        )
        .with_remedy(
            "give each range to one owner only, or erase it by other means and use data=keep",
        );
    }
    DoctorCheck::ok(
        NAME,
        match nonzero_namespaces(namespaces).is_empty() {
            true => "Write Zeroes, and deallocated blocks read as zeroes: wipes are fast",
            false => "Write Zeroes; wipes may write each block",
        },
    )
}

fn deallocation(
    controller: &IdentifyController,
    namespaces: &[(Nsid, IdentifyNamespace)],
) -> DoctorCheck {
    const NAME: &str = "drive.deallocate";
    if !controller.oncs.dsm() {
        return DoctorCheck::ok(NAME, "no Dataset Management: guests cannot discard");
    }
    let others = nonzero_namespaces(namespaces);
    DoctorCheck::ok(
        NAME,
        match others.is_empty() {
            true => "guests can discard, and deallocated blocks read as zeroes".to_owned(),
            false => format!(
                "guests can discard; deallocated blocks need not read as zeroes in namespaces {}",
                others.join(", ")
            ),
        },
    )
}

fn copying(
    controller: &IdentifyController,
    namespaces: &[(Nsid, IdentifyNamespace)],
) -> DoctorCheck {
    const NAME: &str = "drive.copy";
    if !controller.oncs.copy() || controller.cdfs & 1 == 0 {
        return DoctorCheck::ok(NAME, "no Copy of format 0");
    }
    let blocks = namespaces
        .iter()
        .map(|(_, namespace)| namespace.mcl.min(namespace.mssrl.into()))
        .min();
    DoctorCheck::ok(
        NAME,
        match blocks {
            Some(0) => "Copy whose limits are 0, which guests are not offered".to_owned(),
            Some(blocks) => format!("guests can copy up to {blocks} blocks a range"),
            None => "guests can copy".to_owned(),
        },
    )
}

fn commands(controller: &IdentifyController) -> DoctorCheck {
    let oncs = controller.oncs;
    let (there, missing): (Vec<_>, Vec<_>) = [
        (oncs.compare(), "Compare"),
        (oncs.write_zeroes(), "Write Zeroes"),
        (oncs.dsm(), "Dataset Management"),
        (oncs.verify(), "Verify"),
        (oncs.write_uncorrectable(), "Write Uncorrectable"),
        (oncs.copy(), "Copy"),
    ]
    .into_iter()
    .partition(|(is_there, _)| *is_there);
    let list = |commands: Vec<(bool, &str)>| match commands.is_empty() {
        true => "none".to_owned(),
        false => {
            let names: Vec<&str> = commands.into_iter().map(|(_, name)| name).collect();
            names.join(", ")
        }
    };
    DoctorCheck::ok(
        "drive.commands",
        format!("optional: {}; missing: {}", list(there), list(missing)),
    )
}

fn sgl(controller: &IdentifyController) -> DoctorCheck {
    DoctorCheck::ok(
        "drive.sgl",
        match controller.sgls.support() {
            0 => "no SGLs",
            1 => "SGLs at any byte",
            _ => "SGLs at multiples of 4 alone, which guests are not offered",
        },
    )
}

fn doorbells(controller: &IdentifyController) -> DoctorCheck {
    DoctorCheck::ok(
        "drive.doorbell_buffer",
        match controller.oacs.doorbell_buffer_config() {
            true => "shadow doorbells: an emulated drive",
            false => "no shadow doorbells, as usual for hardware",
        },
    )
}

fn cache(controller: &IdentifyController) -> DoctorCheck {
    DoctorCheck::ok(
        "drive.write_cache",
        match controller.vwc.present() {
            true => "volatile: guests see one, and their Flush reaches the drive",
            false => "none that is volatile",
        },
    )
}

fn arbitration(arbitration: ArbitrationDescription) -> DoctorCheck {
    let ArbitrationDescription {
        has_weighted,
        is_weighted,
    } = arbitration;
    DoctorCheck::ok(
        "drive.arbitration",
        match (is_weighted, has_weighted) {
            (true, _) => "weighted round robin, which is in use",
            (false, true) => {
                "round robin; the drive says that it has weighted round robin, which arbitration=weighted uses"
            }
            (false, false) => "round robin alone",
        },
    )
}

fn controller_memory(is_there: Option<bool>) -> DoctorCheck {
    const NAME: &str = "drive.controller_memory";
    match is_there {
        Some(true) => DoctorCheck::ok(
            NAME,
            "a Controller Memory Buffer, which nvme-mpt does not use",
        ),
        Some(false) => DoctorCheck::ok(NAME, "no Controller Memory Buffer"),
        None => DoctorCheck::not_checked(NAME, "the drive's registers cannot be read"),
    }
}

//! A function behind `vfio-pci`, through the interface of the NVMe driver: how its release is requested, and what remains for
//! holders of its parts.

use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use integration::lab::{LabDrive, inside};
use nvme_guest::iova::{Iommu, IovaSpace};
use nvme_mpt_memory::{MappedWord32, Mapping, MappingAccess};
use nvme_vfio::function::PciAddress;
use nvme_vfio::{ControllerAccess, DeviceBacking, VfioBacking, VfioError};

use crate::fixture::{CheckEnvironment, Failure, TIMEOUT, await_that, expect, sh};
use crate::{ExpectedRefusals, Group};

pub(crate) const GROUP: Group = Group::Inside {
    name: "backing",
    drives: || vec![LabDrive::new("a", 16 << 20), LabDrive::new("b", 16 << 20)],
    refused: ExpectedRefusals::None,
    checks: &[
        ("registers_and_doorbells_are_there", registers),
        ("a_reset_leaves_them_mapped", reset),
        ("memory_is_mapped_where_it_was_asked_for", mapping),
        ("mappings_come_to_an_end", too_many_mappings),
        (
            "registers_are_read_while_it_is_released",
            released_while_read,
        ),
        ("the_kernel_gets_it_back", asked_back),
        ("a_card_that_is_pulled", pulled),
    ],
};

/// Offsets of registers (NVMe Base 2.0, section 3.1.3).
const CAP: u64 = 0x00;
const VS: u64 = 0x08;
const CC: u64 = 0x14;
const CSTS: u64 = 0x1C;
const ASQ: u64 = 0x28;

fn address(id: &str) -> Result<PciAddress, Failure> {
    inside::bind(id, "vfio-pci")?;
    let text = inside::address(id)?;
    text.parse()
        .map_err(|error| Failure::from(format!("{text}: {error}")))
}

fn open(id: &str) -> Result<VfioBacking, Failure> {
    Ok(VfioBacking::open(address(id)?)?)
}

fn kernel<T>(what: &str, result: io::Result<T>) -> Result<T, Failure> {
    result.map_err(|error| Failure::from(format!("{what}: {error}")))
}

fn registers(_: &CheckEnvironment) -> Result<(), Failure> {
    let a = open("a")?;
    expect(a.read32(VS) == 0x0001_0400, || {
        format!("VS {:#x}", a.read32(VS))
    })?;
    let (low, high) = (a.read32(CAP), a.read32(CAP + 4));
    let whole = u64::from(low) | u64::from(high) << 32;
    expect(a.read64(CAP) == whole, || {
        format!("CAP {:#x}, {whole:#x}", a.read64(CAP))
    })?;
    a.write64(ASQ, 0x0123_4567_89AB_C000);
    expect(a.read64(ASQ) == 0x0123_4567_89AB_C000, || {
        format!("ASQ {:#x}", a.read64(ASQ))
    })?;
    let (doorbells, at) = a.doorbells();
    expect(doorbells.len() >= at + 0x1000, || {
        format!("{} bytes, doorbells at {at}", doorbells.len())
    })?;
    let usable = a.usable_iovas();
    // The platform's interrupt addresses cannot be mapped as memory.
    let interrupts = 0xFEE0_0000_u64..=0xFEEF_FFFF;
    expect(
        !usable.is_empty()
            && usable
                .iter()
                .all(|range| range.end() < interrupts.start() || range.start() > interrupts.end()),
        || format!("{usable:x?}"),
    )?;
    expect(a.removal_request().is_some() && !a.is_gone(), || {
        "It is gone, or its removal would not be heard of".to_owned()
    })?;
    let second = VfioBacking::open(address("b")?)?;
    expect(second.read32(VS) == a.read32(VS), || {
        "Another drive".to_owned()
    })
}

fn reset(_: &CheckEnvironment) -> Result<(), Failure> {
    let a = open("a")?;
    // Entry sizes without EN.
    a.write32(CC, 0x0046_0000);
    expect(a.read32(CC) == 0x0046_0000, || {
        format!("CC {:#x}", a.read32(CC))
    })?;
    kernel("reset", a.reset())?;
    expect(a.read32(CC) == 0 && a.read32(VS) == 0x0001_0400, || {
        format!(
            "After the reset: CC {:#x}, VS {:#x}",
            a.read32(CC),
            a.read32(VS)
        )
    })?;
    expect(!a.is_gone() && !a.doorbells().0.is_lost(), || {
        "The reset took the registers away".to_owned()
    })?;
    for enabled in [true, false] {
        kernel("bus mastering", a.set_bus_master(enabled))?;
        let command = sh(&format!(
            "dd if=/sys/bus/pci/devices/{}/config bs=1 skip=4 count=1 | hexdump -e '1/1 \"%u\"'",
            a.name()
        ))?;
        let bits = command.trim().parse::<u8>().unwrap_or_default() & 0b110;
        let wanted = if enabled { 0b110 } else { 0b010 };
        expect(bits == wanted, || format!("Command register: {command}"))?;
    }
    Ok(())
}

/// Maps the whole of a memory.
fn map(iommu: &dyn Iommu, iova: u64, memory: &Mapping, access: MappingAccess) -> io::Result<()> {
    iommu.map(iova, memory, 0..memory.len(), access)
}

fn mapping(_: &CheckEnvironment) -> Result<(), Failure> {
    let a = open("a")?;
    let iommu = a.iommu();
    let memory = kernel("memory", Mapping::anonymous(3 * 4096 + 1))?;
    let at = 1 << 32;
    kernel(
        "map",
        map(iommu.as_ref(), at, &memory, MappingAccess::ReadWrite),
    )?;
    expect(
        map(iommu.as_ref(), at + 4096, &memory, MappingAccess::Read).is_err(),
        || "Mapped on top of another".to_owned(),
    )?;
    // Unmapping only a part of a mapping must fail.
    let parts = [(at + 4096, 4096), (at, 4096), (at + (1 << 20), 4096)];
    for (start, len) in parts {
        expect(iommu.unmap(start, len).is_err(), || {
            format!("{len:#x} bytes at {start:#x} unmapped")
        })?;
    }
    // The last, partial page is mapped as a whole.
    kernel("unmap", iommu.unmap(at, memory.len() as u64))?;
    kernel(
        "map again",
        map(iommu.as_ref(), at, &memory, MappingAccess::Read),
    )?;
    for (iova, what) in [
        (0xFEE0_0000, "interrupts"),
        (u64::MAX - 0xFFFF, "nowhere"),
        (7, "no page"),
    ] {
        expect(
            map(iommu.as_ref(), iova, &memory, MappingAccess::Read).is_err(),
            || format!("Mapped at {iova:#x}, which is {what}"),
        )?;
    }
    let usable = a.usable_iovas();
    let space = Arc::new(IovaSpace::with_iommu(iommu, &usable));
    let large = kernel("memory", Mapping::anonymous(64 << 20))?;
    for _ in 0..3 {
        drop(kernel("map", space.map(&large, MappingAccess::ReadWrite))?);
    }
    Ok(())
}

fn too_many_mappings(_: &CheckEnvironment) -> Result<(), Failure> {
    let a = open("a")?;
    let iommu = a.iommu();
    // The kernel limits the mappings of a container, and not those of iommufd.
    if sh("test -e /sys/module/vfio_iommu_type1").is_err() {
        return Ok(());
    }
    let page = kernel("memory", Mapping::anonymous(4096))?;
    let limit = sh("cat /sys/module/vfio_iommu_type1/parameters/dma_entry_limit")?;
    let limit: u64 = limit.trim().parse().unwrap_or(0);
    for number in 0..limit {
        kernel(
            "map",
            map(
                iommu.as_ref(),
                (1 << 32) + 4096 * number,
                &page,
                MappingAccess::Read,
            ),
        )?;
    }
    let refused = map(
        iommu.as_ref(),
        (1 << 32) + 4096 * limit,
        &page,
        MappingAccess::Read,
    );
    let output = refused.map_err(|error| error.to_string());
    expect(
        output
            .as_ref()
            .is_err_and(|text| text.contains(&format!("takes {limit} mappings"))),
        || format!("{output:?}"),
    )
}

/// Checks that every part of a released function reports its end.
fn expect_gone(a: &VfioBacking) -> Result<(), Failure> {
    let (doorbells, at) = a.doorbells();
    let doorbell = MappedWord32::new(&doorbells, at).ok_or_else(|| Failure::from("Unaligned"))?;
    doorbell.store(1);
    a.write32(CC, 1);
    let read = (a.read32(CC), a.read32(CSTS), a.read64(CAP));
    expect(
        a.is_gone() && read == (u32::MAX, u32::MAX, u64::MAX),
        || format!("It is not gone: {read:x?}"),
    )?;
    let page = kernel("memory", Mapping::anonymous(4096))?;
    let results = [
        a.reset(),
        a.set_bus_master(true),
        map(a.iommu().as_ref(), 1 << 32, &page, MappingAccess::Read),
    ];
    for result in results {
        let kind = result.as_ref().map_err(io::Error::kind);
        expect(kind == Err(io::ErrorKind::NotConnected), || {
            format!("{kind:?}")
        })?;
    }
    kernel("unmap", a.iommu().unmap(1 << 32, 4096))
}

fn released_while_read(_: &CheckEnvironment) -> Result<(), Failure> {
    for _ in 0..5 {
        let a = open("a")?;
        let space = Arc::new(IovaSpace::with_iommu(a.iommu(), &a.usable_iovas()));
        let memory = kernel("memory", Mapping::anonymous(1 << 20))?;
        let mapped = kernel("map", space.map(&memory, MappingAccess::ReadWrite))?;
        thread::scope(|scope| {
            let reader = scope.spawn(|| {
                loop {
                    match a.read32(CSTS) {
                        0 => {}
                        other => return other,
                    }
                }
            });
            thread::sleep(Duration::from_millis(20));
            // Both threads release at once. The second release finds the function released.
            scope.spawn(|| a.release());
            a.release();
            let last = reader.join().unwrap_or_default();
            expect(last == u32::MAX, || format!("CSTS {last:#x}"))
        })?;
        expect_gone(&a)?;
        // The function is released, although memory and doorbells are still mapped.
        let (doorbells, _) = a.doorbells();
        let again = open("a")?;
        expect(again.read32(VS) == 0x0001_0400, || {
            "Not opened again".to_owned()
        })?;
        drop((mapped, doorbells));
    }
    Ok(())
}

/// Returns whether the kernel has requested the release of the function.
fn is_asked_for(a: &VfioBacking) -> bool {
    let Some(fd) = a.removal_request() else {
        return false;
    };
    // A signalled eventfd shows a non-zero count.
    let path = format!("/proc/self/fdinfo/{}", fd.as_raw_fd());
    let info = fs::read_to_string(path).unwrap_or_default();
    let count = info
        .lines()
        .find_map(|line| line.strip_prefix("eventfd-count:"));
    count.is_some_and(|count| count.trim() != "0")
}

fn asked_back(_: &CheckEnvironment) -> Result<(), Failure> {
    let a = open("a")?;
    let other = open("b")?;
    expect(!is_asked_for(&a), || {
        "A removal was requested, and the test requested none".to_owned()
    })?;
    let path = "/sys/bus/pci/drivers/vfio-pci/unbind";
    let name = a.name().to_owned();
    let unbinding = thread::spawn(move || fs::write(path, name));
    await_that("the kernel's request", || Ok(is_asked_for(&a)))?;
    // The kernel waits until the function is released.
    expect(
        !unbinding.is_finished() && !a.is_gone() && a.read32(CSTS) == 0,
        || "It did not wait".to_owned(),
    )?;
    a.release();
    await_that("the kernel to have it", || Ok(unbinding.is_finished()))?;
    let unbound = unbinding
        .join()
        .unwrap_or_else(|_| Err(io::ErrorKind::Other.into()));
    kernel("unbind", unbound)?;
    expect_gone(&a)?;
    expect(!is_asked_for(&other) && other.read32(CSTS) == 0, || {
        "The other drive noticed".to_owned()
    })?;
    inside::bind("a", "nvme")?;
    Ok(())
}

fn pulled(_: &CheckEnvironment) -> Result<(), Failure> {
    let a = open("a")?;
    let other = open("b")?;
    let memory = kernel("memory", Mapping::anonymous(1 << 20))?;
    kernel(
        "map",
        map(
            a.iommu().as_ref(),
            1 << 32,
            &memory,
            MappingAccess::ReadWrite,
        ),
    )?;
    inside::control("remove a")?;
    await_that("it is noticed", || Ok(a.is_gone()))?;
    // The removal is visible before any part is released.
    let read = (a.read32(CSTS), a.read64(CAP));
    expect(read == (u32::MAX, u64::MAX), || format!("{read:x?}"))?;
    a.write32(CC, 0);
    let started = std::time::Instant::now();
    a.release();
    expect(started.elapsed() < TIMEOUT, || "It took long".to_owned())?;
    expect_gone(&a)?;
    expect(!other.is_gone() && other.read32(CSTS) == 0, || {
        "The other drive noticed".to_owned()
    })?;
    let dir = format!("/sys/bus/pci/devices/{}", a.name());
    let is_there = || fs::exists(&dir).unwrap_or(false);
    await_that("the kernel to have done with it", || Ok(!is_there()))?;
    let gone = VfioBacking::open(a.name().parse().map_err(|_| Failure::from("Name"))?);
    expect(matches!(gone, Err(VfioError::Function(_))), || {
        format!("{gone:?}")
    })?;
    inside::control("plug a")?;
    await_that("the new card", || Ok(is_there()))?;
    let again = open("a")?;
    expect(again.read32(VS) == 0x0001_0400, || {
        "Not opened again".to_owned()
    })
}

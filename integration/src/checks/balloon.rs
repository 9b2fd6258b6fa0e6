//! Checks of guests that return memory by a balloon and free page reporting, while fio verifies a drive.

use std::time::{Duration, Instant};

use super::{CheckEnvironment, Failure, expect, with_path};
use crate::guest::balloon::MemoryFileUsage;
use crate::guest::fio::GuestFioJob;
use crate::guest::{Guest, GuestAgent, GuestConfig, GuestDrive, HOTPLUG_BUS};
use crate::progress::{print_line, seconds};
use crate::provision::GuestAssets;
use crate::server::FunctionArgument;
use crate::vmms::{CloudHypervisor, VmmUnderTest};

/// Kernel module with the balloon driver.
pub const MODULE: &str = "virtio_balloon";

const MEMORY_MIB: u32 = 384;
/// Size of the inflated balloon in bytes.
const BALLOON: u64 = 64 << 20;
/// Memory in bytes that the guest uses and then frees.
const USED: u64 = 64 << 20;
/// Memory in bytes below 1 MiB that devices cannot access on this machine.
const UNMAPPED: u64 = 1 << 20;
/// Number of times that the balloon is inflated and deflated under load.
const ROUNDS: u32 = 3;
/// Number of fio passes with each size of the balloon.
const PASSES: u32 = 1;
/// Timeout of steps in a busy guest.
const STEP_TIMEOUT: Duration = Duration::from_secs(300);

/// A VMM whose guest has a balloon.
pub trait BalloonVmm {
    /// Returns the guest.
    fn guest(&self) -> &GuestAgent;

    /// Requests that the guest sets its balloon to `size` bytes. The guest has `memory` bytes of memory.
    ///
    /// # Errors
    /// The VMM refuses.
    fn set_balloon(&mut self, memory: u64, size: u64) -> Result<(), Failure>;
}

impl BalloonVmm for Guest {
    fn guest(&self) -> &GuestAgent {
        self
    }

    fn set_balloon(&mut self, memory: u64, size: u64) -> Result<(), Failure> {
        Ok(self.shrink_memory_to(memory - size)?)
    }
}

impl BalloonVmm for CloudHypervisor {
    fn guest(&self) -> &GuestAgent {
        VmmUnderTest::guest(self)
    }

    fn set_balloon(&mut self, _: u64, size: u64) -> Result<(), Failure> {
        Ok(Self::set_balloon(self, size)?)
    }
}

/// Memory of a guest that its drive pins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryPinning {
    /// A software drive: the server maps the memory without pinning it.
    None,
    /// A physical drive: all memory is pinned.
    All,
}

/// A guest whose balloon is either empty or has `BALLOON` bytes.
pub struct BalloonGuest<V> {
    vmm: V,
    /// Total memory of the guest's kernel while the balloon is empty.
    total_kib: u64,
}

impl<V: BalloonVmm> BalloonGuest<V> {
    /// Loads the balloon driver in a guest with an empty balloon.
    ///
    /// # Errors
    /// The guest fails.
    pub fn new(vmm: V) -> Result<Self, Failure> {
        vmm.guest().load_modules()?;
        let total = "awk '/^MemTotal:/ { print $2 }' /proc/meminfo";
        let text = vmm.guest().check(total, STEP_TIMEOUT)?;
        let total_kib = text.trim().parse();
        let total_kib = total_kib.map_err(|_| Failure::from(format!("MemTotal is {text}")))?;
        Ok(Self { vmm, total_kib })
    }

    /// Returns the VMM.
    pub fn vmm(&mut self) -> &mut V {
        &mut self.vmm
    }

    /// Returns the present state of the guest's memory file.
    ///
    /// # Errors
    /// The memory file cannot be read.
    pub fn memory(&self) -> Result<MemoryFileUsage, Failure> {
        let pid = self.vmm.guest().pid();
        MemoryFileUsage::from_process(pid).map_err(with_path(format!("/proc/{pid}/fd")))
    }

    /// Inflates the balloon to `BALLOON` bytes, and waits until it is inflated.
    ///
    /// # Errors
    /// The VMM or the guest fails.
    pub fn inflate(&mut self) -> Result<(), Failure> {
        self.set(BALLOON)
    }

    /// Deflates the balloon, and waits until it is empty.
    ///
    /// # Errors
    /// The VMM or the guest fails.
    pub fn deflate(&mut self) -> Result<(), Failure> {
        self.set(0)
    }

    fn set(&mut self, size: u64) -> Result<(), Failure> {
        let memory = self.memory()?.len_bytes;
        self.vmm.set_balloon(memory, size)?;
        // The balloon driver subtracts the balloon's pages from the kernel's total memory.
        let left_kib = self.total_kib - size / 1024;
        let script =
            format!("until grep -q '^MemTotal: *{left_kib} kB' /proc/meminfo; do sleep 0.1; done");
        self.vmm.guest().check(&script, STEP_TIMEOUT)?;
        Ok(())
    }

    /// Makes the guest use memory and free it again. Returns the state of the memory file while the memory was in use.
    ///
    /// # Errors
    /// The guest fails.
    pub fn use_and_free(&self) -> Result<MemoryFileUsage, Failure> {
        let guest = self.vmm.guest();
        guest.check(
            &format!("head -c {USED} /dev/zero >/run/used"),
            STEP_TIMEOUT,
        )?;
        let memory = self.memory()?;
        guest.check("rm /run/used", STEP_TIMEOUT)?;
        Ok(memory)
    }

    /// Waits until at most `most` bytes of the memory file are allocated.
    ///
    /// # Errors
    /// More memory stays allocated.
    pub fn await_freed(&self, most: u64) -> Result<(), Failure> {
        let deadline = Instant::now() + STEP_TIMEOUT;
        loop {
            let memory = self.memory()?;
            if memory.allocated_bytes <= most {
                return Ok(());
            }
            expect(Instant::now() < deadline, || {
                format!(
                    "The guest gave memory back, and its file has more than {most} bytes: {memory:?}"
                )
            })?;
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Verifies the first namespace by fio with direct and cached I/O, while the balloon is inflated and deflated. After
    /// each pass, calls `check` with the balloon's size and the state of the memory file.
    ///
    /// # Errors
    /// Data is wrong, or the guest's kernel reported an error.
    pub fn verify(
        &mut self,
        mut check: impl FnMut(u64, MemoryFileUsage) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        self.vmm
            .guest()
            .check("rm -f /run/over; : >/run/passes", STEP_TIMEOUT)?;
        let load = self.vmm.guest().start(&load())?;
        let result = self.rounds(&mut check);
        let guest = self.vmm.guest();
        guest.check(": >/run/over", STEP_TIMEOUT)?;
        // Checked first, since an error of fio explains other errors.
        let passes = guest.finish_successfully(load, STEP_TIMEOUT)?;
        result?;
        print_line(&format!("        fio verified in {} passes", passes.trim()));
        let output = guest.check(
            "dmesg | grep -E 'I/O error|timeout,|timed out|resetting|Out of memory' || true",
            STEP_TIMEOUT,
        )?;
        expect(output.trim().is_empty(), || {
            format!("The guest's kernel complains:\n{output}")
        })
    }

    fn rounds(
        &mut self,
        check: &mut impl FnMut(u64, MemoryFileUsage) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        for size in [BALLOON, 0].repeat(ROUNDS as usize) {
            let started = Instant::now();
            self.set(size)?;
            // The pass in progress may have begun before the change, so it does not count.
            let passes = format!(
                "passes() {{ wc -l </run/passes; }}
                wanted=$(($(passes) + {PASSES} + 1))
                until [ $(passes) -ge $wanted ] || [ -e /run/over ]; do sleep 0.1; done"
            );
            self.vmm.guest().check(&passes, STEP_TIMEOUT)?;
            check(size, self.memory()?)?;
            let (mib, time) = (size >> 20, seconds(started.elapsed()));
            print_line(&format!(
                "        a balloon of {mib} MiB, verified ({time})"
            ));
        }
        Ok(())
    }
}

/// Returns a script that runs fio passes until the file `/run/over` exists. Each pass writes different data. If the drive
/// still used a page that the guest has freed, the data of an earlier pass would show this.
fn load() -> String {
    let direct = GuestFioJob::new("direct", "randwrite", "64k", 16).option("size", "4m");
    let cached = GuestFioJob::new("cached", "write", "64k", 1)
        .option("ioengine", "psync")
        .option("direct", "0")
        .option("offset", "8m")
        .option("size", "8m");
    let [direct, cached] =
        [direct, cached].map(|job| job.option("randrepeat", "0").with_verification());
    format!(
        "until [ -e /run/over ]; do
            ({}) >/run/fio && ({}) >/run/fio || {{ : >/run/over; cat /run/fio; exit 1; }}
            echo >>/run/passes
        done
        wc -l </run/passes",
        direct.script(),
        cached.script(),
    )
}

/// Verifies a drive with a guest of Cloud Hypervisor, on a function that does not pin memory, while the guest's pages are
/// freed. The guest's balloon is empty at first.
///
/// # Errors
/// Data is wrong, or no memory is freed.
pub fn in_cloud_hypervisor(vmm: CloudHypervisor) -> Result<CloudHypervisor, Failure> {
    let mut balloon = BalloonGuest::new(vmm)?;
    let used = balloon.use_and_free()?;
    balloon.await_freed(used.allocated_bytes - USED / 2)?;
    balloon.verify(|size, memory| {
        let is_right = memory.allocated_bytes + size <= memory.len_bytes;
        expect(is_right, || {
            format!("With {size} bytes in the balloon, the memory is {memory:?}")
        })
    })?;
    Ok(balloon.vmm)
}

/// Verifies a drive with a guest of QEMU. QEMU returns memory to the host only until the function is plugged
/// (`ram_block_uncoordinated_discard_disable` in its `hw/vfio-user/container.c`).
///
/// # Errors
/// Data is wrong, or memory is freed while the drive may use it.
pub fn in_qemu(
    bench: &CheckEnvironment,
    assets: &GuestAssets,
    function: &FunctionArgument,
    pinning: MemoryPinning,
) -> Result<(), Failure> {
    let mut server = bench.serve(std::slice::from_ref(function))?;
    let config = GuestConfig::new("guest")
        .memory_mib(MEMORY_MIB)
        .hotplug()
        .balloon();
    let mut balloon = BalloonGuest::new(bench.boot_with(assets, &config)?)?;

    // As long as the guest has no function, QEMU frees pages.
    let used = balloon.use_and_free()?;
    balloon.await_freed(used.allocated_bytes - USED / 2)?;
    print_line("        pages are freed without a function");
    balloon.inflate()?;
    balloon.await_freed(balloon.memory()?.len_bytes - BALLOON)?;
    let freed = balloon.memory()?.allocated_bytes;

    let drive = GuestDrive::vfio_user(server.socket(&function.id));
    let guest = balloon.vmm();
    guest.plug(&drive.id("plugged").bus(HOTPLUG_BUS))?;
    guest.check(
        "until [ -e /dev/nvme0n1 ]; do sleep 0.1; done",
        STEP_TIMEOUT,
    )?;
    print_line("        a function is plugged");
    balloon.deflate()?;
    let before = balloon.use_and_free()?;
    expect(before.allocated_bytes >= freed + USED / 2, || {
        format!("The guest used {USED} bytes, and its memory had {freed} before: {before:?}")
    })?;
    let is_whole = before.allocated_bytes + UNMAPPED >= before.len_bytes;
    expect(pinning == MemoryPinning::None || is_whole, || {
        format!("Memory is missing that is pinned for the drive: {before:?}")
    })?;
    balloon.verify(|size, memory| {
        expect(memory.allocated_bytes >= before.allocated_bytes, || {
            format!("With {size} bytes in the balloon, memory was freed: it is {memory:?}, and was {before:?}")
        })
    })?;
    print_line(&format!(
        "        {}: the memory file has {} MiB with the balloon and without a function, and {} MiB with both",
        assets.qemu.version()?,
        freed >> 20,
        balloon.memory()?.allocated_bytes >> 20,
    ));
    server.expect_alive()?;
    balloon.vmm().power_off(STEP_TIMEOUT)?;
    Ok(server.stop()?)
}

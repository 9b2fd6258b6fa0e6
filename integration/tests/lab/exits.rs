//! Exits and interrupts of a guest's I/O, counted by KVM: of the reference VMM, and of QEMU with virtio-blk for comparison.

use integration::guest::{GuestConfig, GuestDrive};
use integration::progress::print_line;
use integration::provision::KernelChoice;
use integration::vmm::counters::KvmCounters;

use crate::fixture::{CheckEnvironment, Failure, TIMEOUT, expect, sh, with_path};
use crate::init;
use crate::vmm::{Owner, boot};

/// Number of reads that are counted, and of reads before them, during which doorbells get mapped and pollers begin to spin.
const READS: u64 = 10_000;
const READS_BEFORE: u64 = 1000;

/// Maximum number of MMIO exits per read.
const MMIO_EXITS_MAX: f64 = 0.01;
/// Maximum number of the function's interrupts per read. KVM's counter includes timer interrupts, whose number per read grows
/// on slow machines.
const INTERRUPTS_MAX: f64 = 0.5;
/// Maximum share of the I/O time that the VMM may use to map and unmap doorbells. Its rule keeps to 0.01, as its own test
/// shows. Here, mapping may also wait for a processor, and for the guest.
const MAPPING_MAX: f64 = 0.05;

/// Shell functions that read at random with 32 commands in flight, and print a report.
const FUNCTIONS: &str = r"
count() { devmem 0xfe000000 32 1; }
reads() {
    fio --name=reads --filename=$1 --readonly --rw=randread --bs=4k --iodepth=32 --ioengine=libaio \
        --direct=1 --size=128m --number_ios=$2 --eta=never --output=/tmp/fio && echo guest: read $2
}
# Interrupts of a drive so far, of all its queues and on all processors.
interrupts() {
    awk -v drive=$1 'index($0, drive) { for (n = 2; $n ~ /^[0-9]+$/; n++) all += $n } END { print all + 0 }' \
        /proc/interrupts
}
";

/// Returns a script with [`FUNCTIONS`] and `body`.
fn script(body: &str) -> String {
    init::script(&format!("{FUNCTIONS}\n{body}"))
}

pub(crate) fn with_a_doorbell_buffer(bench: &CheckEnvironment) -> Result<(), Failure> {
    count_exits(bench, ("auto", Owner::Vmm), "Doorbell Buffer")
}

/// A server's drive must cause no more exits than a drive in the VMM's process.
pub(crate) fn on_a_servers_drive(bench: &CheckEnvironment) -> Result<(), Failure> {
    count_exits(
        bench,
        ("auto", Owner::Server),
        "Doorbell Buffer, drive of a server",
    )
}

/// The Doorbell Buffer is not offered, because the guest would use it.
pub(crate) fn without_a_doorbell_buffer(bench: &CheckEnvironment) -> Result<(), Failure> {
    count_exits(bench, ("mapped", Owner::Vmm), "no Doorbell Buffer")
}

/// Counts the exits of a guest's reads by KVM.
fn count_exits(
    bench: &CheckEnvironment,
    function: (&str, Owner),
    what: &str,
) -> Result<(), Failure> {
    let body = format!(
        "reads /dev/nvme0n1 {READS_BEFORE}
count
before=$(interrupts nvme0q)
reads /dev/nvme0n1 {READS}
echo guest: $(($(interrupts nvme0q) - before)) interrupts
count"
    );
    let output = boot_counting(bench, &script(&body), function)?;
    expect(output.contains(&format!("guest: read {READS}")), || {
        format!("The guest has not read:\n{output}")
    })?;
    let per_read =
        |name: &str| Ok::<_, Failure>(reported_delta(&output, name)? as f64 / READS as f64);
    let (mmio, interrupts) = (per_read("mmio_exits")?, per_read("irq_injections")?);
    print_costs(
        &format!("doorbells={}, {what}", function.0),
        [mmio, per_read("io_exits")?, interrupts, per_read("exits")?],
    );
    let own = guest_interrupts(&output)? as f64 / READS as f64;
    print_line(&format!(
        "        {own:.3} of the interrupts are the function's, the others those of timers and the console"
    ));
    let (mapping, all) = (
        reported_delta(&output, "mapping_us")?,
        reported_delta(&output, "us")?,
    );
    let all_mapping = reported_value(&output, 2, "mapping_us")?;
    print_line(&format!(
        "        doorbells were mapped {} times, which took {all_mapping} us with unmapping; \
         {mapping} us of the {all} us that the reads took",
        reported_value(&output, 2, "mappings")?,
    ));
    expect(mmio < MMIO_EXITS_MAX, || {
        format!("{mmio} MMIO exits for each read")
    })?;
    expect(own > 0.0 && own <= interrupts, || {
        format!("{own} interrupts of the function for each read, of {interrupts} in all")
    })?;
    expect(own < INTERRUPTS_MAX, || {
        format!("{own} interrupts of the function for each read")
    })?;
    // Includes mappings before the counted reads.
    expect((all_mapping as f64) < MAPPING_MAX * all as f64, || {
        format!("{all_mapping} us of mapping for {all} us of reads")
    })
}

/// Returns the number of the function's interrupts that the guest counted during the reads.
fn guest_interrupts(output: &str) -> Result<u64, Failure> {
    let line = output.lines().find(|line| line.ends_with(" interrupts"));
    let words = line.and_then(|line| line.split_once("guest: "));
    let number = words.and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
    number.ok_or_else(|| Failure::from(format!("The guest counted no interrupts:\n{output}")))
}

/// Checks a guest with occasional I/O, whose doorbells are mapped and unmapped repeatedly.
pub(crate) fn doorbells_come_and_go(bench: &CheckEnvironment) -> Result<(), Failure> {
    const BURSTS: u64 = 2;
    // The guest waits after each burst until the doorbells are unmapped, for a limited time, because slow mapping also delays
    // unmapping.
    let body = format!(
        "count
for burst in $(seq {BURSTS}); do
    unmapped=$(devmem 0xfe000000 32)
    reads /dev/nvme0n1 {READS_BEFORE}
    for second in $(seq 60); do
        [ $(devmem 0xfe000000 32) = $unmapped ] || break
        sleep 1
    done
done
count"
    );
    let output = boot_counting(bench, &script(&body), ("mapped", Owner::Vmm))?;
    let reads = output
        .matches(&format!("guest: read {READS_BEFORE}"))
        .count();
    expect(reads == BURSTS as usize, || {
        format!("The guest has not read:\n{output}")
    })?;
    // Counted since the start of the machine, because the boot maps doorbells as well.
    let (mappings, mapping) = (
        reported_value(&output, 2, "mappings")?,
        reported_value(&output, 2, "mapping_us")?,
    );
    let all = reported_value(&output, 2, "us")?;
    print_line(&format!(
        "        doorbells were mapped {mappings} times by {BURSTS} bursts and before, which took {mapping} us with \
         unmapping, of {all} us"
    ));
    expect(mappings >= 2, || {
        format!("Doorbells were mapped {mappings} times, and never unmapped")
    })?;
    expect((mapping as f64) < MAPPING_MAX * all as f64, || {
        format!("{mapping} us of mapping in {all} us")
    })
}

/// Measures the same reads by virtio-blk in QEMU, with direct I/O and an I/O thread.
pub(crate) fn with_virtio_blk(bench: &CheckEnvironment) -> Result<(), Failure> {
    let image = bench.dir().join("disk.img");
    sh(&format!(
        "dd if=/dev/urandom of={} bs=1M count=128 2>/dev/null",
        image.display()
    ))?;
    let drive = GuestDrive::virtio_blk(&image);
    let mut guest = bench.boot(&GuestConfig::new("guest").drive(drive).memory_mib(384))?;
    guest.load_modules()?;
    let reads = |count: u64| format!("{FUNCTIONS}\nreads /dev/vda {count}\n");
    // The guest gets the scripts before the measurement, to keep the console quiet.
    for count in [READS_BEFORE, READS] {
        let write = format!("cat >/tmp/reads-{count} <<'end'\n{}end\n", reads(count));
        guest.check(&write, TIMEOUT)?;
    }
    guest.check(&format!("sh /tmp/reads-{READS_BEFORE}"), TIMEOUT)?;
    let counters =
        || KvmCounters::from_process(guest.pid()).map_err(with_path("/sys/kernel/debug/kvm"));
    let before = counters()?;
    let output = guest.check(&format!("sh /tmp/reads-{READS}"), TIMEOUT)?;
    let after = counters()?;
    expect(output.contains(&format!("guest: read {READS}")), || {
        format!("The guest has not read:\n{output}")
    })?;
    let per_read =
        |of: fn(&KvmCounters) -> u64| of(&after).saturating_sub(of(&before)) as f64 / READS as f64;
    let mmio = per_read(|counters| counters.mmio_exits);
    print_costs(
        "virtio-blk in QEMU",
        [
            mmio,
            per_read(|counters| counters.io_exits),
            per_read(|counters| counters.irq_injections),
            per_read(|counters| counters.exits),
        ],
    );
    guest.power_off(TIMEOUT)?;
    sh(&format!("rm {}", image.display()))?;
    // QEMU's values are only printed, but KVM must have counted exits.
    expect(per_read(|counters| counters.exits) > 0.0, || {
        "KVM has counted nothing".to_owned()
    })
}

/// Prints a row of the table of costs per read.
fn print_costs(what: &str, [mmio, io, interrupts, exits]: [f64; 4]) {
    print_line(&format!(
        "        for each of {READS} reads: {mmio:.4} MMIO exits, {io:.4} port exits, {interrupts:.3} \
         interrupts, {exits:.2} exits of all kinds; {what}"
    ));
}

fn boot_counting(
    bench: &CheckEnvironment,
    script: &str,
    function: (&str, Owner),
) -> Result<String, Failure> {
    boot(
        bench,
        &KernelChoice::V6_1,
        script,
        function,
        &["--counters"],
    )
}

/// Returns a value from the report number `time`.
fn reported_value(output: &str, time: u32, name: &str) -> Result<u64, Failure> {
    let counter_line = format!("vmm: counters {time} ");
    let line = output
        .lines()
        .find_map(|line| line.split(&counter_line).nth(1));
    let prefix = format!("{name}=");
    let value = line.and_then(|line| {
        let mut words = line.split_whitespace();
        words.find_map(|word| word.strip_prefix(&prefix)?.parse().ok())
    });
    value.ok_or_else(|| Failure::from(format!("{name} was not told {time} times:\n{output}")))
}

/// Returns the difference of a value between both reports.
fn reported_delta(output: &str, name: &str) -> Result<u64, Failure> {
    Ok(reported_value(output, 2, name)?.saturating_sub(reported_value(output, 1, name)?))
}

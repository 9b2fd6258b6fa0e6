//! After any end of its server, a drive is disabled and accesses no memory. The host's driver can use it, with all data that
//! was written.

use integration::lab::{LabDrive, inside};
use integration::server::{FunctionArgument, Server};

use crate::client::{Client, ClientWork};
use crate::fixture::{CheckEnvironment, Failure, await_that, expect, sh};
use crate::{ExpectedRefusals, Group};

pub(crate) const GROUP: Group = Group::Inside {
    name: "giveback",
    drives: || vec![LabDrive::new("a", 64 << 20)],
    refused: ExpectedRefusals::None,
    checks: &[
        ("after_an_end_in_order", stopped),
        ("after_an_end_under_load", stopped_under_load),
        ("after_a_crash_under_load", killed_under_load),
        ("after_a_start_that_fails", failed_start),
        ("back_and_forth", back_and_forth),
    ],
};

const RANGE: u64 = 16 << 20;

fn serve(bench: &CheckEnvironment) -> Result<Server, Failure> {
    inside::bind("a", "vfio-pci")?;
    let function = FunctionArgument::new("f", inside::address("a")?, format!("0+{RANGE}"));
    bench.serve(&[function])
}

/// Returns a client that has written its range.
fn client(server: &Server, seed: u64) -> Result<Client, Failure> {
    let client = Client::start("f", &server.socket("f"), ClientWork::new(seed))?;
    let places = ClientWork::new(0).places as u64;
    client.wait_for("to write its range", || client.completed() > places)?;
    client.advance()?;
    Ok(client)
}

/// A drive's registers, read without any driver.
struct Registers {
    bar: u64,
    config: String,
}

impl Registers {
    fn open(id: &str) -> Result<Self, Failure> {
        let device = format!("/sys/bus/pci/devices/{}", inside::address(id)?);
        // Wakes the drive from the sleep state of its last driver.
        sh(&format!("echo on >{device}/power/control"))?;
        let bar = sh(&format!("head -n 1 {device}/resource | cut -d' ' -f1"))?;
        let bar = u64::from_str_radix(bar.trim().trim_start_matches("0x"), 16)
            .map_err(|error| Failure::from(format!("{bar}: {error}")))?;
        Ok(Self {
            bar,
            config: format!("{device}/config"),
        })
    }

    /// Returns the Command register (PCI Local Bus 3.0, 6.2.2).
    fn command(&self) -> Result<u64, Failure> {
        number(&sh(&format!(
            "hexdump -s 4 -n 2 -e '1/2 \"%u\"' {}",
            self.config
        ))?)
    }

    fn read(&self, offset: u64) -> Result<u64, Failure> {
        number(&sh(&format!("devmem {:#x} 32", self.bar + offset))?)
    }

    /// Checks that the controller is disabled, without Bus Master Enable.
    fn expect_disabled(&self) -> Result<(), Failure> {
        /// The bit Bus Master Enable.
        const BUS_MASTER: u64 = 1 << 2;
        let command = self.command()?;
        expect(command & BUS_MASTER == 0, || {
            format!("It may still master the bus: Command is {command:#06x}")
        })?;
        // Sets Memory Space Enable, to read the registers.
        let written = format!(
            "printf '\\002\\000' | dd of={} bs=2 seek=2 conv=notrunc",
            self.config
        );
        sh(&written)?;
        // CC.EN and CSTS.RDY (NVMe Base 2.0, 3.1.3.5 and 3.1.3.6).
        let (cc, csts) = (self.read(0x14)?, self.read(0x1c)?);
        expect(cc & 1 == 0 && csts & 1 == 0, || {
            format!("It is not disabled: CC is {cc:#x}, CSTS is {csts:#x}")
        })
    }
}

fn number(text: &str) -> Result<u64, Failure> {
    let text = text.trim();
    let number = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    number.map_err(|error| Failure::from(format!("{text}: {error}")))
}

pub(crate) fn stopped(bench: &CheckEnvironment) -> Result<(), Failure> {
    let mut server = serve(bench)?;
    let outcome = client(&server, 1)?.finish()?;
    server.stop()?;
    Registers::open("a")?.expect_disabled()?;
    inside::bind("a", "nvme")?;
    outcome
        .contents
        .check_device(&inside::block_device("a", 1)?, 0)
}

fn stopped_under_load(bench: &CheckEnvironment) -> Result<(), Failure> {
    ended_under_load(bench, |server| Ok(server.stop()?))
}

fn killed_under_load(bench: &CheckEnvironment) -> Result<(), Failure> {
    ended_under_load(bench, |server| {
        server.kill();
        Ok(())
    })
}

fn ended_under_load(
    bench: &CheckEnvironment,
    end: fn(&mut Server) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut server = serve(bench)?;
    let client = client(&server, 2)?;
    end(&mut server)?;
    Registers::open("a")?.expect_disabled()?;
    inside::bind("a", "nvme")?;
    let outcome = client.join()?;
    outcome
        .contents
        .check_device(&inside::block_device("a", 1)?, 0)
}

/// A start that fails after it has opened the drive, because the range exceeds the drive.
fn failed_start(bench: &CheckEnvironment) -> Result<(), Failure> {
    inside::bind("a", "vfio-pci")?;
    let function = FunctionArgument::new("f", inside::address("a")?, "48M+48M");
    let result = bench.serve(&[function]);
    expect(result.is_err(), || {
        "A range beyond the drive is served".to_owned()
    })?;
    Registers::open("a")?.expect_disabled()?;
    inside::bind("a", "nvme")?;
    sh(&format!(
        "dd if={} of=/dev/null bs=4k count=1 iflag=direct",
        inside::block_device("a", 1)?.display()
    ))?;
    Ok(())
}

/// Checks that server and host driver alternately find each other's data.
fn back_and_forth(bench: &CheckEnvironment) -> Result<(), Failure> {
    for round in 0..4 {
        let mut server = serve(bench)?;
        let client = client(&server, 10 + round)?;
        let outcome = if round % 2 == 0 {
            let outcome = client.finish()?;
            server.stop()?;
            outcome
        } else {
            server.kill();
            client.join()?
        };
        inside::bind("a", "nvme")?;
        let device = inside::block_device("a", 1)?;
        outcome.contents.check_device(&device, 0)?;
        let controller = device.display().to_string();
        await_that("the controller is live", || {
            let name = controller
                .trim_start_matches("/dev/")
                .trim_end_matches("n1");
            Ok(sh(&format!("cat /sys/class/nvme/{name}/state"))?.trim() == "live")
        })?;
    }
    Ok(())
}

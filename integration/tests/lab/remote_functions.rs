//! Functions on a drive of a server, each with its guest's driver and without a machine, in this process or in another process.
//!
//! The other process is this program as well. It executes orders, one per line, and answers each with a report.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use integration::server::{FunctionArgument, Server};
use nvme_mpt::PollerPool;
use nvme_mpt_tests::bar::Bar;
use nvme_mpt_tests::command::{DataPointer, Sqe};
use nvme_mpt_tests::controller::{Config, Controller, QueueOptions};
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::function::{InProcess, map};
use nvme_mpt_tests::memory::{DmaBuffer, GuestMemory};
use nvme_mpt_tests::prp::{self, PreparedPointer};
use nvme_mpt_tests::queue::QueuePair;
use nvme_mpt_tests::status::{DATA_TRANSFER_ERROR, LBA_OUT_OF_RANGE};
use nvme_mpt_vmm::open::{self, LeaseLedgers};
use vmm_device::{MsixMasking, NvmeFunction};

use crate::fixture::{Failure, TIMEOUT, expect, with_path};

/// First argument of this program in the other process.
pub(crate) const ARGUMENT: &str = "elsewhere";
/// Bytes of each lease.
pub(crate) const RANGE: u64 = 16 << 20;

/// Bytes of a command.
const PIECE: usize = 64 << 10;
const BLOCK: u64 = 512;
/// Number of commands that a function leaves in flight.
const IN_FLIGHT: u64 = 32;
/// Number of commands in flight of a guest that resets its controller: as many as its queue can hold.
const MOST_IN_FLIGHT: u64 = 60;
/// Bytes that fill memory before reads into it, and when the guest reuses it.
const READ: u8 = 0xA5;
const REUSED_BYTE: u8 = 0x5A;
/// Size of each guest's memory in bytes.
const MEMORY: u64 = 1 << 20;
/// Maximum number of guests with separate memory addresses.
const GUESTS: u8 = 8;
/// Report of success. Other reports describe a failure.
const DONE_REPORT: &str = "done";

/// Returns the start of a guest's memory.
fn base(guest: u8) -> u64 {
    u64::from(guest) << 33
}

/// A function on a drive of a server, with its guest's driver.
pub(crate) struct RemoteFunction {
    function: Arc<InProcess>,
    disk: Disk,
    /// Queue for commands that are left in flight or refused.
    queue: QueuePair,
    buffer: DmaBuffer,
    controller: Controller,
    guest: u8,
    pub(crate) byte: u8,
}

/// Commands in flight that share a buffer.
pub(crate) struct InflightCommands {
    cids: Vec<u16>,
    /// PRP list of the buffer.
    _list: PreparedPointer,
}

impl RemoteFunction {
    /// Attaches a function in this process. Its guest fills writes with the byte `guest`.
    pub(crate) fn attach(
        server: &Server,
        options: &FunctionArgument,
        guest: u8,
    ) -> Result<Self, Failure> {
        Self::attach_in(&server.state_dir(), &options.in_process(), guest)
    }

    fn attach_in(state_dir: &Path, options: &str, guest: u8) -> Result<Self, Failure> {
        let ledgers = LeaseLedgers::open(state_dir);
        let (_, host) = open::open_backend(&options.parse()?, &ledgers, &PollerPool::new())?;
        let memory = GuestMemory::new(&[(base(guest), MEMORY)])?;
        let function = NvmeFunction::new(host, MsixMasking::Function);
        for region in memory.regions() {
            map(&function, &memory, &region);
        }
        let function = Arc::new(InProcess::new(function));
        let bar: Arc<dyn Bar> = function.clone();
        let buffer = memory.alloc(PIECE)?;
        let mut controller = Controller::attach(bar, memory, Config::default(), 2)?;
        let disk = Disk::open(&mut controller, 1)?;
        let queue = controller.create_queue_pair(2, &QueueOptions::polled(64))?;
        Ok(Self {
            function,
            disk,
            queue,
            buffer,
            controller,
            guest,
            byte: guest,
        })
    }

    /// Writes the whole range.
    pub(crate) fn write(&mut self) -> Result<(), Failure> {
        let piece = vec![self.byte; PIECE];
        for slba in (0..RANGE / BLOCK).step_by(PIECE / BLOCK as usize) {
            self.disk.write(slba, &piece)?;
        }
        Ok(())
    }

    /// Submits writes to a part of the range without waiting for them.
    pub(crate) fn leave_in_flight(&mut self) -> Result<InflightCommands, Failure> {
        self.buffer.write(0, &[self.byte; PIECE]);
        let prepared = prp::buffer(&self.buffer, 0, PIECE)?;
        let mut cids = Vec::new();
        for slot in 0..IN_FLIGHT {
            let blocks = (PIECE as u64 / BLOCK) as u32;
            let write = Sqe::write(1, slot * u64::from(blocks), blocks);
            cids.push(self.queue.submit(write.with_data(prepared.pointer))?);
        }
        self.queue.ring();
        Ok(InflightCommands {
            cids,
            _list: prepared,
        })
    }

    /// Kills the server with reads in flight. The guest resets its controller at once and reuses the memory of the reads, which
    /// must not change any more. Returns the time until `CSTS.RDY` fell.
    pub(crate) fn reset_in_outage(&mut self, server: &Server) -> Result<Duration, Failure> {
        self.buffer.write(0, &[READ; PIECE]);
        let prepared = prp::buffer(&self.buffer, 0, PIECE)?;
        let blocks = (PIECE as u64 / BLOCK) as u32;
        for slot in 0..MOST_IN_FLIGHT {
            let read = Sqe::read(1, slot * u64::from(blocks), blocks);
            self.queue.submit(read.with_data(prepared.pointer))?;
        }
        self.queue.ring();
        // Lets some of the reads reach the drive.
        thread::sleep(Duration::from_millis(15));
        let pid = server.pid().to_string();
        let kill = Path::new("kill");
        let mut killing = Command::new(kill);
        let mut killing = killing
            .args(["-KILL", &pid])
            .spawn()
            .map_err(with_path(kill))?;
        let began = Instant::now();
        self.controller.disable()?;
        let took = began.elapsed();
        self.buffer.write(0, &[REUSED_BYTE; PIECE]);
        killing.wait()?;
        // Longer than the drive needs for the reads.
        thread::sleep(Duration::from_millis(600));
        let mut bytes = vec![0; PIECE];
        self.buffer.read(0, &mut bytes);
        let changed = bytes.iter().filter(|byte| **byte != REUSED_BYTE).count();
        expect(changed == 0, || {
            format!(
                "{changed} bytes of the guest's memory changed after CSTS.RDY=0, which came after {took:?}"
            )
        })?;
        Ok(took)
    }

    /// Waits for commands. Each must complete once and succeed.
    pub(crate) fn await_all(&mut self, commands: &InflightCommands) -> Result<(), Failure> {
        let completions = self.queue.drain(&commands.cids, TIMEOUT)?;
        for completion in completions {
            expect(completion.status().is_success(), || {
                format!("{completion:?}")
            })?;
        }
        match self.queue.poll() {
            None => Ok(()),
            Some(twice) => Err(format!("Completed twice: {twice:?}").into()),
        }
    }

    /// Verifies the whole range.
    pub(crate) fn check(&mut self) -> Result<(), Failure> {
        for slba in (0..RANGE / BLOCK).step_by(PIECE / BLOCK as usize) {
            let read = self.disk.read(slba, (PIECE as u64 / BLOCK) as u32)?;
            expect(read.iter().all(|byte| *byte == self.byte), || {
                format!(
                    "Other data at block {slba} of the function that writes {}",
                    self.byte
                )
            })?;
        }
        Ok(())
    }

    /// Sends commands with memory of other guests, unmapped memory, and blocks outside of the range. Each must be refused.
    fn try_trespass(&mut self) -> Result<(), Failure> {
        let others = (0..=GUESTS).filter(|guest| *guest != self.guest).map(base);
        let outside = others.chain([base(self.guest) + MEMORY, !0xFFF]);
        let ours = self.buffer.gpa();
        let memory = outside.flat_map(|gpa| {
            // Invalid first page, and invalid second page.
            let pointers = [(8, gpa, 0), (16, ours, gpa)];
            pointers.map(|(count, first, second)| {
                let pointer = DataPointer::prp(first, second);
                ((0, count, pointer), DATA_TRANSFER_ERROR)
            })
        });
        let blocks = RANGE / BLOCK;
        let beyond = [(blocks, 1), (blocks - 1, 2), (1 << 40, 1), (u64::MAX, 1)];
        let lease = beyond.map(|(slba, count)| {
            let command = (slba, count, DataPointer::prp(ours, 0));
            (command, LBA_OUT_OF_RANGE)
        });
        for ((slba, count, pointer), expected) in memory.chain(lease) {
            for sqe in [Sqe::write(1, slba, count), Sqe::read(1, slba, count)] {
                let cqe = (self.queue).submit_and_wait(sqe.with_data(pointer), TIMEOUT)?;
                expect(cqe.status().code() == expected, || {
                    format!("{cqe:?} for {count} blocks at {slba}, {pointer:?}")
                })?;
            }
        }
        Ok(())
    }

    /// Ends the function and its lease.
    pub(crate) fn end(self) -> Result<(), Failure> {
        let function = Arc::clone(&self.function);
        drop(self);
        let ended = function.function().end();
        Ok(ended.map_err(|error| error.to_string())?)
    }

    fn carry_out(&mut self, order: &str) -> Result<(), Failure> {
        match order {
            WRITE => self.write(),
            CHECK => self.check(),
            TRESPASS => self.try_trespass(),
            _ => Err(format!("There is no order {order:?}").into()),
        }
    }
}

/// Checks that the server refuses a function, and names the lease that holds the range.
pub(crate) fn expect_refused(
    server: &Server,
    options: &FunctionArgument,
    holder: &str,
) -> Result<(), Failure> {
    match RemoteFunction::attach(server, options, 0) {
        Ok(_) => Err(format!("{options:?} was given").into()),
        Err(failure) => {
            let text = integration::error_chain(&*failure);
            expect(text.contains(&format!("lease \"{holder}\"")), || text)
        }
    }
}

/// Checks that a range of a block device is filled with one byte.
pub(crate) fn check_device(device: &Path, start: u64, byte: u8) -> Result<(), Failure> {
    let file = File::open(device).map_err(with_path(device))?;
    let mut piece = vec![0; PIECE];
    for offset in (start..start + RANGE).step_by(PIECE) {
        file.read_exact_at(&mut piece, offset)
            .map_err(with_path(device))?;
        expect(piece.iter().all(|found| *found == byte), || {
            format!(
                "Other data than {byte} at byte {offset} of {}",
                device.display()
            )
        })?;
    }
    Ok(())
}

/// Orders to a process.
pub(crate) const WRITE: &str = "write";
pub(crate) const CHECK: &str = "check";
pub(crate) const TRESPASS: &str = "trespass";

/// A process with an [`RemoteFunction`]. It ends on drop.
pub(crate) struct Process {
    child: Child,
    orders: ChildStdin,
    reports: BufReader<ChildStdout>,
}

impl Process {
    /// Starts a process and attaches its function.
    pub(crate) fn start(
        server: &Server,
        options: &FunctionArgument,
        guest: u8,
    ) -> Result<Self, Failure> {
        let this = Path::new("/proc/self/exe");
        let mut child = Command::new(this)
            .arg(ARGUMENT)
            .arg(server.state_dir())
            .args([options.in_process(), guest.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(with_path(this))?;
        let (Some(orders), Some(reports)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("The process has no pipes".into());
        };
        let mut process = Self {
            child,
            orders,
            reports: BufReader::new(reports),
        };
        process.finish()?;
        Ok(process)
    }

    /// Sends an order.
    pub(crate) fn begin(&mut self, order: &str) -> Result<(), Failure> {
        Ok(writeln!(self.orders, "{order}")?)
    }

    /// Waits until the order was executed.
    pub(crate) fn finish(&mut self) -> Result<(), Failure> {
        let mut report = String::new();
        self.reports.read_line(&mut report)?;
        expect(report.trim_end() == DONE_REPORT, || report)
    }

    /// Sends an order, and waits until it was executed.
    pub(crate) fn order(&mut self, order: &str) -> Result<(), Failure> {
        self.begin(order)?;
        self.finish()
    }

    /// Ends the function, and waits for the end of the process.
    pub(crate) fn end(self) -> Result<(), Failure> {
        let Self {
            mut child, orders, ..
        } = self;
        drop(orders);
        let status = child.wait()?;
        expect(status.success(), || format!("It ended with {status}"))
    }

    /// Kills the process.
    pub(crate) fn kill(mut self) -> Result<(), Failure> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

/// Main function of the other process, with the arguments after [`ARGUMENT`].
pub(crate) fn main(arguments: &[String]) -> ExitCode {
    match serve(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            report(Err(failure));
            ExitCode::FAILURE
        }
    }
}

fn serve(arguments: &[String]) -> Result<(), Failure> {
    let [state_dir, options, guest] = arguments else {
        return Err("It takes a folder, options and a number".into());
    };
    let mut foreign_function =
        RemoteFunction::attach_in(Path::new(state_dir), options, guest.parse()?)?;
    report(Ok(()));
    for order in io::stdin().lines() {
        report(foreign_function.carry_out(&order?));
    }
    foreign_function.end()
}

fn report(result: Result<(), Failure>) {
    match result {
        Ok(()) => println!("{DONE_REPORT}"),
        Err(failure) => println!(
            "{}",
            integration::error_chain(&*failure).replace('\n', "; ")
        ),
    }
}

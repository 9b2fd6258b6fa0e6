//! Access to the guest of any VMM: its agent, which runs scripts, and the VMM's process.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use super::channel::{AgentChannel, AgentChannelError, ScriptJob, ScriptOutput};
use super::{BOOT_TIMEOUT, GuestError};
use crate::process::{self, SupervisedChild};
use crate::vmm::counters::has_host_registers;

/// Maximum number of lines in front of a kernel panic in which the report of its cause is looked for.
const FAULT_LINES: usize = 70;
/// Maximum number of lines of a kernel panic in an error.
const PANIC_LINES: usize = 25;
/// Parts of the first line of a kernel's report of a fault. On x86, the line with an exception's name ends in the number of
/// exceptions so far, such as `[#1]`.
const FAULTS: [&str; 3] = ["BUG: ", "kernel BUG at ", " [#"];

/// The agent of a guest, and the VMM's process. Dropping it kills the VMM.
#[derive(Debug)]
pub struct GuestAgent {
    name: String,
    kernel: String,
    console: PathBuf,
    vmm: SupervisedChild,
    channel: AgentChannel,
}

impl GuestAgent {
    /// Creates the agent that communicates over `stream`. The guest's kernel writes to the file `console`.
    ///
    /// # Errors
    /// The stream cannot be used.
    pub(crate) fn new(
        name: &str,
        kernel: &str,
        console: &Path,
        vmm: SupervisedChild,
        stream: UnixStream,
    ) -> Result<Self, GuestError> {
        let channel = AgentChannel::new(stream).map_err(|reason| GuestError::Silent {
            guest: name.to_owned(),
            reason,
            console: String::new(),
            log: process::file_tail(vmm.log()),
        })?;
        Ok(Self {
            name: name.to_owned(),
            kernel: kernel.to_owned(),
            console: console.to_owned(),
            vmm,
            channel,
        })
    }

    /// Makes the agent's connection send empty lines while a script is awaited, for VMMs whose serial port needs this.
    pub(crate) fn remind(mut self) -> Self {
        self.channel.remind();
        self
    }

    /// Returns the guest's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the release of the guest's kernel.
    pub fn kernel(&self) -> &str {
        &self.kernel
    }

    /// Waits until the guest accepts commands, after a start or a reboot.
    ///
    /// # Errors
    /// The guest does not come up in time.
    pub fn await_ready(&self, timeout: Duration) -> Result<(), GuestError> {
        self.channel
            .await_ready(timeout)
            .map_err(|reason| self.silent_error(reason))
    }

    /// Runs a shell script and returns its output and exit status.
    ///
    /// # Errors
    /// The script does not end in time, or the guest dies.
    pub fn run(&self, script: &str, timeout: Duration) -> Result<ScriptOutput, GuestError> {
        let job = self.start(script)?;
        self.finish(job, timeout)
    }

    /// Runs a shell script that must succeed and returns its output.
    ///
    /// # Errors
    /// The script fails or does not end in time, or the guest dies.
    pub fn check(&self, script: &str, timeout: Duration) -> Result<String, GuestError> {
        let output = self.run(script, timeout)?;
        self.expect_success(script, output)
    }

    /// Starts a shell script in the background. Several may run concurrently.
    ///
    /// # Errors
    /// The guest is dead.
    pub fn start(&self, script: &str) -> Result<ScriptJob, GuestError> {
        self.channel
            .start(script)
            .map_err(|reason| self.silent_error(reason))
    }

    /// Waits for a background script.
    ///
    /// # Errors
    /// The script does not end in time, or the guest dies.
    pub fn finish(&self, job: ScriptJob, timeout: Duration) -> Result<ScriptOutput, GuestError> {
        self.channel
            .wait(job, timeout, || has_host_registers(self.pid()))
            .map_err(|reason| self.silent_error(reason))
    }

    /// Waits for a background script that must succeed.
    ///
    /// # Errors
    /// The script fails or does not end in time, or the guest dies.
    pub fn finish_successfully(
        &self,
        job: ScriptJob,
        timeout: Duration,
    ) -> Result<String, GuestError> {
        let script = job.script().to_owned();
        let output = self.finish(job, timeout)?;
        self.expect_success(&script, output)
    }

    /// Returns the next line that a script has reported with `event`.
    ///
    /// # Errors
    /// No line comes in time, or the guest dies.
    pub fn next_event(&self, timeout: Duration) -> Result<String, GuestError> {
        self.channel
            .next_event(timeout)
            .map_err(|reason| self.silent_error(reason))
    }

    /// Returns all events that [`Self::next_event`] has not returned yet.
    pub fn pending_events(&self) -> Vec<String> {
        self.channel.pending_events()
    }

    /// Loads the kernel modules of the guest's user land, in their order.
    ///
    /// # Errors
    /// The kernel refuses a module.
    pub fn load_modules(&self) -> Result<(), GuestError> {
        let script = "for module in /lib/modules/*.ko; do insmod $module || exit 1; done";
        self.check(script, BOOT_TIMEOUT)?;
        Ok(())
    }

    /// Continues on another stream. Scripts that were started before can no longer be awaited.
    ///
    /// # Errors
    /// The stream cannot be used.
    pub(crate) fn reconnect(&mut self, stream: UnixStream) -> Result<(), GuestError> {
        let mut channel = AgentChannel::new(stream).map_err(|reason| self.silent_error(reason))?;
        if self.channel.reminds() {
            channel.remind();
        }
        self.channel = channel;
        Ok(())
    }

    /// Returns whether the VMM has ended.
    ///
    /// # Errors
    /// The VMM's status cannot be read.
    pub(crate) fn has_ended(&mut self) -> Result<bool, GuestError> {
        Ok(self.vmm.try_wait()?.is_some())
    }

    /// Starts a script that ends the VMM, and waits for the VMM.
    ///
    /// # Errors
    /// The VMM does not end in time.
    pub fn end(&mut self, script: &str, timeout: Duration) -> Result<ExitStatus, GuestError> {
        // The script ends the VMM, so its own end cannot be observed.
        let _job = self.start(script)?;
        self.await_end(timeout)
    }

    /// Waits for the VMM's end.
    ///
    /// # Errors
    /// The VMM does not end in time.
    pub(crate) fn await_end(&mut self, timeout: Duration) -> Result<ExitStatus, GuestError> {
        Ok(self.vmm.wait(timeout)?)
    }

    /// Kills the VMM. For the guest, this is a power failure; for the device, its client vanishes.
    pub fn kill(&mut self) {
        self.vmm.kill();
    }

    /// Returns the end of the guest's console. After a panic, returns the kernel's report from the fault on that caused it.
    pub fn console_tail(&self) -> String {
        let text = fs::read(&self.console).unwrap_or_default();
        end_of_console(&String::from_utf8_lossy(&text))
    }

    /// Returns the end of the VMM's output.
    pub fn vmm_log_tail(&self) -> String {
        process::file_tail(self.vmm.log())
    }

    /// Returns the VMM's process id.
    pub fn pid(&self) -> u32 {
        self.vmm.pid()
    }

    fn expect_success(&self, script: &str, output: ScriptOutput) -> Result<String, GuestError> {
        if output.status == 0 {
            return Ok(output.text);
        }
        Err(GuestError::Command {
            guest: self.name.clone(),
            script: script.to_owned(),
            status: output.status,
            text: process::tail(&output.text),
        })
    }

    fn silent_error(&self, reason: AgentChannelError) -> GuestError {
        GuestError::Silent {
            guest: self.name.clone(),
            reason,
            console: self.console_tail(),
            log: self.vmm_log_tail() + "\n" + &process::describe_children(),
        }
    }
}

/// Returns the end of a console. If the kernel panicked, returns the first lines of the panic, and all lines in front of it from
/// the fault on that caused it.
fn end_of_console(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let Some(panic) = lines.iter().rposition(|it| it.contains("Kernel panic")) else {
        return process::tail(text);
    };
    let is_fault = |line: &str| FAULTS.iter().any(|fault| line.contains(fault));
    let fault = (panic.saturating_sub(FAULT_LINES)..panic).find(|number| is_fault(lines[*number]));
    let end = lines.len().min(panic + PANIC_LINES);
    lines[fault.unwrap_or(panic)..end].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_of_a_fault_is_shown_from_its_first_line() {
        let of_page =
            "BUG: unable to handle page fault for address: ffff88\nOops: 0002 [#1] PREEMPT SMP\n";
        let of_opcode = "invalid opcode: 0000 [#1] PREEMPT SMP\n";
        for fault in [of_page, of_opcode] {
            let report = format!(
                "{fault}RIP: 0010:nvme_irq+0x1/0x2\nKernel panic - not syncing: Fatal exception"
            );
            // An earlier report, which did not end the kernel, is not the cause.
            let between = "nvme nvme0: pci function\n".repeat(FAULT_LINES);
            let earlier = "BUG: soft lockup - CPU#0 stuck for 26s!\n";
            let end = end_of_console(&format!("{earlier}{between}{report}\n"));
            assert_eq!(end, report);
        }
    }

    #[test]
    fn panic_without_a_fault_is_shown_from_its_first_line() {
        let report = "Kernel panic - not syncing: No working init found.\nCPU: 0";
        assert_eq!(end_of_console(&format!("a\n{report}\n")), report);
        assert_eq!(end_of_console("a\nb\n"), "a\nb");
    }
}

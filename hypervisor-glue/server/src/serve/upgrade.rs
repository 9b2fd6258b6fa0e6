//! `nvme-mpt upgrade`: replaces the server process. VMs notice only a pause.

use std::env;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nvme_mpt::Drive;
use nvme_mpt_memory::deadline::{Deadline, SystemClock};
use nvme_mpt_vmm::report;

use super::open_drives::can_outlive_process;
use super::registry::FunctionRegistry;
use crate::confinement::{FileAccess, FileRule, LandlockRefusal};
use crate::function_thread::FunctionHandle;
use crate::persistence::predecessor::{SuccessorProcess, UpgradeError, lease_protocol_variable};
use crate::persistence::{FIRST_STAGE, ServerPersistence};

/// Maximum time for in-flight commands to end when an upgrade checks whether the drives answer.
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);

/// Suffix that the kernel appends to the path of a deleted executable.
const DELETED_SUFFIX: &[u8] = b" (deleted)";

impl FunctionRegistry {
    /// Hands all functions over to a new process and returns its process id. After a success, the caller must end this process
    /// at once.
    pub(super) fn upgrade(&self, binary: Option<&Path>) -> Result<u32, UpgradeError> {
        let persistence = self
            .context
            .persistence
            .as_ref()
            .ok_or(UpgradeError::NoSupervisor)?;
        let program = match binary {
            Some(binary) => binary.to_owned(),
            None => current_program()?,
        };
        let mut command: Vec<OsString> = vec![program.clone().into()];
        command.extend(env::args_os().skip(1));
        let ends = || self.context.stop.load(Ordering::Relaxed);
        // A drive with stuck commands is refused, because the next server could not even open its file.
        self.check_drives()?;
        // A moved drive is refused, because the next server would open another file than its VMs use.
        let deadline = Deadline::after(&SystemClock::shared(), CHECK_TIMEOUT);
        if let Some(moved) = self.drives.find_moved(&deadline) {
            return Err(UpgradeError::Moved(moved.to_string()));
        }
        // The supervisor must answer before the upgrade: otherwise, it could not restart the next server after a crash.
        persistence.await_supervisor()?;
        let mut successor = SuccessorProcess::start(
            persistence,
            &[FIRST_STAGE.into()],
            &command,
            &[
                self.context.confinement.env_variable(),
                lease_protocol_variable(self.context.leases.has_leases()),
            ],
        )?;
        if let Err(error) = successor.await_ready(ends) {
            return Err(self.explain_upgrade(error, &program));
        }
        let number = successor.pid();
        let goes_on_beside = successor.can_run_beside() && self.can_restore_beside();
        let functions = self.functions.iter();
        let handles: Vec<_> = functions.map(|function| function.thread.handle()).collect();
        // Checked before functions pause: a lease that is ending would delay the end of this process, and all functions would
        // stay paused until then.
        if !goes_on_beside || self.context.leases.has_leases() {
            let ending = self.context.ledgers.find_ending();
            if let Some(id) = ending.map_err(UpgradeError::Ledger)? {
                return Err(UpgradeError::Lease(id));
            }
        }
        self.check_leases()?;
        let (quiesced, paused_at) =
            FunctionHandle::quiesce_all(&handles).map_err(|(place, reason)| {
                let function = &self.functions[place];
                UpgradeError::Function {
                    id: function.entry.id.clone(),
                    drive: function.declaration.options.function.path.to_string(),
                    reason,
                }
            })?;
        let drives = QuiescedDrives::quiesce(persistence, self.drives.controllers());
        if ends() {
            return Err(UpgradeError::Ending);
        }
        persistence.spares().set_handed_over(true);
        if let Err(error) = successor.hand_over(persistence, paused_at) {
            persistence.spares().set_handed_over(false);
            return Err(error);
        }
        // Functions and drives stay paused until the process has ended.
        std::mem::forget((quiesced, drives));
        for function in &self.functions {
            function.release_lease();
        }
        // No VMM gets a new lease from now on. Functions in VMMs continue until this process ends.
        let have_vmms_none = self.context.leases.stop_attaching();
        // A removed function with in-flight commands still has its lease, so the ledger cannot be released.
        let are_all_let_go = self.context.ledgers.release_private_ledger();
        let goes_on_beside = goes_on_beside && have_vmms_none && are_all_let_go;
        if goes_on_beside && let Err(error) = successor.announce_release() {
            let error = report::chain(&error);
            log::warn!("Process {number} does not serve all functions yet, or has ended: {error}");
        }
        // This process waits until the supervisor has processed its messages: a service manager may reject messages of a
        // process that has already ended.
        if let Err(error) = persistence.await_supervisor() {
            let error = report::chain(&error);
            log::warn!(
                "The supervisor may not know that process {number} is the server now: {error}"
            );
        }
        Ok(number)
    }

    /// Refuses the upgrade if a drive does not answer. To check this, pauses each function, and then each lease of a VMM, until
    /// its in-flight commands have ended.
    fn check_drives(&self) -> Result<(), UpgradeError> {
        let deadline = Deadline::after(&SystemClock::shared(), CHECK_TIMEOUT);
        let mut functions = self.functions.iter();
        match functions.find(|function| !function.can_quiesce(deadline.remaining())) {
            None => self.check_leases(),
            Some(function) => Err(UpgradeError::Function {
                id: function.entry.id.clone(),
                drive: function.declaration.options.function.path.to_string(),
                reason: format!("it has had commands in flight for over {CHECK_TIMEOUT:?}"),
            }),
        }
    }

    /// Refuses the upgrade if the drive of a VMM's lease does not answer.
    fn check_leases(&self) -> Result<(), UpgradeError> {
        match self.context.leases.find_busy(CHECK_TIMEOUT) {
            None => Ok(()),
            Some(id) => Err(UpgradeError::Lease(id)),
        }
    }

    /// Returns whether the successor can restore all functions while this process still runs with its functions paused.
    /// Otherwise, the successor must wait until this process has ended.
    fn can_restore_beside(&self) -> bool {
        let mut functions = self.functions.iter();
        let mut drives = self.drives.controllers().into_iter();
        functions.all(|function| can_outlive_process(&function.declaration.options.function))
            && drives.all(|drive| drive.controller().can_open_concurrently())
    }

    /// If Landlock denied executing the successor's program, adds this cause to `error`.
    fn explain_upgrade(&self, error: UpgradeError, program: &Path) -> UpgradeError {
        let executed = FileRule::new(program, FileAccess::EXECUTE);
        match self.context.confinement.find_refused([executed]) {
            Some(rule) if matches!(error, UpgradeError::Ended(_)) => {
                LandlockRefusal::new(rule, Box::new(error)).into()
            }
            _ => error,
        }
    }
}

/// Drives that are paused for the next server. Dropping this resumes the drives.
struct QuiescedDrives<'a> {
    persistence: &'a ServerPersistence,
    drives: Vec<Arc<Drive>>,
}

impl<'a> QuiescedDrives<'a> {
    /// Pauses all drives that can be handed over. The next process resets the drives that cannot.
    fn quiesce(persistence: &'a ServerPersistence, drives: Vec<Arc<Drive>>) -> Self {
        let mut quiesced = Self {
            persistence,
            drives: Vec::new(),
        };
        for drive in drives {
            let path = drive.path();
            let stored = match drive.controller().hand_over() {
                Ok(None) => continue,
                Ok(Some(handed)) => persistence.hand_over_drive(path, &handed),
                Err(error) => {
                    log::warn!(
                        "Cannot hand drive {path} over, so the next server resets it: {error}"
                    );
                    continue;
                }
            };
            if let Err(error) = stored {
                let error = report::chain(&error);
                log::warn!("Cannot hand drive {path} over, so the next server resets it: {error}");
            }
            quiesced.drives.push(drive);
        }
        quiesced
    }
}

impl Drop for QuiescedDrives<'_> {
    fn drop(&mut self) {
        for drive in &self.drives {
            drive.controller().cancel_hand_over();
            self.persistence.reclaim_drive(drive.path());
        }
    }
}

/// Returns the path of this program, even if the file at this path was replaced or deleted since the start.
fn current_program() -> Result<PathBuf, UpgradeError> {
    let program = env::current_exe()?.into_os_string();
    let path = program.as_bytes();
    let path = path.strip_suffix(DELETED_SUFFIX).unwrap_or(path).to_owned();
    Ok(OsString::from_vec(path).into())
}

//! Function registry: all functions of a server, and the operations that change them.
//!
//! One thread at a time owns the registry: the main thread while the server starts and ends, and the change thread in between.
//! Other threads read a [`RegistrySnapshot`], which is replaced after each change.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nvme_guest::iova::MappingOwner;
use nvme_lease::range::ByteSize;
use nvme_lease::{LeaseClaim, LeaseError, LeaseExtents};
use nvme_mpt::local_backend::GrowError;
use nvme_mpt::{Drive, PollerPool};
use nvme_mpt_memory::clock;
use nvme_mpt_vmm::drives::DrivePath;
use nvme_mpt_vmm::open::{self, OpenError};
use nvme_mpt_vmm::options::{
    FunctionOptions, LeaseReservation, OptionError, OptionText, RateChange, ServerFunctionOptions,
};
use nvme_mpt_vmm::report;

use super::configuration_differences::RunningConfiguration;
use super::context::ServerContext;
use super::declarations::{
    DeclarationRecord, DriveDeclaration, FunctionDeclaration, ParsedDeclaration,
    StartConfiguration, UnreadableDeclaration, option_files,
};
use super::declarations::{resolve_function, resolve_path};
use super::error::{ChangeError, FunctionRegistrationError};
use super::lease_server::LeaseTable;
use super::open_drives::{FunctionDriveError, OpenDrives};
use super::registered_function::RegisteredFunction;
use super::registry_snapshot::RegistrySnapshot;
use super::required_files::{drive_rules, function_rules, option_file_rule};
use super::stored_configuration;
use crate::change::{DeclarationSource, FunctionEntry, FunctionStatus, ReservedLease};
use crate::confinement::FileRule;
use crate::function_thread::{FunctionThreadError, ShutdownAnswer};
use crate::owner::resolve_user;
use crate::persistence::ServerPersistence;
use crate::persistence::persisted_function::RestoreOrder;

/// Timeout for opening a drive or leasing a range that the predecessor's process has until the kernel has ended it.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 180 } else { 20 });

/// Maximum time to wait until pollers have polled the restored queues. The predecessor is asked to end only afterwards.
const FIRST_PASS_TIMEOUT: Duration = Duration::from_millis(100);

/// Time after the start during which the mappings of the predecessor's functions in VMMs stay, so that they find their memory
/// mapped when they reconnect. Such functions look for a server at least once a second.
const RECONNECT_TIME: Duration = Duration::from_secs(5);

/// Maximum amount of guest memory whose pinning delays other functions only briefly. Functions with more memory to pin are
/// restored last.
const BRIEF_PINNING_MAX: u64 = 1 << 30;

/// Interval between attempts to get a resource that the predecessor or the kernel still holds.
const RELEASE_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A function that could not be served. The server lists it as failed, and serves its other functions.
#[derive(Debug)]
pub(super) struct FailedFunctionRecord {
    declared: DeclarationRecord,
    /// The parsed options; `None` if this release cannot parse them.
    options: Option<ServerFunctionOptions>,
    entry: FunctionEntry,
}

impl FailedFunctionRecord {
    fn from_declaration(declaration: &FunctionDeclaration, reason: String) -> Self {
        let ParsedDeclaration { declared, options } = declaration.clone();
        Self {
            entry: failed_entry(&declared, Some(&options), reason),
            declared,
            options: Some(options),
        }
    }

    fn from_unreadable(unreadable: UnreadableDeclaration) -> Self {
        let UnreadableDeclaration { declared, error } = unreadable;
        Self {
            entry: failed_entry(&declared, None, report::chain(&error)),
            declared,
            options: None,
        }
    }

    /// Returns whether a VM waits for the function: the predecessor served it.
    fn has_waiting_vm(&self, persistence: Option<&ServerPersistence>) -> bool {
        persistence.is_some_and(|persistence| persistence.has_function(&self.entry.socket))
    }

    /// Returns the declaration; `None` if this release cannot parse it.
    fn declaration(&self) -> Option<FunctionDeclaration> {
        Some(ParsedDeclaration {
            declared: self.declared.clone(),
            options: self.options.clone()?,
        })
    }
}

/// Returns the list entry of a function that could not be served.
fn failed_entry(
    declared: &DeclarationRecord,
    options: Option<&ServerFunctionOptions>,
    reason: String,
) -> FunctionEntry {
    let text = &declared.text;
    let mut socket: PathBuf = text.get("socket").unwrap_or_default().into();
    let mut drive = text.get("path").unwrap_or_default().to_owned();
    if let Some(options) = options {
        socket.clone_from(&options.socket);
        drive = options.function.path.to_string();
    }
    let id = text.get("id").map(str::to_owned);
    FunctionEntry {
        id: id.unwrap_or_else(|| socket.to_string_lossy().into_owned()),
        socket,
        drive,
        range: None,
        extents: None,
        origin: declared.source,
        limits: String::new(),
        summary: format!("not offered: {reason}"),
        pending: None,
        state: FunctionStatus::Failed { reason },
    }
}

/// Returns the declaration of a function that `nvme-mpt add` added in an earlier run, and whose options this release cannot
/// parse.
fn unreadable_added(text: OptionText, error: OptionError) -> UnreadableDeclaration {
    UnreadableDeclaration {
        declared: DeclarationRecord::new(DeclarationSource::Added, text),
        error,
    }
}

/// A drive that is kept open even without functions.
#[derive(Debug)]
pub(super) struct DeclaredDrive {
    pub(super) declaration: DriveDeclaration,
    pub(super) drive: Arc<Drive>,
}

/// A drive that the predecessor kept open, and that this server cannot open yet. VMs may wait for leases on it.
#[derive(Debug)]
pub(super) struct MissingDrive {
    declaration: DriveDeclaration,
    /// The error of the last attempt to open the drive.
    reason: String,
}

/// The declared drives of one source, which a reload releases and [`FunctionRegistry::return_declared`] gives back.
#[derive(Debug)]
pub(super) struct ReleasedDrives {
    held: Vec<DeclaredDrive>,
    missing: Vec<MissingDrive>,
}

/// All functions of a server, and the drives that it has open. Dropping the registry ends the functions.
#[derive(Debug)]
pub(super) struct FunctionRegistry {
    pub(super) context: ServerContext,
    pub(super) functions: Vec<RegisteredFunction>,
    failed: Vec<FailedFunctionRecord>,
    pub(super) held_drives: Vec<DeclaredDrive>,
    missing_drives: Vec<MissingDrive>,
    pub(super) drives: OpenDrives,
    snapshot: Arc<Mutex<Arc<RegistrySnapshot>>>,
}

impl FunctionRegistry {
    pub(super) fn new(context: ServerContext) -> Self {
        Self {
            context,
            functions: Vec::new(),
            failed: Vec::new(),
            held_drives: Vec::new(),
            missing_drives: Vec::new(),
            drives: OpenDrives::default(),
            snapshot: Arc::default(),
        }
    }

    /// Serves the initial functions. If the predecessor stored functions, serves only these. Otherwise, serves the functions
    /// of the command line and the file, and those added in an earlier run.
    ///
    /// # Errors
    /// A function of the command line or of the file cannot be served. A function that was added in an earlier run is
    /// listed as failed instead. If this server restores another server's functions, each function that cannot be served is
    /// listed as failed.
    pub(super) fn start(&mut self, configuration: StartConfiguration) -> Result<(), ChangeError> {
        let StartConfiguration {
            functions,
            drives,
            added_texts: earlier,
            unreadable,
            rules: _,
            is_restored: was_served,
        } = configuration;
        let persistence = self.context.persistence.as_ref();
        let continues = was_served
            || persistence
                .is_some_and(|server_persistence| server_persistence.has_restorable_functions());
        if continues {
            // VMs wait for these functions. So a function or drive that fails is only logged and listed, and the start
            // continues.
            for declaration in drives {
                if let Err(error) = self.open_held(vec![declaration.clone()]) {
                    let reason = report::chain(&error);
                    log::error!("{reason}. The server retries until it succeeds");
                    self.missing_drives.push(MissingDrive {
                        declaration,
                        reason,
                    });
                }
            }
            let mut functions = functions;
            for text in earlier {
                match FunctionDeclaration::parse(DeclarationSource::Added, text.clone()) {
                    Ok(declaration) => functions.push(declaration),
                    Err(error) => {
                        self.record_unreadable(unreadable_added(text, error));
                    }
                }
            }
            for function in unreadable {
                self.record_unreadable(function);
            }
            self.serve_each(functions);
        } else {
            self.open_held(drives)?;
            self.serve_all_beside(&functions)?;
            for text in earlier {
                self.serve_added(text);
            }
            self.close_unused();
        }
        if let Some(persistence) = &self.context.persistence {
            if continues {
                // Guests have had no completions since the predecessor paused, so this waits for the pollers before anything
                // else.
                self.context.pollers.await_passes(FIRST_PASS_TIMEOUT);
            }
            persistence.dismiss_predecessor();
        }
        self.forget_unlisted();
        let controllers = self.drives.controllers();
        for drive in &controllers {
            drive
                .controller()
                .expire_predecessor_mappings(RECONNECT_TIME);
        }
        if let Some(persistence) = &self.context.persistence {
            persistence.forget_other_drives(&controllers);
            // Spare descriptors of a drive that cannot be opened now stay, since VMs may wait for leases on the drive.
            if !self.has_waiting_vms() {
                persistence.spares().forget_other_drives(&controllers);
            }
        }
        self.publish();
        Ok(())
    }

    /// Returns an error if a function of the predecessor cannot be read yet: a change might take its place.
    pub(super) fn check_all_read(&self) -> Result<(), ChangeError> {
        let persistence = self.context.persistence.as_ref();
        match persistence.and_then(|persistence| persistence.unread_reason()) {
            Some(reason) => Err(ChangeError::Unread { reason }),
            None => Ok(()),
        }
    }

    /// Returns an error if the server is ending.
    pub(super) fn check_running(&self) -> Result<(), ChangeError> {
        match self.context.stop.load(Ordering::Relaxed) {
            true => Err(ChangeError::Ending),
            false => Ok(()),
        }
    }

    /// Adds a function, which is also served after a restart of the server.
    pub(super) fn add(&mut self, text: OptionText) -> Result<FunctionEntry, ChangeError> {
        // `data=` is not stored: it is meant for the data that is in the range now. At a later start, another owner may have
        // had the range in between.
        let again = text.clone().with_value("data", None);
        let described = || {
            option_files(&again)
                .iter()
                .map(|path| option_file_rule(path))
                .collect()
        };
        let declaration = FunctionDeclaration::parse(DeclarationSource::Added, text);
        let explained = |error| match self.context.confinement.explain(error, described) {
            Ok(error) => ChangeError::from(error),
            Err(refusal) => refusal.into(),
        };
        let declaration = declaration.map_err(explained)?;
        declaration.options.function.check_rates()?;
        let place = self.functions.len();
        if let Err(error) = self.serve_all(vec![declaration]) {
            self.close_unused();
            return Err(error);
        }
        self.functions[place].declaration.declared.text = again;
        if let Err(error) = self.store_added() {
            self.functions.remove(place).end();
            self.close_unused();
            return Err(error);
        }
        self.publish();
        Ok(self.functions[place].current_entry())
    }

    /// Removes a function. Returns its entry with the state that it had, and the error if it did not end cleanly.
    pub(super) fn remove(
        &mut self,
        id: &str,
        force: bool,
    ) -> Result<(FunctionEntry, Option<String>), ChangeError> {
        let mut failed = self.failed.iter();
        if let Some(place) = failed.position(|failed| has_id(&failed.entry, id)) {
            let failed = self.failed.remove(place);
            if let Err(error) = self.store_added() {
                self.failed.insert(place, failed);
                return Err(error);
            }
            self.forget_unlisted();
            self.close_unused();
            self.publish();
            return Ok((failed.entry, None));
        }
        if self.context.leases.has_lease(id) {
            if !force {
                return Err(ChangeError::Connected(id.to_owned()));
            }
            let ended = self.context.leases.end_lease(id);
            // There is no lease any more if the VMM has disconnected since the check above.
            let entry = ended.ok_or_else(|| self.unknown_function_error(id))?;
            return Ok((entry, None));
        }
        let place = self.find_function(id)?;
        let RegisteredFunction {
            declaration, entry, ..
        } = &self.functions[place];
        if let (DeclarationSource::File, Some(file)) =
            (declaration.declared.source, &self.context.file)
        {
            return Err(ChangeError::Declared {
                id: entry.id.clone(),
                file: file.clone(),
            });
        }
        let is_added = declaration.declared.source == DeclarationSource::Added;
        if !force {
            self.check_unused(&[place])?;
        }
        let entry = self.functions[place].current_entry();
        // The removal is stored before the function ends: a removed function must not return after a restart.
        if is_added {
            self.store_added_except(place)?;
        }
        if let Err(error) = self.request_shutdown(place, force) {
            // The function does not end, since a VMM has connected since the check. So it is stored again.
            if is_added && let Err(error) = self.store_added() {
                log::error!("{}", report::chain(&error));
            }
            return Err(error);
        }
        let function = self.functions.remove(place);
        self.store_configuration();
        let failure = function.end();
        self.close_unused();
        self.publish();
        Ok((entry, failure))
    }

    /// Reserves a lease for a user's VMMs.
    pub(super) fn reserve(
        &mut self,
        reservation: LeaseReservation,
    ) -> Result<ReservedLease, ChangeError> {
        let LeaseReservation {
            owner,
            mut function,
            limits,
        } = reservation;
        function.path = resolve_path(&function.path);
        let path = function.path.clone();
        let reserved = self.reserve_for(&owner, &function, limits.as_ref());
        let reserved =
            reserved.map_err(|error| self.explain_error(error, || drive_rules(&function)));
        self.close_unused();
        reserved.map_err(|source| ChangeError::Reserve { path, source })
    }

    fn reserve_for(
        &mut self,
        owner: &str,
        function: &FunctionOptions,
        limits: Option<&OptionText>,
    ) -> Result<ReservedLease, FunctionRegistrationError> {
        let owner = resolve_user(owner)?;
        let drive = self.open_drive(function, std::iter::once(function))?;
        let ServerContext { ledgers, stop, .. } = &self.context;
        let ledgers = ledgers.with_claim(LeaseClaim::ForUser(owner));
        let limits = limits.map(ToString::to_string);
        let (id, extents) = open::reserve(function, limits, &drive, &ledgers, stop)?;
        Ok(ReservedLease {
            id,
            owner,
            drive: function.path.to_string(),
            extents,
        })
    }

    /// Changes the limits of a function. For a function that `nvme-mpt add` added, the limits stay after a restart of the
    /// server. For a function in a VMM, the limits also apply to later leases of the id.
    pub(super) fn set_limits(
        &mut self,
        id: &str,
        limits: &str,
    ) -> Result<FunctionEntry, ChangeError> {
        let change: RateChange = limits.parse()?;
        let given: OptionText = limits.parse()?;
        if let Some(limited) = self.context.leases.set_limits(id, &given) {
            let limited = limited.map_err(|source| ChangeError::Limits {
                id: id.to_owned(),
                source: Box::new(source),
            })?;
            return limited.ok_or_else(|| ChangeError::LimitedWithoutVmm(id.to_owned()));
        }
        let place = self.find_function(id)?;
        let before = self.functions[place].declaration.clone();
        change.check(&before.options.function.path)?;
        let declaration = &mut self.functions[place].declaration;
        let rates = change.apply_to(declaration.options.function.backend.rates);
        declaration.options.function.backend.rates = rates;
        let text = declaration.declared.text.clone();
        declaration.declared.text = given.pairs().fold(text, |text, (key, value)| {
            text.with_value(key, (value != RateChange::NONE).then_some(value))
        });
        if before.declared.source == DeclarationSource::Added
            && let Err(error) = self.store_added()
        {
            self.functions[place].declaration = before;
            return Err(error);
        }
        self.functions[place].set_rates(rates);
        self.publish();
        Ok(self.functions[place].current_entry())
    }

    /// Resizes a function's lease. For a function that `nvme-mpt add` added, the size stays after a restart of the server.
    pub(super) fn resize(
        &mut self,
        id: &str,
        size: ByteSize,
        truncate: bool,
    ) -> Result<FunctionEntry, ChangeError> {
        let grow = |source: GrowError| ChangeError::Grow {
            id: id.to_owned(),
            source: Box::new(source),
        };
        if self.context.leases.has_lease(id) {
            let grown = self.context.leases.grow(id, size, &self.context.stop);
            // There is no lease any more if the VMM has disconnected since the check above.
            return match grown.ok_or_else(|| self.unknown_function_error(id))? {
                Err(GrowError::Lease(LeaseError::HasMore { .. })) if truncate => {
                    Err(ChangeError::Shrinks(id.to_owned()))
                }
                grown => grown
                    .map_err(grow)?
                    .ok_or_else(|| ChangeError::GrownWithoutVmm(id.to_owned())),
            };
        }
        let place = self.find_function(id)?;
        let RegisteredFunction {
            declaration, entry, ..
        } = &self.functions[place];
        let present = entry.extents.as_ref().map_or(0, LeaseExtents::length);
        let declaration_source = declaration.declared.source;
        match (declaration_source, &self.context.file) {
            _ if truncate && size.0 < present => self.truncate(place, size)?,
            (DeclarationSource::File, Some(file)) => {
                return Err(ChangeError::SizeInFile {
                    id: entry.id.clone(),
                    file: file.clone(),
                });
            }
            _ => {
                self.grow(place, size)?;
                if declaration_source == DeclarationSource::Added {
                    // If storing fails, the ledger has the new size nevertheless.
                    self.store_added()?;
                }
            }
        }
        Ok(self.functions[place].current_entry())
    }

    /// Grows the lease of the function at index `place`. A lease that already has this size or more stays unchanged.
    pub(super) fn grow(&mut self, place: usize, size: ByteSize) -> Result<(), ChangeError> {
        let grown = self.functions[place].grow(size, &self.context.stop);
        self.publish();
        grown.map_err(|source| ChangeError::Grow {
            id: self.functions[place].entry.id.clone(),
            source: Box::new(source),
        })
    }

    /// Shrinks the lease of a function without a VMM, and serves the function again.
    ///
    /// The file of added functions gets the smaller size before the lease shrinks. After a crash between the two steps, the
    /// lease is larger than the file says, which is harmless. In the opposite order, the file would say a larger size than
    /// the lease has. The next process would then need free space, which another lease may have taken.
    fn truncate(&mut self, place: usize, size: ByteSize) -> Result<(), ChangeError> {
        let RegisteredFunction {
            declaration, entry, ..
        } = &self.functions[place];
        let id = entry.id.clone();
        let failed = |source: OpenError| ChangeError::Truncate {
            id: id.clone(),
            source: Box::new(source),
        };
        if declaration.options.function.size.is_none() {
            return Err(failed(OpenError::NoSize));
        }
        self.request_shutdown(place, false)
            .map_err(|error| match error {
                ChangeError::Connected(id) => ChangeError::Shrinks(id),
                other => other,
            })?;
        let function = self.functions.remove(place);
        let (mut declaration, drive) = (function.declaration.clone(), function.drive.clone());
        if let Some(failure) = function.end() {
            log::error!("{failure}");
        }
        let added = declaration.declared.source == DeclarationSource::Added;
        let mut smaller = declaration.clone();
        smaller.set_size(size);
        let options = &declaration.options.function;
        let lease = open::lease_to_truncate(options, &drive, &self.context.ledgers, size);
        let truncated = lease.map_err(&failed).and_then(|lease| {
            if added {
                self.store_added_with(Some(&smaller.declared.text))?;
            }
            let truncated = lease.truncate(size.0).and_then(|_| lease.release());
            truncated.map_err(|source| failed(drive.lease_error(source).into()))
        });
        if truncated.is_ok() {
            declaration = smaller;
        }
        let text = declaration.declared.text.clone();
        let again = self.serve_all(vec![declaration]);
        match (&again, text) {
            (Ok(()), _) => self.functions[place..].rotate_right(1),
            // A function that `nvme-mpt add` added is listed as failed. It is served again after a restart.
            (Err(_), text) if added => self.serve_added(text),
            (Err(_), _) => {}
        }
        drop(drive);
        self.close_unused();
        self.publish();
        // If the lease was not truncated, this restores the old size in the file.
        let stored = match added {
            true => self.store_added(),
            false => Ok(()),
        };
        truncated?;
        again?;
        stored
    }

    /// Asks all functions to end. [`Self::end`] waits for them.
    pub(super) fn stop_functions(&self) {
        for function in &self.functions {
            function.thread.stop();
        }
    }

    /// Ends all functions concurrently. Returns the socket and the error of the first function that did not end cleanly.
    pub(super) fn end(self) -> Result<(), (PathBuf, FunctionThreadError)> {
        self.stop_functions();
        let Self {
            functions,
            held_drives: held,
            drives,
            snapshot,
            ..
        } = self;
        // Drops the registry's references to the drives, so that each drive closes with its last function.
        drop((held, drives, snapshot));
        let mut result = Ok(());
        for RegisteredFunction { entry, thread, .. } in functions {
            let ended = thread.end().map_err(|error| (entry.socket, error));
            result = result.and(ended);
        }
        result
    }

    pub(super) fn pollers(&self) -> Arc<PollerPool> {
        self.context.pollers.clone()
    }

    pub(super) fn leases(&self) -> Arc<LeaseTable> {
        self.context.leases.clone()
    }

    /// Returns the snapshot of the current functions that is shared with other threads.
    pub(super) fn snapshot(&self) -> Arc<Mutex<Arc<RegistrySnapshot>>> {
        self.snapshot.clone()
    }

    /// Returns the served functions.
    pub(super) fn entries(&self) -> impl Iterator<Item = &FunctionEntry> {
        self.functions.iter().map(|function| &function.entry)
    }

    /// Returns a one-line description of each drive with a fixed number of queue pairs.
    pub(super) fn drive_summaries(&self) -> Vec<String> {
        let drives = self.drives.controllers();
        let summaries = drives.iter().filter_map(|drive| self.summary_of(drive));
        summaries.collect()
    }

    fn summary_of(&self, drive: &Drive) -> Option<String> {
        let pairs = drive.controller().queue_pairs()?;
        let users = self.functions.iter();
        let users = users.filter(|function| function.drive.path() == drive.path());
        let wanted: u32 = users.map(|function| u32::from(function.queues)).sum();
        let mut summary = format!(
            "{}: {}, {} I/O queue pair{}",
            drive.path(),
            drive.controller().model(),
            pairs.total,
            if pairs.total == 1 { "" } else { "s" },
        );
        if wanted > pairs.total.into() {
            summary += &format!(
                "; its functions may use {wanted}, so queues share them if guests create more than there are"
            );
        }
        Some(summary)
    }

    /// Returns a function with resolved paths and the server's defaults.
    pub(super) fn resolve_declaration(
        &self,
        declaration: FunctionDeclaration,
    ) -> FunctionDeclaration {
        resolve_function(declaration, self.context.data)
    }

    /// Serves all functions. If one of them fails, ends the others again. Functions that were restored from the predecessor
    /// continue even after a failure, so that their VMs keep their drives.
    ///
    /// Drives that were opened for a failed attempt stay open until [`Self::close_unused`] is called, since the caller may
    /// serve their functions again.
    pub(super) fn serve_all(
        &mut self,
        functions: Vec<FunctionDeclaration>,
    ) -> Result<(), ChangeError> {
        let functions: Vec<FunctionDeclaration> = functions
            .into_iter()
            .map(|declaration| self.resolve_declaration(declaration))
            .collect();
        let before = self.functions.len();
        for declaration in &functions {
            if let Err(source) = self.serve(declaration, &functions) {
                for function in self.functions.split_off(before) {
                    if function.is_restored {
                        self.functions.push(function);
                    } else {
                        function.end();
                    }
                }
                return Err(function_error(declaration, source));
            }
        }
        Ok(())
    }

    /// Serves functions like [`Self::serve_all`]. If the predecessor still holds a function's lease, tells the predecessor
    /// to end and waits for it.
    fn serve_all_beside(&mut self, functions: &[FunctionDeclaration]) -> Result<(), ChangeError> {
        let deadline = clock::monotonic() + RELEASE_TIMEOUT;
        let mut outlasts = false;
        loop {
            let Err(error) = self.serve_all(functions.to_vec()) else {
                return Ok(());
            };
            let persistence = self.context.persistence.as_ref();
            let (Some(persistence), ChangeError::Function { source, .. }) = (persistence, &error)
            else {
                return Err(error);
            };
            let is_before = |number| persistence.is_predecessor(number);
            outlasts |= source.lease_holder().is_some_and(is_before);
            let is_late = clock::monotonic() > deadline || self.check_running().is_err();
            // The kernel closes an io_uring of the predecessor a moment after the process has ended. Until then, the file
            // counts as in use, so the attempt is repeated.
            if is_late || !outlasts || !source.is_in_use() {
                return Err(error);
            }
            persistence.dismiss_predecessor();
            clock::sleep(RELEASE_POLL_INTERVAL);
        }
    }

    /// Serves a function. `batch` are the functions served together with it, whose options for a shared drive must agree.
    fn serve(
        &mut self,
        declaration: &FunctionDeclaration,
        batch: &[FunctionDeclaration],
    ) -> Result<(), FunctionRegistrationError> {
        let offered = self.try_serve(declaration, batch);
        offered.map_err(|error| self.explain_error(error, || function_rules(&declaration.options)))
    }

    /// If Landlock denied the function a file, names the rule that would allow it in the error.
    fn explain_error(
        &self,
        error: FunctionRegistrationError,
        wanted: impl FnOnce() -> Vec<FileRule>,
    ) -> FunctionRegistrationError {
        let explained = self.context.confinement.explain(error, wanted);
        explained.unwrap_or_else(FunctionRegistrationError::from)
    }

    fn try_serve(
        &mut self,
        declaration: &FunctionDeclaration,
        batch: &[FunctionDeclaration],
    ) -> Result<(), FunctionRegistrationError> {
        let socket = &declaration.options.socket;
        let mut others = self
            .functions
            .iter()
            .map(|function| &function.declaration.options);
        if let Some(error) = others.find_map(|other| find_conflict(&declaration.options, other)) {
            return Err(error);
        }
        if self
            .failed
            .iter()
            .any(|failed| failed.entry.socket == *socket)
        {
            return Err(FunctionRegistrationError::SocketTaken(socket.clone()));
        }
        let sharing = batch.iter().map(|other| &other.options.function);
        let drive = self.open_drive(&declaration.options.function, sharing)?;
        let function = RegisteredFunction::new(declaration, drive, &self.context)?;
        if self
            .functions
            .iter()
            .any(|other| other.entry.id == function.entry.id)
        {
            return Err(FunctionRegistrationError::IdTaken(function.entry.id));
        }
        self.functions.push(function);
        Ok(())
    }

    /// Returns the drive of a function, and opens the drive if necessary. The drive is opened with the options of `sharing`,
    /// of failed functions whose VMs wait, and of missing drives: whichever of them comes first, the others then find the
    /// drive with their options.
    fn open_drive<'a>(
        &'a mut self,
        function: &'a FunctionOptions,
        sharing: impl Iterator<Item = &'a FunctionOptions> + Clone,
    ) -> Result<Arc<Drive>, FunctionDriveError> {
        let Self {
            context,
            failed,
            missing_drives: missing,
            drives,
            ..
        } = self;
        let persistence = context.persistence.as_deref();
        let waiting = failed
            .iter()
            .filter(|failed| failed.has_waiting_vm(persistence));
        let waiting = waiting.filter_map(|failed| Some(&failed.options.as_ref()?.function));
        let missing = missing.iter().map(|missing| &missing.declaration.options);
        let missing = missing.map(|options| &options.drive);
        drives.open(function, sharing.chain(waiting).chain(missing), persistence)
    }

    /// Serves functions independently. Functions that fail are listed as failed.
    ///
    /// A restored function may have to wait until the kernel has released the predecessor's resources. A function that the
    /// predecessor removed with commands in flight may have to wait for its lease. Neither wait delays other functions, and
    /// nor does pinning a large guest memory: see [`RestoreOrder`].
    fn serve_each(&mut self, functions: Vec<FunctionDeclaration>) {
        let functions: Vec<FunctionDeclaration> = functions
            .into_iter()
            .map(|declaration| self.resolve_declaration(declaration))
            .collect();
        let deadline = clock::monotonic() + RELEASE_TIMEOUT;
        let mut waiting: Vec<&FunctionDeclaration> = functions.iter().collect();
        waiting.sort_by_key(|declaration| {
            restore_sort_key(self.restore_order(&declaration.options.socket))
        });
        waiting.retain(|declaration| !self.postpone(declaration, &functions));
        // Sockets of functions that could not be served yet, because the predecessor still has their leases.
        let mut outlasting: BTreeSet<PathBuf> = BTreeSet::new();
        while !waiting.is_empty() {
            let is_late = clock::monotonic() > deadline || self.check_running().is_err();
            waiting.retain(|declaration| {
                let Err(error) = self.serve(declaration, &functions) else {
                    return false;
                };
                let persistence = self.context.persistence.as_ref();
                let socket = &declaration.options.socket;
                let is_before = |number| {
                    persistence.is_some_and(|persistence| persistence.is_predecessor(number))
                };
                if error.lease_holder().is_some_and(is_before) {
                    outlasting.insert(socket.clone());
                }
                // The kernel closes an io_uring of the predecessor a moment after the process has ended. Until then, the file
                // counts as in use, so the attempt is repeated.
                let waits = !is_late
                    && error.is_in_use()
                    && (outlasting.contains(socket)
                        || persistence.is_some_and(|persistence| persistence.has_function(socket)));
                if !waits {
                    self.record_error(declaration, &error);
                }
                waits
            });
            if !waiting.is_empty() {
                if let Some(persistence) = &self.context.persistence {
                    persistence.dismiss_predecessor();
                }
                clock::sleep(RELEASE_POLL_INTERVAL);
            }
        }
        // Failed functions are listed in the order of their declaration.
        let sockets = functions
            .iter()
            .map(|declaration| &declaration.options.socket);
        let places: BTreeMap<&PathBuf, usize> = sockets.zip(0..).collect();
        self.functions
            .sort_by_key(|function| places.get(&function.entry.socket).copied());
    }

    /// Returns the function's position in the order of restoring.
    fn restore_order(&self, socket: &Path) -> Option<RestoreOrder> {
        self.context.persistence.as_ref()?.restore_order(socket)
    }

    /// Postpones a restored function if pinning its memory would take long: lists the function as failed for now, and
    /// returns true. Such a function is served after all other functions, and after functions in VMMs have got their
    /// leases.
    fn postpone(
        &mut self,
        function_declaration: &FunctionDeclaration,
        batch: &[FunctionDeclaration],
    ) -> bool {
        let ServerFunctionOptions {
            socket, function, ..
        } = &function_declaration.options;
        let Some(persistence) = self.context.persistence.as_deref() else {
            return false;
        };
        let memory = persistence
            .restore_order(socket)
            .map_or(0, |turn| turn.mapped_bytes);
        if memory <= BRIEF_PINNING_MAX || !matches!(function.path, DrivePath::Pci(_)) {
            return false;
        }
        let memory_files = persistence.function_memory(socket);
        let sharing = batch.iter().map(|other| &other.options.function);
        let Ok(drive) = self.open_drive(function, sharing) else {
            // The function is not postponed, so that serving it reports this error.
            return false;
        };
        // Memory that the drive's IOMMU still has mapped for this function need not be pinned again.
        let space = drive.controller().iova_space();
        let Ok(lease) = open::lease_id(function, &drive, &self.context.ledgers) else {
            return false;
        };
        let owner = MappingOwner::for_function(&lease);
        let inherited = space.inherited_bytes(owner, &memory_files);
        if memory.saturating_sub(inherited) <= BRIEF_PINNING_MAX {
            return false;
        }
        let reason = "its memory is being pinned".to_owned();
        let postponed = FailedFunctionRecord::from_declaration(function_declaration, reason);
        let id = postponed.entry.id.as_str();
        log::info!(function = id; "Function {id} is restored after the others, as its memory has to be pinned");
        self.failed.push(postponed);
        true
    }

    /// Serves a function added in an earlier run. After an error, lists the function as failed instead of ending the start.
    fn serve_added(&mut self, text: OptionText) {
        match FunctionDeclaration::parse(DeclarationSource::Added, text.clone()) {
            Ok(declaration) => {
                if let Err(error) = self.serve_all(vec![declaration.clone()]) {
                    self.record_error(&declaration, &error);
                }
            }
            Err(error) => self.record_unreadable(unreadable_added(text, error)),
        }
    }

    fn record_unreadable(&mut self, function: UnreadableDeclaration) {
        let reason = report::chain(&function.error);
        self.record_failure(FailedFunctionRecord::from_unreadable(function), &reason);
    }

    fn record_error(&mut self, declaration: &FunctionDeclaration, error: &dyn Error) {
        let reason = report::chain(error);
        let failed = FailedFunctionRecord::from_declaration(declaration, reason.clone());
        self.record_failure(failed, &reason);
    }

    fn record_failure(&mut self, failed: FailedFunctionRecord, reason: &str) {
        let (id, socket) = (failed.entry.id.as_str(), &failed.entry.socket);
        let persistence = self.context.persistence.as_ref();
        match persistence.is_some_and(|persistence| persistence.has_function(socket)) {
            true => log::error!(
                function = id;
                "Function {id} of the previous server cannot be restored: {reason}. The server retries until it \
                 succeeds, or the function is removed: its VM waits"
            ),
            // The predecessor did not serve this function, so no VM waits for it.
            false => log::error!(function = id; "Function {id} cannot be offered: {reason}"),
        }
        self.failed.push(failed);
    }

    /// Returns whether VMs wait for failed functions, which the predecessor served, or may wait for leases on missing drives.
    pub(super) fn has_waiting_vms(&self) -> bool {
        let persistence = self.context.persistence.as_deref();
        let mut failed = self.failed.iter();
        let has_unread = persistence.is_some_and(|kept| kept.unread_reason().is_some());
        has_unread
            || !self.missing_drives.is_empty()
            || failed.any(|failed| failed.has_waiting_vm(persistence))
    }

    /// Tries again to open missing drives, and to serve failed functions whose VMs wait, since a resource that was missing may
    /// be available now.
    pub(super) fn retry_waiting(&mut self) {
        let Self {
            functions,
            held_drives: held,
            drives,
            ..
        } = self;
        drives.close_moved(|drive| is_used(drive, functions, held));
        // A drive that could not be opened is tried once in a round.
        let mut unavailable = Vec::new();
        if let Some(persistence) = self.context.persistence.clone() {
            // While a function is unread, all failed functions wait for it. They are tried once it has been read, too.
            let failed = self.failed.iter();
            let waiting = failed.filter(|failed| failed.has_waiting_vm(Some(&persistence)));
            let sockets = waiting.map(|failed| failed.entry.socket.clone());
            let mut sockets: Vec<PathBuf> = sockets.collect();
            if persistence.reread_unread() {
                self.forget_unlisted();
            }
            sockets.sort_by_key(|socket| restore_sort_key(persistence.restore_order(socket)));
            for socket in sockets {
                if self.check_running().is_err() {
                    return;
                }
                self.retry_failed(&socket, &mut unavailable);
            }
        }
        self.retry_missing_drives(&mut unavailable);
    }

    /// Tries again to open the drives that the predecessor kept open. VMs get their leases on a drive once it is open.
    fn retry_missing_drives(&mut self, unavailable: &mut Vec<DrivePath>) {
        // A drive stays missing during its attempt, so that another declaration of its path opens it with its options.
        let mut place = 0;
        while let Some(missing) = self.missing_drives.get(place) {
            let declaration = missing.declaration.clone();
            let path = declaration.options.drive.path.clone();
            if unavailable.contains(&path) || self.check_running().is_err() {
                place += 1;
                continue;
            }
            if let Err(error) = self.open_held(vec![declaration]) {
                unavailable.push(path);
                let reason = report::chain(&error);
                let missing = &mut self.missing_drives[place];
                if reason != missing.reason {
                    log::error!("{reason}. The server retries until it succeeds");
                    missing.reason = reason;
                }
                place += 1;
                continue;
            }
            log::info!("Drive {path} is open again");
            self.missing_drives.remove(place);
            self.publish();
        }
    }

    /// Tries again to serve the failed function with this socket, unless its drive is unavailable. The stored configuration
    /// stays unchanged, since it contains failed functions, too.
    fn retry_failed(&mut self, socket: &Path, unavailable: &mut Vec<DrivePath>) {
        let mut failed = self.failed.iter();
        let Some(place) = failed.position(|failed| failed.entry.socket == *socket) else {
            return;
        };
        let Some(declaration) = self.failed[place].declaration() else {
            return;
        };
        let path = &declaration.options.function.path;
        if unavailable.contains(path) {
            return;
        }
        let mut failed = self.failed.remove(place);
        let id = failed.entry.id.clone();
        let offered = self.serve(&declaration, std::slice::from_ref(&declaration));
        if let Err(error) = offered {
            if matches!(
                error,
                FunctionRegistrationError::Drive(FunctionDriveError::Open(_))
            ) {
                unavailable.push(path.clone());
            }
            let reason = report::chain(&error);
            let known = matches!(&failed.entry.state, FunctionStatus::Failed { reason: known } if *known == reason);
            if !known {
                log::error!(function = id.as_str(); "Function {id} cannot be offered yet: {reason}");
                failed = FailedFunctionRecord::from_declaration(&declaration, reason);
            }
            self.failed.push(failed);
            if known {
                return;
            }
        } else {
            log::info!(function = id.as_str(); "Function {id} can be offered again");
        }
        self.publish();
    }

    /// Removes the failed functions that one source declared, and returns them.
    pub(super) fn take_failed(&mut self, source: DeclarationSource) -> Vec<FailedFunctionRecord> {
        let all = std::mem::take(&mut self.failed);
        let (taken, left) = all
            .into_iter()
            .partition(|failed| failed.entry.origin == source);
        self.failed = left;
        taken
    }

    /// Lists the functions that [`Self::take_failed`] returned as failed again, except functions that are served by now.
    pub(super) fn return_failed(&mut self, failed: Vec<FailedFunctionRecord>) {
        let functions = &self.functions;
        let is_offered = |failed: &FailedFunctionRecord| {
            let mut functions = functions.iter();
            functions.any(|function| function.entry.socket == failed.entry.socket)
        };
        self.failed
            .extend(failed.into_iter().filter(|failed| !is_offered(failed)));
    }

    /// Releases the stored state of the predecessor's functions that are neither served nor listed as failed.
    pub(super) fn forget_unlisted(&self) {
        if let Some(persistence) = &self.context.persistence {
            let listed = |socket: &Path| {
                let mut failed = self.failed.iter();
                failed.any(|failed| failed.entry.socket == socket)
            };
            persistence.retain_functions(listed);
        }
    }

    /// Opens declared drives, which stay open even without functions.
    pub(super) fn open_held(&mut self, drives: Vec<DriveDeclaration>) -> Result<(), ChangeError> {
        for mut declaration in drives {
            let options = &mut declaration.options.drive;
            options.path = resolve_path(&options.path);
            let function = &declaration.options.drive;
            let drive = self.open_drive(function, std::iter::once(function));
            let drive = drive.map_err(|error| {
                let explained = self
                    .context
                    .confinement
                    .explain(error, || drive_rules(function));
                ChangeError::Drive {
                    path: function.path.clone(),
                    source: explained.unwrap_or_else(FunctionDriveError::from),
                }
            })?;
            self.held_drives.push(DeclaredDrive { declaration, drive });
        }
        Ok(())
    }

    /// Removes the declared drives of one source, open and missing ones, and returns them.
    pub(super) fn release_declared(&mut self, source: DeclarationSource) -> ReleasedDrives {
        let held = std::mem::take(&mut self.held_drives);
        let missing = std::mem::take(&mut self.missing_drives);
        let (released_held, held) = held
            .into_iter()
            .partition(|held| held.declaration.declared.source == source);
        let (released_missing, missing) = missing
            .into_iter()
            .partition(|missing| missing.declaration.declared.source == source);
        (self.held_drives, self.missing_drives) = (held, missing);
        ReleasedDrives {
            held: released_held,
            missing: released_missing,
        }
    }

    /// Takes back the drives that [`Self::release_declared`] returned.
    pub(super) fn return_declared(&mut self, drives: ReleasedDrives) {
        self.held_drives.extend(drives.held);
        self.missing_drives.extend(drives.missing);
    }

    /// Asks a function to end. Without `force`, fails while a VMM is connected.
    pub(super) fn request_shutdown(&self, place: usize, force: bool) -> Result<(), ChangeError> {
        let RegisteredFunction { entry, thread, .. } = &self.functions[place];
        match thread.shut_down(force) {
            ShutdownAnswer::Accepted => Ok(()),
            ShutdownAnswer::Connected => Err(ChangeError::Connected(entry.id.clone())),
            ShutdownAnswer::Busy => Err(ChangeError::Busy(entry.id.clone())),
        }
    }

    fn store_added(&self) -> Result<(), ChangeError> {
        self.store_added_with(None)
    }

    /// Writes the file of added functions without the function at index `place`.
    fn store_added_except(&self, place: usize) -> Result<(), ChangeError> {
        let others = self.functions.iter().enumerate();
        let others = others.filter(|(other, _)| *other != place);
        self.write_added(others.map(|(_, function)| function), None)
    }

    /// Writes the file of added functions: the served ones, and `other`, which is not served at the moment.
    fn store_added_with(&self, other: Option<&OptionText>) -> Result<(), ChangeError> {
        self.write_added(self.functions.iter(), other)
    }

    fn write_added<'a>(
        &'a self,
        functions: impl Iterator<Item = &'a RegisteredFunction>,
        other: Option<&'a OptionText>,
    ) -> Result<(), ChangeError> {
        let functions = functions.map(|function| &function.declaration.declared);
        let failed = self.failed.iter().map(|failed| &failed.declared);
        let added = functions.chain(failed);
        let added = added.filter(|declared| declared.source == DeclarationSource::Added);
        let added = added.map(|declared| &declared.text);
        Ok(self.context.added.write(added.chain(other))?)
    }

    /// Stores the current configuration for the next server.
    fn store_configuration(&self) {
        let Some(persistence) = &self.context.persistence else {
            return;
        };
        let functions = self.functions.iter();
        let functions = functions.map(|function| function.declaration.to_resolved());
        let failed = self.failed.iter().map(|failed| match failed.declaration() {
            Some(declaration) => declaration.to_resolved(),
            None => failed.declared.clone(),
        });
        let drives = self.drive_declarations();
        let encoded = stored_configuration::encode(
            functions.chain(failed).collect(),
            drives.map(DriveDeclaration::to_resolved).collect(),
            &self.context.rules,
        );
        match encoded {
            Ok(bytes) => persistence.store_configuration(&bytes),
            Err(error) => log::error!("{}", report::chain(&error)),
        }
    }

    /// Deletes the stored configuration at an orderly end.
    pub(super) fn forget_configuration(&self) {
        if let Some(persistence) = &self.context.persistence {
            persistence.forget_configuration();
        }
    }

    /// Closes drives that no function uses and that are not declared to stay open. Closing a `memory:` drive loses its content.
    pub(super) fn close_unused(&mut self) {
        let Self {
            context,
            functions,
            failed,
            held_drives: held,
            missing_drives: missing,
            drives,
            ..
        } = self;
        // The drives of failed functions stay open if VMs wait for these functions: they may have written data to a `memory:`
        // drive.
        let persistence = context.persistence.as_deref();
        let waiting = failed
            .iter()
            .filter(|failed| failed.has_waiting_vm(persistence));
        let waiting = waiting.filter_map(|failed| failed.entry.drive.parse().ok());
        let waiting: Vec<DrivePath> = waiting.collect();
        // The last process that closes a block device waits for its writes. The supervisor must not wait, so this process keeps
        // the drives open until the supervisor has closed its descriptors.
        let _open = context.persistence.as_ref().map(|_| drives.controllers());
        let closed = drives
            .close_unused(|path, drive| is_used(drive, functions, held) || waiting.contains(path));
        let Some(persistence) = &context.persistence else {
            return;
        };
        for path in closed {
            if let DrivePath::Memory(bytes) = path {
                persistence.forget_memory(bytes);
            }
            persistence.forget_faults(&path);
        }
        persistence.forget_other_drives(&drives.controllers());
        if waiting.is_empty() && missing.is_empty() {
            persistence
                .spares()
                .forget_other_drives(&drives.controllers());
        }
    }

    /// Returns what this server has of the configuration file, for comparison with the present file: the functions, also those
    /// that failed, and the drives to keep open, also those that could not be opened.
    fn running_configuration(&self) -> RunningConfiguration {
        let is_of_file = |declared: &DeclarationRecord| declared.source == DeclarationSource::File;
        let offered = self.functions.iter().map(|function| &function.declaration);
        let offered = offered.filter(|offered| is_of_file(&offered.declared));
        let failed = self.failed.iter();
        let failed = failed.filter(|failed| is_of_file(&failed.declared));
        let failed = failed.filter_map(FailedFunctionRecord::declaration);
        RunningConfiguration {
            file: self.context.file.clone(),
            data: self.context.data,
            functions: offered.cloned().chain(failed).collect(),
            drives: self
                .drive_declarations()
                .filter(|drive| is_of_file(&drive.declared))
                .map(|drive| drive.options.clone())
                .collect(),
        }
    }

    /// Returns the declarations of the drives to keep open, also of those that could not be opened.
    fn drive_declarations(&self) -> impl Iterator<Item = &DriveDeclaration> {
        let held = self.held_drives.iter().map(|held| &held.declaration);
        let missing = self.missing_drives.iter();
        held.chain(missing.map(|missing| &missing.declaration))
    }

    pub(super) fn publish(&self) {
        self.store_configuration();
        let functions = self.functions.iter();
        let functions =
            functions.map(|function| (function.thread.handle(), function.entry.clone()));
        let snapshot = RegistrySnapshot {
            functions: functions.collect(),
            failed: self
                .failed
                .iter()
                .map(|failed| failed.entry.clone())
                .collect(),
            running_configuration: self.running_configuration(),
            drives: self.drives.controllers(),
            namespaces: self.drives.iter().map(|(_, drive)| drive.clone()).collect(),
        };
        // The snapshot is replaced as a whole, so that a panic cannot leave a partial one.
        let mut place = self.snapshot.lock().unwrap_or_else(PoisonError::into_inner);
        *place = Arc::new(snapshot);
    }

    /// Returns the index of a served function, by id or socket.
    fn find_function(&self, id: &str) -> Result<usize, ChangeError> {
        let mut functions = self.functions.iter();
        let place = functions.position(|function| has_id(&function.entry, id));
        place.ok_or_else(|| self.unknown_function_error(id))
    }

    fn unknown_function_error(&self, id: &str) -> ChangeError {
        let failed = self.failed.iter().map(|failed| &failed.entry);
        let functions = self.entries().chain(failed).cloned();
        let functions = functions.chain(self.context.leases.entries());
        ChangeError::NoFunction {
            id: id.to_owned(),
            functions: functions.map(|entry| entry.id).collect(),
        }
    }
}

/// Returns whether `id` names a function: its id or its socket.
fn has_id(entry: &FunctionEntry, id: &str) -> bool {
    entry.id == id || entry.socket == Path::new(id)
}

/// Returns the sort key for the order of restoring: functions for which no VM waits come last.
fn restore_sort_key(turn: Option<RestoreOrder>) -> (bool, Option<RestoreOrder>) {
    (turn.is_none(), turn)
}

/// Returns an error if the two functions have the same socket or id.
pub(super) fn find_conflict(
    function: &ServerFunctionOptions,
    other: &ServerFunctionOptions,
) -> Option<FunctionRegistrationError> {
    if function.socket == other.socket {
        return Some(FunctionRegistrationError::SocketTaken(
            function.socket.clone(),
        ));
    }
    let id = function.function.id.as_ref()?;
    (other.function.id.as_ref() == Some(id)).then(|| FunctionRegistrationError::IdTaken(id.clone()))
}

pub(super) fn function_error(
    declaration: &FunctionDeclaration,
    source: FunctionRegistrationError,
) -> ChangeError {
    ChangeError::Function {
        socket: declaration.options.socket.clone(),
        source,
    }
}

/// Returns whether a function uses the drive, or the drive is declared to stay open.
fn is_used(drive: &Arc<Drive>, functions: &[RegisteredFunction], held: &[DeclaredDrive]) -> bool {
    let mut drives = functions.iter().map(|function| &function.drive);
    let mut held = held.iter().map(|held| &held.drive);
    drives.any(|other| Arc::ptr_eq(other, drive)) || held.any(|other| Arc::ptr_eq(other, drive))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::sync::atomic::AtomicBool;

    use nvme_guest::threads::start_thread;
    use nvme_lease::make_state_dir;
    use rustix::process::{PidfdFlags, getpid, pidfd_open};
    use vfio_user_server::SocketAccess;

    use super::super::declarations::{AddedFunctionsFile, ConfigFileContents};
    use super::*;
    use crate::confinement::ProcessConfinement;
    use crate::persistence::GuestPauseStart;

    /// Creates the registry of a server without functions. Its state directory is in `dir`.
    fn registry(dir: &Path, persistence: Option<ServerPersistence>) -> FunctionRegistry {
        let state_dir = dir.join("state");
        let ledgers = Arc::new(open::LeaseLedgers::open(&state_dir));
        let pollers = PollerPool::new();
        let leases = LeaseTable::new(
            &state_dir,
            SocketAccess::default(),
            ledgers.clone(),
            pollers.clone(),
            GuestPauseStart::for_vmms(persistence.as_ref()),
        );
        FunctionRegistry::new(ServerContext {
            ledgers,
            leases,
            pollers,
            data: nvme_lease::PreviousDataPolicy::Refused,
            rules: Vec::new(),
            state_dir,
            file: None,
            added: AddedFunctionsFile::for_control_socket(&dir.join("control.sock")),
            persistence: persistence.map(Arc::new),
            stop: Arc::new(AtomicBool::new(false)),
            confinement: ProcessConfinement::default(),
        })
    }

    fn function(dir: &Path, socket: &str) -> FunctionDeclaration {
        let (socket, drive) = (dir.join(socket), dir.join("drive.img"));
        let text = format!(
            "socket={},path={},range=0+1M,id=a",
            socket.display(),
            drive.display()
        );
        FunctionDeclaration::parse(DeclarationSource::CommandLine, text.parse().unwrap()).unwrap()
    }

    /// Makes a second server serve a function whose lease the first server still holds, and checks that the second server
    /// waits.
    fn check_waiting(add_function: impl FnOnce(&mut FunctionRegistry, FunctionDeclaration)) {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        make_state_dir(&dir.join("state")).unwrap();
        let drive = File::create(dir.join("drive.img")).unwrap();
        drive.set_len(2 << 20).unwrap();
        // This test's process acts as the predecessor, too.
        let process = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
        let (persistence, _supervisor, mut server) =
            ServerPersistence::beside_predecessor_with(dir, process);
        let mut before = registry(dir, None);
        before
            .serve_all(vec![function(dir, "before.sock")])
            .unwrap();
        // The predecessor holds the lease until the second server has failed to acquire it, and asks the predecessor to end.
        let end = move || {
            let received = server.read_exact(&mut [0]).is_ok();
            drop(before);
            received
        };
        let ended = start_thread("before", end).unwrap();
        let mut after = registry(dir, Some(persistence));
        add_function(&mut after, function(dir, "after.sock"));
        let failed = after.failed.iter();
        let reasons: Vec<_> = failed.map(|failed| failed.entry.summary.as_str()).collect();
        assert!(reasons.is_empty(), "{reasons:?}");
        assert_eq!(after.entries().count(), 1);
        after.end().unwrap();
        assert!(ended.join().unwrap(), "the server before ended first");
    }

    #[test]
    fn a_function_waits_for_its_lease_of_the_old_server() {
        check_waiting(|after, function| after.serve_each(vec![function]));
    }

    #[test]
    fn a_single_function_waits_for_its_lease_of_the_old_server() {
        check_waiting(|after, function| {
            // Without restored functions, a function that cannot be served ends the server.
            let configuration = StartConfiguration {
                functions: vec![function],
                ..StartConfiguration::default()
            };
            after.start(configuration).unwrap();
        });
    }

    /// Starts a server whose predecessor kept the drive `drive.img` of `dir` open, which does not exist now. The configuration
    /// file declares the drive, too.
    fn start_without_drive(dir: &Path) -> FunctionRegistry {
        make_state_dir(&dir.join("state")).unwrap();
        let process = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
        let mut registry = registry(
            dir,
            Some(ServerPersistence::beside_predecessor(dir, process)),
        );
        let path = dir.join("drive.img");
        let file = dir.join("serve.toml");
        let text = format!("[[drive]]\npath = {path:?}\nlba = 4096\n");
        std::fs::write(&file, text).unwrap();
        registry.context.file = Some(file.clone());
        let configuration = StartConfiguration {
            drives: ConfigFileContents::read(&file).unwrap().drives,
            is_restored: true,
            ..StartConfiguration::default()
        };
        registry.start(configuration).unwrap();
        assert!(registry.has_waiting_vms());
        registry
    }

    fn create_drive(dir: &Path) {
        let drive = File::create(dir.join("drive.img")).unwrap();
        drive.set_len(2 << 20).unwrap();
    }

    #[test]
    fn a_missing_drive_is_opened_once_it_is_back() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let mut registry = start_without_drive(dir);
        registry.retry_waiting();
        assert!(registry.has_waiting_vms());
        create_drive(dir);
        registry.retry_waiting();
        assert!(!registry.has_waiting_vms());
        assert_eq!(registry.held_drives.len(), 1);
        // Leases of VMMs find the drive.
        let snapshot = registry.snapshot();
        assert_eq!(snapshot.lock().unwrap().drives.len(), 1);
    }

    #[test]
    fn a_function_opens_a_missing_drive_with_the_declared_options() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let mut registry = start_without_drive(dir);
        create_drive(dir);
        registry.serve_all(vec![function(dir, "a.sock")]).unwrap();
        let drive = &registry.functions[0].drive;
        assert_eq!(drive.namespace().lba_shift, 12);
        registry.retry_waiting();
        assert!(!registry.has_waiting_vms());
        registry.end().unwrap();
    }

    #[test]
    fn a_failed_reload_still_waits_for_a_missing_drive() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let mut registry = start_without_drive(dir);
        let error = registry.reload(false).unwrap_err();
        assert!(matches!(error, ChangeError::Drive { .. }), "{error:?}");
        assert!(registry.has_waiting_vms());
        create_drive(dir);
        registry.retry_waiting();
        assert_eq!(registry.held_drives.len(), 1);
    }

    #[test]
    fn no_function_is_served_anew_or_changed_while_one_of_the_predecessor_is_unread() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        create_drive(dir);
        make_state_dir(&dir.join("state")).unwrap();
        let process = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
        let persistence = ServerPersistence::beside_predecessor(dir, process);
        persistence.add_unread();
        let mut registry = registry(dir, Some(persistence));
        registry.serve_each(vec![function(dir, "a.sock")]);
        assert!(registry.functions.is_empty());
        let FunctionStatus::Failed { reason } = &registry.failed[0].entry.state else {
            panic!("{:?}", registry.failed);
        };
        assert!(reason.contains("RLIMIT_NOFILE"), "{reason}");
        assert!(registry.has_waiting_vms());
        let refused = registry.check_all_read().unwrap_err();
        assert!(matches!(refused, ChangeError::Unread { .. }), "{refused:?}");
        // The unread function turns out to be lost. The other one is served then.
        registry.retry_waiting();
        registry.check_all_read().unwrap();
        assert!(registry.failed.is_empty(), "{:?}", registry.failed);
        assert!(!registry.has_waiting_vms());
        registry.end().unwrap();
    }
}

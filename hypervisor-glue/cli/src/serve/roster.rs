//! Functions that a server offers, and the changes of them.
//!
//! One thread owns the roster: the main thread while the server starts and ends, the thread of changes in between. Other
//! threads see a [`View`] that is replaced after each change.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use nix::unistd::{Group, User};
use nvme_mpt::host::NamespaceFormat;
use nvme_mpt::lease::{ByteRange, FormerData};
use nvme_mpt::limit::RateLimits;
use nvme_mpt::{Attachment, Drive, Pollers};
use nvme_mpt_vmm::drives::DrivePath;
use nvme_mpt_vmm::open::{self, Ledgers, OpenError};
use nvme_mpt_vmm::options::{
    OptionError, OptionText, RateChange, ServedDrive, ServedFunction, SocketOwner,
};
use nvme_mpt_vmm::report;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use vfio_user_server::SocketAccess;
use vmm_device::{MsixMasking, NvmeFunction};

use super::declared::{AddedFile, Declarations, DeclaredFunction, FileError, Origin};
use super::drives::{DriveError, OpenDrives};
use crate::adaptor::NvmeDevice;
use crate::function_thread::{FunctionHandle, FunctionThread, FunctionThreadError, Leave};

/// One function cannot be offered.
#[derive(Debug, Error)]
pub enum OfferError {
    /// Another function has the socket.
    #[error("Two functions have the socket {}: give each its own", .0.display())]
    SocketTaken(PathBuf),
    /// Another function has the id.
    #[error("Two functions have the id \"{0}\": give each its own")]
    IdTaken(String),
    /// Its drive cannot be opened.
    #[error(transparent)]
    Drive(#[from] DriveError),
    /// Its part of the drive cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The owner of its socket is not known.
    #[error("There is no {kind} \"{name}\" to own the socket: create it, or give its number")]
    NoOwner {
        /// `user` or `group`.
        kind: &'static str,
        /// Its name.
        name: String,
    },
    /// Its doorbells cannot be offered.
    #[error("Cannot share the doorbells; raise the limit on open files")]
    Doorbells(#[source] std::io::Error),
    /// Error serving a function.
    #[error(transparent)]
    Thread(#[from] FunctionThreadError),
}

/// A change of the functions cannot be made. Nothing has changed, unless the error says so.
#[derive(Debug, Error)]
pub enum ChangeError {
    /// The function's options are wrong.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// A function cannot be offered.
    #[error("Cannot offer the function on {}", socket.display())]
    Function {
        /// Its socket.
        socket: PathBuf,
        /// Why.
        source: OfferError,
    },
    /// A drive cannot be kept open.
    #[error("Cannot keep drive {path} open")]
    Drive {
        /// The drive.
        path: DrivePath,
        /// Why.
        source: DriveError,
    },
    /// There is no such function.
    #[error("There is no function \"{id}\"; the functions are: {}", known(.functions))]
    NoFunction {
        /// Id that was asked for.
        id: String,
        /// Ids that there are.
        functions: Vec<String>,
    },
    /// A VMM has the function.
    #[error(
        "A VMM is connected to function {0}: detach it there first, or say --force, and its guest loses the drive"
    )]
    Connected(String),
    /// The function's thread is busy.
    #[error("Function {0} does not answer, as it waits for commands in flight: try again later")]
    Busy(String),
    /// The function is declared in the server's file.
    #[error("Function {id} is declared in {}: take it out there, then run `nvme-mpt reload`", file.display())]
    Declared {
        /// The function.
        id: String,
        /// The file.
        file: PathBuf,
    },
    /// The server has no file.
    #[error(
        "The server was started without --config, so there is no file to match: start it with --config FILE"
    )]
    NoFile,
    /// A file of functions cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// The server is about to end.
    #[error("The server is about to end: repeat the change when it runs again")]
    Ending,
    /// The state before a failed reload could not be restored as a whole.
    #[error("{error}\nThe functions before could not all be restored: {}", failed.join("; "))]
    NotRestored {
        /// Why the reload failed.
        error: Box<Self>,
        /// Functions that are not offered any more, each with the reason.
        failed: Vec<String>,
    },
}

fn known(functions: &[String]) -> String {
    match functions {
        [] => "none".to_owned(),
        functions => functions.join(", "),
    }
}

/// State of a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FunctionState {
    /// It waits for a VMM.
    Waiting,
    /// A VMM is connected.
    Connected,
    /// It waits for commands in flight, and does not report its state.
    Busy,
    /// It was added earlier, and could not be offered when the server was started.
    Failed {
        /// Why.
        reason: String,
    },
}

/// A function, as `nvme-mpt list` reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionEntry {
    /// Name of the function and of its lease. A function that failed may have its socket instead.
    pub id: String,
    /// Socket on which a VMM connects.
    pub socket: PathBuf,
    /// The drive, as in `path=`.
    pub drive: String,
    /// Leased bytes of the drive; `None` if the function failed.
    pub range: Option<ByteRange>,
    /// Origin of its declaration.
    pub origin: Origin,
    /// Its limits, as in `iops=20000,bandwidth=100M`; empty if it has none.
    #[serde(default)]
    pub limits: String,
    /// Its state.
    pub state: FunctionState,
    /// Facts of the function for a person.
    pub summary: String,
}

/// A function that is offered.
#[derive(Debug)]
struct Offer {
    declared: DeclaredFunction,
    entry: FunctionEntry,
    /// Queue pairs of the drive that it may use.
    queues: u16,
    drive: Arc<Drive>,
    /// The function alone keeps its attachment.
    attachment: Weak<Attachment>,
    thread: FunctionThread,
}

impl Offer {
    /// Changes the limits, under the guest.
    fn set_rates(&mut self, rates: RateLimits) {
        self.declared.function.function.rates = rates;
        self.entry.limits = rates.to_string();
        // A function that has ended by itself has no queues to limit.
        if let Some(attachment) = self.attachment.upgrade() {
            attachment.set_rates(rates);
        }
    }
}

/// A function of an earlier run that could not be offered again.
#[derive(Debug)]
struct Failed {
    text: OptionText,
    entry: FunctionEntry,
}

/// A drive that is kept open, whether functions use it or not.
#[derive(Debug)]
struct HeldDrive {
    origin: Origin,
    drive: Arc<Drive>,
}

/// Functions and drives, as other threads see them.
#[derive(Debug, Default)]
pub(super) struct View {
    pub(super) functions: Vec<(FunctionHandle, FunctionEntry)>,
    failed: Vec<FunctionEntry>,
    pub(super) drives: Vec<Arc<Drive>>,
}

impl View {
    /// Returns all functions with their present states. It waits for answers for a second at most.
    pub(super) fn entries(&self) -> Vec<FunctionEntry> {
        let handles = self.functions.iter().map(|(handle, _)| handle);
        let figures = FunctionHandle::stats_of(handles);
        let entries = self.functions.iter().map(|(_, entry)| {
            let figures = figures.iter().find(|figures| figures.id == entry.id);
            FunctionEntry {
                state: match figures.map(|figures| figures.connected) {
                    Some(true) => FunctionState::Connected,
                    Some(false) => FunctionState::Waiting,
                    None => FunctionState::Busy,
                },
                ..entry.clone()
            }
        });
        entries.chain(self.failed.iter().cloned()).collect()
    }
}

/// Result of a reload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reloaded {
    /// Functions that are new.
    pub added: Vec<String>,
    /// Functions that were made anew, as their options changed.
    pub changed: Vec<String>,
    /// Functions that go on with other limits.
    #[serde(default)]
    pub limited: Vec<String>,
    /// Functions that are gone.
    pub removed: Vec<String>,
    /// Number of functions that were not touched.
    pub unchanged: usize,
}

/// Places and choices of a server.
#[derive(Debug)]
pub(super) struct Terms {
    pub(super) ledgers: Ledgers,
    pub(super) pollers: Arc<Pollers>,
    /// Fate of data that another id left, for functions that leave it open.
    pub(super) data: FormerData,
    /// The file of `--config`, by an absolute path.
    pub(super) file: Option<PathBuf>,
    pub(super) added: AddedFile,
    /// Set when the server is to end: long waits end early.
    pub(super) stop: Arc<AtomicBool>,
}

/// All functions of a server. Dropped, none is offered any more.
#[derive(Debug)]
pub(super) struct Roster {
    terms: Terms,
    offers: Vec<Offer>,
    failed: Vec<Failed>,
    held: Vec<HeldDrive>,
    drives: OpenDrives,
    view: Arc<Mutex<Arc<View>>>,
}

impl Roster {
    pub(super) fn new(terms: Terms) -> Self {
        Self {
            terms,
            offers: Vec::new(),
            failed: Vec::new(),
            held: Vec::new(),
            drives: OpenDrives::default(),
            view: Arc::default(),
        }
    }

    /// Offers the functions of the command line, of the file, and those that were added in an earlier run.
    ///
    /// # Errors
    /// A function of the command line or of the file cannot be offered. One of an earlier run is listed as failed.
    pub(super) fn start(
        &mut self,
        functions: Vec<ServedFunction>,
        drives: Vec<ServedDrive>,
    ) -> Result<(), ChangeError> {
        let file = match &self.terms.file {
            Some(file) => Declarations::read(file)?,
            None => Declarations::default(),
        };
        let earlier = self.terms.added.read()?;
        self.hold(Origin::CommandLine, drives)?;
        self.hold(Origin::File, file.drives)?;
        let arguments = functions.into_iter().map(DeclaredFunction::argument);
        self.offer_all(arguments.chain(file.functions).collect())?;
        for text in earlier {
            self.offer_again(text);
        }
        self.publish();
        Ok(())
    }

    /// Refuses changes of a server that is about to end.
    pub(super) fn check_runs(&self) -> Result<(), ChangeError> {
        match self.terms.stop.load(Ordering::Relaxed) {
            true => Err(ChangeError::Ending),
            false => Ok(()),
        }
    }

    /// Adds a function, also for the next start of the server.
    pub(super) fn add(&mut self, text: OptionText) -> Result<FunctionEntry, ChangeError> {
        let declared = DeclaredFunction::read(Origin::Added, text)?;
        self.offer_all(vec![declared])?;
        if let Err(error) = self.store_added() {
            if let Some(offer) = self.offers.pop() {
                end(offer);
            }
            self.close_unused();
            return Err(error);
        }
        self.publish();
        let offer = self.offers.last().map(|offer| offer.entry.clone());
        offer.ok_or_else(|| self.no_function(""))
    }

    /// Removes a function. Returns it, and the error of its end, if there was one: it is gone in any case.
    pub(super) fn remove(
        &mut self,
        id: &str,
        force: bool,
    ) -> Result<(FunctionEntry, Option<String>), ChangeError> {
        let of_id = |entry: &FunctionEntry| entry.id == id || entry.socket == Path::new(id);
        if let Some(place) = self.failed.iter().position(|failed| of_id(&failed.entry)) {
            let failed = self.failed.remove(place);
            if let Err(error) = self.store_added() {
                self.failed.insert(place, failed);
                return Err(error);
            }
            self.publish();
            return Ok((failed.entry, None));
        }
        let place = self.offers.iter().position(|offer| of_id(&offer.entry));
        let place = place.ok_or_else(|| self.no_function(id))?;
        let Offer {
            declared, entry, ..
        } = &self.offers[place];
        if let (Origin::File, Some(file)) = (declared.origin, &self.terms.file) {
            return Err(ChangeError::Declared {
                id: entry.id.clone(),
                file: file.clone(),
            });
        }
        self.ask_to_leave(place, force)?;
        let offer = self.offers.remove(place);
        let entry = offer.entry.clone();
        let mut trouble = end(offer);
        if let Err(error) = self.store_added() {
            let error = report::chain(&error);
            trouble = Some(match trouble {
                Some(trouble) => format!("{trouble}\n{error}"),
                None => error,
            });
        }
        self.close_unused();
        self.publish();
        Ok((entry, trouble))
    }

    /// Changes the limits of a function. Those of an added function are there again after a restart.
    pub(super) fn limit(&mut self, id: &str, limits: &str) -> Result<FunctionEntry, ChangeError> {
        let change: RateChange = limits.parse()?;
        let given: OptionText = limits.parse()?;
        let of_id = |entry: &FunctionEntry| entry.id == id || entry.socket == Path::new(id);
        let place = self.offers.iter().position(|offer| of_id(&offer.entry));
        let place = place.ok_or_else(|| self.no_function(id))?;
        let before = self.offers[place].declared.clone();
        let declared = &mut self.offers[place].declared;
        let rates = change.of(declared.function.function.rates);
        declared.function.function.rates = rates;
        if let Some(mut text) = declared.text.take() {
            for (key, value) in given.pairs() {
                text = text.with(key, (value != RateChange::NONE).then_some(value));
            }
            declared.text = Some(text);
        }
        if before.origin == Origin::Added
            && let Err(error) = self.store_added()
        {
            self.offers[place].declared = before;
            return Err(error);
        }
        self.offers[place].set_rates(rates);
        self.publish();
        Ok(self.offers[place].entry.clone())
    }

    /// Makes the functions those of the file, without touching one that did not change.
    pub(super) fn reload(&mut self, force: bool) -> Result<Reloaded, ChangeError> {
        let file = self.terms.file.as_ref().ok_or(ChangeError::NoFile)?;
        let Declarations { functions, drives } = Declarations::read(file)?;
        let mut wanted: Vec<DeclaredFunction> = functions
            .into_iter()
            .map(|declared| self.resolved(declared))
            .collect();
        self.check_taken(&wanted)?;

        // Those of the file that stay are in `wanted` no more, and those that go are in `going`.
        let mut reloaded = Reloaded::default();
        let mut going = Vec::new();
        let mut limited = Vec::new();
        for (place, offer) in self.offers.iter().enumerate() {
            if offer.declared.origin != Origin::File {
                continue;
            }
            let present = &offer.declared.function;
            let rates = present.function.rates;
            let same = |other: &DeclaredFunction| other.with_rates(rates).function == *present;
            let Some(stays) = wanted.iter().position(same) else {
                going.push(place);
                continue;
            };
            let stays = wanted.remove(stays);
            match stays.function.function.rates == rates {
                true => reloaded.unchanged += 1,
                false => {
                    reloaded.limited.push(offer.entry.id.clone());
                    limited.push(stays.function);
                }
            }
        }
        for place in &going {
            let Offer { entry, .. } = &self.offers[*place];
            let again = wanted.iter().any(|new| new.function.socket == entry.socket);
            let names = match again {
                true => &mut reloaded.changed,
                false => &mut reloaded.removed,
            };
            names.push(entry.id.clone());
        }
        let before = self.take_out(&going, force)?;
        let functions: Vec<DeclaredFunction> =
            before.iter().map(|offer| offer.declared.clone()).collect();
        let sockets: Vec<PathBuf> = functions
            .iter()
            .map(|declared| declared.function.socket.clone())
            .collect();
        for offer in before {
            if let Some(trouble) = end(offer) {
                log::error!("{trouble}");
            }
        }
        let held = self.release_held(Origin::File);
        let kept = self.offers.len();
        let made = self
            .hold(Origin::File, drives)
            .and_then(|()| self.offer_all(wanted));
        if let Err(error) = made {
            let error = self.restore(error, held, functions);
            self.publish();
            return Err(error);
        }
        drop(held);
        self.close_unused();
        for function in limited {
            let same = |offer: &&mut Offer| offer.entry.socket == function.socket;
            if let Some(offer) = self.offers.iter_mut().find(same) {
                offer.set_rates(function.function.rates);
            }
        }
        let made = self.offers.iter().skip(kept);
        let new = made.filter(|offer| !sockets.contains(&offer.entry.socket));
        reloaded.added = new.map(|offer| offer.entry.id.clone()).collect();
        self.publish();
        Ok(reloaded)
    }

    /// Ends all functions, at the same time. Returns the socket and the error of the first that did not end well.
    pub(super) fn end(self) -> Result<(), (PathBuf, FunctionThreadError)> {
        let Self {
            offers,
            held,
            drives,
            view,
            ..
        } = self;
        // Only the functions hold the drives from here on.
        drop((held, drives, view));
        for offer in &offers {
            offer.thread.stop();
        }
        let mut result = Ok(());
        for Offer { entry, thread, .. } in offers {
            let ended = thread.end().map_err(|error| (entry.socket, error));
            result = result.and(ended);
        }
        result
    }

    /// Returns the pollers of all functions.
    pub(super) fn pollers(&self) -> Arc<Pollers> {
        self.terms.pollers.clone()
    }

    /// Returns the place where other threads find the present functions.
    pub(super) fn view(&self) -> Arc<Mutex<Arc<View>>> {
        self.view.clone()
    }

    /// Returns the functions that are offered.
    pub(super) fn entries(&self) -> impl Iterator<Item = &FunctionEntry> {
        self.offers.iter().map(|offer| &offer.entry)
    }

    /// Returns the facts that a person needs to know of each drive with a number of queues of its own.
    pub(super) fn drive_summaries(&self) -> Vec<String> {
        let drives = self.drives.controllers();
        let summaries = drives.iter().filter_map(|drive| self.summary_of(drive));
        summaries.collect()
    }

    fn summary_of(&self, drive: &Drive) -> Option<String> {
        let pairs = drive.controller().queue_pairs()?;
        let users = self.offers.iter();
        let users = users.filter(|offer| offer.drive.path() == drive.path());
        let wanted: u32 = users.map(|offer| u32::from(offer.queues)).sum();
        let mut summary = format!(
            "{}: {}, {} I/O queue pair{}",
            drive.path(),
            drive.controller().model(),
            pairs.total,
            if pairs.total == 1 { "" } else { "s" },
        );
        if wanted > pairs.total.into() {
            summary += &format!(
                "; its functions may use {wanted}, so that queues share them when guests create more than there are"
            );
        }
        Some(summary)
    }

    /// Returns a function with paths that name the same file the same way, and with the server's defaults.
    fn resolved(&self, declared: DeclaredFunction) -> DeclaredFunction {
        let mut declared = declared.with_data(self.terms.data);
        let ServedFunction {
            socket, function, ..
        } = &mut declared.function;
        // Fails for an empty path alone, which no option has.
        if let Ok(absolute) = std::path::absolute(&*socket) {
            *socket = absolute;
        }
        function.path = resolved(&function.path);
        declared
    }

    /// Checks that the sockets and ids of functions of the file are not taken, by each other or by other functions.
    fn check_taken(&self, wanted: &[DeclaredFunction]) -> Result<(), ChangeError> {
        let others = self.offers.iter().map(|offer| &offer.declared);
        let others = others.filter(|declared| declared.origin != Origin::File);
        for (place, new) in wanted.iter().enumerate() {
            let mut others = others.clone().chain(&wanted[..place]);
            if let Some(source) = others.find_map(|other| taken(&new.function, &other.function)) {
                return Err(cannot_offer(new, source));
            }
        }
        Ok(())
    }

    /// Offers functions, all or none.
    fn offer_all(&mut self, functions: Vec<DeclaredFunction>) -> Result<(), ChangeError> {
        let functions: Vec<DeclaredFunction> = functions
            .into_iter()
            .map(|declared| self.resolved(declared))
            .collect();
        let before = self.offers.len();
        for declared in &functions {
            if let Err(source) = self.offer(declared, &functions) {
                for offer in self.offers.split_off(before) {
                    end(offer);
                }
                self.close_unused();
                return Err(cannot_offer(declared, source));
            }
        }
        Ok(())
    }

    /// Offers a function. `batch` are those that are offered with it.
    fn offer(
        &mut self,
        declared: &DeclaredFunction,
        batch: &[DeclaredFunction],
    ) -> Result<(), OfferError> {
        let ServedFunction {
            socket,
            mode,
            owner,
            function,
        } = &declared.function;
        let mut others = self.offers.iter().map(|offer| &offer.declared.function);
        if let Some(error) = others.find_map(|other| taken(&declared.function, other)) {
            return Err(error);
        }
        if self
            .failed
            .iter()
            .any(|failed| failed.entry.socket == *socket)
        {
            return Err(OfferError::SocketTaken(socket.clone()));
        }
        let access = access(*mode, owner.as_ref())?;
        let sharing = batch.iter().map(|other| &other.function.function);
        let drive = self.drives.open(function, sharing)?;
        let Terms {
            ledgers,
            pollers,
            stop,
            ..
        } = &self.terms;
        let attachment = open::attach(function, &drive, ledgers, pollers, stop)?;
        let id = attachment.lease().id().to_owned();
        if self.offers.iter().any(|other| other.entry.id == id) {
            return Err(OfferError::IdTaken(id));
        }
        let namespace = attachment.namespace();
        let contents = match namespace.format {
            NamespaceFormat::Keys(_) => "keys and values".to_owned(),
            NamespaceFormat::Blocks | NamespaceFormat::Zones(_) => format!(
                "{} blocks of {} bytes",
                namespace.blocks,
                1_u64 << namespace.lba_shift
            ),
        };
        let drive_name = match function.path {
            DrivePath::Pci(_) => {
                format!("{} namespace {}", function.path, drive.namespace().nsid)
            }
            _ => function.path.to_string(),
        };
        let range = attachment.lease().bytes();
        let queues = attachment.max_queue_pairs();
        let summary = format!(
            "{drive_name}, range {range} ({contents}); serial {}; doorbells {}, poll {}, {queues} queue pairs",
            namespace.serial, function.doorbells, function.poll,
        );
        let attachment = Arc::new(attachment);
        let weak = Arc::downgrade(&attachment);
        let device = NvmeFunction::new(attachment, MsixMasking::Client);
        let device = NvmeDevice::new(device).map_err(OfferError::Doorbells)?;
        let thread = FunctionThread::start(&id, socket, access, device)?;
        self.offers.push(Offer {
            declared: declared.clone(),
            entry: FunctionEntry {
                id,
                socket: socket.clone(),
                drive: function.path.to_string(),
                range: Some(range),
                origin: declared.origin,
                limits: function.rates.to_string(),
                state: FunctionState::Waiting,
                summary,
            },
            queues,
            drive,
            attachment: weak,
            thread,
        });
        Ok(())
    }

    /// Offers a function of an earlier run, or lists it as failed: the others are not to wait for it.
    fn offer_again(&mut self, text: OptionText) {
        let declared = DeclaredFunction::read(Origin::Added, text.clone());
        let offered = declared.map_err(ChangeError::from);
        let offered = offered.and_then(|declared| self.offer_all(vec![declared]));
        let Err(error) = offered else {
            return;
        };
        let reason = report::chain(&error);
        let socket = text.get("socket").unwrap_or_default();
        let id = text.get("id").unwrap_or(socket).to_owned();
        log::error!(
            "Function {id}, which was added in an earlier run, cannot be offered: {reason}"
        );
        let entry = FunctionEntry {
            id,
            socket: socket.into(),
            drive: text.get("path").unwrap_or_default().to_owned(),
            range: None,
            origin: Origin::Added,
            limits: String::new(),
            summary: format!("not offered: {reason}"),
            state: FunctionState::Failed { reason },
        };
        self.failed.push(Failed { text, entry });
    }

    /// Keeps drives open.
    fn hold(&mut self, origin: Origin, drives: Vec<ServedDrive>) -> Result<(), ChangeError> {
        for mut declared in drives {
            declared.drive.path = resolved(&declared.drive.path);
            let function = &declared.drive;
            let drive = self.drives.open(function, std::iter::once(function));
            let drive = drive.map_err(|source| ChangeError::Drive {
                path: function.path.clone(),
                source,
            })?;
            self.held.push(HeldDrive { origin, drive });
        }
        Ok(())
    }

    fn release_held(&mut self, origin: Origin) -> Vec<HeldDrive> {
        let (released, held) = std::mem::take(&mut self.held)
            .into_iter()
            .partition(|held| held.origin == origin);
        self.held = held;
        released
    }

    /// Takes functions out that may go, all or none.
    fn take_out(&mut self, places: &[usize], force: bool) -> Result<Vec<Offer>, ChangeError> {
        if !force {
            let offers = places.iter().map(|place| &self.offers[*place]);
            let handles: Vec<FunctionHandle> = offers.map(|offer| offer.thread.handle()).collect();
            let figures = FunctionHandle::stats_of(&handles);
            for place in places {
                let id = &self.offers[*place].entry.id;
                match figures.iter().find(|figures| figures.id == *id) {
                    Some(figures) if figures.connected => {
                        return Err(ChangeError::Connected(id.clone()));
                    }
                    Some(_) => {}
                    None => return Err(ChangeError::Busy(id.clone())),
                }
            }
        }
        // A VMM that connects to one of them now finds it gone a moment later.
        let mut taken = Vec::new();
        for place in places.iter().rev() {
            taken.push(self.offers.remove(*place));
        }
        taken.reverse();
        Ok(taken)
    }

    /// Undoes a reload that failed with `error`.
    fn restore(
        &mut self,
        error: ChangeError,
        held: Vec<HeldDrive>,
        functions: Vec<DeclaredFunction>,
    ) -> ChangeError {
        self.release_held(Origin::File);
        self.held.extend(held);
        self.close_unused();
        let mut failed = Vec::new();
        for declared in functions {
            if let Err(error) = self.offer_all(vec![declared]) {
                failed.push(report::chain(&error));
            }
        }
        match failed.is_empty() {
            true => error,
            false => ChangeError::NotRestored {
                error: Box::new(error),
                failed,
            },
        }
    }

    /// Asks a function to end, unless a VMM is connected.
    fn ask_to_leave(&self, place: usize, force: bool) -> Result<(), ChangeError> {
        let Offer { entry, thread, .. } = &self.offers[place];
        match thread.leave(force) {
            Leave::Leaves => Ok(()),
            Leave::Connected => Err(ChangeError::Connected(entry.id.clone())),
            Leave::Busy => Err(ChangeError::Busy(entry.id.clone())),
        }
    }

    fn store_added(&self) -> Result<(), ChangeError> {
        let offers = self.offers.iter().map(|offer| &offer.declared);
        let added = offers.filter(|declared| declared.origin == Origin::Added);
        let added = added.filter_map(|declared| declared.text.as_ref());
        let failed = self.failed.iter().map(|failed| &failed.text);
        Ok(self.terms.added.write(added.chain(failed))?)
    }

    fn close_unused(&mut self) {
        let Self {
            offers,
            held,
            drives,
            ..
        } = self;
        drives.close_unused(|drive| {
            let is_used = offers.iter().any(|offer| Arc::ptr_eq(&offer.drive, drive));
            is_used || held.iter().any(|held| Arc::ptr_eq(&held.drive, drive))
        });
    }

    fn publish(&self) {
        let functions = self.offers.iter();
        let functions = functions.map(|offer| (offer.thread.handle(), offer.entry.clone()));
        let view = View {
            functions: functions.collect(),
            failed: self
                .failed
                .iter()
                .map(|failed| failed.entry.clone())
                .collect(),
            drives: self.drives.controllers(),
        };
        // A view is replaced as a whole, so that a panic leaves none half made.
        let mut place = self.view.lock().unwrap_or_else(PoisonError::into_inner);
        *place = Arc::new(view);
    }

    fn no_function(&self, id: &str) -> ChangeError {
        let failed = self.failed.iter().map(|failed| &failed.entry);
        let functions = self.entries().chain(failed);
        ChangeError::NoFunction {
            id: id.to_owned(),
            functions: functions.map(|entry| entry.id.clone()).collect(),
        }
    }
}

/// Ends a function. Returns the error for a person, if it did not end well.
fn end(offer: Offer) -> Option<String> {
    let Offer { entry, thread, .. } = offer;
    let error = thread.end().err()?;
    Some(format!(
        "Function {} did not end well: {}",
        entry.id,
        report::chain(&error)
    ))
}

/// Returns the error for a function that has the socket or the id of another one.
fn taken(function: &ServedFunction, other: &ServedFunction) -> Option<OfferError> {
    if function.socket == other.socket {
        return Some(OfferError::SocketTaken(function.socket.clone()));
    }
    let id = function.function.id.as_ref()?;
    (other.function.id.as_ref() == Some(id)).then(|| OfferError::IdTaken(id.clone()))
}

fn cannot_offer(declared: &DeclaredFunction, source: OfferError) -> ChangeError {
    ChangeError::Function {
        socket: declared.function.socket.clone(),
        source,
    }
}

/// Returns the path with which a file is named the same way by all. A file that does not exist is reported when it is
/// opened.
fn resolved(path: &DrivePath) -> DrivePath {
    match path {
        DrivePath::File(file) => {
            DrivePath::File(std::fs::canonicalize(file).unwrap_or_else(|_| file.clone()))
        }
        other => other.clone(),
    }
}

/// Looks up the owner of a socket.
fn access(mode: Option<u32>, owner: Option<&SocketOwner>) -> Result<SocketAccess, OfferError> {
    let find = |kind, name: Option<&String>, find: &dyn Fn(&str) -> Option<u32>| {
        let Some(name) = name else {
            return Ok(None);
        };
        let number = name.parse().ok().or_else(|| find(name));
        let no_owner = || OfferError::NoOwner {
            kind,
            name: name.clone(),
        };
        number.map(Some).ok_or_else(no_owner)
    };
    let user = |name: &str| Some(User::from_name(name).ok()??.uid.as_raw());
    let group = |name: &str| Some(Group::from_name(name).ok()??.gid.as_raw());
    let owner_user = owner.and_then(|owner| owner.user.as_ref());
    let owner_group = owner.and_then(|owner| owner.group.as_ref());
    Ok(SocketAccess {
        mode: mode.unwrap_or(SocketAccess::default().mode),
        user: find("user", owner_user, &user)?,
        group: find("group", owner_group, &group)?,
    })
}

//! Hosts with physical drives, and functions on them: setup and final checks of all tests.

use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nvme_guest::threads::ThreadSpawner;
use nvme_lease::Ledger;
use nvme_mpt::Drive;
use nvme_mpt::drive::DriveIncidents;
use nvme_mpt_tests::drive::{ModelDrive, NamespaceOptions, Options};
use nvme_mpt_vmm::drives::DrivePath;
use nvme_vfio::{ControllerError, ControllerOptions, VfioController};

pub(crate) use crate::function::*;

/// Command deadline in tests of commands that exceed the deadline.
pub(crate) const SHORT: Duration = Duration::from_millis(300);

/// Command deadline in all other tests: the machine may be busy, or pause for a minute.
pub(crate) const LONG: Duration = Duration::from_secs(600);

/// CAP.TO of drives that do not become ready, in units of 500 ms.
pub(crate) const READY_TIMEOUT: u8 = 6;

/// A drive that is in use, and the objects that its functions share.
pub(crate) struct Host {
    host: crate::function::Host,
    /// Model of the drive.
    pub(crate) model: Arc<ModelDrive>,
}

impl Deref for Host {
    type Target = crate::function::Host;

    fn deref(&self) -> &Self::Target {
        &self.host
    }
}

/// Opens a drive.
pub(crate) fn open(
    model: &Arc<ModelDrive>,
    deadline: Duration,
) -> Result<Arc<Drive>, ControllerError> {
    let options = ControllerOptions {
        command_timeout: deadline,
        ..ControllerOptions::default()
    };
    open_with(model, options)
}

/// Opens a drive with controller options.
pub(crate) fn open_with(
    model: &Arc<ModelDrive>,
    options: ControllerOptions,
) -> Result<Arc<Drive>, ControllerError> {
    let controller = VfioController::open(model.clone(), options, &ThreadSpawner::default())?;
    let path = "0000:01:00.0";
    Ok(Drive::new(path, controller, None).expect("a namespace"))
}

impl Host {
    /// Creates a host for tests that run on other kinds of drives too. They do not call [`Self::finish`], so the model checks
    /// the host's behaviour when the drive is released.
    pub(crate) fn new(path: &str, lba_size: u32) -> Self {
        let Ok(DrivePath::Memory(bytes)) = path.parse() else {
            panic!("{path} says no size");
        };
        let options = Options {
            namespaces: vec![NamespaceOptions::new(1, bytes, lba_size)],
            check_on_release: true,
            ..Options::default()
        };
        Self::with(options, LONG)
    }

    /// Creates a host whose drive has this command deadline.
    pub(crate) fn with(options: Options, deadline: Duration) -> Self {
        let controller = ControllerOptions {
            command_timeout: deadline,
            ..ControllerOptions::default()
        };
        Self::with_controller(options, controller)
    }

    /// Creates a host with controller options.
    pub(crate) fn with_controller(options: Options, controller: ControllerOptions) -> Self {
        let mut attempts = 0;
        let (model, drive) = loop {
            let model = ModelDrive::start(options.clone());
            attempts += 1;
            match open_with(&model, controller) {
                Ok(drive) => break (model, drive),
                // The drive's thread may also be preempted for as long as this deadline.
                Err(ControllerError::StateTimeout { .. })
                    if options.timeout <= READY_TIMEOUT && attempts < 3 => {}
                Err(error) => panic!("{error}"),
            }
        };
        Self::from_drive(drive, model)
    }

    /// Creates a host for an open drive.
    pub(crate) fn from_drive(drive: Arc<Drive>, model: Arc<ModelDrive>) -> Self {
        Self {
            host: crate::function::Host::from_drive(drive),
            model,
        }
    }

    /// Replaces the ledger by one in a directory.
    pub(crate) fn with_ledger(mut self, dir: &Path) -> Self {
        self.host.ledger = Ledger::open(dir);
        self
    }

    /// Creates a host with another drive on the same pollers.
    pub(crate) fn with_another_drive(&self, options: Options, deadline: Duration) -> Self {
        let mut other = Self::with(options, deadline);
        other.host.pollers = self.host.pollers.clone();
        other
    }

    /// Returns the incidents of the drive so far.
    pub(crate) fn incidents(&self) -> DriveIncidents {
        self.drive.controller().incidents()
    }

    /// Releases the drive as its last user, and checks the host's behaviour.
    #[track_caller]
    pub(crate) fn finish(self) {
        let Self { host, model } = self;
        drop(host);
        // A poller may hold the last reference to the drive.
        wait_for("the drive's release", || model.is_released());
        if let Err(message) = model.check_host() {
            panic!("{message}");
        }
        assert!(!model.is_enabled(), "the drive was given back enabled");
        wait_for("the memory to be given back", || {
            model.model_iommu().mapped_bytes() == 0
        });
    }
}

/// Waits until the pollers have handled all requests: each poller with a queue has slept twice.
#[track_caller]
pub(crate) fn wait_for_pollers(host: &Host) {
    for before in host.pollers() {
        wait_for("a poller's look at its mail", || {
            let now = host.pollers();
            let mut same = now.iter().filter(|now| now.name == before.name);
            same.all(|now| now.queues == 0 || now.parks >= before.parks + 2)
        });
    }
}

//! Parsed and checked options of a function.

use std::time::Duration;

use nvme_guest::adaptive::{AdaptivePolicies, PolicyChoice};
use nvme_guest::rate_limit::RateLimit;
use nvme_guest::{DoorbellMode, DoorbellStride, MemoryKinds};
use nvme_lease::PreviousDataPolicy;
use nvme_lease::range::{ByteRange, ByteSize};
use nvme_models::{DriveProfile, ProfileSize};
use nvme_mpt::BackendOptions;
use nvme_mpt::poller::{PollerIdleMode, PollerSharing};

use crate::drives::{DriveOptions, DrivePath};

use super::error::OptionError;

/// Options of an NVMe function.
#[derive(Clone, Debug, PartialEq)]
pub struct FunctionOptions {
    /// Path of the drive.
    pub path: DrivePath,
    /// Options of the drive, without the [adaptive policies](Self::drive_options).
    pub drive: DriveOptions,
    /// Range of the drive's bytes that the guest sees; the whole drive if not given.
    pub range: Option<ByteRange>,
    /// Minimum size of a lease that is allocated anywhere on the drive; `None` for a lease with a fixed range.
    pub size: Option<ByteSize>,
    /// Unit of which the size of each extent of a lease with `size` is a multiple. If not given, the drive's default unit is
    /// used.
    pub unit: Option<ByteSize>,
    /// Options that the function's back end follows.
    pub backend: BackendOptions,
    /// Number of the physical drive's I/O queue pairs to reserve for the function, at most [`Self::queue_pairs`].
    pub reserve: u16,
    /// Name of the function and of its lease.
    pub id: Option<String>,
    /// Policy for data that another lease id left in the leased bytes.
    pub data: PreviousDataPolicy,
    /// True if the leased bytes may begin with a disk image header.
    pub is_raw: bool,
    /// Maximum time that a function in a VMM waits for a new drive server after the old one has ended; unlimited if not given.
    pub reconnect: Option<Duration>,
}

/// Reason for which the option `weight` does not apply to a software drive, for error messages.
pub(super) const NO_WEIGHT_REASON: &str =
    "only a physical drive, as in path=0000:01:00.0, has queue pairs that guests share";

/// Refuses a bandwidth limit that is too low for guest drivers.
pub(super) fn check_bandwidth(limit: Option<RateLimit>) -> Result<(), OptionError> {
    let Some(limit) = limit else {
        return Ok(());
    };
    limit.check_bandwidth().map_err(|error| OptionError::Value {
        key: "bandwidth",
        value: ByteSize(limit.per_second.get()).to_string(),
        source: error.into(),
    })
}

impl FunctionOptions {
    /// Returns the number of I/O queue pairs that the guest gets: those that the options ask for, or fewer if the function
    /// offers a Doorbell Buffer.
    #[must_use]
    pub fn queue_pairs(&self) -> u16 {
        self.backend.bounded_queue_pairs()
    }

    /// Returns warnings about options that common guest drivers handle badly, one sentence each, for the operator.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let mut cautions = Vec::new();
        let (requested, pairs) = (self.backend.queue_pairs, self.queue_pairs());
        if pairs < requested {
            let bytes = 4
                << self
                    .backend
                    .doorbell_stride
                    .dstrd(self.backend.doorbells, pairs);
            let narrower = match self.backend.doorbell_stride {
                DoorbellStride::Bytes64 => ", or doorbell-stride=4",
                DoorbellStride::Widest | DoorbellStride::Bytes4 => "",
            };
            cautions.push(format!(
                "{pairs} of {requested} I/O queue pairs remain, as its Doorbell Buffer holds no more, {bytes} bytes \
                 apart; use doorbells=mapped or trap{narrower}"
            ));
        }
        if pairs == 1 {
            let caution = "UEFI firmware (OVMF) does not find the drive, as its driver creates two I/O queue pairs; use queues=2 or more";
            cautions.push(caution.to_owned());
        }
        if let Some(DriveProfile::Zns(zones)) = self.drive.profile.as_deref()
            && let ProfileSize(size) = zones.zone_size
            && !size.is_power_of_two()
        {
            cautions.push(format!(
                "Linux makes no disk of it, as it only supports zones of a power of two, and these have {}; use such \
                 a zone_size for guests with Linux",
                ByteSize(size)
            ));
        }
        if let Some(Err(error)) = self.backend.rates.bandwidth.map(RateLimit::check_bandwidth) {
            cautions.push(error.to_string());
        }
        cautions
    }

    /// Refuses limits that are too low for drivers. Only call this for a new function: an existing function keeps its limits.
    ///
    /// # Errors
    /// [`OptionError::Value`].
    pub fn check_rates(&self) -> Result<(), OptionError> {
        check_bandwidth(self.backend.rates.bandwidth)
    }

    /// Returns the options with which the function opens its drive.
    #[must_use]
    pub fn drive_options(&self) -> DriveOptions {
        DriveOptions {
            adaptive: self.backend.adaptive.for_drive(),
            ..self.drive.clone()
        }
    }

    /// Returns the options of a function on the drive at `path`: all others have their defaults.
    #[must_use]
    pub fn new(path: DrivePath) -> Self {
        Self {
            path,
            drive: DriveOptions::default(),
            range: None,
            size: None,
            unit: None,
            backend: BackendOptions::default(),
            reserve: 0,
            id: None,
            data: PreviousDataPolicy::default(),
            is_raw: false,
            reconnect: None,
        }
    }

    /// Refuses options that contradict each other, and adaptive policies that the kind of drive does not have.
    pub(super) fn check(&self) -> Result<(), OptionError> {
        if self.backend.memory == MemoryKinds::Any
            && !matches!(self.path, DrivePath::Pci(_))
            && self.backend.poll.sharing != PollerSharing::Dedicated
        {
            return Err(OptionError::Needs {
                key: "memory",
                value: self.backend.memory.to_string(),
                other: "poll=dedicated",
                why: "page faults in such memory may stop its pollers",
            });
        }
        if self.backend.poll.idle_mode == PollerIdleMode::Event
            && self.backend.doorbells == DoorbellMode::Mapped
        {
            return Err(OptionError::Needs {
                key: "doorbells",
                value: self.backend.doorbells.to_string(),
                other: "a poller that polls: poll=shared or dedicated without :event",
                why: "a guest's store to a mapped doorbell does not wake a poller",
            });
        }
        self.check_size()?;
        self.check_policies()?;
        match self.queue_pairs() {
            pairs if self.reserve > pairs => Err(OptionError::Value {
                key: "reserve",
                value: self.reserve.to_string(),
                source: format!(
                    "The function has {pairs} I/O queue pairs: reserve at most that, or raise queues="
                )
                .into(),
            }),
            _ => Ok(()),
        }
    }

    /// Refuses fixed adaptive policies that the kind of drive does not have.
    fn check_policies(&self) -> Result<(), OptionError> {
        let AdaptivePolicies {
            governor,
            budget,
            slices,
            ..
        } = self.backend.adaptive;
        let is_sliced = matches!(self.path, DrivePath::File(_)) && !self.is_key_value();
        let is_physical = matches!(self.path, DrivePath::Pci(_));
        let why_sliced = "only the blocks of a file or block device are deallocated in slices";
        let why_physical = "only a physical drive has queue pairs that guests share, and an IOMMU";
        let policies = [
            ("fixed=slices", slices, is_sliced, why_sliced),
            ("fixed=governor", governor, is_physical, why_physical),
            ("fixed=budget", budget, is_physical, why_physical),
        ];
        let mut policies = policies.into_iter();
        let refused =
            policies.find(|(_, choice, applies, _)| *choice == PolicyChoice::Fixed && !applies);
        match refused {
            None => Ok(()),
            Some((key, _, _, why)) => Err(OptionError::NotApplicable {
                key,
                path: self.path.clone(),
                why,
            }),
        }
    }

    fn check_size(&self) -> Result<(), OptionError> {
        let Some(size) = self.size else {
            return match self.unit {
                None => Ok(()),
                Some(unit) => Err(OptionError::Needs {
                    key: "unit",
                    value: unit.to_string(),
                    other: "size=",
                    why: "a range is not divided into units",
                }),
            };
        };
        let requires = |other, why| {
            Err(OptionError::Needs {
                key: "size",
                value: size.to_string(),
                other,
                why,
            })
        };
        if self.range.is_some() {
            return Err(OptionError::Conflict {
                key: "range",
                other: "size",
                why: "a lease has a fixed range or a size",
            });
        }
        if self.data == PreviousDataPolicy::Kept {
            return Err(OptionError::Conflict {
                key: "size",
                other: "data=keep",
                why: "data is taken over with its range; use range= instead of size=",
            });
        }
        match &self.id {
            None => requires(
                "lease= (or id= on a server)",
                "only its name identifies the lease at the next start",
            ),
            Some(_) => Ok(()),
        }
    }

    /// Returns whether the drive pins the guest's memory. If so, the VMM must not free guest memory that is mapped for the
    /// function: it must use no balloon and no free page reporting, and may use virtio-mem only if it unmaps memory before
    /// freeing it.
    #[must_use]
    pub fn pins_memory(&self) -> bool {
        matches!(self.path, DrivePath::Pci(_))
    }

    /// Returns whether the drive is a key-value drive.
    pub(crate) fn is_key_value(&self) -> bool {
        matches!(self.drive.profile.as_deref(), Some(DriveProfile::Kv(_)))
    }
}

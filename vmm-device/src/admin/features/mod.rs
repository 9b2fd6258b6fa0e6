//! Get Features and Set Features (Base 2.0, sections 5.15, 5.27 and 5.27.1; NVM 1.0, section 4.1.3). No feature is saveable, so
//! Get Features returns the default as the saved value.

mod clock;
mod state;
#[cfg(test)]
mod tests;
mod value_masks;

use std::sync::Arc;

use nvme_guest::{LeasedNamespace, backend::CoalescingConfig};
use nvme_mpt_memory::deadline::WaitClock;
use nvme_spec::{
    feature::{
        Arbitration, AsyncEventConfiguration, ErrorRecovery, FeatureCapabilities, FeatureId,
        FeatureSelect, HostBehaviorSupport, InterruptCoalescing, InterruptVectorConfiguration,
        LbaRangeAttributes, LbaRangeTypeEntry, NumberOfQueues, PowerManagement,
        TemperatureThreshold, ThresholdType, Timestamp, VolatileWriteCache, WriteAtomicity,
    },
    ids::Nsid,
    status::Status,
};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use self::clock::TimestampClock;
use super::{
    failure::require, identify::ARBITRATION_BURST, identify_subject::notices,
    io_queues::IoQueueAllocation,
};

/// Mask of the I/O Command Set Combination Index in dword 11 of the I/O Command Set Profile.
const COMBINATION_INDEX_MASK: u32 = 0x1FF;

/// Values on which Get Features and Set Features depend, and which [`ControllerFeatures`] does not have.
#[derive(Clone, Copy, Debug)]
pub(super) struct FeatureContext<'a> {
    pub(super) namespace: &'a LeasedNamespace,
    /// Present size of the namespace in logical blocks.
    pub(super) blocks: u64,
    pub(super) volatile_write_cache: bool,
    pub(super) queue_pairs_max: u16,
    /// Default Over Temperature Threshold, in kelvins.
    pub(super) default_threshold: u16,
    /// Number of interrupt vectors of the function.
    pub(super) vectors: usize,
    /// True while the guest has I/O queues.
    pub(super) io_queues_exist: bool,
}

/// Result of Get Features: dword 0 of the completion, and the data of the feature if it has any.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct FeatureValue {
    pub(super) dw0: u32,
    pub(super) data: Vec<u8>,
}

/// Values of the features of one controller.
#[derive(Clone, Debug)]
pub(super) struct ControllerFeatures {
    arbitration: Arbitration,
    power: PowerManagement,
    /// Over Temperature Threshold that the guest has set; `None` for the default.
    over_temperature: Option<u16>,
    under_temperature: u16,
    error_recovery: ErrorRecovery,
    /// Numbers of I/O queues that the guest was granted; `None` if it has not set Number of Queues since the last reset.
    queues: Option<IoQueueAllocation>,
    coalescing: InterruptCoalescing,
    /// Vectors for which the guest has set Coalescing Disable, one bit each.
    coalescing_disabled: u128,
    write_atomicity: WriteAtomicity,
    async_events: AsyncEventConfiguration,
    timestamp: TimestampClock,
    /// Clock by which the Timestamp advances.
    clock: Arc<dyn WaitClock>,
    /// Values of the fields ACRE, ETDAS and LBAFEE of Host Behavior Support.
    host_behavior: [u8; 3],
}

impl ControllerFeatures {
    /// Creates the values that the features have after a controller reset.
    pub(super) fn new(clock: &Arc<dyn WaitClock>) -> Self {
        Self {
            arbitration: Arbitration::default().with_ab(ARBITRATION_BURST),
            power: PowerManagement::default(),
            over_temperature: None,
            under_temperature: 0,
            error_recovery: ErrorRecovery::default(),
            queues: None,
            coalescing: InterruptCoalescing::default(),
            coalescing_disabled: 0,
            write_atomicity: WriteAtomicity::default(),
            async_events: AsyncEventConfiguration::default(),
            timestamp: TimestampClock::new(clock.now()),
            clock: clock.clone(),
            host_behavior: [0; 3],
        }
    }

    /// Returns the number of data bytes that Get Features and Set Features transfer for a feature.
    pub(super) fn data_length(fid: FeatureId) -> usize {
        match fid {
            FeatureId::LBA_RANGE_TYPE => {
                LbaRangeTypeEntry::ENTRIES * size_of::<LbaRangeTypeEntry>()
            }
            FeatureId::TIMESTAMP => size_of::<Timestamp>(),
            FeatureId::HOST_BEHAVIOR_SUPPORT => size_of::<HostBehaviorSupport>(),
            _ => 0,
        }
    }

    /// Returns the maximum numbers of queues that the guest may create.
    pub(super) fn allocated_queues(&self, context: &FeatureContext<'_>) -> IoQueueAllocation {
        let all = context.queue_pairs_max;
        self.queues.unwrap_or(IoQueueAllocation {
            submission: all,
            completion: all,
        })
    }

    /// Returns whether `temperature`, a Composite Temperature in kelvins, has reached the over or the under temperature
    /// threshold.
    pub(super) fn is_beyond_threshold(&self, temperature: u16, default_threshold: u16) -> bool {
        temperature >= self.over_temperature.unwrap_or(default_threshold)
            || temperature <= self.under_temperature
    }

    /// Returns which asynchronous events the host has enabled.
    pub(super) fn async_events(&self) -> AsyncEventConfiguration {
        self.async_events
    }

    /// Returns the interrupt coalescing that the host has set.
    pub(super) fn coalescing(&self) -> CoalescingConfig {
        CoalescingConfig {
            threshold_z: self.coalescing.thr_z(),
            time_100us: self.coalescing.time(),
            disabled: self.coalescing_disabled,
        }
    }

    /// Carries out Get Features (Base 2.0, section 5.15).
    pub(super) fn get(
        &self,
        fid: FeatureId,
        select: FeatureSelect,
        dword11: u32,
        nsid: Nsid,
        context: &FeatureContext<'_>,
    ) -> Result<FeatureValue, Status> {
        let capabilities = capabilities(fid, context).ok_or(Status::INVALID_FIELD)?;
        if select == FeatureSelect::SUPPORTED_CAPABILITIES {
            return Ok(FeatureValue {
                dw0: capabilities.0,
                data: Vec::new(),
            });
        }
        if capabilities.namespace_specific() && nsid != context.namespace.nsid {
            return Err(Status::INVALID_NAMESPACE_OR_FORMAT);
        }
        match select {
            FeatureSelect::CURRENT => self.current_value(fid, dword11, context),
            FeatureSelect::DEFAULT | FeatureSelect::SAVED => {
                Self::new(&self.clock).current_value(fid, dword11, context)
            }
            _ => Err(Status::INVALID_FIELD),
        }
    }

    fn current_value(
        &self,
        fid: FeatureId,
        dword11: u32,
        context: &FeatureContext<'_>,
    ) -> Result<FeatureValue, Status> {
        let dw0 = match fid {
            FeatureId::ARBITRATION => self.arbitration.0,
            FeatureId::POWER_MANAGEMENT => self.power.0,
            FeatureId::LBA_RANGE_TYPE => return Ok(lba_range_type(context.blocks)),
            FeatureId::TEMPERATURE_THRESHOLD => {
                self.temperature_threshold(TemperatureThreshold(dword11), context)?
            }
            FeatureId::ERROR_RECOVERY => self.error_recovery.0,
            FeatureId::VOLATILE_WRITE_CACHE => VolatileWriteCache::default().with_wce(true).0,
            FeatureId::NUMBER_OF_QUEUES => number_of_queues(self.allocated_queues(context)).0,
            FeatureId::INTERRUPT_COALESCING => self.coalescing.0,
            FeatureId::INTERRUPT_VECTOR_CONFIGURATION => {
                let vector = InterruptVectorConfiguration(dword11);
                require_vector(vector, context)?;
                let disabled = self.is_coalescing_disabled(usize::from(vector.iv()));
                InterruptVectorConfiguration::default()
                    .with_iv(vector.iv())
                    .with_cd(disabled)
                    .0
            }
            FeatureId::WRITE_ATOMICITY_NORMAL => self.write_atomicity.0,
            FeatureId::ASYNC_EVENT_CONFIGURATION => self.async_events.0,
            FeatureId::TIMESTAMP => {
                let data = self
                    .timestamp
                    .timestamp(self.clock.now())
                    .as_bytes()
                    .to_vec();
                return Ok(FeatureValue { dw0: 0, data });
            }
            FeatureId::HOST_BEHAVIOR_SUPPORT => {
                let mut data = vec![0; Self::data_length(fid)];
                data[..self.host_behavior.len()].copy_from_slice(&self.host_behavior);
                return Ok(FeatureValue { dw0: 0, data });
            }
            // The value is the only combination of command sets that CNS 1Ch lists.
            FeatureId::IO_COMMAND_SET_PROFILE => 0,
            _ => return Err(Status::INVALID_FIELD),
        };
        Ok(FeatureValue {
            dw0,
            data: Vec::new(),
        })
    }

    /// Carries out Set Features (Base 2.0, section 5.27), for which the caller has read `data`. Returns dword 0 of the
    /// completion.
    pub(super) fn set(
        &mut self,
        fid: FeatureId,
        dword11: u32,
        data: &[u8],
        context: &FeatureContext<'_>,
    ) -> Result<u32, Status> {
        match fid {
            FeatureId::ARBITRATION => {
                self.arbitration = value_masks::arbitration(dword11);
            }
            FeatureId::POWER_MANAGEMENT => {
                let value = PowerManagement(dword11);
                require(value.ps() == 0, Status::INVALID_FIELD)?;
                self.power = value_masks::power_management(dword11);
            }
            FeatureId::TEMPERATURE_THRESHOLD => {
                self.set_temperature_threshold(TemperatureThreshold(dword11))?;
            }
            FeatureId::ERROR_RECOVERY => {
                let value = ErrorRecovery(dword11);
                // DULBE must stay clear: Identify Namespace does not offer the error for deallocated blocks.
                require(!value.dulbe(), Status::INVALID_FIELD)?;
                self.error_recovery = value_masks::error_recovery(dword11);
            }
            FeatureId::VOLATILE_WRITE_CACHE => {
                // The cache cannot be turned off, since it belongs to the physical drive, which all leases share.
                let value = VolatileWriteCache(dword11);
                require(value.wce(), Status::FEATURE_NOT_CHANGEABLE)?;
            }
            FeatureId::NUMBER_OF_QUEUES => {
                return self.allocate_queues(NumberOfQueues(dword11), context);
            }
            FeatureId::INTERRUPT_COALESCING => {
                self.coalescing = value_masks::interrupt_coalescing(dword11);
            }
            FeatureId::INTERRUPT_VECTOR_CONFIGURATION => {
                let value = InterruptVectorConfiguration(dword11);
                require_vector(value, context)?;
                let bit = vector_bit(usize::from(value.iv()));
                self.coalescing_disabled &= !bit;
                self.coalescing_disabled |= if value.cd() { bit } else { 0 };
            }
            FeatureId::WRITE_ATOMICITY_NORMAL => {
                self.write_atomicity = value_masks::write_atomicity(dword11);
            }
            FeatureId::ASYNC_EVENT_CONFIGURATION => {
                self.async_events = value_masks::async_events(dword11, notices(context.namespace));
            }
            FeatureId::TIMESTAMP => {
                let (timestamp, _) =
                    Timestamp::read_from_prefix(data).map_err(|_| Status::DATA_TRANSFER_ERROR)?;
                self.timestamp =
                    TimestampClock::from_milliseconds(timestamp.milliseconds(), self.clock.now());
            }
            FeatureId::HOST_BEHAVIOR_SUPPORT => {
                let (value, _) = HostBehaviorSupport::read_from_prefix(data)
                    .map_err(|_| Status::DATA_TRANSFER_ERROR)?;
                let behavior = [value.acre, value.etdas, value.lbafee];
                require(
                    behavior.iter().all(|byte| *byte <= 1),
                    Status::INVALID_FIELD,
                )?;
                self.host_behavior = behavior;
            }
            FeatureId::IO_COMMAND_SET_PROFILE => {
                let index = dword11 & COMBINATION_INDEX_MASK;
                require(index == 0, Status::IO_COMMAND_SET_COMBINATION_REJECTED)?;
            }
            _ => return Err(Status::INVALID_FIELD),
        }
        Ok(0)
    }

    /// Sets Number of Queues (Base 2.0, section 5.27.1.5): grants at most the requested numbers.
    fn allocate_queues(
        &mut self,
        request: NumberOfQueues,
        context: &FeatureContext<'_>,
    ) -> Result<u32, Status> {
        let (submission, completion) = (request.nsq_z(), request.ncq_z());
        require(submission != NumberOfQueues::INVALID, Status::INVALID_FIELD)?;
        require(completion != NumberOfQueues::INVALID, Status::INVALID_FIELD)?;
        require(!context.io_queues_exist, Status::COMMAND_SEQUENCE_ERROR)?;
        let grant = |asked_z: u16| (asked_z + 1).min(context.queue_pairs_max);
        let allocated = IoQueueAllocation {
            submission: grant(submission),
            completion: grant(completion),
        };
        self.queues = Some(allocated);
        Ok(number_of_queues(allocated).0)
    }

    fn temperature_threshold(
        &self,
        selected: TemperatureThreshold,
        context: &FeatureContext<'_>,
    ) -> Result<u32, Status> {
        require(
            selected.tmpsel() == TemperatureThreshold::COMPOSITE,
            Status::INVALID_FIELD,
        )?;
        let threshold = match selected.thsel() {
            ThresholdType::OVER => self.over_temperature.unwrap_or(context.default_threshold),
            ThresholdType::UNDER => self.under_temperature,
            _ => return Err(Status::INVALID_FIELD),
        };
        Ok(TemperatureThreshold::default().with_tmpth(threshold).0)
    }

    fn set_temperature_threshold(&mut self, value: TemperatureThreshold) -> Result<(), Status> {
        let sensors = [TemperatureThreshold::COMPOSITE, TemperatureThreshold::ALL];
        require(sensors.contains(&value.tmpsel()), Status::INVALID_FIELD)?;
        match value.thsel() {
            ThresholdType::OVER => self.over_temperature = Some(value.tmpth()),
            ThresholdType::UNDER => self.under_temperature = value.tmpth(),
            _ => return Err(Status::INVALID_FIELD),
        }
        Ok(())
    }

    fn is_coalescing_disabled(&self, vector: usize) -> bool {
        self.coalescing_disabled & vector_bit(vector) != 0
    }
}

/// Checks that a guest may set a feature to a value (Base 2.0, section 5.27).
pub(super) fn check_set(
    fid: FeatureId,
    save: bool,
    nsid: Nsid,
    context: &FeatureContext<'_>,
) -> Result<(), Status> {
    let capabilities = capabilities(fid, context).ok_or(Status::INVALID_FIELD)?;
    require(!save, Status::FEATURE_NOT_SAVEABLE)?;
    let this = nsid == context.namespace.nsid;
    match (capabilities.namespace_specific(), nsid) {
        (true, _) if this => {}
        (true, Nsid::BROADCAST) | (false, Nsid::NONE | Nsid::BROADCAST) => {}
        (false, _) if this => return Err(Status::FEATURE_NOT_NAMESPACE_SPECIFIC),
        _ => return Err(Status::INVALID_NAMESPACE_OR_FORMAT),
    }
    // For the volatile write cache, the value decides: a command may leave the cache on, but not turn it off.
    let changeable = capabilities.changeable() || fid == FeatureId::VOLATILE_WRITE_CACHE;
    require(changeable, Status::FEATURE_NOT_CHANGEABLE)
}

/// Returns the capabilities of a feature; `None` if it is not supported.
pub(super) fn capabilities(
    fid: FeatureId,
    context: &FeatureContext<'_>,
) -> Option<FeatureCapabilities> {
    let capabilities = FeatureCapabilities::default();
    let changeable = capabilities.with_changeable(true);
    match fid {
        FeatureId::ARBITRATION
        | FeatureId::POWER_MANAGEMENT
        | FeatureId::TEMPERATURE_THRESHOLD
        | FeatureId::NUMBER_OF_QUEUES
        | FeatureId::INTERRUPT_COALESCING
        | FeatureId::INTERRUPT_VECTOR_CONFIGURATION
        | FeatureId::WRITE_ATOMICITY_NORMAL
        | FeatureId::ASYNC_EVENT_CONFIGURATION
        | FeatureId::TIMESTAMP
        | FeatureId::HOST_BEHAVIOR_SUPPORT
        | FeatureId::IO_COMMAND_SET_PROFILE => Some(changeable),
        FeatureId::ERROR_RECOVERY => Some(changeable.with_namespace_specific(true)),
        FeatureId::LBA_RANGE_TYPE => Some(capabilities.with_namespace_specific(true)),
        FeatureId::VOLATILE_WRITE_CACHE => context.volatile_write_cache.then_some(capabilities),
        _ => None,
    }
}

fn number_of_queues(allocated: IoQueueAllocation) -> NumberOfQueues {
    NumberOfQueues::default()
        .with_nsq_z(allocated.submission.saturating_sub(1))
        .with_ncq_z(allocated.completion.saturating_sub(1))
}

/// Returns the value of LBA Range Type (NVM 1.0, section 4.1.3.1): one range for the whole namespace.
fn lba_range_type(blocks: u64) -> FeatureValue {
    let mut range = LbaRangeTypeEntry::new_zeroed();
    range.attributes = LbaRangeAttributes::default().with_overwritable(true);
    range.nlb_z = blocks.saturating_sub(1);
    let mut data = vec![0; ControllerFeatures::data_length(FeatureId::LBA_RANGE_TYPE)];
    data[..size_of::<LbaRangeTypeEntry>()].copy_from_slice(range.as_bytes());
    FeatureValue { dw0: 0, data }
}

fn require_vector(
    value: InterruptVectorConfiguration,
    context: &FeatureContext<'_>,
) -> Result<(), Status> {
    require(
        usize::from(value.iv()) < context.vectors,
        Status::INVALID_FIELD,
    )
}

/// Returns the bit that stands for a vector in `coalescing_disabled`. There are at most 128 vectors.
fn vector_bit(vector: usize) -> u128 {
    1 << (vector % 128)
}

//! Get Features and Set Features (Base 2.0, sections 5.15, 5.27 and 5.27.1; NVM 1.0, section
//! 4.1.3). No feature is saveable, so what is saved of one is its default.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use nvme_mpt::{
    Attachment, InterruptVector, LeasedNamespace,
    spec::{
        feature::{
            Arbitration, AsyncEventConfiguration, ErrorRecovery, FeatureCapabilities, FeatureId,
            FeatureSelect, HostBehaviorSupport, InterruptCoalescing, InterruptVectorConfiguration,
            LbaRange, LbaRangeAttributes, NumberOfQueues, PowerManagement, TemperatureThreshold,
            ThresholdType, Timestamp, TimestampAttributes, TimestampOrigin, VolatileWriteCache,
            WriteAtomicity,
        },
        ids::Nsid,
        log::CriticalWarning,
        status::Status,
    },
};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::{identify::ARBITRATION_BURST, io_queues::Allocated};

/// Composite Temperature, in kelvins: 37 °C. There is no sensor behind it.
pub(super) const COMPOSITE_TEMPERATURE: u16 = 310;
/// `WCTEMP`, and the default of the over temperature threshold: 70 °C.
pub(super) const WARNING_TEMPERATURE: u16 = 343;
/// `CCTEMP`: 100 °C.
pub(super) const CRITICAL_TEMPERATURE: u16 = 373;

/// I/O Command Set Combination Index, of the I/O Command Set Profile: bits of dword 11.
const COMBINATION_INDEX: u32 = 0x1FF;

/// What features are about, besides the values that they hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct FeatureContext<'a> {
    pub(super) namespace: &'a LeasedNamespace,
    pub(super) volatile_write_cache: bool,
    pub(super) queue_pairs_max: u16,
    pub(super) vectors: &'a [Arc<InterruptVector>],
    /// Whether I/O queues were created and not deleted since.
    pub(super) io_queues_exist: bool,
}

/// What Get Features returns: dword 0 of the completion, and data if the feature has any.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct FeatureValue {
    pub(super) dw0: u32,
    pub(super) data: Vec<u8>,
}

/// Values of the features of one controller.
#[derive(Clone, Debug)]
pub(super) struct Features {
    arbitration: Arbitration,
    power: PowerManagement,
    over_temperature: u16,
    under_temperature: u16,
    error_recovery: ErrorRecovery,
    /// What Number of Queues allocated, if it was asked to.
    queues: Option<Allocated>,
    coalescing: InterruptCoalescing,
    /// Vectors with Coalescing Disable, as bits.
    coalescing_disabled: u128,
    write_atomicity: WriteAtomicity,
    async_events: AsyncEventConfiguration,
    timestamp: Clock,
    /// ACRE, ETDAS and LBAFEE.
    host_behavior: [u8; 3],
}

impl Default for Features {
    fn default() -> Self {
        Self {
            arbitration: Arbitration::default().with_ab(ARBITRATION_BURST),
            power: PowerManagement::default(),
            over_temperature: WARNING_TEMPERATURE,
            under_temperature: 0,
            error_recovery: ErrorRecovery::default(),
            queues: None,
            coalescing: InterruptCoalescing::default(),
            coalescing_disabled: 0,
            write_atomicity: WriteAtomicity::default(),
            async_events: AsyncEventConfiguration::default(),
            timestamp: Clock::default(),
            host_behavior: [0; 3],
        }
    }
}

impl Features {
    /// Bytes of data that Get Features of a feature returns, or Set Features of it takes.
    pub(super) fn data_length(fid: FeatureId) -> usize {
        match fid {
            FeatureId::LBA_RANGE_TYPE => LbaRange::ENTRIES * size_of::<LbaRange>(),
            FeatureId::TIMESTAMP => size_of::<Timestamp>(),
            FeatureId::HOST_BEHAVIOR_SUPPORT => size_of::<HostBehaviorSupport>(),
            _ => 0,
        }
    }

    /// Queues that a host may create.
    pub(super) fn allocated(&self, context: &FeatureContext<'_>) -> Allocated {
        let all = context.queue_pairs_max;
        self.queues.unwrap_or(Allocated {
            submission: all,
            completion: all,
        })
    }

    /// Whether a temperature is beyond a threshold.
    pub(super) fn critical_warning(&self) -> CriticalWarning {
        let beyond = COMPOSITE_TEMPERATURE >= self.over_temperature
            || COMPOSITE_TEMPERATURE <= self.under_temperature;
        CriticalWarning::default().with_temperature(beyond)
    }

    /// Whether the host wants to hear of such warnings.
    pub(super) fn reports(&self, warning: CriticalWarning) -> bool {
        self.async_events.critical_warnings().0 & warning.0 != 0
    }

    /// Hands on what others act upon.
    pub(super) fn apply(&self, attachment: &Attachment, vectors: &[Arc<InterruptVector>]) {
        attachment.set_interrupt_coalescing(self.coalescing.thr_z(), self.coalescing.time());
        for (number, vector) in vectors.iter().enumerate() {
            vector.set_coalescing_disabled(self.is_coalescing_disabled(number));
        }
    }

    /// Get Features (Base 2.0, section 5.15).
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
            FeatureSelect::CURRENT => self.value(fid, dword11, context),
            FeatureSelect::DEFAULT | FeatureSelect::SAVED => {
                Self::default().value(fid, dword11, context)
            }
            _ => Err(Status::INVALID_FIELD),
        }
    }

    fn value(
        &self,
        fid: FeatureId,
        dword11: u32,
        context: &FeatureContext<'_>,
    ) -> Result<FeatureValue, Status> {
        let dw0 = match fid {
            FeatureId::ARBITRATION => self.arbitration.0,
            FeatureId::POWER_MANAGEMENT => self.power.0,
            FeatureId::LBA_RANGE_TYPE => return Ok(lba_range_type(context.namespace)),
            FeatureId::TEMPERATURE_THRESHOLD => {
                self.temperature_threshold(TemperatureThreshold(dword11))?
            }
            FeatureId::ERROR_RECOVERY => self.error_recovery.0,
            FeatureId::VOLATILE_WRITE_CACHE => VolatileWriteCache::default().with_wce(true).0,
            FeatureId::NUMBER_OF_QUEUES => number_of_queues(self.allocated(context)).0,
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
                let data = self.timestamp.now().as_bytes().to_vec();
                return Ok(FeatureValue { dw0: 0, data });
            }
            FeatureId::HOST_BEHAVIOR_SUPPORT => {
                let mut data = vec![0; Self::data_length(fid)];
                data[..self.host_behavior.len()].copy_from_slice(&self.host_behavior);
                return Ok(FeatureValue { dw0: 0, data });
            }
            // The one combination of command sets that CNS 1Ch lists.
            FeatureId::IO_COMMAND_SET_PROFILE => 0,
            _ => return Err(Status::INVALID_FIELD),
        };
        Ok(FeatureValue {
            dw0,
            data: Vec::new(),
        })
    }

    /// Set Features (Base 2.0, section 5.27), except that `data` was fetched. Returns dword 0 of
    /// the completion.
    pub(super) fn set(
        &mut self,
        fid: FeatureId,
        dword11: u32,
        data: &[u8],
        context: &FeatureContext<'_>,
    ) -> Result<u32, Status> {
        match fid {
            FeatureId::ARBITRATION => {
                let Arbitration(value) = Arbitration(dword11);
                // Bits 7:3 are reserved.
                self.arbitration = Arbitration(value & 0xFFFF_FF07);
            }
            FeatureId::POWER_MANAGEMENT => {
                let value = PowerManagement(dword11);
                require(value.ps() == 0, Status::INVALID_FIELD)?;
                self.power = PowerManagement::default().with_wh(value.wh());
            }
            FeatureId::TEMPERATURE_THRESHOLD => {
                self.set_temperature_threshold(TemperatureThreshold(dword11))?;
            }
            FeatureId::ERROR_RECOVERY => {
                let value = ErrorRecovery(dword11);
                // Identify Namespace does not offer the error for deallocated blocks.
                require(!value.dulbe(), Status::INVALID_FIELD)?;
                self.error_recovery = ErrorRecovery::default().with_tler(value.tler());
            }
            FeatureId::VOLATILE_WRITE_CACHE => {
                // The cache is the host controller's, shared by all that lease from it.
                let value = VolatileWriteCache(dword11);
                require(value.wce(), Status::FEATURE_NOT_CHANGEABLE)?;
            }
            FeatureId::NUMBER_OF_QUEUES => {
                return self.allocate_queues(NumberOfQueues(dword11), context);
            }
            FeatureId::INTERRUPT_COALESCING => {
                let value = InterruptCoalescing(dword11);
                self.coalescing = InterruptCoalescing::default()
                    .with_thr_z(value.thr_z())
                    .with_time(value.time());
            }
            FeatureId::INTERRUPT_VECTOR_CONFIGURATION => {
                let value = InterruptVectorConfiguration(dword11);
                require_vector(value, context)?;
                let bit = vector_bit(usize::from(value.iv()));
                self.coalescing_disabled &= !bit;
                self.coalescing_disabled |= if value.cd() { bit } else { 0 };
            }
            FeatureId::WRITE_ATOMICITY_NORMAL => {
                let value = WriteAtomicity(dword11);
                self.write_atomicity = WriteAtomicity::default().with_dn(value.dn());
            }
            FeatureId::ASYNC_EVENT_CONFIGURATION => {
                // Notices that OAES does not offer stay off; a host reads what it got.
                let value = AsyncEventConfiguration(dword11);
                self.async_events = AsyncEventConfiguration::default()
                    .with_critical_warnings(value.critical_warnings());
            }
            FeatureId::TIMESTAMP => {
                let (timestamp, _) =
                    Timestamp::read_from_prefix(data).map_err(|_| Status::DATA_TRANSFER_ERROR)?;
                self.timestamp = Clock::set_to(timestamp.milliseconds());
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
                let index = dword11 & COMBINATION_INDEX;
                require(index == 0, Status::IO_COMMAND_SET_COMBINATION_REJECTED)?;
            }
            _ => return Err(Status::INVALID_FIELD),
        }
        Ok(0)
    }

    /// Number of Queues (Base 2.0, section 5.27.1.5): what is asked for, or less.
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
        let allocated = Allocated {
            submission: grant(submission),
            completion: grant(completion),
        };
        self.queues = Some(allocated);
        Ok(number_of_queues(allocated).0)
    }

    fn temperature_threshold(&self, selected: TemperatureThreshold) -> Result<u32, Status> {
        require(
            selected.tmpsel() == TemperatureThreshold::COMPOSITE,
            Status::INVALID_FIELD,
        )?;
        let threshold = match selected.thsel() {
            ThresholdType::OVER => self.over_temperature,
            ThresholdType::UNDER => self.under_temperature,
            _ => return Err(Status::INVALID_FIELD),
        };
        Ok(TemperatureThreshold::default().with_tmpth(threshold).0)
    }

    fn set_temperature_threshold(&mut self, value: TemperatureThreshold) -> Result<(), Status> {
        let sensors = [TemperatureThreshold::COMPOSITE, TemperatureThreshold::ALL];
        require(sensors.contains(&value.tmpsel()), Status::INVALID_FIELD)?;
        match value.thsel() {
            ThresholdType::OVER => self.over_temperature = value.tmpth(),
            ThresholdType::UNDER => self.under_temperature = value.tmpth(),
            _ => return Err(Status::INVALID_FIELD),
        }
        Ok(())
    }

    fn is_coalescing_disabled(&self, vector: usize) -> bool {
        self.coalescing_disabled & vector_bit(vector) != 0
    }
}

/// Whether Set Features may go on with a feature (Base 2.0, section 5.27).
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
    // What turns the cache off is told apart from what leaves it on.
    let changeable = capabilities.changeable() || fid == FeatureId::VOLATILE_WRITE_CACHE;
    require(changeable, Status::FEATURE_NOT_CHANGEABLE)
}

/// What can be done with a feature, if there is one of that identifier.
fn capabilities(fid: FeatureId, context: &FeatureContext<'_>) -> Option<FeatureCapabilities> {
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

fn number_of_queues(allocated: Allocated) -> NumberOfQueues {
    NumberOfQueues::default()
        .with_nsq_z(allocated.submission.saturating_sub(1))
        .with_ncq_z(allocated.completion.saturating_sub(1))
}

/// LBA Range Type (NVM 1.0, section 4.1.3.1): one range, which is the namespace.
fn lba_range_type(namespace: &LeasedNamespace) -> FeatureValue {
    let mut range = LbaRange::new_zeroed();
    range.attributes = LbaRangeAttributes::default().with_overwritable(true);
    range.nlb_z = namespace.blocks.saturating_sub(1);
    let mut data = vec![0; Features::data_length(FeatureId::LBA_RANGE_TYPE)];
    data[..size_of::<LbaRange>()].copy_from_slice(range.as_bytes());
    FeatureValue { dw0: 0, data }
}

fn require(condition: bool, otherwise: Status) -> Result<(), Status> {
    if condition { Ok(()) } else { Err(otherwise) }
}

fn require_vector(
    value: InterruptVectorConfiguration,
    context: &FeatureContext<'_>,
) -> Result<(), Status> {
    require(
        usize::from(value.iv()) < context.vectors.len(),
        Status::INVALID_FIELD,
    )
}

/// There are at most 128 vectors.
fn vector_bit(vector: usize) -> u128 {
    1 << (vector % 128)
}

/// The clock behind the Timestamp feature. It runs on while the controller is disabled.
#[derive(Clone, Copy, Debug)]
struct Clock {
    /// What it showed at `since`, in milliseconds.
    start: u64,
    since: Instant,
    origin: TimestampOrigin,
}

impl Default for Clock {
    /// As a reset of the controller leaves it: it counts from zero.
    fn default() -> Self {
        Self {
            start: 0,
            since: Instant::now(),
            origin: TimestampOrigin::CLEARED,
        }
    }
}

impl Clock {
    fn set_to(milliseconds: u64) -> Self {
        Self {
            start: milliseconds,
            since: Instant::now(),
            origin: TimestampOrigin::SET_FEATURES,
        }
    }

    fn now(&self) -> Timestamp {
        self.at(self.since.elapsed())
    }

    fn at(&self, elapsed: Duration) -> Timestamp {
        let elapsed = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
        let attributes = TimestampAttributes::default().with_origin(self.origin);
        Timestamp::new(self.start.wrapping_add(elapsed), attributes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VECTORS: usize = 5;

    struct Fixture {
        features: Features,
        namespace: LeasedNamespace,
        vectors: Vec<Arc<InterruptVector>>,
        volatile_write_cache: bool,
        io_queues_exist: bool,
    }

    impl Fixture {
        fn new() -> Self {
            Self {
                features: Features::default(),
                namespace: crate::fixtures::namespace(),
                vectors: (0..VECTORS).map(|_| InterruptVector::new()).collect(),
                volatile_write_cache: true,
                io_queues_exist: false,
            }
        }

        fn context(&self) -> FeatureContext<'_> {
            FeatureContext {
                namespace: &self.namespace,
                volatile_write_cache: self.volatile_write_cache,
                queue_pairs_max: 4,
                vectors: &self.vectors,
                io_queues_exist: self.io_queues_exist,
            }
        }

        fn get(
            &self,
            fid: u8,
            select: u8,
            dword11: u32,
            nsid: u32,
        ) -> Result<FeatureValue, Status> {
            let (fid, select) = (FeatureId(fid), FeatureSelect(select));
            self.features
                .get(fid, select, dword11, Nsid(nsid), &self.context())
        }

        /// Dword 0 of what the feature is now.
        fn current(&self, fid: u8, dword11: u32) -> Result<u32, Status> {
            let nsid = if matches!(fid, 0x03 | 0x05) { 1 } else { 0 };
            self.get(fid, 0, dword11, nsid).map(|value| value.dw0)
        }

        fn set(&mut self, fid: u8, dword11: u32, data: &[u8]) -> Result<u32, Status> {
            let mut features = self.features.clone();
            let result = features.set(FeatureId(fid), dword11, data, &self.context());
            self.features = features;
            result
        }

        fn check_set(&self, fid: u8, save: bool, nsid: u32) -> Result<(), Status> {
            check_set(FeatureId(fid), save, Nsid(nsid), &self.context())
        }
    }

    /// All that there are.
    const FIDS: [u8; 14] = [
        0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, 0x09, 0x0A, 0x0B, 0x0E, 0x16, 0x19,
    ];

    #[test]
    fn defaults_are_what_is_there_at_first_and_what_is_saved() {
        let fixture = Fixture::new();
        for (fid, expected) in [
            (0x01, 0x0000_0006),
            (0x02, 0),
            (0x03, 0),
            (0x04, 343),
            (0x05, 0),
            (0x06, 1),
            (0x07, 0x0003_0003),
            (0x08, 0),
            (0x09, 0),
            (0x0A, 0),
            (0x0B, 0),
            (0x0E, 0),
            (0x16, 0),
            (0x19, 0),
        ] {
            for select in 0..=2 {
                let nsid = u32::from(matches!(fid, 0x03 | 0x05));
                let dw0 = fixture.get(fid, select, 0, nsid).map(|value| value.dw0);
                assert_eq!(dw0, Ok(expected), "feature {fid:#x}, select {select}");
            }
        }
    }

    #[test]
    fn capabilities_say_what_set_features_does() {
        let fixture = Fixture::new();
        for fid in 0..=u8::MAX {
            let expected = match fid {
                0x03 => Ok(0b010),
                0x05 => Ok(0b110),
                0x06 => Ok(0b000),
                fid if FIDS.contains(&fid) => Ok(0b100),
                _ => Err(Status::INVALID_FIELD),
            };
            let capabilities = fixture.get(fid, 3, 0, 0).map(|value| value.dw0);
            assert_eq!(capabilities, expected, "feature {fid:#x}");
            if expected.is_err() {
                assert_eq!(fixture.get(fid, 0, 0, 0), Err(Status::INVALID_FIELD));
                assert_eq!(fixture.check_set(fid, false, 0), Err(Status::INVALID_FIELD));
            } else {
                assert_eq!(
                    fixture.check_set(fid, true, 1),
                    Err(Status::FEATURE_NOT_SAVEABLE)
                );
            }
        }
        for select in 4..=7 {
            assert_eq!(fixture.get(0x01, select, 0, 0), Err(Status::INVALID_FIELD));
        }
    }

    #[test]
    fn namespaces_are_named_where_a_feature_has_them() {
        let fixture = Fixture::new();
        let invalid = Err(Status::INVALID_NAMESPACE_OR_FORMAT);
        let not_specific = Err(Status::FEATURE_NOT_NAMESPACE_SPECIFIC);
        for (fid, nsid, expected) in [
            (0x05, 0, invalid),
            (0x05, 1, Ok(())),
            (0x05, 2, invalid),
            (0x05, 0xFFFF_FFFF, Ok(())),
            (0x03, 1, Err(Status::FEATURE_NOT_CHANGEABLE)),
            (0x01, 0, Ok(())),
            (0x01, 1, not_specific),
            (0x01, 2, invalid),
            (0x01, 0xFFFF_FFFF, Ok(())),
        ] {
            assert_eq!(
                fixture.check_set(fid, false, nsid),
                expected,
                "{fid:#x} of {nsid:#x}"
            );
        }
        for nsid in [0, 2, 0xFFFF_FFFF] {
            let result = fixture.get(0x03, 0, 0, nsid);
            assert_eq!(result, Err(Status::INVALID_NAMESPACE_OR_FORMAT));
        }
    }

    #[test]
    fn simple_values_read_back_without_their_reserved_bits() {
        let mut fixture = Fixture::new();
        for (fid, written, expected) in [
            (0x01, 0xFFFF_FFFF, 0xFFFF_FF07),
            (0x02, 0xFFFF_FFE0, 0x0000_00E0),
            (0x05, 0xFFFE_FFFF, 0x0000_FFFF),
            (0x06, 0x0000_0001, 0x0000_0001),
            (0x08, 0xFFFF_1234, 0x0000_1234),
            (0x0A, 0xFFFF_FFFF, 0x0000_0001),
            (0x0B, 0xFFFF_FFFF, 0x0000_00FF),
            (0x19, 0xFFFF_FE00, 0x0000_0000),
        ] {
            assert_eq!(fixture.set(fid, written, &[]), Ok(0));
            assert_eq!(fixture.current(fid, 0), Ok(expected), "feature {fid:#x}");
        }
        let default = fixture.get(0x08, 1, 0, 0).map(|value| value.dw0);
        assert_eq!(default, Ok(0), "a default is no current value");
    }

    #[test]
    fn values_that_cannot_be_are_refused() {
        let mut fixture = Fixture::new();
        for (fid, dword11, status) in [
            (0x02, 1, Status::INVALID_FIELD),
            (0x04, 0x0001_0150, Status::INVALID_FIELD),
            (0x04, 0x0020_0150, Status::INVALID_FIELD),
            (0x05, 0x0001_0000, Status::INVALID_FIELD),
            (0x06, 0, Status::FEATURE_NOT_CHANGEABLE),
            (0x07, 0x0000_FFFF, Status::INVALID_FIELD),
            (0x07, 0xFFFF_0000, Status::INVALID_FIELD),
            (0x09, VECTORS as u32, Status::INVALID_FIELD),
            (0x0E, 0, Status::DATA_TRANSFER_ERROR),
            (0x16, 0, Status::DATA_TRANSFER_ERROR),
            (0x19, 1, Status::IO_COMMAND_SET_COMBINATION_REJECTED),
        ] {
            assert_eq!(
                fixture.set(fid, dword11, &[]),
                Err(status),
                "{fid:#x} {dword11:#x}"
            );
        }
        let temperature_of_sensor_1 = fixture.current(0x04, 0x0001_0000);
        assert_eq!(temperature_of_sensor_1, Err(Status::INVALID_FIELD));
        assert_eq!(
            fixture.current(0x09, VECTORS as u32),
            Err(Status::INVALID_FIELD)
        );
    }

    #[test]
    fn queues_are_allocated_up_to_what_there_is() {
        let mut fixture = Fixture::new();
        assert_eq!(fixture.set(0x07, 0x0001_0002, &[]), Ok(0x0001_0002));
        let allocated = fixture.features.allocated(&fixture.context());
        assert_eq!(
            allocated,
            Allocated {
                submission: 3,
                completion: 2
            }
        );
        assert_eq!(fixture.set(0x07, 0xFFFE_FFFE, &[]), Ok(0x0003_0003));
        assert_eq!(fixture.current(0x07, 0), Ok(0x0003_0003));
        fixture.io_queues_exist = true;
        assert_eq!(
            fixture.set(0x07, 0, &[]),
            Err(Status::COMMAND_SEQUENCE_ERROR)
        );
        assert_eq!(fixture.current(0x07, 0), Ok(0x0003_0003));
    }

    #[test]
    fn thresholds_warn_when_the_temperature_is_beyond_them() {
        let mut fixture = Fixture::new();
        assert!(!fixture.features.critical_warning().temperature());
        assert_eq!(fixture.set(0x04, 310, &[]), Ok(0));
        assert_eq!(fixture.current(0x04, 0), Ok(310));
        let warning = fixture.features.critical_warning();
        assert!(warning.temperature() && !fixture.features.reports(warning));
        assert_eq!(fixture.set(0x0B, 0b10, &[]), Ok(0));
        assert!(fixture.features.reports(warning));
        assert_eq!(fixture.set(0x04, 0x000F_0157, &[]), Ok(0), "all sensors");
        assert!(!fixture.features.critical_warning().temperature());
        assert_eq!(
            fixture.set(0x04, 0x0010_0136, &[]),
            Ok(0),
            "under temperature"
        );
        assert_eq!(fixture.current(0x04, 0x0010_0000), Ok(310));
        assert!(fixture.features.critical_warning().temperature());
    }

    #[test]
    fn coalescing_is_disabled_by_vector() {
        let mut fixture = Fixture::new();
        assert_eq!(fixture.set(0x09, 0x0001_0004, &[]), Ok(0));
        assert_eq!(fixture.current(0x09, 4), Ok(0x0001_0004));
        assert_eq!(fixture.current(0x09, 3), Ok(0x0000_0003));
        assert_eq!(fixture.set(0x09, 0x0000_0004, &[]), Ok(0));
        assert_eq!(fixture.current(0x09, 4), Ok(0x0000_0004));
    }

    #[test]
    fn the_namespace_is_one_lba_range() {
        let value = Fixture::new().get(0x03, 0, 0, 1).expect("a value");
        assert_eq!((value.dw0, value.data.len()), (0, 4096));
        assert_eq!(
            value.data[..2],
            [0, 1],
            "general purpose, may be overwritten"
        );
        assert_eq!(value.data[16..24], [0; 8]);
        assert_eq!(
            value.data[24..32],
            0x1F_FFFF_u64.to_le_bytes(),
            "1 GiB less one block"
        );
    }

    #[test]
    fn without_a_write_cache_there_is_no_such_feature() {
        let mut fixture = Fixture::new();
        fixture.volatile_write_cache = false;
        assert_eq!(fixture.current(0x06, 0), Err(Status::INVALID_FIELD));
        assert_eq!(
            fixture.check_set(0x06, false, 0),
            Err(Status::INVALID_FIELD)
        );
    }

    #[test]
    fn the_timestamp_runs_on_from_what_was_set() {
        let clock = Clock {
            start: 1000,
            ..Clock::default()
        };
        assert_eq!(
            clock.at(Duration::from_millis(234)).as_bytes(),
            [0xD2, 4, 0, 0, 0, 0, 0, 0]
        );
        let mut fixture = Fixture::new();
        let set = [0x06, 0x05, 0x04, 0x03, 0x02, 0x01, 0xFF, 0xFF];
        assert_eq!(fixture.set(0x0E, 0, &set), Ok(0));
        let value = fixture.get(0x0E, 0, 0, 0).expect("a timestamp");
        let now = Timestamp::read_from_bytes(&value.data).expect("8 bytes");
        assert!(now.milliseconds() >= 0x0102_0304_0506);
        assert!(now.milliseconds() < 0x0102_0304_0506 + 60_000);
        assert_eq!(value.data[6], 0b10, "set by Set Features");
    }

    #[test]
    fn host_behavior_is_one_or_none_of_each() {
        let mut fixture = Fixture::new();
        let mut data = [0; 512];
        data[0] = 1;
        assert_eq!(fixture.set(0x16, 0, &data), Ok(0));
        assert_eq!(fixture.get(0x16, 0, 0, 0).expect("a value").data, data);
        data[2] = 2;
        assert_eq!(fixture.set(0x16, 0, &data), Err(Status::INVALID_FIELD));
    }
}

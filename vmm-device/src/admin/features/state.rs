//! Save and restore of feature values.

use std::{sync::Arc, time::Duration};

use nvme_guest::{BackendStateError, LeaseFacts};
use nvme_mpt_memory::deadline::WaitClock;
use nvme_spec::feature::{
    Arbitration, AsyncEventConfiguration, ErrorRecovery, InterruptCoalescing, PowerManagement,
    WriteAtomicity,
};

use super::{
    ControllerFeatures, IoQueueAllocation, TimestampClock, notices, value_masks, vector_bit,
};
use crate::state::parts::FeaturesState;

impl ControllerFeatures {
    pub(in crate::admin) fn save(&self) -> FeaturesState {
        let Self {
            arbitration,
            power,
            over_temperature,
            under_temperature,
            error_recovery,
            queues,
            coalescing,
            coalescing_disabled,
            write_atomicity,
            async_events,
            timestamp,
            clock,
            host_behavior,
        } = self;
        let disabled = |vector: &u16| coalescing_disabled & vector_bit((*vector).into()) != 0;
        FeaturesState {
            arbitration: arbitration.0,
            power_management: power.0,
            over_temperature: *over_temperature,
            under_temperature: *under_temperature,
            error_recovery: error_recovery.0,
            queues: queues.map(|allocated| [allocated.submission, allocated.completion]),
            interrupt_coalescing: coalescing.0,
            coalescing_disabled: (0..128).filter(disabled).collect(),
            write_atomicity: write_atomicity.0,
            async_events: async_events.0,
            timestamp: timestamp.save(clock.now()),
            host_behavior: *host_behavior,
        }
    }

    /// Checks that a guest can have brought the features to these values by Set Features.
    pub(in crate::admin) fn check(
        state: &FeaturesState,
        vectors: usize,
        facts: &LeaseFacts,
    ) -> Result<(), BackendStateError> {
        let FeaturesState {
            arbitration,
            power_management,
            over_temperature: _,
            under_temperature: _,
            error_recovery,
            queues,
            interrupt_coalescing,
            coalescing_disabled,
            write_atomicity,
            async_events,
            timestamp: _,
            host_behavior,
        } = state;
        for (name, saved, masked) in [
            (
                "Arbitration",
                *arbitration,
                value_masks::arbitration(*arbitration).0,
            ),
            (
                "Power Management",
                *power_management,
                value_masks::power_management(*power_management).0,
            ),
            (
                "Error Recovery",
                *error_recovery,
                value_masks::error_recovery(*error_recovery).0,
            ),
            (
                "Interrupt Coalescing",
                *interrupt_coalescing,
                value_masks::interrupt_coalescing(*interrupt_coalescing).0,
            ),
            (
                "Write Atomicity",
                *write_atomicity,
                value_masks::write_atomicity(*write_atomicity).0,
            ),
            (
                "Asynchronous Event Configuration",
                *async_events,
                value_masks::async_events(*async_events, notices(&facts.namespace)).0,
            ),
        ] {
            if saved != masked {
                let valid = format!("{masked:#x}, without reserved bits");
                return Err(BackendStateError::invalid(
                    name,
                    format!("{saved:#x}"),
                    valid,
                ));
            }
        }
        for allocated in queues.iter().flatten() {
            if !(1..=facts.queue_pairs).contains(allocated) {
                let valid = format!("1 to {}", facts.queue_pairs);
                return Err(BackendStateError::invalid(
                    "Number of Queues",
                    allocated,
                    valid,
                ));
            }
        }
        for vector in coalescing_disabled {
            if usize::from(*vector) >= vectors {
                let valid = format!("less than {vectors}");
                return Err(BackendStateError::invalid(
                    "Coalescing Disable",
                    vector,
                    valid,
                ));
            }
        }
        for byte in host_behavior {
            if *byte > 1 {
                return Err(BackendStateError::invalid(
                    "Host Behavior Support",
                    byte,
                    "0 or 1",
                ));
            }
        }
        Ok(())
    }

    /// Restores the values from a checked state. `elapsed` is the time since the save; `None` for a snapshot, after which the
    /// controller's clock continues from the time of the save.
    pub(in crate::admin) fn from_state(
        state: &FeaturesState,
        clock: &Arc<dyn WaitClock>,
        elapsed: Option<Duration>,
    ) -> Self {
        let FeaturesState {
            arbitration,
            power_management,
            over_temperature,
            under_temperature,
            error_recovery,
            queues,
            interrupt_coalescing,
            coalescing_disabled,
            write_atomicity,
            async_events,
            timestamp,
            host_behavior,
        } = state;
        let disabled = coalescing_disabled.iter();
        Self {
            arbitration: Arbitration(*arbitration),
            power: PowerManagement(*power_management),
            over_temperature: *over_temperature,
            under_temperature: *under_temperature,
            error_recovery: ErrorRecovery(*error_recovery),
            queues: queues.map(|[submission, completion]| IoQueueAllocation {
                submission,
                completion,
            }),
            coalescing: InterruptCoalescing(*interrupt_coalescing),
            coalescing_disabled: disabled
                .fold(0, |bits, vector| bits | vector_bit((*vector).into())),
            write_atomicity: WriteAtomicity(*write_atomicity),
            async_events: AsyncEventConfiguration(*async_events),
            timestamp: TimestampClock::from_state(timestamp, clock.now(), elapsed),
            clock: clock.clone(),
            host_behavior: *host_behavior,
        }
    }
}

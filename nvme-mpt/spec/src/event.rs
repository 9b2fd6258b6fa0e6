//! Asynchronous events, which complete Asynchronous Event Requests (Base 2.0, section 5.2).

use super::log::LogPageId;

bit_field! {
    /// Completion dword 0 of an Asynchronous Event Request (Base 2.0, section 5.2.1).
    pub struct AsyncEvent(u32) {
        /// Asynchronous Event Type.
        event_type / with_event_type: AsyncEventType(u8) [2:0];
        /// Asynchronous Event Information; the meaning depends on the type.
        info / with_info: u8 [15:8];
        /// Log Page Identifier of the page whose reading clears the event.
        lid / with_lid: LogPageId(u8) [23:16];
    }
}

open_enum! {
    /// Asynchronous Event Type (Base 2.0, section 5.2.1).
    pub struct AsyncEventType(u8) {
        ERROR = 0b000, "Error status";
        SMART_HEALTH = 0b001, "SMART / Health status";
        NOTICE = 0b010, "Notice";
        IMMEDIATE = 0b011, "Immediate";
        IO_COMMAND_SPECIFIC = 0b110, "I/O Command specific status";
        VENDOR_SPECIFIC = 0b111, "Vendor specific";
    }
}

open_enum! {
    /// Asynchronous Event Information of [`AsyncEventType::ERROR`] (Base 2.0, section 5.2.1).
    pub struct ErrorEvent(u8) {
        INVALID_DOORBELL_REGISTER = 0x00, "Write to Invalid Doorbell Register";
        INVALID_DOORBELL_VALUE = 0x01, "Invalid Doorbell Write Value";
        DIAGNOSTIC_FAILURE = 0x02, "Diagnostic Failure";
        PERSISTENT_INTERNAL_ERROR = 0x03, "Persistent Internal Error";
        TRANSIENT_INTERNAL_ERROR = 0x04, "Transient Internal Error";
        FIRMWARE_IMAGE_LOAD_ERROR = 0x05, "Firmware Image Load Error";
    }
}

open_enum! {
    /// Asynchronous Event Information of [`AsyncEventType::SMART_HEALTH`] (Base 2.0, section
    /// 5.2.1).
    pub struct SmartEvent(u8) {
        SUBSYSTEM_RELIABILITY = 0x00, "NVM subsystem Reliability";
        TEMPERATURE_THRESHOLD = 0x01, "Temperature Threshold";
        SPARE_BELOW_THRESHOLD = 0x02, "Spare Below Threshold";
    }
}

open_enum! {
    /// Asynchronous Event Information of [`AsyncEventType::NOTICE`] (Base 2.0, section 5.2.1).
    pub struct NoticeEvent(u8) {
        NAMESPACE_ATTRIBUTE_CHANGED = 0x00, "Namespace Attribute Changed";
        FIRMWARE_ACTIVATION_STARTING = 0x01, "Firmware Activation Starting";
        TELEMETRY_LOG_CHANGED = 0x02, "Telemetry Log Changed";
        ANA_CHANGE = 0x03, "Asymmetric Namespace Access Change";
        PREDICTABLE_LATENCY_LOG_CHANGE = 0x04,
            "Predictable Latency Event Aggregate Log Change";
        LBA_STATUS_ALERT = 0x05, "LBA Status Information Alert";
        ENDURANCE_GROUP_LOG_CHANGE = 0x06, "Endurance Group Event Aggregate Log Page Change";
        ZONE_DESCRIPTOR_CHANGED = 0xEF, "Zone Descriptor Changed";
        DISCOVERY_LOG_CHANGE = 0xF0, "Discovery Log Page Change";
    }
}

impl AsyncEvent {
    /// A doorbell of a queue that does not exist was written.
    pub const INVALID_DOORBELL_REGISTER: Self = Self::error(ErrorEvent::INVALID_DOORBELL_REGISTER);
    /// An invalid value was written to a doorbell.
    pub const INVALID_DOORBELL_VALUE: Self = Self::error(ErrorEvent::INVALID_DOORBELL_VALUE);
    /// The controller failed in a way that a reset may repair.
    pub const PERSISTENT_INTERNAL_ERROR: Self = Self::error(ErrorEvent::PERSISTENT_INTERNAL_ERROR);
    /// The namespaces in the Changed Namespace List have changed.
    pub const NAMESPACE_ATTRIBUTE_CHANGED: Self = Self::new(
        AsyncEventType::NOTICE,
        NoticeEvent::NAMESPACE_ATTRIBUTE_CHANGED.0,
        LogPageId::CHANGED_NAMESPACE_LIST,
    );
    /// The descriptors of the zones in the Changed Zone List have changed (ZNS 1.1, section 4.1.1).
    pub const ZONE_DESCRIPTOR_CHANGED: Self = Self::new(
        AsyncEventType::NOTICE,
        NoticeEvent::ZONE_DESCRIPTOR_CHANGED.0,
        LogPageId::CHANGED_ZONE_LIST,
    );

    /// An event without content, of the vendor specific type.
    pub const EMPTY: Self = Self::new(AsyncEventType::VENDOR_SPECIFIC, 0, LogPageId(0));

    /// Creates an event of any type.
    #[must_use]
    pub const fn new(event_type: AsyncEventType, info: u8, lid: LogPageId) -> Self {
        Self(0)
            .with_event_type(event_type)
            .with_info(info)
            .with_lid(lid)
    }

    /// Creates an error event, which the Error Information log page clears.
    #[must_use]
    pub const fn error(info: ErrorEvent) -> Self {
        Self::new(AsyncEventType::ERROR, info.0, LogPageId::ERROR_INFORMATION)
    }

    /// Creates a SMART / Health event, which the SMART / Health log page clears.
    #[must_use]
    pub const fn smart(info: SmartEvent) -> Self {
        Self::new(
            AsyncEventType::SMART_HEALTH,
            info.0,
            LogPageId::SMART_HEALTH,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_laid_out_as_specified() {
        assert_eq!(AsyncEvent::INVALID_DOORBELL_REGISTER.0, 0x0001_0000);
        assert_eq!(AsyncEvent::INVALID_DOORBELL_VALUE.0, 0x0001_0100);
        // Linux handles it as "notice, namespace changed, log page 4".
        assert_eq!(AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED.0, 0x0004_0002);
        assert_eq!(
            AsyncEvent::smart(SmartEvent::TEMPERATURE_THRESHOLD).0,
            0x0002_0101
        );
        assert_eq!(AsyncEvent::ZONE_DESCRIPTOR_CHANGED.0, 0x00BF_EF02);
        assert_eq!(AsyncEvent::EMPTY.0, 7);
    }

    #[test]
    fn an_event_reads_back() {
        let event = AsyncEvent(0xFF04_F0FA);
        assert_eq!(event.event_type(), AsyncEventType::NOTICE);
        assert_eq!(NoticeEvent(event.info()), NoticeEvent::DISCOVERY_LOG_CHANGE);
        assert_eq!(event.lid(), LogPageId::CHANGED_NAMESPACE_LIST);
    }
}

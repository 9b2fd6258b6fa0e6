//! Masks for dword 11 of Set Features. Bits that are reserved or belong to functions that are not offered are stored as zero.

use nvme_spec::feature::{
    Arbitration, AsyncEventConfiguration, ErrorRecovery, InterruptCoalescing, PowerManagement,
    WriteAtomicity,
};

pub(super) fn arbitration(dword11: u32) -> Arbitration {
    // Clears bits 7:3, which are reserved.
    Arbitration(dword11 & 0xFFFF_FF07)
}

pub(super) fn power_management(dword11: u32) -> PowerManagement {
    PowerManagement::default().with_wh(PowerManagement(dword11).wh())
}

pub(super) fn error_recovery(dword11: u32) -> ErrorRecovery {
    ErrorRecovery::default().with_tler(ErrorRecovery(dword11).tler())
}

pub(super) fn interrupt_coalescing(dword11: u32) -> InterruptCoalescing {
    let value = InterruptCoalescing(dword11);
    InterruptCoalescing::default()
        .with_thr_z(value.thr_z())
        .with_time(value.time())
}

pub(super) fn write_atomicity(dword11: u32) -> WriteAtomicity {
    WriteAtomicity::default().with_dn(WriteAtomicity(dword11).dn())
}

/// Clears the notices that OAES does not offer, so that a guest that reads the value back sees the enabled ones. `own` are the
/// notices that the namespace's command set offers.
pub(super) fn async_events(dword11: u32, own: AsyncEventConfiguration) -> AsyncEventConfiguration {
    let value = AsyncEventConfiguration(dword11);
    AsyncEventConfiguration(dword11 & own.0)
        .with_critical_warnings(value.critical_warnings())
        .with_namespace_attribute(value.namespace_attribute())
}

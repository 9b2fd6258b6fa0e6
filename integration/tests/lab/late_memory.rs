//! Guests of patched Cloud Hypervisor whose memory arrives late: restored on demand, or received by post-copy, while fio writes
//! and verifies. All data must be right, or the function must be refused with the reason.

use integration::process::file_tail;
use integration::progress::print_line;

use crate::fixture::{CheckEnvironment, Failure, await_that, expect, sh};
use crate::loaded_guest::{LoadedGuest, Migration};
use crate::vmms::is_patched_cloud_hypervisor_named;

/// Part of the message that refuses incomplete memory.
const REFUSAL: &str = "restored on demand";

/// If the VMM has the drive, its function restores pages on access.
pub(crate) fn restores_on_demand(bench: &CheckEnvironment) -> Result<(), Failure> {
    if !is_patched_cloud_hypervisor_named()? {
        return Ok(());
    }
    let mut guest = LoadedGuest::start(bench, false, &[])?;
    let url = guest.save(bench)?;
    guest.restore(bench, &url, "ondemand", &[])?;
    guest.await_passes()?;
    guest.end(bench)
}

/// If a server has the drive, it maps the memory's file: a restore on demand is refused, and a restore by copy works.
pub(crate) fn restores_by_a_server(bench: &CheckEnvironment) -> Result<(), Failure> {
    if !is_patched_cloud_hypervisor_named()? {
        return Ok(());
    }
    let mut guest = LoadedGuest::start(bench, true, &[])?;
    let url = guest.save(bench)?;
    guest.restore(bench, &url, "ondemand", &[])?;
    await_that("the end of a restore that is refused", || {
        let log = file_tail(guest.vmm.log());
        Ok(log.contains(REFUSAL) || guest.vmm.try_wait()?.is_some())
    })?;
    let log = file_tail(guest.vmm.log());
    expect(log.contains(REFUSAL), || {
        format!("It is refused for another reason, or not at all:\n{log}")
    })?;
    guest.vmm.kill();
    guest.restore(bench, &url, "copy", &[])?;
    guest.await_passes()?;
    guest.end(bench)
}

/// The guest migrates to another process on this host, and its memory follows.
pub(crate) fn migrates_by_post_copy(bench: &CheckEnvironment) -> Result<(), Failure> {
    if !is_patched_cloud_hypervisor_named()? {
        return Ok(());
    }
    sh("ip link set lo up")?;
    let mut guest = LoadedGuest::start(bench, false, &[])?;
    guest.await_passes()?;
    match guest.migrate(bench, Migration::PostCopy, &[]) {
        // The sender remains, without a guest.
        Ok(_sender) => guest.await_passes()?,
        Err(error) if error.to_string().contains(REFUSAL) => {
            print_line("        refused: the memory is restored on demand");
        }
        Err(error) => return Err(error),
    }
    guest.end(bench)
}

//! A guest with a function for each doorbell mode, and all uses of a drive by a guest.

use crate::fixture::{BootedFunction, CheckEnvironment, DRIVE_MIB, Failure};
use crate::{Group, doorbells, lost_notifications, nvme_cli};
use integration::server::FunctionArgument;

pub(crate) const GROUP: Group = Group::OnGuest {
    name: "modes",
    functions: &MODES,
    boot,
    // The guest's kernel log is checked first, because later commands fail on purpose.
    checks: &[
        ("doorbells", doorbells::check_exits_by_mode),
        ("pauses", lost_notifications::none_is_lost),
        ("id_ctrl", nvme_cli::id_ctrl),
        ("id_ns", nvme_cli::id_ns),
        ("list", nvme_cli::list),
        ("smart_log", nvme_cli::smart_log),
        ("error_log", nvme_cli::error_log),
        ("fw_log", nvme_cli::fw_log),
        ("effects_log", nvme_cli::effects_log),
        ("get_feature", nvme_cli::get_feature),
        ("dsm", nvme_cli::dsm),
        ("write_zeroes", nvme_cli::write_zeroes),
        ("compare", nvme_cli::compare),
        ("verify", nvme_cli::verify),
        ("copy", nvme_cli::copy),
        ("write_uncor_then_read", nvme_cli::write_uncor_then_read),
        ("flush", nvme_cli::flush),
        ("lba_out_of_range", nvme_cli::lba_out_of_range),
        ("unknown_commands", nvme_cli::unknown_commands),
        ("reset", nvme_cli::reset),
        ("unbind_and_bind", nvme_cli::unbind_and_bind),
    ],
};

/// Values of `doorbells=`, which are also the ids of the functions.
const MODES: [&str; 3] = ["shadow", "mapped", "trap"];

fn boot(bench: &CheckEnvironment) -> Result<Vec<BootedFunction>, Failure> {
    let function = |mode: &str| {
        let drive = bench.drive(&format!("{mode}.img"), DRIVE_MIB)?;
        let range = format!("0+{DRIVE_MIB}M");
        let function = FunctionArgument::new(mode, drive.display().to_string(), range);
        Ok::<_, Failure>(function.option(format!("doorbells={mode}")))
    };
    let functions: Vec<_> = MODES.into_iter().map(function).collect::<Result<_, _>>()?;
    BootedFunction::boot_all(bench, &functions, 1)
}

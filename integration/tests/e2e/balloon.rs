//! A guest with a balloon and a function of a file.

use integration::checks::balloon::{self, MemoryPinning};
use integration::provision::GuestAssets;

use crate::Group;
use crate::fixture::{CheckEnvironment, Failure, function};

pub(crate) const GROUP: Group = Group::Alone {
    name: "balloon",
    checks: &[("a_file_under_a_balloon", under_a_balloon)],
};

fn under_a_balloon(bench: &CheckEnvironment) -> Result<(), Failure> {
    let assets = GuestAssets::provide_with_modules(&[balloon::MODULE])?;
    balloon::in_qemu(bench, &assets, &function(bench)?, MemoryPinning::None)
}

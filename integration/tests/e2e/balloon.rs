//! A guest with a balloon and a function of a file.

use integration::checks::balloon::{self, Pinning};
use integration::provision::Assets;

use crate::Group;
use crate::fixture::{Bench, Failure, function};

pub(crate) const GROUP: Group = Group::Alone {
    name: "balloon",
    checks: &[("a_file_under_a_balloon", under_a_balloon)],
};

fn under_a_balloon(bench: &Bench) -> Result<(), Failure> {
    let assets = Assets::provide_with_modules(&[balloon::MODULE])?;
    balloon::in_qemu(bench, &assets, &function(bench)?, Pinning::None)
}

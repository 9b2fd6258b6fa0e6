//! A physical drive from bind to give-back, with clients that need no guest: what `cargo verify` runs every time.

use integration::lab::LabDrive;

use crate::{Group, Refused, failures, giveback};

pub(crate) const GROUP: Group = Group::Inside {
    name: "native",
    drives: || vec![LabDrive::new("a", 64 << 20), LabDrive::new("b", 64 << 20)],
    refused: Refused::Nothing,
    checks: &[
        ("served_verified_given_back", giveback::stopped),
        ("pulled_under_load_and_plugged", failures::removal),
    ],
};

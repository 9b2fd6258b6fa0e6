//! `kvm-anchor`: runs inside the lab as long as the lab exists; see [`integration::lab::static_keys`].

use std::process::ExitCode;

use integration::lab::static_keys;

fn main() -> ExitCode {
    match static_keys::create_anchor() {
        Ok(_anchor) => {
            println!("{}", static_keys::READY_LINE);
            loop {
                std::thread::park();
            }
        }
        Err(error) => {
            integration::print_error(&error);
            ExitCode::FAILURE
        }
    }
}

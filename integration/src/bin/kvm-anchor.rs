//! `kvm-anchor`: runs inside the lab from its start to its end; see [`integration::lab::anchor`].

use std::process::ExitCode;

use integration::lab::anchor;

fn main() -> ExitCode {
    match anchor::drop_anchor() {
        Ok(_anchor) => {
            println!("{}", anchor::DROPPED);
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

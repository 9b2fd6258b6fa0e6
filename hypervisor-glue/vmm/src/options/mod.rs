//! Options of an NVMe function. All VMMs use the same options.
//!
//! An option string, such as `path=/srv/drive.img,range=0+8G`, is parsed once into [`FunctionOptions`], whose values need no
//! further check. Types for strings with other keys:
//! - [`ServerFunctionOptions`]: a function of `nvme-mpt serve`, with `socket=PATH`.
//! - [`ServerDriveOptions`]: a drive that the server keeps open.
//! - [`LeaseReservation`]: a lease that an operator reserves for a VMM.
//! - [`FunctionConfig`]: a function in a VMM's own configuration, with a field for each option.
//!
//! [`option_help`] contains every option with its help.

mod config;
mod error;
mod function;
mod key_values;
pub mod option_help;
mod parsed_options;
mod reservation;
mod server_options;
#[cfg(test)]
mod tests;

pub use config::{FunctionConfig, STATE_DIR};
pub use error::OptionError;
pub use function::{FunctionOptions, LbaSize, LeaseSize, parse_memory_limit};
pub use parsed_options::ParsedFunctionOptions;
pub use reservation::{LeaseReservation, VmmSocket, parse_user};
pub use server_options::{
    OptionText, RateChange, ServerDriveOptions, ServerFunctionOptions, SocketOwner,
    parse_socket_path,
};

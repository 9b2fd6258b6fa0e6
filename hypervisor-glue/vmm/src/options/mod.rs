//! Options of an NVMe function. All VMMs use the same options.
//!
//! An option string, such as `path=/srv/drive.img,range=0+8G`, is parsed once into [`FunctionOptions`], whose values need no
//! further check. Types for strings with other keys:
//! - [`ServerFunctionOptions`]: a function of `nvme-mpt serve`, with `socket=PATH`.
//! - [`ServerDriveOptions`]: a drive that the server keeps open.
//! - [`LeaseReservation`]: a lease that an operator reserves for a VMM.
//! - [`FunctionConfig`]: a function in a VMM's own configuration, which is not parsed yet.
//!
//! [`option_table`] declares every option: a new option is an entry there and a field that it sets.

mod config;
mod error;
mod function;
pub mod option_help;
pub mod option_table;
mod option_text;
mod parsed_options;
mod reservation;
mod server_options;
#[cfg(test)]
mod tests;

pub use config::{FunctionConfig, STATE_DIR};
pub use error::OptionError;
pub use function::FunctionOptions;
pub use nvme_lease::range::ByteSize;
pub use option_help::config_help;
pub use option_table::parse_memory_limit;
pub use option_text::OptionText;
pub use parsed_options::ParsedFunctionOptions;
pub use reservation::{LeaseReservation, VmmSocket, parse_user};
pub use server_options::{
    RateChange, ServerDriveOptions, ServerFunctionOptions, SocketOwner, parse_socket_path,
};

//! Options that describe an NVMe function, the same for every VMM.
//!
//! A person writes an option string, as in `path=/srv/drive.img,range=0+8G`. It is parsed once, into [`FunctionOptions`],
//! whose values need no further check. A function that `nvme-mpt serve` offers has a `socket=PATH` as well:
//! [`ServerFunctionOptions`]. A drive that it keeps open has some of the keys: [`ServerDriveOptions`]. So has a lease that an
//! operator reserves for a VMM: [`LeaseReservation`]. A VMM's own configuration has a value per option: [`FunctionConfig`].
//!
//! [`table`] has every option with its help.

mod asked;
mod config;
mod error;
mod function;
mod key_values;
mod reserved;
mod served;
pub mod table;
#[cfg(test)]
mod tests;

pub use asked::ParsedFunctionOptions;
pub use config::{FunctionConfig, STATE_DIR};
pub use error::OptionError;
pub use function::{FunctionOptions, LbaSize, LeaseSize, parse_memory_limit};
pub use reserved::{LeaseReservation, VmmSocket, parse_user};
pub use served::{
    OptionText, RateChange, ServerDriveOptions, ServerFunctionOptions, SocketOwner,
    parse_socket_path,
};

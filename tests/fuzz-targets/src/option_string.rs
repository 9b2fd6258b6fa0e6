//! An option string from a user or a program.
//!
//! The string must be accepted, or refused with a message. Accepted options must be within the bounds on which the program
//! relies. A range and a drive must be printed in the form in which they were parsed.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nvme_guest::doorbell::MAX_QUEUE_PAIRS;
use nvme_lease::range::{ByteRange, ByteSize};
use nvme_mpt::BackendOptions;
use nvme_mpt_vmm::options::{
    FunctionOptions, OptionError, OptionText, RateChange, ServerDriveOptions, ServerFunctionOptions,
};
use nvme_mpt_vmm::report;

fn check_error(error: &OptionError) {
    assert!(!report::chain(error).is_empty());
}

fn check(options: &FunctionOptions) {
    assert!((1..=MAX_QUEUE_PAIRS).contains(&options.backend.queue_pairs));
    if let Some(serial) = &options.backend.serial {
        assert!((1..=20).contains(&serial.len()) && serial.is_ascii());
    }
    if let Some(range) = options.range {
        assert!(range.length() > 0 && range.start().checked_add(range.length()).is_some());
        assert_eq!(range.to_string().parse::<ByteRange>().ok(), Some(range));
        if let Ok(blocks) = range.to_blocks(9, 1 << 40) {
            assert!(blocks.blocks > 0 && blocks.start.0 + blocks.blocks <= 1 << 40);
        }
    }
    assert_eq!(
        options.path.to_string().parse().ok(),
        Some(options.path.clone())
    );
    let BackendOptions {
        poll, doorbells, ..
    } = &options.backend;
    assert_eq!(poll.to_string().parse().as_ref(), Ok(poll));
    assert_eq!(doorbells.to_string().parse(), Ok(*doorbells));
    assert_ne!(options.id.as_deref(), Some(""));
}

/// Runs one input, which is the text of an option string.
pub fn run(input: &[u8]) {
    let Ok(text) = str::from_utf8(input) else {
        return;
    };
    match text.parse::<FunctionOptions>() {
        Ok(options) => check(&options),
        Err(error) => check_error(&error),
    }
    match text.parse::<ServerFunctionOptions>() {
        Ok(server_options) => {
            assert!((1..=107).contains(&server_options.socket.as_os_str().as_bytes().len()));
            assert!(server_options.mode.is_none_or(|mode| mode <= 0o777));
            check(&server_options.function);
        }
        Err(error) => check_error(&error),
    }
    match text.parse::<ServerDriveOptions>() {
        Ok(server_options) => check(&server_options.drive),
        Err(error) => check_error(&error),
    }
    if let Err(error) = text.parse::<RateChange>() {
        check_error(&error);
    }
    // Server and client exchange options in this form.
    if let Ok(options) = text.parse::<OptionText>() {
        assert_eq!(options.to_string().parse().ok(), Some(options.clone()));
        let absolute = options.with_absolute_paths(Path::new("/run"));
        assert_eq!(absolute.to_string().parse().ok(), Some(absolute.clone()));
        assert_eq!(
            absolute.clone().with_absolute_paths(Path::new("/run")),
            absolute
        );
    }
    if let Ok(size) = text.parse::<ByteSize>() {
        assert_eq!(size.to_string().parse(), Ok(size));
    }
}

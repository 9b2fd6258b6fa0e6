//! Text of errors with their causes, for people.

use std::error::Error;
use std::io;

/// Likely cause of the error "Read-only file system", and the remedy.
const READ_ONLY: &str = "it is mounted so, or the unit of this service does not let it write there: name the directory in \
     ReadWritePaths= of the unit, and in --landlock-rules where --landlock is given";

/// Returns the error and its causes, outermost first, one per line.
///
/// Omits a cause whose text is that of the error before it. Adds a hint to "Read-only file system", since the sandbox of a
/// systemd service may have made the file system read-only.
#[must_use]
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut last = text.clone();
    let is_read_only = |error: &(dyn Error + 'static)| {
        let error = error.downcast_ref::<io::Error>();
        error.is_some_and(|error| error.kind() == io::ErrorKind::ReadOnlyFilesystem)
    };
    let mut cause = error.source();
    while let Some(error) = cause {
        let line = error.to_string();
        if line != last {
            text.push_str("\n  ");
            text.push_str(&line);
            last = line;
        }
        if is_read_only(error) && !text.contains("ReadWritePaths=") {
            text.push_str(": ");
            text.push_str(READ_ONLY);
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use thiserror::Error;

    use super::*;

    #[derive(Debug, Error)]
    enum LayeredError {
        #[error("Bottom")]
        Bottom,
        #[error(transparent)]
        Transparent(Box<Self>),
        #[error("Same as its cause")]
        Top(#[source] Box<Self>),
        #[error("Bottom")]
        Repeats(#[source] Box<Self>),
    }

    #[derive(Debug, Error)]
    #[error("Cannot write")]
    struct WriteFailure(#[source] io::Error);

    #[test]
    fn a_read_only_file_system_error_mentions_the_sandbox() {
        let text = |errno| chain(&WriteFailure(io::Error::from_raw_os_error(errno)));
        let refused = text(libc::EROFS);
        assert!(refused.contains("Read-only file system"), "{refused}");
        assert!(
            refused.contains("ReadWritePaths= of the unit, and in --landlock-rules"),
            "{refused}"
        );
        assert!(!text(libc::EACCES).contains("ReadWritePaths="));
    }

    #[test]
    fn every_cause_has_a_line() {
        let error = LayeredError::Top(Box::new(LayeredError::Transparent(Box::new(
            LayeredError::Repeats(Box::new(LayeredError::Bottom)),
        ))));
        assert_eq!(chain(&error), "Same as its cause\n  Bottom");
    }
}

//! Serialized forms of arguments and results that cross to another process and have no form of their own.

/// Serialized form of an `io::Error`: errno or kind, and text.
pub mod io_error {
    use std::io;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    struct IoErrorMessage {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        errno: Option<i32>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        kind: Option<IoErrorMessageKind>,
        text: String,
    }

    /// Kinds of an `io::Error` that callers distinguish.
    #[derive(Clone, Copy, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum IoErrorMessageKind {
        TimedOut,
        NotConnected,
        Unsupported,
        /// The resource is busy for now, for example a drive that is being reset.
        ResourceBusy,
    }

    impl IoErrorMessageKind {
        fn from_kind(kind: io::ErrorKind) -> Option<Self> {
            match kind {
                io::ErrorKind::TimedOut => Some(Self::TimedOut),
                io::ErrorKind::NotConnected => Some(Self::NotConnected),
                io::ErrorKind::Unsupported => Some(Self::Unsupported),
                io::ErrorKind::ResourceBusy => Some(Self::ResourceBusy),
                _ => None,
            }
        }
    }

    impl From<IoErrorMessageKind> for io::ErrorKind {
        fn from(kind: IoErrorMessageKind) -> Self {
            match kind {
                IoErrorMessageKind::TimedOut => Self::TimedOut,
                IoErrorMessageKind::NotConnected => Self::NotConnected,
                IoErrorMessageKind::Unsupported => Self::Unsupported,
                IoErrorMessageKind::ResourceBusy => Self::ResourceBusy,
            }
        }
    }

    /// Returns the error for an errno. Keeps `text` if it differs from the kernel's text for the errno.
    fn from_errno(errno: i32, text: String) -> io::Error {
        let error = io::Error::from_raw_os_error(errno);
        match text.ends_with(&format!("(os error {errno})")) {
            true => error,
            false => io::Error::new(error.kind(), text),
        }
    }

    /// Serializes an error.
    ///
    /// # Errors
    /// Returns the serializer's error.
    pub fn serialize<S: Serializer>(error: &io::Error, serializer: S) -> Result<S::Ok, S::Error> {
        let crossing = IoErrorMessage {
            errno: error.raw_os_error(),
            kind: IoErrorMessageKind::from_kind(error.kind()),
            text: error.to_string(),
        };
        crossing.serialize(serializer)
    }

    /// Deserializes an error.
    ///
    /// # Errors
    /// Returns the deserializer's error.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<io::Error, D::Error> {
        let IoErrorMessage { errno, kind, text } = IoErrorMessage::deserialize(deserializer)?;
        Ok(match (errno, kind) {
            (Some(errno), _) => from_errno(errno, text),
            (None, Some(kind)) => io::Error::new(kind.into(), text),
            (None, None) => io::Error::other(text),
        })
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[derive(Serialize, Deserialize)]
        struct WrappedIoError(#[serde(with = "crate::serde_forms::io_error")] io::Error);

        fn crossed(error: io::Error) -> io::Error {
            let text = serde_json::to_string(&WrappedIoError(error)).unwrap();
            let WrappedIoError(error) = serde_json::from_str(&text).unwrap();
            error
        }

        #[test]
        fn actionable_errors_keep_kind_and_errno() {
            for kind in [
                io::ErrorKind::TimedOut,
                io::ErrorKind::NotConnected,
                io::ErrorKind::Unsupported,
                // The drive is being reset, and the guest may repeat the command.
                io::ErrorKind::ResourceBusy,
            ] {
                let error = crossed(io::Error::new(kind, "its words"));
                assert_eq!(
                    (error.kind(), error.to_string()),
                    (kind, "its words".into())
                );
            }
            for errno in [libc::ENOSPC, libc::EBUSY] {
                let error = crossed(io::Error::from_raw_os_error(errno));
                assert_eq!(error.raw_os_error(), Some(errno));
            }
        }
    }
}

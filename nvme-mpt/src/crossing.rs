//! Forms in which arguments and results cross to another process, where they have none of their own.

/// The kernel's or a library's error: errno or kind, and text.
pub mod io_error {
    use std::io;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    struct Crossing {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        errno: Option<i32>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        kind: Option<Kind>,
        text: String,
    }

    /// Kinds that somebody acts on.
    #[derive(Clone, Copy, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Kind {
        TimedOut,
        NotConnected,
        Unsupported,
    }

    impl Kind {
        fn of(kind: io::ErrorKind) -> Option<Self> {
            match kind {
                io::ErrorKind::TimedOut => Some(Self::TimedOut),
                io::ErrorKind::NotConnected => Some(Self::NotConnected),
                io::ErrorKind::Unsupported => Some(Self::Unsupported),
                _ => None,
            }
        }
    }

    impl From<Kind> for io::ErrorKind {
        fn from(kind: Kind) -> Self {
            match kind {
                Kind::TimedOut => Self::TimedOut,
                Kind::NotConnected => Self::NotConnected,
                Kind::Unsupported => Self::Unsupported,
            }
        }
    }

    /// Returns the number by which an error crosses, if it has one. A resource that is busy, as a drive that is reset,
    /// crosses as `EBUSY`: earlier releases know no name of that kind.
    fn errno(error: &io::Error) -> Option<i32> {
        let is_busy = error.kind() == io::ErrorKind::ResourceBusy;
        error.raw_os_error().or(is_busy.then_some(libc::EBUSY))
    }

    /// Returns the error of a number. Words that are not the kernel's stay.
    fn by_number(errno: i32, text: String) -> io::Error {
        let error = io::Error::from_raw_os_error(errno);
        match text.ends_with(&format!("(os error {errno})")) {
            true => error,
            false => io::Error::new(error.kind(), text),
        }
    }

    /// Serializes an error.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(error: &io::Error, serializer: S) -> Result<S::Ok, S::Error> {
        let crossing = Crossing {
            errno: errno(error),
            kind: Kind::of(error.kind()),
            text: error.to_string(),
        };
        crossing.serialize(serializer)
    }

    /// Deserializes an error.
    ///
    /// # Errors
    /// Those of the deserializer.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<io::Error, D::Error> {
        let Crossing { errno, kind, text } = Crossing::deserialize(deserializer)?;
        Ok(match (errno, kind) {
            (Some(errno), _) => by_number(errno, text),
            (None, Some(kind)) => io::Error::new(kind.into(), text),
            (None, None) => io::Error::other(text),
        })
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[derive(Serialize, Deserialize)]
        struct Message(#[serde(with = "crate::crossing::io_error")] io::Error);

        fn crossed(error: io::Error) -> io::Error {
            let text = serde_json::to_string(&Message(error)).unwrap();
            let Message(error) = serde_json::from_str(&text).unwrap();
            error
        }

        #[test]
        fn what_somebody_acts_on_arrives() {
            for kind in [
                io::ErrorKind::TimedOut,
                io::ErrorKind::NotConnected,
                io::ErrorKind::Unsupported,
                // A drive that is reset: the guest may ask again.
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

        #[test]
        fn earlier_releases_read_that_a_drive_is_reset() {
            let error = io::Error::new(io::ErrorKind::ResourceBusy, "it is reset");
            let text = serde_json::to_string(&Message(error)).unwrap();
            assert_eq!(text, r#"{"errno":16,"text":"it is reset"}"#);
        }
    }
}

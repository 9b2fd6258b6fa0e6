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

    /// Serializes an error.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(error: &io::Error, serializer: S) -> Result<S::Ok, S::Error> {
        let crossing = Crossing {
            errno: error.raw_os_error(),
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
            (Some(errno), _) => io::Error::from_raw_os_error(errno),
            (None, Some(kind)) => io::Error::new(kind.into(), text),
            (None, None) => io::Error::other(text),
        })
    }
}

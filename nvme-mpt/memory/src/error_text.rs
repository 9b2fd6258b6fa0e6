//! Text of errors for a line of the log.

use std::error::Error;

/// Returns an error and its causes in one line.
#[must_use]
pub fn describe_error(error: &dyn Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| (*cause).source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

#[cfg(test)]
mod tests {
    use std::fmt;

    use super::*;

    #[derive(Debug)]
    struct Outer(fmt::Error);

    impl fmt::Display for Outer {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Cannot print")
        }
    }

    impl Error for Outer {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            Some(&self.0)
        }
    }

    #[test]
    fn causes_follow_in_one_line() {
        let cause = fmt::Error.to_string();
        let text = describe_error(&Outer(fmt::Error));
        assert_eq!(text, format!("Cannot print: {cause}"));
    }
}

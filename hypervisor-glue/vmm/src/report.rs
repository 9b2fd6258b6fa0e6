//! Text of an error for a person.

use std::error::Error;

/// Returns the error and its causes, outermost first, one a line.
///
/// A cause that says what was said already (an error that passes its source's text on) is left out.
#[must_use]
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut last = text.clone();
    let mut cause = error.source();
    while let Some(error) = cause {
        let line = error.to_string();
        if line != last {
            text.push_str("\n  ");
            text.push_str(&line);
            last = line;
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
    enum Layer {
        #[error("Bottom")]
        Bottom,
        #[error(transparent)]
        Transparent(Box<Self>),
        #[error("Same as its cause")]
        Top(#[source] Box<Self>),
        #[error("Bottom")]
        Repeats(#[source] Box<Self>),
    }

    #[test]
    fn every_cause_has_a_line() {
        let error = Layer::Top(Box::new(Layer::Transparent(Box::new(Layer::Repeats(
            Box::new(Layer::Bottom),
        )))));
        assert_eq!(chain(&error), "Same as its cause\n  Bottom");
    }
}

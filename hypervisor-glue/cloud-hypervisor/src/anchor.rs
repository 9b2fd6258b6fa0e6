//! Anchors: places in a file that are found by names, not by lines.

use std::ops::Range;

use thiserror::Error;

use crate::lines;

/// Place of an edit inside the part of the file that its enclosing items name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// Behind the element that mentions a name.
    After(String),
    /// In front of the element that mentions a name.
    Before(String),
    /// First in the part.
    Start,
    /// Last in the part.
    End,
    /// Behind the last import.
    Imports,
    /// The part's own name, which gets replaced by this one.
    Rename(String),
}

/// Place in a file, found by names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Anchor {
    /// Names of the enclosing items, outermost first.
    pub within: Vec<String>,
    /// Place inside of the innermost of them.
    pub place: Place,
}

/// Change of a source at a resolved anchor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// Lines are inserted at a byte position. At `comma`, a list lacks the comma that it needs then.
    Insert { at: usize, comma: Option<usize> },
    /// A name is replaced.
    Replace(Range<usize>),
}

/// Error of finding an anchor in a file.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum AnchorError {
    /// The anchor, or an enclosing item, was not found exactly once.
    #[error("{what} was found {} times{}, not once", lines.len(), at_lines(lines))]
    NotOnce {
        /// The anchor or enclosing item, for the message.
        what: String,
        /// Line of each that was found, from 1.
        lines: Vec<usize>,
    },
    /// The name of an enclosing item has no known form.
    #[error("`{0}` names no kind of enclosing item")]
    Segment(String),
    /// The enclosing item has no lines inside.
    #[error("{0} has no list of elements or statements inside")]
    NoBody(String),
    /// The place does not exist in files of this kind, or in this kind of enclosing item.
    #[error("{0} has no place of the kind `{1}`")]
    NoPlace(String, &'static str),
    /// The file cannot be read as what its name says.
    #[error("The file is no {language}: {problem}")]
    Unreadable {
        /// Language of the file.
        language: &'static str,
        /// The parser's message.
        problem: String,
    },
    /// The text to insert does not consist of imports.
    #[error("The text to insert has more than imports")]
    NotImports,
    /// The new name is no identifier.
    #[error("`{0}` is no identifier")]
    NoIdentifier(String),
}

fn at_lines(lines: &[usize]) -> String {
    if lines.is_empty() {
        return String::new();
    }
    let lines: Vec<_> = lines.iter().map(ToString::to_string).collect();
    format!(" (lines {})", lines.join(", "))
}

impl Place {
    /// Key of the place in `edits.toml`.
    pub(crate) fn key(&self) -> &'static str {
        match self {
            Self::After(_) => "after",
            Self::Before(_) => "before",
            Self::Start => "start",
            Self::End => "end",
            Self::Imports => "imports",
            Self::Rename(_) => "rename",
        }
    }
}

impl Anchor {
    /// Describes the innermost enclosing item.
    pub(crate) fn describe_container(&self) -> String {
        match self.within.last() {
            Some(segment) => format!("`{segment}`"),
            None => "The file".to_owned(),
        }
    }
}

/// Returns the only item of a list, or an error that has the line of each.
pub(crate) fn exactly_one<T>(
    found: Vec<T>,
    text: &str,
    what: impl FnOnce() -> String,
    position: impl Fn(&T) -> usize,
) -> Result<T, AnchorError> {
    match <[T; 1]>::try_from(found) {
        Ok([one]) => Ok(one),
        Err(found) => Err(AnchorError::NotOnce {
            what: what(),
            lines: found
                .iter()
                .map(|item| lines::number(text, position(item)))
                .collect(),
        }),
    }
}

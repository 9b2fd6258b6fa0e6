//! Edits of one file: lines that are inserted at anchors.

use std::ops::Range;
use std::path::Path;

use crate::anchor::{Anchor, AnchorError, Target};
use crate::rust_source::RustSource;
use crate::{lines, rust_anchor, text_anchor, toml_anchor, yaml_anchor};

/// Insertion at an anchor of a file, or a new name for an item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edit {
    /// Path of the file in the checkout.
    pub file: String,
    /// Names of the versions that the edit is for; `None` for all.
    pub versions: Option<Vec<String>>,
    /// Place in the file.
    pub anchor: Anchor,
    /// Lines to insert. Empty if an item gets another name.
    pub text: String,
}

impl Edit {
    /// Returns whether the edit is for a version.
    #[must_use]
    pub fn is_for(&self, version: &str) -> bool {
        let versions = self.versions.as_ref();
        versions.is_none_or(|versions| versions.iter().any(|name| name == version))
    }
}

/// Text of an edited file, and the edits that could not be made.
#[derive(Debug)]
pub struct EditedText {
    /// The file's text with all other edits.
    pub text: String,
    /// Index of each edit that could not be made, with the reason.
    pub problems: Vec<(usize, AnchorError)>,
    /// Reason why the edited text is no source of the file's language.
    pub broken: Option<AnchorError>,
}

/// Replacement of a range of bytes. An empty range is an insertion.
struct Change {
    range: Range<usize>,
    /// Order of changes at the same position.
    order: usize,
    text: String,
}

/// Applies edits to the text of one file. All anchors are looked for in the text as it is given.
#[must_use]
pub fn apply(file: &Path, text: &str, edits: &[&Edit]) -> EditedText {
    let extension = file.extension().and_then(|extension| extension.to_str());
    let targets = find_targets(extension, text, edits);
    let (mut changes, mut problems) = (Vec::<Change>::new(), Vec::new());
    for (index, (edit, target)) in edits.iter().zip(targets).enumerate() {
        match target {
            Ok(Target::Insert { at, comma }) => {
                if let Some(comma) = comma {
                    changes.push(Change {
                        range: comma..comma,
                        order: 0,
                        text: ",".to_owned(),
                    });
                }
                changes.push(Change {
                    range: at..at,
                    order: index + 1,
                    text: inserted_lines(text, at, &edit.text),
                });
            }
            Ok(Target::Replace(range)) => {
                if let crate::anchor::Place::Rename(name) = &edit.anchor.place {
                    changes.push(Change {
                        range,
                        order: index + 1,
                        text: name.clone(),
                    });
                }
            }
            Err(error) => problems.push((index, error)),
        }
    }
    changes.sort_by_key(|change| (change.range.start, change.order));
    // Several edits may ask for the same comma.
    changes.dedup_by(|a, b| a.order == 0 && b.order == 0 && a.range == b.range);
    let edited = apply_changes(text, &changes);
    // A source that cannot be read is a problem of each edit already.
    let is_unreadable = |error: &AnchorError| matches!(error, AnchorError::Unreadable { .. });
    let broken = match problems.iter().any(|(_, error)| is_unreadable(error)) {
        true => None,
        false => check_language(extension, &edited).err(),
    };
    EditedText {
        text: edited,
        problems,
        broken,
    }
}

fn find_targets(
    extension: Option<&str>,
    text: &str,
    edits: &[&Edit],
) -> Vec<Result<Target, AnchorError>> {
    let each = |resolve: &dyn Fn(&Edit) -> Result<Target, AnchorError>| {
        edits.iter().map(|edit| resolve(edit)).collect()
    };
    match extension {
        Some("rs") => {
            let source = RustSource::parse(text);
            each(&|edit| match &source {
                Ok(source) => rust_anchor::resolve(source, &edit.anchor, &edit.text),
                Err(error) => Err(error.clone()),
            })
        }
        Some("yaml" | "yml") => each(&|edit| yaml_anchor::resolve(text, &edit.anchor)),
        Some("toml") => each(&|edit| toml_anchor::resolve(text, &edit.anchor)),
        _ => each(&|edit| text_anchor::resolve(text, &edit.anchor)),
    }
}

/// Checks that a text is a source of the language that its file's name says.
fn check_language(extension: Option<&str>, text: &str) -> Result<(), AnchorError> {
    match extension {
        Some("rs") => RustSource::parse(text).map(drop),
        Some("toml") => toml_anchor::check(text),
        _ => Ok(()),
    }
}

/// Returns the text to insert, so that it begins and ends with lines of its own.
fn inserted_lines(text: &str, at: usize, inserted: &str) -> String {
    let begins = at == lines::start(text, at);
    let ends = inserted.ends_with('\n') || inserted.is_empty();
    let [before, after] = [begins, ends].map(|is_line| if is_line { "" } else { "\n" });
    format!("{before}{inserted}{after}")
}

fn apply_changes(text: &str, changes: &[Change]) -> String {
    let (mut edited, mut done) = (String::with_capacity(text.len()), 0);
    for change in changes {
        edited.push_str(text.get(done..change.range.start).unwrap_or_default());
        edited.push_str(&change.text);
        done = change.range.end.max(done);
    }
    edited.push_str(&text[done..]);
    edited
}

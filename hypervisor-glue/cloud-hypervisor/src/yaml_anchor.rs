//! Anchors in YAML files: keys, whose blocks end where the indentation does.

use std::ops::Range;

use crate::anchor::{Anchor, AnchorError, Place, Target, exactly_one};
use crate::lines;

/// Line of a file.
struct Line<'a> {
    at: usize,
    indentation: usize,
    content: &'a str,
}

impl Line<'_> {
    fn is_blank(&self) -> bool {
        self.content.is_empty()
    }

    fn is_comment(&self) -> bool {
        self.content.starts_with('#')
    }

    fn is_item(&self) -> bool {
        self.content == "-" || self.content.starts_with("- ")
    }

    /// Returns whether the line starts with this key, or is this item of a list.
    fn has_name(&self, name: &str) -> bool {
        match self.content.strip_prefix("- ") {
            Some(item) => unquoted(item.trim()) == name,
            None => key(self.content).is_some_and(|key| key == name),
        }
    }
}

/// Finds an anchor.
pub(crate) fn resolve(text: &str, anchor: &Anchor) -> Result<Target, AnchorError> {
    let lines: Vec<_> = lines::of(text)
        .map(|(at, line)| Line {
            at,
            indentation: lines::indentation(line),
            content: line.trim(),
        })
        .collect();
    // Lines of the children of the innermost key.
    let mut inside = 0..lines.len();
    let mut path: Vec<&str> = Vec::new();
    for key in &anchor.within {
        path.push(key);
        let block = find(text, &lines, &inside, key, &path)?;
        inside = block.start + 1..block.end;
    }
    let position = |index: usize| lines.get(index).map_or(text.len(), |line| line.at);
    let at = match &anchor.place {
        Place::After(name) | Place::Before(name) => {
            path.push(name);
            let block = find(text, &lines, &inside, name, &path)?;
            match anchor.place {
                Place::After(_) => position(block.end),
                _ => position(start_of_comments(&lines, &inside, block.start)),
            }
        }
        Place::Start => position(inside.start),
        Place::End => position(end_of_content(&lines, &inside)),
        Place::Imports | Place::Rename(_) => {
            let kind = "A YAML file".to_owned();
            return Err(AnchorError::NoPlace(kind, anchor.place.key()));
        }
    };
    Ok(Target::Insert { at, comma: None })
}

/// Finds the only block of a key among the children in a range of lines.
fn find(
    text: &str,
    lines: &[Line<'_>],
    inside: &Range<usize>,
    name: &str,
    path: &[&str],
) -> Result<Range<usize>, AnchorError> {
    let is_content = |line: &&Line<'_>| !line.is_blank() && !line.is_comment();
    let first = lines[inside.clone()].iter().find(is_content);
    let indentation = first.map_or(0, |line| line.indentation);
    let found: Vec<_> = inside
        .clone()
        .filter(|index| lines[*index].indentation == indentation && lines[*index].has_name(name))
        .collect();
    let start = exactly_one(
        found,
        text,
        || format!("The key `{}`", path.join("`, `")),
        |index| lines[*index].at,
    )?;
    let end = (start + 1..inside.end).find(|index| {
        let line = &lines[*index];
        // A list that is the value of a key may have the key's indentation.
        let is_value = line.indentation > indentation
            || line.indentation == indentation && line.is_item() && !lines[start].is_item();
        is_content(&line) && !is_value
    });
    let end = end.unwrap_or(inside.end);
    let last = (start..end).rfind(|index| {
        let line = &lines[*index];
        is_content(&line) || line.is_comment() && line.indentation > indentation
    });
    Ok(start..last.map_or(end, |last| last + 1))
}

/// Returns the first of the comment lines directly above a line.
fn start_of_comments(lines: &[Line<'_>], inside: &Range<usize>, index: usize) -> usize {
    (inside.start..index)
        .rev()
        .take_while(|above| lines[*above].is_comment())
        .last()
        .unwrap_or(index)
}

/// Returns the line behind the last one that is not blank.
fn end_of_content(lines: &[Line<'_>], inside: &Range<usize>) -> usize {
    let last = inside.clone().rfind(|index| !lines[*index].is_blank());
    last.map_or(inside.start, |last| last + 1)
}

/// Returns the key at the start of a line.
fn key(content: &str) -> Option<&str> {
    if let Some(quote) = content.chars().next().filter(|c| "\"'".contains(*c)) {
        let (key, rest) = content[1..].split_once(quote)?;
        return rest.trim_start().starts_with(':').then_some(key);
    }
    let end = content
        .match_indices(':')
        .map(|(at, _)| at)
        .find(|at| matches!(content[at + 1..].chars().next(), None | Some(' ' | '\t')))?;
    Some(content[..end].trim())
}

/// Returns a scalar without its quotes.
fn unquoted(scalar: &str) -> &str {
    ['"', '\'']
        .into_iter()
        .find_map(|quote| scalar.strip_prefix(quote)?.strip_suffix(quote))
        .unwrap_or(scalar)
}

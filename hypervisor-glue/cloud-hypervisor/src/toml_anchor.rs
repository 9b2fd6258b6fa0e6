//! Anchors in TOML files: tables and keys.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::anchor::{Anchor, AnchorError, Place, Target, exactly_one};
use crate::lines;

/// Key of a table.
struct Entry<'a> {
    name: &'a str,
    /// Positions of the key and the value.
    range: Range<usize>,
    value: &'a DeValue<'a>,
    /// True if the key is that of a table with a header.
    has_header: bool,
}

/// Finds an anchor.
pub(crate) fn resolve(text: &str, anchor: &Anchor) -> Result<Target, AnchorError> {
    let document = parse(text)?;
    let mut table = document.get_ref();
    let mut start = 0;
    for header in &anchor.within {
        for name in names(header, table) {
            let describe = || format!("The table `{header}`");
            let entry = find(text, table, &name, describe)?;
            let DeValue::Table(inner) = entry.value else {
                return Err(AnchorError::NoBody(describe()));
            };
            start = lines::next(text, entry.range.start);
            table = inner;
        }
    }
    let at = match &anchor.place {
        Place::After(name) | Place::Before(name) => {
            let describe = || match anchor.within.as_slice() {
                [] => format!("The key `{name}`"),
                within => format!("The key `{name}` in `{}`", within.join("`, `")),
            };
            let entry = find(text, table, name, describe)?;
            match anchor.place {
                Place::After(_) => lines::next(text, entry.range.end),
                _ => above_comments(text, start, lines::start(text, entry.range.start)),
            }
        }
        Place::Start => start,
        Place::End if anchor.within.is_empty() => text.len(),
        Place::End => entries(text, table)
            .filter(|entry| !entry.has_header)
            .map(|entry| lines::next(text, entry.range.end))
            .max()
            .unwrap_or(start),
        Place::Imports | Place::Rename(_) => {
            let kind = "A TOML file".to_owned();
            return Err(AnchorError::NoPlace(kind, anchor.place.key()));
        }
    };
    Ok(Target::Insert { at, comma: None })
}

/// Splits a table's header into keys, unless it is a key of the table as a whole.
fn names(header: &str, table: &DeTable<'_>) -> Vec<String> {
    if table.iter().any(|(key, _)| key.get_ref() == header) {
        return vec![header.to_owned()];
    }
    let (mut names, mut quote) = (vec![String::new()], None);
    for c in header.chars() {
        match (quote, c) {
            (None, '"' | '\'') => quote = Some(c),
            (Some(mark), c) if mark == c => quote = None,
            (None, '.') => names.push(String::new()),
            (None, c) if c.is_whitespace() => {}
            _ => names.last_mut().into_iter().for_each(|name| name.push(c)),
        }
    }
    names
}

fn find<'a>(
    text: &'a str,
    table: &'a DeTable<'_>,
    name: &str,
    describe: impl FnOnce() -> String,
) -> Result<Entry<'a>, AnchorError> {
    let found = entries(text, table).filter(|entry| entry.name == name);
    exactly_one(found.collect(), text, describe, |entry| entry.range.start)
}

fn entries<'a>(text: &'a str, table: &'a DeTable<'_>) -> impl Iterator<Item = Entry<'a>> {
    table.iter().map(move |(key, value)| {
        let start = key.span().start;
        let line = &text[lines::start(text, start)..];
        Entry {
            name: key.get_ref(),
            range: start..end(value).max(key.span().end),
            value: value.get_ref(),
            has_header: line.trim_start().starts_with('['),
        }
    })
}

/// Returns the end of a value. That of a table is the end of its last value.
fn end(value: &Spanned<DeValue<'_>>) -> usize {
    let inner = match value.get_ref() {
        DeValue::Table(table) => table.iter().map(|(_, value)| end(value)).max(),
        _ => None,
    };
    inner.unwrap_or(0).max(value.span().end)
}

/// Returns the start of the comment lines directly above a line.
fn above_comments(text: &str, bound: usize, mut line: usize) -> usize {
    while line > bound {
        let above = lines::start(text, line - 1);
        if !lines::rest(text, above).trim_start().starts_with('#') {
            break;
        }
        line = above;
    }
    line
}

/// Checks that a text is TOML.
pub(crate) fn check(text: &str) -> Result<(), AnchorError> {
    parse(text).map(drop)
}

fn parse(text: &str) -> Result<Spanned<DeTable<'_>>, AnchorError> {
    DeTable::parse(text).map_err(|e| AnchorError::Unreadable {
        language: "TOML",
        problem: e.to_string().trim().to_owned(),
    })
}

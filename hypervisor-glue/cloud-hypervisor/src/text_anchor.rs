//! Anchors in texts, such as Markdown: lines that contain a word or a path, and sections.

use std::ops::Range;

use crate::anchor::{Anchor, AnchorError, Place, Target, exactly_one};
use crate::lines;

/// Finds an anchor.
pub(crate) fn resolve(text: &str, anchor: &Anchor) -> Result<Target, AnchorError> {
    let mut section = 0..text.len();
    for heading in &anchor.within {
        section = find_section(text, &section, heading)?;
    }
    let at = match &anchor.place {
        Place::After(name) => lines::next(text, find_line(text, &section, anchor, name)?),
        Place::Before(name) => find_line(text, &section, anchor, name)?,
        Place::Start if anchor.within.is_empty() => 0,
        Place::Start => lines::next(text, section.start),
        Place::End => section.start + end_of_content(&text[section]),
        Place::Imports | Place::Rename(_) => {
            let kind = "A text".to_owned();
            return Err(AnchorError::NoPlace(kind, anchor.place.key()));
        }
    };
    Ok(Target::Insert { at, comma: None })
}

/// Returns the length of a text without the blank lines at its end.
pub(crate) fn end_of_content(text: &str) -> usize {
    lines::of(text)
        .filter(|(_, line)| !line.trim().is_empty())
        .last()
        .map_or(0, |(at, _)| lines::next(text, at))
}

/// Finds the only line that contains a name, and returns its start.
fn find_line(
    text: &str,
    section: &Range<usize>,
    anchor: &Anchor,
    name: &str,
) -> Result<usize, AnchorError> {
    let found = lines::of(&text[section.clone()])
        .filter(|(_, line)| contains_word(line, name))
        .map(|(at, _)| section.start + at)
        .collect();
    let describe = || match anchor.within.as_slice() {
        [] => format!("`{name}`"),
        within => format!("`{name}` in `{}`", within.join("`, `")),
    };
    exactly_one(found, text, describe, |at| *at)
}

/// Returns whether a line contains a name as a whole word or path.
fn contains_word(line: &str, name: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || "_-/".contains(c);
    !name.is_empty()
        && line.match_indices(name).any(|(at, _)| {
            let mut before = line[..at].chars().rev();
            let mut after = line[at + name.len()..].chars();
            let continues = |first: Option<char>, second: Option<char>| match first {
                Some('.') => second.is_some_and(is_part),
                Some(c) => is_part(c),
                None => false,
            };
            !continues(before.next(), before.next()) && !continues(after.next(), after.next())
        })
}

/// Finds the section under a heading in a part of the text, and returns its positions with the heading's line.
fn find_section(
    text: &str,
    within: &Range<usize>,
    heading: &str,
) -> Result<Range<usize>, AnchorError> {
    let headings = headings(&text[within.clone()]);
    let sections = headings.iter().enumerate().filter_map(|(index, found)| {
        let (at, level, title) = found;
        let next = headings[index + 1..]
            .iter()
            .find(|(_, other, _)| other <= level);
        let end = next.map_or(within.end, |(end, ..)| within.start + end);
        (*title == heading.trim()).then_some(within.start + at..end)
    });
    let describe = || format!("The heading `{heading}`");
    exactly_one(sections.collect(), text, describe, |section| section.start)
}

/// Returns the position, the level and the title of each heading of a Markdown text.
fn headings(text: &str) -> Vec<(usize, usize, &str)> {
    let (mut found, mut fence) = (Vec::new(), None);
    for (at, line) in lines::of(text) {
        let start = line.trim_start();
        match fence {
            Some(mark) if start.starts_with(mark) => fence = None,
            Some(_) => {}
            None => {
                fence = ["```", "~~~"]
                    .into_iter()
                    .find(|mark| start.starts_with(mark));
                let level = line.len() - line.trim_start_matches('#').len();
                if (1..=6).contains(&level) && line[level..].starts_with([' ', '\t']) {
                    found.push((at, level, line[level..].trim().trim_end_matches('#').trim()));
                }
            }
        }
    }
    found
}

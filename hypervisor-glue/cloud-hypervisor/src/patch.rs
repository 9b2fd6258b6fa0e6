//! Patch format: lines to add to files with known contents.

use std::fmt;

use thiserror::Error;

use crate::blob::BlobId;

/// Error of parsing a patch.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("Line {line} of the patch: {problem}")]
pub struct ParseError {
    /// Line number, from 1.
    pub line: usize,
    /// Description of the problem.
    pub problem: &'static str,
}

/// Lines to add to one file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FilePatch {
    /// Path in the checkout, without `..`.
    pub(crate) path: String,
    /// Id of the content for which the patch was made; `None` for a new file.
    pub(crate) before: Option<BlobId>,
    /// Id of the content of the patched file.
    pub(crate) after: BlobId,
    hunks: Vec<Hunk>,
}

#[derive(Debug, PartialEq, Eq)]
struct Hunk {
    /// Number of lines of the unpatched file in front of the added lines.
    lines_before: usize,
    lines: Vec<String>,
}

/// Patch of a checkout: additions to several files.
#[derive(Debug, PartialEq, Eq)]
pub struct Patch {
    pub(crate) files: Vec<FilePatch>,
}

impl Patch {
    /// Parses a patch as git writes it with `--unified=0 --full-index`, without the text that git quotes after the second
    /// `@@`.
    ///
    /// # Errors
    /// The text is not a patch of this form: for example, it removes lines, contains context lines, or abbreviates blob
    /// ids.
    pub fn parse(text: &str) -> Result<Self, ParseError> {
        let mut files: Vec<FilePatch> = Vec::new();
        let mut lines = (1..).zip(text.lines()).peekable();
        while let Some((line, text)) = lines.next() {
            let fail = |problem| ParseError { line, problem };
            let path = text.strip_prefix("diff --git a/").and_then(|paths| {
                let (a, b) = paths.split_at_checked(paths.len().checked_sub(3)? / 2)?;
                (b.strip_prefix(" b/")? == a).then_some(a)
            });
            let path = path.ok_or_else(|| {
                fail("it does not begin a file, as \"diff --git a/PATH b/PATH\" does")
            })?;
            let is_inside = path.split('/').all(|part| !matches!(part, "" | "." | ".."));
            if !is_inside || files.iter().any(|file| file.path == path) {
                return Err(fail(
                    "the path is none inside of the checkout, or there twice",
                ));
            }
            let mut next = |problem| {
                let fail = ParseError {
                    line: line + 1,
                    problem,
                };
                lines.next().ok_or(fail)
            };
            let mut header = next("the file has no index line")?;
            let is_new = header.1 == "new file mode 100644";
            if is_new {
                header = next("the file has no index line")?;
            }
            let (line, text) = header;
            let ids = text.strip_prefix("index ").and_then(|ids| {
                let ids = match is_new {
                    true => ids,
                    false => ids
                        .strip_suffix(" 100644")
                        .or_else(|| ids.strip_suffix(" 100755"))?,
                };
                let (before, after) = ids.split_once("..")?;
                Some((before.parse().ok()?, after.parse().ok()?))
            });
            let (before, after): (BlobId, BlobId) = ids.ok_or(ParseError {
                line,
                problem: "it is no index line with two ids of 40 digits",
            })?;
            if before.is_missing() != is_new {
                return Err(ParseError {
                    line,
                    problem: "a file is new if its first id is zeros",
                });
            }
            let (from, to) = match is_new {
                true => ("--- /dev/null".to_owned(), format!("+++ b/{path}")),
                false => (format!("--- a/{path}"), format!("+++ b/{path}")),
            };
            for expected in [from, to] {
                let (line, text) = next("the file has no names")?;
                if text != expected {
                    let problem = "it does not name the file";
                    return Err(ParseError { line, problem });
                }
            }
            let mut hunks: Vec<Hunk> = Vec::new();
            while let Some((line, header)) = lines.next_if(|(_, text)| text.starts_with("@@ ")) {
                let fail = |problem| ParseError { line, problem };
                let (at, count) = parse_hunk_header(header).ok_or_else(|| {
                    fail("it is no \"@@ -LINE,0 +LINE,COUNT @@\", or has something behind that")
                })?;
                if hunks.last().is_some_and(|before| before.lines_before >= at) {
                    return Err(fail("its place is not behind that of the hunk before"));
                }
                let mut own = Vec::new();
                for _ in 0..count {
                    let added = lines.next().and_then(|(_, text)| text.strip_prefix('+'));
                    let added =
                        added.ok_or_else(|| fail("it has fewer added lines than it says"))?;
                    own.push(added.to_owned());
                }
                hunks.push(Hunk {
                    lines_before: at,
                    lines: own,
                });
            }
            files.push(FilePatch {
                path: path.to_owned(),
                before: (!is_new).then_some(before),
                after,
                hunks,
            });
        }
        Ok(Self { files })
    }
}

/// Parses a hunk's header. Returns the number of lines before the added lines, and the number of added lines.
fn parse_hunk_header(header: &str) -> Option<(usize, usize)> {
    let ranges = header.strip_prefix("@@ -")?.strip_suffix(" @@")?;
    let (old, new) = ranges.split_once(" +")?;
    let at = old.strip_suffix(",0")?.parse().ok()?;
    let (start, count) = new.split_once(',').unwrap_or((new, "1"));
    start.parse::<usize>().ok()?;
    let count = count.parse().ok()?;
    (count > 0).then_some((at, count))
}

impl FilePatch {
    /// Returns the content with the added lines; `None` if the result does not have the expected id.
    pub(crate) fn apply_to(&self, content: &[u8]) -> Option<Vec<u8>> {
        let mut old = content.split_inclusive(|byte| *byte == b'\n');
        let mut new = Vec::with_capacity(content.len());
        let mut done = 0;
        for hunk in &self.hunks {
            while done < hunk.lines_before {
                new.extend(old.next()?);
                done += 1;
            }
            for line in &hunk.lines {
                new.extend(line.as_bytes());
                new.push(b'\n');
            }
        }
        new.extend(old.flatten());
        (BlobId::from_content(&new) == self.after).then_some(new)
    }
}

impl fmt::Display for FilePatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.path)
    }
}

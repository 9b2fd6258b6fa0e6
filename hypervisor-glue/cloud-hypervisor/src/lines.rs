//! Lines of a text, by byte positions.

/// Returns the start of the line that contains a position.
pub(crate) fn start(text: &str, at: usize) -> usize {
    text[..at].rfind('\n').map_or(0, |newline| newline + 1)
}

/// Returns the start of the next line, or the end of the text.
pub(crate) fn next(text: &str, at: usize) -> usize {
    let newline = text[at..].find('\n');
    newline.map_or(text.len(), |newline| at + newline + 1)
}

/// Returns the rest of the line from a position, without its end.
pub(crate) fn rest(text: &str, at: usize) -> &str {
    text[at..next(text, at)].trim_end_matches(['\n', '\r'])
}

/// Returns the number of the line that contains a position, from 1.
pub(crate) fn number(text: &str, at: usize) -> usize {
    text[..at].matches('\n').count() + 1
}

/// Returns the lines of a text with their positions, without their ends.
pub(crate) fn of(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut at = 0;
    text.split_inclusive('\n').map(move |line| {
        let start = at;
        at += line.len();
        (start, line.trim_end_matches(['\n', '\r']))
    })
}

/// Returns the number of spaces and tabs at the start of a line.
pub(crate) fn indentation(line: &str) -> usize {
    line.len() - line.trim_start_matches([' ', '\t']).len()
}

//! Text of log messages: one line of bounded length, even if a guest, client or file controls the content.

use std::fmt::{self, Write};

/// Maximum size of a message in bytes. Longer messages are cut.
pub(super) const MESSAGE_MAX: usize = 4096;

/// Maximum size of a journal field's value in bytes.
pub(super) const FIELD_MAX: usize = 512;

/// Suffix of a cut text.
const TRUNCATION_MARK: &str = "… (cut)";

/// Formats a text as one line and cuts it at `most` bytes. Escapes characters that move a terminal's cursor or reorder the
/// terminal's text. Ends formatting at the cut, since the remaining text may be long.
pub(super) fn format_line(text: fmt::Arguments<'_>, most: usize) -> String {
    let mut line = BoundedLine {
        text: String::new(),
        max_bytes: most,
        is_truncated: false,
    };
    // Fails once the line is full, which ends formatting.
    let _ = line.write_fmt(text);
    if line.is_truncated {
        line.text.push_str(TRUNCATION_MARK);
    }
    line.text
}

/// A line that accepts up to `max_bytes` bytes.
struct BoundedLine {
    text: String,
    max_bytes: usize,
    is_truncated: bool,
}

impl Write for BoundedLine {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        for char in part.chars() {
            let before = self.text.len();
            if is_printable(char) {
                self.text.push(char);
            } else {
                self.text.extend(char.escape_default());
            }
            if self.text.len() > self.max_bytes {
                self.text.truncate(before);
                self.is_truncated = true;
                return Err(fmt::Error);
            }
        }
        Ok(())
    }
}

/// Returns whether a character can be logged unescaped.
fn is_printable(char: char) -> bool {
    !matches!(
        char,
        // Controls, including line ends and escapes.
        '\0'..='\x1f' | '\x7f'..='\u{9f}'
        // Line and paragraph separators.
        | '\u{2028}' | '\u{2029}'
        // Bidirectional marks, embeddings, overrides and isolates.
        | '\u{061c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        // Invisible characters: joiners, fillers, byte order marks, annotations, tags.
        | '\u{ad}' | '\u{200b}'..='\u{200d}' | '\u{2060}'..='\u{2065}' | '\u{206a}'..='\u{206f}'
        | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}'
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn foreign_text_stays_in_its_line() {
        for (text, line) in [
            ("a\n2026 ERROR [main] b", r"a\n2026 ERROR [main] b"),
            ("\u{1b}[31mred\u{1b}[0m", r"\u{1b}[31mred\u{1b}[0m"),
            ("\r\x08\x07\u{9b}2J", r"\r\u{8}\u{7}\u{9b}2J"),
            ("vm\u{202e}7\u{2066}", r"vm\u{202e}7\u{2066}"),
            ("a\u{2028}b\u{feff}", r"a\u{2028}b\u{feff}"),
            ("Größe 4 µs: „ok“, 東", "Größe 4 µs: „ok“, 東"),
        ] {
            assert_eq!(format_line(format_args!("{text}"), 100), line, "{text:?}");
        }
    }

    #[test]
    fn long_text_is_cut_and_formatted_no_further() {
        struct EndlessText;
        impl fmt::Display for EndlessText {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                loop {
                    f.write_str("0123456789")?;
                }
            }
        }
        let line = format_line(format_args!("{EndlessText}"), 25);
        assert_eq!(line, "0123456789012345678901234… (cut)");
        let whole = format_line(format_args!("{}", "é".repeat(10)), 20);
        assert_eq!(whole, "é".repeat(10));
    }

    proptest! {
        #[test]
        fn any_text_is_one_bounded_line(text in any::<String>(), most in 0_usize..40) {
            let line = format_line(format_args!("{text}"), most);
            prop_assert!(line.len() <= most + TRUNCATION_MARK.len());
            let ends = line.chars().filter(|char| !is_printable(*char));
            prop_assert_eq!(ends.count(), 0);
        }
    }
}

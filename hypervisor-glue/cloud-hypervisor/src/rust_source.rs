//! Rust sources: their syntax tree, and their tokens with byte positions.

use std::ops::Range;

use proc_macro2::{TokenStream, TokenTree};
use syn::LitStr;
use syn::spanned::Spanned;

use crate::anchor::AnchorError;
use crate::lines;

const BYTE_ORDER_MARK: &str = "\u{feff}";

/// Token without its position.
#[derive(Clone, Debug, PartialEq, Eq)]
enum TokenKind {
    Identifier(String),
    Mark(char),
    String(String),
    Literal(String),
}

#[derive(Clone, Debug)]
struct Token {
    kind: TokenKind,
    range: Range<usize>,
}

/// Parsed Rust source.
pub(crate) struct RustSource<'a> {
    pub(crate) text: &'a str,
    pub(crate) file: syn::File,
    /// Tokens in the order of the text. Each delimiter is a token of its own.
    tokens: Vec<Token>,
    /// Length of what precedes the text that the spans refer to.
    offset: usize,
}

impl<'a> RustSource<'a> {
    pub(crate) fn parse(text: &'a str) -> Result<Self, AnchorError> {
        let offset = match text.starts_with(BYTE_ORDER_MARK) {
            true => BYTE_ORDER_MARK.len(),
            false => 0,
        };
        let mut parsed = text[offset..].to_owned();
        // An interpreter's line is no Rust. Inner attributes start in the same way.
        if parsed.starts_with("#!") && !parsed[2..].trim_start().starts_with('[') {
            let length = lines::rest(&parsed, 0).len();
            parsed.replace_range(..length, &" ".repeat(length));
        }
        let unreadable = |problem: String, line: usize| AnchorError::Unreadable {
            language: "Rust",
            problem: format!("line {line}: {problem}"),
        };
        let tokens: TokenStream = parsed
            .parse()
            .map_err(|e: proc_macro2::LexError| unreadable(e.to_string(), e.span().start().line))?;
        let mut source = Self {
            text,
            file: syn::parse2(tokens.clone())
                .map_err(|e| unreadable(e.to_string(), e.span().start().line))?,
            tokens: Vec::new(),
            offset,
        };
        flatten(tokens, offset, &mut source.tokens);
        Ok(source)
    }

    /// Returns the byte positions of a part of the syntax tree.
    pub(crate) fn range(&self, part: &impl Spanned) -> Range<usize> {
        self.positions(part.span())
    }

    /// Returns the byte positions of a span.
    pub(crate) fn positions(&self, span: proc_macro2::Span) -> Range<usize> {
        let range = span.byte_range();
        range.start + self.offset..range.end + self.offset
    }

    /// Returns the positions of a name: an identifier, a sequence of tokens such as `Kind::Name`, or a whole string literal.
    pub(crate) fn find(&self, name: &Name, within: &Range<usize>) -> Vec<Range<usize>> {
        let tokens = self.tokens_in(within);
        let mut found = Vec::new();
        for (index, token) in tokens.iter().enumerate() {
            if matches!(&token.kind, TokenKind::String(text) if *text == name.text) {
                found.push(token.range.clone());
            } else if let Some(last) = name.tokens.len().checked_sub(1)
                && let Some(window) = tokens.get(index..=index + last)
                && window.iter().map(|token| &token.kind).eq(&name.tokens)
            {
                found.push(token.range.start..window[last].range.end);
            }
        }
        found
    }

    /// Returns whether a part of the source mentions a name.
    pub(crate) fn mentions(&self, name: &Name, within: &Range<usize>) -> bool {
        !self.find(name, within).is_empty()
    }

    /// Returns whether the last tokens of a part of the source are a name.
    pub(crate) fn ends_with(&self, name: &Name, within: &Range<usize>) -> bool {
        let tokens = self.tokens_in(within);
        !name.tokens.is_empty()
            && tokens.len() >= name.tokens.len()
            && tokens[tokens.len() - name.tokens.len()..]
                .iter()
                .map(|token| &token.kind)
                .eq(&name.tokens)
    }

    /// Returns the end of the comma that follows a position, if the next token is one.
    pub(crate) fn comma_after(&self, at: usize) -> Option<usize> {
        let index = self.tokens.partition_point(|token| token.range.start < at);
        let token = self.tokens.get(index)?;
        (token.kind == TokenKind::Mark(',')).then_some(token.range.end)
    }

    /// Returns the end of the last token that lies in front of a position.
    pub(crate) fn end_before(&self, at: usize) -> usize {
        let index = self.tokens.partition_point(|token| token.range.end <= at);
        let token = index.checked_sub(1).and_then(|i| self.tokens.get(i));
        token.map_or(0, |token| token.range.end)
    }

    /// Returns where a comma is missing in front of the end of a list that starts behind its opening delimiter.
    pub(crate) fn missing_comma(&self, list: &Range<usize>) -> Option<usize> {
        let token = self.tokens_in(list).last()?;
        (token.kind != TokenKind::Mark(',')).then_some(token.range.end)
    }

    /// Returns the place of lines that follow a position: the next line if the position's line has only a comment left.
    pub(crate) fn line_after(&self, at: usize) -> usize {
        let rest = lines::rest(self.text, at).trim();
        let is_block_comment =
            rest.starts_with("/*") && rest.find("*/").is_some_and(|end| end + 2 == rest.len());
        match rest.is_empty() || rest.starts_with("//") && !is_doc_comment(rest) || is_block_comment
        {
            true => lines::next(self.text, at),
            false => at,
        }
    }

    /// Returns the place of lines that precede a part of the source: in front of the comment lines directly above it.
    pub(crate) fn line_before(&self, at: usize) -> usize {
        let text = self.text;
        let bound = self.end_before(at);
        let mut place = lines::start(text, at);
        if place < bound || !text[place..at].trim().is_empty() {
            return at;
        }
        while place > bound {
            let above = lines::start(text, place - 1);
            if above < bound || !lines::rest(text, above).trim_start().starts_with("//") {
                break;
            }
            place = above;
        }
        place
    }

    /// Returns the place of the first item. A comment at the start of the file, such as a licence, precedes it.
    pub(crate) fn start_of_items(&self) -> usize {
        let Some(item) = self.file.items.first() else {
            return self.text.len();
        };
        let item = self.range(item).start;
        match self.line_before(item) {
            place if place > self.offset => place,
            _ => lines::start(self.text, item).max(self.offset),
        }
    }

    /// Returns the tokens that lie in a part of the source.
    fn tokens_in(&self, range: &Range<usize>) -> &[Token] {
        let start = self
            .tokens
            .partition_point(|token| token.range.start < range.start);
        let end = self
            .tokens
            .partition_point(|token| token.range.end <= range.end);
        self.tokens.get(start..end).unwrap_or_default()
    }
}

/// Returns whether a comment documents the next item, and so is a token.
fn is_doc_comment(comment: &str) -> bool {
    comment.starts_with("///") && !comment.starts_with("////") || comment.starts_with("//!")
}

/// Name to look for in a source.
pub(crate) struct Name {
    text: String,
    tokens: Vec<TokenKind>,
}

impl Name {
    pub(crate) fn new(text: &str) -> Self {
        let mut tokens = Vec::new();
        if let Ok(stream) = text.parse() {
            flatten(stream, 0, &mut tokens);
        }
        Self {
            text: text.to_owned(),
            tokens: tokens.into_iter().map(|token| token.kind).collect(),
        }
    }

    /// Returns whether the name is this identifier.
    pub(crate) fn is_identifier(&self, identifier: &syn::Ident) -> bool {
        identifier == self.text.trim()
    }

    /// Returns whether a path ends with this name. Generic arguments do not count.
    pub(crate) fn is_end_of(&self, path: &syn::Path) -> bool {
        let mut tokens = Vec::new();
        for segment in &path.segments {
            tokens.extend([TokenKind::Mark(':'), TokenKind::Mark(':')]);
            tokens.push(TokenKind::Identifier(segment.ident.to_string()));
        }
        !self.tokens.is_empty() && tokens.ends_with(&self.tokens)
    }
}

fn flatten(stream: TokenStream, offset: usize, tokens: &mut Vec<Token>) {
    let mut push = |kind, span: proc_macro2::Span| {
        let range = span.byte_range();
        let range = range.start + offset..range.end + offset;
        tokens.push(Token { kind, range });
    };
    let mut open = vec![(stream.into_iter(), None)];
    while let Some((stream, close)) = open.last_mut() {
        match stream.next() {
            Some(TokenTree::Group(group)) => {
                let (first, last) = match group.delimiter() {
                    proc_macro2::Delimiter::Parenthesis => ('(', ')'),
                    proc_macro2::Delimiter::Brace => ('{', '}'),
                    proc_macro2::Delimiter::Bracket => ('[', ']'),
                    proc_macro2::Delimiter::None => {
                        open.push((group.stream().into_iter(), None));
                        continue;
                    }
                };
                push(TokenKind::Mark(first), group.span_open());
                let close = Some((TokenKind::Mark(last), group.span_close()));
                open.push((group.stream().into_iter(), close));
            }
            Some(TokenTree::Ident(ident)) => {
                push(TokenKind::Identifier(ident.to_string()), ident.span());
            }
            Some(TokenTree::Punct(mark)) => push(TokenKind::Mark(mark.as_char()), mark.span()),
            Some(TokenTree::Literal(literal)) => {
                let span = literal.span();
                let text = literal.to_string();
                let kind = match text.starts_with(['"', 'r']) {
                    true => syn::parse2::<LitStr>(TokenTree::from(literal).into())
                        .map_or(TokenKind::Literal(text), |literal| {
                            TokenKind::String(literal.value())
                        }),
                    false => TokenKind::Literal(text),
                };
                push(kind, span);
            }
            None => {
                if let Some((kind, span)) = close.take() {
                    push(kind, span);
                }
                open.pop();
            }
        }
    }
}

//! Anchors: lines are inserted where names say, and every other line stays as it was.

use std::path::Path;

use patch_vmm::anchor::{Anchor, AnchorError, Place};
use patch_vmm::edit::{Edit, EditedText, apply};
use proptest::prelude::*;

const RUST: &str = r##"#!/usr/bin/env sample
// Licence of the sample

//! Größe, a sample with ä, ö and 🦀 in front of all anchors.

#![allow(dead_code)]

use std::fmt; // of messages
#[cfg(test)]
use std::io;

/// Fruit of the sample
enum Fruit {
    /// Red or green
    #[sample("apple-name")]
    Apple(String), // the first
    // A comment on the pear
    /// Yellow
    Pear { size: u8 },
    Plum
}

struct Basket {
    fruits: Vec<Fruit>,
    // Of the basket
    owner: String
}

trait Weigh {
    fn weigh(&self) -> u32;

    fn is_heavy(&self) -> bool {
        self.weigh() > 9
    }
}

impl Basket {
    fn new(owner: &str) -> Self {
        let fruits = vec!["ä🦀", "list-end"];
        log!("new {owner}", label_of(owner));
        Self {
            fruits: pick(&fruits),
            owner: owner.to_owned(),
        }
    }
}

impl Weigh for Basket {
    fn weigh(&self) -> u32 {
        let weights = [ONE, TWO];
        match self.owner.as_str() {
            "nobody" => 0,
            // Somebody
            _ if self.is_mine() => { 1 }
            _ => weights.len() as u32
        }
    }
}

impl Basket {
    fn sort(&mut self, order: Order) {
        if order == Order::Down {
            self.fruits.reverse();
        } else {
            self.fruits.sort();
        }
        for fruit in &self.fruits {
            ripen(fruit);
        }
        while self.is_full() {
            self.eat();
        }
        self.visit(|fruit| {
            fruit.wash();
        });
        connect(
            self.fruits.len(),
            self.owner.clone()
        );
        match order {
            Order::Up => {
                climb();
            }
            Order::Down => descend(),
        }
        let rest = Basket {
            owner: String::new(),
            ..Basket::default()
        };
    }
}

const NAMES: &[&str] = &[
    "apple",
    "pear" // last
];

fn rules() -> Rules {
    Ok(vec![
        (libc::ONE, vec![]),
        #[cfg(test)]
        (libc::TWO, or![both![2, THREE], FOUR]),
    ])
}

mod unit_tests {
    use super::*;

    fn test_it() {}
}
"##;

fn edit(file: &str, within: &[&str], place: Place, text: &str) -> Edit {
    Edit {
        file: file.to_owned(),
        versions: None,
        anchor: Anchor {
            within: within.iter().map(ToString::to_string).collect(),
            place,
        },
        text: text.to_owned(),
    }
}

fn after(name: &str) -> Place {
    Place::After(name.to_owned())
}

fn before(name: &str) -> Place {
    Place::Before(name.to_owned())
}

fn applied(file: &str, text: &str, edits: &[Edit]) -> EditedText {
    apply(Path::new(file), text, &edits.iter().collect::<Vec<_>>())
}

/// Inserts a line, and returns the lines directly above and below it.
#[track_caller]
fn neighbours(
    file: &str,
    text: &str,
    within: &[&str],
    place: Place,
    line: &str,
) -> (String, String) {
    let edited = applied(file, text, &[edit(file, within, place, line)]);
    assert!(edited.problems.is_empty(), "{:?}", edited.problems);
    assert!(
        edited.broken.is_none(),
        "{:?}\n{}",
        edited.broken,
        edited.text
    );
    let lines: Vec<_> = edited.text.lines().collect();
    let at = lines.iter().position(|other| *other == line);
    let at = at.unwrap_or_else(|| panic!("{line} is in {}", edited.text));
    let line = |at: usize| lines.get(at).unwrap_or(&"").trim().to_owned();
    (line(at.wrapping_sub(1)), line(at + 1))
}

#[track_caller]
fn problem(text: &str, within: &[&str], place: Place, line: &str) -> AnchorError {
    let edited = applied("sample.rs", text, &[edit("sample.rs", within, place, line)]);
    let [(0, error)] = edited.problems.as_slice() else {
        panic!("one problem: {edited:?}");
    };
    error.clone()
}

#[test]
fn lines_are_inserted_beside_elements() {
    let cases: &[(&[&str], Place, &str, &str, &str)] = &[
        // Items, with their comments and attributes.
        (&[], after("enum Fruit"), "struct New;", "}", ""),
        (
            &[],
            before("enum Fruit"),
            "struct New;",
            "",
            "/// Fruit of the sample",
        ),
        (
            &[],
            before("struct Basket"),
            "struct New;",
            "",
            "struct Basket {",
        ),
        // Variants. A comment on the same line belongs to the element.
        (
            &["enum Fruit"],
            after("Apple"),
            "New,",
            "Apple(String), // the first",
            "// A comment on the pear",
        ),
        (
            &["enum Fruit"],
            before("Pear"),
            "New,",
            "Apple(String), // the first",
            "// A comment on the pear",
        ),
        (
            &["enum Fruit"],
            after("apple-name"),
            "New,",
            "Apple(String), // the first",
            "// A comment on the pear",
        ),
        (&["enum Fruit"], after("Plum"), "New,", "Plum,", "}"),
        (
            &["enum Fruit"],
            Place::Start,
            "New,",
            "enum Fruit {",
            "/// Red or green",
        ),
        (&["enum Fruit"], Place::End, "New,", "Plum,", "}"),
        // Fields.
        (
            &["struct Basket"],
            after("owner"),
            "new: u8,",
            "owner: String,",
            "}",
        ),
        (
            &["struct Basket"],
            before("owner"),
            "new: u8,",
            "fruits: Vec<Fruit>,",
            "// Of the basket",
        ),
        // Items of traits and implementations.
        (
            &["trait Weigh"],
            after("fn weigh"),
            "fn new(&self);",
            "fn weigh(&self) -> u32;",
            "",
        ),
        (
            &["impl Basket"],
            before("fn sort"),
            "fn n() {}",
            "impl Basket {",
            "fn sort(&mut self, order: Order) {",
        ),
        (
            &["impl Basket", "fn sort"],
            Place::Start,
            "new();",
            "fn sort(&mut self, order: Order) {",
            "if order == Order::Down {",
        ),
        (
            &["impl Weigh for Basket"],
            Place::End,
            "fn n() {}",
            "}",
            "}",
        ),
        // Statements. Tokens of macros count.
        (
            &["impl Basket", "fn new"],
            after("label_of"),
            "new();",
            "log!(\"new {owner}\", label_of(owner));",
            "Self {",
        ),
        (
            &["impl Basket", "fn new"],
            after("list-end"),
            "new();",
            "let fruits = vec![\"ä🦀\", \"list-end\"];",
            "log!(\"new {owner}\", label_of(owner));",
        ),
        (
            &["impl Basket", "fn sort"],
            after("self.fruits.sort"),
            "new();",
            "self.fruits.sort();",
            "}",
        ),
        // Parts of functions.
        (
            &["impl Basket", "fn new", "literal Self"],
            after("pick"),
            "new,",
            "fruits: pick(&fruits),",
            "owner: owner.to_owned(),",
        ),
        (
            &["impl Basket", "fn sort", "literal Basket"],
            Place::End,
            "new,",
            "owner: String::new(),",
            "..Basket::default()",
        ),
        (
            &["impl Weigh for Basket", "fn weigh", "match owner"],
            before("is_mine"),
            "7 => 7,",
            "\"nobody\" => 0,",
            "// Somebody",
        ),
        (
            &["impl Weigh for Basket", "fn weigh", "match owner"],
            after("is_mine"),
            "7 => 7,",
            "_ if self.is_mine() => { 1 }",
            "_ => weights.len() as u32",
        ),
        (
            &["impl Weigh for Basket", "fn weigh", "match self.owner"],
            after("nobody"),
            "7 => 7,",
            "\"nobody\" => 0,",
            "// Somebody",
        ),
        (
            &["impl Weigh for Basket", "fn weigh", "match owner"],
            Place::End,
            "7 => 7,",
            "_ => weights.len() as u32,",
            "}",
        ),
        (
            &["impl Basket", "fn sort", "match order", "arm Order::Up"],
            Place::End,
            "new();",
            "climb();",
            "}",
        ),
        (
            &["impl Basket", "fn sort"],
            after("Order::Up"),
            "n => (),",
            "}",
            "Order::Down => descend(),",
        ),
        (
            &["impl Basket", "fn sort", "if Order::Down"],
            Place::End,
            "new();",
            "self.fruits.reverse();",
            "} else {",
        ),
        (
            &["impl Basket", "fn sort", "else Order::Down"],
            Place::Start,
            "new();",
            "} else {",
            "self.fruits.sort();",
        ),
        (
            &["impl Basket", "fn sort", "for fruits"],
            Place::Start,
            "new();",
            "for fruit in &self.fruits {",
            "ripen(fruit);",
        ),
        (
            &["impl Basket", "fn sort", "while is_full"],
            Place::End,
            "new();",
            "self.eat();",
            "}",
        ),
        (
            &["impl Basket", "fn sort", "closure visit"],
            Place::End,
            "new();",
            "fruit.wash();",
            "});",
        ),
        (
            &["impl Basket", "fn sort", "closure self.visit"],
            after("wash"),
            "new();",
            "fruit.wash();",
            "});",
        ),
        (
            &["impl Basket", "fn sort", "call connect"],
            after("owner"),
            "new,",
            "self.owner.clone(),",
            ");",
        ),
        (
            &["impl Basket", "fn sort", "call connect"],
            before("owner"),
            "new,",
            "self.fruits.len(),",
            "self.owner.clone()",
        ),
        (
            &["impl Basket", "fn sort", "let rest"],
            Place::Start,
            "new,",
            "let rest = Basket {",
            "owner: String::new(),",
        ),
        (
            &["const NAMES"],
            after("pear"),
            "\"new\",",
            "\"pear\", // last",
            "];",
        ),
        (
            &["const NAMES", "array pear"],
            Place::Start,
            "\"new\",",
            "const NAMES: &[&str] = &[",
            "\"apple\",",
        ),
        (
            &["fn rules", "array ONE"],
            before("TWO"),
            "new,",
            "(libc::ONE, vec![]),",
            "#[cfg(test)]",
        ),
        (
            &["fn rules", "array TWO"],
            Place::End,
            "new,",
            "(libc::TWO, or![both![2, THREE], FOUR]),",
            "])",
        ),
        (
            &["fn rules", "macro or"],
            after("THREE"),
            "new,",
            "(libc::TWO, or![both![2, THREE],",
            "FOUR]),",
        ),
        // Imports, and the file as a whole.
        (&[], Place::Imports, "use std::new;", "use std::io;", ""),
        (
            &["mod unit_tests"],
            Place::Imports,
            "use std::new;",
            "use super::*;",
            "",
        ),
        (
            &["mod unit_tests"],
            Place::End,
            "fn n() {}",
            "fn test_it() {}",
            "}",
        ),
        (&[], Place::Start, "mod new;", "#![allow(dead_code)]", ""),
        (&[], Place::End, "mod new;", "}", ""),
    ];
    for (within, place, line, above, below) in cases {
        let found = neighbours("sample.rs", RUST, within, place.clone(), line);
        let found = (found.0.as_str(), found.1.as_str());
        assert_eq!(found, (*above, *below), "{within:?} {place:?}");
    }
}

#[test]
fn a_name_must_be_found_exactly_once() {
    let sort: &[&str] = &["impl Basket", "fn sort"];
    let lines = |error| match error {
        AnchorError::NotOnce { lines, .. } => lines.len(),
        error => panic!("{error}"),
    };
    assert_eq!(
        lines(problem(RUST, &["enum Fruit"], after("Cherry"), "New,")),
        0
    );
    assert_eq!(
        lines(problem(RUST, sort, after("Order::Sideways"), "new();")),
        0
    );
    assert_eq!(lines(problem(RUST, sort, after("fruits"), "new();")), 4);
    assert_eq!(
        lines(problem(RUST, &["impl Basket"], Place::End, "fn n() {}")),
        2
    );
    assert_eq!(
        lines(problem(RUST, &["enum Vegetable"], Place::End, "New,")),
        0
    );
    // Functions of implementations are no items of the file.
    assert_eq!(lines(problem(RUST, &["fn sort"], Place::End, "new();")), 0);
    let error = problem(RUST, sort, after("fruits"), "new();").to_string();
    assert!(
        error.contains("`fruits` in `impl Basket`, `fn sort`"),
        "{error}"
    );
    assert!(error.contains("4 times (lines 63, 65, 67, 76)"), "{error}");
}

#[test]
fn wrong_edits_are_named() {
    let error = |within: &[&str], place, line| problem(RUST, within, place, line).to_string();
    let fruit: &[&str] = &["enum Fruit"];
    assert!(error(&["verb sort"], Place::End, "").contains("`verb sort` names no kind"));
    assert!(error(&["enum"], Place::End, "").contains("names no kind"));
    assert!(error(&[], Place::Imports, "fn f() {}").contains("more than imports"));
    assert!(error(fruit, Place::Imports, "use a::b;").contains("no place of the kind `imports`"));
    assert!(error(fruit, Place::Rename("no name".to_owned()), "").contains("no identifier"));
    assert!(
        error(
            &["impl Weigh for Basket"],
            Place::Rename("A".to_owned()),
            ""
        )
        .contains("no place")
    );
    let within = ["trait Weigh", "fn weigh"];
    assert!(error(&within, Place::Start, "new();").contains("no list of elements"));
    let found = problem("fn f( {", &[], Place::End, "").to_string();
    assert!(found.contains("The file is no Rust: line 1"), "{found}");
}

#[test]
fn an_edit_that_breaks_the_file_is_an_error() {
    let edits = [edit(
        "sample.rs",
        &["enum Fruit"],
        after("Apple"),
        "New + ,",
    )];
    let edited = applied("sample.rs", RUST, &edits);
    assert!(
        edited.problems.is_empty() && edited.broken.is_some(),
        "{edited:?}"
    );
    let edits = [edit("a.toml", &[], Place::End, "a = ")];
    assert!(applied("a.toml", "b = 1\n", &edits).broken.is_some());
}

#[test]
fn all_edits_are_placed_in_the_file_as_it_was() {
    let fruit: &[&str] = &["enum Fruit"];
    let edits = [
        edit("sample.rs", fruit, after("Plum"), "First,"),
        edit("sample.rs", fruit, Place::Rename("Food".to_owned()), ""),
        edit("sample.rs", fruit, Place::End, "Second,"),
        edit("sample.rs", fruit, after("First"), "Third,"),
        edit("sample.rs", fruit, after("Nut"), "Fourth,"),
    ];
    let edited = applied("sample.rs", RUST, &edits);
    // Inserted lines are no anchors. All problems are found, and the other edits are made in their order.
    let indexes: Vec<_> = edited.problems.iter().map(|(index, _)| *index).collect();
    assert_eq!(indexes, [3, 4]);
    assert!(
        edited.text.contains("    Plum,\nFirst,\nSecond,\n}"),
        "{}",
        edited.text
    );
    assert!(edited.text.contains("enum Food {"));
    assert!(edited.text.contains("fruits: Vec<Fruit>"));
}

const YAML: &str = "\
# Sample
paths:

  /one:
    put:
      summary: 'a: b'

  # The second
  \"/two\":
    get: {}
    tags:
    - red
    - green

components:
  one: 1
  # Last
";

#[test]
fn yaml_keys_have_blocks() {
    let cases: &[(&[&str], Place, &str, &str)] = &[
        (&["paths"], after("/one"), "summary: 'a: b'", ""),
        (&["paths"], before("/two"), "", "# The second"),
        (&["paths"], after("/two"), "- green", ""),
        (&["paths"], Place::End, "- green", ""),
        (&["paths"], Place::Start, "paths:", ""),
        (&["paths", "/two", "tags"], after("red"), "- red", "- green"),
        (&["paths", "/two"], before("tags"), "get: {}", "tags:"),
        (&["components"], after("one"), "one: 1", "# Last"),
        (&[], before("paths"), "", "# Sample"),
        (&[], Place::End, "# Last", ""),
    ];
    for (within, place, above, below) in cases {
        let found = neighbours("a.yaml", YAML, within, place.clone(), "  new: 1");
        let found = (found.0.as_str(), found.1.as_str());
        assert_eq!(found, (*above, *below), "{within:?} {place:?}");
    }
    for (within, name) in [(["paths"], "put"), (["one"], "put"), (["paths"], "/three")] {
        let edits = [edit("a.yaml", &within, after(name), "new")];
        assert_eq!(applied("a.yaml", YAML, &edits).problems.len(), 1, "{name}");
    }
}

const TOML: &str = "\
[package]
name = \"sample\" # of the tests

[features]
# Comment
default = [
    \"a\",
]
a = []

[target.'cfg(unix)'.dependencies]
b = { version = \"1\" }
";

#[test]
fn toml_keys_are_found_in_their_tables() {
    let cases: &[(&[&str], Place, &str, &str)] = &[
        (
            &["package"],
            after("name"),
            "name = \"sample\" # of the tests",
            "",
        ),
        (&["features"], before("default"), "[features]", "# Comment"),
        (&["features"], after("default"), "]", "a = []"),
        (&["features"], Place::Start, "[features]", "# Comment"),
        (&["features"], Place::End, "a = []", ""),
        (
            &["target.'cfg(unix)'.dependencies"],
            Place::End,
            "b = { version = \"1\" }",
            "",
        ),
        (
            &["target", "cfg(unix)", "dependencies"],
            before("b"),
            "[target.'cfg(unix)'.dependencies]",
            "b = { version = \"1\" }",
        ),
    ];
    for (within, place, above, below) in cases {
        let found = neighbours("Cargo.toml", TOML, within, place.clone(), "new = 1");
        let found = (found.0.as_str(), found.1.as_str());
        assert_eq!(found, (*above, *below), "{within:?} {place:?}");
    }
    for within in [["features"], ["nothing"]] {
        let edits = [edit("Cargo.toml", &within, after("c"), "new = 1")];
        assert_eq!(applied("Cargo.toml", TOML, &edits).problems.len(), 1);
    }
}

const MARKDOWN: &str = "\
# Sample

See `docs/one.md` and docs/one.md.old.

## Options

- `--one`
- `--one-more`

```console
# Options
```

### Of programs

Last line


## Others

- `--one`
";

#[test]
fn lines_of_texts_are_found_by_words_and_headings() {
    let cases: &[(&[&str], Place, &str, &str)] = &[
        (&["Options"], after("--one"), "- `--one`", "- `--one-more`"),
        (
            &["Options"],
            before("--one-more"),
            "- `--one`",
            "- `--one-more`",
        ),
        (&["Options"], Place::End, "Last line", ""),
        (
            &["Options", "Of programs"],
            Place::Start,
            "### Of programs",
            "",
        ),
        (
            &[],
            after("docs/one.md"),
            "See `docs/one.md` and docs/one.md.old.",
            "",
        ),
        (&["Others"], Place::End, "- `--one`", ""),
    ];
    for (within, place, above, below) in cases {
        let found = neighbours("a.md", MARKDOWN, within, place.clone(), "new");
        let found = (found.0.as_str(), found.1.as_str());
        assert_eq!(found, (*above, *below), "{within:?} {place:?}");
    }
    for name in ["--one", "one.md", "--on"] {
        let edits = [edit("a.md", &[], after(name), "new")];
        assert_eq!(
            applied("a.md", MARKDOWN, &edits).problems.len(),
            1,
            "{name}"
        );
    }
}

/// Samples, with the names of their files and a path of enclosing items that exists.
const SAMPLES: [(&str, &str, &[&str]); 4] = [
    ("a.rs", RUST, &["impl Basket", "fn sort"]),
    ("a.yaml", YAML, &["paths", "/two"]),
    ("a.toml", TOML, &["features"]),
    ("a.md", MARKDOWN, &["Options"]),
];

fn places(name: &str) -> [Place; 6] {
    [
        after(name),
        before(name),
        Place::Start,
        Place::End,
        Place::Imports,
        Place::Rename(name.to_owned()),
    ]
}

proptest! {
    #[test]
    fn hostile_sources_and_names_do_not_panic(
        sample in 0..4_usize,
        name in ".{0,12}",
        segment in "(fn|enum|impl|match|array|let|call)? ?[a-zA-Z(\"'{ :]{0,9}",
        at in 0..3000_usize,
        length in 0..40_usize,
        by in ".{0,12}|[-{}()\\[\\]\"'#:,.=/*! \n]{0,12}",
    ) {
        let (file, text, within) = SAMPLES[sample];
        let mut text = text.to_owned();
        let bound = |at: usize| (0..=at.min(text.len())).rfind(|at| text.is_char_boundary(*at));
        let (start, end) = (bound(at).unwrap_or(0), bound(at + length).unwrap_or(0));
        text.replace_range(start..end, &by);
        for within in [within, &[&*segment], &[within[0], &*segment]] {
            for place in places(&name) {
                applied(file, &text, &[edit(file, within, place, &by)]);
            }
        }
        applied(file, &by, &[edit(file, &[], after(&name), &name)]);
    }

    /// Names are all words of the samples.
    #[test]
    fn other_lines_stay_as_they_were(sample in 0..4_usize, word in 0..200_usize, place in 0..4_usize, inside in any::<bool>()) {
        let (file, text, within) = SAMPLES[sample];
        let is_mark = |c: char| !c.is_alphanumeric() && !"_-/".contains(c);
        let words: Vec<_> = text.split(is_mark).filter(|word| !word.is_empty()).collect();
        let place = places(words[word % words.len()])[place].clone();
        let within = if inside { within } else { &[] };
        let edited = applied(file, text, &[edit(file, within, place, "// new line")]);
        if edited.problems.is_empty() {
            let without_new: Vec<_> = edited.text.lines().filter(|line| *line != "// new line").collect();
            let plain = |lines: &[&str]| lines.iter().map(|line| line.replace(',', "")).collect::<String>();
            let before: Vec<_> = text.lines().collect();
            // A list may have got its last comma.
            prop_assert_eq!(plain(&without_new).replace(' ', ""), plain(&before).replace(' ', ""));
            prop_assert!(edited.text.lines().any(|line| line == "// new line"));
        } else {
            prop_assert_eq!(edited.text, text);
        }
    }
}

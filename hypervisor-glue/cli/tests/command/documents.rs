//! Checks of the documents: sizes, links, the table of options, and names of tests. Also checks the summaries of doc
//! comments.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use nvme_mpt_vmm::options::{OptionError, ServerFunctionOptions};

fn workspace() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.ancestors().nth(2).unwrap().to_owned()
}

/// Returns all documents with their text.
fn documents() -> Vec<(PathBuf, String)> {
    let root = workspace();
    let mut paths = vec![
        root.join("README.md"),
        root.join("ARCHITECTURE.md"),
        root.join("CHANGELOG.md"),
        root.join("CONTRIBUTING.md"),
        root.join("SECURITY.md"),
        root.join("hypervisor-glue/cloud-hypervisor/README.md"),
    ];
    for dir in ["docs", "docs/decisions"] {
        let pages = root.join(dir).read_dir().unwrap();
        paths.extend(pages.map(|entry| entry.unwrap().path()));
    }
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).unwrap();
        (path, text)
    };
    paths.into_iter().map(read).collect()
}

/// Returns the lines outside of fenced code blocks.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut in_code = false;
    text.lines().filter(move |line| {
        let is_fence = line.starts_with("```");
        in_code ^= is_fence;
        !in_code && !is_fence
    })
}

/// Returns the anchor that GitHub makes for a heading.
fn anchor(heading: &str) -> String {
    let heading = heading.trim_start_matches('#').trim().to_lowercase();
    let slug = heading.chars().filter_map(|c| match c {
        ' ' => Some('-'),
        c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c),
        _ => None,
    });
    slug.collect()
}

/// Returns the targets of all links and pictures, including links whose text spans lines.
fn links(text: &str) -> Vec<String> {
    let text = prose(text).collect::<Vec<_>>().join("\n");
    let targets = text.split("](").skip(1);
    targets
        .filter_map(|rest| rest.split_once(')'))
        .map(|(target, _)| target.to_owned())
        .collect()
}

/// Returns the code spans in prose.
fn code_spans(text: &str) -> Vec<String> {
    let lines = prose(text).map(|line| line.split('`').skip(1).step_by(2).map(str::to_owned));
    lines.flatten().collect()
}

#[test]
fn the_first_documents_are_short() {
    for (name, most) in [("README.md", 5_000), ("ARCHITECTURE.md", 12_000)] {
        let bytes = fs::metadata(workspace().join(name)).unwrap().len();
        assert!(bytes <= most, "{name} has {bytes} bytes of {most}");
    }
}

#[test]
fn all_documents_together_are_at_most_150_kb() {
    let bytes: usize = documents().iter().map(|(_, text)| text.len()).sum();
    assert!(bytes <= 150_000, "The documents have {bytes} bytes");
}

#[test]
fn links_lead_to_files_and_headings_that_exist() {
    for (path, text) in documents() {
        for link in links(&text) {
            if link.starts_with("https://") {
                continue;
            }
            let (file, heading) = link.split_once('#').unwrap_or((&link, ""));
            let target = match file {
                "" => path.clone(),
                file => path.parent().unwrap().join(file),
            };
            assert!(target.exists(), "{}: no file for {link}", path.display());
            if heading.is_empty() {
                continue;
            }
            let target_text = fs::read_to_string(&target).unwrap();
            let mut headings = prose(&target_text).filter(|line| line.starts_with('#'));
            assert!(
                headings.any(|line| anchor(line) == heading),
                "{}: no heading for {link}",
                path.display()
            );
        }
    }
}

/// Directory of the package's documents.
const PACKAGED: &str = "usr/share/doc/nvme-mpt/";

/// Returns the paths in the repository of the documents and resources that the Debian package has with these paths.
fn packaged_files() -> BTreeSet<PathBuf> {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifest = fs::read_to_string(crate_folder.join("Cargo.toml")).unwrap();
    let assets = manifest.lines().skip_while(|line| *line != "assets = [");
    let assets = assets.take_while(|line| *line != "]");
    let mut files = BTreeSet::new();
    for asset in assets {
        let parts: Vec<&str> = asset.split('"').skip(1).step_by(2).collect();
        let [source, target, _] = parts[..] else {
            continue;
        };
        let (Some(source), Some(target)) =
            (source.strip_prefix("../../"), target.strip_prefix(PACKAGED))
        else {
            continue;
        };
        let (dir, pattern) = source.rsplit_once('/').unwrap_or(("", source));
        assert_eq!(dir, target.trim_end_matches('/'), "{asset}");
        let (start, end) = pattern.split_once('*').unwrap_or((pattern, pattern));
        let end = end.trim_start_matches(".*");
        let before = files.len();
        for entry in workspace().join(dir).read_dir().unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            if name.starts_with(start) && name.ends_with(end) && entry.path().is_file() {
                files.insert(Path::new(dir).join(name));
            }
        }
        assert!(files.len() > before, "{asset} has no file");
    }
    files
}

#[test]
fn the_package_has_the_files_that_its_documents_and_help_texts_name() {
    let root = workspace();
    let files = packaged_files();
    let has = |path: &Path| {
        let path = fs::canonicalize(path).unwrap();
        let path = path
            .strip_prefix(fs::canonicalize(&root).unwrap())
            .unwrap()
            .to_owned();
        files.iter().any(|file| file.starts_with(&path))
    };
    let mut checked = 0;
    for page in files
        .iter()
        .filter(|file| file.extension().is_some_and(|end| end == "md"))
    {
        let page = root.join(page);
        for link in links(&fs::read_to_string(&page).unwrap()) {
            let file = link.split('#').next().unwrap_or_default();
            if !file.is_empty() && !link.starts_with("https://") {
                assert!(
                    has(&page.parent().unwrap().join(file)),
                    "{}: {link}",
                    page.display()
                );
                checked += 1;
            }
        }
    }
    assert!(checked > 200, "{checked}");
    for arguments in [
        &["serve", "--help"][..],
        &["supervise", "--help"],
        &["upgrade", "--help"],
        &["fault", "inject", "--help"],
        &["profile", "fit", "--help"],
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_nvme-mpt"));
        let help = command.args(arguments).output().unwrap().stdout;
        let help = String::from_utf8(help).unwrap();
        assert!(help.contains("/usr/share/doc/nvme-mpt"), "{arguments:?}");
        let words = help.split([' ', ',', ';', ':', '\n', '(', ')']);
        let paths =
            words.filter(|word| word.starts_with("docs/") || word.starts_with("resources/"));
        let paths: Vec<&str> = paths
            .map(|path| path.trim_end_matches(['.', '/']))
            .collect();
        assert!(paths.len() > 1, "{arguments:?}");
        for path in paths {
            assert!(has(&root.join(path)), "{arguments:?}: {path}");
        }
    }
}

#[test]
fn the_table_of_options_and_the_help_have_the_keys_of_the_parser() {
    let Err(OptionError::Unknown { allowed, .. }) =
        "path=/d,none=1".parse::<ServerFunctionOptions>()
    else {
        panic!("there is no key `none`");
    };
    let keys: Vec<&str> = allowed.split(", ").collect();

    let page = fs::read_to_string(workspace().join("docs/options.md")).unwrap();
    let rows = page.lines().skip_while(|line| !line.starts_with("| key"));
    let rows = rows.skip(2).take_while(|line| line.starts_with('|'));
    let documented: Vec<&str> = rows.map(|row| row.split('`').nth(1).unwrap()).collect();
    assert_eq!(documented, keys, "docs/options.md");

    let mut serve = Command::new(env!("CARGO_BIN_EXE_nvme-mpt"));
    let help = serve.args(["serve", "--help"]).output().unwrap().stdout;
    let help = String::from_utf8(help).unwrap();
    let helped = help.lines().filter_map(|line| {
        let first = line.split_whitespace().next()?;
        let explained = line.trim_start().strip_prefix(first)?.starts_with("  ");
        keys.contains(&first).then_some(first).filter(|_| explained)
    });
    assert_eq!(helped.collect::<Vec<_>>(), keys, "serve --help");
    for profile in ["nvm", "ssd", "zns", "zns-ssd", "kv", "kv-ssd"] {
        assert!(help.contains(profile), "serve --help has no `{profile}`");
        assert!(page.contains(&format!("`{profile}`")), "docs/options.md");
    }
}

/// Returns the pages of decisions with their text.
fn decisions() -> Vec<(PathBuf, String)> {
    let dir = workspace().join("docs/decisions");
    let mut pages = documents();
    pages.retain(|(path, _)| path.starts_with(&dir) && !path.ends_with("README.md"));
    pages.sort();
    pages
}

#[test]
fn each_decision_has_its_four_parts_and_is_in_the_list() {
    let list = workspace().join("docs/decisions/README.md");
    let listed = links(&fs::read_to_string(list).unwrap());
    let pages = decisions();
    for (number, (path, text)) in (1..).zip(&pages) {
        let name = path.file_name().unwrap().to_str().unwrap();
        assert!(name.starts_with(&format!("{number:04}-")), "{name}");
        assert!(text.starts_with(&format!("# {number}. ")), "{name}");
        let parts: Vec<&str> = prose(text)
            .filter_map(|line| line.strip_prefix("## "))
            .collect();
        assert_eq!(
            parts,
            ["Context", "Decision", "Rejected", "Consequences"],
            "{name}"
        );
        assert!(listed.iter().any(|link| link == name), "{name}");
        let lines = text.lines().count();
        assert!(lines <= 45, "{name} has {lines} lines");
    }
    assert_eq!(pages.len(), listed.len());
}

#[test]
fn files_named_for_newcomers_exist() {
    let root = workspace();
    let first = ["CONTRIBUTING.md", "SECURITY.md"].map(|name| {
        let text = fs::read_to_string(root.join(name)).unwrap();
        (root.join(name), text)
    });
    let mut checked = 0;
    for (page, text) in decisions().into_iter().chain(first) {
        for span in code_spans(&text) {
            let is_path = !span.starts_with('/') && !span.contains(' ') && span.contains('/');
            let is_in_the_tree = is_path && (span.ends_with('/') || span.contains(".rs"));
            let is_in_the_tree = is_in_the_tree || span.ends_with(".toml") || span.ends_with(".md");
            if is_in_the_tree {
                assert!(root.join(&span).exists(), "{}: {span}", page.display());
                checked += 1;
            }
        }
    }
    assert!(checked > 20, "{checked}");
}

/// Appends the sources of all tests and their file names.
fn sources(dir: &Path, names: &mut String) {
    for entry in dir.read_dir().unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap_or_default();
        if path.is_dir() && name != "target" && name != ".git" {
            sources(&path, names);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            names.push_str(&fs::read_to_string(&path).unwrap());
            names.push_str(&name.to_string_lossy());
            names.push('\n');
        }
    }
}

/// Words with which no summary of a doc comment may start.
const QUESTIONS: [&str; 5] = ["What", "How", "Whether", "Where", "Who"];

#[test]
fn no_summary_opens_with_a_question() {
    let mut text = String::new();
    sources(&workspace(), &mut text);
    let (mut summaries, mut questions) = (0, Vec::new());
    let mut in_comment = false;
    for line in text.lines() {
        let line = line.trim_start();
        let comment = line.strip_prefix("///");
        let comment = comment.or_else(|| line.strip_prefix("//!"));
        if let Some(first) = comment.filter(|_| !in_comment) {
            summaries += 1;
            let word = first.split_whitespace().next().unwrap_or_default();
            if QUESTIONS.contains(&word) {
                questions.push(line);
            }
        }
        in_comment = comment.is_some();
    }
    assert!(questions.is_empty(), "{questions:#?}");
    assert!(summaries > 10_000, "{summaries}");
}

#[test]
fn tests_that_documents_name_exist() {
    let mut text = String::new();
    sources(&workspace(), &mut text);
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let words: BTreeSet<&str> = words.collect();
    for name in [
        "CONTRIBUTING.md",
        "docs/data-safety.md",
        "docs/neighbours.md",
        "docs/testing.md",
    ] {
        let page = fs::read_to_string(workspace().join(name)).unwrap();
        for span in code_spans(&page) {
            let test = span.rsplit_once(".rs: ").map_or(&*span, |(_, test)| test);
            // A check that belongs to a group is named like `vmm::exits_with_virtio_blk`.
            let test = test.rsplit_once("::").map_or(test, |(_, test)| test);
            let is_name = test
                .chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
            if is_name && test.contains('_') {
                assert!(words.contains(test), "{name}: there is no {test}");
            }
        }
    }
}

#[test]
fn tests_that_make_figures_exist() {
    let mut text = String::new();
    sources(&workspace(), &mut text);
    let names = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let names: BTreeSet<&str> = names.collect();
    let mut checked = 0;
    for entry in workspace().join("docs/figures").read_dir().unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let figure: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        let command = figure["command"].as_str().unwrap();
        if !command.starts_with("cargo test ") {
            continue;
        }
        // The filters are the beginnings of names of tests and modules. Packages, options and other words have no underscore.
        let filters = command
            .split([' ', '(', ')', ','])
            .filter(|word| word.contains('_') && !word.starts_with('-'))
            .flat_map(|word| word.split("::"));
        for filter in filters {
            let path = path.display();
            assert!(
                names.iter().any(|name| name.starts_with(filter)),
                "{path}: no name in the sources begins with {filter}"
            );
            checked += 1;
        }
    }
    assert!(checked > 10, "{checked}");
}

/// Returns the directories that `docs/neighbours.md` abbreviates by letters, each with its letter.
fn dirs(page: &str) -> Vec<(String, String)> {
    let paths = page
        .lines()
        .skip_while(|line| !line.contains("Paths:"))
        .take_while(|line| !line.is_empty());
    let spans: Vec<String> = paths.flat_map(code_spans).collect();
    let pairs = spans.chunks_exact(2);
    pairs
        .map(|pair| (format!("{}/", pair[0]), pair[1].clone()))
        .collect()
}

#[test]
fn files_named_on_the_neighbours_page_contain_its_tests() {
    let page = fs::read_to_string(workspace().join("docs/neighbours.md")).unwrap();
    let dirs = dirs(&page);
    assert_eq!(dirs.len(), 8);
    let mut checked = 0;
    for line in page.lines().filter(|line| line.starts_with('|')) {
        let mut file = None;
        for span in code_spans(line) {
            let (path, test) = match span.split_once(".rs: ") {
                Some((path, test)) => (Some(format!("{path}.rs")), Some(test)),
                None if span.ends_with(".rs") => (Some(span.clone()), None),
                // A span without a file name is a test of the file that the text named before.
                None if span.contains('_') && file.is_some() => (None, Some(&*span)),
                None => continue,
            };
            if let Some(path) = path {
                let long = dirs
                    .iter()
                    .find_map(|(letter, dir)| Some(format!("{dir}{}", path.strip_prefix(letter)?)));
                let path = workspace().join(long.unwrap_or(path));
                file = Some(fs::read_to_string(&path).unwrap_or_else(|error| {
                    panic!("{}: {error}", path.display());
                }));
            }
            if let (Some(text), Some(test)) = (&file, test) {
                assert!(text.contains(test), "{span} is not there");
                checked += 1;
            }
        }
    }
    assert!(checked > 30, "{checked}");
}

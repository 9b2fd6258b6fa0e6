//! Checks of the figures of the documents: they are valid, pictures agree with their data, and pages link to them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use figures::figure_directory;

/// Minimum number of figures of the documents.
const FEWEST: usize = 15;

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}

/// Returns the targets of all links from pages into the directory of figures.
fn linked() -> BTreeSet<String> {
    let pages = docs()
        .read_dir()
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let pages = pages.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    let texts: Vec<String> = pages
        .map(|path| fs::read_to_string(path).unwrap())
        .collect();
    let links = texts
        .iter()
        .flat_map(|text| text.split("](figures/").skip(1));
    links
        .filter_map(|rest| Some(rest.split_once(')')?.0.to_owned()))
        .collect()
}

#[test]
fn all_figures_are_valid_and_all_pictures_are_up_to_date() {
    let dir = docs().join("figures");
    let figures = figure_directory::read(&dir, &[]).unwrap();
    assert!(figures.len() >= FEWEST, "{}", figures.len());
    let outdated = figure_directory::check(&dir, &[]).unwrap();
    let outdated: Vec<String> = outdated.iter().map(ToString::to_string).collect();
    assert!(outdated.is_empty(), "{outdated:#?}");
}

#[test]
fn a_page_links_each_figure_and_no_link_leads_nowhere() {
    let figures = figure_directory::read(&docs().join("figures"), &[]).unwrap();
    let mut files = BTreeSet::new();
    for (name, figure) in &figures {
        let file = match figure.has_picture() {
            true => format!("{name}.svg"),
            false => format!("{name}.json"),
        };
        assert!(
            linked().contains(&file),
            "no page has a link to figures/{file}"
        );
        files.extend([file, format!("{name}.json")]);
    }
    let nowhere: Vec<_> = linked().difference(&files).cloned().collect();
    assert!(nowhere.is_empty(), "{nowhere:?}");
}

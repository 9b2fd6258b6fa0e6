//! Type names follow `docs/glossary.md`, "Rules": few are a single word, and hardly any is defined twice.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use syn::visit::{self, Visit};
use syn::{Ident, ItemEnum, ItemStruct, ItemTrait, ItemUnion, Visibility};

/// Directories of the product's crates.
const PRODUCT: [&str; 3] = ["nvme-mpt", "vmm-device", "hypervisor-glue"];

/// Type definitions by name: path of the file, and whether the type is visible to other modules.
#[derive(Default)]
struct TypeNames {
    definitions: BTreeMap<String, Vec<(bool, PathBuf)>>,
    file: PathBuf,
}

impl TypeNames {
    fn of_product() -> Self {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut names = Self::default();
        for directory in PRODUCT {
            names.read_directory(&root.join(directory));
        }
        names
    }

    fn read_directory(&mut self, directory: &Path) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            let is_product = !["tests", "tests.rs", "benches", "examples", "fuzz"].contains(&name);
            match path.is_dir() {
                true if is_product => self.read_directory(&path),
                false if is_product && name.ends_with(".rs") => self.read_file(path),
                _ => {}
            }
        }
    }

    fn read_file(&mut self, path: PathBuf) {
        let text = fs::read_to_string(&path).unwrap();
        let file =
            syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        self.file = path;
        self.visit_file(&file);
    }

    fn add(&mut self, name: &Ident, visibility: &Visibility) {
        let is_shared = !matches!(visibility, Visibility::Inherited);
        let definitions = self.definitions.entry(name.to_string()).or_default();
        definitions.push((is_shared, self.file.clone()));
    }

    /// Returns the percentage of definitions that match, and their names.
    fn share(&self, is_like: impl Fn(&str, &[(bool, PathBuf)]) -> bool) -> (f64, Vec<String>) {
        let all: usize = self.definitions.values().map(Vec::len).sum();
        let found = self.definitions.iter();
        let found: Vec<_> = found
            .filter(|(name, places)| is_like(name, places))
            .collect();
        let count: usize = found.iter().map(|(_, places)| places.len()).sum();
        let names = found.iter().map(|(name, _)| (*name).clone()).collect();
        (100.0 * count as f64 / all as f64, names)
    }
}

impl Visit<'_> for TypeNames {
    fn visit_item_struct(&mut self, item: &ItemStruct) {
        self.add(&item.ident, &item.vis);
        visit::visit_item_struct(self, item);
    }

    fn visit_item_enum(&mut self, item: &ItemEnum) {
        self.add(&item.ident, &item.vis);
        visit::visit_item_enum(self, item);
    }

    fn visit_item_trait(&mut self, item: &ItemTrait) {
        self.add(&item.ident, &item.vis);
        visit::visit_item_trait(self, item);
    }

    fn visit_item_union(&mut self, item: &ItemUnion) {
        self.add(&item.ident, &item.vis);
        visit::visit_item_union(self, item);
    }
}

/// Returns whether a name in camel case is one word.
fn is_one_word(name: &str) -> bool {
    name.chars().filter(char::is_ascii_uppercase).count() <= 1
}

/// Returns the number of definitions that are visible to other modules.
fn count_visible(places: &[(bool, PathBuf)]) -> usize {
    places.iter().filter(|(is_shared, _)| *is_shared).count()
}

#[track_caller]
fn check(names: &TypeNames, most: f64, is_like: impl Fn(&str, &[(bool, PathBuf)]) -> bool) {
    let (share, found) = names.share(is_like);
    assert!(share <= most, "{share:.1} % of all types: {found:?}");
}

#[test]
fn few_types_have_a_name_of_one_word() {
    check(&TypeNames::of_product(), 18.0, |name, _| is_one_word(name));
}

#[test]
fn hardly_any_public_name_is_defined_twice() {
    check(&TypeNames::of_product(), 3.0, |name, places| {
        !["Error", "Result"].contains(&name) && count_visible(places) > 1
    });
}

#[test]
fn few_private_names_are_defined_twice() {
    check(&TypeNames::of_product(), 6.0, |_, places| {
        places.len() > 1 && count_visible(places) <= 1
    });
}

#[test]
fn names_are_counted_by_their_words_and_places() {
    let mut names = TypeNames::default();
    let one = "pub struct Turn; mod inner { enum Turn {} struct QueuePair; }";
    let other = "pub(crate) trait Turn {} union NsId { a: u8 } fn a() { struct QueuePair; }";
    for text in [one, other] {
        names.visit_file(&syn::parse_file(text).unwrap());
    }
    let (share, found) = names.share(|name, _| is_one_word(name));
    assert_eq!((share.round(), &*found), (50.0, &["Turn".to_owned()][..]));
    let (_, found) = names.share(|_, places| count_visible(places) > 1);
    assert_eq!(found, ["Turn"]);
    let (_, found) = names.share(|_, places| places.len() > 1 && count_visible(places) <= 1);
    assert_eq!(found, ["QueuePair"]);
}

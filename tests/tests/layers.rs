//! In every crate, modules import those below them alone: none imports one that imports it, whatever is in between.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemImpl, ItemMod, ItemUse, UseTree};

/// Imports of each module of a crate's root.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// A crate whose files are read.
#[derive(Default)]
struct Crate {
    modules: BTreeSet<String>,
    /// The module that a name in the root comes from.
    exported: BTreeMap<String, String>,
    imports: Imports,
    /// The module that is being read.
    module: Vec<String>,
}

impl Crate {
    fn read(folder: &Path) -> Self {
        let root = parse(&folder.join("lib.rs"));
        let mut read = Self::default();
        for item in &root.items {
            if let Item::Mod(module) = item {
                read.modules.insert(module.ident.to_string());
            }
        }
        for item in &root.items {
            if let Item::Use(exported) = item {
                for path in paths(&exported.tree) {
                    let path = path
                        .strip_prefix(&["crate".to_owned()][..])
                        .unwrap_or(&path);
                    if let [module, .., name] = path {
                        read.exported.insert(name.clone(), module.clone());
                    }
                }
            }
        }
        read.read_file(&folder.join("lib.rs"), &[]);
        read.read_folder(folder, &[]);
        read
    }

    fn read_folder(&mut self, folder: &Path, module: &[String]) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            let child: Vec<String> = module.iter().cloned().chain([name.clone()]).collect();
            // Tests and models may use all there is.
            let is_left_out = ["tests", "main", "bin", "model", "simulation"].contains(&&*name);
            if is_left_out && module.len() + usize::from(name == "tests") > 0 || name == "lib" {
                continue;
            }
            match (path.is_dir(), name.as_str()) {
                (true, _) => self.read_folder(&path, &child),
                (false, "mod") => self.read_file(&path, module),
                (false, _) => self.read_file(&path, &child),
            }
        }
    }

    fn read_file(&mut self, path: &Path, module: &[String]) {
        if path.extension().is_some_and(|extension| extension == "rs") {
            self.module = module.to_vec();
            self.visit_file(&parse(path));
        }
    }

    /// Notes a path, if it leads to another module of the root.
    fn note(&mut self, path: &[String]) {
        let (base, rest): (&[String], _) = match path.first().map(String::as_str) {
            Some("crate") => (&[], &path[1..]),
            Some("self") => (&self.module, &path[1..]),
            Some("super") => {
                let ups = path.iter().take_while(|part| *part == "super").count();
                let left = self.module.len().saturating_sub(ups);
                (&self.module[..left], &path[ups..])
            }
            _ => return,
        };
        let (Some(from), Some(to)) = (self.module.first(), base.iter().chain(rest).next()) else {
            return;
        };
        let to = self.exported.get(to).unwrap_or(to);
        if from != to && self.modules.contains(to) {
            let imports = self.imports.entry(from.clone()).or_default();
            imports.insert(to.clone());
        }
    }
}

impl Visit<'_> for Crate {
    fn visit_item_mod(&mut self, module: &ItemMod) {
        if module.content.is_some() && !is_for_tests(&module.attrs) {
            self.module.push(module.ident.to_string());
            visit::visit_item_mod(self, module);
            self.module.pop();
        }
    }

    fn visit_item_impl(&mut self, item: &ItemImpl) {
        if !is_for_tests(&item.attrs) {
            visit::visit_item_impl(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &ItemUse) {
        if !is_for_tests(&item.attrs) {
            for path in paths(&item.tree) {
                self.note(&path);
            }
        }
    }

    fn visit_path(&mut self, path: &syn::Path) {
        let parts: Vec<_> = path
            .segments
            .iter()
            .map(|part| part.ident.to_string())
            .collect();
        self.note(&parts);
        visit::visit_path(self, path);
    }
}

fn parse(path: &Path) -> syn::File {
    let text = fs::read_to_string(path).unwrap();
    syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns all paths of a `use`.
fn paths(tree: &UseTree) -> Vec<Vec<String>> {
    let behind = |name: String, tree| {
        let paths = paths(tree).into_iter();
        paths
            .map(move |path| [vec![name.clone()], path].concat())
            .collect()
    };
    match tree {
        UseTree::Path(path) => behind(path.ident.to_string(), &path.tree),
        UseTree::Name(name) => vec![vec![name.ident.to_string()]],
        UseTree::Rename(name) => vec![vec![name.ident.to_string()]],
        UseTree::Glob(_) => vec![Vec::new()],
        UseTree::Group(group) => group.items.iter().flat_map(paths).collect(),
    }
}

/// Returns whether an item is in builds for tests or models alone.
fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let Ok(list) = attribute.meta.require_list() else {
            return false;
        };
        let condition = list.tokens.to_string();
        attribute.path().is_ident("cfg")
            && !condition.starts_with("not")
            && ["test", "loom", "simulation"]
                .iter()
                .any(|name| condition.contains(name))
    })
}

/// Returns modules that import each other in a circle, if there are any.
fn circle(imports: &Imports) -> Option<Vec<&str>> {
    fn go<'a>(
        imports: &'a Imports,
        way: &mut Vec<&'a str>,
        done: &mut BTreeSet<&'a str>,
        at: &'a str,
    ) -> bool {
        if let Some(start) = way.iter().position(|module| *module == at) {
            way.drain(..start);
            return true;
        }
        if !done.insert(at) {
            return false;
        }
        way.push(at);
        let below = imports.get(at).into_iter().flatten();
        let found = below.into_iter().any(|below| go(imports, way, done, below));
        if !found {
            way.pop();
        }
        found
    }
    let mut done = BTreeSet::new();
    imports.keys().find_map(|module| {
        let mut way = Vec::new();
        go(imports, &mut way, &mut done, module).then_some(way)
    })
}

#[test]
fn no_modules_import_each_other() {
    let house = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    for folder in [
        "nvme-mpt/spec",
        "nvme-mpt/memory",
        "nvme-mpt",
        "nvme-mpt/vfio",
        "nvme-mpt/software",
        "vmm-device",
        "hypervisor-glue/vfio-user",
        "hypervisor-glue/lease-protocol",
        "hypervisor-glue/keep",
        "hypervisor-glue/vmm",
        "hypervisor-glue/cli",
        "tests",
        "integration",
    ] {
        let read = Crate::read(&house.join(folder).join("src"));
        assert!(!read.modules.is_empty(), "{folder}");
        assert_eq!(circle(&read.imports), None, "{folder}");
    }
}

#[test]
fn a_circle_is_found_and_named() {
    let imports = |edges: &[(&str, &str)]| {
        let mut imports = Imports::new();
        for (from, to) in edges {
            let below = imports.entry((*from).to_owned()).or_default();
            below.insert((*to).to_owned());
        }
        imports
    };
    let layers = imports(&[("device", "queue"), ("device", "ring"), ("queue", "ring")]);
    assert_eq!(circle(&layers), None);
    let layers = imports(&[("device", "queue"), ("queue", "ring"), ("ring", "queue")]);
    assert_eq!(circle(&layers), Some(vec!["queue", "ring"]));
}

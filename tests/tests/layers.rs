//! Module layering: in every crate, the imports between modules have no cycles. This applies to the modules of a crate's root
//! and to the modules of each directory.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use syn::visit::{self, Visit};
use syn::{Attribute, ItemImpl, ItemMod, ItemUse, UseTree};

/// Imports of each module of a directory.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// Components of a module's or item's path from the crate's root.
type Place = Vec<String>;

/// Paths used in a crate's files.
#[derive(Default)]
struct Crate {
    modules: BTreeSet<Place>,
    /// All paths as written, each with the module that contains it.
    paths: Vec<(Place, Place)>,
    /// Paths in imports only, each with the module that contains it.
    imported: Vec<(Place, Place)>,
    /// Module whose file is being read.
    module: Place,
}

impl Crate {
    fn read(dir: &Path) -> Self {
        let mut read = Self::default();
        read.read_file(&dir.join("lib.rs"), &[]);
        read.read_sources(dir, &[]);
        read
    }

    fn read_sources(&mut self, dir: &Path, module: &[String]) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            let child: Place = module.iter().cloned().chain([name.clone()]).collect();
            // Tests and models may import anything.
            let is_left_out = ["tests", "main", "bin", "model", "simulation"].contains(&&*name);
            if is_left_out && module.len() + usize::from(name == "tests") > 0 || name == "lib" {
                continue;
            }
            match (path.is_dir(), name.as_str()) {
                (true, _) => self.read_sources(&path, &child),
                (false, "mod") => self.read_file(&path, module),
                (false, _) => self.read_file(&path, &child),
            }
        }
    }

    fn read_file(&mut self, path: &Path, module: &[String]) {
        if path.extension().is_some_and(|extension| extension == "rs") {
            self.module = module.to_vec();
            self.modules.insert(module.to_vec());
            self.visit_file(&parse(path));
        }
    }

    /// Converts a path to one from the crate's root. `None` if the path leads out of the crate.
    fn absolute(&self, module: &[String], path: &[String]) -> Option<Place> {
        let root: &[String] = &[];
        let (base, rest) = match path.first().map(String::as_str)? {
            "crate" => (root, &path[1..]),
            "self" => (module, &path[1..]),
            "super" => {
                let ups = path.iter().take_while(|part| *part == "super").count();
                (&module[..module.len().checked_sub(ups)?], &path[ups..])
            }
            child => {
                let child = [module, &[child.to_owned()]].concat();
                self.modules.contains(&child).then_some((module, path))?
            }
        };
        Some([base, rest].concat())
    }

    /// Returns the module that contains the item of a path.
    fn module_of<'a>(&self, path: &'a [String]) -> &'a [String] {
        let lengths = (0..=path.len()).rev();
        let mut prefixes = lengths.map(move |length| &path[..length]);
        let found = prefixes.find(|prefix| self.modules.contains(*prefix));
        found.unwrap_or_default()
    }

    /// Returns the imports in each directory. A re-exported name counts as an import from its original module.
    fn dirs(&self) -> BTreeMap<Place, Imports> {
        let mut exported = BTreeMap::new();
        for (module, path) in &self.imported {
            if let Some(path) = self.absolute(module, path)
                && !self.modules.contains(&path)
                && let Some((name, above)) = path.split_last()
            {
                let from = self.module_of(above).to_vec();
                exported.insert((module.clone(), name.clone()), from);
            }
        }
        let mut dirs: BTreeMap<Place, Imports> = BTreeMap::new();
        for (from, path) in &self.paths {
            let Some(path) = self.absolute(from, path) else {
                continue;
            };
            let to = self.module_of(&path).to_vec();
            let name = path.get(to.len()).cloned().unwrap_or_default();
            let to = exported.get(&(to.clone(), name)).unwrap_or(&to);
            let common = from.iter().zip(to).take_while(|(a, b)| a == b).count();
            if let (Some(one), Some(other)) = (from.get(common), to.get(common)) {
                let dir = dirs.entry(from[..common].to_vec()).or_default();
                dir.entry(one.clone()).or_default().insert(other.clone());
            }
        }
        dirs
    }
}

impl Visit<'_> for Crate {
    fn visit_item_mod(&mut self, module: &ItemMod) {
        if module.content.is_some() && !is_for_tests(&module.attrs) {
            self.module.push(module.ident.to_string());
            self.modules.insert(self.module.clone());
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
                self.imported.push((self.module.clone(), path.clone()));
                self.paths.push((self.module.clone(), path));
            }
        }
    }

    fn visit_path(&mut self, path: &syn::Path) {
        let parts = path.segments.iter();
        let parts = parts.map(|part| part.ident.to_string()).collect();
        self.paths.push((self.module.clone(), parts));
        visit::visit_path(self, path);
    }
}

fn parse(path: &Path) -> syn::File {
    let text = fs::read_to_string(path).unwrap();
    syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns all paths of a `use` item.
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

/// Returns whether an item is only built for tests or models.
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

/// Returns a cycle of modules that import each other, if there is any.
fn find_cycle(imports: &Imports) -> Option<Vec<&str>> {
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
    for name in [
        "nvme-mpt/spec",
        "nvme-mpt/memory",
        "nvme-mpt/driver",
        "nvme-mpt/lease",
        "nvme-mpt/guest",
        "nvme-mpt",
        "nvme-mpt/vfio",
        "nvme-mpt/models",
        "nvme-mpt/layers",
        "nvme-mpt/key-values",
        "nvme-mpt/software",
        "vmm-device",
        "hypervisor-glue/vfio-user",
        "hypervisor-glue/lease-protocol",
        "hypervisor-glue/logging",
        "hypervisor-glue/supervise",
        "hypervisor-glue/vmm",
        "hypervisor-glue/server",
        "hypervisor-glue/doctor",
        "hypervisor-glue/cli",
        "hypervisor-glue/cloud-hypervisor",
        "tests",
        "integration",
        "integration/load",
        "integration/figures",
        "integration/figures/data",
    ] {
        let read = Crate::read(&house.join(name).join("src"));
        assert!(!read.modules.is_empty(), "{name}");
        for (dir, imports) in read.dirs() {
            let dir = dir.join("/");
            assert_eq!(find_cycle(&imports), None, "{name}, folder \"{dir}\"");
        }
    }
}

#[test]
fn re_exports_are_followed_to_their_module() {
    let place = |text: &str| -> Place { text.split("::").map(str::to_owned).collect() };
    let modules = ["pair", "pair::core", "pair::seat"].map(place);
    let mut read = Crate {
        modules: modules.into_iter().chain([Place::new()]).collect(),
        ..Crate::default()
    };
    // `pair` re-exports a name of a child module, and another child module imports the name from `pair`.
    read.imported.push((place("pair"), place("seat::Seat")));
    read.paths.push((place("pair::core"), place("super::Seat")));
    read.paths
        .push((place("pair::seat"), place("crate::pair::core::Core")));
    read.paths
        .push((place("pair::seat"), place("std::sync::Arc")));
    let dirs = read.dirs();
    assert_eq!(dirs.len(), 1);
    assert_eq!(
        find_cycle(&dirs[&place("pair")]),
        Some(vec!["core", "seat"])
    );
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
    assert_eq!(find_cycle(&layers), None);
    let layers = imports(&[("device", "queue"), ("queue", "ring"), ("ring", "queue")]);
    assert_eq!(find_cycle(&layers), Some(vec!["queue", "ring"]));
}

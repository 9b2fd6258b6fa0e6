//! Kernel modules and their dependencies, in loading order.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::ProvisionError;
use crate::process;

/// Text that precedes a module's list of dependencies in the `.modinfo` section.
const DEPENDS: &[u8] = b"\0depends=";

/// Copies the modules `wanted` and their dependencies to `dir`, uncompressed. `root` is the directory of an unpacked
/// kernel package. The copies are named `00-name.ko`, `01-name.ko`, …, with dependencies first.
///
/// Names for which there is no module are skipped, since the driver may be built into the kernel.
///
/// # Errors
/// A file cannot be read, uncompressed or written.
pub(super) fn copy(root: &Path, wanted: &[&str], dir: &Path) -> Result<(), ProvisionError> {
    let mut tree = ModuleTree {
        files: HashMap::new(),
        chosen: Vec::new(),
        dir,
    };
    // Directories of modules in a package: before and after Debian merged / and /usr.
    for place in ["lib/modules", "usr/lib/modules"] {
        let place = root.join(place);
        if place.is_dir() {
            tree.index(&place)?;
        }
    }
    for name in wanted {
        tree.choose(name)?;
    }
    Ok(())
}

struct ModuleTree<'a> {
    files: HashMap<String, PathBuf>,
    chosen: Vec<String>,
    dir: &'a Path,
}

impl ModuleTree<'_> {
    fn index(&mut self, dir: &Path) -> Result<(), ProvisionError> {
        let at = |source| ProvisionError::File {
            path: dir.to_owned(),
            source,
        };
        for entry in fs::read_dir(dir).map_err(at)? {
            let entry = entry.map_err(at)?;
            let path = entry.path();
            // The link `build` points out of the tree, so links are not followed.
            if entry.file_type().map_err(at)?.is_dir() {
                self.index(&path)?;
            } else if let Some((name, _)) = entry.file_name().to_string_lossy().split_once(".ko") {
                self.files.insert(canonical(name), path);
            }
        }
        Ok(())
    }

    fn choose(&mut self, name: &str) -> Result<(), ProvisionError> {
        let name = canonical(name);
        if self.chosen.contains(&name) {
            return Ok(());
        }
        let Some(file) = self.files.get(&name) else {
            return Ok(());
        };
        let packed = file.extension().is_some_and(|extension| extension == "xz");
        let place = self.dir.join(format!("{name}.ko"));
        let mut partial = place.clone();
        if packed {
            partial.set_extension("ko.xz");
        }
        fs::copy(file, &partial).map_err(|source| ProvisionError::File {
            path: file.clone(),
            source,
        })?;
        if packed {
            process::run(Command::new("xz").arg("--decompress").arg(&partial))?;
        }
        let at = |source| ProvisionError::File {
            path: place.clone(),
            source,
        };
        for needed in depends(&fs::read(&place).map_err(at)?) {
            self.choose(&needed)?;
        }
        let ordered = format!("{:02}-{name}.ko", self.chosen.len());
        fs::rename(&place, self.dir.join(ordered)).map_err(at)?;
        self.chosen.push(name);
        Ok(())
    }
}

/// Returns the canonical name of a module: names have underscores, although file names may have dashes.
fn canonical(name: &str) -> String {
    name.replace('-', "_")
}

/// Returns the dependencies of a module from its `.modinfo`.
fn depends(module: &[u8]) -> Vec<String> {
    let Some(start) = module
        .windows(DEPENDS.len())
        .position(|bytes| bytes == DEPENDS)
    else {
        return Vec::new();
    };
    let list = &module[start + DEPENDS.len()..];
    let end = list
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(list.len());
    String::from_utf8_lossy(&list[..end])
        .split(',')
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_come_after_what_they_need() {
        let root = tempfile::tempdir().expect("temporary folder");
        let modules = root.path().join("lib/modules/1.0/kernel/drivers");
        fs::create_dir_all(&modules).expect("folders");
        let write = |name: &str, depends: &str| {
            let info = format!("ELF license=GPL\0depends={depends}\0name=x\0");
            fs::write(modules.join(name), info).expect("module");
        };
        write("vfio-pci.ko", "vfio,vfio-pci-core");
        write("vfio-pci-core.ko", "vfio");
        write("vfio.ko", "");
        write("other.ko", "");
        let out = tempfile::tempdir().expect("temporary folder");
        copy(root.path(), &["vfio_pci", "built_in", "vfio"], out.path()).expect("copy");
        let mut names: Vec<_> = fs::read_dir(out.path())
            .expect("folder")
            .map(|entry| {
                entry
                    .expect("entry")
                    .file_name()
                    .into_string()
                    .expect("name")
            })
            .collect();
        names.sort();
        assert_eq!(
            names,
            ["00-vfio.ko", "01-vfio_pci_core.ko", "02-vfio_pci.ko"]
        );
    }

    #[test]
    fn a_module_without_the_section_needs_nothing() {
        assert_eq!(depends(b"\x7fELF"), Vec::<String>::new());
        assert_eq!(depends(b"\0depends=a,b"), ["a", "b"]);
    }
}

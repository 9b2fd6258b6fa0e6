//! Cache of provisioned files: one directory for each recipe. A directory is complete, or does not exist.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use super::ProvisionError;

/// Environment variable with the cache directory, instead of `target/guests`.
pub const CACHE_VARIABLE: &str = "NVME_MPT_CACHE";

/// The cache directory, which only one process at a time can lock.
#[derive(Debug)]
pub struct ProvisionCache {
    root: PathBuf,
    /// File that is locked while it is open.
    _lock: File,
}

impl ProvisionCache {
    /// Opens the cache. Waits while another process has it open.
    ///
    /// # Errors
    /// The directory cannot be created or locked.
    pub fn open() -> Result<Self, ProvisionError> {
        let root = match std::env::var_os(CACHE_VARIABLE) {
            Some(path) => PathBuf::from(path),
            None => crate::target_dir().join("guests"),
        };
        let at = |source| ProvisionError::Cache {
            path: root.clone(),
            source,
        };
        fs::create_dir_all(&root).map_err(at)?;
        let root = fs::canonicalize(&root).map_err(at)?;
        let at = |source| ProvisionError::Cache {
            path: root.clone(),
            source,
        };
        let lock = File::create(root.join("lock")).map_err(at)?;
        lock.lock().map_err(at)?;
        Ok(Self { root, _lock: lock })
    }

    /// Opens a cache in a directory, for tests.
    #[cfg(test)]
    pub(super) fn open_at(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            _lock: File::create(root.join("lock")).expect("lock file"),
        }
    }

    /// Returns the directory for a `recipe`. If the cache does not contain it, calls `build`.
    ///
    /// `build` fills a temporary directory, which is renamed when it is complete. So the result of an interrupted build is
    /// never used.
    ///
    /// # Errors
    /// `build` fails, or the directory cannot be created or renamed.
    pub fn entry(
        &self,
        name: &str,
        recipe: &str,
        build: impl FnOnce(&Path) -> Result<(), ProvisionError>,
    ) -> Result<PathBuf, ProvisionError> {
        let finished = self.root.join(format!("{name}-{:016x}", fnv1a(recipe)));
        if finished.is_dir() {
            return Ok(finished);
        }
        let unfinished = self.root.join(format!("{name}.unfinished"));
        let at = |source| ProvisionError::Cache {
            path: unfinished.clone(),
            source,
        };
        match fs::remove_dir_all(&unfinished) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(at(error)),
            _ => {}
        }
        fs::create_dir(&unfinished).map_err(at)?;
        build(&unfinished)?;
        fs::rename(&unfinished, &finished).map_err(at)?;
        Ok(finished)
    }
}

/// Hashes a recipe by FNV-1a, whose result does not depend on the build of this program. The hash is not cryptographic.
fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_build_leaves_no_complete_entry() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let cache = ProvisionCache::open_at(dir.path());
        let failed = cache.entry("thing", "recipe", |path| {
            fs::write(path.join("half"), "half").expect("write");
            Err(ProvisionError::NotDebian)
        });
        assert!(failed.is_err());

        let path = cache
            .entry("thing", "recipe", |path| {
                assert!(
                    !path.join("half").exists(),
                    "left over from the failed build"
                );
                fs::write(path.join("whole"), "whole").expect("write");
                Ok(())
            })
            .expect("second build");
        assert!(path.join("whole").exists());
    }

    #[test]
    fn a_recipe_is_built_once_and_a_changed_recipe_again() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let cache = ProvisionCache::open_at(dir.path());
        let first = cache.entry("thing", "1", |_| Ok(())).expect("first");
        let again = cache
            .entry("thing", "1", |_| panic!("built twice"))
            .expect("again");
        let other = cache.entry("thing", "2", |_| Ok(())).expect("other");
        assert_eq!(first, again);
        assert_ne!(first, other);
    }
}

//! Limits of this process's control group and its ancestors, in cgroup version 1 and 2.

use std::fs;
use std::path::{Path, PathBuf};

/// Directory of the kernel's control groups.
const CGROUP_DIR: &str = "sys/fs/cgroup";

/// A limit of a control group, and its current use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlGroupLimit {
    /// File that contains the limit.
    pub file: PathBuf,
    /// Limit, in bytes or tasks.
    pub limit: u64,
    /// Use by the group, in bytes or tasks. Page cache is not included, because the kernel reclaims it when memory is short.
    pub used: u64,
}

impl ControlGroupLimit {
    /// Returns the bytes or tasks that are left until the limit.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.limit.saturating_sub(self.used)
    }
}

/// A cgroup controller and the names of its files.
struct ControlGroupController {
    name: &'static str,
    /// Names of the file with the limit and the file with the use: for version 2 of control groups, and for version 1.
    files: [(&'static str, &'static str); 2],
    /// Keys in `memory.stat` whose bytes the kernel can reclaim: for version 2 of control groups, and for version 1.
    reclaimable: [&'static [&'static str]; 2],
}

const MEMORY: ControlGroupController = ControlGroupController {
    name: "memory",
    files: [
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
    reclaimable: [
        &["inactive_file", "active_file"],
        &["total_inactive_file", "total_active_file"],
    ],
};

const PIDS: ControlGroupController = ControlGroupController {
    name: "pids",
    files: [("pids.max", "pids.current"), ("pids.max", "pids.current")],
    reclaimable: [&[], &[]],
};

/// Returns the memory limit with the least memory left, among those of this process's control group and its ancestors; `None`
/// if there is no limit.
#[must_use]
pub fn memory_limit() -> Option<ControlGroupLimit> {
    memory_limit_in(Path::new("/"))
}

/// Returns the result of [`memory_limit`], but reads the kernel's files below `root` instead of `/`.
pub(crate) fn memory_limit_in(root: &Path) -> Option<ControlGroupLimit> {
    tightest_limit(&MEMORY, &root.join(CGROUP_DIR), &own_groups(root))
}

/// Returns the number of processes of this control group (version 2) and its descendants that the OOM killer has ended;
/// `None` if the group has no such count. The kernel's files are below `root`.
pub(crate) fn oom_kills_in(root: &Path) -> Option<u64> {
    let groups = own_groups(root);
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let events = root.join(CGROUP_DIR).join(group).join("memory.events");
    let events = fs::read_to_string(events).ok()?;
    let count = events
        .lines()
        .find_map(|line| line.strip_prefix("oom_kill "))?;
    count.trim().parse().ok()
}

/// Returns the limit on threads and processes with the fewest left, among those of this process's control group and its
/// ancestors; `None` if there is no limit.
#[must_use]
pub fn task_limit() -> Option<ControlGroupLimit> {
    let root = Path::new("/");
    tightest_limit(&PIDS, &root.join(CGROUP_DIR), &own_groups(root))
}

fn own_groups(root: &Path) -> String {
    fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default()
}

/// Returns the bytes of a group that the kernel can reclaim.
fn reclaimable_bytes(group: &Path, keys: &[&str]) -> u64 {
    if keys.is_empty() {
        return 0;
    }
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let values = stat.lines().filter_map(|line| {
        let (key, value) = line.split_once(' ')?;
        keys.contains(&key).then_some(value)?.parse::<u64>().ok()
    });
    values.fold(0, u64::saturating_add)
}

/// Returns the limit with the least bytes or tasks left, among the limits of the process's groups and their ancestors. `groups`
/// is the text of `/proc/PID/cgroup` (cgroups(7)).
fn tightest_limit(
    controller: &ControlGroupController,
    root: &Path,
    groups: &str,
) -> Option<ControlGroupLimit> {
    let number = |path: PathBuf| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let limits = groups.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, group) = (fields.next()?, fields.next()?);
        let (dir, version) = match controllers {
            "" => (root.to_owned(), 0),
            names if names.split(',').any(|name| name == controller.name) => (root.join(names), 1),
            _ => return None,
        };
        let (files, keys) = (controller.files[version], controller.reclaimable[version]);
        let group = dir.join(group.trim_start_matches('/'));
        let above = group
            .ancestors()
            .take_while(|above| above.starts_with(&dir));
        let limits = above.filter_map(|group| {
            let file = group.join(files.0);
            let most = number(file.clone())?;
            let used = number(group.join(files.1))?;
            let used = used.saturating_sub(reclaimable_bytes(group, keys));
            Some(ControlGroupLimit {
                file,
                limit: most,
                used,
            })
        });
        limits.min_by_key(ControlGroupLimit::remaining)
    });
    limits.min_by_key(ControlGroupLimit::remaining)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, files: &[(&str, &str)]) {
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    #[test]
    fn the_limit_with_the_least_left_counts_in_either_version() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        write(
            root,
            &[
                ("a/memory.max", "1000\n"),
                ("a/memory.current", "900\n"),
                ("a/b/memory.max", "max\n"),
                ("a/b/memory.current", "100\n"),
                ("a/b/c/memory.max", "500\n"),
                ("a/b/c/memory.current", "300\n"),
                (
                    "a/b/c/memory.stat",
                    "anon 100\ninactive_file 150\nactive_file 50\nfile 7\n",
                ),
                ("memory/v1/memory.limit_in_bytes", "300\n"),
                ("memory/v1/memory.usage_in_bytes", "310\n"),
                ("memory/v1/memory.stat", "inactive_file 200\n"),
                ("cpu,pids/v1/pids.max", "7\n"),
                ("cpu,pids/v1/pids.current", "7\n"),
            ],
        );
        let memory = |groups| tightest_limit(&MEMORY, root, groups);
        let found = memory("0::/a/b/c\n").unwrap();
        assert_eq!(
            (found.remaining(), found.file),
            (100, root.join("a/memory.max"))
        );
        fs::write(root.join("a/memory.current"), "400\n").unwrap();
        let found = memory("0::/a/b/c\n").unwrap();
        assert_eq!((found.limit, found.used), (500, 100));
        fs::write(root.join("a/memory.current"), "900\n").unwrap();
        let found = memory("0::/a/b/c\n4:memory:/v1/gone\n").unwrap();
        let file = root.join("memory/v1/memory.limit_in_bytes");
        assert_eq!((found.remaining(), found.file), (0, file));
        assert_eq!(memory("0::/\n3:cpu:/v1\n\nbad\n"), None);
        let tasks = tightest_limit(&PIDS, root, "3:cpu,pids:/v1\n").unwrap();
        assert_eq!((tasks.limit, tasks.used, tasks.remaining()), (7, 7, 0));
    }
}

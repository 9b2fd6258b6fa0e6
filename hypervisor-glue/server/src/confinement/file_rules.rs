//! Landlock rules for the files that a server may use.
//!
//! A rule grants rights on a file, or on a directory with everything below it. The rule applies to the file or directory
//! that the path names when the process is confined, even if this file is renamed later. Files without a rule are denied,
//! regardless of file modes. A confined process cannot add rules, so all rules must be known before. Files that are already
//! open, and descriptors received from a client or the supervisor, need no rule.
//!
//! # Rights
//!
//! | letter | files | directories |
//! |---|---|---|
//! | `r` | read | list |
//! | `w` | write, truncate, `ioctl` of a device | create and remove files, sockets, links and directories |
//! | `x` | execute | |
//!
//! No rule allows creating device nodes. Landlock also restricts more than files: the process may bind only the TCP port of
//! its metrics, may not connect over TCP, and may signal only its successor.

use std::env;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, LandlockStatus, NetPort, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, Scope, make_bitflags, path_beneath_rules,
};
use nvme_mpt_vmm::options::{OptionError, OptionText};
use thiserror::Error;

/// Latest Landlock version that is used. An older kernel enforces the restrictions that its version supports.
const LATEST_VERSION: ABI = ABI::V6;

/// Restrictions that Landlock can enforce, each with the Landlock version and the kernel release that added it.
const RESTRICTION_VERSIONS: [(ABI, &str, &str); 5] = [
    (ABI::V1, "files", "5.13"),
    (ABI::V3, "truncation", "6.2"),
    (ABI::V4, "TCP", "6.7"),
    (ABI::V5, "ioctls of devices", "6.10"),
    (ABI::V6, "signals", "6.12"),
];

/// Access rights of a [`FileRule`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileAccess {
    /// Read access (`r`).
    pub read: bool,
    /// Write access (`w`).
    pub write: bool,
    /// Execute access (`x`).
    pub execute: bool,
}

impl FileAccess {
    /// Read access alone (`r`).
    pub(crate) const READ: Self = Self {
        read: true,
        write: false,
        execute: false,
    };
    /// Read and write access (`rw`).
    pub(crate) const WRITE: Self = Self {
        read: true,
        write: true,
        execute: false,
    };
    /// Read and execute access (`rx`).
    pub(crate) const EXECUTE: Self = Self {
        read: true,
        write: false,
        execute: true,
    };

    fn union(self, other: Self) -> Self {
        Self {
            read: self.read || other.read,
            write: self.write || other.write,
            execute: self.execute || other.execute,
        }
    }

    fn contains(self, other: Self) -> bool {
        self.union(other) == self
    }

    fn landlock_rights(self) -> BitFlags<AccessFs> {
        let none = BitFlags::EMPTY;
        let read = make_bitflags!(AccessFs::{ReadFile | ReadDir});
        let write = make_bitflags!(AccessFs::{
            WriteFile | RemoveDir | RemoveFile | MakeDir | MakeReg | MakeSock | MakeSym | Refer | Truncate | IoctlDev
        });
        let execute = make_bitflags!(AccessFs::{Execute});
        let read = if self.read { read } else { none };
        let write = if self.write { write } else { none };
        read | write | if self.execute { execute } else { none }
    }
}

/// Error of parsing a [`FileAccess`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("\"{0}\" is not a set of rights: use letters of rwx, as in rw")]
pub struct FileAccessError(String);

impl FromStr for FileAccess {
    type Err = FileAccessError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || FileAccessError(text.to_owned());
        let mut access = Self::default();
        for letter in text.chars() {
            let right = match letter {
                'r' => &mut access.read,
                'w' => &mut access.write,
                'x' => &mut access.execute,
                _ => return Err(wrong()),
            };
            if std::mem::replace(right, true) {
                return Err(wrong());
            }
        }
        match access == Self::default() {
            true => Err(wrong()),
            false => Ok(access),
        }
    }
}

impl fmt::Display for FileAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (letter, is_set) in [("r", self.read), ("w", self.write), ("x", self.execute)] {
            f.write_str(if is_set { letter } else { "" })?;
        }
        Ok(())
    }
}

/// A Landlock rule: rights on a file, or on a directory and everything below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRule {
    /// The file or directory.
    pub path: PathBuf,
    /// Access rights on the file, or on everything below the directory.
    pub access: FileAccess,
}

impl FileRule {
    /// Option keys of a rule.
    const KEYS: [&str; 2] = ["path", "access"];

    pub(crate) fn new(path: impl Into<PathBuf>, access: FileAccess) -> Self {
        let path = path.into();
        Self { path, access }
    }

    /// Returns the rule as an option string, or `None` if its path is not valid UTF-8.
    pub(crate) fn to_options(&self) -> Option<String> {
        let Self { path, access } = self;
        let pairs = [
            ("path", path.to_str()?.to_owned()),
            ("access", access.to_string()),
        ];
        let pairs = pairs.map(|(key, value)| (key.to_owned(), value));
        OptionText::from_pairs(pairs)
            .ok()
            .map(|text| text.to_string())
    }

    /// Parses a rule from options.
    ///
    /// # Errors
    /// [`OptionError`].
    pub(crate) fn from_options(text: &OptionText) -> Result<Self, OptionError> {
        let unknown = text.pairs().find(|(key, _)| !Self::KEYS.contains(key));
        if let Some((key, _)) = unknown {
            return Err(OptionError::Unknown {
                key: key.to_owned(),
                allowed: Self::KEYS.join(", "),
            });
        }
        let value = |key, example| text.get(key).ok_or(OptionError::Missing { key, example });
        let path = value("path", "FOLDER")?;
        let access = value("access", "rw")?;
        Ok(Self {
            path: path.into(),
            access: access.parse().map_err(|error| OptionError::Value {
                key: "access",
                value: access.to_owned(),
                source: Box::<FileAccessError>::new(error),
            })?,
        })
    }
}

impl FromStr for FileRule {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<Self, OptionError> {
        Self::from_options(&text.parse()?)
    }
}

/// Error of confining the process with Landlock.
#[derive(Debug, Error)]
pub enum LandlockError {
    /// The kernel refuses the rules.
    #[error("Cannot restrict the files of this server by Landlock; leave --landlock out")]
    Refused(#[source] RulesetError),
}

/// Landlock rules of a process, with resolved paths.
#[derive(Clone, Debug, Default)]
pub(crate) struct FileRules {
    rules: Vec<FileRule>,
    /// TCP port that the process may bind.
    port: Option<u16>,
}

impl FileRules {
    /// Creates the rules that every server needs, and the rules in `needed`. Skips rules for missing files.
    pub(crate) fn new(needed: impl IntoIterator<Item = FileRule>, port: Option<u16>) -> Self {
        let program = env::current_exe().ok();
        let programs = program
            .as_deref()
            .and_then(Path::parent)
            .map(Path::to_owned);
        // These rules name directories, because an update of the host replaces the files in them.
        let executed = ["/usr", "/lib", "/lib64"].map(PathBuf::from).into_iter();
        let executed = executed.chain(programs);
        let executed = executed.map(|path| FileRule::new(path, FileAccess::EXECUTE));
        // Directories that are read: for users and groups, for a drive's users, and for properties of block devices.
        let read = ["/etc", "/proc", "/sys"].map(|path| FileRule::new(path, FileAccess::READ));
        // The device mapper's control device is needed to read the tables of logical volumes.
        let written = [
            "/dev/null",
            "/dev/vfio",
            "/dev/iommu",
            "/dev/mapper/control",
        ]
        .map(|path| FileRule::new(path, FileAccess::WRITE));
        let all = executed.chain(read).chain(written).chain(needed);
        let mut rules: Vec<FileRule> = Vec::new();
        for FileRule { path, access } in all {
            let Ok(path) = fs::canonicalize(path) else {
                continue;
            };
            match rules.iter_mut().find(|rule| rule.path == path) {
                Some(rule) => rule.access = rule.access.union(access),
                None => rules.push(FileRule { path, access }),
            }
        }
        Self { rules, port }
    }

    /// Adds the operator's rules. A rule with a missing path is logged and skipped: if the start failed instead, VMs of the
    /// predecessor would lose their drives.
    pub(crate) fn with_rules(self, rules: impl IntoIterator<Item = FileRule>) -> Self {
        let (present, absent): (Vec<_>, Vec<_>) =
            rules.into_iter().partition(|rule| rule.path.exists());
        for FileRule { path, .. } in absent {
            let path = path.display();
            log::warn!(
                "{path}, which a Landlock rule names, does not exist: it stays inaccessible until the server is \
                 restarted"
            );
        }
        Self::new(self.rules.into_iter().chain(present), self.port)
    }

    /// Returns whether the rules grant this access to the path. If the file is also reachable through another mount, the kernel
    /// may grant more.
    pub(crate) fn is_allowed(&self, wanted: &FileRule) -> bool {
        let path = fs::canonicalize(&wanted.path);
        let path = path.as_deref().unwrap_or(&wanted.path);
        let above = self
            .rules
            .iter()
            .filter(|rule| path.starts_with(&rule.path));
        let given = above.fold(FileAccess::default(), |given, rule| {
            given.union(rule.access)
        });
        given.contains(wanted.access)
    }

    /// Restricts this thread and the threads that it starts. Returns the kernel's Landlock version, if supported.
    pub(crate) fn enforce(&self) -> Result<Option<ABI>, LandlockError> {
        let status = self.restrict_thread().map_err(LandlockError::Refused)?;
        Ok(match status {
            LandlockStatus::Available { effective_abi, .. } => Some(effective_abi),
            _ => None,
        })
    }

    fn restrict_thread(&self) -> Result<LandlockStatus, RulesetError> {
        // Restricting abstract sockets would forbid the connection to a supervisor's abstract socket. So this restriction is
        // left out if the supervisor has such a socket.
        let supervisor = env::var_os("NOTIFY_SOCKET").unwrap_or_default();
        let scope = match supervisor.as_encoded_bytes().first() {
            Some(b'@') => Scope::Signal.into(),
            _ => Scope::Signal | Scope::AbstractUnixSocket,
        };
        let mut ruleset = Ruleset::default()
            .handle_access(AccessFs::from_all(LATEST_VERSION))?
            .handle_access(AccessNet::from_all(LATEST_VERSION))?
            .scope(scope)?
            .create()?;
        for FileRule { path, access } in &self.rules {
            ruleset = ruleset.add_rules(path_beneath_rules([path], access.landlock_rights()))?;
        }
        if let Some(port) = self.port {
            ruleset = ruleset.add_rule(NetPort::new(port, AccessNet::BindTcp))?;
        }
        Ok(ruleset.restrict_self()?.landlock)
    }
}

/// Returns a log message: the restrictions of this Landlock version, and those that need a later version.
pub(crate) fn describe_restrictions(version: ABI) -> String {
    let (has, lacks): (Vec<_>, Vec<_>) = RESTRICTION_VERSIONS
        .iter()
        .partition(|(since, ..)| *since <= version);
    let has: Vec<&str> = has.iter().map(|(_, name, _)| *name).collect();
    let lacks = lacks
        .iter()
        .map(|(_, name, kernel)| format!("{name} (Linux {kernel})"));
    let lacks: Vec<String> = lacks.collect();
    let mut text = has.join(", ");
    if !lacks.is_empty() {
        text += &format!("; this kernel does not restrict {}", lacks.join(", "));
    }
    text
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File, OpenOptions};
    use std::io::{self, ErrorKind};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixListener;

    use nvme_guest::threads::start_thread;
    use nvme_mpt_tests::not_checked::not_checked;
    use nvme_mpt_vmm::report;

    use super::*;

    #[test]
    fn a_rule_is_written_as_in_cloud_hypervisor() {
        let rule: FileRule = "path=/srv/images,access=rw".parse().unwrap();
        assert_eq!(rule, FileRule::new("/srv/images", FileAccess::WRITE));
        let rule: FileRule = "access=xr,path=\"/a,b\"".parse().unwrap();
        assert_eq!(rule, FileRule::new("/a,b", FileAccess::EXECUTE));
        assert_eq!(rule.access.to_string(), "rx");
        for (text, error_message) in [
            ("path=/srv", "\"access\" is missing"),
            ("access=rw", "\"path\" is missing"),
            ("path=/srv,access=rw,mode=3", "no option \"mode\""),
            ("path=/srv,access=ro", "use letters of rwx"),
            ("path=/srv,access=rr", "use letters of rwx"),
        ] {
            let error = text.parse::<FileRule>().unwrap_err();
            let message = report::chain(&error);
            assert!(message.contains(error_message), "{message}");
        }
    }

    #[test]
    fn rights_add_up_along_a_path() {
        let dir = tempfile::tempdir().unwrap();
        let inner = dir.path().join("inner");
        fs::create_dir(&inner).unwrap();
        fs::write(inner.join("image"), "").unwrap();
        std::os::unix::fs::symlink(inner.join("image"), dir.path().join("link")).unwrap();
        let read = FileRule::new(dir.path(), FileAccess::READ);
        let written = FileRule {
            path: inner.clone(),
            access: "w".parse().unwrap(),
        };
        let rules = FileRules::new([read], None).with_rules([written]);
        let gives = |path: &Path, access| rules.is_allowed(&FileRule::new(path, access));
        assert!(gives(&inner.join("image"), FileAccess::WRITE));
        assert!(gives(&dir.path().join("link"), FileAccess::WRITE));
        assert!(gives(dir.path(), FileAccess::READ));
        assert!(!gives(dir.path(), FileAccess::WRITE));
        assert!(!gives(&inner, FileAccess::EXECUTE));
        assert!(!gives(Path::new("/"), FileAccess::READ));
        let absent = FileRule::new(dir.path().join("absent"), FileAccess::READ);
        let count = rules.rules.len();
        assert_eq!(rules.with_rules([absent]).rules.len(), count);
    }

    #[test]
    fn a_restricted_thread_has_only_the_rights_of_its_rules() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::create_dir(path("inside")).unwrap();
        fs::write(path("outside"), "text").unwrap();
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let rules = FileRules::new([FileRule::new(path("inside"), FileAccess::WRITE)], Some(0));
        let dir = dir.path().to_owned();
        let restricted = move || {
            let version = rules.enforce().unwrap()?;
            let inside = dir.join("inside");
            fs::write(inside.join("a"), "text").unwrap();
            fs::rename(inside.join("a"), inside.join("b")).unwrap();
            UnixListener::bind(inside.join("socket")).unwrap();
            fs::read("/etc/passwd").unwrap();
            // The server reads these files to count the available memory, before it pins memory.
            for file in ["meminfo", "vmstat", "self/cgroup"] {
                fs::read(Path::new("/proc").join(file)).unwrap();
            }
            File::open("/dev/null").unwrap();
            let refused = |done: io::Result<()>| {
                assert_eq!(done.unwrap_err().kind(), ErrorKind::PermissionDenied);
            };
            let outside = dir.join("outside");
            refused(File::open(&outside).map(drop));
            refused(OpenOptions::new().write(true).open(&outside).map(drop));
            refused(fs::write(dir.join("new"), "text"));
            refused(UnixListener::bind(dir.join("socket")).map(drop));
            refused(fs::remove_file(&outside));
            if version >= ABI::V4 {
                refused(TcpStream::connect(("127.0.0.1", port)).map(drop));
                refused(TcpListener::bind(("127.0.0.1", port)).map(drop));
                TcpListener::bind(("127.0.0.1", 0)).unwrap();
            }
            Some(version)
        };
        let thread = start_thread("restricted", restricted).unwrap();
        if thread.join().unwrap().is_none() {
            not_checked("this kernel has no Landlock, so no rule is enforced");
        }
    }

    #[test]
    fn restrictions_that_a_kernel_lacks_are_named() {
        assert_eq!(
            describe_restrictions(ABI::V6),
            "files, truncation, TCP, ioctls of devices, signals"
        );
        let old = describe_restrictions(ABI::V2);
        assert!(
            old.starts_with("files; this kernel does not restrict truncation (Linux 6.2), TCP"),
            "{old}"
        );
    }
}

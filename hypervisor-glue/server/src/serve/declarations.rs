//! Functions and drives as declared on the command line, in a file or by `nvme-mpt add`.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::change::DeclarationSource;
use crate::confinement::FileRule;
use nvme_guest::rate_limit::RateLimits;
use nvme_lease::PreviousDataPolicy;
use nvme_lease::range::{ByteRange, ByteSize};
use nvme_mpt_memory::memfd;
use nvme_mpt_paths::{OpenDirectory, PathError, read_trusted_file};
use nvme_mpt_vmm::drives::DrivePath;
use nvme_mpt_vmm::options::{
    FunctionOptions, OptionError, OptionText, ServerDriveOptions, ServerFunctionOptions,
};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use toml::{Table, Value};

/// Maximum size of a configuration file, in bytes. The limit stops reading if a wrong path leads to a device, for example.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Contents of the files that an option string names, by the option's key (`profile` or `faults`).
pub(super) type FileContents = BTreeMap<String, String>;

/// Declaration of a function or drive: its options as text, and the contents of the files that they name. It is stored, so
/// that the next server parses the same options.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DeclarationRecord {
    #[serde(rename = "origin")]
    pub(super) source: DeclarationSource,
    #[serde(rename = "options")]
    pub(super) text: OptionText,
    /// Contents of the files that the options name.
    #[serde(default, skip_serializing_if = "FileContents::is_empty")]
    pub(super) files: FileContents,
    /// Id and range of the lease that the server chose, if the options name neither a range nor a size. A later server leases
    /// this range, even if the drive has grown since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) lease: Option<AssignedLease>,
}

impl DeclarationRecord {
    pub(super) fn new(source: DeclarationSource, text: OptionText) -> Self {
        Self {
            source,
            text,
            files: FileContents::new(),
            lease: None,
        }
    }
}

/// Id and range of a lease that the server chose for a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AssignedLease {
    pub(super) id: String,
    pub(super) range: ByteRange,
}

/// Parsed options of a function or drive, with their declaration.
#[derive(Clone, Debug, PartialEq)]
pub struct ParsedDeclaration<T> {
    pub(super) declared: DeclarationRecord,
    /// The parsed options.
    pub(super) options: T,
}

/// A function to serve.
pub(super) type FunctionDeclaration = ParsedDeclaration<ServerFunctionOptions>;

/// A drive that the server keeps open even without functions.
pub(super) type DriveDeclaration = ParsedDeclaration<ServerDriveOptions>;

impl<T: FromStr<Err = OptionError>> ParsedDeclaration<T> {
    /// Parses options and reads the files that they name.
    ///
    /// # Errors
    /// [`OptionError`].
    pub fn parse(source: DeclarationSource, text: OptionText) -> Result<Self, OptionError> {
        let mut declared = DeclarationRecord::new(source, text);
        // The options are parsed before the files are read here, because the parser's error names a file that cannot be read.
        let options = declared.text.to_string().parse()?;
        declared.files = read_option_files(&declared.text);
        match declared.files.is_empty() {
            true => Ok(Self { declared, options }),
            // The file may have changed since the parser read it, so its text is parsed again.
            false => Self::from_declared(declared),
        }
    }

    /// Parses the options of a declaration, with the declared contents of the files that they name.
    pub(super) fn from_declared(declared: DeclarationRecord) -> Result<Self, OptionError> {
        let text = &declared.text;
        let mut open: Vec<OwnedFd> = Vec::new();
        let mut readable = text.clone();
        for (key, _) in text.named_files() {
            let Some(content) = declared.files.get(key) else {
                continue;
            };
            let file = memory_file(content).map_err(|source| OptionError::Value {
                key,
                value: text.get(key).unwrap_or_default().to_owned(),
                source: Box::new(source),
            })?;
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            readable = readable.with_value(key, Some(&path));
            open.push(file);
        }
        let options = readable.to_string().parse()?;
        Ok(Self { declared, options })
    }

    /// Makes the paths in the text absolute, relative to `dir`.
    #[must_use]
    pub fn with_absolute_paths(mut self, dir: &Path) -> Self {
        self.declared.text = self.declared.text.with_absolute_paths(dir);
        self
    }
}

impl DriveDeclaration {
    /// Returns the declaration to store. Its text has the drive path of the parsed options, which [`resolve_path`] has
    /// resolved.
    pub(super) fn to_resolved(&self) -> DeclarationRecord {
        let path = self.options.drive.path.to_string();
        let mut declared = self.declared.clone();
        declared.text = declared.text.with_value("path", Some(&path));
        declared
    }
}

/// Returns the contents of the files that options name. Omits files that cannot be read.
fn read_option_files(text: &OptionText) -> FileContents {
    let named = |(key, path): (&'static str, PathBuf)| {
        let content = read_option_file(&path).ok()?;
        Some((key.to_owned(), content))
    };
    text.named_files().into_iter().filter_map(named).collect()
}

fn read_option_file(path: &Path) -> io::Result<String> {
    // Checked again, because the file may have changed since the options were parsed.
    let metadata = fs::metadata(path)?;
    match metadata.is_file() && metadata.len() <= FILE_BYTES_MAX {
        true => fs::read_to_string(path),
        false => Err(io::ErrorKind::InvalidInput.into()),
    }
}

/// Returns a memory file with this content.
fn memory_file(content: &str) -> io::Result<OwnedFd> {
    let file = memfd(c"nvme-mpt-options", content.len() as u64)?;
    let file = fs::File::from(file);
    file.write_all_at(content.as_bytes(), 0)?;
    Ok(file.into())
}

impl FunctionDeclaration {
    /// Returns the options of the function, with the id and range of the lease that the server chose, if it chose one.
    pub(super) fn options_with_lease(&self) -> FunctionOptions {
        let mut options = self.options.function.clone();
        if let Some(AssignedLease { id, range }) = &self.declared.lease {
            options.range = Some(*range);
            options.id = Some(id.clone());
        }
        options
    }

    /// Returns the declaration to store. Its text has the socket path and the drive path of the parsed options, which
    /// [`resolve_function`] has resolved.
    pub(super) fn to_resolved(&self) -> DeclarationRecord {
        let ServerFunctionOptions {
            socket, function, ..
        } = &self.options;
        let mut declared = self.declared.clone();
        declared.text = declared
            .text
            .with_value("socket", socket.to_str())
            .with_value("path", Some(&function.path.to_string()));
        declared
    }

    /// Returns whether a reload can leave a served function as it is. Limits and lease size are not compared, as they can
    /// change while the function is served.
    pub(super) fn is_same_as(&self, running: &ServerFunctionOptions) -> bool {
        let rates = running.function.backend.rates;
        self.with_rates(rates).with_size_of(running).options == *running
    }

    /// Returns a copy of the declaration with the given rate limits.
    pub(super) fn with_rates(&self, rates: RateLimits) -> Self {
        let mut other = self.clone();
        other.options.function.backend.rates = rates;
        other
    }

    /// Returns the declaration with the lease size of the function `other`.
    pub(super) fn with_size_of(mut self, other: &ServerFunctionOptions) -> Self {
        if let (Some(size), Some(other)) = (&mut self.options.function.size, other.function.size) {
            *size = other;
        }
        self
    }

    /// Sets the lease size, also in the option text.
    pub(super) fn set_size(&mut self, size: ByteSize) {
        if let Some(requested_size) = &mut self.options.function.size {
            *requested_size = size;
        }
        let text = self.declared.text.clone();
        self.declared.text = text.with_value("size", Some(&size.to_string()));
    }

    /// Sets the policy for data that another lease id left in the range, if the function's options have no `data=`.
    pub(super) fn with_data(mut self, data: PreviousDataPolicy) -> Self {
        if self.options.function.data == PreviousDataPolicy::Refused {
            self.options.function.data = data;
        }
        self
    }
}

/// Error of a configuration file.
#[derive(Debug, Error)]
pub enum ConfigFileError {
    /// The file cannot be read, or another user could write it.
    #[error("Cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: PathError,
    },
    /// The file cannot be written, or another user could replace the file.
    #[error("Cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: PathError,
    },
    /// The file is not TOML.
    #[error("{} is not written in TOML", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Cause, with its line in the file.
        source: Box<toml::de::Error>,
    },
    /// The file has an unknown table.
    #[error(
        "{} has \"{key}\"; only [[drive]], [[function]] and [[landlock-rule]] are allowed",
        path.display()
    )]
    Unknown {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
    },
    /// A value of a table is neither a string nor a number.
    #[error("{}, {kind} {number}: the value of \"{key}\" is a string or a number, as in {key} = \"…\"", path.display())]
    Kind {
        /// The file.
        path: PathBuf,
        /// `function` or `drive`.
        kind: &'static str,
        /// Number of the table among the file's tables of this kind, from 1.
        number: usize,
        /// The key.
        key: String,
    },
    /// A function or drive has invalid options.
    #[error("{}, {kind} {number} is invalid", path.display())]
    Option {
        /// The file.
        path: PathBuf,
        /// `function` or `drive`.
        kind: &'static str,
        /// Number of the table among the file's tables of this kind, from 1.
        number: usize,
        /// Cause.
        source: OptionError,
    },
}

/// Contents of a configuration file.
#[derive(Debug, Default)]
pub(super) struct ConfigFileContents {
    pub(super) functions: Vec<FunctionDeclaration>,
    pub(super) drives: Vec<DriveDeclaration>,
    /// Files named by `profile=` and `faults=`.
    pub(super) option_files: Vec<PathBuf>,
    /// Landlock rules.
    pub(super) rules: Vec<FileRule>,
}

impl ConfigFileContents {
    /// Reads the file at an absolute path, following links. Relative paths in the file start at the directory of the file
    /// itself, not of a link to it.
    pub(super) fn read(path: &Path) -> Result<Self, ConfigFileError> {
        let unreadable = |source| ConfigFileError::Read {
            path: path.to_owned(),
            source,
        };
        let (file, text) = read_trusted_file(path, FILE_BYTES_MAX).map_err(unreadable)?;
        Self::parse(&file, &text)
    }

    fn parse(path: &Path, text: &str) -> Result<Self, ConfigFileError> {
        let file = ConfigFileTables { path };
        let [functions, drives, rules] = file.read(text)?;
        let described = functions.iter().chain(&drives).flat_map(option_files);
        let described = described.collect();
        let functions = (1..).zip(functions).map(|(number, text)| {
            FunctionDeclaration::parse(DeclarationSource::File, text)
                .map_err(|source| file.option_error("function", number, source))
        });
        let drives = (1..).zip(drives).map(|(number, text)| {
            let drive = DriveDeclaration::parse(DeclarationSource::File, text);
            drive.map_err(|source| file.option_error("drive", number, source))
        });
        let rules = (1..).zip(rules).map(|(number, text)| {
            FileRule::from_options(&text)
                .map_err(|source| file.option_error("landlock-rule", number, source))
        });
        Ok(Self {
            functions: functions.collect::<Result<_, _>>()?,
            drives: drives.collect::<Result<_, _>>()?,
            option_files: described,
            rules: rules.collect::<Result<_, _>>()?,
        })
    }
}

/// Returns the files that options name.
pub fn option_files(text: &OptionText) -> Vec<PathBuf> {
    let named = text.named_files().into_iter();
    named.map(|(_, path)| path).collect()
}

/// Parser of the tables of a configuration file: `[[drive]]`, `[[function]]` and `[[landlock-rule]]`.
struct ConfigFileTables<'a> {
    path: &'a Path,
}

impl ConfigFileTables<'_> {
    /// Returns the option texts of the functions, the drives and the Landlock rules.
    fn read(&self, text: &str) -> Result<[Vec<OptionText>; 3], ConfigFileError> {
        let mut table: Table = toml::from_str(text).map_err(|source| ConfigFileError::Syntax {
            path: self.path.to_owned(),
            source: Box::new(source),
        })?;
        let functions = self.take_tables(&mut table, "function")?;
        let drives = self.take_tables(&mut table, "drive")?;
        let rules = self.take_tables(&mut table, "landlock-rule")?;
        match table.keys().next() {
            None => Ok([functions, drives, rules]),
            Some(key) => Err(self.unknown_key_error(key)),
        }
    }

    /// Removes all `[[kind]]` tables from the TOML document and returns each table as an option text.
    fn take_tables(
        &self,
        table: &mut Table,
        kind: &'static str,
    ) -> Result<Vec<OptionText>, ConfigFileError> {
        let entries = match table.remove(kind) {
            None => return Ok(Vec::new()),
            Some(Value::Array(entries)) => entries,
            Some(_) => return Err(self.unknown_key_error(kind)),
        };
        let texts = (1..).zip(entries).map(|(number, entry)| match entry {
            Value::Table(entry) => self.to_option_text(kind, number, entry),
            _ => Err(self.unknown_key_error(kind)),
        });
        texts.collect()
    }

    fn to_option_text(
        &self,
        kind: &'static str,
        number: usize,
        entry: Table,
    ) -> Result<OptionText, ConfigFileError> {
        let dir = self.path.parent().unwrap_or(Path::new("/"));
        let mut pairs = Vec::with_capacity(entry.len());
        for (key, value) in entry {
            let value = match value {
                Value::String(text) => text,
                // TOML reads `mode = 0o660` as a number, whereas options have the octal digits.
                Value::Integer(value) if key == "mode" => format!("{value:o}"),
                Value::Integer(value) => value.to_string(),
                _ => {
                    return Err(ConfigFileError::Kind {
                        path: self.path.to_owned(),
                        kind,
                        number,
                        key,
                    });
                }
            };
            pairs.push((key, value));
        }
        let text = OptionText::from_pairs(pairs)
            .map_err(|source| self.option_error(kind, number, source))?;
        Ok(text.with_absolute_paths(dir))
    }

    fn unknown_key_error(&self, key: &str) -> ConfigFileError {
        ConfigFileError::Unknown {
            path: self.path.to_owned(),
            key: key.to_owned(),
        }
    }

    fn option_error(
        &self,
        kind: &'static str,
        number: usize,
        source: OptionError,
    ) -> ConfigFileError {
        ConfigFileError::Option {
            path: self.path.to_owned(),
            kind,
            number,
            source,
        }
    }
}

/// A function declaration that this release cannot parse.
#[derive(Debug)]
pub(super) struct UnreadableDeclaration {
    pub(super) declared: DeclarationRecord,
    pub(super) error: OptionError,
}

/// Initial configuration of a server.
#[derive(Debug, Default)]
pub(super) struct StartConfiguration {
    /// Functions in the order in which they are served.
    pub(super) functions: Vec<FunctionDeclaration>,
    pub(super) drives: Vec<DriveDeclaration>,
    /// Option texts of functions that `nvme-mpt add` added in an earlier run, not parsed yet.
    pub(super) added_texts: Vec<OptionText>,
    /// Functions of the predecessor that this release cannot parse.
    pub(super) unreadable: Vec<UnreadableDeclaration>,
    /// Landlock rules.
    pub(super) rules: Vec<FileRule>,
    /// True if this is the configuration that the predecessor stored. Command line and file are then ignored.
    pub(super) is_restored: bool,
}

impl StartConfiguration {
    /// Reads the configuration: from the command line, from the configuration file at an absolute path, and from the file
    /// of functions that were added in earlier runs.
    pub(super) fn read(
        functions: Vec<FunctionDeclaration>,
        drives: Vec<DriveDeclaration>,
        file: Option<&Path>,
        added: &AddedFunctionsFile,
    ) -> Result<Self, ConfigFileError> {
        let file = file.map(ConfigFileContents::read).transpose()?;
        let file = file.unwrap_or_default();
        Ok(Self {
            functions: functions.into_iter().chain(file.functions).collect(),
            drives: drives.into_iter().chain(file.drives).collect(),
            added_texts: added.read()?,
            rules: file.rules,
            ..Self::default()
        })
    }
}

/// File with the functions that were added at run time, which the next start reads.
///
/// The file is next to the control socket. Only one server can hold this socket, and only this server writes the file.
#[derive(Debug)]
pub(super) struct AddedFunctionsFile {
    path: PathBuf,
}

impl AddedFunctionsFile {
    /// Returns the file of the server with this control socket.
    pub(super) fn for_control_socket(control: &Path) -> Self {
        let mut path = control.as_os_str().to_owned();
        path.push(".functions.toml");
        Self { path: path.into() }
    }

    /// Returns the unparsed option texts of added functions; none if the file is missing.
    pub(super) fn read(&self) -> Result<Vec<OptionText>, ConfigFileError> {
        let (_, text) = match read_trusted_file(&self.path, FILE_BYTES_MAX) {
            Ok(read) => read,
            Err(error) if error.is_not_found() => return Ok(Vec::new()),
            Err(source) => {
                return Err(ConfigFileError::Read {
                    path: self.path.clone(),
                    source,
                });
            }
        };
        let [functions, ..] = ConfigFileTables { path: &self.path }.read(&text)?;
        Ok(functions)
    }

    /// Replaces the file atomically and durably.
    pub(super) fn write<'a>(
        &self,
        functions: impl Iterator<Item = &'a OptionText>,
    ) -> Result<(), ConfigFileError> {
        let mut text =
            String::from("# Functions of `nvme-mpt add`. The server writes this file.\n");
        for function in functions {
            text.push_str("\n[[function]]\n");
            for (key, value) in function.pairs() {
                let value = Value::String(value.to_owned());
                text.push_str(&format!("{key} = {value}\n"));
            }
        }
        self.replace(text.as_bytes())
            .map_err(|source| ConfigFileError::Write {
                path: self.path.clone(),
                source,
            })
    }

    fn replace(&self, bytes: &[u8]) -> Result<(), PathError> {
        let (directory, name) = OpenDirectory::open_parent(&self.path)?;
        // Refuses a directory in which other users can replace files: the next server would refuse to read the file.
        directory.check_not_exposed(name)?;
        // Mode 0600: users who may access sockets in this directory must not read the file.
        directory.replace(name, 0o600, |file| {
            file.write_all(bytes)?;
            file.sync_all()
        })?;
        directory.sync()
    }
}

/// Returns the function with an absolute socket path and a resolved drive path. Without `data=`, it gets the server's policy
/// `data`.
pub(super) fn resolve_function(
    declaration: FunctionDeclaration,
    data: PreviousDataPolicy,
) -> FunctionDeclaration {
    let mut declaration = declaration.with_data(data);
    let ServerFunctionOptions {
        socket, function, ..
    } = &mut declaration.options;
    // `absolute` fails only for an empty path, which options cannot have.
    if let Ok(absolute) = std::path::absolute(&*socket) {
        *socket = absolute;
    }
    function.path = resolve_path(&function.path);
    declaration
}

/// Resolves links in a path, so that equal files have equal paths. A path to a missing file stays unchanged, and the error is
/// reported when the file is opened.
pub(super) fn resolve_path(path: &DrivePath) -> DrivePath {
    match path {
        DrivePath::File(file) => {
            DrivePath::File(std::fs::canonicalize(file).unwrap_or_else(|_| file.clone()))
        }
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use nvme_mpt_vmm::report;

    use super::*;
    use crate::confinement::FileAccess;

    fn parse(text: &str) -> Result<ConfigFileContents, ConfigFileError> {
        ConfigFileContents::parse(Path::new("/etc/serve.toml"), text)
    }

    #[test]
    fn a_file_has_the_same_keys_as_the_command_line() {
        let text = "[[drive]]\npath = \"memory:1G\"\nlba = 4096\n\n\
            [[function]]\nsocket = \"a.sock\"\npath = \"memory:1G\"\nrange = \"0+64M\"\nqueues = 4\nmode = 0o660\n";
        let ConfigFileContents {
            functions,
            drives,
            option_files: described,
            rules,
        } = parse(text).unwrap();
        assert!(described.is_empty() && rules.is_empty());
        let argument: ServerFunctionOptions =
            "socket=/etc/a.sock,path=memory:1G,range=0+64M,queues=4,mode=0660"
                .parse()
                .unwrap();
        assert_eq!(functions[0].options, argument);
        let drives: Vec<_> = drives.into_iter().map(|drive| drive.options).collect();
        assert_eq!(drives, ["path=memory:1G,lba=4096".parse().unwrap()]);
    }

    #[test]
    fn a_mistake_is_named_with_its_place() {
        let good = "[[function]]\nsocket = \"/a\"\npath = \"null:1G\"\n";
        for (bad, error_message) in [
            (
                "[[function]]\npath = \"null:1G\"\n",
                "function 2 is invalid\n  Option \"socket\" is missing",
            ),
            (
                "[[function]]\nsocket = \"/b\"\npath = \"null:1G\"\nlength = 3\n",
                "There is no option \"length\"",
            ),
            (
                "[[function]]\nsocket = true\n",
                "function 2: the value of \"socket\" is a string",
            ),
            (
                "[[drive]]\npath = \"null:1G\"\nrange = \"0+1M\"\n",
                "drive 1 is invalid",
            ),
            ("[server]\nsocket = 1\n", "has \"server\""),
            ("[[function]\n", "serve.toml is not written in TOML"),
        ] {
            let error = parse(&format!("{good}{bad}")).unwrap_err();
            let message = report::chain(&error);
            assert!(message.contains(error_message), "{message}");
        }
        let error = parse("function = 3\n").unwrap_err();
        assert!(
            error.to_string().contains("[[landlock-rule]] are allowed"),
            "{error}"
        );
    }

    #[test]
    fn a_file_has_rules_and_names_further_files() {
        let text = "[[landlock-rule]]\npath = \"images\"\naccess = \"rw\"\n\n\
            [[function]]\nsocket = \"a.sock\"\npath = \"memory:1G\"\nprofile = \"ssd\"\nfaults = \"none\"\n";
        let declaration = parse(text).unwrap();
        let rule = FileRule::new("/etc/images", FileAccess::WRITE);
        assert_eq!(declaration.rules, [rule]);
        assert!(declaration.option_files.is_empty());
        let text: OptionText = "path=a,profile=./slow.toml,faults=some.toml"
            .parse()
            .unwrap();
        let described = option_files(&text.with_absolute_paths(Path::new("/etc")));
        assert_eq!(
            described,
            ["/etc/./slow.toml", "/etc/some.toml"].map(PathBuf::from)
        );
        let error = parse("[[landlock-rule]]\npath = \"/srv\"\naccess = \"ro\"\n").unwrap_err();
        let message = report::chain(&error);
        assert!(message.contains("landlock-rule 1 is invalid"), "{message}");
        assert!(message.contains("letters of rwx"), "{message}");
    }

    #[test]
    fn added_functions_of_another_user_are_refused_and_no_link_is_written_through() {
        let dir = tempfile::tempdir().unwrap();
        let file = AddedFunctionsFile::for_control_socket(&dir.path().join("control.sock"));
        let precious = dir.path().join("precious");
        fs::write(&precious, "precious").unwrap();
        for name in [
            "control.sock.functions.toml",
            "control.sock.functions.toml.new",
        ] {
            symlink(&precious, dir.path().join(name)).unwrap();
        }
        file.write([].iter()).unwrap();
        assert_eq!(fs::read(&precious).unwrap(), b"precious");
        assert_eq!(file.read().unwrap(), []);

        if nix::unistd::geteuid().is_root() {
            std::os::unix::fs::chown(&file.path, Some(65533), None).unwrap();
        } else {
            fs::set_permissions(&file.path, std::fs::Permissions::from_mode(0o602)).unwrap();
        }
        let message = report::chain(&file.read().unwrap_err());
        assert!(message.contains("other users may write it"), "{message}");
        fs::remove_file(&file.path).unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let message = report::chain(&file.write([].iter()).unwrap_err());
        assert!(message.contains("other users may write in"), "{message}");
        assert!(!file.path.exists());
    }

    #[test]
    fn added_functions_are_restored_from_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = AddedFunctionsFile::for_control_socket(&dir.path().join("control.sock"));
        assert_eq!(file.read().unwrap(), []);
        for texts in [
            &[
                "socket=/a,path=null:1G",
                "socket=/b,path=\"/x,\"\"y\n\",queues=3",
            ][..],
            &["socket=/b,path=memory:1G"],
            &[],
        ] {
            let texts: Vec<OptionText> = texts.iter().map(|text| text.parse().unwrap()).collect();
            file.write(texts.iter()).unwrap();
            assert_eq!(fs::metadata(&file.path).unwrap().mode() & 0o777, 0o600);
            let again = file.read().unwrap();
            let sorted = |text: &OptionText| {
                let mut pairs: Vec<_> = text
                    .pairs()
                    .map(|(key, value)| (key.to_owned(), value.to_owned()))
                    .collect();
                pairs.sort();
                pairs
            };
            assert_eq!(
                again.iter().map(sorted).collect::<Vec<_>>(),
                texts.iter().map(sorted).collect::<Vec<_>>()
            );
        }
    }
}

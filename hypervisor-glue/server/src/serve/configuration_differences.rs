//! Differences between the configuration file and the served functions, which `nvme-mpt reload` would remove.
//!
//! A separate thread reads the file, because reading from a network file system can block for any time.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nvme_guest::threads::start_thread;
use nvme_lease::PreviousDataPolicy;
use nvme_mpt_vmm::options::{OptionText, ServerDriveOptions, ServerFunctionOptions};
use nvme_mpt_vmm::report;

use super::declarations::{ConfigFileContents, FunctionDeclaration};
use super::declarations::{resolve_function, resolve_path};
use crate::change::{DeclarationSource, FunctionEntry};

/// Timeout for reading the configuration file.
const READ_TIMEOUT: Duration = Duration::from_millis(500);

/// Configuration that this server has from its configuration file, for comparison with the present file: the functions, also
/// those that failed, and the drives to keep open, also those that could not be opened.
#[derive(Clone, Debug, Default)]
pub(super) struct RunningConfiguration {
    /// Absolute path of the file, if there is one.
    pub(super) file: Option<PathBuf>,
    /// Server's default for `data=`: the policy for data that another lease id left in a function's range.
    pub(super) data: PreviousDataPolicy,
    pub(super) functions: Vec<FunctionDeclaration>,
    pub(super) drives: Vec<ServerDriveOptions>,
}

/// A difference between the file and the served configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ConfigurationDifference {
    /// The file has other options for the function.
    Changed { socket: PathBuf, keys: String },
    /// The file omits the function.
    Removed { socket: PathBuf },
    /// The file has a function that is not served.
    Added { id: String },
    /// The file has other `[[drive]]` tables, for drives to keep open.
    Drives,
}

/// All differences between the file and the served configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ConfigurationDifferences {
    /// Reason why the file cannot be read; `None` if it was read.
    unreadable: Option<String>,
    differences: Vec<ConfigurationDifference>,
    /// Ids of the served functions, by socket.
    ids: Vec<(PathBuf, String)>,
}

impl ConfigurationDifferences {
    /// Returns the differences as text, one sentence each.
    pub(super) fn to_sentences(&self) -> Vec<String> {
        let reason = self.unreadable.iter();
        let reason = reason.map(|reason| format!("The file is not applied: {reason}"));
        let all = self.differences.iter().map(|difference| match difference {
            ConfigurationDifference::Changed { socket, keys } => {
                let id = self.function_id(socket);
                format!("Function {id} is served as before, but the file has another {keys}")
            }
            ConfigurationDifference::Removed { socket } => {
                let id = self.function_id(socket);
                format!("Function {id} is served, but not in the file")
            }
            ConfigurationDifference::Added { id } => {
                format!("Function {id} is in the file, but not served")
            }
            ConfigurationDifference::Drives => {
                "The drives that are kept open differ from those of the file".into()
            }
        });
        reason.chain(all).collect()
    }

    fn function_id(&self, socket: &PathBuf) -> String {
        let mut ids = self.ids.iter();
        let id = ids.find(|(known, _)| known == socket);
        id.map_or_else(|| socket.display().to_string(), |(_, id)| id.clone())
    }

    /// Sets `pending`, the text for `nvme-mpt list`, on the functions that differ from the file.
    pub(super) fn mark_entries(&self, entries: &mut [FunctionEntry]) {
        for entry in entries.iter_mut() {
            if self.unreadable.is_some() && entry.origin == DeclarationSource::File {
                entry.pending = Some("the file cannot be applied".to_owned());
            }
            for difference in &self.differences {
                match difference {
                    ConfigurationDifference::Changed { socket, keys }
                        if *socket == entry.socket =>
                    {
                        entry.pending = Some(format!("the file has another {keys}"));
                    }
                    ConfigurationDifference::Removed { socket } if *socket == entry.socket => {
                        entry.pending = Some("not in the file".to_owned());
                    }
                    _ => {}
                }
            }
        }
    }
}

impl RunningConfiguration {
    /// Reads the configuration file and compares it with the served configuration.
    pub(super) fn compare(&self) -> ConfigurationDifferences {
        let ids = self.functions.iter();
        let ids = ids.map(|running| {
            (
                running.options.socket.clone(),
                id_or_socket(&running.options),
            )
        });
        let mut differences = ConfigurationDifferences {
            ids: ids.collect(),
            ..ConfigurationDifferences::default()
        };
        let Some(file) = &self.file else {
            return differences;
        };
        match ConfigFileContents::read(file) {
            Ok(file) => differences.differences = self.differences(file),
            Err(error) => differences.unreadable = Some(report::chain(&error)),
        }
        differences
    }

    /// Returns the changes that a reload of these declarations would make.
    fn differences(&self, file: ConfigFileContents) -> Vec<ConfigurationDifference> {
        let functions = file.functions.into_iter();
        let mut wanted: Vec<FunctionDeclaration> = functions
            .map(|declaration| resolve_function(declaration, self.data))
            .collect();
        let mut all = Vec::new();
        for running in &self.functions {
            let function = &running.options;
            let socket = function.socket.clone();
            let same = wanted.iter().position(|other| other.is_same_as(function));
            let known = same.map(|place| wanted.remove(place));
            let Some(other) = known else {
                let again = wanted.iter().position(|other| {
                    other.options.socket == socket
                        || id_or_socket(&other.options) == id_or_socket(function)
                });
                all.push(match again {
                    Some(place) => {
                        let other = wanted.remove(place);
                        let keys = different_keys(&running.declared.text, &other.declared.text);
                        ConfigurationDifference::Changed { socket, keys }
                    }
                    None => ConfigurationDifference::Removed { socket },
                });
                continue;
            };
            let options = &other.options.function;
            let is_larger = options.size > function.function.size;
            if options.backend.rates != function.function.backend.rates {
                let keys = "limit".to_owned();
                all.push(ConfigurationDifference::Changed { socket, keys });
            } else if is_larger {
                let keys = "size".to_owned();
                all.push(ConfigurationDifference::Changed { socket, keys });
            }
        }
        all.extend(
            wanted
                .into_iter()
                .map(|other| ConfigurationDifference::Added {
                    id: id_or_socket(&other.options),
                }),
        );
        let drives = file.drives.into_iter().map(|given| {
            let mut drive = given.options;
            drive.drive.path = resolve_path(&drive.drive.path);
            drive
        });
        if !drives.eq(self.drives.iter().cloned()) {
            all.push(ConfigurationDifference::Drives);
        }
        all
    }
}

/// Returns the option keys with different values, for display.
fn different_keys(running: &OptionText, other: &OptionText) -> String {
    let keys = running.pairs().chain(other.pairs()).map(|(key, _)| key);
    let keys: BTreeSet<&str> = keys
        .filter(|key| running.get(key) != other.get(key))
        .collect();
    match keys.is_empty() {
        // The options are equal, so the content of a file that `profile=` or `faults=` names differs.
        true => "content of a file that it names".to_owned(),
        false => keys.into_iter().collect::<Vec<_>>().join(", "),
    }
}

fn id_or_socket(function: &ServerFunctionOptions) -> String {
    let id = function.function.id.clone();
    id.unwrap_or_else(|| function.socket.display().to_string())
}

/// Handle of the thread that compares the file with the served configuration on request.
#[derive(Clone, Debug)]
pub(super) struct ConfigurationComparer {
    requests: Sender<SyncSender<ConfigurationDifferences>>,
    last: Arc<Mutex<ConfigurationDifferences>>,
}

impl ConfigurationComparer {
    /// Starts the thread, which first logs the present differences.
    pub(super) fn start(
        present: impl Fn() -> ConfigurationDifferences + Send + 'static,
    ) -> io::Result<Self> {
        let (orders, receiver): (_, Receiver<SyncSender<ConfigurationDifferences>>) =
            mpsc::channel();
        let last = Arc::new(Mutex::new(ConfigurationDifferences::default()));
        let known = last.clone();
        let compare = move || {
            let compare = || {
                let differences = present();
                known
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .clone_from(&differences);
                differences
            };
            for sentence in compare().to_sentences() {
                log::warn!("{sentence}: `nvme-mpt reload` applies the file");
            }
            for order in receiver {
                // The send fails if the requester has timed out.
                let _ = order.send(compare());
            }
        };
        start_thread("compare", compare)?;
        Ok(Self {
            requests: orders,
            last,
        })
    }

    /// Returns the current differences. If the file cannot be read in time, returns the differences that the previous
    /// comparison found.
    pub(super) fn differences(&self) -> ConfigurationDifferences {
        let (order, answer) = mpsc::sync_channel(1);
        let sent = self.requests.send(order).ok();
        let now = sent.and_then(|()| answer.recv_timeout(READ_TIMEOUT).ok());
        now.unwrap_or_else(|| {
            let last = self.last.lock();
            last.unwrap_or_else(PoisonError::into_inner).clone()
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn pending_differences_match_the_changes_of_a_reload() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("serve.toml");
        let function = |id: &str, more: &str| {
            format!(
                "[[function]]\nid = \"{id}\"\nsocket = \"/run/{id}.sock\"\npath = \"memory:1G\"\n{more}\n"
            )
        };
        let running = [
            function("a", "range = \"0+1M\""),
            function("b", "range = \"1M+1M\"\niops = 100"),
            function("c", "size = \"1M\"\nunit = \"1M\""),
            "[[drive]]\npath = \"memory:1G\"\n".to_owned(),
        ];
        fs::write(&file, running.concat()).unwrap();
        let contents = ConfigFileContents::read(&file).unwrap();
        let comparable = RunningConfiguration {
            file: Some(file.clone()),
            functions: contents.functions,
            drives: contents
                .drives
                .into_iter()
                .map(|given| given.options)
                .collect(),
            ..RunningConfiguration::default()
        };
        let compare = |text: &str| {
            fs::write(&file, text).unwrap();
            comparable.compare().to_sentences()
        };
        assert_eq!(compare(&running.concat()), Vec::<String>::new());
        let edited = [
            &function("a", "range = \"0+2M\"")[..],
            &function("b", "range = \"1M+1M\"\niops = 200"),
            &function("d", ""),
        ];
        let differences = [
            "Function a is served as before, but the file has another range",
            "Function b is served as before, but the file has another limit",
            "Function c is served, but not in the file",
            "Function d is in the file, but not served",
            "The drives that are kept open differ from those of the file",
        ];
        assert_eq!(compare(&edited.concat()), differences);
        let renamed = running.concat().replace("id = \"a\"", "id = \"z\"");
        assert_eq!(
            compare(&renamed),
            ["Function a is served as before, but the file has another id"]
        );
        let smaller = running.concat().replace("size = \"1M\"", "size = \"512K\"");
        assert_eq!(
            compare(&smaller),
            Vec::<String>::new(),
            "a reload leaves it"
        );
        let larger = running.concat().replace("size = \"1M\"", "size = \"2M\"");
        assert_eq!(
            compare(&larger),
            ["Function c is served as before, but the file has another size"]
        );
        let [broken] = &compare("[[function")[..] else {
            panic!("one sentence");
        };
        assert!(broken.contains("is not written in TOML"), "{broken}");
        fs::remove_file(&file).unwrap();
        assert!(comparable.compare().to_sentences()[0].contains("Cannot read"));
    }
}

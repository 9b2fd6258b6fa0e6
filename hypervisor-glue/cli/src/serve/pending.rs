//! Differences of the server's file to what is served, which wait for `nvme-mpt reload`.
//!
//! A separate thread reads the file, because a read of a network file system has no bounded time.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nvme_mpt::lease::FormerData;
use nvme_mpt::poller::start_thread;
use nvme_mpt_vmm::options::{OptionText, ServedDrive, ServedFunction};
use nvme_mpt_vmm::report;

use super::declared::{Declarations, DeclaredFunction};
use super::declared::{resolved, resolved_function};
use crate::change::{FunctionEntry, Origin};

/// Longest wait for the file.
const READ_TIMEOUT: Duration = Duration::from_millis(500);

/// Functions and drives of the file, as they are served.
#[derive(Clone, Debug, Default)]
pub(super) struct Comparable {
    /// The file, by an absolute path; `None` without one.
    pub(super) file: Option<PathBuf>,
    /// The server's choice for data of a former id, for functions without `data=`.
    pub(super) data: FormerData,
    pub(super) functions: Vec<DeclaredFunction>,
    pub(super) drives: Vec<ServedDrive>,
}

/// Difference of the file to what is served.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Difference {
    /// The file has the function with other options.
    Changed { socket: PathBuf, keys: String },
    /// The file does not have the function.
    Removed { socket: PathBuf },
    /// The function is not served.
    Added { id: String },
    /// The file lists other drives to keep open.
    Drives,
}

/// All differences of the file to what is served.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Differences {
    /// The file cannot be read, for this reason.
    unreadable: Option<String>,
    all: Vec<Difference>,
    /// Ids of functions that are served, by their sockets.
    ids: Vec<(PathBuf, String)>,
}

impl Differences {
    /// Returns the differences in sentences.
    pub(super) fn sentences(&self) -> Vec<String> {
        let reason = self.unreadable.iter();
        let reason = reason.map(|reason| format!("The file is not applied: {reason}"));
        let all = self.all.iter().map(|difference| match difference {
            Difference::Changed { socket, keys } => {
                let id = self.id(socket);
                format!(
                    "Function {id} is served as before, and the file has it with another {keys}"
                )
            }
            Difference::Removed { socket } => {
                let id = self.id(socket);
                format!("Function {id} is served, and the file does not have it")
            }
            Difference::Added { id } => {
                format!("Function {id} is in the file, and is not served")
            }
            Difference::Drives => "The drives that are kept open are not those of the file".into(),
        });
        reason.chain(all).collect()
    }

    fn id(&self, socket: &PathBuf) -> String {
        let mut ids = self.ids.iter();
        let id = ids.find(|(known, _)| known == socket);
        id.map_or_else(|| socket.display().to_string(), |(_, id)| id.clone())
    }

    /// Marks the functions that differ.
    pub(super) fn note_in(&self, entries: &mut [FunctionEntry]) {
        for entry in entries.iter_mut() {
            if self.unreadable.is_some() && entry.origin == Origin::File {
                entry.pending = Some("the file cannot be applied".to_owned());
            }
            for difference in &self.all {
                match difference {
                    Difference::Changed { socket, keys } if *socket == entry.socket => {
                        entry.pending = Some(format!("the file has another {keys}"));
                    }
                    Difference::Removed { socket } if *socket == entry.socket => {
                        entry.pending = Some("not in the file".to_owned());
                    }
                    _ => {}
                }
            }
        }
    }
}

impl Comparable {
    /// Reads the file, and compares.
    pub(super) fn compare(&self) -> Differences {
        let ids = self.functions.iter();
        let ids = ids.map(|served| (served.function.socket.clone(), id_of(&served.function)));
        let mut differences = Differences {
            ids: ids.collect(),
            ..Differences::default()
        };
        let Some(file) = &self.file else {
            return differences;
        };
        match Declarations::read(file) {
            Ok(file) => differences.all = self.differences(file),
            Err(error) => differences.unreadable = Some(report::chain(&error)),
        }
        differences
    }

    /// Returns what a reload of these declarations would change.
    fn differences(&self, file: Declarations) -> Vec<Difference> {
        let functions = file.functions.into_iter();
        let mut wanted: Vec<DeclaredFunction> = functions
            .map(|declared| resolved_function(declared, self.data))
            .collect();
        let mut all = Vec::new();
        for served in &self.functions {
            let function = &served.function;
            let socket = function.socket.clone();
            let same = wanted.iter().position(|other| other.is_same_as(function));
            let known = same.map(|place| wanted.remove(place));
            let Some(other) = known else {
                let again = wanted.iter().position(|other| {
                    other.function.socket == socket || id_of(&other.function) == id_of(function)
                });
                all.push(match again {
                    Some(place) => {
                        let other = wanted.remove(place);
                        let keys = different_keys(&served.text, &other.text);
                        Difference::Changed { socket, keys }
                    }
                    None => Difference::Removed { socket },
                });
                continue;
            };
            let options = &other.function.function;
            let is_larger = options.size.map(|asked| asked.size.0)
                > function.function.size.map(|asked| asked.size.0);
            if options.rates != function.function.rates {
                let keys = "limit".to_owned();
                all.push(Difference::Changed { socket, keys });
            } else if is_larger {
                let keys = "size".to_owned();
                all.push(Difference::Changed { socket, keys });
            }
        }
        all.extend(wanted.into_iter().map(|other| Difference::Added {
            id: id_of(&other.function),
        }));
        let drives = file.drives.into_iter().map(|given| {
            let mut drive = given.value;
            drive.drive.path = resolved(&drive.drive.path);
            drive
        });
        if !drives.eq(self.drives.iter().cloned()) {
            all.push(Difference::Drives);
        }
        all
    }
}

/// Returns the keys with different values, for a person.
fn different_keys(served: &OptionText, other: &OptionText) -> String {
    let keys = served.pairs().chain(other.pairs()).map(|(key, _)| key);
    let keys: BTreeSet<&str> = keys
        .filter(|key| served.get(key) != other.get(key))
        .collect();
    match keys.is_empty() {
        // Of `profile=` or `faults=`.
        true => "content of a file that it names".to_owned(),
        false => keys.into_iter().collect::<Vec<_>>().join(", "),
    }
}

fn id_of(function: &ServedFunction) -> String {
    let id = function.function.id.clone();
    id.unwrap_or_else(|| function.socket.display().to_string())
}

/// Compares the file with what is served, whenever it is asked.
#[derive(Clone, Debug)]
pub(super) struct Comparer {
    orders: Sender<SyncSender<Differences>>,
    last: Arc<Mutex<Differences>>,
}

impl Comparer {
    /// Starts the thread, which logs the differences that there are.
    pub(super) fn start(present: impl Fn() -> Differences + Send + 'static) -> io::Result<Self> {
        let (orders, inbox): (_, Receiver<SyncSender<Differences>>) = mpsc::channel();
        let last = Arc::new(Mutex::new(Differences::default()));
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
            for sentence in compare().sentences() {
                log::warn!("{sentence}: `nvme-mpt reload` applies the file");
            }
            for order in inbox {
                // Who asked may have gone.
                let _ = order.send(compare());
            }
        };
        start_thread("compare", compare)?;
        Ok(Self { orders, last })
    }

    /// Returns the present differences, or the last known ones if the file cannot be read soon.
    pub(super) fn differences(&self) -> Differences {
        let (order, answer) = mpsc::sync_channel(1);
        let sent = self.orders.send(order).ok();
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
    fn differences_to_the_file_are_what_a_reload_would_change() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("serve.toml");
        let function = |id: &str, more: &str| {
            format!(
                "[[function]]\nid = \"{id}\"\nsocket = \"/run/{id}.sock\"\npath = \"memory:1G\"\n{more}\n"
            )
        };
        let served = [
            function("a", "range = \"0+1M\""),
            function("b", "range = \"1M+1M\"\niops = 100"),
            function("c", "size = \"1M\"\nunit = \"1M\""),
            "[[drive]]\npath = \"memory:1G\"\n".to_owned(),
        ];
        fs::write(&file, served.concat()).unwrap();
        let declared = Declarations::read(&file).unwrap();
        let comparable = Comparable {
            file: Some(file.clone()),
            functions: declared.functions,
            drives: declared
                .drives
                .into_iter()
                .map(|given| given.value)
                .collect(),
            ..Comparable::default()
        };
        let compare = |text: &str| {
            fs::write(&file, text).unwrap();
            comparable.compare().sentences()
        };
        assert_eq!(compare(&served.concat()), Vec::<String>::new());
        let edited = [
            &function("a", "range = \"0+2M\"")[..],
            &function("b", "range = \"1M+1M\"\niops = 200"),
            &function("d", ""),
        ];
        let told = [
            "Function a is served as before, and the file has it with another range",
            "Function b is served as before, and the file has it with another limit",
            "Function c is served, and the file does not have it",
            "Function d is in the file, and is not served",
            "The drives that are kept open are not those of the file",
        ];
        assert_eq!(compare(&edited.concat()), told);
        let renamed = served.concat().replace("id = \"a\"", "id = \"z\"");
        assert_eq!(
            compare(&renamed),
            ["Function a is served as before, and the file has it with another id"]
        );
        let smaller = served.concat().replace("size = \"1M\"", "size = \"512K\"");
        assert_eq!(
            compare(&smaller),
            Vec::<String>::new(),
            "a reload leaves it"
        );
        let larger = served.concat().replace("size = \"1M\"", "size = \"2M\"");
        assert_eq!(
            compare(&larger),
            ["Function c is served as before, and the file has it with another size"]
        );
        let [broken] = &compare("[[function")[..] else {
            panic!("one sentence");
        };
        assert!(broken.contains("is not written in TOML"), "{broken}");
        fs::remove_file(&file).unwrap();
        assert!(comparable.compare().sentences()[0].contains("Cannot read"));
    }
}

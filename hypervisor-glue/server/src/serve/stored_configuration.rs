//! Configuration of the served functions and drives, stored for the next server.
//!
//! The next server serves the stored configuration and ignores the functions of the command line and the file. So an
//! upgrade or a restart after a crash replaces only the program, and `nvme-mpt reload` applies changes of the file. The
//! supervisor holds the configuration. The server stores it after each change, and deletes it at an orderly end.

use nvme_lease::range::ByteRange;
use nvme_mpt_vmm::options::{OptionError, OptionText};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::declarations::{
    AssignedLease, DriveDeclaration, FileContents, FunctionDeclaration, ParsedDeclaration,
    StartConfiguration, UnreadableDeclaration,
};
use crate::change::DeclarationSource;
use crate::confinement::FileRule;

/// Format version of the stored configuration.
const VERSION: u32 = 1;

/// Error of reading a stored configuration.
#[derive(Debug, Error)]
pub enum StoredConfigurationError {
    /// The configuration is damaged, or another program wrote it.
    #[error("The previous server's configuration cannot be read")]
    Syntax(#[from] serde_json::Error),
    /// Another release wrote the configuration in another format version.
    #[error(
        "The previous server's configuration has version {0}, but this program reads version {VERSION}"
    )]
    Version(u32),
    /// This release cannot parse a drive or a rule.
    #[error("The previous server's configuration is not valid for this program")]
    Option(#[from] OptionError),
}

/// Configuration for the next server, as JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredConfiguration {
    #[serde(rename = "configuration")]
    version: u32,
    functions: Vec<StoredFunction>,
    drives: Vec<StoredDrive>,
    /// Landlock rules of the file.
    rules: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredFunction {
    origin: DeclarationSource,
    options: String,
    #[serde(default, skip_serializing_if = "FileContents::is_empty")]
    files: FileContents,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lease: Option<StoredLease>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredLease {
    id: String,
    range: ByteRange,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredDrive {
    origin: DeclarationSource,
    options: String,
    #[serde(default, skip_serializing_if = "FileContents::is_empty")]
    files: FileContents,
}

/// Encodes the configuration to store.
pub(super) fn encode<'a>(
    functions: impl Iterator<Item = &'a FunctionDeclaration>,
    unreadable: impl Iterator<Item = &'a UnreadableDeclaration>,
    drives: impl Iterator<Item = &'a DriveDeclaration>,
    rules: &[FileRule],
) -> Result<Vec<u8>, StoredConfigurationError> {
    let functions = functions.map(|declaration| StoredFunction {
        origin: declaration.source,
        options: declaration.to_resolved_text().to_string(),
        files: declaration.files.clone(),
        lease: declaration
            .lease
            .clone()
            .map(|AssignedLease { id, range }| StoredLease { id, range }),
    });
    let unreadable = unreadable.map(|other| StoredFunction {
        origin: other.source,
        options: other.text.to_string(),
        files: other.files.clone(),
        lease: None,
    });
    let drives = drives.map(
        |DriveDeclaration {
             source: origin,
             parsed: given,
         }| StoredDrive {
            origin: *origin,
            options: given.to_resolved_text().to_string(),
            files: given.files.clone(),
        },
    );
    let state = StoredConfiguration {
        version: VERSION,
        functions: functions.chain(unreadable).collect(),
        drives: drives.collect(),
        rules: rules.iter().filter_map(FileRule::to_options).collect(),
    };
    Ok(serde_json::to_vec(&state)?)
}

/// Decodes a stored configuration. Functions whose options this release cannot parse are put into `unreadable`.
pub(super) fn decode(bytes: &[u8]) -> Result<StartConfiguration, StoredConfigurationError> {
    #[derive(Deserialize)]
    struct OnlyVersion {
        #[serde(rename = "configuration")]
        version: u32,
    }
    let OnlyVersion { version } = serde_json::from_slice(bytes)?;
    if version != VERSION {
        return Err(StoredConfigurationError::Version(version));
    }
    let StoredConfiguration {
        version: _,
        functions,
        drives,
        rules,
    } = serde_json::from_slice(bytes)?;
    let mut configuration = StartConfiguration {
        is_restored: true,
        ..StartConfiguration::default()
    };
    for StoredFunction {
        origin,
        options,
        files,
        lease,
    } in functions
    {
        let text: OptionText = options.parse()?;
        let given = ParsedDeclaration::with_files(text.clone(), files.clone());
        match given {
            Ok(given) => configuration.functions.push(FunctionDeclaration {
                lease: lease.map(|StoredLease { id, range }| AssignedLease { id, range }),
                ..FunctionDeclaration::from_parsed(origin, given)
            }),
            Err(error) => configuration.unreadable.push(UnreadableDeclaration {
                source: origin,
                text,
                files,
                error,
            }),
        }
    }
    for StoredDrive {
        origin,
        options,
        files,
    } in drives
    {
        let given = ParsedDeclaration::with_files(options.parse()?, files)?;
        configuration.drives.push(DriveDeclaration {
            source: origin,
            parsed: given,
        });
    }
    let rules = rules.iter().map(|rule| rule.parse());
    configuration.rules = rules.collect::<Result<_, _>>()?;
    Ok(configuration)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::confinement::FileAccess;

    fn round_trip(configuration: &StartConfiguration) -> StartConfiguration {
        let StartConfiguration {
            functions,
            drives,
            unreadable,
            rules,
            ..
        } = configuration;
        let bytes = encode(functions.iter(), unreadable.iter(), drives.iter(), rules).unwrap();
        decode(&bytes).unwrap()
    }

    #[test]
    fn the_stored_configuration_overrides_changed_files() {
        let dir = tempfile::tempdir().unwrap();
        let profile = dir.path().join("slow.toml");
        let plan = dir.path().join("faults.toml");
        let resources = concat!(env!("CARGO_MANIFEST_DIR"), "/../../resources");
        fs::copy(format!("{resources}/drives/nvm.toml"), &profile).unwrap();
        let removal = "[[fault]]\nkind = \"removal\"\noperations = [\"flush\"]\nafter = 7\n";
        fs::write(&plan, removal).unwrap();
        let function = format!(
            "socket=/run/a.sock,path=memory:1G,id=a,profile={},faults={}",
            profile.display(),
            plan.display()
        );
        let read =
            |text: &str| FunctionDeclaration::parse(DeclarationSource::File, text.parse().unwrap());
        let first = read(&function).unwrap();
        let mut second = read("socket=/run/b.sock,path=/srv/b.img").unwrap();
        second.source = DeclarationSource::CommandLine;
        second.lease = Some(AssignedLease {
            id: "b".to_owned(),
            range: ByteRange::new(0, 1 << 20).unwrap(),
        });
        let drive = ParsedDeclaration::parse("path=memory:2G,lba=4096".parse().unwrap()).unwrap();
        let configuration = StartConfiguration {
            functions: vec![first, second],
            drives: vec![DriveDeclaration {
                source: DeclarationSource::File,
                parsed: drive,
            }],
            rules: vec![FileRule::new("/srv", FileAccess::WRITE)],
            ..StartConfiguration::default()
        };
        fs::write(&profile, "model = \"none").unwrap();
        fs::remove_file(&plan).unwrap();
        let read = round_trip(&configuration);
        assert!(read.is_restored);
        assert_eq!(read.functions, configuration.functions);
        assert_eq!(read.drives, configuration.drives);
        assert_eq!(read.rules, configuration.rules);
        assert_eq!(round_trip(&read).functions, configuration.functions);
        let leased = read.functions[1].options_with_lease();
        assert_eq!(
            (leased.id.as_deref(), leased.range.unwrap().length()),
            (Some("b"), 1 << 20)
        );
    }

    #[test]
    fn an_unreadable_stored_function_is_kept_and_affects_no_other() {
        let bytes = br#"{"configuration":1,"functions":[
            {"origin":"file","options":"socket=/a,path=memory:1G,none=1"},
            {"origin":"added","options":"socket=/b,path=memory:1G"}],"drives":[],"rules":[]}"#;
        let configuration = decode(bytes).unwrap();
        assert_eq!(configuration.functions.len(), 1);
        assert_eq!(configuration.unreadable[0].text.get("socket"), Some("/a"));
        let next = round_trip(&configuration);
        assert_eq!(next.unreadable[0].text, configuration.unreadable[0].text);
        let later = br#"{"configuration":2,"functions":5}"#;
        assert!(matches!(
            decode(later),
            Err(StoredConfigurationError::Version(2))
        ));
    }
}

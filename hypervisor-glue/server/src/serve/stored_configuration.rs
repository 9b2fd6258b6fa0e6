//! Configuration of the served functions and drives, stored for the next server.
//!
//! The next server serves the stored configuration and ignores the functions of the command line and the file. So an
//! upgrade or a restart after a crash replaces only the program, and `nvme-mpt reload` applies changes of the file. The
//! supervisor holds the configuration. The server stores it after each change, and deletes it at an orderly end.

use nvme_mpt_vmm::options::OptionError;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::declarations::{
    DeclarationRecord, DriveDeclaration, FunctionDeclaration, StartConfiguration,
    UnreadableDeclaration,
};
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
    functions: Vec<DeclarationRecord>,
    drives: Vec<DeclarationRecord>,
    /// Landlock rules of the file.
    rules: Vec<String>,
}

/// Encodes the configuration to store.
pub(super) fn encode(
    functions: Vec<DeclarationRecord>,
    drives: Vec<DeclarationRecord>,
    rules: &[FileRule],
) -> Result<Vec<u8>, StoredConfigurationError> {
    let state = StoredConfiguration {
        version: VERSION,
        functions,
        drives,
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
    for declared in functions {
        match FunctionDeclaration::from_declared(declared.clone()) {
            Ok(function) => configuration.functions.push(function),
            Err(error) => {
                let unreadable = UnreadableDeclaration { declared, error };
                configuration.unreadable.push(unreadable);
            }
        }
    }
    let drives = drives.into_iter().map(DriveDeclaration::from_declared);
    configuration.drives = drives.collect::<Result<_, _>>()?;
    let rules = rules.iter().map(|rule| rule.parse());
    configuration.rules = rules.collect::<Result<_, _>>()?;
    Ok(configuration)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use nvme_lease::range::ByteRange;

    use super::super::declarations::AssignedLease;
    use super::*;
    use crate::change::DeclarationSource;
    use crate::confinement::FileAccess;

    fn round_trip(configuration: &StartConfiguration) -> StartConfiguration {
        let StartConfiguration {
            functions,
            drives,
            unreadable,
            rules,
            ..
        } = configuration;
        let functions = functions.iter().map(FunctionDeclaration::to_resolved);
        let unreadable = unreadable.iter().map(|other| other.declared.clone());
        let functions = functions.chain(unreadable).collect();
        let drives = drives.iter().map(DriveDeclaration::to_resolved).collect();
        let bytes = encode(functions, drives, rules).unwrap();
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
        second.declared.source = DeclarationSource::CommandLine;
        second.declared.lease = Some(AssignedLease {
            id: "b".to_owned(),
            range: ByteRange::new(0, 1 << 20).unwrap(),
        });
        let drive = "path=memory:2G,lba=4096".parse().unwrap();
        let drive = DriveDeclaration::parse(DeclarationSource::File, drive).unwrap();
        let configuration = StartConfiguration {
            functions: vec![first, second],
            drives: vec![drive],
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
        assert_eq!(
            configuration.unreadable[0].declared.text.get("socket"),
            Some("/a")
        );
        let next = round_trip(&configuration);
        assert_eq!(
            next.unreadable[0].declared,
            configuration.unreadable[0].declared
        );
        let later = br#"{"configuration":2,"functions":5}"#;
        assert!(matches!(
            decode(later),
            Err(StoredConfigurationError::Version(2))
        ));
    }
}

//! The files that a server uses, as Landlock rules.

use std::fs;
use std::path::{self, Path};

use nvme_lease::backing_id::BackingId;
use nvme_lease::make_state_dir;
use nvme_models::DriveProfile;
use nvme_mpt_vmm::drives::{DrivePath, is_block_device};
use nvme_mpt_vmm::options::{FunctionOptions, ServerFunctionOptions};

use super::declarations::{
    AddedFunctionsFile, ConfigFileContents, StartConfiguration, option_files,
};
use super::{ServeError, ServeOptions, make_control_dir};
use crate::confinement::{FileAccess, FileRule, FileRules};
use crate::metrics::MetricsAddress;

/// Returns the Landlock rules for a server; `None` if Landlock is not requested. Creates the server's directories first, since
/// a rule needs an existing path.
pub(super) fn server_rules(
    options: &ServeOptions,
    configuration: &StartConfiguration,
) -> Result<Option<FileRules>, ServeError> {
    let ServeOptions {
        functions,
        drives,
        argument_errors: _,
        file,
        data: _,
        memory_limit: _,
        state_dir,
        control,
        vmm_socket: _,
        metrics,
        confinement,
        option_files: described,
    } = options;
    if !confinement.landlock {
        return Ok(None);
    }
    make_state_dir(state_dir).map_err(ServeError::StateDir)?;
    make_control_dir(control)?;
    let mut needed = vec![
        FileRule::new(state_dir, FileAccess::WRITE),
        parent_dir_rule(control, FileAccess::WRITE),
    ];
    let mut port = None;
    match &metrics.address {
        Some(MetricsAddress::Tcp(address)) => port = Some(address.port()),
        Some(MetricsAddress::Unix(path)) => needed.push(parent_dir_rule(path, FileAccess::WRITE)),
        None => {}
    }
    let file_of_metrics = metrics.file.iter();
    needed.extend(file_of_metrics.map(|path| parent_dir_rule(path, FileAccess::WRITE)));
    needed.extend(
        functions
            .iter()
            .flat_map(|given| function_rules(&given.options)),
    );
    needed.extend(
        drives
            .iter()
            .flat_map(|given| drive_rules(&given.options.drive)),
    );
    needed.extend(described.iter().map(|path| option_file_rule(path)));
    for function in &configuration.functions {
        needed.extend(function_rules(&function.options));
        let described = option_files(&function.declared.text);
        needed.extend(described.iter().map(|path| option_file_rule(path)));
    }
    let held = configuration.drives.iter();
    needed.extend(held.flat_map(|held| drive_rules(&held.options.drive)));

    let mut rules = confinement.rules.clone();
    rules.extend(configuration.rules.iter().cloned());
    if let Some(file) = file {
        let file = path::absolute(file).unwrap_or_else(|_| file.clone());
        // The symbolic link may be replaced later, so rules cover the directories of the link and of its target.
        let linked = fs::canonicalize(&file);
        let files = std::iter::once(file.clone()).chain(linked);
        needed.extend(files.map(|file| parent_dir_rule(&file, FileAccess::READ)));
        // A later reload may serve functions that the file names and the stored configuration does not, so the files of these
        // functions get rules, too. The file may be invalid by now, which is no error here.
        if let Ok(file) = ConfigFileContents::read(&file) {
            let functions = file.functions.iter();
            needed.extend(functions.flat_map(|declaration| function_rules(&declaration.options)));
            let drives = file.drives.iter();
            needed.extend(drives.flat_map(|given| drive_rules(&given.options.drive)));
            needed.extend(file.option_files.iter().map(|path| option_file_rule(path)));
            let known = configuration.rules.iter();
            let is_known = |rule: &FileRule| known.clone().any(|other| other == rule);
            rules.extend(file.rules.into_iter().filter(|rule| !is_known(rule)));
        }
    }
    let added = AddedFunctionsFile::for_control_socket(control).read();
    for text in added.unwrap_or_default() {
        needed.extend(
            option_files(&text)
                .iter()
                .map(|path| option_file_rule(path)),
        );
        // Options that cannot be parsed give no rules. The function is listed as failed later.
        let function = text.to_string().parse::<ServerFunctionOptions>();
        needed.extend(function.iter().flat_map(function_rules));
    }
    Ok(Some(FileRules::new(needed, port).with_rules(rules)))
}

/// Returns the rules for a function's files.
pub(super) fn function_rules(options: &ServerFunctionOptions) -> Vec<FileRule> {
    let mut needed = drive_rules(&options.function);
    needed.push(parent_dir_rule(&options.socket, FileAccess::WRITE));
    needed
}

/// Returns the rules for a drive's files.
pub(super) fn drive_rules(options: &FunctionOptions) -> Vec<FileRule> {
    match &options.path {
        DrivePath::File(file) => {
            // The target of a symbolic link may be in another directory.
            let file = &fs::canonicalize(file).unwrap_or_else(|_| file.clone());
            // A drive model stores its state in a file beside the drive. The file is replaced through a temporary file.
            let profile = options.drive.profile.as_deref();
            let has_file =
                profile.is_some_and(DriveProfile::has_state_file) && !is_block_device(file);
            let first = match has_file {
                true => parent_dir_rule(file, FileAccess::WRITE),
                false => FileRule::new(file, FileAccess::WRITE),
            };
            // A loop device's backing file is opened as well, to lock it.
            let backing_id = BackingId::from_path(file);
            let below = backing_id.map(|backing_id| backing_id.files().to_vec());
            let below = below.unwrap_or_default().into_iter();
            let below = below.map(|below| FileRule::new(below.path, FileAccess::WRITE));
            std::iter::once(first).chain(below).collect()
        }
        DrivePath::Pci(_) => ["/dev/vfio", "/dev/iommu"]
            .map(|path| FileRule::new(path, FileAccess::WRITE))
            .to_vec(),
        // All other drives are in memory. A new kind of drive with files must be added here.
        _ => Vec::new(),
    }
}

/// Returns the rule for a file named by `profile=` or `faults=`.
pub(super) fn option_file_rule(path: &Path) -> FileRule {
    parent_dir_rule(path, FileAccess::READ)
}

/// Returns the rule for a file that is created or replaced. The rule names the file's directory, since creating a file
/// needs access to the directory.
fn parent_dir_rule(path: &Path, access: FileAccess) -> FileRule {
    let dir = path.parent().filter(|dir| *dir != Path::new(""));
    FileRule::new(dir.unwrap_or(Path::new(".")), access)
}

#[cfg(test)]
mod tests {
    use nvme_mpt_tests::not_checked::not_checked;

    use super::*;

    /// Returns the file rule for the drive itself.
    fn rule(drive: &Path, profile: &str) -> FileRule {
        let text = format!("path={},id=a,profile={profile}", drive.display());
        let options: FunctionOptions = text.parse().unwrap();
        drive_rules(&options).swap_remove(0)
    }

    #[test]
    fn only_a_model_on_a_file_needs_access_to_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let dir = fs::canonicalize(dir.path()).unwrap();
        let image = dir.join("drive.img");
        for (profile, path) in [
            ("nvm", &image),
            ("kv", &image),
            ("ssd", &dir),
            ("zns", &dir),
        ] {
            let expected = FileRule::new(path, FileAccess::WRITE);
            assert_eq!(rule(&image, profile), expected, "{profile}");
        }
    }

    #[test]
    fn a_model_on_a_block_device_needs_only_the_device() {
        let devices = fs::read_dir("/dev").unwrap();
        let mut devices = devices.map(|entry| entry.unwrap().path());
        let Some(device) = devices.find(|path| is_block_device(path)) else {
            not_checked("there is no block device");
            return;
        };
        let device = fs::canonicalize(device).unwrap();
        for profile in ["nvm", "ssd"] {
            let expected = FileRule::new(&device, FileAccess::WRITE);
            assert_eq!(rule(&device, profile), expected, "{profile}");
        }
    }
}

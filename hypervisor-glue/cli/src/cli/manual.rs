//! `nvme-mpt man` and `nvme-mpt completions`: generate manual pages and shell completions from the command line definition.

use std::error::Error;
use std::fs;
use std::io;
use std::path::PathBuf;

use clap::{Args, CommandFactory};
use clap_complete::Shell;
use thiserror::Error;

use super::CommandLine;

/// Write the manual pages of all commands into a directory
#[derive(Args, Debug)]
pub(super) struct ManArgs {
    /// The directory, such as /usr/local/share/man/man1. It is created if it does not exist
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

/// Print the completions for a shell
///
/// In bash: source <(nvme-mpt completions bash)
#[derive(Args, Debug)]
pub(super) struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

/// Error of writing manual pages.
#[derive(Debug, Error)]
#[error("Cannot write manual pages into {}", dir.display())]
struct ManError {
    /// The output directory.
    dir: PathBuf,
    /// Cause.
    source: io::Error,
}

impl ManArgs {
    pub(super) fn run(self) -> Result<(), Box<dyn Error>> {
        let Self { folder } = self;
        let pages = fs::create_dir_all(&folder);
        let pages = pages.and_then(|()| clap_mangen::generate_to(CommandLine::command(), &folder));
        pages.map_err(|source| {
            ManError {
                dir: folder,
                source,
            }
            .into()
        })
    }
}

impl CompletionsArgs {
    pub(super) fn run(self) -> Result<(), Box<dyn Error>> {
        let mut script = Vec::new();
        clap_complete::generate(
            self.shell,
            &mut CommandLine::command(),
            "nvme-mpt",
            &mut script,
        );
        if self.shell == Shell::Bash {
            // clap_complete 4.6.11 writes the subcommands of a hyphenated program name in two ways, so that none is found.
            // Unify them.
            let text = String::from_utf8(script)?;
            script = text.replace("nvme__subcmd__mpt__", "nvme__mpt__").into();
        }
        // The script is written here, because clap_complete would panic on a closed pipe.
        Ok(io::Write::write_all(&mut io::stdout(), &script)?)
    }
}

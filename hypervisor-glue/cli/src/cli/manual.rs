//! `nvme-mpt man` and `completions`: manual pages and completions, made of the command line itself.

use std::error::Error;
use std::fs;
use std::io;
use std::path::PathBuf;

use clap::{Args, CommandFactory};
use clap_complete::Shell;
use thiserror::Error;

use super::Cli;

/// Write the manual pages of all commands into a folder
#[derive(Args, Debug)]
pub(super) struct Man {
    /// The folder, such as /usr/local/share/man/man1. It is made if it is absent
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

/// Print the completions for a shell
///
/// In bash: source <(nvme-mpt completions bash)
#[derive(Args, Debug)]
pub(super) struct Completions {
    /// The shell
    shell: Shell,
}

/// Manual pages cannot be written.
#[derive(Debug, Error)]
#[error("Cannot write manual pages into {}", folder.display())]
struct ManError {
    /// Their folder.
    folder: PathBuf,
    /// Why.
    source: io::Error,
}

impl Man {
    pub(super) fn run(self) -> Result<(), Box<dyn Error>> {
        let Self { folder } = self;
        let pages = fs::create_dir_all(&folder);
        let pages = pages.and_then(|()| clap_mangen::generate_to(Cli::command(), &folder));
        pages.map_err(|source| ManError { folder, source }.into())
    }
}

impl Completions {
    pub(super) fn run(self) -> Result<(), Box<dyn Error>> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "nvme-mpt", &mut script);
        if self.shell == Shell::Bash {
            // clap_complete 4.6.11 names the subcommands of a program with a hyphen in two ways, and finds none of them.
            let text = String::from_utf8(script)?;
            script = text.replace("nvme__subcmd__mpt__", "nvme__mpt__").into();
        }
        // A reader that has seen enough is no error of the generator's.
        Ok(io::Write::write_all(&mut io::stdout(), &script)?)
    }
}

//! `nvme-mpt upgrade`: another process takes this server's place, and VMs notice a pause alone.

use std::env;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use nvme_mpt::memory::system;

use super::roster::Roster;
use crate::function_thread::FunctionHandle;
use crate::kept::FIRST_STAGE;
use crate::kept::predecessor::{Successor, UpgradeError};

/// End of the path of a program that was replaced or removed, as the kernel reports it.
const DELETED: &[u8] = b" (deleted)";

impl Roster {
    /// Hands all functions over to a new process, and returns its number. Then this process has to end at once.
    pub(super) fn upgrade(&self, binary: Option<&Path>) -> Result<u32, UpgradeError> {
        let keeping = self.terms.keeping.as_ref().ok_or(UpgradeError::NoKeeper)?;
        let program = match binary {
            Some(binary) => binary.to_owned(),
            None => own_program()?,
        };
        let mut command: Vec<OsString> = vec![program.into()];
        command.extend(env::args_os().skip(1));
        let ends = || self.terms.stop.load(Ordering::Relaxed);
        let mut successor = Successor::start(keeping, &[FIRST_STAGE.into()], &command)?;
        successor.await_ready(ends)?;
        let number = successor.number();
        let offers = self.offers.iter();
        let handles: Vec<_> = offers.map(|offer| offer.thread.handle()).collect();
        let rested = system::host_time();
        let resting = FunctionHandle::rest(&handles).map_err(|(place, reason)| {
            let id = self.offers[place].entry.id.clone();
            UpgradeError::Function { id, reason }
        })?;
        if ends() {
            return Err(UpgradeError::Ending);
        }
        successor.hand_over(keeping, rested)?;
        // They rest until the process has ended.
        std::mem::forget(resting);
        Ok(number)
    }
}

/// Returns the path of this program, also if another one lies there by now.
fn own_program() -> Result<PathBuf, UpgradeError> {
    let program = env::current_exe()?.into_os_string();
    let path = program.as_bytes();
    let path = path.strip_suffix(DELETED).unwrap_or(path).to_owned();
    Ok(OsString::from_vec(path).into())
}

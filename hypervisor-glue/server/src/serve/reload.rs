//! `nvme-mpt reload`: applies the configuration file. After an error, all functions are served as they were before the
//! reload.

use std::path::PathBuf;
use std::sync::Arc;

use nvme_mpt::Drive;
use nvme_mpt_vmm::drives::DrivePath;
use nvme_mpt_vmm::report;

use super::declarations::resolve_path;
use super::declarations::{ConfigFileContents, DriveDeclaration, FunctionDeclaration};
use super::error::ChangeError;
use super::registered_function::RegisteredFunction;
use super::registry::{FunctionRegistry, ReleasedDrives, find_conflict, function_error};
use crate::change::{DeclarationSource, ReloadResult};
use crate::function_thread::FunctionHandle;

impl FunctionRegistry {
    /// Applies the file. Unchanged functions are not interrupted.
    pub(super) fn reload(&mut self, force: bool) -> Result<ReloadResult, ChangeError> {
        let file = self.context.file.as_ref().ok_or(ChangeError::NoFile)?;
        // The file's Landlock rules are ignored, since the rules of a running process cannot change.
        let ConfigFileContents {
            functions, drives, ..
        } = ConfigFileContents::read(file)?;
        let mut wanted: Vec<FunctionDeclaration> = functions
            .into_iter()
            .map(|declaration| self.resolve_declaration(declaration))
            .collect();
        self.check_conflicts(&wanted)?;

        // In the loop, `wanted` loses the functions that are served unchanged, and `going` gets the functions that end.
        let mut reloaded = ReloadResult::default();
        let mut going = Vec::new();
        let mut limited = Vec::new();
        let mut grown = Vec::new();
        for (place, registered_function) in self.functions.iter().enumerate() {
            if registered_function.declaration.declared.source != DeclarationSource::File {
                continue;
            }
            let present = &registered_function.declaration.options;
            let rates = present.function.backend.rates;
            let stays = wanted.iter().position(|other| other.is_same_as(present));
            let Some(stays) = stays.filter(|_| !registered_function.is_quarantined()) else {
                going.push(place);
                continue;
            };
            let stays = wanted.remove(stays);
            // A reload never shrinks a lease.
            let requested_size = stays.options.function.size;
            let larger = requested_size.filter(|size| registered_function.needs_growth(*size));
            grown.extend(larger.map(|size| (place, size)));
            if stays.options.function.backend.rates != rates {
                reloaded.limited.push(registered_function.entry.id.clone());
                limited.push(stays);
            } else if larger.is_none() {
                reloaded.unchanged += 1;
            }
        }
        let abandoned = self.find_abandoned(&going, &wanted, &drives);
        if !force && !abandoned.is_empty() {
            return Err(ChangeError::Abandoned(abandoned));
        }
        // Leases grow before any function ends, as growing may fail. A larger lease does no harm if a later step fails.
        for (place, size) in grown {
            self.grow(place, size)?;
            reloaded
                .resized
                .push(self.functions[place].entry.id.clone());
        }
        for place in &going {
            let RegisteredFunction { entry, .. } = &self.functions[*place];
            let again = wanted.iter().any(|new| new.options.socket == entry.socket);
            let names = match again {
                true => &mut reloaded.changed,
                false => &mut reloaded.removed,
            };
            names.push(entry.id.clone());
        }
        let functions = self.remove_functions(&going, force)?;
        let sockets: Vec<PathBuf> = functions
            .iter()
            .map(|declaration| declaration.options.socket.clone())
            .collect();
        let released = self.release_declared(DeclarationSource::File);
        let failed = self.take_failed(DeclarationSource::File);
        let unchanged_count = self.functions.len();
        let made = self.open_held(drives).and_then(|()| self.serve_all(wanted));
        if let Err(error) = made {
            self.return_failed(failed);
            let error = self.undo_reload(error, released, functions);
            self.publish();
            return Err(error);
        }
        drop(released);
        self.forget_unlisted();
        for id in abandoned {
            if self.context.leases.end_lease(&id).is_some() {
                reloaded.removed.push(id);
            }
        }
        self.close_unused();
        for declaration in limited {
            let function = &declaration.options;
            let same = |registered_function: &&mut RegisteredFunction| {
                registered_function.entry.socket == function.socket
            };
            if let Some(registered_function) = self.functions.iter_mut().find(same) {
                let text = declaration.declared.text.clone();
                registered_function.declaration.declared.text = text;
                registered_function.set_rates(function.function.backend.rates);
            }
        }
        let made = self.functions.iter().skip(unchanged_count);
        let new =
            made.filter(|registered_function| !sockets.contains(&registered_function.entry.socket));
        reloaded.added = new
            .map(|registered_function| registered_function.entry.id.clone())
            .collect();
        self.publish();
        Ok(reloaded)
    }

    /// Returns the leases of VMMs on drives that a reload would close: the file does not name these drives, and nothing
    /// else keeps them open. The next server would not open these drives either.
    fn find_abandoned(
        &self,
        going: &[usize],
        wanted: &[FunctionDeclaration],
        drives: &[DriveDeclaration],
    ) -> Vec<String> {
        let drives = drives.iter().map(|held| &held.options.drive);
        let functions = wanted
            .iter()
            .map(|declaration| &declaration.options.function);
        let named = drives.chain(functions).map(|options| &options.path);
        let named: Vec<DrivePath> = named.map(resolve_path).collect();
        let registered_functions = self.functions.iter().enumerate();
        let registered_functions = registered_functions.filter(|(place, _)| !going.contains(place));
        let drives = registered_functions.map(|(_, function)| &function.drive);
        let held = self
            .held_drives
            .iter()
            .filter(|held| held.declaration.declared.source != DeclarationSource::File);
        let used_drives: Vec<&Arc<Drive>> = drives.chain(held.map(|held| &held.drive)).collect();
        let stays = |path: &DrivePath, drive: &Drive| {
            let shares_controller = |used: &&Arc<Drive>| used.shares_controller_with(drive);
            named.contains(path) || used_drives.iter().any(shares_controller)
        };
        let going = self.drives.iter();
        let going = going.filter(|(path, drive)| !stays(path, drive));
        let leases = going.flat_map(|(_, drive)| self.context.leases.ids_on_drive(drive));
        let mut leases: Vec<String> = leases.collect();
        // If several namespaces of one drive are affected, each yields the same leases, so duplicates are removed.
        leases.sort();
        leases.dedup();
        leases
    }

    /// Checks that each socket and id in the file is unique, within the file and among the server's other functions.
    fn check_conflicts(&self, wanted: &[FunctionDeclaration]) -> Result<(), ChangeError> {
        let others = self.functions.iter().map(|function| &function.declaration);
        let others =
            others.filter(|declaration| declaration.declared.source != DeclarationSource::File);
        for (place, new) in wanted.iter().enumerate() {
            let mut others = others.clone().chain(&wanted[..place]);
            if let Some(source) =
                others.find_map(|other| find_conflict(&new.options, &other.options))
            {
                return Err(function_error(new, source));
            }
        }
        Ok(())
    }

    /// Ends the functions at the indices `places`. If one of them cannot end, serves the functions again that have already
    /// ended.
    fn remove_functions(
        &mut self,
        places: &[usize],
        force: bool,
    ) -> Result<Vec<FunctionDeclaration>, ChangeError> {
        if !force {
            self.check_unused(places)?;
        }
        let mut refused = None;
        let mut leaving = places;
        for (index, place) in places.iter().enumerate() {
            // A VMM may have connected since the check above.
            if let Err(error) = self.request_shutdown(*place, force) {
                refused = Some(error);
                leaving = &places[..index];
                break;
            }
        }
        let functions = self.end_functions(leaving);
        match refused {
            None => Ok(functions),
            Some(error) => {
                let error = self.serve_again(error, functions);
                self.publish();
                Err(error)
            }
        }
    }

    /// Checks that no VMM is connected to any function at the indices `places`. Called before any of these functions ends.
    pub(super) fn check_unused(&self, places: &[usize]) -> Result<(), ChangeError> {
        let functions = places.iter().map(|place| &self.functions[*place]);
        let handles: Vec<FunctionHandle> =
            functions.map(|function| function.thread.handle()).collect();
        let stats = FunctionHandle::collect_stats(&handles);
        for place in places {
            let id = &self.functions[*place].entry.id;
            match stats.iter().find(|function_stats| function_stats.id == *id) {
                Some(function_stats) if function_stats.connected => {
                    return Err(ChangeError::Connected(id.clone()));
                }
                Some(_) => {}
                None => return Err(ChangeError::Busy(id.clone())),
            }
        }
        Ok(())
    }

    /// Ends the functions at the indices `places`, which are in ascending order. Returns their declarations.
    fn end_functions(&mut self, places: &[usize]) -> Vec<FunctionDeclaration> {
        let mut functions = Vec::new();
        for place in places.iter().rev() {
            let function = self.functions.remove(*place);
            functions.push(function.declaration.clone());
            if let Some(failure) = function.end() {
                log::error!("{failure}");
            }
        }
        functions.reverse();
        functions
    }

    /// Undoes a reload that failed with `error`.
    fn undo_reload(
        &mut self,
        error: ChangeError,
        released: ReleasedDrives,
        functions: Vec<FunctionDeclaration>,
    ) -> ChangeError {
        self.release_declared(DeclarationSource::File);
        self.return_declared(released);
        self.serve_again(error, functions)
    }

    /// After a reload failed with `error`, serves the functions again that had ended for the reload. Then closes unused
    /// drives; until then, these functions find their drives open.
    fn serve_again(
        &mut self,
        error: ChangeError,
        functions: Vec<FunctionDeclaration>,
    ) -> ChangeError {
        let mut failed = Vec::new();
        for declaration in functions {
            if let Err(error) = self.serve_all(vec![declaration]) {
                failed.push(report::chain(&error));
            }
        }
        self.close_unused();
        match failed.is_empty() {
            true => error,
            false => ChangeError::NotRestored {
                error: Box::new(error),
                failed,
            },
        }
    }
}
